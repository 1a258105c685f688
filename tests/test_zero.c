/* test_zero.c -- sharded states: the same bits in every stage and strip, bytes, failures of any rank
 *
 * The oracle of a gradient is one f32 chain over the ranks, in order. Weights are random bits. Every pool is filled with
 * NaNs, and its peak is compared with upipe_zero_bytes.
 */
#include "../upipe/net/upipe_net_threads.h"
#include "../upipe/cpu/upipe_cpu_simd.h"
#include "../upipe/upipe.h"
#include "lib/context.h"
#include "lib/test.h"

enum { UNITS = 6, RANKS_MAX = 4, ELEMENTS = 5 + 0 + 17 + 1 + 1000 + 64, POOL = 1 << 20, BLOCKS = 32 };

static const int64_t first[UNITS + 1] = {0, 5, 5, 22, 23, 1023, ELEMENTS};

/* What may go wrong on the last rank; SILENT: it announces no unit that the others gather ahead. */
typedef enum trouble { NONE, LEAVES, OTHER_STAGE, SMALL_POOL, TROUBLES, SILENT } trouble;

typedef struct way {
    int ranks, stage, ahead, away, again; /* again: 1: a second round of gradients */
    int ends_first;                       /* the unit whose gradients are the first to end */
    upipe_dtype dtype, sent;
    size_t strip;
    trouble trouble;
    upipe_threads world, side_world;
    upipe_ops ops;
    upipe_status statuses[RANKS_MAX];
    upipe_err errors[RANKS_MAX];
} way;

/* The bits of a weight before and after the update. */
static uint32_t weight_bits(int64_t i, int step)
{
    test_rng r;
    r.state = (uint64_t)i * 2 + (uint64_t)step;
    return (uint32_t)test_u64(&r);
}

static int weight_is(const void *w, upipe_dtype dtype, int64_t i, int64_t element, int step)
{
    const uint32_t bits = weight_bits(element, step);
    return dtype == UPIPE_F32 ? ((const uint32_t *)w)[i] == bits : ((const uint16_t *)w)[i] == (uint16_t)bits;
}

static void weight_set(void *w, upipe_dtype dtype, int64_t i, int64_t element, int step)
{
    const uint32_t bits = weight_bits(element, step);
    if (dtype == UPIPE_F32)
        ((uint32_t *)w)[i] = bits;
    else
        ((uint16_t *)w)[i] = (uint16_t)bits;
}

/* What a rank adds to an element; one of them is NaN, on one rank. */
static float term(int64_t i, int rank)
{
    test_rng r;
    r.state = (uint64_t)i * RANKS_MAX + (uint64_t)rank;
    return i == 30 && rank == 0 ? NAN : (float)test_normal(&r);
}

/* Of so many rounds: where a rank holds whole gradients it adds up its own before the ranks are summed. */
static float chain(const way *w, int64_t i, int rounds)
{
    const int own = w->stage < 2 ? rounds : 1; /* twice a number is exact */
    float sum = 0;
    for (int r = 0; r < w->ranks * rounds / own; ++r) {
        float t = (float)own * term(i, r % w->ranks);
        if (w->sent == UPIPE_BF16 && w->ranks > 1) t = upipe_bf16_to_f32(upipe_f32_to_bf16(t));
        sum += t;
    }
    return sum;
}

static int same_float(float a, float b)
{
    return (isnan(a) && isnan(b)) || memcmp(&a, &b, 4) == 0;
}

/* Whether it is the sum in f64, but for what rounds: each addition to 24 bits, before them each term to 8 in bf16. */
static int near_sum(const way *w, int64_t i, float got)
{
    double sum = 0, size = 0;
    for (int r = 0; r < w->ranks; ++r) {
        const double t = (double)term(i, r);
        sum += t;
        size += fabs(t);
    }
    if (isnan(sum)) return isnan(got);
    return fabs((double)got - sum) <=
           size * (w->sent == UPIPE_BF16 ? 0x1p-8 : 0) + 1.01 * size * w->ranks * 0x1p-24;
}

/* ---- a step ---- */

