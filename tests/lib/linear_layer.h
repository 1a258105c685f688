/* linear_layer.h -- what a layer of linear attention promises, on any place: results against f64 token by token, whose
 *                   gradients are differences; bits over ranks, stages, segments and packed documents; types; bytes and what is
 *                   sent as planned; golden states; every allocation that fails
 *
 *     upipe_cpu_linear(&rules);
 *     place = ...;                    where ranks run; the host, if it is not set
 *     check_drawn(16);                draws
 *     check_bits();
 *     check_documents();
 *     check_types();
 *     check_golden_states();
 *     check_out_of_memory(1);         every so many allocations
 */
#ifndef UPIPE_TEST_LINEAR_LAYER_H
#define UPIPE_TEST_LINEAR_LAYER_H

#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"
#include "upipe/cpu/upipe_cpu_simd.h"

#include "context.h"
#include "golden.h"
#include "../golden/gated_delta_net.h"

enum { X, W_QKV, W_Z, W_B, W_A, W_OUT, CONV, A_LOG, DT_BIAS, NORM, TENSORS, DY = TENSORS, Y, FIELDS };
enum {
    RANKS_MAX = 4,
    SEGMENTS_MAX = 3,
    STORED = CONV
}; /* tensors before STORED, DY and Y have the storage type */

static const char *const names[FIELDS] = {"x",    "w_qkv", "w_z",     "w_b",  "w_a", "w_out",
                                          "conv", "a_log", "dt_bias", "norm", "dy",  "y"};

/* A layer, its input and the gradient of its output, f32; results: y in data[Y], and gradients. */
typedef struct layer {
    int64_t n, model;
    int heads, key_heads, key_dim, value_dim, taps, chunk;
    float eps;
    upipe_borders borders;
    float *data[FIELDS], *grad[TENSORS];
    float *end; /* written where it is not NULL: the rule's state behind the last token */
    /* how it is run */
    upipe_threads team;
    upipe_ops ops;
    upipe_dtype dtype;
    int ranks, ring, segments, stage_keys, tile_rows;
    int bad_rank, bad_alloc; /* this rank's allocation fails */
    int allocs[RANKS_MAX];
    upipe_status statuses[RANKS_MAX];
} layer;

static upipe_linear_ops rules;

/* Where the ranks run.
 *   open   before the ranks run, close behind them: by the main thread
 *   begin  a rank's table and stream; slab: memory for its pool
 *   put    memory of the rank with these bytes; freed by close
 *   get    what is there */
typedef struct layer_place {
    void (*open)(int ranks);
    void (*close)(int ranks);
    void (*begin)(upipe_ctx *c, const layer *a, int rank);
    void *(*slab)(upipe_ctx *c, size_t bytes);
    void *(*put)(upipe_ctx *c, const void *host, size_t bytes);
    void (*get)(upipe_ctx *c, void *host, const void *there, size_t bytes);
} layer_place;

static inline void host_begin(upipe_ctx *c, const layer *a, int rank)
{
    (void)rank;
    c->ops = &a->ops;
}

static inline void *host_slab(upipe_ctx *c, size_t bytes)
{
    (void)c;
    return slab_of(bytes);
}

static inline void *host_put(upipe_ctx *c, const void *host, size_t bytes)
{
    (void)c;
    return copy_of(host, bytes);
}

static inline void host_get(upipe_ctx *c, void *host, const void *there, size_t bytes)
{
    (void)c;
    memcpy(host, there, bytes);
}

static layer_place place = {NULL, NULL, host_begin, host_slab, host_put, host_get};

/* A rank's context. */
static inline void rank_begin(upipe_ctx *c, upipe_mem *mem, const layer *a, int rank, size_t bytes)
{
    enum { BLOCKS = 64 };
    place.begin(c, a, rank);
    upipe_mem_init(mem, place.slab(c, bytes), bytes,
                   (upipe_mem_block *)zeroed(BLOCKS * sizeof(upipe_mem_block)), BLOCKS);
    c->mem = mem;
}

static inline void *zeros_there(upipe_ctx *c, size_t bytes)
{
    return place.put(c, zeroed(bytes), bytes);
}

static inline int64_t channels(const layer *a)
{
    return 2 * (int64_t)a->key_heads * a->key_dim + (int64_t)a->heads * a->value_dim;
}

