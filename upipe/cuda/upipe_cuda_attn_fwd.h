/* upipe_cuda_attn_fwd.h -- attention forward on tensor cores
 *
 * Fills upi_cuda_attn_fwd of the table; upipe_cuda_attn_bwd.h has the rest. Contract: upipe_attn.h.
 *
 *     q, k, v     bf16; products sum in f32. f32 storage goes to upipe_cuda_attn_f32.h: tensor cores round it
 *     o           bf16 or f32
 *     rows        of q, k, v, o begin at multiples of 16 bytes: base and strides
 *     head dims   32 .. 256 in steps of 8, by kernels for 64, 96, 128, 192 and 256 whose last columns are zeros; the
 *                 greater of q's and v's counts. One more is for 192 of q and 128 of v
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
 * Each kernel comes twice, but that for 192 and 128: with MASKED it takes what rows see from a table
 * (upipe_cuda_attn_mask.h), and knows soft-caps; without, a row sees the keys up to its own.
 */
#ifndef UPIPE_CUDA_ATTN_FWD_H
#define UPIPE_CUDA_ATTN_FWD_H

#include "upipe_cuda_attn_f32.h"
#include "upipe_cuda_attn_fwd90.h"
#include "upipe_cuda_attn_step.h"

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

/* Starts copying a tile: ROWS rows of d elements from row `first` on of the `rows` rows at `from`. Rows beyond the
 * last, and columns beyond it before MOST, become zeros. */
template <int D, int MOST, int ROWS, int THREADS>
UPI_DEVICE void upi_cuda_attn_load(uint32_t to, const upi_bf16 *from, int64_t step, int64_t first,
                                   int64_t rows, int d)
{
    const int tid = upi_cuda_attn_anew((int)threadIdx.x);
    const int chunks = upi_cuda_attn_row<D>::COLUMNS / 8, stride = THREADS / chunks;
    const int c = tid % chunks, r = tid / chunks;
    const int end = c * 8 >= d ? 0 : rows - first < ROWS ? (int)(rows - first) : ROWS;
    if (c * 8 >= MOST) return;
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
        SLOT = KEYS * ROW,
        ASIDE = ROWS * ROW + SLOTS * SLOT,
        SHARED = ASIDE + (int)sizeof(upi_cuda_attn_fwd_aside)
    };
};

/* The slot of the ring behind that one; and the one before, where the tile after the next goes. */
template <int D> UPI_DEVICE uint32_t upi_cuda_attn_fwd_after(uint32_t at, uint32_t ring)
{
    const int slot = upi_cuda_attn_fwd_shape<D>::SLOT;
    return at == ring + 2 * slot ? ring : at + slot;
}
template <int D> UPI_DEVICE uint32_t upi_cuda_attn_fwd_before(uint32_t at, uint32_t ring)
{
    const int slot = upi_cuda_attn_fwd_shape<D>::SLOT;
    return at == ring ? ring + 2 * slot : at - slot;
}

/* What a thread works on. */
typedef struct upi_cuda_attn_fwd_place {
    int head, lane;
    int row0;                       /* the warp's first row, in the block */
    int64_t q0;                     /* the block's first query */
    upi_cuda_attn_tiles ours, seen; /* tiles of keys: the block's; the warp's */
    /* From tile seen.whole_end on, the lane's first query sees keys before `sight`, and there are `end` of them; both
     * are counted from the lane's first column. With a table, it says so. */
    int sight, end;
    /* Row and chunk of the four matrices that the lane loads at once: rows 0 to 7 and 8 to 15 of one chunk, then of
     * the next. */
    uint32_t mine;
    uint32_t at_q, ring; /* of the block's tiles, in shared memory */
} upi_cuda_attn_fwd_place;

