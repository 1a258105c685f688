/* test_qkv -- attention of the host's own Q, K, V (upipe_qkv.h): refused exactly as documented, or right to the
 * tolerance rule, with peaks and bytes sent equal to the dry run's and the plan's, and bits equal to another
 * chunk's and another team's; NaNs in one packed sequence, or in padding, change no bit of another
 *
 * Draws are lib/draw.h's: random heads, ranks, rings, layouts and masks. Each also draws how the tensors lie: fused
 * [rows][3][H][d] or apart with gaps, in the storage type or wider, gradients in the place of what they are
 * gradients of. First come the cases that are refused, and pack and unpack alone.
 */
#include "lib/draw.h"
#include "lib/qkv.h"

/* How the host's tensors lie. */
typedef struct lie {
    int fused, wide, in_place; /* q, k, v in one tensor; f32 whatever is sent; dq over q and so on */
} lie;

typedef struct job {
    const run_case *t;
    lie lie;
    const tensors *in;
    tensors *out;
    const float *sinks;
    upipe_threads_grid grid;
    upipe_ops ops;
    upipe_plan plan[RUN_MAX];
    upipe_bytes bytes[RUN_MAX];
    size_t need[RUN_MAX];
    int blocks[RUN_MAX];
    upipe_err errors[RUN_MAX];
    int64_t moved[RUN_MAX];
} job;

/* The views of a rank, and the memory behind them. */
typedef struct host {
    char *data;
    upipe_view v[TENSORS - 1];
} host;

static void host_make(const job *j, const upipe_plan *p, host *h)
{
    const upipe_dtype type = j->lie.wide ? UPIPE_F32 : p->desc.dtype;
    const size_t e = upipe_dtype_bytes(type);
    const int heads[3] = {p->desc.heads, p->desc.kv_heads, p->desc.kv_heads};
    const int dims[3] = {p->desc.head_dim, p->desc.head_dim, p->desc.v_dim};
    int64_t step, at = 0, all = 0;
    for (int i = 0; i < 3; ++i) all += (int64_t)heads[i] * dims[i];
    h->data = (char *)buffer((size_t)(p->rows * (2 * all + 2 * heads[0] * dims[2] + 64)) * e);
    for (int i = 0; i < 3; ++i) { /* apart: three elements of a gap between rows */
        step = j->lie.fused ? all : (int64_t)heads[i] * dims[i] + 3;
        h->v[i] = upipe_view_make(h->data + (size_t)at * e, type, p->rows, step, heads[i], dims[i], dims[i]);
        at += j->lie.fused ? (int64_t)heads[i] * dims[i] : p->rows * step;
    }
    if (j->lie.fused) at = p->rows * all;
    for (int i = 0; i < 3; ++i) {
        h->v[DQ + i] = h->v[i];
        if (j->lie.in_place) continue;
        h->v[DQ + i] = upipe_view_packed(h->data + (size_t)at * e, type, p->rows, heads[i], dims[i]);
        at += p->rows * heads[i] * dims[i];
    }
    for (int i = O; i <= DOUT; ++i, at += p->rows * heads[0] * dims[2])
        h->v[i] = upipe_view_packed(h->data + (size_t)at * e, type, p->rows, heads[0], dims[2]);
}

/* Rows of this rank, natural order <-> the host's view. */
static upipe_status move(upipe_ctx *c, const job *j, const upipe_plan *p, const host *h, float *natural,
                         int which, int out)
{
    const int64_t w = width(&j->t->shape, which);
    float *rows = f32_buf(p->rows * w);
    upipe_view wide = upipe_view_packed(rows, UPIPE_F32, p->rows, h->v[which].h, h->v[which].d);
    upipe_status s = UPIPE_OK;
    if (!out) run_rows(p, natural, rows, w, 0);
    s = c->ops->cast(c, out ? wide : h->v[which], out ? h->v[which] : wide);
    if (out) run_rows(p, natural, rows, w, 1);
    return s;
}

/* The call but for its tensors. */
static upipe_qkv qkv_of(const run_case *t, const upipe_plan *p, const float *sinks)
{
    upipe_qkv a = {.plan = p, .mask = run_layer(t).mask, .scale = (float)t->shape.scale};
    a.mask.sinks = sinks;
    return a;
}

