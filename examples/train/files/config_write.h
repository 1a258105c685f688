/* config_write.h -- writes the config.json that config_file.h and Hugging Face read */
#ifndef LLAMA_CONFIG_WRITE_H
#define LLAMA_CONFIG_WRITE_H

#include "config_file.h"

/* Whether a number that a file may lack is none. */
static inline int llama_config_lacks(const llama_config *c, const field *row)
{
    const void *at = (const char *)c + row->at;
    return row->kind == FLAG_REAL ? *(const double *)at == 0 : *(const int64_t *)at == 0;
}

/* A line of the file. */
static inline void llama_config_line(FILE *f, const llama_config *c, const field *row,
                                     const llama_family *family)
{
    char text[FIELD_TEXT];
    if (row->at == offsetof(llama_config, window) || !llama_has_key(family, row->key) ||
        (family->latent && row->at == offsetof(llama_config, head_dim))) /* it follows from others */
        return;
    if (llama_config_may_lack(row) && llama_config_lacks(c, row))
        fprintf(f, "  \"%s\": null,\n", row->key);
    else if (row->kind != FLAG_CHOICE)
        fprintf(f, "  \"%s\": %s,\n", row->key, field_text(text, row, c));
    else if (!family->bias_always)
        fprintf(f, "  \"%s\": %s,\n", row->key, c->attention_bias != LLAMA_BIAS_NONE ? "true" : "false");
}

static inline void llama_config_write_list(FILE *f, const llama_config *c, int bit, const char *set,
                                           const char *clear)
{
    int64_t i;
    for (i = 0; i < c->layers; ++i)
        fprintf(f, "%s%s", i > 0 ? ", " : "[", c->by_layer[i] & bit ? set : clear);
    fprintf(f, "],\n");
}

/* Windows, and layers without RoPE. */
static inline void llama_config_write_layers(FILE *f, const llama_config *c, const llama_family *family)
{
    const int by_layer = family->windows == LLAMA_WINDOWS_TYPES || c->window > 0;
    if (family->windows == LLAMA_WINDOWS_LINEAR) {
        fprintf(f, "  \"layer_types\": ");
        llama_config_write_list(f, c, LLAMA_LINEAR, "\"linear_attention\"", "\"full_attention\"");
        return;
    }
    if (family->windows == LLAMA_WINDOWS_SWITCH)
        fprintf(f, "  \"use_sliding_window\": %s,\n", c->window > 0 ? "true" : "false");
    if (c->window > 0)
        fprintf(f, "  \"sliding_window\": %" PRId64 ",\n", c->window);
    else if (family->windows == LLAMA_WINDOWS_ALL || family->windows == LLAMA_WINDOWS_TYPES)
        fprintf(f, "  \"sliding_window\": null,\n");
    if (family->windows >= LLAMA_WINDOWS_SWITCH && by_layer) {
        fprintf(f, "  \"layer_types\": ");
        llama_config_write_list(f, c, LLAMA_SEES_ALL, "\"full_attention\"",
                                c->window > 0 ? "\"sliding_attention\"" : "\"full_attention\"");
    }
    if (llama_is_word(family->keys, "no_rope_layers")) {
        fprintf(f, "  \"no_rope_layers\": ");
        llama_config_write_list(f, c, LLAMA_NO_ROPE, "0", "1");
    }
}

