/* upipe_cuda_attn_bwd90.h -- attention backward with what Hopper added
 *
 * The contract, scratch and masks of upipe_cuda_attn_bwd.h, for compute capability 9.0. A block takes 128
 * keys (64 above head dim 128) of one key/value head, and every query that sees them of all the heads of the
 * group, in tiles of 64 (128 at head dims to 64). Two warpgroups compute, everything transposed:
 *
 *     S^T = K Q^T     P^T = exp(scale S^T - lse)     dP^T = V dO^T     dS^T = scale P^T (dP^T - delta)
 *     dV += P^T dO    dK += dS^T Q                   dQ = dS K
 *
 * To head dim 128 they have 64 keys each. P^T and dS^T are operands as they lie in registers; dS goes through
 * shared memory besides, where both warpgroups find all of it, and each computes one half of dQ: of its
 * columns, or of its rows. Products run behind one another: dP under the making of P, dV under that of dS, dK
 * under the storing of dQ, and the next tile's S behind dK.
 *
 * Above, dK and dV of 128 keys would take all registers there are. The warpgroups share 64 keys: each makes P
 * and dS of 32 of the tile's queries, both go through shared memory, and each has one half of the columns of
 * dV, dK and dQ.
 *
 * A third warpgroup has a warp for each other thing: one loads K, V, and Q and dO through rings of two slots
 * (one for dO above head dim 128); one brings lse and delta, whose strides TMA can't take; one hands dQ to the
 * sums in global memory, which TMA adds to, in the order of the keys: in f32, the first block of a tile of
 * queries stores, the others add when it is their turn, as upipe_cuda_attn_bwd.h says, and for the same
 * reasons without deadlock and with the same bits under any schedule. A second kernel makes bf16 of the sums;
 * nobody adds to tiles that see no key, and they become zeros there. With merge all add to dq, and that is
 * all. (TMA adds flush numbers below 2^-126 to zero.) One watches the barriers, where the host asks for it
 * (upipe_cuda_attn_watch.h).
 */
#ifndef UPIPE_CUDA_ATTN_BWD90_H
#define UPIPE_CUDA_ATTN_BWD90_H

#include "upipe_cuda_attn_step.h"
#include "upipe_cuda_attn_watch.h"

/* How the consumers divide a tile: by keys, or by queries and columns. */
template <int BY_KEYS> struct upi_cuda_bwd90_division {
};

/* The columns of a row: all of them, or a half for each consumer. */
template <int DIM, int BY_KEYS> struct upi_cuda_bwd90_columns {
    enum {
        ALL = DIM,
        EACH = BY_KEYS ? DIM : DIM / 2, /* of a gradient, a consumer's */
        PART = (EACH + 63) / 64,        /* panels of so many columns, which begin at one */
        PANELS = DIM / EACH * PART
    };
};

/* D columns of queries and keys, V of values. */
template <int Q_DIM, int V_DIM> struct upi_cuda_bwd90_shape {
    enum { D = Q_DIM, V = V_DIM, BY_KEYS = D <= 128 };
    typedef upi_cuda_bwd90_division<BY_KEYS> division;
    typedef upi_cuda_bwd90_columns<D, BY_KEYS> of_k; /* and of Q */
    typedef upi_cuda_bwd90_columns<V, BY_KEYS> of_v; /* and of dO */
    enum {
        CONSUMERS = 2,
        THREADS = 128 * (CONSUMERS + 1),
        KEYS = BY_KEYS ? 64 * CONSUMERS : 64,
        ROWS = D > 64 ? 64 : 128,               /* queries in a tile */
        APART = BY_KEYS ? 64 : (int)of_k::EACH, /* columns between the consumers' dQ, above head dim 64 */
        ROUNDS = BY_KEYS ? 1 : (int)of_k::PART, /* in which a consumer passes on its part of dQ */
        HELPER_REGISTERS = 24,
        REGISTERS = 240,
        Q_TILE = ROWS * of_k::PANELS * 128, /* bytes */
        DOUT_TILE = ROWS * of_v::PANELS * 128,
        DOUT_SLOTS = BY_KEYS ? 2 : 1,
        DQ_SLOTS = BY_KEYS ? 2 : 1,
        DS = KEYS * ROWS * 2,
        P = BY_KEYS ? 0 : DS,
        DQ = 64 * 64 * 4, /* of a consumer and round */
        AT_V = KEYS * of_k::PANELS * 128,
        AT_Q = AT_V + KEYS * of_v::PANELS * 128, /* two slots, and so of dS */
        AT_DOUT = AT_Q + 2 * Q_TILE,
        AT_DS = AT_DOUT + DOUT_SLOTS * DOUT_TILE,
        AT_P = AT_DS + 2 * DS,
        AT_DQ = AT_P + P,
        AT_LSE = AT_DQ + DQ_SLOTS * CONSUMERS * DQ, /* two slots of lse and delta */
        AT_BARRIERS = AT_LSE + 4 * ROWS * 4,
        AT_TICKET = AT_BARRIERS + 14 * 8,
        AT_EXACT = AT_TICKET + 4, /* two slots of a flag */
        SHARED = AT_EXACT + 12
    };
};

typedef struct upi_cuda_bwd90_args {
    upi_tensor_map q, k, v, dout, dq; /* dq: the sums, or dq with merge */
    upi_cuda_attn_bwd_args g;
    void *watch; /* upipe_cuda.watch */
} upi_cuda_bwd90_args;

/* Barriers, as they lie behind the tiles: two of each, of the slots; one of others. Where dO or dQ has one
 * slot, only the first is used. Their names are in upi_cuda_watch_name. */
enum {
    UPI_BWD90_Q_FULL = 0,   /* Q, lse and delta */
    UPI_BWD90_Q_EMPTY = 16, /* and dO, whose products end earlier, where it has two slots */
    UPI_BWD90_DOUT_FULL = 32,
    UPI_BWD90_K_FULL = 48,
    UPI_BWD90_V_FULL = 56,
    UPI_BWD90_DQ_FULL = 64,
    UPI_BWD90_DQ_EMPTY = 80,
    UPI_BWD90_DOUT_EMPTY = 96, /* of the one slot */
    UPI_BWD90_DONE = 104       /* the last sum of dQ is in memory: nobody waits for anybody any more */
};

/* What a block works on. */
typedef struct upi_cuda_bwd90_place {
    uint32_t base; /* of shared memory */
    int block, kv;
    upi_cuda_attn_bwd_tiles tiles;
    int count; /* tiles of all heads of the group */
} upi_cuda_bwd90_place;

