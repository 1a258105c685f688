/* data.h -- what a training reads: a text's bytes or files of token ids, cut into windows, in a shuffled order that a
 *           number reproduces, with the borders of packed documents
 *
 *     data_request q;  corpus d;
 *     data_order order;                                       one a rank: it caches an epoch's order
 *     data_request_init(&q);  q.text = "book.txt";  q.tokens = 1024;  q.vocab = 256;
 *     data_open(&d, &q);                                      0, or -1 with the sentence out
 *     data_scan(&d, &q);                                      reads all of it: d.hash, and that every id is one
 *     data_order_init(&order);
 *     k = step * batch + row;                                 which sample, from 0
 *     w = data_window(&d, &order, seed, k);                   -1 without memory
 *     data_fill(&d, &order, w, &plan.shard, inputs, targets);         a rank's tokens of it; -1: it has changed
 *     n = data_borders(&d, &order, w, 0, cu_seqlens);                 mask.borders.cu_seqlens, where d.packed
 *     data_order_free(&order);  data_close(&d);
 *
 * Window w has as inputs the tokens w*S .. w*S + S - 1, and as targets the token after each. windows is
 * ceil((n - 1) / S): every token but the first is a target once an epoch. The last window may reach
 * beyond the end: there inputs are 0 and targets DATA_IGNORE. Epoch e = k / windows takes all windows, in an
 * order that depends on (seed, e) alone; or all documents, whose sequence is then cut into windows, which follow one
 * another.
 *
 * Packed documents: a token sees its own document alone. The target of a document's last token, and what the loss mask
 * does not have, is DATA_IGNORE. A document that a window's end cuts goes on in the next window as one of its own; the
 * target at the window's end is its next token.
 *
 * Nothing is written after data_scan: ranks share it. It is mapped, not held: a rank reads what it needs.
 */
#ifndef LLAMA_DATA_H
#define LLAMA_DATA_H

#include "../../../upipe/upipe_plan.h"
#include "documents.h"

enum { DATA_IGNORE = -1 };

/* What is to be read, and how. */
typedef struct data_request {
    const char *text, *files; /* the one or the other; files: as tokens_open has it */
    token_type type;          /* of raw files */
    int64_t end_token;        /* documents end with it; -1: the index says where */
    int joined, by_documents; /* documents are one text all the same; they are shuffled, not windows */
    const char *mask;         /* a token file, or raw u8: 0 where a token is no target; NULL: none */
    int held;                 /* --eval and --eval-mask name them, for sentences */
    int64_t tokens, vocab;    /* of a window, 1 to 2^62 */
} data_request;

typedef struct corpus {
    token_files ids, mask;   /* mask: no files: none */
    document_ends documents; /* none: all is one */
    int64_t tokens, windows, vocab;
    int packed, by_documents;
    uint64_t hash; /* data_scan's */
} corpus;

typedef struct data_order {
    int64_t *at;   /* windows, or documents, of one epoch in their order; NULL = none yet */
    int64_t *ends; /* of documents in that order; of the files' own where windows are shuffled */
    int64_t epoch;
    uint64_t seed;
    const char *lost; /* a file that has changed, where data_fill failed */
} data_order;

static inline void data_request_init(data_request *q)
{
    memset(q, 0, sizeof *q);
    q->end_token = -1;
}

static inline void data_close(corpus *d)
{
    tokens_close(&d->ids);
    tokens_close(&d->mask);
    free(d->documents.ends);
    memset(d, 0, sizeof *d);
}

/* ---- opening ---- */

/* The flag that names what is read. */
static inline const char *data_flag(const data_request *q)
{
    return q->held ? "--eval" : q->text != NULL ? "--data" : "--tokens-file";
}

/* A text is bytes, and is not asked what else it could be. */
static inline int data_open_text(corpus *d, const data_request *q)
{
    const char *const path = q->text;
    token_file *f = (token_file *)calloc(1, sizeof *f);
    const char *why;
    if (f == NULL) return cli_fail("out of memory: the text %s", path);
    d->ids.file = f;
    d->ids.files = 1;
    if ((f->path = strdup(path)) == NULL) return cli_fail("out of memory: the text %s", path);
    if (mapped_open(&f->map, f->path, &why) != 0)
        return cli_fail("%s %s cannot be read: %s", data_flag(q), path, why);
    f->type = TOKEN_U8;
    f->n = d->ids.n = d->ids.bytes = f->map.bytes;
    return f->n > 0 ? 0 : cli_fail("%s %s is empty", data_flag(q), path);
}

