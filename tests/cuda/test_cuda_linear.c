/* test_cuda_linear.c -- the CUDA rules of linear attention: lib/linear.h and lib/linear_rows.h, runs of chunks,
 * launches of rows, and what they refuse
 *
 * A call's tensors, states and scratch lie in an allocation each, so that the fake finds who leaves one; the scratch is
 * exactly what was asked for, and the list of packed documents is spoilt when the call has returned.
 */
#include "upipe/cuda/upipe_cuda_linear_bytes.h"

#include "../lib/linear_rows.h"
#include "cuda/staged.h"

void app_linear(upipe_linear_ops *rules); /* 09_cuda.cu */

static upipe_linear_ops on_device;

/* The call's own borders, which are spoilt when it has returned; NULL: it has none. */
static int64_t *borders_of(upipe_borders *b)
{
    const size_t bytes = ((size_t)b->cu_seqlens_n + 1) * sizeof(int64_t);
    int64_t *borders;
    if (b->cu_seqlens == NULL) return NULL;
    borders = (int64_t *)malloc(bytes);
    if (borders == NULL) exit(2);
    b->cu_seqlens = (const int64_t *)memcpy(borders, b->cu_seqlens, bytes);
    return borders;
}

static void borders_spoil(int64_t *borders, const upipe_borders *b)
{
    if (borders != NULL) memset(borders, 0x7f, ((size_t)b->cu_seqlens_n + 1) * sizeof *borders);
}

/* The call with the device's addresses, and borders of its own. */
static upipe_linear there_of(const upipe_linear *a, int64_t **borders)
{
    upipe_linear there = *a;
    upipe_view *const views[] = {&there.q, &there.k, &there.v, &there.o, &there.g, &there.beta};
    for (int i = 0; i < 6; ++i) *views[i] = staged_view(*views[i]);
    there.state = (const float *)staged_at(a->state);
    there.out = (float *)staged_at(a->out);
    there.work = device_new(staged.d, a->work_bytes);
    *borders = borders_of(&there.borders);
    return there;
}

static upipe_status there_end(upipe_status s, const upipe_linear *there, int64_t *borders)
{
    borders_spoil(borders, &there->borders);
    s = staged_end(s, "linear attention");
    device_free(staged.d, there->work);
    free(borders);
    return s;
}

static void reach(const upipe_linear *a, const float *written)
{
    const size_t state = (size_t)a->v.h * (size_t)a->q.d * (size_t)a->v.d * sizeof(float);
    const upipe_view views[] = {a->q, a->k, a->v, a->g, a->beta};
    for (int i = 0; i < 5; ++i)
        if (views[i].data != NULL) staged_reach_view(views[i]);
    staged_reach(a->state, state);
    staged_reach(written, state);
}

static upipe_status staged_linear_fwd(upipe_ctx *c, const upipe_linear *a)
{
    int64_t *borders;
    upipe_linear there;
    (void)c;
    reach(a, a->out);
    staged_reach_view(a->o);
    staged_begin(1);
    there = there_of(a, &borders);
    return there_end(upipe_linear_fwd(&staged.d->c, &on_device, &there), &there, borders);
}

static upipe_status staged_linear_bwd(upipe_ctx *c, const upipe_linear_grad *g)
{
    int64_t *borders;
    upipe_linear_grad there = *g;
    upipe_view *const views[] = {&there.dout, &there.dq, &there.dk, &there.dv, &there.dg, &there.dbeta};
    (void)c;
    reach(&g->a, g->dstate);
    for (int i = 0; i < 5 + (g->a.beta.data != NULL); ++i) staged_reach_view(*views[i]);
    staged_begin(1);
    there.a = there_of(&g->a, &borders);
    there.a.o.data = NULL, there.a.out = NULL; /* not read */
    for (int i = 0; i < 6; ++i) *views[i] = staged_view(*views[i]);
    there.dstate = (float *)staged_at(g->dstate);
    return there_end(upipe_linear_bwd(&staged.d->c, &on_device, &there), &there.a, borders);
}

static void reach_conv(const upipe_linear_conv *a)
{
    const size_t weights = (size_t)a->x.d * (size_t)a->taps * sizeof(float);
    staged_reach_view(a->x), staged_reach_view(a->before), staged_reach(a->weight, weights);
    if (a->y.data != NULL) staged_reach_view(a->y);
    if (a->after.data != NULL) staged_reach_view(a->after);
}

static upipe_linear_conv conv_there(const upipe_linear_conv *a)
{
    upipe_linear_conv there = *a;
    there.x = staged_view(a->x), there.y = staged_view(a->y);
    there.before = staged_view(a->before), there.after = staged_view(a->after);
    there.weight = (const float *)staged_at(a->weight);
    return there;
}

