/* test_dry -- dry runs: their bytes against the closed form of even plans, and what they say of all others
 *
 * Random plans of every schedule, type, batch, ring and rank, with random scratch sizes, and the shapes of
 * the paper. The claims about memory and volume that the documentation makes are asserted here. That a real run
 * holds what its dry run says is asserted wherever one runs: runner.h.
 */
#include "lib/memory.h"
#include "lib/test.h"
#include "lib/even_bytes.h"
#include "upipe/upipe.h"

static size_t gemm_scratch, fwd_scratch, bwd_scratch;
static long asked; /* how often the table was asked for scratch: once a product, and before */

static size_t fake_gemm_bytes(const upipe_ops *ops, upipe_view out, upipe_view a, upipe_view b, int flags)
{
    (void)ops;
    (void)a;
    (void)b;
    (void)flags;
    ++asked;
    return out.n > 0 ? gemm_scratch : 0;
}

static size_t whole_scratch; /* more of a backward call whose dQ is complete */

static size_t fake_attn_bytes(const upipe_ops *ops, const upipe_attn *a, int backward)
{
    (void)ops;
    return backward ? bwd_scratch + (a->merge ? 0 : whole_scratch) : fwd_scratch;
}

static const upipe_ops fake_ops = {
    .gemm_bytes = fake_gemm_bytes, .attn_bytes = fake_attn_bytes, .attn_can = ~0};

static void set_scratch(size_t gemm, size_t fwd, size_t bwd)
{
    gemm_scratch = gemm, fwd_scratch = fwd, bwd_scratch = bwd;
}

static upipe_dry *dry;
static upipe_mem_event *events;
enum { EVENTS = 1 << 16 };

static int even_plans; /* whose closed form was held against their dry run */

static void say_plan(const upipe_plan *plan, int qk_norm, int line)
{
    const upipe_plan_desc *d = &plan->desc;
    fprintf(
        stderr,
        "of line %d: S %lld B %lld C %d/%d R %d/%d inner %d mode %d %s H %d/%d d %d/%d D %lld U %d %s%s%s\n",
        line, (long long)d->tokens, (long long)d->batch, d->rank, d->ranks, d->ring_rank, d->ring,
        d->ring_inner, (int)d->ring_mode, upipe_layout_name(d->layout), d->heads, d->kv_heads, d->head_dim,
        d->v_dim, (long long)d->model_dim, d->chunk, upipe_dtype_name(d->dtype), d->naive ? " naive" : "",
        qk_norm ? " qk norm" : "");
}

/* The block, dry: what must be so for every plan, and the closed form where there is one. */
static upipe_bytes dry_run(const upipe_plan_desc *desc, int qk_norm, upipe_plan *plan, int line)
{
    upipe_err err;
    upipe_layer layer = {0};
    upipe_bytes bytes = {0}, sums;
    size_t rows, tile, most = 0;
    float weight[1];
    const long failed = test_failures;
    int even;
    int64_t i;
    if (!CHECK_SAY(upipe_plan_init(plan, desc, &err) == UPIPE_OK, "%s", err.text)) return bytes;
    layer.plan = plan;
    layer.wq = layer.wk = layer.wv = layer.wo = weight;
    if (qk_norm) layer.q_norm_weight = layer.k_norm_weight = weight;
    layer.rope_theta = 10000;
    layer.mask.causal = 1;
    CHECK(upipe_dry_init(dry, plan, &fake_ops) == UPIPE_OK);
    dry->mem.events = events;
    dry->mem.events_max = EVENTS;
    if (!CHECK_SAY(upipe_dry_layer(dry, &layer, 1) == UPIPE_OK, "line %d: %s", line, dry->ctx.err.text))
        return bytes;
    bytes = upipe_dry_bytes(dry);
    /* a tile's sum in f32; and its heads, where they lie in several places */
    rows = (size_t)(plan->rows < UPIPE_TILE_ROWS ? plan->rows : UPIPE_TILE_ROWS);
    tile = plan->desc.dtype == UPIPE_F32 ? 0 : rows * (size_t)plan->desc.model_dim * 4;
    if (plan->desc.ranks > 1 || plan->stages > 1 || (plan->kv_grads_partial && plan->desc.kv_heads > 1))
        tile += rows * (size_t)plan->desc.heads *
                (size_t)(desc->v_dim > desc->head_dim ? desc->v_dim : desc->head_dim) *
                upipe_dtype_bytes(plan->desc.dtype);
    even = even_bytes(&sums, plan, gemm_scratch, fwd_scratch, bwd_scratch, tile, &err) == UPIPE_OK;
    CHECK_INT(even, plan->schedule <= UPIPE_WHOLE && plan->desc.ring == 1 && !plan->overlap &&
                        plan->desc.tokens % plan->desc.ranks == 0);
    for (int phase = 0; phase < UPIPE_PHASES; ++phase) {
        CHECK_INT(bytes.phase[phase], dry->mem.phase_peak[phase]);
        if (even && !qk_norm && whole_scratch == 0) CHECK_INT(bytes.phase[phase], sums.phase[phase]);
        most = upipe_max_bytes(most, bytes.phase[phase]);
    }
    CHECK_INT(bytes.peak, most); /* nothing is allocated beside the phases */
    if (even && !qk_norm && whole_scratch == 0) CHECK_INT(bytes.peak, sums.peak);
    if (even) CHECK_INT(bytes.intermediate_fwd, sums.intermediate_fwd);
    even_plans += even && !qk_norm;
    CHECK_INT(dry->mem.live, 0);
    CHECK(dry->mem.need >= dry->mem.peak);
    CHECK_INT(dry->team.sent_bytes, upipe_plan_sent(plan, 0) + upipe_plan_sent(plan, 1));
    CHECK_INT(dry->ring.sent_bytes,
              upipe_ring_sent(plan, &layer.mask, 0) + upipe_ring_sent(plan, &layer.mask, 1));
    /* the forward's chunks and all-to-all buffers, from the trace */
    CHECK_INT(dry->mem.events_lost, 0);
    for (i = 0; i < dry->mem.events_n; ++i)
        if (dry->mem.events[i].phase >= UPIPE_BWD_BEFORE && dry->mem.events[i].phase != UPIPE_PHASE_OTHER)
            break;
    dry->mem.events_n = i;
    CHECK_INT(upipe_mem_largest(&dry->mem, UPIPE_USE_QKV), bytes.intermediate_fwd);
    if (test_shown_since(failed)) say_plan(plan, qk_norm, line);
    return bytes;
}

static upipe_plan_desc shape(int64_t tokens, int ranks, int heads, int kv_heads, int d, int64_t model,
                             int chunk, upipe_dtype dtype)
{
    upipe_plan_desc desc = {.tokens = tokens,
                            .ranks = ranks,
                            .heads = heads,
                            .kv_heads = kv_heads,
                            .head_dim = d,
                            .model_dim = model,
                            .chunk = chunk,
                            .dtype = dtype};
    return desc;
}

static void draw_scratch(test_rng *rng)
{
    gemm_scratch = (size_t)test_below(rng, 2) * (size_t)test_below(rng, 4000000);
    fwd_scratch = (size_t)test_below(rng, 2) * (size_t)test_below(rng, 1000000);
    bwd_scratch = (size_t)test_below(rng, 2) * (size_t)test_below(rng, 1000000);
}

/* A ring around the team, sometimes one of rings, and any rank of it. */
static void draw_ring(test_rng *rng, upipe_plan_desc *desc)
{
    static const int rings_of[] = {1, 2, 3, 4, 6, 8, 9};
    desc->layout = (upipe_layout)test_below(rng, UPIPE_LAYOUTS);
    desc->rank = test_below(rng, desc->ranks);
    desc->ring = rings_of[test_below(rng, 7)];
    desc->ring_rank = test_below(rng, desc->ring);
    if (desc->ring == 1) return;
    desc->ring_mode = (upipe_ring_mode)test_below(rng, 3);
    if (test_below(rng, 2)) desc->ring_inner = 1 + test_below(rng, desc->ring);
    if (desc->ring_mode == UPIPE_RING_ALL_GATHER) desc->ring_prefetch = test_below(rng, 4) == 0;
}

