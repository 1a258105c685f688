/* rules.h -- the CPU's rules of linear attention, of the unit with its kernels (cpu_table.c) where a program has one
 *
 *     upipe_linear_ops rules;
 *     rules_cpu(&rules);
 */
#ifndef COMMON_RULES_H
#define COMMON_RULES_H

#include "upipe/upipe_linear.h"

#ifdef UPIPE_CPU_DECLARE
void rules_cpu(upipe_linear_ops *rules);
#else
#include "upipe/cpu/upipe_cpu_linear.h"

static inline void rules_cpu(upipe_linear_ops *rules)
{
    upipe_cpu_linear(rules);
}
#endif

#endif
