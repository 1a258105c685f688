/* 09_cuda.c -- plain C on a GPU: the host's stream and handle, a slab, one attention call in bf16
 *
 *     nvcc -O3 -arch=sm_90a -I . examples/09_cuda.c examples/09_cuda.cu -lcublas && ./a.out
 *
 * Before Hopper: -arch=sm_80. The kernels come from 09_cuda.cu, the only file with code of the device. A value here is
 * its position, so an output is the mean position that a query looks at.
 */
#include <math.h>

#include "upipe/cuda/upipe_cuda_device.h"
#include "upipe/upipe.h"

enum { TOKENS = 256, HEADS = 2, DIM = 64, COUNT = TOKENS * HEADS * DIM, BLOCKS = 16, SLAB = 1 << 20 };

upipe_status app_ops(upipe_ops *ops, upipe_cuda *device, upipe_err *e); /* 09_cuda.cu */

/* o = attention of x over itself, with values 0, 1, 2, ...; everything in the pool, wide [COUNT] on the host. */
static upipe_status attend(upipe_ctx *c, float *wide)
{
    upipe_view f, x, v;
    upipe_attn a = {0};
    void *p[6];
    int i;
    for (i = 0; i < 4; ++i)
        UPIPE_TRY(upipe_mem_alloc(c->mem, &p[i], COUNT * 2, UPIPE_USE_OTHER, "bf16", &c->err));
    UPIPE_TRY(upipe_mem_alloc(c->mem, &p[4], COUNT * 4, UPIPE_USE_OTHER, "f32", &c->err));
    UPIPE_TRY(upipe_mem_alloc(c->mem, &p[5], TOKENS * HEADS * 4, UPIPE_USE_STAT, "lse", &c->err));
    f = upipe_view_packed(p[4], UPIPE_F32, TOKENS, HEADS, DIM);
    x = upipe_view_packed(p[0], UPIPE_BF16, TOKENS, HEADS, DIM);
    v = upipe_view_packed(p[1], UPIPE_BF16, TOKENS, HEADS, DIM);
    for (i = 0; i < COUNT; ++i) wide[i] = (float)sin(0.1 * i);
    UPIPE_TRY(c->ops->copy(c, f.data, wide, COUNT * 4));
    UPIPE_TRY(c->ops->cast(c, x, f));
    for (i = 0; i < COUNT; ++i) wide[i] = (float)(i / (HEADS * DIM));
    UPIPE_TRY(c->ops->copy(c, f.data, wide, COUNT * 4));
    UPIPE_TRY(c->ops->cast(c, v, f));
    a.q = a.k = x, a.v = v, a.mask.causal = 1;
    a.o = upipe_view_packed(p[2], UPIPE_BF16, TOKENS, HEADS, DIM);
    a.lse = upipe_view_packed(p[5], UPIPE_F32, TOKENS, HEADS, 1);
    a.work = p[3], a.work_bytes = COUNT * 2; /* c->ops->attn_bytes says what it takes: nothing, forward */
    UPIPE_TRY(upipe_attn_fwd(c, &a));
    UPIPE_TRY(c->ops->cast(c, f, a.o));
    UPIPE_TRY(c->ops->copy(c, wide, f.data, COUNT * 4)); /* ordinary host memory: there when it returns */
    for (i = 0; i < 6; ++i) UPIPE_TRY(upipe_mem_free(c->mem, p[i], &c->err));
    return UPIPE_OK;
}

static upipe_status run(upipe_ctx *c, upipe_cuda *device, float *wide)
{
    upipe_mem_block blocks[BLOCKS];
    upipe_mem mem;
    upipe_ops ops;
    void *slab;
    upipe_status s;
    UPIPE_TRY(app_ops(&ops, device, &c->err));
    UPIPE_TRY(upipe_cuda_slab(&slab, SLAB, &c->err));
    upipe_mem_init(&mem, slab, SLAB, blocks, BLOCKS);
    c->ops = &ops, c->mem = &mem;
    s = attend(c, wide);
    printf("%s: %zu of %d bytes of the slab were used at most\n", ops.name, mem.peak, SLAB);
    if (s == UPIPE_OK) s = upipe_mem_destroy(&mem, &c->err); /* nothing may be left in it */
    upipe_cuda_slab_free(slab, NULL);
    return s;
}

int main(void)
{
    static float wide[COUNT];
    upipe_cuda device;
    upipe_ctx c = {0};
    cublasHandle_t blas;
    cudaStream_t stream;
    upipe_status s;
    int t, bad = 0;
    if (cudaStreamCreate(&stream) != cudaSuccess || cublasCreate(&blas) != CUBLAS_STATUS_SUCCESS)
        return fprintf(stderr, "no CUDA device, or no cuBLAS: %s\n", cudaGetErrorString(cudaGetLastError())),
               1;
    c.stream = stream;
    s = upipe_cuda_init(&device, blas, &c.err);
    if (s == UPIPE_OK) s = run(&c, &device, wide);
    upipe_cuda_free(&device, NULL);
    cublasDestroy(blas);
    cudaStreamDestroy(stream);
    if (s != UPIPE_OK) return fprintf(stderr, "%s: %s\n", upipe_status_name(s), c.err.text), 1;
    for (t = 0; t < TOKENS; ++t)
        bad |= !(wide[t * HEADS * DIM] >= 0.2f * (float)t && wide[t * HEADS * DIM] <= 1.01f * (float)t);
    printf("token 0 looks at %g, token %d at %g\n", (double)wide[0], TOKENS - 1,
           (double)wide[(TOKENS - 1) * HEADS * DIM]);
    return bad;
}