static upipe_status steps(upipe_ctx *c, job *j, int rank, float *dsinks)
{
    const upipe_plan *p = &j->plan[rank];
    upipe_saved save;
    upipe_qkv a;
    upipe_qkv_grads g;
    host h;
    host_make(j, p, &h);
    a = qkv_of(j->t, p, j->sinks);
    a.q = h.v[Q], a.k = h.v[K], a.v = h.v[V], a.o = h.v[O];
    g.dout = h.v[DOUT], g.dq = h.v[DQ], g.dk = h.v[DK], g.dv = h.v[DV];
    g.dsinks = dsinks;
    for (int i = 0; i < 3; ++i) UPIPE_TRY(move(c, j, p, &h, j->in->at[i], i, 0));
    UPIPE_TRY(upipe_qkv_fwd(c, &a, &save));
    run_lse(p, j->out->at[LSE], save.lse);
    UPIPE_TRY(move(c, j, p, &h, j->out->at[O], O, 1));
    UPIPE_TRY(move(c, j, p, &h, j->in->at[DOUT], DOUT, 0));
    UPIPE_TRY(upipe_qkv_bwd(c, &a, &g, &save));
    for (int i = DQ; i <= DV; ++i) UPIPE_TRY(move(c, j, p, &h, j->out->at[i], i, 1));
    return UPIPE_OK;
}

static void check_bytes(const upipe_ctx *c, const job *j, int rank)
{
    const upipe_plan *p = &j->plan[rank];
    const upipe_mask mask = run_layer(j->t).mask;
    for (int phase = 0; phase < UPIPE_PHASES; ++phase)
        CHECK_SAY(c->mem->phase_peak[phase] == j->bytes[rank].phase[phase],
                  "rank %d: %s holds %zu bytes, its dry run %zu", rank, upipe_phase_name(phase),
                  c->mem->phase_peak[phase], j->bytes[rank].phase[phase]);
    CHECK_INT(c->mem->peak, j->bytes[rank].peak);
    CHECK_INT(c->mem->need, j->need[rank]);
    CHECK_INT(c->mem->live, 0);
    CHECK_INT(c->team->sent_bytes, upipe_plan_sent(p, 0) + upipe_plan_sent(p, 1 + c->ops->attn_reads_o));
    if (c->ring != NULL)
        CHECK_INT(c->ring->sent_bytes, upipe_ring_sent(p, &mask, 0) + upipe_ring_sent(p, &mask, 1));
}

static upipe_status body(void *user, int rank)
{
    job *j = (job *)user;
    const run_case *t = j->t;
    size_t sum_bytes = (size_t)j->grid.world.ranks * UPIPE_REDUCE_STRIP * 4 + 4096;
    size_t slab_bytes = j->need[rank] > sum_bytes ? j->need[rank] : sum_bytes;
    float *dsinks = t->shape.sinks ? f32_buf(t->shape.h) : NULL;
    side_thread side;
    upipe_status s;
    upipe_mem mem;
    upipe_ctx c = {0};
    context_pool(&c, &mem, &j->ops, slab_bytes, j->blocks[rank]);
    upipe_threads_grid_use(&j->grid, rank, &c);
    if (t->overlap) side_begin(&c, &side, t->side_stream_inline);
    s = steps(&c, j, rank, dsinks);
    if (s == UPIPE_OK) {
        check_bytes(&c, j, rank);
        j->moved[rank] = c.team->moved_bytes + (c.ring != NULL ? c.ring->moved_bytes : 0);
        if (dsinks != NULL)
            s = upipe_all_reduce(&c, upipe_threads_comm(&j->grid.world, rank), dsinks, t->shape.h);
        if (rank == 0 && dsinks != NULL) memcpy(j->out->dsinks, dsinks, (size_t)t->shape.h * sizeof *dsinks);
    } else {
        run_abort(&c);
        upipe_mem_rewind(&mem, 0);
    }
    if (t->overlap) side_end(&side);
    j->errors[rank] = c.err;
    upipe_mem_destroy(&mem, NULL);
    return s;
}

