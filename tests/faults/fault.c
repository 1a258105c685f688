/* fault.c -- a library to be preloaded, that makes the n-th call of a kind fail
 *
 *     UPIPE_FAULT=alloc:7      malloc, calloc, realloc, posix_memalign, aligned_alloc: the 7th finds no memory
 *     UPIPE_FAULT=alloc:7+     and every one after it
 *     UPIPE_FAULT=thread:2     pthread_create
 *     UPIPE_FAULT=file:9:EIO   what changes files: write, pwrite, fsync, rename, close, open and fopen for writing, mkdir,
 *                              unlink, rmdir, remove, ftruncate, posix_fallocate, flock; EIO, ENOSPC, EINTR, or SHORT,
 *                              which writes half of the bytes, and where it is no write does nothing
 *     UPIPE_FAULT_COUNT=FILE   how many calls of the kind there were, at the end
 *
 * Files of stdio are written through this library too: fopen makes a stream whose bytes go through its write. A close
 * that fails has closed, as on Linux. What the C library writes by itself, to stdout and stderr, is left alone.
 */
#define _GNU_SOURCE
#undef _FILE_OFFSET_BITS /* open and open64 are two functions here */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* The C library's own, under the names that it keeps for itself: dlsym allocates. */
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

typedef enum fault_kind { FAULT_NONE, FAULT_ALLOC, FAULT_THREAD, FAULT_FILE } fault_kind;

static fault_kind fault_of; /* FAULT_NONE until the library is set up */
static long fault_calls, fault_at;
static int fault_stays, fault_error, fault_short;

__attribute__((constructor)) static void fault_begin(void)
{
    static const char *const kinds[] = {"", "alloc:", "thread:", "file:"};
    const char *text = getenv("UPIPE_FAULT");
    char *end = NULL;
    int kind;
    for (kind = FAULT_FILE; text != NULL && kind > FAULT_NONE; --kind)
        if (strncmp(text, kinds[kind], strlen(kinds[kind])) == 0) break;
    if (text == NULL || kind == FAULT_NONE) return;
    fault_at = strtol(text + strlen(kinds[kind]), &end, 10);
    fault_stays = *end == '+';
    fault_short = strstr(end, ":SHORT") != NULL;
    fault_error = strstr(end, ":ENOSPC") != NULL ? ENOSPC : strstr(end, ":EINTR") != NULL ? EINTR : EIO;
    fault_of = (fault_kind)kind;
}

__attribute__((destructor)) static void fault_end(void)
{
    const char *path = getenv("UPIPE_FAULT_COUNT");
    FILE *out;
    fault_of = FAULT_NONE;
    out = path != NULL ? fopen(path, "w") : NULL;
    if (out == NULL) return;
    fprintf(out, "%ld\n", fault_calls);
    fclose(out);
}

/* Whether this call is the one. */
static int fault(fault_kind kind)
{
    long call;
    if (kind != fault_of) return 0;
    call = __atomic_add_fetch(&fault_calls, 1, __ATOMIC_RELAXED);
    return call == fault_at || (fault_stays && fault_at > 0 && call > fault_at);
}

/* The same for a call that changes files; errno is set. */
static int fault_file(void)
{
    if (!fault(FAULT_FILE) || fault_short) return 0;
    errno = fault_error;
    return 1;
}

/* The C library's function behind one of these. */
#define REAL(type, name, ...)         \
    static type (*real)(__VA_ARGS__); \
    if (real == NULL) *(void **)(void *)&real = dlsym(RTLD_NEXT, name)

/* ---- memory ---- */

static int fault_memory(void)
{
    if (!fault(FAULT_ALLOC)) return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t n)
{
    return fault_memory() ? NULL : __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
    return fault_memory() ? NULL : __libc_calloc(n, size);
}

void *realloc(void *p, size_t n)
{
    return fault_memory() ? NULL : __libc_realloc(p, n);
}

void *aligned_alloc(size_t align, size_t n)
{
    return fault_memory() ? NULL : __libc_memalign(align, n);
}

int posix_memalign(void **out, size_t align, size_t n)
{
    void *p = fault_memory() ? NULL : __libc_memalign(align, n);
    if (p == NULL) return ENOMEM;
    *out = p;
    return 0;
}

