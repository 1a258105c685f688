/* upipe_cuda_attn_bwd.h -- attention backward on tensor cores
 *
 * Fills upi_cuda_attn_bwd of the table; upipe_cuda_bytes.h has its scratch. Contract: upipe_attn.h; types and alignment
 * as in upipe_cuda_attn_fwd.h, and rows of dk and dv (f32) begin at multiples of 16 bytes too.
 *
 * A block takes 128 keys (64 at head dim 256) of one key/value head, and every query that sees them, of all
 * the heads of the group: dK and dV stay in registers from the first to the last, starting from what dk and
 * dv hold. A warp has 16 of the keys. Everything is computed transposed,
 *
 *     S^T = K Q^T     P^T = exp(scale S^T - lse)     dP^T = V dO^T     dS^T = scale P^T (dP^T - delta)
 *     dV += P^T dO    dK += dS^T Q                   dQ = dS K
 *
 * so that P^T and dS^T are, as they lie in registers, the A operands of dV and dK; dS also goes through
 * shared memory, for dQ sums over the keys of all warps. At head dim 256 two warps share 16 keys: each
 * computes half of their P and dS, which they share through shared memory, and half of the columns of dV and
 * dK. The scale is in dS before it is rounded, so that dK may go on from any start. Where a device gives a block
 * too little shared memory for that (SMALL: 99 KiB must do), it takes half of the keys, and two warps share 16 of
 * them above head dim 64 too; dO then has one slot, and the next tile's comes while dQ is computed.
 *
 * dQ of a tile of queries is a sum over blocks, in f32 in scratch, added up in the order of the keys: a
 * counter for each tile says whose turn it is. So results have the same bits under any schedule. A block
 * only waits for blocks of fewer keys ahead in the same head, and its place in that order is a ticket
 * that it draws when it starts: the blocks that it may wait for have started. Queries come in descending
 * order, because the last ones see all keys: under a causal mask too, all blocks begin with the same tile,
 * wait once for one another like beads on a string, and from then on follow at the same distance. In
 * ascending order a block would begin with a tile that the blocks before it reach only after all their
 * earlier ones.
 *
 * With MASKED a block takes from a table which queries see its keys (upipe_cuda_attn_mask.h). The first and
 * the last key say which tiles it range, and the neighbours' whether it is the first or the last that adds to
 * one.
 */
#ifndef UPIPE_CUDA_ATTN_BWD_H
#define UPIPE_CUDA_ATTN_BWD_H

#include "upipe_cuda_attn_bwd90.h"
#include "upipe_cuda_attn_fwd.h"

/* D columns of queries and keys, V of values. */
template <int Q_DIM, int V_DIM, int SMALL> struct upi_cuda_attn_bwd_shape {
    enum {
        D = Q_DIM,
        V = V_DIM,
        WARPS = SMALL && D > 128 ? 4 : 8,
        THREADS = WARPS * 32,
        KEYS = (D > 128 ? 64 : 128) >> SMALL,
        ROWS = UPI_CUDA_ATTN_BWD_ROWS(D),
        SHARES = WARPS * 16 / KEYS,    /* warps that share 16 keys */
        DQ_SHARES = WARPS * 16 / ROWS, /* and 16 queries of dQ */
        /* Queries whose S and dP a warp holds at once. At head dim 64 few, for two blocks a processor: K
         * and V are read once more for each part, but one block computes while the other waits. */
        COLUMNS = D == 64 ? 16 : ROWS / SHARES,
        BLOCKS = D > 64 ? 1 : 2, /* a processor, by registers */
        S_ROW = 64,              /* elements in a row of P and dS */
        ROW = upi_cuda_attn_row<D>::BYTES,
        AT_V = KEYS * ROW,
        TILE = ROWS * ROW,
        DOUT_SLOTS = 2 - SMALL,
        AT_Q = 2 * KEYS * ROW, /* two slots */
        AT_DOUT = AT_Q + 2 * TILE,
        AT_S = AT_DOUT + DOUT_SLOTS * TILE,
        AT_P = AT_S + KEYS * S_ROW * 2,
        AT_LSE = AT_P + (SHARES > 1 ? KEYS * S_ROW * 2 : 0), /* two slots, and two of delta */
        SHARED = AT_LSE + 4 * ROWS * 4
    };
};

/* s [16][8 N] = rows of one tile times rows of another, over COLUMNS of the D that they have space for; `a` and `b`
 * are what this lane loads. */
