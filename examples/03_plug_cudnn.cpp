/* 03_plug_cudnn.cpp -- cuDNN's attention, forward and backward, in the table: bf16, full or causal, without older results
 *
 *     nvcc -O3 -std=c++17 -arch=sm_90a -DCUDNN_FRONTEND_SKIP_JSON_LIB -I . -I$FRONTEND examples/03_plug_cudnn.cpp \
 *         examples/09_cuda.cu -lcudnn -lnvrtc -lcublas && ./a.out
 *
 * FRONTEND: the folder include of cuDNN's header library cudnn-frontend (pip install nvidia-cudnn-frontend). Before
 * Hopper: -arch=sm_80. A plan of cuDNN's is made once a shape, by the first call that asks for it: before a capture, and
 * before what is timed. Its backward wants O, which the table says, and overwrites dK and dV: it gets its own, in bf16.
 */
#include "upipe/cuda/upipe_cuda_device.h"
#include "upipe/upipe.h"

#include <cudnn_frontend.h>
#include <map>
#include <vector>

namespace fe = cudnn_frontend;

extern "C" upipe_status app_ops(upipe_ops *ops, upipe_cuda *device, upipe_err *e); /* 09_cuda.cu */

enum { TOKENS = 128, HEADS = 8, KV_HEADS = 4, DIM = 64 };
enum { COUNT = TOKENS * HEADS * DIM, KV_COUNT = TOKENS * KV_HEADS * DIM };

/* A call's tensors, in this order; the forward's end with STATS. */
enum { Q, K, V, O, STATS, DOUT, DQ, DK, DV };
using tensors = std::vector<upipe_view>;

struct kernel {
    std::shared_ptr<fe::graph::Graph> graph; /* NULL: cuDNN does not take this shape */
    size_t own, bytes;                       /* of its workspace; and with what lies behind it */
};

/* ops.user points here: the library copies tables, so an entry finds its things through that pointer alone. */
struct plug {
    upipe_ops base;         /* the table as it was: serves all other calls */
    int64_t served, passed; /* calls, of either kind */
    cudnnHandle_t handle;
    std::map<std::vector<int64_t>, kernel> kernels;
};

/* Log-sum-exps as cuDNN lays them out, [H][Sq], and its own dK and dV lie in scratch. */
static tensors tensors_of(const upipe_attn *a, const upipe_view *dout, const upipe_view *dq)
{
    const int64_t rows = a->lse.n;
    tensors t = {a->q, a->k, a->v, a->o, upipe_view_make(NULL, UPIPE_F32, rows, 1, a->lse.h, rows, 1)};
    if (dout == NULL) return t;
    t.insert(t.end(), {*dout, *dq});
    for (auto v : {a->k, a->v}) t.push_back(upipe_view_packed(NULL, UPIPE_BF16, v.n, v.h, v.d));
    return t;
}

/* Gives these their places behind cuDNN's workspace; returns where they end. */
static size_t place(tensors &t, size_t at, void *work)
{
    for (size_t i : {STATS, DK, DV}) {
        if (i >= t.size()) break;
        t[i].data = upipe_offset(work, at);
        at += ((size_t)(t[i].n * t[i].h * t[i].d) * upipe_dtype_bytes(t[i].dtype) + 255) / 256 * 256;
    }
    return at;
}

/* One batch, with the stride that cuDNN before 9.26 wants of packed log-sum-exps. A tensor's number is not 0. */
static fe::graph::Tensor_attributes tensor(upipe_view v, size_t i)
{
    auto t = fe::graph::Tensor_attributes().set_dim({1, v.h, v.n, v.d}).set_uid((int64_t)i + 1);
    t.set_data_type(v.dtype == UPIPE_F32 ? fe::DataType_t::FLOAT : fe::DataType_t::BFLOAT16);
    return t.set_stride({std::max(v.n * v.n_stride, v.h * v.h_stride), v.h_stride, v.n_stride, 1});
}

static kernel make(cudnnHandle_t handle, const upipe_attn *a, tensors t)
{
    auto graph = std::make_shared<fe::graph::Graph>();
    graph->set_io_data_type(fe::DataType_t::BFLOAT16);
    graph->set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
    const auto in = [&](size_t i) { return graph->tensor(tensor(t[i], i)); };
    const auto out = [&](std::shared_ptr<fe::graph::Tensor_attributes> to, size_t i) {
        const auto as = tensor(t[i], i);
        to->set_output(true).set_uid(as.get_uid()).set_dim(as.get_dim()).set_stride(as.get_stride());
        to->set_data_type(as.get_data_type());
    };
    const auto masked = [&](auto how) { /* from the top left, as row i and key i are one token */
                                        if (a->mask.causal) how.set_diagonal_band_right_bound(0);
                                        return how.set_attn_scale(upipe_attn_scale(a));
    };
    if (t.size() <= DOUT) {
        auto how = masked(fe::graph::SDPA_attributes().set_generate_stats(true));
        auto made = graph->sdpa(in(Q), in(K), in(V), how);
        out(made[0], O), out(made[1], STATS);
    } else {
        auto how = masked(fe::graph::SDPA_backward_attributes().set_deterministic_algorithm(true));
        auto made = graph->sdpa_backward(in(Q), in(K), in(V), in(O), in(DOUT), in(STATS), how);
        out(made[0], DQ), out(made[1], DK), out(made[2], DV);
    }
    int64_t bytes = 0;
    if (graph->build(handle, {fe::HeurMode_t::A}).is_bad() || graph->get_workspace_size(bytes).is_bad())
        return {};
    const size_t own = ((size_t)bytes + 255) / 256 * 256;
    return {graph, own, place(t, own, NULL)};
}

