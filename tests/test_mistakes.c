/* test_mistakes.c -- what a host gets wrong: each mistake of a table has a status and a sentence, and none is silent
 *
 * A backward that is given another layer than its forward, a plan that was changed after upipe_plan_init, a null
 * pointer, shards that were not checked, tensors of another shape, calls in the wrong order, at every door. A list of what
 * is no mistake follows: these calls must go through.
 */
#include "../upipe/net/upipe_net_threads.h"
#include "../upipe/cpu/upipe_cpu.h"
#include "../upipe/cpu/upipe_cpu_linear.h"
#include "../upipe/cpu/upipe_cpu_simd.h"
#include "../upipe/upipe.h"
#include "lib/test.h"

enum {
    TOKENS = 8,
    HEADS = 4,
    KV = 2,
    DIM = 32,
    MODEL = HEADS * DIM,
    WQ = MODEL * MODEL,
    WK = KV * DIM * MODEL
};
enum { LATENT = 16, KEY = 8 };
enum { LAYER = 2 * WQ + 2 * WK + MODEL + HEADS, POOL = 1 << 20, BLOCKS = 64, UNITS = 3, ELEMENTS = 16 };

static const int64_t units[UNITS + 1] = {0, 4, 4, ELEMENTS};

/* A rank, its layer, and what its calls leave. */
typedef struct host {
    upipe_plan plan;
    upipe_layer l;
    upipe_qkv q;
    upipe_qkv_grads qg;
    upipe_plan many; /* with a K/V head for each head */
    upipe_latent m;
    upipe_latent_grads mg;
    upipe_layer ml;
    upipe_fpdt f;
    upipe_grads g;
    upipe_zero z;
    upipe_linear_layer lin;
    upipe_linear_layer_grads lin_grads;
    upipe_linear_layer_saved lin_save;
    upipe_linear_ops rules;
    upipe_scan scan;
    upipe_states states;
    upipe_saved save;
    upipe_fpdt_saved offloaded;
    upipe_mem mem, second;
    upipe_mem_block blocks[BLOCKS], second_blocks[BLOCKS];
    upipe_comm team;
    upipe_comm_self_state state;
    upipe_ops ops;
    upipe_ctx c;
    upipe_view x;
    float *weights, *grads, *rows, *sharded;
    void *slabs[2];
} host;

static upipe_status scan_fwd(upipe_ctx *c, void *user, int first, int heads, const float *in, float *out)
{
    (void)c, (void)user, (void)first, (void)heads;
    out[0] = in[0];
    return UPIPE_OK;
}

static upipe_status scan_bwd(upipe_ctx *c, void *user, int first, int heads, const float *state,
                             float *dstate)
{
    (void)c, (void)user, (void)first, (void)heads, (void)state, (void)dstate;
    return UPIPE_OK;
}

static void host_layer(host *h, int layer)
{
    float *at = h->weights + layer * LAYER;
    h->l.wq = at, h->l.wk = at + WQ, h->l.wv = at + WQ + WK, h->l.wo = at + WQ + 2 * WK;
    h->l.q_norm_weight = h->l.k_norm_weight = at + 2 * WQ + 2 * WK;
    h->l.mask.sinks = h->l.q_norm_weight + MODEL;
}

static void host_plan(host *h, upipe_plan *p, int chunk)
{
    upipe_plan_desc d;
    memset(&d, 0, sizeof d);
    d.tokens = TOKENS, d.heads = HEADS, d.kv_heads = KV, d.head_dim = DIM, d.chunk = chunk;
    h->f.desc = d;
    CHECK_STATUS(upipe_plan_init(p, &d, &h->c.err), UPIPE_OK, h->c.err);
}

/* Heads whose K and V come from a latent, by both doors; kv_b_proj lies where wk does. */
static void host_latent(host *h)
{
    upipe_plan_desc d = h->plan.desc;
    d.kv_heads = HEADS;
    CHECK_STATUS(upipe_plan_init(&h->many, &d, &h->c.err), UPIPE_OK, h->c.err);
    h->m.plan = h->ml.plan = &h->many;
    h->m.wkv = h->ml.wk = h->weights + WQ;
    h->m.mask.causal = h->ml.mask.causal = 1;
    h->m.q = h->q.q, h->m.o = h->q.o;
    h->m.kv.c = upipe_view_packed(h->rows, UPIPE_F32, TOKENS, 1, LATENT);
    h->m.kv.kr = upipe_view_packed(h->rows + TOKENS * LATENT, UPIPE_F32, TOKENS, 1, KEY);
    h->mg.dq = h->qg.dq, h->mg.dout = h->qg.dout;
    h->mg.dkv = h->m.kv;
    h->mg.dkv.c.data = h->rows + 4 * TOKENS * MODEL;
    h->mg.dkv.kr.data = h->rows + 4 * TOKENS * MODEL + TOKENS * LATENT;
    h->mg.dwkv = h->grads + WQ;
    h->ml.wq = h->weights, h->ml.wo = h->l.wo;
    h->ml.rope_theta = 10000;
}

/* A layer of linear attention, whose weights are taken from those of attention. */
static void host_linear(host *h)
{
    upipe_linear_layer *l = &h->lin;
    upipe_linear_layer_grads *g = &h->lin_grads;
    upipe_cpu_linear(&h->rules);
    l->plan = &h->plan, l->rules = &h->rules;
    l->heads = l->key_heads = 2, l->key_dim = l->value_dim = 4, l->taps = 2;
    l->w_qkv = h->weights, l->w_z = h->weights + WK, l->w_b = h->weights + 2 * WK;
    l->w_a = h->weights + 3 * WK, l->w_out = h->weights + 4 * WK;
    l->conv = h->weights + 1, l->a_log = h->weights + 2, l->dt_bias = h->weights + 3;
    l->norm_weight = h->weights + 4;
    g->w_qkv = g->w_z = g->w_b = g->w_a = g->w_out = h->grads;
    g->conv = g->a_log = g->dt_bias = g->norm_weight = h->grads;
    h->scan.plan = &h->plan, h->scan.heads = 2, h->scan.size = 16;
    h->scan.fwd = scan_fwd, h->scan.bwd = scan_bwd;
    h->states.data = h->grads;
}

static host *host_begin(void)
{
    host *h = (host *)calloc(1, sizeof *h);
    int i;
    for (i = 0; i < 2; ++i)
        if (posix_memalign(&h->slabs[i], 256, POOL) != 0) abort();
    h->weights = (float *)calloc(2 * LAYER, sizeof(float));
    h->grads = (float *)calloc(LAYER, sizeof(float));
    h->rows = (float *)calloc(5 * TOKENS * MODEL, sizeof(float));
    h->sharded = (float *)calloc(2 * ELEMENTS, sizeof(float));
    for (i = 0; i < 2 * LAYER; ++i) h->weights[i] = (float)(i * 37 % 101 - 50) / 400;
    for (i = 0; i < 5 * TOKENS * MODEL; ++i) h->rows[i] = (float)(i * 53 % 89 - 44) / 25;
    upipe_cpu_ops(&h->ops);
    upipe_mem_init(&h->mem, h->slabs[0], POOL, h->blocks, BLOCKS);
    upipe_mem_init(&h->second, h->slabs[1], POOL, h->second_blocks, BLOCKS);
    upipe_comm_self(&h->team, &h->state, h->ops.copy);
    h->c.ops = &h->ops, h->c.mem = &h->mem, h->c.team = &h->team;
    host_plan(h, &h->plan, 1);
    h->x = upipe_view_packed(h->rows, UPIPE_F32, TOKENS, 1, MODEL);
    h->l.plan = h->q.plan = &h->plan;
    h->l.mask.causal = 1, h->l.rope_theta = 500000, h->l.norm_eps = 1e-5f;
    host_layer(h, 0);
    h->q.mask.causal = 1;
    h->q.q = h->q.o = h->qg.dq = h->qg.dout = upipe_view_heads(h->x, HEADS);
    h->q.k = h->q.v = h->qg.dk = h->qg.dv = upipe_view_packed(h->rows, UPIPE_F32, TOKENS, KV, DIM);
    h->q.o.data = h->rows + TOKENS * MODEL, h->qg.dout.data = h->rows + 2 * TOKENS * MODEL;
    h->qg.dq.data = h->rows + 3 * TOKENS * MODEL, h->qg.dk.data = h->rows + 4 * TOKENS * MODEL;
    h->qg.dv.data = NULL;
    h->f.layer = h->l, h->f.layer.plan = NULL, h->f.segments = 2, h->f.host = &h->second;
    h->g.wq = h->grads, h->g.wk = h->grads + WQ, h->g.wv = h->grads + WQ + WK;
    h->g.wo = h->grads + WQ + 2 * WK;
    host_linear(h);
    host_latent(h);
    h->z.world = &h->team, h->z.ranks = 1, h->z.stage = 3, h->z.units = UNITS, h->z.first = units;
    h->z.weights = h->sharded, h->z.grads = h->sharded + ELEMENTS;
    return h;
}

static void host_end(host *h, const char *what)
{
    h->c.ops = &h->ops, h->c.mem = &h->mem, h->c.team = &h->team;
    CHECK_STATUS(upipe_saved_free(&h->c, &h->save), UPIPE_OK, h->c.err);
    CHECK_STATUS(upipe_linear_layer_saved_free(&h->c, &h->lin_save), UPIPE_OK, h->c.err);
    h->f.host = &h->second;
    CHECK_STATUS(upipe_fpdt_free(&h->f, &h->offloaded, &h->c.err), UPIPE_OK, h->c.err);
    CHECK_SAY(h->mem.live == 0 && h->second.live == 0, "%s: %zu and %zu bytes are left", what, h->mem.live,
              h->second.live);
    upipe_mem_destroy(&h->mem, NULL);
    upipe_mem_destroy(&h->second, NULL);
    free(h->weights), free(h->grads), free(h->rows), free(h->sharded);
    free(h->slabs[0]), free(h->slabs[1]);
    free(h);
}

