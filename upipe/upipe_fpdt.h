/* upipe_fpdt.h -- the attention block in segments of the sequence, offloaded to the host
 *
 * FPDT: the sequence is cut into segments, and every segment over all ranks of the team; a rank holds its
 * part of each. Q', K', V' of a segment are offloaded to the host. They are fetched again, one segment ahead,
 * where another segment needs them. With chunk < heads in the plan, heads go in stages too (UPipe x FPDT):
 * then the device holds one stage of a segment.
 *
 *     upipe_fpdt f = {layer, desc, segments, host};
 *     upipe_fpdt_fwd(&ctx, &f, &saved, x);               x: host, [segment][batch][T/segments][D]
 *     upipe_fpdt_bwd(&ctx, &f, dx, &grads, &saved, dout, x);
 *     upipe_fpdt_free(&f, &saved, &ctx.err);
 *
 * Both loops are below: upi_fpdt_fwd and upi_fpdt_bwd. Pairs of segments that the mask hides cost nothing. A
 * streamed segment is fetched one segment ahead of its attention, and its dQ' is copied back afterwards. With
 * desc.overlap these copies run on ctx->side_stream, beside the attention of other segments; otherwise on
 * ctx->stream. The host waits for none of them: its pool must be memory that the device copies to and from
 * without waiting (pinned).
 */
#ifndef UPIPE_FPDT_H
#define UPIPE_FPDT_H

#include "upipe_layer.h"

enum { UPIPE_SEGMENTS_MAX = 1 << 16 };

/* upipe_fpdt
 *   layer     weights and mask; its plan is not read
 *   desc      of the whole sequence, without a ring, and of this rank: desc.rank must be the team's. chunk =
 *             heads: FPDT; smaller: stages of heads in segments of the sequence. overlap: streamed segments
 *             are copied on ctx->side_stream while another segment attends
 *   segments  pi; at most tokens / ranks, and UPIPE_SEGMENTS_MAX
 *   host      pool of the host's memory
 */
typedef struct upipe_fpdt {
    upipe_layer layer;
    upipe_plan_desc desc;
    int segments;
    upipe_mem *host;
} upipe_fpdt;

/* upipe_fpdt_saved -- what the forward leaves, in the host's memory; blocks of all segments have the size of
 *                     the largest
 *   given    as in upipe_saved, of a segment's plan
 *   out      [segment] slots of final_out: [stage][rank][batch][T][n][v_dim]
 *   q k v    [segment][stage] Q', [segment][round] K', V'
 *   lse      f32 [segment][stage]
 *   delta    rowsum(dO * O), the caller's: f32 [segment][stage][rank][batch][T][n], of upipe_fpdt_delta_bytes, from
 *            the host's pool; NULL: the backward computes it from out and dout
 *   moved    bytes between host and device so far
 */
typedef struct upipe_fpdt_saved {
    upipe_given given;
    char *out, *q, *k, *v, *lse, *delta;
    int64_t moved;
} upipe_fpdt_saved;

/* ---- segments ---- */

/*     upipe_fpdt f = {layer, desc, segments, host};
 *     upipe_fpdt_plan(&f, i, &plan, &err);               of segment i
 *     upipe_shard rows = upipe_fpdt_shard(&f, i);        this rank's tokens of it
 *     upipe_fpdt_scatter(&ctx, &f, dout, src, dtype);    heads in natural order -> slots
 */

/* upipe_fpdt_plan -- the plan of segment i, which begins at token upipe_cut(S, segments, i)
 *   errors  as upipe_plan_init, of the segment's numbers; ARG for fewer tokens than ranks in a segment, or no
 *           such segment; UNSUPPORTED for a ring, the naive order, several stages of uneven heads, and too many
 *           segments
 */
