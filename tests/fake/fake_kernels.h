/* fake_kernels.h -- what blocks of kernels take of a multiprocessor: registers, and time on the fake's clock   tests
 *
 * X(kernel, columns, registers on 8.0, registers on 9.0, ticks of a block). Registers are those that the compiler gives at
 * launch, the most of all kernels of this name and these columns (columns 0: it has none); 0: it does not run there. tests/cuda/sass.py holds them
 * against the machine code. Ticks are no times: a block of attention takes long beside all others, and one that stays for
 * the whole call takes longest.
 */
#ifndef FAKE_KERNELS_H
#define FAKE_KERNELS_H

/* clang-format off */
#define FAKE_KERNELS(X)                          \
    X(upi_cuda_fwd90_kernel, 64, 0, 128, 4000)   \
    X(upi_cuda_fwd90_kernel, 128, 0, 168, 4000)  \
    X(upi_cuda_attn_fwd_kernel, 64, 227, 232, 100) \
    X(upi_cuda_attn_fwd_kernel, 128, 252, 255, 100) \
    X(upi_bias_parts, 0, 160, 167, 1)            \
    X(upi_embed_bwd_rows, 0, 179, 179, 1)        \
    X(upi_cuda_linear_states, 0, 198, 196, 1)    \
    X(upi_cuda_linear_back, 0, 143, 124, 1)      \
    X(upi_cuda_linear_keys, 0, 178, 180, 1)      \
    X(upi_cuda_conv_bwd_rows, 0, 156, 159, 1)
/* clang-format on */

enum {
    FAKE_OTHER_REGISTERS = 128, /* at most, of other kernels without attention in their names */
    /* what kernels of other libraries take, as far as is known: NCCL's for sends and receives, cuBLAS's a tile of c */
    FAKE_NCCL_THREADS = 640,
    FAKE_NCCL_REGISTERS = 96,
    FAKE_PRODUCT_TILE = 128,
    FAKE_PRODUCT_THREADS_80 = 128,
    FAKE_PRODUCT_REGISTERS_80 = 232,
    FAKE_PRODUCT_SHARED_80 = 80 << 10,
    FAKE_PRODUCT_THREADS_90 = 384,
    FAKE_PRODUCT_REGISTERS_90 = 168,
    FAKE_PRODUCT_SHARED_90 = 200 << 10
};

#endif
