/* frozen.h -- which tensors are trained: those of a list of patterns; the others are frozen
 *
 *     if (llama_freeze(&layout, "model.layers.*.self_attn.*,lm_head.weight", &err)) ...
 *
 * A frozen tensor has neither gradient nor states of the optimizer. So the layout's groups are those of what is
 * trained, and what is frozen lies in groups of its own, cut into the same units: a unit's weights are two blocks.
 */
#ifndef LLAMA_FROZEN_H
#define LLAMA_FROZEN_H

#include <fnmatch.h>

#include "layout.h"

enum { LLAMA_TRAIN_MAX = 1024 }; /* bytes of a list of patterns, its end included */

/* Whether the name matches a pattern of the list; a pattern that it is the first to match is crossed off in `left`. */
static inline int llama_is_trained(char *const *patterns, int n, char *left, const char *name)
{
    int i, trained = 0;
    for (i = 0; i < n; ++i)
        if (fnmatch(patterns[i], name, 0) == 0) {
            trained = 1;
            left[i] = 0;
        }
    return trained;
}

/* Each tensor to the end of its group, in the layout's order. */
static inline void llama_place(llama_layout *l)
{
    int64_t n[2][LLAMA_GROUPS] = {{0}};
    int i;
    for (i = 0; i < l->n; ++i) {
        llama_tensor *t = &l->tensors[i];
        int64_t *const group = n[t->frozen];
        t->at = group[t->is_vector];
        group[t->is_vector] += t->n;
        if (t->is_vector) continue;
        l->first[t->unit + 1] = n[0][LLAMA_WEIGHTS];
        l->frozen_first[t->unit + 1] = n[1][LLAMA_WEIGHTS];
    }
    l->weights = n[0][LLAMA_WEIGHTS];
    l->vectors = l->vectors_first[1] = n[0][LLAMA_VECTORS];
    l->frozen[LLAMA_WEIGHTS] = n[1][LLAMA_WEIGHTS];
    l->frozen[LLAMA_VECTORS] = l->frozen_vectors_first[1] = n[1][LLAMA_VECTORS];
}

/* llama_freeze -- freezes what no pattern matches
 *   list    patterns of fnmatch(3) with commas between them, for the names of tensors as files have them
 *   errors  ARG: a pattern matches no tensor, the list is longer than LLAMA_TRAIN_MAX
 */
static inline upipe_status llama_freeze(llama_layout *l, const char *list, upipe_err *e)
{
    char text[LLAMA_TRAIN_MAX], left[LLAMA_TRAIN_MAX], *patterns[LLAMA_TRAIN_MAX], *at = text;
    int i, k, n = 0;
    if (snprintf(text, sizeof text, "%s", list) >= LLAMA_TRAIN_MAX)
        return upipe_fail(e, UPIPE_ERR_ARG, "--train: a list of patterns has at most %d characters",
                          LLAMA_TRAIN_MAX - 1);
    memset(left, 1, sizeof left);
    for (; at != NULL; ++n) {
        patterns[n] = at;
        at = strchr(at, ',');
        if (at != NULL) *at++ = '\0';
    }
    for (i = k = 0; i < l->stored_n; ++i) {
        llama_tensor *const t = &l->stored[i];
        const int frozen = !llama_is_trained(patterns, n, left, t->name);
        const int64_t end = t->drawn + t->n;
        t->frozen = frozen;
        for (; k < l->n && l->tensors[k].is_vector == t->is_vector && l->tensors[k].drawn < end; ++k)
            l->tensors[k].frozen = frozen;
    }
    for (i = 0; i < n; ++i)
        if (left[i])
            return upipe_fail(e, UPIPE_ERR_ARG, "--train: no tensor of the model has a name like '%s'",
                              patterns[i]);
    llama_place(l);
    for (i = k = 0; i < l->stored_n; ++i) {
        while (l->tensors[k].is_vector != l->stored[i].is_vector || l->tensors[k].drawn != l->stored[i].drawn)
            ++k;
        l->stored[i].at = l->tensors[k].at;
    }
    return UPIPE_OK;
}

#endif
