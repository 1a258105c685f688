/* oracle.h -- the same block in double precision and plain loops, without the library
 *
 *     oracle_inputs in = {...};
 *     oracle_results ref;
 *     oracle_run(&in, &ref);   0, or -1 without memory        oracle_free(&ref);
 *
 *     q = rope(x wq^T)  k = rope(x wk^T)  v = x wv^T     out = attention(q, k, v), scale 1/sqrt(d)
 *     dx, dwq, dwk, dwv, dsinks from dout by the chain rule
 *
 * x [R][D], R = batch * tokens; wq, wk [heads * d][D], wv [heads * v_dim][D]; out, dout [R][H * v_dim]. What
 * a token sees is asked for each pair of positions (oracle_sees). Loops run over contiguous rows, so that a
 * compiler can vectorise them without reordering a sum; threads split work that shares no results.
 */
#ifndef COMPARE_ORACLE_H
#define COMPARE_ORACLE_H

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct oracle_inputs {
    const float *x, *w[3], *dout; /* w: q, k, v */
    const float *sinks;           /* [H]; NULL = none */
    int64_t tokens, batch, dim;
    int heads, kv_heads, head_dim, v_dim, full;
    int64_t window;            /* 0 = none */
    const int64_t *cu_seqlens; /* borders in the flattened batch, [cu_seqlens_n + 1]; NULL = none */
    int64_t cu_seqlens_n;
    double softcap;      /* 0 = none */
    double theta;        /* of RoPE; 0 = none */
    const double *rates; /* [d/2], radians a position; NULL = theta's */
    double factor;       /* of what turns; 0 = 1 */
    int threads;
} oracle_inputs;

typedef struct oracle_results {
    double *out, *dx, *dw[3], *dsinks; /* dsinks [H], zeros without sinks */
    double *sink;                      /* [R][H]: the sink's share of a softmax, zeros without sinks */
} oracle_results;

typedef struct oracle_job {
    const oracle_inputs *in;
    oracle_results *ref;
    double *wide[3], *grad[3]; /* q k v and their gradients, [R][heads * d], [heads * v_dim] */
    double *sinks;             /* their gradients by sequence, [batch][H] */
    int64_t *packed;           /* of each row; 0 without packed sequences */
    int (*part)(struct oracle_job *job, int64_t i); /* -1 without memory */
    int64_t parts;
    int failed; /* written by any thread, to 1 only */
} oracle_job;

typedef struct oracle_worker {
    oracle_job *job;
    pthread_t thread;
    int64_t first;
} oracle_worker;

enum { ORACLE_THREADS_MAX = 64 };

static int64_t oracle_width(const oracle_inputs *in, int which)
{
    return (int64_t)(which == 0 ? in->heads : in->kv_heads) * (which == 2 ? in->v_dim : in->head_dim);
}

static void *oracle_main(void *p)
{
    oracle_worker *w = (oracle_worker *)p;
    int64_t i;
    for (i = w->first; i < w->job->parts; i += w->job->in->threads)
        if (w->job->part(w->job, i) != 0) __atomic_store_n(&w->job->failed, 1, __ATOMIC_RELAXED);
    return NULL;
}

/* Calls part(job, 0 .. parts-1), spread over threads. */
static int oracle_spread(oracle_job *job, int (*part)(oracle_job *job, int64_t i), int64_t parts)
{
    oracle_worker all[ORACLE_THREADS_MAX];
    int n, i;
    job->part = part;
    job->parts = parts;
    for (n = 0; n < job->in->threads; ++n) {
        all[n].job = job;
        all[n].first = n;
        if (n > 0 && pthread_create(&all[n].thread, NULL, oracle_main, &all[n]) != 0) job->failed = 1;
        if (job->failed) break;
    }
    if (!job->failed) oracle_main(&all[0]);
    for (i = 1; i < n; ++i) pthread_join(all[i].thread, NULL);
    return job->failed ? -1 : 0;
}

static void oracle_add(double *y, double a, const double *x, int64_t n)
{
    int64_t i;
    for (i = 0; i < n; ++i) y[i] += a * x[i];
}

static void oracle_add_f32(double *y, double a, const float *x, int64_t n)
{
    int64_t i;
    for (i = 0; i < n; ++i) y[i] += a * (double)x[i];
}

/* Turns every head of a row [width] by its position, or back; either way what turns is multiplied by the factor. */
static void oracle_rope(const oracle_inputs *in, double *row, int64_t width, int64_t pos, int inverse)
{
    int64_t at;
    int p, half = in->head_dim / 2;
    if (in->theta == 0) return;
    for (p = 0; p < half; ++p) {
        double rate = in->rates != NULL ? in->rates[p] : pow(in->theta, -2.0 * p / in->head_dim);
        double angle = (double)pos * rate, by = in->factor > 0 ? in->factor : 1;
        double c = by * cos(angle), s = by * (inverse ? -sin(angle) : sin(angle));
        for (at = p; at < width; at += in->head_dim) {
            double a = row[at], b = row[at + half];
            row[at] = a * c - b * s;
            row[at + half] = b * c + a * s;
        }
    }
}

