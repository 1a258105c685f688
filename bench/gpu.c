/* gpu.c -- measures on one CUDA device; each command prints one JSON object on stdout
 *
 *     gpu device                                              name, driver, memory
 *     gpu roofline [--tokens N]                               copy bandwidth, rate of a bf16 product of N^3
 *     gpu attention --tokens N --head-dim N [--v-dim N] [--full] [--window N] [--cu-seqlens N] [--heads N]
 *                   [--kv-heads N] [--kernels NAME] [--avoid NAME] [--margin N]
 *                                                          each contestant's rate, or why there is none
 *     gpu rows [--tokens N] [--model-dim N] [--head-dim N]    the kernels that are no attention, beside their bytes
 *     gpu transfer --tokens N [--ranks N]                    all-to-all of thread ranks, device to device
 *     gpu block --tokens N [--ranks N] [--heads N] [--kv-heads N] [--head-dim N] [--model-dim N] [--chunk N]
 *               [--layers N] [--overlap] [--avoid NAME]
 *
 * Seconds are the median of runs after a warm-up. roofline, attention and rows: between events on the stream; the
 * contestants of attention in turn, and `spread` is half of the distance between their quarters, over the median. transfer
 * and block: by the host's clock, from a barrier until the rank's work is complete on the device; of a run, the
 * slowest rank.
 *
 * What is checked, or there is no figure. attention, before it is timed: o, lse and dq of three queries against
 * double precision, dk and dv of three keys likewise, given the lse and delta of the device, as recomputing those
 * of all queries takes the square of the tokens. transfer: every byte, once. block: the pool's peak against the
 * plan; its numbers are the tests' affair. roofline, rows: nothing.
 *
 * The exit status is 3 where the library refuses what is asked for. bench/gpu.py runs all of this and keeps the
 * results.
 */
#define PROGRAM "gpu"

#include "upipe/net/upipe_net_threads.h"

#include "../examples/common/flags.h"
#include "../examples/common/side_stream.h"
#include "gpu_attention.h"
#include "gpu_common.h"
#include "gpu_rows.h"

enum { EXIT_REFUSED = 3 };

static const char usage_text[] =
    "usage: gpu device | roofline | attention | transfer | block | rows [flags]\n";

#define AT(member) offsetof(options, member)

/* clang-format off */
static const flag_row flag_rows[] = {
    {"tokens", "N", 1, "", FLAG_WHOLE, AT(tokens), 1, 1099511627776, NULL, 0,
     "tokens of a sequence (16384); rows of the roofline's product (8192)"},
    {"head-dim", "N", 1, "", FLAG_INT, AT(head_dim), 1, 256, "128", 0, "elements of a head"},
    {"v-dim", "N", 1, "", FLAG_INT, AT(v_dim), 1, 256, NULL, 0,
     "elements of a head of values, in attention (as many as of a head)"},
    {"heads", "N", 1, "", FLAG_INT, AT(heads), 1, 1024, "32", 0, "query heads"},
    {"kv-heads", "N", 1, "", FLAG_INT, AT(kv_heads), 1, 1024, NULL, 0, "key/value heads (as many; block: 8)"},
    {"full", NULL, 1, "", FLAG_SWITCH, AT(full), 0, 1, NULL, 0, "attention without a causal mask"},
    {"ranks", "N", 1, "", FLAG_INT, AT(ranks), 1, RANKS_MAX, "8", 0, "thread ranks on the device"},
    {"model-dim", "N", 1, "", FLAG_WHOLE, AT(model_dim), 1, 1 << 20, "4096", 0, "elements of a token"},
    {"chunk", "N", 1, "", FLAG_INT, AT(chunk), 1, 1024, NULL, 0,
     "query heads of a stage over all ranks; as many as heads is Ulysses (ranks)"},
    {"layers", "N", 1, "", FLAG_INT, AT(layers), 1, RUNS, "3", 0, "passes of the block that are timed"},
    {"window", "N", 1, "", FLAG_WHOLE, AT(window), 1, 1099511627776, NULL, 0,
     "attention with a sliding window of so many tokens"},
    {"cu-seqlens", "N", 1, "", FLAG_INT, AT(cu_seqlens), 1, 1 << 20, NULL, 0,
     "attention over so many packed sequences (cu_seqlens) of one length"},
    {"kernels", "all|upipe|upipe_80|cudnn|cudnn_deterministic", 1, "", FLAG_CHOICE, AT(kernels), 0, 0, "all", 0,
     "whose attention: one that fails may take the others with it"},
    {"margin", "N", 1, "", FLAG_INT, AT(margin), 0, 1024, "0", 0, "processors that attention on 9.0 leaves free"},
    {"avoid", "none|fwd90|bwd90|both", 1, "", FLAG_CHOICE, AT(avoid), 0, 0, "none", 0,
     "kernels for 9.0 of upipe's attention that those for 8.0 stand in for"},
    {"overlap", NULL, 1, "", FLAG_SWITCH, AT(overlap), 0, 1, NULL, 0,
     "stages of the block overlap, on a second stream a rank"},
    {"help", NULL, 1, "", FLAG_HELP, 0, 0, 0, NULL, 0, "this text"}};
