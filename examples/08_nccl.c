/* 08_nccl.c -- one rank a process with a GPU, over NCCL: the attention block by all processes, and again by each alone
 *
 *     nvcc -O3 -arch=sm_90a -I . examples/08_nccl.c examples/09_cuda.cu -lnccl -lcublas && \
 *         torchrun --nproc-per-node 4 --no-python ./a.out
 *
 * Before Hopper: -arch=sm_80. mpirun and srun start it too, or set RANK, WORLD_SIZE and LOCAL_RANK by hand.
 */
#define PROGRAM "08_nccl"
#include "common/rendezvous.h" /* who this process is, and NCCL's id from the first process to all; needs PROGRAM */
#include "upipe/net/upipe_net_nccl.h"
#include "upipe/cuda/upipe_cuda_device.h"

enum { HEADS = 2, DIM = 32, LOCAL = 32, BLOCKS = 64 }; /* heads and tokens a rank */

typedef struct gpu {
    upipe_ops ops;
    upipe_dry dry;
    upipe_nccl team;
    upipe_cuda cuda;
    cublasHandle_t blas;
    ncclComm_t nccl;
    cudaStream_t stream;
    void *slab[2]; /* of the team, and of the rank alone */
} gpu;

upipe_status app_ops(upipe_ops *ops, upipe_cuda *cuda, upipe_err *e); /* 09_cuda.cu: nvcc compiles it alone */

static upipe_status nccl_check(upipe_err *e, ncclResult_t r)
{
    if (r == ncclSuccess || r == ncclInProgress) return UPIPE_OK; /* in progress: in the background */
    return upipe_fail(e, UPIPE_ERR_BACKEND, "NCCL: %s; %s", ncclGetErrorString(r), ncclGetLastError(NULL));
}

static upipe_status gpu_open(gpu *g, const launch *l, upipe_err *e)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id = {{0}};
    int devices = 1;
    config.blocking = 0; /* else NCCL waits without a deadline for missing ranks */
    UPIPE_CUDA_TRY(e, cudaGetDeviceCount(&devices));
    UPIPE_CUDA_TRY(e, cudaSetDevice(l->local % devices)); /* a rank may be shown its own device alone */
    UPIPE_CUDA_TRY(e, cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking));
    UPIPE_CUBLAS_TRY(e, cublasCreate(&g->blas));
    UPIPE_TRY(upipe_cuda_init(&g->cuda, g->blas, e));
    UPIPE_TRY(app_ops(&g->ops, &g->cuda, e));
    if (l->rank == 0) UPIPE_TRY(nccl_check(e, ncclGetUniqueId(&id)));
    if (rendezvous(l, &id, sizeof id, UPIPE_DEADLINE_DEFAULT) != 0)
        return upipe_fail(e, UPIPE_ERR_TIMEOUT, "the processes have not met");
    UPIPE_TRY(nccl_check(e, ncclCommInitRankConfig(&g->nccl, l->ranks, id, l->rank, &config)));
    return upipe_nccl_init(&g->team, g->nccl, 0, e);
}

/* Ends the communicator with the others, or alone if they do not do so in time. */
static upipe_status gpu_close(gpu *g, upipe_err *e)
{
    const double until = cli_clock(NULL) + UPIPE_DEADLINE_DEFAULT;
    ncclResult_t r = ncclInProgress;
    UPIPE_TRY(upipe_nccl_free(&g->team, e));
    UPIPE_TRY(nccl_check(e, ncclCommFinalize(g->nccl)));
    while (r == ncclInProgress && cli_clock(NULL) < until)
        UPIPE_TRY(nccl_check(e, ncclCommGetAsyncError(g->nccl, &r)));
    UPIPE_TRY(nccl_check(e, r == ncclSuccess ? ncclCommDestroy(g->nccl) : ncclCommAbort(g->nccl)));
    for (int i = 0; i < 2; ++i) UPIPE_TRY(upipe_cuda_slab_free(g->slab[i], e));
    UPIPE_TRY(upipe_cuda_free(&g->cuda, e));
    UPIPE_CUBLAS_TRY(e, cublasDestroy(g->blas));
    UPIPE_CUDA_TRY(e, cudaStreamDestroy(g->stream));
    return UPIPE_OK;
}

