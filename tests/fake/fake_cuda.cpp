/* fake_cuda.cpp -- the runtime's functions   tests */
#include "fake_core.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <set>

struct CUevent_st {
    bool timed, live;
    fake_point point; /* of its last record; no stream: never recorded */
    std::shared_ptr<double> when;
};

namespace
{

thread_local cudaError_t last_error;
/* Live and dead ones: the address of a dead one must not come again. */
std::set<cudaEvent_t> &events()
{
    static std::set<cudaEvent_t> *set = new std::set<cudaEvent_t>;
    return *set;
}

cudaError_t keep(cudaError_t e)
{
    if (e != cudaSuccess) last_error = e;
    return e;
}

/* The injected error of a call. */
cudaError_t fail(const fake_call &call, cudaError_t mine)
{
    return keep(call.error(mine, cudaErrorLaunchFailure));
}

/* What a call returns that has waited, or released. */
cudaError_t done(const fake_call &call, cudaError_t mine)
{
    if (call.fails) return fail(call, mine);
    return fake_dead() ? keep(cudaErrorLaunchFailure) : cudaSuccess;
}

CUevent_st *event(cudaEvent_t handle)
{
    if (events().count(handle) == 0) fake_finding("%p is no event", (void *)handle);
    if (!handle->live) fake_finding("event %p is used after it was destroyed", (void *)handle);
    return handle;
}

double now()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/* ---- copies ---- */

/* `height` rows of `width` bytes. */
struct rect {
    char *dst;
    const char *src;
    size_t dst_pitch, src_pitch, width, height;
};

size_t span(size_t pitch, size_t width, size_t height)
{
    return (height - 1) * pitch + width;
}

void move(const rect &r)
{
    for (size_t i = 0; i < r.height; ++i) memcpy(r.dst + i * r.dst_pitch, r.src + i * r.src_pitch, r.width);
}

bool kind_fits(enum cudaMemcpyKind kind, bool from_device, bool to_device)
{
    switch (kind) {
    case cudaMemcpyHostToHost:
        return !from_device && !to_device;
    case cudaMemcpyHostToDevice:
        return !from_device && to_device;
    case cudaMemcpyDeviceToHost:
        return from_device && !to_device;
    case cudaMemcpyDeviceToDevice:
        return from_device && to_device;
    default:
        return true;
    }
}

cudaError_t copy(const fake_call &call, rect r, enum cudaMemcpyKind kind, cudaStream_t handle, bool blocking)
{
    CUstream_st *s = fake_stream(handle);
    const char *who = call.name;
    if (call.fails) return fail(call, cudaErrorUnknown);
    if ((unsigned)kind > cudaMemcpyDefault) return keep(cudaErrorInvalidMemcpyDirection);
    if (r.width == 0 || r.height == 0) return cudaSuccess;
    if (r.dst == NULL || r.src == NULL) return keep(cudaErrorInvalidValue);
    if (r.height > 1 && (r.width > r.dst_pitch || r.width > r.src_pitch))
        return keep(cudaErrorInvalidPitchValue);
    size_t to = span(r.dst_pitch, r.width, r.height), from = span(r.src_pitch, r.width, r.height);
    fake_place dst = fake_where(r.dst, to, who, "the destination", NULL);
    fake_place src = fake_where(r.src, from, who, "the source", NULL);
    if (!kind_fits(kind, src == FAKE_DEVICE, dst == FAKE_DEVICE))
        fake_finding("%s: kind %d does not fit the pointers", who, (int)kind);
    if (r.height == 1 && r.dst < r.src + r.width && r.src < r.dst + r.width)
        fake_finding("%s: source and destination overlap", who);
    fake_point p;
    if (src == FAKE_PAGEABLE && dst == FAKE_DEVICE) {
        auto staged = std::make_shared<std::vector<char>>(r.width * r.height);
        rect in = {staged->data(), r.src, r.width, r.src_pitch, r.width, r.height};
        move(in);
        p = fake_append(s, who, [=] {
            rect out = {r.dst, staged->data(), r.dst_pitch, r.width, r.width, r.height};
            fake_where(r.dst, to, who, "the destination", NULL);
            move(out);
        });
        return cudaSuccess;
    }
    p = fake_append(s, who, [=] {
        fake_where(r.dst, to, who, "the destination", NULL);
        fake_where(r.src, from, who, "the source", NULL);
        move(r);
    });
    /* to and from host memory that is not pinned, or between host memory, the call waits */
    bool host = src != FAKE_DEVICE && dst != FAKE_DEVICE;
    bool waits = host || dst == FAKE_PAGEABLE || src == FAKE_PAGEABLE;
    if (blocking && !(src == FAKE_DEVICE && dst == FAKE_DEVICE)) waits = true;
    if (waits) fake_force(p, who);
    return done(call, cudaErrorUnknown);
}

cudaError_t fill(const fake_call &call, void *dst, int value, size_t bytes, cudaStream_t handle)
{
    CUstream_st *s = fake_stream(handle);
    const char *who = call.name;
    if (call.fails) return fail(call, cudaErrorUnknown);
    if (bytes == 0) return cudaSuccess;
    if (dst == NULL) return keep(cudaErrorInvalidValue);
    fake_reachable(dst, bytes, who, "the destination");
    fake_append(s, who, [=] {
        fake_reachable(dst, bytes, who, "the destination");
        memset(dst, value, bytes);
    });
    return cudaSuccess;
}

/* A query that is repeated must come to an end. */
cudaError_t query(const fake_call &call, fake_point p)
{
    static unsigned asked;
    if (call.fails) return fail(call, cudaErrorLaunchFailure);
    if (!fake_passed(p) && (++asked % 3 == 0 || fake_random(3) == 0)) fake_advance(p);
    return fake_passed(p) ? cudaSuccess : keep(cudaErrorNotReady); /* which some runtimes remember */
}

/* ---- names ---- */

struct error_text {
    cudaError_t error;
    const char *name, *text;
};

const error_text texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidPitchValue, "cudaErrorInvalidPitchValue", "invalid pitch argument"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInvalidDevicePointer, "cudaErrorInvalidDevicePointer", "invalid device pointer"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "the driver is older than the runtime"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
     "too many resources requested for launch"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

int attribute(enum cudaDeviceAttr attr, int *value)
{
    switch (attr) {
    case cudaDevAttrMaxThreadsPerBlock:
        return *value = 1024, 1;
    case cudaDevAttrMaxGridDimX:
        return *value = 2147483647, 1;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
        return *value = 65535, 1;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        return *value = 48 << 10, 1;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        return *value = 163 << 10, 1;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        return *value = 164 << 10, 1;
    case cudaDevAttrWarpSize:
        return *value = 32, 1;
    case cudaDevAttrMaxRegistersPerBlock:
        return *value = 65536, 1;
    case cudaDevAttrMultiProcessorCount:
        return *value = 4, 1;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        return *value = 2048, 1;
    case cudaDevAttrComputeCapabilityMajor:
        return *value = 8, 1;
    case cudaDevAttrComputeCapabilityMinor:
        return *value = 0, 1;
    case cudaDevAttrClockRate:
    case cudaDevAttrMemoryClockRate:
        return *value = 1000000, 1;
    case cudaDevAttrGlobalMemoryBusWidth:
        return *value = 5120, 1;
    case cudaDevAttrL2CacheSize:
        return *value = 40 << 20, 1;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrAsyncEngineCount:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCooperativeLaunch:
        return *value = 1, 1;
    }
    return 0;
}

} /* namespace */

