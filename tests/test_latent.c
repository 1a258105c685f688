/* test_latent -- attention whose K and V are expanded from a latent, gathered or sent as heads: on random teams and rings
 * (lib/block_draws.h), against finite differences, its bytes against a closed form, every allocation that fails, ranks that
 * do not agree
 */
#include "lib/block_draws.h"

static void test_random(void)
{
    block_draws(2);
}

/* ---- bytes, of even heads without a ring ---- */

enum { GEMM_SCRATCH = 1100, FWD_SCRATCH = 20300, BWD_SCRATCH = 300700 };

static size_t fake_gemm_bytes(const upipe_ops *ops, upipe_view out, upipe_view a, upipe_view b, int flags)
{
    (void)ops, (void)out, (void)a, (void)b, (void)flags;
    return GEMM_SCRATCH;
}

static size_t fake_attn_bytes(const upipe_ops *ops, const upipe_attn *a, int backward)
{
    (void)ops, (void)a;
    return backward ? BWD_SCRATCH : FWD_SCRATCH;
}

static const upipe_ops fake_ops = {
    .gemm_bytes = fake_gemm_bytes, .attn_bytes = fake_attn_bytes, .attn_can = ~0};

/* What docs/latent.md says that a pass holds, in bytes. */
typedef struct parts {
    size_t q, o;           /* Q', or K'; O', or V', of a stage */
    size_t own, all, grad; /* c and kr of this rank's tokens, of all tokens, and their gradient in f32 */
    size_t slots, lse;     /* of all stages; delta is as large as lse */
    size_t tile;           /* of the gradient of xq */
} parts;

static parts parts_of(const upipe_plan *p, const upipe_latent_kv *kv, int32_t q_dim)
{
    const upipe_plan_desc *d = &p->desc;
    const size_t e = upipe_dtype_bytes(d->dtype), rows = (size_t)p->rows,
                 width = (size_t)(kv->c.d + kv->kr.d);
    const size_t most = (size_t)(d->head_dim > d->v_dim ? d->head_dim : d->v_dim);
    const size_t tile_rows = rows < UPIPE_TILE_ROWS ? rows : UPIPE_TILE_ROWS;
    parts h;
    h.q = rows * (size_t)(d->chunk * d->head_dim) * e;
    h.o = rows * (size_t)(d->chunk * d->v_dim) * e;
    h.own = rows * width * e;
    h.all = upipe_latent_gathers(p, kv) ? (size_t)(d->tokens * d->batch) * width * e : 0;
    h.grad = rows * width * 4;
    h.slots = rows * (size_t)d->heads * most * e;
    h.lse = rows * (size_t)d->heads * 4;
    h.tile = d->dtype == UPIPE_F32 ? 0 : tile_rows * (size_t)q_dim * 4;
    if (d->ranks > 1 || p->stages > 1) h.tile += tile_rows * (size_t)d->heads * most * e;
    return h;
}

/* Which door, and where dO of its backward comes from. */
typedef enum door { HOST_HEADS, LAYER, LAYER_DOUT } door;

/* The phases of a forward and a backward. upipe_latent.h has one slot for all stages, and projects no Q. Before the
 * backward of upipe_latent_layer.h delta is there, and dO in O's place; or dO is the host's, beside O. */
