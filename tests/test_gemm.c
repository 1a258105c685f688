/* test_gemm.c -- the CPU matrix product: against f64, its sums of fused multiply-adds bit by bit, and bitwise
 * over every way to split a product into several calls between sums, and over threads
 *
 * Built with UPIPE_WITH_CBLAS it also checks the BLAS entry, to the same bound, not
 * bitwise.
 */
#include "lib/gemm.h"

#include "upipe/cpu/upipe_cpu.h"
#include "upipe/cpu/upipe_cpu_gemm.h"
#include "examples/common/pool.h"
#ifdef UPIPE_WITH_CBLAS
#include "upipe/cpu/upipe_cpu_cblas.h"
#endif

/* The exact chain is known with explicit FMA, or where the target has none that a compiler could slip in. */
#if UPIPE_CPU_AVX2 || UPIPE_CPU_NEON
#define CHAIN_KNOWN 1
#elif defined(__FMA__) || !(defined(__x86_64__) || defined(__i386__))
#define CHAIN_KNOWN 0
#else
#define CHAIN_KNOWN 1
#endif

/* ---- parts of matrices ---- */

/* Rows n0 .. n0+n-1, columns d0 .. d0+d-1 of every head. */
static upipe_view part(upipe_view v, int64_t n0, int64_t n, int64_t d0, int64_t d)
{
    v.data = (char *)upipe_view_at(v, n0, 0) + (size_t)d0 * upipe_dtype_bytes(v.dtype);
    v.n = n;
    v.d = (int32_t)d;
    return v;
}

/* The same of a stored matrix seen through its transpose flag. */
static upipe_view part_of(upipe_view v, int trans, int64_t n0, int64_t n, int64_t d0, int64_t d)
{
    return trans ? part(v, d0, d, n0, n) : part(v, n0, n, d0, d);
}

static upipe_view one_head(upipe_view v, int j)
{
    if (v.h > 1) v.data = upipe_view_at(v, 0, j);
    v.h = 1;
    return v;
}

/* ---- threads ---- */

enum { SCRATCH_MOST = (UPIPE_CPU_AVX512 ? 2560 : 1600) * 1024 }; /* of one thread */

/* Tables of several threads: pools, and pools that run their tasks backwards on the thread that calls. */
typedef struct team {
    upipe_ops ops;
    upipe_par par;
    pool threads;
} team;

enum { POOLS = 3, TEAMS = 2 * POOLS };
static const int32_t team_sizes[POOLS] = {2, 3, 7};
static team teams[TEAMS];
static upipe_ops alone; /* one thread */
#ifdef UPIPE_WITH_CBLAS
static upipe_ops blas;
#endif

static void run_backwards(void *self, int32_t count, void (*task)(void *arg, int32_t i), void *arg)
{
    (void)self;
    while (count > 0) task(arg, --count);
}

static void teams_init(void)
{
    upipe_cpu_ops(&alone);
#ifdef UPIPE_WITH_CBLAS
    blas = alone;
    blas.gemm = upi_cblas_gemm;
#endif
    for (int i = 0; i < TEAMS; ++i) {
        team *t = &teams[i];
        if (i < POOLS) {
            if (pool_init(&t->threads, team_sizes[i]) != 0) {
                fprintf(stderr, "test_gemm: no %d threads\n", (int)team_sizes[i]);
                exit(1);
            }
            t->par = pool_par(&t->threads);
        } else {
            t->par.run = run_backwards;
            t->par.workers = team_sizes[i - POOLS];
        }
        t->ops = alone;
        t->ops.par = &t->par;
    }
}

static void teams_free(void)
{
    for (int i = 0; i < POOLS; ++i) pool_free(&teams[i].threads);
}

/* ---- one product ---- */

static void run(const upipe_ops *ops, upipe_view out, upipe_view a, upipe_view b, int flags)
{
    size_t bytes = alone.gemm_bytes(ops, out, a, b, flags);
    void *work = aligned_alloc(64, bytes == 0 ? 64 : bytes);
    upipe_ctx c = {.ops = ops};
    memset(work, 0xff, bytes);
    CHECK_SAY(bytes % 64 == 0 && bytes <= (size_t)upi_par_workers(ops) * SCRATCH_MOST, "scratch of %zu bytes",
              bytes);
    CHECK_STATUS(ops->gemm(&c, out, a, b, flags, work, bytes), UPIPE_OK, c.err);
    free(work);
}

