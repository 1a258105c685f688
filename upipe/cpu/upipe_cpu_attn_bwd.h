/* upipe_cpu_attn_bwd.h -- attention backward on the CPU        backend cpu, includes cpu_attn_fwd
 *
 * Fills the table's attn_bwd and attn_bytes (upi_cpu_attn_bwd, _bytes). Links with the math library.
 *
 *     for each head of a group, for each block of queries, the last one first:
 *         for each block of 64 keys, ascending:
 *             for each panel:    P = exp(K Q^T - lse),  S = P (V dO^T - delta),  dQ += K^T S
 *             dV += P dO,  dK += S Q        over all panels of the block, the last one first
 *         dQ leaves scratch once
 *
 * P is recomputed from lse: five products in one pass. An element of dQ is one chain over the keys. One of dK or
 * dV is one chain over heads and, within a head, over panels from the last to the first: memory holds it
 * between blocks of queries, so neither the blocks' size nor how a group's heads come in calls shows in its
 * bits.
 *
 * The items that the host's threads take are the blocks of queries. Several work at one group at the same
 * time, one behind the other: a gate for each block of keys lets them add to it in the order above.
 */
#ifndef UPIPE_CPU_ATTN_BWD_H
#define UPIPE_CPU_ATTN_BWD_H

#include "upipe_cpu_attn_fwd.h"

enum {
    UPI_ATTN_PANELS_BWD = 6,                 /* in a block */
    UPI_ATTN_TALL = UPI_CPU_AVX512 ? 12 : 6, /* rows of a register tile of two vectors */
    UPI_ATTN_ROWS_BWD = UPI_ATTN_PANELS_BWD * UPI_ATTN_PANEL
};

UPI_KERNELS_BEGIN

typedef struct upi_attn_bwd_work {
    float *q, *go, *gq;      /* [6 panels][d][panel]         queries, gradients of o and of q */
    float *q_rows, *go_rows; /* [d/wide, up][rows][wide]     queries times scale, gradients of o */
    float *p, *s;            /* [6 panels][64][panel]        weights, and gradients of the scores */
    float *k, *v;            /* [64][d + pad] */
    float *lse, *delta;      /* [6 panels][panel] */
} upi_attn_bwd_work;

UPI_INLINE size_t upi_attn_bwd_layout(upi_attn_bwd_work *w, float *base, int64_t d)
{
    int64_t columns = (d + UPI_WIDE - 1) / UPI_WIDE * UPI_WIDE;
    size_t used = 0;
    w->q = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * d);
    w->go = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * d);
    w->gq = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * d);
    w->q_rows = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * columns);
    w->go_rows = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * columns);
    w->p = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * UPI_ATTN_KEYS);
    w->s = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD * UPI_ATTN_KEYS);
    w->k = upi_attn_carve(base, &used, UPI_ATTN_KEYS * (d + UPI_ATTN_PAD));
    w->v = upi_attn_carve(base, &used, UPI_ATTN_KEYS * (d + UPI_ATTN_PAD));
    w->lse = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD);
    w->delta = upi_attn_carve(base, &used, UPI_ATTN_ROWS_BWD);
    return used;
}

/* out[k / wide][i][k % wide] = factor * rows[i][k]; zeros up to the next whole panel of rows, and to the next whole
 * vector of columns. */
UPI_INLINE void upi_attn_pack_columns_of(float *out, const void *rows, int64_t first, int64_t step, int count,
                                         int d, float factor, upipe_dtype dtype)
{
    const upi_f8 times = upi_f8_set1(factor);
    int i, k;
    for (k = 0; k < d || k % UPI_WIDE != 0; k += UPI_LANES) {
        float *column = out + k / UPI_WIDE * UPI_WIDE * UPI_ATTN_ROWS_BWD + k % UPI_WIDE;
        for (i = 0; i < count && k < d; ++i)
            upi_f8_store(column + i * UPI_WIDE,
                         upi_f8_mul(times, upi_f8_get(rows, dtype, (first + i) * step + k)));
        for (; i < count || i % UPI_ATTN_PANEL != 0; ++i) upi_f8_store(column + i * UPI_WIDE, upi_f8_zero());
    }
}

