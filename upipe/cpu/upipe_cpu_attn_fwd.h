/* upipe_cpu_attn_fwd.h -- attention forward on the CPU
 *
 * Fills the table's attn_fwd (upi_cpu_attn_fwd). Links with the math library.
 *
 *     for each block: twelve panels of queries, of up to twelve heads of one group at the same positions
 *         for each block of 64 keys that one of them sees, ascending:
 *             copy K and V, once for all those heads
 *             for each panel:    S = K Q^T,  top = max,  P = 2^(S - top),  O = fold O + V^T P
 *             behind the last block of a section:    totals = fold totals + O,  O = 0
 *         o and lse leave scratch once
 *
 * The row sum of P goes as O does. Where all that a block of queries sees lies in one section, O is the total.
 * Blocks are independent: they are the items of the host's threads, those that see most keys first.
 */
#ifndef UPIPE_CPU_ATTN_FWD_H
#define UPIPE_CPU_ATTN_FWD_H

#include "upipe_cpu_attn.h"

enum {
    UPI_ATTN_PANELS_FWD = 12, /* in a block; with AVX2, Q and O then fill 288 KiB of cache at d 128 */
    UPI_ATTN_ROWS_FWD = UPI_ATTN_PANELS_FWD * UPI_ATTN_PANEL
};

UPI_KERNELS_BEGIN

typedef struct upi_attn_fwd_work {
    float *q;             /* [12 panels][d][panel]   queries */
    float *o;             /* [12 panels][v_dim][panel]  sums of weighted values */
    float *k;             /* [64][d + pad] */
    float *v;             /* [64][v_dim + pad] */
    float *p;             /* [64][panel]             products k . q, then weights, of one panel */
    float *top;           /* [12 panels][panel]      greatest score so far, in units */
    float *sum;           /* [12 panels][panel]      sum of weights so far */
    upi_attn_lanes lanes; /* [12 panels][panel] */
    float *o_total;       /* as o, of earlier sections; these three only where the call has several */
    float *sum_total;     /* as sum */
    float *top_total;     /* [12 panels][panel]      what the totals are measured from */
} upi_attn_fwd_work;

/* Lays what a block of queries sums and sees out from base, which may be NULL, *used floats on. */
UPI_INLINE void upi_attn_fwd_layout_sums(upi_attn_fwd_work *w, float *base, size_t *used, const upipe_attn *a)
{
    const int64_t v_dim = a->v.d, totals = upi_attn_is_long(0, a->k.n) ? UPI_ATTN_ROWS_FWD : 0;
    w->o = upi_attn_carve(base, used, UPI_ATTN_ROWS_FWD * v_dim);
    w->p = upi_attn_carve(base, used, UPI_ATTN_KEYS * UPI_ATTN_PANEL);
    w->top = upi_attn_carve(base, used, UPI_ATTN_ROWS_FWD);
    w->sum = upi_attn_carve(base, used, UPI_ATTN_ROWS_FWD);
    w->lanes = upi_attn_carve_lanes(base, used, UPI_ATTN_ROWS_FWD);
    w->o_total = upi_attn_carve(base, used, totals * v_dim);
    w->sum_total = upi_attn_carve(base, used, totals);
    w->top_total = upi_attn_carve(base, used, totals);
}

/* Lays the scratch of one worker out from base, which may be NULL; returns its floats. */
UPI_INLINE size_t upi_attn_fwd_layout(upi_attn_fwd_work *w, float *base, const upipe_attn *a)
{
    const int64_t d = a->q.d, v_dim = a->v.d;
    size_t used = 0;
    w->q = upi_attn_carve(base, &used, UPI_ATTN_ROWS_FWD * d);
    w->k = upi_attn_carve(base, &used, UPI_ATTN_KEYS * (d + UPI_ATTN_PAD));
    w->v = upi_attn_carve(base, &used, UPI_ATTN_KEYS * (v_dim + UPI_ATTN_PAD));
    upi_attn_fwd_layout_sums(w, base, &used, a);
    return used;
}

/* The scale is left to the exponent: products of bf16 values then sum almost without rounding. */
UPI_INLINE upi_fw upi_attn_weight(upi_fw product, upi_fw rate, upi_fw top)
{
    return upi_fw_exp2(upi_fw_mul(rate, upi_fw_sub(product, top)));
}