template <int D, int MASKED>
UPI_DEVICE upi_cuda_attn_fwd_place upi_cuda_attn_fwd_here(const upi_cuda_attn_args &a, const void *shared)
{
    typedef upi_cuda_attn_fwd_shape<D> shape;
    const int64_t blocks = (a.queries + shape::ROWS - 1) / shape::ROWS;
    upi_cuda_attn_fwd_place x;
    x.lane = (int)threadIdx.x % 32;
    /* Under a causal mask the longest blocks of all heads come first, so that short ones fill the end;
     * otherwise a head's blocks follow one another and share its keys in the cache. */
    x.head = (int)(a.causal ? (int64_t)blockIdx.x % a.heads : (int64_t)blockIdx.x / blocks);
    x.q0 =
        (a.causal ? blocks - 1 - (int64_t)blockIdx.x / a.heads : (int64_t)blockIdx.x % blocks) * shape::ROWS;
    x.row0 = (int)threadIdx.x / 32 * shape::TILES * 16;
    x.ours = upi_cuda_attn_tiles_of<MASKED>(a, x.q0, shape::ROWS, shape::KEYS);
    x.seen = upi_cuda_attn_tiles_of<MASKED>(a, x.q0 + x.row0, shape::TILES * 16, shape::KEYS);
    if (x.q0 + x.row0 >= a.queries) x.seen.end = 0;
    x.sight =
        upi_cuda_attn_near(x.q0 + x.row0 + a.ahead + 1 - (int64_t)x.seen.whole_end * shape::KEYS, a.causal) +
        x.lane / 4 - x.lane % 4 * 2;
    x.end = upi_cuda_attn_near(a.keys - (int64_t)x.seen.whole_end * shape::KEYS, 1) - x.lane % 4 * 2;
    x.mine = upi_cuda_attn_at<D>(x.lane % 16, x.lane / 16);
    x.at_q = upi_shared_address(shared);
    x.ring = x.at_q + shape::ROWS * shape::ROW;
    return x;
}

/* What a lane has of its warp's rows. */
template <int D, int V> struct upi_cuda_attn_fwd_rows {
    enum { TILES = upi_cuda_attn_fwd_shape<D>::TILES };
    float o[TILES][V / 2], top[TILES][2], sum[TILES][2];
};

template <int D, int V> UPI_DEVICE void upi_cuda_attn_fwd_begin(upi_cuda_attn_fwd_rows<D, V> &x)
{
    UPI_UNROLL
    for (int m = 0; m < x.TILES; ++m) {
        UPI_UNROLL
        for (int i = 0; i < V / 2; ++i) x.o[m][i] = 0;
        UPI_UNROLL
        for (int half = 0; half < 2; ++half) {
            x.top[m][half] = -INFINITY;
            x.sum[m][half] = 0;
        }
    }
}

/* Starts copying the keys, or the values, of tile n to `to`. */
template <int D, int MOST>
UPI_DEVICE void upi_cuda_attn_fwd_load(uint32_t to, const upi_bf16 *from, int64_t step, int n,
                                       const upi_cuda_attn_args &a, int columns)
{
    typedef upi_cuda_attn_fwd_shape<D> shape;
    upi_cuda_attn_load<D, MOST, shape::KEYS, shape::THREADS>(to, from, step, (int64_t)n * shape::KEYS, a.keys,
                                                             columns);
}

/* s = Q K^T, of the tile at `at`. */
template <int D, int TILES, int N>
UPI_DEVICE void upi_cuda_attn_fwd_scores(float (&s)[TILES][N], const upi_cuda_attn_fwd_place &x, uint32_t at)
{
    typedef upi_cuda_attn_fwd_shape<D> shape;
    UPI_UNROLL
    for (int m = 0; m < TILES; ++m) {
        UPI_UNROLL
        for (int j = 0; j < N; ++j) s[m][j] = 0;
    }
    UPI_CUDA_ATTN_TURNS(shape::TURNS)
    for (int c = 0; c < D / 8; c += 2) {
        uint32_t q[TILES][4];
        UPI_UNROLL
        for (int m = 0; m < TILES; ++m)
            upi_load_matrix4(q[m], upi_cuda_attn_chunk(x.at_q + x.mine, c) + (x.row0 + m * 16) * shape::ROW);
        UPI_UNROLL
        for (int j = 0; j < N / 4; j += 2) {
            uint32_t k[4], low[2], high[2];
            upi_load_matrix4(k, upi_cuda_attn_chunk(at + x.mine, c) + j * 8 * shape::ROW);
            low[0] = k[0], low[1] = k[2];
            high[0] = k[1], high[1] = k[3];
            UPI_UNROLL
            for (int m = 0; m < TILES; ++m) {
                upi_mma(s[m] + 4 * j, q[m], low);
                upi_mma(s[m] + 4 * j + 4, q[m], high);
            }
        }
    }
}

