/* upipe_abi.c -- see upipe_abi.h */
#include "upipe_abi.h"

#include "team_mpi.h"
#include "team_nccl.h"
#include "upipe/upipe.h"

#include <unistd.h>

_Static_assert((int)UPIPE_ABI_RING_P2P == (int)UPIPE_RING_P2P &&
                   (int)UPIPE_ABI_RING_ALL_GATHER == (int)UPIPE_RING_ALL_GATHER,
               "ring modes as the library's");
_Static_assert((int)UPIPE_ABI_ZIGZAG == (int)UPIPE_ZIGZAG && (int)UPIPE_ABI_STRIPED == (int)UPIPE_STRIPED,
               "layouts as the library's");

/* Each forward holds a block until its backward, a call some more: the dry run's table has UPIPE_DRY_BLOCKS_MAX. */
enum { LAYERS_MAX = 1000 };

/* What a rank says of itself at any time: as its last call has left it. */
typedef struct abi_told {
    upipe_shard shard;
    int64_t rows, bytes, saved_bytes;
    upipe_err err;
} abi_told;

typedef struct abi_rank {
    struct abi *of;
    int busy; /* in a call; under abi_lock, as told */
    abi_told told;
    upipe_abi_desc desc; /* of its calls from now on; tokens 0: none yet */
    upipe_plan plan;
    upipe_ctx ctx;
    upipe_mem mem;
    void *slab;
    size_t slab_bytes;
    upipe_mem_block *blocks;
    upipe_saved *saved; /* [layers] */
    int64_t *cu_seqlens;
    int64_t sequences;
    const float *sinks; /* the caller's, as dsinks */
    float *dsinks;
    abi_compute compute;
} abi_rank;

typedef struct abi {
    abi_team team;
    abi_rank *rank; /* [team.here] */
    pid_t process;
    uintptr_t handle;
    int calls; /* of all threads, that are not over; under abi_lock, as next */
    struct abi *next;
} abi;

/* A handle is a number that is given once, and no address: so one that is closed, or was never open, is known as such,
 * whatever the memory holds by then. */
static pthread_mutex_t abi_lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t abi_handles; /* given so far */
static abi *abi_first;        /* the open ones */

/* The rank of a handle that this thread's last call was refused for, as another thread's was not over. */
static __thread struct {
    uintptr_t handle;
    int rank;
} abi_clash;

static upipe_abi *abi_enter(abi *u)
{
    pthread_mutex_lock(&abi_lock);
    u->handle = ++abi_handles;
    u->next = abi_first;
    abi_first = u;
    pthread_mutex_unlock(&abi_lock);
    return (upipe_abi *)u->handle;
}

/* Where the list has a handle; where it has NULL: it is not open. abi_lock is held. */
static abi **abi_at(const upipe_abi *handle)
{
    abi **at = &abi_first;
    while (*at != NULL && (*at)->handle != (uintptr_t)handle) at = &(*at)->next;
    return at;
}

/* A rank of a handle; NULL: there is none, or the handle is a forked parent's. */
static abi_rank *abi_rank_of(abi *u, int rank)
{
    if (u == NULL || u->process != getpid()) return NULL;
    return rank >= u->team.first && rank < u->team.first + u->team.here ? &u->rank[rank - u->team.first]
                                                                        : NULL;
}

static void abi_tell(abi_rank *r)
{
    r->told.shard = r->plan.shard;
    r->told.rows = r->plan.local;
    r->told.bytes = (int64_t)r->mem.slab_bytes;
    r->told.saved_bytes = (int64_t)(sizeof(upipe_given) + r->plan.buffers.lse);
    r->told.err = r->ctx.err;
}

/* Whether there is this rank, and what it says of itself. */
static int abi_ask(const upipe_abi *handle, int rank, abi_told *out)
{
    const abi_rank *r;
    pthread_mutex_lock(&abi_lock);
    r = abi_rank_of(*abi_at(handle), rank);
    if (r != NULL) *out = r->told;
    pthread_mutex_unlock(&abi_lock);
    return r != NULL;
}

/* A rank of which this thread is in a call until abi_end, and which no close frees before; NULL: refused. */
static abi_rank *abi_begin(const upipe_abi *handle, int rank)
{
    abi_rank *r;
    int busy;
    pthread_mutex_lock(&abi_lock);
    r = abi_rank_of(*abi_at(handle), rank);
    busy = r != NULL && r->busy;
    if (r != NULL && !busy) r->busy = 1, ++r->of->calls;
    pthread_mutex_unlock(&abi_lock);
    abi_clash.handle = busy ? (uintptr_t)handle : 0;
    abi_clash.rank = rank;
    return busy ? NULL : r;
}

static int abi_end(abi_rank *r, upipe_status s)
{
    pthread_mutex_lock(&abi_lock);
    abi_tell(r);
    r->busy = 0, --r->of->calls;
    pthread_mutex_unlock(&abi_lock);
    return (int)s;
}

static void abi_before_fork(void)
{
    pthread_mutex_lock(&abi_lock);
}

static void abi_after_fork(void)
{
    pthread_mutex_unlock(&abi_lock);
}

