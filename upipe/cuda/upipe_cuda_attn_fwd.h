/* upipe_cuda_attn_fwd.h -- attention forward on tensor cores   backend cuda, includes cuda_attn_f32
 *
 * Fills upi_cuda_attn_fwd of the table; upipe_cuda_attn_bwd.h has the rest. Contract: upipe_attn.h.
 *
 *     q, k, v     bf16; products sum in f32. f32 storage goes to upipe_cuda_attn_f32.h: tensor cores round it
 *     o           bf16 or f32
 *     rows        of q, k, v, o begin at multiples of 16 bytes: base and strides
 *     head dims   32 .. 256 in steps of 8, by kernels for 64, 96, 128, 192 and 256 whose last columns are zeros; the
 *                 greater of q's and v's counts
 *
 * A block takes 128 queries of one head (64 at head dim 256), a warp 32 of them as two tiles of 16, so that
 * each fragment of K or V that is read from shared memory feeds four products; with one tile, reading would
 * take as long as multiplying. Keys come in tiles of 64 (32), in the order K0 V0 K1 V1 ..., through a ring of
 * three slots of shared memory: each is on its way for a whole step of the loop, and two blocks fit in a
 * processor of 164 KiB. The four lanes of a quad share the rows of the accumulators:
 *
 *     S [16 queries][8 keys]: lane l holds (l / 4, 2 (l % 4)), the next column, and both 8 rows below
 *
 * which is also how the A operand of the next product lies, so P stays in registers. Weights are
 * 2^((score - top) * rate), the difference first: where scores are large, one FMA would be off by the
 * rounding of its second product. Only if a row of the warp has a new top are tops shared in quads, and
 * sums and accumulators rescaled: the longer the row, the rarer. A top that lags a little would make that
 * rarer still, but the greatest weight must be 1, which bf16 holds, for a row that sees one key alone to
 * give its value.
 *
 * Each kernel comes twice: with MASKED it takes what rows see from a table (upipe_cuda_attn_mask.h), and
 * knows soft-caps; without, a row sees the keys up to its own.
 */
#ifndef UPIPE_CUDA_ATTN_FWD_H
#define UPIPE_CUDA_ATTN_FWD_H

#include "upipe_cuda_attn_f32.h"
#include "upipe_cuda_attn_fwd90.h"
#include "upipe_cuda_attn_tile.h"

/* ---- tiles in shared memory ---- */

/* A row of a tile has space for a power of two of columns: those beyond D are neither loaded nor read. */
template <int D> struct upi_cuda_attn_row {
    enum { COLUMNS = D > 128 ? 256 : D > 64 ? 128 : 64, BYTES = COLUMNS * 2 };
};

/* Byte offset of 16-byte chunk c of row r of a tile [rows][D] of bf16. Eight rows of one column of chunks,
 * what one matrix of an ldmatrix reads, lie in different banks. */
template <int D> UPI_DEVICE uint32_t upi_cuda_attn_at(int r, int c)
{
    return (uint32_t)(r * upi_cuda_attn_row<D>::BYTES + (((c & ~7) | ((c ^ r) & 7)) << 4));
}

/* The address of chunk c + add of the row that `at`, upi_cuda_attn_at(r, c), belongs to: `add` has no bit in
 * common with c. Constant `add` costs one instruction. */
UPI_DEVICE uint32_t upi_cuda_attn_chunk(uint32_t at, int add)
{
    return (at ^ (uint32_t)((add & 7) << 4)) + (uint32_t)((add & ~7) << 4);
}

/* Starts copying a tile: ROWS rows of d elements from row `first` on of the `rows` rows at `from`. Rows and
 * columns beyond the last become zeros. */
template <int D, int ROWS, int THREADS>
UPI_DEVICE void upi_cuda_attn_load(uint32_t to, const upi_bf16 *from, int64_t step, int64_t first,
                                   int64_t rows, int d)
{
    const int tid = upi_cuda_attn_anew((int)threadIdx.x);
    const int chunks = upi_cuda_attn_row<D>::COLUMNS / 8, stride = THREADS / chunks;
    const int c = tid % chunks, r = tid / chunks;
    const int end = c * 8 >= d ? 0 : rows - first < ROWS ? (int)(rows - first) : ROWS;
    if (c * 8 >= D) return;
    from += (first + r) * step + c * 8;
    UPI_UNROLL
    for (int i = 0; i < ROWS; i += stride, from += stride * step)
        upi_copy16(to + upi_cuda_attn_at<D>(r + i, c), from, r + i < end);
}

