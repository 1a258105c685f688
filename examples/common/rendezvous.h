/* rendezvous.h -- a few bytes from the first process of a launcher to all
 *
 *     if (l.rank == 0) ncclGetUniqueId(&id);                   launch l (launch.h)
 *     if (rendezvous(&l, &id, sizeof id, 30) != 0) return EXIT_RUN;      now all have it
 *
 * Rank 0 listens at MASTER_ADDR, TCP port MASTER_PORT, and at no other address; the others are its clients. Where
 * MASTER_ADDR holds a slash it is a file of a folder that all processes share, and they meet there (rendezvous_file.h).
 * No call waits longer than it was told, but for the resolver of names, which has limits of its own.
 *
 * Over TCP, each length known beforehand:
 *
 *     server -> client    peer     who rank 0 is, in this connection
 *     client -> server    peer     who the client is
 *                         proof    of the client's peer and the server's
 *     server -> client    proof    of the server's peer, the client's and the data
 *                         data
 *     client -> server    ack      a byte: the data are there, and the rank has joined
 *
 * A peer names the role, the rank, the number of ranks and of the data's bytes, and a nonce that is drawn for this
 * connection. Proofs are those of a secret (secret.h). As each covers both peers, none serves for another role,
 * rank, connection or run. Without a secret whoever reaches the port may join. What is sent can be read on the way.
 *
 * If two peers disagree in ranks or bytes, the server's proof is of the peers alone, no data follow, and the client ends
 * with a sentence. The server ends for nothing that a client sends. It refuses, counts, and names the last wrong hello at
 * the end. A client without a hello is dropped after RENDEZVOUS_HELLO seconds, or before that where another one needs
 * its place. Nobody waits for it, as all of them are polled at once.
 */
#ifndef COMMON_RENDEZVOUS_H
#define COMMON_RENDEZVOUS_H

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include "launch.h"
#include "rendezvous_file.h"

/* ---- sockets that wait no longer than until a moment of cli_clock ---- */

/* Milliseconds for poll, an hour at most. */
static inline int rendezvous_left(double until)
{
    const double left = until - cli_clock(NULL);
    return left <= 0 ? 0 : left > 3600 ? 3600000 : (int)(left * 1000) + 1;
}

/* Returns 1 once the socket is ready. */
static inline int rendezvous_ready(int fd, int events, double until)
{
    struct pollfd p = {fd, (short)events, 0};
    do {
        if (poll(&p, 1, rendezvous_left(until)) == 1) return 1;
    } while (cli_clock(NULL) < until);
    return 0;
}

