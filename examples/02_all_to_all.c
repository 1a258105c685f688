/* 02_all_to_all.c -- tokens traded for heads and back, with the trainer's own attention kernel between, in Megatron's tensors
 *
 *     cc -O2 -march=native -I . examples/02_all_to_all.c -lm -pthread && ./a.out
 *
 * Q, K and V come out of one projection as [tokens][batch][heads][3][dim]. A stage packs, sends and attends one head a
 * rank, and sends O back. The kernel sees [S][3][dim], one head of all tokens, as cuDNN and FlashAttention take it. The
 * library's own attention of the same tensors, forward and backward, must agree.
 */
#include "upipe/net/upipe_net_threads_session.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

enum { RANKS = 4, SEQ = 48, BATCH = 2, HEADS = 8, DIM = 32, ROWS = SEQ / RANKS, STAGES = HEADS / RANKS };
enum { OUT = ROWS * BATCH * HEADS * DIM, QKV = 3 * OUT };

/* What the trainer's kernel takes and leaves of one head: of a sequence and stage, on a rank. */
typedef struct one_head {
    float qkv[SEQ][3][DIM], o[SEQ][DIM], dqkv[SEQ][3][DIM], dout[SEQ][DIM], p[SEQ][SEQ];
} one_head;

/* in: the projection, and the gradient of O. own, lib: its gradient, and O, by the trainer's kernel and the library. */
typedef struct rank_data {
    struct {
        float qkv[QKV], out[OUT];
    } in, own, lib;
    one_head heads[STAGES]; /* kept for the backward; a trainer may send Q, K and V again instead */
    int first[STAGES];      /* which heads these are, of the last sequence */
    int64_t sent;           /* bytes of a sequence's forward and backward */
} rank_data;

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
static upipe_status own_kernel(upipe_ctx *c, const upipe_plan *p, rank_data *r, int b)
{
    for (int i = 0; i < p->stages; ++i) {
        UPIPE_TRY(to_heads(c, p, i, r->heads[i].qkv, sequence(r->in.qkv, b, 3 * DIM)));
        attend(&r->heads[i]);
        UPIPE_TRY(to_tokens(c, p, i, sequence(r->own.out, b, DIM), r->heads[i].o));
    }
    for (int i = 0; i < p->stages; ++i) {
        UPIPE_TRY(to_heads(c, p, i, r->heads[i].dout, sequence(r->in.out, b, DIM)));
        attend_bwd(&r->heads[i]);
        UPIPE_TRY(to_tokens(c, p, i, sequence(r->own.qkv, b, 3 * DIM), r->heads[i].dqkv));
    }
    return UPIPE_OK;
}

static upipe_status library(upipe_session *h, rank_data *r, int b)
{
    /* views: nothing is copied */
    const upipe_qkv a = upipe_qkv_sbh3d(&h->call, r->in.qkv, r->lib.out, UPIPE_F32, BATCH, b);
    const upipe_qkv d = upipe_qkv_sbh3d(&h->call, r->lib.qkv, r->in.out, UPIPE_F32, BATCH, b);
    const upipe_qkv_grads g = upipe_qkv_grads_of(&d);
    upipe_saved saved;
    UPIPE_TRY(upipe_qkv_fwd(&h->ctx, &a, &saved));
    return upipe_qkv_bwd(&h->ctx, &a, &g, &saved);
}

static upipe_status rank_main(void *user, upipe_session *h)
{
    const int rank = h->ctx.team->rank;
    rank_data *r = (rank_data *)user + rank;
    float *in = (float *)&r->in, *own = (float *)&r->own, *lib = (float *)&r->lib;
    for (int i = 0; i < QKV + OUT; ++i) in[i] = (float)((rank + i) * 53 % 89 - 44) / 40;
    for (int b = 0; b < BATCH; ++b) {
        r->sent = -h->ctx.team->sent_bytes;
        UPIPE_TRY(own_kernel(&h->ctx, &h->plan, r, b));
        r->sent += h->ctx.team->sent_bytes;
        UPIPE_TRY(library(h, r, b));
    }
    for (int i = 0; i < STAGES; ++i) r->first[i] = upipe_plan_q(&h->plan, i, rank).first;
    for (int i = 0; i < QKV + OUT; ++i)
        if (!(fabsf(own[i] - lib[i]) < 1e-5f)) /* nor is a NaN */
            return upipe_fail(&h->ctx.err, UPIPE_ERR_MISMATCH, "%g is not %g", (double)own[i],
                              (double)lib[i]);
    return UPIPE_OK;
}

int main(void)
{
    static rank_data ranks[RANKS];
    upipe_session_desc desc = {0};
    upipe_ops ops;
    upipe_err err;
    desc.plan.tokens = SEQ, desc.plan.ranks = RANKS; /* and batch 1: a call a sequence */
    desc.plan.heads = HEADS, desc.plan.head_dim = DIM;
    desc.call.mask.causal = 1, desc.layers = 1, desc.user = ranks;
    upipe_cpu_ops(&ops);
    if (upipe_threads_sessions(&desc, &ops, 0, rank_main, &err)) return fprintf(stderr, "%s\n", err.text), 1;
    for (int r = 0; r < RANKS; ++r) {
        printf("rank %d has %d tokens of all heads; it attends all tokens of heads", r, ROWS);
        for (int i = 0; i < STAGES; ++i) printf(" %d", ranks[r].first[i]);
        printf(", and sends %lld bytes a sequence\n", (long long)ranks[r].sent);
    }
    printf("the trainer's kernel and the library agree within 1e-5\n");
    return fflush(stdout) != 0;
}
