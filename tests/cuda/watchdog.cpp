/* watchdog.cpp -- a kernel for 9.0 that hangs ends, says for what it waits, and one that does not is left alone
 *
 * The kernels themselves are launched with arguments that make them hang: a tensor map whose boxes have half of the bytes
 * that a barrier expects, and tickets of which the first is missing. nvcc compiles this for devices, a host compiler for
 * the emulator, where time can be made to fly.
 */
#include "upipe/cuda/upipe_cuda_attn_fwd90.h"
#include "upipe/cuda/upipe_cuda_attn_bwd90.h"

#include <sys/wait.h>
#include <unistd.h>

#include "../lib/test.h"

enum {
    D = 64,
    HEADS = 2,
    TOKENS = 384,
#ifdef UPIPE_CUDA_SEAMS
    LONG = 768, /* tokens of a launch that one block works on for seconds */
#else
    LONG = 3 << 16,
#endif
    SKIPPED = 77
};

/* What is launched, and with which fault. */
enum { FORWARD, FORWARD_HANGS, BACKWARD, BACKWARD_HANGS, FORWARD_LONG };

typedef upi_cuda_fwd90_shape<D, D, 128> fwd_shape;
typedef upi_cuda_bwd90_shape<D, D> bwd_shape;

typedef struct place {
    upipe_ctx c;
    upipe_ops ops;
    upipe_cuda device;
    cudaStream_t stream;
    int64_t tokens;
    upipe_view x; /* q, k, v and dout */
    char *out;    /* o, or dq, its sums, dk and dv: f32 of the tensor's size each; lse behind them */
    int *turns;
    size_t each, bytes;
} place;

static int open_place(place *p, int64_t tokens)
{
    const int64_t count = tokens * HEADS * D;
    const size_t watched = UPIPE_CUDA_WATCH;
    void *x = NULL;
    memset(p, 0, sizeof *p);
    if (cudaStreamCreateWithFlags(&p->stream, cudaStreamNonBlocking) != cudaSuccess) return 0;
    if (upipe_cuda_init(&p->device, NULL, &p->c.err) != UPIPE_OK) return 0;
    p->ops.self = &p->device;
    p->c.ops = &p->ops;
    p->c.stream = p->stream;
    p->tokens = tokens;
    p->each = (size_t)count * sizeof(float);
    p->bytes = 4 * p->each + (size_t)(tokens * HEADS) * sizeof(float);
    if (cudaMalloc(&x, (size_t)count * 2) != cudaSuccess ||
        cudaMalloc((void **)&p->out, p->bytes) != cudaSuccess ||
        cudaMalloc((void **)&p->turns, 4096) != cudaSuccess ||
        upipe_cuda_host_slab(&p->device.watch, watched, &p->c.err) != UPIPE_OK)
        return 0;
    memset(p->device.watch, 0, watched);
    if (cudaMemsetAsync(x, 0x3c, (size_t)count * 2, p->stream) != cudaSuccess) return 0; /* 0.0115 each */
    p->x = upipe_view_packed(x, UPIPE_BF16, tokens, HEADS, D);
    return 1;
}

static upi_cuda_attn_args arguments(const place *p)
{
    upipe_attn a;
    memset(&a, 0, sizeof a);
    a.q = a.k = a.v = p->x;
    a.lse = upipe_view_packed(p->out + 4 * p->each, UPIPE_F32, p->tokens, HEADS, 1);
    a.pos_step = 1;
    return upi_cuda_attn_args_make(&a);
}