/* The weights of every unit, in an order that is not that of the units. */
static upipe_status check_weights(const way *w, upipe_ctx *c, upipe_zero *z, int step)
{
    for (int k = 0; k < UNITS; ++k) {
        const int unit = (k * 5 + 2) % UNITS, next = (k * 5 + 7) % UNITS;
        const size_t before = c->mem->live, own = upipe_zero_bytes(z, unit, UPIPE_ZERO_WEIGHTS);
        const int pending = z->ahead != NULL;
        int64_t n = first[unit + 1] - first[unit], bad = 0;
        const void *data;
        CHECK_INT(own, w->stage == 3 ? n * (int64_t)upipe_dtype_bytes(w->dtype) : 0);
        UPIPE_TRY(upipe_zero_weights_begin(c, z, unit, &data));
        CHECK_INT(c->mem->live, pending ? before : before + own);
        if (w->trouble == SILENT && z->rank == w->ranks - 1) {
            while (z->side_world->ops.failure(z->side_world) == NULL) test_nap(0.001);
            upipe_zero_weights_end(c, z, data);
            return UPIPE_ERR_BACKEND;
        }
        if (w->ahead && k + 1 < UNITS) {
            const upipe_status s = upipe_zero_ahead(c, z, next);
            if (s != UPIPE_OK) {
                upipe_zero_weights_end(c, z, data);
                return s;
            }
            CHECK_INT(c->mem->live,
                      (pending ? before : before + own) + upipe_zero_bytes(z, next, UPIPE_ZERO_WEIGHTS));
        }
        for (int64_t i = 0; i < n; ++i) bad += !weight_is(data, w->dtype, i, first[unit] + i, step);
        CHECK_SAY(bad == 0, "%lld weights of unit %d are wrong in stage %d on %d ranks", (long long)bad, unit,
                  w->stage, w->ranks);
        UPIPE_TRY(upipe_zero_weights_end(c, z, data));
    }
    return UPIPE_OK;
}

static void set_weights(const way *w, const upipe_zero *z, upipe_zero_part p, int step)
{
    for (int64_t i = 0; i < p.n; ++i) weight_set(z->weights, w->dtype, p.at + i, p.first + i, step);
}

/* Whether the front of the gradients' shard serves for the unit. */
static int lends(const upipe_zero *z, int unit)
{
    const int64_t n = first[unit + 1] - first[unit];
    return z->stage >= 2 && !z->offload_grads && z->round == 0 && n > 0 && upipe_zero_slice(z, unit).at >= n;
}

/* What this rank adds, unit by unit, downwards. */
static upipe_status add_gradients(const way *w, upipe_ctx *c, upipe_zero *z)
{
    for (int k = 0; k < UNITS; ++k) {
        const int unit = (w->ends_first + UNITS - k) % UNITS, lent = k == 0 && lends(z, unit);
        const size_t before = c->mem->live;
        int64_t n = first[unit + 1] - first[unit];
        float *g;
        UPIPE_TRY(upipe_zero_grads_first(c, z, unit, &g));
        CHECK_INT(c->mem->live, before + (lent ? 0 : upipe_zero_bytes(z, unit, UPIPE_ZERO_GRADS)));
        CHECK((g == z->grads) == (lent || (z->stage < 2 && unit == 0)));
        for (int64_t i = 0; i < n; ++i) {
            const float t = term(first[unit] + i, z->rank);
            CHECK(same_float(g[i], z->stage < 2 && z->round > 0 ? t : 0));
            g[i] += t;
        }
        UPIPE_TRY(upipe_zero_grads_end(c, z, unit, g));
        CHECK_INT(c->mem->live, before);
    }
    return UPIPE_OK;
}

static void check_sums(const way *w, const upipe_zero *z, int rounds)
{
    for (int unit = 0; unit < UNITS; ++unit) {
        /* in stage 0 every rank has all sums */
        const upipe_zero_part p =
            w->stage == 0 ? upipe_zero_part_of(z, UPIPE_ZERO_STATES, unit) : upipe_zero_slice(z, unit);
        const float *g =
            w->stage == 0 ? z->grads + p.at : (const float *)upipe_zero_owned(z, UPIPE_ZERO_GRADS, unit);
        int64_t bad = 0;
        for (int64_t i = 0; i < p.n; ++i)
            bad += !same_float(g[i], chain(w, p.first + i, rounds)) ||
                   (rounds == 1 && !near_sum(w, p.first + i, g[i]));
        CHECK_SAY(bad == 0, "%lld sums of unit %d are wrong in stage %d on %d ranks, strips of %zu bytes",
                  (long long)bad, unit, w->stage, w->ranks, w->strip);
    }
}

