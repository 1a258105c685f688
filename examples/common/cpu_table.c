/* cpu_table.c -- the unit with the CPU's kernels, which tests and programs link */
#define UPIPE_CPU_DEFINE
#include "upipe/cpu/upipe_cpu.h"
#include "upipe/cpu/upipe_cpu_linear.h"