UPI_CPU_KERNEL void upi_attn_pack_columns(float *out, const void *rows, upipe_dtype dtype, int64_t first,
                                          int64_t step, int count, int d, float factor)
{
    UPI_BY_TYPE(upi_attn_pack_columns_of, dtype, out, rows, first, step, count, d, factor);
}

/* A tile's keys against a panel, from vector `from` on: p = weights exp(scale * k . q - lse), s = p * (v . go -
 * delta), [tile][panel]. */
UPI_INLINE void upi_attn_weights_grad(int from, int d, const float *k, const float *q, const float *v_rows,
                                      const float *go, upi_fw scale, const upi_fw *lse, const upi_fw *delta,
                                      float *__restrict p, float *__restrict s)
{
    upi_fw sums[UPI_ATTN_TILE][UPI_ATTN_VECTORS];
    int i, v;
    upi_attn_dot(from, d, k, q, sums);
    UPI_CPU_UNROLL
    for (i = 0; i < UPI_ATTN_TILE; ++i) UPI_CPU_UNROLL
    for (v = from; v < UPI_ATTN_VECTORS; ++v) {
        upi_fw score = upi_fw_mul(scale, sums[i][v]);
        /* no FMA here: the lse of a row with one weight of 1 is its score as rounded, and must give 1
             * again */
        UPI_OPAQUE(score);
        upi_fw_store(p + i * UPI_ATTN_PANEL + v * UPI_WIDE, upi_fw_exp(upi_fw_sub(score, lse[v])));
    }
    upi_attn_dot(from, d, v_rows, go, sums);
    UPI_CPU_UNROLL
    for (i = 0; i < UPI_ATTN_TILE; ++i) UPI_CPU_UNROLL
    for (v = from; v < UPI_ATTN_VECTORS; ++v) {
        const int at = i * UPI_ATTN_PANEL + v * UPI_WIDE;
        upi_fw_store(s + at, upi_fw_mul(upi_fw_load(p + at), upi_fw_sub(sums[i][v], delta[v])));
    }
}

/* The same where the first vectors see none of the keys; kept apart from the loop over whole tiles. */
UPI_CPU_KERNEL void upi_attn_weights_grad_rest(int from, int d, const float *k, const float *q,
                                               const float *v_rows, const float *go, upi_fw scale,
                                               const upi_fw *lse, const upi_fw *delta, float *p, float *s)
{
    if (from == 1)
        upi_attn_weights_grad(1, d, k, q, v_rows, go, scale, lse, delta, p, s);
    else
        upi_attn_weights_grad(2, d, k, q, v_rows, go, scale, lse, delta, p, s);
}

/* grad[tile rows][vectors] += sum over panels, the last one first, and over their lanes, in order, of
 * weights[panel][row][lane] * columns[vector][panel][lane]. The sum goes on from what memory holds: one chain over
 * heads and query blocks. `rest` columns of the last vector are the row's; the first `skip` lanes of the first panel
 * see none of the rows. */
UPI_INLINE void upi_attn_add_grad(int tile, int vectors, int rest, int panels, int skip, const float *weights,
                                  const float *columns, float *grad, int64_t grad_step)
{
    upi_fw sums[UPI_ATTN_TALL][UPI_ATTN_VECTORS];
    int panel, i, v;
    UPI_CPU_UNROLL
    for (i = 0; i < tile; ++i) UPI_CPU_UNROLL
    for (v = 0; v < vectors; ++v) {
        const float *at = grad + i * grad_step + v * UPI_WIDE;
        sums[i][v] = v + 1 < vectors ? upi_fw_load(at) : upi_fw_load_rest(at, rest);
    }
    for (panel = panels - 1; panel > 0; --panel)
        upi_attn_tile(tile, 0, vectors, UPI_ATTN_PANEL, weights + panel * UPI_ATTN_KEYS * UPI_ATTN_PANEL,
                      UPI_ATTN_PANEL, 1, columns + panel * UPI_ATTN_PANEL * UPI_WIDE,
                      UPI_WIDE * UPI_ATTN_ROWS_BWD, UPI_WIDE, sums);
    upi_attn_tile(tile, 0, vectors, UPI_ATTN_PANEL - skip, weights + skip, UPI_ATTN_PANEL, 1,
                  columns + skip * UPI_WIDE, UPI_WIDE * UPI_ATTN_ROWS_BWD, UPI_WIDE, sums);
    UPI_CPU_UNROLL
    for (i = 0; i < tile; ++i) UPI_CPU_UNROLL
    for (v = 0; v < vectors; ++v) {
        float *at = grad + i * grad_step + v * UPI_WIDE;
        if (v + 1 < vectors)
            upi_fw_store(at, sums[i][v]);
        else
            upi_fw_store_rest(at, rest, sums[i][v]);
    }
}

