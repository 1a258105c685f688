/* test_simt.cpp -- the emulator itself: what kernels compute on it, and bugs that it must find
 *
 * Every planted bug runs in a process of its own, which must end with the emulator's status and say the
 * words. Built three ways: as it is, with -fsanitize=address,undefined, and for the race detector, which
 * then must find what the plain build can't.
 */
#include "upipe/cuda/upipe_cuda_hopper.h"

#include <signal.h>
#include <sys/wait.h>

#include <thread>
#include <vector>

#include "../lib/test.h"

/* ---- the frame ---- */

/* Runs the kernel on `blocks` blocks of `threads` threads. */
template <class F> static int launch(int blocks, int threads, size_t shared, F kernel)
{
    simt_run({{blocks, 1, 1}, {threads, 1, 1}, shared, 1}, kernel);
    return 0;
}
#define LAUNCH(blocks, threads, shared, ...) launch(blocks, threads, shared, [&] { __VA_ARGS__; })

/* Runs body in another process. Returns its exit status, -1 for a signal; what it printed is in text. */
template <class F> static int run_apart(char *text, size_t bytes, F body)
{
    int ends[2], status = 0;
    size_t used = 0;
    ssize_t n;
    pid_t child;
    fflush(stdout);
    if (pipe(ends) != 0) return -2;
    child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        alarm(60);
        _exit(body());
    }
    close(ends[1]);
    while (used + 1 < bytes && (n = read(ends[0], text + used, bytes - 1 - used)) > 0) used += (size_t)n;
    text[used] = 0;
    close(ends[0]);
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* The body must end by a finding whose report has the words; or, where asan says so, by one of
 * AddressSanitizer's. */
template <class F> static void must_find(int line, const char *words, int asan, F body)
{
    static char text[1 << 16];
    int status = run_apart(text, sizeof text, body);
    int ok = status == SIMT_STATUS && strstr(text, words) != NULL;
#ifdef SIMT_ASAN
    if (asan && status > 0 && strstr(text, "AddressSanitizer") != NULL) ok = 1;
#endif
    (void)asan;
    test_check(ok, __FILE__, line, "the status is %d, not %d, or the report does not say \"%s\":\n%.600s",
               status, SIMT_STATUS, words, text);
}
#define MUST_FIND(words, ...)         must_find(__LINE__, words, 0, [&] { return (int)(__VA_ARGS__); })
#define MUST_FIND_OR_ASAN(words, ...) must_find(__LINE__, words, 1, [&] { return (int)(__VA_ARGS__); })
/* What only the race detector can show. */
#define MUST_RACE(words, ...)                            \
    do {                                                 \
        if (SIMT_RACE_ON) MUST_FIND(words, __VA_ARGS__); \
    } while (0)
/* What shows as a wrong result where the race detector does not find it. */
#define MUST_RACE_OR(wrong, words, ...)    \
    do {                                   \
        if (SIMT_RACE_ON)                  \
            MUST_FIND(words, __VA_ARGS__); \
        else                               \
            CHECK(wrong);                  \
    } while (0)

/* The same under several orders. */
template <class F> static void in_many_orders(F body)
{
    const long orders[] = {0, 1, 2, 3, 77};
    for (long seed : orders) {
        simt_seed = seed;
        body();
    }
    simt_seed = 0;
}

/* ---- results: places, sums, shuffles ---- */