/* Terms of a sum of the built-in product. */
static int64_t sum_depth(int flags)
{
    return flags & UPIPE_GEMM_TRANS_A ? UPIPE_SUM_ROWS : UPI_GEMM_DEPTH;
}

/* The product again as calls on parts, into a fresh copy of the old c: all bytes must equal the whole
 * call's. */
static void check_split(const gemm_product *p, const char *how, int64_t row, int64_t col, int64_t k,
                        int heads)
{
    int trans_a = p->flags & UPIPE_GEMM_TRANS_A, trans_b = p->flags & UPIPE_GEMM_TRANS_B;
    const int64_t rows[] = {0, row, p->out.n}, cols[] = {0, col, p->out.d}, depths[] = {0, k, p->depth};
    const int mark = buffers_n, step = heads ? 1 : p->out.h;
    const upipe_view out = twin(p->before);
    for (int j = 0; j < p->out.h; j += step)
        for (int r = 0; r < 2; ++r)
            for (int n = 0; n < 2; ++n)
                for (int d = 0; d < 2; ++d) {
                    upipe_view po = heads ? one_head(out, j) : out, pa = heads ? one_head(p->a, j) : p->a;
                    upipe_view pb = heads ? one_head(p->b, j) : p->b;
                    int64_t m1 = rows[r + 1] - rows[r], n1 = cols[n + 1] - cols[n],
                            k1 = depths[d + 1] - depths[d];
                    if (m1 == 0 || n1 == 0 || k1 == 0) continue;
                    run(&alone, part(po, rows[r], m1, cols[n], n1),
                        part_of(pa, trans_a, rows[r], m1, depths[d], k1),
                        part_of(pb, trans_b, depths[d], k1, cols[n], n1),
                        p->flags | (depths[d] > 0 ? UPIPE_GEMM_ACCUMULATE : 0));
                }
    CHECK_SAY(same_bytes(out, p->out), "%s: %s, split at %lld, %lld, %lld: bits differ", how, product_text(p),
              (long long)row, (long long)col, (long long)k);
    buffers_free(mark);
}

/* The product again by each team. */
static void check_threads(const gemm_product *p)
{
    const int mark = buffers_n;
    for (int i = 0; i < TEAMS; ++i) {
        const upipe_view out = twin(p->before);
        run(&teams[i].ops, out, p->a, p->b, p->flags);
        CHECK_SAY(same_bytes(out, p->out), "%d threads%s: %s: bits differ", (int)teams[i].par.workers,
                  i < POOLS ? "" : ", backwards", product_text(p));
        buffers_free(mark);
    }
}

/* The sum of matrices again as one call a matrix. */
static void check_added(const gemm_product *p)
{
    const int mark = buffers_n;
    const upipe_view out = twin(p->before);
    for (int j = 0; j < gemm_added(p); ++j)
        run(&alone, out, one_head(p->a, j), one_head(p->b, j),
            p->flags | (j > 0 ? UPIPE_GEMM_ACCUMULATE : 0));
    CHECK_SAY(same_bytes(out, p->out), "added up: %s: bits differ", product_text(p));
    buffers_free(mark);
}

