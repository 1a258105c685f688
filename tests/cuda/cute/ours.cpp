/* ours.cpp -- see ours.h */
#include "upipe/cuda/upipe_cuda_kernel.h"
#include "upipe/cuda/upipe_cuda_hopper.h"

#include "ours.h"

uint64_t ours_rows(uint32_t address)
{
    return upi_wgmma_rows(address);
}

uint64_t ours_columns(uint32_t address, uint32_t panel)
{
    return upi_wgmma_columns(address, panel);
}

uint64_t ours_further(uint64_t operand, int bytes)
{
    return upi_wgmma_further(operand, bytes);
}

uint32_t ours_panel_at(int rows, int r, int chunk)
{
    return upi_panel_at(rows, r, chunk);
}

uint32_t ours_swizzle(uint32_t at)
{
    return simt_swizzle(at);
}

int ours_row_of(int thread, int i)
{
    return simt_row_of(thread, i);
}

int ours_column_of(int thread, int i)
{
    return simt_column_of(thread, i);
}

void ours_mma(float d[32][4], uint32_t a[32][4], uint32_t b[32][2])
{
    simt_mma_arg lanes[32];
    void *args[32];
    for (int l = 0; l < 32; ++l) {
        lanes[l].d = d[l], lanes[l].a = a[l], lanes[l].b = b[l];
        args[l] = &lanes[l];
    }
    simt_multiply(args, 0xffffffffu);
}
