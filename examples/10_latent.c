/* 10_latent.c -- attention of a model that keeps a latent in place of K and V (DeepSeek-V3, Kimi K2, MiniCPM3)
 *
 *     cc -O2 -march=native -I . examples/10_latent.c -lm -pthread && ./a.out
 *
 * A token has a latent c and a rotated key kr, which all heads share. They are sent as K and V of heads, or gathered once, and
 * K and V of a stage's heads are expanded where they are read: by Ulysses, with one stage, and by UPipe. Q is projected stage
 * by stage. The numbers are the same to the bit; what a rank sends and holds is printed, and was known before.
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

enum { RANKS = 4, TOKENS = 1024, MODEL = 128, LATENT = 64, Q_LATENT = 96 };
enum { HEADS = 32, NOPE = 32, ROPE = 16, V_DIM = 32 };
enum { DIM = NOPE + ROPE, ROWS = TOKENS / RANKS };
enum { WQ = HEADS * DIM * Q_LATENT, WKV = HEADS * (NOPE + V_DIM) * LATENT, WO = MODEL * HEADS * V_DIM };
enum { WEIGHTS = WQ + WKV + WO };
enum { XQ = TOKENS * Q_LATENT, C = TOKENS * LATENT, KR = TOKENS * ROPE, Y = TOKENS * MODEL };

/* A weight or its gradient: Wq (q_b_proj), Wkv (kv_b_proj) and Wo, one after the other. */
typedef struct shared {
    upipe_threads team;
    upipe_ops ops;
    upipe_latent_form form;
    int chunk;
    float weights[WEIGHTS], grads[RANKS][WEIGHTS]; /* each rank's part of the gradients, then their sum */
    float xq[XQ], c[C], kr[KR]; /* of all tokens: norms of down-projections, and a rotated key */
    float y[Y], dxq[XQ], dc[C], dkr[KR];
    upipe_session sessions[RANKS];
    void *slabs[RANKS];
} shared;

/* A rank's rows of a tensor of all tokens. */
static upipe_view rows(float *all, int rank, int width)
{
    return upipe_view_packed(all + rank * ROWS * width, UPIPE_F32, ROWS, 1, width);
}

/* The block of a rank, forward and backward. The loss is |y|^2 / 2, so the gradient of y is y. Run twice: dry, when no tensor
 * is looked at, and real. */
static upipe_status block(upipe_ctx *c, const upipe_plan *p, shared *all)
{
    const int rank = p->desc.rank;
    float *const w = all->weights, *const g = all->grads[rank];
    upipe_layer layer = {0};
    upipe_grads grads = {0};
    upipe_latent_kv kv = {all->form, rows(all->c, rank, LATENT), rows(all->kr, rank, ROPE)}, dkv = kv;
    upipe_saved saved;
    layer.plan = p, layer.mask.causal = 1, layer.rope_theta = 10000, layer.rope_interleaved = 1;
    layer.wq = w, layer.wk = w + WQ, layer.wo = w + WQ + WKV;
    grads.wq = g, grads.wk = g + WQ, grads.wo = g + WQ + WKV;
    dkv.c = rows(all->dc, rank, LATENT), dkv.kr = rows(all->dkr, rank, ROPE);
    UPIPE_TRY(upipe_latent_layer_fwd(c, &layer, &saved, rows(all->xq, rank, Q_LATENT), &kv));
    UPIPE_TRY(upipe_layer_out_fwd(c, &layer, rows(all->y, rank, MODEL), &saved));
    UPIPE_TRY(upipe_layer_out_bwd(c, &layer, &grads, &saved, rows(all->y, rank, MODEL)));
    UPIPE_TRY(upipe_latent_layer_bwd(c, &layer, rows(all->dxq, rank, Q_LATENT), &dkv, &grads, &saved,
                                     &saved.out, rows(all->xq, rank, Q_LATENT), &kv));
    return upipe_saved_free(c, &saved);
}

static upipe_status dry_main(void *user, upipe_session *h)
{
    void *terms;
    UPIPE_TRY(block(&h->dry.ctx, &h->plan, (shared *)user));
    UPIPE_TRY(
        upipe_alloc(&h->dry.ctx, &terms, upipe_reduce_bytes(WEIGHTS, RANKS), UPIPE_USE_REDUCE, "terms"));
    return upipe_free(&h->dry.ctx, terms);
}

