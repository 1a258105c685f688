/* files.h -- result files that appear whole or not at all
 *
 *     #define PROGRAM "compare"                              the name in sentences, before the first include
 *
 *     files_begin(&all);                                     signals wait
 *     files_folder(&all, "out/traces");                      made if it is not there
 *     files_spare("out/numbers.json", "--data", "text");     not a file that the program reads
 *     files_reserve(&all, "out/numbers.json");               early, then abandoned: can it be written?
 *     FILE *f = files_open(&all, "out/numbers.json");        writes out/numbers.json.tmp.PID
 *     files_close(&all, f);
 *     files_commit(&all);    or files_abandon(&all);         rename all; or leave nothing behind
 *
 * Each that may fail returns 0, or prints a sentence and returns -1 (files_open: NULL).
 */
#ifndef COMMON_FILES_H
#define COMMON_FILES_H

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#ifndef PROGRAM
#error "define PROGRAM, the name in sentences, before this"
#endif

enum { FILES_MAX = 192, FOLDERS_MAX = 32, FILES_PATH = 4096 };

typedef struct files {
    char final[FILES_MAX][FILES_PATH], temporary[FILES_MAX][FILES_PATH];
    char folders[FOLDERS_MAX][FILES_PATH]; /* made by us */
    char old[FILES_PATH + 32];
    int n, folders_n, begun, had_old[FILES_MAX];
    sigset_t waiting, ending; /* signals that wait; those of them that would end the program at once */
} files;

static inline int files_fail(const char *path, const char *what)
{
    fprintf(stderr, PROGRAM ": %s: %s: %s\n", path, what, strerror(errno));
    return -1;
}

static inline int files_path(char *out, const char *folder, const char *name, const char *ending)
{
    int n = snprintf(out, FILES_PATH, "%s/%s%s", folder, name, ending);
    if (n > 0 && n < FILES_PATH) return 0;
    errno = ENAMETOOLONG;
    return files_fail(folder, "cannot be written");
}

/* Makes the folders above a path that are not there; files_abandon removes them, if all is not NULL. 0, or -1 with
 * errno. */
static inline int files_parents(files *all, const char *path)
{
    char above[FILES_PATH];
    size_t i;
    for (i = 1; path[0] != '\0' && path[i] != '\0' && i < sizeof above; ++i) {
        if (path[i] != '/') continue;
        memcpy(above, path, i);
        above[i] = '\0';
        if (mkdir(above, 0777) != 0) {
            if (errno != EEXIST) return -1;
        } else if (all != NULL) {
            errno = ENAMETOOLONG;
            if (all->folders_n == FOLDERS_MAX) return -1;
            strcpy(all->folders[all->folders_n++], above);
        }
    }
    return 0;
}

