/* initial.h -- the weights that a new model starts from, a function of the seed alone
 *
 *     initial_weights(&t, seed);           after trainer_alloc, on all ranks
 */
#ifndef LLAMA_INITIAL_H
#define LLAMA_INITIAL_H

#include "upipe/cpu/upipe_cpu_simd.h"

#include "../files/data.h"
#include "trainer.h"

/* Element i of a new matrix: normal, of the deviation that GPT-2 and Llama start from, smaller where the
 * stream adds up over 2 * layers halves. A function of the seed and the place alone. */
static inline float initial_value(const llama_tensor *t, int64_t layers, uint64_t seed, int64_t i)
{
    uint64_t at = data_mix(seed) + (uint64_t)(t->drawn + i) * 0x9e3779b97f4a7c15u;
    double one = ((double)(data_mix(at) >> 11) + 1) * 0x1p-53, two = (double)(data_mix(~at) >> 11) * 0x1p-53;
    if (t->kind >= LLAMA_LORA_B) return 0;
    if (llama_is_adapter(t->kind)) return (float)((2 * two - 1) / sqrt((double)t->cols)); /* as in PEFT */
    double deviation =
        t->kind == LLAMA_WO || t->kind == LLAMA_DOWN ? 0.02 / sqrt(2.0 * (double)layers) : 0.02;
    return (float)(deviation * sqrt(-2 * log(one)) * cos(2 * acos(-1.0) * two));
}

/* What this rank has of a unit's new weights: those of which it has the optimizer's states or, of what is frozen, all. */
static inline upipe_status initial_unit(trainer *t, uint64_t seed, int unit, int frozen)
{
    enum { CHUNK = 4096 };
    const upipe_zero *z = frozen ? &t->state.frozen[LLAMA_WEIGHTS] : &t->state.zero[LLAMA_WEIGHTS];
    const upipe_zero_part p = upipe_zero_part_of(z, frozen ? UPIPE_ZERO_WEIGHTS : UPIPE_ZERO_STATES, unit);
    const int64_t shift = upipe_zero_sharded(z, UPIPE_ZERO_WEIGHTS) ? p.at - p.first : 0;
    const size_t element = upipe_dtype_bytes(z->dtype);
    const llama_tensor *tensor = t->m.layout->tensors;
    upipe_ctx *c = t->r.c;
    float wide[CHUNK];
    uint16_t narrow[CHUNK];
    int64_t at, i;
    for (at = p.first; at < p.first + p.n; at += CHUNK) {
        int64_t count = p.first + p.n - at < CHUNK ? p.first + p.n - at : CHUNK;
        for (i = 0; i < count; ++i) {
            while (tensor->frozen != frozen || at + i >= tensor->at + tensor->n) ++tensor;
            wide[i] = initial_value(tensor, t->m.layout->config.layers, seed, at + i - tensor->at);
            narrow[i] = upipe_f32_to_bf16(wide[i]);
        }
        UPIPE_TRY(c->ops->copy(c, (char *)z->weights + (size_t)(at + shift) * element,
                               z->dtype == UPIPE_F32 ? (void *)wide : (void *)narrow,
                               (size_t)count * element));
        if (t->state.master != NULL && !frozen)
            UPIPE_TRY(c->ops->copy(c, t->state.master + (at - p.first + p.at), wide, (size_t)count * 4));
    }
    return UPIPE_OK;
}

/* Norm weights are 1, biases 0. */
static inline upipe_status initial_vectors(trainer *t)
{
    enum { CHUNK = 4096 };
    const llama_layout *l = t->m.layout;
    void *const vectors = t->state.zero[LLAMA_VECTORS].weights;
    void *const frozen = t->state.frozen[LLAMA_VECTORS].weights;
    upipe_ctx *c = t->r.c;
    float ones[CHUNK];
    int64_t at, n;
    int i;
    for (i = 0; i < CHUNK; ++i) ones[i] = 1;
    UPIPE_TRY(c->ops->zero(c, vectors, (size_t)l->vectors * 4));
    UPIPE_TRY(c->ops->zero(c, frozen, (size_t)l->frozen[LLAMA_VECTORS] * 4));
    for (i = 0; i < l->n; ++i) {
        const llama_tensor *tensor = &l->tensors[i];
        if (!tensor->is_vector || llama_is_bias(tensor->kind)) continue;
        for (at = 0; at < tensor->n; at += n) {
            n = tensor->n - at < CHUNK ? tensor->n - at : CHUNK;
            UPIPE_TRY(c->ops->copy(c, (float *)(tensor->frozen ? frozen : vectors) + tensor->at + at, ones,
                                   (size_t)n * 4));
        }
    }
    return UPIPE_OK;
}

/* Each rank computes its slices of the new weights; then the slices are gathered, where all are to be whole. */
static inline upipe_status initial_weights(trainer *t, uint64_t seed)
{
    int unit;
    for (unit = 0; unit < t->m.layout->units; ++unit) {
        UPIPE_TRY(initial_unit(t, seed, unit, 0));
        UPIPE_TRY(initial_unit(t, seed, unit, 1));
    }
    UPIPE_TRY(upipe_zero_weights_gather(t->r.c, &t->state.zero[LLAMA_WEIGHTS]));
    return initial_vectors(t);
}

#endif