UPIPE_API upipe_status upipe_fpdt_plan(const upipe_fpdt *f, int i, upipe_plan *p, upipe_err *e)
{
    const int ranks = f != NULL && f->desc.ranks > 0 ? f->desc.ranks : 1;
    upipe_plan_desc d;
    if (f == NULL) return upipe_fail(e, UPIPE_ERR_ARG, "the segments are NULL");
    d = f->desc;
    if (f->segments < 1 || d.tokens / f->segments < ranks)
        return upipe_fail(e, UPIPE_ERR_ARG,
                          "%lld tokens in %d segments over %d ranks: a segment needs a token for each rank",
                          (long long)d.tokens, f->segments, ranks);
    if (f->segments > UPIPE_SEGMENTS_MAX)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "%d segments, at most %d", f->segments,
                          UPIPE_SEGMENTS_MAX);
    if (i < 0 || i >= f->segments) return upipe_fail(e, UPIPE_ERR_ARG, "segment %d of %d", i, f->segments);
    if (d.ring > 1 || d.naive)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "segments with %s",
                          d.ring > 1 ? "a ring" : "the naive order");
    d.overlap = 0; /* of stages: segments overlap instead */
    d.tokens = upipe_cut(f->desc.tokens, f->segments, i + 1) - upipe_cut(f->desc.tokens, f->segments, i);
    UPIPE_TRY(upipe_plan_init(p, &d, e));
    if (p->schedule == UPIPE_UNEVEN && p->stages > 1)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                          "segments in %d stages of %d/%d heads over %d ranks, which are uneven", p->stages,
                          d.heads, d.kv_heads, d.ranks);
    return UPIPE_OK;
}

/* upipe_fpdt_shard -- this rank's tokens of segment i: positions in the sequence */
UPIPE_API upipe_shard upipe_fpdt_shard(const upipe_fpdt *f, int i)
{
    const int64_t first = upipe_cut(f->desc.tokens, f->segments, i);
    const upipe_shard all = upi_shard_range(first, upipe_cut(f->desc.tokens, f->segments, i + 1) - first);
    return upi_shard_team(&all, f->desc.ranks > 0 ? f->desc.ranks : 1, f->desc.rank);
}

/* ---- slots in the host's memory ---- */

/* The buffers of the largest segment; zeros for what upipe_fpdt_plan refuses. */
UPIPE_API upipe_buffers upi_fpdt_buffers(const upipe_fpdt *f, upipe_plan *last)
{
    upipe_buffers b;
    upipe_plan first;
    upipe_err e;
    memset(&b, 0, sizeof b);
    memset(last, 0, sizeof *last);
    if (upipe_fpdt_plan(f, 0, &first, &e) != UPIPE_OK ||
        upipe_fpdt_plan(f, f->segments - 1, last, &e) != UPIPE_OK)
        return b;
    return upi_buffers_max(first.buffers, last->buffers);
}

/* upipe_fpdt_out_bytes -- bytes of save->out, and of its gradient; 0 for what upipe_fpdt_plan refuses */
UPIPE_API size_t upipe_fpdt_out_bytes(const upipe_fpdt *f)
{
    upipe_plan p;
    const upipe_buffers b = upi_fpdt_buffers(f, &p);
    return f != NULL ? b.slot * (size_t)p.stages * (size_t)f->segments : 0;
}

/* upipe_fpdt_delta_bytes -- bytes of save->delta; 0 for what upipe_fpdt_plan refuses */
UPIPE_API size_t upipe_fpdt_delta_bytes(const upipe_fpdt *f)
{
    upipe_plan p;
    return f != NULL ? upi_fpdt_buffers(f, &p).delta * (size_t)f->segments : 0;
}

UPIPE_API upipe_status upi_fpdt_reorder(upipe_ctx *c, const upipe_fpdt *f, void *slots, void *natural,
                                        upipe_dtype type, int to_slots)
{
    const size_t segment = upipe_fpdt_out_bytes(f) / (size_t)(f != NULL && f->segments > 0 ? f->segments : 1);
    char *at = (char *)natural;
    upipe_plan p;
    int i, stage, rank;
    if (slots == NULL || natural == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "%s NULL",
                          slots == NULL ? "the slots are" : "the heads are");
    UPIPE_TRY(upipe_fpdt_plan(f, 0, &p, &c->err));
    for (i = 0; i < f->segments; ++i) {
        const int32_t dim = p.desc.v_dim, width = p.desc.heads * dim;
        upipe_slots s;
        UPIPE_TRY(upipe_fpdt_plan(f, i, &p, &c->err));
        upipe_slots_init(&s, (char *)slots + (size_t)i * segment, segment / (size_t)p.stages, p.stages,
                         UPIPE_SLOT_FULL);
        for (stage = 0; stage < p.stages; ++stage)
            for (rank = 0; rank < p.desc.ranks; ++rank) {
                upipe_view heads = upipe_slots_matrix(&p, &s, stage, rank, dim);
                upipe_view columns = upipe_view_packed(at, type, p.rows, 1, width);
                if (heads.d == 0) continue;
                columns.data =
                    at + (size_t)(upipe_plan_q(&p, stage, rank).first * dim) * upipe_dtype_bytes(type);
                columns.d = heads.d;
                UPIPE_TRY(c->ops->cast(c, to_slots ? heads : columns, to_slots ? columns : heads));
            }
        at += (size_t)(p.rows * width) * upipe_dtype_bytes(type);
    }
    return UPIPE_OK;
}

