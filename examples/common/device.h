/* device.h -- where the ranks of a program compute: this machine's CPU, or a CUDA device
 *
 *     device d;
 *     device_open(&d, DEVICE_CUDA, &err);            one a rank: its table, its stream
 *     device_use(&d, &ctx);
 *     device_slab(&d, &slab, bytes, &err);           for the rank's pool
 *     ...
 *     device_close(&d);
 *
 * All ranks of a process share one device. Plans and dry runs need no device, and no CUDA in the build:
 * device_table(kind, &ops) gives a table whose *_bytes entries answer, and on the CPU all others too. Memory of
 * device_shared is the host's, and the device reaches it, slowly: for what passes once. The host reads it after
 * ctx.ops->sync.
 */
#ifndef COMMON_DEVICE_H
#define COMMON_DEVICE_H

#include <stdlib.h>

#include "upipe/cuda/upipe_cuda_bytes.h"
#include "upipe/upipe.h"

#include "products.h"

enum { DEVICE_CPU, DEVICE_CUDA, DEVICES };

static const char *const device_names[DEVICES] = {"cpu", "cuda"};

#ifdef UPIPE_WITH_CUDA
#include "upipe/cuda/upipe_cuda_device.h"

enum {
    DEVICE_WORKSPACE = 32 << 20, /* what cuBLAS's documentation advises for the largest devices */
    DEVICE_MARGIN = 16 /* one of so many multiprocessors is left to side streams: 8 of an H100's 132 */
};

/* From 09_cuda.cu, the one unit of the program that the CUDA compiler sees. */
upipe_status app_ops(upipe_ops *ops, upipe_cuda *device, upipe_err *e);
#endif

typedef struct device {
    upipe_ops ops;
    void *stream;
    int kind;
#ifdef UPIPE_WITH_CUDA
    upipe_cuda cuda;
    upipe_cuda_copy_stream side;
    cublasHandle_t blas;
    void *workspace; /* cuBLAS's, DEVICE_WORKSPACE bytes */
#endif
} device;

/* Who multiplies matrices there. */
static inline const char *device_products(int kind)
{
    return kind == DEVICE_CUDA ? "cublas" : PRODUCTS;
}

/* Was the program built for it? The sentence for a program that was not. */
static inline const char *device_lacks(int kind)
{
#ifdef UPIPE_WITH_CUDA
    (void)kind;
    return NULL;
#else
    return kind == DEVICE_CUDA ? "this program was built without CUDA" : NULL;
#endif
}

static inline void device_table(int kind, upipe_ops *ops)
{
    if (kind == DEVICE_CUDA)
        upipe_cuda_plan_ops(ops);
    else
        products_ops(ops);
}

#ifdef UPIPE_WITH_CUDA

static inline upipe_status device_close_cuda(device *d, upipe_err *e)
{
    upipe_status first = UPIPE_OK, s;
    if (d->stream != NULL)
        first = upipe_cuda_check(e, cudaStreamSynchronize((cudaStream_t)d->stream), "cudaStreamSynchronize");
    s = upipe_cuda_copy_stream_free(&d->side, first == UPIPE_OK ? e : NULL);
    if (first == UPIPE_OK) first = s;
    s = upipe_cuda_free(&d->cuda, first == UPIPE_OK ? e : NULL);
    if (first == UPIPE_OK) first = s;
    if (d->blas != NULL && cublasDestroy(d->blas) != CUBLAS_STATUS_SUCCESS && first == UPIPE_OK)
        first = upipe_fail(e, UPIPE_ERR_BACKEND, "cublasDestroy failed");
    s = upipe_cuda_slab_free(d->workspace, first == UPIPE_OK ? e : NULL);
    if (first == UPIPE_OK) first = s;
    if (d->stream != NULL) {
        s = upipe_cuda_check(first == UPIPE_OK ? e : NULL, cudaStreamDestroy((cudaStream_t)d->stream),
                             "cudaStreamDestroy");
        if (first == UPIPE_OK) first = s;
    }
    return first;
}

