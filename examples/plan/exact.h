/* exact.h -- the bytes of this library's own trainer, to the byte: its code over pools that only count
 *
 *     exact_estimate(&e, &s, &ops, &m, &layout);
 *
 * Ranks whose pools live the same are planned once. memory.h has the dry run; `train --plan` prints the same bytes.
 */
#ifndef PLAN_EXACT_H
#define PLAN_EXACT_H

#include "../llama/memory.h"
#include "estimate.h"

/* More steps of a dry run than these are not walked: some seconds. */
enum { EXACT_WALK_MAX = 50000000 };

static double exact_walk(const model *m)
{
    const llama_config *c = &m->layout->config;
    const upipe_plan *p = &m->plan;
    const double segments = (double)m->fpdt.segments;
    const double tiles = (double)m->rows / (double)(m->rows < c->dim ? m->rows : c->dim) + model_parts(m);
    const double heads = (double)c->heads / p->per_rank + 2.0 * c->kv_heads / p->kv_per_rank;
    return (double)c->layers * 2 *
               (tiles * (heads + 8) + segments * segments * (double)p->desc.batch * p->per_rank * p->stages) +
           (double)m->rows / UPIPE_TILE_LOSS_ROWS * 8;
}

/* The plan of one rank. */
static upipe_status exact_model(model *m, const setting *s, const llama_layout *layout, int rank,
                                upipe_err *e)
{
    upipe_plan_desc d = method_desc(&s->how, layout->config.heads, layout->config.kv_heads);
    method_place(&d, rank);
    d.tokens = s->tokens;
    d.batch = s->batch;
    d.dtype = s->dtype;
    UPIPE_TRY(model_init(m, layout, &d, e));
    UPIPE_TRY(method_overlapped(&s->how, &m->plan, e));
    UPIPE_TRY(model_cut(m, s->how.segments, e));
    m->tile_bytes = s->tile_bytes;
    m->activations = s->activations;
    m->zero = s->zero;
    if (exact_walk(m) > EXACT_WALK_MAX)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "the dry run would take %.2g steps", exact_walk(m));
    return UPIPE_OK;
}

/* Elements of a rank's slice of n. */
static int64_t exact_slice(const model *m, int64_t n)
{
    int64_t at;
    return upipe_reduce_slice(n, model_world_rank(m), model_world(m), &at);
}

/* Whether two ranks hold the same: tokens, slices of the states, and in every stage as many heads. */
static int exact_same(const model *a, const model *b)
{
    int i, same = a->plan.seq == b->plan.seq && a->rows == b->rows && a->plan.stages == b->plan.stages;
    for (i = 0; i < model_parts(a) && same; ++i) same = model_shard(a, i).n == model_shard(b, i).n;
    for (i = 0; i < a->plan.stages && same; ++i)
        same = upipe_plan_q(&a->plan, i, a->plan.desc.rank).count ==
                   upipe_plan_q(&b->plan, i, b->plan.desc.rank).count &&
               upipe_plan_part(&a->plan, UPIPE_A2A_KV, i, a->plan.desc.rank).count ==
                   upipe_plan_part(&b->plan, UPIPE_A2A_KV, i, b->plan.desc.rank).count;
    for (i = 0; i < a->layout->units && same; ++i)
        same = exact_slice(a, a->layout->first[i + 1] - a->layout->first[i]) ==
               exact_slice(b, a->layout->first[i + 1] - a->layout->first[i]);
    return same && exact_slice(a, a->layout->norm_weights) == exact_slice(b, a->layout->norm_weights);
}

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

static void exact_work(estimate *e, const memory_plan *p, const model *m, const setting *s)
{
    estimate_work *w = &e->work;
    const double passes = (double)p->work.attn_calls;
    w->attn_fwd = p->work.attn_fwd;
    w->attn_bwd = p->work.attn_bwd;
    w->products = p->work.products;
    w->merged = p->work.merged;
    w->team = (double)p->sent_team;
    w->ring = (double)p->sent_ring;
    w->states = (double)(p->sent - p->sent_team - p->sent_ring); /* of all ranks */
    w->wait_rate = MACHINE_HOST;
    *(s->how.segments > 0 && !s->how.overlap ? &w->waited : &w->moved) = (double)p->moved;
    w->stages =
        passes > 3 * (double)m->layout->config.layers ? passes - 3 * (double)m->layout->config.layers : 0;
}

/* exact_estimate -- e->why says why the library refuses the setting */
static void exact_estimate(estimate *e, const setting *s, const upipe_ops *ops, const machine *m,
                           const llama_layout *layout)
{
    const int ranks = s->how.ranks;
    model *all = (model *)calloc((size_t)ranks, sizeof *all);
    memory_plan *plans = (memory_plan *)calloc((size_t)ranks, sizeof *plans);
    upipe_status status = all == NULL || plans == NULL ? UPIPE_ERR_MEMORY : UPIPE_OK;
    upipe_err err;
    double node = 0;
    int r, k;
    memset(&err, 0, sizeof err);
    memset(e, 0, sizeof *e);
    for (r = 0; r < ranks && status == UPIPE_OK; ++r) {
        status = exact_model(&all[r], s, layout, r, &err);
        for (k = 0; k < r && status == UPIPE_OK && !exact_same(&all[k], &all[r]); ++k) {
        }
        if (status != UPIPE_OK) break;
        if (k < r)
            plans[r] = plans[k];
        else
            status = memory_plan_make(&plans[r], &all[r], ops, NULL, NULL, &err);
    }
    if (status != UPIPE_OK) snprintf(e->why, ESTIMATE_WHY, "%s%.200s", cli_status(status), err.text);
    for (r = 0; r < ranks && status == UPIPE_OK; ++r) {
        if (r % m->ranks_node == 0) node = 0;
        node += (double)plans[r].host_need + (m->gpu > 0 ? 0 : (double)plans[r].need);
        e->host = fmax(e->host, node);
        if (plans[r].need > plans[e->rank].need) e->rank = r;
    }
    if (status == UPIPE_OK) {
        exact_bytes(e, &plans[e->rank]);
        exact_work(e, &plans[e->rank], &all[e->rank], s);
        estimate_time(e, m, ranks, all[0].plan.desc.ranks, layout->config.layers);
    }
    free(plans);
    free(all);
}

#endif