/* What weights are measured from. A row that has seen nothing measures from 0: -inf - -inf would be a NaN, and
 * a finite stand-in for -inf would give hidden keys the weight exp(0). */
UPI_INLINE upi_fw upi_attn_base(upi_fw top)
{
    return upi_fw_select(upi_fw_equal(top, upi_fw_set1(-INFINITY)), upi_fw_zero(), top);
}

/* Turns products p[keys[v]][panel] of vector v into weights 2^(rate * (p - top)) for the panel's top, which was
 * `old` before; fold[panel] is the weight of what was summed till then, and sum[panel] = fold * sum + the sum of
 * the weights. */
UPI_CPU_KERNEL void upi_attn_softmax(float *p, const int *keys, float times, const float *old,
                                     const float *tops, float *fold, float *sum)
{
    const upi_fw rate = upi_fw_set1(times);
    int j, v;
    for (v = 0; v < UPI_ATTN_VECTORS;
         ++v, old += UPI_WIDE, tops += UPI_WIDE, fold += UPI_WIDE, sum += UPI_WIDE) {
        const upi_fw top = upi_attn_base(upi_fw_load(tops));
        const upi_fw kept = upi_attn_weight(upi_fw_load(old), rate, top);
        upi_fw even = upi_fw_zero(), odd = upi_fw_zero();
        float *at = p + v * UPI_WIDE;
        for (j = 0; j + 2 <= keys[v]; j += 2, at += 2 * UPI_ATTN_PANEL) {
            upi_fw e = upi_attn_weight(upi_fw_load(at), rate, top);
            upi_fw f = upi_attn_weight(upi_fw_load(at + UPI_ATTN_PANEL), rate, top);
            upi_fw_store(at, e);
            upi_fw_store(at + UPI_ATTN_PANEL, f);
            even = upi_fw_add(even, e);
            odd = upi_fw_add(odd, f);
        }
        if (j < keys[v]) {
            upi_fw e = upi_attn_weight(upi_fw_load(at), rate, top);
            upi_fw_store(at, e);
            even = upi_fw_add(even, e);
        }
        upi_fw_store(fold, kept);
        upi_fw_store(sum, upi_fw_fma(kept, upi_fw_load(sum), upi_fw_add(even, odd)));
    }
}

/* Turns products p[keys[v]][panel] of vector v into scores in units of a soft-cap: tanh(squash * p). */
UPI_CPU_KERNEL void upi_attn_squash(float *p, const int *keys, float squash)
{
    const upi_fw factor = upi_fw_set1(squash);
    int j, v;
    for (v = 0; v < UPI_ATTN_VECTORS; ++v)
        for (j = 0; j < keys[v]; ++j) {
            float *at = p + j * UPI_ATTN_PANEL + v * UPI_WIDE;
            upi_fw_store(at, upi_fw_tanh(upi_fw_mul(factor, upi_fw_load(at))));
        }
}

/* Hides scores p[from .. seen[v]][panel] of vector v that its lanes don't see, and raises top[panel]. */
UPI_CPU_KERNEL void upi_attn_hide_scores(float *p, int from, const upi_attn_part *part, float *top)
{
    const upi_fw nothing = upi_fw_set1(-INFINITY);
    int j, v;
    for (v = 0; v < UPI_ATTN_VECTORS; ++v) {
        upi_fw most = upi_fw_load(top + v * UPI_WIDE);
        for (j = from; j < part->seen[v]; ++j) {
            float *at = p + j * UPI_ATTN_PANEL + v * UPI_WIDE;
            if (part->masked) upi_fw_store(at, upi_attn_hide(upi_fw_load(at), part, v, j, nothing));
            most = upi_fw_max(most, upi_fw_load(at));
        }
        upi_fw_store(top + v * UPI_WIDE, most);
    }
}

