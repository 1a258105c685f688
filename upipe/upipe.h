/* upipe.h -- context parallelism for long-context training, in C: all of the core
 *
 * What this library does NOT do: no training loop, no autograd, no tensor type beyond a view, no allocation,
 * no threads, no communicators or streams of its own, no printing, no exit, no global state. It does not own
 * weights, optimizers or data. It does not choose a backend: include one yourself (cpu/upipe_cpu.h or
 * cuda/upipe_cuda.h; one of net/).
 *
 * What it does: DeepSpeed-Ulysses and UPipe ("Untied Ulysses") as primitives that a trainer assembles into
 * its own forward and backward passes, exact, with the memory known to the byte before it runs; alone, over a ring of
 * ranks, and in segments of the sequence with the host's memory behind them.
 *
 *     #include "upipe/upipe.h"
 *     #include "upipe/cpu/upipe_cpu.h"
 *
 *     upipe_plan_init(&plan, &desc, &err);           heads and bytes in closed form           upipe_plan.h
 *     upipe_dry_block(dry, &layer, 1);               slab size, before anything is allocated  upipe_dry.h
 *     upipe_cpu_ops(&ops);                           a compute table                          upipe_ops.h
 *     upipe_mem_init(&mem, slab, bytes, blocks, n);  the pool                                 upipe_mem.h
 *     ctx.ops = &ops; ctx.mem = &mem; ctx.team = team of C ranks;                             upipe_comm.h
 *
 *     upipe_layer_fwd(&ctx, &layer, &saved, x);                                               upipe_layer.h
 *     upipe_layer_out_fwd(&ctx, &layer, y, &saved);                                           upipe_out.h
 *     upipe_layer_out_bwd(&ctx, &layer, &grads, &saved, dy);
 *     upipe_layer_bwd(&ctx, &layer, x, &grads, &saved, &saved.out, x);
 *     upipe_saved_free(&ctx, &saved);
 *
 *     upipe_mlp_fwd(&ctx, &mlp, y, x);   upipe_loss_bwd(...);   the rest of a layer, by tiles   upipe_tile.h
 *     upipe_reduce_scatter(&ctx, gradients, n);             sums over ranks                 upipe_a2a.h
 *
 *     desc.ring = R; ctx.ring = ring of R ranks;                ring attention, USP, UPipe x ring   upipe_ring.h
 *     upipe_shard_pos(&plan.shard, i);                          which token row i of a rank is      upipe_shard.h
 *     upipe_fpdt_fwd(&ctx, &fpdt, &saved, x);                   FPDT, UPipe x FPDT                  upipe_fpdt.h
 *
 * Every part serves alone: a trainer with a forward of its own may use the plan, the pool and the exchange
 * (upipe_a2a.h), a ring (upipe_ring.h), or attention by itself (upipe_attn.h). Each header opens with its layouts and an example.
 */
#ifndef UPIPE_H
#define UPIPE_H

#include "upipe_base.h"
#include "upipe_shard.h"
#include "upipe_plan.h"
#include "upipe_sent.h"
#include "upipe_bytes.h"
#include "upipe_mem.h"
#include "upipe_ops.h"
#include "upipe_comm.h"
#include "upipe_agree.h"
#include "upipe_unwind.h"
#include "upipe_a2a.h"
#include "upipe_reduce.h"
#include "upipe_attn.h"
#include "upipe_ring.h"
#include "upipe_side_stream.h"
#include "upipe_layer.h"
#include "upipe_fpdt.h"
#include "upipe_tile.h"
#include "upipe_dry.h"

#endif
