/* kernels.c -- what the benchmarks call through a shared object: the machine's peaks, and attention
 *
 * Kernels of bench/common.py compiles it, or a file that includes it, and loads it with ctypes; handles stay until the
 * program ends:
 *
 *     bench *b = bench_open(threads);          NULL: no memory or no threads
 *     double flop_per_s = bench_peak(b);       fused multiply-adds in the vectors that the kernels use
 *     const char *why = bench_attn_fwd(b, &c); NULL: done
 */
#include <stdlib.h>
#include <time.h>

#include "upipe/cpu/upipe_cpu.h"
#include "upipe/cpu/upipe_cpu_attn_bf16.h"
#include "upipe/upipe_attn.h"
#include "examples/common/pool.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

/* bench_case -- one attention call, packed
 *   q dq        [tokens][heads][head_dim]
 *   o dout      [tokens][heads][v_dim]
 *   k dk        [keys][heads][head_dim]
 *   v dv        [keys][heads][v_dim]
 *   dk dv       f32; the others are bf16 if `bf16`, else f32
 *   lse delta   f32 [tokens][heads]
 *   work        work_bytes of bench_attn_bytes, 64-byte aligned
 *   causal window cu_seqlens cu_seqlens_n softcap      as in upipe_attn
 */
typedef struct bench_case {
    void *q, *k, *v, *o, *dout, *dq;
    float *dk, *dv, *lse, *delta;
    void *work;
    const int64_t *cu_seqlens;
    int64_t work_bytes, tokens, keys, cu_seqlens_n, window;
    int32_t heads, head_dim, v_dim, causal, bf16;
    float softcap;
} bench_case;

typedef struct bench {
    pool threads;
    upipe_par par;
    upipe_ops ops;
    upipe_ctx ctx;
    int64_t turns;        /* of the loop that measures the peak */
    float sink[POOL_MAX]; /* what the loops leave: nothing is optimised away */
    float *a, *x, *y;     /* bandwidth */
    int64_t n;
} bench;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

bench *bench_open(int32_t threads)
{
    bench *b = (bench *)calloc(1, sizeof *b);
    if (b == NULL) return NULL;
    if (pool_init(&b->threads, threads) != 0) {
        free(b);
        return NULL;
    }
    b->par = pool_par(&b->threads);
    upipe_cpu_ops(&b->ops);
    if (threads > 1) b->ops.par = &b->par;
    b->ctx.ops = &b->ops;
    return b;
}

const char *bench_name(const bench *b)
{
    return b->ops.name;
}

/* From now on bf16's attention is that in the processor's bf16 instructions. NULL: done; else why not */
const char *bench_use_bf16(bench *b)
{
    return upipe_cpu_attn_bf16(&b->ops, &b->ctx.err) ? b->ctx.err.text : NULL;
}

/* Those instructions; NULL: none. */
const char *bench_bf16_name(void)
{
    return upipe_cpu_bf16_name();
}

/* ---- fused multiply-adds ---- */

/* Independent chains, so that the units never wait: four cycles of latency on two of them take eight, on the
 * four of some ARM cores sixteen. Each has a name: an array of registers would be spilled. */
#define CHAINS_6(X)  X(0) X(1) X(2) X(3) X(4) X(5)
#define CHAINS_12(X) CHAINS_6(X) X(6) X(7) X(8) X(9) X(10) X(11)
#define CHAINS_24(X) CHAINS_12(X) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23)

#define PEAK_DECLARE(i) vec r##i = PEAK_SET(1e-3f * (float)(i + 1));
#define PEAK_FMA(i)     r##i = PEAK_STEP(r##i, x, y);
#define PEAK_STORE(i)   PEAK_PUT(out, r##i), sum += out[0];

