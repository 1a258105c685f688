/* titan.h -- what the paper's own setting holds and how long it takes: PyTorch with TorchTitan, USP, FlashAttention-3
 *
 *     titan_estimate(&e, &s, TITAN_UPIPE, &m);
 *
 * A model of other people's program, so a sum of what that program is known to hold, with a few fitted numbers; nothing
 * of this library's exact bytes enters. All bytes are of one rank of N; T = S * B / N tokens; P parameters. Ulysses and
 * UPipe trade heads within a node and make rings of nodes (8-ulysses-2-ring on 16 GPUs); FPDT trades heads over all ranks;
 * Ring and Native are rings of all.
 */
#ifndef PLAN_TITAN_H
#define PLAN_TITAN_H

#include "estimate.h"

enum { TITAN_NATIVE, TITAN_RING, TITAN_ULYSSES, TITAN_FPDT, TITAN_UPIPE, TITANS };

static const char *const titan_names[TITANS] = {"native", "ring", "ulysses", "fpdt", "upipe"};

/* Fitted on the paper's Llama3-8B tables of 8 GPUs; all but the last count tensors. The numbers are the paper's; which
 * tensors they are is a reading.
 *   STREAM   tensors [T][D] in bf16 that live while attention's backward runs, beside O and its gradient: the layer's input,
 *            its norm, the sum behind attention and that sum's gradient, for part of the time
 *   FETCHED  the same that are more where inputs come back from the host: the fetched one, and the one that the backward
 *            recomputes from. Native PyTorch has as many for its norms, which are in f32 and not in tiles
 *   MLP      the same that are more while the MLP's backward runs: its norm, its result, part of its gradient
 *   LOSS     the same while the loss runs: the stream, its norm and their gradients
 *   BATCH    the same that UPipe has more of where a batch has several sequences: heads of a stage are no block of memory
 *            then, and are copied
 *   CHUNKS   tensors [chunk][H * d] of FPDT: Q, K, V twice, O and its gradient twice, f32 dQ, dK, dV twice and
 *            FlashAttention's, and their bf16 copies
 *   FIXED    bytes of workspaces */
static const double titan_stream = 2.6, titan_fetched = 2, titan_mlp = 2.5, titan_loss = 4, titan_batch = 1.2,
                    titan_chunks = 17.5, titan_fixed = 0.13 * 1073741824;
enum { TITAN_CHUNK = 65536 /* tokens of a chunk of FPDT, its default */ };

/* Numbers of a setting that memory and time need. */
typedef struct titan_rank {
    int method, ranks, team, ring;
    double rows;    /* tokens of a rank */
    double x, q, k; /* bytes of [T][D], [T][H d], [T][Hkv d] in bf16 */
    double stages;  /* of a layer */
    double qs, ks;  /* of a stage: Q, and K with the copies that ranks without a head of their own need */
    int grouped;    /* a stage's query heads share key/value heads: FlashAttention sums them in f32 */
    double kept;    /* layers whose input stays on the device */
    double sac;     /* layers that keep attention's result */
    double layer, layers; /* parameters of a layer; layers */
} titan_rank;

static inline int titan_find(const char *name)
{
    int i = 0;
    while (i < TITANS && strcmp(titan_names[i], name) != 0) ++i;
    return i;
}

/* Heads of a stage. */
static inline int titan_stage(titan_rank *t, const setting *s, char why[ESTIMATE_WHY])
{
    const llama_config *c = &s->layout->config;
    const int group = c->heads / c->kv_heads;
    const int chunk = t->method != TITAN_UPIPE ? c->heads : s->how.chunk > 0 ? s->how.chunk : t->team;
    int mine, kv;
    if (chunk % t->team != 0 || chunk > c->heads || (t->method == TITAN_UPIPE && c->heads % chunk != 0)) {
        snprintf(why, ESTIMATE_WHY, "%d heads do not divide into chunks of %d on %d ranks", c->heads, chunk,
                 t->team);
        return -1;
    }
    mine = (chunk + t->team - 1) / t->team; /* query heads of a rank */
    kv = mine > group ? mine / group : 1;
    t->stages = (double)c->heads / chunk;
    t->qs = t->rows * 2 * t->team * mine * c->head_dim;
    t->ks = t->team == 1 ? t->k : t->rows * 2 * t->team * kv * c->head_dim;
    t->grouped = t->team == 1 ? group > 1 : mine > kv;
    return 0;
}