static void held_phases(const upipe_plan *p, const parts *h, door by, size_t *phase)
{
    const int layer = by != HOST_HEADS, narrow = p->desc.dtype != UPIPE_F32;
    const size_t f = narrow ? 2 : 1, send = upipe_max_bytes(h->q, h->o), kv = h->q + h->o;
    const size_t out = layer ? h->slots : send, delta = h->lse, latent = h->own + h->all;
    const size_t fwd = (h->all > 0 ? h->all : h->own) + out + h->lse,
                 bwd = latent + out + h->lse + delta + h->grad;
    /* K', V', dK', dV', the send buffer, dO', delta' */
    const size_t stage = kv + f * kv + send + h->o + delta / (size_t)p->stages;
    const size_t load = layer || h->all == 0 ? send + GEMM_SCRATCH : upipe_max_bytes(send, GEMM_SCRATCH);
    /* after a stage: dK' goes to its tokens, and dV' */
    const size_t dk = h->q + (narrow ? send : 0) + f * kv, dv = kv + (narrow ? send : 0) + f * h->o;
    size_t in = upipe_max_bytes(stage, kv + f * kv + load);
    in = upipe_max_bytes(in, upipe_max_bytes(upipe_max_bytes(dk, dv), kv + GEMM_SCRATCH));
    memset(phase, 0, UPIPE_PHASES * sizeof *phase);
    phase[UPIPE_FWD_IN] = upipe_max_bytes(latent, fwd + kv + load);
    phase[UPIPE_FWD_ATTN] = fwd + kv + send + FWD_SCRATCH;
    phase[UPIPE_FWD_OUT] = fwd + send;
    phase[UPIPE_BWD_BEFORE] = h->lse + (layer ? out + delta : 0) + (by == LAYER_DOUT ? out : 0);
    phase[UPIPE_BWD_OUT] = bwd + stage;
    phase[UPIPE_BWD_ATTN] = bwd + stage + BWD_SCRATCH;
    phase[UPIPE_BWD_IN] = bwd + in;
    if (layer) /* the gradient of xq, after lse and delta */
        phase[UPIPE_BWD_IN] = upipe_max_bytes(bwd + in, latent + h->grad + out + h->tile + GEMM_SCRATCH);
}

/* Forward and backward of upipe_latent_layer.h, dry; phases that the output projection takes are left out. */
static void dry_layer(upipe_dry *dry, const upipe_plan *p, const upipe_latent_kv *kv, int32_t q_dim, door by)
{
    upipe_ctx *c = &dry->ctx;
    float w[1];
    upipe_layer l = {.plan = p, .wq = w, .wk = w, .wo = w, .rope_theta = 10000};
    const upipe_grads g = {.wq = w, .wk = w};
    const upipe_view x = upipe_view_packed(w, p->desc.dtype, p->rows, 1, q_dim),
                     y = upipe_view_packed(w, p->desc.dtype, p->rows, 1, (int32_t)p->desc.model_dim);
    upipe_latent_kv own = *kv;
    upipe_slots dout = {0}, *from;
    upipe_saved save;
    own.c = upipe_view_packed(w, p->desc.dtype, p->rows, 1, kv->c.d);
    own.kr = upipe_view_packed(w, p->desc.dtype, p->rows, 1, kv->kr.d);
    CHECK_STATUS(upipe_latent_layer_fwd(c, &l, &save, x, &own), UPIPE_OK, c->err);
    if (by == LAYER)
        CHECK_STATUS(upipe_layer_out_bwd(c, &l, &g, &save, y), UPIPE_OK, c->err);
    else
        CHECK_STATUS(upipe_slots_alloc(c, p, &dout, UPIPE_SLOT_FULL, "dout"), UPIPE_OK, c->err);
    from = by == LAYER ? &save.out : &dout;
    dry->mem.phase_peak[UPIPE_BWD_BEFORE] = 0;
    CHECK_STATUS(upipe_latent_layer_bwd(c, &l, x, &own, &g, &save, from, x, &own), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_saved_free(c, &save), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_free(c, dout.data), UPIPE_OK, c->err);
    CHECK_INT(dry->mem.live, 0);
}

static void check_held(const char *name, const upipe_dry *dry, const upipe_plan *p, const upipe_latent_kv *kv,
                       const size_t *want)
{
    const upipe_plan_desc *d = &p->desc;
    for (int phase = 0; phase < UPIPE_PHASES; ++phase)
        CHECK_SAY(dry->mem.phase_peak[phase] == want[phase],
                  "%s, T %lld B %lld C %d H %d U %d d %d/%d r %d+%d %s %s: %s holds %zu bytes, not %zu", name,
                  (long long)p->local, (long long)d->batch, d->ranks, d->heads, d->chunk, d->head_dim,
                  d->v_dim, kv->c.d, kv->kr.d, upipe_dtype_name(d->dtype),
                  upipe_latent_gathers(p, kv) ? "gathered" : "heads", upipe_phase_name(phase),
                  dry->mem.phase_peak[phase], want[phase]);
    CHECK_INT(dry->team.sent_bytes, upipe_latent_sent(p, kv, 0) + upipe_latent_sent(p, kv, 1));
}

