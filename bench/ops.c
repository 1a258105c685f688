/* ops.c -- the compute table's row operations and the all-to-all of thread ranks, beside memcpy
 *
 * What bench/ops.py calls through a shared object. With kernels.c, whose handle has the threads:
 *
 *     const char *why = ops_call(b, &c, op);                NULL: done
 *     double seconds = ops_seconds(b, &c, op, turns);       of `turns` calls; negative: one failed
 */
#include "kernels.c"

#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe_a2a.h"
#include "upipe/upipe_reduce.h"

enum { OPS_HEAD = 128, OPS_SLOTS = 6, OPS_PARTS = 4 };

typedef enum ops_op {
    OPS_MEMCPY,
    OPS_COPY,
    OPS_ZERO,
    OPS_NARROW,
    OPS_WIDEN,
    OPS_ROPE,
    OPS_ROPE_INTERLEAVED,
    OPS_RMSNORM,
    OPS_RMSNORM_BWD,
    OPS_ROWDOT,
    OPS_SUM,
    OPS_ADD,
    OPS_SWIGLU,
    OPS_SWIGLU_BWD,
    OPS_GLU,
    OPS_GLU_BWD,
    OPS_CROSS_ENTROPY,
    OPS_EMBED,
    OPS_EMBED_BWD,
    OPS_TOTAL,
    OPS_ADAMW
} ops_op;

/* ops_case -- operands of all operations
 *   slots                 rows * d elements each, of the type that the operation has there: ops_run
 *   weight dweight        [d] of the norm
 *   loss tokens targets   [rows]; tokens below rows, targets below d
 *   total                 what OPS_TOTAL gives
 */
typedef struct ops_case {
    char *slots[OPS_SLOTS];
    float *weight, *dweight, *loss;
    const int32_t *tokens, *targets;
    double total;
    int64_t rows;
    int32_t d, dtype;
} ops_case;

static upipe_view ops_rows(const ops_case *given, int slot, upipe_dtype dtype)
{
    return upipe_view_packed(given->slots[slot], dtype, given->rows, 1, given->d);
}

/* The same memory as heads of 128, which d is a multiple of. */
static upipe_view ops_heads(const ops_case *given, int slot)
{
    return upipe_view_packed(given->slots[slot], (upipe_dtype)given->dtype, given->rows, given->d / OPS_HEAD,
                             OPS_HEAD);
}

typedef struct ops_piece {
    char *to, *from;
    size_t bytes;
    int32_t count;
} ops_piece;

static void ops_memcpy_piece(void *arg, int32_t i)
{
    const ops_piece *p = (const ops_piece *)arg;
    size_t each = p->bytes / (size_t)p->count, first = (size_t)i * each;
    memcpy(p->to + first, p->from + first, i + 1 == p->count ? p->bytes - first : each);
}

static upipe_status ops_memcpy(bench *b, const ops_case *given)
{
    ops_piece p;
    p.to = given->slots[1];
    p.from = given->slots[0];
    p.bytes = (size_t)(given->rows * given->d) * upipe_dtype_bytes((upipe_dtype)given->dtype);
    p.count = b->par.workers;
    b->par.run(b->par.self, p.count, ops_memcpy_piece, &p);
    return UPIPE_OK;
}

static upipe_status ops_rope(bench *b, const ops_case *given, int interleaved)
{
    upipe_rope r;
    memset(&r, 0, sizeof r);
    r.x = ops_heads(given, 0);
    r.count = 1;
    r.theta = 500000;
    r.interleaved = interleaved;
    return b->ops.rope(&b->ctx, &r);
}

static upipe_status ops_cross_entropy(bench *b, const ops_case *given)
{
    upipe_cross_entropy x;
    memset(&x, 0, sizeof x);
    x.logits = ops_rows(given, 0, UPIPE_F32);
    x.grad = ops_rows(given, 1, (upipe_dtype)given->dtype);
    x.loss = given->loss;
    x.targets = given->targets;
    x.scale = 1;
    return b->ops.cross_entropy(&b->ctx, &x);
}

