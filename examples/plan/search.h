/* search.h -- the best setting: methods x chunk x segments x ring x activations x overlap
 *
 * Bytes grow with tokens as the largest of several straight lines, one a phase. So the line through a quarter and half
 * of the tokens is a lower bound: what it does not fit is pruned. The others' time is that of the work that grows with
 * tokens, and of attention's that grows with their square. The fastest is confirmed by a full dry run.
 */
#ifndef PLAN_SEARCH_H
#define PLAN_SEARCH_H

#include "report.h"

enum { SEARCH_MAX = 2048, SEARCH_SHORT = 1 << 18, SEARCH_SHOWN = 20 };

typedef struct candidate {
    setting s;
    double gpu, host, seconds;
    int pareto;
} candidate;

typedef struct search_state {
    const options *o;
    const planner *p;
    candidate *all; /* [SEARCH_MAX] those that fit */
    int n, tried, refused, pruned;
} search_state;

/* To S tokens, from e[0] at S / 4 and e[1] at S / 2. */
static void search_extend(estimate *out, const estimate e[2], const setting *s, const machine *m, int team)
{
    const estimate_work *a = &e[0].work, *b = &e[1].work;
    *out = e[1];
    out->gpu = e[1].gpu + 2 * (e[1].gpu - e[0].gpu);
    out->host = e[1].host + 2 * (e[1].host - e[0].host);
#define SEARCH_LINE(field)   out->work.field = b->field + 2 * (b->field - a->field)
#define SEARCH_SQUARE(field) out->work.field = 6 * b->field - 8 * a->field
    SEARCH_LINE(products);
    SEARCH_LINE(team);
    SEARCH_LINE(ring);
    SEARCH_LINE(merged);
    SEARCH_LINE(moved);
    SEARCH_LINE(waited);
    SEARCH_SQUARE(attn_fwd);
    SEARCH_SQUARE(attn_bwd);
#undef SEARCH_LINE
#undef SEARCH_SQUARE
    estimate_time(out, m, s->how.ranks, team, s->layout->config.layers);
}

static void search_try(search_state *f, const setting *s)
{
    estimate *e = (estimate *)calloc(3, sizeof *e);
    const int64_t parts[] = {4, 2};
    candidate *one;
    int i;
    if (e == NULL || f->n == SEARCH_MAX) {
        free(e);
        return;
    }
    ++f->tried;
    if (f->o->progress)
        fprintf(stderr, "\r" PROGRAM ": %d settings tried, %d refused, %d pruned", f->tried, f->refused,
                f->pruned);
    if (s->tokens <= SEARCH_SHORT) {
        planner_estimate(f->p, s, &e[2]);
    } else {
        for (i = 0; i < 2 && e[0].why[0] == '\0'; ++i) {
            setting part = *s;
            part.tokens /= parts[i];
            planner_estimate(f->p, &part, &e[i]);
        }
        memcpy(e[2].why, e[e[0].why[0] != '\0' ? 0 : 1].why, ESTIMATE_WHY);
        if (e[2].why[0] == '\0') search_extend(&e[2], e, s, f->p->m, s->how.ranks / s->how.ring);
    }
    if (e[2].why[0] != '\0') {
        ++f->refused;
    } else if (!estimate_verdict(&e[2], f->p->m).fits) {
        ++f->pruned;
    } else {
        one = &f->all[f->n++];
        one->s = *s;
        one->gpu = e[2].gpu;
        one->host = e[2].host;
        one->seconds = e[2].seconds;
    }
    free(e);
}

/* One schedule with every kind of activations. */
static void search_activations(search_state *f, setting s)
{
    static const char *const kinds[] = {"ac",           "offload",  "offload,grad",  "sac",
                                        "sac,grad",     "blocks:2", "blocks:2,grad", "blocks:4",
                                        "blocks:4,grad"};
    size_t i;
    for (i = 0; i < sizeof kinds / sizeof *kinds; ++i)
        if (activations_flag("activations", kinds[i], &s.activations) == 0 &&
            s.activations.k <= s.layout->config.layers)
            search_try(f, &s);
}

/* Chunks and overlap of a method with its rings and segments. */
static void search_chunks(search_state *f, setting s, const method_kind *kind, int team)
{
    const int heads = s.layout->config.heads, stages = kind->stage == METHOD_CHUNK;
    int chunk, overlap;
    for (chunk = team; chunk <= (stages ? heads / 2 : team); chunk *= 2)
        for (overlap = 0; overlap <= method_overlaps(kind); ++overlap) {
            s.how.chunk = stages ? chunk : 0;
            s.how.overlap = overlap;
            search_activations(f, s);
        }
}

static void search_method(search_state *f, int method)
{
    const method_kind *kind = &method_kinds[method];
    const int ranks = f->o->s.how.ranks, heads = f->o->config.heads;
    setting s = f->o->s;
    int ring, segments;
    memset(&s.how, 0, sizeof s.how);
    s.how.method = method;
    s.how.ranks = ranks;
    for (ring = kind->shape == METHOD_IS_GRID ? 2 : 1;
         ring <= (kind->shape == METHOD_IS_GRID ? ranks / 2 : 1); ring *= 2)
        for (segments = kind->segmented ? 4 : 1; segments <= (kind->segmented ? 32 : 1); segments *= 2) {
            s.how.ring = method_ring(kind, ranks, ring);
            s.how.segments = kind->segmented ? segments : 0;
            s.how.inner = 0;
            if (ranks % s.how.ring != 0 || heads < ranks / s.how.ring) continue;
            search_chunks(f, s, kind, ranks / s.how.ring);
        }
}