/* A child has no thread that would give back a lock which another than the forking one holds. */
__attribute__((constructor)) static void abi_at_fork(void)
{
    (void)pthread_atfork(abi_before_fork, abi_after_fork, abi_after_fork);
}

static upipe_view abi_view(const void *data, const upipe_plan *p, int heads)
{
    return upipe_view_packed((void *)(uintptr_t)data, p->desc.dtype, p->rows, heads, p->desc.head_dim);
}

/* A call without tensors. */
static upipe_qkv abi_masked(const abi_rank *r)
{
    const upipe_abi_desc *d = &r->desc;
    upipe_qkv a = {0};
    a.plan = &r->plan, a.scale = d->scale, a.mask.causal = d->causal, a.mask.window = d->window;
    a.mask.softcap = d->softcap, a.mask.borders.cu_seqlens = r->cu_seqlens,
    a.mask.borders.cu_seqlens_n = r->sequences;
    a.mask.sinks = r->sinks;
    a.id = 1; /* sinks may be elsewhere in the backward: a host's graph may have moved them */
    return a;
}

static upipe_qkv abi_call(const abi_rank *r, const void *o, const void *q, const void *k, const void *v)
{
    const upipe_plan *p = &r->plan;
    upipe_qkv a = abi_masked(r);
    a.q = abi_view(q, p, p->desc.heads), a.k = abi_view(k, p, p->desc.kv_heads);
    a.v = abi_view(v, p, p->desc.kv_heads), a.o = abi_view(o, p, p->desc.heads);
    return a;
}

/* The description as the library takes it; what is no number of a description is refused. */
static upipe_status abi_read(upipe_abi_desc *out, const upipe_abi_desc *desc, upipe_err *err)
{
    if (desc == NULL) return upipe_fail(err, UPIPE_ERR_ARG, "desc is NULL");
    *out = *desc;
    if (out->ranks == 0) out->ranks = 1;
    if (out->layers == 0) out->layers = 1;
    if (out->ring == 0) out->ring = 1;
    if (out->ranks < 0 || out->ranks > UPIPE_RANKS_MAX)
        return upipe_fail(err, UPIPE_ERR_ARG, "%d ranks, at most %d", (int)out->ranks, (int)UPIPE_RANKS_MAX);
    if (out->ring < 0 || out->ring > UPIPE_RANKS_MAX)
        return upipe_fail(err, UPIPE_ERR_ARG, "a ring of %d ranks, at most %d", (int)out->ring,
                          (int)UPIPE_RANKS_MAX);
    if (out->layers < 0 || out->layers > LAYERS_MAX)
        return upipe_fail(err, UPIPE_ERR_ARG, "%d layers, at most %d", (int)out->layers, (int)LAYERS_MAX);
    if (out->dtype != UPIPE_ABI_F32 && out->dtype != UPIPE_ABI_BF16)
        return upipe_fail(err, UPIPE_ERR_ARG, "dtype %d; 0 is f32 and 1 bf16", (int)out->dtype);
    return UPIPE_OK;
}

/* Plan of a rank, and what it needs: all forwards, then all backwards, dry. r->saved [layers] is as before. */
static upipe_status abi_dry(int rank, const upipe_ops *ops, abi_rank *r, upipe_dry *dry, upipe_err *err)
{
    const upipe_abi_desc *desc = &r->desc;
    upipe_plan_desc d = {0};
    upipe_qkv_grads g;
    upipe_qkv a;
    float none = 0;
    int i;
    d.tokens = desc->tokens, d.batch = desc->batch, d.ranks = desc->ranks, d.rank = rank % desc->ranks;
    d.ring = desc->ring, d.ring_rank = rank / desc->ranks, d.ring_inner = desc->ring_inner;
    d.ring_mode = (upipe_ring_mode)desc->ring_mode, d.layout = (upipe_layout)desc->layout;
    d.heads = desc->heads, d.kv_heads = desc->kv_heads, d.head_dim = desc->head_dim;
    d.chunk = desc->chunk, d.dtype = desc->dtype == UPIPE_ABI_BF16 ? UPIPE_BF16 : UPIPE_F32;
    UPIPE_TRY(upipe_plan_init(&r->plan, &d, err));
    upipe_dry_init(dry, &r->plan, ops);
    *err = dry->ctx.err;
    UPIPE_TRY(err->status);
    a = abi_call(r, &none, &none, &none, &none);
    a.mask.sinks = g.dsinks = &none; /* no call takes more */
    g.dout = g.dq = a.q, g.dk = a.k, g.dv = a.v;
    for (i = 0; i < desc->layers && dry->ctx.err.status == UPIPE_OK; ++i)
        upipe_qkv_fwd(&dry->ctx, &a, &r->saved[i]);
    while (--i >= 0 && dry->ctx.err.status == UPIPE_OK) upipe_qkv_bwd(&dry->ctx, &a, &g, &r->saved[i]);
    memset(r->saved, 0, (size_t)desc->layers * sizeof *r->saved);
    *err = dry->ctx.err;
    return err->status;
}

