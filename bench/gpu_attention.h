/* gpu_attention.h -- gpu.c's command attention: every contestant is checked, then timed, on the same tensors
 *
 * Contestants: the table's kernels for this device; where it is newer, the same table's for 8.0; cuDNN, and cuDNN with
 * its deterministic backward (ours always is), where the program was built with it. q, k, v and go are shared, the
 * rest is written anew by each.
 */
#ifndef GPU_ATTENTION_H
#define GPU_ATTENTION_H

#include "../examples/common/json.h"
#include "gpu_common.h"

#ifdef WITH_CUDNN
#include "gpu_cudnn.h"
#endif

enum { SEED_Q = 1, SEED_K, SEED_V, SEED_DOUT, HEAD_DIM_MAX = 256 };
enum { CHECK_O, CHECK_LSE, CHECK_DQ, CHECK_DK, CHECK_DV, CHECKS };

static const char *const check_names[] = {"o", "lse", "dq", "dk", "dv"};
/* lse: absolute; the others: of the largest number in the row */
static const double check_limits[] = {0.02, 1e-3, 0.02, 0.02, 0.02};

/* The row of d elements that fill has made of token i and head h. */
static void made(double *row, int d, int64_t i, int heads, int h, uint64_t seed)
{
    uint64_t at = ((uint64_t)i * (uint64_t)heads + (uint64_t)h) * (uint64_t)d;
    int k;
    for (k = 0; k < d; ++k) row[k] = (double)number_at(at + (uint64_t)k, seed);
}

static double dot(const double *a, const double *b, int n)
{
    double sum = 0;
    int k;
    for (k = 0; k < n; ++k) sum += a[k] * b[k];
    return sum;
}

/* to += factor * x */
static void add(double *to, double factor, const double *x, int n)
{
    int k;
    for (k = 0; k < n; ++k) to[k] += factor * x[k];
}

/* A NaN counts as more than any number. */
static double larger(double a, double b)
{
    return a >= b || isnan(a) ? a : b;
}

/* *worst: at least the largest error of the device's row of token i and head h, over the largest number expected. */
static upipe_status check_row(upipe_ctx *c, upipe_view v, int64_t i, int h, const double *expected,
                              double *worst)
{
    union {
        float wide[HEAD_DIM_MAX];
        uint16_t narrow[HEAD_DIM_MAX];
    } got;
    double error = 0, most = 1e-30;
    int k;
    UPIPE_TRY(c->ops->copy(c, &got, upipe_view_at(v, i, h), (size_t)v.d * upipe_dtype_bytes(v.dtype)));
    for (k = 0; k < v.d; ++k) {
        float x = v.dtype == UPIPE_F32 ? got.wide[k] : upipe_bf16_to_f32(got.narrow[k]);
        error = larger(error, fabs(expected[k] - (double)x));
        most = larger(most, fabs(expected[k]));
    }
    *worst = larger(*worst, error / most);
    return UPIPE_OK;
}

/* One query of the last head. buffer: two numbers a token. */
static upipe_status check_query(upipe_ctx *c, const options *o, const upipe_attn_grad *g, int64_t i,
                                double *buf, double *worst)
{
    double q[HEAD_DIM_MAX], dout[HEAD_DIM_MAX], key[HEAD_DIM_MAX], value[HEAD_DIM_MAX];
    double out[HEAD_DIM_MAX] = {0}, dq[HEAD_DIM_MAX] = {0};
    double *p = buf, *gp = buf + o->tokens, top = -INFINITY, sum = 0, delta = 0;
    double scale = 1 / sqrt((double)o->head_dim);
    int64_t first, end, j;
    int d = o->head_dim, v_dim = o->v_dim, h = o->heads - 1, kv = o->kv_heads - 1;
    float lse;
    upipe_attn_visible(&g->a, i, &first, &end);
    made(q, d, i, o->heads, h, SEED_Q);
    made(dout, v_dim, i, o->heads, h, SEED_DOUT);
    for (j = first; j < end; ++j) {
        made(key, d, j, o->kv_heads, kv, SEED_K);
        made(value, v_dim, j, o->kv_heads, kv, SEED_V);
        p[j] = scale * dot(q, key, d);
        gp[j] = dot(dout, value, v_dim);
        top = larger(top, p[j]);
    }
    for (j = first; j < end; ++j) sum += p[j] = exp(p[j] - top);
    for (j = first; j < end; ++j) delta += (p[j] /= sum) * gp[j];
    for (j = first; j < end; ++j) {
        made(key, d, j, o->kv_heads, kv, SEED_K);
        made(value, v_dim, j, o->kv_heads, kv, SEED_V);
        add(out, p[j], value, v_dim);
        add(dq, scale * p[j] * (gp[j] - delta), key, d);
    }
    UPIPE_TRY(c->ops->copy(c, &lse, upipe_view_at(g->a.lse, i, h), sizeof lse));
    worst[CHECK_LSE] = larger(worst[CHECK_LSE], fabs(top + log(sum) - (double)lse));
    UPIPE_TRY(check_row(c, g->a.o, i, h, out, &worst[CHECK_O]));
    return check_row(c, g->dq, i, h, dq, &worst[CHECK_DQ]);
}

