/* test_nccl.c -- the transport over NCCL: the properties of conformance.h, and what streams alone have
 *
 * Runs on tests/fake, whose streams are lazy and whose communicators fail when told to. Ranks are threads, each with a
 * device and a stream of its own. Each call to NCCL and CUDA fails in turn, once or for good: every rank must get a
 * status in time, and nothing may be left behind.
 */
#define _POSIX_C_SOURCE 200809L
#include "fake/fake_pool.h"

#include "upipe/net/upipe_net_nccl.h"
#include "upipe/cuda/upipe_cuda_device.h"
#include "upipe/upipe_comm.h"

#include "fake.h"

#include "conformance.h"

/* ---- the row ---- */

enum { NCCL_RANKS = 8, SLAB = 1 << 20 };

/* A rank's end. The host's part (device, streams, memory, communicator) is made and ended without faults. */
typedef struct device_end {
    cudaStream_t stream, other;
    ncclComm_t nccl; /* the host's */
    upipe_nccl team;
    void *memory[8];
    int memories;
} device_end;

static device_end ends[NCCL_RANKS];

/* How teams are made: wait orders the stream of the rank, and no more; transfers are groups. */
static int blocking, ahead, grouped;
static ncclUniqueId first, more; /* of the team, and of another communicator of its ranks */

static struct {
    long at;          /* that call of the rank fails; 0: none */
    int rank, sticky; /* sticky: and all later ones of every rank */
    long calls;       /* that the rank has made in the run */
    char failed[64];  /* the call that failed; empty: none */
} fault;

#define OK(call) CHECK_SAY((call) == cudaSuccess, "%s", #call)

static upipe_status device_check(upipe_ctx *c, cudaError_t r, const char *what)
{
    if (r == cudaSuccess) return UPIPE_OK;
    (void)cudaGetLastError();
    return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "%s: %s", what, cudaGetErrorString(r));
}

static upipe_status device_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    return device_check(c, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, (cudaStream_t)c->stream),
                        "cudaMemcpyAsync");
}

/* As a compute table's: a stream that a transfer holds up is waited for within the deadline. */
static upipe_status device_sync(upipe_ctx *c)
{
    UPIPE_TRY(upi_comm_settle(c));
    return device_check(c, cudaStreamSynchronize((cudaStream_t)c->stream), "cudaStreamSynchronize");
}

static device_end *end_of(const member *k)
{
    return (device_end *)k->own;
}

/* Where wait returns when the transfer is complete on the device, another stream may read what has come and write over what
 * was sent. */
static cudaStream_t host_stream(const member *k)
{
    return ahead ? end_of(k)->stream : end_of(k)->other;
}

static void nccl_put(member *k, void *device, const void *host, size_t bytes)
{
    OK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, host_stream(k)));
    if (!ahead) OK(cudaStreamSynchronize(host_stream(k)));
}

static void nccl_get(member *k, void *host, const void *device, size_t bytes)
{
    OK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, host_stream(k)));
    OK(cudaStreamSynchronize(host_stream(k)));
}

static void *nccl_memory(member *k, size_t bytes)
{
    device_end *d = end_of(k);
    void **out = &d->memory[d->memories++];
    CHECK(d->memories <= 8);
    OK(cudaMalloc(out, bytes));
    return *out;
}

static void nccl_open(crew *all)
{
    (void)all;
    CHECK(ncclGetUniqueId(&first) == ncclSuccess);
    CHECK(ncclGetUniqueId(&more) == ncclSuccess);
}

/* The host's communicator of one of the two. */
static ncclComm_t host_comm(const member *k, ncclUniqueId of)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t nccl;
    ncclResult_t r;
    config.blocking = blocking;
    r = ncclCommInitRankConfig(&nccl, k->ranks, of, k->rank, &config);
    CHECK(r == ncclSuccess || (!blocking && r == ncclInProgress));
    return nccl;
}

static void nccl_begin(member *k)
{
    device_end *d = &ends[k->rank];
    *d = (device_end){0};
    k->own = d;
    fake_rank(k->rank);
    OK(cudaSetDevice(k->rank));
    OK(cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&d->other, cudaStreamNonBlocking));
    d->nccl = host_comm(k, first);
    k->ops.copy = device_copy;
    k->ops.sync = device_sync;
    k->ctx.stream = d->stream;
}