/* ---- the calls, up to the one with the mistake ---- */

static upipe_status fwd(host *h)
{
    return upipe_layer_fwd(&h->c, &h->l, &h->save, h->x);
}

static upipe_status out_fwd(host *h)
{
    return upipe_layer_out_fwd(&h->c, &h->l, h->x, &h->save);
}

static upipe_status out_bwd(host *h)
{
    return upipe_layer_out_bwd(&h->c, &h->l, &h->g, &h->save, h->x);
}

static upipe_status bwd(host *h)
{
    return upipe_layer_bwd(&h->c, &h->l, h->x, &h->g, &h->save, &h->save.out, h->x);
}

static upipe_status qkv_fwd(host *h)
{
    return upipe_qkv_fwd(&h->c, &h->q, &h->save);
}

static upipe_status qkv_bwd(host *h)
{
    return upipe_qkv_bwd(&h->c, &h->q, &h->qg, &h->save);
}

static upipe_status latent_fwd(host *h)
{
    return upipe_latent_fwd(&h->c, &h->m, &h->save);
}

static upipe_status latent_bwd(host *h)
{
    return upipe_latent_bwd(&h->c, &h->m, &h->mg, &h->save);
}

static upipe_status latent_layer_fwd(host *h)
{
    return upipe_latent_layer_fwd(&h->c, &h->ml, &h->save, h->x, &h->m.kv);
}

static upipe_status latent_out_bwd(host *h)
{
    return upipe_layer_out_bwd(&h->c, &h->ml, &h->g, &h->save, h->x);
}

static upipe_status latent_layer_bwd(host *h)
{
    upipe_grads g = h->g;
    g.wv = g.wo = NULL;
    return upipe_latent_layer_bwd(&h->c, &h->ml, h->x, &h->mg.dkv, &g, &h->save, &h->save.out, h->x,
                                  &h->m.kv);
}

static upipe_status fpdt_fwd(host *h)
{
    return upipe_fpdt_fwd(&h->c, &h->f, &h->offloaded, h->rows);
}

static upipe_status fpdt_bwd(host *h)
{
    float *dout = h->rows + 2 * TOKENS * MODEL;
    return upipe_fpdt_bwd(&h->c, &h->f, h->rows, &h->g, &h->offloaded, dout, h->rows);
}

static upipe_view rows_at(host *h, int i)
{
    return upipe_view_packed(h->rows + i * TOKENS * MODEL, UPIPE_F32, TOKENS, 1, MODEL);
}

static upipe_status gated_fwd(host *h)
{
    return upipe_layer_gated_out_fwd(&h->c, &h->l, h->x, &h->save, h->x);
}

static upipe_status gated_bwd(host *h)
{
    return upipe_layer_gated_out_bwd(&h->c, &h->l, &h->g, &h->save, rows_at(h, 2), rows_at(h, 2), h->x);
}

static upipe_status linear_fwd(host *h)
{
    return upipe_linear_layer_fwd(&h->c, &h->team, &h->lin, &h->lin_save, rows_at(h, 1), h->x, NULL);
}

static upipe_status linear_out_fwd(host *h)
{
    return upipe_linear_layer_out_fwd(&h->c, &h->team, &h->lin, &h->lin_save, rows_at(h, 1), h->x);
}

static upipe_status linear_bwd(host *h)
{
    return upipe_linear_layer_bwd(&h->c, &h->team, &h->lin, rows_at(h, 2), &h->lin_grads, &h->lin_save,
                                  rows_at(h, 1), h->x, NULL);
}

static upipe_status scanned_fwd(host *h)
{
    return upipe_scan_fwd(&h->c, &h->team, &h->scan, &h->states, NULL);
}

static upipe_status scanned_bwd(host *h)
{
    return upipe_scan_bwd(&h->c, &h->team, &h->scan, &h->states, NULL);
}

#define WELL(call) CHECK_STATUS(call, UPIPE_OK, h->c.err)

/* All that comes before a backward: the forward, and the projection both ways. */
static void up_to_bwd(host *h)
{
    WELL(fwd(h));
    WELL(out_fwd(h));
    WELL(out_bwd(h));
}

static const int64_t packed[2][3] = {{0, 3, TOKENS}, {0, 4, TOKENS}};

static void pack(upipe_mask *m, const int64_t *cu_seqlens)
{
    m->borders.cu_seqlens = cu_seqlens, m->borders.cu_seqlens_n = 2;
}

/* What must be said, and with which status; words NULL: the list is at its end. */
typedef struct verdict {
    const char *words;
    upipe_status status;
} verdict;

/* A function has a list of mistakes. The n-th of them: the verdict, and the call that must give it. */
typedef upipe_status mistakes(host *h, int n, verdict *v);

#define REFUSES(code, sentence, ...)        \
    do {                                    \
        if (n-- == 0) {                     \
            *v = (verdict){sentence, code}; \
            __VA_ARGS__;                    \
        }                                   \
    } while (0)
#define SAYS(sentence, ...) REFUSES(UPIPE_ERR_ARG, sentence, __VA_ARGS__)

/* ---- another layer in the backward ---- */

static upipe_status other_layer(host *h, int n, verdict *v)
{
    SAYS("rope_theta is not that of the forward", up_to_bwd(h); h->l.rope_theta = 10000; return bwd(h));
    SAYS("rope_interleaved is not that of", up_to_bwd(h); h->l.rope_interleaved = 1; return bwd(h));
    SAYS("scale is not that of", up_to_bwd(h); h->l.scale = 0.5f; return bwd(h));
    SAYS("norm_eps is not that of", up_to_bwd(h); h->l.norm_eps = 1e-6f; return bwd(h));
    SAYS("causal is not that of", up_to_bwd(h); h->l.mask.causal = 0; return bwd(h));
    SAYS("window is not that of", up_to_bwd(h); h->l.mask.window = 3; return bwd(h));
    SAYS("softcap is not that of", up_to_bwd(h); h->l.mask.softcap = 30; return bwd(h));
    SAYS("cu_seqlens (hash) is not that of", pack(&h->l.mask, packed[0]); up_to_bwd(h);
         pack(&h->l.mask, packed[1]); return bwd(h));
    SAYS("wq is not where it was", up_to_bwd(h); host_layer(h, 1); return bwd(h));
    SAYS("wk is not where it was", up_to_bwd(h); h->l.wk = h->l.wv; return bwd(h));
    SAYS("k_norm_weight is not where it was", up_to_bwd(h); ++h->l.k_norm_weight; return bwd(h));
    SAYS("sinks is not where it was", up_to_bwd(h); ++h->l.mask.sinks; return bwd(h));
    SAYS("biases", up_to_bwd(h); h->l.bq = h->weights; return bwd(h));
    SAYS("layer id 8, and 7 in the forward", h->l.id = 7; up_to_bwd(h); h->l.id = 8; return bwd(h));
    SAYS("layer id 0, and 7 in", h->l.id = 7; up_to_bwd(h); h->l.id = 0; return bwd(h));
    SAYS("wq is not where it was", WELL(fwd(h)); host_layer(h, 1); return out_fwd(h));
    SAYS("wq is not where it was", WELL(fwd(h)); WELL(out_fwd(h)); host_layer(h, 1); return out_bwd(h));
    SAYS("chunk is not that of", upipe_plan other; host_plan(h, &other, 2); up_to_bwd(h); h->l.plan = &other;
         return bwd(h));
    /* two stages of two heads either way, but other heads in them */
    SAYS("another plan than in the forward", upipe_plan other; upipe_plan_desc d = h->plan.desc;
         d.kv_heads = HEADS; WELL(upipe_plan_init(&other, &d, &h->c.err)); WELL(fwd(h)); h->l.plan = &other;
         return out_fwd(h));
    SAYS("wo is not where it was", WELL(fwd(h)); h->l.wo = h->l.wq; return out_fwd(h));
    SAYS("wo is not where it was", WELL(fwd(h)); WELL(out_fwd(h)); h->l.wo = h->l.wq; return out_bwd(h));
    SAYS("bo is not where it was", h->l.bo = h->weights; WELL(fwd(h)); ++h->l.bo; return out_bwd(h));
    SAYS("a layer with wg", h->l.wg = h->weights; WELL(fwd(h)); return out_fwd(h));
    SAYS("wg is NULL", WELL(fwd(h)); return gated_fwd(h));
    SAYS("a gradient of wg is wanted without it", h->g.wg = h->grads; WELL(fwd(h)); return out_bwd(h));
    SAYS("wo is not where it was", h->l.wg = h->l.wq; WELL(fwd(h)); h->l.wo = h->l.wq; return gated_fwd(h));
    SAYS("wg is not where it was", h->l.wg = h->l.wq; WELL(fwd(h)); WELL(gated_fwd(h)); h->l.wg = h->l.wo;
         return gated_bwd(h));
    SAYS("wq is not where it was", h->l.wg = h->l.wq; WELL(fwd(h)); WELL(gated_fwd(h)); host_layer(h, 1);
         return gated_bwd(h));
    SAYS("layer id 4, and 3 in", h->l.wg = h->l.wq; h->l.id = 3; WELL(fwd(h)); h->l.id = 4;
         return gated_bwd(h));
    SAYS("not there", up_to_bwd(h); memset(&h->save.given, 0, sizeof h->save.given); return bwd(h));
    SAYS("not there", up_to_bwd(h); WELL(bwd(h)); return bwd(h));
    return UPIPE_OK;
}

