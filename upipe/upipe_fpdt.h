/* upipe_fpdt.h -- the attention block in segments of the sequence, offloaded to the host        layer 7
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
 *   out      [segment] slots of final_out: [stage][rank][batch][T][n][v_dim]
 *   q k v    [segment][stage] Q', [segment][round] K', V'
 *   lse      f32 [segment][stage]
 *   delta    rowsum(dO * O), the caller's: f32 [segment][stage][rank][batch][T][n], of upipe_fpdt_delta_bytes, from
 *            the host's pool; NULL: the backward computes it from out and dout
 *   moved    bytes between host and device so far
 */
typedef struct upipe_fpdt_saved {
    char *out, *q, *k, *v, *lse, *delta;
    int64_t moved;
} upipe_fpdt_saved;

/* upipe_fpdt_plan -- the plan of segment i, which begins at token upipe_cut(S, segments, i)
 *   errors  as upipe_plan_init, of the segment's numbers; ARG for fewer tokens than ranks in a segment, or no
 *           such segment; UNSUPPORTED for a ring, the naive order, several stages of uneven heads, and too many
 *           segments
 */
UPIPE_API upipe_status upipe_fpdt_plan(const upipe_fpdt *f, int i, upipe_plan *p, upipe_err *e)
{
    upipe_plan_desc d = f->desc;
    const int ranks = d.ranks > 0 ? d.ranks : 1;
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
    if (!p->kv_rounds_shared && p->stages > 1)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                          "segments in %d stages of %d/%d heads over %d ranks, which have no common rounds",
                          p->stages, d.heads, d.kv_heads, d.ranks);
    return UPIPE_OK;
}

/* upipe_fpdt_shard -- this rank's tokens of segment i: positions in the sequence */
UPIPE_API upipe_shard upipe_fpdt_shard(const upipe_fpdt *f, int i)
{
    const int64_t first = upipe_cut(f->desc.tokens, f->segments, i);
    upipe_shard all;
    memset(&all, 0, sizeof all);
    all.step = 1;
    upi_shard_add(&all, first, upipe_cut(f->desc.tokens, f->segments, i + 1) - first);
    return upipe_shard_team(&all, f->desc.ranks > 0 ? f->desc.ranks : 1, f->desc.rank);
}

/* The parts: fpdt/segments.h has the table of segments, fpdt/stream.h the loop over streamed segments. */
#include "fpdt/fwd.h"
#include "fpdt/bwd.h"

/* ---- both loops ---- */

UPIPE_API upipe_status upi_fpdt_alloc_host(upipe_ctx *c, const upi_fpdt_pass *s, char **out, size_t bytes,
                                           int n, const char *tag)
{
    const upipe_fpdt *f = s->z.f;
    void *data;
    UPIPE_TRY(upipe_mem_alloc(f->host, &data, bytes * (size_t)n * (size_t)f->segments, tag, &c->err));
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
        for (i = 0; full && i < segments; ++i) { /* every query sees all keys: they are all offloaded first */
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
    upi_run norms = upi_fpdt_run(s, 0);
    void *dkv;
    int i, j, stage;
    UPIPE_TRY(upi_norm_grads_begin(c, &norms));
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
            upipe_phase_set(c, UPIPE_BWD_ATTN);
            UPIPE_TRY(upi_fpdt_load_dkv(c, s, j, stage, &dkv));
            UPIPE_TRY(upi_fpdt_attend_bwd(c, s, j, stage, dkv)); /* queries of segments i >= j are streamed */
            UPIPE_TRY(upi_fpdt_store_kv_grads(c, s, x, j, stage, dkv));
            /* dQ of the segments that have met all of their keys: j itself; without a causal mask all, after
             * the last j */
            for (i = full ? 0 : j; i <= j && (!full || j == segments - 1); ++i)
                UPIPE_TRY(upi_fpdt_store_dq(c, s, x, dout, i, stage));
        }
    UPIPE_TRY(upi_norm_grads(c, &norms));
    for (i = 0; i < segments; ++i) UPIPE_TRY(upi_fpdt_grad_x(c, s, dx, dout, i));
    UPIPE_TRY(c->ops->sync(c)); /* the host's blocks are still being read */
    UPIPE_TRY(upipe_mem_free(z->f->host, s->host.dout, &c->err));
    UPIPE_TRY(upipe_mem_free(z->f->host, s->host.delta, &c->err));
    UPIPE_TRY(upipe_mem_free(z->f->host, s->host.dq, &c->err));
    UPIPE_TRY(upipe_mem_free(z->f->host, s->host.dk, &c->err));
    UPIPE_TRY(upipe_mem_free(z->f->host, s->host.dkv, &c->err));
    return upipe_mem_free(z->f->host, s->host.dv, &c->err);
}

