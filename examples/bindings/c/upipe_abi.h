/* upipe_abi.h -- attention of the host's own Q, K, V behind an opaque handle: what a language other than C calls
 *
 *     upipe_abi *u = upipe_abi_open(&desc, why, sizeof why);     all ranks are threads of this process; NULL: why says it
 *     each rank on a thread of its own:
 *         upipe_abi_qkv_fwd(u, rank, layer, o, q, k, v);         0, or a status: upipe_abi_error(u, rank)
 *         upipe_abi_qkv_bwd(u, rank, layer, dq, dk, dv, dout, o, q, k, v);
 *     upipe_abi_close(u);                                        0, or a status for a handle that is not open
 *
 * or, where each rank is a process, upipe_abi_open_sockets, _mpi or _nccl, and the calls of this one rank.
 *
 * There are ranks * ring ranks: rank w is rank w % ranks of a team, which shares heads by all-to-alls, and rank w /
 * ranks of a ring. A rank's row i is at position upipe_abi_positions of its sequence.
 *
 * Tensors are of the handle's type and packed: q, o [batch][rows][heads][head_dim], k, v
 * [batch][rows][kv_heads][head_dim], where rows are this rank's tokens, upipe_abi_rows of them. A call returns when all
 * ranks have made it. A failed rank releases the others, and the handle is then good for upipe_abi_close alone. A
 * forward whose backward never comes holds its layer until upipe_abi_drop. A dq, dk or dv that is NULL is not wanted.
 * Who keeps what a forward leaves in memory of his own, by upipe_abi_save, needs one layer for any number of forwards.
 * A rank that will not make the calls of the others says so by upipe_abi_abort, which is a failure too.
 *
 * A library built for CUDA computes on the device that is current when the handle is opened, which must be current in
 * each call. Tensors are memory of this device. A call then returns when its work is enqueued on the rank's stream, and
 * a failure may show in a later call or in upipe_abi_sync. Ranks that are threads share the device.
 *
 * One thread at a time calls for a rank. A call while another thread's is not over is refused, and so is a close, by
 * its status alone. At any time one may call upipe_abi_abort, and ask for numbers and the sentence: those of the rank's
 * last call that is over.
 *
 * A handle that is NULL, closed, was never open, or is a forked parent's, or a rank that is not there, is refused: with
 * a status, and with -1 where a number is asked for. upipe_abi_error with the same arguments says why. `first` and
 * `why` may be NULL. Closing NULL does nothing.
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

enum { UPIPE_ABI_F32, UPIPE_ABI_BF16 };                                      /* dtype */
enum { UPIPE_ABI_RING_AUTO, UPIPE_ABI_RING_P2P, UPIPE_ABI_RING_ALL_GATHER }; /* ring_mode */
enum { UPIPE_ABI_CONTIGUOUS, UPIPE_ABI_ZIGZAG, UPIPE_ABI_STRIPED };          /* layout */
enum { UPIPE_ABI_NCCL_ID_BYTES = 128 };

/* Zero is the default of all but tokens, heads and head_dim.
 *   chunk    query heads a stage: ranks (UPipe) .. heads (DeepSpeed-Ulysses)
 *   layers   forwards whose backward may be still to come: 1, at most 1000
 *   softcap  scores become softcap * tanh(score / softcap)
 *   ring         ranks of a ring: 1
 *   ring_mode    whether K and V are sent round (P2P) or gathered (ALL_GATHER): AUTO, the one that holds less
 *   ring_inner   ranks of an inner ring, neighbours in the ring: a double ring. 0: none
 *   layout       how the ring shares a sequence: CONTIGUOUS; with ZIGZAG or STRIPED its ranks have equal work if causal
 */
typedef struct upipe_abi_desc {
    int64_t tokens, batch, window;
    int32_t ranks, heads, kv_heads, head_dim, chunk, causal, layers;
    float scale, softcap;
    int32_t dtype;
    int32_t ring, ring_mode, ring_inner, layout;
} upipe_abi_desc;

