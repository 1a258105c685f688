/* linear.h -- a layer of linear attention over ranks: bytes of its three ways, and which one is the fastest at which length
 *
 *     status = linear_plan(&job, &files);            upipe-plan --linear 32,16,128,128 --machine h100x8 --tokens 1M
 *
 * Bytes are the library's (upipe_linear_attn.h), of the rank that holds or sends the most. Seconds are an estimate, as
 * good as the rates of the machine: transfers and kernels are added up.
 */
#ifndef PLAN_LINEAR_H
#define PLAN_LINEAR_H

#include "../common/rules.h"
#include "report.h"

/* A layer: heads over key heads, states of key_dim x value_dim; delta: gated delta rule, else scalar decay. */
typedef struct linear_layer {
    int heads, key_heads, key_dim, value_dim, delta;
} linear_layer;

/* A way with so many heads at a time: bytes and seconds of a forward and a backward. */
typedef struct linear_cost {
    upipe_way way;
    int stage_heads;
    double fwd_bytes, bwd_bytes, sent, seconds;
} linear_cost;

/* What is planned, and for which machine. */
typedef struct linear_job {
    linear_layer layer;
    const machine *m;
    upipe_ops ops;
    upipe_linear_ops rules;
    upipe_dtype dtype;
    int ranks;
} linear_job;

enum { LINEAR_HEADS_MAX = 1024 };

/* linear_read -- [delta:|decay:]HEADS,KEY_HEADS,KEY_DIM,VALUE_DIM; 0, or as a flag's reader */
static int linear_read(const char *text, linear_layer *l)
{
    const char *numbers = text;
    int end = 0;
    l->delta = strncmp(text, "decay:", 6) != 0;
    if (strncmp(text, "delta:", 6) == 0 || !l->delta) numbers += 6;
    if (sscanf(numbers, "%4d,%4d,%4d,%4d%n", &l->heads, &l->key_heads, &l->key_dim, &l->value_dim, &end) !=
            4 ||
        numbers[end] != '\0' || l->key_heads < 1 || l->heads < l->key_heads || l->heads > LINEAR_HEADS_MAX ||
        l->heads % l->key_heads != 0 || l->key_dim < 1 || l->key_dim > UPIPE_LINEAR_DIM_MAX ||
        l->value_dim < 1 || l->value_dim > UPIPE_LINEAR_DIM_MAX)
        return cli_refuse(
            "--linear wants [delta:|decay:]HEADS,KEY_HEADS,KEY_DIM,VALUE_DIM, as in 32,16,128,128, of at most "
            "%d heads, a multiple of the key heads, and dims up to %d, not '%s'",
            LINEAR_HEADS_MAX, UPIPE_LINEAR_DIM_MAX, text);
    return 0;
}

/* ---- work ---- */

/* FLOPs of the rule on so many tokens of so many heads: the products of a chunk of c tokens (cpu/upipe_cpu_linear.h). The
 * backward computes states and products again. */
static double linear_flops(const linear_layer *l, double tokens, double heads, double value_dim,
                           upipe_linear_pass pass)
{
    const double k = l->key_dim, v = value_dim, c = UPIPE_LINEAR_CHUNK;
    const double fwd = l->delta ? 6 * k * v + 4 * c * k + 3 * c * v : 4 * k * v + 2 * c * k + 2 * c * v;
    const double bwd = l->delta ? 18 * k * v + 12 * c * k + 9 * c * v : 10 * k * v + 6 * c * k + 4 * c * v;
    return tokens * heads * (pass == UPIPE_LINEAR_FWD ? fwd : bwd);
}

