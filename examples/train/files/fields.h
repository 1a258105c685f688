/* fields.h -- the numbers of a struct by a table: how a file and a flag call them, how they are written and compared
 *
 *     static const field rows[] = {{"hidden_size", "model-dim", FLAG_WHOLE, offsetof(llama_config, dim), 0}, ...};
 *     const field *f = fields_differ(rows, n, &a, &b);            NULL: they are the same
 *     field_text(text, f, &a);
 */
#ifndef LLAMA_FIELDS_H
#define LLAMA_FIELDS_H

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../common/options.h"

/* field
 *   key       its name in a file; NULL: it follows from others there
 *   flag      the row of options.h, whose range holds in a file too
 *   kind      WHOLE int64_t, REAL double; INT, SWITCH and CHOICE int; TEXT bytes
 *   opposite  the flag says the contrary
 *   many      an array of so many; 0: one
 *   used      bits: which kinds of what the struct is have the key, and needed: must have it; 0: said elsewhere
 */
typedef struct field {
    const char *key, *flag;
    flag_kind kind;
    size_t at;
    int opposite, many;
    unsigned used, needed;
} field;

enum { FIELD_TEXT = 40 };

static inline size_t field_bytes(const field *f)
{
    const size_t one = f->kind == FLAG_WHOLE  ? sizeof(int64_t)
                       : f->kind == FLAG_REAL ? sizeof(double)
                       : f->kind == FLAG_TEXT ? 1
                                              : sizeof(int);
    return f->many > 0 ? one * (size_t)f->many : one;
}

/* A number of any kind but REAL, and the reverse. */
static inline int64_t field_whole(flag_kind kind, const void *at)
{
    return kind == FLAG_WHOLE ? *(const int64_t *)at : *(const int *)at;
}

static inline void field_set(flag_kind kind, void *at, int64_t number)
{
    if (kind == FLAG_WHOLE)
        *(int64_t *)at = number;
    else
        *(int *)at = (int)number;
}

/* As JSON has it, of an array the first. Of a real decimals that give it back, with a point or an exponent: Python is
 * to read a float. */
static inline const char *field_text(char out[FIELD_TEXT], const field *f, const void *of)
{
    const void *at = (const char *)of + f->at;
    int digits;
    if (f->kind == FLAG_SWITCH) return *(const int *)at ? "true" : "false";
    if (f->kind == FLAG_TEXT) return "another list";
    if (f->kind != FLAG_REAL) {
        snprintf(out, FIELD_TEXT, "%" PRId64, field_whole(f->kind, at));
        return out;
    }
    for (digits = 15; digits <= 17; ++digits) {
        snprintf(out, 32, "%.*g", digits, *(const double *)at);
        if (strtod(out, NULL) == *(const double *)at) break;
    }
    if (strpbrk(out, ".e") == NULL) strcat(out, ".0");
    return out;
}

/* The first in which two structs are not the same to the byte; NULL: none. */
static inline const field *fields_differ(const field *rows, int n, const void *a, const void *b)
{
    int i;
    for (i = 0; i < n; ++i)
        if (memcmp((const char *)a + rows[i].at, (const char *)b + rows[i].at, field_bytes(&rows[i])) != 0)
            return &rows[i];
    return NULL;
}

#endif