cudaError_t fake_enqueue(cudaStream_t stream, const char *name, std::function<void()> work)
{
    fake_call call(name);
    CUstream_st *s = fake_stream(stream);
    if (call.fails) return fail(call, cudaErrorLaunchOutOfResources);
    fake_append(s, name, std::move(work));
    return cudaSuccess;
}

/* ---- memory ---- */

static cudaError_t take(const fake_call &call, void **out, size_t bytes, fake_place place)
{
    if (out == NULL) return keep(cudaErrorInvalidValue);
    if (call.fails) return fail(call, cudaErrorMemoryAllocation);
    *out = NULL;
    if (bytes == 0) return cudaSuccess;
    *out = fake_alloc(bytes, place);
    return *out != NULL ? cudaSuccess : keep(cudaErrorMemoryAllocation);
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    fake_call call("cudaMalloc");
    return take(call, out, bytes, FAKE_DEVICE);
}

cudaError_t cudaFree(void *p)
{
    fake_call call("cudaFree");
    if (p != NULL) fake_release(p, FAKE_DEVICE, call.name);
    return done(call, cudaErrorLaunchFailure);
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned int)
{
    fake_call call("cudaHostAlloc");
    return take(call, out, bytes, FAKE_PINNED);
}

cudaError_t cudaMallocHost(void **out, size_t bytes)
{
    fake_call call("cudaMallocHost");
    return take(call, out, bytes, FAKE_PINNED);
}

