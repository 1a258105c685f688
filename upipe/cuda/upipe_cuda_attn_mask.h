/* upipe_cuda_attn_mask.h -- windows, packed sequences and sinks
 *
 * What a query sees is one run of keys, and what sees a key is one run of queries; both ends of either ascend
 * with the row. Under a causal mask alone a kernel has them from a sum. Under a window or packed sequences,
 * which take divisions and a search, they are written down before it starts, a table of 8 bytes a row in
 * scratch:
 *
 *     runs = (upi_cuda_attn_run *)a->work;                             upi_cuda_attn_runs_bytes(a->q.n)
 *     UPIPE_TRY(upi_cuda_attn_query_runs(c, a, runs));                 runs[i]: the keys that query i sees
 *     UPIPE_TRY(upi_cuda_attn_key_runs(c, a, more));                   more[j]: the queries that see key j
 *
 * A forward walks keys for some queries and wants the first, a backward queries for some keys and wants the
 * second:
 *
 *     some of rows 32 .. 63 see [runs[32].first, runs[63].end)    upi_cuda_attn_some: other tiles are left
 *                                                                 out
 *     all of them see           [runs[63].first, runs[32].end)    upi_cuda_attn_all: tiles in it need no mask
 *
 * The borders of packed sequences are host memory and may change when the call returns: they are a launch's
 * arguments, UPI_CUDA_ATTN_BORDERS at a time, each launch for the rows between its borders.
 *
 * Kernels with tables also support soft-caps, and head dims of v that are not q's; the others stay as lean as
 * they can be. Sinks only change the end of a row.
 */
#ifndef UPIPE_CUDA_ATTN_MASK_H
#define UPIPE_CUDA_ATTN_MASK_H

#include <math.h>

#include "upipe_cuda_bytes.h"
#include "upipe_cuda_kernel.h"

enum {
    UPI_CUDA_ATTN_BORDERS = 480, /* a kernel has 4096 bytes of arguments */
    UPI_CUDA_ATTN_RUN_ROWS = 256,
    UPI_CUDA_ATTN_SINK_THREADS = 512
};

/* [first, end), of rows of the other side; equal where there are none. */
struct alignas(8) upi_cuda_attn_run {
    int first, end;
};
static_assert(sizeof(upi_cuda_attn_run) == UPI_CUDA_ATTN_RUN, "bytes of a row of the table");

/* ---- on the device ---- */

/* What a row of the table sees; a row beyond the last sees what that one does. */
UPI_DEVICE upi_cuda_attn_run upi_cuda_attn_run_of(const upi_cuda_attn_run *runs, int64_t row, int64_t rows)
{
    return runs[row < rows ? row : rows - 1];
}

/* What some of the `count` rows from `row` see, between them; of the table's `rows` rows at least one. */
UPI_DEVICE upi_cuda_attn_run upi_cuda_attn_some(const upi_cuda_attn_run *runs, int64_t row, int count,
                                                int64_t rows)
{
    upi_cuda_attn_run x;
    x.first = runs[row].first;
    x.end = runs[row + count < rows ? row + count - 1 : rows - 1].end;
    return x;
}

/* What all of them see; end may be less than first. */
UPI_DEVICE upi_cuda_attn_run upi_cuda_attn_all(const upi_cuda_attn_run *runs, int64_t row, int count,
                                               int64_t rows)
{
    upi_cuda_attn_run x;
    x.first = runs[row + count < rows ? row + count - 1 : rows - 1].first;
    x.end = runs[row].end;
    return x;
}

/* ---- the tables ---- */

/* One side's rows against the other's: row i sees the rows i - before to i + after, those of its packed
 * sequence. */
typedef struct upi_cuda_attn_side {
    upi_cuda_attn_run *runs;
    int64_t from, to; /* rows of this launch */
    int64_t others;   /* rows of the other side */
    int64_t before, after;
    int64_t pos, other_pos, step; /* position of row 0 of either side */
    int borders;                  /* 0: no packed sequences */
    int64_t border[UPI_CUDA_ATTN_BORDERS];
} upi_cuda_attn_side;

/* The first row at or behind a position: rows of `step` from `pos`. */
UPI_DEVICE int64_t upi_cuda_attn_row_at(int64_t border, int64_t pos, int64_t step)
{
    const int64_t away = border - pos;
    return step == 1 ? away : away / step + (away % step > 0);
}

/* As upipe_attn_visible, from either side. */
template <int THREADS> UPI_KERNEL(THREADS, 1) void upi_cuda_attn_runs_kernel(const upi_cuda_attn_side s)
{
    const int64_t i = s.from + (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int64_t pos = s.pos + i * s.step;
    int64_t first = i - s.before, end = i + s.after + 1;
    int low = 0, high = s.borders - 1; /* border[low] <= pos < border[high], or there is no such pair */
    upi_cuda_attn_run run;
    if (i >= s.to) return;
    if (s.borders > 0 && pos < s.border[0]) {
        end = 0;
    } else if (s.borders > 0 && pos >= s.border[high]) {
        first = s.others;
    } else if (s.borders > 0) {
        int64_t from, to;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (s.border[middle] <= pos)
                low = middle;
            else
                high = middle;
        }
        from = upi_cuda_attn_row_at(s.border[low], s.other_pos, s.step);
        to = upi_cuda_attn_row_at(s.border[high], s.other_pos, s.step);
        if (from > first) first = from;
        if (to < end) end = to;
    }
    end = end < 0 ? 0 : end > s.others ? s.others : end;
    run.first = (int)(first < 0 ? 0 : first > end ? end : first);
    run.end = (int)end;
    s.runs[i] = run;
}