/* Faults begin before it. Where it fails there is nothing to free. */
static upipe_status nccl_join(member *k)
{
    device_end *d = end_of(k);
    upipe_status s;
    meet(k);
    if (k->rank == 0) fake_fail_at(fault.at, fault.rank, fault.sticky);
    meet(k);
    s = upipe_nccl_init(&d->team, d->nccl, k->all->deadline, &k->ctx.err);
    if (s != UPIPE_OK) { /* the host's to end */
        CHECK(d->team.buf == NULL && d->team.row == NULL && d->team.rows == NULL);
        (void)ncclCommAbort(d->nccl);
        d->nccl = NULL;
    }
    CHECK(s != UPIPE_OK || d->team.ahead); /* the default */
    d->team.grouped = grouped;
    d->team.ahead = ahead;
    k->ctx.team = &d->team.comm;
    return s;
}

static upipe_status nccl_leave(member *k)
{
    device_end *d = end_of(k);
    const int failed = upi_nccl_failure(&d->team.comm) != NULL;
    upipe_status s;
    CHECK(d->team.nccl == (failed ? NULL : d->nccl));
    s = upipe_nccl_free(&d->team, &k->ctx.err);
    d->nccl = d->team.nccl; /* NULL: a failure has freed it, perhaps one that free has found */
    return s;
}

/* Faults end before it. */
static void nccl_end(member *k)
{
    device_end *d = end_of(k);
    meet(k);
    if (k->rank == 0) {
        fault.calls = fake_calls(fault.rank);
        snprintf(fault.failed, sizeof fault.failed, "%s", fake_failed() != NULL ? fake_failed() : "");
        fake_fail_at(0, -1, FAKE_ONCE);
    }
    meet(k);
    if (d->nccl != NULL) CHECK(ncclCommAbort(d->nccl) == ncclSuccess);
    while (d->memories > 0) (void)cudaFree(d->memory[--d->memories]);
    (void)cudaStreamDestroy(d->other);
    (void)cudaStreamDestroy(d->stream);
}

static void nccl_clean(void)
{
    CHECK(fake_check_clean());
}

static const int teams[] = {1, 2, 3, 8, 0}, crews[] = {3, 0};

/* NCCL does not compare what ranks request, does not know who is missing, and tells the others no reason. */
static transport over_nccl = {
    .name = "nccl",
    .can = ENDS_ALONE | EXPOSED,
    .teams = teams,
    .crews = crews,
    .victims = 3,
    .most = 3,
    .longest = 150,
    .rounds = 12,
    .draws_a_round = 1000,
    .large = 1000,
    .late = WORDS,
    .open = nccl_open,
    .begin = nccl_begin,
    .join = nccl_join,
    .leave = nccl_leave,
    .end = nccl_end,
    .clean = nccl_clean,
    .each = each_thread,
    .sum = threads_sum,
    .memory = nccl_memory,
    .put = nccl_put,
    .get = nccl_get,
};

/* ---- a stream that does not go on ---- */

/* From here on the rank's stream waits, for a message that nobody sends. */
static void stall(member *k, ncclComm_t two[2])
{
    const int devices[2] = {k->rank, NCCL_RANKS + k->rank};
    CHECK(ncclCommInitAll(two, 2, devices) == ncclSuccess);
    CHECK(ncclRecv(k->send + 64, 4, ncclInt8, 1, two[0], end_of(k)->stream) == ncclSuccess);
}

/* It goes on. */
static void stall_end(ncclComm_t two[2])
{
    CHECK(ncclCommAbort(two[0]) == ncclSuccess);
    CHECK(ncclCommAbort(two[1]) == ncclSuccess);
}

/* ---- a call that fails ---- */

