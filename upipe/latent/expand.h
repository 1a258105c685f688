/* expand.h -- K and V of a stage's heads from a latent and a shared key, and their gradients
 *
 * What both doors share: upipe_latent.h, with Q and O of the host's own, and upipe_latent_layer.h, which projects Q and keeps O
 * in slots. upi_pass.latent is the state; these functions are its fill (of K and V), fetch and grad (of K and V).
 */
#ifndef UPIPE_LATENT_EXPAND_H
#define UPIPE_LATENT_EXPAND_H

/* upi_latent -- of a pass
 *   r dr dn     numbers of c and kr, and of a head of K without kr; width = r + dr, of a token in all that follows
 *   wkv dwkv    [H][dn + v_dim][r], of the plan's type and f32; dwkv NULL: not wanted
 *   own         c and kr side by side, [rows][width] of the plan's type; NULL where all is there and no dwkv is wanted
 *   all         gathered, [batch][S][width]
 *   sums        backward: f32 [rows][width], the gradient of own; NULL: neither c's nor kr's is wanted
 */
typedef struct upi_latent {
    upipe_latent_kv in, grad;
    int gathers;
    int32_t r, dr, dn, width;
    const void *wkv;
    float *dwkv;
    void *own, *all;
    float *sums;
} upi_latent;

/* Rows of a weight that expand n heads from `first` on, as a batch of matrices [dn or v_dim][r]. */
UPIPE_API upipe_view upi_latent_weight(const upi_pass *f, const void *w, upipe_dtype dtype, upi_proj which,
                                       int64_t first, int n)
{
    const upi_latent *l = f->latent;
    const int64_t v_dim = f->dim[UPI_PROJ_V], head = (l->dn + v_dim) * l->r;
    const int64_t at = first * head + (which == UPI_PROJ_V ? (int64_t)l->dn * l->r : 0);
    return upipe_view_make(upipe_offset(w, (size_t)at * upipe_dtype_bytes(dtype)), dtype,
                           which == UPI_PROJ_V ? v_dim : l->dn, l->r, n, head, l->r);
}

/* Of [rows][n][dim], K or V or their gradients: what the weight makes, a batch of n matrices [rows][dn or v_dim]. */
UPIPE_API upipe_view upi_latent_expanded(const upi_pass *f, void *heads, upi_proj which, int64_t rows, int n)
{
    const int32_t dim = f->dim[which];
    return upipe_view_make(heads, f->plan->desc.dtype, rows, (int64_t)n * dim, n, dim,
                           which == UPI_PROJ_V ? dim : f->latent->dn);
}

/* The latent's part of rows, [rows][1][r]; of sums too. */
UPIPE_API upipe_view upi_latent_c(const upi_latent *l, void *own, upipe_dtype dtype, int64_t rows)
{
    return upipe_view_make(own, dtype, rows, l->width, 1, l->width, l->r);
}

/* The shared key's part of rows, as n heads that are the same: [rows][n][dr]. */
UPIPE_API upipe_view upi_latent_kr(const upi_latent *l, void *own, upipe_dtype dtype, int64_t rows, int n)
{
    return upipe_view_make(upipe_offset(own, (size_t)l->r * upipe_dtype_bytes(dtype)), dtype, rows, l->width,
                           n, 0, l->dr);
}

/* K or V of n heads from `first` on, [rows][n][dim]. */
UPIPE_API upipe_status upi_latent_expand(upipe_ctx *c, const upi_pass *f, upi_proj which, int first, int n,
                                         void *latent, int64_t rows, void *heads)
{
    const upi_latent *l = f->latent;
    const upipe_dtype t = f->plan->desc.dtype;
    upipe_view to = upi_latent_expanded(f, heads, which, rows, n);
    UPIPE_TRY(upi_gemm(c, f, to, upi_latent_c(l, latent, t, rows),
                       upi_latent_weight(f, l->wkv, t, which, first, n), UPIPE_GEMM_TRANS_B));
    if (which == UPI_PROJ_V) return UPIPE_OK;
    to.data = upipe_offset(heads, (size_t)l->dn * upipe_dtype_bytes(t));
    to.d = l->dr;
    return c->ops->cast(c, to, upi_latent_kr(l, latent, t, rows, n));
}

/* A stage's K or V, expanded for this rank's tokens, in the send layout. */
UPIPE_API upipe_status upi_latent_fill(upipe_ctx *c, const upi_pass *f, upi_proj which, int stage, void *dst)
{
    const upipe_plan *p = f->plan;
    upi_head_run h;
    int rank = 0, b;
    while (upi_head_run_next(p, UPIPE_A2A_KV, stage, &rank, &h))
        for (b = 0; b < h.blocks; ++b)
            UPIPE_TRY(upi_latent_expand(
                c, f, which, h.first + b * h.stride, h.heads, f->latent->own, p->rows,
                upipe_offset(dst, upipe_plan_rows_bytes(p, h.offset + b * h.heads, f->dim[which]))));
    return UPIPE_OK;
}