/* Soft-cap and masks of tile n. */
template <int D, int MASKED, int TILES, int N>
UPI_DEVICE void upi_cuda_attn_fwd_hide(float (&s)[TILES][N], const upi_cuda_attn_args &a,
                                       const upi_cuda_attn_fwd_place &x, int n)
{
    const int KEYS = upi_cuda_attn_fwd_shape<D>::KEYS;
    if (MASKED && a.squash != 0) {
        UPI_UNROLL
        for (int m = 0; m < TILES; ++m) upi_cuda_attn_cap<KEYS>(s[m], a.squash);
    }
    if (n < x.seen.whole_end && (!MASKED || n >= x.seen.whole)) return;
    UPI_UNROLL
    for (int m = 0; m < TILES; ++m) {
        UPI_UNROLL
        for (int half = 0; half < 2; ++half) {
            int low = 0, high;
            if (MASKED) {
                const int64_t query = x.q0 + x.row0 + m * 16 + x.lane / 4 + half * 8;
                const upi_cuda_attn_run run = upi_cuda_attn_run_of(a.runs, query, a.queries);
                low = run.first - n * KEYS - x.lane % 4 * 2;
                high = run.end - n * KEYS - x.lane % 4 * 2;
            } else {
                const int far = x.sight + m * 16 + half * 8;
                high = (far < x.end ? far : x.end) - (n - x.seen.whole_end) * KEYS;
            }
            upi_cuda_attn_hide<KEYS>(s[m], half, low, high);
        }
    }
}

/* The greatest score of a row that the lane has. */
template <int N> UPI_DEVICE float upi_cuda_attn_fwd_most(const float (&s)[N], int which)
{
    float most = -INFINITY;
    UPI_UNROLL
    for (int j = 0; j < N / 4; ++j) most = fmaxf(most, fmaxf(s[4 * j + 2 * which], s[4 * j + 2 * which + 1]));
    return most;
}

/* Scores become weights, as operands of the next product. Only if a row of the warp has a new top, older sums and
 * values are rescaled. */
template <int D, int V, int TILES, int N>
UPI_DEVICE void upi_cuda_attn_fwd_weigh(upi_cuda_attn_fwd_rows<D, V> &x, uint32_t (&p)[TILES][N / 2],
                                        const float (&s)[TILES][N], float rate)
{
    int rises = 0;
    UPI_UNROLL
    for (int m = 0; m < TILES; ++m) {
        UPI_UNROLL
        for (int half = 0; half < 2; ++half) rises |= upi_cuda_attn_fwd_most(s[m], half) > x.top[m][half];
    }
    if (__any_sync(0xffffffffu, rises)) {
        UPI_UNROLL
        for (int m = 0; m < TILES; ++m) {
            UPI_UNROLL
            for (int half = 0; half < 2; ++half) {
                const float most = upi_cuda_attn_quad_max(upi_cuda_attn_fwd_most(s[m], half));
                float fold;
                if (!(most > x.top[m][half])) continue;
                fold = upi_cuda_attn_weight<1>(x.top[m][half], most, rate);
                x.top[m][half] = most;
                x.sum[m][half] *= fold;
                UPI_UNROLL
                for (int i = 0; i < V / 8; ++i) {
                    x.o[m][4 * i + 2 * half] *= fold;
                    x.o[m][4 * i + 2 * half + 1] *= fold;
                }
            }
        }
    }
    UPI_UNROLL
    for (int m = 0; m < TILES; ++m) {
        UPI_UNROLL
        for (int i = 0; i < N / 2; ++i) { /* two neighbours of a row, then of the one 8 below */
            const float base = upi_cuda_attn_base(x.top[m][i % 2]);
            const float first = upi_cuda_attn_weight<1>(s[m][2 * i], base, rate);
            const float second = upi_cuda_attn_weight<1>(s[m][2 * i + 1], base, rate);
            x.sum[m][i % 2] += first;
            x.sum[m][i % 2] += second;
            p[m][i] = upi_pack_bf16(first, second);
        }
    }
}

/* o += P V, of the tile at `at`. */
template <int D, int V, int TILES, int N>
UPI_DEVICE void upi_cuda_attn_fwd_values(float (&o)[TILES][V / 2], const uint32_t (&p)[TILES][N], uint32_t at)
{
    UPI_UNROLL
    for (int j = 0; j < N / 4; ++j) {
        UPI_UNROLL
        for (int i = 0; i < V / 8; i += 2) {
            uint32_t v[4];
            upi_load_matrix4_trans(v, upi_cuda_attn_chunk(at, i) + j * 16 * upi_cuda_attn_fwd_shape<D>::ROW);
            UPI_UNROLL
            for (int m = 0; m < TILES; ++m) {
                upi_mma(o[m] + 4 * i, p[m] + 4 * j, v);
                upi_mma(o[m] + 4 * i + 4, p[m] + 4 * j, v + 2);
            }
        }
    }
}

