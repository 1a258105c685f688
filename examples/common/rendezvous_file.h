/* rendezvous_file.h -- a few bytes from the first process to all, through files of a shared folder
 *
 * Each process draws a random number. Rank r writes PATH.r with its own. Rank 0 writes PATH: the data, its own number,
 * and those that it has read. A rank takes PATH once its own number is in it, and writes PATH.r again with rank 0's
 * number. When all have done so rank 0 removes the files. So nothing is taken from an earlier run, nor counted for it,
 * whatever files it has left: its numbers are others. Files appear whole, by a rename.
 */
#ifndef COMMON_RENDEZVOUS_FILE_H
#define COMMON_RENDEZVOUS_FILE_H

#include "launch.h"
#include "secret.h"

/* All of PATH.r; PATH has numbers[ranks] and the data behind it. */
typedef struct rendezvous_card {
    char mark[8];
    int32_t rank, ranks;
    uint64_t bytes;        /* of the data */
    uint64_t mine, theirs; /* own number, never 0; PATH.r: that of rank 0 once its data are taken, or 0 */
} rendezvous_card;

enum { RENDEZVOUS_PATH = 4096 };

/* Before the next try. */
static inline void rendezvous_nap(void)
{
    struct timespec t;
    t.tv_sec = 0;
    t.tv_nsec = 50000000;
    nanosleep(&t, NULL);
}

/* PATH, or PATH.r of rank r > 0. */
static inline void rendezvous_name(char *out, const char *path, int rank)
{
    if (rank == 0)
        snprintf(out, RENDEZVOUS_PATH, "%s", path);
    else
        snprintf(out, RENDEZVOUS_PATH, "%s.%d", path, rank);
}

/* The file of this rank, whole or not at all; -1 with the sentence out. */
static inline int rendezvous_put(const char *path, const rendezvous_card *own, const void *buf, size_t bytes)
{
    char name[RENDEZVOUS_PATH], part[RENDEZVOUS_PATH + 32];
    FILE *f;
    int ok;
    rendezvous_name(name, path, own->rank);
    snprintf(part, sizeof part, "%s.%016llx.tmp", name, (unsigned long long)own->mine); /* no other run's */
    f = fopen(part, "wb");
    ok = f != NULL && fwrite(buf, 1, bytes, f) == bytes;
    if (f != NULL) ok = fclose(f) == 0 && ok;
    if (ok && rename(part, name) == 0) return 0;
    cli_fail("rank %d cannot write %s: %s", own->rank, name, strerror(errno));
    if (f != NULL) unlink(part);
    return -1;
}

/* Reads a rank's file, of exactly so many bytes; 0 if there is none, or another one. */
static inline int rendezvous_get(const char *path, const rendezvous_card *own, int rank, void *buf,
                                 size_t bytes)
{
    char name[RENDEZVOUS_PATH];
    const rendezvous_card *card = (const rendezvous_card *)buf;
    const char *why;
    int64_t size;
    FILE *f;
    int ok;
    rendezvous_name(name, path, rank);
    f = regular_open(name, &size, &why); /* to open a pipe may wait for ever */
    if (f == NULL) return 0;
    ok = size == (int64_t)bytes && fread(buf, 1, bytes, f) == bytes;
    fclose(f);
    return ok && memcmp(card->mark, own->mark, sizeof own->mark) == 0 && card->rank == rank &&
           card->ranks == own->ranks && card->bytes == own->bytes;
}

/* May rank r's file be where its name is? A rename would replace a pipe or a device. */
static inline int rendezvous_usable(const char *path, int rank)
{
    char name[RENDEZVOUS_PATH];
    struct stat about;
    rendezvous_name(name, path, rank);
    return stat(name, &about) != 0 || S_ISREG(about.st_mode);
}

