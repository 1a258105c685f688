/* test_rows.c -- the CPU row operations: lib/rows.h, the angles that rope walks along, the host's threads, those of
 * lib/train_ops.h too */
#include "lib/rows.h"
#include "lib/train_ops.h"
#include "lib/workers.h"

#include "upipe/cpu/upipe_cpu.h"
#include "upipe/cpu/upipe_cpu_rows.h"

/* Angles, in f64 and to the bit, belong to a position: it does not matter where the walk began, nor in what
 * steps it went. */
static void check_rope_angles(void)
{
    static const int64_t starts[] = {0, 1, 63, 64, 1000000 - 40}, steps[] = {1, 2, 7, 64, 1000};
    static upi_rope_angles walk, jump;
    float row[64];
    for (int which = 0; which < 25; ++which) {
        const int64_t start = starts[which % 5], step = steps[which / 5];
        upipe_rope call = rope_of(upipe_view_packed(row, UPIPE_F32, 1, 1, 64), start, 0, 0);
        upi_rope_begin(&walk, &call);
        for (int i = 0; i < 200; ++i, upi_rope_next(&walk, step)) {
            call.pos0 = start + i * step;
            upi_rope_begin(&jump, &call);
            CHECK_INT(walk.position, call.pos0);
            CHECK_BYTES(walk.cos_now, jump.cos_now, sizeof walk.cos_now);
            CHECK_BYTES(walk.sin_now, jump.sin_now, sizeof walk.sin_now);
            for (int p = 0; p < 32; ++p) {
                double angle = (double)call.pos0 * pow(10000, -2.0 * p / 64), near = 3e-14 + angle * 0x1p-52;
                CHECK(fabs(walk.cos_now[p] - cos(angle)) <= near &&
                      fabs(walk.sin_now[p] - sin(angle)) <= near);
            }
        }
    }
}

/* ---- the host's threads: enough rows for many items ---- */

/* clang-format off */
enum {
    COPY, ZERO, CAST, ROPE, ROPE_INTERLEAVED, RMSNORM, RMSNORM_BWD, RMSNORM_BWD_IN_PLACE, ROWDOT, SUM,
    ADD, SCALE, SILU, SILU_BWD, GELU, GELU_BWD, SIGMOID, SIGMOID_BWD, CROSS_ENTROPY, CAPPED_ENTROPY, EMBED, EMBED_BWD, TOTAL, ADAMW, ENTRIES, TRAIN_OPS = ADD
};
/* clang-format on */

enum { WIDE = 4 };

typedef struct operands {
    upipe_view y, a, b, out; /* of three types; rowdot's; y, a and out are written */
    upipe_view f[WIDE];      /* f32, packed, one head [n][1][h * d], written */
    const int32_t *tokens;   /* [n] */
    double total;
} operands;

static upipe_status run_entry(upipe_ctx *c, int entry, operands *o)
{
    const upipe_ops *ops = c->ops;
    const size_t y_bytes = view_bytes(o->y), a_bytes = view_bytes(o->a);
    float *f[WIDE];
    upipe_rope rope = rope_of(o->y, 1000, entry == ROPE_INTERLEAVED, 0);
    upipe_adamw w = adamw_of(elements(o->y), 3, 1);
    upipe_cross_entropy capped;
    for (int i = 0; i < WIDE; ++i) f[i] = (float *)o->f[i].data;
    rope.pos_step = 3;
    switch (entry) {
    case COPY:
        return ops->copy(c, o->y.data, o->a.data, y_bytes < a_bytes ? y_bytes : a_bytes);
    case ZERO:
        return ops->zero(c, o->y.data, y_bytes);
    case CAST:
        return ops->cast(c, o->y, o->a);
    case ROPE:
    case ROPE_INTERLEAVED:
        return ops->rope(c, &rope);
    case RMSNORM:
        return ops->rmsnorm(c, o->y, o->a, f[0], 1e-5f);
    case RMSNORM_BWD:
        return ops->rmsnorm_bwd(c, o->y, o->a, o->b, f[0], 1e-5f, f[1], 1);
    case RMSNORM_BWD_IN_PLACE:
        return ops->rmsnorm_bwd(c, o->y, o->y, o->b, f[0], 1e-5f, f[1], 0);
    case ROWDOT:
        return ops->rowdot(c, o->out, o->a, o->b);
    case SUM:
        return ops->sum(c, o->y, f[0], 0, 1, 0);
    case ADD:
        return ops->add(c, o->y, o->a);
    case SCALE:
        return ops->scale(c, o->y, o->a, 0.22f);
    case SILU:
        return ops->gate(c, UPIPE_GATE_SILU, o->y, o->a, o->b);
    case SILU_BWD:
        return ops->gate_bwd(c, UPIPE_GATE_SILU, o->y, o->a, o->b);
    case GELU:
        return ops->gate(c, UPIPE_GATE_GELU, o->y, o->a, o->b);
    case GELU_BWD:
        return ops->gate_bwd(c, UPIPE_GATE_GELU, o->y, o->a, o->b);
    case SIGMOID:
        return ops->gate(c, UPIPE_GATE_SIGMOID, o->y, o->a, o->b);
    case SIGMOID_BWD:
        return ops->gate_bwd(c, UPIPE_GATE_SIGMOID, o->y, o->a, o->b);
    case CROSS_ENTROPY:
        return cross_entropy(c, o->f[0], o->f[1], f[2], o->tokens, 0.5f);
    case CAPPED_ENTROPY:
        capped = cross_entropy_of(o->f[0], o->f[1], f[2], o->tokens, 0.5f);
        capped.softcap = 3;
        return ops->cross_entropy(c, &capped);
    case EMBED:
        return ops->embed(c, o->f[0], o->f[1], o->tokens);
    case EMBED_BWD:
        return ops->embed_bwd(c, o->f[0], o->f[1], o->tokens);
    case TOTAL:
        return ops->total(c, &o->total, o->y, 1);
    default:
        w.w = f[0], w.m = f[1], w.v = f[2], w.g = f[3];
        w.copy = o->y.data;
        w.copy_dtype = o->y.dtype;
        return ops->adamw(c, &w);
    }
}

