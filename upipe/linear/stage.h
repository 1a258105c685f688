/* stage.h -- a stage of a layer of linear attention, and a tile of its output */
#ifndef UPIPE_LINEAR_STAGE_H
#define UPIPE_LINEAR_STAGE_H

/* A pass of one rank: what scan's steps read.
 *   length  f32 [key_dim]: 1 / sqrt(key_dim), the weight of a norm that gives q and k the length 1
 *   dx      backward: the sum of the gradient of x, f32 [n][1][D] */
typedef struct upi_lin_pass {
    const upipe_linear_layer *l;
    upipe_linear_ops rules;
    const upipe_linear_layer_grads *grads;
    upipe_linear_layer_saved *save;
    upipe_view x, dx;
    float *length;
} upi_lin_pass;

UPIPE_API void upi_lin_begin(const upipe_ctx *c, upi_lin_pass *p, const upipe_linear_layer *l,
                             upipe_linear_layer_saved *save, upipe_view x)
{
    memset(p, 0, sizeof *p);
    p->l = l;
    p->rules = upi_linear_rules(c, l->rules);
    p->save = save;
    p->x = x;
}

/* ---- a stage ---- */

/* Allocates a stage's buffers. */
UPIPE_API upipe_status upi_lin_stage_begin(upipe_ctx *c, upi_lin_stage *s)
{
    static const char *const tags[UPI_LIN_BUFFERS] = {"linear_pre", "linear_qkv",   "linear_dqkv",
                                                      "linear_ab",  "linear_gates", "linear_dgates",
                                                      "gemm_work",  "linear_rule"};
    int i;
    for (i = 0; i < UPI_LIN_BUFFERS; ++i)
        UPIPE_TRY(upipe_alloc(c, &s->at[i], s->bytes[i], i < UPI_LIN_WORK ? UPIPE_USE_QKV : UPIPE_USE_SCRATCH,
                              tags[i]));
    if (s->at[UPI_LIN_MIXED] == NULL) s->at[UPI_LIN_MIXED] = s->at[UPI_LIN_PRE];
    return UPIPE_OK;
}

UPIPE_API upipe_status upi_lin_stage_end(upipe_ctx *c, upi_lin_stage *s)
{
    int i;
    if (s->at[UPI_LIN_MIXED] == s->at[UPI_LIN_PRE]) s->at[UPI_LIN_MIXED] = NULL;
    for (i = UPI_LIN_BUFFERS - 1; i >= 0; --i) UPIPE_TRY(upipe_free(c, s->at[i]));
    return UPIPE_OK;
}

/* The first row of w_qkv, and of its convolution, of a stage's q, k or v. */
UPIPE_API int64_t upi_lin_row(const upipe_linear_layer *l, const upi_lin_stage *s, int which)
{
    if (which == 2) return 2 * (int64_t)l->key_heads * l->key_dim + (int64_t)s->head * l->value_dim;
    return (int64_t)(which * l->key_heads + s->key) * l->key_dim;
}

/* n rows of a weight of D columns. */
UPIPE_API upipe_view upi_lin_weight(const upipe_linear_layer *l, const void *w, upipe_dtype t, int64_t row,
                                    int64_t n)
{
    const int64_t model = l->plan->desc.model_dim;
    return upi_lin_matrix(upipe_offset(w, (size_t)(row * model) * upipe_dtype_bytes(t)), t, n, model);
}

UPIPE_API upipe_status upi_lin_gemm(upipe_ctx *c, const upi_lin_stage *s, upipe_view out, upipe_view a,
                                    upipe_view b, int flags)
{
    return c->ops->gemm(c, out, a, b, flags, s->at[UPI_LIN_WORK], s->bytes[UPI_LIN_WORK]);
}

/* q, k, v before the convolution; a and b. */
UPIPE_API upipe_status upi_lin_project(upipe_ctx *c, const upi_lin_pass *p, const upi_lin_stage *s)
{
    const upipe_linear_layer *l = p->l;
    const upipe_dtype t = l->plan->desc.dtype;
    int i;
    for (i = 0; i < 3; ++i) {
        const upipe_view y = upi_lin_flat(upi_lin_part(l, s, s->at[UPI_LIN_PRE], i));
        UPIPE_TRY(upi_lin_gemm(c, s, y, p->x, upi_lin_weight(l, l->w_qkv, t, upi_lin_row(l, s, i), y.d),
                               UPIPE_GEMM_TRANS_B));
    }
    for (i = 0; i < 2; ++i)
        UPIPE_TRY(upi_lin_gemm(c, s, upi_lin_flat(upi_lin_pair(l, s, s->at[UPI_LIN_RAW], t, i)), p->x,
                               upi_lin_weight(l, i == 0 ? l->w_a : l->w_b, t, s->head, s->heads),
                               UPIPE_GEMM_TRANS_B));
    return UPIPE_OK;
}

