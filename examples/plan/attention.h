/* attention.h -- attention kernels: how fast they are, by card, head dim and length, as others have published it
 *
 *     attention_slow(&e->work, &s, &m);          FLOPs of attention become those that take as long at the machine's rates
 *
 * A machine's rates (machine.h) are those of its card's usual kernel with heads of 128. Another kernel or head dim is a part
 * of that: the published rate of the one over that of the other. What nobody has published of a card is that of another,
 * and is said to be a guess.
 */
#ifndef PLAN_ATTENTION_H
#define PLAN_ATTENTION_H

#include "estimate.h"

enum { KERNEL_MACHINE, KERNEL_FA2, KERNEL_FA3, KERNEL_FA4, KERNEL_CUDNN, KERNEL_UPIPE, KERNELS };

static const char *const kernel_names[KERNELS] = {"machine", "fa2", "fa3", "fa4", "cudnn", "upipe"};

/* A row: TFLOP/s under a causal mask, whose FLOPs are half of all pairs'. */
typedef struct kernel_rate {
    int kernel;
    const char *card;
    int head_dim;
    double length, forward, backward; /* tokens that see each other; TFLOP/s */
    const char *from;
} kernel_rate;

#include "attention_rates.h"

/* How fast a card's usual kernel is with heads of 128 and long sequences is what its machine's rates are of. */
static const struct {
    const char *card;
    int kernel;
} kernel_usual[] = {{"h100", KERNEL_FA3}, {"a100", KERNEL_FA2}, {"b200", KERNEL_FA4}, {"", KERNEL_FA2}};

static inline int kernel_of(const char *card)
{
    size_t i = 0;
    while (kernel_usual[i].card[0] != '\0' && strcmp(kernel_usual[i].card, card) != 0) ++i;
    return kernel_usual[i].kernel;
}

/* Whether a card runs a kernel: FlashAttention-3 is for one processor. */
static inline int kernel_runs(int kernel, const char *card)
{
    return kernel != KERNEL_FA3 || strcmp(card, "h100") == 0;
}

/* attention_at -- rates of a kernel on a card at a length, between those of the table; of the nearest head dim
 *   returns  the row behind it; NULL where the table has none */
static inline const kernel_rate *attention_at(double rate[2], int kernel, const char *card, int head_dim,
                                              double length)
{
    const kernel_rate *low = NULL, *high = NULL;
    double nearest = INFINITY, part;
    size_t i;
    for (i = 0; i < sizeof kernel_rates / sizeof *kernel_rates; ++i) {
        const kernel_rate *r = &kernel_rates[i];
        const double far = fabs(log2((double)r->head_dim / head_dim));
        if (r->kernel != kernel || strcmp(r->card, card) != 0 || far > nearest) continue;
        if (far < nearest) low = high = NULL;
        nearest = far;
        if (low == NULL || r->length <= length) low = r; /* lengths rise */
        if (high == NULL && r->length >= length) high = r;
    }
    if (low == NULL) return NULL;
    if (high == NULL) high = low;
    part = high->length > low->length ? log2(length / low->length) / log2(high->length / low->length) : 0;
    rate[0] = low->forward + part * (high->forward - low->forward);
    rate[1] = low->backward + part * (high->backward - low->backward);
    return low;
}

/* attention_part -- what of the machine's rates a kernel reaches, forward and backward
 *   from     where that is from; guess: it is not of this card */
static inline void attention_part(double part[2], const char **from, int *guess, const setting *s,
                                  const machine *m)
{
    const char *const cards[] = {m->card, "h100", "b200"};
    const llama_config *c = &s->layout->config;
    const double tokens = (double)s->tokens,
                 length = c->window > 0 ? fmin((double)c->window, tokens) : tokens;
    const kernel_rate *row = NULL;
    double usual[2] = {1, 1};
    int i;
    for (i = 0; i < 3 && row == NULL && s->attention != KERNEL_MACHINE; ++i) {
        if (i > 0 && s->attention == kernel_of(m->card)) break;
        row = attention_at(part, s->attention, cards[i], c->head_dim, length);
    }
    *guess = s->attention != KERNEL_MACHINE && (row == NULL || i > 1);
    *from = row != NULL ? row->from : "the machine's rates";
    if (row == NULL) { /* nothing is published of this card's usual kernel, nor of this library's own */
        part[0] = part[1] = 1;
        return;
    }
    attention_at(usual, kernel_of(row->card), row->card, 128, INFINITY);
    part[0] /= usual[0];
    part[1] /= usual[1];
}

/* attention_slow -- FLOPs of attention become those that take as long at the machine's rates */
static inline void attention_slow(estimate_work *w, const setting *s, const machine *m)
{
    const char *from;
    double part[2];
    int guess;
    attention_part(part, &from, &guess, s, m);
    w->attn_fwd /= part[0];
    w->attn_bwd /= part[1];
}

#endif
