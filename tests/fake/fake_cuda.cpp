/* fake_cuda.cpp -- the runtime's functions   tests */
#include "fake_core.h"
#include "fake_kernels.h"

#include <cstdio>
#include <cstring>
#include <vector>

struct CUevent_st {
    bool timed, live;
    fake_point point; /* of its last record; no stream: never recorded */
    std::shared_ptr<double> when;
    fake_capture_ref capture; /* that its last record was captured into, behind these nodes */
    std::vector<size_t> nodes;
};

namespace
{

thread_local cudaError_t last_error;

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
    return fake_alive(handle, "event", "a call");
}

/* ---- copies ---- */

/* A device has no access to another's memory. */
void check_access(const CUstream_st *s, fake_place place, int device, const char *who)
{
    if (place == FAKE_DEVICE && device != s->device)
        fake_finding("%s: device %d has no access to device %d", who, s->device, device);
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

cudaError_t copy(const fake_call &call, void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                 cudaStream_t handle, bool blocking)
{
    CUstream_st *s = fake_stream(handle);
    const char *who = call.name;
    if (call.fails) return fail(call, cudaErrorUnknown);
    if ((unsigned)kind > cudaMemcpyDefault) return keep(cudaErrorInvalidMemcpyDirection);
    if (bytes == 0) return cudaSuccess;
    if (to == NULL || from == NULL) return keep(cudaErrorInvalidValue);
    cudaError_t captured = blocking ? fake_unsafe() : cudaSuccess;
    if (captured == cudaSuccess) captured = fake_may(s);
    if (captured != cudaSuccess) return keep(captured);
    int dst_device, src_device;
    fake_place dst = fake_where(to, bytes, who, "the destination", &dst_device);
    fake_place src = fake_where(from, bytes, who, "the source", &src_device);
    check_access(s, dst, dst_device, who);
    check_access(s, src, src_device, who);
    if (!kind_fits(kind, src == FAKE_DEVICE, dst == FAKE_DEVICE))
        fake_finding("%s: kind %d does not fit the pointers", who, (int)kind);
    if ((char *)to < (const char *)from + bytes && (const char *)from < (char *)to + bytes)
        fake_finding("%s: source and destination overlap", who);
    /* as a node it would read or write the host's memory at every launch: more than a host can keep in mind */
    if (s->capture != nullptr && (src == FAKE_PAGEABLE || dst == FAKE_PAGEABLE)) {
        fake_spoil(s->capture);
        return keep(cudaErrorStreamCaptureUnsupported);
    }
    if (src == FAKE_PAGEABLE && dst == FAKE_DEVICE) {
        auto staged = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + bytes);
        fake_append(s, who, [=] {
            fake_where(to, bytes, who, "the destination", NULL);
            memcpy(to, staged->data(), bytes);
        });
        return cudaSuccess;
    }
    fake_point p = fake_append(s, who, [=] {
        fake_where(to, bytes, who, "the destination", NULL);
        fake_where(from, bytes, who, "the source", NULL);
        memcpy(to, from, bytes);
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
    if (fake_may(s) != cudaSuccess) return keep(fake_may(s));
    fake_reachable(dst, bytes, who, "the destination");
    fake_append(s, who, [=] {
        fake_reachable(dst, bytes, who, "the destination");
        memset(dst, value, bytes);
    });
    return cudaSuccess;
}

/* The error of waiting for a stream. */
cudaError_t waits_for(CUstream_st *s)
{
    if (s->capture == nullptr) return fake_may(s);
    fake_spoil(s->capture);
    return cudaErrorStreamCaptureUnsupported;
}

/* The error of asking for an event. */
cudaError_t asked(const CUevent_st *e)
{
    if (e->capture == nullptr) return fake_unsafe();
    fake_spoil(e->capture);
    return cudaErrorCapturedEvent;
}

/* A query that is repeated must come to an end. One alone tells how far the stream is, and moves nothing. */
cudaError_t query(const fake_call &call, fake_point p)
{
    static unsigned asked;
    if (call.fails) return fail(call, cudaErrorLaunchFailure);
    if (!fake_passed(p) && fake_asks_again(call, p) && (++asked % 3 == 0 || fake_random(3) == 0))
        fake_advance(p);
    return fake_passed(p) ? cudaSuccess : keep(cudaErrorNotReady); /* which some runtimes remember */
}

/* ---- names ---- */

struct error_text {
    cudaError_t error;
    const char *name, *text;
};

#define ERROR_TEXT(error, text) \
    {                           \
        error, #error, text     \
    }
const error_text texts[] = {
    ERROR_TEXT(cudaSuccess, "no error"),
    ERROR_TEXT(cudaErrorInvalidValue, "invalid argument"),
    ERROR_TEXT(cudaErrorMemoryAllocation, "out of memory"),
    ERROR_TEXT(cudaErrorInitializationError, "initialization error"),
    ERROR_TEXT(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    ERROR_TEXT(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    ERROR_TEXT(cudaErrorInvalidDeviceFunction, "invalid device function"),
    ERROR_TEXT(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"),
    ERROR_TEXT(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR_TEXT(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR_TEXT(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR_TEXT(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    ERROR_TEXT(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    ERROR_TEXT(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    ERROR_TEXT(cudaErrorStreamCaptureMerge,
               "operation would result in a merge of separate capture sequences"),
    ERROR_TEXT(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    ERROR_TEXT(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    ERROR_TEXT(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    ERROR_TEXT(cudaErrorStreamCaptureImplicit,
               "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR_TEXT(cudaErrorCapturedEvent,
               "operation not permitted on an event last recorded in a capturing stream"),
    ERROR_TEXT(cudaErrorStreamCaptureWrongThread,
               "attempt to terminate a thread-local capture sequence from another thread"),
    ERROR_TEXT(cudaErrorNotReady, "device not ready"),
    ERROR_TEXT(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    ERROR_TEXT(cudaErrorLaunchFailure, "unspecified launch failure"),
    ERROR_TEXT(cudaErrorUnknown, "unknown error"),
};
#undef ERROR_TEXT

/* 80, 86 or 90, as tests ask for; with the shared memory of a block, in KiB. */
int capability()
{
    const char *s = getenv("FAKE_CAPABILITY");
    return s != NULL && *s ? atoi(s) : 80;
}

int shared_most()
{
    return capability() >= 90 ? 227 : capability() == 86 ? 99 : 163;
}

/* -1: none that the fake knows. */
int attribute(enum cudaDeviceAttr attr)
{
    switch (attr) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        return shared_most() << 10;
    case cudaDevAttrMultiProcessorCount:
        return fake_processors_count();
    case cudaDevAttrComputeCapabilityMajor:
        return capability() / 10;
    case cudaDevAttrComputeCapabilityMinor:
        return capability() % 10;
    }
    return -1;
}

} /* namespace */

cudaError_t fake_keep(cudaError_t e)
{
    return keep(e);
}

int fake_capability()
{
    return capability();
}

/* Registers and ticks of the kernel's blocks. */
static void known_kernel(fake_needs *needs, const char *name, int columns)
{
    needs->registers = FAKE_OTHER_REGISTERS;
    needs->ticks = 1;
#define KNOWN_KERNEL(kernel, d, on_80, on_90, long_ticks)          \
    if (strstr(name, #kernel) != NULL && columns == (d)) {         \
        needs->registers = capability() >= 90 ? (on_90) : (on_80); \
        needs->ticks = long_ticks;                                 \
    }
    FAKE_KERNELS(KNOWN_KERNEL)
#undef KNOWN_KERNEL
}

cudaError_t fake_enqueue(cudaStream_t stream, const char *name, std::function<void()> work, fake_needs needs,
                         int columns)
{
    fake_call call(name);
    CUstream_st *s = fake_stream(stream);
    if (call.fails) return fail(call, cudaErrorLaunchOutOfResources);
    if (fake_may(s) != cudaSuccess) return keep(fake_may(s));
    if (needs.blocks > 0) known_kernel(&needs, name, columns);
    fake_load(name);
    fake_append(s, name, std::move(work), {}, nullptr, needs);
    return cudaSuccess;
}

/* ---- memory ---- */

static cudaError_t claim(const fake_call &call, void **out, size_t bytes, fake_place place)
{
    if (out == NULL) return keep(cudaErrorInvalidValue);
    if (call.fails) return fail(call, cudaErrorMemoryAllocation);
    *out = NULL;
    if (bytes == 0) return cudaSuccess;
    if (fake_unsafe() != cudaSuccess) return keep(cudaErrorStreamCaptureUnsupported);
    *out = fake_alloc(bytes, place);
    return *out != NULL ? cudaSuccess : keep(cudaErrorMemoryAllocation);
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    fake_call call("cudaMalloc");
    return claim(call, out, bytes, FAKE_DEVICE);
}

cudaError_t cudaFree(void *p)
{
    fake_call call("cudaFree");
    if (p != NULL && fake_unsafe() != cudaSuccess) return keep(cudaErrorStreamCaptureUnsupported);
    if (p != NULL) fake_release(p, FAKE_DEVICE, call.name);
    return done(call, cudaErrorLaunchFailure);
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned int)
{
    fake_call call("cudaHostAlloc");
    return claim(call, out, bytes, FAKE_PINNED);
}

cudaError_t cudaFreeHost(void *p)
{
    fake_call call("cudaFreeHost");
    if (p != NULL && fake_unsafe() != cudaSuccess) return keep(cudaErrorStreamCaptureUnsupported);
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
    return copy(call, dst, src, bytes, kind, NULL, true);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    fake_call call("cudaMemcpyAsync");
    return copy(call, dst, src, bytes, kind, stream, false);
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

const int greatest_priority = -5; /* the least is 0 */

static cudaError_t stream_new(const fake_call &call, cudaStream_t *out, unsigned int flags, int priority = 0)
{
    if (call.fails) return fail(call, cudaErrorMemoryAllocation);
    if (out == NULL || flags > cudaStreamNonBlocking) return keep(cudaErrorInvalidValue);
    priority = priority > 0 ? 0 : priority < greatest_priority ? greatest_priority : priority;
    *out = fake_stream_new(fake_device(), flags == cudaStreamDefault, priority);
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

/* What is out of range is taken for the nearest that is not. Where residency counts, a priority is what it says. */
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned int flags, int priority)
{
    fake_call call("cudaStreamCreateWithPriority");
    return stream_new(call, out, flags, priority);
}

/* What it holds still runs. */
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    fake_call call("cudaStreamDestroy");
    if (stream == NULL || stream == cudaStreamLegacy) return keep(cudaErrorInvalidResourceHandle);
    if (fake_stream(stream)->capture != nullptr) fake_finding("%s: the stream captures", call.name);
    fake_stream(stream)->live = false;
    --fake_handles;
    return done(call, cudaErrorLaunchFailure);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    fake_call call("cudaStreamSynchronize");
    CUstream_st *s = fake_stream(stream);
    if (call.fails) return fail(call, cudaErrorLaunchFailure);
    cudaError_t captured = waits_for(s);
    if (captured != cudaSuccess) return keep(captured);
    fake_force({s, s->issued}, call.name);
    return done(call, cudaErrorLaunchFailure);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    fake_call call("cudaStreamQuery", true);
    CUstream_st *s = fake_stream(stream);
    cudaError_t captured = waits_for(s);
    if (captured != cudaSuccess && !call.fails) return keep(captured);
    return query(call, {s, s->issued});
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned int flags)
{
    fake_call call("cudaStreamWaitEvent");
    CUstream_st *s = fake_stream(stream);
    CUevent_st *e = event(handle);
    if (call.fails) return fail(call, cudaErrorInvalidResourceHandle);
    if (flags != 0) return keep(cudaErrorInvalidValue);
    if (fake_may(s) != cudaSuccess) return keep(fake_may(s));
    if (e->capture != nullptr || (s->capture != nullptr && e->point.stream != NULL))
        return keep(fake_capture_wait(s, e->capture, e->nodes));
    if (e->point.stream != NULL && !fake_passed(e->point)) fake_append(s, call.name, nullptr, {e->point});
    return cudaSuccess;
}

/* ---- events ---- */

static cudaError_t event_new(const fake_call &call, cudaEvent_t *out, unsigned int flags)
{
    if (call.fails) return fail(call, cudaErrorMemoryAllocation);
    if (out == NULL || (flags & ~(unsigned)cudaEventDisableTiming) != 0) return keep(cudaErrorInvalidValue);
    bool timed = (flags & cudaEventDisableTiming) == 0;
    *out = fake_made(new CUevent_st{timed, true, {NULL, 0}, nullptr, nullptr, {}});
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
    if (fake_may(s) != cudaSuccess) return keep(fake_may(s));
    e->capture = s->capture;
    e->nodes = s->tail;
    e->when = nullptr;
    if (s->capture != nullptr) return cudaSuccess;
    auto when = std::make_shared<double>(0);
    e->when = when;
    int device = s->device;
    e->point = fake_append(s, call.name, [when, device] { *when = fake_now(device); });
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle)
{
    fake_call call("cudaEventQuery", true);
    CUevent_st *e = event(handle);
    if (asked(e) != cudaSuccess && !call.fails) return keep(asked(e));
    if (e->point.stream == NULL && !call.fails) return cudaSuccess;
    return query(call, e->point);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle)
{
    fake_call call("cudaEventSynchronize");
    CUevent_st *e = event(handle);
    if (call.fails) return fail(call, cudaErrorLaunchFailure);
    if (asked(e) != cudaSuccess) return keep(asked(e));
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
    if (attribute(attr) < 0) return keep(cudaErrorInvalidValue);
    *value = attribute(attr);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device)
{
    fake_call call("cudaGetDeviceProperties");
    if (call.fails) return fail(call, cudaErrorInitializationError);
    if (device < 0 || device >= FAKE_DEVICES) return keep(cudaErrorInvalidDevice);
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "fake");
    fake_left(device, &out->totalGlobalMem);
    out->major = capability() / 10;
    out->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    fake_call call("cudaDeviceSynchronize");
    if (call.fails) return fail(call, cudaErrorLaunchFailure);
    if (fake_unsafe() != cudaSuccess) return keep(cudaErrorStreamCaptureUnsupported);
    fake_drain(fake_device(), call.name);
    return done(call, cudaErrorLaunchFailure);
}

/* Every kernel runs everywhere, but where FAKE_NO_CODE is set: there the program was compiled for other devices. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *kernel)
{
    fake_call call("cudaFuncGetAttributes");
    if (call.fails) return fail(call, cudaErrorInitializationError);
    if (kernel == NULL) return keep(cudaErrorInvalidDeviceFunction);
    if (getenv("FAKE_NO_CODE") != NULL) return keep(cudaErrorNoKernelImageForDevice);
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->ptxVersion = out->binaryVersion = capability();
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attr, int value)
{
    fake_call call("cudaFuncSetAttribute");
    if (call.fails) return fail(call, cudaErrorInvalidDeviceFunction);
    if (kernel == NULL) return keep(cudaErrorInvalidDeviceFunction);
    if (attr == cudaFuncAttributeMaxDynamicSharedMemorySize && (value < 0 || value > shared_most() << 10))
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

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    fake_call call("cudaDeviceGetStreamPriorityRange");
    if (call.fails) return fail(call, cudaErrorInitializationError);
    if (least != NULL) *least = 0;
    if (greatest != NULL) *greatest = greatest_priority;
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
