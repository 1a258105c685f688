/* activations_flag.h -- what is kept of each layer's forward for its backward, and where, as --activations says it
 *
 *     activations_setting a;
 *     if (activations_parse("sac:4,grad", &a) != 0) ...        no such setting
 *     activations_text(text, &a);
 */
#ifndef COMMON_ACTIVATIONS_FLAG_H
#define COMMON_ACTIVATIONS_FLAG_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "number.h"

enum {
    ACTIVATIONS_AC,
    ACTIVATIONS_OFFLOAD,
    ACTIVATIONS_SAO,
    ACTIVATIONS_SAC,
    ACTIVATIONS_BLOCKS,
    ACTIVATIONS_KINDS
};

static const char *const activations_names[ACTIVATIONS_KINDS] = {"ac", "offload", "sao", "sac", "blocks"};

/* The setting; zero is ac. */
typedef struct activations_setting {
    int kind;
    int64_t k; /* of sao, sac and blocks, 1 to the number of layers; sac: 0 for all layers */
    int grad;
} activations_setting;

/* A part of --help. */
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

/* Space for a setting's text. */
enum { ACTIVATIONS_TEXT = 48 };

/* As the flag has it. */
static inline const char *activations_text(char out[ACTIVATIONS_TEXT], const activations_setting *a)
{
    char k[24] = "";
    if (a->k > 0) snprintf(k, sizeof k, ":%lld", (long long)a->k);
    snprintf(out, ACTIVATIONS_TEXT, "%s%s%s", activations_names[a->kind], k, a->grad ? ",grad" : "");
    return out;
}

/* The value of --activations. 0, or -1 for what is none. */
static inline int activations_parse(const char *text, activations_setting *a)
{
    char word[ACTIVATIONS_TEXT], *k, *grad;
    memset(a, 0, sizeof *a);
    if (strlen(text) >= sizeof word) return -1;
    strcpy(word, text);
    grad = strchr(word, ',');
    if (grad != NULL && strcmp(grad, ",grad") != 0) return -1;
    a->grad = grad != NULL;
    if (grad != NULL) *grad = '\0';
    k = strchr(word, ':');
    if (k != NULL) *k++ = '\0';
    while (a->kind < ACTIVATIONS_KINDS && strcmp(activations_names[a->kind], word) != 0) ++a->kind;
    if (a->kind == ACTIVATIONS_KINDS) return -1;
    if (k == NULL) return a->kind == ACTIVATIONS_SAO || a->kind == ACTIVATIONS_BLOCKS ? -1 : 0;
    if (a->kind < ACTIVATIONS_SAO || number_whole(k, &a->k) != 0) return -1;
    return a->k >= 1 && a->k <= INT32_MAX ? 0 : -1;
}

#endif
