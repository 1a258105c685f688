/* fake_nccl.cpp -- communicators between threads and processes, grouped sends and receives on lazy streams   tests
 *
 * A group becomes one operation of its stream. When it is first in its queue its parts are offered; the k-th
 * send from a to b meets the k-th receive at b from a, and then the bytes move, in pieces, through memory that the ranks
 * share. The operation is done when all its parts are.
 *
 * That memory is a file without a name of the process that has drawn the id. It ends with the last process that has it,
 * however that ends. A rank that waits runs what leads to its peers' parts, on their streams; a peer in another process has
 * a thread for each communicator which does so there.
 */
#include "fake_core.h"
#include "fake_kernels.h"

#include "nccl.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <linux/futex.h>
#include <map>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

struct part {
    const void *from;
    void *to; /* one of the two */
    size_t bytes;
    int peer;
    bool done;
    const char *call; /* a collective's parts meet that collective's; "" between single sends and receives */
    size_t pieces = 0, moved = 0; /* and their bytes */
};

struct fake_group {
    ncclComm_t comm;
    CUstream_st *stream;
    std::vector<part> parts;
    fake_point point; /* once enqueued */
    bool started, dropped;
    size_t left;
};

namespace
{

typedef std::shared_ptr<fake_group> group_ref;

struct offer {
    group_ref group;
    size_t part;
};

/* The ends of one direction that this process has. */
struct channel {
    std::deque<offer> sends, receives;
    uint64_t sent; /* messages */
};

enum { RANKS = 32, PIECE = (1 << 16) - 128 };
enum { ABSENT, COMING, LIVE, GONE };

/* A rank, as the others see it. */
struct member {
    std::atomic<int> state;
    pid_t process;
    int device;
    char host[64];
};

/* From one rank to another: a piece at a time. */
struct alignas(4096) mailbox {
    std::atomic<uint64_t> sends, receives; /* offered so far */
    std::atomic<uint64_t> put, taken;      /* pieces */
    size_t bytes;                          /* of the message */
    char call[64], piece[PIECE];
};
static_assert(sizeof(mailbox) == 1 << 16, "whole pages");

/* What the ranks of a team share. */
struct board {
    uint64_t mark; /* that of the id */
    std::atomic<int> ranks;
    std::atomic<uint32_t> bell; /* rings when something has changed */
    member members[RANKS];
    mailbox boxes[RANKS][RANKS]; /* from, to */
};

/* What an id says: the place of the board in a file of a process. */
struct address {
    uint64_t mark, place;
    pid_t process;
    int file;
};

struct team {
    board *at;
    const uint64_t mark;
    int ranks = 0;
    bool apart = false;              /* in several processes */
    std::vector<ncclComm_t> members; /* NULL: not come, or in another process */
    std::map<std::pair<int, int>, channel> channels;
    explicit team(board *b) : at(b), mark(b->mark)
    {
    }
    ~team();
    /* How many have come; and whether one has gone. */
    int come() const;
    bool left() const;
    bool duplicate() const;
    void ring();
};

} /* namespace */

struct ncclComm {
    std::shared_ptr<team> of;
    int rank, device;
    bool blocking, live, ready, finalizing;
    ncclResult_t error;          /* lasting */
    unsigned polls;              /* that still answer "in progress" after the cause is gone */
    std::vector<group_ref> kept; /* not enqueued yet */
    std::deque<group_ref> order; /* enqueued, not done */
    std::string text;
};