/* One key of the last key/value head: what all queries of its group give to it. lse, delta: the device's. */
static upipe_status check_key(upipe_ctx *c, const options *o, const upipe_attn_grad *g, int64_t j,
                              const float *lse, const float *delta, double *worst)
{
    double q[HEAD_DIM_MAX], dout[HEAD_DIM_MAX], key[HEAD_DIM_MAX], value[HEAD_DIM_MAX];
    double dk[HEAD_DIM_MAX] = {0}, dv[HEAD_DIM_MAX] = {0}, scale = 1 / sqrt((double)o->head_dim);
    int d = o->head_dim, v_dim = o->v_dim, kv = o->kv_heads - 1, h;
    int64_t i, first, end;
    made(key, d, j, o->kv_heads, kv, SEED_K);
    made(value, v_dim, j, o->kv_heads, kv, SEED_V);
    for (h = kv * (o->heads / o->kv_heads); h < o->heads; ++h) {
        for (i = 0; i < o->tokens; ++i) {
            int64_t at = i * o->heads + h, there = i * g->a.lse.n_stride + h * g->a.lse.h_stride;
            double p;
            upipe_attn_visible(&g->a, i, &first, &end);
            if (j < first || j >= end) continue;
            made(q, d, i, o->heads, h, SEED_Q);
            made(dout, v_dim, i, o->heads, h, SEED_DOUT);
            p = exp(scale * dot(q, key, d) - (double)lse[there]);
            add(dv, p, dout, v_dim);
            add(dk, scale * p * (dot(dout, value, v_dim) - (double)delta[at]), q, d);
        }
    }
    UPIPE_TRY(check_row(c, g->dk, j, kv, dk, &worst[CHECK_DK]));
    return check_row(c, g->dv, j, kv, dv, &worst[CHECK_DV]);
}

/* ---- contestants ---- */

enum { OURS, OURS_80, CUDNN, CUDNN_SAME_BITS, CONTESTANTS };

static const char *const contestants[CONTESTANTS] = {"upipe", "upipe_80", "cudnn", "cudnn_deterministic"};

typedef struct contest {
    const options *o;
    upipe_attn_grad g;
    upipe_cuda *cuda; /* of the table */
    int who;
#ifdef WITH_CUDNN
    gpu_cudnn *cudnn;
#endif
} contest;

static upipe_status contest_fwd(upipe_ctx *c, void *user)
{
    contest *x = (contest *)user;
#ifdef WITH_CUDNN
    if (x->cudnn != NULL) return gpu_cudnn_fwd(c, x->cudnn, &x->g);
#endif
    return upipe_attn_fwd(c, &x->g.a);
}

/* delta = rowsum(go * o) belongs to it: the backward of other libraries includes it too. */
static upipe_status contest_bwd(upipe_ctx *c, void *user)
{
    contest *x = (contest *)user;
#ifdef WITH_CUDNN
    if (x->cudnn != NULL) return gpu_cudnn_bwd(c, x->cudnn, &x->g);
#endif
    UPIPE_TRY(c->ops->rowdot(c, x->g.delta, x->g.a.o, x->g.dout));
    return upipe_attn_bwd(c, &x->g);
}

