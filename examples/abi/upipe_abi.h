/* upipe_abi.h -- attention of the host's own Q, K, V behind an opaque handle: what a language other than C calls
 *
 *     upipe_abi *u = upipe_abi_open(&desc, why, sizeof why);     all ranks are threads of this process; NULL: why says it
 *     each rank on a thread of its own:
 *         upipe_abi_qkv_fwd(u, rank, layer, o, q, k, v);         0, or a status: upipe_abi_error(u, rank)
 *         upipe_abi_qkv_bwd(u, rank, layer, dq, dk, dv, dout, o, q, k, v);
 *     upipe_abi_close(u);                                        0, or a status for a handle that is not open
 *
 * or, where each rank is a process, upipe_abi_open_sockets, and the calls of this one rank.
 *
 * Tensors are of the handle's type and packed: q, o [batch][rows][heads][head_dim], k, v [batch][rows][kv_heads][head_dim], where
 * rows are this rank's tokens, upipe_abi_rows of them. A call returns when all ranks have made it. A failed rank
 * releases the others, and the handle is then good for upipe_abi_close alone. A forward whose backward never comes
 * holds its layer until upipe_abi_drop. A rank that will not make the calls of the others says so by
 * upipe_abi_abort, which is a failure too.
 *
 * A handle that is NULL, closed, was never open, or is a forked parent's, or a rank that is not there, is refused: with a status, and with -1 where
 * a number is asked for. upipe_abi_error with the same arguments says why. `first` and `why` may be NULL. Closing NULL does
 * nothing.
 */
#ifndef UPIPE_ABI_H
#define UPIPE_ABI_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define UPIPE_ABI_API __attribute__((visibility("default")))
#else
#define UPIPE_ABI_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { UPIPE_ABI_F32, UPIPE_ABI_BF16 }; /* dtype */

/* Zero is the default of all but tokens, heads and head_dim.
 *   chunk    query heads a stage: ranks (UPipe) .. heads (DeepSpeed-Ulysses)
 *   layers   forwards whose backward may be still to come: 1, at most 1000
 *   softcap  scores become softcap * tanh(score / softcap)
 */
typedef struct upipe_abi_desc {
    int64_t tokens, batch, window;
    int32_t ranks, heads, kv_heads, head_dim, chunk, causal, layers;
    float scale, softcap;
    int32_t dtype;
} upipe_abi_desc;

typedef struct upipe_abi upipe_abi;

/* UPIPE_VERSION of the library: 100 for 0.1.0. */
UPIPE_ABI_API int upipe_abi_version(void);
/* 1 for a name of what this library has, else 0: "cpu" "f32" "bf16" "window" "softcap" "cu_seqlens" "threads" "sockets". */
UPIPE_ABI_API int upipe_abi_can(const char *name);
/* Bytes of the slab that a rank of this description will have, before any is taken; -1: why says it. */
UPIPE_ABI_API int64_t upipe_abi_need(const upipe_abi_desc *desc, int rank, char *why, size_t why_bytes);

UPIPE_ABI_API upipe_abi *upipe_abi_open(const upipe_abi_desc *desc, char *why, size_t why_bytes);
/* This process is one rank of desc->ranks. headers, data [ranks]: connected stream sockets to each other rank, two a pair,
 * which the caller closes after upipe_abi_close; upipe/net/upipe_net_tcp.h says more. */
UPIPE_ABI_API upipe_abi *upipe_abi_open_sockets(const upipe_abi_desc *desc, int rank, const int *headers,
                                                const int *data, char *why, size_t why_bytes);
UPIPE_ABI_API int64_t upipe_abi_rows(const upipe_abi *u, int rank, int64_t *first);
/* The rank's calls from now on have n packed sequences, cu_seqlens [n + 1], the same on all ranks; n = 0: none. The numbers
 * are copied. A backward has those of its forward. */
UPIPE_ABI_API int upipe_abi_pack(upipe_abi *u, int rank, const int64_t *cu_seqlens, int64_t n);
UPIPE_ABI_API int upipe_abi_qkv_fwd(upipe_abi *u, int rank, int layer, void *o, const void *q, const void *k,
                                    const void *v);
UPIPE_ABI_API int upipe_abi_qkv_bwd(upipe_abi *u, int rank, int layer, void *dq, void *dk, void *dv,
                                    const void *dout, const void *o, const void *q, const void *k,
                                    const void *v);
UPIPE_ABI_API int upipe_abi_drop(upipe_abi *u, int rank, int layer);
UPIPE_ABI_API int upipe_abi_abort(upipe_abi *u, int rank, const char *why);
UPIPE_ABI_API const char *upipe_abi_error(const upipe_abi *u, int rank);
UPIPE_ABI_API int64_t upipe_abi_bytes(const upipe_abi *u, int rank); /* of a rank's slab */
UPIPE_ABI_API int upipe_abi_close(upipe_abi *u);

#ifdef __cplusplus
}
#endif

#endif