/* Other memory for what is written. */
static operands operands_twin(const operands *o)
{
    operands t = *o;
    t.y = twin(o->y), t.a = twin(o->a), t.out = twin(o->out);
    for (int i = 0; i < WIDE; ++i) t.f[i] = twin(o->f[i]);
    return t;
}

static void operands_set(operands *t, const operands *o)
{
    memcpy(t->y.data, o->y.data, view_bytes(o->y));
    memcpy(t->a.data, o->a.data, view_bytes(o->a));
    memcpy(t->out.data, o->out.data, view_bytes(o->out));
    for (int i = 0; i < WIDE; ++i) memcpy(t->f[i].data, o->f[i].data, view_bytes(o->f[i]));
    t->total = o->total;
}

static int operands_same(const operands *s, const operands *t)
{
    int ok = same_bytes(s->y, t->y) && same_bytes(s->a, t->a) && same_bytes(s->out, t->out) &&
             memcmp(&s->total, &t->total, sizeof s->total) == 0;
    for (int i = 0; i < WIDE; ++i) ok = ok && same_bytes(s->f[i], t->f[i]);
    return ok;
}

/* Each entry with each kind of threads: the bits of one thread alone. */
static void check_workers(test_rng *r, int entry, int end, int64_t n, int h, int d, const upipe_dtype *type,
                          int layout)
{
    upipe_ops ops;
    operands o, alone, shared;
    int32_t *tokens = (int32_t *)buffer((size_t)n * sizeof *tokens);
    upipe_ctx c = {.ops = &ops};
    upipe_cpu_ops(&ops);
    o.y = tensor(r, type[0], n, h, d, layout, 1);
    o.a = tensor(r, type[1], n, h, d, (layout + 1) % LAYOUTS, 1);
    o.b = tensor(r, type[2], n, h, d, layout, 1);
    o.out = empty(UPIPE_F32, n, h, 1, layout);
    for (int i = 0; i < WIDE; ++i) o.f[i] = tensor(r, UPIPE_F32, n, 1, h * d, PACKED, 1);
    for (int64_t at = 0; at < elements(o.f[2]); ++at) put_at(o.f[2], at, fabs((double)get_at(o.f[2], at)));
    for (int64_t at = 0; at < n; ++at)
        tokens[at] = test_below(r, n < h * d ? (int)n : h * d); /* some come often */
    o.tokens = tokens;
    o.total = 0;
    alone = operands_twin(&o), shared = operands_twin(&o);
    for (; entry < end; ++entry) {
        operands_set(&alone, &o);
        ops.par = NULL;
        CHECK_STATUS(run_entry(&c, entry, &alone), UPIPE_OK, c.err);
        for (int kind = 0; kind < WORKERS_KINDS; ++kind) {
            host_threads w;
            operands_set(&shared, &o);
            workers_begin(&w, kind);
            ops.par = &w.par;
            CHECK_STATUS(run_entry(&c, entry, &shared), UPIPE_OK, c.err);
            CHECK_SAY(operands_same(&shared, &alone),
                      "entry %d, threads of kind %d, %lld x %d x %d, %s %s %s, layout %d", entry, kind,
                      (long long)n, h, d, upipe_dtype_name(type[0]), upipe_dtype_name(type[1]),
                      upipe_dtype_name(type[2]), layout);
            workers_end(&w);
        }
    }
    buffers_free(0);
}

static void check_all_workers(test_rng *r)
{
    static const upipe_dtype sets[][3] = {{UPIPE_F32, UPIPE_F32, UPIPE_F32},
                                          {UPIPE_BF16, UPIPE_BF16, UPIPE_BF16},
                                          {UPIPE_BF16, UPIPE_F32, UPIPE_BF16}};
    for (int i = 0; i < 3; ++i) {
        check_workers(r, 0, TRAIN_OPS, 333, 2, 138, sets[i], PACKED);
        check_workers(r, 0, TRAIN_OPS, 201, 3, 138, sets[i], HEADS_INNER + i);
        check_workers(r, TRAIN_OPS, ENTRIES, 117, 3, 301, sets[i], i);
        check_workers(r, TRAIN_OPS, ENTRIES, 9, 1, 12000, sets[i], PACKED); /* rows that are several items */
    }
    check_workers(r, 0, TRAIN_OPS, 3, 700, 34, sets[0],
                  HEADS_OUTER); /* heads in several calls, dweight in strips */
}

int main(int argc, char **argv)
{
    test_rng r;
    upipe_ops ops;
    upipe_ctx c = {0};
    upipe_cpu_ops(&ops);
    c.ops = &ops;
    r.state = (uint64_t)test_env("UPIPE_SEED", 1);
    printf("test_rows: %s, seed %llu\n", ops.name, (unsigned long long)r.state);
    test_begin(argc, argv);
    TEST(check_rows(&r, &c));
    TEST(check_rope_angles());
    TEST(check_all_workers(&r));
    TEST(check_row_statuses(&c));
    return test_end("test_rows");
}