/* A tile of a block, in the order in which all of its warps take them: heads up, queries down. */
typedef struct upi_cuda_bwd90_tile {
    int n, h, m; /* number, head, tile of queries */
} upi_cuda_bwd90_tile;

template <class shape>
UPI_DEVICE upi_cuda_attn_bwd_tiles upi_cuda_bwd90_tiles(const upi_cuda_attn_bwd_args &g, int block)
{
    return g.a.runs != NULL ? upi_cuda_attn_bwd_tiles_of<shape::KEYS, shape::ROWS, 1>(g, block)
                            : upi_cuda_attn_bwd_tiles_of<shape::KEYS, shape::ROWS, 0>(g, block);
}

UPI_DEVICE upi_cuda_bwd90_tile upi_cuda_bwd90_first(const upi_cuda_bwd90_place &b, int group)
{
    const upi_cuda_bwd90_tile x = {0, b.kv * group, b.tiles.end - 1};
    return x;
}

UPI_DEVICE void upi_cuda_bwd90_next(const upi_cuda_bwd90_place &b, upi_cuda_bwd90_tile *x)
{
    ++x->n;
    if (--x->m >= b.tiles.first) return;
    x->m = b.tiles.end - 1;
    ++x->h;
}

/* A barrier of the slot of two that has tile number n, and the parity of the phase in which the tile fills
 * it. */
UPI_DEVICE uint32_t upi_cuda_bwd90_slot(uint32_t barriers, int n)
{
    return barriers + (uint32_t)n % 2 * 8;
}
UPI_DEVICE uint32_t upi_cuda_bwd90_parity(int n)
{
    return (uint32_t)n / 2 % 2;
}

/* The same of dO. */
template <class shape> UPI_DEVICE uint32_t upi_cuda_bwd90_dout_full(uint32_t barriers, int n)
{
    return upi_cuda_bwd90_slot(barriers + UPI_BWD90_DOUT_FULL, n % shape::DOUT_SLOTS);
}
template <class shape> UPI_DEVICE uint32_t upi_cuda_bwd90_dout_parity(int n)
{
    return (uint32_t)(n / shape::DOUT_SLOTS) % 2;
}
template <class shape> UPI_DEVICE uint32_t upi_cuda_bwd90_at_dout(int n)
{
    return shape::AT_DOUT + (uint32_t)(n % shape::DOUT_SLOTS * shape::DOUT_TILE);
}

/* The same of dQ, which is passed on in `ROUNDS` rounds a tile; r counts rounds. */
template <class shape> UPI_DEVICE uint32_t upi_cuda_bwd90_dq_barrier(uint32_t barriers, int r)
{
    return upi_cuda_bwd90_slot(barriers, r % shape::DQ_SLOTS);
}
template <class shape> UPI_DEVICE uint32_t upi_cuda_bwd90_dq_parity(int r)
{
    return (uint32_t)(r / shape::DQ_SLOTS) % 2;
}
template <class shape> UPI_DEVICE uint32_t upi_cuda_bwd90_at_dq(int r)
{
    return shape::AT_DQ + (uint32_t)(r % shape::DQ_SLOTS * shape::CONSUMERS * shape::DQ);
}

/* ---- the helpers ---- */

/* `rows` rows of one head, panel by panel. A part of 96 columns fills its second panel to the half; what lies
 * behind, zeros or columns of the next part, no product reads but that of dQ by keys, which drops it. */
template <class of, int ROWS>
UPI_DEVICE void upi_cuda_bwd90_load(uint32_t to, const upi_tensor_map *map, int row, int head, uint32_t full)
{
    upi_mbarrier_arrive_expect(full, ROWS * of::PANELS * 128);
    UPI_UNROLL
    for (int c = 0; c < of::PANELS; ++c)
        upi_tma_load(to + c * ROWS * 128, map, c / of::PART * of::EACH + c % of::PART * 64, row, head, full);
}

/* K, V, and every tile of Q and dO; one thread. */
template <class shape>
UPI_DEVICE void upi_cuda_bwd90_produce(const upi_cuda_bwd90_args &x, const upi_cuda_bwd90_place &b)
{
    const uint32_t bars = b.base + shape::AT_BARRIERS;
    upi_cuda_bwd90_load<typename shape::of_k, shape::KEYS>(b.base, &x.k, b.block * shape::KEYS, b.kv,
                                                           bars + UPI_BWD90_K_FULL);
    UPI_CUDA_ATTN_TURNS(1)
    for (upi_cuda_bwd90_tile t = upi_cuda_bwd90_first(b, x.g.a.group); t.n < b.count;
         upi_cuda_bwd90_next(b, &t)) {
        upi_mbarrier_wait(upi_cuda_bwd90_slot(bars + UPI_BWD90_Q_EMPTY, t.n), upi_cuda_bwd90_parity(t.n) ^ 1);
        upi_cuda_bwd90_load<typename shape::of_k, shape::ROWS>(
            b.base + shape::AT_Q + (uint32_t)t.n % 2 * shape::Q_TILE, &x.q, t.m * shape::ROWS, t.h,
            upi_cuda_bwd90_slot(bars + UPI_BWD90_Q_FULL, t.n));
        if (t.n == 0)
            upi_cuda_bwd90_load<typename shape::of_v, shape::KEYS>(
                b.base + shape::AT_V, &x.v, b.block * shape::KEYS, b.kv, bars + UPI_BWD90_V_FULL);
        if (shape::DOUT_SLOTS == 1)
            upi_mbarrier_wait(bars + UPI_BWD90_DOUT_EMPTY, upi_cuda_bwd90_dout_parity<shape>(t.n) ^ 1);
        upi_cuda_bwd90_load<typename shape::of_v, shape::ROWS>(b.base + upi_cuda_bwd90_at_dout<shape>(t.n),
                                                               &x.dout, t.m * shape::ROWS, t.h,
                                                               upi_cuda_bwd90_dout_full<shape>(bars, t.n));
    }
}

/* lse, times log2(e), and delta of every tile; one warp. Of a tile with huge scores, or under a soft-cap, lse
 * comes as it is, and a flag says so. */
