/* upipe_abi.h -- attention of the host's own Q, K, V behind an opaque handle: what a language other than C calls
 *
 *     upipe_abi *u = upipe_abi_open(&desc, why, sizeof why);     all ranks of this process; NULL: why says it
 *     each rank on a thread of its own:
 *         upipe_abi_qkv_fwd(u, rank, layer, o, q, k, v);         0, or a status: upipe_abi_error(u, rank)
 *         upipe_abi_qkv_bwd(u, rank, layer, dq, dk, dv, dout, o, q, k, v);
 *     upipe_abi_close(u);                                        0, or a status for a handle that is not open
 *
 * Tensors are f32 and packed: q, o [batch][rows][heads][head_dim], k, v [batch][rows][kv_heads][head_dim], where
 * rows are this rank's tokens, upipe_abi_rows of them. A call returns when all ranks have made it. A failed rank
 * releases the others, and the handle is then good for upipe_abi_close alone. A forward whose backward never comes
 * holds its layer until upipe_abi_drop. A rank that will not make the calls of the others says so by
 * upipe_abi_abort, which is a failure too.
 *
 * A handle that is NULL, closed or was never open, or a rank that is not there, is refused: with a status, and with -1 where
 * a number is asked for. upipe_abi_error with the same arguments says why. `first` and `why` may be NULL. Closing NULL does
 * nothing.
 */
#ifndef UPIPE_ABI_H
#define UPIPE_ABI_H

#include <stddef.h>
#include <stdint.h>

/* Zero is the default of all but tokens, heads and head_dim.
 *   chunk    query heads a stage: ranks (UPipe) .. heads (DeepSpeed-Ulysses)
 *   layers   forwards whose backward may be still to come: 1, at most 1000
 */
typedef struct upipe_abi_desc {
    int64_t tokens, batch, window;
    int32_t ranks, heads, kv_heads, head_dim, chunk, causal, layers;
    float scale;
} upipe_abi_desc;

typedef struct upipe_abi upipe_abi;

upipe_abi *upipe_abi_open(const upipe_abi_desc *desc, char *why, size_t why_bytes);
int64_t upipe_abi_rows(const upipe_abi *u, int rank, int64_t *first);
int upipe_abi_qkv_fwd(upipe_abi *u, int rank, int layer, float *o, const float *q, const float *k,
                      const float *v);
int upipe_abi_qkv_bwd(upipe_abi *u, int rank, int layer, float *dq, float *dk, float *dv, const float *dout,
                      const float *o, const float *q, const float *k, const float *v);
int upipe_abi_drop(upipe_abi *u, int rank, int layer);
int upipe_abi_abort(upipe_abi *u, int rank, const char *why);
const char *upipe_abi_error(const upipe_abi *u, int rank);
int64_t upipe_abi_bytes(const upipe_abi *u, int rank); /* of a rank's slab */
int upipe_abi_close(upipe_abi *u);

#endif
