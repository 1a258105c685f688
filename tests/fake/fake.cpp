/* fake.cpp -- what the fake libraries share: the lock, lazy streams, tracked memory, injected errors */
#include "fake_core.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

extern "C" {
__attribute__((weak)) void __asan_poison_memory_region(void const volatile *p, size_t bytes);
__attribute__((weak)) void __asan_unpoison_memory_region(void const volatile *p, size_t bytes);
}

namespace
{

/* A mapping of its own for every allocation. What lies before and behind the bytes, up to 255 of them, stays
 * 0xff, and then comes a page that nobody can touch. All begin as private views of one file of 0xff: pages that
 * nobody has touched cost nothing when the memory is opened and closed. */
struct block {
    char *map, *p;
    size_t map_bytes, bytes;
    fake_place place;
    int device, rank;
};

/* A block on a multiprocessor. */
struct resident {
    CUstream_st *stream;
    int processor;
    fake_needs needs;
    uint64_t end;
};

struct state {
    std::mutex lock;
    std::condition_variable news;
    bool changed = false; /* since news was last told */
    uint64_t progress = 0;
    uint64_t seed, rng;
    std::atomic<bool> eager;
    double patience;
    /* errors */
    std::map<int, long> calls, waits;
    long total = 0, fail_at = 0;
    int fail_rank = -1;
    bool fail_sticky = false, fail_kills = false, dead = false;
    std::string failed;
    /* streams */
    std::vector<CUstream_st *> streams, retired; /* retired: destroyed, and without work */
    CUstream_st *legacy[FAKE_DEVICES];
    uint64_t orders = 0;
    /* residency */
    fake_processors of = {}; /* count 0: it does not count */
    struct device {
        uint64_t clock;
        std::vector<resident> blocks;
        bool busy; /* a step of it is under way */
    } devices[FAKE_DEVICES] = {};
    /* memory */
    std::map<uintptr_t, block> blocks; /* by p */
    std::deque<block> freed;
    size_t live[2] = {0, 0}, peak = 0, limit, of_device[FAKE_DEVICES] = {};
    std::set<std::pair<int, std::string>> loaded; /* with FAKE_LAZY: kernels, by device */
    int blank = -1;                               /* the file of 0xff */
    size_t blank_bytes = 0;
    bool open = false;
    uint64_t closings = 0;
    struct sigaction fault_before;
    state();
};

state &all()
{
    static state *s = new state; /* never destroyed: threads may outlive main */
    return *s;
}

thread_local int this_rank = -1, this_device = 0;

const size_t default_limit = (size_t)4 << 30, freed_max = 256, page = 4096;

double number(const char *name, double otherwise)
{
    const char *s = getenv(name);
    return s != NULL && *s ? strtod(s, NULL) : otherwise;
}

/* Says what was touched, where it is the fake's; then the process ends as it would have. */
void on_fault(int signal, siginfo_t *info, void *context)
{
    state &g = all();
    const char *at = (const char *)info->si_addr, *what = NULL;
    const block *hit = NULL;
    for (auto &b : g.freed)
        if (at >= b.map && at < b.map + b.map_bytes) hit = &b, what = "freed";
    for (auto &b : g.blocks)
        if (at >= b.second.map && at < b.second.map + b.second.map_bytes) {
            hit = &b.second;
            what = at >= hit->p + hit->bytes || at < hit->p ? "outside, next to" : "the host touched live";
        }
    if (hit != NULL) {
        char text[256];
        int n = snprintf(text, sizeof text, "fake: finding: access to byte %td of %zu of %s %s memory\n",
                         at - hit->p, hit->bytes, what, hit->place == FAKE_DEVICE ? "device" : "pinned");
        if (write(2, text, (size_t)n) < 0) _exit(9);
        abort();
    }
    if (g.fault_before.sa_flags & SA_SIGINFO)
        g.fault_before.sa_sigaction(signal, info, context);
    else if (g.fault_before.sa_handler != SIG_DFL && g.fault_before.sa_handler != SIG_IGN)
        g.fault_before.sa_handler(signal);
    else
        std::signal(signal, SIG_DFL); /* comes again on return */
}

uint64_t random_bits(state &g)
{
    uint64_t z = (g.rng += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

state::state()
{
    const char *fail = getenv("FAKE_FAIL");
    struct sigaction fault;
    seed = rng = (uint64_t)number("FAKE_SEED", 0);
    eager = number("FAKE_EAGER", 0) != 0;
    patience = number("FAKE_PATIENCE", 60);
    limit = default_limit;
    if (fail != NULL && *fail) {
        char *end;
        fail_at = strtol(fail, &end, 0);
        fail_sticky = *end == 's';
        fail_kills = *end == 'k';
    }
    for (int d = 0; d < FAKE_DEVICES; ++d) {
        legacy[d] = new CUstream_st{d, true, true, false, {}, 0, 0};
        streams.push_back(legacy[d]);
    }
    if (number("FAKE_CLEAN", 0) != 0)
        atexit([] {
            if (fake_check_clean()) return;
            fflush(NULL); /* what the process has said */
            _exit(3);
        });
    memset(&fault, 0, sizeof fault);
    fault.sa_sigaction = on_fault;
    fault.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &fault, &fault_before);
}

void protect(const block &b, int how)
{
    if (mprotect(b.map, b.map_bytes - page, how) != 0) fake_finding("mprotect: %s", strerror(errno));
}

/* A system call for every allocation: after a while not each time. */
void close_memory(state &g)
{
    if (!g.open || (++g.closings > 4096 && g.closings % 32 != 0)) return;
    for (auto &b : g.blocks)
        if (b.second.place == FAKE_DEVICE) protect(b.second, PROT_NONE);
    g.open = false;
}

/* What fake_poison laid while everything ran at once. */
void lift_poison(state &g)
{
    if (!__asan_unpoison_memory_region) return;
    for (auto &b : g.blocks) __asan_unpoison_memory_region(b.second.p, b.second.bytes);
}

void tell(state &g)
{
    if (!g.changed) return;
    g.changed = false;
    g.news.notify_all();
}

void leave(state &g)
{
    close_memory(g);
    tell(g);
    g.lock.unlock();
}

/* The seed lets some operations run that nobody asked for. */
void let_run(state &g)
{
    if (g.eager || g.seed == 0 || g.dead) return;
    for (unsigned n = fake_random(4); n > 0; --n) {
        CUstream_st *s = g.streams[fake_random((unsigned)g.streams.size())];
        std::vector<CUstream_st *> path;
        if (!s->queue.empty()) fake_toward({s, s->done + 1}, path);
    }
}

/* What waits for no other stream. */
void run_ready(CUstream_st *s)
{
    while (!s->queue.empty() && s->queue.front().group == nullptr) {
        std::vector<CUstream_st *> path;
        for (auto &p : s->queue.front().after)
            if (!fake_passed(p)) return;
        fake_toward({s, s->done + 1}, path);
    }
}

void show_streams(state &g)
{
    for (auto s : g.streams)
        if (!s->queue.empty())
            fprintf(stderr, "fake: device %d, stream %p%s: %zu operations, the first is %s\n", s->device,
                    (void *)s, s->live ? "" : " (destroyed)", s->queue.size(), s->queue.front().name);
}

/* The allocation whose mapping holds the address. */
block *find(state &g, const void *p)
{
    auto next = g.blocks.upper_bound((uintptr_t)p);
    if (next != g.blocks.end() && (const char *)p >= next->second.map) return &next->second;
    if (next == g.blocks.begin()) return NULL;
    block *b = &std::prev(next)->second;
    return (const char *)p < b->map + b->map_bytes ? b : NULL;
}

} /* namespace */

long fake_handles;

void fake_finding(const char *format, ...)
{
    va_list args;
    fflush(stdout);
    fprintf(stderr, "fake: finding: ");
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, " (rank %d)\n", this_rank);
    abort();
}

