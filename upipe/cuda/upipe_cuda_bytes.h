/* upipe_cuda_bytes.h -- the scratch that the CUDA table asks for
 *
 * Needs neither CUDA's headers nor a device: a program built without them plans for a GPU.
 *
 *     upipe_cuda_plan_ops(&ops);
 *     upipe_dry_init(dry, &plan, &ops);
 */
#ifndef UPIPE_CUDA_BYTES_H
#define UPIPE_CUDA_BYTES_H

#include "../upipe_attn.h"

/* Queries in a tile of the backward, by its head dim. */
#define UPI_CUDA_ATTN_BWD_ROWS(dim) ((dim) > 128 ? 32 : 64)

enum { UPI_CUDA_ATTN_RUN = 8 }; /* bytes of upi_cuda_attn_run */

/* Bytes of a tile of logits, 1,024 rows of Llama3-8B's: each tile reads the head's weights twice, and reads and writes
 * their f32 gradient. */
enum { UPIPE_CUDA_LOSS_BYTES = 800 << 20 };

UPIPE_API size_t upi_cuda_gemm_bytes(const struct upipe_ops *ops, upipe_view out, upipe_view a, upipe_view b,
                                     int flags)
{
    (void)ops, (void)out, (void)a, (void)b, (void)flags;
    return 0;
}

/* The head dim that a kernel of one head dim must be built for. */
UPIPE_API int upi_cuda_attn_columns(const upipe_attn *a)
{
    return a->q.d > a->v.d ? a->q.d : a->v.d;
}

/* Whether the call is for the kernels whose queries and keys have 192 columns and whose values have 128. */
UPIPE_API int upi_cuda_attn_is_192_128(const upipe_attn *a)
{
    return a->q.d > 128 && a->q.d <= 192 && a->v.d <= 128;
}

/* Whether a row sees other keys than all of those up to its own, so that a table says which. */
UPIPE_API int upi_cuda_attn_ranged(const upipe_attn *a)
{
    return a->mask.window > 0 || a->mask.borders.cu_seqlens != NULL;
}

/* Whether the call needs a kernel with tables, of those for 8.0. */
UPIPE_API int upi_cuda_attn_masked(const upipe_attn *a)
{
    return upi_cuda_attn_ranged(a) || a->mask.softcap > 0 || a->v.d != a->q.d;
}

/* Bytes of a table of runs, a multiple of 64; SIZE_MAX where they leave 63 bits. */
UPIPE_API size_t upi_cuda_attn_runs_bytes(int64_t rows)
{
    int64_t bytes;
    if (!upipe_mul(&bytes, rows, UPI_CUDA_ATTN_RUN) || bytes > INT64_MAX - 63) return SIZE_MAX;
    return ((size_t)bytes + 63) / 64 * 64;
}

/* Bytes of the order in which a forward takes the blocks of queries of packed sequences, a multiple of 64; a block
 * has 128 queries or more. */
UPIPE_API size_t upi_cuda_attn_order_bytes(const upipe_attn *a)
{
    return a->mask.borders.cu_seqlens != NULL ? ((size_t)(a->q.n / 128 + 1) * 4 + 63) / 64 * 64 : 0;
}

UPIPE_API int64_t upi_cuda_attn_query_tiles(const upipe_attn *a)
{
    const int rows = UPI_CUDA_ATTN_BWD_ROWS(upi_cuda_attn_columns(a));
    return (a->q.n + rows - 1) / rows;
}

/* Scratch of the backward: turns; the queries that see each key, where the call is masked; sums of dQ, but
 * for merge. SIZE_MAX where the bytes leave 63 bits. */
UPIPE_API size_t upi_cuda_attn_turns_bytes(const upipe_attn *a)
{
    int64_t bytes;
    if (!upipe_mul(&bytes, upi_cuda_attn_query_tiles(a), (int64_t)a->q.h * 4)) return SIZE_MAX;
    return bytes > INT64_MAX - 128 ? SIZE_MAX : ((size_t)bytes + 4 + 63) / 64 * 64;
}

UPIPE_API size_t upi_cuda_attn_sums_bytes(const upipe_attn *a)
{
    int64_t bytes;
    if (a->merge) return 0;
    return upipe_mul(&bytes, a->q.n, (int64_t)a->q.h * a->q.d * 4) ? (size_t)bytes : SIZE_MAX;
}

/* Entry of the table. Forward: what the queries of a masked call see, and the order of its blocks. Backward: as above;
 * in f32, the tables of both sides. SIZE_MAX where the bytes leave 63 bits. */
UPIPE_API size_t upi_cuda_attn_bytes(const struct upipe_ops *ops, const upipe_attn *a, int backward)
{
    const int masked = upi_cuda_attn_masked(a), f32 = a->q.dtype == UPIPE_F32;
    const size_t parts[] = {masked && (!backward || f32) ? upi_cuda_attn_runs_bytes(a->q.n) : 0,
                            !backward && !f32 ? upi_cuda_attn_order_bytes(a) : 0,
                            masked && backward ? upi_cuda_attn_runs_bytes(a->k.n) : 0,
                            backward && !f32 ? upi_cuda_attn_turns_bytes(a) : 0,
                            backward && !f32 ? upi_cuda_attn_sums_bytes(a) : 0};
    size_t all = 0;
    int i;
    (void)ops;
    for (i = 0; i < 5; ++i) {
        if (parts[i] > (size_t)INT64_MAX - all) return SIZE_MAX;
        all += parts[i];
    }
    return all;
}

/* upipe_cuda_plan_ops -- the entries of the CUDA table that say sizes; all others are NULL. For dry runs */
UPIPE_API void upipe_cuda_plan_ops(upipe_ops *ops)
{
    memset(ops, 0, sizeof *ops);
    ops->name = "cuda";
    ops->attn_can = UPIPE_ATTN_WINDOW | UPIPE_ATTN_CU_SEQLENS | UPIPE_ATTN_SOFTCAP | UPIPE_ATTN_SINKS |
                    UPIPE_ATTN_V_DIM | UPIPE_ATTN_ADD_DQ;
    ops->loss_bytes = UPIPE_CUDA_LOSS_BYTES;
    ops->gemm_bytes = upi_cuda_gemm_bytes;
    ops->attn_bytes = upi_cuda_attn_bytes;
}

#endif