static inline int data_open_mask(corpus *d, const data_request *q)
{
    const char *const flag = q->held ? "--eval-mask" : "--loss-mask";
    if (q->mask == NULL) return 0;
    if (tokens_open(&d->mask, flag, q->mask, NULL, TOKEN_U8) != 0) return -1;
    if (d->mask.n == d->ids.n) return 0;
    return cli_fail("%s %s has %lld numbers, but there are %lld tokens", flag, q->mask, (long long)d->mask.n,
                    (long long)d->ids.n);
}

/* What the indices say, where there are any. */
static inline int data_open_documents(corpus *d)
{
    int i, some = 0;
    for (i = 0; i < d->ids.files; ++i) some |= d->ids.file[i].index.data != NULL;
    for (i = 0; some && i < d->ids.files; ++i)
        if (documents_index(&d->documents, &d->ids.file[i]) != 0) return -1;
    return 0;
}

static inline int data_open_all(corpus *d, const data_request *q)
{
    const char *const name = q->text != NULL ? q->text : q->files;
    if (q->text != NULL ? data_open_text(d, q)
                        : tokens_open(&d->ids, data_flag(q), name, "--token-type", q->type))
        return -1;
    if (d->ids.n - 1 < q->tokens)
        return cli_fail(
            "%s %s has %lld %s, but a sequence of %lld tokens needs %lld: one more is the last target",
            data_flag(q), name, (long long)d->ids.n, q->text != NULL ? "bytes" : "tokens",
            (long long)q->tokens, (long long)q->tokens + 1);
    if (data_open_mask(d, q) != 0 || (q->end_token < 0 && data_open_documents(d) != 0)) return -1;
    if (q->by_documents && q->end_token < 0 && d->documents.n == 0)
        return cli_fail("%s does not say where documents end: to shuffle them needs an .idx or --end-token",
                        name);
    return 0;
}

/* data_open -- maps the files, and finds what they say of themselves
 *
 * 0, or -1 with the sentence out; then there is nothing to close.
 */
static inline int data_open(corpus *d, const data_request *q)
{
    memset(d, 0, sizeof *d);
    d->tokens = q->tokens;
    d->vocab = q->vocab;
    d->by_documents = q->by_documents;
    if (data_open_all(d, q) != 0) {
        data_close(d);
        return -1;
    }
    d->windows = (d->ids.n - 2) / q->tokens + 1;
    d->packed = !q->joined && (q->end_token >= 0 || d->documents.n > 0);
    return 0;
}

/* ---- all of it is read once ---- */

static const uint64_t data_hash_start = 1469598103934665603u;

/* FNV-1a. */
static inline uint64_t data_hash_bytes(uint64_t hash, const void *from, int64_t bytes)
{
    const unsigned char *at = (const unsigned char *)from;
    int64_t i;
    for (i = 0; i < bytes; ++i) hash = (hash ^ at[i]) * 1099511628211u;
    return hash;
}

/* The same of numbers of 8 bytes in four rows, which takes an eighth of the time; of no bytes the hash as it was. */
static inline uint64_t data_hash_long(uint64_t hash, const unsigned char *from, int64_t bytes)
{
    uint64_t row[4] = {hash, hash + 1, hash + 2, hash + 3}, word[4];
    int64_t at;
    int i;
    if (bytes == 0) return hash;
    for (at = 0; at + 32 <= bytes; at += 32) {
        memcpy(word, from + at, 32);
        for (i = 0; i < 4; ++i) {
            row[i] = (row[i] ^ word[i]) * 1099511628211u;
            row[i] ^= row[i] >> 29; /* or a word's high bits would stay high */
        }
    }
    hash = data_hash_bytes(data_hash_start, row, sizeof row);
    return data_hash_bytes(hash, from + at, bytes - at);
}

/* What data_scan finds. */
typedef struct data_scan_call {
    corpus *d;
    const data_request *q;
    uint64_t hash;
    int file;       /* the one that is read */
    int64_t at, id; /* where an id is wrong, in its file, and which */
    int64_t half;   /* of a raw file of u16 the ids 0, 2, 4 ... from the first on that have a 0 behind them */
    int wrong, memory; /* an id is; it was out */
} data_scan_call;

