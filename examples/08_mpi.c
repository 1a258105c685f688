/* 08_mpi.c -- one rank a process, over MPI: the attention block by all processes, and again by each one alone
 *
 *     mpicc -O2 -march=native -I . examples/08_mpi.c -lm && mpirun -np 4 ./a.out
 *     mpirun -np 4 ./a.out 5                  a rank waits for the others for 5 s at most; by default for 30
 *
 * Any number of processes will do. All get the same bits both ways, or say why they have no result.
 */
#include "upipe/net/upipe_net_mpi.h" /* needs POSIX clocks: include it first */
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

#include <fcntl.h>

enum { HEADS = 2, DIM = 32, LOCAL = 32, BLOCKS = 64 }; /* heads and tokens a rank */

/* Forward and backward of this rank's tokens, x0; the loss is |out|^2 / 2, so the gradient of out is out. */
static upipe_status step(upipe_ctx *c, const upipe_layer *layer, float *dx, const float *x0)
{
    const upipe_plan *p = layer->plan;
    upipe_grads grads = {0}; /* those of the weights are not wanted here */
    upipe_saved saved;
    upipe_slots dout;
    upipe_view x;
    void *data;
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, upipe_plan_unit_bytes(p), UPIPE_USE_OTHER, "x", &c->err));
    memcpy(data, x0, upipe_plan_unit_bytes(p));
    x = upipe_view_packed(data, UPIPE_F32, p->rows, 1, (int32_t)p->desc.model_dim);
    UPIPE_TRY(upipe_layer_fwd(c, layer, &saved, x));
    UPIPE_TRY(upipe_slots_alloc(c, p, &dout, UPIPE_SLOT_FULL, "dout"));
    memcpy(dout.data, saved.out.data, upipe_plan_rows_bytes(p, p->desc.heads, DIM));
    UPIPE_TRY(upipe_layer_bwd(c, layer, x, &grads, &saved, &dout, x)); /* x becomes its gradient */
    memcpy(dx, data, upipe_plan_unit_bytes(p));
    UPIPE_TRY(upipe_mem_free(c->mem, dout.data, &c->err));
    return upipe_mem_free(c->mem, data, &c->err);
}

/* The step by c->team, over LOCAL tokens of each of `parts` ranks, in a slab of exactly the size that it takes. */
static upipe_status run(upipe_ctx *c, int parts, const float *w, float *dx, const float *x)
{
    static upipe_dry dry; /* too large for some stacks */
    upipe_mem_block blocks[BLOCKS];
    upipe_mem mem;
    upipe_plan plan;
    upipe_plan_desc d = {0};
    upipe_layer layer = {0};
    upipe_status s;
    void *slab;
    d.tokens = LOCAL * parts, d.heads = HEADS * parts, d.head_dim = DIM, d.chunk = parts;
    d.ranks = c->team->ranks, d.rank = c->team->rank;
    UPIPE_TRY(upipe_plan_init(&plan, &d, &c->err));
    layer.plan = &plan, layer.mask.causal = 1;
    layer.wq = layer.wk = layer.wv = w; /* one matrix will do here */
    if (upipe_dry_init(&dry, &plan, c->ops) || upipe_dry_layer(&dry, &layer, 1))
        return c->err = dry.ctx.err, dry.ctx.err.status;
    slab = aligned_alloc(UPIPE_MEM_ALIGN, dry.mem.need);
    upipe_mem_init(&mem, slab, slab != NULL ? dry.mem.need : 0, blocks, BLOCKS);
    c->mem = &mem;
    s = step(c, &layer, dx, x);
    if (s == UPIPE_OK) free(slab); /* else a late peer may read it as long as this process lives */
    return s;
}

/* The step by the team and alone: the gradients of this rank's tokens must have the same bits. */
static upipe_status compare(upipe_ctx *c)
{
    upipe_comm self;
    upipe_comm_self_state state;
    upipe_ctx alone = *c; /* the same rank in a team of its own */
    const int ranks = c->team->ranks, model = HEADS * ranks * DIM, part = LOCAL * model, all = ranks * part;
    float *w = (float *)malloc((size_t)(model * model + 2 * all + part) * sizeof *w);
    float *x, *expected, *dx;
    upipe_status s;
    if (w == NULL) return upipe_fail(&c->err, UPIPE_ERR_MEMORY, "no memory for inputs and gradients");
    x = w + model * model, expected = x + all, dx = expected + all;
    for (int i = 0; i < model * model; ++i) w[i] = (float)sin(i * 0.37) / 16;
    for (int i = 0; i < all; ++i) x[i] = (float)cos(i * 0.11);
    s = run(c, ranks, w, dx, x + part * c->team->rank);
    upipe_comm_self(&self, &state, c->ops->copy);
    alone.team = &self;
    if (s == UPIPE_OK && (s = run(&alone, ranks, w, expected, x)) != UPIPE_OK) c->err = alone.err;
    expected += part * c->team->rank;
    for (int i = 0; s == UPIPE_OK && i < part; ++i)
        if (!(dx[i] == expected[i])) /* nor is a NaN */
            s = upipe_fail(&c->err, UPIPE_ERR_MISMATCH, "a gradient is %g, and %g alone", (double)dx[i],
                           (double)expected[i]);
    free(w);
    return s;
}

static int fail(const char *why)
{
    fprintf(stderr, "08_mpi: %s\n", why);
    return 1;
}

int main(int argc, char **argv)
{
    const double deadline = argc > 1 ? atof(argv[1]) : 30;
    upipe_ops ops;
    upipe_mpi team;
    upipe_ctx c = {0};
    upipe_status s;
    MPI_Comm mpi;
    for (int fd = 0; fd <= 2; ++fd) /* else what MPI opens would be stdout, where that is closed */
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDONLY) < 0) return fail("no /dev/null");
    if (argc > 2 || !(deadline > 0)) return fail("usage: mpirun -np N 08_mpi [SECONDS]") + 1;
    if (MPI_Init(NULL, NULL) != MPI_SUCCESS || MPI_Comm_dup(MPI_COMM_WORLD, &mpi) != MPI_SUCCESS)
        return fail("MPI does not start");
    MPI_Comm_set_errhandler(mpi, MPI_ERRORS_RETURN); /* a failure is a status */
    if (upipe_mpi_init(&team, mpi, 0, deadline, &c.err)) return fail(c.err.text);
    upipe_cpu_ops(&ops);
    c.ops = &ops, c.team = &team.comm;
    s = compare(&c);
    if (s == UPIPE_OK) s = upipe_comm_barrier(&c, c.team); /* so have the others */
    if (s != UPIPE_OK) {
        upipe_comm_abort(c.team, c.err.text); /* the others wait for this rank */
        fprintf(stderr, "08_mpi: rank %d: no result: %s\n", c.team->rank, c.err.text);
        upipe_mpi_free(&team, &c.err);
        return 1; /* without MPI_Finalize, which may wait for a rank that is dead */
    }
    if (c.team->rank == 0)
        printf("%d processes over mpi, kernels %s, %lld bytes sent by each\n"
               "gradient of x: the same bits as those of one rank alone\n",
               c.team->ranks, ops.name, (long long)c.team->sent_bytes);
    if (upipe_mpi_free(&team, &c.err)) return fail(c.err.text);
    MPI_Comm_free(&mpi);
    if (MPI_Finalize() != MPI_SUCCESS) return fail("MPI does not end");
    return fflush(stdout) == 0 && !ferror(stdout) ? 0 : fail("the result cannot be written");
}
