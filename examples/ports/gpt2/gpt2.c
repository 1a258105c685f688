/* gpt2.c -- a small GPT-2 that trains: plain C, and with -DUPIPE the same over ranks that share the sequences
 *
 * A trainer with layers of its own: fused Q, K, V with biases, learned positions, layer norms, GELU, a tied head. Each step
 * has a batch of sequences and a validation; at the end the model continues a sequence. What UPipe adds stands between
 * #ifdef UPIPE and #else or #endif, and nowhere else. Prints a step's loss and validation loss, and the tokens that follow.
 *
 *     gpt2                              the plain form
 *     gpt2_upipe RANKS CHUNK            the ranks are threads; CHUNK 0: UPipe, 4: Ulysses
 *
 * docs/porting.md walks through it.
 */
#ifdef UPIPE
#include "upipe/net/upipe_net_threads_session.h"
#include "upipe/cpu/upipe_cpu.h"
#endif
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LAYERS = 2,
    HEADS = 4,
    HEAD_DIM = 32,
    DIM = HEADS * HEAD_DIM,
    HIDDEN = 4 * DIM,
    VOCAB = 64,
    TOKENS = 32,
    BATCH = 2,
    ROWS = BATCH * TOKENS
};
enum { STEPS = 5, PROMPT = 20, SAMPLED = 6 };

/* Parameters, and their gradients: one flat array each. */
typedef struct layer_weights {
    float norm1[2][DIM], qkv[3 * DIM * DIM], qkv_bias[3 * DIM], out[DIM * DIM], out_bias[DIM];
    float norm2[2][DIM], up[HIDDEN * DIM], up_bias[HIDDEN], down[DIM * HIDDEN], down_bias[DIM];
} layer_weights;

typedef struct weights {
    float tokens[VOCAB * DIM], positions[TOKENS * DIM], norm[2][DIM];
    layer_weights layer[LAYERS];
} weights;

enum { WEIGHTS = sizeof(weights) / sizeof(float) };

/* What a layer keeps for its backward; x[LAYERS] is the input of the last norm. */
typedef struct kept {
    float x[ROWS * DIM], norm1[ROWS * DIM], qkv[ROWS * 3 * DIM], heads[ROWS * DIM];
    float mid[ROWS * DIM], norm2[ROWS * DIM], up[ROWS * HIDDEN], gelu[ROWS * HIDDEN];
} kept;

/* A part of each sequence, one behind the other, and who computes it: all of them in the plain form. */
typedef struct part {
    int rows, sequence[ROWS], position[ROWS], input[ROWS], target[ROWS];
    int evaluates; /* nothing is kept for a backward */
    kept layer[LAYERS + 1];
#ifdef UPIPE
    upipe_session *session;
    upipe_saved saved[LAYERS];
#endif
} part;

/* A row more: `row` of the whole batch. */
static void add_row(part *p, int64_t row)
{
    p->sequence[p->rows] = (int)(row / TOKENS);
    p->position[p->rows++] = (int)(row % TOKENS);
}

/* y [n][out] = x [n][in] * w [out][in]^T + b */
static void linear(float *y, const float *x, const float *w, const float *b, int n, int in, int out)
{
    for (int i = 0; i < n; ++i)
        for (int j = 0; j < out; ++j) {
            float sum = b[j];
            for (int k = 0; k < in; ++k) sum += x[i * in + k] * w[j * in + k];
            y[i * out + j] = sum;
        }
}

/* dx =, dw +=, db += */
static void linear_bwd(float *dx, float *dw, float *db, const float *dy, const float *x, const float *w,
                       int n, int in, int out)
{
    memset(dx, 0, (size_t)(n * in) * sizeof *dx);
    for (int i = 0; i < n; ++i)
        for (int j = 0; j < out; ++j) {
            const float g = dy[i * out + j];
            db[j] += g;
            for (int k = 0; k < in; ++k) {
                dw[j * in + k] += g * x[i * in + k];
                dx[i * in + k] += g * w[j * in + k];
            }
        }
}

