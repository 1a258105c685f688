/* 04_attention.c -- one attention call, by itself: causal, and with fewer key/value heads than query heads
 *
 *     cc -O2 -march=native -I . examples/04_attention.c -lm && ./a.out
 *
 * A value here is its position, so an output is the mean position that a query looks at: none may look ahead,
 * and the first token sees itself alone.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe.h"

enum { TOKENS = 6, HEADS = 4, KV_HEADS = 2, DIM = 32 };

static float q[TOKENS][HEADS][DIM], k[TOKENS][KV_HEADS][DIM], v[TOKENS][KV_HEADS][DIM];
static float o[TOKENS][HEADS][DIM], lse[TOKENS][HEADS];

int main(void)
{
    upipe_ops ops;
    upipe_ctx c = {0};
    upipe_attn a = {0}; /* zero: scale 1/sqrt(d), positions from 0 */
    upipe_status s;
    int bad = 0;
    for (int t = 0; t < TOKENS; ++t)
        for (int i = 0; i < DIM; ++i) {
            for (int h = 0; h < HEADS; ++h) q[t][h][i] = (float)sin(1.0 + t + 2 * h + 0.3 * i);
            for (int h = 0; h < KV_HEADS; ++h) {
                k[t][h][i] = (float)cos(2.0 + t - h + 0.2 * i);
                v[t][h][i] = (float)t;
            }
        }
    upipe_cpu_ops(&ops);
    c.ops = &ops;
    a.q = upipe_view_packed(q, UPIPE_F32, TOKENS, HEADS, DIM);
    a.k = upipe_view_packed(k, UPIPE_F32, TOKENS, KV_HEADS, DIM);
    a.v = upipe_view_packed(v, UPIPE_F32, TOKENS, KV_HEADS, DIM);
    a.o = upipe_view_packed(o, UPIPE_F32, TOKENS, HEADS, DIM);
    a.lse = upipe_view_packed(lse, UPIPE_F32, TOKENS, HEADS, 1);
    a.mask.causal = 1;
    a.work_bytes = ops.attn_bytes(&ops, &a, 0); /* 0: of a forward */
    if (posix_memalign(&a.work, UPIPE_MEM_ALIGN, a.work_bytes) != 0) return 1;
    s = upipe_attn_fwd(&c, &a);
    if (s != UPIPE_OK) return fprintf(stderr, "%s: %s\n", upipe_status_name(s), c.err.text), 1;
    printf("%s, %zu bytes of scratch; query heads 0 and 1 read key/value head 0, heads 2 and 3 head 1\n\n",
           ops.name, a.work_bytes);
    printf("token   mean position seen by head 0 .. 3      log of the sum of the scores' exponentials\n");
    for (int t = 0; t < TOKENS; ++t) {
        printf("%5d  ", t);
        for (int h = 0; h < HEADS; ++h) printf(" %7.4f", (double)o[t][h][0]);
        printf("      ");
        for (int h = 0; h < HEADS; ++h) printf(" %7.4f", (double)lse[t][h]);
        printf("\n");
        for (int h = 0; h < HEADS; ++h) bad |= !(o[t][h][0] >= 0 && o[t][h][0] <= (float)t + 1e-5f);
    }

    /* What is not built is refused, never ignored. */
    a.v.d = a.o.d = 12;
    s = upipe_attn_fwd(&c, &a);
    printf("\n%s: %s\n", upipe_status_name(s), c.err.text);
    free(a.work);
    return fflush(stdout) != 0 || bad || s != UPIPE_ERR_UNSUPPORTED;
}
