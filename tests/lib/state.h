/* state.h -- a model's whole state, random, and what ranks hold of it
 *
 *     state_begin("test_name");
 *     truth_make(&t, UPIPE_F32, 0, 0, 11);
 *     llama_state s = share_state(&t, stage, rank, ranks);
 *
 * Contents are random bits of finite numbers that follow from the step and a count of saves.
 */
#ifndef TESTS_STATE_H
#define TESTS_STATE_H

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include "examples/train/state/checkpoint.h"
#include "upipe/cpu/upipe_cpu.h"

#include "test.h"

static char folder[1024], dir[1100]; /* of the test, and in it of checkpoints */
static upipe_ops ops;

static upipe_err no_err(void)
{
    upipe_err err;
    memset(&err, 0, sizeof err);
    return err;
}

/* Removes a tree, two levels deep. */
static void clear(const char *path)
{
    char sub[LLAMA_PATH];
    const struct dirent *one;
    DIR *d = opendir(path);
    while (d != NULL && (one = readdir(d)) != NULL) {
        if (strcmp(one->d_name, ".") == 0 || strcmp(one->d_name, "..") == 0) continue;
        snprintf(sub, sizeof sub, "%s/%s", path, one->d_name);
        if (unlink(sub) != 0) clear(sub);
    }
    if (d != NULL) closedir(d);
    rmdir(path);
}

static const char *in(const char *parent, const char *name)
{
    static char out[4][LLAMA_PATH + 128];
    static int next;
    char *o = out[next++ & 3];
    snprintf(o, sizeof out[0], "%s/%s", parent, name);
    return o;
}

/* ---- a model's whole state ---- */

typedef struct truth {
    llama_layout layout;
    upipe_dtype dtype;
    void *weights;
    float *vectors, *master, *m[2], *v[2]; /* whole groups */
    llama_run run;
} truth;

/* Random bits of finite numbers: of every 16 bits one of an exponent's is 0, whatever the type. */
static void fill(void *out, int64_t bytes, uint64_t seed)
{
    test_rng rng;
    int64_t i;
    uint64_t x = 0;
    rng.state = seed;
    for (i = 0; i < bytes; ++i) {
        if (i % 8 == 0) x = test_u64(&rng) & 0xbfffbfffbfffbfff;
        ((unsigned char *)out)[i] = (unsigned char)(x >> i % 8 * 8);
    }
}

static void *buf(int64_t bytes)
{
    void *p = malloc((size_t)bytes + 1);
    if (p == NULL) abort();
    return p;
}

/* Each number in the range of its flag, and another one than the next. */
static void run_fill(llama_run *run)
{
    size_t i;
    for (i = 0; i < LLAMA_RUN_FIELDS; ++i) {
        const field *f = &llama_run_fields[i];
        const int64_t most = flag_most(flag_limits(f->flag)), whole = 3 + (int64_t)i;
        void *at = (char *)run + f->at;
        if (f->kind == FLAG_REAL)
            *(double *)at = 1 / (double)whole;
        else
            field_set(f->kind, at, whole < most ? whole : most);
    }
}

static void truth_fill(truth *t, int64_t step, uint64_t save)
{
    int64_t w = t->layout.weights, g = t->layout.vectors;
    uint64_t seed = (uint64_t)step * 1000003u + save * 7919u;
    int k;
    fill(t->weights, w * (int64_t)upipe_dtype_bytes(t->dtype), seed);
    fill(t->vectors, g * 4, seed + 1);
    fill(t->master, w * 4, seed + 2);
    for (k = 0; k < 2; ++k) {
        fill(t->m[k], (k ? g : w) * 4, seed + 3 + (uint64_t)k);
        fill(t->v[k], (k ? g : w) * 4, seed + 5 + (uint64_t)k);
    }
    run_fill(&t->run);
    t->run.step = step;
    t->run.tokens = 64 + step;
    t->run.text_bytes = 123456789012345;
    t->run.seed = (int64_t)save;
    t->run.text_hash = ~save;
}

/* rich: 1 with all vectors that a layer may have, 2 with tensors that are stored as one, 3 with layers of two kinds, of which
 * one has a gate */
