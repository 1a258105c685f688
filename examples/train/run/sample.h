/* sample.h -- text from the model: one byte, or token, at a time, the whole context anew for each
 *
 *     sample_model(&m, &trained, &err);                        a plan for a shorter sequence, batch 1
 *     sample_text(&rank, world, &request, out, n, &made, g);   all ranks together; each gets the same n tokens
 *
 * There is no cache of keys and values: this shows what was learnt, it is no inference engine.
 */
#ifndef LLAMA_SAMPLE_H
#define LLAMA_SAMPLE_H

#include <signal.h>

#include "../files/data.h"
#include "../model/forward.h"

enum { SAMPLE_CONTEXT = 256, SAMPLE_BYTES = 256 };

/* What to write: from the prompt's tokens on; temperature 0 samples the likeliest token. */
typedef struct sample_request {
    const int32_t *prompt; /* [prompt_n] */
    int64_t prompt_n;
    int64_t kinds;      /* tokens from 0 on that can be sampled: 256 where they are bytes */
    int64_t stop_token; /* ends the text, and is not in it; -1: none does */
    double temperature;
    uint64_t seed;
    volatile sig_atomic_t *stop; /* nonzero: this rank wants to end; set if another one does */
} sample_request;

/* The same model over at most SAMPLE_CONTEXT tokens. A number that divides into two parts a rank, and of each
 * segment one, gives no rank more tokens than it trains with. */
static inline upipe_status sample_model(model *m, const model *trained, upipe_err *e)
{
    upipe_plan_desc d = trained->plan.desc;
    const int segments = trained->fpdt.segments;
    const int64_t parts = (int64_t)model_sharers(trained) * (segments > 0 ? segments : 2);
    const int64_t context = parts < SAMPLE_CONTEXT ? SAMPLE_CONTEXT / parts * parts : parts;
    upipe_status s;
    if (d.tokens > context) d.tokens = context;
    d.batch = 1;
    s = model_init(m, trained->layout, &d, e);
    if (s == UPIPE_OK) s = model_cut(m, segments, e);
    m->rates = trained->rates; /* not those of a shorter sequence */
    m->rules = trained->rules;
    m->tile_bytes = trained->tile_bytes;
    m->zero = trained->zero;
    m->prefetch = trained->prefetch;
    m->reduce = trained->reduce;
    m->replicas = trained->replicas;
    m->replica = trained->replica;
    return s;
}

/* One of n tokens by the softmax of their logits, which become its terms; tokens beyond them are never sampled. -1: a
 * logit is not finite. */
static inline int64_t sample_choose(const float *logits, double *terms, int64_t n, double temperature,
                                    double uniform)
{
    double sum = 0;
    int64_t i, best = 0;
    for (i = 0; i < n; ++i) {
        if (!isfinite(logits[i])) return -1;
        if (logits[i] > logits[best]) best = i;
    }
    if (temperature == 0) return best;
    for (i = 0; i < n; ++i) sum += terms[i] = exp(((double)logits[i] - logits[best]) / temperature);
    uniform *= sum;
    for (i = 0; i < n - 1 && uniform >= terms[i]; ++i) uniform -= terms[i];
    return i;
}

/* What sampling holds on the host. */
typedef struct sample_buf {
    int32_t *history, *tokens; /* [context], and this rank's of them */
    float *logits;             /* [vocab] */
    double *terms;             /* [kinds] */
    int64_t *gathered;         /* [ranks][2] */
} sample_buf;

/* The token after the last of `used` tokens of history, into *token, or -1 where a logit is not finite; *stop: the largest
 * of the ranks' request->stop, 0 if none wants to end. Every rank computes the logits of a row, that of the last token or
 * one that is not needed: so all hold the same. */