/* One panel against its part of a block of keys, whose values are finite or not; rate = unit * log2(e). */
UPI_INLINE void upi_attn_fwd_panel(const upi_attn_fwd_work *w, const upi_attn_head *a, float rate, int panel,
                                   const upi_attn_part *part, int finite)
{
    const int d = a->d, v_dim = a->v_dim, keys = part->count, *seen = part->seen;
    const float *q = w->q + panel * UPI_ATTN_PANEL * d, *k = w->k + part->from * (d + UPI_ATTN_PAD);
    float *top = w->top + panel * UPI_ATTN_PANEL, old[UPI_ATTN_PANEL], fold[UPI_ATTN_PANEL];
    /* rows whose products are the scores, to raise top right away */
    const int whole = a->squash != 0 ? 0 : upi_attn_rows_seen_by_all(part) / UPI_ATTN_TILE * UPI_ATTN_TILE;
    int j;
    memcpy(old, top, sizeof old);
    upi_attn_products(d, whole, k, q, w->p, top);
    for (j = whole; j < keys; j += UPI_ATTN_TILE)
        upi_attn_products_rest(upi_attn_first_vector(part, j), d, k + j * (d + UPI_ATTN_PAD), q,
                               w->p + j * UPI_ATTN_PANEL);
    if (a->squash != 0) upi_attn_squash(w->p, seen, a->squash);
    if (whole < keys) upi_attn_hide_scores(w->p, whole, part, top);
    upi_attn_softmax(w->p, seen, rate, old, top, fold, w->sum + panel * UPI_ATTN_PANEL);
    upi_attn_weigh(finite, v_dim, part, w->v + part->from * (v_dim + UPI_ATTN_PAD), w->p,
                   w->o + panel * UPI_ATTN_PANEL * v_dim, fold);
}

/* The section ends for so many panels: what they summed goes to the totals, whose tops become theirs. */
UPI_CPU_KERNEL void upi_attn_fwd_end_section(const upi_attn_fwd_work *w, int panels, int v_dim, float rate)
{
    int first, i;
    for (first = 0; first < panels * UPI_ATTN_PANEL; first += UPI_ATTN_PANEL) {
        float *old = w->top_total + first, fold[UPI_ATTN_PANEL];
        for (i = 0; i < UPI_ATTN_PANEL; i += UPI_WIDE) {
            const upi_fw top = upi_fw_load(w->top + first + i);
            upi_fw_store(fold + i,
                         upi_attn_weight(upi_fw_load(old + i), upi_fw_set1(rate), upi_attn_base(top)));
            upi_fw_store(old + i, top);
        }
        upi_attn_end_section(1, fold, w->sum_total + first, w->sum + first);
        upi_attn_end_section(v_dim, fold, w->o_total + first * v_dim, w->o + first * v_dim);
    }
}

/* Brings a row up to what it saw of other keys: old is its log-sum-exp there, *lse here. The row's o becomes
 * *factor times what is here, + *keep times what it was; *keep is 0 if nothing was seen there. */
UPI_INLINE void upi_attn_merge(float old, float *lse, float *factor, float *keep)
{
    const float top = old > *lse ? old : *lse, from = top == -INFINITY ? 0 : top;
    const double e_old = exp((double)old - from), e_new = exp((double)*lse - from), both = e_old + e_new;
    *keep = both == 0 ? 0 : (float)(e_old / both);
    *factor = both == 0 ? 0 : (float)(*factor * (e_new / both));
    *lse = both == 0 ? -INFINITY : (float)(from + log(both));
    if (old == -INFINITY) *keep = 0;
}

/* Adds a score whose value is 0 to a row: `sum` weights of keys, measured from `score`, whose log-sum-exp is
 * *lse and whose o is divided by what *factor is the inverse of. */
UPI_INLINE void upi_attn_add_sink(float sink, float score, float sum, float *lse, float *factor)
{
    const double base = score > sink ? (double)score : (double)sink, weight = exp((double)score - base),
                 both = weight * (double)sum + exp((double)sink - base);
    if (sink == -INFINITY) return;
    *factor = (float)(weight / both);
    *lse = (float)(base + log(both));
}

