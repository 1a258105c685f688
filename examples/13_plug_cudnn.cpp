/* 13_plug_cudnn.cpp -- cuDNN's attention, forward, in the table: bf16, full or causal, without older results
 *
 * Built where cuDNN and its header library cudnn-frontend are (pip install nvidia-cudnn-frontend). A plan of cuDNN's is
 * made once a shape, by the first call of attn_bytes or attn_fwd: before a capture, and before what is timed. The
 * backward stays the library's: cuDNN's wants O, of which the block keeps only delta, and overwrites dK and dV.
 */
#include "13_plug_attention.h"

#include <cudnn_frontend.h>
#include <map>
#include <vector>

namespace fe = cudnn_frontend;

namespace
{

enum { Q = 1, K, V, O, STATS };

struct kernel {
    std::shared_ptr<fe::graph::Graph> graph; /* NULL: cuDNN does not take this shape */
    size_t bytes;                            /* of its workspace */
};

struct cudnn_own {
    cudnnHandle_t handle;
    std::map<std::vector<int64_t>, kernel> kernels;
};

std::vector<int64_t> shape(upipe_view v)
{
    return {1, v.h, v.n, v.d};
}

/* One batch, so its stride says nothing; it must only not be 0. */
std::vector<int64_t> strides(upipe_view v)
{
    return {v.n * v.n_step + v.h * v.h_step, v.h_step, v.n_step, 1};
}

fe::graph::Tensor_attributes tensor(upipe_view v, int64_t uid)
{
    return fe::graph::Tensor_attributes().set_dim(shape(v)).set_stride(strides(v)).set_uid(uid);
}

/* Log-sum-exps come as cuDNN lays them out, [H][Sq], and are copied to where the call wants them. */
upipe_view stats_of(const upipe_attn *a)
{
    upipe_view v = a->lse;
    v.data = a->work;
    v.n_step = 1;
    v.h_step = v.n;
    return v;
}

size_t stats_bytes(const upipe_attn *a)
{
    return ((size_t)a->q.n * (size_t)a->q.h * 4 + 255) / 256 * 256;
}

kernel make(cudnnHandle_t handle, const upipe_attn *a)
{
    auto graph = std::make_shared<fe::graph::Graph>();
    graph->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    auto how = fe::graph::SDPA_attributes().set_generate_stats(true).set_attn_scale(
        a->scale != 0 ? a->scale : 1 / sqrtf((float)a->q.d));
    if (a->mask.causal)
        how.set_diagonal_band_right_bound(0); /* from the top left: row i and key i have one position */
    auto out = graph->sdpa(graph->tensor(tensor(a->q, Q)), graph->tensor(tensor(a->k, K)),
                           graph->tensor(tensor(a->v, V)), how);
    out[0]->set_output(true).set_dim(shape(a->o)).set_stride(strides(a->o)).set_uid(O);
    out[1]->set_output(true).set_data_type(fe::DataType_t::FLOAT).set_uid(STATS);
    out[1]->set_dim(shape(stats_of(a))).set_stride(strides(stats_of(a)));
    int64_t bytes = 0;
    if (graph->build(handle, {fe::HeurMode_t::A}).is_bad() || graph->get_workspace_size(bytes).is_bad())
        return {nullptr, 0};
    return {graph, (size_t)bytes};
}

/* The plan for a call; NULL: the library serves it. */
const kernel *find(const upipe_ops *ops, const upipe_attn *a)
{
    auto *own = (cudnn_own *)plug_of(ops)->own;
    if (!plug_is_plain(a) || a->q.dtype != UPIPE_BF16 || a->o.dtype != UPIPE_BF16) return NULL;
    int32_t scale;
    memcpy(&scale, &a->scale, sizeof scale);
    std::vector<int64_t> key = {a->mask.causal != 0, scale};
    for (auto v : {a->q, a->k, a->v, a->o})
        for (auto n : {v.n, (int64_t)v.h, (int64_t)v.d, v.n_step, v.h_step}) key.push_back(n);
    auto at = own->kernels.find(key);
    if (at == own->kernels.end()) at = own->kernels.emplace(key, make(own->handle, a)).first;
    return at->second.graph != nullptr ? &at->second : NULL;
}

upipe_status fwd(upipe_ctx *c, const upipe_attn *a)
{
    plug *p = plug_of(c->ops);
    auto *own = (cudnn_own *)p->own;
    const kernel *k = find(c->ops, a);
    if (k == NULL || stats_bytes(a) + k->bytes > a->work_bytes) {
        ++p->passed;
        return p->base.attn_fwd(c, a);
    }
    upipe_view stats = stats_of(a);
    std::unordered_map<int64_t, void *> tensors = {
        {Q, a->q.data}, {K, a->k.data}, {V, a->v.data}, {O, a->o.data}, {STATS, stats.data}};
    ++p->served;
    if (cudnnSetStream(own->handle, (cudaStream_t)c->stream) != CUDNN_STATUS_SUCCESS)
        return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "cudnnSetStream failed");
    auto done = k->graph->execute(own->handle, tensors, (char *)a->work + stats_bytes(a));
    if (done.is_bad()) return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "cuDNN: %s", done.get_message().c_str());
    return c->ops->cast(c, a->lse, stats);
}

upipe_status bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    plug *p = plug_of(c->ops);
    ++p->passed;
    return p->base.attn_bwd(c, g);
}

/* Enough for whoever serves the call. */
size_t bytes(const upipe_ops *ops, const upipe_attn *a, int backward)
{
    const kernel *k = backward ? NULL : find(ops, a);
    const size_t theirs = plug_of(ops)->base.attn_bytes(ops, a, backward);
    const size_t ours = k != NULL ? stats_bytes(a) + k->bytes : 0;
    return ours > theirs ? ours : theirs;
}

} /* namespace */

upipe_status plug_cudnn_open(plug *p, upipe_ops *ops, upipe_err *e)
{
    memset(p, 0, sizeof *p);
    p->base = *ops;
    auto *own = new cudnn_own{};
    cudnnStatus_t made = cudnnCreate(&own->handle);
    if (made != CUDNN_STATUS_SUCCESS) {
        delete own;
        return upipe_fail(e, UPIPE_ERR_BACKEND, "cudnnCreate: %s", cudnnGetErrorString(made));
    }
    p->own = own;
    ops->host = p;
    ops->attn_fwd = fwd;
    ops->attn_bwd = bwd;
    ops->attn_bytes = bytes;
    return UPIPE_OK;
}

void plug_cudnn_close(plug *p)
{
    auto *own = (cudnn_own *)p->own;
    if (own == NULL) return;
    own->kernels.clear();
    cudnnDestroy(own->handle);
    delete own;
    p->own = NULL;
}