/* ---- calls ---- */

fake_call::fake_call(const char *name_, bool polls) : name(name_), fails(false), dead(false)
{
    static thread_local std::vector<const char *> polled;
    static thread_local uint64_t others;
    state &g = all();
    bool counts = !polls || std::find(polled.begin(), polled.end(), name) == polled.end();
    g.lock.lock();
    if (!polls)
        polled.clear();
    else if (counts)
        polled.push_back(name);
    long mine = g.calls[this_rank] += counts;
    g.total += counts;
    others += !polls;
    run = others;
    dead = g.dead;
    if (counts && g.fail_at > 0 && (g.fail_rank < 0 || g.fail_rank == this_rank) &&
        (g.fail_rank < 0 ? g.total : mine) == g.fail_at) {
        if (g.fail_kills) raise(SIGKILL);
        fails = true;
        g.failed = name;
        g.fail_at = 0;
        if (g.fail_sticky) {
            dead = true;
            fake_end_context();
        }
    }
    fails = fails || dead;
    let_run(g);
}

fake_call::~fake_call()
{
    leave(all());
}

fake_look::fake_look()
{
    all().lock.lock();
}

fake_look::~fake_look()
{
    leave(all());
}

bool fake_asks_again(const fake_call &call, fake_point p)
{
    static thread_local std::vector<fake_point> asked;
    static thread_local uint64_t run;
    static thread_local bool waits;
    if (run != call.run) asked.clear(), waits = false;
    run = call.run;
    for (auto &q : asked)
        if (q.stream == p.stream && q.seq == p.seq) {
            all().waits[this_rank] += !waits;
            return waits = true;
        }
    asked.push_back(p);
    return false;
}

