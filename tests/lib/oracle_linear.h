/* oracle_linear.h -- what oracle_block.h and oracle_tile.h share: products with a weight, in plain loops */
#ifndef UPIPE_TEST_ORACLE_LINEAR_H
#define UPIPE_TEST_ORACLE_LINEAR_H

#include "oracle.h"

#define ORACLE_PART "oracle_linear.inc"
#include "oracle_twice.inc"

#endif
