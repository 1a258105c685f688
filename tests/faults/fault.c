/* fault.c -- a library to be preloaded, that makes the n-th call of a kind fail
 *
 *     UPIPE_FAULT=alloc:7      malloc, calloc, realloc, posix_memalign, aligned_alloc: the 7th finds no memory
 *     UPIPE_FAULT=alloc:7+     and every one after it
 *     UPIPE_FAULT=thread:2     pthread_create
 *     UPIPE_FAULT=file:9:EIO   what changes files: write, pwrite, fsync, rename, close, open and fopen for writing, mkdir,
 *                              unlink, rmdir, remove, ftruncate, posix_fallocate, flock; EIO, ENOSPC, EINTR, or SHORT,
 *                              which writes half of the bytes, and where it is no write does nothing
 *     UPIPE_FAULT=flush:1      fflush: EIO
 *     UPIPE_FAULT=read:4:EIO   what reads files and asks about them: read, pread, open and fopen for reading, stat, fstat,
 *                              lstat, access, opendir, readdir, sysconf; the same errors, SHORT of read and pread
 *     UPIPE_FAULT=net:6:EINTR  what connects processes: socket, bind, listen, connect, accept, getsockname, getpeername,
 *                              getsockopt, setsockopt, poll, send, recv, sendmsg, recvmsg; ECONNRESET, ENOBUFS, EINTR,
 *                              or SHORT of the last four
 *     UPIPE_FAULT_COUNT=FILE   how many calls of the kind there were, at the end
 *     UPIPE_FAULT_OWN=1        calls of the executable alone count and fail, for a program whose libraries do not bear it:
 *                              OpenSSL and Open MPI crash where an allocation of their own finds no memory
 *
 * Files of stdio go through this library too: fopen and fdopen make a stream whose bytes go through its write or read. A close
 * that fails has closed, as on Linux. What the C library writes by itself, to stdout and stderr, is left alone.
 */
#define _GNU_SOURCE
#undef _FILE_OFFSET_BITS /* open and open64 are two functions here */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

/* The C library's own, under the names that it keeps for itself: dlsym allocates. */
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

typedef enum fault_kind {
    FAULT_NONE,
    FAULT_ALLOC,
    FAULT_THREAD,
    FAULT_FILE,
    FAULT_FLUSH,
    FAULT_READ,
    FAULT_NET
} fault_kind;

static fault_kind fault_of; /* FAULT_NONE until the library is set up */
static long fault_calls, fault_at;
static int fault_stays, fault_error, fault_short;
static uintptr_t fault_from, fault_to; /* addresses of which calls come that count */

/* Where the call of one of these functions comes from. */
#define CALLER ((uintptr_t)__builtin_return_address(0))

/* The executable is the first object. */
static int fault_executable(struct dl_phdr_info *object, size_t size, void *user)
{
    int i;
    (void)size;
    (void)user;
    fault_from = UINTPTR_MAX;
    fault_to = 0;
    for (i = 0; i < object->dlpi_phnum; ++i) {
        const uintptr_t at = object->dlpi_addr + object->dlpi_phdr[i].p_vaddr;
        if (object->dlpi_phdr[i].p_type != PT_LOAD) continue;
        if (at < fault_from) fault_from = at;
        if (at + object->dlpi_phdr[i].p_memsz > fault_to) fault_to = at + object->dlpi_phdr[i].p_memsz;
    }
    return 1;
}

