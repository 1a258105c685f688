/* 15_own_kernel.c -- Megatron's tensors, and an attention kernel of the trainer's own between the all-to-alls
 *
 *     cc -O2 -march=native -I . examples/15_own_kernel.c -lm -pthread && ./a.out
 *
 * Q, K and V come out of one projection as [tokens][batch][heads][3][dim]. A stage packs, sends and attends one head a
 * rank, and sends O back. The kernel sees [S][3][dim], one head of all tokens, as cuDNN and FlashAttention take it.
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

enum { RANKS = 4, SEQ = 48, BATCH = 2, HEADS = 8, DIM = 32, ROWS = SEQ / RANKS, STAGES = HEADS / RANKS };
enum { OUT = ROWS * BATCH * HEADS * DIM, QKV = 3 * OUT, SLAB = 1 << 20 };

/* What the trainer's kernel takes and leaves of one head: of a sequence and stage, on a rank. */
typedef struct one_head {
    float qkv[SEQ][3][DIM], o[SEQ][DIM], dqkv[SEQ][3][DIM], dout[SEQ][DIM], p[SEQ][SEQ];
} one_head;

/* in: the projection, and the gradient of O. own, lib: its gradient, and O, by the trainer's kernel and the library. */
typedef struct rank_data {
    upipe_plan plan;
    struct {
        float qkv[QKV], out[OUT];
    } in, own, lib;
    one_head heads[STAGES]; /* kept for the backward; a trainer may send Q, K and V again instead */
} rank_data;

static upipe_threads team;
static upipe_ops ops;
static rank_data ranks[RANKS];
static _Alignas(UPIPE_MEM_ALIGN) char slabs[RANKS][SLAB]; /* upipe_dry_qkv says the size to the byte */

/* The trainer's kernel: causal attention of one head, in loops that anyone may read. */
static float dot(const float *a, const float *b)
{
    float sum = 0;
    for (int c = 0; c < DIM; ++c) sum += a[c] * b[c];
    return sum;
}

static void add(float *to, float factor, const float *x)
{
    for (int c = 0; c < DIM; ++c) to[c] += factor * x[c];
}

static void attend(one_head *h)
{
    memset(h->o, 0, sizeof h->o);
    for (int i = 0; i < SEQ; ++i) {
        float sum = 0;
        for (int j = 0; j <= i; ++j) sum += h->p[i][j] = expf(dot(h->qkv[i][0], h->qkv[j][1]) / sqrtf(DIM));
        for (int j = 0; j <= i; ++j) add(h->o[i], h->p[i][j] /= sum, h->qkv[j][2]);
    }
}

static void attend_bwd(one_head *h)
{
    memset(h->dqkv, 0, sizeof h->dqkv);
    for (int i = 0; i < SEQ; ++i)
        for (int j = 0; j <= i; ++j) {
            const float dp = dot(h->dout[i], h->qkv[j][2]) - dot(h->dout[i], h->o[i]);
            add(h->dqkv[i][0], h->p[i][j] * dp / sqrtf(DIM), h->qkv[j][1]);
            add(h->dqkv[j][1], h->p[i][j] * dp / sqrtf(DIM), h->qkv[i][0]);
            add(h->dqkv[j][2], h->p[i][j], h->dout[i]);
        }
}

/* Sequence b of a [ROWS][BATCH][HEADS][w] tensor: a row step goes over the other sequences. */
static upipe_view sequence(float *data, int b, int w)
{
    return upipe_view_make(data + b * HEADS * w, UPIPE_F32, ROWS, BATCH * HEADS * w, HEADS, w, w);
}

/* From this rank's tokens of all heads to all tokens of this rank's head of the stage. */
static upipe_status to_heads(upipe_ctx *c, const upipe_plan *p, int stage, void *head, upipe_view tokens)
{
    float send[RANKS * ROWS * 3 * DIM];
    UPIPE_TRY(upipe_a2a_pack(c, send, p, stage, UPIPE_A2A_Q, tokens));
    return upipe_a2a_to_heads(c, head, send, p, stage, UPIPE_A2A_Q, (size_t)tokens.d * sizeof(float));
}