/* ---- public calls ---- */

UPIPE_API upipe_status upi_fpdt_begin(upipe_ctx *c, upi_fpdt_pass *s, const upipe_fpdt *f,
                                      upipe_fpdt_saved *save, const void *x, upipe_phase phase)
{
    const upipe_plan *p = &s->z.plan[0];
    memset(s, 0, sizeof *s);
    upipe_phase_set(c, phase);
    s->save = save;
    if (f->host == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "segments need a pool of the host's memory");
    if (x == NULL) return upipe_fail(&c->err, UPIPE_ERR_ARG, "x is NULL");
    if (f->desc.overlap && f->segments > 1 && c->side_stream == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "copies are to overlap, but ctx->side_stream is NULL");
    UPIPE_TRY(upi_segments_make(&s->z, c, f));
    /* the caller's rows are those of desc.rank in every segment, whether tokens divide or not */
    if (f->desc.rank != c->team->rank)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "segments of rank %d on rank %d of the team", f->desc.rank,
                          c->team->rank);
    if ((c->ops->attn_can & UPIPE_ATTN_ADD_DQ) == 0)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED, "%s adds to no gradient of q, as segments need",
                          c->ops->name);
    UPIPE_TRY(upi_layer_check_own(
        c, &s->z.layer[0],
        upipe_view_packed((void *)(uintptr_t)x, p->desc.dtype, p->rows, 1, (int32_t)p->desc.model_dim)));
    return upi_layer_agree(c, &s->z.layer[0], f->desc.tokens, f->segments);
}

/* A failed pass frees what it allocated in both pools. The host's pool is read by this rank's own copies
 * alone, so it is freed once they are done. Copies that may be stuck behind a peer may never be done: then it
 * is quarantined. */
UPIPE_API upipe_status upi_fpdt_end(upipe_ctx *c, const upipe_fpdt *f, upipe_status s, int64_t mark,
                                    int64_t host_mark)
{
    s = upi_layer_end(c, s, mark);
    if (s == UPIPE_OK || f->host == NULL) return s;
    if (c->team->stuck)
        upipe_mem_quarantine(f->host, host_mark);
    else
        upipe_mem_rewind(f->host, host_mark);
    return s;
}

/* upipe_fpdt_fwd -- attention of x, as upipe_layer_fwd, with x and the results in the host's memory
 *   save    written, in the host's pool: upipe_fpdt_free
 *   x       [segment][batch][T][D] of this rank, the plan's type; upipe_fpdt_shard gives the positions
 *   bytes   phases FWD_* of upipe_dry_fpdt
 *   errors  as upipe_layer_fwd and upipe_fpdt_plan. The host's pool is then as before, or quarantined where
 *           copies may be stuck behind a peer
 *   paper   section 2 (FPDT); its composition with UPipe is the future work of section 6
 */
