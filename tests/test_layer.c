/* test_layer -- the attention block on thread ranks: against f64, the same bits over C and U, failures on
 * every rank */
#include "lib/runner.h"
#include "lib/close_block.h"

static run_case make_case(int64_t tokens, int h, int hkv, int d, int64_t dim, int ranks, int chunk,
                          upipe_dtype dtype)
{
    run_case t;
    memset(&t, 0, sizeof t);
    t.shape.tokens = tokens;
    t.shape.batch = 1;
    t.shape.dim = dim;
    t.shape.h = h;
    t.shape.hkv = hkv;
    t.shape.d = d;
    t.shape.dtype = dtype;
    t.shape.scale = 1 / sqrt((double)d);
    t.shape.theta = 10000;
    t.shape.eps = 1e-5;
    t.ranks = ranks;
    t.chunk = chunk;
    return t;
}

#define SAME(a, b, tensor, shape)                                                                           \
    CHECK_SAY(memcmp((a).out.tensor, (b).out.tensor, (size_t)block_count(shape, #tensor) * 4) == 0,         \
              "%s differs: C %d U %d against C %d U %d", #tensor, (a).plan.desc.ranks, (a).plan.desc.chunk, \
              (b).plan.desc.ranks, (b).plan.desc.chunk)

static int next_chunk(int chunk, int ranks, int heads)
{
    return chunk < heads && chunk + ranks > heads ? heads : chunk + ranks;
}

/* Every (C, U): what numerics.md promises to be equal is equal, also where heads or tokens do not divide. */
static void test_bits(int h, int hkv, int rope, int normed, int projected)
{
    static const int ranks_of[] = {1, 2, 3, 4, 8};
    run_case t = make_case(47, h, hkv, 32, 40, 1, h, UPIPE_F32);
    run_result first, of_ranks, r;
    f32_block in;
    int i, chunk, runs = 0;
    t.shape.batch = 2;
    t.shape.rope = rope;
    t.shape.normed = normed;
    t.shape.projected = projected;
    t.tile_rows = 7;
    block_inputs(&t.shape, 42, &in);
    CHECK(run_block(&t, &in, &first) == UPIPE_OK);
    for (i = 0; i < 5; ++i) {
        int begun = 0;
        t.ranks = ranks_of[i];
        /* Ulysses last, where the ranks do not divide the heads */
        for (chunk = t.ranks < h ? t.ranks : h; chunk <= h; chunk = next_chunk(chunk, t.ranks, h)) {
            t.chunk = chunk;
            if (!CHECK_SAY(run_block(&t, &in, &r) == UPIPE_OK, "C %d U %d: %s", t.ranks, chunk,
                           r.errors[0].text)) {
                run_free(&r);
                continue;
            }
            ++runs;
            SAME(r, first, o, &t.shape);
            SAME(r, first, lse, &t.shape);
            SAME(r, first, q, &t.shape);
            if (!r.plan.kv_grads_partial) SAME(r, first, x, &t.shape);
            if (projected) SAME(r, first, y, &t.shape);
            if (!begun) {
                of_ranks = r;
                begun = 1;
                continue;
            }
            SAME(r, of_ranks, wq, &t.shape);
            if (projected) SAME(r, of_ranks, wo, &t.shape);
            if (normed) SAME(r, of_ranks, q_norm_weight, &t.shape);
            if (run_same_chains(&r.plan) && run_same_chains(&of_ranks.plan)) {
                SAME(r, of_ranks, x, &t.shape);
                SAME(r, of_ranks, wk, &t.shape);
                SAME(r, of_ranks, wv, &t.shape);
                if (normed) SAME(r, of_ranks, k_norm_weight, &t.shape);
            }
            run_free(&r);
        }
        if (begun) run_free(&of_ranks);
    }
    CHECK(runs >= 6);
    run_free(&first);
    f32_block_free(&in);
}

static void check_case(const run_case *t, uint64_t seed)
{
    f32_block in;
    run_result r;
    block_inputs(&t->shape, seed, &in);
    if (CHECK_SAY(run_block(t, &in, &r) == UPIPE_OK, "%s", r.errors[0].text))
        check_block(&t->shape, &in, &r.out);
    run_free(&r);
    f32_block_free(&in);
}

static void test_against_oracle(void)
{
    int dtype, kind;
    for (dtype = 0; dtype < 2; ++dtype) {
        for (kind = 0; kind < 8; ++kind) {
            run_case t = make_case(32, 8, 4, 32, 48, 4, 4, (upipe_dtype)dtype);
            t.shape.batch = 1 + kind % 2;
            t.shape.rope = kind % 3;
            t.shape.normed = kind & 1;
            t.shape.projected = (kind >> 1) & 1;
            t.shape.full = (kind >> 2) & 1;
            t.dx_apart = kind == 5;
            check_case(&t, (uint64_t)(100 + kind));
            t.ranks = 8; /* more ranks than key/value heads */
            t.chunk = 8;
            check_case(&t, (uint64_t)(200 + kind));
            t.ranks = 2;
            t.naive = 1;
            t.chunk = 2;
            check_case(&t, (uint64_t)(300 + kind));
        }
    }
}

/* The oracle's own gradients: central differences of sum(go * o), or of sum(dy * y). Steps are powers of two:
 * sinks, which the oracle's attention takes in f32, are moved by them exactly. */
static void test_finite_differences(void)
{
    static const int64_t cu_seqlens[] = {1, 4, 9, 13};
    int kind;
    for (kind = 0; kind < 9; ++kind) {
        run_case t = make_case(7, 4, 2, 8, 12, 1, 4, UPIPE_F32);
        f32_block in;
        f64_block in64, at, moved;
        int64_t i, results;
        t.shape.batch = 2;
        t.shape.rope = kind % 3;
        t.shape.normed = kind & 1;
        t.shape.projected = kind >= 3 && kind != 6;
        t.shape.full = kind == 4 || kind == 8;
        t.shape.v_dim = kind >= 6 ? 5 : 0;
        t.shape.window = kind == 6 || kind == 8 ? 3 : 0;
        t.shape.cu_seqlens = kind >= 7 ? cu_seqlens : NULL;
        t.shape.cu_seqlens_n = kind >= 7 ? 3 : 0;
        t.shape.softcap = kind >= 7 ? 1.5 : 0;
        t.shape.sinks = kind >= 6;
        t.shape.biased = kind % 2;
        block_inputs(&t.shape, 7, &in);
        f64_block_widen(&t.shape, &in, &in64);
        f64_block_make(&t.shape, &at);
        f64_block_run(&t.shape, &in64, &at);
        results = t.shape.projected ? block_count(&t.shape, "dy") : block_count(&t.shape, "dout");
#define DIFFERENCE(tensor)                                                                                \
    for (i = 0; in64.tensor != NULL && i < block_count(&t.shape, #tensor);                                \
         i += 1 + block_count(&t.shape, #tensor) / 12) {                                                  \
        double kept = in64.tensor[i], h = 0x1p-17, f[2], got;                                             \
        int side;                                                                                         \
        for (side = 0; side < 2; ++side) {                                                                \
            int64_t k;                                                                                    \
            const double *out = t.shape.projected ? moved.y : moved.o,                                    \
                         *g = t.shape.projected ? in64.dy : in64.dout;                                    \
            f64_block_make(&t.shape, &moved);                                                             \
            in64.tensor[i] = kept + (side ? h : -h);                                                      \
            f64_block_run(&t.shape, &in64, &moved);                                                       \
            out = t.shape.projected ? moved.y : moved.o;                                                  \
            for (f[side] = 0, k = 0; k < results; ++k) f[side] += out[k] * g[k];                          \
            f64_block_free(&moved);                                                                       \
        }                                                                                                 \
        in64.tensor[i] = kept;                                                                            \
        got = (f[1] - f[0]) / (2 * h);                                                                    \
        CHECK_SAY(fabs(got - at.tensor[i]) <= 1e-7, "d %s[%d] is %.12g, differences give %.12g", #tensor, \
                  (int)i, at.tensor[i], got);                                                             \
    }
        memset(&moved, 0, sizeof moved);
        DIFFERENCE(x)
        DIFFERENCE(wq)
        DIFFERENCE(wk)
        DIFFERENCE(wv)
        DIFFERENCE(wo)
        DIFFERENCE(q_norm_weight)
        DIFFERENCE(k_norm_weight)
        DIFFERENCE(sinks)
        DIFFERENCE(bq)
        DIFFERENCE(bk)
        DIFFERENCE(bv)
        DIFFERENCE(bo)
#undef DIFFERENCE
        f32_block_free(&in);
        f64_block_free(&in64);
        f64_block_free(&at);
    }
}

typedef struct fail_at {
    long at_alloc, at;
    int sticky;
} fail_at;

static upipe_status fail_guard(void *user, size_t bytes, const char *tag)
{
    fail_at *f = (fail_at *)user;
    (void)bytes;
    (void)tag;
    if (f == NULL) return UPIPE_OK;
    ++f->at_alloc;
    return f->at_alloc == f->at || (f->sticky && f->at_alloc > f->at) ? UPIPE_ERR_MEMORY : UPIPE_OK;
}

/* Out of memory at every allocation, on each rank in turn, once and for good: every rank returns, with a
 * reason. Over a ring those of other teams learn of it too. */
static void test_out_of_memory(int h, int hkv, int ranks, int ring, int naive, upipe_dtype dtype)
{
    run_case t = make_case(8, h, hkv, 32, 16, ranks, ranks, dtype);
    f32_block in;
    int victim, sticky, all = ranks * (ring > 1 ? ring : 1);
    t.naive = naive;
    t.ring = ring;
    t.ring_mode = ring == 2 ? UPIPE_RING_ALL_GATHER : UPIPE_RING_AUTO;
    t.inner = ring == 4 ? 2 : 0;
    t.layout = UPIPE_STRIPED;
    t.shape.normed = 1;
    t.shape.projected = h == 4;
    t.guard = fail_guard;
    t.expect_failure = 1;
    t.deadline = 20;
    block_inputs(&t.shape, 5, &in);
    for (victim = 0; victim < all; ++victim) {
        for (sticky = 0; sticky < 2; ++sticky) {
            long at;
            for (at = 1; at < 1000; ++at) {
                fail_at f = {0, at, sticky};
                run_result r;
                int rank;
                upipe_status s;
                memset(t.guard_user, 0, sizeof t.guard_user);
                t.guard_user[victim] = &f;
                s = run_block(&t, &in, &r);
                for (rank = 0; s != UPIPE_OK && rank < all; ++rank) {
                    CHECK_SAY(r.statuses[rank] == (rank == victim ? UPIPE_ERR_MEMORY : UPIPE_ERR_ABORTED),
                              "allocation %ld fails on rank %d: rank %d gets %s (%s)", at, victim, rank,
                              upipe_status_name(r.statuses[rank]), r.errors[rank].text);
                    if (rank == victim)
                        CHECK_TEXT(r.errors[rank].text, "guard refused");
                    else /* where the host's own allocation failed, the team learns of it without the sentence;
                            the world perhaps from a rank that learnt of it in its ring */
                        CHECK_SAY(strstr(r.errors[rank].text, "guard refused") != NULL ||
                                      strstr(r.errors[rank].text, "failed: out of memory") != NULL ||
                                      (ring > 1 && strstr(r.errors[rank].text, "failed: aborted") != NULL),
                                  "allocation %ld fails on rank %d: rank %d says '%s'", at, victim, rank,
                                  r.errors[rank].text);
                }
                run_free(&r);
                if (s == UPIPE_OK) break;
            }
            CHECK_SAY(at > 40 && at < 1000, "%ld takes", at);
        }
    }
    f32_block_free(&in);
}

typedef struct odd_rank {
    upipe_threads *team;
    const upipe_ops *ops;
    int odd; /* what rank 1 does differently */
    size_t need;
    upipe_err errors[4];
    upipe_status statuses[4];
} odd_rank;

/* What all ranks should run. */
static upipe_plan_desc odd_desc(void)
{
    upipe_plan_desc d;
    memset(&d, 0, sizeof d);
    d.tokens = 16;
    d.ranks = 4;
    d.heads = 16;
    d.kv_heads = 4;
    d.head_dim = 32;
    d.model_dim = 16;
    return d;
}

static upipe_status odd_body(void *user, int rank)
{
    static const int64_t cu_seqlens[2][3] = {{0, 7, 16}, {0, 8, 16}};
    odd_rank *o = (odd_rank *)user;
    upipe_plan_desc d;
    upipe_plan p;
    upipe_layer l;
    upipe_saved save;
    upipe_mem mem;
    upipe_ctx c;
    upipe_mem_block blocks[64];
    char *slab = (char *)malloc(o->need + 512), *aligned = slab + (256 - (uintptr_t)slab % 256);
    size_t bytes;
    int i;
    float *w = f32_buf(16 * 32 * 16);
    upipe_status s;
    memset(&l, 0, sizeof l);
    memset(&c, 0, sizeof c);
    memset(&save, 0, sizeof save);
    d = odd_desc();
    d.rank = rank;
    if (rank == 1 && o->odd == 1) d.kv_heads = 8;
    if (rank == 1 && o->odd == 2) d.chunk = 8;
    if (rank == 1 && o->odd == 3) l.rope_theta = 500000;
    if (o->odd == 4) d.head_dim = 24;
    if (o->odd == 5) d.ranks = 2, d.rank = rank % 2;
    s = upipe_plan_init(&p, &d, &c.err);
    /* rank 1 one byte short in case 7, with a guard behind */
    bytes = o->odd == 7 && rank == 1 ? o->need - 1 : o->need;
    memset(aligned + bytes, 0x5a, 256);
    upipe_mem_init(&mem, aligned, bytes, blocks, 64);
    l.plan = &p;
    l.wq = l.wk = l.wv = w;
    l.mask.causal = 1;
    if (rank == 1 && o->odd == 10) l.mask.window = 5;
    if (o->odd == 11) l.mask.cu_seqlens = rank == 1 ? cu_seqlens[1] : cu_seqlens[0], l.mask.cu_seqlens_n = 2;
    if (rank == 1 && o->odd == 12) l.mask.sinks = w;
    if (rank == 1 && o->odd == 13) l.mask.causal = 0;
    if (o->odd == 6) l.q_norm_weight = w;
    c.ops = o->ops;
    c.mem = &mem;
    c.team = upipe_threads_comm(o->team, rank);
    if (s == UPIPE_OK && !(o->odd == 8 && rank == 1)) {
        upipe_view x = upipe_view_packed(w, UPIPE_F32, o->odd == 9 ? 5 : 4, 1, 16);
        s = upipe_layer_fwd(&c, &l, &save, x);
        if (s == UPIPE_OK) s = upipe_saved_free(&c, &save);
        CHECK_INT(mem.live, 0);
        if (s != UPIPE_OK) CHECK(save.out.data == NULL && save.lse == NULL);
    }
    o->errors[rank] = c.err;
    upipe_mem_destroy(&mem, NULL);
    for (i = 0; i < 256; ++i) CHECK_INT(aligned[bytes + (size_t)i], 0x5a);
    free(w);
    free(slab);
    return s;
}

/* The slab that the good case needs, forward alone. */
static size_t odd_need(const upipe_ops *ops)
{
    upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry);
    upipe_plan_desc d;
    upipe_plan p;
    upipe_layer l;
    upipe_saved save;
    float w[1];
    size_t need;
    memset(&l, 0, sizeof l);
    d = odd_desc();
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    l.plan = &p;
    l.wq = l.wk = l.wv = w;
    l.mask.causal = 1;
    CHECK(upipe_dry_init(dry, &p, ops) == UPIPE_OK);
    CHECK(upipe_layer_fwd(&dry->ctx, &l, &save, upipe_view_packed(w, UPIPE_F32, 4, 1, 16)) == UPIPE_OK);
    need = dry->mem.need;
    free(dry);
    return need;
}

static void test_odd_ranks(void)
{
    static const struct {
        int odd;
        upipe_status status[2]; /* of rank 1, of the others */
        const char *words;
    } cases[] = {
        {0, {UPIPE_OK, UPIPE_OK}, ""},
        {1, {UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH}, "kv_heads is 4 on rank 0 and 8 on rank 1"},
        {2, {UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH}, "chunk is 4 on rank 0 and 8 on rank 1"},
        {3, {UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH}, "rope_theta"},
        {4, {UPIPE_ERR_UNSUPPORTED, UPIPE_ERR_UNSUPPORTED}, "head dim 24"},
        {5, {UPIPE_ERR_ARG, UPIPE_ERR_ARG}, "a plan for 2 ranks on a team of 4"},
        {6, {UPIPE_ERR_ARG, UPIPE_ERR_ARG}, "both norm weights or none"},
        {7, {UPIPE_ERR_MEMORY, UPIPE_ERR_ABORTED}, "do not fit"},
        {8, {UPIPE_OK, UPIPE_ERR_TIMEOUT}, "rank 1"},
        {9, {UPIPE_ERR_ARG, UPIPE_ERR_ARG}, "x is f32 [5][1][16]"},
        {10, {UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH}, "window is 0 on rank 0 and 5 on rank 1"},
        {11, {UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH}, "cu_seqlens (hash)"},
        {12, {UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH}, "sinks is 0 on rank 0 and 1 on rank 1"},
        {13, {UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH}, "causal is 1 on rank 0 and 0 on rank 1"},
    };
    upipe_ops ops;
    size_t i;
    int rank;
    upipe_cpu_ops(&ops);
    for (i = 0; i < sizeof cases / sizeof *cases; ++i) {
        upipe_threads team;
        odd_rank o;
        upipe_err e;
        memset(&o, 0, sizeof o);
        CHECK(upipe_threads_init(&team, 4, cases[i].odd == 8 ? 0.3 : 20, &e) == UPIPE_OK);
        o.team = &team;
        o.ops = &ops;
        o.odd = cases[i].odd;
        o.need = odd_need(&ops);
        upipe_threads_run(&team, odd_body, &o, o.statuses, NULL);
        for (rank = 0; rank < 4; ++rank) {
            upipe_status want = cases[i].status[rank != 1], got = o.statuses[rank];
            /* of several that fail by themselves, the first one's abort may reach the others before their own
             * check */
            int ok = got == want || (want != UPIPE_OK && got == UPIPE_ERR_ABORTED);
            CHECK_SAY(ok, "case %d rank %d: %s (%s), not %s", cases[i].odd, rank, upipe_status_name(got),
                      o.errors[rank].text, upipe_status_name(want));
            if (want != UPIPE_OK) CHECK_TEXT(o.errors[rank].text, cases[i].words);
        }
        upipe_threads_free(&team);
    }
}

/* Calls in the wrong order and tensors of the wrong size, on one rank: each has its sentence, and nothing
 * leaks. */
static void test_misuse(void)
{
    enum { BYTES = 1 << 20 };
    upipe_plan_desc d;
    upipe_plan p, other_plan, ring_plan;
    upipe_layer l, bad;
    upipe_saved save;
    upipe_slots dout, other;
    upipe_grads g;
    upipe_mem mem;
    upipe_mem_block blocks[32];
    upipe_comm team;
    upipe_comm_self_state buf;
    upipe_ops ops;
    upipe_ctx c;
    void *slab = NULL, *data;
    float *w = f32_buf(64 * 64);
    upipe_view x, heads, narrow;
    int i;
    memset(&d, 0, sizeof d);
    memset(&l, 0, sizeof l);
    memset(&c, 0, sizeof c);
    memset(&g, 0, sizeof g);
    if (posix_memalign(&slab, 256, BYTES) != 0) abort();
    upipe_cpu_ops(&ops);
    upipe_mem_init(&mem, slab, BYTES, blocks, 32);
    c.ops = &ops;
    c.mem = &mem;
    c.team = &team;
    d.tokens = 8;
    d.heads = 2;
    d.head_dim = 32;
    d.model_dim = 24;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    d.heads = 4;
    CHECK(upipe_plan_init(&other_plan, &d, NULL) == UPIPE_OK);
    d.ring = 2;
    d.ring_rank = 1;
    CHECK(upipe_plan_init(&ring_plan, &d, NULL) == UPIPE_OK);
    l.plan = &p;
    l.wq = l.wk = l.wv = l.wo = w;
    l.mask.causal = 1;
    CHECK(upipe_mem_alloc(&mem, &data, 8 * 24 * 4, "x", NULL) == UPIPE_OK);
    memset(data, 0, 8 * 24 * 4);
    x = upipe_view_packed(data, UPIPE_F32, 8, 1, 24);
    narrow = upipe_view_packed(w, UPIPE_F32, 8, 1, 24);
    heads = upipe_view_packed(w, UPIPE_F32, 8, 1, 64);
    /* a refusal breaks the team, so each begins with a new one */
#define REFUSED(status, words, call)            \
    do {                                        \
        upipe_comm_self(&team, &buf, ops.copy); \
        CHECK_STATUS(call, status, c.err);      \
        CHECK_TEXT(c.err.text, words);          \
    } while (0)
#define GOOD(call) REFUSED(UPIPE_OK, "", call)
    for (i = 0; i < 10; ++i) {
        static const int64_t cu_seqlens[] = {0, 5, 3};
        const char *words[] = {"norm_eps",
                               "rope_interleaved",
                               "scale inf",
                               "rope theta inf",
                               "norm eps nan",
                               "tile rows -1",
                               "a window of -1",
                               "soft-cap -2",
                               "packed sequence 1 is [5, 3)",
                               "2 packed sequences, cu_seqlens is NULL"};
        bad = l;
        if (i == 0) bad.norm_eps = 1e-5f;
        if (i == 1) bad.rope_interleaved = 1;
        if (i == 2) bad.scale = INFINITY;
        if (i == 3) bad.rope_theta = INFINITY;
        if (i == 4) bad.q_norm_weight = bad.k_norm_weight = w, bad.norm_eps = NAN;
        if (i == 5) bad.tile_rows = -1;
        if (i == 6) bad.mask.window = -1;
        if (i == 7) bad.mask.softcap = -2;
        if (i == 8) bad.mask.cu_seqlens = cu_seqlens;
        if (i >= 8) bad.mask.cu_seqlens_n = 2;
        REFUSED(UPIPE_ERR_ARG, words[i], upipe_layer_fwd(&c, &bad, &save, x));
    }
    bad = l;
    bad.plan = &ring_plan;
    REFUSED(UPIPE_ERR_ARG, "a plan for ring rank 1 of 2 on rank 0 of a ring of 1",
            upipe_layer_fwd(&c, &bad, &save, x));

    GOOD(upipe_layer_fwd(&c, &l, &save, x));
    CHECK_STATUS(upipe_slots_gather(&c, l.plan, narrow, &save.out), UPIPE_ERR_ARG, c.err);
    CHECK_TEXT(c.err.text, "[8][1][64], not [8][1][24]");
    CHECK_STATUS(upipe_slots_scatter(&c, l.plan, &save.out, narrow), UPIPE_ERR_ARG, c.err);
    GOOD(upipe_slots_gather(&c, l.plan, heads, &save.out));
    REFUSED(UPIPE_ERR_ARG, "upipe_layer_out_bwd was not called",
            upipe_layer_bwd(&c, &l, x, &g, &save, &save.out, x));
    upipe_slots_init(&other, save.out.data, 8, 2, UPIPE_SLOT_FULL);
    REFUSED(UPIPE_ERR_ARG, "slots of 8 bytes", upipe_layer_bwd(&c, &l, x, &g, &save, &other, x));
    GOOD(upipe_slots_alloc(&c, l.plan, &dout, UPIPE_SLOT_EMPTY, "dout"));
    REFUSED(UPIPE_ERR_ARG, "slot 0 of dout is not full", upipe_layer_bwd(&c, &l, x, &g, &save, &dout, x));
    CHECK(upipe_mem_free(&mem, dout.data, NULL) == UPIPE_OK);
    bad = l;
    bad.plan = &other_plan;
    REFUSED(UPIPE_ERR_ARG, "the plan says 4", upipe_layer_out_fwd(&c, &bad, x, &save));
    g.bo = w;
    REFUSED(UPIPE_ERR_ARG, "a gradient of bo is wanted without it",
            upipe_layer_out_bwd(&c, &l, &g, &save, x));
    g.bo = NULL;
    g.q_norm_weight = w;
    GOOD(upipe_layer_out_bwd(&c, &l, &g, &save, x));
    REFUSED(UPIPE_ERR_ARG, "consumed already", upipe_layer_out_bwd(&c, &l, &g, &save, x));
    CHECK(save.delta != NULL);
    REFUSED(UPIPE_ERR_ARG, "consumed already", upipe_layer_out_fwd(&c, &l, x, &save));
    REFUSED(UPIPE_ERR_ARG, "without a QK norm", upipe_layer_bwd(&c, &l, x, &g, &save, &save.out, x));
    g.q_norm_weight = NULL;
    g.sinks = w;
    REFUSED(UPIPE_ERR_ARG, "without sinks", upipe_layer_bwd(&c, &l, x, &g, &save, &save.out, x));
    g.sinks = NULL;
    g.bk = w;
    REFUSED(UPIPE_ERR_ARG, "a gradient of bk is wanted", upipe_layer_bwd(&c, &l, x, &g, &save, &save.out, x));
    g.bk = NULL;
    GOOD(upipe_layer_bwd(&c, &l, x, &g, &save, &save.out, x));
    REFUSED(UPIPE_ERR_ARG, "not there", upipe_layer_bwd(&c, &l, x, &g, &save, &save.out, x));
    REFUSED(UPIPE_ERR_ARG, "consumed already", upipe_layer_out_fwd(&c, &l, x, &save));
    GOOD(upipe_saved_free(&c, &save));
    CHECK_INT(mem.live, 8 * 24 * 4);
#undef REFUSED
#undef GOOD
    CHECK(upipe_mem_free(&mem, data, NULL) == UPIPE_OK);
    CHECK(upipe_mem_destroy(&mem, NULL) == UPIPE_OK);
    free(w);
    free(slab);
}

/* What a context, or a backward, lacks is said in a sentence. */
static void test_missing(void)
{
    static const char *const words[] = {"ctx->ops is NULL", "ctx->mem is NULL", "ctx->team is NULL"};
    upipe_plan_desc desc;
    upipe_plan plan;
    upipe_layer l;
    upipe_ops ops;
    upipe_comm team;
    upipe_comm_self_state state;
    upipe_mem mem;
    upipe_mem_block blocks[64];
    upipe_ctx whole, c;
    upipe_saved save;
    upipe_grads g;
    float *w = (float *)calloc(64 * 64, sizeof *w), *x_data = (float *)calloc(8 * 64, sizeof *x_data);
    void *slab = aligned_alloc(64, 1 << 20);
    upipe_view x = upipe_view_packed(x_data, UPIPE_F32, 8, 1, 64);
    int i;
    memset(&desc, 0, sizeof desc);
    memset(&l, 0, sizeof l);
    memset(&whole, 0, sizeof whole);
    memset(&save, 0, sizeof save);
    memset(&g, 0, sizeof g);
    desc.tokens = 8, desc.heads = 2, desc.head_dim = 32;
    CHECK(upipe_plan_init(&plan, &desc, NULL) == UPIPE_OK);
    upipe_cpu_ops(&ops);
    upipe_comm_self(&team, &state, ops.copy);
    upipe_mem_init(&mem, slab, 1 << 20, blocks, 64);
    l.plan = &plan;
    l.wq = l.wk = l.wv = l.wo = w;
    whole.ops = &ops;
    whole.mem = &mem;
    whole.team = &team;
#define MISSING(call)                             \
    do {                                          \
        CHECK_STATUS(call, UPIPE_ERR_ARG, c.err); \
        CHECK_TEXT(c.err.text, words[i]);         \
        memset(&c.err, 0, sizeof c.err);          \
    } while (0)
    for (i = 0; i < 3; ++i) {
        c = whole;
        if (i == 0) c.ops = NULL;
        if (i == 1) c.mem = NULL;
        if (i == 2) c.team = NULL;
        MISSING(upipe_layer_fwd(&c, &l, &save, x));
        MISSING(upipe_layer_bwd(&c, &l, x, &g, &save, &save.out, x));
        MISSING(upipe_layer_out_fwd(&c, &l, x, &save));
        MISSING(upipe_layer_out_bwd(&c, &l, &g, &save, x));
        MISSING(upipe_reduce_scatter(&c, w, 64));
        MISSING(upipe_all_gather(&c, w, 64, 4));
        MISSING(upipe_all_reduce(&c, w, 64));
        if (i == 2) MISSING(upipe_a2a_to_heads(&c, w, x_data, &plan, 0, UPIPE_A2A_Q, 4));
        if (i == 2) MISSING(upipe_a2a_to_tokens(&c, w, x_data, &plan, 0, UPIPE_A2A_Q, 4));
    }
#undef MISSING
    c = whole;
    CHECK_STATUS(upipe_layer_fwd(&c, &l, &save, x), UPIPE_OK, c.err);
    CHECK_STATUS(upipe_layer_bwd(&c, &l, x, &g, &save, NULL, x), UPIPE_ERR_ARG, c.err);
    CHECK_TEXT(c.err.text, "dout is NULL");
    CHECK_STATUS(upipe_saved_free(&c, &save), UPIPE_OK, c.err);
    CHECK(upipe_mem_destroy(&mem, NULL) == UPIPE_OK);
    free(w);
    free(x_data);
    free(slab);
}

/* Gradients of weights in bf16: a rank's own are its f32 ones, rounded once; with the bytes of the dry run. */
static void test_narrow_grads(upipe_dtype dtype, int ranks, int chunk)
{
    run_case t;
    run_result wide, narrow;
    f32_block in;
    int64_t i;
    memset(&t, 0, sizeof t);
    t.shape.tokens = 24, t.shape.batch = 1, t.shape.dim = 40, t.shape.h = 4, t.shape.hkv = 2, t.shape.d = 32;
    t.shape.scale = 0.125, t.shape.projected = t.shape.biased = 1, t.shape.dtype = dtype;
    t.ranks = ranks, t.chunk = chunk;
    block_inputs(&t.shape, 7, &in);
    CHECK_STATUS(run_block(&t, &in, &wide), UPIPE_OK, wide.errors[0]);
    t.grad_dtype = UPIPE_BF16;
    CHECK_STATUS(run_block(&t, &in, &narrow), UPIPE_OK, narrow.errors[0]);
#define NARROW(tensor)                                                          \
    for (i = 0; i < block_count(&t.shape, #tensor); ++i) {                      \
        float full = wide.out.tensor[i], got = narrow.out.tensor[i];            \
        CHECK_SAY(ranks > 1 ? fabsf(got - full) <= 0.02f * (fabsf(full) + 1)    \
                            : got == naive_store(UPIPE_BF16, full),             \
                  #tensor " %g in bf16, %g in f32", (double)got, (double)full); \
    }
    NARROW(wq)
    NARROW(wk)
    NARROW(wv)
    NARROW(wo)
#undef NARROW
    CHECK_BYTES(narrow.out.x, wide.out.x, (size_t)block_count(&t.shape, "x") * 4);
    CHECK_BYTES(narrow.out.bq, wide.out.bq, (size_t)block_count(&t.shape, "bq") * 4);
    CHECK_BYTES(narrow.out.bo, wide.out.bo, (size_t)block_count(&t.shape, "bo") * 4);
    run_free(&wide);
    run_free(&narrow);
    f32_block_free(&in);
}

int main(void)
{
    test_misuse();
    test_missing();
    test_finite_differences();
    test_bits(16, 4, 0, 0, 0);
    test_bits(8, 8, 1, 0, 1);
    test_bits(8, 2, 2, 1, 1);
    test_bits(8, 1, 1, 1, 0);
    test_bits(9, 3, 1, 1, 1);
    test_bits(14, 2, 2, 0, 0);
    test_against_oracle();
    test_out_of_memory(8, 4, 2, 0, 0, UPIPE_BF16);
    test_out_of_memory(4, 1, 2, 0, 0, UPIPE_F32);
    test_out_of_memory(8, 4, 2, 0, 1, UPIPE_BF16);
    test_out_of_memory(5, 5, 2, 0, 0, UPIPE_BF16);
    test_out_of_memory(8, 2, 2, 2, 0, UPIPE_F32);
    test_out_of_memory(2, 1, 1, 4, 0, UPIPE_BF16);
    test_odd_ranks();
    test_narrow_grads(UPIPE_F32, 1, 1);
    test_narrow_grads(UPIPE_BF16, 1, 2);
    test_narrow_grads(UPIPE_BF16, 2, 2);
    return test_end("layer");
}