__attribute__((constructor)) static void fault_begin(void)
{
    static const char *const kinds[] = {"", "alloc:", "thread:", "file:", "flush:", "read:", "net:"};
    static const struct {
        const char *name;
        int number;
    } errors[] = {{":ENOSPC", ENOSPC}, {":EINTR", EINTR}, {":ECONNRESET", ECONNRESET}, {":ENOBUFS", ENOBUFS}};
    const char *text = getenv("UPIPE_FAULT");
    char *end = NULL;
    size_t i;
    int kind;
    for (kind = FAULT_NET; text != NULL && kind > FAULT_NONE; --kind)
        if (strncmp(text, kinds[kind], strlen(kinds[kind])) == 0) break;
    if (text == NULL || kind == FAULT_NONE) return;
    fault_at = strtol(text + strlen(kinds[kind]), &end, 10);
    fault_stays = *end == '+';
    fault_short = strstr(end, ":SHORT") != NULL;
    fault_error = EIO;
    for (i = 0; i < sizeof errors / sizeof *errors; ++i)
        if (strstr(end, errors[i].name) != NULL) fault_error = errors[i].number;
    fault_to = UINTPTR_MAX;
    if (getenv("UPIPE_FAULT_OWN") != NULL) dl_iterate_phdr(fault_executable, NULL);
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

static int fault_counts(fault_kind kind, uintptr_t caller)
{
    return kind == fault_of && caller >= fault_from && caller < fault_to;
}

/* Whether this call is the one. */
static int fault(fault_kind kind, uintptr_t caller)
{
    long call;
    if (!fault_counts(kind, caller)) return 0;
    call = __atomic_add_fetch(&fault_calls, 1, __ATOMIC_RELAXED);
    return call == fault_at || (fault_stays && fault_at > 0 && call > fault_at);
}

/* The same for a call that has no half; errno is set. */
static int fault_whole(fault_kind kind, uintptr_t caller)
{
    if (!fault(kind, caller) || fault_short) return 0;
    errno = fault_error;
    return 1;
}

static int fault_file(uintptr_t caller)
{
    return fault_whole(FAULT_FILE, caller);
}

static int fault_reading(uintptr_t caller)
{
    return fault_whole(FAULT_READ, caller);
}

/* The C library's function behind one of these. */
#define REAL(type, name, ...)         \
    static type (*real)(__VA_ARGS__); \
    if (real == NULL) *(void **)(void *)&real = dlsym(RTLD_NEXT, name)

/* ---- memory ---- */

static int fault_memory(uintptr_t caller)
{
    if (!fault(FAULT_ALLOC, caller)) return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t n)
{
    return fault_memory(CALLER) ? NULL : __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
    return fault_memory(CALLER) ? NULL : __libc_calloc(n, size);
}

void *realloc(void *p, size_t n)
{
    return fault_memory(CALLER) ? NULL : __libc_realloc(p, n);
}

void *aligned_alloc(size_t align, size_t n)
{
    return fault_memory(CALLER) ? NULL : __libc_memalign(align, n);
}

int posix_memalign(void **out, size_t align, size_t n)
{
    void *p = fault_memory(CALLER) ? NULL : __libc_memalign(align, n);
    if (p == NULL) return ENOMEM;
    *out = p;
    return 0;
}

/* ---- threads ---- */

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*body)(void *), void *user)
{
    REAL(int, "pthread_create", pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    return fault(FAULT_THREAD, CALLER) ? EAGAIN : real(thread, how, body, user);
}

/* ---- files ---- */

/* Bytes that a call of n may write or read; -1: it fails. */
static ssize_t fault_bytes(fault_kind kind, size_t n, uintptr_t caller)
{
    if (!fault(kind, caller)) return (ssize_t)n;
    if (fault_short) return (ssize_t)(n + 1) / 2;
    errno = fault_error;
    return -1;
}

static ssize_t fault_write(int fd, const void *data, size_t n, uintptr_t caller)
{
    REAL(ssize_t, "write", int, const void *, size_t);
    ssize_t most = fault_bytes(FAULT_FILE, n, caller);
    return most < 0 ? -1 : real(fd, data, (size_t)most);
}

static ssize_t fault_pwrite(int fd, const void *data, size_t n, off64_t at, uintptr_t caller)
{
    REAL(ssize_t, "pwrite", int, const void *, size_t, off_t);
    ssize_t most = fault_bytes(FAULT_FILE, n, caller);
    return most < 0 ? -1 : real(fd, data, (size_t)most, at);
}

static int fault_close(int fd, uintptr_t caller)
{
    REAL(int, "close", int);
    int bad = fault_file(caller), status = real(fd);
    if (bad) errno = fault_error;
    return bad ? -1 : status;
}

ssize_t write(int fd, const void *data, size_t n)
{
    return fault_write(fd, data, n, CALLER);
}

ssize_t pwrite(int fd, const void *data, size_t n, off_t at)
{
    return fault_pwrite(fd, data, n, at, CALLER);
}

ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at)
{
    return fault_pwrite(fd, data, n, at, CALLER);
}

