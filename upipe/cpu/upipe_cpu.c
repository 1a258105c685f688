/* upipe_cpu.c -- the CPU's kernels in a unit of their own, which a program compiles once
 *
 *     cc -O2 -march=native -c upipe/cpu/upipe_cpu.c
 *     cc -DUPIPE_CPU_DECLARE -I . trainer.c upipe_cpu.o -lm -pthread
 */
#define UPIPE_CPU_DEFINE
#include "upipe_cpu.h"
#include "upipe_cpu_linear.h"