static upipe_status ops_adamw(bench *b, const ops_case *given)
{
    upipe_adamw a;
    memset(&a, 0, sizeof a);
    a.w = (float *)(void *)given->slots[0];
    a.m = (float *)(void *)given->slots[1];
    a.v = (float *)(void *)given->slots[2];
    a.g = (const float *)(const void *)given->slots[3];
    a.copy = given->slots[4];
    a.copy_dtype = (upipe_dtype)given->dtype;
    a.n = given->rows * given->d;
    a.step = 10;
    a.rate = 1e-3;
    a.beta1 = 0.9;
    a.beta2 = 0.95;
    a.eps = 1e-8;
    a.decay = 0.1;
    a.grad_scale = 1;
    return b->ops.adamw(&b->ctx, &a);
}

static upipe_status ops_run(bench *b, ops_case *given, ops_op op)
{
    upipe_ctx *c = &b->ctx;
    const upipe_ops *o = &b->ops;
    upipe_dtype t = (upipe_dtype)given->dtype;
    size_t bytes = (size_t)(given->rows * given->d) * upipe_dtype_bytes(t);
    upipe_view x = ops_rows(given, 0, t), y = ops_rows(given, 1, t), z = ops_rows(given, 2, t), dot;
    switch (op) {
    case OPS_MEMCPY:
        return ops_memcpy(b, given);
    case OPS_COPY:
        return o->copy(c, y.data, x.data, bytes);
    case OPS_ZERO:
        return o->zero(c, y.data, bytes);
    case OPS_NARROW:
        return o->cast(c, y, ops_rows(given, 0, UPIPE_F32));
    case OPS_WIDEN:
        return o->cast(c, ops_rows(given, 1, UPIPE_F32), x);
    case OPS_ROPE:
        return ops_rope(b, given, 0);
    case OPS_ROPE_INTERLEAVED:
        return ops_rope(b, given, 1);
    case OPS_RMSNORM:
        return o->rmsnorm(c, y, x, given->weight, 1e-5f);
    case OPS_RMSNORM_BWD:
        return o->rmsnorm_bwd(c, z, y, x, given->weight, 1e-5f, given->dweight, 0);
    case OPS_ROWDOT:
        dot = upipe_view_packed(given->slots[2], UPIPE_F32, given->rows, given->d / OPS_HEAD, 1);
        return o->rowdot(c, dot, ops_heads(given, 0), ops_heads(given, 1));
    case OPS_SUM:
        return o->sum(c, ops_rows(given, 5, t), (const float *)(const void *)given->slots[0],
                      (given->slots[1] - given->slots[0]) / (int64_t)sizeof(float), OPS_PARTS, 0);
    case OPS_ADD:
        return o->add(c, y, x);
    case OPS_SWIGLU:
        return o->gate(c, UPIPE_GATE_SILU, z, x, y);
    case OPS_SWIGLU_BWD:
        return o->gate_bwd(c, UPIPE_GATE_SILU, x, y, z);
    case OPS_GLU:
        return o->gate(c, UPIPE_GATE_SIGMOID, z, x, y);
    case OPS_GLU_BWD:
        return o->gate_bwd(c, UPIPE_GATE_SIGMOID, x, y, z);
    case OPS_CROSS_ENTROPY:
        return ops_cross_entropy(b, given);
    case OPS_EMBED:
        return o->embed(c, y, x, given->tokens);
    case OPS_EMBED_BWD:
        return o->embed_bwd(c, ops_rows(given, 1, UPIPE_F32), x, given->tokens);
    case OPS_TOTAL:
        return o->total(c, &given->total, x, 1);
    case OPS_ADAMW:
        return ops_adamw(b, given);
    }
    return UPIPE_ERR_ARG;
}

/* One call. The operands lie in the slots 0, 1, ... in the order of the entry's arguments, results last. */
const char *ops_call(bench *b, ops_case *given, int32_t op)
{
    return ops_run(b, given, (ops_op)op) == UPIPE_OK ? NULL : b->ctx.err.text;
}

/* A gradient in place would fade to numbers so small that the processor takes its time over them: its
 * operands are made anew before each call, outside the time. */
