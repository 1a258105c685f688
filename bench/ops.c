/* ops.c -- the compute table's row operations and the all-to-all of thread ranks, beside memcpy
 *
 * bench/ops.py compiles it, once for each set of instructions, and loads it with ctypes:
 *
 *     ops_bench *b = ops_open(threads, rows, d, dtype);     NULL: no memory or no threads
 *     const char *why = ops_call(b, op);                    NULL: done
 *     double seconds = ops_seconds(b, op, turns);           of `turns` calls; negative: one failed
 *     ops_close(b);
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe_a2a.h"
#include "upipe/upipe_reduce.h"
#include "examples/common/pool.h"

enum { OPS_HEAD = 128, OPS_SLOTS = 6, OPS_PARTS = 4, OPS_BUF = 4096 };

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

/* Slots hold rows * d elements of up to four bytes each. Which operand lies where: ops_call. */
typedef struct ops_bench {
    pool threads;
    upipe_par par;
    upipe_ops ops;
    upipe_ctx ctx;
    char *buf;
    char *slots[OPS_SLOTS];
    float *norm_weight, *dnorm_weight; /* [d] */
    float *loss;                       /* [rows] */
    int32_t *tokens;                   /* [rows], below rows; they repeat where rows is a multiple of 5 */
    int32_t *targets;                  /* [rows], below d */
    double total;
    int64_t rows;
    int32_t d;
    upipe_dtype dtype;
} ops_bench;

static double now(void)
{
    return 1e-9 * (double)upipe_net_now();
}

void ops_close(ops_bench *b)
{
    pool_free(&b->threads);
    free(b->buf);
    free(b->norm_weight);
    free(b->dnorm_weight);
    free(b->loss);
    free(b->tokens);
    free(b->targets);
    free(b);
}

ops_bench *ops_open(int32_t threads, int64_t rows, int32_t d, int32_t dtype)
{
    size_t slot = (size_t)(rows * d) * sizeof(float), n = (size_t)d * sizeof(float);
    ops_bench *b = (ops_bench *)calloc(1, sizeof *b);
    int64_t i;
    int s;
    if (b == NULL) return NULL;
    if (pool_init(&b->threads, threads) != 0) {
        free(b);
        return NULL;
    }
    b->buf = (char *)malloc(OPS_SLOTS * (slot + OPS_BUF));
    b->norm_weight = (float *)malloc(n);
    b->dnorm_weight = (float *)malloc(n);
    b->loss = (float *)malloc((size_t)rows * sizeof(float));
    b->tokens = (int32_t *)malloc((size_t)rows * sizeof(int32_t));
    b->targets = (int32_t *)malloc((size_t)rows * sizeof(int32_t));
    if (b->buf == NULL || b->norm_weight == NULL || b->dnorm_weight == NULL || b->loss == NULL ||
        b->tokens == NULL || b->targets == NULL) {
        ops_close(b);
        return NULL;
    }
    memset(b->buf, 0, OPS_SLOTS * (slot + OPS_BUF));
    /* a line apart within their pages, as blocks of a heap are: equal places would collide in the caches */
    for (s = 0; s < OPS_SLOTS; ++s) b->slots[s] = b->buf + (size_t)s * (slot + 5 * 64 + 64) + 64;
    for (i = 0; i < d; ++i) {
        b->norm_weight[i] = 1.0f + (float)(i % 7) / 16;
        b->dnorm_weight[i] = 0;
    }
    for (i = 0; i < rows; ++i) {
        b->tokens[i] = (int32_t)(i * 5 % rows);
        b->targets[i] = (int32_t)(i * 5 % d);
    }
    b->par = pool_par(&b->threads);
    upipe_cpu_ops(&b->ops);
    b->ops.par = &b->par;
    b->ctx.ops = &b->ops;
    b->rows = rows;
    b->d = d;
    b->dtype = (upipe_dtype)dtype;
    return b;
}

void *ops_slot(ops_bench *b, int32_t slot)
{
    return b->slots[slot];
}

float *ops_norm_weight(ops_bench *b, int32_t gradient)
{
    return gradient ? b->dnorm_weight : b->norm_weight;
}

float *ops_loss(ops_bench *b)
{
    return b->loss;
}

int32_t *ops_tokens(ops_bench *b, int32_t targets)
{
    return targets ? b->targets : b->tokens;
}

double ops_total(const ops_bench *b)
{
    return b->total;
}

/* Numbers between -1 and 1 of this type. */
void ops_fill(ops_bench *b, int32_t slot, int32_t dtype)
{
    uint32_t state = (uint32_t)slot * 977u + 1;
    int64_t i;
    for (i = 0; i < b->rows * b->d; ++i) {
        state = state * 1664525u + 1013904223u;
        upipe_cpu_put(b->slots[slot], (upipe_dtype)dtype, i, (float)(int32_t)state * 0x1p-31f);
    }
}

static upipe_view ops_rows(ops_bench *b, int slot, upipe_dtype dtype)
{
    return upipe_view_packed(b->slots[slot], dtype, b->rows, 1, b->d);
}