/* ---- the kernel ---- */

/* What a block needs once a tile waits behind its tiles in shared memory: registers are full. */
typedef struct upi_cuda_attn_fwd_aside {
    const upi_bf16 *k, *v; /* row 0 of its head */
} upi_cuda_attn_fwd_aside;

template <int D> struct upi_cuda_attn_fwd_shape {
    enum {
        WARPS = 4,
        THREADS = WARPS * 32,
        TILES = D > 128 ? 1 : 2, /* of 16 queries, a warp */
        ROWS = WARPS * TILES * 16,
        KEYS = D > 128 ? 32 : 64,
        SLOTS = 3,
        TURNS = D == 96 ? 2 : 4, /* of the loop over columns at once; 4 do not divide the 6 of head dim 96 */
        BLOCKS = 2,              /* a processor, by registers */
        ROW = upi_cuda_attn_row<D>::BYTES,
        ASIDE = (ROWS + SLOTS * KEYS) * ROW,
        SHARED = ASIDE + (int)sizeof(upi_cuda_attn_fwd_aside)
    };
};

/* The slot of the ring before that one: where the tile after the next goes. */
template <int D> UPI_DEVICE uint32_t upi_cuda_attn_fwd_before(uint32_t at, uint32_t ring)
{
    const int slot = upi_cuda_attn_fwd_shape<D>::KEYS * upi_cuda_attn_fwd_shape<D>::ROW;
    return at == ring ? ring + 2 * slot : at - slot;
}