/* upipe_fpdt_gather -- dst = the contents of slots in the host's memory, heads in natural order
 *   dst     host, [segment][batch][T][H*v_dim] of the given type
 *   slots   save->out, or its gradient
 *   errors  as upipe_fpdt_plan; ARG for NULL
 */
UPIPE_API upipe_status upipe_fpdt_gather(upipe_ctx *c, const upipe_fpdt *f, void *dst, upipe_dtype type,
                                         const void *slots)
{
    return upi_fpdt_reorder(c, f, (void *)(uintptr_t)slots, dst, type, 0);
}

/* upipe_fpdt_scatter -- the reverse: slots (of upipe_fpdt_out_bytes) = src. Errors as upipe_fpdt_gather */
UPIPE_API upipe_status upipe_fpdt_scatter(upipe_ctx *c, const upipe_fpdt *f, void *slots, const void *src,
                                          upipe_dtype type)
{
    return upi_fpdt_reorder(c, f, slots, (void *)(uintptr_t)src, type, 1);
}

#include "fpdt/segments.h"
#include "fpdt/offload.h"
#include "fpdt/stream.h"
#include "fpdt/fwd.h"
#include "fpdt/bwd.h"

/* ---- both loops ---- */

UPIPE_API upipe_status upi_fpdt_alloc_host(upipe_ctx *c, const upi_fpdt_pass *s, char **out, size_t bytes,
                                           int n, const char *tag)
{
    const upipe_fpdt *f = s->z.f;
    void *data;
    UPIPE_TRY(upipe_mem_alloc(f->host, &data, bytes * (size_t)n * (size_t)f->segments, UPIPE_USE_OTHER, tag,
                              &c->err));
    *out = (char *)data;
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_fpdt_fwd(upipe_ctx *c, upi_fpdt_pass *s, const char *x)
{
    const upi_segments *z = &s->z;
    const int full = !z->f->layer.mask.causal, segments = z->f->segments;
    upi_fpdt_stage st;
    int stage, i;
    UPIPE_TRY(upi_fpdt_alloc_host(c, s, &s->save->out, z->b.slot, z->stages, "final_out"));
    UPIPE_TRY(upi_fpdt_alloc_host(c, s, &s->save->q, z->b.q, z->stages, "q"));
    UPIPE_TRY(upi_fpdt_alloc_host(c, s, &s->save->k, z->b.k, z->rounds, "k"));
    UPIPE_TRY(upi_fpdt_alloc_host(c, s, &s->save->v, z->b.v, z->rounds, "v"));
    UPIPE_TRY(upi_fpdt_alloc_host(c, s, &s->save->lse, z->b.stat, z->stages, "lse"));
    for (stage = 0; stage < z->stages; ++stage) {
        if (full) /* every query sees all keys: they are all offloaded first */
            for (i = 0; i < segments; ++i) {
                UPIPE_TRY(upi_fpdt_load(c, s, x, i, stage, &st));
                UPIPE_TRY(upi_fpdt_free_qkv(c, &st));
            }
        for (i = 0; i < segments; ++i) {
            UPIPE_TRY(full ? upi_fpdt_fetch(c, s, i, stage, &st) : upi_fpdt_load(c, s, x, i, stage, &st));
            if (!full && stage % z->steps != 0) UPIPE_TRY(upi_fpdt_fetch_kv(c, s, i, stage, st.kv));
            UPIPE_TRY(upi_fpdt_attend(c, s, i, stage, &st)); /* segments j <= i are streamed */
            UPIPE_TRY(upi_fpdt_store(c, s, i, stage, &st));
        }
    }
    return UPIPE_OK;
}

/* Q', K', V' are fetched; dO, dQ, dK and dV alone are sent. */
UPIPE_API upipe_status upi_fpdt_bwd(upipe_ctx *c, upi_fpdt_pass *s, char *dx, char *dout, const char *x)
{
    const upi_segments *z = &s->z;
    const upipe_plan_desc *d = &z->plan[0].desc;
    const int full = !z->f->layer.mask.causal, segments = z->f->segments;
    upi_pass norms;
    const int64_t mark = upipe_mem_mark(z->f->host);
    void *dkv;
    int i, j, stage;
    upi_fpdt_segment_pass(s, 0, &norms);
    if (norms.layer->q_norm_weight != NULL) UPIPE_TRY(upi_norm_grads_begin(c, &norms));
    s->dnorm = norms.dnorm;
    UPIPE_TRY(upi_fpdt_alloc_host(c, s, &s->host.dout, z->b.o, z->stages, "dout"));
    UPIPE_TRY(upi_fpdt_alloc_host(c, s, &s->host.delta, z->b.stat, z->stages, "delta"));
    UPIPE_TRY(upi_fpdt_alloc_host(c, s, &s->host.dq, z->b.sum_q, z->stages, "dq"));
    UPIPE_TRY(upi_fpdt_alloc_host(c, s, &s->host.dk, z->kv_tokens * (size_t)d->head_dim, 1, "dk"));
    UPIPE_TRY(upi_fpdt_alloc_host(c, s, &s->host.dkv, z->steps > 1 ? z->b.dk + z->b.dv : 0, 1, "dkv"));
    UPIPE_TRY(upi_fpdt_alloc_host(c, s, &s->host.dv, z->kv_tokens * (size_t)d->v_dim, 1, "dv"));
    for (i = 0; i < segments; ++i)
        for (stage = 0; stage < z->stages; ++stage) UPIPE_TRY(upi_fpdt_offload_dout(c, s, dout, i, stage));
    for (stage = 0; stage < z->stages; ++stage)
        for (j = 0; j < segments; ++j) {
            upi_phase_set(c, UPIPE_BWD_ATTN);
            UPIPE_TRY(upi_fpdt_load_dkv(c, s, j, stage, &dkv));
            UPIPE_TRY(upi_fpdt_attend_bwd(c, s, j, stage, dkv)); /* queries of segments i >= j are streamed */
            UPIPE_TRY(upi_fpdt_store_kv_grads(c, s, x, j, stage, dkv));
            /* dQ of the segments that have met all of their keys: j itself; without a causal mask all, after
             * the last j */
            if (!full || j == segments - 1)
                for (i = full ? 0 : j; i <= j; ++i) UPIPE_TRY(upi_fpdt_store_dq(c, s, x, dout, i, stage));
        }
    if (norms.layer->q_norm_weight != NULL) UPIPE_TRY(upi_norm_grads_end(c, &norms));
    for (i = 0; i < segments; ++i) UPIPE_TRY(upi_fpdt_grad_x(c, s, dx, dout, i));
    UPIPE_TRY(c->ops->sync(c)); /* the host's blocks are still being read */
    upipe_mem_rewind(z->f->host, mark);
    return UPIPE_OK;
}

/* ---- public calls ---- */

UPIPE_API upipe_status upi_fpdt_begin(upipe_ctx *c, upi_fpdt_pass *s, const upipe_fpdt *f,
                                      upipe_fpdt_saved *save, const void *x, upipe_phase phase)
{
    const upipe_plan *p = &s->z.plan[0];
    memset(s, 0, sizeof *s);
    upi_phase_set(c, phase);
    s->save = save;
    if (f == NULL || f->host == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "the segments or their pool of the host's memory are NULL");
    if (save == NULL || (phase == UPIPE_BWD_BEFORE && (save->given.plan == 0 || save->out == NULL)))
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "save is NULL, or results are not there");
    if (x == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "x is NULL");
    if (f->desc.overlap && f->segments > 1 && c->side_stream == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "copies are to overlap, but ctx->side_stream is NULL");
    UPIPE_TRY(upi_segments_make(&s->z, c, f));
    if ((c->ops->attn_can & UPIPE_ATTN_ADD_DQ) == 0)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "%s adds to no gradient of q, as segments need",
                          c->ops->name);
    if (c->ops->attn_reads_o)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "the attention of %s reads O in its backward, which segments do not keep",
                          c->ops->name);
    UPIPE_TRY(upi_check_layer(
        c, &s->z.layer[0],
        upipe_view_packed((void *)(uintptr_t)x, p->desc.dtype, p->rows, 1, (int32_t)p->desc.model_dim)));
    return upi_stage_agree(c, &s->z.layer[0], f->desc.tokens, f->segments, NULL, &save->given);
}