/* What is enqueued never runs. */
void fake_end_context()
{
    state &g = all();
    g.dead = true;
    for (auto s : g.streams) {
        s->queue.clear();
        s->done = s->issued;
        s->waiting = -1;
    }
    for (auto &d : g.devices) d.blocks.clear();
    fake_nccl_drop();
    fake_changed();
}

bool fake_dead()
{
    return all().dead;
}

void fake_changed()
{
    all().changed = true;
    ++all().progress;
}

unsigned fake_random(unsigned n)
{
    state &g = all();
    return g.seed == 0 ? n - 1 : (unsigned)(random_bits(g) % n);
}

/* ---- streams ---- */

CUstream_st *fake_stream_new(int device, bool blocking, int priority)
{
    state &g = all();
    CUstream_st *s = new CUstream_st{device, blocking, true, g.seed != 0 && fake_random(3) == 0, {}, 0, 0};
    for (size_t i = g.streams.size(); i-- > 0;)
        if (!g.streams[i]->live && g.streams[i]->queue.empty()) {
            g.retired.push_back(g.streams[i]);
            g.streams.erase(g.streams.begin() + (long)i);
        }
    s->priority = priority;
    g.streams.push_back(s);
    ++fake_handles;
    return s;
}

CUstream_st *fake_stream(cudaStream_t handle)
{
    state &g = all();
    if (handle == NULL || handle == cudaStreamLegacy) return g.legacy[this_device];
    bool known = std::find(g.streams.begin(), g.streams.end(), handle) != g.streams.end();
    if (!known && std::find(g.retired.begin(), g.retired.end(), handle) == g.retired.end())
        fake_finding("%p is no stream", (void *)handle);
    if (!handle->live) fake_finding("stream %p is used after it was destroyed", (void *)handle);
    return handle;
}

bool fake_is_legacy(const CUstream_st *s)
{
    return s == all().legacy[s->device];
}

bool fake_passed(fake_point p)
{
    return p.stream->done >= p.seq;
}

fake_point fake_append(CUstream_st *s, const char *name, std::function<void()> work,
                       const std::vector<fake_point> &after, const std::shared_ptr<fake_group> &group,
                       const fake_needs &needs)
{
    state &g = all();
    if (s->capture != nullptr) {
        fake_capture_add(s, name, std::move(work), group);
        return {s, 0};
    }
    fake_op op = {name, std::move(work), after, group, needs, ++g.orders};
    if (s == g.legacy[s->device]) {
        for (auto t : g.streams)
            if (t != s && t->device == s->device && t->blocking && !t->queue.empty())
                op.after.push_back({t, t->issued});
    } else if (s->blocking && !g.legacy[s->device]->queue.empty()) {
        op.after.push_back({g.legacy[s->device], g.legacy[s->device]->issued});
    }
    s->queue.push_back(std::move(op));
    ++s->issued;
    fake_changed();
    fake_point p = {s, s->issued};
    if (g.eager)
        fake_advance(p);
    else if (s->hasty)
        run_ready(s);
    return p;
}

/* The first operation is done, unless it has ended the context. */
static void finish(CUstream_st *s)
{
    if (all().dead) return;
    s->queue.pop_front();
    ++s->done;
    s->waiting = -1;
    fake_changed();
}

