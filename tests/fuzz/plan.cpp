/* plan.cpp -- any numbers as a description of a run: the plan, all that can be asked of one, dry runs
 *
 * An input is a list of decimal numbers, in the order of fuzz_numbers. In C++, where to load an enum that has none of its
 * values is undefined.
 */
#include "fuzz.h"
#include "tests/lib/even_bytes.h"
#include "upipe/upipe.h"

/* clang-format off */
enum fuzz_numbers {
    TOKENS, BATCH, MODEL_DIM, RANKS, RANK, RING, RING_RANK, RING_INNER, RING_PREFETCH, OVERLAP, HEADS, KV_HEADS, HEAD_DIM,
    V_DIM, CHUNK, NAIVE, RING_MODE, LAYOUT, DTYPE, SEGMENTS, LAYER, NUMBERS
};
/* clang-format on */

static upipe_plan_desc describe(const int64_t *x)
{
    upipe_plan_desc d;
    const int mode = (int)x[RING_MODE], layout = (int)x[LAYOUT], dtype = (int)x[DTYPE];
    memset(&d, 0, sizeof d);
    d.tokens = x[TOKENS];
    d.batch = x[BATCH];
    d.model_dim = x[MODEL_DIM];
    d.ranks = (int)x[RANKS];
    d.rank = (int)x[RANK];
    d.ring = (int)x[RING];
    d.ring_rank = (int)x[RING_RANK];
    d.ring_inner = (int)x[RING_INNER];
    d.ring_prefetch = (int)x[RING_PREFETCH];
    d.overlap = (int)x[OVERLAP];
    d.heads = (int)x[HEADS];
    d.kv_heads = (int)x[KV_HEADS];
    d.head_dim = (int)x[HEAD_DIM];
    d.v_dim = (int)x[V_DIM];
    d.chunk = (int)x[CHUNK];
    d.naive = (int)x[NAIVE];
    memcpy(&d.ring_mode, &mode, sizeof mode);
    memcpy(&d.layout, &layout, sizeof layout);
    memcpy(&d.dtype, &dtype, sizeof dtype);
    return d;
}

/* A refusal has a status and a sentence. */
static int accepted(upipe_status s, const upipe_err *e)
{
    if (s == UPIPE_OK) return 1;
    CHECK(s == UPIPE_ERR_ARG || s == UPIPE_ERR_UNSUPPORTED || s == UPIPE_ERR_OVERFLOW ||
          s == UPIPE_ERR_MEMORY);
    CHECK(e->status == s && strlen(e->text) > 5);
    return 0;
}

/* The heads of one rank in one stage. */
static void walk_part(const upipe_plan *p, int stage, int rank)
{
    const upipe_head_range q = upipe_plan_q(p, stage, rank), kv = upipe_plan_kv(p, stage, rank);
    int which, at_stage, at_rank;
    CHECK(q.count >= 0 && q.count <= p->per_rank && q.first >= 0 &&
          q.first + (int64_t)q.count <= p->desc.heads);
    CHECK(kv.count >= 0 && kv.count <= p->kv_per_rank && kv.first + (int64_t)kv.count <= p->desc.kv_heads);
    CHECK(upipe_plan_before(p, stage, rank) <= p->desc.heads);
    for (which = UPIPE_A2A_Q; which <= UPIPE_A2A_DKV; ++which) {
        const upipe_a2a_heads heads = (upipe_a2a_heads)which;
        const int64_t end =
            (int64_t)upipe_plan_offset(p, heads, stage, rank) + upipe_plan_part(p, heads, stage, rank).count;
        CHECK(end >= 0 && end <= upipe_plan_heads_sent(p, heads, stage));
    }
    if (q.count == 0) return;
    upipe_plan_q_place(p, q.first, &at_stage, &at_rank);
    CHECK(at_stage == stage && at_rank == rank);
}

static void walk_shard(const upipe_shard *s, int64_t tokens)
{
    CHECK(s->n >= 0 && s->n <= tokens);
    if (s->n == 0) return;
    CHECK(upipe_shard_pos(s, 0) >= 0 && upipe_shard_pos(s, s->n - 1) < tokens);
}

