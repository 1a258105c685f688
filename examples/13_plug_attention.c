/* 13_plug_attention.c -- attention of the host's own in the compute table, for the calls that it supports
 *
 * On the CPU plain loops, forward and backward; on a GPU cuDNN's forward (13_plug_cudnn.cpp). A causal block
 * is served by them; one with a sliding window is forwarded to the library's kernels, which the plug has
 * kept. Both results are compared with the library alone.
 */
#include <math.h>

#include "13_plug_attention.h"
#include "common/device.h"

enum { TOKENS = 128, HEADS = 8, KV_HEADS = 4, DIM = 64, CHUNK = 4, MODEL = 128, BLOCKS = 64 };
enum { X = TOKENS * MODEL, WQ = HEADS * DIM * MODEL, WK = KV_HEADS * DIM * MODEL };

/* ---- an attention of one's own ---- */

static float *row(upipe_view v, int64_t i, int h)
{
    return (float *)upipe_view_at(v, i, h);
}

static float dot(const float *a, const float *b, int n)
{
    float sum = 0;
    int k;
    for (k = 0; k < n; ++k) sum += a[k] * b[k];
    return sum;
}

static void add(float *to, float factor, const float *x, int n)
{
    int k;
    for (k = 0; k < n; ++k) to[k] += factor * x[k];
}

static int loops_serve(const upipe_attn *a)
{
    return plug_is_plain(a) && a->q.dtype == UPIPE_F32 && a->o.dtype == UPIPE_F32;
}

static float scale_of(const upipe_attn *a)
{
    return a->scale != 0 ? a->scale : 1 / sqrtf((float)a->q.d);
}

static upipe_status loops_fwd(upipe_ctx *c, const upipe_attn *a)
{
    plug *p = plug_of(c->ops);
    const float scale = scale_of(a);
    const int d = a->q.d;
    int64_t i, j;
    int h;
    if (!loops_serve(a)) return ++p->passed, p->base.attn_fwd(c, a);
    ++p->served;
    for (h = 0; h < a->q.h; ++h)
        for (i = 0; i < a->q.n; ++i) {
            const int64_t seen = a->mask.causal ? i + 1 : a->k.n;
            const int kv = h / (a->q.h / a->k.h);
            float top = -INFINITY, sum = 0, *o = row(a->o, i, h);
            for (j = 0; j < seen; ++j) top = fmaxf(top, scale * dot(row(a->q, i, h), row(a->k, j, kv), d));
            memset(o, 0, (size_t)d * sizeof *o);
            for (j = 0; j < seen; ++j) {
                float w = expf(scale * dot(row(a->q, i, h), row(a->k, j, kv), d) - top);
                sum += w;
                add(o, w, row(a->v, j, kv), d);
            }
            for (j = 0; j < d; ++j) o[j] /= sum;
            *row(a->lse, i, h) = top + logf(sum); /* natural logarithm */
        }
    return UPIPE_OK;
}

/* dk and dv are added to, head by head and in the order of the queries; a.o is not there any more: delta
 * is. */
static upipe_status loops_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    plug *p = plug_of(c->ops);
    const upipe_attn *a = &g->a;
    const float scale = scale_of(a);
    const int d = a->q.d;
    int64_t i, j;
    int h;
    if (!plug_is_plain(a) || a->q.dtype != UPIPE_F32) return ++p->passed, p->base.attn_bwd(c, g);
    ++p->served;
    for (h = 0; h < a->q.h; ++h)
        for (i = 0; i < a->q.n; ++i) {
            const int64_t seen = a->mask.causal ? i + 1 : a->k.n;
            const int kv = h / (a->q.h / a->k.h);
            const float *q = row(a->q, i, h), *dout = row(g->dout, i, h);
            memset(row(g->dq, i, h), 0, (size_t)d * sizeof(float));
            for (j = 0; j < seen; ++j) {
                const float *k = row(a->k, j, kv), *v = row(a->v, j, kv);
                const float w = expf(scale * dot(q, k, d) - *row(a->lse, i, h));
                const float gs = scale * w * (dot(dout, v, d) - *row(g->delta, i, h));
                add(row(g->dq, i, h), gs, k, d);
                add(row(g->dk, j, kv), gs, q, d);
                add(row(g->dv, j, kv), w, dout, d);
            }
        }
    return UPIPE_OK;
}