static upipe_status staged_conv(upipe_ctx *c, const upipe_linear_conv *a)
{
    upipe_linear_conv there;
    int64_t *borders;
    upipe_status s;
    (void)c;
    reach_conv(a);
    staged_begin(1);
    there = conv_there(a);
    borders = borders_of(&there.borders);
    s = on_device.conv(&staged.d->c, &there);
    borders_spoil(borders, &there.borders);
    s = staged_end(s, "the convolution");
    free(borders);
    return s;
}

static upipe_status staged_conv_bwd(upipe_ctx *c, const upipe_linear_conv_grad *g)
{
    const size_t weights = (size_t)g->a.x.d * (size_t)g->a.taps * sizeof(float);
    upipe_linear_conv_grad there = *g;
    int64_t *borders;
    upipe_status s;
    (void)c;
    reach_conv(&g->a);
    staged_reach_view(g->dy), staged_reach_view(g->dstate), staged_reach(g->dweight, weights);
    staged_begin(1);
    there.a = conv_there(&g->a);
    there.dy = staged_view(g->dy), there.dstate = staged_view(g->dstate);
    there.dweight = (float *)staged_at(g->dweight);
    borders = borders_of(&there.a.borders);
    s = on_device.conv_bwd(&staged.d->c, &there);
    borders_spoil(borders, &there.a.borders);
    s = staged_end(s, "the convolution's backward");
    free(borders);
    return s;
}

static void reach_gates(const upipe_linear_gates *a)
{
    const size_t heads = (size_t)a->a.h * sizeof(float);
    staged_reach_view(a->a), staged_reach_view(a->b);
    staged_reach(a->a_log, heads), staged_reach(a->dt_bias, heads);
}

static upipe_linear_gates gates_there(const upipe_linear_gates *a)
{
    upipe_linear_gates there = *a;
    there.a = staged_view(a->a), there.b = staged_view(a->b);
    there.g = staged_view(a->g), there.beta = staged_view(a->beta);
    there.a_log = (const float *)staged_at(a->a_log), there.dt_bias = (const float *)staged_at(a->dt_bias);
    return there;
}

static upipe_status staged_gates(upipe_ctx *c, const upipe_linear_gates *a)
{
    upipe_linear_gates there;
    (void)c;
    reach_gates(a);
    staged_reach_view(a->g), staged_reach_view(a->beta);
    staged_begin(1);
    there = gates_there(a);
    return staged_end(on_device.gates(&staged.d->c, &there), "gates");
}

static upipe_status staged_gates_bwd(upipe_ctx *c, const upipe_linear_gates_grad *g)
{
    const size_t heads = (size_t)g->gates.a.h * sizeof(float);
    upipe_linear_gates_grad there = *g;
    (void)c;
    reach_gates(&g->gates);
    staged_reach_view(g->dg), staged_reach_view(g->dbeta);
    staged_reach(g->da_log, heads), staged_reach(g->ddt_bias, heads);
    staged_begin(1);
    there.gates = gates_there(&g->gates);
    there.gates.g.data = there.gates.beta.data = NULL; /* not accessed */
    there.dg = staged_view(g->dg), there.dbeta = staged_view(g->dbeta);
    there.da_log = (float *)staged_at(g->da_log), there.ddt_bias = (float *)staged_at(g->ddt_bias);
    return staged_end(on_device.gates_bwd(&staged.d->c, &there), "the gates' backward");
}

/* Heads first .. first + heads - 1 in a call of their own, with the results in their places. */
static void run_stage(linear *x, upipe_ctx *c, int first, int heads)
{
    const int group = x->heads / x->key_heads, size = x->key_dim * x->value_dim;
    upipe_linear_grad g = call_of(x, 0, x->n, 0);
    for (int i = 0; i < LINEAR_VIEWS; ++i) {
        upipe_view *v = view_of(&g, i);
        const int by = v->h == x->heads ? 1 : group;
        if (v->data == NULL) continue;
        v->data = upipe_view_at(*v, 0, first / by);
        v->h = heads / by;
    }
    g.a.state = x->state + first * size, g.a.out = x->end + first * size, g.dstate = x->dstate + first * size;
    memcpy(g.dstate, x->dend + first * size, (size_t)(heads * size) * 4);
    work_begin(c, &g.a, UPIPE_LINEAR_FWD);
    CHECK_STATUS(upipe_linear_fwd(c, &rules, &g.a), UPIPE_OK, c->err);
    work_begin(c, &g.a, UPIPE_LINEAR_BWD);
    CHECK_STATUS(upipe_linear_bwd(c, &rules, &g), UPIPE_OK, c->err);
}

