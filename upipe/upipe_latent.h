/* upipe_latent.h -- context-parallel attention whose K and V come of a latent (MLA: DeepSeek-V3, Kimi K2, MiniCPM3)
 *
 * A token has a latent c of r numbers and a rotated key kr of dr numbers, which all heads share. K and V of head h are
 * expanded from them: K_h = [c Wuk_h^T, kr], V_h = c Wuv_h^T. The door is upipe_qkv.h's with c and kr in place of K and V:
 *
 *     upipe_latent a = {&plan, id, mask, 0, UPIPE_LATENT_AUTO, wkv, q, c, kr, o};
 *     upipe_latent_grads g = {dout, dq, dc, dkr, dwkv, NULL};
 *     upipe_latent_fwd(&ctx, &a, &saved);                  o; saved: lse
 *     ...
 *     upipe_latent_bwd(&ctx, &a, &g, &saved);              dq, dc, dkr, dwkv; lse is freed
 *
 * K' and V' of a stage's heads reach the rank that attends with them in one of two forms, of the same numbers:
 *
 *     HEADS      every rank expands all heads of its tokens, and the stage's all-to-all sends them, as K and V of any
 *                attention: H (d + v_dim) / C numbers a token and peer
 *     GATHERED   c and kr of all tokens come to all ranks once a pass, r + dr numbers a token and peer. A stage's heads are
 *                expanded by their rank, for all tokens, where they are read. What was gathered is held through the pass
 *
 * Either way each token and head is expanded once. In the backward K' and V' come again, in the same form; dK' and dV' go to
 * their tokens by the stage's all-to-all, in both. There they become gradients of c and kr, head by head in natural order, in
 * f32: with the built-in CPU table their bits depend neither on the form nor on chunk and ranks.
 */
#ifndef UPIPE_LATENT_H
#define UPIPE_LATENT_H

#include "upipe_qkv.h"

/* AUTO: GATHERED where it sends at most half the bytes of HEADS for K and V, otherwise HEADS (upipe_latent_gathers) */
typedef enum upipe_latent_form {
    UPIPE_LATENT_AUTO,
    UPIPE_LATENT_HEADS,
    UPIPE_LATENT_GATHERED
} upipe_latent_form;

/* upipe_latent -- one call
 *   plan     from upipe_plan_init: kv_heads = heads, head_dim d = dn + dr, v_dim. In a ring heads are sent
 *   id       0, or the layer's number: a backward with another one is refused
 *   mask     as in upipe_layer
 *   scale    of the scores; 0 = 1/sqrt(d)
 *   form     how K' and V' come; all ranks have the same
 *   wkv      [H][dn + v_dim][r] of the plan's type: of each head Wuk's rows, then Wuv's, as kv_b_proj of published
 *            checkpoints
 *   q        [rows][H][d]: a head's last dr elements are rotated; read
 *   c        [rows][1][r]: after its norm; read
 *   kr       [rows][1][dr]: rotated; read
 *   o        [rows][H][v_dim]: written by the forward, read by the backward
 * Views have any strides, and any type that the compute table casts. What is sent is in the plan's type.
 */
typedef struct upipe_latent {
    const upipe_plan *plan;
    int64_t id;
    upipe_mask mask;
    float scale;
    upipe_latent_form form;
    const void *wkv;
    upipe_view q, c, kr, o;
} upipe_latent;

/* upipe_latent_grads -- of the backward; views of any strides and type
 *   dout        [rows][H][v_dim]: the gradient of o, read
 *   dq dc dkr   shapes of q, c, kr, written (=); data NULL: not wanted. dq may be q itself, dc c, and dkr kr
 *   dwkv        f32, shape of wkv, += over this rank's tokens: sum it over the team. NULL: not wanted
 *   dsinks      f32 [H], +=, over this rank's heads. NULL: not wanted
 */
typedef struct upipe_latent_grads {
    upipe_view dout, dq, dc, dkr;
    float *dwkv, *dsinks;
} upipe_latent_grads;

