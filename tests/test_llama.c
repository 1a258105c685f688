/* test_llama -- the trainer's model against golden states in f64, for several teams, rings, segments, chunks
 * and pools; and two steps of AdamW, whose gradients are clipped, against the formula in f64
 *
 * golden/families.json has, of a small model of every family in families.h, the configuration, the loss, and numbers of
 * each gradient, as another library computes them; its weights and tokens are drawn here.
 *
 *     test_llama FAMILIES
 */
#include "upipe/net/upipe_net_threads_grid.h"
#include "upipe/upipe.h"

#include "../examples/common/rules.h"
#include "../examples/train/state/memory.h"
#include "../examples/train/files/config_file.h"
#include "lib/context.h"
#include "lib/test.h"
#include "lib/tolerance.h"

enum { TOKENS = 16, BATCH = 2, RANKS_MAX = 4 };

typedef struct golden {
    const char *type;
    const json_t *row;
    llama_layout layout;
    float *weights, *vectors;
    int32_t inputs[BATCH * TOKENS], targets[BATCH * TOKENS];
} golden;

/* What is left of the steps. */
enum { GRADS, FIRST_MOMENTS, SECOND_MOMENTS, WEIGHTS, KEPT };

/* One way to compute it. */
typedef struct way {
    const golden *g;
    upipe_plan_desc desc;
    int segments, zero, replicas, offload_optimizer;
    activations_setting activations;
    upipe_threads_grid net;
    upipe_ops ops;
    float *kept[KEPT][LLAMA_GROUPS]; /* of all ranks together */
    double loss, norm;
    upipe_err errors[RANKS_MAX];
} way;

/* The first step moves nothing but the moments: both have the same gradient, whose norm the first one clips. */
static const trainer_rates steps[] = {{1, 0, 0.9, 0.95, 0.01, 0.1, 0.5}, {2, 0.5, 0.9, 0.95, 0.01, 0.1, 100}};
enum { STEPS = (int)(sizeof steps / sizeof *steps) };

static int64_t golden_count(const golden *g, int group)
{
    return group == 0 ? g->layout.weights : g->layout.vectors;
}

/* A stream of the name's own, as golden/make_families.py has it. */
static test_rng stream_of(const char *before, const char *name)
{
    test_rng r = {0};
    for (; *before != '\0'; ++before) r.state = 31 * r.state + (unsigned char)*before;
    for (; *name != '\0'; ++name) r.state = 31 * r.state + (unsigned char)*name;
    return r;
}

/* Eleven bits each, which f32 holds with every scale here. */
static void draw_tensor(const llama_tensor *t, float *out)
{
    test_rng r = stream_of("", t->name);
    const int norm = llama_is_norm(t->kind) || t->kind == LLAMA_LINEAR_NORM;
    const double scale = llama_is_bias(t->kind) || t->kind == LLAMA_EMBED ? 0.5 : 0.25;
    for (int64_t i = 0; i < t->n; ++i)
        out[i] = (float)(norm + scale * ((double)(test_u64(&r) >> 53) / 1024 - 1));
}

static void draw_tokens(golden *g)
{
    test_rng r = stream_of("", "tokens");
    for (int i = 0; i < BATCH * TOKENS; ++i) g->inputs[i] = test_below(&r, (int)g->layout.config.vocab);
    for (int i = 0; i < BATCH * TOKENS; ++i) g->targets[i] = i % TOKENS == TOKENS - 1 ? -1 : g->inputs[i + 1];
}

