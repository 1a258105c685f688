/* upipe_net_peer_memory.h -- the memory that ranks of upipe_net_peer.h share    backend, includes team, comm
 *
 * The buffer is memory that all ranks see, each perhaps at another address: it holds offsets, handles and
 * numbers. A rank writes its own slot and publishes it; others read the slot once `posted` has reached the
 * call. One word holds the rank that broke the team, and that rank's slot holds the failure: a process that
 * dies in between leaves the word unset.
 */
#ifndef UPIPE_NET_PEER_MEMORY_H
#define UPIPE_NET_PEER_MEMORY_H

#include "upipe_net_team.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>

enum {
    UPIPE_PEER_MAX = 64,   /* ranks of one team */
    UPIPE_PEER_SLABS = 16, /* of one rank */
    UPIPE_PEER_RECVS = 8,  /* messages that a rank may receive in one transfer, times the ranks */
    /* Bytes of the first slab, and of each other one, at least, times the ranks: init writes there. */
    UPIPE_PEER_LEAST = 128,
    UPIPE_PEER_LEAST_MORE = 8,
    UPI_PEER_YIELDS = 2000,
    UPI_PEER_NAP = 20000,       /* ns */
    UPI_PEER_PITCH = 2147483647 /* bytes between rows that cudaMemcpy2DAsync takes */
};

#define UPI_PEER_MARK UINT64_C(0x3172656570697075) /* "upipeer1" in memory, low byte first */

enum { UPI_PEER_READY, UPI_PEER_SENT, UPI_PEER_EVENTS };
/* Phases of init. */
enum { UPI_PEER_CAME = 1, UPI_PEER_SHOWN, UPI_PEER_TRIED, UPI_PEER_DONE };
/* Stages of a transfer. */
enum { UPI_PEER_PUSHING, UPI_PEER_RECEIVING, UPI_PEER_LANDING };

/* Memory of the device that peers may write to. */
typedef struct upipe_peer_slab {
    void *data; /* processes: what cudaMalloc (upipe_cuda_slab) returned, no address within it */
    size_t bytes;
} upipe_peer_slab;

typedef struct upipe_peer_desc {
    void
        *buf; /* upipe_peer_bytes(ranks) zeros, 128-byte aligned; zeros again before it serves another team */
    const upipe_peer_slab *slabs; /* [slabs_n], on the current device */
    int slabs_n;
    int rank, ranks;
    int processes;     /* 0: all ranks are threads of this process; 1: each is a process of its own */
    double deadline_s; /* seconds that one call may wait for its peers; 0 = UPIPE_DEADLINE_DEFAULT */
} upipe_peer_desc;

/* ---- the buffer: offsets and handles, no addresses that another process would use ---- */

/* One message of a transfer, as its receiver posts it. */
typedef struct upi_peer_recv {
    int64_t offset, bytes, stride, count; /* offset: in the slab */
    int32_t from, slab;
} upi_peer_recv;

typedef struct upi_peer_post {
    int32_t kind, n; /* UPI_TEAM_...; n: receives of a transfer, numbers of an all-gather */
    int64_t values[UPIPE_ALL_GATHER_MAX];
} upi_peer_post;

/* What a rank publishes. Call number n lies in post[n & 1]: it is overwritten at call n + 2, when every rank
 * has come to n + 1 and so has finished n. The same holds for events. */
typedef struct upi_peer_slot {
    uint64_t posted; /* atomic: number of the last call posted */
    uint64_t sent; /* atomic: number of the last transfer all of whose copies, and the event, are enqueued */
    int32_t phase; /* atomic */
    int32_t left;  /* atomic: no longer uses anything of other ranks */
    int32_t ranks, processes, slabs_n, device;
    int64_t pid;
    uint64_t slab[UPIPE_PEER_SLABS]; /* addresses, for threads */
    uint64_t bytes[UPIPE_PEER_SLABS];
    uint64_t event[UPI_PEER_EVENTS][2]; /* for threads */
    cudaIpcMemHandle_t slab_handle[UPIPE_PEER_SLABS];
    cudaIpcEventHandle_t event_handle[UPI_PEER_EVENTS][2];
    upi_peer_post post[2];
    upipe_err failure; /* constant once this rank has broken the team */
    char apart[128];
} upi_peer_slot;

