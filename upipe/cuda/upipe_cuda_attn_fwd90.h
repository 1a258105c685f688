/* upipe_cuda_attn_fwd90.h -- attention forward with what Hopper added
 *
 * The same contract, numbers and masks as upipe_cuda_attn_fwd.h, for compute capability 9.0. One block a
 * processor, but for those of upipe_cuda.margin, stays for the whole call and takes blocks of queries from a list,
 * the longest rows first. Of its warpgroups one thread loads (TMA), and two (three where D is 64) compute, 64
 * queries each:
 *
 *     Q    [64 .. 192 queries][D]    once an item, the next one while this one ends
 *     K    [KEYS][D]                 through a ring of two slots
 *     V    [KEYS][V]                 through another one
 *
 * A consumer has the scores of one tile of keys multiplied while the values of the tile before are, and makes
 * weights of the first while the second are under way. Consumers take turns to enter their products: then one
 * computes weights while the other one's products run. Tiles come last to first: those that a causal mask
 * cuts come at the beginning.
 *
 * Barriers: `full` of a slot ends its phase when the bytes are there, `empty` when every consumer is through. The last
 * warp of the loader's warpgroup watches them, where the host asks for it (upipe_cuda_attn_watch.h).
 */
#ifndef UPIPE_CUDA_ATTN_FWD90_H
#define UPIPE_CUDA_ATTN_FWD90_H

#include "upipe_cuda_attn_step.h"
#include "upipe_cuda_attn_watch.h"

/* D columns of queries and keys, V of values. */
template <int Q_DIM, int V_DIM, int TILE_KEYS> struct upi_cuda_fwd90_shape {
    enum {
        D = Q_DIM,
        V = V_DIM,
        KEYS = TILE_KEYS,
        CONSUMERS = D > 64 ? 2 : 3,
        THREADS = 128 * (CONSUMERS + 1),
        ROWS = 64 * CONSUMERS,
        PANELS = (D + 63) / 64, /* the last one of 96 columns is filled to the half */
        V_PANELS = (V + 63) / 64,
        SLOTS = 2,
        IN_TURN = D <= 128, /* longer products keep the tensor cores busy by themselves */
        LOADER_REGISTERS = CONSUMERS == 2 ? 24 : 32,
        REGISTERS = CONSUMERS == 2 ? 240 : 160,
        Q = ROWS * PANELS * 128, /* bytes */
        O = ROWS * V_PANELS * 128,
        K_TILE = KEYS * PANELS * 128,
        V_TILE = KEYS * V_PANELS * 128,
        AT_K = Q,
        AT_V = AT_K + SLOTS * K_TILE,
        END = AT_V + SLOTS * V_TILE,
        O_APART = END + O + 128 <= 227 * 1024, /* else o takes the place of Q */
        AT_O = O_APART ? END : 0,
        AT_BARRIERS = END + (O_APART ? O : 0),
        SHARED = AT_BARRIERS + 8 * (3 + 4 * SLOTS)
    };
};

/* Rows and items are counted in 32 bits: a division of 64 takes more registers than the loading thread
 * has. */
typedef struct upi_cuda_fwd90_args {
    upi_tensor_map q, k, v, o; /* o: where it is bf16 and not merged into */
    upi_cuda_attn_args a;
    int blocks;       /* of queries, of one head */
    int section;      /* heads whose keys and values share the cache: all of their items come before others */
    int rounds, more; /* in which the items of a section are dealt, and the items of a short last one */
    const int *order; /* [blocks]: the longest first; NULL: the last first */
    void *watch;      /* upipe_cuda.watch */
} upi_cuda_fwd90_args;

typedef struct upi_cuda_fwd90_item {
    int q0, head;
    upi_cuda_attn_tiles tiles;
} upi_cuda_fwd90_item;

enum { UPI_FWD90_ORDER_THREADS = 256 };

UPI_DEVICE upi_cuda_attn_tiles upi_cuda_fwd90_tiles(const upi_cuda_attn_args &a, int query, int count,
                                                    int keys)
{
    return a.runs != NULL ? upi_cuda_attn_tiles_of<1>(a, query, count, keys)
                          : upi_cuda_attn_tiles_of<0>(a, query, count, keys);
}

/* Tiles that a block of queries goes through, none where no query sees a key; of a block that there is not, -1. */
template <int ROWS, int KEYS>
UPI_DEVICE int upi_cuda_fwd90_length(const upi_cuda_attn_args &a, int block, int blocks)
{
    const upi_cuda_attn_tiles x = upi_cuda_fwd90_tiles(a, block < blocks ? block * ROWS : 0, ROWS, KEYS);
    if (block >= blocks) return -1;
    return x.end > x.first ? x.end - x.first : 0;
}

