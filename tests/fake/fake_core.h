/* fake_core.h -- what the fake libraries share: streams, memory, calls   tests, for fake*.cpp alone
 *
 * One lock covers everything, operations that run included: a `call` holds it. Streams are queues; an
 * operation runs when it is first in its queue and all points that it comes after are passed. Nothing here
 * has a thread of its own: whoever waits for a point runs what leads to it, on any stream.
 */
#ifndef FAKE_CORE_H
#define FAKE_CORE_H

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fake.h"

/* ---- findings ---- */

/* Ends the process with a line on stderr. */
[[noreturn]] void fake_finding(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- handles ---- */

extern long fake_handles; /* live ones of all kinds */

/* Live and dead ones of a kind: the address of a dead one must not come again. */
template <class T> std::set<T *> &fake_every()
{
    static auto *set = new std::set<T *>;
    return *set;
}

template <class T> T *fake_made(T *h)
{
    fake_every<T>().insert(h);
    ++fake_handles;
    return h;
}

/* A live one; else a finding. */
template <class T> T *fake_alive(T *h, const char *what, const char *who)
{
    if (fake_every<T>().count(h) == 0) fake_finding("%s: %p is no %s", who, (void *)h, what);
    if (!h->live) fake_finding("%s: %s %p is used after it was destroyed", who, what, (void *)h);
    return h;
}

/* ---- calls: the lock, and injected errors ---- */

struct fake_state; /* fake.cpp's */

/* One call of a library, from entry to return. Counts, and may be one that is to fail. Calls that poll count
 * when they come for the first time since the thread's last call that does not: how often varies. */
struct fake_call {
    const char *name;
    bool fails, dead; /* dead: fails like everything after a sticky error */
    uint64_t run;     /* the same for calls of a thread with nothing but polls between them */
    explicit fake_call(const char *name, bool polls = false);
    ~fake_call();
    fake_call(const fake_call &) = delete;
    fake_call &operator=(const fake_call &) = delete;
    /* The error to return: `mine`, or `after` once the context has died of one. */
    template <class T> T error(T mine, T after) const
    {
        return dead ? after : mine;
    }
};

/* A sticky error has struck. */
bool fake_dead();

/* The same without counting, for what only reports. */
struct fake_look {
    fake_look();
    ~fake_look();
    fake_look(const fake_look &) = delete;
    fake_look &operator=(const fake_look &) = delete;
};

/* ---- streams ---- */

struct fake_group; /* grouped sends and receives, fake_nccl.cpp */

/* Work of a stream up to and with operation `seq`; operations of a stream count from 1. */
struct fake_point {
    struct CUstream_st *stream;
    uint64_t seq;
};

struct fake_op {
    const char *name;
    std::function<void()> work;
    std::vector<fake_point> after;
    std::shared_ptr<fake_group> group; /* instead of work */
    fake_needs needs = {};
    uint64_t order = 0; /* among those of all streams */
};

/* Never freed: a point may name a stream that was destroyed, whose work goes on. */
struct CUstream_st {
    int device;
    bool blocking, live;
    bool hasty; /* runs what it can at once, while other streams are late */
    std::deque<fake_op> queue;
    uint64_t issued, done;
    std::shared_ptr<struct fake_capture> capture = nullptr; /* what it captures into now */
    std::vector<size_t> tail = {};                          /* nodes that its next one comes after */
    int priority = 0;                                       /* less is greater */
    /* of the first operation, where residency counts: blocks that have not started, -1: it has not begun; and that run */
    int64_t waiting = -1, running = 0;
};

CUstream_st *fake_stream_new(int device, bool blocking, int priority = 0);
/* A live stream from the host's handle; 0 is the current device's legacy stream. */
CUstream_st *fake_stream(cudaStream_t handle);
/* Appends; the call's own checks are done. Returns the operation's point; in a capture, one that is passed. */
fake_point fake_append(CUstream_st *s, const char *name, std::function<void()> work,
                       const std::vector<fake_point> &after = {},
                       const std::shared_ptr<fake_group> &group = nullptr,
                       const fake_needs &needs = fake_needs());
bool fake_passed(fake_point p);
/* Runs what leads to the point; returns false if that must wait for another thread. */
bool fake_advance(fake_point p);
/* Returns when the point is passed, or when `enough` says so, whichever is first; waits for other threads.
 * One that sees nothing move for too long is a finding. */
void fake_force(fake_point p, const char *why, const std::function<bool()> &enough = nullptr);
/* As fake_force, for something that is no point. */
void fake_wait(const char *why, const std::function<bool()> &enough);
/* A query of a point that is not passed: whether it is repeated, with nothing but polls since the thread asked
 * before. Then the host waits. */
bool fake_asks_again(const fake_call &call, fake_point p);
/* Everything of a device. */
void fake_drain(int device, const char *why);
/* A step towards a point, for fake_nccl.cpp; `path` holds the streams on the way to it. */
enum fake_step { FAKE_DONE, FAKE_MOVED, FAKE_STUCK };
fake_step fake_toward(fake_point p, std::vector<CUstream_st *> &path);
/* Something changed that another thread may be waiting for. */
void fake_changed();

/* Of a device, in seconds: the time, or, where residency counts, a thousandth a tick. */
double fake_now(int device);
/* Multiprocessors of a device. */
int fake_processors_count();
/* 80 or 90, fake_cuda.cpp */
int fake_capability();

/* The device's legacy stream? */
bool fake_is_legacy(const CUstream_st *s);

/* ---- capture, fake_graph.cpp ---- */

struct fake_node {
    const char *name;
    std::function<void()> work;
    std::shared_ptr<fake_group> group; /* instead of work */
    std::vector<size_t> after;
};

struct fake_capture {
    std::vector<fake_node> nodes;
    std::vector<CUstream_st *> streams; /* the first is the one where it began */
    std::thread::id thread;
    int mode = 0;
    bool active = false, spoilt = false;
};

typedef std::shared_ptr<fake_capture> fake_capture_ref;

/* The error of a call that enqueues on the stream: its capture is spoilt, or it is the legacy stream, and one that
 * it waits for captures. */
cudaError_t fake_may(CUstream_st *s);
/* The error of a call that may wait or allocate, made while this thread captures, or any that minds all threads. */
cudaError_t fake_unsafe();
void fake_spoil(const fake_capture_ref &c);
void fake_capture_add(CUstream_st *s, const char *name, std::function<void()> work,
                      const std::shared_ptr<fake_group> &group);
/* The stream's later work comes after these nodes of a capture, which it joins; of == nullptr: after what is none. */
cudaError_t fake_capture_wait(CUstream_st *s, const fake_capture_ref &of, const std::vector<size_t> &nodes);
/* Enqueues a captured group anew, fake_nccl.cpp. */
void fake_group_launch(const std::shared_ptr<fake_group> &group, CUstream_st *s);
/* The thread's last error, fake_cuda.cpp. Returns it. */
cudaError_t fake_keep(cudaError_t e);

/* 0 .. n-1; with seed 0 always n - 1, the latest. */
unsigned fake_random(unsigned n);

/* ---- memory ---- */

enum fake_place { FAKE_DEVICE, FAKE_PINNED, FAKE_PAGEABLE };

/* NULL where there is no more. */
void *fake_alloc(size_t bytes, fake_place place);
/* When the device is idle; `who` is for findings. */
void fake_release(void *p, fake_place place, const char *who);
/* A kernel's launch, by its name. Where FAKE_LAZY is set the first one loads its code: 2 MiB of the device, which stay. */
void fake_load(const char *name);
size_t fake_left(int device, size_t *total);
/* Where a range lies; one that is partly outside its allocation, or in a freed one, is a finding. */
fake_place fake_where(const void *p, size_t bytes, const char *who, const char *operand, int *device);
/* A range that the device can reach; else a finding. */
void fake_reachable(const void *p, size_t bytes, const char *who, const char *operand);

/* What fake_poison laid there. */
void fake_unpoison(const volatile void *p, size_t bytes);
/* While an operation runs the memory of the devices is open. */
void fake_open();

/* ---- the rest of the state ---- */

int fake_device();           /* the thread's current one */
void fake_set_device(int d); /* no check */
enum { FAKE_DEVICES = 16 };

/* fake_nccl.cpp, called while an operation of a group is first in its queue */
fake_step fake_group_step(const std::shared_ptr<fake_group> &group, std::vector<CUstream_st *> &path);
/* Whether it waits for what another rank's host has not enqueued yet. */
bool fake_group_late(const std::shared_ptr<fake_group> &group);
/* Every group is forgotten. */
void fake_nccl_drop();

#endif
