/* gpu_cudnn.h -- cuDNN's attention as gpu.c measures it: the same tensors, forward and backward */
#ifndef GPU_CUDNN_H
#define GPU_CUDNN_H

#include "upipe/upipe.h"

typedef struct gpu_cudnn gpu_cudnn;

#ifdef __cplusplus
extern "C" {
#endif

/* Plans and workspace for these tensors; g->dk and g->dv are bf16 here, and written. lse is [heads][queries].
 * errors  UNSUPPORTED with cuDNN's own sentence, MEMORY, BACKEND; there is then nothing to close */
upipe_status gpu_cudnn_open(gpu_cudnn **out, const upipe_attn_grad *g, int deterministic, upipe_err *e);
upipe_status gpu_cudnn_fwd(upipe_ctx *c, gpu_cudnn *p, const upipe_attn_grad *g);
upipe_status gpu_cudnn_bwd(upipe_ctx *c, gpu_cudnn *p, const upipe_attn_grad *g);
void gpu_cudnn_close(gpu_cudnn *p);

#ifdef __cplusplus
}
#endif

#endif