static inline int titan_kept(titan_rank *t, const setting *s, char why[ESTIMATE_WHY])
{
    const activations_setting *a = &s->activations;
    t->kept = t->sac = 0;
    if (t->method == TITAN_NATIVE || a->kind == ACTIVATIONS_AC)
        t->kept = t->layers;
    else if (a->kind == ACTIVATIONS_SAO)
        t->kept = (double)(s->layout->config.layers / a->k);
    else if (a->kind == ACTIVATIONS_SAC)
        t->sac = a->k > 0 ? (double)a->k : t->layers;
    if (a->kind != ACTIVATIONS_BLOCKS && !a->grad) return 0;
    snprintf(why, ESTIMATE_WHY, "the paper's setting has the activations ac, offload, sao:K and sac");
    return -1;
}

static inline int titan_begin(titan_rank *t, const setting *s, int method, const machine *m,
                              char why[ESTIMATE_WHY])
{
    const llama_config *c = &s->layout->config;
    const double q = (double)c->heads * c->head_dim, k = (double)c->kv_heads * c->head_dim;
    memset(t, 0, sizeof *t);
    t->method = method;
    t->ranks = s->how.ranks;
    t->team = method == TITAN_NATIVE || method == TITAN_RING ? 1 : t->ranks;
    if (method == TITAN_ULYSSES || method == TITAN_UPIPE) {
        if (s->how.ring > 0)
            t->team = t->ranks / s->how.ring;
        else if (t->ranks > m->ranks_node)
            t->team = m->ranks_node;
    }
    if (t->team < 1 || t->ranks % t->team != 0) {
        snprintf(why, ESTIMATE_WHY, "%d ranks do not divide into teams of %d", t->ranks, t->team);
        return -1;
    }
    t->ring = t->ranks / t->team;
    t->rows = (double)s->tokens * (double)s->batch / t->ranks;
    t->x = t->rows * 2 * (double)c->dim;
    t->q = t->rows * 2 * q;
    t->k = t->rows * 2 * k;
    t->layers = (double)c->layers;
    t->layer = (double)c->dim * (2 * q + 2 * k + 3 * (double)c->hidden);
    return titan_kept(t, s, why) != 0 ? -1 : titan_stage(t, s, why);
}

/* Bytes of a stage while attention's backward runs. */
static inline double titan_attention(const titan_rank *t)
{
    const double q = t->qs, k = t->ks;
    double bytes = q + 2 * k;        /* Q, K, V */
    if (t->team > 1) bytes += 2 * q; /* O' and its gradient: O and dO are other tensors */
    /* dQ, dK, dV, and FlashAttention's f32 sums of dQ, and of dK and dV where heads share them */
    if (t->ring == 1) return bytes + q + 2 * k + 2 * q + (t->grouped ? 4 * k : 0);
    /* the same of a step, whose keys are half a block; f32 sums of dQ, dK, dV over the steps; those sums and K, V that
     * are being received */
    return bytes + q + k + 2 * q + (t->grouped ? 2 * k : 0) + 2 * q + 4 * k + 4 * k + 2 * k;
}

/* What a phase of the step holds beside what every phase does. */
typedef struct titan_phase {
    const char *name;
    double gathered, kept, stream, attention, mlp, loss;
} titan_phase;

static inline double titan_phase_bytes(const titan_phase *p)
{
    return p->gathered + p->kept + p->stream + p->attention + p->mlp + p->loss;
}

static inline double titan_params(const titan_rank *t, const llama_config *c)
{
    return (double)c->vocab * (double)c->dim * (c->tied ? 1 : 2) + t->layers * t->layer;
}

