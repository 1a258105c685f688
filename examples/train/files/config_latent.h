/* config_latent.h -- what a config.json says of attention whose K and V come from a latent, and what follows from it
 *
 * llama_config_numbers has read the rows of llama_fields. Here is what must agree with them, and what transformers makes of
 * several. Functions return 0, or fill *err and return -1.
 */
#ifndef LLAMA_CONFIG_LATENT_H
#define LLAMA_CONFIG_LATENT_H

#include <math.h>

#include "../model/families.h"
#include "config_value.h"

/* A number that follows from others, and may be said: then it is that. */
static inline int llama_config_follows(const json_t *root, const char *key, int64_t is, const char *from,
                                       const char *path, upipe_err *err)
{
    const json_t *j = json_object_get(root, key);
    if (j == NULL || json_is_null(j) || (json_is_integer(j) && json_integer_value(j) == is)) return 0;
    return llama_config_fail(err, path, "%s is not %s, %" PRId64, key, from, is);
}

/* Layers from first_k_dense_replace on have a mixture of experts: all layers are before it. */
static inline int llama_config_dense(const llama_config *c, const json_t *root, const char *path,
                                     upipe_err *err)
{
    const json_t *j = json_object_get(root, "first_k_dense_replace");
    if (!json_is_integer(j))
        return llama_config_fail(err, path, "first_k_dense_replace is %s",
                                 j == NULL ? "missing" : "not an integer");
    if (json_integer_value(j) >= c->layers) return 0;
    return llama_config_fail(
        err, path,
        "layers from first_k_dense_replace on have a mixture of experts, which is not built: it is "
        "%" PRId64 " of %" PRId64 " layers",
        (int64_t)json_integer_value(j), c->layers);
}

/* The multipliers of MiniCPM as those of a Granite. */
static inline int llama_config_depth(llama_config *c, const json_t *root, const char *path, upipe_err *err)
{
    static const char *const keys[] = {"scale_emb", "scale_depth"};
    int i;
    for (i = 0; i < 2; ++i)
        if (json_object_get(root, keys[i]) == NULL)
            return llama_config_fail(err, path, "%s is missing", keys[i]);
    c->residual_multiplier = c->scale_depth > 0 ? c->scale_depth / sqrt((double)c->layers) : 1;
    c->logits_scaling = c->dim_base > 0 ? (double)c->dim / (double)c->dim_base : 1;
    return 0;
}

/* After the rows of the table, before RoPE. */
static inline int llama_config_latent(llama_config *c, const json_t *root, const llama_family *family,
                                      const char *path, upipe_err *err)
{
    c->head_dim = c->still_dim + c->turned_dim;
    if (family->latent & LLAMA_LATENT_PAIRS) c->pairs = 1;
    if (family->latent & LLAMA_LATENT_DEPTH && llama_config_depth(c, root, path, err)) return -1;
    if (c->turned_dim % 2 != 0)
        return llama_config_fail(err, path, "qk_rope_head_dim is %d, and odd: it has no rotary pairs",
                                 c->turned_dim);
    if (c->kv_heads != c->heads)
        return llama_config_fail(err, path,
                                 "num_key_value_heads is %d, and a %s has one for each of %d heads",
                                 c->kv_heads, family->type, c->heads);
    if (llama_config_follows(root, "head_dim", c->turned_dim, "qk_rope_head_dim", path, err) ||
        llama_config_follows(root, "qk_head_dim", c->head_dim, "qk_nope_head_dim + qk_rope_head_dim", path,
                             err))
        return -1;
    return family->latent & LLAMA_LATENT_DENSE ? llama_config_dense(c, root, path, err) : 0;
}

/* After RoPE: transformers makes the scale of scores of factor itself, which for rates alone may be absent. */
static inline int llama_config_latent_rope(const llama_config *c, const char *path, upipe_err *err)
{
    if (c->rope_mscale_all == 0 || c->rope_factor > 0) return 0;
    return llama_config_fail(err, path, "mscale_all_dim wants factor, by which it scales scores");
}

#endif