/* The gradient of a head's sink, that of a score whose value is 0 and whose weight is exp(sink - lse): a
 * block a head, every thread one chain in f64, and the chains in a fixed order. Of a row of padding that has seen the
 * sink alone o is 0, and so is delta, whatever dout is. */
template <int THREADS>
UPI_KERNEL(THREADS, 1)
void upi_cuda_attn_sink_kernel(float *dsinks, const float *sinks, upipe_view lse, upipe_view delta,
                               upipe_attn_rows inside)
{
    UPI_SHARED(double, buf);
    const int h = (int)blockIdx.x, tid = (int)threadIdx.x;
    const float *at_lse = (const float *)lse.data + h * lse.h_stride;
    const float *at_delta = (const float *)delta.data + h * delta.h_stride;
    const double sink = (double)sinks[h];
    double sum = 0;
    if (sinks[h] == -INFINITY) return;
    UPI_UNROLL_4
    for (int64_t i = tid; i < lse.n; i += THREADS) {
        const double row = (double)at_lse[i * lse.n_stride];
        if ((i < inside.first || i >= inside.end) && row == sink) continue;
        sum += exp(sink - row) * (double)at_delta[i * delta.n_stride];
    }
    buf[tid] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (tid < half) buf[tid] += buf[tid + half];
    }
    if (tid == 0) dsinks[h] -= (float)buf[0];
}

/* ---- host ---- */

/* Rows of tables are counted in 32 bits. */
UPIPE_API upipe_status upi_cuda_attn_check_masks(upipe_ctx *c, const upipe_attn *a)
{
    if (!upi_cuda_attn_masked(a) || (a->q.n < INT32_MAX && a->k.n < INT32_MAX)) return UPIPE_OK;
    return upipe_fail(
        &c->err, UPIPE_ERR_UNSUPPORTED,
        "attention: %lld queries and %lld keys; with these masks there are at most %d of either",
        (long long)a->q.n, (long long)a->k.n, INT32_MAX - 1);
}

/* Launches for all of the `rows` rows of a side; s has everything but the packed sequences. */
UPIPE_API upipe_status upi_cuda_attn_runs_make(upipe_ctx *c, upi_cuda_attn_side *s, int64_t rows,
                                               const int64_t *cu_seqlens, int64_t cu_seqlens_n)
{
    int64_t at = 0;
    do {
        const int64_t left = cu_seqlens_n - at, most = UPI_CUDA_ATTN_BORDERS - 1;
        const int64_t count = left < most ? left : most; /* packed sequences of this launch */
        s->from = at == 0 ? 0 : upi_clamp(-upi_floor_div(s->pos - cu_seqlens[at], s->step), 0, rows);
        s->to = left <= most ? rows
                             : upi_clamp(-upi_floor_div(s->pos - cu_seqlens[at + count], s->step), 0, rows);
        s->borders = cu_seqlens != NULL ? (int)count + 1 : 0;
        if (cu_seqlens != NULL) memcpy(s->border, cu_seqlens + at, (size_t)s->borders * sizeof *cu_seqlens);
        if (s->from < s->to)
            UPIPE_TRY(UPI_LAUNCH(
                c, (upi_cuda_attn_runs_kernel<UPI_CUDA_ATTN_RUN_ROWS>),
                (unsigned)((s->to - s->from + UPI_CUDA_ATTN_RUN_ROWS - 1) / UPI_CUDA_ATTN_RUN_ROWS),
                UPI_CUDA_ATTN_RUN_ROWS, 0, *s));
        at += count;
    } while (at < cu_seqlens_n);
    return UPIPE_OK;
}

/* The queries' side of a call. */
UPIPE_API upi_cuda_attn_side upi_cuda_attn_side_make(const upipe_attn *a, upi_cuda_attn_run *runs)
{
    const int64_t far = INT64_C(1) << 61;
    upi_cuda_attn_side s;
    memset(&s, 0, sizeof s);
    s.runs = runs;
    s.others = a->k.n;
    s.step = a->pos_step > 0 ? a->pos_step : 1;
    s.before = a->mask.window > 0 ? upi_floor_div(a->mask.window - 1 - (a->q_pos - a->k_pos), s.step) : far;
    s.after = a->mask.causal ? upi_attn_ahead(a) : far;
    s.pos = a->q_pos;
    s.other_pos = a->k_pos;
    return s;
}

