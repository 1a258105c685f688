/* 13_plug_attention.c -- attention of the host's own in the compute table, for the calls that it supports
 *
 *     cc -O2 -march=native -I . examples/13_plug_attention.c -lm && ./a.out
 *
 * Plain loops, forward and backward; 13_plug_cudnn.cpp does it with cuDNN on a GPU. The backward reads O, as cuDNN's and
 * FlashAttention's do: the table says so, and a block keeps O for it. A causal block is served by the loops; one with a
 * sliding window is forwarded to the library's kernels. Both results are compared with the library alone.
 */
#include <math.h>
#include <stdlib.h>

#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

enum { TOKENS = 128, HEADS = 8, KV_HEADS = 4, DIM = 64, CHUNK = 4, MODEL = 128, BLOCKS = 64 };
enum { X = TOKENS * MODEL, WQ = HEADS * DIM * MODEL, WK = KV_HEADS * DIM * MODEL };

/* ops.user points here: the library copies tables, so an entry finds its things through that pointer alone. */
typedef struct plug {
    upipe_ops base;         /* the table as it was: serves all other calls */
    int64_t served, passed; /* calls, of either kind */
} plug;

/* ---- an attention of one's own ---- */

/* Neither masks beyond full and causal, those of later versions of the library among them, nor older results to add to,
 * nor rows at other positions than the keys. */
static int loops_serve(const upipe_attn *a)
{
    upipe_mask known = {0};
    known.causal = a->mask.causal;
    return memcmp(&known, &a->mask, sizeof known) == 0 && !a->merge && a->v.d == a->q.d && a->q.n > 0 &&
           a->q.n == a->k.n && a->q_pos == a->k_pos && a->q.dtype == UPIPE_F32;
}

static float *row(upipe_view v, int64_t i, int h)
{
    return (float *)upipe_view_at(v, i, h);
}

static float dot(const float *a, const float *b, int n)
{
    float sum = 0;
    for (int k = 0; k < n; ++k) sum += a[k] * b[k];
    return sum;
}

static void add(float *to, float factor, const float *x, int n)
{
    for (int k = 0; k < n; ++k) to[k] += factor * x[k];
}

static upipe_status loops_fwd(upipe_ctx *c, const upipe_attn *a)
{
    plug *p = (plug *)c->ops->user;
    const float scale = upipe_attn_scale(a);
    const int d = a->q.d;
    if (!loops_serve(a) || a->o.dtype != UPIPE_F32) return ++p->passed, p->base.attn_fwd(c, a);
    ++p->served;
    for (int h = 0; h < a->q.h; ++h)
        for (int64_t i = 0; i < a->q.n; ++i) {
            const int64_t seen = a->mask.causal ? i + 1 : a->k.n;
            const int kv = h / (a->q.h / a->k.h);
            float top = -INFINITY, sum = 0, *o = row(a->o, i, h);
            for (int64_t j = 0; j < seen; ++j)
                top = fmaxf(top, scale * dot(row(a->q, i, h), row(a->k, j, kv), d));
            memset(o, 0, (size_t)d * sizeof *o);
            for (int64_t j = 0; j < seen; ++j) {
                float w = expf(scale * dot(row(a->q, i, h), row(a->k, j, kv), d) - top);
                sum += w;
                add(o, w, row(a->v, j, kv), d);
            }
            for (int j = 0; j < d; ++j) o[j] /= sum;
            *row(a->lse, i, h) = top + logf(sum); /* natural logarithm */
        }
    return UPIPE_OK;
}

/* dk and dv are added to, head by head and in the order of the queries. O is read; g->delta would do without it. */
static upipe_status loops_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    plug *p = (plug *)c->ops->user;
    const upipe_attn *a = &g->a;
    const float scale = upipe_attn_scale(a);
    const int d = a->q.d;
    if (!loops_serve(a)) return ++p->passed, p->base.attn_bwd(c, g);
    ++p->served;
    for (int h = 0; h < a->q.h; ++h)
        for (int64_t i = 0; i < a->q.n; ++i) {
            const int64_t seen = a->mask.causal ? i + 1 : a->k.n;
            const int kv = h / (a->q.h / a->k.h);
            const float *q = row(a->q, i, h), *dout = row(g->dout, i, h);
            const float delta = dot(dout, row(a->o, i, h), d);
            memset(row(g->dq, i, h), 0, (size_t)d * sizeof(float));
            for (int64_t j = 0; j < seen; ++j) {
                const float *k = row(a->k, j, kv), *v = row(a->v, j, kv);
                const float w = expf(scale * dot(q, k, d) - *row(a->lse, i, h));
                const float ds = scale * w * (dot(dout, v, d) - delta);
                add(row(g->dq, i, h), ds, k, d);
                add(row(g->dk, j, kv), ds, q, d);
                add(row(g->dv, j, kv), w, dout, d);
            }
        }
    return UPIPE_OK;
}

