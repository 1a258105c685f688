/* compute.h -- where a rank of a handle computes: on the CPU, or on the CUDA device that is current at the open; how the
 * library was built says which        part of upipe_abi.c
 *
 *     abi_plan_ops(&ops);                        for dry runs: no device is needed
 *     s = abi_compute_open(&m, &err);            m.ops
 *     s = abi_slab(&slab, bytes, &err);
 *     s = abi_compute_fits(&m, "q", q, &err);    before a call reads or writes the caller's memory
 *     abi_slab_free(slab);
 *     abi_compute_close(&m);                     on any thread, whatever device is current there
 */
#ifndef ABI_COMPUTE_H
#define ABI_COMPUTE_H

#ifdef UPIPE_WITH_CUDA

#include "upipe/cuda/upipe_cuda_bytes.h"
#include "upipe/cuda/upipe_cuda_device.h"

upipe_status app_ops(upipe_ops *ops, upipe_cuda *device, upipe_err *e); /* 09_cuda.cu */

typedef struct abi_compute {
    upipe_ops ops;
    upipe_cuda cuda;
} abi_compute;

static void abi_plan_ops(upipe_ops *ops)
{
    upipe_cuda_plan_ops(ops);
}

/* Attention of the caller's Q, K, V multiplies no matrices by cuBLAS. */
static upipe_status abi_compute_open(abi_compute *m, upipe_err *e)
{
    UPIPE_TRY(upipe_cuda_init(&m->cuda, NULL, e));
    return app_ops(&m->ops, &m->cuda, e);
}

static upipe_status abi_slab(void **out, size_t bytes, upipe_err *e)
{
    return upipe_cuda_slab(out, bytes, e);
}

/* On the device of `m`; the one that was current is again. */
static void abi_slab_free(const abi_compute *m, void *slab)
{
    int current = m->cuda.device;
    if (slab == NULL) return;
    (void)cudaGetDevice(&current);
    (void)cudaSetDevice(m->cuda.device);
    (void)upipe_cuda_slab_free(slab, NULL);
    (void)cudaSetDevice(current);
}

static void abi_compute_close(abi_compute *m)
{
    abi_slab_free(m, m->cuda.scratch);
}

/* The handle's device is current. */
static upipe_status abi_compute_here(const abi_compute *m, upipe_err *e)
{
    int current = -1;
    UPIPE_CUDA_TRY(e, cudaGetDevice(&current));
    if (current == m->cuda.device) return UPIPE_OK;
    return upipe_fail(e, UPIPE_ERR_ARG, "the handle is on device %d, and device %d is current",
                      m->cuda.device, current);
}

static upipe_status abi_compute_fits(const abi_compute *m, const char *name, const void *data, upipe_err *e)
{
    struct cudaPointerAttributes at;
    if (data == NULL) return UPIPE_OK;
    UPIPE_CUDA_TRY(e, cudaPointerGetAttributes(&at, data));
    if (at.type == cudaMemoryTypeUnregistered)
        return upipe_fail(e, UPIPE_ERR_ARG, "%s is host memory, and the handle is on device %d", name,
                          m->cuda.device);
    if (at.device == m->cuda.device) return UPIPE_OK;
    return upipe_fail(e, UPIPE_ERR_ARG, "%s is memory of device %d, and the handle is on device %d", name,
                      at.device, m->cuda.device);
}

static upipe_status abi_stream_fits(void *stream, upipe_err *e)
{
    (void)stream, (void)e;
    return UPIPE_OK;
}

static upipe_status abi_compute_by_host(upipe_err *e)
{
    return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                      "sockets carry host memory, and this library computes on a device");
}

#else

#include "upipe/cpu/upipe_cpu.h"

typedef struct abi_compute {
    upipe_ops ops;
} abi_compute;

static void abi_plan_ops(upipe_ops *ops)
{
    upipe_cpu_ops(ops);
}

static upipe_status abi_compute_open(abi_compute *m, upipe_err *e)
{
    (void)e;
    upipe_cpu_ops(&m->ops);
    return UPIPE_OK;
}

static upipe_status abi_slab(void **out, size_t bytes, upipe_err *e)
{
    if (posix_memalign(out, UPIPE_MEM_ALIGN, bytes) == 0) return UPIPE_OK;
    *out = NULL;
    return upipe_fail(e, UPIPE_ERR_MEMORY, "memory is out");
}

static void abi_slab_free(const abi_compute *m, void *slab)
{
    (void)m;
    free(slab);
}

static void abi_compute_close(abi_compute *m)
{
    (void)m;
}

static upipe_status abi_compute_here(const abi_compute *m, upipe_err *e)
{
    (void)m, (void)e;
    return UPIPE_OK;
}

static upipe_status abi_compute_fits(const abi_compute *m, const char *name, const void *data, upipe_err *e)
{
    (void)m, (void)name, (void)data, (void)e;
    return UPIPE_OK;
}

static upipe_status abi_stream_fits(void *stream, upipe_err *e)
{
    if (stream == NULL) return UPIPE_OK;
    return upipe_fail(e, UPIPE_ERR_ARG, "a stream, and this library computes on the CPU");
}

static upipe_status abi_compute_by_host(upipe_err *e)
{
    (void)e;
    return UPIPE_OK;
}

#endif
#endif