template <int D, int COLUMNS, int N> UPI_DEVICE void upi_cuda_attn_dots(float s[N][4], uint32_t a, uint32_t b)
{
    UPI_UNROLL
    for (int j = 0; j < N; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0;
    UPI_CUDA_ATTN_TURNS(2)
    for (int c = 0; c < COLUMNS / 8; c += 2) {
        uint32_t x[4];
        upi_load_matrix4(x, upi_cuda_attn_chunk(a, c));
        UPI_UNROLL
        for (int j = 0; j < N; j += 2) {
            uint32_t y[4], low[2], high[2];
            upi_load_matrix4(y, upi_cuda_attn_chunk(b, c) + j * 8 * upi_cuda_attn_row<D>::BYTES);
            low[0] = y[0], low[1] = y[2];
            high[0] = y[1], high[1] = y[3];
            upi_mma(s[j], x, low);
            upi_mma(s[j + 1], x, high);
        }
    }
}

/* out [16][8 N] += x [16][16] times 16 rows of a tile, of which `shares` warps take two tiles of 8 columns each in
 * turn; `b` is what this lane loads of its first columns. */
template <int N, int SHARES>
UPI_DEVICE void upi_cuda_attn_times(float out[N][4], const uint32_t x[4], uint32_t b)
{
    UPI_UNROLL
    for (int i = 0; i < N; i += 2) {
        uint32_t y[4];
        upi_load_matrix4_trans(y, upi_cuda_attn_chunk(b, i * SHARES));
        upi_mma(out[i], x, y);
        upi_mma(out[i + 1], x, y + 2);
    }
}

/* How many keys the block has. */
template <class shape> UPI_DEVICE int upi_cuda_attn_bwd_keys(const upi_cuda_attn_args &a, int block)
{
    const int64_t left = a.keys - (int64_t)block * shape::KEYS;
    return left < shape::KEYS ? (int)left : (int)shape::KEYS;
}

/* What a thread works on, in a block. */
typedef struct upi_cuda_attn_bwd_place {
    int tid, lane;
    int share, row0;       /* of its warp's 16 keys: which of the warps that share them, and the first one */
    int dq_share, dq_row0; /* the same of its 16 queries of dQ */
    uint32_t mine;         /* row and chunk of the four matrices that it loads at once, as in the forward */
} upi_cuda_attn_bwd_place;

template <class shape> UPI_DEVICE upi_cuda_attn_bwd_place upi_cuda_attn_bwd_here(void)
{
    upi_cuda_attn_bwd_place x;
    x.tid = upi_cuda_attn_anew((int)threadIdx.x);
    x.lane = x.tid % 32;
    x.share = shape::SHARES > 1 ? x.tid / 32 / (shape::KEYS / 16) : 0;
    x.row0 = (x.tid / 32 - x.share * (shape::KEYS / 16)) * 16;
    x.dq_share = x.tid / 32 / (shape::ROWS / 16);
    x.dq_row0 = x.tid / 32 % (shape::ROWS / 16) * 16;
    x.mine = upi_cuda_attn_at<shape::D>(x.lane % 16, x.lane / 16);
    return x;
}

/* Starts copying Q of tile m of head h into its slot, and dO. */
template <class shape>
UPI_DEVICE void upi_cuda_attn_bwd_load_q(const upi_cuda_attn_bwd_args &g, uint32_t base, int h, int m,
                                         int slot)
{
    upi_cuda_attn_load<shape::D, shape::D, shape::ROWS, shape::THREADS>(
        base + shape::AT_Q + slot * shape::TILE, g.a.q + h * g.a.q_head, g.a.q_stride,
        (int64_t)m * shape::ROWS, g.a.queries, g.a.d);
}

template <class shape, int MASKED>
UPI_DEVICE void upi_cuda_attn_bwd_load_dout(const upi_cuda_attn_bwd_args &g, uint32_t base, int h, int m,
                                            int slot)
{
    upi_cuda_attn_load<shape::D, shape::V, shape::ROWS, shape::THREADS>(
        base + shape::AT_DOUT + slot * shape::TILE, g.dout + h * g.dout_head, g.dout_stride,
        (int64_t)m * shape::ROWS, g.a.queries, MASKED ? g.a.v_dim : g.a.d);
}

/* lse and delta of the thread's query of the tile: x[0] and x[1]. They wait in registers for their slot. */
template <class shape>
UPI_DEVICE void upi_cuda_attn_bwd_stats(const upi_cuda_attn_bwd_args &g, int h, int m, float x[2])
{
    const int tid = upi_cuda_attn_anew((int)threadIdx.x);
    const int64_t row = (int64_t)m * shape::ROWS + tid;
    x[0] = -INFINITY;
    x[1] = 0;
    if (tid < shape::ROWS && row < g.a.queries) {
        x[0] = g.a.lse[row * g.a.lse_stride + h * g.a.lse_head];
        x[1] = g.delta[row * g.delta_stride + h * g.delta_head];
    }
}

template <class shape>
UPI_DEVICE void upi_cuda_attn_bwd_keep(unsigned char *shared, int slot, const float x[2])
{
    const int tid = upi_cuda_attn_anew((int)threadIdx.x);
    float *to = (float *)(shared + shape::AT_LSE) + slot * shape::ROWS + tid;
    if (tid >= shape::ROWS) return;
    /* A row that saw no key, and a row beyond the last, weighs every key 0. */
    to[0] = x[0] == -INFINITY ? INFINITY : x[0];
    to[2 * shape::ROWS] = x[1];
}

/* Hides keys from the queries, the columns of s, that don't see them. `ahead`: query i of these sees the
 * block's keys up to i + ahead; `end` of them there are. */
template <class shape, int N>
UPI_DEVICE void upi_cuda_attn_bwd_hide(float s[N][4], int first_key, int lane, int ahead, int end)
{
    if (end < shape::KEYS || ahead < shape::KEYS - 1) {
        UPI_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int key = first_key + lane / 4 + half * 8;
            /* columns before this one don't see the key */
            const int from = (key < end ? key - ahead : N * 8) - lane % 4 * 2;
            upi_cuda_attn_hide<N * 8>(s[0], half, from, N * 8);
        }
    }
}