template <class shape>
UPI_DEVICE void upi_cuda_bwd90_stats(const upi_cuda_attn_bwd_args &g, const upi_cuda_bwd90_place &b,
                                     unsigned char *shared)
{
    const uint32_t bars = b.base + shape::AT_BARRIERS;
    const int lane = (int)threadIdx.x % 32;
    UPI_CUDA_ATTN_TURNS(1)
    for (upi_cuda_bwd90_tile t = upi_cuda_bwd90_first(b, g.a.group); t.n < b.count;
         upi_cuda_bwd90_next(b, &t)) {
        float *to = (float *)(shared + shape::AT_LSE) + t.n % 2 * 2 * shape::ROWS + lane;
        int exact = g.a.squash != 0;
        upi_mbarrier_wait(upi_cuda_bwd90_slot(bars + UPI_BWD90_Q_EMPTY, t.n), upi_cuda_bwd90_parity(t.n) ^ 1);
        UPI_UNROLL
        for (int i = 0; i < shape::ROWS / 32; ++i) {
            const int row = t.m * shape::ROWS + i * 32 + lane;
            float lse = INFINITY, delta = 0; /* a row beyond the last weighs every key 0 */
            if (row < g.a.queries) {
                lse = g.a.lse[row * g.a.lse_stride + t.h * g.a.lse_head];
                delta = g.delta[row * g.delta_stride + t.h * g.delta_head];
            }
            if (lse == -INFINITY) lse = INFINITY; /* and so does one that saw no key */
            exact |= lse != INFINITY && upi_cuda_attn_huge(lse);
            to[i * 32] = lse;
            to[shape::ROWS + i * 32] = delta;
        }
        exact = __any_sync(0xffffffffu, exact);
        for (int i = 0; i < shape::ROWS / 32 && !exact; ++i) to[i * 32] *= UPI_CUDA_ATTN_LOG2E;
        if (lane == 0) ((int *)(shared + shape::AT_EXACT))[t.n % 2] = exact;
        __syncwarp();
        if (lane == 0) upi_mbarrier_arrive(upi_cuda_bwd90_slot(bars + UPI_BWD90_Q_FULL, t.n));
    }
}

/* A tile's sum is in memory, the wait having been a fence between the proxies too: the place of its last round is
 * the consumers', and the block after may add. */
template <class shape> UPI_DEVICE void upi_cuda_bwd90_pass_on(uint32_t bars, int n, int *turn, int add)
{
    const int r = (n + 1) * shape::ROUNDS - 1;
    upi_mbarrier_arrive(upi_cuda_bwd90_dq_barrier<shape>(bars + UPI_BWD90_DQ_EMPTY, r));
    upi_add_release(turn, add);
}

/* dQ of every tile to where it is summed, when it is the block's turn; one thread. It asks for the next turn
 * while a sum is on its way. Where turn and tile are there already, the tile goes first, so that sums overlap;
 * otherwise the block after gets its turn as soon as the sum is there, and not when the next tile has gone.
 *
 * A wait that its place has been read may last as long as one for the sum: both are one machine instruction. So a
 * place goes back with the turn of its tile, and the newest sum is waited for where nothing else can be done. Only
 * between two rounds of a tile, which share a place, is there a wait for reads. */
template <class shape>
UPI_DEVICE void upi_cuda_bwd90_sum(const upi_cuda_bwd90_args &x, const upi_cuda_bwd90_place &b)
{
    const uint32_t bars = b.base + shape::AT_BARRIERS;
    const int old =
        b.block > 0 ? upi_cuda_bwd90_tiles<shape>(x.g, b.block - 1).end : 0; /* others have these */
    int *before = NULL, add = 0; /* the turn of the tile whose sum is on its way, and what gives it on */
    UPI_CUDA_ATTN_TURNS(1)
    for (upi_cuda_bwd90_tile t = upi_cuda_bwd90_first(b, x.g.a.group); t.n < b.count;
         upi_cuda_bwd90_next(b, &t)) {
        int *turn = x.g.turns + 1 + (int64_t)t.h * x.g.tiles + t.m;
        const int is_first = t.m >= old;
        int mine = is_first || upi_load_acquire(turn) == b.block;
        if (before != NULL &&
            !(shape::DQ_SLOTS > 1 && mine &&
              upi_mbarrier_test(upi_cuda_bwd90_dq_barrier<shape>(bars + UPI_BWD90_DQ_FULL, t.n),
                                upi_cuda_bwd90_dq_parity<shape>(t.n)))) {
            upi_bulk_wait<0>(); /* nothing else is to be done */
            upi_cuda_bwd90_pass_on<shape>(bars, t.n - 1, before, add);
            before = NULL;
        }
        for (; !mine; mine = upi_load_acquire(turn) == b.block) upi_pause();
        upi_fence_async_global();
        UPI_CUDA_ATTN_TURNS(1)
        for (int round = 0; round < shape::ROUNDS; ++round) {
            const int r = t.n * shape::ROUNDS + round;
            upi_mbarrier_wait(upi_cuda_bwd90_dq_barrier<shape>(bars + UPI_BWD90_DQ_FULL, r),
                              upi_cuda_bwd90_dq_parity<shape>(r));
            UPI_UNROLL
            for (int i = 0; i < 4; ++i) { /* two panels of each consumer */
                const uint32_t from = b.base + upi_cuda_bwd90_at_dq<shape>(r) + i * (shape::DQ / 2);
                const int part = round * 64 + i % 2 * 32,
                          column = (shape::D > 64 ? i / 2 * shape::APART : 0) + part;
                const int row = t.m * shape::ROWS + (shape::D > 64 ? 0 : i / 2 * 64);
                if (part >= shape::APART || column >= x.g.a.d) continue;
                if (is_first && !x.g.a.merge)
                    upi_tma_store(&x.dq, column, row, t.h, from);
                else
                    upi_tma_add(&x.dq, column, row, t.h, from);
            }
            upi_bulk_commit();
            if (round == shape::ROUNDS - 1) break;
            upi_bulk_wait_read<0>();
            upi_mbarrier_arrive(upi_cuda_bwd90_dq_barrier<shape>(bars + UPI_BWD90_DQ_EMPTY, r));
        }
        if (before != NULL) {
            upi_bulk_wait<1>(); /* the sum before */
            upi_cuda_bwd90_pass_on<shape>(bars, t.n - 1, before, add);
        }
        before = turn;
        add = is_first ? b.block + 1 : 1;
    }
    upi_bulk_wait<0>(); /* the last sum */
    upi_cuda_bwd90_pass_on<shape>(bars, b.count - 1, before, add);
    upi_mbarrier_arrive(bars + UPI_BWD90_DONE);
}

/* ---- consumers ---- */

/* A thread's first key of its consumer's; the second lies 8 below. */
UPI_DEVICE int upi_cuda_bwd90_row(void)
{
    return upi_cuda_attn_anew((int)threadIdx.x) % 128 / 32 * 16 + (int)threadIdx.x % 32 / 4;
}

