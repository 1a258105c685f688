/* 07_tiles.c -- MLP and loss by tiles of tokens: the same bits for every tile, and the memory of one tile */
#include <stdlib.h>

#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

enum { ROWS = 512, DIM = 64, HIDDEN = 192, VOCAB = 1000, W = HIDDEN * DIM, BLOCKS = 16 };

typedef struct weights {
    float gate[W], up[W], down[W], gain[DIM], table[VOCAB * DIM];
} weights;

/* Forward, loss and backward of ROWS tokens; returns the mean loss, or -1. */
static double pass(upipe_ctx *c, const weights *w, weights *grad, const float *data, const int32_t *targets,
                   size_t tile_bytes)
{
    static float stream[ROWS * DIM], losses[ROWS];
    upipe_view x = upipe_view_packed((void *)(uintptr_t)data, UPIPE_F32, ROWS, 1, DIM);
    upipe_view y = upipe_view_packed(stream, UPIPE_F32, ROWS, 1, DIM);
    upipe_mlp mlp = {0};
    upipe_head head = {0};
    upipe_mlp_grads mlp_grads = {grad->gate, grad->up, grad->down, grad->gain};
    upipe_head_grads head_grads = {grad->table, NULL};
    double sum = 0;
    int i;
    mlp.w_gate = w->gate, mlp.w_up = w->up, mlp.w_down = w->down, mlp.hidden = HIDDEN;
    mlp.gain = w->gain, mlp.norm_eps = 1e-5f, mlp.residual = 1, mlp.tile_bytes = tile_bytes;
    head.w = w->table, head.vocab = VOCAB, head.scale = 1.0f / ROWS, head.tile_bytes = tile_bytes;
    if (upipe_mlp_fwd(c, &mlp, y, x)) return -1;                                 /* y = x + mlp(norm(x)) */
    if (upipe_loss_bwd(c, &head, y, &head_grads, losses, y, targets)) return -1; /* y becomes its gradient */
    if (upipe_mlp_bwd(c, &mlp, y, &mlp_grads, y, x)) return -1;                  /* ... that of x */
    for (i = 0; i < ROWS; ++i) sum += (double)losses[i];
    return sum / ROWS;
}

int main(void)
{
    static weights w, small, large;
    static float x[ROWS * DIM], *all = (float *)(void *)&w;
    static int32_t targets[ROWS];
    const size_t budget[2] = {64 << 10, 8 << 20}; /* a few tokens, or all of them */
    const size_t slab_bytes = 16 << 20;
    void *slab = aligned_alloc(UPIPE_MEM_ALIGN, slab_bytes);
    upipe_block blocks[BLOCKS];
    upipe_ops ops;
    double loss[2];
    int i, k;
    for (i = 0; i < (int)(sizeof w / sizeof *all); ++i) all[i] = (float)(i * 37 % 101 - 50) / 400;
    for (i = 0; i < ROWS * DIM; ++i) x[i] = (float)(i * 53 % 89 - 44) / 25;
    for (i = 0; i < ROWS; ++i) targets[i] = i % 10 == 0 ? -1 : i * 7 % VOCAB; /* every tenth is ignored */
    upipe_cpu_ops(&ops);
    for (k = 0; k < 2 && slab != NULL; ++k) {
        upipe_mem mem;
        upipe_ctx c = {0};
        upipe_mem_init(&mem, slab, slab_bytes, blocks, BLOCKS);
        c.ops = &ops, c.mem = &mem;
        loss[k] = pass(&c, &w, k == 0 ? &small : &large, x, targets, budget[k]);
        if (loss[k] < 0) return fprintf(stderr, "%s\n", c.err.text), 1;
        printf("tiles of %7zu bytes, and scratch: loss %.6f, peak of the pool %zu bytes\n", budget[k],
               loss[k], mem.peak);
        upipe_mem_free(&mem, NULL);
    }
    if (slab == NULL) return 1;
    free(slab);
    printf("gradients: %s\n", memcmp(&small, &large, sizeof small) == 0 ? "the same bits" : "different");
    return loss[0] != loss[1] || memcmp(&small, &large, sizeof small) != 0;
}
