/* layout.h -- the tensors of a Llama by Hugging Face's names, and where each lies
 *
 *     llama_layout layout;
 *     if (llama_layout_init(&layout, &config)) fail("too large");
 *     const llama_tensor *q = llama_find(&layout, LLAMA_WQ, 3);       layer 3's q_proj: weights + q->at
 *
 * The tensors lie in two groups, each one flat array: weights (matrices, of the storage type; embed, then wq
 * wk wv wo gate up down of every layer, then the head unless it is the embedding) and vectors (f32; norm1, q_norm
 * and k_norm, the biases bq bk bv bo, norm2, the halves' post_norm1 and post_norm2 of every layer, then the last norm;
 * what the model has of these). With an output gate wg follows wq. A layer of linear attention has its matrices in the
 * place of wq wk wv wo, and in that of q_norm and k_norm what its rule reads in f32, the convolution too. With a latent
 * q_down q_up (or wq) kv_down kv_up wo are there, and the norms of what both downs give.
 */
#ifndef LLAMA_LAYOUT_H
#define LLAMA_LAYOUT_H

#include "../../../upipe/upipe_base.h"
#include "families.h"

typedef enum llama_kind {
    LLAMA_EMBED,
    LLAMA_NORM1,
    LLAMA_WQ,
    LLAMA_WG, /* of the gate of attention's output */
    LLAMA_WK,
    LLAMA_WV,
    LLAMA_WO,
    LLAMA_Q_DOWN, /* of what comes from a latent: to what Q is made of, to Q, to the latent and to K and V */
    LLAMA_Q_UP,
    LLAMA_KV_DOWN,
    LLAMA_KV_UP,
    LLAMA_LINEAR_QKV,
    LLAMA_LINEAR_Z,
    LLAMA_LINEAR_B,
    LLAMA_LINEAR_A,
    LLAMA_LINEAR_OUT,
    LLAMA_CONV,
    LLAMA_A_LOG,
    LLAMA_DT_BIAS,
    LLAMA_LINEAR_NORM,
    LLAMA_QNORM,
    LLAMA_KNORM,
    LLAMA_Q_DOWN_NORM,
    LLAMA_KV_DOWN_NORM,
    LLAMA_BQ,
    LLAMA_BK,
    LLAMA_BV,
    LLAMA_B_Q_DOWN,
    LLAMA_B_KV_DOWN,
    LLAMA_BO,
    LLAMA_NORM2,
    LLAMA_POST_NORM1,
    LLAMA_POST_NORM2,
    LLAMA_GATE,
    LLAMA_UP,
    LLAMA_DOWN,
    LLAMA_NORM,
    LLAMA_HEAD,
    LLAMA_LORA_A, /* of each of llama_lora_kinds in turn */
    LLAMA_LORA_B = LLAMA_LORA_A + 11,
    LLAMA_KINDS = LLAMA_LORA_B + 11
} llama_kind;

enum { LLAMA_LORAS = LLAMA_LORA_B - LLAMA_LORA_A, LLAMA_LORAS_ATTENTION = 8 };

static const llama_kind llama_lora_kinds[LLAMA_LORAS] = {LLAMA_WQ,   LLAMA_WK,      LLAMA_WV,    LLAMA_Q_DOWN,
                                                         LLAMA_Q_UP, LLAMA_KV_DOWN, LLAMA_KV_UP, LLAMA_WO,
                                                         LLAMA_GATE, LLAMA_UP,      LLAMA_DOWN};
static const char *const llama_lora_parts[LLAMA_LORAS] = {
    "self_attn.q_proj",    "self_attn.k_proj",   "self_attn.v_proj",
    "self_attn.q_a_proj",  "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_b_proj", "self_attn.o_proj",   "mlp.gate_proj",
    "mlp.up_proj",         "mlp.down_proj"};

/* llama_lora -- adapters of low rank: a target's matrix is W + alpha / rank * B * A
 *   rank     rows of A, columns of B; 0: there are none
 *   targets  bits of llama_lora_kinds
 */
