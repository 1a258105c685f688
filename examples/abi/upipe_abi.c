/* upipe_abi.c -- see upipe_abi.h */
#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"
#include "upipe/cpu/upipe_cpu.h"

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
} abi_rank;

typedef struct abi {
    upipe_abi_desc desc;
    upipe_ops ops;
    upipe_threads team;
    int ranks;
    abi_rank *rank; /* [ranks] */
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

/* A rank of a handle; NULL: there is none. */
static abi_rank *abi_rank_of(abi *u, int rank)
{
    return u != NULL && rank >= 0 && rank < u->ranks ? &u->rank[rank] : NULL;
}

static upipe_view abi_view(const float *data, const upipe_plan *p, int heads)
{
    return upipe_view_packed((void *)(uintptr_t)data, UPIPE_F32, p->rows, heads, p->desc.head_dim);
}

static upipe_qkv abi_call(const abi *u, const upipe_plan *p, float *o, const float *q, const float *k,
                          const float *v)
{
    upipe_qkv a = {0};
    a.plan = p, a.scale = u->desc.scale, a.mask.causal = u->desc.causal, a.mask.window = u->desc.window;
    a.q = abi_view(q, p, p->desc.heads), a.k = abi_view(k, p, p->desc.kv_heads);
    a.v = abi_view(v, p, p->desc.kv_heads), a.o = abi_view(o, p, p->desc.heads);
    return a;
}

/* Plan, slab and pool of a rank: all forwards, then all backwards, dry. */
static upipe_status abi_rank_open(abi *u, int rank, upipe_dry *dry, upipe_err *err)
{
    abi_rank *r = &u->rank[rank];
    upipe_plan_desc d = {0};
    upipe_qkv_grads g;
    upipe_qkv a;
    float none = 0;
    int i;
    d.tokens = u->desc.tokens, d.batch = u->desc.batch, d.ranks = u->team.ranks, d.rank = rank;
    d.heads = u->desc.heads, d.kv_heads = u->desc.kv_heads, d.head_dim = u->desc.head_dim;
    d.chunk = u->desc.chunk;
    UPIPE_TRY(upipe_plan_init(&r->plan, &d, err));
    r->saved = (upipe_saved *)calloc((size_t)u->desc.layers, sizeof *r->saved);
    if (r->saved == NULL) return upipe_fail(err, UPIPE_ERR_MEMORY, "memory is out");
    upipe_dry_init(dry, &r->plan, &u->ops);
    *err = dry->ctx.err;
    UPIPE_TRY(err->status);
    a = abi_call(u, &r->plan, &none, &none, &none, &none);
    g.dout = g.dq = a.q, g.dk = a.k, g.dv = a.v, g.dsinks = NULL;
    for (i = 0; i < u->desc.layers && dry->ctx.err.status == UPIPE_OK; ++i)
        upipe_qkv_fwd(&dry->ctx, &a, &r->saved[i]);
    while (--i >= 0 && dry->ctx.err.status == UPIPE_OK) upipe_qkv_bwd(&dry->ctx, &a, &g, &r->saved[i]);
    memset(r->saved, 0, (size_t)u->desc.layers * sizeof *r->saved);
    *err = dry->ctx.err;
    if (err->status != UPIPE_OK) return err->status;
    r->blocks = (upipe_mem_block *)malloc((size_t)dry->mem.blocks_peak * sizeof *r->blocks);
    if (r->blocks == NULL || posix_memalign(&r->slab, UPIPE_MEM_ALIGN, dry->mem.need) != 0)
        return upipe_fail(err, UPIPE_ERR_MEMORY, "no %zu bytes for rank %d", dry->mem.need, rank);
    upipe_mem_init(&r->mem, r->slab, dry->mem.need, r->blocks, dry->mem.blocks_peak);
    r->ctx.ops = &u->ops, r->ctx.mem = &r->mem, r->ctx.team = upipe_threads_comm(&u->team, rank);
    return UPIPE_OK;
}

static void abi_free(abi *u)
{
    int i;
    if (u == NULL) return;
    for (i = 0; i < u->ranks; ++i) {
        if (u->rank[i].slab != NULL) {
            upipe_mem_rewind(&u->rank[i].mem, 0);
            upipe_mem_destroy(&u->rank[i].mem, NULL);
        }
        free(u->rank[i].slab);
        free(u->rank[i].blocks);
        free(u->rank[i].saved);
    }
    upipe_threads_free(&u->team);
    free(u->rank);
    free(u);
}

/* All ranks of a description whose numbers make sense. */
static upipe_status abi_make(abi **out, const upipe_abi_desc *desc, int ranks, upipe_err *err)
{
    abi *u = (abi *)calloc(1, sizeof *u);
    upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry);
    upipe_status s = UPIPE_ERR_MEMORY;
    if (u != NULL) {
        u->desc = *desc;
        u->desc.layers = desc->layers != 0 ? desc->layers : 1;
        u->rank = (abi_rank *)calloc((size_t)ranks, sizeof *u->rank);
        upipe_cpu_ops(&u->ops);
    }
    if (u == NULL || dry == NULL || u->rank == NULL)
        upipe_fail(err, s, "memory is out");
    else
        s = upipe_threads_init(&u->team, ranks, 60, err);
    while (s == UPIPE_OK && u->ranks < ranks) s = abi_rank_open(u, u->ranks++, dry, err);
    free(dry);
    *out = s == UPIPE_OK ? u : NULL;
    if (s != UPIPE_OK) abi_free(u);
    return s;
}