cudaError_t cudaFreeHost(void *p)
{
    fake_call call("cudaFreeHost");
    if (p != NULL) fake_release(p, FAKE_PINNED, call.name);
    return done(call, cudaErrorLaunchFailure);
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *total)
{
    fake_call call("cudaMemGetInfo");
    if (call.fails) return fail(call, cudaErrorUnknown);
    *left = fake_left(fake_device(), total);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p)
{
    fake_call call("cudaPointerGetAttributes");
    if (call.fails) return fail(call, cudaErrorUnknown);
    int device;
    fake_place place = fake_where(p, 0, call.name, "the pointer", &device);
    memset(out, 0, sizeof *out);
    out->type = place == FAKE_DEVICE   ? cudaMemoryTypeDevice
                : place == FAKE_PINNED ? cudaMemoryTypeHost
                                       : cudaMemoryTypeUnregistered;
    out->device = place == FAKE_PAGEABLE ? -2 : device;
    out->devicePointer = place == FAKE_PAGEABLE ? NULL : const_cast<void *>(p);
    out->hostPointer = place == FAKE_DEVICE ? NULL : const_cast<void *>(p);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind)
{
    fake_call call("cudaMemcpy");
    return copy(call, {(char *)dst, (const char *)src, bytes, bytes, bytes, 1}, kind, NULL, true);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    fake_call call("cudaMemcpyAsync");
    return copy(call, {(char *)dst, (const char *)src, bytes, bytes, bytes, 1}, kind, stream, false);
}

cudaError_t cudaMemcpy2D(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                         size_t height, enum cudaMemcpyKind kind)
{
    fake_call call("cudaMemcpy2D");
    return copy(call, {(char *)dst, (const char *)src, dst_pitch, src_pitch, width, height}, kind, NULL,
                true);
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    fake_call call("cudaMemcpy2DAsync");
    return copy(call, {(char *)dst, (const char *)src, dst_pitch, src_pitch, width, height}, kind, stream,
                false);
}

cudaError_t cudaMemset(void *dst, int value, size_t bytes)
{
    fake_call call("cudaMemset");
    return fill(call, dst, value, bytes, NULL);
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    fake_call call("cudaMemsetAsync");
    return fill(call, dst, value, bytes, stream);
}

/* ---- streams ---- */

static cudaError_t stream_new(const fake_call &call, cudaStream_t *out, unsigned int flags)
{
    if (call.fails) return fail(call, cudaErrorMemoryAllocation);
    if (out == NULL || flags > cudaStreamNonBlocking) return keep(cudaErrorInvalidValue);
    *out = fake_stream_new(fake_device(), flags == cudaStreamDefault);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *out)
{
    fake_call call("cudaStreamCreate");
    return stream_new(call, out, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned int flags)
{
    fake_call call("cudaStreamCreateWithFlags");
    return stream_new(call, out, flags);
}

/* What it holds still runs. */
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    fake_call call("cudaStreamDestroy");
    if (stream == NULL || stream == cudaStreamLegacy) return keep(cudaErrorInvalidResourceHandle);
    fake_stream(stream)->live = false;
    --fake_handles;
    return done(call, cudaErrorLaunchFailure);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    fake_call call("cudaStreamSynchronize");
    CUstream_st *s = fake_stream(stream);
    if (call.fails) return fail(call, cudaErrorLaunchFailure);
    fake_force({s, s->issued}, call.name);
    return done(call, cudaErrorLaunchFailure);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    fake_call call("cudaStreamQuery", true);
    CUstream_st *s = fake_stream(stream);
    return query(call, {s, s->issued});
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned int flags)
{
    fake_call call("cudaStreamWaitEvent");
    CUstream_st *s = fake_stream(stream);
    CUevent_st *e = event(handle);
    if (call.fails) return fail(call, cudaErrorInvalidResourceHandle);
    if (flags != 0) return keep(cudaErrorInvalidValue);
    if (e->point.stream != NULL && !fake_passed(e->point)) fake_append(s, call.name, nullptr, {e->point});
    return cudaSuccess;
}

/* ---- events ---- */

static cudaError_t event_new(const fake_call &call, cudaEvent_t *out, unsigned int flags)
{
    if (call.fails) return fail(call, cudaErrorMemoryAllocation);
    if (out == NULL || flags > 7) return keep(cudaErrorInvalidValue);
    *out = new CUevent_st{(flags & cudaEventDisableTiming) == 0, true, {NULL, 0}, nullptr};
    events().insert(*out);
    ++fake_handles;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out)
{
    fake_call call("cudaEventCreate");
    return event_new(call, out, cudaEventDefault);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned int flags)
{
    fake_call call("cudaEventCreateWithFlags");
    return event_new(call, out, flags);
}

