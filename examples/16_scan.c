/* 16_scan.c -- linear attention over four ranks: a state goes from rank to rank, against one rank alone
 *
 *     cc -O2 -march=native -I . examples/16_scan.c -lm -pthread && ./a.out
 *
 * The rule of a layer of Qwen3-Next's kind: the gated delta rule takes Q, K, V and the gates to O. 17_linear_layer.c is the
 * whole layer. Ranks hold multiples of 64 tokens, the rule's chunk, so O and the gradients have the bits of one rank.
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/cpu/upipe_cpu_linear.h"
#include "upipe/upipe.h"

#include <math.h>

enum { RANKS = 4, TOKENS = 512, HEADS = 4, STAGE_HEADS = 1, KEY = 32, VALUE = 16, BLOCKS = 16 };
enum { QK = HEADS * KEY, V = HEADS * VALUE, STATE = HEADS * KEY * VALUE, POOL = 8 << 20 };

/* The whole sequence. Each rank reads and writes its own rows. */
typedef struct sequence {
    upipe_threads world;
    upipe_ops ops;
    upipe_linear_ops rules;
    float q[TOKENS * QK], k[TOKENS * QK], v[TOKENS * V], g[TOKENS * HEADS], beta[TOKENS * HEADS],
        o[TOKENS * V];
    float dq[TOKENS * QK], dk[TOKENS * QK], dv[TOKENS * V], dg[TOKENS * HEADS], dbeta[TOKENS * HEADS];
    int64_t sent[RANKS];
} sequence;

/* What the rule is called with: this rank's tokens. */
typedef struct part {
    sequence *s;
    int64_t first, n;
} part;

/* This rank's rows of a tensor, of `heads` heads from `head` on. */
static upipe_view rows(const part *p, float *data, int head, int heads, int d)
{
    return upipe_view_make(data + (p->first * HEADS + head) * d, UPIPE_F32, p->n, HEADS * d, heads, d, d);
}

static upipe_linear_grad call_of(const part *p, int head, int heads)
{
    sequence *s = p->s;
    upipe_linear_grad g = {0};
    g.a.q = rows(p, s->q, head, heads, KEY), g.a.k = rows(p, s->k, head, heads, KEY);
    g.a.v = rows(p, s->v, head, heads, VALUE), g.a.o = g.dout = rows(p, s->o, head, heads, VALUE);
    g.a.g = rows(p, s->g, head, heads, 1), g.a.beta = rows(p, s->beta, head, heads, 1);
    g.dq = rows(p, s->dq, head, heads, KEY), g.dk = rows(p, s->dk, head, heads, KEY);
    g.dv = rows(p, s->dv, head, heads, VALUE);
    g.dg = rows(p, s->dg, head, heads, 1), g.dbeta = rows(p, s->dbeta, head, heads, 1);
    g.a.pos = p->first;
    return g;
}

/* The rule of one stage. The loss is |O|^2 / 2, so the gradient of O is O. */
static upipe_status rule_fwd(upipe_ctx *c, void *user, int first, int heads, const float *in, float *out)
{
    const part *p = (const part *)user;
    upipe_linear_grad g = call_of(p, first, heads);
    g.a.state = in, g.a.out = out;
    g.a.work_bytes = upipe_linear_bytes(c, &p->s->rules, &g.a, UPIPE_LINEAR_FWD);
    UPIPE_TRY(upipe_alloc(c, &g.a.work, g.a.work_bytes, UPIPE_USE_SCRATCH, "rule"));
    UPIPE_TRY(upipe_linear_fwd(c, &p->s->rules, &g.a));
    return upipe_free(c, g.a.work);
}

static upipe_status rule_bwd(upipe_ctx *c, void *user, int first, int heads, const float *state,
                             float *dstate)
{
    const part *p = (const part *)user;
    upipe_linear_grad g = call_of(p, first, heads);
    g.a.state = state, g.dstate = dstate;
    g.a.work_bytes = upipe_linear_bytes(c, &p->s->rules, &g.a, UPIPE_LINEAR_BWD);
    UPIPE_TRY(upipe_alloc(c, &g.a.work, g.a.work_bytes, UPIPE_USE_SCRATCH, "rule"));
    UPIPE_TRY(upipe_linear_bwd(c, &p->s->rules, &g));
    return upipe_free(c, g.a.work);
}