static void test_bytes(void)
{
    static const int ranks_of[] = {1, 2, 4, 8};
    static const char *const names[] = {"the host's heads", "a layer", "a layer, dO the host's"};
    long gathered = 0;
    test_rng rng = {.state = (uint64_t)test_env("UPIPE_SEED", 1)};
    for (int i = 0; i < 300; ++i) {
        const int ranks = ranks_of[test_below(&rng, 4)], per = 1 + test_below(&rng, 3),
                  q_dim = 8 + test_below(&rng, 900);
        upipe_plan_desc d = {.ranks = ranks, .chunk = ranks * per, .rank = test_below(&rng, ranks)};
        upipe_latent a = {0};
        size_t want[UPIPE_PHASES];
        upipe_plan p;
        upipe_status s;
        d.tokens = ranks * (1 + test_below(&rng, 300));
        d.heads = d.kv_heads = d.chunk * (1 + test_below(&rng, 5));
        d.batch = 1 + test_below(&rng, 2);
        d.head_dim = 32 + 8 * test_below(&rng, 21);
        d.v_dim = 32 + 8 * test_below(&rng, 21);
        d.model_dim = 8 + test_below(&rng, 4000);
        d.dtype = test_below(&rng, 2) ? UPIPE_BF16 : UPIPE_F32;
        CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
        a.plan = &p;
        a.kv.form = (upipe_latent_form)test_below(&rng, 3);
        a.kv.c.d = 1 + test_below(&rng, 600);
        a.kv.kr.d = 2 * (1 + test_below(&rng, d.head_dim / 2 - 1));
        gathered += upipe_latent_gathers(&p, &a.kv);
        for (int by = HOST_HEADS; by <= LAYER_DOUT; ++by) {
            upipe_dry *dry = dry_begin(&p, &fake_ops, &s);
            const parts h = parts_of(&p, &a.kv, q_dim);
            held_phases(&p, &h, (door)by, want);
            if (by != HOST_HEADS)
                dry_layer(dry, &p, &a.kv, q_dim, (door)by);
            else
                CHECK_STATUS(upipe_dry_latent(dry, &a), UPIPE_OK, dry->ctx.err);
            check_held(names[by], dry, &p, &a.kv, want);
            buffers_free(0);
        }
    }
    CHECK_SAY(gathered > 75 && gathered < 225, "%ld of 300 gather", gathered);
}

/* The largest allocation of a forward with this tag. */
static size_t largest(const upipe_dry *dry, const char *tag)
{
    size_t most = 0;
    for (int64_t i = 0; i < dry->mem.events_n; ++i)
        if (dry->mem.events[i].kind > 0 && strcmp(dry->mem.events[i].tag, tag) == 0)
            most = upipe_max_bytes(most, dry->mem.events[i].bytes);
    return most;
}

/* What a forward of one stage of `chunk` heads sends, in elements for each of its tokens; and holds, in hundredths of a
 * unit. */
static int64_t table_run(upipe_plan_desc d, int chunk, upipe_latent_kv kv, int *latent, int *heads)
{
    static upipe_mem_event events[4096];
    upipe_latent a = {.kv = kv};
    upipe_plan p;
    upipe_status s;
    upipe_dry *dry;
    double unit;
    d.chunk = chunk;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
    unit = (double)upipe_plan_unit_bytes(&p);
    a.plan = &p;
    dry = dry_begin(&p, &fake_ops, &s);
    dry->mem.events = events;
    dry->mem.events_max = 4096;
    CHECK_STATUS(upipe_dry_latent(dry, &a), UPIPE_OK, dry->ctx.err);
    CHECK_INT(dry->mem.events_lost, 0);
    *latent = (int)lround(100 * (double)largest(dry, "latent_all") / unit);
    *heads = (int)lround(100 * (double)(largest(dry, "k") + largest(dry, "v")) / unit);
    return upipe_latent_sent(&p, &kv, 0) / (2 * p.rows);
}

