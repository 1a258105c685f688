/* 07_linear.c -- linear attention over four ranks: a state goes from rank to rank, in a layer and around a rule of the host's
 *
 *     cc -O2 -march=native -I . examples/07_linear.c -lm -pthread && ./a.out
 *
 * First a layer, the gated delta net of Qwen3.5 with small numbers. Then what a trainer with kernels of its own calls: the
 * pass of the state alone, around its own rule. Ranks hold multiples of 64 tokens, the chunk of the layer's rule, so results
 * have the bits of one rank alone. Gradients of weights are summed over ranks.
 */
#include "upipe/net/upipe_net_threads_session.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/cpu/upipe_cpu_linear.h"
#include "upipe/upipe.h"

enum { RANKS = 4, TOKENS = 512, MODEL = 64, HEADS = 4, KEYS = 2, KEY = 32, VALUE = 16, TAPS = 4 };
enum { QKV = 2 * KEYS * KEY + HEADS * VALUE, V = HEADS * VALUE };

/* Weights, or their gradients, one behind the other. */
typedef struct weights {
    float qkv[QKV * MODEL], z[V * MODEL], b[HEADS * MODEL], a[HEADS * MODEL], out[MODEL * V];
    float conv[QKV * TAPS], a_log[HEADS], dt_bias[HEADS], norm[VALUE];
} weights;

enum { WEIGHTS = sizeof(weights) / sizeof(float) };

/* The whole sequence. Each rank reads and writes its own rows. Losses are |y|^2 / 2 and |O|^2 / 2: y and O are their gradients. */
typedef struct sequence {
    upipe_linear_ops rules;
    weights w, grads[RANKS];
    float x[TOKENS * MODEL], y[TOKENS * MODEL], dx[TOKENS * MODEL];
    float v[TOKENS * V], o[TOKENS * V], dv[TOKENS * V]; /* of the host's rule */
    int64_t sent[RANKS];
    size_t slab;
} sequence;

/* The layer forward and backward. */
static upipe_status layer(upipe_ctx *c, const upipe_plan *plan, sequence *q)
{
    const int64_t at = upipe_shard_pos(&plan->shard, 0) * MODEL;
    const weights *w = &q->w;
    weights *g = &q->grads[c->team->rank];
    const upipe_linear_layer_grads to = {g->qkv,  g->z,     g->b,       g->a,   g->out,
                                         g->conv, g->a_log, g->dt_bias, g->norm};
    const upipe_view x = upipe_view_packed(q->x + at, UPIPE_F32, plan->local, 1, MODEL),
                     y = upipe_view_packed(q->y + at, UPIPE_F32, plan->local, 1, MODEL),
                     dx = upipe_view_packed(q->dx + at, UPIPE_F32, plan->local, 1, MODEL);
    upipe_linear_layer l = {0};
    upipe_linear_layer_saved saved;
    l.plan = plan, l.rules = &q->rules, l.norm_eps = 1e-6f, l.stage_keys = 1;
    l.heads = HEADS, l.key_heads = KEYS, l.key_dim = KEY, l.value_dim = VALUE, l.taps = TAPS;
    l.w_qkv = w->qkv, l.w_z = w->z, l.w_b = w->b, l.w_a = w->a, l.w_out = w->out;
    l.conv = w->conv, l.a_log = w->a_log, l.dt_bias = w->dt_bias, l.norm_weight = w->norm;
    UPIPE_TRY(upipe_linear_layer_fwd(c, c->team, &l, &saved, y, x, NULL));
    UPIPE_TRY(upipe_linear_layer_bwd(c, c->team, &l, dx, &to, &saved, y, x, NULL));
    return upipe_all_reduce(c, c->team, (float *)g, WEIGHTS);
}

/* The host's rule: a head's state is a vector, S = 0.99 S + v and O = S for each token of this rank. */
static upipe_status rule_fwd(upipe_ctx *c, void *user, int head, int heads, const float *in, float *out)
{
    sequence *q = (sequence *)user;
    const int n = TOKENS / c->team->ranks, first = n * c->team->rank, width = heads * VALUE;
    if (c->mem->dry) return UPIPE_OK; /* nothing may be accessed */
    memcpy(out, in, (size_t)width * sizeof *out);
    for (int t = first; t < first + n; ++t)
        for (int i = 0; i < width; ++i) {
            const int at = t * V + head * VALUE + i;
            q->o[at] = out[i] = 0.99f * out[i] + q->v[at];
        }
    return UPIPE_OK;
}