/* The rows' ends. f32 goes to memory, bf16 to the warp's rows of Q. */
template <int D, int V>
UPI_DEVICE void upi_cuda_attn_fwd_output(const upi_cuda_attn_args &a, const upi_cuda_attn_fwd_place &x,
                                         const upi_cuda_attn_fwd_rows<D, V> &rows, unsigned char *shared)
{
    UPI_UNROLL
    for (int m = 0; m < rows.TILES; ++m) {
        UPI_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int row = x.row0 + m * 16 + x.lane / 4 + half * 8;
            const int64_t query = x.q0 + row;
            const int real = query < a.queries;
            const upi_cuda_attn_end end = upi_cuda_attn_finish(a, x.head, query, rows.top[m][half],
                                                               upi_cuda_attn_quad_sum(rows.sum[m][half]));
            UPI_UNROLL
            for (int i = 0; i < V / 8; ++i) {
                const int64_t to = query * a.o_stride + x.head * a.o_head + i * 8 + x.lane % 4 * 2;
                upi_cuda_attn_pair *pair = (upi_cuda_attn_pair *)((float *)a.o + to);
                float first = rows.o[m][4 * i + 2 * half] * end.weight;
                float second = rows.o[m][4 * i + 2 * half + 1] * end.weight;
                if (a.merge && end.keep != 0 && real && i * 8 < a.v_dim)
                    upi_cuda_attn_add_older(&first, &second, end.keep, a.wide, pair,
                                            (const uint32_t *)((const upi_bf16 *)a.o + to));
                if (a.wide && real && i * 8 < a.v_dim) pair->x = first, pair->y = second;
                if (!a.wide)
                    *(uint32_t *)(shared + upi_cuda_attn_at<D>(row, i) + x.lane % 4 * 4) =
                        upi_pack_bf16(first, second);
            }
        }
    }
}

/* The warp's rows of o go from shared memory to o. */
template <int D>
UPI_DEVICE void upi_cuda_attn_fwd_store(const upi_cuda_attn_args &a, const upi_cuda_attn_fwd_place &x,
                                        const unsigned char *shared)
{
    const int chunks = upi_cuda_attn_row<D>::COLUMNS / 8, stride = 32 / chunks;
    const int c = x.lane % chunks, r = x.row0 + x.lane / chunks;
    upi_bf16 *to = (upi_bf16 *)a.o + (x.q0 + r) * a.o_stride + x.head * a.o_head + c * 8;
    UPI_UNROLL
    for (int i = 0; i < upi_cuda_attn_fwd_shape<D>::TILES * 16; i += stride, to += stride * a.o_stride)
        if (x.q0 + r + i < a.queries && c * 8 < a.v_dim)
            *(upi_cuda_attn_chunk16 *)to =
                *(const upi_cuda_attn_chunk16 *)(shared + upi_cuda_attn_at<D>(r + i, c));
}

