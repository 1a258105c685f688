/* functions.cpp -- the pair of attention functions of a cuDNN-style trainer, over ranks that share the sequence */
#include "port.h"

void attention_forward_cudnn(floatX *out, float *stats, floatX *inp, int B, int T, int Hq, int Hkv, int d,
                             cudaStream_t stream)
{
    port_check(port_session != nullptr, "no session");
    port_forward(port_call(port_session->call, inp, out, B, T, Hq, Hkv, d, stream), stats);
}

void attention_backward_cudnn(floatX *dqkv, floatX *dout, floatX *qkv, floatX *o, float *stats, int B, int T,
                              int Hq, int Hkv, int d, cudaStream_t stream)
{
    port_check(port_session != nullptr, "no session");
    const upipe_qkv a = port_call(port_session->call, qkv, o, B, T, Hq, Hkv, d, stream);
    port_backward(a, port_call(port_session->call, dqkv, dout, B, T, Hq, Hkv, d, stream), nullptr, stats);
}