/* upipe_latent_gathers -- whether a call's K' and V' are expanded from a gathered latent, by its form and plan */
UPIPE_API int upipe_latent_gathers(const upipe_latent *a)
{
    const upipe_plan_desc *d = &a->plan->desc;
    const int64_t latent = (int64_t)d->ranks * (a->c.d + a->kr.d),
                  heads = (int64_t)d->heads * ((int64_t)d->head_dim + d->v_dim);
    if (a->form != UPIPE_LATENT_AUTO) return a->form == UPIPE_LATENT_GATHERED;
    return d->ring == 1 && d->ranks > 1 && 2 * latent <= heads;
}

/* ---- a pass ---- */

/* The door's own part: Q, O and their gradients go as upipe_qkv.h's. */
typedef struct upi_latent_pass {
    upi_qkv_pass qkv; /* the first member: the engine's calls get it */
    upipe_qkv call;
    const upipe_latent *a;
    float *dwkv;
    int gathers;
    int32_t r, dr, dn, width; /* width: r + dr, of a token in all that follows */
    void *own;                /* c and kr side by side, [rows][r + dr] of the plan's type */
    void *all;                /* gathered: [batch][S][r + dr] */
    float *sums;              /* backward: [rows][r + dr], the gradient of own */
} upi_latent_pass;

/* Rows of a weight that expand n heads from `first` on, as a batch of matrices [dn or v_dim][r]. */
UPIPE_API upipe_view upi_latent_weight(const upi_latent_pass *f, const void *w, upipe_dtype dtype,
                                       upi_proj which, int64_t first, int n)
{
    const int64_t v_dim = f->qkv.pass.dim[UPI_PROJ_V], head = (f->dn + v_dim) * f->r;
    const int64_t at = first * head + (which == UPI_PROJ_V ? (int64_t)f->dn * f->r : 0);
    return upipe_view_make((char *)(uintptr_t)w + at * (int64_t)upipe_dtype_bytes(dtype), dtype,
                           which == UPI_PROJ_V ? v_dim : f->dn, f->r, n, head, f->r);
}

/* Of [rows][n][dim], K or V or their gradients: what the weight makes, a batch of n matrices [rows][dn or v_dim]. */
UPIPE_API upipe_view upi_latent_expanded(const upi_latent_pass *f, void *heads, upi_proj which, int64_t rows,
                                         int n)
{
    const int32_t dim = f->qkv.pass.dim[which];
    return upipe_view_make(heads, f->qkv.pass.plan->desc.dtype, rows, (int64_t)n * dim, n, dim,
                           which == UPI_PROJ_V ? dim : f->dn);
}

/* The latent's part of rows, [rows][1][r]; of sums too. */
UPIPE_API upipe_view upi_latent_c(const upi_latent_pass *f, void *own, upipe_dtype dtype, int64_t rows)
{
    return upipe_view_make(own, dtype, rows, f->width, 1, f->width, f->r);
}

/* The shared key's part of rows, as n heads that are the same: [rows][n][dr]. */
UPIPE_API upipe_view upi_latent_kr(const upi_latent_pass *f, void *own, upipe_dtype dtype, int64_t rows,
                                   int n)
{
    return upipe_view_make((char *)own + (size_t)f->r * upipe_dtype_bytes(dtype), dtype, rows, f->width, n, 0,
                           f->dr);
}

/* K or V of n heads from `first` on, [rows][n][dim]. */
UPIPE_API upipe_status upi_latent_expand(upipe_ctx *c, const upi_latent_pass *f, upi_proj which, int first,
                                         int n, void *latent, int64_t rows, void *heads)
{
    const upipe_dtype t = f->qkv.pass.plan->desc.dtype;
    upipe_view to = upi_latent_expanded(f, heads, which, rows, n);
    UPIPE_TRY(upi_gemm(c, &f->qkv.pass, to, upi_latent_c(f, latent, t, rows),
                       upi_latent_weight(f, f->a->wkv, t, which, first, n), UPIPE_GEMM_TRANS_B));
    if (which == UPI_PROJ_V) return UPIPE_OK;
    to.data = (char *)heads + (size_t)f->dn * upipe_dtype_bytes(t);
    to.d = f->dr;
    return c->ops->cast(c, to, upi_latent_kr(f, latent, t, rows, n));
}