UPIPE_API upipe_linear_gates upi_lin_gates(const upipe_linear_layer *l, const upi_lin_stage *s)
{
    upipe_linear_gates g;
    g.a = upi_lin_pair(l, s, s->at[UPI_LIN_RAW], l->plan->desc.dtype, 0);
    g.b = upi_lin_pair(l, s, s->at[UPI_LIN_RAW], l->plan->desc.dtype, 1);
    g.g = upi_lin_pair(l, s, s->at[UPI_LIN_GATES], UPIPE_F32, 0);
    g.beta = upi_lin_pair(l, s, s->at[UPI_LIN_GATES], UPIPE_F32, 1);
    g.a_log = l->a_log + s->head;
    g.dt_bias = l->dt_bias + s->head;
    return g;
}

/* The convolution's rows of q, k or v in a stage's state, behind the rule's states; NULL stays NULL. */
UPIPE_API upipe_view upi_lin_rows(const upipe_linear_layer *l, const upi_lin_stage *s, const float *state,
                                  int which)
{
    const int32_t d = (int32_t)((which == 2 ? s->heads * l->value_dim : s->keys * l->key_dim));
    void *data = upipe_offset(state, (size_t)(upi_lin_states(l, s->keys) + which * s->keys * l->key_dim) * 4);
    return upipe_view_make(data, UPIPE_F32, l->taps - 1, s->width, 1, d, d);
}

/* The convolution of q, k or v. */
UPIPE_API upipe_linear_conv upi_lin_conv(const upipe_linear_layer *l, const upi_lin_stage *s, const float *in,
                                         float *out, int which)
{
    upipe_linear_conv a;
    a.x = upi_lin_flat(upi_lin_part(l, s, s->at[UPI_LIN_PRE], which));
    a.y = upi_lin_flat(upi_lin_part(l, s, s->at[UPI_LIN_MIXED], which));
    a.before = upi_lin_rows(l, s, in, which);
    a.after = upi_lin_rows(l, s, out, which);
    a.weight = l->conv + upi_lin_row(l, s, which) * l->taps;
    a.pos = l->first + upipe_shard_pos(&l->plan->shard, 0);
    a.borders = l->borders;
    a.taps = l->taps;
    return a;
}

/* q, k, v behind the convolution; out: NULL in a backward. */
UPIPE_API upipe_status upi_lin_mix(upipe_ctx *c, const upi_lin_pass *p, const upi_lin_stage *s,
                                   const float *in, float *out)
{
    int i;
    for (i = 0; i < 3; ++i) {
        const upipe_linear_conv a = upi_lin_conv(p->l, s, in, out, i);
        UPIPE_TRY(p->rules.conv(c, &a));
    }
    return UPIPE_OK;
}

UPIPE_API float upi_lin_length_eps(const upipe_linear_layer *l)
{
    return (float)(UPIPE_LINEAR_LENGTH_EPS / l->key_dim); /* a norm adds it to the mean */
}

/* What the rule reads: q and k of length 1, g and beta. */
UPIPE_API upipe_status upi_lin_ready(upipe_ctx *c, const upi_lin_pass *p, const upi_lin_stage *s)
{
    const upipe_linear_gates g = upi_lin_gates(p->l, s);
    int i;
    for (i = 0; i < 2; ++i) {
        const upipe_view v = upi_lin_part(p->l, s, s->at[UPI_LIN_MIXED], i);
        UPIPE_TRY(c->ops->rmsnorm(c, v, v, p->length, upi_lin_length_eps(p->l)));
    }
    return p->rules.gates(c, &g);
}

