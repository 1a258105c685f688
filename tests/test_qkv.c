/* test_qkv -- attention of the host's own Q, K, V (upipe_qkv.h): what is refused; stages packed and unpacked; views of a
 * fused product. test_property draws random ones.
 */
#include "lib/context.h"

typedef struct alone {
    upipe_plan plan;
    upipe_ops ops;
    upipe_dry *dry;
    upipe_qkv a;
    upipe_qkv_grads g;
} alone;

static void alone_make(alone *x, int ranks)
{
    static float none[1];
    upipe_plan_desc d = {.tokens = 8, .ranks = ranks, .heads = 4, .kv_heads = 2, .head_dim = 32, .v_dim = 40};
    upipe_status s;
    upipe_err err;
    memset(x, 0, sizeof *x);
    CHECK_STATUS(upipe_plan_init(&x->plan, &d, &err), UPIPE_OK, err);
    x->ops = cpu_table();
    x->dry = dry_begin(&x->plan, &x->ops, &s);
    CHECK_STATUS(s, UPIPE_OK, x->dry->ctx.err);
    x->a.plan = &x->plan;
    x->a.q = x->g.dq = upipe_view_packed(none, UPIPE_F32, x->plan.rows, 4, 32);
    x->a.k = x->g.dk = upipe_view_packed(none, UPIPE_F32, x->plan.rows, 2, 32);
    x->a.v = x->g.dv = upipe_view_packed(none, UPIPE_F32, x->plan.rows, 2, 40);
    x->a.o = x->g.dout = upipe_view_packed(none, UPIPE_F32, x->plan.rows, 4, 40);
}

static void refuse_fwd(const alone *x, upipe_qkv a, upipe_status want, const char *part)
{
    upipe_saved save;
    CHECK_REFUSED(upipe_qkv_fwd(&x->dry->ctx, &a, &save), want, x->dry->ctx.err, part);
    CHECK_INT(x->dry->mem.live, 0);
}

static void test_refusals(void)
{
    float none[1];
    alone x;
    upipe_qkv a;
    upipe_qkv_grads g;
    upipe_saved save = {0};
    upipe_err *err;
    alone_make(&x, 2);
    err = &x.dry->ctx.err;
    a = x.a, a.q.data = NULL;
    refuse_fwd(&x, a, UPIPE_ERR_ARG, "q is NULL");
    a = x.a, a.k.h = 4;
    refuse_fwd(&x, a, UPIPE_ERR_ARG, "k is [4][4][32], the plan says [4][2][32]");
    a = x.a, a.v.d = 32;
    refuse_fwd(&x, a, UPIPE_ERR_ARG, "v is [4][2][32], the plan says [4][2][40]");
    a = x.a, a.o.n = 8;
    refuse_fwd(&x, a, UPIPE_ERR_ARG, "o is [8][4][40], the plan says [4][4][40]");
    a = x.a, a.scale = -1;
    refuse_fwd(&x, a, UPIPE_ERR_ARG, "scale -1");
    a = x.a, a.mask.window = -1;
    refuse_fwd(&x, a, UPIPE_ERR_ARG, "window");
    a = x.a, a.q.dtype = (upipe_dtype)2;
    refuse_fwd(&x, a, UPIPE_ERR_UNSUPPORTED, "q is no storage type");

    CHECK_REFUSED(upipe_qkv_bwd(&x.dry->ctx, &x.a, &x.g, &save), UPIPE_ERR_ARG, *err, "consumed before");
    CHECK_STATUS(upipe_qkv_fwd(&x.dry->ctx, &x.a, &save), UPIPE_OK, *err);
    g = x.g, g.dsinks = none;
    CHECK_REFUSED(upipe_qkv_bwd(&x.dry->ctx, &x.a, &g, &save), UPIPE_ERR_ARG, *err, "without sinks");
    g = x.g, g.dk.d = 40;
    CHECK_REFUSED(upipe_qkv_bwd(&x.dry->ctx, &x.a, &g, &save), UPIPE_ERR_ARG, *err, "dk is [4][2][40]");
    g = x.g, g.dout.data = NULL;
    CHECK_REFUSED(upipe_qkv_bwd(&x.dry->ctx, &x.a, &g, &save), UPIPE_ERR_ARG, *err, "dout is NULL");
    CHECK(save.lse != NULL); /* still the forward's */
    g = x.g, g.dq.data = NULL;
    CHECK_STATUS(upipe_qkv_bwd(&x.dry->ctx, &x.a, &g, &save), UPIPE_OK, *err); /* dq is not wanted */
    CHECK_INT(x.dry->mem.live, 0);
}

