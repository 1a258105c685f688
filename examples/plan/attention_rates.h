/* Published rates of attention kernels under a causal mask, in bf16 or f16; of each kernel, card and head dim lengths rise.
 * MagiAttention's and FlashAttention's are read from the bars of their figures. FlashAttention-2's on an A100 is one rate for
 * forward and backward together, and stands in both. Of B200 the authors of FlashAttention-4 have 1,418 and 1,209 at 8k. */
#define MAGI "MagiAttention's benchmark of kernels, github.com/SandAI-org/MagiAttention 2c64135"
#define FA3 \
    "FlashAttention-3's figure, github.com/Dao-AILab/flash-attention 0251105; its backward a guess by MagiAttention's"
#define FA2 "FlashAttention-2's figure, github.com/Dao-AILab/flash-attention 0251105"
#define RTX "TileLang's table of attention on an RTX 4090, github.com/apache/tvm, tl_doc/flash_perf.md"

/* clang-format off */
static const kernel_rate kernel_rates[] = {
    {KERNEL_FA2, "h100", 64, 1024, 229, 180, FA3},
    {KERNEL_FA2, "h100", 64, 16384, 299, 280, FA3},
    {KERNEL_FA2, "h100", 128, 1024, 260, 208, FA3},
    {KERNEL_FA2, "h100", 128, 8192, 352, 301, MAGI},
    {KERNEL_FA2, "h100", 128, 16384, 364, 323, MAGI},
    {KERNEL_FA2, "h100", 128, 32768, 367, 330, MAGI},
    {KERNEL_FA2, "h100", 256, 16384, 298, 265, FA3},
    {KERNEL_FA2, "a100", 64, 1024, 119, 119, FA2},
    {KERNEL_FA2, "a100", 64, 16384, 171, 171, FA2},
    {KERNEL_FA2, "a100", 128, 1024, 133, 133, FA2},
    {KERNEL_FA2, "a100", 128, 8192, 182, 182, FA2},
    {KERNEL_FA2, "a100", 128, 16384, 189, 189, FA2},
    {KERNEL_FA2, "4090", 64, 2048, 142, 97, RTX},
    {KERNEL_FA2, "4090", 128, 2048, 151, 99, RTX},
    {KERNEL_FA3, "h100", 64, 1024, 265, 228, FA3},
    {KERNEL_FA3, "h100", 64, 16384, 473, 408, FA3},
    {KERNEL_FA3, "h100", 128, 1024, 423, 333, FA3},
    {KERNEL_FA3, "h100", 128, 8192, 657, 517, MAGI},
    {KERNEL_FA3, "h100", 128, 16384, 673, 562, MAGI},
    {KERNEL_FA3, "h100", 128, 32768, 680, 586, MAGI},
    {KERNEL_FA3, "h100", 256, 1024, 427, 336, FA3},
    {KERNEL_FA3, "h100", 256, 16384, 642, 536, FA3},
    {KERNEL_FA4, "b200", 128, 8192, 1377, 939, MAGI},
    {KERNEL_FA4, "b200", 128, 16384, 1366, 1034, MAGI},
    {KERNEL_FA4, "b200", 128, 32768, 1389, 1092, MAGI},
    {KERNEL_CUDNN, "h100", 64, 1024, 288, 228, FA3},
    {KERNEL_CUDNN, "h100", 64, 16384, 388, 322, FA3},
    {KERNEL_CUDNN, "h100", 128, 1024, 410, 325, FA3},
    {KERNEL_CUDNN, "h100", 128, 8192, 538, 426, MAGI},
    {KERNEL_CUDNN, "h100", 128, 16384, 554, 460, MAGI},
    {KERNEL_CUDNN, "h100", 128, 32768, 567, 486, MAGI},
    {KERNEL_CUDNN, "h100", 256, 16384, 509, 423, FA3},
    {KERNEL_CUDNN, "b200", 128, 8192, 1147, 645, MAGI},
    {KERNEL_CUDNN, "b200", 128, 16384, 1240, 712, MAGI},
    {KERNEL_CUDNN, "b200", 128, 32768, 1289, 739, MAGI}};
/* clang-format on */

#undef MAGI
#undef FA3
#undef FA2
#undef RTX