/* A step of the scan: heads are key heads. */
UPIPE_API upipe_status upi_lin_step_fwd(upipe_ctx *c, void *user, int first, int keys, const float *in,
                                        float *out)
{
    const upi_lin_pass *p = (const upi_lin_pass *)user;
    upi_lin_stage s = upi_lin_stage_bytes(c->ops, p->l, first, keys, 0);
    upipe_linear_grad rule;
    UPIPE_TRY(upi_lin_stage_begin(c, &s));
    UPIPE_TRY(upi_lin_project(c, p, &s));
    UPIPE_TRY(upi_lin_mix(c, p, &s, in, out));
    UPIPE_TRY(upi_lin_ready(c, p, &s));
    rule = upi_lin_rule(p->l, &s, p->save->o);
    rule.a.state = in;
    rule.a.out = out;
    UPIPE_TRY(upipe_linear_fwd(c, &p->rules, &rule.a));
    return upi_lin_stage_end(c, &s);
}

/* dW += dy^T x, where that is wanted. */
UPIPE_API upipe_status upi_lin_weight_grad(upipe_ctx *c, const upi_lin_pass *p, const upi_lin_stage *s,
                                           float *dw, int64_t row, upipe_view dy)
{
    if (dw == NULL) return UPIPE_OK;
    return upi_lin_gemm(c, s, upi_lin_weight(p->l, dw, UPIPE_F32, row, dy.d), dy, p->x,
                        UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE);
}

/* dx += what comes through some heads of a gradient, by their rows of a weight. */
UPIPE_API upipe_status upi_lin_add_x(upipe_ctx *c, const upi_lin_pass *p, const upi_lin_stage *s,
                                     upipe_view heads, int first, int n, const void *w, int64_t row)
{
    heads.data = upipe_view_at(heads, 0, first);
    heads.h = n;
    heads = upi_lin_flat(heads);
    row += (int64_t)first * (heads.d / n);
    return upi_lin_gemm(c, s, p->dx, heads, upi_lin_weight(p->l, w, p->l->plan->desc.dtype, row, heads.d),
                        UPIPE_GEMM_ACCUMULATE);
}

/* Gradients of the projections' weights, and dx a key head at a time, so that stages change no bit. */
UPIPE_API upipe_status upi_lin_project_bwd(upipe_ctx *c, const upi_lin_pass *p, const upi_lin_stage *s)
{
    const upipe_linear_layer *l = p->l;
    const int group = upi_lin_group(l);
    upipe_view part[3], raw[2];
    int i, key;
    for (i = 0; i < 3; ++i) {
        part[i] = upi_lin_part(l, s, s->at[UPI_LIN_GRAD], i);
        UPIPE_TRY(upi_lin_weight_grad(c, p, s, p->grads->w_qkv, upi_lin_row(l, s, i), upi_lin_flat(part[i])));
    }
    for (i = 0; i < 2; ++i) {
        raw[i] = upi_lin_pair(l, s, s->at[UPI_LIN_RAW], l->plan->desc.dtype, i);
        UPIPE_TRY(upi_lin_weight_grad(c, p, s, i == 0 ? p->grads->w_a : p->grads->w_b, s->head,
                                      upi_lin_flat(raw[i])));
    }
    for (key = 0; key < s->keys; ++key) {
        for (i = 0; i < 3; ++i)
            UPIPE_TRY(upi_lin_add_x(c, p, s, part[i], i < 2 ? key : key * group, i < 2 ? 1 : group, l->w_qkv,
                                    upi_lin_row(l, s, i)));
        for (i = 0; i < 2; ++i)
            UPIPE_TRY(upi_lin_add_x(c, p, s, raw[i], key * group, group, i == 0 ? l->w_a : l->w_b, s->head));
    }
    return UPIPE_OK;
}

/* From the gradients behind norm and convolution to those of the projections; q and k without their length are made again. */
UPIPE_API upipe_status upi_lin_mix_bwd(upipe_ctx *c, const upi_lin_pass *p, const upi_lin_stage *s,
                                       const float *state, float *dstate)
{
    const upipe_linear_layer *l = p->l;
    int i;
    UPIPE_TRY(upi_lin_mix(c, p, s, state, NULL));
    for (i = 0; i < 2; ++i) {
        const upipe_view d = upi_lin_part(l, s, s->at[UPI_LIN_GRAD], i);
        UPIPE_TRY(c->ops->rmsnorm_bwd(c, d, d, upi_lin_part(l, s, s->at[UPI_LIN_MIXED], i), p->length,
                                      upi_lin_length_eps(l), NULL, 0));
    }
    for (i = 0; i < 3; ++i) {
        upipe_linear_conv_grad g;
        g.a = upi_lin_conv(l, s, state, NULL, i);
        g.dy = upi_lin_flat(upi_lin_part(l, s, s->at[UPI_LIN_GRAD], i));
        g.dstate = upi_lin_rows(l, s, dstate, i);
        g.dweight = (float *)upipe_offset(p->grads->conv, (size_t)(upi_lin_row(l, s, i) * l->taps) * 4);
        UPIPE_TRY(p->rules.conv_bwd(c, &g));
    }
    return UPIPE_OK;
}