/* Plan, and slab and pool where those that are there are too small. Nothing is in flight. */
static upipe_status abi_rank_plan(abi_rank *r, int rank, const upipe_abi_desc *desc, upipe_dry *dry,
                                  upipe_err *err)
{
    upipe_saved *saved = (upipe_saved *)calloc((size_t)desc->layers, sizeof *saved);
    upipe_mem_block *blocks;
    upipe_err why;
    if (saved == NULL) return upipe_fail(err, UPIPE_ERR_MEMORY, "memory is out");
    free(r->saved);
    r->saved = saved;
    r->desc = *desc;
    if (r->mem.slab_bytes > 0) upipe_mem_destroy(&r->mem, NULL);
    UPIPE_TRY(abi_dry(rank, &r->compute.ops, r, dry, err));
    blocks = (upipe_mem_block *)realloc(r->blocks, (size_t)dry->mem.blocks_peak * sizeof *r->blocks);
    if (blocks == NULL) return upipe_fail(err, UPIPE_ERR_MEMORY, "memory is out");
    r->blocks = blocks;
    if (r->slab_bytes < dry->mem.need) {
        abi_slab_free(&r->compute, r->slab);
        r->slab = NULL, r->slab_bytes = 0;
        if (abi_slab(&r->slab, dry->mem.need, &why) != UPIPE_OK)
            return upipe_fail(err, UPIPE_ERR_MEMORY, "no %zu bytes for rank %d", dry->mem.need, rank);
        r->slab_bytes = dry->mem.need;
    }
    upipe_mem_init(&r->mem, r->slab, r->slab_bytes, r->blocks, dry->mem.blocks_peak);
    return UPIPE_OK;
}

static upipe_status abi_rank_open(abi *u, int rank, const upipe_abi_desc *desc, upipe_dry *dry,
                                  upipe_err *err)
{
    const int team = desc->tokens == 0 && desc->heads == 0 && desc->head_dim == 0;
    abi_rank *r = &u->rank[rank - u->team.first];
    r->of = u;
    UPIPE_TRY(abi_compute_open(&r->compute, err));
    r->ctx.ops = &r->compute.ops, r->ctx.mem = &r->mem;
    abi_team_use(&u->team, rank, &r->ctx);
    if (!team) UPIPE_TRY(abi_rank_plan(r, rank, desc, dry, err));
    abi_tell(r);
    return UPIPE_OK;
}

/* A slab that others may still read is left to them. */
static void abi_free(abi *u)
{
    int i;
    if (u == NULL) return;
    abi_team_free(&u->team);
    for (i = 0; u->rank != NULL && i < u->team.here; ++i) {
        abi_rank *r = &u->rank[i];
        if (r->mem.slab_bytes > 0) {
            upipe_mem_rewind(&r->mem, 0);
            upipe_mem_destroy(&r->mem, NULL);
        }
        if (!u->team.kept) abi_slab_free(&r->compute, r->slab);
        abi_compute_close(&r->compute);
        free(r->blocks);
        free(r->saved);
        free(r->cu_seqlens);
    }
    free(u->rank);
    free(u);
}

static void abi_report(const upipe_err *err, char *why, size_t why_bytes)
{
    if (why != NULL && why_bytes > 0) snprintf(why, why_bytes, "%s", err->text);
}

/* Without ranks yet. */
static upipe_status abi_new(abi **out, const upipe_abi_desc *desc, upipe_err *err)
{
    abi *u;
    *out = u = (abi *)calloc(1, sizeof *u);
    if (u == NULL) return upipe_fail(err, UPIPE_ERR_MEMORY, "memory is out");
    u->process = getpid();
    u->team.grid.ranks = desc->ranks * desc->ring;
    u->team.grid.in_team = desc->ranks;
    u->team.grid.in_ring = desc->ring;
    return UPIPE_OK;
}

/* The ranks of a team that has been made. One that fails here tells the others why. */
static upipe_status abi_open_ranks(abi *u, const upipe_abi_desc *desc, upipe_err *err)
{
    upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry);
    upipe_status s = UPIPE_OK;
    upipe_ctx c;
    int i;
    u->rank = (abi_rank *)calloc((size_t)u->team.here, sizeof *u->rank);
    if (dry == NULL || u->rank == NULL) s = upipe_fail(err, UPIPE_ERR_MEMORY, "memory is out");
    for (i = 0; s == UPIPE_OK && i < u->team.here; ++i)
        s = abi_rank_open(u, u->team.first + i, desc, dry, err);
    free(dry);
    memset(&c, 0, sizeof c);
    abi_team_use(&u->team, u->team.first, &c);
    if (s != UPIPE_OK) upipe_comm_abort(c.team, err->text), upipe_comm_abort(c.ring, err->text);
    return s;
}

static upipe_abi *abi_open(const upipe_abi_desc *desc, abi_meet *meet, const abi_given *given, char *why,
                           size_t why_bytes)
{
    upipe_err err = {{0}, UPIPE_OK};
    upipe_abi_desc d;
    abi *u = NULL;
    upipe_status s = abi_read(&d, desc, &err);
    if (s == UPIPE_OK) s = abi_new(&u, &d, &err);
    if (s == UPIPE_OK) s = meet(&u->team, given, &err);
    if (s == UPIPE_OK) s = abi_open_ranks(u, &d, &err);
    if (s == UPIPE_OK) return abi_enter(u);
    abi_free(u);
    abi_report(&err, why, why_bytes);
    return NULL;
}

