/* 03_all_to_all.c -- trading tokens for heads and back, on four ranks that are threads
 *
 *     cc -O2 -march=native -I . examples/03_all_to_all.c -lm -pthread && ./a.out
 *
 * Before: each rank has its own 2 of the 8 tokens, all 4 heads. After: all tokens, one head. An element's
 * value names its origin: 10 * token + head. Nothing is packed: the send buffer is ordered by the rank that
 * each block goes to.
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

enum { RANKS = 4, TOKENS = 8, LOCAL = TOKENS / RANKS };

typedef struct rank_data {
    upipe_plan plan;
    float send[RANKS][LOCAL], back[RANKS][LOCAL]; /* [to or from][token], one element a head */
    float head[TOKENS];                           /* what the rank gets: its head of all tokens */
    int64_t sent;
} rank_data;

typedef struct shared {
    upipe_threads team;
    upipe_ops ops;
    rank_data ranks[RANKS];
} shared;

static upipe_status rank_main(void *user, int rank)
{
    shared *all = (shared *)user;
    rank_data *r = &all->ranks[rank];
    upipe_ctx c = {0};
    upipe_status s;
    c.ops = &all->ops, c.team = upipe_threads_comm(&all->team, rank);
    for (int peer = 0; peer < RANKS; ++peer)
        for (int t = 0; t < LOCAL; ++t) r->send[peer][t] = (float)(10 * (rank * LOCAL + t) + peer);
    s = upipe_a2a_to_heads(&c, r->head, r->send, &r->plan, 0, UPIPE_A2A_Q, sizeof(float));
    if (s == UPIPE_OK) s = upipe_a2a_to_tokens(&c, r->back, r->head, &r->plan, 0, UPIPE_A2A_Q, sizeof(float));
    if (s != UPIPE_OK) upipe_comm_abort(c.team, c.err.text);
    r->sent = c.team->sent_bytes;
    return s;
}

int main(void)
{
    static shared all;
    upipe_plan_desc d = {0};
    upipe_err err;
    int intact = 0;
    d.tokens = TOKENS, d.ranks = RANKS, d.heads = RANKS, d.head_dim = 1;
    for (d.rank = 0; d.rank < RANKS; ++d.rank)
        if (upipe_plan_init(&all.ranks[d.rank].plan, &d, &err)) return fprintf(stderr, "%s\n", err.text), 1;
    upipe_cpu_ops(&all.ops);
    if (upipe_threads_init(&all.team, RANKS, 10, &err) ||
        upipe_threads_run(&all.team, rank_main, &all, NULL, &err))
        return fprintf(stderr, "%s\n", err.text), 1;
    upipe_threads_free(&all.team);
    for (int rank = 0; rank < RANKS; ++rank) {
        const rank_data *r = &all.ranks[rank];
        printf("rank %d had tokens %d and %d of all heads; now head %d of all tokens:", rank, rank * LOCAL,
               rank * LOCAL + 1, rank);
        for (int t = 0; t < TOKENS; ++t) printf(" %02.0f", (double)r->head[t]);
        printf("   (%lld bytes sent, there and back)\n", (long long)r->sent);
        intact += memcmp(r->send, r->back, sizeof r->send) == 0;
    }
    printf("tokens that came back unchanged: on %d of %d ranks\n", intact, RANKS);
    return fflush(stdout) != 0 || intact != RANKS;
}