/* Starts s [64 keys][N queries] = kept rows times those of a tile: K Q^T, V dO^T. */
template <class shape, class of, int N>
UPI_DEVICE void upi_cuda_bwd90_dots(float *s, uint32_t at_kept, uint32_t at_tile)
{
    const uint64_t kept = upi_wgmma_rows(at_kept), tile = upi_wgmma_rows(at_tile);
    const int steps = of::EACH / 16; /* of a part */
    upi_wgmma_fence();
    UPI_UNROLL
    for (int i = 0; i < of::ALL / 16; ++i) {
        const int panel = i / steps * of::PART + i % steps / 4, column = i % steps % 4 * 32;
        upi_wgmma_ss<N, 0, 0>(s, upi_wgmma_further(kept, panel * shape::KEYS * 128 + column),
                              upi_wgmma_further(tile, panel * shape::ROWS * 128 + column), i > 0);
    }
    upi_wgmma_commit();
}

/* Starts out [64 keys][columns] += x [64 keys][ROWS] times a tile: P^T dO, dS^T Q. */
template <class shape, class of>
UPI_DEVICE void upi_cuda_bwd90_times(float *out, const uint32_t *x, uint32_t at_tile)
{
    const uint64_t tile = upi_wgmma_columns(at_tile, shape::ROWS * 128);
    upi_wgmma_fence();
    UPI_UNROLL
    for (int i = 0; i < shape::ROWS / 16; ++i)
        upi_wgmma_rs<of::ALL, 1>(out, x + 4 * i, upi_wgmma_further(tile, i * 16 * 128), 1);
    upi_wgmma_commit();
}

/* The same out of shared memory, for the consumer's columns. */
template <class shape, class of>
UPI_DEVICE void upi_cuda_bwd90_times_shared(float *out, uint32_t at_x, uint32_t at_tile, int group)
{
    const uint32_t columns = (uint32_t)group * of::PART * shape::ROWS * 128;
    const uint64_t x = upi_wgmma_rows(at_x), tile = upi_wgmma_columns(at_tile + columns, shape::ROWS * 128);
    upi_wgmma_fence();
    UPI_UNROLL
    for (int i = 0; i < shape::ROWS / 16; ++i)
        upi_wgmma_ss<of::EACH, 0, 1>(out, upi_wgmma_further(x, i * 32), upi_wgmma_further(tile, i * 16 * 128),
                                     1);
    upi_wgmma_commit();
}

/* Starts dq [64][64], the consumer's half: dS K. */
template <class shape> UPI_DEVICE void upi_cuda_bwd90_dq(float *dq, uint32_t at_ds, uint32_t at_k, int group)
{
    const uint32_t half = (uint32_t)group * shape::KEYS * 128;
    const uint64_t ds = upi_wgmma_columns(at_ds + (shape::D > 64 ? 0 : half), shape::KEYS * 128);
    const uint64_t k = upi_wgmma_columns(at_k + (shape::D > 64 ? half : 0), shape::KEYS * 128);
    upi_wgmma_fence();
    UPI_UNROLL
    for (int i = 0; i < shape::KEYS / 16; ++i)
        upi_wgmma_ss<64, 1, 1>(dq, upi_wgmma_further(ds, i * 16 * 128), upi_wgmma_further(k, i * 16 * 128),
                               i > 0);
    upi_wgmma_commit();
}

/* The same where it is half of the columns: [64][of_k::EACH]. */
template <class shape>
UPI_DEVICE void upi_cuda_bwd90_dq_columns(float *dq, uint32_t at_ds, uint32_t at_k, int group)
{
    const uint32_t columns = (uint32_t)group * shape::of_k::PART * shape::KEYS * 128;
    const uint64_t ds = upi_wgmma_columns(at_ds, shape::KEYS * 128);
    const uint64_t k = upi_wgmma_columns(at_k + columns, shape::KEYS * 128);
    upi_wgmma_fence();
    UPI_UNROLL
    for (int i = 0; i < shape::KEYS / 16; ++i)
        upi_wgmma_ss<shape::of_k::EACH, 1, 1>(dq, upi_wgmma_further(ds, i * 16 * 128),
                                              upi_wgmma_further(k, i * 16 * 128), i > 0);
    upi_wgmma_commit();
}

/* Whether each of the `rows` queries from q0 sees all of the consumer's keys, from k0 on. */
UPI_DEVICE int upi_cuda_bwd90_whole(const upi_cuda_attn_args &a, int64_t k0, int64_t q0, int rows)
{
    if (k0 + 64 > a.keys) return 0;
    if (a.runs != NULL) {
        const upi_cuda_attn_run all = upi_cuda_attn_all(a.runs, k0, 64, a.keys);
        return q0 >= all.first && q0 + rows <= all.end;
    }
    return !a.causal || k0 + 63 <= q0 + a.ahead;
}

/* Hides keys from the queries that don't see them. Cold: what it needs is made anew, not kept in
 * registers. */
template <int ROWS> UPI_DEVICE void upi_cuda_bwd90_hide(float *s, const upi_cuda_attn_args &a, int k0, int q0)
{
    const int column = (int)threadIdx.x % 4 * 2;
    UPI_UNROLL
    for (int half = 0; half < 2; ++half) {
        const int key = upi_cuda_attn_anew(k0) + upi_cuda_bwd90_row() + half * 8;
        int low = ROWS, high = ROWS; /* columns in between see the key */
        if (key < a.keys && a.runs != NULL) {
            low = a.runs[key].first - q0;
            high = a.runs[key].end - q0;
        } else if (key < a.keys) {
            low = a.causal ? upi_cuda_attn_near(key - a.ahead - q0, 1) : 0;
        }
        upi_cuda_attn_hide<ROWS>(s, half, low - column, high - column);
    }
}

/* How weights are computed: by one FMA; by a difference first, as scores are huge; of capped scores. */
enum { UPI_BWD90_PLAIN = 0, UPI_BWD90_EXACT = 1, UPI_BWD90_CAPPED = 2 };

/* Products s become weights, which p gets as operands, times the slope of the score: what dP - delta is
 * multiplied with. */
template <int ROWS, int KIND>
UPI_DEVICE void upi_cuda_bwd90_weigh(float *s, uint32_t *p, const float *lse, const upi_cuda_attn_args &a)
{
    UPI_UNROLL
    for (int j = 0; j < ROWS / 8; ++j) {
        const upi_cuda_attn_pair minus = *(const upi_cuda_attn_pair *)(lse + j * 8);
        UPI_UNROLL
        for (int half = 0; half < 2; ++half) {
            float *x = s + 4 * j + 2 * half, w[2];
            UPI_UNROLL
            for (int e = 0; e < 2; ++e) {
                const float score = KIND == UPI_BWD90_CAPPED ? x[e] * a.squash : x[e];
                float slope = a.slope;
                const float t = KIND == UPI_BWD90_CAPPED ? upi_cuda_attn_tanh(score, &slope) : score;
                const float lse_of = e == 0 ? minus.x : minus.y;
                w[e] = upi_exp2(KIND == UPI_BWD90_PLAIN ? fmaf(t, a.rate, -lse_of)
                                                        : fmaf(t, a.scale, -lse_of) * UPI_CUDA_ATTN_LOG2E);
                if (KIND == UPI_BWD90_CAPPED && score == -INFINITY) w[e] = 0;
                x[e] = w[e] * slope;
            }
            p[2 * j + half] = upi_pack_bf16(w[0], w[1]);
        }
    }
}

