/* search.h -- all settings of a machine, and what one comes to at any length by two short dry runs
 *
 *     search_all(&f, one);                          one(&f, &s) for methods x chunk x segments x ring x activations x overlap,
 *                                                   and where the GPU's memory ends also with states in the host's
 *     search_two(&two, &p, &s, tokens);             dry runs at tokens and at twice as many
 *     search_at(&e, &two, &p, tokens);              at any other length
 *
 * The bytes of a phase, of the slab around them and of the host grow with tokens as the largest of several straight
 * lines. So the line through two lengths is a lower bound beyond them: what it does not fit is pruned. Other work grows
 * with tokens, and attention's with their square too. best.h finds the fastest, longest.h the longest sequence.
 */
#ifndef PLAN_SEARCH_H
#define PLAN_SEARCH_H

#include "report.h"

enum { SEARCH_MAX = 4096, SEARCH_SHOWN = 20 };

typedef struct candidate {
    setting s;
    double gpu, host, link, seconds;
    int place; /* in the order of tries: of two that are equal the first one stands first, also where qsort is unstable */
    int mark;      /* best.h: of the Pareto set; longest.h: the longest of its method */
    int confirmed; /* longest.h: by full dry runs */
} candidate;

typedef struct search_state {
    const job *j;
    const planner *p;
    setting start;  /* what all have: the model, its length and machine, who trains */
    candidate *all; /* [SEARCH_MAX] those that fit */
    int n, tried, refused, pruned;
    setting nearest; /* of those that are pruned: the one that comes nearest to fitting */
    double full;     /* how full it makes what is the fullest */
} search_state;

/* ---- extrapolation ---- */

/* Estimates of a setting at s.tokens and twice as many. */
typedef struct search_pair {
    setting s;
    estimate e[2];
} search_pair;

/* search_two -- 0; -1: refused */
static int search_two(search_pair *two, const planner *p, const setting *s, int64_t tokens)
{
    setting twice = *s;
    twice.tokens = 2 * tokens;
    two->s = *s;
    two->s.tokens = tokens;
    planner_estimate(p, &two->s, &two->e[0]);
    if (two->e[0].why[0] == '\0') planner_estimate(p, &twice, &two->e[1]);
    return two->e[0].why[0] != '\0' || two->e[1].why[0] != '\0' ? -1 : 0;
}

/* a at one length, b at the double; at `times` the length. */
static double search_line(double a, double b, double times)
{
    return b + (times - 2) * (b - a);
}

/* The same of what has no constant part, but grows with the square too. */
static double search_square(double a, double b, double times)
{
    const double square = (b - 2 * a) / 2;
    return (a - square) * times + square * times * times;
}

/* search_at -- `out` at another number of tokens */
static void search_at(estimate *out, const search_pair *two, const planner *p, int64_t tokens)
{
    const estimate *a = &two->e[0], *b = &two->e[1];
    const double times = (double)tokens / (double)two->s.tokens;
    const setting *s = &two->s;
    setting other = two->s;
    double live = 0;
    int i, k;
    if (s->as.program > 0) { /* a sum, as quick as a line */
        other.tokens = tokens;
        planner_estimate(p, &other, out);
        return;
    }
    *out = *b;
    for (i = 0; i < b->phases; ++i) {
        for (k = 0; k < a->phases - 1 && a->phase[k].name != b->phase[i].name; ++k) {
        }
        live = fmax(live, search_line(a->phase[k].bytes, b->phase[i].bytes, times));
    }
    out->live = live;
    out->gpu = live + fmax(0, search_line(a->gpu - a->live, b->gpu - b->live, times));
    out->host = search_line(a->host, b->host, times);
#define SEARCH_LINE(field)   out->work.field = search_line(a->work.field, b->work.field, times)
#define SEARCH_SQUARE(field) out->work.field = search_square(a->work.field, b->work.field, times)
    SEARCH_LINE(products);
    SEARCH_LINE(team);
    SEARCH_LINE(ring);
    SEARCH_LINE(merged);
    SEARCH_LINE(moved);
    SEARCH_LINE(waited);
    SEARCH_LINE(segments);
    SEARCH_LINE(updated);
    SEARCH_LINE(returned);
    SEARCH_SQUARE(attn_fwd);
    SEARCH_SQUARE(attn_bwd);
#undef SEARCH_LINE
#undef SEARCH_SQUARE
    estimate_time(out, p->m, setting_ranks(s), s->how.ranks / s->how.ring);
}

