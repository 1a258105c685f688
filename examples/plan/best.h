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
    search_pair *two = (search_pair *)estimate_memory(1, sizeof *two);
    estimate *e = (estimate *)estimate_memory(1, sizeof *e);
    int refused, gpu_ends = 0;
    if (s->tokens <= BEST_SHORT) {
        planner_estimate(f->p, s, e);
        refused = e->why[0] != '\0';
    } else {
        refused = search_two(two, f->p, s, s->tokens / 8);
        if (!refused) search_at(e, two, f->p, s->tokens);
    }
    if (refused) {
        ++f->refused;
    } else if (!estimate_verdict(e, f->p->m).fits) {
        gpu_ends = estimate_verdict(e, f->p->m).gpu_over > 0;
        search_prune(f, s, e);
    } else {
        candidate *c = &f->all[f->n];
        c->place = f->n++;
        c->s = *s;
        c->gpu = e->gpu;
        c->host = e->host;
        c->link = estimate_link(e);
        c->seconds = e->seconds;
    }
    free(two);
    free(e);
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

static void best_table(const search_state *f, const candidate *won)
{
    char flags[256], a[32], b[32], d[32];
    int i, shown = 0;
    search_counts(f);
    if (f->n == 0) return;
    printf("%10s %12s %12s %12s\n", "seconds", "GPU", "host, node", "link, rank");
    for (i = 0; i < f->n; ++i) {
        const candidate *c = &f->all[i];
        if (shown >= SEARCH_SHOWN && !c->mark) continue;
        ++shown;
        printf("%10.2f %12s %12s %12s %s %s%s\n", c->seconds, report_bytes(a, c->gpu),
               report_bytes(b, c->host), report_bytes(d, c->link), c->mark ? "*" : " ",
               search_flags(flags, c), c == won ? "   <- confirmed" : "");
    }
    printf("\n* needs less of the GPU than all that are faster\n\n");
}

/* best -- the exit status */
static int best(const job *j, const planner *p, files *all)
{
    search_state f = {j, p, (candidate *)estimate_memory(SEARCH_MAX, sizeof(candidate)), 0, 0, 0, 0, j->s, 0};
    estimate *e = (estimate *)estimate_memory(1, sizeof *e);
    const candidate *won;
    int status;
    search_all(&f, 1, best_one);
    best_pareto(&f);
    won = best_winner(&f, e);
    best_table(&f, won);
    status = search_end(&f, won, e, all, 0);
    free(f.all);
    free(e);
    return status;
}

#endif