typedef struct llama_lora {
    int rank;
    unsigned targets;
    double alpha;
} llama_lora;

/* The first of the targets that a model lacks, by its name; NULL: it has them all. */
static inline const char *llama_lora_lacks(const llama_config *c, unsigned targets)
{
    int i;
    for (i = 0; i < LLAMA_LORAS; ++i) {
        const llama_kind kind = llama_lora_kinds[i];
        const int has = kind == LLAMA_WQ                               ? c->q_rank == 0
                        : kind == LLAMA_WK || kind == LLAMA_WV         ? c->kv_rank == 0
                        : kind == LLAMA_Q_DOWN || kind == LLAMA_Q_UP   ? c->q_rank > 0
                        : kind == LLAMA_KV_DOWN || kind == LLAMA_KV_UP ? c->kv_rank > 0
                                                                       : 1;
        if (targets >> i & 1 && !has) return strchr(llama_lora_parts[i], '.') + 1;
    }
    return NULL;
}

/* Groups of tensors. */
enum { LLAMA_WEIGHTS, LLAMA_VECTORS, LLAMA_GROUPS };

typedef struct llama_tensor {
    char name[80];      /* Hugging Face's: model.layers.3.self_attn.q_proj.weight, or .bias */
    int64_t rows, cols; /* a vector is [rows], cols = 1; of a convolution these are its taps */
    int is_vector;      /* which group: weights (matrices, storage type) or vectors (f32) */
    int64_t at, n;      /* first element in its group, elements */
    int64_t drawn;      /* the same where nothing is frozen: a new model's values go by it */
    int64_t layer;      /* -1 outside layers */
    llama_kind kind;
    int unit;        /* of the weights group; -1 for a vector */
    int frozen;      /* its group is that of what is not trained (frozen.h) */
    int lora;        /* tensors from this one to its adapter's A, behind which B is; 0: it has none */
    int64_t lora_at; /* first element among those of its unit that have an adapter */
    /* Of a stored tensor: the file has blocks of so many elements of the tensor's two halves in turn; 0: its order */
    int64_t turns;
} llama_tensor;

typedef struct llama_layout {
    llama_config config;
    llama_tensor *tensors; /* [n]: the weights group in its order, then the vectors */
    int n;
    /* The same as files have them: a family may store neighbours of one unit as one tensor, their rows after each
     * other. */
    llama_tensor *stored; /* [stored_n]; of a family that stores all alone, tensors */
    int stored_n;
    int64_t weights, vectors; /* elements of both groups */
    /* The weights group in units that are used together: the embedding, the attention half and the MLP half of each
     * layer, the head where it is not tied. Unit u is elements first[u] .. first[u + 1] - 1. */
    int64_t *first;
    int units;
    int64_t vectors_first[2]; /* the vectors are one unit */
    /* What is not trained lies in groups of its own, in the same units: of both, elements and where units begin. */
    int64_t frozen[LLAMA_GROUPS], *frozen_first, frozen_vectors_first[2];
    /* [1 + layers][LLAMA_KINDS]: 1 + the tensor's number, those outside layers first; 0: there is none */
    int *place;
    llama_lora lora;
    int64_t adapted[2],
        adapters; /* elements of a layer's two units that have adapters; of all adapters so far */
} llama_layout;
static inline int llama_is_bias(llama_kind kind)
{
    return kind >= LLAMA_BQ && kind <= LLAMA_BO;
}

static inline int llama_is_adapter(llama_kind kind)
{
    return kind >= LLAMA_LORA_A;
}

/* A norm of the stream, of a half's result, of q or k. */
static inline int llama_is_norm(llama_kind kind)
{
    return kind == LLAMA_NORM1 || kind == LLAMA_QNORM || kind == LLAMA_KNORM || kind == LLAMA_NORM2 ||
           kind == LLAMA_POST_NORM1 || kind == LLAMA_POST_NORM2 || kind == LLAMA_NORM ||
           kind == LLAMA_Q_DOWN_NORM || kind == LLAMA_KV_DOWN_NORM;
}