/* a and b become their gradients. */
UPIPE_API upipe_status upi_lin_gates_bwd(upipe_ctx *c, const upi_lin_pass *p, const upi_lin_stage *s)
{
    upipe_linear_gates_grad g;
    g.gates = upi_lin_gates(p->l, s);
    g.dg = upi_lin_pair(p->l, s, s->at[UPI_LIN_DGATES], UPIPE_F32, 0);
    g.dbeta = upi_lin_pair(p->l, s, s->at[UPI_LIN_DGATES], UPIPE_F32, 1);
    g.da_log = (float *)upipe_offset(p->grads->a_log, (size_t)s->head * 4);
    g.ddt_bias = (float *)upipe_offset(p->grads->dt_bias, (size_t)s->head * 4);
    return p->rules.gates_bwd(c, &g);
}

UPIPE_API upipe_status upi_lin_step_bwd(upipe_ctx *c, void *user, int first, int keys, const float *state,
                                        float *dstate)
{
    const upi_lin_pass *p = (const upi_lin_pass *)user;
    upi_lin_stage s = upi_lin_stage_bytes(c->ops, p->l, first, keys, 1);
    upipe_linear_grad rule;
    UPIPE_TRY(upi_lin_stage_begin(c, &s));
    UPIPE_TRY(upi_lin_project(c, p, &s));
    UPIPE_TRY(upi_lin_mix(c, p, &s, state, NULL));
    UPIPE_TRY(upi_lin_ready(c, p, &s));
    rule = upi_lin_rule(p->l, &s, p->save->o);
    rule.a.state = state;
    rule.dstate = dstate;
    UPIPE_TRY(upipe_linear_bwd(c, &p->rules, &rule));
    UPIPE_TRY(upi_lin_mix_bwd(c, p, &s, state, dstate));
    UPIPE_TRY(upi_lin_gates_bwd(c, p, &s));
    UPIPE_TRY(upi_lin_project_bwd(c, p, &s));
    return upi_lin_stage_end(c, &s);
}

/* ---- tiles of rows: norm, gate, output projection ---- */

/* z and normed: [rows][heads][value_dim] of a tile; both: what they make. */
typedef struct upi_lin_tile {
    void *z, *normed, *both, *work;
    size_t work_bytes;
    upipe_mem_tiles at;
} upi_lin_tile;

UPIPE_API upipe_status upi_lin_tile_begin(upipe_ctx *c, const upipe_linear_layer *l, upi_lin_tile *t)
{
    memset(t, 0, sizeof *t);
    UPIPE_TRY(upipe_alloc(c, &t->z, upi_lin_tile_bytes(l), UPIPE_USE_SCRATCH, "linear_z"));
    return upipe_alloc(c, &t->normed, upi_lin_tile_bytes(l), UPIPE_USE_SCRATCH, "linear_normed");
}

UPIPE_API upipe_status upi_lin_tile_work(upipe_ctx *c, upi_lin_tile *t, size_t bytes)
{
    t->work_bytes = bytes;
    return upipe_alloc(c, &t->work, bytes, UPIPE_USE_SCRATCH, "gemm_work");
}

UPIPE_API upipe_status upi_lin_tile_end(upipe_ctx *c, upi_lin_tile *t)
{
    UPIPE_TRY(upipe_free(c, t->work));
    UPIPE_TRY(upipe_free(c, t->both));
    UPIPE_TRY(upipe_free(c, t->normed));
    return upipe_free(c, t->z);
}

/* This tile of a buffer. */
UPIPE_API upipe_view upi_lin_tile_view(const upipe_linear_layer *l, const upi_lin_tile *t, void *buffer)
{
    return upipe_view_packed(buffer, l->plan->desc.dtype, t->at.n, l->heads, l->value_dim);
}

/* This tile of o. */
UPIPE_API upipe_view upi_lin_tile_o(const upi_lin_pass *p, const upi_lin_tile *t)
{
    const upipe_linear_layer *l = p->l;
    return upipe_view_rows(
        upipe_view_packed(p->save->o, l->plan->desc.dtype, l->plan->local, l->heads, l->value_dim), t->at.row,
        t->at.n);
}

