/* test_a2a -- the exchange by address formula, shared key/value blocks, slots, sums in rank order
 *
 * Every element names its origin, f(token, head, dim), so a misrouted byte says where it came from.
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe_a2a.h"

#include "test.h"

static upipe_status copy_bytes(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    (void)c;
    memcpy(dst, src, bytes);
    return UPIPE_OK;
}

static upipe_status nothing_to_sync(upipe_ctx *c)
{
    (void)c;
    return UPIPE_OK;
}

static upipe_status sum_rows(upipe_ctx *c, upipe_view dst, const float *src, int64_t step, int count,
                             int accumulate)
{
    int64_t i;
    int k;
    (void)c;
    for (i = 0; i < dst.d; ++i) {
        float sum = accumulate ? ((float *)dst.data)[i] : 0;
        for (k = 0; k < count; ++k) sum += src[k * step + i];
        ((float *)dst.data)[i] = sum;
    }
    return UPIPE_OK;
}

typedef struct world {
    upipe_threads team;
    upipe_ops ops;
    upipe_plan plan;
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

/* Q, K, V to heads and back to tokens, over every stage of a plan; elements are int64, so d counts eight
 * bytes each. */
static upipe_status exchange_body(void *user, int rank)
{
    world *w = (world *)user;
    const upipe_plan *p = &w->plan;
    const upipe_plan_desc *d = &p->desc;
    upipe_ctx c;
    int64_t T = p->local, S = d->tokens, b, t, *send, *heads, *back;
    int stage, r, j, k, dim = d->head_dim, m = p->per_rank, kv = p->kv_per_rank;
    upipe_share own = {0, 1, 1};
    upipe_status s = UPIPE_OK;
    memset(&c, 0, sizeof c);
    c.ops = &w->ops;
    c.team = upipe_threads_comm(&w->team, rank);
    send = (int64_t *)malloc((size_t)(p->rows * d->heads * dim) * 8 + 8);
    heads = (int64_t *)malloc((size_t)(d->batch * S * (m + kv) * dim) * 8);
    back = (int64_t *)malloc((size_t)(p->rows * d->ranks * m * dim) * 8);
    for (stage = 0; stage < p->stages && s == UPIPE_OK; ++stage) {
        int64_t sent = c.team->sent_bytes;
        /* Q: block r holds the heads of rank r */
        for (r = 0; r < d->ranks; ++r)
            for (b = 0; b < d->batch; ++b)
                for (t = 0; t < T; ++t)
                    for (j = 0; j < m; ++j)
                        for (k = 0; k < dim; ++k)
                            send[(((r * d->batch + b) * T + t) * m + j) * dim + k] =
                                origin(b, rank * T + t, upipe_plan_q_head(p, stage, r, j), k);
        s = upipe_a2a_to_heads(&c, heads, send, (size_t)(T * m * dim) * 8, d->batch, own);
        CHECK_STATUS(s, UPIPE_OK, c.err);
        CHECK_INT(c.team->sent_bytes - sent, (d->ranks - 1) * p->rows * m * dim * 8);
        for (b = 0; b < d->batch; ++b)
            for (t = 0; t < S; ++t)
                for (j = 0; j < m; ++j)
                    for (k = 0; k < dim; ++k)
                        check_origin(heads[((b * S + t) * m + j) * dim + k],
                                     origin(b, t, upipe_plan_q_head(p, stage, rank, j), k), "Q'");
        /* and back: the inverse restores the send buffer */
        s = upipe_a2a_to_tokens(&c, back, heads, (size_t)(T * m * dim) * 8, d->batch);
        CHECK_STATUS(s, UPIPE_OK, c.err);
        CHECK_BYTES(back, send, p->rows * d->ranks * m * dim * 8);
        /* K: as many blocks as there are different heads */
        if (!upipe_plan_stage(p, stage).kv_fresh) continue;
        for (r = 0; r < upipe_plan_kv_blocks(p, stage); ++r)
            for (b = 0; b < d->batch; ++b)
                for (t = 0; t < T; ++t)
                    for (j = 0; j < kv; ++j)
                        for (k = 0; k < dim; ++k)
                            send[(((r * d->batch + b) * T + t) * kv + j) * dim + k] =
                                origin(b, rank * T + t, upipe_plan_kv_head(p, stage, 0, 0) + r * kv + j, k);
        s = upipe_a2a_to_heads(&c, heads, send, (size_t)(T * kv * dim) * 8, d->batch,
                               upipe_plan_kv_share(p, stage));
        CHECK_STATUS(s, UPIPE_OK, c.err);
        for (b = 0; b < d->batch; ++b)
            for (t = 0; t < S; ++t)
                for (j = 0; j < kv; ++j)
                    for (k = 0; k < dim; ++k)
                        check_origin(heads[((b * S + t) * kv + j) * dim + k],
                                     origin(b, t, upipe_plan_kv_head(p, stage, rank, j), k), "K'");
    }
    free(send);
    free(heads);
    free(back);
    return s;
}