static upipe_status rank_main(void *user, int rank)
{
    sequence *q = (sequence *)user;
    upipe_plan_desc d = {
        .tokens = TOKENS, .ranks = q->world.ranks, .rank = rank, .heads = HEADS, .head_dim = KEY};
    upipe_mem_block blocks[BLOCKS];
    upipe_mem mem;
    upipe_plan plan;
    upipe_states states = {0};
    upipe_ctx c = {.ops = &q->ops, .mem = &mem, .team = upipe_threads_comm(&q->world, rank)};
    upipe_scan s = {.plan = &plan, .heads = HEADS, .size = KEY * VALUE, .stage_heads = STAGE_HEADS};
    part p = {.s = q};
    void *slab = aligned_alloc(UPIPE_MEM_ALIGN, POOL), *data = NULL;
    upipe_status status;
    upipe_mem_init(&mem, slab, slab != NULL ? POOL : 0, blocks, BLOCKS);
    s.fwd = rule_fwd, s.bwd = rule_bwd, s.user = &p;
    status = upipe_plan_init(&plan, &d, &c.err);
    if (status == UPIPE_OK) p.first = upipe_shard_pos(&plan.shard, 0), p.n = plan.local;
    if (status == UPIPE_OK)
        status = upipe_alloc(&c, &data, STATE * sizeof(float), UPIPE_USE_CHECKPOINT, "states");
    states.data = (float *)data;
    if (status == UPIPE_OK) status = upipe_scan_fwd(&c, c.team, &s, &states, NULL);
    if (status == UPIPE_OK) status = upipe_scan_bwd(&c, c.team, &s, &states, NULL);
    if (status != UPIPE_OK) upipe_comm_abort(c.team, c.err.text);
    q->sent[rank] = c.team->sent_bytes;
    free(slab);
    return status;
}

static upipe_status run(sequence *q, int ranks, upipe_err *err)
{
    upipe_status s;
    memset(q, 0, sizeof *q);
    upipe_cpu_ops(&q->ops);
    upipe_cpu_linear(&q->rules);
    for (int i = 0; i < TOKENS * QK; ++i)
        q->q[i] = (float)cos(i * 0.11) / 4, q->k[i] = (float)sin(i * 0.37) / 4;
    for (int i = 0; i < TOKENS * V; ++i) q->v[i] = (float)cos(i * 0.23);
    for (int i = 0; i < TOKENS * HEADS; ++i)
        q->g[i] = (float)(-0.02 * (1 + sin(i))), q->beta[i] = (float)(0.5 + 0.4 * cos(i));
    UPIPE_TRY(upipe_threads_init(&q->world, ranks, 60, err));
    s = upipe_threads_run(&q->world, rank_main, q, NULL, err);
    upipe_threads_free(&q->world);
    return s;
}

int main(void)
{
    static sequence alone, ranks;
    upipe_err err;
    int same;
    if (run(&alone, 1, &err) || run(&ranks, RANKS, &err)) return fprintf(stderr, "%s\n", err.text), 1;
    same =
        memcmp(alone.o, ranks.o, sizeof alone.o) == 0 && memcmp(alone.dq, ranks.dq, sizeof alone.dq) == 0 &&
        memcmp(alone.dk, ranks.dk, sizeof alone.dk) == 0 && memcmp(alone.dv, ranks.dv, sizeof alone.dv) == 0;
    printf("%d ranks: O, dQ, dK and dV have %s bits of one rank\n", RANKS, same ? "the" : "other");
    for (int r = 0; r < RANKS; ++r) printf("rank %d sent %lld bytes\n", r, (long long)ranks.sent[r]);
    return fflush(stdout) != 0 || !same;
}
