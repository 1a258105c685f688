/* offload.h -- AdamW of states that lie in the second pool, on the host's CPU
 *
 *     offload_update(&ctx, &kept, host_ops, &adamw, weights_here, grads_here, &moved);    of a unit
 *
 * By tiles: while one is updated, the new weights of the tile before it go to the rank's pool, and what the next one
 * needs comes from there. So the link is used beside the CPU, by copies of the stream that activations are copied on.
 */
#ifndef LLAMA_OFFLOAD_H
#define LLAMA_OFFLOAD_H

#include "../model/activations.h"

enum {
    OFFLOAD_TILE = 1 << 20
}; /* elements: 2 or 4 MiB of weights, and the CPU's threads have enough to share */

/* One call. */
typedef struct offload {
    upipe_ctx *c;
    activations *kept;
    const upipe_ops *ops;
    const upipe_adamw *a;
    int64_t *moved;
    int64_t tile;  /* elements */
    char *weights; /* [2][tile] of the storage type: f32 weights come and go, bf16 ones go */
    float *grads;  /* [2][tile]; NULL: gradients are in the second pool already, and weights likewise */
} offload;

static inline int64_t offload_n(const offload *o, int64_t at)
{
    return o->a->n - at < o->tile ? o->a->n - at : o->tile;
}

static inline size_t offload_element(const upipe_adamw *a)
{
    return a->copy != NULL ? upipe_dtype_bytes(a->copy_dtype) : sizeof *a->w;
}

/* The buffer of the tile at `at`. */
static inline void *offload_weights(const offload *o, int64_t at)
{
    return o->weights + (size_t)(at / o->tile % 2 * o->tile) * offload_element(o->a);
}

static inline float *offload_grads(const offload *o, int64_t at)
{
    return o->grads + at / o->tile % 2 * o->tile;
}

static inline upipe_status offload_copy(offload *o, void *dst, const void *src, size_t bytes)
{
    *o->moved += (int64_t)bytes;
    return activations_start(o->kept, o->c, dst, src, bytes);
}

/* Begins to bring what the tile needs, if there is one. */
static inline upipe_status offload_fetch(offload *o, int64_t at)
{
    const size_t bytes = at < o->a->n ? (size_t)offload_n(o, at) * 4 : 0;
    if (bytes == 0) return UPIPE_OK;
    if (o->a->copy == NULL && o->weights != NULL)
        UPIPE_TRY(offload_copy(o, offload_weights(o, at), o->a->w + at, bytes));
    return o->grads != NULL ? offload_copy(o, offload_grads(o, at), o->a->g + at, bytes) : UPIPE_OK;
}

/* The host waits for all copies begun. */
static inline upipe_status offload_wait(offload *o)
{
    UPIPE_TRY(activations_wait(o->kept, o->c));
    return o->c->ops->sync(o->c);
}

static inline upipe_status offload_adamw(offload *o, int64_t at)
{
    const upipe_ops *const own = o->c->ops;
    upipe_adamw a = *o->a;
    upipe_status s;
    a.n = offload_n(o, at);
    a.m += at;
    a.v += at;
    a.g = o->grads != NULL ? offload_grads(o, at) : a.g + at;
    a.w = a.copy == NULL && o->weights != NULL ? (float *)offload_weights(o, at) : a.w + at;
    if (a.copy != NULL)
        a.copy = o->weights != NULL ? offload_weights(o, at)
                                    : upipe_offset(a.copy, (size_t)at * offload_element(&a));
    o->c->ops = o->ops;
    s = o->ops->adamw(o->c, &a);
    o->c->ops = own;
    return s;
}

/* Begins to bring the tile's new weights back. */
static inline upipe_status offload_return(offload *o, int64_t at)
{
    const size_t element = offload_element(o->a);
    void *weights = o->a->copy != NULL ? o->a->copy : o->a->w;
    if (o->weights == NULL) return UPIPE_OK;
    return offload_copy(o, upipe_offset(weights, (size_t)at * element), offload_weights(o, at),
                        (size_t)offload_n(o, at) * element);
}

static inline upipe_status offload_tiles(offload *o)
{
    int64_t at;
    UPIPE_TRY(offload_fetch(o, 0));
    UPIPE_TRY(offload_wait(o));
    for (at = 0; at < o->a->n; at += o->tile) {
        UPIPE_TRY(offload_fetch(o, at + o->tile));
        UPIPE_TRY(offload_adamw(o, at));
        UPIPE_TRY(offload_wait(o));
        UPIPE_TRY(offload_return(o, at));
    }
    return offload_wait(o);
}

/* offload_update -- the table's adamw, where m, v and with `copy` w are in the second pool
 *   ops           a CPU's table
 *   weights_here  the weights, a->copy or f32 a->w, are in the rank's own pool, and not in the second one
 *   grads_here    g is
 *   moved         += bytes copied between the pools
 *   bytes         buffers of two tiles of either in the second pool meanwhile
 *   errors        MEMORY, the tables'
 */
static inline upipe_status offload_update(upipe_ctx *c, activations *kept, const upipe_ops *ops,
                                          const upipe_adamw *a, int weights_here, int grads_here,
                                          int64_t *moved)
{
    offload o = {c, kept, ops, a, moved, a->n < OFFLOAD_TILE ? a->n : OFFLOAD_TILE, NULL, NULL};
    const size_t two = 2 * (size_t)o.tile;
    void *weights = NULL, *grads = NULL;
    if (weights_here)
        UPIPE_TRY(upipe_mem_alloc(kept->second, &weights, two * offload_element(a), UPIPE_USE_STATES,
                                  "weights", &c->err));
    if (grads_here)
        UPIPE_TRY(upipe_mem_alloc(kept->second, &grads, two * sizeof *o.grads, UPIPE_USE_STATES, "gradients",
                                  &c->err));
    o.weights = (char *)weights;
    o.grads = (float *)grads;
    UPIPE_TRY(offload_tiles(&o));
    UPIPE_TRY(upipe_mem_free(kept->second, grads, &c->err));
    return upipe_mem_free(kept->second, weights, &c->err);
}

#endif