/* What a block of keys sees of the block of queries: panel p sees its keys up to keys[p] - 1, lane l of it up to
 * last[p] + l; later panels see more. */
typedef struct upi_attn_sight {
    int panels, keys[UPI_ATTN_PANELS_BWD], last[UPI_ATTN_PANELS_BWD];
} upi_attn_sight;

/* Rows j .. j + tile - 1 of a block's gradient. Panels and lanes before the first that sees one of the rows are
 * left out; what others don't see weighs 0. */
UPI_INLINE void upi_attn_add_grad_rows(int tile, int vectors, int rest, int j, const upi_attn_sight *sight,
                                       const float *weights, const float *columns, float *grad,
                                       int64_t grad_step)
{
    int first = 0;
    while (first < sight->panels && sight->keys[first] <= j) ++first;
    if (first < sight->panels)
        upi_attn_add_grad(tile, vectors, rest, sight->panels - first,
                          sight->last[first] < j ? j - sight->last[first] : 0,
                          weights + (first * UPI_ATTN_KEYS + j) * UPI_ATTN_PANEL,
                          columns + first * UPI_ATTN_PANEL * UPI_WIDE, grad + j * grad_step, grad_step);
}

/* Some vectors of a block's gradient, all `count` rows: the columns stay in the first-level cache. */
UPI_INLINE void upi_attn_add_grad_columns(int tile, int vectors, int rest, int count,
                                          const upi_attn_sight *sight, const float *weights,
                                          const float *columns, float *grad, int64_t grad_step)
{
    int j = 0;
    for (; j + tile <= count; j += tile)
        upi_attn_add_grad_rows(tile, vectors, rest, j, sight, weights, columns, grad, grad_step);
    for (; j + 4 <= count; j += 4)
        upi_attn_add_grad_rows(4, vectors, rest, j, sight, weights, columns, grad, grad_step);
    for (; j < count; ++j)
        upi_attn_add_grad_rows(1, vectors, rest, j, sight, weights, columns, grad, grad_step);
}

/* The whole block: three vectors at a time, two where one would be left. */
UPI_CPU_KERNEL void upi_attn_add_grad_block(int d, int count, const upi_attn_sight *sight,
                                            const float *weights, const float *columns, float *grad,
                                            int64_t grad_step)
{
    int left = (d + UPI_WIDE - 1) / UPI_WIDE;
    const int last = d - (left - 1) * UPI_WIDE;
    while (left > 0) {
        int vectors = left == 2 || left == 4 ? 2 : 3, rest = left > vectors ? (int)UPI_WIDE : last;
        if (vectors == 2)
            upi_attn_add_grad_columns(UPI_ATTN_TALL, 2, rest, count, sight, weights, columns, grad,
                                      grad_step);
        else
            upi_attn_add_grad_columns(UPI_ATTN_TILE, 3, rest, count, sight, weights, columns, grad,
                                      grad_step);
        left -= vectors;
        grad += vectors * UPI_WIDE;
        columns += vectors * UPI_WIDE * UPI_ATTN_ROWS_BWD;
    }
}