static void truth_make(truth *t, upipe_dtype dtype, int tied, int rich, int64_t vocab)
{
    llama_config c;
    int k;
    memset(&c, 0, sizeof c);
    c.layers = 2, c.dim = 6, c.hidden = 10, c.vocab = vocab;
    c.heads = 2, c.kv_heads = 1, c.head_dim = 4;
    c.tied = tied, c.qk_norm = rich % 2;
    c.attention_bias = rich == 1 ? LLAMA_BIAS_QKVO : LLAMA_BIAS_NONE;
    c.rope_theta = 123456.7, c.norm_eps = 1e-5;
    c.family = rich == 3   ? LLAMA_IS_QWEN3_5
               : rich == 2 ? LLAMA_IS_PHI3
               : rich      ? LLAMA_IS_QWEN3
                           : LLAMA_IS_LLAMA;
    if (rich == 3) {
        c.by_layer[0] = LLAMA_LINEAR;
        c.linear_heads = 4, c.linear_key_heads = 2, c.linear_key_dim = 3, c.linear_value_dim = 5,
        c.linear_taps = 4;
        c.rope_partial = 0.5;
    }
    memset(t, 0, sizeof *t);
    if (llama_layout_init(&t->layout, &c) != 0) abort();
    t->dtype = dtype;
    t->weights = buf(t->layout.weights * 4);
    t->vectors = (float *)buf(t->layout.vectors * 4);
    t->master = (float *)buf(t->layout.weights * 4);
    for (k = 0; k < 2; ++k) {
        t->m[k] = (float *)buf((k ? t->layout.vectors : t->layout.weights) * 4);
        t->v[k] = (float *)buf((k ? t->layout.vectors : t->layout.weights) * 4);
    }
    truth_fill(t, 1, 0);
}

static void truth_free(truth *t)
{
    int k;
    for (k = 0; k < 2; ++k) {
        free(t->m[k]);
        free(t->v[k]);
    }
    free(t->weights);
    free(t->vectors);
    free(t->master);
    llama_layout_free(&t->layout);
}

/* The state of a rank alone: the whole arrays. */
static llama_state truth_state(const truth *t)
{
    llama_state s;
    int k;
    llama_state_init(&s, &t->layout, t->dtype, 1, 0, 1);
    s.zero[LLAMA_WEIGHTS].weights = t->weights;
    s.zero[LLAMA_VECTORS].weights = t->vectors;
    s.master = t->dtype == UPIPE_BF16 ? t->master : NULL;
    for (k = 0; k < LLAMA_GROUPS; ++k) {
        s.m[k] = t->m[k];
        s.v[k] = t->v[k];
    }
    return s;
}

/* What a rank holds of an array, in memory of exact size. */
static void *share_of(const upipe_zero *z, upipe_zero_what what, const void *whole, size_t size)
{
    char *out = (char *)buf(upipe_zero_held(z, what) * (int64_t)size);
    int unit;
    for (unit = 0; unit < z->units; ++unit) {
        const upipe_zero_part p = upipe_zero_part_of(z, what, unit);
        memcpy(out + (size_t)p.at * size, (const char *)whole + (size_t)p.first * size, (size_t)p.n * size);
    }
    return out;
}

/* A rank's state, of its own. */
static llama_state share_state(const truth *t, int stage, int rank, int ranks)
{
    const llama_state all = truth_state(t);
    llama_state s;
    int k;
    llama_state_init(&s, &t->layout, t->dtype, stage, rank, ranks);
    for (k = 0; k < LLAMA_GROUPS; ++k) {
        upipe_zero *z = &s.zero[k];
        z->weights = share_of(z, UPIPE_ZERO_WEIGHTS, all.zero[k].weights, upipe_dtype_bytes(z->dtype));
        s.m[k] = (float *)share_of(z, UPIPE_ZERO_STATES, t->m[k], 4);
        s.v[k] = (float *)share_of(z, UPIPE_ZERO_STATES, t->v[k], 4);
        if (z->dtype == UPIPE_BF16) s.master = (float *)share_of(z, UPIPE_ZERO_STATES, t->master, 4);
    }
    return s;
}

static void share_free(llama_state *s)
{
    int k;
    for (k = 0; k < LLAMA_GROUPS; ++k) {
        free(s->zero[k].weights);
        free(s->m[k]);
        free(s->v[k]);
    }
    free(s->master);
}

/* ---- one rank, alone ---- */

static upipe_ctx alone(void)
{
    upipe_ctx c;
    memset(&c, 0, sizeof c);
    c.ops = &ops;
    return c;
}

/* Makes the folder, and a table of the CPU. */
static void state_begin(const char *name)
{
    const char *parent = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/%s.XXXXXX", parent != NULL && *parent ? parent : ".", name);
    if (mkdtemp(folder) == NULL) {
        perror(folder);
        exit(1);
    }
    snprintf(dir, sizeof dir, "%s/run", folder);
    upipe_cpu_ops(&ops);
}

#endif