/* upi_pass.fill: Q is packed; K and V are expanded for this rank's tokens, in the send layout. */
UPIPE_API upipe_status upi_latent_fill(upipe_ctx *c, const upi_pass *pass, upi_proj which, int stage,
                                       void *dst)
{
    const upi_latent_pass *f = (const upi_latent_pass *)pass;
    const upipe_plan *p = pass->plan;
    upi_head_run h;
    int rank = 0, b;
    if (which == UPI_PROJ_Q) return upi_pack(c, pass, which, stage, dst);
    while (upi_head_run_next(p, UPIPE_A2A_KV, stage, &rank, &h))
        for (b = 0; b < h.blocks; ++b) {
            void *block =
                upipe_offset(dst, upipe_plan_rows_bytes(p, h.offset + b * h.heads, pass->dim[which]));
            UPIPE_TRY(
                upi_latent_expand(c, f, which, h.first + b * h.stride, h.heads, f->own, p->rows, block));
        }
    return UPIPE_OK;
}

/* upi_pass.fetch: K' and V' of this rank's heads of a stage, of all tokens; sends nothing. */
UPIPE_API upipe_status upi_latent_fetch(upipe_ctx *c, const upi_pass *pass, int stage, const upi_kv_pair *kv)
{
    const upi_latent_pass *f = (const upi_latent_pass *)pass;
    const upipe_plan *p = pass->plan;
    const upipe_head_range mine = upipe_plan_part(p, UPIPE_A2A_KV, stage, p->desc.rank);
    const int64_t rows = p->team_tokens * p->desc.batch;
    if (mine.count == 0) return UPIPE_OK;
    UPIPE_TRY(upi_latent_expand(c, f, UPI_PROJ_K, mine.first, mine.count, f->all, rows, kv->k));
    return upi_latent_expand(c, f, UPI_PROJ_V, mine.first, mine.count, f->all, rows, kv->v);
}

/* Gradients of heads from `first` on, k and v of these blocks, at their tokens: into the sums, one head after the other, and
 * into dwkv. */
UPIPE_API upipe_status upi_latent_grad_block(upipe_ctx *c, const upi_latent_pass *f, int first, int n,
                                             void *k, void *v)
{
    const upipe_plan *p = f->qkv.pass.plan;
    const upipe_dtype t = p->desc.dtype;
    const upipe_view own = upi_latent_c(f, f->own, t, p->rows),
                     sum = upi_latent_c(f, f->sums, UPIPE_F32, p->rows),
                     key = upi_latent_kr(f, f->sums, UPIPE_F32, p->rows, 1);
    int i, j;
    for (i = 0; i < 2 && f->dwkv != NULL; ++i) {
        const upi_proj which = i == 0 ? UPI_PROJ_K : UPI_PROJ_V;
        UPIPE_TRY(upi_gemm(c, &f->qkv.pass, upi_latent_weight(f, f->dwkv, UPIPE_F32, which, first, n),
                           upi_latent_expanded(f, i == 0 ? k : v, which, p->rows, n), own,
                           UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE));
    }
    for (j = 0; j < n; ++j) {
        for (i = 0; i < 2; ++i) {
            const upi_proj which = i == 0 ? UPI_PROJ_K : UPI_PROJ_V;
            upipe_view from = upi_latent_expanded(f, i == 0 ? k : v, which, p->rows, n);
            from.data = upipe_view_at(from, 0, j);
            from.h = 1;
            UPIPE_TRY(upi_gemm(c, &f->qkv.pass, sum, from,
                               upi_latent_weight(f, f->a->wkv, t, which, first + j, 1),
                               UPIPE_GEMM_ACCUMULATE));
            if (i > 0) continue;
            from.data = (char *)from.data + (size_t)f->dn * upipe_dtype_bytes(t);
            from.d = f->dr;
            UPIPE_TRY(c->ops->add(c, key, from));
        }
    }
    return UPIPE_OK;
}

