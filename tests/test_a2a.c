/* test_a2a -- the all-to-alls by address formula, for heads and tokens that divide or do not, shared
 * key/value blocks, stages packed and unpacked, slots, sums in rank order
 *
 * Every element names its origin, f(token, head, dim), so a misrouted byte shows its origin.
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe_a2a.h"
#include "upipe/upipe_reduce.h"

#include "lib/context.h"
#include "lib/transfers.h"

static upipe_status sum_rows(upipe_ctx *c, upipe_view dst, const float *src, int64_t step, int count,
                             int accumulate)
{
    (void)c;
    for (int64_t i = 0; i < dst.d; ++i) {
        float sum = accumulate ? ((float *)dst.data)[i] : 0;
        for (int k = 0; k < count; ++k) sum += src[k * step + i];
        ((float *)dst.data)[i] = sum;
    }
    return UPIPE_OK;
}

typedef struct world {
    upipe_threads team;
    upipe_ops ops;
    upipe_plan_desc desc;
    int64_t sum_n;
    const float *want;
    float *sums[8];
    uint16_t *halves[8]; /* to be gathered as elements of two bytes */
} world;

/* one element: 7 bits of sequence, 21 of token, 10 of head, 9 of dim */
static int64_t origin(int64_t sequence, int64_t token, int head, int dim)
{
    return ((sequence << 21 | token) << 10 | head) << 9 | dim;
}

static void check_origin(int64_t got, int64_t want, const char *what)
{
    CHECK_SAY(got == want,
              "%s: token %lld head %d dim %d of sequence %lld lies where token %lld head %d dim %d belongs",
              what, (long long)(got >> 19 & 0x1fffff), (int)(got >> 9 & 1023), (int)(got & 511),
              (long long)(got >> 40), (long long)(want >> 19 & 0x1fffff), (int)(want >> 9 & 1023),
              (int)(want & 511));
}

/* What lies at an element of a team's tensor [batch][tokens from `first` on][heads of the span][dim]. */
static void fill_origins(int64_t *out, const upipe_plan *p, int64_t first, int64_t tokens,
                         upipe_head_range heads)
{
    for (int64_t b = 0; b < p->desc.batch; ++b)
        for (int64_t t = 0; t < tokens; ++t)
            for (int j = 0; j < heads.count; ++j)
                for (int k = 0; k < p->desc.head_dim; ++k) *out++ = origin(b, first + t, heads.first + j, k);
}

static void check_origins(const int64_t *got, const upipe_plan *p, int64_t first, int64_t tokens,
                          upipe_head_range heads, const char *what)
{
    int64_t n = p->desc.batch * tokens * heads.count * p->desc.head_dim, i;
    int64_t *want = (int64_t *)malloc((size_t)n * 8 + 8);
    fill_origins(want, p, first, tokens, heads);
    for (i = 0; i < n; ++i) check_origin(got[i], want[i], what);
    free(want);
}

/* Q, K, V to heads, and Q and gradients of K and V back to tokens, over every stage of a plan; elements are
 * int64, so that a head of `dim` of them is 8 * dim bytes. */
