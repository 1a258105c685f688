/* items.cpp -- how the forward for 9.0 deals its items to processors: each once, and nobody much more than others
 *
 * A static list is as fast as the block that has most to do. This runs the function that every block asks for its items,
 * for all blocks of a call, and adds up tiles of keys: causal, full and windowed calls of every kernel, with and without
 * groups, in one section of heads and in many; and packed sequences, in the order that the kernel before makes.
 */
#include "upipe/cuda/upipe_cuda_attn_bwd.h"

#include <algorithm>
#include <vector>

#include "../lib/test.h"

enum { PROCESSORS = 132, WINDOW = 4096 };

static uint64_t digest = UPIPE_HASH; /* of the orders that the kernel makes */

typedef struct load {
    double mean;
    int64_t most, longest;
} load;

static upipe_attn call_make(int64_t tokens, int heads, int group, int d, int causal)
{
    upipe_attn a;
    memset(&a, 0, sizeof a);
    a.q = a.o = upipe_view_packed(NULL, UPIPE_BF16, tokens, heads, d);
    a.k = a.v = upipe_view_packed(NULL, UPIPE_BF16, tokens, heads / group, d);
    a.mask.causal = causal;
    a.pos_step = 1;
    return a;
}

static void say(const upipe_attn *a)
{
    printf("  %lld tokens, %d / %d heads, d %d%s%s%s\n", (long long)a->q.n, a->q.h, a->k.h, a->q.d,
           a->mask.causal ? ", causal" : "", a->mask.window > 0 ? ", window" : "",
           a->mask.borders.cu_seqlens != NULL ? ", packed" : "");
}

/* The tables that the kernels before leave in scratch: what each query sees, and the order of blocks. */
template <int D, int KEYS>
static void tables(const upipe_attn *a, upi_cuda_fwd90_args *g, std::vector<int> *order)
{
    typedef upi_cuda_fwd90_shape<D, D, KEYS> shape;
    upi_cuda_attn_run *runs = (upi_cuda_attn_run *)a->work;
    const int blocks = g->blocks;
    const simt_shape launch = {{(blocks + 255) / 256, 1, 1},
                               {UPI_FWD90_ORDER_THREADS, 1, 1},
                               UPI_FWD90_ORDER_THREADS * sizeof(int),
                               1};
    for (int64_t i = 0; i < a->q.n; ++i) {
        int64_t first, end;
        upipe_attn_visible(a, i, &first, &end);
        runs[i].first = (int)first, runs[i].end = (int)std::max(first, end);
    }
    if (a->mask.borders.cu_seqlens == NULL) return;
    order->assign((size_t)blocks, -1);
    simt_run(launch, [&] { upi_cuda_fwd90_order_kernel<shape::ROWS, KEYS>(g->a, order->data(), blocks); });
    digest = upipe_hash_bytes(digest, order->data(), order->size() * sizeof(int));
    g->order = order->data();
}

/* An item costs its tiles and one more, for what comes before and behind them. */
template <int D, int KEYS> static load deal(const upipe_attn *a, int processors)
{
    typedef upi_cuda_fwd90_shape<D, D, KEYS> shape;
    static simt_block here;
    upi_cuda_fwd90_args g;
    std::vector<int> order;
    std::vector<char> taken;
    load x = {0, 0, 0};
    int64_t fewest = INT64_MAX, greatest = 0;
    memset(&g, 0, sizeof g);
    g.a = upi_cuda_attn_args_make(a);
    here.grid.x = (unsigned)upi_cuda_fwd90_deal<shape>(&g, processors);
    if (g.a.runs != NULL) tables<D, KEYS>(a, &g, &order);
    simt_here = &here;
    taken.assign((size_t)g.blocks * (size_t)a->q.h, 0);
    for (here.index.x = 0; here.index.x < here.grid.x; ++here.index.x) {
        upi_cuda_fwd90_item item;
        int64_t sum = 0, count = 0;
        for (int turn = 0; upi_cuda_fwd90_item_of<shape::ROWS, KEYS>(g, &turn, &item); ++turn, ++count) {
            const int64_t tiles = std::max(0, item.tiles.end - item.tiles.first) + 1;
            ++taken[(size_t)(item.head * g.blocks + item.q0 / shape::ROWS)];
            sum += tiles;
            x.longest = std::max(x.longest, tiles);
        }
        x.mean += (double)sum / here.grid.x;
        x.most = std::max(x.most, sum);
        fewest = std::min(fewest, count), greatest = std::max(greatest, count);
    }
    simt_here = NULL;
    CHECK(std::all_of(taken.begin(), taken.end(), [](char times) { return times == 1; }));
    CHECK_SAY(greatest - fewest <= 1, "from %lld to %lld items a block", (long long)fewest,
              (long long)greatest);
    return x;
}

/* By the kernel that upi_cuda_attn_fwd90 takes. */
static load deal_any(const upipe_attn *a, int processors)
{
    const int d = (int)a->q.d, keys_176 = upi_cuda_fwd90_suits_176(a);
    if (d <= 64) return deal<64, 128>(a, processors);
    if (d <= 96) return keys_176 ? deal<96, 176>(a, processors) : deal<96, 128>(a, processors);
    if (d <= 128) return keys_176 ? deal<128, 176>(a, processors) : deal<128, 128>(a, processors);
    if (d <= 192) return deal<192, 112>(a, processors);
    return deal<256, 80>(a, processors);
}

