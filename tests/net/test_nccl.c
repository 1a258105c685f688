/* test_nccl.c -- the transport over NCCL: ranks that are threads, each with a device and a stream of its own
 *
 * Runs on tests/fake, whose streams are lazy and whose communicators fail when told to. Exact data: every
 * element names where it comes from and where it must land. Faults: a rank stays away, aborts or disagrees,
 * and each call to NCCL and CUDA fails in turn, once or for good. Every rank must get a status in time, and
 * nothing may be left behind.
 */
#define _POSIX_C_SOURCE 200809L
#include "fake/fake_pool.h"

#include "upipe/net/upipe_net_nccl.h"
#include "upipe/cuda/upipe_cuda_device.h"
#include "upipe/upipe_comm.h"

#include "ranks.h"

/* One block, three times: no rows of a matrix. */
static upipe_status repeat_body(rank_buf *k)
{
    uint32_t host[3 * WORDS];
    upipe_ctx *c = &k->ctx;
    int next = (k->rank + 1) % k->ranks, back = (k->rank + k->ranks - 1) % k->ranks, i, wrong = 0;
    for (i = 0; i < WORDS; ++i) host[i] = word_of(k->rank, next, i);
    put(k, k->send, host, WORDS * 4);
    memset(k->list, 0, sizeof k->list);
    k->list[0].peer = next;
    k->list[0].send = k->send;
    k->list[0].send_bytes = WORDS * 4;
    k->list[1].peer = back;
    k->list[1].recv = k->recv;
    k->list[1].recv_bytes = k->list[1].recv_stride = WORDS * 4;
    k->list[0].count = k->list[1].count = 3;
    UPIPE_TRY(upipe_comm_start(c, c->team, k->list, 2));
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    get(k, host, k->recv, sizeof host);
    for (i = 0; i < 3 * WORDS; ++i) wrong += host[i] != word_of(back, k->rank, i % WORDS);
    CHECK_INT(wrong, 0);
    return UPIPE_OK;
}

/* Slices of `n` words, gathered in place and from elsewhere. */
static upipe_status slices(rank_buf *k, int n)
{
    uint32_t host[RANKS_MAX * WORDS];
    upipe_ctx *c = &k->ctx;
    const int64_t before = c->team->sent_bytes, moved = c->team->moved_bytes;
    const size_t bytes = (size_t)n * 4;
    int64_t first, mine = upipe_reduce_slice(n, k->rank, k->ranks, &first);
    for (int apart = 0; apart < 2; ++apart) {
        uint32_t *own = apart ? k->send : k->recv + first;
        int wrong = 0;
        memset(host, 0xee, bytes);
        put(k, k->recv, host, bytes);
        for (int i = 0; i < mine; ++i) host[i] = word_of(k->rank, apart, i);
        put(k, own, host, (size_t)mine * 4);
        UPIPE_TRY(upi_slices_gather(c, c->team, k->recv, own, n, 4));
        UPIPE_TRY(upi_comm_settle(c));
        get(k, host, k->recv, bytes);
        for (int r = 0; r < k->ranks; ++r) {
            const int64_t theirs = upipe_reduce_slice(n, r, k->ranks, &first);
            for (int i = 0; i < theirs; ++i) wrong += host[first + i] != word_of(r, apart, i);
        }
        CHECK_INT(wrong, 0);
    }
    CHECK_INT(c->team->sent_bytes - before, 2 * (k->ranks - 1) * mine * 4);
    CHECK_INT(c->team->moved_bytes - moved, 2 * (n - mine) * 4);
    return UPIPE_OK;
}

static upipe_status slices_body(rank_buf *k)
{
    return slices(k, k->ranks * WORDS);
}

static upipe_status odd_slices_body(rank_buf *k)
{
    return slices(k, k->ranks * WORDS - 1);
}

/* ---- faults ---- */

static upipe_status absent_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_status s;
    UPIPE_TRY(all_to_all(k, 1));
    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    c->team->deadline = 0.2;
    if (k->rank == k->crew->victim) {
        test_nap(0.5);
        c->team->deadline = 10;
        s = call(k, k->crew->what); /* all others have gone */
        CHECK_REFUSED(s, UPIPE_ERR_ABORTED, c->err, "has aborted");
    } else {
        s = call(k, k->crew->what);
        /* one is first, and the others may learn of it before their own deadline */
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        if (s == UPIPE_ERR_TIMEOUT) CHECK_TEXT(c->err.text, "waited 0.2 s in ");
        /* one that comes when another has given up already has nothing in flight */
        if (s == UPIPE_ERR_TIMEOUT) CHECK_INT(c->team->quarantine, k->crew->what == AT_TRANSFER);
    }
    check_dead(k);
    return s;
}

