/* upipe_abi.c -- see upipe_abi.h */
#include "upipe/net/upipe_net_tcp.h"
#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"
#include "upipe/cpu/upipe_cpu.h"

#include <unistd.h>

#include "upipe_abi.h"

/* Each forward holds a block until its backward, a call some more: the dry run's table has UPIPE_DRY_BLOCKS_MAX. */
enum { LAYERS_MAX = 1000 };

typedef struct abi_rank {
    upipe_plan plan;
    upipe_ctx ctx;
    upipe_mem mem;
    void *slab;
    upipe_mem_block *blocks;
    upipe_saved *saved; /* [layers] */
    int64_t *cu_seqlens;
    int64_t sequences;
} abi_rank;

typedef struct abi {
    upipe_abi_desc desc;
    upipe_ops ops;
    upipe_threads team; /* where all ranks are here */
    upipe_tcp tcp;      /* where one is */
    int first, here;    /* this process has the ranks first .. first + here - 1 */
    abi_rank *rank;     /* [here] */
    pid_t process;
    uintptr_t handle;
    struct abi *next;
} abi;

/* A handle is a number that is given once, and no address: so one that is closed, or was never open, is known as such,
 * whatever the memory holds by then. */
static pthread_mutex_t abi_lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t abi_handles; /* given so far */
static abi *abi_first;        /* the open ones */

static upipe_abi *abi_enter(abi *u)
{
    pthread_mutex_lock(&abi_lock);
    u->handle = ++abi_handles;
    u->next = abi_first;
    abi_first = u;
    pthread_mutex_unlock(&abi_lock);
    return (upipe_abi *)u->handle;
}

/* What is behind a handle; NULL: it is not open. With `leave` it is closed from now on. */
static abi *abi_of(const upipe_abi *handle, int leave)
{
    abi **at = &abi_first, *u;
    pthread_mutex_lock(&abi_lock);
    while (*at != NULL && (*at)->handle != (uintptr_t)handle) at = &(*at)->next;
    u = *at;
    if (leave && u != NULL) *at = u->next;
    pthread_mutex_unlock(&abi_lock);
    return u;
}

/* A rank of a handle; NULL: there is none, or the handle is a forked parent's. */
static abi_rank *abi_rank_of(abi *u, int rank)
{
    if (u == NULL || u->process != getpid()) return NULL;
    return rank >= u->first && rank < u->first + u->here ? &u->rank[rank - u->first] : NULL;
}

static upipe_view abi_view(const void *data, const upipe_plan *p, int heads)
{
    return upipe_view_packed((void *)(uintptr_t)data, p->desc.dtype, p->rows, heads, p->desc.head_dim);
}

static upipe_qkv abi_call(const upipe_abi_desc *d, const abi_rank *r, const void *o, const void *q,
                          const void *k, const void *v)
{
    const upipe_plan *p = &r->plan;
    upipe_qkv a = {0};
    a.plan = p, a.scale = d->scale, a.mask.causal = d->causal, a.mask.window = d->window;
    a.mask.softcap = d->softcap, a.mask.cu_seqlens = r->cu_seqlens, a.mask.cu_seqlens_n = r->sequences;
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
    if (out->ranks < 0 || out->ranks > UPIPE_DRY_RANKS_MAX)
        return upipe_fail(err, UPIPE_ERR_ARG, "%d ranks, at most %d", (int)out->ranks,
                          (int)UPIPE_DRY_RANKS_MAX);
    if (out->layers < 0 || out->layers > LAYERS_MAX)
        return upipe_fail(err, UPIPE_ERR_ARG, "%d layers, at most %d", (int)out->layers, (int)LAYERS_MAX);
    if (out->dtype != UPIPE_ABI_F32 && out->dtype != UPIPE_ABI_BF16)
        return upipe_fail(err, UPIPE_ERR_ARG, "dtype %d; 0 is f32 and 1 bf16", (int)out->dtype);
    return UPIPE_OK;
}

