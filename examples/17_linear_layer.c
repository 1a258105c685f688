/* 17_linear_layer.c -- a layer of linear attention over four ranks: forward and backward, against one rank alone
 *
 *     cc -O2 -march=native -I . examples/17_linear_layer.c -lm -pthread && ./a.out
 *
 * The gated delta net of Qwen3.5, with small numbers. A dry run of the same calls finds the slab's size. Ranks hold multiples of
 * 64 tokens, the rule's chunk, so y and dx have the bits of one rank. Gradients of weights are summed over ranks.
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/cpu/upipe_cpu_linear.h"
#include "upipe/upipe.h"

#include <math.h>

enum {
    RANKS = 4,
    TOKENS = 512,
    MODEL = 64,
    HEADS = 4,
    KEYS = 2,
    KEY = 32,
    VALUE = 16,
    TAPS = 4,
    BLOCKS = 32
};
enum { QKV = 2 * KEYS * KEY + HEADS * VALUE, WIDE = HEADS * VALUE };

/* Weights, or their gradients, one behind the other. */
typedef struct weights {
    float qkv[QKV * MODEL], z[WIDE * MODEL], b[HEADS * MODEL], a[HEADS * MODEL], out[MODEL * WIDE];
    float conv[QKV * TAPS], a_log[HEADS], dt_bias[HEADS], norm[VALUE];
} weights;

enum { WEIGHTS = sizeof(weights) / sizeof(float) };

/* The whole sequence. Each rank reads and writes its own rows. The loss is |y|^2 / 2, so the gradient of y is y. */
typedef struct sequence {
    upipe_threads world;
    upipe_ops ops;
    upipe_linear_ops rules;
    weights w, grads; /* grads: rank 0's sums */
    float x[TOKENS * MODEL], y[TOKENS * MODEL], dx[TOKENS * MODEL];
    int64_t sent[RANKS];
    size_t slab;
} sequence;

/* A layer forward and backward, and sums of the weights' gradients over ranks. */
static upipe_status step(upipe_ctx *c, const upipe_linear_layer *l, sequence *q, float *grads)
{
    const int64_t first = upipe_shard_pos(&l->plan->shard, 0), n = l->plan->local;
    weights *g = (weights *)grads;
    const upipe_linear_layer_grads to = {g->qkv,  g->z,     g->b,       g->a,   g->out,
                                         g->conv, g->a_log, g->dt_bias, g->norm};
    const upipe_view x = upipe_view_packed(q->x + first * MODEL, UPIPE_F32, n, 1, MODEL),
                     y = upipe_view_packed(q->y + first * MODEL, UPIPE_F32, n, 1, MODEL),
                     dx = upipe_view_packed(q->dx + first * MODEL, UPIPE_F32, n, 1, MODEL);
    upipe_linear_layer_saved saved;
    UPIPE_TRY(upipe_linear_layer_fwd(c, c->team, l, &saved, y, x, NULL));
    q->sent[c->team->rank] = c->team->sent_bytes;
    UPIPE_TRY(upipe_linear_layer_bwd(c, c->team, l, dx, &to, &saved, y, x, NULL));
    return upipe_all_reduce(c, c->team, grads, WEIGHTS);
}

/* The slab's size, for the table, plan and layer of a rank. */
static upipe_status plan_slab(sequence *q, const upipe_linear_layer *l, float *grads, size_t *bytes,
                              upipe_err *err)
{
    upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry);
    upipe_status s = dry != NULL ? upipe_dry_init(dry, l->plan, &q->ops) : UPIPE_ERR_MEMORY;
    if (s == UPIPE_OK) s = step(&dry->ctx, l, q, grads);
    *bytes = s == UPIPE_OK ? dry->mem.need : 0;
    if (dry != NULL) *err = dry->ctx.err;
    free(dry);
    return s;
}