namespace
{

struct pending {
    ncclComm_t comm;
    CUstream_st *stream;
    part what;
};

struct thread_group {
    int depth = 0;
    ncclResult_t error = ncclSuccess;
    std::vector<pending> parts;
    std::vector<ncclComm_t> inits;
};

thread_local thread_group here;
thread_local std::string last_text;

/* Those of this process, by mark. */
std::map<uint64_t, std::weak_ptr<team>> &teams()
{
    static auto *map = new std::map<uint64_t, std::weak_ptr<team>>;
    return *map;
}

/* A board that all have left needs no memory. */
team::~team()
{
    teams().erase(mark);
    bool empty = true;
    for (int r = 0; r < ranks; ++r) empty = empty && at->members[r].state == GONE;
    if (empty) (void)madvise(at, sizeof *at, MADV_REMOVE);
    munmap(at, sizeof *at);
}

int team::come() const
{
    int n = 0;
    for (int r = 0; r < ranks; ++r) n += at->members[r].state >= LIVE;
    return n;
}

bool team::left() const
{
    bool any = false;
    for (int r = 0; r < ranks; ++r) any = any || at->members[r].state == GONE;
    return any;
}

bool team::duplicate() const
{
    for (int r = 0; r < ranks; ++r)
        for (int q = 0; q < r; ++q) {
            const member &a = at->members[r], &b = at->members[q];
            if (a.device == b.device && strcmp(a.host, b.host) == 0) return true;
        }
    return false;
}

/* Wakes the threads that serve this team in other processes. */
void team::ring()
{
    if (!apart) return;
    ++at->bell;
    syscall(SYS_futex, &at->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* The file of this process, and how many boards it has. */
struct {
    pid_t process;
    int file;
    uint64_t boards;
} drawn;

ncclResult_t draw(ncclUniqueId *out)
{
    if (drawn.process != getpid()) drawn = {getpid(), memfd_create("fake_nccl", MFD_CLOEXEC), 0};
    uint64_t now = (uint64_t)std::chrono::steady_clock::now().time_since_epoch().count();
    address a = {(now << 20 ^ (uint64_t)getpid()) | 1, drawn.boards++ * sizeof(board), getpid(), drawn.file};
    if (drawn.file < 0 || ftruncate(drawn.file, (off_t)(a.place + sizeof(board))) != 0 ||
        pwrite(drawn.file, &a.mark, sizeof a.mark, (off_t)a.place) != sizeof a.mark)
        return ncclSystemError;
    memset(out, 0, sizeof *out);
    memcpy(out, &a, sizeof a);
    return ncclSuccess;
}

/* NULL: no process has such a board any more. */
std::shared_ptr<team> team_of(const ncclUniqueId &id)
{
    address a;
    char path[64];
    struct stat about;
    memcpy(&a, &id, sizeof a);
    auto known = teams().find(a.mark);
    if (known != teams().end()) return known->second.lock();
    snprintf(path, sizeof path, "/proc/%d/fd/%d", a.process, a.file);
    bool own = a.process == getpid();
    int file = own ? drawn.file : open(path, O_RDWR | O_CLOEXEC);
    void *p = MAP_FAILED;
    if (file >= 0 && fstat(file, &about) == 0 && (uint64_t)about.st_size >= a.place + sizeof(board))
        p = mmap(NULL, sizeof(board), PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)a.place);
    if (file >= 0 && !own) close(file);
    if (p == MAP_FAILED) return nullptr;
    board *b = (board *)p;
    if (a.mark == 0 || b->mark != a.mark) return munmap(p, sizeof *b), nullptr;
    auto t = std::make_shared<team>(b);
    teams()[a.mark] = t;
    return t;
}

long gather_calls;
bool one_at_a_time;

ncclResult_t refuse(ncclComm_t comm, ncclResult_t r, const char *why)
{
    last_text = why;
    if (comm != NULL) comm->text = why;
    return r;
}

ncclResult_t fail(const fake_call &call, ncclResult_t mine)
{
    last_text = std::string(call.name) + " was made to fail";
    return call.error(mine, ncclUnhandledCudaError);
}

ncclComm_t alive(ncclComm_t comm, const char *who)
{
    return fake_alive(comm, "communicator", who);
}

void prune(ncclComm_t comm)
{
    while (!comm->order.empty() && fake_passed(comm->order.front()->point)) comm->order.pop_front();
}

void carry(team &t, int from, int to);

/* A peer that the communicator waits for has aborted. */
bool lost(ncclComm_t comm)
{
    team &t = *comm->of;
    if (!t.left()) return false;
    if (t.come() < t.ranks) return true;
    for (auto &g : comm->order)
        for (auto &p : g->parts) {
            if (p.done || g->dropped || !g->started || t.at->members[p.peer].state != GONE) continue;
            carry(t, comm->rank, p.peer); /* it may have taken all before it went */
            if (!p.done) return true;
        }
    return false;
}

void enqueue(const group_ref &g)
{
    g->point = fake_append(g->stream, "ncclGroup", nullptr, {}, g,
                           {1, FAKE_NCCL_THREADS, FAKE_NCCL_REGISTERS, 0, 0});
    if (g->stream->capture != nullptr) return; /* fake_group_launch enqueues it, and again */
    g->comm->order.push_back(g);
    prune(g->comm);
    g->comm->of->ring(); /* somebody may have asked for it */
}

void serve(ncclComm_t comm, std::shared_ptr<team> t);

/* What NCCL does in the background; returns the communicator's state. */
ncclResult_t look(ncclComm_t comm)
{
    team &t = *comm->of;
    if (comm->error != ncclSuccess) return comm->error;
    if (lost(comm)) return comm->error = refuse(comm, ncclRemoteError, "a remote rank has aborted");
    if (!comm->ready) {
        if (t.come() < t.ranks) return ncclInProgress;
        if (t.duplicate()) return comm->error = refuse(comm, ncclInvalidUsage, "two ranks on one device");
    }
    if (comm->polls > 0) {
        --comm->polls;
        return ncclInProgress;
    }
    if (!comm->ready) {
        for (int r = 0; r < t.ranks; ++r) t.apart = t.apart || t.at->members[r].process != getpid();
        if (t.apart) std::thread(serve, comm, comm->of).detach();
    }
    comm->ready = true;
    for (auto &g : comm->kept) enqueue(g);
    comm->kept.clear();
    if (comm->finalizing) {
        for (auto &g : comm->order)
            if (!fake_advance(g->point)) return ncclInProgress;
        prune(comm);
    }
    return ncclSuccess;
}

/* The communicator must have come to rest before it is used. */
ncclResult_t rest(ncclComm_t comm)
{
    if (comm->error != ncclSuccess) return comm->error;
    if (!comm->ready || !comm->kept.empty() || comm->polls > 0)
        return refuse(comm, ncclInvalidArgument,
                      "the communicator is used before its previous operation returned ncclSuccess");
    if (comm->finalizing) return refuse(comm, ncclInvalidUsage, "the communicator is finalized");
    return ncclSuccess;
}

void finish(std::deque<offer> &l)
{
    fake_group &g = *l.front().group;
    g.parts[l.front().part].done = true;
    --g.left;
    l.pop_front();
    fake_changed();
}

/* The next piece of the first send, once it is received; its end, once all have been taken. Whether anything was done. */
bool put(mailbox &box, channel &l)
{
    if (l.sends.empty() || box.put != box.taken || box.receives <= l.sent) return false;
    part &p = l.sends.front().group->parts[l.sends.front().part];
    if (p.pieces > 0 && p.moved == p.bytes) return ++l.sent, finish(l.sends), true;
    size_t n = std::min(p.bytes - p.moved, (size_t)PIECE);
    fake_reachable(p.from, p.bytes, "ncclSend", "the buffer");
    fake_open();
    fake_unpoison(p.from, p.bytes); /* a transfer comes when its peer does: the host may have freed it */
    box.bytes = p.bytes;
    snprintf(box.call, sizeof box.call, "%s", p.call);
    if (n > 0) memcpy(box.piece, (const char *)p.from + p.moved, n);
    p.moved += n, ++p.pieces;
    ++box.put;
    return true;
}

/* The same for the first receive. */
bool get(mailbox &box, channel &l, int from, int to)
{
    if (l.receives.empty() || box.put == box.taken) return false;
    part &p = l.receives.front().group->parts[l.receives.front().part];
    if (box.bytes != p.bytes)
        fake_finding("NCCL: rank %d sends %zu bytes, rank %d receives %zu", from, box.bytes, to, p.bytes);
    if (strcmp(box.call, p.call) != 0)
        fake_finding("NCCL: rank %d sends in %s, rank %d receives in %s", from,
                     *box.call ? box.call : "ncclSend", to, *p.call ? p.call : "ncclRecv");
    size_t n = std::min(p.bytes - p.moved, (size_t)PIECE);
    fake_reachable(p.to, p.bytes, "ncclRecv", "the buffer");
    fake_open();
    fake_unpoison(p.to, p.bytes);
    if (n > 0) memcpy((char *)p.to + p.moved, box.piece, n);
    p.moved += n;
    ++box.taken;
    if (p.moved == p.bytes) finish(l.receives);
    return true;
}

/* Moves what both sides offer. */
void carry(team &t, int from, int to)
{
    mailbox &box = t.at->boxes[from][to];
    channel &l = t.channels[{from, to}];
    bool any = false;
    while (put(box, l) || get(box, l, from, to)) any = true;
    if (any) t.ring();
}

/* The first operation that has not started; NULL: there is none. */
group_ref next_of(ncclComm_t comm)
{
    for (auto &g : comm->order)
        if (!g->started && !g->dropped) return g;
    return nullptr;
}

/* A rank of another process offers what this rank does not. */
bool asked(ncclComm_t comm)
{
    team &t = *comm->of;
    const int me = comm->rank;
    for (int r = 0; r < t.ranks; ++r) {
        const mailbox &from = t.at->boxes[r][me], &to = t.at->boxes[me][r];
        if (t.members[(size_t)r] == NULL && (from.sends > from.receives || to.receives > to.sends))
            return true;
    }
    return false;
}

/* A thread for a rank that has peers in other processes: takes and gives what they wait for, and runs what leads to it. */
void serve(ncclComm_t comm, std::shared_ptr<team> t)
{
    const struct timespec nap = {0, 200000000};
    for (uint32_t heard = t->at->bell - 1;;) {
        {
            fake_look look;
            if (!comm->live) return t.reset();
            if (heard != t->at->bell) fake_changed();
            heard = t->at->bell;
            for (int r = 0; r < t->ranks; ++r) carry(*t, comm->rank, r), carry(*t, r, comm->rank);
            while (asked(comm) && next_of(comm) != nullptr && fake_advance(next_of(comm)->point)) continue;
        }
        syscall(SYS_futex, &t->at->bell, FUTEX_WAIT, heard, &nap, NULL, 0);
    }
}

/* Its parts are no longer offered. */
void withdraw(const group_ref &g)
{
    team &t = *g->comm->of;
    auto mine = [&](const offer &o) { return o.group == g; };
    for (auto &l : t.channels) {
        auto &s = l.second.sends, &r = l.second.receives;
        s.erase(std::remove_if(s.begin(), s.end(), mine), s.end());
        r.erase(std::remove_if(r.begin(), r.end(), mine), r.end());
    }
    g->dropped = true;
    g->left = 0;
}

/* Every rank that has not come is waited for. */
ncclResult_t settle_init(const fake_call &call, ncclComm_t comm)
{
    if (!comm->blocking) return look(comm);
    ncclResult_t r = ncclInProgress;
    fake_wait(call.name, [&] { return (r = look(comm)) != ncclInProgress; });
    return fake_dead() ? ncclUnhandledCudaError : r;
}

ncclResult_t init(const fake_call &call, ncclComm_t *out, int ranks, ncclUniqueId id, int rank, bool blocking,
                  int device)
{
    if (out == NULL) return refuse(NULL, ncclInvalidArgument, "no entry left for the communicator");
    *out = NULL;
    if (call.fails) return fail(call, ncclSystemError);
    if (ranks < 1 || rank < 0 || rank >= ranks)
        return refuse(NULL, ncclInvalidArgument, "rank outside the team");
    if (ranks > RANKS) fake_finding("%s: %d ranks are not modelled", call.name, ranks);
    std::shared_ptr<team> t = team_of(id);
    if (t == nullptr) return refuse(NULL, ncclInvalidArgument, "an unknown unique id");
    member &mine = t->at->members[rank];
    const int others = t->at->ranks.fetch_or(ranks); /* 0 for the first */
    if ((others != 0 && others != ranks) || mine.state.fetch_add(COMING) != ABSENT)
        fake_finding("%s: rank %d of %d comes to a team of %d, or comes twice", call.name, rank, ranks,
                     others);
    t->ranks = ranks;
    t->members.resize((size_t)ranks);
    ncclComm_t comm = fake_made(new ncclComm{});
    comm->of = t;
    comm->rank = rank;
    comm->device = device;
    comm->blocking = blocking;
    comm->live = true;
    comm->error = ncclSuccess;
    comm->polls = blocking ? 0 : fake_random(3);
    t->members[(size_t)rank] = comm;
    mine.process = getpid();
    mine.device = device;
    fake_gethostname(mine.host, sizeof mine.host);
    mine.state = LIVE;
    fake_changed();
    *out = comm;
    if (here.depth > 0) {
        here.inits.push_back(comm);
        return ncclSuccess;
    }
    return settle_init(call, comm);
}

void retire(ncclComm_t comm)
{
    for (auto &g : comm->order)
        if (!fake_passed(g->point)) withdraw(g);
    comm->order.clear();
    comm->kept.clear();
    comm->live = false;
    comm->of->at->members[comm->rank].state = GONE;
    comm->of->ring();
    comm->of.reset();
    --fake_handles;
    fake_changed();
}

ncclResult_t flush(const fake_call &call);

ncclResult_t add(const fake_call &call, const std::vector<part> &parts, ncclComm_t comm, cudaStream_t stream,
                 ncclResult_t bad)
{
    ncclResult_t r = call.fails ? fail(call, ncclInternalError) : bad;
    alive(comm, call.name);
    CUstream_st *s = fake_stream(stream);
    if (r == ncclSuccess) r = rest(comm);
    for (auto &p : parts)
        if (r == ncclSuccess && (p.peer < 0 || p.peer >= comm->of->ranks))
            r = refuse(comm, ncclInvalidArgument, "peer outside the communicator");
    if (r != ncclSuccess) {
        if (here.depth > 0 && here.error == ncclSuccess) here.error = r;
        return r;
    }
    if (s->device != comm->device)
        fake_finding("%s: a stream of device %d, a communicator of device %d", call.name, s->device,
                     comm->device);
    for (auto &p : parts) {
        fake_reachable(p.from != NULL ? p.from : p.to, p.bytes, call.name, "the buffer");
        here.parts.push_back({comm, s, p});
    }
    return here.depth > 0 ? ncclSuccess : flush(call);
}

/* The end of the outermost group. */
ncclResult_t flush(const fake_call &call)
{
    thread_group all = std::move(here);
    ncclResult_t r = ncclSuccess;
    here = thread_group();
    for (auto comm : all.inits) {
        ncclResult_t one = settle_init(call, comm);
        if (one != ncclSuccess) r = one;
    }
    if (all.error != ncclSuccess) return all.error;
    std::vector<group_ref> groups;
    for (auto &p : all.parts) {
        group_ref g;
        for (auto &other : groups)
            if (other->comm == p.comm) g = other;
        if (g == nullptr) {
            g = std::make_shared<fake_group>();
            g->comm = p.comm;
            g->stream = p.stream;
            groups.push_back(g);
        }
        if (g->stream != p.stream)
            fake_finding("NCCL: a group on two streams of a communicator is not modelled");
        g->parts.push_back(p.what);
        ++g->left;
    }
    for (auto &g : groups) {
        if (!g->comm->blocking) g->comm->polls = fake_random(3);
        if (g->comm->polls == 0) {
            enqueue(g);
        } else {
            g->comm->kept.push_back(g);
            r = ncclInProgress;
        }
    }
    return r;
}

/* 0: none that the fake knows. */
size_t type_bytes(ncclDataType_t t)
{
    return t == ncclInt8 ? 1 : t == ncclInt32 ? 4 : t == ncclInt64 ? 8 : 0;
}

ncclResult_t check_type(ncclComm_t comm, ncclDataType_t t)
{
    return type_bytes(t) > 0 ? ncclSuccess : refuse(comm, ncclInvalidArgument, "an unknown data type");
}

} /* namespace */

fake_step fake_group_step(const std::shared_ptr<fake_group> &g, std::vector<CUstream_st *> &path)
{
    if (g->dropped || (g->started && g->left == 0)) return FAKE_DONE;
    team &t = *g->comm->of;
    int me = g->comm->rank;
    if (!g->started) {
        g->started = true;
        for (auto other : fake_every<ncclComm>())
            for (auto &theirs : other->order)
                if (one_at_a_time && other != g->comm && other->live && other->device == g->comm->device &&
                    theirs->started && !theirs->dropped && theirs->left > 0)
                    fake_finding("NCCL: operations of two communicators at the same time on device %d",
                                 other->device);
        for (size_t i = 0; i < g->parts.size(); ++i) {
            part &p = g->parts[i];
            if (p.from != NULL) {
                t.channels[{me, p.peer}].sends.push_back({g, i});
                ++t.at->boxes[me][p.peer].sends;
            } else {
                t.channels[{p.peer, me}].receives.push_back({g, i});
                ++t.at->boxes[p.peer][me].receives;
            }
        }
        for (auto &p : g->parts) {
            carry(t, me, p.peer);
            carry(t, p.peer, me);
        }
        t.ring();
        fake_changed();
        return FAKE_MOVED;
    }
    for (auto &p : g->parts) {
        ncclComm_t peer = t.members[(size_t)p.peer];
        if (p.done || peer == NULL || !peer->live) continue;
        group_ref theirs = next_of(peer);
        if (theirs != nullptr && fake_toward(theirs->point, path) == FAKE_MOVED) return FAKE_MOVED;
    }
    return FAKE_STUCK;
}

bool fake_group_late(const std::shared_ptr<fake_group> &g)
{
    for (auto &p : g->parts) {
        ncclComm_t peer = g->comm->of->members[(size_t)p.peer];
        if (!p.done && (peer == NULL || next_of(peer) == nullptr)) return true;
    }
    return false;
}

void fake_group_launch(const group_ref &captured, CUstream_st *s)
{
    group_ref g = std::make_shared<fake_group>(*captured);
    alive(g->comm, "cudaGraphLaunch");
    g->stream = s;
    enqueue(g);
}

void fake_nccl_drop()
{
    for (auto comm : fake_every<ncclComm>()) {
        comm->order.clear();
        comm->kept.clear();
        if (comm->live) comm->of->channels.clear();
    }
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *out)
{
    fake_call call("ncclGetUniqueId");
    if (call.fails) return fail(call, ncclSystemError);
    if (out == NULL) return refuse(NULL, ncclInvalidArgument, "no entry left for the unique id");
    return draw(out);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    fake_call call("ncclCommInitRankConfig");
    bool blocking = config == NULL || config->blocking != 0;
    if (config != NULL && (config->magic != 0xcafebeef || config->size != sizeof *config))
        return refuse(NULL, ncclInvalidArgument, "the configuration was not initialized");
    return init(call, out, ranks, id, rank, blocking, fake_device());
}

ncclResult_t ncclCommInitAll(ncclComm_t *out, int n, const int *devices)
{
    fake_call call("ncclCommInitAll");
    ncclUniqueId id;
    ncclResult_t r = draw(&id);
    if (call.fails) return fail(call, ncclSystemError);
    if (n < 1 || n > FAKE_DEVICES) return refuse(NULL, ncclInvalidArgument, "more ranks than devices");
    ++here.depth; /* so that the first does not wait for the others */
    for (int i = 0; i < n && r == ncclSuccess; ++i)
        r = init(call, &out[i], n, id, i, true, devices != NULL ? devices[i] : i);
    --here.depth;
    if (here.depth > 0) return r;
    ncclResult_t s = flush(call);
    return r != ncclSuccess ? r : s;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    fake_call call("ncclCommFinalize");
    alive(comm, call.name);
    if (call.fails) return fail(call, ncclInternalError);
    ncclResult_t r = rest(comm);
    if (r != ncclSuccess) return r;
    comm->finalizing = true;
    if (!comm->blocking) {
        comm->polls = fake_random(3);
        return look(comm);
    }
    fake_wait(call.name, [&] { return (r = look(comm)) != ncclInProgress; });
    return r;
}

/* Waits for what is enqueued. */
ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    fake_call call("ncclCommDestroy");
    if (comm == NULL) return ncclSuccess;
    alive(comm, call.name);
    if (comm->error != ncclSuccess) fake_finding("%s: after an error, which hangs: abort instead", call.name);
    if (!fake_dead()) {
        ncclResult_t r;
        comm->finalizing = true;
        fake_wait(call.name, [&] { return (r = look(comm)) != ncclInProgress; });
    }
    retire(comm);
    return call.fails ? fail(call, ncclUnhandledCudaError) : ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    fake_call call("ncclCommAbort");
    if (comm == NULL) return ncclSuccess;
    retire(alive(comm, call.name));
    return call.fails ? fail(call, ncclUnhandledCudaError) : ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out)
{
    fake_call call("ncclCommGetAsyncError", true);
    alive(comm, call.name);
    if (call.fails) return fail(call, ncclInternalError);
    *out = look(comm);
    return ncclSuccess;
}