/* Runs the case; a refusal of plan or dry run is returned as it is. */
static upipe_status run(const run_case *t, lie how, const tensors *in, const float *sinks, tensors *out,
                        upipe_plan *plan, upipe_err *err)
{
    const upipe_grid g = run_grid(t);
    const int mark = buffers_n;
    job *j = (job *)zeroed(sizeof *j);
    int64_t sent = 0, moved = 0;
    upipe_status s;
    j->t = t, j->lie = how, j->in = in, j->out = out, j->sinks = sinks;
    j->ops = cpu_table();
    if (t->table != NULL) t->table(&j->ops);
    s = grid_apart(&j->grid, &g, 120, err);
    for (int i = 0; i < g.ranks && s == UPIPE_OK; ++i) {
        upipe_plan_desc d = run_desc(t, upipe_grid_team(&g, i).rank, upipe_grid_ring(&g, i).rank);
        upipe_qkv a = qkv_of(t, &j->plan[i], sinks);
        upipe_dry *dry;
        s = upipe_plan_init(&j->plan[i], &d, err);
        if (s != UPIPE_OK) break;
        dry = dry_begin(a.plan, &j->ops, &s);
        if (s == UPIPE_OK) s = upipe_dry_qkv(dry, &a);
        *err = dry->ctx.err;
        if (s == UPIPE_OK) CHECK_INT(dry->mem.live, 0);
        j->bytes[i] = upipe_dry_bytes(dry);
        j->need[i] = dry->mem.need;
        j->blocks[i] = dry->mem.blocks_peak;
        sent += upipe_plan_sent(a.plan, 0) + upipe_plan_sent(a.plan, 1 + j->ops.attn_reads_o);
        sent += upipe_ring_sent(a.plan, &a.mask, 0) + upipe_ring_sent(a.plan, &a.mask, 1);
    }
    *plan = j->plan[0];
    if (s == UPIPE_OK) {
        s = upipe_threads_run(&j->grid.world, body, j, NULL, NULL);
        for (int i = 0; i < g.ranks; ++i) {
            moved += j->moved[i];
            CHECK_SAY(s == UPIPE_OK, "rank %d: %s", i, j->errors[i].text);
        }
        CHECK_INT(moved, sent);
    }
    upipe_threads_grid_free(&j->grid);
    buffers_free(mark);
    return s;
}

/* ---- bits ---- */

/* Ulysses on the same team, or one rank alone in each team; the ring as it was, the tensors packed and apart. */
static int compare(const run_case *t, const tensors *in, const float *sinks, const tensors *r,
                   const upipe_plan *plan, int alone)
{
    const int always[] = {O, LSE, DQ}, whole[] = {DK, DV};
    const lie plain = {0, 0, 0};
    run_case u = *t;
    tensors other;
    upipe_plan with;
    upipe_status s;
    upipe_err err;
    u.chunk = t->shape.h;
    u.overlap = 0;
    u.ring_mode = t->ring > 1 ? plan->desc.ring_mode : UPIPE_RING_AUTO;
    u.table = NULL; /* nor does it matter whether attention reads O */
    if (alone) u.ranks = 1;
    tensors_make(&t->shape, &other);
    s = run(&u, plain, in, sinks, &other, &with, &err);
    CHECK_SAY(s == expected(&u), "with C %d U %d: %s (%s)", u.ranks, u.chunk, upipe_status_name(s), err.text);
    for (int i = 0; i < 3 && s == UPIPE_OK; ++i)
        CHECK_SAY(memcmp(r->at[always[i]], other.at[always[i]], (size_t)count(&t->shape, always[i]) * 4) == 0,
                  "%s differs from C %d U %d", names[always[i]], u.ranks, u.chunk);
    if (s == UPIPE_OK && run_same_chains(plan) && run_same_chains(&with) &&
        (u.ranks == t->ranks || (!plan->kv_grads_partial && !with.kv_grads_partial)))
        for (int i = 0; i < 2; ++i)
            CHECK_SAY(memcmp(r->at[whole[i]], other.at[whole[i]], (size_t)count(&t->shape, whole[i]) * 4) ==
                          0,
                      "%s differs from C %d U %d", names[whole[i]], u.ranks, u.chunk);
    if (s == UPIPE_OK && u.ranks == t->ranks)
        CHECK_BYTES(r->dsinks, other.dsinks, (size_t)t->shape.h * sizeof *r->dsinks);
    return s == UPIPE_OK;
}

/* ---- what is not a number ---- */

/* Rows of one packed sequence, or (-1) of what lies outside of all, become x. */
static void put_rows(const block_shape *s, int which, tensors *t, float x)
{
    const int64_t n = s->cu_seqlens_n, *cu = s->cu_seqlens;
    for (int i = 0; i <= DOUT; ++i) {
        const int64_t w = width(s, i);
        for (int64_t e = 0; i != O && e < count(s, i); ++e) {
            const int64_t at = e / w;
            if (which < 0 ? at < cu[0] || at >= cu[n] : at >= cu[which] && at < cu[which + 1])
                t->at[i][e] = x;
        }
    }
}