/* clang-format on */

#undef AT

enum { FLAGS = sizeof flag_rows / sizeof *flag_rows };

static const char *const usage_more[] = {NULL};
static const flag_set option_flags = {flag_rows, FLAGS, 1, usage_text, usage_more, ""};

/* ---- device, roofline ---- */

static upipe_status measure_device(upipe_ctx *c)
{
    struct cudaDeviceProp about;
    int driver, runtime, number;
    UPIPE_CUDA_TRY(&c->err, cudaGetDevice(&number));
    UPIPE_CUDA_TRY(&c->err, cudaGetDeviceProperties(&about, number));
    UPIPE_CUDA_TRY(&c->err, cudaDriverGetVersion(&driver));
    UPIPE_CUDA_TRY(&c->err, cudaRuntimeGetVersion(&runtime));
    printf("{\"name\": \"%s\", \"capability\": \"%d.%d\", \"processors\": %d, \"memory_bytes\": %zu, "
           "\"cuda_driver\": %d, \"cuda_runtime\": %d}\n",
           about.name, about.major, about.minor, about.multiProcessorCount, about.totalGlobalMem, driver,
           runtime);
    return UPIPE_OK;
}

typedef struct roofline {
    void *a, *b, *y;
    size_t bytes;
    int32_t n;
} roofline;

static upipe_status copy_once(upipe_ctx *c, void *user)
{
    roofline *r = (roofline *)user;
    return c->ops->copy(c, r->y, r->a, r->bytes);
}

static upipe_status multiply_once(upipe_ctx *c, void *user)
{
    roofline *r = (roofline *)user;
    return c->ops->gemm(c, upipe_view_packed(r->y, UPIPE_BF16, r->n, 1, r->n),
                        upipe_view_packed(r->a, UPIPE_BF16, r->n, 1, r->n),
                        upipe_view_packed(r->b, UPIPE_BF16, r->n, 1, r->n), UPIPE_GEMM_TRANS_B, NULL, 0);
}

static upipe_status measure_roofline(upipe_ctx *c, const options *o)
{
    roofline r;
    double copy, product, n;
    int64_t count;
    r.n = (int32_t)o->tokens;
    count = (int64_t)r.n * r.n;
    r.bytes = (size_t)count * 2 * 8;
    UPIPE_TRY(buf(c, &r.a, count * 8, UPIPE_BF16));
    UPIPE_TRY(buf(c, &r.b, count, UPIPE_BF16));
    UPIPE_TRY(buf(c, &r.y, count * 8, UPIPE_BF16));
    UPIPE_TRY(fill(c, r.a, count, 1));
    UPIPE_TRY(fill(c, r.b, count, 2));
    UPIPE_TRY(timed(c, copy_once, &r, &copy));
    UPIPE_TRY(timed(c, multiply_once, &r, &product));
    n = r.n;
    printf(
        "{\"copy_bytes_per_s\": %.4g, \"copied_bytes\": %zu, \"product_flop_per_s\": %.4g, \"product_n\": %d}\n",
        2 * (double)r.bytes / copy, r.bytes, 2 * n * n * n / product, r.n);
    UPIPE_TRY(upipe_cuda_slab_free(r.a, &c->err));
    UPIPE_TRY(upipe_cuda_slab_free(r.b, &c->err));
    return upipe_cuda_slab_free(r.y, &c->err);
}

