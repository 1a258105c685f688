/* test_plan -- the schedule against brute force, the paper's figure and tables, refusals */
#include "test.h"
#include "upipe/upipe_plan.h"

static upipe_plan_desc describe(int64_t tokens, int ranks, int heads, int kv_heads, int head_dim, int chunk)
{
    upipe_plan_desc d;
    memset(&d, 0, sizeof d);
    d.tokens = tokens;
    d.ranks = ranks;
    d.heads = heads;
    d.kv_heads = kv_heads;
    d.head_dim = head_dim;
    d.chunk = chunk;
    return d;
}

/* Walks all stages and ranks: every head once, on the rank that then holds its key/value head, traffic
 * counted. */
static void walk(const upipe_plan *p)
{
    const upipe_plan_desc *d = &p->desc;
    int seen[256], kv_seen[256], held[64][64], stage, rank, j, fresh = 0, last = 0;
    int64_t sent = 0, sent_back = 0, e = (int64_t)upipe_dtype_bytes(d->dtype), head = p->rows * d->head_dim;
    memset(seen, 0, sizeof seen);
    memset(kv_seen, 0, sizeof kv_seen);
    memset(held, -1, sizeof held);
    for (stage = 0; stage < p->stages; ++stage) {
        upipe_stage s = upipe_plan_stage(p, stage);
        upipe_share share = upipe_plan_kv_share(p, stage);
        int blocks = upipe_plan_kv_blocks(p, stage);
        CHECK_INT(s.round * p->steps + s.step, stage);
        fresh += s.kv_fresh;
        last += s.kv_last;
        for (rank = 0; rank < d->ranks; ++rank) {
            int block = upipe_share_block(share, rank);
            CHECK(block >= 0 && block < blocks);
            if (s.kv_fresh) {
                for (j = 0; j < p->kv_per_rank; ++j) {
                    held[rank][j] = upipe_plan_kv_head(p, stage, rank, j);
                    ++kv_seen[held[rank][j]];
                    /* the send buffer's blocks hold neighbouring heads, from rank 0's first one on */
                    CHECK_INT(upipe_plan_kv_head(p, stage, 0, 0) + block * p->kv_per_rank + j, held[rank][j]);
                }
            }
            for (j = 0; j < p->per_rank; ++j) {
                int q = upipe_plan_q_head(p, stage, rank, j), of_stage, of_rank, k, found = 0;
                CHECK(q >= 0 && q < d->heads);
                CHECK_INT(q, upipe_plan_q_head(p, stage, 0, 0) + rank * upipe_plan_q_step(p) + j);
                ++seen[q];
                for (k = 0; k < p->kv_per_rank; ++k) found |= held[rank][k] == q / p->group;
                CHECK_SAY(found, "stage %d rank %d attends head %d without kv head %d", stage, rank, q,
                          q / p->group);
                /* the kernel's own mapping inside the rank: head j reads kv head j / (m / kv_per_rank) */
                CHECK_INT(held[rank][j / (p->per_rank / p->kv_per_rank)], q / p->group);
                upipe_plan_q_place(p, q - j, &of_stage, &of_rank);
                CHECK_INT(of_stage, stage);
                CHECK_INT(of_rank, rank);
            }
        }
        /* what rank 0 sends, head by head, to each other rank */
        for (rank = 1; rank < d->ranks; ++rank) {
            sent += 2 * p->per_rank * head * e + (s.kv_fresh ? 2 * p->kv_per_rank * head * e : 0);
            sent_back += 3 * p->per_rank * head * e + p->per_rank * p->rows * 4;
            if (s.kv_fresh) sent_back += 2 * p->kv_per_rank * head * e;
            if (s.kv_last) sent_back += 2 * p->kv_per_rank * head * (p->kv_partial ? 4 : e);
        }
    }
    for (j = 0; j < d->heads; ++j) CHECK_SAY(seen[j] == 1, "head %d is attended %d times", j, seen[j]);
    for (j = 0; j < d->kv_heads; ++j) {
        CHECK(kv_seen[j] >= 1);
        if (!p->kv_partial) CHECK_SAY(kv_seen[j] == 1, "kv head %d travels %d times", j, kv_seen[j]);
    }
    CHECK_INT(fresh, p->rounds);
    CHECK_INT(last, p->rounds);
    CHECK_INT(upipe_plan_sent(p, 0), sent);
    CHECK_INT(upipe_plan_sent(p, 1), sent_back);
}