/* A bit of everything, for a fault at any call of it. */
static upipe_status every_call(member *k)
{
    upipe_ctx *c = &k->ctx;
    const upi_fields fields = fields_of("heads", 32);
    UPIPE_TRY(upi_agree(c, c->team, &fields));
    for (int distance = 1; distance >= 0; --distance) {
        UPIPE_TRY(shift_start(c, c->team, k->recv, k->send, 64, distance));
        UPIPE_TRY(upipe_comm_wait(c, c->team));
    }
    for (int p = 0; p < k->ranks; ++p) {
        upipe_msg *s = &k->list[p];
        *s = (upipe_msg){.peer = p, .count = 1, .send_bytes = 4, .recv_bytes = 4};
        s->send = k->send + p;
        s->recv = k->recv + 2 * p;
    }
    UPIPE_TRY(upipe_comm_start(c, c->team, k->list, k->ranks));
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    UPIPE_TRY(upi_slices_gather(c, c->team, k->recv, k->send, k->ranks * WORDS, 4));
    return upipe_comm_barrier(c, c->team);
}

static void every_body(member *k)
{
    k->status = every_call(k);
    if (k->status == UPIPE_OK) return;
    CHECK_INT(k->ctx.err.status, k->status);
    CHECK(k->ctx.err.text[0] != 0);
    check_dead(k);
}

/* What a failed call may give: it may go unneeded. */
static int may_fail_with(upipe_status s)
{
    return s == UPIPE_OK || s == UPIPE_ERR_BACKEND || s == UPIPE_ERR_MEMORY;
}

enum { FAULTY = 3 }; /* ranks */

static void run_faulty(long at, int sticky, double deadline)
{
    const double began = test_seconds();
    fault.at = at;
    fault.rank = 1;
    fault.sticky = sticky;
    the_crew =
        (crew){.t = &over_nccl, .body = every_body, .ranks = FAULTY, .deadline = deadline, .may_fail = 1};
    crew_run(&the_crew);
    fault.at = 0;
    CHECK(test_seconds() - began < 15);
}

/* Calls of one rank fail in turn, some sixty of them, init's too, other ones with other seeds; sticky: and all later
 * ones of every rank. A run makes more than `least`. */
static void test_injected(int sticky, long least)
{
    const member *victim = &the_crew.member[1];
    long apart, calls_made;
    run_faulty(0, FAKE_ONCE, 20);
    calls_made = fault.calls;
    CHECK(calls_made > least);
    apart = calls_made / 60 + 1; /* most are polls, more of them on a slow machine */
    for (long i = 1 + (test_env("UPIPE_SEED", 1) + (long)over_nccl.seed) % apart; i <= calls_made;
         i += apart) {
        int failures = 0;
        run_faulty(i, sticky, 1);
        buffers_free(0);
        if (fault.failed[0] == 0) continue; /* polls vary in number: the last calls may not be reached */
        for (int r = 0; r < FAULTY; ++r) {
            const member *at = &the_crew.member[r];
            CHECK_SAY(may_fail_with(at->status) || at->status == UPIPE_ERR_ABORTED ||
                          at->status == UPIPE_ERR_TIMEOUT,
                      "call %ld fails: rank %d: %s", i, r, at->ctx.err.text);
            failures += at->status != UPIPE_OK || at->freed != UPIPE_OK;
        }
        CHECK_SAY(victim->status != UPIPE_OK || victim->freed != UPIPE_OK, "call %ld (%s) fails, unnoticed",
                  i, fault.failed);
        if (!sticky) CHECK(may_fail_with(victim->status));
        CHECK(failures >= 1);
    }
}

/* ---- ranks that disagree, where NCCL itself compares nothing ---- */

enum { DRIFT, OWN, ODD };

/* DRIFT: one transfer with nobody too many. OWN: what a rank sends itself is all that it knows alone. */
static void odd_alone(member *k)
{
    static const char *const words[] = {"is in its", "does not receive"};
    upipe_ctx *c = &k->ctx;
    const int odd = k->rank == k->victim;
    upipe_msg own = {.peer = k->rank, .count = 1, .send = k->send, .recv = k->recv, .send_bytes = 4};
    upipe_status s = UPIPE_OK;
    own.recv_bytes = 8;
    line_up(k, 20);
    if (k->what == DRIFT && odd) CHECK_STATUS(transfer(k, k->list, 0), UPIPE_OK, c->err);
    if (k->what == OWN && odd) s = upipe_comm_start(c, c->team, &own, 1);
    if (s == UPIPE_OK) s = call(k, AT_GATHER);
    if (k->what == OWN && !odd) /* hears of it */
        CHECK_STATUS(s, UPIPE_ERR_ABORTED, c->err);
    else
        CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err, words[k->what]);
    check_dead(k);
}