static void test_random(void)
{
    static const int ranks_of[] = {1, 2, 3, 4, 8, 16}, groups[] = {1, 2, 3, 4, 7, 8};
    test_rng rng;
    long draws = test_draws_wanted(), i;
    int legal = 0, of_schedule[UPIPE_UNEVEN + 1] = {0}, of_mode[UPIPE_RING_ALL_GATHER + 1] = {0}, nested = 0,
        k;
    rng.state = (uint64_t)test_env("UPIPE_SEED", 1);
    for (i = 0; i < draws; ++i) {
        int ranks = ranks_of[test_below(&rng, 6)], group = groups[test_below(&rng, 6)];
        int kv = 1 + test_below(&rng, 16), heads, chunk;
        upipe_plan_desc desc;
        upipe_plan plan;
        if (test_below(&rng, 2)) kv = ranks * (1 + test_below(&rng, 2)); /* rounds that all share */
        if (test_below(&rng, 8) == 0) kv = ranks % 2 == 0 ? ranks / 2 : 1;
        heads = kv * group;
        chunk = ranks * (1 + test_below(&rng, heads / ranks + 1));
        if (test_below(&rng, 4) == 0) chunk = heads;
        desc = shape((int64_t)ranks * (1 + test_below(&rng, 700)) + test_below(&rng, 20), ranks, heads, kv,
                     32 + 8 * test_below(&rng, 29), 8 + test_below(&rng, 4000), chunk,
                     test_below(&rng, 2) ? UPIPE_BF16 : UPIPE_F32);
        draw_ring(&rng, &desc);
        if (test_below(&rng, 3) == 0) desc.v_dim = 32 + 8 * test_below(&rng, 29);
        desc.batch = 1 + test_below(&rng, 3);
        desc.naive = test_below(&rng, 4) == 0;
        desc.overlap = desc.ring == 1 && test_below(&rng, 4) == 0;
        draw_scratch(&rng);
        if (upipe_plan_init(&plan, &desc, NULL) != UPIPE_OK) continue;
        ++legal;
        ++of_schedule[plan.schedule];
        of_mode[plan.desc.ring_mode] += plan.desc.ring > 1;
        nested += plan.desc.ring_inner > 1 && plan.desc.ring_inner < plan.desc.ring;
        dry_run(&desc, test_below(&rng, 3) == 0, &plan, __LINE__);
    }
    CHECK_SAY(legal > draws / 3, "only %d of %ld random plans were legal", legal, draws);
    if (draws < 1000) return;
    for (k = 0; k <= UPIPE_UNEVEN; ++k)
        CHECK_SAY(of_schedule[k] > draws / 100, "only %d plans of schedule %d", of_schedule[k], k);
    CHECK_SAY(of_mode[UPIPE_RING_P2P] > draws / 20 && of_mode[UPIPE_RING_ALL_GATHER] > draws / 20 &&
                  nested > draws / 100,
              "only %d rings shift, %d gather, %d are of rings", of_mode[UPIPE_RING_P2P],
              of_mode[UPIPE_RING_ALL_GATHER], nested);
}

/* Ulysses, and UPipe with even heads: the closed form of each. */
static void test_even(void)
{
    static const int ranks_of[] = {1, 2, 3, 4, 8, 16}, groups[] = {1, 2, 3, 4, 6, 8};
    test_rng rng;
    const long draws = test_env("UPIPE_DRAWS", 2000);
    long of_schedule[] = {0, 0};
    rng.state = (uint64_t)test_env("UPIPE_SEED", 1);
    for (long i = 0; i < draws; ++i) {
        const int ranks = ranks_of[test_below(&rng, 6)], group = groups[test_below(&rng, 6)];
        const int kv = ranks * (1 + test_below(&rng, 4)), heads = kv * group;
        upipe_plan_desc desc;
        upipe_plan plan;
        int m = 1 + test_below(&rng, heads / ranks); /* query heads of a rank and stage */
        while (heads / ranks % m != 0 || (group % m != 0 && m % group != 0)) ++m;
        desc = shape((int64_t)ranks * (1 + test_below(&rng, 700)), ranks, heads, kv,
                     32 + 8 * test_below(&rng, 29), 8 + test_below(&rng, 4000), ranks * m,
                     test_below(&rng, 2) ? UPIPE_BF16 : UPIPE_F32);
        if (test_below(&rng, 3) == 0) desc.v_dim = 32 + 8 * test_below(&rng, 29);
        desc.batch = 1 + test_below(&rng, 3);
        desc.rank = test_below(&rng, ranks);
        draw_scratch(&rng);
        even_plans = 0;
        dry_run(&desc, 0, &plan, __LINE__);
        CHECK_INT(even_plans, 1);
        if (plan.schedule <= UPIPE_WHOLE) ++of_schedule[plan.schedule];
    }
    CHECK_SAY(of_schedule[UPIPE_GROUP] > draws / 10 && of_schedule[UPIPE_WHOLE] > draws / 10,
              "only %ld plans of parts of a group, %ld of whole groups", of_schedule[UPIPE_GROUP],
              of_schedule[UPIPE_WHOLE]);
}

static void check_held(const char *name, const upipe_bytes *b, const size_t *phases, size_t intermediate_fwd)
{
    for (int phase = 0; phase < UPIPE_PHASES; ++phase)
        CHECK_SAY(b->phase[phase] == phases[phase], "%s: %s holds %zu bytes, not %zu", name,
                  upipe_phase_name(phase), b->phase[phase], phases[phase]);
    CHECK_INT(b->intermediate_fwd, intermediate_fwd);
}