/* upi_pass.grad: K's gradients of a run wait for V's, which come next, for sums by heads. */
UPIPE_API upipe_status upi_latent_grad(upipe_ctx *c, const upi_pass *pass, upi_proj which, upi_head_run h,
                                       void *g)
{
    const upi_latent_pass *f = (const upi_latent_pass *)pass;
    const upipe_plan *p = pass->plan;
    int b;
    if (which == UPI_PROJ_Q) return upi_unpack_grad(c, pass, which, h, g);
    for (b = 0; which == UPI_PROJ_V && b < h.blocks; ++b) {
        const int64_t before = h.offset + (int64_t)b * h.heads;
        UPIPE_TRY(upi_latent_grad_block(
            c, f, h.first + b * h.stride, h.heads,
            upipe_offset(pass->dkv_tokens.k, upipe_plan_rows_bytes(p, before, pass->dim[UPI_PROJ_K])),
            upipe_offset(g, upipe_plan_rows_bytes(p, before, pass->dim[UPI_PROJ_V]))));
    }
    return UPIPE_OK;
}

/* The largest scratch of the products of n heads. */
UPIPE_API size_t upi_latent_scratch(const upipe_ops *ops, const upi_latent_pass *f, int n, int64_t rows)
{
    const upipe_plan *p = f->qkv.pass.plan;
    const upipe_dtype t = p->desc.dtype;
    size_t most = 0;
    int i;
    for (i = 0; i < 2; ++i) {
        const upi_proj which = i == 0 ? UPI_PROJ_K : UPI_PROJ_V;
        float none[1];
        const upipe_view heads = upi_latent_expanded(f, NULL, which, rows, n),
                         c = upi_latent_c(f, NULL, t, rows);
        upipe_view one = heads;
        one.h = 1;
        most =
            upipe_max_bytes(most, ops->gemm_bytes(ops, heads, c, upi_latent_weight(f, none, t, which, 0, n),
                                                  UPIPE_GEMM_TRANS_B));
        most = upipe_max_bytes(most, ops->gemm_bytes(ops, upi_latent_weight(f, none, UPIPE_F32, which, 0, n),
                                                     heads, c, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE));
        most = upipe_max_bytes(most, ops->gemm_bytes(ops, upi_latent_c(f, none, UPIPE_F32, rows), one,
                                                     upi_latent_weight(f, none, t, which, 0, 1),
                                                     UPIPE_GEMM_ACCUMULATE));
    }
    return most;
}

/* ---- before and after the stages ---- */

