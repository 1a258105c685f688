/* gpu.c -- measures on one CUDA device; each command prints one JSON object on stdout
 *
 *     gpu device                                              name, driver, memory
 *     gpu roofline                                            copy bandwidth, rate of bf16 products
 *     gpu attention --tokens N --head-dim N [--full] [--heads N] [--kv-heads N]
 *     gpu exchange --tokens N [--ranks N]                     all-to-all of thread ranks, device to device
 *     gpu block --tokens N [--ranks N] [--heads N] [--kv-heads N] [--head-dim N] [--model-dim N] [--chunk N]
 *               [--layers N]
 *
 * Seconds are the median of runs after a warm-up. roofline and attention: between events on the stream. exchange
 * and block: by the host's clock, from a barrier until the rank's work is complete on the device; of a run, the
 * slowest rank.
 *
 * What is checked, or there is no figure. attention, before it is timed: o, lse and gq of three queries against
 * double precision, gk and gv of three keys likewise, given the lse and delta of the device, as recomputing those
 * of all queries takes the square of the tokens. exchange: every byte, once. block: the pool's peak against the
 * plan; its numbers are the tests' affair. roofline: nothing.
 *
 * bench/gpu.py runs all of this and keeps the results.
 */
#define PROGRAM "gpu"

#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"

#include "../examples/common/device_flag.h"

#ifndef UPIPE_WITH_CUDA
#error "compile with -DUPIPE_WITH_CUDA and link examples/common/device_table.cu"
#endif

enum { RUNS = 9, RANKS_MAX = 64, BLOCKS_MAX = 256 };

typedef struct options {
    int64_t tokens, model_dim;
    int head_dim, heads, kv_heads, ranks, chunk, full, layers;
} options;

/* clang-format off */
enum { FLAG_TOKENS, FLAG_HEAD_DIM, FLAG_HEADS, FLAG_KV_HEADS, FLAG_RANKS, FLAG_MODEL_DIM, FLAG_CHUNK, FLAG_FULL,
       FLAG_LAYERS, FLAG_HELP, FLAGS };

static const struct option option_list[] = {
    {"tokens",    required_argument, NULL, FLAG_TOKENS},
    {"head-dim",  required_argument, NULL, FLAG_HEAD_DIM},
    {"heads",     required_argument, NULL, FLAG_HEADS},
    {"kv-heads",  required_argument, NULL, FLAG_KV_HEADS},
    {"ranks",     required_argument, NULL, FLAG_RANKS},
    {"model-dim", required_argument, NULL, FLAG_MODEL_DIM},
    {"chunk",     required_argument, NULL, FLAG_CHUNK},
    {"full",      no_argument,       NULL, FLAG_FULL},
    {"layers",    required_argument, NULL, FLAG_LAYERS},
    {"help",      no_argument,       NULL, FLAG_HELP},
    {NULL, 0, NULL, 0}};

static const char usage_text[] =
    "usage: gpu device | roofline | attention | exchange | block [flags]\n"
    "\n"
    "  --tokens N     tokens of a sequence (16384)\n"
    "  --head-dim N   (128)\n"
    "  --heads N      query heads (32)\n"
    "  --kv-heads N   key/value heads (as many; block: 8)\n"
    "  --full         attention without a causal mask\n"
    "  --ranks N      thread ranks on the device (8)\n"
    "  --model-dim N  (4096)\n"
    "  --chunk N      query heads of a stage over all ranks; as many as heads is Ulysses (ranks)\n"
    "  --layers N     passes of the block that are timed (3)\n";
/* clang-format on */

static int options_flag(void *user, int flag, const char *text)
{
    options *o = (options *)user;
    const char *name = option_list[flag].name;
    switch (flag) {
    case FLAG_TOKENS:
        return cli_number(name, text, 1, INT64_C(1) << 40, &o->tokens);
    case FLAG_HEAD_DIM:
        return cli_int(name, text, 256, &o->head_dim);
    case FLAG_HEADS:
        return cli_int(name, text, 1024, &o->heads);
    case FLAG_KV_HEADS:
        return cli_int(name, text, 1024, &o->kv_heads);
    case FLAG_RANKS:
        return cli_int(name, text, RANKS_MAX, &o->ranks);
    case FLAG_MODEL_DIM:
        return cli_number(name, text, 1, 1 << 20, &o->model_dim);
    case FLAG_CHUNK:
        return cli_int(name, text, 1024, &o->chunk);
    case FLAG_LAYERS:
        return cli_int(name, text, 1000, &o->layers);
    case FLAG_FULL:
        o->full = 1;
        return 0;
    default:
        return cli_print(name, usage_text);
    }
}

