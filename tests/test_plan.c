/* test_plan -- the schedule against brute force, the paper's figure and tables, refusals */
#include "lib/test.h"
#include "upipe/upipe_ring.h"
#include "examples/common/paper.h"

static upipe_plan_desc describe(int64_t tokens, int ranks, int heads, int kv_heads, int head_dim, int chunk)
{
    upipe_plan_desc d = {.tokens = tokens, .ranks = ranks, .heads = heads, .kv_heads = kv_heads};
    d.head_dim = head_dim;
    d.chunk = chunk;
    return d;
}

static void at_desc(const upipe_plan_desc *d)
{
    test_at("%lld tokens, %d/%d heads, chunk %d, rank %d of %d, %s, ring of %d, inner %d, mode %d%s",
            (long long)d->tokens, d->heads, d->kv_heads, d->chunk, d->rank, d->ranks,
            upipe_layout_name(d->layout), d->ring, d->ring_inner, (int)d->ring_mode,
            d->naive ? ", naive" : "");
}

/* Tokens of one rank of a sequence that C ranks share; test_shard.c has the shards themselves. */
static int64_t share_of(int64_t tokens, int ranks, int rank)
{
    return tokens * (rank + 1) / ranks - tokens * rank / ranks;
}

/* Whose heads lie where in a stage's buffer of all ranks: what one rank wrote, another one may only find
 * again. */
static void walk_buffer(const upipe_plan *p, upipe_a2a_heads which, int stage)
{
    int lies[256], rank, j, total = upipe_plan_heads_sent(p, which, stage), used = 0, sum = 0;
    memset(lies, -1, sizeof lies);
    for (rank = 0; rank < p->desc.ranks; ++rank) {
        upipe_head_range s = upipe_plan_part(p, which, stage, rank);
        int at = upipe_plan_offset(p, which, stage, rank);
        sum += s.count;
        for (j = 0; j < s.count; ++j) {
            if (!CHECK_SAY(at >= 0 && at + j < total, "rank %d has head %d of %d", rank, at + j, total))
                return;
            used += lies[at + j] < 0;
            CHECK_SAY(lies[at + j] < 0 || (which == UPIPE_A2A_KV && lies[at + j] == s.first + j),
                      "stage %d rank %d: head %d lies where head %d does", stage, rank, s.first + j,
                      lies[at + j]);
            lies[at + j] = s.first + j;
        }
    }
    CHECK_INT(used, total);
    if (which != UPIPE_A2A_KV) CHECK_INT(sum, total);
}

static const upipe_mask full; /* everything is seen */

/* What a rank of a plan hands to the others, head by head. */
static void walk_sent(const upipe_plan *p)
{
    const upipe_plan_desc *d = &p->desc;
    int64_t e = (int64_t)upipe_dtype_bytes(d->dtype), sent[2] = {0, 0}, of_stages[2] = {0, 0};
    int rank, me = d->rank;
    int64_t both = d->head_dim + d->v_dim, mine = share_of(p->team_tokens, d->ranks, me) * d->batch;
    at_desc(d);
    CHECK_INT(p->rows, mine);
    for (int stage = 0; stage < p->stages; ++stage) {
        for (rank = 0; rank < d->ranks; ++rank) {
            int64_t theirs = share_of(p->team_tokens, d->ranks, rank) * d->batch;
            upipe_head_range q = upipe_plan_q(p, stage, rank), kv = upipe_plan_kv(p, stage, rank);
            if (rank == me) continue;
            for (int head = 0; head < q.count; ++head) {
                sent[0] += mine * d->head_dim * e;
                sent[1] += mine * (both * e + 4); /* Q, dO, delta */
            }
            for (int head = 0; head < kv.count && upipe_plan_kv_fresh(p, stage, rank); ++head) {
                sent[0] += mine * both * e;
                sent[1] += mine * both * e;
            }
            q = upipe_plan_q(p, stage, me);
            kv = upipe_plan_kv(p, stage, me);
            for (int head = 0; head < q.count; ++head) {
                sent[0] += theirs * d->v_dim * e;
                sent[1] += theirs * d->head_dim * e;
            }
            for (int head = 0; head < kv.count && upipe_plan_kv_last(p, stage, me); ++head)
                sent[1] += theirs * both * (p->kv_grads_partial ? 4 : e);
        }
        for (int backward = 0; backward < 2; ++backward)
            of_stages[backward] += upi_plan_sent_stage(p, stage, backward);
    }
    for (int backward = 0; backward < 2; ++backward) {
        CHECK_INT(upipe_plan_sent(p, backward), sent[backward]);
        CHECK_INT(of_stages[backward], sent[backward]);
        CHECK_INT(upipe_ring_sent(p, &full, backward), 0);
    }
}