typedef struct upi_peer_head {
    int32_t broken; /* atomic: 1 + the rank whose slot holds the failure */
    char apart[124];
} upi_peer_head;

/* upipe_peer_bytes -- size of the buffer of a team */
UPIPE_API size_t upipe_peer_bytes(int ranks)
{
    size_t n = (size_t)(ranks > 0 ? ranks : 0);
    return sizeof(upi_peer_head) + n * sizeof(upi_peer_slot) + n * n * sizeof(int32_t) +
           2 * n * n * UPIPE_PEER_RECVS * sizeof(upi_peer_recv);
}

/* Another rank, as this one reaches it. */
typedef struct upi_peer_link {
    char *slab[UPIPE_PEER_SLABS];
    cudaEvent_t event[UPI_PEER_EVENTS][2];
    uint64_t pushed; /* number of the last transfer whose copies to it are enqueued */
} upi_peer_link;

/* A rank's end of a team. The host's; must not move between init and free. */
typedef struct upipe_peer {
    upipe_comm comm;
    int ahead; /* see upipe_net_peer.h; may be set between transfers */
    /* the rest belongs to the transport */
    upi_peer_head *head;
    upi_peer_slot *slot;  /* [ranks] */
    upi_peer_recv *recvs; /* [ranks][2][UPIPE_PEER_RECVS * ranks] */
    int32_t *busy;        /* [ranks][ranks], atomic: copies to the first rank from the second may run */
    upi_peer_link *link;  /* [ranks]; own slabs and events too */
    upipe_peer_slab slabs[UPIPE_PEER_SLABS];
    int slabs_n, processes, device;
    cudaStream_t stream;
    cudaEvent_t done; /* on stream, behind the last transfer */
    uint64_t call;    /* calls begun */
    const upipe_msg *list;
    int n;
    int stage;
    int busy_set; /* own busy words are set */
    void *memory;
} upipe_peer;

/* ---- failure ---- */

/* The CUDA runtime's own text behind the call's name. */
UPIPE_API upipe_status upi_peer_check(upipe_err *e, cudaError_t r, const char *what)
{
    if (r == cudaSuccess) return UPIPE_OK;
    (void)cudaGetLastError(); /* clears the error: the next call must not report it again */
    return upipe_fail(e, r == cudaErrorMemoryAllocation ? UPIPE_ERR_MEMORY : UPIPE_ERR_BACKEND,
                      "%.*s: %s (%s)", (int)strcspn(what, "("), what, cudaGetErrorString(r),
                      cudaGetErrorName(r));
}

/* 1 + the rank that broke the team; 0: it is whole. */
UPIPE_API int upi_peer_broken(const upipe_peer *m)
{
    return __atomic_load_n(&m->head->broken, __ATOMIC_SEQ_CST);
}

UPIPE_API const upipe_err *upi_peer_failure(const upipe_comm *comm)
{
    const upipe_peer *m = (const upipe_peer *)comm->impl;
    int broken = upi_peer_broken(m);
    return broken ? &m->slot[broken - 1].failure : NULL;
}

UPIPE_API int upi_peer_fail(upipe_comm *comm, upipe_status s, const char *why)
{
    upipe_peer *m = (upipe_peer *)comm->impl;
    int32_t whole = 0;
    if (upi_peer_broken(m)) return 0;
    upipe_fail(&m->slot[comm->rank].failure, s, "%s", why);
    return __atomic_compare_exchange_n(&m->head->broken, &whole, comm->rank + 1, 0, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST);
}