static upipe_status other_call(host *h, int n, verdict *v)
{
    SAYS("scale is not that of", WELL(qkv_fwd(h)); h->q.scale = 0.5f; return qkv_bwd(h));
    SAYS("causal is not that of", WELL(qkv_fwd(h)); h->q.mask.causal = 0; return qkv_bwd(h));
    SAYS("sinks is not where it was", h->q.mask.sinks = h->weights; WELL(qkv_fwd(h)); ++h->q.mask.sinks;
         return qkv_bwd(h));
    SAYS("layer id 2, and 1 in", h->q.id = 1; WELL(qkv_fwd(h)); h->q.id = 2; return qkv_bwd(h));
    SAYS("chunk is not that of", upipe_plan other; host_plan(h, &other, 2); WELL(qkv_fwd(h));
         h->q.plan = &other; return qkv_bwd(h));
    SAYS("not upipe_qkv_fwd's", WELL(fwd(h)); return qkv_bwd(h));
    SAYS("rope_theta is not that of", WELL(fpdt_fwd(h)); h->f.layer.rope_theta = 10000; return fpdt_bwd(h));
    SAYS("wv is not where it was", WELL(fpdt_fwd(h)); h->f.layer.wv = h->weights; return fpdt_bwd(h));
    SAYS("is not that of", WELL(fpdt_fwd(h)); h->f.segments = 4; return fpdt_bwd(h));
    SAYS("tokens is not that of", WELL(fpdt_fwd(h)); h->f.desc.tokens = 2 * TOKENS; return fpdt_bwd(h));
    SAYS("is not that of", WELL(fpdt_fwd(h)); h->f.desc.heads = 2 * HEADS; return fpdt_bwd(h));
    SAYS("results are not there", WELL(fpdt_fwd(h));
         memset(&h->offloaded.given, 0, sizeof h->offloaded.given); return fpdt_bwd(h));
    return UPIPE_OK;
}

static upipe_status other_states(host *h, int n, verdict *v)
{
    SAYS("w_qkv is not where it was", WELL(linear_fwd(h)); h->lin.w_qkv = h->weights + 9;
         return linear_bwd(h));
    SAYS("w_z is not where it was", WELL(linear_fwd(h)); h->lin.w_z = h->weights + 9; return linear_bwd(h));
    SAYS("w_b is not where it was", WELL(linear_fwd(h)); h->lin.w_b = h->weights + 9; return linear_bwd(h));
    SAYS("w_a is not where it was", WELL(linear_fwd(h)); h->lin.w_a = h->weights + 9; return linear_bwd(h));
    SAYS("w_out is not where it was", WELL(linear_fwd(h)); h->lin.w_out = h->weights + 9;
         return linear_bwd(h));
    SAYS("conv is not where it was", WELL(linear_fwd(h)); ++h->lin.conv; return linear_bwd(h));
    SAYS("a_log is not where it was", WELL(linear_fwd(h)); ++h->lin.a_log; return linear_bwd(h));
    SAYS("dt_bias is not where it was", WELL(linear_fwd(h)); ++h->lin.dt_bias; return linear_bwd(h));
    SAYS("norm_weight is not where it was", WELL(linear_fwd(h)); ++h->lin.norm_weight; return linear_bwd(h));
    SAYS("layer id 1, and 0 in", WELL(linear_fwd(h)); ++h->lin.id; return linear_bwd(h));
    SAYS("its key_dim is not that of", WELL(linear_fwd(h)); ++h->lin.key_dim; return linear_bwd(h));
    SAYS("its norm_eps is not that of", WELL(linear_fwd(h)); ++h->lin.norm_eps; return linear_bwd(h));
    SAYS("its chunk is not that of", WELL(linear_fwd(h)); h->lin.chunk = 4; return linear_bwd(h));
    SAYS("cu_seqlens (hash) is not that of", h->lin.borders.cu_seqlens = packed[0];
         h->lin.borders.cu_seqlens_n = 2; WELL(linear_fwd(h)); h->lin.borders.cu_seqlens = packed[1];
         return linear_bwd(h));
    SAYS("another plan than in the forward", upipe_plan other; host_plan(h, &other, 2); WELL(linear_fwd(h));
         h->lin.plan = &other; return linear_bwd(h));
    SAYS("w_z is not where it was", WELL(linear_fwd(h)); h->lin.w_z = h->weights; return linear_out_fwd(h));
    SAYS("not there", return linear_bwd(h));
    SAYS("not there", WELL(linear_fwd(h)); WELL(linear_bwd(h)); return linear_bwd(h));
    SAYS("heads of its state is not that of", WELL(scanned_fwd(h)); h->scan.heads = 1; return scanned_bwd(h));
    SAYS("size of a head's state is not that of", WELL(scanned_fwd(h)); h->scan.size = 12;
         return scanned_bwd(h));
    SAYS("cu_seqlens_n is not that of", WELL(scanned_fwd(h)); h->scan.borders.cu_seqlens = packed[0];
         h->scan.borders.cu_seqlens_n = 2; return scanned_bwd(h));
    SAYS("another plan than in the forward", upipe_plan other; host_plan(h, &other, 2); WELL(scanned_fwd(h));
         h->scan.plan = &other; return scanned_bwd(h));
    SAYS("the states are of no forward", return scanned_bwd(h));
    SAYS("the states are NULL", return upipe_scan_fwd(&h->c, &h->team, &h->scan, NULL, NULL));
    SAYS("save is NULL", return upipe_linear_layer_fwd(&h->c, &h->team, &h->lin, NULL, h->x, h->x, NULL));
    SAYS("its plan or its rules are NULL",
         return upipe_linear_layer_fwd(&h->c, &h->team, NULL, &h->lin_save, h->x, h->x, NULL));
    return UPIPE_OK;
}

/* ---- documents that do not cover the tokens ---- */

#define UNCOVERED "do not cover the tokens [0, 8)"

static const int64_t uncovered[2][2] = {{0, TOKENS - 1}, {1, TOKENS}};

static void leave_out(host *h, int end)
{
    h->l.mask.borders.cu_seqlens = h->lin.borders.cu_seqlens = h->scan.borders.cu_seqlens = uncovered[end];
    h->l.mask.borders.cu_seqlens_n = h->lin.borders.cu_seqlens_n = h->scan.borders.cu_seqlens_n = 1;
    h->f.layer.mask = h->q.mask = h->l.mask;
}

static upipe_status uncovered_tokens(host *h, int n, verdict *v)
{
    SAYS(UNCOVERED, leave_out(h, 0); return fwd(h));
    SAYS(UNCOVERED, leave_out(h, 1); return fwd(h));
    SAYS(UNCOVERED, h->l.mask.padded = 1; leave_out(h, 0); up_to_bwd(h); h->l.mask.padded = 0; return bwd(h));
    SAYS(UNCOVERED, leave_out(h, 0); return qkv_fwd(h));
    SAYS(UNCOVERED, leave_out(h, 1); return fpdt_fwd(h));
    SAYS(UNCOVERED, leave_out(h, 0); return linear_fwd(h));
    SAYS(UNCOVERED, leave_out(h, 1); return linear_fwd(h));
    SAYS(UNCOVERED, leave_out(h, 1); return scanned_fwd(h));
    SAYS(UNCOVERED, upipe_plan_desc d = h->plan.desc; d.batch = 2; d.tokens = TOKENS / 2;
         WELL(upipe_plan_init(&h->plan, &d, &h->c.err)); h->l.mask.borders.cu_seqlens = packed[0];
         h->l.mask.borders.cu_seqlens_n = 1; return fwd(h));
    return UPIPE_OK;
}

/* ---- a plan that was changed ---- */

#define CHANGED "the plan was changed after upipe_plan_init"

static upipe_status changed_plan(host *h, int n, verdict *v)
{
    SAYS(CHANGED, h->plan.desc.heads = 2 * HEADS; return fwd(h));
    SAYS(CHANGED, h->plan.local = 2 * TOKENS; return fwd(h));
    SAYS(CHANGED, h->plan.rows = h->x.n = 2 * TOKENS; return fwd(h));
    SAYS(CHANGED, h->plan.desc.tokens = 2 * TOKENS; return qkv_fwd(h));
    SAYS(CHANGED, h->plan.team_tokens = 2 * TOKENS; return qkv_fwd(h));
    SAYS(CHANGED, h->plan.buffers.send = 4; return qkv_fwd(h));
    SAYS(CHANGED, memset(&h->plan, 0, sizeof h->plan); return fwd(h));
    SAYS(CHANGED, up_to_bwd(h); h->plan.stages = 2; return bwd(h));
    SAYS(CHANGED, WELL(fwd(h)); h->plan.desc.v_dim = 2 * DIM; return out_fwd(h));
    SAYS(CHANGED, upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry); upipe_status s;
         WELL(upipe_dry_init(dry, &h->plan, &h->ops)); h->plan.local = 1; s = upipe_dry_block(dry, &h->l, 1);
         h->c.err = dry->ctx.err; free(dry); return s);
    return UPIPE_OK;
}

/* ---- NULL ---- */