/* Checks of this rank's arguments; nothing is sent. */
UPIPE_API upipe_status upi_latent_begin(upipe_ctx *c, upi_latent_pass *f, const upipe_latent *a,
                                        upipe_phase phase)
{
    const upipe_plan_desc *d;
    memset(f, 0, sizeof *f);
    upi_phase_set(c, phase);
    if (a == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "the host's tensors are NULL");
    f->a = a;
    f->call.plan = a->plan;
    f->call.o = a->o;
    f->qkv.a = &f->call;
    f->qkv.layer.plan = a->plan;
    f->qkv.layer.id = a->id;
    f->qkv.layer.mask = a->mask;
    f->qkv.layer.scale = a->scale;
    f->qkv.layer.wk = a->wkv; /* compared with the forward's */
    f->qkv.heads[UPI_PROJ_Q] = a->q;
    UPIPE_TRY(upi_check_stages(c, &f->qkv.layer));
    d = &a->plan->desc;
    if (d->kv_heads != d->heads)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "a latent makes K and V of every head: kv_heads is %d, heads %d", d->kv_heads,
                          d->heads);
    if (a->wkv == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "wkv is NULL");
    if (a->c.d < 1 || a->kr.d < 1 || a->kr.d >= d->head_dim)
        return upipe_fail(
            &c->err, UPIPE_ERR_ARG,
            "a latent of %d numbers, and a shared key of %d in heads of %d: kr has fewer, and both have some",
            a->c.d, a->kr.d, d->head_dim);
    f->r = a->c.d;
    f->dr = a->kr.d;
    f->dn = d->head_dim - f->dr;
    f->width = f->r + f->dr;
    UPIPE_TRY(upi_qkv_check(c, a->plan, "q", a->q, d->heads, d->head_dim));
    UPIPE_TRY(upi_qkv_check(c, a->plan, "c", a->c, 1, f->r));
    UPIPE_TRY(upi_qkv_check(c, a->plan, "kr", a->kr, 1, f->dr));
    UPIPE_TRY(upi_qkv_check(c, a->plan, "o", a->o, d->heads, d->v_dim));
    if (upi_enum_number(&a->form, sizeof a->form) < 0 ||
        upi_enum_number(&a->form, sizeof a->form) > UPIPE_LATENT_GATHERED)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "form %d of a latent",
                          (int)upi_enum_number(&a->form, sizeof a->form));
    f->gathers = upipe_latent_gathers(a);
    if (f->gathers && d->ring > 1)
        return upipe_fail(
            &c->err, UPIPE_ERR_UNSUPPORTED,
            "in a ring each of its ranks would expand a gathered latent again: form HEADS sends heads");
    return UPIPE_OK;
}

/* The backward's own arguments. */
UPIPE_API upipe_status upi_latent_begin_bwd(upipe_ctx *c, upi_latent_pass *f, const upipe_latent_grads *g)
{
    const upipe_plan *p = f->a->plan;
    const upipe_plan_desc *d = &p->desc;
    if (g == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "grads is NULL");
    f->qkv.dheads[UPI_PROJ_Q] = g->dq;
    f->qkv.dout = g->dout;
    f->qkv.grads.sinks = g->dsinks;
    f->dwkv = g->dwkv;
    if (g->dq.data != NULL) UPIPE_TRY(upi_qkv_check(c, p, "dq", g->dq, d->heads, d->head_dim));
    if (g->dc.data != NULL) UPIPE_TRY(upi_qkv_check(c, p, "dc", g->dc, 1, f->r));
    if (g->dkr.data != NULL) UPIPE_TRY(upi_qkv_check(c, p, "dkr", g->dkr, 1, f->dr));
    UPIPE_TRY(upi_qkv_check(c, p, "dout", g->dout, d->heads, d->v_dim));
    return upi_check_grads(c, &f->qkv.layer, &f->qkv.grads, NULL, NULL);
}

/* All ranks make the same call; a backward that of its forward. */
UPIPE_API upipe_status upi_latent_agree(upipe_ctx *c, upi_latent_pass *f, upipe_given *given)
{
    const upipe_plan *p = f->a->plan;
    upi_fields fields = upi_stage_fields(c, &f->qkv.layer, 0, 0);
    size_t most = 0;
    int n;
    if (!f->a->mask.padded)
        UPIPE_TRY(upi_borders_cover(&c->err, &f->a->mask.borders, 0, p->desc.batch * p->desc.tokens));
    upi_field_int(&fields, "numbers of the latent", f->r);
    upi_field_int(&fields, "numbers of the shared key", f->dr);
    upi_field_int(&fields, "form of the latent (0 heads, 1 gathered)", f->gathers);
    UPIPE_TRY(upi_stage_same(c, &f->qkv.layer, &fields, given));
    upi_pass_init(c->ops, &f->qkv.pass, &f->qkv.layer, &f->qkv.slots);
    for (n = 1; n <= p->kv_per_rank; ++n) {
        most = upipe_max_bytes(most, upi_latent_scratch(c->ops, f, n, p->rows));
        if (f->gathers)
            most = upipe_max_bytes(most, upi_latent_scratch(c->ops, f, n, p->team_tokens * p->desc.batch));
    }
    f->qkv.pass.scratch.gemm = most;
    f->qkv.pass.fill = upi_latent_fill;
    if (f->gathers) f->qkv.pass.fetch = upi_latent_fetch;
    f->qkv.pass.heads = f->qkv.heads;
    f->qkv.pass.out = f->a->o;
    return UPIPE_OK;
}