/* The block's next item, of this turn or a later one; 0: it has no more.
 *
 * A section is dealt in rounds, the longest items first, and every second round runs backwards: then nobody has
 * the longest item of every one. A last round that is short gives some blocks one item more, in the next section
 * those behind them in a circle: over all sections no block has two items more than another. Every second section
 * is mirrored about these blocks, which levels what an odd number of rounds leaves. */
template <int ROWS, int KEYS>
UPI_DEVICE int upi_cuda_fwd90_item_of(const upi_cuda_fwd90_args &g, int *turn, upi_cuda_fwd90_item *x)
{
    const int grid = (int)gridDim.x;
    for (;; ++*turn) {
        const int section = *turn / g.rounds, round = *turn % g.rounds, first = section * g.section;
        const int heads = g.a.heads - first < g.section ? g.a.heads - first : g.section;
        const int all = g.blocks * heads, more = all % grid;
        int place = (int)blockIdx.x - section * g.more % grid; /* in the circle */
        if (heads <= 0) return 0;
        if (section % 2) place = more - 1 - place;
        if (place < 0) place += grid;
        if (place >= grid) place -= grid;
        if ((all / grid - round) % 2) place = grid - 1 - place;
        place += round * grid;
        if (place >= all) continue; /* of a short round */
        x->head = first + place % heads;
        place /= heads;
        x->q0 = (g.order != NULL ? g.order[place] : g.blocks - 1 - place) * ROWS;
        x->tiles = upi_cuda_fwd90_tiles(g.a, x->q0, ROWS, KEYS);
        return 1;
    }
}

/* The order of the blocks of queries of packed sequences, whose lengths rise and fall: of two that are as long the
 * later one comes first. A thread counts the blocks that come before its own. */
template <int ROWS, int KEYS>
UPI_KERNEL(UPI_FWD90_ORDER_THREADS, 1)
void upi_cuda_fwd90_order_kernel(const upi_cuda_attn_args a, int *order, int blocks)
{
    UPI_SHARED(int, lengths);
    const int mine = (int)(blockIdx.x * UPI_FWD90_ORDER_THREADS + threadIdx.x);
    const int length = upi_cuda_fwd90_length<ROWS, KEYS>(a, mine, blocks);
    int place = 0;
    for (int from = 0; from < blocks; from += UPI_FWD90_ORDER_THREADS) {
        lengths[threadIdx.x] = upi_cuda_fwd90_length<ROWS, KEYS>(a, from + (int)threadIdx.x, blocks);
        __syncthreads();
        UPI_UNROLL_4
        for (int i = 0; i < UPI_FWD90_ORDER_THREADS; ++i)
            place += lengths[i] > length || (lengths[i] == length && from + i > mine);
        __syncthreads();
    }
    if (mine < blocks) order[place] = mine;
}

/* Barriers, as they lie behind the tiles: two of each, of the slots; of Q, full and empty; and the watch's. Their names
 * are in upi_cuda_watch_name. */
enum {
    UPI_FWD90_K_FULL = 0,
    UPI_FWD90_K_EMPTY = 16,
    UPI_FWD90_V_FULL = 32,
    UPI_FWD90_V_EMPTY = 48,
    UPI_FWD90_Q_FULL = 64,
    UPI_FWD90_Q_EMPTY = 72,
    UPI_FWD90_DONE = 80 /* the consumers are through with all items */
};

/* The barrier of the slot that has tile number i, counted from the start of the kernel; and the parity of the
 * phase in which that tile fills it. */
UPI_DEVICE uint32_t upi_cuda_fwd90_slot(uint32_t barriers, uint32_t i)
{
    return barriers + i % 2 * 8;
}
UPI_DEVICE uint32_t upi_cuda_fwd90_parity(uint32_t i)
{
    return i / 2 % 2;
}

/* ---- the loading thread ---- */

/* A tile of rows of one head, panel by panel. */
template <int PANELS, int ROWS>
UPI_DEVICE void upi_cuda_fwd90_load(uint32_t to, const upi_tensor_map *map, int row, int head, uint32_t full)
{
    upi_mbarrier_arrive_expect(full, ROWS * PANELS * 128);
    UPI_UNROLL
    for (int c = 0; c < PANELS; ++c) upi_tma_load(to + c * ROWS * 128, map, c * 64, row, head, full);
}