/* A rank's call. */
static upipe_status linear_call(const linear_job *j, const linear_cost *cost, int64_t tokens, int rank,
                                upipe_plan *plan, upipe_linear_attn *a, upipe_err *e)
{
    const linear_layer *l = &j->layer;
    upipe_plan_desc d;
    memset(&d, 0, sizeof d);
    d.tokens = tokens;
    d.ranks = j->ranks;
    d.rank = rank;
    d.heads = l->heads;
    d.head_dim = l->key_dim;
    d.dtype = j->dtype;
    d.chunk = l->heads;
    memset(a, 0, sizeof *a);
    UPIPE_TRY(upipe_plan_init(plan, &d, e));
    a->way = cost->way;
    a->plan = plan;
    a->rules = &j->rules;
    a->stage_heads = cost->stage_heads;
    a->q = a->k = upipe_view_packed(plan, j->dtype, plan->local, l->key_heads, l->key_dim); /* never read */
    a->v = a->o = upipe_view_packed(plan, j->dtype, plan->local, l->heads, l->value_dim);
    a->g = upipe_view_packed(plan, UPIPE_F32, plan->local, l->heads, 1);
    if (l->delta) a->beta = a->g;
    return UPIPE_OK;
}

/* Bytes that the rank sends that sends the most, and the largest number of heads on which a rank works. */
static int linear_sent(const linear_job *j, linear_cost *cost, int64_t tokens, double *heads)
{
    upipe_linear_attn a;
    upipe_plan plan;
    upipe_err e;
    double fwd = 0, bwd = 0;
    int rank;
    *heads = 0;
    for (rank = 0; rank < j->ranks; ++rank) {
        if (linear_call(j, cost, tokens, rank, &plan, &a, &e) != UPIPE_OK)
            return cli_refuse("--linear: %s", e.text);
        fwd = fmax(fwd, (double)upipe_linear_attn_fwd_sent(&a, 0));
        bwd = fmax(bwd, (double)upipe_linear_attn_bwd_sent(&a, 0));
        *heads = fmax(*heads, upipe_linear_attn_heads(&a));
    }
    cost->sent = fwd + bwd;
    return 0;
}

/* Bytes of the pool of the rank that holds the most. */
static int linear_held(const linear_job *j, linear_cost *cost, int64_t tokens)
{
    upipe_linear_attn a;
    upipe_plan plan;
    upipe_ctx c;
    int rank;
    memset(&c, 0, sizeof c);
    c.ops = &j->ops;
    cost->fwd_bytes = cost->bwd_bytes = 0;
    for (rank = 0; rank < j->ranks; ++rank) {
        if (linear_call(j, cost, tokens, rank, &plan, &a, &c.err) != UPIPE_OK)
            return cli_refuse("--linear: %s", c.err.text);
        cost->fwd_bytes = fmax(cost->fwd_bytes, (double)upipe_linear_attn_fwd_bytes(&c, &a, 0));
        cost->bwd_bytes = fmax(cost->bwd_bytes, (double)upipe_linear_attn_bwd_bytes(&c, &a, 0));
    }
    return 0;
}

/* ---- time ---- */

/* Seconds of bytes between neighbours, or of an all-to-all. */
static double linear_link(const linear_job *j, double bytes, int to_all)
{
    const double *rate = j->m->rate;
    const int nodes = j->ranks > j->m->ranks_node;
    const double away = nodes ? (double)(j->ranks - j->m->ranks_node) / (j->ranks - 1) : 0;
    if (to_all) return bytes * ((1 - away) / rate[MACHINE_A2A] + away / rate[MACHINE_A2A_NODES]);
    return bytes / rate[nodes ? MACHINE_RING_NODES : MACHINE_RING];
}

/* linear_cost_of -- bytes sent, and seconds; a rank's tokens are those of the rank that has most. 0, or as a flag's reader
 *   PASS   n stages take n + ranks - 1 steps, each of a stage's part of the work and its state's transfer
 *   SCAN   the rule, and on a unit matrix; then Q~ S, or Q~^T dO; maps, and what they are multiplied with
 *   HEADS  the rule on all tokens of the rank that has most heads; all-to-alls */
