/* alst.h -- Arctic Long Sequence Training: DeepSpeed ZeRO-3 and Ulysses with transformers' models, FlashAttention-2, Liger's
 * kernels, MLP in tiles, the layers' inputs on the host
 *
 * `part` is of its 500K run. `layer` is what TRL's 8k run with DeepSpeed takes longer than its kernels; `dense` is of 32K on
 * 8 GPUs, and leaves a fifth of that step unexplained. Liger's SwiGLU keeps two of the MLP's six tensors less. `logit`, 14
 * bytes: bf16, f32, its softmax and gradient in f32. `fixed`, `eager` and `mlp_more` are of the four H200 runs, which have the
 * memory of the device.
 */
static const program as_alst = {
    .name = "deepspeed-alst",
    .is =
        "Arctic Long Sequence Training (2025): DeepSpeed ZeRO-3 and Ulysses, transformers, FlashAttention-2",
    .methods =
        {{"ulysses",
          "19 runs of llama3.1-70b, llama3.1-8b, qwen3-32b on h100, h200, 32000 to 15500000 tokens; memory of 9, 4 fitted, is off by -9 to +6 %; time of 10, 2 fitted, is off by -41 to +6 %",
          AS_ULYSSES, KERNEL_FA2, 0.923, 0.09, 0, 1}},
    .loss = 1 << AS_WHOLE | 1 << AS_TILED,
    .mlp = 1 << AS_WHOLE | 1 << AS_TILED,
    .keeps = 1 << ACTIVATIONS_AC | 1 << ACTIVATIONS_OFFLOAD,
    .hosts = 2,
    .zeros = 1 << 3,
    .weights = 2,
    .gradients = 2,
    .moments = 12,
    .stream = 2.6,
    .fetched = 2,
    .ffn = 4,
    .mlp_more = 1,
    .loss_more = 4,
    .logit = 14,
    .eager = 1,
    .fixed = 4.0 * 1073741824,
    .device = 1,
    .dense = 0.7};