template <class shape> UPI_DEVICE void upi_cuda_fwd90_produce(const upi_cuda_fwd90_args &g, uint32_t base)
{
    const uint32_t bars = base + shape::AT_BARRIERS;
    uint32_t i = 0, q = 0; /* tiles and items so far */
    upi_cuda_fwd90_item x;
    upi_tma_prefetch(&g.q);
    upi_tma_prefetch(&g.k);
    upi_tma_prefetch(&g.v);
    for (int turn = 0; upi_cuda_fwd90_item_of<shape::ROWS, shape::KEYS>(g, &turn, &x); ++turn) {
        const int kv = x.head / g.a.group, tiles = x.tiles.end - x.tiles.first;
        if (tiles <= 0) continue;
        upi_mbarrier_wait(bars + UPI_FWD90_Q_EMPTY, q++ % 2 ^ 1);
        upi_cuda_fwd90_load<shape::PANELS, shape::ROWS>(base, &g.q, x.q0, x.head, bars + UPI_FWD90_Q_FULL);
        /* K of a tile comes before V of the tile before, as consumers want them */
        UPI_CUDA_ATTN_TURNS(1)
        for (int n = 0; n <= tiles; ++n, ++i) {
            const int row = (x.tiles.end - 1 - n) * shape::KEYS;
            if (n < tiles) {
                upi_mbarrier_wait(upi_cuda_fwd90_slot(bars + UPI_FWD90_K_EMPTY, i),
                                  upi_cuda_fwd90_parity(i) ^ 1);
                upi_cuda_fwd90_load<shape::PANELS, shape::KEYS>(
                    base + shape::AT_K + i % 2 * shape::K_TILE, &g.k, row, kv,
                    upi_cuda_fwd90_slot(bars + UPI_FWD90_K_FULL, i));
            }
            if (n > 0) {
                upi_mbarrier_wait(upi_cuda_fwd90_slot(bars + UPI_FWD90_V_EMPTY, i - 1),
                                  upi_cuda_fwd90_parity(i - 1) ^ 1);
                upi_cuda_fwd90_load<shape::V_PANELS, shape::KEYS>(
                    base + shape::AT_V + (i - 1) % 2 * shape::V_TILE, &g.v, row + shape::KEYS, kv,
                    upi_cuda_fwd90_slot(bars + UPI_FWD90_V_FULL, i - 1));
            }
        }
        --i; /* the last turn had a V alone */
    }
}

/* ---- consumers ---- */

/* Starts s = Q K^T: Q from its row of the consumer on. */
template <class shape> UPI_DEVICE void upi_cuda_fwd90_scores(float *s, uint32_t at_q, uint32_t at_k)
{
    const uint64_t q = upi_wgmma_rows(at_q), k = upi_wgmma_rows(at_k);
    upi_wgmma_fence();
    UPI_UNROLL
    for (int i = 0; i < shape::D / 16; ++i)
        upi_wgmma_ss<shape::KEYS, 0, 0>(s, upi_wgmma_further(q, i / 4 * shape::ROWS * 128 + i % 4 * 32),
                                        upi_wgmma_further(k, i / 4 * shape::KEYS * 128 + i % 4 * 32), i > 0);
    upi_wgmma_commit();
}

/* Starts o += P V. */
template <class shape> UPI_DEVICE void upi_cuda_fwd90_values(float *o, const uint32_t *p, uint32_t at_v)
{
    const uint64_t v = upi_wgmma_columns(at_v, shape::KEYS * 128);
    upi_wgmma_fence();
    UPI_UNROLL
    for (int i = 0; i < shape::KEYS / 16; ++i)
        upi_wgmma_rs<shape::V, 1>(o, p + 4 * i, upi_wgmma_further(v, i * 16 * 128), 1);
    upi_wgmma_commit();
}

/* A thread's first row of an item; the second lies 8 below. In its consumer, whose first query is q0. */
UPI_DEVICE int upi_cuda_fwd90_row(void)
{
    const int thread = upi_cuda_attn_anew((int)threadIdx.x);
    return thread % 128 / 32 * 16 + thread % 32 / 4;
}

/* Masks a tile of scores of the 64 queries from q0. Cold: what it needs is made anew, not kept in
 * registers. */
template <int KEYS> UPI_DEVICE void upi_cuda_fwd90_hide(float *s, const upi_cuda_attn_args &a, int q0, int n)
{
    const int column = (int)threadIdx.x % 4 * 2;
    q0 = upi_cuda_attn_anew(q0);
    UPI_UNROLL
    for (int half = 0; half < 2; ++half) {
        const int query = q0 + upi_cuda_fwd90_row() + half * 8;
        int low = 0, high = upi_cuda_attn_near(a.keys - (int64_t)n * KEYS, 1);
        if (a.runs != NULL) {
            const upi_cuda_attn_run run = upi_cuda_attn_run_of(a.runs, query, a.queries);
            low = run.first - n * KEYS;
            high = run.end - n * KEYS;
        } else {
            const int sight = upi_cuda_attn_near(query + a.ahead + 1 - (int64_t)n * KEYS, a.causal);
            if (sight < high) high = sight;
        }
        upi_cuda_attn_hide<KEYS>(s, half, low - column, high - column);
    }
}

