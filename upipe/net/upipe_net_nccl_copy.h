/* upipe_net_nccl_copy.h -- all-to-alls of an NCCL team by copy engines     backend, includes upipe_net_nccl.h
 *
 * Nobody has run this on devices yet: it is known to work on the fake of tests/fake alone.
 *
 * NCCL 2.28 moves an all-to-all of equal parts with copy engines, without multiprocessors, where both buffers lie in a
 * symmetric window of a communicator of one machine with CTAPolicy = NCCL_CTA_POLICY_ZERO. With NCCL 2.31, built with
 * and running on every rank, each such call asks for it, and the communicator keeps its policy for all others. The host
 * requests it once, on all ranks, after init:
 *
 *     config.CTAPolicy = NCCL_CTA_POLICY_ZERO;              before 2.31: NCCL cannot report it, the host must set it
 *     upipe_nccl_slab(&slab, bytes, &err);                  for the pool; before 2.30.7 as many bytes on every rank
 *     upipe_nccl_zero_sm(&ctx, &team, slab, bytes);         team.zero_sm, team.zero_sm_text
 *
 * Each rank writes into the others' windows at the offset of its own receive buffer, and NCCL does not check
 * that the offsets are equal. So the hosts compare shapes and offsets in every transfer before data move, through
 * memory that the processes of the machine share: a kernel that compares would wait until attention leaves it a
 * multiprocessor. If any differ, all ranks send and receive in a group. All of this happens in wait, and the data move
 * on a stream of the transport: what the host enqueues on ctx->stream between start and wait runs at the same time. In
 * wait the host waits for the other hosts, and for no device. All-gathers of numbers and barriers then go through the
 * same memory, so that different calls are MISMATCH as before, and a rank that fails tells the others. ncclCommAbort
 * does not end a copy engine that waits for a peer's; after the comparison that can happen only if a rank dies, or its
 * device fails, before it has come to the transfer. In a graph every transfer is a group.
 */
#ifndef UPIPE_NET_NCCL_COPY_H
#define UPIPE_NET_NCCL_COPY_H

#include "upipe_net_nccl.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

enum {
    UPIPE_NCCL_ENGINES_NCCL = 22800,  /* NCCL's version at run time, at least */
    UPIPE_NCCL_UNEQUAL_NCCL = 23007,  /* and for windows of unequal sizes */
    UPIPE_NCCL_PER_CALL_NCCL = 23100, /* and for a policy of each call */
    UPIPE_NCCL_ENGINES_DRIVER = 12050 /* the driver's, as cudaDriverGetVersion counts */
};

/* ---- slabs ---- */

/* upipe_nccl_slab -- allocates device memory that copy engines can reach, for a pool; on the current device,
 *                    which is the team's
 *   errors  MEMORY or BACKEND with NCCL's text; UNSUPPORTED before NCCL 2.28
 */
UPIPE_API upipe_status upipe_nccl_slab(void **out, size_t bytes, upipe_err *e)
{
    *out = NULL;
    if (bytes == 0) return UPIPE_OK;
#if UPI_NCCL_ENGINES
    {
        size_t left = 0, total = 0;
        ncclResult_t r = ncclMemAlloc(out, bytes);
        if (r == ncclSuccess) return UPIPE_OK;
        *out = NULL;
        if (cudaMemGetInfo(&left, &total) == cudaSuccess && bytes > left)
            return upipe_fail(e, UPIPE_ERR_MEMORY,
                              "a slab of %zu bytes, and %zu of the device's %zu are free", bytes, left,
                              total);
        return upipe_nccl_check(e, NULL, r, "ncclMemAlloc(");
    }
#else
    return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "a slab for copy engines needs NCCL 2.28");
#endif
}

/* upipe_nccl_slab_free -- frees it, after upipe_nccl_free; nothing for NULL
 *   errors  BACKEND: NCCL's text
 */
UPIPE_API upipe_status upipe_nccl_slab_free(void *slab, upipe_err *e)
{
#if UPI_NCCL_ENGINES
    if (slab != NULL) return upipe_nccl_check(e, NULL, ncclMemFree(slab), "ncclMemFree(");
#endif
    (void)slab;
    (void)e;
    return UPIPE_OK;
}

