/* ranks.h -- a program's processes over NCCL, as threads of one process   tests
 *
 *     #define RANKS_PROGRAM "../../examples/llama/train.c"      whole: this header defines main
 *     #include "ranks.h"
 *
 *     fake_train_ranks HOSTS flags of train ...      HOSTS: a letter for each rank, ranks of one machine have the same
 *
 * The fake's NCCL does not span processes. Here each rank is a thread with an environment of its own, as torchrun gives
 * it to a process, and with a device of its own. It runs the program's whole main, and meets the others over TCP as
 * processes do. What processes have apart and these threads share: the sentences that a rank holds, and signals. So
 * failures are not tested here.
 */
#ifndef RANKS_H
#define RANKS_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake/fake.h"

enum { RANKS_MAX = 16, WORDS_MAX = 64 };

static __thread struct {
    char rank[16], ranks[16], local[16], port[16], host[2];
    int parsing;
} rank_env;
static pthread_mutex_t rank_parsing = PTHREAD_MUTEX_INITIALIZER; /* cli.h has one state for all threads */

static char *rank_getenv(const char *name)
{
    static char address[] = "127.0.0.1";
    if (strcmp(name, "MASTER_ADDR") == 0) {
        if (rank_env.parsing) pthread_mutex_unlock(&rank_parsing); /* asked after the flags */
        rank_env.parsing = 0;
        return address;
    }
    return strcmp(name, "RANK") == 0          ? rank_env.rank
           : strcmp(name, "WORLD_SIZE") == 0  ? rank_env.ranks
           : strcmp(name, "LOCAL_RANK") == 0  ? rank_env.local
           : strcmp(name, "MASTER_PORT") == 0 ? rank_env.port
                                              : getenv(name);
}

static int rank_gethostname(char *name, size_t bytes)
{
    snprintf(name, bytes, "%s", rank_env.host);
    return 0;
}

int program_main(int argc, char **argv);

#define getenv      rank_getenv
#define gethostname rank_gethostname
#define main        program_main
#include RANKS_PROGRAM
#undef main

typedef struct rank_thread {
    pthread_t thread;
    const char *hosts;
    char **words;
    int rank, words_n, port, status;
} rank_thread;

static void *rank_main(void *arg)
{
    rank_thread *t = (rank_thread *)arg;
    char *words[WORDS_MAX];
    memcpy(words, t->words, (size_t)(t->words_n + 1) * sizeof *words);
    fake_rank(t->rank);
    snprintf(rank_env.rank, sizeof rank_env.rank, "%d", t->rank);
    snprintf(rank_env.ranks, sizeof rank_env.ranks, "%d", (int)strlen(t->hosts));
    snprintf(rank_env.local, sizeof rank_env.local, "%d",
             t->rank); /* a device of its own: the fake has one machine */
    snprintf(rank_env.port, sizeof rank_env.port, "%d", t->port);
    rank_env.host[0] = t->hosts[t->rank];
    pthread_mutex_lock(&rank_parsing);
    rank_env.parsing = 1;
    optind = 0;
    t->status = program_main(t->words_n, words);
    if (rank_env.parsing) pthread_mutex_unlock(&rank_parsing);
    return NULL;
}

/* A port that was free a moment ago. */
static int some_port(void)
{
    struct sockaddr_storage at;
    socklen_t bytes = sizeof at;
    char port[16] = "";
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || listen(fd, 1) != 0 || getsockname(fd, (struct sockaddr *)&at, &bytes) != 0 ||
        getnameinfo((struct sockaddr *)&at, bytes, NULL, 0, port, sizeof port, NI_NUMERICSERV) != 0)
        return 29517;
    close(fd);
    return atoi(port);
}

int main(int argc, char **argv)
{
    static rank_thread ranks[RANKS_MAX];
    int n = argc > 1 ? (int)strlen(argv[1]) : 0, port = some_port(), status = 0, r;
    if (n < 1 || n > RANKS_MAX || argc >= WORDS_MAX) return fprintf(stderr, "usage: HOSTS flags\n"), 2;
    for (r = 0; r < n; ++r) {
        ranks[r].hosts = argv[1];
        ranks[r].words = argv + 1; /* the first is the program's name to the flags */
        ranks[r].words_n = argc - 1;
        ranks[r].rank = r;
        ranks[r].port = port;
        if (pthread_create(&ranks[r].thread, NULL, rank_main, &ranks[r]) != 0) return 2;
    }
    for (r = 0; r < n; ++r) {
        pthread_join(ranks[r].thread, NULL);
        if (ranks[r].status != 0) status = ranks[r].status;
    }
    if (!fake_check_clean()) return 3;
    return status;
}

#endif
