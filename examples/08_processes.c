/* 08_processes.c -- one rank a process: the attention block on a communicator that the host has made
 *
 *     mpirun -np 4 08_processes                       built with WITH_MPI: MPI, and the CPU's table
 *     torchrun --nproc-per-node 4 --no-python 08_processes       with WITH_NCCL: NCCL, and a GPU a rank
 *
 * Two backends, one program: what differs is below, between the lines. The rest makes a step with the team,
 * makes it again as one rank alone over all tokens, and compares the gradients.
 */
#define PROGRAM         "08_processes"
#define _POSIX_C_SOURCE 200809L
#include "common/rendezvous.h"

enum {
    HEADS = 2,
    DIM = 32,
    LOCAL = 32,
    BLOCKS = 64
}; /* heads and tokens a rank: any number of ranks will do */

/* The host's side of a backend: what it makes, and ends. */
typedef struct host host;
static int host_begin(host *h, const launch *l, double deadline, int zero_sm); /* -1: the sentence is out */
static int host_end(host *h, int ok);
/* The team's pool, as the transport requires it. Freed by host_end at the latest. */
static upipe_status host_slab(host *h, upipe_ctx *c, void **out, size_t bytes);
static void host_slab_free(host *h, void *slab);
static upipe_status host_memory(void **out, size_t bytes, upipe_err *e);
static void host_memory_free(void *p);

/* ------------------------------------------------------------------------------------------------ */
#if defined(WITH_MPI)

#include "upipe/net/upipe_net_mpi.h"
#include "upipe/upipe_agree.h"
#include "upipe/cpu/upipe_cpu.h"

static const upipe_dtype storage = UPIPE_F32;
static const double tolerance = 0; /* the same bits */
static const int has_engines = 0;

struct host {
    upipe_ops ops;
    upipe_mpi team;
    MPI_Comm mpi;
    void *stream;
};

static int host_begin(host *h, const launch *l, double deadline, int zero_sm)
{
    upipe_err e;
    (void)l; /* MPI knows the ranks */
    (void)zero_sm;
    upipe_cpu_ops(&h->ops);
    if (MPI_Init(NULL, NULL) != MPI_SUCCESS || MPI_Comm_dup(MPI_COMM_WORLD, &h->mpi) != MPI_SUCCESS)
        return cli_fail("MPI does not start");
    MPI_Comm_set_errhandler(h->mpi, MPI_ERRORS_RETURN);
    return upipe_mpi_init(&h->team, h->mpi, 0, deadline, &e) == UPIPE_OK ? 0 : cli_fail("%s", e.text);
}

static int host_end(host *h, int ok)
{
    upipe_err e;
    if (upipe_mpi_free(&h->team, &e) != UPIPE_OK && ok) return cli_fail("%s", e.text);
    if (!ok) return 0; /* MPI_Finalize may wait for a rank that is dead */
    MPI_Comm_free(&h->mpi);
    return MPI_Finalize() == MPI_SUCCESS ? 0 : cli_fail("MPI does not end");
}

static upipe_status host_memory(void **out, size_t bytes, upipe_err *e)
{
    *out = aligned_alloc(UPIPE_MEM_ALIGN, (bytes + UPIPE_MEM_ALIGN - 1) / UPIPE_MEM_ALIGN * UPIPE_MEM_ALIGN);
    return *out != NULL ? UPIPE_OK : upipe_fail(e, UPIPE_ERR_MEMORY, "no memory for %zu bytes", bytes);
}

static void host_memory_free(void *p)
{
    free(p);
}

static upipe_status host_slab(host *h, upipe_ctx *c, void **out, size_t bytes)
{
    (void)h;
    return host_memory(out, bytes, &c->err);
}

static void host_slab_free(host *h, void *slab)
{
    (void)h;
    host_memory_free(slab);
}

/* ------------------------------------------------------------------------------------------------ */
#elif defined(WITH_NCCL)