/* The scores' gradients of ROWS queries, as operands. The difference comes first: of a row that sees one key it
 * is 0. */
template <int ROWS>
UPI_DEVICE void upi_cuda_bwd90_slopes(uint32_t *ds, const float *s, const float *dp, const float *delta)
{
    UPI_UNROLL
    for (int j = 0; j < ROWS / 8; ++j) {
        const upi_cuda_attn_pair minus = *(const upi_cuda_attn_pair *)(delta + j * 8);
        UPI_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int i = 4 * j + 2 * half;
            ds[i / 2] = upi_pack_bf16(s[i] * (dp[i] - minus.x), s[i + 1] * (dp[i + 1] - minus.y));
        }
    }
}

/* Operands of 64 keys and ROWS queries go to shared memory: a panel of 64 queries, keys are its rows. From
 * row `key` and chunk `chunk` of eight queries on; chunks of a row lie at XORs of its first. */
template <int ROWS>
UPI_DEVICE void upi_cuda_bwd90_share(uint32_t panel, const uint32_t *x, int key, int chunk)
{
    const int thread = upi_cuda_attn_anew((int)threadIdx.x) % 128;
    const uint32_t to =
        panel + upi_panel_at(64, key + thread / 32 * 16 + thread % 16, chunk + thread % 32 / 16);
    UPI_UNROLL
    for (int i = 0; i < ROWS / 8; i += 2) upi_store_matrix4(to ^ i * 16, x + 2 * i);
}

/* `columns`, at most 64, of the consumer's half of dQ, round r, go to its place in shared memory, as panels of
 * 32. Odd rows take columns in another order: what a half warp writes at once lies in different banks. */
template <class shape>
UPI_DEVICE void upi_cuda_bwd90_store(unsigned char *shared, const float *dq, int group, int r, int columns)
{
    const int thread = upi_cuda_attn_anew((int)threadIdx.x) % 128, row = thread / 32 * 16 + thread % 32 / 4;
    const int odd = row % 2;
    const uint32_t to = upi_panel_at(64, row, thread % 4 / 2 + odd * 4) + (uint32_t)(thread % 2 * 8);
    unsigned char *half_dq = shared + upi_cuda_bwd90_at_dq<shape>(r) + group * shape::DQ;
    UPI_UNROLL
    for (int i = 0; i < 16; ++i) { /* eight columns of a row, then of the one 8 below */
        upi_cuda_attn_pair *pair =
            (upi_cuda_attn_pair *)(half_dq + (to ^ i / 2 % 4 * 32) + i % 2 * 1024 + i / 8 * 8192);
        if (i / 8 * 32 >= columns) continue;
        pair->x = odd ? dq[2 * (i ^ 4)] : dq[2 * i];
        pair->y = odd ? dq[2 * (i ^ 4) + 1] : dq[2 * i + 1];
    }
    upi_fence_async_shared();
}

/* A warp is through with what the barrier guards. */
UPI_DEVICE void upi_cuda_bwd90_done(uint32_t barrier)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) upi_mbarrier_arrive(barrier);
}

/* S^T of the consumer's keys and queries, from k0 and q0 on, becomes weights, and what dP - delta is
 * multiplied with. */
template <int ROWS>
UPI_DEVICE void upi_cuda_bwd90_weights(const upi_cuda_attn_args &a, float *s, uint32_t *p, const float *lse,
                                       int exact, int whole, int k0, int q0)
{
    if (!whole) upi_cuda_bwd90_hide<ROWS>(s, a, k0, q0);
    if (!exact)
        upi_cuda_bwd90_weigh<ROWS, UPI_BWD90_PLAIN>(s, p, lse, a);
    else if (a.squash == 0)
        upi_cuda_bwd90_weigh<ROWS, UPI_BWD90_EXACT>(s, p, lse, a);
    else
        upi_cuda_bwd90_weigh<ROWS, UPI_BWD90_CAPPED>(s, p, lse, a);
}

/* One tile. Its dK is still under way at the end, and that of the one before at the beginning; until then ds
 * may not change. */