#define FAKE_NCCL_NUMBER(function, number)                    \
    ncclResult_t function(const ncclComm_t comm, int *out)    \
    {                                                         \
        fake_call call(#function);                            \
        if (call.fails) return fail(call, ncclInternalError); \
        *out = alive(comm, call.name)->number;                \
        return ncclSuccess;                                   \
    }
FAKE_NCCL_NUMBER(ncclCommCount, of->ranks)
FAKE_NCCL_NUMBER(ncclCommUserRank, rank)
FAKE_NCCL_NUMBER(ncclCommCuDevice, device)

const char *ncclGetErrorString(ncclResult_t r)
{
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress",
                                        "timeout"};
    return (unsigned)r < ncclNumResults ? texts[r] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm)
{
    fake_look look;
    if (comm != NULL && fake_every<ncclComm>().count(comm) > 0)
        last_text = !comm->text.empty() ? comm->text : last_text;
    return last_text.c_str();
}

/* ---- operations ---- */

void fake_one_at_a_time(int on)
{
    fake_look look;
    one_at_a_time = on != 0;
}

long fake_gather_calls(void)
{
    fake_look look;
    long n = gather_calls;
    gather_calls = 0;
    return n;
}

ncclResult_t ncclGroupStart(void)
{
    fake_call call("ncclGroupStart");
    if (call.fails) return fail(call, ncclInternalError);
    ++here.depth;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    fake_call call("ncclGroupEnd");
    if (here.depth == 0) return refuse(NULL, ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--here.depth > 0) return ncclSuccess;
    if (call.fails) {
        here = thread_group();
        return fail(call, ncclUnhandledCudaError);
    }
    return flush(call);
}

