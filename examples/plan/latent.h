/* latent.h -- one layer's attention of models with latent attention (MLA): what a rank holds and sends
 *
 *     const latent_model *m = latent_find("deepseek-v3");     NULL: none of them
 *     status = latent_options(m, &o);                         refuses flags of a whole model
 *     latent_row row = {METHOD_UPIPE, UPIPE_LATENT_GATHERED};
 *     latent_count(&row, m, &o, &ops, dry, &err);             by dry runs of all ranks, to the byte
 *
 * A whole model with latent attention is not planned: the trainer does not build one. latent_report.h prints the rows.
 */
#ifndef PLAN_LATENT_H
#define PLAN_LATENT_H

#include <math.h>

#include "../common/options.h"
#include "../train/model/plans.h"

/* Numbers of the models' config.json: num_hidden_layers, hidden_size, num_attention_heads, qk_nope_head_dim,
 * qk_rope_head_dim, v_head_dim, kv_lora_rank, and q_lora_rank, 0 where Q is projected from the hidden state */
typedef struct latent_model {
    const char *name;
    int layers, dim, heads, nope, rope, v_dim, latent, q_latent;
} latent_model;

static const latent_model latent_models[] = {{"deepseek-v3", 61, 7168, 128, 128, 64, 128, 512, 1536},
                                             {"kimi-k2", 61, 7168, 64, 128, 64, 128, 512, 1536},
                                             {"minicpm3-4b", 62, 2560, 40, 64, 32, 64, 256, 768},
                                             {"moonlight", 27, 2048, 16, 128, 64, 128, 512, 0}};

enum { LATENT_MODELS = sizeof latent_models / sizeof *latent_models };

/* Whose tensors Q and O are: the program's (upipe_latent.h), or Q is projected by stages and O stays in slots
 * (upipe_latent_layer.h). */
enum { LATENT_Q_GIVEN, LATENT_Q_STAGES, LATENT_DOORS };

/* latent_row -- of a method and a form; every number is that of the rank which has the most
 *   sent      bytes to other ranks in a forward and in a backward; sent_kv: of either, those of K' and V' or the latent
 *   numbers   the same by count, for each token of the rank
 *   latent    bytes of the gathered latent of all tokens, held through a pass; 0 with heads
 *   kv        bytes of K' and V' of a stage's heads
 *   phase     of each door: live bytes at most, beyond the program's tensors; peak: of a forward and of a backward */
typedef struct latent_row {
    int method;
    upipe_latent_form form;
    int chunk, stages;
    int by_auto; /* UPIPE_LATENT_AUTO gathers */
    double unit; /* bytes of a rank's share of x */
    double sent[2], sent_kv, numbers, latent, kv;
    double phase[LATENT_DOORS][UPIPE_PHASES], peak[LATENT_DOORS][2];
} latent_row;

/* NULL: none of them. */
static inline const latent_model *latent_find(const char *name)
{
    int i;
    for (i = 0; i < LATENT_MODELS; ++i)
        if (strcmp(latent_models[i].name, name) == 0) return &latent_models[i];
    return NULL;
}

static inline void latent_names(char *out, size_t n)
{
    size_t i, used = 0;
    for (i = 0; i < LATENT_MODELS && used < n; ++i)
        used += (size_t)snprintf(out + used, n - used, "%s%s", i > 0 ? ", " : "", latent_models[i].name);
}

static inline upipe_plan_desc latent_desc(const latent_row *row, const latent_model *m, const options *o)
{
    method_choice how = o->how;
    upipe_plan_desc d;
    how.method = row->method;
    how.ring = 1;
    how.overlap = o->how.overlap && row->method == METHOD_UPIPE;
    d = method_desc(&how, m->heads, m->heads);
    d.tokens = o->tokens;
    d.batch = o->batch;
    d.dtype = (upipe_dtype)o->dtype;
    d.head_dim = m->nope + m->rope;
    d.v_dim = m->v_dim;
    d.model_dim = m->dim;
    return d;
}

