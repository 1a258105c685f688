/* gated_attention.h -- made by make_gated_attention.py: README.md */
/* clang-format off */
#ifndef UPIPE_TEST_GATED_ATTENTION_H
#define UPIPE_TEST_GATED_ATTENTION_H

enum {
    GOLDEN_TOKENS = 70,
    GOLDEN_MODEL = 32,
    GOLDEN_HEADS = 4,
    GOLDEN_KV_HEADS = 2,
    GOLDEN_DIM = 32,
    GOLDEN_ROPE_DIMS = 8
};

static const double golden_theta = 10000.0, golden_eps = 1e-06;

static const golden_row golden_rows[] = {
    {"x", -1.11741600554, 9.7426, 3.13e-06},
    {"wq", -1.689314568709, 23.937, 6.66e-06},
    {"wk", 39.5310108549, 24.595, 7.82e-06},
    {"wv", -8.393655454695, 27.492, 8.17e-06},
    {"wo", -29.17492738475, 27.892, 7.04e-06},
    {"wg", 0.5121971562131, 6.2107, 1.56e-06},
    {"q_norm_weight", 0.3532240645059, 3.0802, 7.05e-07},
    {"k_norm_weight", 2.358783110884, 3.0928, 8.94e-07},
    {"y", 4.575484589914, 6.6025, 1.76e-06},
};

#endif
