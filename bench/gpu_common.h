/* gpu_common.h -- what gpu.c's commands share: options, the clock of the stream, numbers that can be made again */
#ifndef GPU_COMMON_H
#define GPU_COMMON_H

#include "upipe/cpu/upipe_cpu_simd.h"
#include "upipe/upipe.h"

#include "../examples/common/device_flag.h"

#ifndef UPIPE_WITH_CUDA
#error "compile with -DUPIPE_WITH_CUDA and link examples/09_cuda.cu"
#endif

enum { RUNS = 9, RUNS_SECONDS = 2, RANKS_MAX = 64, BLOCKS_MAX = 256 };

typedef struct options {
    int64_t tokens, model_dim;
    int64_t window;
    int head_dim, v_dim, heads, kv_heads, ranks, chunk, full, layers, cu_seqlens, overlap, margin;
    int kernels; /* 0: all contestants */
    int avoid;   /* UPIPE_CUDA_AVOID_... */
} options;

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

/* Seconds of one call on the context's stream, by events. */
static upipe_status timed_once(upipe_ctx *c, timed_call *call, void *user, double *seconds)
{
    cudaEvent_t from, to;
    float ms = 0;
    UPIPE_CUDA_TRY(&c->err, cudaEventCreate(&from));
    UPIPE_CUDA_TRY(&c->err, cudaEventCreate(&to));
    UPIPE_CUDA_TRY(&c->err, cudaEventRecord(from, (cudaStream_t)c->stream));
    UPIPE_TRY(call(c, user));
    UPIPE_CUDA_TRY(&c->err, cudaEventRecord(to, (cudaStream_t)c->stream));
    UPIPE_CUDA_TRY(&c->err, cudaEventSynchronize(to));
    UPIPE_CUDA_TRY(&c->err, cudaEventElapsedTime(&ms, from, to));
    UPIPE_CUDA_TRY(&c->err, cudaEventDestroy(from));
    UPIPE_CUDA_TRY(&c->err, cudaEventDestroy(to));
    *seconds = (double)ms * 1e-3;
    return UPIPE_OK;
}

/* The median of RUNS calls after one that warms up; of three or more, where they take longer than RUNS_SECONDS together. */
static upipe_status timed(upipe_ctx *c, timed_call *call, void *user, double *seconds)
{
    double runs[RUNS], all = 0, unused;
    int i;
    for (i = -1; i < RUNS && (i < 3 || all < RUNS_SECONDS); ++i) {
        UPIPE_TRY(timed_once(c, call, user, i < 0 ? &unused : &runs[i]));
        if (i >= 0) all += runs[i];
    }
    *seconds = median(runs, i);
    return UPIPE_OK;
}

static upipe_status buf(upipe_ctx *c, void **out, int64_t elements, upipe_dtype dtype)
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
        for (i = 0; i < here; ++i) narrow[i] = upipe_f32_to_bf16(number_at((uint64_t)(at + i), seed));
        UPIPE_TRY(c->ops->copy(c, (uint16_t *)to + at, narrow, (size_t)here * 2));
    }
    return UPIPE_OK;
}

#endif
