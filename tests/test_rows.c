/* test_rows.c -- the CPU row operations: rows.h, and the angles that rope walks along */
#include "rows.h"

#include "upipe/cpu/upipe_cpu.h"

/* Angles, in f64 and to the bit, belong to a position: it does not matter where the walk began. */
static void check_rope_angles(void)
{
    static const int64_t starts[] = {0, 1, 63, 64, 1000000 - 40};
    static upi_rope_angles walk, jump;
    float row[64];
    int which, i, p;
    for (which = 0; which < 5; ++which) {
        upipe_rope call = rope_of(upipe_view_packed(row, UPIPE_F32, 1, 1, 64), starts[which], 0, 0);
        upi_rope_begin(&walk, &call);
        for (i = 0; i < 200; ++i, upi_rope_next(&walk)) {
            call.pos0 = starts[which] + i;
            upi_rope_begin(&jump, &call);
            CHECK_INT(walk.position, call.pos0);
            CHECK_BYTES(walk.cos_now, jump.cos_now, sizeof walk.cos_now);
            CHECK_BYTES(walk.sin_now, jump.sin_now, sizeof walk.sin_now);
            for (p = 0; p < 32; ++p) {
                double angle = (double)call.pos0 * pow(10000, -2.0 * p / 64), near = 3e-14 + angle * 0x1p-52;
                CHECK(fabs(walk.cos_now[p] - cos(angle)) <= near &&
                      fabs(walk.sin_now[p] - sin(angle)) <= near);
            }
        }
    }
}

int main(void)
{
    test_rng r;
    upipe_ops ops;
    upipe_ctx c;
    memset(&c, 0, sizeof c);
    upipe_cpu_ops(&ops);
    c.ops = &ops;
    r.state = (uint64_t)test_env("UPIPE_SEED", 1);
    printf("test_rows: %s, seed %llu\n", ops.name, (unsigned long long)r.state);
    check_rows(&r, &c);
    check_rope_angles();
    check_row_statuses(&c);
    return test_end("test_rows");
}