/* ---- in the stream's order ---- */

/* No host waits for a device: all of it runs behind streams that do not go on yet. */
static void runs_ahead(member *k)
{
    uint32_t host[WORDS];
    upipe_ctx *c = &k->ctx;
    ncclComm_t two[2];
    int wrong = 0;
    CHECK_STATUS(all_to_all(k, 1), UPIPE_OK, c->err);
    for (int w = 0; w < WORDS; ++w) host[w] = word_of(k->rank, 0, w);
    put(k, k->recv, host, sizeof host);
    stall(k, two);
    (void)fake_waits(k->rank);
    for (int i = 0; i < 2 * k->ranks - 1; ++i) { /* round the team, through both buffers */
        uint32_t *from = i % 2 == 0 ? k->recv : k->send, *to = i % 2 == 0 ? k->send : k->recv;
        CHECK_STATUS(shift_start(c, c->team, to, from, sizeof host, 1), UPIPE_OK, c->err);
        CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_OK, c->err);
        OK(cudaMemsetAsync(from, 0xdd, sizeof host,
                           end_of(k)->stream)); /* freed, and used for something else */
    }
    CHECK_INT(fake_waits(k->rank), 0);
    CHECK(cudaStreamQuery(end_of(k)->stream) == cudaErrorNotReady);
    stall_end(two);
    CHECK_STATUS(c->ops->sync(c), UPIPE_OK, c->err);
    get(k, host, k->send, sizeof host);
    for (int w = 0; w < WORDS; ++w) wrong += host[w] != word_of((k->rank + 1) % k->ranks, 0, w);
    CHECK_INT(wrong, 0);
}

/* What is a rank's own: what its stream has before a transfer, which the deadline does not count, and a sync. */
static void own_work(member *k)
{
    upipe_ctx *c = &k->ctx;
    ncclComm_t two[2];
    c->team->deadline = 0.02;
    stall(k, two);
    for (int i = 0; i < 3; ++i) { /* each call looks at the stream */
        CHECK_STATUS(shift_start(c, c->team, k->recv, k->send, 64, 1), UPIPE_OK, c->err);
        CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_OK, c->err);
        test_nap(0.03);
    }
    c->team->deadline = 20;
    stall_end(two);
    if (k->rank == 0) CHECK_STATUS(upipe_nccl_sync(c, &end_of(k)->team), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_OK, c->err);
}

/* More than fit: the host waits for the oldest, whose peers are there. */
static void full(member *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_nccl *m = &end_of(k)->team;
    int64_t left;
    for (int i = 0; i < 3 * UPIPE_NCCL_AHEAD; ++i) {
        CHECK_STATUS(shift_start(c, c->team, k->recv, k->send, 64, 1), UPIPE_OK, c->err);
        CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_OK, c->err);
        CHECK(m->begun - m->ended <= UPIPE_NCCL_AHEAD);
    }
    /* one that NCCL has not enqueued yet is in flight, although its event was passed by an earlier one */
    CHECK_STATUS(upi_nccl_drain(c, m, 0), UPIPE_OK, c->err);
    CHECK_STATUS(upi_nccl_begin(c, m, UPI_TEAM_TRANSFER), UPIPE_OK, c->err);
    CHECK_STATUS(upi_nccl_open(c, m), UPIPE_OK, c->err);
    for (int i = 0; i < 20; ++i) {
        CHECK_STATUS(upi_nccl_look(c, m, &left), UPIPE_OK, c->err);
        CHECK_INT(left, 1);
    }
    CHECK_STATUS(upi_nccl_close(c, m), UPIPE_OK, c->err);
    CHECK_STATUS(upi_nccl_drain(c, m, 0), UPIPE_OK, c->err);
}

enum { BY_CALLS, BY_SYNC, BY_NCCL_SYNC, BY_GATHER, BY_FREE, BY_WAYS };