ncclResult_t ncclSend(const void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    fake_call call("ncclSend");
    if (buffer == NULL && count > 0) return add(call, {}, comm, stream, ncclInvalidArgument);
    part p = {buffer != NULL ? buffer : "", NULL, count * type_bytes(type), peer, false, ""};
    return add(call, {p}, comm, stream, check_type(alive(comm, call.name), type));
}

ncclResult_t ncclRecv(void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    fake_call call("ncclRecv");
    if (buffer == NULL && count > 0) return add(call, {}, comm, stream, ncclInvalidArgument);
    part p = {NULL, buffer, count * type_bytes(type), peer, false, ""};
    return add(call, {p}, comm, stream, check_type(alive(comm, call.name), type));
}

ncclResult_t ncclAlltoAll(const void *send, void *receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream)
{
    fake_call call("ncclAlltoAll");
    std::vector<part> parts;
    size_t bytes = count * type_bytes(type);
    for (int r = 0; r < alive(comm, call.name)->of->ranks; ++r) {
        parts.push_back({(const char *)send + (size_t)r * bytes, NULL, bytes, r, false, call.name});
        parts.push_back({NULL, (char *)receive + (size_t)r * bytes, bytes, r, false, call.name});
    }
    return add(call, parts, comm, stream, check_type(comm, type));
}

ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream)
{
    fake_call call("ncclAllGather");
    std::vector<part> parts;
    size_t bytes = count * type_bytes(type);
    gather_calls += type == ncclInt8;
    for (int r = 0; r < alive(comm, call.name)->of->ranks; ++r) {
        parts.push_back({send, NULL, bytes, r, false, call.name});
        parts.push_back({NULL, (char *)receive + (size_t)r * bytes, bytes, r, false, call.name});
    }
    return add(call, parts, comm, stream, check_type(comm, type));
}