/* Scores of a row become weights; and sums of both columns. */
template <int KEYS, int EXACT>
UPI_DEVICE void upi_cuda_fwd90_exp(float *s, float base, float rate, float *x, float *y)
{
    *x = *y = 0;
    UPI_UNROLL
    for (int j = 0; j < KEYS / 8; ++j) {
        s[4 * j] = upi_cuda_attn_weight<EXACT>(s[4 * j], base, rate);
        s[4 * j + 1] = upi_cuda_attn_weight<EXACT>(s[4 * j + 1], base, rate);
        *x += s[4 * j];
        *y += s[4 * j + 1];
    }
}

/* Scores become weights: s = 2^((s - top) rate). fold: what older sums and values are multiplied with. */
template <int KEYS>
UPI_DEVICE void upi_cuda_fwd90_weigh(float *s, float *top, float *sum, float *fold, float rate)
{
    float base[2], x[2], y[2];
    UPI_UNROLL
    for (int half = 0; half < 2; ++half) {
        float most = top[half], more = -INFINITY;
        UPI_UNROLL
        for (int j = 0; j < KEYS / 8; ++j) {
            most = fmaxf(most, s[4 * j + 2 * half]);
            more = fmaxf(more, s[4 * j + 2 * half + 1]);
        }
        most = upi_cuda_attn_quad_max(fmaxf(most, more));
        base[half] = upi_cuda_attn_base(most);
        fold[half] = upi_cuda_attn_weight<1>(top[half], base[half], rate);
        top[half] = most;
    }
    if (__any_sync(0xffffffffu, upi_cuda_attn_huge(base[0] * rate) || upi_cuda_attn_huge(base[1] * rate))) {
        upi_cuda_fwd90_exp<KEYS, 1>(s, base[0], rate, &x[0], &y[0]);
        upi_cuda_fwd90_exp<KEYS, 1>(s + 2, base[1], rate, &x[1], &y[1]);
    } else {
        upi_cuda_fwd90_exp<KEYS, 0>(s, base[0], rate, &x[0], &y[0]);
        upi_cuda_fwd90_exp<KEYS, 0>(s + 2, base[1], rate, &x[1], &y[1]);
    }
    UPI_UNROLL
    for (int half = 0; half < 2; ++half) sum[half] = fmaf(sum[half], fold[half], x[half] + y[half]);
}

/* Scores of tile n, of the 64 queries from q0, become weights: soft-cap, masks, softmax. */
template <int KEYS>
UPI_DEVICE void upi_cuda_fwd90_softmax(float *s, float *top, float *sum, float *fold,
                                       const upi_cuda_attn_args &a, const upi_cuda_attn_tiles &mine, int q0,
                                       int n)
{
    if (a.squash != 0) upi_cuda_attn_cap<KEYS>(s, a.squash);
    if (n < mine.whole || n >= mine.whole_end) upi_cuda_fwd90_hide<KEYS>(s, a, q0, n);
    upi_cuda_fwd90_weigh<KEYS>(s, top, sum, fold, a.rate);
}

/* Weights as operands of the next product. */
template <int KEYS> UPI_DEVICE void upi_cuda_fwd90_pack(uint32_t *p, const float *s)
{
    UPI_UNROLL
    for (int i = 0; i < KEYS / 4; ++i) p[i] = upi_pack_bf16(s[2 * i], s[2 * i + 1]);
}

/* Two neighbours of a row of o, merged into what is there. */
UPI_DEVICE void upi_cuda_fwd90_put(const upi_cuda_attn_args &a, int64_t to, float keep, float x, float y)
{
    upi_cuda_attn_pair *pair = (upi_cuda_attn_pair *)((float *)a.o + to);
    uint32_t *both = (uint32_t *)((upi_bf16 *)a.o + to);
    if (keep != 0) upi_cuda_attn_add_older(&x, &y, keep, a.wide, pair, both);
    if (a.wide)
        pair->x = x, pair->y = y;
    else
        *both = upi_pack_bf16(x, y);
}

/* o of an item, by one consumer. Through shared memory where it is plain, unless no Q was loaded, whose place
 * another item's may then have. */
