/* nccl_ranks.c -- the example 08_nccl, a thread in place of each process   tests */
#define RANKS_PROGRAM "../../examples/08_nccl.c"
#include "ranks.h"