static inline int llama_is_vector(llama_kind kind)
{
    return llama_is_bias(kind) || llama_is_norm(kind) || (kind >= LLAMA_CONV && kind <= LLAMA_LINEAR_NORM);
}

/* Where the number of a tensor stands, layer -1 outside layers. */
static inline int *llama_place_of(const llama_layout *l, llama_kind kind, int64_t layer)
{
    return &l->place[(layer + 1) * LLAMA_KINDS + (int)kind];
}

/* The tensor of this kind; NULL if the layer, or the model outside layers, has none. */
static inline const llama_tensor *llama_find(const llama_layout *l, llama_kind kind, int64_t layer)
{
    const int number = layer < -1 || layer >= l->config.layers ? 0 : *llama_place_of(l, kind, layer);
    return number > 0 ? &l->tensors[number - 1] : NULL;
}

static inline int llama_add(llama_layout *l, llama_kind kind, int64_t layer, const char *part, int64_t rows,
                            int64_t cols)
{
    llama_tensor *t = &l->tensors[l->n];
    int64_t *group;
    t->is_vector = llama_is_vector(kind);
    group = t->is_vector ? &l->vectors : &l->weights;
    t->kind = kind;
    t->layer = layer;
    t->rows = rows;
    t->cols = cols;
    t->at = *group;
    t->drawn =
        llama_is_adapter(kind) ? (INT64_C(1) << 60) + l->adapters : *group - (t->is_vector ? 0 : l->adapters);
    if (layer < 0)
        snprintf(t->name, sizeof t->name, "%s.weight", part);
    else
        snprintf(t->name, sizeof t->name, "model.layers.%" PRId64 ".%s%s", layer, part,
                 llama_is_bias(kind)                            ? ".bias"
                 : kind == LLAMA_A_LOG || kind == LLAMA_DT_BIAS ? ""
                 : kind >= LLAMA_LORA_B                         ? ".lora_B.weight"
                 : llama_is_adapter(kind)                       ? ".lora_A.weight"
                                                                : ".weight");
    *llama_place_of(l, kind, layer) = l->n + 1;
    /* bytes too are to stay within 63 bits */
    if (!upipe_mul(&t->n, rows, cols) || t->n > INT64_MAX / 16 - *group) return -1;
    t->unit = -1;
    if (!t->is_vector) {
        if (kind == LLAMA_EMBED || kind == LLAMA_WQ || kind == LLAMA_Q_DOWN || kind == LLAMA_LINEAR_QKV ||
            kind == LLAMA_GATE || kind == LLAMA_HEAD)
            l->first[l->units++] = t->at;
        t->unit = l->units - 1;
        l->first[l->units] = t->at + t->n;
    }
    *group += t->n;
    if (llama_is_adapter(kind)) l->adapters += t->n;
    ++l->n;
    return 0;
}

/* Adapters of a unit's matrices: numbers first .. end - 1 of llama_lora_kinds. */
static inline int llama_add_adapters(llama_layout *l, int64_t layer, int first, int end)
{
    int64_t *const adapted = &l->adapted[first > 0];
    int i;
    for (i = first, *adapted = 0; i < end; ++i) {
        llama_tensor *t;
        if (!(l->lora.targets >> i & 1)) continue;
        t = &l->tensors[*llama_place_of(l, llama_lora_kinds[i], layer) - 1];
        t->lora = (int)(&l->tensors[l->n] - t);
        t->lora_at = *adapted;
        *adapted += t->n;
        if (llama_add(l, (llama_kind)(LLAMA_LORA_A + i), layer, llama_lora_parts[i], l->lora.rank, t->cols) ||
            llama_add(l, (llama_kind)(LLAMA_LORA_B + i), layer, llama_lora_parts[i], t->rows, l->lora.rank))
            return -1;
    }
    return 0;
}

/* Names of norm1, norm2, post_norm1 and post_norm2 by llama_norms. */
static const char *const llama_norm_names[][4] = {
    {"input_layernorm", "post_attention_layernorm", NULL, NULL},
    {"input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"},
    {"input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm",
     "post_feedforward_layernorm"},
    {NULL, NULL, "post_attention_layernorm", "post_feedforward_layernorm"}};