static upipe_status all_to_all_body(void *user, int rank)
{
    enum { SPARE = 8, WALL = 0x5a };
    world *w = (world *)user;
    upipe_plan_desc desc = w->desc;
    upipe_plan plan, *p = &plan;
    int64_t *send, *heads, *back, mine, first;
    size_t each = (size_t)desc.head_dim * 8, buf;
    int r;
    upipe_status s = UPIPE_OK;
    upipe_ctx c = {0};
    test_rank = rank;
    desc.rank = rank;
    UPIPE_TRY(upipe_plan_init(p, &desc, &c.err));
    c.ops = &w->ops;
    c.team = upipe_threads_comm(&w->team, rank);
    mine = upi_plan_tokens(p, rank, &first);
    CHECK_INT(mine, p->local);
    buf = (size_t)(p->team_tokens * desc.batch * 2 * desc.heads + SPARE) * each; /* enough for all */
    send = (int64_t *)buffer(buf);
    heads = (int64_t *)buffer(buf);
    back = (int64_t *)buffer(buf);
    for (int stage = 0; stage < p->stages && s == UPIPE_OK; ++stage) {
        for (int which = UPIPE_A2A_Q; which <= UPIPE_A2A_DKV && s == UPIPE_OK; ++which) {
            upipe_head_range own = upipe_plan_part(p, (upipe_a2a_heads)which, stage, rank);
            int64_t sent = c.team->sent_bytes, want = 0, end;
            /* to heads: the block of a rank lies where upipe_plan_offset says */
            if (which != UPIPE_A2A_DKV) {
                for (r = 0; r < desc.ranks; ++r) {
                    upipe_head_range theirs = upipe_plan_part(p, (upipe_a2a_heads)which, stage, r);
                    int at = upipe_plan_offset(p, (upipe_a2a_heads)which, stage, r);
                    fill_origins(send + at * p->rows * desc.head_dim, p, first, mine, theirs);
                    if (r != rank) want += theirs.count * p->rows * (int64_t)each;
                }
                memset(heads, WALL, buf);
                s = upipe_a2a_to_heads(&c, heads, send, p, stage, (upipe_a2a_heads)which, each);
                CHECK_STATUS(s, UPIPE_OK, c.err);
                CHECK_INT(c.team->sent_bytes - sent, want);
                check_origins(heads, p, 0, p->team_tokens, own, which == UPIPE_A2A_Q ? "Q'" : "K'");
                end = p->team_tokens * desc.batch * own.count * desc.head_dim;
                for (int n = 0; n < SPARE; ++n) CHECK_INT(heads[end + n], INT64_C(0x5a5a5a5a5a5a5a5a));
            }
            /* to tokens: every rank's heads of the tokens here, rank by rank */
            if (which == UPIPE_A2A_KV) continue;
            fill_origins(heads, p, 0, p->team_tokens, own);
            sent = c.team->sent_bytes;
            memset(back, WALL, buf);
            s = upipe_a2a_to_tokens(&c, back, heads, p, stage, (upipe_a2a_heads)which, each);
            CHECK_STATUS(s, UPIPE_OK, c.err);
            CHECK_INT(c.team->sent_bytes - sent,
                      own.count * (p->team_tokens - mine) * desc.batch * (int64_t)each);
            for (r = 0, end = 0; r < desc.ranks; ++r) {
                upipe_head_range theirs = upipe_plan_part(p, (upipe_a2a_heads)which, stage, r);
                check_origins(back + end, p, first, mine, theirs, which == UPIPE_A2A_Q ? "O" : "dK");
                end += theirs.count * p->rows * desc.head_dim;
            }
            for (int n = 0; n < SPARE; ++n) CHECK_INT(back[end + n], INT64_C(0x5a5a5a5a5a5a5a5a));
        }
    }
    return s;
}

/* A body on every rank of a team. */
static int on_threads(world *w, int ranks, upipe_status (*body)(void *user, int rank))
{
    upipe_err e;
    upipe_status s;
    CHECK(upipe_threads_init(&w->team, ranks, 30, &e) == UPIPE_OK);
    s = upipe_threads_run(&w->team, body, w, NULL, NULL);
    upipe_threads_free(&w->team);
    return s == UPIPE_OK;
}

static void transfer(const upipe_plan_desc *desc)
{
    world w = {.desc = *desc, .ops.copy = plain_copy, .ops.sync = plain_sync};
    test_at("%d/%d heads, %d ranks, chunk %d, %lld tokens", desc->heads, desc->kv_heads, desc->ranks,
            desc->chunk, (long long)desc->tokens);
    CHECK(on_threads(&w, desc->ranks, all_to_all_body));
    buffers_free(0);
}

