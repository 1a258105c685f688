/* gated_delta_net.h -- made by make_gated_delta.py: README.md */
/* clang-format off */
#ifndef UPIPE_TEST_GATED_DELTA_NET_H
#define UPIPE_TEST_GATED_DELTA_NET_H

enum {
    GOLDEN_TOKENS = 150,
    GOLDEN_MODEL = 32,
    GOLDEN_HEADS = 4,
    GOLDEN_KEY_HEADS = 2,
    GOLDEN_KEY_DIM = 16,
    GOLDEN_VALUE_DIM = 24,
    GOLDEN_TAPS = 4,
    GOLDEN_CHUNK = 64
};

static const float golden_eps = 1e-06f;

static const golden_row golden_rows[] = {
    {"x", 34.26738311594, 55.2, 3.51e-05},
    {"w_qkv", -32.4895199648, 202.35, 0.000136},
    {"w_z", 9.208573508172, 98.741, 3.35e-05},
    {"w_b", 15.8375456185, 17.425, 8.93e-06},
    {"w_a", -1.174221735709, 7.0501, 8.87e-06},
    {"w_out", 52.30823099002, 92.062, 3.32e-05},
    {"conv", 41.34469314689, 110.58, 5.58e-05},
    {"a_log", -3.718969260725, 4.8638, 2.45e-05},
    {"dt_bias", -6.160974850503, 3.761, 1.74e-05},
    {"norm", -1.312746150686, 9.3517, 4.25e-06},
    {"y", 0.7630471839187, 23.669, 7.8e-06},
    {"state", 0.1531007981761, 1.2694, 2.13e-07},
};

#endif
