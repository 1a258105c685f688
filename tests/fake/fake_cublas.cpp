/* fake_cublas.cpp -- matrix products in plain loops, summed in f32 in the order of k   tests */
#include "fake_core.h"
#include "fake_kernels.h"

#include "cublas_v2.h"

#include <algorithm>
#include <cstring>

#pragma GCC optimize("O3")

struct cublasContext {
    cudaStream_t stream;
    cublasMath_t math;
    bool workspace, lost; /* the host has set one; and has lost it to cublasSetStream */
    cublasPointerMode_t pointers;
    int device;
    bool live;
};

namespace
{

cublasStatus_t fail(const fake_call &call, cublasStatus_t mine)
{
    return call.error(mine, CUBLAS_STATUS_EXECUTION_FAILED);
}

cublasContext *handle(cublasHandle_t h)
{
    return fake_alive(h, "cuBLAS handle", "a call");
}

size_t type_bytes(cudaDataType t)
{
    return t == CUDA_R_32F ? 4 : 2;
}

float load(const char *p, cudaDataType t, int64_t i)
{
    float f;
    if (t == CUDA_R_32F) {
        memcpy(&f, p + 4 * i, 4);
    } else {
        uint16_t half;
        memcpy(&half, p + 2 * i, 2);
        uint32_t bits = (uint32_t)half << 16;
        memcpy(&f, &bits, 4);
    }
    return f;
}

void store(char *p, cudaDataType t, int64_t i, float f)
{
    if (t == CUDA_R_32F) {
        memcpy(p + 4 * i, &f, 4);
        return;
    }
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (f != f)
        bits |= 0x400000;
    else
        bits += 0x7fff + ((bits >> 16) & 1);
    uint16_t half = (uint16_t)(bits >> 16);
    memcpy(p + 2 * i, &half, 2);
}

struct matrix {
    char *p;
    cudaDataType type;
    int64_t rows, columns, step, stride; /* as it lies: by columns, `step` apart; `stride` between batches */
    bool flip;
};

struct product {
    matrix a, b, c;
    int64_t m, n, k, batches;
    float alpha, beta;
};

size_t matrix_bytes(const matrix &x, int64_t batches)
{
    if (x.rows == 0 || x.columns == 0 || batches == 0) return 0;
    return (size_t)((batches - 1) * x.stride + (x.columns - 1) * x.step + x.rows) * type_bytes(x.type);
}

void check(const product &g)
{
    fake_reachable(g.a.p, g.k > 0 ? matrix_bytes(g.a, g.batches) : 0, "cublasGemm", "A");
    fake_reachable(g.b.p, g.k > 0 ? matrix_bytes(g.b, g.batches) : 0, "cublasGemm", "B");
    fake_reachable(g.c.p, matrix_bytes(g.c, g.batches), "cublasGemm", "C");
}

void run(const product &g)
{
    std::vector<float> a((size_t)(g.m * g.k)), sum((size_t)g.m); /* a: [k][m] */
    check(g);
    for (int64_t z = 0; z < g.batches; ++z) {
        const char *pa = g.a.p + z * g.a.stride * (int64_t)type_bytes(g.a.type);
        const char *pb = g.b.p + z * g.b.stride * (int64_t)type_bytes(g.b.type);
        char *pc = g.c.p + z * g.c.stride * (int64_t)type_bytes(g.c.type);
        for (int64_t l = 0; l < g.k; ++l)
            for (int64_t i = 0; i < g.m; ++i)
                a[(size_t)(l * g.m + i)] = load(pa, g.a.type, g.a.flip ? l + i * g.a.step : i + l * g.a.step);
        for (int64_t j = 0; j < g.n; ++j) {
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (int64_t l = 0; l < g.k; ++l) {
                float b = load(pb, g.b.type, g.b.flip ? j + l * g.b.step : l + j * g.b.step);
                const float *column = &a[(size_t)(l * g.m)];
                for (int64_t i = 0; i < g.m; ++i) sum[(size_t)i] += column[i] * b;
            }
            for (int64_t i = 0; i < g.m; ++i) {
                float v = g.alpha * sum[(size_t)i];
                /* with beta 0 the old C is not read: it may be NaN */
                if (g.beta != 0) v += g.beta * load(pc, g.c.type, i + j * g.c.step);
                store(pc, g.c.type, i + j * g.c.step, v);
            }
        }
    }
}

cublasStatus_t gemm(const char *name, cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int64_t m,
                    int64_t n, int64_t k, const void *alpha, const void *a, cudaDataType a_type, int64_t lda,
                    long long a_stride, const void *b, cudaDataType b_type, int64_t ldb, long long b_stride,
                    const void *beta, void *c, cudaDataType c_type, int64_t ldc, long long c_stride,
                    int64_t batches, cublasComputeType_t compute, cublasGemmAlgo_t algo)
{
    fake_call call(name);
    CUstream_st *s = fake_stream(handle(h)->stream);
    if (call.fails) return fail(call, CUBLAS_STATUS_EXECUTION_FAILED);
    if (h->lost) fake_finding("%s: cublasSetStream has taken the host's workspace away", name);
    if (m < 0 || n < 0 || k < 0 || batches < 0) return CUBLAS_STATUS_INVALID_VALUE;
    if ((unsigned)ta > CUBLAS_OP_T || (unsigned)tb > CUBLAS_OP_T) return CUBLAS_STATUS_INVALID_VALUE;
    int64_t a_rows = ta == CUBLAS_OP_N ? m : k, b_rows = tb == CUBLAS_OP_N ? k : n;
    if (lda < std::max<int64_t>(1, a_rows) || ldb < std::max<int64_t>(1, b_rows) ||
        ldc < std::max<int64_t>(1, m))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (alpha == NULL || beta == NULL) return CUBLAS_STATUS_INVALID_VALUE;
    bool known = (a_type == CUDA_R_16BF || a_type == CUDA_R_32F) && b_type == a_type &&
                 (c_type == a_type || c_type == CUDA_R_32F);
    if (!known || compute != CUBLAS_COMPUTE_32F || algo != CUBLAS_GEMM_DEFAULT)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (h->pointers != CUBLAS_POINTER_MODE_HOST)
        fake_finding("%s: factors on the device are not modelled", name);
    if (m == 0 || n == 0 || batches == 0) return CUBLAS_STATUS_SUCCESS;
    product g;
    g.a = {(char *)const_cast<void *>(a),
           a_type,
           a_rows,
           ta == CUBLAS_OP_N ? k : m,
           lda,
           a_stride,
           ta != CUBLAS_OP_N};
    g.b = {(char *)const_cast<void *>(b),
           b_type,
           b_rows,
           tb == CUBLAS_OP_N ? n : k,
           ldb,
           b_stride,
           tb != CUBLAS_OP_N};
    g.c = {(char *)c, c_type, m, n, ldc, c_stride, false};
    g.m = m;
    g.n = n;
    g.k = k;
    g.batches = batches;
    memcpy(&g.alpha, alpha, 4);
    memcpy(&g.beta, beta, 4);
    if (a_stride < 0 || b_stride < 0 || c_stride < 0)
        fake_finding("%s: a negative stride is not modelled", name);
    if (batches > 1 && c_stride < (n - 1) * ldc + m && c_stride < m)
        fake_finding("%s: the products of a batch lie over each other", name);
    if ((uintptr_t)a % type_bytes(a_type) || (uintptr_t)b % type_bytes(b_type) ||
        (uintptr_t)c % type_bytes(c_type))
        fake_finding("%s: an operand is not aligned to its elements", name);
    check(g);
    const bool on_90 = fake_capability() >= 90;
    const int64_t tiles = (g.m + FAKE_PRODUCT_TILE - 1) / FAKE_PRODUCT_TILE *
                          ((g.n + FAKE_PRODUCT_TILE - 1) / FAKE_PRODUCT_TILE) * g.batches;
    fake_load(name);
    fake_append(s, name, [g] { run(g); }, {}, nullptr,
                {tiles, on_90 ? FAKE_PRODUCT_THREADS_90 : FAKE_PRODUCT_THREADS_80,
                 on_90 ? FAKE_PRODUCT_REGISTERS_90 : FAKE_PRODUCT_REGISTERS_80,
                 (size_t)(on_90 ? FAKE_PRODUCT_SHARED_90 : FAKE_PRODUCT_SHARED_80), 1});
    return CUBLAS_STATUS_SUCCESS;
}

} /* namespace */