/* As upi_cuda_attn_bwd_hide, by the table. `runs`: of the warp's first key; `end` of its 16 keys there are.
 * `query`: the first column's. */
template <int N>
UPI_DEVICE void upi_cuda_attn_bwd_hide_by(float s[N][4], const upi_cuda_attn_run *runs, int end, int lane,
                                          int query)
{
    int low[2], high[2], all = 1; /* of the lane's columns those from low on, before high, see the key */
    UPI_UNROLL
    for (int half = 0; half < 2; ++half) {
        const int key = lane / 4 + half * 8;
        low[half] = (key < end ? runs[key].first : 0) - query - lane % 4 * 2;
        high[half] = (key < end ? runs[key].end : 0) - query - lane % 4 * 2;
        all &= low[half] <= 0 && high[half] > N * 8 - 7;
    }
    if (__all_sync(0xffffffffu, all)) return;
    UPI_UNROLL
    for (int half = 0; half < 2; ++half) upi_cuda_attn_hide<N * 8>(s[0], half, low[half], high[half]);
}

/* Turns scores s into weights and dp into gradients of the scores. */
template <class shape, int N>
UPI_DEVICE void upi_cuda_attn_bwd_weights(float s[N][4], float dp[N][4], const float *lse, float scale,
                                          int lane)
{
    const float *delta = lse + 2 * shape::ROWS;
    UPI_UNROLL
    for (int j = 0; j < N; ++j) {
        UPI_UNROLL
        for (int e = 0; e < 4; ++e) {
            const int at = j * 8 + lane % 4 * 2 + e % 2;
            /* not one FMA with rates: where scores are large, score and lse nearly cancel */
            const float p = upi_exp2(fmaf(s[j][e], scale, -lse[at]) * UPI_CUDA_ATTN_LOG2E);
            s[j][e] = p;
            dp[j][e] = p * scale * (dp[j][e] - delta[at]);
        }
    }
}

/* The same under a soft-cap, from products; -INFINITY is a hidden one. */
template <class shape, int N>
UPI_DEVICE void upi_cuda_attn_bwd_capped(float s[N][4], float dp[N][4], const float *lse,
                                         const upi_cuda_attn_args &a, int lane)
{
    const float *delta = lse + 2 * shape::ROWS;
    UPI_UNROLL
    for (int j = 0; j < N; ++j) {
        UPI_UNROLL
        for (int e = 0; e < 4; ++e) {
            const int at = j * 8 + lane % 4 * 2 + e % 2;
            const float score = s[j][e] * a.squash;
            float slope = a.slope;
            const float t = upi_cuda_attn_tanh(score, &slope);
            const float p = upi_exp2(fmaf(t, a.scale, -lse[at]) * UPI_CUDA_ATTN_LOG2E);
            s[j][e] = score == -INFINITY ? 0 : p;
            dp[j][e] = s[j][e] * slope * (dp[j][e] - delta[at]);
        }
    }
}

/* Where two warps share 16 keys: dV and dK of half of the columns, from all of P and dS. */
template <class shape, int N, int M>
UPI_DEVICE void upi_cuda_attn_bwd_times_shared(float (&dk)[N][4], float (&dv)[M][4], uint32_t base,
                                               uint32_t at_q, uint32_t at_dout)
{
    const upi_cuda_attn_bwd_place at = upi_cuda_attn_bwd_here<shape>();
    const uint32_t mine_s = upi_cuda_attn_at<shape::S_ROW>(at.lane % 16, at.lane / 16);
    UPI_UNROLL
    for (int k = 0; k < shape::ROWS / 16; ++k) {
        uint32_t x[4];
        const uint32_t from = base + at.row0 * shape::S_ROW * 2 + upi_cuda_attn_chunk(mine_s, 2 * k);
        const uint32_t rows = upi_cuda_attn_chunk(at.mine, at.share * 2) + k * 16 * shape::ROW;
        upi_load_matrix4(x, from + shape::AT_P);
        upi_cuda_attn_times<M, shape::SHARES>(dv, x, at_dout + rows);
        upi_load_matrix4(x, from + shape::AT_S);
        upi_cuda_attn_times<N, shape::SHARES>(dk, x, at_q + rows);
    }
}

/* The block's part of dQ: the warp's 16 queries and N * 8 columns. */
template <class shape, int N> UPI_DEVICE void upi_cuda_attn_bwd_dq(float dq[N][4], uint32_t base)
{
    const upi_cuda_attn_bwd_place at = upi_cuda_attn_bwd_here<shape>();
    const uint32_t columns = base + upi_cuda_attn_chunk(at.mine, at.dq_share * 2);
    /* dS lies transposed: the four matrices come in the order of the A operand all the same */
    const uint32_t mine_s =
        base + shape::AT_S +
        upi_cuda_attn_at<shape::S_ROW>(at.lane % 8 + at.lane / 16 * 8, at.dq_row0 / 8 + at.lane / 8 % 2);
    UPI_UNROLL
    for (int i = 0; i < N; ++i) dq[i][0] = dq[i][1] = dq[i][2] = dq[i][3] = 0;
    UPI_CUDA_ATTN_TURNS(2)
    for (int k = 0; k < shape::KEYS / 16; ++k) {
        uint32_t x[4];
        upi_load_matrix4_trans(x, mine_s + k * 16 * shape::S_ROW * 2);
        upi_cuda_attn_times<N, shape::DQ_SHARES>(dq, x, columns + k * 16 * shape::ROW);
    }
}

