/* upipe_cuda_device.h -- one rank's device: errors, slabs, the copy stream
 *
 *     upipe_cuda d;                                    one a rank, on the current device
 *     upipe_cuda_init(&d, blas, &err);                 blas: the host's own handle, for this rank alone
 *     upipe_cuda_slab(&slab, bytes, &err);             device memory for upipe_mem_init
 *     app_ops(&ops, &d, &err);                         the table, see upipe_cuda.h
 *     ctx.stream = stream;  ctx.ops = &ops;            stream: the host's own
 *
 * This header has no kernels: a plain C program includes it, and gets the table from one .cu unit. The
 * library makes no handle, and no stream but that of upipe_cuda_copy_stream. A cuBLAS handle holds the stream
 * of its last call, so ranks that are threads need one each. The host sets its workspace: cublasSetStream to
 * ctx.stream first, then cublasSetWorkspace, since setting a stream resets the workspace.
 */
#ifndef UPIPE_CUDA_DEVICE_H
#define UPIPE_CUDA_DEVICE_H

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include "../upipe_comm.h"

enum {
    UPIPE_CUDA_SCRATCH = 4 << 20, /* bytes of device memory that a upipe_cuda holds, for sums over a tensor */
    UPIPE_CUDA_CHOICE = 160,      /* bytes of a sentence about kernels */
    UPIPE_CUDA_WATCH = 64 << 10   /* bytes of what upipe_cuda_watch.h reads */
};

enum { UPIPE_CUDA_AVOID_FWD90 = 1, UPIPE_CUDA_AVOID_BWD90 = 2 }; /* bits of upipe_cuda.avoid */

/* Constant after init, but for `margin`, `avoid`, `choice` and `watch`, which are the host's. */
typedef struct upipe_cuda {
    cublasHandle_t blas; /* the host's */
    void *scratch;       /* device memory, UPIPE_CUDA_SCRATCH bytes */
    int device, processors;
    int capability;  /* 80 for 8.0 */
    int shared_most; /* bytes of shared memory that a block may ask for */
    int margin; /* multiprocessors that kernels leave free whose blocks stay for the whole call: the forward of
                        attention on 9.0. 0 after init: none. They serve other streams meanwhile, such as a side
                        stream; attention loses as large a part of its rate. 0 to processors - 1; no bit changes */
    int avoid; /* UPIPE_CUDA_AVOID_..., 0 after init: a direction of attention that takes the kernels for 8.0 where it
                        would take those for 9.0. Scratch stays the same */
    char *choice; /* NULL, or the host's UPIPE_CUDA_CHOICE bytes: every attention call writes there which
                        kernels it takes, and why not those for 9.0 */
    void *watch;  /* NULL, or the host's UPIPE_CUDA_WATCH bytes of pinned memory, zeros: attention on 9.0 that
                        hangs ends, and says there what it waits for (upipe_cuda_watch.h). No bit changes */
} upipe_cuda;

/* The runtime's own text behind the call's name. `what` is the call as written, or "launch of" a kernel. */
UPIPE_API upipe_status upipe_cuda_check(upipe_err *e, cudaError_t r, const char *what)
{
    int named = strncmp(what, "launch", 6) == 0 ? (int)strlen(what) : (int)strcspn(what, "(");
    if (r == cudaSuccess) return UPIPE_OK;
    (void)cudaGetLastError(); /* what can be forgotten is: the next call must not report it again */
    return upipe_fail(e, r == cudaErrorMemoryAllocation ? UPIPE_ERR_MEMORY : UPIPE_ERR_BACKEND,
                      "%.*s: %s (%s)", named, what, cudaGetErrorString(r), cudaGetErrorName(r));
}

#define UPIPE_CUDA_TRY(e, call) UPIPE_TRY(upipe_cuda_check((e), (call), #call))

/* cuBLAS's own text behind the call's name. */
UPIPE_API upipe_status upipe_cublas_check(upipe_err *e, cublasStatus_t r, const char *what)
{
    if (r == CUBLAS_STATUS_SUCCESS) return UPIPE_OK;
    return upipe_fail(e, r == CUBLAS_STATUS_ALLOC_FAILED ? UPIPE_ERR_MEMORY : UPIPE_ERR_BACKEND,
                      "%.*s: %s (%s)", (int)strcspn(what, "("), what, cublasGetStatusString(r),
                      cublasGetStatusName(r));
}