template <class shape>
UPI_DEVICE void upi_cuda_fwd90_output(const upi_cuda_fwd90_args &g, const upi_cuda_fwd90_item &item,
                                      uint32_t base, int group, float *o, const float *top, const float *sum)
{
    const upi_cuda_attn_args &a = g.a;
    const int thread = upi_cuda_attn_anew((int)threadIdx.x), lane = thread % 32, warp = thread % 128 / 32;
    const int staged = !a.merge && !a.wide && item.tiles.first < item.tiles.end;
    const int row = group * 64 + warp * 16, first = item.q0 + group * 64 + upi_cuda_fwd90_row();
    float keep[2];
    UPI_UNROLL
    for (int half = 0; half < 2; ++half) {
        const upi_cuda_attn_end end = upi_cuda_attn_finish(a, item.head, first + half * 8, top[half],
                                                           upi_cuda_attn_quad_sum(sum[half]));
        keep[half] = end.keep;
        UPI_UNROLL
        for (int i = 0; i < shape::V / 8; ++i) {
            o[4 * i + 2 * half] *= end.weight;
            o[4 * i + 2 * half + 1] *= end.weight;
        }
    }
    if (!staged) {
        UPI_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int64_t query = first + half * 8;
            const int64_t to = query * a.o_stride + item.head * a.o_head + lane % 4 * 2;
            UPI_UNROLL
            for (int i = 0; i < shape::V / 8; ++i)
                if (query < a.queries && i * 8 < a.v_dim)
                    upi_cuda_fwd90_put(a, to + i * 8, keep[half], o[4 * i + 2 * half],
                                       o[4 * i + 2 * half + 1]);
        }
        return;
    }
    if (threadIdx.x % 128 == 0) upi_bulk_wait_read<0>(); /* the item before is out of its place */
    upi_barrier_sync(8 + group, 128);
    UPI_UNROLL
    for (int i = 0; i < shape::V / 8; i += 2) {
        const uint32_t r[4] = {
            upi_pack_bf16(o[4 * i], o[4 * i + 1]), upi_pack_bf16(o[4 * i + 2], o[4 * i + 3]),
            upi_pack_bf16(o[4 * i + 4], o[4 * i + 5]), upi_pack_bf16(o[4 * i + 6], o[4 * i + 7])};
        upi_store_matrix4(base + shape::AT_O + upi_panel_at(shape::ROWS, row + lane % 16, i + lane / 16), r);
    }
    upi_fence_async_shared();
    upi_barrier_sync(8 + group, 128);
    if (threadIdx.x % 128 == 0) {
        UPI_UNROLL
        for (int c = 0; c < shape::V_PANELS; ++c)
            if (c * 64 < a.v_dim)
                upi_tma_store(&g.o, c * 64, item.q0 + group * 64, item.head,
                              base + shape::AT_O + (c * shape::ROWS + group * 64) * 128);
        upi_bulk_commit();
        if (!shape::O_APART) upi_bulk_wait_read<0>();
    }
}

/* Starts the scores of tile i when its keys are there, and it is the consumer's turn. */
template <class shape>
UPI_DEVICE void upi_cuda_fwd90_begin_scores(float *s, uint32_t at_q, uint32_t base, uint32_t i, int my_turn)
{
    const uint32_t full = base + shape::AT_BARRIERS + UPI_FWD90_K_FULL;
    upi_mbarrier_wait(upi_cuda_fwd90_slot(full, i), upi_cuda_fwd90_parity(i));
    if (shape::IN_TURN) upi_barrier_sync(my_turn, 256);
    upi_cuda_fwd90_scores<shape>(s, at_q, base + shape::AT_K + i % 2 * shape::K_TILE);
}

/* Starts the product with the values of tile i when they are there. */
template <class shape>
UPI_DEVICE void upi_cuda_fwd90_begin_values(float *o, const uint32_t *p, uint32_t base, uint32_t i)
{
    const uint32_t full = base + shape::AT_BARRIERS + UPI_FWD90_V_FULL;
    upi_mbarrier_wait(upi_cuda_fwd90_slot(full, i), upi_cuda_fwd90_parity(i));
    upi_cuda_fwd90_values<shape>(o, p, base + shape::AT_V + i % 2 * shape::V_TILE);
}