static int search_order(const void *x, const void *y)
{
    const candidate *a = (const candidate *)x, *b = (const candidate *)y;
    if (a->seconds != b->seconds) return a->seconds < b->seconds ? -1 : 1;
    return (a->gpu > b->gpu) - (a->gpu < b->gpu);
}

/* Sorted by time: those that need less of the GPU than all faster ones. */
static void search_pareto(search_state *f)
{
    double least = INFINITY;
    int i;
    qsort(f->all, (size_t)f->n, sizeof *f->all, search_order);
    for (i = 0; i < f->n; ++i) {
        f->all[i].pareto = f->all[i].gpu < least;
        least = fmin(least, f->all[i].gpu);
    }
}

/* The fastest that fits by a full dry run; f->n if none does. */
static int search_winner(search_state *f, estimate *e)
{
    int i;
    for (i = 0; i < f->n; ++i) {
        planner_estimate(f->p, &f->all[i].s, e);
        if (e->why[0] == '\0' && estimate_verdict(e, f->p->m).fits) return i;
    }
    return i;
}

static void search_table(const search_state *f, int winner)
{
    char flags[256], a[32], b[32];
    int i, shown = 0;
    printf("%d settings: %d refused, %d pruned as they cannot fit, %d fit\n\n", f->tried, f->refused,
           f->pruned, f->n);
    printf("%10s %12s %12s\n", "seconds", "GPU", "host, node");
    for (i = 0; i < f->n; ++i) {
        if (shown >= SEARCH_SHOWN && !f->all[i].pareto) continue;
        ++shown;
        printf("%10.2f %12s %12s %s %s%s\n", f->all[i].seconds, report_bytes(a, f->all[i].gpu),
               report_bytes(b, f->all[i].host), f->all[i].pareto ? "*" : " ",
               report_flags(flags, sizeof flags, &f->all[i].s.how, &f->all[i].s.activations, TITANS),
               i == winner ? "   <- confirmed" : "");
    }
    printf("\n* needs less of the GPU than all that are faster\n\n");
}

static void search_json(FILE *f, const search_state *d, int winner, const estimate *e)
{
    char flags[256];
    int i;
    fprintf(f, "{\n  \"fits\": %s,\n  \"tried\": %d,\n  \"refused\": %d,\n  \"pruned\": %d,\n",
            winner < d->n ? "true" : "false", d->tried, d->refused, d->pruned);
    if (winner < d->n)
        fprintf(
            f,
            "  \"best\": \"%s\",\n  \"gpu_bytes\": %.0f,\n  \"host_bytes_node\": %.0f,\n  \"seconds_step\": %.9g,\n"
            "  \"tokens_per_s_per_gpu\": %.9g,\n",
            report_flags(flags, sizeof flags, &d->all[winner].s.how, &d->all[winner].s.activations, TITANS),
            e->gpu, e->host, e->seconds, report_rate(&d->all[winner].s, e));
    fputs("  \"settings\": [", f);
    for (i = 0; i < d->n; ++i)
        fprintf(
            f,
            "%s\n    {\"flags\": \"%s\", \"gpu_bytes\": %.0f, \"host_bytes_node\": %.0f, \"seconds_step\": %.9g, \"pareto\": %s}",
            i > 0 ? "," : "",
            report_flags(flags, sizeof flags, &d->all[i].s.how, &d->all[i].s.activations, TITANS),
            d->all[i].gpu, d->all[i].host, d->all[i].seconds, d->all[i].pareto ? "true" : "false");
    fputs("\n  ]\n}\n", f);
}

/* search -- the exit status */
static int search(const options *o, const planner *p, files *all)
{
    search_state f = {o, p, (candidate *)calloc(SEARCH_MAX, sizeof(candidate)), 0, 0, 0, 0};
    estimate *e = (estimate *)calloc(1, sizeof *e);
    int method, winner = 0, status;
    FILE *out;
    if (f.all == NULL || e == NULL) {
        free(f.all);
        free(e);
        return cli_fail("out of memory"), EXIT_RUN;
    }
    for (method = 0; method < METHODS; ++method)
        if (method != METHOD_UPIPE_NAIVE && method != METHOD_RING && method != METHOD_DOUBLE_RING)
            search_method(&f, method);
    if (o->progress) fputs("\n", stderr);
    search_pareto(&f);
    winner = search_winner(&f, e);
    search_table(&f, winner);
    status = winner < f.n ? 0 : EXIT_NO_FIT;
    if (winner < f.n)
        report_verdict(o, p, &f.all[winner].s, e);
    else
        printf("nothing fits\n");
    if (o->json != NULL) {
        files_begin(all);
        out = files_open(all, o->json);
        if (out != NULL) search_json(out, &f, winner, e);
        if (out == NULL || files_close(all, out) != 0 || files_commit(all) != 0) status = EXIT_RUN;
    }
    free(f.all);
    free(e);
    return status;
}

#endif
