/* test_fake.c -- the fake CUDA itself: laziness, what it finds, injected errors, products, NCCL */
#include "../lib/test.h"

#include <pthread.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cublas_v2.h"
#include "fake.h"
#include "nccl.h"

#define OK(call)      CHECK_SAY((call) == cudaSuccess, "%s", #call)
#define NCCL_OK(call) CHECK_SAY((call) == ncclSuccess, "%s", #call)

static cudaStream_t stream_new(void)
{
    cudaStream_t s = NULL;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}

static void *device_buf(size_t bytes)
{
    void *p = NULL;
    OK(cudaMalloc(&p, bytes));
    return p;
}

/* The device's copy is brought back on a stream of its own: nothing else is forced. */
static int peek(const void *p)
{
    cudaStream_t s = stream_new();
    int v = 0;
    OK(cudaMemcpyAsync(&v, p, sizeof v, cudaMemcpyDeviceToHost, s));
    OK(cudaStreamDestroy(s));
    return v;
}

static void test_lazy(void)
{
    cudaStream_t a = stream_new(), b = stream_new();
    cudaEvent_t e;
    int *pinned, *dev = (int *)device_buf(8), host = 5, i, ready;
    OK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    OK(cudaHostAlloc((void **)&pinned, 4, cudaHostAllocDefault));
    CHECK_INT(peek(dev), -1); /* new memory is NaN */
    *pinned = 3;
    OK(cudaMemcpyAsync(dev, pinned, 4, cudaMemcpyDefault, a));
    OK(cudaMemcpyAsync(dev + 1, &host, 4, cudaMemcpyHostToDevice, a));
    CHECK_INT(peek(dev), -1);
    *pinned = 4; /* too early: the copy has not run */
    host = 6;    /* late enough: ordinary memory is read at the call */
    OK(cudaEventRecord(e, a));
    OK(cudaMemsetAsync(dev, 0, 4, a)); /* behind the event */
    OK(cudaStreamWaitEvent(b, e, 0));
    OK(cudaStreamSynchronize(b));
    CHECK_INT(peek(dev), 4);
    CHECK_INT(peek(dev + 1), 5);
    for (i = 0, ready = 0; i < 100 && !ready; ++i) ready = cudaStreamQuery(a) == cudaSuccess;
    CHECK(ready);
    CHECK(i > 1);
    CHECK_INT(peek(dev), 0);
    /* what is not waited for is not seen */
    OK(cudaMemsetAsync(dev, 1, 4, a));
    OK(cudaMemcpyAsync(pinned, dev, 4, cudaMemcpyDeviceToHost, b));
    OK(cudaStreamSynchronize(b));
    CHECK_INT(*pinned, 0);
    OK(cudaFree(dev)); /* waits for the device */
    OK(cudaFreeHost(pinned));
    OK(cudaEventDestroy(e));
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
    CHECK(fake_check_clean());
}

/* Pages that nobody has touched are as new as those beside them, in this memory and in the next. */
static void test_untouched(void)
{
    enum { LARGE = 1 << 22 };
    char *dev = NULL;
    for (int round = 0; round < 2; ++round) {
        dev = (char *)device_buf(LARGE);
        OK(cudaMemset(dev + LARGE / 2, 0, 4));
        OK(cudaDeviceSynchronize());
        CHECK_INT(peek(dev + LARGE / 2), 0);
        CHECK_INT(peek(dev + LARGE / 2 + 4), -1);
        CHECK_INT(peek(dev), -1);
        CHECK_INT(peek(dev + LARGE - 4), -1);
        OK(cudaFree(dev));
    }
    CHECK(fake_check_clean());
}