/* One panel against one block of keys: its p and s, and its part of gq. */
UPI_INLINE void upi_attn_bwd_panel(const upi_attn_bwd_work *w, int d, upi_fw scale, int panel, int keys,
                                   int last)
{
    const float *q = w->q + panel * UPI_ATTN_PANEL * d, *go = w->go + panel * UPI_ATTN_PANEL * d;
    float *p = w->p + panel * UPI_ATTN_KEYS * UPI_ATTN_PANEL,
          *s = w->s + panel * UPI_ATTN_KEYS * UPI_ATTN_PANEL;
    upi_fw lse[UPI_ATTN_VECTORS], delta[UPI_ATTN_VECTORS];
    int seen[UPI_ATTN_VECTORS], j, v, end;
    UPI_CPU_UNROLL
    for (v = 0; v < UPI_ATTN_VECTORS; ++v) {
        lse[v] = upi_fw_load(w->lse + panel * UPI_ATTN_PANEL + v * UPI_WIDE);
        delta[v] = upi_fw_load(w->delta + panel * UPI_ATTN_PANEL + v * UPI_WIDE);
    }
    upi_attn_vector_keys(keys, last, seen);
    for (j = 0; j < (last < keys ? last : keys) + UPI_WIDE && j < keys; j += UPI_ATTN_TILE)
        upi_attn_weights_grad(0, d, w->k + j * (d + UPI_ATTN_PAD), q, w->v + j * (d + UPI_ATTN_PAD), go,
                              scale, lse, delta, p + j * UPI_ATTN_PANEL, s + j * UPI_ATTN_PANEL);
    for (; j < keys; j += UPI_ATTN_TILE)
        upi_attn_weights_grad_rest(upi_attn_first_vector(j, last), d, w->k + j * (d + UPI_ATTN_PAD), q,
                                   w->v + j * (d + UPI_ATTN_PAD), go, scale, lse, delta,
                                   p + j * UPI_ATTN_PANEL, s + j * UPI_ATTN_PANEL);
    for (j = last < 0 ? 0 : last; j < keys; ++j) UPI_CPU_UNROLL
    for (v = 0; v < UPI_ATTN_VECTORS; ++v) {
        upi_attn_hide(p + j * UPI_ATTN_PANEL + v * UPI_WIDE, v, j, last, upi_fw_zero());
        upi_attn_hide(s + j * UPI_ATTN_PANEL + v * UPI_WIDE, v, j, last, upi_fw_zero());
    }
    /* rows that this panel doesn't see, but that a tile of gk or gv takes along */
    end = keys + UPI_ATTN_TALL < UPI_ATTN_KEYS ? keys + UPI_ATTN_TALL : (int)UPI_ATTN_KEYS;
    memset(p + keys * UPI_ATTN_PANEL, 0, (size_t)((end - keys) * UPI_ATTN_PANEL) * sizeof *p);
    memset(s + keys * UPI_ATTN_PANEL, 0, (size_t)((end - keys) * UPI_ATTN_PANEL) * sizeof *s);
    upi_attn_weigh(d, seen, w->k, s, w->gq + panel * UPI_ATTN_PANEL * d, NULL);
}

/* Copies `rows` queries from q0 and what belongs to them to scratch. */
UPI_INLINE void upi_attn_bwd_pack(const upi_attn_head *a, const upi_attn_bwd_work *w, int d, int64_t q0,
                                  int rows)
{
    int panels = (rows + UPI_ATTN_PANEL - 1) / UPI_ATTN_PANEL, first, i;
    for (first = 0; first < rows; first += UPI_ATTN_PANEL) {
        int count = upi_attn_least(rows - first, UPI_ATTN_PANEL);
        upi_attn_pack_panel(w->q + first * d, a->q, a->dtype, q0 + first, a->q_step, count, d);
        upi_attn_pack_panel(w->go + first * d, a->go, a->dtype, q0 + first, a->go_step, count, d);
    }
    upi_attn_pack_columns(w->q_rows, a->q, a->dtype, q0, a->q_step, rows, d, a->scale);
    upi_attn_pack_columns(w->go_rows, a->go, a->dtype, q0, a->go_step, rows, d, 1);
    memset(w->gq, 0, (size_t)(panels * UPI_ATTN_PANEL * d) * sizeof *w->gq);
    for (i = 0; i < panels * UPI_ATTN_PANEL; ++i) {
        float lse = i < rows ? a->lse[(q0 + i) * a->lse_step] : -INFINITY;
        /* A row that saw no key, and a lane that is no row, weighs every key 0. */
        w->lse[i] = lse == -INFINITY ? INFINITY : lse;
        w->delta[i] = i < rows ? a->delta[(q0 + i) * a->delta_step] : 0;
    }
}