static inline void llama_config_write_rope(FILE *f, const llama_config *c, const llama_family *family)
{
    char text[FIELD_TEXT];
    const field *row;
    int i;
    if (family->partial > 0)
        fprintf(f, "  \"partial_rotary_factor\": %.17g,\n", c->rope_partial > 0 ? c->rope_partial : 1);
    if (family->original > 0 && c->rope_original > 0)
        fprintf(f, "  \"original_max_position_embeddings\": %" PRId64 ",\n", c->rope_original);
    if (c->rope_type == LLAMA_ROPE_DEFAULT && !family->rope_given) {
        fprintf(f, "  \"rope_scaling\": null,\n");
        return;
    }
    fprintf(f, "  \"rope_scaling\": {\"rope_type\": \"%s\"", llama_rope_names[c->rope_type]);
    for (row = llama_fields; row < llama_fields + LLAMA_FIELDS; ++row) {
        field one = *row;
        if (!(row->used >> c->rope_type & 1)) continue;
        /* what was not said is not said; 0 is false of truncate's opposite alone */
        if (row->kind == FLAG_REAL && *(const double *)((const char *)c + row->at) == 0) continue;
        fprintf(f, ", \"%s\": %s", row->key, row->many > 0 ? "[" : "");
        if (row->kind == FLAG_SWITCH) {
            fputs(*(const int *)((const char *)c + row->at) ^ row->opposite ? "true" : "false", f);
            continue;
        }
        for (i = 0; i < (row->many > 0 ? llama_rope_dims(c) / 2 : 1); ++i, one.at += sizeof(double))
            fprintf(f, "%s%s", i > 0 ? ", " : "", field_text(text, &one, c));
        if (row->many > 0) fputc(']', f);
    }
    fprintf(f, "},\n");
}

/* llama_config_write -- makes a config.json that llama_config_read and Hugging Face read; synced to the disk
 *
 *   positions   tokens of the longest sequence the model has seen: max_position_embeddings, where RoPE does not depend on it
 *   path        must not exist
 */
static inline int llama_config_write(const llama_config *c, upipe_dtype dtype, int64_t positions,
                                     const char *path, upipe_err *err)
{
    const llama_family *family = &llama_families[c->family];
    const field *row;
    int bad;
    FILE *f = fopen(path, "wx");
    if (f == NULL) return llama_config_fail(err, path, "cannot be made: %s", strerror(errno));
    fprintf(f, "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"%s\",\n", family->architecture,
            family->type);
    for (row = llama_fields; row < llama_fields + LLAMA_FIELDS; ++row) {
        if (row->key == NULL || row->used != 0) continue;
        llama_config_line(f, c, row, family);
        if (row->at == offsetof(llama_config, vocab))
            fprintf(f, "  \"max_position_embeddings\": %" PRId64 ",\n",
                    c->rope_positions > 0 ? c->rope_positions : positions);
        if (row->at == offsetof(llama_config, rope_theta)) llama_config_write_rope(f, c, family);
        if (row->at == offsetof(llama_config, window)) llama_config_write_layers(f, c, family);
        if (row->at == offsetof(llama_config, attention_bias))
            fprintf(
                f,
                "  %s,\n  \"mlp_bias\": false,\n  \"attention_dropout\": 0.0,\n%s  \"eos_token_id\": null,\n",
                family->gemma ? "\"hidden_activation\": \"gelu_pytorch_tanh\"" : "\"hidden_act\": \"silu\"",
                family->bos ? "" : "  \"bos_token_id\": null,\n");
    }
    if (llama_is_word(family->keys, "attention_out_bias"))
        fprintf(f, "  \"attention_out_bias\": %s,\n  \"residual_dropout\": 0.0,\n",
                c->attention_bias == LLAMA_BIAS_QKVO ? "true" : "false");
    if (family->latent & LLAMA_LATENT_DENSE)
        fprintf(f, "  \"first_k_dense_replace\": %" PRId64 ",\n", c->layers);
    if (c->pad > 0)
        fprintf(f, "  \"pad_token_id\": %" PRId64 ",\n", c->pad - 1);
    else if (family->pad > 0)
        fprintf(f, "  \"pad_token_id\": null,\n");
    fprintf(f, "  \"torch_dtype\": \"%s\"\n}\n", dtype == UPIPE_BF16 ? "bfloat16" : "float32");
    bad = fflush(f) != 0 || fsync(fileno(f)) != 0;
    if (bad) llama_config_fail(err, path, "cannot be written: %s", strerror(errno));
    if (fclose(f) != 0 && !bad) bad = llama_config_fail(err, path, "cannot be written: %s", strerror(errno));
    return bad ? -1 : 0;
}

#endif
