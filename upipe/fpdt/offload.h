/* offload.h -- one pass over segments: copies between host and device */
#ifndef UPIPE_FPDT_OFFLOAD_H
#define UPIPE_FPDT_OFFLOAD_H

/* What the backward offloads to the host: dO', delta and dQ' by heads, dK and dV by tokens. dkv: dK', dV' in
 * f32, between the stages of a round. */
typedef struct upi_fpdt_grads {
    char *dout, *delta, *dq, *dk, *dv, *dkv;
} upi_fpdt_grads;

/* One pass. */
typedef struct upi_fpdt_pass {
    upi_segments z;
    upipe_fpdt_saved *save;
    /* backward: */
    const upipe_grads *grads;
    upi_fpdt_grads host;
    float *dnorm; /* with QK norm: upi_pass.dnorm */
    upipe_status (*grad)(upipe_ctx *c, const upi_pass *f, upi_proj which, upi_head_run h, void *g);
} upi_fpdt_pass;

/* A pass over the stages of segment i; x is fetched by upi_fpdt_fetch_x. */
UPIPE_API void upi_fpdt_segment_pass(const upi_fpdt_pass *s, int i, upi_pass *f)
{
    upi_pass_init(NULL, f, &s->z.layer[upi_segment_long(s->z.f, i)], NULL);
    f->scratch = s->z.scratch;
    f->rows = upipe_fpdt_shard(s->z.f, i);
    f->fill = upi_project;
    f->grad = s->grad;
    f->grads = s->grads;
    f->dnorm = s->dnorm;
}

UPIPE_API upipe_status upi_fpdt_copy(upipe_ctx *c, upi_fpdt_pass *s, void *dst, const void *src, size_t bytes)
{
    s->save->moved += (int64_t)bytes * c->mem->times;
    return bytes > 0 ? c->ops->copy(c, dst, src, bytes) : UPIPE_OK;
}

/* Block k of the n blocks of segment i in a buffer in the host's memory; NULL where a rank has no heads. */
UPIPE_API char *upi_fpdt_at(const char *base, size_t bytes, int n, int i, int k)
{
    return (char *)upipe_offset(base, ((size_t)i * (size_t)n + (size_t)k) * bytes);
}

/* Bytes of this rank's query heads, or key/value heads, of a stage, dim elements of e bytes each. */
UPIPE_API size_t upi_fpdt_q_bytes(const upipe_plan *p, int stage, int dim, size_t e)
{
    return (size_t)(p->team_tokens * p->desc.batch * upipe_plan_q(p, stage, p->desc.rank).count * dim) * e;
}

UPIPE_API size_t upi_fpdt_kv_bytes(const upipe_plan *p, int stage, int dim, size_t e)
{
    return (size_t)(p->team_tokens * p->desc.batch * upipe_plan_kv(p, stage, p->desc.rank).count * dim) * e;
}

/* x of segment i, from the host; free it with upipe_free(c, f->x.data). */
UPIPE_API upipe_status upi_fpdt_fetch_x(upipe_ctx *c, upi_fpdt_pass *s, upi_pass *f, const char *x, int i)
{
    const upipe_plan *p = f->plan;
    const size_t row = (size_t)(p->desc.batch * p->desc.model_dim) * upipe_dtype_bytes(p->desc.dtype);
    void *data;
    UPIPE_TRY(upipe_alloc(c, &data, s->z.x, UPIPE_USE_OTHER, "x"));
    f->x = upipe_view_packed(data, p->desc.dtype, p->rows, 1, (int32_t)p->desc.model_dim);
    return upi_fpdt_copy(c, s, data, x + (size_t)upi_segment_rows_before(&s->z, i) * row,
                         (size_t)p->local * row);
}

/* Fetches K', V' of segment j for a stage. */
UPIPE_API upipe_status upi_fpdt_fetch_kv(upipe_ctx *c, upi_fpdt_pass *s, int j, int stage, upi_kv_pair to)
{
    const upi_segments *z = &s->z;
    const upipe_plan *p = upi_segment_plan(z, j);
    const size_t e = upipe_dtype_bytes(p->desc.dtype);
    const int round = stage / z->steps;
    UPIPE_TRY(upi_fpdt_copy(c, s, to.k, upi_fpdt_at(s->save->k, z->b.k, z->rounds, j, round),
                            upi_fpdt_kv_bytes(p, stage, p->desc.head_dim, e)));
    return upi_fpdt_copy(c, s, to.v, upi_fpdt_at(s->save->v, z->b.v, z->rounds, j, round),
                         upi_fpdt_kv_bytes(p, stage, p->desc.v_dim, e));
}

#endif