/* The table of docs/latent.md. */
static void test_table(void)
{
    static const struct {
        const char *name;
        int heads, d, v_dim, r, dr, model_dim, ranks, of_heads, of_latent, all, latent, stage, whole, gathers;
    } rows[] = {
        {"DeepSeek-V3", 128, 192, 128, 512, 64, 7168, 8, 35840, 4032, 56, 64, 36, 571, 1},
        {"DeepSeek-V3", 128, 192, 128, 512, 64, 7168, 16, 38400, 8640, 61, 129, 71, 571, 1},
        {"Kimi K2", 64, 192, 128, 512, 64, 7168, 8, 17920, 4032, 61, 64, 36, 286, 1},
        {"MiniCPM3-4B", 40, 96, 64, 256, 32, 2560, 8, 5600, 2016, 68, 90, 50, 250, 1},
        {"Moonlight", 16, 192, 128, 512, 64, 2048, 8, 4480, 4032, 95, 225, 125, 250, 0},
        {"Moonlight", 16, 192, 128, 512, 64, 2048, 16, 4800, 8640, 140, 450, 250, 250, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
        const upipe_plan_desc d = {.tokens = 64 * rows[i].ranks,
                                   .ranks = rows[i].ranks,
                                   .heads = rows[i].heads,
                                   .kv_heads = rows[i].heads,
                                   .head_dim = rows[i].d,
                                   .v_dim = rows[i].v_dim,
                                   .model_dim = rows[i].model_dim,
                                   .dtype = UPIPE_BF16};
        upipe_latent_kv kv = {.form = UPIPE_LATENT_HEADS, .c = {.d = rows[i].r}, .kr = {.d = rows[i].dr}};
        int latent, heads;
        const int64_t sent = table_run(d, rows[i].ranks, kv, &latent, &heads),
                      q_and_o = sent - rows[i].of_heads;
        const char *name = rows[i].name;
        CHECK_SAY(q_and_o == rows[i].of_heads, "%s: Q and O are %lld", name, (long long)q_and_o);
        CHECK_SAY(latent == 0 && heads == rows[i].stage, "%s, heads: holds %d, %d", name, latent, heads);
        kv.form = UPIPE_LATENT_GATHERED;
        CHECK_INT(table_run(d, rows[i].ranks, kv, &latent, &heads), q_and_o + rows[i].of_latent);
        CHECK_SAY(latent == rows[i].latent && heads == rows[i].stage, "%s: holds %d, %d", name, latent,
                  heads);
        CHECK_INT(lround(100 * (double)(q_and_o + rows[i].of_latent) / (double)sent), rows[i].all);
        table_run(d, rows[i].heads, kv, &latent, &heads); /* Ulysses */
        CHECK_SAY(latent == rows[i].latent && heads == rows[i].whole, "%s, Ulysses: holds %d, %d", name,
                  latent, heads);
        kv.form = UPIPE_LATENT_AUTO;
        table_run(d, rows[i].ranks, kv, &latent, &heads);
        CHECK_SAY((latent > 0) == rows[i].gathers, "%s: AUTO holds %d", name, latent);
        buffers_free(0);
    }
}

/* ---- failures ---- */

/* A small case of one of the doors. */
static run_case small(int bare, upipe_latent_form form, int heads, int ranks, upipe_dtype dtype)
{
    run_case t = run_of(8, heads, heads, 32, 16, ranks, ranks, dtype);
    t.shape.latent = 11;
    t.shape.key = 6;
    t.shape.bare = bare;
    t.shape.q_dim = bare ? 0 : 9;
    t.shape.rope = bare ? 0 : 2;
    t.shape.projected = !bare && heads == 4;
    t.shape.sinks = 1;
    t.form = form;
    return t;
}

static void test_out_of_memory(int bare, upipe_latent_form form, int heads, int ring)
{
    run_case t = small(bare, form, heads, 2, UPIPE_BF16);
    t.ring = ring;
    t.ring_mode = ring > 1 ? UPIPE_RING_ALL_GATHER : UPIPE_RING_AUTO;
    if (heads == 3) t.table = table_reads_o;
    check_out_of_memory(&t, 0, 30);
}

static void test_begun(int bare, int ranks)
{
    run_case t = small(bare, UPIPE_LATENT_GATHERED, 4, ranks, UPIPE_F32);
    check_begun(&t, 8 * 4);
}

/* Gradients that are not wanted: the others have the bits that they had, and less is held where neither c's nor kr's is. */
static void test_unwanted(upipe_latent_form form)
{
    size_t held[8] = {0};
    f32_block in;
    run_result all, r;
    run_case t = small(0, form, 4, 2, UPIPE_F32);
    block_inputs(&t.shape, 5, &in);
    CHECK_STATUS(run_block(&t, &in, &all), UPIPE_OK, all.errors[0]);
    for (t.unwanted = 1; t.unwanted < 8; ++t.unwanted) {
        CHECK_STATUS(run_block(&t, &in, &r), UPIPE_OK, r.errors[0]);
        held[t.unwanted] = r.bytes.phase[UPIPE_BWD_ATTN];
        same_bits(&t.shape, &r, &all, "o lse y q x wq wo sinks");
        if ((t.unwanted & 1) == 0) same_bits(&t.shape, &r, &all, "c");
        if ((t.unwanted & 2) == 0) same_bits(&t.shape, &r, &all, "kr");
        if ((t.unwanted & 4) == 0) same_bits(&t.shape, &r, &all, "wkv");
    }
    CHECK_INT(held[1], all.bytes.phase[UPIPE_BWD_ATTN]);
    CHECK_INT(held[1] - held[3], 4 * 4 * (11 + 6)); /* f32 of 4 tokens */
    CHECK_INT(held[1] - held[5],
              form == UPIPE_LATENT_GATHERED ? 4 * 4 * (11 + 6) : 0); /* c and kr, gathered already */
}

/* A backward that runs out of memory leaves a `save` that can be freed, and nothing of its own. */
static void test_saved_after_failure(int own_dout, upipe_latent_form form)
{
    const upipe_plan_desc d = {
        .tokens = 16, .heads = 4, .kv_heads = 4, .head_dim = 32, .model_dim = 16, .chunk = 2};
    upipe_status s = UPIPE_ERR_MEMORY;
    const upipe_ops ops = cpu_table();
    float w[1];
    long at;
    for (at = 1; s == UPIPE_ERR_MEMORY; ++at) {
        upipe_plan p;
        upipe_layer l = {.plan = &p, .wq = w, .wk = w, .wo = w};
        const upipe_grads g = {0};
        const upipe_view x = upipe_view_packed(w, UPIPE_F32, 16, 1, 16);
        upipe_latent_kv kv = {.form = form};
        fail_alloc fails = {.at = at};
        upipe_slots dout = {0};
        upipe_saved save;
        upipe_dry *dry;
        upipe_ctx *c;
        kv.c = upipe_view_packed(w, UPIPE_F32, 16, 1, 7);
        kv.kr = upipe_view_packed(w, UPIPE_F32, 16, 1, 4);
        CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK);
        dry = dry_begin(&p, &ops, &s);
        c = &dry->ctx;
        CHECK_STATUS(upipe_latent_layer_fwd(c, &l, &save, x, &kv), UPIPE_OK, c->err);
        if (own_dout)
            CHECK_STATUS(upipe_slots_alloc(c, &p, &dout, UPIPE_SLOT_FULL, "dout"), UPIPE_OK, c->err);
        else
            CHECK_STATUS(upipe_layer_out_bwd(c, &l, &g, &save, x), UPIPE_OK, c->err);
        dry->mem.guard = fail_alloc_guard;
        dry->mem.user = &fails;
        s = upipe_latent_layer_bwd(c, &l, x, &kv, &g, &save, own_dout ? &dout : &save.out, x, &kv);
        check_save(dry, s, &save, &dout);
        buffers_free(0);
    }
    CHECK(at > 12);
}