static upipe_status rank_main(void *user, int rank)
{
    sequence *q = (sequence *)user;
    const weights *w = &q->w;
    upipe_plan_desc d = {.tokens = TOKENS, .ranks = q->world.ranks, .rank = rank, .heads = 8, .head_dim = 32};
    upipe_mem_block blocks[BLOCKS];
    upipe_mem mem;
    upipe_plan plan;
    upipe_ctx c = {.ops = &q->ops, .mem = &mem, .team = upipe_threads_comm(&q->world, rank)};
    upipe_linear_layer l = {
        .plan = &plan, .rules = &q->rules, .heads = HEADS, .key_heads = KEYS, .norm_eps = 1e-6f};
    float *grads = (float *)calloc(WEIGHTS, sizeof(float));
    void *slab = NULL;
    size_t bytes = 0;
    upipe_status s = grads != NULL ? UPIPE_OK : UPIPE_ERR_MEMORY;
    d.model_dim = MODEL;
    l.key_dim = KEY, l.value_dim = VALUE, l.taps = TAPS, l.stage_keys = 1;
    l.w_qkv = w->qkv, l.w_z = w->z, l.w_b = w->b, l.w_a = w->a, l.w_out = w->out;
    l.conv = w->conv, l.a_log = w->a_log, l.dt_bias = w->dt_bias, l.norm_weight = w->norm;
    if (s == UPIPE_OK) s = upipe_plan_init(&plan, &d, &c.err);
    if (s == UPIPE_OK) s = plan_slab(q, &l, grads, &bytes, &c.err);
    if (s == UPIPE_OK) slab = aligned_alloc(UPIPE_MEM_ALIGN, bytes);
    upipe_mem_init(&mem, slab, slab != NULL ? bytes : 0, blocks, BLOCKS);
    if (s == UPIPE_OK) s = step(&c, &l, q, grads);
    if (s != UPIPE_OK) upipe_comm_abort(c.team, c.err.text);
    if (rank == 0 && s == UPIPE_OK) memcpy(&q->grads, grads, sizeof q->grads);
    if (rank == 0) q->slab = bytes;
    free(slab);
    free(grads);
    return s;
}

static upipe_status run(sequence *q, int ranks, upipe_err *err)
{
    float *w = (float *)&q->w;
    upipe_status s;
    memset(q, 0, sizeof *q);
    upipe_cpu_ops(&q->ops);
    upipe_cpu_linear(&q->rules);
    for (int i = 0; i < TOKENS * MODEL; ++i) q->x[i] = (float)cos(i * 0.23);
    for (int i = 0; i < (int)WEIGHTS; ++i) w[i] = (float)sin(i * 0.37) / 4;
    for (int i = 0; i < VALUE; ++i) q->w.norm[i] = 1;
    UPIPE_TRY(upipe_threads_init(&q->world, ranks, 60, err));
    s = upipe_threads_run(&q->world, rank_main, q, NULL, err);
    upipe_threads_free(&q->world);
    return s;
}

int main(void)
{
    static sequence alone, ranks;
    const float *g = (const float *)&alone.grads, *h = (const float *)&ranks.grads;
    double far = 0, most = 0;
    upipe_err err;
    int same;
    if (run(&alone, 1, &err) || run(&ranks, RANKS, &err)) return fprintf(stderr, "%s\n", err.text), 1;
    same = memcmp(alone.y, ranks.y, sizeof alone.y) == 0 && memcmp(alone.dx, ranks.dx, sizeof alone.dx) == 0;
    for (int i = 0; i < (int)WEIGHTS; ++i) {
        const double d = fabs((double)g[i] - (double)h[i]);
        if (!(d <= far)) far = d; /* a NaN is far */
        most = fmax(most, fabs((double)g[i]));
    }
    printf("%d ranks: y and dx have %s bits of one rank; gradients of weights are within %.1e of %.1e\n",
           RANKS, same ? "the" : "other", far, most);
    for (int r = 0; r < RANKS; ++r) printf("rank %d sends %lld bytes forward\n", r, (long long)ranks.sent[r]);
    printf("a rank's slab has %zu bytes; of one rank alone, %zu\n", ranks.slab, alone.slab);
    return fflush(stdout) != 0 || !same || !(far <= 1e-5 * most);
}