/* upi_pass.fetch: K' and V' of this rank's heads of a stage, of all tokens; sends nothing. */
UPIPE_API upipe_status upi_latent_fetch(upipe_ctx *c, const upi_pass *f, int stage, const upi_kv_pair *kv)
{
    const upipe_plan *p = f->plan;
    const upipe_head_range mine = upipe_plan_part(p, UPIPE_A2A_KV, stage, p->desc.rank);
    const int64_t rows = p->team_tokens * p->desc.batch;
    if (mine.count == 0) return UPIPE_OK;
    UPIPE_TRY(upi_latent_expand(c, f, UPI_PROJ_K, mine.first, mine.count, f->latent->all, rows, kv->k));
    return upi_latent_expand(c, f, UPI_PROJ_V, mine.first, mine.count, f->latent->all, rows, kv->v);
}

/* ---- gradients ---- */

/* dc += what comes of dK or dV of one head, and dkr of dK's last elements.
 *   from   [rows][1][dn or v_dim], of upi_latent_expanded */
UPIPE_API upipe_status upi_latent_grad_head(upipe_ctx *c, const upi_pass *f, upi_proj which, int head,
                                            upipe_view from)
{
    const upi_latent *l = f->latent;
    const upipe_dtype t = f->plan->desc.dtype;
    const int64_t rows = f->plan->rows;
    UPIPE_TRY(upi_gemm(c, f, upi_latent_c(l, l->sums, UPIPE_F32, rows), from,
                       upi_latent_weight(f, l->wkv, t, which, head, 1), UPIPE_GEMM_ACCUMULATE));
    if (which == UPI_PROJ_V) return UPIPE_OK;
    from.data = upipe_offset(from.data, (size_t)l->dn * upipe_dtype_bytes(t));
    from.d = l->dr;
    return c->ops->add(c, upi_latent_kr(l, l->sums, UPIPE_F32, rows, 1), from);
}

/* K's gradients of a run wait for V's, which come next: then each head's go into the sums, one head after the other, and all
 * into dwkv. */
UPIPE_API upipe_status upi_latent_grad(upipe_ctx *c, const upi_pass *f, upi_proj which, upi_head_run h,
                                       void *g)
{
    const upi_latent *l = f->latent;
    const upipe_plan *p = f->plan;
    int b, i, j;
    if (which == UPI_PROJ_K) return UPIPE_OK;
    for (b = 0; b < h.blocks; ++b) {
        const int first = h.first + b * h.stride;
        upipe_view from[2];
        for (i = 0; i < 2; ++i) {
            const upi_proj of = i == 0 ? UPI_PROJ_K : UPI_PROJ_V;
            void *block = upipe_offset(i == 0 ? f->dkv_tokens.k : g,
                                       upipe_plan_rows_bytes(p, h.offset + b * h.heads, f->dim[of]));
            from[i] = upi_latent_expanded(f, block, of, p->rows, h.heads);
            if (l->dwkv != NULL)
                UPIPE_TRY(upi_gemm(c, f, upi_latent_weight(f, l->dwkv, UPIPE_F32, of, first, h.heads),
                                   from[i], upi_latent_c(l, l->own, p->desc.dtype, p->rows),
                                   UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE));
            from[i].h = 1;
        }
        for (j = 0; l->sums != NULL && j < h.heads; ++j)
            for (i = 0; i < 2; ++i) {
                const upi_proj of = i == 0 ? UPI_PROJ_K : UPI_PROJ_V;
                UPIPE_TRY(upi_latent_grad_head(c, f, of, first + j, from[i]));
                from[i].data = upipe_view_at(from[i], 0, 1);
            }
    }
    return UPIPE_OK;
}

/* The largest scratch of the products of n heads: K' and V' of `rows` rows, and their gradients at this rank's tokens. */
UPIPE_API size_t upi_latent_scratch(const upipe_ops *ops, const upi_pass *f, int n, int64_t rows)
{
    const upi_latent *l = f->latent;
    const upipe_dtype t = f->plan->desc.dtype;
    const int64_t mine = f->plan->rows;
    float none[1];
    size_t most = 0;
    int i;
    for (i = UPI_PROJ_K; i <= UPI_PROJ_V; ++i) {
        const upi_proj which = (upi_proj)i;
        upipe_view w = upi_latent_weight(f, NULL, t, which, 0, n);
        upipe_view dw = upi_latent_weight(f, NULL, UPIPE_F32, which, 0, n);
        upipe_view heads = upi_latent_expanded(f, NULL, which, mine, n);
        dw.data = none; /* a product that accumulates has a place */
        most = upipe_max_bytes(most, ops->gemm_bytes(ops, upi_latent_expanded(f, NULL, which, rows, n),
                                                     upi_latent_c(l, NULL, t, rows), w, UPIPE_GEMM_TRANS_B));
        most = upipe_max_bytes(most, ops->gemm_bytes(ops, dw, heads, upi_latent_c(l, NULL, t, mine),
                                                     UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE));
        heads.h = w.h = 1;
        most = upipe_max_bytes(most, ops->gemm_bytes(ops, upi_latent_c(l, none, UPIPE_F32, mine), heads, w,
                                                     UPIPE_GEMM_ACCUMULATE));
    }
    return most;
}