template <int D, int V, int MASKED>
UPI_KERNEL(upi_cuda_attn_fwd_shape<D>::THREADS, upi_cuda_attn_fwd_shape<D>::BLOCKS)
void upi_cuda_attn_fwd_kernel(const upi_cuda_attn_args a)
{
    typedef upi_cuda_attn_fwd_shape<D> shape;
    UPI_SHARED(unsigned char, shared);
    const upi_cuda_attn_fwd_place x = upi_cuda_attn_fwd_here<D, MASKED>(a, shared);
    const int first = x.ours.first, tiles = x.ours.end;
    upi_cuda_attn_fwd_aside *aside = (upi_cuda_attn_fwd_aside *)(shared + shape::ASIDE);
    uint32_t at = x.ring; /* of the tile in hand: K, then V */
    upi_cuda_attn_fwd_rows<D, V> rows;
    upi_cuda_attn_fwd_begin<D, V>(rows);
    if (first < tiles) {
        const upi_bf16 *k = a.k + x.head / a.group * a.k_head, *v = a.v + x.head / a.group * a.v_head;
        upi_cuda_attn_load<D, D, shape::ROWS, shape::THREADS>(x.at_q, a.q + x.head * a.q_head, a.q_stride,
                                                              x.q0, a.queries, a.d);
        upi_cuda_attn_fwd_load<D, D>(at, k, a.k_stride, first, a, a.d);
        upi_copy_commit();
        upi_cuda_attn_fwd_load<D, V>(at + shape::SLOT, v, a.v_stride, first, a, MASKED ? a.v_dim : a.d);
        upi_copy_commit();
        if (threadIdx.x == 0) aside->k = k, aside->v = v;
    }
    for (int n = first; n < tiles; ++n) {
        const int sees =
            n < x.seen.end && n >= x.seen.first; /* a warp may have nothing to do where others have */
        uint32_t p[shape::TILES][shape::KEYS / 4];

        upi_copy_wait<1>();
        __syncthreads(); /* K is there, and every warp is through with the V before: its slot is free */
        if (n + 1 < tiles)
            upi_cuda_attn_fwd_load<D, D>(upi_cuda_attn_fwd_before<D>(at, x.ring), aside->k, a.k_stride, n + 1,
                                         a, a.d);
        upi_copy_commit();
        if (sees) {
            float s[shape::TILES][shape::KEYS / 2];
            upi_cuda_attn_fwd_scores<D>(s, x, at);
            upi_cuda_attn_fwd_hide<D, MASKED>(s, a, x, n);
            upi_cuda_attn_fwd_weigh<D, V>(rows, p, s, a.rate);
        }

        at = upi_cuda_attn_fwd_after<D>(at, x.ring);
        upi_copy_wait<1>();
        __syncthreads(); /* V is there, and every warp is through with K */
        if (n + 1 < tiles)
            upi_cuda_attn_fwd_load<D, V>(upi_cuda_attn_fwd_before<D>(at, x.ring), aside->v, a.v_stride, n + 1,
                                         a, MASKED ? a.v_dim : a.d);
        upi_copy_commit();
        if (sees) upi_cuda_attn_fwd_values<D, V>(rows.o, p, at + x.mine);
        at = upi_cuda_attn_fwd_after<D>(at, x.ring);
    }
    __syncwarp(); /* every lane is through with the warp's rows of Q, where o goes on its way */
    upi_cuda_attn_fwd_output<D, V>(a, x, rows, shared);
    if (a.wide) return;
    __syncwarp();
    upi_cuda_attn_fwd_store<D>(a, x, shared);
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

template <int D, int V, int MASKED>
UPIPE_API upipe_status upi_cuda_attn_fwd_launch(upipe_ctx *c, const upipe_attn *call,
                                                const upi_cuda_attn_args *a)
{
    typedef upi_cuda_attn_fwd_shape<D> shape;
    const int64_t blocks = (a->queries + shape::ROWS - 1) / shape::ROWS;
    UPIPE_TRY(upi_cuda_attn_fits(c, upi_cuda_attn_columns(call), shape::SHARED, blocks, a->heads));
    UPIPE_TRY(UPI_ALLOW_SHARED(c, (upi_cuda_attn_fwd_kernel<D, V, MASKED>), shape::SHARED));
    if (MASKED) UPIPE_TRY(upi_cuda_attn_query_runs(c, call, (upi_cuda_attn_run *)call->work));
    return UPI_LAUNCH(c, (upi_cuda_attn_fwd_kernel<D, V, MASKED>), (unsigned)(blocks * a->heads),
                      shape::THREADS, shape::SHARED, *a);
}

template <int MASKED>
UPIPE_API upipe_status upi_cuda_attn_fwd_any(upipe_ctx *c, const upipe_attn *call,
                                             const upi_cuda_attn_args *a)
{
    if (upi_cuda_attn_columns(call) <= 64) return upi_cuda_attn_fwd_launch<64, 64, MASKED>(c, call, a);
    if (upi_cuda_attn_columns(call) <= 96) return upi_cuda_attn_fwd_launch<96, 96, MASKED>(c, call, a);
    if (upi_cuda_attn_columns(call) <= 128) return upi_cuda_attn_fwd_launch<128, 128, MASKED>(c, call, a);
    if (upi_cuda_attn_columns(call) <= 192) return upi_cuda_attn_fwd_launch<192, 192, MASKED>(c, call, a);
    return upi_cuda_attn_fwd_launch<256, 256, MASKED>(c, call, a);
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
    if (obstacle == NULL) {
        if (!upi_cuda_attn_ranged(a)) x.runs = NULL;
        return upi_cuda_attn_fwd90(c, a, &x);
    }
    upi_cuda_attn_chosen(c, "forward", "8.0", obstacle);
    if (upi_cuda_attn_is_192_128(a)) return upi_cuda_attn_fwd_launch<192, 128, 1>(c, a, &x);
    return upi_cuda_attn_masked(a) ? upi_cuda_attn_fwd_any<1>(c, a, &x) : upi_cuda_attn_fwd_any<0>(c, a, &x);
}

#endif