int close(int fd)
{
    return fault_close(fd, CALLER);
}

/* Fails with this value, its errno set. */
#define CALL(fails, type, name, bad, parameters, arguments, ...) \
    type name parameters                                         \
    {                                                            \
        REAL(type, #name, __VA_ARGS__);                          \
        return fails(CALLER) ? (bad) : real arguments;           \
    }

#define FILE_CALL(name, parameters, arguments, ...) \
    CALL(fault_file, int, name, -1, parameters, arguments, __VA_ARGS__)

FILE_CALL(fsync, (int fd), (fd), int)
FILE_CALL(rename, (const char *from, const char *to), (from, to), const char *, const char *)
FILE_CALL(mkdir, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
FILE_CALL(unlink, (const char *path), (path), const char *)
FILE_CALL(rmdir, (const char *path), (path), const char *)
FILE_CALL(remove, (const char *path), (path), const char *)
FILE_CALL(ftruncate, (int fd, off_t n), (fd, n), int, off_t)
FILE_CALL(ftruncate64, (int fd, off64_t n), (fd, n), int, off64_t)
FILE_CALL(flock, (int fd, int how), (fd, how), int, int)

static int fault_flushing(uintptr_t caller)
{
    return fault_whole(FAULT_FLUSH, caller);
}

CALL(fault_flushing, int, fflush, EOF, (FILE * f), (f), FILE *)

static int fault_fallocate(int fd, off64_t at, off64_t n, uintptr_t caller)
{
    REAL(int, "posix_fallocate", int, off_t, off_t);
    return fault_file(caller) ? fault_error : real(fd, at, n);
}

int posix_fallocate(int fd, off_t at, off_t n)
{
    return fault_fallocate(fd, at, n, CALLER);
}

int posix_fallocate64(int fd, off64_t at, off64_t n)
{
    return fault_fallocate(fd, at, n, CALLER);
}

static int fault_open(const char *path, int flags, int mode, uintptr_t caller)
{
    REAL(int, "open", const char *, int, ...);
    if (fault_whole((flags & (O_WRONLY | O_RDWR)) != 0 ? FAULT_FILE : FAULT_READ, caller)) return -1;
    return real(path, flags, mode);
}

#define OPEN(name)                                    \
    int name(const char *path, int flags, ...)        \
    {                                                 \
        va_list args;                                 \
        int mode;                                     \
        va_start(args, flags);                        \
        mode = va_arg(args, int);                     \
        va_end(args);                                 \
        return fault_open(path, flags, mode, CALLER); \
    }

OPEN(open)
OPEN(open64)

/* ---- reading ---- */

static ssize_t fault_read(int fd, void *data, size_t n, uintptr_t caller)
{
    REAL(ssize_t, "read", int, void *, size_t);
    ssize_t most = fault_bytes(FAULT_READ, n, caller);
    return most < 0 ? -1 : real(fd, data, (size_t)most);
}

static ssize_t fault_pread(int fd, void *data, size_t n, off64_t at, uintptr_t caller)
{
    REAL(ssize_t, "pread", int, void *, size_t, off_t);
    ssize_t most = fault_bytes(FAULT_READ, n, caller);
    return most < 0 ? -1 : real(fd, data, (size_t)most, at);
}

ssize_t read(int fd, void *data, size_t n)
{
    return fault_read(fd, data, n, CALLER);
}

ssize_t pread(int fd, void *data, size_t n, off_t at)
{
    return fault_pread(fd, data, n, at, CALLER);
}

ssize_t pread64(int fd, void *data, size_t n, off64_t at)
{
    return fault_pread(fd, data, n, at, CALLER);
}

#define READ_CALL(type, name, bad, parameters, arguments, ...) \
    CALL(fault_reading, type, name, bad, parameters, arguments, __VA_ARGS__)

typedef struct stat about;
typedef struct stat64 about64;
typedef struct dirent entry;
typedef struct dirent64 entry64;

READ_CALL(int, stat, -1, (const char *restrict path, about *restrict out), (path, out), const char *, about *)
READ_CALL(int, stat64, -1, (const char *restrict path, about64 *restrict out), (path, out), const char *,
          about64 *)
READ_CALL(int, lstat, -1, (const char *restrict path, about *restrict out), (path, out), const char *,
          about *)
READ_CALL(int, lstat64, -1, (const char *restrict path, about64 *restrict out), (path, out), const char *,
          about64 *)
READ_CALL(int, fstat, -1, (int fd, about *out), (fd, out), int, about *)
READ_CALL(int, fstat64, -1, (int fd, about64 *out), (fd, out), int, about64 *)
READ_CALL(int, access, -1, (const char *path, int how), (path, how), const char *, int)
READ_CALL(DIR *, opendir, NULL, (const char *path), (path), const char *)
READ_CALL(entry *, readdir, NULL, (DIR * d), (d), DIR *)
READ_CALL(entry64 *, readdir64, NULL, (DIR * d), (d), DIR *)
READ_CALL(long, sysconf, -1, (int name), (name), int)

/* ---- connections ---- */

static int fault_waiting(uintptr_t caller)
{
    return fault_whole(FAULT_NET, caller);
}

/* A call that never waits is not interrupted. */
static int fault_instant(uintptr_t caller)
{
    return fault_waiting(caller) && fault_error != EINTR;
}

#define WAIT_CALL(name, parameters, arguments, ...) \
    CALL(fault_waiting, int, name, -1, parameters, arguments, __VA_ARGS__)
#define NET_CALL(name, parameters, arguments, ...) \
    CALL(fault_instant, int, name, -1, parameters, arguments, __VA_ARGS__)

typedef __CONST_SOCKADDR_ARG address;
typedef __SOCKADDR_ARG address_out;

NET_CALL(socket, (int domain, int type, int protocol), (domain, type, protocol), int, int, int)
NET_CALL(bind, (int fd, address at, socklen_t n), (fd, at, n), int, address, socklen_t)
NET_CALL(listen, (int fd, int n), (fd, n), int, int)
WAIT_CALL(connect, (int fd, address at, socklen_t n), (fd, at, n), int, address, socklen_t)
WAIT_CALL(accept, (int fd, address_out at, socklen_t *restrict n), (fd, at, n), int, address_out, socklen_t *)
NET_CALL(getsockname, (int fd, address_out at, socklen_t *restrict n), (fd, at, n), int, address_out,
         socklen_t *)
NET_CALL(getpeername, (int fd, address_out at, socklen_t *restrict n), (fd, at, n), int, address_out,
         socklen_t *)
NET_CALL(getsockopt, (int fd, int level, int name, void *restrict value, socklen_t *restrict n),
         (fd, level, name, value, n), int, int, int, void *, socklen_t *)
NET_CALL(setsockopt, (int fd, int level, int name, const void *value, socklen_t n),
         (fd, level, name, value, n), int, int, int, const void *, socklen_t)
WAIT_CALL(poll, (struct pollfd * polls, nfds_t n, int timeout), (polls, n, timeout), struct pollfd *, nfds_t,
          int)

ssize_t send(int fd, const void *data, size_t n, int flags)
{
    REAL(ssize_t, "send", int, const void *, size_t, int);
    ssize_t most = fault_bytes(FAULT_NET, n, CALLER);
    return most < 0 ? -1 : real(fd, data, (size_t)most, flags);
}

ssize_t recv(int fd, void *data, size_t n, int flags)
{
    REAL(ssize_t, "recv", int, void *, size_t, int);
    ssize_t most = fault_bytes(FAULT_NET, n, CALLER);
    return most < 0 ? -1 : real(fd, data, (size_t)most, flags);
}

/* Of several pieces the first half; of one its first half. */
static int fault_pieces(struct msghdr *what, struct iovec *one, uintptr_t caller)
{
    if (!fault(FAULT_NET, caller)) return 0;
    errno = fault_error;
    if (!fault_short) return -1;
    if (what->msg_iovlen > 1) {
        what->msg_iovlen = (what->msg_iovlen + 1) / 2;
    } else {
        *one = *what->msg_iov;
        one->iov_len = (one->iov_len + 1) / 2;
        what->msg_iov = one;
    }
    return 0;
}

ssize_t sendmsg(int fd, const struct msghdr *what, int flags)
{
    REAL(ssize_t, "sendmsg", int, const struct msghdr *, int);
    struct msghdr mine = *what;
    struct iovec one;
    return fault_pieces(&mine, &one, CALLER) < 0 ? -1 : real(fd, &mine, flags);
}

ssize_t recvmsg(int fd, struct msghdr *what, int flags)
{
    REAL(ssize_t, "recvmsg", int, struct msghdr *, int);
    const struct msghdr whole = *what;
    struct iovec one;
    ssize_t n = fault_pieces(what, &one, CALLER);
    if (n == 0) n = real(fd, what, flags);
    what->msg_iov = whole.msg_iov;
    what->msg_iovlen = whole.msg_iovlen;
    return n;
}

/* ---- streams ---- */

enum { STREAMS = 16 };

static struct {
    FILE *file;
    int fd;
} streams[STREAMS]; /* those that are open */

/* A stream is made where its opening counts: so do its own calls, which come from the C library. */
static ssize_t stream_write(void *cookie, const char *data, size_t n)
{
    size_t done = 0;
    while (done < n) { /* the C library's own streams go on after a short write too, and not after an EINTR */
        ssize_t put = fault_write((int)(long)cookie, data + done, n - done, fault_from);
        if (put <= 0) return 0;
        done += (size_t)put;
    }
    return (ssize_t)n;
}

static ssize_t stream_read(void *cookie, char *data, size_t n)
{
    return fault_read((int)(long)cookie, data, n, fault_from);
}

static int stream_seek(void *cookie, off64_t *at, int whence)
{
    *at = lseek64((int)(long)cookie, *at, whence);
    return *at < 0 ? -1 : 0;
}

static int stream_close(void *cookie)
{
    int i;
    for (i = 0; i < STREAMS; ++i)
        if (streams[i].file != NULL && streams[i].fd == (int)(long)cookie) streams[i].file = NULL;
    return fault_close((int)(long)cookie, fault_from);
}

/* A stream over this library's calls; NULL: fd is still open. */
static FILE *fault_stream(int fd, const char *mode)
{
    static const cookie_io_functions_t calls = {stream_read, stream_write, stream_seek, stream_close};
    FILE *f;
    int i;
    for (i = 0; i < STREAMS && streams[i].file != NULL;) ++i;
    f = i < STREAMS ? fopencookie((void *)(long)fd, mode, calls) : NULL;
    if (f == NULL) return NULL;
    streams[i].file = f;
    streams[i].fd = fd;
    return f;
}

static FILE *fault_fopen(const char *path, const char *mode, uintptr_t caller)
{
    REAL(FILE *, "fopen", const char *, const char *);
    const int flags = O_WRONLY | O_CREAT | (strchr(mode, 'x') != NULL ? O_EXCL : O_TRUNC);
    FILE *f;
    int fd;
    if (!fault_counts(mode[0] == 'w' ? FAULT_FILE : mode[0] == 'r' ? FAULT_READ : FAULT_NONE, caller))
        return real(path, mode);
    fd = fault_open(path, mode[0] == 'w' ? flags : O_RDONLY, 0666, caller);
    f = fd >= 0 ? fault_stream(fd, mode) : NULL;
    if (f == NULL && fd >= 0) fault_close(fd, caller);
    return f;
}

FILE *fdopen(int fd, const char *mode)
{
    REAL(FILE *, "fdopen", int, const char *);
    return mode[0] == 'r' && fault_counts(FAULT_READ, CALLER) ? fault_stream(fd, mode) : real(fd, mode);
}

FILE *fopen(const char *path, const char *mode)
{
    return fault_fopen(path, mode, CALLER);
}

FILE *fopen64(const char *path, const char *mode)
{
    return fault_fopen(path, mode, CALLER);
}

int fileno(FILE *f)
{
    REAL(int, "fileno", FILE *);
    int i;
    for (i = 0; i < STREAMS; ++i)
        if (streams[i].file == f && f != NULL) return streams[i].fd;
    return real(f);
}