static void test_exchange(void)
{
    /* ranks, heads, kv heads, chunk, naive: every schedule */
    static const int cases[][5] = {{1, 4, 2, 2, 0},  {2, 8, 4, 4, 0},  {4, 16, 4, 4, 0}, {4, 16, 4, 16, 0},
                                   {4, 16, 8, 8, 0}, {8, 16, 2, 8, 0}, {4, 8, 1, 4, 0},  {3, 12, 3, 3, 1},
                                   {4, 16, 4, 4, 1}, {3, 9, 3, 3, 0},  {2, 12, 2, 4, 1}};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; ++i) {
        world w;
        upipe_plan_desc d;
        upipe_err e;
        memset(&w, 0, sizeof w);
        memset(&d, 0, sizeof d);
        d.ranks = cases[i][0];
        d.heads = cases[i][1];
        d.kv_heads = cases[i][2];
        d.chunk = cases[i][3];
        d.naive = cases[i][4];
        d.tokens = d.ranks * 5;
        d.batch = 1 + (int64_t)i % 3;
        d.head_dim = 3;
        w.ops.copy = copy_bytes;
        w.ops.sync = nothing_to_sync;
        if (!CHECK_SAY(upipe_plan_init(&w.plan, &d, &e) == UPIPE_OK, "%s", e.text)) continue;
        CHECK(upipe_threads_init(&w.team, d.ranks, 30, &e) == UPIPE_OK);
        CHECK(upipe_threads_run(&w.team, exchange_body, &w, NULL) == UPIPE_OK);
        upipe_threads_free(&w.team);
    }
}

static upipe_status sum_body(void *user, int rank)
{
    world *w = (world *)user;
    upipe_ctx c;
    upipe_mem mem;
    upipe_block blocks[4];
    size_t bytes = UPIPE_SUM_PIECE * 8 * 4 + 4096;
    void *slab = NULL;
    upipe_status s;
    memset(&c, 0, sizeof c);
    if (posix_memalign(&slab, 256, bytes) != 0) abort();
    upipe_mem_init(&mem, slab, bytes, blocks, 4);
    c.ops = &w->ops;
    c.mem = &mem;
    c.team = upipe_threads_comm(&w->team, rank);
    /* The own slice becomes the sum, nothing else moves; then all slices meet. */
    if (w->sum_n <= 1000) {
        int64_t first, count = upipe_a2a_slice(w->sum_n, rank, w->team.ranks, &first), i;
        float *was = (float *)malloc((size_t)w->sum_n * 4);
        memcpy(was, w->sums[rank], (size_t)w->sum_n * 4);
        s = upipe_a2a_reduce_scatter(&c, w->sums[rank], w->sum_n);
        for (i = 0; i < w->sum_n; ++i)
            CHECK(memcmp(&w->sums[rank][i], i >= first && i < first + count ? &w->want[i] : &was[i], 4) == 0);
        free(was);
        if (s == UPIPE_OK) s = upipe_a2a_all_gather(&c, w->sums[rank], w->sum_n, 4);
    } else {
        s = upipe_a2a_sum(&c, w->sums[rank], w->sum_n);
    }
    CHECK_INT(mem.peak, upipe_a2a_sum_bytes(w->sum_n, w->team.ranks));
    CHECK_INT(mem.live, 0);
    if (s == UPIPE_OK) s = upipe_a2a_all_gather(&c, w->halves[rank], w->sum_n, 2);
    upipe_mem_free(&mem, NULL);
    free(slab);
    return s;
}

/* Addends of very different size: any other order of additions gives other bits. */
static void test_sum(void)
{
    static const int64_t sizes[] = {1, 2, 3, 7, 1000, 65537, 3 * UPIPE_SUM_PIECE * 8 + 5};
    int ranks, r;
    size_t k;
    for (ranks = 1; ranks <= 8; ++ranks) {
        for (k = 0; k < sizeof sizes / sizeof *sizes; ++k) {
            world w;
            upipe_err e;
            test_rng rng;
            int64_t n = sizes[k], first, held, all = 0, i;
            uint16_t *gathered = (uint16_t *)malloc((size_t)n * 2);
            float *want = (float *)malloc((size_t)n * 4);
            int differs = 0;
            memset(&w, 0, sizeof w);
            rng.state = (uint64_t)(ranks * 100 + (int)k);
            w.ops.copy = copy_bytes;
            w.ops.sync = nothing_to_sync;
            w.ops.sum = sum_rows;
            w.sum_n = n;
            w.want = want;
            for (r = 0; r < ranks; ++r) {
                w.sums[r] = (float *)malloc((size_t)n * 4);
                for (i = 0; i < n; ++i)
                    w.sums[r][i] = (float)(test_normal(&rng) * pow(10, test_below(&rng, 6)));
                w.halves[r] = (uint16_t *)calloc((size_t)n, 2);
                held = upipe_a2a_slice(n, r, ranks, &first);
                for (i = first; i < first + held; ++i) gathered[i] = w.halves[r][i] = (uint16_t)(i * 7 + r);
                all += held;
            }
            for (i = 0; i < n; ++i) {
                volatile float forth = 0, back = 0;
                for (r = 0; r < ranks; ++r) forth += w.sums[r][i];
                for (r = ranks - 1; r >= 0; --r) back += w.sums[r][i];
                want[i] = forth;
                differs += forth != back;
            }
            if (ranks >= 3 && n >= 1000) CHECK(differs > 0);
            CHECK(upipe_threads_init(&w.team, ranks, 30, &e) == UPIPE_OK);
            CHECK(upipe_threads_run(&w.team, sum_body, &w, NULL) == UPIPE_OK);
            upipe_threads_free(&w.team);
            for (r = 0; r < ranks; ++r) {
                CHECK_SAY(memcmp(w.sums[r], want, (size_t)n * 4) == 0,
                          "sum of %lld over %d ranks: rank %d differs", (long long)n, ranks, r);
                free(w.sums[r]);
                CHECK_SAY(memcmp(w.halves[r], gathered, (size_t)n * 2) == 0,
                          "gather of %lld over %d ranks: rank %d differs", (long long)n, ranks, r);
                free(w.halves[r]);
            }
            CHECK_INT(all, n);
            free(gathered);
            free(want);
        }
    }
}

