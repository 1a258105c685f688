/* test_property -- random blocks on random teams and rings: refused exactly as documented, or right to the
 * tolerance rule, with peaks and bytes sent equal to the plan's (lib/runner.h) and bits equal to another chunk's
 * and another team's
 *
 * Draws are lib/draw.h's; a failing one prints the line that replays it.
 */
#include "lib/draw.h"
#include "lib/close.h"

/* Heads or lengths that do not divide, a ring, or a mask: what is more than the plain case. */
static int is_more(const run_case *t)
{
    const block_shape *s = &t->shape;
    return t->ring > 1 || s->h % t->ranks != 0 || s->tokens % t->ranks != 0 || s->window > 0 ||
           s->cu_seqlens != NULL || s->softcap > 0 || s->sinks || s->v_dim > 0;
}

#define SAME(tensor) \
    if (a->out.tensor != NULL) SAME_BITS(*a, *b, tensor, s)

/* What is equal for every chunk and every team over the same ring; then for every chunk of one team. */
static void same(const run_case *t, const run_result *a, const run_result *b, int same_ranks)
{
    /* a head's queries on one rank of the team: no sum of parts */
    int whole = !a->plan.kv_grads_partial && !b->plan.kv_grads_partial;
    int chains = run_same_chains(&a->plan) && run_same_chains(&b->plan);
    const block_shape *s = &t->shape;
    SAME(o);
    SAME(lse);
    SAME(y);
    SAME(q);
    if (chains && (whole || same_ranks)) SAME(x);
    if (!same_ranks) return;
    SAME(wq);
    SAME(wo);
    SAME(q_norm_weight);
    SAME(sinks);
    SAME(bq);
    SAME(bo);
    if (!chains) return;
    SAME(bk);
    SAME(bv);
    SAME(wk);
    SAME(wv);
    SAME(k_norm_weight);
}
#undef SAME

/* Ulysses on the same team, or one rank alone in each team; the ring, if any, as it was. Returns whether it
 * was legal. */
static int compare(const run_case *t, const f32_block *in, const run_result *r, int alone)
{
    run_case u = *t;
    run_result other;
    upipe_status status;
    u.chunk = t->shape.h;
    u.tile_rows = 0;
    u.overlap = 0;
    u.ring_mode = t->ring > 1 ? r->plan.desc.ring_mode : UPIPE_RING_AUTO;
    u.table = NULL; /* nor does it matter whether attention reads O */
    if (alone) u.ranks = 1;
    status = run_block(&u, in, &other);
    CHECK_SAY(status == expected(&u), "with C %d U %d: %s (%s)", u.ranks, u.chunk, upipe_status_name(status),
              other.errors[0].text);
    if (status == UPIPE_OK) same(t, r, &other, u.ranks == t->ranks);
    return status == UPIPE_OK;
}

static void test_random(test_draws draws)
{
    long legal = 0, compared = 0, more = 0, overlapped = 0, reading = 0;
    for (; test_draws_more(&draws); ++draws.done) {
        long failures = test_failures, seed = draws.seed + draws.done;
        test_rng rng;
        drawn d;
        run_result r;
        f32_block in;
        upipe_status status;
        rng.state = (uint64_t)seed;
        draw(&rng, &d);
        d.t.expect_failure = expected(&d.t) != UPIPE_OK;
        block_inputs(&d.t.shape, (uint64_t)seed, &in);
        status = run_block(&d.t, &in, &r);
        CHECK_SAY(status == expected(&d.t), "%s (%s), expected %s", upipe_status_name(status),
                  r.errors[0].text, upipe_status_name(expected(&d.t)));
        if (status == UPIPE_OK) {
            ++legal;
            more += is_more(&d.t);
            overlapped += r.plan.overlap;
            reading += d.t.table != NULL;
            check_block(&d.t.shape, &in, &r.out);
            if (seed % 2 == 0 && d.t.shape.dtype == UPIPE_F32)
                compared += compare(&d.t, &in, &r, seed % 4 == 0);
        }
        buffers_free(0);
        if (test_shown_since(failures)) say_replay(&d.t, seed);
    }
    test_draws_end(&draws);
    printf(
        "%ld legal, %ld of them with a ring, a mask or what does not divide, %ld with stages that overlap, %ld with an "
        "attention that reads O\n",
        legal, more, overlapped, reading);
    if (draws.done >= 100) {
        CHECK_SAY(compared * 8 > legal, "bits of only %ld of %ld were compared", compared, legal);
        CHECK_SAY(legal * 3 > draws.done, "only %ld of %ld draws were legal", legal, draws.done);
        CHECK_SAY(overlapped * 16 > legal, "stages of only %ld of %ld overlap", overlapped, legal);
        CHECK_SAY(reading * 6 > legal, "attention of only %ld of %ld reads O", reading, legal);
        CHECK_SAY(more * 2 > legal, "only %ld of %ld are more than the plain case", more, legal);
    }
}

int main(int argc, char **argv)
{
    test_draws draws = test_draws_begin(1);
    test_begin(argc, argv);
    TEST(test_random(draws));
    return test_end("property");
}