/* attn_bytes and attn_can stay the library's: the loops need no scratch, and what they lack is passed on. */
static void plug_loops(plug *p, upipe_ops *ops)
{
    memset(p, 0, sizeof *p);
    p->base = *ops;
    ops->host = p;
    ops->attn_fwd = loops_fwd;
    ops->attn_bwd = loops_bwd;
}

/* ---- a block with it and without ---- */

typedef struct shared { /* in memory that the device reaches */
    float x[X], dx[2][X], wq[WQ], wk[WK], wv[WK];
} shared;

typedef struct program {
    upipe_ctx c;
    device d;
    upipe_plan plan;
    upipe_layer layer;
    shared *all;
} program;

static upipe_status narrow(program *p, const void **out, float *from, int64_t n, int64_t width)
{
    const upipe_dtype dtype = p->plan.desc.dtype;
    void *data;
    UPIPE_TRY(device_slab(&p->d, &data, (size_t)(n * width) * upipe_dtype_bytes(dtype), &p->c.err));
    *out = data;
    return p->c.ops->cast(&p->c, upipe_view_packed(data, dtype, n, 1, (int32_t)width),
                          upipe_view_packed(from, UPIPE_F32, n, 1, (int32_t)width));
}

/* dx = the gradient of x for the loss |out|^2 / 2. */
static upipe_status step(program *p, float *dx)
{
    upipe_ctx *c = &p->c;
    const upipe_dtype dtype = p->plan.desc.dtype;
    upipe_grads grads = {0};
    upipe_saved saved;
    upipe_slots dout;
    upipe_view x;
    void *data;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, upipe_plan_unit_bytes(&p->plan), "x", &c->err));
    x = upipe_view_packed(data, dtype, TOKENS, 1, MODEL);
    UPIPE_TRY(c->ops->cast(c, x, upipe_view_packed(p->all->x, UPIPE_F32, TOKENS, 1, MODEL)));
    UPIPE_TRY(upipe_layer_fwd(c, &p->layer, &saved, x));
    UPIPE_TRY(upipe_slots_alloc(c, p->layer.plan, &dout, UPIPE_SLOT_FULL, "dout"));
    UPIPE_TRY(c->ops->copy(c, dout.data, saved.out.data, upipe_plan_rows_bytes(&p->plan, HEADS, DIM)));
    UPIPE_TRY(upipe_layer_bwd(c, &p->layer, x, &grads, &saved, &dout, x));
    UPIPE_TRY(c->ops->cast(c, upipe_view_packed(dx, UPIPE_F32, TOKENS, 1, MODEL), x));
    UPIPE_TRY(c->ops->sync(c));
    UPIPE_TRY(upipe_mem_free(c->mem, dout.data, &c->err));
    return upipe_mem_free(c->mem, data, &c->err);
}

/* The step with this table, in a slab of the size that its dry run has found. */
static upipe_status run(program *p, const upipe_ops *ops, float *dx)
{
    static upipe_dry dry; /* too large for some stacks */
    upipe_mem_block blocks[BLOCKS];
    upipe_comm_self_state buf;
    upipe_comm self;
    upipe_mem mem;
    void *slab;
    upipe_status s;
    if (upipe_dry_init(&dry, &p->plan, ops) || upipe_dry_layer(&dry, &p->layer, 1))
        return p->c.err = dry.ctx.err, dry.ctx.err.status;
    UPIPE_TRY(device_slab(&p->d, &slab, dry.mem.need, &p->c.err));
    upipe_mem_init(&mem, slab, dry.mem.need, blocks, BLOCKS);
    upipe_comm_self(&self, &buf, ops->copy);
    p->c.ops = ops, p->c.mem = &mem, p->c.team = &self;
    s = step(p, dx);
    upipe_mem_destroy(&mem, NULL);
    device_slab_free(&p->d, slab);
    return s;
}