/* A transfer with a rank that never comes is enqueued, and its buffers are freed. */
static void enqueue_freed(upipe_ctx *c)
{
    void *from, *to;
    CHECK_STATUS(upipe_alloc(c, &from, 64, UPIPE_USE_OTHER, "from"), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_alloc(c, &to, 64, UPIPE_USE_OTHER, "to"), UPIPE_OK, c->err);
    CHECK_STATUS(shift_start(c, c->team, to, from, 64, 1), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_free(c, from), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_free(c, to), UPIPE_OK, c->err);
}

/* A rank never comes. The others' hosts have run ahead, and freed the buffers: they learn of it in time by whatever
 * they do next, and their pools give out nothing of what the rank may still access. */
static void never(member *k)
{
    upipe_ctx *c = &k->ctx;
    device_end *d = end_of(k);
    const int what = k->what;
    upipe_mem_block blocks[4];
    upipe_mem mem;
    void *again;
    upipe_status s = UPIPE_OK;
    double began;
    line_up(k, 0.2);
    if (k->rank == k->victim) {
        test_nap(0.6);
        return;
    }
    upipe_mem_init(&mem, nccl_memory(k, SLAB), SLAB, blocks, 4);
    c->mem = &mem;
    enqueue_freed(c);
    began = test_seconds();
    if (what == BY_FREE) {
        s = nccl_leave(k);
        k->left = 1;
        CHECK(d->nccl == NULL);
    }
    while (what == BY_CALLS && s == UPIPE_OK && test_seconds() - began < 5) {
        s = upipe_comm_start(c, c->team, k->list, 0);
        if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
        test_nap(0.005);
    }
    if (what == BY_SYNC) s = c->ops->sync(c);
    if (what == BY_NCCL_SYNC) s = upipe_nccl_sync(c, &d->team);
    if (what == BY_GATHER) s = call(k, AT_GATHER);
    CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
    CHECK(test_seconds() - began < 3);     /* of 20, were it not this team's deadline */
    CHECK_INT(d->team.comm.quarantine, 1); /* the host's pool has what the transfer was for */
    if (what == BY_FREE) {
        upipe_mem_destroy(&mem, NULL);
        return;
    }
    CHECK(upi_unwind(c, s, 0, NULL) == s); /* the stream goes on: it does not hang here */
    CHECK_STATUS(upipe_alloc(c, &again, 64, UPIPE_USE_OTHER, "again"), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_mem_destroy(&mem, &c->err), UPIPE_OK, c->err);
    c->mem = NULL;
    check_dead(k);
}

/* What the team knows nothing of, a graph's transfers or another communicator's, is in its way. */
static void behind(member *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_nccl *m = &end_of(k)->team;
    ncclComm_t two[2];
    upipe_status s;
    double began;
    line_up(k, 0.2);
    stall(k, two);
    CHECK_STATUS(shift_start(c, c->team, k->recv, k->send, 64, 1), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_nccl_sync(c, m), UPIPE_ERR_ARG, c->err); /* in progress */
    CHECK_STATUS(upipe_comm_wait(c, c->team), UPIPE_OK, c->err);
    began = test_seconds();
    s = upipe_nccl_sync(c, m);
    CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
    CHECK(test_seconds() - began < 3);
    stall_end(two);
    check_dead(k);
}

/* ---- two communicators of one rank ---- */

enum { SERIALISED, DISORDER, OTHER_GONE, JOINED };

upipe_status app_ops(upipe_ops *ops, upipe_cuda *device, upipe_err *e); /* ../cuda/table.cpp */

/* The team has failed, and with it a transfer into k->recv: the host gets no number of it, and waits for its device
 * as before. */
