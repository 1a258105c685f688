/* planted.h -- the switch of a planted bug, for a copy of the tree that has them all; planted.py includes it there
 *
 * UPIPE_PLANTED is the number of the bug that this process has. UPIPE_PLANTED_REACHED is a file in place of that: it gets
 * the number of each bug whose code is reached, once for a unit of the program. No header is included, as this one stands
 * before those that choose what the system's headers declare.
 */
#ifdef __GNUC__
#pragma GCC diagnostic ignored "-Wdangling-else" /* a statement has become an if with an else */
#endif

#ifndef UPIPE_PLANTED_H
#define UPIPE_PLANTED_H

#ifdef __cplusplus
extern "C" {
#endif
char *upipe_planted_getenv(const char *name) __asm__("getenv");
int upipe_planted_open(const char *path, int flags, ...) __asm__("open");
long upipe_planted_write(int fd, const void *data, unsigned long bytes) __asm__("write");
int upipe_planted_close(int fd) __asm__("close");
#ifdef __cplusplus
}
#endif

#define UPIPE_PLANTED(number) (upipe_planted == (number) || (upipe_planted < 0 && upipe_planted_here(number)))

/* The number; 0: none; -1: what is reached is written down. */
__attribute__((unused)) static int upipe_planted;

__attribute__((constructor, unused)) static void upipe_planted_begin(void)
{
    const char *number = upipe_planted_getenv("UPIPE_PLANTED");
    if (upipe_planted_getenv("UPIPE_PLANTED_REACHED")) upipe_planted = -1;
    while (number && *number >= '0' && *number <= '9') upipe_planted = 10 * upipe_planted + (*number++ - '0');
}

/* Always 0. Lines of all processes are whole, as they are written at once, behind what is there. */
__attribute__((unused, noinline, no_sanitize("thread"))) static int upipe_planted_here(int number)
{
    enum { WRITE = 01, APPEND = 02000, CLOSE_ON_EXEC = 02000000, MOST = 1 << 20 };
    static char seen[MOST];
    char line[16];
    int n = sizeof line, fd;
    if (number >= MOST || __atomic_test_and_set(&seen[number], __ATOMIC_RELAXED)) return 0;
    line[--n] = '\n';
    for (; number > 0; number /= 10) line[--n] = (char)('0' + number % 10);
    fd = upipe_planted_open(upipe_planted_getenv("UPIPE_PLANTED_REACHED"), WRITE | APPEND | CLOSE_ON_EXEC);
    if (fd < 0) return 0;
    (void)!upipe_planted_write(fd, line + n, sizeof line - (unsigned long)n);
    upipe_planted_close(fd);
    return 0;
}

#endif
