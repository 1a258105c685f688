/* whole_file.h -- all bytes of a small file, and sentences that begin with a file's path */
#ifndef LLAMA_WHOLE_FILE_H
#define LLAMA_WHOLE_FILE_H

#include <errno.h>
#include <stdlib.h>

#include "../../../upipe/upipe_base.h"
#include "../../common/regular.h"

__attribute__((format(printf, 3, 4))) static inline int llama_config_fail(upipe_err *err, const char *path,
                                                                          const char *format, ...)
{
    char text[208];
    size_t length = strlen(path), most;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    most = sizeof err->text - sizeof ": " - strlen(text);
    if (most > 76) most = 76;
    /* the end of a long path says more than its start */
    upipe_fail(err, UPIPE_ERR_ARG, "%s: %s", length > most ? path + length - most : path, text);
    return -1;
}

/* The same of what is no fault of the file: it cannot be read, or memory is out. */
static inline int llama_config_lost(upipe_err *err, upipe_status s, const char *path, const char *what,
                                    const char *why)
{
    llama_config_fail(err, path, "%s%s", what, why);
    err->status = s;
    return -1;
}

/* The bytes of a whole small file, with a 0 behind them; free() it. NULL with a sentence, whose status is MEMORY,
 * BACKEND where the file cannot be read, or ARG where it is too long. */
static inline char *llama_file(const char *path, size_t most, size_t *bytes, upipe_err *err)
{
    const char *why = NULL;
    int64_t size = 0;
    FILE *f = regular_open(path, &size, &why);
    char *text = NULL, *more;
    size_t n = 0, buf = 0, got;
    errno = 0;
    while (f != NULL && n <= most) {
        if (n == buf) {
            more = (char *)realloc(text, buf * 2 + 4097);
            if (more == NULL) break;
            text = more;
            buf = buf * 2 + 4096;
        }
        got = fread(text + n, 1, buf - n, f);
        n += got;
        if (got == 0) break;
    }
    if (f == NULL || ferror(f))
        llama_config_lost(err, UPIPE_ERR_BACKEND, path,
                          "cannot be read: ", f == NULL ? why : strerror(errno));
    else if (n > most)
        llama_config_fail(err, path, "is longer than %zu bytes", most);
    else if (text == NULL || !feof(f))
        llama_config_lost(err, UPIPE_ERR_MEMORY, path, "memory is out", "");
    else {
        fclose(f);
        text[n] = 0;
        *bytes = n;
        return text;
    }
    if (f != NULL) fclose(f);
    free(text);
    return NULL;
}

#endif
