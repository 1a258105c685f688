/* launch.h -- processes that a launcher has started: who they are
 *
 *     launch l;
 *     int status = launch_read(&l);                            mpirun, srun, torchrun, or variables set by
 *                                                              hand
 *     if (status != 0) return status - 1;                      the sentence is out
 */
#ifndef COMMON_LAUNCH_H
#define COMMON_LAUNCH_H

#include "cli.h"

typedef struct launch {
    const char *address; /* where rank 0 listens; with a slash: a file */
    int rank, ranks;
    int local; /* rank on this machine: the device to use */
    int port;
    int first, step; /* of a part of the ranks: its rank i is rank first + i * step. 0, 0: all */
} launch;

/* What a rank is called in a sentence. */
static inline int launch_called(const launch *l, int rank)
{
    return l->first + rank * (l->step > 0 ? l->step : 1);
}

/* "; missing: ranks 3, 5": of the ranks behind rank 0 those that have not come, the first eight by number. */
static inline void launch_missing(const launch *l, const char *come, char *text, size_t bytes)
{
    int r, at, missing = 0, shown = 0;
    for (r = 1; r < l->ranks; ++r) missing += !come[r];
    at = snprintf(text, bytes, "; missing: rank%s", missing > 1 ? "s" : "");
    for (r = 1; r < l->ranks; ++r)
        if (!come[r] && shown < 8)
            at += snprintf(text + at, bytes - (size_t)at, shown++ > 0 ? ", %d" : " %d", launch_called(l, r));
    if (missing > shown) snprintf(text + at, bytes - (size_t)at, " and %d more", missing - shown);
}

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
    static const char *const ack[] = {"TORCHELASTIC_USE_AGENT_STORE", NULL};
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
    if (launch_first(ack) != NULL && strcmp(launch_first(ack), "True") == 0)
        ++l->port; /* torchrun's own store listens there */
    return 0;
}

#endif
