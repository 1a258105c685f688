/* regular.h -- opens a file to be read: a regular one, so that nothing is waited for
 *
 *     int64_t bytes;
 *     const char *why;
 *     FILE *f = regular_open("book.txt", &bytes, &why);           regular_fd, without the stream
 *     if (f == NULL) fail("book.txt cannot be read: %s", why);
 *
 * In a file's place there may be a pipe that nobody writes to, a terminal, or a device without an end; or a Git LFS
 * pointer, the text that a clone without Git LFS has there.
 */
#ifndef COMMON_REGULAR_H
#define COMMON_REGULAR_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* One is shorter than 1024 bytes, and begins so. */
__attribute__((unused)) static int regular_is_pointer(int fd, int64_t bytes)
{
    static const char begins[] = "version https://git-lfs.github.com/spec/v1\n";
    const ssize_t n = sizeof begins - 1;
    char text[sizeof begins];
    return bytes >= n && bytes < 1024 && pread(fd, text, (size_t)n, 0) == n &&
           memcmp(text, begins, (size_t)n) == 0;
}

/* The descriptor, and the bytes that the file has now; or -1 and the reason. */
__attribute__((unused)) static int regular_fd(const char *path, int64_t *bytes, const char **why)
{
    struct stat about;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* to open a pipe waits for a writer */
    int known = fd >= 0 && fstat(fd, &about) == 0;
    *why = known ? "it is no regular file" : strerror(errno);
    if (known && S_ISREG(about.st_mode)) {
        *bytes = (int64_t)about.st_size;
        if (!regular_is_pointer(fd, *bytes)) return fd;
        *why = "it is a Git LFS pointer, not the file, which `git lfs pull` fetches";
    }
    if (fd >= 0) close(fd);
    return -1;
}

/* The same as a stream, or NULL. */
__attribute__((unused)) static FILE *regular_open(const char *path, int64_t *bytes, const char **why)
{
    int fd = regular_fd(path, bytes, why);
    FILE *f = fd >= 0 ? fdopen(fd, "rb") : NULL;
    if (fd >= 0 && f == NULL) {
        *why = strerror(errno);
        close(fd);
    }
    return f;
}

#endif
