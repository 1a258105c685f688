/* test_train_ops.c -- the CPU operations around attention: train_ops.h, and ids that their tables lack */
#include "train_ops.h"

#include "upipe/cpu/upipe_cpu.h"

/* A target or a token out of range is refused before anything is touched. */
static void check_ranges(upipe_ctx *c)
{
    float room[64], loss[2] = {-7, -7};
    int32_t ids[2] = {1, 8};
    upipe_view x = upipe_view_packed(room, UPIPE_F32, 2, 1, 8), y = x;
    int i;
    for (i = 0; i < 64; ++i) room[i] = 5;
    y.data = room + 32;
    CHECK_STATUS(cross_entropy(c, x, x, loss, ids, 1), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "target 8 of row 1, of 8 columns");
    CHECK(loss[0] == -7 && loss[1] == -7);
    ids[1] = 2;
    CHECK_STATUS(c->ops->embed(c, x, y, ids), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "embed: token 2 of row 1, of a table of 2 rows");
    CHECK_STATUS(c->ops->embed_bwd(c, y, x, ids), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "embed_bwd: token 2 of row 1, of a table of 2 rows");
    ids[1] = -1;
    CHECK_STATUS(c->ops->embed(c, x, y, ids), UPIPE_ERR_ARG, c->err);
    CHECK_TEXT(c->err.text, "token -1 of row 1");
    CHECK_STATUS(c->ops->embed_bwd(c, y, x, ids), UPIPE_ERR_ARG, c->err);
    for (i = 0; i < 64; ++i) CHECK(room[i] == 5);
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
    printf("test_train_ops: %s, seed %llu\n", ops.name, (unsigned long long)r.state);
    check_train_ops(&r, &c, 32003);
    check_train_statuses(&c);
    check_ranges(&c);
    return test_end("test_train_ops");
}
