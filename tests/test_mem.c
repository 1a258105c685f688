/* test_mem -- the pool: exact counts, placement, marks, refusals, dry run = real run, trace */
#include "lib/test.h"

#include <locale.h>

#include "examples/common/trace.h"
#include "upipe/upipe_mem.h"
#include "upipe/upipe_comm.h"

enum { SLAB = 1 << 16, BLOCKS = 64 };

static char slab[SLAB] __attribute__((aligned(256)));
static upipe_mem_block blocks[BLOCKS], dry_blocks[BLOCKS];

static void test_counts(void)
{
    upipe_mem m;
    upipe_err e;
    void *a, *b, *c, *none;
    size_t span = upipe_mem_span(1000);
    upipe_mem_init(&m, slab, SLAB, blocks, BLOCKS);
    CHECK(upipe_mem_alloc(&m, &a, 1000, UPIPE_USE_OTHER, "a", &e) == UPIPE_OK);
    CHECK(upipe_mem_alloc(&m, &b, 1, UPIPE_USE_OTHER, "b", &e) == UPIPE_OK);
    CHECK(upipe_mem_alloc(&m, &c, 1000, UPIPE_USE_OTHER, "c", &e) == UPIPE_OK);
    CHECK(upipe_mem_alloc(&m, &none, 0, UPIPE_USE_OTHER, "none", &e) == UPIPE_OK);
    CHECK(none == NULL);
    CHECK(upipe_mem_free(&m, none, &e) == UPIPE_OK);
    CHECK_INT(m.live, 2001);
    CHECK_INT(m.peak, 2001);
    CHECK_INT(m.need, 2 * span + upipe_mem_span(1));
    CHECK_INT((uintptr_t)a % 256 + (uintptr_t)b % 256 + (uintptr_t)c % 256, 0);
    memset(a, 1, 1000);
    memset(c, 3, 1000);
    CHECK(upipe_mem_free(&m, a, &e) == UPIPE_OK);
    CHECK_STATUS(upipe_mem_free(&m, a, &e), UPIPE_ERR_ARG, e); /* twice */
    CHECK_TEXT(e.text, "no live block");
    CHECK_STATUS(upipe_mem_free(&m, slab + 3, &e), UPIPE_ERR_ARG, e);        /* foreign */
    CHECK_STATUS(upipe_mem_free(&m, (char *)c + 256, &e), UPIPE_ERR_ARG, e); /* inside a block */
    CHECK_INT(m.live, 1001);
    CHECK(upipe_mem_alloc(&m, &a, 900, UPIPE_USE_OTHER, "again", &e) == UPIPE_OK);
    CHECK(a == (void *)slab); /* the hole, not the top */
    CHECK_INT(((char *)c)[999], 3);
    CHECK_INT(m.need, 2 * span + upipe_mem_span(1));
    CHECK_REFUSED(upipe_mem_destroy(&m, &e), UPIPE_ERR_ARG, e,
                  "3 blocks of 1901 bytes live, the first is 'again'");
    CHECK_STATUS(upipe_mem_destroy(&m, &e), UPIPE_OK, e);
    upipe_mem_init(&m, NULL, 0, blocks, BLOCKS); /* empty: no slab */
    CHECK_STATUS(upipe_mem_alloc(&m, &a, 1, UPIPE_USE_OTHER, "a", &e), UPIPE_ERR_MEMORY, e);
    CHECK_STATUS(upipe_mem_destroy(&m, &e), UPIPE_OK, e);
}