/* The model of a family's row, as the trainer reads its configuration. */
static void golden_open(golden *g, const json_t *root, int family)
{
    const char *path = "test_llama.json";
    llama_config c;
    upipe_err e;
    *g = (golden){.type = llama_families[family].type};
    g->row = json_object_get(root, g->type);
    if (!CHECK_SAY(g->row != NULL, "there is no row of %s: make_families.py makes it", g->type)) exit(1);
    if (!CHECK(json_dump_file(json_object_get(g->row, "config"), path, 0) == 0)) exit(1);
    if (!CHECK_SAY(llama_config_read(&c, NULL, path, NULL, &e) == 0, "%s", e.text)) exit(1);
    unlink(path);
    CHECK_INT(c.family, family);
    if (!CHECK(llama_layout_init(&g->layout, &c) == 0)) exit(1);
    g->weights = floats(g->layout.weights);
    g->vectors = floats(g->layout.vectors);
    for (int i = 0; i < g->layout.n; ++i) {
        const llama_tensor *t = &g->layout.tensors[i];
        draw_tensor(t, (t->is_vector ? g->vectors : g->weights) + t->at);
    }
    draw_tokens(g);
}

static void golden_close(golden *g)
{
    llama_layout_free(&g->layout);
    buffers_free(0);
}

/* ---- a run ---- */

enum { SLAB = 2 << 20 };

static upipe_copy table_copy;
static _Thread_local int to_host; /* copies of a rank from its pool to elsewhere, after the backward */

static upipe_status counted_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    const uintptr_t at = (uintptr_t)dst - (uintptr_t)c->mem->slab;
    to_host += at >= SLAB && c->mem->phase == MODEL_UPDATE;
    return table_copy(c, dst, src, bytes);
}

/* This rank's tokens of every sequence of its replica. */
static trainer_batch way_tokens(const golden *g, const model *m, int32_t *inputs, int32_t *targets)
{
    const int64_t batch_n = m->plan.desc.batch;
    trainer_batch batch = {.inputs = inputs, .targets = targets};
    for (int64_t first = m->replica * batch_n; first < BATCH; first += m->replicas * batch_n)
        for (int part = 0; part < model_parts(m); ++part) {
            const upipe_shard shard = model_shard(m, part);
            for (int64_t b = first; b < first + batch_n; ++b)
                for (int64_t i = 0; i < shard.n; ++i) {
                    const int64_t at = b * TOKENS + upipe_shard_pos(&shard, i);
                    batch.valid += g->targets[at] >= 0;
                    *inputs++ = g->inputs[at];
                    *targets++ = g->targets[at];
                }
        }
    return batch;
}

static void way_start(const golden *g, trainer *t)
{
    for (int group = 0; group < LLAMA_GROUPS; ++group) {
        const upipe_zero *z = &t->state.zero[group];
        for (int unit = 0; unit < z->units; ++unit) {
            const upipe_zero_part p = upipe_zero_part_of(z, UPIPE_ZERO_WEIGHTS, unit);
            memcpy((float *)z->weights + p.at, (group == 0 ? g->weights : g->vectors) + p.first,
                   (size_t)p.n * 4);
        }
    }
}

/* A rank's part; of what every rank has whole, the last one's. */
static void way_keep_part(float *to, const float *from, const upipe_zero *z, upipe_zero_what what)
{
    for (int unit = 0; unit < z->units; ++unit) {
        const upipe_zero_part p = upipe_zero_part_of(z, what, unit);
        if (upipe_zero_sharded(z, what) || z->rank == z->ranks - 1)
            memcpy(to + p.first, from + p.at, (size_t)p.n * 4);
    }
}

static void way_keep(way *w, const trainer *t)
{
    for (int group = 0; group < LLAMA_GROUPS; ++group) {
        const upipe_zero *z = &t->state.zero[group];
        for (int unit = 0; unit < z->units; ++unit) { /* sums are in slices in every stage */
            const upipe_zero_part p = upipe_zero_slice(z, unit);
            memcpy(w->kept[GRADS][group] + p.first, upipe_zero_owned(z, UPIPE_ZERO_GRADS, unit),
                   (size_t)p.n * 4);
        }
        way_keep_part(w->kept[FIRST_MOMENTS][group], t->state.m[group], z, UPIPE_ZERO_STATES);
        way_keep_part(w->kept[SECOND_MOMENTS][group], t->state.v[group], z, UPIPE_ZERO_STATES);
        way_keep_part(w->kept[WEIGHTS][group], (const float *)z->weights, z, UPIPE_ZERO_WEIGHTS);
    }
}

