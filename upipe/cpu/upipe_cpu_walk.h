/* upipe_cpu_walk.h -- how kernels walk rows, and share them among threads
 *
 *     UPI_WITH_TYPE(dtype, view.dtype, kernel(..., dtype))    the kernel compiled for each storage type
 *     UPI_ROW_STEPS(k, n, d, step)                            step for each vector of a row
 *     upi_rows_share(ops, rows, row_bytes, each, run, &call)  rows to the host's threads (ops.par)
 */
#ifndef UPIPE_CPU_WALK_H
#define UPIPE_CPU_WALK_H

#include "upipe_cpu_par.h"

enum { UPI_ROW_PIECE = 8192 }; /* elements of a long row that one item takes at least */

/* ---- a vector's elements, or the last few, of a row ---- */

/* Called once in a row, and too long to be inlined everywhere. gcc 12 must not look into it: behind a call
 * that it knows to leave the vector registers alone it forgets that their upper halves are in use, omits
 * vzeroupper, and all code of the host without AVX then runs at a tenth of its speed. */
#if defined(__clang__) || defined(__CUDACC__)
#define UPI_ROW_LAST UPI_CPU_KERNEL
#else
#define UPI_ROW_LAST static __attribute__((noipa, unused))
#endif

/* n elements from i on, fewer than a vector has, and zeros. */
UPI_ROW_LAST void upi_row_get_last(float *t, const void *row, upipe_dtype dtype, int64_t i, int64_t n)
{
    int64_t k;
    memset(t, 0, UPI_WIDE * sizeof *t);
    for (k = 0; k < n; ++k) t[k] = upipe_cpu_get(row, dtype, i + k);
}

UPI_ROW_LAST void upi_row_put_last(void *row, upipe_dtype dtype, int64_t i, int64_t n, const float *t)
{
    int64_t k;
    for (k = 0; k < n; ++k) upipe_cpu_put(row, dtype, i + k, t[k]);
}

/* A vector of a row from element i on, of which n count: zeros in place of the others, which are not read.
 * Loops call it with the constant UPI_WIDE while they can: then it is a load. */
UPI_INLINE upi_fw upi_row_get(const void *row, upipe_dtype dtype, int64_t i, int64_t n)
{
    float t[UPI_WIDE];
    if (n >= UPI_WIDE) return upi_fw_get(row, dtype, i);
    upi_row_get_last(t, row, dtype, i, n);
    return upi_fw_load(t);
}

UPI_INLINE void upi_row_put(void *row, upipe_dtype dtype, int64_t i, int64_t n, upi_fw v)
{
    float t[UPI_WIDE];
    if (n >= UPI_WIDE) {
        upi_fw_put(row, dtype, i, v);
        return;
    }
    upi_fw_store(t, v);
    upi_row_put_last(row, dtype, i, n, t);
}

/* Fetches the line of element i, in time for a later loop: hardware follows one loop's streams, not those of
 * the next. As an address, since the row need not exist. */
UPI_INLINE void upi_row_fetch(const void *row, upipe_dtype dtype, int64_t i)
{
    __builtin_prefetch((const void *)((uintptr_t)row + (uintptr_t)i * upipe_dtype_bytes(dtype)));
}

/* Runs a statement with `name`, the storage type, as a constant: loops are compiled once for each type, and
 * do not ask which it is. May be nested. */
#define UPI_WITH_TYPE(name, dtype, ...)          \
    do {                                         \
        if ((dtype) == UPIPE_F32) {              \
            const upipe_dtype name = UPIPE_F32;  \
            __VA_ARGS__;                         \
        } else {                                 \
            const upipe_dtype name = UPIPE_BF16; \
            __VA_ARGS__;                         \
        }                                        \
    } while (0)

/* The same for two views, which mostly have one type; where they don't, it is tested at every vector. All
 * pairs of types would be compiled for seconds in every unit. */
#define UPI_WITH_TYPES(name, dtype, other, other_dtype, ...)                         \
    do {                                                                             \
        if ((dtype) == (other_dtype)) {                                              \
            UPI_WITH_TYPE(name, dtype, const upipe_dtype other = name; __VA_ARGS__); \
        } else {                                                                     \
            const upipe_dtype name = (dtype), other = (other_dtype);                 \
            __VA_ARGS__;                                                             \
        }                                                                            \
    } while (0)

