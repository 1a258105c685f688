/* test_ring -- the block over teams and rings, trap by trap: what breaks where attention is put together from
 * several ranks' keys, and where heads or tokens do not divide; rings that do not agree. Two sequences
 * everywhere, against dense attention (lib/close.h)
 *
 * Random ones: test_property.
 */
#include "lib/block_checks.h"

static run_case make_case(int64_t tokens, int h, int hkv, int ranks, int ring, upipe_layout layout)
{
    run_case t = run_of(tokens, h, hkv, 32, 24, ranks, 0, UPIPE_F32);
    t.shape.batch = 2;
    t.shape.rope = 1; /* so that positions matter without a mask too */
    t.ring = ring;
    t.layout = layout;
    t.deadline = 60;
    return t;
}

/* Runs a case against the oracle. */
static int hold(const run_case *t, const char *name, run_result *r)
{
    long failures = test_failures;
    int ok = check_case(t, 11, r);
    if (test_shown_since(failures)) fprintf(stderr, "in '%s'\n", name);
    return ok;
}

static void check_named(const run_case *t, const char *name)
{
    run_result r;
    hold(t, name, &r);
}

/* In every layout, K and V going round or gathered, neighbours in a team or in a ring. */
static void check_rings(run_case t, const char *name)
{
    for (int layout = 0; layout < UPIPE_LAYOUTS; ++layout)
        for (int mode = UPIPE_RING_P2P; mode <= UPIPE_RING_ALL_GATHER; ++mode)
            for (int first = 0; first < 2; ++first) {
                if (!test_full() && (layout + mode + first) % 2 == 0) continue;
                t.layout = (upipe_layout)layout;
                t.ring_mode = (upipe_ring_mode)mode;
                t.ring_first = first;
                if (layout != UPIPE_CONTIGUOUS) block_rope_own(&t.shape, 24);
                t.shape.full = first && mode == UPIPE_RING_P2P;
                check_named(&t, name);
            }
}

/* Heads are traded first, then K and V go round: positions are those of the ring's share, not of the rank's.
 */
static void test_hybrid_order(void)
{
    static const int grids[][2] = {{2, 2}, {2, 3}, {3, 2}, {1, 4}, {4, 2}};
    for (size_t i = 0; i < sizeof grids / sizeof *grids; ++i)
        check_rings(make_case(48, 12, 12, grids[i][0], grids[i][1], UPIPE_ZIGZAG), "hybrid order");
}

/* More heads in a group than one stage takes: a round's stages meet each block of K and V together, or keep
 * all. */
static void test_several_steps(void)
{
    run_case t = make_case(40, 8, 2, 2, 2, UPIPE_ZIGZAG);
    check_rings(t, "several steps");
    t.chunk = 4;
    check_rings(t, "several heads, several steps");
    t.ranks = 4; /* more ranks than key/value heads */
    t.chunk = 0;
    check_rings(t, "shared heads");
    t.ranks = 2;
    t.naive = 1;
    check_rings(t, "the naive order");
}

/* G < C < Hkv: neighbouring ranks have neighbouring groups, and a stage takes part of each. */
static void test_group_ranks_heads(void)
{
    run_case t = make_case(37, 12, 6, 3, 1, UPIPE_CONTIGUOUS);
    check_named(&t, "G 2 < C 3 < Hkv 6");
    t.chunk = 12;
    check_named(&t, "G 2 < C 3 < Hkv 6, Ulysses");
    t = make_case(48, 16, 8, 4, 2, UPIPE_ZIGZAG);
    check_rings(t, "G 2 < C 4 < Hkv 8");
    t = make_case(48, 24, 8, 4, 2, UPIPE_ZIGZAG);
    check_rings(t, "G 3 < C 4 < Hkv 8");
}

/* Borders inside a rank's rows, inside a tile and between stages; one on a rank's border; an empty packed
 * sequence.
 */
static void test_borders(void)
{
    static const int64_t cu_seqlens[] = {0, 5, 23, 24, 24, 37, 48, 70, 96, 130, 131, 192};
    run_case t = make_case(96, 4, 2, 2, 2, UPIPE_ZIGZAG);
    t.shape.cu_seqlens = cu_seqlens;
    t.shape.cu_seqlens_n = sizeof cu_seqlens / sizeof *cu_seqlens - 1;
    check_rings(t, "borders");
    t.shape.window = 9;
    check_rings(t, "borders and a window");
    t.ring = 1;
    t.ranks = 4;
    check_named(&t, "borders without a ring");
}