static upipe_status way_rank(way *w, trainer *t)
{
    upipe_ctx *c = t->r.c;
    int32_t inputs[BATCH * TOKENS], targets[BATCH * TOKENS];
    const trainer_batch batch = way_tokens(w->g, &t->m, inputs, targets);
    memory_plan plan;
    trainer_result result[STEPS];
    UPIPE_TRY(trainer_alloc(t));
    way_start(w->g, t);
    for (int i = 0; i < STEPS; ++i) {
        to_host = 0;
        UPIPE_TRY(trainer_step(t, &batch, &steps[i], &result[i]));
        if (!w->offload_optimizer)
            CHECK_INT(to_host, 1); /* loss and norm: one copy, and on a device one wait for it */
        CHECK(result[i].finite && result[i].loss == result[0].loss && result[i].norm == result[0].norm);
    }
    UPIPE_TRY(memory_plan_make(&plan, &t->m, c->ops, NULL, NULL, &c->err));
    for (int phase = 0; phase < MODEL_PHASES; ++phase)
        CHECK_SAY(c->mem->phase_peak[phase] == plan.phase[phase],
                  "phase %d of rank %d of %d held %zu bytes, the plan says %zu", phase, t->world->rank,
                  t->world->ranks, c->mem->phase_peak[phase], plan.phase[phase]);
    CHECK_INT(c->mem->peak, plan.peak);
    CHECK_INT(t->r.second->peak, plan.host);
    way_keep(w, t);
    if (t->world->rank == 0) {
        w->loss = result[0].loss;
        w->norm = result[0].norm;
    }
    return trainer_free_block(t);
}

static upipe_status way_main(void *user, int rank)
{
    enum { BLOCKS = 64 };
    way *w = (way *)user;
    upipe_plan_desc desc = w->desc;
    upipe_mem mem, host;
    trainer t = {0};
    model m;
    upipe_status s;
    upipe_ctx c = {0};
    context_pool(&c, &mem, &w->ops, SLAB, BLOCKS);
    pool_begin(&host, SLAB, BLOCKS);
    upipe_threads_grid_use(&w->net, rank, &c);
    desc.rank = rank % desc.ranks;
    desc.ring_rank = rank / desc.ranks % desc.ring;
    s = model_init(&m, &w->g->layout, &desc, &c.err);
    if (s == UPIPE_OK) s = model_cut(&m, w->segments, &c.err);
    rules_of(DEVICE_CPU, &m.rules);
    m.replicas = w->replicas;
    m.replica = rank / (desc.ranks * desc.ring);
    m.accumulate = BATCH / desc.batch / m.replicas;
    m.activations = w->activations;
    m.zero = w->zero;
    m.offload_optimizer = w->offload_optimizer;
    m.offload_weights = w->offload_optimizer && w->zero == 3;
    if (s == UPIPE_OK) s = trainer_open(&t, &m, &c, upipe_threads_comm(&w->net.world, rank), &host);
    if (s == UPIPE_OK) s = way_rank(w, &t);
    CHECK_STATUS(s, UPIPE_OK, c.err);
    CHECK(mem.live == 0 && host.live == 0);
    trainer_close(&t);
    upipe_mem_destroy(&mem, NULL);
    upipe_mem_destroy(&host, NULL);
    return s;
}

/* The description says ranks and schedule, and how many sequences a micro-batch has where these are not all. */
static void way_run_as(way *w, const golden *g, way as)
{
    upipe_grid grid = {.in_team = as.desc.ranks, .in_ring = as.desc.ring};
    upipe_err e;
    int mark;
    *w = as;
    w->g = g;
    w->desc.tokens = TOKENS;
    if (w->desc.batch == 0)
        w->desc.batch = llama_has_linear(&g->layout.config)
                            ? 1
                            : BATCH; /* linear attention takes one sequence at a time */
    if (w->replicas == 0) w->replicas = 1;
    w->activations.k =
        w->activations.kind == ACTIVATIONS_SAO || w->activations.kind == ACTIVATIONS_BLOCKS ? 2 : 0;
    w->ops = cpu_table();
    table_copy = w->ops.copy;
    w->ops.copy = counted_copy;
    for (int i = 0; i < KEPT * LLAMA_GROUPS; ++i)
        w->kept[i / LLAMA_GROUPS][i % LLAMA_GROUPS] = floats(golden_count(g, i % LLAMA_GROUPS));
    mark = buffers_n;
    grid.ranks = w->replicas * grid.in_team * grid.in_ring;
    CHECK_STATUS(upipe_threads_grid_init(&w->net, &grid, 60, &e), UPIPE_OK, e);
    CHECK(upipe_threads_run(&w->net.world, way_main, w, NULL, NULL) == UPIPE_OK);
    upipe_threads_grid_free(&w->net);
    buffers_free(mark);
}