static void check_no_result(member *k)
{
    float host[4] = {0};
    upipe_ctx c = k->ctx;
    upipe_cuda device;
    upipe_ops ops;
    cublasHandle_t blas;
    CHECK(cublasCreate(&blas) == CUBLAS_STATUS_SUCCESS);
    CHECK_STATUS(upipe_cuda_init(&device, blas, &c.err), UPIPE_OK, c.err);
    CHECK_STATUS(app_ops(&ops, &device, &c.err), UPIPE_OK, c.err);
    c.ops = &ops;
    CHECK_REFUSED(ops.copy(&c, host, k->recv, sizeof host), UPIPE_ERR_ABORTED, c.err,
                  upi_nccl_failure(c.team)->text);
    CHECK_STATUS(ops.copy(&c, k->recv, host, sizeof host), UPIPE_OK, c.err);
    CHECK_STATUS(ops.sync(&c), UPIPE_OK, c.err);
    CHECK_STATUS(upipe_cuda_free(&device, &c.err), UPIPE_OK, c.err);
    CHECK(cublasDestroy(blas) == CUBLAS_STATUS_SUCCESS);
}

/* Transfers of both in turn, on a stream each. DISORDER: one rank begins with the other one. OTHER_GONE: one rank never
 * comes to the second one, and the first one fails with it. Returns the first failure, which c has then. */
static upipe_status both_in_turn(member *k, upipe_ctx *other)
{
    upipe_ctx *c = &k->ctx;
    const int odd = k->rank == k->victim, what = k->what, next = (k->rank + 1) % k->ranks;
    uint32_t host[WORDS];
    upipe_status s = UPIPE_OK;
    if (what == OTHER_GONE && odd) {
        test_nap(0.6);
        return UPIPE_ERR_ABORTED;
    }
    for (int i = 0; i < 6 && s == UPIPE_OK; ++i) {
        const int turn = (i + (what != SERIALISED && odd)) % 2;
        upipe_ctx *at = turn ? other : c;
        for (int w = 0; w < WORDS; ++w) host[w] = word_of(k->rank, next, w + i);
        OK(cudaMemcpyAsync(k->send + 64 * turn, host, WORDS * 4, cudaMemcpyHostToDevice,
                           (cudaStream_t)at->stream));
        s = shift_start(at, at->team, k->recv + 64 * turn, k->send + 64 * turn, WORDS * 4, 1);
        if (s == UPIPE_OK) s = upipe_comm_wait(at, at->team);
        if (s != UPIPE_OK) *c = *at;
    }
    return s == UPIPE_OK ? c->ops->sync(c) : s; /* of one stream: and all transfers have ended */
}

static void check_pair(member *k, upipe_nccl *second, upipe_ctx *other)
{
    upipe_ctx *c = &k->ctx;
    upipe_nccl *m = &end_of(k)->team;
    const int back = (k->rank + k->ranks - 1) % k->ranks;
    uint32_t host[2 * WORDS];
    upipe_status s;
    int wrong = 0;
    CHECK_STATUS(upipe_nccl_join(m, second, &c->err), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_nccl_join(second, m, &c->err), UPIPE_ERR_ARG, c->err);
    c->team->deadline = other->team->deadline = k->what == SERIALISED ? 20 : 0.2;
    s = both_in_turn(k, other);
    if (k->what != SERIALISED) {
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        if (k->what == OTHER_GONE && k->rank == k->victim) return;
        CHECK(m->nccl == NULL && second->nccl == NULL);
        check_no_result(k);
        return;
    }
    CHECK_STATUS(s, UPIPE_OK, c->err);
    OK(cudaMemcpy(host, k->recv, WORDS * 4, cudaMemcpyDeviceToHost));
    OK(cudaMemcpy(host + WORDS, k->recv + 64, WORDS * 4, cudaMemcpyDeviceToHost));
    for (int w = 0; w < 2 * WORDS; ++w) wrong += host[w] != word_of(back, k->rank, w % WORDS + 4 + w / WORDS);
    CHECK_INT(wrong, 0);
}

static void joined(member *k)
{
    upipe_nccl second;
    upipe_ctx other = k->ctx;
    upipe_err err;
    ncclComm_t host = host_comm(k, more);
    cudaStream_t stream;
    CHECK_STATUS(upipe_nccl_init(&second, host, 20, &err), UPIPE_OK, err);
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    other.stream = stream;
    other.team = &second.comm;
    check_pair(k, &second, &other);
    host = second.nccl;
    (void)upipe_nccl_free(&second, &err);
    if (host != NULL) CHECK(ncclCommAbort(host) == ncclSuccess);
    OK(cudaStreamDestroy(stream));
    k->ctx.team = &end_of(k)->team.comm; /* a failure may have left the other one there */
}