/* What plans without a closed form hold: whoever changes these bytes changes them knowingly. */
static void test_held(void)
{
    /* clang-format off */
    static const struct {
        const char *name;
        int tokens, ranks, heads, kv_heads, v_dim, chunk; /* d is 64 */
        upipe_dtype dtype;
        int naive, overlap, ring, ring_inner, ring_prefetch, qk_norm;
        upipe_ring_mode mode;
        size_t phase[UPIPE_PHASES], intermediate_fwd;
    } held[] = {
        {"uneven tokens", 1003, 4, 16, 4, 0, 4, UPIPE_BF16, 0, 0, 1, 0, 0, 0, UPIPE_RING_AUTO,
         {256000, 1171736, 1190736, 1170736, 1315120, 1832668, 2132668, 2050536}, 385152},
        {"QK norm", 1024, 2, 8, 4, 0, 2, UPIPE_BF16, 0, 0, 1, 0, 0, 1, UPIPE_RING_AUTO,
         {524288, 1459176, 1478176, 1458176, 1605632, 2399232, 2699232, 2399232}, 393216},
        {"overlap", 1024, 4, 16, 8, 0, 4, UPIPE_BF16, 0, 1, 1, 0, 0, 0, UPIPE_RING_AUTO,
         {262144, 1610248, 1609248, 1347104, 1343488, 3224544, 3224544, 3224544}, 786432},
        {"overlap, f32, QK norm", 1024, 2, 8, 2, 96, 2, UPIPE_F32, 0, 1, 1, 0, 0, 1, UPIPE_RING_AUTO,
         {1048576, 4100616, 4099616, 4099616, 4227072, 5848544, 5848544, 5848544}, 1441792},
        {"overlap, in order", 1024, 2, 8, 2, 0, 2, UPIPE_BF16, 1, 1, 1, 0, 0, 0, UPIPE_RING_AUTO,
         {524288, 1872392, 1871392, 1609248, 1605632, 4010976, 4010976, 4010976}, 786432},
        {"more ranks than K heads", 1024, 8, 32, 4, 0, 8, UPIPE_BF16, 0, 0, 1, 0, 0, 0, UPIPE_RING_AUTO,
         {131072, 1065960, 1084960, 1064960, 1212416, 1740800, 2040800, 1740800}, 393216},
        {"the same, QK norm", 1024, 8, 32, 4, 48, 8, UPIPE_BF16, 0, 0, 1, 0, 0, 1, UPIPE_RING_AUTO,
         {131072, 1033192, 1052192, 1032192, 1212416, 1618944, 1918944, 1618944}, 360448},
        {"in order", 1024, 4, 16, 4, 0, 4, UPIPE_BF16, 1, 0, 1, 0, 0, 0, UPIPE_RING_AUTO,
         {262144, 1197032, 1216032, 933888, 1343488, 2396160, 2696160, 2396160}, 393216},
        {"uneven heads, a stage", 1024, 3, 16, 4, 0, 16, UPIPE_BF16, 0, 0, 1, 0, 0, 0, UPIPE_RING_AUTO,
         {349184, 2291688, 2310688, 1766400, 1788224, 4735296, 5035296, 4735296}, 1222656},
        {"uneven heads, stages", 1024, 3, 14, 2, 0, 3, UPIPE_BF16, 0, 0, 1, 0, 0, 1, UPIPE_RING_AUTO,
         {349184, 1415144, 1434144, 1414144, 1695384, 2445976, 2745976, 2445976}, 393216},
        {"uneven heads, a K/V head each", 1024, 3, 14, 14, 48, 3, UPIPE_BF16, 0, 0, 1, 0, 0, 1, UPIPE_RING_AUTO,
         {349184, 1382376, 1401376, 1152000, 1695384, 2885400, 3185400, 3057960}, 360448},
        {"P2P ring", 1024, 1, 8, 4, 0, 8, UPIPE_BF16, 0, 0, 4, 0, 0, 0, UPIPE_RING_P2P,
         {262144, 1057768, 2125344, 1318912, 802816, 1859584, 4256736, 1859584}, 524288},
        {"P2P ring around stages", 1024, 2, 16, 4, 0, 2, UPIPE_BF16, 0, 0, 2, 0, 0, 0, UPIPE_RING_P2P,
         {262144, 1000424, 1674784, 1392640, 1343488, 1679360, 3159008, 2098152}, 196608},
        {"double ring", 1024, 1, 8, 8, 96, 8, UPIPE_F32, 0, 0, 8, 4, 0, 0, UPIPE_RING_AUTO,
         {262144, 1709032, 4087328, 1445888, 1056768, 2764800, 7914464, 2764800}, 1048576},
        {"all-gather", 1024, 2, 16, 4, 0, 2, UPIPE_BF16, 0, 0, 2, 0, 0, 0, UPIPE_RING_ALL_GATHER,
         {262144, 1196032, 1281568, 1261568, 1343488, 1869824, 2300896, 2098152}, 393216},
        {"all-gather, prefetched", 1024, 2, 16, 8, 0, 2, UPIPE_BF16, 0, 0, 4, 0, 1, 0, UPIPE_RING_ALL_GATHER,
         {131072, 1024000, 1109536, 761856, 671744, 1459200, 2086880, 1721344}, 622592},
        {"all-gather, uneven heads", 1024, 3, 14, 2, 0, 3, UPIPE_BF16, 0, 0, 2, 0, 0, 0, UPIPE_RING_ALL_GATHER,
         {174080, 947688, 988704, 968704, 847152, 1613104, 2044176, 2004272}, 436736},
        {"all-gather, a K/V head each", 1024, 3, 14, 14, 0, 3, UPIPE_BF16, 0, 0, 2, 0, 0, 0, UPIPE_RING_ALL_GATHER,
         {174080, 903168, 988704, 706560, 847152, 1961264, 2392336, 2090288}, 393216},
        {"all-gather, in order", 1024, 2, 16, 4, 0, 2, UPIPE_F32, 1, 0, 2, 0, 0, 0, UPIPE_RING_ALL_GATHER,
         {524288, 2375680, 2395680, 1851392, 2654208, 3442688, 3873760, 3442688}, 786432},
    };
    /* clang-format on */
    set_scratch(1000, 20000, 300000);
    for (size_t i = 0; i < sizeof held / sizeof *held; ++i) {
        upipe_plan_desc desc = shape(held[i].tokens, held[i].ranks, held[i].heads, held[i].kv_heads, 64, 512,
                                     held[i].chunk, held[i].dtype);
        upipe_plan plan;
        upipe_bytes b;
        desc.v_dim = held[i].v_dim;
        desc.naive = held[i].naive;
        desc.overlap = held[i].overlap;
        desc.ring = held[i].ring;
        desc.ring_inner = held[i].ring_inner;
        desc.ring_prefetch = held[i].ring_prefetch;
        desc.ring_mode = held[i].mode;
        b = dry_run(&desc, held[i].qk_norm, &plan, __LINE__);
        check_held(held[i].name, &b, held[i].phase, held[i].intermediate_fwd);
    }
}

/* The most that a rank holds with this chunk: of Q, K and V of the host's own, or of K and V of a latent. */
static size_t most_held(upipe_plan_desc desc, int chunk, int latent)
{
    size_t most = 0;
    desc.chunk = chunk;
    for (desc.rank = 0; desc.rank < desc.ranks; ++desc.rank) {
        upipe_plan p;
        const upipe_qkv own = {.plan = &p};
        const upipe_latent of = {.plan = &p, .kv = {UPIPE_LATENT_GATHERED, {.d = 64}, {.d = 16}}};
        CHECK(upipe_plan_init(&p, &desc, NULL) == UPIPE_OK && upipe_dry_init(dry, &p, &fake_ops) == UPIPE_OK);
        CHECK_STATUS(latent ? upipe_dry_latent(dry, &of) : upipe_dry_qkv(dry, &own), UPIPE_OK, dry->ctx.err);
        most = upipe_max_bytes(most, dry->mem.peak);
    }
    return most;
}

/* With a K/V head each a chunk that does not divide the heads holds no more than the next larger one that does. */
static void test_chunks_that_do_not_divide(void)
{
    set_scratch(1000, 20000, 300000);
    for (int latent = 0; latent < 2; ++latent) {
        size_t of_divisor = 0;
        int uneven = 0;
        for (int chunk = 48; chunk >= 4; chunk -= 4) {
            upipe_plan_desc desc = shape(1021, 4, 48, 48, 64, 512, 0, latent ? UPIPE_BF16 : UPIPE_F32);
            const size_t held = most_held(desc, chunk, latent);
            CHECK_SAY(of_divisor == 0 || held <= of_divisor,
                      "%s: a chunk of %d holds %zu bytes, more than %zu", latent ? "a latent" : "Q, K and V",
                      chunk, held, of_divisor);
            if (48 % chunk == 0) of_divisor = held;
            uneven += 48 % chunk != 0;
        }
        CHECK_INT(uneven, 6);
    }
}