/* ---- time ---- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, compare_doubles);
    return v[n / 2];
}

typedef upipe_status timed_call(upipe_ctx *c, void *user);

/* Median seconds of one call on the context's stream, by events. */
static upipe_status timed(upipe_ctx *c, timed_call *call, void *user, double *seconds)
{
    cudaEvent_t from, to;
    double runs[RUNS];
    float ms = 0;
    int i;
    UPI_CUDA(&c->err, cudaEventCreate(&from));
    UPI_CUDA(&c->err, cudaEventCreate(&to));
    for (i = -2; i < RUNS; ++i) {
        UPI_CUDA(&c->err, cudaEventRecord(from, (cudaStream_t)c->stream));
        UPIPE_TRY(call(c, user));
        UPI_CUDA(&c->err, cudaEventRecord(to, (cudaStream_t)c->stream));
        UPI_CUDA(&c->err, cudaEventSynchronize(to));
        UPI_CUDA(&c->err, cudaEventElapsedTime(&ms, from, to));
        if (i >= 0) runs[i] = (double)ms * 1e-3;
    }
    *seconds = median(runs, RUNS);
    UPI_CUDA(&c->err, cudaEventDestroy(from));
    UPI_CUDA(&c->err, cudaEventDestroy(to));
    return UPIPE_OK;
}

static upipe_status room(upipe_ctx *c, void **out, int64_t elements, upipe_dtype dtype)
{
    return upipe_cuda_slab(out, (size_t)elements * upipe_dtype_bytes(dtype), &c->err);
}

/* bf16 numbers in -1 .. 1 */
static float number_at(uint64_t i, uint64_t seed)
{
    uint64_t z = (i + seed * 1000003) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z ^= z >> 29;
    return (float)((int)(z % 255) - 127) / 128;
}

static upipe_status fill(upipe_ctx *c, void *to, int64_t n, uint64_t seed)
{
    enum { CHUNK = 1 << 16 };
    static uint16_t narrow[CHUNK];
    int64_t at, i;
    for (at = 0; at < n; at += CHUNK) {
        int64_t here = n - at < CHUNK ? n - at : CHUNK;
        for (i = 0; i < here; ++i) narrow[i] = upi_f32_to_bf16(number_at((uint64_t)(at + i), seed));
        UPIPE_TRY(c->ops->copy(c, (uint16_t *)to + at, narrow, (size_t)here * 2));
    }
    return UPIPE_OK;
}

/* ---- device, roofline ---- */

