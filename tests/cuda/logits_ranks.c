/* logits_ranks.c -- the logits of a checkpoint over NCCL, a thread in place of each process   tests */
#define RANKS_PROGRAM "../../examples/llama/logits.c"
#include "ranks.h"