static void test_legacy(void)
{
    cudaStream_t blocking, apart = stream_new();
    int *dev = (int *)device_buf(12), host[3];
    OK(cudaStreamCreate(&blocking));
    OK(cudaMemsetAsync(dev, 0, 12, apart));
    OK(cudaStreamSynchronize(apart));
    OK(cudaMemsetAsync(dev, 1, 4, blocking));
    OK(cudaMemsetAsync(dev + 1, 1, 4, apart));
    OK(cudaMemset(dev + 2, 1, 4));
    OK(cudaMemcpy(host, dev, 12, cudaMemcpyDeviceToHost));
    CHECK_INT(host[0], 0x01010101);
    CHECK_INT(host[1], 0);
    CHECK_INT(host[2], 0x01010101);
    OK(cudaMemset(dev, 2, 4));
    OK(cudaMemcpyAsync(host, dev, 4, cudaMemcpyDeviceToHost, blocking));
    CHECK_INT(host[0], 0x02020202);
    OK(cudaDeviceSynchronize());
    OK(cudaFree(dev));
    OK(cudaStreamDestroy(apart));
    OK(cudaStreamDestroy(blocking));
    CHECK(fake_check_clean());
}

/* ---- findings: each in a process of its own ---- */

static char *dev_bytes, host_bytes[64];
static cudaStream_t stream_now;

/* Each kind of misuse, and what must be said of it. */
#define MISUSES(X)                                               \
    X(PAST_THE_END, "8 bytes at byte 60 of an allocation of 64") \
    X(PAGEABLE, "host memory that the device cannot reach")      \
    X(FREED, "byte 0 of freed device memory")                    \
    X(TWICE, "was freed before")                                 \
    X(HOST_ACCESS, "the host touched live device memory")        \
    X(KIND, "kind 3 does not fit")                               \
    X(DEAD_STREAM, "used after it was destroyed")                \
    X(OVERLAP, "overlap")                                        \
    X(GEMM, "B at")                                              \
    X(ACCESS, "device 1 has no access to device 0")              \
    X(LEFTOVER, "left 64 bytes of device memory")

#define MISUSE_NUMBER(name, words) name,
#define MISUSE_ROW(name, words)    {#name, words},
enum { MISUSES(MISUSE_NUMBER) MISUSES_N };

static void misuse(int what)
{
    cudaStream_t s = stream_now;
    cublasHandle_t blas;
    float one = 1;
    void *there;
    switch (what) {
    case PAST_THE_END:
        cudaMemsetAsync(dev_bytes + 60, 0, 8, s);
        break;
    case PAGEABLE:
        cudaMemsetAsync(host_bytes, 0, 8, s);
        break;
    case FREED:
        cudaFree(dev_bytes);
        cudaMemcpy(host_bytes, dev_bytes, 8, cudaMemcpyDefault);
        break;
    case TWICE:
        cudaFree(dev_bytes);
        cudaFree(dev_bytes);
        break;
    case HOST_ACCESS:
        host_bytes[0] = *(volatile char *)dev_bytes;
        break;
    case KIND:
        cudaMemcpy(dev_bytes, host_bytes, 8, cudaMemcpyDeviceToDevice);
        break;
    case DEAD_STREAM:
        cudaStreamDestroy(s);
        cudaStreamSynchronize(s);
        break;
    case OVERLAP:
        cudaMemcpyAsync(dev_bytes, dev_bytes + 4, 8, cudaMemcpyDefault, s);
        break;
    case GEMM:
        cublasCreate(&blas);
        cublasGemmEx_64(blas, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &one, dev_bytes, CUDA_R_32F, 2, host_bytes,
                        CUDA_R_32F, 2, &one, dev_bytes, CUDA_R_32F, 2, CUBLAS_COMPUTE_32F,
                        CUBLAS_GEMM_DEFAULT);
        break;
    case ACCESS:
        OK(cudaSetDevice(1));
        there = device_buf(4);
        OK(cudaMemcpyAsync(dev_bytes, there, 4, cudaMemcpyDefault, stream_new()));
        break;
    case LEFTOVER:
        _exit(fake_check_clean() ? 0 : 9); /* said on stderr */
    }
}