static upipe_status null_layer(host *h, int n, verdict *v)
{
    SAYS("the layer or its plan is NULL", h->l.plan = NULL; return fwd(h));
    SAYS("the layer or its plan is NULL", return upipe_layer_fwd(&h->c, NULL, &h->save, h->x));
    SAYS("save is NULL", return upipe_layer_fwd(&h->c, &h->l, NULL, h->x));
    SAYS("the layer or its plan is NULL", up_to_bwd(h); h->l.plan = NULL; return bwd(h));
    SAYS("the layer or its plan is NULL", up_to_bwd(h);
         return upipe_layer_bwd(&h->c, NULL, h->x, &h->g, &h->save, &h->save.out, h->x));
    SAYS("grads is NULL", up_to_bwd(h);
         return upipe_layer_bwd(&h->c, &h->l, h->x, NULL, &h->save, &h->save.out, h->x));
    SAYS("save is NULL", up_to_bwd(h);
         return upipe_layer_bwd(&h->c, &h->l, h->x, &h->g, NULL, &h->save.out, h->x));
    SAYS("the layer or its plan is NULL", WELL(fwd(h)); h->l.plan = NULL; return out_fwd(h));
    SAYS("the layer or its plan is NULL", WELL(fwd(h));
         return upipe_layer_out_fwd(&h->c, NULL, h->x, &h->save));
    SAYS("save is NULL", return upipe_layer_out_fwd(&h->c, &h->l, h->x, NULL));
    SAYS("save is NULL", return upipe_layer_out_bwd(&h->c, &h->l, &h->g, NULL, h->x));
    SAYS("grads is NULL", WELL(fwd(h)); return upipe_layer_out_bwd(&h->c, &h->l, NULL, &h->save, h->x));
    SAYS("save is NULL", return upipe_saved_free(&h->c, NULL));
    SAYS("tensors are NULL", return upipe_qkv_fwd(&h->c, NULL, &h->save));
    SAYS("plan is NULL", h->q.plan = NULL; return qkv_fwd(h));
    SAYS("save is NULL", return upipe_qkv_fwd(&h->c, &h->q, NULL));
    SAYS("tensors are NULL", WELL(qkv_fwd(h)); return upipe_qkv_bwd(&h->c, NULL, &h->qg, &h->save));
    SAYS("grads is NULL", WELL(qkv_fwd(h)); return upipe_qkv_bwd(&h->c, &h->q, NULL, &h->save));
    SAYS("not upipe_qkv_fwd's", return upipe_qkv_bwd(&h->c, &h->q, &h->qg, NULL));
    SAYS("the segments or their pool", return upipe_fpdt_fwd(&h->c, NULL, &h->offloaded, h->rows));
    SAYS("save is NULL", return upipe_fpdt_fwd(&h->c, &h->f, NULL, h->rows));
    SAYS("the segments or their pool", h->f.host = NULL; return fpdt_fwd(h));
    SAYS("the segments or their pool", WELL(fpdt_fwd(h));
         return upipe_fpdt_bwd(&h->c, NULL, h->rows, &h->g, &h->offloaded, h->rows, h->rows));
    SAYS("save is NULL", return upipe_fpdt_bwd(&h->c, &h->f, h->rows, &h->g, NULL, h->rows, h->rows));
    SAYS("grads is NULL", WELL(fpdt_fwd(h)); return upipe_fpdt_bwd(&h->c, &h->f, h->rows, NULL, &h->offloaded,
                                                                   h->rows + TOKENS * MODEL, h->rows));
    SAYS("the segments or save are NULL", WELL(fpdt_fwd(h));
         return upipe_fpdt_free(NULL, &h->offloaded, &h->c.err));
    SAYS("the pool is NULL", WELL(fpdt_fwd(h)); h->f.host = NULL;
         return upipe_fpdt_free(&h->f, &h->offloaded, &h->c.err));
    return UPIPE_OK;
}

static upipe_status null_argument(host *h, int n, verdict *v)
{
    SAYS("the segments are NULL", return upipe_fpdt_plan(NULL, 0, &h->plan, &h->c.err));
    SAYS("the plan or desc is NULL", return upipe_plan_init(&h->plan, NULL, &h->c.err));
    SAYS("the plan or desc is NULL", return upipe_plan_init(NULL, &h->plan.desc, &h->c.err));
    SAYS("plan is NULL", return upipe_a2a_to_heads(&h->c, h->rows, h->rows, NULL, 0, UPIPE_A2A_Q, 4));
    SAYS("plan or heads are NULL", return upipe_a2a_pack(&h->c, h->rows, NULL, 0, UPIPE_A2A_Q, h->q.q));
    SAYS("the plan or slots are NULL",
         return upipe_slots_alloc(&h->c, NULL, &h->save.out, UPIPE_SLOT_FULL, "dout"));
    SAYS("slots, or its plan, is not there", return upipe_slots_gather(&h->c, &h->plan, h->x, NULL));
    SAYS("slots, or its plan, is not there", WELL(fwd(h));
         return upipe_slots_gather(&h->c, NULL, h->x, &h->save.out));
    SAYS("the queries or block are NULL", return upipe_ring_fwd(&h->c, NULL, NULL));
    SAYS("attend: plan or block is NULL", return upipe_attend_fwd(&h->c, NULL, NULL, 1));
    SAYS("attend: plan or block is NULL", upipe_attend a; upipe_kv_block b; memset(&a, 0, sizeof a);
         memset(&b, 0, sizeof b); return upipe_attend_bwd(&h->c, &a, &b, 1));
    SAYS("the call is NULL", return upipe_attn_fwd(&h->c, NULL));
    SAYS("the call is NULL", return upipe_attn_bwd(&h->c, NULL));
    SAYS("the MLP, w_gate", return upipe_mlp_fwd(&h->c, NULL, h->x, h->x));
    SAYS("grads is NULL", upipe_mlp m; memset(&m, 0, sizeof m); m.w_gate = m.w_up = m.w_down = h->weights;
         m.hidden = 4; return upipe_mlp_bwd(&h->c, &m, h->x, NULL, h->x, h->x));
    SAYS("grads is NULL", upipe_loss head; float loss; int32_t target = 0; memset(&head, 0, sizeof head);
         return upipe_loss_bwd(&h->c, &head, h->x, NULL, &loss, h->x, &target));
    SAYS("the head, w, losses", float loss; int32_t target = 0;
         return upipe_loss_fwd(&h->c, NULL, &loss, h->x, &target));
    SAYS("rope: the call is NULL", return h->ops.rope(&h->c, NULL));
    SAYS("cross_entropy: the call is NULL", return h->ops.cross_entropy(&h->c, NULL));
    SAYS("adamw: the call is NULL", return h->ops.adamw(&h->c, NULL));
    SAYS("a description of 0 fields", return upi_agree(&h->c, &h->team, NULL));
    SAYS("the pool is NULL", void *out;
         return upipe_mem_alloc(NULL, &out, 4, UPIPE_USE_OTHER, "x", &h->c.err));
    SAYS("the pool is NULL", return upipe_mem_free(NULL, h->rows, &h->c.err));
    SAYS("the compute table is NULL", upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry);
         upipe_status s = upipe_dry_init(dry, &h->plan, NULL); h->c.err = dry->ctx.err; free(dry); return s);
    SAYS("the layer or its plan is NULL", upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry); upipe_status s;
         WELL(upipe_dry_init(dry, &h->plan, &h->ops)); s = upipe_dry_layer(dry, NULL, 1);
         h->c.err = dry->ctx.err; free(dry); return s);
    SAYS("the call or its plan is NULL", upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry); upipe_status s;
         h->q.plan = NULL; WELL(upipe_dry_init(dry, &h->plan, &h->ops)); s = upipe_dry_qkv(dry, &h->q);
         h->c.err = dry->ctx.err; free(dry); return s);
    SAYS("the call or its plan is NULL", upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry); upipe_status s;
         h->m.plan = NULL; WELL(upipe_dry_init(dry, &h->plan, &h->ops)); s = upipe_dry_latent(dry, &h->m);
         h->c.err = dry->ctx.err; free(dry); return s);
    SAYS("the segments are NULL", upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry); upipe_status s;
         WELL(upipe_dry_init(dry, &h->plan, &h->ops)); s = upipe_dry_fpdt(dry, NULL); h->c.err = dry->ctx.err;
         free(dry); return s);
    return UPIPE_OK;
}

/* ---- shards ---- */

static upipe_status wrong_shards(host *h, int n, verdict *v)
{
    SAYS("zero or its world is NULL", const void *w; return upipe_zero_weights_begin(&h->c, NULL, 0, &w));
    SAYS("zero or its world is NULL", return upipe_zero_check(&h->c, NULL));
    SAYS("zero or its world is NULL", const void *w; h->z.world = NULL;
         return upipe_zero_weights_begin(&h->c, &h->z, 0, &w));
    SAYS("rank 0 of 0", float *g; h->z.ranks = 0; return upipe_zero_grads_begin(&h->c, &h->z, 0, &g));
    SAYS("stage 4", const void *w; WELL(upipe_zero_check(&h->c, &h->z)); h->z.stage = 4;
         return upipe_zero_weights_begin(&h->c, &h->z, 0, &w));
    SAYS("do not begin at 0", const void *w; h->z.first = NULL;
         return upipe_zero_weights_begin(&h->c, &h->z, 0, &w));
    SAYS("unit 3 of 3", const void *w; return upipe_zero_weights_begin(&h->c, &h->z, UNITS, &w));
    SAYS("weights is NULL", const void *w; h->z.weights = NULL;
         return upipe_zero_weights_begin(&h->c, &h->z, 0, &w));
    SAYS("grads is NULL", float *g; h->z.grads = NULL; h->z.stage = 1;
         return upipe_zero_grads_begin(&h->c, &h->z, 2, &g));
    SAYS("grads is NULL", h->z.grads = NULL; return upipe_zero_grads_clear(&h->c, &h->z));
    SAYS("weights is NULL", const void *w; h->z.weights = NULL; h->z.stage = 1;
         return upipe_zero_weights_begin(&h->c, &h->z, 2, &w));
    SAYS("weights is NULL", h->z.weights = NULL; h->z.stage = 2;
         return upipe_zero_weights_gather(&h->c, &h->z));
    SAYS("grads is NULL", h->z.grads = NULL; h->z.stage = 0; return upipe_zero_grads_sum(&h->c, &h->z));
    SAYS("are summed already", h->z.stage = 1; WELL(upipe_zero_grads_sum(&h->c, &h->z));
         return upipe_zero_grads_sum(&h->c, &h->z));
    SAYS("are summed already", float *g; h->z.stage = 0; WELL(upipe_zero_grads_sum(&h->c, &h->z));
         return upipe_zero_grads_begin(&h->c, &h->z, 2, &g));
    SAYS("is not what unit 2 was given", float *g; upipe_status s;
         WELL(upipe_zero_grads_begin(&h->c, &h->z, 0, &g)); s = upipe_zero_grads_end(&h->c, &h->z, 2, g);
         (void)upipe_mem_free(h->c.mem, g, NULL); return s);
    SAYS("8 units have begun and not ended", float *g[UPIPE_ZERO_BEGUN]; float *more;
         upipe_status s = UPIPE_OK; int i;
         for (i = 0; i < UPIPE_ZERO_BEGUN; ++i) WELL(upipe_zero_grads_begin(&h->c, &h->z, 0, &g[i]));
         s = upipe_zero_grads_begin(&h->c, &h->z, 0, &more);
         for (i = 0; i < UPIPE_ZERO_BEGUN; ++i)(void) upipe_mem_free(h->c.mem, g[i], NULL); return s);
    SAYS("is not what unit 2 was given", return upipe_zero_grads_end(&h->c, &h->z, 2, h->grads));
    SAYS("the place for the result is NULL", return upipe_zero_weights_begin(&h->c, &h->z, 0, NULL));
    SAYS("rank 0 of 2", h->z.stage = 0; h->z.ranks = 2; return upipe_zero_grads_sum(&h->c, &h->z));
    SAYS("do not begin at 0", h->z.stage = 1; h->z.first = NULL;
         return upipe_zero_weights_gather(&h->c, &h->z));
    return UPIPE_OK;
}

