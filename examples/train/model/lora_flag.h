/* lora_flag.h -- what --lora says: RANK[:ALPHA[:TARGETS]], of which the defaults are PEFT's */
#ifndef LLAMA_LORA_FLAG_H
#define LLAMA_LORA_FLAG_H

#include "../../common/number.h"
#include "frozen.h"

enum { LLAMA_LORA_TEXT = 64, LLAMA_LORA_RANK_MAX = 1024 };
#define LLAMA_LORA_ALPHA_MAX 1e6

static const char *const llama_lora_names[LLAMA_LORAS] = {"q",    "k", "v",    "q_a", "q_b", "kv_a",
                                                          "kv_b", "o", "gate", "up",  "down"};

/* The bits of names with commas between them; 0: one is none, or is there twice. */
static inline unsigned llama_lora_targets(char *text)
{
    unsigned bits = 0;
    char *end;
    int i;
    for (; text != NULL; text = end) {
        end = strchr(text, ',');
        if (end != NULL) *end++ = '\0';
        for (i = 0; i < LLAMA_LORAS && strcmp(text, llama_lora_names[i]) != 0;) ++i;
        if (i == LLAMA_LORAS || (bits >> i & 1)) return 0;
        bits |= 1u << i;
    }
    return bits;
}

/* 0, or -1 for what --lora cannot say. */
static inline int llama_lora_parse(llama_lora *l, const char *text)
{
    char copy[LLAMA_LORA_TEXT], *alpha, *targets = NULL;
    int64_t rank;
    if (snprintf(copy, sizeof copy, "%s", text) >= LLAMA_LORA_TEXT) return -1;
    alpha = strchr(copy, ':');
    if (alpha != NULL) *alpha++ = '\0';
    if (alpha != NULL) targets = strchr(alpha, ':');
    if (targets != NULL) *targets++ = '\0';
    l->alpha = 8;
    l->targets = 1u << 0 | 1u << 2; /* q, v */
    if (number_whole(copy, &rank) != 0 || rank < 1 || rank > LLAMA_LORA_RANK_MAX) return -1;
    l->rank = (int)rank;
    if (alpha != NULL &&
        (number_real(alpha, &l->alpha) != 0 || !(l->alpha > 0 && l->alpha <= LLAMA_LORA_ALPHA_MAX)))
        return -1;
    if (targets != NULL) l->targets = llama_lora_targets(targets);
    return l->targets != 0 ? 0 : -1;
}

/* llama_layout_trained -- the layout of a model, of which the tensors are trained that the flags say
 *   train, lora  of --train and --lora; NULL: not given
 *   errors       ARG: what they say, both are given, a family stores adapted matrices as one; OVERFLOW; MEMORY. Then
 *                nothing is to be freed
 */
static inline upipe_status llama_layout_trained(llama_layout *l, const llama_config *c, const char *train,
                                                const char *lora, upipe_err *e)
{
    llama_lora adapters = {0, 0, 0};
    upipe_status s = UPIPE_OK;
    int bad;
    if (lora != NULL && llama_lora_parse(&adapters, lora) != 0)
        return upipe_fail(
            e, UPIPE_ERR_ARG,
            "--lora is RANK:ALPHA:TARGETS, with a rank from 1 to %d and targets of q, k, v, q_a, q_b, kv_a, "
            "kv_b, o, gate, up, down, not '%.64s'",
            LLAMA_LORA_RANK_MAX, lora);
    if (lora != NULL && llama_families[c->family].fused)
        return upipe_fail(e, UPIPE_ERR_ARG, "--lora: a %s stores several matrices as one",
                          llama_families[c->family].type);
    if (lora != NULL && train != NULL)
        return upipe_fail(e, UPIPE_ERR_ARG, "--lora trains adapters alone: --train would have no effect");
    if (llama_lora_lacks(c, adapters.targets) != NULL)
        return upipe_fail(e, UPIPE_ERR_ARG,
                          "--lora: this %s has no %s; its targets are %s, kv_a, kv_b, o, gate, up, down",
                          llama_families[c->family].type, llama_lora_lacks(c, adapters.targets),
                          c->q_rank > 0 ? "q_a, q_b" : "q");
    bad = llama_layout_adapted(l, c, &adapters);
    if (bad == LLAMA_LAYOUT_MEMORY)
        return upipe_fail(e, UPIPE_ERR_MEMORY, "out of memory: the table of the model's tensors");
    if (bad) return upipe_fail(e, UPIPE_ERR_OVERFLOW, "the model's bytes leave 63 bits");
    if (lora != NULL) train = "*.lora_?.weight";
    if (train != NULL) s = llama_freeze(l, train, e);
    if (s != UPIPE_OK) llama_layout_free(l);
    return s;
}

#endif
