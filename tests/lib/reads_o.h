/* reads_o.h -- a compute table whose backward of attention reads O
 *
 *     upipe_ops ops = cpu_table();
 *     table_reads_o(&ops);
 *
 * As in cuDNN and FlashAttention: delta comes from O and dO, in the backward itself, and what the block has sent is not read.
 * Gradients have the bits of the table as it was.
 */
#ifndef UPIPE_TEST_READS_O_H
#define UPIPE_TEST_READS_O_H

#include "upipe/upipe.h"

#include "test.h"

static upipe_status (*reads_o_base)(upipe_ctx *c, const upipe_attn_grad *g);

static upipe_status reads_o_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    float *delta = (float *)malloc((size_t)(g->delta.n * g->delta.h + 1) * sizeof *delta);
    upipe_attn_grad own = *g;
    upipe_status s;
    if (delta == NULL) abort();
    own.delta = upipe_view_packed(delta, UPIPE_F32, g->delta.n, g->delta.h, 1);
    s = c->ops->rowdot(c, own.delta, g->a.o, g->dout);
    if (s == UPIPE_OK) s = reads_o_base(c, &own);
    free(delta);
    return s;
}

static void table_reads_o(upipe_ops *ops)
{
    reads_o_base = ops->attn_bwd;
    ops->attn_bwd = reads_o_bwd;
    ops->attn_reads_o = 1;
}

#endif
