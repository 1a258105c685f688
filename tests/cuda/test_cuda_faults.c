/* test_cuda_faults.c -- calls of CUDA, cuBLAS and NCCL fail: each rank returns, nothing is left behind
 *
 * The calls of a clean run are counted on each rank; then runs follow in which the k-th call of a rank fails,
 * alone or with everything after it. 20 + UPIPE_DRAWS / 500 of these k are drawn a rank and kind; 0 takes all.
 */
#include "cuda/runner_cuda.h"

/* A library's own text? */
static int tells(const char *text)
{
    return strstr(text, "(cudaError") != NULL || strstr(text, "CUBLAS_STATUS") != NULL ||
           strstr(text, cublasGetStatusString(CUBLAS_STATUS_INTERNAL_ERROR)) != NULL ||
           strstr(text, cublasGetStatusString(CUBLAS_STATUS_EXECUTION_FAILED)) != NULL ||
           strstr(text, "was made to fail") != NULL; /* NCCL's */
}

/* ---- what is made before a rank runs: every call in turn ---- */

enum { PIECE = 1024 };

static upipe_status setup(upipe_ctx *c, cublasHandle_t blas)
{
    upipe_cuda cuda;
    upipe_cuda_copy_stream side;
    void *slab = NULL, *host = NULL;
    upipe_status s, t;
    upipe_err late;
    memset(&side, 0, sizeof side);
    s = upipe_cuda_init(&cuda, blas, &c->err);
    if (s == UPIPE_OK) s = upipe_cuda_slab(&slab, PIECE, &c->err);
    if (s == UPIPE_OK) s = upipe_cuda_host_slab(&host, PIECE, &c->err);
    if (s == UPIPE_OK) s = upipe_cuda_copy_stream_init(&side, &c->err);
    if (s == UPIPE_OK) s = upipe_cuda_copy_stream_start(c, &side, slab, host, PIECE);
    if (s == UPIPE_OK) s = upipe_cuda_copy_stream_wait(c, &side);
    /* what is released is released even where that reports an error */
    t = upipe_cuda_copy_stream_free(&side, s == UPIPE_OK ? &c->err : &late);
    if (s == UPIPE_OK) s = t;
    t = upipe_cuda_slab_free(slab, s == UPIPE_OK ? &c->err : &late);
    if (s == UPIPE_OK) s = t;
    t = upipe_cuda_host_slab_free(host, s == UPIPE_OK ? &c->err : &late);
    if (s == UPIPE_OK) s = t;
    t = upipe_cuda_free(&cuda, s == UPIPE_OK ? &c->err : &late);
    return s == UPIPE_OK ? t : s;
}

static void test_setup(int sticky)
{
    upipe_ctx c;
    cudaStream_t stream;
    cublasHandle_t blas;
    long calls;
    memset(&c, 0, sizeof c);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cublasCreate(&blas) == CUBLAS_STATUS_SUCCESS);
    c.stream = stream;
    fake_fail_at(0, -1, FAKE_ONCE);
    CHECK_STATUS(setup(&c, blas), UPIPE_OK, c.err);
    calls = fake_calls(-1);
    CHECK(calls > 15);
    for (long k = 1; k <= calls; ++k) {
        upipe_status s;
        fake_fail_at(k, -1, sticky);
        memset(&c.err, 0, sizeof c.err);
        s = setup(&c, blas);
        CHECK_SAY(s == UPIPE_ERR_BACKEND || s == UPIPE_ERR_MEMORY, "call %ld, %s, fails: %s", k,
                  fake_failed(), upipe_status_name(s));
        CHECK_SAY(tells(c.err.text), "call %ld fails: %s", k, c.err.text);
        if (!sticky) CHECK_TEXT(c.err.text, fake_failed());
        fake_fail_at(0, -1, FAKE_ONCE);
        CHECK_SAY(fake_device_live() == 0 && fake_pinned_live() == 0 && fake_live_handles() == 2,
                  "call %ld fails: %zu bytes, %zu pinned, %ld handles are left", k, fake_device_live(),
                  fake_pinned_live(), fake_live_handles());
    }
    CHECK(cublasDestroy(blas) == CUBLAS_STATUS_SUCCESS);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    CHECK(fake_check_clean());
}

/* ---- the block ---- */

enum { RANKS = 2 };

