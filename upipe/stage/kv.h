/* kv.h -- the owner of K' and V': when they are fetched, and when they are freed
 *
 * Stages of one round share K' and V'. Where all ranks have the same rounds, a round's first stage allocates and
 * fetches them, and its last one frees them. Where ranks have rounds of their own (uneven heads in groups) one pair of
 * buffers serves all stages, and each stage fetches for those ranks that need other heads.
 */
#ifndef UPIPE_STAGE_KV_H
#define UPIPE_STAGE_KV_H

/* use     UPIPE_USE_QKV of K', V'; UPIPE_USE_ACT_GRAD of dK', dV' */
UPIPE_API upipe_status upi_kv_alloc(upipe_ctx *c, upi_kv_pair *kv, size_t k_bytes, size_t v_bytes, int use)
{
    UPIPE_TRY(upipe_alloc(c, &kv->k, k_bytes, use, use == UPIPE_USE_QKV ? "k" : "dk_heads"));
    return upipe_alloc(c, &kv->v, v_bytes, use, use == UPIPE_USE_QKV ? "v" : "dv_heads");
}

UPIPE_API upipe_status upi_kv_free(upipe_ctx *c, upi_kv_pair *kv)
{
    UPIPE_TRY(upipe_free(c, kv->v));
    UPIPE_TRY(upipe_free(c, kv->k));
    kv->k = kv->v = NULL;
    return UPIPE_OK;
}

/* K, then V: written into one send buffer, then through its all-to-all into *kv. */
UPIPE_API upipe_status upi_kv_fetch(upipe_ctx *c, const upi_pass *f, int stage, const upi_kv_pair *kv)
{
    const upipe_plan *p = f->plan;
    void *send;
    UPIPE_TRY(upipe_alloc(c, &send, p->buffers.kv_send, UPIPE_USE_QKV, "kv_send"));
    UPIPE_TRY(f->fill(c, f, UPI_PROJ_K, stage, send));
    UPIPE_TRY(upipe_a2a_to_heads(c, kv->k, send, p, stage, UPIPE_A2A_KV, f->token_bytes[UPI_PROJ_K]));
    UPIPE_TRY(f->fill(c, f, UPI_PROJ_V, stage, send));
    UPIPE_TRY(upipe_a2a_to_heads(c, kv->v, send, p, stage, UPIPE_A2A_KV, f->token_bytes[UPI_PROJ_V]));
    return upipe_free(c, send);
}

/* ---- an all-gather ring: the pair has K' and V' of all ranks of the ring ---- */

/* Fetches this rank's part, and starts its transfer to all ranks of the ring: upi_kv_gather_wait completes it. */
UPIPE_API upipe_status upi_kv_gather_start(upipe_ctx *c, upi_pass *f, int stage, upi_kv_pair *all)
{
    const upipe_plan *p = f->plan;
    const upipe_buffers *b = &p->buffers;
    const int heads = upipe_plan_part(p, UPIPE_A2A_KV, stage, c->team->rank).count;
    UPIPE_TRY(upi_kv_alloc(c, &f->own, b->k, b->v, UPIPE_USE_QKV));
    UPIPE_TRY(f->fetch(c, f, stage, &f->own));
    if (p->kv_rounds_shared) UPIPE_TRY(upi_kv_alloc(c, all, b->all_k, b->all_v, UPIPE_USE_QKV));
    if (heads == 0) return UPIPE_OK;
    return upi_ring_all_gather_start(c, p, &f->layer->mask, heads, all->k, all->v, f->own.k, f->own.v);
}

UPIPE_API upipe_status upi_kv_gather_wait(upipe_ctx *c, upi_pass *f, int stage)
{
    if (upipe_plan_part(f->plan, UPIPE_A2A_KV, stage, c->team->rank).count > 0)
        UPIPE_TRY(upipe_comm_wait(c, c->ring));
    return upi_kv_free(c, &f->own);
}

/* Starts the all-gather of the next round while stage i, the last of its round, attends. */
UPIPE_API upipe_status upi_kv_prefetch(upipe_ctx *c, upi_pass *f, int i, upipe_phase phase)
{
    const int next = i + f->plan->width;
    if (next >= f->plan->stages || !upipe_plan_stage(f->plan, next).kv_fresh) return UPIPE_OK;
    upi_phase_set(c, phase);
    f->coming = next;
    return upi_kv_gather_start(c, f, next, &f->next);
}

/* ---- load and release ---- */

/* K' and V' for stage i: fetched, unless they are there already. */
UPIPE_API upipe_status upi_kv_load(upipe_ctx *c, upi_pass *f, int i, upi_kv_pair *out)
{
    const upipe_plan *p = f->plan;
    const upipe_buffers *b = &p->buffers;
    const size_t k = p->kv_gathered ? b->all_k : b->k, v = p->kv_gathered ? b->all_v : b->v;
    if (i == 0 && !p->kv_rounds_shared) UPIPE_TRY(upi_kv_alloc(c, &f->kv, k, v, UPIPE_USE_QKV));
    if (upipe_plan_stage(p, i).kv_fresh && !(p->kv_prefetched && i > 0)) {
        if (p->kv_gathered) {
            UPIPE_TRY(upi_kv_gather_start(c, f, i, &f->kv));
            UPIPE_TRY(upi_kv_gather_wait(c, f, i));
        } else {
            if (p->kv_rounds_shared) UPIPE_TRY(upi_kv_alloc(c, &f->kv, k, v, UPIPE_USE_QKV));
            UPIPE_TRY(f->fetch(c, f, i, &f->kv));
        }
    }
    *out = f->kv;
    return UPIPE_OK;
}

/* After the attention of stage i: frees K' and V' that no later stage reads, and waits for those that are prefetched.
 *   read   those of the stage; in a pipeline, the next round's may be loaded already */
UPIPE_API upipe_status upi_kv_release(upipe_ctx *c, upi_pass *f, int i, upi_kv_pair *read)
{
    const upipe_plan *p = f->plan;
    const int last = i + p->width - 1;
    if (p->kv_rounds_shared ? upipe_plan_stage(p, last).kv_last : last == p->stages - 1)
        UPIPE_TRY(upi_kv_free(c, read));
    if (f->coming == 0) return UPIPE_OK;
    UPIPE_TRY(upi_kv_gather_wait(c, f, f->coming));
    f->kv = f->next;
    f->coming = 0;
    return UPIPE_OK;
}

#endif