/* Forward and backward once. The rows have long sums: no gradient here is a difference of near equals. */
static upipe_status check_contest(upipe_ctx *c, contest *x, double *worst)
{
    const options *o = x->o;
    const upipe_attn_grad *g = &x->g;
    const int64_t n = o->tokens, queries[] = {n / 3, n / 2, n - 1}, keys[] = {0, n / 2, n - 1 - n / 8};
    size_t all = (size_t)n * (size_t)o->heads;
    double *buf = (double *)malloc((size_t)n * 2 * sizeof *buf);
    float *lse = (float *)malloc(all * sizeof *lse), *delta = (float *)malloc(all * sizeof *delta);
    int i;
    if (buf == NULL || lse == NULL || delta == NULL)
        return upipe_fail(&c->err, UPIPE_ERR_MEMORY, "no entry left for a check");
    UPIPE_TRY(c->ops->zero(c, g->dk.data, (size_t)(n * o->kv_heads * o->head_dim) * 4));
    UPIPE_TRY(c->ops->zero(c, g->dv.data, (size_t)(n * o->kv_heads * o->v_dim) * 4));
    UPIPE_TRY(contest_fwd(c, x));
    UPIPE_TRY(contest_bwd(c, x));
    UPIPE_TRY(c->ops->rowdot(c, g->delta, g->a.o, g->dout));
    UPIPE_TRY(c->ops->copy(c, lse, g->a.lse.data, all * sizeof *lse));
    UPIPE_TRY(c->ops->copy(c, delta, g->delta.data, all * sizeof *delta));
    for (i = 0; i < CHECKS; ++i) worst[i] = 0;
    for (i = 0; i < 3; ++i) UPIPE_TRY(check_query(c, o, g, queries[i], buf, worst));
    for (i = 0; i < 3; ++i) UPIPE_TRY(check_key(c, o, g, keys[i], lse, delta, worst));
    free(buf);
    free(lse);
    free(delta);
    for (i = 0; i < CHECKS; ++i)
        if (!(worst[i] <= check_limits[i]))
            return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "%s: %s has an error of %g, more than %g",
                              contestants[x->who], check_names[i], worst[i], check_limits[i]);
    return UPIPE_OK;
}

/* What x.who runs on, made ready. UNSUPPORTED: it does not take this shape. ARG: it is not there. */
static upipe_status contest_open(upipe_ctx *c, contest *x)
{
    const int theirs = x->who == CUDNN || x->who == CUDNN_SAME_BITS;
    if (x->who == OURS_80 && x->cuda->capability / 10 != 9) return UPIPE_ERR_ARG;
    if (!theirs) return UPIPE_OK;
#ifdef WITH_CUDNN
    if (x->o->cu_seqlens > 0)
        return upipe_fail(&c->err, UPIPE_ERR_UNSUPPORTED,
                          "cuDNN has another layout for packed sequences (cu_seqlens)");
    x->g.dk.dtype = x->g.dv.dtype = UPIPE_BF16; /* it overwrites where ours adds */
    x->g.a.lse.n_stride = 1;
    x->g.a.lse.h_stride = x->o->tokens;
    return gpu_cudnn_open(&x->cudnn, &x->g, x->who == CUDNN_SAME_BITS, &c->err);
#else
    (void)c;
    return UPIPE_ERR_ARG;
#endif
}

static void contest_close(contest *x)
{
#ifdef WITH_CUDNN
    gpu_cudnn_close(x->cudnn);
    x->cudnn = NULL;
#else
    (void)x;
#endif
}

/* A contestant, with its figures or why there are none. */
typedef struct turns {
    contest x;
    upipe_status status;
    upipe_err err;
    double errors[CHECKS], seconds[2][RUNS]; /* forward, backward */
    char chosen[2][UPIPE_CUDA_CHOICE];
} turns;

/* The kernels that the table takes while this contestant runs. */
static void contest_use(const contest *x)
{
    x->cuda->avoid = x->who == OURS_80 ? UPIPE_CUDA_AVOID_FWD90 | UPIPE_CUDA_AVOID_BWD90 : x->o->avoid;
}

static void contest_check(upipe_ctx *c, turns *t)
{
    if (t->status == UPIPE_OK) contest_use(&t->x);
    if (t->status == UPIPE_OK) t->status = check_contest(c, &t->x, t->errors);
    t->err = c->err;
}

/* One run of each direction; a negative one warms up. */
static void contest_time(upipe_ctx *c, turns *t, int run)
{
    static timed_call *const calls[2] = {contest_fwd, contest_bwd};
    double unused;
    int way;
    for (way = 0; way < 2 && t->status == UPIPE_OK; ++way) {
        contest_use(&t->x);
        t->x.cuda->choice = t->chosen[way];
        t->status = timed_once(c, calls[way], &t->x, run < 0 ? &unused : &t->seconds[way][run]);
        t->x.cuda->choice = NULL;
        t->err = c->err;
    }
}

