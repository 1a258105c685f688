/* latent.c -- what bench/latent.py runs: attention over a latent, K and V sent as heads or the latent gathered
 *
 *     latent TOKENS RANKS ROUNDS        tokens are a multiple of ranks, which divide the heads
 *
 * Forward and backward of a causal block in f32 by Ulysses and UPipe in both forms, on ranks that are threads of one team:
 * each way once a round, in the opposite order every other round, after a round that is not timed. Prints a line of JSON for
 * each run: its way, seconds, and bytes of rank 0. Exit status 1 where results have other bits than the first ones, or bytes
 * held or sent are not those of the dry run. Heads and the latent of K and V are as DeepSeek-V3 has them, but an eighth of its
 * heads; the model and what Q is made of are narrower.
 */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

enum { HEADS = 16, NOPE = 128, ROPE = 64, V_DIM = 128, LATENT = 512, Q_LATENT = 768, MODEL = 1024 };
enum { DIM = NOPE + ROPE, WAYS = 4, RANKS_MAX = HEADS };
enum { WQ = HEADS * DIM * Q_LATENT, WKV = HEADS * (NOPE + V_DIM) * LATENT, WO = MODEL * HEADS * V_DIM };
enum { WEIGHTS = WQ + WKV + WO };

typedef struct bench {
    int64_t tokens;
    int ranks, way; /* way: of sessions, which runs */
    upipe_threads team;
    upipe_ops ops;
    float *weights, *xq, *c, *kr;
    float *y, *dxq, *dc, *dkr, *grads; /* one after the other; grads: of the weights, each rank's part */
    int64_t results;                   /* numbers from y on */
    float *first;                      /* those of the first run, which all others must repeat */
    upipe_session sessions[WAYS][RANKS_MAX];
} bench;

/* Ulysses, then UPipe. */
static upipe_latent_form form_of(int way)
{
    return way % 2 == 0 ? UPIPE_LATENT_HEADS : UPIPE_LATENT_GATHERED;
}

/* A rank's rows of a tensor of all tokens. */
static upipe_view rows(const upipe_plan *p, float *all, int32_t width)
{
    return upipe_view_packed(all + p->desc.rank * p->rows * width, UPIPE_F32, p->rows, 1, width);
}

/* The block of a rank. The loss is |y|^2 / 2, so the gradient of y is y. Dry it looks at no tensor. */
static upipe_status block(upipe_ctx *c, const upipe_plan *p, const bench *b)
{
    float *const w = b->weights, *const g = b->grads + (size_t)p->desc.rank * WEIGHTS;
    const upipe_view xq = rows(p, b->xq, Q_LATENT), y = rows(p, b->y, MODEL);
    const upipe_latent_kv kv = {form_of(b->way), rows(p, b->c, LATENT), rows(p, b->kr, ROPE)};
    const upipe_latent_kv dkv = {form_of(b->way), rows(p, b->dc, LATENT), rows(p, b->dkr, ROPE)};
    upipe_layer layer = {0};
    upipe_grads grads = {0};
    upipe_saved saved;
    layer.plan = p, layer.mask.causal = 1, layer.rope_theta = 10000, layer.rope_interleaved = 1;
    layer.wq = w, layer.wk = w + WQ, layer.wo = w + WQ + WKV;
    grads.wq = g, grads.wk = g + WQ, grads.wo = g + WQ + WKV;
    UPIPE_TRY(upipe_latent_layer_fwd(c, &layer, &saved, xq, &kv));
    UPIPE_TRY(upipe_layer_out_fwd(c, &layer, y, &saved));
    UPIPE_TRY(upipe_layer_out_bwd(c, &layer, &grads, &saved, y));
    UPIPE_TRY(upipe_latent_layer_bwd(c, &layer, rows(p, b->dxq, Q_LATENT), &dkv, &grads, &saved, &saved.out,
                                     xq, &kv));
    return upipe_saved_free(c, &saved);
}

static upipe_status dry_main(void *user, upipe_session *h)
{
    return block(&h->dry.ctx, &h->plan, (const bench *)user);
}

static upipe_status rank_main(void *user, int rank)
{
    bench *b = (bench *)user;
    upipe_session *h = &b->sessions[b->way][rank];
    const int64_t sent = h->ctx.team->sent_bytes;
    UPIPE_TRY(block(&h->ctx, &h->plan, b));
    if (h->ctx.team->sent_bytes - sent == h->dry.team.sent_bytes && h->mem.peak == h->dry.mem.peak)
        return UPIPE_OK;
    upipe_comm_abort(h->ctx.team, "bytes held or sent are not those of the dry run");
    return UPIPE_ERR_MISMATCH;
}

static upipe_status open_session(bench *b, int way, int rank, upipe_err *err)
{
    upipe_session *h = &b->sessions[way][rank];
    upipe_session_desc d = {0};
    upipe_status s;
    d.plan.tokens = b->tokens, d.plan.heads = d.plan.kv_heads = HEADS;
    d.plan.head_dim = DIM, d.plan.v_dim = V_DIM, d.plan.model_dim = MODEL;
    d.plan.chunk = way < 2 ? HEADS : b->ranks, d.dry = dry_main, d.user = b, b->way = way;
    h->ctx.ops = &b->ops, h->ctx.team = upipe_threads_comm(&b->team, rank);
    s = upipe_session_open(h, &d);
    if (s != UPIPE_OK) *err = h->ctx.err;
    return s;
}

