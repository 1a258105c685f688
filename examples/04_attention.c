/* 04_attention.c -- one attention call, by itself: causal, and with fewer key/value heads than query heads
 *
 * A value here is its position, so an output is the mean position that a query looks at: none may look ahead,
 * and the first token sees itself alone.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/device.h"

enum { TOKENS = 6, HEADS = 4, KV_HEADS = 2, DIM = 32 };

typedef struct tensors { /* in memory that the device reaches */
    float q[TOKENS][HEADS][DIM], k[TOKENS][KV_HEADS][DIM], v[TOKENS][KV_HEADS][DIM];
    float o[TOKENS][HEADS][DIM], lse[TOKENS][HEADS];
} tensors;

int main(int argc, char **argv)
{
    tensors *x;
    void *buf;
    device d;
    upipe_ctx c;
    upipe_attn a;
    upipe_status s;
    int t, h, i, kind, bad = device_args(argc, argv, &kind);
    if (bad) return bad;
    memset(&c, 0, sizeof c);
    if (device_open(&d, kind, &c.err) || device_shared(kind, &buf, sizeof *x, &c.err))
        return fprintf(stderr, "%s\n", c.err.text), 1;
    device_use(&d, &c);
    x = (tensors *)buf;
    for (t = 0; t < TOKENS; ++t)
        for (i = 0; i < DIM; ++i) {
            for (h = 0; h < HEADS; ++h) x->q[t][h][i] = (float)sin(1.0 + t + 2 * h + 0.3 * i);
            for (h = 0; h < KV_HEADS; ++h) {
                x->k[t][h][i] = (float)cos(2.0 + t - h + 0.2 * i);
                x->v[t][h][i] = (float)t;
            }
        }

    memset(&a, 0, sizeof a); /* zero: scale 1/sqrt(d), positions from 0 */
    a.q = upipe_view_packed(x->q, UPIPE_F32, TOKENS, HEADS, DIM);
    a.k = upipe_view_packed(x->k, UPIPE_F32, TOKENS, KV_HEADS, DIM);
    a.v = upipe_view_packed(x->v, UPIPE_F32, TOKENS, KV_HEADS, DIM);
    a.o = upipe_view_packed(x->o, UPIPE_F32, TOKENS, HEADS, DIM);
    a.lse = upipe_view_packed(x->lse, UPIPE_F32, TOKENS, HEADS, 1);
    a.mask.causal = 1;
    a.work_bytes = d.ops.attn_bytes(&d.ops, &a, 0);
    s = device_slab(&d, &a.work, a.work_bytes, &c.err);
    if (s == UPIPE_OK) s = upipe_attn_fwd(&c, &a);
    if (s == UPIPE_OK) s = d.ops.sync(&c); /* only then may the host look */
    if (s != UPIPE_OK) {
        fprintf(stderr, "%s: %s\n", upipe_status_name(s), c.err.text);
        return 1;
    }
    printf("%s, %zu bytes of scratch; query heads 0 and 1 read key/value head 0, heads 2 and 3 head 1\n\n",
           d.ops.name, a.work_bytes);
    printf("token   mean position seen by head 0 .. 3      log of the sum of the scores' exponentials\n");
    for (t = 0; t < TOKENS; ++t) {
        printf("%5d  ", t);
        for (h = 0; h < HEADS; ++h) printf(" %7.4f", (double)x->o[t][h][0]);
        printf("      ");
        for (h = 0; h < HEADS; ++h) printf(" %7.4f", (double)x->lse[t][h]);
        printf("\n");
        for (h = 0; h < HEADS; ++h) bad |= !(x->o[t][h][0] >= 0 && x->o[t][h][0] <= (float)t + 1e-5f);
    }

    /* What is not built is refused, never ignored. */
    a.v.d = a.o.d = 12;
    s = upipe_attn_fwd(&c, &a);
    printf("\n%s: %s\n", upipe_status_name(s), c.err.text);
    device_slab_free(&d, a.work);
    device_shared_free(kind, buf);
    device_close(&d, NULL);
    return bad || s != UPIPE_ERR_UNSUPPORTED;
}
