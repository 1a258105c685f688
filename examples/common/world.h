/* world.h -- the ranks of a run: threads of this process, or processes that a launcher has started
 *
 *     world_mute();
 *     status = flags_read(&set, &options, ...);
 *     status = world_begin(&w, &set, &options, status);      who there is, and whether all were told the same
 *     world_agree(&w, status);                               0 if every process has 0
 *     world_split(&w, C, R, &err);                           teams of C ranks, rings of R; C * R divides their number;
 *                                                            again for another shape
 *     world_run(&w, body, user, "");                         body(user, rank, &why) on each rank of this process
 *     status = world_end(&w, status);
 *
 *     in body:  world_use(&w, rank, &ctx);      ctx.team, and ctx.ring, NULL where R = 1
 *               world_all(&w, rank)             the communicator of all
 *               world_side(&w, rank)            a second one, for a side stream (a thread, or on a device the caller); if
 *                                               options.zero_prefetch
 *
 * The ranks of a team are neighbours. Where they are processes, those of a machine are neighbours, so that a team stays
 * inside a machine where it can. Rank 0 reports: sentences of other processes are held (cli.h) until
 * world_agree brings the first of them to rank 0. A failure inside body breaks every communicator with its
 * sentence; if rank 0 cannot say it, another rank does. After it world_end ends the job with the launcher's
 * means, because a rank that is dead or stopped would keep others in theirs.
 */
#ifndef COMMON_WORLD_H
#define COMMON_WORLD_H

#include <signal.h>

#include "device_flag.h"
#include "flags.h"
#include "options.h"
#include "rendezvous.h"
#include "upipe/net/upipe_net_threads_grid.h"

enum { WORLD_THREADS, WORLD_MPI, WORLD_NCCL, WORLD_TCP }; /* in the order of --transport */

_Static_assert((int)FLAG_RANKS_MAX == (int)UPIPE_THREADS_MAX, "--ranks goes as far as a team of threads");

struct world;
typedef upipe_status world_body(void *user, int rank, upipe_err *why);

/* How all ranks are split. A team of all, a ring of all and grids: a program runs no other shapes. */
enum { WORLD_SHAPES = 3 };

typedef struct world_shape {
    upipe_grid grid;
    upipe_comm *team, *ring; /* of processes; ring: NULL where there is none */
} world_shape;

/* The communicators of a process. LAUNCHED: over NCCL, in the launcher's order. TEAM, RING: of the first shape; two more of
 * each other one. */
enum {
    WORLD_LAUNCHED,
    WORLD_ALL,
    WORLD_SIDE,
    WORLD_TEAM,
    WORLD_RING,
    WORLD_COMMS = WORLD_TEAM + 2 * WORLD_SHAPES
};

/* Processes: what differs between transports. */
typedef struct world_kind {
    /* *comm: this process's end of communicator number `which`, of its part; all processes call it together */
    upipe_status (*make)(struct world *w, int which, upipe_grid_part part, upipe_comm **comm, upipe_err *e);
    int (*end)(struct world *w);   /* leaves with the others; -1 with the sentence out */
    void (*flush)(double seconds); /* lets messages leave */
    void (*stop)(void);            /* ends the processes of the job, also those that hang */
} world_kind;

/* No typedef: a communicator of all ranks is often called world. */
struct world {
    int transport, ranks;
    int first, here;      /* this process has the ranks first .. first + here - 1 */
    int near_first, near; /* likewise those of this machine */
    double deadline;
    int with_side;
    const volatile sig_atomic_t
        *caught; /* the signal that the program has taken, 0 for none; NULL: it takes none */
    upipe_threads_grid threads;
    upipe_threads side_threads;
    /* of processes */
    const world_kind *kind;
    void *own; /* the transport's */
    upipe_comm *all, *team, *ring, *side;
    char (*hosts)[UPIPE_COMM_HOST];   /* [ranks] machines, for sentences */
    world_shape shapes[WORLD_SHAPES]; /* each is made once */
    int shapes_n;
    /* during world_run */
    world_body *body;
    void *user;
    upipe_err *why; /* [here] */
};

/* Where this rank comes if machines come in the order of their first rank, and ranks of one in theirs. `node`: a number
 * of each rank's machine, [ranks]. */