/* The block without its output projection, whose backward leaves the gradient of O in O's place. */
static inline upipe_status latent_layer(upipe_dry *dry, const latent_model *m, const upipe_plan *p,
                                        const upipe_latent_kv *kv, int64_t sent[2])
{
    void *const none = dry; /* of the program, and never touched */
    const upipe_dtype t = p->desc.dtype;
    const upipe_view x = upipe_view_packed(none, t, p->rows, 1, m->q_latent > 0 ? m->q_latent : m->dim),
                     dy = upipe_view_packed(none, t, p->rows, 1, m->dim);
    upipe_latent_kv own = *kv;
    const upipe_layer l = {.plan = p,
                           .mask.causal = 1,
                           .wq = none,
                           .wk = none,
                           .wo = none,
                           .rope_theta = 10000,
                           .tile_rows = m->dim};
    const upipe_grads g = {.wq = (float *)none, .wk = (float *)none, .wo = (float *)none};
    upipe_saved save;
    own.c = upipe_view_packed(none, t, p->rows, 1, m->latent);
    own.kr = upipe_view_packed(none, t, p->rows, 1, m->rope);
    UPIPE_TRY(upipe_latent_layer_fwd(&dry->ctx, &l, &save, x, &own));
    sent[0] = dry->team.sent_bytes;
    UPIPE_TRY(upipe_layer_out_bwd(&dry->ctx, &l, &g, &save, dy));
    UPIPE_TRY(upipe_latent_layer_bwd(&dry->ctx, &l, x, &own, &g, &save, &save.out, x, &own));
    sent[1] = dry->team.sent_bytes - sent[0];
    return upipe_saved_free(&dry->ctx, &save);
}

/* One rank, by both doors. */
static inline upipe_status latent_rank(latent_row *row, const latent_model *m, const upipe_plan *p,
                                       upipe_dry *dry, const upipe_ops *ops)
{
    const double e = (double)upipe_dtype_bytes(p->desc.dtype);
    double kv;
    upipe_latent a = {.plan = p, .mask.causal = 1, .kv = {.c.d = m->latent, .kr.d = m->rope}};
    const upipe_latent_kv nothing = {.form = UPIPE_LATENT_GATHERED}; /* sends neither K and V nor a latent */
    int64_t sent[2] = {0, 0};
    int door, i;
    row->by_auto = upipe_latent_gathers(p, &a.kv);
    a.kv.form = row->form;
    kv = (double)(upipe_latent_sent(p, &a.kv, 0) - upipe_latent_sent(p, &nothing, 0));
    row->chunk = p->desc.chunk;
    row->stages = p->stages;
    row->unit = fmax(row->unit, (double)upipe_plan_unit_bytes(p));
    row->sent_kv = fmax(row->sent_kv, kv);
    row->numbers = fmax(row->numbers, kv / (double)p->rows / e);
    row->kv = fmax(row->kv, (double)(p->buffers.k + p->buffers.v));
    if (row->form == UPIPE_LATENT_GATHERED)
        row->latent = (double)(p->team_tokens * p->desc.batch * (m->latent + m->rope)) * e;
    for (door = 0; door < LATENT_DOORS; ++door) {
        UPIPE_TRY(upipe_dry_init(dry, p, ops));
        if (door == LATENT_Q_GIVEN)
            UPIPE_TRY(upipe_dry_latent(dry, &a));
        else
            UPIPE_TRY(latent_layer(dry, m, p, &a.kv, sent));
        for (i = 0; i < (int)UPIPE_PHASES; ++i) {
            double *const peak = &row->peak[door][i >= (int)UPIPE_BWD_BEFORE];
            row->phase[door][i] = fmax(row->phase[door][i], (double)dry->mem.phase_peak[i]);
            *peak = fmax(*peak, row->phase[door][i]);
        }
    }
    for (i = 0; i < 2; ++i) row->sent[i] = fmax(row->sent[i], (double)sent[i]);
    return UPIPE_OK;
}

/* latent_count -- a row from its method and form
 *   dry     scratch
 *   errors  those of a plan of these numbers */
static inline upipe_status latent_count(latent_row *row, const latent_model *m, const options *o,
                                        const upipe_ops *ops, upipe_dry *dry, upipe_err *e)
{
    upipe_plan_desc d = latent_desc(row, m, o);
    method_choice how = o->how;
    upipe_plan p;
    upipe_status s = UPIPE_OK;
    int r;
    how.overlap = d.overlap;
    for (r = 0; r < o->how.ranks && s == UPIPE_OK; ++r) {
        method_place(&d, r);
        UPIPE_TRY(upipe_plan_init(&p, &d, e));
        UPIPE_TRY(method_overlapped(&how, &p, e));
        s = latent_rank(row, m, &p, dry, ops);
        if (s != UPIPE_OK) *e = dry->ctx.err;
    }
    return s;
}

#endif
