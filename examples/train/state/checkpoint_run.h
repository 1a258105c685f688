/* checkpoint_run.h -- the numbers of a run that a checkpoint has, what a tensor must be, and which elements a rank has */
#ifndef LLAMA_CHECKPOINT_RUN_H
#define LLAMA_CHECKPOINT_RUN_H

#include "../../../upipe/upipe_ops.h"
#include "../files/config_write.h"
#include "../files/safetensors.h"
#include "../model/lora_flag.h"
#include "checkpoint_folder.h"
#include "state.h"

enum {
    LLAMA_CHUNK = 1 << 20, /* bytes */
    LLAMA_CHECKPOINT_VERSION = 1
};

/* What a run must know to go on: where it is, on what data, and the schedule that it follows. */
typedef struct llama_run {
    int64_t step, tokens, batch,
        accumulate; /* steps done; of a sequence; sequences of a micro-batch; these of a step */
    int64_t text_bytes;
    int64_t steps, warmup, schedule, decay; /* of the whole training */
    int64_t seed;
    char train[LLAMA_TRAIN_MAX],
        lora[LLAMA_LORA_TEXT]; /* of these flags, zeros behind it; empty: not given */
    uint64_t text_hash;
    double lr, min_lr, weight_decay, beta1, beta2, adam_eps, clip;
} llama_run;
#define AT(member) offsetof(llama_run, member)

/* As the metadata has them. text_hash, 64 bits of any value, is no number that a flag could say, and train and lora are no numbers. */
static const field llama_run_fields[] = {
    {"step", "step", FLAG_WHOLE, AT(step), 0, 0, 0, 0},
    {"tokens", "tokens", FLAG_WHOLE, AT(tokens), 0, 0, 0, 0},
    {"batch", "batch", FLAG_WHOLE, AT(batch), 0, 0, 0, 0},
    {"accumulate", "accumulate", FLAG_WHOLE, AT(accumulate), 0, 0, 0, 0},
    {"text_bytes", "text-bytes", FLAG_WHOLE, AT(text_bytes), 0, 0, 0, 0},
    {"steps", "steps", FLAG_WHOLE, AT(steps), 0, 0, 0, 0},
    {"warmup", "warmup", FLAG_WHOLE, AT(warmup), 0, 0, 0, 0},
    {"schedule", "schedule", FLAG_WHOLE, AT(schedule), 0, 0, 0, 0},
    {"decay", "decay", FLAG_WHOLE, AT(decay), 0, 0, 0, 0},
    {"seed", "seed", FLAG_WHOLE, AT(seed), 0, 0, 0, 0},
    {"lr", "lr", FLAG_REAL, AT(lr), 0, 0, 0, 0},
    {"min_lr", "min-lr", FLAG_REAL, AT(min_lr), 0, 0, 0, 0},
    {"weight_decay", "weight-decay", FLAG_REAL, AT(weight_decay), 0, 0, 0, 0},
    {"beta1", "beta1", FLAG_REAL, AT(beta1), 0, 0, 0, 0},
    {"beta2", "beta2", FLAG_REAL, AT(beta2), 0, 0, 0, 0},
    {"adam_eps", "adam-eps", FLAG_REAL, AT(adam_eps), 0, 0, 0, 0},
    {"clip", "clip", FLAG_REAL, AT(clip), 0, 0, 0, 0},
};

#undef AT

enum { LLAMA_RUN_FIELDS = sizeof llama_run_fields / sizeof *llama_run_fields };

/* ---- the numbers of a run ---- */

/* A number of 64 bits, from the metadata. */
static int llama_load_u64(const st_file *f, const char *key, uint64_t *out, upipe_err *err)
{
    const char *text = st_metadata(f, key), *end;
    *out = 0;
    for (end = text; end != NULL && *end >= '0' && *end <= '9'; ++end)
        if (__builtin_mul_overflow(*out, 10u, out) ||
            __builtin_add_overflow(*out, (uint64_t)(*end - '0'), out))
            break;
    if (text != NULL && end != text && *end == 0) return 0;
    return st_fail(err, f->path, "%s is %.24s, not a number of 64 bits", key,
                   text != NULL ? text : "missing");
}

