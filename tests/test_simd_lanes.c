/* test_simd_lanes.c -- tanh, and the widest lanes: they compute what upi_f8's do */
#include "lib/test.h"

#include "upipe/cpu/upipe_cpu_rows.h"

static float f32_of(uint32_t bits)
{
    return upi_f32_of_bits(bits);
}

/* ---- the widest lanes, against upi_f8 on each half ---- */

/* Special values, then any bits, then ordinary numbers. */
static void fill(test_rng *r, float *x, int round)
{
    static const float special[] = {0,      -0.0f, 1,   -1,      INFINITY, -INFINITY, NAN,     1e-40f,
                                    -1e30f, 3e38f, 126, -126.5f, -127,     60.5f,     -125.5f, 0x1p-126f};
    for (int i = 0; i < UPI_WIDE; ++i)
        x[i] = round < 8        ? special[(i * (round + 1) + round) % 16]
               : round % 2 == 0 ? f32_of((uint32_t)test_u64(r))
                                : (float)(test_normal(r) * 40);
}

/* Equal bits, or both NaN: whose NaN an operation hands on is not promised. */
static void check_lanes(const float *wide, const float *narrow, const char *name)
{
    for (int i = 0; i < UPI_WIDE; ++i)
        CHECK_SAY((isnan(wide[i]) && isnan(narrow[i])) || memcmp(&wide[i], &narrow[i], sizeof *wide) == 0,
                  "%s: lane %d is %a, not %a", name, i, (double)wide[i], (double)narrow[i]);
}

/* name(arguments) of upi_fw against name of upi_f8, where X, Y and Z load the operands */
#define SAME(name, wide_call, narrow_call)                                                           \
    do {                                                                                             \
        int half;                                                                                    \
        upi_fw_store(wide, wide_call);                                                               \
        for (half = 0; half < UPI_WIDE; half += UPI_LANES) upi_f8_store(narrow + half, narrow_call); \
        check_lanes(wide, narrow, name);                                                             \
    } while (0)
#define W(p) upi_fw_load(p)
#define N(p) upi_f8_load((p) + half)

static void test_arithmetic(const float *x, const float *y, const float *z)
{
    float wide[UPI_WIDE], narrow[UPI_WIDE];
    SAME("zero", upi_fw_zero(), upi_f8_zero());
    SAME("set1", upi_fw_set1(x[1]), upi_f8_set1(x[1]));
    SAME("broadcast", upi_fw_broadcast(x + 1), upi_f8_broadcast(x + 1));
    SAME("load", W(x), N(x));
    SAME("add", upi_fw_add(W(x), W(y)), upi_f8_add(N(x), N(y)));
    SAME("sub", upi_fw_sub(W(x), W(y)), upi_f8_sub(N(x), N(y)));
    SAME("mul", upi_fw_mul(W(x), W(y)), upi_f8_mul(N(x), N(y)));
    SAME("div", upi_fw_div(W(x), W(y)), upi_f8_div(N(x), N(y)));
    SAME("sqrt", upi_fw_sqrt(W(x)), upi_f8_sqrt(N(x)));
    SAME("fma", upi_fw_fma(W(x), W(y), W(z)), upi_f8_fma(N(x), N(y), N(z)));
    SAME("max", upi_fw_max(W(x), W(y)), upi_f8_max(N(x), N(y)));
    SAME("min", upi_fw_min(W(x), W(y)), upi_f8_min(N(x), N(y)));
    SAME("select equal", upi_fw_select(upi_fw_equal(W(x), W(y)), W(z), W(x)),
         upi_f8_select(upi_f8_equal(N(x), N(y)), N(z), N(x)));
    SAME("exp2", upi_fw_exp2(W(x)), upi_f8_exp2(N(x)));
    SAME("exp", upi_fw_exp(W(x)), upi_f8_exp(N(x)));
}

static void test_places(const float *x)
{
    float wide[UPI_WIDE], narrow[UPI_WIDE], want[UPI_WIDE];
    for (int limit = -2; limit < UPI_WIDE + 2; ++limit) {
        upi_fw_store(wide, upi_fw_select(upi_wide_above(limit), upi_fw_set1(1), upi_fw_zero()));
        for (int i = 0; i < UPI_WIDE; ++i) CHECK_INT(wide[i], i > limit);
    }
    for (int i = 0; i < UPI_WIDE; ++i) want[i] = x[i ^ 1];
    upi_fw_store(wide, upi_fw_swap(upi_fw_load(x)));
    CHECK_BYTES(wide, want, sizeof want);
    for (int count = UPI_LANES; count <= UPI_WIDE; count += UPI_LANES) {
        memset(want, 0, sizeof want);
        memcpy(want, x, (size_t)count * sizeof *want);
        upi_fw_store(wide, upi_fw_load_rest(x, count));
        CHECK_BYTES(wide, want, sizeof want);
        memset(narrow, 0, sizeof narrow);
        upi_fw_store_rest(narrow, count, upi_fw_load(x));
        CHECK_BYTES(narrow, want, sizeof want);
    }
}