template <class shape>
UPI_DEVICE void upi_cuda_fwd90_consume(const upi_cuda_fwd90_args &g, uint32_t base, int group)
{
    const int KEYS = shape::KEYS;
    const uint32_t bars = base + shape::AT_BARRIERS, at_q = base + (uint32_t)group * 64 * 128;
    /* each warp arrives for itself when it is through: waits for products are a warp's own */
    const int leads = threadIdx.x % 128 == 0, arrives = threadIdx.x % 32 == 0, my_turn = 1 + group,
              next_turn = 1 + (group + 1) % shape::CONSUMERS;
    uint32_t i = 0, q = 0; /* tiles and items so far */
    upi_cuda_fwd90_item item;
    if (shape::IN_TURN && group == shape::CONSUMERS - 1) upi_barrier_arrive(next_turn, 256);
    for (int turn = 0; upi_cuda_fwd90_item_of<shape::ROWS, shape::KEYS>(g, &turn, &item); ++turn) {
        const int q0 = item.q0 + group * 64;
        const upi_cuda_attn_tiles mine = upi_cuda_fwd90_tiles(g.a, q0, 64, KEYS);
        float o[shape::V / 2], s[KEYS / 2], top[2], sum[2], fold[2];
        uint32_t p[KEYS / 4];
        i = __shfl_sync(0xffffffffu, i, 0); /* the same in every lane: its addresses take uniform registers */
        UPI_UNROLL
        for (int e = 0; e < shape::V / 2; ++e) o[e] = 0;
        top[0] = top[1] = -INFINITY;
        sum[0] = sum[1] = 0;
        if (item.tiles.first < item.tiles.end) {
            int n = item.tiles.end - 1;
            upi_mbarrier_wait(bars + UPI_FWD90_Q_FULL, q++ % 2);
            upi_cuda_fwd90_begin_scores<shape>(s, at_q, base, i, my_turn);
            if (shape::IN_TURN) upi_barrier_arrive(next_turn, 256);
            upi_wgmma_wait<0>();
            if (arrives) upi_mbarrier_arrive(upi_cuda_fwd90_slot(bars + UPI_FWD90_K_EMPTY, i));
            upi_cuda_fwd90_softmax<KEYS>(s, top, sum, fold, g.a, mine, q0, n);
            upi_cuda_fwd90_pack<KEYS>(p, s);
            for (--n, ++i; n >= item.tiles.first; --n, ++i) {
                upi_cuda_fwd90_begin_scores<shape>(s, at_q, base, i, my_turn);
                upi_cuda_fwd90_begin_values<shape>(o, p, base, i - 1);
                if (shape::IN_TURN) upi_barrier_arrive(next_turn, 256);
                upi_wgmma_wait<1>(); /* the scores are there */
                if (arrives) upi_mbarrier_arrive(upi_cuda_fwd90_slot(bars + UPI_FWD90_K_EMPTY, i));
                upi_cuda_fwd90_softmax<KEYS>(s, top, sum, fold, g.a, mine, q0, n);
                upi_computed_before(sum[0] + sum[1], base); /* the weights, under the values' product */
                upi_wgmma_wait<0>();                        /* the values are, and p is free */
                if (arrives) upi_mbarrier_arrive(upi_cuda_fwd90_slot(bars + UPI_FWD90_V_EMPTY, i - 1));
                if (__any_sync(0xffffffffu, fold[0] != 1 || fold[1] != 1)) { /* seldom, once a row is long */
                    UPI_UNROLL
                    for (int e = 0; e < shape::V / 2; ++e) o[e] *= fold[e / 2 % 2];
                }
                upi_cuda_fwd90_pack<KEYS>(p, s);
            }
            if (shape::O_APART && arrives) upi_mbarrier_arrive(bars + UPI_FWD90_Q_EMPTY);
            upi_cuda_fwd90_begin_values<shape>(o, p, base, i - 1);
            upi_wgmma_wait<0>();
            if (arrives) upi_mbarrier_arrive(upi_cuda_fwd90_slot(bars + UPI_FWD90_V_EMPTY, i - 1));
        }
        upi_cuda_fwd90_output<shape>(g, item, base, group, o, top, sum);
        if (!shape::O_APART && arrives && item.tiles.first < item.tiles.end)
            upi_mbarrier_arrive(bars + UPI_FWD90_Q_EMPTY);
    }
    if (shape::IN_TURN && group == 0) upi_barrier_sync(my_turn, 256); /* the turn that nobody took */
    if (leads) {
        upi_bulk_wait_read<0>();
        upi_mbarrier_arrive(bars + UPI_FWD90_DONE);
    }
}

/* ---- the kernel ---- */

