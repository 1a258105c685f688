/* probe.cpp -- each instruction that the kernels for 9.0 are built on, alone: integers in, exact results out
 *
 *     probe [NAME...]      all of them, or these; a line each
 *     probe --list         their names, one a line: a fault takes those of its process alone
 *
 * If attention is wrong on a device, this says whether it is a descriptor, a swizzle, the fill of a box, a fragment or a
 * barrier. nvcc compiles it for devices, and a host compiler for the emulator, so that both must agree. On a device it
 * also prints what a wait for bulk copies takes, from the commit until the source has been read, and until the sum is
 * in memory (`waits`), which no documentation says.
 */
#ifdef UPIPE_CUDA_SEAMS
#include "upipe/cuda/upipe_cuda_attn_bwd.h"
#else
#include "upipe/cuda/upipe_cuda_hopper.h" /* nvcc would compile every kernel */
#endif

#include "../lib/test.h"

static upipe_ctx ctx;
static uint64_t digest = UPIPE_HASH; /* of all that came back */

/* An array on the device, and its numbers here. */
template <class T> struct array {
    T *on, *here;
    int n;
    explicit array(int count) : on(NULL), here((T *)calloc((size_t)count, sizeof(T))), n(count)
    {
        CHECK(cudaMalloc((void **)&on, (size_t)n * sizeof(T)) == cudaSuccess);
    }
    array(const array &) = delete;
    ~array()
    {
        CHECK(cudaFree(on) == cudaSuccess);
        free(here);
    }
    void put(void)
    {
        CHECK(cudaMemcpy(on, here, (size_t)n * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
        CHECK(cudaDeviceSynchronize() == cudaSuccess); /* the copy's stream is not the kernels' */
    }
    void get(void)
    {
        CHECK(cudaMemcpy(here, on, (size_t)n * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
        digest = upipe_hash_bytes(digest, here, (size_t)n * sizeof(T));
    }
};

/* Waits, and says why a launch or the kernel failed. */
static int ran(upipe_status s)
{
    if (s == UPIPE_OK)
        s = upipe_cuda_check(&ctx.err, cudaStreamSynchronize((cudaStream_t)ctx.stream), "the kernel");
    return CHECK_SAY(s == UPIPE_OK, "%s", ctx.err.text);
}

template <class K> static upipe_status allow(K kernel, int bytes)
{
    return UPI_ALLOW_SHARED(&ctx, kernel, bytes);
}

/* ---- products of warpgroups ---- */

/* Puts a matrix [rows][columns] of small integers into panels. */
template <int ROWS, int COLUMNS> UPI_DEVICE void put_panels(upi_bf16 *to, const int *from)
{
    for (int i = (int)threadIdx.x; i < ROWS * COLUMNS; i += 128) {
        const int r = i / COLUMNS, c = i % COLUMNS;
        to[upi_panel_at(ROWS, r, c / 8) / 2 + (uint32_t)(c % 8)] = upi_to_bf16((float)from[i]);
    }
}

/* d [64][N] = a [64][64] b [64][N]. A: 0 as rows [64][64], 1 as columns [64 k][64], 2 from registers; B: 0 as rows
 * [N][64], 1 as columns [64 k][N]. */
template <int N, int A, int B> UPI_HOPPER_KERNEL(128) void product(const int *a, const int *b, int *d)
{
#if UPI_HOPPER_CODE
    UPI_SHARED(upi_bf16, tile);
    const int t = (int)threadIdx.x, row = t / 32 * 16 + t % 32 / 4, pair = t % 4 * 2;
    const uint32_t at_a = upi_shared_address(tile), at_b = at_a + 8192;
    float sum[N / 2];
    uint32_t x[4][4];
    put_panels<64, 64>(tile, a);
    put_panels<B ? 64 : N, B ? N : 64>(tile + 4096, b);
    upi_fence_async_shared();
    __syncthreads();
    UPI_UNROLL
    for (int i = 0; i < N / 2; ++i) sum[i] = 0;
    UPI_UNROLL
    for (int k = 0; k < 4; ++k) UPI_UNROLL
    for (int i = 0; i < 4; ++i) {
        const int *p = a + (row + i % 2 * 8) * 64 + k * 16 + pair + i / 2 * 8;
        x[k][i] = upi_pack_bf16((float)p[0], (float)p[1]);
    }
    upi_wgmma_fence();
    UPI_UNROLL
    for (int k = 0; k < 4; ++k) {
        const uint64_t right =
            B ? upi_wgmma_columns(at_b + (uint32_t)k * 2048, 8192) : upi_wgmma_rows(at_b + (uint32_t)k * 32);
        if (A == 2)
            upi_wgmma_rs<N, B>(sum, x[k], right, k > 0);
        else
            upi_wgmma_ss<N, A == 1, B>(sum,
                                       A ? upi_wgmma_columns(at_a + (uint32_t)k * 2048, 8192)
                                         : upi_wgmma_rows(at_a + (uint32_t)k * 32),
                                       right, k > 0);
    }
    upi_wgmma_commit();
    upi_wgmma_wait<0>();
    UPI_UNROLL
    for (int i = 0; i < N / 2; ++i) d[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + pair + i % 2] = (int)sum[i];
#endif
}

template <int N, int A, int B> static int run_product(void)
{
    array<int> a(64 * 64), turned(64 * 64), b(64 * N), d(64 * N);
    const int shared = 8192 + (B ? (N + 63) / 64 * 8192 : 128 * N);
    test_rng r = {7};
    int wrong = 0;
    for (int i = 0; i < 64 * 64; ++i) turned.here[i % 64 * 64 + i / 64] = a.here[i] = test_below(&r, 17) - 8;
    for (int i = 0; i < 64 * N; ++i) b.here[i] = test_below(&r, 17) - 8;
    a.put(), turned.put(), b.put();
    if (!ran(allow(product<N, A, B>, shared))) return 1;
    if (!ran(UPI_LAUNCH(&ctx, (product<N, A, B>), 1, 128, (size_t)shared, A == 1 ? turned.on : a.on, b.on,
                        d.on)))
        return 1;
    d.get();
    for (int i = 0; i < 64; ++i)
        for (int j = 0; j < N; ++j) {
            int sum = 0;
            for (int k = 0; k < 64; ++k) sum += a.here[i * 64 + k] * b.here[B ? k * N + j : j * 64 + k];
            wrong += d.here[i * N + j] != sum;
        }
    return wrong;
}

/* Byte offset of 16-byte chunk c of row r in a panel of 128 bytes a row. */
static int swizzled(int r, int c)
{
    return r * 128 + ((c ^ r) & 7) * 16;
}

/* ---- boxes: loads with zeros outside, stores that write nothing there, sums ---- */

enum { BOX_ROWS = 37, BOX_STEP = 3 * 48 }; /* [rows][3 heads][40 columns], heads 48 apart */

typedef struct box_args {
    upi_tensor_map from, to;
    int y, y_to;
    int *seen; /* [16][64], the panel as it lies in shared memory */
} box_args;

UPI_HOPPER_KERNEL(64) void move_box(UPI_BY_VALUE box_args a)
{
#if UPI_HOPPER_CODE
    UPI_SHARED(uint16_t, tile);
    const int t = (int)threadIdx.x;
    const uint32_t at = upi_shared_address(tile), full = at + 2048;
    if (t == 0) upi_mbarrier_init(full, 1);
    upi_mbarrier_fence();
    __syncthreads();
    if (t == 0) {
        upi_mbarrier_arrive_expect(full, 2048);
        upi_tma_load(at, &a.from, 8, a.y, 1, full);
    }
    upi_mbarrier_wait(full, 0);
    for (int i = t; i < 1024; i += 64) {
        a.seen[i] = tile[i];
        tile[i] = (uint16_t)(tile[i] * 2);
    }
    upi_fence_async_shared();
    __syncthreads();
    if (t == 0) {
        upi_tma_store(&a.to, 8, a.y_to, 2, at);
        upi_bulk_commit();
        upi_bulk_wait_read<0>();
    }
#endif
}

/* The box from row y on, half outside of the tensor, goes to row y_to on. */
static int run_boxes(int y, int y_to)
{
    array<uint16_t> from(BOX_ROWS * BOX_STEP), to(BOX_ROWS * BOX_STEP);
    array<int> seen(1024);
    upipe_view v = upipe_view_packed(from.on, UPIPE_BF16, BOX_ROWS, 3, 40);
    box_args a;
    int wrong = 0;
    v.h_stride = 48, v.n_stride = BOX_STEP;
    for (int i = 0; i < from.n; ++i) from.here[i] = (uint16_t)(i + 1);
    from.put(), to.put();
    if (!ran(upi_tensor_map_make(&ctx, &a.from, v, 16))) return 1;
    v.data = to.on;
    if (!ran(upi_tensor_map_make(&ctx, &a.to, v, 16))) return 1;
    a.y = y, a.y_to = y_to, a.seen = seen.on;
    if (!ran(UPI_LAUNCH(&ctx, move_box, 1, 64, (size_t)(2048 + 8), a))) return 1;
    seen.get(), to.get();
    for (int r = 0; r < 16; ++r)
        for (int k = 0; k < 64; ++k) {
            const int in = y + r >= 0 && y + r < BOX_ROWS && 8 + k < 40;
            wrong += seen.here[swizzled(r, k / 8) / 2 + k % 8] !=
                     (in ? from.here[(y + r) * BOX_STEP + 48 + 8 + k] : 0);
        }
    for (int i = 0; i < to.n; ++i) {
        const int k = i % BOX_STEP - 96, r = i / BOX_STEP - y_to;
        const int in = r >= 0 && r < 16 && k >= 8 && k < 40 && y + r >= 0 && y + r < BOX_ROWS;
        wrong += to.here[i] != (in ? (uint16_t)(2 * from.here[(y + r) * BOX_STEP + 48 + k]) : 0);
    }
    return wrong;
}

static int run_box(void)
{
    return run_boxes(0, 0) + run_boxes(30, 3) + run_boxes(-5, 30);
}

/* Every block adds the same panel of 16 rows to a box that hangs over the end of the tensor, and 64 numbers that it has
 * loaded as plain bytes to `plain`. */
UPI_HOPPER_KERNEL(32) void add_boxes(UPI_BY_VALUE upi_tensor_map to, const float *numbers, float *plain)
{
#if UPI_HOPPER_CODE
    UPI_SHARED(float, part);
    const int t = (int)threadIdx.x;
    const uint32_t at = upi_shared_address(part), full = at + 2048 + 256;
    if (t == 0) upi_mbarrier_init(full, 1);
    upi_mbarrier_fence();
    for (int i = t; i < 512; i += 32) part[i] = (float)i;
    upi_fence_async_shared();
    __syncwarp();
    if (t == 0) {
        upi_mbarrier_arrive_expect(full, 256);
        upi_bulk_load(at + 2048, numbers, 256, full);
        upi_mbarrier_wait(full, 0);
        upi_tma_add(&to, 8, 5, 1, at);
        upi_bulk_commit();
        upi_bulk_add(plain, at + 2048, 256);
        upi_bulk_commit();
        upi_bulk_wait<0>();
    }
#endif
}

static int run_sums(void)
{
    enum { BLOCKS = 7, STEP = 80, ROWS = 19 }; /* [rows][2 heads][36 columns], heads 40 apart */
    array<float> sums(ROWS * STEP), numbers(64), plain(64);
    upipe_view v = upipe_view_packed(sums.on, UPIPE_F32, ROWS, 2, 36);
    upi_tensor_map to;
    int wrong = 0;
    v.n_stride = STEP, v.h_stride = 40;
    for (int i = 0; i < sums.n; ++i) sums.here[i] = 1;
    for (int i = 0; i < 64; ++i) numbers.here[i] = (float)(3 * i - 20);
    sums.put(), numbers.put(), plain.put();
    if (!ran(upi_tensor_map_make(&ctx, &to, v, 16))) return 1;
    if (!ran(UPI_LAUNCH(&ctx, add_boxes, BLOCKS, 32, (size_t)(2048 + 256 + 8), to, numbers.on, plain.on)))
        return 1;
    sums.get(), plain.get();
    for (int i = 0; i < sums.n; ++i) {
        const int r = i / STEP - 5, k = i % STEP - 40 - 8, in = r >= 0 && k >= 0 && k < 28;
        wrong += sums.here[i] != (float)(1 + (in ? BLOCKS * (swizzled(r, k / 4) / 4 + k % 4) : 0));
    }
    for (int i = 0; i < 64; ++i) wrong += plain.here[i] != (float)(BLOCKS * (3 * i - 20));
    return wrong;
}

/* ---- matrices of 8x8 into shared memory and back ---- */

UPI_HOPPER_KERNEL(32) void matrices(int *out)
{
#if UPI_HOPPER_CODE
    UPI_SHARED(uint16_t, m);
    const int l = (int)threadIdx.x;
    const uint32_t at = upi_shared_address(m) + (uint32_t)(l * 16);
    uint32_t r[4], same[4], turned[4];
    for (int i = 0; i < 4; ++i) r[i] = (uint32_t)(i * 64 + l * 2) | (uint32_t)(i * 64 + l * 2 + 1) << 16;
    upi_store_matrix4(at, r);
    __syncwarp();
    for (int i = l; i < 256; i += 32) out[i] = m[i];
    upi_load_matrix4(same, at);
    upi_load_matrix4_trans(turned, at);
    for (int i = 0; i < 4; ++i) {
        out[256 + l * 4 + i] = same[i] == r[i];
        out[384 + l * 4 + i] = (int)turned[i];
    }
#endif
}

static int run_matrices(void)
{
    array<int> out(512);
    int wrong = 0;
    out.put();
    if (!ran(UPI_LAUNCH(&ctx, matrices, 1, 32, (size_t)512, out.on))) return 1;
    out.get();
    for (int i = 0; i < 256; ++i) wrong += out.here[i] != i;
    for (int l = 0; l < 32; ++l)
        for (int i = 0; i < 4; ++i) {
            const int first = i * 64 + l % 4 * 16 + l / 4; /* of the transposed matrix, row l / 4 */
            wrong +=
                out.here[256 + l * 4 + i] != 1 || out.here[384 + l * 4 + i] != (first | (first + 8) << 16);
        }
    return wrong;
}

/* ---- barriers and registers: one warpgroup loads, two take turns ---- */

enum { ROUNDS = 50, SLOTS = 3 };

UPI_HOPPER_KERNEL(384) void relay(const int *in, int *out)
{
#if UPI_HOPPER_CODE
    UPI_SHARED(
        int,
        slot); /* SLOTS of 128 numbers; behind them a barrier a slot that is full, and one that is free */
    const int t = (int)threadIdx.x, group = t / 128;
    const uint32_t at = upi_shared_address(slot), full = at + SLOTS * 512, free_ = full + SLOTS * 8;
    if (t < SLOTS)
        upi_mbarrier_init(full + (uint32_t)t * 8, 1), upi_mbarrier_init(free_ + (uint32_t)t * 8, 8);
    upi_mbarrier_fence();
    __syncthreads();
    if (group == 0) {
        upi_registers_less<24>();
        if (t == 0)
            for (int n = 0; n < ROUNDS; ++n) {
                const uint32_t s = (uint32_t)(n % SLOTS);
                upi_mbarrier_wait(free_ + s * 8, (uint32_t)(n / SLOTS % 2 ^ 1));
                upi_mbarrier_arrive_expect(full + s * 8, 512);
                upi_bulk_load(at + s * 512, in + n * 128, 512, full + s * 8);
            }
    } else {
        upi_registers_more<240>();
        for (int n = 0; n < ROUNDS; ++n) {
            const uint32_t s = (uint32_t)(n % SLOTS);
            int x;
            while (!upi_mbarrier_test(full + s * 8, (uint32_t)(n / SLOTS % 2))) upi_pause();
            x = slot[(int)s * 128 + t % 128];
            __syncwarp();
            if (t % 32 == 0) upi_mbarrier_arrive(free_ + s * 8);
            /* group 1 writes first, group 2 adds; a second arrival before the first is waited for would count for it */
            if (group == 1 && n > 0) upi_barrier_sync(2, 256);
            if (group == 2) upi_barrier_sync(1, 256);
            out[n * 128 + t % 128] = group == 1 ? 2 * x : out[n * 128 + t % 128] + x;
            if (group == 1) upi_barrier_arrive(1, 256);
            if (group == 2 && n + 1 < ROUNDS) upi_barrier_arrive(2, 256);
        }
    }
#endif
}

static int run_relay(void)
{
    array<int> in(ROUNDS * 128), out(ROUNDS * 128);
    int wrong = 0;
    for (int i = 0; i < in.n; ++i) in.here[i] = 7 * i - 1000;
    in.put(), out.put();
    if (!ran(UPI_LAUNCH(&ctx, relay, 1, 384, (size_t)(SLOTS * (512 + 16)), in.on, out.on))) return 1;
    out.get();
    for (int i = 0; i < out.n; ++i) wrong += out.here[i] != 3 * (7 * i - 1000);
    return wrong;
}

/* ---- what a wait takes ---- */

#ifndef UPIPE_CUDA_SEAMS
/* Cycles from the commit of a sum of 16 KiB until it has been read, and until it is in memory. */
UPI_HOPPER_KERNEL(32) void waits(float *sums, long long *cycles)
{
#if UPI_HOPPER_CODE
    UPI_SHARED(float, part);
    const int t = (int)threadIdx.x;
    for (int i = t; i < 4096; i += 32) part[i] = 1;
    upi_fence_async_shared();
    __syncwarp();
    for (int n = 0; n < 20 && t == 0; ++n) {
        const long long start = clock64();
        upi_bulk_add(sums, upi_shared_address(part), 16384);
        upi_bulk_commit();
        upi_bulk_wait_read<0>();
        cycles[n] = clock64() - start;
        upi_bulk_wait<0>();
        cycles[20 + n] = clock64() - start;
    }
#endif
}

static int run_waits(void)
{
    array<float> sums(4096);
    array<long long> cycles(40);
    int wrong = 0;
    sums.put();
    if (!ran(UPI_LAUNCH(&ctx, waits, 1, 32, (size_t)16384, sums.on, cycles.on))) return 1;
    sums.get(), cycles.get();
    for (int i = 0; i < sums.n; ++i) wrong += sums.here[i] != 20;
    printf("a bulk sum of 16 KiB: its source is read after %lld cycles, it is in memory after %lld\n",
           cycles.here[15], cycles.here[35]);
    return wrong;
}
#else
static int run_waits(void)
{
    return 0; /* the emulator's time says nothing */
}
#endif

/* ---- the list ---- */

typedef struct probe {
    const char *name;
    int (*run)(void); /* how many numbers are wrong */
} probe;

#define PRODUCT(n, a, b)                                \
    {                                                   \
        "wgmma " #n " " #a " " #b, run_product<n, a, b> \
    }

static const probe probes[] = {{"box", run_box},
                               {"sums", run_sums},
                               {"matrices", run_matrices},
                               {"relay", run_relay},
                               {"waits", run_waits},
                               /* a: rows, columns, registers; b: rows, columns */
                               PRODUCT(64, 0, 0),
                               PRODUCT(64, 0, 1),
                               PRODUCT(64, 1, 0),
                               PRODUCT(64, 1, 1),
                               PRODUCT(64, 2, 0),
                               PRODUCT(64, 2, 1),
                               PRODUCT(32, 2, 0),
                               PRODUCT(80, 0, 0),
                               PRODUCT(96, 2, 0),
                               PRODUCT(96, 2, 1), /* the second panel filled to the half */
                               PRODUCT(96, 0, 1),
                               PRODUCT(96, 1, 1),
                               PRODUCT(112, 0, 0),
                               PRODUCT(128, 0, 0),
                               PRODUCT(128, 1, 1),
                               PRODUCT(128, 2, 1),
                               PRODUCT(176, 0, 0),
                               PRODUCT(192, 2, 1),
                               PRODUCT(256, 2, 1)};

int main(int argc, char **argv)
{
    cudaStream_t stream;
    int major = 0, wrong, found = 0;
    for (const probe &p : probes)
        if (argc == 2 && strcmp(argv[1], "--list") == 0) puts(p.name), ++found;
    if (found > 0) return 0;
    setenv("FAKE_CAPABILITY", "90", 1);
    CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess);
    if (major != 9) {
        printf("device of compute capability %d: nothing to test\n", major);
        return test_end("cuda_probe");
    }
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    ctx.stream = stream;
    for (const probe &p : probes) {
        int asked = argc == 1;
        for (int i = 1; i < argc; ++i) asked |= strcmp(argv[i], p.name) == 0;
        if (!asked) continue;
        ++found;
        wrong = p.run();
        CHECK_SAY(wrong == 0, "%s: %d numbers are wrong", p.name, wrong);
        printf("%s: %s\n", p.name, wrong == 0 ? "as it should be" : "WRONG");
        fflush(stdout);
    }
    CHECK_SAY(argc == 1 || found == argc - 1, "%d of these names are a probe's", found);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    printf("digest %016llx\n", (unsigned long long)digest);
    return test_end("cuda_probe");
}
