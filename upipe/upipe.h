/* upipe.h -- context parallelism for long-context training, in C: all of the core
 *
 * What this library does NOT do: no training loop, no autograd, no tensor type beyond a view, no allocation,
 * no threads, no communicators or streams of its own, no printing, no exit, no global state. It does not own
 * weights, optimizers or data. It does not choose a backend: include one yourself (cpu/upipe_cpu.h or
 * cuda/upipe_cuda.h; one of net/).
 *
 * What it does: DeepSpeed-Ulysses and UPipe ("Untied Ulysses") as primitives that a trainer assembles into
 * its own forward and backward passes. Results are exact, and the memory is known to the byte before anything
 * runs. Both combine with ring attention (USP) and with segments of the sequence that are offloaded to the
 * host (FPDT).
 *
 *     #include "upipe/upipe.h"
 *     #include "upipe/cpu/upipe_cpu.h"
 *
 *     desc.rank = rank;                                  each rank has a plan of its own:
 *     upipe_plan_init(&plan, &desc, &err);               stages, rounds, heads               upipe_plan.h
 *     upipe_cpu_ops(&ops);                               the compute table                   upipe_ops.h
 *     layer.plan = &plan; layer.mask.causal = 1;         and the weights                     upipe_layer.h
 *     upipe_dry_init(dry, &plan, &ops);                  a dry run allocates nothing and finds
 *     upipe_dry_block(dry, &layer, 1);                   the slab's size: dry->mem.need      upipe_dry.h
 *     upipe_mem_init(&mem, slab, bytes, blocks, n);      the pool                            upipe_mem.h
 *     ctx.ops = &ops; ctx.mem = &mem; ctx.team = &team;  a team of C ranks                   upipe_comm.h
 *
 *     upipe_layer_fwd(&ctx, &layer, &saved, x);          the attention block                 upipe_layer.h
 *     upipe_layer_out_fwd(&ctx, &layer, y, &saved);
 *     upipe_layer_out_bwd(&ctx, &layer, &grads, &saved, dy);
 *     upipe_layer_bwd(&ctx, &layer, dx, &grads, &saved, &saved.out, x);
 *     upipe_saved_free(&ctx, &saved);
 *
 *     upipe_qkv_fwd(&ctx, &qkv, &saved);                 attention of your own Q, K, V       upipe_qkv.h
 *     upipe_qkv_bwd(&ctx, &qkv, &grads, &saved);
 *
 *     upipe_latent_layer_fwd(&ctx, &l, &saved, xq, &kv); K and V of a latent (MLA)           upipe_latent_layer.h
 *     upipe_latent_fwd(&ctx, &latent, &saved);           the same, with your own Q           upipe_latent.h
 *
 *     upipe_session_open(&h, &desc);  ...                plan, dry run, pool and context     upipe_session.h
 *
 *     upipe_mlp_fwd(&ctx, &mlp, y, x);                   MLP and loss, by tiles of tokens    upipe_mlp.h
 *     upipe_all_reduce(&ctx, ctx.team, dwq, n);          sums over the ranks of a team       upipe_reduce.h
 *     upipe_zero_weights_begin(&ctx, &zero, unit, &w);   states sharded over all ranks       upipe_zero.h
 *
 *     upipe_scan_fwd(&ctx, ctx.team, &s, &states, NULL); a state over ranks, by a rule       upipe_scan.h
 *     upipe_linear_fwd(&ctx, &rules, &linear);           rules of linear attention           upipe_linear.h
 *     upipe_linear_layer_fwd(&ctx, ctx.team, &l, ...);   a layer of it                       upipe_linear_layer.h
 *
 *     desc.ring = R; ctx.ring = &ring;                   ring attention, USP, UPipe x ring   upipe_ring.h
 *     upipe_plan_row(&plan, r);                          which token row r of a rank is      upipe_plan.h
 *     upipe_fpdt_fwd(&ctx, &fpdt, &saved, x);            FPDT, UPipe x FPDT                  upipe_fpdt.h
 *
 * Every part can be used alone. A trainer with a forward of its own may use the plan, the pool and the
 * all-to-alls (upipe_a2a.h), attention of a stage and a ring (upipe_ring.h), or attention by itself
 * (upipe_attn.h). What a stage loads, attends and stores is in stage/stage.h. Each header begins with its
 * layouts and an example.
 */
#ifndef UPIPE_H
#define UPIPE_H

#include "upipe_base.h"
#include "upipe_mem.h"
#include "upipe_ops.h"
#include "upipe_comm.h"
#include "upipe_reduce.h"
#include "upipe_plan.h"
#include "upipe_a2a.h"
#include "upipe_attn.h"
#include "upipe_ring.h"
#include "upipe_layer.h"
#include "upipe_qkv.h"
#include "upipe_latent.h"
#include "upipe_latent_layer.h"
#include "upipe_fpdt.h"
#include "upipe_scan.h"
#include "upipe_linear.h"
#include "upipe_linear_layer.h"
#include "upipe_mlp.h"
#include "upipe_zero.h"
#include "upipe_dry.h"
#include "upipe_session.h"

#endif
