/* test_session.c -- a rank in five calls: its peak is the dry run's; tensors as trainers have them give the bits of packed
 * ones; a forward without a backward leaves nothing; sums; and what is refused
 */
#include "../upipe/net/upipe_net_threads_session.h"
#include "../upipe/cpu/upipe_cpu.h"
#include "lib/test.h"

enum { TOKENS = 24, BATCH = 2, HEADS = 4, KV = 2, DIM = 32, LAYERS = 3, RANKS_MAX = 4 };
enum { ROWS = TOKENS * BATCH, WIDTH = (HEADS + 2 * KV) * DIM, WIDE = 3 * HEADS * DIM };

/* One rank's tensors. */
typedef struct tensors {
    float qkv[ROWS * WIDE], o[ROWS * HEADS * DIM], dqkv[ROWS * WIDE], dout[ROWS * HEADS * DIM];
} tensors;

static float value(int64_t i)
{
    return (float)(i * 37 % 101 - 50) / 40;
}

static void fill(tensors *t, int rank)
{
    memset(t, 0, sizeof *t);
    for (int i = 0; i < ROWS * WIDE; ++i) t->qkv[i] = value(i + rank * 1000);
    for (int i = 0; i < ROWS * HEADS * DIM; ++i) t->dout[i] = value(3 * i + rank * 1000 + 7);
}

static upipe_status both_ways(upipe_ctx *c, const upipe_qkv *a, const upipe_qkv_grads *g)
{
    upipe_saved saved;
    UPIPE_TRY(upipe_qkv_fwd(c, a, &saved));
    return upipe_qkv_bwd(c, a, g, &saved);
}

/* ---- a session ---- */

/* The layers' forwards, then their backwards, then a sum: what the slab is for. */
static upipe_status steps(void *user, upipe_session *h)
{
    const upipe_session_desc *d = (const upipe_session_desc *)user;
    upipe_ctx *c = &h->ctx;
    upipe_saved saved[LAYERS];
    static _Thread_local float sums[UPIPE_REDUCE_STRIP * RANKS_MAX + 1];
    static _Thread_local tensors t;
    upipe_qkv a, g;
    upipe_qkv_grads grads;
    fill(&t, c->team->rank);
    a = upipe_qkv_fused(&h->call, t.qkv, t.o, UPIPE_F32);
    g = upipe_qkv_fused(&h->call, t.dqkv, t.dout, UPIPE_F32);
    grads = upipe_qkv_grads_of(&g);
    CHECK_INT(h->plan.desc.rank, c->team->rank);
    CHECK_INT(a.mask.window, d->call.mask.window);
    UPIPE_TRY(upipe_qkv_eval(c, &a));
    CHECK_INT(h->mem.live, 0);
    for (int l = 0; l < d->layers; ++l) UPIPE_TRY(upipe_qkv_fwd(c, &a, &saved[l]));
    for (int l = d->layers; l-- > 0;) UPIPE_TRY(upipe_qkv_bwd(c, &a, &grads, &saved[l]));
    UPIPE_TRY(upipe_all_reduce(c, c->team, sums, UPIPE_REDUCE_STRIP * RANKS_MAX + 1));
    CHECK_INT(h->mem.peak, h->dry.mem.peak);
    CHECK_INT(h->mem.need, upipe_session_slab_bytes(h));
    return UPIPE_OK;
}

static upipe_session_desc description(int ranks, int layers)
{
    upipe_session_desc d;
    memset(&d, 0, sizeof d);
    d.plan.tokens = TOKENS, d.plan.batch = BATCH, d.plan.heads = HEADS, d.plan.kv_heads = KV;
    d.plan.head_dim = DIM, d.plan.ranks = ranks, d.layers = layers;
    d.call.mask.causal = 1, d.call.mask.window = 9;
    return d;
}

static void test_peaks(const upipe_ops *ops)
{
    for (int ranks = 1; ranks <= RANKS_MAX; ranks *= 2)
        for (int layers = 1; layers <= LAYERS; layers += 2) {
            upipe_session_desc d = description(ranks, layers);
            upipe_err err;
            d.user = &d;
            CHECK_STATUS(upipe_threads_sessions(&d, ops, 60, steps, &err), UPIPE_OK, err);
        }
}

enum { MANY = 8 };

static upipe_status sum_body(void *user, upipe_session *h)
{
    static _Thread_local float sums[UPIPE_REDUCE_STRIP * MANY + 1];
    (void)user;
    UPIPE_TRY(upipe_all_reduce(&h->ctx, h->ctx.team, sums, UPIPE_REDUCE_STRIP * MANY + 1));
    CHECK_INT(upipe_session_slab_bytes(h), h->mem.need); /* the passes take less */
    return UPIPE_OK;
}

