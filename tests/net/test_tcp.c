/* test_tcp.c -- the transport over connected sockets: the properties of conformance.h, and what sockets alone have
 *
 * Ranks are threads, each with its own sockets, or processes where they die. Sockets of one machine hold little data
 * here, so that transfers meet full ones.
 */
#define _POSIX_C_SOURCE 200809L
#define _XOPEN_SOURCE   700
#include "upipe/net/upipe_net_header.h"

#include <stdlib.h>

/* The transport's own allocations, counted: nothing of a team may be left. */
static int allocated;

#define calloc(n, bytes) (__atomic_add_fetch(&allocated, 1, __ATOMIC_RELAXED), calloc(n, bytes))
#define free(p)          (__atomic_sub_fetch(&allocated, 1, __ATOMIC_RELAXED), free(p))
#include "upipe/net/upipe_net_tcp.h"
#undef calloc
#undef free

#include <sys/wait.h>

#include "same_block.h"

/* ---- sockets ---- */

enum { TCP_RANKS = 8, SMALL = 4096 };

typedef struct mesh {
    int fds[TCP_RANKS][2][TCP_RANKS]; /* of rank, for headers and for data, to rank */
} mesh;

/* Two ends of a TCP connection, or of a socket of one machine. */
static void connect_two(int inet, int fds[2])
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t size = sizeof at;
    int listening;
    if (!inet) {
        CHECK_INT(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
        return;
    }
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listening = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_INT(bind(listening, (struct sockaddr *)&at, size), 0);
    CHECK_INT(listen(listening, 1), 0);
    CHECK_INT(getsockname(listening, (struct sockaddr *)&at, &size), 0);
    fds[0] = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_INT(connect(fds[0], (struct sockaddr *)&at, size), 0);
    fds[1] = accept(listening, NULL, NULL);
    CHECK(fds[1] >= 0);
    close(listening);
}

