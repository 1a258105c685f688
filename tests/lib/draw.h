/* draw.h -- random blocks on random teams and rings, and which of them are refused
 *
 *     drawn d;
 *     draw(&rng, &d);                      d.t: a run_case (runner.h)
 *     draw_bare(&rng, &d);                 without its projections: Q, K and V are the host's
 *     draw_latent(&rng, &d);               and K and V are expanded from a latent
 *     expected(&d.t)                       the status that the library must give
 *     say_replay(&d.t, seed);              after a failure: how to run this draw alone
 */
#ifndef UPIPE_TEST_DRAW_H
#define UPIPE_TEST_DRAW_H

#include "reads_o.h"
#include "runner.h"

enum { CU_SEQLENS_MAX = 12 };

/* A draw, and where its packed sequences are. */
typedef struct drawn {
    run_case t;
    int64_t cu_seqlens[CU_SEQLENS_MAX + 1];
} drawn;

/* Some borders over the whole batch, ascending; now and then an empty packed sequence, and tokens before the
 * first one or after the last. */
static void draw_cu_seqlens(test_rng *rng, drawn *d)
{
    block_shape *s = &d->t.shape;
    int64_t all = s->tokens * s->batch;
    int j;
    s->cu_seqlens_n = 1 + test_below(rng, CU_SEQLENS_MAX);
    for (int i = 0; i <= s->cu_seqlens_n; ++i) {
        int64_t at = test_below(rng, (int)all + 1);
        for (j = i; j > 0 && d->cu_seqlens[j - 1] > at; --j) d->cu_seqlens[j] = d->cu_seqlens[j - 1];
        d->cu_seqlens[j] = at;
    }
    if (test_below(rng, 4) != 0) d->cu_seqlens[0] = 0;
    if (test_below(rng, 4) != 0) d->cu_seqlens[s->cu_seqlens_n] = all;
    s->cu_seqlens = d->cu_seqlens;
}

static void draw_masks(test_rng *rng, drawn *d)
{
    block_shape *s = &d->t.shape;
    if (test_below(rng, 4) == 0) s->window = 1 + test_below(rng, (int)s->tokens + 2);
    if (test_below(rng, 4) == 0) draw_cu_seqlens(rng, d);
    if (test_below(rng, 6) == 0) s->softcap = 1 + test_below(rng, 30);
    s->sinks = test_below(rng, 6) == 0;
}

/* C x R <= 8 */
static void draw_ring(test_rng *rng, run_case *t)
{
    static const int rings_of[] = {1, 1, 2, 2, 3, 4, 4, 6, 8};
    do {
        t->ring = rings_of[test_below(rng, 9)];
    } while (t->ranks * t->ring > 8);
    t->layout = (upipe_layout)test_below(rng, UPIPE_LAYOUTS);
    t->ring_first = test_below(rng, 2);
    if (t->ring == 1) {
        if (test_below(rng, 60) == 0) t->ring_mode = UPIPE_RING_P2P; /* to be refused */
        return;
    }
    t->ring_mode = (upipe_ring_mode)test_below(rng, 3);
    if (test_below(rng, 4) == 0) t->inner = 1 + test_below(rng, t->ring);
    if (t->ring_mode == UPIPE_RING_ALL_GATHER) t->ahead = test_below(rng, 2);
}

static void draw(test_rng *rng, drawn *d)
{
    static const int ranks_of[] = {1, 1, 2, 2, 2, 3, 4, 4, 5, 8}, groups[] = {1, 1, 2, 3, 4, 6, 7};
    int group = groups[test_below(rng, 7)], plain = test_below(rng, 4) == 0, per;
    int64_t parts;
    run_case *t = &d->t;
    memset(d, 0, sizeof *d);
    t->ranks = ranks_of[test_below(rng, 10)];
    t->ring = 1;
    if (!plain) draw_ring(rng, t);
    t->shape.hkv = 1 + test_below(rng, 8);
    if (test_below(rng, 3) == 0)
        t->shape.hkv = t->ranks * (1 + test_below(rng, 2)); /* rounds that all share */
    if (t->ranks > 2 && test_below(rng, 5) == 0) t->shape.hkv = t->ranks / 2;
    t->shape.h = t->shape.hkv * group;
    while (t->shape.h > 32) t->shape.h -= t->shape.hkv;
    per = t->shape.h / t->ranks > 0 ? t->shape.h / t->ranks : 1;
    t->chunk = t->ranks * (1 + test_below(rng, per));
    if (test_below(rng, 3) == 0) t->chunk = t->shape.h;
    if (test_below(rng, 3) == 0) t->chunk = 0;
    if (test_below(rng, 60) == 0) ++t->chunk;
    t->shape.d = 8 * (4 + test_below(rng, 5));                                /* 32 .. 64 */
    if (test_below(rng, 16) == 0) t->shape.d = 8 * (1 + test_below(rng, 34)); /* some out of range */
    if (!plain && test_below(rng, 4) == 0) t->shape.v_dim = 8 * (4 + test_below(rng, 5));
    t->shape.dim = 8 + test_below(rng, 60);
    parts = (int64_t)t->ranks * t->ring;
    t->shape.tokens = parts * (1 + test_below(rng, 64 / (int)parts));
    if (!plain && test_below(rng, 2)) t->shape.tokens = parts * 2 + test_below(rng, 65 - 2 * (int)parts);
    if (test_below(rng, 30) == 0) t->shape.tokens = 1 + test_below(rng, (int)parts);
    t->shape.batch = 1 + (test_below(rng, 4) == 0);
    t->shape.dtype = (upipe_dtype)test_below(rng, 2);
    t->shape.full = test_below(rng, 3) == 0;
    t->shape.rope = test_below(rng, 3);
    t->shape.normed = test_below(rng, 4) == 0;
    t->shape.projected = test_below(rng, 3) == 0;
    t->shape.scale = test_below(rng, 2) ? 1 / sqrt((double)t->shape.d) : 0.05 + 0.01 * test_below(rng, 20);
    t->shape.scale = (double)(float)t->shape.scale;
    t->shape.theta = test_below(rng, 2) ? 10000 : 500000;
    t->shape.eps = 1e-5;
    if (!plain) draw_masks(rng, d);
    t->naive = test_below(rng, 8) == 0;
    t->dx_apart = test_below(rng, 4) == 0;
    t->tile_rows = test_below(rng, 2) ? 1 + test_below(rng, 20) : 0;
    t->deadline = 120;
    t->overlap = t->ring == 1 ? test_below(rng, 4) > 0 : test_below(rng, 60) == 0;
    if (t->overlap) t->side_stream_inline = test_below(rng, 4) == 0;
    t->shape.biased = test_below(rng, 3) == 0;
    if (test_below(rng, 3) == 0) t->table = table_reads_o;
    if (test_below(rng, 3) == 0) block_rope_own(&t->shape, 2 * test_below(rng, t->shape.d / 2 + 1));
}

