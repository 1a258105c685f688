/* staged.h -- the device's table for checks that keep their tensors in host memory
 *
 *     device_open(&d);
 *     staged_open(&d);
 *     check_cast(&rng, &staged.c);          lib/rows.h and lib/train_ops.h, as the CPU's tests run them
 *     staged_close();
 *
 * An entry of staged.c.ops copies all memory that its arguments reach to the device, gaps between rows with
 * it, calls the device's entry there and copies all of it back: what the kernel did to gaps shows where it
 * shows with the CPU's. Arguments that lie over each other on the host do so on the device, at the same
 * offsets from multiples of 256 bytes. Between and around them lie NaNs (0xff), which must be whole after the
 * call. Refusals are checked with device.c itself.
 */
#ifndef UPIPE_TEST_STAGED_H
#define UPIPE_TEST_STAGED_H

#include "device.h"

enum { STAGED_RANGES = 8, STAGED_GUARD = 512 };

typedef struct staged_range {
    char *host;
    size_t bytes, at; /* from the start of the buffer */
} staged_range;

static struct {
    device *d;
    upipe_ops ops;
    upipe_ctx c;
    char *buf;          /* on the device */
    char *image, *back; /* on the host: what goes there and what comes back */
    size_t bytes, used; /* of each of the three */
    staged_range range[STAGED_RANGES];
    int ranges;
    long calls;
    uint64_t digest; /* of all that came back: the same whatever order threads and streams took */
} staged;

/* Notes memory that a call reaches. */
static void staged_add(const void *p, size_t bytes)
{
    char *first = (char *)(uintptr_t)p, *last = first + bytes;
    int i;
    if (p == NULL || bytes == 0) return;
    for (i = 0; i < staged.ranges; ++i) {
        staged_range *r = &staged.range[i];
        if (first >= r->host + r->bytes || last <= r->host) continue;
        if (r->host < first) first = r->host;
        if (r->host + r->bytes > last) last = r->host + r->bytes;
        *r = staged.range[--staged.ranges];
        i = -1; /* the union may reach others */
    }
    staged.range[staged.ranges].host = first;
    staged.range[staged.ranges++].bytes = (size_t)(last - first);
}

static void staged_view(upipe_view v)
{
    int64_t last = (v.n - 1) * v.n_step + (v.h - 1) * v.h_step + v.d;
    if (v.n > 0 && v.d > 0) staged_add(v.data, (size_t)last * upipe_dtype_bytes(v.dtype));
}

static void staged_buf(size_t bytes)
{
    if (bytes <= staged.bytes) return;
    if (staged.buf != NULL) device_free(staged.d, staged.buf);
    free(staged.image);
    free(staged.back);
    staged.bytes = 2 * bytes;
    staged.buf = (char *)device_new(staged.d, staged.bytes);
    staged.image = (char *)malloc(staged.bytes);
    staged.back = (char *)malloc(staged.bytes);
}

/* Lays out and copies what was noted. */
static void staged_begin(void)
{
    size_t at = 0;
    int i;
    for (i = 0; i < staged.ranges; ++i) {
        staged_range *r = &staged.range[i];
        r->at = at + STAGED_GUARD + (uintptr_t)r->host % 256;
        at = (r->at + r->bytes + STAGED_GUARD + 255) / 256 * 256;
    }
    staged_buf(at);
    staged.used = at;
    memset(staged.image, 0xff, at);
    for (i = 0; i < staged.ranges; ++i)
        memcpy(staged.image + staged.range[i].at, staged.range[i].host, staged.range[i].bytes);
    device_put(staged.d, staged.buf, staged.image, at);
    staged.d->c.err = staged.c.err;
}

/* The device's address of the host's. */
static void *staged_at(const void *p)
{
    const char *host = (const char *)p;
    int i;
    for (i = 0; i < staged.ranges; ++i) {
        staged_range *r = &staged.range[i];
        if (host >= r->host && host < r->host + r->bytes) return staged.buf + r->at + (host - r->host);
    }
    return (void *)(uintptr_t)p;
}

