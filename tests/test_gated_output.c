/* test_gated_output -- the gated output projection in a whole block on thread ranks: against f64, the same bits over C, U
 * and tiles, golden states, bytes, failures */
#include "lib/block_checks.h"
#include "lib/golden.h"
#include "lib/reads_o.h"
#include "golden/gated_attention.h"

/* A gated block with its projection. */
static run_case gated_of(int64_t tokens, int h, int hkv, int64_t dim, int ranks, int chunk, upipe_dtype dtype)
{
    run_case t = run_of(tokens, h, hkv, 32, dim, ranks, chunk, dtype);
    t.shape.projected = t.shape.gated = 1;
    return t;
}

/* ---- against the oracle ---- */

static void test_against_oracle(upipe_dtype dtype)
{
    run_result r;
    for (int kind = 0; kind < 6; ++kind) {
        run_case t = gated_of(33, 8, kind == 1 ? 8 : 4, 48, 4, 4, dtype);
        t.shape.batch = 1 + kind % 2;
        t.shape.rope = kind % 3;
        t.shape.normed = kind & 1;
        t.shape.biased = kind == 2 || kind == 5;
        t.dx_apart = kind == 3;
        t.tile_rows = kind == 4 ? 5 : 0;
        if (kind == 2) t.shape.v_dim = 40;
        if (kind == 5) t.table = table_reads_o;
        check_case(&t, (uint64_t)(100 + kind), &r);
        t.ranks = 1;
        t.chunk = kind % 2 ? 8 : 1;
        check_case(&t, (uint64_t)(200 + kind), &r);
        t.ranks = 2; /* stages that overlap, on a thread of their own and on the rank's line */
        t.chunk = 2;
        t.overlap = 1;
        t.side_stream_inline = kind % 2;
        check_case(&t, (uint64_t)(300 + kind), &r);
        t.overlap = 0;
        t.ring = 2;
        t.layout = kind % 2 ? UPIPE_ZIGZAG : UPIPE_STRIPED;
        check_case(&t, (uint64_t)(400 + kind), &r);
        if (kind == 5) continue;
        t = gated_of(33, 9, 3, 40, 2, 2, dtype); /* heads that do not divide, and the naive order */
        t.naive = kind == 1;
        if (t.naive) t.shape.h = 8, t.shape.hkv = 4;
        check_case(&t, (uint64_t)(500 + kind), &r);
    }
}

