/* test_property -- random blocks on random teams: refused exactly as documented, or right to the tolerance
 * rule, with peaks and bytes sent equal to the plan's (runner.h) and bits equal to another chunk's and
 * another team's
 *
 * UPIPE_DRAWS draws (2,000), draw i from seed UPIPE_SEED + i; a failing draw prints the line that replays it.
 */
#include "runner.h"
#include "close_block.h"

static run_case draw(test_rng *rng)
{
    static const int ranks_of[] = {1, 2, 2, 3, 4, 4, 8}, groups[] = {1, 1, 2, 3, 4, 6};
    run_case t;
    int group = groups[test_below(rng, 6)], per;
    memset(&t, 0, sizeof t);
    t.ranks = ranks_of[test_below(rng, 7)];
    t.shape.hkv = 1 + test_below(rng, 8);
    if (test_below(rng, 4) != 0) t.shape.hkv = t.ranks * (1 + test_below(rng, 2)); /* more legal ones */
    if (t.ranks > 2 && test_below(rng, 4) == 0) t.shape.hkv = t.ranks / 2 + t.ranks % 2 * 2;
    t.shape.h = t.shape.hkv * group;
    while (t.shape.h > 32) t.shape.h -= t.shape.hkv;
    per = t.shape.h / t.ranks > 0 ? t.shape.h / t.ranks : 1;
    t.chunk = t.ranks * (1 + test_below(rng, per));
    if (test_below(rng, 3) == 0) t.chunk = t.shape.h;
    if (test_below(rng, 3) == 0) t.chunk = 0;
    t.shape.d = 8 * (4 + test_below(rng, 5));                               /* 32 .. 64 */
    if (test_below(rng, 8) == 0) t.shape.d = 8 * (1 + test_below(rng, 34)); /* some out of range */
    t.shape.dim = 8 + test_below(rng, 60);
    t.shape.tokens = (int64_t)t.ranks * (1 + test_below(rng, 64 / t.ranks));
    if (test_below(rng, 20) == 0) ++t.shape.tokens;
    t.shape.batch = 1 + (test_below(rng, 4) == 0);
    t.shape.dtype = (upipe_dtype)test_below(rng, 3);
    t.shape.full = test_below(rng, 3) == 0;
    t.shape.rope = test_below(rng, 3);
    t.shape.normed = test_below(rng, 4) == 0;
    t.shape.projected = test_below(rng, 3) == 0;
    t.shape.scale = test_below(rng, 2) ? 1 / sqrt((double)t.shape.d) : 0.05 + 0.01 * test_below(rng, 20);
    t.shape.scale = (double)(float)t.shape.scale;
    t.shape.theta = test_below(rng, 2) ? 10000 : 500000;
    t.shape.eps = 1e-5;
    t.naive = test_below(rng, 5) == 0;
    t.gx_apart = test_below(rng, 4) == 0;
    t.tile_rows = test_below(rng, 2) ? 1 + test_below(rng, 20) : 0;
    t.deadline = 120;
    return t;
}

/* What upipe_plan_init and the layer document, said a second time. */
static upipe_status expected(const run_case *t)
{
    int chunk = t->chunk ? t->chunk : t->ranks, group = t->shape.h / t->shape.hkv, m = chunk / t->ranks;
    if (t->shape.tokens % t->ranks != 0) return UPIPE_ERR_ARG;
    if (t->shape.h % t->ranks != 0) return UPIPE_ERR_UNSUPPORTED;
    if (t->shape.h % chunk != 0) return UPIPE_ERR_ARG;
    if (m % group != 0) {
        if (t->naive && (m > group || group % m != 0)) return UPIPE_ERR_UNSUPPORTED;
        if (!t->naive && t->shape.hkv % t->ranks == 0 && group % m != 0) return UPIPE_ERR_UNSUPPORTED;
        if (!t->naive && t->shape.hkv % t->ranks != 0 && t->ranks % t->shape.hkv != 0)
            return UPIPE_ERR_UNSUPPORTED;
    }
    if (t->shape.d < 32 || t->shape.d > 256) return UPIPE_ERR_UNSUPPORTED;
    return UPIPE_OK;
}

static void same(const run_case *t, const run_result *a, const run_result *b, int same_ranks)
{
    int whole = t->ranks <= t->shape.hkv && b->plan.desc.ranks <= t->shape.hkv;
    const block_shape *s = &t->shape;
#define SAME(tensor)                                                                          \
    if (a->out.tensor != NULL)                                                                \
    CHECK_SAY(memcmp(a->out.tensor, b->out.tensor, (size_t)block_count(s, #tensor) * 4) == 0, \
              "%s differs from C %d U %d", #tensor, b->plan.desc.ranks, b->plan.desc.chunk)
    SAME(o);
    SAME(lse);
    SAME(y);
    SAME(go);
    if (a->plan.schedule == UPIPE_ORDER || b->plan.schedule == UPIPE_ORDER) return;
    if (whole || same_ranks) SAME(x);
    if (!same_ranks) return;
    SAME(wq);
    SAME(wk);
    SAME(wv);
    SAME(wo);
    SAME(q_gain);
    SAME(k_gain);
#undef SAME
}

int main(void)
{
    long draws = test_env("UPIPE_DRAWS", 2000), seed = test_env("UPIPE_SEED", 1), i, legal = 0, compared = 0;
    for (i = 0; i < draws; ++i) {
        long failures = test_failures;
        test_rng rng;
        run_case t;
        run_result r, other;
        f32_block in;
        upipe_status status;
        rng.state = (uint64_t)(seed + i);
        t = draw(&rng);
        t.expect_failure = expected(&t) != UPIPE_OK;
        block_inputs(&t.shape, (uint64_t)(seed + i), &in);
        status = run_block(&t, &in, &r);
        CHECK_SAY(status == expected(&t), "%s (%s), expected %s", upipe_status_name(status), r.errors[0].text,
                  upipe_status_name(expected(&t)));
        if (status == UPIPE_OK) {
            run_case u = t;
            ++legal;
            check_block(&t.shape, &in, &r.out);
            /* Ulysses on the same team, then one rank alone */
            if (i % 2 == 0 && t.shape.dtype == UPIPE_F32) {
                u.chunk = t.shape.h;
                u.tile_rows = 0;
                if (i % 4 == 0) u.ranks = 1;
                status = run_block(&u, &in, &other);
                CHECK_SAY(status == expected(&u), "with C %d U %d: %s (%s)", u.ranks, u.chunk,
                          upipe_status_name(status), other.errors[0].text);
                if (status == UPIPE_OK) {
                    same(&t, &r, &other, u.ranks == t.ranks);
                    ++compared;
                }
                run_free(&other);
            }
        }
        run_free(&r);
        f32_block_free(&in);
        if (test_failures != failures)
            fprintf(
                stderr,
                "replay: UPIPE_SEED=%ld UPIPE_DRAWS=1 (S %lld B %lld C %d H %d/%d d %d D %lld U %d %s%s)\n",
                seed + i, (long long)t.shape.tokens, (long long)t.shape.batch, t.ranks, t.shape.h,
                t.shape.hkv, t.shape.d, (long long)t.shape.dim, t.chunk, upipe_dtype_name(t.shape.dtype),
                t.naive ? " naive" : "");
    }
    printf("%ld draws from seed %ld, %ld legal\n", draws, seed, legal);
    if (draws >= 100)
        CHECK_SAY(compared * 8 > legal, "bits of only %ld of %ld were compared", compared, legal);
    if (draws >= 100) CHECK_SAY(legal * 3 > draws, "only %ld of %ld draws were legal", legal, draws);
    return test_end("property");
}