static inline int64_t count_of(const layer *a, int i)
{
    const int64_t wide = (int64_t)a->heads * a->value_dim, D = a->model, C = channels(a);
    const int64_t counts[FIELDS] = {a->n * D,    C * D,    wide * D, a->heads * D, a->heads * D, wide * D,
                                    C * a->taps, a->heads, a->heads, a->value_dim, a->n * D,     a->n * D};
    return counts[i];
}

static inline float draw_one(const layer *a, int i, test_rng *r)
{
    const double z = test_normal(r);
    switch (i) {
    case X:
    case DY:
        return (float)z;
    case CONV:
        return (float)(z / sqrt(a->taps));
    case A_LOG:
        return (float)(z - 1);
    case DT_BIAS:
        return (float)(z - 1);
    case NORM:
        return (float)(1 + z / 4);
    case W_OUT:
        return (float)(z / sqrt(a->heads * a->value_dim));
    default:
        return (float)(z / sqrt((double)a->model));
    }
}

static inline void draw(layer *a, test_rng *r)
{
    for (int i = 0; i < FIELDS; ++i) a->data[i] = floats(count_of(a, i));
    for (int i = 0; i < TENSORS; ++i) a->grad[i] = floats(count_of(a, i));
    for (int i = 0; i < Y; ++i)
        for (int64_t j = 0; j < count_of(a, i); ++j) a->data[i][j] = draw_one(a, i, r);
    a->ops = cpu_table();
    a->ranks = a->ring = a->segments = 1;
    a->bad_rank = -1;
    if (a->eps == 0) a->eps = 1e-5f;
}

/* ---- the oracle ---- */

static inline int begins(const layer *a, int64_t pos)
{
    for (int64_t i = 0; a->borders.cu_seqlens != NULL && i <= a->borders.cu_seqlens_n; ++i)
        if (a->borders.cu_seqlens[i] == pos) return 1;
    return 0;
}

static inline double silu(double z)
{
    return z / (1 + exp(-z));
}

/* out[r] = sum over k of w[r][k] x[k] */
static inline void times(double *out, const double *w, const double *x, int64_t rows, int64_t depth)
{
    for (int64_t r = 0; r < rows; ++r) {
        out[r] = 0;
        for (int64_t k = 0; k < depth; ++k) out[r] += w[r * depth + k] * x[k];
    }
}

static inline void unit(double *v, int n)
{
    double sum = 1e-6;
    for (int k = 0; k < n; ++k) sum += v[k] * v[k];
    for (int k = 0; k < n; ++k) v[k] /= sqrt(sum);
}

/* One head's token: state, o. */
static inline void delta_rule(double *S, double *o, const double *q, const double *k, const double *v,
                              double g, double beta, int K, int V)
{
    const double decay = exp(g);
    for (int b = 0; b < V; ++b) {
        double seen = 0, sum = 0;
        for (int c = 0; c < K; ++c) seen += (S[c * V + b] *= decay) * k[c];
        for (int c = 0; c < K; ++c) sum += (S[c * V + b] += k[c] * beta * (v[b] - seen)) * q[c];
        o[b] = sum / sqrt(K);
    }
}

/* y of inputs in f64, and the sum of y dy. */
static inline double oracle(const layer *a, double *const *in, double *y)
{
    const int K = a->key_dim, V = a->value_dim, H = a->heads, group = H / a->key_heads;
    const int64_t C = channels(a), D = a->model, wide = (int64_t)H * V;
    const int mark = buffers_n;
    double *pre = (double *)zeroed((size_t)(a->n * C) * 8), *S = (double *)zeroed((size_t)(H * K * V) * 8);
    double *mixed = (double *)zeroed((size_t)C * 8), *z = (double *)zeroed((size_t)wide * 8),
           *o = (double *)zeroed((size_t)wide * 8), *gate = (double *)zeroed((size_t)(2 * H) * 8);
    double loss = 0;
    for (int64_t t = 0; t < a->n; ++t) {
        const double *x = in[X] + t * D;
        if (begins(a, t)) memset(S, 0, (size_t)(H * K * V) * 8);
        times(pre + t * C, in[W_QKV], x, C, D);
        for (int64_t c = 0; c < C; ++c) {
            mixed[c] = 0;
            for (int j = 0; j < a->taps && t - j >= 0; ++j) {
                mixed[c] += in[CONV][c * a->taps + a->taps - 1 - j] * pre[(t - j) * C + c];
                if (begins(a, t - j)) break;
            }
            mixed[c] = silu(mixed[c]);
        }
        for (int h = 0; h < 2 * a->key_heads; ++h) unit(mixed + h * K, K);
        times(z, in[W_Z], x, wide, D);
        times(gate, in[W_A], x, H, D);
        times(gate + H, in[W_B], x, H, D);
        for (int h = 0; h < H; ++h) {
            const double g = -exp(in[A_LOG][h]) * log1p(exp(gate[h] + in[DT_BIAS][h])),
                         beta = 1 / (1 + exp(-gate[H + h]));
            double *out = o + h * V, sum = 0;
            delta_rule(S + h * K * V, out, mixed + h / group * K, mixed + (a->key_heads + h / group) * K,
                       mixed + 2 * a->key_heads * K + h * V, g, beta, K, V);
            for (int b = 0; b < V; ++b) sum += out[b] * out[b] / V;
            for (int b = 0; b < V; ++b)
                out[b] *= in[NORM][b] / sqrt(sum + (double)a->eps) * silu(z[h * V + b]);
        }
        times(y + t * D, in[W_OUT], o, D, wide);
        for (int64_t k = 0; k < D; ++k) loss += y[t * D + k] * in[DY][t * D + k];
    }
    buffers_free(mark);
    return loss;
}