#include "upipe/net/upipe_net_nccl.h"
#include "upipe/cuda/upipe_cuda_device.h"

void app_ops(upipe_ops *ops,
             upipe_cuda *device); /* from the .cu unit: UPIPE_EXPORT_OPS(app_ops, upipe_cuda_ops) */

static const upipe_dtype storage = UPIPE_BF16;
static const double tolerance = 1e-2; /* of the largest gradient: a few roundings to bf16 */
static const int has_engines = 1;

struct host {
    upipe_ops ops;
    upipe_nccl team;
    upipe_cuda device;
    cublasHandle_t blas;
    ncclComm_t nccl;
    cudaStream_t stream;
    int zero_sm; /* asked for */
    void *slab;  /* then NCCL's, which it keeps as long as the communicator */
};

static int host_begin(host *h, const launch *l, double deadline, int zero_sm)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    ncclResult_t r;
    upipe_err e;
    int devices = 1;
    config.blocking = 0; /* else NCCL waits without a deadline for missing ranks */
#ifdef NCCL_CTA_POLICY_ZERO
    if (zero_sm) config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
#endif
    h->zero_sm = zero_sm;
    memset(&id, 0, sizeof id);
    /* launchers may show each rank all devices of its machine, or its own alone */
    if (cudaGetDeviceCount(&devices) != cudaSuccess || cudaSetDevice(l->local % devices) != cudaSuccess)
        return cli_fail("rank %d: device %d: %s", l->rank, l->local, cudaGetErrorString(cudaGetLastError()));
    if (cudaStreamCreateWithFlags(&h->stream, cudaStreamNonBlocking) != cudaSuccess ||
        cublasCreate(&h->blas) != CUBLAS_STATUS_SUCCESS)
        return cli_fail("rank %d: device %d gives no stream, or no cuBLAS", l->rank, l->local);
    if (upipe_cuda_init(&h->device, h->blas, &e) != UPIPE_OK) return cli_fail("rank %d: %s", l->rank, e.text);
    app_ops(&h->ops, &h->device);
    if (l->rank == 0 && ncclGetUniqueId(&id) != ncclSuccess) return cli_fail("%s", ncclGetLastError(NULL));
    if (rendezvous(l, &id, sizeof id, deadline) != 0) return -1;
    r = ncclCommInitRankConfig(&h->nccl, l->ranks, id, l->rank, &config);
    if (r != ncclSuccess && r != ncclInProgress)
        return cli_fail("rank %d: %s", l->rank, ncclGetLastError(NULL));
    if (upipe_nccl_init(&h->team, h->nccl, deadline, &e) == UPIPE_OK) return 0;
    ncclCommAbort(h->nccl);
    return cli_fail("rank %d: %s", l->rank, e.text);
}

/* Ends the communicator with the others, or alone if they do not do so in time. */
static ncclResult_t host_finalize(ncclComm_t nccl, double deadline)
{
    double until = cli_clock(NULL) + deadline;
    ncclResult_t r = ncclCommFinalize(nccl);
    while (r == ncclInProgress || r == ncclSuccess) {
        if (ncclCommGetAsyncError(nccl, &r) != ncclSuccess || r == ncclSuccess) break;
        if (cli_clock(NULL) > until) r = ncclSystemError;
    }
    return r == ncclSuccess ? ncclCommDestroy(nccl) : ncclCommAbort(nccl);
}

static int host_end(host *h, int ok)
{
    upipe_err e;
    double deadline = h->team.comm.deadline;
    int left = upipe_nccl_free(&h->team, &e) != UPIPE_OK;
    if (h->team.nccl != NULL) /* else a failure has freed it */
        left |= (ok ? host_finalize(h->nccl, deadline) : ncclCommAbort(h->nccl)) != ncclSuccess;
    left |= upipe_nccl_slab_free(h->slab, &e) != UPIPE_OK;
    left |= upipe_cuda_free(&h->device, &e) != UPIPE_OK;
    left |= cublasDestroy(h->blas) != CUBLAS_STATUS_SUCCESS;
    left |= cudaStreamDestroy(h->stream) != cudaSuccess;
    return ok && left ? cli_fail("the device does not end as it should") : 0;
}