template <int D, int MASKED>
UPI_KERNEL(upi_cuda_attn_fwd_shape<D>::THREADS, upi_cuda_attn_fwd_shape<D>::BLOCKS)
void upi_cuda_attn_fwd_kernel(const upi_cuda_attn_args a)
{
    typedef upi_cuda_attn_fwd_shape<D> shape;
    const int TILES = shape::TILES, ROWS = shape::ROWS, KEYS = shape::KEYS, THREADS = shape::THREADS;
    const int ROW = shape::ROW;
    UPI_SHARED(unsigned char, shared);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int64_t blocks = (a.queries + ROWS - 1) / ROWS;
    /* Under a causal mask the longest blocks of all heads come first, so that short ones fill the end;
     * otherwise a head's blocks follow one another and share its keys in the cache. */
    const int head = (int)(a.causal ? (int64_t)blockIdx.x % a.heads : (int64_t)blockIdx.x / blocks);
    const int64_t q0 =
        (a.causal ? blocks - 1 - (int64_t)blockIdx.x / a.heads : (int64_t)blockIdx.x % blocks) * ROWS;
    const int row0 = warp * TILES * 16; /* of the warp, in the block */
    const upi_cuda_attn_tiles ours = upi_cuda_attn_tiles_of<MASKED>(a, q0, ROWS, KEYS);
    const upi_cuda_attn_tiles seen = upi_cuda_attn_tiles_of<MASKED>(a, q0 + row0, TILES * 16, KEYS);
    const int first = ours.first, tiles = ours.end, whole = seen.whole_end;
    const int seen_end = q0 + row0 < a.queries ? seen.end : 0;
    /* From tile `whole` on, this lane's first query sees keys up to `sight`, and the last key is `end`;
     * both are counted from the lane's first column. With a table, it says so. */
    const int sight =
        upi_cuda_attn_near(q0 + row0 + a.ahead - (int64_t)whole * KEYS, a.causal) + lane / 4 - lane % 4 * 2;
    const int end = upi_cuda_attn_near(a.keys - 1 - (int64_t)whole * KEYS, 1) - lane % 4 * 2;
    upi_cuda_attn_fwd_aside *aside = (upi_cuda_attn_fwd_aside *)(shared + shape::ASIDE);
    const uint32_t at_q = upi_shared_address(shared);
    const uint32_t ring = at_q + ROWS * ROW, slot = KEYS * ROW;
    uint32_t at = ring; /* of the tile in hand: K, then V */
    /* This lane's row and chunk of the four matrices that it loads at once: rows 0 to 7 and 8 to 15 of one
     * chunk, then of the next. */
    const uint32_t mine = upi_cuda_attn_at<D>(lane % 16, lane / 16);

    float o[TILES][D / 8][4], top[TILES][2], sum[TILES][2];
    UPI_UNROLL
    for (int m = 0; m < TILES; ++m) {
        UPI_UNROLL
        for (int i = 0; i < D / 8; ++i) o[m][i][0] = o[m][i][1] = o[m][i][2] = o[m][i][3] = 0;
        UPI_UNROLL
        for (int half = 0; half < 2; ++half) {
            top[m][half] = -INFINITY;
            sum[m][half] = 0;
        }
    }

    if (first < tiles) {
        const upi_bf16 *k = a.k + head / a.group * a.k_head, *v = a.v + head / a.group * a.v_head;
        upi_cuda_attn_load<D, ROWS, THREADS>(at_q, a.q + head * a.q_head, a.q_stride, q0, a.queries, a.d);
        upi_cuda_attn_load<D, KEYS, THREADS>(ring, k, a.k_stride, (int64_t)first * KEYS, a.keys, a.d);
        upi_copy_commit();
        upi_cuda_attn_load<D, KEYS, THREADS>(ring + slot, v, a.v_stride, (int64_t)first * KEYS, a.keys,
                                             MASKED ? a.v_dim : a.d);
        upi_copy_commit();
        if (threadIdx.x == 0) aside->k = k, aside->v = v;
    }
    for (int n = first; n < tiles; ++n) {
        uint32_t p[TILES][KEYS / 16][4];

        upi_copy_wait<1>();
        __syncthreads(); /* K is there, and every warp is through with the V before: its slot is free */
        if (n + 1 < tiles)
            upi_cuda_attn_load<D, KEYS, THREADS>(upi_cuda_attn_fwd_before<D>(at, ring), aside->k, a.k_stride,
                                                 (int64_t)(n + 1) * KEYS, a.keys, a.d);
        upi_copy_commit();
        if (n < seen_end && n >= seen.first) { /* a warp may have nothing to do where others have */
            float s[TILES][KEYS / 8][4];
            int rises = 0;
            UPI_UNROLL
            for (int m = 0; m < TILES; ++m) {
                UPI_UNROLL
                for (int j = 0; j < KEYS / 8; ++j) s[m][j][0] = s[m][j][1] = s[m][j][2] = s[m][j][3] = 0;
            }
            UPI_CUDA_ATTN_TURNS(shape::TURNS)
            for (int c = 0; c < D / 8; c += 2) {
                uint32_t x[TILES][4];
                UPI_UNROLL
                for (int m = 0; m < TILES; ++m)
                    upi_load_matrix4(x[m], upi_cuda_attn_chunk(at_q + mine, c) + (row0 + m * 16) * ROW);
                UPI_UNROLL
                for (int j = 0; j < KEYS / 8; j += 2) {
                    uint32_t y[4], low[2], high[2];
                    upi_load_matrix4(y, upi_cuda_attn_chunk(at + mine, c) + j * 8 * ROW);
                    low[0] = y[0], low[1] = y[2];
                    high[0] = y[1], high[1] = y[3];
                    UPI_UNROLL
                    for (int m = 0; m < TILES; ++m) {
                        upi_mma(s[m][j], x[m], low);
                        upi_mma(s[m][j + 1], x[m], high);
                    }
                }
            }

            if (MASKED && a.squash != 0) {
                UPI_UNROLL
                for (int m = 0; m < TILES; ++m) {
                    UPI_UNROLL
                    for (int j = 0; j < KEYS / 8; ++j) {
                        UPI_UNROLL
                        for (int e = 0; e < 4; ++e) s[m][j][e] = tanhf(s[m][j][e] * a.squash);
                    }
                }
            }
            if (MASKED && (n >= whole || n < seen.whole)) {
                UPI_UNROLL
                for (int m = 0; m < TILES; ++m) {
                    UPI_UNROLL
                    for (int half = 0; half < 2; ++half) {
                        const int64_t query = q0 + row0 + m * 16 + lane / 4 + half * 8;
                        const upi_cuda_attn_run run = a.runs[query < a.queries ? query : a.queries - 1];
                        const int low = run.first - n * KEYS - lane % 4 * 2;
                        const int high = run.end - n * KEYS - lane % 4 * 2;
                        UPI_UNROLL
                        for (int j = 0; j < KEYS / 8; ++j) {
                            if (j * 8 < low || j * 8 >= high) s[m][j][2 * half] = -INFINITY;
                            if (j * 8 + 1 < low || j * 8 + 1 >= high) s[m][j][2 * half + 1] = -INFINITY;
                        }
                    }
                }
            }
            if (!MASKED && n >= whole) {
                UPI_UNROLL
                for (int m = 0; m < TILES; ++m) {
                    UPI_UNROLL
                    for (int half = 0; half < 2; ++half) {
                        const int far = sight + m * 16 + half * 8;
                        const int last = (far < end ? far : end) - (n - whole) * KEYS;
                        UPI_UNROLL
                        for (int j = 0; j < KEYS / 8; ++j) {
                            if (j * 8 > last) s[m][j][2 * half] = -INFINITY;
                            if (j * 8 + 1 > last) s[m][j][2 * half + 1] = -INFINITY;
                        }
                    }
                }
            }

            UPI_UNROLL
            for (int m = 0; m < TILES; ++m) {
                UPI_UNROLL
                for (int half = 0; half < 2; ++half) {
                    float most = -INFINITY;
                    UPI_UNROLL
                    for (int j = 0; j < KEYS / 8; ++j)
                        most = fmaxf(most, fmaxf(s[m][j][2 * half], s[m][j][2 * half + 1]));
                    rises |= most > top[m][half];
                }
            }
            if (__any_sync(0xffffffffu, rises)) {
                UPI_UNROLL
                for (int m = 0; m < TILES; ++m) {
                    UPI_UNROLL
                    for (int half = 0; half < 2; ++half) {
                        float most = -INFINITY, fold;
                        UPI_UNROLL
                        for (int j = 0; j < KEYS / 8; ++j)
                            most = fmaxf(most, fmaxf(s[m][j][2 * half], s[m][j][2 * half + 1]));
                        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
                        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
                        if (!(most > top[m][half])) continue;
                        fold = upi_exp2((top[m][half] - most) * a.rate);
                        top[m][half] = most;
                        sum[m][half] *= fold;
                        UPI_UNROLL
                        for (int i = 0; i < D / 8; ++i) {
                            o[m][i][2 * half] *= fold;
                            o[m][i][2 * half + 1] *= fold;
                        }
                    }
                }
            }
            UPI_UNROLL
            for (int m = 0; m < TILES; ++m) {
                UPI_UNROLL
                for (int j = 0; j < KEYS / 8; ++j) {
                    UPI_UNROLL
                    for (int half = 0; half < 2; ++half) {
                        const float from = top[m][half] == -INFINITY ? 0 : top[m][half];
                        const float x = upi_exp2((s[m][j][2 * half] - from) * a.rate);
                        const float y = upi_exp2((s[m][j][2 * half + 1] - from) * a.rate);
                        sum[m][half] += x;
                        sum[m][half] += y;
                        p[m][j / 2][j % 2 * 2 + half] = upi_pack_bf16(x, y);
                    }
                }
            }
        }

        at = at == ring + 2 * slot ? ring : at + slot;
        upi_copy_wait<1>();
        __syncthreads(); /* V is there, and every warp is through with K */
        if (n + 1 < tiles)
            upi_cuda_attn_load<D, KEYS, THREADS>(upi_cuda_attn_fwd_before<D>(at, ring), aside->v, a.v_stride,
                                                 (int64_t)(n + 1) * KEYS, a.keys, MASKED ? a.v_dim : a.d);
        upi_copy_commit();
        if (n < seen_end && n >= seen.first) {
            UPI_UNROLL
            for (int j = 0; j < KEYS / 16; ++j) {
                UPI_UNROLL
                for (int i = 0; i < D / 8; i += 2) {
                    uint32_t y[4];
                    upi_load_matrix4_trans(y, upi_cuda_attn_chunk(at + mine, i) + j * 16 * ROW);
                    UPI_UNROLL
                    for (int m = 0; m < TILES; ++m) {
                        upi_mma(o[m][i], p[m][j], y);
                        upi_mma(o[m][i + 1], p[m][j], y + 2);
                    }
                }
            }
        }
        at = at == ring + 2 * slot ? ring : at + slot;
    }

    __syncwarp(); /* every lane is through with the warp's rows of Q, where o goes on its way */
    UPI_UNROLL
    for (int m = 0; m < TILES; ++m) {
        UPI_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int row = row0 + m * 16 + lane / 4 + half * 8;
            const int64_t query = q0 + row;
            const int real = query < a.queries;
            float *at_lse = a.lse + query * a.lse_stride + head * a.lse_head;
            float all = sum[m][half], lse, weight, keep = 0;
            all += __shfl_xor_sync(0xffffffffu, all, 1);
            all += __shfl_xor_sync(0xffffffffu, all, 2);
            weight = all == 0 ? 0 : 1 / all; /* not `all > 0`: a NaN must come out as one */
            lse = all == 0 ? -INFINITY : fmaf(top[m][half], a.scale, logf(all));
            if (a.sinks != NULL)
                upi_cuda_attn_add_sink(a.sinks[head], top[m][half] * a.scale, all, &lse, &weight);
            if (a.merge) {
                const float old = real ? *at_lse : -INFINITY, most = fmaxf(old, lse);
                const float from = most == -INFINITY ? 0 : most;
                const float e_old = expf(old - from), e_new = expf(lse - from), both = e_old + e_new;
                lse = both == 0 ? -INFINITY : from + logf(both);
                weight = both == 0 ? 0 : weight * (e_new / both);
                /* 0 for a row that had seen nothing: what is in o is then not even read */
                keep = old == -INFINITY ? 0 : e_old / both;
                __syncwarp(); /* a quad reads before its first lane writes */
            }
            if (real && lane % 4 == 0) *at_lse = lse;
            UPI_UNROLL
            for (int i = 0; i < D / 8; ++i) {
                const int column = i * 8 + lane % 4 * 2;
                const int64_t to = query * a.o_stride + head * a.o_head + column;
                upi_cuda_attn_pair *pair = (upi_cuda_attn_pair *)((float *)a.o + to);
                float x = o[m][i][2 * half] * weight, y = o[m][i][2 * half + 1] * weight;
                if (a.merge && keep != 0 && real && i * 8 < a.v_dim) {
                    if (a.wide) {
                        x = fmaf(keep, pair->x, x);
                        y = fmaf(keep, pair->y, y);
                    } else {
                        const uint32_t old = *(const uint32_t *)((const upi_bf16 *)a.o + to);
                        x = fmaf(keep, upi_from_bf16((upi_bf16)(old & 0xffff)), x);
                        y = fmaf(keep, upi_from_bf16((upi_bf16)(old >> 16)), y);
                    }
                }
                if (a.wide && real && i * 8 < a.v_dim) pair->x = x, pair->y = y;
                if (!a.wide)
                    *(uint32_t *)(shared + upi_cuda_attn_at<D>(row, i) + lane % 4 * 4) = upi_pack_bf16(x, y);
            }
        }
    }
    if (a.wide) return;
    __syncwarp();
    {
        const int chunks = upi_cuda_attn_row<D>::COLUMNS / 8, stride = 32 / chunks;
        const int c = lane % chunks, r = row0 + lane / chunks;
        upi_bf16 *to = (upi_bf16 *)a.o + (q0 + r) * a.o_stride + head * a.o_head + c * 8;
        UPI_UNROLL
        for (int i = 0; i < TILES * 16; i += stride, to += stride * a.o_stride)
            if (q0 + r + i < a.queries && c * 8 < a.v_dim)
                *(upi_cuda_attn_chunk16 *)to =
                    *(const upi_cuda_attn_chunk16 *)(shared + upi_cuda_attn_at<D>(r + i, c));
    }
}