typedef struct upipe_abi upipe_abi;

/* UPIPE_VERSION of the library: 100 for 0.1.0. */
UPIPE_ABI_API int upipe_abi_version(void);
/* 1 for a name of what this library has, else 0: "f32" "bf16" "window" "softcap" "cu_seqlens" "threads" "ring" "zigzag"
 * "striped" "fused" "sbh3d" "sinks"; "cpu" and "sockets", or "cuda"; "mpi" and "nccl" if it was built with them. */
UPIPE_ABI_API int upipe_abi_can(const char *name);
/* Bytes of the slab that a rank of this description will have, before any is taken; -1: why says it. */
UPIPE_ABI_API int64_t upipe_abi_need(const upipe_abi_desc *desc, int rank, char *why, size_t why_bytes);

UPIPE_ABI_API upipe_abi *upipe_abi_open(const upipe_abi_desc *desc, char *why, size_t why_bytes);
/* This process is one rank of ranks * ring. headers, data [ranks * ring]: connected stream sockets to each other rank,
 * two a pair, which the caller closes after upipe_abi_close; upipe/net/upipe_net_tcp.h says more. */
UPIPE_ABI_API upipe_abi *upipe_abi_open_sockets(const upipe_abi_desc *desc, int rank, const int *headers,
                                                const int *data, char *why, size_t why_bytes);
/* The rank's calls from now on are of this description, with the handle's ranks and ring; all ranks say the same. So one
 * handle, with its sockets, does for all lengths, batches and masks. The slab grows where it must, and stays as large. No
 * forward is before its backward, but those that were saved: these are restored under the description that they were made
 * with. It has no packed sequences yet. A handle that was opened with 0 tokens, heads and head_dim is a team alone: it has no
 * slab, and no calls before this one. */
UPIPE_ABI_API int upipe_abi_describe(upipe_abi *u, int rank, const upipe_abi_desc *desc);
UPIPE_ABI_API int64_t upipe_abi_rows(const upipe_abi *u, int rank, int64_t *first);
/* The rank's calls from now on have n packed sequences, cu_seqlens [n + 1], the same on all ranks; NULL and 0: none. These
 * are flash-attention's borders, over the batch * tokens rows of the flattened batch, in which sequence b begins at b *
 * tokens: they begin at 0, ascend, and end at batch * tokens. A packed sequence lies in one sequence of the batch, and may be
 * empty, but behind the end there is none. All else is refused, so that padding is a packed sequence too, and none of an
 * array is read behind its end, whatever n is. The numbers are copied. A backward has those of its forward. */
UPIPE_ABI_API int upipe_abi_pack(upipe_abi *u, int rank, const int64_t *cu_seqlens, int64_t n);
/* The rank's calls from now on have these sinks, f32 [heads]: a logit in each head's softmax that has no value. A backward adds
 * the gradients of the heads that this rank has computed to dsinks, f32 [heads]: summed over the ranks they are all of them.
 * dsinks NULL: not wanted; sinks NULL: none. Both stay the caller's, where the tensors are. */
UPIPE_ABI_API int upipe_abi_sinks(upipe_abi *u, int rank, const float *sinks, float *dsinks);
UPIPE_ABI_API int upipe_abi_qkv_fwd(upipe_abi *u, int rank, int layer, void *o, const void *q, const void *k,
                                    const void *v);
UPIPE_ABI_API int upipe_abi_qkv_bwd(upipe_abi *u, int rank, int layer, void *dq, void *dk, void *dv,
                                    const void *dout, const void *o, const void *q, const void *k,
                                    const void *v);
UPIPE_ABI_API int upipe_abi_drop(upipe_abi *u, int rank, int layer);
/* What a forward leaves for its backward: upipe_abi_save moves it to `to`, of upipe_abi_saved_bytes, where the tensors
 * are, and the layer is free; upipe_abi_restore brings it to a free layer before the backward, as often as one
 * likes. */
