/* checkpoint_folder.h -- the names in a folder of checkpoints: whole ones, what a stopped run has left, a lock
 *
 *     llama_lock_init(&lock, "DIR", &err);                 this program's alone, until llama_lock_free or its death
 *     llama_checkpoint_find("DIR", path, &err);            the newest that is whole
 *     llama_tidy("DIR", &err);                             away with leftovers
 *
 * checkpoint.h says what the names mean. Functions return 0, or fill *err with a sentence and return -1.
 */
#ifndef LLAMA_CHECKPOINT_FOLDER_H
#define LLAMA_CHECKPOINT_FOLDER_H

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sys/file.h>
#include <sys/stat.h>

#include "../files/safetensors.h"
#include "../files/whole_file.h"

enum { LLAMA_PATH = 4096 };

/* DIR/.checkpoint-N.tmp and so on. */
static int llama_path(char out[LLAMA_PATH], const char *dir, const char *prefix, int64_t n,
                      const char *suffix, upipe_err *err)
{
    int length = snprintf(out, LLAMA_PATH, "%s/%scheckpoint-%" PRId64 "%s", dir, prefix, n, suffix);
    if (length > 0 && length < LLAMA_PATH) return 0;
    return llama_config_fail(err, dir, "the path is too long");
}

static int llama_path_in(char out[LLAMA_PATH], const char *dir, const char *name, upipe_err *err)
{
    int length = snprintf(out, LLAMA_PATH, "%s/%s", dir, name);
    if (length > 0 && length < LLAMA_PATH) return 0;
    return llama_config_fail(err, dir, "the path is too long");
}

/* Whether a folder has this file of PyTorch's own format; then the sentence is in *err. */
static inline int llama_pickled(const char *dir, const char *name, upipe_err *err)
{
    char path[LLAMA_PATH];
    if (llama_path_in(path, dir, name, err) || access(path, F_OK) != 0) return 0;
    llama_config_fail(
        err, path,
        "is of pickles, which are not read: save_pretrained with safe_serialization=True writes "
        "safetensors");
    return 1;
}

typedef enum llama_entry_kind { LLAMA_WHOLE, LLAMA_TMP, LLAMA_OLD } llama_entry_kind;

typedef struct llama_entry {
    int64_t n;
    llama_entry_kind kind;
} llama_entry;

/* A whole number from 0 on, in plain decimals without needless zeros; -1 if it is none. */
static int64_t llama_decimal(const char *s, const char **end)
{
    int64_t x = 0;
    const char *at = s;
    for (; *at >= '0' && *at <= '9'; ++at)
        if (!upipe_mul(&x, x, 10) || __builtin_add_overflow(x, *at - '0', &x)) return -1;
    *end = at;
    return at == s || (*s == '0' && at != s + 1) ? -1 : x;
}

static int llama_entry_parse(llama_entry *e, const char *name)
{
    int hidden = name[0] == '.';
    const char *rest = "";
    name += hidden;
    if (strncmp(name, "checkpoint-", 11) != 0) return 0;
    e->n = llama_decimal(name + 11, &rest);
    e->kind = !hidden ? LLAMA_WHOLE : strcmp(rest, ".old") == 0 ? LLAMA_OLD : LLAMA_TMP;
    return e->n >= 0 && strcmp(rest, !hidden ? "" : e->kind == LLAMA_OLD ? ".old" : ".tmp") == 0;
}

/* Newest first; of one number .tmp, whole, .old. */
static int llama_entry_order(const void *a, const void *b)
{
    static const int places[] = {1, 0, 2};
    const llama_entry *x = (const llama_entry *)a, *y = (const llama_entry *)b;
    if (x->n != y->n) return x->n < y->n ? 1 : -1;
    return places[x->kind] - places[y->kind];
}

/* All entries of a folder that are ours, in order; free(*out). */
static int llama_list(const char *dir, llama_entry **out, int *count, upipe_err *err)
{
    DIR *d = opendir(dir);
    const struct dirent *one;
    llama_entry e, *more;
    int buf = 0, bad = 0;
    *out = NULL;
    *count = 0;
    if (d == NULL) return llama_config_fail(err, dir, "the folder cannot be read: %s", strerror(errno));
    while (!bad && (errno = 0, one = readdir(d)) != NULL) {
        if (!llama_entry_parse(&e, one->d_name)) continue;
        if (*count == buf) {
            more = (llama_entry *)realloc(*out, (size_t)(buf * 2 + 16) * sizeof e);
            bad = more == NULL ? llama_config_fail(err, dir, "no memory for the list of checkpoints") : 0;
            if (bad) break;
            *out = more;
            buf = buf * 2 + 16;
        }
        (*out)[(*count)++] = e;
    }
    if (!bad && errno != 0)
        bad = llama_config_fail(err, dir, "the folder cannot be read: %s", strerror(errno));
    closedir(d);
    if (bad) {
        free(*out);
        *out = NULL;
        return -1;
    }
    if (*count > 0) qsort(*out, (size_t)*count, sizeof e, llama_entry_order);
    return 0;
}

