/* flags_train.c -- any words as the command line of train */
#define _GNU_SOURCE
#define PROGRAM "train"
#include "fuzz.h"

#include "examples/train/model/setting.h"
#include "examples/train/run/options.h"

#include "flags.h"

/* The plans of the first and the last rank. */
static void words_used(const options *o)
{
    const llama_config c = options_config(o);
    const setting s = setting_of(o, NULL);
    upipe_plan_desc d = method_desc(&s.how, c.heads, c.kv_heads);
    int last;
    CHECK(o->tokens >= 1 && o->batch >= 1 && o->steps >= 0 && o->adam_eps > 0 && c.dim >= 1 && c.hidden >= 1);
    d.tokens = o->tokens;
    d.batch = o->batch;
    d.model_dim = c.dim;
    d.head_dim = c.head_dim;
    d.dtype = (upipe_dtype)o->dtype;
    for (last = 0; last < 2; ++last) {
        method_place(&d, last ? s.how.ranks - 1 : 0);
        flags_plan(&d, o->how.segments);
    }
}