/* ---- host ---- */

/* The device must give a block this much shared memory, and a grid must have space for its blocks. */
UPIPE_API upipe_status upi_cuda_attn_fits(upipe_ctx *c, int d, int shared, int64_t blocks, int64_t heads)
{
    const upipe_cuda *self = (const upipe_cuda *)c->ops->self;
    int64_t all;
    if (shared > self->shared_most)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "attention: head dim %d needs %d bytes of shared memory a block; device %d has %d",
                          d, shared, self->device, self->shared_most);
    if (!upipe_mul(&all, blocks, heads) || all > INT32_MAX)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "attention: %lld blocks for each of %lld heads; a grid ends at %d",
                          (long long)blocks, (long long)heads, INT32_MAX);
    return UPIPE_OK;
}

template <int D, int MASKED>
UPIPE_API upipe_status upi_cuda_attn_fwd_launch(upipe_ctx *c, const upipe_attn *call,
                                                const upi_cuda_attn_args *a)
{
    typedef upi_cuda_attn_fwd_shape<D> shape;
    const int64_t blocks = (a->queries + shape::ROWS - 1) / shape::ROWS;
    UPIPE_TRY(upi_cuda_attn_fits(c, upi_cuda_attn_columns(call), shape::SHARED, blocks, a->heads));
    UPIPE_TRY(UPI_ALLOW_SHARED(c, (upi_cuda_attn_fwd_kernel<D, MASKED>), shape::SHARED));
    if (MASKED) UPIPE_TRY(upi_cuda_attn_query_runs(c, call, (upi_cuda_attn_run *)call->work));
    return UPI_LAUNCH(c, (upi_cuda_attn_fwd_kernel<D, MASKED>), (unsigned)(blocks * a->heads), shape::THREADS,
                      shape::SHARED, *a);
}

