/* promise.h -- which results of two methods must have the same bits, told from their plans
 *
 *     promise_bits(first, m, RESULT_DX)
 *
 * docs/numerics.md in code, for f32 on the CPU with the built-in products. Methods whose rings or segments differ
 * sum in other orders. Otherwise all results are the same but those that come from dK and dV, which are the same
 * where the partial sums of every K/V head are the same and added in the same order.
 */
#ifndef COMPARE_PROMISE_H
#define COMPARE_PROMISE_H

#include "passes.h"

/* Whether keys come to queries, and tokens to sums, in one order: the same rings and segments. */
static int promise_tokens(const method *a, const method *b)
{
    const upipe_plan_desc *one = &method_plan_of(a)->desc, *other = &method_plan_of(b)->desc;
    return a->kind->segmented == b->kind->segmented && one->ring == other->ring &&
           one->ring_inner == other->ring_inner && one->ring_mode == other->ring_mode &&
           (one->ring == 1 || one->layout == other->layout);
}

/* Names the partial sum of dK and dV to which a query head adds, by when it is sent back: later ones have larger
 * numbers. A rank's heads make one until it sends them. In segments each stage sees all of them before the next one
 * begins, so each is one. */
static int64_t promise_partial(const method *m, int head)
{
    const upipe_plan *p = method_plan_of(m);
    int own, rank, sent;
    upipe_plan_q_place(p, head, &own, &rank);
    for (sent = own; !upipe_plan_kv_last(p, sent, rank);) ++sent;
    return ((int64_t)sent * p->desc.ranks + rank) * p->stages + (m->kind->segmented ? own : 0);
}

/* How many partial sums of the K/V head are added before the one of a query head. The first two have one number,
 * as a + b = b + a. Those of neighbours that are equal are one: heads of a partial sum are neighbours. */
static int promise_before(const method *m, int head)
{
    const int group = method_plan_of(m)->group, first = head - head % group;
    const int64_t own = promise_partial(m, head);
    int n = 0, i;
    for (i = first; i < first + group; ++i)
        n +=
            promise_partial(m, i) < own && (i == first || promise_partial(m, i) != promise_partial(m, i - 1));
    return n > 1 ? n : 1;
}

/* Whether dK and dV of every K/V head are the same sums of the same partial sums. */
static int promise_kv_grads(const method *a, const method *b)
{
    const upipe_plan *p = method_plan_of(a);
    int head;
    for (head = 0; head < p->desc.heads; ++head) {
        const int inner = head % p->group > 0;
        const int with_a = inner && promise_partial(a, head) == promise_partial(a, head - 1);
        const int with_b = inner && promise_partial(b, head) == promise_partial(b, head - 1);
        if (with_a != with_b || promise_before(a, head) != promise_before(b, head)) return 0;
    }
    return 1;
}

static int promise_bits(const method *a, const method *b, result which)
{
    const int of_kv = which == RESULT_DX || which == RESULT_DWK || which == RESULT_DWV;
    return a->o->device == DEVICE_CPU && a->o->dtype == UPIPE_F32 && strcmp(PRODUCTS, "built-in") == 0 &&
           promise_tokens(a, b) && (!of_kv || promise_kv_grads(a, b));
}

#endif
