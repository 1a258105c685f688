/* block_checks.h -- what holds of every door, method and shape, for a case of runner.h
 *
 *     check_chunks(&test)                             the same bits over C and U, as far as they are promised
 *     check_begun(&test, terms)                       gradients are added to what lies there
 *     check_out_of_memory(&test, 1, 40)               every allocation fails once, on each rank in turn
 *     check_save(dry, s, &save, &dout)                what a backward leaves that may have run out of memory
 *     check_differ(&test, rank, status, others, words)   a rank that runs something else
 */
#ifndef UPIPE_TEST_BLOCK_CHECKS_H
#define UPIPE_TEST_BLOCK_CHECKS_H

#include "runner.h"

/* ---- bits ---- */

/* What numerics.md promises of two results over the same ring: equal for every chunk and team; for every team that has the
 * queries of a key/value head on one rank each; for every chunk of one team. */
static inline void check_promised(const block_shape *s, const run_result *a, const run_result *b)
{
    const int same_ranks = a->plan.desc.ranks == b->plan.desc.ranks;
    const int whole = !a->plan.kv_grads_partial && !b->plan.kv_grads_partial;
    const int chains = run_same_chains(&a->plan) && run_same_chains(&b->plan);
    same_bits(s, a, b, "o lse y q c kr");
    if (chains && (whole || same_ranks)) same_bits(s, a, b, "x k v");
    if (!same_ranks) return;
    same_bits(s, a, b, "wq wo wg wkv q_norm_weight sinks bq bo");
    if (chains) same_bits(s, a, b, "wk wv k_norm_weight bk bv");
}

static inline int next_chunk(int chunk, int ranks, int heads)
{
    return chunk < heads && chunk + ranks > heads ? heads : chunk + ranks;
}

/* Every (C, U), also where heads or tokens do not divide. */
__attribute__((unused)) static void check_chunks(run_case *t)
{
    static const int ranks_of[] = {1, 2, 3, 4, 8};
    const int h = t->shape.h;
    run_result first, of_ranks = {0}, r;
    f32_block in;
    int runs = 0;
    t->ranks = 1, t->chunk = h;
    block_inputs(&t->shape, 42, &in);
    CHECK_STATUS(run_block(t, &in, &first), UPIPE_OK, first.errors[0]);
    for (int i = 0; i < 5; ++i) {
        t->ranks = ranks_of[i];
        /* Ulysses last, where the ranks do not divide the heads */
        for (t->chunk = t->ranks < h ? t->ranks : h; t->chunk <= h;
             t->chunk = next_chunk(t->chunk, t->ranks, h)) {
            if (!CHECK_SAY(run_block(t, &in, &r) == UPIPE_OK, "C %d U %d: %s", t->ranks, t->chunk,
                           r.errors[0].text))
                continue;
            ++runs;
            check_promised(&t->shape, &r, &first);
            if (of_ranks.plan.desc.ranks != t->ranks) of_ranks = r;
            check_promised(&t->shape, &r, &of_ranks);
        }
    }
    CHECK(runs >= 6);
}

/* ---- sums ---- */

