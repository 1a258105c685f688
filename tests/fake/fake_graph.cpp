/* fake_graph.cpp -- streams captured into graphs, and their launch   tests
 *
 * A stream that captures keeps what it is given as nodes, which nothing runs. What CUDA forbids meanwhile
 * (waiting, allocating, copies of ordinary memory, the legacy stream) fails and spoils the capture. A launch
 * runs the nodes in any order that their edges allow, the latest possible first: an event that is missing
 * inside of a graph shows as wrong data.
 */
#include "fake_core.h"

#include <algorithm>

struct CUgraph_st {
    std::vector<fake_node> nodes;
    bool live;
};

struct CUgraphExec_st {
    std::vector<fake_node> nodes;
    fake_point last; /* of its newest launch: launches of one graph come one after the other */
    bool live;
};

namespace
{

std::vector<fake_capture_ref> &active()
{
    static auto *list = new std::vector<fake_capture_ref>;
    return *list;
}

cudaError_t fail(const fake_call &call, cudaError_t mine)
{
    return fake_keep(call.error(mine, cudaErrorLaunchFailure));
}

/* No node of another stream is left that the first stream's work does not come after. */
bool joined(const fake_capture &c)
{
    std::vector<bool> seen(c.nodes.size());
    std::vector<size_t> next = c.streams[0]->tail;
    while (!next.empty()) {
        size_t n = next.back();
        next.pop_back();
        if (seen[n]) continue;
        seen[n] = true;
        next.insert(next.end(), c.nodes[n].after.begin(), c.nodes[n].after.end());
    }
    for (auto s : c.streams)
        for (auto n : s->tail)
            if (!seen[n]) return false;
    return true;
}

void end(const fake_capture_ref &c)
{
    for (auto s : c->streams) {
        s->capture = nullptr;
        s->tail.clear();
    }
    c->active = false;
    active().erase(std::find(active().begin(), active().end(), c));
}

/* The nodes in an order that their edges allow. */
std::vector<size_t> order_of(const std::vector<fake_node> &nodes)
{
    std::vector<size_t> order;
    std::vector<bool> done(nodes.size());
    while (order.size() < nodes.size()) {
        std::vector<size_t> ready;
        for (size_t i = 0; i < nodes.size(); ++i) {
            auto &after = nodes[i].after;
            if (!done[i] && std::all_of(after.begin(), after.end(), [&](size_t n) { return done[n]; }))
                ready.push_back(i);
        }
        size_t n = ready[fake_random((unsigned)ready.size())];
        done[n] = true;
        order.push_back(n);
    }
    return order;
}

} /* namespace */

void fake_spoil(const fake_capture_ref &c)
{
    c->spoilt = true;
}

cudaError_t fake_may(CUstream_st *s)
{
    if (s->capture != nullptr && s->capture->spoilt) return cudaErrorStreamCaptureInvalidated;
    if (!fake_is_legacy(s)) return cudaSuccess;
    for (auto &c : active())
        for (auto t : c->streams)
            if (t->device == s->device && t->blocking) {
                fake_spoil(c);
                return cudaErrorStreamCaptureImplicit;
            }
    return cudaSuccess;
}

cudaError_t fake_unsafe()
{
    cudaError_t e = cudaSuccess;
    for (auto &c : active()) {
        bool mine = c->thread == std::this_thread::get_id();
        if (c->mode == cudaStreamCaptureModeRelaxed || (c->mode == cudaStreamCaptureModeThreadLocal && !mine))
            continue;
        fake_spoil(c);
        e = cudaErrorStreamCaptureUnsupported;
    }
    return e;
}

void fake_capture_add(CUstream_st *s, const char *name, std::function<void()> work,
                      const std::shared_ptr<fake_group> &group)
{
    s->capture->nodes.push_back({name, std::move(work), group, s->tail});
    s->tail = {s->capture->nodes.size() - 1};
}