/* Moves of `bytes` bytes what can be moved now; *done counts. -1 if the connection has ended. */
static inline int rendezvous_step(int fd, void *data, size_t bytes, size_t *done, int out)
{
    char *at = (char *)data + *done;
    const ssize_t n = out ? send(fd, at, bytes - *done, MSG_NOSIGNAL) : recv(fd, at, bytes - *done, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (n <= 0) return -1;
    *done += (size_t)n;
    return 0;
}

/* Moves all bytes, or returns -1. */
static inline int rendezvous_move(int fd, void *data, size_t bytes, int out, double until)
{
    size_t done = 0;
    while (done < bytes)
        if (!rendezvous_ready(fd, out ? POLLOUT : POLLIN, until) ||
            rendezvous_step(fd, data, bytes, &done, out) != 0)
            return -1;
    return 0;
}

/* ---- messages ---- */

typedef struct rendezvous_peer {
    char mark[8]; /* the role, and the version of all this */
    int32_t rank, ranks;
    uint64_t bytes; /* of the data */
    unsigned char nonce[16];
} rendezvous_peer;

typedef struct rendezvous_hello {
    rendezvous_peer peer;
    unsigned char proof[SECRET_PROOF];
} rendezvous_hello;

static const char rendezvous_marks[2][9] = {"upipe-s1", "upipe-c1"}; /* of the server, of clients */

enum {
    RENDEZVOUS_HELLO = 2,      /* seconds that a client has for its hello */
    RENDEZVOUS_TRY = 10,       /* seconds of a connection, after which the client makes another one */
    RENDEZVOUS_STRANGERS = 64, /* connections beside one of each rank that are open at once */
    RENDEZVOUS_ACK = 'k'
};

/* A call of rendezvous(). */
typedef struct rendezvous_call {
    const launch *l;
    const struct addrinfo *all; /* what MASTER_ADDR may be */
    int listening;              /* rank 0's socket that listens already, or -1 */
    int *fds;                   /* where connections go that have served; NULL: they are closed */
    secret secret;
    char *data;
    size_t bytes;
    char *message; /* what a proof is of: two peers, and the data behind them */
    double until, seconds;
} rendezvous_call;

/* A connection that has served outlives this one's end, where it is wanted; returns whether it does. */
static inline int rendezvous_keep(const rendezvous_call *k, int rank, int fd)
{
    if (k->fds != NULL) k->fds[rank] = fd;
    return k->fds != NULL;
}

/* This process, with a new nonce; -1 with errno set. */
static inline int rendezvous_self(const rendezvous_call *k, rendezvous_peer *out)
{
    memcpy(out->mark, rendezvous_marks[k->l->rank > 0], sizeof out->mark);
    out->rank = k->l->rank;
    out->ranks = k->l->ranks;
    out->bytes = k->bytes;
    return secret_draw(out->nonce, sizeof out->nonce);
}

/* What is proven: who proves, and to whom. */
static inline const char *rendezvous_message(const rendezvous_call *k, const rendezvous_peer *from,
                                             const rendezvous_peer *to)
{
    memcpy(k->message, from, sizeof *from);
    memcpy(k->message + sizeof *from, to, sizeof *to);
    return k->message;
}

/* ---- rank 0 ---- */

/* What the server does next with a connection. */
enum { RENDEZVOUS_READ_HELLO, RENDEZVOUS_WRITE_PROOF, RENDEZVOUS_WRITE_DATA, RENDEZVOUS_READ_ACK };

typedef struct rendezvous_conn {
    int next, fits;
    size_t done;  /* bytes of that */
    double until; /* RENDEZVOUS_HELLO seconds, and once its proof is right the deadline */
    rendezvous_peer mine;
    rendezvous_hello hello;
    unsigned char proof[SECRET_PROOF];
    char ack;
} rendezvous_conn;

typedef struct rendezvous_server {
    const rendezvous_call *k;
    char where[256];
    struct pollfd *polls; /* [1 + most]; the first is the listening socket's */
    rendezvous_conn *conns;
    int n, most;
    char *seen; /* [ranks] */
    int joined;
    int wrong, no_hello; /* hellos that were refused; connections that ended without one */
    char why[256];       /* the last hello that was refused */
    int error;           /* of the last accept */
} rendezvous_server;

static inline void rendezvous_where(char *out, size_t bytes, const struct sockaddr *at, socklen_t size)
{
    if (getnameinfo(at, size, out, (socklen_t)bytes, NULL, 0, NI_NUMERICHOST) != 0)
        snprintf(out, bytes, "somewhere");
}

/* A socket that listens at the first address that is this machine's, and at no other; -1 with errno set. */
static inline int rendezvous_listen(const rendezvous_call *k, char *where, size_t bytes)
{
    const struct addrinfo *a;
    int fd, one = 1, error = EADDRNOTAVAIL;
    for (a = k->all; a != NULL && error != EADDRINUSE; a = a->ai_next) {
        rendezvous_where(where, bytes, a->ai_addr, a->ai_addrlen);
        fd = socket(a->ai_family, a->ai_socktype, a->ai_protocol);
        if (fd >= 0 && fcntl(fd, F_SETFL, O_NONBLOCK) == 0 &&
            setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
            bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0)
            return fd;
        error = errno;
        if (fd >= 0) close(fd);
    }
    errno = error;
    return -1;
}

/* Ends connection i; the last one is in its place then. */
static inline void rendezvous_drop(rendezvous_server *s, int i)
{
    s->no_hello += s->conns[i].next == RENDEZVOUS_READ_HELLO;
    if (s->polls[1 + i].fd >= 0) close(s->polls[1 + i].fd);
    --s->n;
    s->conns[i] = s->conns[s->n];
    s->polls[1 + i] = s->polls[1 + s->n];
}

/* Ends the oldest connection that has brought no hello; 0 if there is none. */
static inline int rendezvous_evict(rendezvous_server *s)
{
    int i, oldest = -1;
    for (i = 0; i < s->n; ++i)
        if (s->conns[i].next == RENDEZVOUS_READ_HELLO &&
            (oldest < 0 || s->conns[i].until < s->conns[oldest].until))
            oldest = i;
    if (oldest >= 0) rendezvous_drop(s, oldest);
    return oldest >= 0;
}

/* Accepts a connection, and sends who rank 0 is. */
static inline void rendezvous_accept(rendezvous_server *s)
{
    rendezvous_conn *c = &s->conns[s->n];
    rendezvous_peer mine;
    int fd = -1, now = 1;
    errno = EMFILE;
    if (s->n < s->most && rendezvous_self(s->k, &mine) == 0) fd = accept(s->polls[0].fd, NULL, NULL);
    s->error = fd < 0 ? errno : 0;
    if (fd < 0) {
        if ((s->error != EMFILE && s->error != ENFILE) || !rendezvous_evict(s)) rendezvous_nap();
        return;
    }
    memset(c, 0, sizeof *c);
    c->mine = mine;
    c->until = cli_clock(NULL) + RENDEZVOUS_HELLO;
    s->polls[1 + s->n].fd = fd;
    s->polls[1 + s->n].events = POLLIN;
    ++s->n;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &now, sizeof now);
    /* a new connection takes so few bytes at once */
    if (fcntl(fd, F_SETFL, O_NONBLOCK) != 0 ||
        send(fd, &mine, sizeof mine, MSG_NOSIGNAL) != (ssize_t)sizeof mine)
        rendezvous_drop(s, s->n - 1);
}