static inline int files_folder(files *all, const char *path)
{
    struct stat about;
    if (files_parents(all, path) != 0) return files_fail(path, "the folder cannot be made");
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

/* From here to commit or abandon, a signal that would end the program waits. One that the program handles itself does
 * not keep the files from being written. */
static inline void files_begin(files *all)
{
    static const int ends[] = {SIGHUP, SIGINT, SIGTERM};
    struct sigaction action;
    size_t i;
    sigemptyset(&all->waiting);
    sigemptyset(&all->ending);
    for (i = 0; i < sizeof ends / sizeof *ends; ++i) {
        if (sigaction(ends[i], NULL, &action) != 0 || action.sa_handler == SIG_IGN) continue;
        sigaddset(&all->waiting, ends[i]);
        if (action.sa_handler == SIG_DFL) sigaddset(&all->ending, ends[i]);
    }
    sigprocmask(SIG_BLOCK, &all->waiting, NULL);
    all->begun = 1;
}

static inline void files_end(files *all)
{
    all->n = all->folders_n = 0;
    if (all->begun) sigprocmask(SIG_UNBLOCK, &all->waiting, NULL);
    all->begun = 0;
}

static inline int files_signalled(const files *all)
{
    sigset_t pending;
    int i;
    sigpending(&pending);
    for (i = 1; i <= SIGTERM; ++i)
        if (sigismember(&all->ending, i) == 1 && sigismember(&pending, i) == 1) return 1;
    return 0;
}

/* 0, or why path must not be replaced. */
static inline int files_obstacle(const files *all, const char *path)
{
    struct stat about;
    if (files_signalled(all)) return EINTR;
    if (stat(path, &about) != 0 || S_ISREG(about.st_mode)) return 0;
    return S_ISDIR(about.st_mode) ? EISDIR : EINVAL; /* a rename would replace a device or a pipe */
}

static inline int files_same(const char *one, const char *other)
{
    struct stat a, b;
    return stat(one, &a) == 0 && stat(other, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* What a rename is to replace: where path is a link, what it leads to, there or not. 0, or errno's why. */
static inline int files_target(char out[FILES_PATH], const char *path)
{
    char to[FILES_PATH];
    const char *slash;
    size_t at;
    ssize_t n;
    int hops;
    if (strlen(path) >= FILES_PATH) return ENAMETOOLONG;
    strcpy(out, path);
    for (hops = 0; hops < 40; ++hops) {
        n = readlink(out, to, sizeof to);
        if (n < 0) return 0; /* no link */
        slash = to[0] == '/' ? NULL : strrchr(out, '/');
        at = slash != NULL ? (size_t)(slash + 1 - out) : 0;
        if (at + (size_t)n >= FILES_PATH) return ENAMETOOLONG;
        memcpy(out + at, to, (size_t)n);
        out[at + (size_t)n] = '\0';
    }
    return ELOOP;
}

static inline FILE *files_open(files *all, const char *path)
{
    char *temporary = all->temporary[all->n], target[FILES_PATH];
    FILE *f;
    int n;
    errno = files_target(target, path);
    if (errno != 0) return files_fail(path, "cannot be written"), (FILE *)NULL;
    n = snprintf(temporary, FILES_PATH, "%s.tmp.%ld", target, (long)getpid());
    errno = all->n == FILES_MAX || n < 0 || n >= FILES_PATH ? ENAMETOOLONG : files_obstacle(all, path);
    f = errno == 0 ? fopen(temporary, "wbx") : NULL;
    if (f == NULL) {
        if (errno == EEXIST)
            fprintf(stderr, PROGRAM ": %s would be both of two results (or a killed run has left %s)\n", path,
                    temporary);
        else
            files_fail(path, "cannot be written");
        return NULL;
    }
    strcpy(all->final[all->n++], target);
    return f;
}

static inline int files_close(files *all, FILE *f)
{
    int bad = ferror(f);
    if (fclose(f) != 0) bad = 1;
    return bad ? files_fail(all->final[all->n - 1], "cannot be written to the end") : 0;
}

/* A result must not replace what the program reads. */
static inline int files_spare(const char *path, const char *flag, const char *read)
{
    if (!files_same(path, read)) return 0;
    fprintf(stderr, PROGRAM ": %s would replace the file of %s\n", path, flag);
    return -1;
}

/* Finds out before hours of work what would fail after them: all names are taken together, then abandoned. */
static inline int files_reserve(files *all, const char *path)
{
    FILE *f = files_open(all, path);
    if (f == NULL) return -1;
    fclose(f);
    return 0;
}

/* 0, or -1 with the sentence out: it is still there. */
static inline int files_remove(const char *path)
{
    return remove(path) == 0 || errno == ENOENT ? 0 : files_fail(path, "cannot be removed");
}

/* What was begun is gone; a folder that something else has come into stays. */
static inline int files_abandon(files *all)
{
    int bad = 0;
    while (all->n > 0) bad |= files_remove(all->temporary[--all->n]);
    while (all->folders_n > 0) {
        const char *const folder = all->folders[--all->folders_n];
        if (rmdir(folder) != 0 && errno != ENOTEMPTY && errno != EEXIST && errno != ENOENT)
            bad = files_fail(folder, "cannot be removed");
    }
    files_end(all);
    return bad;
}

/* The name under which an older file waits until all new ones are in place; as long as the temporary one. */
static inline const char *files_old(files *all, int i)
{
    sprintf(all->old, "%s.old.%ld", all->final[i], (long)getpid());
    return all->old;
}

/* Puts file i in its place. */
static inline int files_replace(files *all, int i)
{
    all->had_old[i] = rename(all->final[i], files_old(all, i)) == 0;
    if (!all->had_old[i] && errno != ENOENT) return -1;
    if (rename(all->temporary[i], all->final[i]) == 0) return 0;
    if (all->had_old[i]) rename(files_old(all, i), all->final[i]);
    return -1;
}

static inline int files_commit(files *all)
{
    int i, bad = 0;
    for (i = 0; i < all->n; ++i) {
        if (files_replace(all, i) == 0) continue;
        files_fail(all->final[i], "cannot be written");
        while (i-- > 0)
            if (all->had_old[i])
                rename(files_old(all, i), all->final[i]);
            else
                remove(all->final[i]);
        files_abandon(all);
        return -1;
    }
    for (i = 0; i < all->n; ++i)
        if (all->had_old[i]) bad |= files_remove(files_old(all, i));
    files_end(all);
    return bad;
}

/* ---- NumPy's format, version 1.0 ---- */

/* A matrix [rows][cols] of f32, in C order. */
static inline int files_npy(files *all, const char *path, const float *data, int64_t rows, int64_t cols)
{
    char head[192];
    const int one = 1;
    size_t size = (size_t)(rows * cols), length;
    int n;
    FILE *f;
    f = files_open(all, path);
    if (f == NULL) return -1;
    /* 10 bytes of magic, version and length, then text; blanks end it with a newline at a multiple of 64
     * bytes. */
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