int upipe_abi_version(void)
{
    return UPIPE_VERSION;
}

int upipe_abi_can(const char *name)
{
    static const char *const names[] = {
        "f32",  "bf16",   "window",  "softcap", "cu_seqlens", "threads",
        "ring", "zigzag", "striped", "fused",   "sbh3d",      "sinks",
#ifdef UPIPE_WITH_CUDA
        "cuda",
#else
        "cpu",  "sockets",
#endif
#ifdef UPIPE_WITH_MPI
        "mpi",
#endif
#ifdef UPIPE_WITH_NCCL
        "nccl",
#endif
    };
    size_t i;
    for (i = 0; name != NULL && i < sizeof names / sizeof *names; ++i)
        if (strcmp(name, names[i]) == 0) return 1;
    return 0;
}

int64_t upipe_abi_need(const upipe_abi_desc *desc, int rank, char *why, size_t why_bytes)
{
    upipe_err err = {{0}, UPIPE_OK};
    upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry);
    abi_rank r = {0};
    upipe_abi_desc d;
    upipe_ops ops;
    upipe_status s = abi_read(&d, desc, &err);
    int64_t need;
    if (s == UPIPE_OK && (rank < 0 || rank >= d.ranks * d.ring))
        s = upipe_fail(&err, UPIPE_ERR_ARG, "rank %d of %d", rank, (int)(d.ranks * d.ring));
    if (s == UPIPE_OK) {
        r.desc = d;
        r.saved = (upipe_saved *)calloc((size_t)d.layers, sizeof *r.saved);
        if (dry == NULL || r.saved == NULL) s = upipe_fail(&err, UPIPE_ERR_MEMORY, "memory is out");
    }
    abi_plan_ops(&ops);
    if (s == UPIPE_OK) s = abi_dry(rank, &ops, &r, dry, &err);
    need = s == UPIPE_OK ? (int64_t)dry->mem.need : -1;
    free(r.saved);
    free(dry);
    if (s != UPIPE_OK) abi_report(&err, why, why_bytes);
    return need;
}

upipe_abi *upipe_abi_open(const upipe_abi_desc *desc, char *why, size_t why_bytes)
{
    return abi_open(desc, abi_team_threads, NULL, why, why_bytes);
}

upipe_abi *upipe_abi_open_sockets(const upipe_abi_desc *desc, int rank, const int *headers, const int *data,
                                  char *why, size_t why_bytes)
{
    const abi_given given = {.rank = rank, .headers = headers, .data = data};
    return abi_open(desc, abi_team_sockets, &given, why, why_bytes);
}

upipe_abi *upipe_abi_open_mpi(const upipe_abi_desc *desc, const void *comm, char *why, size_t why_bytes)
{
    const abi_given given = {.mpi = comm};
    return abi_open(desc, abi_team_mpi, &given, why, why_bytes);
}

upipe_abi *upipe_abi_open_nccl(const upipe_abi_desc *desc, void *comm, char *why, size_t why_bytes)
{
    const abi_given given = {.nccl = comm};
    return abi_open(desc, abi_team_nccl, &given, why, why_bytes);
}

upipe_abi *upipe_abi_open_nccl_id(const upipe_abi_desc *desc, int rank, const void *id, char *why,
                                  size_t why_bytes)
{
    const abi_given given = {.rank = rank, .nccl_id = id};
    return abi_open(desc, abi_team_nccl, &given, why, why_bytes);
}

int upipe_abi_nccl_id(void *id, char *why, size_t why_bytes)
{
    upipe_err err = {{0}, UPIPE_OK};
    const upipe_status s =
        id != NULL ? abi_nccl_id(id, &err) : upipe_fail(&err, UPIPE_ERR_ARG, "no place for the id");
    if (s != UPIPE_OK) abi_report(&err, why, why_bytes);
    return (int)s;
}

/* A refused call is a failed rank's: the others are in theirs already, or on their way. */
static int abi_refuse(abi_rank *r, upipe_status s)
{
    upipe_comm_abort(r->ctx.team, r->ctx.err.text);
    upipe_comm_abort(r->ctx.ring, r->ctx.err.text);
    return abi_end(r, s);
}

/* As abi_begin, of a call for which the other ranks may wait: in vain if there is no such rank. */
static abi_rank *abi_begin_awaited(upipe_abi *handle, int rank)
{
    abi_rank *r = abi_begin(handle, rank);
    if (r == NULL && abi_clash.handle == 0) (void)upipe_abi_abort(handle, rank, NULL);
    return r;
}

/* The same, of a call that needs a description. */
static abi_rank *abi_begin_described(upipe_abi *handle, int rank)
{
    abi_rank *r = abi_begin_awaited(handle, rank);
    if (r == NULL || r->desc.tokens > 0) return r;
    abi_refuse(r, upipe_fail(&r->ctx.err, UPIPE_ERR_ARG, "rank %d has no description yet: upipe_abi_describe",
                             rank));
    return NULL;
}