/* More chunks than a run has, and another number of them in the last one; borders inside of runs and between them. Half
 * the heads have runs of twice as many chunks, and the bits of all heads. */
static void check_runs(upipe_ctx *c)
{
    enum { HEADS = 8, RUN = UPI_CUDA_LINEAR_BLOCKS / HEADS };
    static const int64_t borders[] = {-1, 3, RUN, RUN + 20, 2 * RUN + 3, 1000};
    test_rng r = {41};
    for (int delta = 0; delta < 2; ++delta) {
        linear x = {.n = 2 * RUN + 9,
                    .key_heads = 4,
                    .heads = HEADS,
                    .key_dim = 5,
                    .value_dim = 3,
                    .chunk = 1},
               y;
        x.delta = delta;
        if (delta) x.borders = (upipe_borders){borders, 5};
        draw(&x, &r, 0.1);
        run(&x, c, &x.n, 1);
        check_close(&x, "three runs");
        y = twin_of(&x);
        for (int i = 0; i < HEADS; i += HEADS / 2) run_stage(&y, c, i, HEADS / 2);
        check_bits(&x, &y, "stages of heads");
        buffers_free(0);
    }
}

/* Where every access is watched it is the kernels that count, and not the numbers: a few shapes reach all of them. */
static int few(void)
{
#ifdef WATCHED_TESTS
    return 1;
#else
    return brief();
#endif
}

/* Widths of more than one tile in each direction, and keys that two heads read. */
static void check_wide_heads(upipe_ctx *c)
{
    static const int dims[][2] = {{64, 128}, {128, 64}, {200, 72}};
    test_rng r = {43};
    for (int i = 0; i < (few() ? 1 : 3); ++i) {
        linear x = {.n = 130, .key_heads = 1, .heads = 2, .delta = i != 1};
        x.key_dim = dims[i][0], x.value_dim = dims[i][1];
        draw(&x, &r, 0.05);
        run(&x, c, &x.n, 1);
        check_close(&x, "wide heads");
        buffers_free(0);
    }
}

/* A decay between two numbers of f32, in each of many chunks: a state is rounded once a chunk, so nothing adds up. */
static void check_fade(upipe_ctx *c)
{
    test_rng r = {59};
    linear x = {.n = 200, .key_heads = 1, .heads = 1, .key_dim = 8, .value_dim = 8, .chunk = 1};
    draw(&x, &r, 0.1);
    for (int64_t j = 0; j < count_of(&x, 3); ++j) x.g[j] = -0x1.4p-23f;
    for (int64_t j = 0; j < count_of(&x, 5); ++j) x.state[j] *= 10, x.dend[j] *= 10;
    run(&x, c, &x.n, 1);
    check_close(&x, "decays between two numbers of f32");
    buffers_free(0);
}

/* No tokens: the state goes on, in place too, and its gradient stays. */
static void check_empty(upipe_ctx *c)
{
    test_rng r = {47};
    linear x = {.n = 1, .key_heads = 1, .heads = 2, .key_dim = 8, .value_dim = 4, .delta = 1};
    upipe_linear_grad g;
    draw(&x, &r, 0.1);
    g = call_of(&x, 0, 0, 0);
    g.a.state = x.state, g.a.out = x.end, g.dstate = x.dend;
    memcpy(x.dstate, x.dend, (size_t)count_of(&x, 5) * 4);
    work_begin(c, &g.a, UPIPE_LINEAR_FWD);
    CHECK_STATUS(upipe_linear_fwd(c, &rules, &g.a), UPIPE_OK, c->err);
    CHECK_BYTES(x.end, x.state, count_of(&x, 5) * 4);
    work_begin(c, &g.a, UPIPE_LINEAR_BWD);
    CHECK_STATUS(upipe_linear_bwd(c, &rules, &g), UPIPE_OK, c->err);
    CHECK_BYTES(x.dend, x.dstate, count_of(&x, 5) * 4);
}