UPIPE_API upipe_status upi_peer_checked(upipe_err *e, upipe_peer *m, cudaError_t r, const char *what)
{
    upipe_err mine;
    upipe_status s = upi_peer_check(&mine, r, what);
    if (s == UPIPE_OK) return s;
    return upipe_comm_fail(e, &m->comm, s, "rank %d: %s", upipe_comm_called(&m->comm, m->comm.rank),
                           mine.text);
}

#define UPI_PEER_CUDA(e, m, call) UPIPE_TRY(upi_peer_checked((e), (m), (call), #call))

/* Whether the stream has passed the event. */
UPIPE_API upipe_status upi_peer_passed(upipe_err *e, upipe_peer *m, cudaEvent_t event, int *yes)
{
    cudaError_t r = cudaEventQuery(event);
    *yes = r == cudaSuccess;
    if (r != cudaErrorNotReady) return upi_peer_checked(e, m, r, "cudaEventQuery(");
    (void)cudaGetLastError(); /* not an error, though some runtimes remember it as one */
    return UPIPE_OK;
}

/* ---- posts ---- */

UPIPE_API upi_peer_post *upi_peer_post_of(const upipe_peer *m, int rank, uint64_t call)
{
    return &m->slot[rank].post[call & 1];
}

UPIPE_API upi_peer_recv *upi_peer_recvs_of(const upipe_peer *m, int rank, uint64_t call)
{
    size_t most = (size_t)m->comm.ranks * UPIPE_PEER_RECVS;
    return m->recvs + ((size_t)rank * 2 + (size_t)(call & 1)) * most;
}

UPIPE_API int upi_peer_has_posted(const upipe_peer *m, int rank, uint64_t call)
{
    return __atomic_load_n(&m->slot[rank].posted, __ATOMIC_ACQUIRE) >= call;
}

UPIPE_API int upi_peer_has_sent(const upipe_peer *m, int rank, uint64_t call)
{
    return __atomic_load_n(&m->slot[rank].sent, __ATOMIC_ACQUIRE) >= call;
}

/* Makes this rank's post of this call visible. */
UPIPE_API void upi_peer_publish(upipe_peer *m, uint64_t call)
{
    m->call = call;
    __atomic_store_n(&m->slot[m->comm.rank].posted, call, __ATOMIC_RELEASE);
}

/* Compares what rank r has posted as this call with what this rank has. */
UPIPE_API upipe_status upi_peer_same(upipe_err *e, upipe_peer *m, uint64_t call, int r)
{
    const upi_peer_post *mine = upi_peer_post_of(m, m->comm.rank, call),
                        *theirs = upi_peer_post_of(m, r, call);
    return upi_team_same(e, &m->comm, mine->kind, mine->n, r, theirs->kind, theirs->n);
}

/* The deadline of this call has passed: names the ranks that have not come, or else those that have not sent.
 * Returns OK if the last of them has just come. */
UPIPE_API upipe_status upi_peer_late(upipe_err *e, upipe_peer *m, uint64_t call)
{
    const int32_t kind = upi_peer_post_of(m, m->comm.rank, call)->kind;
    upi_team_names absent = {"", 0, 0, 0}, sending = {"", 0, 0, 0};
    int r;
    if (kind == UPI_TEAM_TRANSFER && m->stage == UPI_PEER_LANDING)
        return upi_team_late(e, &m->comm, "in a transfer for the devices' copies to end");
    for (r = 0; r < m->comm.ranks; ++r) {
        if (!upi_peer_has_posted(m, r, call))
            upi_team_name(&absent, &m->comm, upipe_comm_called(&m->comm, r));
        else if (kind == UPI_TEAM_TRANSFER && !upi_peer_has_sent(m, r, call))
            upi_team_name(&sending, &m->comm, upipe_comm_called(&m->comm, r));
    }
    if (absent.count > 0) return upi_team_late_for(e, &m->comm, kind, &absent, "come");
    if (sending.count > 0) return upi_team_late_for(e, &m->comm, kind, &sending, "send");
    return UPIPE_OK;
}

#endif
