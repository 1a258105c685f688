/* test_property -- random blocks with their projections on random teams and rings (lib/block_draws.h) */
#include "lib/block_draws.h"

static void test_blocks(void)
{
    block_draws(0);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_blocks());
    return test_end("property");
}