static inline double **widened(const layer *a)
{
    double **in = (double **)zeroed(FIELDS * sizeof *in);
    for (int i = 0; i < FIELDS; ++i) {
        in[i] = (double *)zeroed((size_t)count_of(a, i) * 8);
        for (int64_t j = 0; i < Y && j < count_of(a, i); ++j) in[i][j] = (double)a->data[i][j];
    }
    return in;
}

/* ---- the library ---- */

/* Bytes of a call: the most in the pool, what stays there or is gone, and what is sent. */
typedef struct part_bytes {
    int64_t most, kept, sent;
} part_bytes;

/* A rank's part of a segment. */
typedef struct part {
    upipe_plan plan;
    upipe_linear_layer l;
    upipe_linear_layer_grads grads;
    upipe_linear_layer_saved saved;
    upipe_view x, y, dx, dy;
    int64_t pos;
    part_bytes bytes[2]; /* of a dry run, forward and backward */
} part;

/* Values in the storage type, in the rank's memory. */
static inline void *stored(upipe_ctx *c, const layer *a, const float *from, int64_t n)
{
    char *to = (char *)zeroed((size_t)n * upipe_dtype_bytes(a->dtype));
    for (int64_t j = 0; from != NULL && j < n; ++j) upipe_cpu_put(to, a->dtype, j, from[j]);
    return place.put(c, to, (size_t)n * upipe_dtype_bytes(a->dtype));
}

static inline void part_weights(upipe_ctx *c, const layer *a, part *p, int rank_grads)
{
    const void **const w[TENSORS] = {NULL, &p->l.w_qkv, &p->l.w_z, &p->l.w_b, &p->l.w_a, &p->l.w_out};
    const float **const v[TENSORS] = {[CONV] = &p->l.conv, &p->l.a_log, &p->l.dt_bias, &p->l.norm_weight};
    float **const g[TENSORS] = {NULL,
                                &p->grads.w_qkv,
                                &p->grads.w_z,
                                &p->grads.w_b,
                                &p->grads.w_a,
                                &p->grads.w_out,
                                &p->grads.conv,
                                &p->grads.a_log,
                                &p->grads.dt_bias,
                                &p->grads.norm_weight};
    for (int i = 1; i < TENSORS; ++i) {
        if (i < STORED) *w[i] = stored(c, a, a->data[i], count_of(a, i));
        if (i >= STORED) *v[i] = (const float *)place.put(c, a->data[i], (size_t)count_of(a, i) * 4);
        if (rank_grads) *g[i] = (float *)zeros_there(c, (size_t)count_of(a, i) * 4);
    }
}

static inline upipe_status part_init(const layer *a, int rank, int segment, part *p, upipe_err *e)
{
    const int64_t first = upipe_cut(a->n, a->segments, segment);
    upipe_plan_desc d = {
        .ranks = a->ranks / a->ring, .ring = a->ring, .heads = 8, .head_dim = 32, .dtype = a->dtype};
    d.rank = rank % d.ranks;
    d.ring_rank = rank / d.ranks;
    d.tokens = upipe_cut(a->n, a->segments, segment + 1) - first;
    d.model_dim = a->model;
    UPIPE_TRY(upipe_plan_init(&p->plan, &d, e));
    p->l.plan = &p->plan;
    p->l.first = first;
    p->l.borders = a->borders;
    p->l.rules = &rules;
    p->l.heads = a->heads, p->l.key_heads = a->key_heads, p->l.key_dim = a->key_dim,
    p->l.value_dim = a->value_dim;
    p->l.taps = a->taps, p->l.chunk = a->chunk, p->l.stage_keys = a->stage_keys,
    p->l.tile_rows = a->tile_rows;
    p->l.norm_eps = a->eps;
    p->pos = first + upipe_shard_pos(&p->plan.shard, 0);
    return UPIPE_OK;
}

