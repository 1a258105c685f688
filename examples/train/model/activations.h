/* activations.h -- what is kept of a layer's forward for its backward, and where
 *
 *     --activations    kept of a layer                                                       in the pool
 *     ac               its input x                                                           of the rank
 *     offload          x                                                                     second
 *     sao:K            x; that of every K-th layer stays                                     second
 *     sac, sac:K       x; of all layers, or of the first K, also O and lse of attention,     second
 *                      or o and the states of linear attention
 *     blocks:K         x of every K-th layer, the first one's included                       second
 *
 * The second pool is host memory, on a GPU. The backward computes again what is not kept: a layer's attention, unless O
 * and lse are kept, and the inputs of the layers of a block, which for the time of the block keep O and lse too. With
 * `grad` the gradient of the stream waits in the second pool while the stages of attention's backward run.
 *
 *     activations_keep_x(&a, c, layer, x);            begins a copy
 *     activations_wait(&a, c);                        now x may be written
 *     ...
 *     activations_tiles_begin(&a, c, &t, x, away, NULL);      what was kept, by tiles of rows
 *     while (t.tile.n > 0) ..., activations_tiles_next(&a, c, &t);
 *     activations_tiles_end(&a, c, &t);
 *     activations_drop(&a, c, layer);
 *
 * Copies between the pools run on a stream of their own, where the device has one. No bit depends on any of this.
 */
#ifndef LLAMA_ACTIVATIONS_H
#define LLAMA_ACTIVATIONS_H

#include "upipe/upipe.h"

#include "../../common/activations_flag.h"
#include "../../common/device.h"

/* What the forward keeps of a layer. */
typedef struct activations_row {
    int x, attention; /* the input; O and lse */
    int away;         /* in the second pool */
} activations_row;

/* The table, row by row. Where K does not divide the layers, the last block is shorter. */
static inline activations_row activations_of(const activations_setting *a, int64_t layer)
{
    activations_row row;
    row.x = a->kind != ACTIVATIONS_BLOCKS || layer % a->k == 0;
    row.attention = a->kind == ACTIVATIONS_SAC && (a->k == 0 || layer < a->k);
    row.away = a->kind == ACTIVATIONS_SAO ? (layer + 1) % a->k != 0 : a->kind != ACTIVATIONS_AC;
    return row;
}

/* Tensors of the stream that the second pool holds after a forward; *here: that the rank's own pool holds. */
__attribute__((unused)) static int64_t activations_copies(const activations_setting *a, int64_t layers,
                                                          int64_t *here)
{
    int64_t i, away = 0;
    for (i = 0, *here = 0; i < layers; ++i) {
        const activations_row row = activations_of(a, i);
        away += row.x && row.away;
        *here += row.x && !row.away;
    }
    return away;
}

/* What is kept of a layer now. */
typedef struct activations_kept {
    void *x; /* NULL: not kept */
    int away;
    void *out, *lse;       /* of attention, or o and states of linear attention; NULL: not kept */
    upipe_given given;     /* what the forward of out was given */
    upipe_fpdt_saved fpdt; /* of attention in segments; out is NULL if it is not kept */
} activations_kept;

/* One rank's. */
typedef struct activations {
    upipe_mem *second;
    device *side;            /* whose copies run beside the stream of c; NULL: on that stream */
    activations_kept *layer; /* [layers] */
    int64_t moved;           /* bytes between the pools so far */
} activations;

/* ---- copies between the pools ---- */

/* Begins dst = src, which the caller has counted. */
static inline upipe_status activations_start(activations *a, upipe_ctx *c, void *dst, const void *src,
                                             size_t bytes)
{
    if (bytes == 0) return UPIPE_OK;
    return a->side != NULL ? device_copy_start(a->side, c, dst, src, bytes)
                           : c->ops->copy(c, dst, src, bytes);
}