static void check_finding(const char *name, int what, const char *part)
{
    int ends[2], status;
    char text[512];
    ssize_t n = 0, got;
    pid_t child;
    if (!CHECK(pipe(ends) == 0)) return;
    fflush(NULL);
    child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        misuse(what);
        _exit(0);
    }
    close(ends[1]);
    while (n < (ssize_t)sizeof text - 1 && (got = read(ends[0], text + n, sizeof text - 1 - (size_t)n)) > 0)
        n += got;
    text[n] = 0;
    close(ends[0]);
    waitpid(child, &status, 0);
    CHECK_SAY(!WIFEXITED(status) || WEXITSTATUS(status) != 0, "%s: nothing found", name);
    CHECK_SAY(strstr(text, part) != NULL, "%s: \"%s\" does not say \"%s\"", name, text, part);
}

static void test_findings(void)
{
    static const struct {
        const char *name, *words;
    } misuses[] = {MISUSES(MISUSE_ROW)};
    stream_now = stream_new();
    dev_bytes = (char *)device_buf(64);
    for (int i = 0; i < MISUSES_N; ++i) check_finding(misuses[i].name, i, misuses[i].words);
    OK(cudaFree(dev_bytes));
    OK(cudaStreamDestroy(stream_now));
    CHECK(fake_check_clean());
}

/* ---- injected errors, counts ---- */

static void test_errors(void)
{
    void *p;
    cudaStream_t s = NULL;
    fake_fail_at(2, -1, FAKE_ONCE);
    OK(cudaMalloc(&p, 100));
    CHECK(cudaStreamCreate(&s) == cudaErrorMemoryAllocation);
    CHECK_TEXT(fake_failed(), "cudaStreamCreate");
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(s == NULL);
    fake_fail_at(1, -1, FAKE_ONCE);
    CHECK(cudaFree(p) == cudaErrorLaunchFailure); /* and it is freed */
    CHECK(fake_check_clean());
    OK(cudaStreamCreate(&s));
    OK(cudaMalloc(&p, 100));
    fake_fail_at(2, -1, FAKE_STICKY);
    OK(cudaMemsetAsync(p, 0, 100, s));
    CHECK(cudaStreamSynchronize(s) == cudaErrorLaunchFailure);
    CHECK(cudaStreamSynchronize(s) == cudaErrorLaunchFailure);
    CHECK(cudaFree(p) == cudaErrorLaunchFailure);
    CHECK(cudaStreamDestroy(s) == cudaErrorLaunchFailure);
    CHECK_INT(fake_calls(-1), 5);
    fake_fail_at(0, -1, FAKE_ONCE);
    CHECK(fake_check_clean());
    fake_rank(3);
    fake_fail_at(1, 2, FAKE_ONCE); /* of another rank */
    OK(cudaMalloc(&p, 1000));
    CHECK_INT(fake_calls(3), 1);
    CHECK_INT(fake_calls(2), 0);
    fake_fail_at(0, -1, FAKE_ONCE);
    fake_peak_reset();
    CHECK_INT(fake_device_live(), 1000);
    fake_device_limit(1500);
    CHECK(cudaMalloc((void **)&s, 501) == cudaErrorMemoryAllocation);
    OK(cudaMalloc((void **)&s, 500));
    CHECK_INT(fake_device_peak(), 1500);
    OK(cudaFree(s));
    OK(cudaFree(p));
    fake_device_limit(0);
    fake_rank(-1);
    (void)cudaGetLastError();
    CHECK(fake_check_clean());
}

/* ---- products ---- */