static inline void part_rows(upipe_ctx *c, const layer *a, part *p)
{
    const int64_t n = p->plan.local, D = a->model;
    p->x = upipe_view_packed(stored(c, a, a->data[X] + p->pos * D, n * D), a->dtype, n, 1, (int32_t)D);
    p->dy = upipe_view_packed(stored(c, a, a->data[DY] + p->pos * D, n * D), a->dtype, n, 1, (int32_t)D);
    p->y = upipe_view_packed(stored(c, a, NULL, n * D), a->dtype, n, 1, (int32_t)D);
    p->dx = p->dy;
}

static inline void read_rows(upipe_ctx *c, const layer *a, const part *p, float *to, upipe_view v)
{
    const size_t bytes = (size_t)(v.n * v.d) * upipe_dtype_bytes(v.dtype);
    void *here = zeroed(bytes);
    place.get(c, here, v.data, bytes);
    for (int64_t j = 0; j < v.n * v.d; ++j) to[p->pos * a->model + j] = upipe_cpu_get(here, v.dtype, j);
}

typedef struct alloc_guard {
    const layer *a;
    int rank;
    int *count;
} alloc_guard;

static inline upipe_status guard(void *user, size_t bytes, int use, const char *tag)
{
    const alloc_guard *g = (const alloc_guard *)user;
    (void)bytes, (void)use, (void)tag;
    return (*g->count)++ == g->a->bad_alloc && g->rank == g->a->bad_rank ? UPIPE_ERR_MEMORY : UPIPE_OK;
}

/* A direction and its bytes: a dry run notes them, and a run has the same. */
static inline upipe_status part_run(upipe_ctx *c, upipe_comm *comm, part *p, int backward, float *carry)
{
    const int64_t held = (int64_t)c->mem->live, sent = comm->sent_bytes;
    part_bytes got;
    c->mem->peak = c->mem->live;
    UPIPE_TRY(backward
                  ? upipe_linear_layer_bwd(c, comm, &p->l, p->dx, &p->grads, &p->saved, p->dy, p->x, carry)
                  : upipe_linear_layer_fwd(c, comm, &p->l, &p->saved, p->y, p->x, carry));
    got = (part_bytes){(int64_t)c->mem->peak - held, (int64_t)c->mem->live - held, comm->sent_bytes - sent};
    if (c->mem->dry) p->bytes[backward] = got;
    CHECK_INT(got.most, p->bytes[backward].most);
    CHECK_INT(got.kept, p->bytes[backward].kept);
    CHECK_INT(got.sent, p->bytes[backward].sent);
    return UPIPE_OK;
}

static inline upipe_status part_dry(part *p, const upipe_ops *ops, int carried)
{
    upipe_status s;
    upipe_dry *dry = dry_begin(&p->plan, ops, &s);
    const upipe_scan scan = upi_lin_scan(&p->l);
    part q = *p;
    float *carry = carried ? (float *)dry->mem.slab : NULL;
    upipe_comm comm;
    UPIPE_TRY(s);
    upipe_comm_dry(&comm, upi_scan_rank(&scan), upi_scan_ranks(&scan), dry->list, dry->gathered);
    UPIPE_TRY(part_run(&dry->ctx, &comm, &q, 0, carry));
    UPIPE_TRY(part_run(&dry->ctx, &comm, &q, 1, carry));
    CHECK_INT(q.bytes[0].kept,
              q.l.plan->local * q.l.heads * q.l.value_dim * (int64_t)upipe_dtype_bytes(q.x.dtype) +
                  (int64_t)upipe_linear_layer_state_bytes(&q.l));
    CHECK_INT(dry->mem.live, 0);
    memcpy(p->bytes, q.bytes, sizeof p->bytes);
    return UPIPE_OK;
}

