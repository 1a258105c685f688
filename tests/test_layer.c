/* test_layer -- the attention block on thread ranks: against f64, the same bits over C and U, every allocation that
 * fails, failures on every rank */
#include "lib/block_checks.h"
#include "lib/reads_o.h"

static void test_bits(int h, int hkv, int rope, int normed, int projected)
{
    run_case t = run_of(47, h, hkv, 32, 40, 1, h, UPIPE_F32);
    t.shape.batch = 2;
    t.shape.rope = rope;
    t.shape.normed = normed;
    t.shape.projected = projected;
    t.tile_rows = 7;
    check_chunks(&t);
}

static void test_against_oracle(void)
{
    run_result r;
    for (int dtype = 0; dtype < 2; ++dtype) {
        for (int kind = 0; kind < 8; ++kind) {
            run_case t = run_of(32, 8, 4, 32, 48, 4, 4, (upipe_dtype)dtype);
            t.shape.batch = 1 + kind % 2;
            t.shape.rope = kind % 3;
            t.shape.normed = kind & 1;
            t.shape.projected = (kind >> 1) & 1;
            t.shape.full = (kind >> 2) & 1;
            t.dx_apart = kind == 5;
            if (kind > 3) block_rope_own(&t.shape, kind == 5 ? 20 : 0);
            if (kind == 6) t.shape.v_dim = 40;
            check_case(&t, (uint64_t)(100 + kind), &r);
            t.ranks = 8; /* more ranks than key/value heads */
            t.chunk = 8;
            check_case(&t, (uint64_t)(200 + kind), &r);
            t.ranks = 2;
            t.naive = 1;
            t.chunk = 2;
            check_case(&t, (uint64_t)(300 + kind), &r);
        }
    }
}

/* Rates that are theta's, a factor of 1 and all dims: the bits of none of them. */
static void test_rope_defaults(void)
{
    run_case t = run_of(32, 8, 4, 32, 48, 4, 4, UPIPE_F32);
    double rates[16];
    f32_block in;
    run_result theta, own;
    for (int p = 0; p < 16; ++p) rates[p] = pow(t.shape.theta, -2.0 * p / 32);
    t.shape.rope = 1;
    block_inputs(&t.shape, 5, &in);
    CHECK(run_block(&t, &in, &theta) == UPIPE_OK);
    t.shape.rope_rates = rates;
    t.shape.rope_factor = 1;
    t.shape.rope_dims = 32;
    CHECK(run_block(&t, &in, &own) == UPIPE_OK);
    same_bits(&t.shape, &own, &theta, NULL);
}

/* ---- the oracle's own gradients ---- */

/* What they are gradients of: sum(go * o), or sum(dy * y). */
static double objective(const block_shape *s, const f64_block *in)
{
    const int mark = buffers_n;
    const int64_t results = block_count(s, s->projected ? "dy" : "dout");
    f64_block r;
    double sum = 0;
    f64_block_make(s, &r);
    f64_block_run(s, in, &r);
    for (int64_t k = 0; k < results; ++k) sum += s->projected ? r.y[k] * in->dy[k] : r.o[k] * in->dout[k];
    buffers_free(mark);
    return sum;
}

/* Central differences. Steps are powers of two: sinks, which the oracle's attention takes in f32, are moved by them
 * exactly. */