/* ---- a layer that cannot be ---- */

static upipe_status wrong_layer(host *h, int n, verdict *v)
{
    static const int64_t descending[3] = {0, 5, 3};
    static const double nan_rates[DIM / 2] = {1, 1, 1, NAN};
    upipe_layer *l = &h->l;
    upipe_plan_desc d = h->plan.desc;
    SAYS("both norm weights or none", l->k_norm_weight = NULL; return fwd(h));
    SAYS("norm_eps", l->q_norm_weight = l->k_norm_weight = NULL; return fwd(h));
    SAYS("rope_interleaved", l->rope_theta = 0; l->rope_interleaved = 1; return fwd(h));
    SAYS("rope_factor", l->rope_theta = 0; l->rope_factor = 1.2; return fwd(h));
    SAYS("rope_dims", l->rope_theta = 0; l->rope_dims = 16; return fwd(h));
    SAYS("7 dims of a head dim 32", l->rope_dims = 7; return fwd(h));
    SAYS("34 dims of a head dim 32", l->rope_dims = 34; return fwd(h));
    SAYS("factor -1.2", l->rope_factor = -1.2; return fwd(h));
    SAYS("rate 3 is nan", l->rope_theta = 0; l->rope_rates = nan_rates; return fwd(h));
    SAYS("scale inf", l->scale = INFINITY; return fwd(h));
    SAYS("rope theta inf", l->rope_theta = INFINITY; return fwd(h));
    SAYS("norm eps nan", l->norm_eps = NAN; return fwd(h));
    SAYS("tile rows -1", l->tile_rows = -1; return fwd(h));
    SAYS("a window of -1", l->mask.window = -1; return fwd(h));
    SAYS("soft-cap -2", l->mask.softcap = -2; return fwd(h));
    SAYS("packed document 1 is [5, 3)", pack(&l->mask, descending); return fwd(h));
    SAYS("2 packed documents, cu_seqlens is NULL", pack(&l->mask, NULL); return fwd(h));
    SAYS("x is f32 [5][1][128]", h->x.n = 5; return fwd(h));
    SAYS("a plan for ring rank 1 of 2 on rank 0 of a ring of 1", d.ring = 2; d.ring_rank = 1;
         WELL(upipe_plan_init(&h->plan, &d, &h->c.err)); return fwd(h));
    REFUSES(UPIPE_ERR_UNSUPPORTED, "head dim 24", d.head_dim = d.v_dim = 24;
            WELL(upipe_plan_init(&h->plan, &d, &h->c.err)); return fwd(h));
    return UPIPE_OK;
}

/* ---- calls in the wrong order, and gradients that nobody can give ---- */

static upipe_status bwd_of(host *h, upipe_slots *dout)
{
    return upipe_layer_bwd(&h->c, &h->l, h->x, &h->g, &h->save, dout, h->x);
}

static upipe_status wrong_order(host *h, int n, verdict *v)
{
    upipe_slots slots;
    upipe_plan other;
    upipe_status s;
    upipe_view narrow = upipe_view_packed(h->rows, UPIPE_F32, TOKENS, 1, 64);
    upipe_plan_desc d = h->plan.desc;
    d.heads = 2 * HEADS;
    SAYS("[8][1][128], not [8][1][64]", WELL(fwd(h));
         return upipe_slots_gather(&h->c, &h->plan, narrow, &h->save.out));
    SAYS("[8][1][128], not [8][1][64]", WELL(fwd(h));
         return upipe_slots_scatter(&h->c, &h->plan, &h->save.out, narrow));
    SAYS("upipe_layer_out_bwd was not called", WELL(fwd(h)); return bwd(h));
    SAYS("slots of 8 bytes", WELL(fwd(h));
         upipe_slots_init(&slots, h->save.out.data, 8, HEADS, UPIPE_SLOT_FULL); return bwd_of(h, &slots));
    SAYS("slot 0 of dout is not full", WELL(fwd(h));
         WELL(upipe_slots_alloc(&h->c, &h->plan, &slots, UPIPE_SLOT_EMPTY, "dout")); s = bwd_of(h, &slots);
         upipe_mem_free(&h->mem, slots.data, NULL); return s);
    SAYS("dout, or its plan, is not there", WELL(fwd(h)); return bwd_of(h, NULL));
    SAYS("the plan says 8", WELL(fwd(h)); WELL(upipe_plan_init(&other, &d, &h->c.err)); h->l.plan = &other;
         return out_fwd(h));
    SAYS("a gradient of bo is wanted without it", h->g.bo = h->grads; WELL(fwd(h)); return out_bwd(h));
    SAYS("consumed already", up_to_bwd(h); return out_bwd(h));
    SAYS("consumed already", up_to_bwd(h); return out_fwd(h));
    SAYS("consumed already", up_to_bwd(h); WELL(bwd(h)); return out_fwd(h));
    SAYS("without a QK norm", h->l.q_norm_weight = h->l.k_norm_weight = NULL; h->l.norm_eps = 0; up_to_bwd(h);
         h->g.q_norm_weight = h->grads; return bwd(h));
    SAYS("without sinks", h->l.mask.sinks = NULL; up_to_bwd(h); h->g.sinks = h->grads; return bwd(h));
    SAYS("a gradient of bk is wanted", up_to_bwd(h); h->g.bk = h->grads; return bwd(h));
    return UPIPE_OK;
}

/* ---- the gated projection ---- */

static upipe_status fail_gate(upipe_ctx *c, upipe_gate_kind kind, upipe_view a, upipe_view b, upipe_view d)
{
    (void)kind, (void)a, (void)b, (void)d;
    return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "this gate fails");
}

static upipe_status gated(host *h, int backward, upipe_view y, upipe_saved *save, upipe_view x)
{
    return backward ? upipe_layer_gated_out_bwd(&h->c, &h->l, &h->g, save, rows_at(h, 3), y, x)
                    : upipe_layer_gated_out_fwd(&h->c, &h->l, y, save, x);
}

/* Of the forward, and once more of the backward. */
static upipe_status wrong_gate(host *h, int n, verdict *v)
{
    const int back = n % 2;
    upipe_saved none = {0}, *save = &h->save;
    upipe_view x = h->x, y = rows_at(h, 2);
    upipe_plan other;
    upipe_plan_desc d = h->plan.desc;
    n /= 2;
    d.heads = 2 * HEADS;
    h->l.wg = h->l.wq;
    WELL(fwd(h));
    SAYS("the layer or its plan is NULL", h->l.plan = NULL; return gated(h, back, y, save, x));
    SAYS("x is f32 [8][1][129], the plan says f32 [8][1][128]", ++x.d; return gated(h, back, y, save, x));
    SAYS("y is bf16 [8][1][128], the plan says f32 [8][1][128]", y.dtype = UPIPE_BF16;
         return gated(h, back, y, save, x));
    SAYS("save is NULL, or not there any more", return gated(h, back, y, NULL, x));
    SAYS("save is NULL, or not there any more", return gated(h, back, y, &none, x));
    SAYS("wo is NULL", h->l.wo = NULL; return gated(h, back, y, save, x));
    SAYS("the plan says", WELL(upipe_plan_init(&other, &d, &h->c.err)); h->l.plan = &other;
         return gated(h, back, y, save, x));
    SAYS("layer id 3, and 0 in the forward", h->l.id = 3; return gated(h, back, y, save, x));
    SAYS("consumed already", WELL(gated(h, 1, y, save, x)); return gated(h, back, y, save, x));
    REFUSES(UPIPE_ERR_BACKEND, "this gate fails", upipe_status s; h->ops.gate = fail_gate;
            s = gated(h, back, y, save, x); CHECK(save->delta == NULL); return s);
    return UPIPE_OK;
}

static upipe_status wrong_gate_bwd(host *h, int n, verdict *v)
{
    const upipe_view x = h->x, y = rows_at(h, 2);
    upipe_view apart = x, wide = rows_at(h, 3);
    apart.n_stride += 4;
    ++wide.d;
    h->l.wg = h->l.wq;
    WELL(fwd(h));
#define GATED_BWD(dx, dy, x) upipe_layer_gated_out_bwd(&h->c, &h->l, &h->g, &h->save, dx, dy, x)
    SAYS("y, of stride 132, lies over x, of stride 128", return gated(h, 0, apart, &h->save, x));
    SAYS("a layer with wg", return out_bwd(h));
    SAYS("dx, of stride 132, lies over dy, of stride 128", return GATED_BWD(apart, x, y));
    SAYS("dx, of stride 132, lies over x, of stride 128", return GATED_BWD(apart, y, x));
    SAYS("dx is f32 [8][1][129]", return GATED_BWD(wide, y, x));
    SAYS("grads is NULL", return upipe_layer_gated_out_bwd(&h->c, &h->l, NULL, &h->save, y, y, x));
    SAYS("a gradient of bq is wanted without it", h->g.bq = h->grads; return gated_bwd(h));
    REFUSES(UPIPE_ERR_BACKEND, "this gate fails", upipe_status s; h->ops.gate_bwd = fail_gate;
            s = gated_bwd(h); CHECK(h->save.delta == NULL); return s);
#undef GATED_BWD
    return UPIPE_OK;
}