/* Shorter than 2R tokens: most pairs of ranks have nothing in common, and a packed sequence lies on a few
 * ranks alone. */
static void test_short_documents(void)
{
    int64_t cu_seqlens[64];
    run_case t = make_case(41, 4, 2, 1, 4, UPIPE_ZIGZAG);
    for (int i = 0; i < 28; ++i) cu_seqlens[i] = 3 * i;
    cu_seqlens[28] = 82;
    t.shape.cu_seqlens = cu_seqlens;
    t.shape.cu_seqlens_n = 28;
    check_rings(t, "packed sequences of 3 tokens over a ring of 4");
    for (int i = 0; i < 64; ++i) cu_seqlens[i] = i;
    t.shape.cu_seqlens_n = 60;
    check_rings(t, "packed sequences of one token, then none");
}

/* Rows outside all packed sequences: O is 0, the log-sum-exp -inf or the sink, and no gradient comes of
 * them. */
static void test_rows_that_see_nothing(void)
{
    static const int64_t cu_seqlens[] = {7, 20, 31};
    run_case t = make_case(40, 4, 2, 2, 2, UPIPE_CONTIGUOUS);
    t.shape.cu_seqlens = cu_seqlens;
    t.shape.cu_seqlens_n = 2;
    check_rings(t, "rows that see nothing");
    for (int mode = UPIPE_RING_P2P; mode <= UPIPE_RING_ALL_GATHER; ++mode)
        for (int sinks = 0; sinks < 2; ++sinks) {
            run_result r;
            int64_t width = 4 * 32;
            t.ring_mode = (upipe_ring_mode)mode;
            t.shape.sinks = sinks;
            if (hold(&t, "rows that see nothing", &r))
                for (int64_t row = 0; row < 80; ++row) {
                    if (row >= cu_seqlens[0] && row < cu_seqlens[2]) continue;
                    for (int64_t i = 0; i < width; ++i)
                        CHECK(r.out.o[row * width + i] == 0 && r.out.q[row * width + i] == 0);
                    for (int64_t i = 0; i < 4; ++i)
                        CHECK(sinks ? isfinite(r.out.lse[row * 4 + i]) : r.out.lse[row * 4 + i] == -INFINITY);
                }
        }
}

/* A block of the ring that shows nothing to some rows, first, last or between others: weights of exp(-inf -
 * -inf). */
static void test_empty_merges(void)
{
    run_case t = make_case(45, 4, 4, 1, 4, UPIPE_CONTIGUOUS);
    for (int64_t window = 1; window <= 33; window += 8) {
        t.shape.window = window;
        check_rings(t, "a window");
        t.shape.sinks = !t.shape.sinks;
    }
}

/* Each rank's tokens give a part of a weight's gradient: their sum, not their mean. */
static void test_weights_are_summed(void)
{
    run_case t = make_case(48, 4, 2, 2, 2, UPIPE_STRIPED), one = make_case(48, 4, 2, 1, 0, UPIPE_CONTIGUOUS);
    run_result r, s;
    t.shape.projected = one.shape.projected = 1;
    t.shape.sinks = one.shape.sinks = 1;
    if (hold(&t, "four ranks", &r) & hold(&one, "one rank", &s))
        for (int j = 0; j < 5; ++j) {
            static const char *const names[] = {"wq", "wk", "wv", "wo", "sinks"};
            const float *of_four[] = {r.out.wq, r.out.wk, r.out.wv, r.out.wo, r.out.sinks};
            const float *of_one[] = {s.out.wq, s.out.wk, s.out.wv, s.out.wo, s.out.sinks};
            double far = 0, all = 0;
            for (int64_t i = 0; i < block_count(&t.shape, names[j]); ++i) {
                double a = (double)of_four[j][i], b = (double)of_one[j][i];
                far += (a - b) * (a - b);
                all += b * b;
            }
            CHECK_SAY(far <= 1e-10 * all, "%s of four ranks is %.3g away from one rank's", names[j],
                      sqrt(far / all));
        }
}

/* A ring in each node, and a ring of nodes. */
static void test_double_rings(void)
{
    static const int rings[][2] = {{4, 2}, {6, 3}, {6, 2}, {4, 4}, {3, 1}};
    for (size_t i = 0; i < sizeof rings / sizeof *rings; ++i)
        for (int layout = 0; layout < UPIPE_LAYOUTS; ++layout)
            for (int chunk = 0; chunk <= 8; chunk += 4) {
                run_case t = make_case(61, 8, 2, 2, rings[i][0], (upipe_layout)layout);
                t.inner = rings[i][1];
                t.chunk = chunk;
                t.ring_first = chunk == 4;
                t.shape.full = chunk == 8;
                t.shape.window = layout == UPIPE_STRIPED ? 20 : 0;
                check_named(&t, "double ring");
            }
}