/* What a host may ask of a plan. */
static void walk(const upipe_plan *p)
{
    const upipe_plan_desc *d = &p->desc;
    const int stages[] = {0, p->stages / 2, p->stages - 1},
              ranks[] = {0, d->rank, d->ranks / 2, d->ranks - 1};
    const upipe_mask full = upipe_mask();
    upipe_buffers b = p->buffers;
    upipe_bytes bytes;
    upipe_err e;
    int64_t first;
    int i, j;
    CHECK(p->stages >= 1 && p->stages <= UPIPE_STAGES_MAX && (int64_t)p->rounds * p->steps == p->stages);
    for (i = 0; i < 3; ++i) {
        const upipe_stage s = upipe_plan_stage(p, stages[i]);
        CHECK(s.round >= 0 && s.round < p->rounds && s.step >= 0 && s.step < p->steps);
        CHECK(upi_plan_sent_stage(p, stages[i], 0) >= 0 && upi_plan_sent_stage(p, stages[i], 1) >= 0);
        for (j = 0; j < 4; ++j) walk_part(p, stages[i], ranks[j]);
    }
    for (j = 0; j < 4; ++j)
        CHECK(upi_plan_tokens(p, ranks[j], &first) >= 1 && first >= 0 && first < p->team_tokens);
    CHECK_INT(upipe_plan_before(p, p->stages, -1), d->heads);
    CHECK(upipe_plan_sent(p, 0) >= 0 && upipe_plan_sent(p, 1) >= 0);
    CHECK(upipe_ring_sent(p, &full, 0) >= 0 && upipe_ring_sent(p, &full, 1) >= upipe_ring_sent(p, &full, 0));
    CHECK(p->team_tokens <= p->team_tokens_most && upipe_plan_unit_bytes(p) > 0);
    CHECK(b.slot >= b.q && b.send > 0 && b.lse > 0 && b.kv_send > 0);
    walk_shard(&p->team_shard, d->tokens);
    walk_shard(&p->shard, d->tokens);
    accepted(even_bytes(&bytes, p, 64, 64, 64, 64, &e), &e);
}

/* Scratch of a table that computes nothing. */
static size_t gemm_bytes(const upipe_ops *ops, upipe_view out, upipe_view a, upipe_view b, int flags)
{
    (void)ops, (void)a, (void)b, (void)flags;
    return (size_t)out.d;
}

static size_t attn_bytes(const upipe_ops *ops, const upipe_attn *a, int backward)
{
    (void)ops;
    return (size_t)a->q.d << backward;
}

static upipe_ops table(void)
{
    upipe_ops ops;
    memset(&ops, 0, sizeof ops);
    ops.name = "none";
    ops.attn_can = ~0;
    ops.gemm_bytes = gemm_bytes;
    ops.attn_bytes = attn_bytes;
    return ops;
}

static upipe_dry dry;
static const float any = 1;

/* A view of any storage type: calls that read it refuse those that there are not. */
static void refuse_view(int dtype)
{
    const upipe_ops ops = table();
    upipe_plan_desc d;
    upipe_plan p;
    upipe_layer l;
    upipe_saved saved;
    upipe_mlp m;
    upipe_attn a;
    upipe_view v = upipe_view_packed((void *)(uintptr_t)&any, UPIPE_F32, 4, 1, 32);
    if (dtype >= 0 && dtype <= UPIPE_BF16) return;
    memset(&d, 0, sizeof d);
    d.tokens = 4;
    d.heads = 1;
    d.head_dim = 32;
    memset(&l, 0, sizeof l);
    l.plan = &p;
    l.wq = l.wk = l.wv = &any;
    memset(&m, 0, sizeof m);
    m.w_gate = m.w_up = m.w_down = &any;
    m.hidden = 32;
    memcpy(&v.dtype, &dtype, sizeof dtype);
    memset(&a, 0, sizeof a);
    a.q = a.k = a.v = a.o = v;
    CHECK(upipe_plan_init(&p, &d, NULL) == UPIPE_OK && upipe_dry_init(&dry, &p, &ops) == UPIPE_OK);
    CHECK_STATUS(upipe_mlp_fwd(&dry.ctx, &m, v, v), UPIPE_ERR_ARG, dry.ctx.err);
    CHECK_STATUS(upipe_attn_fwd(&dry.ctx, &a), UPIPE_ERR_ARG, dry.ctx.err);
    CHECK_STATUS(upipe_layer_fwd(&dry.ctx, &l, &saved, v), UPIPE_ERR_ARG, dry.ctx.err);
    a.q.dtype = UPIPE_F32;
    CHECK_STATUS(upipe_attn_fwd(&dry.ctx, &a), UPIPE_ERR_ARG, dry.ctx.err);
}