/* Columns of all heads of v, and of the convolution, of linear attention. */
static inline int64_t llama_linear_values(const llama_config *c)
{
    return c->linear_heads * c->linear_value_dim;
}

static inline int64_t llama_linear_channels(const llama_config *c)
{
    return 2 * c->linear_key_heads * c->linear_key_dim + llama_linear_values(c);
}

/* A layer's matrices of attention that comes from a latent. */
static inline int llama_add_latent(llama_layout *l, int64_t i)
{
    const llama_config *c = &l->config;
    const int64_t q = (int64_t)c->heads * c->head_dim;
    return (c->q_rank > 0 ? llama_add(l, LLAMA_Q_DOWN, i, "self_attn.q_a_proj", c->q_rank, c->dim) ||
                                llama_add(l, LLAMA_Q_UP, i, "self_attn.q_b_proj", q, c->q_rank)
                          : llama_add(l, LLAMA_WQ, i, "self_attn.q_proj", q, c->dim)) ||
           llama_add(l, LLAMA_KV_DOWN, i, "self_attn.kv_a_proj_with_mqa", c->kv_rank + c->turned_dim,
                     c->dim) ||
           llama_add(l, LLAMA_KV_UP, i, "self_attn.kv_b_proj", (int64_t)c->heads * (c->still_dim + c->v_dim),
                     c->kv_rank) ||
           llama_add(l, LLAMA_WO, i, "self_attn.o_proj", c->dim, (int64_t)c->heads * c->v_dim) ||
           llama_add_adapters(l, i, 0, LLAMA_LORAS_ATTENTION);
}

/* And its vectors. Q that is projected at once has no bias, as transformers has it. */
static inline int llama_add_latent_vectors(llama_layout *l, int64_t i)
{
    const llama_config *c = &l->config;
    const int biased = c->attention_bias != LLAMA_BIAS_NONE;
    return (c->q_rank > 0 && llama_add(l, LLAMA_Q_DOWN_NORM, i, "self_attn.q_a_layernorm", c->q_rank, 1)) ||
           llama_add(l, LLAMA_KV_DOWN_NORM, i, "self_attn.kv_a_layernorm", c->kv_rank, 1) ||
           (biased && c->q_rank > 0 && llama_add(l, LLAMA_B_Q_DOWN, i, "self_attn.q_a_proj", c->q_rank, 1)) ||
           (biased && (llama_add(l, LLAMA_B_KV_DOWN, i, "self_attn.kv_a_proj_with_mqa",
                                 c->kv_rank + c->turned_dim, 1) ||
                       llama_add(l, LLAMA_BO, i, "self_attn.o_proj", c->dim, 1)));
}

/* A layer's matrices of attention. */
static inline int llama_add_attention(llama_layout *l, int64_t i)
{
    const llama_config *c = &l->config;
    const int64_t q = (int64_t)c->heads * c->head_dim, kv = (int64_t)c->kv_heads * c->head_dim,
                  values = llama_linear_values(c);
    if (llama_is_linear(c, i))
        return llama_add(l, LLAMA_LINEAR_QKV, i, "linear_attn.in_proj_qkv", llama_linear_channels(c),
                         c->dim) ||
               llama_add(l, LLAMA_LINEAR_Z, i, "linear_attn.in_proj_z", values, c->dim) ||
               llama_add(l, LLAMA_LINEAR_B, i, "linear_attn.in_proj_b", c->linear_heads, c->dim) ||
               llama_add(l, LLAMA_LINEAR_A, i, "linear_attn.in_proj_a", c->linear_heads, c->dim) ||
               llama_add(l, LLAMA_LINEAR_OUT, i, "linear_attn.out_proj", c->dim, values);
    if (c->kv_rank > 0) return llama_add_latent(l, i);
    return llama_add(l, LLAMA_WQ, i, "self_attn.q_proj", q, c->dim) ||
           (llama_families[c->family].fused & LLAMA_FUSED_GATE &&
            llama_add(l, LLAMA_WG, i, "self_attn.g_proj", q, c->dim)) ||
           llama_add(l, LLAMA_WK, i, "self_attn.k_proj", kv, c->dim) ||
           llama_add(l, LLAMA_WV, i, "self_attn.v_proj", kv, c->dim) ||
           llama_add(l, LLAMA_WO, i, "self_attn.o_proj", c->dim, q) ||
           llama_add_adapters(l, i, 0, LLAMA_LORAS_ATTENTION);
}

