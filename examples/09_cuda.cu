/* 09_cuda.cu -- the kernels of 09_cuda.c, and the table that reaches them */
#include "upipe/cuda/upipe_cuda.h"

UPIPE_EXPORT_OPS(app_ops, upipe_cuda_ops)