/* c and kr of this rank's tokens; and of all, which this gathers. */
UPIPE_API upipe_status upi_latent_load(upipe_ctx *c, upi_latent_pass *f, upipe_phase phase)
{
    const upipe_plan *p = f->a->plan;
    const upipe_dtype t = p->desc.dtype;
    const size_t token = (size_t)f->width * upipe_dtype_bytes(t), mine = (size_t)p->local * token;
    upipe_comm *team = c->team;
    int64_t first;
    int r, used = 0;
    upi_phase_set(c, phase);
    UPIPE_TRY(upipe_alloc(c, &f->own, (size_t)p->rows * token, UPIPE_USE_QKV, "latent"));
    UPIPE_TRY(c->ops->cast(c, upi_latent_c(f, f->own, t, p->rows), f->a->c));
    UPIPE_TRY(c->ops->cast(c, upi_latent_kr(f, f->own, t, p->rows, 1), f->a->kr));
    if (!f->gathers) return UPIPE_OK;
    UPIPE_TRY(upipe_alloc(c, &f->all, (size_t)(p->team_tokens * p->desc.batch) * token, UPIPE_USE_QKV,
                          "latent_all"));
    UPIPE_TRY(upipe_comm_idle(c, team));
    for (r = 0; r < team->ranks; ++r) {
        const size_t theirs = (size_t)upi_plan_tokens(p, r, &first) * token;
        upipe_msg_add(team->list, &used, r, p->desc.batch, f->own, mine, mine,
                      upipe_offset(f->all, (size_t)first * token), theirs, (size_t)p->team_tokens * token);
    }
    UPIPE_TRY(upipe_comm_start(c, team, team->list, used));
    return upipe_comm_wait(c, team);
}

UPIPE_API upipe_status upi_latent_release(upipe_ctx *c, upi_latent_pass *f)
{
    UPIPE_TRY(upipe_free(c, f->all));
    return upipe_free(c, f->own);
}

/* ---- public calls ---- */

/* upipe_latent_fwd -- o = attention of q over the K and V of c and kr, of the whole sequence
 *   save    written: lse alone, in the pool; upipe_saved_free or the backward frees it
 *   bytes   phases FWD_* of upipe_dry_latent; sends upipe_latent_sent(a, 0)
 *   errors  as upipe_qkv_fwd; UNSUPPORTED for a gathered latent in a ring
 */