/* And its vectors, between the norms of both halves. */
static inline int llama_add_attention_vectors(llama_layout *l, int64_t i)
{
    const llama_config *c = &l->config;
    const int64_t q = (int64_t)c->heads * c->head_dim, kv = (int64_t)c->kv_heads * c->head_dim;
    if (llama_is_linear(c, i))
        return llama_add(l, LLAMA_CONV, i, "linear_attn.conv1d", llama_linear_channels(c), c->linear_taps) ||
               llama_add(l, LLAMA_A_LOG, i, "linear_attn.A_log", c->linear_heads, 1) ||
               llama_add(l, LLAMA_DT_BIAS, i, "linear_attn.dt_bias", c->linear_heads, 1) ||
               llama_add(l, LLAMA_LINEAR_NORM, i, "linear_attn.norm", c->linear_value_dim, 1);
    if (c->kv_rank > 0) return llama_add_latent_vectors(l, i);
    return (c->qk_norm && (llama_add(l, LLAMA_QNORM, i, "self_attn.q_norm", c->head_dim, 1) ||
                           llama_add(l, LLAMA_KNORM, i, "self_attn.k_norm", c->head_dim, 1))) ||
           (c->attention_bias != LLAMA_BIAS_NONE && (llama_add(l, LLAMA_BQ, i, "self_attn.q_proj", q, 1) ||
                                                     llama_add(l, LLAMA_BK, i, "self_attn.k_proj", kv, 1) ||
                                                     llama_add(l, LLAMA_BV, i, "self_attn.v_proj", kv, 1))) ||
           (c->attention_bias == LLAMA_BIAS_QKVO && llama_add(l, LLAMA_BO, i, "self_attn.o_proj", c->dim, 1));
}

static inline int llama_add_all(llama_layout *l)
{
    const llama_config *c = &l->config;
    const char *const *norms = llama_norm_names[llama_families[c->family].norms];
    int64_t i;
    if (llama_add(l, LLAMA_EMBED, -1, "model.embed_tokens", c->vocab, c->dim)) return -1;
    for (i = 0; i < c->layers; ++i)
        if (llama_add_attention(l, i) || llama_add(l, LLAMA_GATE, i, "mlp.gate_proj", c->hidden, c->dim) ||
            llama_add(l, LLAMA_UP, i, "mlp.up_proj", c->hidden, c->dim) ||
            llama_add(l, LLAMA_DOWN, i, "mlp.down_proj", c->dim, c->hidden) ||
            llama_add_adapters(l, i, LLAMA_LORAS_ATTENTION, LLAMA_LORAS))
            return -1;
    if (!c->tied && llama_add(l, LLAMA_HEAD, -1, "lm_head", c->vocab, c->dim)) return -1;
    for (i = 0; i < c->layers; ++i) {
        if (norms[0] != NULL && llama_add(l, LLAMA_NORM1, i, norms[0], c->dim, 1)) return -1;
        if (llama_add_attention_vectors(l, i)) return -1;
        if (norms[1] != NULL && llama_add(l, LLAMA_NORM2, i, norms[1], c->dim, 1)) return -1;
        if (norms[2] != NULL && (llama_add(l, LLAMA_POST_NORM1, i, norms[2], c->dim, 1) ||
                                 llama_add(l, LLAMA_POST_NORM2, i, norms[3], c->dim, 1)))
            return -1;
    }
    return llama_add(l, LLAMA_NORM, -1, "model.norm", c->dim, 1);
}

