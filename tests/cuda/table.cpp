/* table.cpp -- the one unit with kernels: the table and the rules, for test programs in C and for the examples */
#include "upipe/cuda/upipe_cuda.h"
#include "upipe/cuda/upipe_cuda_linear.h"

UPIPE_EXPORT_OPS(app_ops, upipe_cuda_ops)
UPIPE_EXPORT_LINEAR(app_linear, upipe_cuda_linear)
