/* inputs.h -- what the block computes on: a text's tokens, embeddings, weights and a gradient, from one seed
 *
 *     inputs_check(&options);               0, or -1 with the sentence out: is the text long enough?
 *     inputs in;
 *     inputs_make(&in, &options, &ops);       likewise           inputs_free(&in);
 *
 *     x     [R][D]      row of an embedding table [256][D] for each byte of the text, root mean square 1
 *     w[3]  [H*d][D], [Hkv*d][D], [Hkv*v_dim][D]    normal, variance 1/D
 *     dout  [R][H*v_dim]   normal, variance 1               R = batch * tokens
 *     sinks [H]         normal, variance 1; NULL without --sinks
 *
 * All are f32 rounded to the storage type, but for the sinks, so that every method and every reference starts
 * from equal numbers.
 */
#ifndef COMPARE_INPUTS_H
#define COMPARE_INPUTS_H

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../common/regular.h"
#include "options.h"
#include "../common/random.h"

typedef struct inputs {
    float *x, *w[3], *dout, *sinks;
    void *stored[3]; /* the weights in the storage type; w itself where that is f32 */
    int64_t rows, dim, width[3], out_width;
} inputs;

/* Opens the text if it is long enough; NULL with the sentence out. */
static FILE *inputs_open(const options *o)
{
    long long need = (long long)(o->batch * o->tokens);
    const char *why;
    int64_t bytes = 0;
    FILE *f = regular_open(o->data, &bytes, &why);
    if (f == NULL)
        cli_fail("the text %s cannot be read: %s", o->data, why);
    else if (bytes < need)
        cli_fail("the text %s has %lld bytes, but %lld x %lld tokens need %lld", o->data, (long long)bytes,
                 (long long)o->batch, (long long)o->tokens, need);
    else
        return f;
    if (f != NULL) fclose(f);
    return NULL;
}

/* Is the text there, and long enough? To be asked before anything is computed from the number of tokens. */
static int inputs_check(const options *o)
{
    FILE *f = inputs_open(o);
    if (f == NULL) return -1;
    fclose(f);
    return 0;
}

/* The first batch * tokens bytes of the text; NULL with the sentence out. */
static unsigned char *inputs_text(const options *o)
{
    size_t got = 0, n = (size_t)(o->batch * o->tokens);
    FILE *f = inputs_open(o);
    unsigned char *text;
    if (f == NULL) return NULL;
    errno = 0;
    text = (unsigned char *)malloc(n);
    if (text != NULL) got = fread(text, 1, n, f);
    if (got < n) {
        cli_fail("%zu of %zu bytes of the text %s could be read: %s", got, n, o->data,
                 text == NULL || errno != 0 ? strerror(errno) : "it has become shorter");
        free(text);
        text = NULL;
    }
    fclose(f);
    return text;
}

static float *inputs_buf(int64_t rows, int64_t cols)
{
    return (float *)calloc((size_t)rows, (size_t)cols * sizeof(float));
}

/* Rounds v [rows][cols] to the storage type, in place. *stored, if wanted, gets the values in that type, in
 * host memory: v itself for f32. */
static int inputs_round(const upipe_ops *ops, const options *o, float *v, int64_t rows, int64_t cols,
                        void **stored)
{
    upipe_dtype dtype = (upipe_dtype)o->dtype;
    upipe_view wide = upipe_view_packed(v, UPIPE_F32, rows, 1, (int32_t)cols), narrow;
    upipe_ctx c;
    void *buf;
    int bad;
    if (stored != NULL) *stored = v;
    if (dtype == UPIPE_F32) return 0;
    buf = calloc((size_t)rows, (size_t)cols * upipe_dtype_bytes(dtype));
    if (buf == NULL) return -1;
    memset(&c, 0, sizeof c);
    c.ops = ops;
    narrow = upipe_view_packed(buf, dtype, rows, 1, (int32_t)cols);
    bad = ops->cast(&c, narrow, wide) != UPIPE_OK || ops->cast(&c, wide, narrow) != UPIPE_OK;
    if (stored != NULL)
        *stored = buf;
    else
        free(buf);
    return bad ? -1 : 0;
}