/* Plan of a rank, and what it needs: all forwards, then all backwards, dry. r->saved [layers] is as before. */
static upipe_status abi_dry(const upipe_abi_desc *desc, int rank, const upipe_ops *ops, abi_rank *r,
                            upipe_dry *dry, upipe_err *err)
{
    upipe_plan_desc d = {0};
    upipe_qkv_grads g;
    upipe_qkv a;
    float none = 0;
    int i;
    d.tokens = desc->tokens, d.batch = desc->batch, d.ranks = desc->ranks, d.rank = rank;
    d.heads = desc->heads, d.kv_heads = desc->kv_heads, d.head_dim = desc->head_dim;
    d.chunk = desc->chunk, d.dtype = desc->dtype == UPIPE_ABI_BF16 ? UPIPE_BF16 : UPIPE_F32;
    UPIPE_TRY(upipe_plan_init(&r->plan, &d, err));
    upipe_dry_init(dry, &r->plan, ops);
    *err = dry->ctx.err;
    UPIPE_TRY(err->status);
    a = abi_call(desc, r, &none, &none, &none, &none);
    g.dout = g.dq = a.q, g.dk = a.k, g.dv = a.v, g.dsinks = NULL;
    for (i = 0; i < desc->layers && dry->ctx.err.status == UPIPE_OK; ++i)
        upipe_qkv_fwd(&dry->ctx, &a, &r->saved[i]);
    while (--i >= 0 && dry->ctx.err.status == UPIPE_OK) upipe_qkv_bwd(&dry->ctx, &a, &g, &r->saved[i]);
    memset(r->saved, 0, (size_t)desc->layers * sizeof *r->saved);
    *err = dry->ctx.err;
    return err->status;
}

/* Plan, slab and pool of a rank. */
static upipe_status abi_rank_open(abi *u, int rank, upipe_dry *dry, upipe_err *err)
{
    abi_rank *r = &u->rank[rank - u->first];
    r->saved = (upipe_saved *)calloc((size_t)u->desc.layers, sizeof *r->saved);
    if (r->saved == NULL) return upipe_fail(err, UPIPE_ERR_MEMORY, "memory is out");
    UPIPE_TRY(abi_dry(&u->desc, rank, &u->ops, r, dry, err));
    r->blocks = (upipe_mem_block *)malloc((size_t)dry->mem.blocks_peak * sizeof *r->blocks);
    if (r->blocks == NULL || posix_memalign(&r->slab, UPIPE_MEM_ALIGN, dry->mem.need) != 0)
        return upipe_fail(err, UPIPE_ERR_MEMORY, "no %zu bytes for rank %d", dry->mem.need, rank);
    upipe_mem_init(&r->mem, r->slab, dry->mem.need, r->blocks, dry->mem.blocks_peak);
    r->ctx.ops = &u->ops, r->ctx.mem = &r->mem;
    r->ctx.team = u->tcp.buf != NULL ? &u->tcp.comm : upipe_threads_comm(&u->team, rank);
    return UPIPE_OK;
}

static void abi_free(abi *u)
{
    int i;
    if (u == NULL) return;
    for (i = 0; i < u->here; ++i) {
        if (u->rank[i].slab != NULL) {
            upipe_mem_rewind(&u->rank[i].mem, 0);
            upipe_mem_destroy(&u->rank[i].mem, NULL);
        }
        free(u->rank[i].slab);
        free(u->rank[i].blocks);
        free(u->rank[i].saved);
        free(u->rank[i].cu_seqlens);
    }
    upipe_threads_free(&u->team);
    (void)upipe_tcp_free(&u->tcp, NULL);
    free(u->rank);
    free(u);
}

enum { ABI_DEADLINE = 60 };

/* All ranks, or the one whose sockets these are. */
static upipe_status abi_make(abi **out, const upipe_abi_desc *desc, int rank, const int *headers,
                             const int *data, upipe_err *err)
{
    abi *u = (abi *)calloc(1, sizeof *u);
    upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry);
    const int ranks = desc->ranks, here = headers != NULL ? 1 : ranks;
    upipe_status s = UPIPE_ERR_MEMORY;
    if (u != NULL) {
        u->desc = *desc;
        u->process = getpid();
        u->first = headers != NULL ? rank : 0;
        u->rank = (abi_rank *)calloc((size_t)here, sizeof *u->rank);
        upipe_cpu_ops(&u->ops);
    }
    if (u == NULL || dry == NULL || u->rank == NULL)
        upipe_fail(err, s, "memory is out");
    else if (headers != NULL)
        s = upipe_tcp_init(&u->tcp, headers, data, rank, ranks, ABI_DEADLINE, err);
    else
        s = upipe_threads_init(&u->team, ranks, ABI_DEADLINE, err);
    while (s == UPIPE_OK && u->here < here) {
        s = abi_rank_open(u, u->first + u->here, dry, err);
        ++u->here;
    }
    free(dry);
    *out = s == UPIPE_OK ? u : NULL;
    if (s != UPIPE_OK) abi_free(u);
    return s;
}