static void test_held_segments(void)
{
    /* clang-format off */
    static const struct {
        const char *name;
        int tokens, ranks, heads, kv_heads, v_dim, chunk, segments; /* d is 64 */
        upipe_dtype dtype;
        int qk_norm;
        size_t phase[UPIPE_PHASES], intermediate_fwd, host;
    } held[] = {
        {"FPDT", 1024, 4, 16, 4, 0, 16, 4, UPIPE_BF16, 0,
         {0, 394216, 613920, 528384, 0, 397312, 1561568, 589824}, 327680, 3178496},
        {"UPipe in segments, uneven tokens", 1003, 4, 16, 4, 0, 4, 4, UPIPE_BF16, 1,
         {0, 193000, 310156, 129516, 5120, 102496, 758928, 510440}, 128512, 3627392},
        {"f32, V wider", 1024, 2, 8, 4, 96, 2, 3, UPIPE_F32, 1,
         {0, 788968, 896888, 395352, 3072, 398424, 1359168, 1839592}, 437760, 8569152},
        {"more ranks than K heads", 1024, 8, 32, 4, 0, 8, 2, UPIPE_BF16, 0,
         {0, 328680, 611872, 264192, 0, 198656, 1225696, 787432}, 262144, 3571712},
        {"uneven heads", 1024, 3, 14, 2, 48, 14, 5, UPIPE_BF16, 1,
         {0, 389288, 561200, 361296, 4096, 330336, 1379936, 510464}, 318656, 3221600},
        {"uneven heads, a K/V head each", 1024, 3, 14, 14, 48, 14, 5, UPIPE_BF16, 0,
         {0, 527048, 974480, 361296, 0, 326240, 1789120, 781888}, 456416, 4824320},
    };
    /* clang-format on */
    set_scratch(1000, 20000, 300000);
    for (size_t i = 0; i < sizeof held / sizeof *held; ++i) {
        upipe_bytes b;
        upipe_plan p;
        float weight[1];
        upipe_fpdt f = {0};
        f.desc = shape(held[i].tokens, held[i].ranks, held[i].heads, held[i].kv_heads, 64, 512, held[i].chunk,
                       held[i].dtype);
        f.desc.v_dim = held[i].v_dim;
        f.segments = held[i].segments;
        f.layer.wq = f.layer.wk = f.layer.wv = weight;
        if (held[i].qk_norm) f.layer.q_norm_weight = f.layer.k_norm_weight = weight;
        CHECK(upipe_fpdt_plan(&f, 0, &p, NULL) == UPIPE_OK && upipe_dry_init(dry, &p, &fake_ops) == UPIPE_OK);
        whole_scratch = 500000; /* there is no such call in segments */
        CHECK_STATUS(upipe_dry_fpdt(dry, &f), UPIPE_OK, dry->ctx.err);
        whole_scratch = 0;
        b = upipe_dry_bytes(dry);
        check_held(held[i].name, &b, held[i].phase, held[i].intermediate_fwd);
        CHECK_INT(dry->host.peak, held[i].host);
    }
}

/* UPipe, then Ulysses. */
static void in_chunks_and_whole(upipe_plan_desc *desc, upipe_plan *upipe, upipe_plan *ulysses, upipe_bytes *a,
                                upipe_bytes *b)
{
    *a = dry_run(desc, 0, upipe, __LINE__);
    desc->chunk = desc->heads;
    *b = dry_run(desc, 0, ulysses, __LINE__);
}

static void test_claims(void)
{
    upipe_plan_desc desc;
    upipe_plan upipe, ulysses;
    upipe_bytes a, b;
    double unit;
    int64_t tokens = 1 << 20;
    set_scratch(0, 0, 0);

    /* as many key/value heads as query heads: the forward's chunks and buffers are 1/nu of Ulysses' */
    desc = shape(tokens, 8, 32, 32, 128, 4096, 8, UPIPE_BF16);
    in_chunks_and_whole(&desc, &upipe, &ulysses, &a, &b);
    CHECK_INT(a.intermediate_fwd * 4, b.intermediate_fwd);
    CHECK(a.peak < b.peak);
    desc = shape(tokens, 8, 64, 64, 128, 5120, 8, UPIPE_BF16);
    in_chunks_and_whole(&desc, &upipe, &ulysses, &a, &b);
    CHECK_INT(a.intermediate_fwd * 8, b.intermediate_fwd); /* the paper's 87.5 % */

    /* grouped: (3/nu) / (1 + 2/G), see docs/memory.md */
    desc = shape(tokens, 8, 32, 8, 128, 4096, 8, UPIPE_BF16);
    in_chunks_and_whole(&desc, &upipe, &ulysses, &a, &b);
    unit = (double)upipe_plan_unit_bytes(&upipe);
    CHECK_INT(a.intermediate_fwd * 2, b.intermediate_fwd);
    CHECK_SAY((double)a.phase[UPIPE_BWD_ATTN] <= 5.0 * unit, "Llama3-8B backward peak %.3f units",
              (double)a.phase[UPIPE_BWD_ATTN] / unit);
    CHECK_SAY((double)a.peak <= 5.0 * unit, "Llama3-8B peak %.3f units", (double)a.peak / unit);
    CHECK(a.peak < b.peak);
    /* the same bytes sent, forward and backward; one unit per rank is (C-1)/C of a tensor */
    CHECK_INT(upipe_plan_sent(&upipe, 0), upipe_plan_sent(&ulysses, 0));
    CHECK_INT(upipe_plan_sent(&upipe, 1), upipe_plan_sent(&ulysses, 1));
    CHECK_INT(upipe_plan_sent(&upipe, 0) * 8, 7 * (int64_t)(2.5 * unit));
    desc = shape(tokens, 8, 64, 8, 128, 8192, 8, UPIPE_BF16);
    in_chunks_and_whole(&desc, &upipe, &ulysses, &a, &b);
    CHECK_INT(a.intermediate_fwd * 10, b.intermediate_fwd * 3);

    /* naive order: 2 + 2/min(m, G) units instead of 2 + 2/G */
    desc = shape(tokens, 8, 32, 8, 128, 4096, 8, UPIPE_BF16);
    desc.naive = 1;
    dry_run(&desc, 0, &upipe, __LINE__);
    CHECK_INT(upipe_plan_sent(&upipe, 0) * 8, 7 * (int64_t)(4 * unit));
    desc.chunk = 16;
    dry_run(&desc, 0, &upipe, __LINE__);
    CHECK_INT(upipe_plan_sent(&upipe, 0) * 8, 7 * (int64_t)(3 * unit));

    /* more ranks than key/value heads: K and V cost 2 C/H, in Ulysses too */
    desc = shape(tokens, 16, 32, 4, 128, 4096, 16, UPIPE_BF16);
    in_chunks_and_whole(&desc, &upipe, &ulysses, &a, &b);
    unit = (double)upipe_plan_unit_bytes(&upipe);
    CHECK_INT(upipe_plan_sent(&upipe, 0) * 16, 15 * (int64_t)(3 * unit));
    CHECK_INT(upipe_plan_sent(&upipe, 0), upipe_plan_sent(&ulysses, 0));

    /* five million tokens, and a batch: sizes beyond 32 bits */
    desc = shape(5 * tokens, 8, 32, 8, 128, 4096, 8, UPIPE_BF16);
    desc.batch = 3;
    dry_run(&desc, 1, &upipe, __LINE__);
}

/* A gradient of x beside x, and the output projection around the block: the same pool, the same rules. */
static void test_surroundings(void)
{
    upipe_plan_desc desc = shape(4096, 4, 16, 4, 64, 1024, 4, UPIPE_BF16);
    upipe_plan plan;
    upipe_layer layer = {0};
    upipe_saved save;
    upipe_grads grads = {0};
    upipe_bytes bytes;
    void *x, *y, *dx;
    upipe_view vx, vy, vgx;
    upipe_ctx *c = &dry->ctx;
    float weight[1];
    set_scratch(1000, 2000, 3000);
    CHECK(upipe_plan_init(&plan, &desc, NULL) == UPIPE_OK);
    layer.plan = &plan;
    layer.mask.causal = 1;
    layer.wq = layer.wk = layer.wv = layer.wo = weight;
    CHECK(upipe_dry_init(dry, &plan, &fake_ops) == UPIPE_OK);
    CHECK(upipe_mem_alloc(c->mem, &x, upipe_plan_unit_bytes(&plan), UPIPE_USE_OTHER, "x", NULL) == UPIPE_OK);
    CHECK(upipe_mem_alloc(&dry->host, &y, 1, UPIPE_USE_OTHER, "y", NULL) == UPIPE_OK);
    CHECK(x != y); /* programs compare addresses, whichever pool they are of */
    vx = upipe_view_packed(x, UPIPE_BF16, plan.rows, 1, 1024);
    CHECK_STATUS(upipe_layer_fwd(c, &layer, &save, vx), UPIPE_OK, c->err);
    CHECK(upipe_mem_alloc(c->mem, &y, upipe_plan_unit_bytes(&plan), UPIPE_USE_OTHER, "y", NULL) == UPIPE_OK);
    vy = upipe_view_packed(y, UPIPE_BF16, plan.rows, 1, 1024);
    CHECK_STATUS(upipe_layer_out_fwd(c, &layer, vy, &save), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_layer_out_bwd(c, &layer, &grads, &save, vy), UPIPE_OK, c->err);
    CHECK(upipe_mem_free(c->mem, y, NULL) == UPIPE_OK);
    CHECK(upipe_mem_alloc(c->mem, &dx, upipe_plan_unit_bytes(&plan), UPIPE_USE_OTHER, "dx", NULL) ==
          UPIPE_OK);
    vgx = upipe_view_packed(dx, UPIPE_BF16, plan.rows, 1, 1024);
    CHECK_STATUS(upipe_layer_bwd(c, &layer, vgx, &grads, &save, &save.out, vx), UPIPE_OK, c->err);
    CHECK_STATUS(even_bytes(&bytes, &plan, 1000, 2000, 3000, 256 * 1024 * (4 + 2), &c->err), UPIPE_OK,
                 c->err);
    for (int phase = UPIPE_BWD_OUT; phase <= UPIPE_BWD_IN; ++phase)
        CHECK_INT(dry->mem.phase_peak[phase], bytes.phase[phase] + upipe_plan_unit_bytes(&plan));
    CHECK_STATUS(upipe_saved_free(c, &save), UPIPE_OK, c->err);
    CHECK_INT(dry->mem.live, 2 * upipe_plan_unit_bytes(&plan));
    CHECK_REFUSED(upipe_layer_bwd(c, &layer, vgx, &grads, &save, &save.out, vx), UPIPE_ERR_ARG, c->err,
                  "not there");
}

