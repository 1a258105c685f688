/* 15_own_kernel.c -- Megatron's tensors, and an attention kernel of the trainer's own between the all-to-alls
 *
 * Q, K and V come out of one projection as [tokens][batch][heads][3][dim]. A pass over a sequence transfers one head of each
 * rank a stage: packed, sent, attended, sent back, unpacked. The kernel sees [S][3][dim], one head of all tokens, which
 * cuDNN and FlashAttention take as it is; here it is plain loops. The library's own calls on the same tensors must agree.
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"
#include "upipe/cpu/upipe_cpu.h"

#include <math.h>

enum {
    RANKS = 4,
    SEQ = 48,
    BATCH = 2,
    HEADS = 8,
    HEAD_DIM = 32,
    ROWS = SEQ / RANKS,
    STAGES = HEADS / RANKS,
    BLOCKS = 64
};

typedef float qkv_t[ROWS][BATCH][HEADS][3][HEAD_DIM], out_t[ROWS][BATCH][HEADS][HEAD_DIM];

/* What the trainer's kernel takes and leaves of one head: of a sequence and stage, on a rank. */
typedef struct one_head {
    float qkv[SEQ][3][HEAD_DIM], o[SEQ][HEAD_DIM], dqkv[SEQ][3][HEAD_DIM], dout[SEQ][HEAD_DIM], lse[SEQ];
} one_head;

/* The trainer's tensors; own and lib are the results of its kernel and of the library's. */
typedef struct rank_tensors {
    qkv_t qkv, own_dqkv, lib_dqkv;
    out_t dout, own_o, lib_o;
    one_head stage[STAGES]; /* kept for the backward; a trainer may exchange Q, K and V again instead */
} rank_tensors;

typedef struct program {
    upipe_threads team;
    upipe_plan plan;
    upipe_ops ops;
    upipe_dry dry;
    rank_tensors rank[RANKS];
} program;

/* ---- the trainer's kernel: causal attention of one head, in two passes that anyone may read ---- */

static float dot(const float *a, const float *b)
{
    float sum = 0;
    for (int c = 0; c < HEAD_DIM; ++c) sum += a[c] * b[c];
    return sum;
}

static void add(float *to, float factor, const float *x)
{
    for (int c = 0; c < HEAD_DIM; ++c) to[c] += factor * x[c];
}

static void attend(one_head *h)
{
    const float scale = 1 / sqrtf(HEAD_DIM);
    memset(h->o, 0, sizeof h->o);
    for (int i = 0; i < SEQ; ++i) {
        float top = -INFINITY, sum = 0;
        for (int j = 0; j <= i; ++j) top = fmaxf(top, scale * dot(h->qkv[i][0], h->qkv[j][1]));
        for (int j = 0; j <= i; ++j) sum += expf(scale * dot(h->qkv[i][0], h->qkv[j][1]) - top);
        h->lse[i] = top + logf(sum);
        for (int j = 0; j <= i; ++j)
            add(h->o[i], expf(scale * dot(h->qkv[i][0], h->qkv[j][1]) - h->lse[i]), h->qkv[j][2]);
    }
}

static void attend_bwd(one_head *h)
{
    const float scale = 1 / sqrtf(HEAD_DIM);
    memset(h->dqkv, 0, sizeof h->dqkv);
    for (int i = 0; i < SEQ; ++i) {
        const float delta = dot(h->dout[i], h->o[i]);
        for (int j = 0; j <= i; ++j) {
            const float p = expf(scale * dot(h->qkv[i][0], h->qkv[j][1]) - h->lse[i]);
            const float ds = scale * p * (dot(h->dout[i], h->qkv[j][2]) - delta);
            add(h->dqkv[i][0], ds, h->qkv[j][1]);
            add(h->dqkv[j][1], ds, h->qkv[i][0]);
            add(h->dqkv[j][2], p, h->dout[i]);
        }
    }
}

/* ---- the all-to-alls ---- */

/* Sequence b of a [ROWS][BATCH][HEADS][width] tensor: a row step goes over the other sequences. */
static upipe_view sequence(float *data, int b, int width)
{
    return upipe_view_make(data + b * HEADS * width, UPIPE_F32, ROWS, BATCH * HEADS * width, HEADS, width,
                           width);
}

/* From this rank's tokens of all heads to all tokens of this rank's head of the stage. */
static upipe_status to_heads(upipe_ctx *c, const upipe_plan *p, int stage, void *head, upipe_view tokens)
{
    float send[RANKS * ROWS * 3 * HEAD_DIM];
    UPIPE_TRY(upipe_a2a_pack(c, send, p, stage, UPIPE_A2A_Q, tokens));
    return upipe_a2a_to_heads(c, head, send, p, stage, UPIPE_A2A_Q, (size_t)tokens.d * sizeof(float));
}

static upipe_status to_tokens(upipe_ctx *c, const upipe_plan *p, int stage, upipe_view tokens,
                              const void *head)
{
    float got[RANKS * ROWS * 3 * HEAD_DIM];
    UPIPE_TRY(upipe_a2a_to_tokens(c, got, head, p, stage, UPIPE_A2A_Q, (size_t)tokens.d * sizeof(float)));
    return upipe_a2a_unpack(c, tokens, p, stage, UPIPE_A2A_Q, got);
}

