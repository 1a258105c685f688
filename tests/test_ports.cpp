/* test_ports.cpp -- examples/ports on the CPU: both interfaces, forward and backward, held to attention in f64
 *
 * Each rank calls with its tokens of every sequence, as a trainer does. The truth is of the whole sequence.
 */
#include "../upipe/net/upipe_net_threads_host.h"
#include "../upipe/cpu/upipe_cpu.h"
#include "../examples/ports/port.h"

extern "C" {
#include "lib/test.h"
}

#include <cmath>
#include <cstring>
#include <string>

enum { T = 12, B = 2, HQ = 4, HKV = 2, D = 32, W = (HQ + 2 * HKV) * D, O = HQ * D, LAYERS = 2 };

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
static void layers(job *j, upipe_host *h)
{
    const int local = (int)h->plan.local;
    std::vector<float> qkv[LAYERS], out[LAYERS], lse[LAYERS], dqkv, dout, dsinks;
    AttentionParams p[LAYERS] = {};
    for (int l = 0; l < LAYERS; ++l) {
        qkv[l] = mine(h->plan, j->want[l].qkv, W), out[l].resize((std::size_t)(B * local * O));
        lse[l].resize((std::size_t)(B * local * HQ));
        p[l].qkv = qkv[l].data(), p[l].out = out[l].data(), p[l].lse = lse[l].data();
        p[l].B = B, p[l].T = local, p[l].Hq = HQ, p[l].Hkv = HKV, p[l].d = D;
        p[l].window = j->m.window, p[l].scale = j->m.scale, p[l].sinks = const_cast<float *>(j->m.sinks);
        p[l].cu_seqlens = j->m.borders, p[l].documents = j->m.documents;
    }
    for (int l = 0; l < 2 * LAYERS; ++l) call(j, p[l % LAYERS], false);
    for (int l = LAYERS; l-- > 0;) {
        check_near(out[l], mine(h->plan, j->want[l].out, O), "out");
        dqkv.assign(qkv[l].size(), 0), dsinks.assign(HQ, 0), dout = mine(h->plan, j->want[l].dout, O);
        p[l].d_qkv = dqkv.data(), p[l].d_out = dout.data();
        if (j->m.sinks != nullptr) p[l].d_sinks = dsinks.data();
        call(j, p[l], true);
        check_near(dqkv, mine(h->plan, j->want[l].dqkv, W), "dqkv");
        if (j->m.sinks == nullptr) continue;
        CHECK(upipe_all_reduce(&h->ctx, h->ctx.team, dsinks.data(), HQ) == UPIPE_OK);
        check_near(dsinks, j->want[l].dsinks, "dsinks");
    }
    p[0].T = local + 1;
    CHECK(AttentionBackendRegistry::instance().select(p[0]) == nullptr);
    try {
        attention_forward_cudnn(p[0].out, p[0].lse, p[0].qkv, B, local + 1, HQ, HKV, D, nullptr);
        CHECK(!"a wrong shape must throw");
    } catch (const std::runtime_error &e) {
        CHECK_TEXT(e.what(), "another shape");
    }
}

static upipe_status body(void *user, upipe_host *h)
{
    upipe_status s = UPIPE_OK;
    port_host = h;
    try {
        layers(static_cast<job *>(user), h);
    } catch (const std::exception &e) {
        s = upipe_fail(&h->ctx.err, UPIPE_ERR_BACKEND, "%s", std::string(e.what()).c_str());
    }
    port_end();
    return s;
}

static void test_port(const upipe_ops *ops, const mask &m, bool by_class)
{
    job j = {};
    j.m = m, j.by_class = by_class;
    for (int l = 0; l < LAYERS; ++l) {
        for (std::size_t i = 0; i < j.want[l].qkv.size(); ++i)
            j.want[l].qkv[i] = (float)((int)(i * 37 + (std::size_t)l * 11) % 101 - 50) / 100;
        for (std::size_t i = 0; i < j.want[l].dout.size(); ++i)
            j.want[l].dout[i] = (float)((int)(i * 23) % 89 - 44) / 200;
        truth(j.want[l], m);
    }
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        upipe_host_desc d;
        upipe_err err;
        std::memset(&d, 0, sizeof d);
        d.plan.tokens = T, d.plan.batch = B, d.plan.ranks = ranks, d.plan.heads = HQ, d.plan.kv_heads = HKV;
        d.plan.head_dim = D, d.layers = LAYERS, d.user = &j;
        d.call.mask.causal = 1, d.call.mask.sinks = m.sinks;
        CHECK_STATUS(upipe_threads_hosts(&d, ops, 60, body, &err), UPIPE_OK, err);
    }
}

int main()
{
    static const float sinks[HQ] = {0.5f, -1, 0, 2};
    static const std::int32_t borders[] = {0, 5, 6, T, T + 8, B * T}; /* of the flattened batch */
    upipe_ops ops;
    upipe_cpu_ops(&ops);
    test_port(&ops, mask{}, false);
    test_port(&ops, mask{}, true);
    test_port(&ops, mask{4, 0.3f, sinks, nullptr, 0}, true);
    test_port(&ops, mask{0, 0, nullptr, borders, 5}, true);
    return test_end("ports");
}