/* Walks all stages and ranks: every query head once, on the rank that then holds just the key/value heads
 * that its query heads read; each of them fetched once, in the naive order in every stage. */
static void walk(const upipe_plan *p)
{
    const upipe_plan_desc *d = &p->desc;
    int seen[256] = {0}, fetched[16][256], held[16], holds[16], of_rank[16], stage, rank, j, before = 0;
    int kv_most = 0; /* heads that a stage sends K of */
    const int wide = d->head_dim > d->v_dim ? d->head_dim : d->v_dim;
    upipe_head_range kept[16] = {0};
    at_desc(d);
    memset(fetched, 0, sizeof fetched);
    memset(held, 0, sizeof held);
    memset(holds, 0, sizeof holds);
    memset(of_rank, 0, sizeof of_rank);
    CHECK_INT(p->rounds * p->steps, p->stages);
    /* a K/V head of its own for each: one rank attends it in one stage */
    CHECK(p->group > 1 || (p->kv_rounds_shared && !p->kv_grads_partial && !p->kv_grads_accumulate));
    if (p->schedule == UPIPE_UNEVEN) CHECK_INT(p->kv_grads_accumulate, p->group > 1);
    for (stage = 0; stage < p->stages; ++stage) {
        upipe_stage s = upipe_plan_stage(p, stage);
        int any_fresh = 0, any_last = 0, any = 0;
        CHECK_INT(s.round * p->steps + s.step, stage);
        CHECK_INT(upipe_plan_before(p, stage, -1), before);
        for (rank = 0; rank < d->ranks; ++rank) {
            upipe_head_range q = upipe_plan_q(p, stage, rank), kv = upipe_plan_kv(p, stage, rank);
            int fresh = upipe_plan_kv_fresh(p, stage, rank), last = upipe_plan_kv_last(p, stage, rank);
            CHECK(q.count >= 0 && q.count <= p->per_rank && kv.count <= p->kv_per_rank);
            if (p->schedule != UPIPE_UNEVEN) CHECK_INT(q.count, p->per_rank);
            if (p->group == 1 && q.count > 0) CHECK_INT(q.first, before); /* stages take heads in order */
            CHECK_INT(upipe_plan_before(p, stage, rank), of_rank[rank]);
            of_rank[rank] += q.count;
            any_fresh |= fresh;
            any_last |= last;
            any |= q.count > 0;
            if (fresh) {
                CHECK_SAY(!holds[rank], "stage %d rank %d fetches over what it still holds", stage, rank);
                holds[rank] = 1;
                kept[rank] = kv;
                for (j = 0; j < kv.count; ++j) ++fetched[rank][kv.first + j];
            }
            if (q.count > 0) {
                CHECK(holds[rank]);
                CHECK_INT(kv.first, q.first / p->group);
                CHECK_INT(kv.first + kv.count - 1, (q.first + q.count - 1) / p->group);
                CHECK_SAY(kept[rank].first == kv.first && kept[rank].count == kv.count,
                          "stage %d rank %d attends with heads %d+%d of K, and holds %d+%d", stage, rank,
                          kv.first, kv.count, kept[rank].first, kept[rank].count);
            } else {
                CHECK(kv.count == 0 && !fresh && !last);
            }
            if (last) holds[rank] = 0;
            for (j = 0; j < q.count; ++j) {
                int at_stage, at_rank;
                upipe_head_range place = upipe_plan_q_place(p, q.first + j, &at_stage, &at_rank);
                if (!CHECK_SAY(q.first + j < d->heads, "head %d of %d", q.first + j, d->heads)) return;
                ++seen[q.first + j];
                CHECK_INT(at_stage, stage);
                CHECK_INT(at_rank, rank);
                CHECK(place.first == q.first && place.count == q.count);
            }
            before += q.count;
        }
        CHECK(any);
        CHECK_INT(s.kv_fresh, any_fresh);
        CHECK_INT(s.kv_last, any_last);
        walk_buffer(p, UPIPE_A2A_Q, stage);
        walk_buffer(p, UPIPE_A2A_KV, stage);
        walk_buffer(p, UPIPE_A2A_DKV, stage);
        j = upipe_plan_heads_sent(p, UPIPE_A2A_KV, stage);
        if (any_fresh && j > kv_most) kv_most = j;
    }
    CHECK_INT(p->buffers.kv_send, p->rows * kv_most * wide * (int64_t)upipe_dtype_bytes(d->dtype));
    CHECK_INT(upipe_plan_before(p, p->stages, -1), d->heads);
    for (j = 0; j < d->heads; ++j) CHECK_SAY(seen[j] == 1, "head %d is attended %d times", j, seen[j]);
    for (j = 0; j < d->kv_heads; ++j) {
        int all = 0;
        for (rank = 0; rank < d->ranks; ++rank) {
            all += fetched[rank][j];
            CHECK_SAY(p->schedule == UPIPE_IN_ORDER || fetched[rank][j] <= 1,
                      "rank %d fetches head %d %d times", rank, j, fetched[rank][j]);
        }
        CHECK(all >= 1);
        if (!p->kv_grads_partial) CHECK_SAY(all == 1, "kv head %d travels %d times", j, all);
    }
    for (rank = 0; rank < d->ranks; ++rank) {
        CHECK(!holds[rank]);
        /* shares of the heads differ by one at most, rounded down */
        CHECK_INT(of_rank[rank], share_of(d->heads, d->ranks, rank));
    }
    /* Ulysses is one stage, whatever the heads */
    if (d->chunk == d->heads) CHECK_INT(p->stages, 1);
    walk_sent(p);
}