/* Heads that do not divide, with few heads and with none on some ranks, and a length that does not either;
 * UPipe, a chunk between and Ulysses; alone and over a ring, with K and V gathered or, in one stage, shifted.
 */
static void test_uneven(void)
{
    static const struct {
        int h, hkv, ranks;
    } cases[] = {{28, 4, 8}, {40, 10, 4}, {9, 3, 3}, {9, 3, 2}, {6, 1, 4}, {5, 5, 3}, {2, 2, 3}, {2, 1, 3}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i)
        for (int of_heads = 0; of_heads < 3; ++of_heads)
            for (int ring = 1; ring <= 2; ++ring) {
                run_case t = make_case(37, cases[i].h, cases[i].hkv, cases[i].ranks, ring, UPIPE_ZIGZAG);
                int between = 2 * t.ranks < t.shape.h ? 2 * t.ranks : 0;
                t.chunk = of_heads == 2 ? t.shape.h : of_heads == 1 ? between : 0;
                if (ring > 1 && of_heads == 2) t.ring_mode = UPIPE_RING_P2P;
                t.shape.normed = of_heads == 0;
                t.shape.projected = of_heads == 1;
                t.shape.sinks = of_heads == 2;
                t.shape.v_dim = ring > 1 ? 40 : 0;
                t.shape.dtype = of_heads == 1 ? UPIPE_BF16 : UPIPE_F32;
                t.tile_rows = 5;
                check_named(&t, "uneven heads");
            }
}

static void test_uneven_lengths(void)
{
    for (int64_t tokens = 37; tokens < 41; ++tokens)
        for (int kind = 0; kind < 4; ++kind) {
            run_case t = make_case(tokens, 8, 4, 4, 1 + kind % 2, UPIPE_ZIGZAG);
            t.shape.dtype = kind >= 2 ? UPIPE_BF16 : UPIPE_F32;
            t.dx_apart = kind == 1;
            check_named(&t, "uneven lengths");
        }
}

/* Everything at once: heads of V of their own size, a window, packed sequences, a soft-cap, sinks, norms, a
 * projection. */
static void test_all_masks(void)
{
    static const int64_t cu_seqlens[] = {0, 11, 29, 60, 74};
    run_case t = make_case(37, 12, 4, 2, 2, UPIPE_ZIGZAG);
    t.shape.cu_seqlens = cu_seqlens;
    t.shape.cu_seqlens_n = 4;
    t.shape.window = 13;
    t.shape.softcap = 7;
    t.shape.sinks = t.shape.normed = t.shape.projected = 1;
    t.shape.v_dim = 48;
    check_rings(t, "all masks");
    t.shape.dtype = UPIPE_BF16;
    check_rings(t, "all masks in bf16");
}

/* Neighbours in the world are a team's or a ring's: but for sums over the world, the same bits. */
static void test_orders(void)
{
    run_case t = make_case(45, 6, 2, 2, 3, UPIPE_ZIGZAG);
    run_result r, other;
    if (hold(&t, "teams first", &r)) {
        t.ring_first = 1;
        if (hold(&t, "rings first", &other)) same_bits(&t.shape, &r, &other, "o lse q x");
    }
}

/* ---- rings that do not agree ---- */

/* What ring rank 1 does differently. */
enum { ODD_NOTHING, ODD_WINDOW, ODD_LAYOUT, ODD_MODE, ODD_RANK, ODD_CU_SEQLENS, ODD_AWAY };

static void differ(int odd, run_own *own, upipe_plan_desc *d)
{
    static const int64_t cu_seqlens[] = {0, 7, 16};
    if (own->ring_rank != 1) return;
    if (d != NULL && odd == ODD_RANK) d->ring_rank = 0;
    if (d != NULL && odd == ODD_MODE) d->ring_mode = UPIPE_RING_ALL_GATHER;
    if (d != NULL && odd == ODD_LAYOUT) d->layout = UPIPE_STRIPED;
    if (odd == ODD_WINDOW) own->layer.mask.window = 5;
    if (odd == ODD_CU_SEQLENS)
        own->layer.mask.borders.cu_seqlens = cu_seqlens, own->layer.mask.borders.cu_seqlens_n = 2;
    own->away = odd == ODD_AWAY && own->team_rank == 0;
}