/* dst = src; until activations_wait neither may be written, and dst not be read. */
static inline upipe_status activations_copy(activations *a, upipe_ctx *c, void *dst, const void *src,
                                            size_t bytes)
{
    a->moved += (int64_t)bytes;
    return activations_start(a, c, dst, src, bytes);
}

/* Later work of c's stream waits for all copies begun. */
static inline upipe_status activations_wait(activations *a, upipe_ctx *c)
{
    return a->side != NULL ? device_copy_wait(a->side, c) : UPIPE_OK;
}

/* *out = a copy in the second pool. */
static inline upipe_status activations_put(activations *a, upipe_ctx *c, void **out, const void *src,
                                           size_t bytes, const char *tag)
{
    UPIPE_TRY(upipe_mem_alloc(a->second, out, bytes, UPIPE_USE_CHECKPOINT, tag, &c->err));
    return activations_copy(a, c, *out, src, bytes);
}

static inline size_t activations_bytes(upipe_view x)
{
    return (size_t)(x.n * x.d) * upipe_dtype_bytes(x.dtype);
}

/* ---- a layer ---- */

/* Keeps x: until activations_wait it may not be written. */
static inline upipe_status activations_keep_x(activations *a, upipe_ctx *c, int64_t layer, upipe_view x,
                                              int away)
{
    activations_kept *k = &a->layer[layer];
    k->away = away;
    if (away) return activations_put(a, c, &k->x, x.data, activations_bytes(x), "kept");
    UPIPE_TRY(upipe_alloc(c, &k->x, activations_bytes(x), UPIPE_USE_CHECKPOINT, "kept"));
    return c->ops->copy(c, k->x, x.data, activations_bytes(x));
}

/* Keeps O and lse, or what linear attention has of them: until activations_wait they may neither be written nor freed. */
static inline upipe_status activations_keep_out(activations *a, upipe_ctx *c, int64_t layer, const void *out,
                                                size_t out_bytes, const void *lse, size_t lse_bytes)
{
    activations_kept *k = &a->layer[layer];
    UPIPE_TRY(activations_put(a, c, &k->out, out, out_bytes, "kept_out"));
    return activations_put(a, c, &k->lse, lse, lse_bytes, "kept_lse");
}

static inline upipe_status activations_keep_attention(activations *a, upipe_ctx *c, int64_t layer,
                                                      const upipe_plan *p, const upipe_saved *saved)
{
    a->layer[layer].given = saved->given;
    return activations_keep_out(a, c, layer, saved->out.data, saved->out.slot_bytes * (size_t)p->stages,
                                saved->lse, p->buffers.lse);
}

/* What upipe_layer_fwd would leave, from the copies. */
static inline upipe_status activations_fetch_attention(activations *a, upipe_ctx *c, int64_t layer,
                                                       const upipe_plan *p, upipe_saved *saved)
{
    const activations_kept *k = &a->layer[layer];
    const size_t lse_bytes = p->buffers.lse;
    void *lse;
    memset(saved, 0, sizeof *saved);
    saved->given = k->given;
    UPIPE_TRY(upipe_slots_alloc(c, p, &saved->out, UPIPE_SLOT_FULL, "final_out"));
    UPIPE_TRY(upipe_alloc(c, &lse, lse_bytes, UPIPE_USE_STAT, "lse"));
    saved->lse = (float *)lse;
    UPIPE_TRY(activations_copy(a, c, saved->out.data, k->out, saved->out.slot_bytes * (size_t)p->stages));
    UPIPE_TRY(activations_copy(a, c, lse, k->lse, lse_bytes));
    return activations_wait(a, c);
}