static upipe_status forward(place *p, int hangs, int processors)
{
    upi_cuda_fwd90_args g;
    int grid;
    memset(&g, 0, sizeof g);
    g.a = arguments(p);
    g.watch = p->device.watch;
    UPIPE_TRY(upi_tensor_map_make(&p->c, &g.q, p->x, fwd_shape::ROWS));
    UPIPE_TRY(upi_tensor_map_make(&p->c, &g.k, p->x, hangs ? 64 : 128));
    UPIPE_TRY(upi_tensor_map_make(&p->c, &g.v, p->x, 128));
    UPIPE_TRY(
        upi_tensor_map_make(&p->c, &g.o, upipe_view_packed(p->out, UPIPE_BF16, p->tokens, HEADS, D), 64));
    grid = upi_cuda_fwd90_deal<fwd_shape>(&g, processors);
    UPIPE_TRY(UPI_ALLOW_SHARED(&p->c, (upi_cuda_fwd90_kernel<D, D, 128>), fwd_shape::SHARED));
    return UPI_LAUNCH_TOGETHER(&p->c, 4, (upi_cuda_fwd90_kernel<D, D, 128>), (unsigned)grid,
                               fwd_shape::THREADS, fwd_shape::SHARED, g);
}

/* The first block of keys of each head draws no ticket where it hangs: the second one waits for it. */
static upipe_status backward(place *p, int hangs)
{
    const int blocks = (int)(p->tokens / bwd_shape::KEYS), first = hangs ? HEADS : 0;
    upi_cuda_bwd90_args x;
    memset(&x, 0, sizeof x);
    x.watch = p->device.watch;
    x.g.a = arguments(p);
    x.g.delta = x.g.a.lse;
    x.g.delta_stride = x.g.a.lse_stride, x.g.delta_head = x.g.a.lse_head;
    x.g.dq_sum = (float *)(p->out + p->each);
    x.g.dk = (float *)(p->out + 2 * p->each);
    x.g.dv = (float *)(p->out + 3 * p->each);
    x.g.dk_stride = x.g.dv_stride = HEADS * D, x.g.dk_head = x.g.dv_head = D;
    x.g.turns = p->turns;
    x.g.tiles = (int)(p->tokens / bwd_shape::ROWS);
    x.g.blocks = blocks;
    UPIPE_TRY(upi_tensor_map_make(&p->c, &x.q, p->x, bwd_shape::ROWS));
    UPIPE_TRY(upi_tensor_map_make(&p->c, &x.k, p->x, bwd_shape::KEYS));
    UPIPE_TRY(upi_tensor_map_make(&p->c, &x.v, p->x, bwd_shape::KEYS));
    UPIPE_TRY(upi_tensor_map_make(&p->c, &x.dout, p->x, bwd_shape::ROWS));
    UPIPE_TRY(
        upi_tensor_map_make(&p->c, &x.dq, upipe_view_packed(x.g.dq_sum, UPIPE_F32, p->tokens, HEADS, D), 64));
    UPIPE_TRY(UPI_ALLOW_SHARED(&p->c, (upi_cuda_bwd90_kernel<D, D>), bwd_shape::SHARED));
    UPIPE_CUDA_TRY(&p->c.err, cudaMemsetAsync(p->turns, 0, 4096, p->stream));
    UPIPE_CUDA_TRY(&p->c.err,
                   cudaMemcpyAsync(p->turns, &first, sizeof first, cudaMemcpyHostToDevice, p->stream));
    UPIPE_CUDA_TRY(&p->c.err, cudaStreamSynchronize(p->stream)); /* `first` is this function's */
    return UPI_LAUNCH_TOGETHER(&p->c, 4, (upi_cuda_bwd90_kernel<D, D>),
                               (unsigned)(HEADS * (blocks - (hangs != 0))), bwd_shape::THREADS,
                               bwd_shape::SHARED, x);
}