/* ---- blocks, and their turns ---- */

/* A call, cut into blocks of `rows` queries of a head. A block's turn counts through those of its group, heads
 * ascending, queries descending. gates[kv][block of keys] is the turn that may add to these keys; NULL where one
 * worker takes all turns in order. */
typedef struct upi_attn_bwd_job {
    const upipe_attn_grad *g;
    int64_t blocks, key_blocks;
    int64_t *gates;
    size_t floats; /* scratch of a worker */
    int32_t group;
    int rows;
} upi_attn_bwd_job;

/* The turn before turn t that adds to the keys from k0, + 1; 0 if t is the first. Of a head's blocks the first
 * ones, with the last queries, see these keys, and no others do. */
UPI_INLINE int64_t upi_attn_turn_after(const upi_attn_bwd_job *job, const upi_attn_head *a, int64_t t,
                                       int64_t k0)
{
    int64_t b = t % job->blocks, lowest;
    if (b > 0 || t == 0) return t;
    if (!a->causal) return t;
    /* block b of the queries sees k0 if it ends beyond it: (b + 1) * rows + ahead > k0 */
    lowest = (k0 - a->ahead) / job->rows;
    if (k0 - a->ahead < 0 || lowest < 0) lowest = 0;
    return t - lowest;
}

UPI_CPU_KERNEL void upi_attn_bwd_block(const upi_attn_head *a, const upi_attn_bwd_job *job, int64_t *gates,
                                       int64_t turn, int64_t q0, int rows, float *scratch)
{
    const int d = a->d, panels = (rows + UPI_ATTN_PANEL - 1) / UPI_ATTN_PANEL;
    const int64_t reach = upi_attn_reach(a, q0, rows);
    const upi_fw scale = upi_fw_set1(a->scale);
    upi_attn_bwd_work w;
    float factor[UPI_ATTN_PANEL];
    upi_attn_sight sight;
    int64_t k0;
    int p;
    upi_attn_bwd_layout(&w, scratch, d);
    for (p = 0; p < UPI_ATTN_PANEL; ++p) factor[p] = a->scale;
    sight.panels = panels;
    upi_attn_bwd_pack(a, &w, d, q0, rows);
    for (k0 = 0; k0 < reach; k0 += UPI_ATTN_KEYS) {
        int keys = upi_attn_least(reach - k0, UPI_ATTN_KEYS);
        upi_attn_pack_keys(w.k, a->k, a->dtype, k0, a->k_step, keys, d);
        upi_attn_pack_keys(w.v, a->v, a->dtype, k0, a->v_step, keys, d);
        for (p = 0; p < panels; ++p) {
            sight.keys[p] = upi_attn_panel_keys(a, q0 + p * UPI_ATTN_PANEL, k0, keys, &sight.last[p]);
            if (sight.keys[p] > 0) upi_attn_bwd_panel(&w, d, scale, p, sight.keys[p], sight.last[p]);
        }
        if (gates != NULL) upi_par_wait(gates + k0 / UPI_ATTN_KEYS, upi_attn_turn_after(job, a, turn, k0));
        upi_attn_add_grad_block(d, keys, &sight, w.p, w.go_rows, a->gv + k0 * a->gv_step, a->gv_step);
        upi_attn_add_grad_block(d, keys, &sight, w.s, w.q_rows, a->gk + k0 * a->gk_step, a->gk_step);
        if (gates != NULL) upi_par_open(gates + k0 / UPI_ATTN_KEYS, turn + 1);
    }
    for (p = 0; p < panels; ++p) {
        int first = p * UPI_ATTN_PANEL;
        upi_attn_unpack_panel(a->gq, a->dtype, q0 + first, a->gq_step,
                              upi_attn_least(rows - first, UPI_ATTN_PANEL), d, w.gq + first * d, factor,
                              NULL);
    }
}

