/* port.h -- what both ports are made of: attention of a fused product by this thread's session, on the CPU or a GPU
 *
 *     port_session = &h;          an open upipe_session (upipe/upipe_session.h): its table and slab say where it computes
 *
 * A layer is known by the statistics that its forward has: the log-sum-exp lies in the session's pool, and theirs is not
 * written. A forward whose layer still waits for a backward frees what it saved: it was an evaluation.
 */
#ifndef PORT_H
#define PORT_H

#include <map>
#include <stdexcept>

#include "upipe/upipe.h"

#include "trainer.h"

inline thread_local upipe_session *port_session;
inline thread_local std::map<const float *, upipe_saved> port_saved;

/* Whether the session's plan is of these numbers. */
inline bool port_fits(int B, int T, int Hq, int Hkv, int d)
{
    if (port_session == nullptr || port_session->ctx.mem == nullptr) return false;
    const upipe_plan &p = port_session->plan;
    return B == p.desc.batch && T == p.local && Hq == p.desc.heads && Hkv == p.desc.kv_heads &&
           d == p.desc.head_dim && d == p.desc.v_dim;
}

inline void port_check(bool good, const char *why)
{
    if (!good) throw std::runtime_error(why);
}

/* The call of these tensors. */
inline upipe_qkv port_call(const upipe_qkv &call, floatX *qkv, floatX *out, int B, int T, int Hq, int Hkv,
                           int d, cudaStream_t stream)
{
    port_check(port_fits(B, T, Hq, Hkv, d),
               "attention of another shape than the plan's, or without an open session");
    port_session->ctx.stream = stream;
    return upipe_qkv_fused(&call, qkv, out, sizeof(floatX) == 2 ? UPIPE_BF16 : UPIPE_F32);
}

inline void port_forward(const upipe_qkv &a, const float *stats)
{
    upipe_ctx *c = &port_session->ctx;
    const auto earlier = port_saved.find(stats);
    if (earlier != port_saved.end())
        port_check(upipe_saved_free(c, &earlier->second) == UPIPE_OK, c->err.text);
    port_check(upipe_qkv_fwd(c, &a, &port_saved[stats]) == UPIPE_OK, c->err.text);
}

/* d: the views of dqkv and dout. */
inline void port_backward(const upipe_qkv &a, const upipe_qkv &d, float *dsinks, const float *stats)
{
    upipe_ctx *c = &port_session->ctx;
    const auto saved = port_saved.find(stats);
    port_check(saved != port_saved.end(), "a backward without a forward of these statistics");
    upipe_qkv_grads g = upipe_qkv_grads_of(&d);
    g.dsinks = dsinks;
    port_check(upipe_qkv_bwd(c, &a, &g, &saved->second) == UPIPE_OK, c->err.text);
    port_saved.erase(saved);
}

/* Before the session is closed: what evaluations have saved. */
inline void port_end()
{
    for (auto &layer : port_saved) upipe_saved_free(&port_session->ctx, &layer.second);
    port_saved.clear();
    port_session = nullptr;
}

#endif
