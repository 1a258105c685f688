/* planner.h -- an estimate for a setting, as this library's or as another program's; what would help; the longest sequence
 *
 *     planner p = {&machine, &ops, &watch};
 *     planner_estimate(&p, &s, &e);
 *     n = planner_advice(&p, &s, &e, advice);
 *     tokens = planner_longest(&p, &s, guess, &e);
 */
#ifndef PLAN_PLANNER_H
#define PLAN_PLANNER_H

#include "as.h"
#include "exact.h"

/* planner_watch -- a plan that takes long says so on stderr
 *   settings   estimated so far, since `begun`
 *   next       seconds after that until the next line: 2 at first, or 0 with --progress, then twice as many each time */
typedef struct planner_watch {
    int settings;
    double begun, next;
} planner_watch;

typedef struct planner {
    const machine *m;
    const upipe_ops *ops;
    planner_watch *watch;
} planner;

static void planner_progress(planner_watch *w)
{
    const double seconds = cli_clock(NULL) - w->begun;
    ++w->settings;
    if (seconds < w->next) return;
    fprintf(stderr, "%d settings planned in %.1f s ...\n", w->settings, seconds);
    w->next = fmax(2 * seconds, 0.5);
}

static void planner_estimate(const planner *p, const setting *s, estimate *e)
{
    if (s->as.program > 0)
        as_estimate(e, s, p->m);
    else
        exact_estimate(e, s, p->ops, p->m);
    planner_progress(p->watch);
}

/* ---- what would help ---- */

enum { ADVICE_MAX = 24, ADVICE_TEXT = 96 };

typedef struct advice_item {
    char flags[ADVICE_TEXT];
    double gpu, host;     /* saved, of the largest rank and of the fullest node; below 0 it takes more */
    double seconds, link; /* more; link: bytes between a rank's device and the host */
    int fits, place;      /* place: in the order of tries, which is that of two that are equal */
} advice_item;

typedef struct advisor {
    const planner *p;
    const setting *s;
    const estimate *now;
    advice_item *out;
    int n;
} advisor;

/* Notes what another setting would save, if it saves something of what there is too little of. */
__attribute__((format(printf, 3, 4))) static void advisor_try(advisor *a, const setting *s, const char *flags,
                                                              ...)
{
    const verdict v = estimate_verdict(a->now, a->p->m);
    const int gpu = v.fits ? strcmp(v.binding, "gpu") == 0 : v.gpu_over > 0;
    advice_item *one = &a->out[a->n];
    estimate e;
    va_list args;
    if (a->n == ADVICE_MAX) return;
    planner_estimate(a->p, s, &e);
    if (e.why[0] != '\0') return;
    va_start(args, flags);
    vsnprintf(one->flags, ADVICE_TEXT, flags, args);
    va_end(args);
    one->gpu = a->now->gpu - e.gpu;
    one->host = a->now->host - e.host;
    one->seconds = e.seconds - a->now->seconds;
    one->link = estimate_link(&e) - estimate_link(a->now);
    one->fits = estimate_verdict(&e, a->p->m).fits;
    one->place = a->n;
    /* where it does not fit, less of what is missing; where it does, less of what is the fullest */
    if ((gpu ? one->gpu : one->host) > 0) ++a->n;
}

static void advisor_activations(advisor *a)
{
    static const char *const kinds[] = {"offload", "offload,grad", "blocks:2", "blocks:4", "blocks:4,grad"};
    size_t i;
    for (i = 0; i < sizeof kinds / sizeof *kinds; ++i) {
        setting s = *a->s;
        char now[ACTIVATIONS_TEXT];
        if (activations_parse(kinds[i], &s.activations) != 0 || s.activations.k > s.layout->config.layers ||
            strcmp(kinds[i], activations_text(now, &a->s->activations)) == 0)
            continue;
        advisor_try(a, &s, "--activations %s", kinds[i]);
    }
}

/* What another program has that this setting does not use. */
static void advisor_as(advisor *a)
{
    const program *p = as_program(a->s->as.program);
    setting s = *a->s;
    int i;
    s.how.chunk = 0;
    if (a->s->how.chunk > 0) advisor_try(a, &s, "the smallest --chunk");
    for (i = 0; i < AS_METHODS && p->methods[i].name != NULL; ++i) {
        s.as.method = i;
        s.attention =
            a->s->attention == as_method_of(a->s)->attention ? p->methods[i].attention : s.attention;
        if (i != a->s->as.method && !p->methods[i].stays)
            advisor_try(a, &s, "--method %s", p->methods[i].name);
    }
    s = *a->s;
    s.as.loss = AS_TILED;
    if (a->s->as.loss != AS_TILED) advisor_try(a, &s, "--loss tiled");
    s = *a->s;
    s.as.mlp = AS_TILED;
    if (a->s->as.mlp != AS_TILED) advisor_try(a, &s, "--mlp tiled");
}