/* What a plan takes a dry run takes: as many ranks of a team and of a ring. */
static void test_ranks(void)
{
    static const int most[][2] = {{UPIPE_RANKS_MAX, 1}, {1, UPIPE_RANKS_MAX}, {2, UPIPE_RANKS_MAX}};
    float weight[1];
    int i;
    set_scratch(1000, 2000, 3000);
    for (i = 0; i < 3; ++i) {
        upipe_plan_desc desc = {0};
        upipe_layer layer = {0};
        upipe_plan plan;
        int which, *const ranks[] = {&desc.ranks, &desc.ring};
        desc.tokens = 4 * UPIPE_RANKS_MAX;
        desc.heads = desc.kv_heads = desc.chunk = UPIPE_RANKS_MAX;
        desc.head_dim = 32;
        desc.model_dim = 32;
        desc.batch = 1;
        for (which = 0; which < 2; ++which) *ranks[which] = most[i][which];
        layer.wq = layer.wk = layer.wv = layer.wo = weight;
        layer.mask.causal = 1;
        layer.plan = &plan;
        CHECK_STATUS(upipe_plan_init(&plan, &desc, &dry->ctx.err), UPIPE_OK, dry->ctx.err);
        CHECK_STATUS(upipe_dry_init(dry, &plan, &fake_ops), UPIPE_OK, dry->ctx.err);
        CHECK_STATUS(upipe_dry_block(dry, &layer, 1), UPIPE_OK, dry->ctx.err);
        CHECK(dry->mem.peak > 0);
        for (which = 0; which < 2; ++which) {
            *ranks[which] = UPIPE_RANKS_MAX + 1;
            CHECK_STATUS(upipe_plan_init(&plan, &desc, &dry->ctx.err), UPIPE_ERR_UNSUPPORTED, dry->ctx.err);
            *ranks[which] = most[i][which];
        }
    }
}

static upipe_status refuse_block(void *user, size_t bytes, int use, const char *tag)
{
    (void)user, (void)bytes, (void)use;
    return strcmp(tag, "dout_block") == 0 ? UPIPE_ERR_MEMORY : UPIPE_OK;
}

/* A table whose attention reads O: the backward holds final_out until its stages are done, and a stage's O'; O is sent once.
 * Nothing else grows. */
static void test_reads_o(void)
{
    upipe_plan_desc desc = shape(4096, 4, 16, 4, 64, 1024, 4, UPIPE_BF16);
    upipe_layer layer = {0};
    upipe_ops ops = fake_ops;
    upipe_plan plan;
    upipe_saved save;
    upipe_grads grads = {0};
    upipe_view x;
    size_t own[2];
    float weight[1];
    set_scratch(1000, 2000, 3000);
    layer.mask.causal = 1;
    layer.wq = layer.wk = layer.wv = layer.wo = weight;
    layer.plan = &plan;
    for (int kind = 0; kind < 4; ++kind) {
        const int projected = kind % 2;
        upipe_bytes bytes[2];
        int64_t sent[2];
        desc.chunk = kind < 2 ? 4 : 16; /* UPipe, Ulysses */
        CHECK(upipe_plan_init(&plan, &desc, NULL) == UPIPE_OK);
        for (int reads = 0; reads < 2; ++reads) {
            ops.attn_reads_o = reads;
            CHECK(upipe_dry_init(dry, &plan, &ops) == UPIPE_OK);
            CHECK_STATUS(projected ? upipe_dry_block(dry, &layer, 1) : upipe_dry_layer(dry, &layer, 1),
                         UPIPE_OK, dry->ctx.err);
            CHECK_INT(dry->mem.live, 0);
            bytes[reads] = upipe_dry_bytes(dry);
            sent[reads] = dry->team.sent_bytes;
        }
        const size_t unit = upipe_plan_unit_bytes(&plan),
                     heads = upipe_plan_rows_bytes(&plan, desc.chunk, 64);
        for (int phase = 0; phase <= UPIPE_FWD_OUT; ++phase)
            CHECK_INT(bytes[1].phase[phase], bytes[0].phase[phase]);
        /* dO does not take O's place */
        CHECK_INT(bytes[1].phase[UPIPE_BWD_BEFORE],
                  bytes[0].phase[UPIPE_BWD_BEFORE] + (projected ? unit : 0));
        for (int phase = UPIPE_BWD_OUT; phase <= UPIPE_BWD_ATTN; ++phase)
            CHECK_INT(bytes[1].phase[phase], bytes[0].phase[phase] + unit + heads);
        CHECK_INT(sent[1] - sent[0], (int64_t)(unit / 4 * 3));
        CHECK_INT(upipe_plan_sent(&plan, 2) - upipe_plan_sent(&plan, 1), (int64_t)(unit / 4 * 3));
        if (!projected) CHECK_INT(sent[1], upipe_plan_sent(&plan, 0) + upipe_plan_sent(&plan, 2));
    }
    for (int reads = 0; reads < 2; ++reads) { /* O of the host's own is not kept */
        upipe_qkv a = {.plan = &plan};
        ops.attn_reads_o = reads;
        CHECK(upipe_dry_init(dry, &plan, &ops) == UPIPE_OK);
        CHECK_STATUS(upipe_dry_qkv(dry, &a), UPIPE_OK, dry->ctx.err);
        own[reads] = upipe_dry_bytes(dry).phase[UPIPE_BWD_ATTN];
    }
    CHECK_INT(own[1] - own[0], upipe_plan_rows_bytes(&plan, desc.chunk, 64));
    /* where new slots are there for dO, and no memory behind them: O is still what save has */
    CHECK(upipe_dry_init(dry, &plan, &ops) == UPIPE_OK);
    x = upipe_view_packed(dry->mem.slab, UPIPE_BF16, plan.rows, 1, 1024);
    CHECK_STATUS(upipe_layer_fwd(&dry->ctx, &layer, &save, x), UPIPE_OK, dry->ctx.err);
    dry->mem.guard = refuse_block;
    CHECK_STATUS(upipe_layer_out_bwd(&dry->ctx, &layer, &grads, &save, x), UPIPE_ERR_MEMORY, dry->ctx.err);
    CHECK_STATUS(upipe_saved_free(&dry->ctx, &save), UPIPE_OK, dry->ctx.err);
    CHECK_INT(dry->mem.live, 0);
}