static void way_run_zero(way *w, const golden *g, upipe_plan_desc desc, int segments, int kind, int zero)
{
    way_run_as(w, g, (way){.desc = desc, .segments = segments, .activations.kind = kind, .zero = zero});
}

static void way_run(way *w, const golden *g, upipe_plan_desc desc, int segments, int kind)
{
    way_run_zero(w, g, desc, segments, kind, 1);
}

/* ---- checks ---- */

/* What AdamW's formula makes of an element with the gradient x in the steps. */
typedef struct updated {
    double m, v, w;
} updated;

static updated update64(double x, double w, double norm, int decays)
{
    updated u = {0, 0, w};
    for (int i = 0; i < STEPS; ++i) {
        const trainer_rates *r = &steps[i];
        const double grad = norm > r->clip ? x * r->clip / norm : x;
        u.m = r->beta1 * u.m + (1 - r->beta1) * grad;
        u.v = r->beta2 * u.v + (1 - r->beta2) * grad * grad;
        u.w -=
            r->rate * (u.m / (1 - pow(r->beta1, i + 1)) / (sqrt(u.v / (1 - pow(r->beta2, i + 1))) + r->eps) +
                       (decays ? r->decay : 0) * u.w);
    }
    return u;
}

/* What the steps make of a tensor, whose gradient the run has. */
static void check_updated(const golden *g, const way *w, const llama_tensor *t)
{
    const float *start = (t->is_vector ? g->vectors : g->weights) + t->at;
    const tolerance_error none = {0};
    double *want[3];
    for (int i = 0; i < 3; ++i) want[i] = (double *)zeroed((size_t)t->n * sizeof **want);
    for (int64_t i = 0; i < t->n; ++i) {
        const updated u = update64((double)w->kept[GRADS][t->is_vector][t->at + i], (double)start[i], w->norm,
                                   !t->is_vector);
        want[0][i] = u.m, want[1][i] = u.v, want[2][i] = u.w;
    }
    for (int i = 0; i < 3; ++i)
        CHECK_CLOSE_TO(w->kept[FIRST_MOMENTS + i][t->is_vector] + t->at, none, want[i], t->n, t->name);
}

static double number_at(const json_t *numbers, size_t at)
{
    return json_number_value(json_array_get(numbers, at));
}

/* The gradient's sum with random signs: its error is a random walk along the tensor's, whose length the rule allows to be
 * 1.5 times the naive one's, and it stays within four times that. Returns the square of the gradient's norm. */
static double check_gradient(const golden *g, const way *w, const llama_tensor *t)
{
    const json_t *numbers = json_object_get(json_object_get(g->row, "grads"), t->name);
    const float *grad = w->kept[GRADS][t->is_vector] + t->at;
    const double limit = 4 * (1.5 * number_at(numbers, 2) + (double)FLT_EPSILON * number_at(numbers, 1));
    test_rng r = stream_of("signs of ", t->name);
    double sum = 0, square = 0;
    for (int64_t k = 0; k < t->n; ++k) {
        sum += test_u64(&r) >> 63 ? -(double)grad[k] : (double)grad[k];
        square += (double)grad[k] * (double)grad[k];
    }
    CHECK_SAY(limit > 0 && fabs(sum - number_at(numbers, 0)) <= limit,
              "%s: the gradient of %s, with signs, sums up to %.9g, not %.9g; at most %.3g off", g->type,
              t->name, sum, number_at(numbers, 0), limit);
    return square;
}