int64_t upipe_abi_rows(const upipe_abi *handle, int rank, int64_t *first)
{
    abi_told told;
    const int there = abi_ask(handle, rank, &told);
    if (first != NULL) *first = there ? upipe_shard_pos(&told.shard, 0) : -1;
    return there ? told.rows : -1;
}

int upipe_abi_positions(const upipe_abi *handle, int rank, int64_t *positions)
{
    abi_told told;
    int64_t i;
    if (positions == NULL) {
        abi_rank *r = abi_begin(handle, rank);
        return r == NULL ? (int)UPIPE_ERR_ARG
                         : abi_end(r, upipe_fail(&r->ctx.err, UPIPE_ERR_ARG, "positions is NULL"));
    }
    if (!abi_ask(handle, rank, &told)) return (int)UPIPE_ERR_ARG;
    for (i = 0; i < told.rows; ++i) positions[i] = upipe_shard_pos(&told.shard, i);
    return 0;
}

int upipe_abi_describe(upipe_abi *handle, int rank, const upipe_abi_desc *desc)
{
    abi_rank *r = abi_begin_awaited(handle, rank);
    upipe_abi_desc d;
    upipe_dry *dry;
    upipe_status s;
    if (r == NULL) return (int)UPIPE_ERR_ARG;
    s = abi_read(&d, desc, &r->ctx.err);
    if (s != UPIPE_OK) return abi_refuse(r, s);
    if (memcmp(&d, &r->desc, sizeof d) == 0) return abi_end(r, UPIPE_OK);
    if (d.ranks != r->of->team.grid.in_team || d.ring != r->of->team.grid.in_ring)
        return abi_refuse(r,
                          upipe_fail(&r->ctx.err, UPIPE_ERR_ARG,
                                     "%d ranks and a ring of %d, and the handle has %d and %d", (int)d.ranks,
                                     (int)d.ring, r->of->team.grid.in_team, r->of->team.grid.in_ring));
    if (r->mem.blocks_n > 0)
        return abi_refuse(
            r, upipe_fail(&r->ctx.err, UPIPE_ERR_ARG,
                          "another description before the backward of a forward, or after a failure"));
    free(r->cu_seqlens);
    r->cu_seqlens = NULL, r->sequences = 0;
    dry = (upipe_dry *)malloc(sizeof *dry);
    s = dry != NULL ? r->ctx.ops->sync(&r->ctx) /* the slab may be in use */
                    : upipe_fail(&r->ctx.err, UPIPE_ERR_MEMORY, "memory is out");
    if (s == UPIPE_OK) s = abi_rank_plan(r, rank, &d, dry, &r->ctx.err);
    free(dry);
    if (s == UPIPE_OK) return abi_end(r, s);
    r->desc.tokens = 0; /* no call has what it needs */
    return abi_refuse(r, s);
}

/* Borders of the flattened batch; none is read behind the one at its end. */
static upipe_status abi_borders(abi_rank *r, const int64_t *cu_seqlens, int64_t n)
{
    const int64_t tokens = r->plan.desc.tokens, rows = tokens * r->plan.desc.batch;
    int64_t at = 0, i;
    if (n < 0 || (cu_seqlens == NULL) != (n == 0))
        return upipe_fail(&r->ctx.err, UPIPE_ERR_ARG, "%lld packed sequences, cu_seqlens is %sNULL",
                          (long long)n, cu_seqlens != NULL ? "not " : "");
    if (n > 0 && cu_seqlens[0] != 0)
        return upipe_fail(&r->ctx.err, UPIPE_ERR_ARG, "cu_seqlens begins at %lld, not at 0",
                          (long long)cu_seqlens[0]);
    for (i = 0; i < n && at < rows; ++i) {
        const int64_t begin = at, most = at / tokens * tokens + tokens;
        at = cu_seqlens[i + 1];
        if (at < begin || at > most)
            return upipe_fail(
                &r->ctx.err, UPIPE_ERR_ARG,
                "packed sequence %lld is [%lld, %lld), in a sequence of the batch that ends at %lld",
                (long long)i, (long long)begin, (long long)at, (long long)most);
    }
    if (n > 0 && (i < n || at < rows))
        return upipe_fail(
            &r->ctx.err, UPIPE_ERR_ARG,
            "cu_seqlens has %lld packed sequences up to %lld, not %lld up to %lld, batch * tokens",
            (long long)i, (long long)at, (long long)n, (long long)rows);
    return UPIPE_OK;
}