/* Under AddressSanitizer: the tail of a block, the red zone behind it and free space must not be touched. */
static void test_poison(void)
{
#ifdef UPI_MEM_ASAN
    upipe_mem m;
    char *a, *b;
    void *p;
    upipe_mem_init(&m, slab, SLAB, blocks, BLOCKS);
    CHECK(__asan_address_is_poisoned(slab));
    CHECK(upipe_mem_alloc(&m, &p, 1000, UPIPE_USE_OTHER, "a", NULL) == UPIPE_OK);
    a = (char *)p;
    CHECK(upipe_mem_alloc(&m, &p, 1024, UPIPE_USE_OTHER, "b", NULL) ==
          UPIPE_OK); /* a multiple of the alignment: no tail */
    b = (char *)p;
    CHECK(!__asan_address_is_poisoned(a) && !__asan_address_is_poisoned(a + 999));
    CHECK(__asan_address_is_poisoned(a + 1000) && __asan_address_is_poisoned(b - 1));
    CHECK(!__asan_address_is_poisoned(b + 1023) && __asan_address_is_poisoned(b + 1024));
    CHECK_INT(m.live, 2024);
    CHECK(upipe_mem_free(&m, a, NULL) == UPIPE_OK);
    CHECK(__asan_address_is_poisoned(a));
    CHECK(upipe_mem_free(&m, b, NULL) == UPIPE_OK);
    CHECK(upipe_mem_destroy(&m, NULL) == UPIPE_OK);
    CHECK(!__asan_address_is_poisoned(slab)); /* the host's again */
#else
    CHECK_INT(upipe_mem_span(1024), 1024); /* no red zone in an ordinary build */
#endif
}

static void test_best_fit(void)
{
    upipe_mem m;
    void *p[6], *q;
    static const size_t sizes[] = {4096, 256, 1024, 256, 2048, 256};
    upipe_mem_init(&m, slab, SLAB, blocks, BLOCKS);
    for (int i = 0; i < 6; ++i)
        CHECK(upipe_mem_alloc(&m, &p[i], sizes[i], UPIPE_USE_OTHER, "p", NULL) == UPIPE_OK);
    for (int i = 0; i < 6; i += 2) CHECK(upipe_mem_free(&m, p[i], NULL) == UPIPE_OK);
    CHECK(upipe_mem_alloc(&m, &q, 1000, UPIPE_USE_QKV, "q", NULL) == UPIPE_OK);
    CHECK(q == p[2]); /* the smallest hole that fits */
    CHECK(upipe_mem_alloc(&m, &q, 1000, UPIPE_USE_QKV, "q", NULL) == UPIPE_OK);
    CHECK(q == p[4]);
    upipe_mem_rewind(&m, 0);
    CHECK_INT(m.live, 0);
    CHECK(upipe_mem_destroy(&m, NULL) == UPIPE_OK);
}

/* A refusal names the largest hole: between two blocks, before the first or behind the last, wherever it is. */
static void test_hole(void)
{
    static const size_t sizes[3][4] = {
        {8192, 256, 4096, 256}, {4096, 256, 8192, 256}, {4096, 256, 2048, 256}};
    for (int i = 0; i < 3; ++i) {
        const size_t span =
            upipe_mem_span(sizes[i][0]) + upipe_mem_span(sizes[i][2]) + 2 * upipe_mem_span(256);
        const size_t behind = i < 2 ? 1024 : 16384, hole = upipe_mem_span(8192);
        char words[64];
        upipe_mem m;
        upipe_err e;
        void *p[4], *none;
        upipe_mem_init(&m, slab, span + behind, blocks, BLOCKS);
        for (int j = 0; j < 4; ++j)
            CHECK(upipe_mem_alloc(&m, &p[j], sizes[i][j], UPIPE_USE_OTHER, "p", &e) == UPIPE_OK);
        for (int j = 0; j < 4; j += 2) CHECK(upipe_mem_free(&m, p[j], &e) == UPIPE_OK);
        snprintf(words, sizeof words, "the largest hole has %zu", i < 2 ? hole : behind);
        CHECK_REFUSED(upipe_mem_alloc(&m, &none, 20000, UPIPE_USE_OTHER, "more", &e), UPIPE_ERR_MEMORY, e,
                      words);
        upipe_mem_rewind(&m, 0);
        CHECK(upipe_mem_destroy(&m, &e) == UPIPE_OK);
    }
}

