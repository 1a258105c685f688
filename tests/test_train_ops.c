/* test_train_ops.c -- the CPU operations around attention: lib/train_ops.h, ids beyond their tables. Threads of the host:
 * test_rows.c */
#include "lib/train_ops.h"

#include "upipe/cpu/upipe_cpu.h"

/* A target or a token out of range is refused before anything is touched. */
static void check_ranges(upipe_ctx *c)
{
    float buf[64], loss[2] = {-7, -7};
    int32_t ids[2] = {1, 8};
    upipe_view x = upipe_view_packed(buf, UPIPE_F32, 2, 1, 8), y = x;
    for (int i = 0; i < 64; ++i) buf[i] = 5;
    y.data = buf + 32;
    CHECK_REFUSED(cross_entropy(c, x, x, loss, ids, 1), UPIPE_ERR_ARG, c->err,
                  "target 8 of row 1, of 8 columns");
    CHECK(loss[0] == -7 && loss[1] == -7);
    ids[1] = 2;
    CHECK_REFUSED(c->ops->embed(c, x, y, ids), UPIPE_ERR_ARG, c->err,
                  "embed: token 2 of row 1, of a table of 2 rows");
    CHECK_REFUSED(c->ops->embed_bwd(c, y, x, ids), UPIPE_ERR_ARG, c->err,
                  "embed_bwd: token 2 of row 1, of a table of 2 rows");
    ids[1] = -1;
    CHECK_REFUSED(c->ops->embed(c, x, y, ids), UPIPE_ERR_ARG, c->err, "token -1 of row 1");
    CHECK_STATUS(c->ops->embed_bwd(c, y, x, ids), UPIPE_ERR_ARG, c->err);
    for (int i = 0; i < 64; ++i) CHECK(buf[i] == 5);
}

int main(int argc, char **argv)
{
    test_rng r;
    upipe_ops ops;
    upipe_ctx c = {0};
    upipe_cpu_ops(&ops);
    c.ops = &ops;
    r.state = (uint64_t)test_env("UPIPE_SEED", 1);
    printf("test_train_ops: %s, seed %llu\n", ops.name, (unsigned long long)r.state);
    test_begin(argc, argv);
    TEST(check_train_ops(&r, &c, 32003));
    TEST(check_train_statuses(&c));
    TEST(check_ranges(&c));
    return test_end("test_train_ops");
}