/* f->scratch.gemm: that of all products of a pass.
 *   projects   Q is projected */
UPIPE_API void upi_latent_scratch_set(const upipe_ops *ops, upi_pass *f, int projects)
{
    const upipe_plan *p = f->plan;
    const int64_t rows = f->latent->gathers ? p->team_tokens * p->desc.batch : p->rows;
    size_t most = 0;
    int stage, rank;
    upi_head_run h;
    for (stage = 0; stage < p->stages; ++stage) {
        for (rank = 0; projects && upi_head_run_next(p, UPIPE_A2A_Q, stage, &rank, &h);)
            most = upipe_max_bytes(most, upi_product_scratch(ops, f, UPI_PROJ_Q, h));
        for (rank = 0; upi_head_run_next(p, UPIPE_A2A_KV, stage, &rank, &h);)
            most = upipe_max_bytes(most, upi_latent_scratch(ops, f, h.heads, rows));
    }
    f->scratch.gemm = most;
}

/* ---- before and after the stages ---- */

/* Checks what a call is given; nothing is sent. The plan is upi_check_stages' already.
 *   name   the weight's */
UPIPE_API upipe_status upi_latent_begin(upipe_ctx *c, upi_latent *l, const upipe_plan *p, const char *name,
                                        const void *wkv, const upipe_latent_kv *in)
{
    const upipe_plan_desc *d = &p->desc;
    const int64_t form = upi_enum_number(&in->form, sizeof in->form), width = (int64_t)in->c.d + in->kr.d;
    int64_t all;
    memset(l, 0, sizeof *l);
    if (d->kv_heads != d->heads)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "a latent makes K and V of every head: kv_heads is %d, heads %d", d->kv_heads,
                          d->heads);
    if (wkv == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s is NULL", name);
    if (form < UPIPE_LATENT_AUTO || form > UPIPE_LATENT_GATHERED)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "form %lld of a latent", (long long)form);
    if (in->c.d < 1 || in->kr.d < 1 || in->kr.d >= d->head_dim)
        return upipe_fail(
            &c->err, UPIPE_ERR_ARG,
            "a latent of %d numbers, and a shared key of %d in heads of %d: kr has fewer, and both have some",
            in->c.d, in->kr.d, d->head_dim);
    if (width > INT32_MAX || !upipe_mul(&all, p->team_tokens * d->batch, width) || !upipe_mul(&all, all, 4))
        return upipe_fail(&c->err, UPIPE_ERR_OVERFLOW,
                          "a latent and a shared key of %lld numbers, %lld tokens", (long long)width,
                          (long long)(p->team_tokens * d->batch));
    UPIPE_TRY(upi_qkv_check(c, p, "c", in->c, 1, in->c.d));
    UPIPE_TRY(upi_qkv_check(c, p, "kr", in->kr, 1, in->kr.d));
    l->in = *in;
    l->wkv = wkv;
    l->r = in->c.d;
    l->dr = in->kr.d;
    l->dn = d->head_dim - l->dr;
    l->width = (int32_t)width;
    l->gathers = upipe_latent_gathers(p, in);
    if (l->gathers && d->ring > 1)
        return upipe_fail(
            &c->err, UPIPE_ERR_UNSUPPORTED,
            "in a ring each of its ranks would expand a gathered latent again: form HEADS sends heads");
    return UPIPE_OK;
}