/* What rank 1 does differently. */
enum {
    ODD_NOTHING,
    ODD_FORM,
    ODD_LATENT,
    ODD_KEY,
    ODD_CHUNK,
    ODD_SLAB,
    ODD_AWAY,
    ODD_ROPE,
    ODD_RATES,
    ODD_MORE_RATES
};

static void differ(int odd, run_own *own, upipe_plan_desc *d)
{
    static const double rates[2][2][4] = {{{1, 0.5, 0.1, 7}, {1, 0.5, 0.1, 8}},
                                          {{1, 0.5, 0.1}, {1, 0.5, 0.2}}};
    upipe_latent_kv *kv = &own->latent.kv;
    const int one = own->rank == 1;
    if (d != NULL) {
        if (one && odd == ODD_CHUNK) d->chunk = 4;
        return;
    }
    if (odd >= ODD_RATES) own->layer.rope_rates = rates[odd == ODD_RATES][one];
    if (!one) return;
    if (odd == ODD_FORM) kv->form = UPIPE_LATENT_HEADS;
    if (odd == ODD_LATENT) --kv->c.d;
    if (odd == ODD_KEY) kv->kr.d -= 2;
    if (odd == ODD_ROPE) own->layer.rope_interleaved = 0;
    if (odd == ODD_SLAB) own->slab_bytes = own->need - 1;
    if (odd == ODD_AWAY) own->away = 1;
}