static void test_schedules(void)
{
    int ranks, kv, group, m, legal[4] = {0, 0, 0, 0}, naive;
    for (naive = 0; naive < 2; ++naive) {
        for (ranks = 1; ranks <= 16; ++ranks) {
            for (kv = 1; kv <= 16; ++kv) {
                for (group = 1; group <= 8; ++group) {
                    for (m = 1; m <= 16; ++m) {
                        upipe_plan_desc d = describe(16L * ranks, ranks, kv * group, kv, 64, m * ranks);
                        upipe_plan p;
                        int whole = m % group == 0, divides = group % m == 0;
                        int expected = kv * group % ranks == 0 && kv * group % (m * ranks) == 0;
                        upipe_status s;
                        d.naive = naive;
                        d.batch = 1 + m % 2;
                        expected = expected && (whole || (naive             ? divides
                                                          : kv % ranks == 0 ? divides
                                                                            : ranks % kv == 0));
                        s = upipe_plan_init(&p, &d, NULL);
                        CHECK_SAY((s == UPIPE_OK) == expected,
                                  "%d/%d heads, %d ranks, chunk %d, naive %d: status %s", kv * group, kv,
                                  ranks, m * ranks, naive, upipe_status_name(s));
                        if (s != UPIPE_OK) continue;
                        ++legal[p.schedule];
                        walk(&p);
                    }
                }
            }
        }
    }
    CHECK(legal[UPIPE_GROUP] > 50 && legal[UPIPE_WHOLE] > 50 && legal[UPIPE_SPLIT] > 50 &&
          legal[UPIPE_ORDER] > 50);
}

/* The scheduling figure: C = 4, G = 4, 16 heads. */
static void test_figure(void)
{
    upipe_plan_desc d = describe(64, 4, 16, 4, 128, 0);
    upipe_plan p;
    int stage, rank;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    CHECK_INT(p.stages, 4);
    CHECK_INT(p.desc.chunk, 4);
    CHECK_INT(p.desc.model_dim, 2048);
    for (stage = 0; stage < 4; ++stage) {
        CHECK_INT(upipe_plan_stage(&p, stage).kv_fresh, stage == 0);
        for (rank = 0; rank < 4; ++rank) {
            CHECK_INT(upipe_plan_q_head(&p, stage, rank, 0), 4 * rank + stage);
            CHECK_INT(upipe_plan_kv_head(&p, stage, rank, 0), rank);
        }
    }
}

/* Every cell of the paper's two tables, at Llama3-8B's numbers: G = 4, nu = 4, pi = 16, L = 32; gamma =
 * 1.5. */
static void test_tables(void)
{
    static const double want[4][8] = {
        {32, 34.5, 34.5, 34, 34, 35, 37, 34.5},
        {1, 3.5, 3.5, 3, 3, 4, 6, 3.5},
        {1 / 16.0, 3.5 / 16, 4 / 16.0, 2 / 16.0, 1 / 16.0, 3 / 16.0, 7 / 16.0, 3.5 / 16},
        {1, 2.375, 2.375, 2.25, 3, 3.25, 4.25, 3.875},
    };
    int row, phase;
    upipe_plan_desc d = describe(8L << 20, 8, 32, 8, 128, 8);
    upipe_plan p;
    for (row = 0; row < 4; ++row)
        for (phase = 0; phase < 8; ++phase)
            CHECK_SAY(
                upipe_paper_units((upipe_paper_row)row, (upipe_phase)phase, 4, 4, 16, 32) == want[row][phase],
                "row %d column %s is %g, not %g", row, upipe_phase_name(phase),
                upipe_paper_units((upipe_paper_row)row, (upipe_phase)phase, 4, 4, 16, 32), want[row][phase]);
    /* at nu = 1 UPipe's row is Ulysses with offloading, but for final_out that the paper allocates first */
    CHECK(upipe_paper_units(UPIPE_PAPER_UPIPE, UPIPE_BWD_ATTN, 4, 1, 1, 1) ==
          upipe_paper_units(UPIPE_PAPER_ULYSSES_OFFLOAD, UPIPE_BWD_ATTN, 4, 1, 1, 1));
    CHECK(upipe_paper_units(UPIPE_PAPER_UPIPE, UPIPE_BWD_IN, 4, 1, 1, 1) ==
          upipe_paper_units(UPIPE_PAPER_ULYSSES_OFFLOAD, UPIPE_BWD_IN, 4, 1, 1, 1));
    /* a unit of Llama3-8B on 8 ranks is 1 GiB per million tokens */
    d.dtype = UPIPE_BF16;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    CHECK_INT(upipe_plan_unit_bytes(&p), 8LL << 30);
}

