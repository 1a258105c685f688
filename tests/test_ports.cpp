/* test_ports.cpp -- examples/ports: both interfaces, forward and backward, held to attention in f64
 *
 * Each rank calls with its tokens of every sequence, as a trainer does. The truth is of the whole sequence. With UPIPE_WITH_CUDA
 * ranks have a device and a stream each, of the fake CUDA, and meet over its NCCL; where RANK is set, this process is one of two.
 * Without, they are threads on the CPU.
 */
#ifdef UPIPE_WITH_CUDA
#include "fake/fake_pool.h"

#include "../upipe/net/upipe_net_nccl.h"
#include "../upipe/cuda/upipe_cuda_device.h"
#endif
#include "../upipe/net/upipe_net_threads_session.h"
#include "../upipe/cpu/upipe_cpu.h"
#include "../examples/ports/cpp/port.h"

extern "C" {
#include "lib/test.h"
}

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>

enum { T = 12, B = 2, HQ = 4, HKV = 2, D = 32, W = (HQ + 2 * HKV) * D, O = HQ * D, LAYERS = 2 };

/* ---- where ranks compute: tensors of this rank, and the ranks themselves ---- */

#ifdef UPIPE_WITH_CUDA

extern "C" upipe_status app_ops(upipe_ops *ops, upipe_cuda *device, upipe_err *e);

static void check_cuda(cudaError_t r)
{
    CHECK_SAY(r == cudaSuccess, "%s", cudaGetErrorString(r));
}

/* Numbers in the device's memory, put there and read on the rank's stream. */
class tensor
{
  public:
    explicit tensor(std::vector<float> with) : numbers(std::move(with))
    {
        check_cuda(cudaMalloc(&memory, bytes()));
        check_cuda(cudaMemcpyAsync(memory, numbers.data(), bytes(), cudaMemcpyHostToDevice, stream));
    }
    tensor(const tensor &) = delete;
    tensor &operator=(const tensor &) = delete;
    ~tensor()
    {
        check_cuda(cudaFree(memory));
    }
    float *data()
    {
        return static_cast<float *>(memory);
    }
    const std::vector<float> &get()
    {
        check_cuda(cudaMemcpyAsync(numbers.data(), memory, bytes(), cudaMemcpyDeviceToHost, stream));
        check_cuda(cudaStreamSynchronize(stream));
        return numbers;
    }
    static thread_local cudaStream_t stream;

  private:
    std::size_t bytes() const
    {
        return numbers.size() * sizeof(float);
    }
    std::vector<float> numbers;
    void *memory = nullptr;
};
thread_local cudaStream_t tensor::stream;

struct devices {
    const upipe_session_desc *desc;
    upipe_status (*body)(void *user, upipe_session *h);
    ncclUniqueId id;
};

static upipe_status device_rank(void *user, int rank)
{
    const auto *d = static_cast<const devices *>(user);
    const auto h = std::make_unique<upipe_session>();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t nccl = nullptr;
    upipe_nccl team;
    upipe_cuda cuda;
    upipe_ops ops;
    upipe_err err = {};
    void *slab;
    fake_rank(rank);
    check_cuda(cudaSetDevice(rank));
    check_cuda(cudaStreamCreateWithFlags(&tensor::stream, cudaStreamNonBlocking));
    CHECK_STATUS(upipe_cuda_init(&cuda, nullptr, &err), UPIPE_OK, err);
    CHECK_STATUS(app_ops(&ops, &cuda, &err), UPIPE_OK, err);
    config.blocking = 0;
    (void)ncclCommInitRankConfig(&nccl, d->desc->plan.ranks, d->id, rank, &config);
    CHECK_STATUS(upipe_nccl_init(&team, nccl, 60, &err), UPIPE_OK, err);
    h->ctx.ops = &ops, h->ctx.team = &team.comm, h->ctx.stream = tensor::stream;
    CHECK_STATUS(upipe_session_open(h.get(), d->desc), UPIPE_OK, h->ctx.err);
    CHECK_STATUS(upipe_cuda_slab(&slab, upipe_session_slab_bytes(h.get()), &err), UPIPE_OK, err);
    CHECK_STATUS(upipe_session_slab(h.get(), slab), UPIPE_OK, h->ctx.err);
    const upipe_status s = d->body(d->desc->user, h.get());
    CHECK_STATUS(s, UPIPE_OK, h->ctx.err);
    CHECK_STATUS(upipe_session_close(h.get()), UPIPE_OK, h->ctx.err);
    CHECK_STATUS(upipe_nccl_free(&team, &err), UPIPE_OK, err);
    CHECK_STATUS(upipe_cuda_slab_free(slab, &err), UPIPE_OK, err);
    CHECK(ncclCommAbort(nccl) == ncclSuccess);
    check_cuda(cudaStreamDestroy(tensor::stream));
    CHECK_STATUS(upipe_cuda_free(&cuda, &err), UPIPE_OK, err);
    return s;
}