/* Every schedule, and what does not divide: heads, tokens, both; a team that is one of a ring's. */
static void test_all_to_all(void)
{
    /* ranks, heads, kv heads, chunk, naive */
    static const int cases[][5] = {
        {1, 4, 2, 2, 0},  {2, 8, 4, 4, 0},   {4, 16, 4, 4, 0},  {4, 16, 4, 16, 0}, {4, 16, 8, 8, 0},
        {8, 16, 2, 8, 0}, {4, 8, 1, 4, 0},   {3, 12, 3, 3, 1},  {4, 16, 4, 4, 1},  {3, 9, 3, 3, 0},
        {2, 12, 2, 4, 1}, {8, 28, 4, 8, 0},  {8, 28, 4, 28, 0}, {4, 40, 10, 4, 0}, {4, 40, 10, 12, 0},
        {2, 9, 3, 2, 0},  {3, 9, 3, 9, 0},   {4, 6, 1, 4, 0},   {3, 5, 5, 3, 0},   {3, 2, 2, 2, 0},
        {3, 2, 1, 2, 0},  {5, 32, 8, 15, 0}, {4, 18, 6, 8, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i)
        for (int odd = 0; odd < 3; ++odd)
            for (int ring = 1; ring <= 2; ++ring) {
                upipe_plan_desc d = {.ranks = cases[i][0],
                                     .heads = cases[i][1],
                                     .kv_heads = cases[i][2],
                                     .chunk = cases[i][3],
                                     .naive = cases[i][4]};
                d.tokens = (5 * d.ranks + odd) * ring; /* odd tokens of the team's, of one rank, of two */
                d.batch = 1 + (int64_t)i % 3;
                d.head_dim = 3;
                d.ring = ring;
                d.ring_rank = ring - 1;
                transfer(&d);
            }
}

/* Every stage packed and unpacked is the tensor again; and the layout is what the plan says of one head. */
static void test_packs(void)
{
    const upipe_plan_desc d = {
        .tokens = 8, .ranks = 2, .heads = 4, .kv_heads = 2, .head_dim = 32, .v_dim = 40};
    const upipe_ops ops = cpu_table();
    float from[4 * 4 * 32], to[4 * 4 * 32], send[4 * 4 * 32];
    upipe_view q = upipe_view_packed(from, UPIPE_F32, 4, 4, 32), back = q;
    upipe_ctx c = {.ops = &ops};
    upipe_plan p;
    CHECK_STATUS(upipe_plan_init(&p, &d, &c.err), UPIPE_OK, c.err);
    back.data = to;
    for (int i = 0; i < 4 * 4 * 32; ++i) from[i] = (float)i;
    memset(to, 0, sizeof to);
    for (int stage = 0; stage < p.stages; ++stage) {
        CHECK_STATUS(upipe_a2a_pack(&c, send, &p, stage, UPIPE_A2A_Q, q), UPIPE_OK, c.err);
        for (int rank = 0; rank < 2; ++rank) { /* row 3 of a rank's first head */
            const int head = upipe_plan_q(&p, stage, rank).first;
            const int at = upipe_plan_offset(&p, UPIPE_A2A_Q, stage, rank) * 4 * 32;
            CHECK(send[at + 3 * 32 * p.per_rank] == from[(3 * 4 + head) * 32]);
        }
        CHECK_STATUS(upipe_a2a_unpack(&c, back, &p, stage, UPIPE_A2A_Q, send), UPIPE_OK, c.err);
    }
    CHECK_BYTES(to, from, sizeof to);
    CHECK_STATUS(upipe_a2a_unpack(&c, back, &p, 0, UPIPE_A2A_DKV, send), UPIPE_ERR_ARG, c.err);
    CHECK_STATUS(upipe_a2a_pack(&c, send, &p, p.stages, UPIPE_A2A_Q, q), UPIPE_ERR_ARG, c.err);
    CHECK_REFUSED(upipe_a2a_pack(&c, send, &p, 0, UPIPE_A2A_KV, q), UPIPE_ERR_ARG, c.err,
                  "[4][2], not [4][4]");
}

static upipe_status sum_body(void *user, int rank)
{
    world *w = (world *)user;
    upipe_mem mem;
    upipe_status s;
    upipe_ctx c = {.team = upipe_threads_comm(&w->team, rank)};
    test_rank = rank;
    context_pool(&c, &mem, &w->ops, UPIPE_REDUCE_STRIP * 8 * 4 + 4096, 4);
    /* The own slice becomes the sum, nothing else moves; then all slices meet. */
    if (w->sum_n <= 1000) {
        int64_t first, count = upipe_reduce_slice(w->sum_n, rank, w->team.ranks, &first);
        float *was = (float *)copy_of(w->sums[rank], (size_t)w->sum_n * 4);
        s = upipe_reduce_scatter(&c, c.team, w->sums[rank], w->sum_n);
        for (int64_t i = 0; i < w->sum_n; ++i)
            CHECK(memcmp(&w->sums[rank][i], i >= first && i < first + count ? &w->want[i] : &was[i], 4) == 0);
        if (s == UPIPE_OK) s = upipe_all_gather(&c, c.team, w->sums[rank], w->sum_n, 4);
    } else {
        s = upipe_all_reduce(&c, c.team, w->sums[rank], w->sum_n);
    }
    CHECK_INT(mem.peak, upipe_reduce_bytes(w->sum_n, w->team.ranks));
    CHECK_INT(mem.live, 0);
    if (s == UPIPE_OK) s = upipe_all_gather(&c, c.team, w->halves[rank], w->sum_n, 2);
    upipe_mem_destroy(&mem, NULL);
    return s;
}

/* Addends of very different size: any other order of additions gives other bits. */
static void test_sum(void)
{
    static const int64_t sizes[] = {1, 2, 3, 7, 1000, 65537, 3 * UPIPE_REDUCE_STRIP * 8 + 5};
    for (int ranks = 1; ranks <= 8; ++ranks) {
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; ++k) {
            test_rng rng;
            int64_t n = sizes[k], first, held, all = 0, i;
            uint16_t *gathered = (uint16_t *)zeroed((size_t)n * 2);
            float *want = floats(n);
            int differs = 0;
            world w = {
                .ops = {.copy = plain_copy, .sync = plain_sync, .sum = sum_rows}, .sum_n = n, .want = want};
            test_at("%lld numbers, %d ranks", (long long)n, ranks);
            rng.state = (uint64_t)(ranks * 100 + (int)k);
            for (int r = 0; r < ranks; ++r) {
                w.sums[r] = floats(n);
                for (i = 0; i < n; ++i)
                    w.sums[r][i] = (float)(test_normal(&rng) * pow(10, test_below(&rng, 6)));
                w.halves[r] = (uint16_t *)zeroed((size_t)n * 2);
                held = upipe_reduce_slice(n, r, ranks, &first);
                for (i = first; i < first + held; ++i) gathered[i] = w.halves[r][i] = (uint16_t)(i * 7 + r);
                all += held;
            }
            for (i = 0; i < n; ++i) {
                volatile float forth = 0, back = 0;
                for (int r = 0; r < ranks; ++r) forth += w.sums[r][i];
                for (int r = ranks - 1; r >= 0; --r) back += w.sums[r][i];
                want[i] = forth;
                differs += forth != back;
            }
            if (ranks >= 3 && n >= 1000) CHECK(differs > 0);
            CHECK(on_threads(&w, ranks, sum_body));
            for (int r = 0; r < ranks; ++r) {
                CHECK_SAY(memcmp(w.sums[r], want, (size_t)n * 4) == 0,
                          "sum of %lld over %d ranks: rank %d differs", (long long)n, ranks, r);
                CHECK_SAY(memcmp(w.halves[r], gathered, (size_t)n * 2) == 0,
                          "gather of %lld over %d ranks: rank %d differs", (long long)n, ranks, r);
            }
            CHECK_INT(all, n);
            buffers_free(0);
        }
    }
}

