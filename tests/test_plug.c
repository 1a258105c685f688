/* test_plug -- examples/03_plug_attention.c: its loops in blocks against f64, with bytes as planned; masks that it does not
 * know
 */
#include "lib/runner.h"

#define main plug_main
#include "../examples/03_plug_attention.c"
#undef main

static plug own;

static void table_loops(upipe_ops *ops)
{
    plug_loops(&own, ops);
}

/* Its backward takes nothing but O for rowsum(dO * O): O is where it belongs, in stages, with groups, and behind the output
 * projection, whose gradient has slots of its own then. One rank, as the plug counts its calls. */
static void test_blocks(void)
{
    for (int kind = 0; kind < 8; ++kind) {
        run_case t = run_of(48, 8, kind % 2 ? 2 : 8, 32, 40, 1, kind & 2 ? 2 : 8, UPIPE_F32);
        run_result r;
        t.shape.projected = kind / 4;
        t.shape.full = kind == 3;
        t.table = table_loops;
        check_case(&t, (uint64_t)kind, &r);
        CHECK(own.served > 0);
        CHECK_INT(own.passed, 0);
    }
}

/* A mask is known to its last byte: a field that this plug has never heard of is passed on as well. */
static void test_masks(void)
{
    unsigned char *bytes;
    upipe_attn a;
    memset(&a, 0, sizeof a);
    bytes = (unsigned char *)&a.mask;
    a.q = a.k = a.v = a.o = upipe_view_packed(NULL, UPIPE_F32, 8, 2, 32);
    for (a.mask.causal = 0; a.mask.causal < 2; ++a.mask.causal) CHECK(loops_serve(&a));
    for (size_t i = 0; i < sizeof a.mask; ++i) {
        if (i >= offsetof(upipe_mask, causal) && i < offsetof(upipe_mask, causal) + sizeof a.mask.causal)
            continue;
        bytes[i] = 1;
        CHECK_SAY(!loops_serve(&a), "byte %zu of the mask is ignored", i);
        bytes[i] = 0;
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_blocks());
    TEST(test_masks());
    return test_end("plug");
}