/* All of it, also where nothing divides: the tokens do not either. */
static void test_schedules(void)
{
    int legal[5] = {0, 0, 0, 0, 0};
    for (int naive = 0; naive < 2; ++naive) {
        for (int ranks = 1; ranks <= 9; ++ranks) {
            for (int heads = 1; heads <= 32; ++heads) {
                for (int kv = 1; kv <= heads; ++kv) {
                    if (heads % kv != 0) continue;
                    for (int m = 0; m <= heads / ranks; ++m) {
                        int chunk = m > 0 ? m * ranks : heads, group = heads / kv;
                        int each = chunk == heads ? (heads + ranks - 1) / ranks : m;
                        int even = heads % (each * ranks) == 0, whole = each % group == 0;
                        int expected = !naive || (even && (whole || group % each == 0));
                        upipe_plan_desc d = describe(5 * ranks + heads % ranks, ranks, heads, kv, 64, chunk);
                        upipe_plan p;
                        upipe_status s;
                        d.naive = naive;
                        d.batch = 1 + m % 2;
                        d.v_dim = m % 3 == 0 ? 32 : 0;
                        d.dtype = m % 2 ? UPIPE_BF16 : UPIPE_F32;
                        s = upipe_plan_init(&p, &d, NULL);
                        CHECK_SAY((s == UPIPE_OK) == expected,
                                  "%d/%d heads, %d ranks, chunk %d, naive %d: status %s", heads, kv, ranks,
                                  chunk, naive, upipe_status_name(s));
                        if (s != UPIPE_OK) continue;
                        ++legal[p.schedule];
                        walk(&p);
                        for (int rank = 1; rank < ranks; ++rank) {
                            d.rank = rank;
                            CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
                            walk_sent(&p);
                        }
                    }
                }
            }
        }
    }
    CHECK(legal[UPIPE_GROUP] > 50 && legal[UPIPE_WHOLE] > 50 && legal[UPIPE_SPLIT] > 50 &&
          legal[UPIPE_IN_ORDER] > 50 && legal[UPIPE_UNEVEN] > 50);
}

/* Whether a query at position q sees a key at position k of the same sequence. */
static int position_sees(const upipe_mask *m, int64_t sequence, int64_t q, int64_t k)
{
    if ((m->causal && k > q) || (m->window > 0 && k <= q - m->window)) return 0;
    for (int64_t i = 1; m->borders.cu_seqlens != NULL && i < m->borders.cu_seqlens_n; ++i)
        if ((m->borders.cu_seqlens[i] <= sequence + q) != (m->borders.cu_seqlens[i] <= sequence + k))
            return 0;
    return 1;
}