static void inputs_free(inputs *in)
{
    int which;
    free(in->x);
    free(in->dout);
    free(in->sinks);
    for (which = 0; which < 3; ++which) {
        if (in->stored[which] != in->w[which]) free(in->stored[which]);
        free(in->w[which]);
    }
    memset(in, 0, sizeof *in);
}

static void inputs_normal(random_state *r, float *v, int64_t n, double scale)
{
    int64_t i;
    for (i = 0; i < n; ++i) v[i] = (float)(random_normal(r) * scale);
}

/* A table whose rows have root mean square 1, and its row for every byte of the text. */
static int inputs_embed(inputs *in, const upipe_ops *ops, const options *o, float *table,
                        const unsigned char *text, random_state *r)
{
    int64_t i, j;
    inputs_normal(r, table, 256 * in->dim, 1);
    for (i = 0; i < 256; ++i) {
        float *row = table + i * in->dim;
        double squares = 0;
        for (j = 0; j < in->dim; ++j) squares += (double)row[j] * (double)row[j];
        for (j = 0; j < in->dim; ++j) row[j] = (float)((double)row[j] / sqrt(squares / (double)in->dim));
    }
    if (inputs_round(ops, o, table, 256, in->dim, NULL) != 0) return -1;
    for (i = 0; i < in->rows; ++i)
        memcpy(in->x + i * in->dim, table + text[i] * in->dim, (size_t)in->dim * sizeof *table);
    return 0;
}

static int inputs_fill(inputs *in, const options *o, const upipe_ops *ops, const unsigned char *text)
{
    float *table = inputs_buf(256, in->dim);
    random_state r;
    int which, bad;
    memset(&r, 0, sizeof r);
    r.state = (uint64_t)o->seed;
    in->x = inputs_buf(in->rows, in->dim);
    in->dout = inputs_buf(in->rows, in->out_width);
    bad =
        table == NULL || in->x == NULL || in->dout == NULL || inputs_embed(in, ops, o, table, text, &r) != 0;
    free(table);
    for (which = 0; which < 3 && !bad; ++which) {
        float *w = in->w[which] = inputs_buf(in->width[which], in->dim);
        if (w == NULL) return -1;
        inputs_normal(&r, w, in->width[which] * in->dim, 1 / sqrt((double)in->dim));
        bad = inputs_round(ops, o, w, in->width[which], in->dim, &in->stored[which]) != 0;
    }
    if (bad) return -1;
    inputs_normal(&r, in->dout, in->rows * in->out_width, 1);
    if (inputs_round(ops, o, in->dout, in->rows, in->out_width, NULL) != 0) return -1;
    if (!o->sinks) return 0;
    in->sinks = inputs_buf(1, o->heads);
    if (in->sinks == NULL) return -1;
    inputs_normal(&r, in->sinks, o->heads, 1);
    return 0;
}

static int inputs_make(inputs *in, const options *o, const upipe_ops *ops)
{
    unsigned char *text;
    int status;
    memset(in, 0, sizeof *in);
    in->rows = o->batch * o->tokens;
    in->dim = o->model_dim;
    in->width[0] = (int64_t)o->heads * o->head_dim;
    in->width[1] = (int64_t)o->kv_heads * o->head_dim;
    in->width[2] = (int64_t)o->kv_heads * o->v_dim;
    in->out_width = (int64_t)o->heads * o->v_dim;
    text = inputs_text(o);
    if (text == NULL) return -1;
    status = inputs_fill(in, o, ops, text);
    free(text);
    if (status != 0) {
        cli_fail("out of memory for %lld rows of %lld elements", (long long)in->rows, (long long)in->dim);
        inputs_free(in);
    }
    return status;
}

#endif