/* A hello is complete. 0: it is answered; -1: it is not. */
static inline int rendezvous_check(rendezvous_server *s, rendezvous_conn *c, int fd)
{
    const rendezvous_call *k = s->k;
    const rendezvous_peer *w = &c->hello.peer;
    const int ranks = k->l->ranks;
    struct sockaddr_storage from;
    socklen_t size = sizeof from;
    char where[64] = "somewhere";
    int proven, again;
    if (memcmp(w->mark, rendezvous_marks[1], sizeof w->mark) != 0) return ++s->no_hello, -1;
    proven = secret_proven(&k->secret, rendezvous_message(k, w, &c->mine), 2 * sizeof *w, c->hello.proof);
    c->fits = w->ranks == ranks && w->bytes == k->bytes && w->rank > 0 && w->rank < ranks;
    again = c->fits && s->seen[w->rank];
    if (!proven || !c->fits || again) {
        ++s->wrong;
        if (getpeername(fd, (struct sockaddr *)&from, &size) == 0)
            rendezvous_where(where, sizeof where, (struct sockaddr *)&from, size);
        snprintf(s->why, sizeof s->why, "from %s: rank %d of %d comes to a rank 0 of %d%s", where,
                 (int)w->rank, (int)w->ranks, ranks,
                 !proven             ? k->secret.bytes > 0 ? ", and does not prove the secret"
                                                           : ", and has a secret that rank 0 has not"
                 : again             ? " a second time"
                 : w->ranks == ranks ? " for other data"
                                     : "");
    }
    if (!proven || again) return -1;
    c->until = k->until;
    return secret_prove(&k->secret, rendezvous_message(k, &c->mine, w),
                        2 * sizeof *w + (c->fits ? k->bytes : 0), c->proof);
}