#define UPIPE_CUBLAS_TRY(e, call) UPIPE_TRY(upipe_cublas_check((e), (call), #call))

/* Before `what` makes the host wait for ctx->stream. UNSUPPORTED where it is captured into a graph: then it runs
 * nothing yet, and the runtime itself would spoil the capture. Transfers on the stream end first, or fail by their
 * team's deadline, which the runtime does not know. */
UPIPE_API upipe_status upi_cuda_host_waits(upipe_ctx *c, const char *what)
{
    enum cudaStreamCaptureStatus state;
    UPIPE_CUDA_TRY(&c->err, cudaStreamIsCapturing((cudaStream_t)c->stream, &state));
    if (state == cudaStreamCaptureStatusNone) return upi_comm_settle(c);
    return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                      "%s waits for the stream, which is captured into a graph and runs nothing yet", what);
}

/* Whether the program has code of this kernel that the device can run: its own, or PTX of an earlier one. */
UPIPE_API upipe_status upi_cuda_has_code(const upipe_cuda *d, const void *kernel, upipe_err *e)
{
    struct cudaFuncAttributes attributes;
    cudaError_t r = cudaFuncGetAttributes(&attributes, kernel);
    if (r != cudaErrorNoKernelImageForDevice && r != cudaErrorInvalidDeviceFunction)
        return upipe_cuda_check(e, r, "cudaFuncGetAttributes");
    (void)cudaGetLastError(); /* told here, and not again by the next call */
    return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                      "this program has no code for device %d, of compute capability %d.%d: compile it with "
                      "-gencode=arch=compute_80,code=compute_80 too, which later devices take",
                      d->device, d->capability / 10, d->capability % 10);
}

/* Lets blocks of a kernel have more than 48 KiB of shared memory, and a processor as many of them as fit. */
UPIPE_API upipe_status upi_cuda_allow_shared(upipe_err *e, const void *kernel, int bytes)
{
    UPIPE_CUDA_TRY(e, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    UPIPE_CUDA_TRY(e, cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                           cudaSharedmemCarveoutMaxShared));
    return UPIPE_OK;
}

enum {
    UPI_ENTROPY_TURN = 8192, /* logits that a block of cross-entropy holds */
    UPI_ENTROPY_BLOCKS = 3,  /* of a processor at the same time, at least */
    UPI_ENTROPY_PIECES = 16  /* of a row, a block each, at most */
};

/* Pieces of a row of so many logits. */
UPIPE_API int upi_cuda_entropy_pieces(const upipe_cuda *d, int64_t logits)
{
    int64_t held = (int64_t)d->processors * UPI_ENTROPY_BLOCKS, width;
    if (held > UPI_ENTROPY_PIECES) held = UPI_ENTROPY_PIECES;
    width = (logits + held - 1) / held;
    if (width < UPI_ENTROPY_TURN) width = UPI_ENTROPY_TURN;
    return (int)((logits + width - 1) / width);
}

/* upipe_cuda_ranks_most -- how many ranks may share a device that take the cross-entropy of rows of so many logits. In each
 *                          of their launches the blocks of one row, but for one, may wait for that one, which has not
 *                          started: with more ranks they could hold every place of the device, and wait for ever */
UPIPE_API int upipe_cuda_ranks_most(const upipe_cuda *d, int64_t logits)
{
    const int pieces = upi_cuda_entropy_pieces(d, logits);
    return pieces > 1 ? (d->processors * UPI_ENTROPY_BLOCKS - 1) / (pieces - 1) : INT32_MAX;
}

/* upipe_cuda_stream_first -- a stream whose blocks the device starts before those that wait on other streams: for a side
 *                            stream, whose short kernels attention of ctx->stream would hold up
 *   out     not blocking, of the greatest priority, on the current device; the host destroys it
 *   errors  BACKEND; there is then no stream
 */