static upipe_status to_tokens(upipe_ctx *c, const upipe_plan *p, int stage, upipe_view tokens, void *head)
{
    float got[RANKS * ROWS * 3 * DIM];
    UPIPE_TRY(upipe_a2a_to_tokens(c, got, head, p, stage, UPIPE_A2A_Q, (size_t)tokens.d * sizeof(float)));
    return upipe_a2a_unpack(c, tokens, p, stage, UPIPE_A2A_Q, got);
}

/* Forward and backward of one sequence with the trainer's kernel. */
static upipe_status own_kernel(upipe_ctx *c, rank_data *r, int b)
{
    for (int i = 0; i < r->plan.stages; ++i) {
        UPIPE_TRY(to_heads(c, &r->plan, i, r->heads[i].qkv, sequence(r->in.qkv, b, 3 * DIM)));
        attend(&r->heads[i]);
        UPIPE_TRY(to_tokens(c, &r->plan, i, sequence(r->own.out, b, DIM), r->heads[i].o));
    }
    for (int i = 0; i < r->plan.stages; ++i) {
        UPIPE_TRY(to_heads(c, &r->plan, i, r->heads[i].dout, sequence(r->in.out, b, DIM)));
        attend_bwd(&r->heads[i]);
        UPIPE_TRY(to_tokens(c, &r->plan, i, sequence(r->own.qkv, b, 3 * DIM), r->heads[i].dqkv));
    }
    return UPIPE_OK;
}

static upipe_status library(upipe_ctx *c, rank_data *r, int b)
{
    upipe_qkv call = {0}, a, d;
    upipe_qkv_grads g;
    upipe_saved saved;
    call.plan = &r->plan, call.mask.causal = 1;
    a = upipe_qkv_sbh3d(&call, r->in.qkv, r->lib.out, UPIPE_F32, BATCH, b); /* views: nothing is copied */
    d = upipe_qkv_sbh3d(&call, r->lib.qkv, r->in.out, UPIPE_F32, BATCH, b);
    g = upipe_qkv_grads_of(&d);
    UPIPE_TRY(upipe_qkv_fwd(c, &a, &saved));
    return upipe_qkv_bwd(c, &a, &g, &saved);
}

static upipe_status rank_main(void *user, int rank)
{
    rank_data *r = (rank_data *)user + rank;
    float *in = (float *)&r->in, *own = (float *)&r->own, *lib = (float *)&r->lib;
    upipe_mem_block blocks[64];
    upipe_mem mem;
    upipe_plan_desc d = {0};
    upipe_ctx c = {0};
    upipe_status s;
    upipe_mem_init(&mem, slabs[rank], SLAB, blocks, 64);
    c.ops = &ops, c.mem = &mem, c.team = upipe_threads_comm(&team, rank);
    d.tokens = SEQ, d.ranks = RANKS, d.rank = rank, d.heads = HEADS, d.head_dim = DIM; /* and batch 1 */
    s = upipe_plan_init(&r->plan, &d, &c.err);
    for (int i = 0; i < QKV + OUT; ++i) in[i] = (float)((rank + i) * 53 % 89 - 44) / 40;
    for (int b = 0; b < BATCH && s == UPIPE_OK; ++b) {
        s = own_kernel(&c, r, b);
        if (s == UPIPE_OK) s = library(&c, r, b);
    }
    for (int i = 0; i < QKV + OUT && s == UPIPE_OK; ++i)
        if (!(fabsf(own[i] - lib[i]) < 1e-5f)) /* nor is a NaN */
            s = upipe_fail(&c.err, UPIPE_ERR_MISMATCH, "%g is not %g", (double)own[i], (double)lib[i]);
    if (s != UPIPE_OK) upipe_comm_abort(c.team, c.err.text);
    return s;
}

int main(void)
{
    upipe_err err;
    upipe_cpu_ops(&ops);
    if (upipe_threads_init(&team, RANKS, 0, &err) || upipe_threads_run(&team, rank_main, ranks, NULL, &err))
        return fprintf(stderr, "%s\n", err.text), 1;
    upipe_threads_free(&team);
    printf("%d stages: the trainer's kernel and the library agree within 1e-5\n", ranks[0].plan.stages);
    return fflush(stdout) != 0;
}