/* Whether no block before adds to dQ of the tile; whether none after does. */
template <class shape, int MASKED>
UPI_DEVICE int upi_cuda_attn_bwd_is_first(const upi_cuda_attn_bwd_args &g, int m, int block)
{
    return block == 0 ||
           (MASKED && upi_cuda_attn_bwd_tiles_of<shape::KEYS, shape::ROWS, MASKED>(g, block - 1).end <= m);
}

template <class shape, int MASKED>
UPI_DEVICE int upi_cuda_attn_bwd_is_last(const upi_cuda_attn_bwd_args &g, int m, int block)
{
    return MASKED ? block + 1 == g.blocks ||
                        upi_cuda_attn_bwd_tiles_of<shape::KEYS, shape::ROWS, MASKED>(g, block + 1).first > m
                  : upi_cuda_attn_reach(g.a, (int64_t)m * shape::ROWS, shape::ROWS) <=
                        (int64_t)(block + 1) * shape::KEYS;
}

/* Whose turn it is at a tile. */
UPI_DEVICE int *upi_cuda_attn_bwd_turn(const upi_cuda_attn_bwd_args &g, int h, int m)
{
    return g.turns + 1 + (int64_t)h * g.tiles + upi_cuda_attn_anew(m);
}

/* What becomes of a block's part of dQ: it is the first, it is added, it is the last and the sum goes to dq, or
 * it is all there is. */
enum { UPI_BWD_BEGIN, UPI_BWD_ADD, UPI_BWD_END, UPI_BWD_ALL };

template <class shape, int N, int WHAT>
UPI_DEVICE void upi_cuda_attn_bwd_part(const upi_cuda_attn_bwd_args &g, const float dq[N][4], int h, int m)
{
    const upi_cuda_attn_bwd_place at = upi_cuda_attn_bwd_here<shape>();
    UPI_UNROLL
    for (int half = 0; half < 2; ++half) {
        const int64_t row = (int64_t)m * shape::ROWS + at.dq_row0 + at.lane / 4 + half * 8;
        const int first = at.dq_share * 16 + at.lane % 4 * 2;
        float *sum = g.dq_sum + row * g.dq_sum_stride + h * g.dq_sum_head + first;
        upi_bf16 *to = g.dq + row * g.dq_stride + h * g.dq_head + first;
        if (row >= g.a.queries) continue;
        UPI_UNROLL
        for (int i = 0; i < N; ++i) {
            const int c = upi_cuda_attn_column<shape::DQ_SHARES>(i);
            upi_cuda_attn_pair *pair = (upi_cuda_attn_pair *)(sum + c);
            float x = dq[i][2 * half], y = dq[i][2 * half + 1];
            if (first + c >= g.a.d) continue;
            if (WHAT == UPI_BWD_BEGIN) pair->x = x, pair->y = y;
            if (WHAT == UPI_BWD_ADD) {
                upi_add_alone(&pair->x, x);
                upi_add_alone(&pair->y, y);
            }
            if (WHAT == UPI_BWD_END) x = pair->x + x, y = pair->y + y;
            if (WHAT >= UPI_BWD_END) *(uint32_t *)(to + c) = upi_pack_bf16(x, y);
        }
    }
}

/* Adds the block's part to dQ of a tile, whose turn it has: the first block finds nothing there, the last one
 * writes the sum to dq. With merge all of them add to dq. Only the last one waits for what is there. */
template <class shape, int N>
UPI_DEVICE void upi_cuda_attn_bwd_add(const upi_cuda_attn_bwd_args &g, const float dq[N][4], int h, int m,
                                      int is_first, int is_last)
{
    if (g.a.merge || (!is_first && !is_last))
        upi_cuda_attn_bwd_part<shape, N, UPI_BWD_ADD>(g, dq, h, m);
    else if (!is_last)
        upi_cuda_attn_bwd_part<shape, N, UPI_BWD_BEGIN>(g, dq, h, m);
    else if (!is_first)
        upi_cuda_attn_bwd_part<shape, N, UPI_BWD_END>(g, dq, h, m);
    else
        upi_cuda_attn_bwd_part<shape, N, UPI_BWD_ALL>(g, dq, h, m);
}

/* Tiles first .. end - 1 see no key at all, and no block takes them: zeros for their gradients. */
template <class shape>
UPI_DEVICE void upi_cuda_attn_bwd_zero(const upi_cuda_attn_bwd_args &g, int kv, int first, int end)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t from = (int64_t)first * shape::ROWS, past = (int64_t)end * shape::ROWS;
    const int64_t to = past < g.a.queries ? past : g.a.queries;
    if (g.a.merge) return;
    for (int h = kv * g.a.group; h < (kv + 1) * g.a.group; ++h)
        for (int64_t row = from + (int)threadIdx.x / 32; row < to; row += shape::WARPS)
            for (int c = lane * 2; c < g.a.d; c += 64)
                *(uint32_t *)(g.dq + row * g.dq_stride + h * g.dq_head + c) = 0;
}

