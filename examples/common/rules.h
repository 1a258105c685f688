/* rules.h -- the rules of linear attention of a device, of the units with its kernels where a program has them
 * (upipe_cpu.c, 09_cuda.cu)
 *
 *     upipe_linear_ops rules;
 *     rules_of(DEVICE_CUDA, &rules);
 */
#ifndef COMMON_RULES_H
#define COMMON_RULES_H

#include "upipe/cpu/upipe_cpu_linear.h"
#include "upipe/cuda/upipe_cuda_linear_bytes.h"
#include "upipe/upipe_linear.h"

#include "device.h"

#ifdef UPIPE_WITH_CUDA
void app_linear(upipe_linear_ops *rules); /* 09_cuda.cu */
#endif

/* rules_of -- needs no device; without CUDA in the build, what plans and dry runs for one read */
static inline void rules_of(int kind, upipe_linear_ops *rules)
{
    if (kind == DEVICE_CPU)
        upipe_cpu_linear(rules);
    else
#ifdef UPIPE_WITH_CUDA
        app_linear(rules);
#else
        upipe_cuda_plan_linear(rules);
#endif
}

#endif
