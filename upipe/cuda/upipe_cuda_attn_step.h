/* upipe_cuda_attn_step.h -- what attention does between its two products: soft-cap, masks, softmax, sinks, merge
 *
 * The forward for 8.0, the one for 9.0 and the one in f32 take these steps from here, and the backwards those that they
 * share. Tensor cores of both generations leave scores in one layout, of which a lane has [N / 8][2][2] floats:
 *
 *     s[4 j + 2 which + e]    row lane / 4 + 8 which, column 8 j + 2 (lane % 4) + e
 *
 * So the four lanes of a quad share two rows, 8 apart. A step takes the scores of 16 rows and N columns, or one of the
 * two rows (`which`). The kernels in f32 have one score a lane: they take the steps of one score, and of a row's end.
 *
 *     upi_cuda_attn_cap<N>(s, squash);                     soft-cap
 *     upi_cuda_attn_hide<N>(s, which, low, high);          masks: -INFINITY for what a row does not see
 *     upi_cuda_attn_weight<EXACT>(score, base, rate)       softmax, measured from base = upi_cuda_attn_base(top)
 *
 *     end = upi_cuda_attn_end_of(top, scale, sum);         a row that has seen all of its keys
 *     upi_cuda_attn_add_sink(&end, sink, score, sum);      sinks: another key, whose value is 0
 *     upi_cuda_attn_merge(&end, older);                    merge: with an older part of the row
 */
#ifndef UPIPE_CUDA_ATTN_STEP_H
#define UPIPE_CUDA_ATTN_STEP_H

#include "upipe_cuda_attn_tile.h"

/* ---- soft-cap ---- */

template <int N> UPI_DEVICE void upi_cuda_attn_cap(float *s, float squash)
{
    UPI_UNROLL
    for (int i = 0; i < N / 2; ++i) s[i] = tanhf(s[i] * squash);
}

/* tanh x, as upi_fw_tanh, and *slope *= 1 - tanh^2, by e = exp(-2|x|): it loses no digits where tanh is near 1. */
UPI_DEVICE float upi_cuda_attn_tanh(float x, float *slope)
{
    const float e = upi_exp2(fabsf(x) * -2.8853900817779268f), most = __fdividef(1, 1 + e), rest = e * most;
    const float square = x * x;
    float p = fmaf(1.762877250e-03f, square, -7.734463229e-03f);
    *slope *= 4 * rest * most;
    p = fmaf(p, square, 2.152135517e-02f);
    p = fmaf(p, square, -5.391799249e-02f);
    p = fmaf(p, square, 1.333306266e-01f);
    p = fmaf(p, square, -3.333333094e-01f);
    return fabsf(x) < 0.8f ? fmaf(p * square, x, x) : copysignf(most - rest, x);
}

/* ---- masks ---- */

/* Of one row the columns [low, high) are seen, counted from the lane's first one. */
template <int N> UPI_DEVICE void upi_cuda_attn_hide(float *s, int which, int low, int high)
{
    UPI_UNROLL
    for (int j = 0; j < N / 8; ++j) {
        if (j * 8 < low || j * 8 >= high) s[4 * j + 2 * which] = -INFINITY;
        if (j * 8 + 1 < low || j * 8 + 1 >= high) s[4 * j + 2 * which + 1] = -INFINITY;
    }
}

/* ---- softmax ---- */

/* The greatest of a quad's four, and their sum. */
UPI_DEVICE float upi_cuda_attn_quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

UPI_DEVICE float upi_cuda_attn_quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* What the scores of a row are measured from: of one that has seen nothing, not its top, lest weights be NaN. */
UPI_DEVICE float upi_cuda_attn_base(float top)
{
    return top == -INFINITY ? 0 : top;
}

/* 2^((score - base) rate). By one FMA, which is off by the rounding of base * rate: nothing to bf16, unless scores are
 * huge. EXACT: by the difference first. */
template <int EXACT> UPI_DEVICE float upi_cuda_attn_weight(float score, float base, float rate)
{
    return upi_exp2(EXACT ? (score - base) * rate : fmaf(score, rate, -base * rate));
}

/* ---- the end of a row ---- */

typedef struct upi_cuda_attn_end {
    float lse;    /* log-sum-exp */
    float weight; /* what the row's values are multiplied with */
    float keep;   /* what older ones are; 0: they are not even read */
} upi_cuda_attn_end;

/* Of the keys alone: `sum` weights, measured from `top`, whose score is top * scale. */
UPI_DEVICE upi_cuda_attn_end upi_cuda_attn_end_of(float top, float scale, float sum)
{
    upi_cuda_attn_end x;
    x.weight = sum == 0 ? 0 : 1 / sum; /* not `sum > 0`: a NaN must come out as one */
    x.lse = sum == 0 ? -INFINITY : fmaf(top, scale, logf(sum));
    x.keep = 0;
    return x;
}

/* Adds a score whose value is 0 to the row: `sum` weights of keys, measured from `score`. */
UPI_DEVICE void upi_cuda_attn_add_sink(upi_cuda_attn_end *x, float sink, float score, float sum)
{
    const float base = fmaxf(score, sink), fold = expf(score - base);
    const float both = fmaf(fold, sum, expf(sink - base));
    if (sink == -INFINITY) return;
    x->weight = fold / both;
    x->lse = base + logf(both);
}

/* Brings the row together with an older part of it, whose log-sum-exp is `old`. */
UPI_DEVICE void upi_cuda_attn_merge(upi_cuda_attn_end *x, float old)
{
    const float base = upi_cuda_attn_base(fmaxf(old, x->lse));
    const float e_old = expf(old - base), e_new = expf(x->lse - base), both = e_old + e_new;
    x->lse = both == 0 ? -INFINITY : base + logf(both);
    x->weight = both == 0 ? 0 : x->weight * (e_new / both);
    x->keep = old == -INFINITY ? 0 : e_old / both;
}

/* All of it, by a quad, whose sum of weights it is; the log-sum-exp goes out. */
UPI_DEVICE upi_cuda_attn_end upi_cuda_attn_finish(const upi_cuda_attn_args &a, int head, int64_t query,
                                                  float top, float sum)
{
    const int real = query < a.queries;
    float *lse = a.lse + query * a.lse_stride + head * a.lse_head;
    upi_cuda_attn_end x = upi_cuda_attn_end_of(top, a.scale, sum);
    if (a.sinks != NULL) upi_cuda_attn_add_sink(&x, a.sinks[head], top * a.scale, sum);
    if (a.merge) {
        upi_cuda_attn_merge(&x, real ? *lse : -INFINITY);
        __syncwarp(); /* a quad reads before its first lane writes */
    }
    if (real && threadIdx.x % 4 == 0) *lse = x.lse;
    return x;
}

/* Adds two older neighbours of a row, times keep: from `wide`, where o is f32, or else from `both`. */
UPI_DEVICE void upi_cuda_attn_add_older(float *x, float *y, float keep, int is_wide,
                                        const upi_cuda_attn_pair *wide, const uint32_t *both)
{
    if (is_wide) {
        *x = fmaf(keep, wide->x, *x);
        *y = fmaf(keep, wide->y, *y);
    } else {
        const uint32_t old = *both;
        *x = fmaf(keep, upi_from_bf16((upi_bf16)(old & 0xffff)), *x);
        *y = fmaf(keep, upi_from_bf16((upi_bf16)(old >> 16)), *y);
    }
}

#endif