UPIPE_ABI_API int64_t upipe_abi_saved_bytes(const upipe_abi *u, int rank);
UPIPE_ABI_API int upipe_abi_save(upipe_abi *u, int rank, int layer, void *to);
UPIPE_ABI_API int upipe_abi_restore(upipe_abi *u, int rank, int layer, const void *from);
UPIPE_ABI_API int upipe_abi_abort(upipe_abi *u, int rank, const char *why);
/* The sentence is the thread's own, until it asks again. */
UPIPE_ABI_API const char *upipe_abi_error(const upipe_abi *u, int rank);
UPIPE_ABI_API int64_t upipe_abi_bytes(const upipe_abi *u, int rank); /* of a rank's slab */
UPIPE_ABI_API int upipe_abi_close(upipe_abi *u);

/* This process is a rank of an MPI communicator. comm: the address of an MPI_Comm, NULL: MPI_COMM_WORLD. All its ranks
 * call this at once, and it stays the caller's; MPI runs from before the open until after the close. */
UPIPE_ABI_API upipe_abi *upipe_abi_open_mpi(const upipe_abi_desc *desc, const void *comm, char *why,
                                            size_t why_bytes);
/* The same of NCCL. comm: an ncclComm_t on the current device, which has no other operation meanwhile. */
UPIPE_ABI_API upipe_abi *upipe_abi_open_nccl(const upipe_abi_desc *desc, void *comm, char *why,
                                             size_t why_bytes);
/* id [UPIPE_ABI_NCCL_ID_BYTES]: one rank's upipe_abi_nccl_id, which the caller has sent to all. */
UPIPE_ABI_API upipe_abi *upipe_abi_open_nccl_id(const upipe_abi_desc *desc, int rank, const void *id,
                                                char *why, size_t why_bytes);
UPIPE_ABI_API int upipe_abi_nccl_id(void *id, char *why, size_t why_bytes);
/* positions [upipe_abi_rows]: of the rank's rows in a sequence. */
UPIPE_ABI_API int upipe_abi_positions(const upipe_abi *u, int rank, int64_t *positions);
/* stream: a cudaStream_t, for the rank's calls from now on; the one before it has ended its work then. Without CUDA:
 * NULL. */
UPIPE_ABI_API int upipe_abi_stream(upipe_abi *u, int rank, void *stream);
/* Waits for the rank's stream, in which cudaStreamSynchronize would wait for a dead peer for ever. */
UPIPE_ABI_API int upipe_abi_sync(upipe_abi *u, int rank);
/* As qkv_fwd and qkv_bwd, where Q, K and V lie side by side. qkv, dqkv [batch][rows][heads + 2 kv_heads][head_dim], and
 * so [batch][rows][3][heads][head_dim]. */
UPIPE_ABI_API int upipe_abi_fused_fwd(upipe_abi *u, int rank, int layer, void *o, const void *qkv);
UPIPE_ABI_API int upipe_abi_fused_bwd(upipe_abi *u, int rank, int layer, void *dqkv, const void *dout,
                                      const void *o, const void *qkv);
/* The same of Megatron's tensors: qkv, dqkv [rows][batch][heads][3][head_dim], o, dout [rows][batch][heads][head_dim].
 * A call takes sequence b, and a layer's sequences are layers of a handle with batch 1. */
UPIPE_ABI_API int upipe_abi_sbh3d_fwd(upipe_abi *u, int rank, int layer, void *o, const void *qkv, int batch,
                                      int b);
UPIPE_ABI_API int upipe_abi_sbh3d_bwd(upipe_abi *u, int rank, int layer, void *dqkv, const void *dout,
                                      const void *o, const void *qkv, int batch, int b);

#ifdef __cplusplus
}
#endif

#endif