static inline int world_place(const int64_t *node, int ranks, int me, int *near_first, int *near)
{
    int r, place = 0;
    *near = *near_first = 0;
    for (r = 0; r < ranks; ++r) {
        int mine = 0, theirs = 0; /* first ranks of the two machines */
        while (node[mine] != node[me]) ++mine;
        while (node[theirs] != node[r]) ++theirs;
        place += theirs < mine || (theirs == mine && r < me);
        *near_first += theirs < mine;
        *near += theirs == mine;
    }
    return place;
}

/* All ranks, as a part. */
static inline upipe_grid_part world_whole(const struct world *w)
{
    const upipe_grid_part all = {0, 1, w->ranks, w->first};
    return all;
}

/* What has been told is with the kernel, or the device. */
static inline void world_flush(double seconds)
{
    struct timespec nap = {0, (long)(seconds * 1e9)};
    nanosleep(&nap, NULL);
}

/* The others see that connections have ended, or the launcher ends them. */
static inline void world_stop(void)
{
    _exit(EXIT_RUN);
}

#include "world_tcp.h"
#ifdef UPIPE_WITH_MPI
#include "world_mpi.h"
#endif
#ifdef UPIPE_WITH_NCCL
#include "world_nccl.h"
#endif

/* ---- before the ranks run ---- */

/* Was the program built for it? The sentence for a program that was not. */
static inline const char *world_lacks(int transport)
{
#ifndef UPIPE_WITH_MPI
    if (transport == WORLD_MPI)
        return "this program was built without MPI: " PROGRAM
               "_mpi beside it has it, where Meson has found one";
#endif
#ifndef UPIPE_WITH_NCCL
    if (transport == WORLD_NCCL)
        return "this program was built without NCCL: " PROGRAM
               "_nccl beside it has it, where Meson has found one";
#endif
    (void)transport;
    return NULL;
}

/* world_mute -- before anything is printed: of a launcher's processes only the first one prints */
static inline void world_mute(void)
{
    cli_holds = launch_process() > 0;
}

/* Is this the process that reports and writes files? */
static inline int world_is_root(const struct world *w)
{
    return w->first == 0;
}

/* Whether a communicator of this process has failed: then all have. */
static inline int world_broken(const struct world *w)
{
    return w->all != NULL && w->all->ops.failure(w->all) != NULL;
}

/* world_broadcast -- the bytes of one rank come to all processes, which call this together */
static inline upipe_status world_broadcast(struct world *w, int from, void *data, size_t bytes, upipe_err *e)
{
    enum { PIECE = UPIPE_ALL_GATHER_MAX * sizeof(int64_t) };
    int64_t mine[UPIPE_ALL_GATHER_MAX];
    upipe_ctx c;
    size_t at, n;
    upipe_status s = UPIPE_OK;
    memset(&c, 0, sizeof c);
    for (at = 0; at < bytes && s == UPIPE_OK; at += n) {
        n = bytes - at < PIECE ? bytes - at : PIECE;
        memset(mine, 0, sizeof mine);
        if (w->first == from) memcpy(mine, (char *)data + at, n);
        s = upipe_comm_all_gather(&c, w->all, w->all->gathered, mine, UPIPE_ALL_GATHER_MAX);
        if (s == UPIPE_OK)
            memcpy((char *)data + at, w->all->gathered + (size_t)from * UPIPE_ALL_GATHER_MAX, n);
    }
    if (s != UPIPE_OK) *e = c.err;
    return s;
}

/* The first rank that brings another number than 0; -1: none. */
static inline int world_first_of(struct world *w, int64_t mine, upipe_err *e, upipe_status *s)
{
    upipe_ctx c;
    int r = 0;
    memset(&c, 0, sizeof c);
    *s = upipe_comm_all_gather(&c, w->all, w->all->gathered, &mine, 1);
    if (*s != UPIPE_OK) *e = c.err;
    while (*s == UPIPE_OK && r < w->ranks && w->all->gathered[r] == 0) ++r;
    return *s == UPIPE_OK && r < w->ranks ? r : -1;
}

/* world_agree -- every process brings 0, or another status with its sentence out or held; returns 0 if all bring 0, else
 *                this process's status, or that of the first that has one, with its sentence out at rank 0 */