/* Does what connection i is ready for. -1: it has ended. */
static inline int rendezvous_progress(rendezvous_server *s, int i)
{
    rendezvous_conn *c = &s->conns[i];
    void *const what[] = {&c->hello, c->proof, s->k->data, &c->ack};
    const size_t bytes[] = {sizeof c->hello, sizeof c->proof, s->k->bytes, 1};
    const int fd = s->polls[1 + i].fd, now = c->next;
    if (rendezvous_step(fd, what[now], bytes[now], &c->done, s->polls[1 + i].events == POLLOUT) != 0)
        return -1;
    if (c->done < bytes[now]) return 0;
    c->done = 0;
    ++c->next;
    s->polls[1 + i].events = c->next < RENDEZVOUS_READ_ACK ? POLLOUT : POLLIN;
    if (now == RENDEZVOUS_READ_HELLO) return rendezvous_check(s, c, fd);
    if (now == RENDEZVOUS_WRITE_PROOF) return c->fits ? 0 : -1;
    if (now != RENDEZVOUS_READ_ACK) return 0;
    if (c->ack != RENDEZVOUS_ACK || s->seen[c->hello.peer.rank]) return -1;
    s->joined += s->seen[c->hello.peer.rank] = 1;
    if (rendezvous_keep(s->k, c->hello.peer.rank, fd)) s->polls[1 + i].fd = -1;
    return -1;
}

/* Until all ranks have joined, or the deadline. */
static inline void rendezvous_loop(rendezvous_server *s)
{
    const double until = s->k->until;
    while (s->joined < s->k->l->ranks && cli_clock(NULL) < until) {
        double soon = until;
        int i;
        for (i = 0; i < s->n; ++i)
            if (s->conns[i].until < soon) soon = s->conns[i].until;
        if (poll(s->polls, (nfds_t)s->n + 1, rendezvous_left(soon)) < 0) continue;
        for (i = s->n; i-- > 0;) /* downwards: what drop moves has had its turn */
            if (s->polls[1 + i].revents != 0 ? rendezvous_progress(s, i) != 0
                                             : cli_clock(NULL) >= s->conns[i].until)
                rendezvous_drop(s, i);
        if (s->polls[0].revents != 0) rendezvous_accept(s);
    }
}

/* The sentence at the end: what is missing, and what was refused. */
static inline int rendezvous_report(const rendezvous_server *s)
{
    const rendezvous_call *k = s->k;
    const int ranks = k->l->ranks;
    char wrong[320] = "", no_hello[64] = "", late[48] = "", missing[128] = "";
    if (s->joined == ranks && s->wrong == 0) return 0;
    if (s->joined < ranks) snprintf(late, sizeof late, " within %g s", k->seconds);
    if (s->joined < ranks) launch_missing(k->l, s->seen, missing, sizeof missing);
    if (s->wrong > 0) snprintf(wrong, sizeof wrong, "; wrong hellos: %d, the last %s", s->wrong, s->why);
    if (s->no_hello > 0)
        snprintf(no_hello, sizeof no_hello, "; connections without a hello: %d", s->no_hello);
    cli_fail("%d of %d ranks have come to %s port %d%s%s%s%s%s%s", s->joined, ranks, s->where, k->l->port,
             late, missing, s->error != 0 ? ": " : "", s->error != 0 ? strerror(s->error) : "", wrong,
             no_hello);
    return s->joined == ranks ? 0 : -1;
}

