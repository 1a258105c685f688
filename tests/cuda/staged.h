/* staged.h -- the device's table for checks that keep their tensors in host memory
 *
 *     device_open(&d);
 *     staged_open(&d);
 *     check_rows(&rng, &staged.c);          lib/rows.h, lib/attn.h and others, as the CPU's tests run them
 *     staged_close();
 *
 * An entry of staged.c.ops copies all memory that its arguments reach to the device, gaps between rows with
 * it, calls the device's entry there and copies all of it back: what the kernel did to gaps shows where it
 * shows with the CPU's. Arguments that lie over each other on the host do so on the device, at the same
 * offsets from multiples of 256 bytes. Between and around them lie NaNs (0xff), which must be whole after the
 * call. Attention's tensors lie in an allocation each, so that the fake finds who leaves one, its scratch is exactly
 * what was asked for, and its list of packed sequences is spoilt when the call has returned. Refusals are checked
 * with device.c itself.
 */
#ifndef UPIPE_TEST_STAGED_H
#define UPIPE_TEST_STAGED_H

#include "device.h"

#include "upipe/upipe_attn.h"

enum { STAGED_RANGES = 16, STAGED_GUARD = 512 };

typedef struct staged_range {
    char *host;
    size_t bytes, at; /* from the start of the image */
    char *there;      /* on the device */
    char *alone;      /* the device's allocation for this range, guards with it; NULL: it lies in buf */
} staged_range;

static struct {
    device *d;
    upipe_ops ops;
    upipe_ctx c;
    void (*look)(const upipe_attn_grad *g); /* before a backward, with the device's views; NULL: nothing */
    char *buf, *image;                      /* of all ranges, on the device, and what goes there */
    char *back;                             /* what comes back */
    size_t bytes, back_bytes, used;
    staged_range range[STAGED_RANGES];
    int ranges;
    long calls;
    uint64_t digest; /* of all that came back: the same whatever order threads and streams took */
} staged;