enum {
    DATA_BLOCK = 1 << 18, /* tokens */
    DATA_HALVES = 16      /* ids at least of a file that is noted to look like one of u32 */
};

static inline void data_scan_ids(data_scan_call *c, const token_file *f, int64_t from, int64_t to)
{
    const token_file own = *f; /* which nothing else can change: its type is asked once a loop */
    const int64_t vocab = c->d->vocab, end = c->q->end_token;
    int64_t i, id;
    for (i = from; i < to; ++i) {
        id = token_file_at(&own, i);
        if (id < 0 || id >= vocab) {
            c->id = id;
            c->at = i;
            c->wrong = 1;
            return;
        }
        if (id == end && documents_add(&c->d->documents, f->first + i + 1) != 0) c->memory = 1;
    }
}

static inline void data_scan_body(void *user)
{
    data_scan_call *c = (data_scan_call *)user;
    const token_file *f = &c->d->ids.file[c->file];
    const int64_t each = token_bytes[f->type];
    int64_t i, n;
    if (c->q->type == TOKEN_U16)
        for (c->half = 0; 2 * c->half + 1 < f->n && token_file_at(f, 2 * c->half + 1) == 0;) ++c->half;
    c->hash = data_hash_long(c->hash, f->map.data, f->at);
    for (i = 0; i < f->n && !c->wrong && !c->memory; i += n) {
        n = f->n - i < DATA_BLOCK ? f->n - i : DATA_BLOCK;
        c->hash = c->q->text != NULL ? data_hash_bytes(c->hash, f->map.data + i, n)
                                     : data_hash_long(c->hash, f->map.data + f->at + i * each, n * each);
        data_scan_ids(c, f, i, i + n);
    }
}

/* A mask's file, and an index, which is in the mask's place. */
static inline void data_scan_other(void *user)
{
    data_scan_call *c = (data_scan_call *)user;
    const token_file *f = &c->d->ids.file[c->file];
    int i;
    for (i = 0; c->file == 0 && i < c->d->mask.files; ++i) {
        const mapped_file *m = &c->d->mask.file[i].map;
        c->hash = data_hash_long(c->hash, m->data, m->bytes);
    }
    c->hash = data_hash_long(c->hash, f->index.data, f->index.bytes);
}

/* data_scan -- the hash of all that is read and of how it is cut, and the documents that end with a token
 *
 * 0, or -1 with the sentence out: an id is beyond the vocabulary
 */
static inline int data_scan(corpus *d, const data_request *q)
{
    const int64_t how[] = {q->type, q->end_token, d->packed, d->by_documents, d->ids.files, d->mask.files};
    data_scan_call c;
    memset(&c, 0, sizeof c);
    c.d = d;
    c.q = q;
    c.hash = data_hash_start;
    if (q->end_token >= 0) d->documents.n = 0;
    for (; c.file < d->ids.files; ++c.file) {
        const token_file *const f = &d->ids.file[c.file];
        const char *const path = f->path;
        if (mapped_read(data_scan_body, &c) != 0 || mapped_read(data_scan_other, &c) != 0)
            return cli_fail("%s became shorter while it was read", path);
        if (c.memory) break;
        if (c.wrong)
            return cli_fail("%s: token %lld is %lld, the vocabulary has %lld", path, (long long)c.at,
                            (long long)c.id, (long long)d->vocab);
        if (f->n >= DATA_HALVES && c.half == f->n / 2)
            cli_note("%s: every second token is 0, as if the file were u32", path);
    }
    if (c.memory || (q->end_token >= 0 && documents_add(&d->documents, d->ids.n) != 0))
        return cli_fail("out of memory: the ends of %lld documents", (long long)d->documents.n);
    d->hash = q->text != NULL ? c.hash : data_hash_bytes(c.hash, how, sizeof how);
    return 0;
}

enum { DATA_PROBES = 64, DATA_PROBE = 4096 /* bytes of one */ };

static inline void data_probe_body(void *user)
{
    data_scan_call *c = (data_scan_call *)user;
    const corpus *d = c->d;
    const int probes = 1 + DATA_PROBES / d->ids.files;
    int i;
    for (; c->file < d->ids.files; ++c->file) {
        const mapped_file *m = &d->ids.file[c->file].map;
        c->hash = data_hash_bytes(c->hash, &m->bytes, sizeof m->bytes);
        for (i = 0; i < probes; ++i) {
            const int64_t at = m->bytes / probes * i, rest = m->bytes - at;
            c->hash = data_hash_bytes(c->hash, m->data + at, rest < DATA_PROBE ? rest : DATA_PROBE);
        }
    }
}