#if UPI_NCCL_ENGINES

/* ---- hosts that share memory ---- */

enum { UPI_NCCL_PATH = 48 };

/* Rank 0's file for the cards. It has its name, and no bytes, for no longer than this call: a process that is killed leaves
 * no memory behind. */
UPIPE_API int upi_nccl_board_make(int64_t mark)
{
    char path[UPI_NCCL_PATH];
    int fd;
    snprintf(path, sizeof path, "/dev/shm/upipe_nccl_%016llx", (unsigned long long)mark);
    fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd >= 0) (void)unlink(path);
    return fd;
}

/* The same file, by the process that has it open and its number there. Another machine's or container's process of that
 * number may have anything under it: to open a terminal or a device is to act on it, so that only a file is opened. */
UPIPE_API int upi_nccl_board_open(int64_t file)
{
    char path[UPI_NCCL_PATH];
    struct stat about;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)(file >> 32), (int)(file & INT32_MAX));
    return stat(path, &about) == 0 && S_ISREG(about.st_mode) ? open(path, O_RDWR | O_CLOEXEC) : -1;
}

/* Maps the cards of all ranks of the team. Another process's file lacks the mark, which lies where only later turns write.
 * Returns 0, or the error. */
UPIPE_API int upi_nccl_board_map(upipe_nccl *m, int fd, int64_t mark)
{
    const size_t bytes = (size_t)m->comm.ranks * sizeof *m->cards;
    struct stat about;
    upi_nccl_card *p;
    int error = 0;
    if (fd < 0) return m->comm.rank == 0 ? errno : ENOENT;
    if (m->comm.rank == 0)
        error = posix_fallocate(fd, 0, (off_t)bytes); /* else a write may find no memory, and be a signal */
    else if (fstat(fd, &about) != 0 || about.st_size < (off_t)bytes)
        error = ENOENT;
    if (error != 0) return error;
    p = (upi_nccl_card *)mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) return errno;
    if (m->comm.rank == 0) p->row[0][0] = mark;
    if (p->row[0][0] != mark) return (void)munmap(p, bytes), ENOENT;
    m->cards = p;
    return 0;
}

/* Of a new one, which no other has: positive. */
UPIPE_API int64_t upi_nccl_board_mark(const upipe_nccl *m)
{
    const int64_t unique[] = {(int64_t)getpid(), upipe_net_now(), (int64_t)(uintptr_t)m};
    return (int64_t)(upipe_hash_bytes(UPIPE_HASH, unique, sizeof unique) >> 1 | 1);
}

/* Names the ranks that have not come to this turn; ABORTED where one of them has failed. One that has failed since has
 * come: what it has found in the rows, the others must find too. */
UPIPE_API upipe_status upi_nccl_missing(upipe_ctx *c, upipe_nccl *m, int64_t turn, upi_team_names *missing)
{
    int r;
    memset(missing, 0, sizeof *missing);
    for (r = 0; r < m->comm.ranks; ++r) {
        const int gone = __atomic_load_n(&m->cards[r].gone, __ATOMIC_ACQUIRE) != 0;
        if (__atomic_load_n(&m->cards[r].turn, __ATOMIC_ACQUIRE) >= turn) continue;
        if (gone)
            return upipe_comm_fail(&c->err, &m->comm, UPIPE_ERR_ABORTED, "rank %d has aborted",
                                   upipe_comm_called(&m->comm, r));
        upi_team_name(missing, &m->comm, upipe_comm_called(&m->comm, r));
    }
    return UPIPE_OK;
}

