/* flags_compare.c -- any words as the command line of compare */
#define _GNU_SOURCE
#define PROGRAM "compare"
#include "fuzz.h"

#include "examples/compare/options.h"

#include "flags.h"

/* The plans of the first and the last rank, by every method. */
static void words_used(const options *o)
{
    int i, last;
    for (i = 0; i < o->methods.n; ++i) {
        const method_kind *k = &method_kinds[o->methods.at[i]];
        upipe_plan_desc d =
            method_schedule(k, o->how.ranks, o->how.ring, o->heads, o->kv_heads, o->how.chunk);
        d.tokens = o->tokens;
        d.batch = o->batch;
        d.model_dim = o->model_dim;
        if (d.ring > 1 && d.ring_mode == UPIPE_RING_AUTO) d.ring_mode = (upipe_ring_mode)o->ring_mode;
        d.ring_inner = k->inner ? o->how.inner : 0;
        d.head_dim = o->head_dim;
        d.v_dim = o->v_dim;
        d.overlap = o->how.overlap && method_overlaps(k);
        d.dtype = (upipe_dtype)o->dtype;
        for (last = 0; last < 2; ++last) {
            method_place(&d, last ? o->how.ranks - 1 : 0);
            flags_plan(&d, k->segmented ? o->how.segments : 1);
        }
    }
    CHECK(o->borders == NULL || o->borders[o->borders_n] == o->batch * o->tokens);
    free(o->borders);
}