/* Nothing is kept of the layer any more. */
static inline upipe_status activations_drop(activations *a, upipe_ctx *c, int64_t layer)
{
    activations_kept *k = &a->layer[layer];
    upipe_fpdt f;
    memset(&f, 0, sizeof f);
    f.host = a->second;
    UPIPE_TRY(upipe_mem_free(k->away ? a->second : c->mem, k->x, &c->err));
    UPIPE_TRY(upipe_mem_free(a->second, k->out, &c->err));
    UPIPE_TRY(upipe_mem_free(a->second, k->lse, &c->err));
    UPIPE_TRY(upipe_fpdt_free(&f, &k->fpdt, &c->err));
    memset(k, 0, sizeof *k);
    return UPIPE_OK;
}

/* ---- tensors in the second pool, by tiles ---- */

/* A tensor that is read by tiles of rows. In the rank's own pool it is one tile, in place. Tiles from the second pool
 * come into two buffers in turn, or into a tensor that they fill; the next one is copied while one is used. */
typedef struct activations_tiles {
    upipe_view x,
        tile;        /* the tensor; rows of it from at.row on, in the rank's own pool: none after the last */
    upipe_view into; /* buffers, or the tensor to be filled; data NULL in place */
    upipe_mem_tiles at;
    int64_t rows;  /* of a tile at most */
    int64_t ahead; /* rows copied so far */
    int owned;     /* into is a block that activations_tiles_end frees */
} activations_tiles;

/* Begins the copy of the next tile, if there is one. */
static inline upipe_status activations_tiles_ahead(activations *a, upipe_ctx *c, activations_tiles *t)
{
    const int64_t left = t->x.n - t->ahead, n = left < t->rows ? left : t->rows, first = t->ahead;
    if (t->into.data == NULL || n <= 0) return UPIPE_OK;
    t->ahead += n;
    return activations_start(a, c, upipe_view_rows(t->into, first % t->into.n, n).data,
                             upipe_view_rows(t->x, first, n).data,
                             activations_bytes(upipe_view_rows(t->x, first, n)));
}

/* Goes on to the next tile. */
static inline upipe_status activations_tiles_next(activations *a, upipe_ctx *c, activations_tiles *t)
{
    const int64_t n = upipe_mem_tiles_next(c->mem, &t->at, t->x.n, t->rows) ? t->at.n : 0;
    t->tile = upipe_view_rows(t->x, n > 0 ? t->at.row : 0, n);
    if (t->into.data == NULL || n == 0) return UPIPE_OK;
    t->tile.data = upipe_view_rows(t->into, t->at.row % t->into.n, n).data;
    UPIPE_TRY(activations_wait(a, c));
    return activations_tiles_ahead(a, c, t);
}

/* The first tile. Tiles begin between two partial sums of the weights' gradients, and so change no bit of them.
 *   away   x is in the second pool
 *   into   of x's shape, to be filled; NULL: buffers that are taken here
 */
static inline upipe_status activations_tiles_begin(activations *a, upipe_ctx *c, activations_tiles *t,
                                                   upipe_view x, int away, void *into)
{
    const int64_t rows = x.d < UPIPE_SUM_ROWS ? UPIPE_SUM_ROWS : x.d / UPIPE_SUM_ROWS * UPIPE_SUM_ROWS;
    memset(t, 0, sizeof *t);
    t->x = t->tile = x;
    t->tile.n = 0;
    t->rows = away && rows < x.n ? rows : x.n;
    t->into = x;
    t->into.data = away ? into : NULL;
    t->owned = away && into == NULL;
    if (away) a->moved += (int64_t)activations_bytes(x);
    if (t->owned) {
        if (2 * t->rows < x.n) t->into.n = 2 * t->rows;
        UPIPE_TRY(upipe_alloc(c, &t->into.data, activations_bytes(t->into), UPIPE_USE_CHECKPOINT, "fetched"));
    }
    UPIPE_TRY(activations_tiles_ahead(a, c, t));
    return activations_tiles_next(a, c, t);
}

static inline upipe_status activations_tiles_end(upipe_ctx *c, activations_tiles *t)
{
    return t->owned ? upipe_free(c, t->into.data) : UPIPE_OK;
}

#endif