upipe_abi *upipe_abi_open(const upipe_abi_desc *desc, char *why, size_t why_bytes)
{
    upipe_err err = {{0}, UPIPE_OK};
    upipe_status s;
    abi *u = NULL;
    if (desc == NULL)
        s = upipe_fail(&err, UPIPE_ERR_ARG, "desc is NULL");
    else if (desc->ranks < 0 || desc->ranks > UPIPE_DRY_RANKS_MAX)
        s = upipe_fail(&err, UPIPE_ERR_ARG, "%d ranks, at most %d", (int)desc->ranks,
                       (int)UPIPE_DRY_RANKS_MAX);
    else if (desc->layers < 0 || desc->layers > LAYERS_MAX)
        s = upipe_fail(&err, UPIPE_ERR_ARG, "%d layers, at most %d", (int)desc->layers, (int)LAYERS_MAX);
    else
        s = abi_make(&u, desc, desc->ranks > 0 ? desc->ranks : 1, &err);
    if (s == UPIPE_OK) return abi_enter(u);
    if (why != NULL && why_bytes > 0) snprintf(why, why_bytes, "%s", err.text);
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
    upipe_fail(&err, UPIPE_ERR_ARG, "a call of rank %d of %d", rank, u != NULL ? u->ranks : 0);
    if (u != NULL) upipe_comm_abort(u->rank[0].ctx.team, err.text);
    return (int)UPIPE_ERR_ARG;
}

int upipe_abi_qkv_fwd(upipe_abi *handle, int rank, int layer, float *o, const float *q, const float *k,
                      const float *v)
{
    abi *u = abi_of(handle, 0);
    abi_rank *r = abi_rank_of(u, rank);
    upipe_qkv a;
    if (r == NULL) return abi_nobody(u, rank);
    a = abi_call(u, &r->plan, o, q, k, v);
    if (layer < 0 || layer >= u->desc.layers || r->saved[layer].lse != NULL)
        return abi_leave(r, upipe_fail(&r->ctx.err, UPIPE_ERR_ARG,
                                       "forward %d of %d, or again before its backward", layer,
                                       (int)u->desc.layers));
    return (int)upipe_qkv_fwd(&r->ctx, &a, &r->saved[layer]);
}

int upipe_abi_qkv_bwd(upipe_abi *handle, int rank, int layer, float *dq, float *dk, float *dv,
                      const float *dout, const float *o, const float *q, const float *k, const float *v)
{
    abi *u = abi_of(handle, 0);
    abi_rank *r = abi_rank_of(u, rank);
    upipe_qkv_grads g;
    upipe_qkv a;
    if (r == NULL) return abi_nobody(u, rank);
    if (layer < 0 || layer >= u->desc.layers)
        return abi_leave(
            r, upipe_fail(&r->ctx.err, UPIPE_ERR_ARG, "backward %d of %d", layer, (int)u->desc.layers));
    a = abi_call(u, &r->plan, (float *)(uintptr_t)o, q, k, v);
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