/* ---- Q, K and V of the host ---- */

static upipe_status wrong_qkv(host *h, int n, verdict *v)
{
    upipe_qkv *q = &h->q;
    upipe_plan_desc d = h->plan.desc;
    d.v_dim = 40;
    SAYS("q is NULL", q->q.data = NULL; return qkv_fwd(h));
    SAYS("k is [8][4][32], the plan says [8][2][32]", q->k.h = 4; return qkv_fwd(h));
    SAYS("v is [8][2][32], the plan says [8][2][40]", WELL(upipe_plan_init(&h->plan, &d, &h->c.err));
         return qkv_fwd(h));
    SAYS("o is [8][4][32], the plan says [8][4][40]", WELL(upipe_plan_init(&h->plan, &d, &h->c.err));
         q->v.d = 40; return qkv_fwd(h));
    SAYS("o is [4][4][32], the plan says [8][4][32]", q->o.n = 4; return qkv_fwd(h));
    SAYS("scale -1", q->scale = -1; return qkv_fwd(h));
    SAYS("window", q->mask.window = -1; return qkv_fwd(h));
    REFUSES(UPIPE_ERR_UNSUPPORTED, "q is no storage type", q->q.dtype = (upipe_dtype)2; return qkv_fwd(h));
    SAYS("consumed before", return qkv_bwd(h));
    SAYS("without sinks", WELL(qkv_fwd(h)); h->qg.dsinks = h->grads; return qkv_bwd(h));
    SAYS("dk is [8][2][40]", WELL(qkv_fwd(h)); h->qg.dk.d = 40; return qkv_bwd(h));
    SAYS("dout is NULL", WELL(qkv_fwd(h)); h->qg.dout.data = NULL; return qkv_bwd(h));
    return UPIPE_OK;
}

/* ---- segments ---- */

static upipe_status segments_bwd(host *h, float *dx, float *dout, const float *x)
{
    WELL(fpdt_fwd(h));
    return upipe_fpdt_bwd(&h->c, &h->f, dx, &h->g, &h->offloaded, dout, x);
}

static upipe_status wrong_segments(host *h, int n, verdict *v)
{
    upipe_fpdt *f = &h->f;
    float *x = h->rows, *dout = h->rows + 2 * TOKENS * MODEL;
    upipe_plan p;
    SAYS("x is NULL", return upipe_fpdt_fwd(&h->c, f, &h->offloaded, NULL));
    SAYS("dout or dx", return segments_bwd(h, NULL, dout, x));
    SAYS("dout or dx", return segments_bwd(h, x, NULL, x));
    SAYS("x is NULL", return segments_bwd(h, x, dout, NULL));
    f->layer.q_norm_weight = f->layer.k_norm_weight = NULL, f->layer.norm_eps = 0;
    SAYS("without a QK norm", h->g.q_norm_weight = h->grads; return segments_bwd(h, x, dout, x));
    SAYS("without a QK norm", h->g.k_norm_weight = h->grads; return segments_bwd(h, x, dout, x));
    SAYS("delta is not there", WELL(fpdt_fwd(h));
         return upipe_fpdt_bwd(&h->c, f, x, &h->g, &h->offloaded, h->offloaded.out, x));
    SAYS("the slots are NULL", return upipe_fpdt_gather(&h->c, f, x, UPIPE_F32, NULL));
    SAYS("NULL", return upipe_fpdt_gather(&h->c, f, NULL, UPIPE_F32, dout));
    SAYS("NULL", return upipe_fpdt_scatter(&h->c, f, NULL, x, UPIPE_F32));
    SAYS("segment 2 of 2", return upipe_fpdt_plan(f, 2, &p, &h->c.err));
    SAYS("segment -1 of 2", return upipe_fpdt_plan(f, -1, &p, &h->c.err));
    SAYS("8 tokens in 9 segments over 1 ranks: a segment needs a token for each rank", f->segments = 9;
         return upipe_fpdt_plan(f, 0, &p, &h->c.err));
    f->desc.tokens = INT64_C(1) << 32, f->segments = UPIPE_SEGMENTS_MAX + 1;
    REFUSES(UPIPE_ERR_UNSUPPORTED, "65537 segments, at most 65536", CHECK_INT(upipe_fpdt_out_bytes(f), 0);
            return upipe_fpdt_plan(f, 0, &p, &h->c.err));
    f->desc.tokens = TOKENS;
    for (f->segments = 0; f->segments >= -1; --f->segments) {
        CHECK_INT(upipe_fpdt_out_bytes(f), 0);
        SAYS("8 tokens in", return fpdt_fwd(h));
        SAYS("8 tokens in", return upipe_fpdt_gather(&h->c, f, x, UPIPE_F32, dout));
        SAYS("8 tokens in", return upipe_fpdt_scatter(&h->c, f, dout, x, UPIPE_F32));
        SAYS("8 tokens in", return upipe_fpdt_plan(f, 0, &p, &h->c.err));
    }
    return UPIPE_OK;
}

/* ---- K and V of a latent ---- */

static upipe_status wrong_latent(host *h, int n, verdict *v)
{
    upipe_latent_kv *kv = &h->m.kv, *dkv = &h->mg.dkv;
    SAYS("tensors are NULL", return upipe_latent_fwd(&h->c, NULL, &h->save));
    SAYS("save is NULL", return upipe_latent_fwd(&h->c, &h->m, NULL));
    SAYS("plan is NULL", h->m.plan = NULL; return latent_fwd(h));
    SAYS("kv_heads is 2, heads 4", h->m.plan = &h->plan; return latent_fwd(h));
    SAYS("wkv is NULL", h->m.wkv = NULL; return latent_fwd(h));
    SAYS("form 3 of a latent", kv->form = (upipe_latent_form)3; return latent_fwd(h));
    SAYS("form -1 of a latent", kv->form = (upipe_latent_form)-1; return latent_fwd(h));
    SAYS("a latent of 0 numbers", kv->c.d = 0; return latent_fwd(h));
    SAYS("a shared key of 32 in heads of 32", kv->kr.d = DIM; return latent_fwd(h));
    SAYS("a shared key of -2", kv->kr.d = -2; return latent_fwd(h));
    REFUSES(UPIPE_ERR_OVERFLOW, "a shared key of 2147483655 numbers, 8 tokens", kv->c.d = INT32_MAX;
            return latent_fwd(h));
    SAYS("c is [7][1][16], the plan says [8][1][16]", --kv->c.n; return latent_fwd(h));
    SAYS("kr is [8][2][8], the plan says [8][1][8]", kv->kr.h = 2; return latent_fwd(h));
    SAYS("c is NULL", kv->c.data = NULL; return latent_fwd(h));
    SAYS("kr is NULL", kv->kr.data = NULL; return latent_fwd(h));
    REFUSES(UPIPE_ERR_UNSUPPORTED, "c is", kv->c.dtype = (upipe_dtype)7; return latent_fwd(h));
    SAYS("q is [8][4][24]", h->m.q.d = 24; return latent_fwd(h));
    SAYS("o is NULL", h->m.o.data = NULL; return latent_fwd(h));
    SAYS("grads is NULL", WELL(latent_fwd(h)); return upipe_latent_bwd(&h->c, &h->m, NULL, &h->save));
    SAYS("not upipe_latent_fwd's", return latent_bwd(h));
    SAYS("not upipe_latent_fwd's", WELL(latent_layer_fwd(h)); return latent_bwd(h));
    SAYS("not upipe_latent_fwd's", WELL(latent_fwd(h)); WELL(latent_bwd(h)); return latent_bwd(h));
    SAYS("dc is [8][1][15], the plan says [8][1][16]", WELL(latent_fwd(h)); --dkv->c.d; return latent_bwd(h));
    SAYS("dkr is [8][1][4]", WELL(latent_fwd(h)); dkv->kr.d = 4; return latent_bwd(h));
    SAYS("dq is [8][4][31]", WELL(latent_fwd(h)); --h->mg.dq.d; return latent_bwd(h));
    SAYS("dout is NULL", WELL(latent_fwd(h)); h->mg.dout.data = NULL; return latent_bwd(h));
    SAYS("a gradient of sinks", WELL(latent_fwd(h)); h->mg.dsinks = h->grads; return latent_bwd(h));
    SAYS("wkv is not where it was", WELL(latent_fwd(h)); h->m.wkv = h->weights; return latent_bwd(h));
    SAYS("scale is not that of", WELL(latent_fwd(h)); h->m.scale = 0.5f; return latent_bwd(h));
    SAYS("numbers of the latent is not that of", WELL(latent_fwd(h)); --kv->c.d; --dkv->c.d;
         return latent_bwd(h));
    SAYS("numbers of the shared key is not that of", WELL(latent_fwd(h)); kv->kr.d = dkv->kr.d = 4;
         return latent_bwd(h));
    SAYS("form of the latent (0 heads, 1 gathered) is not that of", WELL(latent_fwd(h));
         kv->form = UPIPE_LATENT_GATHERED; return latent_bwd(h));
    SAYS("layer id 2, and 1 in", h->m.id = 1; WELL(latent_fwd(h)); h->m.id = 2; return latent_bwd(h));
    SAYS(UNCOVERED, leave_out(h, 0); h->m.mask = h->l.mask; return latent_fwd(h));
    SAYS(CHANGED, h->many.desc.heads = 2 * HEADS; return latent_fwd(h));
    return UPIPE_OK;
}

