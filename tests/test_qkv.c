/* test_qkv -- attention of the host's own Q, K, V, fused or apart, gradients in place, on random teams and rings
 * (lib/block_draws.h)
 */
#include "lib/block_draws.h"

static void test_random(void)
{
    block_draws(1);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_random());
    return test_end("qkv");
}