/* tanh within 2 units in the last place, for numbers of every size up to where it is 1, and at the ends. */
static void test_tanh(void)
{
    static const float ends[16] = {0, 1e-40f,  10,  100,  3e38f,  INFINITY,  NAN,  0.8f,
                                   0, -1e-40f, -10, -100, -3e38f, -INFINITY, -NAN, -0.8f};
    double worst = 0;
    uint32_t bits;
    float x[16], y[16];
    for (bits = 0; bits < 0x41200000u; bits += 1000 * UPI_WIDE) { /* up to 10 */
        for (int i = 0; i < UPI_WIDE; ++i)
            x[i] = f32_of((bits + (uint32_t)i * 999) | (i & 1 ? 0x80000000u : 0));
        upi_fw_store(y, upi_fw_tanh(upi_fw_load(x)));
        for (int i = 0; i < UPI_WIDE; ++i) {
            double want = tanh((double)x[i]), size = fabs(want);
            float near = (float)size;
            worst = fmax(worst, fabs((double)y[i] - want) / ((double)nextafterf(near, 2) - (double)near));
        }
    }
    CHECK_SAY(worst <= 2, "tanh is off by %g units in the last place", worst);
    for (int i = 0; i < 16; i += UPI_WIDE) upi_fw_store(y + i, upi_fw_tanh(upi_fw_load(ends + i)));
    CHECK(y[0] == 0 && y[1] == 1e-40f && y[2] == 1 && y[3] == 1 && y[4] == 1 && y[5] == 1 && isnan(y[6]));
    for (int i = 0; i < 8; ++i) CHECK(y[8 + i] == -y[i] || (i == 6 && isnan(y[14])));
}

/* By storage type: as eight lanes do, and a row's last few as whole vectors do. */
static void test_storage(const float *x)
{
    for (int dtype = UPIPE_F32; dtype <= UPIPE_BF16; ++dtype) {
        upipe_dtype t = (upipe_dtype)dtype;
        float wide[UPI_WIDE], narrow[UPI_WIDE], some[UPI_WIDE], row[UPI_WIDE];
        size_t bytes = UPI_WIDE * upipe_dtype_bytes(t);
        upi_fw_put(wide, t, 0, upi_fw_load(x));
        for (int half = 0; half < UPI_WIDE; half += UPI_LANES)
            upi_f8_put(narrow, t, half, upi_f8_load(x + half));
        CHECK_BYTES(wide, narrow, bytes);
        upi_fw_store(some, upi_fw_get(wide, t, 0));
        for (int half = 0; half < UPI_WIDE; half += UPI_LANES)
            upi_f8_store(row + half, upi_f8_get(wide, t, half));
        check_lanes(some, row, upipe_dtype_name(t));
        for (int count = 1; count <= UPI_WIDE; ++count) {
            size_t part = (size_t)count * upipe_dtype_bytes(t);
            memset(narrow, 0xff, sizeof narrow);
            memset(row, 0xff, sizeof row);
            upi_row_put(narrow, t, 0, count, upi_row_get(wide, t, 0, count));
            upi_row_put(row, t, 0, UPI_WIDE, upi_row_get(wide, t, 0, UPI_WIDE));
            for (int i = 0; i < count; ++i) {
                float a = upipe_cpu_get(narrow, t, i), b = upipe_cpu_get(row, t, i);
                CHECK((isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof a) == 0);
            }
            memset(row, 0xff, sizeof row);
            CHECK_BYTES((char *)narrow + part, row, bytes - part);
        }
    }
}

int main(int argc, char **argv)
{
    test_rng r;
    float x[UPI_WIDE], y[UPI_WIDE], z[UPI_WIDE];
    r.state = (uint64_t)test_env("UPIPE_SEED", 1);
    printf("test_simd_lanes: %s, %d wide, seed %llu\n", upi_cpu_simd_name(), UPI_WIDE,
           (unsigned long long)r.state);
    test_begin(argc, argv);
    TEST(test_tanh());
    for (int round = 0; round < 400; ++round) {
        fill(&r, x, round);
        fill(&r, y, round + 3);
        fill(&r, z, round + 5);
        TEST(test_arithmetic(x, y, z));
        TEST(test_places(x));
        TEST(test_storage(x));
    }
    return test_end("test_simd_lanes");
}