/* Brings this rank's row, m->rows, to all hosts, and waits for theirs. */
UPIPE_API upipe_status upi_nccl_share_by_hosts(upipe_ctx *c, upipe_nccl *m)
{
    const int64_t turn = m->turn + 1, until = upi_net_until(m->comm.deadline);
    upi_nccl_card *mine = &m->cards[m->comm.rank];
    upi_team_names missing;
    int64_t left;
    int idle = 0, late, r;
    UPIPE_TRY(upi_nccl_missing(c, m, INT64_MAX, &missing)); /* to one that has failed nobody comes any more */
    memcpy(mine->row[turn % 2], m->rows, sizeof mine->row[0]);
    __atomic_store_n(&mine->turn, m->turn = turn, __ATOMIC_RELEASE);
    for (;;) {
        late = upipe_net_now() >= until;
        UPIPE_TRY(upi_nccl_missing(c, m, turn, &missing));
        if (missing.count == 0) break;
        if (late) return upi_team_late_for(&c->err, &m->comm, m->kind, &missing, "come");
        UPIPE_TRY(upi_nccl_look(c, m, &left));
        upi_net_rest(&idle, UPI_NCCL_YIELDS, UPI_NCCL_NAP);
    }
    for (r = 0; r < m->comm.ranks; ++r)
        memcpy(m->rows + (size_t)(1 + r) * UPI_NCCL_ROW, m->cards[r].row[turn % 2], sizeof mine->row[0]);
    return UPIPE_OK;
}

/* ---- a transfer ---- */

/* The offset in the slab of `bytes` bytes at p; -1: they are not inside. */
UPIPE_API int64_t upi_nccl_offset(const upipe_nccl *m, const void *p, size_t bytes)
{
    size_t offset = (size_t)((uintptr_t)p - (uintptr_t)m->slab);
    return (uintptr_t)p >= (uintptr_t)m->slab && offset <= m->slab_bytes && bytes <= m->slab_bytes - offset
               ? (int64_t)offset
               : -1;
}

UPIPE_API upipe_status upi_nccl_post_engines(upipe_ctx *c, upipe_nccl *m, size_t rank_bytes)
{
#if UPI_NCCL_PER_CALL
    if (m->per_call) {
        UPIPE_TRY(upi_nccl_open(c, m));
        return upi_nccl_enqueued(c, m,
                                 ncclAlltoAllConfig(m->list[0].send, m->list[0].recv, rank_bytes, ncclInt8,
                                                    m->nccl, m->stream, &m->policy),
                                 "ncclAlltoAllConfig(");
    }
#endif
    return upi_nccl_post_all(c, m, m->list, rank_bytes);
}

/* A transfer of a team with copy engines, in wait: all ranks see the same rows, and decide alike. */
UPIPE_API upipe_status upi_nccl_move(upipe_ctx *c, upipe_nccl *m)
{
    int64_t mine[2] = {0, -1}; /* rank_bytes, 0: not for copy engines; offset of the receive buffer */
    size_t rank_bytes = 0;
    int r, same = 1;
    if (upi_nccl_is_all_to_all(m, m->list, m->n, &rank_bytes) &&
        upi_nccl_offset(m, m->list[0].send, rank_bytes * (size_t)m->n) >= 0 &&
        (mine[1] = upi_nccl_offset(m, m->list[0].recv, rank_bytes * (size_t)m->n)) >= 0)
        mine[0] = (int64_t)rank_bytes;
    m->stream = m->side;
    UPIPE_TRY(upi_nccl_gather_rows(c, m, mine, 2));
    for (r = 0; r < m->comm.ranks; ++r)
        same = same && upi_nccl_value(m, r, 0) == mine[0] && upi_nccl_value(m, r, 1) == mine[1];
    if (same && mine[0] > 0) {
        UPI_NCCL_CUDA(c, m, cudaStreamWaitEvent(m->side, m->ready, 0));
        ++m->engine_transfers;
        UPIPE_TRY(upi_nccl_post_engines(c, m, rank_bytes));
        UPI_NCCL_CUDA(c, m,
                      cudaStreamWaitEvent((cudaStream_t)c->stream, upi_nccl_op_at(m, m->begun - 1)->done, 0));
        return UPIPE_OK;
    }
    return upi_nccl_post_group(c, m, m->list, m->n);
}

/* ---- the request ---- */

/* BOARD: of rank 0, the mark of the hosts' memory, or minus the error that it could not be made with; FILE: where it is. */
enum {
    UPI_NCCL_SLAB,
    UPI_NCCL_VERSION,
    UPI_NCCL_CALLS,
    UPI_NCCL_DRIVER,
    UPI_NCCL_NODE,
    UPI_NCCL_BOARD,
    UPI_NCCL_FILE,
    UPI_NCCL_NUMBERS
};
enum { UPI_NCCL_WINDOW, UPI_NCCL_DOMAIN, UPI_NCCL_CARDS, UPI_NCCL_RESULTS }; /* of the registration */