/* ---- ranks: transfer and block ---- */

typedef struct team {
    const options *o;
    upipe_threads threads;
    upipe_plan plans[RANKS_MAX];
    upipe_layer layers[RANKS_MAX];
    device devices[RANKS_MAX];
    side_stream lines[RANKS_MAX]; /* where stages overlap */
    void *slabs[RANKS_MAX], *grads[RANKS_MAX];
    upipe_err errors[RANKS_MAX];
    double runs[RANKS_MAX][2][RUNS]; /* seconds, forward and backward */
    size_t slab_bytes, peak[RANKS_MAX], plan_peak[RANKS_MAX];
    size_t free_warm, free_least; /* once all ranks have done a pass, and the least since then */
    int blocks_max;
} team;

/* Byte i of what rank `from` sends rank `to`. */
static unsigned char pattern(int from, int to, size_t i)
{
    return (unsigned char)((i + (size_t)from * 0x51 + (size_t)to * 0x8f) * 0x9e3779b1u >> 13);
}

/* One all-to-all of blocks that tell their sender, receiver and place. */
static upipe_status all_to_all_check(upipe_ctx *c, char *from, char *to, size_t block, const upipe_plan *each)
{
    int rank = c->team->rank, ranks = c->team->ranks, p;
    unsigned char *bytes = (unsigned char *)malloc(block);
    size_t i;
    if (bytes == NULL) return upipe_fail(&c->err, UPIPE_ERR_MEMORY, "no entry left for a check");
    UPIPE_TRY(c->ops->zero(c, to, block * (size_t)ranks));
    for (p = 0; p < ranks; ++p) {
        for (i = 0; i < block; ++i) bytes[i] = pattern(rank, p, i);
        UPIPE_TRY(c->ops->copy(c, from + (size_t)p * block, bytes, block));
    }
    UPIPE_TRY(upipe_a2a_to_heads(c, to, from, each, 0, UPIPE_A2A_Q, block));
    for (p = 0; p < ranks; ++p) {
        UPIPE_TRY(c->ops->copy(c, bytes, to + (size_t)p * block, block));
        for (i = 0; i < block && bytes[i] == pattern(p, rank, i);) ++i;
        if (i < block)
            return upipe_fail(&c->err, UPIPE_ERR_BACKEND,
                              "transfer: byte %zu from rank %d to rank %d is wrong", i, p, rank);
    }
    free(bytes);
    return UPIPE_OK;
}

/* An all-to-all of one block of any size a rank: one token and one head each. */
static upipe_status blocks_plan(upipe_plan *p, int rank, int ranks, upipe_err *e)
{
    upipe_plan_desc d;
    memset(&d, 0, sizeof d);
    d.tokens = d.ranks = d.heads = ranks;
    d.rank = rank;
    d.head_dim = 1;
    return upipe_plan_init(p, &d, e);
}

/* The others learn of a failure. */
static upipe_status team_leave(team *t, upipe_ctx *c, int rank, upipe_status s)
{
    if (s != UPIPE_OK) upipe_comm_abort(c->team, c->err.text);
    t->errors[rank] = c->err;
    return s;
}