static inline int world_agree(struct world *w, int status)
{
    upipe_err e;
    upipe_status s;
    int rank, theirs = -1;
    if (w->all == NULL) return status;
    if (world_broken(w)) return status != 0 ? status : -1;
    rank = world_first_of(w, status, &e, &s);
    if (s == UPIPE_OK && rank < 0) return 0;
    if (s == UPIPE_OK) theirs = (int)w->all->gathered[rank];
    if (s == UPIPE_OK && rank > 0) {
        char text[CLI_SENTENCE] = "";
        memcpy(text, cli_held, sizeof text);
        s = world_broadcast(w, rank, text, 1024, &e);
        if (s == UPIPE_OK) cli_fail("rank %d: %s", rank, text);
    }
    if (s != UPIPE_OK) cli_fail("%s%s", cli_status(s), e.text);
    return status != 0 ? status : theirs;
}

/* world_same -- processes that read other files are not one run
 *   what   where they differ, for the sentence;  hash: of it
 */
static inline int world_same(struct world *w, const char *what, uint64_t hash)
{
    upipe_err e;
    upipe_status s;
    int64_t first = (int64_t)hash;
    int bad = 0;
    if (w->all == NULL) return 0;
    s = world_broadcast(w, 0, &first, sizeof first, &e);
    if (s != UPIPE_OK) return cli_fail("%s%s", cli_status(s), e.text);
    if (first != (int64_t)hash) bad = cli_fail("%s than rank 0", what);
    return world_agree(w, bad);
}

/* Tells the ranks of several machines their names, for sentences. 0, or -1 with the sentence out. */
static inline int world_name_hosts(struct world *w)
{
    enum { NUMBERS = UPIPE_COMM_HOST / sizeof(int64_t) };
    int64_t mine[NUMBERS] = {0};
    char text[64];
    upipe_ctx c;
    memset(&c, 0, sizeof c);
    w->hosts = (char(*)[UPIPE_COMM_HOST])calloc((size_t)w->ranks, sizeof *w->hosts);
    (void)gethostname((char *)mine, sizeof mine - 1);
    snprintf(text, sizeof text, "rank %d: out of memory: %d ranks", w->first, w->ranks);
    if (w->hosts == NULL) upipe_comm_abort(w->all, text);
    if (upipe_comm_all_gather(&c, w->all, w->all->gathered, mine, NUMBERS) != UPIPE_OK)
        return cli_fail("%s%s", cli_status(c.err.status), c.err.text);
    memcpy(w->hosts, w->all->gathered, (size_t)w->ranks * sizeof *w->hosts);
    if (w->near < w->ranks) w->all->hosts = (const char(*)[UPIPE_COMM_HOST])w->hosts;
    return 0;
}

/* The launcher's processes meet. 0, or -1 with the sentence out. */
static inline int world_meet(struct world *w, const options *o)
{
#ifdef UPIPE_WITH_MPI
    if (w->transport == WORLD_MPI) return world_mpi_begin(w, o);
#endif
#ifdef UPIPE_WITH_NCCL
    if (w->transport == WORLD_NCCL) return world_nccl_begin(w, o);
#endif
    return world_tcp_begin(w, o);
}

/* What a launcher and the transport contradict. */
static inline int world_refuses(const options *o)
{
    const int started = launch_processes();
    if (!o->plan && device_flag_built("device", o->device) != 0) return 1 + EXIT_USAGE;
    if (o->avoid != 0 && o->device == DEVICE_CPU)
        return cli_refuse("--avoid would have no effect with --device cpu");
    if (world_lacks(o->transport) != NULL)
        return cli_refuse("--transport %s: %s", o->transport == WORLD_MPI ? "mpi" : "nccl",
                          world_lacks(o->transport));
    if (o->transport == WORLD_NCCL && o->device != DEVICE_CUDA)
        return cli_refuse("--transport nccl is for devices: it needs --device cuda");
    if (o->transport == WORLD_TCP && o->device != DEVICE_CPU)
        return cli_refuse("--transport tcp is for processes on CPUs: devices have --transport nccl");
    if (o->transport != WORLD_THREADS) return 0;
    if (started > 1 && !options_given(o, &o->transport))
        return cli_refuse(
            "a launcher has started %d processes, and each would make a run of its own: "
            "--transport mpi, nccl or tcp makes them the ranks of one, --transport threads says that it is meant",
            started);
    if (o->node_ranks > 0)
        return cli_refuse("--node-ranks would have no effect, as the ranks are threads of one process");
    return 0;
}

/* By what a process meets the others to say that its flags are wrong: as they do, if its own say how; else as the program
 * is built. */
static inline int world_transport_of(const options *o)
{
    const int given = options_given(o, &o->transport) ? o->transport : -1;
    if (given == WORLD_NCCL && o->device != DEVICE_CUDA) return WORLD_THREADS;
    if (given >= 0 && world_lacks(given) == NULL) return given;
    return world_lacks(WORLD_MPI) == NULL && launch_processes() > 1 ? WORLD_MPI : WORLD_THREADS;
}