/* data_probe -- the hash of a few parts, for processes that would all have to read it. 0, or -1 with the sentence
 * out */
static inline int data_probe(corpus *d, uint64_t *hash)
{
    data_scan_call c;
    memset(&c, 0, sizeof c);
    c.d = d;
    c.hash = data_hash_bytes(data_hash_start, d->documents.ends, d->documents.n * 8);
    if (mapped_read(data_probe_body, &c) != 0)
        return cli_fail("%s became shorter while it was read", d->ids.file[c.file].path);
    *hash = c.hash;
    return 0;
}

/* ---- the order ---- */

static inline void data_order_init(data_order *order)
{
    memset(order, 0, sizeof *order);
}

static inline void data_order_free(data_order *order)
{
    free(order->at);
    free(order->ends);
    memset(order, 0, sizeof *order);
}

static inline uint64_t data_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Fisher-Yates over splitmix64; the bias of the remainder is n / 2^64. */
static inline void data_shuffle(int64_t *at, int64_t n, uint64_t seed, int64_t epoch)
{
    /* seed and epoch are mixed apart, or epoch e + 1 of one seed would be epoch e of the next */
    uint64_t state = data_mix(data_mix(seed + 0x9e3779b97f4a7c15u) ^ (uint64_t)epoch);
    int64_t i;
    for (i = 0; i < n; ++i) at[i] = i;
    for (i = n - 1; i > 0; --i) {
        int64_t j = (int64_t)(data_mix(state += 0x9e3779b97f4a7c15u) % (uint64_t)(i + 1));
        int64_t moved = at[i];
        at[i] = at[j];
        at[j] = moved;
    }
}

static inline int64_t data_document_first(const corpus *d, int64_t i)
{
    return i > 0 ? d->documents.ends[i - 1] : 0;
}

/* data_window -- the window of sample k, counted from 0; -1 without memory
 *
 * order keeps the table of k's epoch for the next call; it belongs to one source.
 */
static inline int64_t data_window(const corpus *d, data_order *order, uint64_t seed, int64_t k)
{
    const int64_t epoch = k / d->windows, n = d->by_documents ? d->documents.n : d->windows;
    int64_t i, end = 0;
    if (order->at == NULL || order->epoch != epoch || order->seed != seed) {
        if (order->at == NULL) order->at = (int64_t *)malloc((size_t)n * sizeof *order->at);
        if (order->ends == NULL && d->by_documents)
            order->ends = (int64_t *)malloc((size_t)n * sizeof *order->ends);
        if (order->at == NULL || (order->ends == NULL && d->by_documents)) return -1;
        data_shuffle(order->at, n, seed, epoch);
        for (i = 0; i < n && d->by_documents; ++i)
            order->ends[i] = end += d->documents.ends[order->at[i]] - data_document_first(d, order->at[i]);
        order->epoch = epoch;
        order->seed = seed;
    }
    return d->by_documents ? k % d->windows : order->at[k % d->windows];
}

/* ---- tokens ---- */

/* Tokens from .. to - 1 of the epoch are those from `source` on. */
typedef struct data_piece {
    int64_t from, to, source;
} data_piece;

static inline const int64_t *data_ends(const corpus *d, const data_order *order)
{
    return d->by_documents ? order->ends : d->documents.ends;
}

/* The one that token `at` is in: a document, where these have borders or an order of their own. */
static inline data_piece data_piece_of(const corpus *d, const data_order *order, int64_t at)
{
    const int64_t *const ends = data_ends(d, order);
    data_piece p = {0, d->ids.n, 0};
    int64_t i;
    if (!d->packed && !d->by_documents) return p;
    i = documents_find(ends, d->documents.n, at);
    p.from = p.source = i > 0 ? ends[i - 1] : 0;
    p.to = ends[i];
    if (d->by_documents) p.source = data_document_first(d, order->at[i]);
    return p;
}

typedef struct data_fill_call {
    const corpus *d;
    const data_order *order;
    const upipe_shard *shard;
    int64_t first; /* token of the window */
    int32_t *inputs, *targets;
    int file, mask_file, wrong; /* the last ones read; whether an id was none */
} data_fill_call;