static void test_odd_ranks(int bare)
{
    static const struct {
        int odd;
        const char *words;
        upipe_status own, others;
    } cases[] = {
        {ODD_NOTHING, "", UPIPE_OK, UPIPE_OK},
        {ODD_FORM, "form of the latent (0 heads, 1 gathered) is 1 on rank 0 and 0 on rank 1",
         UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH},
        {ODD_LATENT, "numbers of the latent is 11 on rank 0 and 10 on rank 1", UPIPE_ERR_MISMATCH,
         UPIPE_ERR_MISMATCH},
        {ODD_KEY, "numbers of the shared key is 6 on rank 0 and 4 on rank 1", UPIPE_ERR_MISMATCH,
         UPIPE_ERR_MISMATCH},
        {ODD_CHUNK, "chunk is 2 on rank 0 and 4 on rank 1", UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH},
        {ODD_SLAB, "do not fit", UPIPE_ERR_MEMORY, UPIPE_ERR_ABORTED},
        {ODD_AWAY, "rank 1", UPIPE_OK, UPIPE_ERR_TIMEOUT},
        {ODD_RATES, "rope_rates (hash)", UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH},
        {ODD_MORE_RATES, "", UPIPE_OK, UPIPE_OK}, /* 6 numbers are rotated, by 3 rates */
        {ODD_ROPE, "rope_interleaved is 1 on rank 0 and 0 on rank 1", UPIPE_ERR_MISMATCH, UPIPE_ERR_MISMATCH},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        run_case t = small(bare, UPIPE_LATENT_GATHERED, 4, 2, UPIPE_F32);
        if (bare && cases[i].odd >= ODD_ROPE) continue; /* that door rotates nothing */
        t.differ = differ;
        t.odd = cases[i].odd;
        t.deadline = t.odd == ODD_AWAY ? 0.3 : 20;
        check_differ(&t, 1, cases[i].own, cases[i].others, cases[i].words);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_bytes());
    TEST(test_table());
    TEST(test_unwanted(UPIPE_LATENT_HEADS));
    TEST(test_unwanted(UPIPE_LATENT_GATHERED));
    for (int bare = 0; bare < 2; ++bare) {
        TEST(test_out_of_memory(bare, UPIPE_LATENT_GATHERED, 4, 1));
        TEST(test_out_of_memory(bare, UPIPE_LATENT_GATHERED, 3, 1));
        TEST(test_out_of_memory(bare, UPIPE_LATENT_HEADS, 4, 2));
        TEST(test_begun(bare, 1));
        TEST(test_begun(bare, 2));
        TEST(test_odd_ranks(bare));
        TEST(test_saved_after_failure(bare, UPIPE_LATENT_HEADS));
        TEST(test_saved_after_failure(bare, UPIPE_LATENT_GATHERED));
    }
    TEST(test_random());
    return test_end("latent");
}