/* Notes memory that a call reaches. */
static void staged_reach(const void *p, size_t bytes)
{
    char *first = (char *)(uintptr_t)p, *last = first + bytes;
    if (p == NULL || bytes == 0) return;
    for (int i = 0; i < staged.ranges; ++i) {
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

static void staged_reach_view(upipe_view v)
{
    int64_t last = (v.n - 1) * v.n_stride + (v.h - 1) * v.h_stride + v.d;
    if (v.n > 0 && v.d > 0) staged_reach(v.data, (size_t)last * upipe_dtype_bytes(v.dtype));
}

/* Lays out what was noted, and copies it: into one buffer, or apart. */
static void staged_begin(int apart)
{
    size_t at = 0;
    for (int i = 0; i < staged.ranges; ++i) {
        staged_range *r = &staged.range[i];
        r->at = at + STAGED_GUARD + (uintptr_t)r->host % 256;
        at = (r->at + r->bytes + STAGED_GUARD + 255) / 256 * 256;
    }
    staged.used = at;
    if (at > staged.back_bytes) {
        free(staged.back);
        staged.back = (char *)malloc(staged.back_bytes = at + at / 2);
    }
    if (!apart && at > staged.bytes) {
        if (staged.buf != NULL) device_free(staged.d, staged.buf);
        free(staged.image);
        staged.bytes = at + at / 2;
        staged.buf = (char *)device_new(staged.d, staged.bytes);
        staged.image = (char *)malloc(staged.bytes);
    }
    if (!apart) memset(staged.image, 0xff, at);
    for (int i = 0; i < staged.ranges; ++i) {
        staged_range *r = &staged.range[i];
        const size_t before = STAGED_GUARD + (uintptr_t)r->host % 256;
        if (!apart) memcpy(staged.image + r->at, r->host, r->bytes);
        r->alone = apart ? (char *)device_new(staged.d, before + r->bytes + STAGED_GUARD) : NULL;
        r->there = apart ? r->alone + before : staged.buf + r->at;
        if (apart) device_put(staged.d, r->there, r->host, r->bytes);
    }
    if (!apart) device_put(staged.d, staged.buf, staged.image, at);
    staged.d->c.err = staged.c.err;
}

/* The device's address of the host's. */
static void *staged_at(const void *p)
{
    const char *host = (const char *)p;
    for (int i = 0; i < staged.ranges; ++i) {
        staged_range *r = &staged.range[i];
        if (host >= r->host && host < r->host + r->bytes) return r->there + (host - r->host);
    }
    return (void *)(uintptr_t)p;
}

static upipe_view staged_view(upipe_view v)
{
    v.data = staged_at(v.data);
    return v;
}

/* Copies back, and looks at what lies around. */
static upipe_status staged_end(upipe_status s, const char *call)
{
    size_t at = 0, part;
    int whole = 1;
    if (staged.ranges > 0 && staged.range[0].alone != NULL) {
        memset(staged.back, 0xff, staged.used);
        for (int i = 0; i < staged.ranges; ++i) {
            staged_range *r = &staged.range[i];
            const size_t before = (size_t)(r->there - r->alone);
            device_get(staged.d, staged.back + r->at - before, r->alone, before + r->bytes + STAGED_GUARD);
            device_free(staged.d, r->alone);
        }
    } else
        device_get(staged.d, staged.back, staged.buf, staged.used);
    for (int i = 0; i < staged.ranges; ++i) {
        staged_range *r = &staged.range[i];
        for (; at < r->at; ++at) whole &= staged.back[at] == (char)0xff;
        /* what did not change may be constant on the host */
        if (memcmp(r->host, staged.back + at, r->bytes) != 0) memcpy(r->host, staged.back + at, r->bytes);
        for (; at < r->at + r->bytes; at += part) {
            uint64_t word = 0;
            part = r->at + r->bytes - at < sizeof word ? r->at + r->bytes - at : sizeof word;
            memcpy(&word, staged.back + at, part);
            staged.digest = (staged.digest ^ word) * 0x100000001b3u;
        }
    }
    for (; at < staged.used; ++at) whole &= staged.back[at] == (char)0xff;
    CHECK_SAY(whole, "%s writes around its tensors", call);
    staged.ranges = 0;
    staged.c.err = staged.d->c.err;
    ++staged.calls;
    return s;
}

/* ---- entries ---- */

/* An entry that notes what it reaches, and calls the device's with the arguments behind. */
#define STAGED(entry, reach, ...)                                                  \
    {                                                                              \
        (void)c;                                                                   \
        reach;                                                                     \
        staged_begin(0);                                                           \
        return staged_end(staged.d->ops.entry(&staged.d->c, __VA_ARGS__), #entry); \
    }
#define VIEW(v)      staged_reach_view(v)
#define FLOATS(p, n) staged_reach((p), (size_t)(n) * sizeof(float))

/* clang-format off */
static upipe_status staged_sync(upipe_ctx *c)
{
    (void)c;
    return staged.d->ops.sync(&staged.d->c);
}

static upipe_status staged_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
STAGED(copy, (staged_reach(dst, src != NULL ? bytes : 0), staged_reach(src, dst != NULL ? bytes : 0)),
       staged_at(dst), staged_at(src), bytes)

static upipe_status staged_zero(upipe_ctx *c, void *dst, size_t bytes)
STAGED(zero, staged_reach(dst, bytes), staged_at(dst), bytes)

static upipe_status staged_cast(upipe_ctx *c, upipe_view dst, upipe_view src)
STAGED(cast, (VIEW(dst), VIEW(src)), staged_view(dst), staged_view(src))

static upipe_status staged_gemm(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b, int flags, void *work,
                                size_t work_bytes)
STAGED(gemm, (VIEW(out), VIEW(a), VIEW(b)), staged_view(out), staged_view(a), staged_view(b), flags, work, work_bytes)

static upipe_status staged_rmsnorm(upipe_ctx *c, upipe_view y, upipe_view x, const float *weight, float eps)
STAGED(rmsnorm, (VIEW(y), VIEW(x), FLOATS(weight, x.d)), staged_view(y), staged_view(x),
       (const float *)staged_at(weight), eps)

static upipe_status staged_rmsnorm_bwd(upipe_ctx *c, upipe_view dx, upipe_view dy, upipe_view x, const float *weight,
                                       float eps, float *dweight, int accumulate)
STAGED(rmsnorm_bwd, (VIEW(dx), VIEW(dy), VIEW(x), FLOATS(weight, x.d), FLOATS(dweight, x.h * x.d)), staged_view(dx),
       staged_view(dy), staged_view(x), (const float *)staged_at(weight), eps, (float *)staged_at(dweight), accumulate)

static upipe_status staged_bias_bwd(upipe_ctx *c, float *db, upipe_view dy)
STAGED(bias_bwd, (VIEW(dy), FLOATS(db, dy.h * dy.d)), (float *)staged_at(db), staged_view(dy))

static upipe_status staged_rowdot(upipe_ctx *c, upipe_view out, upipe_view a, upipe_view b)
STAGED(rowdot, (VIEW(out), VIEW(a), VIEW(b)), staged_view(out), staged_view(a), staged_view(b))

static upipe_status staged_sum(upipe_ctx *c, upipe_view dst, const float *src, int64_t step, int count, int accumulate)
STAGED(sum, (VIEW(dst), FLOATS(src, count > 0 ? (count - 1) * step + dst.n * dst.h * dst.d : 0)), staged_view(dst),
       (const float *)staged_at(src), step, count, accumulate)

static upipe_status staged_add(upipe_ctx *c, upipe_view y, upipe_view x)
STAGED(add, (VIEW(y), VIEW(x)), staged_view(y), staged_view(x))

static upipe_status staged_scale(upipe_ctx *c, upipe_view y, upipe_view x, float factor)
STAGED(scale, (VIEW(y), VIEW(x)), staged_view(y), staged_view(x), factor)

static upipe_status staged_gate(upipe_ctx *c, upipe_gate_kind kind, upipe_view y, upipe_view gate, upipe_view up)
STAGED(gate, (VIEW(y), VIEW(gate), VIEW(up)), kind, staged_view(y), staged_view(gate), staged_view(up))

static upipe_status staged_gate_bwd(upipe_ctx *c, upipe_gate_kind kind, upipe_view gate, upipe_view up, upipe_view dy)
STAGED(gate_bwd, (VIEW(gate), VIEW(up), VIEW(dy)), kind, staged_view(gate), staged_view(up), staged_view(dy))

static upipe_status staged_embed(upipe_ctx *c, upipe_view x, upipe_view table, const int32_t *tokens)
STAGED(embed, (VIEW(x), VIEW(table), FLOATS(tokens, x.n)), staged_view(x), staged_view(table),
       (const int32_t *)staged_at(tokens))

static upipe_status staged_embed_bwd(upipe_ctx *c, upipe_view dtable, upipe_view dx, const int32_t *tokens)
STAGED(embed_bwd, (VIEW(dtable), VIEW(dx), FLOATS(tokens, dx.n)), staged_view(dtable), staged_view(dx),
       (const int32_t *)staged_at(tokens))

static upipe_status staged_total(upipe_ctx *c, double *out, upipe_view x, int squares)
STAGED(total, (VIEW(x), staged_reach(out, out != NULL ? sizeof *out : 0)), (double *)staged_at(out), staged_view(x),
       squares)
    /* clang-format on */

    static upipe_status staged_rope(upipe_ctx *c, const upipe_rope *r)
{
    const upipe_view x = r->x;
    const int64_t last = (r->count - 1) * r->step + (x.n - 1) * x.n_stride + (x.h - 1) * x.h_stride + x.d;
    upipe_rope there = *r;
    (void)c;
    staged_reach(x.data, (size_t)last * upipe_dtype_bytes(x.dtype));
    staged_begin(0);
    there.x = staged_view(x);
    return staged_end(staged.d->ops.rope(&staged.d->c, &there), "rope");
}

static upipe_status staged_cross_entropy(upipe_ctx *c, const upipe_cross_entropy *x)
{
    upipe_cross_entropy there = *x;
    (void)c;
    VIEW(x->logits), VIEW(x->grad), FLOATS(x->loss, x->logits.n), FLOATS(x->targets, x->logits.n);
    staged_begin(0);
    there.logits = staged_view(x->logits);
    there.grad = staged_view(x->grad);
    there.loss = (float *)staged_at(x->loss);
    there.targets = (const int32_t *)staged_at(x->targets);
    return staged_end(staged.d->ops.cross_entropy(&staged.d->c, &there), "cross_entropy");
}

static upipe_status staged_adamw(upipe_ctx *c, const upipe_adamw *a)
{
    upipe_adamw there = *a;
    (void)c;
    FLOATS(a->w, a->n), FLOATS(a->m, a->n), FLOATS(a->v, a->n), FLOATS(a->g, a->n);
    staged_reach(a->copy, (size_t)a->n * upipe_dtype_bytes(a->copy_dtype));
    staged_begin(0);
    there.w = (float *)staged_at(a->w);
    there.m = (float *)staged_at(a->m);
    there.v = (float *)staged_at(a->v);
    there.g = (const float *)staged_at(a->g);
    there.copy = staged_at(a->copy);
    return staged_end(staged.d->ops.adamw(&staged.d->c, &there), "adamw");
}

static size_t staged_gemm_bytes(const upipe_ops *ops, upipe_view out, upipe_view a, upipe_view b, int flags)
{
    (void)ops;
    return staged.d->ops.gemm_bytes(&staged.d->ops, out, a, b, flags);
}

static size_t staged_attn_bytes(const upipe_ops *ops, const upipe_attn *a, int backward)
{
    (void)ops;
    return staged.d->ops.attn_bytes(&staged.d->ops, a, backward);
}

/* Attention forward, or backward where there are gradients. */
static upipe_status staged_attend(const upipe_attn *a, const upipe_attn_grad *g)
{
    const size_t seqlens_bytes =
        ((size_t)a->mask.borders.cu_seqlens_n + 1) * sizeof *a->mask.borders.cu_seqlens;
    int64_t *seqlens = NULL;
    upipe_attn_grad there;
    upipe_status s;
    memset(&there, 0, sizeof there);
    if (g != NULL) {
        there = *g;
        VIEW(g->dout), VIEW(g->delta), VIEW(g->dq), VIEW(g->dk), VIEW(g->dv), FLOATS(g->dsinks, a->q.h);
    } else {
        there.a = *a;
        VIEW(a->o);
    }
    VIEW(a->q), VIEW(a->k), VIEW(a->v), VIEW(a->lse), FLOATS(a->mask.sinks, a->q.h);
    staged_begin(1);
    there.a.q = staged_view(a->q), there.a.k = staged_view(a->k), there.a.v = staged_view(a->v);
    there.a.lse = staged_view(a->lse);
    there.a.mask.sinks = (const float *)staged_at(a->mask.sinks);
    if (g == NULL) there.a.o = staged_view(a->o);
    if (g != NULL) {
        there.a.o = upipe_view_packed(NULL, a->q.dtype, 0, 0, 0); /* not read */
        there.dout = staged_view(g->dout), there.delta = staged_view(g->delta);
        there.dq = staged_view(g->dq), there.dk = staged_view(g->dk), there.dv = staged_view(g->dv);
        there.dsinks = (float *)staged_at(g->dsinks);
    }
    if (a->mask.borders.cu_seqlens != NULL) {
        seqlens = (int64_t *)malloc(seqlens_bytes);
        if (seqlens == NULL) exit(2);
        there.a.mask.borders.cu_seqlens =
            (const int64_t *)memcpy(seqlens, a->mask.borders.cu_seqlens, seqlens_bytes);
    }
    there.a.work = device_new(staged.d, a->work_bytes);
    if (g != NULL && staged.look != NULL) staged.look(&there);
    s = g != NULL ? upipe_attn_bwd(&staged.d->c, &there) : upipe_attn_fwd(&staged.d->c, &there.a);
    if (seqlens != NULL) memset(seqlens, 0x7f, seqlens_bytes);
    s = staged_end(s, "attention");
    device_free(staged.d, there.a.work);
    free(seqlens);
    return s;
}

static upipe_status staged_attn_fwd(upipe_ctx *c, const upipe_attn *a)
{
    (void)c;
    return staged_attend(a, NULL);
}

static upipe_status staged_attn_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    (void)c;
    return staged_attend(&g->a, g);
}

#undef STAGED
#undef VIEW
#undef FLOATS

static void staged_open(device *d)
{
    memset(&staged, 0, sizeof staged);
    staged.d = d;
    staged.c.ops = &staged.ops;
    staged.ops.name = "staged";
    staged.ops.attn_can = d->ops.attn_can;
#define STAGED(entry) staged.ops.entry = staged_##entry
    STAGED(sync), STAGED(copy), STAGED(zero), STAGED(cast), STAGED(gemm), STAGED(gemm_bytes), STAGED(rope);
    STAGED(rmsnorm), STAGED(rmsnorm_bwd), STAGED(bias_bwd), STAGED(rowdot), STAGED(sum), STAGED(add);
    STAGED(scale), STAGED(gate), STAGED(gate_bwd), STAGED(cross_entropy);
    STAGED(embed), STAGED(embed_bwd), STAGED(total);
    STAGED(adamw), STAGED(attn_fwd), STAGED(attn_bwd), STAGED(attn_bytes);
#undef STAGED
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