/* A block sees to the tiles between those of the block before and its own, the last one to those that are
 * left. */
template <class shape, int MASKED>
UPI_DEVICE void upi_cuda_attn_bwd_zeros(const upi_cuda_attn_bwd_args &g, int kv, int block,
                                        upi_cuda_attn_bwd_tiles range)
{
    const int before = MASKED && block > 0
                           ? upi_cuda_attn_bwd_tiles_of<shape::KEYS, shape::ROWS, MASKED>(g, block - 1).end
                           : 0;
    if (MASKED || block == 0) upi_cuda_attn_bwd_zero<shape>(g, kv, before, range.first);
    if (MASKED && block + 1 == g.blocks) upi_cuda_attn_bwd_zero<shape>(g, kv, range.end, g.tiles);
}

/* K, V and the first tile come to shared memory, the gradients of the keys to registers. */
template <class shape, int MASKED, int N, int M>
UPI_DEVICE void upi_cuda_attn_bwd_begin(const upi_cuda_attn_bwd_args &g, float (&dk)[N][4], float (&dv)[M][4],
                                        float stats[2], unsigned char *shared, int block, int kv, int h,
                                        int m)
{
    const upi_cuda_attn_bwd_place at = upi_cuda_attn_bwd_here<shape>();
    const uint32_t base = upi_shared_address(shared);
    const int64_t k0 = (int64_t)block * shape::KEYS;
    const int end = upi_cuda_attn_bwd_keys<shape>(g.a, block);
    upi_cuda_attn_load<shape::D, shape::D, shape::KEYS, shape::THREADS>(base, g.a.k + kv * g.a.k_head,
                                                                        g.a.k_stride, k0, g.a.keys, g.a.d);
    upi_cuda_attn_load<shape::D, shape::V, shape::KEYS, shape::THREADS>(
        base + shape::AT_V, g.a.v + kv * g.a.v_head, g.a.v_stride, k0, g.a.keys, MASKED ? g.a.v_dim : g.a.d);
    upi_cuda_attn_bwd_load_q<shape>(g, base, h, m, 0);
    upi_cuda_attn_bwd_load_dout<shape, MASKED>(g, base, h, m, 0);
    upi_copy_commit();
    upi_cuda_attn_bwd_stats<shape>(g, h, m, stats);
    upi_cuda_attn_bwd_keep<shape>(shared, 0, stats);
    upi_cuda_attn_grad_get<N, shape::SHARES>(dk, g.dk + kv * g.dk_head + k0 * g.dk_stride, g.dk_stride, end,
                                             at.row0, at.share * 16, g.a.d);
    upi_cuda_attn_grad_get<M, shape::SHARES>(dv, g.dv + kv * g.dv_head + k0 * g.dv_stride, g.dv_stride, end,
                                             at.row0, at.share * 16, MASKED ? g.a.v_dim : g.a.d);
    upi_copy_wait<0>();
    __syncthreads(); /* the first tile is there */
}

/* P and dS of N queries of tile m, from the tile's c0 on: s and dp. */
template <class shape, int MASKED, int N>
UPI_DEVICE void upi_cuda_attn_bwd_scores(const upi_cuda_attn_bwd_args &g, float s[N][4], float dp[N][4],
                                         const upi_cuda_attn_bwd_place &at, const float *lse, uint32_t base,
                                         uint32_t at_q, uint32_t at_dout, int block, int m, int c0)
{
    const int KEYS = shape::KEYS, ROWS = shape::ROWS, ROW = shape::ROW;
    upi_cuda_attn_dots<shape::D, shape::D, N>(s, base + at.row0 * ROW + at.mine, at_q + c0 * ROW + at.mine);
    upi_cuda_attn_dots<shape::D, shape::V, N>(dp, base + shape::AT_V + at.row0 * ROW + at.mine,
                                              at_dout + c0 * ROW + at.mine);
    if (MASKED)
        upi_cuda_attn_bwd_hide_by<N>(s, g.a.runs + (int64_t)block * KEYS + at.row0,
                                     upi_cuda_attn_bwd_keys<shape>(g.a, block) - at.row0, at.lane,
                                     m * ROWS + c0);
    else
        upi_cuda_attn_bwd_hide<shape, N>(
            s, at.row0, at.lane,
            upi_cuda_attn_near((int64_t)m * ROWS + g.a.ahead - (int64_t)block * KEYS, g.a.causal) + c0,
            upi_cuda_attn_bwd_keys<shape>(g.a, block));
    if (MASKED && g.a.squash != 0)
        upi_cuda_attn_bwd_capped<shape, N>(s, dp, lse, g.a, at.lane);
    else
        upi_cuda_attn_bwd_weights<shape, N>(s, dp, lse, g.a.scale, at.lane);
}

/* Packs 16 queries of P and dS, from the tile's c on, as operands of dV and dK, and puts dS, and where warps share keys
 * P too, in shared memory. */