static void draw_bare(test_rng *rng, drawn *d)
{
    run_case *t = &d->t;
    t->shape.bare = 1;
    t->shape.rope = t->shape.normed = t->shape.projected = t->shape.biased = t->dx_apart = 0;
    t->fused = test_below(rng, 2);
    t->wide = test_below(rng, 3) == 0;
    t->in_place = test_below(rng, 3) == 0;
}

static void draw_latent(test_rng *rng, drawn *d)
{
    block_shape *s = &d->t.shape;
    s->hkv = s->h;
    s->latent = 1 + test_below(rng, 80);
    s->key = 2 * (1 + test_below(rng, s->d / 2 - 1));
    s->normed = s->biased = s->rope_dims = 0;
    d->t.fused = test_below(rng, 2);
    d->t.wide = test_below(rng, 3) == 0;
    d->t.in_place = test_below(rng, 3) == 0;
    if (test_below(rng, 2))
        draw_bare(rng, d);
    else
        s->q_dim = 8 + test_below(rng, 60);
    d->t.form = (upipe_latent_form)test_below(rng, 3);
}

/* What upipe_plan_init and the layer packed sequence, said a second time. */
static upipe_status expected(const run_case *t)
{
    const block_shape *s = &t->shape;
    int chunk = t->chunk ? t->chunk : t->ranks < s->h ? t->ranks : s->h, group = s->h / s->hkv;
    int m = chunk == s->h ? (s->h + t->ranks - 1) / t->ranks : chunk / t->ranks;
    int even = s->h % t->ranks == 0 && (s->h / t->ranks) % (m > 0 ? m : 1) == 0,
        v_dim = s->v_dim > 0 ? s->v_dim : s->d;
    int common = even && (m % group == 0 || t->naive || (s->hkv % t->ranks == 0 && group % m == 0) ||
                          t->ranks % s->hkv == 0);
    if (chunk > s->h || (chunk != s->h && chunk % t->ranks != 0)) return UPIPE_ERR_ARG;
    if (t->naive && !(even && (m % group == 0 || group % m == 0))) return UPIPE_ERR_UNSUPPORTED;
    if (s->tokens < t->ranks * t->ring * (t->layout == UPIPE_ZIGZAG && t->ring > 1 ? 2 : 1))
        return UPIPE_ERR_ARG;
    if (t->ring == 1 && t->ring_mode != UPIPE_RING_AUTO) return UPIPE_ERR_ARG;
    if (t->inner > 0 && t->ring % t->inner != 0) return UPIPE_ERR_ARG;
    if (t->inner > 1 && t->ring_mode == UPIPE_RING_ALL_GATHER) return UPIPE_ERR_ARG;
    /* several stages without a common round do not shift */
    if ((t->inner > 1 || t->ring_mode == UPIPE_RING_P2P) && !common && chunk != s->h)
        return UPIPE_ERR_UNSUPPORTED;
    if (t->ahead && !common) return UPIPE_ERR_UNSUPPORTED;
    if (t->overlap && (t->ring > 1 || (!common && chunk != s->h))) return UPIPE_ERR_UNSUPPORTED;
    if (s->d < 32 || s->d > 256 || v_dim < 32 || v_dim > 256) return UPIPE_ERR_UNSUPPORTED;
    if (t->form == UPIPE_LATENT_GATHERED && t->ring > 1) return UPIPE_ERR_UNSUPPORTED;
    return UPIPE_OK;
}

static void say_replay(const run_case *t, long seed)
{
    const block_shape *s = &t->shape;
    fprintf(
        stderr,
        "replay: UPIPE_SEED=%ld UPIPE_DRAWS=1 (S %lld B %lld C %d R %d/%d %s mode %d H %d/%d d %d/%d D %lld "
        "U %d %s%s%s%s%s%s%s%s%s%s)\n",
        seed, (long long)s->tokens, (long long)s->batch, t->ranks, t->ring, t->inner,
        upipe_layout_name(t->layout), (int)t->ring_mode, s->h, s->hkv, s->d, s->v_dim > 0 ? s->v_dim : s->d,
        (long long)s->dim, t->chunk, upipe_dtype_name(s->dtype), t->naive ? " naive" : "",
        t->overlap ? " overlap" : "", s->full ? " full" : "", s->window ? " window" : "",
        s->cu_seqlens != NULL ? " cu_seqlens" : "", s->softcap > 0 ? " softcap" : "",
        s->sinks ? " sinks" : "", s->biased ? " biased" : "", t->table != NULL ? " reads O" : "");
}

#endif