UPIPE_API upipe_status upipe_cuda_stream_first(cudaStream_t *out, upipe_err *e)
{
    int least, greatest;
    *out = NULL;
    UPIPE_CUDA_TRY(e, cudaDeviceGetStreamPriorityRange(&least, &greatest));
    UPIPE_CUDA_TRY(e, cudaStreamCreateWithPriority(out, cudaStreamNonBlocking, greatest));
    return UPIPE_OK;
}

/* upipe_cuda_slab -- device memory for a pool
 *   out     `bytes` bytes, aligned to 256; NULL for 0 bytes
 *   errors  MEMORY, BACKEND: the runtime's text
 */
UPIPE_API upipe_status upipe_cuda_slab(void **out, size_t bytes, upipe_err *e)
{
    *out = NULL;
    if (bytes == 0) return UPIPE_OK;
    UPIPE_CUDA_TRY(e, cudaMalloc(out, bytes));
    return UPIPE_OK;
}

/* Waits for all work of the device that may touch it. NULL is nothing. */
UPIPE_API upipe_status upipe_cuda_slab_free(void *slab, upipe_err *e)
{
    if (slab == NULL) return UPIPE_OK;
    UPIPE_CUDA_TRY(e, cudaFree(slab));
    return UPIPE_OK;
}

/* upipe_cuda_host_slab -- pinned host memory of exactly this size, which the device copies from and to; as
 * upipe_cuda_slab */
UPIPE_API upipe_status upipe_cuda_host_slab(void **out, size_t bytes, upipe_err *e)
{
    *out = NULL;
    if (bytes == 0) return UPIPE_OK;
    UPIPE_CUDA_TRY(e, cudaHostAlloc(out, bytes, cudaHostAllocDefault));
    return UPIPE_OK;
}

/* Waits likewise. NULL is nothing. */
UPIPE_API upipe_status upipe_cuda_host_slab_free(void *slab, upipe_err *e)
{
    if (slab == NULL) return UPIPE_OK;
    UPIPE_CUDA_TRY(e, cudaFreeHost(slab));
    return UPIPE_OK;
}

/* upipe_cuda_free -- releases what init allocated; after a failed init too */
UPIPE_API upipe_status upipe_cuda_free(upipe_cuda *d, upipe_err *e)
{
    upipe_status s = upipe_cuda_slab_free(d->scratch, e);
    memset(d, 0, sizeof *d);
    return s;
}

/* upipe_cuda_init -- this rank's device, the current one
 *   blas    the host's handle, used on ctx->stream by this rank's calls alone; the host frees it. Its math
 *           mode is set, f32 products in f32, not TF32, and no partial sums in bf16, and its pointer mode:
 *           numbers on the host
 *   bytes   UPIPE_CUDA_SCRATCH on the device
 *   errors  UNSUPPORTED (a device below compute capability 8.0), MEMORY, BACKEND; there is then nothing to
 *           free
 */