/* A launch, to its end; all that it wrote is in `host`, if that is not NULL. */
static upipe_status launch(place *p, int what, char *host)
{
    UPIPE_CUDA_TRY(&p->c.err, cudaMemsetAsync(p->out, 0, p->bytes, p->stream));
    if (what == BACKWARD || what == BACKWARD_HANGS)
        UPIPE_TRY(backward(p, what == BACKWARD_HANGS));
    else
        UPIPE_TRY(forward(p, what == FORWARD_HANGS, what == FORWARD_LONG ? 1 : p->device.processors));
    UPIPE_CUDA_TRY(&p->c.err, cudaStreamSynchronize(p->stream));
    if (host == NULL) return UPIPE_OK;
    UPIPE_CUDA_TRY(&p->c.err, cudaMemcpyAsync(host, p->out, p->bytes, cudaMemcpyDeviceToHost, p->stream));
    UPIPE_CUDA_TRY(&p->c.err, cudaStreamSynchronize(p->stream));
    return UPIPE_OK;
}

/* Every block's words, for who reads the log of a run that failed. */
static void say_records(const upi_cuda_watch_record *all)
{
    for (int i = 0; i < UPI_CUDA_WATCH_RECORDS; ++i) {
        if (all[i].d == 0) continue;
        printf("record %d, block %d:", i, all[i].block);
        for (int j = 0; j < UPI_CUDA_WATCH_BARRIERS; ++j)
            printf(" %llx", (unsigned long long)all[i].barrier[j]);
        printf("\n");
    }
}

/* In a process of its own, as a trap ends the device's context. Says what the watch does. */
static int run(int what)
{
    const int hangs = what == FORWARD_HANGS || what == BACKWARD_HANGS;
    char text[UPIPE_CUDA_WATCH_TEXT], *host[2];
    void *watch;
    upipe_status s;
    place p;
    if (!open_place(&p, what == FORWARD_LONG ? LONG : TOKENS)) {
        printf("no memory or no device: %s %s\n", p.c.err.text, cudaGetErrorString(cudaGetLastError()));
        fflush(stdout);
        return 2;
    }
    if (p.device.capability != 90) return SKIPPED;
    watch = p.device.watch;
    for (int i = 0; i < 2; ++i) host[i] = what == FORWARD_LONG ? NULL : (char *)malloc(p.bytes);
    p.device.watch = NULL;
    s = hangs || what == FORWARD_LONG ? UPIPE_OK : launch(&p, what, host[0]);
    p.device.watch = watch;
    if (s == UPIPE_OK) s = launch(&p, what, hangs ? NULL : host[1]);
    if (upipe_cuda_watch_text(watch, text, sizeof text) > 0 || s != UPIPE_OK)
        say_records((const upi_cuda_watch_record *)watch), printf("%s; %s\n", text, p.c.err.text);
    else if (host[0] != NULL)
        printf("%s bits, %s\n", memcmp(host[0], host[1], p.bytes) == 0 ? "the same" : "other",
               host[0][2 * (size_t)D] != 0 || what == BACKWARD ? "some" : "none");
    else
        printf("well\n");
    fflush(stdout);
    return s != UPIPE_OK;
}

/* What it says must have these parts. Whether a device was there. */
static int check_run(int what, int fails, const char *const *parts, int count)
{
    char text[4096];
    size_t n = 0;
    ssize_t got;
    int ends[2], status = 0;
    pid_t child;
    if (!CHECK(pipe(ends) == 0)) return 0;
    child = fork();
    if (child == 0) {
        dup2(ends[1], 1), dup2(ends[1], 2);
        close(ends[0]), close(ends[1]);
        alarm(50);
        _exit(run(what));
    }
    close(ends[1]);
    while (n < sizeof text - 1 && (got = read(ends[0], text + n, sizeof text - 1 - n)) > 0) n += (size_t)got;
    text[n] = 0;
    close(ends[0]);
    CHECK(waitpid(child, &status, 0) == child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == SKIPPED) return 0;
    CHECK_SAY(WIFEXITED(status) && WEXITSTATUS(status) == fails, "status %d: %s", status, text);
    for (int i = 0; i < count; ++i) CHECK_TEXT(text, parts[i]);
    return 1;
}

#define CHECK_RUN(what, fails, ...)                                         \
    do {                                                                    \
        static const char *const parts[] = {__VA_ARGS__};                   \
        check_run(what, fails, parts, (int)(sizeof parts / sizeof *parts)); \
    } while (0)

