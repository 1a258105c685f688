/* out_of_memory.h -- every allocation of a block's run fails once, on each rank in turn
 *
 *     check_out_of_memory(&test, 1, 40);
 *
 * Every rank returns with a reason, those of other teams too where there is a ring. With sticky each failure also
 * lasts for good, in a run of its own. A run takes more than `least` allocations.
 */
#ifndef UPIPE_TEST_OUT_OF_MEMORY_H
#define UPIPE_TEST_OUT_OF_MEMORY_H

#include "runner.h"

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
static int out_of_memory_said(const run_case *t, const char *text, int is_victim)
{
    if (strstr(text, "guard refused") != NULL) return 1;
    if (is_victim && !t->overlap) return 0;
    return strstr(text, "failed: out of memory") != NULL ||
           (t->ring > 1 && strstr(text, "failed: aborted") != NULL);
}

static void check_out_of_memory(run_case *t, int sticky, long least)
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

#endif
