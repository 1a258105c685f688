/* 01_plan.c -- what a run will hold and send: nothing is allocated, nothing is computed
 *
 *     cc -O2 -I . examples/01_plan.c -lm && ./a.out
 *
 * The attention block of Llama3-8B (32 query heads, 8 key/value heads of 128) on 8 ranks over a million
 * tokens. A dry run goes through the block's own code over a pool that counts.
 */
#include <stdio.h>

#include "upipe/upipe.h"

/* A backend without scratch: how much one takes depends on its kernels. */
static size_t no_scratch(const upipe_ops *ops, upipe_view out, upipe_view a, upipe_view b, int flags)
{
    (void)ops, (void)out, (void)a, (void)b, (void)flags;
    return 0;
}

static size_t no_attn_scratch(const upipe_ops *ops, const upipe_attn *a, int backward)
{
    (void)ops, (void)a, (void)backward;
    return 0;
}

int main(void)
{
    const char *names[] = {"Ulysses, all heads at once", "UPipe, chunks of 8 heads"};
    const int chunks[] = {32, 8};
    static upipe_dry dry;   /* large */
    const float weight = 0; /* is not read */
    upipe_ops ops = {0};
    int i, stage, rank, phase;
    ops.gemm_bytes = no_scratch;
    ops.attn_bytes = no_attn_scratch;
    ops.attn_can = ~0;
    for (i = 0; i < 2; ++i) {
        upipe_plan_desc d = {0};
        upipe_plan p;
        upipe_err err;
        upipe_layer layer = {0};
        upipe_bytes bytes;
        double unit;
        d.tokens = 1 << 20;
        d.ranks = 8;
        d.heads = 32;
        d.kv_heads = 8;
        d.head_dim = 128;
        d.chunk = chunks[i];
        d.dtype = UPIPE_BF16;
        if (upipe_plan_init(&p, &d, &err) != UPIPE_OK) {
            fprintf(stderr, "%s: %s\n", upipe_status_name(err.status), err.text);
            return 1;
        }
        layer.plan = &p;
        layer.wq = layer.wk = layer.wv = &weight;
        if (upipe_dry_init(&dry, &p, &ops) || upipe_dry_layer(&dry, &layer, 1)) {
            fprintf(stderr, "%s\n", dry.ctx.err.text);
            return 1;
        }
        bytes = upipe_dry_bytes(&dry);
        unit = (double)upipe_plan_unit_bytes(&p);
        printf("%s: %d stage%s\n", names[i], p.stages, p.stages == 1 ? "" : "s");
        for (stage = 0; stage < p.stages; ++stage) {
            printf("  stage %d, query heads of ranks 0 .. 7:", stage);
            for (rank = 0; rank < d.ranks; ++rank) {
                int first = upipe_plan_q(&p, stage, rank).first;
                printf(p.per_rank > 1 ? " %d-%d" : " %d", first, first + p.per_rank - 1);
            }
            printf(upipe_plan_stage(&p, stage).kv_fresh ? "   K and V travel\n" : "   K and V stay\n");
        }
        printf("  sends %.2f GiB forward, %.2f GiB backward\n", (double)upipe_plan_sent(&p, 0) / (1 << 30),
               (double)upipe_plan_sent(&p, 1) / (1 << 30));
        printf("  holds, in units of %.2f GiB:", unit / (1 << 30));
        for (phase = 0; phase < UPIPE_PHASES; ++phase)
            printf(" %s %.2f", upipe_phase_name(phase), (double)bytes.phase[phase] / unit);
        printf("\n  peak %.2f GiB\n\n", (double)bytes.peak / (1 << 30));
    }
    return fflush(stdout) != 0;
}