/* Removes a folder that holds other files too; -1 with errno. */
static int llama_remove_all(const char *path)
{
    char file[LLAMA_PATH];
    const struct dirent *one;
    DIR *d = opendir(path);
    int bad = d == NULL, error;
    while (!bad && (one = readdir(d)) != NULL) {
        if (strcmp(one->d_name, ".") == 0 || strcmp(one->d_name, "..") == 0) continue;
        bad = llama_path_in(file, path, one->d_name, NULL);
        if (bad) errno = ENAMETOOLONG;
        if (!bad) bad = unlink(file) != 0;
    }
    error = errno;
    if (d != NULL) closedir(d);
    errno = error;
    return bad || rmdir(path) != 0 ? -1 : 0;
}

/* Removes a folder and its files, if it is there; a link only itself. The files of a checkpoint without a list of the
 * names, which takes memory: there may be none. */
static int llama_remove(const char *path, upipe_err *err)
{
    static const char *const names[] = {"config.json", "model.safetensors", "optimizer.safetensors"};
    char file[LLAMA_PATH];
    struct stat about;
    size_t i;
    int bad = 0;
    if (lstat(path, &about) != 0) {
        if (errno == ENOENT) return 0;
        return llama_config_fail(err, path, "cannot be removed: %s", strerror(errno));
    }
    if (!S_ISDIR(about.st_mode)) {
        bad = unlink(path) != 0;
    } else {
        for (i = 0; i < sizeof names / sizeof *names && !bad; ++i) {
            if (llama_path_in(file, path, names[i], err)) return -1;
            bad = unlink(file) != 0 && errno != ENOENT;
        }
        if (!bad) bad = rmdir(path) != 0;
        if (bad && (errno == ENOTEMPTY || errno == EEXIST)) bad = llama_remove_all(path) != 0;
    }
    return bad ? llama_config_fail(err, path, "cannot be removed: %s", strerror(errno)) : 0;
}

static int llama_rename(const char *from, const char *to, upipe_err *err)
{
    if (rename(from, to) == 0) return 0;
    return llama_config_fail(err, from, "cannot be renamed: %s", strerror(errno));
}

/* Names in a folder are on the disk. */
static int llama_sync_folder(const char *path, upipe_err *err)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), bad;
    bad = fd < 0 || (fsync(fd) != 0 && errno != EINVAL); /* EINVAL: a filesystem that does not sync folders */
    if (bad) llama_config_fail(err, path, "cannot be brought to the disk: %s", strerror(errno));
    if (fd >= 0) close(fd);
    return bad ? -1 : 0;
}

/* Removes what bears the name of a whole one (prefix "", suffix "") or of one set aside (".", ".old"). */
static int llama_retire(const char *dir, const char *prefix, int64_t n, const char *suffix, upipe_err *err)
{
    char from[LLAMA_PATH], tmp[LLAMA_PATH];
    if (llama_path(from, dir, prefix, n, suffix, err) || llama_path(tmp, dir, ".", n, ".tmp", err)) return -1;
    if (llama_remove(tmp, err) || llama_rename(from, tmp, err)) return -1;
    return llama_remove(tmp, err);
}

/* Clears up after a run that was stopped; one set aside without a successor gets its name back. */
static int llama_tidy(const char *dir, upipe_err *err)
{
    char from[LLAMA_PATH], to[LLAMA_PATH];
    llama_entry *all;
    int count, i, bad = 0;
    if (llama_list(dir, &all, &count, err)) return -1;
    for (i = 0; i < count && !bad; ++i) {
        if (all[i].kind == LLAMA_TMP)
            bad = llama_path(from, dir, ".", all[i].n, ".tmp", err) || llama_remove(from, err);
        else if (all[i].kind == LLAMA_OLD && i > 0 && all[i - 1].n == all[i].n &&
                 all[i - 1].kind == LLAMA_WHOLE)
            bad = llama_retire(dir, ".", all[i].n, ".old", err);
        else if (all[i].kind == LLAMA_OLD)
            bad = llama_path(from, dir, ".", all[i].n, ".old", err) ||
                  llama_path(to, dir, "", all[i].n, "", err) || llama_rename(from, to, err);
    }
    free(all);
    return bad ? -1 : 0;
}

/* A checkpoint's name and its metadata say the same step: the newest is found by its name. Names that are no checkpoint's,
 * and metadata that are missing or cannot be read, say nothing. 0, or -1 with a sentence */