/* A second transfer on top of a started one is refused, and does not spoil the first one's list. */
static upipe_status busy_body(void *user, int rank)
{
    world *w = (world *)user;
    upipe_plan_desc d = {0};
    upipe_plan p;
    int out[2] = {rank, rank + 10}, in[2] = {-1, -1}, other[2];
    upipe_mem mem = {0};
    upipe_ctx c = {0};
    c.ops = &w->ops;
    c.mem = &mem;
    c.team = upipe_threads_comm(&w->team, rank);
    d.tokens = d.ranks = d.heads = 2;
    d.head_dim = 1;
    d.rank = rank;
    UPIPE_TRY(upipe_plan_init(&p, &d, &c.err));
    UPIPE_TRY(shift_start(&c, c.team, in, out, sizeof in, 1));
    CHECK_STATUS(upipe_a2a_to_heads(&c, other, out, &p, 0, UPIPE_A2A_Q, 4), UPIPE_ERR_ARG, c.err);
    CHECK_STATUS(upipe_a2a_to_tokens(&c, other, out, &p, 0, UPIPE_A2A_Q, 4), UPIPE_ERR_ARG, c.err);
    CHECK_STATUS(upipe_all_reduce(&c, c.team, (float *)(void *)other, 2), UPIPE_ERR_ARG, c.err);
    UPIPE_TRY(upipe_comm_wait(&c, c.team));
    CHECK_INT(in[0], 1 - rank);
    CHECK_INT(in[1], 11 - rank);
    CHECK_STATUS(upipe_all_reduce(&c, c.team, NULL, -5), UPIPE_ERR_ARG, c.err);
    return UPIPE_OK;
}

