/* test_latent -- attention whose K and V are expanded from a latent, gathered or sent as heads, on random teams and rings
 * (lib/block_draws.h)
 */
#include "lib/block_draws.h"

static void test_random(void)
{
    block_draws(2);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_random());
    return test_end("latent");
}