/* From the last token to the first; dstate becomes the gradient of the state before them. */
static upipe_status rule_bwd(upipe_ctx *c, void *user, int head, int heads, const float *state, float *dstate)
{
    sequence *q = (sequence *)user;
    const int n = TOKENS / c->team->ranks, first = n * c->team->rank;
    (void)state; /* this rule is linear in it */
    if (c->mem->dry) return UPIPE_OK;
    for (int t = first + n - 1; t >= first; --t)
        for (int i = 0; i < heads * VALUE; ++i) {
            const int at = t * V + head * VALUE + i;
            q->dv[at] = dstate[i] += q->o[at];
            dstate[i] *= 0.99f;
        }
    return UPIPE_OK;
}

/* The state's pass around it: a stage's heads go on while the next ones are computed. */
static upipe_status scan(upipe_ctx *c, const upipe_plan *plan, sequence *q)
{
    upipe_scan s = {.plan = plan, .heads = HEADS, .size = VALUE, .stage_heads = 1};
    upipe_states states = {0};
    void *data;
    s.fwd = rule_fwd, s.bwd = rule_bwd, s.user = q;
    UPIPE_TRY(upipe_alloc(c, &data, upipe_scan_state_bytes(&s), UPIPE_USE_CHECKPOINT, "states"));
    states.data = (float *)data;
    q->sent[c->team->rank] = -c->team->sent_bytes;
    UPIPE_TRY(upipe_scan_fwd(c, c->team, &s, &states, NULL));
    q->sent[c->team->rank] += c->team->sent_bytes;
    UPIPE_TRY(upipe_scan_bwd(c, c->team, &s, &states, NULL));
    return upipe_free(c, data);
}

/* The slab's size is found by the same calls. */
static upipe_status dry_main(void *user, upipe_session *h)
{
    UPIPE_TRY(layer(&h->dry.ctx, &h->plan, (sequence *)user));
    return scan(&h->dry.ctx, &h->plan, (sequence *)user);
}

static upipe_status rank_main(void *user, upipe_session *h)
{
    sequence *q = (sequence *)user;
    if (h->ctx.team->rank == 0) q->slab = upipe_session_slab_bytes(h);
    UPIPE_TRY(layer(&h->ctx, &h->plan, q));
    return scan(&h->ctx, &h->plan, q);
}

static upipe_status run(sequence *q, int ranks, upipe_err *err)
{
    float *w = (float *)&q->w;
    upipe_session_desc desc = {0};
    upipe_ops ops;
    upipe_cpu_ops(&ops);
    upipe_cpu_linear(&q->rules);
    for (int i = 0; i < TOKENS * MODEL; ++i) q->x[i] = (float)cos(i * 0.23);
    for (int i = 0; i < (int)WEIGHTS; ++i) w[i] = (float)sin(i * 0.37) / 4;
    for (int i = 0; i < VALUE; ++i) q->w.norm[i] = 1;
    for (int i = 0; i < TOKENS * V; ++i) q->v[i] = (float)cos(i * 0.11);
    desc.plan.tokens = TOKENS, desc.plan.ranks = ranks, desc.plan.model_dim = MODEL;
    desc.plan.heads = 8, desc.plan.head_dim = 32; /* of layers with softmax, not read here */
    desc.dry = dry_main, desc.user = q;
    return upipe_threads_sessions(&desc, &ops, 0, rank_main, err);
}

int main(void)
{
    static sequence alone, ranks;
    const float *g = (const float *)&alone.grads[0], *h = (const float *)&ranks.grads[0];
    double far = 0, most = 0;
    upipe_err err;
    int same;
    if (run(&alone, 1, &err) || run(&ranks, RANKS, &err)) return fprintf(stderr, "%s\n", err.text), 1;
    same = memcmp(alone.y, ranks.y, sizeof alone.y) == 0 &&
           memcmp(alone.dx, ranks.dx, sizeof alone.dx) == 0 &&
           memcmp(alone.o, ranks.o, sizeof alone.o) == 0 && memcmp(alone.dv, ranks.dv, sizeof alone.dv) == 0;
    for (int i = 0; i < (int)WEIGHTS; ++i) {
        const double d = fabs((double)g[i] - (double)h[i]);
        if (!(d <= far)) far = d; /* a NaN is far */
        most = fmax(most, fabs((double)g[i]));
    }
    printf(
        "%d ranks: y, dx, O and dv have %s bits of one rank; gradients of weights are within %.1e of %.1e\n",
        RANKS, same ? "the" : "other", far, most);
    for (int r = 0; r < RANKS; ++r)
        printf("rank %d sends a state of %lld bytes\n", r, (long long)ranks.sent[r]);
    printf("a rank's slab has %zu bytes; of one rank alone, %zu\n", ranks.slab, alone.slab);
    return fflush(stdout) != 0 || !same || !(far <= 1e-5 * most);
}
