/* main.c -- a host program as small as one can be: a plan, a pool, a team of one, a step on a thread of its own
 *
 * run.sh builds it in every way that docs/config.md names, with the version that a package says it has as
 * PACKAGE_VERSION. The square root and the thread are there to need what the dependency must bring.
 */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#include "step.h"

typedef struct job {
    upipe_ctx *ctx;
    const upipe_plan *plan;
    upipe_status status;
} job;

static upipe_status copy(upipe_ctx *ctx, void *dst, const void *src, size_t bytes)
{
    (void)ctx;
    memcpy(dst, src, bytes);
    return UPIPE_OK;
}

static void *run_step(void *argument)
{
    job *j = (job *)argument;
    j->status = step(j->ctx, j->plan);
    return NULL;
}

int main(int argc, char **argv)
{
    upipe_plan_desc desc;
    upipe_plan plan;
    upipe_mem mem;
    upipe_mem_block blocks[8];
    upipe_comm team;
    upipe_comm_self_state buf;
    upipe_ctx ctx;
    pthread_t thread;
    job j;
    char version[32];
    size_t slab_bytes = (size_t)1 << 20;
    void *slab = aligned_alloc(UPIPE_MEM_ALIGN, slab_bytes);
    int failed = 1;
    (void)argv;

    snprintf(version, sizeof version, "%d.%d.%d", UPIPE_VERSION / 10000, UPIPE_VERSION / 100 % 100,
             UPIPE_VERSION % 100);
#ifdef PACKAGE_VERSION
    if (strcmp(version, PACKAGE_VERSION) != 0)
        return fprintf(stderr, "consumer: headers of %s in package %s\n", version, PACKAGE_VERSION), 1;
#endif
    memset(&desc, 0, sizeof desc);
    memset(&ctx, 0, sizeof ctx);
    memset(&j, 0, sizeof j);
    desc.tokens = 64;
    desc.heads = 4;
    desc.head_dim = 32;
    if (slab == NULL || upipe_plan_init(&plan, &desc, &ctx.err) != UPIPE_OK) goto done;
    upipe_mem_init(&mem, slab, slab_bytes, blocks, 8);
    upipe_comm_self(&team, &buf, copy);
    ctx.mem = &mem;
    ctx.team = &team;

    j.ctx = &ctx;
    j.plan = &plan;
    if (pthread_create(&thread, NULL, run_step, &j) != 0 || pthread_join(thread, NULL) != 0) goto done;
    failed = j.status != UPIPE_OK || mem.live != 0 || mem.peak != 2 * upipe_plan_unit_bytes(&plan);
    printf("upipe %s, %d stages, root of the scale %.4f, peak %zu bytes\n", version, plan.stages,
           sqrt(1.0 / (plan.desc.head_dim * argc)), mem.peak);
done:
    if (failed)
        fprintf(stderr, "consumer: %s\n", ctx.err.status ? ctx.err.text : "not the peak that was planned");
    free(slab);
    return failed;
}