/* Forward and backward by c->team of LOCAL * parts tokens; the loss is |out|^2 / 2, so the gradient of out is out. */
static upipe_status run(upipe_ctx *c, gpu *g, int parts, const float *w, float *dx, const float *x0)
{
    const int alone = c->team != &g->team.comm;
    const size_t *bytes = &g->dry.mem.need;
    void **slab = &g->slab[alone], *data;
    upipe_mem_block blocks[BLOCKS];
    upipe_mem mem;
    upipe_plan p;
    upipe_plan_desc d = {0};
    upipe_layer layer = {0};
    upipe_grads grads = {0}; /* those of the weights are not wanted here */
    upipe_saved saved;
    upipe_slots dout;
    upipe_view x;
    d.tokens = LOCAL * parts, d.heads = HEADS * parts, d.head_dim = DIM, d.chunk = parts;
    d.ranks = c->team->ranks, d.rank = c->team->rank, c->mem = &mem;
    UPIPE_TRY(upipe_plan_init(&p, &d, &c->err));
    layer.plan = &p, layer.mask.causal = 1, layer.wq = layer.wk = layer.wv = w; /* one matrix will do */
    if (upipe_dry_init(&g->dry, &p, c->ops) || upipe_dry_layer(&g->dry, &layer, 1))
        return c->err = g->dry.ctx.err, c->err.status;
    UPIPE_TRY(upipe_cuda_slab(slab, *bytes, &c->err));
    upipe_mem_init(&mem, *slab, *bytes, blocks, BLOCKS);
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, upipe_plan_unit_bytes(&p), UPIPE_USE_OTHER, "x", &c->err));
    UPIPE_TRY(c->ops->copy(c, data, x0, upipe_plan_unit_bytes(&p)));
    x = upipe_view_packed(data, UPIPE_F32, p.rows, 1, (int32_t)p.desc.model_dim);
    UPIPE_TRY(upipe_layer_fwd(c, &layer, &saved, x));
    UPIPE_TRY(upipe_slots_alloc(c, &p, &dout, UPIPE_SLOT_FULL, "dout"));
    UPIPE_TRY(c->ops->copy(c, dout.data, saved.out.data, upipe_plan_rows_bytes(&p, p.desc.heads, DIM)));
    UPIPE_TRY(upipe_layer_bwd(c, &layer, x, &grads, &saved, &dout, x)); /* x becomes its gradient */
    UPIPE_TRY(c->ops->copy(c, dx, data, upipe_plan_unit_bytes(&p)));
    return c->ops->sync(c); /* only then may the host look */
}

/* By the team and alone: the gradients must agree, but for the order of sums in products of other shapes. */
static upipe_status compare(upipe_ctx *c, gpu *g, const launch *l)
{
    const int model = HEADS * l->ranks * DIM, part = LOCAL * model, all = part * l->ranks;
    float *w, *x, *expected, *dx, most = 0, apart = 0;
    upipe_comm self;
    upipe_comm_self_state state;
    upipe_ctx alone;
    void *host; /* pinned memory, which the device reaches: for what passes once */
    UPIPE_TRY(gpu_open(g, l, &c->err));
    UPIPE_TRY(upipe_cuda_host_slab(&host, (size_t)(model * model + 2 * all + part) * sizeof *w, &c->err));
    w = (float *)host, x = w + model * model, dx = x + all, expected = dx + part;
    for (int i = 0; i < model * model; ++i) w[i] = (float)sin(i * 0.37) / 16;
    for (int i = 0; i < all; ++i) x[i] = (float)cos(i * 0.11);
    c->ops = &g->ops, c->stream = g->stream, c->team = &g->team.comm;
    UPIPE_TRY(run(c, g, l->ranks, w, dx, x + part * l->rank));
    upipe_comm_self(&self, &state, c->ops->copy);
    alone = *c, alone.team = &self;
    if (run(&alone, g, l->ranks, w, expected, x)) return c->err = alone.err, c->err.status;
    expected += part * l->rank;
    for (int i = 0; i < part; ++i) most = fmaxf(most, fabsf(expected[i]));
    for (int i = 0; i < part && !isnan(apart); ++i) /* a NaN is the most */
        if (!(fabsf(dx[i] - expected[i]) <= apart)) apart = fabsf(dx[i] - expected[i]);
    if (!(apart <= 1e-4f * most))
        return upipe_fail(&c->err, UPIPE_ERR_MISMATCH, "off by %g of %g", (double)apart, (double)most);
    UPIPE_TRY(upipe_comm_barrier(c, c->team)); /* so have the others */
    if (l->rank == 0)
        printf("%d processes over nccl\ngradient of x: %s those of one rank alone\n", l->ranks,
               apart == 0 ? "the same bits as" : "as");
    UPIPE_TRY(upipe_cuda_host_slab_free(host, &c->err));
    return gpu_close(g, &c->err);
}

int main(int argc, char **argv)
{
    gpu g = {0};
    upipe_ctx c = {0};
    launch l;
    cli_start();
    if (launch_read(&l) != 0) return EXIT_USAGE; /* its sentence is out */
    if (argc > 1)
        return cli_fail("%s? usage: torchrun --nproc-per-node N --no-python 08_nccl", argv[1]), EXIT_USAGE;
    if (compare(&c, &g, &l) == UPIPE_OK) return cli_flush("the result") == 0 ? 0 : EXIT_RUN;
    upipe_comm_abort(&g.team.comm, c.err.text); /* the others wait for this rank */
    return cli_fail("rank %d: no result: %s", l.rank, c.err.text), EXIT_RUN;
}
