/* upipe_base.h -- status and error, data types, the tensor view, the context
 *
 * Every call returns a upipe_status. A failed call leaves its reason, with the numbers that disagreed, in a
 * upipe_err: by value in the context, or where the caller points to. Nothing here prints, exits or keeps
 * state.
 *
 *     upipe_ctx ctx = {0};
 *     upipe_status s = upipe_layer_fwd(&ctx, ...);
 *     if (s) fprintf(stderr, "%s: %s\n", upipe_status_name(s), ctx.err.text);
 */
#ifndef UPIPE_BASE_H
#define UPIPE_BASE_H

#include <assert.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Meson, CMake and pkg-config read the version here. UPIPE_VERSION grows with every release: 100 for 0.1.0. */
#define UPIPE_VERSION_MAJOR 0
#define UPIPE_VERSION_MINOR 1
#define UPIPE_VERSION_PATCH 0
#define UPIPE_VERSION       (UPIPE_VERSION_MAJOR * 10000 + UPIPE_VERSION_MINOR * 100 + UPIPE_VERSION_PATCH)

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error \
    "upipe checks for NaN, which -ffast-math and -Ofast compile away: add -fno-finite-math-only, and compile the kernels in a unit of their own without these flags (docs/porting.md)"
#endif

/* Header-only: every function is private to the unit that includes it, used there or not. */
#define UPIPE_API static inline __attribute__((unused))

/* clang-format off */
#define UPIPE_STATUS_LIST(X)                                                                                 \
    X(UPIPE_OK,              "ok")                                                                           \
    X(UPIPE_ERR_ARG,         "invalid argument")      /* the call breaks its documented contract          */ \
    X(UPIPE_ERR_UNSUPPORTED, "unsupported")           /* a valid request that this version lacks          */ \
    X(UPIPE_ERR_OVERFLOW,    "size overflow")         /* a product of dimensions leaves 63 bits           */ \
    X(UPIPE_ERR_MEMORY,      "out of memory")         /* the pool has no space for the block              */ \
    X(UPIPE_ERR_MISMATCH,    "ranks disagree")        /* two ranks run different plans or different calls */ \
    X(UPIPE_ERR_TIMEOUT,     "deadline passed")       /* a peer did not arrive in time                    */ \
    X(UPIPE_ERR_ABORTED,     "aborted")               /* a rank aborted the team, or failed before        */ \
    X(UPIPE_ERR_BACKEND,     "backend error")         /* the device library's own error; its text follows */
/* clang-format on */

typedef enum upipe_status {
#define UPI_STATUS_ENUM(name, text) name,
    UPIPE_STATUS_LIST(UPI_STATUS_ENUM)
#undef UPI_STATUS_ENUM
} upipe_status;

/* "out of memory" and so on; never NULL. */
UPIPE_API const char *upipe_status_name(upipe_status s)
{
    switch (s) {
#define UPI_STATUS_CASE(name, text) \
    case name:                      \
        return text;
        UPIPE_STATUS_LIST(UPI_STATUS_CASE)
#undef UPI_STATUS_CASE
    }
    return "unknown status";
}

typedef struct upipe_err {
    char text[256]; /* one sentence; success does not clear it */
    upipe_status status;
} upipe_err;

/* Records a failure in e (which may be NULL) and returns s, so that a function can `return
 * upipe_fail(...)`. */
__attribute__((unused, format(printf, 3, 4))) static inline upipe_status upipe_fail(upipe_err *e,
                                                                                    upipe_status s,
                                                                                    const char *format, ...)
{
    if (e != NULL) {
        va_list args;
        va_start(args, format);
        vsnprintf(e->text, sizeof e->text, format, args);
        va_end(args);
        e->status = s;
    }
    return s;
}

/* Records a failure whose entry of the compute table has left no sentence: a host's own may not. */
UPIPE_API void upi_fail_reason(upipe_err *e, upipe_status s)
{
    if (e->status != s) upipe_fail(e, s, "an entry of the compute table failed without a reason");
}

/* The number behind a field that is an enum, at an address of that many bytes. A description may hold any, but a C++
 * compiler may assume that an enum it loads has one of the enum's values: so it is read as a number and checked
 * first. */
UPIPE_API int upi_enum_number(const void *field, size_t bytes)
{
    int number = 0;
    memcpy(&number, field, bytes < sizeof number ? bytes : sizeof number);
    return number;
}

#define UPIPE_TRY(call)                            \
    do {                                           \
        upipe_status upi_try_ = (call);            \
        if (upi_try_ != UPIPE_OK) return upi_try_; \
    } while (0)

typedef enum upipe_dtype { UPIPE_F32, UPIPE_BF16 } upipe_dtype;

/* Bytes of one element. */
UPIPE_API size_t upipe_dtype_bytes(upipe_dtype t)
{
    return t == UPIPE_F32 ? 4 : 2;
}

/* "f32", "bf16". */
UPIPE_API const char *upipe_dtype_name(upipe_dtype t)
{
    return t == UPIPE_F32 ? "f32" : "bf16";
}

/* Whether a field's type is one. */
UPIPE_API int upi_dtype_built(const upipe_dtype *t)
{
    const int number = upi_enum_number(t, sizeof *t);
    return number == UPIPE_F32 || number == UPIPE_BF16;
}