static upipe_status rank_main(void *user, int rank)
{
    shared *all = (shared *)user;
    upipe_session *h = &all->sessions[rank];
    upipe_session_desc d = {0};
    int64_t sent;
    d.plan.tokens = TOKENS, d.plan.heads = d.plan.kv_heads = HEADS;
    d.plan.head_dim = DIM, d.plan.v_dim = V_DIM, d.plan.model_dim = MODEL, d.plan.chunk = all->chunk;
    d.dry = dry_main, d.user = all;
    h->ctx.ops = &all->ops;
    h->ctx.team = upipe_threads_comm(&all->team, rank);
    UPIPE_TRY(upipe_session_open(h, &d));
    all->slabs[rank] = aligned_alloc(UPIPE_MEM_ALIGN, upipe_session_slab_bytes(h));
    UPIPE_TRY(upipe_session_slab(h, all->slabs[rank]));
    sent = h->ctx.team->sent_bytes;
    UPIPE_TRY(block(&h->ctx, &h->plan, all));
    if (h->ctx.team->sent_bytes - sent != h->dry.team.sent_bytes || h->mem.peak > h->dry.mem.peak) /* never */
        return upipe_fail(&h->ctx.err, UPIPE_ERR_MISMATCH, "more bytes than planned");
    UPIPE_TRY(upipe_all_reduce(&h->ctx, h->ctx.team, all->grads[rank], WEIGHTS));
    return upipe_session_close(h);
}

static upipe_status run(shared *all, upipe_latent_form form, int chunk, upipe_err *err)
{
    upipe_status s;
    memset(all, 0, sizeof *all);
    all->form = form, all->chunk = chunk;
    for (int i = 0; i < WEIGHTS; ++i) all->weights[i] = (float)sin(i * 0.37) / 8;
    for (int i = 0; i < XQ; ++i) all->xq[i] = (float)cos(i * 0.11);
    for (int i = 0; i < C; ++i) all->c[i] = (float)cos(i * 0.13);
    for (int i = 0; i < KR; ++i) all->kr[i] = (float)cos(i * 0.17);
    upipe_cpu_ops(&all->ops);
    UPIPE_TRY(upipe_threads_init(&all->team, RANKS, 0, err));
    s = upipe_threads_run(&all->team, rank_main, all, NULL, err);
    upipe_threads_free(&all->team);
    for (int i = 0; i < RANKS; ++i) free(all->slabs[i]);
    return s;
}

static int same(const shared *a, const shared *b)
{
    return !memcmp(a->y, b->y, sizeof a->y) && !memcmp(a->dxq, b->dxq, sizeof a->dxq) &&
           !memcmp(a->dc, b->dc, sizeof a->dc) && !memcmp(a->dkr, b->dkr, sizeof a->dkr) &&
           !memcmp(a->grads[0], b->grads[0], sizeof a->grads[0]);
}

int main(void)
{
    static const struct {
        const char *name;
        upipe_latent_form form;
        int chunk;
    } ways[] = {{"Ulysses, heads sent", UPIPE_LATENT_HEADS, HEADS},
                {"Ulysses, latent gathered", UPIPE_LATENT_GATHERED, HEADS},
                {"UPipe, heads sent", UPIPE_LATENT_HEADS, RANKS},
                {"UPipe, latent gathered", UPIPE_LATENT_GATHERED, RANKS}};
    static shared first, other;
    int bad = 0;
    for (int i = 0; i < 4; ++i) {
        shared *all = i == 0 ? &first : &other;
        upipe_err err;
        const upipe_dry *dry = &all->sessions[0].dry;
        if (run(all, ways[i].form, ways[i].chunk, &err))
            return fprintf(stderr, "%s: %s\n", ways[i].name, err.text), 1;
        bad |= !same(all, &first);
        printf("%-25s rank 0 sends %7lld bytes and holds %7zu; y and all gradients: %s\n", ways[i].name,
               (long long)dry->team.sent_bytes, dry->mem.peak,
               same(all, &first) ? "the same bits" : "other bits");
    }
    return fflush(stdout) != 0 || bad;
}
