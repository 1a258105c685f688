/* rendezvous.h -- processes that a launcher has started: who they are, and a few bytes from the first to all
 *
 *     launch l;
 *     int status = launch_read(&l);                            mpirun, srun, torchrun, or variables set by
 *                                                              hand
 *     if (status != 0) return status - 1;                      the sentence is out
 *     if (l.rank == 0) ncclGetUniqueId(&id);
 *     if (rendezvous(&l, &id, sizeof id, 30) != 0) return EXIT_RUN;      now all have it
 *
 * Rank 0 listens on TCP port MASTER_PORT; the others connect to MASTER_ADDR and say who they are. Where MASTER_ADDR
 * holds a slash it is a file of a folder that all processes share, and they meet there (rendezvous_file.h). No call
 * waits longer than it was told. Neither secret nor safe from strangers on the network: for a cluster's
 * inside.
 */
#ifndef COMMON_RENDEZVOUS_H
#define COMMON_RENDEZVOUS_H

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include "rendezvous_file.h"

typedef struct launch {
    const char *address; /* where rank 0 listens; with a slash: a file */
    int rank, ranks;
    int local; /* rank on this machine: the device to use */
    int port;
} launch;

/* The first of these variables that is set, or NULL. */
static inline const char *launch_first(const char *const *names)
{
    const char *value = NULL;
    for (; *names != NULL && value == NULL; ++names) {
        value = getenv(*names);
        if (value != NULL && value[0] == '\0') value = NULL;
    }
    return value;
}

static inline int launch_number(const char *const *names, int64_t least, int64_t most, int otherwise,
                                int *out)
{
    const char *text = launch_first(names);
    char *end = NULL;
    long value;
    *out = otherwise;
    if (text == NULL) return 0;
    errno = 0;
    value = strtol(text, &end, 10);
    if (*end != '\0' || errno != 0 || value < least || value > most)
        return cli_refuse("the launcher's %s is '%s'", names[0], text);
    *out = (int)value;
    return 0;
}

/* The number in the first of these variables that is set, whatever it means for a launcher; -1 if there is none. */
static inline int launch_look(const char *const *names)
{
    const char *text = launch_first(names);
    char *end = NULL;
    long value = text != NULL ? strtol(text, &end, 10) : -1;
    return text != NULL && *end == '\0' && value >= 0 && value <= 1 << 20 ? (int)value : -1;
}

/* How many processes a launcher has started beside this one and with it; 1: no launcher. Slurm's batch script is one
 * process, though it has the number of tasks of its job. */
static inline int launch_processes(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE",
                                        "SLURM_STEP_NUM_TASKS", NULL};
    int n = launch_look(names);
    return n > 1 ? n : 1;
}

/* Which of them this one is, from 0. */
static inline int launch_process(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "SLURM_PROCID", NULL};
    int rank = launch_look(names);
    return launch_processes() > 1 && rank > 0 ? rank : 0;
}