/* Loss, gradients and their norm are the row's; the steps are AdamW's. */
static void check_golden(const golden *g, const way *w)
{
    const json_t *loss = json_object_get(g->row, "loss");
    const double want = number_at(loss, 0);
    double square = 0;
    const int mark = buffers_n;
    CHECK_SAY(fabs(w->loss - want) <= 2 * number_at(loss, 1) + 4 * (double)FLT_EPSILON * want,
              "%s: the loss is %.9g, not %.9g", g->type, w->loss, want);
    CHECK_INT(json_object_size(json_object_get(g->row, "grads")), g->layout.n);
    for (int i = 0; i < g->layout.n; ++i) {
        square += check_gradient(g, w, &g->layout.tensors[i]);
        check_updated(g, w, &g->layout.tensors[i]);
    }
    CHECK_SAY(sqrt(square) > steps[0].clip &&
                  fabs(w->norm - sqrt(square)) <= 4 * (double)FLT_EPSILON * sqrt(square),
              "%s: the norm is %.9g, not %.9g", g->type, w->norm, sqrt(square));
    buffers_free(mark);
}

static int same_bits(const way *a, const way *b)
{
    int same = a->loss == b->loss && a->norm == b->norm;
    for (int i = 0; i < KEPT * LLAMA_GROUPS; ++i)
        same &=
            memcmp(a->kept[i / LLAMA_GROUPS][i % LLAMA_GROUPS], b->kept[i / LLAMA_GROUPS][i % LLAMA_GROUPS],
                   (size_t)golden_count(a->g, i % LLAMA_GROUPS) * 4) == 0;
    return same;
}

static upipe_plan_desc team_of(int ranks, int chunk)
{
    upipe_plan_desc d = {.ranks = ranks, .ring = 1, .chunk = chunk};
    return d;
}

/* Every ring is right, too, alone or across teams, also where ranks hold unequal numbers of tokens. */
static void test_rings(const golden *g)
{
    static const struct {
        int ranks, ring, inner, chunk;
        upipe_layout layout;
        upipe_ring_mode mode;
    } rings[] = {
        {1, 4, 0, 4, UPIPE_CONTIGUOUS, UPIPE_RING_P2P}, {1, 4, 0, 4, UPIPE_ZIGZAG, UPIPE_RING_P2P},
        {1, 3, 0, 4, UPIPE_STRIPED, UPIPE_RING_P2P},    {1, 3, 0, 2, UPIPE_ZIGZAG, UPIPE_RING_ALL_GATHER},
        {1, 4, 2, 4, UPIPE_ZIGZAG, UPIPE_RING_P2P},     {2, 2, 0, 4, UPIPE_ZIGZAG, UPIPE_RING_P2P},
        {2, 2, 0, 2, UPIPE_ZIGZAG, UPIPE_RING_AUTO},    {2, 2, 0, 2, UPIPE_STRIPED, UPIPE_RING_P2P}};
    for (size_t i = 0; i < sizeof rings / sizeof *rings; ++i) {
        upipe_plan_desc d = team_of(rings[i].ranks, rings[i].chunk);
        way one, other;
        d.ring = rings[i].ring;
        d.ring_inner = rings[i].inner;
        d.layout = rings[i].layout;
        d.ring_mode = rings[i].mode;
        way_run(&one, g, d, 0, ACTIVATIONS_AC);
        check_golden(g, &one);
        way_run(&other, g, d, 0, ACTIVATIONS_OFFLOAD);
        CHECK_SAY(same_bits(&one, &other), "a second pool in ring %zu give other bits", i);
    }
}

