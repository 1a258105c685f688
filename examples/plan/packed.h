/* packed.h -- the documents that are packed into a planned step: their borders, and how evenly ranks share the pairs
 * that attention sees
 *
 *     status = packed_read(&o, "lognormal:2k,1.5,128k");     borders of all sequences, into the options
 *     packed_balance b = packed_balance_of(&setting);     pairs by rank of the ring and step
 */
#ifndef PLAN_PACKED_H
#define PLAN_PACKED_H

#include "../common/random.h"
#include "../train/files/whole_file.h"
#include "estimate.h"

enum { PACKED_SIGMA_MAX = 8, PACKED_FILE_MAX = 1 << 28, PACKED_MAX = 1 << 17, PACKED_WALK_MAX = 1 << 26 };

/* Where lengths come from: a distribution, or numbers in a file, again from its start at its end. */
typedef struct packed_source {
    double median, sigma;
    int64_t most;
    char *text, *at;
    random_state random;
} packed_source;

/* lognormal:MEDIAN,SIGMA,MOST */
static inline int packed_lognormal(packed_source *s, const char *text)
{
    char words[3][32] = {"", "", ""}, behind, *end;
    int64_t median = 0;
    const int read = sscanf(text, "lognormal:%31[^,],%31[^,],%31s%c", words[0], words[1], words[2], &behind);
    s->sigma = strtod(words[1], &end);
    if (read != 3 || number_whole(words[0], &median) != 0 || number_whole(words[2], &s->most) != 0 ||
        end == words[1] || *end != '\0' || !(s->sigma >= 0 && s->sigma <= PACKED_SIGMA_MAX) || median < 1 ||
        s->most < median)
        return cli_refuse(
            "--documents wants lognormal:MEDIAN,SIGMA,MOST, as in lognormal:2k,1.5,128k, not '%s'", text);
    s->median = (double)median;
    s->random.state = 1;
    return 0;
}

/* The next document's tokens; 0: a file has none, or something else. */
static inline int64_t packed_next(packed_source *s)
{
    int64_t n = 0;
    char *word;
    if (s->text == NULL) {
        n = (int64_t)(s->median * exp(s->sigma * random_normal(&s->random)));
        return n < 1 ? 1 : n > s->most ? s->most : n;
    }
    word = s->at + strspn(s->at, " \t\r\n,");
    if (*word == '\0') word = s->text + strspn(s->text, " \t\r\n,");
    s->at = word + strcspn(word, " \t\r\n,");
    if (s->at > word) n = strtoll(word, &word, 10);
    return word == s->at && n > 0 && n <= INT32_MAX ? n : 0;
}

/* packed_read -- fills the sequences of a step with documents; the last of each sequence is cut
 *   text     lognormal:MEDIAN,SIGMA,MOST, drawn from a fixed seed, or a file of lengths
 *   returns  0 with o->borders, or an exit status and 1 */
static inline int packed_read(options *o, const char *text)
{
    const int64_t total = o->tokens * o->batch;
    packed_source s = {0};
    int64_t at = 0, n;
    int status = 0;
    upipe_err e;
    size_t bytes;
    if (strncmp(text, "lognormal:", 10) == 0) {
        status = packed_lognormal(&s, text);
    } else {
        s.text = s.at = llama_file(text, PACKED_FILE_MAX, &bytes, &e);
        if (s.text == NULL)
            status = (cli_fail("--documents: %s", e.text), 1 + EXIT_RUN);
        else if (strlen(s.text) < bytes)
            status =
                cli_refuse("--documents: byte %zu of %s is 0, which is in no length", strlen(s.text), text);
    }
    o->borders = (int64_t *)estimate_memory(PACKED_MAX + 2, sizeof *o->borders);
    for (o->borders_n = 0; status == 0 && at < total; ++o->borders_n) {
        n = packed_next(&s);
        if (o->borders_n == PACKED_MAX)
            status = cli_refuse("--documents: a step of more than %d documents is not planned", PACKED_MAX);
        else if (n == 0)
            status = cli_refuse("--documents: %s has something that is no length from 1 to 2147483647", text);
        o->borders[o->borders_n] = at;
        at += n < o->tokens - at % o->tokens ? n : o->tokens - at % o->tokens;
        o->borders[o->borders_n + 1] = at;
    }
    free(s.text);
    return status;
}

