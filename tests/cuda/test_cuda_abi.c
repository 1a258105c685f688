/* test_cuda_abi.c -- the C ABI (examples/bindings) for CUDA: device pointers and streams, over NCCL and as threads, on the fake device
 *
 * Each rank has tensors in which Q, K and V lie together, on its device. Results are held to the truth, and other orders of the
 * streams must give the same bits. Then calls of CUDA and NCCL fail, one a run, and nothing may be left behind.
 */
#include "fake/fake_pool.h"

#include "../../examples/bindings/c/upipe_abi.c"

#include "../lib/close.h"

#include "fake/nccl.h"

enum { TOKENS = 24, HEADS = 4, KV = 2, DIM = 32, WIDTH = (HEADS + 2 * KV) * DIM, MOST = 4 };

enum { BY_THREADS, BY_ID, BY_COMM };

typedef struct job {
    upipe_abi_desc desc;
    int by;
    const f32_block *in;
    f32_block *out;
    upipe_abi *shared; /* where ranks are threads */
    ncclUniqueId id, world;
} job;

/* What a rank has on its device: qkv and dqkv [rows][WIDTH], o and dout [rows][HEADS * DIM], and what a forward leaves. */
typedef struct rank_data {
    void *qkv, *dqkv, *o, *dout, *saved, *host;
    int64_t rows, positions[TOKENS];
    cudaStream_t stream;
    upipe_dtype dtype;
} rank_data;

#define OK(call) CHECK_SAY((call) == cudaSuccess, "%s", #call)

static size_t bytes_of(const rank_data *d, int width_of)
{
    return (size_t)d->rows * (size_t)width_of * upipe_dtype_bytes(d->dtype);
}

/* `n` columns of the rows of a natural tensor <-> columns from `at` on of rows of `wide` in d->host. */
static void columns(const rank_data *d, float *natural, int n, int at, int wide, int out)
{
    for (int64_t i = 0; i < d->rows; ++i)
        for (int c = 0; c < n; ++c) {
            float *x = &natural[d->positions[i] * n + c];
            if (out)
                *x = upipe_cpu_get(d->host, d->dtype, i * wide + at + c);
            else
                upipe_cpu_put(d->host, d->dtype, i * wide + at + c, *x);
        }
}

static void data_open(rank_data *d, const job *j, const upipe_abi *u, int rank)
{
    const f32_block *in = j->in;
    d->dtype = j->desc.dtype == UPIPE_ABI_BF16 ? UPIPE_BF16 : UPIPE_F32;
    d->rows = upipe_abi_rows(u, rank, NULL);
    CHECK(d->rows > 0 && upipe_abi_positions(u, rank, d->positions) == 0);
    OK(cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking));
    OK(cudaMalloc(&d->qkv, bytes_of(d, WIDTH)));
    OK(cudaMalloc(&d->dqkv, bytes_of(d, WIDTH)));
    OK(cudaMalloc(&d->o, bytes_of(d, HEADS * DIM)));
    OK(cudaMalloc(&d->dout, bytes_of(d, HEADS * DIM)));
    OK(cudaMalloc(&d->saved, (size_t)upipe_abi_saved_bytes(u, rank)));
    OK(cudaHostAlloc(&d->host, bytes_of(d, WIDTH), cudaHostAllocDefault));
    columns(d, in->dout, HEADS * DIM, 0, HEADS * DIM, 0);
    OK(cudaMemcpyAsync(d->dout, d->host, bytes_of(d, HEADS * DIM), cudaMemcpyHostToDevice, d->stream));
    OK(cudaStreamSynchronize(d->stream));
    columns(d, in->q, HEADS * DIM, 0, WIDTH, 0);
    columns(d, in->k, KV * DIM, HEADS * DIM, WIDTH, 0);
    columns(d, in->v, KV * DIM, (HEADS + KV) * DIM, WIDTH, 0);
    OK(cudaMemcpyAsync(d->qkv, d->host, bytes_of(d, WIDTH), cudaMemcpyHostToDevice, d->stream));
}

