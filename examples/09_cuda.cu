/* 09_cuda.cu -- the kernels of 09_cuda.c, and the tables that reach them: of all compute, and of linear attention */
#include "upipe/cuda/upipe_cuda.h"
#include "upipe/cuda/upipe_cuda_linear.h"

UPIPE_EXPORT_OPS(app_ops, upipe_cuda_ops)
UPIPE_EXPORT_LINEAR(app_linear, upipe_cuda_linear)
