/* estimate.h -- what a plan comes to: bytes of the largest rank and the fullest node, and an estimate of the time
 *
 * Filled by exact.h, from the trainer's own code, and by as.h, of other programs. Bytes and FLOPs
 * are counted; seconds are an estimate, as good as the rates of the machine file.
 */
#ifndef PLAN_ESTIMATE_H
#define PLAN_ESTIMATE_H

#include "../train/model/setting.h"
#include "machine.h"

enum { ESTIMATE_PARTS = 24, ESTIMATE_WHY = 256 };

/* A phase, or a component: its bytes at the peak. */
typedef struct estimate_part {
    const char *name;
    double bytes;
} estimate_part;

/* Shares of a step, in the order of the paper's runtime table, and what the host's CPU updates. */
enum {
    SHARE_A2A,
    SHARE_ATTN_FWD,
    SHARE_ATTN_BWD,
    SHARE_DENSE,
    SHARE_RING,
    SHARE_HOST,
    SHARE_STATES,
    SHARE_UPDATE,
    SHARE_OTHER,
    SHARES
};

static const char *const share_names[SHARES] = {"all_to_all", "attention_forward", "attention_backward",
                                                "dense",      "ring_and_sums",     "host_link",
                                                "states",     "host_update",       "other"};

/* What a rank does in a step: FLOPs and bytes. */
typedef struct estimate_work {
    double attn_fwd, attn_bwd, products;
    double team, ring, states; /* sent; of states beside kernels */
    double exposed;            /* of states that nothing runs beside */
    double moved, waited;      /* between device and host: beside kernels, and while they wait */
    double segments;           /* the same of FPDT's chunks as PyTorch moves them */
    double updated,
        returned;   /* of the host's memory in the CPU's update; between it and the device meanwhile */
    double merged;  /* read and written to merge a ring's partial results */
    double stages;  /* passes through a stage beyond the first of a layer */
    double started; /* seconds of starting the layers' kernels */
} estimate_work;

typedef struct estimate {
    char why[ESTIMATE_WHY]; /* not empty: this is no setting, and nothing else is filled in */
    double gpu, host;       /* bytes of it and of the fullest node */
    double live;            /* of gpu, without alignment and holes */
    double spared;          /* of the machine's reserve, that gpu has */
    estimate_part phase[ESTIMATE_PARTS], part[ESTIMATE_PARTS];
    int phases, parts;
    estimate_work work;
    double seconds, share[SHARES];
} estimate;

/* estimate_memory -- n zeroed elements; where this machine's memory is out the program ends. A setting that was not planned
 *                    must not pass for one that does not fit */
static inline void *estimate_memory(size_t n, size_t size)
{
    void *p = calloc(n, size);
    if (p != NULL) return p;
    cli_fail("out of memory: %zu bytes to plan with", n * size);
    exit(EXIT_RUN);
}

static inline void estimate_phase(estimate *e, const char *name, double bytes)
{
    e->phase[e->phases].name = name;
    e->phase[e->phases++].bytes = bytes;
}

static inline void estimate_add(estimate *e, const char *name, double bytes)
{
    e->part[e->parts].name = name;
    e->part[e->parts++].bytes = bytes;
}

/* Bytes between a rank's device and the host in a step. */
static inline double estimate_link(const estimate *e)
{
    const estimate_work *w = &e->work;
    return w->moved + w->waited + w->segments + w->returned;
}

/* How long the work takes on this machine, of `team` ranks that trade heads, of `ranks`. */
static inline void estimate_time(estimate *e, const machine *m, int ranks, int team)
{
    const estimate_work *w = &e->work;
    const double *rate = m->rate;
    const int nodes = ranks > m->ranks_node, near = nodes ? m->ranks_node : ranks;
    const double away = team > m->ranks_node ? (double)(team - m->ranks_node) / (team - 1) : 0;
    const double beside = rate[nodes ? MACHINE_RING_NODES : MACHINE_RING];
    double compute, attn;
    int k;
    e->share[SHARE_ATTN_FWD] = w->attn_fwd / rate[MACHINE_ATTN_FWD];
    e->share[SHARE_ATTN_BWD] = w->attn_bwd / rate[MACHINE_ATTN_BWD];
    e->share[SHARE_DENSE] = w->products / rate[MACHINE_DENSE];
    attn = e->share[SHARE_ATTN_FWD] + e->share[SHARE_ATTN_BWD];
    compute = attn + e->share[SHARE_DENSE];
    e->share[SHARE_A2A] = w->team * ((1 - away) / rate[MACHINE_A2A] + away / rate[MACHINE_A2A_NODES]);
    /* what runs beside the kernels takes what it takes longer than they */
    e->share[SHARE_RING] = fmax(0, w->ring / beside - attn) + w->merged / rate[MACHINE_MERGE];
    if (ranks > 1) e->share[team > 1 ? SHARE_A2A : SHARE_RING] += attn * rate[MACHINE_WAIT];
    e->share[SHARE_STATES] = fmax(0, w->states / beside - compute) + w->exposed / beside;
    e->share[SHARE_HOST] = fmax(0, w->moved / rate[MACHINE_HOST] - compute) + w->waited / rate[MACHINE_HOST] +
                           w->segments / rate[MACHINE_SEGMENTS];
    e->share[SHARE_UPDATE] = fmax(w->updated * near / rate[MACHINE_UPDATE], w->returned / rate[MACHINE_HOST]);
    e->share[SHARE_OTHER] = w->started + w->stages * rate[MACHINE_STAGE];
    for (k = 0, e->seconds = 0; k < SHARES; ++k) e->seconds += e->share[k];
}

/* ---- against the machine ---- */

/* gpu_over, host_over: bytes missing; below 0 they are left */
typedef struct verdict {
    int fits;
    const char *binding; /* the resource that is the fullest, as a part of what there is */
    double gpu_limit, host_limit, gpu_over, host_over;
} verdict;

/* Bytes as a part of what there is. */
static inline double estimate_full(double bytes, double limit)
{
    return limit > 0 ? bytes / limit : bytes > 0 ? INFINITY : 0;
}

static inline verdict estimate_verdict(const estimate *e, const machine *m)
{
    verdict v;
    v.gpu_limit = (double)(m->gpu - m->reserve) + e->spared;
    v.host_limit = (double)m->host;
    v.gpu_over = m->gpu > 0 ? e->gpu - v.gpu_limit : -1;
    v.host_over = e->host - v.host_limit;
    v.fits = v.gpu_over <= 0 && v.host_over <= 0;
    v.binding = m->gpu > 0 && estimate_full(e->gpu, v.gpu_limit) >= estimate_full(e->host, v.host_limit)
                    ? "gpu"
                    : "host";
    return v;
}

#endif