/* ---- residency ---- */

static int registers_of(const fake_needs &n)
{
    return (n.registers + 7) / 8 * 8 * ((n.threads + 31) / 32 * 32);
}

/* What the system takes of shared memory, a block. */
static const size_t system_shared = 1024;

/* Starts the blocks of a stream's first operation that find a place; returns whether one did. */
static bool start_blocks(state &g, CUstream_st *s)
{
    state::device &d = g.devices[s->device];
    const fake_needs &n = s->queue.front().needs;
    bool any = false;
    for (int p = 0; p < g.of.count && s->waiting > 0;) {
        int registers = registers_of(n), threads = n.threads, blocks = 1;
        size_t shared = n.shared + system_shared;
        for (auto &b : d.blocks)
            if (b.processor == p) {
                registers += registers_of(b.needs);
                threads += b.needs.threads;
                shared += b.needs.shared + system_shared;
                ++blocks;
            }
        if (registers > g.of.registers || threads > g.of.threads || shared > (size_t)g.of.shared ||
            blocks > g.of.blocks) {
            if (blocks == 1)
                fake_finding("a block of %s has no place on a multiprocessor", s->queue.front().name);
            ++p;
            continue;
        }
        d.blocks.push_back({s, p, n, n.ticks > 0 ? d.clock + n.ticks : UINT64_MAX});
        --s->waiting;
        ++s->running;
        any = true;
    }
    return any;
}

/* The same for all operations of a device that have begun, the greatest priority first, then the oldest. While one has
 * blocks that find no place, those behind it start none. */
static bool start_all(state &g, int device)
{
    std::vector<CUstream_st *> begun;
    bool any = false;
    for (auto s : g.streams)
        if (s->device == device && s->waiting > 0) begun.push_back(s);
    std::sort(begun.begin(), begun.end(), [](const CUstream_st *a, const CUstream_st *b) {
        return std::make_pair((int64_t)a->priority, a->queue.front().order) <
               std::make_pair((int64_t)b->priority, b->queue.front().order);
    });
    for (auto s : begun) {
        any = start_blocks(g, s) || any;
        if (s->waiting > 0) break;
    }
    return any;
}

static void leave_processors(state &g, CUstream_st *s)
{
    auto &blocks = g.devices[s->device].blocks;
    blocks.erase(
        std::remove_if(blocks.begin(), blocks.end(), [=](const resident &b) { return b.stream == s; }),
        blocks.end());
    s->running = 0;
}

/* The first operation of a stream, which waits for nothing: what needs no multiprocessor is done, what needs some begins.
 * *late: its group waits for another rank's host. */
static fake_step first_step(CUstream_st *s, std::vector<CUstream_st *> &path, bool *late)
{
    state &g = all();
    std::shared_ptr<fake_group> group = s->queue.front().group;
    if (s->queue.front().needs.blocks > 0 && s->waiting < 0) s->waiting = s->queue.front().needs.blocks;
    if (s->waiting > 0 || (s->waiting == 0 && group == nullptr))
        return FAKE_STUCK; /* its blocks take their time */
    if (group != nullptr) {
        fake_step step = fake_group_step(group, path);
        if (step == FAKE_STUCK) *late = *late || fake_group_late(group);
        if (step != FAKE_DONE) return step;
        leave_processors(g, s);
    } else {
        std::function<void()> work = std::move(s->queue.front().work);
        fake_open();
        if (work) work();
    }
    finish(s);
    return FAKE_MOVED;
}

/* The next that happens on a device: something without a kernel, blocks that start, or the clock goes on to the first end
 * of a block. Blocks that wait already take the place that it leaves before kernels come that it leads to: a launch takes
 * a device some time. Hosts are never slow: while one has not enqueued what another rank waits for, clocks stand still. */
