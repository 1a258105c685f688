/* accuracy.c -- one attention call of one head with as many queries and keys as one likes, forward and backward
 *
 * bench/accuracy.py compiles it and loads it with ctypes. All in f32; in bf16 runs inputs hold what bf16 can hold.
 *
 *     const char *why = accuracy_attn(&c);     NULL: done
 */
#include <stdlib.h>

#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe_attn.h"

/* accuracy_case -- every query sees every key; delta is computed
 *   q dout o dq    [queries][head_dim], of which o and dq are results
 *   k v dk dv      [keys][head_dim], of which dk and dv are results
 *   lse            [queries], result
 */
typedef struct accuracy_case {
    const float *q, *k, *v, *dout;
    float *o, *lse, *dq, *dk, *dv;
    int64_t queries, keys;
    int32_t head_dim, bf16;
} accuracy_case;

static const upipe_view none;

/* A copy in the storage type of n rows, or as many zeros. */
static upipe_view stored(upipe_ctx *c, const accuracy_case *a, const float *from, int64_t n)
{
    const upipe_dtype dtype = a->bf16 ? UPIPE_BF16 : UPIPE_F32;
    void *data = calloc((size_t)(n * a->head_dim), upipe_dtype_bytes(dtype));
    upipe_view v = upipe_view_packed(data, dtype, n, 1, a->head_dim);
    if (data == NULL) return none;
    if (from != NULL) {
        upipe_view all = v;
        all.data = (void *)from;
        all.dtype = UPIPE_F32;
        if (c->ops->cast(c, v, all) != UPIPE_OK) return none;
    }
    return v;
}

static upipe_status widened(upipe_ctx *c, upipe_view v, float *to)
{
    upipe_view all = v;
    all.data = to;
    all.dtype = UPIPE_F32;
    return c->ops->cast(c, all, v);
}

static upipe_status run(upipe_ctx *c, const accuracy_case *a, upipe_attn_grad *g)
{
    const size_t forward = c->ops->attn_bytes(c->ops, &g->a, 0),
                 backward = c->ops->attn_bytes(c->ops, &g->a, 1);
    g->a.work_bytes = forward > backward ? forward : backward;
    g->a.work = aligned_alloc(64, (g->a.work_bytes + 63) / 64 * 64);
    if (g->a.work == NULL) return upipe_fail(&c->err, UPIPE_ERR_MEMORY, "no memory for scratch");
    UPIPE_TRY(upipe_attn_fwd(c, &g->a));
    UPIPE_TRY(c->ops->rowdot(c, g->delta, g->dout, g->a.o));
    UPIPE_TRY(upipe_attn_bwd(c, g));
    UPIPE_TRY(widened(c, g->a.o, a->o));
    return widened(c, g->dq, a->dq);
}

const char *accuracy_attn(const accuracy_case *a)
{
    static upipe_err err; /* for the sentence that is returned */
    upipe_ops ops;
    upipe_ctx c;
    upipe_attn_grad g;
    upipe_status s = UPIPE_ERR_MEMORY;
    memset(&c, 0, sizeof c);
    memset(&g, 0, sizeof g);
    upipe_cpu_ops(&ops);
    c.ops = &ops;
    g.a.q = stored(&c, a, a->q, a->queries);
    g.a.k = stored(&c, a, a->k, a->keys);
    g.a.v = stored(&c, a, a->v, a->keys);
    g.a.o = stored(&c, a, NULL, a->queries);
    g.dout = stored(&c, a, a->dout, a->queries);
    g.dq = stored(&c, a, NULL, a->queries);
    g.delta = upipe_view_packed(calloc((size_t)a->queries, sizeof(float)), UPIPE_F32, a->queries, 1, 1);
    g.a.lse = upipe_view_packed(a->lse, UPIPE_F32, a->queries, 1, 1);
    g.dk = upipe_view_packed(a->dk, UPIPE_F32, a->keys, 1, a->head_dim);
    g.dv = upipe_view_packed(a->dv, UPIPE_F32, a->keys, 1, a->head_dim);
    snprintf(c.err.text, sizeof c.err.text, "no memory for a copy");
    if (g.a.q.data != NULL && g.a.k.data != NULL && g.a.v.data != NULL && g.a.o.data != NULL &&
        g.dout.data != NULL && g.dq.data != NULL && g.delta.data != NULL)
        s = run(&c, a, &g);
    free(g.a.q.data), free(g.a.k.data), free(g.a.v.data), free(g.a.o.data);
    free(g.dout.data), free(g.dq.data), free(g.delta.data), free(g.a.work);
    err = c.err;
    return s == UPIPE_OK ? NULL : err.text;
}

/* The table's name. */
const char *accuracy_name(void)
{
    upipe_ops ops;
    upipe_cpu_ops(&ops);
    return ops.name;
}
