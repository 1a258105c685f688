/* upipe_net_peer_memory.h -- what ranks of upipe_net_peer.h show each other      backend, includes base, ops, comm
 *
 * The buffer is memory that all ranks see, each perhaps at another address: it holds offsets, handles and
 * numbers. A rank writes into its own seat and posts; others read them once `posted` has come to the call.
 * One word says who broke the team, and the reason lies in that rank's seat: a process that dies in between
 * leaves nothing half told.
 */
#ifndef UPIPE_NET_PEER_BUF_H
#define UPIPE_NET_PEER_BUF_H

#include "upipe_net_clock.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "../upipe_base.h"
#include "../upipe_comm.h"
#include "../upipe_ops.h"

enum {
    UPIPE_PEER_MAX = 64,   /* ranks of one team */
    UPIPE_PEER_SLABS = 16, /* of one rank */
    UPIPE_PEER_PIECES = 8, /* segments that a rank may receive in one exchange, times the ranks */
    /* Bytes of the first slab, and of each other one, at least, times the ranks: init writes there. */
    UPIPE_PEER_LEAST = 128,
    UPIPE_PEER_LEAST_MORE = 8,
    UPI_PEER_YIELDS = 2000,
    UPI_PEER_NAP = 20000,       /* ns */
    UPI_PEER_PITCH = 2147483647 /* bytes between rows that cudaMemcpy2DAsync takes */
};

#define UPI_PEER_MARK UINT64_C(0x3172656570697075) /* "upipeer1" in memory, low byte first */

typedef enum upi_peer_kind { UPI_PEER_TRANSFER = 1, UPI_PEER_BARRIER, UPI_PEER_GATHER } upi_peer_kind;
enum { UPI_PEER_READY, UPI_PEER_SENT, UPI_PEER_EVENTS };
/* Of init: what a rank has shown. */
enum { UPI_PEER_CAME = 1, UPI_PEER_SHOWN, UPI_PEER_TRIED, UPI_PEER_DONE };
/* Of an exchange. */
enum { UPI_PEER_PUSHING, UPI_PEER_RECEIVING, UPI_PEER_LANDING };

/* Memory of the device that peers may write to. */
typedef struct upipe_peer_slab {
    void *data; /* processes: what cudaMalloc (upipe_cuda_slab) returned, no address within it */
    size_t bytes;
} upipe_peer_slab;

typedef struct upipe_peer_desc {
    void
        *buf; /* upipe_peer_bytes(ranks) zeros, 128-byte aligned; a new one, or zeros again, for each team */
    const upipe_peer_slab *slabs; /* [slabs_n], on the current device */
    int slabs_n;
    int rank, ranks;
    int processes;     /* 0: all ranks are threads of this process; 1: each is a process of its own */
    double deadline_s; /* seconds that one call may wait for its peers; 0 = UPIPE_DEADLINE_DEFAULT */
} upipe_peer_desc;

/* ---- the buffer: offsets and handles, no addresses that another process would use ---- */

/* One segment of an exchange, as its receiver posts it. */
typedef struct upi_peer_piece {
    int64_t at, bytes, step, count; /* at: in the slab */
    int32_t from, slab;
} upi_peer_piece;

typedef struct upi_peer_post {
    int32_t kind, n; /* n: pieces of an exchange, numbers of a gather */
    int64_t values[UPIPE_ALL_GATHER_MAX];
} upi_peer_post;

/* What a rank shows. Call number s lies in post[s & 1]: it is overwritten at call s + 2, when every rank has
 * come to s + 1 and so is done with s. The same goes for events. */
typedef struct upi_peer_seat {
    uint64_t posted; /* atomic: number of the last call posted */
    uint64_t sent; /* atomic: number of the last exchange all of whose copies, and the event, are enqueued */
    int32_t phase; /* atomic */
    int32_t left;  /* atomic: uses nothing of other ranks any more */
    int32_t ranks, processes, slabs_n, device;
    int64_t pid;
    uint64_t slab[UPIPE_PEER_SLABS]; /* addresses, for threads */
    uint64_t bytes[UPIPE_PEER_SLABS];
    uint64_t event[UPI_PEER_EVENTS][2]; /* for threads */
    cudaIpcMemHandle_t slab_handle[UPIPE_PEER_SLABS];
    cudaIpcEventHandle_t event_handle[UPI_PEER_EVENTS][2];
    upi_peer_post post[2];
    upipe_err reason; /* constant once the buffer is broken by this rank */
    char apart[128];
} upi_peer_seat;

typedef struct upi_peer_head {
    int32_t broken; /* atomic: 1 + the rank whose reason it is */
    char apart[124];
} upi_peer_head;

