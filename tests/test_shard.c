/* test_shard -- which rank holds which tokens: a permutation for every layout, pieces that say the same as
 * positions, rows of a batch, equal work for the ring's ranks at every step
 */
#include "lib/test.h"
#include "upipe/upipe_plan.h"

enum { TOKENS_MAX = 4096, RING_MAX = 8 };

/* All ranks' rows together are the sequence; each rank's pieces say what its positions say. */
static void walk(upipe_layout layout, int64_t tokens, int ring, int ranks)
{
    char seen[TOKENS_MAX] = {0};
    int64_t held_n = 0, most = 0, least = tokens;
    for (int r = 0; r < ring; ++r) {
        upipe_shard held = upipe_shard_ring(layout, tokens, ring, r);
        int64_t row = 0;
        test_at("%lld tokens, %s, %d x %d ranks, ring rank %d", (long long)tokens, upipe_layout_name(layout),
                ranks, ring, r);
        CHECK_INT(held.step, layout == UPIPE_STRIPED ? ring : 1);
        held_n += held.n;
        if (held.n > most) most = held.n;
        if (held.n < least) least = held.n;
        for (int c = 0; c < ranks; ++c) {
            upipe_shard mine = upi_shard_team(&held, ranks, c);
            int64_t sum = 0;
            test_rank = c;
            CHECK_INT(mine.step, held.step);
            CHECK(mine.pieces >= 0 && mine.pieces <= UPIPE_PIECES_MAX);
            for (int k = 0; k < mine.pieces; ++k) {
                CHECK(mine.piece[k].n >= 1);
                for (int64_t i = 0; i < mine.piece[k].n; ++i, ++sum)
                    CHECK_INT(upipe_shard_pos(&mine, sum), mine.piece[k].pos + i * mine.step);
            }
            CHECK_INT(sum, mine.n);
            CHECK_SAY(mine.n == held.n / ranks || mine.n == held.n / ranks + 1,
                      "rank %d of %d has %lld of %lld rows", c, ranks, (long long)mine.n, (long long)held.n);
            for (int64_t i = 0; i < mine.n; ++i, ++row) {
                int64_t pos = upipe_shard_pos(&mine, i);
                if (!CHECK_SAY(pos >= 0 && pos < tokens, "row %lld of rank %d of %d is position %lld of %lld",
                               (long long)i, c, r, (long long)pos, (long long)tokens))
                    return;
                /* the team's parts are in order of the ring rank's rows, and a rank's rows ascend */
                CHECK_INT(pos, upipe_shard_pos(&held, row));
                CHECK(i == 0 || pos > upipe_shard_pos(&mine, i - 1));
                CHECK_SAY(!seen[pos], "%s: position %lld of %lld is on two of %d x %d ranks",
                          upipe_layout_name(layout), (long long)pos, (long long)tokens, ranks, ring);
                seen[pos] = 1;
            }
        }
        test_rank = -1;
        CHECK_INT(row, held.n);
    }
    CHECK_INT(held_n, tokens);
    CHECK(most - least <= (layout == UPIPE_ZIGZAG ? 2 : 1));
    for (int64_t i = 0; i < tokens; ++i)
        if (!CHECK_SAY(seen[i], "%s: nobody of %d x %d ranks has position %lld of %lld",
                       upipe_layout_name(layout), ranks, ring, (long long)i, (long long)tokens))
            return;
}

static void test_permutation(void)
{
    static const int64_t lengths[] = {64, 97, 128, 1000, 4095};
    for (int layout = 0; layout < UPIPE_LAYOUTS; ++layout)
        for (int ring = 1; ring <= RING_MAX; ++ring)
            for (int ranks = 1; ranks <= 5; ++ranks) {
                int64_t least = (int64_t)ring * ranks * (layout == UPIPE_ZIGZAG && ring > 1 ? 2 : 1);
                for (int64_t tokens = least; tokens < least + 2 * ring + 3; ++tokens)
                    walk((upipe_layout)layout, tokens, ring, ranks);
                for (int i = 0; i < 5; ++i)
                    if (lengths[i] >= least) walk((upipe_layout)layout, lengths[i], ring, ranks);
            }
}

/* Lengths for which n * i leaves 63 bits, and the longest of all. */
static void test_large(void)
{
    int64_t tokens = (INT64_C(1) << 60) + 12345, before = 0, striped = 0;
    for (int i = 0; i < 4; ++i) striped += upipe_shard_ring(UPIPE_STRIPED, INT64_MAX, 4, i).n;
    CHECK_INT(striped, INT64_MAX);
    for (int i = 0; i <= 7; ++i) {
        int64_t at = upipe_cut(tokens, 7, i);
        CHECK(i == 0 ? at == 0 : at - before == tokens / 7 || at - before == tokens / 7 + 1);
        before = at;
    }
    CHECK_INT(before, tokens);
    CHECK_INT(upipe_cut(10, 4, 1), 2);
    CHECK_INT(upipe_cut(10, 4, 2), 5);
    CHECK_INT(upipe_cut(10, 4, 3), 7);
}