/* Processes that were started with other flags are not one run. 0, or 1 + the exit status with the sentence out. */
static inline int world_same_flags(struct world *w, const flag_set *set, const options *o)
{
    struct {
        int64_t row;
        char text[FLAG_VALUE];
    } here, there;
    int64_t mine[FLAG_ROWS] = {0}, first[FLAG_ROWS];
    char value[FLAG_VALUE];
    upipe_err e;
    upipe_status s;
    int i, rank;
    for (i = 0; i < set->n; ++i)
        if ((set->rows[i].programs & set->programs) && set->rows[i].kind < FLAG_HELP &&
            !(set->rows[i].traits & FLAG_FREE))
            mine[i] = (int64_t)flag_hash(&set->rows[i], o);
    memcpy(first, mine, sizeof mine);
    s = world_broadcast(w, 0, first, sizeof first, &e);
    memset(&there, 0, sizeof there);
    while (s == UPIPE_OK && there.row < set->n && mine[there.row] == first[there.row]) ++there.row;
    rank = s == UPIPE_OK ? world_first_of(w, there.row < set->n, &e, &s) : -1;
    if (s == UPIPE_OK && rank < 0) return 0;
    /* that rank says which flag, and what it is there; then rank 0 */
    for (i = 0; i < 2 && s == UPIPE_OK; ++i) {
        memset(&here, 0, sizeof here);
        if (there.row < set->n) {
            const flag_row *row = &set->rows[there.row];
            const int is_set = row->standard != NULL || o->given[there.row];
            snprintf(here.text, sizeof here.text, "%s", is_set ? flag_text(value, row, o) : "not given");
        }
        here.row = there.row;
        s = world_broadcast(w, i == 0 ? rank : 0, &here, sizeof here, &e);
        if (i == 0) there = here;
    }
    if (s == UPIPE_OK)
        cli_fail("ranks disagree: %s is %s on rank %d, %s on rank 0", set->rows[there.row].name, there.text,
                 rank, here.text);
    else
        cli_fail("%s%s", cli_status(s), e.text);
    return 1 + EXIT_RUN;
}

/* world_begin -- after the flags, before what depends on the number of ranks
 *   status   of the flags: 0, or 1 + the exit status with the sentence out or held. A process whose flags are wrong meets
 *            the others all the same where it can, for rank 0 to say it
 *   o        how.ranks: a launcher's number replaces the default
 *   errors   0, or 1 + the exit status with the sentence out
 */
static inline int world_begin(struct world *w, const flag_set *set, options *o, int status)
{
    memset(w, 0, sizeof *w);
    w->deadline = o->deadline;
    w->with_side = o->zero_prefetch;
    w->ranks = w->here = w->near = o->how.ranks;
    if (status == 1) return status; /* --help is out */
    if (status == 0) status = world_refuses(o);
    w->transport = status == 0 ? o->transport : world_transport_of(o);
    if (o->transport == WORLD_THREADS && options_given(o, &o->transport)) cli_release();
    if (w->transport == WORLD_THREADS) return status;
    if (world_meet(w, o) != 0) {
        cli_release();
        w->all = NULL;
        return 1 + EXIT_RUN;
    }
    if (world_name_hosts(w) != 0 && status == 0) status = 1 + EXIT_RUN;
    if (status == 0 && options_given(o, &o->how.ranks) && o->how.ranks != w->ranks)
        status = cli_refuse("--ranks %d, but the launcher has started %d processes", o->how.ranks, w->ranks);
    status = world_agree(w, status);
    if (status == 0) status = world_same_flags(w, set, o);
    o->how.ranks = w->ranks;
    return status;
}

/* ---- while they run ---- */

static inline upipe_comm *world_all(struct world *w, int rank)
{
    return w->all != NULL ? w->all : upipe_threads_comm(&w->threads.world, rank);
}

/* NULL unless it is wanted. */
static inline upipe_comm *world_side(struct world *w, int rank)
{
    return w->all != NULL ? w->side : w->with_side ? upipe_threads_comm(&w->side_threads, rank) : NULL;
}

static inline void world_use(struct world *w, int rank, upipe_ctx *c)
{
    if (w->all == NULL) {
        upipe_threads_grid_use(&w->threads, rank, c);
        return;
    }
    c->team = w->team;
    c->ring = w->ring;
}

