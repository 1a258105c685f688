/* torchtitan.h -- torchtitan as it comes: FSDP2 with PyTorch's ring, torch.compile, loss and MLP whole, FlashAttention-2
 *
 * `part` and `logit` are of its run on 8 GPUs with 256k tokens, `dense` of that with 32k and no ring: of GPUs limited to 500 W.
 */
static const program as_torchtitan = {
    .name = "torchtitan",
    .is = "torchtitan as it comes (2024): FSDP2, PyTorch's ring, torch.compile; of H100s limited to 500 W",
    .methods =
        {{"ring",
          "4 runs of llama3.1-8b on h100-96g, 32k to 256k tokens; memory of 4, 1 fitted, is off by -2 to -1 %; time of 4, 2 fitted, is off by -5 to +37 %",
          AS_RING, KERNEL_FA2, 0.56, 0, 0, 0}},
    .loss = 1 << AS_WHOLE,
    .mlp = 1 << AS_WHOLE,
    .keeps = 1 << ACTIVATIONS_AC,
    .zeros = 1 << 3,
    .fp8 = 1,
    .weights = 4,
    .gradients = 4,
    .moments = 8,
    .stream = 2.6,
    .fetched = 2,
    .ffn = 6,
    .mlp_more = 2.5,
    .loss_more = 4,
    .logit = 14,
    .fixed = 1.0 * 1073741824,
    .dense = 0.7};
