/* 04_attention.c -- one attention call, by itself: causal, and with fewer key/value heads than query heads
 *
 * A value here is its position, so an output is the mean position that a query looks at: none may look ahead,
 * and the first token sees itself alone.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "upipe/cpu/upipe_cpu.h"
#include "upipe/upipe_attn.h"

enum { TOKENS = 6, HEADS = 4, KV_HEADS = 2, DIM = 32 };

int main(void)
{
    static float q[TOKENS][HEADS][DIM], k[TOKENS][KV_HEADS][DIM], v[TOKENS][KV_HEADS][DIM];
    static float o[TOKENS][HEADS][DIM], lse[TOKENS][HEADS];
    upipe_ops ops;
    upipe_ctx c;
    upipe_attn a;
    upipe_status s;
    int t, h, i, bad = 0;
    upipe_cpu_ops(&ops);
    memset(&c, 0, sizeof c);
    c.ops = &ops;
    for (t = 0; t < TOKENS; ++t)
        for (i = 0; i < DIM; ++i) {
            for (h = 0; h < HEADS; ++h) q[t][h][i] = (float)sin(1.0 + t + 2 * h + 0.3 * i);
            for (h = 0; h < KV_HEADS; ++h) {
                k[t][h][i] = (float)cos(2.0 + t - h + 0.2 * i);
                v[t][h][i] = (float)t;
            }
        }

    memset(&a, 0, sizeof a); /* zero: scale 1/sqrt(d), positions from 0 */
    a.q = upipe_view_packed(q, UPIPE_F32, TOKENS, HEADS, DIM);
    a.k = upipe_view_packed(k, UPIPE_F32, TOKENS, KV_HEADS, DIM);
    a.v = upipe_view_packed(v, UPIPE_F32, TOKENS, KV_HEADS, DIM);
    a.o = upipe_view_packed(o, UPIPE_F32, TOKENS, HEADS, DIM);
    a.lse = upipe_view_packed(lse, UPIPE_F32, TOKENS, HEADS, 1);
    a.causal = 1;
    a.work_bytes = ops.attn_bytes(&ops, &a, 0);
    a.work = aligned_alloc(64, (a.work_bytes + 63) / 64 * 64);
    if (a.work == NULL) return 1;
    s = upipe_attn_fwd(&c, &a);
    if (s != UPIPE_OK) {
        fprintf(stderr, "%s: %s\n", upipe_status_name(s), c.err.text);
        return 1;
    }
    printf("%s, %zu bytes of scratch; query heads 0 and 1 read key/value head 0, heads 2 and 3 head 1\n\n",
           ops.name, a.work_bytes);
    printf("token   mean position seen by head 0 .. 3      log of the sum of the scores' exponentials\n");
    for (t = 0; t < TOKENS; ++t) {
        printf("%5d  ", t);
        for (h = 0; h < HEADS; ++h) printf(" %7.4f", (double)o[t][h][0]);
        printf("      ");
        for (h = 0; h < HEADS; ++h) printf(" %7.4f", (double)lse[t][h]);
        printf("\n");
        for (h = 0; h < HEADS; ++h) bad |= !(o[t][h][0] >= 0 && o[t][h][0] <= (float)t + 1e-5f);
    }

    /* A wish that is not built yet is refused, never ignored. */
    a.window = 4;
    s = upipe_attn_fwd(&c, &a);
    printf("\n%s: %s\n", upipe_status_name(s), c.err.text);
    free(a.work);
    return bad || s != UPIPE_ERR_UNSUPPORTED;
}
