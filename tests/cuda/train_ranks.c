/* train_ranks.c -- the trainer over NCCL, a thread in place of each process   tests */
#define RANKS_PROGRAM "../../examples/llama/train.c"
#include "ranks.h"