/* The results, once the rank's stream has ended. */
static void data_close(rank_data *d, const job *j)
{
    const f32_block *out = j->out;
    columns(d, out->o, HEADS * DIM, 0, HEADS * DIM, 1);
    OK(cudaMemcpyAsync(d->host, d->dqkv, bytes_of(d, WIDTH), cudaMemcpyDeviceToHost, d->stream));
    OK(cudaStreamSynchronize(d->stream));
    columns(d, out->q, HEADS * DIM, 0, WIDTH, 1);
    columns(d, out->k, KV * DIM, HEADS * DIM, WIDTH, 1);
    columns(d, out->v, KV * DIM, (HEADS + KV) * DIM, WIDTH, 1);
    OK(cudaFree(d->qkv));
    OK(cudaFree(d->dqkv));
    OK(cudaFree(d->o));
    OK(cudaFree(d->dout));
    OK(cudaFree(d->saved));
    OK(cudaFreeHost(d->host));
    OK(cudaStreamDestroy(d->stream));
}

static int steps(upipe_abi *u, int rank, const rank_data *d)
{
    int s = upipe_abi_stream(u, rank, d->stream);
    if (s == 0) s = upipe_abi_fused_fwd(u, rank, 0, d->o, d->qkv);
    if (s == 0) s = upipe_abi_save(u, rank, 0, d->saved);
    if (s == 0) s = upipe_abi_restore(u, rank, 0, d->saved);
    if (s == 0) s = upipe_abi_fused_bwd(u, rank, 0, d->dqkv, d->dout, d->o, d->qkv);
    return s == 0 ? upipe_abi_sync(u, rank) : s;
}

static ncclComm_t comm_new(const job *j, int rank)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm = NULL;
    config.blocking = 1;
    CHECK(ncclCommInitRankConfig(&comm, j->desc.ranks * j->desc.ring, j->world, rank, &config) ==
          ncclSuccess);
    return comm;
}

static upipe_status body(void *user, int rank)
{
    job *j = (job *)user;
    char why[256] = "";
    rank_data d = {0};
    ncclComm_t comm = NULL;
    upipe_abi *u = j->shared;
    fake_rank(rank);
    OK(cudaSetDevice(j->by == BY_THREADS ? 0 : rank));
    if (j->by == BY_COMM) comm = comm_new(j, rank);
    if (j->by == BY_ID) u = upipe_abi_open_nccl_id(&j->desc, rank, &j->id, why, sizeof why);
    if (j->by == BY_COMM) u = upipe_abi_open_nccl(&j->desc, comm, why, sizeof why);
    if (!CHECK_SAY(u != NULL, "rank %d: %s", rank, why)) return UPIPE_ERR_BACKEND;
    CHECK_INT(upipe_abi_need(&j->desc, rank, why, sizeof why), upipe_abi_bytes(u, rank));
    data_open(&d, j, u, rank);
    if (!CHECK_SAY(steps(u, rank, &d) == 0, "rank %d: %s", rank, upipe_abi_error(u, rank)))
        return UPIPE_ERR_BACKEND;
    OK(cudaMemcpyAsync(d.host, d.o, bytes_of(&d, HEADS * DIM), cudaMemcpyDeviceToHost, d.stream));
    OK(cudaStreamSynchronize(d.stream));
    if (j->by != BY_THREADS) CHECK(upipe_abi_close(u) == 0);
    data_close(&d, j);
    if (comm != NULL) CHECK(ncclCommFinalize(comm) == ncclSuccess && ncclCommDestroy(comm) == ncclSuccess);
    return UPIPE_OK;
}

static void run(job *j)
{
    char why[256] = "";
    upipe_threads crew;
    upipe_err err;
    CHECK(upipe_abi_nccl_id(&j->id, why, sizeof why) == 0);
    CHECK(ncclGetUniqueId(&j->world) == ncclSuccess);
    j->shared = j->by == BY_THREADS ? upipe_abi_open(&j->desc, why, sizeof why) : NULL;
    CHECK_SAY(j->by != BY_THREADS || j->shared != NULL, "%s", why);
    CHECK_STATUS(upipe_threads_init(&crew, j->desc.ranks * j->desc.ring, 60, &err), UPIPE_OK, err);
    CHECK_STATUS(upipe_threads_run(&crew, body, j, NULL, &err), UPIPE_OK, err);
    upipe_threads_free(&crew);
    CHECK(upipe_abi_close(j->shared) == 0);
    CHECK(fake_check_clean());
}

static upipe_abi_desc described(int ranks, int ring, int layout, int ring_mode, int dtype)
{
    upipe_abi_desc d = {0};
    d.tokens = TOKENS, d.heads = HEADS, d.kv_heads = KV, d.head_dim = DIM, d.causal = 1;
    d.ranks = ranks, d.ring = ring, d.layout = layout, d.ring_mode = ring_mode, d.dtype = dtype;
    return d;
}