/* Rows of a shard by any window. */
static void test_rows(void)
{
    upipe_shard held = upipe_shard_ring(UPIPE_ZIGZAG, 37, 3, 1);
    for (int64_t first = 0; first <= held.n; ++first)
        for (int64_t n = 0; first + n <= held.n; ++n) {
            upipe_shard s = upi_shard_rows(&held, first, n);
            CHECK_INT(s.n, n);
            for (int64_t i = 0; i < n; ++i)
                CHECK_INT(upipe_shard_pos(&s, i), upipe_shard_pos(&held, first + i));
        }
    CHECK_INT(strcmp(upipe_layout_name(UPIPE_CONTIGUOUS), "contiguous"), 0);
    CHECK_INT(strcmp(upipe_layout_name(UPIPE_ZIGZAG), "zigzag"), 0);
    CHECK_INT(strcmp(upipe_layout_name(UPIPE_STRIPED), "striped"), 0);
}

/* Rows of a batch of two sequences of 10, which 2 x 2 ranks share: written out by hand. */
static void test_batch(void)
{
    static const int want[UPIPE_LAYOUTS][4][6] = {
        {{0, 1, 10, 11}, {2, 3, 4, 12, 13, 14}, {5, 6, 15, 16}, {7, 8, 9, 17, 18, 19}},
        {{0, 1, 10, 11}, {7, 8, 9, 17, 18, 19}, {2, 3, 12, 13}, {4, 5, 6, 14, 15, 16}},
        {{0, 2, 10, 12}, {4, 6, 8, 14, 16, 18}, {1, 3, 11, 13}, {5, 7, 9, 15, 17, 19}},
    };
    for (int layout = 0; layout < UPIPE_LAYOUTS; ++layout)
        for (int rank = 0; rank < 4; ++rank) {
            upipe_plan_desc d = {.tokens = 10, .batch = 2, .ranks = 2, .ring = 2, .heads = 2, .head_dim = 32};
            upipe_plan p;
            upipe_err e;
            d.layout = (upipe_layout)layout, d.rank = rank % 2, d.ring_rank = rank / 2;
            test_at("%s, rank %d of ring rank %d", upipe_layout_name(d.layout), d.rank, d.ring_rank);
            CHECK_STATUS(upipe_plan_init(&p, &d, &e), UPIPE_OK, e);
            CHECK_INT(p.rows, d.rank == 0 ? 4 : 6);
            for (int r = 0; r < (int)p.rows; ++r) CHECK_INT(upipe_plan_row(&p, r), want[layout][rank][r]);
        }
}

/* Work of ring rank r in a step in which it has the keys of rank s, under a causal mask: visible pairs, and
 * tiles of `tile` rows and keys with one at least, piece by piece. */
static int64_t work(upipe_layout layout, int64_t tokens, int ring, int r, int s, int64_t tile)
{
    upipe_shard q = upipe_shard_ring(layout, tokens, ring, r), k = upipe_shard_ring(layout, tokens, ring, s);
    int64_t sum = 0, i, j;
    for (int a = 0; a < q.pieces; ++a)
        for (int b = 0; b < k.pieces; ++b)
            for (i = 0; i < q.piece[a].n; i += tile)
                for (j = 0; j < k.piece[b].n; j += tile) {
                    /* the tile's last query sees its first key? */
                    int64_t last = i + tile < q.piece[a].n ? i + tile : q.piece[a].n;
                    sum += q.piece[a].pos + (last - 1) * q.step >= k.piece[b].pos + j * k.step;
                }
    return sum;
}

/* At every step of the ring all ranks have the same work, but for a tile's: in pairs where tokens do not
 * divide, in tiles where they do. Contiguous parts are what it is not for. */
static void test_balance(void)
{
    enum { TILE = 16 };
    for (int layout = 0; layout < UPIPE_LAYOUTS; ++layout)
        for (int ring = 2; ring <= RING_MAX; ++ring)
            for (int uneven = 0; uneven < 2; ++uneven) {
                int64_t tokens = 2 * ring * 2 * TILE + (uneven ? 2 * ring - 1 : 0);
                int64_t slack = uneven ? TILE * TILE : 1, widest = 0;
                for (int step = 0; step < ring; ++step) {
                    int64_t most = 0, least = INT64_MAX;
                    for (int r = 0; r < ring; ++r) {
                        int64_t w = work((upipe_layout)layout, tokens, ring, r, (r - step + ring) % ring,
                                         uneven ? 1 : TILE);
                        if (w > most) most = w;
                        if (w < least) least = w;
                    }
                    if (most - least > widest) widest = most - least;
                }
                if (layout == UPIPE_CONTIGUOUS)
                    CHECK(widest > 8 * slack);
                else
                    CHECK_SAY(
                        widest <= slack, "%s, ring of %d, %lld tokens: ranks differ by %lld", /* of a step */
                        upipe_layout_name((upipe_layout)layout), ring, (long long)tokens, (long long)widest);
            }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_permutation());
    TEST(test_large());
    TEST(test_rows());
    TEST(test_batch());
    TEST(test_balance());
    return test_end("shard");
}