UPIPE_API upipe_status upipe_fpdt_fwd(upipe_ctx *c, const upipe_fpdt *f, upipe_fpdt_saved *save,
                                      const void *x)
{
    int64_t mark, host_mark = f->host != NULL ? upipe_mem_mark(f->host) : 0;
    upi_fpdt_pass pass;
    upipe_status s;
    memset(save, 0, sizeof *save);
    UPIPE_TRY(upipe_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_fpdt_begin(c, &pass, f, save, x, UPIPE_FWD_BEFORE);
    if (s == UPIPE_OK) s = upi_fpdt_fwd(c, &pass, (const char *)x);
    if (s != UPIPE_OK) memset(save, 0, sizeof *save);
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
UPIPE_API upipe_status upipe_fpdt_bwd(upipe_ctx *c, const upipe_fpdt *f, void *dx, upipe_grads *grads,
                                      upipe_fpdt_saved *save, void *dout, const void *x)
{
    int64_t mark, host_mark = f->host != NULL ? upipe_mem_mark(f->host) : 0;
    upi_fpdt_pass pass;
    upipe_status s;
    UPIPE_TRY(upipe_ctx_check(c));
    mark = upipe_mem_mark(c->mem);
    s = upi_fpdt_begin(c, &pass, f, save, x, UPIPE_BWD_BEFORE);
    pass.grads = grads;
    if (s == UPIPE_OK && (save->out == NULL || dout == NULL || dx == NULL))
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "%s is not there",
                       save->out == NULL ? "the forward's result" : "dout or dx");
    if (s == UPIPE_OK && dout == save->out && save->delta == NULL)
        s = upipe_fail(&c->err, UPIPE_ERR_ARG, "dout is the forward's result, and delta is not there");
    if (s == UPIPE_OK) s = upi_layer_check_grads(c, &f->layer, grads);
    if (s == UPIPE_OK) s = upi_fpdt_bwd(c, &pass, (char *)dx, (char *)dout, (const char *)x);
    return upi_fpdt_end(c, f, s, mark, host_mark);
}

/* upipe_fpdt_free -- frees what the forward left in the host's pool. No peer reads there, so nothing is
 *                    quarantined
 *   errors  ARG for a block that the pool does not have
 */
UPIPE_API upipe_status upipe_fpdt_free(const upipe_fpdt *f, upipe_fpdt_saved *save, upipe_err *e)
{
    UPIPE_TRY(upipe_mem_free(f->host, save->out, e));
    UPIPE_TRY(upipe_mem_free(f->host, save->q, e));
    UPIPE_TRY(upipe_mem_free(f->host, save->k, e));
    UPIPE_TRY(upipe_mem_free(f->host, save->v, e));
    UPIPE_TRY(upipe_mem_free(f->host, save->lse, e));
    UPIPE_TRY(upipe_mem_free(f->host, save->delta, e));
    memset(save, 0, sizeof *save);
    return UPIPE_OK;
}

/* ---- slots in the host's memory ---- */

/* upipe_fpdt_out_bytes -- bytes of save->out, and of its gradient; 0 for what upipe_fpdt_plan refuses */
UPIPE_API size_t upipe_fpdt_out_bytes(const upipe_fpdt *f)
{
    upipe_plan first, last;
    upipe_err e;
    if (upipe_fpdt_plan(f, 0, &first, &e) != UPIPE_OK ||
        upipe_fpdt_plan(f, f->segments - 1, &last, &e) != UPIPE_OK)
        return 0;
    return upipe_max_bytes(upipe_plan_buffers(&first).slot, upipe_plan_buffers(&last).slot) *
           (size_t)first.stages * (size_t)f->segments;
}

/* upipe_fpdt_delta_bytes -- bytes of save->delta; 0 for what upipe_fpdt_plan refuses */
UPIPE_API size_t upipe_fpdt_delta_bytes(const upipe_fpdt *f)
{
    upipe_plan first, last;
    upipe_err e;
    if (upipe_fpdt_plan(f, 0, &first, &e) != UPIPE_OK ||
        upipe_fpdt_plan(f, f->segments - 1, &last, &e) != UPIPE_OK)
        return 0;
    return upipe_max_bytes(upipe_plan_buffers(&first).delta, upipe_plan_buffers(&last).delta) *
           (size_t)f->segments;
}

UPIPE_API upipe_status upi_fpdt_reorder(upipe_ctx *c, const upipe_fpdt *f, void *slots, void *natural,
                                        upipe_dtype type, int to_slots)
{
    const size_t segment = upipe_fpdt_out_bytes(f) / (size_t)(f->segments > 0 ? f->segments : 1);
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

#endif
