/* kv.h -- the owner of K' and V': when they are fetched, and when they are freed        part of upipe_layer.h
 *
 * Stages of one round share K' and V'. Where all ranks have the same rounds, a round's first stage allocates
 * and fetches them, and its last one frees them. With uneven heads one pair of buffers is held through all
 * stages, and each stage fetches for those ranks that need other heads. In an all-gather ring the pair holds
 * K' and V' of all ranks of the ring; with ring_prefetch the next round's are gathered while the last stage
 * of a round attends.
 */
#ifndef UPIPE_LAYER_H
#include "../upipe_layer.h"
#elif !defined(UPIPE_LAYER_KV_H)
#define UPIPE_LAYER_KV_H

#include "project.h"

/* K' and V' of a rank's heads, or their gradients. */
typedef struct upi_kv_pair {
    void *k, *v;
} upi_kv_pair;

typedef struct upi_kv {
    upi_kv_pair now;       /* read by the stage that was loaded last */
    upi_kv_pair next, own; /* being gathered, for stage `coming`; this rank's part of them */
    int coming;            /* 0: none is being gathered */
} upi_kv;

/* bytes   indexed by upi_proj */
UPIPE_API upipe_status upi_kv_alloc(upipe_ctx *c, upi_kv_pair *kv, const size_t *bytes, const char *tag_k,
                                    const char *tag_v)
{
    UPIPE_TRY(upipe_alloc(c, &kv->k, bytes[UPI_PROJ_K], tag_k));
    return upipe_alloc(c, &kv->v, bytes[UPI_PROJ_V], tag_v);
}

UPIPE_API upipe_status upi_kv_free(upipe_ctx *c, upi_kv_pair *kv)
{
    UPIPE_TRY(upipe_free(c, kv->v));
    UPIPE_TRY(upipe_free(c, kv->k));
    kv->k = kv->v = NULL;
    return UPIPE_OK;
}

/* What is held through all stages: allocated before the first one, freed after the last one. */
UPIPE_API upipe_status upi_kv_begin(upipe_ctx *c, const upi_run *r, upi_kv *kv)
{
    return r->p->kv_rounds_shared ? UPIPE_OK : upi_kv_alloc(c, &kv->now, r->held, "k", "v");
}

UPIPE_API upipe_status upi_kv_end(upipe_ctx *c, const upi_run *r, upi_kv *kv)
{
    return r->p->kv_rounds_shared ? UPIPE_OK : upi_kv_free(c, &kv->now);
}

/* K, then V: projected into one send buffer, then through its all-to-all into *own. In an all-gather ring
 * this also starts the transfer of *own into *held: upi_kv_fetch_wait completes it. */
UPIPE_API upipe_status upi_kv_fetch_start(upipe_ctx *c, const upi_run *r, int stage, upi_kv_pair *held,
                                          upi_kv_pair *own)
{
    const upipe_plan *p = r->p;
    const upipe_buffers *b = &r->buffers;
    const int heads = upipe_plan_part(p, UPIPE_A2A_KV, stage, c->team->rank).count;
    const size_t mine[3] = {0, b->k, b->v};
    void *send;
    *own = *held;
    if (p->kv_rounds_shared || p->kv_gathered) UPIPE_TRY(upi_kv_alloc(c, own, mine, "k", "v"));
    UPIPE_TRY(upipe_alloc(c, &send, b->kv_send, "kv_send"));
    UPIPE_TRY(upi_project(c, r, UPI_PROJ_K, stage, send));
    UPIPE_TRY(upipe_a2a_to_heads(c, own->k, send, p, stage, UPIPE_A2A_KV, r->each[UPI_PROJ_K]));
    UPIPE_TRY(upi_project(c, r, UPI_PROJ_V, stage, send));
    UPIPE_TRY(upipe_a2a_to_heads(c, own->v, send, p, stage, UPIPE_A2A_KV, r->each[UPI_PROJ_V]));
    UPIPE_TRY(upipe_free(c, send));
    if (!p->kv_gathered) {
        *held = *own;
        return UPIPE_OK;
    }
    if (p->kv_rounds_shared) UPIPE_TRY(upi_kv_alloc(c, held, r->held, "k", "v"));
    if (heads == 0) return UPIPE_OK;
    return upipe_ring_all_gather_start(c, p, heads, held->k, held->v, own->k, own->v);
}

UPIPE_API upipe_status upi_kv_fetch_wait(upipe_ctx *c, const upi_run *r, int stage, upi_kv_pair *own)
{
    if (!r->p->kv_gathered) return UPIPE_OK;
    if (upipe_plan_part(r->p, UPIPE_A2A_KV, stage, c->team->rank).count > 0)
        UPIPE_TRY(upipe_comm_wait(c, c->ring));
    return upi_kv_free(c, own);
}

/* K' and V' for stage i: fetched, unless they are held already. */
UPIPE_API upipe_status upi_kv_load(upipe_ctx *c, const upi_run *r, upi_kv *kv, int i, upi_kv_pair *out)
{
    upi_kv_pair own;
    if (upipe_plan_stage(r->p, i).kv_fresh && !(r->p->kv_prefetched && i > 0)) {
        UPIPE_TRY(upi_kv_fetch_start(c, r, i, &kv->now, &own));
        UPIPE_TRY(upi_kv_fetch_wait(c, r, i, &own));
    }
    *out = kv->now;
    return UPIPE_OK;
}

/* Starts the all-gather of the next round while stage i attends, if the plan prefetches and i is its round's
 * last. */
UPIPE_API upipe_status upi_kv_prefetch(upipe_ctx *c, const upi_run *r, upi_kv *kv, int i, upipe_phase phase)
{
    const int next = i + r->p->width;
    if (!r->p->kv_prefetched || next >= r->p->stages || !upipe_plan_stage(r->p, next).kv_fresh)
        return UPIPE_OK;
    upipe_phase_set(c, phase);
    kv->coming = next;
    memset(&kv->next, 0, sizeof kv->next);
    return upi_kv_fetch_start(c, r, next, &kv->next, &kv->own);
}

/* After the attention of stage i: frees K' and V' that no later stage reads; waits for those that are
 * prefetched. */
UPIPE_API upipe_status upi_kv_release(upipe_ctx *c, const upi_run *r, upi_kv *kv, int i, upi_kv_pair *read)
{
    if (r->p->kv_rounds_shared && upipe_plan_stage(r->p, i + r->p->width - 1).kv_last)
        UPIPE_TRY(upi_kv_free(c, read));
    if (kv->coming == 0) return UPIPE_OK;
    UPIPE_TRY(upi_kv_fetch_wait(c, r, kv->coming, &kv->own));
    kv->now = kv->next;
    kv->coming = 0;
    return UPIPE_OK;
}

#endif