/* Which ranks' queries see a key of which rank, position by position. */
static void walk_seen(int seen[16][16], const upipe_plan_desc *d, const upipe_mask *mask)
{
    memset(seen, 0, 16 * sizeof seen[0]);
    for (int q = 0; q < d->ring; ++q)
        for (int k = 0; k < d->ring; ++k) {
            const upipe_shard a = upipe_shard_ring(d->layout, d->tokens, d->ring, q),
                              b = upipe_shard_ring(d->layout, d->tokens, d->ring, k);
            for (int64_t s = 0; s < d->batch; ++s)
                for (int64_t i = 0; i < a.n; ++i)
                    for (int64_t j = 0; j < b.n && !seen[q][k]; ++j)
                        seen[q][k] = position_sees(mask, s * d->tokens, upipe_shard_pos(&a, i),
                                                   upipe_shard_pos(&b, j));
        }
}

/* Whether one of the ranks base + (place + step) % inner, step in [first, end), sees the block. */
static int seen_further(int seen[16][16], int block, int base, int place, int inner, int first, int end)
{
    for (int step = first; step < end; ++step)
        if (seen[base + (place + step) % inner][block]) return 1;
    return 0;
}

/* K and V of all ranks go round rings within rings, no further than they are seen, gradients one step more: whose tokens a
 * rank hands on, step by step, and that gradients end on their own rank. */
static void walk_ring(const upipe_plan_desc *desc, const upipe_mask *mask)
{
    upipe_plan_desc d = *desc;
    int inner = d.ring_inner > 1 ? d.ring_inner : d.ring, outer = d.ring / inner, grads, o, i, r;
    int64_t tokens[2][16];
    int seen[16][16];
    upipe_plan p;
    at_desc(desc);
    walk_seen(seen, &d, mask);
    memset(tokens, 0, sizeof tokens);
    for (grads = 0; grads < 2; ++grads) {
        int holds[16], from[16], next[16];
        for (r = 0; r < d.ring; ++r) from[r] = r;
        for (o = 0; o < outer; ++o) {
            memcpy(holds, from, sizeof holds);
            for (i = 0; i < inner - !grads && inner > 1; ++i) {
                for (r = 0; r < d.ring; ++r) {
                    if (grads ||
                        seen_further(seen, holds[r], r / inner * inner, r % inner, inner, 1, inner - i))
                        tokens[grads][r] += upipe_shard_ring(d.layout, d.tokens, d.ring, holds[r]).n;
                    next[r / inner * inner + (r + 1) % inner] = holds[r];
                }
                memcpy(holds, next, sizeof holds);
            }
            for (r = 0; grads && r < d.ring; ++r) CHECK_INT(holds[r], from[r]);
            if (outer == 1 || (o + 1 == outer && !grads)) continue;
            for (r = 0; r < d.ring; ++r) {
                int further = grads;
                for (i = o + 1; i < outer; ++i)
                    further |=
                        seen_further(seen, from[r], (r / inner + i - o) % outer * inner, 0, inner, 0, inner);
                if (further) tokens[grads][r] += upipe_shard_ring(d.layout, d.tokens, d.ring, from[r]).n;
                next[(r + inner) % d.ring] = from[r];
            }
            memcpy(from, next, sizeof from);
        }
        for (r = 0; grads && r < d.ring; ++r) CHECK_INT(from[r], r);
    }
    for (r = 0; r < d.ring; ++r) {
        int64_t heads = 0, both = d.head_dim + d.v_dim, first, second;
        d.ring_rank = r;
        if (!CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK)) return;
        CHECK_INT(p.desc.ring_mode, d.ring_mode);
        for (i = 0; i < p.stages; ++i)
            if (upipe_plan_kv_fresh(&p, i, d.rank)) heads += upipe_plan_kv(&p, i, d.rank).count;
        first = tokens[0][r];
        second = tokens[1][r];
        if (d.ring_mode == UPIPE_RING_ALL_GATHER) {
            /* its own to each that sees it, and gradients of theirs */
            for (first = i = 0; i < d.ring; ++i) first += i != r && seen[i][r] ? p.team_tokens : 0;
            second = d.tokens - p.team_tokens;
        }
        CHECK_INT(upipe_ring_sent(&p, mask, 0), heads * both * d.batch * first * 2);
        CHECK_INT(upipe_ring_sent(&p, mask, 1), heads * both * d.batch * (first * 2 + second * 4));
    }
}