static void check_differences(const block_shape *s, uint64_t seed)
{
    f32_block in;
    f64_block in64, at;
    block_inputs(s, seed, &in);
    f64_block_widen(s, &in, &in64);
    f64_block_make(s, &at);
    f64_block_run(s, &in64, &at);
#define DIFFERENCE(tensor)                                                                                \
    for (int64_t n = block_count(s, #tensor), i = 0; i < n; i += 1 + n / 12) {                            \
        const double kept = in64.tensor[i], h = 0x1p-17;                                                  \
        double f[2], got;                                                                                 \
        in64.tensor[i] = kept - h;                                                                        \
        f[0] = objective(s, &in64);                                                                       \
        in64.tensor[i] = kept + h;                                                                        \
        f[1] = objective(s, &in64);                                                                       \
        in64.tensor[i] = kept;                                                                            \
        got = (f[1] - f[0]) / (2 * h);                                                                    \
        CHECK_SAY(fabs(got - at.tensor[i]) <= 1e-7, "d %s[%d] is %.12g, differences give %.12g", #tensor, \
                  (int)i, at.tensor[i], got);                                                             \
    }
    if (s->bare) DIFFERENCE(q)
    DIFFERENCE(k)
    DIFFERENCE(v)
    DIFFERENCE(c)
    DIFFERENCE(kr)
    DIFFERENCE(x)
    BLOCK_WEIGHTS(DIFFERENCE)
#undef DIFFERENCE
}

static void test_finite_differences(void)
{
    static const int64_t cu_seqlens[] = {1, 4, 9, 13};
    for (int kind = 0; kind < 10; ++kind) {
        run_case t = run_of(7, 4, 2, 8, 12, 1, 4, UPIPE_F32);
        t.shape.batch = 2;
        t.shape.bare = kind == 9;
        t.shape.rope = t.shape.bare ? 0 : kind % 3;
        t.shape.normed = kind & 1 && !t.shape.bare;
        t.shape.projected = kind >= 3 && kind != 6 && !t.shape.bare;
        t.shape.full = kind == 4 || kind == 8;
        t.shape.v_dim = kind >= 6 ? 5 : 0;
        t.shape.window = kind == 6 || kind == 8 ? 3 : 0;
        t.shape.cu_seqlens = kind >= 7 ? cu_seqlens : NULL;
        t.shape.cu_seqlens_n = kind >= 7 ? 3 : 0;
        t.shape.softcap = kind >= 7 ? 1.5 : 0;
        t.shape.sinks = kind >= 6;
        t.shape.biased = kind % 2 && !t.shape.bare;
        if (kind > 3 && !t.shape.bare) block_rope_own(&t.shape, 6);
        check_differences(&t.shape, 7);
    }
    for (int kind = 0; kind < 4; ++kind) {
        run_case t = run_of(7, 4, kind == 3 ? 4 : 2, 8, 12, 1, 4, UPIPE_F32);
        t.shape.projected = t.shape.gated = 1;
        t.shape.scale = 0.3;
        t.shape.batch = 1 + kind % 2;
        t.shape.rope = kind % 3;
        t.shape.normed = t.shape.biased = kind & 1;
        t.shape.v_dim = kind >= 2 ? 5 : 0;
        t.shape.sinks = kind == 2;
        check_differences(&t.shape, (uint64_t)(7 + kind));
    }
    for (int kind = 0; kind < 6; ++kind) {
        run_case t = run_of(7, 3, 3, 8, 12, 1, 3, UPIPE_F32);
        t.shape.latent = 5;
        t.shape.key = kind % 2 ? 4 : 2;
        t.shape.bare = kind < 2;
        t.shape.q_dim = t.shape.bare ? 0 : 9;
        t.shape.rope = t.shape.bare ? 0 : kind % 3;
        t.shape.projected = kind > 3;
        t.shape.v_dim = kind % 2 ? 5 : 0;
        t.shape.sinks = kind == 1 || kind == 5;
        check_differences(&t.shape, (uint64_t)(7 + kind));
    }
}

/* ---- failures ---- */

static void test_out_of_memory(int h, int hkv, int ranks, int ring, int naive, upipe_dtype dtype)
{
    run_case t = run_of(8, h, hkv, 32, 16, ranks, ranks, dtype);
    t.naive = naive;
    t.ring = ring;
    t.ring_mode = ring == 2 ? UPIPE_RING_ALL_GATHER : UPIPE_RING_AUTO;
    t.inner = ring == 4 ? 2 : 0;
    t.layout = UPIPE_STRIPED;
    t.shape.normed = 1;
    t.shape.projected = h == 4;
    if (h == 4) t.table = table_reads_o;
    check_out_of_memory(&t, 1, 40);
}

/* A backward without memory for one of its blocks leaves a `save` that can be freed, with the delta that it had before, and
 * nothing of its own: layer_bwd of a gradient of O of the host's, out_bwd, and layer_bwd behind it. */
static void test_saved_after_failure(int call, int reads_o)
{
    const upipe_plan_desc d = {
        .tokens = 16, .heads = 4, .kv_heads = 2, .head_dim = 32, .model_dim = 16, .chunk = 2};
    upipe_status s = UPIPE_ERR_MEMORY;
    upipe_ops ops = cpu_table();
    float w[1];
    long at;
    ops.attn_reads_o = reads_o;
    for (at = 1; s == UPIPE_ERR_MEMORY; ++at) {
        upipe_plan p;
        upipe_layer l = {.plan = &p, .wq = w, .wk = w, .wv = w, .wo = w};
        const upipe_grads g = {0};
        const upipe_view x = upipe_view_packed(w, UPIPE_F32, 16, 1, 16);
        fail_alloc fails = {.at = at};
        upipe_slots dout = {0};
        upipe_saved save;
        upipe_dry *dry;
        upipe_ctx *c;
        CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
        dry = dry_begin(&p, &ops, &s);
        c = &dry->ctx;
        CHECK_STATUS(upipe_layer_fwd(c, &l, &save, x), UPIPE_OK, c->err);
        if (call == 0)
            CHECK_STATUS(upipe_slots_alloc(c, &p, &dout, UPIPE_SLOT_FULL, "dout"), UPIPE_OK, c->err);
        if (call == 2) CHECK_STATUS(upipe_layer_out_bwd(c, &l, &g, &save, x), UPIPE_OK, c->err);
        dry->mem.guard = fail_alloc_guard;
        dry->mem.user = &fails;
        s = call == 1 ? upipe_layer_out_bwd(c, &l, &g, &save, x)
                      : upipe_layer_bwd(c, &l, x, &g, &save, call == 0 ? &dout : &save.out, x);
        check_save(dry, s, &save, &dout);
        buffers_free(0);
    }
    CHECK(at > 3);
}

/* What rank 1, or each, does differently. */
enum {
    ODD_NOTHING,
    ODD_KV_HEADS,
    ODD_CHUNK,
    ODD_THETA,
    ODD_TEAM,
    ODD_SLAB,
    ODD_AWAY,
    ODD_WINDOW,
    ODD_CU_SEQLENS,
    ODD_SINKS,
    ODD_CAUSAL,
    ODD_READS_O,
    ODD_RATES,
    ODD_FACTOR,
    ODD_DIMS,
    ODD_NO_RATES
};

static void differ(int odd, run_own *own, upipe_plan_desc *d)
{
    static const int64_t cu_seqlens[2][3] = {{0, 7, 16}, {0, 8, 16}};
    static const double rates[17] = {1, 0.5};
    const int one = own->rank == 1;
    upipe_layer *l = &own->layer;
    if (d != NULL) {
        if (odd == ODD_TEAM) d->ranks = 2, d->rank %= 2;
        if (one && odd == ODD_KV_HEADS) d->kv_heads = 8;
        if (one && odd == ODD_CHUNK) d->chunk = 8;
        return;
    }
    if (odd >= ODD_RATES) l->rope_rates = rates;
    if (odd == ODD_CU_SEQLENS) l->mask.borders.cu_seqlens = cu_seqlens[one], l->mask.borders.cu_seqlens_n = 2;
    if (!one) return;
    if (odd == ODD_THETA) l->rope_theta = 500000;
    if (odd == ODD_SLAB) own->slab_bytes = own->need - 1;
    if (odd == ODD_AWAY) own->away = 1;
    if (odd == ODD_WINDOW) l->mask.window = 5;
    if (odd == ODD_SINKS) l->mask.sinks = own->host;
    if (odd == ODD_CAUSAL) l->mask.causal = 0;
    if (odd == ODD_READS_O) own->ops.attn_reads_o = 1;
    if (odd == ODD_RATES) l->rope_rates = rates + 1;
    if (odd == ODD_FACTOR) l->rope_factor = 1.2;
    if (odd == ODD_DIMS) l->rope_dims = 16;
    if (odd == ODD_NO_RATES) l->rope_rates = NULL;
}

static void test_odd_ranks(void)
{
    static const struct {
        int odd;
        const char *words;
        upipe_status own, others;
    } cases[] = {
        {ODD_NOTHING, "", UPIPE_OK, UPIPE_OK},
        {ODD_KV_HEADS, "kv_heads is 4 on rank 0 and 8 on rank 1", UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH},
        {ODD_CHUNK, "chunk is 4 on rank 0 and 8 on rank 1", UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH},
        {ODD_THETA, "rope_theta", UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH},
        {ODD_TEAM, "a plan for 2 ranks on a team of 4", UPIPE_ERR_ARG, UPIPE_ERR_ARG},
        {ODD_SLAB, "do not fit", UPIPE_ERR_MEMORY, UPIPE_ERR_ABORTED},
        {ODD_AWAY, "rank 1", UPIPE_OK, UPIPE_ERR_TIMEOUT},
        {ODD_WINDOW, "window is 0 on rank 0 and 5 on rank 1", UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH},
        {ODD_CU_SEQLENS, "cu_seqlens (hash)", UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH},
        {ODD_SINKS, "sinks is 0 on rank 0 and 1 on rank 1", UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH},
        {ODD_CAUSAL, "causal is 1 on rank 0 and 0 on rank 1", UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH},
        {ODD_READS_O, "attn_reads_o of the compute table is 0 on rank 0 and 1", UPIPE_ERR_MISMATCH,
         UPIPE_ERR_MISMATCH},
        {ODD_RATES, "rope_rates (hash)", UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH},
        {ODD_FACTOR, "rope_factor is 0 on rank 0 and 1.2 on rank 1", UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH},
        {ODD_DIMS, "rope_dims is 0 on rank 0 and 16 on rank 1", UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH},
        {ODD_NO_RATES, "rope_rates (hash)", UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        run_case t = run_of(16, 16, 4, 32, 16, 4, 0, UPIPE_F32);
        t.differ = differ;
        t.odd = cases[i].odd;
        t.deadline = t.odd == ODD_AWAY ? 0.3 : 20;
        check_differ(&t, 1, cases[i].own, cases[i].others, cases[i].words);
    }
}

static void test_begun(int ranks, int chunk)
{
    run_case t = run_of(24, 4, 2, 32, 40, ranks, chunk, UPIPE_F32);
    t.shape.projected = t.shape.biased = t.shape.normed = t.shape.sinks = 1;
    check_begun(&t, 24 * 4);
}

static upipe_ops counted; /* the table whose products are counted */
static _Atomic long tile_products;

static upipe_status count_gemm(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                               void *work, size_t bytes)
{
    if (out.d == 40 && (flags & UPIPE_GEMM_TRANS_A) == 0) ++tile_products; /* of model dim: y, and dX */
    return counted.gemm(c, out, a, b, flags, work, bytes);
}

static void table_counted(upipe_ops *ops)
{
    counted = *ops;
    ops->gemm = count_gemm;
}

/* A tile of y is one product, and a tile of dX three, whatever the stages and ranks: shorter ones pass the tile's f32 sum
 * through memory each time. */
static void test_tile_products(void)
{
    static const upipe_dtype types[] = {UPIPE_F32, UPIPE_BF16};
    static const int of[][3] = {
        {1, 8, 3}, {1, 2, 3}, {2, 8, 4}, {2, 2, 4}, {3, 3, 3}}; /* ranks, chunk, tiles */
    for (size_t i = 0; i < sizeof of / sizeof *of; ++i) {
        run_case t = run_of(48, 8, 2, 32, 40, of[i][0], of[i][1], types[i % 2]);
        run_result r;
        t.shape.projected = 1;
        t.tile_rows = 16;
        t.table = table_counted;
        tile_products = 0;
        check_case(&t, 3, &r);
        CHECK_INT(tile_products, of[i][2] * (1 + 3));
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_tile_products());
    TEST(test_finite_differences());
    TEST(test_bits(16, 4, 0, 0, 0));
    TEST(test_bits(8, 8, 1, 0, 1));
    TEST(test_bits(8, 2, 2, 1, 1));
    TEST(test_bits(8, 1, 1, 1, 0));
    TEST(test_bits(9, 3, 1, 1, 1));
    TEST(test_bits(14, 2, 2, 0, 0));
    TEST(test_against_oracle());
    TEST(test_rope_defaults());
    TEST(test_out_of_memory(8, 4, 2, 0, 0, UPIPE_BF16));
    TEST(test_out_of_memory(4, 1, 2, 0, 0, UPIPE_F32));
    TEST(test_out_of_memory(8, 4, 2, 0, 1, UPIPE_BF16));
    TEST(test_out_of_memory(5, 5, 2, 0, 0, UPIPE_BF16));
    TEST(test_out_of_memory(8, 2, 2, 2, 0, UPIPE_F32));
    TEST(test_out_of_memory(2, 1, 1, 4, 0, UPIPE_BF16));
    for (int i = 0; i < 6; ++i) TEST(test_saved_after_failure(i % 3, i / 3));
    TEST(test_odd_ranks());
    TEST(test_begun(1, 2));
    TEST(test_begun(2, 2));
    return test_end("layer");
}
