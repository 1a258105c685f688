/* trl.h -- TRL and accelerate: FSDP2 with PyTorch's ring and cuDNN, or DeepSpeed ZeRO-3 and Ulysses with FlashAttention-2
 *
 * Nothing of the ring's time is fitted; `layer` of Ulysses is as in alst.h. PyTorch's ring gathers K and V. `eager` is of
 * Qwen3-0.6B at 1M: transformers' norms of heads and RoPE leave copies of Q and K, one of them in f32. `logit`, 12 bytes, and
 * the 16 of a parameter are what the lines of the blog's memory have.
 */
static const program as_trl = {
    .name = "trl",
    .is = "TRL 1.13 and accelerate (2026): FSDP2 with PyTorch's ring, or DeepSpeed ZeRO-3 and Ulysses",
    .methods =
        {{"ring",
          "9 runs of qwen3-0.6b, qwen3-4b, qwen3-8b on h100, 1M to 4M tokens; memory of 6, 1 fitted, is off by -4 to +6 %; time of 8, none fitted, is off by -9 to +8 %",
          AS_RING, KERNEL_CUDNN, 1, 0, 0, 0},
         {"ulysses",
          "5 runs of qwen3-4b on h100, 8k to 96k tokens; memory of 5, all fitted, is off by -6 to +3 %",
          AS_ULYSSES, KERNEL_FA2, 1, 0.09, 0, 1}},
    .loss = 1 << AS_WHOLE | 1 << AS_TILED,
    .mlp = 1 << AS_WHOLE,
    .keeps = 1 << ACTIVATIONS_AC | 1 << ACTIVATIONS_OFFLOAD,
    .hosts = 1,
    .zeros = 1 << 3,
    .weights = 4,
    .gradients = 4,
    .moments = 8,
    .stream = 2.6,
    .fetched = 2,
    .ffn = 6,
    .mlp_more = 2.5,
    .loss_more = 4,
    .logit = 12,
    .eager = 5,
    .gathers = 1,
    .fixed = 1.0 * 1073741824,
    .dense = 1};