enum { UP_FRONT, BETWEEN, ABORTS };

static upipe_status abort_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_status s;
    UPIPE_TRY(all_to_all(k, 1));
    if (k->rank == k->crew->victim) {
        if (k->crew->what == BETWEEN)
            CHECK_STATUS(upipe_comm_start(c, c->team, k->list, k->ranks), UPIPE_OK, c->err);
        upipe_comm_abort(c->team, "the host has had enough");
        upipe_comm_abort(c->team, "and says it again");
        s = k->crew->what == BETWEEN ? upipe_comm_wait(c, c->team) : upipe_comm_barrier(c, c->team);
        CHECK_REFUSED(s, UPIPE_ERR_ABORTED, c->err, "had enough");
        /* BETWEEN: unless the transfer has ended meanwhile */
        if (k->crew->what != BETWEEN) CHECK_INT(c->team->quarantine, 0);
    } else {
        s = all_to_all(k, 1);
        if (s == UPIPE_OK && k->crew->what == BETWEEN) s = all_to_all(k, 1); /* its part was under way */
        CHECK_REFUSED(s, UPIPE_ERR_ABORTED, c->err, "has aborted");
    }
    check_dead(k);
    return s;
}

enum { KIND, COUNT, DRIFT, FIELD, ITSELF, MISMATCHES };

static upipe_status mismatch_body(rank_buf *k)
{
    static const char *const words[] = {"in a", "gathers 2", "is in its", "heads is", "does not receive"};
    upipe_ctx *c = &k->ctx;
    int64_t mine[2] = {1, 2}, all[2 * RANKS_MAX];
    int odd = k->rank == k->crew->victim, what = k->crew->what;
    const upi_fields fields = fields_of("heads", 32 + odd);
    upipe_msg own;
    upipe_status s;
    UPIPE_TRY(all_to_all(k, 1));
    own = (upipe_msg){
        .peer = k->rank, .count = 1, .send = k->send, .recv = k->recv, .send_bytes = 4, .recv_bytes = 8};
    if (what == DRIFT && odd) { /* one transfer with nobody too many */
        UPIPE_TRY(upipe_comm_start(c, c->team, k->list, 0));
        UPIPE_TRY(upipe_comm_wait(c, c->team));
    }
    if (what == ITSELF) {
        if (odd) {
            s = upipe_comm_start(c, c->team, &own, 1);
        } else { /* hears of it */
            s = upipe_comm_barrier(c, c->team);
            CHECK_STATUS(s, UPIPE_ERR_ABORTED, c->err);
            check_dead(k);
            return s;
        }
    } else if (what == KIND && odd) {
        s = upipe_comm_barrier(c, c->team);
    } else if (what == FIELD) {
        s = upi_agree(c, c->team, &fields);
    } else {
        s = upipe_comm_all_gather(c, c->team, all, mine, what == COUNT && odd ? 2 : 1);
    }
    CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c->err, words[what]);
    check_dead(k);
    return s;
}

/* ---- in the stream's order ---- */

/* No host waits for a device: all of it runs behind streams that do not go on yet. */
static upipe_status ahead_body(rank_buf *k)
{
    uint32_t host[WORDS];
    upipe_ctx *c = &k->ctx;
    ncclComm_t two[2];
    int wrong = 0;
    UPIPE_TRY(all_to_all(k, 1));
    for (int w = 0; w < WORDS; ++w) host[w] = word_of(k->rank, 0, w);
    put(k, k->recv, host, sizeof host);
    stall(k, two);
    (void)fake_waits(k->rank);
    for (int i = 0; i < 2 * k->ranks - 1; ++i) { /* round the team, through both halves of the slab */
        uint32_t *from = i % 2 == 0 ? k->recv : k->send, *to = i % 2 == 0 ? k->send : k->recv;
        UPIPE_TRY(shift_start(c, c->team, to, from, sizeof host, 1));
        UPIPE_TRY(upipe_comm_wait(c, c->team));
        OK(cudaMemsetAsync(from, 0xdd, sizeof host, k->stream)); /* freed, and used for something else */
    }
    CHECK_INT(fake_waits(k->rank), 0);
    CHECK(cudaStreamQuery(k->stream) == cudaErrorNotReady);
    stall_end(two);
    UPIPE_TRY(c->ops->sync(c));
    get(k, host, k->send, sizeof host);
    for (int w = 0; w < WORDS; ++w) wrong += host[w] != word_of((k->rank + 1) % k->ranks, 0, w);
    CHECK_INT(wrong, 0);
    return UPIPE_OK;
}