static void test_case(upipe_abi_desc desc, int by)
{
    const int mark = buffers_n;
    block_shape s = {0};
    f32_block in, first, again;
    job j = {0};
    s.tokens = TOKENS, s.batch = 1, s.h = HEADS, s.hkv = KV, s.d = DIM, s.dim = 32, s.bare = 1;
    s.dtype = desc.dtype == UPIPE_ABI_BF16 ? UPIPE_BF16 : UPIPE_F32, s.scale = 1 / sqrt((double)DIM);
    s.naive = NAIVE_NARROW;
    block_inputs(&s, 17, &in);
    f32_block_make(&s, &first);
    f32_block_make(&s, &again);
    f32_block_run(&s, &in, &first); /* for its lse: the ABI has none */
    j.desc = desc, j.by = by, j.in = &in, j.out = &first;
    fake_seed(0);
    run(&j);
    check_block(&s, &in, &first);
    j.out = &again;
    fake_seed(3);
    run(&j);
    CHECK_BYTES(again.o, first.o, (size_t)block_count(&s, "o") * sizeof(float));
    CHECK_BYTES(again.q, first.q, (size_t)block_count(&s, "q") * sizeof(float));
    CHECK_BYTES(again.k, first.k, (size_t)block_count(&s, "k") * sizeof(float));
    CHECK_BYTES(again.v, first.v, (size_t)block_count(&s, "v") * sizeof(float));
    fake_seed(0);
    buffers_free(mark);
}

/* ---- what is refused ---- */

static void refused(int status, const upipe_abi *u, const char *words)
{
    CHECK(status != 0);
    CHECK_TEXT(upipe_abi_error(u, 0), words);
}

static void test_misuse(void)
{
    const upipe_abi_desc desc = described(1, 1, 0, 0, UPIPE_ABI_F32),
                         two = described(2, 1, 0, 0, UPIPE_ABI_F32);
    static float ordinary[TOKENS * WIDTH];
    const int sockets[2] = {0, 0};
    char why[256] = "";
    void *here, *there;
    upipe_abi *u;
    job j = {0};
    ncclComm_t comm;
    fake_rank(0);
    CHECK(upipe_abi_can("cuda") && upipe_abi_can("nccl") && !upipe_abi_can("cpu") &&
          !upipe_abi_can("sockets"));
    CHECK(upipe_abi_open_sockets(&two, 0, sockets, sockets, why, sizeof why) == NULL);
    CHECK_TEXT(why, "computes on a device");
    CHECK(upipe_abi_open_nccl_id(&two, 2, why, why, sizeof why) == NULL);
    CHECK_TEXT(why, "rank 2 of 2");
    OK(cudaSetDevice(1));
    OK(cudaMalloc(&there, sizeof ordinary));
    OK(cudaSetDevice(0));
    OK(cudaMalloc(&here, sizeof ordinary));
    j.desc = desc;
    CHECK(ncclGetUniqueId(&j.world) == ncclSuccess);
    comm = comm_new(&j, 0);
    CHECK(upipe_abi_open_nccl(&two, comm, why, sizeof why) == NULL);
    CHECK_TEXT(why, "a communicator of 1 ranks, and a description of 2");
    u = upipe_abi_open_nccl(&desc, comm, why, sizeof why); /* it is still the caller's */
    CHECK_SAY(u != NULL, "%s", why);
    refused(upipe_abi_fused_fwd(u, 0, 0, here, ordinary), u,
            "q is host memory, and the handle is on device 0");
    CHECK(upipe_abi_close(u) == 0);
    CHECK(ncclCommFinalize(comm) == ncclSuccess && ncclCommDestroy(comm) == ncclSuccess);
    u = upipe_abi_open(&desc, why, sizeof why);
    refused(upipe_abi_fused_fwd(u, 0, 0, there, here), u,
            "o is memory of device 1, and the handle is on device 0");
    CHECK(upipe_abi_close(u) == 0);
    u = upipe_abi_open(&desc, why, sizeof why);
    OK(cudaSetDevice(1));
    refused(upipe_abi_fused_fwd(u, 0, 0, here, here), u,
            "the handle is on device 0, and device 1 is current");
    CHECK(upipe_abi_close(u) == 0); /* whatever device is current */
    OK(cudaFree(there));
    OK(cudaSetDevice(0));
    OK(cudaFree(here));
    CHECK(fake_check_clean());
}