/* ncclTeamLsa: the ranks whose memory NCCL reaches by loads and stores; 0 of them where it fails. Its header,
 * nccl_device/core.h, is for device code, and compiles with warnings in C. */
typedef struct upi_nccl_domain {
    int ranks, rank, stride;
} upi_nccl_domain;
#ifdef __cplusplus
extern "C" {
#endif
upi_nccl_domain upi_nccl_domain_of(ncclComm_t comm) __asm__("ncclTeamLsa");
#ifdef __cplusplus
}
#endif

/* The least of a number over all ranks. */
UPIPE_API int64_t upi_nccl_least(const upipe_nccl *m, int i)
{
    int64_t least = upi_nccl_value(m, 0, i);
    int r;
    for (r = 1; r < m->comm.ranks; ++r)
        if (upi_nccl_value(m, r, i) < least) least = upi_nccl_value(m, r, i);
    return least;
}

/* What prevents copy engines, from the numbers of all ranks: the same on all. NULL: nothing. */
UPIPE_API const char *upi_nccl_objection(upipe_nccl *m)
{
    char *text = m->zero_sm_text;
    size_t buf = sizeof m->zero_sm_text;
    const int64_t oldest = upi_nccl_least(m, UPI_NCCL_VERSION);
    const int64_t board = upi_nccl_value(m, 0, UPI_NCCL_BOARD);
    int r;
    for (r = 0; r < m->comm.ranks; ++r) {
        int64_t bytes = upi_nccl_value(m, r, UPI_NCCL_SLAB), version = upi_nccl_value(m, r, UPI_NCCL_VERSION);
        int64_t driver = upi_nccl_value(m, r, UPI_NCCL_DRIVER);
        if (version < UPIPE_NCCL_ENGINES_NCCL)
            snprintf(text, buf, "grouped sends and receives: rank %d has NCCL %lld, copy engines need %d", r,
                     (long long)version, UPIPE_NCCL_ENGINES_NCCL);
        else if (driver < UPIPE_NCCL_ENGINES_DRIVER)
            snprintf(text, buf,
                     "grouped sends and receives: rank %d has a driver for CUDA %lld, copy engines need %d",
                     r, (long long)driver, UPIPE_NCCL_ENGINES_DRIVER);
        else if (bytes <= 0)
            snprintf(text, buf, "grouped sends and receives: rank %d has no slab", r);
        else if (bytes != upi_nccl_value(m, 0, UPI_NCCL_SLAB) && oldest < UPIPE_NCCL_UNEQUAL_NCCL)
            snprintf(
                text, buf,
                "grouped sends and receives: the slab is of %lld bytes on rank 0 and of %lld on rank %d, "
                "which needs NCCL %d, and a rank has %lld",
                (long long)upi_nccl_value(m, 0, UPI_NCCL_SLAB), (long long)bytes, r, UPIPE_NCCL_UNEQUAL_NCCL,
                (long long)oldest);
        else if (upi_nccl_value(m, r, UPI_NCCL_NODE) != upi_nccl_value(m, 0, UPI_NCCL_NODE))
            snprintf(text, buf, "grouped sends and receives: ranks 0 and %d are on two machines", r);
        else if (board < 0)
            snprintf(text, buf, "grouped sends and receives: rank 0 cannot make a file in /dev/shm: %s",
                     strerror((int)-board));
        else
            continue;
        return text;
    }
    return NULL;
}

/* What prevents them after the registration, from its results on all ranks. */
UPIPE_API const char *upi_nccl_incomplete(upipe_nccl *m)
{
    char *text = m->zero_sm_text;
    size_t buf = sizeof m->zero_sm_text;
    int r;
    for (r = 0; r < m->comm.ranks; ++r) {
        const int64_t ranks = upi_nccl_value(m, r, UPI_NCCL_DOMAIN);
        if (!upi_nccl_value(m, r, UPI_NCCL_WINDOW))
            snprintf(text, buf, "grouped sends and receives: NCCL makes no symmetric window for rank %d", r);
        else if (ranks != m->comm.ranks)
            snprintf(text, buf,
                     "grouped sends and receives: for NCCL %lld of %d ranks reach the memory of rank %d by "
                     "loads and stores",
                     (long long)ranks, m->comm.ranks, r);
        else if (!upi_nccl_value(m, r, UPI_NCCL_CARDS))
            snprintf(text, buf, "grouped sends and receives: rank %d does not reach rank 0's files in /proc",
                     r);
        else
            continue;
        return text;
    }
    return NULL;
}

