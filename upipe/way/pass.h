/* pass.h -- the state goes from rank to rank: upipe_scan.h with the rule for its step        part of upipe_linear_attn.h */
#ifndef UPIPE_WAY_PASS_H
#define UPIPE_WAY_PASS_H

#include "types.h"

/* What the steps of a pass need. */
typedef struct upi_way_steps {
    const upipe_linear_attn *a;
    upipe_linear_grad call; /* of all heads */
    void *work;
    size_t work_bytes;
} upi_way_steps;

UPIPE_API upipe_status upi_way_fwd_step(upipe_ctx *c, void *user, int first, int heads, const float *in,
                                        float *out)
{
    const upi_way_steps *w = (const upi_way_steps *)user;
    upipe_linear_grad g = upi_way_stage(w->call, first, heads);
    g.a.state = in, g.a.out = out;
    g.a.work = w->work, g.a.work_bytes = w->work_bytes;
    return upi_way_fwd_rule(c, w->a, &g.a);
}

UPIPE_API upipe_status upi_way_bwd_step(upipe_ctx *c, void *user, int first, int heads, const float *state,
                                        float *dstate)
{
    const upi_way_steps *w = (const upi_way_steps *)user;
    upipe_linear_grad g = upi_way_stage(w->call, first, heads);
    g.a.state = state, g.dstate = dstate;
    g.a.work = w->work, g.a.work_bytes = w->work_bytes;
    return upi_way_bwd_rule(c, w->a, &g);
}

UPIPE_API size_t upi_pass_fwd_bytes(upipe_ctx *c, const upipe_linear_attn *a)
{
    const upipe_scan s = upi_way_scan(a);
    return upi_way_stages_work(c, a, upi_way_call(a, NULL).a, UPIPE_LINEAR_FWD) + upipe_scan_fwd_bytes(&s);
}

UPIPE_API size_t upi_pass_bwd_bytes(upipe_ctx *c, const upipe_linear_attn *a)
{
    const upipe_scan s = upi_way_scan(a);
    return upi_way_stages_work(c, a, upi_way_call(a, NULL).a, UPIPE_LINEAR_BWD) + upipe_scan_bwd_bytes(&s);
}

UPIPE_API upipe_status upi_pass_fwd_run(upipe_ctx *c, upipe_comm *comm, const upipe_linear_attn *a,
                                        float *states, float *carry)
{
    upipe_scan s = upi_way_scan(a);
    upi_way_steps w;
    w.a = a;
    w.call = upi_way_call(a, NULL);
    w.work_bytes = upi_way_stages_work(c, a, w.call.a, UPIPE_LINEAR_FWD);
    UPIPE_TRY(upipe_alloc(c, &w.work, w.work_bytes, UPIPE_USE_SCRATCH, "linear_work"));
    s.fwd = upi_way_fwd_step;
    s.user = &w;
    return upi_scan_fwd(c, comm, &s, states, carry, NULL);
}

UPIPE_API upipe_status upi_pass_bwd_run(upipe_ctx *c, upipe_comm *comm, const upipe_linear_attn_grad *g,
                                        const float *states, float *carry)
{
    upipe_scan s = upi_way_scan(&g->a);
    upi_way_steps w;
    w.a = &g->a;
    w.call = upi_way_call(&g->a, g);
    w.work_bytes = upi_way_stages_work(c, &g->a, w.call.a, UPIPE_LINEAR_BWD);
    UPIPE_TRY(upipe_alloc(c, &w.work, w.work_bytes, UPIPE_USE_SCRATCH, "linear_work"));
    s.bwd = upi_way_bwd_step;
    s.user = &w;
    return upi_scan_bwd(c, comm, &s, states, carry, NULL);
}

#endif