/* Rounds of gradients: each chain goes on from what is there; whole gradients are summed after the last one. */
static upipe_status check_rounds(const way *w, upipe_ctx *c, upipe_zero *z)
{
    const int64_t n = upipe_zero_held(z, UPIPE_ZERO_GRADS), weight = (int64_t)upipe_dtype_bytes(w->dtype),
                  gathered = w->stage == 3 ? upipe_zero_held(z, UPIPE_ZERO_WEIGHTS) * weight : 0;
    for (int round = 0; round <= w->again; ++round) {
        z->round = round;
        UPIPE_TRY(add_gradients(w, c, z));
        if (w->stage < 2 && round < w->again) continue;
        UPIPE_TRY(upipe_zero_grads_sum(c, z));
        if (w->stage < 2)
            CHECK_REFUSED(upipe_zero_grads_sum(c, z), UPIPE_ERR_ARG, c->err,
                          "the gradients are summed already");
        check_sums(w, z, round + 1);
        CHECK_INT(z->moved, w->away ? gathered + 4 * n * (1 + 2 * round) : 0);
    }
    return UPIPE_OK;
}

/* Bytes that a step sends, by the definition: gathers send a slice to each other rank, sums all but the own slice. */
static int64_t bytes_sent(const way *w, const upipe_zero *z)
{
    const int64_t weight = (int64_t)upipe_dtype_bytes(w->dtype);
    const int64_t gathers = w->stage == 3 ? 2 : w->stage > 0 ? 1 : 0;
    int64_t sum = 0;
    for (int unit = 0; unit < UNITS; ++unit) {
        const int64_t mine = upipe_zero_slice(z, unit).n, n = first[unit + 1] - first[unit];
        sum += gathers * mine * (w->ranks - 1) * weight;
        sum += (n - mine) * (int64_t)upipe_dtype_bytes(w->sent) * (w->stage < 2 ? 1 : 1 + w->again);
        if (w->stage == 0) sum += mine * (w->ranks - 1) * 4;
    }
    return w->ranks > 1 ? sum : 0;
}

static size_t largest(const way *w, const upipe_zero *z, upipe_zero_what a)
{
    size_t most = 0, one;
    for (int unit = 0; unit < UNITS; ++unit) {
        one = upipe_zero_bytes(z, unit, a);
        if (a == UPIPE_ZERO_GRADS) {
            if (unit == w->ends_first && lends(z, unit) && !w->again) one = 0;
            one += upipe_zero_bytes(z, unit, UPIPE_ZERO_SUM);
        }
        if (one > most) most = one;
    }
    return most;
}

/* The pool's peak of a step without gathers ahead. */
static size_t bytes_peak(const way *w, const upipe_zero *z)
{
    const size_t held = (size_t)upipe_zero_held(z, UPIPE_ZERO_WEIGHTS) * upipe_dtype_bytes(w->dtype) +
                        (w->away ? 0 : (size_t)upipe_zero_held(z, UPIPE_ZERO_GRADS) * 4);
    const size_t gathered = largest(w, z, UPIPE_ZERO_WEIGHTS),
                 summed = w->ranks > 1 || w->stage >= 2 ? largest(w, z, UPIPE_ZERO_GRADS) : 0;
    return held + (gathered > summed ? gathered : summed);
}

/* Gradients that are away are not the pool's, and begin as NaNs. */
static upipe_status alloc(upipe_ctx *c, upipe_zero *z)
{
    void *data;
    const size_t grads = (size_t)upipe_zero_held(z, UPIPE_ZERO_GRADS) * 4;
    UPIPE_TRY(upipe_alloc(c, &z->weights,
                          (size_t)upipe_zero_held(z, UPIPE_ZERO_WEIGHTS) * upipe_dtype_bytes(z->dtype),
                          UPIPE_USE_OTHER, "weights"));
    if (z->offload_grads) {
        z->grads = (float *)malloc(grads + 1);
        memset(z->grads, 0xff, grads);
        return UPIPE_OK;
    }
    UPIPE_TRY(upipe_alloc(c, &data, grads, UPIPE_USE_OTHER, "gradients"));
    z->grads = (float *)data;
    return UPIPE_OK;
}

