/* device_table.cu -- the CUDA table for the C programs beside it */
#include "upipe/cuda/upipe_cuda.h"

UPIPE_EXPORT_OPS(device_cuda_ops, upipe_cuda_ops)