static void abi_report(const upipe_err *err, char *why, size_t why_bytes)
{
    if (why != NULL && why_bytes > 0) snprintf(why, why_bytes, "%s", err->text);
}

int upipe_abi_version(void)
{
    return UPIPE_VERSION;
}

int upipe_abi_can(const char *name)
{
    static const char *const names[] = {"cpu",     "f32",        "bf16",    "window",
                                        "softcap", "cu_seqlens", "threads", "sockets"};
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
    if (s == UPIPE_OK && (rank < 0 || rank >= d.ranks))
        s = upipe_fail(&err, UPIPE_ERR_ARG, "rank %d of %d", rank, (int)d.ranks);
    if (s == UPIPE_OK) {
        r.saved = (upipe_saved *)calloc((size_t)d.layers, sizeof *r.saved);
        if (dry == NULL || r.saved == NULL) s = upipe_fail(&err, UPIPE_ERR_MEMORY, "memory is out");
    }
    upipe_cpu_ops(&ops);
    if (s == UPIPE_OK) s = abi_dry(&d, rank, &ops, &r, dry, &err);
    need = s == UPIPE_OK ? (int64_t)dry->mem.need : -1;
    free(r.saved);
    free(dry);
    if (s != UPIPE_OK) abi_report(&err, why, why_bytes);
    return need;
}

upipe_abi *upipe_abi_open(const upipe_abi_desc *desc, char *why, size_t why_bytes)
{
    upipe_err err = {{0}, UPIPE_OK};
    upipe_abi_desc d;
    upipe_status s = abi_read(&d, desc, &err);
    abi *u = NULL;
    if (s == UPIPE_OK) s = abi_make(&u, &d, 0, NULL, NULL, &err);
    if (s == UPIPE_OK) return abi_enter(u);
    abi_report(&err, why, why_bytes);
    return NULL;
}

upipe_abi *upipe_abi_open_sockets(const upipe_abi_desc *desc, int rank, const int *headers, const int *data,
                                  char *why, size_t why_bytes)
{
    upipe_err err = {{0}, UPIPE_OK};
    upipe_abi_desc d;
    upipe_status s = abi_read(&d, desc, &err);
    abi *u = NULL;
    if (s == UPIPE_OK && (headers == NULL || data == NULL))
        s = upipe_fail(&err, UPIPE_ERR_ARG, "the sockets are NULL");
    if (s == UPIPE_OK) s = abi_make(&u, &d, rank, headers, data, &err);
    if (s == UPIPE_OK) return abi_enter(u);
    abi_report(&err, why, why_bytes);
    return NULL;
}

int64_t upipe_abi_rows(const upipe_abi *handle, int rank, int64_t *first)
{
    const abi_rank *r = abi_rank_of(abi_of(handle, 0), rank);
    int64_t none;
    if (first != NULL) *first = -1;
    return r != NULL ? upipe_plan_tokens(&r->plan, rank, first != NULL ? first : &none) : -1;
}

/* A refused call is a failed rank's: the others are in theirs already, or on their way. */
static int abi_leave(abi_rank *r, upipe_status s)
{
    upipe_comm_abort(r->ctx.team, r->ctx.err.text);
    return (int)s;
}

/* A call of a rank that is not there: some other rank does not make its own. */
static int abi_nobody(abi *u, int rank)
{
    upipe_err err;
    upipe_fail(&err, UPIPE_ERR_ARG, "a call of rank %d of %d", rank, u != NULL ? (int)u->desc.ranks : 0);
    if (u != NULL && u->process == getpid()) upipe_comm_abort(u->rank[0].ctx.team, err.text);
    return (int)UPIPE_ERR_ARG;
}

int upipe_abi_pack(upipe_abi *handle, int rank, const int64_t *cu_seqlens, int64_t n)
{
    abi *u = abi_of(handle, 0);
    abi_rank *r = abi_rank_of(u, rank);
    int64_t *copy;
    if (r == NULL) return abi_nobody(u, rank);
    if (n < 0 || (n > 0 && cu_seqlens == NULL) || (uint64_t)n >= SIZE_MAX / sizeof *copy)
        return abi_leave(r,
                         upipe_fail(&r->ctx.err, UPIPE_ERR_ARG, "%lld packed sequences, cu_seqlens is %sNULL",
                                    (long long)n, cu_seqlens != NULL ? "not " : ""));
    copy = n > 0 ? (int64_t *)malloc(((size_t)n + 1) * sizeof *copy) : NULL;
    if (n > 0 && copy == NULL)
        return abi_leave(r, upipe_fail(&r->ctx.err, UPIPE_ERR_MEMORY, "memory is out"));
    if (n > 0) memcpy(copy, cu_seqlens, ((size_t)n + 1) * sizeof *copy);
    free(r->cu_seqlens);
    r->cu_seqlens = copy;
    r->sequences = n;
    return 0;
}