UPIPE_API upipe_status upipe_latent_fwd(upipe_ctx *c, const upipe_latent *a, upipe_saved *save)
{
    upi_latent_pass f;
    upipe_status s;
    int64_t mark;
    if (save != NULL) memset(save, 0, sizeof *save);
    UPIPE_TRY(upi_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_latent_begin(c, &f, a, UPIPE_FWD_BEFORE);
    if (s == UPIPE_OK && save == NULL) s = upipe_fail(&c->err, UPIPE_ERR_ARG, "save is NULL");
    if (s == UPIPE_OK) s = upi_latent_agree(c, &f, &save->given);
    if (s == UPIPE_OK) s = upi_latent_load(c, &f, UPIPE_FWD_IN);
    if (s == UPIPE_OK) s = upi_qkv_fwd(c, &f.qkv, save);
    if (s == UPIPE_OK) s = upi_latent_release(c, &f);
    if (s != UPIPE_OK && save != NULL) memset(save, 0, sizeof *save);
    return upi_pass_end(c, s, mark);
}

/* The loop, and what comes before and after it. */
UPIPE_API upipe_status upi_latent_bwd(upipe_ctx *c, upi_latent_pass *f, const upipe_latent_grads *g)
{
    const upipe_plan *p = f->a->plan;
    const size_t bytes = (size_t)(p->rows * f->width) * 4;
    void *sums;
    UPIPE_TRY(upi_latent_load(c, f, UPIPE_BWD_IN));
    UPIPE_TRY(upipe_alloc(c, &sums, bytes, UPIPE_USE_ACT_GRAD, "latent_grad"));
    UPIPE_TRY(c->ops->zero(c, sums, bytes));
    f->sums = (float *)sums;
    UPIPE_TRY(upi_qkv_bwd(c, &f->qkv));
    if (g->dc.data != NULL) UPIPE_TRY(c->ops->cast(c, g->dc, upi_latent_c(f, sums, UPIPE_F32, p->rows)));
    if (g->dkr.data != NULL)
        UPIPE_TRY(c->ops->cast(c, g->dkr, upi_latent_kr(f, sums, UPIPE_F32, p->rows, 1)));
    UPIPE_TRY(upipe_free(c, sums));
    return upi_latent_release(c, f);
}

/* upipe_latent_bwd -- the gradients of q, c, kr and wkv; K' and V' come again
 *   a       the forward's, o included; its tensors may lie elsewhere
 *   save    consumed
 *   bytes   phases BWD_* of upipe_dry_latent; sends upipe_latent_sent(a, 1), or (a, 2) with upipe_ops.attn_reads_o
 *   errors  as upipe_latent_fwd; save is then valid for upipe_saved_free alone, and gradients hold parts
 */
UPIPE_API upipe_status upipe_latent_bwd(upipe_ctx *c, const upipe_latent *a, const upipe_latent_grads *g,
                                        upipe_saved *save)
{
    upi_latent_pass f;
    upipe_status s;
    int64_t mark;
    UPIPE_TRY(upi_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_latent_begin(c, &f, a, UPIPE_BWD_BEFORE);
    if (s == UPIPE_OK &&
        (save == NULL || save->given.plan == 0 || save->lse == NULL || save->out.data != NULL))
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "save is not upipe_latent_fwd's (consumed before?)");
    if (s == UPIPE_OK) s = upi_latent_begin_bwd(c, &f, g);
    if (s == UPIPE_OK) s = upi_latent_agree(c, &f, &save->given);
    f.qkv.pass.grad = upi_latent_grad;
    f.qkv.pass.dheads = f.qkv.dheads;
    f.qkv.pass.grads = &f.qkv.grads;
    f.qkv.pass.lse = save != NULL ? save->lse : NULL;
    if (s == UPIPE_OK) s = upi_latent_bwd(c, &f, g);
    if (s == UPIPE_OK) s = upipe_free(c, save->lse);
    if (s == UPIPE_OK) memset(save, 0, sizeof *save);
    return upi_pass_end(c, s, mark);
}

/* upipe_latent_sent -- bytes that this rank sends to its team in a call; backward as in upipe_plan_sent */
UPIPE_API int64_t upipe_latent_sent(const upipe_latent *a, int backward)
{
    const upipe_plan *p = a->plan;
    const int64_t e = (int64_t)upipe_dtype_bytes(p->desc.dtype);
    int64_t sum = upipe_plan_sent(p, backward);
    int i;
    if (!upipe_latent_gathers(a)) return sum;
    for (i = 0; i < p->stages; ++i)
        sum -= upi_plan_sent_heads(p, UPIPE_A2A_KV, i, 0, ((int64_t)p->desc.head_dim + p->desc.v_dim) * e);
    return sum + (p->desc.ranks - 1) * p->rows * (a->c.d + a->kr.d) * e;
}

#endif