int upipe_abi_pack(upipe_abi *handle, int rank, const int64_t *cu_seqlens, int64_t n)
{
    abi_rank *r = abi_begin_described(handle, rank);
    int64_t *copy = NULL;
    upipe_status s;
    if (r == NULL) return (int)UPIPE_ERR_ARG;
    s = abi_borders(r, cu_seqlens, n);
    if (s != UPIPE_OK) return abi_refuse(r, s);
    if (n > 0) {
        copy = (int64_t *)malloc(((size_t)n + 1) * sizeof *copy);
        if (copy == NULL) return abi_refuse(r, upipe_fail(&r->ctx.err, UPIPE_ERR_MEMORY, "memory is out"));
        memcpy(copy, cu_seqlens, ((size_t)n + 1) * sizeof *copy);
    }
    free(r->cu_seqlens);
    r->cu_seqlens = copy;
    r->sequences = n;
    return abi_end(r, UPIPE_OK);
}

int upipe_abi_sinks(upipe_abi *handle, int rank, const float *sinks, float *dsinks)
{
    abi_rank *r = abi_begin_awaited(handle, rank);
    if (r == NULL) return (int)UPIPE_ERR_ARG;
    r->sinks = sinks, r->dsinks = dsinks;
    return abi_end(r, UPIPE_OK);
}

int upipe_abi_stream(upipe_abi *handle, int rank, void *stream)
{
    abi_rank *r = abi_begin_awaited(handle, rank);
    upipe_status s;
    if (r == NULL) return (int)UPIPE_ERR_ARG;
    s = abi_stream_fits(stream, &r->ctx.err);
    if (s != UPIPE_OK) return abi_refuse(r, s);
    if (stream != r->ctx.stream) s = r->ctx.ops->sync(&r->ctx); /* the pool's blocks are in use there */
    r->ctx.stream = stream;
    return abi_end(r, s);
}

int upipe_abi_sync(upipe_abi *handle, int rank)
{
    abi_rank *r = abi_begin_awaited(handle, rank);
    if (r == NULL) return (int)UPIPE_ERR_ARG;
    return abi_end(r, r->ctx.ops->sync(&r->ctx));
}

/* The tensors are where the handle computes. */
static upipe_status abi_fits(abi_rank *r, const upipe_qkv *a, const upipe_qkv_grads *g)
{
    const struct {
        const char *name;
        const void *data;
    } t[] = {{"q", a->q.data},
             {"k", a->k.data},
             {"v", a->v.data},
             {"o", a->o.data},
             {"dout", g != NULL ? g->dout.data : NULL},
             {"dq", g != NULL ? g->dq.data : NULL},
             {"dk", g != NULL ? g->dk.data : NULL},
             {"dv", g != NULL ? g->dv.data : NULL},
             {"sinks", a->mask.sinks},
             {"dsinks", g != NULL ? g->dsinks : NULL}};
    size_t i;
    UPIPE_TRY(abi_compute_here(&r->compute, &r->ctx.err));
    for (i = 0; i < sizeof t / sizeof *t; ++i)
        UPIPE_TRY(abi_compute_fits(&r->compute, t[i].name, t[i].data, &r->ctx.err));
    return UPIPE_OK;
}

static int abi_fwd(abi_rank *r, int layer, const upipe_qkv *a)
{
    upipe_status s;
    if (layer < 0 || layer >= r->desc.layers || r->saved[layer].lse != NULL)
        return abi_refuse(r, upipe_fail(&r->ctx.err, UPIPE_ERR_ARG,
                                        "forward %d of %d, or again before its backward", layer,
                                        (int)r->desc.layers));
    s = abi_fits(r, a, NULL);
    if (s != UPIPE_OK) return abi_refuse(r, s);
    return abi_end(r, upipe_qkv_fwd(&r->ctx, a, &r->saved[layer]));
}

static int abi_bwd(abi_rank *r, int layer, const upipe_qkv *a, upipe_qkv_grads *g)
{
    upipe_status s;
    g->dsinks = r->dsinks;
    if (layer < 0 || layer >= r->desc.layers)
        return abi_refuse(
            r, upipe_fail(&r->ctx.err, UPIPE_ERR_ARG, "backward %d of %d", layer, (int)r->desc.layers));
    s = abi_fits(r, a, g);
    if (s != UPIPE_OK) return abi_refuse(r, s);
    return abi_end(r, upipe_qkv_bwd(&r->ctx, a, g, &r->saved[layer]));
}

int upipe_abi_qkv_fwd(upipe_abi *handle, int rank, int layer, void *o, const void *q, const void *k,
                      const void *v)
{
    abi_rank *r = abi_begin_described(handle, rank);
    upipe_qkv a;
    if (r == NULL) return (int)UPIPE_ERR_ARG;
    a = abi_call(r, o, q, k, v);
    return abi_fwd(r, layer, &a);
}

int upipe_abi_qkv_bwd(upipe_abi *handle, int rank, int layer, void *dq, void *dk, void *dv, const void *dout,
                      const void *o, const void *q, const void *k, const void *v)
{
    abi_rank *r = abi_begin_described(handle, rank);
    upipe_qkv_grads g;
    upipe_qkv a, d;
    if (r == NULL) return (int)UPIPE_ERR_ARG;
    a = abi_call(r, o, q, k, v);
    d = abi_call(r, dout, dq, dk, dv);
    g = upipe_qkv_grads_of(&d);
    return abi_bwd(r, layer, &a, &g);
}