template <class shape>
UPI_DEVICE void upi_cuda_attn_bwd_share(uint32_t p[4], uint32_t ds[4], const float s[2][4],
                                        const float dp[2][4], const upi_cuda_attn_bwd_place &at,
                                        unsigned char *shared, int c)
{
    UPI_UNROLL
    for (int e = 0; e < 4; ++e) {
        const float *from = s[e / 2] + e % 2 * 2, *from_d = dp[e / 2] + e % 2 * 2;
        const uint32_t to = upi_cuda_attn_at<shape::S_ROW>(at.row0 + at.lane / 4 + e % 2 * 8, c / 8 + e / 2) +
                            (uint32_t)(at.lane % 4 * 4);
        p[e] = upi_pack_bf16(from[0], from[1]);
        ds[e] = upi_pack_bf16(from_d[0], from_d[1]);
        *(uint32_t *)(shared + shape::AT_S + to) = ds[e];
        if (shape::SHARES > 1) *(uint32_t *)(shared + shape::AT_P + to) = p[e];
    }
}

/* A tile's S and dP, and what follows of them alone: dS in shared memory; dV and dK, unless warps share keys. */
template <class shape, int MASKED, int N, int M>
UPI_DEVICE void upi_cuda_attn_bwd_tile(const upi_cuda_attn_bwd_args &g, float (&dk)[N][4], float (&dv)[M][4],
                                       const upi_cuda_attn_bwd_place &at, unsigned char *shared,
                                       uint32_t base, uint32_t at_q, uint32_t at_dout, int block, int m,
                                       int slot)
{
    const int ROWS = shape::ROWS, SHARES = shape::SHARES, ROW = shape::ROW;
    const int COLUMNS = MASKED && shape::D == 128 ? 32 : (int)shape::COLUMNS;
    UPI_CUDA_ATTN_TURNS(1)
    for (int part = 0; part < ROWS / SHARES / COLUMNS; ++part) {
        const int c0 = at.share * (ROWS / SHARES) + part * COLUMNS; /* first query, in the tile */
        const float *lse = (const float *)(shared + shape::AT_LSE) + slot * ROWS + c0;
        float s[COLUMNS / 8][4], dp[COLUMNS / 8][4];
        upi_cuda_attn_bwd_scores<shape, MASKED, COLUMNS / 8>(g, s, dp, at, lse, base, at_q, at_dout, block, m,
                                                             c0);
        UPI_UNROLL
        for (int k = 0; k < COLUMNS / 16; ++k) {
            uint32_t p[4], ds[4];
            upi_cuda_attn_bwd_share<shape>(p, ds, s + 2 * k, dp + 2 * k, at, shared, c0 + k * 16);
            if (SHARES == 1) {
                upi_cuda_attn_times<M, 1>(dv, p, at_dout + (c0 + k * 16) * ROW + at.mine);
                upi_cuda_attn_times<N, 1>(dk, ds, at_q + (c0 + k * 16) * ROW + at.mine);
            }
        }
    }
}

/* The gradients of the keys go to memory. Where they lie is made anew, not kept. */
template <class shape, int MASKED, int N, int M>
UPI_DEVICE void upi_cuda_attn_bwd_end(const upi_cuda_attn_bwd_args &g, const float (&dk)[N][4],
                                      const float (&dv)[M][4], int block, int last_head)
{
    const upi_cuda_attn_bwd_place at = upi_cuda_attn_bwd_here<shape>();
    const int last = upi_cuda_attn_anew(block), end = upi_cuda_attn_bwd_keys<shape>(g.a, last);
    const int64_t k0 = (int64_t)last * shape::KEYS;
    const int kv = upi_cuda_attn_anew(last_head) / g.a.group - 1;
    upi_cuda_attn_grad_put<N, shape::SHARES>(dk, g.dk + kv * g.dk_head + k0 * g.dk_stride, g.dk_stride, end,
                                             at.row0, at.share * 16, g.a.d);
    upi_cuda_attn_grad_put<M, shape::SHARES>(dv, g.dv + kv * g.dv_head + k0 * g.dv_stride, g.dv_stride, end,
                                             at.row0, at.share * 16, MASKED ? g.a.v_dim : g.a.d);
}