static void check_product(test_rng *r, int64_t rows, int cols, int64_t depth, int heads, int shared,
                          int flags, upipe_dtype type_a, upipe_dtype type_b, upipe_dtype type_out, int splits)
{
    gemm_product p = product_make(r, rows, cols, depth, heads, shared, flags, type_a, type_b, type_out);
    const upipe_view a_before = twin(p.a), b_before = twin(p.b);
    p.sum_depth = sum_depth(flags);
    run(&alone, p.out, p.a, p.b, flags);
    CHECK_SAY(reference(&p), "%s", product_text(&p));
    if (CHAIN_KNOWN)
        CHECK_SAY(same_bytes(p.want, p.out), "%s: not these sums, or a gap written", product_text(&p));
    CHECK(same_bytes(p.a, a_before));
    CHECK(same_bytes(p.b, b_before));
    CHECK(gaps_whole(p.out));
    if (splits) {
        int64_t row = test_below(r, (int)rows + 1), col = test_below(r, cols + 1),
                k = test_below(r, (int)(depth / p.sum_depth) + 1) * p.sum_depth;
        check_split(&p, "rows", row, 0, 0, 0);
        check_split(&p, "columns", 0, col, 0, 0);
        if (p.out.h > 1) check_split(&p, "heads", 0, 0, 0, 1);
        if (shared == ADDED && type_out == UPIPE_F32) check_added(&p);
        if (shared != ADDED && type_out == UPIPE_F32) {
            check_split(&p, "depth", 0, 0, k, 0);
            check_split(&p, "all", row, col, k, 1);
        }
        check_threads(&p);
    }
#ifdef UPIPE_WITH_CBLAS
    memcpy(p.out.data, p.before.data, view_bytes(p.out));
    run(&blas, p.out, p.a, p.b, flags);
    CHECK_SAY(reference(&p), "BLAS: %s", product_text(&p));
#endif
    buffers_free(0);
}

/* ---- the cases ---- */

static const upipe_dtype types[] = {UPIPE_F32, UPIPE_BF16};

static void check_tails(test_rng *r)
{
    static const int cols[] = {1, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 49, 64};
    for (int rows = 1; rows <= 17; ++rows)
        for (int n = 0; n < (int)(sizeof cols / sizeof *cols); ++n)
            for (int flags = 0; flags < 8; ++flags) {
                upipe_dtype in = types[(rows + n) % 2];
                upipe_dtype out = flags < UPIPE_GEMM_ACCUMULATE ? types[n % 2] : UPIPE_F32;
                check_product(r, rows, cols[n], 1 + test_below(r, 20), 1, 0, flags, in, in, out, 0);
            }
}

/* Past every blocking size: depth, packed strip, part of the columns, block of rows and of columns. */
static void check_blocks(test_rng *r)
{
    const int past = UPI_GEMM_DEPTH + 1, wide = UPI_GEMM_B_PANELS * UPI_GEMM_COLS;
    check_product(r, 11, 17, past - 1, 1, 0, 0, UPIPE_F32, UPIPE_F32, UPIPE_F32, 1);
    check_product(r, 11, 17, past, 1, 0, UPIPE_GEMM_TRANS_B, UPIPE_F32, UPIPE_F32, UPIPE_F32, 1);
    check_product(r, 13, 21, 2 * past + 5, 1, 0, UPIPE_GEMM_TRANS_A, UPIPE_BF16, UPIPE_F32, UPIPE_F32, 1);
    check_product(r, 13, 21, 2 * past + 5, 2, 1, UPIPE_GEMM_TRANS_B, UPIPE_BF16, UPIPE_BF16, UPIPE_BF16, 1);
    check_product(r, 59, wide + 19, 40, 1, 0, UPIPE_GEMM_TRANS_B, UPIPE_F32, UPIPE_BF16, UPIPE_F32, 1);
    check_product(r, 59, wide + 19, 40, 1, 0, 0, UPIPE_BF16, UPIPE_BF16, UPIPE_BF16, 1);
    check_product(r, 40, wide + 19, past, 1, 0, 0, UPIPE_BF16, UPIPE_F32, UPIPE_BF16, 1);
    check_product(r, 40, wide - 5, past, 1, 0, 0, UPIPE_BF16, UPIPE_F32, UPIPE_BF16, 1);
    check_product(r, UPI_GEMM_BLOCK_ROWS + 7, UPI_GEMM_BLOCK_F32 / UPI_GEMM_BLOCK_ROWS + wide + 1, 3, 1, 0,
                  UPIPE_GEMM_TRANS_B, UPIPE_F32, UPIPE_F32, UPIPE_F32, 1);
    check_product(r, UPI_GEMM_BLOCK_ROWS + 7, UPI_GEMM_BLOCK_16 / UPI_GEMM_BLOCK_ROWS + wide + 1, 3, 1, 0,
                  UPIPE_GEMM_TRANS_B, UPIPE_BF16, UPIPE_BF16, UPIPE_BF16, 1);
    check_product(r, 59, wide + 19, past, 1, 0, UPIPE_GEMM_ACCUMULATE | UPIPE_GEMM_TRANS_A, UPIPE_F32,
                  UPIPE_BF16, UPIPE_F32, 1);
    check_product(r, 9, 64, past, 5, 1, UPIPE_GEMM_TRANS_B, UPIPE_F32, UPIPE_F32, UPIPE_F32, 1);
    check_product(r, 40, 30, past, 3, 2, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE, UPIPE_F32, UPIPE_F32,
                  UPIPE_F32, 1);
    check_product(r, 13, 33, past, 2, ADDED, UPIPE_GEMM_TRANS_B, UPIPE_F32, UPIPE_F32, UPIPE_F32, 1);
    check_product(r, 13, 33, 96, 7, ADDED, UPIPE_GEMM_TRANS_B, UPIPE_F32, UPIPE_BF16, UPIPE_BF16, 1);
    check_product(r, 13, 33, UPIPE_SUM_ROWS + 1, 3, ADDED, UPIPE_GEMM_TRANS_A, UPIPE_F32, UPIPE_F32,
                  UPIPE_F32, 1);
}