/* A table that sums dQ' in f32 scratch: where that is more than the send buffer grows by, the sum is in there. */
static void test_dq_sums(void)
{
    static const int chunks[] = {8, 16, 32};
    size_t bwd = bwd_scratch;
    for (size_t i = 0; i < 3; ++i) {
        const upipe_plan_desc d = shape(4096, 8, 32, 8, 128, 4096, chunks[i], UPIPE_BF16);
        upipe_bytes apart, in_send;
        upipe_buffers b;
        upipe_plan p;
        CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
        b = p.buffers;
        bwd_scratch = bwd + b.q; /* as much as the place of the send buffer saves: nothing is won */
        apart = dry_run(&d, 0, &p, __LINE__);
        bwd_scratch = bwd;
        whole_scratch = b.q;
        in_send = dry_run(&d, 0, &p, __LINE__);
        CHECK_INT(in_send.phase[UPIPE_BWD_OUT], apart.phase[UPIPE_BWD_OUT]);
        CHECK_INT(in_send.phase[UPIPE_BWD_ATTN], apart.phase[UPIPE_BWD_ATTN]);
        whole_scratch = 2 * b.q;
        in_send = dry_run(&d, 0, &p, __LINE__);
        CHECK_INT(in_send.phase[UPIPE_BWD_OUT], apart.phase[UPIPE_BWD_OUT] + b.q);
        CHECK_INT(in_send.phase[UPIPE_BWD_ATTN], apart.phase[UPIPE_BWD_ATTN]); /* not b.q more */
        CHECK_INT(in_send.peak, apart.peak);
        whole_scratch = 0;
    }
}

/* What segments move between host and device, in units: docs/methods.md. */
static double moved_units(const upipe_plan *p, int segments, int backward)
{
    const double pi = segments, nu = p->stages, rounds = p->rounds, g = p->group;
    const double kappa = 2.0 * p->desc.ranks * p->kv_per_rank / p->desc.heads;
    const double f = 4.0 / (double)upipe_dtype_bytes(p->desc.dtype), stats = f / p->desc.head_dim;
    if (!backward) return nu + 2 + nu * kappa * (pi + 1) / 2 + stats;
    return (pi + 1) * (1 + f) + nu + rounds + nu * kappa + 2 * (nu - rounds) * f * kappa + 6 + 4 / g +
           (pi + 2) * stats;
}

static void test_moved(void)
{
    static const int heads[][2] = {{16, 4}, {32, 8}, {8, 8}, {8, 2}, {16, 1}, {12, 4}};
    int legal = 0;
    for (int kind = 0; kind < 6 * 2; ++kind)
        for (int ranks = 1; ranks <= 8; ranks *= 2)
            for (int chunk = ranks; chunk <= heads[kind / 2][0]; chunk *= 2)
                for (int segments = 1; segments <= 5; ++segments) {
                    upipe_ctx *c = &dry->ctx;
                    upipe_fpdt_saved save;
                    upipe_fpdt f = {0};
                    upipe_plan p;
                    upipe_err e;
                    char data[1];
                    double unit, before;
                    upipe_grads grads = {0};
                    f.desc =
                        shape((int64_t)ranks * segments * 6, ranks, heads[kind / 2][0], heads[kind / 2][1],
                              64, heads[kind / 2][0] * 64, chunk, kind % 2 ? UPIPE_BF16 : UPIPE_F32);
                    f.segments = segments;
                    f.layer.wq = f.layer.wk = f.layer.wv = data;
                    f.layer.mask.causal = 1;
                    if (upipe_fpdt_plan(&f, 0, &p, &e) != UPIPE_OK || p.schedule == UPIPE_UNEVEN) continue;
                    ++legal;
                    CHECK(upipe_dry_init(dry, &p, &fake_ops) == UPIPE_OK);
                    f.host = &dry->host;
                    unit = (double)upipe_plan_unit_bytes(&p) * segments;
                    CHECK_STATUS(upipe_fpdt_fwd(c, &f, &save, data), UPIPE_OK, c->err);
                    before = (double)save.moved;
                    CHECK_SAY(fabs(before - unit * moved_units(&p, segments, 0)) < 0.5,
                              "forward moves %.3f units, not %.3f", before / unit,
                              moved_units(&p, segments, 0));
                    CHECK_STATUS(upipe_fpdt_bwd(c, &f, data, &grads, &save, data, data), UPIPE_OK, c->err);
                    CHECK_SAY(fabs((double)save.moved - before - unit * moved_units(&p, segments, 1)) < 0.5,
                              "backward moves %.3f units, not %.3f (%d stages, %d rounds)",
                              ((double)save.moved - before) / unit, moved_units(&p, segments, 1), p.stages,
                              p.rounds);
                    /* its table's figures, in tenths of a MiB at 8 MiB a unit */
                    if (kind == 0 && ranks == 4 && segments == 4 && chunk != 8)
                        CHECK_INT(floor((double)save.moved / unit * 80 + 0.5), chunk == 4 ? 3049 : 1909);
                    CHECK_STATUS(upipe_fpdt_free(&f, &save, &c->err), UPIPE_OK, c->err);
                }
    CHECK_SAY(legal > 200, "only %d legal ones", legal);
}

/* ---- tiles and sequences that are alike ---- */

/* All that has loops over tiles or sequences: a block, a host's own Q, K and V, an MLP and a loss, whose tiles are in a
 * loop over tiles themselves. */
static upipe_status life(upipe_dry *d, const upipe_layer *l, size_t tile_bytes, int64_t outer)
{
    const int dim = (int)l->plan->desc.model_dim;
    upipe_ctx *c = &d->ctx;
    float weight[16], losses[1];
    const int32_t targets[1] = {0};
    const upipe_view x = upipe_view_packed(weight, l->plan->desc.dtype, l->plan->rows, 1, dim),
                     dy = upipe_view_packed(weight + 4, l->plan->desc.dtype, l->plan->rows, 1, dim);
    const upipe_mlp_grads grads = {weight, weight, weight, NULL, NULL};
    const upipe_loss_grads head_grads = {weight, NULL};
    upipe_mem_tiles at = {0, 0, 0};
    upipe_mlp m;
    upipe_loss h;
    upipe_qkv a;
    memset(&m, 0, sizeof m);
    memset(&h, 0, sizeof h);
    memset(&a, 0, sizeof a);
    m.w_gate = m.w_up = m.w_down = h.w = weight;
    m.hidden = h.vocab = 2 * dim;
    m.tile_bytes = h.tile_bytes = tile_bytes;
    a.plan = l->plan;
    a.mask = l->mask;
    UPIPE_TRY(upipe_dry_block(d, l, 1));
    UPIPE_TRY(upipe_dry_qkv(d, &a));
    UPIPE_TRY(upipe_mlp_fwd(c, &m, dy, x));
    UPIPE_TRY(upipe_loss_bwd(c, &h, x, &head_grads, losses, x, targets));
    while (upipe_mem_tiles_next(c->mem, &at, x.n, outer)) {
        const upipe_view from = upipe_view_rows(x, at.row, at.n), to = upipe_view_rows(dy, at.row, at.n);
        UPIPE_TRY(upipe_mlp_bwd(c, &m, to, &grads, to, from));
    }
    return UPIPE_OK;
}

/* The same with every tile and sequence gone through. */
static upipe_status long_life(upipe_dry *d, const upipe_layer *l, const upipe_ops *ops, int every,
                              size_t tile_bytes, int64_t outer)
{
    CHECK(upipe_dry_init(d, l->plan, ops) == UPIPE_OK);
    d->mem.events = events; /* space for none: all are counted */
    if (every) d->mem.dry = -1;
    asked = 0;
    return life(d, l, tile_bytes, outer);
}