/* The name of a field's type, which may be none. */
UPIPE_API const char *upi_dtype_name_of(const upipe_dtype *t)
{
    return upi_dtype_built(t) ? upipe_dtype_name((upipe_dtype)upi_enum_number(t, sizeof *t))
                              : "no storage type";
}

/* upipe_view -- n tokens x h heads x d contiguous elements; strides count elements, not bytes
 *
 * Element (i, j, k) lies at data + i * n_stride + j * h_stride + k. A matrix is a view with h = 1. In a batched
 * matrix product j counts the matrices. Statistics of a row (log-sum-exp, delta) are views with d = 1.
 */
typedef struct upipe_view {
    void *data;
    int64_t n, n_stride, h_stride;
    int32_t h, d;
    upipe_dtype dtype;
} upipe_view;

/* A view of all its fields: [n][h][d], strides in elements. */
UPIPE_API upipe_view upipe_view_make(void *data, upipe_dtype dtype, int64_t n, int64_t n_stride, int32_t h,
                                     int64_t h_stride, int32_t d)
{
    upipe_view v;
    v.data = data;
    v.n = n;
    v.n_stride = n_stride;
    v.h_stride = h_stride;
    v.h = h;
    v.d = d;
    v.dtype = dtype;
    return v;
}

/* A packed [n][h][d] tensor. */
UPIPE_API upipe_view upipe_view_packed(void *data, upipe_dtype dtype, int64_t n, int32_t h, int32_t d)
{
    return upipe_view_make(data, dtype, n, (int64_t)h * d, h, d, d);
}

/* Address of element (i, j, 0). */
UPIPE_API void *upipe_view_at(upipe_view v, int64_t i, int32_t j)
{
    return (char *)v.data + (i * v.n_stride + j * v.h_stride) * (int64_t)upipe_dtype_bytes(v.dtype);
}

/* The same tensor from token `first` on, n tokens long. */
UPIPE_API upipe_view upipe_view_rows(upipe_view v, int64_t first, int64_t n)
{
    v.data = upipe_view_at(v, first, 0);
    v.n = n;
    return v;
}

/* A tensor of one head whose rows are `h` heads side by side, as these heads. */
UPIPE_API upipe_view upipe_view_heads(upipe_view v, int32_t h)
{
    v.d /= h;
    v.h = h;
    v.h_stride = v.d;
    return v;
}

struct upipe_ops;         /* upipe_ops.h: the compute table */
struct upipe_mem;         /* upipe_mem.h: the pool */
struct upipe_comm;        /* upipe_comm.h: a communicator */
struct upipe_side_stream; /* upipe_ops.h: a second stream of the rank */

/* upipe_ctx -- everything a call may use, owned by the host, one per rank
 *   ops          compute table, constant while in use; ranks may share one
 *   mem          pool of this rank, for activations and scratch
 *   team         the C ranks of the all-to-all
 *   ring         the R ranks of ring attention; NULL without one
 *   side_stream  loads and stores stages beside the attention of another one; NULL unless the plan overlaps
 *   stream       the compute stream, passed to every entry of the table (a cudaStream_t for CUDA; the CPU
 *                backend does not use it)
 *   user         the host's own; the library never looks at it
 *   err          the last failure
 */
typedef struct upipe_ctx {
    const struct upipe_ops *ops;
    struct upipe_mem *mem;
    struct upipe_comm *team, *ring;
    struct upipe_side_stream *side_stream;
    void *stream, *user;
    upipe_err err;
} upipe_ctx;

/* upi_ctx_check -- ARG if the table, the pool or the team is NULL; every call over a team begins with it. Where the
 *                  context itself is NULL there is no place for a sentence */
UPIPE_API upipe_status upi_ctx_check(upipe_ctx *c)
{
    if (c == NULL) return UPIPE_ERR_ARG;
    if (c->ops != NULL && c->mem != NULL && c->team != NULL) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_ARG, "ctx->%s is NULL",
                      c->ops == NULL   ? "ops"
                      : c->mem == NULL ? "mem"
                                       : "team");
}

/* p + bytes; NULL, which an empty buffer may be, stays NULL. */
UPIPE_API void *upipe_offset(const void *p, size_t bytes)
{
    return p != NULL ? (char *)(uintptr_t)p + bytes : NULL;
}

/* The larger of both. */
UPIPE_API size_t upipe_max_bytes(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Where part i of n things begins, when they are cut into `parts` parts that differ by at most one thing; part `parts`
 * begins at n. */
UPIPE_API int64_t upipe_cut(int64_t n, int parts, int i)
{
    return n / parts * i + n % parts * i / parts;
}

/* out = a * b in 63 bits; false on overflow or a negative factor. */
UPIPE_API int upipe_mul(int64_t *out, int64_t a, int64_t b)
{
    return a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, out);
}

#define UPIPE_HASH UINT64_C(1469598103934665603) /* FNV-1a of nothing */

/* FNV-1a, continued over these bytes. */
UPIPE_API uint64_t upipe_hash_bytes(uint64_t hash, const void *bytes, size_t n)
{
    const unsigned char *p = (const unsigned char *)bytes;
    while (n-- > 0) hash = (hash ^ *p++) * 1099511628211u;
    return hash;
}

#endif
