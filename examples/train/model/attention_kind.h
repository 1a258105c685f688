/* attention_kind.h -- a layer's attention as the forward and the backward call it; attention.h has the kinds, and an example */
#ifndef LLAMA_ATTENTION_KIND_H
#define LLAMA_ATTENTION_KIND_H

#include "units.h"

typedef struct attention attention;

typedef struct attention_kind {
    upipe_status (*fwd)(attention *a, upipe_view x);
    upipe_status (*keep)(attention *a);
    upipe_status (*fetch)(attention *a);
    upipe_status (*out)(attention *a, int part, upipe_view *y);
    upipe_status (*out_bwd)(attention *a, const upipe_grads *grads, upipe_view g);
    upipe_status (*bwd)(attention *a, const upipe_grads *grads, upipe_view x);
    upipe_status (*free)(attention *a, int kept);
    int reads_x; /* out reads normed */
} attention_kind;

struct attention {
    const attention_kind *kind;
    model_rank *r;
    int64_t at;                 /* which layer */
    upipe_fpdt f;               /* the layer, and its segments: 0 if the sequence is whole */
    upipe_mem *pool;            /* where the normed stream lies */
    upipe_view x;               /* it, where the kind reads it */
    upipe_saved saved;          /* of the whole sequence */
    upipe_fpdt_saved offloaded; /* of segments, in the second pool */
    size_t segment_bytes;       /* of the result of one of them */
    upipe_linear_layer linear;
    upipe_linear_layer_saved linear_saved;
    /* A gradient of normed, that of the gate or of a linear layer, until normed is not read any more */
    upipe_view dx;
};

#endif