static fake_step device_step(state &g, int device, std::vector<CUstream_st *> &path)
{
    state::device &d = g.devices[device];
    bool late = false;
    if (d.busy) return FAKE_STUCK;
    d.busy = true;
    fake_step step = FAKE_STUCK;
    const std::vector<CUstream_st *> streams = g.streams;
    for (size_t i = 0; i < streams.size() && step == FAKE_STUCK; ++i) {
        CUstream_st *s = streams[i];
        if (s->device != device || s->queue.empty()) continue;
        bool waits = false;
        const std::vector<fake_point> after = s->queue.front().after;
        for (auto &q : after) {
            if (fake_passed(q)) continue;
            waits = true;
            if (q.stream->device != device && fake_toward(q, path) == FAKE_MOVED) step = FAKE_MOVED;
        }
        if (!waits) step = first_step(s, path, &late);
    }
    if (step == FAKE_STUCK && start_all(g, device)) step = FAKE_MOVED;
    uint64_t next = UINT64_MAX;
    for (auto &b : d.blocks) next = std::min(next, b.end);
    if (step == FAKE_STUCK && !late && next != UINT64_MAX) {
        d.clock = next;
        for (size_t i = d.blocks.size(); i-- > 0;)
            if (d.blocks[i].end == next) {
                --d.blocks[i].stream->running;
                d.blocks.erase(d.blocks.begin() + (long)i);
            }
        (void)start_all(g, device);
        for (auto s : streams)
            if (s->device == device && s->waiting == 0 && s->running == 0 &&
                s->queue.front().group == nullptr) {
                std::function<void()> work = std::move(s->queue.front().work);
                fake_open();
                work();
                finish(s);
            }
        step = FAKE_MOVED;
    }
    d.busy = false;
    return step;
}

fake_step fake_toward(fake_point p, std::vector<CUstream_st *> &path)
{
    CUstream_st *s = p.stream;
    if (fake_passed(p)) return FAKE_DONE;
    if (std::find(path.begin(), path.end(), s) != path.end()) return FAKE_STUCK; /* waits for itself */
    path.push_back(s);
    if (all().of.count > 0) {
        fake_step step = device_step(all(), s->device, path);
        path.pop_back();
        return step;
    }
    /* no reference into the queue: what runs below may be what empties it */
    std::vector<fake_point> after = s->queue.front().after;
    std::shared_ptr<fake_group> group = s->queue.front().group;
    bool stuck = false;
    for (auto &q : after) {
        if (fake_passed(q)) continue;
        if (fake_toward(q, path) == FAKE_MOVED) return FAKE_MOVED;
        stuck = true;
    }
    fake_step step = FAKE_STUCK;
    if (!stuck && group != NULL) {
        step = fake_group_step(group, path);
    } else if (!stuck) {
        std::function<void()> work = std::move(s->queue.front().work);
        fake_open();
        if (work) work();
        step = FAKE_DONE;
    }
    if (step == FAKE_DONE) {
        finish(s);
        step = FAKE_MOVED;
    }
    path.pop_back();
    return step;
}

bool fake_advance(fake_point p)
{
    for (;;) {
        std::vector<CUstream_st *> path;
        fake_step step = fake_toward(p, path);
        if (step == FAKE_DONE) return true;
        if (step == FAKE_STUCK) return false;
    }
}

void fake_wait(const char *why, const std::function<bool()> &enough)
{
    state &g = all();
    auto until = std::chrono::system_clock::now() + std::chrono::duration<double>(g.patience);
    uint64_t seen = g.progress;
    while (!enough() && !g.dead) {
        close_memory(g);
        tell(g);
        if (g.progress != seen) {
            seen = g.progress;
            until = std::chrono::system_clock::now() + std::chrono::duration<double>(g.patience);
        } else if (std::chrono::system_clock::now() >= until) {
            show_streams(g);
            fake_finding("%s waits for ever: nothing has moved for %g s", why, g.patience);
        }
        std::unique_lock<std::mutex> held(g.lock, std::adopt_lock);
        g.news.wait_for(held, std::chrono::milliseconds(200));
        held.release();
    }
}

void fake_force(fake_point p, const char *why, const std::function<bool()> &enough)
{
    state &g = all();
    g.waits[this_rank] += !fake_passed(p);
    let_run(g);
    fake_wait(why, [&] { return fake_advance(p) || (enough && enough()); });
}

void fake_drain(int device, const char *why)
{
    state &g = all();
    std::vector<fake_point> ends; /* others may enqueue meanwhile */
    for (auto s : g.streams)
        if (s->device == device && !s->queue.empty()) ends.push_back({s, s->issued});
    for (auto &p : ends) fake_force(p, why);
}

/* ---- memory ---- */

void fake_open()
{
    state &g = all();
    if (g.open) return;
    g.open = true;
    for (auto &b : g.blocks)
        if (b.second.place == FAKE_DEVICE) protect(b.second, PROT_READ | PROT_WRITE);
}