/* attn_bytes and attn_can stay the library's: the loops need no scratch, and what they lack is passed on. */
static void plug_loops(plug *p, upipe_ops *ops)
{
    p->base = *ops, p->served = p->passed = 0;
    ops->user = p;
    ops->attn_fwd = loops_fwd;
    ops->attn_bwd = loops_bwd;
    ops->attn_reads_o = 1;
}

/* ---- a block of two stages with it and without ---- */

static float x0[X], dx[2][X], wq[WQ], wk[WK], wv[WK];

/* dx = the gradient of x for the loss |out|^2 / 2. */
static upipe_status step(upipe_ctx *c, const upipe_layer *layer, float *to)
{
    upipe_grads grads = {0};
    upipe_saved saved;
    upipe_slots dout;
    upipe_view x;
    void *data;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, sizeof x0, UPIPE_USE_OTHER, "x", &c->err));
    memcpy(data, x0, sizeof x0);
    x = upipe_view_packed(data, UPIPE_F32, TOKENS, 1, MODEL);
    UPIPE_TRY(upipe_layer_fwd(c, layer, &saved, x));
    UPIPE_TRY(upipe_slots_alloc(c, layer->plan, &dout, UPIPE_SLOT_FULL, "dout"));
    memcpy(dout.data, saved.out.data, upipe_plan_rows_bytes(layer->plan, HEADS, DIM));
    UPIPE_TRY(upipe_layer_bwd(c, layer, x, &grads, &saved, &dout, x));
    memcpy(to, data, sizeof x0);
    UPIPE_TRY(upipe_mem_free(c->mem, dout.data, &c->err));
    return upipe_mem_free(c->mem, data, &c->err);
}

/* The step with this table, in a slab of the size that its dry run has found. */
static upipe_status run(const upipe_ops *ops, const upipe_layer *layer, float *to, upipe_err *err)
{
    static upipe_dry dry; /* too large for some stacks */
    upipe_mem_block blocks[BLOCKS];
    upipe_comm_self_state state;
    upipe_comm self;
    upipe_mem mem;
    upipe_ctx c = {0};
    upipe_status s;
    void *slab;
    if (upipe_dry_init(&dry, layer->plan, ops) || upipe_dry_layer(&dry, layer, 1))
        return *err = dry.ctx.err, dry.ctx.err.status;
    slab = aligned_alloc(UPIPE_MEM_ALIGN, dry.mem.need);
    upipe_mem_init(&mem, slab, slab != NULL ? dry.mem.need : 0, blocks, BLOCKS);
    upipe_comm_self(&self, &state, ops->copy);
    c.ops = ops, c.mem = &mem, c.team = &self;
    s = step(&c, layer, to);
    *err = c.err;
    free(slab);
    return s;
}

int main(void)
{
    upipe_plan_desc d = {0};
    upipe_plan plan;
    upipe_layer layer = {0};
    upipe_ops with;
    plug own;
    upipe_err err;
    int bad = 0;
    for (int i = 0; i < X; ++i) x0[i] = (float)cos(i * 0.11);
    for (int i = 0; i < WQ; ++i) wq[i] = (float)sin(i * 0.37) / 8;
    for (int i = 0; i < WK; ++i) wk[i] = (float)sin(i * 0.23) / 8, wv[i] = (float)cos(i * 0.41) / 8;
    d.tokens = TOKENS, d.ranks = 1, d.heads = HEADS, d.kv_heads = KV_HEADS, d.head_dim = DIM;
    d.model_dim = MODEL, d.chunk = CHUNK;
    if (upipe_plan_init(&plan, &d, &err)) return fprintf(stderr, "%s\n", err.text), 1;
    layer.plan = &plan, layer.mask.causal = 1, layer.wq = wq, layer.wk = wk, layer.wv = wv;
    upipe_cpu_ops(&with);
    plug_loops(&own, &with);
    for (int window = 0; window <= 50; window += 50) {
        double most = 0, error = 0;
        layer.mask.window = window, own.served = own.passed = 0;
        if (run(&own.base, &layer, dx[0], &err) || run(&with, &layer, dx[1], &err))
            return fprintf(stderr, "%s\n", err.text), 1;
        for (int i = 0; i < X && !isnan(error); ++i) { /* a NaN is the most */
            const double apart = fabs((double)dx[0][i] - (double)dx[1][i]);
            most = fmax(most, fabs((double)dx[0][i]));
            if (!(apart <= error)) error = apart;
        }
        printf("%-14s %lld calls served, %lld passed on; dx differs by %.1e of its largest\n",
               window > 0 ? "with a window" : "causal", (long long)own.served, (long long)own.passed,
               error / most);
        /* other loops have other bits, and the library's own have the same */
        bad |= window > 0 ? error != 0 : !(error > 0 && error < 1e-5 * most);
    }
    return fflush(stdout) != 0 || bad;
}
