/* products.h -- the programs' compute table: the CPU's, its products by a BLAS where the build says so */
#ifndef COMMON_PRODUCTS_H
#define COMMON_PRODUCTS_H

#include "upipe/cpu/upipe_cpu.h"
#ifdef UPIPE_WITH_CBLAS
#include "upipe/cpu/upipe_cpu_cblas.h"
#define PRODUCTS "cblas"
#else
#define PRODUCTS "built-in"
#endif

static inline void products_ops(upipe_ops *ops)
{
    upipe_cpu_ops(ops);
#ifdef UPIPE_WITH_CBLAS
    upipe_cpu_cblas(ops);
#endif
}

#endif