/* All contestants in turn, so that clock and heat are the same for each; fewer than RUNS times, but at least three, where
 * the slowest takes longer than RUNS_SECONDS. Returns the runs. */
static int contest_all(upipe_ctx *c, turns *t, int count)
{
    double all[CONTESTANTS] = {0}, most = 0;
    int run, i;
    for (run = -1; run < RUNS && (run < 3 || most < RUNS_SECONDS); ++run)
        for (i = 0; i < count; ++i) {
            contest_time(c, &t[i], run);
            if (run < 0 || t[i].status != UPIPE_OK) continue;
            all[i] += t[i].seconds[0][run] + t[i].seconds[1][run];
            most = larger(most, all[i]);
        }
    return run;
}

/* Half of what lies between the first and the third quarter of the sorted runs, over their median. */
static double spread(const double *sorted, int runs)
{
    return (sorted[runs * 3 / 4] - sorted[runs / 4]) / 2 / sorted[runs / 2];
}

/* The contestant's entry. */
static void contest_print(turns *t, double fwd_flop, double bwd_flop, int runs)
{
    double fwd, bwd;
    int i;
    printf("{\"name\": \"%s\", ", contestants[t->x.who]);
    if (t->status != UPIPE_OK) {
        printf("\"%s\": ", t->status == UPIPE_ERR_UNSUPPORTED && t->x.who != OURS ? "refused" : "failed");
        json_quote(stdout, t->err.text);
        printf("}");
        return;
    }
    fwd = median(t->seconds[0], runs), bwd = median(t->seconds[1], runs);
    printf(
        "\"runs\": %d, \"fwd_seconds\": %.6g, \"fwd_flop_per_s\": %.4g, \"fwd_spread\": %.2g, \"bwd_seconds\": %.6g, "
        "\"bwd_flop_per_s\": %.4g, \"bwd_spread\": %.2g, \"fwd_chosen\": \"%s\", \"bwd_chosen\": \"%s\", \"checked\": {",
        runs, fwd, fwd_flop / fwd, spread(t->seconds[0], runs), bwd, bwd_flop / bwd,
        spread(t->seconds[1], runs), t->chosen[0], t->chosen[1]);
    for (i = 0; i < CHECKS; ++i) printf("%s\"%s\": %.2g", i > 0 ? ", " : "", check_names[i], t->errors[i]);
    printf("}}");
}

/* ---- the command ---- */

/* Flops, as everybody counts: two a score and element, of keys and of values forward, three and two times backward; of a
 * causal mask half of all, of other masks the visible ones. */
static double attention_flop(const options *o, const upipe_attn *a, int of_keys, int of_values)
{
    double pairs = (double)o->tokens * (double)o->tokens / (o->full ? 1 : 2);
    if (a->mask.window > 0 || a->mask.borders.cu_seqlens != NULL) pairs = upipe_attn_pairs(a);
    return 2.0 * pairs * o->heads * (of_keys * (double)o->head_dim + of_values * (double)o->v_dim);
}