static void test_alike(void)
{
    upipe_dry *all = (upipe_dry *)zeroed(sizeof *all);
    const long draws = test_draws_wanted();
    long i, fewer = 0, same = 0;
    test_rng rng;
    upipe_ops ops;
    memset(&ops, 0, sizeof ops);
    ops.gemm_bytes = fake_gemm_bytes;
    ops.attn_bytes = fake_attn_bytes;
    ops.attn_can = ~0;
    rng.state = (uint64_t)test_env("UPIPE_SEED", 1);
    for (i = 0; i < draws; ++i) {
        const int ranks = 1 + test_below(&rng, 4), kv = 1 + test_below(&rng, 4);
        const int heads = kv * (1 + test_below(&rng, 4));
        const int64_t outer = 1 + test_below(&rng, 300);
        upipe_plan_desc desc =
            shape(ranks + test_below(&rng, 900), ranks, heads, kv, 32, 8 + test_below(&rng, 90),
                  test_below(&rng, 2) ? heads : ranks, test_below(&rng, 2) ? UPIPE_BF16 : UPIPE_F32);
        size_t tile_bytes = test_below(&rng, 2) ? (size_t)desc.model_dim * 4 * 64 * 10 : 0;
        upipe_status whole, once;
        upipe_layer l;
        upipe_plan plan;
        long steps;
        draw_ring(&rng, &desc);
        desc.batch = 1 + test_below(&rng, 5);
        gemm_scratch = (size_t)test_below(&rng, 2) * (size_t)test_below(&rng, 4000000);
        fwd_scratch = (size_t)test_below(&rng, 2) * (size_t)test_below(&rng, 1000000);
        bwd_scratch = (size_t)test_below(&rng, 2) * (size_t)test_below(&rng, 1000000);
        if (upipe_plan_init(&plan, &desc, NULL) != UPIPE_OK) continue;
        memset(&l, 0, sizeof l);
        l.plan = &plan;
        l.wq = l.wk = l.wv = l.wo = dry;
        l.tile_rows = test_below(&rng, 2) * (1 + test_below(&rng, 200));
        l.mask.causal = test_below(&rng, 3) > 0;
        l.mask.window = l.mask.causal * test_below(&rng, 2) * test_below(&rng, 1000);
        whole = long_life(all, &l, &ops, 1, tile_bytes, outer);
        steps = asked;
        once = long_life(dry, &l, &ops, 0, tile_bytes, outer);
        CHECK_INT(whole, once);
        if (whole != UPIPE_OK) continue;
        ++same;
        fewer += asked < steps;
        CHECK_INT(dry->mem.times, 1);
        CHECK_INT(dry->mem.events_lost, all->mem.events_lost);
        CHECK_INT(dry->mem.live, all->mem.live);
        CHECK_INT(dry->mem.peak, all->mem.peak);
        CHECK_INT(dry->mem.need, all->mem.need);
        CHECK_INT(dry->mem.blocks_peak, all->mem.blocks_peak);
        CHECK_BYTES(dry->mem.phase_peak, all->mem.phase_peak, sizeof dry->mem.phase_peak);
        CHECK_INT(dry->intermediate_fwd, all->intermediate_fwd);
        CHECK_INT(dry->team.sent_bytes, all->team.sent_bytes);
        CHECK_INT(dry->ring.sent_bytes, all->ring.sent_bytes);
        CHECK_INT(dry->work.attn_calls, all->work.attn_calls);
        CHECK(dry->work.products == all->work.products && dry->work.attn_fwd == all->work.attn_fwd &&
              dry->work.attn_bwd == all->work.attn_bwd && dry->work.merged == all->work.merged);
    }
    CHECK_SAY(same > draws / 4 && fewer > draws / 8, "%ld of %ld settings ran, %ld took fewer steps", same,
              draws, fewer);
}

static long attended;

static upipe_status count_fwd(upipe_ctx *c, const upipe_attn *a)
{
    ++attended;
    return upi_dry_attn_fwd(c, a);
}

static upipe_status count_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    ++attended;
    return upi_dry_attn_bwd(c, g);
}

/* Steps of a dry run; they do not grow with tokens or with the batch. */
static long steps_of(int64_t tokens, int64_t batch)
{
    upipe_plan_desc desc = shape(tokens, 4, 8, 4, 64, 512, 4, UPIPE_BF16);
    upipe_plan plan;
    upipe_ops ops;
    upipe_layer l;
    desc.batch = batch;
    memset(&ops, 0, sizeof ops);
    ops.gemm_bytes = fake_gemm_bytes;
    ops.attn_bytes = fake_attn_bytes;
    memset(&l, 0, sizeof l);
    l.plan = &plan;
    l.wq = l.wk = l.wv = l.wo = dry;
    l.mask.causal = 1;
    asked = attended = 0;
    CHECK(upipe_plan_init(&plan, &desc, NULL) == UPIPE_OK);
    CHECK(upipe_dry_init(dry, &plan, &ops) == UPIPE_OK);
    dry->ops.attn_fwd = count_fwd;
    dry->ops.attn_bwd = count_bwd;
    CHECK_STATUS(life(dry, &l, 0, 1000), UPIPE_OK, dry->ctx.err);
    return asked + attended;
}

/* Forward and backward of segments, and what they copy between the pools. */
static int64_t segments_life(upipe_dry *d, const upipe_fpdt *f, const upipe_ops *ops, int every)
{
    float *const weight = (float *)(void *)ops; /* never touched */
    upipe_plan plan;
    upipe_fpdt own = *f;
    upipe_fpdt_saved save;
    upipe_grads grads;
    upipe_ctx *c = &d->ctx;
    CHECK_STATUS(upipe_fpdt_plan(f, 0, &plan, &c->err), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_dry_init(d, &plan, ops), UPIPE_OK, c->err);
    if (every) d->mem.dry = -1;
    own.host = &d->host;
    memset(&grads, 0, sizeof grads);
    grads.wq = grads.wk = grads.wv = grads.wo = weight;
    d->ops.attn_fwd = count_fwd;
    d->ops.attn_bwd = count_bwd;
    attended = 0;
    CHECK_STATUS(upipe_fpdt_fwd(c, &own, &save, weight), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_fpdt_bwd(c, &own, weight, &grads, &save, weight + 16, weight), UPIPE_OK, c->err);
    return save.moved;
}

/* Segments that are alike count once for all; under a window and with documents they are not. */
static void test_alike_segments(void)
{
    upipe_dry *all = (upipe_dry *)zeroed(sizeof *all);
    const long draws = test_draws_wanted() / 4;
    test_rng rng = {(uint64_t)test_env("UPIPE_SEED", 1)};
    long i, fewer = 0, attended_all;
    int64_t moved;
    upipe_ops ops = {0};
    ops.gemm_bytes = fake_gemm_bytes;
    ops.attn_bytes = fake_attn_bytes;
    ops.attn_can = ~0;
    for (i = 0; i < draws; ++i) {
        const int ranks = 1 + test_below(&rng, 3), segments = 1 + test_below(&rng, 9);
        const int64_t tokens = ranks * segments * (1 + test_below(&rng, 40)) + test_below(&rng, 2);
        int64_t borders[] = {0, tokens / 3, tokens / 2, 2 * tokens};
        upipe_fpdt f = {0};
        f.desc = shape(tokens, ranks, 4 * ranks, 2 * ranks, 32, 64, test_below(&rng, 2) ? 4 * ranks : ranks,
                       UPIPE_BF16);
        f.desc.batch = 1 + test_below(&rng, 2);
        f.segments = segments;
        f.layer.wq = f.layer.wk = f.layer.wv = f.layer.wo = dry;
        f.layer.mask.causal = test_below(&rng, 3) > 0;
        f.layer.mask.window = f.layer.mask.causal * (test_below(&rng, 3) == 0) * (1 + test_below(&rng, 100));
        if (test_below(&rng, 3) == 0)
            f.layer.mask.borders.cu_seqlens = borders, f.layer.mask.borders.cu_seqlens_n = 3;
        moved = segments_life(all, &f, &ops, 1);
        attended_all = attended;
        CHECK_INT(segments_life(dry, &f, &ops, 0), moved);
        fewer +=
            attended < attended_all && f.layer.mask.window == 0 && f.layer.mask.borders.cu_seqlens == NULL;
        CHECK_INT(dry->mem.times, 1);
        CHECK_INT(dry->mem.peak, all->mem.peak);
        CHECK_INT(dry->mem.need, all->mem.need);
        CHECK_INT(dry->host.need, all->host.need);
        CHECK_INT(dry->mem.blocks_peak, all->mem.blocks_peak);
        CHECK_BYTES(dry->mem.phase_peak, all->mem.phase_peak, sizeof dry->mem.phase_peak);
        CHECK_INT(dry->team.sent_bytes, all->team.sent_bytes);
        CHECK_INT(dry->work.attn_calls, all->work.attn_calls);
        CHECK(dry->work.products == all->work.products && dry->work.attn_fwd == all->work.attn_fwd &&
              dry->work.attn_bwd == all->work.attn_bwd && dry->work.merged == all->work.merged);
    }
    CHECK_SAY(fewer > draws / 16, "%ld of %ld took fewer calls", fewer, draws);
}

