/* gpu_cudnn.cpp -- cuDNN's attention through its header library cudnn-frontend, beside ours */
#include "gpu_cudnn.h"

#include <cudnn_frontend.h>

#include <algorithm>

namespace fe = cudnn_frontend;

struct gpu_cudnn {
    cudnnHandle_t handle;
    fe::graph::Graph fwd, bwd;
    void *work;
};

namespace
{

enum { Q = 1, K, V, O, STATS, DOUT, DQ, DK, DV };

/* One batch, whose stride cuDNN wants to be that of packed log-sum-exps. */
fe::graph::Tensor_attributes tensor(upipe_view v, int64_t uid)
{
    return fe::graph::Tensor_attributes()
        .set_dim({1, v.h, v.n, v.d})
        .set_stride({std::max(v.n * v.n_stride, v.h * v.h_stride), v.h_stride, v.n_stride, 1})
        .set_data_type(v.dtype == UPIPE_F32 ? fe::DataType_t::FLOAT : fe::DataType_t::BFLOAT16)
        .set_uid(uid);
}

void output(const std::shared_ptr<fe::graph::Tensor_attributes> &t, upipe_view v, int64_t uid)
{
    auto a = tensor(v, uid);
    t->set_output(true).set_dim(a.get_dim()).set_stride(a.get_stride()).set_data_type(a.get_data_type());
    t->set_uid(uid);
}

float scale_of(const upipe_attn *a)
{
    return a->scale != 0 ? a->scale : 1 / sqrtf((float)a->q.d);
}

template <class How> void mask(How &how, const upipe_attn *a)
{
    if (a->mask.causal) how.set_diagonal_band_right_bound(0);
    if (a->mask.window > 0) how.set_diagonal_band_left_bound((int)a->mask.window);
}

void types(fe::graph::Graph &g)
{
    g.set_io_data_type(fe::DataType_t::BFLOAT16);
    g.set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
}

void describe_fwd(fe::graph::Graph &g, const upipe_attn *a)
{
    auto how = fe::graph::SDPA_attributes().set_generate_stats(true).set_attn_scale(scale_of(a));
    types(g);
    mask(how, a);
    auto out = g.sdpa(g.tensor(tensor(a->q, Q)), g.tensor(tensor(a->k, K)), g.tensor(tensor(a->v, V)), how);
    output(out[0], a->o, O);
    output(out[1], a->lse, STATS);
}

void describe_bwd(fe::graph::Graph &g, const upipe_attn_grad *x, int deterministic)
{
    const upipe_attn *a = &x->a;
    auto how = fe::graph::SDPA_backward_attributes().set_attn_scale(scale_of(a));
    types(g);
    mask(how, a);
    how.set_deterministic_algorithm(deterministic != 0);
    auto out = g.sdpa_backward(g.tensor(tensor(a->q, Q)), g.tensor(tensor(a->k, K)),
                               g.tensor(tensor(a->v, V)), g.tensor(tensor(a->o, O)),
                               g.tensor(tensor(x->dout, DOUT)), g.tensor(tensor(a->lse, STATS)), how);
    output(out[0], x->dq, DQ);
    output(out[1], x->dk, DK);
    output(out[2], x->dv, DV);
}

upipe_status plan(fe::graph::Graph &g, cudnnHandle_t handle, int64_t *bytes, upipe_err *e)
{
    auto made = g.build(handle, {fe::HeurMode_t::A});
    int64_t need = 0;
    if (made.is_good()) made = g.get_workspace_size(need);
    if (made.is_bad())
        return upipe_fail(e, UPIPE_ERR_UNSUPPORTED, "cuDNN: %.160s", made.get_message().c_str());
    if (need > *bytes) *bytes = need;
    return UPIPE_OK;
}

upipe_status execute(upipe_ctx *c, gpu_cudnn *p, fe::graph::Graph &g, std::unordered_map<int64_t, void *> at)
{
    if (cudnnSetStream(p->handle, (cudaStream_t)c->stream) != CUDNN_STATUS_SUCCESS)
        return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "cudnnSetStream failed");
    auto done = g.execute(p->handle, at, p->work);
    if (done.is_good()) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "cuDNN: %.160s", done.get_message().c_str());
}

} /* namespace */

upipe_status gpu_cudnn_open(gpu_cudnn **out, const upipe_attn_grad *g, int deterministic, upipe_err *e)
{
    gpu_cudnn *p = new gpu_cudnn{};
    int64_t bytes = 0;
    upipe_status s = UPIPE_OK;
    if (cudnnCreate(&p->handle) != CUDNN_STATUS_SUCCESS)
        s = upipe_fail(e, UPIPE_ERR_BACKEND, "cudnnCreate failed");
    if (s == UPIPE_OK) describe_fwd(p->fwd, &g->a);
    if (s == UPIPE_OK) s = plan(p->fwd, p->handle, &bytes, e);
    if (s == UPIPE_OK) describe_bwd(p->bwd, g, deterministic);
    if (s == UPIPE_OK) s = plan(p->bwd, p->handle, &bytes, e);
    if (s == UPIPE_OK && bytes > 0 && cudaMalloc(&p->work, (size_t)bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        s = upipe_fail(e, UPIPE_ERR_MEMORY, "cuDNN wants a workspace of %lld bytes", (long long)bytes);
    }
    *out = p;
    if (s == UPIPE_OK) return UPIPE_OK;
    gpu_cudnn_close(p);
    *out = NULL;
    return s;
}

upipe_status gpu_cudnn_fwd(upipe_ctx *c, gpu_cudnn *p, const upipe_attn_grad *g)
{
    const upipe_attn *a = &g->a;
    return execute(c, p, p->fwd,
                   {{Q, a->q.data}, {K, a->k.data}, {V, a->v.data}, {O, a->o.data}, {STATS, a->lse.data}});
}

upipe_status gpu_cudnn_bwd(upipe_ctx *c, gpu_cudnn *p, const upipe_attn_grad *g)
{
    const upipe_attn *a = &g->a;
    return execute(c, p, p->bwd,
                   {{Q, a->q.data},
                    {K, a->k.data},
                    {V, a->v.data},
                    {O, a->o.data},
                    {STATS, a->lse.data},
                    {DOUT, g->dout.data},
                    {DQ, g->dq.data},
                    {DK, g->dk.data},
                    {DV, g->dv.data}});
}

void gpu_cudnn_close(gpu_cudnn *p)
{
    if (p == NULL) return;
    if (p->work != NULL) (void)cudaFree(p->work);
    if (p->handle != NULL) (void)cudnnDestroy(p->handle);
    delete p;
}
