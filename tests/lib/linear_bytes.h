/* linear_bytes.h -- what a layer of linear attention allocates and sends, as sums
 *
 *     linear_bytes(&ops, &l, 1)       the most that a backward has in the pool; what a forward saves is in the forward's
 */
#ifndef UPIPE_TEST_LINEAR_BYTES_H
#define UPIPE_TEST_LINEAR_BYTES_H

#include "upipe/upipe_linear_layer.h"

/* Of all buffers of a stage, the largest one's. */
static inline size_t linear_stage_bytes(const upipe_ops *ops, const upipe_linear_layer *l, int backward)
{
    const upipe_scan scan = upi_lin_scan(l);
    const int keys = upi_lin_stage_keys(l);
    const int sizes[2] = {keys, l->key_heads - (upipe_scan_stages(&scan) - 1) * keys};
    size_t most = 0;
    for (int i = 0; i < 2; ++i) {
        const upi_lin_stage s = upi_lin_stage_bytes(ops, l, 0, sizes[i], backward);
        size_t all = 0;
        for (int j = 0; j < UPI_LIN_BUFFERS; ++j) all += s.bytes[j];
        most = upipe_max_bytes(most, all);
    }
    return most;
}

static inline size_t linear_bytes(const upipe_ops *ops, const upipe_linear_layer *l, int backward)
{
    const upipe_scan scan = upi_lin_scan(l);
    const size_t tile =
        (backward ? 3 : 2) * upi_lin_tile_bytes(l) + upi_lin_tile_work_bytes(ops, l, backward);
    const size_t pass = backward ? upipe_scan_bwd_bytes(&scan) : upipe_scan_fwd_bytes(&scan);
    const size_t held = backward ? upi_lin_sum_bytes(l) : upi_lin_o_bytes(l) + upipe_scan_state_bytes(&scan);
    return (size_t)l->key_dim * 4 + held + upipe_max_bytes(tile, pass + linear_stage_bytes(ops, l, backward));
}

#endif