/* Forward and backward of one sequence with the trainer's kernel. */
static upipe_status own_kernel(upipe_ctx *c, const upipe_plan *p, rank_tensors *r, int b)
{
    one_head *heads = r->stage;
    for (int i = 0; i < p->stages; ++i) {
        UPIPE_TRY(to_heads(c, p, i, heads[i].qkv, sequence(&r->qkv[0][0][0][0][0], b, 3 * HEAD_DIM)));
        attend(&heads[i]);
        UPIPE_TRY(to_tokens(c, p, i, sequence(&r->own_o[0][0][0][0], b, HEAD_DIM), heads[i].o));
    }
    for (int i = 0; i < p->stages; ++i) {
        UPIPE_TRY(to_heads(c, p, i, heads[i].dout, sequence(&r->dout[0][0][0][0], b, HEAD_DIM)));
        attend_bwd(&heads[i]);
        UPIPE_TRY(to_tokens(c, p, i, sequence(&r->own_dqkv[0][0][0][0][0], b, 3 * HEAD_DIM), heads[i].dqkv));
    }
    return UPIPE_OK;
}

/* ---- the same by the library: Megatron's tensors as views ---- */

static upipe_view part(qkv_t t, int b, int which) /* 0 Q, 1 K, 2 V */
{
    return upipe_view_make(&t[0][b][0][which][0], UPIPE_F32, ROWS, BATCH * HEADS * 3 * HEAD_DIM, HEADS,
                           3 * HEAD_DIM, HEAD_DIM);
}

static upipe_qkv call(const upipe_plan *p, rank_tensors *r, upipe_qkv_grads *g, int b)
{
    upipe_qkv a = {0};
    a.plan = p, a.mask.causal = 1;
    a.q = part(r->qkv, b, 0), a.k = part(r->qkv, b, 1), a.v = part(r->qkv, b, 2);
    a.o = sequence(&r->lib_o[0][0][0][0], b, HEAD_DIM);
    g->dout = sequence(&r->dout[0][0][0][0], b, HEAD_DIM), g->dsinks = NULL;
    g->dq = part(r->lib_dqkv, b, 0), g->dk = part(r->lib_dqkv, b, 1), g->dv = part(r->lib_dqkv, b, 2);
    return a;
}

static upipe_status rank_main(void *user, int rank)
{
    program *p = (program *)user;
    rank_tensors *r = &p->rank[rank];
    upipe_mem_block blocks[BLOCKS];
    upipe_mem mem;
    upipe_ctx c = {0};
    void *slab = aligned_alloc(UPIPE_MEM_ALIGN, p->dry.mem.need);
    upipe_status s = UPIPE_OK;
    upipe_mem_init(&mem, slab, slab != NULL ? p->dry.mem.need : 0, blocks, BLOCKS);
    c.ops = &p->ops, c.mem = &mem, c.team = upipe_threads_comm(&p->team, rank);
    for (int b = 0; b < BATCH && s == UPIPE_OK; ++b) {
        upipe_saved saved;
        upipe_qkv_grads g;
        const upipe_qkv a = call(&p->plan, r, &g, b);
        s = own_kernel(&c, &p->plan, r, b);
        if (s == UPIPE_OK) s = upipe_qkv_fwd(&c, &a, &saved);
        if (s == UPIPE_OK) s = upipe_qkv_bwd(&c, &a, &g, &saved);
    }
    if (s != UPIPE_OK) upipe_comm_abort(c.team, c.err.text);
    free(slab);
    return s;
}

static double apart(const float *a, const float *b, size_t n)
{
    double most = 0;
    for (size_t i = 0; i < n; ++i) /* a NaN is the most */
        if (!(fabs((double)a[i] - (double)b[i]) <= most)) most = fabs((double)a[i] - (double)b[i]);
    return most;
}

int main(void)
{
    static program p;
    upipe_plan_desc d = {0};
    upipe_qkv_grads g;
    upipe_qkv a;
    upipe_err err = {0};
    double o = 0, dqkv = 0;
    d.tokens = SEQ, d.ranks = RANKS, d.heads = HEADS,
    d.head_dim = HEAD_DIM; /* batch 1: a call a sequence; chunk = ranks */
    upipe_cpu_ops(&p.ops);
    for (int rank = 0; rank < RANKS; ++rank) {
        float *qkv = &p.rank[rank].qkv[0][0][0][0][0], *dout = &p.rank[rank].dout[0][0][0][0];
        for (int i = 0; i < (int)(sizeof(qkv_t) / sizeof *qkv); ++i)
            qkv[i] = (float)((rank + i) * 53 % 89 - 44) / 40;
        for (int i = 0; i < (int)(sizeof(out_t) / sizeof *dout); ++i)
            dout[i] = (float)((rank + i) * 37 % 97 - 48) / 40;
    }
    a = call(&p.plan, &p.rank[0], &g, 0);
    if (upipe_plan_init(&p.plan, &d, &err) || upipe_dry_init(&p.dry, &p.plan, &p.ops) ||
        upipe_dry_qkv(&p.dry, &a) || upipe_threads_init(&p.team, RANKS, 0, &err) ||
        upipe_threads_run(&p.team, rank_main, &p, NULL, &err))
        return fprintf(stderr, "%s%s\n", err.text, p.dry.ctx.err.text), 1;
    for (int rank = 0; rank < RANKS; ++rank) {
        rank_tensors *r = &p.rank[rank];
        o = fmax(o, apart(&r->own_o[0][0][0][0], &r->lib_o[0][0][0][0], sizeof(out_t) / sizeof(float)));
        dqkv = fmax(dqkv, apart(&r->own_dqkv[0][0][0][0][0], &r->lib_dqkv[0][0][0][0][0],
                                sizeof(qkv_t) / sizeof(float)));
    }
    printf(
        "%d stages of %d heads on %d ranks; the trainer's kernel and the library's differ by %.1e in O, %.1e in dQ, dK, dV\n",
        p.plan.stages, RANKS, RANKS, o, dqkv);
    upipe_threads_free(&p.team);
    return !(o < 1e-5 && dqkv < 1e-5);
}