static void test_init(void)
{
    upipe_nccl team;
    upipe_err e;
    ncclComm_t nccl;
    int other = 1;
    CHECK_STATUS(upipe_nccl_init(&team, NULL, 0, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_nccl_free(&team, &e), UPIPE_OK, e);
    CHECK(ncclCommInitAll(&nccl, 1, &other) == ncclSuccess);
    OK(cudaSetDevice(0));
    CHECK_STATUS(upipe_nccl_init(&team, nccl, -1, &e), UPIPE_ERR_ARG, e);
    CHECK_REFUSED(upipe_nccl_init(&team, nccl, 0, &e), UPIPE_ERR_ARG, e, "device 1, and device 0 is current");
    OK(cudaSetDevice(1));
    CHECK_STATUS(upipe_nccl_init(&team, nccl, 0, &e), UPIPE_OK, e);
    CHECK(team.comm.deadline == UPIPE_DEADLINE_DEFAULT);
    CHECK_STATUS(upipe_nccl_free(&team, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_nccl_free(&team, &e), UPIPE_OK, e);
    CHECK(ncclCommDestroy(nccl) == ncclSuccess);
    OK(cudaSetDevice(0));
    CHECK(fake_check_clean());
}

static void check_says(const char *path, const char *want)
{
    static char text[1 << 16];
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    if (file == NULL) return;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    CHECK_SAY(strstr(text, want) != NULL, "%s does not say \"%s\"", path, want);
}

/* What init allocates, and the pages that say so: the header, then transports.md. */
static void test_bytes(int pages, char **page)
{
    enum { RANKS = 3 };
    const size_t row = UPI_NCCL_ROW * sizeof(int64_t);
    const size_t ordinary = 2 * sizeof(upipe_msg) + UPIPE_ALL_GATHER_MAX * sizeof(int64_t);
    char says[4][100];
    upipe_nccl team[RANKS];
    ncclComm_t nccl[RANKS];
    upipe_err e;
    CHECK(ncclCommInitAll(nccl, RANKS, NULL) == ncclSuccess);
    for (int r = 0; r < RANKS; ++r) {
        const size_t device = fake_device_live(), pinned = fake_pinned_live();
        const long events = fake_live_handles();
        OK(cudaSetDevice(r));
        CHECK_STATUS(upipe_nccl_init(&team[r], nccl[r], 0, &e), UPIPE_OK, e);
        CHECK_INT(fake_device_live() - device, row * (1 + RANKS));
        CHECK_INT(fake_pinned_live() - pinned, row * (1 + RANKS));
        CHECK_INT(fake_live_handles() - events, 2 * UPIPE_NCCL_AHEAD);
    }
    for (int r = 0; r < RANKS; ++r) {
        OK(cudaSetDevice(r));
        CHECK_STATUS(upipe_nccl_free(&team[r], &e), UPIPE_OK, e);
        CHECK(ncclCommDestroy(nccl[r]) == ncclSuccess);
    }
    OK(cudaSetDevice(0));
    CHECK(fake_check_clean());
    (void)snprintf(says[0], sizeof says[0], "of %zu bytes a rank through memory", row);
    (void)snprintf(says[1], sizeof says[1], "%zu * (1 + ranks) on the device and as many pinned, %zu * ranks",
                   row, ordinary);
    (void)snprintf(says[2], sizeof says[2], "%zu * (1 + ranks) bytes of device memory", row);
    (void)snprintf(says[3], sizeof says[3], "pinned memory, and %d events", 2 * UPIPE_NCCL_AHEAD);
    for (int i = 0; i < 4 && pages == 2; ++i) check_says(page[i / 2], says[i]);
}

/* Which lists are one ncclAlltoAll: a mistake there would go unseen where a group does the same. */
static void test_all_to_all_list(void)
{
    static char from[1000], to[1000];
    upipe_msg list[3];
    size_t bytes;
    upipe_nccl team = {.comm.ranks = 3};
    for (int what = 0; what < 12; ++what) {
        upipe_msg *s = &list[1];
        memset(list, 0, sizeof list);
        for (int p = 0; p < 3; ++p) {
            list[p].peer = p;
            list[p].count = what == 1 ? 1 : 4;
            list[p].send = from + p * list[p].count * 8;
            list[p].recv = to + p * list[p].count * 8;
            list[p].send_bytes = list[p].recv_bytes = 8;
            list[p].send_stride = list[p].recv_stride = what == 1 ? 0 : 8; /* of one block: no matter */
        }
        bytes = 0;
        if (what == 2) s->send_stride = 9;
        if (what == 3) s->recv_stride = 9;
        if (what == 4) s->send = from + 33;
        if (what == 5) s->recv = to + 33;
        if (what == 6) s->count = 3;
        if (what == 7) s->send_bytes = 7;
        if (what == 8) s->recv_bytes = 7;
        if (what == 9) s->peer = 2;
        if (what == 10) list[0].send_bytes = 0;
        team.grouped = what == 11;
        CHECK_SAY(upi_nccl_is_all_to_all(&team, list, 3, &bytes) == (what < 2), "list %d", what);
        if (what < 2) CHECK_INT(bytes, what == 1 ? 8 : 32);
        CHECK(!upi_nccl_is_all_to_all(&team, list, 2, &bytes));
    }
}

/* A communicator whose other rank never comes. */
static void test_alone(void)
{
    upipe_nccl team;
    upipe_err e;
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t nccl;
    config.blocking = 0;
    OK(cudaSetDevice(0));
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    CHECK(ncclCommInitRankConfig(&nccl, 2, id, 0, &config) == ncclInProgress);
    CHECK_REFUSED(upipe_nccl_init(&team, nccl, 0.1, &e), UPIPE_ERR_TIMEOUT, e, "0.1 s");
    CHECK(ncclCommAbort(nccl) == ncclSuccess);
    CHECK(fake_check_clean());
}

static void test_ahead(void)
{
    TEST_OF("full", run_ranks(&over_nccl, full, 3, 20, -1, 0));
    for (int i = 0; i < JOINED; ++i) {
        fake_one_at_a_time(i == SERIALISED);
        TEST_OF("joined", run_ranks(&over_nccl, joined, 3, 20, 1, i));
        fake_one_at_a_time(0);
    }
    if (!ahead) return;
    TEST_OF("runs_ahead", run_ranks(&over_nccl, runs_ahead, 3, 20, -1, 0));
    TEST_OF("own_work", run_ranks(&over_nccl, own_work, 3, 20, -1, 0));
    for (int i = 0; i < BY_WAYS; ++i) TEST_OF("never", run_ranks(&over_nccl, never, 3, 20, i % 3, i));
    TEST_OF("behind", run_ranks(&over_nccl, behind, 3, 20, -1, 0));
}

/* Equal slices are one gather of NCCL's for each call and rank, others none. */
static void test_gathers(int ranks)
{
    (void)fake_gather_calls();
    run_ranks(&over_nccl, slices, ranks, 20, -1, 0);
    CHECK_INT(fake_gather_calls(), 2 * ranks);
    if (ranks > 1) run_ranks(&over_nccl, slices, ranks, 20, -1, 1);
    CHECK_INT(fake_gather_calls(), 0);
}

int main(int argc, char **argv)
{
    TEST(test_bytes(argc - 1, argv + 1));
    TEST(test_all_to_all_list());
    for (int seed = 0; seed < 4; ++seed) {
        fake_seed((uint64_t)seed);
        fake_eager(seed == 3);
        blocking = seed & 1;
        ahead = seed != 1;
        grouped = seed == 2;
        over_nccl.seed = (uint64_t)seed;
        TEST(test_init());
        TEST(test_alone());
        conform(&over_nccl, 1);
        for (int i = 0; i < 4; ++i) TEST(test_gathers(teams[i]));
        for (int i = 0; i < 3 * ODD; ++i)
            TEST_OF("odd_alone", run_ranks(&over_nccl, odd_alone, 3, 20, i % 3, i / 3));
        TEST(test_injected(FAKE_ONCE, 20));
        TEST(test_injected(FAKE_STICKY, 20));
        TEST(test_ahead());
    }
    return test_end("nccl");
}