/* This process's place. Returns 0, or 1 + the exit status once its sentence is out. */
static inline int launch_read(launch *l)
{
    static const char *const rank[] = {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", NULL};
    static const char *const ranks[] = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS",
                                        NULL};
    static const char *const local[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
                                        "SLURM_LOCALID", NULL};
    static const char *const near[] = {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
                                       NULL};
    /* Slurm tells the processes of a machine only where they were asked for, and then those of the job. */
    static const char *const slurm[] = {"SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", NULL};
    static const char *const port[] = {"MASTER_PORT", NULL}, *const address[] = {"MASTER_ADDR", NULL};
    static const char *const taken[] = {"TORCHELASTIC_USE_AGENT_STORE", NULL};
    int here, nodes, status;
    memset(l, 0, sizeof *l);
    if ((status = launch_number(ranks, 1, 1 << 20, 1, &l->ranks)) != 0) return status;
    if ((status = launch_number(rank, 0, l->ranks - 1, l->ranks > 1 ? -1 : 0, &l->rank)) != 0) return status;
    if ((status = launch_number(local, 0, 1 << 20, l->rank, &l->local)) != 0) return status;
    if ((status = launch_number(near, 1, 1 << 20, l->ranks, &here)) != 0) return status;
    if ((status = launch_number(slurm, 1, 1 << 20, 1, &nodes)) != 0) return status;
    if ((status = launch_number(port, 1, 65534, 29500, &l->port)) != 0) return status;
    if (l->rank < 0) return cli_refuse("WORLD_SIZE is %d, but RANK is not set", l->ranks);
    l->address = launch_first(address);
    if (l->address == NULL && here < l->ranks)
        return cli_refuse("%d of %d processes are on this machine: set MASTER_ADDR to the machine of rank 0, "
                          "or to a file of a folder that all share",
                          here, l->ranks);
    if (l->address == NULL && launch_first(near) == NULL && l->ranks > 1 && nodes > 1)
        return cli_refuse("the %d processes are on %d machines: set MASTER_ADDR to the machine of rank 0, "
                          "or to a file of a folder that all share",
                          l->ranks, nodes);
    if (l->address == NULL) l->address = "127.0.0.1";
    if (launch_first(taken) != NULL && strcmp(launch_first(taken), "True") == 0)
        ++l->port; /* torchrun's own store listens there */
    return 0;
}

/* ---- sockets that wait no longer than until a moment of cli_clock ---- */

/* Returns 1 once the socket is ready. */
static inline int rendezvous_ready(int fd, int events, double until)
{
    struct pollfd p;
    p.fd = fd;
    p.events = (short)events;
    p.revents = 0;
    for (;;) {
        double left = until - cli_clock(NULL);
        if (left > 3600) left = 3600;
        if (poll(&p, 1, left > 0 ? (int)(left * 1000) + 1 : 0) == 1) return 1;
        if (left <= 0) return 0;
    }
}

/* Moves all bytes, or returns -1. */
static inline int rendezvous_move(int fd, void *data, size_t bytes, int out, double until)
{
    char *at = (char *)data;
    while (bytes > 0) {
        ssize_t n;
        if (!rendezvous_ready(fd, out ? POLLOUT : POLLIN, until)) return -1;
        n = out ? send(fd, at, bytes, MSG_NOSIGNAL) : recv(fd, at, bytes, 0);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (n <= 0) return -1;
        at += n;
        bytes -= (size_t)n;
    }
    return 0;
}

/* A socket that listens, or is connected to rank 0; -1 with errno set. */
static inline int rendezvous_open(const launch *l, double until)
{
    struct addrinfo hints, *all = NULL, *a;
    char port[16];
    int fd = -1, one = 1, error = ECONNREFUSED;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = l->rank == 0 ? AI_PASSIVE : 0;
    snprintf(port, sizeof port, "%d", l->port);
    if (getaddrinfo(l->rank == 0 ? NULL : l->address, port, &hints, &all) != 0)
        return errno = EADDRNOTAVAIL, -1;
    for (a = all; a != NULL && fd < 0; a = a->ai_next) {
        socklen_t size = sizeof error;
        int done = 0;
        fd = socket(a->ai_family, a->ai_socktype, a->ai_protocol);
        error = errno;
        if (fd < 0) continue;
        fcntl(fd, F_SETFL, O_NONBLOCK);
        if (l->rank == 0) {
            setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
            done = bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, l->ranks) == 0;
            error = errno;
        } else {
            error = connect(fd, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
            if (error == EINPROGRESS && rendezvous_ready(fd, POLLOUT, until))
                getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
            done = error == 0;
        }
        if (done) continue;
        close(fd);
        fd = -1;
    }
    freeaddrinfo(all);
    errno = error;
    return fd;
}

/* What a rank says first; the answer is the data. */
typedef struct rendezvous_hello {
    char mark[8];
    int32_t rank, ranks;
    uint64_t bytes;
} rendezvous_hello;