/* The block, then the block in segments, over a pool that counts; of sizes that end in milliseconds. */
static void run_dry(const upipe_plan *p, const upipe_fpdt *segmented, const int64_t *x)
{
    const upipe_ops ops = table();
    const int64_t flags = x[LAYER];
    upipe_layer l;
    upipe_fpdt f = *segmented;
    memset(&l, 0, sizeof l);
    l.plan = p;
    l.wq = l.wk = l.wv = &any;
    l.wo = flags & 1 ? &any : NULL;
    l.mask.causal = (flags & 2) != 0;
    l.mask.sinks = flags & 4 ? &any : NULL;
    l.q_norm_weight = l.k_norm_weight = flags & 8 ? &any : NULL;
    l.rope_theta = flags & 16 ? 10000 : 0;
    l.mask.window = flags >> 16 & 0xffff;
    if (!accepted(upipe_dry_init(&dry, p, &ops), &dry.ctx.err)) return;
    if (p->desc.ranks * p->stages > 64 || p->desc.ring > 64 || p->rows > 4096 || p->desc.heads > 256) return;
    if (accepted(flags & 32 ? upipe_dry_block(&dry, &l, flags >> 6 & 1)
                            : upipe_dry_layer(&dry, &l, flags >> 6 & 1),
                 &dry.ctx.err)) {
        CHECK(dry.mem.live == 0 && dry.mem.need >= dry.mem.peak &&
              upipe_dry_bytes(&dry).peak == dry.mem.peak);
        if ((flags & 32) == 0) CHECK_INT(dry.team.sent_bytes, upipe_plan_sent(p, 0) + upipe_plan_sent(p, 1));
        if ((flags & 32) == 0)
            CHECK_INT(dry.ring.sent_bytes, upipe_ring_sent(p, &l.mask, 0) + upipe_ring_sent(p, &l.mask, 1));
    }
    if (f.segments > 8 || !accepted(upipe_dry_init(&dry, p, &ops), &dry.ctx.err)) return;
    f.layer = l;
    if (accepted(upipe_dry_fpdt(&dry, &f), &dry.ctx.err)) CHECK(dry.mem.live == 0 && dry.host.live == 0);
}

static void fuzz_one(const char *input, size_t n)
{
    int64_t x[NUMBERS] = {0};
    upipe_plan p, of;
    upipe_fpdt f;
    upipe_err e;
    char *end;
    int i;
    (void)n;
    for (i = 0; i < NUMBERS; ++i, input = end) {
        x[i] = strtoll(input, &end, 10);
        if (end == input) break;
    }
    memset(&e, 0, sizeof e);
    memset(&f, 0, sizeof f);
    f.desc = describe(x);
    f.segments = (int)x[SEGMENTS];
    refuse_view((int)x[DTYPE]);
    if (accepted(upipe_fpdt_plan(&f, 0, &of, &e), &e)) {
        walk(&of);
        CHECK(upipe_fpdt_out_bytes(&f) > 0);
        CHECK_STATUS(upipe_fpdt_plan(&f, f.segments - 1, &of, &e), UPIPE_OK, e);
        upipe_shard last = upipe_fpdt_shard(&f, f.segments - 1);
        walk_shard(&last, f.desc.tokens);
    }
    if (!accepted(upipe_plan_init(&p, &f.desc, &e), &e)) return;
    walk(&p);
    run_dry(&p, &f, x);
}