static upipe_status all_to_all_rank(void *user, int rank)
{
    team *t = (team *)user;
    const options *o = t->o;
    size_t block = (size_t)(o->tokens / o->ranks) * (size_t)o->head_dim * 2;
    char *from = (char *)t->slabs[rank], *to = from + block * (size_t)o->ranks;
    upipe_plan each;
    upipe_status s;
    upipe_ctx c;
    int i;
    memset(&c, 0, sizeof c);
    device_use(&t->devices[rank], &c);
    c.team = upipe_threads_comm(&t->threads, rank);
    s = blocks_plan(&each, rank, o->ranks, &c.err);
    if (s == UPIPE_OK) s = all_to_all_check(&c, from, to, block, &each);
    for (i = -2; i < RUNS && s == UPIPE_OK; ++i) {
        double start;
        s = upipe_comm_barrier(&c, c.team);
        if (s != UPIPE_OK) break;
        start = cli_clock(NULL);
        s = upipe_a2a_to_heads(&c, to, from, &each, 0, UPIPE_A2A_Q, block);
        if (i >= 0) t->runs[rank][0][i] = cli_clock(NULL) - start;
    }
    return team_leave(t, &c, rank, s);
}

/* The median over runs of the slowest rank. */
static double slowest(team *t, int which, int runs)
{
    double worst[RUNS];
    int i, r;
    for (i = 0; i < runs; ++i)
        for (worst[i] = 0, r = 0; r < t->o->ranks; ++r)
            if (t->runs[r][which][i] > worst[i]) worst[i] = t->runs[r][which][i];
    return median(worst, runs);
}

static upipe_status team_open(team *t, const options *o, upipe_err *e)
{
    int r;
    memset(t, 0, sizeof *t);
    t->o = o;
    UPIPE_TRY(upipe_threads_init(&t->threads, o->ranks, 120, e));
    for (r = 0; r < o->ranks; ++r) {
        UPIPE_TRY(device_open(&t->devices[r], DEVICE_CUDA, e));
        device_avoid(&t->devices[r], o->avoid);
    }
    return UPIPE_OK;
}

static upipe_status team_slabs(team *t, upipe_err *e)
{
    int r;
    for (r = 0; r < t->o->ranks; ++r) {
        UPIPE_TRY(device_slab(&t->devices[r], &t->slabs[r], t->slab_bytes, e));
        UPIPE_CUDA_TRY(e, cudaStreamSynchronize((cudaStream_t)t->devices[r].stream));
    }
    return UPIPE_OK;
}

static upipe_status team_run(team *t, upipe_status (*body)(void *user, int rank), upipe_err *e)
{
    upipe_status statuses[RANKS_MAX], s = upipe_threads_run(&t->threads, body, t, statuses, NULL);
    if (s != UPIPE_OK) *e = t->errors[cli_reason(statuses, t->o->ranks, s)];
    return s;
}

static void team_close(team *t)
{
    int r;
    for (r = 0; r < t->o->ranks; ++r) {
        device_slab_free(&t->devices[r], t->slabs[r]);
        device_slab_free(&t->devices[r], t->grads[r]);
        side_stream_close(&t->lines[r], NULL);
        device_close(&t->devices[r], NULL);
    }
    upipe_threads_free(&t->threads);
}

static upipe_status measure_all_to_all(const options *o, upipe_err *e)
{
    static team t;
    size_t sent;
    double seconds;
    UPIPE_TRY(team_open(&t, o, e));
    t.slab_bytes = (size_t)(o->tokens / o->ranks) * (size_t)o->head_dim * 2 * (size_t)o->ranks * 2;
    UPIPE_TRY(team_slabs(&t, e));
    UPIPE_TRY(team_run(&t, all_to_all_rank, e));
    seconds = slowest(&t, 0, RUNS);
    sent = t.slab_bytes / 2 * (size_t)o->ranks; /* by all ranks together, what stays at home included */
    printf("{\"ranks\": %d, \"tokens\": %lld, \"head_dim\": %d, \"bytes\": %zu, \"seconds\": %.6g, "
           "\"bytes_per_s\": %.4g, \"checked\": [\"bytes\"]}\n",
           o->ranks, (long long)o->tokens, o->head_dim, sent, seconds, 2 * (double)sent / seconds);
    team_close(&t);
    return UPIPE_OK;
}

/* Fills `to` with the bytes of `from`, over and over. */
static upipe_status repeat(upipe_ctx *c, void *to, size_t bytes, const void *from, size_t period)
{
    size_t at;
    for (at = 0; at < bytes; at += period)
        UPIPE_TRY(c->ops->copy(c, (char *)to + at, from, bytes - at < period ? bytes - at : period));
    return UPIPE_OK;
}

