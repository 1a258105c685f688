/* 03_plug_attention.c -- one attention call, forward and backward, and attention of the host's own in the compute table
 *
 *     cc -O2 -march=native -I . examples/03_plug_attention.c -lm && ./a.out
 *
 * Plain loops; 03_plug_cudnn.cpp does it with cuDNN on a GPU. The backward reads O, as cuDNN's and FlashAttention's do: the
 * table says so, and a block keeps O for it. A causal call is served by the loops; one with a sliding window is forwarded
 * to the library's kernels. Both results are compared with the library alone. What neither has is refused.
 */
#include <math.h>
#include <stdlib.h>

#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

enum { TOKENS = 128, HEADS = 8, KV_HEADS = 4, DIM = 64 };
enum { COUNT = TOKENS * HEADS * DIM, KV_COUNT = TOKENS * KV_HEADS * DIM };

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

/* ---- a call with it and without ---- */

typedef struct tensors {
    float q[COUNT], k[KV_COUNT], v[KV_COUNT], dout[COUNT]; /* [TOKENS][heads][DIM] */
    float o[COUNT], lse[TOKENS * HEADS], delta[TOKENS * HEADS];
    struct {
        float dq[COUNT], dk[KV_COUNT], dv[KV_COUNT];
    } grads;
} tensors;

/* A value is its position, so an output is the mean position that a query sees. */
static void fill(tensors *t)
{
    for (int i = 0; i < COUNT; ++i) t->q[i] = sinf((float)i * 0.37f), t->dout[i] = cosf((float)i * 0.11f);
    for (int i = 0; i < KV_COUNT; ++i)
        t->k[i] = sinf((float)i * 0.23f), t->v[i] = (float)(i / (KV_HEADS * DIM));
}

static upipe_view view(float *data, int heads, int d)
{
    return upipe_view_packed(data, UPIPE_F32, TOKENS, heads, d);
}

/* Query heads 2h and 2h + 1 read key/value head h, of d elements. */
static upipe_status attend(const upipe_ops *ops, upipe_mask mask, int d, tensors *t, upipe_err *err)
{
    upipe_ctx c = {0};
    upipe_attn_grad g = {0}; /* scale 1/sqrt(d), positions from 0 */
    upipe_status s;
    c.ops = ops, g.a.mask = mask;
    memset(&t->grads, 0, sizeof t->grads); /* those of keys and values are += */
    g.a.q = view(t->q, HEADS, d), g.a.k = view(t->k, KV_HEADS, d), g.a.v = view(t->v, KV_HEADS, d);
    g.a.o = view(t->o, HEADS, d), g.a.lse = view(t->lse, HEADS, 1);
    g.dout = view(t->dout, HEADS, d), g.delta = view(t->delta, HEADS, 1);
    g.dq = view(t->grads.dq, HEADS, d);
    g.dk = view(t->grads.dk, KV_HEADS, d), g.dv = view(t->grads.dv, KV_HEADS, d);
    g.a.work_bytes = upipe_max_bytes(ops->attn_bytes(ops, &g.a, 0), ops->attn_bytes(ops, &g.a, 1));
    if (posix_memalign(&g.a.work, UPIPE_MEM_ALIGN, g.a.work_bytes) != 0)
        return upipe_fail(err, UPIPE_ERR_MEMORY, "no %zu bytes for scratch", g.a.work_bytes);
    s = upipe_attn_fwd(&c, &g.a);
    if (s == UPIPE_OK) s = ops->rowdot(&c, g.delta, g.dout, g.a.o);
    if (s == UPIPE_OK) s = upipe_attn_bwd(&c, &g);
    free(g.a.work);
    *err = c.err;
    return s;
}

int main(void)
{
    static tensors library, loops;
    const float *a = (const float *)&library.grads, *b = (const float *)&loops.grads;
    upipe_mask mask = {.causal = 1};
    upipe_ops with;
    plug own;
    upipe_err err;
    int bad = 0;
    fill(&library), fill(&loops);
    upipe_cpu_ops(&with);
    plug_loops(&own, &with);
    for (mask.window = 0; mask.window <= 50; mask.window += 50) {
        float most = 0, error = 0;
        own.served = own.passed = 0;
        if (attend(&own.base, mask, DIM, &library, &err) || attend(&with, mask, DIM, &loops, &err))
            return fprintf(stderr, "%s\n", err.text), 1;
        for (int i = 0; i < COUNT + 2 * KV_COUNT && !isnan(error); ++i) { /* a NaN is the most */
            most = fmaxf(most, fabsf(a[i]));
            if (!(fabsf(a[i] - b[i]) <= error)) error = fabsf(a[i] - b[i]);
        }
        for (int i = 0; i < COUNT; ++i) /* no token looks ahead */
            bad |= !(loops.o[i] <= 1.00001f * (float)(i / (HEADS * DIM)));
        printf("%-14s %lld calls served, %lld passed on; gradients differ by %.1e of their largest; "
               "token %d looks at %.1f\n",
               mask.window > 0 ? "with a window" : "causal", (long long)own.served, (long long)own.passed,
               (double)(error / most), TOKENS - 1, (double)loops.o[COUNT - 1]);
        /* other loops have other bits, and the library's own have the same */
        bad |= mask.window > 0 ? error != 0 : !(error > 0 && error < 1e-5f * most);
    }
    bad |= attend(&with, mask, 12, &loops, &err) != UPIPE_ERR_UNSUPPORTED; /* never ignored */
    printf("%s: %s\n", upipe_status_name(err.status), err.text);
    return fflush(stdout) != 0 || bad;
}
