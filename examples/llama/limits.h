/* limits.h -- what a number may be, whether a flag says it or a file
 *
 *     const limit_whole *l = limit_whole_of("tokens");         from l->least to l->most
 *     const limit_real *r = limit_real_of("min_lr");           the flag min-lr: - and _ are the same
 */
#ifndef LLAMA_LIMITS_H
#define LLAMA_LIMITS_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

enum {
    LLAMA_LAYERS_MAX = 4096, /* bounds the table of tensors that a file can make us allocate */
    LLAMA_DIM_MAX = 1 << 24
};

typedef struct limit_whole {
    const char *name;
    int64_t least, most;
} limit_whole;

typedef struct limit_real {
    const char *name;
    double least, most;
} limit_real;

static inline int limit_same(const char *a, const char *b)
{
    while (*a != '\0' && (*a == *b || (*a == '-' && *b == '_'))) ++a, ++b;
    return *a == *b;
}

/* Whole numbers of flags, and those that only a checkpoint says. */
static inline const limit_whole *limit_whole_of(const char *name)
{
    static const limit_whole all[] = {{"layers", 1, LLAMA_LAYERS_MAX},
                                      {"model-dim", 1, LLAMA_DIM_MAX},
                                      {"heads", 1, LLAMA_DIM_MAX},
                                      {"kv-heads", 1, LLAMA_DIM_MAX},
                                      {"head-dim", 1, LLAMA_DIM_MAX},
                                      {"ff-dim", 1, LLAMA_DIM_MAX},
                                      {"vocab", 1, INT32_MAX},
                                      {"window", 0, INT32_MAX},
                                      {"tokens", 1, INT32_MAX},
                                      {"batch", 1, INT32_MAX},
                                      {"steps", 1, INT32_MAX},
                                      {"warmup", 0, INT32_MAX},
                                      {"seed", 0, INT64_MAX},
                                      {"save-every", 0, INT32_MAX},
                                      {"keep", 0, 1000000},
                                      {"sample", 0, 1 << 20},
                                      {"step", 0, INT32_MAX},
                                      {"text-bytes", 2, INT64_MAX},
                                      {"format-version", 1, INT32_MAX},
                                      {"zero", 0, 3}};
    size_t i = 0;
    while (i < sizeof all / sizeof *all && !limit_same(all[i].name, name)) ++i;
    assert(i < sizeof all / sizeof *all);
    return &all[i];
}

static inline const limit_real *limit_real_of(const char *name)
{
    static const limit_real all[] = {
        {"rope-theta", 1, 1e12},   {"norm-eps", 1e-12, 1},  {"lr", 0, 1000},       {"min-lr", 0, 1000},
        {"weight-decay", 0, 1000}, {"beta1", 0, 0.99999},   {"beta2", 0, 0.99999}, {"adam-eps", 1e-20, 1},
        {"clip", 0, 1e30},         {"temperature", 0, 1000}};
    size_t i = 0;
    while (i < sizeof all / sizeof *all && !limit_same(all[i].name, name)) ++i;
    assert(i < sizeof all / sizeof *all);
    return &all[i];
}

#endif
