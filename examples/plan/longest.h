/* longest.h -- the longest sequence of every setting that fits the machine
 *
 *     status = longest_best(&job, &p, &files);
 *
 * By bisection on the lines of search.h, through lengths of an eighth and a quarter of the answer. What might be the
 * longest of its method is confirmed by full dry runs.
 */
#ifndef PLAN_LONGEST_H
#define PLAN_LONGEST_H

#include "search.h"

/* The longest multiple of `step` that fits by the lines; 0 if none does. */
static int64_t longest_lines(const search_pair *two, const planner *p, int64_t step, estimate *e)
{
    int64_t low = 0, high = INT32_MAX / step + 1;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        search_at(e, two, p, middle * step);
        if (estimate_verdict(e, p->m).fits)
            low = middle;
        else
            high = middle;
    }
    search_at(e, two, p, low * step);
    return low * step;
}

static int longest_one(search_state *f, const setting *s)
{
    const int64_t step = planner_step(s);
    setting other = *s;
    int64_t at = 16 * step, tokens = 0;
    search_pair two;
    estimate e;
    int refused = search_two(&two, f->p, s, at) != 0;
    if (!refused) tokens = longest_lines(&two, f->p, step, &e);
    if (!refused && tokens / 8 > at) { /* closer to the answer */
        at = tokens / 8 / step * step;
        refused = search_two(&two, f->p, s, at) != 0;
        if (!refused) tokens = longest_lines(&two, f->p, step, &e);
    }
    if (refused) {
        ++f->refused;
        return 0;
    }
    other.tokens = tokens > 0 ? tokens : step;
    if (tokens > 0) {
        search_keep(f, &other, &e);
    } else {
        search_at(&e, &two, f->p, step);
        search_prune(f, &other, &e);
    }
    search_at(&e, &two, f->p, tokens + step);
    return estimate_verdict(&e, f->p->m).gpu_over > 0;
}

static int longest_order(const void *x, const void *y)
{
    const candidate *a = (const candidate *)x, *b = (const candidate *)y;
    if (a->s.tokens != b->s.tokens) return a->s.tokens > b->s.tokens ? -1 : 1;
    if (a->seconds != b->seconds) return a->seconds < b->seconds ? -1 : 1;
    return a->place - b->place;
}

/* Confirms by full dry runs whatever might be the longest of its method: lines are never too short. Marks that one. */
static void longest_confirm(search_state *f, estimate *e)
{
    int64_t most[METHODS] = {0};
    candidate *longest[METHODS] = {NULL};
    int i;
    qsort(f->all, (size_t)f->n, sizeof *f->all, longest_order);
    for (i = 0; i < f->n; ++i) {
        candidate *c = &f->all[i];
        const int kind = c->s.as.program > 0 ? c->s.as.method : (int)c->s.how.method;
        if (c->s.tokens <= most[kind]) continue;
        c->s.tokens = planner_longest(f->p, &c->s, c->s.tokens, e);
        c->confirmed = c->s.tokens > 0;
        search_take(c, e);
        if (c->s.tokens <= most[kind]) continue;
        most[kind] = c->s.tokens;
        longest[kind] = c;
    }
    for (i = 0; i < METHODS; ++i)
        if (longest[i] != NULL) longest[i]->mark = 1;
    qsort(f->all, (size_t)f->n, sizeof *f->all, longest_order);
}

/* longest_best -- the exit status */
static int longest_best(const job *j, const planner *p, files *all)
{
    search_state f = search_begin(j, p, &j->s);
    estimate e;
    const candidate *won = NULL;
    int status, i;
    search_all(&f, 0, longest_one); /* overlap never needs less */
    longest_confirm(&f, &e);
    search_table(&f, NULL);
    for (i = 0; i < f.n && won == NULL; ++i)
        if (f.all[i].mark) won = &f.all[i];
    status = search_end(&f, won, &e, all);
    free(f.all);
    return status;
}

#endif