static upipe_status refuse_large(void *user, size_t bytes, int use, const char *tag)
{
    (void)use, (void)tag;
    return bytes > *(size_t *)user ? UPIPE_ERR_MEMORY : UPIPE_OK;
}

static void test_refusals(void)
{
    upipe_mem m;
    upipe_err e;
    void *p, *q;
    size_t limit = 100;
    upipe_mem_init(&m, slab, SLAB, blocks, BLOCKS);
    upipe_mem_init(&m, slab + 8, SLAB - 8, blocks, BLOCKS);
    CHECK_REFUSED(upipe_mem_alloc(&m, &p, 10, UPIPE_USE_OTHER, "crooked", &e), UPIPE_ERR_ARG, e,
                  "not aligned");
    CHECK(upipe_mem_destroy(&m, NULL) == UPIPE_OK);
    upipe_mem_init(&m, slab, SLAB, blocks, BLOCKS);
    CHECK_STATUS(upipe_mem_alloc(&m, &p, SLAB + 1, UPIPE_USE_OTHER, "huge", &e), UPIPE_ERR_MEMORY, e);
    CHECK(p == NULL);
    CHECK_TEXT(e.text, "65537 bytes for 'huge' do not fit: 0 of the slab's 65536 bytes are live");
    CHECK_STATUS(upipe_mem_alloc(&m, &p, SIZE_MAX - 10, UPIPE_USE_OTHER, "absurd", &e), UPIPE_ERR_OVERFLOW,
                 e);
    CHECK(upipe_mem_alloc(&m, &p, SLAB / 2, UPIPE_USE_OTHER, "half", &e) == UPIPE_OK);
    CHECK_STATUS(upipe_mem_alloc(&m, &q, SLAB / 2 + 1, UPIPE_USE_OTHER, "more", &e), UPIPE_ERR_MEMORY, e);
    CHECK_INT(m.live, SLAB / 2);
    CHECK(upipe_mem_free(&m, p, &e) == UPIPE_OK);
    for (int i = 0; i < BLOCKS; ++i)
        CHECK(upipe_mem_alloc(&m, &p, 1, UPIPE_USE_OTHER, "small", &e) == UPIPE_OK);
    CHECK_REFUSED(upipe_mem_alloc(&m, &p, 1, UPIPE_USE_OTHER, "one more", &e), UPIPE_ERR_MEMORY, e,
                  "table of 64 blocks");
    upipe_mem_rewind(&m, 0);
    m.guard = refuse_large;
    m.user = &limit;
    CHECK(upipe_mem_alloc(&m, &p, 100, UPIPE_USE_OTHER, "allowed", &e) == UPIPE_OK);
    CHECK_REFUSED(upipe_mem_alloc(&m, &q, 101, UPIPE_USE_OTHER, "denied", &e), UPIPE_ERR_MEMORY, e,
                  "guard refused 101 bytes for 'denied'");
    CHECK(upipe_mem_free(&m, p, &e) == UPIPE_OK);
    CHECK_STATUS(upipe_mem_destroy(&m, &e), UPIPE_OK, e);
}