UPI_KERNELS_END

/* Item i of a call: turn by turn, and in a turn one block of each group, whose sums are apart. */
UPIPE_API void upi_attn_bwd_item(void *arg, int64_t i, int32_t worker)
{
    const upi_attn_bwd_job *job = (const upi_attn_bwd_job *)arg;
    const upipe_attn_grad *g = job->g;
    const upipe_attn *a = &g->a;
    const int32_t kv = (int32_t)(i % a->k.h), j = kv * job->group + (int32_t)(i / a->k.h / job->blocks);
    const int64_t turn = i / a->k.h, q0 = (job->blocks - 1 - turn % job->blocks) * job->rows;
    upi_attn_head h = upi_attn_head_make(a, j);
    h.go = upi_attn_view_head(g->go, j);
    h.delta = (const float *)upi_attn_view_head(g->delta, j);
    h.gq = upi_attn_view_head(g->gq, j);
    h.gk = (float *)upi_attn_view_head(g->gk, kv);
    h.gv = (float *)upi_attn_view_head(g->gv, kv);
    h.go_step = g->go.n_step;
    h.delta_step = g->delta.n_step;
    h.gq_step = g->gq.n_step;
    h.gk_step = g->gk.n_step;
    h.gv_step = g->gv.n_step;
    upi_attn_bwd_block(&h, job, job->gates != NULL ? job->gates + kv * job->key_blocks : NULL, turn, q0,
                       upi_attn_least(a->q.n - q0, job->rows),
                       (float *)a->work + (size_t)worker * job->floats);
}

/* Bytes of the gates, a multiple of 64. */
UPI_INLINE size_t upi_attn_gates(const upipe_ops *ops, const upipe_attn *a)
{
    int64_t blocks = (a->k.n + UPI_ATTN_KEYS - 1) / UPI_ATTN_KEYS;
    return upi_par_workers(ops) > 1 ? (size_t)(blocks * a->k.h * (int64_t)sizeof(int64_t) + 63) / 64 * 64 : 0;
}

UPIPE_API upipe_status upi_cpu_attn_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    const upipe_attn *a = &g->a;
    size_t gates = upi_attn_gates(c->ops, a);
    upi_attn_bwd_work work;
    upi_attn_bwd_job job;
    int panels = UPI_ATTN_PANELS_BWD;
    if (a->q.n == 0) return UPIPE_OK;
    job.g = g;
    job.group = a->q.h / a->k.h;
    while (panels > 1 && a->q.n * a->q.h < (int64_t)4 * panels * UPI_ATTN_PANEL * upi_par_workers(c->ops))
        panels /= 2;
    job.rows = panels * UPI_ATTN_PANEL;
    job.blocks = (a->q.n + job.rows - 1) / job.rows;
    job.key_blocks = (a->k.n + UPI_ATTN_KEYS - 1) / UPI_ATTN_KEYS;
    job.floats = upi_attn_bwd_layout(&work, NULL, a->q.d);
    job.gates = NULL;
    if (gates > 0) {
        job.gates = (int64_t *)(void *)((float *)a->work + (size_t)upi_par_workers(c->ops) * job.floats);
        memset(job.gates, 0, gates);
    }
    upi_par_each(c->ops, job.blocks * a->q.h, upi_attn_bwd_item, &job);
    return UPIPE_OK;
}

/* ---- scratch of both ---- */

UPIPE_API size_t upi_cpu_attn_bytes(const struct upipe_ops *ops, const upipe_attn *a, int backward)
{
    upi_attn_fwd_work fwd;
    upi_attn_bwd_work bwd;
    size_t floats =
        backward ? upi_attn_bwd_layout(&bwd, NULL, a->q.d) : upi_attn_fwd_layout(&fwd, NULL, a->q.d);
    return floats * sizeof(float) * (size_t)upi_par_workers(ops) + (backward ? upi_attn_gates(ops, a) : 0);
}

#endif