/* A failed pass frees what it allocated in both pools. The host's pool is read by this rank's own copies
 * alone, which are done. */
UPIPE_API upipe_status upi_fpdt_end(upipe_ctx *c, const upipe_fpdt *f, upipe_status s, int64_t mark,
                                    int64_t host_mark)
{
    s = upi_pass_end(c, s, mark);
    if (s != UPIPE_OK && f != NULL && f->host != NULL) upipe_mem_rewind(f->host, host_mark);
    return s;
}

/* upipe_fpdt_fwd -- attention of x, as upipe_layer_fwd, with x and the results in the host's memory
 *   save    written, in the host's pool: upipe_fpdt_free
 *   x       [segment][batch][T][D] of this rank, the plan's type; upipe_fpdt_shard gives the positions
 *   bytes   phases FWD_* of upipe_dry_fpdt
 *   errors  as upipe_layer_fwd and upipe_fpdt_plan. The host's pool is then as before
 *   paper   section 2 (FPDT); its composition with UPipe is the future work of section 6
 */
UPIPE_API upipe_status upipe_fpdt_fwd(upipe_ctx *c, const upipe_fpdt *f, upipe_fpdt_saved *save,
                                      const void *x)
{
    int64_t mark, host_mark = f != NULL ? upipe_mem_mark(f->host) : 0;
    upi_fpdt_pass pass;
    upipe_status s;
    if (save != NULL) memset(save, 0, sizeof *save);
    UPIPE_TRY(upi_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_fpdt_begin(c, &pass, f, save, x, UPIPE_FWD_BEFORE);
    if (s == UPIPE_OK) s = upi_fpdt_fwd(c, &pass, (const char *)x);
    if (s != UPIPE_OK && save != NULL) memset(save, 0, sizeof *save);
    return upi_fpdt_end(c, f, s, mark, host_mark);
}

/* upipe_fpdt_bwd -- gradients of x and of the weights
 *   dx      host, of x's shape, written; may be x itself
 *   grads   +=, as in upipe_layer_bwd
 *   save    read; stays the caller's
 *   dout    the gradient of O in save->out's layout (upipe_fpdt_scatter); holds dQ afterwards. With save->delta
 *           it may be save->out itself
 *   x       the forward's
 *   bytes   phases BWD_* of upipe_dry_fpdt
 *   errors  as upipe_fpdt_fwd
 */
UPIPE_API upipe_status upipe_fpdt_bwd(upipe_ctx *c, const upipe_fpdt *f, void *dx, const upipe_grads *grads,
                                      upipe_fpdt_saved *save, void *dout, const void *x)
{
    int64_t mark, host_mark = f != NULL ? upipe_mem_mark(f->host) : 0;
    upi_fpdt_pass pass;
    upipe_status s;
    UPIPE_TRY(upi_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_fpdt_begin(c, &pass, f, save, x, UPIPE_BWD_BEFORE);
    pass.grads = grads;
    pass.grad = upi_project_grad;
    if (s == UPIPE_OK && (dout == NULL || dx == NULL))
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "dout or dx is not there");
    if (s == UPIPE_OK && dout == save->out && save->delta == NULL)
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "dout is the forward's result, and delta is not there");
    if (s == UPIPE_OK) s = upi_check_grads(c, &f->layer, grads, NULL, NULL);
    if (s == UPIPE_OK) s = upi_fpdt_bwd(c, &pass, (char *)dx, (char *)dout, (const char *)x);
    return upi_fpdt_end(c, f, s, mark, host_mark);
}

/* upipe_fpdt_free -- frees what the forward left in the host's pool. No peer reads there, so nothing is
 *                    quarantined
 *   errors  ARG for a block that the pool does not have
 */
UPIPE_API upipe_status upipe_fpdt_free(const upipe_fpdt *f, upipe_fpdt_saved *save, upipe_err *e)
{
    int i;
    if (f == NULL || save == NULL) return upipe_fail(e, UPIPE_ERR_ARG, "the segments or save are NULL");
    for (i = 0; i < 6; ++i) {
        void *const blocks[6] = {save->out, save->q, save->k, save->v, save->lse, save->delta};
        UPIPE_TRY(upipe_mem_free(f->host, blocks[i], e));
    }
    memset(save, 0, sizeof *save);
    return UPIPE_OK;
}

#endif
