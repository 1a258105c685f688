/* test_mlp.c -- the MLP and the loss by tiles: against f64, the same bits for any tile, view and place,
 *                bytes to the last one, failures at every take and every operation
 *
 * Tensors lie in exact allocations with gaps full of NaNs, and every run goes through a dry pool first and
 * then through a slab of exactly the bytes that this one needed.
 */
#include "lib/test.h"
#include "lib/oracle_tile.h"
#include "lib/close.h"
#include "lib/context.h"

#include "upipe/upipe_mlp.h"
#include "upipe/cuda/upipe_cuda_bytes.h"

/* Weight gradients, and the bits that leave them out. */
enum { NO_GATE = 1, NO_UP = 2, NO_DOWN = 4, NO_HEAD = 8, NO_NORM_WEIGHT = 16, NO_POST = 32 };
#define TILE_GRADIENTS(X) \
    X(gate, NO_GATE)      \
    X(up, NO_UP) X(down, NO_DOWN) X(head, NO_HEAD) X(norm_weight, NO_NORM_WEIGHT) X(post_norm_weight, NO_POST)

typedef struct tile_case {
    tile_shape shape;
    size_t tile_bytes;
    float scale;           /* the head's, 0 too */
    int gap;               /* elements behind a row of x; dy, y and dx have more */
    int in_place;          /* y is x; dx is dy, or x in a loss */
    int unwanted;          /* gradients left out */
    const f32_tile *start; /* what the weights' gradients hold before; NULL: zeros */
    f32_tile in;
    int32_t *targets;
} tile_case;

static tile_case make_case(int loss, int64_t rows, int64_t dim, int64_t wide, upipe_dtype dtype)
{
    static const int32_t none[1] = {0};
    tile_case t = {.shape.rows = rows,
                   .shape.dim = dim,
                   .shape.wide = wide,
                   .shape.targets = loss ? none : NULL,
                   .shape.dtype = dtype,
                   .shape.scale = 1};
    return t;
}

/* Targets of all rows, about one in seven ignored. */
static int32_t *make_targets(test_rng *r, const tile_shape *s)
{
    int32_t *targets = (int32_t *)zeroed((size_t)s->rows * sizeof *targets);
    for (int64_t i = 0; i < s->rows; ++i)
        targets[i] = test_below(r, 7) == 0 ? -1 - test_below(r, 100) : test_below(r, (int)s->wide);
    return targets;
}

/* Inputs, and the targets of a loss. */
static void fill_case(tile_case *t, test_rng *r, uint64_t seed)
{
    t->targets = make_targets(r, &t->shape);
    if (t->shape.targets != NULL) t->shape.targets = t->targets;
    tile_inputs(&t->shape, seed, &t->in);
}

/* ---- the library's arguments ---- */

typedef struct tile_args {
    upipe_mlp mlp;
    upipe_loss head;
    upipe_mlp_grads mlp_grads;
    upipe_loss_grads head_grads;
    upipe_view x, y, dy, dx;
    float *losses;
    int loss; /* which of the two */
    const int32_t *targets;
} tile_args;

static size_t view_bytes(upipe_view v)
{
    return v.n > 0 ? (size_t)((v.n - 1) * v.n_stride + v.d) * upipe_dtype_bytes(v.dtype) : 0;
}

/* A copy of these values in the storage type, in an allocation of its own; NaNs everywhere without values. */
static upipe_view rows_make(const float *values, upipe_dtype dtype, int64_t rows, int64_t dim, int gap)
{
    upipe_view v = upipe_view_make(NULL, dtype, rows, dim + gap, 1, dim, (int32_t)dim);
    v.data = buffer(view_bytes(v));
    for (int64_t i = 0; values != NULL && i < rows; ++i)
        for (int64_t k = 0; k < dim; ++k)
            upipe_cpu_put(upipe_view_at(v, i, 0), dtype, k, values[i * dim + k]);
    return v;
}

static void rows_widen(upipe_view v, float *to)
{
    for (int64_t i = 0; i < v.n; ++i)
        for (int64_t k = 0; k < v.d; ++k) to[i * v.d + k] = upipe_cpu_get(upipe_view_at(v, i, 0), v.dtype, k);
}

/* The rows hold these values, where they are given, and the gaps are as they were made. */
static int rows_whole(upipe_view v, const float *values)
{
    size_t size = upipe_dtype_bytes(v.dtype), at;
    for (int64_t i = 0; i < v.n; ++i) {
        const unsigned char *gap = (const unsigned char *)upipe_view_at(v, i, 0) + (size_t)v.d * size;
        for (at = 0; i + 1 < v.n && at < (size_t)(v.n_stride - v.d) * size; ++at)
            if (gap[at] != 0xff) return 0;
        for (int64_t k = 0; values != NULL && k < v.d; ++k)
            if (upipe_cpu_get(upipe_view_at(v, i, 0), v.dtype, k) != values[i * v.d + k]) return 0;
    }
    return 1;
}

static void *storage_make(const float *values, upipe_dtype dtype, int64_t n)
{
    return values != NULL ? rows_make(values, dtype, 1, n, 0).data : NULL;
}