template <class shape>
UPI_DEVICE void upi_cuda_bwd90_step(upi_cuda_bwd90_division<1>, const upi_cuda_attn_args &a,
                                    const upi_cuda_bwd90_place &b, const upi_cuda_bwd90_tile &t,
                                    unsigned char *shared, int group, uint32_t *ds, float *dk, float *dv)
{
    const uint32_t bars = b.base + shape::AT_BARRIERS, at_dout = b.base + upi_cuda_bwd90_at_dout<shape>(t.n);
    const uint32_t at_q = b.base + shape::AT_Q + (uint32_t)t.n % 2 * shape::Q_TILE;
    const uint32_t at_ds = b.base + shape::AT_DS + (uint32_t)t.n % 2 * shape::DS;
    const uint32_t mine = b.base + (uint32_t)group * 64 * 128; /* keys */
    const float *lse =
        (const float *)(shared + shape::AT_LSE) + t.n % 2 * 2 * shape::ROWS + (int)threadIdx.x % 4 * 2;
    const int k0 = b.block * shape::KEYS + group * 64, q0 = t.m * shape::ROWS;
    int whole;
    float s[shape::ROWS / 2], dp[32], dq[32];
    uint32_t p[shape::ROWS / 4];
    upi_mbarrier_wait(upi_cuda_bwd90_slot(bars + UPI_BWD90_Q_FULL, t.n), upi_cuda_bwd90_parity(t.n));
    upi_cuda_bwd90_dots<shape, typename shape::of_k, shape::ROWS>(s, mine, at_q);
    whole = upi_cuda_bwd90_whole(a, k0, q0, shape::ROWS);
    upi_wgmma_wait<1>(); /* dK is there, of the tile before */
    if (t.n > 0) upi_cuda_bwd90_done(upi_cuda_bwd90_slot(bars + UPI_BWD90_Q_EMPTY, t.n + 1));
    upi_mbarrier_wait(upi_cuda_bwd90_dout_full<shape>(bars, t.n), upi_cuda_bwd90_dout_parity<shape>(t.n));
    upi_cuda_bwd90_dots<shape, typename shape::of_v, 64>(dp, mine + shape::AT_V, at_dout);
    upi_wgmma_wait<1>(); /* S is there */
    upi_cuda_bwd90_weights<shape::ROWS>(a, s, p, lse, ((const int *)(shared + shape::AT_EXACT))[t.n % 2],
                                        whole, k0, q0);
    upi_cuda_bwd90_times<shape, typename shape::of_v>(dv, p, at_dout);
    upi_wgmma_wait<1>(); /* dP is */
    upi_cuda_bwd90_slopes<64>(ds, s, dp, lse + shape::ROWS);
    upi_cuda_bwd90_share<64>(at_ds, ds, group * 64, 0);
    if (shape::ROWS > 64) { /* dP comes in two halves, for there are no registers for more */
        upi_cuda_bwd90_dots<shape, typename shape::of_v, 64>(dp, mine + shape::AT_V, at_dout + 64 * 128);
        upi_wgmma_wait<0>();
        upi_cuda_bwd90_slopes<64>(ds + 16, s + 32, dp, lse + shape::ROWS + 64);
        upi_cuda_bwd90_share<64>(at_ds + shape::KEYS * 128, ds + 16, group * 64, 0);
    }
    upi_fence_async_shared(); /* dS */
    /* it is there, of both; and both are through with that of the tile before */
    upi_barrier_sync(1, shape::CONSUMERS * 128);
    upi_cuda_bwd90_dq<shape>(dq, at_ds, b.base, group);
    upi_cuda_bwd90_times<shape, typename shape::of_k>(dk, ds, at_q);
    upi_wgmma_wait<1>(); /* dV and dQ are */
    upi_mbarrier_wait(upi_cuda_bwd90_dq_barrier<shape>(bars + UPI_BWD90_DQ_EMPTY, t.n),
                      upi_cuda_bwd90_dq_parity<shape>(t.n) ^ 1);
    upi_cuda_bwd90_store<shape>(shared, dq, group, t.n, 64);
    upi_cuda_bwd90_done(upi_cuda_bwd90_dq_barrier<shape>(bars + UPI_BWD90_DQ_FULL, t.n));
}

/* The same for keys that the consumers share; of queries they have ROWS / 2 each. It is dS in shared memory
 * that may not change. P needs no second slot: only dV reads it, and all of those are through when the next
 * dO is there. */
template <class shape>
UPI_DEVICE void upi_cuda_bwd90_step(upi_cuda_bwd90_division<0>, const upi_cuda_attn_args &a,
                                    const upi_cuda_bwd90_place &b, const upi_cuda_bwd90_tile &t,
                                    unsigned char *shared, int group, uint32_t *ds, float *dk, float *dv)
{
    const int ROWS = shape::ROWS / 2;
    const uint32_t bars = b.base + shape::AT_BARRIERS, at_dout = b.base + upi_cuda_bwd90_at_dout<shape>(t.n);
    const uint32_t at_q = b.base + shape::AT_Q + (uint32_t)t.n % 2 * shape::Q_TILE;
    const uint32_t at_ds = b.base + shape::AT_DS + (uint32_t)t.n % 2 * shape::DS;
    const uint32_t at_p = b.base + shape::AT_P;
    const uint32_t mine = (uint32_t)(group * ROWS * 128); /* queries */
    const float *lse = (const float *)(shared + shape::AT_LSE) + t.n % 2 * 2 * shape::ROWS + group * ROWS +
                       (int)threadIdx.x % 4 * 2;
    const int k0 = b.block * shape::KEYS, q0 = t.m * shape::ROWS + group * ROWS;
    int whole;
    float s[ROWS / 2], dp[ROWS / 2], dq[shape::of_k::EACH / 2];
    uint32_t p[ROWS / 4];
    upi_mbarrier_wait(upi_cuda_bwd90_slot(bars + UPI_BWD90_Q_FULL, t.n), upi_cuda_bwd90_parity(t.n));
    upi_cuda_bwd90_dots<shape, typename shape::of_k, ROWS>(s, b.base, at_q + mine);
    whole = upi_cuda_bwd90_whole(a, k0, q0, ROWS);
    upi_wgmma_wait<1>(); /* dK is there, of the tile before */
    if (t.n > 0) upi_cuda_bwd90_done(upi_cuda_bwd90_slot(bars + UPI_BWD90_Q_EMPTY, t.n + 1));
    upi_mbarrier_wait(upi_cuda_bwd90_dout_full<shape>(bars, t.n), upi_cuda_bwd90_dout_parity<shape>(t.n));
    upi_cuda_bwd90_dots<shape, typename shape::of_v, ROWS>(dp, b.base + shape::AT_V, at_dout + mine);
    upi_wgmma_wait<1>(); /* S is there */
    upi_cuda_bwd90_weights<ROWS>(a, s, p, lse, ((const int *)(shared + shape::AT_EXACT))[t.n % 2], whole, k0,
                                 q0);
    upi_cuda_bwd90_share<ROWS>(at_p, p, 0, group * ROWS / 8);
    upi_wgmma_wait<0>(); /* dP is */
    upi_cuda_bwd90_slopes<ROWS>(ds, s, dp, lse + shape::ROWS);
    upi_cuda_bwd90_share<ROWS>(at_ds, ds, 0, group * ROWS / 8);
    upi_fence_async_shared(); /* P and dS */
    /* they are there, of both; and both are through with dS of the tile before */
    upi_barrier_sync(1, shape::CONSUMERS * 128);
    upi_cuda_bwd90_times_shared<shape, typename shape::of_v>(dv, at_p, at_dout, group);
    upi_cuda_bwd90_dq_columns<shape>(dq, at_ds, b.base, group);
    upi_cuda_bwd90_times_shared<shape, typename shape::of_k>(dk, at_ds, at_q, group);
    upi_wgmma_wait<2>(); /* dV is */
    upi_cuda_bwd90_done(bars + UPI_BWD90_DOUT_EMPTY);
    upi_wgmma_wait<1>(); /* dQ is */
    UPI_UNROLL
    for (int round = 0; round < shape::ROUNDS; ++round) {
        const int r = t.n * shape::ROUNDS + round;
        upi_mbarrier_wait(upi_cuda_bwd90_dq_barrier<shape>(bars + UPI_BWD90_DQ_EMPTY, r),
                          upi_cuda_bwd90_dq_parity<shape>(r) ^ 1);
        upi_cuda_bwd90_store<shape>(shared, dq + 32 * round, group, r, shape::of_k::EACH - round * 64);
        upi_cuda_bwd90_done(upi_cuda_bwd90_dq_barrier<shape>(bars + UPI_BWD90_DQ_FULL, r));
    }
}