static int linear_cost_of(const linear_job *j, linear_cost *cost, int64_t tokens)
{
    const linear_layer *l = &j->layer;
    const double *rate = j->m->rate, k = l->key_dim, v = l->value_dim;
    const double n = cost->way == UPIPE_WAY_HEADS ? (double)tokens : ceil((double)tokens / j->ranks);
    double heads, stages, flops, steps;
    const int status = linear_sent(j, cost, tokens, &heads);
    if (status != 0) return status;
    stages = ceil(heads / cost->stage_heads);
    steps = 2 * stages;
    flops = linear_flops(l, n, heads, v, UPIPE_LINEAR_FWD) + linear_flops(l, n, heads, v, UPIPE_LINEAR_BWD);
    if (cost->way == UPIPE_WAY_SCAN && j->ranks > 1)
        flops += 2 * linear_flops(l, n, heads, k, UPIPE_LINEAR_FWD) + 4 * n * heads * k * v +
                 4 * (j->ranks - 1) * heads * (l->delta ? k * k * v : k * v);
    cost->seconds = flops / rate[MACHINE_LINEAR] + linear_link(j, cost->sent, cost->way != UPIPE_WAY_PASS);
    if (cost->way == UPIPE_WAY_PASS) {
        steps += 2 * (j->ranks - 1);
        cost->seconds *= steps / (2 * stages);
    }
    cost->seconds += steps * rate[MACHINE_STAGE];
    return 0;
}

/* A way's fastest number of heads at a time, or the one that holds least. */
static int linear_pick(const linear_job *j, linear_cost *cost, upipe_way way, int64_t tokens, int least)
{
    const int group = j->layer.heads / j->layer.key_heads;
    double best = INFINITY;
    int keys, status;
    for (keys = 1; keys <= j->layer.key_heads; ++keys) {
        linear_cost c;
        double by;
        memset(&c, 0, sizeof c);
        c.way = way;
        c.stage_heads = keys * group;
        if (j->layer.key_heads % keys != 0) continue;
        if ((status = linear_cost_of(j, &c, tokens)) != 0) return status;
        if (least && (status = linear_held(j, &c, tokens)) != 0) return status;
        by = least ? fmax(c.fwd_bytes, c.bwd_bytes) : c.seconds;
        if (by >= best) continue;
        best = by;
        *cost = c;
    }
    return 0;
}

/* The fastest way of all. */
static int linear_fastest(const linear_job *j, linear_cost *cost, int64_t tokens)
{
    int way, status;
    for (way = 0; way < UPIPE_WAYS; ++way) {
        linear_cost c;
        if ((status = linear_pick(j, &c, (upipe_way)way, tokens, 0)) != 0) return status;
        if (way == 0 || c.seconds < cost->seconds) *cost = c;
    }
    return 0;
}

/* ---- the report ---- */

/* Lengths at which another way becomes the fastest, doubled from the shortest on. */
enum { LINEAR_SHORTEST = 1024, LINEAR_LENGTHS = 20 };

typedef struct linear_report {
    linear_cost row[2 * UPIPE_WAYS];
    struct {
        int64_t tokens;
        upipe_way way;
    } from[LINEAR_LENGTHS];
    int rows, changes;
} linear_report;

static int linear_report_make(const linear_job *j, linear_report *r, int64_t tokens)
{
    int64_t length = LINEAR_SHORTEST;
    int i, status;
    for (i = 0; tokens > 0 && i < 2 * UPIPE_WAYS; ++i) {
        linear_cost *c = &r->row[r->rows];
        if ((status = linear_pick(j, c, (upipe_way)(i / 2), tokens, i % 2)) != 0 ||
            (status = linear_held(j, c, tokens)) != 0)
            return status;
        if (i % 2 == 0 || c->stage_heads != c[-1].stage_heads) ++r->rows;
    }
    while (length < j->ranks) length *= 2;
    for (i = 0; i < LINEAR_LENGTHS && length <= INT32_MAX / 2; ++i, length *= 2) {
        linear_cost c;
        if ((status = linear_fastest(j, &c, length)) != 0) return status;
        if (r->changes > 0 && r->from[r->changes - 1].way == c.way) continue;
        r->from[r->changes].tokens = length;
        r->from[r->changes++].way = c.way;
    }
    return 0;
}