static int llama_fits_name(const char *path, upipe_err *err)
{
    char name[64], file[LLAMA_PATH];
    const char *text, *rest = NULL;
    size_t end = strlen(path), at;
    upipe_err unread;
    llama_entry e;
    st_file f;
    int64_t step;
    while (end > 1 && path[end - 1] == '/') --end;
    for (at = end; at > 0 && path[at - 1] != '/';) --at;
    snprintf(name, sizeof name, "%.*s", (int)(end - at), path + at);
    if (!llama_entry_parse(&e, name)) return 0;
    if (llama_path_in(file, path, "optimizer.safetensors", err)) return -1;
    if (st_open(&f, file, &unread)) return 0;
    text = st_metadata(&f, "step");
    step = text != NULL ? llama_decimal(text, &rest) : -1;
    if (step >= 0 && *rest != 0) step = -1;
    st_close(&f);
    if (step < 0 || step == e.n) return 0;
    return llama_config_fail(err, path,
                             "has done %" PRId64 " steps, and not the %" PRId64
                             " of its name: name it checkpoint-%" PRId64 ", or remove it",
                             step, e.n, step);
}

/* llama_names_fit -- what is to be pruned and replaced by name is what its name says. 0, or -1 with a sentence */
__attribute__((unused)) static int llama_names_fit(const char *dir, upipe_err *err)
{
    char path[LLAMA_PATH];
    llama_entry *all;
    int count, i, bad = 0;
    if (llama_list(dir, &all, &count, err)) return -1;
    for (i = 0; i < count && !bad; ++i)
        if (all[i].kind == LLAMA_WHOLE)
            bad = llama_path(path, dir, "", all[i].n, "", err) || llama_fits_name(path, err);
    free(all);
    return bad ? -1 : 0;
}

/* llama_checkpoint_find -- the model in a folder: itself if it has a config.json, else its newest checkpoint;
 * 0, or with a sentence 1 if there is none, -1 if that cannot be found out */
static inline int llama_checkpoint_find(const char *dir, char out[LLAMA_PATH], upipe_err *err)
{
    llama_entry *all;
    int count, i, status = 1;
    if (llama_path_in(out, dir, "config.json", err)) return -1;
    if (access(out, F_OK) == 0) {
        snprintf(out, LLAMA_PATH, "%s", dir);
        return llama_fits_name(out, err);
    }
    if (llama_list(dir, &all, &count, err)) return -1;
    for (i = 0; i < count; ++i)
        if (all[i].kind != LLAMA_TMP) break;
    if (i == count)
        llama_config_fail(err, dir, "holds neither a config.json nor a checkpoint");
    else
        status = llama_path(out, dir, all[i].kind == LLAMA_OLD ? "." : "", all[i].n,
                            all[i].kind == LLAMA_OLD ? ".old" : "", err) ||
                         llama_fits_name(out, err)
                     ? -1
                     : 0;
    free(all);
    return status;
}

/* A folder that one program writes checkpoints to. */
typedef struct llama_lock {
    char dir[LLAMA_PATH], path[LLAMA_PATH]; /* the folder, and DIR/.lock in it */
    int fd, made, held;
} llama_lock;

/* Gives the folder back; where it was made for this program and is empty it goes. */
static inline void llama_lock_free(llama_lock *l)
{
    if (l->held) unlink(l->path); /* before another can hold it */
    if (l->held) close(l->fd);
    if (l->made) rmdir(l->dir);
    l->held = l->made = 0;
}

/* llama_lock_init -- makes the folder if it is not there, and keeps other programs from llama_lock_init on it until
 *                   llama_lock_free; the system gives it back when the program dies. 0, or -1 with a sentence */
static inline int llama_lock_init(llama_lock *l, const char *dir, upipe_err *err)
{
    struct stat here, named;
    memset(l, 0, sizeof *l);
    if (llama_path_in(l->path, dir, ".lock", err)) return -1;
    strcpy(l->dir, dir);
    l->made = mkdir(dir, 0777) == 0;
    if (!l->made && errno != EEXIST)
        return llama_config_fail(err, dir, "the folder cannot be made: %s", strerror(errno));
    for (;;) {
        l->fd = open(l->path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        l->held = l->fd >= 0 && flock(l->fd, LOCK_EX | LOCK_NB) == 0;
        if (!l->held) break;
        /* whoever held it before may have removed the name since it was opened */
        if (fstat(l->fd, &here) == 0 && stat(l->path, &named) == 0 && here.st_ino == named.st_ino &&
            here.st_dev == named.st_dev)
            return 0;
        close(l->fd);
    }
    if (l->fd >= 0 && errno == EWOULDBLOCK)
        llama_config_fail(err, dir, "another training writes its checkpoints there");
    else
        llama_config_fail(err, dir, "the folder cannot be locked for checkpoints: %s", strerror(errno));
    if (l->fd >= 0) close(l->fd);
    llama_lock_free(l);
    return -1;
}

#endif
