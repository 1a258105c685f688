/* watchdog.cpp -- with -DUPIPE_CUDA_WATCHDOG a kernel that would hang ends with a line that says who waits for what
 *
 * A warpgroup never arrives where another one waits. nvcc compiles this for devices, a host compiler for the emulator.
 */
#ifdef UPIPE_CUDA_SEAMS
#define UPIPE_CUDA_WATCHDOG 200 /* a turn in vain of the emulator is one of all threads */
#include "upipe/cuda/upipe_cuda_attn_bwd.h"
#else
#define UPIPE_CUDA_WATCHDOG 2000000
#include "upipe/cuda/upipe_cuda_hopper.h" /* nvcc would compile every kernel */
#endif

#include <sys/wait.h>
#include <unistd.h>

#include "../lib/test.h"

enum { NONE, ARRIVAL, TURN };

/* Two warpgroups meet at a barrier, and the second waits for a turn that the first gives on, unless that is dropped. */
UPI_HOPPER_KERNEL(256) void meet(int *turn, int dropped)
{
#if UPI_HOPPER_CODE
    UPI_SHARED(uint64_t, barrier);
    const int t = (int)threadIdx.x;
    const uint32_t at = upi_shared_address(barrier);
    if (t == 0) upi_mbarrier_init(at, 2);
    upi_mbarrier_fence();
    __syncthreads();
    if (t % 128 == 0 && (dropped != ARRIVAL || t == 0)) upi_mbarrier_arrive(at);
    upi_mbarrier_wait(at, 0);
    if (t == 0 && dropped != TURN) upi_add_release(turn, 1);
    if (t == 128)
        for (int tries = 0; upi_load_acquire(turn) != 1; upi_pause())
            UPI_WATCH(tries, "the turn at tile", 5, 1);
#endif
}

/* In a process of its own: what failed has ended the emulator, or the device's context. */
static int run(int dropped)
{
    upipe_ctx c;
    cudaStream_t stream;
    int *turn = NULL;
    upipe_status s;
    memset(&c, 0, sizeof c);
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return 2;
    if (cudaMalloc((void **)&turn, 64) != cudaSuccess || cudaMemset(turn, 0, 64) != cudaSuccess) return 2;
    if (cudaDeviceSynchronize() != cudaSuccess) return 2;
    c.stream = stream;
    s = UPI_LAUNCH(&c, meet, 1, 256, (size_t)64, turn, dropped);
    if (s == UPIPE_OK) s = upipe_cuda_check(&c.err, cudaStreamSynchronize(stream), "the kernel");
    fflush(stdout);
    return s != UPIPE_OK;
}

/* Must end with the sentence, NULL: well. */
static void check_run(int dropped, const char *sentence)
{
    char text[4096];
    size_t n = 0;
    ssize_t got;
    int ends[2], status = 0;
    pid_t child;
    if (!CHECK(pipe(ends) == 0)) return;
    child = fork();
    if (child == 0) {
        dup2(ends[1], 1), dup2(ends[1], 2);
        close(ends[0]), close(ends[1]);
        _exit(run(dropped));
    }
    close(ends[1]);
    while (n < sizeof text - 1 && (got = read(ends[0], text + n, sizeof text - 1 - n)) > 0) n += (size_t)got;
    text[n] = 0;
    close(ends[0]);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_SAY((status == 0) == (sentence == NULL), "status %d: %s", status, text);
    if (sentence != NULL) CHECK_TEXT(text, sentence);
}

int main(void)
{
    setenv("FAKE_CAPABILITY", "90", 1);
    check_run(NONE, NULL);
    check_run(ARRIVAL, "waits in vain for the barrier at shared byte");
#ifdef UPIPE_CUDA_SEAMS
    check_run(TURN,
              "every running block waits for one that has not started, or for nothing"); /* it knows sooner */
#else
    check_run(TURN, "waits in vain for the turn at tile 5, value 1");
#endif
    return test_end("cuda_watchdog");
}