/* first: its blocks start before those of other streams. */
static inline upipe_status device_open_cuda(device *d, int first, upipe_err *e)
{
    cudaStream_t stream;
    upipe_status s;
    if (first)
        UPIPE_TRY(upipe_cuda_stream_first(&stream, e));
    else
        UPIPE_CUDA_TRY(e, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    d->stream = stream;
    s = upipe_cublas_check(e, cublasCreate(&d->blas), "cublasCreate");
    if (s == UPIPE_OK) s = upipe_cuda_slab(&d->workspace, DEVICE_WORKSPACE, e);
    /* the stream first: setting one resets the workspace */
    if (s == UPIPE_OK) s = upipe_cublas_check(e, cublasSetStream(d->blas, stream), "cublasSetStream");
    if (s == UPIPE_OK)
        s = upipe_cublas_check(e, cublasSetWorkspace(d->blas, d->workspace, DEVICE_WORKSPACE),
                               "cublasSetWorkspace");
    if (s == UPIPE_OK) s = upipe_cuda_init(&d->cuda, d->blas, e);
    if (s == UPIPE_OK) s = app_ops(&d->ops, &d->cuda, e);
    if (s == UPIPE_OK) s = upipe_cuda_copy_stream_init(&d->side, e);
    if (s != UPIPE_OK) {
        device_close_cuda(d, NULL);
        memset(d, 0, sizeof *d);
    }
    return s;
}

#endif

/* device_open -- a rank's table and stream; there is nothing to close after a failure */
static inline upipe_status device_open(device *d, int kind, upipe_err *e)
{
    memset(d, 0, sizeof *d);
    d->kind = kind;
    if (device_lacks(kind) != NULL) return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "%s", device_lacks(kind));
#ifdef UPIPE_WITH_CUDA
    if (kind == DEVICE_CUDA) return device_open_cuda(d, 0, e);
#endif
    device_table(kind, &d->ops);
    return UPIPE_OK;
}

/* device_open_beside -- table and stream of what runs beside `other`, an open device
 *   kernels  there are some, for which attention of `other` leaves multiprocessors free; copies alone need none */
static inline upipe_status device_open_beside(device *d, device *other, int kernels, upipe_err *e)
{
#ifdef UPIPE_WITH_CUDA
    if (other->kind == DEVICE_CUDA) {
        memset(d, 0, sizeof *d);
        d->kind = other->kind;
        if (kernels) other->cuda.margin = other->cuda.processors / DEVICE_MARGIN;
        return device_open_cuda(d, 1, e);
    }
#endif
    (void)kernels;
    return device_open(d, other->kind, e);
}

/* Attention of an open device leaves kernels for 9.0 alone: bits UPIPE_CUDA_AVOID_... */
static inline void device_avoid(device *d, int avoid)
{
#ifdef UPIPE_WITH_CUDA
    if (d->kind == DEVICE_CUDA) d->cuda.avoid = avoid;
#endif
    (void)d;
    (void)avoid;
}

/* How many ranks may share an open device whose loss has a vocabulary of so many tokens. */
static inline int device_ranks_most(const device *d, int64_t vocab)
{
#ifdef UPIPE_WITH_CUDA
    if (d->kind == DEVICE_CUDA) return upipe_cuda_ranks_most(&d->cuda, vocab);
#endif
    (void)d;
    (void)vocab;
    return INT32_MAX;
}

static inline upipe_status device_close(device *d, upipe_err *e)
{
    upipe_status s = UPIPE_OK;
#ifdef UPIPE_WITH_CUDA
    if (d->kind == DEVICE_CUDA) s = device_close_cuda(d, e);
#endif
    (void)e;
    memset(d, 0, sizeof *d);
    return s;
}

/* Bytes of the device's memory that it holds beside slabs; a device that is not open holds none. */
static inline size_t device_bytes(const device *d)
{
#ifdef UPIPE_WITH_CUDA
    if (d->workspace != NULL) return DEVICE_WORKSPACE + UPIPE_CUDA_SCRATCH;
#endif
    (void)d;
    return 0;
}

/* device_left -- bytes that a device with memory of its own has free; 0 of the CPU. Needs no open device. */
static inline upipe_status device_left(int kind, size_t *left, upipe_err *e)
{
    *left = 0;
#ifdef UPIPE_WITH_CUDA
    if (kind == DEVICE_CUDA) {
        size_t total;
        UPIPE_CUDA_TRY(e, cudaMemGetInfo(left, &total));
    }
#endif
    (void)kind;
    (void)e;
    return UPIPE_OK;
}

static inline void device_use(device *d, upipe_ctx *c)
{
    c->ops = &d->ops;
    c->stream = d->stream;
}

/* ---- memory ---- */

static inline upipe_status device_host_buf(void **out, size_t bytes, upipe_err *e)
{
    *out = bytes > 0 ? aligned_alloc(UPIPE_MEM_ALIGN,
                                     (bytes + UPIPE_MEM_ALIGN - 1) / UPIPE_MEM_ALIGN * UPIPE_MEM_ALIGN)
                     : NULL;
    if (*out != NULL || bytes == 0) return UPIPE_OK;
    return upipe_fail(e, UPIPE_ERR_MEMORY, "no entry left for %zu bytes", bytes);
}