static upipe_view staged_there(upipe_view v)
{
    v.data = staged_at(v.data);
    return v;
}

/* Copies back, and looks at what lies around. */
static upipe_status staged_end(upipe_status s, const char *call)
{
    size_t at = 0;
    int i, whole = 1;
    device_get(staged.d, staged.back, staged.buf, staged.used);
    for (i = 0; i < staged.ranges; ++i) {
        staged_range *r = &staged.range[i];
        for (; at < r->at; ++at) whole &= staged.back[at] == (char)0xff;
        /* what did not change may be constant on the host */
        if (memcmp(r->host, staged.back + at, r->bytes) != 0) memcpy(r->host, staged.back + at, r->bytes);
        for (; at < r->at + r->bytes; ++at)
            staged.digest = (staged.digest ^ (unsigned char)staged.back[at]) * 0x100000001b3u;
    }
    for (; at < staged.used; ++at) whole &= staged.back[at] == (char)0xff;
    CHECK_SAY(whole, "%s writes around its tensors", call);
    staged.ranges = 0;
    staged.c.err = staged.d->c.err;
    ++staged.calls;
    return s;
}

/* ---- entries ---- */

static upipe_status staged_sync(upipe_ctx *c)
{
    (void)c;
    return staged.d->ops.sync(&staged.d->c);
}

static upipe_status staged_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    (void)c;
    staged_add(dst, src != NULL ? bytes : 0);
    staged_add(src, dst != NULL ? bytes : 0);
    staged_begin();
    return staged_end(staged.d->ops.copy(&staged.d->c, staged_at(dst), staged_at(src), bytes), "copy");
}

static upipe_status staged_zero(upipe_ctx *c, void *dst, size_t bytes)
{
    (void)c;
    staged_add(dst, bytes);
    staged_begin();
    return staged_end(staged.d->ops.zero(&staged.d->c, staged_at(dst), bytes), "zero");
}

static upipe_status staged_cast(upipe_ctx *c, upipe_view dst, upipe_view src)
{
    (void)c;
    staged_view(dst);
    staged_view(src);
    staged_begin();
    return staged_end(staged.d->ops.cast(&staged.d->c, staged_there(dst), staged_there(src)), "cast");
}

static upipe_status staged_gemm(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags,
                                void *work, size_t work_bytes)
{
    (void)c;
    staged_view(out);
    staged_view(a);
    staged_view(b);
    staged_begin();
    return staged_end(staged.d->ops.gemm(&staged.d->c, staged_there(out), staged_there(a), staged_there(b),
                                         flags, work, work_bytes),
                      "gemm");
}

static size_t staged_gemm_bytes(const struct upipe_ops *ops, upipe_view out, upipe_view a, upipe_view b,
                                int flags)
{
    (void)ops;
    return staged.d->ops.gemm_bytes(&staged.d->ops, out, a, b, flags);
}

static upipe_status staged_rope(upipe_ctx *c, const upipe_rope *r)
{
    upipe_rope there = *r;
    (void)c;
    staged_add(r->x.data, (size_t)((r->count - 1) * r->step + (r->x.n - 1) * r->x.n_step +
                                   (r->x.h - 1) * r->x.h_step + r->x.d) *
                              upipe_dtype_bytes(r->x.dtype));
    staged_begin();
    there.x = staged_there(r->x);
    return staged_end(staged.d->ops.rope(&staged.d->c, &there), "rope");
}

static upipe_status staged_rmsnorm(upipe_ctx *c, upipe_view y, upipe_view x, const float *weight, float eps)
{
    (void)c;
    staged_view(y);
    staged_view(x);
    staged_add(weight, (size_t)x.d * sizeof *weight);
    staged_begin();
    return staged_end(staged.d->ops.rmsnorm(&staged.d->c, staged_there(y), staged_there(x),
                                            (const float *)staged_at(weight), eps),
                      "rmsnorm");
}