static void check_random(test_rng *r, long draws)
{
    for (long i = 0; i < draws; ++i) {
        int kind = test_below(r, 8), heads = kind < 4 ? 1 : 2 + test_below(r, 3);
        int rows = 1 + test_below(r, 30), cols = 1 + test_below(r, 40), depth = 1 + test_below(r, 40);
        upipe_dtype type_a = types[test_below(r, 2)], type_b = types[test_below(r, 2)];
        upipe_dtype type_out = test_below(r, 2) ? UPIPE_F32 : UPIPE_BF16;
        int flags = test_below(r, type_out == UPIPE_F32 ? 8 : 4);
        if (kind == 0) rows += 200;
        if (kind == 1) cols += 250;
        if (kind == 2 || kind == 4) depth += UPI_GEMM_DEPTH - 20 + test_below(r, 2) * UPI_GEMM_DEPTH;
        check_product(r, rows, cols, depth, heads, heads > 1 && kind == 7 ? ADDED : test_below(r, 4), flags,
                      type_a, type_b, type_out, 1);
    }
}

/* A caller may size its scratch for its largest tile: no smaller product needs more. */
static void check_bytes(void)
{
    for (int which = 0; which < 2 * 2; ++which) {
        const upipe_ops *ops = which % 2 == 0 ? &alone : &teams[0].ops;
        const size_t most = (size_t)upi_par_workers(ops) * SCRATCH_MOST;
        const upipe_dtype type = types[which / 2];
        size_t before_rows = 0, before_cols = 0, before_depth = 0;
        for (int size = 1; size < 1300; ++size) {
            upipe_view a = upipe_view_packed(NULL, UPIPE_BF16, size, 1, 700);
            upipe_view b = upipe_view_packed(NULL, UPIPE_BF16, size, 1, 700);
            upipe_view tall = upipe_view_packed(NULL, type, size, 1, 300);
            upipe_view wide = upipe_view_packed(NULL, type, 300, 1, size);
            upipe_view deep = upipe_view_packed(NULL, type, 300, 1, 300);
            upipe_view other = upipe_view_packed(NULL, UPIPE_F32, 300, 1, 700), c;
            size_t rows = alone.gemm_bytes(ops, tall, a, other, UPIPE_GEMM_TRANS_B);
            size_t cols = alone.gemm_bytes(ops, wide, other, b, UPIPE_GEMM_TRANS_B), depth;
            other.d = size;
            c = other;
            depth = alone.gemm_bytes(ops, deep, other, c, UPIPE_GEMM_TRANS_B);
            CHECK_SAY(rows >= before_rows && cols >= before_cols && depth >= before_depth && rows <= most &&
                          cols <= most && depth <= most,
                      "size %d: %zu, %zu, %zu bytes, after %zu, %zu, %zu", size, rows, cols, depth,
                      before_rows, before_cols, before_depth);
            before_rows = rows;
            before_cols = cols;
            before_depth = depth;
        }
    }
}