enum { RANKS_MOST = 2 };

/* From rank 0 to the other process, by a file for each team. */
static void share(ncclUniqueId *id, int rank)
{
    static int teams;
    const std::string name = std::getenv("MASTER_ADDR") + std::to_string(teams++);
    if (rank == 0) {
        CHECK(ncclGetUniqueId(id) == ncclSuccess);
        std::ofstream(name + "-part").write(id->internal, sizeof *id);
        CHECK(std::rename((name + "-part").c_str(), name.c_str()) == 0);
    } else {
        for (int i = 0; i < 6000 && !std::ifstream(name).read(id->internal, sizeof *id); ++i) test_nap(0.01);
    }
}

static void run_ranks(const upipe_session_desc &desc, upipe_status (*body)(void *user, upipe_session *h))
{
    devices d = {&desc, body, {}};
    upipe_threads crew;
    upipe_err err;
    if (const char *rank = std::getenv("RANK")) {
        if (desc.plan.ranks < RANKS_MOST) return;
        share(&d.id, std::atoi(rank));
        CHECK(device_rank(&d, std::atoi(rank)) == UPIPE_OK);
        CHECK(fake_check_clean());
        return;
    }
    CHECK(ncclGetUniqueId(&d.id) == ncclSuccess);
    CHECK_STATUS(upipe_threads_init(&crew, desc.plan.ranks, 60, &err), UPIPE_OK, err);
    CHECK_STATUS(upipe_threads_run(&crew, device_rank, &d, nullptr, &err), UPIPE_OK, err);
    upipe_threads_free(&crew);
    CHECK(fake_check_clean());
}

#else

class tensor
{
  public:
    explicit tensor(std::vector<float> with) : numbers(std::move(with))
    {
    }
    float *data()
    {
        return numbers.data();
    }
    const std::vector<float> &get() const
    {
        return numbers;
    }
    static constexpr cudaStream_t stream = nullptr;

  private:
    std::vector<float> numbers;
};

enum { RANKS_MOST = 4 };

static void run_ranks(const upipe_session_desc &desc, upipe_status (*body)(void *user, upipe_session *h))
{
    upipe_ops ops;
    upipe_err err;
    upipe_cpu_ops(&ops);
    CHECK_STATUS(upipe_threads_sessions(&desc, &ops, 60, body, &err), UPIPE_OK, err);
}

#endif

/* ---- the truth ---- */

struct mask {
    int window;
    float scale;
    const float *sinks;
    const std::int32_t *borders;
    int documents;
};

/* The whole sequences' tensors of one layer. */
struct whole {
    std::vector<float> qkv = std::vector<float>(B * T * W), out = std::vector<float>(B * T * O), dqkv = qkv,
                       dout = out;
    std::vector<float> dsinks = std::vector<float>(HQ);
};

/* Of the sequence that begins at position `first`. */
static bool sees(const mask &m, int first, int i, int j)
{
    bool same = j <= i && (m.window == 0 || j > i - m.window);
    for (int n = 0; n <= m.documents && m.borders != nullptr; ++n)
        same = same && (first + i < m.borders[n]) == (first + j < m.borders[n]);
    return same;
}

static double dot(const float *a, const float *b)
{
    double sum = 0;
    for (int c = 0; c < D; ++c) sum += (double)a[c] * b[c];
    return sum;
}

