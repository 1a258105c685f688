/* as.h -- another program's run: what it holds, and how long it takes
 *
 *     const program *p = as_program(s.as.program);      its row (as/NAME.h); NULL is this library
 *     as_estimate(&e, &s, &m);
 *
 * A sum of the tensors that the program is known to hold, with the numbers of its row: nothing of this library's exact
 * bytes enters. All bytes are of one rank; T = S * B / C are the tokens of a rank, of C that share a sequence; P
 * parameters. Heads are traded within a node, and nodes are a ring (8-ulysses-2-ring on 16 GPUs), unless a program trades
 * them over all ranks. What was measured, and how far off this is, says bench/measured.py.
 */
#ifndef PLAN_AS_H
#define PLAN_AS_H

#include "attention.h"
#include "estimate.h"

/* How ranks share a sequence: a ring of all; a team that trades heads, at once, by chunks of the sequence, in stages. */
enum { AS_RING, AS_ULYSSES, AS_FPDT, AS_UPIPE };

/* as_method -- a value of --method
 *   attention  the kernel that it runs
 *   part       the part of the kernel's rate that attention reaches, of a ring where ranks share a sequence; 0: MACHINE_NATIVE
 *   layer      seconds of starting a layer's kernels in a micro-batch, all passes; 0: the machine's
 *   stays      the layers' inputs stay on the GPU, and norms are in f32: `fetched` tensors more; the table of the embedding
 *              or the head is gathered all the time
 *   wide       a team is all ranks, on nodes too
 *   measured   how far plans are off what others measured, as bench/measured.py has it */
typedef struct as_method {
    const char *name, *measured;
    int kind, attention;
    double part, layer;
    int stays, wide;
} as_method;

enum { AS_METHODS = 5, AS_WHOLE = 0, AS_TILED = 1 };

/* program -- what another program does. Sizes are in tensors [T][D] of bf16 unless they say otherwise
 *   is          one line: its versions, and what its numbers are from
 *   methods     the default first; those behind it have no name
 *   loss, mlp   bits 1 << AS_WHOLE, 1 << AS_TILED: what it can; the default is the highest
 *   keeps       bits 1 << ACTIVATIONS_...: what it can keep where layers are computed again;  all: it can keep everything
 *   hosts       1: the optimizer's states may be in the host's memory, with gradients; 2: and weights
 *   fp8         it has products in fp8
 *   zeros       bits 1 << stage of --zero: 3 shards all states over all ranks, 1 the moments alone; the default is the lowest
 *   weights, gradients, moments   bytes a parameter
 *   stream      that live while attention's backward runs, beside O and its gradient
 *   fetched     more where inputs come back from the host: the fetched one, and the one that the backward computes again from
 *   ffn         tensors [T][F] while the MLP's backward runs: gate, up, product and gradients
 *   mlp_more    more while the MLP's backward runs: its norm, its result, part of its gradient
 *   loss_more   while the loss runs: the stream, its norm and their gradients
 *   logit       bytes of a logit where the loss is whole
 *   eager       more of Q and K that norms and RoPE leave, in what they have; 0: a layer's halves are computed again apart
 *   gathers     its ring gathers K and V of all ranks
 *   batch       more of staged heads where a batch has several sequences: heads of a stage are no block of memory then
 *   chunks      tensors [chunk][H * d] of FPDT: Q, K, V twice, O and its gradient twice, f32 dQ, dK, dV twice, and others
 *   positions   RoPE's table has all positions on every rank, not those of its tokens alone
 *   fixed       bytes of workspaces;  device  it has the context and NCCL's buffers too, which a machine has in reserve
 *   dense       the part of the machine's rate that its products and all that is no attention reach */
typedef struct program {
    const char *name, *is;
    as_method methods[AS_METHODS];
    int loss, mlp, keeps, all, hosts, zeros, fp8;
    double weights, gradients, moments;
    double stream, fetched, ffn, mlp_more, loss_more, logit, eager, gathers, batch, chunks, positions, fixed,
        device;
    double dense;
} program;

#include "as/alst.h"
#include "as/megatron.h"
#include "as/paper.h"
#include "as/torchtitan.h"
#include "as/trl.h"

/* In the order of --as, which begins with this library. */
static const program *const as_programs[] = {NULL,     &as_paper, &as_torchtitan,
                                             &as_alst, &as_trl,   &as_megatron};

static inline const program *as_program(int i)
{
    return as_programs[i];
}

static inline const as_method *as_method_of(const setting *s)
{
    return &as_program(s->as.program)->methods[s->as.method];
}

