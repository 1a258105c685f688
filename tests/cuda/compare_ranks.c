/* compare_ranks.c -- the comparison of the methods over NCCL, a thread in place of each process   tests */
#define RANKS_PROGRAM "../../examples/compare/compare.c"
#include "ranks.h"