/* Gradients are added to what lies there: a sum that begins with it, of so many more terms. */
__attribute__((unused)) static void check_begun(run_case *t, int terms)
{
    run_result empty, begun;
    f32_block in;
    block_inputs(&t->shape, 7, &in);
    CHECK_STATUS(run_block(t, &in, &empty), UPIPE_OK, empty.errors[0]);
    t->begun = 64;
    CHECK_STATUS(run_block(t, &in, &begun), UPIPE_OK, begun.errors[0]);
#define ADDED(tensor)                                                                              \
    for (int64_t i = 0; i < block_count(&t->shape, #tensor); ++i)                                  \
        CHECK_SAY(fabsf(begun.out.tensor[i] - empty.out.tensor[i] - t->begun * (float)t->ranks) <= \
                      (float)terms * FLT_EPSILON * t->begun,                                       \
                  #tensor " is %g, and %g where %g lay at first", (double)empty.out.tensor[i],     \
                  (double)begun.out.tensor[i], (double)t->begun);
    BLOCK_WEIGHTS(ADDED)
#undef ADDED
    same_bits(&t->shape, &begun, &empty, "o lse y q x");
}

/* ---- memory that runs out ---- */

typedef struct fail_alloc {
    long count, at;
    int sticky;
} fail_alloc;

/* A pool's guard. */
static upipe_status fail_alloc_guard(void *user, size_t bytes, int use, const char *tag)
{
    fail_alloc *f = (fail_alloc *)user;
    (void)bytes, (void)use, (void)tag;
    if (f == NULL) return UPIPE_OK;
    ++f->count;
    return f->count == f->at || (f->sticky && f->count > f->at) ? UPIPE_ERR_MEMORY : UPIPE_OK;
}

/* Where the host's own allocation failed, the team learns of it without the sentence; the world perhaps from a rank that
 * learnt of it in its ring; the rank itself, where stages overlap, perhaps from its side stream. */
static inline int out_of_memory_said(const run_case *t, const char *text, int is_victim)
{
    if (strstr(text, "guard refused") != NULL) return 1;
    if (is_victim && !t->overlap) return 0;
    return strstr(text, "failed: out of memory") != NULL ||
           (t->ring > 1 && strstr(text, "failed: aborted") != NULL);
}

/* Every allocation fails once, on each rank in turn: every rank returns with a reason, those of other teams too where there
 * is a ring. With sticky each failure also lasts for good, in a run of its own. A run takes more than `least`. */
__attribute__((unused)) static void check_out_of_memory(run_case *t, int sticky, long least)
{
    const int all = t->ranks * (t->ring > 1 ? t->ring : 1);
    f32_block in;
    t->guard = fail_alloc_guard;
    t->expect_failure = 1;
    t->deadline = 20;
    block_inputs(&t->shape, 5, &in);
    for (int kind = 0; kind < all * (1 + sticky); ++kind) {
        const int victim = kind % all;
        long at;
        for (at = 1; at < 1000; ++at) {
            fail_alloc f = {0, at, kind >= all};
            run_result r;
            upipe_status s;
            memset(t->guard_user, 0, sizeof t->guard_user);
            t->guard_user[victim] = &f;
            s = run_block(t, &in, &r);
            for (int rank = 0; s != UPIPE_OK && rank < all; ++rank) {
                CHECK_SAY(r.statuses[rank] == (rank == victim ? UPIPE_ERR_MEMORY : UPIPE_ERR_ABORTED),
                          "allocation %ld fails on rank %d: rank %d gets %s (%s)", at, victim, rank,
                          upipe_status_name(r.statuses[rank]), r.errors[rank].text);
                CHECK_SAY(out_of_memory_said(t, r.errors[rank].text, rank == victim),
                          "allocation %ld fails on rank %d: rank %d says '%s'", at, victim, rank,
                          r.errors[rank].text);
            }
            if (s == UPIPE_OK) break;
        }
        CHECK_SAY(at > least && at < 1000, "%ld takes", at);
    }
}

/* Behind a backward in a dry run whose pool refused a block, or none: its save can be freed, and the host's dO, and nothing
 * else is left. */
__attribute__((unused)) static void check_save(upipe_dry *dry, upipe_status s, upipe_saved *save,
                                               const upipe_slots *dout)
{
    upipe_ctx *c = &dry->ctx;
    dry->mem.guard = NULL;
    CHECK_STATUS(s, s == UPIPE_OK ? UPIPE_OK : UPIPE_ERR_MEMORY, c->err);
    CHECK_STATUS(upipe_saved_free(c, save), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_free(c, dout->data), UPIPE_OK, c->err);
    CHECK_INT(dry->mem.live, 0);
}

/* ---- ranks that do not agree ---- */

/* t->differ makes the rank `odd` of the world another one, or several. It gets the status `own`, the others theirs, or
 * learn that they are aborted: the first failure may reach them before their own check. Nothing is sent where ranks find
 * out in time, and all say why; of several teams one does at least. */
__attribute__((unused)) static void check_differ(run_case *t, int odd, upipe_status own, upipe_status others,
                                                 const char *words)
{
    const int ranks = t->ranks * (t->ring > 1 ? t->ring : 1);
    block_shape longest = t->shape;
    run_result r;
    f32_block in;
    int said = 0;
    ++longest.tokens; /* which a rank may take before it is told */
    t->expect_failure = 1;
    block_inputs(&longest, 3, &in);
    if (run_block(t, &in, &r) == UPIPE_OK) CHECK(others == UPIPE_OK);
    for (int rank = 0; rank < ranks; ++rank) {
        const upipe_status want = rank == odd ? own : others, got = r.statuses[rank];
        const int says = strstr(r.errors[rank].text, words) != NULL;
        said += says;
        CHECK_SAY(got == want || (want != UPIPE_OK && got == UPIPE_ERR_ABORTED),
                  "case %d rank %d: %s (%s), not %s", t->odd, rank, upipe_status_name(got),
                  r.errors[rank].text, upipe_status_name(want));
        CHECK_SAY(says || want == UPIPE_OK || t->ring > 1, "case %d rank %d: '%s' does not say '%s'", t->odd,
                  rank, r.errors[rank].text, words);
        if (others == UPIPE_ERR_MISMATCH || others == UPIPE_ERR_ARG) CHECK_INT(r.sent[rank], 0);
    }
    CHECK_SAY(said > 0, "case %d: nobody says '%s'", t->odd, words);
}

#endif