static upipe_status measure_device(upipe_ctx *c)
{
    struct cudaDeviceProp about;
    int driver, runtime, number;
    UPI_CUDA(&c->err, cudaGetDevice(&number));
    UPI_CUDA(&c->err, cudaGetDeviceProperties(&about, number));
    UPI_CUDA(&c->err, cudaDriverGetVersion(&driver));
    UPI_CUDA(&c->err, cudaRuntimeGetVersion(&runtime));
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

static upipe_status measure_roofline(upipe_ctx *c)
{
    roofline r;
    double copy, product, n;
    int64_t count;
    r.n = 8192;
    count = (int64_t)r.n * r.n;
    r.bytes = (size_t)count * 2 * 8;
    UPIPE_TRY(room(c, &r.a, count * 8, UPIPE_BF16));
    UPIPE_TRY(room(c, &r.b, count, UPIPE_BF16));
    UPIPE_TRY(room(c, &r.y, count * 8, UPIPE_BF16));
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

/* ---- attention ---- */

static upipe_status attention_fwd(upipe_ctx *c, void *user)
{
    return upipe_attn_fwd(c, &((upipe_attn_grad *)user)->a);
}

/* delta = rowsum(go * o) belongs to it: the backward of other libraries includes it too. */
static upipe_status attention_bwd(upipe_ctx *c, void *user)
{
    upipe_attn_grad *g = (upipe_attn_grad *)user;
    UPIPE_TRY(c->ops->rowdot(c, g->delta, g->a.o, g->go));
    return upipe_attn_bwd(c, g);
}

enum { SEED_Q = 1, SEED_K, SEED_V, SEED_GO, HEAD_DIM_MAX = 256 };
enum { CHECK_O, CHECK_LSE, CHECK_GQ, CHECK_GK, CHECK_GV, CHECKS };

static const char *const check_names[] = {"o", "lse", "gq", "gk", "gv"};
/* lse: absolute; the others: of the largest number in the row */
static const double check_limits[] = {0.02, 1e-3, 0.02, 0.02, 0.02};

/* The row that fill has made of token i and head h. */
static void made(double *row, const options *o, int64_t i, int heads, int h, uint64_t seed)
{
    uint64_t at = ((uint64_t)i * (uint64_t)heads + (uint64_t)h) * (uint64_t)o->head_dim;
    int k;
    for (k = 0; k < o->head_dim; ++k) row[k] = (double)number_at(at + (uint64_t)k, seed);
}

static double dot(const double *a, const double *b, int n)
{
    double sum = 0;
    int k;
    for (k = 0; k < n; ++k) sum += a[k] * b[k];
    return sum;
}

/* to += factor * x */
static void add(double *to, double factor, const double *x, int n)
{
    int k;
    for (k = 0; k < n; ++k) to[k] += factor * x[k];
}

/* A NaN counts as more than any number. */
static double larger(double a, double b)
{
    return a >= b || isnan(a) ? a : b;
}

/* *worst: at least the largest error of the device's row of token i and head h, over the largest number wanted. */
static upipe_status check_row(upipe_ctx *c, upipe_view v, int64_t i, int h, const double *want, double *worst)
{
    union {
        float wide[HEAD_DIM_MAX];
        uint16_t narrow[HEAD_DIM_MAX];
    } got;
    double error = 0, most = 1e-30;
    int k;
    UPIPE_TRY(c->ops->copy(c, &got, upipe_view_at(v, i, h), (size_t)v.d * upipe_dtype_bytes(v.dtype)));
    for (k = 0; k < v.d; ++k) {
        float x = v.dtype == UPIPE_F32 ? got.wide[k] : upi_bf16_to_f32(got.narrow[k]);
        error = larger(error, fabs(want[k] - (double)x));
        most = larger(most, fabs(want[k]));
    }
    *worst = larger(*worst, error / most);
    return UPIPE_OK;
}

/* One query of the last head. room: two numbers a token. */
static upipe_status check_query(upipe_ctx *c, const options *o, const upipe_attn_grad *g, int64_t i,
                                double *room, double *worst)
{
    double q[HEAD_DIM_MAX], go[HEAD_DIM_MAX], key[HEAD_DIM_MAX], value[HEAD_DIM_MAX];
    double out[HEAD_DIM_MAX] = {0}, gq[HEAD_DIM_MAX] = {0};
    double *p = room, *gp = room + o->tokens, top = -INFINITY, sum = 0, delta = 0;
    double scale = 1 / sqrt((double)o->head_dim);
    int64_t seen = o->full ? o->tokens : i + 1, j;
    int d = o->head_dim, h = o->heads - 1, kv = o->kv_heads - 1;
    float lse;
    made(q, o, i, o->heads, h, SEED_Q);
    made(go, o, i, o->heads, h, SEED_GO);
    for (j = 0; j < seen; ++j) {
        made(key, o, j, o->kv_heads, kv, SEED_K);
        made(value, o, j, o->kv_heads, kv, SEED_V);
        p[j] = scale * dot(q, key, d);
        gp[j] = dot(go, value, d);
        top = larger(top, p[j]);
    }
    for (j = 0; j < seen; ++j) sum += p[j] = exp(p[j] - top);
    for (j = 0; j < seen; ++j) delta += (p[j] /= sum) * gp[j];
    for (j = 0; j < seen; ++j) {
        made(key, o, j, o->kv_heads, kv, SEED_K);
        made(value, o, j, o->kv_heads, kv, SEED_V);
        add(out, p[j], value, d);
        add(gq, scale * p[j] * (gp[j] - delta), key, d);
    }
    UPIPE_TRY(c->ops->copy(c, &lse, upipe_view_at(g->a.lse, i, h), sizeof lse));
    worst[CHECK_LSE] = larger(worst[CHECK_LSE], fabs(top + log(sum) - (double)lse));
    UPIPE_TRY(check_row(c, g->a.o, i, h, out, &worst[CHECK_O]));
    return check_row(c, g->gq, i, h, gq, &worst[CHECK_GQ]);
}

/* One key of the last key/value head: what all queries of its group give to it. lse, delta: the device's. */
static upipe_status check_key(upipe_ctx *c, const options *o, const upipe_attn_grad *g, int64_t j,
                              const float *lse, const float *delta, double *worst)
{
    double q[HEAD_DIM_MAX], go[HEAD_DIM_MAX], key[HEAD_DIM_MAX], value[HEAD_DIM_MAX];
    double gk[HEAD_DIM_MAX] = {0}, gv[HEAD_DIM_MAX] = {0}, scale = 1 / sqrt((double)o->head_dim);
    int d = o->head_dim, kv = o->kv_heads - 1, h;
    int64_t i;
    made(key, o, j, o->kv_heads, kv, SEED_K);
    made(value, o, j, o->kv_heads, kv, SEED_V);
    for (h = kv * (o->heads / o->kv_heads); h < o->heads; ++h) {
        for (i = o->full ? 0 : j; i < o->tokens; ++i) {
            int64_t at = i * o->heads + h;
            double p;
            made(q, o, i, o->heads, h, SEED_Q);
            made(go, o, i, o->heads, h, SEED_GO);
            p = exp(scale * dot(q, key, d) - (double)lse[at]);
            add(gv, p, go, d);
            add(gk, scale * p * (dot(go, value, d) - (double)delta[at]), q, d);
        }
    }
    UPIPE_TRY(check_row(c, g->gk, j, kv, gk, &worst[CHECK_GK]));
    return check_row(c, g->gv, j, kv, gv, &worst[CHECK_GV]);
}

/* Forward and backward once. The rows have long sums: no gradient here is a difference of near equals. */
static upipe_status check_attention(upipe_ctx *c, const options *o, upipe_attn_grad *g, double *worst)
{
    const int64_t n = o->tokens, queries[] = {n / 3, n / 2, n - 1}, keys[] = {0, n / 2, n - 1 - n / 8};
    size_t all = (size_t)n * (size_t)o->heads;
    double *room = (double *)malloc((size_t)n * 2 * sizeof *room);
    float *lse = (float *)malloc(all * sizeof *lse), *delta = (float *)malloc(all * sizeof *delta);
    int i;
    if (room == NULL || lse == NULL || delta == NULL)
        return upi_fail(&c->err, UPIPE_ERR_MEMORY, "no room for a check");
    UPIPE_TRY(attention_fwd(c, g));
    UPIPE_TRY(attention_bwd(c, g));
    UPIPE_TRY(c->ops->copy(c, lse, g->a.lse.data, all * sizeof *lse));
    UPIPE_TRY(c->ops->copy(c, delta, g->delta.data, all * sizeof *delta));
    for (i = 0; i < CHECKS; ++i) worst[i] = 0;
    for (i = 0; i < 3; ++i) UPIPE_TRY(check_query(c, o, g, queries[i], room, worst));
    for (i = 0; i < 3; ++i) UPIPE_TRY(check_key(c, o, g, keys[i], lse, delta, worst));
    free(room);
    free(lse);
    free(delta);
    for (i = 0; i < CHECKS; ++i)
        if (!(worst[i] <= check_limits[i]))
            return upi_fail(&c->err, UPIPE_ERR_BACKEND, "attention: %s has an error of %g, more than %g",
                            check_names[i], worst[i], check_limits[i]);
    return UPIPE_OK;
}

static upipe_status measure_attention(upipe_ctx *c, const options *o)
{
    int64_t n = o->tokens * o->heads * o->head_dim, m = o->tokens * o->kv_heads * o->head_dim;
    upipe_attn_grad g;
    upipe_attn *a = &g.a;
    void *p[11];
    double fwd, bwd, flop, errors[CHECKS];
    size_t work[2];
    int i;
    memset(&g, 0, sizeof g);
    for (i = 0; i < 4; ++i) UPIPE_TRY(room(c, &p[i], n, UPIPE_BF16));                    /* q o go gq */
    for (i = 4; i < 6; ++i) UPIPE_TRY(room(c, &p[i], m, UPIPE_BF16));                    /* k v */
    for (i = 6; i < 8; ++i) UPIPE_TRY(room(c, &p[i], m, UPIPE_F32));                     /* gk gv */
    for (i = 8; i < 10; ++i) UPIPE_TRY(room(c, &p[i], o->tokens * o->heads, UPIPE_F32)); /* lse delta */
    UPIPE_TRY(fill(c, p[0], n, SEED_Q));
    UPIPE_TRY(fill(c, p[2], n, SEED_GO));
    UPIPE_TRY(fill(c, p[4], m, SEED_K));
    UPIPE_TRY(fill(c, p[5], m, SEED_V));
    UPIPE_TRY(c->ops->zero(c, p[6], (size_t)m * 4));
    UPIPE_TRY(c->ops->zero(c, p[7], (size_t)m * 4));
    a->q = upipe_view_packed(p[0], UPIPE_BF16, o->tokens, o->heads, o->head_dim);
    a->o = upipe_view_packed(p[1], UPIPE_BF16, o->tokens, o->heads, o->head_dim);
    g.go = upipe_view_packed(p[2], UPIPE_BF16, o->tokens, o->heads, o->head_dim);
    g.gq = upipe_view_packed(p[3], UPIPE_BF16, o->tokens, o->heads, o->head_dim);
    a->k = upipe_view_packed(p[4], UPIPE_BF16, o->tokens, o->kv_heads, o->head_dim);
    a->v = upipe_view_packed(p[5], UPIPE_BF16, o->tokens, o->kv_heads, o->head_dim);
    g.gk = upipe_view_packed(p[6], UPIPE_F32, o->tokens, o->kv_heads, o->head_dim);
    g.gv = upipe_view_packed(p[7], UPIPE_F32, o->tokens, o->kv_heads, o->head_dim);
    a->lse = upipe_view_packed(p[8], UPIPE_F32, o->tokens, o->heads, 1);
    g.delta = upipe_view_packed(p[9], UPIPE_F32, o->tokens, o->heads, 1);
    a->causal = !o->full;
    work[0] = c->ops->attn_bytes(c->ops, a, 0);
    work[1] = c->ops->attn_bytes(c->ops, a, 1);
    a->work_bytes = work[0] > work[1] ? work[0] : work[1];
    UPIPE_TRY(upipe_cuda_slab(&p[10], a->work_bytes, &c->err));
    a->work = p[10];
    UPIPE_TRY(check_attention(c, o, &g, errors));
    UPIPE_TRY(timed(c, attention_fwd, &g, &fwd));
    UPIPE_TRY(timed(c, attention_bwd, &g, &bwd));
    /* as everybody counts: four flops a score and element forward, ten backward, half of them if causal */
    flop = 4.0 * (double)o->tokens * (double)o->tokens * o->heads * o->head_dim / (o->full ? 1 : 2);
    printf(
        "{\"tokens\": %lld, \"heads\": %d, \"kv_heads\": %d, \"head_dim\": %d, \"causal\": %s, "
        "\"fwd_seconds\": %.6g, \"fwd_flop_per_s\": %.4g, \"bwd_seconds\": %.6g, \"bwd_flop_per_s\": %.4g, "
        "\"work_bytes_bwd\": %zu, \"checked\": {",
        (long long)o->tokens, o->heads, o->kv_heads, o->head_dim, o->full ? "false" : "true", fwd, flop / fwd,
        bwd, 2.5 * flop / bwd, work[1]);
    for (i = 0; i < CHECKS; ++i) printf("%s\"%s\": %.2g", i > 0 ? ", " : "", check_names[i], errors[i]);
    puts("}}");
    for (i = 0; i <= 10; ++i) UPIPE_TRY(upipe_cuda_slab_free(p[i], &c->err));
    return UPIPE_OK;
}

/* ---- ranks: exchange and block ---- */

typedef struct team {
    const options *o;
    upipe_threads threads;
    upipe_plan plan;
    upipe_layer layer;
    device devices[RANKS_MAX];
    void *slabs[RANKS_MAX], *grads[RANKS_MAX];
    upipe_err errors[RANKS_MAX];
    double runs[RANKS_MAX][2][RUNS]; /* seconds, forward and backward */
    size_t slab_bytes, peak[RANKS_MAX], plan_peak, free_before, free_least;
    int blocks_max;
} team;

/* Byte i of what rank `from` sends rank `to`. */
static unsigned char pattern(int from, int to, size_t i)
{
    return (unsigned char)((i + (size_t)from * 0x51 + (size_t)to * 0x8f) * 0x9e3779b1u >> 13);
}

/* One exchange of blocks that tell their sender, receiver and place. */
static upipe_status exchange_check(upipe_ctx *c, char *from, char *to, size_t block, const upipe_plan *each)
{
    int rank = c->team->rank, ranks = c->team->ranks, p;
    unsigned char *bytes = (unsigned char *)malloc(block);
    size_t i;
    if (bytes == NULL) return upi_fail(&c->err, UPIPE_ERR_MEMORY, "no room for a check");
    UPIPE_TRY(c->ops->zero(c, to, block * (size_t)ranks));
    for (p = 0; p < ranks; ++p) {
        for (i = 0; i < block; ++i) bytes[i] = pattern(rank, p, i);
        UPIPE_TRY(c->ops->copy(c, from + (size_t)p * block, bytes, block));
    }
    UPIPE_TRY(upipe_a2a_to_heads(c, to, from, each, 0, UPIPE_Q, block));
    for (p = 0; p < ranks; ++p) {
        UPIPE_TRY(c->ops->copy(c, bytes, to + (size_t)p * block, block));
        for (i = 0; i < block && bytes[i] == pattern(p, rank, i);) ++i;
        if (i < block)
            return upi_fail(&c->err, UPIPE_ERR_BACKEND, "exchange: byte %zu from rank %d to rank %d is wrong",
                            i, p, rank);
    }
    free(bytes);
    return UPIPE_OK;
}

/* An exchange of one block of any size a rank: one token and one head each. */
static upipe_status blocks_plan(upipe_plan *p, int ranks, upipe_err *e)
{
    upipe_plan_desc d;
    memset(&d, 0, sizeof d);
    d.tokens = d.ranks = d.heads = ranks;
    d.head_dim = 1;
    return upipe_plan_init(p, &d, e);
}

static upipe_status exchange_rank(void *user, int rank)
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
    s = blocks_plan(&each, o->ranks, &c.err);
    if (s == UPIPE_OK) s = exchange_check(&c, from, to, block, &each);
    for (i = -2; i < RUNS && s == UPIPE_OK; ++i) {
        double start;
        s = upipe_comm_barrier(&c, c.team);
        if (s != UPIPE_OK) break;
        start = cli_clock(NULL);
        s = upipe_a2a_to_heads(&c, to, from, &each, 0, UPIPE_Q, block);
        if (i >= 0) t->runs[rank][0][i] = cli_clock(NULL) - start;
    }
    t->errors[rank] = c.err;
    return s;
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
    for (r = 0; r < o->ranks; ++r) UPIPE_TRY(device_open(&t->devices[r], DEVICE_CUDA, e));
    return UPIPE_OK;
}

static upipe_status team_slabs(team *t, upipe_err *e)
{
    int r;
    for (r = 0; r < t->o->ranks; ++r) {
        UPIPE_TRY(device_slab(&t->devices[r], &t->slabs[r], t->slab_bytes, e));
        UPI_CUDA(e, cudaStreamSynchronize((cudaStream_t)t->devices[r].stream));
    }
    return UPIPE_OK;
}

static upipe_status team_run(team *t, upipe_status (*body)(void *user, int rank), upipe_err *e)
{
    upipe_status statuses[RANKS_MAX], s = upipe_threads_run(&t->threads, body, t, statuses);
    if (s != UPIPE_OK) *e = t->errors[cli_reason(statuses, t->o->ranks, s)];
    return s;
}

static void team_close(team *t)
{
    int r;
    for (r = 0; r < t->o->ranks; ++r) {
        device_slab_free(&t->devices[r], t->slabs[r]);
        device_slab_free(&t->devices[r], t->grads[r]);
        device_close(&t->devices[r], NULL);
    }
    upipe_threads_free(&t->threads);
}

static upipe_status measure_exchange(const options *o, upipe_err *e)
{
    static team t;
    size_t sent;
    double seconds;
    UPIPE_TRY(team_open(&t, o, e));
    t.slab_bytes = (size_t)(o->tokens / o->ranks) * (size_t)o->head_dim * 2 * (size_t)o->ranks * 2;
    UPIPE_TRY(team_slabs(&t, e));
    UPIPE_TRY(team_run(&t, exchange_rank, e));
    seconds = slowest(&t, 0, RUNS);
    sent = t.slab_bytes / 2 * (size_t)o->ranks; /* by all ranks together, what stays at home included */
    printf("{\"ranks\": %d, \"tokens\": %lld, \"head_dim\": %d, \"bytes\": %zu, \"seconds\": %.6g, "
           "\"bytes_per_s\": %.4g, \"checked\": [\"bytes\"]}\n",
           o->ranks, (long long)o->tokens, o->head_dim, sent, seconds, 2 * (double)sent / seconds);
    team_close(&t);
    return UPIPE_OK;
}

static size_t device_left(void)
{
    size_t left = 0, total = 0;
    return cudaMemGetInfo(&left, &total) == cudaSuccess ? left : 0;
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
    const upipe_plan *p = &t->plan;
    float *gradient = (float *)t->grads[rank];
    int64_t wq = (int64_t)p->desc.heads * p->desc.head_dim * p->desc.model_dim;
    int64_t wk = (int64_t)p->desc.kv_heads * p->desc.head_dim * p->desc.model_dim;
    upipe_grads grads;
    upipe_saved saved;
    upipe_slots gout;
    upipe_view x;
    void *data;
    size_t left;
    double start;
    memset(&grads, 0, sizeof grads);
    grads.wq = gradient;
    grads.wk = gradient + wq;
    grads.wv = gradient + wq + wk;
    UPIPE_TRY(upipe_mem_take(c->mem, &data, upipe_plan_unit_bytes(p), "x", &c->err));
    x = upipe_view_packed(data, p->desc.dtype, p->rows, 1, (int32_t)p->desc.model_dim);
    UPIPE_TRY(repeat(c, data, upipe_plan_unit_bytes(p), t->layer.wq, (size_t)wq * 2));
    UPIPE_TRY(c->ops->sync(c));
    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    start = cli_clock(NULL);
    UPIPE_TRY(upipe_layer_fwd(c, &t->layer, &saved, x));
    UPIPE_TRY(c->ops->sync(c));
    if (run >= 0) t->runs[rank][0][run] = cli_clock(NULL) - start;
    UPIPE_TRY(upipe_layer_slots_take(c, &t->layer, &gout, UPIPE_SLOT_FULL, "gout"));
    UPIPE_TRY(
        c->ops->copy(c, gout.data, saved.out.data, upipe_plan_rows_bytes(p, p->desc.heads, p->desc.v_dim)));
    UPIPE_TRY(c->ops->sync(c));
    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    start = cli_clock(NULL);
    UPIPE_TRY(upipe_layer_bwd(c, &t->layer, x, &grads, &saved, &gout, x));
    UPIPE_TRY(c->ops->sync(c));
    if (run >= 0) t->runs[rank][1][run] = cli_clock(NULL) - start;
    left = device_left();
    if (rank == 0 && left < t->free_least) t->free_least = left;
    UPIPE_TRY(upipe_mem_give(c->mem, gout.data, &c->err));
    return upipe_mem_give(c->mem, x.data, &c->err);
}

static upipe_status block_rank(void *user, int rank)
{
    team *t = (team *)user;
    upipe_block blocks[BLOCKS_MAX];
    upipe_status s = UPIPE_OK;
    upipe_mem mem;
    upipe_ctx c;
    int i;
    memset(&c, 0, sizeof c);
    device_use(&t->devices[rank], &c);
    c.team = upipe_threads_comm(&t->threads, rank);
    upipe_mem_init(&mem, t->slabs[rank], t->slab_bytes, blocks, t->blocks_max);
    c.mem = &mem;
    for (i = -1; i < t->o->layers && s == UPIPE_OK; ++i) s = block_pass(t, &c, rank, i);
    t->peak[rank] = mem.peak;
    t->errors[rank] = c.err;
    upipe_mem_free(&mem, NULL);
    return s;
}

static upipe_status block_plan(team *t, upipe_err *e)
{
    static upipe_dry dry;
    const options *o = t->o;
    upipe_plan_scratch scratch;
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
    d.dtype = UPIPE_BF16;
    UPIPE_TRY(upipe_plan_init(&t->plan, &d, e));
    t->layer.plan = &t->plan;
    t->layer.rope_theta = 500000;
    t->layer.full = o->full;
    device_table(DEVICE_CUDA, &ops);
    scratch = upipe_layer_scratch(&ops, &t->layer, 1);
    t->plan_peak = upipe_plan_bytes(&t->plan, &scratch).peak;
    t->layer.wq = t->layer.wk = t->layer.wv = t; /* must be there, and is not read */
    if (upipe_dry_init(&dry, &t->plan, &ops) || upipe_dry_layer(&dry, &t->layer, 1))
        return *e = dry.ctx.err, dry.ctx.err.status;
    t->slab_bytes = dry.mem.need;
    t->blocks_max = dry.mem.blocks_peak;
    if (t->blocks_max > BLOCKS_MAX) return upi_fail(e, UPIPE_ERR_MEMORY, "%d live blocks", t->blocks_max);
    return UPIPE_OK;
}

/* What a driver gives out comes in pages of 2 MiB. */
static size_t pages(size_t bytes)
{
    return (bytes + (2 << 20) - 1) >> 21 << 21;
}

/* Forward and backward of the block. The first pass warms up; what the driver gives out in all of it, slabs
 * apart, is in the result. */
static upipe_status measure_block(upipe_ctx *c, const options *o, upipe_err *e)
{
    static team t;
    int64_t wide = (int64_t)o->heads * o->head_dim, narrow = (int64_t)o->kv_heads * o->head_dim;
    size_t gradients = (size_t)((wide + 2 * narrow) * o->model_dim) * 4, slabs;
    void *w[3];
    int r, i;
    UPIPE_TRY(team_open(&t, o, e));
    UPIPE_TRY(block_plan(&t, e));
    for (i = 0; i < 3; ++i) {
        UPIPE_TRY(room(c, &w[i], (i == 0 ? wide : narrow) * o->model_dim, UPIPE_BF16));
        UPIPE_TRY(fill(c, w[i], (i == 0 ? wide : narrow) * o->model_dim, (uint64_t)i + 1));
    }
    UPIPE_TRY(c->ops->sync(c));
    t.layer.wq = w[0];
    t.layer.wk = w[1];
    t.layer.wv = w[2];
    for (r = 0; r < o->ranks; ++r) {
        UPIPE_TRY(upipe_cuda_slab(&t.grads[r], gradients, e));
        UPI_CUDA(e, cudaMemset(t.grads[r], 0, gradients));
    }
    UPI_CUDA(e, cudaDeviceSynchronize());
    t.free_before = device_left();
    UPIPE_TRY(team_slabs(&t, e));
    slabs = t.free_before - device_left();
    t.free_least = t.free_before;
    UPIPE_TRY(team_run(&t, block_rank, e));
    for (r = 0; r < o->ranks; ++r)
        if (t.peak[r] != t.plan_peak)
            return upi_fail(e, UPIPE_ERR_BACKEND, "rank %d held %zu bytes, the plan says %zu", r, t.peak[r],
                            t.plan_peak);
    printf("{\"method\": \"%s\", \"ranks\": %d, \"tokens\": %lld, \"model_dim\": %lld, \"heads\": %d, "
           "\"kv_heads\": %d, \"head_dim\": %d, \"chunk\": %d, \"fwd_seconds\": %.6g, \"bwd_seconds\": %.6g, "
           "\"plan_bytes\": %zu, \"peak_bytes\": %zu, \"slab_bytes\": %zu, \"driver_slabs_bytes\": %zu, "
           "\"expected_slabs_bytes\": %zu, \"driver_beyond_slabs_bytes\": %lld}\n",
           o->chunk == o->heads ? "ulysses" : "upipe", o->ranks, (long long)o->tokens,
           (long long)o->model_dim, o->heads, o->kv_heads, o->head_dim, o->chunk, slowest(&t, 0, o->layers),
           slowest(&t, 1, o->layers), t.plan_peak, t.peak[0], t.slab_bytes, slabs,
           pages(t.slab_bytes) * (size_t)o->ranks,
           (long long)(t.free_before - slabs) - (long long)t.free_least);
    for (i = 0; i < 3; ++i) UPIPE_TRY(upipe_cuda_slab_free(w[i], e));
    team_close(&t);
    return UPIPE_OK;
}

/* ---- the command line ---- */

int main(int argc, char **argv)
{
    static const char *const commands[] = {"device", "roofline", "attention", "exchange", "block"};
    int given[FLAGS] = {0}, command, status;
    options o;
    upipe_ctx c;
    upipe_status s;
    device d;
    memset(&o, 0, sizeof o);
    memset(&c, 0, sizeof c);
    o.tokens = 16384;
    o.head_dim = 128;
    o.heads = 32;
    o.ranks = 8;
    o.model_dim = 4096;
    o.layers = 3;
    for (command = 0; command < 5 && (argc < 2 || strcmp(argv[1], commands[command]) != 0);) ++command;
    if (argc >= 2 && strcmp(argv[1], "--help") == 0) return cli_print("help", usage_text) - 1;
    if (command == 5)
        return cli_refuse("the first word is device, roofline, attention, exchange or block") - 1;
    status = cli_read(option_list, argc - 1, argv + 1, given, -1, options_flag, &o);
    if (status != 0) return status - 1;
    if (o.kv_heads == 0) o.kv_heads = command == 4 ? 8 : o.heads;
    if (o.chunk == 0) o.chunk = o.ranks;
    if (o.heads % o.kv_heads != 0) return cli_refuse("%d heads over %d", o.heads, o.kv_heads) - 1;
    if (o.layers > RUNS) return cli_refuse("--layers %d: at most %d", o.layers, RUNS) - 1;
    s = device_open(&d, DEVICE_CUDA, &c.err);
    device_use(&d, &c);
    if (s == UPIPE_OK && command == 0) s = measure_device(&c);
    if (s == UPIPE_OK && command == 1) s = measure_roofline(&c);
    if (s == UPIPE_OK && command == 2) s = measure_attention(&c, &o);
    if (s == UPIPE_OK && command == 3) s = measure_exchange(&o, &c.err);
    if (s == UPIPE_OK && command == 4) s = measure_block(&c, &o, &c.err);
    if (s != UPIPE_OK) return cli_fail("%s%s", cli_status(s), c.err.text), EXIT_RUN;
    device_close(&d, NULL);
    return 0;
}