static void test_marks(void)
{
    upipe_mem m;
    upipe_err e;
    void *a, *b, *c, *d;
    int64_t mark;
    upipe_mem_init(&m, slab, SLAB, blocks, BLOCKS);
    upipe_mem_alloc(&m, &a, 10, UPIPE_USE_OTHER, "a", &e);
    upipe_mem_alloc(&m, &b, 20, UPIPE_USE_OTHER, "b", &e);
    mark = upipe_mem_mark(&m);
    upipe_mem_alloc(&m, &c, 40, UPIPE_USE_OTHER, "c", &e);
    upipe_mem_free(&m, b, &e); /* taken before the mark, given after it */
    upipe_mem_alloc(&m, &d, 80, UPIPE_USE_OTHER, "d", &e);
    CHECK_INT(m.live, 130);
    upipe_mem_rewind(&m, mark);
    CHECK_INT(m.live, 10);
    upipe_mem_alloc(&m, &c, 40, UPIPE_USE_OTHER, "c", &e);
    upi_mem_quarantine(&m, mark);
    upipe_mem_rewind(&m, 0);
    CHECK_INT(m.live, 40);
    upi_mem_quarantine(&m, mark); /* which counts a block once */
    CHECK_INT(m.quarantined, 40);
    CHECK_REFUSED(upipe_mem_free(&m, c, &e), UPIPE_ERR_ARG, e, "quarantined");
    upipe_mem_alloc(&m, &a, 40, UPIPE_USE_OTHER, "a", &e);
    CHECK(a != c);
    CHECK_INT(m.blocks_peak, 3);
    CHECK_STATUS(upipe_mem_free(&m, a, &e), UPIPE_OK, e); /* it came after the quarantine */
    upi_mem_quarantine(&m, 0); /* and what is free: a stream may not be done with it */
    CHECK_REFUSED(upipe_mem_alloc(&m, &a, 40, UPIPE_USE_OTHER, "a", &e), UPIPE_ERR_ARG, e,
                  "the pool is quarantined");
    CHECK_REFUSED(upipe_mem_destroy(&m, &e), UPIPE_ERR_ARG, e, "1 blocks of 40 bytes live");
    upipe_mem_init(&m, slab, SLAB, blocks, BLOCKS); /* the peers are gone */
    CHECK_STATUS(upipe_mem_alloc(&m, &c, 40, UPIPE_USE_OTHER, "c", &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_mem_free(&m, c, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_mem_destroy(&m, &e), UPIPE_OK, e);
}

/* ---- the end of a failed pass ---- */

/* What it does, in order: aN aborts communicator N (0 team, 1 ring, 2 the other one), wN ends its transfer, s drains the stream. */
static char told[32];

static int told_fail(upipe_comm *comm, upipe_status s, const char *why)
{
    CHECK_INT(s, UPIPE_ERR_ABORTED);
    CHECK_TEXT(why, "the first failure");
    snprintf(told + strlen(told), sizeof told - strlen(told), "a%d ", comm->rank);
    return 0;
}

/* The transfer's end shows what its transport sets: comm->impl has quarantine. */
static upipe_status told_wait(upipe_ctx *c, upipe_comm *comm)
{
    snprintf(told + strlen(told), sizeof told - strlen(told), "w%d ", comm->rank);
    comm->quarantine = *(const int *)comm->impl;
    return upipe_fail(&c->err, UPIPE_ERR_TIMEOUT, "a later failure");
}

static upipe_status told_sync(upipe_ctx *c)
{
    snprintf(told + strlen(told), sizeof told - strlen(told), "s ");
    CHECK_INT(c->mem->live, 110); /* the stream works on what the pass has */
    return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "a later failure");
}

static void test_unwind(void)
{
    for (int i = 0; i < 6; ++i) {
        const int started = i / 2;
        int quarantine = i % 2;
        const upipe_ops ops = {.sync = told_sync};
        upipe_comm comms[3] = {0};
        upipe_mem m;
        upipe_ctx c = {.ops = &ops, .mem = &m, .team = &comms[0], .ring = &comms[1]};
        int64_t mark;
        void *p;
        char want[32];
        upipe_mem_init(&m, slab, SLAB, blocks, BLOCKS);
        upipe_alloc(&c, &p, 10, UPIPE_USE_OTHER, "before");
        mark = upipe_mem_mark(&m);
        upipe_alloc(&c, &p, 100, UPIPE_USE_OTHER, "in the pass");
        for (int k = 0; k < 3; ++k)
            comms[k] = (upipe_comm){.rank = k,
                                    .impl = &quarantine,
                                    .started = k == started,
                                    .ops = {.fail = told_fail, .wait = told_wait}};
        upipe_fail(&c.err, UPIPE_ERR_MEMORY, "the first failure");
        told[0] = 0;
        CHECK_REFUSED(upi_unwind(&c, UPIPE_ERR_MEMORY, mark, &comms[2]), UPIPE_ERR_MEMORY, c.err,
                      "the first failure");
        snprintf(want, sizeof want, "a0 a1 a2 w%d s ", started);
        CHECK_SAY(strcmp(told, want) == 0, "%s, not %s", told, want);
        CHECK_INT(m.live, quarantine ? 110 : 10);
        CHECK_INT(m.quarantined, quarantine ? 110 : 0);
        upipe_mem_rewind(&m, 0);
        CHECK_INT(m.live, quarantine ? 110 : 0);
        CHECK_INT(upipe_mem_destroy(&m, NULL), quarantine ? UPIPE_ERR_ARG : UPIPE_OK);
    }
}

/* Random takes and gives: a real pool of exactly the dry pool's need succeeds, with the same cuts; blocks
 * never overlap, and one byte less fails. */
static void test_dry(void)
{
    long rounds = test_draws_wanted() / 10 + 1;
    test_rng rng;
    rng.state = (uint64_t)test_env("UPIPE_SEED", 1);
    for (long round = 0; round < rounds; ++round) {
        upipe_mem dry, m;
        void *p[BLOCKS], *q[BLOCKS];
        size_t size[BLOCKS], live = 0, peak = 0;
        uint64_t start = rng.state;
        int n, failed = 0;
        for (int pass = 0; pass < 3; ++pass) {
            rng.state = start;
            live = peak = 0;
            n = 0;
            if (pass == 0) {
                upipe_mem_init_dry(&dry, dry_blocks, BLOCKS);
            } else {
                if (dry.need > SLAB) break;
                upipe_mem_init(&m, slab, dry.need - (pass == 2), blocks, BLOCKS);
            }
            for (int i = 0; i < 200; ++i) {
                if (n < 40 && test_below(&rng, 5) < 3) {
                    size[n] = (size_t)(1 + test_below(&rng, 3000));
                    if (pass == 0) {
                        CHECK(upipe_mem_alloc(&dry, &p[n], size[n], UPIPE_USE_OTHER, "dry", NULL) ==
                              UPIPE_OK);
                    } else {
                        upipe_status s = upipe_mem_alloc(&m, &q[n], size[n], UPIPE_USE_OTHER, "real", NULL);
                        if (pass == 2 && s != UPIPE_OK) {
                            failed = 1;
                            break;
                        }
                        if (!CHECK(s == UPIPE_OK)) break;
                        memset(q[n], n, size[n]);
                    }
                    live += size[n];
                    if (live > peak) peak = live;
                    ++n;
                } else if (n > 0) {
                    int victim = test_below(&rng, n);
                    live -= size[victim];
                    if (pass == 0) {
                        CHECK(upipe_mem_free(&dry, p[victim], NULL) == UPIPE_OK);
                    } else {
                        size_t k;
                        const char *bytes = (const char *)q[victim];
                        for (k = 1; k < size[victim]; ++k)
                            if (bytes[k] != bytes[0]) break;
                        CHECK_SAY(k == size[victim], "block overwritten at byte %zu", k);
                        CHECK(upipe_mem_free(&m, q[victim], NULL) == UPIPE_OK);
                    }
                    --n;
                    p[victim] = p[n];
                    q[victim] = q[n];
                    size[victim] = size[n];
                }
            }
            if (pass == 0) {
                CHECK_INT(dry.live, live);
                CHECK_INT(dry.peak, peak);
            } else if (pass == 1) {
                CHECK_INT(m.peak, peak);
                CHECK_INT(m.need, dry.need);
            } else {
                CHECK(failed);
            }
            if (pass > 0) {
                upipe_mem_rewind(&m, 0);
                CHECK(upipe_mem_destroy(&m, NULL) == UPIPE_OK);
            }
        }
    }
}

static double clock_step(void *user)
{
    return 0.123456789 * ++*(int *)user;
}

static void test_trace(void)
{
    static upipe_mem_event events[8];
    upipe_mem m;
    void *a, *b, *c;
    char text[4096];
    size_t n;
    int ticks = 0;
    FILE *f = tmpfile();
    upipe_mem_init(&m, slab, SLAB, blocks, BLOCKS);
    m.events = events;
    m.events_max = 8;
    m.clock = clock_step;
    m.user = &ticks;
    upipe_mem_phase(&m, 0, "first");
    upipe_mem_alloc(&m, &a, 100, UPIPE_USE_MLP, "a", NULL);
    upipe_mem_alloc(&m, &b, 50, UPIPE_USE_OTHER, "b", NULL);
    upipe_mem_free(&m, a, NULL);
    upipe_mem_phase(&m, 1, "second");
    upipe_mem_alloc(&m, &c, 30, UPIPE_USE_MLP, "c", NULL);
    CHECK_INT(m.phase_peak[0], 150);
    CHECK_INT(m.phase_peak[1], 80);
    CHECK_INT(upipe_mem_largest(&m, UPIPE_USE_MLP), 100);
    CHECK_INT(m.events_n, 6);
    trace_write(m.events, m.events_n, f, 3, 1);
    rewind(f);
    n = fread(text, 1, sizeof text - 1, f);
    text[n] = 0;
    fclose(f);
    CHECK_TEXT(text, "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":3,\"args\":{\"name\":\"rank 3\"}}");
    CHECK_TEXT(text,
               ",{\"ph\":\"B\",\"name\":\"first\",\"cat\":\"phase\",\"pid\":3,\"tid\":1,\"ts\":123456.789}");
    CHECK_TEXT(text, "\"ph\":\"b\",\"name\":\"a\",\"cat\":\"block\",\"id\":\"3.1\"");
    CHECK_TEXT(text, "\"ts\":493827.156,\"args\":{\"bytes\":50}"); /* live after a went */
    *upi_mem_link(&m, c) = b;
    *upi_mem_link(&m, b) = a;
    CHECK(*upi_mem_link(&m, c) == b && *upi_mem_link(&m, b) == a);
    upipe_mem_free(&m, b, NULL);
    CHECK(upi_mem_link(&m, b) == NULL && *upi_mem_link(&m, c) == b);
    upipe_mem_free(&m, c, NULL);
    upipe_mem_alloc(&m, &a, 1, UPIPE_USE_OTHER, "late", NULL);
    CHECK(*upi_mem_link(&m, a) == NULL); /* b, whose place it has, had one */
    CHECK(upi_mem_link(&m, (char *)a + 1) == NULL && upi_mem_link(&m, NULL) == NULL);
    CHECK_INT(m.events_lost, 1);
    upipe_mem_free(&m, a, NULL);
    CHECK(upipe_mem_destroy(&m, NULL) == UPIPE_OK);
}

int main(int argc, char **argv)
{
    static const char *const commas[] = {"de_DE.UTF-8", "de_DE", "fr_FR.UTF-8", "fr_FR"};
    int i;
    test_begin(argc, argv);
    TEST(test_counts());
    TEST(test_poison());
    TEST(test_best_fit());
    TEST(test_refusals());
    TEST(test_hole());
    TEST(test_marks());
    TEST(test_unwind());
    TEST(test_dry());
    TEST(test_trace());
    /* a locale that is not here changes nothing */
    for (i = 0; i < (int)(sizeof commas / sizeof *commas); ++i)
        if (setlocale(LC_NUMERIC, commas[i]) != NULL) TEST(test_trace());
    return test_end("mem");
}