/* One way runs at a time and leaves its pools empty, so that a rank's slab serves all of them. */
static upipe_status open_all(bench *b, upipe_err *err)
{
    for (int rank = 0; rank < b->ranks; ++rank) {
        size_t most = 0;
        void *slab;
        for (int way = 0; way < WAYS; ++way) {
            UPIPE_TRY(open_session(b, way, rank, err));
            if (most < b->sessions[way][rank].dry.mem.need) most = b->sessions[way][rank].dry.mem.need;
        }
        slab = aligned_alloc(UPIPE_MEM_ALIGN, most);
        if (slab == NULL) return upipe_fail(err, UPIPE_ERR_MEMORY, "no memory for a slab");
        for (int way = 0; way < WAYS; ++way) UPIPE_TRY(upipe_session_slab(&b->sessions[way][rank], slab));
    }
    return UPIPE_OK;
}

static double seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static upipe_status measure(bench *b, int rounds, upipe_err *err)
{
    const size_t bytes = (size_t)b->results * sizeof(float);
    for (int i = 0; i < (rounds + 1) * WAYS; ++i) {
        const upipe_session *h;
        double wall, cpu;
        b->way = i / WAYS % 2 == 0 ? i % WAYS : WAYS - 1 - i % WAYS;
        memset(b->y, 0, bytes);
        wall = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
        UPIPE_TRY(upipe_threads_run(&b->team, rank_main, b, NULL, err));
        wall = seconds(CLOCK_MONOTONIC) - wall, cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
        if (i == 0) memcpy(b->first, b->y, bytes);
        if (memcmp(b->first, b->y, bytes) != 0)
            return upipe_fail(err, UPIPE_ERR_MISMATCH, "way %d: other bits", b->way);
        if (i < WAYS) continue;
        h = &b->sessions[b->way][0];
        printf("{\"method\": \"%s\", \"form\": \"%s\", ", b->way < 2 ? "ulysses" : "upipe",
               form_of(b->way) == UPIPE_LATENT_HEADS ? "heads" : "gathered");
        printf("\"heads\": %d, \"head_dim\": %d, \"v_dim\": %d, ", HEADS, DIM, V_DIM);
        printf("\"model_dim\": %d, \"chunk\": %d, ", MODEL, h->plan.desc.chunk);
        printf("\"peak_bytes\": %zu, \"sent_bytes\": %lld, ", h->mem.peak, (long long)h->dry.team.sent_bytes);
        printf("\"wall\": %.6f, \"cpu\": %.6f}\n", wall, cpu);
    }
    return UPIPE_OK;
}

/* Random numbers between -most and most. */
static float *drawn(int64_t n, float most)
{
    static uint32_t state = 1;
    float *x = (float *)malloc((size_t)n * sizeof *x);
    for (int64_t i = 0; x != NULL && i < n; ++i) {
        state = state * 1664525u + 1013904223u;
        x[i] = most * ((float)(state >> 8) / (float)(1 << 23) - 1);
    }
    return x;
}

int main(int argc, char **argv)
{
    static bench b;
    upipe_err err;
    upipe_status s;
    if (argc == 4) b.tokens = atoi(argv[1]), b.ranks = atoi(argv[2]);
    if (b.tokens < 1 || b.ranks < 1 || b.tokens % b.ranks != 0 || HEADS % b.ranks != 0)
        return fprintf(stderr, "usage: latent TOKENS RANKS ROUNDS\n"), 2;
    b.results = b.tokens * (MODEL + Q_LATENT + LATENT + ROPE) + (int64_t)b.ranks * WEIGHTS;
    b.weights = drawn(WEIGHTS, 0.05f), b.xq = drawn(b.tokens * Q_LATENT, 1);
    b.c = drawn(b.tokens * LATENT, 1), b.kr = drawn(b.tokens * ROPE, 1);
    b.y = drawn(b.results, 0), b.first = drawn(b.results, 0);
    if (!b.weights || !b.xq || !b.c || !b.kr || !b.y || !b.first)
        return fprintf(stderr, "latent: no memory\n"), 1;
    b.dxq = b.y + b.tokens * MODEL, b.dc = b.dxq + b.tokens * Q_LATENT;
    b.dkr = b.dc + b.tokens * LATENT, b.grads = b.dkr + b.tokens * ROPE;
    upipe_cpu_ops(&b.ops);
    s = upipe_threads_init(&b.team, b.ranks, 0, &err);
    if (s == UPIPE_OK) s = open_all(&b, &err);
    if (s == UPIPE_OK) s = measure(&b, atoi(argv[3]), &err);
    if (s != UPIPE_OK) fprintf(stderr, "latent: %s\n", err.text);
    return s != UPIPE_OK || fflush(stdout) != 0;
}