/* out and gradients in f64, query by query. */
static void truth(whole &w, const mask &m)
{
    const double scale = m.scale != 0 ? m.scale : 1 / std::sqrt((double)D);
    std::vector<double> grad(w.qkv.size());
    for (int row = 0; row < B * T * HQ; ++row) {
        const int h = row % HQ, i = row / HQ % T, first = row / HQ / T * T, kv = h / (HQ / HKV);
        const int q = (first + i) * W + h * D;
        const float *g = &w.dout[(std::size_t)((first + i) * O + h * D)];
        double p[T] = {}, total = m.sinks != nullptr ? std::exp((double)m.sinks[h]) : 0, o[D] = {}, delta = 0;
        const double sink = total;
        for (int j = 0; j < T; ++j)
            if (sees(m, first, i, j))
                total += p[j] = std::exp(scale * dot(&w.qkv[(std::size_t)q],
                                                     &w.qkv[(std::size_t)((first + j) * W + (HQ + kv) * D)]));
        for (int j = 0; j < T; ++j)
            for (int c = 0; c < D; ++c)
                o[c] += p[j] / total * w.qkv[(std::size_t)((first + j) * W + (HQ + HKV + kv) * D + c)];
        for (int c = 0; c < D; ++c) {
            w.out[(std::size_t)((first + i) * O + h * D + c)] = (float)o[c];
            delta += o[c] * g[c];
        }
        w.dsinks[(std::size_t)h] -= (float)(sink / total * delta);
        for (int j = 0; j < T; ++j) {
            const int k = (first + j) * W + (HQ + kv) * D, v = k + HKV * D;
            const double slope = p[j] / total * (dot(g, &w.qkv[(std::size_t)v]) - delta) * scale;
            for (int c = 0; c < D; ++c) {
                grad[(std::size_t)(q + c)] += slope * w.qkv[(std::size_t)(k + c)];
                grad[(std::size_t)(k + c)] += slope * w.qkv[(std::size_t)(q + c)];
                grad[(std::size_t)(v + c)] += p[j] / total * g[c];
            }
        }
    }
    for (std::size_t i = 0; i < grad.size(); ++i) w.dqkv[i] = (float)grad[i];
}

struct job {
    whole want[LAYERS];
    mask m;
    bool by_class;
};

/* This rank's tokens of a whole tensor, `width` numbers each. */
static std::vector<float> mine(const upipe_plan &p, const std::vector<float> &all, int width)
{
    std::vector<float> part;
    for (int b = 0; b < B; ++b)
        for (int64_t t = 0; t < p.local; ++t) {
            const auto from = all.begin() + (b * T + upipe_shard_pos(&p.shard, t)) * width;
            part.insert(part.end(), from, from + width);
        }
    return part;
}

static void check_near(const std::vector<float> &got, const std::vector<float> &want, const char *what)
{
    double apart = 0;
    for (std::size_t i = 0; i < want.size(); ++i)
        apart = std::fmax(apart, std::isnan(got[i]) ? 1e9 : std::fabs((double)got[i] - want[i]));
    CHECK_SAY(apart < 2e-6, "%s is off by %g", what, apart);
}

static void call(job *j, AttentionParams &p, bool backward)
{
    AttentionBackend *serving = AttentionBackendRegistry::instance().select(p);
    if (j->by_class && backward)
        serving->backward(p);
    else if (j->by_class)
        serving->forward(p);
    else if (backward)
        attention_backward_cudnn(p.d_qkv, p.d_out, p.qkv, p.out, p.lse, p.B, p.T, p.Hq, p.Hkv, p.d, p.stream);
    else
        attention_forward_cudnn(p.out, p.lse, p.qkv, p.B, p.T, p.Hq, p.Hkv, p.d, p.stream);
}

