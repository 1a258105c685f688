/* documents.h -- where documents in token files end
 *
 *     document_ends d;
 *     documents_index(&d, &file);                  by a Megatron file's index, or
 *     documents_add(&d, end);                      one after the other; those of no token are none
 *     i = documents_find(d.ends, d.n, at);         the one that token `at` is in
 *     free(d.ends);
 *
 * Document i is the tokens from ends[i - 1] (0 for the first) up to ends[i], which is not of it any more.
 */
#ifndef LLAMA_DOCUMENTS_H
#define LLAMA_DOCUMENTS_H

#include "tokens.h"

typedef struct document_ends {
    int64_t *ends, n, space;
} document_ends;

/* -1 without memory, no sentence: it may be called under mapped_read. */
static inline int documents_add(document_ends *d, int64_t end)
{
    int64_t *more;
    if (end <= (d->n > 0 ? d->ends[d->n - 1] : 0)) return 0;
    if (d->n == d->space) {
        more = (int64_t *)realloc(d->ends, (size_t)(d->space * 2 + 64) * sizeof *more);
        if (more == NULL) return -1;
        d->ends = more;
        d->space = d->space * 2 + 64;
    }
    d->ends[d->n++] = end;
    return 0;
}

/* The first of n ascending ends above `at`. */
static inline int64_t documents_find(const int64_t *ends, int64_t n, int64_t at)
{
    int64_t low = 0, high = n;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (ends[middle] <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* An index as it is walked through, with the sequence or entry that is wrong. */
typedef struct documents_walk {
    document_ends *d;
    const token_file *f;
    int64_t sequences, entries, wrong;
    const char *why; /* NULL: nothing is wrong */
} documents_walk;

static inline int64_t documents_number(const documents_walk *w, int64_t at)
{
    int64_t v;
    memcpy(&v, w->f->index.data + at, sizeof v);
    return v;
}

/* Sequences follow one another in the file, and documents are made of whole ones. */
static inline void documents_body(void *user)
{
    documents_walk *w = (documents_walk *)user;
    const token_file *f = w->f;
    const int64_t offsets = TOKENS_INDEX_HEAD + w->sequences * 4, first = offsets + w->sequences * 8;
    const int64_t each = token_bytes[f->type];
    int64_t i, k, at = 0, next = 0;
    int32_t length;
    for (i = 0, k = 0; i <= w->sequences && w->why == NULL; ++i) {
        w->wrong = i;
        for (; k < w->entries && (next = documents_number(w, first + k * 8)) == i && w->why == NULL; ++k)
            if (documents_add(w->d, f->first + at) != 0) w->why = "memory is out";
        if (i == w->sequences || w->why != NULL) break;
        memcpy(&length, f->index.data + TOKENS_INDEX_HEAD + i * 4, sizeof length);
        if (length < 0 || length > f->n - at)
            w->why = "it does not lie within the file";
        else if (documents_number(w, offsets + i * 8) != at * each)
            w->why = "it does not begin where the one before it ends";
        at += length;
    }
    if (w->why != NULL) return;
    if (k < w->entries)
        w->why = "the documents do not begin at ascending sequences";
    else if (at != f->n)
        w->why = "the file has more tokens than the sequences";
    else if (documents_add(w->d, f->first + at) != 0)
        w->why = "memory is out";
}

/* documents_index -- those that a file has, behind those of the files before it: without an index it is one
 *
 * 0, or -1 with the sentence out
 */
static inline int documents_index(document_ends *d, const token_file *f)
{
    documents_walk w;
    int type;
    memset(&w, 0, sizeof w);
    w.d = d;
    w.f = f;
    if (f->index.data == NULL)
        return documents_add(d, f->first + f->n) == 0 ? 0
                                                      : cli_fail("out of memory: documents in %s", f->path);
    if (tokens_index_head(f, &w.sequences, &w.entries, &type) != 0) return -1;
    if (mapped_read(documents_body, &w) != 0)
        return cli_fail("%s became shorter while it was read", f->index_path);
    if (w.why == NULL) return 0;
    return cli_fail("%s, sequence %lld: %s", f->index_path, (long long)w.wrong, w.why);
}

#endif
