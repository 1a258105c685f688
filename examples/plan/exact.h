/* exact.h -- the bytes of this library's own trainer, to the byte: its code over pools that only count
 *
 *     exact_estimate(&e, &s, &ops, &m);
 *
 * Ranks whose pools live the same are planned once. memory.h has the dry run; `train --plan` prints the same bytes.
 */
#ifndef PLAN_EXACT_H
#define PLAN_EXACT_H

#include "../train/state/memory.h"
#include "attention.h"
#include "packed.h"

/* Bytes by the plan of the largest rank. */
static void exact_bytes(estimate *e, const memory_plan *p)
{
    int i;
    e->gpu = (double)p->need;
    e->live = (double)p->peak;
    for (i = 0; i < MODEL_PHASES; ++i)
        if (p->phase[i] > 0) estimate_phase(e, model_phase_name(i), (double)p->phase[i]);
    for (i = 0; i < MEMORY_PARTS; ++i)
        if (p->at_peak[i] > 0) estimate_add(e, memory_part_names[i], (double)p->at_peak[i]);
    estimate_add(e, "alignment", e->gpu - e->live);
}

/* The update of offloaded states (offload.h): the CPU reads and writes m, v and f32 weights, reads gradients, and where
 * these are in its memory a second time for their norm; it writes new weights of another type. What is not there comes
 * and goes beside it. */
static void exact_update(estimate_work *w, const model *m)
{
    llama_state held;
    const upipe_zero *z = &held.zero[LLAMA_WEIGHTS];
    double n, copy, back;
    llama_state_init(&held, m->layout, m->plan.desc.dtype, m->zero, model_world_rank(m), model_world(m));
    n = m->offload_optimizer ? (double)upipe_zero_held(z, UPIPE_ZERO_STATES) : 0;
    copy = z->dtype == UPIPE_F32 ? 0 : (double)upipe_dtype_bytes(z->dtype);
    back = m->offload_weights ? 0 : copy > 0 ? copy : 8;
    w->updated = n * (7 * 4 + copy + (m->zero < 2 ? 0 : 4));
    w->returned = n * (back + (m->zero < 2 ? 4 : 0));
}

static void exact_work(estimate *e, const memory_plan *p, const model *m, const setting *s)
{
    estimate_work *w = &e->work;
    const double passes = (double)p->work.attn_calls,
                 once = 3.0 * (double)(m->layout->config.layers * s->accumulate);
    w->attn_fwd = p->work.attn_fwd;
    w->attn_bwd = p->work.attn_bwd;
    w->products = p->work.products;
    w->merged = p->work.merged;
    w->team = (double)p->sent_team;
    w->ring = (double)p->sent_ring;
    /* to all ranks: weights are gathered ahead where that is asked for, sums of gradients are waited for */
    w->exposed = (double)(p->sent - p->sent_team - p->sent_ring);
    if (s->prefetch) {
        const double sums =
            (double)(m->layout->weights * s->accumulate) * (double)upipe_dtype_bytes(s->reduce);
        w->states = fmax(0, w->exposed - sums * (1 - 1.0 / setting_ranks(s)));
        w->exposed -= w->states;
    }
    *(s->how.segments > 0 && !s->how.overlap ? &w->waited : &w->moved) = (double)(p->moved - p->moved_states);
    exact_update(w, m);
    w->waited += (double)p->moved_states - w->returned; /* and what of it is gathered ahead */
    w->stages = fmax(0, passes - once);
}

static int exact_same(const model *a, const model *b)
{
    return memory_same(a, b) && (a->borders == NULL || a->plan.desc.ring_rank == b->plan.desc.ring_rank);
}

/* Plans of all ranks: of those that hold the same one is planned. In a ring of contiguous tokens it is the last of them,
 * which sees the most keys; elsewhere they do the same, but for a ring with packed documents. */