/* Rank 0. `all`: what PATH holds, of `whole` bytes; numbers[r] are of rank r, seen[r]: it has come. */
static inline int rendezvous_host(const launch *l, rendezvous_card *all, size_t whole, uint64_t *numbers,
                                  char *seen, double until, double seconds)
{
    const char *path = l->address;
    char name[RENDEZVOUS_PATH], missing[128];
    rendezvous_card card;
    int r, come = 1, stale = 1;
    for (;;) {
        const int late = cli_clock(NULL) >= until;
        for (r = 1, come = 1; r < all->ranks; ++r) {
            if (!rendezvous_get(path, all, r, &card, sizeof card)) continue;
            come += seen[r] = card.theirs == all->mine;
            stale |= card.mine != numbers[r];
            numbers[r] = card.mine;
        }
        if (come == all->ranks) break;
        if (late) {
            launch_missing(l, seen, missing, sizeof missing);
            return cli_fail("%d of %d ranks have come to %s within %g s%s", come, all->ranks, path, seconds,
                            missing);
        }
        if (stale && rendezvous_put(path, all, all, whole) != 0) return -1;
        stale = 0;
        rendezvous_nap();
    }
    for (r = 0; r < all->ranks; ++r) {
        rendezvous_name(name, path, r);
        unlink(name);
    }
    return 0;
}

/* Another rank, which reads PATH into `all`. */
static inline int rendezvous_guest(const char *path, rendezvous_card *own, rendezvous_card *all, size_t whole,
                                   const uint64_t *numbers, double until, double seconds)
{
    if (rendezvous_put(path, own, own, sizeof *own) != 0) return -1;
    while (!rendezvous_get(path, own, 0, all, whole) || numbers[own->rank] != own->mine) {
        if (cli_clock(NULL) >= until)
            return cli_fail("rank %d has not met rank 0 at %s within %g s", own->rank, path, seconds);
        rendezvous_nap();
    }
    own->theirs = all->mine;
    return rendezvous_put(path, own, own, sizeof *own);
}

/* rendezvous_file -- rank 0's `bytes` bytes come to all ranks; -1 with the sentence out if they do not in time. One run
 *                    at a time uses a path
 *   until    the moment of cli_clock, `seconds` from the beginning
 */
static inline int rendezvous_file(const launch *l, void *data, size_t bytes, double until, double seconds)
{
    const char *path = l->address;
    const int rank = l->rank, ranks = l->ranks;
    const size_t numbers_bytes = (size_t)ranks * sizeof(uint64_t);
    const size_t whole = sizeof(rendezvous_card) + numbers_bytes + bytes;
    rendezvous_card own, *all = (rendezvous_card *)calloc(1, whole + (size_t)ranks);
    uint64_t *numbers = (uint64_t *)(void *)(all + 1);
    const char *why;
    int status;
    memset(&own, 0, sizeof own);
    memcpy(own.mark, "upipe-ff", sizeof own.mark);
    own.rank = rank;
    own.ranks = ranks;
    own.bytes = bytes;
    why = all == NULL                                                     ? "out of memory"
          : secret_draw(&own.mine, sizeof own.mine) != 0                  ? "there are no random numbers"
          : strlen(path) >= RENDEZVOUS_PATH - 16                          ? "it is too long"
          : !rendezvous_usable(path, 0) || !rendezvous_usable(path, rank) ? "it is no regular file"
                                                                          : NULL;
    if (why != NULL) {
        free(all);
        return cli_fail("rank %d cannot use %.200s: %s", rank, path, why);
    }
    own.mine |= 1;
    *all = own;
    if (rank == 0) {
        memcpy((char *)numbers + numbers_bytes, data, bytes);
        status = rendezvous_host(l, all, whole, numbers, (char *)all + whole, until, seconds);
    } else {
        status = rendezvous_guest(path, &own, all, whole, numbers, until, seconds);
        if (status == 0) memcpy(data, (char *)numbers + numbers_bytes, bytes);
    }
    free(all);
    return status;
}

#endif