static upipe_status staged_rmsnorm_bwd(upipe_ctx *c, upipe_view dx, upipe_view dy, upipe_view x,
                                       const float *weight, float eps, float *dweight, int accumulate)
{
    (void)c;
    staged_view(dx);
    staged_view(dy);
    staged_view(x);
    staged_add(weight, (size_t)x.d * sizeof *weight);
    staged_add(dweight, (size_t)(x.h * x.d) * sizeof *dweight);
    staged_begin();
    return staged_end(staged.d->ops.rmsnorm_bwd(&staged.d->c, staged_there(dx), staged_there(dy),
                                                staged_there(x), (const float *)staged_at(weight), eps,
                                                (float *)staged_at(dweight), accumulate),
                      "rmsnorm_bwd");
}

static upipe_status staged_bias_bwd(upipe_ctx *c, float *db, upipe_view dy)
{
    (void)c;
    staged_view(dy);
    staged_add(db, (size_t)(dy.h * dy.d) * sizeof *db);
    staged_begin();
    return staged_end(staged.d->ops.bias_bwd(&staged.d->c, (float *)staged_at(db), staged_there(dy)),
                      "bias_bwd");
}

static upipe_status staged_rowdot(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b)
{
    (void)c;
    staged_view(out);
    staged_view(a);
    staged_view(b);
    staged_begin();
    return staged_end(staged.d->ops.rowdot(&staged.d->c, staged_there(out), staged_there(a), staged_there(b)),
                      "rowdot");
}

static upipe_status staged_sum(upipe_ctx *c, upipe_view dst, const float *src, int64_t step, int count,
                               int accumulate)
{
    (void)c;
    staged_view(dst);
    if (count > 0) staged_add(src, (size_t)((count - 1) * step + dst.n * dst.h * dst.d) * sizeof *src);
    staged_begin();
    return staged_end(staged.d->ops.sum(&staged.d->c, staged_there(dst), (const float *)staged_at(src), step,
                                        count, accumulate),
                      "sum");
}

static upipe_status staged_add_rows(upipe_ctx *c, upipe_view y, upipe_view x)
{
    (void)c;
    staged_view(y);
    staged_view(x);
    staged_begin();
    return staged_end(staged.d->ops.add(&staged.d->c, staged_there(y), staged_there(x)), "add");
}

static upipe_status staged_swiglu(upipe_ctx *c, upipe_view y, upipe_view gate, upipe_view up)
{
    (void)c;
    staged_view(y);
    staged_view(gate);
    staged_view(up);
    staged_begin();
    return staged_end(
        staged.d->ops.swiglu(&staged.d->c, staged_there(y), staged_there(gate), staged_there(up)), "swiglu");
}

static upipe_status staged_swiglu_bwd(upipe_ctx *c, upipe_view gate, upipe_view up, upipe_view dy)
{
    (void)c;
    staged_view(gate);
    staged_view(up);
    staged_view(dy);
    staged_begin();
    return staged_end(
        staged.d->ops.swiglu_bwd(&staged.d->c, staged_there(gate), staged_there(up), staged_there(dy)),
        "swiglu_bwd");
}

static upipe_status staged_cross_entropy(upipe_ctx *c, const upipe_cross_entropy *x)
{
    upipe_cross_entropy there = *x;
    (void)c;
    staged_view(x->logits);
    staged_view(x->grad);
    staged_add(x->loss, (size_t)x->logits.n * sizeof *x->loss);
    staged_add(x->targets, (size_t)x->logits.n * sizeof *x->targets);
    staged_begin();
    there.logits = staged_there(x->logits);
    there.grad = staged_there(x->grad);
    there.loss = (float *)staged_at(x->loss);
    there.targets = (const int32_t *)staged_at(x->targets);
    return staged_end(staged.d->ops.cross_entropy(&staged.d->c, &there), "cross_entropy");
}