static upipe_status exact_ranks(memory_plan *plans, model *all, const setting *s, const upipe_ops *ops,
                                upipe_err *e)
{
    const int ranks = setting_ranks(s);
    int r, k, first = 0, step = 1;
    for (r = 0; r < ranks; ++r) UPIPE_TRY(setting_model(&all[r], s, r, e));
    if (all[0].plan.desc.ring > 1 && all[0].plan.desc.layout == UPIPE_CONTIGUOUS) {
        first = ranks - 1;
        step = -1;
    }
    for (r = first; r >= 0 && r < ranks; r += step) {
        for (k = first; k != r && !exact_same(&all[k], &all[r]); k += step) {
        }
        if (k != r)
            plans[r] = plans[k];
        else
            UPIPE_TRY(memory_plan_make(&plans[r], &all[r], ops, NULL, NULL, e));
    }
    return UPIPE_OK;
}

/* A P2P ring with documents waits in each step for the rank that sees the most. */
static void exact_packed(estimate *e, const model *m, const setting *s)
{
    packed_balance b;
    if (m->plan.desc.ring_mode != UPIPE_RING_P2P) return;
    b = packed_balance_of(s);
    if (b.sum > 0) {
        e->work.attn_fwd *= b.apart / b.sum;
        e->work.attn_bwd *= b.apart / b.sum;
    }
    free(b.step);
}

/* Pairs of documents over striped tokens are counted for each two ranks: the time that takes has a limit. */
static upipe_status exact_countable(const setting *s, upipe_err *e)
{
    const double ring = s->how.ring, steps = ring * ring * (double)s->borders_n;
    if (method_kinds[s->how.method].layout != UPIPE_STRIPED || steps <= PACKED_WALK_MAX) return UPIPE_OK;
    return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                      "%" PRId64
                      " documents over a ring of %d ranks with striped tokens: at most %d times the square "
                      "of the ring are counted",
                      s->borders_n, s->how.ring, PACKED_WALK_MAX);
}

static double exact_flops(const memory_plan *p)
{
    return p->work.attn_fwd + p->work.attn_bwd + p->work.products;
}

/* exact_estimate -- bytes of the largest rank and the fullest node, time of the rank that computes the most; e->why says
 *                   why the library refuses the setting */
static void exact_estimate(estimate *e, const setting *s, const upipe_ops *ops, const machine *m)
{
    const int ranks = setting_ranks(s);
    model *all = (model *)estimate_memory((size_t)ranks, sizeof *all);
    memory_plan *plans = (memory_plan *)estimate_memory((size_t)ranks, sizeof *plans);
    upipe_err err;
    upipe_status status;
    double node = 0;
    int r, largest = 0, slowest = 0;
    memset(&err, 0, sizeof err);
    memset(e, 0, sizeof *e);
    status = exact_countable(s, &err);
    if (status == UPIPE_OK) status = exact_ranks(plans, all, s, ops, &err);
    if (status == UPIPE_ERR_MEMORY) { /* of the host: a pool that only counts has all there is */
        cli_fail("out of memory: %s", err.text);
        exit(EXIT_RUN);
    }
    if (status != UPIPE_OK) snprintf(e->why, ESTIMATE_WHY, "%s%.200s", cli_status(status), err.text);
    for (r = 0; r < ranks && status == UPIPE_OK; ++r) {
        if (r % m->ranks_node == 0) node = 0;
        node += (double)plans[r].host_need + (m->gpu > 0 ? 0 : (double)plans[r].need);
        e->host = fmax(e->host, node);
        if (plans[r].need > plans[largest].need) largest = r;
        if (exact_flops(&plans[r]) > exact_flops(&plans[slowest])) slowest = r;
    }
    if (status == UPIPE_OK) {
        exact_bytes(e, &plans[largest]);
        exact_work(e, &plans[slowest], &all[slowest], s);
        attention_slow(&e->work, s, m);
        if (s->borders != NULL) exact_packed(e, &all[slowest], s);
        e->work.started = (double)(s->layout->config.layers * s->accumulate) * m->rate[MACHINE_LAYER];
        estimate_time(e, m, ranks, all[0].plan.desc.ranks);
    }
    free(plans);
    free(all);
}

#endif