/* Two layers in flight, each of them forward twice: the first time is an evaluation. */
static void layers(job *j, upipe_session *h)
{
    const int local = (int)h->plan.local;
    const auto zeros = [](int n) { return std::vector<float>((std::size_t)n); };
    std::vector<std::unique_ptr<tensor>> qkv, out, lse;
    std::unique_ptr<tensor> sinks;
    AttentionParams p[LAYERS] = {};
    if (j->m.sinks != nullptr)
        sinks = std::make_unique<tensor>(std::vector<float>(j->m.sinks, j->m.sinks + HQ));
    for (int l = 0; l < LAYERS; ++l) {
        qkv.push_back(std::make_unique<tensor>(mine(h->plan, j->want[l].qkv, W)));
        out.push_back(std::make_unique<tensor>(zeros(B * local * O)));
        lse.push_back(std::make_unique<tensor>(zeros(B * local * HQ)));
        p[l].qkv = qkv[l]->data(), p[l].out = out[l]->data(), p[l].lse = lse[l]->data();
        p[l].B = B, p[l].T = local, p[l].Hq = HQ, p[l].Hkv = HKV, p[l].d = D, p[l].stream = tensor::stream;
        p[l].window = j->m.window, p[l].scale = j->m.scale, p[l].sinks = sinks ? sinks->data() : nullptr;
        p[l].cu_seqlens = j->m.borders, p[l].documents = j->m.documents;
    }
    for (int l = 0; l < 2 * LAYERS; ++l) call(j, p[l % LAYERS], false);
    for (int l = LAYERS; l-- > 0;) {
        check_near(out[l]->get(), mine(h->plan, j->want[l].out, O), "out");
        tensor dqkv(zeros(B * local * W)), dsinks(zeros(HQ)), dout(mine(h->plan, j->want[l].dout, O));
        p[l].d_qkv = dqkv.data(), p[l].d_out = dout.data();
        if (sinks) p[l].d_sinks = dsinks.data();
        call(j, p[l], true);
        check_near(dqkv.get(), mine(h->plan, j->want[l].dqkv, W), "dqkv");
        if (!sinks) continue;
        CHECK(upipe_all_reduce(&h->ctx, h->ctx.team, dsinks.data(), HQ) == UPIPE_OK);
        check_near(dsinks.get(), j->want[l].dsinks, "dsinks");
    }
    for (int i = 0; i < 10; ++i) { /* one less, or one more, of each number */
        int n[] = {B, local, HQ, HKV, D};
        n[i / 2] += i % 2 ? 1 : -1;
        p[0].B = n[0], p[0].T = n[1], p[0].Hq = n[2], p[0].Hkv = n[3], p[0].d = n[4];
        CHECK(AttentionBackendRegistry::instance().select(p[0]) == nullptr);
        try {
            attention_forward_cudnn(p[0].out, p[0].lse, p[0].qkv, n[0], n[1], n[2], n[3], n[4], nullptr);
            CHECK(!"a wrong shape must throw");
        } catch (const std::runtime_error &e) {
            CHECK_TEXT(e.what(), "another shape");
        }
    }
}

static upipe_status body(void *user, upipe_session *h)
{
    upipe_status s = UPIPE_OK;
    port_session = h;
    try {
        layers(static_cast<job *>(user), h);
    } catch (const std::exception &e) {
        s = upipe_fail(&h->ctx.err, UPIPE_ERR_BACKEND, "%s", std::string(e.what()).c_str());
    }
    port_end();
    return s;
}

static void test_port(const mask &m, bool by_class)
{
    static const std::int64_t whole_sequences[] = {0, T, B * T};
    static const float others[HQ] = {};
    job j = {};
    j.m = m, j.by_class = by_class;
    for (int l = 0; l < LAYERS; ++l) {
        for (std::size_t i = 0; i < j.want[l].qkv.size(); ++i)
            j.want[l].qkv[i] = (float)((int)(i * 37 + (std::size_t)l * 11) % 101 - 50) / 100;
        for (std::size_t i = 0; i < j.want[l].dout.size(); ++i)
            j.want[l].dout[i] = (float)((int)(i * 23) % 89 - 44) / 200;
        truth(j.want[l], m);
    }
    for (int ranks = 1; ranks <= RANKS_MOST; ranks *= 2) {
        upipe_session_desc d;
        std::memset(&d, 0, sizeof d);
        d.plan.tokens = T, d.plan.batch = B, d.plan.ranks = ranks, d.plan.heads = HQ, d.plan.kv_heads = HKV;
        d.plan.head_dim = D, d.layers = LAYERS, d.user = &j;
        d.call.mask.causal = 1; /* what a layer of a class has is its own */
        d.call.mask.sinks = m.sinks != nullptr ? others : nullptr, d.call.mask.window = m.window > 0 ? T : 0;
        d.call.mask.borders.cu_seqlens = m.documents > 0 ? whole_sequences : nullptr;
        d.call.mask.borders.cu_seqlens_n = m.documents > 0 ? B : 0;
        run_ranks(d, body);
    }
}

int main(int argc, char **argv)
{
    static const float sinks[HQ] = {0.5f, -1, 0, 2};
    static const std::int32_t borders[] = {0, 5, 6, T, T + 8, B * T}; /* of the flattened batch */
    test_begin(argc, argv);
    TEST(test_port(mask{}, false));
    TEST(test_port(mask{}, true));
    TEST(test_port(mask{4, 0.3f, sinks, nullptr, 0}, true));
    TEST(test_port(mask{0, 0, nullptr, borders, 5}, true));
    return test_end("ports");
}
