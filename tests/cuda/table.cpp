/* table.cpp -- the one unit with kernels: the table, for test programs in C and for the examples */
#include "upipe/cuda/upipe_cuda.h"

UPIPE_EXPORT_OPS(app_ops, upipe_cuda_ops)