/* Registers the slab; NCCL may leave the window NULL, and call it success. */
UPIPE_API upipe_status upi_nccl_register(upipe_ctx *c, upipe_nccl *m)
{
    ncclResult_t r;
    int idle = 0, busy = 1;
    int64_t until = upi_net_until(m->comm.deadline);
    m->window = NULL;
    r = ncclCommWindowRegister(m->nccl, m->slab, m->slab_bytes, &m->window, NCCL_WIN_COLL_SYMMETRIC);
    if (r != ncclInProgress) return upi_nccl_checked(c, m, r, "ncclCommWindowRegister(");
    while (busy) {
        UPIPE_TRY(upi_nccl_state(c, m, &busy));
        if (busy && upipe_net_now() >= until)
            return upi_team_late(&c->err, &m->comm, "for ranks to register their slabs");
        if (busy) upi_net_rest(&idle, UPI_NCCL_YIELDS, UPI_NCCL_NAP);
    }
    return UPIPE_OK;
}

/* The window and the hosts' memory end with the team. */
UPIPE_API upipe_status upi_nccl_leave(upipe_nccl *m, upipe_err *e)
{
    if (m->cards != NULL) (void)munmap(m->cards, (size_t)m->comm.ranks * sizeof *m->cards);
    m->cards = NULL;
    if (m->window == NULL || m->nccl == NULL) return UPIPE_OK; /* else the abort has freed it */
    return upipe_nccl_check(e, m->nccl, ncclCommWindowDeregister(m->nccl, m->window),
                            "ncclCommWindowDeregister(");
}

/* board, fd: of rank 0, as UPI_NCCL_BOARD, and its file. */
UPIPE_API upipe_status upi_nccl_request_with(upipe_ctx *c, upipe_nccl *m, void *slab, size_t bytes,
                                             int64_t board, int fd)
{
    int64_t mine[UPI_NCCL_NUMBERS], made[UPI_NCCL_RESULTS];
    int version = 0, driver = 0, least = 0, most = 0;
#if UPI_NCCL_PER_CALL
    static const ncclCollConfig_t policy = NCCL_COLLCONFIG_INITIALIZER;
#endif
    UPI_NCCL(c, m, ncclGetVersion(&version));
    UPI_NCCL_CUDA(c, m, cudaDriverGetVersion(&driver));
    UPI_NCCL_CUDA(c, m, cudaDeviceGetStreamPriorityRange(&least, &most));
    /* where NCCL copies by kernels after all, they come before those of attention */
    UPI_NCCL_CUDA(c, m, cudaStreamCreateWithPriority(&m->side, cudaStreamNonBlocking, most));
    mine[UPI_NCCL_SLAB] = slab != NULL ? (int64_t)bytes : 0;
    mine[UPI_NCCL_VERSION] = version;
    mine[UPI_NCCL_CALLS] = 0;
#if UPI_NCCL_PER_CALL
    m->policy = policy;
    m->policy.CTAPolicy = NCCL_CTA_POLICY_ZERO;
    mine[UPI_NCCL_CALLS] = version >= UPIPE_NCCL_PER_CALL_NCCL && ncclAlltoAllConfig != NULL;
#endif
    mine[UPI_NCCL_DRIVER] = driver;
    mine[UPI_NCCL_NODE] = upipe_nccl_node();
    mine[UPI_NCCL_BOARD] = board;
    mine[UPI_NCCL_FILE] = ((int64_t)getpid() << 32) + fd;
    UPIPE_TRY(upi_nccl_meet(c, m, UPI_TEAM_ALL_GATHER, mine, UPI_NCCL_NUMBERS));
    if (upi_nccl_objection(m) != NULL) return UPIPE_OK;
    m->per_call = upi_nccl_least(m, UPI_NCCL_CALLS) != 0;
    version = (int)upi_nccl_least(m, UPI_NCCL_VERSION);
    m->slab = (char *)slab;
    m->slab_bytes = bytes;
    UPIPE_TRY(upi_nccl_register(c, m));
    if (m->comm.rank > 0) {
        fd = upi_nccl_board_open(upi_nccl_value(m, 0, UPI_NCCL_FILE));
        (void)upi_nccl_board_map(m, fd, upi_nccl_value(m, 0, UPI_NCCL_BOARD));
        if (fd >= 0) close(fd);
    }
    made[UPI_NCCL_CARDS] = m->cards != NULL;
    made[UPI_NCCL_WINDOW] = m->window != NULL;
    made[UPI_NCCL_DOMAIN] = m->window != NULL ? upi_nccl_domain_of(m->nccl).ranks : 0;
    if (m->window != NULL && made[UPI_NCCL_DOMAIN] < 1)
        return upipe_comm_fail(&c->err, &m->comm, UPIPE_ERR_BACKEND, "rank %d: ncclTeamLsa has failed",
                               upipe_comm_called(&m->comm, m->comm.rank));
    UPIPE_TRY(upi_nccl_meet(c, m, UPI_TEAM_ALL_GATHER, made, UPI_NCCL_RESULTS));
    if (upi_nccl_incomplete(m) != NULL) {
        m->grouped = 1; /* or ranks that have a window would use copy engines */
        return UPIPE_OK;
    }
    snprintf(
        m->zero_sm_text, sizeof m->zero_sm_text,
        "all-to-alls inside the slabs are asked of the copy engines by %s, the rest is grouped; NCCL %d, driver "
        "for CUDA %d",
        m->per_call ? "each call" : "the communicator's CTAPolicy, if the host has set it", version, driver);
    m->zero_sm = 1;
    m->move = upi_nccl_move;
    m->share = upi_nccl_share_by_hosts;
    m->comm.ops.gather = NULL; /* NCCL would use copy engines, and the ranks have not compared offsets */
    return UPIPE_OK;
}