static float norm_sums(const float *x, float *mean)
{
    float sum = 0, squares = 0;
    for (int k = 0; k < DIM; ++k) sum += x[k] / DIM;
    for (int k = 0; k < DIM; ++k) squares += (x[k] - sum) * (x[k] - sum) / DIM;
    *mean = sum;
    return 1 / sqrtf(squares + 1e-5f);
}

static void norm(float *y, const float *x, float w[2][DIM], int n)
{
    for (int i = 0; i < n; ++i, x += DIM, y += DIM) {
        float mean, scale = norm_sums(x, &mean);
        for (int k = 0; k < DIM; ++k) y[k] = (x[k] - mean) * scale * w[0][k] + w[1][k];
    }
}

/* dx +=, dw += */
static void norm_bwd(float *dx, float dw[2][DIM], const float *dy, const float *x, float w[2][DIM], int n)
{
    for (int i = 0; i < n; ++i, x += DIM, dx += DIM, dy += DIM) {
        float mean, scale = norm_sums(x, &mean), sum = 0, dot = 0;
        for (int k = 0; k < DIM; ++k) {
            const float unit = (x[k] - mean) * scale, g = dy[k] * w[0][k];
            dw[0][k] += dy[k] * unit, dw[1][k] += dy[k];
            sum += g / DIM, dot += g * unit / DIM;
        }
        for (int k = 0; k < DIM; ++k) dx[k] += scale * (dy[k] * w[0][k] - sum - (x[k] - mean) * scale * dot);
    }
}

/* ---- attention ---- */

#ifndef UPIPE
/* Head h of query i over keys 0 .. i: o, or from its gradient g dq, dk and dv (+=). */
static void attend(float *o, const float *g, float *dqkv, const float *qkv, int i, int h)
{
    float w[TOKENS], top = -1e30f, total = 0, delta = 0;
    const float scale = 1 / sqrtf(HEAD_DIM), *q = qkv + i * 3 * DIM + h * HEAD_DIM;
    for (int j = 0; j <= i; ++j) {
        const float *k = qkv + j * 3 * DIM + DIM + h * HEAD_DIM;
        w[j] = 0;
        for (int c = 0; c < HEAD_DIM; ++c) w[j] += scale * q[c] * k[c];
        if (w[j] > top) top = w[j];
    }
    for (int j = 0; j <= i; ++j) total += w[j] = expf(w[j] - top);
    for (int c = 0; c < HEAD_DIM; ++c) {
        float sum = 0;
        for (int j = 0; j <= i; ++j)
            sum += (w[j] /= c == 0 ? total : 1) * qkv[j * 3 * DIM + 2 * DIM + h * HEAD_DIM + c];
        o[i * DIM + h * HEAD_DIM + c] = sum;
        if (g != NULL) delta += sum * g[i * DIM + h * HEAD_DIM + c];
    }
    for (int j = 0; g != NULL && j <= i; ++j) {
        const int at = j * 3 * DIM + h * HEAD_DIM;
        float slope = -delta;
        for (int c = 0; c < HEAD_DIM; ++c) slope += g[i * DIM + h * HEAD_DIM + c] * qkv[at + 2 * DIM + c];
        slope *= w[j] * scale;
        for (int c = 0; c < HEAD_DIM; ++c) {
            dqkv[i * 3 * DIM + h * HEAD_DIM + c] += slope * qkv[at + DIM + c];
            dqkv[at + DIM + c] += slope * q[c];
            dqkv[at + 2 * DIM + c] += w[j] * g[i * DIM + h * HEAD_DIM + c];
        }
    }
}
#endif