/* The views of a tensor with Q, K and V, and of O or its gradient. */
static upipe_status abi_fused(abi_rank *r, upipe_qkv *a, const void *qkv, const void *o)
{
    const upipe_qkv call = abi_masked(r);
    if (qkv == NULL || o == NULL) return upipe_fail(&r->ctx.err, UPIPE_ERR_ARG, "a tensor is NULL");
    *a = upipe_qkv_fused(&call, (void *)(uintptr_t)qkv, (void *)(uintptr_t)o, r->plan.desc.dtype);
    return UPIPE_OK;
}

int upipe_abi_fused_fwd(upipe_abi *handle, int rank, int layer, void *o, const void *qkv)
{
    abi_rank *r = abi_begin_described(handle, rank);
    upipe_qkv a;
    if (r == NULL) return (int)UPIPE_ERR_ARG;
    if (abi_fused(r, &a, qkv, o) != UPIPE_OK) return abi_refuse(r, r->ctx.err.status);
    return abi_fwd(r, layer, &a);
}

int upipe_abi_fused_bwd(upipe_abi *handle, int rank, int layer, void *dqkv, const void *dout, const void *o,
                        const void *qkv)
{
    abi_rank *r = abi_begin_described(handle, rank);
    upipe_qkv_grads g;
    upipe_qkv a, d;
    if (r == NULL) return (int)UPIPE_ERR_ARG;
    if (abi_fused(r, &a, qkv, o) != UPIPE_OK || abi_fused(r, &d, dqkv, dout) != UPIPE_OK)
        return abi_refuse(r, r->ctx.err.status);
    g = upipe_qkv_grads_of(&d);
    return abi_bwd(r, layer, &a, &g);
}

static upipe_status abi_sbh3d(abi_rank *r, upipe_qkv *a, const void *qkv, const void *o, int batch, int b)
{
    const upipe_qkv call = abi_masked(r);
    const upipe_plan_desc *d = &r->plan.desc;
    if (d->batch != 1)
        return upipe_fail(&r->ctx.err, UPIPE_ERR_ARG,
                          "one sequence of [T][B][H][3][d], and the handle has batch %lld, not 1",
                          (long long)d->batch);
    if (d->kv_heads != d->heads)
        return upipe_fail(&r->ctx.err, UPIPE_ERR_ARG,
                          "[T][B][H][3][d] has as many heads of K as of Q, and the handle %d and %d",
                          d->kv_heads, d->heads);
    if (b < 0 || b >= batch || batch > INT32_MAX / d->heads)
        return upipe_fail(&r->ctx.err, UPIPE_ERR_ARG, "sequence %d of %d", b, batch);
    if (qkv == NULL || o == NULL) return upipe_fail(&r->ctx.err, UPIPE_ERR_ARG, "a tensor is NULL");
    *a = upipe_qkv_sbh3d(&call, (void *)(uintptr_t)qkv, (void *)(uintptr_t)o, d->dtype, batch, b);
    return UPIPE_OK;
}

int upipe_abi_sbh3d_fwd(upipe_abi *handle, int rank, int layer, void *o, const void *qkv, int batch, int b)
{
    abi_rank *r = abi_begin_described(handle, rank);
    upipe_qkv a;
    if (r == NULL) return (int)UPIPE_ERR_ARG;
    if (abi_sbh3d(r, &a, qkv, o, batch, b) != UPIPE_OK) return abi_refuse(r, r->ctx.err.status);
    return abi_fwd(r, layer, &a);
}

int upipe_abi_sbh3d_bwd(upipe_abi *handle, int rank, int layer, void *dqkv, const void *dout, const void *o,
                        const void *qkv, int batch, int b)
{
    abi_rank *r = abi_begin_described(handle, rank);
    upipe_qkv_grads g;
    upipe_qkv a, d;
    if (r == NULL) return (int)UPIPE_ERR_ARG;
    if (abi_sbh3d(r, &a, qkv, o, batch, b) != UPIPE_OK || abi_sbh3d(r, &d, dqkv, dout, batch, b) != UPIPE_OK)
        return abi_refuse(r, r->ctx.err.status);
    g = upipe_qkv_grads_of(&d);
    return abi_bwd(r, layer, &a, &g);
}

int upipe_abi_drop(upipe_abi *handle, int rank, int layer)
{
    abi_rank *r = abi_begin(handle, rank);
    if (r == NULL) return (int)UPIPE_ERR_ARG;
    if (layer < 0 || layer >= r->desc.layers || r->saved[layer].lse == NULL)
        return abi_end(r, upipe_fail(&r->ctx.err, UPIPE_ERR_ARG, "forward %d of %d has nothing to drop",
                                     layer, (int)r->desc.layers));
    return abi_end(r, upipe_saved_free(&r->ctx, &r->saved[layer]));
}

int64_t upipe_abi_saved_bytes(const upipe_abi *handle, int rank)
{
    abi_told told;
    return abi_ask(handle, rank, &told) ? told.saved_bytes : -1;
}