static void test_busy(void)
{
    world w = {.ops.copy = plain_copy, .ops.sync = plain_sync};
    CHECK(on_threads(&w, 2, busy_body));
}

static void test_slots(void)
{
    char buf[40];
    upipe_slots s;
    upipe_err e;
    void *p;
    upipe_slots_init(&s, buf, 10, 4, UPIPE_SLOT_EMPTY);
    CHECK_STATUS(upi_slot_lend(&s, 2, &p, &e), UPIPE_OK, e);
    CHECK(p == (void *)(buf + 20));
    CHECK_REFUSED(upi_slot_lend(&s, 2, &p, &e), UPIPE_ERR_ARG, e, "slot 2 is lent, not empty");
    CHECK(p == NULL);
    CHECK_STATUS(upi_slot_drain(&s, 2, &p, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upi_slot_fill(&s, 2, &e), UPIPE_OK, e);
    CHECK_STATUS(upi_slot_fill(&s, 2, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upi_slot_drain(&s, 2, &p, &e), UPIPE_OK, e);
    CHECK(p == (void *)(buf + 20));
    CHECK_REFUSED(upi_slot_drain(&s, 2, &p, &e), UPIPE_ERR_ARG, e, "slot 2 is empty, not full");
    CHECK_REFUSED(upi_slot_lend(&s, 4, &p, &e), UPIPE_ERR_ARG, e, "slot 4 of 4");
    CHECK_STATUS(upi_slot_lend(&s, -1, &p, &e), UPIPE_ERR_ARG, e);
    upipe_slots_init(&s, buf, 10, 4, UPIPE_SLOT_FULL);
    CHECK_STATUS(upi_slot_drain(&s, 0, &p, &e), UPIPE_OK, e);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_all_to_all());
    TEST(test_packs());
    TEST(test_sum());
    TEST(test_busy());
    TEST(test_slots());
    return test_end("a2a");
}