/* ---- threads ---- */

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*body)(void *), void *user)
{
    REAL(int, "pthread_create", pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    return fault(FAULT_THREAD) ? EAGAIN : real(thread, how, body, user);
}

/* ---- files ---- */

/* Bytes that a call of n may write; -1: it fails. */
static ssize_t fault_bytes(size_t n)
{
    if (!fault(FAULT_FILE)) return (ssize_t)n;
    if (fault_short) return (ssize_t)(n + 1) / 2;
    errno = fault_error;
    return -1;
}

ssize_t write(int fd, const void *data, size_t n)
{
    REAL(ssize_t, "write", int, const void *, size_t);
    ssize_t most = fault_bytes(n);
    return most < 0 ? -1 : real(fd, data, (size_t)most);
}

ssize_t pwrite(int fd, const void *data, size_t n, off_t at)
{
    REAL(ssize_t, "pwrite", int, const void *, size_t, off_t);
    ssize_t most = fault_bytes(n);
    return most < 0 ? -1 : real(fd, data, (size_t)most, at);
}

ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at)
{
    return pwrite(fd, data, n, at);
}

int close(int fd)
{
    REAL(int, "close", int);
    int bad = fault_file(), status = real(fd);
    if (bad) errno = fault_error;
    return bad ? -1 : status;
}

#define FILE_CALL(name, parameters, arguments, ...) \
    int name parameters                             \
    {                                               \
        REAL(int, #name, __VA_ARGS__);              \
        return fault_file() ? -1 : real arguments;  \
    }

FILE_CALL(fsync, (int fd), (fd), int)
FILE_CALL(rename, (const char *from, const char *to), (from, to), const char *, const char *)
FILE_CALL(mkdir, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
FILE_CALL(unlink, (const char *path), (path), const char *)
FILE_CALL(rmdir, (const char *path), (path), const char *)
FILE_CALL(remove, (const char *path), (path), const char *)
FILE_CALL(ftruncate, (int fd, off_t n), (fd, n), int, off_t)
FILE_CALL(ftruncate64, (int fd, off64_t n), (fd, n), int, off64_t)
FILE_CALL(flock, (int fd, int how), (fd, how), int, int)

int posix_fallocate(int fd, off_t at, off_t n)
{
    REAL(int, "posix_fallocate", int, off_t, off_t);
    return fault_file() ? fault_error : real(fd, at, n);
}

int posix_fallocate64(int fd, off64_t at, off64_t n)
{
    return posix_fallocate(fd, at, n);
}

static int fault_open(const char *path, int flags, int mode)
{
    REAL(int, "open", const char *, int, ...);
    if ((flags & (O_WRONLY | O_RDWR)) != 0 && fault_file()) return -1;
    return real(path, flags, mode);
}

#define OPEN(name)                             \
    int name(const char *path, int flags, ...) \
    {                                          \
        va_list args;                          \
        int mode;                              \
        va_start(args, flags);                 \
        mode = va_arg(args, int);              \
        va_end(args);                          \
        return fault_open(path, flags, mode);  \
    }

OPEN(open)
OPEN(open64)

/* ---- streams ---- */

enum { STREAMS = 16 };

static struct {
    FILE *file;
    int fd;
} streams[STREAMS]; /* those that are open for writing */

static ssize_t stream_write(void *cookie, const char *data, size_t n)
{
    size_t done = 0;
    while (done < n) { /* the C library's own streams go on after a short write too, and not after an EINTR */
        ssize_t put = write((int)(long)cookie, data + done, n - done);
        if (put <= 0) return 0;
        done += (size_t)put;
    }
    return (ssize_t)n;
}

static int stream_close(void *cookie)
{
    int i;
    for (i = 0; i < STREAMS; ++i)
        if (streams[i].file != NULL && streams[i].fd == (int)(long)cookie) streams[i].file = NULL;
    return close((int)(long)cookie);
}

static FILE *fault_fopen(const char *path, const char *mode)
{
    static const cookie_io_functions_t calls = {NULL, stream_write, NULL, stream_close};
    REAL(FILE *, "fopen", const char *, const char *);
    int fd, i;
    FILE *f;
    if (mode[0] != 'w' || fault_of != FAULT_FILE) return real(path, mode);
    fd = fault_open(path, O_WRONLY | O_CREAT | (strchr(mode, 'x') != NULL ? O_EXCL : O_TRUNC), 0666);
    f = fd >= 0 ? fopencookie((void *)(long)fd, "w", calls) : NULL;
    for (i = 0; f != NULL && i < STREAMS && streams[i].file != NULL;) ++i;
    if (f == NULL || i == STREAMS) return NULL;
    streams[i].file = f;
    streams[i].fd = fd;
    return f;
}

FILE *fopen(const char *path, const char *mode)
{
    return fault_fopen(path, mode);
}

FILE *fopen64(const char *path, const char *mode)
{
    return fault_fopen(path, mode);
}

int fileno(FILE *f)
{
    REAL(int, "fileno", FILE *);
    int i;
    for (i = 0; i < STREAMS; ++i)
        if (streams[i].file == f && f != NULL) return streams[i].fd;
    return real(f);
}
