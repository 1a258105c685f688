/* sizes.h -- buffers of a stage and of a tile of a layer of linear attention */
#ifndef UPIPE_LINEAR_SIZES_H
#define UPIPE_LINEAR_SIZES_H

/* ---- sizes ---- */

/* Buffers of a stage. pre: projected q, k, v, [n][width]; mixed: behind the convolution; grad: its gradient; raw: a and b;
 * gates: g and beta, f32; dgates: their gradients. */
enum {
    UPI_LIN_PRE,
    UPI_LIN_MIXED,
    UPI_LIN_GRAD,
    UPI_LIN_RAW,
    UPI_LIN_GATES,
    UPI_LIN_DGATES,
    UPI_LIN_WORK,
    UPI_LIN_RULE,
    UPI_LIN_BUFFERS
};

/* A stage: key heads key .. key + keys - 1, value heads likewise; channels of q, k and v together. */
typedef struct upi_lin_stage {
    int key, keys, head, heads;
    int32_t width;
    size_t bytes[UPI_LIN_BUFFERS];
    void *at[UPI_LIN_BUFFERS];
} upi_lin_stage;

UPIPE_API int upi_lin_group(const upipe_linear_layer *l)
{
    return l->heads / l->key_heads;
}

/* Channels of so many key heads, with their value heads. */
UPIPE_API int64_t upi_lin_channels(const upipe_linear_layer *l, int keys)
{
    return keys * (2 * (int64_t)l->key_dim + upi_lin_group(l) * (int64_t)l->value_dim);
}

/* Elements of the rule's states of so many key heads. */
UPIPE_API int64_t upi_lin_states(const upipe_linear_layer *l, int keys)
{
    return (int64_t)keys * upi_lin_group(l) * l->key_dim * l->value_dim;
}

/* The pass: a key head's state has the rule's, and rows of the convolution. */
UPIPE_API upipe_scan upi_lin_scan(const upipe_linear_layer *l)
{
    upipe_scan s;
    memset(&s, 0, sizeof s);
    s.plan = l->plan;
    s.first = l->first;
    s.borders = l->borders;
    s.heads = l->key_heads;
    s.size = upi_lin_states(l, 1) + (l->taps - 1) * upi_lin_channels(l, 1);
    s.stage_heads = l->stage_keys;
    return s;
}

/* Key heads of a stage; the last one may have fewer. */
UPIPE_API int upi_lin_stage_keys(const upipe_linear_layer *l)
{
    return l->stage_keys > 0 && l->stage_keys < l->key_heads ? l->stage_keys : l->key_heads;
}

UPIPE_API int64_t upi_lin_tile_rows(const upipe_linear_layer *l)
{
    const int64_t rows = l->tile_rows > 0 ? l->tile_rows : (int64_t)UPIPE_LINEAR_TILE_ROWS;
    return rows < l->plan->local ? rows : l->plan->local;
}

UPIPE_API upipe_view upi_lin_matrix(const void *data, upipe_dtype dtype, int64_t rows, int64_t columns)
{
    return upipe_view_packed((void *)(uintptr_t)data, dtype, rows, 1, (int32_t)columns);
}

/* Scratch of the products with a weight [columns][depth]: y = x W^T; in a backward also dW += dy^T x and dx (+)= dy W, with
 * dx of type `dx`. */
UPIPE_API size_t upi_lin_product_bytes(const upipe_ops *ops, upipe_dtype t, upipe_dtype dx, int64_t rows,
                                       int64_t columns, int64_t depth, int backward)
{
    const upipe_view x = upi_lin_matrix(NULL, t, rows, depth), y = upi_lin_matrix(NULL, t, rows, columns);
    const upipe_view w = upi_lin_matrix(NULL, t, columns, depth),
                     dw = upi_lin_matrix(NULL, UPIPE_F32, columns, depth);
    const upipe_view to = upi_lin_matrix(NULL, dx, rows, depth);
    size_t bytes = ops->gemm_bytes(ops, y, x, w, UPIPE_GEMM_TRANS_B);
    if (!backward) return bytes;
    bytes =
        upipe_max_bytes(bytes, ops->gemm_bytes(ops, dw, y, x, UPIPE_GEMM_TRANS_A | UPIPE_GEMM_ACCUMULATE));
    bytes = upipe_max_bytes(bytes, ops->gemm_bytes(ops, to, y, w, 0));
    if (dx == UPIPE_F32)
        bytes = upipe_max_bytes(bytes, ops->gemm_bytes(ops, to, y, w, UPIPE_GEMM_ACCUMULATE));
    return bytes;
}

