/* block_draws.h -- random attention on random teams and rings: refused exactly as documented, or right to the tolerance
 * rule, with peaks and bytes sent equal to the plan's (runner.h) and bits equal to another chunk's and another team's
 *
 *     block_draws(0);     blocks with their projections
 *     block_draws(1);     Q, K and V of the host (upipe_qkv.h): fused or apart with gaps, in the storage type or wider,
 *                         gradients in the place of what they are gradients of; NaNs in one packed sequence, or in
 *                         padding, change no bit of another
 *     block_draws(2);     the same where K and V are expanded from a latent, which is gathered or not
 *
 * Draws are draw.h's; a failing one prints the line that replays it.
 */
#ifndef UPIPE_TEST_BLOCK_DRAWS_H
#define UPIPE_TEST_BLOCK_DRAWS_H

#include "block_checks.h"
#include "draw.h"

typedef struct counts {
    long legal, compared, more, overlapped, reading, in_place, apart;
} counts;

/* Heads or lengths that do not divide, a ring, or a mask: what is more than the plain case. */
static int is_more(const run_case *t)
{
    const block_shape *s = &t->shape;
    return t->ring > 1 || s->h % t->ranks != 0 || s->tokens % t->ranks != 0 || s->window > 0 ||
           s->cu_seqlens != NULL || s->softcap > 0 || s->sinks || s->v_dim > 0;
}

/* Ulysses on the same team, or one rank alone in each team; the ring, if any, as it was, and the host's tensors apart.
 * Returns whether it was legal. */
static int compare(const run_case *t, const f32_block *in, const run_result *r, int alone)
{
    run_case u = *t;
    run_result other;
    upipe_status status;
    u.chunk = t->shape.h;
    u.tile_rows = 0;
    if (t->ring == 1 && t->shape.latent > 0) /* the other form */
        u.form = r->gathers ? UPIPE_LATENT_HEADS : UPIPE_LATENT_GATHERED;
    u.overlap = u.fused = u.wide = u.in_place = 0;
    u.ring_mode = t->ring > 1 ? r->plan.desc.ring_mode : UPIPE_RING_AUTO;
    u.table = NULL; /* nor does it matter whether attention reads O */
    if (alone) u.ranks = 1;
    status = run_block(&u, in, &other);
    CHECK_SAY(status == expected(&u), "with C %d U %d: %s (%s)", u.ranks, u.chunk, upipe_status_name(status),
              other.errors[0].text);
    if (status == UPIPE_OK) check_promised(&t->shape, r, &other);
    return status == UPIPE_OK;
}

/* ---- what is not a number ---- */

/* Rows of one packed sequence, or (-1) of what lies outside of all, become x. */
static void put_rows(const block_shape *s, int which, float *tensor, const char *name, float x)
{
    const int64_t n = s->cu_seqlens_n, *cu = s->cu_seqlens, count = block_count(s, name);
    for (int64_t e = 0; e < count; ++e) {
        const int64_t at = e / (count / (s->batch * s->tokens));
        if (which < 0 ? at < cu[0] || at >= cu[n] : at >= cu[which] && at < cu[which + 1]) tensor[e] = x;
    }
}

/* NaNs in one packed sequence, or in padding, change no bit of the others. */
static void nan_apart(const run_case *t, const f32_block *in, int which)
{
    const block_shape *s = &t->shape;
    run_result of[2];
    for (int bad = 0; bad < 2; ++bad) {
        f32_block inputs = *in, *out = &of[bad].out;
#define PUT(tensor)                                                                                \
    inputs.tensor = (float *)copy_of(in->tensor, (size_t)block_count(s, #tensor) * sizeof(float)); \
    put_rows(s, which, inputs.tensor, #tensor, bad ? NAN : 0);
        PUT(q)
        PUT(k)
        PUT(v)
        PUT(c)
        PUT(kr)
        PUT(dout)
#undef PUT
        CHECK_STATUS(run_block(t, &inputs, &of[bad]), UPIPE_OK, of[bad].errors[0]);
#define CLEAR(tensor) \
    if (which >= 0) put_rows(s, which, out->tensor, #tensor, 0); /* its own rows may hold anything */
        CLEAR(o)
        CLEAR(lse)
        CLEAR(q)
        CLEAR(k)
        CLEAR(v)
        CLEAR(c)
        CLEAR(kr)
#undef CLEAR
    }
    same_bits(s, &of[0], &of[1], which < 0 ? "o lse q c kr sinks" : "o lse q c kr");
    if (run_same_chains(&of[0].plan)) same_bits(s, &of[0], &of[1], "k v");
}

/* ---- a draw ---- */

static void one_draw(long seed, int bare, counts *n)
{
    const long failures = test_failures;
    test_rng rng;
    drawn d;
    run_case *t = &d.t;
    run_result r;
    f32_block in;
    upipe_status status;
    rng.state = (uint64_t)seed;
    draw(&rng, &d);
    if (bare == 1) draw_bare(&rng, &d);
    if (bare == 2) draw_latent(&rng, &d);
    t->expect_failure = expected(t) != UPIPE_OK;
    block_inputs(&t->shape, (uint64_t)seed, &in);
    status = run_block(t, &in, &r);
    CHECK_SAY(status == expected(t), "%s (%s), expected %s", upipe_status_name(status), r.errors[0].text,
              upipe_status_name(expected(t)));
    if (status == UPIPE_OK) {
        ++n->legal;
        n->more += is_more(t);
        n->overlapped += r.plan.overlap;
        n->reading += t->table != NULL;
        n->in_place += t->in_place;
        check_block(&t->shape, &in, &r.out);
        if (seed % 2 == 0 && t->shape.dtype == UPIPE_F32) n->compared += compare(t, &in, &r, seed % 4 == 0);
        if (bare && t->shape.cu_seqlens != NULL) {
            ++n->apart;
            nan_apart(t, &in, test_below(&rng, (int)t->shape.cu_seqlens_n + 1) - 1);
        }
    }
    buffers_free(0);
    if (test_shown_since(failures)) say_replay(t, seed);
}

static void block_draws(int bare)
{
    test_draws draws = test_draws_begin(1);
    counts n = {0};
    for (; test_draws_more(&draws); ++draws.done) one_draw(draws.seed + draws.done, bare, &n);
    test_draws_end(&draws);
    printf(
        "%ld legal, %ld of them with a ring, a mask or what does not divide, %ld with stages that overlap, %ld with an "
        "attention that reads O, %ld with gradients in place; bits of %ld compared, NaNs in %ld\n",
        n.legal, n.more, n.overlapped, n.reading, n.in_place, n.compared, n.apart);
    if (draws.done < 100) return;
    CHECK_SAY(n.legal * 3 > draws.done, "only %ld of %ld draws were legal", n.legal, draws.done);
    CHECK_SAY(n.compared * 8 > n.legal, "bits of only %ld of %ld were compared", n.compared, n.legal);
    CHECK_SAY(n.overlapped * 16 > n.legal, "stages of only %ld of %ld overlap", n.overlapped, n.legal);
    CHECK_SAY(n.reading * 6 > n.legal, "attention of only %ld of %ld reads O", n.reading, n.legal);
    CHECK_SAY(n.more * 2 > n.legal, "only %ld of %ld are more than the plain case", n.more, n.legal);
    if (!bare) return;
    CHECK_SAY(n.in_place * 6 > n.legal, "only %ld of %ld in place", n.in_place, n.legal);
    CHECK_SAY(n.apart * 16 > n.legal, "NaNs in only %ld of %ld", n.apart, n.legal);
}

#endif