/* Whether the tensor's rows follow those of the one before in one stored tensor. */
static inline int llama_is_joined(const llama_layout *l, llama_kind kind)
{
    const int fused = llama_families[l->config.family].fused;
    return (fused & LLAMA_FUSED_QKV && (kind == LLAMA_WK || kind == LLAMA_WV)) ||
           (fused & LLAMA_FUSED_MLP && kind == LLAMA_UP) || kind == LLAMA_WG;
}

/* Fills stored. */
static inline void llama_store_all(llama_layout *l)
{
    const int fused = llama_families[l->config.family].fused;
    int i;
    for (i = 0; i < l->n; ++i) {
        llama_tensor *to = &l->stored[l->stored_n];
        if (llama_is_joined(l, l->tensors[i].kind)) {
            to[-1].rows += l->tensors[i].rows;
            to[-1].n += l->tensors[i].n;
            continue;
        }
        *to = l->tensors[i];
        if (to->kind == LLAMA_WQ && fused & LLAMA_FUSED_QKV)
            snprintf(to->name, sizeof to->name, "model.layers.%" PRId64 ".self_attn.qkv_proj.weight",
                     to->layer);
        if (to->kind == LLAMA_WQ && fused & LLAMA_FUSED_GATE) to->turns = l->config.head_dim * l->config.dim;
        if (to->kind == LLAMA_GATE && fused & LLAMA_FUSED_MLP)
            snprintf(to->name, sizeof to->name, "model.layers.%" PRId64 ".mlp.gate_up_proj.weight",
                     to->layer);
        ++l->stored_n;
    }
}

static inline void llama_layout_free(llama_layout *l)
{
    if (l->stored != l->tensors) free(l->stored);
    free(l->tensors);
    free(l->first);
    free(l->place);
    memset(l, 0, sizeof *l);
}

/* llama_layout_init, llama_layout_adapted -- names, shapes and places of all tensors
 *   lora  adapters beside the model's own tensors, of a family that stores each matrix alone, and of targets that the model
 *         has (llama_lora_lacks); NULL: none
 *
 * Returns -1 where a size is not positive, there are more than LLAMA_LAYERS_MAX layers, or the bytes leave 63 bits;
 * LLAMA_LAYOUT_MEMORY where there is no memory for the table. Then nothing is to be freed.
 */
enum { LLAMA_LAYOUT_MEMORY = -2 };

static inline int llama_layout_adapted(llama_layout *l, const llama_config *c, const llama_lora *lora)
{
    const size_t most = (size_t)c->layers * (17 + 2 * LLAMA_LORAS) + 3;
    int memory;
    memset(l, 0, sizeof *l);
    if (lora != NULL) l->lora = *lora;
    if (c->layers < 1 || c->layers > LLAMA_LAYERS_MAX || c->dim < 1 || c->hidden < 1 || c->vocab < 1 ||
        c->heads < 1 || c->kv_heads < 1 || c->head_dim < 1)
        return -1;
    l->config = *c;
    l->vectors_first[0] = 0;
    l->tensors = (llama_tensor *)calloc(most, sizeof *l->tensors);
    l->first = (int64_t *)calloc(2 * ((size_t)c->layers * 2 + 3), sizeof *l->first);
    l->frozen_first = l->first + (c->layers * 2 + 3);
    l->place = (int *)calloc(((size_t)c->layers + 1) * LLAMA_KINDS, sizeof *l->place);
    l->stored = l->tensors;
    if (llama_families[c->family].fused) l->stored = (llama_tensor *)calloc(most, sizeof *l->stored);
    memory = l->tensors != NULL && l->first != NULL && l->place != NULL && l->stored != NULL;
    if (memory && llama_add_all(l) == 0) {
        l->vectors_first[1] = l->vectors;
        if (l->stored != l->tensors)
            llama_store_all(l);
        else
            l->stored_n = l->n;
        return 0;
    }
    llama_layout_free(l);
    return memory ? -1 : LLAMA_LAYOUT_MEMORY;
}

static inline int llama_layout_init(llama_layout *l, const llama_config *c)
{
    return llama_layout_adapted(l, c, NULL);
}

#endif