/* ---- all settings ---- */

static search_state search_begin(const job *j, const planner *p, const setting *start)
{
    search_state f = {.j = j, .p = p, .start = *start, .nearest = *start};
    f.all = (candidate *)estimate_memory(SEARCH_MAX, sizeof *f.all);
    return f;
}

static void search_take(candidate *c, const estimate *e)
{
    c->gpu = e->gpu;
    c->host = e->host;
    c->link = estimate_link(e);
    c->seconds = e->seconds;
}

/* What fits is a candidate. */
static void search_keep(search_state *f, const setting *s, const estimate *e)
{
    candidate *c = &f->all[f->n];
    c->place = f->n++;
    c->s = *s;
    search_take(c, e);
}

/* What cannot fit is counted, and the nearest is kept. */
static void search_prune(search_state *f, const setting *s, const estimate *e)
{
    const machine *m = f->p->m;
    const verdict v = estimate_verdict(e, m);
    const double gpu = m->gpu > 0 ? estimate_full(e->gpu, v.gpu_limit) : 0;
    const double full = fmax(gpu, estimate_full(e->host, v.host_limit));
    if (f->pruned++ > 0 && full >= f->full) return;
    f->full = full;
    f->nearest = *s;
}

/* Whether less of the GPU would fit, or fit longer. */
typedef int search_one(search_state *f, const setting *s);

/* One setting; where the GPU's memory ends, also with the optimizer's states in the host's, and then weights too. */
static void search_states(search_state *f, setting s, search_one *one)
{
    while (f->n < SEARCH_MAX) {
        ++f->tried;
        if (!one(f, &s) || s.offload_weights || (s.offload_optimizer && s.zero < 3)) return;
        s.offload_weights = s.offload_optimizer;
        s.offload_optimizer = 1;
    }
}

/* One schedule with every kind of activations. */
static void search_activations(search_state *f, setting s, search_one *one)
{
    /* k, and how many quarters of the layers more */
    static const struct {
        int kind, k, quarters, grad;
    } kinds[] = {
        {ACTIVATIONS_AC, 0, 0, 0},     {ACTIVATIONS_OFFLOAD, 0, 0, 0}, {ACTIVATIONS_OFFLOAD, 0, 0, 1},
        {ACTIVATIONS_SAO, 2, 0, 0},    {ACTIVATIONS_SAO, 4, 0, 0},     {ACTIVATIONS_SAO, 8, 0, 0},
        {ACTIVATIONS_SAC, 0, 0, 0},    {ACTIVATIONS_SAC, 0, 0, 1},     {ACTIVATIONS_SAC, 0, 1, 0},
        {ACTIVATIONS_SAC, 0, 2, 0},    {ACTIVATIONS_SAC, 0, 3, 0},     {ACTIVATIONS_BLOCKS, 2, 0, 0},
        {ACTIVATIONS_BLOCKS, 2, 0, 1}, {ACTIVATIONS_BLOCKS, 4, 0, 0},  {ACTIVATIONS_BLOCKS, 4, 0, 1}};
    const int64_t layers = s.layout->config.layers;
    size_t i;
    for (i = 0; i < sizeof kinds / sizeof *kinds; ++i) {
        s.activations.kind = kinds[i].kind;
        s.activations.k = kinds[i].k + kinds[i].quarters * layers / 4;
        s.activations.grad = kinds[i].grad;
        if (s.activations.k > layers || (kinds[i].quarters > 0 && s.activations.k == 0)) continue;
        search_states(f, s, one);
    }
}