static inline upipe_status rank_body(void *user, int rank)
{
    layer *a = (layer *)user;
    upipe_comm *comm = upipe_threads_comm(&a->team, rank);
    upipe_comm_self_state alone;
    upipe_comm self;
    upipe_mem mem;
    upipe_ctx c = {0};
    alloc_guard g = {a, rank, &a->allocs[rank]};
    part *parts = (part *)zeroed(SEGMENTS_MAX * sizeof *parts);
    float *carry = NULL;
    upipe_status s = UPIPE_OK;
    rank_begin(&c, &mem, a, rank, 8 << 20);
    upipe_comm_self(&self, &alone, c.ops->copy);
    c.team = a->ring > 1 ? &self : comm;
    for (int i = 0; i < a->segments; ++i) {
        UPIPE_TRY(part_init(a, rank, i, &parts[i], &c.err));
        if (i == 0) part_weights(&c, a, &parts[0], 1);
        if (i > 0) {
            const upipe_linear_layer *first = &parts[0].l;
            upipe_linear_layer *l = &parts[i].l;
            l->w_qkv = first->w_qkv, l->w_z = first->w_z, l->w_b = first->w_b, l->w_a = first->w_a;
            l->w_out = first->w_out, l->conv = first->conv, l->a_log = first->a_log,
            l->dt_bias = first->dt_bias;
            l->norm_weight = first->norm_weight;
            parts[i].grads = parts[0].grads;
        }
        part_rows(&c, a, &parts[i]);
        UPIPE_TRY(part_dry(&parts[i], c.ops, a->segments > 1 || a->end != NULL));
    }
    if (a->segments > 1 || a->end != NULL)
        carry = (float *)zeros_there(&c, upipe_linear_layer_state_bytes(&parts[0].l));
    mem.guard = a->bad_rank >= 0 ? guard : NULL;
    mem.user = &g;
    for (int i = 0; i < a->segments && s == UPIPE_OK; ++i) {
        s = part_run(&c, comm, &parts[i], 0, carry);
        if (s == UPIPE_OK) read_rows(&c, a, &parts[i], a->data[Y], parts[i].y);
    }
    if (s != UPIPE_OK) CHECK_INT(mem.live, 0);
    if (a->end != NULL && rank == 0)
        place.get(&c, a->end, carry, (size_t)upi_lin_states(&parts[0].l, a->key_heads) * 4);
    if (carry != NULL) carry = (float *)zeros_there(&c, upipe_linear_layer_state_bytes(&parts[0].l));
    for (int i = a->segments - 1; i >= 0 && s == UPIPE_OK; --i) {
        s = part_run(&c, comm, &parts[i], 1, carry);
        if (s == UPIPE_OK) read_rows(&c, a, &parts[i], a->grad[X], parts[i].dx);
        if (s == UPIPE_OK) continue;
        CHECK_REFUSED(part_run(&c, comm, &parts[i], 1, carry), UPIPE_ERR_ARG, c.err, "consumed");
        CHECK_STATUS(upipe_linear_layer_saved_free(&c, &parts[i].saved), UPIPE_OK, c.err);
        CHECK_INT(mem.live, 0);
    }
    if (s == UPIPE_OK) {
        const float *const from[TENSORS] = {NULL,
                                            parts[0].grads.w_qkv,
                                            parts[0].grads.w_z,
                                            parts[0].grads.w_b,
                                            parts[0].grads.w_a,
                                            parts[0].grads.w_out,
                                            parts[0].grads.conv,
                                            parts[0].grads.a_log,
                                            parts[0].grads.dt_bias,
                                            parts[0].grads.norm_weight};
        for (int turn = 0; turn < a->ranks; ++turn) { /* sums in the order of ranks */
            UPIPE_TRY(upipe_comm_barrier(&c, comm));
            for (int i = 1; i < TENSORS && turn == rank; ++i) {
                float *here = floats(count_of(a, i));
                place.get(&c, here, from[i], (size_t)count_of(a, i) * 4);
                for (int64_t j = 0; j < count_of(a, i); ++j) a->grad[i][j] += here[j];
            }
        }
    }
    upipe_mem_destroy(&mem, NULL);
    return s;
}

static inline void run(layer *a)
{
    upipe_err e = {0};
    upipe_status s;
    const int mark = buffers_n;
    CHECK_STATUS(upipe_threads_init(&a->team, a->ranks, 20, &e), UPIPE_OK, e);
    if (place.open != NULL) place.open(a->ranks);
    s = upipe_threads_run(&a->team, rank_body, a, a->statuses, &e);
    if (place.close != NULL) place.close(a->ranks);
    if (a->bad_rank < 0) CHECK_SAY(s == UPIPE_OK, "%d ranks, %d segments: %s", a->ranks, a->segments, e.text);
    upipe_threads_free(&a->team);
    buffers_free(mark);
}