/* NaNs in one packed sequence, or in padding, change no bit of the others. */
static void nan_apart(const run_case *t, lie how, const tensors *in, const float *sinks, int which)
{
    const block_shape *s = &t->shape;
    tensors bad, of[2];
    upipe_plan plan;
    upipe_err err;
    tensors_make(s, &bad);
    for (int i = 0; i <= DOUT; ++i) memcpy(bad.at[i], in->at[i], (size_t)count(s, i) * 4);
    for (int run_of = 0; run_of < 2; ++run_of) {
        put_rows(s, which, &bad, run_of == 0 ? 0 : NAN);
        tensors_make(s, &of[run_of]);
        CHECK_STATUS(run(t, how, &bad, sinks, &of[run_of], &plan, &err), UPIPE_OK, err);
        for (int i = O; i < TENSORS && which >= 0; ++i) { /* its own rows may hold anything */
            const int64_t w = width(s, i);
            if (i != DOUT)
                memset(of[run_of].at[i] + s->cu_seqlens[which] * w, 0,
                       (size_t)((s->cu_seqlens[which + 1] - s->cu_seqlens[which]) * w) * 4);
        }
    }
    for (int i = O; i < TENSORS; ++i)
        if (i != DOUT && (run_same_chains(&plan) || (i != DK && i != DV)))
            CHECK_SAY(memcmp(of[0].at[i], of[1].at[i], (size_t)count(s, i) * 4) == 0, "NaNs in %d reach %s",
                      which, names[i]);
    if (which < 0) CHECK_BYTES(of[0].dsinks, of[1].dsinks, (size_t)s->h * 4);
}

static long legal, compared, in_place, apart;

static void one_draw(long seed)
{
    const long failures = test_failures;
    float *sinks = NULL;
    test_rng rng;
    drawn d;
    lie how;
    tensors in, out;
    upipe_plan plan;
    upipe_status s;
    upipe_err err;
    rng.state = (uint64_t)seed;
    draw(&rng, &d);
    d.t.dx_apart = 0;
    how.fused = test_below(&rng, 2);
    how.wide = test_below(&rng, 3) == 0;
    how.in_place = test_below(&rng, 3) == 0;
    tensors_draw(&d.t.shape, &rng, &in);
    tensors_make(&d.t.shape, &out);
    if (d.t.shape.sinks) sinks = f32_buf(d.t.shape.h);
    for (int i = 0; d.t.shape.sinks && i < d.t.shape.h; ++i)
        sinks[i] = (float)(test_below(&rng, 2048) - 1024) / 512;
    s = run(&d.t, how, &in, sinks, &out, &plan, &err);
    CHECK_SAY(s == expected(&d.t), "%s (%s), expected %s", upipe_status_name(s), err.text,
              upipe_status_name(expected(&d.t)));
    if (s == UPIPE_OK) {
        ++legal;
        in_place += how.in_place;
        check_oracle(&d.t.shape, &in, sinks, 0, &out);
        if (seed % 2 == 0 && d.t.shape.dtype == UPIPE_F32)
            compared += compare(&d.t, &in, sinks, &out, &plan, seed % 4 == 0);
        if (d.t.shape.cu_seqlens != NULL) {
            ++apart;
            nan_apart(&d.t, how, &in, sinks, test_below(&rng, (int)d.t.shape.cu_seqlens_n + 1) - 1);
        }
    }
    buffers_free(0);
    if (test_shown_since(failures)) say_replay(&d.t, seed);
}

/* ---- refusals, pack and unpack ---- */

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

static void refusals(void)
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
static void packs(void)
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
static void fused(void)
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

static void test_random(test_draws draws)
{
    for (; test_draws_more(&draws); ++draws.done) one_draw(draws.seed + draws.done);
    test_draws_end(&draws);
    printf("%ld legal, %ld of them with gradients in place, bits of %ld compared, NaNs in %ld\n", legal,
           in_place, compared, apart);
    if (draws.done >= 100) {
        CHECK_SAY(legal * 3 > draws.done, "only %ld of %ld draws were legal", legal, draws.done);
        CHECK_SAY(compared * 8 > legal, "bits of only %ld of %ld were compared", compared, legal);
        CHECK_SAY(in_place * 6 > legal, "only %ld of %ld in place", in_place, legal);
        CHECK_SAY(apart * 16 > legal, "NaNs in only %ld of %ld", apart, legal);
    }
}

int main(int argc, char **argv)
{
    test_draws draws = test_draws_begin(1);
    test_begin(argc, argv);
    TEST(refusals());
    TEST(packs());
    TEST(fused());
    TEST(test_random(draws));
    return test_end("qkv");
}