static upipe_status step(const way *w, upipe_ctx *c, upipe_zero *z)
{
    UPIPE_TRY(upipe_zero_check(c, z));
    for (int unit = 0; unit < UNITS; ++unit)
        set_weights(w, z, upipe_zero_part_of(z, UPIPE_ZERO_WEIGHTS, unit), 0);
    if (w->trouble == LEAVES && z->rank == w->ranks - 1) return UPIPE_ERR_BACKEND;
    UPIPE_TRY(check_weights(w, c, z, 0));
    UPIPE_TRY(upipe_zero_grads_clear(c, z));
    UPIPE_TRY(check_rounds(w, c, z));
    for (int unit = 0; unit < UNITS; ++unit) {
        upipe_zero_part p = upipe_zero_part_of(z, UPIPE_ZERO_STATES, unit);
        if (!upipe_zero_sharded(z, UPIPE_ZERO_WEIGHTS)) p.at = p.first;
        set_weights(w, z, p, 1);
    }
    UPIPE_TRY(upipe_zero_weights_gather(c, z));
    return check_weights(w, c, z, 1);
}

static upipe_status rank_main(void *user, int rank)
{
    way *w = (way *)user;
    const size_t pool = w->trouble == SMALL_POOL && rank == w->ranks - 1 ? 7168 : POOL;
    const int odd_stage = w->trouble == OTHER_STAGE && rank == w->ranks - 1;
    side_thread side;
    upipe_mem mem;
    upipe_status s;
    upipe_ctx c = {.team = upipe_threads_comm(&w->world, rank)};
    upipe_zero z = {.world = c.team, .rank = rank, .ranks = w->ranks, .units = UNITS, .first = first};
    test_rank = rank;
    context_pool(&c, &mem, &w->ops, pool, BLOCKS);
    z.stage = odd_stage ? (w->stage + 1) % UPIPE_ZERO_STAGES : w->stage;
    z.dtype = w->dtype, z.sent = w->sent, z.strip = w->strip, z.offload_grads = w->away;
    z.offload_weights = w->away && w->stage == 3;
    if (w->ahead) {
        side_begin(&c, &side, 0);
        z.side = c.side_stream;
        c.side_stream = NULL;
        z.side_world = upipe_threads_comm(&w->side_world, rank);
    }
    s = alloc(&c, &z);
    if (s == UPIPE_OK) {
        const size_t held = mem.live;
        s = step(w, &c, &z);
        upipe_zero_stop(&c, &z);
        CHECK_SAY(mem.live == held, "%zu bytes are live after the step, %zu before", mem.live, held);
        if (s == UPIPE_OK && !w->ahead) {
            CHECK_INT(mem.peak, bytes_peak(w, &z));
            CHECK_INT(z.world->sent_bytes, bytes_sent(w, &z));
        }
    }
    w->errors[rank] = c.err;
    upipe_mem_free(&mem, z.weights, NULL);
    if (z.offload_grads)
        free(z.grads);
    else
        upipe_mem_free(&mem, z.grads, NULL);
    CHECK(mem.live == 0);
    if (s != UPIPE_OK && w->trouble == NONE) CHECK_STATUS(s, UPIPE_OK, c.err);
    if (w->ahead) side_end(&side);
    upipe_mem_destroy(&mem, NULL);
    return w->statuses[rank] = s;
}