static upipe_status block_pass(team *t, upipe_ctx *c, int rank, int run)
{
    const upipe_layer *layer = &t->layers[rank];
    const upipe_plan *p = layer->plan;
    float *gradient = (float *)t->grads[rank];
    int64_t wq = (int64_t)p->desc.heads * p->desc.head_dim * p->desc.model_dim;
    int64_t wk = (int64_t)p->desc.kv_heads * p->desc.head_dim * p->desc.model_dim;
    upipe_grads grads;
    upipe_saved saved;
    upipe_slots dout;
    upipe_view x;
    void *data;
    size_t left;
    double start;
    memset(&grads, 0, sizeof grads);
    grads.wq = gradient;
    grads.wk = gradient + wq;
    grads.wv = gradient + wq + wk;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, upipe_plan_unit_bytes(p), UPIPE_USE_OTHER, "x", &c->err));
    x = upipe_view_packed(data, p->desc.dtype, p->rows, 1, (int32_t)p->desc.model_dim);
    UPIPE_TRY(repeat(c, data, upipe_plan_unit_bytes(p), layer->wq, (size_t)wq * 2));
    UPIPE_TRY(c->ops->sync(c));
    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    start = cli_clock(NULL);
    UPIPE_TRY(upipe_layer_fwd(c, layer, &saved, x));
    UPIPE_TRY(c->ops->sync(c));
    if (run >= 0) t->runs[rank][0][run] = cli_clock(NULL) - start;
    UPIPE_TRY(upipe_slots_alloc(c, p, &dout, UPIPE_SLOT_FULL, "dout"));
    UPIPE_TRY(
        c->ops->copy(c, dout.data, saved.out.data, upipe_plan_rows_bytes(p, p->desc.heads, p->desc.v_dim)));
    UPIPE_TRY(c->ops->sync(c));
    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    start = cli_clock(NULL);
    UPIPE_TRY(upipe_layer_bwd(c, layer, x, &grads, &saved, &dout, x));
    UPIPE_TRY(c->ops->sync(c));
    if (run >= 0) t->runs[rank][1][run] = cli_clock(NULL) - start;
    UPIPE_TRY(device_left(DEVICE_CUDA, &left, &c->err));
    if (rank == 0 && run >= 0 && left < t->free_least) t->free_least = left;
    UPIPE_TRY(upipe_mem_free(c->mem, dout.data, &c->err));
    return upipe_mem_free(c->mem, x.data, &c->err);
}

static upipe_status block_rank(void *user, int rank)
{
    team *t = (team *)user;
    upipe_mem_block blocks[BLOCKS_MAX];
    upipe_status s;
    upipe_mem mem;
    upipe_ctx c;
    int i;
    memset(&c, 0, sizeof c);
    device_use(&t->devices[rank], &c);
    c.side_stream = t->plans[rank].overlap ? &t->lines[rank].side_stream : NULL;
    c.team = upipe_threads_comm(&t->threads, rank);
    upipe_mem_init(&mem, t->slabs[rank], t->slab_bytes, blocks, t->blocks_max);
    c.mem = &mem;
    s = block_pass(t, &c, rank, -1);
    if (s == UPIPE_OK) s = upipe_comm_barrier(&c, c.team);
    if (s == UPIPE_OK && rank == 0) s = device_left(DEVICE_CUDA, &t->free_warm, &c.err);
    if (rank == 0) t->free_least = t->free_warm;
    for (i = 0; i < t->o->layers && s == UPIPE_OK; ++i) s = block_pass(t, &c, rank, i);
    t->peak[rank] = mem.peak;
    s = team_leave(t, &c, rank, s);
    upipe_mem_destroy(&mem, NULL);
    return s;
}