/* The gradients of the consumer's keys and columns, to registers, or back. Where they lie is made anew, not
 * kept. */
template <class shape, int BACK, int N, int M>
UPI_DEVICE void upi_cuda_bwd90_grads(const upi_cuda_attn_bwd_args &g, const upi_cuda_bwd90_place &b,
                                     int group, float (&dk)[N][4], float (&dv)[M][4])
{
    const int64_t k0 = (int64_t)upi_cuda_attn_anew(b.block) * shape::KEYS;
    const int left = upi_cuda_attn_near(g.a.keys - k0, 1); /* keys of the block, and beyond */
    const int first =
        (shape::BY_KEYS ? group * 64 : 0) + upi_cuda_attn_anew((int)threadIdx.x) % 128 / 32 * 16;
    const int k_column = shape::BY_KEYS ? 0 : group * shape::of_k::EACH;
    const int v_column = shape::BY_KEYS ? 0 : group * shape::of_v::EACH;
    float *dk_at = g.dk + b.kv * g.dk_head + k0 * g.dk_stride,
          *dv_at = g.dv + b.kv * g.dv_head + k0 * g.dv_stride;
    if (BACK) {
        upi_cuda_attn_grad_put<N, 1>(dk, dk_at, g.dk_stride, left, first, k_column, g.a.d);
        upi_cuda_attn_grad_put<M, 1>(dv, dv_at, g.dv_stride, left, first, v_column, g.a.v_dim);
    } else {
        upi_cuda_attn_grad_get<N, 1>(dk, dk_at, g.dk_stride, left, first, k_column, g.a.d);
        upi_cuda_attn_grad_get<M, 1>(dv, dv_at, g.dv_stride, left, first, v_column, g.a.v_dim);
    }
}

template <class shape>
UPI_DEVICE void upi_cuda_bwd90_consume(const upi_cuda_attn_bwd_args &g, const upi_cuda_bwd90_place &b,
                                       unsigned char *shared, int group)
{
    const uint32_t bars = b.base + shape::AT_BARRIERS;
    float dk[shape::of_k::EACH / 8][4], dv[shape::of_v::EACH / 8][4];
    uint32_t ds[shape::ROWS / 4];
    upi_cuda_bwd90_tile t = upi_cuda_bwd90_first(b, g.a.group);
    upi_cuda_bwd90_grads<shape, 0>(g, b, group, dk, dv);
    upi_mbarrier_wait(bars + UPI_BWD90_K_FULL, 0);
    upi_mbarrier_wait(bars + UPI_BWD90_V_FULL, 0);
    UPI_CUDA_ATTN_TURNS(1)
    for (; t.n < b.count; upi_cuda_bwd90_next(b, &t))
        upi_cuda_bwd90_step<shape>(typename shape::division(), g.a, b, t, shared, group, ds, dk[0], dv[0]);
    upi_wgmma_wait<0>();
    upi_cuda_bwd90_grads<shape, 1>(g, b, group, dk, dv);
}

/* ---- the kernels ---- */

template <int D, int V>
UPI_HOPPER_KERNEL((upi_cuda_bwd90_shape<D, V>::THREADS))
void upi_cuda_bwd90_kernel(UPI_BY_VALUE upi_cuda_bwd90_args x)
{
#if UPI_HOPPER_CODE
    typedef upi_cuda_bwd90_shape<D, V> shape;
    UPI_SHARED(unsigned char, shared);
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); /* the same in every lane */
    const int kv_heads = x.g.a.heads / x.g.a.group;
    int *ticket = (int *)(shared + shape::AT_TICKET);
    upi_cuda_bwd90_place b;
    b.base = upi_shared_address(shared);
    if (threadIdx.x == 0) {
        const uint32_t bars = b.base + shape::AT_BARRIERS;
        for (int i = 0; i < 2; ++i) {
            upi_mbarrier_init(upi_cuda_bwd90_slot(bars + UPI_BWD90_Q_FULL, i), 2);
            upi_mbarrier_init(upi_cuda_bwd90_slot(bars + UPI_BWD90_DOUT_FULL, i), 1);
            upi_mbarrier_init(upi_cuda_bwd90_slot(bars + UPI_BWD90_Q_EMPTY, i), shape::CONSUMERS * 4);
            upi_mbarrier_init(upi_cuda_bwd90_slot(bars + UPI_BWD90_DQ_FULL, i), shape::CONSUMERS * 4);
            upi_mbarrier_init(upi_cuda_bwd90_slot(bars + UPI_BWD90_DQ_EMPTY, i), 1);
        }
        upi_mbarrier_init(bars + UPI_BWD90_K_FULL, 1);
        upi_mbarrier_init(bars + UPI_BWD90_V_FULL, 1);
        upi_mbarrier_init(bars + UPI_BWD90_DOUT_EMPTY, shape::CONSUMERS * 4);
        upi_mbarrier_init(bars + UPI_BWD90_DONE, 1);
        upi_mbarrier_fence();
        *ticket = atomicAdd(x.g.turns, 1);
    }
    __syncthreads();
    b.block = *ticket / kv_heads; /* fewer keys ahead, earlier ticket */
    b.kv = *ticket % kv_heads;
    b.tiles = upi_cuda_bwd90_tiles<shape>(x.g, b.block);
    b.count = (b.tiles.end - b.tiles.first) * x.g.a.group;
    if (b.count <= 0) return;
    if (warp < 4) {
        upi_registers_less<shape::HELPER_REGISTERS>();
        if (warp == 3 && x.watch != NULL)
            upi_cuda_attn_watch<D, shape::KEYS, 1, UPI_BWD90_DONE / 8>(x.watch, *ticket,
                                                                       b.base + shape::AT_BARRIERS);
        if (threadIdx.x == 0) upi_cuda_bwd90_produce<shape>(x, b);
        if (warp == 1) upi_cuda_bwd90_stats<shape>(x.g, b, shared);
        if (threadIdx.x == 64) upi_cuda_bwd90_sum<shape>(x, b);
    } else {
        upi_registers_more<shape::REGISTERS>();
        upi_cuda_bwd90_consume<shape>(x.g, b, shared, warp / 4 - 1);
    }
#endif
}