static void test_rings(void)
{
    static const int64_t borders[] = {0, 7, 7, 30, 101, 160, 161, 202};
    const upipe_mask masks[] = {full,
                                {.causal = 1},
                                {.causal = 1, .window = 9},
                                {.window = 30},
                                {.causal = 1, .borders = {borders, 7}},
                                {.borders = {borders, 7}}};
    for (int layout = 0; layout < UPIPE_LAYOUTS; ++layout) {
        for (int mode = UPIPE_RING_P2P; mode <= UPIPE_RING_ALL_GATHER; ++mode) {
            for (int ring = 2; ring <= 8; ++ring) {
                for (int inner = 0; inner <= ring; ++inner) {
                    upipe_plan_desc d = describe(101, 2, 8, 4, 64, 2);
                    if (inner > 0 && ring % inner != 0) continue;
                    if (inner > 1 && mode == UPIPE_RING_ALL_GATHER) continue;
                    d.ring = ring;
                    d.ring_inner = inner;
                    d.ring_mode = (upipe_ring_mode)mode;
                    d.layout = (upipe_layout)layout;
                    d.rank = ring % 2;
                    d.batch = 2;
                    d.v_dim = 32;
                    d.dtype = UPIPE_BF16;
                    for (size_t i = 0; i < sizeof masks / sizeof *masks; ++i) walk_ring(&d, &masks[i]);
                }
            }
        }
    }
}

/* What AUTO becomes: never AUTO; P2P where an inner ring is asked for, ALL_GATHER where rounds are not
 * common.
 */
static void test_ring_modes(void)
{
    upipe_plan_desc d = describe(1024, 2, 8, 4, 64, 2);
    upipe_plan p;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    CHECK_INT(p.width, 1);
    d.ring = 4;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    CHECK(p.desc.ring_mode != UPIPE_RING_AUTO);
    CHECK_INT(p.width, p.desc.ring_mode == UPIPE_RING_P2P ? p.steps : 1);
    d.ring_inner = 2;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    CHECK_INT(p.desc.ring_mode, UPIPE_RING_P2P);
    CHECK_INT(p.width, p.steps);
    d = describe(1024, 8, 28, 4, 64, 8);
    d.ring = 2;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    CHECK_INT(p.schedule, UPIPE_UNEVEN);
    CHECK_INT(p.desc.ring_mode, UPIPE_RING_ALL_GATHER);
    /* many heads a group: K and V are small beside Q */
    d = describe(1024, 1, 64, 1, 64, 1);
    d.ring = 2;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    CHECK_INT(p.desc.ring_mode, UPIPE_RING_ALL_GATHER);
    /* one step a round: nothing is held longer by shifting */
    d = describe(1024, 1, 8, 8, 64, 1);
    d.ring = 8;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    CHECK_INT(p.desc.ring_mode, UPIPE_RING_P2P);
}