template <int D, int V, int KEYS>
UPI_HOPPER_KERNEL((upi_cuda_fwd90_shape<D, V, KEYS>::THREADS))
void upi_cuda_fwd90_kernel(UPI_BY_VALUE upi_cuda_fwd90_args g)
{
#if UPI_HOPPER_CODE
    typedef upi_cuda_fwd90_shape<D, V, KEYS> shape;
    UPI_SHARED(unsigned char, shared);
    const uint32_t base = upi_shared_address(shared), bars = base + shape::AT_BARRIERS;
    /* the same in every lane, which the compiler would not see */
    const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < 2; ++i) {
            upi_mbarrier_init(upi_cuda_fwd90_slot(bars + UPI_FWD90_K_FULL, i), 1);
            upi_mbarrier_init(upi_cuda_fwd90_slot(bars + UPI_FWD90_V_FULL, i), 1);
            upi_mbarrier_init(upi_cuda_fwd90_slot(bars + UPI_FWD90_K_EMPTY, i), shape::CONSUMERS * 4);
            upi_mbarrier_init(upi_cuda_fwd90_slot(bars + UPI_FWD90_V_EMPTY, i), shape::CONSUMERS * 4);
        }
        upi_mbarrier_init(bars + UPI_FWD90_Q_FULL, 1);
        upi_mbarrier_init(bars + UPI_FWD90_Q_EMPTY, shape::CONSUMERS * 4);
        upi_mbarrier_init(bars + UPI_FWD90_DONE, shape::CONSUMERS);
        upi_mbarrier_fence();
    }
    __syncthreads();
    if (group == 0) {
        upi_registers_less<shape::LOADER_REGISTERS>();
        if (threadIdx.x == 0) upi_cuda_fwd90_produce<shape>(g, base);
        if (threadIdx.x >= 96 && g.watch != NULL)
            upi_cuda_attn_watch<D, KEYS, 0, UPI_FWD90_DONE / 8>(g.watch, (int)blockIdx.x, bars);
    } else {
        upi_registers_more<shape::REGISTERS>();
        upi_cuda_fwd90_consume<shape>(g, base, group - 1);
    }
#endif
}

/* ---- host ---- */

enum { UPI_FWD90_CACHE = 32 << 20 }; /* bytes of keys and values that stay in the device's cache */

/* Why this kernel cannot run: the device's space, or the unit's code; NULL if it can. */
template <int D, int V, int KEYS> UPIPE_API const char *upi_cuda_fwd90_missing(const upipe_cuda *device)
{
    typedef upi_cuda_fwd90_shape<D, V, KEYS> shape;
    return upi_cuda_hopper_missing(
        device, shape::SHARED,
        UPI_HOPPER_FITS((upi_cuda_fwd90_kernel<D, V, KEYS>), shape::THREADS,
                        128 * (shape::LOADER_REGISTERS + shape::CONSUMERS * shape::REGISTERS)));
}

/* The same where there are tiles of 128 and of 176 keys. */
template <int D> UPIPE_API const char *upi_cuda_fwd90_missing_two(const upipe_cuda *device)
{
    const char *missing = upi_cuda_fwd90_missing<D, D, 128>(device);
    return missing != NULL ? missing : upi_cuda_fwd90_missing<D, D, 176>(device);
}

/* Why these kernels do not take the call: the device, the host, the unit's code, or shapes that tensor maps cannot
 * say; NULL if they do. */
UPIPE_API const char *upi_cuda_fwd90_obstacle(upipe_ctx *c, const upipe_attn *a)
{
    const upipe_cuda *self = (const upipe_cuda *)c->ops->self;
    const int columns = upi_cuda_attn_columns(a), plain = !a->merge && a->o.dtype != UPIPE_F32;
    if (self->capability / 10 != 9) return "the device is of another generation";
    if (self->avoid & UPIPE_CUDA_AVOID_FWD90) return "the host avoids those for 9.0";
    if (!upi_tensor_map_fits(a->q) || !upi_tensor_map_fits(a->k) || !upi_tensor_map_fits(a->v) ||
        (plain && !upi_tensor_map_fits(a->o)))
        return "no tensor map has these strides";
    if ((a->q.n / 128 + 1) * a->q.h > INT32_MAX / 2) return "32 bits do not count the blocks of queries";
    return columns <= 64                 ? upi_cuda_fwd90_missing<64, 64, 128>(self)
           : columns <= 96               ? upi_cuda_fwd90_missing_two<96>(self)
           : columns <= 128              ? upi_cuda_fwd90_missing_two<128>(self)
           : upi_cuda_attn_is_192_128(a) ? upi_cuda_fwd90_missing<192, 128, 128>(self)
           : columns <= 192              ? upi_cuda_fwd90_missing<192, 192, 112>(self)
                                         : upi_cuda_fwd90_missing<256, 256, 80>(self);
}

/* Whether tiles of 176 keys serve a call better than those of 128, where there are both: every query sees every
 * key, so no tile is cut by a mask, and the last one wastes little. A key then takes fewer instructions. */
UPIPE_API int upi_cuda_fwd90_suits_176(const upipe_attn *a)
{
    const int64_t more = (a->k.n + 175) / 176 * 176, fewer = (a->k.n + 127) / 128 * 128;
    int64_t first, end, unused;
    upipe_attn_visible(a, 0, &unused, &end);
    upipe_attn_visible(a, a->q.n - 1, &first, &unused);
    return first == 0 && end == a->k.n && more - fewer <= fewer / 16;
}

