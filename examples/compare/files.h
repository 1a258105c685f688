/* files.h -- result files that appear whole or not at all
 *
 *     files_folder(&all, "out/traces");                      made if it is not there
 *     files_reserve(&all, "out/numbers.json");               early: can it be written?
 *     FILE *f = files_open(&all, "out/numbers.json");        writes out/numbers.json.tmp.PID
 *     files_close(&all, f);
 *     files_commit(&all);    or files_abandon(&all);         rename all; or leave nothing behind
 *
 * Each returns 0, or prints a sentence and returns -1 (files_open: NULL).
 */
#ifndef COMPARE_FILES_H
#define COMPARE_FILES_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { FILES_MAX = 64, FOLDERS_MAX = 8, FILES_PATH = 4096 };

typedef struct files {
    char final[FILES_MAX][FILES_PATH], temporary[FILES_MAX][FILES_PATH];
    char folders[FOLDERS_MAX][FILES_PATH]; /* made by us */
    int n, folders_n;
} files;

static int files_fail(const char *path, const char *what)
{
    fprintf(stderr, "compare: %s: %s: %s\n", path, what, strerror(errno));
    return -1;
}

static int files_path(char *out, const char *folder, const char *name, const char *ending)
{
    int n = snprintf(out, FILES_PATH, "%s/%s%s", folder, name, ending);
    if (n > 0 && n < FILES_PATH) return 0;
    errno = ENAMETOOLONG;
    return files_fail(folder, "cannot be written");
}

static int files_folder(files *all, const char *path)
{
    struct stat about;
    if (strlen(path) >= FILES_PATH || all->folders_n == FOLDERS_MAX) {
        errno = ENAMETOOLONG;
        return files_fail(path, "the folder cannot be made");
    }
    if (mkdir(path, 0777) == 0) {
        strcpy(all->folders[all->folders_n++], path);
        return 0;
    }
    if (errno != EEXIST) return files_fail(path, "the folder cannot be made");
    if (stat(path, &about) != 0) return files_fail(path, "the folder cannot be read");
    if (S_ISDIR(about.st_mode)) return 0;
    errno = ENOTDIR;
    return files_fail(path, "is there, but is no folder");
}

static FILE *files_open(files *all, const char *path)
{
    char *temporary = all->temporary[all->n];
    struct stat about;
    FILE *f;
    int n = snprintf(temporary, FILES_PATH, "%s.tmp.%ld", path, (long)getpid());
    errno = 0;
    if (all->n == FILES_MAX || n < 0 || n >= FILES_PATH)
        errno = ENAMETOOLONG;
    else if (stat(path, &about) == 0 && !S_ISREG(about.st_mode))
        errno = S_ISDIR(about.st_mode) ? EISDIR : EINVAL; /* a rename would replace a device or a pipe */
    else
        errno = 0;
    f = errno == 0 ? fopen(temporary, "wbx") : NULL;
    if (f == NULL) {
        files_fail(path, "cannot be written");
        return NULL;
    }
    strcpy(all->final[all->n++], path);
    return f;
}

static int files_close(files *all, FILE *f)
{
    int bad = ferror(f);
    if (fclose(f) != 0) bad = 1;
    return bad ? files_fail(all->final[all->n - 1], "cannot be written to the end") : 0;
}

/* Finds out before hours of work what would fail after them. */
static int files_reserve(files *all, const char *path)
{
    FILE *f = files_open(all, path);
    if (f == NULL) return -1;
    fclose(f);
    remove(all->temporary[--all->n]);
    return 0;
}

static void files_abandon(files *all)
{
    while (all->n > 0) remove(all->temporary[--all->n]);
    while (all->folders_n > 0) rmdir(all->folders[--all->folders_n]);
}

static int files_commit(files *all)
{
    int i;
    for (i = 0; i < all->n; ++i) {
        if (rename(all->temporary[i], all->final[i]) == 0) continue;
        files_fail(all->final[i], "cannot be written");
        while (i-- > 0) remove(all->final[i]);
        files_abandon(all);
        return -1;
    }
    all->n = all->folders_n = 0;
    return 0;
}

/* ---- NumPy's format, version 1.0 ---- */

/* A matrix [rows][cols] of f32, in C order. */
static int files_npy(files *all, const char *folder, const char *name, const float *data, int64_t rows,
                     int64_t cols)
{
    char path[FILES_PATH], head[192];
    const int one = 1;
    size_t size = (size_t)(rows * cols), length;
    int n;
    FILE *f;
    if (files_path(path, folder, name, ".npy") != 0) return -1;
    f = files_open(all, path);
    if (f == NULL) return -1;
    /* 10 bytes of magic, version and length, then text; blanks end it with a newline at a multiple of 64 bytes. */
    n = snprintf(head + 10, sizeof head - 10,
                 "{'descr': '%cf4', 'fortran_order': False, 'shape': (%lld, %lld), }",
                 *(const char *)&one == 1 ? '<' : '>', (long long)rows, (long long)cols);
    length = ((size_t)n + 10 + 1 + 63) / 64 * 64;
    memset(head + 10 + n, ' ', length - 10 - (size_t)n);
    head[length - 1] = '\n';
    memcpy(head, "\x93NUMPY\x01\x00", 8);
    head[8] = (char)((length - 10) & 255);
    head[9] = (char)((length - 10) >> 8);
    fwrite(head, 1, length, f);
    fwrite(data, sizeof *data, size, f);
    return files_close(all, f);
}

#endif