static void mesh_open(mesh *m, int ranks, int inet)
{
    memset(m, 0xff, sizeof *m);
    for (int r = 0; r < ranks; ++r)
        for (int p = r + 1; p < ranks; ++p)
            for (int which = 0; which < 2; ++which) {
                int two[2], small = SMALL;
                connect_two(inet, two);
                for (int end = 0; which == 1 && !inet && end < 2; ++end) { /* TCP would creep */
                    setsockopt(two[end], SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
                    setsockopt(two[end], SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
                }
                m->fds[r][which][p] = two[0];
                m->fds[p][which][r] = two[1];
            }
}

static void mesh_close_rank(mesh *m, int rank)
{
    for (int which = 0; which < 2; ++which)
        for (int p = 0; p < TCP_RANKS; ++p)
            if (m->fds[rank][which][p] >= 0) close(m->fds[rank][which][p]);
    memset(m->fds[rank], 0xff, sizeof m->fds[rank]);
}

static void mesh_close(mesh *m)
{
    for (int r = 0; r < TCP_RANKS; ++r) mesh_close_rank(m, r);
}

/* ---- the row ---- */

typedef struct tcp_crew {
    mesh mesh;
    upipe_tcp ends[TCP_RANKS];
} tcp_crew;

static int inet; /* the sockets are TCP's */

static tcp_crew *crew_of(const member *k)
{
    return (tcp_crew *)k->all->own;
}

static upipe_tcp *end_of(const member *k)
{
    return &crew_of(k)->ends[k->rank];
}

static void tcp_open(crew *all)
{
    tcp_crew *own = (tcp_crew *)zeroed(sizeof *own);
    all->own = own;
    mesh_open(&own->mesh, all->ranks, inet);
}

static upipe_status tcp_join(member *k)
{
    int(*fds)[TCP_RANKS] = crew_of(k)->mesh.fds[k->rank];
    k->ctx.team = &end_of(k)->comm;
    return upipe_tcp_init(end_of(k), fds[0], fds[1], k->rank, k->ranks, k->all->deadline, &k->ctx.err);
}

static upipe_status tcp_leave(member *k)
{
    upipe_status s;
    CHECK_INT(k->ctx.team->quarantine, 0);
    s = upipe_tcp_free(end_of(k), &k->ctx.err);
    CHECK_STATUS(upipe_tcp_free(end_of(k), NULL), UPIPE_OK, k->ctx.err);
    return s;
}

static void tcp_close(crew *all)
{
    mesh_close(&((tcp_crew *)all->own)->mesh);
}

static void tcp_clean(void)
{
    CHECK_INT(allocated, 0);
}

static const int teams[] = {1, 2, 5, 0}, crews[] = {3, 0};

static transport tcp = {
    .name = "tcp",
    .can = NAMES_RANKS | TELLS_WHY | COMPARES_LISTS | USES_TABLE | ANY_THREAD | FREES_TOGETHER | SEES_DEATH |
           PARTS_FAIL,
    .teams = teams,
    .crews = crews,
    .victims = 1,
    .most = 10,
    .longest = 3000,
    .rounds = 18,
    .draws_a_round = 1000,
    .large = 50000,
    .late = 1 << 16,
    .open = tcp_open,
    .join = tcp_join,
    .leave = tcp_leave,
    .close = tcp_close,
    .clean = tcp_clean,
    .each = each_thread,
    .sum = threads_sum,
};

/* ---- calls that signals interrupt ---- */

static int interrupts;

static void on_alarm(int signal)
{
    (void)signal;
    __atomic_add_fetch(&interrupts, 1, __ATOMIC_RELAXED);
}

static void interrupt_every(int microseconds)
{
    struct sigaction act = {.sa_handler = on_alarm}; /* no SA_RESTART */
    struct itimerval t = {{0, microseconds}, {0, microseconds}};
    sigaction(SIGALRM, &act, NULL);
    setitimer(ITIMER_REAL, &t, NULL);
}

/* Only threads of ranks take the signal: the main thread, which would be the first to get it, does not. */
static void interrupted(member *k)
{
    sigset_t alarm;
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    if (k->rank == 0) interrupt_every(500);
    pthread_sigmask(SIG_UNBLOCK, &alarm, NULL);
    large(k);
    meet(k);
    if (k->rank == 0) interrupt_every(0);
    CHECK(k->rank > 0 || __atomic_load_n(&interrupts, __ATOMIC_RELAXED) > 0);
}

static void test_interrupted(void)
{
    sigset_t alarm;
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarm, NULL);
    interrupts = 0;
    run_ranks(&tcp, interrupted, 4, 30, -1, 0);
    pthread_sigmask(SIG_UNBLOCK, &alarm, NULL);
}

/* ---- who waits for whom ---- */

static int told; /* atomic: a rank has come so far */

/* Rank 0 is lost to rank 1, and still reaches rank 2, which then waits for rank 1 in the next call, and not as long. All
 * name rank 0. */
static void chain(member *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_tcp *t = end_of(k);
    line_up(k, k->rank == 2 ? 0.28 : 0.3);
    for (int i = 1; k->rank == 0 && i <= 2; ++i) {
        while (i == 2 && !__atomic_load_n(&told, __ATOMIC_ACQUIRE)) test_nap(0.001);
        upi_header_fill(t->out, k->ranks, t->call + i, UPI_TEAM_BARRIER, NULL, NULL, 0);
        CHECK_INT(upi_tcp_send_header(t, 2, &t->out[2]), 0);
    }
    if (k->rank == 2) CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_OK, c->err);
    if (k->rank == 2) __atomic_store_n(&told, 1, __ATOMIC_RELEASE); /* a peer is a call ahead at most */
    if (k->rank > 0) {
        const upipe_status s = upipe_comm_barrier(c, c->team);
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        CHECK_TEXT(c->err.text, "for rank 0 to come");
        check_dead(k);
    }
    meet(k);
}

/* Rank 1 has once said that it waits for rank 2. It does not any more when rank 0 alone is in the next call. */
static void old_answer(member *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_tcp *t = end_of(k);
    int news = 0;
    line_up(k, 20);
    if (k->rank == 0) {
        const int64_t question = upi_tcp_ask(t);
        while (t->watch.answers[1].call != question && upi_tcp_hear(c, t, &news) == UPIPE_OK) test_nap(0.001);
        CHECK_INT(t->watch.answers[1].n, 2);
        __atomic_store_n(&told, 1, __ATOMIC_RELEASE);
    }
    while (k->rank == 2 && !__atomic_load_n(&told, __ATOMIC_ACQUIRE)) test_nap(0.001);
    CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_OK, c->err);
    meet(k);
    c->team->deadline = 0.3;
    if (k->rank > 0) meet(k);
    CHECK_REFUSED(upipe_comm_barrier(c, c->team), k->rank == 0 ? UPIPE_ERR_TIMEOUT : UPIPE_ERR_ABORTED,
                  c->err, "for ranks 1, 2 to come");
    if (k->rank == 0) meet(k);
    check_dead(k);
}

/* ---- ends of connections ---- */

enum { CLOSED, DATA_CLOSED, STRANGER, SKIPS, HALF, DATA_LOST, ENDS };