/* A number like 0.001 or 1e-08 that the flag of this name may say, from the metadata. */
static int llama_load_real(const st_file *f, const char *key, double *out, upipe_err *err)
{
    const char *text = st_metadata(f, key);
    const flag_row *l = flag_limits(key);
    if (text != NULL && number_real(text, out) == 0 && *out >= l->least && *out <= l->most) return 0;
    return st_fail(err, f->path, "%s is %.24s, not a number from %g to %g", key,
                   text != NULL ? text : "missing", l->least, l->most);
}

/* A whole number that the flag of this name may say, from the metadata. */
static int llama_load_whole(const st_file *f, const char *key, int64_t *out, upipe_err *err)
{
    const char *text = st_metadata(f, key), *end = NULL;
    const flag_row *l = flag_limits(key);
    *out = text != NULL ? llama_decimal(text, &end) : -1;
    if (*out >= 0 && *end == 0 && *out >= (int64_t)l->least && *out <= flag_most(l)) return 0;
    return st_fail(err, f->path, "%s is %.20s, not a whole number from %" PRId64 " to %" PRId64, key,
                   text != NULL ? text : "missing", (int64_t)l->least, flag_most(l));
}

/* What is trained, of which a run that trains all says nothing. */
static int llama_load_text(const st_file *f, const char *key, char *to, int bytes, upipe_err *err)
{
    const char *text = st_metadata(f, key);
    memset(to, 0, (size_t)bytes);
    if (text == NULL || snprintf(to, (size_t)bytes, "%s", text) < bytes) return 0;
    return st_fail(err, f->path, "%s has more than %d characters", key, bytes - 1);
}

/* The numbers of a run, from the metadata. */
static int llama_load_numbers(const st_file *f, llama_run *run, upipe_dtype *dtype, upipe_err *err)
{
    const char *text = st_metadata(f, "dtype");
    const field *row;
    int64_t version;
    if (text == NULL || (strcmp(text, "f32") != 0 && strcmp(text, "bf16") != 0))
        return st_fail(err, f->path, "the dtype is %.20s, not f32 or bf16", text != NULL ? text : "missing");
    *dtype = strcmp(text, "f32") == 0 ? UPIPE_F32 : UPIPE_BF16;
    if (llama_load_whole(f, "format_version", &version, err)) return -1;
    if (version != LLAMA_CHECKPOINT_VERSION)
        return st_fail(err, f->path, "format_version is %" PRId64 ", not %d", version,
                       LLAMA_CHECKPOINT_VERSION);
    if (llama_load_u64(f, "text_hash", &run->text_hash, err)) return -1;
    for (row = llama_run_fields; row < llama_run_fields + LLAMA_RUN_FIELDS; ++row) {
        void *at = (char *)run + row->at;
        if (row->kind == FLAG_REAL ? llama_load_real(f, row->key, (double *)at, err)
                                   : llama_load_whole(f, row->key, (int64_t *)at, err))
            return -1;
    }
    return llama_load_text(f, "train", run->train, LLAMA_TRAIN_MAX, err) ||
                   llama_load_text(f, "lora", run->lora, LLAMA_LORA_TEXT, err)
               ? -1
               : 0;
}

/* llama_load_run -- the numbers of a run and its storage type, from a checkpoint's folder; 0, or -1 with a
 * sentence */
static inline int llama_load_run(const char *path, llama_run *run, upipe_dtype *dtype, upipe_err *err)
{
    char file[LLAMA_PATH];
    st_file f;
    int bad;
    if (llama_path_in(file, path, "optimizer.safetensors", err) || st_open(&f, file, err)) return -1;
    bad = llama_load_numbers(&f, run, dtype, err);
    st_close(&f);
    return bad;
}

/* Of size 4: f32; of size 2: bf16. */
static inline int llama_finite(const void *data, int64_t n, size_t size)
{
    const uint32_t *wide = (const uint32_t *)data;
    const uint16_t *half = (const uint16_t *)data;
    int64_t i;
    for (i = 0; i < n; ++i)
        if (((size == 4 ? wide[i] >> 16 : half[i]) & 0x7f80u) == 0x7f80u) return 0;
    return 1;
}