UPIPE_API upipe_status upipe_cuda_init(upipe_cuda *d, cublasHandle_t blas, upipe_err *e)
{
    int major, minor;
    memset(d, 0, sizeof *d);
    UPIPE_CUDA_TRY(e, cudaGetDevice(&d->device));
    UPIPE_CUDA_TRY(e, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, d->device));
    UPIPE_CUDA_TRY(e, cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, d->device));
    UPIPE_CUDA_TRY(e, cudaDeviceGetAttribute(&d->processors, cudaDevAttrMultiProcessorCount, d->device));
    UPIPE_CUDA_TRY(
        e, cudaDeviceGetAttribute(&d->shared_most, cudaDevAttrMaxSharedMemoryPerBlockOptin, d->device));
    d->capability = 10 * major + minor;
    if (major < 8)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                          "device %d has compute capability %d.%d; the kernels need 8.0", d->device, major,
                          minor);
    d->blas = blas;
    if (blas != NULL) {
        UPIPE_CUBLAS_TRY(
            e, cublasSetMathMode(blas, (cublasMath_t)(CUBLAS_DEFAULT_MATH |
                                                      CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
        UPIPE_CUBLAS_TRY(e, cublasSetPointerMode(blas, CUBLAS_POINTER_MODE_HOST));
    }
    return upipe_cuda_slab(&d->scratch, UPIPE_CUDA_SCRATCH, e);
}

/* ---- copies beside the compute stream: the host tier of a pool ---- */

/* upipe_cuda_copy_stream -- a stream of its own for copies between the device and a pinned slab, and the
 *                           events
 * that order it against ctx->stream. One copy, or several, between start and wait. */
typedef struct upipe_cuda_copy_stream {
    cudaStream_t stream;
    cudaEvent_t before, after;
} upipe_cuda_copy_stream;

/* upipe_cuda_copy_stream_free -- waits for the copies, and releases what init made; after a failed init
 *                                too */
UPIPE_API upipe_status upipe_cuda_copy_stream_free(upipe_cuda_copy_stream *side, upipe_err *e)
{
    upipe_status s = UPIPE_OK, t;
    if (side->stream != NULL)
        s = upipe_cuda_check(e, cudaStreamSynchronize(side->stream), "cudaStreamSynchronize");
    if (side->after != NULL) {
        t = upipe_cuda_check(e, cudaEventDestroy(side->after), "cudaEventDestroy");
        if (s == UPIPE_OK) s = t;
    }
    if (side->before != NULL) {
        t = upipe_cuda_check(e, cudaEventDestroy(side->before), "cudaEventDestroy");
        if (s == UPIPE_OK) s = t;
    }
    if (side->stream != NULL) {
        t = upipe_cuda_check(e, cudaStreamDestroy(side->stream), "cudaStreamDestroy");
        if (s == UPIPE_OK) s = t;
    }
    memset(side, 0, sizeof *side);
    return s;
}

/* upipe_cuda_copy_stream_init -- makes the stream and the events, on the current device
 *   errors  BACKEND; there is then nothing to free
 */
UPIPE_API upipe_status upipe_cuda_copy_stream_init(upipe_cuda_copy_stream *side, upipe_err *e)
{
    upipe_status s;
    memset(side, 0, sizeof *side);
    s = upipe_cuda_stream_first(&side->stream, e);
    if (s == UPIPE_OK)
        s = upipe_cuda_check(e, cudaEventCreateWithFlags(&side->before, cudaEventDisableTiming),
                             "cudaEventCreateWithFlags");
    if (s == UPIPE_OK)
        s = upipe_cuda_check(e, cudaEventCreateWithFlags(&side->after, cudaEventDisableTiming),
                             "cudaEventCreateWithFlags");
    if (s != UPIPE_OK) upipe_cuda_copy_stream_free(side, NULL);
    return s;
}

/* upipe_cuda_copy_stream_start -- dst = src, behind all work that ctx->stream has so far and beside what
 *                                 follows
 *   dst src  device memory and a pinned slab; neither may be written, nor dst read, by later work of
 *            ctx->stream before upipe_cuda_copy_stream_wait
 *   errors   BACKEND
 */
UPIPE_API upipe_status upipe_cuda_copy_stream_start(upipe_ctx *c, upipe_cuda_copy_stream *side, void *dst,
                                                    const void *src, size_t bytes)
{
    UPIPE_CUDA_TRY(&c->err, cudaEventRecord(side->before, (cudaStream_t)c->stream));
    UPIPE_CUDA_TRY(&c->err, cudaStreamWaitEvent(side->stream, side->before, 0));
    UPIPE_CUDA_TRY(&c->err, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, side->stream));
    UPIPE_CUDA_TRY(&c->err, cudaEventRecord(side->after, side->stream));
    return UPIPE_OK;
}

/* upipe_cuda_copy_stream_wait -- later work of ctx->stream waits for every copy started; the host does not
 *                                wait */
UPIPE_API upipe_status upipe_cuda_copy_stream_wait(upipe_ctx *c, upipe_cuda_copy_stream *side)
{
    UPIPE_CUDA_TRY(&c->err, cudaStreamWaitEvent((cudaStream_t)c->stream, side->after, 0));
    return UPIPE_OK;
}

#endif