/* z, and the norm of o. */
UPIPE_API upipe_status upi_lin_tile_make(upipe_ctx *c, const upi_lin_pass *p, const upi_lin_tile *t)
{
    const upipe_linear_layer *l = p->l;
    const upipe_view z = upi_lin_flat(upi_lin_tile_view(l, t, t->z));
    UPIPE_TRY(c->ops->gemm(c, z, upipe_view_rows(p->x, t->at.row, t->at.n),
                           upi_lin_weight(l, l->w_z, z.dtype, 0, z.d), UPIPE_GEMM_TRANS_B, t->work,
                           t->work_bytes));
    return c->ops->rmsnorm(c, upi_lin_tile_view(l, t, t->normed), upi_lin_tile_o(p, t), l->norm_weight,
                           l->norm_eps);
}

UPIPE_API upipe_status upi_lin_out_fwd(upipe_ctx *c, const upi_lin_pass *p, upipe_view y)
{
    const upipe_linear_layer *l = p->l;
    const int64_t wide = (int64_t)l->heads * l->value_dim;
    const upipe_view w = upi_lin_matrix(l->w_out, y.dtype, l->plan->desc.model_dim, wide);
    upi_lin_tile t;
    UPIPE_TRY(upi_lin_tile_begin(c, l, &t));
    UPIPE_TRY(upi_lin_tile_work(c, &t, upi_lin_tile_work_bytes(c->ops, l, 0)));
    while (upipe_mem_tiles_next(c->mem, &t.at, l->plan->local, upi_lin_tile_rows(l))) {
        const upipe_view z = upi_lin_flat(upi_lin_tile_view(l, &t, t.z)),
                         normed = upi_lin_flat(upi_lin_tile_view(l, &t, t.normed));
        UPIPE_TRY(upi_lin_tile_make(c, p, &t));
        UPIPE_TRY(c->ops->gate(c, UPIPE_GATE_SILU, z, z, normed));
        UPIPE_TRY(c->ops->gemm(c, upipe_view_rows(y, t.at.row, t.at.n), z, w, UPIPE_GEMM_TRANS_B, t.work,
                               t.work_bytes));
    }
    return upi_lin_tile_end(c, &t);
}

/* A tile: o becomes its gradient, and dx begins with what comes through z. */
UPIPE_API upipe_status upi_lin_out_bwd_tile(upipe_ctx *c, const upi_lin_pass *p, const upi_lin_tile *t,
                                            upipe_view dy)
{
    const upipe_linear_layer *l = p->l;
    const int64_t wide = (int64_t)l->heads * l->value_dim, model = l->plan->desc.model_dim;
    const upipe_view z = upi_lin_flat(upi_lin_tile_view(l, t, t->z)), o = upi_lin_tile_o(p, t),
                     normed = upi_lin_flat(upi_lin_tile_view(l, t, t->normed)),
                     both = upi_lin_flat(upi_lin_tile_view(l, t, t->both));
    const upipe_view x = upipe_view_rows(p->x, t->at.row, t->at.n),
                     dx = upipe_view_rows(p->dx, t->at.row, t->at.n);
    /* heads one below the other, since they share a weight */
    const upipe_view each = upipe_view_packed(o.data, o.dtype, o.n * o.h, 1, o.d),
                     deach = upipe_view_packed(t->normed, o.dtype, o.n * o.h, 1, o.d);
    UPIPE_TRY(upi_lin_tile_make(c, p, t));
    UPIPE_TRY(c->ops->gate(c, UPIPE_GATE_SILU, both, z, normed));
    if (p->grads->w_out != NULL)
        UPIPE_TRY(c->ops->gemm(c, upi_lin_matrix(p->grads->w_out, UPIPE_F32, model, wide), dy, both,
                               UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE, t->work, t->work_bytes));
    UPIPE_TRY(
        c->ops->gemm(c, both, dy, upi_lin_matrix(l->w_out, o.dtype, model, wide), 0, t->work, t->work_bytes));
    UPIPE_TRY(c->ops->gate_bwd(c, UPIPE_GATE_SILU, z, normed, both));
    UPIPE_TRY(
        c->ops->rmsnorm_bwd(c, each, deach, each, l->norm_weight, l->norm_eps, p->grads->norm_weight, 0));
    if (p->grads->w_z != NULL)
        UPIPE_TRY(c->ops->gemm(c, upi_lin_weight(l, p->grads->w_z, UPIPE_F32, 0, wide), z, x,
                               UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE, t->work, t->work_bytes));
    return c->ops->gemm(c, dx, z, upi_lin_weight(l, l->w_z, o.dtype, 0, wide), 0, t->work, t->work_bytes);
}

