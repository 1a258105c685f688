/* mapped.h -- a file mapped to be read, which may change or become shorter meanwhile
 *
 *     mapped_file m;
 *     const char *why;
 *     if (mapped_open(&m, "ids.bin", &why) != 0) fail("ids.bin cannot be read: %s", why);
 *     if (mapped_read(body, user) != 0) ...           body(user), which reads m.data: -1 if what it reads is gone
 *     if (mapped_changed(&m)) ...                     what was read may not be what it was
 *     mapped_close(&m);
 *
 * The system sends SIGBUS to a thread that reads what a file has lost, or what its disk does not give back: mapped_read
 * is where it goes on then. body allocates nothing that only it knows.
 */
#ifndef LLAMA_MAPPED_H
#define LLAMA_MAPPED_H

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include "../../common/regular.h"

typedef struct mapped_file {
    const char *path; /* the caller's */
    const unsigned char *data;
    int64_t bytes;
    struct stat about;
} mapped_file;

static __thread sigjmp_buf *mapped_back; /* where this thread goes on; NULL: it reads no mapped file */

static inline void mapped_on_bus(int number)
{
    if (mapped_back != NULL) siglongjmp(*mapped_back, 1);
    signal(number, SIG_DFL);
    raise(number);
}

static inline void mapped_close(mapped_file *m)
{
    if (m->data != NULL) munmap((void *)(uintptr_t)m->data, (size_t)m->bytes);
    memset(m, 0, sizeof *m);
}

/* mapped_open -- a regular file; 0, or -1 with the reason. An empty file has no data */
static inline int mapped_open(mapped_file *m, const char *path, const char **why)
{
    struct sigaction action;
    int64_t bytes = 0;
    const int fd = regular_fd(path, &bytes, why);
    void *data = NULL;
    memset(m, 0, sizeof *m);
    if (fd < 0) return -1;
    if (fstat(fd, &m->about) != 0 ||
        (bytes > 0 && (data = mmap(NULL, (size_t)bytes, PROT_READ, MAP_PRIVATE, fd, 0)) == MAP_FAILED)) {
        *why = strerror(errno);
        close(fd);
        return -1;
    }
    close(fd);
    m->path = path;
    m->data = (const unsigned char *)data;
    m->bytes = bytes;
    memset(&action, 0, sizeof action);
    action.sa_handler = mapped_on_bus;
    sigaction(SIGBUS, &action, NULL);
    return 0;
}

/* Whether the file of this name is the one that was mapped, and has been written to since. One in its place is another
 * file: what is mapped stays as it was. */
static inline int mapped_changed(const mapped_file *m)
{
    const struct stat *was = &m->about;
    struct stat is;
    return stat(m->path, &is) == 0 && is.st_dev == was->st_dev && is.st_ino == was->st_ino &&
           (is.st_size != was->st_size || is.st_mtim.tv_sec != was->st_mtim.tv_sec ||
            is.st_mtim.tv_nsec != was->st_mtim.tv_nsec);
}

/* mapped_read -- body(user), which reads mapped files; -1 if a page of one is not there */
static inline int mapped_read(void (*body)(void *user), void *user)
{
    sigjmp_buf back;
    if (sigsetjmp(back, 1) != 0) {
        mapped_back = NULL;
        return -1;
    }
    mapped_back = &back;
    body(user);
    mapped_back = NULL;
    return 0;
}

#endif