/* The communicators of a shape, and the second one of all with the first. */
static inline upipe_status world_make(struct world *w, world_shape *shape, upipe_err *e)
{
    const upipe_grid_part team = upipe_grid_team(&shape->grid, w->first),
                          ring = upipe_grid_ring(&shape->grid, w->first);
    const int at = 2 * w->shapes_n;
    upipe_comm *side = NULL;
    shape->team = w->all;
    shape->ring = NULL;
    if (w->with_side && w->side == NULL) UPIPE_TRY(w->kind->make(w, WORLD_SIDE, world_whole(w), &side, e));
    if (team.ranks < w->ranks) UPIPE_TRY(w->kind->make(w, WORLD_TEAM + at, team, &shape->team, e));
    if (ring.ranks > 1) UPIPE_TRY(w->kind->make(w, WORLD_RING + at, ring, &shape->ring, e));
    if (side != NULL) {
        w->side = side;
        upipe_comm_part(side, w->all, 0, 1);
    }
    if (shape->team != w->all) upipe_comm_part(shape->team, w->all, team.first, team.step);
    if (shape->ring != NULL) upipe_comm_part(shape->ring, w->all, ring.first, ring.step);
    ++w->shapes_n;
    return UPIPE_OK;
}

/* The communicators of a grid, which processes make together where they have not yet. */
static inline upipe_status world_split_processes(struct world *w, const upipe_grid *grid, upipe_err *e)
{
    world_shape *shape = w->shapes, *end = w->shapes + w->shapes_n;
    while (shape < end && memcmp(&shape->grid, grid, sizeof *grid) != 0) ++shape;
    if (shape == w->shapes + WORLD_SHAPES)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "a run with more than %d shapes", WORLD_SHAPES);
    if (shape == end) {
        upipe_status s;
        shape->grid = *grid;
        s = world_make(w, shape, e);
        if (s != UPIPE_OK) {
            upipe_comm_abort(w->all, e->text);
            return s;
        }
    }
    w->team = shape->team;
    w->ring = shape->ring;
    return UPIPE_OK;
}

/* world_split -- makes the teams and the rings of all ranks, which are grids of in_team * in_ring */
static inline upipe_status world_split(struct world *w, int in_team, int in_ring, upipe_err *e)
{
    const upipe_grid grid = {w->ranks, in_team, in_ring, 0};
    upipe_status s;
    int r;
    UPIPE_TRY(upipe_grid_check(&grid, e));
    if (w->all != NULL) return world_split_processes(w, &grid, e);
    if (w->with_side) UPIPE_TRY(upipe_threads_init(&w->side_threads, w->ranks, w->deadline, e));
    s = upipe_threads_grid_init(&w->threads, &grid, w->deadline, e);
    if (s != UPIPE_OK) upipe_threads_free(&w->side_threads);
    for (r = 0; s == UPIPE_OK && w->with_side && r < w->ranks; ++r)
        upipe_comm_part(world_side(w, r), upipe_threads_comm(&w->threads.world, r), 0, 1);
    return s;
}

static inline void world_join(struct world *w)
{
    if (w->all != NULL) return;
    upipe_threads_free(&w->side_threads);
    upipe_threads_grid_free(&w->threads);
}

static inline upipe_status world_main(void *user, int rank)
{
    struct world *w = (struct world *)user;
    return w->body(w->user, rank, &w->why[rank - w->first]);
}

/* A process that fails breaks the world and its parts, with its sentence. */
static inline upipe_status world_main_process(struct world *w)
{
    upipe_status s = world_main(w, w->first);
    upipe_err *why = &w->why[0];
    char text[sizeof why->text + 32];
    if (s == UPIPE_OK) return s;
    /* what a communicator or another rank says names its rank already */
    if (world_broken(w) || s == UPIPE_ERR_ABORTED)
        snprintf(text, sizeof text, "%s%s", cli_status(s), why->text);
    else
        snprintf(text, sizeof text, "rank %d: %s%s", w->first, cli_status(s), why->text);
    upipe_comm_abort(w->all, text);
    snprintf(why->text, sizeof why->text, "%.*s", (int)sizeof why->text - 1, text);
    return s;
}

/* world_run -- body on each rank of this process, between world_split and world_join. Before it uses its team or ring
 *              it passes a barrier of the world. 0, or -1 with the sentence out
 *   what   stands before the sentence of a rank that fails
 */