static void args_make(const tile_case *t, f32_tile *got, tile_args *a)
{
    const tile_shape *s = &t->shape;
    const f32_tile *in = &t->in;
    int64_t i, weight = s->wide * s->dim;
    memset(a, 0, sizeof *a);
    f32_tile_make(s, got);
    a->loss = s->targets != NULL;
    a->targets = s->targets;
    a->losses = got->loss;
    a->x = rows_make(in->x, s->dtype, s->rows, s->dim, t->gap);
    if (!a->loss) a->dy = rows_make(in->dy, s->dtype, s->rows, s->dim, t->gap * 2);
    if (!a->loss) a->y = rows_make(t->in_place ? in->x : NULL, s->dtype, s->rows, s->dim, t->gap * 3);
    a->dx = rows_make(!t->in_place ? NULL : a->loss ? in->x : in->dy, s->dtype, s->rows, s->dim, t->gap * 5);
    a->mlp.w_gate = storage_make(in->gate, s->dtype, weight);
    a->mlp.w_up = storage_make(in->up, s->dtype, weight);
    a->mlp.w_down = storage_make(in->down, s->dtype, weight);
    a->head.w = storage_make(in->head, s->dtype, weight);
    a->mlp.norm_weight = a->head.norm_weight = in->norm_weight;
    a->mlp.post_norm_weight = in->post_norm_weight;
    a->mlp.norm_eps = s->normed || s->posted ? (float)s->eps : 0;
    a->head.norm_eps = s->normed ? (float)s->eps : 0;
    a->mlp.hidden = a->head.vocab = s->wide;
    a->mlp.residual = s->residual;
    a->mlp.gelu = s->gelu;
    a->head.logit_softcap = (float)s->softcap;
    a->mlp.tile_bytes = a->head.tile_bytes = t->tile_bytes;
    a->head.scale = t->scale;
    a->mlp.result_scale = a->head.logit_scale = (float)s->factor;
#define START(name, bit)                                                                \
    for (i = 0; t->start != NULL && got->name != NULL && i < tile_count(s, #name); ++i) \
        got->name[i] = t->start->name[i];
    TILE_GRADIENTS(START)
#undef START
    a->mlp_grads.w_gate = t->unwanted & NO_GATE ? NULL : got->gate;
    a->mlp_grads.w_up = t->unwanted & NO_UP ? NULL : got->up;
    a->mlp_grads.w_down = t->unwanted & NO_DOWN ? NULL : got->down;
    a->head_grads.w = t->unwanted & NO_HEAD ? NULL : got->head;
    a->mlp_grads.norm_weight = a->head_grads.norm_weight =
        t->unwanted & NO_NORM_WEIGHT ? NULL : got->norm_weight;
    a->mlp_grads.post_norm_weight = t->unwanted & NO_POST ? NULL : got->post_norm_weight;
}

/* The call itself. */
static upipe_status call_tile(upipe_ctx *c, const tile_case *t, tile_args *a, int backward)
{
    if (a->loss && !backward) return upipe_loss_fwd(c, &a->head, a->losses, a->x, a->targets);
    if (a->loss)
        return upipe_loss_bwd(c, &a->head, a->dx, &a->head_grads, a->losses, t->in_place ? a->dx : a->x,
                              a->targets);
    if (!backward) return upipe_mlp_fwd(c, &a->mlp, a->y, t->in_place ? a->y : a->x);
    return upipe_mlp_bwd(c, &a->mlp, a->dx, &a->mlp_grads, t->in_place ? a->dx : a->dy, a->x);
}

/* What a call allocates: its tile's tensors and the scratch of their products. */
static upipe_status call_bytes(size_t *bytes, const upipe_ops *ops, const tile_args *a, int backward,
                               upipe_err *e)
{
    upi_tiling tile;
    UPIPE_TRY(a->loss ? upi_loss_tile_bytes(&tile, ops, &a->head, a->x, backward, e)
                      : upi_mlp_tile_bytes(&tile, ops, &a->mlp, a->x, backward, e));
    *bytes = a->x.n > 0 ? (size_t)tile.rows * tile.row_bytes + tile.work_bytes : 0;
    return UPIPE_OK;
}

/* ---- one call in a pool that just suffices ---- */

enum { BEFORE = 300, BLOCKS = 16 }; /* bytes that are live before */

/* The pool that this call needs with BEFORE bytes before; its peak is held against call_bytes. */
static size_t call_dry(const upipe_ops *ops, const tile_case *t, tile_args *a, int backward, size_t *bytes)
{
    upipe_status status;
    upipe_dry *dry = dry_begin(NULL, ops, &status);
    void *before;
    CHECK(status == UPIPE_OK);
    CHECK(upipe_mem_alloc(&dry->mem, &before, BEFORE, UPIPE_USE_OTHER, "before", NULL) == UPIPE_OK);
    CHECK_STATUS(call_bytes(bytes, ops, a, backward, &dry->ctx.err), UPIPE_OK, dry->ctx.err);
    CHECK_STATUS(call_tile(&dry->ctx, t, a, backward), UPIPE_OK, dry->ctx.err);
    CHECK_INT(dry->mem.peak - BEFORE, *bytes);
    CHECK_INT(dry->mem.live, BEFORE);
    return dry->mem.need;
}

/* A real pool with BEFORE bytes in it. */
typedef struct tile_pool {
    upipe_ctx ctx;
    upipe_mem mem;
    void *before;
} tile_pool;

static void pool_make(tile_pool *p, const upipe_ops *ops, size_t bytes)
{
    memset(p, 0, sizeof *p);
    context_pool(&p->ctx, &p->mem, ops, bytes, BLOCKS);
    CHECK(upipe_mem_alloc(&p->mem, &p->before, BEFORE, UPIPE_USE_OTHER, "before", NULL) == UPIPE_OK);
}

static void pool_end(tile_pool *p)
{
    CHECK_INT(p->mem.live, BEFORE);
    CHECK(upipe_mem_free(&p->mem, p->before, NULL) == UPIPE_OK);
    CHECK(upipe_mem_destroy(&p->mem, NULL) == UPIPE_OK);
}

static void call_exact(const upipe_ops *ops, const tile_case *t, tile_args *a, int backward)
{
    size_t bytes, need = call_dry(ops, t, a, backward, &bytes);
    tile_pool p;
    pool_make(&p, ops, need);
    CHECK_STATUS(call_tile(&p.ctx, t, a, backward), UPIPE_OK, p.ctx.err);
    CHECK_INT(p.mem.peak - BEFORE, bytes);
    CHECK_INT(p.mem.need, need);
    pool_end(&p);
}

/* Forward and backward. */
static void run_tile(const tile_case *t, f32_tile *got)
{
    const tile_shape *s = &t->shape;
    const upipe_ops ops = cpu_table();
    tile_args a;
    args_make(t, got, &a);
    call_exact(&ops, t, &a, 0);
    if (a.loss) {
        const float *losses = (const float *)copy_of(got->loss, (size_t)s->rows * sizeof *losses);
        memset(got->loss, 0xff, (size_t)s->rows * sizeof *losses);
        call_exact(&ops, t, &a, 1);
        CHECK_BYTES(losses, got->loss, (size_t)s->rows * sizeof *losses);
    } else {
        rows_widen(a.y, got->y);
        call_exact(&ops, t, &a, 1);
        CHECK(rows_whole(a.y, got->y));
        CHECK(rows_whole(a.dy, t->in.dy));
    }
    rows_widen(a.dx, got->x);
    CHECK(rows_whole(a.dx, NULL));
    CHECK(rows_whole(a.x, t->in.x));
}

static void check_same(const tile_shape *s, const f32_tile *a, const f32_tile *b, int but, const char *what)
{
#define SAME(name)                                                                                      \
    if (tile_count(s, #name) > 0)                                                                       \
        CHECK_SAY(memcmp(a->name, b->name, (size_t)tile_count(s, #name) * 4) == 0,                      \
                  "%s: %s differs, %lld rows, D %lld, width %lld, %s", what, #name, (long long)s->rows, \
                  (long long)s->dim, (long long)s->wide, upipe_dtype_name(s->dtype));
    SAME(x)
    SAME(y)
    SAME(loss)
#define SAME_GRADIENT(name, bit) \
    if (!(but & bit)) SAME(name)
    TILE_GRADIENTS(SAME_GRADIENT)
#undef SAME_GRADIENT
#undef SAME
}

/* ---- values ---- */

/* What the oracle's gradients are gradients of. */
static double objective(const tile_shape *s, const f64_tile *in)
{
    const int mark = buffers_n;
    f64_tile r;
    double sum = 0;
    f64_tile_make(s, &r);
    f64_tile_run(s, in, &r);
    for (int64_t i = 0; i < tile_count(s, "y"); ++i) sum += r.y[i] * in->dy[i];
    for (int64_t i = 0; i < tile_count(s, "loss"); ++i) sum += s->scale * r.loss[i];
    buffers_free(mark);
    return sum;
}

static void test_finite_differences(void)
{
    static const int32_t targets[] = {3, -1, 0, 8, 3};
    int kind;
    for (kind = 0; kind < 8; ++kind) {
        const int loss = kind == 4 || kind == 5;
        tile_case t = make_case(loss, 5, 6, 9, UPIPE_F32);
        const double h = 1e-5;
        f64_tile in64, at;
        int64_t i;
        t.shape.normed = kind & 1;
        t.shape.posted = kind >= 6;
        t.shape.residual = kind == 2 || kind == 3 || kind == 7;
        t.shape.eps = kind & 1 ? 1e-3 : 0;
        if (loss) t.shape.targets = targets;
        t.shape.scale = kind == 5 ? 0.25 : 1;
        t.shape.factor = kind == 3 || kind == 5 || kind == 7 ? 0.375 : 0;
        t.shape.gelu = kind == 2 || kind == 7;
        t.shape.softcap = kind == 5 ? 0.5 : 0;
        tile_inputs(&t.shape, 7, &t.in);
        f64_tile_widen(&t.shape, &t.in, &in64);
        f64_tile_make(&t.shape, &at);
        f64_tile_run(&t.shape, &in64, &at);
#define DIFFERENCE(name)                                                                                \
    for (i = 0; i < tile_count(&t.shape, #name); ++i) {                                                 \
        double kept = in64.name[i], up, down, got;                                                      \
        in64.name[i] = kept + h;                                                                        \
        up = objective(&t.shape, &in64);                                                                \
        in64.name[i] = kept - h;                                                                        \
        down = objective(&t.shape, &in64);                                                              \
        in64.name[i] = kept;                                                                            \
        got = (up - down) / (2 * h);                                                                    \
        CHECK_SAY(fabs(got - at.name[i]) <= 1e-7, "kind %d: d %s[%d] is %.12g, differences give %.12g", \
                  kind, #name, (int)i, at.name[i], got);                                                \
    }
        DIFFERENCE(x)
        DIFFERENCE(gate)
        DIFFERENCE(up)
        DIFFERENCE(down)
        DIFFERENCE(head)
        DIFFERENCE(norm_weight)
        DIFFERENCE(post_norm_weight)
#undef DIFFERENCE
    }
}

/* One random shape: near the truth packed, and the same bits in another tile, with gaps, in place. */
static void check_random(uint64_t seed)
{
    test_rng r;
    tile_case t;
    f32_tile got, other;
    int loss, first = (int)(seed % 6); /* the smallest of everything, and one row more than a tile */
    size_t row;
    r.state = seed;
    loss = test_below(&r, 2);
    t = make_case(loss, 1 + test_below(&r, 300), 8 + test_below(&r, 89), 1 + test_below(&r, 300),
                  (upipe_dtype)test_below(&r, 2));
    if (first == 0) t.shape.wide = 1 + test_below(&r, 9);
    if (first == 1) t.shape.rows = 1 + test_below(&r, 3);
    if (first == 2) t.shape.rows = 1 + (loss ? UPIPE_TILE_LOSS_ROWS : t.shape.dim);
    t.shape.normed = test_below(&r, 2);
    t.shape.residual = !loss && test_below(&r, 2);
    t.shape.posted = !loss && test_below(&r, 2);
    t.shape.eps = (t.shape.normed || t.shape.posted) && test_below(&r, 4) ? 0.0625 : 0;
    t.scale = loss ? 1 / (float)t.shape.rows : 0;
    t.shape.scale = (double)t.scale;
    t.shape.factor = test_below(&r, 2) ? 0.375 : 0;
    t.shape.gelu = test_below(&r, 2);
    t.shape.softcap = test_below(&r, 2) ? 2 : 0;
    fill_case(&t, &r, seed);
    run_tile(&t, &got);
    check_tile(&t.shape, &t.in, &got);
    /* enough for the least tile of either direction */
    row = UPIPE_SUM_ROWS * (size_t)(t.shape.dim * 12 + t.shape.wide * 12);
    t.tile_bytes = row + (size_t)test_below(&r, 20) * row / 8;
    t.gap = test_below(&r, 9);
    t.in_place = test_below(&r, 2);
    run_tile(&t, &other);
    check_same(&t.shape, &got, &other, 0, "another tile and view");
}

static void test_random(void)
{
    long draws = test_draws_wanted() / 10 + 1, seed = test_env("UPIPE_SEED", 1), i;
    for (i = 0; i < draws; ++i) {
        long failed = test_failures;
        check_random((uint64_t)(seed + i));
        if (test_shown_since(failed)) fprintf(stderr, "replay: UPIPE_SEED=%ld UPIPE_DRAWS=1\n", seed + i);
    }
}

/* ---- the same bits ---- */

/* Bytes of all of a tile's tensors, for one row, as the header says which there are. */
static size_t row_bytes(const tile_shape *s, int backward)
{
    size_t el = upipe_dtype_bytes(s->dtype), dim = (size_t)s->dim, wide = (size_t)s->wide;
    size_t norm = s->normed ? dim * el : 0;
    if (s->targets == NULL)
        return norm + (backward ? 3 * wide + (s->posted || s->factor != 0 ? dim : 0) : 2 * wide) * el +
               4 * dim;
    return norm + 4 * wide + (backward ? 4 * dim + (el < 4 ? wide * el : 0) : 0);
}

/* A case with everything: norms, residual, a factor, gelu in bf16, a soft-cap, ignored targets; tiles are the least that
 * there are. */
static tile_case full_case(int loss, upipe_dtype dtype, int64_t rows)
{
    tile_case t = make_case(loss, rows, 20, 37, dtype);
    test_rng r = {99};
    t.shape.normed = 1;
    t.shape.posted = t.shape.residual = !loss;
    t.shape.eps = 0.0625;
    t.scale = loss ? 0.125f : 0;
    t.shape.scale = 0.125;
    t.shape.factor = 0.375;
    t.shape.gelu = dtype == UPIPE_BF16;
    t.shape.softcap = 2;
    fill_case(&t, &r, 5);
    t.tile_bytes = UPIPE_SUM_ROWS * row_bytes(&t.shape, 1);
    return t;
}

static void without_norm(tile_case *t)
{
    t->shape.normed = 0;
    t->shape.posted = 0;
    t->shape.factor = 0;
    t->shape.softcap = 0;
    t->shape.eps = 0;
    t->in.norm_weight = t->in.post_norm_weight = NULL;
    t->tile_bytes = UPIPE_SUM_ROWS * row_bytes(&t->shape, 1);
}

/* Of every kind one that is near the truth; any tile, gaps, in place or not: bits are those of one tile of
 * all rows. */
static void test_tiles(void)
{
    enum { ROWS = 151 };
    static const int tiles[] = {64, 127, 128, 150, 151, 1000};
    for (int kind = 0; kind < 16; ++kind) {
        f32_tile whole, got;
        tile_case t = full_case(kind & 1, (upipe_dtype)(kind >> 1 & 1), ROWS);
        t.shape.normed = kind >> 2 & 1;
        t.shape.residual = kind & 1 ? 0 : kind >> 3 & 1;
        if (!t.shape.normed) without_norm(&t);
        t.tile_bytes = row_bytes(&t.shape, 1) * ROWS;
        run_tile(&t, &whole);
        check_tile(&t.shape, &t.in, &whole);
        for (size_t i = 0; i <= sizeof tiles / sizeof *tiles; ++i) {
            t.tile_bytes = i == 0 ? 0 : row_bytes(&t.shape, 1) * (size_t)tiles[i - 1];
            t.in_place = (int)i & 1;
            t.gap = (int)i % 3 * 4;
            run_tile(&t, &got);
            check_same(&t.shape, &whole, &got, 0, "tiles");
        }
    }
}

/* The first rows' gradients, then the others' on top of them: the sums of all rows. */
static void test_accumulates(void)
{
    enum { ROWS = 150, FIRST = UPIPE_SUM_ROWS };
    for (int kind = 0; kind < 4; ++kind) {
        f32_tile whole, first, then;
        tile_case t = full_case(kind & 1, (upipe_dtype)(kind >> 1), ROWS);
        run_tile(&t, &whole);
        t.shape.rows = FIRST;
        run_tile(&t, &first);
        t.in.x += FIRST * t.shape.dim;
        if (!(kind & 1)) t.in.dy += FIRST * t.shape.dim;
        if (kind & 1) t.shape.targets += FIRST;
        t.start = &first;
        t.shape.rows = ROWS - FIRST;
        run_tile(&t, &then);
#define CHAIN(name, bit) \
    if (whole.name != NULL) CHECK_BYTES(then.name, whole.name, tile_count(&t.shape, #name) * 4);
        TILE_GRADIENTS(CHAIN)
#undef CHAIN
    }
}

/* A gradient that is not asked for changes no other one. */
static void test_unwanted(void)
{
    for (int kind = 0; kind < 4; ++kind) {
        f32_tile all, got;
        tile_case t = full_case(kind & 1, (upipe_dtype)(kind >> 1), 70);
        run_tile(&t, &all);
        for (int unwanted = 1; unwanted < 64; ++unwanted) {
            int64_t i, touched = 0;
            t.unwanted = unwanted;
            run_tile(&t, &got);
            check_same(&t.shape, &all, &got, unwanted, "without some gradients");
#define UNTOUCHED(name, bit)                                                                  \
    for (i = 0; (unwanted & bit) && got.name != NULL && i < tile_count(&t.shape, #name); ++i) \
        touched += got.name[i] != 0;
            TILE_GRADIENTS(UNTOUCHED)
#undef UNTOUCHED
            CHECK_INT(touched, 0);
        }
    }
}

/* Scales that are powers of two scale gradients exactly, and no loss. */
static void test_scale(void)
{
    static const float scales[] = {0, 0.0078125f, 8, -2};
    f32_tile one, got;
    tile_case t = full_case(1, UPIPE_F32, 70);
    t.scale = 1;
    run_tile(&t, &one);
    for (size_t i = 0; i < sizeof scales / sizeof *scales; ++i) {
        float factor = scales[i] == 0 ? 1 : scales[i];
        int64_t k, wrong = 0;
        t.scale = scales[i];
        run_tile(&t, &got);
#define SCALED(name) \
    for (k = 0; k < tile_count(&t.shape, #name); ++k) wrong += got.name[k] != factor * one.name[k];
        SCALED(x)
        SCALED(head)
        SCALED(norm_weight)
#undef SCALED
        CHECK_SAY(wrong == 0, "%lld gradients are not %g times as large", (long long)wrong, (double)factor);
        CHECK_BYTES(got.loss, one.loss, t.shape.rows * 4);
    }
}

/* What lies in rows with negative targets does not matter. */
static void test_ignored(void)
{
    enum { ROWS = 200 };
    for (int kind = 0; kind < 6; ++kind) {
        f32_tile with, other;
        tile_case t = full_case(1, (upipe_dtype)(kind & 1), ROWS);
        int64_t kept = 0, dim = t.shape.dim, wrong = 0;
        for (int64_t i = 0; i < ROWS; ++i) {
            if (kind >= 4) t.targets[i] = INT32_MIN;
            if (kind >= 2 && kind < 4 && i >= 60 && i < 130) t.targets[i] = -100; /* a whole tile */
        }
        run_tile(&t, &with);
        for (int64_t i = 0; i < ROWS; ++i)
            for (int64_t k = 0; k < dim && t.targets[i] < 0; ++k) t.in.x[i * dim + k] *= -4;
        run_tile(&t, &other);
        for (int64_t i = 0; i < ROWS; ++i) {
            kept += t.targets[i] >= 0;
            wrong += t.targets[i] < 0 && (with.loss[i] != 0 || other.loss[i] != 0);
            for (int64_t k = 0; k < dim && t.targets[i] < 0; ++k)
                wrong += with.x[i * dim + k] != 0 || other.x[i * dim + k] != 0;
        }
        CHECK_INT(wrong, 0);
        CHECK(kind >= 4 ? kept == 0 : kept > 0 && kept < ROWS);
        check_same(&t.shape, &with, &other, 0, "other values in ignored rows");
        for (int64_t k = 0; k < dim * t.shape.wide && kept == 0; ++k) wrong += with.head[k] != 0;
        CHECK_INT(wrong, 0);
    }
}

/* ---- bytes ---- */

/* Rows of a tile, told from the block that holds one f32 row of `columns` for each of them. */
static int64_t traced_rows(const tile_case *t, tile_args *a, int backward, size_t *tensors)
{
    const upipe_ops ops = cpu_table();
    upipe_mem_event events[32];
    size_t rows = 0;
    upipe_status status;
    upipe_dry *dry = dry_begin(NULL, &ops, &status);
    CHECK(status == UPIPE_OK);
    dry->mem.events = events;
    dry->mem.events_max = 32;
    CHECK_STATUS(call_tile(&dry->ctx, t, a, backward), UPIPE_OK, dry->ctx.err);
    CHECK_INT(dry->mem.events_lost, 0);
    *tensors = 0;
    for (int64_t i = 0; i < dry->mem.events_n; ++i) {
        const upipe_mem_event *e = &events[i];
        if (e->kind < 1 || strstr(e->tag, "_work") != NULL) continue;
        *tensors += e->bytes;
        if (!strcmp(e->tag, "mlp_sum")) rows = e->bytes / 4 / (size_t)t->shape.dim;
        if (!strcmp(e->tag, "logits")) rows = e->bytes / 4 / (size_t)t->shape.wide;
    }
    return (int64_t)rows;
}

/* Rows of a tile of which so many would fit. */
static int64_t rows_of_tile(int64_t fit, int64_t rows)
{
    if (fit < UPIPE_SUM_ROWS) fit = UPIPE_SUM_ROWS;
    return fit >= rows ? rows : fit / UPIPE_SUM_ROWS * UPIPE_SUM_ROWS;
}

/* A tile's rows are those of the header: by default D, or D * D / vocab but UPIPE_TILE_LOSS_ROWS to D;
 * otherwise as many as fit the budget; all there are, or a multiple of UPIPE_SUM_ROWS. */
static void test_tile_rows(void)
{
    static const int rows_of[] = {1, 63, 64, 65, 100, 500}, widths[] = {1, 30, 100, 900};
    int dim;
    for (int kind = 0; kind < 8; ++kind)
        for (int i = 0; i < 6; ++i)
            for (int j = 0; j < 4; ++j)
                for (int backward = 0; backward < 2; ++backward) {
                    const int dims[] = {8, 96, 200};
                    int64_t want, square;
                    tile_case t;
                    tile_args a;
                    f32_tile got;
                    int32_t targets[500] = {0};
                    size_t tensors, row;
                    dim = dims[(i + j) % 3];
                    t = make_case(kind & 1, rows_of[i], dim, widths[j], (upipe_dtype)(kind >> 1 & 1));
                    if (kind & 1) t.shape.targets = targets;
                    t.shape.normed = kind >> 2;
                    f32_tile_make(&t.shape, &t.in);
                    args_make(&t, &got, &a);
                    square = (int64_t)dim * dim / widths[j];
                    if (square > dim) square = dim;
                    want = rows_of_tile(kind & 1 ? (square < 64 ? 64 : square) : dim, rows_of[i]);
                    row = row_bytes(&t.shape, backward);
                    CHECK_INT(traced_rows(&t, &a, backward, &tensors), want);
                    CHECK_INT(tensors, (size_t)want * row);
                    a.mlp.tile_bytes = a.head.tile_bytes = 191 * row + row - 1;
                    want = rows_of_tile(191, rows_of[i]);
                    CHECK_INT(traced_rows(&t, &a, backward, &tensors), want);
                    CHECK_INT(tensors, (size_t)want * row);
                    want = rows_of_tile(UPIPE_SUM_ROWS, rows_of[i]);
                    a.mlp.tile_bytes = a.head.tile_bytes = row * (size_t)want;
                    CHECK_INT(traced_rows(&t, &a, backward, &tensors), want);
                    a.mlp.tile_bytes = a.head.tile_bytes = SIZE_MAX;
                    CHECK_INT(traced_rows(&t, &a, backward, &tensors), rows_of[i]);
                }
}

/* Bytes of the head's weights and of their f32 gradient that products read and write. */
static struct {
    int64_t vocab, bytes;
} head_traffic;

static upipe_status counted_gemm(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                                 void *work, size_t work_bytes)
{
    (void)c, (void)a, (void)flags, (void)work, (void)work_bytes;
    if (b.n == head_traffic.vocab) head_traffic.bytes += b.n * b.d * (int64_t)upipe_dtype_bytes(b.dtype);
    if (out.n == head_traffic.vocab)
        head_traffic.bytes += 2 * out.n * out.d * (int64_t)upipe_dtype_bytes(out.dtype);
    return UPIPE_OK;
}

/* Rows of the default tile at the sizes of Llama3-8B, on the CPU and on a GPU. Whatever its rows a tile reads the head's
 * weights twice, and reads and writes their gradient: 49 MB a token with 128 rows, 6 MB with 1,024. */
static void test_loss_rows(void)
{
    enum { DIM = 4096, VOCAB = 128256, ROWS = 16384 };
    static const struct {
        int cuda, limited;
        int64_t forward, backward;
    } cases[] = {{0, 0, 128, 128}, {1, 0, 1600, 1024}, {0, 1, 256, 256}, {1, 1, 256, 256}};
    for (int i = 0; i < 4; ++i) {
        upipe_ops ops = cpu_table();
        upipe_loss head = {.w = &ops, .norm_weight = (const float *)&ops, .vocab = VOCAB, .norm_eps = 1e-5f};
        upipe_loss_grads grads = {(float *)&ops, (float *)&ops};
        upipe_view x = upipe_view_packed(&ops, UPIPE_BF16, ROWS, 1, DIM);
        const size_t row = DIM * 2 + VOCAB * 4, more = DIM * 4 + VOCAB * 2;
        upipe_status status;
        upipe_dry *dry;
        if (cases[i].cuda) upipe_cuda_plan_ops(&ops);
        dry = dry_begin(NULL, &ops, &status);
        CHECK(status == UPIPE_OK);
        for (int backward = 0; backward < 2; ++backward) {
            const int64_t rows = backward ? cases[i].backward : cases[i].forward;
            const size_t tensors = (size_t)rows * (row + (backward ? more : 0));
            head.tile_bytes = cases[i].limited ? tensors : 0;
            dry->mem.peak = 0;
            CHECK_STATUS(backward ? upipe_loss_bwd(&dry->ctx, &head, x, &grads, (float *)&ops, x,
                                                   (const int32_t *)&ops)
                                  : upipe_loss_fwd(&dry->ctx, &head, (float *)&ops, x, (const int32_t *)&ops),
                         UPIPE_OK, dry->ctx.err);
            CHECK_SAY(dry->mem.peak >= tensors && (!cases[i].cuda || dry->mem.peak == tensors),
                      "%zu bytes, not %zu", dry->mem.peak, tensors);
        }
        dry->ops.gemm = counted_gemm;
        head_traffic.vocab = VOCAB;
        head_traffic.bytes = 0;
        CHECK_STATUS(upipe_loss_bwd(&dry->ctx, &head, x, &grads, (float *)&ops, x, (const int32_t *)&ops),
                     UPIPE_OK, dry->ctx.err);
        /* a dry run goes through one tile */
        CHECK_INT(head_traffic.bytes, (int64_t)VOCAB * DIM * (2 + 2 + 4 + 4));
    }
}

/* A backend whose products each want scratch of their own, whatever the rows; self points to the seed. */
static size_t odd_gemm_bytes(const struct upipe_ops *ops, upipe_view out, upipe_view a, upipe_view b,
                             int flags)
{
    test_rng r;
    r.state = *(const uint64_t *)ops->self;
    if (out.n < 1 || a.n < 1) return 0;
    r.state = test_u64(&r) + (uint64_t)(out.d * 1000 + b.d);
    r.state = test_u64(&r) + (uint64_t)((flags & UPIPE_GEMM_TRANS_A ? 0 : b.n) * 1000);
    r.state = test_u64(&r) + (uint64_t)(flags * 10 + (int)out.dtype);
    return 64 * (size_t)(1 + test_below(&r, 1000));
}

/* Every product of a call finds the scratch that the table asks for. */
static void test_scratch(void)
{
    for (uint64_t seed = 0; seed < 256; ++seed) {
        f32_tile got;
        tile_case t = full_case((int)seed & 1, (upipe_dtype)(seed >> 1 & 1), 2 * UPIPE_SUM_ROWS + 7);
        tile_args a;
        upipe_ops ops = cpu_table();
        size_t bytes;
        ops.gemm_bytes = odd_gemm_bytes;
        ops.self = &seed;
        args_make(&t, &got, &a);
        call_dry(&ops, &t, &a, 0, &bytes);
        call_dry(&ops, &t, &a, 1, &bytes);
    }
}

/* ---- failures ---- */

/* Counts takes of the pool, or operations, and fails one of them. */
typedef struct fail_at {
    long count, at;
    upipe_ops ops; /* the real ones */
} fail_at;

static upipe_status fail_guard(void *user, size_t bytes, int use, const char *tag)
{
    fail_at *f = (fail_at *)user;
    (void)bytes;
    (void)use, (void)tag;
    return ++f->count == f->at ? UPIPE_ERR_MEMORY : UPIPE_OK;
}

static const upipe_ops *fail_op(upipe_ctx *c, upipe_status *s)
{
    fail_at *f = (fail_at *)c->user;
    *s =
        ++f->count == f->at ? upipe_fail(&c->err, UPIPE_ERR_BACKEND, "operation %ld fails", f->at) : UPIPE_OK;
    return &f->ops;
}

/* The operations of a tile: parameters and arguments behind the context. */
#define TILE_OPERATIONS(X)                                                                                \
    X(cast, (upipe_ctx * c, upipe_view dst, upipe_view src), (c, dst, src))                               \
    X(add, (upipe_ctx * c, upipe_view y, upipe_view x), (c, y, x))                                        \
    X(scale, (upipe_ctx * c, upipe_view y, upipe_view x, float factor), (c, y, x, factor))                \
    X(gemm, (upipe_ctx * c, upipe_view out, upipe_view a, upipe_view b, int flags, void *work, size_t n), \
      (c, out, a, b, flags, work, n))                                                                     \
    X(rmsnorm, (upipe_ctx * c, upipe_view y, upipe_view x, const float *w, float eps), (c, y, x, w, eps)) \
    X(rmsnorm_bwd,                                                                                        \
      (upipe_ctx * c, upipe_view dx, upipe_view dy, upipe_view x, const float *w, float eps, float *dw,   \
       int accumulate),                                                                                   \
      (c, dx, dy, x, w, eps, dw, accumulate))                                                             \
    X(gate, (upipe_ctx * c, upipe_gate_kind kind, upipe_view y, upipe_view gate, upipe_view up),          \
      (c, kind, y, gate, up))                                                                             \
    X(gate_bwd, (upipe_ctx * c, upipe_gate_kind kind, upipe_view gate, upipe_view up, upipe_view dy),     \
      (c, kind, gate, up, dy))                                                                            \
    X(cross_entropy, (upipe_ctx * c, const upipe_cross_entropy *x), (c, x))

#define FAIL_OP(name, parameters, arguments)            \
    static upipe_status fail_##name parameters          \
    {                                                   \
        upipe_status s;                                 \
        const upipe_ops *ops = fail_op(c, &s);          \
        return s != UPIPE_OK ? s : ops->name arguments; \
    }
TILE_OPERATIONS(FAIL_OP)
#define FAIL_SET(name, parameters, arguments) ops.name = fail_##name;

/* Fails every take or every operation of a call; a retry in the same pool succeeds with the right bits. */
static void check_failures(const tile_case *t, int backward, int operations)
{
    upipe_ops ops;
    f32_tile got, good;
    tile_args a;
    size_t bytes, need;
    long at;
    upipe_status s = UPIPE_ERR_ARG, want = operations ? UPIPE_ERR_BACKEND : UPIPE_ERR_MEMORY;
    fail_at f = {0};
    upipe_cpu_ops(&f.ops);
    run_tile(t, &good);
    ops = f.ops;
    if (operations) {
        TILE_OPERATIONS(FAIL_SET)
    }
    for (at = 1; at < 1000 && s != UPIPE_OK; ++at) {
        tile_pool p;
        int64_t serial;
        args_make(t, &got, &a);
        need = call_dry(&f.ops, t, &a, backward, &bytes);
        pool_make(&p, &ops, need);
        serial = p.mem.serial;
        f.count = 0;
        f.at = at;
        if (operations)
            p.ctx.user = &f;
        else
            p.mem.guard = fail_guard;
        p.mem.user = &f;
        s = call_tile(&p.ctx, t, &a, backward);
        if (s != UPIPE_OK) {
            CHECK_REFUSED(s, want, p.ctx.err, operations ? "operation" : "guard refused");
            CHECK_INT(p.mem.live, BEFORE);
            if (!operations) CHECK_INT(p.mem.serial - serial, at - 1);
        } else { /* it went through because none failed, not because one went unheard */
            CHECK_INT(f.count, at - 1);
        }
        f.at = 0;
        pool_end(&p);
        if (s == UPIPE_OK) break;
        /* the same pool after a failure, with gradients anew where operations had begun */
        args_make(t, &got, &a);
        pool_make(&p, &ops, need);
        p.ctx.user = p.mem.user = &f;
        if (!operations) p.mem.guard = fail_guard;
        f.count = 0;
        f.at = at;
        CHECK(call_tile(&p.ctx, t, &a, backward) == want);
        if (operations) args_make(t, &got, &a);
        CHECK_STATUS(call_tile(&p.ctx, t, &a, backward), UPIPE_OK, p.ctx.err);
        pool_end(&p);
        if (!a.loss && !backward) rows_widen(a.y, got.y);
        if (backward) rows_widen(a.dx, got.x);
        if (!backward && a.loss) CHECK_BYTES(got.loss, good.loss, t->shape.rows * 4);
        if (!backward && !a.loss) CHECK_BYTES(got.y, good.y, t->shape.rows * t->shape.dim * 4);
        if (backward && !a.loss) memcpy(got.y, good.y, (size_t)(t->shape.rows * t->shape.dim) * 4);
        if (backward) check_same(&t->shape, &good, &got, 0, "after a failure");
    }
    CHECK_SAY(at > (operations ? 4 : 2) && at < 1000, "%ld %s", at,
              operations ? "operations" : "allocations");
}

static void test_every_failure(void)
{
    for (int kind = 0; kind < 32; ++kind) {
        tile_case t = full_case(kind & 1, (upipe_dtype)(kind >> 1 & 1), 2 * UPIPE_SUM_ROWS + 7);
        if (kind & 16) without_norm(&t);
        if (kind & 16) t.shape.residual = 0;
        check_failures(&t, kind >> 2 & 1, kind >> 3 & 1);
    }
}

/* A slab that lacks a byte of the last block. */
static void test_slab_short(void)
{
    for (int kind = 0; kind < 4; ++kind) {
        f32_tile got;
        tile_case t = full_case(kind & 1, UPIPE_BF16, 40);
        tile_args a;
        tile_pool p;
        const upipe_ops ops = cpu_table();
        size_t bytes, need;
        args_make(&t, &got, &a);
        need = call_dry(&ops, &t, &a, kind >> 1, &bytes);
        pool_make(&p, &ops, need - 1);
        CHECK_REFUSED(call_tile(&p.ctx, &t, &a, kind >> 1), UPIPE_ERR_MEMORY, p.ctx.err, "do not fit");
        pool_end(&p);
    }
}

/* Every wrong argument has its sentence; nothing is taken, written or left. */
enum { FWD = 1, BWD = 2, BOTH = 3, MLP = 4, LOSS = 8, ANY = BOTH | MLP | LOSS };

static int32_t *wrong_target(int32_t value)
{
    static int32_t targets[2 * UPIPE_SUM_ROWS + 6];
    targets[2 * UPIPE_SUM_ROWS + 4] = value;
    return targets;
}

/* The calls, a part of the sentence, and what is wrong with the arguments. */
#define WRONGS(X)                                                                                         \
    X(ANY, "x is f32 [6][2][20], not f32 [6][1][20]", a->x.h = 2)                                         \
    X(ANY, "x is f32 [6][1][20] at NULL", a->x.data = NULL)                                               \
    X(ANY, "x is f32 [-6][1][20]", a->x.n = -6)                                                           \
    X(ANY, "x is f32 [6][1][0]", a->x.d = 0)                                                              \
    X(BOTH | MLP, "is f32 [5][1][20], not f32 [6][1][20]", written->n = a->dx.n = 5)                      \
    X(BWD | LOSS, "dx is f32 [5][1][20], not f32 [6][1][20]", written->n = a->dx.n = 5)                   \
    X(BOTH | MLP, "is f32 [6][1][19], not f32 [6][1][20]", written->d = a->dx.d = 19)                     \
    X(BWD | LOSS, "dx is f32 [6][1][19], not f32 [6][1][20]", written->d = a->dx.d = 19)                  \
    X(BOTH | MLP, "is bf16 [6][1][20], not f32 [6][1][20]", written->dtype = a->dx.dtype = UPIPE_BF16)    \
    X(BWD | LOSS, "dx is bf16 [6][1][20], not f32 [6][1][20]", written->dtype = a->dx.dtype = UPIPE_BF16) \
    X(BOTH | MLP, "is f32 [6][2][20], not f32 [6][1][20]", a->y.h = a->dx.h = 2)                          \
    X(BOTH | MLP, "is f32 [6][1][20] at NULL", a->y.data = a->dx.data = NULL)                             \
    X(BWD | LOSS, "dx is f32 [6][1][20] at NULL", a->y.data = a->dx.data = NULL)                          \
    X(BWD | MLP, "dy is f32 [5][1][20], not f32 [6][1][20]", a->dy.n = 5)                                 \
    X(BWD | MLP, "dy is bf16 [6][1][20], not f32 [6][1][20]", a->dy.dtype = UPIPE_BF16)                   \
    X(BWD | MLP, "dx is x", a->dx = a->x)                                                                 \
    X(BOTH | MLP, "w_gate, w_up or w_down is NULL", a->mlp.w_gate = NULL)                                 \
    X(BOTH | MLP, "w_gate, w_up or w_down is NULL", a->mlp.w_up = NULL)                                   \
    X(BOTH | MLP, "w_gate, w_up or w_down is NULL", a->mlp.w_down = NULL)                                 \
    X(BOTH | LOSS, "w, losses or targets is NULL", a->head.w = NULL)                                      \
    X(BOTH | LOSS, "w, losses or targets is NULL", a->losses = NULL)                                      \
    X(BOTH | LOSS, "w, losses or targets is NULL", a->targets = NULL)                                     \
    X(BOTH | MLP, "a hidden layer of 0 elements", a->mlp.hidden = a->head.vocab = 0)                      \
    X(BOTH | LOSS, "a vocabulary of 0", a->mlp.hidden = a->head.vocab = 0)                                \
    X(BOTH | MLP, "a hidden layer of 2147483648 elements",                                                \
      a->mlp.hidden = a->head.vocab = (int64_t)INT32_MAX + 1)                                             \
    X(BOTH | LOSS, "a vocabulary of 2147483648", a->mlp.hidden = a->head.vocab = (int64_t)INT32_MAX + 1)  \
    X(ANY, "norm_eps nan", a->mlp.norm_eps = a->head.norm_eps = NAN)                                      \
    X(ANY, "norm_eps inf", a->mlp.norm_eps = a->head.norm_eps = INFINITY)                                 \
    X(ANY, "norm_eps -1e-05", a->mlp.norm_eps = a->head.norm_eps = -1e-5f)                                \
    X(ANY, "norm_eps without the norm weight of a norm",                                                  \
      a->mlp.norm_weight = a->mlp.post_norm_weight = a->head.norm_weight = NULL,                          \
      a->mlp_grads.post_norm_weight = NULL)                                                               \
    X(BWD | MLP, "a gradient of the norm weight without", a->mlp.norm_weight = NULL)                      \
    X(BWD | MLP, "a gradient of the norm weight without", a->mlp.post_norm_weight = NULL)                 \
    X(BWD | MLP | LOSS, "a gradient of the norm weight without the norm weight of a norm",                \
      a->mlp.norm_weight = a->mlp.post_norm_weight = a->head.norm_weight = NULL,                          \
      a->mlp.norm_eps = a->head.norm_eps = 0)                                                             \
    X(BOTH | LOSS, "scale nan", a->head.scale = NAN)                                                      \
    X(BOTH | LOSS, "scale -inf", a->head.scale = -INFINITY)                                               \
    X(BOTH | MLP, "result_scale nan", a->mlp.result_scale = NAN)                                          \
    X(BOTH | LOSS, "logit_scale inf", a->head.logit_scale = INFINITY)                                     \
    X(BOTH | LOSS, "logit_softcap -1", a->head.logit_softcap = -1)                                        \
    X(ANY, "tile_bytes allows", a->mlp.tile_bytes = a->head.tile_bytes = 1)                               \
    X(BOTH | LOSS, "target 37 ", a->targets = wrong_target(37))                                           \
    X(BOTH | LOSS, "target 2147483647 ", a->targets = wrong_target(INT32_MAX))                            \
    X(BOTH | LOSS, "in the tile from row 128 on: ", a->targets = wrong_target(37))

static const struct {
    int calls; /* which of the four */
    const char *words;
} wrongs[] = {
#define WRONG_ROW(calls, words, ...) {calls, words},
    WRONGS(WRONG_ROW)};

static void wrong_apply(int i, tile_args *a)
{
    upipe_view *written = a->loss ? &a->dx : &a->y;
#define WRONG_CHANGE(calls, words, ...) \
    if (i-- == 0) __VA_ARGS__;
    WRONGS(WRONG_CHANGE)
}

static void test_wrong(void)
{
    const upipe_ops ops = cpu_table();
    for (int i = 0; i < (int)(sizeof wrongs / sizeof *wrongs); ++i)
        for (int loss = 0; loss < 2; ++loss)
            for (int backward = 0; backward < 2; ++backward) {
                f32_tile got;
                const int64_t rows = i < 39 ? 6 : 2 * UPIPE_SUM_ROWS + 6;
                tile_case t = full_case(loss, UPIPE_F32, rows);
                tile_args a;
                tile_pool p;
                if (!(wrongs[i].calls & (loss ? LOSS : MLP)) || !(wrongs[i].calls & (backward ? BWD : FWD)))
                    continue;
                t.tile_bytes = i < 39 ? 0 : UPIPE_SUM_ROWS * row_bytes(&t.shape, 1);
                args_make(&t, &got, &a);
                wrong_apply(i, &a);
                pool_make(&p, &ops, 1 << 20);
                CHECK_REFUSED(call_tile(&p.ctx, &t, &a, backward), UPIPE_ERR_ARG, p.ctx.err, wrongs[i].words);
                CHECK_TEXT(p.ctx.err.text, i >= 39 ? "of 37 columns"
                                           : loss  ? (backward ? "loss_bwd: " : "loss_fwd: ")
                                                   : (backward ? "mlp_bwd: " : "mlp_fwd: "));
                if (i < 39) CHECK_INT(p.mem.serial, 1);
                if (i == 38) { /* the numbers of a tile that does not fit */
                    char words[80];
                    snprintf(words, sizeof words, "a tile of 6 rows takes %zu bytes, tile_bytes allows 1",
                             6 * row_bytes(&t.shape, backward));
                    CHECK_TEXT(p.ctx.err.text, words);
                    a.mlp.tile_bytes = a.head.tile_bytes = 6 * row_bytes(&t.shape, backward) - 1;
                    CHECK_STATUS(call_tile(&p.ctx, &t, &a, backward), UPIPE_ERR_ARG, p.ctx.err);
                    a.mlp.tile_bytes = a.head.tile_bytes = 6 * row_bytes(&t.shape, backward);
                    CHECK_STATUS(call_tile(&p.ctx, &t, &a, backward), UPIPE_OK, p.ctx.err);
                }
                pool_end(&p);
            }
}

/* Views over each other that are not the same rows. */
static void test_overlapping(void)
{
    const upipe_ops ops = cpu_table();
    for (int kind = 1; kind < 4; ++kind) {
        f32_tile got;
        tile_case t = full_case(kind >= 2 ? kind & 1 : 0, UPIPE_F32, 6);
        tile_args a;
        tile_pool p;
        upipe_status s;
        t.gap = 1;
        args_make(&t, &got, &a);
        pool_make(&p, &ops, 1 << 20);
        if (kind == 1) {
            a.y = a.x;
            a.y.n_stride = t.shape.dim;
            s = upipe_mlp_fwd(&p.ctx, &a.mlp, a.y, a.x);
        } else {
            upipe_view over = kind == 2 ? a.dy : a.x;
            over.n_stride = t.shape.dim;
            s = kind == 2 ? upipe_mlp_bwd(&p.ctx, &a.mlp, over, &a.mlp_grads, a.dy, a.x)
                          : upipe_loss_bwd(&p.ctx, &a.head, over, &a.head_grads, a.losses, a.x, a.targets);
        }
        CHECK_REFUSED(s, UPIPE_ERR_ARG, p.ctx.err,
                      kind == 2   ? "dx, of stride 20, lies over dy, of stride 22"
                      : kind == 1 ? "y, of stride 20, lies over x, of stride 21"
                                  : "dx, of stride 20, lies over x, of stride 21");
        CHECK_INT(p.mem.serial, 1);
        pool_end(&p);
    }
}

/* A default tile whose bytes 63 bits do not hold. */
static void test_overflow(void)
{
    const upipe_ops ops = cpu_table();
    upipe_mlp mlp = {.w_gate = &ops, .w_up = &ops, .w_down = &ops, .hidden = INT32_MAX};
    upipe_mlp_grads none = {0};
    char from, to;
    const upipe_view x = upipe_view_packed(&from, UPIPE_F32, (int64_t)1 << 40, 1, INT32_MAX);
    const upipe_view y = upipe_view_packed(&to, UPIPE_F32, (int64_t)1 << 40, 1, INT32_MAX);
    tile_pool p;
    pool_make(&p, &ops, 1024);
    CHECK_REFUSED(upipe_mlp_fwd(&p.ctx, &mlp, y, x), UPIPE_ERR_OVERFLOW, p.ctx.err, "mlp_fwd: a tile of ");
    CHECK_REFUSED(upipe_mlp_bwd(&p.ctx, &mlp, y, &none, y, x), UPIPE_ERR_OVERFLOW, p.ctx.err,
                  "mlp_bwd: a tile of ");
    CHECK_INT(p.mem.serial, 1);
    pool_end(&p);
}

/* No rows: nothing is read, taken or written, wherever the views point. */
static void test_no_rows(void)
{
    const upipe_ops ops = cpu_table();
    for (int kind = 0; kind < 8; ++kind) {
        f32_tile got;
        tile_case t = full_case(kind & 1, (upipe_dtype)(kind >> 1 & 1), 6);
        tile_args a;
        tile_pool p;
        int64_t i, touched = 0;
        args_make(&t, &got, &a);
        a.x.n = a.y.n = a.dx.n = a.dy.n = 0;
        if (kind & 4) {
            a.x.data = a.y.data = a.dx.data = a.dy.data = NULL;
            a.losses = NULL;
            a.targets = NULL;
        }
        pool_make(&p, &ops, 1024);
        CHECK_STATUS(call_tile(&p.ctx, &t, &a, 0), UPIPE_OK, p.ctx.err);
        CHECK_STATUS(call_tile(&p.ctx, &t, &a, 1), UPIPE_OK, p.ctx.err);
        CHECK_INT(p.mem.serial, 1);
        pool_end(&p);
#define UNTOUCHED(name) \
    for (i = 0; i < tile_count(&t.shape, #name); ++i) touched += got.name[i] != 0;
        TILE_RESULTS(UNTOUCHED)
#undef UNTOUCHED
        CHECK_INT(touched, 0);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_finite_differences());
    TEST(test_random());
    TEST(test_tiles());
    TEST(test_accumulates());
    TEST(test_unwanted());
    TEST(test_scale());
    TEST(test_ignored());
    TEST(test_tile_rows());
    TEST(test_loss_rows());
    TEST(test_scratch());
    TEST(test_every_failure());
    TEST(test_slab_short());
    TEST(test_wrong());
    TEST(test_overlapping());
    TEST(test_overflow());
    TEST(test_no_rows());
    return test_end("mlp");
}