/* transformers' block, whose norms multiply by 1 + w. */
static void test_golden(void)
{
    static const int ranks[][2] = {{1, 4}, {1, 1}, {2, 2}, {4, 4}, {3, 3}};
    for (int i = 0; i < 5; ++i) {
        run_case t = gated_of(GOLDEN_TOKENS, GOLDEN_HEADS, GOLDEN_KV_HEADS, GOLDEN_MODEL, ranks[i][0],
                              ranks[i][1], UPIPE_F32);
        f32_block in;
        run_result r;
        int row = 0;
        t.shape.d = GOLDEN_DIM;
        t.shape.rope = t.shape.normed = 1;
        t.shape.rope_dims = GOLDEN_ROPE_DIMS;
        t.shape.theta = golden_theta;
        t.shape.eps = golden_eps;
        block_inputs(&t.shape, 1, &in);
#define DRAWN(tensor, mean, scale) \
    golden_draw(in.tensor, block_count(&t.shape, #tensor), #tensor, mean, scale);
        DRAWN(x, 0, 1)
        DRAWN(dy, 0, 1)
        DRAWN(wq, 0, 0.25)
        DRAWN(wk, 0, 0.25)
        DRAWN(wv, 0, 0.25)
        DRAWN(wo, 0, 0.25)
        DRAWN(wg, 0, 0.25)
        DRAWN(q_norm_weight, 1, 0.25)
        DRAWN(k_norm_weight, 1, 0.25)
#undef DRAWN
        CHECK_STATUS(run_block(&t, &in, &r), UPIPE_OK, r.errors[0]);
#define GOLDEN(tensor)                                  \
    CHECK(strcmp(golden_rows[row].name, #tensor) == 0); \
    check_golden(&golden_rows[row++], r.out.tensor, block_count(&t.shape, #tensor));
        GOLDEN(x)
        GOLDEN(wq)
        GOLDEN(wk)
        GOLDEN(wv)
        GOLDEN(wo)
        GOLDEN(wg)
        GOLDEN(q_norm_weight)
        GOLDEN(k_norm_weight)
        GOLDEN(y)
#undef GOLDEN
        CHECK_INT(row, sizeof golden_rows / sizeof *golden_rows);
    }
}

/* ---- bits ---- */

static void test_bits(int h, int hkv, upipe_dtype dtype)
{
    run_case t = gated_of(47, h, hkv, 40, 1, h, dtype);
    t.shape.batch = 2;
    t.shape.rope = t.shape.biased = 1;
    t.tile_rows = 7;
    check_chunks(&t);
}

/* Tiles of any number of rows. */
static void test_tiles(upipe_dtype dtype)
{
    static const int64_t rows_of[] = {1, 63, 64, 65, 130, 1000};
    run_case t = gated_of(75, 4, 2, 24, 1, 1, dtype);
    run_result first, r;
    f32_block in;
    t.shape.batch = 2;
    t.shape.biased = 1;
    block_inputs(&t.shape, 3, &in);
    CHECK_STATUS(run_block(&t, &in, &first), UPIPE_OK, first.errors[0]);
    for (int i = 0; i < 6; ++i) {
        t.tile_rows = rows_of[i];
        CHECK_STATUS(run_block(&t, &in, &r), UPIPE_OK, r.errors[0]);
        same_bits(&t.shape, &r, &first, NULL);
    }
}

/* A gate of 1 is none: the bits of the plain projection, forward and backward. */
static void test_open(upipe_dtype dtype, int ranks, void (*table)(upipe_ops *ops))
{
    run_case t = gated_of(70, 4, 2, 24, ranks, ranks, dtype);
    run_result plain, r;
    f32_block in;
    t.shape.biased = t.shape.rope = 1;
    t.tile_rows = 64;
    t.table = table;
    block_inputs(&t.shape, 8, &in);
    for (int64_t i = 0; i < t.shape.tokens; ++i) in.x[i * t.shape.dim] = 1;
    for (int64_t i = 0; i < block_count(&t.shape, "wg"); ++i) in.wg[i] = i % t.shape.dim == 0 ? 100 : 0;
    CHECK_STATUS(run_block(&t, &in, &r), UPIPE_OK, r.errors[0]);
    for (int64_t i = 0; i < block_count(&t.shape, "wg"); ++i) CHECK(r.out.wg[i] == 0);
    t.shape.gated = 0;
    CHECK_STATUS(run_block(&t, &in, &plain), UPIPE_OK, plain.errors[0]);
    same_bits(&t.shape, &r, &plain, NULL);
}

static void test_begun(void)
{
    run_case t = gated_of(150, 4, 2, 24, 1, 2, UPIPE_F32);
    t.tile_rows = 64;
    check_begun(&t, 150);
}

/* ---- one rank, call by call: bytes, views over each other ---- */

enum { TOKENS = 150, HEADS = 4, DIM = 32, MODEL = 24, WIDE = HEADS * DIM, UNIT = TOKENS * MODEL };

typedef struct alone {
    upipe_plan plan;
    upipe_layer l;
    upipe_ops ops;
    upipe_mem mem;
    upipe_comm team;
    upipe_comm_self_state state;
    upipe_ctx c;
    upipe_saved save;
    upipe_grads g;
    upipe_view x, y, dx;
} alone;

/* n numbers of the storage type, each time the same. */
static void *numbers(upipe_dtype dtype, int64_t n, double size, uint64_t seed)
{
    test_rng r = {seed};
    void *p = zeroed((size_t)n * upipe_dtype_bytes(dtype));
    for (int64_t i = 0; i < n; ++i) upipe_cpu_put(p, dtype, i, (float)(size * test_normal(&r)));
    return p;
}

static void alone_begin(alone *a, upipe_dtype dtype, int chunk, int reads_o, int64_t tile_rows)
{
    const upipe_plan_desc d = {.tokens = TOKENS,
                               .heads = HEADS,
                               .kv_heads = 2,
                               .head_dim = DIM,
                               .model_dim = MODEL,
                               .chunk = chunk,
                               .dtype = dtype};
    memset(a, 0, sizeof *a);
    CHECK(upipe_plan_init(&a->plan, &d, NULL) == UPIPE_OK);
    a->ops = cpu_table();
    if (reads_o) table_reads_o(&a->ops);
    a->l.plan = &a->plan;
    a->l.wq = numbers(dtype, WIDE * MODEL, 0.2, 1);
    a->l.wk = numbers(dtype, WIDE / 2 * MODEL, 0.2, 2);
    a->l.wv = numbers(dtype, WIDE / 2 * MODEL, 0.2, 3);
    a->l.wo = numbers(dtype, MODEL * WIDE, 0.1, 4);
    a->l.bo = (const float *)numbers(UPIPE_F32, MODEL, 1, 5);
    a->l.tile_rows = tile_rows;
    a->l.mask.causal = 1;
    a->l.wg = numbers(dtype, WIDE * MODEL, 0.4, 6);
    a->g.wg = (float *)numbers(UPIPE_F32, WIDE * MODEL, 0, 0);
    a->g.wo = (float *)numbers(UPIPE_F32, WIDE * MODEL, 0, 0);
    a->g.bo = (float *)numbers(UPIPE_F32, MODEL, 0, 0);
    a->x = upipe_view_packed(numbers(dtype, UNIT, 1, 7), dtype, TOKENS, 1, MODEL);
    a->y = a->dx = a->x;
    a->y.data = numbers(dtype, UNIT, 1, 8);
    a->dx.data = numbers(dtype, UNIT, 1, 9);
    upipe_comm_self(&a->team, &a->state, a->ops.copy);
    a->c.team = &a->team;
    context_pool(&a->c, &a->mem, &a->ops, 4 << 20, 32);
    CHECK_STATUS(upipe_layer_fwd(&a->c, &a->l, &a->save, a->x), UPIPE_OK, a->c.err);
}

static void alone_end(alone *a)
{
    CHECK_STATUS(upipe_saved_free(&a->c, &a->save), UPIPE_OK, a->c.err);
    CHECK_INT(a->mem.live, 0);
    CHECK(upipe_mem_destroy(&a->mem, NULL) == UPIPE_OK);
}

/* What a call takes at its peak, and what it leaves, beyond what was there. */
typedef struct held {
    size_t peak, left, need;
} held;

static void held_begin(upipe_mem *m, held *t)
{
    t->left = m->live;
    m->peak = m->live;
}

static void held_end(const upipe_mem *m, held *t)
{
    t->peak = m->peak - t->left;
    t->left = m->live - t->left;
    t->need = m->need;
}

static void both_calls(upipe_ctx *c, alone *a, upipe_saved *save, held t[2])
{
    held_begin(c->mem, &t[0]);
    CHECK_STATUS(upipe_layer_gated_out_fwd(c, &a->l, a->y, save, a->x), UPIPE_OK, c->err);
    held_end(c->mem, &t[0]);
    held_begin(c->mem, &t[1]);
    CHECK_STATUS(upipe_layer_gated_out_bwd(c, &a->l, &a->g, save, a->dx, a->y, a->x), UPIPE_OK, c->err);
    held_end(c->mem, &t[1]);
}

/* The bytes of the dry run are those of the run, and those that the header names. */
static void test_bytes(upipe_dtype dtype, int chunk, int reads_o)
{
    static const int64_t rows_of[] = {0, 16, 64, 70};
    for (int i = 0; i < 4; ++i) {
        const int64_t rows = rows_of[i] > 0 ? rows_of[i] : TOKENS, up = rows <= 64    ? 64
                                                                        : rows <= 128 ? 128
                                                                                      : TOKENS;
        const size_t e = upipe_dtype_bytes(dtype), wide = dtype == UPIPE_F32 ? 0 : 4;
        const upipe_view none = {0};
        held dry_held[2], run_held[2];
        upipe_saved save;
        upipe_dry *dry;
        upipe_status s;
        size_t work[2] = {0, 0}, keep;
        alone a;
        alone_begin(&a, dtype, chunk, reads_o, rows_of[i]);
        dry = dry_begin(&a.plan, &a.ops, &s);
        CHECK_STATUS(s, UPIPE_OK, dry->ctx.err);
        CHECK_STATUS(upipe_layer_fwd(&dry->ctx, &a.l, &save, a.x), UPIPE_OK, dry->ctx.err);
        both_calls(&dry->ctx, &a, &save, dry_held);
        both_calls(&a.c, &a, &a.save, run_held);
        for (int k = 0; k < 2; ++k) {
            CHECK_INT(run_held[k].peak, dry_held[k].peak);
            CHECK_INT(run_held[k].left, dry_held[k].left);
            CHECK_INT(run_held[k].need, dry_held[k].need);
        }
        for (int k = 0; k < 2; ++k) { /* the greatest scratch of a product, as the table says it */
            const int64_t n = k ? up : rows;
            const upipe_view x = upipe_view_packed(NULL, dtype, n, 1, MODEL),
                             z = upipe_view_packed(NULL, dtype, n, 1, WIDE),
                             wg = upipe_view_packed(NULL, dtype, WIDE, 1, MODEL),
                             wo = upipe_view_packed(NULL, dtype, MODEL, 1, WIDE),
                             sum = upipe_view_packed(NULL, UPIPE_F32, n, 1, MODEL);
            const upipe_view products[5][3] = {
                {z, x, wg},
                {sum, upipe_view_heads(z, HEADS), k ? none : upipe_view_heads(wo, HEADS)},
                {z, x, wo},
                {upipe_view_packed(NULL, UPIPE_F32, MODEL, 1, WIDE), x, z},
                {upipe_view_packed(NULL, UPIPE_F32, WIDE, 1, MODEL), z, x}};
            static const int flags[5] = {UPIPE_GEMM_TRANS_B, UPIPE_GEMM_TRANS_B, 0,
                                         UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE,
                                         UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE};
            for (int j = 0; j < (k ? 5 : 2); ++j) {
                upipe_view b = products[j][2];
                size_t bytes;
                if (k && j == 1) {
                    b = upipe_view_packed(NULL, dtype, DIM, 1, MODEL);
                    b.h = HEADS;
                    b.h_stride = DIM * MODEL;
                }
                bytes =
                    a.ops.gemm_bytes(&a.ops, products[j][0], products[j][1], b, k && j == 1 ? 0 : flags[j]);
                if (bytes > work[k]) work[k] = bytes;
            }
        }
        CHECK_INT(run_held[0].peak, (size_t)rows * (WIDE * e + MODEL * wide) + work[0]);
        CHECK_INT(run_held[0].left, 0);
        keep = (size_t)TOKENS * HEADS * 4 + (reads_o ? (size_t)TOKENS * WIDE * e : 0);
        CHECK_INT(run_held[1].left, keep);
        CHECK_INT(run_held[1].peak,
                  keep + (size_t)up * ((2 * WIDE + (reads_o ? 0 : (size_t)chunk * DIM)) * e + MODEL * wide) +
                      work[1]);
        alone_end(&a);
    }
}

/* y over x, and dx beside dy, over it, or over x, have the same bits. */
static void test_over(upipe_dtype dtype)
{
    const size_t bytes = UNIT * upipe_dtype_bytes(dtype);
    void *y = NULL, *dx = NULL, *wo = NULL, *wg = NULL;
    for (int kind = 0; kind < 3; ++kind) {
        upipe_view y_at, dx_at;
        alone a;
        alone_begin(&a, dtype, 2, 0, 40);
        y_at = kind == 2 ? a.x : a.y;
        dx_at = kind == 0 ? a.dx : kind == 1 ? a.y : a.x;
        CHECK_STATUS(upipe_layer_gated_out_fwd(&a.c, &a.l, y_at, &a.save, a.x), UPIPE_OK, a.c.err);
        if (kind == 0) y = memcpy(zeroed(bytes), a.y.data, bytes);
        CHECK_BYTES(y_at.data, y, bytes);
        memcpy(a.x.data, numbers(dtype, UNIT, 1, 7), bytes);
        memcpy(a.y.data, numbers(dtype, UNIT, 1, 8), bytes);
        CHECK_STATUS(upipe_layer_gated_out_bwd(&a.c, &a.l, &a.g, &a.save, dx_at, a.y, a.x), UPIPE_OK,
                     a.c.err);
        if (kind == 0) {
            dx = memcpy(zeroed(bytes), dx_at.data, bytes);
            wo = a.g.wo, wg = a.g.wg;
        }
        CHECK_BYTES(dx_at.data, dx, bytes);
        CHECK_BYTES(a.g.wo, wo, WIDE * MODEL * 4);
        CHECK_BYTES(a.g.wg, wg, WIDE * MODEL * 4);
        alone_end(&a);
    }
}

/* The same rows with gaps between them. */
static upipe_view with_gaps(alone *a, upipe_view x)
{
    upipe_view v = x;
    v.n_stride += 9;
    v.data = zeroed((size_t)(v.n * v.n_stride) * upipe_dtype_bytes(v.dtype));
    CHECK_STATUS(a->ops.cast(&a->c, v, x), UPIPE_OK, a->c.err);
    return v;
}

/* Views of other strides have the same bits, and gaps stay. */
static void test_gaps(upipe_dtype dtype)
{
    const size_t bytes = UNIT * upipe_dtype_bytes(dtype);
    upipe_view y, dx, x, dy, packed;
    alone a, b;
    alone_begin(&a, dtype, 2, 0, 40);
    alone_begin(&b, dtype, 2, 0, 40);
    x = with_gaps(&b, b.x);
    dy = with_gaps(&b, b.y);
    y = with_gaps(&b, b.x);
    dx = with_gaps(&b, b.x);
    packed = b.dx;
    CHECK_STATUS(upipe_layer_gated_out_bwd(&a.c, &a.l, &a.g, &a.save, a.dx, a.y, a.x), UPIPE_OK, a.c.err);
    CHECK_STATUS(upipe_layer_gated_out_fwd(&b.c, &b.l, y, &b.save, x), UPIPE_OK, b.c.err);
    CHECK_STATUS(upipe_layer_gated_out_bwd(&b.c, &b.l, &b.g, &b.save, dx, dy, x), UPIPE_OK, b.c.err);
    CHECK_STATUS(b.ops.cast(&b.c, packed, dx), UPIPE_OK, b.c.err);
    CHECK_BYTES(packed.data, a.dx.data, bytes);
    CHECK_BYTES(b.g.wo, a.g.wo, WIDE * MODEL * 4);
    CHECK_BYTES(b.g.wg, a.g.wg, WIDE * MODEL * 4);
    CHECK_BYTES(b.g.bo, a.g.bo, MODEL * 4);
    CHECK_STATUS(upipe_saved_free(&a.c, &a.save), UPIPE_OK, a.c.err);
    CHECK_STATUS(upipe_layer_fwd(&a.c, &a.l, &a.save, a.x), UPIPE_OK, a.c.err);
    CHECK_STATUS(upipe_layer_gated_out_fwd(&a.c, &a.l, a.y, &a.save, a.x), UPIPE_OK, a.c.err);
    CHECK_STATUS(b.ops.cast(&b.c, packed, y), UPIPE_OK, b.c.err);
    CHECK_BYTES(packed.data, a.y.data, bytes);
    for (int64_t i = 0; i < TOKENS; ++i)
        for (int64_t j = MODEL; j < MODEL + 9; ++j)
            CHECK(upipe_cpu_get(y.data, dtype, i * y.n_stride + j) == 0 &&
                  upipe_cpu_get(dx.data, dtype, i * dx.n_stride + j) == 0);
    alone_end(&a);
    alone_end(&b);
}

/* Gradients that are not wanted change nothing in the others. */
static void test_not_wanted(void)
{
    const size_t bytes = UNIT * 4;
    alone all;
    void *slots;
    alone_begin(&all, UPIPE_F32, 2, 0, 0);
    CHECK_STATUS(upipe_layer_gated_out_bwd(&all.c, &all.l, &all.g, &all.save, all.dx, all.y, all.x), UPIPE_OK,
                 all.c.err);
    slots = memcpy(zeroed(TOKENS * WIDE * 4), all.save.out.data, TOKENS * WIDE * 4);
    for (int kind = 0; kind < 3; ++kind) {
        alone a;
        alone_begin(&a, UPIPE_F32, 2, 0, 0);
        if (kind != 1) a.g.wo = NULL;
        if (kind != 0) a.g.wg = NULL;
        if (kind == 2) a.g.bo = NULL;
        CHECK_STATUS(upipe_layer_gated_out_bwd(&a.c, &a.l, &a.g, &a.save, a.dx, a.y, a.x), UPIPE_OK, a.c.err);
        CHECK_BYTES(a.dx.data, all.dx.data, bytes);
        CHECK_BYTES(a.save.out.data, slots, TOKENS * WIDE * 4);
        CHECK_BYTES(a.save.delta, all.save.delta, TOKENS * HEADS * 4);
        if (a.g.wo != NULL) CHECK_BYTES(a.g.wo, all.g.wo, WIDE * MODEL * 4);
        if (a.g.wg != NULL) CHECK_BYTES(a.g.wg, all.g.wg, WIDE * MODEL * 4);
        alone_end(&a);
    }
    alone_end(&all);
}

static void test_out_of_memory(int h, int hkv, int ranks, int reads_o, upipe_dtype dtype)
{
    run_case t = gated_of(8, h, hkv, 16, ranks, ranks, dtype);
    if (reads_o) t.table = table_reads_o;
    check_out_of_memory(&t, 1, 40);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_bytes(UPIPE_F32, 1, 0));
    TEST(test_bytes(UPIPE_BF16, 2, 0));
    TEST(test_bytes(UPIPE_BF16, 4, 0));
    TEST(test_bytes(UPIPE_BF16, 2, 1));
    TEST(test_over(UPIPE_F32));
    TEST(test_over(UPIPE_BF16));
    TEST(test_gaps(UPIPE_F32));
    TEST(test_gaps(UPIPE_BF16));
    TEST(test_not_wanted());
    TEST(test_tiles(UPIPE_F32));
    TEST(test_tiles(UPIPE_BF16));
    TEST(test_open(UPIPE_F32, 1, NULL));
    TEST(test_open(UPIPE_BF16, 2, NULL));
    TEST(test_open(UPIPE_BF16, 2, table_reads_o));
    TEST(test_begun());
    TEST(test_against_oracle(UPIPE_F32));
    TEST(test_against_oracle(UPIPE_BF16));
    TEST(test_golden());
    TEST(test_bits(8, 2, UPIPE_F32));
    TEST(test_bits(9, 3, UPIPE_BF16));
    TEST(test_bits(14, 2, UPIPE_F32));
    TEST(test_out_of_memory(8, 4, 2, 0, UPIPE_BF16));
    TEST(test_out_of_memory(4, 1, 2, 1, UPIPE_F32));
    return test_end("gated_output");
}