static upipe_status staged_embed(upipe_ctx *c, upipe_view x, upipe_view table, const int32_t *tokens)
{
    (void)c;
    staged_view(x);
    staged_view(table);
    staged_add(tokens, (size_t)x.n * sizeof *tokens);
    staged_begin();
    return staged_end(staged.d->ops.embed(&staged.d->c, staged_there(x), staged_there(table),
                                          (const int32_t *)staged_at(tokens)),
                      "embed");
}

static upipe_status staged_embed_bwd(upipe_ctx *c, upipe_view dtable, upipe_view dx, const int32_t *tokens)
{
    (void)c;
    staged_view(dtable);
    staged_view(dx);
    staged_add(tokens, (size_t)dx.n * sizeof *tokens);
    staged_begin();
    return staged_end(staged.d->ops.embed_bwd(&staged.d->c, staged_there(dtable), staged_there(dx),
                                              (const int32_t *)staged_at(tokens)),
                      "embed_bwd");
}

static upipe_status staged_total(upipe_ctx *c, double *out, upipe_view x, int squares)
{
    (void)c;
    staged_view(x);
    staged_begin();
    return staged_end(staged.d->ops.total(&staged.d->c, out, staged_there(x), squares), "total");
}

static upipe_status staged_adamw(upipe_ctx *c, const upipe_adamw *a)
{
    upipe_adamw there = *a;
    size_t bytes = (size_t)a->n * sizeof *a->w;
    (void)c;
    staged_add(a->w, bytes);
    staged_add(a->m, bytes);
    staged_add(a->v, bytes);
    staged_add(a->g, bytes);
    staged_add(a->copy, (size_t)a->n * upipe_dtype_bytes(a->copy_dtype));
    staged_begin();
    there.w = (float *)staged_at(a->w);
    there.m = (float *)staged_at(a->m);
    there.v = (float *)staged_at(a->v);
    there.g = (const float *)staged_at(a->g);
    there.copy = staged_at(a->copy);
    return staged_end(staged.d->ops.adamw(&staged.d->c, &there), "adamw");
}

/* All entries but attention's. */
static void staged_open(device *d)
{
    memset(&staged, 0, sizeof staged);
    staged.d = d;
    staged_buf(16 << 10);
    staged.c.ops = &staged.ops;
    staged.ops.name = "staged";
    staged.ops.sync = staged_sync;
    staged.ops.copy = staged_copy;
    staged.ops.zero = staged_zero;
    staged.ops.cast = staged_cast;
    staged.ops.gemm = staged_gemm;
    staged.ops.gemm_bytes = staged_gemm_bytes;
    staged.ops.rope = staged_rope;
    staged.ops.rmsnorm = staged_rmsnorm;
    staged.ops.rmsnorm_bwd = staged_rmsnorm_bwd;
    staged.ops.bias_bwd = staged_bias_bwd;
    staged.ops.rowdot = staged_rowdot;
    staged.ops.sum = staged_sum;
    staged.ops.add = staged_add_rows;
    staged.ops.swiglu = staged_swiglu;
    staged.ops.swiglu_bwd = staged_swiglu_bwd;
    staged.ops.cross_entropy = staged_cross_entropy;
    staged.ops.embed = staged_embed;
    staged.ops.embed_bwd = staged_embed_bwd;
    staged.ops.total = staged_total;
    staged.ops.adamw = staged_adamw;
}

/* Ends with a line that runs with other seeds must repeat. */
static void staged_close(void)
{
    printf("%ld calls, digest %016llx\n", staged.calls, (unsigned long long)staged.digest);
    if (staged.buf != NULL) device_free(staged.d, staged.buf);
    free(staged.image);
    free(staged.back);
    memset(&staged, 0, sizeof staged);
}

#endif