static upipe_status wrong_latent_layer(host *h, int n, verdict *v)
{
    upipe_latent_kv *kv = &h->m.kv;
    upipe_grads g = h->g;
    upipe_view xq = h->x;
    g.wv = NULL;
    SAYS("the latent is NULL", return upipe_latent_layer_fwd(&h->c, &h->ml, &h->save, h->x, NULL));
    SAYS("save is NULL", return upipe_latent_layer_fwd(&h->c, &h->ml, NULL, h->x, kv));
    SAYS("the layer or its plan is NULL", return upipe_latent_layer_fwd(&h->c, NULL, &h->save, h->x, kv));
    SAYS("wk is NULL", h->ml.wk = NULL; return latent_layer_fwd(h));
    SAYS("wq is NULL", h->ml.wq = NULL; return latent_layer_fwd(h));
    SAYS("xq is f32 [7][1][128], the plan says f32 [8][1][128]", xq.n = 7;
         return upipe_latent_layer_fwd(&h->c, &h->ml, &h->save, xq, kv));
    SAYS("xq is bf16", xq.dtype = UPIPE_BF16; return upipe_latent_layer_fwd(&h->c, &h->ml, &h->save, xq, kv));
    SAYS("xq is f32 [8][1][0]", xq.d = 0; return upipe_latent_layer_fwd(&h->c, &h->ml, &h->save, xq, kv));
    REFUSES(UPIPE_ERR_OVERFLOW, "xq is [17179869184][1][2147483647]", upipe_plan_desc d = h->many.desc;
            d.tokens = kv->c.n = kv->kr.n = xq.n = INT64_C(1) << 34; xq.d = INT32_MAX;
            WELL(upipe_plan_init(&h->many, &d, &h->c.err));
            return upipe_latent_layer_fwd(&h->c, &h->ml, &h->save, xq, kv));
    SAYS("xq is NULL", xq.data = NULL; return upipe_latent_layer_fwd(&h->c, &h->ml, &h->save, xq, kv));
    REFUSES(UPIPE_ERR_UNSUPPORTED, "wv, wg, bq, bk, bv or norms", h->ml.wv = h->weights;
            return latent_layer_fwd(h));
    REFUSES(UPIPE_ERR_UNSUPPORTED, "wv, wg, bq, bk, bv or norms", h->ml.wg = h->weights;
            return latent_layer_fwd(h));
    REFUSES(UPIPE_ERR_UNSUPPORTED, "wv, wg, bq, bk, bv or norms", h->ml.bq = h->weights;
            return latent_layer_fwd(h));
    REFUSES(UPIPE_ERR_UNSUPPORTED, "wv, wg, bq, bk, bv or norms", h->ml.q_norm_weight = h->weights;
            return latent_layer_fwd(h));
    REFUSES(UPIPE_ERR_UNSUPPORTED, "wv, wg, bq, bk, bv or norms", h->ml.norm_eps = 1;
            return latent_layer_fwd(h));
    SAYS("rope_dims is not read", h->ml.rope_dims = KEY; return latent_layer_fwd(h));
    SAYS("rope_interleaved or rope_factor without", h->ml.rope_theta = 0; h->ml.rope_interleaved = 1;
         return latent_layer_fwd(h));
    SAYS("rope theta -1", h->ml.rope_theta = -1; return latent_layer_fwd(h));
    SAYS("tile rows -4", h->ml.tile_rows = -4; return latent_layer_fwd(h));
    SAYS("an even number is rotated", kv->kr.d = 7; return latent_layer_fwd(h));
    SAYS("not there", return latent_layer_bwd(h));
    SAYS("grads is NULL", WELL(latent_layer_fwd(h)); WELL(latent_out_bwd(h));
         return upipe_latent_layer_bwd(&h->c, &h->ml, h->x, kv, NULL, &h->save, &h->save.out, h->x, kv));
    SAYS("gradients are NULL", WELL(latent_layer_fwd(h)); WELL(latent_out_bwd(h));
         return upipe_latent_layer_bwd(&h->c, &h->ml, h->x, NULL, &g, &h->save, &h->save.out, h->x, kv));
    SAYS("a gradient of wv is wanted without it", WELL(latent_layer_fwd(h)); WELL(latent_out_bwd(h));
         return upipe_latent_layer_bwd(&h->c, &h->ml, h->x, kv, &h->g, &h->save, &h->save.out, h->x, kv));
    SAYS("dxq is f32 [8][1][64], the plan says f32 [8][1][128]", WELL(latent_layer_fwd(h));
         WELL(latent_out_bwd(h)); xq.d = 64;
         return upipe_latent_layer_bwd(&h->c, &h->ml, xq, kv, &g, &h->save, &h->save.out, h->x, kv));
    SAYS("numbers that Q is made of (0: the host's) is not that of", WELL(latent_layer_fwd(h));
         WELL(latent_out_bwd(h)); h->x.d = 64; return latent_layer_bwd(h));
    SAYS("wk is not where it was", WELL(latent_layer_fwd(h)); WELL(latent_out_bwd(h)); h->ml.wk = h->weights;
         return latent_layer_bwd(h));
    SAYS("rope_theta is not that of", WELL(latent_layer_fwd(h)); WELL(latent_out_bwd(h));
         h->ml.rope_theta = 5; return latent_layer_bwd(h));
    SAYS("not there", WELL(latent_layer_fwd(h)); WELL(latent_out_bwd(h)); WELL(latent_layer_bwd(h));
         return latent_layer_bwd(h));
    return UPIPE_OK;
}

/* Each rank of a ring would expand all of a gathered latent. */
static upipe_status latent_in_ring(host *h, int n, verdict *v)
{
    static int64_t gathered[2 * UPIPE_ALL_GATHER_MAX];
    static upipe_msg list[4];
    upipe_plan_desc d = h->many.desc;
    upipe_comm ring;
    upipe_status s;
    if (n > 1) return UPIPE_OK;
    *v = (verdict){"form HEADS sends heads", UPIPE_ERR_UNSUPPORTED};
    d.ring = 2;
    WELL(upipe_plan_init(&h->many, &d, &h->c.err));
    upipe_comm_dry(&ring, 0, 2, list, gathered);
    h->c.ring = &ring;
    h->m.kv.form = UPIPE_LATENT_GATHERED;
    h->x.n = h->m.q.n = h->m.o.n = h->m.kv.c.n = h->m.kv.kr.n = h->many.rows;
    s = n == 0 ? latent_fwd(h) : latent_layer_fwd(h);
    CHECK_INT(ring.sent_bytes, 0);
    h->c.ring = NULL;
    return s;
}

/* ---- what a context lacks, and plans of other ranks ---- */

static upipe_status sum(host *h)
{
    return upipe_all_reduce(&h->c, &h->team, h->grads, 64);
}

static upipe_status scattered_sum(host *h)
{
    return upipe_reduce_scatter(&h->c, &h->team, h->grads, 64);
}

static upipe_status gathered(host *h)
{
    return upipe_all_gather(&h->c, &h->team, h->grads, 64, 4);
}

static upipe_status to_heads(host *h)
{
    return upipe_a2a_to_heads(&h->c, h->grads, h->rows, &h->plan, 0, UPIPE_A2A_Q, DIM * 4);
}

static upipe_status to_tokens(host *h)
{
    return upipe_a2a_to_tokens(&h->c, h->grads, h->rows, &h->plan, 0, UPIPE_A2A_Q, DIM * 4);
}

typedef upipe_status host_call(host *h);

/* Sums are given their communicator, and what is sent has no table to ask. */
static upipe_status missing(host *h, int n, verdict *v)
{
    static const char *const words[] = {"ctx->ops is NULL", "ctx->mem is NULL", "ctx->team is NULL"};
    static host_call *const calls[] = {fwd,           bwd,      out_fwd,  out_bwd,  sum,
                                       scattered_sum, gathered, to_heads, to_tokens};
    const int call = n < 12 ? n / 3 : n < 18 ? 4 + (n - 12) / 2 : n - 11;
    const int what = n < 12 ? n % 3 : n < 18 ? n % 2 : 2;
    if (n > 19) return UPIPE_OK;
    *v = (verdict){words[what], UPIPE_ERR_ARG};
    if (what == 0) h->c.ops = NULL;
    if (what == 1) h->c.mem = NULL;
    if (what == 2) h->c.team = NULL;
    return calls[call](h);
}

/* Tokens and heads divide: the plans of both ranks differ in nothing but positions. That of rank 0 is refused on rank 1
 * all the same, by every call that reads a plan. */
static upipe_status foreign_plan(host *h, int n, verdict *v)
{
    static host_call *const calls[] = {fwd,      out_fwd,   qkv_fwd,    fpdt_fwd,
                                       to_heads, to_tokens, latent_fwd, latent_layer_fwd};
    static int64_t gathered[2 * UPIPE_ALL_GATHER_MAX];
    static upipe_msg list[4];
    upipe_plan_desc d = h->plan.desc;
    upipe_status s;
    if (n > 7) return UPIPE_OK;
    *v = (verdict){"a plan for rank 0 of 2 on rank 1 of a team of 2: each rank has its own", UPIPE_ERR_ARG};
    d.ranks = 2, d.chunk = 2;
    WELL(upipe_plan_init(&h->plan, &d, &h->c.err));
    h->f.desc = d;
    h->m.plan = h->ml.plan = &h->plan;
    h->x.n = h->q.q.n = h->q.k.n = h->q.v.n = h->q.o.n = h->plan.rows;
    upipe_comm_dry(&h->team, 1, 2, list, gathered);
    s = calls[n](h);
    CHECK_INT(h->team.sent_bytes, 0);
    return s;
}

/* ---- all of them ---- */