/* Where the passes are small the slab is that of a sum over all ranks. */
static void test_sum(const upipe_ops *ops)
{
    upipe_session_desc d = description(MANY, 1);
    upipe_err err;
    d.plan.tokens = d.plan.heads = d.plan.kv_heads = MANY, d.plan.batch = 1;
    CHECK_STATUS(upipe_threads_sessions(&d, ops, 60, sum_body, &err), UPIPE_OK, err);
}

/* ---- layouts ---- */

/* Views of packed copies: what q, k, v and o say with the strides of others. */
static upipe_qkv packed(const upipe_qkv *of, float *data)
{
    upipe_qkv a = *of;
    upipe_view *const views[4] = {&a.q, &a.k, &a.v, &a.o};
    for (int i = 0; i < 4; ++i) {
        upipe_view from = *views[i];
        *views[i] = upipe_view_packed(data, UPIPE_F32, from.n, from.h, from.d);
        for (int64_t row = 0; row < from.n; ++row)
            for (int32_t j = 0; j < from.h; ++j, data += from.d)
                memcpy(data, upipe_view_at(from, row, j), (size_t)from.d * sizeof(float));
    }
    return a;
}

/* The call of a layout has the bits of the same one over packed tensors, results and gradients. */
static upipe_status same_bits(upipe_session *h, const upipe_qkv *a, const upipe_qkv *d)
{
    static _Thread_local float data[4][ROWS * (WIDE + HEADS * DIM)];
    const size_t bytes = sizeof data[0];
    upipe_qkv pa, pd;
    upipe_qkv_grads g = upipe_qkv_grads_of(d);
    memset(data, 0, sizeof data);
    pa = packed(a, data[0]), pd = packed(d, data[1]);
    UPIPE_TRY(both_ways(&h->ctx, a, &g));
    g = upipe_qkv_grads_of(&pd);
    UPIPE_TRY(both_ways(&h->ctx, &pa, &g));
    packed(a, data[2]), packed(d, data[3]);
    CHECK_BYTES(data[0], data[2], bytes);
    CHECK_BYTES(data[1], data[3], bytes);
    return UPIPE_OK;
}

/* Q, K and V side by side at each token: one ends where the next begins, and a token where the next one does. */
static void test_fused(void)
{
    const upipe_plan_desc d = {.tokens = 4, .heads = 4, .kv_heads = 2, .head_dim = 32, .v_dim = 40};
    float qkv[(4 + 2) * 32 + 2 * 40], o[4 * 40];
    upipe_plan p;
    const upipe_qkv call = {.plan = &p};
    upipe_qkv a;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    a = upipe_qkv_fused(&call, qkv, o, UPIPE_F32);
    CHECK(a.q.data == qkv);
    CHECK_INT((float *)a.k.data - qkv, 4 * 32);
    CHECK_INT((float *)a.v.data - qkv, (4 + 2) * 32);
    CHECK_INT(a.q.n_stride, (4 + 2) * 32 + 2 * 40);
    CHECK(a.k.n_stride == a.q.n_stride && a.v.n_stride == a.q.n_stride);
    CHECK(a.o.data == o && a.o.n_stride == 4 * 40);
    CHECK(a.q.h == 4 && a.k.h == 2 && a.v.h == 2 && a.o.h == 4);
    CHECK(a.q.d == 32 && a.k.d == 32 && a.v.d == 40 && a.o.d == 40);
}

static upipe_status fused_body(void *user, upipe_session *h)
{
    static _Thread_local tensors t;
    upipe_qkv a, d;
    (void)user;
    fill(&t, h->ctx.team->rank);
    a = upipe_qkv_fused(&h->call, t.qkv, t.o, UPIPE_F32);
    d = upipe_qkv_fused(&h->call, t.dqkv, t.dout, UPIPE_F32);
    CHECK(a.k.data == t.qkv + HEADS * DIM && a.v.data == t.qkv + (HEADS + KV) * DIM);
    CHECK(upipe_view_at(a.q, 1, 0) == t.qkv + WIDTH);
    return same_bits(h, &a, &d);
}