cudaError_t fake_capture_wait(CUstream_st *s, const fake_capture_ref &of, const std::vector<size_t> &nodes)
{
    if (of == nullptr) {
        fake_spoil(s->capture);
        return cudaErrorStreamCaptureIsolation;
    }
    if (!of->active) return cudaErrorCapturedEvent;
    if (fake_is_legacy(s)) {
        fake_spoil(of);
        return cudaErrorStreamCaptureImplicit;
    }
    if (s->capture == nullptr) {
        s->capture = of;
        of->streams.push_back(s);
    } else if (s->capture != of) {
        fake_spoil(of);
        fake_spoil(s->capture);
        return cudaErrorStreamCaptureMerge;
    }
    for (auto n : nodes)
        if (std::find(s->tail.begin(), s->tail.end(), n) == s->tail.end()) s->tail.push_back(n);
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    fake_call call("cudaStreamBeginCapture");
    CUstream_st *s = fake_stream(stream);
    if (call.fails) return fail(call, cudaErrorUnknown);
    if (fake_is_legacy(s)) return fake_keep(cudaErrorStreamCaptureUnsupported);
    if (s->capture != nullptr) return fake_keep(cudaErrorIllegalState);
    if ((unsigned)mode > cudaStreamCaptureModeRelaxed) return fake_keep(cudaErrorInvalidValue);
    s->capture = std::make_shared<fake_capture>();
    s->capture->streams = {s};
    s->capture->thread = std::this_thread::get_id();
    s->capture->mode = mode;
    s->capture->active = true;
    active().push_back(s->capture);
    return cudaSuccess;
}

/* Ends it in any case, but for a call from the wrong place. */
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out)
{
    fake_call call("cudaStreamEndCapture");
    CUstream_st *s = fake_stream(stream);
    fake_capture_ref c = s->capture;
    cudaError_t e = cudaSuccess;
    *out = NULL;
    if (c == nullptr) return fake_keep(cudaErrorIllegalState);
    if (c->streams[0] != s) return fake_keep(cudaErrorStreamCaptureUnmatched);
    if (c->mode != cudaStreamCaptureModeRelaxed && c->thread != std::this_thread::get_id())
        return fake_keep(cudaErrorStreamCaptureWrongThread);
    if (c->spoilt || fake_dead())
        e = cudaErrorStreamCaptureInvalidated;
    else if (!joined(*c))
        e = cudaErrorStreamCaptureUnjoined;
    end(c);
    if (call.fails) return fail(call, cudaErrorUnknown);
    if (e == cudaSuccess) *out = fake_made(new CUgraph_st{std::move(c->nodes), true});
    return fake_keep(e);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out)
{
    fake_call call("cudaStreamIsCapturing");
    CUstream_st *s = fake_stream(stream);
    if (call.fails) return fail(call, cudaErrorUnknown);
    cudaError_t e = fake_is_legacy(s) ? fake_may(s) : cudaSuccess;
    *out = s->capture == nullptr ? cudaStreamCaptureStatusNone
           : s->capture->spoilt  ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
    return fake_keep(e);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
    fake_call call("cudaGraphInstantiate");
    fake_alive(graph, "graph", call.name);
    if (call.fails) return fail(call, cudaErrorMemoryAllocation);
    if (out == NULL || flags != 0) return fake_keep(cudaErrorInvalidValue);
    *out = fake_made(new CUgraphExec_st{graph->nodes, {NULL, 0}, true});
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    fake_call call("cudaGraphLaunch");
    CUstream_st *s = fake_stream(stream);
    fake_alive(exec, "graph", call.name);
    if (call.fails) return fail(call, cudaErrorLaunchFailure);
    if (s->capture != nullptr) fake_finding("%s: a graph inside of a graph is not modelled", call.name);
    cudaError_t e = fake_may(s);
    if (e != cudaSuccess) return fake_keep(e);
    std::vector<fake_point> after;
    if (exec->last.stream != NULL) after.push_back(exec->last);
    fake_append(s, call.name, nullptr, after);
    for (auto n : order_of(exec->nodes)) {
        fake_node &node = exec->nodes[n];
        if (node.group != nullptr)
            fake_group_launch(node.group, s);
        else
            fake_append(s, node.name, node.work);
    }
    exec->last = {s, s->issued};
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    fake_call call("cudaGraphDestroy");
    fake_alive(graph, "graph", call.name)->live = false;
    graph->nodes.clear();
    --fake_handles;
    return call.fails ? fail(call, cudaErrorLaunchFailure) : cudaSuccess;
}

/* What is launched still runs. */
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    fake_call call("cudaGraphExecDestroy");
    fake_alive(exec, "graph", call.name)->live = false;
    exec->nodes.clear();
    --fake_handles;
    return call.fails ? fail(call, cudaErrorLaunchFailure) : cudaSuccess;
}