/* One run whose call k fails on a rank; `want` holds the results of a run without errors. */
static void check_fault(const cuda_case *clean, const f32_block *in, const f32_block *want, int rank, long k,
                        int sticky)
{
    cuda_case test = *clean;
    run_result r;
    upipe_status s;
    int told = 0;
    test.fail_at = k;
    test.fail_rank = rank;
    test.fail_sticky = sticky;
    test.run.expect_failure = 1;
    test.run.deadline = 30;
    s = cuda_block(&test, in, &r);
    if (test.failed[0] == 0) { /* how often a rank looks for its peers varies: there was no call k */
        CHECK_STATUS(s, UPIPE_OK, r.errors[0]);
        CHECK_BYTES(r.out.wq, want->wq, block_count(&test.run.shape, "wq") * 4);
    } else {
        CHECK_SAY(s == UPIPE_ERR_BACKEND || s == UPIPE_ERR_MEMORY, "rank %d, call %ld, %s, fails: %s", rank,
                  k, test.failed, upipe_status_name(s));
        for (int i = 0; i < RANKS; ++i) {
            upipe_status one = r.statuses[i];
            int backend = one == UPIPE_ERR_BACKEND || one == UPIPE_ERR_MEMORY;
            told += backend && tells(r.errors[i].text);
            CHECK_SAY(backend || one == UPIPE_OK || one == UPIPE_ERR_ABORTED,
                      "rank %d of %d, call %ld, %s: %s: %s", i, rank, k, test.failed, upipe_status_name(one),
                      r.errors[i].text);
            /* an error of one rank's own is that rank's alone */
            if (!sticky) CHECK_SAY(!backend || i == rank, "rank %d fails with rank %d's error", i, rank);
        }
        CHECK_SAY(told > 0, "rank %d, call %ld, %s: no rank says why: %s", rank, k, test.failed,
                  r.errors[rank].text);
    }
}

static void test_block(int nccl, long seed, long draws)
{
    cuda_case test = {.run = run_of(16, 4, 2, 64, 32, RANKS, 2, UPIPE_BF16), .nccl = nccl};
    run_result first, last;
    f32_block in;
    test_rng rng;
    long calls[RANKS];
    rng.state = (uint64_t)seed;
    test.run.shape.rope = test.run.shape.normed = test.run.shape.projected = 1;
    block_inputs(&test.run.shape, 5, &in);
    CHECK_STATUS(cuda_block(&test, &in, &first), UPIPE_OK, first.errors[0]);
    check_block(&test.run.shape, &in, &first.out);
    for (int rank = 0; rank < RANKS; ++rank) calls[rank] = test.calls[rank];
    printf("cuda_faults: %ld and %ld calls over %s\n", calls[0], calls[1], nccl ? "NCCL" : "threads");
    for (int rank = 0; rank < RANKS; ++rank)
        for (int sticky = FAKE_ONCE; sticky <= FAKE_STICKY; ++sticky) {
            long n = draws > 0 && draws < calls[rank] ? draws : calls[rank];
            for (long k = 0; k < n; ++k) {
                long at =
                    n == calls[rank] ? k : k * calls[rank] / n + test_below(&rng, (int)(calls[rank] / n));
                fake_seed(test_u64(&rng) % 4);
                check_fault(&test, &in, &first.out, rank, at + 1, sticky);
            }
        }
    fake_seed(0);
    CHECK_STATUS(cuda_block(&test, &in, &last), UPIPE_OK, last.errors[0]);
    CHECK_BYTES(last.out.x, first.out.x, block_count(&test.run.shape, "x") * 4);
    CHECK_BYTES(last.out.wq, first.out.wq, block_count(&test.run.shape, "wq") * 4);
}

int main(int argc, char **argv)
{
    long seed = test_env("UPIPE_SEED", 1), wanted = test_env("UPIPE_DRAWS", 2000);
    long draws = wanted == 0 ? 0 : 20 + wanted / 500;
    printf("cuda_faults: UPIPE_SEED=%ld UPIPE_DRAWS=%ld\n", seed, wanted);
    fake_seed(0);
    test_begin(argc, argv);
    TEST(test_setup(FAKE_ONCE));
    TEST(test_setup(FAKE_STICKY));
    TEST(test_block(0, seed, draws));
    TEST(test_block(1, seed, draws));
    return test_end("cuda_faults");
}