static upipe_status sbh3d_body(void *user, upipe_session *h)
{
    static _Thread_local tensors t;
    (void)user;
    fill(&t, h->ctx.team->rank);
    for (int b = 0; b < BATCH; ++b) {
        const upipe_qkv a = upipe_qkv_sbh3d(&h->call, t.qkv, t.o, UPIPE_F32, BATCH, b);
        const upipe_qkv d = upipe_qkv_sbh3d(&h->call, t.dqkv, t.dout, UPIPE_F32, BATCH, b);
        CHECK(a.q.data == t.qkv + b * WIDE && a.v.data == t.qkv + b * WIDE + 2 * DIM);
        CHECK(upipe_view_at(a.k, 2, 1) == t.qkv + 2 * BATCH * WIDE + b * WIDE + 4 * DIM);
        CHECK(upipe_view_at(a.o, 1, 1) == t.o + (BATCH + b) * HEADS * DIM + DIM);
        UPIPE_TRY(same_bits(h, &a, &d));
    }
    return UPIPE_OK;
}

static void test_layouts(const upipe_ops *ops)
{
    upipe_session_desc d = description(2, 1);
    upipe_err err;
    CHECK_STATUS(upipe_threads_sessions(&d, ops, 60, fused_body, &err), UPIPE_OK, err);
    d.plan.batch = 1, d.plan.kv_heads = HEADS;
    CHECK_STATUS(upipe_threads_sessions(&d, ops, 60, sbh3d_body, &err), UPIPE_OK, err);
}

/* ---- numbers of a session ---- */

static upipe_status numbers_body(void *user, upipe_session *h)
{
    upipe_ctx *c = &h->ctx;
    const int rank = c->team->rank;
    double values[2] = {1.0 / (rank + 3), 1e300}, want = 0;
    (void)user;
    for (int r = 0; r < c->team->ranks; ++r) want += 1.0 / (r + 3);
    UPIPE_TRY(upipe_scalars_sum(c, c->team, values, 2));
    CHECK(values[0] == want && values[1] == 4e300);
    CHECK_INT(h->mem.live, 0);
    CHECK_REFUSED(upipe_scalars_sum(c, c->team, values, UPIPE_ALL_GATHER_MAX + 1), UPIPE_ERR_ARG, c->err,
                  "a sum of 41 numbers, at most 40");
    CHECK_REFUSED(upipe_scalars_sum(c, NULL, values, 1), UPIPE_ERR_ARG, c->err, "the communicator is NULL");
    return UPIPE_OK;
}

static void test_numbers(const upipe_ops *ops)
{
    upipe_session_desc d = description(4, 1);
    upipe_err err;
    CHECK_STATUS(upipe_threads_sessions(&d, ops, 60, numbers_body, &err), UPIPE_OK, err);
}

/* ---- what is refused ---- */

typedef struct one {
    upipe_session h;
    upipe_comm team;
    upipe_comm_self_state state;
} one;