static inline rendezvous_hello rendezvous_hello_of(const launch *l, size_t bytes)
{
    rendezvous_hello h;
    memset(&h, 0, sizeof h);
    memcpy(h.mark, "upipe-08", sizeof h.mark);
    h.rank = l->rank;
    h.ranks = l->ranks;
    h.bytes = bytes;
    return h;
}

/* Rank 0: sends the data to every other rank that connects, and closes connections of others. */
static inline int rendezvous_serve(const launch *l, void *data, size_t bytes, double seconds)
{
    double until = cli_clock(NULL) + seconds;
    int door = rendezvous_open(l, until), served = 1, status = 0, error = errno;
    char *seen = (char *)calloc(1, (size_t)l->ranks);
    if (door < 0 || seen == NULL) {
        if (door >= 0) close(door);
        free(seen);
        return cli_fail("rank 0 cannot listen on port %d: %s", l->port, strerror(door < 0 ? error : ENOMEM));
    }
    error = 0; /* of the last accept */
    while (served < l->ranks && status == 0) {
        rendezvous_hello mine = rendezvous_hello_of(l, bytes), hello;
        double soon;
        int fd;
        if (!rendezvous_ready(door, POLLIN, until) || cli_clock(NULL) >= until) {
            status = cli_fail("%d of %d ranks have come to port %d within %g s%s%s", served, l->ranks,
                              l->port, seconds, error != 0 ? ": " : "", error != 0 ? strerror(error) : "");
            break;
        }
        fd = accept(door, NULL, NULL);
        error = fd < 0 ? errno : 0;
        if (fd < 0) { /* none is left, or it is gone: perhaps for the moment */
            rendezvous_nap();
            continue;
        }
        fcntl(fd, F_SETFL, O_NONBLOCK);
        soon = cli_clock(NULL) + 2; /* one that says nothing does not hold the others up */
        if (rendezvous_move(fd, &hello, sizeof hello, 0, soon < until ? soon : until) == 0 &&
            memcmp(hello.mark, mine.mark, sizeof mine.mark) == 0 && hello.rank > 0) {
            if (hello.ranks != l->ranks || hello.bytes != bytes || hello.rank >= l->ranks)
                status = cli_fail("rank %d of %d comes to a rank 0 of %d", hello.rank, hello.ranks, l->ranks);
            else if (rendezvous_move(fd, data, bytes, 1, soon < until ? soon : until) == 0 &&
                     !seen[hello.rank])
                served += seen[hello.rank] = 1;
        }
        close(fd);
    }
    free(seen);
    close(door);
    return status;
}

/* rendezvous -- rank 0's `bytes` bytes come to all ranks; -1 with the sentence out if they do not in time */
static inline int rendezvous(const launch *l, void *data, size_t bytes, double seconds)
{
    double until = cli_clock(NULL) + seconds;
    int error = 0;
    if (l->ranks == 1) return 0;
    if (strchr(l->address, '/') != NULL)
        return rendezvous_file(l->address, l->rank, l->ranks, data, bytes, seconds);
    if (l->rank == 0) return rendezvous_serve(l, data, bytes, seconds);
    do { /* rank 0 may not be there yet */
        rendezvous_hello hello = rendezvous_hello_of(l, bytes);
        int fd = rendezvous_open(l, until), ok;
        error = errno;
        ok = fd >= 0 && rendezvous_move(fd, &hello, sizeof hello, 1, until) == 0 &&
             rendezvous_move(fd, data, bytes, 0, until) == 0;
        if (fd >= 0) close(fd);
        if (ok) return 0;
        rendezvous_nap();
    } while (cli_clock(NULL) < until);
    return cli_fail("rank %d has not met rank 0 at %s port %d within %g s: %s", l->rank, l->address, l->port,
                    seconds, error != 0 ? strerror(error) : "no answer");
}

#endif