static inline void titan_memory(estimate *e, const titan_rank *t, const setting *s, const machine *m)
{
    const llama_config *c = &s->layout->config;
    const double table =
        6 * (double)c->vocab * (double)c->dim; /* of embedding or head: bf16 weight, f32 gradient */
    const double rope =
        (double)s->tokens * c->head_dim * 4; /* cos and sin of all positions, f32, on every rank */
    const double tile =
        6 * 2 * (double)c->dim * (double)c->hidden;           /* of D tokens: gate, up, product, gradients */
    const double states = 16 * titan_params(t, c) / t->ranks; /* f32 weights, gradients, moments, sharded */
    const double out = t->sac > 0 ? t->q : 0;                 /* the layer's, of attention */
    const double chunks = titan_chunks * TITAN_CHUNK / t->ranks * 2 * (double)c->heads * c->head_dim;
    const int fpdt = t->method == TITAN_FPDT, native = t->method == TITAN_NATIVE;
    const int away = t->kept < t->layers || native;
    /* The last layer's backward has all inputs that stay, and no table but with Native; where nothing comes back from the
     * host it has only its own weights gathered. The first layer's has none of the inputs, and the embedding's table */
    const double last = (native ? table : 0) + (away ? 3 : 1) * 2 * t->layer,
                 first = table + 3 * 2 * t->layer;
    const double held = t->kept * t->x, kept = held + last > first ? held : 0;
    const double gathered = held + last > first ? last : first;
    const double stream = (titan_stream + (away ? titan_fetched : 0)) * t->x, o = 2 * t->q;
    const double copies =
        t->stages > 1 ? t->x * (1 + (s->batch > 1 ? titan_batch : 0)) : 0; /* dX, and heads' */
    /* FPDT's O and its gradient go to the host by chunks; behind them stands dX */
    const titan_phase phases[] = {
        {"attention_backward", gathered, kept, stream + o, fpdt ? t->x : titan_attention(t) + copies, 0, 0},
        {"mlp_backward", gathered, kept, stream + (fpdt ? t->q : o), fpdt ? chunks : 0,
         tile + (fpdt ? 0 : titan_mlp * t->x), 0},
        {"loss", table, held, 0, 0, 0, titan_loss * t->x}};
    const double always = states + titan_fixed + rope + out;
    const titan_phase *peak = phases;
    int i;
    for (i = 0; i < 3; ++i) {
        estimate_phase(e, phases[i].name, always + titan_phase_bytes(&phases[i]));
        if (titan_phase_bytes(&phases[i]) > titan_phase_bytes(peak)) peak = &phases[i];
    }
    e->live = e->gpu = always + titan_phase_bytes(peak);
    estimate_add(e, "states", states);
    estimate_add(e, "gathered", peak->gathered);
    estimate_add(e, "workspaces", titan_fixed);
    estimate_add(e, "rope_table", rope);
    estimate_add(e, "checkpoints", peak->kept + out);
    estimate_add(e, "stream", peak->stream);
    estimate_add(e, "attention", peak->attention);
    estimate_add(e, "mlp", peak->mlp);
    estimate_add(e, "loss", peak->loss);
    e->host = ((t->layers - t->kept) * t->x + t->sac * t->q) *
              (t->ranks < m->ranks_node ? t->ranks : m->ranks_node);
}

static inline void titan_time(estimate *e, const titan_rank *t, const setting *s, const machine *m)
{
    const llama_config *c = &s->layout->config;
    const double embed = (double)c->vocab * (double)c->dim, others = 1 - 1.0 / t->ranks;
    const double seen = c->window > 0 && c->window < s->tokens ? (double)c->window : (double)s->tokens / 2;
    const double attn = 4 * t->rows * seen * c->heads * c->head_dim * t->layers; /* one forward */
    const double part = t->method == TITAN_NATIVE ? m->rate[MACHINE_NATIVE] : 1;
    /* Q and O, and K and V once a round, those of ranks without a head of their own more than once */
    const double qkvo = 2 * t->q + 2 * t->k * fmax(1, (double)t->team / c->kv_heads);
    estimate_work *w = &e->work;
    w->attn_fwd = attn * (2 - t->sac / t->layers) / part; /* the checkpointed layer is computed twice */
    w->attn_bwd = attn * 2.5 / part;
    w->products = t->rows * (8 * t->layers * t->layer + 6 * embed);
    if (t->team > 1) w->team = t->layers * 3 * qkvo * (1 - 1.0 / t->team);
    if (t->ring > 1) {
        const double kv = t->team > 1 ? t->stages * 2 * t->ks : 2 * t->k; /* sent round once a stage */
        w->ring = t->layers * (t->ring - 1) * (3 * kv + 2 * kv);
        /* f32 O in both forwards: read twice, written once, the step's in bf16; f32 dQ, dK, dV in the backward */
        w->merged = t->layers * (t->ring - 1) * (t->q / 2 * 28 + t->k / 2 * 16);
    }
    w->states = titan_params(t, c) * 8 * others;
    w->waited = 2 * ((t->layers - t->kept) * t->x + t->sac * t->q);
    w->stages = t->layers * 3 * (t->stages - 1);
    if (t->method == TITAN_FPDT)
        w->segments =
            t->layers * 6 * (t->q + 2 * t->k); /* out and in: forward, recomputed forward, backward */
    estimate_time(e, m, t->ranks, t->team, c->layers);
}

/* titan_estimate -- e->why says where it has no such setting */
static inline void titan_estimate(estimate *e, const setting *s, int method, const machine *m)
{
    titan_rank t;
    memset(e, 0, sizeof *e);
    if (titan_begin(&t, s, method, m, e->why) != 0) return;
    titan_memory(e, &t, s, m);
    titan_time(e, &t, s, m);
}

#endif
