/* rope_flags.h -- the flags of RoPE, of train, logits and compare, as numbers of a model's configuration */
#ifndef LLAMA_ROPE_FLAGS_H
#define LLAMA_ROPE_FLAGS_H

#include <string.h>

#include "../../common/cli.h"
#include "../../common/options.h"
#include "../model/families.h"

/* The flags that may say otherwise than a folder: into the configuration. */
static inline void options_rope(const options *o, llama_config *c)
{
    const field *f;
    const int type = options_given(o, &o->rope_type) ? o->rope_type : c->rope_type;
    if (options_given(o, &o->rope_theta)) c->rope_theta = o->rope_theta;
    for (f = llama_fields; f < llama_fields + LLAMA_FIELDS && type != c->rope_type; ++f)
        if (f->used != 0)
            memset((char *)c + f->at, 0, field_bytes(f)); /* another type has numbers of its own */
    if (type != c->rope_type) c->rope_positions = 0;
    c->rope_type = type;
    if (options_given(o, &o->rope_factor)) {
        c->rope_factor = o->rope_factor;
        if (type != LLAMA_ROPE_DYNAMIC) c->rope_positions = 0;
    }
    if (options_given(o, &o->rope_original)) c->rope_original = o->rope_original;
    if (type == LLAMA_ROPE_DYNAMIC && c->rope_original > 0) {
        c->rope_positions = c->rope_original;
        c->rope_original = 0;
    }
    if (type == LLAMA_ROPE_LLAMA3 && c->rope_high == 0) c->rope_low = 1, c->rope_high = 4; /* Llama 3.1's */
}

/* What a type lacks, or has too much; 0, or the sentence is out. */
static inline int options_rope_lacks(const options *o, const llama_config *c)
{
    const char *name = llama_rope_names[c->rope_type];
    const int more = c->rope_type != LLAMA_ROPE_DEFAULT && c->rope_type != LLAMA_ROPE_LONGROPE;
    const int before = more && c->rope_type != LLAMA_ROPE_LINEAR;
    if (llama_families[c->family].ropes != 0 && !(llama_families[c->family].ropes >> c->rope_type & 1))
        return cli_refuse("--rope-type %s: no %s has it", name, llama_families[c->family].type);
    if (c->rope_type == LLAMA_ROPE_LONGROPE && c->rope_short[0] == 0)
        return cli_refuse("--rope-type longrope wants the lists of a folder's config.json");
    if (options_given(o, &o->rope_factor) && c->rope_type == LLAMA_ROPE_DEFAULT)
        return cli_refuse("--rope-factor would have no effect with the rope-type default");
    if (options_given(o, &o->rope_original) &&
        (c->rope_type == LLAMA_ROPE_DEFAULT || c->rope_type == LLAMA_ROPE_LINEAR))
        return cli_refuse("--rope-original would have no effect with the rope-type %s", name);
    if (more && c->rope_factor == 0 && (c->rope_type != LLAMA_ROPE_YARN || c->rope_positions == 0))
        return cli_refuse("--rope-type %s wants --rope-factor", name);
    if (before && c->rope_original == 0 && c->rope_positions == 0)
        return cli_refuse("--rope-type %s wants --rope-original", name);
    return 0;
}

#endif