/* The same memory as heads of 128, which d is a multiple of. */
static upipe_view ops_heads(ops_bench *b, int slot)
{
    return upipe_view_packed(b->slots[slot], b->dtype, b->rows, b->d / OPS_HEAD, OPS_HEAD);
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

static upipe_status ops_memcpy(ops_bench *b)
{
    ops_piece p;
    p.to = b->slots[1];
    p.from = b->slots[0];
    p.bytes = (size_t)(b->rows * b->d) * upipe_dtype_bytes(b->dtype);
    p.count = b->par.workers;
    b->par.run(b->par.self, p.count, ops_memcpy_piece, &p);
    return UPIPE_OK;
}

static upipe_status ops_rope(ops_bench *b, int interleaved)
{
    upipe_rope r;
    memset(&r, 0, sizeof r);
    r.x = ops_heads(b, 0);
    r.count = 1;
    r.theta = 500000;
    r.interleaved = interleaved;
    return b->ops.rope(&b->ctx, &r);
}

static upipe_status ops_cross_entropy(ops_bench *b)
{
    upipe_cross_entropy x;
    memset(&x, 0, sizeof x);
    x.logits = ops_rows(b, 0, UPIPE_F32);
    x.grad = ops_rows(b, 1, b->dtype);
    x.loss = b->loss;
    x.targets = b->targets;
    x.scale = 1;
    return b->ops.cross_entropy(&b->ctx, &x);
}

static upipe_status ops_adamw(ops_bench *b)
{
    upipe_adamw a;
    memset(&a, 0, sizeof a);
    a.w = (float *)(void *)b->slots[0];
    a.m = (float *)(void *)b->slots[1];
    a.v = (float *)(void *)b->slots[2];
    a.g = (const float *)(const void *)b->slots[3];
    a.copy = b->slots[4];
    a.copy_dtype = b->dtype;
    a.n = b->rows * b->d;
    a.step = 10;
    a.rate = 1e-3;
    a.beta1 = 0.9;
    a.beta2 = 0.95;
    a.eps = 1e-8;
    a.decay = 0.1;
    a.grad_scale = 1;
    return b->ops.adamw(&b->ctx, &a);
}

static upipe_status ops_run(ops_bench *b, ops_op op)
{
    upipe_ctx *c = &b->ctx;
    const upipe_ops *o = &b->ops;
    upipe_dtype t = b->dtype;
    size_t bytes = (size_t)(b->rows * b->d) * upipe_dtype_bytes(t);
    upipe_view x = ops_rows(b, 0, t), y = ops_rows(b, 1, t), z = ops_rows(b, 2, t), dot;
    switch (op) {
    case OPS_MEMCPY:
        return ops_memcpy(b);
    case OPS_COPY:
        return o->copy(c, y.data, x.data, bytes);
    case OPS_ZERO:
        return o->zero(c, y.data, bytes);
    case OPS_NARROW:
        return o->cast(c, y, ops_rows(b, 0, UPIPE_F32));
    case OPS_WIDEN:
        return o->cast(c, ops_rows(b, 1, UPIPE_F32), x);
    case OPS_ROPE:
        return ops_rope(b, 0);
    case OPS_ROPE_INTERLEAVED:
        return ops_rope(b, 1);
    case OPS_RMSNORM:
        return o->rmsnorm(c, y, x, b->norm_weight, 1e-5f);
    case OPS_RMSNORM_BWD:
        return o->rmsnorm_bwd(c, z, y, x, b->norm_weight, 1e-5f, b->dnorm_weight, 0);
    case OPS_ROWDOT:
        dot = upipe_view_packed(b->slots[2], UPIPE_F32, b->rows, b->d / OPS_HEAD, 1);
        return o->rowdot(c, dot, ops_heads(b, 0), ops_heads(b, 1));
    case OPS_SUM:
        return o->sum(c, ops_rows(b, 5, t), (const float *)(const void *)b->slots[0],
                      (b->slots[1] - b->slots[0]) / (int64_t)sizeof(float), OPS_PARTS, 0);
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
        return ops_cross_entropy(b);
    case OPS_EMBED:
        return o->embed(c, y, x, b->tokens);
    case OPS_EMBED_BWD:
        return o->embed_bwd(c, ops_rows(b, 1, UPIPE_F32), x, b->tokens);
    case OPS_TOTAL:
        return o->total(c, &b->total, x, 1);
    case OPS_ADAMW:
        return ops_adamw(b);
    }
    return UPIPE_ERR_ARG;
}

/* One call. The operands lie in the slots 0, 1, ... in the order of the entry's arguments, results last. */
const char *ops_call(ops_bench *b, int32_t op)
{
    return ops_run(b, (ops_op)op) == UPIPE_OK ? NULL : b->ctx.err.text;
}

/* A gradient in place would fade to numbers so small that the processor takes its time over them: its
 * operands are made anew before each call, outside the time. */
double ops_seconds(ops_bench *b, int32_t op, int32_t turns)
{
    const int fades = op == OPS_SWIGLU_BWD || op == OPS_GLU_BWD;
    double sum = 0, start = now();
    int32_t i;
    for (i = 0; i < turns; ++i) {
        if (fades) {
            memcpy(b->slots[0], b->slots[3], (size_t)(b->rows * b->d) * upipe_dtype_bytes(b->dtype));
            memcpy(b->slots[1], b->slots[4], (size_t)(b->rows * b->d) * upipe_dtype_bytes(b->dtype));
            start = now();
        }
        if (ops_run(b, (ops_op)op) != UPIPE_OK) return -1;
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
