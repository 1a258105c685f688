/* device_table.cu -- the CUDA table and rules for the C programs beside it */
#include "upipe/cuda/upipe_cuda.h"
#include "upipe/cuda/upipe_cuda_linear.h"

UPIPE_EXPORT_OPS(device_cuda_ops, upipe_cuda_ops)
UPIPE_EXPORT_LINEAR(device_cuda_linear, upipe_cuda_linear)
