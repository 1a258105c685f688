/* step.c -- one step of the consumer: memory from the pool, bytes through the team */
#include "step.h"

upipe_status step(upipe_ctx *ctx, const upipe_plan *plan)
{
    size_t bytes = upipe_plan_unit_bytes(plan);
    int64_t mark = upipe_mem_mark(ctx->mem);
    void *send, *recv;
    upipe_msg list[2];
    int used = 0;
    UPIPE_TRY(upipe_mem_alloc(ctx->mem, &send, bytes, UPIPE_USE_QKV, "send", &ctx->err));
    UPIPE_TRY(upipe_mem_alloc(ctx->mem, &recv, bytes, UPIPE_USE_OTHER, "recv", &ctx->err));
    memset(send, 7, bytes);
    memset(recv, 0, bytes);
    upipe_msg_add(list, &used, (ctx->team->rank + 1) % ctx->team->ranks, 1, send, bytes, 0, NULL, 0, 0);
    upipe_msg_add(list, &used, (ctx->team->rank + ctx->team->ranks - 1) % ctx->team->ranks, 1, NULL, 0, 0,
                  recv, bytes, 0);
    UPIPE_TRY(upipe_comm_start(ctx, ctx->team, list, used));
    UPIPE_TRY(upipe_comm_wait(ctx, ctx->team));
    if (memcmp(send, recv, bytes) != 0)
        return upipe_fail(&ctx->err, UPIPE_ERR_MISMATCH,
                          "the bytes that arrived are not those that were sent");
    upipe_mem_rewind(ctx->mem, mark);
    return UPIPE_OK;
}