static inline int32_t data_id(data_fill_call *c, int64_t i)
{
    const int64_t id = tokens_at(&c->d->ids, &c->file, i);
    c->wrong |= id < 0 || id >= c->d->vocab;
    return (int32_t)id;
}

static inline void data_fill_body(void *user)
{
    data_fill_call *c = (data_fill_call *)user;
    const corpus *d = c->d;
    data_piece p = {0, 0, 0};
    int64_t i;
    for (i = 0; i < c->shard->n; ++i) {
        const int64_t at = c->first + upipe_shard_pos(c->shard, i);
        const int there = at < d->ids.n - 1; /* has a token after it */
        int64_t next;
        if (there && (at < p.from || at >= p.to)) p = data_piece_of(d, c->order, at);
        c->inputs[i] = there ? data_id(c, p.source + at - p.from) : 0;
        c->targets[i] = DATA_IGNORE;
        if (!there || (d->packed && at + 1 == p.to)) continue;
        next = at + 1 < p.to ? p.source + at + 1 - p.from : data_piece_of(d, c->order, at + 1).source;
        if (d->mask.files == 0 || tokens_at(&d->mask, &c->mask_file, next) != 0)
            c->targets[i] = data_id(c, next);
    }
}

/* The first file that is not what it was. */
static inline const char *data_changed(const corpus *d)
{
    int i;
    for (i = 0; i < d->ids.files; ++i)
        if (mapped_changed(&d->ids.file[i].map)) return d->ids.file[i].path;
    for (i = 0; i < d->mask.files; ++i)
        if (mapped_changed(&d->mask.file[i].map)) return d->mask.file[i].path;
    return NULL;
}

/* data_fill -- the tokens of a window that lie at a shard's positions, into inputs [n] and targets [n]
 *
 * order has the window's epoch (data_window). 0, or -1 where a file has changed: order->lost
 */
static inline int data_fill(const corpus *d, data_order *order, int64_t window, const upipe_shard *shard,
                            int32_t *inputs, int32_t *targets)
{
    data_fill_call c;
    int bad;
    memset(&c, 0, sizeof c);
    c.d = d;
    c.order = order;
    c.shard = shard;
    c.first = window * d->tokens;
    c.inputs = inputs;
    c.targets = targets;
    bad = mapped_read(data_fill_body, &c) != 0 || c.wrong;
    order->lost = data_changed(d);
    if (bad && order->lost == NULL) order->lost = d->ids.file[0].path;
    return order->lost != NULL ? -1 : 0;
}

/* data_borders -- where a window's packed documents begin, and its end: cu_seqlens, from `base` on
 *   out   space for as many numbers as data_borders_max says
 * Returns the number of packed documents n; out[0] is base, out[n] base + tokens.
 */
static inline int64_t data_borders(const corpus *d, const data_order *order, int64_t window, int64_t base,
                                   int64_t *out)
{
    const int64_t *const ends = data_ends(d, order);
    const int64_t first = window * d->tokens;
    int64_t i = documents_find(ends, d->documents.n, first), n = 0;
    out[n++] = base;
    for (; i < d->documents.n && ends[i] < first + d->tokens; ++i) out[n++] = base + ends[i] - first;
    out[n] = base + d->tokens;
    return n;
}

static int data_by_length(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Documents that begin or end within a window, however they follow each other, at most: the shortest, and a part of one. -1:
 * no memory. */
__attribute__((unused)) static int64_t data_documents_max(const corpus *d)
{
    const int64_t n = d->documents.n;
    int64_t *length = (int64_t *)malloc((size_t)(n + 1) * sizeof *length), i, sum = 0;
    if (length == NULL) return -1;
    for (i = 0; i < n; ++i) length[i] = d->documents.ends[i] - (i > 0 ? d->documents.ends[i - 1] : 0);
    qsort(length, (size_t)n, sizeof *length, data_by_length);
    for (i = 0; i < n && sum <= d->tokens; ++i) sum += length[i];
    free(length);
    return i + 1;
}

/* Of a batch of windows at most. */
static inline int64_t data_borders_max(const corpus *d, int64_t batch)
{
    return batch * (d->documents.n < d->tokens ? d->documents.n + 1 : d->tokens) + 1;
}

#endif
