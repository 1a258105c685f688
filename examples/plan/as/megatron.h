/* megatron.h -- Megatron-Core with TransformerEngine: data and context parallelism alone, a distributed optimizer, cuDNN
 *
 * `dense` is of Llama3-8B in fp8 on 8 H100. Of its memory nothing is published with a setting: sizes are those of the paper's
 * setting, which is PyTorch too, and a guess.
 */
static const program as_megatron = {
    .name = "megatron",
    .is =
        "Megatron-Core and TransformerEngine (2025) without tensor and pipeline parallelism; its memory is a guess",
    .methods =
        {{"ring",
          "6 runs of llama3-8b on b200, h100, 8k to 64k tokens; time of 6, 1 fitted, is off by -1 to +7 %",
          AS_RING, KERNEL_CUDNN, 1, 0.0005, 0, 0},
         {"ulysses", "", AS_ULYSSES, KERNEL_CUDNN, 1, 0.0005, 0, 1}},
    .loss = 1 << AS_WHOLE,
    .mlp = 1 << AS_WHOLE,
    .keeps = 1 << ACTIVATIONS_AC,
    .all = 1,
    .hosts = 1,
    .zeros = 1 << 1 | 1 << 3,
    .fp8 = 1,
    .weights = 2,
    .gradients = 4,
    .moments = 12,
    .stream = 2.6,
    .fetched = 2,
    .ffn = 6,
    .mlp_more = 2.5,
    .loss_more = 4,
    .logit = 8,
    .fixed = 2.0 * 1073741824,
    .dense = 1.2};