/* Rows of a rank are 700 more than a multiple of the outer loop's 1000, so that each loop has a rest. */
static void test_flat(void)
{
    CHECK_INT(steps_of(4 * INT64_C(2000000700), 1), steps_of(4 * 2000700, 1));
    CHECK_INT(steps_of(2800, 2000001), steps_of(2800, 2001));
}

/* Attention's work: as many pairs as the rows see keys, one by one. */
static void test_pairs(void)
{
    const long draws = test_draws_wanted();
    test_rng rng = {(uint64_t)test_env("UPIPE_SEED", 1)};
    long packed = 0;
    for (long i = 0; i < draws; ++i) {
        int64_t borders[8] = {0};
        upipe_attn a = {.pos_step = test_below(&rng, 5), .mask = {.causal = test_below(&rng, 2)}};
        double pairs = 0;
        a.q.n = 1 + test_below(&rng, 60);
        a.k.n = 1 + test_below(&rng, 60);
        a.q_pos = test_below(&rng, 100);
        a.k_pos = test_below(&rng, 100);
        if (a.mask.causal) a.mask.window = test_below(&rng, 2) * (1 + test_below(&rng, 80));
        if (test_below(&rng, 2)) {
            a.mask.borders.cu_seqlens = borders;
            a.mask.borders.cu_seqlens_n = 1 + test_below(&rng, 7);
            borders[0] = test_below(&rng, 2) * test_below(&rng, 120);
            for (int64_t j = 1; j <= a.mask.borders.cu_seqlens_n; ++j)
                borders[j] = borders[j - 1] + test_below(&rng, 2) * test_below(&rng, 80);
        }
        for (int64_t row = 0; row < a.q.n; ++row) {
            int64_t first, end;
            upipe_attn_visible(&a, row, &first, &end);
            pairs += (double)(end - first);
        }
        packed += a.mask.borders.cu_seqlens != NULL && pairs > 0;
        CHECK(upipe_attn_pairs(&a) == pairs);
    }
    CHECK(packed > draws / 8);
}

/* Where a round has one or two stages, the ring mode that is chosen holds no more than the other one. */
static void test_ring_mode(void)
{
    set_scratch(0, 0, 0);
    for (int group = 1; group <= 2; ++group)
        for (int ring = 2; ring <= 8; ++ring) {
            size_t peak[UPIPE_RING_ALL_GATHER + 1];
            for (int mode = UPIPE_RING_AUTO; mode <= UPIPE_RING_ALL_GATHER; ++mode) {
                upipe_plan_desc desc = shape(64 * ring, 1, 4 * group, 4, 64, 64, 1, UPIPE_BF16);
                upipe_plan plan;
                desc.ring = ring;
                desc.ring_mode = (upipe_ring_mode)mode;
                peak[mode] = dry_run(&desc, 0, &plan, __LINE__).peak;
            }
            CHECK_SAY(peak[UPIPE_RING_AUTO] <= peak[UPIPE_RING_P2P] &&
                          peak[UPIPE_RING_AUTO] <= peak[UPIPE_RING_ALL_GATHER],
                      "groups of %d, a ring of %d: auto holds %zu bytes, p2p %zu, all-gather %zu", group,
                      ring, peak[UPIPE_RING_AUTO], peak[UPIPE_RING_P2P], peak[UPIPE_RING_ALL_GATHER]);
        }
}

/* Operations of products and of attention, counted by hand: two for each element of a product's depth; and the bytes of
 * results that are merged: O, of V's head dim, and dQ, of that of Q. */
static void test_work(void)
{
    const upipe_mask masks[] = {{.window = 0}, {.causal = 1}, {.window = 2}, {.causal = 1, .window = 2}};
    const double pairs[] = {16, 10, 13, 7}; /* of four rows and the same keys, one mask after another */
    static const struct {
        int out, a, b, trans, times; /* heads: each alone, of one operand for all, or added up */
    } products[] = {{1, 1, 1, 0, 1}, {1, 1, 1, 1, 1}, {4, 4, 4, 0, 4},
                    {4, 1, 4, 1, 4}, {4, 4, 1, 0, 4}, {1, 4, 4, 1, 4}};
    double fwd = 0, bwd = 0, done = 0, merged = 0;
    upipe_ctx *c = &dry->ctx;
    upipe_attn_grad g = {0};
    CHECK_STATUS(upipe_dry_init(dry, NULL, &fake_ops), UPIPE_OK, c->err);
    set_scratch(0, 0, 0);
    for (size_t i = 0; i < sizeof products / sizeof *products; ++i) {
        const upipe_view out = upipe_view_packed(NULL, UPIPE_F32, 3, products[i].out, 5);
        const int h = products[i].a, trans = products[i].trans;
        const upipe_view a = upipe_view_packed(NULL, UPIPE_F32, trans ? 11 : 3, h, trans ? 3 : 7);
        CHECK_STATUS(c->ops->gemm(c, out, a,
                                  upipe_view_packed(NULL, UPIPE_F32, trans ? 11 : 7, products[i].b, 5),
                                  trans ? UPIPE_GEMM_TRANS_A : 0, NULL, 0),
                     UPIPE_OK, c->err);
        done += 2 * 3 * 5 * (trans ? 11 : 7) * products[i].times;
        CHECK_SAY(dry->work.products == done, "%g operations after product %zu, not %g", dry->work.products,
                  i, done);
    }
    g.a.q = upipe_view_packed(NULL, UPIPE_F32, 4, 2, 3);
    g.a.k = upipe_view_packed(NULL, UPIPE_F32, 4, 1, 3);
    g.a.v = upipe_view_packed(NULL, UPIPE_F32, 4, 1, 5);
    for (int i = 0; i < 8; ++i) { /* Q K^T and P V; the scores again, dQ and dK, and dO V^T and dV */
        g.a.mask = masks[i % 4];
        g.a.merge = i / 4;
        CHECK_STATUS(c->ops->attn_fwd(c, &g.a), UPIPE_OK, c->err);
        CHECK_INT(dry->work.merged, merged + g.a.merge * 2 * 4 * 4 * 2 * 5);
        CHECK_STATUS(c->ops->attn_bwd(c, &g), UPIPE_OK, c->err);
        merged += g.a.merge * 2 * 4 * 4 * 2 * (5 + 3);
        CHECK_INT(dry->work.merged, merged);
        fwd += 2 * pairs[i % 4] * 2 * (3 + 5);
        bwd += 2 * pairs[i % 4] * 2 * (3 * 3 + 2 * 5);
        CHECK_INT(dry->work.attn_fwd, fwd);
        CHECK_INT(dry->work.attn_bwd, bwd);
    }
}

int main(int argc, char **argv)
{
    dry = (upipe_dry *)zeroed(sizeof *dry);
    events = (upipe_mem_event *)zeroed(EVENTS * sizeof *events);
    test_begin(argc, argv);
    TEST(test_random());
    TEST(test_even());
    TEST(test_held());
    TEST(test_chunks_that_do_not_divide());
    TEST(test_held_segments());
    TEST(test_claims());
    TEST(test_dq_sums());
    TEST(test_surroundings());
    TEST(test_ranks());
    TEST(test_reads_o());
    TEST(test_moved());
    TEST(test_alike());
    TEST(test_alike_segments());
    TEST(test_flat());
    TEST(test_pairs());
    TEST(test_ring_mode());
    TEST(test_work());
    buffers_free(0);
    return test_end("dry");
}
