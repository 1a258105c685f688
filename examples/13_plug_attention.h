/* 13_plug_attention.h -- what an attention of the host's own keeps beside the table */
#ifndef PLUG_ATTENTION_H
#define PLUG_ATTENTION_H

#include "upipe/upipe.h"

/* ops.host points here: the library copies tables, so an entry finds its things through that pointer
 * alone. */
typedef struct plug {
    upipe_ops base;         /* the table as it was: serves all other calls */
    int64_t served, passed; /* calls, of either kind */
    void *own;              /* the kernel's: handles, plans */
} plug;

/* Neither masks beyond full and causal, nor older results to add to, nor rows at other positions than the
 * keys. */
static inline int plug_is_plain(const upipe_attn *a)
{
    return a->mask.window == 0 && a->mask.cu_seqlens == NULL && a->mask.softcap == 0 &&
           a->mask.sinks == NULL && !a->merge && a->v.d == a->q.d && a->q.n > 0 && a->q.n == a->k.n &&
           a->q_pos == a->k_pos;
}

static inline plug *plug_of(const upipe_ops *ops)
{
    return (plug *)ops->host;
}

#ifdef WITH_CUDNN
#ifdef __cplusplus
extern "C" {
#endif
/* 13_plug_cudnn.cpp: puts cuDNN's forward into the table; plug_cudnn_close after the stream's last call. */
upipe_status plug_cudnn_open(plug *p, upipe_ops *ops, upipe_err *e);
void plug_cudnn_close(plug *p);
#ifdef __cplusplus
}
#endif
#endif

#endif