static void run(way *w)
{
    upipe_err e;
    test_at("stage %d, %d ranks, strips of %zu bytes, %s sent in %s, ahead %d, trouble %d", w->stage,
            w->ranks, w->strip, upipe_dtype_name(w->dtype), upipe_dtype_name(w->sent), w->ahead,
            (int)w->trouble);
    w->ops = cpu_table();
    CHECK_STATUS(upipe_threads_init(&w->world, w->ranks, 20, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_threads_init(&w->side_world, w->ranks, w->trouble == SILENT ? 0.3 : 20, &e), UPIPE_OK,
                 e);
    upipe_threads_run(&w->world, rank_main, w, NULL, NULL);
    upipe_threads_free(&w->world);
    upipe_threads_free(&w->side_world);
    buffers_free(0);
}

/* ---- one rank alone, with a pool of these bytes, or without memory ---- */

typedef struct alone {
    upipe_comm_self_state state;
    upipe_comm world;
    upipe_mem mem;
    upipe_mem_block blocks[BLOCKS];
    upipe_ops ops;
    upipe_ctx c;
} alone;

/* Of a sharded state in this stage, with these units; its communicator can be made another one. */
static upipe_zero alone_make(alone *a, size_t bytes, int stage, const int64_t *units, int units_n)
{
    upipe_zero z = {.world = &a->world, .ranks = 1, .stage = stage, .units = units_n, .first = units};
    a->ops = cpu_table();
    upipe_comm_self(&a->world, &a->state, a->ops.copy);
    a->c = (upipe_ctx){.ops = &a->ops, .mem = &a->mem, .team = &a->world};
    if (bytes > 0)
        context_pool(&a->c, &a->mem, &a->ops, bytes, BLOCKS);
    else
        upipe_mem_init_dry(&a->mem, a->blocks, BLOCKS);
    return z;
}

/* ---- tests ---- */

/* Every stage on every number of ranks, with strips of one element, of some, and longer than any unit. */
static void test_stages(void)
{
    static const size_t strips[] = {4, 52, 0};
    way w;
    for (int ranks = 1; ranks <= RANKS_MAX; ++ranks)
        for (int stage = 0; stage < UPIPE_ZERO_STAGES; ++stage)
            for (int strip = 0; strip < 3; ++strip)
                for (int kind = 0; kind < 4; ++kind) {
                    w = (way){.ranks = ranks, .stage = stage, .strip = strips[strip], .ahead = kind == 2};
                    w.dtype = kind & 1 ? UPIPE_BF16 : UPIPE_F32;
                    w.sent = kind == 3 ? UPIPE_BF16 : UPIPE_F32;
                    w.ends_first = UNITS - 1 - kind % 2;  /* one is lent the shard, one is too large for it */
                    if (strip == 0 && kind > 0) continue; /* slow, and the same */
                    run(&w);
                    w.again = 1;
                    run(&w);
                    if (stage < 2) continue;
                    w.away = 1;
                    run(&w);
                }
}

/* A rank that fails: all fail, with a status and a pool as before. */
static void test_troubles(void)
{
    way w;
    for (int t = LEAVES; t < TROUBLES; ++t)
        for (int stage = 0; stage < UPIPE_ZERO_STAGES; ++stage)
            for (int ahead = 0; ahead < 2; ++ahead) {
                w = (way){.ranks = 3, .stage = stage, .ahead = ahead, .ends_first = UNITS - 1};
                w.trouble = (trouble)t;
                run(&w);
                for (int r = 0; r < w.ranks; ++r)
                    CHECK_SAY(w.statuses[r] != UPIPE_OK, "rank %d went on, trouble %d in stage %d", r, t,
                              stage);
                if (t == OTHER_STAGE)
                    for (int r = 0; r < w.ranks; ++r) CHECK_INT(w.statuses[r], UPIPE_ERR_MISMATCH);
                if (t == SMALL_POOL) CHECK_INT(w.statuses[2], UPIPE_ERR_MEMORY);
                if (t != OTHER_STAGE)
                    for (int r = 0; r < 2; ++r) CHECK_INT(w.statuses[r], UPIPE_ERR_ABORTED);
            }
}

/* A gather ahead that a rank does not come to: the others have its sentence when they ask for the unit, after the
 * deadline of its communicator and not that of the world. */
static void test_silent(void)
{
    int late = 0;
    way w = {.ranks = 3, .stage = 3, .ahead = 1, .ends_first = UNITS - 1, .trouble = SILENT};
    run(&w);
    for (int r = 0; r < 2; ++r) {
        late += w.statuses[r] == UPIPE_ERR_TIMEOUT;
        CHECK(w.statuses[r] == UPIPE_ERR_TIMEOUT || w.statuses[r] == UPIPE_ERR_ABORTED);
        CHECK_TEXT(w.errors[r].text, "waited 0.3 s in a transfer for rank 2 to come");
    }
    CHECK(late > 0);
}

/* What breaks the contract is refused, alone and at once. */
static void test_refused(void)
{
    static const int64_t odd[3] = {0, 7, 3};
    upipe_side_stream side;
    alone a;
    upipe_ctx *const c = &a.c;
    upipe_zero z = alone_make(&a, 0, 3, first, UNITS), bad;
    const void *w;
    float *g;
    CHECK_STATUS(upipe_zero_check(c, &z), UPIPE_OK, c->err);
    bad = z, bad.stage = 4;
    CHECK_REFUSED(upipe_zero_check(c, &bad), UPIPE_ERR_ARG, c->err, "stage 4");
    bad = z, bad.rank = 1;
    CHECK_STATUS(upipe_zero_check(c, &bad), UPIPE_ERR_ARG, c->err);
    bad = z, bad.sent = (upipe_dtype)2;
    CHECK_REFUSED(upipe_zero_check(c, &bad), UPIPE_ERR_UNSUPPORTED, c->err,
                  "gradients are sent as f32 or bf16, not as type 2");
    bad = z, bad.dtype = (upipe_dtype)2;
    CHECK_REFUSED(upipe_zero_check(c, &bad), UPIPE_ERR_UNSUPPORTED, c->err,
                  "parameters are f32 or bf16, not type 2");
    bad = z, bad.first = NULL;
    CHECK_REFUSED(upipe_zero_check(c, &bad), UPIPE_ERR_ARG, c->err, "do not begin at 0");
    CHECK(upipe_zero_held(&bad, UPIPE_ZERO_WEIGHTS) == 0 && upipe_zero_bytes(&bad, 1, UPIPE_ZERO_GRADS) == 0);
    CHECK(upipe_zero_slice(&bad, 2).n == 0 && upipe_zero_part_of(&bad, UPIPE_ZERO_STATES, 1).n == 0);
    bad = z, bad.first = odd, bad.units = 2;
    CHECK_REFUSED(upipe_zero_check(c, &bad), UPIPE_ERR_ARG, c->err, "unit 1 has -4 elements");
    bad = z, bad.stage = 2, bad.offload_weights = 1;
    CHECK_REFUSED(upipe_zero_check(c, &bad), UPIPE_ERR_ARG, c->err, "parameters are away in stage 2");
    bad.offload_grads = 1;
    CHECK_REFUSED(upipe_zero_check(c, &bad), UPIPE_ERR_ARG, c->err, "parameters are away in stage 2");
    bad = z, bad.stage = 1, bad.offload_grads = 1;
    CHECK_REFUSED(upipe_zero_check(c, &bad), UPIPE_ERR_ARG, c->err, "gradients are away in stage 1");
    bad = z, bad.side = &side;
    CHECK_STATUS(upipe_zero_check(c, &bad), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_zero_weights_begin(c, &z, UNITS, &w), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_zero_grads_begin(c, &z, -1, &g), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_zero_weights_end(c, &z, &z), UPIPE_ERR_ARG, c->err);
    CHECK(a.mem.live == 0);
}

/* While the shard is lent to a unit, it is lent to no other one, and no other one ends; and what has been summed is not
 * lent. */
static void test_lent(void)
{
    /* the front of the shard is large enough for the last two */
    static const int64_t three[4] = {0, 8, 12, 16};
    static float shard[16];
    alone one;
    upipe_ctx *const c = &one.c;
    const upipe_mem *const mem = &one.mem;
    upipe_zero z = alone_make(&one, POOL, 2, three, 3);
    float *a, *b, *last;
    z.grads = shard;
    CHECK_STATUS(upipe_zero_grads_clear(c, &z), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_zero_grads_first(c, &z, 1, &a), UPIPE_OK, c->err);
    CHECK(a == shard && mem->live == 0);
    CHECK_STATUS(upipe_zero_grads_first(c, &z, 0, &b), UPIPE_OK, c->err);
    CHECK(b != NULL && b != shard);
    CHECK_STATUS(upipe_zero_grads_first(c, &z, 2, &last), UPIPE_OK, c->err);
    CHECK(last != NULL && last != shard && last != b);
    CHECK_INT(mem->live, (8 + 4) * 4);
    a[3] = 5;
    b[3] = 6;
    last[3] = 7;
    CHECK_REFUSED(upipe_zero_grads_end(c, &z, 0, b), UPIPE_ERR_ARG, c->err,
                  "another one has been lent the shard");
    CHECK_REFUSED(upipe_zero_grads_end(c, &z, 0, a), UPIPE_ERR_ARG, c->err,
                  "another one has been lent the shard"); /* of unit 1 */
    CHECK(shard[3] == 5 && shard[11] == 0);
    CHECK_STATUS(upipe_zero_grads_end(c, &z, 1, a), UPIPE_OK, c->err);
    CHECK(shard[3] == 0 && shard[11] == 5);
    CHECK_STATUS(upipe_zero_grads_end(c, &z, 1, a), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_zero_grads_end(c, &z, 0, b), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_zero_grads_end(c, &z, 2, last), UPIPE_OK, c->err);
    CHECK(shard[3] == 6 && shard[11] == 5 && shard[15] == 7 && mem->live == 0);
    CHECK_STATUS(upipe_zero_grads_first(c, &z, 1, &a), UPIPE_OK, c->err);
    CHECK(a != shard);
    CHECK_STATUS(upipe_zero_grads_end(c, &z, 1, a), UPIPE_OK, c->err);
    CHECK(mem->live == 0);
}

/* A strip is so many bytes as they are sent, whatever the parameters are: for each rank's terms that come, and for those
 * that go where they are rounded. */
static void test_strips(void)
{
    static const int64_t one[2] = {0, 16 << 20}, element[2] = {0, 1};
    for (int kind = 0; kind < 2 * 2 * 2; ++kind)
        for (int ranks = 1; ranks <= RANKS_MAX; ++ranks) {
            const int narrow = kind / 2 % 2 && ranks > 1; /* a rank alone rounds nothing */
            upipe_zero z = {.ranks = ranks, .stage = 2, .units = 1, .first = one};
            const size_t strip = kind / 4 ? 52 : UPIPE_ZERO_STRIP;
            z.strip = kind / 4 ? strip : 0;
            z.dtype = kind % 2 ? UPIPE_BF16 : UPIPE_F32;
            z.sent = kind / 2 % 2 ? UPIPE_BF16 : UPIPE_F32;
            CHECK_INT(upipe_zero_bytes(&z, 0, UPIPE_ZERO_SUM), strip * (size_t)(ranks * (1 + narrow)));
            z.strip = 1; /* an element is the least */
            z.first = element;
            CHECK_INT(upipe_zero_bytes(&z, 0, UPIPE_ZERO_SUM), ranks * 4);
        }
}

/* The front of the shard is not lent where it reaches into the unit's own slice. */
static void test_not_lent(void)
{
    static const int64_t two[3] = {0, 6, 16};
    static float shard[16];
    alone one;
    upipe_ctx *const c = &one.c;
    upipe_zero z = alone_make(&one, POOL, 2, two, 2);
    float *a;
    z.grads = shard;
    CHECK_STATUS(upipe_zero_grads_clear(c, &z), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_zero_grads_first(c, &z, 1, &a), UPIPE_OK, c->err);
    CHECK(a != shard);
    for (int i = 0; i < 10; ++i) a[i] = (float)(1 + i);
    CHECK_STATUS(upipe_zero_grads_end(c, &z, 1, a), UPIPE_OK, c->err);
    for (int i = 0; i < 16; ++i)
        CHECK_SAY(shard[i] == (float)(i < 6 ? 0 : i - 5), "sum %d is %g", i, (double)shard[i]);
    CHECK(one.mem.live == 0);
}

/* Rounds of a step in host memory, and the units that a failed step has left open, are none of the next step. */
static void test_next_step(void)
{
    static const int64_t two[3] = {0, 4, 8};
    float shard[8];
    alone one;
    upipe_ctx *const c = &one.c;
    for (int away = 0; away < 2; ++away) {
        upipe_zero z = alone_make(&one, POOL, 2, two, 2);
        float *g, *left;
        z.grads = shard, z.offload_grads = away;
        for (int step = 0; step < 2; ++step) {
            CHECK_STATUS(upipe_zero_grads_clear(c, &z), UPIPE_OK, c->err);
            for (int round = 0; round < 2; ++round) {
                if (round > 0) z.round = round; /* a step begins in round 0 */
                for (int unit = 2; unit-- > 0;) {
                    CHECK_STATUS(upipe_zero_grads_begin(c, &z, unit, &g), UPIPE_OK, c->err);
                    for (int i = 0; i < 4; ++i) g[i] += (float)(1 + step);
                    CHECK_STATUS(upipe_zero_grads_end(c, &z, unit, g), UPIPE_OK, c->err);
                }
            }
            for (int i = 0; i < 8; ++i)
                CHECK_SAY(shard[i] == (float)(2 + 2 * step), "step %d: sum %d is %g", step, i,
                          (double)shard[i]);
            CHECK_STATUS(upipe_zero_grads_clear(c, &z), UPIPE_OK, c->err); /* a step that fails */
            CHECK_STATUS(upipe_zero_grads_first(c, &z, 1, &left), UPIPE_OK, c->err);
            CHECK((left == shard) == !away);
            upipe_mem_rewind(c->mem, 0);
        }
    }
}

/* Ranks that do not agree say on what. */
static const char *const differing[] = {"the stage of ZeRO is 2 on rank 0 and 3 on rank 1",
                                        "its number of units is 6 on rank 0 and 5 on rank 1",
                                        "its number of elements is 1087 on rank 0 and 1090 on rank 1",
                                        "the hash of its units is ",
                                        "the type of its parameters is 0 on rank 0 and 1 on rank 1",
                                        "the type in which gradients are sent is 0 on rank 0 and 1 on rank 1",
                                        "its strip is 16 on rank 0 and 32 on rank 1",
                                        "its side stream is 0 on rank 0 and 1 on rank 1"};

typedef struct differs {
    upipe_threads world;
    int field;
} differs;

static upipe_status differing_body(void *user, int rank)
{
    static const int64_t more[UNITS + 1] = {0, 5, 5, 22, 23, 1023, ELEMENTS + 3},
                                      moved[UNITS + 1] = {0, 5, 5, 22, 24, 1023, ELEMENTS};
    differs *d = (differs *)user;
    const int field = rank == 1 ? d->field : -1;
    const upipe_ops ops = cpu_table();
    upipe_side_stream side;
    upipe_mem mem;
    upipe_ctx c = {.team = upipe_threads_comm(&d->world, rank)};
    upipe_zero z = {.world = c.team, .rank = rank, .ranks = 2, .units = UNITS, .first = first, .stage = 2};
    context_pool(&c, &mem, &ops, POOL, BLOCKS);
    z.strip = 64;
    if (field == 0) z.stage = 3;
    if (field == 1) z.units = 5;
    if (field == 2) z.first = more;
    if (field == 3) z.first = moved;
    if (field == 4) z.dtype = UPIPE_BF16;
    if (field == 5) z.sent = UPIPE_BF16;
    if (field == 6) z.strip = 128;
    if (field == 7) z.side = &side, z.side_world = c.team;
    CHECK_REFUSED(upipe_zero_check(&c, &z), UPIPE_ERR_MISMATCH, c.err, differing[d->field]);
    upipe_mem_destroy(&mem, NULL);
    return UPIPE_OK;
}

static void test_differing(void)
{
    differs d;
    upipe_err e;
    for (d.field = 0; d.field < (int)(sizeof differing / sizeof *differing); ++d.field) {
        CHECK_STATUS(upipe_threads_init(&d.world, 2, 20, &e), UPIPE_OK, e);
        CHECK_STATUS(upipe_threads_run(&d.world, differing_body, &d, NULL, &e), UPIPE_OK, e);
        upipe_threads_free(&d.world);
        buffers_free(0);
    }
}

/* A dry rank gathers ahead too: a unit that was not announced is refused, a second one as well. */
static void test_announced(void)
{
    upipe_msg list[2 * RANKS_MAX];
    int64_t gathered[RANKS_MAX * UPIPE_ALL_GATHER_MAX];
    upipe_comm side_world;
    upipe_side_stream side;
    alone a;
    upipe_ctx *const c = &a.c;
    const upipe_mem *const mem = &a.mem;
    upipe_zero z = alone_make(&a, 0, 3, first, UNITS);
    const void *w;
    upipe_comm_dry(&a.world, 1, RANKS_MAX, list, gathered);
    upipe_comm_dry(&side_world, 1, RANKS_MAX, list, gathered);
    upipe_side_stream_inline(&side, NULL);
    z.side = &side;
    z.side_world = &side_world;
    z.weights = a.mem.slab; /* a dry pool's, never touched */
    z.rank = 1;
    z.ranks = RANKS_MAX;
    CHECK_STATUS(upipe_zero_ahead(c, &z, 4), UPIPE_OK, c->err);
    CHECK_INT(mem->live, upipe_zero_bytes(&z, 4, UPIPE_ZERO_WEIGHTS));
    CHECK_REFUSED(upipe_zero_weights_begin(c, &z, 5, &w), UPIPE_ERR_ARG, c->err, "unit 4 was announced");
    CHECK_STATUS(upipe_zero_ahead(c, &z, 5), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_zero_weights_begin(c, &z, 4, &w), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_zero_ahead(c, &z, 5), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_zero_weights_end(c, &z, w), UPIPE_OK, c->err);
    CHECK_INT(mem->live, 256);
    CHECK_INT(side_world.sent_bytes, 3 * 4 * (16 + 250));
    upipe_zero_stop(c, &z);
    CHECK_INT(mem->live, 0);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_stages());
    TEST(test_troubles());
    TEST(test_silent());
    TEST(test_refused());
    TEST(test_lent());
    TEST(test_strips());
    TEST(test_not_lent());
    TEST(test_next_step());
    TEST(test_differing());
    TEST(test_announced());
    return test_end("zero");
}
