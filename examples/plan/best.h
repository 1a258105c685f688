/* best.h -- the fastest setting of a sequence, and which are the fastest of their memory
 *
 *     status = best(&job, &p, &files);
 *
 * Settings are extrapolated from an eighth and a quarter of the tokens. The fastest is confirmed by a full dry run.
 */
#ifndef PLAN_BEST_H
#define PLAN_BEST_H

#include "search.h"

enum { BEST_SHORT = 1 << 18 }; /* tokens that are not extrapolated to */

static int best_one(search_state *f, const setting *s)
{
    search_pair two;
    estimate e;
    int refused, gpu_ends = 0;
    if (s->tokens <= BEST_SHORT) {
        planner_estimate(f->p, s, &e);
        refused = e.why[0] != '\0';
    } else {
        refused = search_two(&two, f->p, s, s->tokens / 8);
        if (!refused) search_at(&e, &two, f->p, s->tokens);
    }
    if (refused) {
        ++f->refused;
    } else if (!estimate_verdict(&e, f->p->m).fits) {
        gpu_ends = estimate_verdict(&e, f->p->m).gpu_over > 0;
        search_prune(f, s, &e);
    } else {
        search_keep(f, s, &e);
    }
    return gpu_ends;
}

static int best_order(const void *x, const void *y)
{
    const candidate *a = (const candidate *)x, *b = (const candidate *)y;
    if (a->seconds != b->seconds) return a->seconds < b->seconds ? -1 : 1;
    if (a->gpu != b->gpu) return a->gpu < b->gpu ? -1 : 1;
    return a->place - b->place;
}

/* Sorted by time: those that need less of the GPU than all faster ones. */
static void best_pareto(search_state *f)
{
    double least = INFINITY;
    int i;
    qsort(f->all, (size_t)f->n, sizeof *f->all, best_order);
    for (i = 0; i < f->n; ++i) {
        f->all[i].mark = f->all[i].gpu < least;
        least = fmin(least, f->all[i].gpu);
    }
}

/* The fastest that fits by a full dry run; NULL if none does. */
static candidate *best_winner(search_state *f, estimate *e)
{
    int i;
    for (i = 0; i < f->n; ++i) {
        planner_estimate(f->p, &f->all[i].s, e);
        if (e->why[0] == '\0' && estimate_verdict(e, f->p->m).fits) return &f->all[i];
    }
    return NULL;
}

/* The fastest setting from a start, in f.all; NULL if none fits. */
static const candidate *best_search(search_state *f, estimate *e)
{
    search_all(f, 1, best_one);
    best_pareto(f);
    return best_winner(f, e);
}

/* Beside another program's: the fastest that this library would take, with the same attention kernel. */
static void best_here(const job *j, const planner *p, int kernel, estimate *e)
{
    setting s = j->s;
    search_state f;
    const candidate *won;
    char flags[256], a[32], b[32];
    memset(&s.as, 0, sizeof s.as);
    s.attention = kernel;
    s.offload_optimizer = s.offload_weights = 0;
    s.zero = 3;
    f = search_begin(j, p, &s);
    won = best_search(&f, e);
    if (won == NULL)
        printf("\nthis library has no setting that fits\n");
    else
        printf(
            "\nthis library would take %s: %s of a GPU, %s of a node, %.2f s a step with the same attention kernel. Its own "
            "has not been measured on a GPU\n",
            search_flags(flags, won), report_bytes(a, e->gpu), report_bytes(b, e->host), e->seconds);
    free(f.all);
}

/* best -- the exit status */
static int best(const job *j, const planner *p, files *all)
{
    search_state f = search_begin(j, p, &j->s);
    estimate e;
    const candidate *won = best_search(&f, &e);
    int status;
    search_table(&f, won);
    status = search_end(&f, won, &e, all);
    if (j->s.as.program > 0) best_here(j, p, won != NULL ? won->s.attention : j->s.attention, &e);
    free(f.all);
    return status;
}

#endif