double ops_seconds(bench *b, ops_case *given, int32_t op, int32_t turns)
{
    const int fades = op == OPS_SWIGLU_BWD || op == OPS_GLU_BWD;
    double sum = 0, start = now();
    int32_t i;
    for (i = 0; i < turns; ++i) {
        if (fades) {
            memcpy(given->slots[0], given->slots[3],
                   (size_t)(given->rows * given->d) * upipe_dtype_bytes((upipe_dtype)given->dtype));
            memcpy(given->slots[1], given->slots[4],
                   (size_t)(given->rows * given->d) * upipe_dtype_bytes((upipe_dtype)given->dtype));
            start = now();
        }
        if (ops_run(b, given, (ops_op)op) != UPIPE_OK) return -1;
        if (fades) sum += now() - start;
    }
    return fades ? sum : now() - start;
}

/* ---- the all-to-all ---- */

typedef struct ops_team {
    upipe_threads threads;
    upipe_ops ops;
    char *send, *recv; /* [ranks][ranks][block] */
    size_t block;
    int32_t ranks, turns, plain;
    double seconds;
} ops_team;

/* `turns` all-to-alls, or as many copies of the same blocks by the rank on its own. */
static upipe_status ops_rank(void *user, int rank)
{
    ops_team *t = (ops_team *)user;
    size_t whole = t->block * (size_t)t->ranks;
    char *send = t->send + (size_t)rank * whole, *recv = t->recv + (size_t)rank * whole;
    upipe_plan plan;
    upipe_plan_desc one_each;
    upipe_ctx c;
    double start;
    int32_t i, r;
    memset(&c, 0, sizeof c);
    c.ops = &t->ops;
    c.team = upipe_threads_comm(&t->threads, rank);
    /* one token and one head a rank: a block of any size */
    memset(&one_each, 0, sizeof one_each);
    one_each.tokens = one_each.ranks = one_each.heads = t->ranks;
    one_each.head_dim = 1;
    one_each.rank = rank;
    UPIPE_TRY(upipe_plan_init(&plan, &one_each, &c.err));
    UPIPE_TRY(upipe_comm_barrier(&c, c.team));
    start = now();
    for (i = 0; i < t->turns; ++i) {
        if (!t->plain) {
            UPIPE_TRY(upipe_a2a_to_heads(&c, recv, send, &plan, 0, UPIPE_A2A_Q, t->block));
            continue;
        }
        for (r = 0; r < t->ranks; ++r)
            memcpy(recv + (size_t)r * t->block, send + (size_t)r * t->block, t->block);
    }
    UPIPE_TRY(upipe_comm_barrier(&c, c.team));
    if (rank == 0) t->seconds = now() - start;
    return UPIPE_OK;
}

/* Seconds of `turns` all-to-alls of ranks * ranks blocks, or (plain) of as many blocks copied by as many
 * threads; negative: failed. The first all-to-all is checked. */
double ops_all_to_all(int32_t ranks, int64_t block, int32_t turns, int32_t plain)
{
    ops_team t;
    upipe_err e;
    size_t bytes = (size_t)ranks * (size_t)ranks * (size_t)block, i;
    int from, to;
    memset(&t, 0, sizeof t);
    t.send = (char *)malloc(bytes);
    t.recv = (char *)malloc(bytes);
    t.block = (size_t)block;
    t.ranks = ranks;
    t.turns = turns;
    t.plain = plain;
    t.seconds = -1;
    upipe_cpu_ops(&t.ops);
    if (t.send != NULL && t.recv != NULL && upipe_threads_init(&t.threads, ranks, 0, &e) == UPIPE_OK) {
        for (i = 0; i < bytes; ++i) t.send[i] = (char)(i / t.block * 31 + i % t.block);
        memset(t.recv, 0, bytes);
        if (upipe_threads_run(&t.threads, ops_rank, &t, NULL, NULL) != UPIPE_OK) t.seconds = -1;
        for (to = 0; to < ranks && !plain; ++to)
            for (from = 0; from < ranks; ++from)
                if (memcmp(t.recv + (size_t)(to * ranks + from) * t.block,
                           t.send + (size_t)(from * ranks + to) * t.block, t.block) != 0)
                    t.seconds = -1;
        upipe_threads_free(&t.threads);
    }
    free(t.send);
    free(t.recv);
    return t.seconds;
}