cudaError_t cudaEventDestroy(cudaEvent_t handle)
{
    fake_call call("cudaEventDestroy");
    event(handle)->live = false;
    --fake_handles;
    return done(call, cudaErrorLaunchFailure);
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream)
{
    fake_call call("cudaEventRecord");
    CUstream_st *s = fake_stream(stream);
    CUevent_st *e = event(handle);
    if (call.fails) return fail(call, cudaErrorInvalidResourceHandle);
    auto when = std::make_shared<double>(0);
    e->when = when;
    e->point = fake_append(s, call.name, [when] { *when = now(); });
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle)
{
    fake_call call("cudaEventQuery", true);
    CUevent_st *e = event(handle);
    if (e->point.stream == NULL && !call.fails) return cudaSuccess;
    return query(call, e->point);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle)
{
    fake_call call("cudaEventSynchronize");
    CUevent_st *e = event(handle);
    if (call.fails) return fail(call, cudaErrorLaunchFailure);
    if (e->point.stream != NULL) fake_force(e->point, call.name);
    return done(call, cudaErrorLaunchFailure);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    fake_call call("cudaEventElapsedTime");
    CUevent_st *a = event(start), *b = event(end);
    if (call.fails) return fail(call, cudaErrorUnknown);
    if (!a->timed || !b->timed || a->when == nullptr || b->when == nullptr)
        return keep(cudaErrorInvalidResourceHandle);
    if (!fake_passed(a->point) || !fake_passed(b->point)) return keep(cudaErrorNotReady);
    *ms = (float)((*b->when - *a->when) * 1e3);
    return cudaSuccess;
}

/* ---- devices ---- */

cudaError_t cudaGetDeviceCount(int *count)
{
    fake_call call("cudaGetDeviceCount");
    if (call.fails) return fail(call, cudaErrorNoDevice);
    *count = FAKE_DEVICES;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = fake_device();
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    fake_call call("cudaSetDevice");
    if (call.fails) return fail(call, cudaErrorInitializationError);
    if (device < 0 || device >= FAKE_DEVICES) return keep(cudaErrorInvalidDevice);
    fake_set_device(device);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device)
{
    fake_call call("cudaDeviceGetAttribute");
    if (call.fails) return fail(call, cudaErrorInitializationError);
    if (device < 0 || device >= FAKE_DEVICES) return keep(cudaErrorInvalidDevice);
    return attribute(attr, value) ? cudaSuccess : keep(cudaErrorInvalidValue);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device)
{
    fake_call call("cudaGetDeviceProperties");
    if (call.fails) return fail(call, cudaErrorInitializationError);
    if (device < 0 || device >= FAKE_DEVICES) return keep(cudaErrorInvalidDevice);
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "fake");
    fake_left(device, &out->totalGlobalMem);
    out->sharedMemPerBlock = 48 << 10;
    out->sharedMemPerBlockOptin = 163 << 10;
    out->sharedMemPerMultiprocessor = 164 << 10;
    out->major = 8;
    out->multiProcessorCount = 4;
    out->warpSize = 32;
    out->maxThreadsPerBlock = 1024;
    out->maxThreadsPerMultiProcessor = 2048;
    out->l2CacheSize = 40 << 20;
    out->memoryBusWidth = 5120;
    out->pciBusID = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    fake_call call("cudaDeviceSynchronize");
    if (call.fails) return fail(call, cudaErrorLaunchFailure);
    fake_drain(fake_device(), call.name);
    return done(call, cudaErrorLaunchFailure);
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attr, int value)
{
    fake_call call("cudaFuncSetAttribute");
    if (call.fails) return fail(call, cudaErrorInvalidDeviceFunction);
    if (kernel == NULL) return keep(cudaErrorInvalidDeviceFunction);
    if (attr == cudaFuncAttributeMaxDynamicSharedMemorySize && (value < 0 || value > 163 << 10))
        return keep(cudaErrorInvalidValue);
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    fake_call call("cudaDriverGetVersion");
    if (call.fails) return fail(call, cudaErrorInitializationError);
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    fake_call call("cudaRuntimeGetVersion");
    if (call.fails) return fail(call, cudaErrorInitializationError);
    *version = CUDART_VERSION;
    return cudaSuccess;
}

/* ---- errors ---- */

cudaError_t cudaGetLastError(void)
{
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

const char *cudaGetErrorName(cudaError_t e)
{
    for (auto &t : texts)
        if (t.error == e) return t.name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t e)
{
    for (auto &t : texts)
        if (t.error == e) return t.text;
    return "unrecognized error code";
}
