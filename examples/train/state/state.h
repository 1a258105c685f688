/* state.h -- what one rank has of a model: weights, gradients and the optimizer's states, sharded over the ranks */
#ifndef LLAMA_STATE_H
#define LLAMA_STATE_H

#include "../../../upipe/upipe_zero.h"
#include "../model/layout.h"

/* The state of one rank; the arrays lie in the rank's pool. zero says which elements of its group an array has: weights
 * and gradients are zero's own, the optimizer's are upipe_zero_part_of(zero, UPIPE_ZERO_STATES, unit). */
typedef struct llama_state {
    const llama_layout *layout;
    upipe_zero zero[LLAMA_GROUPS];
    upipe_zero frozen[LLAMA_GROUPS];          /* of what is not trained: weights alone */
    float *master;                            /* f32 weights, of the weights group; NULL if these are f32 */
    float *m[LLAMA_GROUPS], *v[LLAMA_GROUPS]; /* AdamW moments */
} llama_state;
/* llama_state_init -- which elements a rank's arrays have, by the stage of ZeRO; the arrays are the caller's
 *
 * Vectors are few: neither they nor their gradients are sharded.
 */
static inline void llama_state_init(llama_state *s, const llama_layout *l, upipe_dtype dtype, int stage,
                                    int rank, int ranks)
{
    int group;
    memset(s, 0, sizeof *s);
    s->layout = l;
    for (group = 0; group < LLAMA_GROUPS; ++group) {
        upipe_zero *z = &s->zero[group];
        z->rank = rank;
        z->ranks = ranks;
        z->stage = group == LLAMA_WEIGHTS || stage == 0 ? stage : 1;
        z->dtype = group == LLAMA_WEIGHTS ? dtype : UPIPE_F32;
        z->first = group == LLAMA_WEIGHTS ? l->first : l->vectors_first;
        z->units = group == LLAMA_WEIGHTS ? l->units : 1;
        s->frozen[group] = *z;
        s->frozen[group].first = group == LLAMA_WEIGHTS ? l->frozen_first : l->frozen_vectors_first;
    }
}

/* The group of a tensor. */
static inline const upipe_zero *llama_zero(const llama_state *s, const llama_tensor *t)
{
    return t->frozen ? &s->frozen[t->is_vector] : &s->zero[t->is_vector];
}

/* The storage type of the weights group. */
static inline upipe_dtype llama_state_dtype(const llama_state *s)
{
    return s->zero[LLAMA_WEIGHTS].dtype;
}

#endif