template <int D, int V, int SMALL, int MASKED>
UPI_KERNEL((upi_cuda_attn_bwd_shape<D, V, SMALL>::THREADS), (upi_cuda_attn_bwd_shape<D, V, SMALL>::BLOCKS))
void upi_cuda_attn_bwd_kernel(const upi_cuda_attn_bwd_args g)
{
    typedef upi_cuda_attn_bwd_shape<D, V, SMALL> shape;
    const int DK = D / shape::SHARES / 8;    /* tiles of 8 columns of dK, a warp's */
    const int DV = V / shape::SHARES / 8;    /* the same of dV */
    const int DQ = D / shape::DQ_SHARES / 8; /* and of dQ */
    UPI_SHARED(unsigned char, shared);
    const uint32_t base = upi_shared_address(shared);
    const int kv_heads = g.a.heads / g.a.group;

    if (threadIdx.x == 0) *(int *)(shared + shape::AT_S) = atomicAdd(g.turns, 1);
    __syncthreads();
    const int ticket = *(const int *)(shared + shape::AT_S);
    const int block = ticket / kv_heads, kv = ticket % kv_heads; /* fewer keys ahead, earlier ticket */
    const int last_head = (kv + 1) * g.a.group;
    const upi_cuda_attn_bwd_tiles range =
        upi_cuda_attn_bwd_tiles_of<shape::KEYS, shape::ROWS, MASKED>(g, block);
    upi_cuda_attn_bwd_zeros<shape, MASKED>(g, kv, block, range);
    if (range.first >= range.end) return;

    int h = kv * g.a.group, m = range.end - 1, slot = 0;
    float dk[DK][4], dv[DV][4], stats[2];
    upi_cuda_attn_bwd_begin<shape, MASKED>(g, dk, dv, stats, shared, block, kv, h, m);
    while (h < last_head) {
        const upi_cuda_attn_bwd_place at = upi_cuda_attn_bwd_here<shape>();
        const int now = upi_cuda_attn_anew(block);
        const upi_cuda_attn_bwd_tiles mine =
            upi_cuda_attn_bwd_tiles_of<shape::KEYS, shape::ROWS, MASKED>(g, now);
        const int next_h = m > mine.first ? h : h + 1, next_m = m > mine.first ? m - 1 : mine.end - 1;
        const uint32_t at_q = base + shape::AT_Q + slot * shape::TILE;
        const uint32_t at_dout = (shape::DOUT_SLOTS > 1 ? at_q - shape::AT_Q : base) + shape::AT_DOUT;
        if (next_h < last_head) {
            upi_cuda_attn_bwd_load_q<shape>(g, base, next_h, next_m, slot ^ 1);
            if (shape::DOUT_SLOTS > 1)
                upi_cuda_attn_bwd_load_dout<shape, MASKED>(g, base, next_h, next_m, slot ^ 1);
            upi_copy_commit();
        }
        upi_cuda_attn_bwd_tile<shape, MASKED>(g, dk, dv, at, shared, base, at_q, at_dout, now, m, slot);
        __syncthreads(); /* dS is there */
        /* One thread asks for the turn, while the others multiply; another gives it on. Barriers between make the
         * acquire of the one, and the release of the other, stand for all. */
        if (threadIdx.x == 32 && !upi_cuda_attn_bwd_is_first<shape, MASKED>(g, m, now))
            while (upi_load_acquire(upi_cuda_attn_bwd_turn(g, h, m)) != now) upi_pause();
        if (next_h < last_head) upi_cuda_attn_bwd_stats<shape>(g, next_h, next_m, stats);
        if (shape::SHARES > 1) upi_cuda_attn_bwd_times_shared<shape>(dk, dv, base, at_q, at_dout);
        if (shape::DOUT_SLOTS == 1) {
            __syncthreads(); /* every warp is through with dO: the next one comes while dQ is computed */
            if (next_h < last_head) upi_cuda_attn_bwd_load_dout<shape, MASKED>(g, base, next_h, next_m, 0);
            upi_copy_commit();
        }
        {
            float dq[DQ][4];
            upi_cuda_attn_bwd_dq<shape, DQ>(dq, base);
            if (next_h < last_head) upi_cuda_attn_bwd_keep<shape>(shared, slot ^ 1, stats);
            const int is_first = upi_cuda_attn_bwd_is_first<shape, MASKED>(g, m, now);
            const int is_last = upi_cuda_attn_bwd_is_last<shape, MASKED>(g, m, now);
            __syncthreads(); /* it is the block's turn */
            upi_cuda_attn_bwd_add<shape, DQ>(g, dq, h, m, is_first, is_last);
            upi_copy_wait<0>();
            __syncthreads(); /* every warp is through with the tile, has added, and the next one is there */
            if (threadIdx.x == 0 && !is_last)
                upi_add_release(upi_cuda_attn_bwd_turn(g, h, m), is_first ? now + 1 : 1);
        }
        h = next_h, m = next_m, slot ^= 1;
    }
    upi_cuda_attn_bwd_end<shape, MASKED>(g, dk, dv, block, last_head);
}

/* ---- host ---- */

template <int D, int V, int SMALL, int MASKED>
UPIPE_API upipe_status upi_cuda_attn_bwd_launch(upipe_ctx *c, const upipe_attn *call,
                                                upi_cuda_attn_bwd_args *g)
{
    typedef upi_cuda_attn_bwd_shape<D, V, SMALL> shape;
    const int64_t blocks = upi_cuda_attn_key_blocks(g->a.keys, shape::KEYS);
    const int64_t heads = g->a.heads / g->a.group;
    UPIPE_TRY(upi_cuda_attn_fits(c, upi_cuda_attn_columns(call), shape::SHARED, blocks, heads));
    UPIPE_TRY(UPI_ALLOW_SHARED(c, (upi_cuda_attn_bwd_kernel<D, V, SMALL, MASKED>), shape::SHARED));
    UPIPE_CUDA_TRY(&c->err,
                   cudaMemsetAsync(g->turns, 0, upi_cuda_attn_turns_bytes(call), (cudaStream_t)c->stream));
    if (MASKED) UPIPE_TRY(upi_cuda_attn_key_runs(c, call, (upi_cuda_attn_run *)g->a.runs));
    g->blocks = (int)blocks;
    return UPI_LAUNCH(c, (upi_cuda_attn_bwd_kernel<D, V, SMALL, MASKED>), (unsigned)(blocks * heads),
                      shape::THREADS, shape::SHARED, *g);
}