/* Heads of q, k or v in a stage's buffer. */
UPIPE_API upipe_view upi_lin_part(const upipe_linear_layer *l, const upi_lin_stage *s, void *buffer,
                                  int which)
{
    const upipe_dtype t = l->plan->desc.dtype;
    const int32_t heads = which == 2 ? s->heads : s->keys, dim = which == 2 ? l->value_dim : l->key_dim;
    void *data = upipe_offset(buffer, (size_t)(which * s->keys * l->key_dim) * upipe_dtype_bytes(t));
    return upipe_view_make(data, t, l->plan->local, s->width, heads, dim, dim);
}

/* The same as a matrix. */
UPIPE_API upipe_view upi_lin_flat(upipe_view v)
{
    v.d *= v.h;
    v.h = 1;
    return v;
}

/* [n][heads], the first or second one in a buffer of two. */
UPIPE_API upipe_view upi_lin_pair(const upipe_linear_layer *l, const upi_lin_stage *s, void *buffer,
                                  upipe_dtype t, int which)
{
    const int64_t n = l->plan->local;
    return upipe_view_packed(upipe_offset(buffer, (size_t)(which * n * s->heads) * upipe_dtype_bytes(t)), t,
                             n, s->heads, 1);
}

/* The stage's heads of o, all of which lie at `o`. */
UPIPE_API upipe_view upi_lin_o(const upipe_linear_layer *l, const upi_lin_stage *s, void *o)
{
    const upipe_dtype t = l->plan->desc.dtype;
    const int64_t row = (int64_t)l->heads * l->value_dim;
    return upipe_view_make(upipe_offset(o, (size_t)(s->head * l->value_dim) * upipe_dtype_bytes(t)), t,
                           l->plan->local, row, s->heads, l->value_dim, l->value_dim);
}

/* The rule's call: its backward reads the gradient of o in o's place. */
UPIPE_API upipe_linear_grad upi_lin_rule(const upipe_linear_layer *l, const upi_lin_stage *s, void *o)
{
    upipe_linear_grad r;
    memset(&r, 0, sizeof r);
    r.a.q = upi_lin_part(l, s, s->at[UPI_LIN_MIXED], 0);
    r.a.k = upi_lin_part(l, s, s->at[UPI_LIN_MIXED], 1);
    r.a.v = upi_lin_part(l, s, s->at[UPI_LIN_MIXED], 2);
    r.dq = upi_lin_part(l, s, s->at[UPI_LIN_GRAD], 0);
    r.dk = upi_lin_part(l, s, s->at[UPI_LIN_GRAD], 1);
    r.dv = upi_lin_part(l, s, s->at[UPI_LIN_GRAD], 2);
    r.a.o = r.dout = upi_lin_o(l, s, o);
    r.a.g = upi_lin_pair(l, s, s->at[UPI_LIN_GATES], UPIPE_F32, 0);
    r.a.beta = upi_lin_pair(l, s, s->at[UPI_LIN_GATES], UPIPE_F32, 1);
    r.dg = upi_lin_pair(l, s, s->at[UPI_LIN_DGATES], UPIPE_F32, 0);
    r.dbeta = upi_lin_pair(l, s, s->at[UPI_LIN_DGATES], UPIPE_F32, 1);
    r.a.pos = l->first + upipe_shard_pos(&l->plan->shard, 0);
    r.a.borders = l->borders;
    r.a.chunk = l->chunk > 0 ? l->chunk : UPIPE_LINEAR_CHUNK;
    r.a.scale = (float)(1.0 / __builtin_sqrt((double)l->key_dim));
    r.a.work = s->at[UPI_LIN_RULE];
    r.a.work_bytes = s->bytes[UPI_LIN_RULE];
    return r;
}