int upipe_abi_qkv_fwd(upipe_abi *handle, int rank, int layer, void *o, const void *q, const void *k,
                      const void *v)
{
    abi *u = abi_of(handle, 0);
    abi_rank *r = abi_rank_of(u, rank);
    upipe_qkv a;
    if (r == NULL) return abi_nobody(u, rank);
    a = abi_call(&u->desc, r, o, q, k, v);
    if (layer < 0 || layer >= u->desc.layers || r->saved[layer].lse != NULL)
        return abi_leave(r, upipe_fail(&r->ctx.err, UPIPE_ERR_ARG,
                                       "forward %d of %d, or again before its backward", layer,
                                       (int)u->desc.layers));
    return (int)upipe_qkv_fwd(&r->ctx, &a, &r->saved[layer]);
}

int upipe_abi_qkv_bwd(upipe_abi *handle, int rank, int layer, void *dq, void *dk, void *dv, const void *dout,
                      const void *o, const void *q, const void *k, const void *v)
{
    abi *u = abi_of(handle, 0);
    abi_rank *r = abi_rank_of(u, rank);
    upipe_qkv_grads g;
    upipe_qkv a;
    if (r == NULL) return abi_nobody(u, rank);
    if (layer < 0 || layer >= u->desc.layers)
        return abi_leave(
            r, upipe_fail(&r->ctx.err, UPIPE_ERR_ARG, "backward %d of %d", layer, (int)u->desc.layers));
    a = abi_call(&u->desc, r, o, q, k, v);
    g.dout = abi_view(dout, a.plan, a.plan->desc.heads), g.dq = abi_view(dq, a.plan, a.plan->desc.heads);
    g.dk = abi_view(dk, a.plan, a.plan->desc.kv_heads), g.dv = abi_view(dv, a.plan, a.plan->desc.kv_heads);
    g.dsinks = NULL;
    return (int)upipe_qkv_bwd(&r->ctx, &a, &g, &r->saved[layer]);
}

int upipe_abi_drop(upipe_abi *handle, int rank, int layer)
{
    abi *u = abi_of(handle, 0);
    abi_rank *r = abi_rank_of(u, rank);
    if (r == NULL) return (int)UPIPE_ERR_ARG;
    if (layer < 0 || layer >= u->desc.layers || r->saved[layer].lse == NULL)
        return (int)upipe_fail(&r->ctx.err, UPIPE_ERR_ARG, "forward %d of %d has nothing to drop", layer,
                               (int)u->desc.layers);
    return (int)upipe_saved_free(&r->ctx, &r->saved[layer]);
}

int upipe_abi_abort(upipe_abi *handle, int rank, const char *why)
{
    abi *u = abi_of(handle, 0);
    abi_rank *r = abi_rank_of(u, rank);
    if (r == NULL) return abi_nobody(u, rank);
    upipe_comm_abort(r->ctx.team, why);
    return 0;
}

const char *upipe_abi_error(const upipe_abi *handle, int rank)
{
    abi *u = abi_of(handle, 0);
    const abi_rank *r = abi_rank_of(u, rank);
    if (handle == NULL) return "the handle is NULL";
    if (u == NULL) return "the handle is closed, or was never open";
    if (u->process != getpid()) return "the handle is that of the process that has forked this one";
    return r != NULL ? r->ctx.err.text : "the handle has no rank of this number";
}

int64_t upipe_abi_bytes(const upipe_abi *handle, int rank)
{
    const abi_rank *r = abi_rank_of(abi_of(handle, 0), rank);
    return r != NULL ? (int64_t)r->mem.slab_bytes : -1;
}

int upipe_abi_close(upipe_abi *handle)
{
    abi *u = abi_of(handle, 1);
    abi_free(u);
    return u != NULL || handle == NULL ? 0 : (int)UPIPE_ERR_ARG;
}