/* Every stage packed and unpacked is the tensor again; and the layout is what the plan says of one head. */
static void test_packs(void)
{
    float from[4 * 4 * 32], to[4 * 4 * 32], send[4 * 4 * 32];
    upipe_view q = upipe_view_packed(from, UPIPE_F32, 4, 4, 32), back = q;
    alone x;
    alone_make(&x, 2);
    x.dry->ctx.ops = &x.ops;
    back.data = to;
    for (int i = 0; i < 4 * 4 * 32; ++i) from[i] = (float)i;
    memset(to, 0, sizeof to);
    for (int stage = 0; stage < x.plan.stages; ++stage) {
        CHECK_STATUS(upipe_a2a_pack(&x.dry->ctx, send, &x.plan, stage, UPIPE_A2A_Q, q), UPIPE_OK,
                     x.dry->ctx.err);
        for (int rank = 0; rank < 2; ++rank) { /* row 3 of a rank's first head */
            const int head = upipe_plan_q(&x.plan, stage, rank).first;
            const int at = upipe_plan_offset(&x.plan, UPIPE_A2A_Q, stage, rank) * 4 * 32;
            CHECK(send[at + 3 * 32 * x.plan.per_rank] == from[(3 * 4 + head) * 32]);
        }
        CHECK_STATUS(upipe_a2a_unpack(&x.dry->ctx, back, &x.plan, stage, UPIPE_A2A_Q, send), UPIPE_OK,
                     x.dry->ctx.err);
    }
    CHECK_BYTES(to, from, sizeof to);
    CHECK_STATUS(upipe_a2a_unpack(&x.dry->ctx, back, &x.plan, 0, UPIPE_A2A_DKV, send), UPIPE_ERR_ARG,
                 x.dry->ctx.err);
    CHECK_STATUS(upipe_a2a_pack(&x.dry->ctx, send, &x.plan, x.plan.stages, UPIPE_A2A_Q, q), UPIPE_ERR_ARG,
                 x.dry->ctx.err);
    CHECK_REFUSED(upipe_a2a_pack(&x.dry->ctx, send, &x.plan, 0, UPIPE_A2A_KV, q), UPIPE_ERR_ARG,
                  x.dry->ctx.err, "[4][2], not [4][4]");
}

/* Q, K and V side by side at each token: one ends where the next begins, and a token where the next one does. */
static void test_fused(void)
{
    float qkv[(4 + 2) * 32 + 2 * 40], o[4 * 40];
    alone x;
    upipe_qkv a;
    alone_make(&x, 1);
    a = upipe_qkv_fused(&x.a, qkv, o, UPIPE_F32);
    CHECK(a.q.data == qkv);
    CHECK_INT((float *)a.k.data - qkv, 4 * 32);
    CHECK_INT((float *)a.v.data - qkv, (4 + 2) * 32);
    CHECK_INT(a.q.n_stride, (4 + 2) * 32 + 2 * 40);
    CHECK(a.k.n_stride == a.q.n_stride && a.v.n_stride == a.q.n_stride);
    CHECK(a.o.data == o && a.o.n_stride == 4 * 40);
    CHECK(a.q.h == 4 && a.k.h == 2 && a.v.h == 2 && a.o.h == 4);
    CHECK(a.q.d == 32 && a.k.d == 32 && a.v.d == 40 && a.o.d == 40);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_refusals());
    TEST(test_packs());
    TEST(test_fused());
    return test_end("qkv");
}
