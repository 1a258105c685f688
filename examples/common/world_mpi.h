/* world_mpi.h -- a world whose ranks are MPI's processes; world.h includes it
 *
 * MPI's own collective calls, which wait without a limit, are made under a watch that ends the process when the
 * deadline passes.
 */
#ifndef COMMON_WORLD_MPI_H
#define COMMON_WORLD_MPI_H

#include <sys/time.h>

#include "part_mpi.h"

static struct {
    part_mpi part[WORLD_COMMS];
    int level;  /* of threads */
    double due; /* when the time of an MPI call is over, and the sentence then */
    char late[192];
    const volatile sig_atomic_t *caught; /* the world's */
} world_mpi;

/* What wakes a process that was stopped is a launcher that ends it, with SIGTERM: it has been told why. */
static void world_mpi_on_alarm(int number)
{
    (void)number;
    if (cli_clock(NULL) - world_mpi.due > 0.5) sleep(2);
    if ((world_mpi.caught == NULL || *world_mpi.caught != SIGTERM) &&
        write(STDERR_FILENO, world_mpi.late, strlen(world_mpi.late)) < 0)
        _exit(EXIT_RUN + 1);
    _exit(EXIT_RUN);
}

/* Ends the process when `what` takes longer than the deadline; NULL: it has ended. The first process that ends makes
 * the launcher end the others, if each has a time of its own: then one of them says why, or more if the launcher is
 * slow. */
static void world_mpi_watch(const struct world *w, const char *what)
{
    const int rank = launch_process();
    const double seconds = (w->deadline < 1e6 ? w->deadline : 1e6) + (rank > 1 ? 3.3 : rank > 0 ? 1.8 : 0.3);
    struct itimerval timer;
    memset(&timer, 0, sizeof timer);
    signal(SIGALRM, world_mpi_on_alarm);
    if (what != NULL) {
        snprintf(world_mpi.late, sizeof world_mpi.late,
                 PROGRAM ": %s waits for a process that does not come within --deadline %g; MPI does not say "
                         "which\n",
                 what, w->deadline);
        world_mpi.caught = w->caught;
        world_mpi.due = cli_clock(NULL) + seconds;
        timer.it_value.tv_sec = (time_t)seconds;
        timer.it_value.tv_usec = (suseconds_t)((seconds - (double)timer.it_value.tv_sec) * 1e6);
    }
    setitimer(ITIMER_REAL, &timer, NULL);
}

/* A barrier says who does not come, as MPI does not. */
static upipe_status world_mpi_make(struct world *w, int which, upipe_grid_part part, upipe_comm **comm,
                                   upipe_err *e)
{
    part_mpi *m = &world_mpi.part[which];
    upipe_ctx c;
    upipe_status s;
    memset(&c, 0, sizeof c);
    /* a side stream of the CPU is a thread, which waits in one communicator while the rank is in another */
    if (which == WORLD_SIDE && world_mpi.level < MPI_THREAD_MULTIPLE)
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED,
                          "two threads call MPI, which is not MPI_THREAD_MULTIPLE here");
    if (upipe_comm_barrier(&c, w->all) != UPIPE_OK) return *e = c.err, e->status;
    world_mpi_watch(w, "MPI_Comm_split");
    s = part_mpi_make(m, world_mpi.part[WORLD_ALL].comm, part, w->deadline, e);
    world_mpi_watch(w, NULL);
    *comm = &m->end.comm;
    return s;
}

static int world_mpi_end(struct world *w)
{
    upipe_err e;
    int i, bad = 0;
    for (i = WORLD_COMMS; i-- > 0 && !bad;) /* parts before their world */
        if (upipe_mpi_free(&world_mpi.part[i].end, &e) != UPIPE_OK) bad = cli_fail("%s", e.text);
    if (bad) return -1; /* MPI_Finalize may wait for a rank that is dead */
    world_mpi_watch(w, "MPI_Finalize");
    for (i = 0; i < WORLD_COMMS; ++i)
        if (world_mpi.part[i].comm != MPI_COMM_NULL) MPI_Comm_free(&world_mpi.part[i].comm);
    bad = MPI_Finalize() != MPI_SUCCESS;
    world_mpi_watch(w, NULL);
    return bad ? cli_fail("MPI does not end") : 0;
}