/* heads = attention of layer l's qkv. Returns 0, or an error. */
static int attention_fwd(part *p, int l)
{
    float *heads = p->layer[l].heads, *qkv = p->layer[l].qkv;
#ifdef UPIPE
    const upipe_qkv a = upipe_qkv_fused(&p->session->call, qkv, heads, UPIPE_F32);
    if (p->evaluates) return upipe_qkv_eval(&p->session->ctx, &a) != UPIPE_OK;
    return upipe_qkv_fwd(&p->session->ctx, &a, &p->saved[l]) != UPIPE_OK;
#else
    for (int i = 0; i < p->rows; ++i)
        for (int h = 0; h < HEADS; ++h) {
            const int first = p->sequence[i] * TOKENS;
            attend(heads + first * DIM, NULL, NULL, qkv + first * 3 * DIM, i - first, h);
        }
    return 0;
#endif
}

static int attention_bwd(part *p, int l, float *dqkv, float *dheads)
{
    float *heads = p->layer[l].heads, *qkv = p->layer[l].qkv;
#ifdef UPIPE
    const upipe_qkv a = upipe_qkv_fused(&p->session->call, qkv, heads, UPIPE_F32);
    const upipe_qkv d = upipe_qkv_fused(&p->session->call, dqkv, dheads, UPIPE_F32);
    const upipe_qkv_grads g = upipe_qkv_grads_of(&d);
    return upipe_qkv_bwd(&p->session->ctx, &a, &g, &p->saved[l]) != UPIPE_OK;
#else
    memset(dqkv, 0, (size_t)p->rows * 3 * DIM * sizeof *dqkv);
    for (int i = 0; i < p->rows; ++i)
        for (int h = 0; h < HEADS; ++h) {
            const int first = p->sequence[i] * TOKENS, at = first * 3 * DIM;
            attend(heads + first * DIM, dheads + first * DIM, dqkv + at, qkv + at, i - first, h);
        }
    return 0;
#endif
}

/* ---- the model ---- */

static int token(int sequence, int position)
{
    return (position * position * 7 + position / 3 + 11 * sequence) % VOCAB;
}

/* Sequences from number `first` on. */
static void fill(part *p, int first)
{
    for (int i = 0; i < p->rows; ++i) {
        p->input[i] = token(first + p->sequence[i], p->position[i]);
        p->target[i] = token(first + p->sequence[i], p->position[i] + 1);
    }
}

static float gelu_slope(float x, float *y)
{
    const float c = 0.7978845608f, t = tanhf(c * (x + 0.044715f * x * x * x));
    *y = 0.5f * x * (1 + t);
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * c * (1 + 3 * 0.044715f * x * x);
}

static int layer_fwd(part *p, int l, weights *w)
{
    layer_weights *b = &w->layer[l];
    kept *k = &p->layer[l];
    const int n = p->rows;
    int i;
    norm(k->norm1, k->x, b->norm1, n);
    linear(k->qkv, k->norm1, b->qkv, b->qkv_bias, n, DIM, 3 * DIM);
    if (attention_fwd(p, l)) return 1;
    linear(k->mid, k->heads, b->out, b->out_bias, n, DIM, DIM);
    for (i = 0; i < n * DIM; ++i) k->mid[i] += k->x[i];
    norm(k->norm2, k->mid, b->norm2, n);
    linear(k->up, k->norm2, b->up, b->up_bias, n, DIM, HIDDEN);
    for (i = 0; i < n * HIDDEN; ++i) gelu_slope(k->up[i], &k->gelu[i]);
    linear(k[1].x, k->gelu, b->down, b->down_bias, n, HIDDEN, DIM);
    for (i = 0; i < n * DIM; ++i) k[1].x[i] += k->mid[i];
    return 0;
}