/* o and lse of a head's `rows` queries from q0, from the sums in scratch that start with `panel`. */
UPI_INLINE void upi_attn_fwd_finish(const upi_attn_head *a, const upi_attn_fwd_work *w, int panel, int64_t q0,
                                    int rows)
{
    const float *sums = w->sum + panel * UPI_ATTN_PANEL, *tops = w->top + panel * UPI_ATTN_PANEL;
    int first, i;
    for (first = 0; first < rows; first += UPI_ATTN_PANEL, ++panel) {
        int count = upi_attn_least(rows - first, UPI_ATTN_PANEL);
        float inverse[UPI_ATTN_PANEL], keep[UPI_ATTN_PANEL];
        for (i = 0; i < UPI_ATTN_PANEL; ++i) {
            float sum = sums[first + i], score = a->unit * tops[first + i], lse;
            /* not `sum > 0`: a NaN must come out as one */
            inverse[i] = sum == 0 ? 0 : 1 / sum;
            keep[i] = 0;
            if (i >= count) continue;
            lse = sum == 0 ? -INFINITY : (float)(score + log((double)sum));
            if (a->sink != NULL) upi_attn_add_sink(*a->sink, score, sum, &lse, &inverse[i]);
            if (a->merge)
                upi_attn_merge(a->lse[(q0 + first + i) * a->lse_stride], &lse, &inverse[i], &keep[i]);
            a->lse[(q0 + first + i) * a->lse_stride] = lse;
        }
        upi_attn_unpack_panel(a->o, a->o_dtype, q0 + first, a->o_stride, count, a->v_dim,
                              w->o + panel * UPI_ATTN_PANEL * a->v_dim, inverse, a->merge ? keep : NULL);
    }
}

/* ---- blocks ---- */

/* A call, cut into blocks of up to `heads` heads of a group and `rows` queries of each. */
typedef struct upi_attn_fwd_job {
    const upipe_attn *a;
    /* The block of heads[count] at queries q0 .. q0 + rows - 1. */
    void (*block)(const struct upi_attn_fwd_job *job, const upi_attn_head *heads, int count, int64_t q0,
                  int rows, float *scratch);
    const struct upi_bf16_unit *unit; /* of upipe_cpu_attn_bf16.h */
    int32_t group, heads, chunks; /* query heads of a group, in a block; blocks that a group is cut into */
    int rows;
    size_t floats; /* scratch of a worker */
} upi_attn_fwd_job;

/* So many panels have seen nothing yet. */
UPI_INLINE void upi_attn_fwd_begin(const upi_attn_fwd_work *w, int panels, int v_dim, int is_long)
{
    const size_t lanes = (size_t)(panels * UPI_ATTN_PANEL);
    size_t i;
    memset(w->o, 0, lanes * (size_t)v_dim * sizeof *w->o);
    memset(w->sum, 0, lanes * sizeof *w->sum);
    for (i = 0; i < lanes; ++i) w->top[i] = -INFINITY;
    if (!is_long) return;
    memset(w->o_total, 0, lanes * (size_t)v_dim * sizeof *w->o);
    memset(w->sum_total, 0, lanes * sizeof *w->sum);
    memcpy(w->top_total, w->top, lanes * sizeof *w->top);
}