/* Rank 0 has the file open until all ranks have mapped it, or never will. */
UPIPE_API upipe_status upi_nccl_request(upipe_ctx *c, upipe_nccl *m, void *slab, size_t bytes)
{
    int64_t board = 0;
    upipe_status s;
    int error, fd = -1;
    m->leave = upi_nccl_leave;
    if (m->comm.rank == 0) {
        board = upi_nccl_board_mark(m);
        fd = upi_nccl_board_make(board);
        error = upi_nccl_board_map(m, fd, board);
        if (error != 0) board = -error;
    }
    s = upi_nccl_request_with(c, m, slab, bytes, board, fd);
    if (fd >= 0) close(fd);
    return s;
}

#endif

/* upipe_nccl_zero_sm -- requests transfers by copy engines; m->zero_sm and m->zero_sm_text hold the outcome
 *                       and are the same on all ranks
 *   slab    of upipe_nccl_slab, the same number of bytes on all ranks unless all have NCCL 2.30.7, kept until
 *           upipe_nccl_free; NCCL refuses other memory (BACKEND)
 *   order   all ranks, once, before or between transfers; before NCCL 2.31 the communicator was made with CTAPolicy =
 *           NCCL_CTA_POLICY_ZERO, which NCCL cannot report
 *   errors  UPIPE_OK also where copy engines are not available, and transfers stay as before. ARG if
 *           requested twice; others as upipe_comm_wait
 */
UPIPE_API upipe_status upipe_nccl_zero_sm(upipe_ctx *c, upipe_nccl *m, void *slab, size_t bytes)
{
    UPIPE_TRY(upipe_comm_idle(c, &m->comm));
    if (m->zero_sm_text[0] != 0)
        return upipe_fail(&c->err, UPIPE_ERR_ARG, "copy engines are requested twice");
    UPIPE_TRY(upipe_comm_whole(c, &m->comm));
#if UPI_NCCL_ENGINES
    return upi_nccl_request(c, m, slab, bytes);
#else
    (void)slab;
    (void)bytes;
    snprintf(m->zero_sm_text, sizeof m->zero_sm_text,
             "grouped sends and receives: built with NCCL %d, copy engines need %d", NCCL_VERSION_CODE,
             UPIPE_NCCL_ENGINES_NCCL);
    return UPIPE_OK;
#endif
}

#endif