/* A block of two stages with each of the tables; prints who served what, and how far the gradients differ. */
static upipe_status compare(program *p, const upipe_ops *with, plug *own, const char *name, double *error)
{
    float *without_it = p->all->dx[0], *with_it = p->all->dx[1];
    double most = 0;
    int i;
    own->served = own->passed = 0;
    UPIPE_TRY(run(p, &own->base, without_it));
    UPIPE_TRY(run(p, with, with_it));
    for (*error = 0, i = 0; i < X; ++i) {
        *error = fmax(*error, fabs((double)without_it[i] - (double)with_it[i]));
        most = fmax(most, fabs((double)without_it[i]));
    }
    *error /= most;
    printf("%-14s %lld calls served, %lld passed on; the gradient of x differs by %.1e of its largest\n",
           name, (long long)own->served, (long long)own->passed, *error);
    return UPIPE_OK;
}

static upipe_status plug_any(int kind, plug *own, upipe_ops *ops, upipe_err *e)
{
    if (kind == DEVICE_CPU) return plug_loops(own, ops), UPIPE_OK;
#ifdef WITH_CUDNN
    return plug_cudnn_open(own, ops, e);
#else
    (void)own;
    (void)ops;
    return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "this program was built without cuDNN");
#endif
}

static upipe_status both(program *p, int kind, double error[2], plug *own)
{
    upipe_plan_desc d = {0};
    upipe_ops with;
    shared *all = p->all;
    int i;
    for (i = 0; i < X; ++i) all->x[i] = (float)cos(i * 0.11);
    for (i = 0; i < WQ; ++i) all->wq[i] = (float)sin(i * 0.37) / 8;
    for (i = 0; i < WK; ++i) all->wk[i] = (float)sin(i * 0.23) / 8, all->wv[i] = (float)cos(i * 0.41) / 8;
    d.tokens = TOKENS, d.ranks = 1, d.heads = HEADS, d.kv_heads = KV_HEADS, d.head_dim = DIM;
    d.model_dim = MODEL, d.chunk = CHUNK, d.dtype = kind == DEVICE_CPU ? UPIPE_F32 : UPIPE_BF16;
    UPIPE_TRY(upipe_plan_init(&p->plan, &d, &p->c.err));
    p->layer.plan = &p->plan, p->layer.mask.causal = 1;
    p->c.ops = &p->d.ops;
    UPIPE_TRY(narrow(p, &p->layer.wq, all->wq, HEADS * DIM, MODEL));
    UPIPE_TRY(narrow(p, &p->layer.wk, all->wk, KV_HEADS * DIM, MODEL));
    UPIPE_TRY(narrow(p, &p->layer.wv, all->wv, KV_HEADS * DIM, MODEL));
    with = p->d.ops;
    UPIPE_TRY(plug_any(kind, own, &with, &p->c.err));
    UPIPE_TRY(compare(p, &with, own, "causal", &error[0]));
    if ((with.attn_can & UPIPE_ATTN_WINDOW) == 0) return UPIPE_OK;
    p->layer.mask.window = 50;
    return compare(p, &with, own, "with a window", &error[1]);
}

int main(int argc, char **argv)
{
    static program p;
    static plug own;
    void *buf;
    double error[2] = {0, 0};
    upipe_status s;
    int kind, served, bad = device_args(argc, argv, &kind);
    if (bad) return bad;
    if (device_open(&p.d, kind, &p.c.err) || device_shared(kind, &buf, sizeof *p.all, &p.c.err))
        return fprintf(stderr, "%s\n", p.c.err.text), 1;
    p.all = (shared *)buf;
    p.c.stream = p.d.stream;
    s = both(&p, kind, error, &own);
    served = error[0] > 0; /* another kernel has other bits */
#ifdef WITH_CUDNN
    if (kind == DEVICE_CUDA) plug_cudnn_close(&own);
#endif
    device_slab_free(&p.d, (void *)(uintptr_t)p.layer.wq);
    device_slab_free(&p.d, (void *)(uintptr_t)p.layer.wk);
    device_slab_free(&p.d, (void *)(uintptr_t)p.layer.wv);
    device_shared_free(kind, buf);
    device_close(&p.d, NULL);
    if (s != UPIPE_OK) return fprintf(stderr, "%s: %s\n", upipe_status_name(s), p.c.err.text), 1;
    return !(served && error[0] < (kind == DEVICE_CPU ? 1e-5 : 2e-2) && error[1] == 0);
}