/* Pairs of a query and a key that it sees, of a head and all sequences.
 *   step    [step][rank]: what a rank of the ring attends in each step, in the order of P2P
 *   sum     of the rank that sees the most; all: of all ranks
 *   apart   of the slowest rank of each step, summed: what P2P waits for */
typedef struct packed_balance {
    int ring;
    double *step;
    double all, sum, apart;
} packed_balance;

/* The window of the layers that see the most; 0: none. */
static inline int64_t packed_window(const llama_config *c)
{
    int64_t layer, window = c->window;
    for (layer = 0; layer < c->layers; ++layer)
        if (llama_window(c, layer) == 0) window = 0;
    return window;
}

/* Pairs of sequences that are one document each. */
static inline double packed_one(const setting *s)
{
    const upipe_mask mask = {.causal = 1, .window = packed_window(&s->layout->config)};
    const upipe_attn a = {.mask = mask, .q.n = s->tokens, .k.n = s->tokens};
    return (double)s->batch * upipe_attn_pairs(&a);
}

/* The rank whose block a rank has in a step. */
static inline int packed_block(const upipe_plan_desc *d, int rank, int step)
{
    const int inner = d->ring_inner > 1 ? d->ring_inner : d->ring, nodes = d->ring / inner;
    const int node = (rank / inner - step / inner + nodes) % nodes;
    return node * inner + (rank % inner - step % inner + inner) % inner;
}

static inline double packed_pairs(const upipe_plan_desc *d, const upipe_mask *mask, int rank, int block)
{
    const upipe_shard q = upipe_shard_ring(d->layout, d->tokens, d->ring, rank),
                      k = upipe_shard_ring(d->layout, d->tokens, d->ring, block);
    double pairs = 0;
    upipe_attn a = {.mask = *mask, .pos_step = q.step};
    int64_t b;
    int i, j;
    for (b = 0; b < d->batch; ++b)
        for (i = 0; i < q.pieces; ++i)
            for (j = 0; j < k.pieces; ++j) {
                a.q.n = q.piece[i].n;
                a.k.n = k.piece[j].n;
                a.q_pos = b * d->tokens + q.piece[i].pos;
                a.k_pos = b * d->tokens + k.piece[j].pos;
                pairs += upipe_attn_pairs(&a);
            }
    return pairs;
}

/* packed_balance_of -- of a setting with packed documents; free() its steps */
static inline packed_balance packed_balance_of(const setting *s)
{
    const llama_config *c = &s->layout->config;
    const upipe_mask mask = {.causal = 1,
                             .window = packed_window(c),
                             .borders = {.cu_seqlens = s->borders, .cu_seqlens_n = s->borders_n}};
    upipe_plan_desc d = method_desc(&s->how, c->heads, c->kv_heads);
    packed_balance b = {.ring = d.ring};
    int rank, step;
    d.tokens = s->tokens;
    d.batch = s->batch;
    b.step = (double *)estimate_memory((size_t)d.ring * (size_t)d.ring, sizeof *b.step);
    for (step = 0; step < b.ring; ++step) {
        double most = 0;
        for (rank = 0; rank < b.ring; ++rank) {
            const double pairs = packed_pairs(&d, &mask, rank, packed_block(&d, rank, step));
            b.step[step * b.ring + rank] = pairs;
            most = fmax(most, pairs);
            b.all += pairs;
        }
        b.apart += most;
    }
    for (rank = 0; rank < b.ring; ++rank) {
        double sum = 0;
        for (step = 0; step < b.ring; ++step) sum += b.step[step * b.ring + rank];
        b.sum = fmax(b.sum, sum);
    }
    return b;
}

#endif
