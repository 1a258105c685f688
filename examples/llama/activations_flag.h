/* activations_flag.h -- the flag --activations: what is kept of each layer's forward, and where */
#ifndef LLAMA_ACTIVATIONS_FLAG_H
#define LLAMA_ACTIVATIONS_FLAG_H

#include "../common/cli.h"
#include "activations.h"

/* A part of --help. The programs say which kind is theirs without the flag. */
static const char activations_usage[] =
    "\n"
    "what is kept of a layer's forward for its backward; a second pool is host memory, on a GPU\n"
    "  --activations KIND ac         its input\n"
    "                     offload    its input, in a second pool\n"
    "                     sao:K      the same, but the input of every K-th layer stays\n"
    "                     sac        its input and attention's result, in a second pool\n"
    "                     sac:K      the same of the first K layers; of the others the input alone\n"
    "                     blocks:K   the input of the first of every K layers, in a second pool; where K\n"
    "                                does not divide the layers, the last block is shorter\n"
    "                     KIND,grad  and the gradient of the stream waits in the second pool while\n"
    "                                attention's backward runs\n";

/* Room for a setting's text. */
enum { ACTIVATIONS_TEXT = 48 };

/* As the flag has it. */
static inline const char *activations_text(char out[ACTIVATIONS_TEXT], const activations_setting *a)
{
    char k[24] = "";
    if (a->k > 0) snprintf(k, sizeof k, ":%lld", (long long)a->k);
    snprintf(out, ACTIVATIONS_TEXT, "%s%s%s", activations_names[a->kind], k, a->grad ? ",grad" : "");
    return out;
}

/* The value of --activations. */
static inline int activations_flag(const char *flag, const char *text, activations_setting *a)
{
    const char *k = strchr(text, ':');
    const char *end = text + strlen(text);
    char number[24];
    size_t n;
    memset(a, 0, sizeof *a);
    a->grad = end - text > 5 && strcmp(end - 5, ",grad") == 0;
    if (a->grad) end -= 5;
    n = (size_t)((k != NULL ? k : end) - text);
    while (a->kind < ACTIVATIONS_KINDS &&
           (strlen(activations_names[a->kind]) != n || memcmp(activations_names[a->kind], text, n) != 0))
        ++a->kind;
    if (a->kind == ACTIVATIONS_KINDS || (k != NULL && a->kind < ACTIVATIONS_SAO) ||
        (k != NULL && end - k > (ptrdiff_t)sizeof number) ||
        (k == NULL && (a->kind == ACTIVATIONS_SAO || a->kind == ACTIVATIONS_BLOCKS)))
        return cli_refuse(
            "--%s is ac, offload, sao:K, sac, sac:K or blocks:K, and \",grad\" behind it, not '%s'", flag,
            text);
    if (k == NULL) return 0;
    snprintf(number, sizeof number, "%.*s", (int)(end - k - 1), k + 1);
    return cli_number(flag, number, 1, INT32_MAX, &a->k);
}

/* 0 if there are so many layers. */
static inline int activations_fit(const activations_setting *a, int64_t layers)
{
    char text[ACTIVATIONS_TEXT];
    if (a->k <= layers) return 0;
    return cli_fail("--activations %s: the model has %lld layers", activations_text(text, a),
                    (long long)layers);
}

#endif