/* The kernel of its method, or the card's usual one where it does not run there. */
static inline int as_kernel(const setting *s, const machine *m)
{
    const int kernel = as_method_of(s)->attention;
    return kernel_runs(kernel, m->card) ? kernel : kernel_of(m->card);
}

enum { AS_CHUNK = 65536 /* tokens of a chunk of FPDT, its default */ };

/* Products in fp8 against bf16, with the time to make the operands: a guess, by torchtitan's 1.28 of whole steps. */
#define AS_FP8 1.5

/* Numbers of a setting that memory and time need. */
typedef struct as_rank {
    const program *p;
    const as_method *how;
    int ranks, team, ring;
    double all;     /* ranks of all replicas */
    double rows;    /* tokens of a rank */
    double x, q, k; /* bytes of [T][D], [T][H d], [T][Hkv d] in bf16 */
    double stages;  /* of a layer */
    double qs, ks;  /* of a stage: Q, and K with the copies that ranks without a head of their own need */
    int grouped;    /* a stage's query heads share key/value heads: FlashAttention sums them in f32 */
    double kept;    /* layers whose input stays on the device */
    double sac;     /* layers that keep attention's result */
    double layer, layers, params; /* parameters of a layer; layers; all parameters */
} as_rank;

/* Heads of a stage. */
static inline int as_stage(as_rank *t, const setting *s, char why[ESTIMATE_WHY])
{
    const llama_config *c = &s->layout->config;
    const int group = c->heads / c->kv_heads;
    const int chunk = t->how->kind != AS_UPIPE ? c->heads : s->how.chunk > 0 ? s->how.chunk : t->team;
    int mine, kv;
    if (chunk % t->team != 0 || chunk > c->heads || (t->how->kind == AS_UPIPE && c->heads % chunk != 0)) {
        snprintf(why, ESTIMATE_WHY, "%d heads do not divide by chunks of %d and by %d ranks", c->heads, chunk,
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

static inline void as_kept(as_rank *t, const setting *s)
{
    const activations_setting *a = &s->activations;
    if (t->how->stays || s->as.all || a->kind == ACTIVATIONS_AC)
        t->kept = t->layers;
    else if (a->kind == ACTIVATIONS_SAO)
        t->kept = (double)(s->layout->config.layers / a->k);
    else if (a->kind == ACTIVATIONS_SAC)
        t->sac = a->k > 0 ? (double)a->k : t->layers;
}

/* Whether the program has this setting. */
static inline int as_has(const setting *s, char why[ESTIMATE_WHY])
{
    const program *p = as_program(s->as.program);
    const as_method *how = as_method_of(s);
    const activations_setting *a = &s->activations;
    const int host = s->offload_optimizer + s->offload_weights;
    const char *what = NULL;
    char kept[ACTIVATIONS_TEXT], stage[16];
    if (!(p->loss >> s->as.loss & 1)) what = s->as.loss == AS_TILED ? "--loss tiled" : "--loss whole";
    if (!(p->mlp >> s->as.mlp & 1)) what = s->as.mlp == AS_TILED ? "--mlp tiled" : "--mlp whole";
    if (s->as.all && !p->all) what = "--keep-all";
    if (s->as.fp8 && !p->fp8) what = "--fp8";
    snprintf(stage, sizeof stage, "--zero %d", s->zero);
    if (!(p->zeros >> s->zero & 1)) what = stage;
    if (host > p->hosts) what = s->offload_weights ? "--offload-weights" : "--offload-optimizer";
    if (what != NULL) {
        snprintf(why, ESTIMATE_WHY, "--as %s has no %s", p->name, what);
    } else if (!(p->keeps >> a->kind & 1) || a->grad || (how->stays && a->kind != ACTIVATIONS_AC)) {
        snprintf(why, ESTIMATE_WHY, "--as %s --method %s has no --activations %s", p->name, how->name,
                 activations_text(kept, a));
    } else if (s->as.all && a->kind != ACTIVATIONS_AC) {
        snprintf(why, ESTIMATE_WHY, "--keep-all keeps all on the GPU: --activations ac");
    } else if ((s->how.chunk > 0 && how->kind != AS_UPIPE) ||
               (s->how.ring > 0 && how->kind != AS_UPIPE && how->kind != AS_ULYSSES)) {
        snprintf(why, ESTIMATE_WHY, "--%s would have no effect with --method %s",
                 s->how.chunk > 0 ? "chunk" : "ring", how->name);
    }
    return why[0] == '\0';
}

static inline int as_begin(as_rank *t, const setting *s, const machine *m, char why[ESTIMATE_WHY])
{
    const llama_config *c = &s->layout->config;
    const double q = (double)c->heads * c->head_dim, k = (double)c->kv_heads * c->head_dim;
    if (!as_has(s, why)) return -1;
    memset(t, 0, sizeof *t);
    t->p = as_program(s->as.program);
    t->how = as_method_of(s);
    t->ranks = s->how.ranks;
    t->all = setting_ranks(s);
    t->team = t->how->kind == AS_RING ? 1 : t->ranks;
    if (t->team > 1 && s->how.ring > 0)
        t->team = t->ranks / s->how.ring;
    else if (t->team > m->ranks_node && !t->how->wide)
        t->team = m->ranks_node;
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
    t->params = (double)c->vocab * (double)c->dim * (c->tied ? 1 : 2) + t->layers * t->layer;
    as_kept(t, s);
    return as_stage(t, s, why);
}

/* Bytes of a stage while attention's backward runs. */
static inline double as_attention(const as_rank *t)
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

/* Bytes of all that a layer's forward makes and its backward reads: inputs and norms of both halves, Q, K, V, O, and of the
 * MLP gate, up, the gate's activation and their product. */
static inline double as_layer(const as_rank *t, const llama_config *c)
{
    return 4 * t->x + 2 * t->q + 2 * t->k + 8 * t->rows * (double)c->hidden;
}

/* What a phase of the step holds beside what every phase does. */
typedef struct as_phase {
    const char *name;
    double gathered, kept, stream, attention, mlp, loss;
} as_phase;

static inline double as_phase_bytes(const as_phase *p)
{
    return p->gathered + p->kept + p->stream + p->attention + p->mlp + p->loss;
}

/* Bytes of the states on the GPU, and on the host. */
static inline double as_states(const as_rank *t, const setting *s, int host)
{
    const program *p = t->p;
    const double weights = (s->offload_weights == host) * p->weights,
                 gradients = (s->offload_optimizer == host) * p->gradients,
                 moments = (s->offload_optimizer == host) * p->moments;
    return ((weights + gradients) / (s->zero == 3 ? t->all : 1) + moments / t->all) * t->params;
}

static inline void as_memory(estimate *e, const as_rank *t, const setting *s, const machine *m)
{
    const llama_config *c = &s->layout->config;
    const program *p = t->p;
    const double table = (2 + p->gradients) * (double)c->vocab *
                         (double)c->dim; /* of embedding or head: bf16 weight, gradient */
    const double rope = (p->positions ? (double)s->tokens : t->rows) * c->head_dim * 4; /* cos and sin, f32 */
    const double rows = s->as.mlp == AS_TILED ? fmin((double)c->dim, t->rows) : t->rows;
    const double tile = p->ffn * 2 * rows * (double)c->hidden;
    const double logits = s->as.loss == AS_TILED ? 0 : p->logit * t->rows * (double)c->vocab;
    const double states = as_states(t, s, 0);
    const double out = t->sac > 0 ? t->q : 0; /* the layer's, of attention */
    const double chunks = p->chunks * AS_CHUNK / t->ranks * 2 * (double)c->heads * c->head_dim;
    const int fpdt = t->how->kind == AS_FPDT, stays = t->how->stays, away = t->kept < t->layers || stays;
    /* The last layer's backward has all inputs that stay, and no table unless it stays; where nothing comes back from the
     * host it has only its own weights gathered. The first layer's has none of the inputs, and the embedding's table */
    const double last = (stays ? table : 0) + (away ? 3 : 1) * 2 * t->layer, first = table + 3 * 2 * t->layer;
    const double held = t->kept * (s->as.all ? as_layer(t, c) : t->x), kept = held + last > first ? held : 0;
    const double gathered = held + last > first ? last : first;
    const double stream = (p->stream + (away ? p->fetched : 0)) * t->x, o = 2 * t->q;
    const double copies = t->stages > 1 ? t->x * (1 + (s->batch > 1 ? p->batch : 0)) : 0; /* dX, and heads' */
    /* a layer that is computed again as a whole has its heads while the MLP's backward runs */
    const double heads = p->eager * (t->q + t->k), saved = p->eager > 0 ? heads + t->q + 2 * t->k : 0;
    const double others = p->gathers && t->ring > 1 ? 2 * t->k * (t->ring - 1) : 0;
    /* FPDT's O and its gradient go to the host by chunks; behind them stands dX */
    const as_phase phases[] = {{"attention_backward", gathered, kept, stream + o,
                                fpdt ? t->x : as_attention(t) + copies + heads + others, 0, 0},
                               {"mlp_backward", gathered, kept, stream + (fpdt ? t->q : o),
                                fpdt ? chunks : saved, tile + (fpdt ? 0 : p->mlp_more * t->x), 0},
                               {"loss", table, held, 0, 0, 0, p->loss_more * t->x + logits}};
    const double always = states + p->fixed + rope + out;
    const as_phase *peak = phases;
    int i;
    for (i = 0; i < 3; ++i) {
        estimate_phase(e, phases[i].name, always + as_phase_bytes(&phases[i]));
        if (as_phase_bytes(&phases[i]) > as_phase_bytes(peak)) peak = &phases[i];
    }
    e->spared = p->device ? fmin(p->fixed, (double)m->reserve) : 0;
    e->live = e->gpu = always + as_phase_bytes(peak);
    estimate_add(e, "states", states);
    estimate_add(e, "gathered", peak->gathered);
    estimate_add(e, "workspaces", p->fixed);
    estimate_add(e, "rope_table", rope);
    estimate_add(e, "checkpoints", peak->kept + out);
    estimate_add(e, "stream", peak->stream);
    estimate_add(e, "attention", peak->attention);
    estimate_add(e, "mlp", peak->mlp);
    estimate_add(e, "loss", peak->loss);
    e->host = (as_states(t, s, 1) + (t->layers - t->kept) * t->x + t->sac * t->q) *
              (t->all < m->ranks_node ? t->all : m->ranks_node);
}

static inline void as_time(estimate *e, const as_rank *t, const setting *s, const machine *m)
{
    const llama_config *c = &s->layout->config;
    const double embed = (double)c->vocab * (double)c->dim, others = 1 - 1.0 / t->all;
    const double seen = c->window > 0 && c->window < s->tokens ? (double)c->window : (double)s->tokens / 2;
    const double attn = 4 * t->rows * seen * c->heads * c->head_dim * t->layers; /* one forward */
    const double reached = t->how->part > 0 ? t->how->part : m->rate[MACHINE_NATIVE],
                 part = t->how->kind == AS_RING && t->ranks == 1 ? 1 : reached;
    const double micro = (double)s->accumulate;
    const double once = s->as.all ? 6 : 8; /* FLOPs of a parameter and token: a layer is computed twice */
    const double away = s->offload_optimizer ? t->params / t->all : 0;
    /* Q and O, and K and V once a round, those of ranks without a head of their own more than once */
    const double qkvo = 2 * t->q + 2 * t->k * fmax(1, (double)t->team / c->kv_heads);
    estimate_work *w = &e->work;
    w->attn_fwd = micro * attn * (s->as.all ? 1 : 2 - t->sac / t->layers) / part;
    w->attn_bwd = micro * attn * 2.5 / part;
    attention_slow(w, s, m);
    w->products =
        micro * t->rows * (once * t->layers * t->layer / (s->as.fp8 ? AS_FP8 : 1) + 6 * embed) / t->p->dense;
    if (t->team > 1) w->team = micro * t->layers * 3 * qkvo * (1 - 1.0 / t->team);
    if (t->ring > 1) {
        const double kv = t->team > 1 ? t->stages * 2 * t->ks : 2 * t->k; /* sent round once a stage */
        w->ring = micro * t->layers * (t->ring - 1) * (3 * kv + 2 * kv);
        /* f32 O in both forwards: read twice, written once, the step's in bf16; f32 dQ, dK, dV in the backward */
        w->merged = micro * t->layers * (t->ring - 1) * (t->q / 2 * 28 + t->k / 2 * 16);
    }
    w->states = t->params * (4 * (s->zero == 3 ? micro : 1) + 4) * others;
    w->waited = micro * (2 * ((t->layers - t->kept) * t->x + t->sac * t->q) +
                         (s->offload_weights ? 3 * t->p->weights * t->params / t->all : 0));
    w->updated = away * (7 * 4 + 2);
    w->returned = away * (2 + t->p->gradients);
    w->stages = micro * t->layers * 3 * (t->stages - 1);
    if (t->how->kind == AS_FPDT)
        w->segments =
            micro * t->layers * 6 * (t->q + 2 * t->k); /* out and in: forward, recomputed forward, backward */
    w->started = t->how->layer > 0 ? t->how->layer : m->rate[MACHINE_LAYER];
    w->started *= micro * t->layers;
    estimate_time(e, m, (int)t->all, t->team);
}

/* as_estimate -- e->why says where it has no such setting */
static inline void as_estimate(estimate *e, const setting *s, const machine *m)
{
    as_rank t;
    memset(e, 0, sizeof *e);
    if (as_begin(&t, s, m, e->why) != 0) return;
    as_memory(e, &t, s, m);
    as_time(e, &t, s, m);
}

#endif
