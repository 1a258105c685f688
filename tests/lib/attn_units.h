/* attn_units.h -- the CPU's attention over bf16 instructions as the place that is checked
 *
 *     if (attn_units(argc, argv, test_unit)) return test_end("attn bf16");
 */
#ifndef UPIPE_TEST_ATTN_UNITS_H
#define UPIPE_TEST_ATTN_UNITS_H

#include "upipe/cpu/upipe_cpu_attn_bf16.h"
#include "attn_cpu.h"
#include "bf16.h"

/* What takes the products of bf16, where that is what is tested: then all types are bf16. NULL: vectors. */
static const upi_bf16_unit *attn_unit;

static upipe_status unit_fwd(upipe_ctx *c, const upipe_attn *a)
{
    return upi_attn_bf16_fwd(c, a, attn_unit);
}

static upipe_status unit_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    return upi_attn_bf16_bwd(c, g, attn_unit);
}

static inline void unit_place(const upi_bf16_unit *unit)
{
    cpu_place();
    attn_unit = unit;
    cpu_ops.attn_fwd = unit_fwd;
    cpu_ops.attn_bwd = unit_bwd;
    cpu_ops.attn_bytes = upi_attn_bf16_bytes;
    for (int i = 0; i < 3; ++i) here.types[i] = UPIPE_BF16;
    here.naive = NAIVE_NARROW | NAIVE_LATE;
}

/* Of a program's words: bf16 tests the processor's bf16 instructions, in plain C and where it has them, and all
 * behind it leaves nothing out, which in plain C is slow. Else the place is the table, and 0 is returned. */
static inline int attn_units(int argc, char **argv, void (*test)(int all))
{
    const int is_unit = argc > 1 && strcmp(argv[1], "bf16") == 0,
              all = argc > 2 && strcmp(argv[2], "all") == 0;
    cpu_place();
    if (!is_unit) return 0;
    unit_place(&plain_units[0]);
    TEST_OF("unit", test(0));
    unit_place(&plain_units[1]);
    TEST_OF("unit", test(all));
    if (upi_bf16_here() != NULL) unit_place(upi_bf16_here());
    if (upi_bf16_here() != NULL) TEST_OF("unit", test(1));
    return 1;
}

#endif