/* The word that the compiler's own code makes of a barrier of 3 arrivals, and after one of them; words of an H200, where
 * half of the 16 KiB that a load was to bring have come. */
static void test_word(void)
{
    const uint64_t fresh = (uint64_t)((0x100000 - 3) << 11) << 32 | (0x100000 - 3) << 1;
    const struct {
        uint64_t word;
        int pending, count, bytes;
    } rows[] = {{fresh, 3, 3, 0},
                {fresh | (uint64_t)1 << 63, 3, 3, 0},
                {fresh + ((uint64_t)1 << 43) + ((uint64_t)(0x200000 - 4096) << 21), 2, 3, 4096},
                {fresh + ((uint64_t)3 << 43), 0, 3, 0},
                {fresh | (uint64_t)512 << 21, 3, 3, -512},
                {0x000003fc001ffffe, 0, 1, 8192},
                {0x7fffa000001fffe8, 12, 12, 0}};
    char text[UPIPE_CUDA_WATCH_TEXT] = "before";
    for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
        CHECK_INT(upi_cuda_watch_pending(rows[i].word), rows[i].pending);
        CHECK_INT(upi_cuda_watch_count(rows[i].word), rows[i].count);
        CHECK_INT(upi_cuda_watch_bytes(rows[i].word), rows[i].bytes);
    }
    CHECK_INT(upipe_cuda_watch_text(NULL, text, sizeof text), 0);
    CHECK_INT(text[0], 0);
}

static void test_hangs(void)
{
    CHECK_RUN(FORWARD_HANGS, 1,
              "4 blocks stand still; block 0 of 4, forward for 9.0, d <= 64, 128 keys:", "K full 0 even",
              "K full 1 even", "K empty 0 even", "V full 1 even", "Q full odd", "Q empty even", "(cudaError");
    CHECK_RUN(BACKWARD_HANGS, 1,
              "4 blocks stand still; ticket 2 of 4, backward for 9.0, d <= 64, 128 keys:", "K full odd",
              "dQ full 0 odd", "dQ full 1 odd", "dQ empty 0 even", "(cudaError");
#ifdef UPIPE_CUDA_SEAMS
    CHECK_RUN(FORWARD_HANGS, 1, "K full 0 even 0/1 8192 B", "K full 1 even 0/1 8192 B",
              "K empty 0 even 12/12 0 B", "V full 1 even 1/1 0 B", "Q full odd 1/1 0 B",
              "Q empty even 12/12 0 B");
    CHECK_RUN(BACKWARD_HANGS, 1, "K full odd 1/1 0 B", "dQ full 0 odd 8/8 0 B", "dQ full 1 odd 8/8 0 B",
              "dQ empty 0 even 1/1 0 B");
    simt_tick = 1000000; /* some seconds in all, while barriers move */
    CHECK_RUN(FORWARD_LONG, 0, "well");
    simt_words_hidden = 1;
    CHECK_RUN(FORWARD_LONG, 0, "well");
    CHECK_RUN(BACKWARD_HANGS, 1, "K full odd,", "dQ full 0 odd,", "dQ empty 0 even,");
    simt_words_hidden = 0;
    simt_tick = 3000000000; /* put aside for seconds between any two looks */
#endif
    CHECK_RUN(FORWARD_LONG, 0, "well");
}

int main(int argc, char **argv)
{
    static const char *const well[] = {"the same bits, some"};
    setenv("FAKE_CAPABILITY", "90", 1);
    test_begin(argc, argv);
    TEST(test_word());
    if (!check_run(FORWARD, 0, well, 1)) {
        printf("no device of compute capability 9.0: nothing to test\n");
        return test_end("cuda_watchdog");
    }
    TEST(check_run(BACKWARD, 0, well, 1));
    TEST(test_hangs());
    return test_end("cuda_watchdog");
}