/* Each rank's plan, its layer with the weights w, and its peak; the slabs have the bytes of the largest rank. */
static upipe_status block_plans(team *t, void *const w[3], upipe_err *e)
{
    static upipe_dry dry;
    const options *o = t->o;
    upipe_plan_desc d;
    upipe_ops ops;
    memset(&d, 0, sizeof d);
    d.tokens = o->tokens;
    d.ranks = o->ranks;
    d.heads = o->heads;
    d.kv_heads = o->kv_heads;
    d.head_dim = o->head_dim;
    d.model_dim = o->model_dim;
    d.chunk = o->chunk;
    d.overlap = o->overlap;
    d.dtype = UPIPE_BF16;
    device_table(DEVICE_CUDA, &ops);
    for (d.rank = 0; d.rank < o->ranks; ++d.rank) {
        upipe_layer *layer = &t->layers[d.rank];
        UPIPE_TRY(upipe_plan_init(&t->plans[d.rank], &d, e));
        layer->plan = &t->plans[d.rank];
        layer->tile_rows = o->model_dim; /* as config.md says of a GPU */
        layer->rope_theta = 500000;
        layer->mask.causal = !o->full;
        layer->wq = w[0], layer->wk = w[1], layer->wv = w[2];
        if (upipe_dry_init(&dry, layer->plan, &ops) || upipe_dry_layer(&dry, layer, 1))
            return *e = dry.ctx.err, dry.ctx.err.status;
        t->plan_peak[d.rank] = upipe_dry_bytes(&dry).peak;
        if (dry.mem.need > t->slab_bytes) t->slab_bytes = dry.mem.need;
        if (dry.mem.blocks_peak > t->blocks_max) t->blocks_max = dry.mem.blocks_peak;
    }
    if (t->blocks_max > BLOCKS_MAX) return upipe_fail(e, UPIPE_ERR_MEMORY, "%d live blocks", t->blocks_max);
    return UPIPE_OK;
}

/* What a driver gives out comes in pages of 2 MiB. */
static size_t pages(size_t bytes)
{
    return (bytes + (2 << 20) - 1) >> 21 << 21;
}

/* Forward and backward of the block. The first pass warms up: the driver loads kernels when they are first launched.
 * What it gives out then, and in all passes behind it, is in the result, slabs apart. */
static upipe_status measure_block(upipe_ctx *c, const options *o, upipe_err *e)
{
    static team t;
    int64_t wide = (int64_t)o->heads * o->head_dim, narrow = (int64_t)o->kv_heads * o->head_dim;
    size_t gradients = (size_t)((wide + 2 * narrow) * o->model_dim) * 4, before, slabs, left;
    void *w[3];
    int r, i;
    UPIPE_TRY(team_open(&t, o, e));
    for (i = 0; i < 3; ++i) {
        UPIPE_TRY(buf(c, &w[i], (i == 0 ? wide : narrow) * o->model_dim, UPIPE_BF16));
        UPIPE_TRY(fill(c, w[i], (i == 0 ? wide : narrow) * o->model_dim, (uint64_t)i + 1));
    }
    UPIPE_TRY(c->ops->sync(c));
    UPIPE_TRY(block_plans(&t, w, e));
    for (r = 0; r < o->ranks; ++r) {
        if (t.plans[r].overlap) UPIPE_TRY(side_stream_open(&t.lines[r], &t.devices[r], 1, c));
        UPIPE_TRY(upipe_cuda_slab(&t.grads[r], gradients, e));
        UPIPE_CUDA_TRY(e, cudaMemset(t.grads[r], 0, gradients));
    }
    UPIPE_CUDA_TRY(e, cudaDeviceSynchronize());
    UPIPE_TRY(device_left(DEVICE_CUDA, &before, e));
    UPIPE_TRY(team_slabs(&t, e));
    UPIPE_TRY(device_left(DEVICE_CUDA, &left, e));
    slabs = before - left;
    UPIPE_TRY(team_run(&t, block_rank, e));
    for (r = 0; r < o->ranks; ++r)
        if (t.peak[r] != t.plan_peak[r])
            return upipe_fail(e, UPIPE_ERR_BACKEND, "rank %d held %zu bytes, the plan says %zu", r, t.peak[r],
                              t.plan_peak[r]);
    printf(
        "{\"method\": \"%s\", \"overlap\": %s, \"ranks\": %d, \"tokens\": %lld, \"model_dim\": %lld, \"heads\": %d, "
        "\"kv_heads\": %d, \"head_dim\": %d, \"chunk\": %d, \"fwd_seconds\": %.6g, \"bwd_seconds\": %.6g, "
        "\"plan_bytes\": %zu, \"peak_bytes\": %zu, \"slab_bytes\": %zu, \"driver_slabs_bytes\": %zu, "
        "\"expected_slabs_bytes\": %zu, \"driver_first_pass_bytes\": %lld, \"driver_beyond_slabs_bytes\": %lld}\n",
        o->chunk == o->heads ? "ulysses" : "upipe", t.plans[0].overlap ? "true" : "false", o->ranks,
        (long long)o->tokens, (long long)o->model_dim, o->heads, o->kv_heads, o->head_dim, o->chunk,
        slowest(&t, 0, o->layers), slowest(&t, 1, o->layers), t.plan_peak[0], t.peak[0], t.slab_bytes, slabs,
        pages(t.slab_bytes) * (size_t)o->ranks, (long long)(before - slabs) - (long long)t.free_warm,
        (long long)t.free_warm - (long long)t.free_least);
    for (i = 0; i < 3; ++i) UPIPE_TRY(upipe_cuda_slab_free(w[i], e));
    team_close(&t);
    return UPIPE_OK;
}