static inline int world_run(struct world *w, world_body *body, void *user, const char *what)
{
    upipe_status *statuses = (upipe_status *)calloc((size_t)w->here, sizeof *statuses), s;
    upipe_err first; /* of threads: what a rank says whose own never ran */
    int r;
    w->why = (upipe_err *)calloc((size_t)w->here, sizeof *w->why);
    if (statuses == NULL || w->why == NULL) {
        char text[64];
        snprintf(text, sizeof text, "rank %d: out of memory: %d ranks", w->first, w->here);
        upipe_comm_abort(w->all, text);
        free(statuses);
        free(w->why);
        return cli_fail("%sout of memory: %d ranks", what, w->here);
    }
    w->body = body;
    w->user = user;
    s = w->all != NULL ? world_main_process(w)
                       : upipe_threads_run(&w->threads.world, world_main, w, statuses, &first);
    r = cli_reason(statuses, w->here, s);
    if (s != UPIPE_OK && w->all != NULL)
        cli_fail("%s%s", what, w->why[0].text);
    else if (s != UPIPE_OK)
        cli_fail("%srank %d: %s%s", what, r, cli_status(s),
                 (w->why[r].text[0] != 0 ? &w->why[r] : &first)->text);
    free(statuses);
    free(w->why);
    w->why = NULL;
    return s == UPIPE_OK ? 0 : -1;
}

/* ---- what a rank has written ---- */

/* world_text -- what `write` writes for a rank, in the process that has it, comes to f in the one that reports. All
 *               processes call it together; f is NULL in the others, and where it could not be opened. 0, or -1 with
 *               the sentence out. Where f has an error errno stays that of its first one
 */
static inline int world_text(struct world *w, FILE *f, int rank, void (*write)(void *user, FILE *f, int rank),
                             void *user)
{
    char *text = NULL, piece[4096];
    size_t bytes = 0, at, n;
    int64_t total;
    upipe_status s;
    upipe_err e;
    FILE *own;
    int error = f != NULL && ferror(f) ? errno : 0;
    if (w->all == NULL) {
        if (f != NULL) write(user, f, rank);
        return 0;
    }
    own = w->first == rank ? open_memstream(&text, &bytes) : NULL;
    if (own != NULL) write(user, own, rank);
    if (own != NULL && fclose(own) != 0) bytes = 0;
    total = w->first == rank && own == NULL ? -1 : (int64_t)bytes;
    s = world_broadcast(w, rank, &total, sizeof total, &e);
    for (at = 0; s == UPIPE_OK && (int64_t)at < total; at += n) {
        n = (size_t)total - at < sizeof piece ? (size_t)total - at : sizeof piece;
        if (text != NULL) memcpy(piece, text + at, n);
        s = world_broadcast(w, rank, piece, n, &e);
        if (s == UPIPE_OK && f != NULL && fwrite(piece, 1, n, f) < n && error == 0) error = errno;
    }
    free(text);
    if (error != 0) errno = error; /* and not what a socket has said since */
    if (s != UPIPE_OK) return cli_fail("%s%s", cli_status(s), e.text);
    return total < 0 ? cli_fail("out of memory: the text of rank %d", rank) : 0;
}

/* ---- the end ---- */

/* world_end -- what every process ends with; does not return where a failure has left the processes apart */
static inline int world_end(struct world *w, int status)
{
    fflush(NULL);
    if (w->all == NULL) {
        /* a launcher ends its processes with the first that fails: the one that reports is to be it */
        struct timespec nap = {0, 300000000};
        if (status != 0 && cli_holds) nanosleep(&nap, NULL);
        return status;
    }
    if (!world_broken(w) && w->kind->end(w) == 0) {
        free(w->hosts);
        return status;
    }
    /* Rank 0 has said why, and ends the job at once. If it cannot, the next one does. Launchers end processes with
     * SIGTERM, for which a program may have a better use while it is whole. */
    signal(SIGTERM, SIG_DFL);
    /* The launcher has been told: who asks it too waits until it kills. */
    if (w->caught != NULL && *w->caught == SIGTERM) {
        cli_release();
        fflush(NULL);
        _exit(status != 0 ? status : EXIT_RUN);
    }
    /* Beyond a cut network each rank ends by itself. It may have waited half a second for its buffers, and is to be gone
     * within a second. */
    w->kind->flush(w->first == 0 ? 0 : w->first == 1 ? 0.2 : 0.25);
    cli_release();
    w->kind->stop();
    return status != 0 ? status : EXIT_RUN;
}

#endif