template <int MASKED>
UPIPE_API upipe_status upi_cuda_attn_fwd_any(upipe_ctx *c, const upipe_attn *call,
                                             const upi_cuda_attn_args *a)
{
    if (upi_cuda_attn_columns(call) <= 64) return upi_cuda_attn_fwd_launch<64, MASKED>(c, call, a);
    if (upi_cuda_attn_columns(call) <= 96) return upi_cuda_attn_fwd_launch<96, MASKED>(c, call, a);
    if (upi_cuda_attn_columns(call) <= 128) return upi_cuda_attn_fwd_launch<128, MASKED>(c, call, a);
    if (upi_cuda_attn_columns(call) <= 192) return upi_cuda_attn_fwd_launch<192, MASKED>(c, call, a);
    return upi_cuda_attn_fwd_launch<256, MASKED>(c, call, a);
}

/* Entry of the table. Scratch: what the queries of a masked call see. */
UPIPE_API upipe_status upi_cuda_attn_fwd(upipe_ctx *c, const upipe_attn *call)
{
    const upipe_attn inside = upi_cuda_attn_keys_inside(call), *a = &inside;
    upi_cuda_attn_args x;
    const char *obstacle;
    if (a->q.dtype == UPIPE_F32) {
        upi_cuda_attn_chosen(c, "forward", "f32", NULL);
        return upi_cuda_attn_f32_fwd(c, a);
    }
    UPIPE_TRY(upi_cuda_attn_check(c, a));
    UPIPE_TRY(upi_cuda_attn_aligned(c, "o", a->o));
    if (a->q.n == 0) return UPIPE_OK;
    x = upi_cuda_attn_args_make(a);
    x.o = a->o.data;
    x.o_stride = a->o.n_stride, x.o_head = a->o.h_stride;
    x.merge = a->merge;
    x.wide = a->o.dtype == UPIPE_F32;
    obstacle = upi_cuda_fwd90_obstacle(c, a);
    if (obstacle == NULL) return upi_cuda_attn_fwd90(c, a, &x);
    upi_cuda_attn_chosen(c, "forward", "8.0", obstacle);
    return upi_cuda_attn_masked(a) ? upi_cuda_attn_fwd_any<1>(c, a, &x) : upi_cuda_attn_fwd_any<0>(c, a, &x);
}

#endif
