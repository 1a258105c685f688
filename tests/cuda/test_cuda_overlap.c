/* test_cuda_overlap.c -- stages that overlap find a place on the device: load i + 1 ends while stage i is attended
 *
 * The fake counts registers, shared memory and blocks on its multiprocessors, those of an A100 and of an H100, and a block
 * that finds no place waits. Two ranks over NCCL run the block in stages that overlap. Events on both streams say when the
 * load of a stage has ended, projection and all-to-all, and when its attention has.
 */
#include "cuda/runner_cuda.h"

enum { RANKS = 2, STAGES_MAX = 4 };

/* As few multiprocessors as show it: little work fills them. */
static const fake_processors a100 = {1, 65536, 164 << 10, 2048, 32}, h100 = {2, 65536, 228 << 10, 2048, 32};

/* ---- when the streams of a rank reach their points ---- */

/* Of the forward; the backward's pipeline comes after its join. */
typedef struct watched {
    upipe_side_stream *side;
    upipe_status (*mark)(upipe_ctx *c, upipe_side_stream *side, int point, int64_t n);
    upipe_status (*join)(upipe_ctx *c, upipe_side_stream *side);
    int over;
    cudaEvent_t event[UPIPE_SIDE_POINTS][STAGES_MAX + 1];
    float at[UPIPE_SIDE_POINTS][STAGES_MAX + 1]; /* ticks from the beginning */
} watched;

static watched ranks[RANKS];

static watched *watched_of(const upipe_side_stream *side)
{
    return side == ranks[0].side ? &ranks[0] : &ranks[1];
}

static upipe_status watched_mark(upipe_ctx *c, upipe_side_stream *side, int point, int64_t n)
{
    watched *w = watched_of(side);
    if (!w->over && CHECK(n <= STAGES_MAX))
        DEVICE_CHECK(cudaEventRecord(w->event[point][n], (cudaStream_t)c->stream));
    return w->mark(c, side, point, n);
}

static upipe_status watched_join(upipe_ctx *c, upipe_side_stream *side)
{
    watched *w = watched_of(side);
    w->over = 1;
    return w->join(c, side);
}

static void watch(upipe_side_stream *side, int rank, int opened)
{
    watched *w = &ranks[rank];
    if (opened) {
        memset(w, 0, sizeof *w);
        w->side = side;
        w->mark = side->mark;
        w->join = side->join;
        side->mark = watched_mark;
        side->join = watched_join;
    }
    for (int point = 0; point < UPIPE_SIDE_POINTS; ++point)
        for (int n = 0; n <= STAGES_MAX; ++n) {
            cudaEvent_t *event = &w->event[point][n];
            w->at[point][n] = -1;
            if (opened)
                DEVICE_CHECK(cudaEventCreate(event));
            else if (cudaEventElapsedTime(&w->at[point][n], w->event[UPIPE_SIDE_BEGIN][1], *event) !=
                     cudaSuccess)
                (void)cudaGetLastError(); /* there is no such stage */
        }
    for (int i = 0; !opened && i < UPIPE_SIDE_POINTS * (STAGES_MAX + 1); ++i)
        DEVICE_CHECK(cudaEventDestroy(w->event[i / (STAGES_MAX + 1)][i % (STAGES_MAX + 1)]));
}

/* ---- the block ---- */

/* How many stages of both ranks end after the load of the next one. */
static int overlapped(int stages)
{
    int count = 0;
    for (int r = 0; r < RANKS; ++r)
        for (int i = 1; i < stages; ++i) {
            const float load = ranks[r].at[UPIPE_SIDE_READY][i + 1], attend = ranks[r].at[UPIPE_SIDE_DONE][i];
            CHECK(load >= 0 && attend > 0);
            count += load < attend;
            if (test_env("TEST_SHOW", 0))
                printf("rank %d: stage %d is loaded at %g, stage %d attended at %g\n", r, i, (double)load,
                       i - 1, (double)attend);
        }
    return count;
}

/* All stages overlap with the next one's load, or none does; *first, of the first of these calls for a device and a head
 * dim, has the bits of all. */
static void check_overlap(const char *capability, int d, int margin, int later, int all, run_result *first)
{
    enum { TOKENS = 32, HEADS = 64, CHUNK = 32, STAGES = HEADS / CHUNK };
    cuda_case test;
    run_result r;
    f32_block in;
    memset(&test, 0, sizeof test);
    setenv("FAKE_CAPABILITY", capability, 1);
    test.run = run_of(TOKENS, HEADS, HEADS / 4, d, 32, RANKS, CHUNK, UPIPE_BF16);
    test.run.shape.rope = 1;
    test.run.overlap = test.nccl = 1;
    test.margin = margin;
    test.side_later = later;
    test.watch = watch;
    block_inputs(&test.run.shape, 31, &in);
    fake_residency(atoi(capability) >= 90 ? &h100 : &a100);
    CHECK_STATUS(cuda_block(&test, &in, &r), UPIPE_OK, r.errors[0]);
    fake_residency(NULL);
    CHECK_INT(r.plan.stages, STAGES);
    CHECK_SAY(overlapped(STAGES) == (all ? RANKS * (STAGES - 1) : 0),
              "%s, head dim %d, margin %d, priority %s: %d stages overlap", capability, d, margin,
              later ? "equal" : "greatest", overlapped(STAGES));
    if (first->out.o == NULL) *first = r;
    same_bits(&test.run.shape, first, &r, "o x");
}

static void test_dim(int dim)
{
    run_result on_80 = {0}, on_90 = {0};
    /* a margin that leaves nothing, then one that leaves enough */
    check_overlap("90", dim, 0, 0, 0, &on_90);
    check_overlap("90", dim, 1, 0, 1, &on_90);
    /* blocks end all the time: priority decides */
    check_overlap("80", dim, 0, 1, 0, &on_80);
    check_overlap("80", dim, 0, 0, 1, &on_80);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_dim(64));
    if (test_full()) TEST(test_dim(128));
    return test_end("cuda_overlap");
}