static void test_table(void)
{
    static const struct {
        mistakes *list;
        int breaks; /* a pass that is refused breaks the team */
    } lists[] = {{other_layer, 1},    {other_call, 1},   {other_states, 0},       {uncovered_tokens, 0},
                 {changed_plan, 0},   {null_layer, 0},   {null_argument, 0},      {wrong_shards, 0},
                 {wrong_layer, 1},    {wrong_order, 0},  {wrong_gate, 1},         {wrong_gate_bwd, 1},
                 {wrong_qkv, 1},      {wrong_latent, 0}, {wrong_latent_layer, 0}, {latent_in_ring, 0},
                 {wrong_segments, 0}, {missing, 0},      {foreign_plan, 0}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; ++i)
        for (int n = 0;; ++n) {
            host *h = host_begin();
            verdict v = {0};
            upipe_status s;
            memset(&h->c.err, 0, sizeof h->c.err);
            s = lists[i].list(h, n, &v);
            if (v.words != NULL)
                CHECK_SAY(s == v.status && h->c.err.status == s && strstr(h->c.err.text, v.words) != NULL,
                          "list %zu, mistake %d: %s (%s), not %s \"%s\"", i, n, upipe_status_name(s),
                          h->c.err.text, upipe_status_name(v.status), v.words);
            CHECK(v.words == NULL || !lists[i].breaks || h->state.failure.status != UPIPE_OK);
            host_end(h, v.words != NULL ? v.words : "no mistake");
            if (v.words == NULL) break;
        }
}

/* ---- what is no mistake ---- */

static void door_layer(host *h)
{
    up_to_bwd(h);
    WELL(bwd(h));
}

static void door_qkv(host *h)
{
    WELL(qkv_fwd(h));
    WELL(qkv_bwd(h));
}

static void door_segments(host *h)
{
    WELL(fpdt_fwd(h));
    WELL(fpdt_bwd(h));
}

static void door_latent(host *h)
{
    WELL(latent_fwd(h));
    WELL(latent_bwd(h));
}

static void door_latent_layer(host *h)
{
    WELL(latent_layer_fwd(h));
    WELL(latent_out_bwd(h));
    WELL(latent_layer_bwd(h));
}

static void well_moved(host *h)
{
    h->l.id = 3; /* its weights are gathered into other buffers for the backward */
    WELL(fwd(h));
    host_layer(h, 1);
    WELL(out_fwd(h));
    host_layer(h, 0);
    WELL(out_bwd(h));
    host_layer(h, 1);
    WELL(bwd(h));
}

static void well_own_structs(host *h)
{
    static const int64_t again[3] = {0, 3, TOKENS};
    upipe_plan copy;
    pack(&h->l.mask, packed[0]);
    up_to_bwd(h);
    host_plan(h, &copy, 1); /* the same numbers */
    h->l.plan = &copy;
    pack(&h->l.mask, again);
    h->l.tile_rows = 3;
    h->l.wo = NULL;
    WELL(bwd(h));
}

static void well_copied(host *h)
{
    upipe_saved kept;
    upipe_plan copy = h->plan;
    WELL(fwd(h));
    kept = h->save;
    memset(&h->save, 0, sizeof h->save);
    h->save = kept;
    h->l.plan = &copy;
    WELL(out_fwd(h));
    WELL(out_bwd(h));
    WELL(bwd(h));
}

static void well_recomputed(host *h)
{
    WELL(qkv_fwd(h));
    h->q.q.data = h->rows + 3 * TOKENS * MODEL; /* Q, K and V were formed again elsewhere */
    h->q.k.data = h->q.v.data = h->rows + 4 * TOKENS * MODEL;
    WELL(qkv_bwd(h));
}

static void well_not_wanted(host *h)
{
    WELL(qkv_fwd(h));
    h->qg.dq.data = NULL;
    WELL(qkv_bwd(h));
    CHECK_INT(h->mem.live, 0);
}

/* A refusal breaks the team, and leaves what the forward has saved: another team goes on. */
static void well_again(host *h)
{
    h->l.wg = h->l.wq;
    WELL(fwd(h));
    h->ops.gate_bwd = fail_gate;
    CHECK(gated_bwd(h) == UPIPE_ERR_BACKEND);
    upipe_cpu_ops(&h->ops);
    upipe_comm_self(&h->team, &h->state, h->ops.copy);
    WELL(gated_bwd(h));
    WELL(bwd(h));
    WELL(upipe_saved_free(&h->c, &h->save));
    WELL(qkv_fwd(h));
    h->qg.dk.d = 40;
    CHECK(qkv_bwd(h) == UPIPE_ERR_ARG);
    h->qg.dk.d = DIM;
    upipe_comm_self(&h->team, &h->state, h->ops.copy);
    WELL(qkv_bwd(h));
}

/* Of a latent's gradients none, and the forms that are the same. */
static void well_latent(host *h)
{
    WELL(latent_fwd(h));
    h->m.kv.form = UPIPE_LATENT_HEADS; /* as AUTO on one rank */
    h->mg.dkv.c.data = h->mg.dkv.kr.data = h->mg.dq.data = NULL;
    h->mg.dwkv = NULL;
    WELL(latent_bwd(h));
    CHECK_INT(h->mem.live, 0);
}

static void well_segments(host *h)
{
    upipe_fpdt copy = h->f;
    copy.layer.id = h->f.layer.id = 5;
    copy.layer.wq = h->weights + LAYER;
    WELL(fpdt_fwd(h));
    h->f = copy;
    WELL(fpdt_bwd(h));
}

static void well_padded(host *h)
{
    h->l.mask.padded = 1;
    leave_out(h, 0);
    door_layer(h);
}

static void well_without_world(host *h)
{
    const void *w = NULL;
    float *g = NULL;
    h->z.world = NULL, h->z.stage = 0; /* a rank that shares nothing */
    WELL(upipe_zero_weights_begin(&h->c, &h->z, 2, &w));
    WELL(upipe_zero_grads_begin(&h->c, &h->z, 2, &g));
    CHECK(w == h->sharded + 4 && g == h->sharded + ELEMENTS + 4);
    WELL(upipe_zero_grads_end(&h->c, &h->z, 2, g));
    WELL(upipe_zero_grads_sum(&h->c, &h->z));
}

static void well_without_context(host *h)
{
    CHECK(upipe_layer_fwd(NULL, &h->l, &h->save, h->x) ==
          UPIPE_ERR_ARG); /* there is no place for a sentence */
    CHECK(upipe_qkv_fwd(NULL, &h->q, &h->save) == UPIPE_ERR_ARG);
    CHECK(upipe_latent_fwd(NULL, &h->m, &h->save) == UPIPE_ERR_ARG);
    CHECK(upipe_latent_layer_fwd(NULL, &h->ml, &h->save, h->x, &h->m.kv) == UPIPE_ERR_ARG);
}

typedef void well(host *h);

static void test_well(void)
{
    static well *const cases[] = {well_padded,        well_moved,           well_own_structs, well_copied,
                                  well_recomputed,    well_not_wanted,      well_again,       well_segments,
                                  well_without_world, well_without_context, well_latent};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; ++i) {
        host *h = host_begin();
        cases[i](h);
        host_end(h, "no mistake");
    }
}

/* ---- blocks of the host's own ---- */

/* A block of the host's has any use, and stays what it is: gradients are those of a pool without it. */
static void test_blocks(void)
{
    enum { USES = UPIPE_USE_STREAM + 1, BYTES = 1 << 14, ROWS = 5 * TOKENS * MODEL };
    static well *const doors[] = {door_layer, door_qkv, door_segments, door_latent, door_latent_layer};
    size_t i;
    for (i = 0; i < sizeof doors / sizeof *doors; ++i) {
        host *alone = host_begin(), *h = host_begin();
        void *blocks[USES];
        int use;
        doors[i](alone);
        for (use = 0; use < USES; ++use) {
            WELL(upipe_alloc(&h->c, &blocks[use], BYTES, use, "own"));
            memset(blocks[use], 1 + use, BYTES);
        }
        doors[i](h);
        CHECK_BYTES(h->grads, alone->grads, LAYER * sizeof(float));
        CHECK_BYTES(h->rows, alone->rows, ROWS * sizeof(float));
        for (use = 0; use < USES; ++use) {
            const char *block = (const char *)blocks[use];
            CHECK(block[0] == 1 + use && memcmp(block, block + 1, BYTES - 1) == 0);
            WELL(upipe_free(&h->c, blocks[use]));
        }
        host_end(alone, "without blocks");
        host_end(h, "blocks");
    }
}

/* ---- one rank of two is wrong ---- */

typedef struct pair {
    upipe_threads team;
    host *h[2];
} pair;

static upipe_status pair_body(void *user, int rank)
{
    pair *p = (pair *)user;
    host *h = p->h[rank];
    upipe_plan_desc d = h->plan.desc;
    d.ranks = 2, d.rank = rank, d.chunk = 2;
    h->c.team = upipe_threads_comm(&p->team, rank);
    UPIPE_TRY(upipe_plan_init(&h->plan, &d, &h->c.err));
    h->x.n = h->plan.rows;
    UPIPE_TRY(fwd(h));
    UPIPE_TRY(out_fwd(h));
    UPIPE_TRY(out_bwd(h));
    if (rank == 1) host_layer(h, 1);
    return bwd(h);
}

/* The other rank is released, with the sentence of the one that is wrong. */
static void test_pair(void)
{
    upipe_status statuses[2];
    upipe_err e;
    pair p;
    int rank;
    for (rank = 0; rank < 2; ++rank) p.h[rank] = host_begin();
    CHECK_STATUS(upipe_threads_init(&p.team, 2, 20, &e), UPIPE_OK, e);
    upipe_threads_run(&p.team, pair_body, &p, statuses, &e);
    CHECK_INT(statuses[0], UPIPE_ERR_ABORTED);
    CHECK_INT(statuses[1], UPIPE_ERR_ARG);
    for (rank = 0; rank < 2; ++rank) {
        CHECK_TEXT(p.h[rank]->c.err.text, "wq is not where it was");
        host_end(p.h[rank], "two ranks");
    }
    upipe_threads_free(&p.team);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_table());
    TEST(test_well());
    TEST(test_blocks());
    TEST(test_pair());
    return test_end("mistakes");
}