/* Rows of q, k, v of one token. w is [width][D]; each element is a sum over D in order. */
static int oracle_project(oracle_job *job, int64_t i)
{
    const oracle_inputs *in = job->in;
    int which;
    for (which = 0; which < 3; ++which) {
        int64_t width = oracle_width(in, which), c, o;
        double *row = job->wide[which] + i * width;
        for (o = 0; o < width; ++o) {
            const float *x = in->x + i * in->dim, *w = in->w[which] + o * in->dim;
            double part[8] = {0}, sum = 0; /* eight chains, which a compiler can keep in vectors */
            for (c = 0; c + 8 <= in->dim; c += 8) {
                int k;
                for (k = 0; k < 8; ++k) part[k] += (double)x[c + k] * (double)w[c + k];
            }
            for (; c < in->dim; ++c) sum += (double)x[c] * (double)w[c];
            for (c = 0; c < 8; ++c) sum += part[c];
            row[o] = sum;
        }
        if (which < 2) oracle_rope(in, row, width, i % in->tokens, 0);
    }
    return 0;
}

/* May token t of sequence b see its token j? */
static int oracle_sees(const oracle_job *job, int64_t b, int64_t t, int64_t j)
{
    const oracle_inputs *in = job->in;
    const int64_t *packed = job->packed + b * in->tokens;
    if (!in->full && j > t) return 0;
    if (in->window > 0 && t - j >= in->window) return 0;
    return packed[t] == packed[j];
}

/* Attention of one sequence and key/value head with its query heads, forward and backward, query by query. */
static int oracle_attend(oracle_job *job, int64_t i)
{
    const oracle_inputs *in = job->in;
    int64_t S = in->tokens, d = in->head_dim, v_dim = in->v_dim, b = i / in->kv_heads, kv = i % in->kv_heads,
            t, j, e;
    int64_t group = in->heads / in->kv_heads, h;
    int64_t wide = oracle_width(in, 0), keys = oracle_width(in, 1), values = oracle_width(in, 2);
    double scale = 1 / sqrt((double)d);
    double *buf = (double *)malloc((size_t)(S * (d + v_dim + 3)) * sizeof *buf);
    double *kt = buf, *vt = kt + S * d, *p = vt + S * v_dim, *dp = p + S,
           *slope = dp + S; /* kt [d][S], vt [v_dim][S] */
    if (buf == NULL) return -1;
    for (j = 0; j < S; ++j) {
        for (e = 0; e < d; ++e) kt[e * S + j] = job->wide[1][(b * S + j) * keys + kv * d + e];
        for (e = 0; e < v_dim; ++e) vt[e * S + j] = job->wide[2][(b * S + j) * values + kv * v_dim + e];
    }
    for (t = 0; t < S; ++t) {
        int64_t first = 0, end;
        while (first < S && !oracle_sees(job, b, t, first)) ++first;
        for (end = first; end < S && oracle_sees(job, b, t, end);) ++end; /* what it sees is one run */
        for (h = kv * group; h < (kv + 1) * group; ++h) {
            int64_t at = (b * S + t) * wide + h * d, out = (b * S + t) * in->heads * v_dim + h * v_dim,
                    n = end - first;
            const double *q = job->wide[0] + at;
            double *o = job->ref->out + out, *dq = job->grad[0] + at;
            double sink = in->sinks != NULL ? (double)in->sinks[h] : -INFINITY;
            double most = sink, sum = 0, delta = 0;
            memset(p, 0, (size_t)n * sizeof *p);
            memset(dp, 0, (size_t)n * sizeof *dp);
            for (e = 0; e < d; ++e) oracle_add(p, scale * q[e], kt + e * S + first, n);
            for (e = 0; e < v_dim; ++e) oracle_add(dp, (double)in->dout[out + e], vt + e * S + first, n);
            for (j = 0; j < n; ++j) {
                double bent = in->softcap > 0 ? tanh(p[j] / in->softcap) : 0;
                slope[j] = scale * (1 - bent * bent);
                if (in->softcap > 0) p[j] = in->softcap * bent;
                most = p[j] > most ? p[j] : most;
            }
            for (j = 0; j < n; ++j) sum += p[j] = exp(p[j] - most);
            if (in->sinks != NULL) sum += exp(sink - most);
            for (j = 0; j < n; ++j) delta += (p[j] /= sum) * dp[j]; /* = dout * out */
            if (in->sinks != NULL) {
                double *share = job->ref->sink + (b * S + t) * in->heads + h;
                *share = exp(sink - most) / sum;
                job->sinks[b * in->heads + h] -= *share * delta;
            }
            for (j = 0; j < n; ++j) {
                int64_t row = b * S + first + j, key = row * keys + kv * d, value = row * values + kv * v_dim;
                double ds = slope[j] * p[j] * (dp[j] - delta);
                oracle_add(o, p[j], job->wide[2] + value, v_dim);
                oracle_add(dq, ds, job->wide[1] + key, d);
                oracle_add(job->grad[1] + key, ds, q, d);
                oracle_add_f32(job->grad[2] + value, p[j], in->dout + out, v_dim);
            }
        }
    }
    free(buf);
    return 0;
}