/* The small tile where the other one does not fit: of whole rows, for what other kernels would save there is little. */
template <int D, int V, int MASKED>
UPIPE_API upipe_status upi_cuda_attn_bwd_fitting(upipe_ctx *c, const upipe_attn *call,
                                                 upi_cuda_attn_bwd_args *g)
{
    const int most = ((const upipe_cuda *)c->ops->self)->shared_most, row = upi_cuda_attn_row<D>::COLUMNS;
    if (upi_cuda_attn_bwd_shape<D, V, 0>::SHARED > most)
        return upi_cuda_attn_bwd_launch<row, row, 1, MASKED>(c, call, g);
    return upi_cuda_attn_bwd_launch<D, V, 0, MASKED>(c, call, g);
}

template <int MASKED>
UPIPE_API upipe_status upi_cuda_attn_bwd_any(upipe_ctx *c, const upipe_attn *call, upi_cuda_attn_bwd_args *g)
{
    if (upi_cuda_attn_columns(call) <= 64) return upi_cuda_attn_bwd_launch<64, 64, 0, MASKED>(c, call, g);
    if (upi_cuda_attn_columns(call) <= 96) return upi_cuda_attn_bwd_fitting<96, 96, MASKED>(c, call, g);
    if (upi_cuda_attn_columns(call) <= 128) return upi_cuda_attn_bwd_fitting<128, 128, MASKED>(c, call, g);
    if (upi_cuda_attn_columns(call) <= 192) return upi_cuda_attn_bwd_fitting<192, 192, MASKED>(c, call, g);
    return upi_cuda_attn_bwd_fitting<256, 256, MASKED>(c, call, g);
}

/* The backward but for the sinks' gradients, of a call without padding. */
UPIPE_API upipe_status upi_cuda_attn_bwd_inside(upipe_ctx *c, const upipe_attn_grad *g)
{
    const upipe_attn *a = &g->a;
    const int masked = upi_cuda_attn_masked(a);
    char *tables = (char *)a->work + upi_cuda_attn_turns_bytes(a);
    upi_cuda_attn_bwd_args x;
    const char *obstacle;
    if (a->q.dtype == UPIPE_F32) {
        upi_cuda_attn_chosen(c, "backward", "f32", NULL);
        return upi_cuda_attn_f32_bwd(c, g);
    }
    UPIPE_TRY(upi_cuda_attn_check(c, a));
    UPIPE_TRY(upi_cuda_attn_aligned(c, "dout", g->dout));
    UPIPE_TRY(upi_cuda_attn_aligned(c, "dq", g->dq));
    UPIPE_TRY(upi_cuda_attn_aligned(c, "dk", g->dk));
    UPIPE_TRY(upi_cuda_attn_aligned(c, "dv", g->dv));
    if (a->q.n == 0) return UPIPE_OK;
    memset(&x, 0, sizeof x);
    x.a = upi_cuda_attn_args_make(a);
    x.a.merge = a->merge;
    x.a.runs = masked ? (const upi_cuda_attn_run *)tables : NULL;
    x.dout = (const upi_bf16 *)g->dout.data;
    x.delta = (const float *)g->delta.data;
    x.dk = (float *)g->dk.data;
    x.dv = (float *)g->dv.data;
    x.dout_stride = g->dout.n_stride, x.dout_head = g->dout.h_stride;
    x.delta_stride = g->delta.n_stride, x.delta_head = g->delta.h_stride;
    x.dk_stride = g->dk.n_stride, x.dk_head = g->dk.h_stride;
    x.dv_stride = g->dv.n_stride, x.dv_head = g->dv.h_stride;
    x.turns = (int *)a->work;
    x.tiles = (int)upi_cuda_attn_query_tiles(a);
    if (a->merge) {
        x.dq_sum = (float *)g->dq.data;
        x.dq_sum_stride = g->dq.n_stride, x.dq_sum_head = g->dq.h_stride;
    } else {
        x.dq_sum = (float *)(tables + (masked ? upi_cuda_attn_runs_bytes(a->k.n) : 0));
        x.dq_sum_stride = a->q.d, x.dq_sum_head = a->q.n * a->q.d;
        x.dq = (upi_bf16 *)g->dq.data;
        x.dq_stride = g->dq.n_stride, x.dq_head = g->dq.h_stride;
    }
    obstacle = upi_cuda_bwd90_obstacle(c, g);
    upi_cuda_attn_chosen(c, "backward", obstacle == NULL ? "9.0" : "8.0", obstacle);
    if (obstacle == NULL) {
        if (!upi_cuda_attn_ranged(a)) x.a.runs = NULL;
        return upi_cuda_attn_bwd90(c, g, &x);
    }
    if (upi_cuda_attn_is_192_128(a)) return upi_cuda_attn_bwd_fitting<192, 128, 1>(c, a, &x);
    return masked ? upi_cuda_attn_bwd_any<1>(c, a, &x) : upi_cuda_attn_bwd_any<0>(c, a, &x);
}

/* Entry of the table. */
UPIPE_API upipe_status upi_cuda_attn_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    const upipe_attn_grad inside = upi_cuda_attn_grad_inside(g);
    UPIPE_TRY(upi_cuda_attn_check_masks(c, &g->a));
    UPIPE_TRY(upi_cuda_attn_bwd_inside(c, &inside));
    UPIPE_TRY(upi_cuda_attn_padding_bwd(c, g));
    return upi_cuda_attn_sink_bwd(c, g);
}

#endif