/* Heads and bytes of the stage that begins with a key head. */
UPIPE_API upi_lin_stage upi_lin_stage_bytes(const upipe_ops *ops, const upipe_linear_layer *l, int key,
                                            int keys, int backward)
{
    const upipe_dtype t = l->plan->desc.dtype;
    const int64_t n = l->plan->local, model = l->plan->desc.model_dim;
    const int64_t columns[] = {(int64_t)keys * l->key_dim,
                               (int64_t)keys * upi_lin_group(l) * l->value_dim,
                               (int64_t)keys * upi_lin_group(l),
                               l->key_dim,
                               (int64_t)upi_lin_group(l) * l->value_dim,
                               upi_lin_group(l)};
    const upipe_linear_direction pass = backward ? UPIPE_LINEAR_BWD : UPIPE_LINEAR_FWD;
    upipe_linear_grad rule;
    upi_lin_stage s;
    int i;
    memset(&s, 0, sizeof s);
    s.key = key;
    s.keys = keys;
    s.head = key * upi_lin_group(l);
    s.heads = keys * upi_lin_group(l);
    s.width = (int32_t)upi_lin_channels(l, keys);
    s.bytes[UPI_LIN_PRE] = (size_t)n * (size_t)s.width * upipe_dtype_bytes(t);
    s.bytes[UPI_LIN_RAW] = (size_t)(2 * n * s.heads) * upipe_dtype_bytes(t);
    s.bytes[UPI_LIN_GATES] = (size_t)(2 * n * s.heads) * 4;
    s.bytes[UPI_LIN_MIXED] = s.bytes[UPI_LIN_GRAD] = backward ? s.bytes[UPI_LIN_PRE] : 0;
    s.bytes[UPI_LIN_DGATES] = backward ? s.bytes[UPI_LIN_GATES] : 0;
    for (i = 0; i < (backward ? 6 : 3); ++i)
        s.bytes[UPI_LIN_WORK] = upipe_max_bytes(
            s.bytes[UPI_LIN_WORK], upi_lin_product_bytes(ops, t, UPIPE_F32, n, columns[i], model, backward));
    rule = upi_lin_rule(l, &s, NULL);
    rule.a.beta.data = &rule; /* there is one: its scratch is more. It is not read */
    s.bytes[UPI_LIN_RULE] = l->rules->bytes(ops, &rule.a, pass);
    rule.a.borders = l->capacity;
    if (l->capacity.cu_seqlens != NULL)
        s.bytes[UPI_LIN_RULE] = upipe_max_bytes(s.bytes[UPI_LIN_RULE], l->rules->bytes(ops, &rule.a, pass));
    return s;
}

/* Buffers of a tile of rows: z, norm(o), in a backward what they make together; scratch. */
UPIPE_API size_t upi_lin_tile_work_bytes(const upipe_ops *ops, const upipe_linear_layer *l, int backward)
{
    const upipe_dtype t = l->plan->desc.dtype;
    const int64_t rows = upi_lin_tile_rows(l), model = l->plan->desc.model_dim,
                  wide = (int64_t)l->heads * l->value_dim;
    return upipe_max_bytes(upi_lin_product_bytes(ops, t, UPIPE_F32, rows, wide, model, backward),
                           upi_lin_product_bytes(ops, t, t, rows, model, wide, backward));
}

UPIPE_API size_t upi_lin_tile_bytes(const upipe_linear_layer *l)
{
    return (size_t)(upi_lin_tile_rows(l) * l->heads * l->value_dim) * upipe_dtype_bytes(l->plan->desc.dtype);
}

#endif