static void refuse(upipe_plan_desc d, upipe_status status, const char *words)
{
    upipe_plan p;
    upipe_err e;
    memset(&e, 0, sizeof e);
    CHECK_STATUS(upipe_plan_init(&p, &d, &e), status, e);
    CHECK_TEXT(e.text, words);
}

static void test_refusals(void)
{
    upipe_plan_desc d = describe(1024, 8, 32, 8, 128, 8);
    upipe_plan p;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    refuse(describe(1025, 8, 32, 8, 128, 8), UPIPE_ERR_ARG, "1025 tokens do not divide into 8 ranks");
    refuse(describe(1024, 8, 32, 5, 128, 8), UPIPE_ERR_ARG, "32 query heads are no multiple of 5");
    refuse(describe(1024, 8, 28, 4, 128, 8), UPIPE_ERR_UNSUPPORTED, "28 heads do not divide into 8 ranks");
    refuse(describe(1024, 4, 40, 10, 128, 4), UPIPE_ERR_UNSUPPORTED, "10 key/value heads and 4 ranks");
    refuse(describe(1024, 8, 32, 8, 128, 12), UPIPE_ERR_ARG,
           "chunk of 12 heads does not divide into 8 ranks");
    refuse(describe(1024, 8, 32, 8, 128, 24), UPIPE_ERR_ARG, "32 heads do not divide into chunks of 24");
    refuse(describe(1024, 2, 36, 4, 64, 12), UPIPE_ERR_UNSUPPORTED, "6 heads a rank");
    refuse(describe(0, 8, 32, 8, 128, 8), UPIPE_ERR_ARG, "tokens 0");
    refuse(describe(1024, -1, 32, 8, 128, 8), UPIPE_ERR_ARG, "ranks -1");
    refuse(describe(1024, 8, 32, 8, 0, 8), UPIPE_ERR_ARG, "head dim 0");
    refuse(describe(INT64_C(1) << 56, 8, 32, 8, 128, 8), UPIPE_ERR_OVERFLOW, "overflow");
    refuse(describe(1024, 1, 1 << 20, 1 << 20, 1 << 12, 1), UPIPE_ERR_OVERFLOW, "elements");
    d.model_dim = INT64_C(1) << 31;
    refuse(d, UPIPE_ERR_OVERFLOW, "model dim 2147483648");
    d.model_dim = 0;
    refuse(describe(1024, 1, 512, 512, 64, 1), UPIPE_ERR_UNSUPPORTED, "512 stages");
    d.dtype = (upipe_dtype)7;
    refuse(d, UPIPE_ERR_ARG, "data type 7");
    d = describe(1024, 8, 32, 8, 128, 8);
    d.model_dim = -4;
    refuse(d, UPIPE_ERR_ARG, "model dim -4");
    d = describe(1024, 2, 24, 4, 64, 8);
    d.naive = 1;
    refuse(d, UPIPE_ERR_UNSUPPORTED, "do not fit groups of 6");
    /* absurd, legal, and not to overflow an int on the way */
    d = describe(1, 1, 1500000000, 1500000000, 1, 1500000000);
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    CHECK_INT(upipe_plan_sent(&p, 1), 0);
}

int main(void)
{
    test_schedules();
    test_figure();
    test_tables();
    test_refusals();
    return test_end("plan");
}