static void end_sockets(const member *k, int which)
{
    for (int p = 0; p < k->ranks; ++p)
        if (p != k->rank) shutdown(crew_of(k)->mesh.fds[k->rank][which][p], SHUT_RDWR);
}

/* The rest of a team that ends without the others' goodbyes. */
static void leave_within(member *k, double seconds)
{
    upipe_status s;
    k->ctx.team->deadline = seconds;
    s = k->t->leave(k);
    CHECK(s == UPIPE_OK || s == UPIPE_ERR_BACKEND);
    k->left = 1;
}

/* What the victim sends in place of the next header: something else, a header of the call behind that one, half a header. */
static void send_noise(member *k)
{
    upipe_tcp *t = end_of(k);
    char noise[sizeof(upi_header)];
    memset(noise, 0x55, sizeof noise);
    if (k->what == SKIPS) {
        upi_header_fill(t->out, k->ranks, t->call + 2, UPI_TEAM_TRANSFER, NULL, NULL, 0);
        memcpy(noise, t->out, sizeof noise);
    }
    for (int p = 0; p < k->ranks; ++p)
        if (p != k->rank)
            CHECK(send(crew_of(k)->mesh.fds[k->rank][0][p], noise, sizeof noise / (k->what == HALF ? 2 : 1),
                       0) > 0);
}

static void end_victim(member *k, const char *words)
{
    const int data = k->what == DATA_CLOSED || k->what == DATA_LOST;
    upipe_status s;
    if (k->what >= STRANGER && k->what <= HALF) send_noise(k);
    if (k->what != STRANGER && k->what != SKIPS) end_sockets(k, data);
    meet(k);
    if (k->what == DATA_LOST) { /* it lives, and says so */
        s = call(k, AT_TRANSFER);
        CHECK(s == UPIPE_ERR_BACKEND || s == UPIPE_ERR_ABORTED);
        CHECK_TEXT(k->ctx.err.text, words);
    }
    leave_within(k, 0.01);
}

/* The victim frees its team, loses its sockets, or sends something else; half a header is none. */
static void ending(member *k)
{
    static const char *const words[] = {"has ended", "has freed its team", "something else",
                                        "expects ",  "has ended",          "has ended"};
    upipe_ctx *c = &k->ctx;
    double began;
    upipe_status s;
    line_up(k, 20);
    began = test_seconds();
    if (k->rank == k->victim) {
        end_victim(k, words[k->what]);
        return;
    }
    meet(k);
    s = call(k, AT_TRANSFER);
    if (k->what == DATA_CLOSED) /* its goodbye comes, which says it all */
        CHECK_STATUS(s, UPIPE_ERR_MISMATCH, c->err);
    CHECK(s == UPIPE_ERR_MISMATCH || s == UPIPE_ERR_BACKEND || s == UPIPE_ERR_ABORTED);
    CHECK_TEXT(c->err.text, words[k->what]);
    CHECK(test_seconds() - began < 10);
    check_dead(k);
    leave_within(k, 0.2); /* the victim may have left without a goodbye */
}

/* The victim tells rank 1 alone that it fails. Rank 1 frees its team or loses its connections, and rank 2 hears why. */
static void passed_on(member *k)
{
    upipe_ctx *c = &k->ctx;
    upipe_tcp *t = end_of(k);
    upi_header notice;
    line_up(k, 20);
    if (k->rank == k->victim) {
        upi_first_report(&notice, UPIPE_ERR_BACKEND, t->met, "the device is lost");
        CHECK_INT(upi_tcp_send_header(t, 1, &notice), 0);
    }
    if (k->rank == 1) {
        CHECK_REFUSED(upipe_comm_barrier(c, c->team), UPIPE_ERR_ABORTED, c->err, "the device is lost");
        if (k->what == 0) leave_within(k, 0.01);
        if (k->what == 1) end_sockets(k, 0);
    }
    meet(k);
    if (k->rank == 2) CHECK_REFUSED(call(k, AT_TRANSFER), UPIPE_ERR_ABORTED, c->err, "the device is lost");
    meet(k);
    if (!k->left) leave_within(k, 0.2);
}

/* Rank 0 has read an all-gather, and aborts. Rank 1 hears of it before it has all, and reads it all the same. */
static void read_first(member *k)
{
    upipe_tcp *t = end_of(k);
    const int64_t mine = k->rank;
    line_up(k, 20);
    if (k->rank < 2) CHECK_STATUS(call(k, AT_GATHER), UPIPE_OK, k->ctx.err);
    if (k->rank == 0) upipe_comm_abort(k->ctx.team, "these numbers are bad");
    for (int to = 0; k->rank == 2 && to < 2; ++to) {
        upi_header_fill(t->out, k->ranks, t->call + 1, UPI_TEAM_ALL_GATHER, NULL, &mine, 1);
        while (to == 1 && !upi_first_is_broken(&crew_of(k)->ends[1].first)) test_nap(0.001);
        CHECK_INT(upi_tcp_send_header(t, to, &t->out[to]), 0);
    }
    meet(k);
    if (k->rank < 2) check_dead(k);
}