/* The plan for a call; NULL: the library serves it. cuDNN gets neither masks beyond full and causal, those of later
 * versions of the library among them, nor older results to add to, nor rows at other positions than the keys. */
static const kernel *find(const upipe_ops *ops, const upipe_attn *a, const tensors &t)
{
    plug *p = (plug *)ops->user;
    upipe_mask known = {};
    known.causal = a->mask.causal;
    if (memcmp(&known, &a->mask, sizeof known) != 0 || a->merge || a->v.d != a->q.d || a->q.n == 0 ||
        a->q.n != a->k.n || a->q_pos != a->k_pos || a->q.dtype != UPIPE_BF16 || a->o.dtype != UPIPE_BF16)
        return NULL;
    int32_t scale;
    memcpy(&scale, &a->scale, sizeof scale);
    std::vector<int64_t> key = {a->mask.causal != 0, scale};
    for (auto v : t)
        for (auto n : {v.n, (int64_t)v.h, (int64_t)v.d, v.n_stride, v.h_stride}) key.push_back(n);
    auto at = p->kernels.find(key);
    if (at == p->kernels.end()) at = p->kernels.emplace(key, make(p->handle, a, t)).first;
    return at->second.graph != nullptr ? &at->second : NULL;
}

static upipe_status run(upipe_ctx *c, const kernel *k, void *work, const tensors &t)
{
    plug *p = (plug *)c->ops->user;
    std::unordered_map<int64_t, void *> at;
    for (auto v : t) at.emplace(at.size() + 1, v.data);
    ++p->served;
    if (cudnnSetStream(p->handle, (cudaStream_t)c->stream) != CUDNN_STATUS_SUCCESS)
        return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "cudnnSetStream failed");
    auto done = k->graph->execute(p->handle, at, work);
    if (done.is_good()) return UPIPE_OK;
    return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "cuDNN: %s", done.get_message().c_str());
}

static upipe_status plug_fwd(upipe_ctx *c, const upipe_attn *a)
{
    plug *p = (plug *)c->ops->user;
    tensors t = tensors_of(a, NULL, NULL);
    const kernel *k = find(c->ops, a, t);
    if (k == NULL || k->bytes > a->work_bytes) return ++p->passed, p->base.attn_fwd(c, a);
    place(t, k->own, a->work);
    UPIPE_TRY(run(c, k, a->work, t));
    return c->ops->cast(c, a->lse, t[STATS]);
}

static upipe_status plug_bwd(upipe_ctx *c, const upipe_attn_grad *g)
{
    plug *p = (plug *)c->ops->user;
    tensors t = tensors_of(&g->a, &g->dout, &g->dq);
    const kernel *k = find(c->ops, &g->a, t);
    if (k == NULL || k->bytes > g->a.work_bytes) return ++p->passed, p->base.attn_bwd(c, g);
    place(t, k->own, g->a.work);
    UPIPE_TRY(c->ops->cast(c, t[STATS], g->a.lse));
    UPIPE_TRY(run(c, k, g->a.work, t));
    UPIPE_TRY(c->ops->add(c, g->dk, t[DK]));
    return c->ops->add(c, g->dv, t[DV]);
}

/* Enough for whoever serves the call. dO and dQ lie as O and Q do. */
static size_t plug_bytes(const upipe_ops *ops, const upipe_attn *a, int backward)
{
    const kernel *k = find(ops, a, tensors_of(a, backward ? &a->o : NULL, &a->q));
    return upipe_max_bytes(((plug *)ops->user)->base.attn_bytes(ops, a, backward), k != NULL ? k->bytes : 0);
}

/* ---- a call with it and without, forward and backward ---- */

static upipe_ctx c;

static void must(upipe_status s)
{
    if (s == UPIPE_OK) return;
    fprintf(stderr, "%s: %s\n", upipe_status_name(s), c.err.text);
    exit(1);
}