/* Chunks and overlap of a method with its rings and segments. */
static void search_chunks(search_state *f, setting s, int overlaps, search_one *one)
{
    const method_kind *kind = &method_kinds[s.how.method];
    const int heads = s.layout->config.heads, stages = kind->stage == METHOD_CHUNK;
    const int team = s.how.ranks / s.how.ring;
    int chunk, overlap;
    for (chunk = team; chunk <= (stages ? heads / 2 : team); chunk *= 2)
        for (overlap = 0; overlap <= (overlaps && method_overlaps(kind)); ++overlap) {
            s.how.chunk = stages ? chunk : 0;
            s.how.overlap = overlap;
            search_activations(f, s, one);
        }
}

/* All that another program has. */
static void search_as(search_state *f, search_one *one)
{
    const program *p = as_program(f->start.as.program);
    setting s = f->start;
    const int node = f->p->m->ranks_node, team = s.how.ranks < node ? s.how.ranks : node;
    for (s.as.method = 0; s.as.method < AS_METHODS && as_method_of(&s)->name != NULL; ++s.as.method) {
        const int staged = as_method_of(&s)->kind == AS_UPIPE, most = staged ? s.layout->config.heads / 2 : 1;
        if (!options_given(&f->j->o, &f->j->o.attention)) s.attention = as_kernel(&s, f->p->m);
        for (s.how.chunk = staged ? team : 0; s.how.chunk <= most; s.how.chunk *= 2) {
            for (s.as.loss = 0; s.as.loss < 2; ++s.as.loss)
                for (s.as.mlp = 0; s.as.mlp < 2; ++s.as.mlp)
                    if (p->loss >> s.as.loss & p->mlp >> s.as.mlp & 1) {
                        s.as.all = 0;
                        search_activations(f, s, one);
                        s.activations.kind = ACTIVATIONS_AC;
                        s.as.all = 1;
                        if (p->all) search_states(f, s, one);
                    }
            if (!staged) break;
        }
    }
}

/* search_all -- overlaps: those too.  In order, contiguous and double rings are left out: another method is never worse */
static void search_all(search_state *f, int overlaps, search_one *one)
{
    setting s = f->start;
    const int ranks = s.how.ranks, heads = s.layout->config.heads;
    int method, ring, segments;
    if (s.as.program > 0) {
        search_as(f, one);
        return;
    }
    for (method = 0; method < METHODS; ++method) {
        const method_kind *kind = &method_kinds[method];
        const int grid = kind->shape == METHOD_IS_GRID;
        if (method == METHOD_UPIPE_NAIVE || method == METHOD_RING || method == METHOD_DOUBLE_RING) continue;
        memset(&s.how, 0, sizeof s.how);
        s.how.method = method;
        s.how.ranks = ranks;
        for (ring = grid ? 2 : 1; ring <= (grid ? ranks / 2 : 1); ring *= 2)
            for (segments = kind->segmented ? 4 : 1; segments <= (kind->segmented ? 32 : 1); segments *= 2) {
                s.how.ring = method_ring(kind, ranks, ring);
                s.how.segments = kind->segmented ? segments : 0;
                if (ranks % s.how.ring == 0 && heads >= ranks / s.how.ring)
                    search_chunks(f, s, overlaps, one);
            }
    }
}

/* ---- what both say ---- */

static const char *search_flags(char out[256], const candidate *c)
{
    return report_flags(out, 256, &c->s);
}