cublasStatus_t cublasCreate(cublasHandle_t *out)
{
    fake_call call("cublasCreate");
    if (call.fails) return fail(call, CUBLAS_STATUS_ALLOC_FAILED);
    if (out == NULL) return CUBLAS_STATUS_INVALID_VALUE;
    *out = fake_made(new cublasContext{NULL, CUBLAS_DEFAULT_MATH, false, false, CUBLAS_POINTER_MODE_HOST,
                                       fake_device(), true});
    return CUBLAS_STATUS_SUCCESS;
}

/* Waits for the device, as the workspace goes. */
cublasStatus_t cublasDestroy(cublasHandle_t h)
{
    fake_call call("cublasDestroy");
    if (h == NULL) return CUBLAS_STATUS_NOT_INITIALIZED;
    handle(h)->live = false;
    --fake_handles;
    fake_drain(h->device, call.name);
    return call.fails ? fail(call, CUBLAS_STATUS_EXECUTION_FAILED) : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream(cublasHandle_t h, cudaStream_t stream)
{
    fake_call call("cublasSetStream");
    CUstream_st *s = fake_stream(stream);
    if (call.fails) return fail(call, CUBLAS_STATUS_INTERNAL_ERROR);
    if (s->device != handle(h)->device) fake_finding("cublasSetStream: a stream of another device");
    h->stream = stream;
    h->lost = h->workspace; /* back to the library's own, the same stream or not */
    h->workspace = false;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetStream(cublasHandle_t h, cudaStream_t *out)
{
    fake_call call("cublasGetStream");
    if (call.fails) return fail(call, CUBLAS_STATUS_INTERNAL_ERROR);
    *out = handle(h)->stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t h, void *workspace, size_t bytes)
{
    fake_call call("cublasSetWorkspace");
    (void)handle(h);
    if (call.fails) return fail(call, CUBLAS_STATUS_INTERNAL_ERROR);
    if ((uintptr_t)workspace % 256 != 0) return CUBLAS_STATUS_INVALID_VALUE;
    fake_reachable(workspace, bytes, call.name, "the workspace");
    h->workspace = true;
    h->lost = false;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t mode)
{
    fake_call call("cublasSetMathMode");
    if (call.fails) return fail(call, CUBLAS_STATUS_INTERNAL_ERROR);
    handle(h)->math = mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode(cublasHandle_t h, cublasPointerMode_t mode)
{
    fake_call call("cublasSetPointerMode");
    if (call.fails) return fail(call, CUBLAS_STATUS_INTERNAL_ERROR);
    handle(h)->pointers = mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx_64(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int64_t m,
                               int64_t n, int64_t k, const void *alpha, const void *a, cudaDataType a_type,
                               int64_t lda, const void *b, cudaDataType b_type, int64_t ldb, const void *beta,
                               void *c, cudaDataType c_type, int64_t ldc, cublasComputeType_t compute,
                               cublasGemmAlgo_t algo)
{
    return gemm("cublasGemmEx_64", h, ta, tb, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0, beta, c,
                c_type, ldc, 0, 1, compute, algo);
}

cublasStatus_t cublasGemmStridedBatchedEx_64(
    cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int64_t m, int64_t n, int64_t k,
    const void *alpha, const void *a, cudaDataType a_type, int64_t lda, long long int a_stride, const void *b,
    cudaDataType b_type, int64_t ldb, long long int b_stride, const void *beta, void *c, cudaDataType c_type,
    int64_t ldc, long long int c_stride, int64_t batches, cublasComputeType_t compute, cublasGemmAlgo_t algo)
{
    return gemm("cublasGemmStridedBatchedEx_64", h, ta, tb, m, n, k, alpha, a, a_type, lda, a_stride, b,
                b_type, ldb, b_stride, beta, c, c_type, ldc, c_stride, batches, compute, algo);
}

static const struct {
    cublasStatus_t status;
    const char *name, *text;
} texts[] = {
#define STATUS_TEXT(status, text) \
    {                             \
        status, #status, text     \
    }
    STATUS_TEXT(CUBLAS_STATUS_SUCCESS, "success"),
    STATUS_TEXT(CUBLAS_STATUS_NOT_INITIALIZED, "the library was not initialized"),
    STATUS_TEXT(CUBLAS_STATUS_ALLOC_FAILED, "the resource allocation failed"),
    STATUS_TEXT(CUBLAS_STATUS_INVALID_VALUE, "an unsupported value or parameter was passed to the function"),
    STATUS_TEXT(CUBLAS_STATUS_EXECUTION_FAILED, "the function failed to launch on the GPU"),
    STATUS_TEXT(CUBLAS_STATUS_INTERNAL_ERROR, "an internal operation failed"),
    STATUS_TEXT(CUBLAS_STATUS_NOT_SUPPORTED, "the functionality requested is not supported"),
#undef STATUS_TEXT
};

const char *cublasGetStatusName(cublasStatus_t s)
{
    for (auto &t : texts)
        if (t.status == s) return t.name;
    return "unknown";
}

const char *cublasGetStatusString(cublasStatus_t s)
{
    for (auto &t : texts)
        if (t.status == s) return t.text;
    return "another error";
}
