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

struct upipe_abi {
    upipe_abi_desc desc;
    upipe_ops ops;
    upipe_threads team;
    int ranks;
    abi_rank *rank; /* [ranks] */
};

static upipe_view abi_view(const float *data, const upipe_plan *p, int heads)
{
    return upipe_view_packed((void *)(uintptr_t)data, UPIPE_F32, p->rows, heads, p->desc.head_dim);
}

static upipe_qkv abi_call(const upipe_abi *u, const upipe_plan *p, float *o, const float *q, const float *k,
                          const float *v)
{
    upipe_qkv a = {0};
    a.plan = p, a.scale = u->desc.scale, a.mask.causal = u->desc.causal, a.mask.window = u->desc.window;
    a.q = abi_view(q, p, p->desc.heads), a.k = abi_view(k, p, p->desc.kv_heads);
    a.v = abi_view(v, p, p->desc.kv_heads), a.o = abi_view(o, p, p->desc.heads);
    return a;
}

/* Plan, slab and pool of a rank: all forwards, then all backwards, dry. */
static upipe_status abi_rank_open(upipe_abi *u, int rank, upipe_dry *dry, upipe_err *err)
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
    if (r->saved == NULL || upipe_dry_init(dry, &r->plan, &u->ops) != UPIPE_OK)
        return upipe_fail(err, UPIPE_ERR_MEMORY, "memory is out, or there are too many ranks");
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

upipe_abi *upipe_abi_open(const upipe_abi_desc *desc, char *why, size_t why_bytes)
{
    upipe_abi *u = (upipe_abi *)calloc(1, sizeof *u);
    upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry);
    upipe_err err = {{0}, UPIPE_OK};
    const int ranks = desc->ranks > 0 ? desc->ranks : 1;
    upipe_status s = UPIPE_ERR_MEMORY;
    if (u != NULL) {
        u->desc = *desc;
        u->desc.layers = desc->layers != 0 ? desc->layers : 1;
        u->rank = (abi_rank *)calloc((size_t)ranks, sizeof *u->rank);
        upipe_cpu_ops(&u->ops);
    }
    if (desc->ranks < 0 || desc->layers < 0 || desc->layers > LAYERS_MAX)
        s = upipe_fail(&err, UPIPE_ERR_ARG, "%d ranks, %d layers, at most %d", (int)desc->ranks,
                       (int)desc->layers, (int)LAYERS_MAX);
    else if (u == NULL || dry == NULL || u->rank == NULL)
        s = upipe_fail(&err, UPIPE_ERR_MEMORY, "memory is out");
    else
        s = upipe_threads_init(&u->team, ranks, 60, &err);
    while (s == UPIPE_OK && u->ranks < ranks) s = abi_rank_open(u, u->ranks++, dry, &err);
    free(dry);
    if (s == UPIPE_OK) return u;
    if (why_bytes > 0) snprintf(why, why_bytes, "%s", err.text);
    upipe_abi_close(u);
    return NULL;
}

int64_t upipe_abi_rows(const upipe_abi *u, int rank, int64_t *first)
{
    return upipe_plan_tokens(&u->rank[rank].plan, rank, first);
}

/* A refused call is a failed rank's: the others are in theirs already, or on their way. */
static int abi_leave(abi_rank *r, upipe_status s)
{
    upipe_comm_abort(r->ctx.team, r->ctx.err.text);
    return (int)s;
}

int upipe_abi_qkv_fwd(upipe_abi *u, int rank, int layer, float *o, const float *q, const float *k,
                      const float *v)
{
    abi_rank *r = &u->rank[rank];
    const upipe_qkv a = abi_call(u, &r->plan, o, q, k, v);
    if (layer < 0 || layer >= u->desc.layers || r->saved[layer].lse != NULL)
        return abi_leave(r, upipe_fail(&r->ctx.err, UPIPE_ERR_ARG,
                                       "forward %d of %d, or again before its backward", layer,
                                       (int)u->desc.layers));
    return (int)upipe_qkv_fwd(&r->ctx, &a, &r->saved[layer]);
}

int upipe_abi_qkv_bwd(upipe_abi *u, int rank, int layer, float *dq, float *dk, float *dv, const float *dout,
                      const float *o, const float *q, const float *k, const float *v)
{
    abi_rank *r = &u->rank[rank];
    const upipe_qkv a = abi_call(u, &r->plan, (float *)(uintptr_t)o, q, k, v);
    const upipe_plan *p = &r->plan;
    upipe_qkv_grads g;
    if (layer < 0 || layer >= u->desc.layers)
        return abi_leave(
            r, upipe_fail(&r->ctx.err, UPIPE_ERR_ARG, "backward %d of %d", layer, (int)u->desc.layers));
    g.dout = abi_view(dout, p, p->desc.heads), g.dq = abi_view(dq, p, p->desc.heads);
    g.dk = abi_view(dk, p, p->desc.kv_heads), g.dv = abi_view(dv, p, p->desc.kv_heads), g.dsinks = NULL;
    return (int)upipe_qkv_bwd(&r->ctx, &a, &g, &r->saved[layer]);
}

int upipe_abi_drop(upipe_abi *u, int rank, int layer)
{
    abi_rank *r = &u->rank[rank];
    if (layer < 0 || layer >= u->desc.layers || r->saved[layer].lse == NULL)
        return (int)upipe_fail(&r->ctx.err, UPIPE_ERR_ARG, "forward %d of %d has nothing to drop", layer,
                               (int)u->desc.layers);
    return (int)upipe_saved_free(&r->ctx, &r->saved[layer]);
}

void upipe_abi_abort(upipe_abi *u, int rank, const char *why)
{
    upipe_comm_abort(u->rank[rank].ctx.team, why);
}

const char *upipe_abi_error(const upipe_abi *u, int rank)
{
    return u->rank[rank].ctx.err.text;
}

/* Bytes of a rank's slab. */
int64_t upipe_abi_bytes(const upipe_abi *u, int rank)
{
    return (int64_t)u->rank[rank].mem.slab_bytes;
}

void upipe_abi_close(upipe_abi *u)
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