/* dx: the gradient of the layer's result becomes that of its input. */
static int layer_bwd(part *p, int l, weights *w, weights *dw, float *dx)
{
    layer_weights *b = &w->layer[l], *g = &dw->layer[l];
    kept *k = &p->layer[l];
    const int n = p->rows;
    float dup[ROWS * HIDDEN], dnorm[ROWS * DIM], dheads[ROWS * DIM], dqkv[ROWS * 3 * DIM], y;
    linear_bwd(dup, g->down, g->down_bias, dx, k->gelu, b->down, n, HIDDEN, DIM);
    for (int i = 0; i < n * HIDDEN; ++i) dup[i] *= gelu_slope(k->up[i], &y);
    linear_bwd(dnorm, g->up, g->up_bias, dup, k->norm2, b->up, n, DIM, HIDDEN);
    norm_bwd(dx, g->norm2, dnorm, k->mid, b->norm2, n);
    linear_bwd(dheads, g->out, g->out_bias, dx, k->heads, b->out, n, DIM, DIM);
    if (attention_bwd(p, l, dqkv, dheads)) return 1;
    linear_bwd(dnorm, g->qkv, g->qkv_bias, dqkv, k->norm1, b->qkv, n, DIM, 3 * DIM);
    norm_bwd(dx, g->norm1, dnorm, k->x, b->norm1, n);
    return 0;
}

/* y: the stream behind the last norm. */
static int forward(part *p, weights *w, float *y)
{
    for (int i = 0; i < p->rows; ++i)
        for (int k = 0; k < DIM; ++k)
            p->layer[0].x[i * DIM + k] =
                w->tokens[p->input[i] * DIM + k] + w->positions[p->position[i] * DIM + k];
    for (int l = 0; l < LAYERS; ++l)
        if (layer_fwd(p, l, w)) return 1;
    norm(y, p->layer[LAYERS].x, w->norm, p->rows);
    return 0;
}

/* The logits of a row become its probabilities; returns the log of the target's, and the likeliest token in *best. */
static float head(float *logits, const float *y, const weights *w, int target, int *best)
{
    float total = 0, top, score;
    int v, k;
    for (*best = v = 0; v < VOCAB; ++v) {
        for (logits[v] = 0, k = 0; k < DIM; ++k) logits[v] += y[k] * w->tokens[v * DIM + k];
        if (logits[v] > logits[*best]) *best = v;
    }
    top = logits[*best], score = logits[target];
    for (v = 0; v < VOCAB; ++v) total += expf(logits[v] - top);
    for (v = 0; v < VOCAB; ++v) logits[v] = expf(logits[v] - top) / total;
    return score - top - logf(total);
}

/* The mean loss of all rows: of this part its share, and its gradients (+=), unless it evaluates. */
static int forward_backward(part *p, weights *w, weights *dw, float *loss)
{
    float y[ROWS * DIM], dy[ROWS * DIM] = {0}, dx[ROWS * DIM] = {0}, share[VOCAB];
    int l, i, k, v, best;
    if (forward(p, w, y)) return 1;
    for (*loss = 0, i = 0; i < p->rows; ++i) {
        *loss -= head(share, y + i * DIM, w, p->target[i], &best) / ROWS;
        for (v = 0; v < VOCAB && !p->evaluates; ++v) {
            const float g = (share[v] - (v == p->target[i])) / ROWS;
            for (k = 0; k < DIM; ++k) {
                dy[i * DIM + k] += g * w->tokens[v * DIM + k];
                dw->tokens[v * DIM + k] += g * y[i * DIM + k];
            }
        }
    }
    if (p->evaluates) return 0;
    norm_bwd(dx, dw->norm, dy, p->layer[LAYERS].x, w->norm, p->rows);
    for (l = LAYERS - 1; l >= 0; --l)
        if (layer_bwd(p, l, w, dw, dx)) return 1;
    for (i = 0; i < p->rows; ++i)
        for (k = 0; k < DIM; ++k) {
            dw->tokens[p->input[i] * DIM + k] += dx[i * DIM + k];
            dw->positions[p->position[i] * DIM + k] += dx[i * DIM + k];
        }
    return 0;
}

/* The likeliest token after the first `used` positions of sequence 0; a part without the last of them says 0. */
static int likeliest(part *p, weights *w, int used, double *next)
{
    float y[ROWS * DIM], share[VOCAB];
    int best;
    if (forward(p, w, y)) return 1;
    for (int i = 0; i < p->rows; ++i)
        if (p->sequence[i] == 0 && p->position[i] == used - 1) {
            head(share, y + i * DIM, w, 0, &best);
            *next = best;
        }
    return 0;
}

