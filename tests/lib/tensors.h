/* tensors.h -- tensors with gaps, in host memory, for checks of a table's entries
 *
 *     upipe_view x = tensor(&rng, UPIPE_BF16, n, h, d, HEADS_INNER, 1), before = twin(x);
 *     float *weight = normals(&rng, d);
 *     ...
 *     CHECK(gaps_whole(x));
 *     buffers_free(0);
 *
 * A tensor lies in an allocation of its own, which ends with it, and its gaps are full of NaNs: a gap that is read
 * shows in a result, one that is written in gaps_whole, and the sanitizer sees the rest. The table of a device is
 * wrapped, so that it takes these tensors too (cuda/staged.h). What is made here is on the list of memory.h.
 */
#ifndef UPIPE_TEST_TENSORS_H
#define UPIPE_TEST_TENSORS_H

#include "memory.h"
#include "test.h"

#include "upipe/upipe_ops.h"
#include "upipe/cpu/upipe_cpu_simd.h"

static inline float *normals(test_rng *r, int64_t n)
{
    float *p = floats(n);
    for (int64_t i = 0; i < n; ++i) p[i] = (float)test_normal(r);
    return p;
}

/* ---- layouts ---- */

/* Heads side by side or one after the other, with gaps; rows of one head's width with gaps; the same without gaps; gaps
 * of 16 bytes or more for kernels that need such rows. */
enum { PACKED, HEADS_INNER, HEADS_OUTER, ROWS_APART, LAYOUTS, HEAD_MAJOR = LAYOUTS, ALIGNED };

static inline size_t view_bytes(upipe_view v)
{
    int64_t last = (v.n - 1) * v.n_stride + (v.h - 1) * v.h_stride + v.d;
    return v.n > 0 && v.d > 0 ? (size_t)last * upipe_dtype_bytes(v.dtype) : 0;
}

static inline int64_t elements(upipe_view v)
{
    return v.n * v.h * v.d;
}

static inline double get(upipe_view v, int64_t i, int j, int64_t k)
{
    return (double)upipe_cpu_get(upipe_view_at(v, i, j), v.dtype, k);
}

/* Element at of a view, counted row by row. */
static inline float get_at(upipe_view v, int64_t at)
{
    return upipe_cpu_get(upipe_view_at(v, at / v.d / v.h, (int32_t)(at / v.d % v.h)), v.dtype, at % v.d);
}

static inline void put_at(upipe_view v, int64_t at, double x)
{
    upipe_cpu_put(upipe_view_at(v, at / v.d / v.h, (int32_t)(at / v.d % v.h)), v.dtype, at % v.d, (float)x);
}

/* ---- tensors ---- */

static inline upipe_view laid_out(upipe_dtype dtype, int64_t n, int h, int d, int layout)
{
    upipe_view v = upipe_view_packed(NULL, dtype, n, h, d);
    const int aligned = layout == ALIGNED && d > 1;
    if (layout == HEADS_INNER || layout == ALIGNED) {
        v.h_stride = d + (aligned ? 8 : 3);
        v.n_stride = h * v.h_stride + (aligned ? 16 : 5);
    }
    if (layout == HEADS_OUTER) {
        v.n_stride = d + 1;
        v.h_stride = n * v.n_stride + 2;
    }
    if (layout == HEAD_MAJOR) {
        v.n_stride = d;
        v.h_stride = n * d;
    }
    if (layout == ROWS_APART) v.n_stride += 8;
    return v;
}

static inline upipe_view empty(upipe_dtype dtype, int64_t n, int h, int d, int layout)
{
    upipe_view v = laid_out(dtype, n, h, d, layout);
    v.data = buffer(view_bytes(v));
    return v;
}

/* Normal elements of this size, row by row. */
static inline void draw_elements(test_rng *r, upipe_view v, double size)
{
    for (int64_t at = 0; at < elements(v); ++at) put_at(v, at, size * test_normal(r));
}

static inline upipe_view tensor(test_rng *r, upipe_dtype dtype, int64_t n, int h, int d, int layout,
                                double size)
{
    upipe_view v = empty(dtype, n, h, d, layout);
    draw_elements(r, v, size);
    return v;
}

/* The same bytes in other memory. */
static inline upipe_view twin(upipe_view v)
{
    v.data = copy_of(v.data, view_bytes(v));
    return v;
}

/* The same elements, as far as the type holds them, in another layout. */
static inline upipe_view moved(upipe_view v, upipe_dtype dtype, int layout)
{
    upipe_view to = empty(dtype, v.n, v.h, v.d, layout);
    for (int64_t at = 0; at < elements(v); ++at) put_at(to, at, (double)get_at(v, at));
    return to;
}

/* Equal bytes, of views that lie alike: gaps too. */
static inline int same_bytes(upipe_view a, upipe_view b)
{
    return view_bytes(a) == 0 || memcmp(a.data, b.data, view_bytes(a)) == 0;
}

/* Equal bits, element by element. */
static inline int same(upipe_view a, upipe_view b)
{
    for (int64_t i = 0; i < a.n; ++i)
        for (int j = 0; j < a.h; ++j)
            if (memcmp(upipe_view_at(a, i, j), upipe_view_at(b, i, j),
                       (size_t)a.d * upipe_dtype_bytes(a.dtype)))
                return 0;
    return 1;
}

/* Every byte outside the rows is still 0xff. */
static inline int gaps_whole(upipe_view v)
{
    const size_t bytes = view_bytes(v), size = upipe_dtype_bytes(v.dtype);
    unsigned char *left = (unsigned char *)malloc(bytes + 1);
    int ok = 1;
    if (left == NULL) exit(2);
    if (bytes > 0) memcpy(left, v.data, bytes); /* no rows, no memory */
    for (int64_t i = 0; i < v.n; ++i)
        for (int j = 0; j < v.h; ++j)
            memset(left + (size_t)(i * v.n_stride + j * v.h_stride) * size, 0xff, (size_t)v.d * size);
    for (size_t at = 0; at < bytes; ++at) ok &= left[at] == 0xff;
    free(left);
    return ok;
}

/* An entry of c->ops with its arguments, which must take them. */
#define CHECK_OP(call) CHECK_STATUS(c->ops->call, UPIPE_OK, c->err)

enum { TYPES = UPIPE_BF16 + 1 }; /* storage types, from UPIPE_F32 on */

#endif