UPI_KERNEL(24, 1) void write_places(int *out)
{
    int thread = (int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
    int block = (int)(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
    out[block * 24 + thread] += 1 + block * 24 + thread;
}

static void test_places(void)
{
    in_many_orders([] {
        std::vector<int> out(12 * 24);
        simt_shape s = {{3, 2, 2}, {4, 3, 2}, 0, 1};
        simt_run(s, [&] { write_places(out.data()); });
        for (int i = 0; i < 12 * 24; ++i) CHECK_INT(out[i], i + 1);
    });
}

enum { NO_BARRIER = 1, FAR_OUT, RIM, BEFORE, PART, OTHER_LINE };

template <int BUG> UPI_KERNEL(256, 1) void sum_block(const float *x, int n, float *out)
{
    UPI_SHARED(float, part);
    const int t = (int)threadIdx.x;
    float a = 0;
    for (int i = (int)blockIdx.x * 256 + t; i < n; i += (int)gridDim.x * 256) a += x[i];
    part[t] = a;
    for (int s = 128; s > 0; s /= 2) {
        if (BUG != NO_BARRIER) __syncthreads();
        if (t < s) part[t] += part[t + s];
    }
    if (BUG == FAR_OUT && t == 0) part[1 << 16] = 1;
    if (BUG == RIM && t == 7) part[256] = 1;
    if (BUG == BEFORE && t == 7) part[-3] = 1;
    if (BUG == PART && t < 10) __syncthreads();
    if (BUG == OTHER_LINE) {
        if (t < 128)
            __syncthreads();
        else
            __syncthreads();
    }
    if (t == 0) atomicAdd(out, part[0]);
}

static float some[10000];

template <int BUG> static float run_sum(size_t shared)
{
    float out = 0;
    LAUNCH(8, 256, shared, sum_block<BUG>(some, 10000, &out));
    return out;
}

static void test_sums(void)
{
    float want = 0;
    for (int i = 0; i < 10000; ++i) want += some[i] = (float)(i % 7);
    in_many_orders([&] { CHECK(run_sum<0>(1024) == want); });
    MUST_FIND("shared memory out of bounds: byte 262144, the block has 1024", run_sum<FAR_OUT>(1024) > 0);
    MUST_FIND("shared memory out of bounds: byte 1024", run_sum<RIM>(1024) > 0);
    MUST_FIND_OR_ASAN("shared memory out of bounds: byte -12", run_sum<BEFORE>(1024) > 0);
    MUST_FIND_OR_ASAN("shared memory out of bounds: byte 1000", run_sum<0>(1000) > 0);
    MUST_FIND("part of the block reached a barrier", run_sum<PART>(1024) > 0);
    MUST_FIND("threads 0 to 9 wait at __syncthreads", run_sum<PART>(1024) > 0);
    MUST_FIND("divergence: a barrier at", run_sum<OTHER_LINE>(1024) > 0);
    /* what was not written yet is a NaN */
    MUST_RACE_OR(isnan(run_sum<NO_BARRIER>(1024)), "nobody wrote it", run_sum<NO_BARRIER>(1024) > 0);
}

UPI_KERNEL(32, 1) void shuffle(int *out)
{
    const int l = (int)threadIdx.x;
    int *o = out + l * 8;
    o[0] = __shfl_xor_sync(0xffffffff, l, 5);
    o[1] = __shfl_sync(0xffffffff, l, (l * 7 + 3) % 32);
    o[2] = __shfl_down_sync(0xffffffff, l, 3);
    o[3] = __shfl_up_sync(0xffffffff, l, 3);
    o[4] = __shfl_down_sync(0xffffffff, l, 3, 8);
    o[5] = __shfl_xor_sync(0xffffffff, l, 4, 8);
    o[6] = (int)__ballot_sync(0xffffffff, l % 3 == 0);
    o[7] = l < 16 ? __any_sync(0x0000ffff, l == 3) + 2 * __all_sync(0x0000ffff, l < 16)
                  : __any_sync(0xffff0000, l == 3) + 2 * __all_sync(0xffff0000, l != 20);
}

static void test_shuffles(void)
{
    in_many_orders([] {
        int out[32 * 8], thirds = 0;
        for (int l = 0; l < 32; l += 3) thirds |= 1 << l;
        LAUNCH(1, 32, 0, shuffle(out));
        for (int l = 0; l < 32; ++l) {
            CHECK_INT(out[l * 8], l ^ 5);
            CHECK_INT(out[l * 8 + 1], (l * 7 + 3) % 32);
            CHECK_INT(out[l * 8 + 2], l + 3 < 32 ? l + 3 : l);
            CHECK_INT(out[l * 8 + 3], l >= 3 ? l - 3 : l);
            CHECK_INT(out[l * 8 + 4], l % 8 + 3 < 8 ? l + 3 : l);
            CHECK_INT(out[l * 8 + 5], l ^ 4);
            CHECK_INT(out[l * 8 + 6], thirds);
            CHECK_INT(out[l * 8 + 7], l < 16 ? 3 : 0);
        }
    });
}

enum { BRANCH = 1, ABSENT, MASKS, OUTSIDE, GONE };

template <int BUG> UPI_KERNEL(32, 1) void diverge(int *out)
{
    const int l = (int)threadIdx.x;
    int v = l;
    if (BUG == BRANCH) {
        if (l % 2)
            v = __shfl_xor_sync(0xffffffff, v, 1);
        else
            v = __shfl_xor_sync(0xffffffff, v, 2);
    }
    if (BUG == ABSENT && l < 31) v = __shfl_xor_sync(0xffffffff, v, 1);
    if (BUG == MASKS) v = __shfl_xor_sync(l < 16 ? 0xffffffff : 0xffff0000, v, 1);
    if (BUG == OUTSIDE && l < 16) v = __shfl_sync(0x0000ffff, v, 20);
    if (BUG == GONE) v = __shfl_sync(0x0000ffff, v, 0);
    out[l] = v;
}

static void test_divergence(void)
{
    static int out[32];
    MUST_FIND("divergence", LAUNCH(1, 32, 0, diverge<BRANCH>(out)));
    MUST_FIND("wait at __shfl_xor_sync", LAUNCH(1, 32, 0, diverge<ABSENT>(out)));
    MUST_FIND("divergence", LAUNCH(1, 32, 0, diverge<MASKS>(out)));
    MUST_FIND("takes a value of lane 20", LAUNCH(1, 32, 0, diverge<OUTSIDE>(out)));
    MUST_FIND("is not in the mask", LAUNCH(1, 32, 0, diverge<GONE>(out)));
}

/* ---- results: matrices and numbers ---- */

/* The matrices lie behind one another, rows in the order `row`. */
template <int TRANS> UPI_KERNEL(32, 1) void load_matrices(uint32_t *out, int slip)
{
    UPI_SHARED(uint16_t, m);
    const int l = (int)threadIdx.x;
    uint32_t r[4];
    for (int i = l; i < 256; i += 32) m[i] = (uint16_t)i;
    __syncwarp();
    if (TRANS)
        upi_load_matrix4_trans(r, upi_shared_address(m) + (uint32_t)(l * 16 + slip));
    else
        upi_load_matrix4(r, upi_shared_address(m) + (uint32_t)(l * 16 + slip));
    for (int i = 0; i < 4; ++i) out[l * 4 + i] = r[i];
}

static void test_load_matrices(void)
{
    static uint32_t out[32 * 4];
    in_many_orders([] {
        LAUNCH(1, 32, 512, load_matrices<0>(out, 0));
        for (int l = 0; l < 32; ++l)
            for (int m = 0; m < 4; ++m) {
                CHECK_INT(out[l * 4 + m] & 0xffff, m * 64 + l / 4 * 8 + l % 4 * 2);
                CHECK_INT(out[l * 4 + m] >> 16, m * 64 + l / 4 * 8 + l % 4 * 2 + 1);
            }
        LAUNCH(1, 32, 512, load_matrices<1>(out, 0));
        for (int l = 0; l < 32; ++l)
            for (int m = 0; m < 4; ++m) {
                CHECK_INT(out[l * 4 + m] & 0xffff, m * 64 + l / 4 + l % 4 * 2 * 8);
                CHECK_INT(out[l * 4 + m] >> 16, m * 64 + l / 4 + (l % 4 * 2 + 1) * 8);
            }
    });
    MUST_FIND("misaligned: ldmatrix", LAUNCH(1, 32, 512, load_matrices<0>(out, 8)));
    MUST_FIND("out of bounds: ldmatrix at byte 512", LAUNCH(1, 32, 512, load_matrices<1>(out, 16)));
}

/* d = c + a b, everything in plain order in memory. */
UPI_KERNEL(32, 1) void multiply(const float *a, const float *b, const float *c, float *d)
{
    const int l = (int)threadIdx.x, row = l / 4, pair = l % 4 * 2;
    uint32_t x[4], y[2];
    float z[4];
    for (int i = 0; i < 4; ++i) {
        const float *p = a + (row + i % 2 * 8) * 16 + pair + i / 2 * 8;
        x[i] = upi_pack_bf16(p[0], p[1]);
        z[i] = c[(row + i / 2 * 8) * 8 + pair + i % 2];
    }
    for (int i = 0; i < 2; ++i)
        y[i] = upi_pack_bf16(b[(pair + i * 8) * 8 + row], b[(pair + i * 8 + 1) * 8 + row]);
    upi_mma(z, x, y);
    for (int i = 0; i < 4; ++i) d[(row + i / 2 * 8) * 8 + pair + i % 2] = z[i];
}

static void test_multiply(void)
{
    test_rng r = {4};
    float a[256], b[128], c[128], d[128];
    /* integers, so that every order of a sum gives the same; then every element of a alone */
    for (int one = -4; one < 256; ++one) {
        for (int i = 0; i < 256; ++i) a[i] = one < 0 ? (float)(test_below(&r, 17) - 8) : (float)(i == one);
        for (int i = 0; i < 128; ++i) b[i] = (float)(test_below(&r, 17) - 8);
        for (int i = 0; i < 128; ++i) c[i] = (float)(test_below(&r, 17) - 8);
        LAUNCH(1, 32, 0, multiply(a, b, c, d));
        for (int i = 0; i < 16; ++i)
            for (int j = 0; j < 8; ++j) {
                float want = c[i * 8 + j];
                for (int k = 0; k < 16; ++k) want += a[i * 16 + k] * b[k * 8 + j];
                CHECK(d[i * 8 + j] == want);
            }
    }
}

static void test_numbers(void)
{
    test_rng r = {9};
    for (int i = 0; i < 20000; ++i) {
        uint32_t bits = (uint32_t)test_u64(&r), got;
        float x = upi_as_float(bits), low, high;
        got = upi_pack_bf16(1, x) >> 16;
        if (isnan(x)) {
            CHECK(isnan(upi_from_bf16((upi_bf16)got)));
            continue;
        }
        low = upi_as_float(bits & 0xffff0000); /* towards 0 */
        high = upi_as_float((bits & 0xffff0000) + 0x10000);
        if (upi_as_float(got << 16) != low) CHECK(upi_as_float(got << 16) == high);
        if ((bits & 0xffff) != 0x8000)
            CHECK_INT(got, (bits & 0xffff) < 0x8000 ? bits >> 16 : (bits >> 16) + 1);
        else
            CHECK_INT(got & 1, 0);
    }
    CHECK_INT(upi_pack_bf16(2, 1), 0x3f804000);
    CHECK(upi_exp2(-126) == 0x1p-126f && upi_exp2(-126.5f) == 0 && upi_exp2(3) == 8);
    CHECK(upi_exp2(-INFINITY) == 0 && upi_exp2(INFINITY) == INFINITY && isnan(upi_exp2(NAN)));
    CHECK(__fdividef(6, 3) == 2 && __fdividef(1, 0x1p127f) == 0);
}

/* ---- copies ---- */

enum { NO_WAIT = 1, SHORT_WAIT, REUSE, ODD_SOURCE, ODD_TARGET, PAST_END };

/* Two tiles through two slots, each read by the other warp; the second pass reuses the slots. */
template <int BUG> UPI_KERNEL(64, 1) void copy_tiles(const float *from, float *to)
{
    UPI_SHARED(float, slot);
    const int t = (int)threadIdx.x;
    const uint32_t at = upi_shared_address(slot);
    for (int pass = 0; pass < 2; ++pass, from += 512, to += 512) {
        upi_copy16(at + (uint32_t)(t * 16 + (BUG == ODD_TARGET ? 4 : 0)), from + t * 4 + (BUG == ODD_SOURCE),
                   1);
        upi_copy_commit();
        upi_copy16(at + 1024 + (uint32_t)t * 16 + (BUG == PAST_END ? 16 : 0), from + 256 + t * 4, t % 2);
        upi_copy_commit();
        if (BUG != NO_WAIT && BUG != SHORT_WAIT) upi_copy_wait<1>();
        if (BUG == SHORT_WAIT) upi_copy_wait<2>();
        __syncthreads();
        for (int i = 0; i < 4; ++i) to[(t ^ 32) * 4 + i] = slot[(t ^ 32) * 4 + i];
        upi_copy_wait<0>();
        __syncthreads();
        for (int i = 0; i < 4; ++i) to[256 + (t ^ 32) * 4 + i] = slot[256 + (t ^ 32) * 4 + i];
        if (BUG != REUSE) __syncthreads();
    }
}

template <int BUG> static int run_copies(void)
{
    alignas(16) static float from[1024], to[1024];
    int wrong = 0;
    for (int i = 0; i < 1024; ++i) from[i] = (float)i;
    LAUNCH(1, 64, 2048, copy_tiles<BUG>(from, to));
    for (int i = 0; i < 1024; ++i) wrong += to[i] != (i % 512 < 256 || i / 4 % 2 ? from[i] : 0);
    return wrong;
}

static void test_copies(void)
{
    for (simt_eager = 0; simt_eager < 2; ++simt_eager) in_many_orders([] { CHECK_INT(run_copies<0>(), 0); });
    simt_eager = 0;
    MUST_FIND("misaligned: an asynchronous copy of 16 bytes from", run_copies<ODD_SOURCE>());
    MUST_FIND("misaligned: an asynchronous copy takes a shared address", run_copies<ODD_TARGET>());
    MUST_FIND("out of bounds: an asynchronous copy at byte 2048", run_copies<PAST_END>());
    MUST_RACE_OR(run_copies<NO_WAIT>() > 0, "(its copy) before", run_copies<NO_WAIT>());
    MUST_RACE_OR(run_copies<SHORT_WAIT>() > 0, "(its copy) before", run_copies<SHORT_WAIT>());
    MUST_RACE_OR(run_copies<REUSE>() > 0, "race: a write after a read", run_copies<REUSE>());
}

/* ---- races in shared memory ---- */

enum { NO_LANE_BARRIER = 1, NO_LANE_BARRIER_BUT_FILLED, ONE_FOR_ALL, HALF_WORDS };

template <int BUG> UPI_KERNEL(64, 1) void turn(int *out)
{
    UPI_SHARED(int, s);
    const int t = (int)threadIdx.x;
    if (BUG == NO_LANE_BARRIER_BUT_FILLED) {
        s[t] = 0;
        __syncthreads();
    }
    s[t] = t;
    if (BUG != NO_LANE_BARRIER && BUG != NO_LANE_BARRIER_BUT_FILLED) __syncwarp();
    out[t] = s[t ^ 1];
    __syncwarp();
    if (BUG == ONE_FOR_ALL) s[0] = 5;
    if (BUG == HALF_WORDS)
        ((uint16_t *)(s + 64))[t] = (uint16_t)t; /* no bug: halves of a word are two places */
    __syncthreads();
    out[t] += s[t ^ 32];
}

static void test_shared_races(void)
{
    static int out[64];
    in_many_orders([] {
        LAUNCH(1, 64, 512, turn<0>(out));
        for (int t = 0; t < 64; ++t) CHECK_INT(out[t], (t ^ 1) + (t ^ 32));
        LAUNCH(1, 64, 512, turn<HALF_WORDS>(out));
    });
    MUST_RACE("shared byte 4 is read and nobody wrote it", LAUNCH(1, 64, 512, turn<NO_LANE_BARRIER>(out)));
    MUST_RACE("race: a read after a write, shared byte 0",
              LAUNCH(1, 64, 512, turn<NO_LANE_BARRIER_BUT_FILLED>(out)));
    MUST_RACE("race: a write after a write, shared byte 0", LAUNCH(1, 64, 512, turn<ONE_FOR_ALL>(out)));
}

/* ---- between blocks ---- */

enum {
    NO_RELEASE = 1,
    NO_ACQUIRE,
    LOOK_ONCE,
    NO_TICKET,
    SAME_WORD,
    NO_FENCE_BEFORE,
    NO_FENCE_AFTER,
    PLAIN_AND_ATOMIC,
    NO_BARRIER_BEFORE,
    OUT_OF_TURN,
    ODD_SUM,
    NEVER
};

/* Blocks add to a row one after another, in the order of their tickets; to its second half without waiting for
 * what comes of it. */
template <int BUG> UPI_KERNEL(64, 1) void in_turn(int *sync, float *row)
{
    UPI_SHARED(int, mine);
    const int t = (int)threadIdx.x;
    int me;
    if (t == 0) mine[0] = BUG == NO_TICKET ? (int)(gridDim.x - 1 - blockIdx.x) : atomicAdd(&sync[0], 1);
    __syncthreads();
    me = mine[0];
    if (BUG == OUT_OF_TURN) upi_add_alone(&row[64 + t], 1);
    if (t == 0 && BUG == LOOK_ONCE) (void)upi_load_acquire(&sync[1]);
    if (t == 0 && BUG != NO_ACQUIRE && BUG != LOOK_ONCE)
        while (upi_load_acquire(&sync[1]) != me + (BUG == NEVER)) upi_pause();
    __syncthreads();
    row[t] += (float)(me + 1) * row[t];
    upi_add_alone((float *)((char *)&row[64 + t] + 2 * (BUG == ODD_SUM)), (float)(me + 1));
    if (BUG != NO_BARRIER_BEFORE) __syncthreads();
    if (t == 0) {
        if (BUG == NO_RELEASE)
            atomicAdd(&sync[1], 1);
        else
            upi_add_release(&sync[1], 1);
    }
}

template <int BUG> static float run_in_turn(int together = 1)
{
    int sync[2] = {0, 0};
    float row[129];
    for (int i = 0; i < 129; ++i) row[i] = i < 64;
    simt_run({{6, 1, 1}, {64, 1, 1}, 4, together}, [&] { in_turn<BUG>(sync, row); });
    for (int i = 1; i < 64; ++i)
        if (row[i] != row[0] || row[64 + i] != 21) return -1;
    return row[0];
}

/* The same by single threads, row after row, with no barrier at which blocks would take turns. */
template <int BUG> UPI_KERNEL(32, 1) void hand_on(int *sync, float *row)
{
    int me;
    if (threadIdx.x > 0) return;
    me = atomicAdd(&sync[0], 1);
    for (int i = 0; i < 3; ++i) {
        if (BUG == LOOK_ONCE)
            (void)upi_load_acquire(&sync[1 + i]);
        else
            while (upi_load_acquire(&sync[1 + i]) != me) upi_pause();
        row[i] += (float)(me + 1) * row[i];
        upi_add_release(&sync[1 + i], 1);
    }
}

template <int BUG> static float run_hand_on(void)
{
    int sync[4] = {0, 0, 0, 0};
    float row[3] = {1, 1, 1};
    LAUNCH(6, 32, 4, hand_on<BUG>(sync, row));
    return row[0] == row[1] && row[1] == row[2] ? row[0] : -1;
}

/* The block that comes last sums what all have left. */
template <int BUG> UPI_KERNEL(32, 1) void last_sums(int *count, float *part, float *out)
{
    UPI_SHARED(int, last);
    const int t = (int)threadIdx.x;
    part[(int)blockIdx.x * 32 + t] = (float)t;
    if (BUG == SAME_WORD) part[1000] = 1;
    __syncthreads();
    if (t == 0) {
        if (BUG != NO_FENCE_BEFORE) __threadfence();
        last[0] = atomicAdd(count, 1) == (int)gridDim.x - 1;
        if (BUG != NO_FENCE_AFTER) __threadfence();
        if (BUG == PLAIN_AND_ATOMIC) out[1] = (float)*count;
    }
    __syncthreads();
    if (!last[0]) return;
    for (int b = 0; b < (int)gridDim.x; ++b) out[t] = (b > 0 ? out[t] : 0) + part[b * 32 + t];
}

template <int BUG> static int run_last_sums(void)
{
    static float part[1001], out[32];
    int count = 0, wrong = 0;
    LAUNCH(5, 32, 4, last_sums<BUG>(&count, part, out));
    for (int t = 0; t < 32; ++t) wrong += out[t] != 5 * (float)t;
    return wrong;
}

static void test_between_blocks(void)
{
    in_many_orders([] {
        CHECK(run_in_turn<0>() == 5040); /* 2 * 3 * ... * 7 */
        CHECK(run_hand_on<0>() == 5040);
        CHECK_INT(run_last_sums<0>(), 0);
    });
    float tiny = -0x1p-127f;
    LAUNCH(1, 1, 0, upi_add_alone(&tiny, -0x1p-127f));
    CHECK(tiny == 0 && signbit(tiny));
    MUST_FIND("every running block waits", run_in_turn<NEVER>());
    MUST_RACE("race", run_in_turn<NO_RELEASE>());
    MUST_RACE("race", run_in_turn<NO_ACQUIRE>());
    MUST_RACE("race", run_in_turn<LOOK_ONCE>());
    MUST_RACE("race", run_in_turn<NO_BARRIER_BEFORE>());
    MUST_RACE("race", run_in_turn<OUT_OF_TURN>());
    MUST_FIND("misaligned: a sum of 4 bytes", run_in_turn<ODD_SUM>());
    MUST_RACE("race", run_hand_on<LOOK_ONCE>());
    MUST_RACE("race: a write after a write, global", run_last_sums<SAME_WORD>());
    MUST_RACE("race: a read after a write, global", run_last_sums<NO_FENCE_BEFORE>());
    MUST_RACE("race: a read after a write, global", run_last_sums<NO_FENCE_AFTER>());
    MUST_RACE("race", run_last_sums<PLAIN_AND_ATOMIC>());
}

template <int BUG> static int run_on_threads(int threads, int together = 1)
{
    char number[16];
    snprintf(number, sizeof number, "%d", threads);
    setenv("SIMT_THREADS", number, 1);
    return run_in_turn<BUG>(together) == 5040 ? 0 : 1;
}

/* On one OS thread: the block that the first waits for has not started, unless the launch says that all six wait for one
 * another. */
static void test_missing_ticket(void)
{
    static char waits[4096];
    const int together = run_apart(waits, sizeof waits, [] { return run_on_threads<NO_TICKET>(1, 6); });
    CHECK_SAY(together == 0, "six blocks together: status %d, %s", together, waits);
    MUST_FIND("every running block waits", run_on_threads<NO_TICKET>(1, 5));
    MUST_FIND("every running block waits", run_on_threads<NO_TICKET>(1));
    MUST_FIND("wait at a pause", run_on_threads<NO_TICKET>(3));
    for (int threads = 1; threads <= 4; ++threads) {
        static char text[4096];
        int status = run_apart(text, sizeof text, [=] { return run_on_threads<0>(threads); });
        CHECK_SAY(status == 0, "%d OS threads: status %d, %s", threads, status, text);
    }
}

/* ---- what Hopper added: barriers in shared memory, and loads ---- */

enum {
    NO_FULL_WAIT = 1,
    NO_EMPTY_WAIT,
    FEW_BYTES,
    MANY_ARRIVE,
    NO_INIT,
    NO_INIT_FENCE,
    NO_INIT_BARRIER,
    OVERWRITTEN,
    NOBODY_WAITS,
    ODD_BYTES,
    LOAD_PAST_END,
    ONE_LANE_WAITS,
    EARLY_ARRIVE,
    TILES = 5,
    TILE_FLOATS = 256
};

/* One thread loads tiles through a ring of two slots; two warps read them. */
template <int BUG> UPI_HOPPER_KERNEL(96) void ring(const float *from, float *to)
{
    UPI_SHARED(float, slots);
    const int t = (int)threadIdx.x, warp = t / 32;
    const uint32_t at = upi_shared_address(slots), full = at + 2 * TILE_FLOATS * 4, empty = full + 16;
    if (t == 0 && BUG != NO_INIT)
        for (int i = 0; i < 2; ++i) {
            upi_mbarrier_init(full + (uint32_t)i * 8, 1);
            upi_mbarrier_init(empty + (uint32_t)i * 8, 2);
        }
    if (t == 0 && BUG != NO_INIT_FENCE) upi_mbarrier_fence();
    if (BUG != NO_INIT_BARRIER) __syncthreads();
    if (t == 0) {
        for (int n = 0; n < TILES; ++n) {
            const uint32_t slot = (uint32_t)(n % 2), turn = (uint32_t)(n / 2 % 2);
            if (BUG != NO_EMPTY_WAIT) upi_mbarrier_wait(empty + slot * 8, turn ^ 1);
            upi_mbarrier_arrive_expect(full + slot * 8, TILE_FLOATS * 4 - (BUG == FEW_BYTES ? 16 : 0));
            if (BUG == MANY_ARRIVE) upi_mbarrier_arrive(full + slot * 8);
            upi_bulk_load(at + slot * TILE_FLOATS * 4 + (BUG == LOAD_PAST_END ? 4096 : 0),
                          from + n * TILE_FLOATS, TILE_FLOATS * 4 - (BUG == ODD_BYTES ? 4 : 0),
                          full + slot * 8);
        }
    } else if (warp > 0 && BUG != NOBODY_WAITS) {
        for (int n = 0; n < TILES; ++n) {
            const uint32_t slot = (uint32_t)(n % 2), turn = (uint32_t)(n / 2 % 2);
            if (BUG != NO_FULL_WAIT && (BUG != ONE_LANE_WAITS || t % 32 == 0))
                upi_mbarrier_wait(full + slot * 8, turn);
            if (BUG == EARLY_ARRIVE && t % 32 == 0) upi_mbarrier_arrive(empty + slot * 8);
            for (int i = t - 32; i < TILE_FLOATS; i += 64)
                to[n * TILE_FLOATS + i] = slots[(int)slot * TILE_FLOATS + i];
            __syncwarp();
            if (BUG != EARLY_ARRIVE && t % 32 == 0) upi_mbarrier_arrive(empty + slot * 8);
            if (BUG == OVERWRITTEN && t == 32 && n == 1) slots[2 * TILE_FLOATS] = 1;
        }
    }
}

template <int BUG> static int run_ring(void)
{
    alignas(16) static float from[TILES * TILE_FLOATS], to[TILES * TILE_FLOATS];
    int wrong = 0;
    for (int i = 0; i < TILES * TILE_FLOATS; ++i) from[i] = (float)i, to[i] = -1;
    LAUNCH(1, 96, 2 * TILE_FLOATS * 4 + 32, ring<BUG>(from, to));
    for (int i = 0; i < TILES * TILE_FLOATS; ++i) wrong += !(to[i] == from[i]);
    return wrong;
}

static void test_mbarriers(void)
{
    for (simt_eager = 0; simt_eager < 2; ++simt_eager) in_many_orders([] { CHECK_INT(run_ring<0>(), 0); });
    simt_eager = 0;
    MUST_FIND("wait at mbarrier.try_wait", run_ring<FEW_BYTES>());
    MUST_FIND("more arrivals than the count", run_ring<MANY_ARRIVE>());
    MUST_FIND("no mbarrier at shared byte", run_ring<NO_INIT>());
    MUST_FIND("was overwritten", run_ring<OVERWRITTEN>());
    MUST_FIND("wait at mbarrier.try_wait", run_ring<NOBODY_WAITS>());
    MUST_FIND("misaligned: a bulk load of 1020 bytes", run_ring<ODD_BYTES>());
    MUST_FIND("out of bounds: a load", run_ring<LOAD_PAST_END>());
    MUST_RACE("race: a read after a write, shared byte 2048", run_ring<NO_INIT_FENCE>());
    MUST_RACE("race: a read after a write, shared byte", run_ring<NO_INIT_BARRIER>());
    MUST_RACE("is read and nobody wrote it", run_ring<ONE_LANE_WAITS>());
    MUST_RACE("race: a write after a read", run_ring<EARLY_ARRIVE>());
    MUST_FIND(SIMT_RACE_ON ? "is read and nobody wrote it" : "more arrivals than the count",
              run_ring<NO_FULL_WAIT>());
    MUST_FIND("more arrivals than the count", run_ring<NO_EMPTY_WAIT>());
}

/* ---- time ---- */

enum { NO_BARRIER_THERE = 1, TRAP };

/* A thread waits for a while, in vain, and then arrives; the other blocks wait for it all the time. */
template <int BUG> UPI_HOPPER_KERNEL(64) void wait_a_while(int *turn, uint64_t *out)
{
    UPI_SHARED(uint64_t, barrier);
    const uint32_t at = upi_shared_address(barrier), since = upi_clock();
    if (threadIdx.x == 0) upi_mbarrier_init(at, 1);
    upi_mbarrier_fence();
    __syncthreads();
    if (blockIdx.x > 0) {
        while (upi_load_acquire(turn) == 0) upi_pause();
    } else if (threadIdx.x == 32) {
        out[0] = upi_mbarrier_word(at);
        out[1] = (uint64_t)upi_mbarrier_wait_for(at + (BUG == NO_BARRIER_THERE ? 8 : 0), 0, 1000);
        out[2] = upi_clock() - since;
        if (BUG == TRAP) upi_trap();
        upi_mbarrier_arrive(at);
        upi_add_release(turn, 1);
    } else if (threadIdx.x == 0) {
        upi_mbarrier_wait(at, 0);
        out[3] = (uint64_t)upi_mbarrier_wait_for(at, 0, 1000);
        out[4] = upi_mbarrier_word(at);
    }
}

template <int BUG> static int run_wait(uint64_t *out)
{
    const simt_shape shape = {{3, 1, 1}, {64, 1, 1}, 16, 3};
    int turn = 0;
    memset(out, 0xff, 5 * sizeof *out);
    return simt_run(shape, [&] { wait_a_while<BUG>(&turn, out); });
}

static void test_time(void)
{
    in_many_orders([] {
        uint64_t out[5];
        CHECK_INT(run_wait<0>(out), 1);
        CHECK(out[0] == 0x7ffff800001ffffe && out[4] == 0xfffff800001ffffe);
        CHECK(out[1] == 0 && out[2] >= 1000 && out[3] == 1);
        CHECK_INT(run_wait<TRAP>(out), 0);
        CHECK(out[2] >= 1000 && out[3] == UINT64_MAX);
    });
    MUST_FIND("no mbarrier at shared byte 8", run_wait<NO_BARRIER_THERE>(std::vector<uint64_t>(5).data()));
}

/* ---- tensor maps: loads and stores of boxes ---- */

enum { ODD_TILE = 1, NO_STORE_FENCE, NO_READ_WAIT, OVER_SOURCE, NO_BARRIER_BEFORE_STORE };

typedef struct box_args {
    upi_tensor_map from, to;
    int x, y, z, x_to, y_to, z_to;
    uint16_t *seen; /* NULL: not wanted */
} box_args;

/* A box of 16 rows to shared memory, as it lies there to `seen`, doubled, and to another place. */
template <int BUG> UPI_HOPPER_KERNEL(64) void move_box(UPI_BY_VALUE box_args a)
{
    UPI_SHARED(uint16_t, tile);
    const int t = (int)threadIdx.x;
    const uint32_t at = upi_shared_address(tile) + (BUG == ODD_TILE ? 128 : 0), full = at + 2048;
    if (t == 0) {
        upi_mbarrier_init(full, 1);
        upi_mbarrier_fence();
        upi_tma_prefetch(&a.from);
        upi_mbarrier_arrive_expect(full, 2048);
        upi_tma_load(at, &a.from, a.x, a.y, a.z, full);
    }
    __syncthreads();
    upi_mbarrier_wait(full, 0);
    for (int i = t; i < 1024; i += 64) {
        if (a.seen != NULL) a.seen[i] = tile[i];
        tile[i] = (uint16_t)(tile[i] * 2);
    }
    if (BUG != NO_STORE_FENCE) upi_fence_async_shared();
    if (BUG != NO_BARRIER_BEFORE_STORE) __syncthreads();
    if (t == 0) {
        upi_tma_store(&a.to, a.x_to, a.y_to, a.z_to, at);
        upi_bulk_commit();
        if (BUG == OVER_SOURCE) tile[5] = 9;
        if (BUG != NO_READ_WAIT) upi_bulk_wait_read<0>();
    }
}

/* [rows][3 heads][40 columns], heads 48 apart. */
enum { BOX_ROWS = 37, BOX_STEP = 3 * 48 };

template <int BUG> static int run_boxes(int y, int x, int y_to)
{
    alignas(16) static uint16_t from[BOX_ROWS * BOX_STEP], to[BOX_ROWS * BOX_STEP], seen[1024];
    upipe_view v = upipe_view_packed(from, UPIPE_BF16, BOX_ROWS, 3, 40);
    upipe_ctx c;
    box_args a;
    int wrong = 0;
    memset(&c, 0, sizeof c);
    v.h_stride = 48;
    v.n_stride = BOX_STEP;
    CHECK(upi_tensor_map_fits(v));
    CHECK_STATUS(upi_tensor_map_make(&c, &a.from, v, 16), UPIPE_OK, c.err);
    v.data = to;
    CHECK_STATUS(upi_tensor_map_make(&c, &a.to, v, 16), UPIPE_OK, c.err);
    CHECK_INT((uintptr_t)&a.to % 64, 0);
    a.x = x, a.y = y, a.z = 1, a.x_to = x, a.y_to = y_to, a.z_to = 2, a.seen = seen;
    for (int i = 0; i < BOX_ROWS * BOX_STEP; ++i) from[i] = (uint16_t)(i + 1), to[i] = 0;
    LAUNCH(1, 64, 2048 + 136, move_box<BUG>(a));
    for (int r = 0; r < 16; ++r)
        for (int k = 0; k < 64; ++k) {
            const int in = y + r >= 0 && y + r < BOX_ROWS && x + k < 40;
            const int want = in ? from[(y + r) * BOX_STEP + 48 + x + k] : 0;
            wrong += seen[r * 64 + ((k / 8 ^ r % 8) * 8 + k % 8)] != want;
            wrong += (int)upi_panel_at(16, r, k / 8) != (r * 64 + (k / 8 ^ r % 8) * 8) * 2;
        }
    for (int i = 0; i < BOX_ROWS * BOX_STEP; ++i) {
        const int row = i / BOX_STEP, k = i % BOX_STEP - 96, r = row - y_to;
        const int in = r >= 0 && r < 16 && k >= x && k < 40;
        const int want = in && y + r < BOX_ROWS ? (uint16_t)(2 * from[(y + r) * BOX_STEP + 48 + k]) : 0;
        wrong += to[i] != want;
    }
    return wrong;
}

static void test_boxes(void)
{
    upipe_view v = upipe_view_packed((void *)64, UPIPE_BF16, 5, 2, 40);
    in_many_orders([] {
        CHECK_INT(run_boxes<0>(0, 0, 0), 0);
        CHECK_INT(run_boxes<0>(30, 8, 3), 0);
        CHECK_INT(run_boxes<0>(4, 0, 30), 0);
    });
    CHECK(upi_tensor_map_fits(v));
    v.data = (void *)72;
    CHECK(!upi_tensor_map_fits(v));
    v.data = (void *)64, v.n_stride = 84;
    CHECK(!upi_tensor_map_fits(v));
    v.n_stride = 0;
    CHECK(!upi_tensor_map_fits(v));
    v.n = 1, v.n_stride = 3; /* a step that is not taken */
    CHECK(upi_tensor_map_fits(v));
    v.n = 0;
    CHECK(!upi_tensor_map_fits(v));
    MUST_FIND("misaligned: a load takes", run_boxes<ODD_TILE>(0, 0, 0));
    MUST_FIND("before its bulk store has read", run_boxes<NO_READ_WAIT>(0, 0, 0));
    MUST_RACE("race: a read after a write, shared", run_boxes<NO_STORE_FENCE>(0, 0, 0));
    MUST_RACE("race: a", run_boxes<NO_BARRIER_BEFORE_STORE>(0, 0, 0));
    MUST_RACE_OR(run_boxes<OVER_SOURCE>(0, 0, 0) > 0, "a bulk store of warp 0 before",
                 run_boxes<OVER_SOURCE>(0, 0, 0));
}

enum { NO_WRITE_WAIT = 1, PLAIN_SUM };

/* Blocks add to the same sums; then each reads back, where BUG says so. */
template <int BUG> UPI_HOPPER_KERNEL(32) void add_up(float *sums, float *back)
{
    UPI_SHARED(float, part);
    const int t = (int)threadIdx.x;
    for (int i = t; i < 64; i += 32) part[i] = (float)(i + (int)blockIdx.x);
    upi_fence_async_shared();
    __syncwarp();
    if (t == 0) {
        upi_bulk_add(sums, upi_shared_address(part), 256);
        upi_bulk_commit();
        if (BUG == NO_WRITE_WAIT)
            upi_bulk_wait_read<0>();
        else
            upi_bulk_wait<0>();
        if (gridDim.x == 1) *back = sums[3];
        if (BUG == PLAIN_SUM) sums[5] += 1;
    }
}

template <int BUG> static float run_add_up(int blocks, float *back)
{
    alignas(16) float sums[64];
    for (int i = 0; i < 64; ++i) sums[i] = 0;
    LAUNCH(blocks, 32, 256, add_up<BUG>(sums, back));
    for (int i = 0; i < 64; ++i)
        if (sums[i] != (float)(blocks * i + blocks * (blocks - 1) / 2)) return -1;
    return sums[1];
}

static void test_bulk_sums(void)
{
    static float back;
    in_many_orders([] {
        CHECK(run_add_up<0>(6, &back) == 21);
        CHECK(run_add_up<0>(1, &back) == 1 && back == 3);
    });
    MUST_RACE_OR(run_add_up<NO_WRITE_WAIT>(1, &back) == 1 && back == 0, "race: a read after a write, global",
                 run_add_up<NO_WRITE_WAIT>(1, &back));
    MUST_RACE("race", run_add_up<PLAIN_SUM>(3, &back));
}

enum { BF16_SUMS = 1, SUM_OVER_STORE };

/* Every block adds the same panel of 16 rows to a box that hangs over the end of the tensor. */
template <int BUG> UPI_HOPPER_KERNEL(32) void add_boxes(UPI_BY_VALUE upi_tensor_map to)
{
    UPI_SHARED(float, part);
    const int t = (int)threadIdx.x;
    for (int i = t; i < 512; i += 32) part[i] = (float)i;
    upi_fence_async_shared();
    __syncwarp();
    if (t == 0) {
        if (BUG == SUM_OVER_STORE) upi_tma_store(&to, 8, 5, 1, upi_shared_address(part));
        upi_tma_add(&to, 8, 5, 1, upi_shared_address(part));
        upi_bulk_commit();
        upi_bulk_wait<0>();
    }
}

/* [19 rows][2 heads][36 columns], rows 80 apart. */
template <int BUG> static int run_add_boxes(int blocks)
{
    alignas(16) static float sums[19 * 80];
    upipe_view v = upipe_view_packed(sums, BUG == BF16_SUMS ? UPIPE_BF16 : UPIPE_F32, 19, 2, 36);
    upi_tensor_map to;
    upipe_ctx c;
    int wrong = 0;
    memset(&c, 0, sizeof c);
    v.n_stride = 80, v.h_stride = 40;
    CHECK_STATUS(upi_tensor_map_make(&c, &to, v, 16), UPIPE_OK, c.err);
    for (int i = 0; i < 19 * 80; ++i) sums[i] = 1;
    LAUNCH(blocks, 32, 2048, add_boxes<BUG>(to));
    for (int i = 0; i < 19 * 80; ++i) {
        const int r = i / 80 - 5, k = i % 80 - 40 - 8, in = r >= 0 && k >= 0 && k < 28;
        wrong += sums[i] !=
                 (float)(1 + (in ? blocks * (int)upi_panel_at(16, r, k / 4) / 4 + blocks * (k % 4) : 0));
    }
    return wrong;
}

static void test_box_sums(void)
{
    in_many_orders([] { CHECK_INT(run_add_boxes<0>(1) + run_add_boxes<0>(5), 0); });
    MUST_FIND("a bulk sum into elements of 2 bytes", run_add_boxes<BF16_SUMS>(1));
    MUST_RACE("race: a", run_add_boxes<SUM_OVER_STORE>(3));
}

UPI_KERNEL(32, 1) void store_matrices(const uint32_t *in, uint16_t *out, int slip)
{
    UPI_SHARED(uint16_t, m);
    const int l = (int)threadIdx.x;
    uint32_t r[4];
    for (int i = 0; i < 4; ++i) r[i] = in[l * 4 + i];
    upi_store_matrix4(upi_shared_address(m) + (uint32_t)(l * 16 + slip), r);
    __syncwarp();
    for (int i = l; i < 256; i += 32) out[i] = m[i];
}

static void test_store_matrices(void)
{
    static uint32_t in[32 * 4];
    static uint16_t out[256];
    in_many_orders([] {
        for (int l = 0; l < 32; ++l)
            for (int m = 0; m < 4; ++m) {
                const uint32_t first = (uint32_t)(m * 64 + l / 4 * 8 + l % 4 * 2);
                in[l * 4 + m] = first | (first + 1) << 16;
            }
        LAUNCH(1, 32, 512, store_matrices(in, out, 0));
        for (int i = 0; i < 256; ++i) CHECK_INT(out[i], i);
    });
    MUST_FIND("misaligned: stmatrix", LAUNCH(1, 32, 512, store_matrices(in, out, 8)));
}

/* ---- products of warpgroups ---- */

enum {
    NO_GROUP_FENCE = 1,
    NO_PRODUCT_WAIT,
    LATE_FENCE,
    TOUCH_SUM,
    TOUCH_OPERAND,
    OVERWRITE_OPERAND,
    NO_PROXY_FENCE,
    NO_OPERAND_BARRIER,
    OTHER_OPERANDS,
    PART_OF_GROUP,
    SHORT_PRODUCT_WAIT,
    NO_SWIZZLE
};

/* Puts a matrix [rows][columns] into panels. */
UPI_DEVICE void put_panels(uint16_t *to, const float *from, int rows, int columns)
{
    for (int i = (int)threadIdx.x; i < rows * columns; i += 128) {
        const int r = i / columns, c = i % columns;
        to[upi_panel_at(rows, r, c / 8) / 2 + (uint32_t)(c % 8)] = upi_to_bf16(from[i]);
    }
}

/* d [64][N] = d + a [64][64] b [64][N], twice over. a: as rows [64][64], as columns [64 k][64], or from
 * registers; b: as rows [N][64] or as columns [64 k][N]. */
template <int N, int A, int B, int BUG>
UPI_HOPPER_KERNEL(128)
void warpgroup_product(const float *a, const float *b, float *d)
{
    UPI_SHARED(uint16_t, tile);
    const int t = (int)threadIdx.x, row = t / 32 * 16 + t % 32 / 4, pair = t % 4 * 2;
    const uint32_t at_a = upi_shared_address(tile), at_b = at_a + 8192;
    float sum[N / 2];
    uint32_t x[4][4];
    put_panels(tile, a, 64, 64);
    put_panels(tile + 4096, b, B ? 64 : N, B ? N : 64);
    if (BUG != NO_PROXY_FENCE) upi_fence_async_shared();
    if (BUG != NO_OPERAND_BARRIER) __syncthreads();
    for (int i = 0; i < N / 2; ++i) sum[i] = d[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + pair + i % 2];
    for (int k = 0; k < 4; ++k)
        for (int i = 0; i < 4; ++i) {
            const float *p = a + (row + i % 2 * 8) * 64 + k * 16 + pair + i / 2 * 8;
            x[k][i] = upi_pack_bf16(p[0], p[1]);
        }
    for (int turn = 0; turn < 2; ++turn) {
        if (BUG != NO_GROUP_FENCE && (BUG != LATE_FENCE || turn == 0)) upi_wgmma_fence();
        for (int k = 0; k < 4; ++k) {
            const uint32_t off = BUG == OTHER_OPERANDS && t == 77 ? 64 : 0;
            const uint64_t rows = upi_wgmma_rows(at_b + (uint32_t)k * 32 + off),
                           columns = upi_wgmma_columns(at_b + (uint32_t)k * 2048, 8192);
            const uint64_t right =
                (B ? columns : rows) & (BUG == NO_SWIZZLE ? ~((uint64_t)1 << 62) : ~(uint64_t)0);
            if (BUG == PART_OF_GROUP && t >= 96) continue;
            if (A == 2)
                upi_wgmma_rs<N, B>(sum, x[k], right, 1);
            else
                upi_wgmma_ss<N, A == 1, B>(sum,
                                           A ? upi_wgmma_columns(at_a + (uint32_t)k * 2048, 8192)
                                             : upi_wgmma_rows(at_a + (uint32_t)k * 32),
                                           right, 1);
        }
        upi_wgmma_commit();
        if (BUG == TOUCH_SUM && t == 9) sum[3] = 1;
        if (BUG == TOUCH_OPERAND && t == 9) x[2][1] = 1;
        if (BUG == OVERWRITE_OPERAND) tile[4096 + 100 + t] = 0;
        if (BUG == SHORT_PRODUCT_WAIT) upi_wgmma_wait<1>();
        if (BUG != NO_PRODUCT_WAIT && BUG != SHORT_PRODUCT_WAIT) upi_wgmma_wait<0>();
    }
    for (int i = 0; i < N / 2; ++i) d[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + pair + i % 2] = sum[i];
    if (BUG == SHORT_PRODUCT_WAIT) upi_wgmma_wait<0>();
}

template <int N, int A, int B, int BUG> static int run_product(void)
{
    static float a[64 * 64], b[64 * 256], d[64 * 256], want[64 * 256], turned[64 * 64];
    test_rng r = {7};
    int wrong = 0;
    for (int i = 0; i < 64 * 64; ++i) a[i] = (float)(test_below(&r, 17) - 8);
    for (int i = 0; i < 64 * N; ++i) b[i] = (float)(test_below(&r, 17) - 8);
    for (int i = 0; i < 64 * N; ++i) want[i] = d[i] = (float)(test_below(&r, 17) - 8);
    for (int i = 0; i < 64; ++i)
        for (int k = 0; k < 64; ++k) turned[k * 64 + i] = a[i * 64 + k];
    for (int i = 0; i < 64; ++i)
        for (int j = 0; j < N; ++j)
            for (int k = 0; k < 64; ++k)
                want[i * N + j] += 2 * a[i * 64 + k] * (B ? b[k * N + j] : b[j * 64 + k]);
    LAUNCH(1, 128, 8192 + (B ? (N + 63) / 64 * 8192 : 128 * N),
           warpgroup_product<N, A, B, BUG>(A == 1 ? turned : a, b, d));
    for (int i = 0; i < 64 * N; ++i) wrong += !(d[i] == want[i]);
    return wrong;
}

static void test_products(void)
{
    in_many_orders([] {
        CHECK_INT((run_product<64, 0, 0, 0>()), 0);
        CHECK_INT((run_product<64, 1, 1, 0>()), 0);
        CHECK_INT((run_product<128, 2, 1, 0>()), 0);
    });
    CHECK_INT((run_product<128, 1, 0, 0>()), 0);
    CHECK_INT((run_product<256, 0, 1, 0>()), 0);
    CHECK_INT((run_product<80, 0, 0, 0>()), 0);
    CHECK_INT((run_product<96, 2, 0, 0>()), 0);
    CHECK_INT((run_product<96, 2, 1, 0>()), 0);
    CHECK_INT((run_product<96, 1, 1, 0>()), 0);
    CHECK_INT((run_product<112, 0, 0, 0>()), 0);
    CHECK_INT((run_product<176, 0, 0, 0>()), 0);
    CHECK_INT((run_product<192, 2, 1, 0>()), 0);
    CHECK_INT((run_product<32, 2, 0, 0>()), 0);
    MUST_FIND("no wgmma.fence begins", run_product<64, 0, 0, NO_GROUP_FENCE>());
    MUST_FIND("no wgmma.fence begins", run_product<64, 0, 0, LATE_FENCE>());
    MUST_FIND("accumulator 3 of thread 9 changed", run_product<64, 0, 0, TOUCH_SUM>());
    MUST_FIND("register 1 of operand a of thread 9 changed", run_product<64, 2, 0, TOUCH_OPERAND>());
    MUST_FIND("operands differ between threads", run_product<64, 0, 0, OTHER_OPERANDS>());
    MUST_FIND("divergence: thread", run_product<64, 0, 0, PART_OF_GROUP>());
    MUST_FIND("before a wgmma was waited for", run_product<64, 0, 0, NO_PRODUCT_WAIT>());
    MUST_FIND("another swizzle", run_product<64, 0, 0, NO_SWIZZLE>());
    MUST_RACE("race: a read after a write, shared", run_product<64, 0, 0, NO_PROXY_FENCE>());
    MUST_RACE("race: a read after a write, shared", run_product<64, 0, 0, NO_OPERAND_BARRIER>());
    CHECK((run_product<64, 0, 0, SHORT_PRODUCT_WAIT>()) > 0);
    MUST_RACE_OR((run_product<64, 0, 0, OVERWRITE_OPERAND>() > 0), "a product of warpgroup 0 before",
                 run_product<64, 0, 0, OVERWRITE_OPERAND>());
}

/* ---- barriers that have numbers, and registers ---- */

enum { NO_NAMED_WAIT = 1, OTHER_SIZE, NO_NAMED_ARRIVE, NUMBER_0, HALF_WARP };

/* Two warps put words, two others read them, and give the place back. */
template <int BUG> UPI_HOPPER_KERNEL(128) void pass_words(int *out)
{
    UPI_SHARED(int, words);
    const int t = (int)threadIdx.x;
    for (int n = 0; n < 3; ++n) {
        if (t < 64) {
            if (n > 0) upi_barrier_sync(2, 128);
            words[t] = n * 64 + t;
            if (BUG != NO_NAMED_ARRIVE)
                upi_barrier_arrive(BUG == NUMBER_0 ? 0 : 1, BUG == HALF_WARP ? 100 : 128);
        } else {
            if (BUG != NO_NAMED_WAIT) upi_barrier_sync(1, BUG == OTHER_SIZE ? 96 : 128);
            out[n * 64 + t - 64] = words[(t - 64) ^ 33];
            if (n < 2) upi_barrier_arrive(2, 128);
        }
    }
}

template <int BUG> static int run_pass_words(void)
{
    static int out[3 * 64];
    int wrong = 0;
    LAUNCH(1, 128, 256, pass_words<BUG>(out));
    for (int i = 0; i < 3 * 64; ++i) wrong += out[i] != (i ^ 33);
    return wrong;
}

enum { TOO_MANY = 1, ODD_COUNT, UPWARDS };

template <int BUG> UPI_HOPPER_KERNEL(384) void move_registers(int *out)
{
    if (threadIdx.x < 128)
        upi_registers_less<BUG == UPWARDS ? 176 : BUG == ODD_COUNT ? 20 : 24>();
    else
        upi_registers_more<BUG == TOO_MANY ? 248 : 240>();
    out[threadIdx.x] = 1;
}

static void test_parts_of_blocks(void)
{
    static int out[384];
    in_many_orders([] {
        CHECK_INT(run_pass_words<0>(), 0);
        LAUNCH(1, 384, 0, move_registers<0>(out));
    });
    MUST_FIND("divergence: barrier 1 of", run_pass_words<OTHER_SIZE>());
    MUST_FIND("wait at a named barrier", run_pass_words<NO_NAMED_ARRIVE>());
    MUST_FIND("there is no barrier 0", run_pass_words<NUMBER_0>());
    MUST_FIND("barrier 1 of 100 threads", run_pass_words<HALF_WARP>());
    MUST_RACE("race", run_pass_words<NO_NAMED_WAIT>());
    MUST_FIND("registers more than there are", LAUNCH(1, 384, 0, move_registers<TOO_MANY>(out)));
    MUST_FIND("setmaxnreg to 20", LAUNCH(1, 384, 0, move_registers<ODD_COUNT>(out)));
    MUST_FIND("setmaxnreg from 168 down to 176", LAUNCH(1, 384, 0, move_registers<UPWARDS>(out)));
}

/* ---- addresses and stacks ---- */

UPI_KERNEL(32, 1) void read_wide(const char *from, uint64_t *out)
{
    out[threadIdx.x] = *(const uint64_t *)(from + threadIdx.x * 8);
}

UPI_KERNEL(32, 1) void write_to(int *to)
{
    if (threadIdx.x == 9) *to = 1;
}

__attribute__((noinline)) static int dig(const volatile char *above, int depth)
{
    volatile char buf[4096];
    buf[0] = buf[4095] = above[0];
    return depth == 0 ? buf[0] : dig(buf, depth - 1) + buf[4095];
}

static void test_addresses(void)
{
    alignas(16) static char from[512];
    static uint64_t out[32];
    static const char *volatile at = from; /* the compiler must not know */
    LAUNCH(1, 32, 0, read_wide(at + 8, out));
#ifndef __clang__ /* whose callbacks for aligned accesses are those for all */
    MUST_RACE("misaligned: 8 bytes", LAUNCH(1, 32, 0, read_wide(at + 4, out)));
#endif
    MUST_FIND("outside of the block's shared memory", LAUNCH(1, 32, 64, upi_shared_address(from)));
    static int *volatile nowhere = (int *)64;
    MUST_FIND_OR_ASAN("bad address 0x40", LAUNCH(1, 32, 0, write_to(nowhere)));
    MUST_FIND_OR_ASAN("stack ran over", LAUNCH(1, 1, 0, dig(at, 1000)));
}

/* ---- launches ---- */

UPI_KERNEL(1024, 1) void put(int *out, int value)
{
    out[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

/* `Name` tells kernels apart: each is allowed its own shared memory. */
template <int Name> UPI_KERNEL(64, 1) void fill_shared(int *out, int bytes)
{
    UPI_SHARED(int, s);
    for (int i = (int)threadIdx.x; i < bytes / 4; i += 64) s[i] = i;
    __syncthreads();
    out[threadIdx.x] = s[bytes / 4 - 1 - (int)threadIdx.x];
}

static void test_launches(void)
{
    upipe_ctx c;
    cudaStream_t stream;
    int *out = NULL, back[2048], value = 7, most = 0;
    memset(&c, 0, sizeof c);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    c.stream = stream;
    CHECK(cudaMalloc((void **)&out, sizeof back) == cudaSuccess);
    /* arguments are those of the launch, whenever it runs */
    CHECK_STATUS(UPI_LAUNCH(&c, put, 2, 1024, 0, out, value), UPIPE_OK, c.err);
    value = 8;
    CHECK(cudaMemcpyAsync(back, out, sizeof back, cudaMemcpyDeviceToHost, stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    for (int i = 0; i < 2048; ++i) CHECK_INT(back[i], 7);

    CHECK_STATUS(UPI_LAUNCH(&c, put, 1, 1025, 0, out, 1), UPIPE_ERR_BACKEND, c.err);
    CHECK_TEXT(c.err.text, "cudaErrorInvalidConfiguration");
    CHECK_TEXT(c.err.text, "launch of put");
    CHECK_STATUS(UPI_LAUNCH(&c, put, 0, 32, 0, out, 1), UPIPE_ERR_BACKEND, c.err);
    CHECK_STATUS(UPI_LAUNCH(&c, put, 1, 0, 0, out, 1), UPIPE_ERR_BACKEND, c.err);
    CHECK_STATUS(UPI_LAUNCH(&c, put, dim3(1, 65536), 32, 0, out, 1), UPIPE_ERR_BACKEND, c.err);
    CHECK_STATUS(UPI_LAUNCH(&c, put, dim3(1, 1, 65536), 32, 0, out, 1), UPIPE_ERR_BACKEND, c.err);
    CHECK_STATUS(UPI_LAUNCH(&c, put, 1u << 31, 32, 0, out, 1), UPIPE_ERR_BACKEND, c.err);
    CHECK_STATUS(UPI_LAUNCH(&c, put, 1, dim3(1, 1, 65), 0, out, 1), UPIPE_ERR_BACKEND, c.err);
    MUST_FIND("cut to 32 bits", UPI_LAUNCH(&c, put, (int64_t)1 << 32, 32, 0, out, 1));

    CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0) == cudaSuccess);
    CHECK_STATUS(UPI_LAUNCH(&c, (fill_shared<0>), 1, 64, 48 << 10, out, 48 << 10), UPIPE_OK, c.err);
    CHECK_STATUS(UPI_LAUNCH(&c, (fill_shared<0>), 1, 64, 64 << 10, out, 64 << 10), UPIPE_ERR_BACKEND, c.err);
    CHECK_TEXT(c.err.text, "cudaErrorInvalidValue");
    CHECK_STATUS(UPI_ALLOW_SHARED(&c, (fill_shared<0>), 64 << 10), UPIPE_OK, c.err);
    CHECK_STATUS(UPI_LAUNCH(&c, (fill_shared<0>), 1, 64, 64 << 10, out, 64 << 10), UPIPE_OK, c.err);
    CHECK_STATUS(UPI_LAUNCH(&c, (fill_shared<0>), 1, 64, (64 << 10) + 4, out, 4), UPIPE_ERR_BACKEND, c.err);
    CHECK_STATUS(UPI_LAUNCH(&c, (fill_shared<1>), 1, 64, 64 << 10, out, 64 << 10), UPIPE_ERR_BACKEND, c.err);
    CHECK_STATUS(UPI_ALLOW_SHARED(&c, (fill_shared<1>), most + 4), UPIPE_ERR_BACKEND, c.err);
    CHECK_STATUS(UPI_ALLOW_SHARED(&c, (fill_shared<1>), most), UPIPE_OK, c.err);
    CHECK_STATUS(UPI_LAUNCH(&c, (fill_shared<1>), 1, 64, most, out, most), UPIPE_OK, c.err);
    CHECK(cudaMemcpyAsync(back, out, 64 * sizeof(int), cudaMemcpyDeviceToHost, stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    for (int t = 0; t < 64; ++t) CHECK_INT(back[t], most / 4 - 1 - t);
    CHECK(cudaFree(out) == cudaSuccess);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

/* Host threads launch at the same time. */
static void test_threads(void)
{
    float out[4] = {0, 0, 0, 0}, want = run_sum<0>(1024);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
        threads.emplace_back([&out, i] {
            for (int k = 0; k < 5; ++k) out[i] = run_sum<0>(1024);
        });
    for (std::thread &t : threads) t.join();
    for (int i = 0; i < 4; ++i) CHECK(out[i] == want);
}

int main(int argc, char **argv)
{
    simt_seed = simt_eager = 0; /* every test has its own orders */
    test_begin(argc, argv);
    TEST(test_missing_ticket()); /* first: the count of OS threads is read once a process */
    TEST(test_places());
    TEST(test_sums());
    TEST(test_shuffles());
    TEST(test_divergence());
    TEST(test_load_matrices());
    TEST(test_multiply());
    TEST(test_numbers());
    TEST(test_copies());
    TEST(test_shared_races());
    TEST(test_between_blocks());
    TEST(test_mbarriers());
    TEST(test_time());
    TEST(test_boxes());
    TEST(test_bulk_sums());
    TEST(test_box_sums());
    TEST(test_store_matrices());
    TEST(test_products());
    TEST(test_parts_of_blocks());
    TEST(test_addresses());
    TEST(test_launches());
    TEST(test_threads());
    return test_end("simt");
}