/* At least so many bytes of 0xff in the file. */
static bool make_blank(state &g, size_t bytes)
{
    static char full[1 << 16];
    if (g.blank < 0) g.blank = memfd_create("fake", MFD_CLOEXEC);
    if (g.blank < 0) fake_finding("memfd_create: %s", strerror(errno));
    memset(full, 0xff, sizeof full);
    while (g.blank_bytes < bytes) {
        ssize_t n = pwrite(g.blank, full, sizeof full, (off_t)g.blank_bytes);
        if (n <= 0 || n % (ssize_t)page != 0) return false;
        g.blank_bytes += (size_t)n;
    }
    return true;
}

void *fake_alloc(size_t bytes, fake_place place)
{
    state &g = all();
    block b;
    size_t rounded = (bytes + 255) / 256 * 256;
    if (place == FAKE_DEVICE && (bytes > g.limit || g.of_device[this_device] > g.limit - bytes)) return NULL;
    if (rounded < bytes) return NULL;
    b.map_bytes = (rounded + page - 1) / page * page + page;
    if (!make_blank(g, b.map_bytes - page)) return NULL;
    b.map = (char *)mmap(NULL, b.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b.map == (char *)MAP_FAILED) return NULL;
    if (b.map_bytes > page &&
        mmap(b.map, b.map_bytes - page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, g.blank, 0) != b.map)
        fake_finding("mmap: %s", strerror(errno));
    /* where a thread's stack was before, AddressSanitizer may still think so */
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(b.map, b.map_bytes);
    b.p = b.map + b.map_bytes - page - rounded;
    b.bytes = bytes;
    b.place = place;
    b.device = this_device;
    b.rank = this_rank;
    if (place == FAKE_DEVICE && !g.open) protect(b, PROT_NONE);
    g.blocks[(uintptr_t)b.p] = b;
    g.live[place] += bytes;
    if (place == FAKE_DEVICE) {
        g.of_device[b.device] += bytes;
        g.peak = std::max(g.peak, g.live[FAKE_DEVICE]);
    }
    return b.p;
}