/* Gradient of one token's x, after RoPE has been turned back. */
static int oracle_grad_x(oracle_job *job, int64_t i)
{
    const oracle_inputs *in = job->in;
    double *dx = job->ref->dx + i * in->dim;
    int which;
    for (which = 0; which < 3; ++which) {
        int64_t width = oracle_width(in, which), o;
        double *g = job->grad[which] + i * width;
        if (which < 2) oracle_rope(in, g, width, i % in->tokens, 1);
        for (o = 0; o < width; ++o) oracle_add_f32(dx, g[o], in->w[which] + o * in->dim, in->dim);
    }
    return 0;
}

/* One row of the gradient of wq, wk or wv: rows 0 .. of all three, one after another. */
static int oracle_grad_w(oracle_job *job, int64_t i)
{
    const oracle_inputs *in = job->in;
    int64_t rows = in->batch * in->tokens, width, t;
    int which = 0;
    while (i >= oracle_width(in, which)) i -= oracle_width(in, which++);
    width = oracle_width(in, which);
    for (t = 0; t < rows; ++t)
        oracle_add_f32(job->ref->dw[which] + i * in->dim, job->grad[which][t * width + i],
                       in->x + t * in->dim, in->dim);
    return 0;
}

static void oracle_free(oracle_results *ref)
{
    int which;
    free(ref->out);
    free(ref->dx);
    free(ref->dsinks);
    free(ref->sink);
    for (which = 0; which < 3; ++which) free(ref->dw[which]);
    memset(ref, 0, sizeof *ref);
}

static double *oracle_buf(int64_t rows, int64_t cols)
{
    return (double *)calloc((size_t)rows, (size_t)cols * sizeof(double));
}

/* Which packed sequence each row is in. */
static void oracle_packed(oracle_job *job)
{
    const oracle_inputs *in = job->in;
    int64_t i, row;
    for (i = 0; i < in->cu_seqlens_n; ++i)
        for (row = in->cu_seqlens[i]; row < in->cu_seqlens[i + 1]; ++row) job->packed[row] = i;
}

static void oracle_job_free(oracle_job *job)
{
    int which;
    for (which = 0; which < 3; ++which) {
        free(job->wide[which]);
        free(job->grad[which]);
    }
    free(job->sinks);
    free(job->packed);
}

static int oracle_run(const oracle_inputs *in, oracle_results *ref)
{
    int64_t rows = in->batch * in->tokens, widths = 0, i;
    oracle_job job;
    int which, status = -1, whole;
    memset(&job, 0, sizeof job);
    memset(ref, 0, sizeof *ref);
    job.in = in;
    job.ref = ref;
    ref->out = oracle_buf(rows, (int64_t)in->heads * in->v_dim);
    ref->dx = oracle_buf(rows, in->dim);
    ref->dsinks = oracle_buf(1, in->heads);
    ref->sink = oracle_buf(rows, in->heads);
    job.sinks = oracle_buf(in->batch, in->heads);
    job.packed = (int64_t *)calloc((size_t)rows, sizeof *job.packed);
    whole = ref->out != NULL && ref->dx != NULL && ref->dsinks != NULL && ref->sink != NULL &&
            job.sinks != NULL && job.packed != NULL;
    for (which = 0; which < 3; ++which) {
        int64_t width = oracle_width(in, which);
        widths += width;
        ref->dw[which] = oracle_buf(width, in->dim);
        job.wide[which] = oracle_buf(rows, width);
        job.grad[which] = oracle_buf(rows, width);
        whole = whole && ref->dw[which] != NULL && job.wide[which] != NULL && job.grad[which] != NULL;
    }
    if (whole) oracle_packed(&job);
    if (whole && oracle_spread(&job, oracle_project, rows) == 0 &&
        oracle_spread(&job, oracle_attend, in->batch * in->kv_heads) == 0 &&
        oracle_spread(&job, oracle_grad_x, rows) == 0 && oracle_spread(&job, oracle_grad_w, widths) == 0)
        status = 0;
    for (i = 0; status == 0 && i < in->batch * in->heads; ++i) ref->dsinks[i % in->heads] += job.sinks[i];
    oracle_job_free(&job);
    if (status != 0) oracle_free(ref);
    return status;
}

#endif