/* No block has much more than the mean and an item that could not be dealt otherwise. */
static void check_even(const upipe_attn *a, double factor)
{
    const long failed = test_failures;
    const load x = deal_any(a, PROCESSORS);
    CHECK_SAY((double)x.most <= factor * x.mean + (double)x.longest,
              "%lld tiles, %.0f in the mean, %lld an item", (long long)x.most, x.mean, (long long)x.longest);
    if (test_shown_since(failed)) say(a);
}

static const int64_t lengths[] = {4096,  6000,   8192,   16384,  24000,  32768,
                                  65536, 100000, 131072, 262144, 1 << 20};
static const int heads[] = {1, 2, 3, 4, 5, 8, 12, 16, 32, 40, 64};
static const int dims[] = {64, 128, 192, 256};

/* Every length, every number of heads, every kernel. */
static void test_masks(void)
{
    for (int64_t n : lengths)
        for (int h : heads)
            for (int d : dims) {
                upipe_attn a = call_make(n, h, 1, d, 1);
                check_even(&a, 1.03);
                a.mask.causal = 0;
                check_even(&a, 1.03);
            }
}

/* Groups make sections larger. */
static void test_groups(void)
{
    for (int64_t n : lengths)
        for (int group : {2, 4, 8})
            for (int d : dims) {
                const upipe_attn a = call_make(n, 8 * group, group, d, 1);
                check_even(&a, 1.03);
            }
}

/* Scratch for a call's runs, which only queries of a masked one have. */
static void check_masked(upipe_attn a, double factor)
{
    std::vector<upi_cuda_attn_run> runs((size_t)a.q.n);
    a.work = runs.data();
    check_even(&a, factor);
}

/* The first queries of a window see little: so short items of every section lie together. */
static void test_windows(void)
{
    for (int64_t n : lengths)
        for (int h : {1, 5, 16, 64})
            for (int d : dims) {
                upipe_attn a = call_make(n, h, 1, d, 1);
                a.mask.window = WINDOW;
                check_masked(a, 1.04);
            }
}

/* Packed sequences: all of a length, of any length to 8,192, and few long ones among many short ones. */
static void test_packed(void)
{
    uint64_t seed = 1;
    for (int64_t n : lengths)
        for (int h : {1, 3, 8, 40})
            for (int d : dims)
                for (int kind = 0; kind < 3; ++kind) {
                    test_rng r = {seed++};
                    std::vector<int64_t> border = {0};
                    upipe_attn a = call_make(n, h, 1, d, 1);
                    while (border.back() < n) {
                        const int64_t next = kind == 0   ? n / 8 + 1
                                             : kind == 1 ? 64 + test_below(&r, 8192)
                                                         : (int64_t)(200 * exp(test_below(&r, 5000) * 1e-3));
                        border.push_back(std::min(n, border.back() + next));
                    }
                    a.mask.borders.cu_seqlens = border.data();
                    a.mask.borders.cu_seqlens_n = (int64_t)border.size() - 1;
                    check_masked(a, 1.03);
                }
}

/* Keys in parts: queries of a sequence that begins behind the last key see none, and their blocks come last. */
static void test_unseen(void)
{
    const int64_t border[] = {0, 600, 1000, 1500};
    for (int d : dims) {
        upipe_attn a = call_make(1000, 2, 1, d, 1);
        a.q_pos = 500;
        a.mask.borders.cu_seqlens = border;
        a.mask.borders.cu_seqlens_n = 3;
        check_masked(a, 1.03);
    }
}

/* What bench/gpu.py measures, and others of whose time a fifth and more was lost: the share of it that is used. */
static void test_used(void)
{
    static const struct {
        int64_t tokens;
        int heads, d, percent;
    } cases[] = {{16384, 16, 128, 99}, {16384, 32, 128, 99}, {8192, 32, 128, 99},  {32768, 16, 128, 99},
                 {32768, 4, 128, 99},  {65536, 2, 128, 99},  {131072, 4, 128, 99}, {1 << 20, 1, 128, 99},
                 {16384, 8, 256, 99},  {16384, 16, 64, 98}};
    for (const auto &x : cases) {
        const upipe_attn a = call_make(x.tokens, x.heads, 1, x.d, 1);
        const load got = deal_any(&a, PROCESSORS);
        if (!CHECK_SAY(100 * got.mean >= x.percent * (double)got.most, "%.1f %%",
                       100 * got.mean / (double)got.most))
            say(&a);
    }
}

/* Other numbers of processors, one and more than there are items among them. */
static void test_processors(void)
{
    for (int processors : {1, 2, 3, 7, 66, 114, 144})
        for (int h : {1, 4, 9})
            for (int64_t n : {1, 200, 20000, 70000}) {
                const upipe_attn a = call_make(n, h, 1, 128, 1);
                deal_any(&a, processors);
            }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_masks());
    TEST(test_groups());
    TEST(test_windows());
    TEST(test_packed());
    TEST(test_unseen());
    TEST(test_used());
    TEST(test_processors());
    printf("digest %016llx\n", (unsigned long long)digest);
    return test_end("cuda_items");
}
