/* paper.h -- the paper's own setting: PyTorch with TorchTitan, USP's ring and teams, FlashAttention-3, loss and MLP in tiles
 *
 * The sizes are fitted on the paper's Llama3-8B tables of 8 GPUs (bench/paper.py); which tensors they are is a reading. Of
 * `native` the tables have PyTorch's own ring. Its attention has 0.51 of FlashAttention-3's rate, and FlashAttention-2, which
 * PyTorch has built in, 0.55: the ring itself is not slow.
 */
static const program as_paper = {
    .name = "paper",
    .is =
        "the paper's setting: PyTorch and TorchTitan with USP and FlashAttention-3; fitted on its Llama3-8B tables",
    .methods =
        {{"upipe",
          "23 runs of llama3-8b on h100, 128k to 5M tokens; memory of 23, all fitted, is off by -2 to +0 %; time of 23, all fitted, is off by -2 to +2 %",
          AS_UPIPE, KERNEL_FA3, 1, 0, 0, 0},
         {"ulysses",
          "17 runs of llama3-8b on h100, 128k to 3M tokens; memory of 17, all fitted, is off by -2 to +0 %; time of 17, all fitted, is off by -3 to +3 %",
          AS_ULYSSES, KERNEL_FA3, 1, 0, 0, 0},
         {"ring",
          "6 runs of llama3-8b on h100, 128k to 3M tokens; memory of 6, all fitted, is off by +0 to +1 %; time of 6, all fitted, is off by -3 to +2 %",
          AS_RING, KERNEL_FA3, 1, 0, 0, 0},
         {"fpdt",
          "7 runs of llama3-8b on h100, 128k to 4M tokens; memory of 7, all fitted, is off by +0 to +1 %; time of 7, all fitted, is off by -2 to +3 %",
          AS_FPDT, KERNEL_FA3, 1, 0, 0, 1},
         {"native",
          "4 runs of llama3-8b on h100, 128k to 1M tokens; memory of 4, all fitted, is off by +0 to +0 %; time of 4, all fitted, is off by -3 to +1 %",
          AS_RING, KERNEL_FA3, 0, 0, 1, 0}},
    .loss = 1 << AS_TILED,
    .mlp = 1 << AS_TILED,
    .keeps = 1 << ACTIVATIONS_AC | 1 << ACTIVATIONS_OFFLOAD | 1 << ACTIVATIONS_SAO | 1 << ACTIVATIONS_SAC,
    .zeros = 1 << 3,
    .weights = 4,
    .gradients = 4,
    .moments = 8,
    .stream = 2.6,
    .fetched = 2,
    .ffn = 6,
    .mlp_more = 2.5,
    .loss_more = 4,
    .batch = 1.2,
    .chunks = 17.5,
    .positions = 1,
    .fixed = 0.13 * 1073741824,
    .dense = 1};