/* The scheduling figure: C = 4, G = 4, 16 heads. */
static void test_figure(void)
{
    upipe_plan_desc d = describe(64, 4, 16, 4, 128, 0);
    upipe_plan p;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    CHECK_INT(p.stages, 4);
    CHECK_INT(p.desc.chunk, 4);
    CHECK_INT(p.desc.model_dim, 2048);
    for (int stage = 0; stage < 4; ++stage) {
        CHECK_INT(upipe_plan_stage(&p, stage).kv_fresh, stage == 0);
        for (int rank = 0; rank < 4; ++rank) {
            CHECK_INT(upipe_plan_q(&p, stage, rank).first, 4 * rank + stage);
            CHECK_INT(upipe_plan_kv(&p, stage, rank).first, rank);
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
    upipe_plan_desc d = describe(8L << 20, 8, 32, 8, 128, 8);
    upipe_plan p;
    for (int row = 0; row < 4; ++row)
        for (int phase = 0; phase < 8; ++phase)
            CHECK_SAY(paper_units((paper_row)row, (upipe_phase)phase, 4, 4, 16, 32) == want[row][phase],
                      "row %d column %s is %g, not %g", row, upipe_phase_name(phase),
                      paper_units((paper_row)row, (upipe_phase)phase, 4, 4, 16, 32), want[row][phase]);
    /* at nu = 1 UPipe's row is Ulysses with offloading, but for final_out that the paper allocates first */
    CHECK(paper_units(PAPER_UPIPE, UPIPE_BWD_ATTN, 4, 1, 1, 1) ==
          paper_units(PAPER_ULYSSES_OFFLOAD, UPIPE_BWD_ATTN, 4, 1, 1, 1));
    CHECK(paper_units(PAPER_UPIPE, UPIPE_BWD_IN, 4, 1, 1, 1) ==
          paper_units(PAPER_ULYSSES_OFFLOAD, UPIPE_BWD_IN, 4, 1, 1, 1));
    /* a unit of Llama3-8B on 8 ranks is 1 GiB per million tokens */
    d.dtype = UPIPE_BF16;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    CHECK_INT(upipe_plan_unit_bytes(&p), 8LL << 30);
}

static void refuse(upipe_plan_desc d, upipe_status status, const char *words)
{
    upipe_plan p;
    upipe_err e = {0};
    CHECK_REFUSED(upipe_plan_init(&p, &d, &e), status, e, words);
}

static void test_refusals(void)
{
    upipe_plan_desc d = describe(1024, 8, 32, 8, 128, 8);
    upipe_plan p;
    int stage, rank;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    refuse(describe(7, 8, 32, 8, 128, 8), UPIPE_ERR_ARG, "7 tokens are fewer than 8");
    refuse(describe(1024, 8, 32, 5, 128, 8), UPIPE_ERR_ARG, "32 query heads are no multiple of 5");
    refuse(describe(1024, 8, 32, 8, 128, 12), UPIPE_ERR_ARG,
           "chunk of 12 heads does not divide into 8 ranks");
    refuse(describe(1024, 8, 32, 8, 128, 40), UPIPE_ERR_ARG, "a chunk of 40 of 32 heads");
    refuse(describe(0, 8, 32, 8, 128, 8), UPIPE_ERR_ARG, "tokens 0");
    refuse(describe(1024, -1, 32, 8, 128, 8), UPIPE_ERR_ARG, "ranks -1");
    refuse(describe(1024, 8, 32, 8, 0, 8), UPIPE_ERR_ARG, "head dim 0");
    refuse(describe(INT64_C(1) << 56, 8, 32, 8, 128, 8), UPIPE_ERR_OVERFLOW, "overflow");
    refuse(describe(1024, 1, 1 << 20, 1 << 20, 1 << 12, 1), UPIPE_ERR_OVERFLOW, "elements");
    /* rows of 32 * 128 elements, 16 sums of 4 bytes, Q and K: 2^19 bytes a token */
    refuse(describe(INT64_C(1) << 44, 8, 32, 8, 128, 8), UPIPE_ERR_OVERFLOW, "4096 elements");
    d.tokens = INT64_C(1) << 43;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    /* 32/8 heads over 8 ranks with one thing, or a few, changed */
#define REFUSE(status, words, ...)        \
    d = describe(1024, 8, 32, 8, 128, 8); \
    __VA_ARGS__;                          \
    refuse(d, UPIPE_ERR_##status, words);
    /* no product before the check */
    REFUSE(OVERFLOW, "4 sequences", d.tokens = INT64_C(1) << 62, d.batch = 4)
    REFUSE(OVERFLOW, "9223372036854775807 tokens", d.tokens = INT64_MAX, d.batch = 1, d.ring = 4,
           d.layout = UPIPE_STRIPED)
    REFUSE(OVERFLOW, "model dim 2147483648", d.model_dim = INT64_C(1) << 31)
    REFUSE(ARG, "data type 7", d.dtype = (upipe_dtype)7)
    REFUSE(ARG, "model dim -4", d.model_dim = -4)
    REFUSE(ARG, "rank 8 of 8, ring rank 0 of 1", d.rank = 8)
    REFUSE(ARG, "rank 0 of 8, ring rank 1 of 1", d.ring_rank = 1)
    REFUSE(ARG, "ring mode 1 without a ring", d.ring_mode = UPIPE_RING_P2P)
    REFUSE(ARG, "an inner ring of 2", d.ring_inner = 2)
    REFUSE(ARG, "a ring of 3 does not divide into inner rings of 2", d.ring_inner = 2, d.ring = 3)
    REFUSE(ARG, "K and V are gathered", d.ring_inner = 2, d.ring = 4, d.ring_mode = UPIPE_RING_ALL_GATHER)
    REFUSE(ARG, "ring mode 3", d.ring_inner = 2, d.ring = 4, d.ring_mode = (upipe_ring_mode)3)
    REFUSE(ARG, "layout 3", d.ring_inner = 2, d.ring = 4, d.layout = UPIPE_LAYOUTS)
    REFUSE(ARG, "63 tokens are fewer than 64, one for each part of 32 ranks, two parts a rank",
           d.ring_inner = 2, d.ring = 4, d.layout = UPIPE_ZIGZAG, d.tokens = 63)
#undef REFUSE
    d.tokens = 64;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    d = describe(1024, 2, 24, 4, 64, 8);
    d.naive = 1;
    refuse(d, UPIPE_ERR_UNSUPPORTED, "do not fit groups of 6");
    refuse(describe(1024, 1, 512, 512, 64, 1), UPIPE_ERR_UNSUPPORTED,
           "512 heads in chunks of 1 are more than 256 stages");
    d = describe(1024, 8, 28, 4, 128, 8);
    d.ring = 2;
    d.ring_mode = UPIPE_RING_P2P;
    refuse(d, UPIPE_ERR_UNSUPPORTED, "28/4 heads over 8 ranks in 4 stages are uneven");
    d.chunk = 28; /* Ulysses: one stage, one round */
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    /* absurd, legal, and not to overflow an int on the way */
    d = describe(1, 1, 1500000000, 1500000000, 1, 1500000000);
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    CHECK_INT(upipe_plan_sent(&p, 1), 0);
    d = describe(3, 3, INT32_MAX - 1, INT32_MAX - 1, 1, INT32_MAX - 1);
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    CHECK_INT(p.per_rank, (INT32_MAX - 1) / 3);
    d = describe(2, 2, INT32_MAX, INT32_MAX, 1, INT32_MAX); /* more heads a stage than an int counts */
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    CHECK_INT(upipe_plan_q_place(&p, INT32_MAX - 1, &stage, &rank).count, p.per_rank);
    CHECK(stage == 0 && rank == 1);
}

/* Plans of one description have the same bytes, wherever they lie, and the seal covers all of them. */
static void test_seal(void)
{
    const upipe_plan_desc d = describe(24, 4, 8, 2, 64, 4);
    upipe_plan p, other;
    size_t i;
    memset(&p, 0, sizeof p);
    memset(&other, 0xff, sizeof other);
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK && upipe_plan_init(&other, &d, NULL) == UPIPE_OK);
    CHECK_BYTES(&p, &other, sizeof p);
    CHECK_INT(sizeof(upipe_shard), sizeof p.shard.n + sizeof p.shard.step + sizeof p.shard.piece +
                                       sizeof p.shard.pieces); /* without gaps, which need not be copied */
    for (i = 0; i < offsetof(upipe_plan, seal); ++i) {
        ((unsigned char *)&other)[i] ^= 1;
        CHECK(upipe_hash_bytes(UPIPE_HASH, &other, offsetof(upipe_plan, seal)) != p.seal);
        ((unsigned char *)&other)[i] ^= 1;
    }
}

/* Uneven heads with a K/V head for each: a stage has the next ones of all, which its ranks share in order. */
static void check_own(const upipe_plan *p)
{
    const int all = p->desc.heads, ranks = p->desc.ranks;
    int next = 0, fresh;
    for (int stage = 0, ends = 0; ends < 2; ++stage) { /* and a stage behind the last one */
        const int left = all - next, n = left < ranks * p->per_rank ? left : ranks * p->per_rank;
        for (int rank = 0; rank < ranks; ++rank) {
            const upipe_head_range got = upi_uneven_stage(p, stage, rank, &fresh);
            const int first = next + n * rank / ranks, end = next + n * (rank + 1) / ranks;
            CHECK_SAY(got.first == first && got.count == end - first && fresh == (got.count > 0),
                      "%d heads, %d ranks, %d a stage: rank %d has %d+%d in stage %d, not %d+%d", all, ranks,
                      p->per_rank, rank, got.first, got.count, stage, first, end - first);
        }
        next += n;
        ends += n == 0;
    }
}

/* Uneven heads step by step: the greedy rule that the closed form states at once. */
static void test_uneven(void)
{
    test_rng rng;
    rng.state = 7;
    for (int draw = 0; draw < (BRIEF ? 500 : 5000); ++draw) {
        const int group = 1 + test_below(&rng, 12), m = 1 + test_below(&rng, test_below(&rng, 2) ? 5 : 30);
        upipe_plan p = {
            .desc = describe(1, 1 + test_below(&rng, 9), group * (1 + test_below(&rng, 20)), 1, 64, 0),
            .group = group,
            .per_rank = m};
        if (group == 1) check_own(&p);
        for (int rank = 0; group > 1 && rank < p.desc.ranks; ++rank) {
            const int begin = p.desc.heads * rank / p.desc.ranks;
            const int end = p.desc.heads * (rank + 1) / p.desc.ranks;
            int first = begin, fresh, ends = 0;
            for (int stage = 0; ends < 2; ++stage) { /* and a stage behind the last one */
                upipe_head_range got = upi_uneven_stage(&p, stage, rank, &fresh);
                int left = end - first, n = group - first % group;
                if (n > left) n = left;
                /* a part of a group; the rest of one whose K and V are there; otherwise more groups that fit */
                while (n < left && n < m && (first % group == 0 || first == begin)) {
                    int more = left - n < group ? left - n : group;
                    if (n + more > m) break;
                    n += more;
                }
                if (n > m) n = m;
                CHECK_SAY(
                    got.first == first && got.count == n &&
                        fresh == (n > 0 && (first == begin || first % group == 0)),
                    "%d heads, groups of %d, %d ranks, %d a stage: rank %d has %d+%d in stage %d, not %d+%d",
                    p.desc.heads, group, p.desc.ranks, m, rank, got.first, got.count, stage, first, n);
                first += n;
                ends += n == 0;
            }
        }
    }
}

/* Numbers that once were walked to the end before they were refused, and legal ones that leave an int on the way. */
static void test_extremes(void)
{
    upipe_plan_desc d = describe(1024, 4, 16777215, 1, 32, 4);
    const int any[] = {248, -1, INT32_MAX, INT32_MIN};
    upipe_plan p;
    upipe_err e;
    refuse(d, UPIPE_ERR_UNSUPPORTED, "16777215 heads in chunks of 4 are more than 256 stages");
    refuse(describe(1024, 1, INT32_MAX, INT32_MAX, 1, 2), UPIPE_ERR_UNSUPPORTED, "more than 256 stages");
    refuse(describe(INT64_C(1) << 30, 1 << 30, 1, 1, 1, 1), UPIPE_ERR_UNSUPPORTED,
           "a team of 1073741824 ranks and a ring of 1, at most 1024 each");
    d = describe(1 << 20, UPIPE_RANKS_MAX, 1, 1, 1, 1);
    d.ring = UPIPE_RANKS_MAX;
    d.tokens = (int64_t)d.ranks * d.ring;
    CHECK_STATUS(upipe_plan_init(&p, &d, &e), UPIPE_OK, e);
    d.ring = INT32_MAX;
    refuse(d, UPIPE_ERR_UNSUPPORTED, "a ring of 2147483647");
    /* one head of 2^31 - 1 elements */
    d = describe(4, 1, 1, 1, INT32_MAX, 1);
    d.ring = 2;
    CHECK_STATUS(upipe_plan_init(&p, &d, &e), UPIPE_OK, e);
    CHECK_INT(upipe_ring_sent(&p, &full, 0), INT64_C(2) * INT32_MAX * 2 * 4);
    /* any bytes in the place of an enum */
    for (size_t i = 0; i < sizeof any / sizeof *any; ++i) {
        d = describe(1024, 8, 32, 8, 128, 8);
        memcpy(&d.ring_mode, &any[i], sizeof any[i]);
        refuse(d, UPIPE_ERR_ARG, "ring mode");
        d.ring_mode = UPIPE_RING_AUTO;
        memcpy(&d.layout, &any[i], sizeof any[i]);
        refuse(d, UPIPE_ERR_ARG, "layout");
        memcpy(&d.dtype, &any[i], sizeof any[i]);
        refuse(d, UPIPE_ERR_ARG, "data type");
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_schedules());
    TEST(test_uneven());
    TEST(test_seal());
    TEST(test_extremes());
    TEST(test_rings());
    TEST(test_ring_modes());
    TEST(test_figure());
    TEST(test_tables());
    TEST(test_refusals());
    return test_end("plan");
}