/* The first ones, and all that have a mark: those of longest.h with their sequences, and their times at the end. */
static void search_table(const search_state *f, const candidate *won)
{
    const int longest = f->j->o.max_tokens;
    char flags[256], a[32], b[32], d[32];
    int i, shown = 0;
    printf("%d settings: %d refused, %d pruned as they cannot fit, %d fit\n\n", f->tried, f->refused,
           f->pruned, f->n);
    if (f->n == 0) return;
    printf(longest ? "%12s" : "%10s", longest ? "tokens" : "seconds");
    printf(" %12s %12s %12s%s\n", "GPU", "host, node", "link, rank", longest ? "      seconds" : "");
    for (i = 0; i < f->n; ++i) {
        const candidate *c = &f->all[i];
        if (shown >= SEARCH_SHOWN && !c->mark) continue;
        ++shown;
        if (longest)
            printf("%11.3fM", (double)c->s.tokens / (1 << 20));
        else
            printf("%10.2f", c->seconds);
        printf(" %12s %12s %12s", report_bytes(a, c->gpu), report_bytes(b, c->host),
               report_bytes(d, c->link));
        if (longest) printf(" %12.2f", c->seconds);
        printf(" %s %s%s\n", c->mark ? "*" : " ", search_flags(flags, c), c == won ? "   <- confirmed" : "");
    }
    printf("\n* %s\n\n", longest ? "the longest of its method, confirmed by full dry runs"
                                 : "needs less of the GPU than all that are faster");
}

static json_t *search_json_one(const candidate *c, int longest)
{
    char flags[256];
    json_t *one = json_pack("{ss so so so sf sb}", "flags", search_flags(flags, c), "gpu_bytes",
                            report_whole(c->gpu), "host_bytes_node", report_whole(c->host), "link_bytes",
                            report_whole(c->link), "seconds_step", c->seconds,
                            longest ? "confirmed" : "pareto", longest ? c->confirmed : c->mark);
    if (longest) report_set(one, "max_tokens", json_integer(c->s.tokens));
    return one;
}

/* search_json -- what the setting `s` has, which is the best one if it `fits`, and all that fit; of longest.h each with its
 * longest sequence */
static json_t *search_json(const search_state *f, const setting *s, const estimate *e, int fits,
                           const advice_item *help, int n)
{
    const int longest = f->j->o.max_tokens;
    json_t *root = report_json(f->p, s, e, fits, help, n), *settings = json_array();
    char flags[256];
    int i;
    if (fits) report_set(root, "best", json_string(report_flags(flags, sizeof flags, s)));
    if (longest) report_set(root, "max_tokens", json_integer(fits ? s->tokens : 0));
    report_set(root, "tried", json_integer(f->tried));
    report_set(root, "refused", json_integer(f->refused));
    report_set(root, "pruned", json_integer(f->pruned));
    for (i = 0; i < f->n; ++i) report_append(settings, search_json_one(&f->all[i], longest));
    report_set(root, "settings", settings);
    return root;
}

/* search_end -- the verdict of the one that won, or, where none did (NULL), of what comes nearest; the exit status */
static int search_end(const search_state *f, const candidate *won, estimate *e, files *all)
{
    const setting *s = won != NULL ? &won->s : f->pruned > 0 ? &f->nearest : &f->start;
    advice_item help[ADVICE_MAX];
    int n = 0;
    memset(e, 0, sizeof *e);
    memset(help, 0, sizeof help);
    if (won == NULL)
        puts(f->pruned > 0 ? "nothing fits; this comes nearest\n"
                           : "this model has no setting on these ranks");
    if (won != NULL || f->pruned > 0) {
        planner_estimate(f->p, s, e);
        n = planner_advice(f->p, s, e, help);
        report_verdict(f->j, f->p, s, e);
        report_advice(help, n);
    }
    if (f->j->o.json != NULL &&
        report_write(all, f->j->o.json, search_json(f, s, e, won != NULL, help, n)) != 0)
        return EXIT_RUN;
    return won != NULL ? 0 : EXIT_NO_FIT;
}

#endif
