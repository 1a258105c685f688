/* 03_all_to_all.c -- trading tokens for heads and back, on four ranks that are threads
 *
 * Before: each rank has its own 2 of the 8 tokens, all 4 heads. After: all tokens, one head. An element's
 * value names its origin: 10 * token + head. Nothing is packed: the send buffer is ordered by the rank that
 * each block goes to.
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"

#include "common/device.h"

enum { RANKS = 4, TOKENS = 8, LOCAL = TOKENS / RANKS };

typedef struct shared { /* in memory that the device reaches */
    upipe_threads team;
    upipe_plan plan;
    int kind; /* of device */
    float send[RANKS][RANKS][LOCAL],
        back[RANKS][RANKS][LOCAL]; /* [rank][to or from][token], one element a head */
    float heads[RANKS][TOKENS];    /* what each rank got: its head of all tokens */
    int64_t sent[RANKS];
    upipe_err errors[RANKS];
    int intact; /* ranks whose tokens are as before */
} shared;

static upipe_status rank_main(void *user, int rank)
{
    shared *all = (shared *)user;
    float(*send)[LOCAL] = all->send[rank], (*back)[LOCAL] = all->back[rank];
    upipe_ctx c;
    upipe_status s;
    device d;
    int peer, t;
    memset(&c, 0, sizeof c);
    s = device_open(&d, all->kind, &c.err);
    device_use(&d, &c);
    c.team = upipe_threads_comm(&all->team, rank);

    for (peer = 0; peer < RANKS; ++peer)
        for (t = 0; t < LOCAL; ++t) send[peer][t] = (float)(10 * (rank * LOCAL + t) + peer);
    if (s == UPIPE_OK)
        s = upipe_a2a_to_heads(&c, all->heads[rank], send, &all->plan, 0, UPIPE_A2A_Q, sizeof(float));
    if (s == UPIPE_OK)
        s = upipe_a2a_to_tokens(&c, back, all->heads[rank], &all->plan, 0, UPIPE_A2A_Q, sizeof(float));
    if (s == UPIPE_OK) s = c.ops->sync(&c); /* only then may the host look */
    if (s == UPIPE_OK && memcmp(send, back, sizeof all->send[rank]) == 0)
        __atomic_fetch_add(&all->intact, 1, __ATOMIC_RELAXED);
    all->sent[rank] = c.team->sent_bytes;
    all->errors[rank] = c.err;
    device_close(&d, NULL);
    return s;
}

int main(int argc, char **argv)
{
    shared *all;
    void *buf;
    upipe_plan_desc d = {0};
    upipe_err err;
    upipe_status s;
    int rank, t, kind, bad = device_args(argc, argv, &kind);
    if (bad) return bad;
    s = device_shared(kind, &buf, sizeof *all, &err);
    all = (shared *)buf;
    d.tokens = TOKENS, d.ranks = RANKS, d.heads = RANKS, d.head_dim = 1;
    if (s == UPIPE_OK) s = upipe_plan_init(&all->plan, &d, &err);
    if (s == UPIPE_OK) s = upipe_threads_init(&all->team, RANKS, 10, &err);
    if (s != UPIPE_OK) {
        fprintf(stderr, "%s: %s\n", upipe_status_name(s), err.text);
        return 1;
    }
    all->kind = kind;
    s = upipe_threads_run(&all->team, rank_main, all, NULL, NULL);
    upipe_threads_free(&all->team);
    for (rank = 0; rank < RANKS; ++rank) {
        if (s != UPIPE_OK) fprintf(stderr, "rank %d: %s\n", rank, all->errors[rank].text);
        printf("rank %d had tokens %d and %d of all heads; now head %d of all tokens:", rank, rank * LOCAL,
               rank * LOCAL + 1, rank);
        for (t = 0; t < TOKENS; ++t) printf(" %02.0f", (double)all->heads[rank][t]);
        printf("   (%lld bytes sent, there and back)\n", (long long)all->sent[rank]);
    }
    printf("tokens that came back unchanged: on %d of %d ranks\n", all->intact, RANKS);
    bad = s != UPIPE_OK || all->intact != RANKS;
    device_shared_free(kind, buf);
    return bad;
}