/* ---- the command line ---- */

int main(int argc, char **argv)
{
    static const char *const commands[] = {"device", "roofline", "attention", "transfer", "block", "rows"};
    enum { COMMANDS = sizeof commands / sizeof *commands };
    int given[FLAGS] = {0}, command, status;
    options o;
    upipe_ctx c;
    upipe_status s;
    device d;
    cli_start();
    memset(&o, 0, sizeof o);
    memset(&c, 0, sizeof c);
    for (command = 0; command < COMMANDS && (argc < 2 || strcmp(argv[1], commands[command]) != 0);) ++command;
    if (argc >= 2 && strcmp(argv[1], "--help") == 0) return flags_explain(&option_flags) - 1;
    if (command == COMMANDS)
        return cli_refuse("the first word is device, roofline, attention, transfer, block or rows") - 1;
    status = flags_read(&option_flags, &o, given, argc - 1, argv + 1);
    if (status != 0) return status - 1;
    if (o.tokens == 0) o.tokens = command == 1 ? 8192 : 16384;
    if (o.tokens > 1 << 20 && command == 1)
        return cli_refuse("a product of %lld rows", (long long)o.tokens) - 1;
    if (o.v_dim != 0 && command != 2)
        return cli_refuse("--v-dim would have no effect with %s", commands[command]) - 1;
    if (o.v_dim == 0) o.v_dim = o.head_dim;
    if (o.kv_heads == 0) o.kv_heads = command == 4 ? 8 : o.heads;
    if (o.chunk == 0) o.chunk = o.ranks;
    if (o.heads % o.kv_heads != 0) return cli_refuse("%d heads over %d", o.heads, o.kv_heads) - 1;
    s = device_open(&d, DEVICE_CUDA, &c.err);
    device_use(&d, &c);
    if (s == UPIPE_OK && command == 0) s = measure_device(&c);
    if (s == UPIPE_OK && command == 1) s = measure_roofline(&c, &o);
    if (s == UPIPE_OK && command == 2) s = measure_attention(&c, &d.cuda, &o);
    if (s == UPIPE_OK && command == 3) s = measure_all_to_all(&o, &c.err);
    if (s == UPIPE_OK && command == 4) s = measure_block(&c, &o, &c.err);
    if (s == UPIPE_OK && command == 5) s = measure_rows(&c, &o);
    if (s == UPIPE_ERR_UNSUPPORTED) return cli_fail("%s%s", cli_status(s), c.err.text), EXIT_REFUSED;
    if (s != UPIPE_OK) return cli_fail("%s%s", cli_status(s), c.err.text), EXIT_RUN;
    device_close(&d, NULL);
    return cli_flush("the result") == 0 ? 0 : EXIT_RUN;
}