/* Left in *sink: a sum of all chains. */
#define PEAK_LOOP(CHAINS)                               \
    {                                                   \
        float out[16], sum = 0;                         \
        vec x = PEAK_SET(0.9999f), y = PEAK_SET(1e-4f); \
        int64_t i;                                      \
        CHAINS(PEAK_DECLARE)                            \
        for (i = 0; i < turns; ++i) {                   \
            CHAINS(PEAK_FMA)                            \
        }                                               \
        CHAINS(PEAK_STORE)                              \
        *sink = sum;                                    \
    }

#if defined(__AVX512F__)
static void peak_512(int64_t turns, float *sink)
{
    typedef __m512 vec;
#define PEAK_SET(v)        _mm512_set1_ps(v)
#define PEAK_STEP(r, x, y) _mm512_fmadd_ps(r, x, y)
#define PEAK_PUT(p, v)     _mm512_storeu_ps(p, v)
    PEAK_LOOP(CHAINS_24)
#undef PEAK_SET
#undef PEAK_STEP
#undef PEAK_PUT
}
#endif

#if UPIPE_CPU_AVX2
enum { PEAK_FLOP = 12 * 8 * 2 }; /* of one turn */
static void peak_kernels(int64_t turns, float *sink)
{
    typedef __m256 vec;
#define PEAK_SET(v)        _mm256_set1_ps(v)
#define PEAK_STEP(r, x, y) _mm256_fmadd_ps(r, x, y)
#define PEAK_PUT(p, v)     _mm256_storeu_ps(p, v)
    PEAK_LOOP(CHAINS_12)
}
#elif defined(__ARM_NEON)
enum { PEAK_FLOP = 24 * 4 * 2 };
static void peak_kernels(int64_t turns, float *sink)
{
    typedef float32x4_t vec;
#define PEAK_SET(v)        vdupq_n_f32(v)
#define PEAK_STEP(r, x, y) vfmaq_f32(y, r, x)
#define PEAK_PUT(p, v)     vst1q_f32(p, v)
    PEAK_LOOP(CHAINS_24)
}
#else
enum { PEAK_FLOP = 12 * 4 * 2 };
static void peak_kernels(int64_t turns, float *sink)
{
    typedef float vec __attribute__((vector_size(16)));
#define PEAK_SET(v)        ((vec){v, v, v, v})
#define PEAK_STEP(r, x, y) ((r) * (x) + (y))
#define PEAK_PUT(p, v)     memcpy(p, &(v), sizeof(v))
    PEAK_LOOP(CHAINS_12)
}
#endif

/* Whether the kernels of this build use vectors of 512 bits. */
static int peak_is_512(const bench *b)
{
    return strstr(b->ops.name, "avx512") != NULL;
}

static void peak_task(void *arg, int32_t i)
{
    bench *b = (bench *)arg;
#if defined(__AVX512F__)
    if (peak_is_512(b)) {
        peak_512(b->turns, &b->sink[i]);
        return;
    }
#endif
    peak_kernels(b->turns, &b->sink[i]);
}

/* FLOP/s of fused multiply-adds on all threads, over some ten milliseconds. */
double bench_peak(bench *b)
{
    double flop = peak_is_512(b) ? 24 * 16 * 2 : PEAK_FLOP, seconds;
    b->turns = (int64_t)(5e8 / flop);
    seconds = now();
    pool_run(&b->threads, b->threads.workers, peak_task, b);
    seconds = now() - seconds;
    return flop * (double)b->turns * b->threads.workers / seconds;
}

/* ---- bandwidth ---- */

/* a = x + 3 y over this thread's part */
static void triad_task(void *arg, int32_t i)
{
    bench *b = (bench *)arg;
    int64_t first = b->n * i / b->threads.workers, end = b->n * (i + 1) / b->threads.workers, at;
    for (at = first; at < end; ++at) b->a[at] = b->x[at] + 3 * b->y[at];
}

/* Bytes read and written in a second by a triad of three arrays of n floats; the best of five passes, as
 * STREAM counts. 0: no memory. */