/* What is a rank's own: what its stream has before a transfer, which the deadline does not count, and a sync. */
static upipe_status own_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    ncclComm_t two[2];
    c->team->deadline = 0.02;
    stall(k, two);
    for (int i = 0; i < 3; ++i) { /* each call looks at the stream */
        UPIPE_TRY(shift_start(c, c->team, k->recv, k->send, 64, 1));
        UPIPE_TRY(upipe_comm_wait(c, c->team));
        test_nap(0.03);
    }
    c->team->deadline = 20;
    stall_end(two);
    if (k->rank == 0) UPIPE_TRY(upipe_nccl_sync(c, &k->team));
    return upipe_comm_barrier(c, c->team);
}

/* More than fit: the host waits for the oldest, whose peers are there. */
static upipe_status full_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    int64_t left;
    for (int i = 0; i < 3 * UPIPE_NCCL_AHEAD; ++i) {
        UPIPE_TRY(shift_start(c, c->team, k->recv, k->send, 64, 1));
        UPIPE_TRY(upipe_comm_wait(c, c->team));
        CHECK(k->team.begun - k->team.ended <= UPIPE_NCCL_AHEAD);
    }
    /* one that NCCL has not enqueued yet is in flight, although its event was passed by an earlier one */
    UPIPE_TRY(upi_nccl_drain(c, &k->team, 0));
    UPIPE_TRY(upi_nccl_begin(c, &k->team, UPI_TEAM_TRANSFER));
    UPIPE_TRY(upi_nccl_open(c, &k->team));
    for (int i = 0; i < 20; ++i) {
        UPIPE_TRY(upi_nccl_look(c, &k->team, &left));
        CHECK_INT(left, 1);
    }
    UPIPE_TRY(upi_nccl_close(c, &k->team));
    return upi_nccl_drain(c, &k->team, 0);
}

enum { BY_CALLS, BY_SYNC, BY_NCCL_SYNC, BY_GATHER, BY_FREE, BY_WAYS };

/* A rank never comes. The others' hosts have run ahead, and freed the buffers: they learn of it in time by whatever
 * they do next, and their pools give out nothing of what the rank may still access. */
static upipe_status never_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    int what = k->crew->what, i;
    upipe_mem_block blocks[4];
    upipe_mem mem;
    void *from, *to, *again;
    upipe_status s = UPIPE_OK;
    double began;
    UPIPE_TRY(all_to_all(k, 1));
    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    if (k->rank == k->crew->victim) {
        test_nap(0.6);
        return UPIPE_ERR_ABORTED;
    }
    c->team->deadline = 0.2;
    upipe_mem_init(&mem, k->slab, SLAB, blocks, 4);
    c->mem = &mem;
    UPIPE_TRY(upipe_alloc(c, &from, 64, UPIPE_USE_OTHER, "from"));
    UPIPE_TRY(upipe_alloc(c, &to, 64, UPIPE_USE_OTHER, "to"));
    UPIPE_TRY(shift_start(c, c->team, to, from, 64, 1));
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    UPIPE_TRY(upipe_free(c, from));
    UPIPE_TRY(upipe_free(c, to));
    began = test_seconds();
    if (what == BY_FREE) {
        s = upipe_nccl_free(&k->team, &c->err);
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        CHECK(k->team.nccl == NULL && test_seconds() - began < 3);
        CHECK_INT(k->team.comm.quarantine, 1); /* the host's pool has what the transfer was for */
        upipe_mem_destroy(&mem, NULL);
        return s;
    }
    for (i = 0; what == BY_CALLS && s == UPIPE_OK && test_seconds() - began < 5; ++i) {
        s = upipe_comm_start(c, c->team, k->list, 0);
        if (s == UPIPE_OK) s = upipe_comm_wait(c, c->team);
        test_nap(0.005);
    }
    if (what == BY_SYNC) s = c->ops->sync(c);
    if (what == BY_NCCL_SYNC) s = upipe_nccl_sync(c, &k->team);
    if (what == BY_GATHER) s = call(k, AT_GATHER);
    CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
    CHECK(test_seconds() - began < 3); /* of 20, were it not this team's deadline */
    CHECK_INT(c->team->quarantine, 1);
    CHECK(upi_unwind(c, s, 0, NULL) == s); /* the stream goes on: it does not hang here */
    CHECK_STATUS(upipe_alloc(c, &again, 64, UPIPE_USE_OTHER, "again"), UPIPE_ERR_ARG, c->err);
    CHECK_STATUS(upipe_mem_destroy(&mem, &c->err), UPIPE_OK, c->err);
    check_dead(k);
    return s;
}