/* MPI sends while it is asked for something. */
static void world_mpi_flush(double seconds)
{
    double until = cli_clock(NULL) + seconds;
    int there = 0;
    do {
        struct timespec nap = {0, 1000000};
        MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, world_mpi.part[WORLD_ALL].comm, &there, MPI_STATUS_IGNORE);
        nanosleep(&nap, NULL);
    } while (cli_clock(NULL) < until);
}

static void world_mpi_stop(void)
{
    signal(SIGALRM, SIG_DFL);
    alarm(2); /* the launcher may not answer */
    MPI_Abort(MPI_COMM_WORLD, EXIT_RUN);
    _exit(EXIT_RUN);
}

/* Machines in the order of their first process, and on each the processes in theirs. */
static upipe_status world_mpi_place(struct world *w, const options *o, upipe_err *e)
{
    part_mpi *all = &world_mpi.part[WORLD_ALL];
    upipe_grid_part part = {0, 1, 0, 0};
    MPI_Comm near = MPI_COMM_NULL;
    int rank = 0, leader = 0, local = 0, bad;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    bad =
        MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &near) != MPI_SUCCESS;
    leader = rank;
    if (!bad)
        bad = MPI_Bcast(&leader, 1, MPI_INT, 0, near) != MPI_SUCCESS || MPI_Comm_free(&near) != MPI_SUCCESS;
    if (o->node_ranks > 0) leader = rank / o->node_ranks * o->node_ranks;
    if (bad) return upipe_fail(e, UPIPE_ERR_BACKEND, "MPI does not say which processes share a machine");
    part.rank = leader; /* those of one machine stay in their order */
    UPIPE_TRY(part_mpi_make(all, MPI_COMM_WORLD, part, w->deadline, e));
    if (MPI_Comm_split(all->comm, leader, 0, &near) != MPI_SUCCESS ||
        MPI_Comm_rank(near, &local) != MPI_SUCCESS || MPI_Comm_size(near, &w->near) != MPI_SUCCESS ||
        MPI_Comm_free(&near) != MPI_SUCCESS)
        return upipe_fail(e, UPIPE_ERR_BACKEND, "MPI makes no communicator of a machine");
    w->all = &all->end.comm;
    w->ranks = w->all->ranks;
    w->first = w->all->rank;
    w->here = 1;
    w->near_first = w->first - local;
    return UPIPE_OK;
}

/* MPI is started. 0, or -1 with the sentence out. */
static int world_mpi_begin(struct world *w, const options *o)
{
    static const world_kind kind = {world_mpi_make, world_mpi_end, world_mpi_flush, world_mpi_stop};
    upipe_err e;
    int i;
    w->kind = &kind;
    for (i = 0; i < WORLD_COMMS; ++i) world_mpi.part[i].comm = MPI_COMM_NULL;
    memset(&e, 0, sizeof e);
    world_mpi_watch(w, "MPI_Init");
    if (MPI_Init_thread(NULL, NULL, o->zero_prefetch ? MPI_THREAD_MULTIPLE : MPI_THREAD_SERIALIZED,
                        &world_mpi.level) != MPI_SUCCESS)
        return cli_fail("MPI does not start");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    world_mpi_watch(w, "MPI_Comm_split");
    if (world_mpi_place(w, o, &e) != UPIPE_OK) return cli_fail("%s", e.text);
    world_mpi_watch(w, NULL);
    if (w->first > 0) cli_holds = 1; /* whatever the launcher's environment says */
    if (w->ranks <= UPIPE_THREADS_MAX) return 0;
    return cli_fail("%d processes; a run has at most %d ranks", w->ranks, UPIPE_THREADS_MAX);
}

#endif