double bench_bandwidth(bench *b, int64_t n)
{
    double best = 0;
    int pass;
    b->n = n;
    b->a = (float *)calloc((size_t)n, sizeof(float));
    b->x = (float *)calloc((size_t)n, sizeof(float));
    b->y = (float *)calloc((size_t)n, sizeof(float));
    if (b->a != NULL && b->x != NULL && b->y != NULL) {
        int64_t i;
        for (i = 0; i < n; ++i) b->x[i] = b->y[i] = 1; /* memory that was never written has no pages */
        for (pass = 0; pass < 6; ++pass) {
            double seconds = now(), rate;
            pool_run(&b->threads, b->threads.workers, triad_task, b);
            rate = 12.0 * (double)n / (now() - seconds);
            if (pass > 0 && rate > best) best = rate;
        }
    }
    free(b->a);
    free(b->x);
    free(b->y);
    return best;
}

/* ---- attention ---- */

static upipe_attn_grad arguments(const bench_case *c)
{
    upipe_dtype dtype = c->bf16 ? UPIPE_BF16 : UPIPE_F32;
    upipe_attn_grad g;
    memset(&g, 0, sizeof g);
    g.a.q = upipe_view_packed(c->q, dtype, c->tokens, c->heads, c->head_dim);
    g.a.k = upipe_view_packed(c->k, dtype, c->keys, c->heads, c->head_dim);
    g.a.v = upipe_view_packed(c->v, dtype, c->keys, c->heads, c->v_dim);
    g.a.o = upipe_view_packed(c->o, dtype, c->tokens, c->heads, c->v_dim);
    g.a.lse = upipe_view_packed(c->lse, UPIPE_F32, c->tokens, c->heads, 1);
    g.a.mask.causal = c->causal;
    g.a.mask.window = c->window;
    g.a.mask.borders.cu_seqlens = c->cu_seqlens;
    g.a.mask.borders.cu_seqlens_n = c->cu_seqlens_n;
    g.a.mask.softcap = c->softcap;
    g.a.work = c->work;
    g.a.work_bytes = (size_t)c->work_bytes;
    g.dout = upipe_view_packed(c->dout, dtype, c->tokens, c->heads, c->v_dim);
    g.delta = upipe_view_packed(c->delta, UPIPE_F32, c->tokens, c->heads, 1);
    g.dq = upipe_view_packed(c->dq, dtype, c->tokens, c->heads, c->head_dim);
    g.dk = upipe_view_packed(c->dk, UPIPE_F32, c->keys, c->heads, c->head_dim);
    g.dv = upipe_view_packed(c->dv, UPIPE_F32, c->keys, c->heads, c->v_dim);
    return g;
}

/* Scratch that serves the forward and the backward of this case. */
int64_t bench_attn_bytes(const bench *b, const bench_case *c)
{
    upipe_attn_grad g = arguments(c);
    size_t forward = b->ops.attn_bytes(&b->ops, &g.a, 0), backward = b->ops.attn_bytes(&b->ops, &g.a, 1);
    return (int64_t)(forward > backward ? forward : backward);
}

const char *bench_attn_fwd(bench *b, const bench_case *c)
{
    upipe_attn_grad g = arguments(c);
    return upipe_attn_fwd(&b->ctx, &g.a) ? b->ctx.err.text : NULL;
}

/* All that a host calls for it: delta, sums that start from zero, and the backward itself. */
const char *bench_attn_bwd(bench *b, const bench_case *c)
{
    upipe_attn_grad g = arguments(c);
    size_t of_one = (size_t)(c->keys * c->heads) * sizeof(float);
    if (b->ops.rowdot(&b->ctx, g.delta, g.dout, g.a.o) ||
        b->ops.zero(&b->ctx, c->dk, of_one * (size_t)c->head_dim) ||
        b->ops.zero(&b->ctx, c->dv, of_one * (size_t)c->v_dim) || upipe_attn_bwd(&b->ctx, &g))
        return b->ctx.err.text;
    return NULL;
}