/* The gradients that are wanted. */
UPIPE_API upipe_status upi_latent_begin_bwd(upipe_ctx *c, upi_latent *l, const upipe_plan *p,
                                            const upipe_latent_kv *grad, float *dwkv)
{
    if (grad == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the latent's gradients are NULL");
    if (grad->c.data != NULL) UPIPE_TRY(upi_qkv_check(c, p, "dc", grad->c, 1, l->r));
    if (grad->kr.data != NULL) UPIPE_TRY(upi_qkv_check(c, p, "dkr", grad->kr, 1, l->dr));
    l->grad = *grad;
    l->dwkv = dwkv;
    return UPIPE_OK;
}

/* All ranks make the same call; a backward that of its forward. The pass is ready then, but for fill and grad.
 *   q   what else they must share: numbers of what Q is projected from; 0: Q is the host's */
UPIPE_API upipe_status upi_latent_agree(upipe_ctx *c, upi_pass *f, upi_latent *l, const upipe_layer *layer,
                                        int32_t q, upipe_slots *slots, upipe_given *given)
{
    upipe_layer rotated = *layer;
    upi_fields more;
    more.n = 0;
    upi_field_int(&more, "numbers of the latent", l->r);
    upi_field_int(&more, "numbers of the shared key", l->dr);
    upi_field_int(&more, "numbers that Q is made of (0: the host's)", q);
    upi_field_int(&more, "form of the latent (0 heads, 1 gathered)", l->gathers);
    if (layer->rope_rates != NULL) rotated.rope_dims = l->dr; /* of so many there are rates */
    UPIPE_TRY(upi_stage_agree(c, &rotated, 0, 0, &more, given));
    upi_pass_init(NULL, f, layer, slots);
    f->latent = l;
    if (q > 0) f->in_dim = q;
    upi_scratch_add(c->ops, f, layer->plan->desc.ring > 1);
    upi_latent_scratch_set(c->ops, f, q > 0);
    if (l->gathers) f->fetch = upi_latent_fetch;
    return UPIPE_OK;
}

/* c and kr of this rank's tokens; and of all, which this gathers. */
UPIPE_API upipe_status upi_latent_load(upipe_ctx *c, const upi_pass *f, upi_latent *l, upipe_phase phase)
{
    const upipe_plan *p = f->plan;
    const upipe_dtype t = p->desc.dtype;
    const size_t token = (size_t)l->width * upipe_dtype_bytes(t), mine = (size_t)p->local * token;
    upipe_comm *team = c->team;
    int64_t first;
    int r, used = 0;
    upi_phase_set(c, phase);
    UPIPE_TRY(upipe_alloc(c, &l->own, (size_t)p->rows * token, UPIPE_USE_QKV, "latent"));
    UPIPE_TRY(c->ops->cast(c, upi_latent_c(l, l->own, t, p->rows), l->in.c));
    UPIPE_TRY(c->ops->cast(c, upi_latent_kr(l, l->own, t, p->rows, 1), l->in.kr));
    if (!l->gathers) return UPIPE_OK;
    UPIPE_TRY(upipe_alloc(c, &l->all, (size_t)(p->team_tokens * p->desc.batch) * token, UPIPE_USE_QKV,
                          "latent_all"));
    UPIPE_TRY(upipe_comm_idle(c, team));
    for (r = 0; r < team->ranks; ++r) {
        const size_t theirs = (size_t)upi_plan_tokens(p, r, &first) * token;
        upipe_msg_add(team->list, &used, r, p->desc.batch, l->own, mine, mine,
                      upipe_offset(l->all, (size_t)first * token), theirs, (size_t)p->team_tokens * token);
    }
    UPIPE_TRY(upipe_comm_start(c, team, team->list, used));
    UPIPE_TRY(upipe_comm_wait(c, team));
    if (l->dwkv != NULL) return UPIPE_OK; /* whose products read it */
    UPIPE_TRY(upipe_free(c, l->own));
    l->own = NULL;
    return UPIPE_OK;
}

/* The same in a backward; and sums that are empty, unless nobody wants them. */
UPIPE_API upipe_status upi_latent_load_bwd(upipe_ctx *c, const upi_pass *f, upi_latent *l)
{
    const size_t bytes = (size_t)(f->plan->rows * l->width) * 4;
    void *sums;
    UPIPE_TRY(upi_latent_load(c, f, l, UPIPE_BWD_IN));
    if (l->grad.c.data == NULL && l->grad.kr.data == NULL) return UPIPE_OK;
    UPIPE_TRY(upipe_alloc(c, &sums, bytes, UPIPE_USE_ACT_GRAD, "latent_grad"));
    l->sums = (float *)sums;
    return c->ops->zero(c, sums, bytes);
}

/* Gradients are written, where they are wanted, and all is freed. */
UPIPE_API upipe_status upi_latent_release(upipe_ctx *c, const upi_pass *f, upi_latent *l)
{
    const int64_t rows = f->plan->rows;
    if (l->grad.c.data != NULL)
        UPIPE_TRY(c->ops->cast(c, l->grad.c, upi_latent_c(l, l->sums, UPIPE_F32, rows)));
    if (l->grad.kr.data != NULL)
        UPIPE_TRY(c->ops->cast(c, l->grad.kr, upi_latent_kr(l, l->sums, UPIPE_F32, rows, 1)));
    UPIPE_TRY(upipe_free(c, l->sums));
    UPIPE_TRY(upipe_free(c, l->all));
    return upipe_free(c, l->own);
}

#endif