/* ---- against f64 ---- */

static inline double largest(const double *v, int64_t n)
{
    double most = 1e-30;
    for (int64_t j = 0; j < n; ++j) most = fmax(most, fabs(v[j]));
    return most;
}

/* No element is further away than `bound`, of the largest number, and `moved`. */
static inline void check_close(const float *got, const double *want, int64_t n, double bound, double moved,
                               const char *name, const char *what)
{
    const double most = largest(want, n);
    double far = 0;
    for (int64_t j = 0; j < n; ++j) {
        const double d = fabs((double)got[j] - want[j]);
        if (!(d <= far)) far = d;
    }
    CHECK_SAY(far <= bound * most + moved, "%s: %s is %.3g away of at most %.3g: %.3g, not %.3g", what, name,
              far, most, far / most, bound + moved / most);
}

/* The gradient of one tensor in f64: differences of the oracle. */
static inline void differences(const layer *a, double *const *in, int i, double *out, double *y)
{
    for (int64_t j = 0; j < count_of(a, i); ++j) {
        const double was = in[i][j], h = 1e-5;
        double up, down;
        in[i][j] = was + h, up = oracle(a, in, y);
        in[i][j] = was - h, down = oracle(a, in, y);
        in[i][j] = was;
        out[j] = (up - down) / (2 * h);
    }
}

/* The same inputs, each moved by at most half a unit in the last place of f32. */
static inline double **moved_inputs(const layer *a, double *const *in)
{
    test_rng r = {31};
    double **to = widened(a);
    for (int i = 0; i < Y; ++i)
        for (int64_t j = 0; j < count_of(a, i); ++j)
            to[i][j] = in[i][j] * (1 + (test_below(&r, 3) - 1) * 0x1p-24);
    return to;
}

static inline double furthest(const double *a, const double *b, int64_t n)
{
    double far = 0;
    for (int64_t j = 0; j < n; ++j) far = fmax(far, fabs(a[j] - b[j]));
    return far;
}

/* No result is further from f64 than 16 units in the last place of its largest number, and 16 times as far as results go where
 * inputs are moved by half a unit: a short q, k or o makes gradients that depend on every bit. */
static inline void check_oracle(layer *a, const char *what)
{
    const double bound = 16 * 0x1p-23, times_moved = 16;
    const int mark = buffers_n;
    double **in = widened(a), **other = moved_inputs(a, in);
    double *y = (double *)zeroed((size_t)count_of(a, Y) * 8),
           *z = (double *)zeroed((size_t)count_of(a, Y) * 8);
    oracle(a, in, y);
    oracle(a, other, z);
    check_close(a->data[Y], y, count_of(a, Y), bound, times_moved * furthest(y, z, count_of(a, Y)), "y",
                what);
    for (int i = 0; i < TENSORS; ++i) {
        const int64_t n = count_of(a, i);
        double *want = (double *)zeroed((size_t)n * 8), *near = (double *)zeroed((size_t)n * 8);
        differences(a, in, i, want, y);
        differences(a, other, i, near, z);
        check_close(a->grad[i], want, n, bound, times_moved * furthest(want, near, n), names[i], what);
    }
    buffers_free(mark);
}

static inline void shape_text(const layer *a, char *text, size_t bytes)
{
    snprintf(
        text, bytes,
        "%lld tokens of %lld, %d/%d heads of %d x %d, %d taps, chunk %d, %d ranks, %d rings, %d segments%s",
        (long long)a->n, (long long)a->model, a->heads, a->key_heads, a->key_dim, a->value_dim, a->taps,
        a->chunk, a->ranks, a->ring, a->segments, a->borders.cu_seqlens != NULL ? ", borders" : "");
}