static upipe_status host_memory(void **out, size_t bytes, upipe_err *e)
{
    return upipe_cuda_slab(out, bytes, e);
}

static void host_memory_free(void *p)
{
    upipe_cuda_slab_free(p, NULL);
}

static upipe_status host_slab(host *h, upipe_ctx *c, void **out, size_t bytes)
{
    if (!h->zero_sm) return host_memory(out, bytes, &c->err);
    UPIPE_TRY(upipe_nccl_slab(&h->slab, bytes, &c->err));
    *out = h->slab;
    UPIPE_TRY(upipe_nccl_zero_sm(c, &h->team, h->slab, bytes));
    if (c->team->rank == 0) printf("transfers: %s\n", h->team.zero_sm_says);
    return UPIPE_OK;
}

static void host_slab_free(host *h, void *slab)
{
    if (slab != h->slab) host_memory_free(slab);
}

#else
#error "build with WITH_MPI or WITH_NCCL"
#endif
/* ------------------------------------------------------------------------------------------------ */

/* Numbers of the host to a tensor of the storage type, and back, through `wide`: as many f32 of the
 * device. */
static upipe_status put(upipe_ctx *c, upipe_view to, void *wide, const float *from)
{
    UPIPE_TRY(c->ops->copy(c, wide, from, (size_t)(to.n * to.d) * 4));
    return c->ops->cast(c, to, upipe_view_packed(wide, UPIPE_F32, to.n, 1, to.d));
}

static upipe_status get(upipe_ctx *c, float *to, void *wide, upipe_view from)
{
    UPIPE_TRY(c->ops->cast(c, upipe_view_packed(wide, UPIPE_F32, from.n, 1, from.d), from));
    return c->ops->copy(c, to, wide, (size_t)(from.n * from.d) * 4);
}

/* Forward and backward over this rank's tokens, x0; the loss is |out|^2 / 2, so the gradient of out is out.
 * dx: the gradient of x. */
static upipe_status step(upipe_ctx *c, const upipe_layer *l, void *wide, float *dx, const float *x0)
{
    const upipe_plan *p = l->plan;
    upipe_grads grads = {0}; /* those of the weights are not wanted here */
    upipe_saved saved;
    upipe_slots dout;
    upipe_view x;
    void *data;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, upipe_plan_unit_bytes(p), "x", &c->err));
    x = upipe_view_packed(data, storage, p->rows, 1, (int32_t)p->desc.model_dim);
    UPIPE_TRY(put(c, x, wide, x0));
    UPIPE_TRY(upipe_layer_fwd(c, l, &saved, x));
    UPIPE_TRY(upipe_slots_alloc(c, l->plan, &dout, UPIPE_SLOT_FULL, "dout"));
    UPIPE_TRY(
        c->ops->copy(c, dout.data, saved.out.data, upipe_plan_rows_bytes(p, p->desc.heads, p->desc.v_dim)));
    UPIPE_TRY(upipe_layer_bwd(c, l, x, &grads, &saved, &dout, x)); /* x becomes its gradient */
    UPIPE_TRY(get(c, dx, wide, x));
    UPIPE_TRY(upipe_mem_free(c->mem, dout.data, &c->err));
    UPIPE_TRY(upipe_mem_free(c->mem, data, &c->err));
    return c->ops->sync(c);
}