/* d stays a run-time number: kernels compiled for one d each are at most 1 % faster. */
UPI_CPU_KERNEL void upi_attn_fwd_block(const upi_attn_fwd_job *job, const upi_attn_head *heads, int count,
                                       int64_t q0, int rows, float *scratch)
{
    const upi_attn_head *a = heads;
    const int d = a->d, v_dim = a->v_dim, panels = (rows + UPI_ATTN_PANEL - 1) / UPI_ATTN_PANEL;
    const float rate = (float)(a->unit * 1.4426950408889634);
    upi_attn_fwd_work w;
    upi_attn_part part;
    int64_t k0, begin, end;
    int h, p, is_long, finite;
    (void)job;
    upi_attn_fwd_layout(&w, scratch, a->call);
    upi_attn_see(w.lanes, a->call, q0, rows);
    begin = upi_attn_block_of(w.lanes.first[0]);
    end = w.lanes.end[rows - 1];
    is_long = upi_attn_is_long(begin, end);
    for (h = 0; h < count; ++h)
        for (p = 0; p < panels; ++p) {
            int first = p * UPI_ATTN_PANEL;
            upi_attn_pack_panel(w.q + (h * panels + p) * UPI_ATTN_PANEL * d, heads[h].q, a->dtype, q0 + first,
                                a->q_stride, upi_attn_least(rows - first, UPI_ATTN_PANEL), d);
        }
    upi_attn_fwd_begin(&w, count * panels, v_dim, is_long);
    for (k0 = begin; k0 < end; k0 += UPI_ATTN_KEYS) {
        int keys = upi_attn_least(end - k0, UPI_ATTN_KEYS);
        if (k0 > begin && k0 % UPI_ATTN_SECTION == 0)
            upi_attn_fwd_end_section(&w, count * panels, v_dim, rate);
        upi_attn_pack_keys(w.k, a->k, a->dtype, k0, a->k_stride, keys, d);
        upi_attn_pack_keys(w.v, a->v, a->dtype, k0, a->v_stride, keys, v_dim);
        finite = upi_attn_keys_finite(w.v, keys, v_dim);
        for (p = 0; p < panels; ++p) {
            upi_attn_part_make(&part, w.lanes, p * UPI_ATTN_PANEL, k0, keys);
            for (h = 0; h < count && part.count > 0; ++h)
                upi_attn_fwd_panel(&w, a, rate, h * panels + p, &part, finite);
        }
    }
    if (is_long) {
        upi_attn_fwd_end_section(&w, count * panels, v_dim, rate);
        w.o = w.o_total;
        w.sum = w.sum_total;
    }
    for (h = 0; h < count; ++h) upi_attn_fwd_finish(&heads[h], &w, h * panels, q0, rows);
}

UPI_KERNELS_END

/* Item i of a call: the last queries first, for they see most. */
UPIPE_API void upi_attn_fwd_item(void *arg, int64_t i, int32_t worker)
{
    const upi_attn_fwd_job *job = (const upi_attn_fwd_job *)arg;
    const upipe_attn *a = job->a;
    const int32_t wide = a->k.h * job->chunks, chunk = (int32_t)(i % wide);
    const int64_t blocks = (a->q.n + job->rows - 1) / job->rows, q0 = (blocks - 1 - i / wide) * job->rows;
    const int32_t first = chunk % job->chunks * job->heads;
    int32_t j = chunk / job->chunks * job->group + first, count = job->group - first, h;
    upi_attn_head heads[UPI_ATTN_PANELS_FWD];
    if (count > job->heads) count = job->heads;
    for (h = 0; h < count; ++h) {
        heads[h] = upi_attn_head_make(a, j + h);
        heads[h].o = upi_attn_view_head(a->o, j + h);
        heads[h].o_stride = a->o.n_stride;
        heads[h].o_dtype = a->o.dtype;
    }
    job->block(job, heads, count, q0, upi_attn_least(a->q.n - q0, job->rows),
               (float *)a->work + (size_t)worker * job->floats);
}

/* Runs a job of which block, unit and floats are set. */
UPIPE_API void upi_attn_fwd_run(upipe_ctx *c, const upipe_attn *a, upi_attn_fwd_job *job)
{
    const int workers = upi_par_workers(c->ops);
    int panels;
    if (a->q.n == 0) return;
    job->a = a;
    job->group = a->q.h / a->k.h;
    job->chunks = (job->group + UPI_ATTN_PANELS_FWD - 1) / UPI_ATTN_PANELS_FWD;
    job->heads = (job->group + job->chunks - 1) / job->chunks;
    panels = UPI_ATTN_PANELS_FWD / job->heads;
    /* enough blocks that no worker waits long for the last one */
    while (workers > 1 && panels > 1 &&
           a->q.n * a->q.h < (int64_t)4 * panels * job->heads * UPI_ATTN_PANEL * workers)
        panels /= 2;
    job->rows = panels * UPI_ATTN_PANEL;
    upi_par_each(c->ops, (a->q.n + job->rows - 1) / job->rows * a->k.h * job->chunks, upi_attn_fwd_item, job);
}

UPIPE_API upipe_status upi_cpu_attn_fwd(upipe_ctx *c, const upipe_attn *a)
{
    upi_attn_fwd_work work;
    upi_attn_fwd_job job;
    job.block = upi_attn_fwd_block;
    job.unit = NULL;
    job.floats = upi_attn_fwd_layout(&work, NULL, a);
    upi_attn_fwd_run(c, a, &job);
    return UPIPE_OK;
}

#endif