/* dq of a tile of queries of one head: the sums as bf16, zeros where nobody added. */
template <int ROWS> UPI_KERNEL(256, 1) void upi_cuda_bwd90_round_kernel(const upi_cuda_attn_bwd_args g)
{
    const int h = (int)blockIdx.x / g.tiles, m = (int)blockIdx.x % g.tiles, chunks = g.a.d / 8;
    const int summed = g.turns[1 + (int64_t)h * g.tiles + m] != 0;
    for (int i = (int)threadIdx.x; i < ROWS * chunks; i += 256) {
        const int64_t row = (int64_t)m * ROWS + i / chunks;
        const int column = i % chunks * 8;
        const float *from = g.dq_sum + row * g.dq_sum_stride + h * g.dq_sum_head + column;
        upi_cuda_attn_chunk16 out;
        if (row >= g.a.queries) return;
        UPI_UNROLL
        for (int e = 0; e < 4; ++e) {
            const upi_cuda_attn_pair none = {0, 0};
            const upi_cuda_attn_pair pair = summed ? ((const upi_cuda_attn_pair *)from)[e] : none;
            out.word[e] = upi_pack_bf16(pair.x, pair.y);
        }
        *(upi_cuda_attn_chunk16 *)(g.dq + row * g.dq_stride + h * g.dq_head + column) = out;
    }
}

/* ---- host ---- */

/* Why this kernel cannot run: the device's space, or the unit's code; NULL if it can. */
template <int D, int V> UPIPE_API const char *upi_cuda_bwd90_missing(const upipe_cuda *device)
{
    typedef upi_cuda_bwd90_shape<D, V> shape;
    return upi_cuda_hopper_missing(
        device, shape::SHARED,
        UPI_HOPPER_FITS((upi_cuda_bwd90_kernel<D, V>), shape::THREADS,
                        128 * (shape::HELPER_REGISTERS + shape::CONSUMERS * shape::REGISTERS)));
}

/* Why these kernels do not take the call: the device, the host, the unit's code, or shapes that tensor maps cannot
 * say; NULL if they do. */
UPIPE_API const char *upi_cuda_bwd90_obstacle(upipe_ctx *c, const upipe_attn_grad *g)
{
    const upipe_cuda *self = (const upipe_cuda *)c->ops->self;
    const upipe_attn *a = &g->a;
    const int columns = upi_cuda_attn_columns(a);
    if (self->capability / 10 != 9) return "the device is of another generation";
    if (self->avoid & UPIPE_CUDA_AVOID_BWD90) return "the host avoids those for 9.0";
    if (!upi_tensor_map_fits(a->q) || !upi_tensor_map_fits(a->k) || !upi_tensor_map_fits(a->v) ||
        !upi_tensor_map_fits(g->dout) || (a->merge && !upi_tensor_map_fits(g->dq)))
        return "no tensor map has these strides";
    if ((a->q.n / 64 + 1) * a->q.h > INT32_MAX || (a->k.n / 64 + 1) * a->k.h > INT32_MAX)
        return "32 bits do not count the blocks";
    return columns <= 64                 ? upi_cuda_bwd90_missing<64, 64>(self)
           : columns <= 96               ? upi_cuda_bwd90_missing<96, 96>(self)
           : columns <= 128              ? upi_cuda_bwd90_missing<128, 128>(self)
           : upi_cuda_attn_is_192_128(a) ? upi_cuda_bwd90_missing<192, 128>(self)
           : columns <= 192              ? upi_cuda_bwd90_missing<192, 192>(self)
                                         : upi_cuda_bwd90_missing<256, 256>(self);
}

template <int D, int V>
UPIPE_API upipe_status upi_cuda_bwd90_launch(upipe_ctx *c, const upipe_attn_grad *call,
                                             const upi_cuda_attn_bwd_args *g)
{
    typedef upi_cuda_bwd90_shape<D, V> shape;
    const upipe_attn *a = &call->a;
    upipe_view sums = call->dq;
    upi_cuda_bwd90_args x;
    memset(&x, 0, sizeof x);
    x.g = *g;
    x.watch = ((const upipe_cuda *)c->ops->self)->watch;
    x.g.tiles = (int)((a->q.n + shape::ROWS - 1) / shape::ROWS); /* no more than scratch has turns for */
    x.g.blocks = (int)upi_cuda_attn_key_blocks(a->k.n, shape::KEYS);
    sums.data = g->dq_sum;
    sums.dtype = UPIPE_F32;
    sums.n_stride = g->dq_sum_stride, sums.h_stride = g->dq_sum_head;
    UPIPE_TRY(upi_tensor_map_make(c, &x.q, a->q, shape::ROWS));
    UPIPE_TRY(upi_tensor_map_make(c, &x.k, a->k, shape::KEYS));
    UPIPE_TRY(upi_tensor_map_make(c, &x.v, a->v, shape::KEYS));
    UPIPE_TRY(upi_tensor_map_make(c, &x.dout, call->dout, shape::ROWS));
    UPIPE_TRY(upi_tensor_map_make(c, &x.dq, sums, 64));
    UPIPE_TRY(UPI_ALLOW_SHARED(c, (upi_cuda_bwd90_kernel<D, V>), shape::SHARED));
    UPIPE_CUDA_TRY(&c->err,
                   cudaMemsetAsync(g->turns, 0, (1 + (size_t)x.g.tiles * (size_t)a->q.h) * sizeof(int),
                                   (cudaStream_t)c->stream));
    if (g->a.runs != NULL) UPIPE_TRY(upi_cuda_attn_key_runs(c, a, (upi_cuda_attn_run *)g->a.runs));
    UPIPE_TRY(UPI_LAUNCH(c, (upi_cuda_bwd90_kernel<D, V>), (unsigned)(x.g.blocks * a->k.h), shape::THREADS,
                         shape::SHARED, x));
    if (a->merge) return UPIPE_OK;
    return UPI_LAUNCH(c, (upi_cuda_bwd90_round_kernel<shape::ROWS>), (unsigned)(x.g.tiles * a->q.h), 256, 0,
                      x.g);
}

/* Backward of a call that these kernels take, but for the sinks' gradients. */
UPIPE_API upipe_status upi_cuda_attn_bwd90(upipe_ctx *c, const upipe_attn_grad *call,
                                           const upi_cuda_attn_bwd_args *g)
{
    const int columns = upi_cuda_attn_columns(&call->a);
    return columns <= 64                        ? upi_cuda_bwd90_launch<64, 64>(c, call, g)
           : columns <= 96                      ? upi_cuda_bwd90_launch<96, 96>(c, call, g)
           : columns <= 128                     ? upi_cuda_bwd90_launch<128, 128>(c, call, g)
           : upi_cuda_attn_is_192_128(&call->a) ? upi_cuda_bwd90_launch<192, 128>(c, call, g)
           : columns <= 192                     ? upi_cuda_bwd90_launch<192, 192>(c, call, g)
                                                : upi_cuda_bwd90_launch<256, 256>(c, call, g);
}

#endif