static void linear_print(const linear_job *j, const linear_report *r, int64_t tokens)
{
    const linear_layer *l = &j->layer;
    char text[3][32];
    int i;
    printf("a layer of linear attention, %s: %d/%d heads, states of %d x %d, %s, on %d ranks of %s\n",
           l->delta ? "gated delta rule" : "scalar decay", l->heads, l->key_heads, l->key_dim, l->value_dim,
           upipe_dtype_name(j->dtype), j->ranks, j->m->name);
    if (r->rows > 0)
        printf("\n%s tokens, forward and backward; each way at its fastest, and where it holds least:\n"
               "  %-12s %6s  %12s  %12s  %12s  %10s\n",
               report_tokens(text[0], tokens), "way", "heads", "pool, fwd", "pool, bwd", "a rank sends",
               "seconds");
    for (i = 0; i < r->rows; ++i)
        printf("  %-12s %6d  %12s  %12s  %12s  %10.4g\n", upipe_way_name(r->row[i].way),
               r->row[i].stage_heads, report_bytes(text[0], r->row[i].fwd_bytes),
               report_bytes(text[1], r->row[i].bwd_bytes), report_bytes(text[2], r->row[i].sent),
               r->row[i].seconds);
    printf("\nthe fastest way, by lengths that double:\n");
    for (i = 0; i < r->changes; ++i)
        printf("  from %6s tokens on: %s\n", report_tokens(text[0], r->from[i].tokens),
               upipe_way_name(r->from[i].way));
    printf("\nseconds by %s of %.3g (%s)\n", machine_rate_names[MACHINE_LINEAR], j->m->rate[MACHINE_LINEAR],
           j->m->origin[MACHINE_LINEAR]);
}

static void linear_json(FILE *f, const linear_report *r)
{
    int i;
    fputs("{\n  \"ways\": [", f);
    for (i = 0; i < r->rows; ++i)
        fprintf(
            f,
            "%s\n    {\"way\": \"%s\", \"stage_heads\": %d, \"forward_bytes\": %.0f, \"backward_bytes\": %.0f, "
            "\"sent_bytes\": %.0f, \"seconds\": %.9g}",
            i > 0 ? "," : "", upipe_way_name(r->row[i].way), r->row[i].stage_heads, r->row[i].fwd_bytes,
            r->row[i].bwd_bytes, r->row[i].sent, r->row[i].seconds);
    fputs("\n  ],\n  \"fastest\": [", f);
    for (i = 0; i < r->changes; ++i)
        fprintf(f, "%s\n    {\"from_tokens\": %" PRId64 ", \"way\": \"%s\"}", i > 0 ? "," : "",
                r->from[i].tokens, upipe_way_name(r->from[i].way));
    fputs("\n  ]\n}\n", f);
}

/* ---- the command ---- */

/* linear_plan -- exit status */
static int linear_plan(const job *j, files *all)
{
    linear_job *l = (linear_job *)estimate_memory(1, sizeof *l);
    linear_report *r = (linear_report *)estimate_memory(1, sizeof *r);
    int status = linear_read(j->o.linear, &l->layer);
    FILE *f;
    l->m = &j->machine;
    l->dtype = (upipe_dtype)j->o.dtype;
    l->ranks = j->o.how.ranks;
    device_table(j->o.device, &l->ops);
    rules_of(j->o.device, &l->rules);
    if (status == 0 && j->o.tokens > 0 && j->o.tokens < l->ranks)
        status = cli_refuse("--tokens %" PRId64 ": each of %d ranks has at least one", j->o.tokens, l->ranks);
    if (status == 0) status = linear_report_make(l, r, j->o.tokens);
    if (status == 0) {
        linear_print(l, r, j->o.tokens);
        status = cli_flush("the table") == 0 ? 0 : 1 + EXIT_RUN;
    }
    if (status == 0 && j->o.json != NULL) {
        files_begin(all);
        f = files_open(all, j->o.json);
        if (f != NULL) linear_json(f, r);
        status = f == NULL || files_close(all, f) != 0 || files_commit(all) != 0 ? 1 + EXIT_RUN : 0;
    }
    free(l);
    free(r);
    return status > 0 ? status - 1 : 0;
}

#endif
