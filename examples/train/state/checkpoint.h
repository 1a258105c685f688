/* checkpoint.h -- a model and its optimizer on the disk, whole or not at all
 *
 *     DIR/checkpoint-120/config.json              llama_config_write's
 *                        model.safetensors        matrices of the storage type, vectors f32; Hugging
 *                                                 Face's names
 *                        optimizer.safetensors    f32: exp_avg.NAME, exp_avg_sq.NAME, and in a bf16 run
 *                                                 master.NAME of the weights; the run's numbers as metadata
 *
 *     llama_save(c, world, "DIR", &state, &run, 2);                  on all ranks; keeps the 2 newest
 *     llama_checkpoint_find("DIR", path, &err);                      the newest
 *     llama_load_weights(c, path, &state, NULL);                     also another's model, in several files
 *     llama_load_optimizer(c, path, &state, &run);                   for any number of ranks
 *
 * A checkpoint is written as DIR/.checkpoint-N.tmp and renamed when all its bytes are on the disk. One that
 * is replaced waits as DIR/.checkpoint-N.old until the new one has its name; if the program stops in between,
 * that is the checkpoint. What is removed becomes a .tmp first. So a name without .tmp is whole whenever the
 * program or the machine stops. One program at a time may write to a DIR: llama_lock_init.
 *
 * Before a checkpoint gets its name its numbers have been found finite, and its headers have been read again.
 *
 * Device memory is reached through ops->copy and a host chunk of LLAMA_CHUNK bytes: ordinary (pageable)
 * memory, which a copy that is enqueued has read or filled when it returns, in CUDA too.
 *
 * checkpoint_run.h has the numbers of a run, and which elements a rank has; checkpoint_folder.h the names in DIR.
 */
#ifndef LLAMA_CHECKPOINT_H
#define LLAMA_CHECKPOINT_H

#include "adapter_save.h"
#include "checkpoint_load.h"
#include "checkpoint_save.h"

#endif
