/* cuda_runtime.h -- as cuda_runtime_api.h: C++ conveniences are not used   tests */
#ifndef FAKE_CUDA_RUNTIME_H
#define FAKE_CUDA_RUNTIME_H

#include "cuda_runtime_api.h"

#endif
