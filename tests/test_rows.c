/* test_rows.c -- the CPU row operations: lib/rows.h, the angles that rope walks along, the host's threads */
#include "lib/rows.h"
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
    int which, i, p;
    for (which = 0; which < 25; ++which) {
        const int64_t start = starts[which % 5], step = steps[which / 5];
        upipe_rope call = rope_of(upipe_view_packed(row, UPIPE_F32, 1, 1, 64), start, 0, 0);
        upi_rope_begin(&walk, &call);
        for (i = 0; i < 200; ++i, upi_rope_next(&walk, step)) {
            call.pos0 = start + i * step;
            upi_rope_begin(&jump, &call);
            CHECK_INT(walk.position, call.pos0);
            CHECK_BYTES(walk.cos_now, jump.cos_now, sizeof walk.cos_now);
            CHECK_BYTES(walk.sin_now, jump.sin_now, sizeof walk.sin_now);
            for (p = 0; p < 32; ++p) {
                double angle = (double)call.pos0 * pow(10000, -2.0 * p / 64), near = 3e-14 + angle * 0x1p-52;
                CHECK(fabs(walk.cos_now[p] - cos(angle)) <= near &&
                      fabs(walk.sin_now[p] - sin(angle)) <= near);
            }
        }
    }
}

/* ---- the host's threads: enough rows for many items ---- */

enum {
    COPY,
    ZERO,
    CAST,
    ROPE,
    ROPE_INTERLEAVED,
    RMSNORM,
    RMSNORM_BWD,
    RMSNORM_BWD_IN_PLACE,
    ROWDOT,
    SUM,
    ENTRIES
};

typedef struct operands {
    upipe_view y, a, b, out; /* y: the result, or both in place; out: rowdot's */
    float *weight, *dweight; /* dweight [h][d]; src of sum */
    size_t weights;
} operands;

static upipe_status run_entry(upipe_ctx *c, int entry, operands *o)
{
    upipe_rope rope = rope_of(o->y, 1000, entry == ROPE_INTERLEAVED, 0);
    const upipe_ops *ops = c->ops;
    switch (entry) {
    case COPY:
        return ops->copy(c, o->y.data, o->a.data,
                         view_bytes(o->y) < view_bytes(o->a) ? view_bytes(o->y) : view_bytes(o->a));
    case ZERO:
        return ops->zero(c, o->y.data, view_bytes(o->y));
    case CAST:
        return ops->cast(c, o->y, o->a);
    case ROPE:
    case ROPE_INTERLEAVED:
        return ops->rope(c, &rope);
    case RMSNORM:
        return ops->rmsnorm(c, o->y, o->a, o->weight, 1e-5f);
    case RMSNORM_BWD:
        return ops->rmsnorm_bwd(c, o->y, o->a, o->b, o->weight, 1e-5f, o->dweight, 1);
    case RMSNORM_BWD_IN_PLACE:
        return ops->rmsnorm_bwd(c, o->y, o->y, o->b, o->weight, 1e-5f, o->dweight, 0);
    case ROWDOT:
        return ops->rowdot(c, o->out, o->a, o->b);
    default:
        return ops->sum(c, o->y, o->dweight, 0, 1, 0);
    }
}

/* Each entry with each kind of threads: the bits of one thread alone. */
static void check_workers(test_rng *r, int64_t n, int h, int d, const upipe_dtype *type, int layout)
{
    upipe_ops ops;
    upipe_ctx c;
    operands o;
    float *dweight, *dweight_alone;
    size_t i;
    int entry, kind;
    memset(&c, 0, sizeof c);
    c.ops = &ops;
    upipe_cpu_ops(&ops);
    o.y = tensor(r, type[0], n, h, d, layout);
    o.a = tensor(r, type[1], n, h, d, (layout + 1) % LAYOUTS);
    o.b = tensor(r, type[2], n, h, d, layout);
    o.out = empty(UPIPE_F32, n, h, 1, layout);
    o.weights = (size_t)(n * h * d);
    o.weight = (float *)malloc(o.weights * sizeof *o.weight);
    dweight = (float *)malloc(o.weights * sizeof *o.weight);
    dweight_alone = (float *)malloc(o.weights * sizeof *o.weight);
    for (i = 0; i < o.weights; ++i) o.weight[i] = (float)test_normal(r);
    for (entry = 0; entry < ENTRIES; ++entry) {
        upipe_view y = o.y, out = o.out;
        operands alone = o;
        memcpy(dweight_alone, o.weight, o.weights * sizeof *dweight);
        alone.dweight = dweight_alone;
        alone.y = twin(y);
        alone.out = twin(out);
        ops.par = NULL;
        CHECK_STATUS(run_entry(&c, entry, &alone), UPIPE_OK, c.err);
        for (kind = 0; kind < WORKERS_KINDS; ++kind) {
            operands shared = o;
            host_threads w;
            workers_begin(&w, kind);
            memcpy(dweight, o.weight, o.weights * sizeof *dweight);
            shared.dweight = dweight;
            shared.y = twin(y);
            shared.out = twin(out);
            ops.par = &w.par;
            CHECK_STATUS(run_entry(&c, entry, &shared), UPIPE_OK, c.err);
            CHECK_SAY(memcmp(shared.y.data, alone.y.data, view_bytes(y)) == 0 &&
                          memcmp(shared.out.data, alone.out.data, view_bytes(out)) == 0 &&
                          memcmp(dweight, dweight_alone, o.weights * sizeof *dweight) == 0,
                      "entry %d, threads of kind %d, %lld x %d x %d, %s %s %s, layout %d", entry, kind,
                      (long long)n, h, d, upipe_dtype_name(type[0]), upipe_dtype_name(type[1]),
                      upipe_dtype_name(type[2]), layout);
            workers_end(&w);
            free(shared.y.data);
            free(shared.out.data);
        }
        free(alone.y.data);
        free(alone.out.data);
    }
    free(o.y.data);
    free(o.a.data);
    free(o.b.data);
    free(o.out.data);
    free(o.weight);
    free(dweight);
    free(dweight_alone);
}

static void check_all_workers(test_rng *r)
{
    static const upipe_dtype sets[][3] = {{UPIPE_F32, UPIPE_F32, UPIPE_F32},
                                          {UPIPE_BF16, UPIPE_BF16, UPIPE_BF16},
                                          {UPIPE_F16, UPIPE_F32, UPIPE_F16}};
    int i;
    for (i = 0; i < 3; ++i) {
        check_workers(r, 333, 2, 138, sets[i], PACKED);
        check_workers(r, 201, 3, 138, sets[i], HEADS_INNER + i);
    }
    check_workers(r, 3, 700, 34, sets[0], HEADS_OUTER); /* heads in several calls, dweight in strips */
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
    printf("test_rows: %s, seed %llu\n", ops.name, (unsigned long long)r.state);
    check_rows(&r, &c);
    check_rope_angles();
    check_all_workers(&r);
    check_row_statuses(&c);
    return test_end("test_rows");
}