static upipe_status abi_save(abi_rank *r, upipe_saved *save, char *to)
{
    UPIPE_TRY(r->ctx.ops->copy(&r->ctx, to, &save->given, sizeof save->given));
    UPIPE_TRY(r->ctx.ops->copy(&r->ctx, to + sizeof save->given, save->lse, r->plan.buffers.lse));
    return upipe_saved_free(&r->ctx, save);
}

static upipe_status abi_restore(abi_rank *r, upipe_saved *save, const char *from)
{
    void *lse;
    UPIPE_TRY(upipe_alloc(&r->ctx, &lse, r->plan.buffers.lse, UPIPE_USE_STAT, "lse"));
    save->lse = (float *)lse;
    UPIPE_TRY(r->ctx.ops->copy(&r->ctx, &save->given, from, sizeof save->given));
    UPIPE_TRY(r->ctx.ops->copy(&r->ctx, lse, from + sizeof save->given, r->plan.buffers.lse));
    return r->ctx.ops->sync(&r->ctx); /* what was given is read on the host */
}

int upipe_abi_save(upipe_abi *handle, int rank, int layer, void *to)
{
    abi_rank *r = abi_begin_described(handle, rank);
    upipe_status s;
    if (r == NULL) return (int)UPIPE_ERR_ARG;
    if (to == NULL || layer < 0 || layer >= r->desc.layers || r->saved[layer].lse == NULL)
        return abi_refuse(r, upipe_fail(&r->ctx.err, UPIPE_ERR_ARG,
                                        "forward %d of %d has nothing to save, or no place to save it", layer,
                                        (int)r->desc.layers));
    s = abi_save(r, &r->saved[layer], (char *)to);
    return s != UPIPE_OK ? abi_refuse(r, s) : abi_end(r, s);
}

int upipe_abi_restore(upipe_abi *handle, int rank, int layer, const void *from)
{
    abi_rank *r = abi_begin_described(handle, rank);
    upipe_status s;
    if (r == NULL) return (int)UPIPE_ERR_ARG;
    if (from == NULL || layer < 0 || layer >= r->desc.layers || r->saved[layer].lse != NULL)
        return abi_refuse(r, upipe_fail(&r->ctx.err, UPIPE_ERR_ARG,
                                        "nothing to restore, or forward %d of %d is before its backward",
                                        layer, (int)r->desc.layers));
    s = abi_restore(r, &r->saved[layer], (const char *)from);
    return s != UPIPE_OK ? abi_refuse(r, s) : abi_end(r, s);
}

/* By a rank that is not there: some rank that is does not make its own calls. */
int upipe_abi_abort(upipe_abi *handle, int rank, const char *why)
{
    upipe_err err;
    abi_rank *r, *from;
    abi *u;
    pthread_mutex_lock(&abi_lock);
    u = *abi_at(handle);
    if (u != NULL && u->process != getpid()) u = NULL;
    if (u != NULL) ++u->calls;
    pthread_mutex_unlock(&abi_lock);
    if (u == NULL) return (int)UPIPE_ERR_ARG;
    r = abi_rank_of(u, rank);
    from = r != NULL ? r : u->rank;
    upipe_fail(&err, UPIPE_ERR_ARG, "a call of rank %d of %d", rank, u->team.grid.ranks);
    upipe_comm_abort(from->ctx.team, r != NULL ? why : err.text);
    upipe_comm_abort(from->ctx.ring, r != NULL ? why : err.text);
    pthread_mutex_lock(&abi_lock);
    --u->calls;
    pthread_mutex_unlock(&abi_lock);
    return r != NULL ? 0 : (int)UPIPE_ERR_ARG;
}

/* A copy, as another thread may close the handle before the caller has read the sentence. */
const char *upipe_abi_error(const upipe_abi *handle, int rank)
{
    static __thread upipe_err said;
    const char *why = said.text;
    const abi_rank *r;
    abi *u;
    pthread_mutex_lock(&abi_lock);
    u = *abi_at(handle);
    r = abi_rank_of(u, rank);
    if (handle == NULL)
        why = "the handle is NULL";
    else if (u == NULL)
        why = "the handle is closed, or was never open";
    else if (u->process != getpid())
        why = "the handle is that of the process that has forked this one";
    else if (r == NULL)
        why = "the handle has no rank of this number";
    else if (abi_clash.handle == u->handle && abi_clash.rank == rank)
        why = "another thread is in a call of this rank";
    else
        said = r->told.err;
    pthread_mutex_unlock(&abi_lock);
    return why;
}

int64_t upipe_abi_bytes(const upipe_abi *handle, int rank)
{
    abi_told told;
    return abi_ask(handle, rank, &told) ? told.bytes : -1;
}

int upipe_abi_close(upipe_abi *handle)
{
    abi **at, *u;
    pthread_mutex_lock(&abi_lock);
    at = abi_at(handle);
    u = *at;
    if (u != NULL && (u->calls > 0 || u->process != getpid()))
        u = NULL; /* a parent's sockets, threads and device are its own */
    if (u != NULL) *at = u->next;
    pthread_mutex_unlock(&abi_lock);
    if (u == NULL) return handle == NULL ? 0 : (int)UPIPE_ERR_ARG;
    abi_free(u);
    return 0;
}