/* Plans, allocates a slab of exactly that size, and makes the step. h: with the team, or NULL. */
static upipe_status run(host *h, upipe_ctx *c, const upipe_plan_desc *desc, const void *w, void *wide,
                        float *dx, const float *x, size_t *slab_bytes)
{
    static upipe_dry dry; /* too large for some stacks */
    upipe_mem_block blocks[BLOCKS];
    upipe_layer layer = {0};
    upipe_plan plan;
    upipe_status s;
    upipe_mem mem;
    void *slab;
    UPIPE_TRY(upipe_plan_init(&plan, desc, &c->err));
    layer.plan = &plan, layer.mask.causal = 1;
    layer.wq = layer.wk = layer.wv = w; /* one matrix will do here */
    if (upipe_dry_init(&dry, &plan, c->ops) || upipe_dry_layer(&dry, &layer, 1))
        return c->err = dry.ctx.err, dry.ctx.err.status;
    *slab_bytes = dry.mem.need;
    UPIPE_TRY(h != NULL ? host_slab(h, c, &slab, dry.mem.need) : host_memory(&slab, dry.mem.need, &c->err));
    upipe_mem_init(&mem, slab, dry.mem.need, blocks, BLOCKS);
    c->mem = &mem;
    s = step(c, &layer, wide, dx, x);
    upipe_mem_destroy(&mem, NULL);
    if (c->team->quarantine) return s; /* a late peer may read the slab as long as this process lives */
    if (h != NULL)
        host_slab_free(h, slab);
    else
        host_memory_free(slab);
    return s;
}

/* A NaN counts as more than any number. */
static double larger(double a, double b)
{
    return a >= b || isnan(a) ? a : b;
}

/* The same step with the team and alone; *error: the largest difference of the gradients, over their size. */
static upipe_status compare(host *h, upipe_ctx *c, double *error, size_t *slab_bytes)
{
    upipe_comm *team = c->team, alone;
    upipe_comm_self_state buf;
    upipe_plan_desc d = {0};
    int ranks = team->ranks, heads = HEADS * ranks, model = heads * DIM;
    size_t part = (size_t)LOCAL * (size_t)model, all = part * (size_t)ranks,
           w_n = (size_t)model * (size_t)model, i;
    float *x = (float *)malloc(all * 4), *dx = (float *)malloc(part * 4), *want = (float *)malloc(all * 4);
    float *w = (float *)malloc(w_n * 4);
    double most = 0, worst = 0;
    void *weights = NULL, *wide = NULL;
    upipe_status s = UPIPE_ERR_MEMORY;
    size_t first = part * (size_t)team->rank, unused;
    upipe_fail(&c->err, s, "no memory for %zu numbers", 2 * all + part + w_n);
    if (x == NULL || dx == NULL || want == NULL || w == NULL) goto done;
    for (i = 0; i < w_n; ++i) w[i] = (float)sin((double)i * 0.37) / 16;
    for (i = 0; i < all; ++i) x[i] = (float)cos((double)i * 0.11);
    d.tokens = LOCAL * ranks;
    d.ranks = d.chunk = ranks;
    d.heads = heads;
    d.head_dim = DIM;
    d.dtype = storage;
    s = host_memory(&weights, w_n * 4, &c->err);
    if (s == UPIPE_OK) s = host_memory(&wide, (w_n > all ? w_n : all) * 4, &c->err);
    if (s == UPIPE_OK) s = put(c, upipe_view_packed(weights, storage, model, 1, model), wide, w);
    if (s == UPIPE_OK) s = run(h, c, &d, weights, wide, dx, x + first, slab_bytes);

    upipe_comm_self(&alone, &buf, c->ops->copy);
    c->team = &alone;
    d.ranks = 1;
    if (s == UPIPE_OK) s = run(NULL, c, &d, weights, wide, want, x, &unused);
    c->team = team;
    for (i = 0; s == UPIPE_OK && i < part; ++i) {
        worst = larger(worst, fabs((double)dx[i] - (double)want[first + i]));
        most = larger(most, fabs((double)want[first + i]));
    }
    *error = worst / most;
done:
    if (s != UPIPE_OK) upipe_comm_abort(team, c->err.text);
    host_memory_free(wide);
    host_memory_free(weights);
    free(w);
    free(want);
    free(dx);
    free(x);
    return s;
}

static int no_result(upipe_ctx *c)
{
    return cli_fail("rank %d: no result: %s%s", c->team->rank, cli_status(c->err.status), c->err.text);
}