/* Smaller chunks, more segments, other methods. */
static void advisor_schedule(advisor *a)
{
    static const int methods[] = {METHOD_UPIPE, METHOD_UPIPE_FPDT};
    const method_kind *kind = &method_kinds[a->s->how.method];
    const int team = a->s->how.ranks / a->s->how.ring;
    setting s = *a->s;
    size_t i;
    if (kind->stage == METHOD_CHUNK && s.how.chunk > team) {
        s.how.chunk = team;
        advisor_try(a, &s, "--chunk %d", team);
    }
    if (kind->segmented && a->s->how.segments * 2 <= UPIPE_SEGMENTS_MAX) {
        s = *a->s;
        s.how.segments *= 2;
        advisor_try(a, &s, "--segments %d", s.how.segments);
    }
    for (i = 0; i < 2; ++i) {
        s = *a->s;
        memset(&s.how, 0, sizeof s.how);
        s.how.method = methods[i];
        s.how.ranks = a->s->how.ranks;
        if (methods[i] == a->s->how.method || s.layout->config.heads < s.how.ranks ||
            method_resolve(&s.how, 1) != 0)
            continue;
        advisor_try(a, &s, "--method %s", method_kinds[methods[i]].name);
    }
}

/* What does not depend on the tokens, in the host's memory. */
static void advisor_states(advisor *a)
{
    setting s = *a->s;
    s.offload_optimizer = 1;
    if (!a->s->offload_optimizer) advisor_try(a, &s, "--offload-optimizer");
    s.offload_weights = 1;
    if (s.zero == 3 && !a->s->offload_weights)
        advisor_try(a, &s,
                    a->s->offload_optimizer ? "--offload-weights" : "--offload-optimizer --offload-weights");
}

static int advice_order(const void *x, const void *y)
{
    const advice_item *a = (const advice_item *)x, *b = (const advice_item *)y;
    if (a->fits != b->fits) return b->fits - a->fits;
    if (a->fits && a->seconds != b->seconds) return a->seconds < b->seconds ? -1 : 1;
    if (!a->fits && a->gpu != b->gpu) return a->gpu > b->gpu ? -1 : 1;
    return a->place - b->place;
}

/* planner_advice -- other settings that need less, those that fit first, then by what they save; their number */
static int planner_advice(const planner *p, const setting *s, const estimate *now,
                          advice_item out[ADVICE_MAX])
{
    advisor a = {p, s, now, out, 0};
    setting other = *s;
    other.batch = 1;
    if (s->as.program > 0)
        advisor_as(&a);
    else
        advisor_schedule(&a);
    advisor_states(&a);
    advisor_activations(&a);
    if (s->batch > 1) advisor_try(&a, &other, "--batch 1");
    qsort(out, (size_t)a.n, sizeof *out, advice_order);
    return a.n;
}

/* ---- the longest sequence ---- */

enum { LONGEST_STEP = 1024 };

static int planner_fits(const planner *p, setting s, int64_t tokens, estimate *e)
{
    s.tokens = tokens;
    planner_estimate(p, &s, e);
    return e->why[0] == '\0' && estimate_verdict(e, p->m).fits;
}

/* Lengths that are tried are multiples of this. */
static int64_t planner_step(const setting *s)
{
    return (int64_t)LONGEST_STEP * s->how.ranks;
}

/* planner_longest -- tokens, a multiple of planner_step, by bisection from a guess on; 0: not the shortest fits, and *e
 *                    says how much is missing, or why. Otherwise *e is the estimate of the longest */
static int64_t planner_longest(const planner *p, const setting *s, int64_t guess, estimate *e)
{
    const int64_t step = planner_step(s), most = INT32_MAX / step + 1; /* does not fit */
    int64_t low = 0, high = most, at = guess / step > 0 ? guess / step : 1, stride = 1;
    while (high - low > 1) {
        if (planner_fits(p, *s, at * step, e))
            low = at;
        else
            high = at;
        /* strides grow until both ends are known */
        if (high == most)
            at = low + stride < most ? low + stride : most - 1;
        else if (low == 0 && high > stride)
            at = high - stride;
        else
            at = low + (high - low) / 2;
        if (high == most || low == 0) stride *= 2;
    }
    planner_fits(p, *s, (low > 0 ? low : 1) * step, e);
    return low * step;
}

#endif