/* The same of ten products that are added up, their matrices under or beside each other, as they may be joined. */
static void check_bytes_added(void)
{
    static const int flags[] = {UPIPE_GEMM_TRANS_A, UPIPE_GEMM_TRANS_B};
    size_t before = 0;
    for (int which = 0; which < 2; ++which, before = 0)
        for (int size = 1; size < 1300; ++size) {
            const upipe_view out = upipe_view_packed(NULL, UPIPE_F32, 300, 1, 300);
            upipe_view a = upipe_view_packed(NULL, UPIPE_F32, 300, 10, size);
            size_t bytes;
            if (flags[which] == UPIPE_GEMM_TRANS_A) {
                a = upipe_view_packed(NULL, UPIPE_F32, size, 1, 300);
                a.h = 10, a.h_stride = a.n * a.n_stride;
            }
            bytes = alone.gemm_bytes(&alone, out, a, a, flags[which]);
            CHECK_SAY(bytes >= before, "added, depth %d: %zu bytes, after %zu", size, bytes, before);
            before = bytes;
        }
}

/* An empty sum is 0, or the old c. */
static void check_empty(test_rng *r)
{
    check_product(r, 5, 9, 0, 2, 0, UPIPE_GEMM_TRANS_A, UPIPE_F32, UPIPE_F32, UPIPE_F32, 0);
    check_product(r, 5, 9, 0, 2, 0, UPIPE_GEMM_TRANS_A, UPIPE_F32, UPIPE_F32, UPIPE_BF16, 0);
    check_product(r, 5, 9, 0, 1, 0, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE, UPIPE_F32, UPIPE_F32,
                  UPIPE_F32, 0);
    check_product(r, 0, 9, 4, 1, 0, 0, UPIPE_F32, UPIPE_F32, UPIPE_F32, 0);
}

static void check_statuses(const upipe_ops *ops)
{
    enum { ENOUGH = 64 * 1024 };
    static float buf[64];
    char *work = (char *)aligned_alloc(64, ENOUGH);
    upipe_view out = upipe_view_packed(buf, UPIPE_F32, 3, 1, 4),
               a = upipe_view_packed(buf, UPIPE_F32, 3, 1, 5);
    upipe_view b = upipe_view_packed(buf, UPIPE_F32, 5, 1, 4), v;
    size_t need = alone.gemm_bytes(&alone, out, a, b, 0);
    upipe_ctx c = {.ops = ops};
    CHECK(need > 0 && need <= ENOUGH);
    check_gemm_statuses(&c, work, ENOUGH);
    CHECK_INT(alone.gemm_bytes(&alone, (v = out, v.h = 0, v), a, b, 0), 0);
    CHECK_REFUSED(alone.gemm(&c, out, a, b, 0, work, need - 1), UPIPE_ERR_ARG, c.err, "bytes of scratch");
    CHECK_REFUSED(alone.gemm(&c, out, a, b, 0, NULL, need), UPIPE_ERR_ARG, c.err, "bytes of scratch");
    CHECK_REFUSED(alone.gemm(&c, out, a, b, 0, work + 4, ENOUGH - 64), UPIPE_ERR_ARG, c.err,
                  "multiple of 64");
    CHECK_STATUS(ops->gemm(&c, out, a, b, 0, work, need), UPIPE_OK, c.err);
    free(work);
}

int main(int argc, char **argv)
{
    test_rng r;
    r.state = (uint64_t)test_env("UPIPE_SEED", 1);
    teams_init();
    printf("test_gemm: %s, seed %llu\n", alone.name, (unsigned long long)r.state);
    test_begin(argc, argv);
    TEST(check_tails(&r));
    TEST(check_blocks(&r));
    TEST(check_random(&r, 100 + test_draws_wanted() / 10));
    TEST(check_bytes());
    TEST(check_bytes_added());
    TEST(check_empty(&r));
    TEST(check_statuses(&alone));
#ifdef UPIPE_WITH_CBLAS
    TEST(check_statuses(&blas));
#endif
    teams_free();
    return test_end("test_gemm");
}
