/* 07_tiles.c -- MLP and loss by tiles of tokens: the same bits for every tile, and the memory of one tile
 *
 *     cc -O2 -march=native -I . examples/07_tiles.c -lm && ./a.out
 */
#include <stdio.h>
#include <stdlib.h>

#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

enum { ROWS = 512, DIM = 64, HIDDEN = 192, VOCAB = 1000, W = HIDDEN * DIM, BLOCKS = 16, SLAB = 16 << 20 };

typedef struct weights {
    float gate[W], up[W], down[W], norm_weight[DIM], table[VOCAB * DIM];
} weights;

typedef struct tensors {
    weights w, small, large; /* and the gradients with small and with large tiles */
    float x[ROWS * DIM], stream[ROWS * DIM], losses[ROWS];
    int32_t targets[ROWS];
} tensors;

/* Forward, loss and backward of ROWS tokens; returns the mean loss, or -1. */
static double pass(upipe_ctx *c, tensors *t, weights *grad, size_t tile_bytes)
{
    const weights *w = &t->w;
    upipe_view x = upipe_view_packed(t->x, UPIPE_F32, ROWS, 1, DIM);
    upipe_view y = upipe_view_packed(t->stream, UPIPE_F32, ROWS, 1, DIM);
    upipe_mlp mlp = {0};
    upipe_loss head = {0};
    upipe_mlp_grads mlp_grads = {grad->gate, grad->up, grad->down, grad->norm_weight, NULL};
    upipe_loss_grads head_grads = {grad->table, NULL};
    double sum = 0;
    mlp.w_gate = w->gate, mlp.w_up = w->up, mlp.w_down = w->down, mlp.hidden = HIDDEN;
    mlp.norm_weight = w->norm_weight, mlp.norm_eps = 1e-5f, mlp.residual = 1, mlp.tile_bytes = tile_bytes;
    head.w = w->table, head.vocab = VOCAB, head.scale = 1.0f / ROWS, head.tile_bytes = tile_bytes;
    if (upipe_mlp_fwd(c, &mlp, y, x)) return -1; /* y = x + mlp(norm(x)) */
    if (upipe_loss_bwd(c, &head, y, &head_grads, t->losses, y, t->targets)) return -1; /* y: its gradient */
    if (upipe_mlp_bwd(c, &mlp, y, &mlp_grads, y, x)) return -1;                        /* ... that of x */
    for (int i = 0; i < ROWS; ++i) sum += (double)t->losses[i];
    return sum / ROWS;
}

int main(void)
{
    static tensors t;
    const size_t budget[2] = {384 << 10, 8 << 20}; /* some tokens, or all of them */
    float *w = (float *)(void *)&t.w;
    void *slab = aligned_alloc(UPIPE_MEM_ALIGN, SLAB);
    upipe_mem_block blocks[BLOCKS];
    upipe_ops ops;
    upipe_ctx c = {0};
    double loss[2];
    int same;
    if (slab == NULL) return fprintf(stderr, "no memory\n"), 1;
    upipe_cpu_ops(&ops);
    c.ops = &ops;
    for (int i = 0; i < (int)(sizeof t.w / sizeof *w); ++i) w[i] = (float)(i * 37 % 101 - 50) / 400;
    for (int i = 0; i < ROWS * DIM; ++i) t.x[i] = (float)(i * 53 % 89 - 44) / 25;
    for (int i = 0; i < ROWS; ++i) t.targets[i] = i % 10 == 0 ? -1 : i * 7 % VOCAB; /* -1: ignored */
    for (int k = 0; k < 2; ++k) {
        upipe_mem mem;
        upipe_mem_init(&mem, slab, SLAB, blocks, BLOCKS);
        c.mem = &mem;
        loss[k] = pass(&c, &t, k == 0 ? &t.small : &t.large, budget[k]);
        if (loss[k] < 0) return fprintf(stderr, "%s\n", c.err.text), 1;
        printf("tiles of %7zu bytes, and scratch: loss %.6f, peak of the pool %zu bytes\n", budget[k],
               loss[k], mem.peak);
        if (upipe_mem_destroy(&mem, &c.err)) return fprintf(stderr, "%s\n", c.err.text), 1;
    }
    same = loss[0] == loss[1] && memcmp(&t.small, &t.large, sizeof t.small) == 0;
    printf("losses and gradients: %s\n", same ? "the same bits" : "different");
    free(slab);
    return fflush(stdout) != 0 || !same;
}