static void test_gemm(void)
{
    enum { M = 3, N = 4, K = 5, BATCHES = 2 };
    float a[2 * M * K], b[K * N], c[2 * M * N], alpha = 2, beta = 1;
    float *da = (float *)device_buf(sizeof a), *db = (float *)device_buf(sizeof b);
    float *dc = (float *)device_buf(sizeof c);
    cublasHandle_t h;
    CHECK(cublasCreate(&h) == CUBLAS_STATUS_SUCCESS);
    for (int i = 0; i < 2 * M * K; ++i) a[i] = (float)(i % 7 - 3);
    for (int i = 0; i < K * N; ++i) b[i] = (float)(i % 5 - 2);
    OK(cudaMemcpy(da, a, sizeof a, cudaMemcpyHostToDevice));
    OK(cudaMemcpy(db, b, sizeof b, cudaMemcpyHostToDevice));
    for (int ta = 0; ta < 2; ++ta)
        for (int tb = 0; tb < 2; ++tb) {
            for (int i = 0; i < 2 * M * N; ++i) c[i] = (float)i;
            OK(cudaMemcpy(dc, c, sizeof c, cudaMemcpyHostToDevice));
            CHECK(cublasGemmStridedBatchedEx_64(
                      h, (cublasOperation_t)ta, (cublasOperation_t)tb, M, N, K, &alpha, da, CUDA_R_32F,
                      ta ? K : M, M * K, db, CUDA_R_32F, tb ? N : K, 0, &beta, dc, CUDA_R_32F, M, M * N,
                      BATCHES, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
            OK(cudaMemcpy(c, dc, sizeof c, cudaMemcpyDeviceToHost));
            for (int z = 0; z < BATCHES; ++z)
                for (int i = 0; i < M; ++i)
                    for (int j = 0; j < N; ++j) {
                        float sum = 0;
                        for (int l = 0; l < K; ++l)
                            sum +=
                                a[z * M * K + (ta ? l + i * K : i + l * M)] * b[tb ? j + l * N : l + j * K];
                        CHECK_INT(c[z * M * N + i + j * M], 2 * sum + (float)(z * M * N + i + j * M));
                    }
        }
    CHECK(cublasGemmEx_64(h, CUBLAS_OP_T, CUBLAS_OP_N, M, N, K, &alpha, da, CUDA_R_32F, M, db, CUDA_R_32F, K,
                          &beta, dc, CUDA_R_32F, M, CUBLAS_COMPUTE_32F,
                          CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(cublasGemmEx_64(h, CUBLAS_OP_N, CUBLAS_OP_N, M, N, K, &alpha, da, CUDA_R_16BF, M, db, CUDA_R_32F, K,
                          &beta, dc, CUDA_R_32F, M, CUBLAS_COMPUTE_32F,
                          CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK(cublasDestroy(h) == CUBLAS_STATUS_SUCCESS);
    OK(cudaFree(da));
    OK(cudaFree(db));
    OK(cudaFree(dc));
    CHECK(fake_check_clean());
}

/* ---- residency ---- */

/* On one multiprocessor, which two blocks of products fill: ticks at which a product of ten blocks has ended, and one of a
 * single block that was enqueued behind it on another stream. */
static void run_beside(int priority, float *ten, float *one)
{
    const fake_processors small = {1, 65536, 164 << 10, 2048, 32};
    const float alpha = 1, beta = 0;
    cudaStream_t s[2] = {stream_new(), NULL};
    cudaEvent_t begin, end[2];
    float *c = (float *)device_buf(11 * sizeof *c);
    cublasHandle_t h;
    fake_residency(&small);
    OK(cudaStreamCreateWithPriority(&s[1], cudaStreamNonBlocking, priority));
    CHECK(cublasCreate(&h) == CUBLAS_STATUS_SUCCESS);
    OK(cudaEventCreate(&begin));
    OK(cudaEventRecord(begin, s[0]));
    for (int i = 0; i < 2; ++i) {
        CHECK(cublasSetStream(h, s[i]) == CUBLAS_STATUS_SUCCESS);
        CHECK(cublasGemmStridedBatchedEx_64(h, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 0, &alpha, c, CUDA_R_32F, 1, 0,
                                            c, CUDA_R_32F, 1, 0, &beta, c + 10 * i, CUDA_R_32F, 1, 1,
                                            i == 0 ? 10 : 1, CUBLAS_COMPUTE_32F,
                                            CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
        OK(cudaEventCreate(&end[i]));
        OK(cudaEventRecord(end[i], s[i]));
    }
    OK(cudaDeviceSynchronize());
    OK(cudaEventElapsedTime(ten, begin, end[0]));
    OK(cudaEventElapsedTime(one, begin, end[1]));
    CHECK(peek(c + 10) == 0);
    CHECK(cublasDestroy(h) == CUBLAS_STATUS_SUCCESS);
    for (int i = 0; i < 2; ++i) {
        OK(cudaEventDestroy(end[i]));
        OK(cudaStreamDestroy(s[i]));
    }
    OK(cudaEventDestroy(begin));
    OK(cudaFree(c));
    fake_residency(NULL);
    CHECK(fake_check_clean());
}

static void test_residency(void)
{
    int least, greatest;
    float ten, one;
    OK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    run_beside(least, &ten, &one); /* behind all blocks of the older one */
    CHECK_INT((int)(ten + 0.5f), 5);
    CHECK_INT((int)(one + 0.5f), 6);
    run_beside(greatest, &ten, &one); /* before all that have not started */
    CHECK_INT((int)(ten + 0.5f), 6);
    CHECK_INT((int)(one + 0.5f), 1);
}

/* ---- capture ---- */

static cudaGraphExec_t end_capture(cudaStream_t s)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    return exec;
}

/* dev[1] = dev[0] here, dev[2] = dev[0] on a second stream, forked and joined: nothing runs before the launch, and
 * each launch reads anew. With `join` 0 the stream that forked is not waited for, which cannot be captured. */
static void test_capture(int join)
{
    cudaStream_t a = stream_new(), b = stream_new();
    cudaEvent_t fork, back;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec;
    enum cudaStreamCaptureStatus state;
    int *dev = (int *)device_buf(12), *pinned, i;
    OK(cudaHostAlloc((void **)&pinned, 4, cudaHostAllocDefault));
    OK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    OK(cudaEventCreateWithFlags(&back, cudaEventDisableTiming));
    OK(cudaStreamIsCapturing(a, &state));
    CHECK_INT(state, cudaStreamCaptureStatusNone);
    OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    OK(cudaStreamIsCapturing(a, &state));
    CHECK_INT(state, cudaStreamCaptureStatusActive);
    OK(cudaMemcpyAsync(dev, pinned, 4, cudaMemcpyDefault, a));
    OK(cudaEventRecord(fork, a));
    OK(cudaStreamWaitEvent(b, fork, 0));
    OK(cudaStreamIsCapturing(b, &state));
    CHECK_INT(state, cudaStreamCaptureStatusActive);
    OK(cudaMemcpyAsync(dev + 2, dev, 4, cudaMemcpyDefault, b));
    OK(cudaEventRecord(back, b));
    OK(cudaMemcpyAsync(dev + 1, dev, 4, cudaMemcpyDefault, a));
    if (join) OK(cudaStreamWaitEvent(a, back, 0));
    if (join) {
        exec = end_capture(a);
        CHECK_INT(peek(dev), -1);
        for (i = 3; i < 5; ++i) {
            *pinned = i;
            OK(cudaGraphLaunch(exec, a));
            OK(cudaStreamSynchronize(a));
            CHECK_INT(peek(dev + 1), i);
            CHECK_INT(peek(dev + 2), i);
        }
        OK(cudaGraphExecDestroy(exec));
    } else {
        CHECK_INT(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureUnjoined);
        CHECK(graph == NULL);
    }
    OK(cudaEventDestroy(fork));
    OK(cudaEventDestroy(back));
    OK(cudaFree(dev));
    OK(cudaFreeHost(pinned));
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
    CHECK(fake_check_clean());
}

/* What a capture forbids. */
enum { SYNC, DEVICE_SYNC, MALLOC, FREE, PAGEABLE_COPY, BLOCKING_COPY, LEGACY, QUERY, OUTSIDE, FORBIDDEN };

static cudaError_t forbidden_call(int what, cudaStream_t s, cudaStream_t other, void *dev, cudaEvent_t event)
{
    void *p;
    int host = 0;
    switch (what) {
    case SYNC:
        return cudaStreamSynchronize(s);
    case DEVICE_SYNC:
        return cudaDeviceSynchronize();
    case MALLOC:
        return cudaMalloc(&p, 4);
    case FREE:
        return cudaFree(dev);
    case PAGEABLE_COPY:
        return cudaMemcpyAsync(dev, &host, 4, cudaMemcpyDefault, s);
    case BLOCKING_COPY:
        return cudaMemcpy(dev, &host, 4, cudaMemcpyDefault);
    case LEGACY:
        return cudaMemsetAsync(dev, 0, 4, NULL);
    case QUERY:
        OK(cudaEventRecord(event, s));
        return cudaEventQuery(event);
    default:
        OK(cudaEventRecord(event, other));
        return cudaStreamWaitEvent(s, event, 0);
    }
}

/* What CUDA forbids in a capture fails, and so do the capture's end and what is enqueued before that. */
static void test_capture_forbidden(void)
{
    cudaStream_t s, other = stream_new();
    cudaEvent_t event;
    cudaGraph_t graph = (cudaGraph_t)&s;
    enum cudaStreamCaptureStatus state;
    int *dev = (int *)device_buf(4);
    OK(cudaStreamCreate(&s)); /* one that the legacy stream waits for */
    CHECK_INT(cudaStreamBeginCapture(NULL, cudaStreamCaptureModeGlobal), cudaErrorStreamCaptureUnsupported);
    CHECK_INT(cudaStreamEndCapture(s, &graph), cudaErrorIllegalState);
    for (int i = 0; i < FORBIDDEN; ++i) {
        const cudaError_t want = i == LEGACY    ? cudaErrorStreamCaptureImplicit
                                 : i == QUERY   ? cudaErrorCapturedEvent
                                 : i == OUTSIDE ? cudaErrorStreamCaptureIsolation
                                                : cudaErrorStreamCaptureUnsupported;
        OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        OK(cudaMemsetAsync(dev, 0, 4, s));
        CHECK_INT(forbidden_call(i, s, other, dev, event), want);
        OK(cudaStreamIsCapturing(s, &state));
        CHECK_INT(state, cudaStreamCaptureStatusInvalidated);
        CHECK_INT(cudaMemsetAsync(dev, 0, 4, s), cudaErrorStreamCaptureInvalidated);
        CHECK_INT(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
        CHECK(graph == NULL);
        OK(cudaStreamSynchronize(s));
        OK(cudaEventDestroy(event));
    }
    (void)cudaGetLastError();
    CHECK_INT(peek(dev), -1);
    OK(cudaFree(dev));
    OK(cudaStreamDestroy(s));
    OK(cudaStreamDestroy(other));
    CHECK(fake_check_clean());
}

/* ---- NCCL ---- */

enum { RANKS = 3, LONG = 40000 }; /* LONG numbers go in several pieces */

typedef struct nccl_rank {
    ncclUniqueId id;
    int rank, absent; /* absent: a rank that does not come to the all-to-all */
    ncclResult_t end;
} nccl_rank;

static void nap(void)
{
    struct timespec ms = {0, 1000000};
    nanosleep(&ms, NULL);
}

static ncclResult_t settle(ncclComm_t comm)
{
    ncclResult_t r = ncclInProgress;
    for (int i = 0; i < 5000 && r == ncclInProgress; ++i) {
        NCCL_OK(ncclCommGetAsyncError(comm, &r));
        if (r == ncclInProgress) nap();
    }
    return r;
}

/* The k-th message of two, for or from a rank: one number, then many. */
static int *message(int *buf, int received, int k, int peer)
{
    return buf + (received * RANKS + peer) * (1 + LONG) + k;
}

/* Rank r sends each peer 10 r + peer, and then LONG numbers from 100 + 10 r + peer on. */
static void *nccl_main(void *p)
{
    const size_t bytes = sizeof(int) * 2 * RANKS * (1 + LONG);
    nccl_rank *me = (nccl_rank *)p;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm = NULL;
    cudaStream_t s;
    ncclResult_t r;
    int *dev, *host = (int *)malloc(bytes);
    fake_rank(me->rank);
    OK(cudaSetDevice(me->rank));
    s = stream_new();
    dev = (int *)device_buf(bytes);
    config.blocking = 0;
    r = ncclCommInitRankConfig(&comm, RANKS, me->id, me->rank, &config);
    CHECK(r == ncclSuccess || r == ncclInProgress);
    NCCL_OK(settle(comm));
    for (int i = 0; i < RANKS; ++i) {
        *message(host, 0, 0, i) = 10 * me->rank + i;
        for (int n = 0; n < LONG; ++n) message(host, 0, 1, i)[n] = 100 + 10 * me->rank + i + n;
    }
    OK(cudaMemcpyAsync(dev, host, bytes / 2, cudaMemcpyHostToDevice, s));
    if (me->absent == me->rank) {
        NCCL_OK(ncclCommAbort(comm));
    } else {
        NCCL_OK(ncclGroupStart());
        for (int k = 0; k < 2; ++k)
            for (int i = 0; i < RANKS; ++i) {
                NCCL_OK(ncclSend(message(dev, 0, k, i), k ? LONG : 1, ncclInt32, i, comm, s));
                NCCL_OK(ncclRecv(message(dev, 1, k, i), 4 * (k ? LONG : 1), ncclInt8, i, comm, s));
            }
        r = ncclGroupEnd();
        CHECK(r == ncclSuccess || r == ncclInProgress);
        me->end = settle(comm);
        for (int i = 0; i < 5000 && me->end == ncclSuccess && cudaStreamQuery(s) == cudaErrorNotReady; ++i) {
            nap();
            NCCL_OK(ncclCommGetAsyncError(comm, &me->end));
        }
        if (me->end == ncclSuccess) {
            OK(cudaMemcpyAsync(host, dev, bytes, cudaMemcpyDeviceToHost, s));
            for (int i = 0; i < RANKS; ++i) {
                int wrong = 0;
                CHECK_INT(*message(host, 1, 0, i), 10 * i + me->rank);
                for (int n = 0; n < LONG; ++n)
                    wrong += message(host, 1, 1, i)[n] != 100 + 10 * i + me->rank + n;
                CHECK_INT(wrong, 0);
            }
            CHECK(ncclCommFinalize(comm) != ncclInternalError);
            NCCL_OK(settle(comm));
            NCCL_OK(ncclCommDestroy(comm));
        } else {
            NCCL_OK(ncclCommAbort(comm));
        }
    }
    OK(cudaFree(dev));
    OK(cudaStreamDestroy(s));
    free(host);
    if (me->rank != me->absent) CHECK_INT(me->end, me->absent < 0 ? ncclSuccess : ncclRemoteError);
    return NULL;
}

/* absent: a rank that does not come to the all-to-all, or -1; apart: ranks are processes, not threads */
static void test_nccl(int absent, int apart)
{
    nccl_rank ranks[RANKS];
    pthread_t threads[RANKS];
    pid_t processes[RANKS];
    const long failed = test_failures;
    memset(ranks, 0, sizeof ranks);
    NCCL_OK(ncclGetUniqueId(&ranks[0].id));
    for (int r = 0; r < RANKS; ++r) {
        ranks[r].id = ranks[0].id;
        ranks[r].rank = r;
        ranks[r].absent = absent;
        if (!apart) CHECK(pthread_create(&threads[r], NULL, nccl_main, &ranks[r]) == 0);
        fflush(NULL);
        if (apart && (processes[r] = fork()) == 0) {
            nccl_main(&ranks[r]);
            CHECK(fake_check_clean());
            fflush(NULL);
            _exit(test_failures > failed);
        }
    }
    for (int r = 0; r < RANKS; ++r) {
        int status = 0;
        if (apart)
            CHECK(waitpid(processes[r], &status, 0) > 0 && status == 0);
        else
            pthread_join(threads[r], NULL);
    }
    CHECK(fake_check_clean());
}

int main(int argc, char **argv)
{
    fake_seed(0);
    test_begin(argc, argv);
    TEST(test_lazy());
    TEST(test_untouched());
    TEST(test_legacy());
    TEST(test_findings());
    TEST(test_errors());
    TEST(test_residency());
    for (uint64_t seed = 0; seed < 4; ++seed) {
        fake_seed(seed);
        TEST(test_gemm());
        TEST(test_capture(0));
        TEST(test_capture(1));
        TEST(test_capture_forbidden());
        for (int apart = 0; apart < 2; ++apart) {
            TEST(test_nccl(-1, apart));
            TEST(test_nccl(1, apart));
        }
    }
    return test_end("fake");
}