/* ---- calls of CUDA and NCCL fail ---- */

enum { DRAWS = 60 };

/* The tensors are made before calls fail. */
static int whole(const job *j, const rank_data *d, char *why, size_t why_bytes)
{
    upipe_abi *u = upipe_abi_open_nccl_id(&j->desc, 0, &j->id, why, why_bytes);
    int s;
    if (u == NULL) return -1;
    s = upipe_abi_fused_fwd(u, 0, 0, d->o, d->qkv);
    if (s == 0) s = upipe_abi_save(u, 0, 0, d->saved);
    if (s == 0) s = upipe_abi_restore(u, 0, 0, d->saved);
    if (s == 0) s = upipe_abi_fused_bwd(u, 0, 0, d->dqkv, d->dout, d->o, d->qkv);
    if (s == 0) s = upipe_abi_sync(u, 0);
    if (s != 0) snprintf(why, why_bytes, "%s", upipe_abi_error(u, 0));
    CHECK(upipe_abi_close(u) == 0);
    return s;
}

static void test_faults(void)
{
    char why[256] = "";
    rank_data d = {0};
    long calls, draws, i, live;
    size_t held, left, slab;
    test_rng rng = {(uint64_t)test_env("UPIPE_SEED", 1)};
    job j = {0};
    fake_rank(0);
    j.desc = described(1, 1, 0, 0, UPIPE_ABI_BF16);
    slab = (size_t)upipe_abi_need(&j.desc, 0, why, sizeof why);
    CHECK(ncclGetUniqueId(&j.id) == ncclSuccess);
    d.rows = TOKENS, d.dtype = UPIPE_BF16;
    OK(cudaMalloc(&d.qkv, 5 * bytes_of(&d, WIDTH)));
    d.dqkv = (char *)d.qkv + bytes_of(&d, WIDTH), d.o = (char *)d.dqkv + bytes_of(&d, WIDTH);
    d.dout = (char *)d.o + bytes_of(&d, WIDTH), d.saved = (char *)d.dout + bytes_of(&d, WIDTH);
    OK(cudaMemset(d.qkv, 0, 5 * bytes_of(&d, WIDTH)));
    OK(cudaDeviceSynchronize());
    held = fake_device_live(), live = fake_live_handles();
    fake_fail_at(0, 0, FAKE_ONCE);
    CHECK_SAY(whole(&j, &d, why, sizeof why) == 0, "%s", why);
    calls = fake_calls(0);
    CHECK(calls > DRAWS);
    draws = test_full() ? calls : DRAWS;
    for (i = 0; i < draws; ++i) {
        const long k = 1 + i * calls / draws + test_below(&rng, (int)(calls / draws));
        char failed[64];
        int s;
        CHECK(ncclGetUniqueId(&j.id) == ncclSuccess);
        fake_fail_at(k, 0, FAKE_ONCE);
        why[0] = '\0';
        s = whole(&j, &d, why, sizeof why);
        snprintf(failed, sizeof failed, "%s", fake_failed() != NULL ? fake_failed() : "none");
        fake_fail_at(0, 0, FAKE_ONCE);
        /* one that fails in a close says nothing */
        CHECK_SAY(s == 0 || why[0] != '\0', "call %ld, %s, fails without a sentence", k, failed);
        left = fake_device_live() - held; /* a slab that others may still read stays */
        CHECK_SAY((left == 0 || (s != 0 && left == slab)) && fake_live_handles() == live &&
                      fake_pinned_live() == 0,
                  "call %ld, %s, fails: %zu bytes and %ld handles are left", k, failed, left,
                  fake_live_handles() - live);
        held += left;
    }
    printf("cuda_abi: %ld of %ld calls fail\n", draws, calls);
    OK(cudaFree(d.qkv));
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_case(described(2, 1, 0, 0, UPIPE_ABI_F32), BY_THREADS));
    TEST(test_case(described(2, 1, 0, 0, UPIPE_ABI_BF16), BY_ID));
    TEST(test_case(described(2, 2, UPIPE_ABI_ZIGZAG, 0, UPIPE_ABI_BF16), BY_COMM));
    TEST(test_case(described(1, 2, UPIPE_ABI_STRIPED, UPIPE_ABI_RING_P2P, UPIPE_ABI_F32), BY_ID));
    TEST(test_misuse());
    TEST(test_faults());
    return test_end("cuda_abi");
}