/* The list of items of a call, with g->a; returns the blocks of the grid. */
template <class shape> UPIPE_API int upi_cuda_fwd90_deal(upi_cuda_fwd90_args *g, int processors)
{
    const upi_cuda_attn_args *a = &g->a;
    const int rows = shape::ROWS;
    const int64_t fit = UPI_FWD90_CACHE / ((int64_t)(a->d + a->v_dim) * 2) / a->keys * a->group;
    int items, grid;
    g->blocks = (int)((a->queries + rows - 1) / rows);
    g->section = (int)upi_clamp(fit, a->group, a->heads);
    items = g->blocks * a->heads;
    grid = items < processors ? items : processors;
    g->rounds = (g->blocks * g->section + grid - 1) / grid;
    g->more = g->blocks * g->section % grid;
    return grid;
}

template <int D, int V, int KEYS>
UPIPE_API upipe_status upi_cuda_fwd90_launch(upipe_ctx *c, const upipe_attn *call,
                                             const upi_cuda_attn_args *a)
{
    typedef upi_cuda_fwd90_shape<D, V, KEYS> shape;
    const upipe_cuda *self = (const upipe_cuda *)c->ops->self;
    upi_cuda_fwd90_args g;
    int grid;
    memset(&g, 0, sizeof g);
    UPIPE_TRY(upi_tensor_map_make(c, &g.q, call->q, shape::ROWS));
    UPIPE_TRY(upi_tensor_map_make(c, &g.k, call->k, KEYS));
    UPIPE_TRY(upi_tensor_map_make(c, &g.v, call->v, KEYS));
    if (!a->merge && !a->wide) UPIPE_TRY(upi_tensor_map_make(c, &g.o, call->o, 64));
    g.a = *a;
    g.watch = self->watch;
    grid = upi_cuda_fwd90_deal<shape>(&g, self->processors - self->margin);
    UPIPE_TRY(UPI_ALLOW_SHARED(c, (upi_cuda_fwd90_kernel<D, V, KEYS>), shape::SHARED));
    if (a->runs != NULL) UPIPE_TRY(upi_cuda_attn_query_runs(c, call, (upi_cuda_attn_run *)call->work));
    if (call->mask.borders.cu_seqlens != NULL) {
        int *order = (int *)((char *)call->work + upi_cuda_attn_runs_bytes(a->queries));
        UPIPE_TRY(UPI_LAUNCH(c, (upi_cuda_fwd90_order_kernel<shape::ROWS, KEYS>),
                             (unsigned)((g.blocks + UPI_FWD90_ORDER_THREADS - 1) / UPI_FWD90_ORDER_THREADS),
                             UPI_FWD90_ORDER_THREADS, UPI_FWD90_ORDER_THREADS * sizeof(int), *a, order,
                             g.blocks));
        g.order = order;
    }
    return UPI_LAUNCH(c, (upi_cuda_fwd90_kernel<D, V, KEYS>), (unsigned)grid, shape::THREADS, shape::SHARED,
                      g);
}

/* Forward of a call that these kernels take. */
UPIPE_API upipe_status upi_cuda_attn_fwd90(upipe_ctx *c, const upipe_attn *call, const upi_cuda_attn_args *a)
{
    const int columns = upi_cuda_attn_columns(call),
              keys_176 = columns > 64 && columns <= 128 && upi_cuda_fwd90_suits_176(call),
              two_dims = upi_cuda_attn_is_192_128(call);
    upi_cuda_attn_chosen(c, "forward",
                         columns > 192                ? "9.0, tiles of 80 keys"
                         : columns > 128 && !two_dims ? "9.0, tiles of 112 keys"
                         : keys_176                   ? "9.0, tiles of 176 keys"
                                                      : "9.0, tiles of 128 keys",
                         NULL);
    if (columns <= 64) return upi_cuda_fwd90_launch<64, 64, 128>(c, call, a);
    if (columns <= 96 && keys_176) return upi_cuda_fwd90_launch<96, 96, 176>(c, call, a);
    if (columns <= 96) return upi_cuda_fwd90_launch<96, 96, 128>(c, call, a);
    if (columns <= 128 && keys_176) return upi_cuda_fwd90_launch<128, 128, 176>(c, call, a);
    if (columns <= 128) return upi_cuda_fwd90_launch<128, 128, 128>(c, call, a);
    if (two_dims) return upi_cuda_fwd90_launch<192, 128, 128>(c, call, a);
    if (columns <= 192) return upi_cuda_fwd90_launch<192, 192, 112>(c, call, a);
    return upi_cuda_fwd90_launch<256, 256, 80>(c, call, a);
}

#endif