/* What a team agrees on, but not the ring: every rank returns, with a reason. */
static void test_odd_rings(void)
{
    static const struct {
        int odd;
        upipe_status status;
        const char *words;
    } cases[] = {
        {ODD_NOTHING, UPIPE_OK, ""},
        {ODD_WINDOW, UPIPE_ERR_MISMATCH, "window is 0 on rank 0 and 5 on rank 1"},
        {ODD_LAYOUT, UPIPE_ERR_MISMATCH, "striped) is 1 on rank 0 and 2 on rank 1"},
        {ODD_MODE, UPIPE_ERR_MISMATCH, "gather) is 1 on rank 0 and 2 on rank 1"},
        {ODD_CU_SEQLENS, UPIPE_ERR_MISMATCH, "cu_seqlens"},
        {ODD_RANK, UPIPE_ERR_ARG, "a plan for ring rank 0 of 2 on rank 1 of a ring of 2"},
        {ODD_AWAY, UPIPE_ERR_TIMEOUT, "rank"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        run_case t = run_of(16, 4, 4, 32, 16, 2, 0, UPIPE_F32);
        t.ring = 2;
        t.ring_mode = UPIPE_RING_P2P;
        t.layout = UPIPE_ZIGZAG;
        t.differ = differ;
        t.odd = cases[i].odd;
        t.deadline = t.odd == ODD_AWAY ? 0.3 : 20;
        check_differ(&t, 2, t.odd == ODD_AWAY ? UPIPE_OK : cases[i].status, cases[i].status, cases[i].words);
    }
}

/* ---- the ring's calls alone, without the block around them ---- */

typedef struct bare_ring {
    upipe_threads team;
    upipe_ops ops;
    int backward, teamed;
    upipe_err errors[3];
} bare_ring;

static upipe_status second_hop(void *user, size_t bytes, int use, const char *tag)
{
    (void)bytes, (void)use;
    return strcmp(tag, "ring_kv") == 0 && ++*(int *)user == 2 ? UPIPE_ERR_MEMORY : UPIPE_OK;
}

static upipe_status bare_body(void *user, int rank)
{
    enum { BYTES = 1 << 21, WORK = 1 << 20, BLOCKS = 32, TOKENS = 48, DIM = 32 };
    bare_ring *b = (bare_ring *)user;
    const size_t n = TOKENS * DIM;
    float *data = f32_buf((int64_t)(12 * n));
    upipe_comm_self_state buf;
    upipe_comm alone;
    upipe_attend a = {0};
    upipe_kv_block own = {0};
    upipe_plan p;
    upipe_mem mem;
    upipe_ctx c = {.ring = upipe_threads_comm(&b->team, rank)};
    upipe_status s;
    void *work;
    size_t live;
    int hops = 0;
    upipe_plan_desc d = {.tokens = TOKENS, .ring = 3, .ring_rank = rank, .heads = 1, .head_dim = DIM};
    d.ring_mode = UPIPE_RING_P2P;
    CHECK_STATUS(upipe_plan_init(&p, &d, &c.err), UPIPE_OK, c.err);
    context_pool(&c, &mem, &b->ops, BYTES, BLOCKS);
    CHECK_STATUS(upipe_mem_alloc(&mem, &work, WORK, UPIPE_USE_OTHER, "work", &c.err), UPIPE_OK, c.err);
    live = mem.live;
    if (rank == 0) mem.guard = second_hop;
    mem.user = &hops;
    upipe_comm_self(&alone, &buf, b->ops.copy);
    if (b->teamed) c.team = &alone;
    a.plan = &p;
    a.work = work;
    a.work_bytes = WORK;
    a.rows = own.rows = p.team_shard;
    a.tokens = TOKENS;
    a.stages = a.heads = a.kv_heads = 1;
    a.q = data, a.o = data + n, a.lse = data + 2 * n, a.delta = data + 3 * n, a.dout = data + 4 * n;
    a.dq = data + 5 * n, a.merge_dq = 1;
    own.k = data + 6 * n, own.v = data + 7 * n, own.dk = data + 8 * n, own.dv = data + 9 * n;
    s = b->backward ? upipe_ring_bwd(&c, &a, &own) : upipe_ring_fwd(&c, &a, &own);
    CHECK_INT(mem.live, live);
    b->errors[rank] = c.err;
    return s;
}

/* A rank that gets no second buffer frees the first one, and no rank waits for it until the deadline:
 * with a team in the context, which then ends too, or none. */
static void test_bare_calls(void)
{
    for (int kind = 0; kind < 4; ++kind) {
        bare_ring *b = (bare_ring *)zeroed(sizeof *b);
        upipe_status statuses[3];
        upipe_err e;
        b->backward = kind % 2;
        b->teamed = kind / 2;
        b->ops = cpu_table();
        CHECK_STATUS(upipe_threads_init(&b->team, 3, 3, &e), UPIPE_OK, e);
        upipe_threads_run(&b->team, bare_body, b, statuses, NULL);
        for (int rank = 0; rank < 3; ++rank) {
            CHECK_SAY(statuses[rank] == (rank == 0 ? UPIPE_ERR_MEMORY : UPIPE_ERR_ABORTED),
                      "rank %d: %s (%s)", rank, upipe_status_name(statuses[rank]), b->errors[rank].text);
            CHECK_TEXT(b->errors[rank].text, "guard refused");
        }
        upipe_threads_free(&b->team);
    }
}

/* The list has space for the ring's own segments alone, and belongs to a transfer that is under way. */
static void test_ring_arguments(void)
{
    enum { BUF = 64 * 32 };
    float *data = f32_buf(6 * BUF), *k = data, *v = data + BUF, *all_k = data + 2 * BUF,
          *all_v = data + 3 * BUF, *buf = data + 4 * BUF, *sum = data + 5 * BUF;
    upipe_comm_self_state bufs[2];
    upipe_comm comms[2];
    upipe_plan_desc d = {.tokens = 64, .heads = 1, .head_dim = 32};
    upipe_plan p;
    const upipe_mask full = {0};
    upipe_attend a = {.plan = &p};
    upipe_kv_block own = {0};
    upipe_mem_block blocks[4];
    upipe_mem mem;
    const upipe_ops ops = cpu_table();
    upipe_ctx c = {.ops = &ops, .mem = &mem, .team = &comms[0]};
    upipe_msg before[2];
    upipe_mem_init_dry(&mem, blocks, 4);
    upipe_comm_self(&comms[0], &bufs[0], ops.copy);
    upipe_comm_self(&comms[1], &bufs[1], ops.copy);
    for (int ring = 4; ring > 0; ring -= 3) { /* a plan of a larger ring; one without a ring, and no ring */
        d.ring = ring;
        CHECK_STATUS(upipe_plan_init(&p, &d, &c.err), UPIPE_OK, c.err);
        for (c.ring = ring > 1 ? &comms[1] : NULL;; c.ring = NULL) {
            CHECK_REFUSED(upi_ring_reduce_scatter(&c, &p, 1, 32, sum, all_k, buf), UPIPE_ERR_ARG, c.err,
                          ring > 1 ? "a plan for ring rank 0 of 4" : "a plan for ring rank 0 of 1");
            CHECK_STATUS(upi_ring_all_gather_start(&c, &p, &full, 1, all_k, all_v, k, v), UPIPE_ERR_ARG,
                         c.err);
            if (ring > 1) CHECK_STATUS(upipe_ring_fwd(&c, &a, &own), UPIPE_ERR_ARG, c.err);
            if (c.ring == NULL) break;
        }
    }
    c.ring = &comms[1];
    CHECK_STATUS(upi_ring_all_gather_start(&c, &p, &full, 1, all_k, all_v, k, v), UPIPE_OK, c.err);
    memcpy(before, c.ring->list, sizeof before);
    CHECK_REFUSED(upi_ring_reduce_scatter(&c, &p, 1, 32, sum, all_k, buf), UPIPE_ERR_ARG, c.err,
                  "upipe_comm_wait comes first");
    CHECK_STATUS(upi_ring_all_gather_start(&c, &p, &full, 1, all_k, all_v, k, v), UPIPE_ERR_ARG, c.err);
    CHECK_BYTES(before, c.ring->list, sizeof before);
    CHECK_STATUS(upipe_comm_wait(&c, c.ring), UPIPE_OK, c.err); /* none of this has hurt the ring */
    CHECK_STATUS(upi_ring_reduce_scatter(&c, &p, 1, 32, sum, all_k, buf), UPIPE_OK, c.err);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_bare_calls());
    TEST(test_ring_arguments());
    TEST(test_orders());
    TEST(test_odd_rings());
    TEST(test_hybrid_order());
    TEST(test_several_steps());
    TEST(test_group_ranks_heads());
    TEST(test_borders());
    TEST(test_short_documents());
    TEST(test_rows_that_see_nothing());
    TEST(test_empty_merges());
    TEST(test_weights_are_summed());
    TEST(test_double_rings());
    TEST(test_uneven());
    TEST(test_uneven_lengths());
    TEST(test_all_masks());
    return test_end("ring");
}