/* The sequence in segments is right, too, also where they or a rank's part of them are unequal. */
static void test_segments(const golden *g)
{
    static const struct {
        int ranks, chunk, segments;
    } cuts[] = {{1, 4, 1}, {1, 1, 5}, {2, 4, 4}, {2, 2, 3}, {3, 4, 5}, {4, 4, 3}};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; ++i) {
        upipe_plan_desc d = team_of(cuts[i].ranks, cuts[i].chunk);
        way one, other;
        way_run(&one, g, d, cuts[i].segments, ACTIVATIONS_AC);
        check_golden(g, &one);
        way_run(&other, g, d, cuts[i].segments, ACTIVATIONS_OFFLOAD);
        CHECK_SAY(same_bits(&one, &other), "a second pool in cut %zu give other bits", i);
    }
}

/* Whatever is sharded, and wherever the states are: the same bits, in every method and model. Micro-batches are summed in
 * another order where gradients are sharded. */
static void test_zero(const golden *g)
{
    static const struct {
        int ranks, ring, chunk, segments, kind, batch, replicas, away;
    } ways[] = {{1, 1, 4, 0, ACTIVATIONS_AC, 0, 1, 1},      {2, 1, 2, 0, ACTIVATIONS_OFFLOAD, 0, 1, 0},
                {3, 1, 4, 0, ACTIVATIONS_SAC, 0, 1, 1},     {2, 2, 2, 0, ACTIVATIONS_OFFLOAD, 0, 1, 0},
                {2, 1, 2, 3, ACTIVATIONS_OFFLOAD, 0, 1, 1}, {4, 1, 4, 0, ACTIVATIONS_AC, 0, 1, 0},
                {2, 1, 2, 0, ACTIVATIONS_AC, 1, 1, 1},      {2, 1, 2, 0, ACTIVATIONS_AC, 1, 2, 0}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; ++i) {
        way as = {.desc = team_of(ways[i].ranks, ways[i].chunk), .segments = ways[i].segments}, one, other;
        const int in_turn = ways[i].batch > 0 && ways[i].replicas == 1;
        as.desc.ring = ways[i].ring;
        as.desc.batch = ways[i].batch;
        as.replicas = ways[i].replicas;
        as.activations.kind = ways[i].kind;
        for (as.zero = 0; as.zero < 4; ++as.zero) {
            const int first = as.zero == 0 || (as.zero == 2 && in_turn);
            as.offload_optimizer = 0;
            if (first) way_run_as(&one, g, as);
            if (first) check_golden(g, &one);
            as.offload_optimizer = ways[i].away;
            if (first && !as.offload_optimizer) continue;
            way_run_as(&other, g, as);
            CHECK_SAY(same_bits(&one, &other), "ZeRO %d has other bits than %d, way %zu, %s", as.zero,
                      one.zero, i, g->type);
        }
    }
}

/* Every team and chunk is right; for a fixed team all chunks and pools give the same bits. */
static void test_teams(const golden *g)
{
    for (int ranks = 1; ranks <= RANKS_MAX; ++ranks) { /* 3 divide neither tokens nor heads */
        way ulysses, other;
        way_run(&ulysses, g, team_of(ranks, g->layout.config.heads), 0, ACTIVATIONS_AC);
        check_golden(g, &ulysses);
        for (int chunk = ranks; chunk < g->layout.config.heads; chunk += ranks) {
            way_run(&other, g, team_of(ranks, chunk), 0, ACTIVATIONS_AC);
            check_golden(g, &other);
            CHECK_SAY(same_bits(&ulysses, &other), "chunk %d on %d ranks gives other bits than ulysses",
                      chunk, ranks);
        }
        way_run(&other, g, team_of(ranks, ranks), 0, ACTIVATIONS_OFFLOAD);
        CHECK_SAY(same_bits(&ulysses, &other), "a second pool on %d ranks gives other bits", ranks);
    }
}

/* All cuts of a model with norms of q and k, biases and a window, of a tied one, and of one with biases alone. */
static void test_cuts(const json_t *root)
{
    static const int models[] = {LLAMA_IS_QWEN3, LLAMA_IS_QWEN2, LLAMA_IS_LLAMA};
    for (size_t i = 0; i < sizeof models / sizeof *models; ++i) {
        golden g;
        golden_open(&g, root, models[i]);
        test_rings(&g);
        test_segments(&g);
        test_zero(&g);
        test_teams(&g);
        golden_close(&g);
        /* models differ in their tensors, not in how a sequence and states are cut */
        if (test_brief()) break;
    }
}