/* Random layers over ranks, rings and segments, cut anywhere: ranks of a token, fewer tokens than taps. */
static inline void check_drawn(int draws)
{
    test_rng r = {5};
    for (int i = 0; i < draws; ++i) {
        static const int dims[] = {3, 4, 8, 17}; /* of length 1 a key of one element has no gradient */
        layer a = {
            .n = 4 + test_below(&r, 24), .model = 1 + test_below(&r, 9), .taps = 2 + test_below(&r, 4)};
        int64_t cu[8] = {-1, [7] = 1000}; /* the first document began before, the last one goes on */
        char what[200];
        a.key_heads = 1 + test_below(&r, 3);
        a.heads = a.key_heads * (1 + test_below(&r, 2));
        a.key_dim = dims[test_below(&r, 4)], a.value_dim = 2 + dims[test_below(&r, 4)];
        a.chunk = 1 + test_below(&r, 12);
        for (int j = 0; j < 6; ++j) cu[1 + j] = j == 0 ? test_below(&r, 3) : cu[j] + test_below(&r, 7);
        if (i % 2) a.borders = (upipe_borders){cu, 7};
        draw(&a, &r);
        a.stage_keys = test_below(&r, 3);
        a.ranks = 1 + i % RANKS_MAX;
        if (i % 8 == 7) a.ring = 2;
        if (i % 3 == 2 && a.n >= 3 * a.ranks) a.segments = 1 + test_below(&r, SEGMENTS_MAX);
        shape_text(&a, what, sizeof what);
        run(&a);
        check_oracle(&a, what);
        buffers_free(0);
    }
}

/* ---- bits ---- */

/* The same inputs, results of its own. */
static inline layer twin_of(const layer *a)
{
    layer b = *a;
    b.data[Y] = floats(count_of(a, Y));
    for (int i = 0; i < TENSORS; ++i) b.grad[i] = floats(count_of(a, i));
    return b;
}

static inline void check_rows(const layer *a, const layer *b, int64_t first, int64_t n, const char *what)
{
    const int64_t D = a->model;
    CHECK_SAY(memcmp(a->data[Y] + first * D, b->data[Y], (size_t)(n * D) * 4) == 0, "%s: y has other bits",
              what);
    CHECK_SAY(memcmp(a->grad[X] + first * D, b->grad[X], (size_t)(n * D) * 4) == 0, "%s: dx has other bits",
              what);
}

static inline void check_weights(const layer *a, const layer *b, const char *what)
{
    for (int i = 1; i < TENSORS; ++i)
        CHECK_SAY(memcmp(a->grad[i], b->grad[i], (size_t)count_of(a, i) * 4) == 0,
                  "%s: the gradient of %s has other bits", what, names[i]);
}

/* A layer whose blocks of channels, tiles and chunks are several, with values that its type holds. */
static inline layer large(test_rng *r, upipe_dtype t)
{
    layer a = {.n = 192,
               .model = 24,
               .heads = 4,
               .key_heads = 2,
               .key_dim = 40,
               .value_dim = 24,
               .taps = 4,
               .chunk = 16};
    draw(&a, r);
    a.dtype = t;
    for (int i = 0; i < Y; ++i)
        for (int64_t j = 0; (i < STORED || i == DY) && j < count_of(&a, i); ++j) {
            char one[4];
            upipe_cpu_put(one, t, 0, a.data[i][j]);
            a.data[i][j] = upipe_cpu_get(one, t, 0);
        }
    return a;
}

/* Ranks, rings, segments and stages change no bit of y and dx; stages none of all. */
static inline void check_bits(void)
{
    static const int64_t borders[] = {-1, 20, 64, 100, 102, 140, 1000};
    test_rng r = {11};
    for (int t = UPIPE_F32; t <= UPIPE_BF16; ++t)
        for (int packed = 0; packed < 2; ++packed) {
            layer a = large(&r, (upipe_dtype)t), b;
            if (packed) a.borders = (upipe_borders){borders, 6};
            run(&a);
            for (int ranks = 1; ranks <= RANKS_MAX; ++ranks)
                for (int way = 0; way < 3; ++way) {
                    b = twin_of(&a);
                    b.ranks = ranks;
                    b.stage_keys = way % 2;
                    if (ranks == 4 && way == 1) b.ring = 2;
                    if (way == 2 && ranks < 3) b.segments = 3;
                    run(&b);
                    check_rows(&a, &b, 0, a.n, "ranks");
                    if (ranks == 1 && b.segments == 1) check_weights(&a, &b, "stages");
                }
            buffers_free(0);
        }
}

