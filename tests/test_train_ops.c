/* test_train_ops.c -- the CPU operations around attention: train_ops.h, ids beyond their tables, threads
 * of the host */
#include "lib/train_ops.h"
#include "lib/workers.h"

#include "upipe/cpu/upipe_cpu.h"

/* A target or a token out of range is refused before anything is touched. */
static void check_ranges(upipe_ctx *c)
{
    float buf[64], loss[2] = {-7, -7};
    int32_t ids[2] = {1, 8};
    upipe_view x = upipe_view_packed(buf, UPIPE_F32, 2, 1, 8), y = x;
    int i;
    for (i = 0; i < 64; ++i) buf[i] = 5;
    y.data = buf + 32;
    CHECK_STATUS(cross_entropy(c, x, x, loss, ids, 1), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "target 8 of row 1, of 8 columns");
    CHECK(loss[0] == -7 && loss[1] == -7);
    ids[1] = 2;
    CHECK_STATUS(c->ops->embed(c, x, y, ids), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "embed: token 2 of row 1, of a table of 2 rows");
    CHECK_STATUS(c->ops->embed_bwd(c, y, x, ids), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "embed_bwd: token 2 of row 1, of a table of 2 rows");
    ids[1] = -1;
    CHECK_STATUS(c->ops->embed(c, x, y, ids), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "token -1 of row 1");
    CHECK_STATUS(c->ops->embed_bwd(c, y, x, ids), UPIPE_ERR_ARG, c->err);
    for (i = 0; i < 64; ++i) CHECK(buf[i] == 5);
}

/* ---- the host's threads: enough rows for many items ---- */

enum { ADD, SWIGLU, SWIGLU_BWD, CROSS_ENTROPY, EMBED, EMBED_BWD, TOTAL, ADAMW, ENTRIES };

typedef struct operands {
    upipe_view y, a, b;    /* y and a are written */
    upipe_view f[4];       /* f32, packed, one head, written */
    const int32_t *tokens; /* [y.n] */
    double total;
} operands;

static upipe_status run_entry(upipe_ctx *c, int entry, operands *o)
{
    upipe_adamw w = adamw_of(o->f[0].n * o->f[0].d, 3, 1);
    switch (entry) {
    case ADD:
        return c->ops->add(c, o->y, o->a);
    case SWIGLU:
        return c->ops->swiglu(c, o->y, o->a, o->b);
    case SWIGLU_BWD:
        return c->ops->swiglu_bwd(c, o->y, o->a, o->b);
    case CROSS_ENTROPY:
        return cross_entropy(c, o->f[0], o->f[1], (float *)o->f[2].data, o->tokens, 0.5f);
    case EMBED:
        return c->ops->embed(c, o->f[0], o->f[1], o->tokens);
    case EMBED_BWD:
        return c->ops->embed_bwd(c, o->f[0], o->f[1], o->tokens);
    case TOTAL:
        return c->ops->total(c, &o->total, o->y, 1);
    default:
        w.w = (float *)o->f[0].data;
        w.m = (float *)o->f[1].data;
        w.v = (float *)o->f[2].data;
        w.g = (const float *)o->f[3].data;
        w.copy = o->y.data;
        w.copy_dtype = o->y.dtype;
        w.n = elements(o->y) < w.n ? elements(o->y) : w.n;
        return c->ops->adamw(c, &w);
    }
}

static operands operands_twin(const operands *o)
{
    operands t = *o;
    int i;
    t.y = twin(o->y);
    t.a = twin(o->a);
    for (i = 0; i < 4; ++i) t.f[i] = twin(o->f[i]);
    return t;
}

static void operands_free(operands *o)
{
    int i;
    free(o->y.data);
    free(o->a.data);
    for (i = 0; i < 4; ++i) free(o->f[i].data);
}

static int operands_same(const operands *s, const operands *t)
{
    int i, ok = memcmp(s->y.data, t->y.data, view_bytes(s->y)) == 0 &&
                memcmp(s->a.data, t->a.data, view_bytes(s->a)) == 0 &&
                memcmp(&s->total, &t->total, sizeof s->total) == 0;
    for (i = 0; i < 4; ++i) ok &= memcmp(s->f[i].data, t->f[i].data, view_bytes(s->f[i])) == 0;
    return ok;
}

/* Each entry with each kind of threads: the bits of one thread alone. */
static void check_workers(test_rng *r, int64_t n, int h, int d, const upipe_dtype *type, int layout)
{
    upipe_ops ops;
    upipe_ctx c;
    operands o;
    int32_t *tokens = (int32_t *)malloc((size_t)n * sizeof *tokens);
    int64_t at;
    int i, entry, kind;
    memset(&c, 0, sizeof c);
    c.ops = &ops;
    upipe_cpu_ops(&ops);
    o.y = tensor(r, type[0], n, h, d, layout, 1);
    o.a = tensor(r, type[1], n, h, d, (layout + 1) % LAYOUTS, 1);
    o.b = tensor(r, type[2], n, h, d, layout, 1);
    for (i = 0; i < 4; ++i) o.f[i] = tensor(r, UPIPE_F32, n, 1, h * d, PACKED, 1);
    for (at = 0; at < elements(o.f[2]); ++at) put_at(o.f[2], at, fabs((double)get_at(o.f[2], at)));
    for (at = 0; at < n; ++at) tokens[at] = test_below(r, n < h * d ? (int)n : h * d); /* some come often */
    o.tokens = tokens;
    o.total = 0;
    for (entry = 0; entry < ENTRIES; ++entry) {
        operands alone = operands_twin(&o);
        ops.par = NULL;
        CHECK_STATUS(run_entry(&c, entry, &alone), UPIPE_OK, c.err);
        for (kind = 0; kind < WORKERS_KINDS; ++kind) {
            operands shared = operands_twin(&o);
            host_threads w;
            workers_begin(&w, kind);
            ops.par = &w.par;
            CHECK_STATUS(run_entry(&c, entry, &shared), UPIPE_OK, c.err);
            CHECK_SAY(operands_same(&shared, &alone),
                      "entry %d, threads of kind %d, %lld x %d x %d, %s %s %s, layout %d", entry, kind,
                      (long long)n, h, d, upipe_dtype_name(type[0]), upipe_dtype_name(type[1]),
                      upipe_dtype_name(type[2]), layout);
            workers_end(&w);
            operands_free(&shared);
        }
        operands_free(&alone);
    }
    operands_free(&o);
    free(o.b.data);
    free(tokens);
}

static void check_all_workers(test_rng *r)
{
    static const upipe_dtype sets[][3] = {{UPIPE_F32, UPIPE_F32, UPIPE_F32},
                                          {UPIPE_BF16, UPIPE_BF16, UPIPE_BF16},
                                          {UPIPE_F16, UPIPE_F32, UPIPE_F16}};
    int i;
    for (i = 0; i < 3; ++i) {
        check_workers(r, 117, 3, 301, sets[i], i);
        check_workers(r, 9, 1, 12000, sets[i], PACKED); /* rows that are several items */
    }
}

int main(void)
{
    test_rng r;
    upipe_ops ops;
    upipe_ctx c;
    memset(&c, 0, sizeof c);
    upipe_cpu_ops(&ops);
    c.ops = &ops;
    r.state = (uint64_t)test_env("UPIPE_SEED", 1);
    printf("test_train_ops: %s, seed %llu\n", ops.name, (unsigned long long)r.state);
    check_train_ops(&r, &c, 32003);
    check_train_statuses(&c);
    check_ranges(&c);
    check_all_workers(&r);
    return test_end("test_train_ops");
}