/* The model continues a sequence; the whole context anew for each token. */
static int sample(part *p, weights *w, int first)
{
    int bad = 0;
    fill(p, 0);
    for (int used = PROMPT; used < PROMPT + SAMPLED && !bad; ++used) {
        double next = 0;
        bad = likeliest(p, w, used, &next);
#ifdef UPIPE
        bad = bad || upipe_scalars_sum(&p->session->ctx, p->session->ctx.team, &next, 1);
#endif
        for (int i = 0; i < p->rows; ++i)
            if (p->sequence[i] == 0 && p->position[i] == used) p->input[i] = (int)next;
        if (first && !bad) printf("%d%s", (int)next, used + 1 < PROMPT + SAMPLED ? " " : "\n");
    }
    return bad;
}

static void weights_init(weights *w)
{
    float *all = (float *)w;
    unsigned seed = 1;
    for (int i = 0; i < WEIGHTS; ++i) {
        seed = seed * 1664525u + 1013904223u;
        all[i] = ((float)(seed >> 8) / (1 << 24) - 0.5f) * 0.1f;
    }
    for (int k = 0; k < DIM; ++k) {
        w->norm[0][k] = 1;
        for (int l = 0; l < LAYERS; ++l) w->layer[l].norm1[0][k] = w->layer[l].norm2[0][k] = 1;
    }
}

/* Steps of plain gradient descent; `first`: this part prints. */
static int train(part *p, int first)
{
    weights *w = (weights *)malloc(sizeof *w), *dw = (weights *)malloc(sizeof *dw);
    float loss[2]; /* of the step, and of other sequences behind it */
    int bad = w == NULL || dw == NULL;
    if (!bad) weights_init(w);
    for (int step = 0; step < STEPS && !bad; ++step) {
        memset(dw, 0, sizeof *dw);
        fill(p, 0);
        bad = forward_backward(p, w, dw, &loss[0]);
#ifdef UPIPE
        upipe_ctx *c = &p->session->ctx;
        bad = bad || upipe_all_reduce(c, c->team, (float *)dw, WEIGHTS);
#endif
        for (int i = 0; i < WEIGHTS && !bad; ++i) ((float *)w)[i] -= 0.1f * ((float *)dw)[i];
        fill(p, BATCH);
        p->evaluates = 1;
        bad = bad || forward_backward(p, w, NULL, &loss[1]);
        p->evaluates = 0;
#ifdef UPIPE
        bad = bad || upipe_all_reduce(c, c->team, loss, 2);
#endif
        if (first && !bad) printf("%.9g %.9g\n", (double)loss[0], (double)loss[1]);
    }
    p->evaluates = 1;
    bad = bad || sample(p, w, first);
    free(w);
    free(dw);
    return bad;
}

#ifdef UPIPE
static upipe_status rank_main(void *user, upipe_session *h)
{
    static _Thread_local part p; /* a rank is a thread */
    for ((void)user, p.session = h; p.rows < h->plan.rows;) add_row(&p, upipe_plan_row(&h->plan, p.rows));
    return train(&p, h->ctx.team->rank == 0) ? h->ctx.err.status : UPIPE_OK;
}
#endif

int main(int argc, char **argv)
{
#ifdef UPIPE
    upipe_session_desc desc = {
        .plan = {.tokens = TOKENS, .batch = BATCH, .heads = HEADS, .head_dim = HEAD_DIM}, .layers = LAYERS};
    upipe_ops ops;
    upipe_err err;
    upipe_cpu_ops(&ops), desc.call.mask.causal = 1;
    desc.plan.ranks = argc > 1 ? atoi(argv[1]) : 1, desc.plan.chunk = argc > 2 ? atoi(argv[2]) : 0;
    return upipe_threads_sessions(&desc, &ops, 60, rank_main, &err) && fprintf(stderr, "%s\n", err.text);
#else
    static part p;
    (void)argc, (void)argv;
    while (p.rows < ROWS) add_row(&p, p.rows);
    return train(&p, 1);
#endif
}