/* ---- a tensor: whether it is the model's, and which of its elements a rank has ---- */

/* The shape that files have; returns its dimensions. */
static int llama_shape(const llama_tensor *t, int64_t shape[3])
{
    const int conv = t->kind == LLAMA_CONV; /* which PyTorch has with one channel each */
    shape[0] = t->rows;
    shape[1] = conv ? 1 : t->cols;
    shape[2] = t->cols;
    return conv ? 3 : t->is_vector ? 1 : 2;
}

static int llama_load_shape(const st_file *f, const st_tensor *t, const llama_tensor *expected,
                            upipe_err *err)
{
    int64_t shape[3];
    const int rank = llama_shape(expected, shape);
    if (t->rank == rank && memcmp(t->shape, shape, (size_t)rank * sizeof *shape) == 0) return 0;
    if (t->n == 0)
        return st_fail(
            err, f->path,
            "%.80s is empty, as where ZeRO-3 was saved without its shards (zero_to_fp32.py joins them)",
            t->name);
    if (rank == 3)
        return st_fail(err, f->path,
                       "%.80s has %d dimensions, the first %" PRId64 ", not 3, %" PRId64 " x 1 x %" PRId64,
                       t->name, t->rank, t->rank > 0 ? t->shape[0] : 0, shape[0], shape[2]);
    if (rank == 1)
        return st_fail(err, f->path, "%.80s has %d dimensions, the first %" PRId64 ", not 1 of %" PRId64,
                       t->name, t->rank, t->rank > 0 ? t->shape[0] : 0, expected->rows);
    return st_fail(err, f->path,
                   "%.80s has %d dimensions, %" PRId64 " x %" PRId64 ", not 2, %" PRId64 " x %" PRId64,
                   t->name, t->rank, t->rank > 0 ? t->shape[0] : 0, t->rank > 1 ? t->shape[1] : 0,
                   expected->rows, expected->cols);
}

/* Whether a file's tensor can be read as this one of the model. */
static int llama_load_fits(const st_file *f, const st_tensor *t, const llama_tensor *expected, upipe_err *err)
{
    if (t->dtype != ST_F64 && t->dtype != ST_F32 && t->dtype != ST_F16 && t->dtype != ST_BF16)
        return st_fail(err, f->path, "%.80s is %s, not F64, F32, F16 or BF16", t->name,
                       st_dtype_name(t->dtype));
    return llama_load_shape(f, t, expected, err);
}

/* Where files have element i of a tensor; at most *n from it on, which becomes fewer, follow each other there too. */
static int64_t llama_in_file(const llama_tensor *t, int64_t i, int64_t *n)
{
    const int64_t half = t->n / 2, at = i % half, left = t->turns > 0 ? t->turns - at % t->turns : 0;
    if (t->turns == 0) return i;
    if (*n > left) *n = left;
    return (2 * (at / t->turns) + i / half) * t->turns + at % t->turns;
}

/* Elements first .. end - 1 of a group, of one tensor; in the array in question element i is number i + shift. */
typedef struct llama_range {
    int64_t first, end, shift;
} llama_range;
/* Those of a tensor that are in a part. */
static llama_range llama_range_of(const llama_tensor *t, upipe_zero_part p, int sharded)
{
    llama_range r;
    r.first = t->at > p.first ? t->at : p.first;
    r.end = t->at + t->n < p.first + p.n ? t->at + t->n : p.first + p.n;
    r.shift = sharded ? p.at - p.first : 0;
    return r;
}

/* Those that an array of a rank's state has. */
static llama_range llama_held(const llama_state *state, upipe_zero_what what, const llama_tensor *t)
{
    const upipe_zero *z = llama_zero(state, t);
    return llama_range_of(t, upipe_zero_part_of(z, what, t->is_vector ? 0 : t->unit),
                          upipe_zero_sharded(z, what));
}

#endif