static void test_init(void)
{
    upipe_tcp t;
    upipe_err e;
    int two[2], plain[2], none[2] = {-1, -1}, udp;
    connect_two(0, two);
    udp = socket(AF_INET, SOCK_DGRAM, 0);
    plain[0] = -1, plain[1] = two[0];
    CHECK_STATUS(upipe_tcp_init(&t, plain, plain, 0, 0, 0, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_tcp_init(&t, plain, plain, 2, 2, 0, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_tcp_init(&t, plain, plain, 0, UPIPE_TCP_MAX + 1, 0, &e), UPIPE_ERR_ARG, e);
    CHECK_STATUS(upipe_tcp_init(&t, plain, plain, 0, 2, -1, &e), UPIPE_ERR_ARG, e);
    CHECK_REFUSED(upipe_tcp_init(&t, plain, none, 0, 2, 0, &e), UPIPE_ERR_ARG, e, "no stream socket");
    none[1] = udp;
    CHECK_REFUSED(upipe_tcp_init(&t, plain, none, 0, 2, 0, &e), UPIPE_ERR_ARG, e, "no stream socket");
    close(udp);
    none[1] = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_REFUSED(upipe_tcp_init(&t, plain, none, 0, 2, 0, &e), UPIPE_ERR_ARG, e, "is not connected");
    CHECK_STATUS(upipe_tcp_free(&t, &e), UPIPE_OK, e); /* after a failed init */
    close(none[1]);
    close(two[0]);
    close(two[1]);
}

/* ---- ranks that are processes, and die or stop ---- */

static void test_death(int victim, int what)
{
    enum { RANKS = 4 };
    crew *all = &the_crew;
    pid_t pids[RANKS];
    int status;
    *all = (crew){.t = &tcp, .body = death, .ranks = RANKS, .victim = victim, .what = what, .deadline = 20};
    inet = what % 2;
    crew_open(all);
    fflush(NULL);
    for (int r = 0; r < RANKS; ++r) {
        pids[r] = fork();
        if (pids[r] != 0) continue;
        if (freopen("/dev/null", "w", stdout) == NULL) _exit(9);
        for (int p = 0; p < RANKS; ++p)
            if (p != r) mesh_close_rank(&((tcp_crew *)all->own)->mesh, p);
        member_main(all, r);
        _exit(test_end("a rank"));
    }
    crew_close(all);
    if (what == STOPPED) {
        CHECK_INT(waitpid(pids[victim], &status, WUNTRACED), pids[victim]);
        test_nap(1.5);
        kill(pids[victim], SIGCONT);
    }
    for (int r = 0; r < RANKS; ++r) {
        CHECK_INT(waitpid(pids[r], &status, 0), pids[r]);
        if (r == victim && what != STOPPED)
            CHECK(WIFSIGNALED(status));
        else
            CHECK_SAY(status == 0, "case %d, rank %d without rank %d: status %x", what, r, victim, status);
    }
}

int main(int argc, char **argv)
{
    int i;
    test_begin(argc, argv);
    for (i = 0; i < 2 * DEATHS; ++i) TEST(test_death(i % 4, i % DEATHS)); /* before there are threads */
    TEST(test_death(1, STOPPED));
    TEST(test_init());
    for (inet = 0; inet < 2; ++inet) {
        if (inet) tcp.can |= ENDS_ALONE; /* they hold as much as is sent */
        conform(&tcp, 1);
        TEST(test_interrupted());
        for (i = 0; i < ENDS; ++i) TEST_OF("ending", run_ranks(&tcp, ending, 3, 20, i % 3, i));
        for (i = 0; i < 2; ++i) TEST_OF("passed_on", run_ranks(&tcp, passed_on, 3, 20, 0, i));
        told = 0;
        TEST_OF("chain", run_ranks(&tcp, chain, 3, 20, -1, 0));
        told = 0;
        TEST_OF("old_answer", run_ranks(&tcp, old_answer, 3, 20, -1, 0));
        TEST_OF("read_first", run_ranks(&tcp, read_first, 3, 20, -1, 0));
    }
    same_blocks(&tcp, 2, 1);
    same_blocks(&tcp, 2, 2);
    return test_end("tcp");
}