static upipe_status measure_attention(upipe_ctx *c, upipe_cuda *cuda, const options *o)
{
    const int64_t n = o->tokens * o->heads * o->head_dim, m = o->tokens * o->kv_heads * o->head_dim;
    const int64_t n_v = o->tokens * o->heads * o->v_dim, m_v = o->tokens * o->kv_heads * o->v_dim;
    const int64_t sizes[] = {n, n_v, n_v, n, m, m_v, m, m_v}; /* q o go dq k v dk dv */
    const int64_t rows = o->tokens * o->heads;
    int64_t *cu_seqlens = (int64_t *)malloc(((size_t)o->cu_seqlens + 1) * sizeof *cu_seqlens);
    contest x;
    upipe_attn *a = &x.g.a;
    void *p[11];
    double fwd_flop, bwd_flop;
    size_t work[2];
    int i, count = 0, runs;
    static turns all[CONTESTANTS];
    memset(&x, 0, sizeof x);
    cuda->margin = o->margin;
    x.o = o, x.cuda = cuda;
    for (i = 0; i < 8; ++i) UPIPE_TRY(buf(c, &p[i], sizes[i], i < 6 ? UPIPE_BF16 : UPIPE_F32));
    for (i = 8; i < 10; ++i) UPIPE_TRY(buf(c, &p[i], rows, UPIPE_F32)); /* lse delta */
    UPIPE_TRY(fill(c, p[0], n, SEED_Q));
    UPIPE_TRY(fill(c, p[2], n_v, SEED_DOUT));
    UPIPE_TRY(fill(c, p[4], m, SEED_K));
    UPIPE_TRY(fill(c, p[5], m_v, SEED_V));
    a->q = upipe_view_packed(p[0], UPIPE_BF16, o->tokens, o->heads, o->head_dim);
    a->o = upipe_view_packed(p[1], UPIPE_BF16, o->tokens, o->heads, o->v_dim);
    x.g.dout = upipe_view_packed(p[2], UPIPE_BF16, o->tokens, o->heads, o->v_dim);
    x.g.dq = upipe_view_packed(p[3], UPIPE_BF16, o->tokens, o->heads, o->head_dim);
    a->k = upipe_view_packed(p[4], UPIPE_BF16, o->tokens, o->kv_heads, o->head_dim);
    a->v = upipe_view_packed(p[5], UPIPE_BF16, o->tokens, o->kv_heads, o->v_dim);
    x.g.dk = upipe_view_packed(p[6], UPIPE_F32, o->tokens, o->kv_heads, o->head_dim);
    x.g.dv = upipe_view_packed(p[7], UPIPE_F32, o->tokens, o->kv_heads, o->v_dim);
    a->lse = upipe_view_packed(p[8], UPIPE_F32, o->tokens, o->heads, 1);
    x.g.delta = upipe_view_packed(p[9], UPIPE_F32, o->tokens, o->heads, 1);
    a->mask.causal = !o->full;
    a->mask.window = o->window;
    for (i = 0; i <= o->cu_seqlens; ++i)
        cu_seqlens[i] = o->cu_seqlens > 0 ? o->tokens * i / o->cu_seqlens : 0;
    a->mask.borders.cu_seqlens = o->cu_seqlens > 0 ? cu_seqlens : NULL;
    a->mask.borders.cu_seqlens_n = o->cu_seqlens;
    work[0] = c->ops->attn_bytes(c->ops, a, 0);
    work[1] = c->ops->attn_bytes(c->ops, a, 1);
    a->work_bytes = work[0] > work[1] ? work[0] : work[1];
    UPIPE_TRY(upipe_cuda_slab(&p[10], a->work_bytes, &c->err));
    a->work = p[10];
    fwd_flop = attention_flop(o, a, 1, 1), bwd_flop = attention_flop(o, a, 3, 2);
    printf(
        "{\"tokens\": %lld, \"heads\": %d, \"kv_heads\": %d, \"head_dim\": %d, \"v_dim\": %d, \"causal\": %s, "
        "\"window\": %lld, \"margin\": %d, \"cu_seqlens\": %d, \"fwd_flop\": %.0f, \"bwd_flop\": %.0f, ",
        (long long)o->tokens, o->heads, o->kv_heads, o->head_dim, o->v_dim, o->full ? "false" : "true",
        (long long)o->window, o->margin, o->cu_seqlens, fwd_flop, bwd_flop);
    /* what must pass the memory at least once: q k v o lse; q k v o go dq dk dv lse delta */
    printf("\"fwd_bytes\": %.0f, \"bwd_bytes\": %.0f, \"work_bytes_fwd\": %zu, \"work_bytes_bwd\": %zu, "
           "\"kernels\": [",
           (double)(n + n_v + m + m_v) * 2 + (double)rows * 4,
           (double)(2 * n + 2 * n_v + m + m_v) * 2 + (double)(m + m_v) * 4 + (double)rows * 8, work[0],
           work[1]);
    for (x.who = 0; x.who < CONTESTANTS; ++x.who) {
        turns *t = &all[count];
        memset(t, 0, sizeof *t);
        t->x = x;
        if (o->kernels != 0 && o->kernels != x.who + 1) continue;
        t->status = contest_open(c, &t->x);
        t->err = c->err;
        if (t->status != UPIPE_ERR_ARG) ++count;
    }
    for (i = 0; i < count; ++i) contest_check(c, &all[i]);
    runs = contest_all(c, all, count);
    for (i = 0; i < count; ++i) {
        contest_print(&all[i], fwd_flop, bwd_flop, runs);
        if (i + 1 < count) printf(", ");
        contest_close(&all[i].x);
    }
    puts("]}");
    for (i = 0; i <= 10; ++i)
        upipe_cuda_slab_free(p[i], NULL); /* a kernel that failed may have lost the device */
    free(cu_seqlens);
    return UPIPE_OK;
}

#endif