/* What the team knows nothing of, a graph's transfers or another communicator's, is in its way. */
static upipe_status behind_body(rank_buf *k)
{
    upipe_ctx *c = &k->ctx;
    ncclComm_t two[2];
    upipe_status s;
    double began;
    UPIPE_TRY(all_to_all(k, 1));
    c->team->deadline = 0.2;
    stall(k, two);
    UPIPE_TRY(shift_start(c, c->team, k->recv, k->send, 64, 1));
    CHECK_STATUS(upipe_nccl_sync(c, &k->team), UPIPE_ERR_ARG, c->err); /* in progress */
    UPIPE_TRY(upipe_comm_wait(c, c->team));
    began = test_seconds();
    s = upipe_nccl_sync(c, &k->team);
    CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
    CHECK(test_seconds() - began < 3);
    stall_end(two);
    check_dead(k);
    return s;
}

/* ---- two communicators of one rank ---- */

enum { SERIALISED, DISORDER, OTHER_GONE, JOINED };

upipe_status app_ops(upipe_ops *ops, upipe_cuda *device, upipe_err *e); /* ../cuda/table.cpp */

/* The team has failed, and with it a transfer into k->recv: the host gets no number of it, and waits for its device
 * as before. */
static void check_no_result(rank_buf *k)
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
 * comes to the second one, and the first one fails with it. */
static upipe_status pair_body(rank_buf *k, upipe_nccl *second, upipe_ctx *other)
{
    upipe_ctx *c = &k->ctx;
    int odd = k->rank == k->crew->victim, what = k->crew->what, i, w, wrong = 0;
    uint32_t host[2 * WORDS];
    upipe_status s = UPIPE_OK;
    CHECK_STATUS(upipe_nccl_join(&k->team, second, &c->err), UPIPE_OK, c->err);
    CHECK_STATUS(upipe_nccl_join(second, &k->team, &c->err), UPIPE_ERR_ARG, c->err);
    c->team->deadline = other->team->deadline = what == SERIALISED ? 20 : 0.2;
    for (i = 0; i < 6 && s == UPIPE_OK && !(what == OTHER_GONE && odd); ++i) {
        int turn = what == SERIALISED ? i % 2 : odd ? (i + 1) % 2 : i % 2, next = (k->rank + 1) % k->ranks;
        upipe_ctx *at = turn ? other : c;
        for (w = 0; w < WORDS; ++w) host[w] = word_of(k->rank, next, w + i);
        OK(cudaMemcpyAsync(k->send + 64 * turn, host, WORDS * 4, cudaMemcpyHostToDevice,
                           (cudaStream_t)at->stream));
        s = shift_start(at, at->team, k->recv + 64 * turn, k->send + 64 * turn, WORDS * 4, 1);
        if (s == UPIPE_OK) s = upipe_comm_wait(at, at->team);
        if (s != UPIPE_OK) *c = *at;
    }
    if (s == UPIPE_OK && what == OTHER_GONE && odd) test_nap(0.6), s = UPIPE_ERR_ABORTED;
    if (s == UPIPE_OK) s = c->ops->sync(c); /* of one stream: and all transfers have ended */
    if (what != SERIALISED) {
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        if (what == OTHER_GONE && odd) return s;
        CHECK(k->team.nccl == NULL && second->nccl == NULL);
        check_no_result(k);
        return s;
    }
    UPIPE_TRY(s);
    OK(cudaMemcpy(host, k->recv, WORDS * 4, cudaMemcpyDeviceToHost));
    OK(cudaMemcpy(host + WORDS, k->recv + 64, WORDS * 4, cudaMemcpyDeviceToHost));
    for (w = 0; w < 2 * WORDS; ++w)
        wrong += host[w] != word_of((k->rank + k->ranks - 1) % k->ranks, k->rank, w % WORDS + 4 + w / WORDS);
    CHECK_INT(wrong, 0);
    return UPIPE_OK;
}