void fake_release(void *p, fake_place place, const char *who)
{
    state &g = all();
    auto at = g.blocks.find((uintptr_t)p);
    for (auto &f : g.freed)
        if (at == g.blocks.end() && f.p == p) fake_finding("%s: %p was freed before", who, p);
    if (at == g.blocks.end()) fake_finding("%s: %p is no allocation", who, p);
    if (at->second.place != place)
        fake_finding("%s: %p is %s memory", who, p, place == FAKE_DEVICE ? "pinned" : "device");
    if (!g.dead) fake_drain(at->second.device, who);
    block b = g.blocks[(uintptr_t)p];
    protect(b, PROT_READ | PROT_WRITE);
    for (char *c = b.map; c < b.map + b.map_bytes - page; ++c) {
        if (c == b.p) c += b.bytes;
        if (c < b.map + b.map_bytes - page && (unsigned char)*c != 0xff)
            fake_finding("%s: byte %td of an allocation of %zu was written", who, c - b.p, b.bytes);
    }
    g.blocks.erase((uintptr_t)p);
    g.live[place] -= b.bytes;
    if (place == FAKE_DEVICE) g.of_device[b.device] -= b.bytes;
    /* the addresses stay taken for a while, so that a late access is a fault */
    if (mmap(b.map, b.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != b.map)
        fake_finding("mmap: %s", strerror(errno));
    g.freed.push_back(b);
    if (g.freed.size() > freed_max) {
        munmap(g.freed.front().map, g.freed.front().map_bytes);
        g.freed.pop_front();
    }
}

fake_place fake_where(const void *p, size_t bytes, const char *who, const char *operand, int *device)
{
    state &g = all();
    const block *b = find(g, p);
    const char *at = (const char *)p;
    if (device != NULL) *device = this_device;
    if (b == NULL) {
        for (auto &f : g.freed)
            if (at >= f.map && at < f.map + f.map_bytes)
                fake_finding("%s: %s is byte %td of freed %s memory", who, operand, at - f.p,
                             f.place == FAKE_DEVICE ? "device" : "pinned");
        return FAKE_PAGEABLE;
    }
    if (at < b->p || (size_t)(at - b->p) > b->bytes || bytes > b->bytes - (size_t)(at - b->p))
        fake_finding("%s: %s is %zu bytes at byte %td of an allocation of %zu", who, operand, bytes,
                     at - b->p, b->bytes);
    if (device != NULL) *device = b->device;
    return b->place;
}

void fake_reachable(const void *p, size_t bytes, const char *who, const char *operand)
{
    if (bytes > 0 && fake_where(p, bytes, who, operand, NULL) == FAKE_PAGEABLE)
        fake_finding("%s: %s at %p is host memory that the device cannot reach", who, operand, p);
}

void fake_load(const char *name)
{
    state &g = all();
    static const bool lazy = getenv("FAKE_LAZY") != NULL;
    if (lazy && g.loaded.insert({this_device, name}).second) g.of_device[this_device] += 2 << 20;
}

size_t fake_left(int device, size_t *total)
{
    state &g = all();
    *total = g.limit;
    return g.limit - std::min(g.limit, g.of_device[device]);
}

int fake_device()
{
    return this_device;
}

void fake_set_device(int d)
{
    this_device = d;
}

/* ---- controls ---- */

void fake_residency(const fake_processors *of)
{
    fake_look look;
    state &g = all();
    g.of = of != NULL ? *of : fake_processors();
    for (auto &d : g.devices) d.clock = 0;
}

double fake_now(int device)
{
    if (all().of.count > 0) return (double)all().devices[device].clock * 1e-3;
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int fake_processors_count()
{
    return all().of.count > 0 ? all().of.count : 4;
}

void fake_seed(uint64_t seed)
{
    fake_look look;
    all().seed = all().rng = seed;
}

void fake_unpoison(const volatile void *p, size_t bytes)
{
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(p, bytes);
}

void fake_poison(const volatile void *p, size_t bytes)
{
    if (__asan_poison_memory_region && all().eager) __asan_poison_memory_region(p, bytes);
}

void fake_eager(int on)
{
    fake_look look;
    all().eager = on != 0;
    if (!on) lift_poison(all());
}

void fake_rank(int rank)
{
    this_rank = rank;
}

void fake_fail_at(long k, int rank, int sticky)
{
    fake_look look;
    state &g = all();
    g.calls.clear();
    g.total = 0;
    g.fail_at = k;
    g.fail_rank = rank;
    g.fail_sticky = sticky != 0;
    g.dead = false;
    g.failed.clear();
}

long fake_calls(int rank)
{
    fake_look look;
    return rank < 0 ? all().total : all().calls[rank];
}

long fake_waits(int rank)
{
    fake_look look;
    long n = all().waits[rank];
    all().waits[rank] = 0;
    return n;
}

const char *fake_failed(void)
{
    fake_look look;
    return all().failed.empty() ? NULL : all().failed.c_str();
}

size_t fake_device_live(void)
{
    fake_look look;
    return all().live[FAKE_DEVICE];
}

size_t fake_device_peak(void)
{
    fake_look look;
    return all().peak;
}

void fake_peak_reset(void)
{
    fake_look look;
    all().peak = all().live[FAKE_DEVICE];
}

size_t fake_pinned_live(void)
{
    fake_look look;
    return all().live[FAKE_PINNED];
}

void fake_device_limit(size_t bytes)
{
    fake_look look;
    all().limit = bytes > 0 ? bytes : default_limit;
}

long fake_live_handles(void)
{
    fake_look look;
    return fake_handles;
}

int fake_check_clean(void)
{
    fake_look look;
    state &g = all();
    bool clean = g.blocks.empty() && fake_handles == 0;
    for (auto &b : g.blocks)
        fprintf(stderr, "fake: rank %d left %zu bytes of %s memory\n", b.second.rank, b.second.bytes,
                b.second.place == FAKE_DEVICE ? "device" : "pinned");
    if (fake_handles != 0) fprintf(stderr, "fake: %ld handles are live\n", fake_handles);
    for (auto s : g.streams) clean = clean && s->queue.empty();
    show_streams(g);
    return clean;
}

int fake_gethostname(char *name, size_t bytes)
{
    const char *named = getenv("FAKE_HOST");
    if (named == NULL) return gethostname(name, bytes);
    return snprintf(name, bytes, "%s", named), 0;
}