static inline upipe_status sample_next(model_rank *r, upipe_comm *world, const sample_buf *buf, int64_t used,
                                       const sample_request *request, double uniform, int32_t *token,
                                       int *stop)
{
    upipe_ctx *c = r->c;
    const int64_t rows = r->m->rows;
    const int head = model_unit_of(r, model_head_kind(r), -1);
    int64_t vocab = r->m->layout->config.vocab, row = -1, mine[2], i;
    int rank;
    upipe_view x;
    void *data;
    for (i = 0; i < rows; ++i) {
        buf->tokens[i] = buf->history[model_position(r->m, i)];
        if (model_position(r->m, i) == used - 1) row = i;
    }
    UPIPE_TRY(c->ops->copy(c, r->tokens, buf->tokens, (size_t)rows * 4));
    UPIPE_TRY(model_fwd(r, &x, 0));
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, (size_t)vocab * 4, UPIPE_USE_LOSS, "logits", &c->err));
    UPIPE_TRY(model_weights_begin(r, head, -1));
    UPIPE_TRY(model_logits(r, upipe_view_packed(data, UPIPE_F32, 1, 1, (int32_t)vocab),
                           upipe_view_rows(x, row < 0 ? 0 : row, 1)));
    UPIPE_TRY(model_weights_end(r, head));
    UPIPE_TRY(c->ops->copy(c, buf->logits, data, (size_t)vocab * 4));
    model_logits_cap(&r->m->layout->config, buf->logits, vocab);
    UPIPE_TRY(upipe_mem_free(c->mem, data, &c->err));
    UPIPE_TRY(model_free_block(r, x));
    mine[0] =
        row < 0 ? 0 : sample_choose(buf->logits, buf->terms, request->kinds, request->temperature, uniform);
    mine[1] = request->stop != NULL ? *request->stop : 0;
    UPIPE_TRY(upipe_comm_all_gather(c, world, buf->gathered, mine, 2));
    for (rank = 0, *token = *stop = 0; rank < world->ranks; ++rank) {
        *token |=
            (int32_t)
                buf->gathered[2 * rank]; /* 0 but for the rank of each replica that holds the last token */
        if (buf->gathered[2 * rank + 1] > *stop) *stop = (int)buf->gathered[2 * rank + 1];
    }
    return UPIPE_OK;
}

/* sample_text -- n tokens after the prompt, of which the last `context` tokens count; *made are fewer if some
 *                rank wants to end, and -1 if a logit is not finite
 *   r         of a model from sample_model; tokens has space for it
 *   world     all ranks
 *   gathered  space for [ranks][2] numbers
 *   errors    those of the library; MEMORY
 */
static inline upipe_status sample_text(model_rank *r, upipe_comm *world, const sample_request *request,
                                       int32_t *out, int64_t n, int64_t *made, int64_t *gathered)
{
    const int64_t context = r->m->plan.desc.tokens;
    const int64_t length = request->prompt_n < context ? request->prompt_n : context;
    const int32_t *prompt = request->prompt + (request->prompt_n - length);
    int32_t *history = (int32_t *)calloc(2 * (size_t)context, sizeof *history);
    float *logits = (float *)calloc((size_t)r->m->layout->config.vocab, sizeof *logits);
    double *terms = (double *)calloc((size_t)request->kinds, sizeof *terms);
    sample_buf buf = {history, history != NULL ? history + context : NULL, logits, terms, gathered};
    upipe_status s = UPIPE_OK;
    int64_t used, i;
    int32_t token;
    int stop = 0;
    *made = 0;
    if (history == NULL || logits == NULL || terms == NULL)
        s = upipe_fail(&r->c->err, UPIPE_ERR_MEMORY, "no memory for %lld tokens of a sample",
                       (long long)context);
    for (used = 0; s == UPIPE_OK && used < length; ++used) history[used] = prompt[used];
    for (i = 0; s == UPIPE_OK && i < n && !stop; ++i) {
        double uniform =
            (double)(data_mix(request->seed + (uint64_t)i * 0x9e3779b97f4a7c15u) >> 11) * 0x1p-53;
        s = sample_next(r, world, &buf, used, request, uniform, &token, &stop);
        if (s == UPIPE_OK && token < 0) *made = -1;
        if (s != UPIPE_OK || token < 0 || token == request->stop_token) break;
        if (used == context) {
            memmove(history, history + 1, (size_t)(context - 1) * sizeof *history);
            --used;
        }
        history[used++] = token;
        out[i] = token;
        ++*made;
    }
    if (stop && request->stop != NULL && *request->stop == 0) *request->stop = stop;
    free(history);
    free(logits);
    free(terms);
    return s;
}

#endif