/* upipe_peer_bytes -- size of the buffer of a team */
UPIPE_API size_t upipe_peer_bytes(int ranks)
{
    size_t n = (size_t)(ranks > 0 ? ranks : 0);
    return sizeof(upi_peer_head) + n * sizeof(upi_peer_seat) + n * n * sizeof(int32_t) +
           2 * n * n * UPIPE_PEER_PIECES * sizeof(upi_peer_piece);
}

/* Another rank, as this one reaches it. */
typedef struct upi_peer_link {
    char *slab[UPIPE_PEER_SLABS];
    cudaEvent_t event[UPI_PEER_EVENTS][2];
    uint64_t pushed; /* number of the last exchange whose copies to it are enqueued */
} upi_peer_link;

/* A rank's end of a team. Plain, the host's; must not move between init and free. */
typedef struct upipe_peer {
    upipe_comm comm;
    int ahead; /* see above; may be set between exchanges */
    /* the rest is the transport's */
    upi_peer_head *head;
    upi_peer_seat *seat;    /* [ranks] */
    upi_peer_piece *pieces; /* [ranks][2][UPIPE_PEER_PIECES * ranks] */
    int32_t *busy; /* [ranks][ranks], atomic: copies to the first rank from the second may be under way */
    upi_peer_link *link; /* [ranks]; own slabs and events too */
    upipe_peer_slab slabs[UPIPE_PEER_SLABS];
    int slabs_n, processes, device;
    cudaStream_t stream;
    cudaEvent_t done; /* on stream, behind the last exchange */
    uint64_t call;    /* calls begun */
    const upipe_msg *list;
    int n;
    int stage;
    int held; /* own busy words are set */
    int told; /* this rank has returned the team's failure before */
    void *memory;
} upipe_peer;

/* ---- failure ---- */

/* The CUDA runtime's own text behind the call's name. */
UPIPE_API upipe_status upi_peer_check(upipe_err *e, cudaError_t r, const char *what)
{
    if (r == cudaSuccess) return UPIPE_OK;
    (void)cudaGetLastError(); /* what can be forgotten is: the next call must not report it again */
    return upipe_fail(e, r == cudaErrorMemoryAllocation ? UPIPE_ERR_MEMORY : UPIPE_ERR_BACKEND, "%.*s: %s (%s)",
                    (int)strcspn(what, "("), what, cudaGetErrorString(r), cudaGetErrorName(r));
}

/* 1 + the rank that broke the team; 0: it is whole. */
UPIPE_API int upi_peer_broken(const upipe_peer *m)
{
    return __atomic_load_n(&m->head->broken, __ATOMIC_SEQ_CST);
}

/* Breaks the team, if it is whole: then returns 1, and this is the reason for ever. */
UPIPE_API int upi_peer_break(upipe_peer *m, upipe_status s, const char *why)
{
    int32_t whole = 0;
    if (upi_peer_broken(m)) return 0;
    upipe_fail(&m->seat[m->comm.rank].reason, s, "%s", why);
    return __atomic_compare_exchange_n(&m->head->broken, &whole, m->comm.rank + 1, 0, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST);
}

/* Returns a broken team's failure on one rank; own = its status, if this rank found it, else UPIPE_OK. */
UPIPE_API upipe_status upi_peer_tell(upipe_err *e, upipe_peer *m, upipe_status own)
{
    const upipe_err *reason = &m->seat[upi_peer_broken(m) - 1].reason;
    upipe_status s = UPIPE_ERR_ABORTED;
    if (own != UPIPE_OK)
        s = own;
    else if (!m->told && reason->status == UPIPE_ERR_MISMATCH)
        s = UPIPE_ERR_MISMATCH;
    m->told = 1;
    return upipe_fail(e, s, "%s", reason->text);
}

/* Breaks the team with this sentence, unless another failure was first; returns what the rank must return. */
__attribute__((unused, format(printf, 4, 5))) static inline upipe_status upi_peer_fail(
    upipe_err *e, upipe_peer *m, upipe_status s, const char *format, ...)
{
    upipe_err mine;
    va_list args;
    va_start(args, format);
    vsnprintf(mine.text, sizeof mine.text, format, args);
    va_end(args);
    return upi_peer_tell(e, m, upi_peer_break(m, s, mine.text) ? s : UPIPE_OK);
}

UPIPE_API upipe_status upi_peer_checked(upipe_err *e, upipe_peer *m, cudaError_t r, const char *what)
{
    upipe_err mine;
    upipe_status s = upi_peer_check(&mine, r, what);
    if (s == UPIPE_OK) return s;
    return upi_peer_fail(e, m, s, "rank %d: %s", m->comm.rank, mine.text);
}

#define UPI_PEER_CUDA(e, m, call) UPIPE_TRY(upi_peer_checked((e), (m), (call), #call))

