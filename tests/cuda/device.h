/* device.h -- a device to test on: stream, cuBLAS handle, table and context in one struct; memory on it
 *
 *     device d;
 *     if (device_open(&d)) {
 *         float *x = (float *)device_new(&d, bytes);        all bytes 0xff: NaNs in every type
 *         device_put(&d, x, host, bytes);
 *         CHECK_STATUS(d.ops.zero(&d.c, x, bytes), UPIPE_OK, d.c.err);
 *         device_get(&d, host, x, bytes);                   after all work of the stream
 *         device_free(&d, x);
 *     }
 *     device_close(&d);
 *
 * Whatever goes wrong is a failed check. The program links with table.cpp.
 */
#ifndef UPIPE_TEST_DEVICE_H
#define UPIPE_TEST_DEVICE_H

#include "../lib/test.h"

#include "upipe/upipe_ops.h"
#include "upipe/cuda/upipe_cuda_device.h"

upipe_status app_ops(upipe_ops *ops, upipe_cuda *device, upipe_err *e); /* table.cpp */

enum { WORKSPACE = 1 << 20 }; /* bytes */

typedef struct device {
    cudaStream_t stream;
    cublasHandle_t blas;
    void *workspace; /* the handle's */
    upipe_cuda cuda;
    upipe_ops ops;
    upipe_ctx c;
} device;

#define DEVICE_CHECK(call) device_check((call), #call, __LINE__)

__attribute__((unused)) static int device_check(cudaError_t r, const char *call, int line)
{
    return test_check(r == cudaSuccess, __FILE__, line, "%s: %s", call, cudaGetErrorString(r));
}

/* first: for a side stream, whose kernels start before those of others. */
__attribute__((unused)) static int device_open_as(device *d, int first)
{
    memset(d, 0, sizeof *d);
    if (first)
        CHECK_STATUS(upipe_cuda_stream_first(&d->stream, &d->c.err), UPIPE_OK, d->c.err);
    else if (!DEVICE_CHECK(cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking)))
        return 0;
    if (!CHECK_SAY(cublasCreate(&d->blas) == CUBLAS_STATUS_SUCCESS, "no cuBLAS handle")) return 0;
    if (!DEVICE_CHECK(cudaMalloc(&d->workspace, WORKSPACE))) return 0;
    CHECK(cublasSetStream(d->blas, d->stream) == CUBLAS_STATUS_SUCCESS);
    CHECK(cublasSetWorkspace(d->blas, d->workspace, WORKSPACE) == CUBLAS_STATUS_SUCCESS);
    if (!CHECK_SAY(upipe_cuda_init(&d->cuda, d->blas, &d->c.err) == UPIPE_OK, "%s", d->c.err.text)) return 0;
    if (!CHECK_SAY(app_ops(&d->ops, &d->cuda, &d->c.err) == UPIPE_OK, "%s", d->c.err.text)) return 0;
    d->c.ops = &d->ops;
    d->c.stream = d->stream;
    return 1;
}

__attribute__((unused)) static int device_open(device *d)
{
    return device_open_as(d, 0);
}

__attribute__((unused)) static void device_close(device *d)
{
    if (d->stream != NULL) DEVICE_CHECK(cudaStreamSynchronize(d->stream));
    CHECK_SAY(upipe_cuda_free(&d->cuda, &d->c.err) == UPIPE_OK, "%s", d->c.err.text);
    if (d->blas != NULL) CHECK(cublasDestroy(d->blas) == CUBLAS_STATUS_SUCCESS);
    if (d->workspace != NULL) DEVICE_CHECK(cudaFree(d->workspace));
    if (d->stream != NULL) DEVICE_CHECK(cudaStreamDestroy(d->stream));
    memset(d, 0, sizeof *d);
}

__attribute__((unused)) static void *device_new(device *d, size_t bytes)
{
    void *p = NULL;
    if (!DEVICE_CHECK(cudaMalloc(&p, bytes > 0 ? bytes : 1))) return NULL;
    DEVICE_CHECK(cudaMemsetAsync(p, 0xff, bytes > 0 ? bytes : 1, d->stream));
    DEVICE_CHECK(cudaStreamSynchronize(d->stream));
    return p;
}

/* to, on the device, = from, on the host. */
__attribute__((unused)) static void device_put(device *d, void *to, const void *from, size_t bytes)
{
    if (bytes == 0) return;
    DEVICE_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, d->stream));
    DEVICE_CHECK(cudaStreamSynchronize(d->stream));
}

/* to, on the host, = from, on the device. */
__attribute__((unused)) static void device_get(device *d, void *to, const void *from, size_t bytes)
{
    if (bytes == 0) return;
    DEVICE_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, d->stream));
    DEVICE_CHECK(cudaStreamSynchronize(d->stream));
}

__attribute__((unused)) static void device_free(device *d, void *p)
{
    DEVICE_CHECK(cudaStreamSynchronize(d->stream));
    DEVICE_CHECK(cudaFree(p));
}

/* Whether a run that looks for races, or for other bits under other schedules, takes a share of the shapes: as few as
 * reach every kernel, and every way in which its threads and blocks wait for one another. UPIPE_FULL=1 takes all. */
__attribute__((unused)) static int brief(void)
{
#ifdef WATCHED_TESTS
    return !test_full();
#else
    return test_env("TEST_BRIEF", 0) != 0 && !test_full();
#endif
}

/* Whether results are held to f64. Where every access is watched it is the accesses that count, and where only the
 * digest of all results does (TEST_DIGEST=1) a run whose digest is the same has compared them. */
__attribute__((unused)) static int compares(void)
{
#ifdef WATCHED_TESTS
    return 0;
#else
    return test_env("TEST_DIGEST", 0) == 0;
#endif
}

#endif