/* A second exchange on top of a started one is refused, and does not spoil the first one's list. */
static upipe_status busy_body(void *user, int rank)
{
    world *w = (world *)user;
    upipe_share own = {0, 1, 1};
    int out[2] = {rank, rank + 10}, in[2] = {-1, -1}, other[2];
    upipe_mem mem;
    upipe_ctx c;
    memset(&c, 0, sizeof c);
    memset(&mem, 0, sizeof mem);
    c.ops = &w->ops;
    c.mem = &mem;
    c.team = upipe_threads_comm(&w->team, rank);
    UPIPE_TRY(upipe_comm_shift_start(&c, c.team, in, out, sizeof in, 1));
    CHECK_STATUS(upipe_a2a_to_heads(&c, other, out, 4, 1, own), UPIPE_ERR_ARG, c.err);
    CHECK_STATUS(upipe_a2a_to_tokens(&c, other, out, 4, 1), UPIPE_ERR_ARG, c.err);
    CHECK_STATUS(upipe_a2a_sum(&c, (float *)(void *)other, 2), UPIPE_ERR_ARG, c.err);
    UPIPE_TRY(upipe_comm_wait(&c, c.team));
    CHECK_INT(in[0], 1 - rank);
    CHECK_INT(in[1], 11 - rank);
    CHECK_STATUS(upipe_a2a_sum(&c, NULL, -5), UPIPE_ERR_ARG, c.err);
    return UPIPE_OK;
}

static void test_busy(void)
{
    world w;
    upipe_err e;
    memset(&w, 0, sizeof w);
    w.ops.copy = copy_bytes;
    w.ops.sync = nothing_to_sync;
    CHECK(upipe_threads_init(&w.team, 2, 30, &e) == UPIPE_OK);
    CHECK(upipe_threads_run(&w.team, busy_body, &w, NULL) == UPIPE_OK);
    upipe_threads_free(&w.team);
}

static void test_slots(void)
{
    char room[40];
    upipe_slots s;
    upipe_err e;
    void *p;
    upipe_slots_init(&s, room, 10, 4, UPIPE_SLOT_EMPTY);
    CHECK_STATUS(upipe_slot_lend(&s, 2, &p, &e), UPIPE_OK, e);
    CHECK(p == (void *)(room + 20));
    CHECK_STATUS(upipe_slot_lend(&s, 2, &p, &e), UPIPE_ERR_ARG, e);
    CHECK_TEXT(e.text, "slot 2 is lent, not empty");
    CHECK(p == NULL);
    CHECK_STATUS(upipe_slot_drain(&s, 2, &p, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_slot_fill(&s, 2, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_slot_fill(&s, 2, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_slot_drain(&s, 2, &p, &e), UPIPE_OK, e);
    CHECK(p == (void *)(room + 20));
    CHECK_STATUS(upipe_slot_drain(&s, 2, &p, &e), UPIPE_ERR_ARG, e);
    CHECK_TEXT(e.text, "slot 2 is empty, not full");
    CHECK_STATUS(upipe_slot_lend(&s, 4, &p, &e), UPIPE_ERR_ARG, e);
    CHECK_TEXT(e.text, "slot 4 of 4");
    CHECK_STATUS(upipe_slot_lend(&s, -1, &p, &e), UPIPE_ERR_ARG, e);
    upipe_slots_init(&s, room, 10, 4, UPIPE_SLOT_FULL);
    CHECK_STATUS(upipe_slot_drain(&s, 0, &p, &e), UPIPE_OK, e);
}

int main(void)
{
    test_exchange();
    test_sum();
    test_busy();
    test_slots();
    return test_end("a2a");
}