/* A document that begins at a multiple of the chunk has the bits of the document alone. */
static inline void check_documents(void)
{
    static const int64_t borders[] = {0, 48, 64, 64, 160, 192};
    test_rng r = {13};
    layer a = large(&r, UPIPE_F32);
    a.borders = (upipe_borders){borders, 5};
    a.ranks = 3;
    run(&a);
    for (int i = 0; i < 5; ++i) {
        layer b = twin_of(&a);
        b.borders = (upipe_borders){0};
        b.ranks = 1;
        b.n = borders[i + 1] - borders[i];
        b.data[X] += borders[i] * a.model, b.data[DY] += borders[i] * a.model;
        if (b.n == 0) continue;
        run(&b);
        check_rows(&a, &b, borders[i], b.n, "documents");
    }
    buffers_free(0);
}

/* Elements of two bytes are as far from f32 as their roundings are: of what is stored between x and y, or dy and dx, there are
 * some ten. */
static inline void check_types(void)
{
    test_rng r = {17};
    layer a = large(&r, UPIPE_BF16), b = twin_of(&a);
    run(&a);
    b.dtype = UPIPE_F32;
    run(&b);
    for (int i = -1; i < TENSORS; ++i) {
        const int64_t n = count_of(&a, i < 0 ? Y : i);
        double *want = (double *)zeroed((size_t)n * 8);
        for (int64_t j = 0; j < n; ++j) want[j] = (double)(i < 0 ? b.data[Y] : b.grad[i])[j];
        check_close(i < 0 ? a.data[Y] : a.grad[i], want, n, 10 * 0x1p-9, 0, names[i < 0 ? Y : i],
                    upipe_dtype_name(a.dtype));
    }
    buffers_free(0);
}

/* ---- transformers' module ---- */

static inline int64_t state_of(const layer *a)
{
    return (int64_t)a->heads * a->key_dim * a->value_dim;
}

/* As golden/make_gated_delta.py draws it. */
static inline void draw_golden(layer *a)
{
    static const double mean[Y] = {[DT_BIAS] = -1, [NORM] = 1},
                        scale[Y] = {1, 0.25, 0.25, 0.25, 0.25, 0.25, 0.5, 1, 1, 0.25, 1};
    for (int i = 0; i < Y; ++i) golden_draw(a->data[i], count_of(a, i), names[i], mean[i], scale[i]);
}

static inline void check_golden_states(void)
{
    for (int ranks = 1; ranks <= RANKS_MAX; ++ranks) {
        test_rng r = {1};
        layer a = {.n = GOLDEN_TOKENS,
                   .model = GOLDEN_MODEL,
                   .heads = GOLDEN_HEADS,
                   .key_heads = GOLDEN_KEY_HEADS,
                   .key_dim = GOLDEN_KEY_DIM,
                   .value_dim = GOLDEN_VALUE_DIM,
                   .taps = GOLDEN_TAPS,
                   .chunk = GOLDEN_CHUNK,
                   .eps = golden_eps};
        draw(&a, &r);
        draw_golden(&a);
        a.ranks = ranks;
        a.end = floats(state_of(&a));
        run(&a);
        for (int i = 0; i < TENSORS; ++i) {
            CHECK_TEXT(golden_rows[i].name, names[i]);
            check_golden(&golden_rows[i], a.grad[i], count_of(&a, i));
        }
        check_golden(&golden_rows[TENSORS], a.data[Y], count_of(&a, Y));
        check_golden(&golden_rows[TENSORS + 1], a.end, state_of(&a));
        buffers_free(0);
    }
}

/* ---- failures ---- */

/* Each allocation fails once, on the first rank or the last one: all ranks end with a reason, and nothing stays. */
static inline void check_out_of_memory(int step)
{
    test_rng r = {19};
    layer a = {
        .n = 12, .model = 4, .heads = 2, .key_heads = 2, .key_dim = 4, .value_dim = 4, .taps = 3, .chunk = 4};
    draw(&a, &r);
    a.ranks = 2, a.stage_keys = 1;
    for (a.bad_rank = 0; a.bad_rank < 2; ++a.bad_rank)
        for (a.bad_alloc = 0; a.bad_alloc < 1000; a.bad_alloc += step) {
            memset(a.allocs, 0, sizeof a.allocs);
            run(&a);
            if (a.statuses[0] == UPIPE_OK && a.statuses[1] == UPIPE_OK) break;
            CHECK_INT(a.statuses[a.bad_rank], UPIPE_ERR_MEMORY);
            CHECK_INT(a.statuses[1 - a.bad_rank], UPIPE_ERR_ABORTED);
        }
    CHECK(a.bad_alloc > 30 && a.bad_alloc < 1000);
    buffers_free(0);
}

#endif