UPIPE_API void upi_peer_abort(upipe_comm *comm, const char *why)
{
    upi_peer_break((upipe_peer *)comm->impl, UPIPE_ERR_ABORTED, why != NULL ? why : "aborted by the host");
}

/* Is the event past? */
UPIPE_API upipe_status upi_peer_passed(upipe_err *e, upipe_peer *m, cudaEvent_t event, int *yes)
{
    cudaError_t r = cudaEventQuery(event);
    *yes = r == cudaSuccess;
    if (r != cudaErrorNotReady) return upi_peer_checked(e, m, r, "cudaEventQuery(");
    (void)cudaGetLastError(); /* not an error, though some runtimes remember it as one */
    return UPIPE_OK;
}

/* ---- posts ---- */

UPIPE_API const char *upi_peer_kind_name(int32_t kind)
{
    return kind == UPI_PEER_TRANSFER ? "an transfer" : kind == UPI_PEER_BARRIER ? "a barrier" : "a gather";
}

UPIPE_API upi_peer_post *upi_peer_post_of(const upipe_peer *m, int rank, uint64_t s)
{
    return &m->seat[rank].post[s & 1];
}

UPIPE_API upi_peer_piece *upi_peer_pieces_of(const upipe_peer *m, int rank, uint64_t s)
{
    size_t buf = (size_t)m->comm.ranks * UPIPE_PEER_PIECES;
    return m->pieces + ((size_t)rank * 2 + (size_t)(s & 1)) * buf;
}

UPIPE_API int upi_peer_has_posted(const upipe_peer *m, int rank, uint64_t s)
{
    return __atomic_load_n(&m->seat[rank].posted, __ATOMIC_ACQUIRE) >= s;
}

UPIPE_API int upi_peer_has_sent(const upipe_peer *m, int rank, uint64_t s)
{
    return __atomic_load_n(&m->seat[rank].sent, __ATOMIC_ACQUIRE) >= s;
}

/* Makes this rank's post of call s visible. */
UPIPE_API void upi_peer_publish(upipe_peer *m, uint64_t s)
{
    m->call = s;
    __atomic_store_n(&m->seat[m->comm.rank].posted, s, __ATOMIC_RELEASE);
}

/* Compares what rank r has posted as call s with what this rank has. */
UPIPE_API upipe_status upi_peer_same(upipe_err *e, upipe_peer *m, uint64_t s, int r)
{
    const upi_peer_post *mine = upi_peer_post_of(m, m->comm.rank, s), *theirs = upi_peer_post_of(m, r, s);
    if (mine->kind != theirs->kind)
        return upi_peer_fail(e, m, UPIPE_ERR_MISMATCH, "rank %d is in %s and rank %d in %s", m->comm.rank,
                             upi_peer_kind_name(mine->kind), r, upi_peer_kind_name(theirs->kind));
    if (mine->kind == UPI_PEER_GATHER && mine->n != theirs->n)
        return upi_peer_fail(e, m, UPIPE_ERR_MISMATCH, "rank %d gathers %d numbers and rank %d gathers %d",
                             m->comm.rank, mine->n, r, theirs->n);
    return UPIPE_OK;
}

/* The deadline of call s has passed: names those waited for. Returns OK if the last of them came just now. */
UPIPE_API upipe_status upi_peer_late(upipe_err *e, upipe_peer *m, uint64_t s)
{
    const int32_t kind = upi_peer_post_of(m, m->comm.rank, s)->kind;
    char names[96];
    int sending, r, count = 0, at = 0; /* first those who have not come, then those who have not sent */
    if (kind == UPI_PEER_TRANSFER && m->stage == UPI_PEER_LANDING)
        return upi_peer_fail(e, m, UPIPE_ERR_TIMEOUT,
                             "rank %d waited %g s in an transfer for the devices' copies to end",
                             m->comm.rank, m->comm.deadline);
    for (sending = 0; sending <= (kind == UPI_PEER_TRANSFER) && count == 0; ++sending)
        for (r = 0; r < m->comm.ranks; ++r) {
            if (sending ? upi_peer_has_sent(m, r, s) : upi_peer_has_posted(m, r, s)) continue;
            if (++count <= 8)
                at += snprintf(names + at, sizeof names - (size_t)at, count > 1 ? ", %d" : "%d", r);
        }
    if (count == 0) return UPIPE_OK;
    if (count > 8) snprintf(names + at, sizeof names - (size_t)at, " and %d more", count - 8);
    return upi_peer_fail(e, m, UPIPE_ERR_TIMEOUT, "rank %d waited %g s in %s for rank%s %s to %s",
                         m->comm.rank, m->comm.deadline, upi_peer_kind_name(kind), count > 1 ? "s" : "",
                         names, sending > 1 ? "send" : "come");
}

#endif
