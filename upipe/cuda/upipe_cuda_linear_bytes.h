/* upipe_cuda_linear_bytes.h -- the scratch of linear attention on CUDA
 *
 * Needs neither CUDA's headers nor a device: a program built without them plans for a GPU.
 *
 *     upipe_cuda_plan_linear(&rules);
 *     bytes = upipe_linear_bytes(&ctx, &rules, &a, UPIPE_LINEAR_BWD);
 */
#ifndef UPIPE_CUDA_LINEAR_BYTES_H
#define UPIPE_CUDA_LINEAR_BYTES_H

#include "../upipe_linear.h"

enum {
    UPI_CUDA_LINEAR_ROWS = 64, /* tokens of a chunk, at most */
    UPI_CUDA_LINEAR_BLOCKS =
        256, /* items of a run, at least: a block each, and a large device holds so many */
    UPI_CUDA_LINEAR_RUN_MAX = 480 /* chunks of a run, whose beginnings are a launch's arguments */
};

/* What lies in scratch. l = the call's chunk; an item is a chunk of the run and a head, chunk * heads + head.
 *   sums dsums dends  f64 [items][l]: G; what reaches it; what reaches it from the state behind the chunk
 *   up down           [items][l]: e^G, e^(G_l - G)
 *   lose              [items]: e^G_l - 1
 *   t m p             [items][l][l]: (1 + beta M)^-1, M, P; m and p become gradients
 *   u rest dr         [items][l][value_dim]: U, W, the gradient of R
 *   state dstate      [items][key_dim][value_dim]: before the chunk; gradient of the one behind it
 *   runs              [runs][heads][key_dim][value_dim]: states that runs begin with
 * NULL: not of this pass, or not of this rule. */
typedef struct upi_cuda_linear_parts {
    double *sums, *dsums, *dends;
    float *up, *down, *lose, *t, *m, *p, *u, *rest, *dr, *state, *dstate, *runs;
    int64_t chunks, runs_n; /* of the call */
    int run;                /* chunks of a run */
} upi_cuda_linear_parts;

/* The next part of scratch at `base`, which may be NULL. */
UPIPE_API void *upi_cuda_linear_place(void *base, size_t *at, int needed, size_t count, size_t element)
{
    void *const p = upipe_offset(base, *at);
    if (!needed) return NULL;
    *at += (count * element + 63) / 64 * 64;
    return p;
}

/* Lays out the scratch of a call; returns its bytes. */
UPIPE_API size_t upi_cuda_linear_layout(upi_cuda_linear_parts *w, const upipe_linear *a,
                                        upipe_linear_direction pass)
{
    const int delta = a->beta.data != NULL, back = pass == UPIPE_LINEAR_BWD, both = delta && back;
    const int least = (UPI_CUDA_LINEAR_BLOCKS - 1) / a->v.h + 1;
    const size_t heads = (size_t)a->v.h, size = (size_t)a->q.d * (size_t)a->v.d;
    size_t at = 0, items, rows, squares, values, states, begins;
    int64_t i;
    memset(w, 0, sizeof *w);
    for (i = 0; i < a->q.n; i = upi_linear_chunk_end(a, i)) ++w->chunks;
    w->run = least;
    while (back && w->run < UPI_CUDA_LINEAR_RUN_MAX && (int64_t)w->run * w->run * 4 < w->chunks) ++w->run;
    if (w->run > w->chunks) w->run = (int)w->chunks;
    w->runs_n = w->chunks > 0 ? (w->chunks + w->run - 1) / w->run : 0;
    items = heads * (size_t)w->run;
    rows = items * (size_t)a->chunk;
    squares = rows * (size_t)a->chunk;
    values = rows * (size_t)a->v.d;
    states = items * size;
    /* a longer run has fewer of them, but more chunks take no less scratch: those that the run before it has at most */
    begins = (size_t)w->runs_n;
    if (w->run > least) begins = upipe_max_bytes(begins, 4 * ((size_t)w->run - 1));
    begins *= heads * size;
#define UPI_CUDA_LINEAR_PLACE(name, type, needed, count) \
    w->name = (type *)upi_cuda_linear_place(a->work, &at, needed, count, sizeof(type))
    UPI_CUDA_LINEAR_PLACE(sums, double, 1, rows);
    UPI_CUDA_LINEAR_PLACE(dsums, double, back, rows);
    UPI_CUDA_LINEAR_PLACE(dends, double, back, rows);
    UPI_CUDA_LINEAR_PLACE(up, float, 1, rows);
    UPI_CUDA_LINEAR_PLACE(down, float, 1, rows);
    UPI_CUDA_LINEAR_PLACE(lose, float, 1, items);
    UPI_CUDA_LINEAR_PLACE(t, float, delta, squares);
    UPI_CUDA_LINEAR_PLACE(m, float, both, squares);
    UPI_CUDA_LINEAR_PLACE(p, float, 1, squares);
    UPI_CUDA_LINEAR_PLACE(u, float, back, values);
    UPI_CUDA_LINEAR_PLACE(rest, float, both, values);
    UPI_CUDA_LINEAR_PLACE(dr, float, both, values);
    UPI_CUDA_LINEAR_PLACE(state, float, back, states);
    UPI_CUDA_LINEAR_PLACE(dstate, float, back, states);
    UPI_CUDA_LINEAR_PLACE(runs, float, back, begins);
#undef UPI_CUDA_LINEAR_PLACE
    return at;
}

UPIPE_API size_t upi_cuda_linear_bytes(const upipe_ops *ops, const upipe_linear *a,
                                       upipe_linear_direction pass)
{
    upipe_linear call = *a;
    upi_cuda_linear_parts w;
    (void)ops;
    call.work = NULL;
    return upi_cuda_linear_layout(&w, &call, pass);
}

/* upipe_cuda_plan_linear -- the entries of the CUDA rules that say sizes; all others are NULL. For plans and dry runs */
UPIPE_API void upipe_cuda_plan_linear(upipe_linear_ops *rules)
{
    memset(rules, 0, sizeof *rules);
    rules->name = "cuda";
    rules->chunk_max = UPI_CUDA_LINEAR_ROWS;
    rules->bytes = upi_cuda_linear_bytes;
}

#endif
