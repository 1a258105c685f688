/* sample.h -- text from the model: one byte at a time, the whole context anew for each
 *
 *     sample_model(&m, &trained, &err);                     a plan for a shorter sequence, batch 1
 *     sample_text(&rank, world, &wish, out, n, &made, g);   all ranks together; each gets the same n bytes
 *
 * There is no cache of keys and values: this shows what was learnt, it is no inference engine.
 */
#ifndef LLAMA_SAMPLE_H
#define LLAMA_SAMPLE_H

#include <signal.h>

#include "data.h"
#include "model.h"

enum { SAMPLE_CONTEXT = 256, SAMPLE_BYTES = 256 };

/* What to write: from the bytes of prompt on; temperature 0 samples the likeliest byte. */
typedef struct sample_wish {
    const char *prompt;
    double temperature;
    uint64_t seed;
    const volatile sig_atomic_t *stop; /* nonzero: this rank wants to end */
} sample_wish;

/* The same model over at most SAMPLE_CONTEXT tokens. A number that divides into two parts a rank, and of each
 * segment one, gives no rank more tokens than it trains with. */
static upipe_status sample_model(model *m, const model *trained, upipe_err *e)
{
    upipe_plan_desc d = trained->plan.desc;
    const int segments = trained->fpdt.segments;
    const int64_t parts = (int64_t)model_world(trained) * (segments > 0 ? segments : 2);
    const int64_t context = parts < SAMPLE_CONTEXT ? SAMPLE_CONTEXT / parts * parts : parts;
    upipe_status s;
    if (d.tokens > context) d.tokens = context;
    d.batch = 1;
    s = model_init(m, trained->layout, &d, e);
    if (s == UPIPE_OK) s = model_cut(m, segments, e);
    m->tile_bytes = trained->tile_bytes;
    m->zero = trained->zero;
    m->prefetch = trained->prefetch;
    m->reduce = trained->reduce;
    return s;
}

/* One of the bytes by the softmax of their logits; tokens beyond bytes are never sampled. */
static int sample_choose(const float *logits, double temperature, double uniform)
{
    double weights[SAMPLE_BYTES], sum = 0;
    int i, best = 0;
    for (i = 1; i < SAMPLE_BYTES; ++i)
        if (logits[i] > logits[best]) best = i;
    if (temperature == 0) return best;
    for (i = 0; i < SAMPLE_BYTES; ++i)
        sum += weights[i] = exp(((double)logits[i] - logits[best]) / temperature);
    uniform *= sum;
    for (i = 0; i < SAMPLE_BYTES - 1 && uniform >= weights[i]; ++i) uniform -= weights[i];
    return i;
}

/* What sampling holds on the host. */
typedef struct sample_buf {
    int32_t *history, *tokens; /* [context], and this rank's of them */
    float *logits;             /* [vocab] */
    int64_t *gathered;         /* [ranks][2] */
} sample_buf;

/* The byte after the last of `used` tokens of history, into *byte; *stop: some rank wants to end. Every rank
 * computes the logits of a row, that of the last token or one that is not needed: so all hold the same. */
static upipe_status sample_next(model_rank *r, upipe_comm *world, const sample_buf *buf, int64_t used,
                                const sample_wish *wish, double uniform, int *byte, int *stop)
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
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, (size_t)vocab * 4, "logits", &c->err));
    UPIPE_TRY(model_weights_begin(r, head, -1));
    UPIPE_TRY(model_logits(r, upipe_view_packed(data, UPIPE_F32, 1, 1, (int32_t)vocab),
                           upipe_view_rows(x, row < 0 ? 0 : row, 1)));
    UPIPE_TRY(model_weights_end(r, head));
    UPIPE_TRY(c->ops->copy(c, buf->logits, data, (size_t)vocab * 4));
    UPIPE_TRY(upipe_mem_free(c->mem, data, &c->err));
    UPIPE_TRY(model_free_block(r, x));
    mine[0] = row < 0 ? 0 : sample_choose(buf->logits, wish->temperature, uniform);
    mine[1] = wish->stop != NULL && *wish->stop != 0;
    UPIPE_TRY(upipe_comm_all_gather(c, world, buf->gathered, mine, 2));
    for (rank = 0, *byte = *stop = 0; rank < world->ranks; ++rank) {
        *byte |= (int)buf->gathered[2 * rank]; /* 0 but for the rank that holds the last token */
        *stop |= buf->gathered[2 * rank + 1] != 0;
    }
    return UPIPE_OK;
}

/* sample_text -- n bytes after the prompt, of which the last `context` bytes count; *made are fewer if some
 *                rank wants to end
 *   r         of a model from sample_model; tokens has space for it
 *   world     all ranks
 *   gathered  space for [ranks][2] numbers
 *   errors    those of the library; MEMORY
 */
static upipe_status sample_text(model_rank *r, upipe_comm *world, const sample_wish *wish, char *out,
                                int64_t n, int64_t *made, int64_t *gathered)
{
    const int64_t context = r->m->plan.desc.tokens;
    const int64_t length = (int64_t)strlen(wish->prompt);
    const char *prompt = length > context ? wish->prompt + (length - context) : wish->prompt;
    int32_t *history = (int32_t *)calloc(2 * (size_t)context, sizeof *history);
    float *logits = (float *)calloc((size_t)r->m->layout->config.vocab, sizeof *logits);
    sample_buf buf = {history, history != NULL ? history + context : NULL, logits, gathered};
    upipe_status s = UPIPE_OK;
    int64_t used, i;
    int byte, stop = 0;
    *made = 0;
    if (history == NULL || logits == NULL)
        s = upipe_fail(&r->c->err, UPIPE_ERR_MEMORY, "no memory for %lld tokens of a sample",
                       (long long)context);
    for (used = 0; s == UPIPE_OK && prompt[used] != '\0'; ++used) history[used] = (unsigned char)prompt[used];
    for (i = 0; s == UPIPE_OK && i < n && !stop; ++i) {
        double uniform = (double)(text_mix(wish->seed + (uint64_t)i * 0x9e3779b97f4a7c15u) >> 11) * 0x1p-53;
        s = sample_next(r, world, &buf, used, wish, uniform, &byte, &stop);
        if (s != UPIPE_OK) break;
        if (used == context) {
            memmove(history, history + 1, (size_t)(context - 1) * sizeof *history);
            --used;
        }
        history[used++] = byte;
        out[i] = (char)byte;
        ++*made;
    }
    free(history);
    free(logits);
    return s;
}

#endif