/* Rank 0: the data to every other rank. */
static inline int rendezvous_serve(const rendezvous_call *k)
{
    const int ranks = k->l->ranks;
    rendezvous_server s;
    int status = -1;
    memset(&s, 0, sizeof s);
    s.k = k;
    s.joined = 1;
    s.most = ranks + RENDEZVOUS_STRANGERS;
    s.polls = (struct pollfd *)calloc((size_t)s.most + 1, sizeof *s.polls);
    s.conns = (rendezvous_conn *)calloc((size_t)s.most, sizeof *s.conns);
    s.seen = (char *)calloc((size_t)ranks, 1);
    if (s.polls == NULL || s.conns == NULL || s.seen == NULL) {
        cli_fail("rank %d is out of memory: %d ranks", launch_called(k->l, 0), ranks);
    } else if ((s.polls[0].fd =
                    k->listening >= 0 ? k->listening : rendezvous_listen(k, s.where, sizeof s.where)) < 0) {
        cli_fail("rank %d cannot listen at %s port %d: %s", launch_called(k->l, 0), s.where, k->l->port,
                 strerror(errno));
    } else {
        if (k->listening >= 0) snprintf(s.where, sizeof s.where, "%s", k->l->address);
        if (k->listening < 0 && k->secret.bytes == 0 && strncmp(s.where, "127.", 4) != 0 &&
            strcmp(s.where, "::1") != 0)
            cli_fail("rank 0 listens at %s port %d without a secret: whoever reaches it may come as a rank "
                     "(UPIPE_SECRET_FILE)",
                     s.where, k->l->port);
        s.polls[0].events = POLLIN;
        rendezvous_loop(&s);
        status = rendezvous_report(&s);
        while (s.n > 0) rendezvous_drop(&s, s.n - 1);
        if (k->listening < 0) close(s.polls[0].fd);
    }
    free(s.polls);
    free(s.conns);
    free(s.seen);
    return status;
}

/* ---- clients ---- */

/* A connection to one address; -1 with errno set. */
static inline int rendezvous_connect(const struct addrinfo *a, double until)
{
    struct sockaddr_storage own;
    socklen_t size = sizeof own;
    int fd = socket(a->ai_family, a->ai_socktype, a->ai_protocol), error = 0;
    if (fd < 0) return -1;
    if (fcntl(fd, F_SETFL, O_NONBLOCK) != 0 || connect(fd, a->ai_addr, a->ai_addrlen) != 0) error = errno;
    if (error == EINPROGRESS) {
        socklen_t one = sizeof error;
        error = ETIMEDOUT;
        if (rendezvous_ready(fd, POLLOUT, until)) getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &one);
    }
    /* where nobody listens the kernel may draw that very port for this end, which then talks to itself */
    if (error == 0 && getsockname(fd, (struct sockaddr *)&own, &size) == 0 && size == a->ai_addrlen &&
        memcmp(&own, a->ai_addr, size) == 0)
        error = ECONNREFUSED;
    if (error == 0) return fd;
    close(fd);
    errno = error;
    return -1;
}

/* The data through one connection. 0: they are there; 1: *why not, though another connection may bring them, as it was if
 * rank 0 says nothing; -1: none will, and the sentence is out. */
static inline int rendezvous_handshake(const rendezvous_call *k, int fd, double until, const char **why)
{
    const launch *l = k->l;
    unsigned char proof[SECRET_PROOF];
    char ack = RENDEZVOUS_ACK, *data = k->message + 2 * sizeof(rendezvous_peer);
    rendezvous_peer server;
    rendezvous_hello mine;
    size_t bytes = 0;
    if (rendezvous_move(fd, &server, sizeof server, 0, until) != 0) return 1;
    *why = "it is no rank 0 of this version";
    if (memcmp(server.mark, rendezvous_marks[0], sizeof server.mark) != 0) return 1;
    *why = "there are no random numbers, or no memory";
    if (rendezvous_self(k, &mine.peer) != 0 ||
        secret_prove(&k->secret, rendezvous_message(k, &mine.peer, &server), 2 * sizeof server, mine.proof) !=
            0)
        return 1;
    *why = k->secret.bytes > 0 ? "rank 0 does not answer this rank's hello: has it the same secret?"
                               : "rank 0 does not answer this rank's hello";
    if (server.ranks == l->ranks && server.bytes == k->bytes) bytes = k->bytes;
    if (rendezvous_move(fd, &mine, sizeof mine, 1, until) != 0 ||
        rendezvous_move(fd, proof, sizeof proof, 0, until) != 0 ||
        rendezvous_move(fd, data, bytes, 0, until) != 0)
        return 1;
    *why = "it does not prove the secret";
    if (!secret_proven(&k->secret, rendezvous_message(k, &server, &mine.peer), 2 * sizeof server + bytes,
                       proof))
        return 1;
    if (bytes == 0)
        return cli_fail("rank %d of %d comes to a rank 0 of %d%s", l->rank, l->ranks, (int)server.ranks,
                        server.ranks == l->ranks ? " for other data" : "");
    *why = "the connection has ended";
    if (rendezvous_move(fd, &ack, 1, 1, until) != 0) return 1;
    memcpy(k->data, data, bytes);
    return 0;
}