/* For every vector of a row of d: step, a statement that sees k, its first element, and n, how many count. */
#define UPI_ROW_STEPS(k, n, d, step)                      \
    do {                                                  \
        int64_t k;                                        \
        for (k = 0; k + UPI_WIDE <= (d); k += UPI_WIDE) { \
            const int64_t n = UPI_WIDE;                   \
            step;                                         \
        }                                                 \
        if (k < (d)) {                                    \
            const int64_t n = (d)-k;                      \
            step;                                         \
        }                                                 \
    } while (0)

/* ---- rows shared among threads ---- */

/* What is to be done with rows first .. last - 1 of a call. */
typedef void (*upi_rows_run)(const void *call, int64_t first, int64_t last);

typedef struct upi_rows_job {
    upi_rows_run run;
    const void *call;
    int64_t rows, each;
} upi_rows_job;

UPIPE_API void upi_rows_item(void *arg, int64_t i, int32_t worker)
{
    const upi_rows_job *job = (const upi_rows_job *)arg;
    int64_t first = i * job->each, last = first + job->each;
    (void)worker;
    job->run(job->call, first, last < job->rows ? last : job->rows);
}

/* Calls run for all rows, of row_bytes each: at once, or for more threads in items of a multiple of `each`
 * rows, in any order. */
UPIPE_API void upi_rows_share(const upipe_ops *ops, int64_t rows, int64_t row_bytes, int64_t each,
                              upi_rows_run run, const void *call)
{
    upi_rows_job job;
    if (upi_par_workers(ops) == 1) {
        run(call, 0, rows);
        return;
    }
    job.run = run;
    job.call = call;
    job.rows = rows;
    job.each = (UPI_PAR_ROW_BYTES / row_bytes + each - 1) / each * each;
    if (job.each < each) job.each = each;
    upi_par_each(ops, (rows + job.each - 1) / job.each, upi_rows_item, &job);
}

/* Views of one shape for what is done element by element. Rows that follow each other without a gap in all of
 * them are one long row, and that is cut into rows of UPI_ROW_PIECE. */
typedef struct upi_flat {
    upipe_view v[3]; /* only their data, types and strides */
    int64_t rows, heads, d;
    int64_t last;      /* elements of the last row; d in all others */
    int64_t row_bytes; /* of all views together, a row with its heads */
    const float *src;  /* sum's */
    int64_t src_stride;
    int src_count, accumulate;
    upipe_gate_kind kind; /* gate's */
} upi_flat;

UPI_INLINE upi_flat upi_flat_make(const upipe_view *v, int count)
{
    upi_flat f;
    int64_t all, bytes = 0;
    int i, heads_join = 1, rows_join = 1;
    memset(&f, 0, sizeof f);
    f.rows = v[0].n;
    f.heads = v[0].h;
    f.d = v[0].d;
    for (i = 0; i < count; ++i) {
        f.v[i] = v[i];
        bytes += (int64_t)upipe_dtype_bytes(v[i].dtype);
        heads_join &= f.heads == 1 || v[i].h_stride == f.d;
        rows_join &= f.rows == 1 || v[i].n_stride == f.heads * f.d;
    }
    if (heads_join) {
        f.d *= f.heads;
        f.heads = 1;
    }
    f.last = f.d;
    if (heads_join && rows_join) {
        all = f.rows * f.d;
        f.d = UPI_ROW_PIECE;
        f.rows = (all + f.d - 1) / f.d;
        f.last = all - (f.rows - 1) * f.d;
        for (i = 0; i < count; ++i) f.v[i].n_stride = f.d;
    }
    f.row_bytes = f.heads * f.d * bytes;
    return f;
}

UPI_INLINE int64_t upi_flat_length(const upi_flat *f, int64_t row)
{
    return row + 1 == f->rows ? f->last : f->d;
}

UPI_INLINE char *upi_flat_at(const upi_flat *f, int i, int64_t row, int64_t head)
{
    return (char *)upipe_view_at(f->v[i], row, (int32_t)head);
}

#endif