/* Rank 0 says how it went on all ranks; 0 if the gradients agree. */
static int report(upipe_ctx *c, double error, size_t slab_bytes)
{
    int64_t mine[2], *all = c->team->gathered;
    double worst = 0;
    int r, ranks = c->team->ranks;
    memcpy(&mine[0], &error, sizeof error);
    mine[1] = c->team->sent_bytes;
    if (upipe_comm_all_gather(c, c->team, all, mine, 2) != UPIPE_OK) return no_result(c);
    for (r = 0; r < ranks; ++r) worst = larger(worst, upipe_field_value(all[2 * r]));
    if (c->team->rank == 0)
        printf("%d ranks over %s, each a process, kernels %s: %d tokens, %d heads\n"
               "a rank: slab of %zu bytes, %lld bytes sent\n"
               "gradient of x: %s those of one rank alone (error %.1e)\n",
               ranks, c->team->ops.name, c->ops->name, LOCAL * ranks, HEADS * ranks, slab_bytes,
               (long long)all[1],
               worst == 0           ? "the same bits as"
               : worst <= tolerance ? "as"
                                    : "NOT",
               worst);
    return worst <= tolerance ? 0 : -1;
}

static const char help[] =
    "usage: mpirun -np N 08_processes [--deadline SECONDS] [--zero-sm]\n"
    "\n"
    "One rank a process: forward and backward of an attention block, with all processes and again by each\n"
    "one alone; the gradients must agree. Started by mpirun, srun or torchrun, or with RANK, WORLD_SIZE,\n"
    "LOCAL_RANK, MASTER_ADDR and MASTER_PORT set by hand. MASTER_ADDR may be a path that all see: then they\n"
    "meet there.\n"
    "\n"
    "  --deadline SECONDS   how long a rank waits for the others (30)\n"
    "  --zero-sm            NCCL moves data by copy engines where it can; rank 0 prints whether it does\n"
    "  --help               this text\n"
    "  --version            the version\n";

enum { DEADLINE, ZERO_SM, HELP, VERSION, FLAGS };

typedef struct options {
    double deadline;
    int zero_sm, rank;
} options;

static int used(void *user, int flag, const char *text)
{
    options *o = (options *)user;
    if (flag == DEADLINE) return cli_seconds("deadline", text, &o->deadline);
    if (flag == ZERO_SM && !has_engines)
        return cli_refuse("--zero-sm is for NCCL, and this is built with MPI");
    if (flag == ZERO_SM) return o->zero_sm = 1, 0;
    if (o->rank > 0) return 1; /* one of the processes says it */
    return flag == HELP ? cli_print("help", help) : cli_version("version", "");
}

int main(int argc, char **argv)
{
    static const struct option list[] = {{"deadline", required_argument, NULL, DEADLINE},
                                         {"zero-sm", no_argument, NULL, ZERO_SM},
                                         {"help", no_argument, NULL, HELP},
                                         {"version", no_argument, NULL, VERSION},
                                         {NULL, 0, NULL, 0}};
    static host h;
    options o = {30, 0, 0};
    int given[FLAGS] = {0}, status;
    size_t slab_bytes = 0;
    double error = 0;
    upipe_ctx c = {0};
    launch l;
    status = launch_read(&l);
    o.rank = l.rank;
    if (status == 0) status = cli_read(list, argc, argv, given, -1, used, &o);
    if (status != 0) return status - 1;
    if (host_begin(&h, &l, o.deadline, o.zero_sm) != 0) return EXIT_RUN;
    c.ops = &h.ops;
    c.team = &h.team.comm;
    c.stream = h.stream;
    status = compare(&h, &c, &error, &slab_bytes) == UPIPE_OK ? report(&c, error, slab_bytes) : no_result(&c);
    if (host_end(&h, status == 0) != 0) status = -1;
    return status == 0 ? 0 : EXIT_RUN;
}
