/* ours.h -- what the comparison with CuTe asks of the library and of the emulator, whose headers and CuTe's cannot share a
 * unit: both define CUDA's words */
#ifndef CUTE_OURS_H
#define CUTE_OURS_H

#include <cstdint>

uint64_t ours_rows(uint32_t address); /* descriptors of wgmma's operands */
uint64_t ours_columns(uint32_t address, uint32_t panel);
uint64_t ours_further(uint64_t operand, int bytes);
uint32_t ours_panel_at(int rows, int r, int chunk); /* bytes in a swizzled tile */
uint32_t ours_swizzle(uint32_t at);
int ours_row_of(int thread, int i); /* accumulators of wgmma */
int ours_column_of(int thread, int i);
void ours_mma(float d[32][4], uint32_t a[32][4],
              uint32_t b[32][2]); /* mma.sync by the emulator, registers a lane */

#endif