/* A tensor [TOKENS][h][d] of the device with the values f(step * i), which bf16 holds: the upper half of an f32. */
static upipe_view tensor_of(upipe_dtype dtype, int h, int d, float (*f)(float), float step)
{
    const size_t bytes = (size_t)(TOKENS * h * d) * upipe_dtype_bytes(dtype);
    std::vector<uint16_t> host(bytes / 2);
    void *data;
    for (size_t i = 0; f != NULL && i < host.size(); ++i) {
        const float value = f(step * (float)i);
        memcpy(&host[i], (const char *)&value + 2, 2);
    }
    must(upipe_cuda_slab(&data, bytes, &c.err)); /* as long as the process lives */
    must(c.ops->copy(&c, data, host.data(), bytes));
    return upipe_view_packed(data, dtype, TOKENS, h, d);
}

/* dq, dk and dv, one behind the other. */
static std::vector<float> grads_by(const upipe_ops *ops, upipe_attn_grad g)
{
    std::vector<float> all(COUNT + 2 * KV_COUNT);
    const upipe_view wide = tensor_of(UPIPE_F32, HEADS, DIM, NULL, 0);
    g.dk = tensor_of(UPIPE_F32, KV_HEADS, DIM, NULL, 0), g.dv = tensor_of(UPIPE_F32, KV_HEADS, DIM, NULL, 0);
    c.ops = ops;
    g.a.work_bytes = upipe_max_bytes(ops->attn_bytes(ops, &g.a, 0), ops->attn_bytes(ops, &g.a, 1));
    must(upipe_cuda_slab(&g.a.work, g.a.work_bytes, &c.err));
    must(upipe_attn_fwd(&c, &g.a));
    must(ops->rowdot(&c, g.delta, g.dout, g.a.o));
    must(upipe_attn_bwd(&c, &g));
    must(ops->cast(&c, wide, g.dq));
    must(ops->copy(&c, all.data(), wide.data, 4 * COUNT)); /* there when it returns */
    must(ops->copy(&c, all.data() + COUNT, g.dk.data, 4 * KV_COUNT));
    must(ops->copy(&c, all.data() + COUNT + KV_COUNT, g.dv.data, 4 * KV_COUNT));
    return all;
}

int main()
{
    plug own = {};
    upipe_ops with;
    upipe_cuda device;
    upipe_attn_grad g = {};
    cudaStream_t stream;
    cublasHandle_t blas;
    int bad = 0;
    if (cudaStreamCreate(&stream) != cudaSuccess || cublasCreate(&blas) != CUBLAS_STATUS_SUCCESS ||
        cudnnCreate(&own.handle) != CUDNN_STATUS_SUCCESS)
        return fprintf(stderr, "no CUDA device, or no cuBLAS, or no cuDNN\n"), 1;
    must(upipe_cuda_init(&device, blas, &c.err));
    must(app_ops(&own.base, &device, &c.err));
    with = own.base, with.user = &own;
    with.attn_fwd = plug_fwd, with.attn_bwd = plug_bwd, with.attn_bytes = plug_bytes, with.attn_reads_o = 1;
    c.ops = &own.base, c.stream = stream;
    g.a.q = tensor_of(UPIPE_BF16, HEADS, DIM, sinf, 0.37f),
    g.a.k = tensor_of(UPIPE_BF16, KV_HEADS, DIM, sinf, 0.23f);
    g.a.v = tensor_of(UPIPE_BF16, KV_HEADS, DIM, cosf, 0.41f),
    g.dout = tensor_of(UPIPE_BF16, HEADS, DIM, cosf, 0.11f);
    g.a.o = tensor_of(UPIPE_BF16, HEADS, DIM, NULL, 0), g.dq = tensor_of(UPIPE_BF16, HEADS, DIM, NULL, 0);
    g.a.lse = tensor_of(UPIPE_F32, HEADS, 1, NULL, 0), g.delta = tensor_of(UPIPE_F32, HEADS, 1, NULL, 0);
    g.a.mask.causal = 1;
    for (int window = 0; window <= 50; window += 50) {
        float most = 0, error = 0;
        g.a.mask.window = window, own.served = own.passed = 0;
        const auto library = grads_by(&own.base, g), grads = grads_by(&with, g);
        for (size_t i = 0; i < grads.size() && !std::isnan(error); ++i) { /* a NaN is the most */
            most = fmaxf(most, fabsf(library[i]));
            if (!(fabsf(grads[i] - library[i]) <= error)) error = fabsf(grads[i] - library[i]);
        }
        printf("%-14s %lld calls served, %lld passed on; gradients differ by %.1e of their largest\n",
               window > 0 ? "with a window" : "causal", (long long)own.served, (long long)own.passed,
               (double)(error / most));
        /* another kernel has other bits, and the library's own have the same */
        bad |= window > 0 ? error != 0 : !(error > 0 && error < 2e-2f * most);
    }
    return bad;
}