static upipe_status joined_body(rank_buf *k)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    upipe_nccl second;
    upipe_ctx other = k->ctx;
    upipe_err err;
    ncclComm_t nccl;
    cudaStream_t stream;
    ncclResult_t r;
    upipe_status s;
    config.blocking = k->crew->blocking;
    r = ncclCommInitRankConfig(&nccl, k->ranks, k->crew->more, k->rank, &config);
    CHECK(r == ncclSuccess || r == ncclInProgress);
    CHECK_STATUS(upipe_nccl_init(&second, nccl, 20, &err), UPIPE_OK, err);
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    other.stream = stream;
    other.team = &second.comm;
    s = pair_body(k, &second, &other);
    nccl = second.nccl;
    (void)upipe_nccl_free(&second, &err);
    if (nccl != NULL) CHECK(ncclCommAbort(nccl) == ncclSuccess);
    OK(cudaStreamDestroy(stream));
    return s;
}

static void test_ahead(crew *all)
{
    crew_good(all, 3, full_body);
    if (all->ahead) crew_good(all, 3, ahead_body);
    if (all->ahead) crew_good(all, 3, own_body);
    if (all->ahead) crew_fails(all, never_body, 1, BY_WAYS);
    if (all->ahead) crew_run(all, 3, 20, behind_body, 0, -1, FAKE_ONCE);
    for (int i = 0; i < JOINED; ++i) {
        all->victim = 1;
        all->what = i;
        fake_one_at_a_time(i == SERIALISED);
        if (i == SERIALISED)
            crew_good(all, 3, joined_body);
        else
            crew_run(all, 3, 20, joined_body, 0, -1, FAKE_ONCE);
        fake_one_at_a_time(0);
    }
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
    enum { TEAM = 3 };
    const size_t row = UPI_NCCL_ROW * sizeof(int64_t);
    const size_t ordinary = 2 * sizeof(upipe_msg) + UPIPE_ALL_GATHER_MAX * sizeof(int64_t);
    char says[4][100];
    upipe_nccl team[TEAM];
    ncclComm_t nccl[TEAM];
    upipe_err e;
    CHECK(ncclCommInitAll(nccl, TEAM, NULL) == ncclSuccess);
    for (int r = 0; r < TEAM; ++r) {
        const size_t device = fake_device_live(), pinned = fake_pinned_live();
        const long events = fake_live_handles();
        OK(cudaSetDevice(r));
        CHECK_STATUS(upipe_nccl_init(&team[r], nccl[r], 0, &e), UPIPE_OK, e);
        CHECK_INT(fake_device_live() - device, row * (1 + TEAM));
        CHECK_INT(fake_pinned_live() - pinned, row * (1 + TEAM));
        CHECK_INT(fake_live_handles() - events, 2 * UPIPE_NCCL_AHEAD);
    }
    for (int r = 0; r < TEAM; ++r) {
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

static void test_team(crew *all)
{
    static const int teams[] = {1, 2, 3, 8};
    for (int i = 0; i < 4; ++i) {
        crew_good(all, teams[i], all_body);
        crew_good(all, teams[i], shift_body);
        crew_good(all, teams[i], meet_body);
        crew_good(all, teams[i], random_body);
        crew_good(all, teams[i], repeat_body);
        (void)fake_gather_calls();
        crew_good(all, teams[i], slices_body);
        CHECK_INT(fake_gather_calls(), 2 * teams[i]); /* one for each gather and rank */
        if (teams[i] > 1) crew_good(all, teams[i], odd_slices_body);
        CHECK_INT(fake_gather_calls(), 0);
    }
    crew_fails(all, absent_body, 1, AT_COUNT);
    crew_fails(all, abort_body, 3, ABORTS);
    crew_fails(all, mismatch_body, 3, MISMATCHES);
    test_injected(all, FAKE_ONCE, 20);
    test_injected(all, FAKE_STICKY, 20);
}

int main(int argc, char **argv)
{
    crew *all = &the_crew;
    TEST(test_bytes(argc - 1, argv + 1));
    TEST(test_all_to_all_list());
    for (int seed = 0; seed < 4; ++seed) {
        fake_seed((uint64_t)seed);
        fake_eager(seed == 3);
        all->blocking = seed & 1;
        all->ahead = seed != 1;
        all->grouped = seed == 2;
        all->seed = (uint64_t)test_env("UPIPE_SEED", 1) + (uint64_t)seed;
        TEST(test_init());
        TEST(test_alone());
        TEST(test_team(all));
        TEST(test_ahead(all));
    }
    return test_end("nccl");
}