/* Every byte 0xff, which is NaN in each storage type: what is read before it is written shows. */
static inline upipe_status device_slab(device *d, void **out, size_t bytes, upipe_err *e)
{
#ifdef UPIPE_WITH_CUDA
    if (d->kind == DEVICE_CUDA) {
        UPIPE_TRY(upipe_cuda_slab(out, bytes, e));
        if (bytes > 0) UPIPE_CUDA_TRY(e, cudaMemsetAsync(*out, 0xff, bytes, (cudaStream_t)d->stream));
        return UPIPE_OK;
    }
#endif
    (void)d;
    UPIPE_TRY(device_host_buf(out, bytes, e));
    if (bytes > 0) memset(*out, 0xff, bytes);
    return UPIPE_OK;
}

static inline void device_slab_free(const device *d, void *slab)
{
#ifdef UPIPE_WITH_CUDA
    if (d->kind == DEVICE_CUDA) {
        upipe_cuda_slab_free(slab, NULL);
        return;
    }
#endif
    (void)d;
    free(slab);
}

/* Host memory that the device copies to and from without a detour: the second pool. */
static inline upipe_status device_host_slab(device *d, void **out, size_t bytes, upipe_err *e)
{
#ifdef UPIPE_WITH_CUDA
    if (d->kind == DEVICE_CUDA) return upipe_cuda_host_slab(out, bytes, e);
#endif
    (void)d;
    return device_host_buf(out, bytes, e);
}

static inline void device_host_slab_free(const device *d, void *slab)
{
#ifdef UPIPE_WITH_CUDA
    if (d->kind == DEVICE_CUDA) {
        upipe_cuda_host_slab_free(slab, NULL);
        return;
    }
#endif
    (void)d;
    free(slab);
}

/* Host memory that the device reaches too, filled with zeros. Needs no open device. */
static inline upipe_status device_shared(int kind, void **out, size_t bytes, upipe_err *e)
{
    *out = NULL;
#ifdef UPIPE_WITH_CUDA
    if (kind == DEVICE_CUDA) {
        UPIPE_TRY(upipe_cuda_host_slab(out, bytes, e));
        if (bytes > 0) memset(*out, 0, bytes);
        return UPIPE_OK;
    }
#endif
    (void)kind;
    UPIPE_TRY(device_host_buf(out, bytes, e));
    if (bytes > 0) memset(*out, 0, bytes);
    return UPIPE_OK;
}

static inline void device_shared_free(int kind, void *memory)
{
#ifdef UPIPE_WITH_CUDA
    if (kind == DEVICE_CUDA) {
        upipe_cuda_host_slab_free(memory, NULL);
        return;
    }
#endif
    (void)kind;
    free(memory);
}

/* Memory of the device with the contents of `from`, or zeros for NULL. Needs no open device; the CPU takes
 * `from` itself, and then device_resident_free leaves it alone. */
static inline upipe_status device_resident(int kind, void **out, size_t bytes, void *from, upipe_err *e)
{
#ifdef UPIPE_WITH_CUDA
    if (kind == DEVICE_CUDA) {
        UPIPE_TRY(upipe_cuda_slab(out, bytes, e));
        if (bytes > 0 && from == NULL) UPIPE_CUDA_TRY(e, cudaMemset(*out, 0, bytes));
        if (bytes > 0 && from != NULL)
            UPIPE_CUDA_TRY(e, cudaMemcpy(*out, from, bytes, cudaMemcpyHostToDevice));
        UPIPE_CUDA_TRY(e, cudaDeviceSynchronize()); /* the ranks' streams do not wait for these calls */
        return UPIPE_OK;
    }
#endif
    (void)kind;
    *out = from;
    if (from != NULL) return UPIPE_OK;
    UPIPE_TRY(device_host_buf(out, bytes, e));
    if (bytes > 0) memset(*out, 0, bytes);
    return UPIPE_OK;
}

static inline void device_resident_free(int kind, void *memory, const void *from)
{
#ifdef UPIPE_WITH_CUDA
    if (kind == DEVICE_CUDA) {
        upipe_cuda_slab_free(memory, NULL);
        return;
    }
#endif
    (void)kind;
    if (memory != from) free(memory);
}

/* ---- copies to and from the second pool, beside the computing stream ---- */

/* dst = src; neither may be written, nor dst read, before device_copy_wait. */
static inline upipe_status device_copy_start(device *d, upipe_ctx *c, void *dst, const void *src,
                                             size_t bytes)
{
#ifdef UPIPE_WITH_CUDA
    if (d->kind == DEVICE_CUDA) return upipe_cuda_copy_stream_start(c, &d->side, dst, src, bytes);
#endif
    (void)d;
    return c->ops->copy(c, dst, src, bytes);
}

static inline upipe_status device_copy_wait(device *d, upipe_ctx *c)
{
#ifdef UPIPE_WITH_CUDA
    if (d->kind == DEVICE_CUDA) return upipe_cuda_copy_stream_wait(c, &d->side);
#endif
    (void)d;
    (void)c;
    return UPIPE_OK;
}

#endif
