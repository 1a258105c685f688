/* flags_compare.c -- any words as the command line of compare */
#define _GNU_SOURCE
#define PROGRAM "compare"
#include "fuzz.h"

#include "examples/compare/options.h"

#include "flags.h"

static int flags_read(options *o, int count, char **words)
{
    struct world w;
    memset(&w, 0, sizeof w);
    return options_read(o, &w, count, words);
}

/* The plans of the first and the last rank, by every method. */
static void flags_used(const options *o)
{
    int i, last;
    for (i = 0; i < o->methods_n; ++i) {
        const method_kind *k = &method_kinds[o->methods[i]];
        upipe_plan_desc d = method_schedule(k, o->ranks, o->ring, o->heads, o->kv_heads, o->chunk);
        d.tokens = o->tokens;
        d.batch = o->batch;
        d.model_dim = o->model_dim;
        if (d.ring > 1 && d.ring_mode == UPIPE_RING_AUTO) d.ring_mode = o->ring_mode;
        d.ring_inner = k->inner ? o->inner : 0;
        d.head_dim = o->head_dim;
        d.v_dim = o->v_dim;
        d.overlap = o->overlap && method_overlaps(k);
        d.dtype = o->dtype;
        for (last = 0; last < 2; ++last) {
            method_place(&d, last ? o->ranks - 1 : 0);
            flags_plan(&d, k->segmented ? o->segments : 1);
        }
    }
    CHECK(o->cu_seqlens == NULL || o->cu_seqlens[o->cu_seqlens_n] == o->batch * o->tokens);
    free(o->cu_seqlens);
}