static void test_refused(const upipe_ops *ops)
{
    static one x;
    static _Alignas(UPIPE_MEM_ALIGN) char slab[1 << 20];
    static tensors t;
    upipe_session *h = &x.h;
    upipe_ctx *c = &h->ctx;
    upipe_session_desc d = description(0, 1);
    upipe_qkv a;
    upipe_err err;
    size_t bytes;
    void *block;
    CHECK_REFUSED(upipe_session_open(h, &d), UPIPE_ERR_ARG, c->err, "ctx->ops is NULL");
    c->ops = ops;
    CHECK_REFUSED(upipe_session_open(h, &d), UPIPE_ERR_ARG, c->err, "ctx->team is NULL");
    upipe_comm_self(&x.team, &x.state, ops->copy), c->team = &x.team;
    CHECK_STATUS(upipe_session_open(NULL, &d), UPIPE_ERR_ARG, c->err);
    CHECK_REFUSED(upipe_session_open(h, NULL), UPIPE_ERR_ARG, c->err, "the description is NULL");
    d.layers = 0;
    CHECK_REFUSED(upipe_session_open(h, &d), UPIPE_ERR_ARG, c->err,
                  "a session of 0 layers in flight, at least 1");
    d = description(4, 1);
    CHECK_REFUSED(upipe_session_open(h, &d), UPIPE_ERR_ARG, c->err,
                  "a description of 4 ranks in a ring of 1, for a team of 1 in a ring of 1");
    d = description(1, 1), d.plan.ring = 2;
    CHECK_REFUSED(upipe_session_open(h, &d), UPIPE_ERR_ARG, c->err,
                  "a description of 1 ranks in a ring of 2, for a team of 1 in a ring of 1");
    d = description(1, 1), d.plan.dtype = (upipe_dtype)7;
    CHECK_REFUSED(upipe_session_open(h, &d), UPIPE_ERR_ARG, c->err, "data type 7 is neither f32 nor bf16");
    d = description(1, 1);
    CHECK_REFUSED(upipe_session_slab(h, slab), UPIPE_ERR_ARG, c->err, "the session is not open");
    CHECK_STATUS(upipe_session_open(h, &d), UPIPE_OK, c->err);
    bytes = upipe_session_slab_bytes(h);
    d = description(1, LAYERS); /* without a slab an open one may be opened for another plan */
    CHECK_STATUS(upipe_session_open(h, &d), UPIPE_OK, c->err);
    CHECK(upipe_session_slab_bytes(h) > bytes);
    d.plan.dtype = (upipe_dtype)7;
    CHECK_REFUSED(upipe_session_open(h, &d), UPIPE_ERR_ARG, c->err, "data type 7 is neither f32 nor bf16");
    CHECK_REFUSED(upipe_session_slab(h, slab), UPIPE_ERR_ARG, c->err, "the session is not open");
    d = description(1, 1);
    CHECK_STATUS(upipe_session_open(h, &d), UPIPE_OK, c->err);
    CHECK(upipe_session_slab_bytes(h) <= sizeof slab);
    a = upipe_qkv_fused(&h->call, t.qkv, t.o, UPIPE_F32);
    CHECK_REFUSED(upipe_qkv_eval(c, &a), UPIPE_ERR_ARG, c->err, "ctx->mem is NULL");
    CHECK_REFUSED(upipe_session_slab(h, NULL), UPIPE_ERR_MEMORY, c->err, "no slab of");
    CHECK_STATUS(upipe_session_slab(h, slab), UPIPE_OK, c->err);
    CHECK_REFUSED(upipe_session_slab(h, slab), UPIPE_ERR_ARG, c->err, "the session has a slab");
    CHECK_REFUSED(upipe_session_open(h, &d), UPIPE_ERR_ARG, c->err,
                  "the session has a slab: upipe_session_close");
    CHECK_STATUS(upipe_qkv_eval(c, &a), UPIPE_OK, c->err);

    a = upipe_qkv_fused(&h->call, t.qkv, t.o, (upipe_dtype)7);
    CHECK_REFUSED(upipe_qkv_eval(c, &a), UPIPE_ERR_UNSUPPORTED, c->err, "q is no storage type");
    a = upipe_qkv_sbh3d(&h->call, t.qkv, t.o, UPIPE_F32, BATCH, 0);
    CHECK_REFUSED(upipe_qkv_eval(c, &a), UPIPE_ERR_ARG, c->err,
                  "q is [24][4][32], the plan says [48][4][32]");
    a = d.call;
    a = upipe_qkv_fused(&a, t.qkv, t.o, UPIPE_F32);
    CHECK_REFUSED(upipe_qkv_eval(c, &a), UPIPE_ERR_ARG, c->err, "plan is NULL");

    CHECK_STATUS(upipe_alloc(c, &block, 8, UPIPE_USE_OTHER, "mine"), UPIPE_OK, c->err);
    CHECK_REFUSED(upipe_session_close(h), UPIPE_ERR_ARG, c->err, "8 bytes live, the first is 'mine'");
    CHECK_REFUSED(upipe_session_close(h), UPIPE_ERR_ARG, c->err, "the session has no slab, or is closed");
    a = upipe_qkv_fused(&h->call, t.qkv, t.o, UPIPE_F32);
    CHECK_REFUSED(upipe_qkv_eval(c, &a), UPIPE_ERR_ARG, c->err, "ctx->mem is NULL");
    CHECK_REFUSED(upipe_session_slab(h, slab), UPIPE_ERR_ARG, c->err, "the session is not open");
    CHECK_STATUS(upipe_session_close(NULL), UPIPE_ERR_ARG, c->err);

    d.plan.ranks = -1;
    CHECK_REFUSED(upipe_threads_sessions(&d, ops, 0, steps, &err), UPIPE_ERR_ARG, err, "a team of -1 ranks");
    CHECK_REFUSED(upipe_threads_sessions(NULL, ops, 0, steps, &err), UPIPE_ERR_ARG, err,
                  "the description is NULL");
    CHECK_REFUSED(upipe_threads_sessions(&d, ops, 0, NULL, &err), UPIPE_ERR_ARG, err, "the body is NULL");
    d = description(2, 1), d.plan.chunk = 3;
    CHECK_REFUSED(upipe_threads_sessions(&d, ops, 0, steps, &err), UPIPE_ERR_ARG, err, "a chunk of 3 heads");
}

int main(int argc, char **argv)
{
    upipe_ops ops;
    upipe_cpu_ops(&ops);
    test_begin(argc, argv);
    TEST(test_peaks(&ops));
    TEST(test_sum(&ops));
    TEST(test_fused());
    TEST(test_layouts(&ops));
    TEST(test_numbers(&ops));
    TEST(test_refused(&ops));
    return test_end("session");
}