UPIPE_API upipe_status upi_lin_out_bwd(upipe_ctx *c, const upi_lin_pass *p, upipe_view dy)
{
    const upipe_linear_layer *l = p->l;
    upi_lin_tile t;
    UPIPE_TRY(upi_lin_tile_begin(c, l, &t));
    UPIPE_TRY(upipe_alloc(c, &t.both, upi_lin_tile_bytes(l), UPIPE_USE_SCRATCH, "linear_both"));
    UPIPE_TRY(upi_lin_tile_work(c, &t, upi_lin_tile_work_bytes(c->ops, l, 1)));
    while (upipe_mem_tiles_next(c->mem, &t.at, l->plan->local, upi_lin_tile_rows(l)))
        UPIPE_TRY(upi_lin_out_bwd_tile(c, p, &t, upipe_view_rows(dy, t.at.row, t.at.n)));
    return upi_lin_tile_end(c, &t);
}

/* ---- both directions ---- */

UPIPE_API upipe_status upi_lin_length(upipe_ctx *c, upi_lin_pass *p)
{
    float length[UPIPE_LINEAR_DIM_MAX];
    void *at;
    int i;
    for (i = 0; i < p->l->key_dim; ++i) length[i] = (float)(1.0 / __builtin_sqrt((double)p->l->key_dim));
    UPIPE_TRY(upipe_alloc(c, &at, (size_t)p->l->key_dim * 4, UPIPE_USE_SCRATCH, "linear_length"));
    p->length = (float *)at;
    return c->ops->copy(c, at, length, (size_t)p->l->key_dim * 4);
}

UPIPE_API upipe_status upi_lin_fwd(upipe_ctx *c, upipe_comm *comm, upi_lin_pass *p, upipe_view y,
                                   float *carry)
{
    const upipe_linear_layer *l = p->l;
    const size_t o =
        (size_t)(l->plan->local * l->heads * l->value_dim) * upipe_dtype_bytes(l->plan->desc.dtype);
    upipe_scan scan = upi_lin_scan(l);
    void *states;
    scan.fwd = upi_lin_step_fwd;
    scan.user = p;
    UPIPE_TRY(upipe_alloc(c, &p->save->o, o, UPIPE_USE_OUT, "linear_o"));
    UPIPE_TRY(upipe_alloc(c, &states, upipe_scan_state_bytes(&scan), UPIPE_USE_STAT, "linear_states"));
    p->save->states = (float *)states;
    UPIPE_TRY(upi_lin_length(c, p));
    UPIPE_TRY(upi_scan_fwd(c, comm, &scan, p->save->states, carry, NULL));
    if (y.data != NULL) UPIPE_TRY(upi_lin_out_fwd(c, p, y));
    return upipe_free(c, p->length);
}

UPIPE_API upipe_status upi_lin_bwd(upipe_ctx *c, upipe_comm *comm, upi_lin_pass *p, upipe_view dx,
                                   upipe_view dy, float *carry)
{
    const size_t sum_bytes = dx.dtype == UPIPE_F32 ? 0 : (size_t)(dx.n * dx.d) * 4;
    upipe_scan scan = upi_lin_scan(p->l);
    void *sum;
    scan.bwd = upi_lin_step_bwd;
    scan.user = p;
    UPIPE_TRY(upi_lin_length(c, p));
    UPIPE_TRY(upipe_alloc(c, &sum, sum_bytes, UPIPE_USE_ACT_GRAD, "linear_dx"));
    p->dx = sum != NULL ? upi_lin_matrix(sum, UPIPE_F32, dx.n, dx.d) : dx;
    UPIPE_TRY(upi_lin_out_bwd(c, p, dy));
    UPIPE_TRY(upi_scan_bwd(c, comm, &scan, p->save->states, carry, NULL));
    if (sum != NULL) UPIPE_TRY(c->ops->cast(c, dx, p->dx));
    UPIPE_TRY(upipe_free(c, sum));
    return upipe_free(c, p->length);
}

#endif