static inline int rendezvous_join(const rendezvous_call *k)
{
    const launch *l = k->l;
    const char *why = NULL, *last; /* of the last connection that says why and that the deadline has not ended */
    int error = 0;
    do { /* rank 0 may not be there yet */
        const struct addrinfo *a;
        for (a = k->all; a != NULL; a = a->ai_next) {
            const double soon = cli_clock(NULL) + RENDEZVOUS_TRY, until = soon < k->until ? soon : k->until;
            const int fd = rendezvous_connect(a, until);
            int status = 1;
            if (fd < 0) {
                error = errno;
                continue;
            }
            last = why != NULL ? why : "no answer";
            status = rendezvous_handshake(k, fd, until, &last);
            if (status != 0 || !rendezvous_keep(k, 0, fd)) close(fd);
            if (status <= 0) return status;
            if (why == NULL || cli_clock(NULL) < k->until) why = last;
        }
        rendezvous_nap();
    } while (cli_clock(NULL) < k->until);
    return cli_fail("rank %d has not met rank %d at %s port %d within %g s: %s", launch_called(l, l->rank),
                    launch_called(l, 0), l->address, l->port, k->seconds,
                    why != NULL ? why : strerror(error));
}

/* rendezvous_connect_all -- as rendezvous, over TCP alone, and the connections stay
 *   listening   rank 0's socket that listens at l's port and does not wait, or -1: it makes one
 *   fds         [ranks] rank 0: the connection of each other rank; another rank: fds[0]. NULL: none stays
 *   errors      -1 with the sentence out; some connections may be there, where fds was -1 before
 */
static inline int rendezvous_connect_all(const launch *l, int listening, void *data, size_t bytes,
                                         double seconds, int *fds)
{
    const double until = cli_clock(NULL) + seconds;
    struct addrinfo hints, *all = NULL;
    rendezvous_call k;
    char port[16];
    int error, status;
    if (l->ranks == 1) return 0;
    memset(&k, 0, sizeof k);
    if (secret_read(&k.secret) != 0) return -1;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    snprintf(port, sizeof port, "%d", l->port);
    error = getaddrinfo(l->address, port, &hints, &all);
    if (error != 0)
        return cli_fail("rank %d: MASTER_ADDR '%s' is no address: %s", l->rank, l->address,
                        error == EAI_SYSTEM ? strerror(errno) : gai_strerror(error));
    k.l = l;
    k.all = all;
    k.listening = listening;
    k.fds = fds;
    k.data = (char *)data;
    k.bytes = bytes;
    k.message = (char *)malloc(2 * sizeof(rendezvous_peer) + bytes);
    k.until = until;
    k.seconds = seconds;
    if (k.message == NULL) {
        status = cli_fail("rank %d is out of memory", launch_called(l, l->rank));
    } else {
        memcpy(k.message + 2 * sizeof(rendezvous_peer), data, bytes);
        status = l->rank == 0 ? rendezvous_serve(&k) : rendezvous_join(&k);
    }
    free(k.message);
    freeaddrinfo(all);
    return status;
}

/* rendezvous -- rank 0's `bytes` bytes, at least one, come to all ranks; -1 with the sentence out if they do not in time,
 *               or cannot. Only the resolver of names has its own limits */
static inline int rendezvous(const launch *l, void *data, size_t bytes, double seconds)
{
    if (l->ranks > 1 && strchr(l->address, '/') != NULL)
        return rendezvous_file(l, data, bytes, cli_clock(NULL) + seconds, seconds);
    return rendezvous_connect_all(l, -1, data, bytes, seconds, NULL);
}

#endif