/* Refused before anything is started; one sentence each. */
static void check_refusals(device *d)
{
    test_rng r = {53};
    linear x = {.n = 9, .key_heads = 1, .heads = 2, .key_dim = 8, .value_dim = 16, .delta = 1};
    upipe_linear_grad g, t;
    float *state;
    draw(&x, &r, 0.1);
    state = (float *)device_new(d, (size_t)count_of(&x, 5) * 4);
    g = call_of(&x, 0, 9, 0);
    g.a.state = g.a.out = g.dstate = state;
    g.a.work_bytes = upipe_linear_bytes(&d->c, &on_device, &g.a, UPIPE_LINEAR_BWD);
    g.a.work = device_new(d, g.a.work_bytes);
#define REFUSED(change, status, words)                                                                 \
    do {                                                                                               \
        t = g;                                                                                         \
        change;                                                                                        \
        CHECK_REFUSED(upipe_linear_fwd(&d->c, &on_device, &t.a), UPIPE_ERR_##status, d->c.err, words); \
        CHECK_REFUSED(upipe_linear_bwd(&d->c, &on_device, &t), UPIPE_ERR_##status, d->c.err, words);   \
    } while (0)
    REFUSED(t.a.chunk = 65, UNSUPPORTED, "chunks of 65 tokens; the rules cuda have at most 64");
    REFUSED((t.a.chunk = 65, t.a.work = NULL, t.a.work_bytes = 0), UNSUPPORTED, "chunks of 65 tokens");
    REFUSED(t.a.state = x.state, ARG, "the state is memory of the host, not of the device");
    REFUSED(t.a.out = t.dstate = x.end, ARG, "the written state is memory of the host");
    REFUSED(t.a.work = slab_of(t.a.work_bytes), ARG, "the scratch is memory of the host");
    REFUSED(t.a.work_bytes = 64, ARG, "64 bytes of scratch");
    REFUSED(t.a.q.d = 257, UNSUPPORTED, "a state of 257 x 16; 1 to 256 each are built");
    REFUSED(t.a.q.dtype = (upipe_dtype)2, ARG, "data type 2 is neither f32 nor bf16");
#undef REFUSED
    t = g;
    for (int i = 0; i < LINEAR_VIEWS; ++i)
        if (view_of(&t, i)->h == x.heads) view_of(&t, i)->h = 1 << 23;
    t.a.work_bytes = SIZE_MAX;
    CHECK_REFUSED(upipe_linear_fwd(&d->c, &on_device, &t.a), UPIPE_ERR_UNSUPPORTED, d->c.err,
                  "8388608 heads in one call");
    t = g;
    for (int i = 0; i < LINEAR_VIEWS; ++i) view_of(&t, i)->n = 0;
    t.a.work = NULL, t.a.work_bytes = 0;
    CHECK_INT(upipe_linear_bytes(&d->c, &on_device, &t.a, UPIPE_LINEAR_BWD), 0);
    CHECK_STATUS(upipe_linear_fwd(&d->c, &on_device, &t.a), UPIPE_OK, d->c.err);
    CHECK_STATUS(upipe_linear_bwd(&d->c, &on_device, &t), UPIPE_OK, d->c.err);
    t.a = g.a;
    t.a.chunk = 65;
    CHECK_INT(upipe_linear_bytes(&d->c, &on_device, &t.a, UPIPE_LINEAR_FWD), 0);
    device_free(d, state);
    device_free(d, g.a.work);
}

int main(int argc, char **argv)
{
    device d;
    upipe_cuda_plan_linear(&rules);
    rules.fwd = staged_linear_fwd, rules.bwd = staged_linear_bwd;
    rules.conv = staged_conv, rules.conv_bwd = staged_conv_bwd;
    rules.gates = staged_gates, rules.gates_bwd = staged_gates_bwd;
    app_linear(&on_device);
    test_begin(argc, argv);
    if (device_open(&d)) {
        printf("test_cuda_linear: %s\n", d.ops.name);
        staged_open(&d);
        TEST(check_linear_bytes(&d.ops));
        TEST(check_conv_drawn(&staged.c, few() ? 4 : 40));
        TEST(check_gates(&staged.c, few() ? 0 : 16500));
        if (!few()) TEST(check_conv_long(&staged.c, 24700));
        TEST(check_linear_drawn(&staged.c, few() ? 3 : 20, 150, UPI_CUDA_LINEAR_ROWS));
        TEST(check_wide_heads(&staged.c));
        if (!few()) {
            TEST(check_linear_documents(&staged.c));
            TEST(check_runs(&staged.c));
            TEST(check_linear_cuts(&staged.c, 1));
            TEST(check_linear_strides(&staged.c));
            TEST(check_linear_repeated(&staged.c));
            TEST(check_linear_types(&staged.c));
            TEST(check_linear_gates(&staged.c));
            TEST(check_linear_long(&staged.c));
            TEST(check_fade(&staged.c));
        }
        TEST(check_empty(&staged.c));
        TEST(check_refusals(&d));
        staged_close();
    }
    device_close(&d);
    return test_end("test_cuda_linear");
}