/* A model with linear attention in teams of every size, where ranks hold parts of a chunk: its numbers, and the same bits
 * whatever is kept and sharded and how many heads a stage has; sharded gradients are summed by micro-batches. */
static void check_linear(const golden *g)
{
    static const int kinds[] = {ACTIVATIONS_OFFLOAD, ACTIVATIONS_SAC, ACTIVATIONS_SAO, ACTIVATIONS_BLOCKS};
    for (int ranks = 1; ranks <= RANKS_MAX; ranks += test_brief() ? 2 : 1) {
        way one, other;
        for (int zero = 0; zero < 4; ++zero) {
            if (zero % 2 == 0) way_run_zero(&one, g, team_of(ranks, 4), 0, ACTIVATIONS_AC, zero);
            if (zero % 2 == 0) check_golden(g, &one);
            way_run_zero(&other, g, team_of(ranks, ranks), 0, kinds[zero], zero);
            CHECK_SAY(same_bits(&one, &other), "%s on %d ranks: ZeRO %d and activations %d give other bits",
                      g->type, ranks, zero, kinds[zero]);
        }
    }
}

/* A model whose K and V come from a latent: in teams of every size with every chunk, in rings, and whatever is kept; in short
 * one model, and no rings. */
static void check_latent(const golden *g)
{
    static const int kinds[] = {ACTIVATIONS_SAC, ACTIVATIONS_SAO, ACTIVATIONS_BLOCKS};
    way one, other;
    if (test_brief() && g->layout.config.family != LLAMA_IS_MINICPM3) return;
    test_teams(g);
    if (!test_brief()) test_rings(g);
    way_run(&one, g, team_of(2, 2), 0, ACTIVATIONS_AC);
    check_golden(g, &one);
    for (int i = 0; i < 3; ++i) {
        way_run_zero(&other, g, team_of(2, 4), 0, kinds[i], i + 1);
        CHECK_SAY(same_bits(&one, &other), "%s: ZeRO %d and activations %d give other bits", g->type, i + 1,
                  kinds[i]);
    }
}

/* Each family, alone, in a team, in a ring and in segments, in short in one of these: a second pool gives the same bits, and
 * so do sharded gradients. Linear attention has neither rings nor segments, and sums sharded gradients by micro-batches. A
 * latent has no segments. */
static void test_families(const json_t *root)
{
    upipe_plan_desc ways[4] = {team_of(1, 4), team_of(2, 2), team_of(1, 4), team_of(2, 2)};
    ways[2].ring = 3;
    ways[2].layout = UPIPE_ZIGZAG;
    for (int i = 0; i < LLAMA_FAMILIES; ++i) {
        golden g;
        int linear, latent;
        golden_open(&g, root, i);
        linear = llama_has_linear(&g.layout.config);
        latent = g.layout.config.kv_rank > 0;
        if (linear) check_linear(&g);
        if (latent) check_latent(&g);
        for (int k = 0; k < (linear ? 2 : latent ? 3 : 4); ++k) {
            way one, other;
            if (test_brief() && k != i % 4) continue;
            way_run(&one, &g, ways[k], k == 3 ? 3 : 0, ACTIVATIONS_AC);
            check_golden(&g, &one);
            way_run_zero(&other, &g, ways[k], k == 3 ? 3 : 0, ACTIVATIONS_OFFLOAD, linear ? 1 : 3);
            CHECK_SAY(same_bits(&one, &other),
                      "sharded gradients or a second pool give other bits, way %d of %s", k, g.type);
        }
        golden_close(&g);
    }
}

int main(int argc, char **argv)
{
    json_t *root;
    if (argc < 2) {
        fprintf(stderr, "usage: test_llama FAMILIES [TEST...]\n");
        return 2;
    }
    root = json_load_file(argv[1], 0, NULL);
    test_begin(argc - 1, argv + 1);
    TEST(test_cuts(root));
    TEST(test_families(root));
    json_decref(root);
    return test_end("llama");
}