/* The keys that each query sees, [a->q.n]; none where there are no queries. */
UPIPE_API upipe_status upi_cuda_attn_query_runs(upipe_ctx *c, const upipe_attn *a, upi_cuda_attn_run *runs)
{
    upi_cuda_attn_side s = upi_cuda_attn_side_make(a, runs);
    return upi_cuda_attn_runs_make(c, &s, a->q.n, a->mask.borders.cu_seqlens, a->mask.borders.cu_seqlens_n);
}

/* The queries that see each key, [a->k.n]: key j is seen from query j - after to query j + before. */
UPIPE_API upipe_status upi_cuda_attn_key_runs(upipe_ctx *c, const upipe_attn *a, upi_cuda_attn_run *runs)
{
    const upi_cuda_attn_side q = upi_cuda_attn_side_make(a, runs);
    upi_cuda_attn_side s = q;
    s.others = a->q.n;
    s.before = q.after;
    s.after = q.before;
    s.pos = a->k_pos;
    s.other_pos = a->q_pos;
    return upi_cuda_attn_runs_make(c, &s, a->k.n, a->mask.borders.cu_seqlens, a->mask.borders.cu_seqlens_n);
}

/* dsinks += the sinks' gradient, where it is wanted. */
UPIPE_API upipe_status upi_cuda_attn_sink_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    if (g->dsinks == NULL) return UPIPE_OK;
    return UPI_LAUNCH(c, (upi_cuda_attn_sink_kernel<UPI_CUDA_ATTN_SINK_THREADS>), (unsigned)g->a.q.h,
                      UPI_CUDA_ATTN_SINK_THREADS, UPI_CUDA_ATTN_SINK_THREADS * sizeof(double), g->dsinks,
                      g->a.mask.sinks, g->a.lse, g->delta, upi_attn_inside(&g->a, g->a.q_pos, g->a.q.n));
}

/* ---- padding: rows outside of all packed sequences, which kernels would multiply with weights of 0 ---- */

/* The rows of dq that are padding, before and behind the others, become 0. */
template <int THREADS>
UPI_KERNEL(THREADS, 1)
void upi_cuda_attn_padding_kernel(upipe_view dq, upipe_attn_rows inside)
{
    const int64_t row =
        blockIdx.x < inside.first ? (int64_t)blockIdx.x : (int64_t)blockIdx.x - inside.first + inside.end;
    for (int i = (int)threadIdx.x; i < dq.h * dq.d; i += THREADS) {
        const int64_t at = row * dq.n_stride + i / dq.d * dq.h_stride + i % dq.d;
        if (dq.dtype == UPIPE_F32)
            ((float *)dq.data)[at] = 0;
        else
            ((upi_bf16 *)dq.data)[at] = 0;
    }
}

UPIPE_API upipe_view upi_cuda_attn_rows(upipe_view v, upipe_attn_rows rows)
{
    return v.data != NULL ? upipe_view_rows(v, rows.first, rows.end - rows.first) : v;
}

/* The call without its keys that are padding. */
UPIPE_API upipe_attn upi_cuda_attn_keys_inside(const upipe_attn *a)
{
    const upipe_attn_rows inside = upi_attn_inside(a, a->k_pos, a->k.n);
    upipe_attn x = *a;
    x.k = upi_cuda_attn_rows(a->k, inside);
    x.v = upi_cuda_attn_rows(a->v, inside);
    x.k_pos += inside.first * (a->pos_step > 0 ? a->pos_step : 1);
    return x;
}

/* The same of the backward, and without its queries that are padding. */
UPIPE_API upipe_attn_grad upi_cuda_attn_grad_inside(const upipe_attn_grad *g)
{
    const upipe_attn *a = &g->a;
    const upipe_attn_rows keys = upi_attn_inside(a, a->k_pos, a->k.n);
    const upipe_attn_rows queries = upi_attn_inside(a, a->q_pos, a->q.n);
    upipe_attn_grad x = *g;
    x.a = upi_cuda_attn_keys_inside(a);
    x.a.q = upi_cuda_attn_rows(a->q, queries);
    x.a.lse = upi_cuda_attn_rows(a->lse, queries);
    x.a.q_pos += queries.first * (a->pos_step > 0 ? a->pos_step : 1);
    x.dout = upi_cuda_attn_rows(g->dout, queries);
    x.delta = upi_cuda_attn_rows(g->delta, queries);
    x.dq = upi_cuda_attn_rows(g->dq, queries);
    x.dk = upi_cuda_attn_rows(g->dk, keys);
    x.dv = upi_cuda_attn_rows(g->dv, keys);
    return x;
}

/* Zeros for the gradients of queries that are padding. */
UPIPE_API upipe_status upi_cuda_attn_padding_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    const upipe_attn_rows inside = upi_attn_inside(&g->a, g->a.q_pos, g->a.q.n);
    const int64_t rows = g->a.q.n - (inside.end - inside.first);
    if (rows == 0 || g->a.merge) return UPIPE_OK;
    return UPI_LAUNCH(c, (upi_cuda_attn_padding_kernel<UPI_CUDA_ATTN_RUN_ROWS>), (unsigned)rows,
                      UPI_CUDA_ATTN_RUN_ROWS, 0, g->dq, inside);
}

#endif
