/* checkpoint.h -- a model and its optimizer on the disk, whole or not at all
 *
 *     DIR/checkpoint-120/config.json              llama_config_write's
 *                        model.safetensors        matrices of the storage type, vectors f32; Hugging
 *                                                 Face's names
 *                        optimizer.safetensors    f32: exp_avg.NAME, exp_avg_sq.NAME, and in a bf16 run
 *                                                 master.NAME of the weights; the run's numbers as metadata
 *
 *     llama_save(c, "DIR", &state, &run, 2);                         on all ranks; keeps the 2 newest
 *     llama_checkpoint_find("DIR", path, &err);                      the newest
 *     llama_load_weights(c, path, &state);                           also another's model, in several files
 *     llama_load_optimizer(c, path, &state, &run);                   for any number of ranks
 *
 * A checkpoint is written as DIR/.checkpoint-N.tmp and renamed when all its bytes are on the disk. One that
 * is replaced waits as DIR/.checkpoint-N.old until the new one has its name; if the program stops in between,
 * that is the checkpoint. What is removed becomes a .tmp first. So a name without .tmp is whole whenever the
 * program or the machine stops. One program at a time may write to a DIR: llama_lock_init.
 *
 * Before a checkpoint gets its name its numbers have been found finite, and its headers have been read again.
 *
 * Device memory is reached through ops->copy and a host chunk of LLAMA_CHUNK bytes: ordinary (pageable)
 * memory, which a copy that is enqueued has read or filled when it returns, in CUDA too.
 */
#ifndef LLAMA_CHECKPOINT_H
#define LLAMA_CHECKPOINT_H

#include "../../upipe/net/upipe_net_clock.h"
#include "../../upipe/upipe_comm.h"
#include "../../upipe/upipe_ops.h"
#include "checkpoint_folder.h"
#include "config.h"
#include "safetensors.h"

enum {
    LLAMA_CHUNK = 1 << 20,      /* bytes */
    LLAMA_INDEX_MAX = 64 << 20, /* bytes of a model.safetensors.index.json */
    LLAMA_PARTS_MAX = 4096,     /* files of a model */
    LLAMA_RANKS_MAX = 1024,     /* of a team that saves */
    LLAMA_SAVE_BEATS = 4,       /* a rank that writes says so this often within the deadline, at least */
    LLAMA_CHECKPOINT_VERSION = 1
};

/* What a run must know to go on: where it is, on what data, and the schedule that it follows. */
typedef struct llama_run {
    int64_t step, tokens, batch, text_bytes; /* steps done; tokens of a sequence; sequences of a step */
    int64_t steps, warmup;                   /* of the whole training */
    int64_t seed;
    uint64_t text_hash;
    double lr, min_lr, weight_decay, beta1, beta2, adam_eps, clip;
} llama_run;

enum { LLAMA_RUN_WHOLES = 7, LLAMA_RUN_REALS = 7 };

/* The numbers of a run under their names in the metadata, by kind; text_hash, 64 bits of any value, is neither. */
typedef struct llama_run_names {
    const char *whole_names[LLAMA_RUN_WHOLES], *real_names[LLAMA_RUN_REALS];
    int64_t *wholes[LLAMA_RUN_WHOLES];
    double *reals[LLAMA_RUN_REALS];
} llama_run_names;

static void llama_run_list(llama_run_names *n, llama_run *run)
{
    const llama_run_names all = {
        {"step", "tokens", "batch", "text_bytes", "steps", "warmup", "seed"},
        {"lr", "min_lr", "weight_decay", "beta1", "beta2", "adam_eps", "clip"},
        {&run->step, &run->tokens, &run->batch, &run->text_bytes, &run->steps, &run->warmup, &run->seed},
        {&run->lr, &run->min_lr, &run->weight_decay, &run->beta1, &run->beta2, &run->adam_eps, &run->clip}};
    *n = all;
}

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
    const limit_real *l = limit_real_of(key);
    char *end = NULL;
    *out = text != NULL && *text >= '0' && *text <= '9' ? strtod(text, &end) : -1;
    if (end != NULL && *end == 0 && *out >= l->least && *out <= l->most) return 0;
    return st_fail(err, f->path, "%s is %.24s, not a number from %g to %g", key,
                   text != NULL ? text : "missing", l->least, l->most);
}

/* A whole number that the flag of this name may say, from the metadata. */
static int llama_load_whole(const st_file *f, const char *key, int64_t *out, upipe_err *err)
{
    const char *text = st_metadata(f, key), *end = NULL;
    const limit_whole *l = limit_whole_of(key);
    *out = text != NULL ? llama_decimal(text, &end) : -1;
    if (*out >= 0 && *end == 0 && *out >= l->least && *out <= l->most) return 0;
    return st_fail(err, f->path, "%s is %.20s, not a whole number from %" PRId64 " to %" PRId64, key,
                   text != NULL ? text : "missing", l->least, l->most);
}

/* The numbers of a run, from the metadata. */
static int llama_load_numbers(const st_file *f, llama_run *run, upipe_dtype *dtype, upipe_err *err)
{
    const char *text = st_metadata(f, "dtype");
    llama_run_names names;
    int64_t version;
    int i;
    if (text == NULL || (strcmp(text, "f32") != 0 && strcmp(text, "bf16") != 0))
        return st_fail(err, f->path, "the dtype is %.20s, not f32 or bf16", text != NULL ? text : "missing");
    *dtype = strcmp(text, "f32") == 0 ? UPIPE_F32 : UPIPE_BF16;
    if (llama_load_whole(f, "format_version", &version, err)) return -1;
    if (version != LLAMA_CHECKPOINT_VERSION)
        return st_fail(err, f->path, "format_version is %" PRId64 ", not %d", version,
                       LLAMA_CHECKPOINT_VERSION);
    llama_run_list(&names, run);
    for (i = 0; i < LLAMA_RUN_WHOLES; ++i)
        if (llama_load_whole(f, names.whole_names[i], names.wholes[i], err)) return -1;
    if (llama_load_u64(f, "text_hash", &run->text_hash, err)) return -1;
    for (i = 0; i < LLAMA_RUN_REALS; ++i)
        if (llama_load_real(f, names.real_names[i], names.reals[i], err)) return -1;
    return 0;
}

/* llama_load_run -- the numbers of a run and its storage type, from a checkpoint's folder; 0, or -1 with a
 * sentence */
__attribute__((unused)) static int llama_load_run(const char *path, llama_run *run, upipe_dtype *dtype,
                                                  upipe_err *err)
{
    char file[LLAMA_PATH];
    st_file f;
    int bad;
    if (llama_path_in(file, path, "optimizer.safetensors", err) || st_open(&f, file, err)) return -1;
    bad = llama_load_numbers(&f, run, dtype, err);
    st_close(&f);
    return bad;
}

/* ---- which elements of a tensor a rank has ---- */

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
    const upipe_zero *z = &state->zero[t->is_vector];
    return llama_range_of(t, upipe_zero_part_of(z, what, t->is_vector ? 0 : t->unit),
                          upipe_zero_sharded(z, what));
}

/* ---- saving ---- */

typedef struct llama_save_work {
    upipe_ctx *c;
    const llama_state *state;
    const llama_run *run;
    const char *dir;
    void *host; /* [LLAMA_CHUNK] bytes */
    st_writer model, optimizer;
    char tmp[LLAMA_PATH], whole[LLAMA_PATH], old[LLAMA_PATH];
    int64_t all[LLAMA_RANKS_MAX]; /* LLAMA_SAVE_BUSY, ... */
    int64_t met;                  /* when the ranks last met, ns */
} llama_save_work;

static int llama_add_tensor(st_writer *w, const char *prefix, const llama_tensor *t, st_dtype dtype,
                            upipe_err *err)
{
    char name[96];
    int64_t shape[2];
    shape[0] = t->rows;
    shape[1] = t->cols;
    snprintf(name, sizeof name, "%s%s", prefix, t->name);
    return st_add(w, name, dtype, t->is_vector ? 1 : 2, shape, err) < 0 ? -1 : 0;
}

/* The run's numbers as text, reals with all their digits; what --resume would refuse is not saved. */
static int llama_save_run(llama_save_work *s)
{
    llama_run run = *s->run;
    upipe_err *err = &s->c->err;
    llama_run_names names;
    char text[32];
    int i;
    llama_run_list(&names, &run);
    snprintf(text, sizeof text, "%d", LLAMA_CHECKPOINT_VERSION);
    if (st_add_metadata(&s->optimizer, "dtype", upipe_dtype_name(llama_state_dtype(s->state)), err) ||
        st_add_metadata(&s->optimizer, "format_version", text, err))
        return -1;
    snprintf(text, sizeof text, "%" PRIu64, run.text_hash);
    if (st_add_metadata(&s->optimizer, "text_hash", text, err)) return -1;
    for (i = 0; i < LLAMA_RUN_WHOLES; ++i) {
        const limit_whole *l = limit_whole_of(names.whole_names[i]);
        if (*names.wholes[i] < l->least || *names.wholes[i] > l->most)
            return llama_config_fail(err, s->dir, "a run whose %s is %" PRId64 " cannot be saved",
                                     names.whole_names[i], *names.wholes[i]);
        snprintf(text, sizeof text, "%" PRId64, *names.wholes[i]);
        if (st_add_metadata(&s->optimizer, names.whole_names[i], text, err)) return -1;
    }
    for (i = 0; i < LLAMA_RUN_REALS; ++i) {
        const limit_real *l = limit_real_of(names.real_names[i]);
        if (!(*names.reals[i] >= l->least && *names.reals[i] <= l->most))
            return llama_config_fail(err, s->dir, "a run whose %s is %g cannot be saved", names.real_names[i],
                                     *names.reals[i]);
        snprintf(text, sizeof text, "%.17g", *names.reals[i]);
        if (st_add_metadata(&s->optimizer, names.real_names[i], text, err)) return -1;
    }
    return 0;
}

/* The tensors of both files: tensor i of the layout is model's number i, and optimizer's i, n + i, 2n + i. */
static int llama_save_lists(llama_save_work *s)
{
    const llama_layout *l = s->state->layout;
    upipe_err *err = &s->c->err;
    int i, half = llama_state_dtype(s->state) == UPIPE_BF16;
    if (st_add_metadata(&s->model, "format", "pt", err) || llama_save_run(s)) return -1;
    for (i = 0; i < l->n; ++i)
        if (llama_add_tensor(&s->model, "", &l->tensors[i],
                             half && !l->tensors[i].is_vector ? ST_BF16 : ST_F32, err))
            return -1;
    for (i = 0; i < l->n; ++i)
        if (llama_add_tensor(&s->optimizer, "exp_avg.", &l->tensors[i], ST_F32, err)) return -1;
    for (i = 0; i < l->n; ++i)
        if (llama_add_tensor(&s->optimizer, "exp_avg_sq.", &l->tensors[i], ST_F32, err)) return -1;
    for (i = 0; i < l->n && half && !l->tensors[i].is_vector; ++i)
        if (llama_add_tensor(&s->optimizer, "master.", &l->tensors[i], ST_F32, err)) return -1;
    return 0;
}

static int llama_save_prepare(llama_save_work *s)
{
    upipe_err *err = &s->c->err;
    if (llama_path(s->tmp, s->dir, ".", s->run->step, ".tmp", err) ||
        llama_path(s->old, s->dir, ".", s->run->step, ".old", err) ||
        llama_path(s->whole, s->dir, "", s->run->step, "", err) || llama_save_lists(s))
        return -1;
    s->host = malloc(LLAMA_CHUNK);
    return s->host == NULL ? llama_config_fail(err, s->dir, "no memory for a chunk") : 0;
}

/* Makes the folder, and all files in their whole sizes; rank 0 alone, as everything that deals with names. */
static int llama_save_begin(llama_save_work *s)
{
    char path[LLAMA_PATH];
    upipe_err *err = &s->c->err;
    if (mkdir(s->dir, 0777) != 0 && errno != EEXIST)
        return llama_config_fail(err, s->dir, "the folder cannot be made: %s", strerror(errno));
    if (llama_tidy(s->dir, err)) return -1;
    if (mkdir(s->tmp, 0777) != 0)
        return llama_config_fail(err, s->tmp, "the folder cannot be made: %s", strerror(errno));
    if (llama_path_in(path, s->tmp, "config.json", err) ||
        llama_config_write(&s->state->layout->config, llama_state_dtype(s->state), s->run->tokens, path, err))
        return -1;
    if (llama_path_in(path, s->tmp, "model.safetensors", err) || st_write_begin(&s->model, path, err))
        return -1;
    return llama_path_in(path, s->tmp, "optimizer.safetensors", err) ||
                   st_write_begin(&s->optimizer, path, err)
               ? -1
               : 0;
}

static int llama_save_join(llama_save_work *s)
{
    char path[LLAMA_PATH];
    upipe_err *err = &s->c->err;
    if (llama_path_in(path, s->tmp, "model.safetensors", err) || st_write_open(&s->model, path, err))
        return -1;
    return llama_path_in(path, s->tmp, "optimizer.safetensors", err) ||
                   st_write_open(&s->optimizer, path, err)
               ? -1
               : 0;
}

/* Of size 4: f32; of size 2: bf16. */
static int llama_finite(const void *data, int64_t n, size_t size)
{
    const uint32_t *wide = (const uint32_t *)data;
    const uint16_t *half = (const uint16_t *)data;
    int64_t i;
    for (i = 0; i < n; ++i)
        if (((size == 4 ? wide[i] >> 16 : half[i]) & 0x7f80u) == 0x7f80u) return 0;
    return 1;
}

enum { LLAMA_SAVE_BUSY, LLAMA_SAVE_DONE, LLAMA_SAVE_BAD };

/* What every rank is at, to s->all. */
static int llama_save_meet(llama_save_work *s, int64_t mine)
{
    s->met = upipe_net_now();
    return upipe_comm_all_gather(s->c, s->c->team, s->all, &mine, 1) == UPIPE_OK ? 0 : -1;
}

/* After each chunk: now and then the others hear that this rank still writes. What it wrote so far is brought to the
 * disk, so that no wait for that is much longer than a beat. */
static int llama_save_beat(llama_save_work *s)
{
    const upipe_comm *team = s->c->team;
    if (team == NULL || (double)(upipe_net_now() - s->met) < team->deadline / LLAMA_SAVE_BEATS * 1e9)
        return 0;
    if (fsync(s->model.fd) != 0 || fsync(s->optimizer.fd) != 0)
        return llama_config_fail(&s->c->err, s->tmp, "cannot be brought to the disk: %s", strerror(errno));
    return llama_save_meet(s, LLAMA_SAVE_BUSY);
}

/* Writes this rank's slices of a group, from an array that holds its whole or this rank's shard of it; tensor i of the
 * layout is the file's number from + i. */
static int llama_save_slices(llama_save_work *s, st_writer *w, int from, int group, const void *data,
                             size_t size, int sharded)
{
    const llama_layout *l = s->state->layout;
    const upipe_zero *z = &s->state->zero[group];
    int i;
    for (i = 0; i < l->n; ++i) {
        const llama_tensor *t = &l->tensors[i];
        llama_range r;
        int64_t at, n;
        if (t->is_vector != group) continue;
        r = llama_range_of(t, upipe_zero_slice(z, t->is_vector ? 0 : t->unit), sharded);
        for (at = r.first; at < r.end; at += n) {
            n = LLAMA_CHUNK / (int64_t)size;
            if (n > r.end - at) n = r.end - at;
            if (s->c->ops->copy(s->c, s->host, (const char *)data + (size_t)(at + r.shift) * size,
                                (size_t)n * size) != UPIPE_OK)
                return -1;
            if (!llama_finite(s->host, n, size))
                return llama_config_fail(&s->c->err, s->whole, "%s is not finite, and is not saved",
                                         w->entries[from + i].name);
            if (st_pwrite(w, from + i, at - t->at, n, s->host, &s->c->err) || llama_save_beat(s)) return -1;
        }
    }
    return 0;
}

static int llama_save_write(llama_save_work *s)
{
    const llama_state *state = s->state;
    const int n = state->layout->n;
    int g;
    for (g = 0; g < LLAMA_GROUPS; ++g) {
        const upipe_zero *z = &state->zero[g];
        const int sharded = upipe_zero_sharded(z, UPIPE_ZERO_STATES);
        if (llama_save_slices(s, &s->model, 0, g, z->weights, upipe_dtype_bytes(z->dtype),
                              upipe_zero_sharded(z, UPIPE_ZERO_WEIGHTS)) ||
            llama_save_slices(s, &s->optimizer, 0, g, state->m[g], 4, sharded) ||
            llama_save_slices(s, &s->optimizer, n, g, state->v[g], 4, sharded))
            return -1;
        if (z->dtype == UPIPE_BF16 &&
            llama_save_slices(s, &s->optimizer, 2 * n, g, state->master, 4, sharded))
            return -1;
    }
    return st_write_end(&s->model, &s->c->err) || st_write_end(&s->optimizer, &s->c->err) ? -1 : 0;
}

static int llama_same_config(const llama_config *a, const llama_config *b)
{
    return a->layers == b->layers && a->dim == b->dim && a->hidden == b->hidden && a->vocab == b->vocab &&
           a->heads == b->heads && a->kv_heads == b->kv_heads && a->head_dim == b->head_dim &&
           a->tied == b->tied && a->qk_norm == b->qk_norm && a->rope_theta == b->rope_theta &&
           a->norm_eps == b->norm_eps && a->window == b->window && a->attention_bias == b->attention_bias;
}

/* What --resume will read, it reads already. */
static int llama_save_read_back(llama_save_work *s)
{
    char path[LLAMA_PATH];
    upipe_err *err = &s->c->err;
    llama_config config;
    llama_run run;
    upipe_dtype dtype;
    if (llama_path_in(path, s->tmp, "config.json", err) || llama_config_read(&config, &dtype, path, err))
        return -1;
    if (!llama_same_config(&config, &s->state->layout->config) || dtype != llama_state_dtype(s->state))
        return llama_config_fail(err, path, "is not what was written");
    if (llama_path_in(path, s->tmp, "model.safetensors", err) || st_read_back(&s->model, path, err) ||
        llama_path_in(path, s->tmp, "optimizer.safetensors", err) || st_read_back(&s->optimizer, path, err))
        return -1;
    if (llama_load_run(s->tmp, &run, &dtype, err)) return -1;
    if (memcmp(&run, s->run, sizeof run) == 0 && dtype == llama_state_dtype(s->state)) return 0;
    return llama_config_fail(err, path, "has other numbers than were written");
}

/* Gives the finished folder its name; at every instant the old one or the new one has a name that counts. */
static int llama_save_commit(llama_save_work *s, int keep)
{
    upipe_err *err = &s->c->err;
    llama_entry *all;
    int count, i, newer = 0, bad = 0, had;
    if (llama_save_read_back(s) || llama_sync_folder(s->tmp, err)) return -1;
    had = rename(s->whole, s->old) == 0;
    if (!had && errno != ENOENT)
        return llama_config_fail(err, s->whole, "cannot be replaced: %s", strerror(errno));
    if (had && llama_sync_folder(s->dir, err)) bad = -1;
    if (!bad) bad = llama_rename(s->tmp, s->whole, err);
    if (bad) {
        if (had && rename(s->old, s->whole) != 0)
            llama_config_fail(err, s->old, "is the last whole checkpoint: %s", strerror(errno));
        return -1;
    }
    if (llama_sync_folder(s->dir, err)) return -1;
    if (had && llama_retire(s->dir, ".", s->run->step, ".old", err)) return -1;
    if (keep <= 0) return 0;
    if (llama_list(s->dir, &all, &count, err)) return -1;
    for (i = 0; i < count && !bad; ++i)
        if (all[i].kind == LLAMA_WHOLE && all[i].n <= s->run->step && ++newer > keep)
            bad = llama_retire(s->dir, "", all[i].n, "", err);
    free(all);
    return bad;
}

/* Tells all ranks whether one of them has failed; no rank continues before all have called it. Meanwhile those that
 * write are met at their beats. */
static int llama_save_agree(llama_save_work *s, int bad)
{
    upipe_comm *team = s->c->team;
    upipe_err own = s->c->err;
    int r = 0;
    if (team == NULL) return bad;
    while (r < team->ranks) {
        if (llama_save_meet(s, bad ? LLAMA_SAVE_BAD : LLAMA_SAVE_DONE)) {
            if (bad) s->c->err = own;
            return -1;
        }
        for (r = 0; r < team->ranks && s->all[r] != LLAMA_SAVE_BUSY; ++r) {
        }
    }
    for (r = 0; r < team->ranks && !bad; ++r) {
        if (s->all[r] != LLAMA_SAVE_BAD) continue;
        upipe_fail(&s->c->err, UPIPE_ERR_ABORTED, "%s: rank %d of %d could not write", s->whole, r,
                   team->ranks);
        bad = -1;
    }
    return bad;
}

/* llama_save -- writes DIR/checkpoint-N, N = run->step, on all ranks of c->team together (NULL: one rank)
 *
 *   dir    made if it is not there; leftovers of a run that was stopped are removed
 *   keep   so many checkpoints up to N stay, the newest; 0 = all
 *
 * One of the same step is replaced. Returns OK on all ranks when everything is on the disk, or on none. Then
 * the sentence is in c->err, with the reason on the rank that failed; the others return ABORTED. Checkpoints
 * that were there are whole, and the team is as good as before unless a rank did not come.
 *
 * A rank that writes for long tells the others: one that is gone is missed within the team's deadline. A chunk and a
 * beat's bytes must reach the disk within it.
 */
__attribute__((unused)) static upipe_status llama_save(upipe_ctx *c, const char *dir,
                                                       const llama_state *state, const llama_run *run,
                                                       int keep)
{
    const int rank = state->zero[LLAMA_WEIGHTS].rank, ranks = state->zero[LLAMA_WEIGHTS].ranks;
    llama_save_work *s;
    upipe_err ignored;
    int bad;
    if (c->team != NULL ? c->team->rank != rank || c->team->ranks != ranks || ranks > LLAMA_RANKS_MAX
                        : ranks != 1)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "%s: the state is rank %d of %d, the team has %d, at most %d", dir, rank, ranks,
                          c->team != NULL ? c->team->ranks : 1, LLAMA_RANKS_MAX);
    s = (llama_save_work *)calloc(1, sizeof *s);
    if (s == NULL) {
        upipe_comm_abort(c->team, "a rank has no memory to save");
        return upipe_fail(&c->err, UPIPE_ERR_MEMORY, "%s: no memory to save", dir);
    }
    s->c = c;
    s->state = state;
    s->run = run;
    s->dir = dir;
    st_writer_init(&s->model);
    st_writer_init(&s->optimizer);
    s->met = upipe_net_now();
    bad = llama_save_prepare(s);
    if (!bad && rank == 0) bad = llama_save_begin(s);
    bad = llama_save_agree(s, bad);
    if (!bad) {
        if (rank != 0) bad = llama_save_join(s);
        if (!bad) bad = llama_save_write(s);
        bad = llama_save_agree(s, bad);
    }
    if (!bad) {
        if (rank == 0) bad = llama_save_commit(s, keep);
        bad = llama_save_agree(s, bad);
    }
    st_writer_free(&s->model);
    st_writer_free(&s->optimizer);
    if (bad && rank == 0) llama_remove(s->tmp, &ignored);
    free(s->host);
    free(s);
    if (!bad) return UPIPE_OK;
    return c->err.status != UPIPE_OK ? c->err.status : UPIPE_ERR_BACKEND;
}

/* ---- loading ---- */

static int llama_load_shape(const st_file *f, const st_tensor *t, const llama_tensor *want, upipe_err *err)
{
    int rank = want->is_vector ? 1 : 2;
    if (t->rank == rank && t->shape[0] == want->rows && (rank == 1 || t->shape[1] == want->cols)) return 0;
    if (rank == 1)
        return st_fail(err, f->path, "%.80s has %d dimensions, the first %" PRId64 ", not 1 of %" PRId64,
                       t->name, t->rank, t->rank > 0 ? t->shape[0] : 0, want->rows);
    return st_fail(err, f->path,
                   "%.80s has %d dimensions, %" PRId64 " x %" PRId64 ", not 2, %" PRId64 " x %" PRId64,
                   t->name, t->rank, t->rank > 0 ? t->shape[0] : 0, t->rank > 1 ? t->shape[1] : 0, want->rows,
                   want->cols);
}

typedef struct llama_load_work {
    upipe_ctx *c;
    const llama_state *state;
    const llama_tensor **by_name;       /* [layout's n] */
    char *seen;                         /* [layout's n] */
    float *host;                        /* [LLAMA_CHUNK / 4], followed by as many u16 */
    const char *path;                   /* the folder */
    const json_t *map;                  /* of model.safetensors.index.json; NULL = one file */
    size_t mapped;                      /* tensors met that are in the map */
    const char *parts[LLAMA_PARTS_MAX]; /* files that the map names */
} llama_load_work;

static int llama_by_name(const void *a, const void *b)
{
    return strcmp((*(const llama_tensor *const *)a)->name, (*(const llama_tensor *const *)b)->name);
}

static int llama_find_name(const void *key, const void *one)
{
    return strcmp((const char *)key, (*(const llama_tensor *const *)one)->name);
}

/* To the nearest, ties to even; what is a bf16 already keeps its bits. */
static uint16_t llama_to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0xffffu) == 0) return (uint16_t)(bits >> 16);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* Values of a tensor, from element `at` of its group on, go to where an array has them. */
static int llama_load_store(llama_load_work *w, void *array, llama_range r, int64_t at, int64_t n,
                            const void *values, size_t size)
{
    upipe_ctx *c = w->c;
    const int64_t from = at > r.first ? at : r.first, to = at + n < r.end ? at + n : r.end;
    if (array == NULL || from >= to) return 0;
    return c->ops->copy(c, (char *)array + (size_t)(from + r.shift) * size,
                        (const char *)values + (size_t)(from - at) * size,
                        (size_t)(to - from) * size) != UPIPE_OK
               ? -1
               : 0;
}

/* The same of n values read, into weights and master: a model that is not trained has no use for the latter. */
static int llama_load_values(llama_load_work *w, const llama_tensor *t, int64_t at, int64_t n)
{
    const llama_state *state = w->state;
    const upipe_zero *z = &state->zero[t->is_vector];
    const llama_range held = llama_held(state, UPIPE_ZERO_WEIGHTS, t);
    uint16_t *narrow = (uint16_t *)(void *)(w->host + LLAMA_CHUNK / 4);
    int64_t i;
    if (z->dtype == UPIPE_F32) return llama_load_store(w, z->weights, held, at, n, w->host, 4);
    for (i = 0; i < n; ++i) narrow[i] = llama_to_bf16(w->host[i]);
    if (llama_load_store(w, z->weights, held, at, n, narrow, 2)) return -1;
    return llama_load_store(w, state->master, llama_held(state, UPIPE_ZERO_STATES, t), at, n, w->host, 4);
}

/* What this rank needs of a tensor: the weights that it holds, among which are those whose states it has. */
static int llama_load_read(llama_load_work *w, const st_file *f, const st_tensor *from, const llama_tensor *t)
{
    const llama_range need = llama_held(w->state, UPIPE_ZERO_WEIGHTS, t);
    int64_t at, n;
    for (at = need.first; at < need.end; at += n) {
        n = need.end - at < LLAMA_CHUNK / 4 ? need.end - at : LLAMA_CHUNK / 4;
        if (st_read_f32(f, from, at - t->at, n, w->host, &w->c->err) || llama_load_values(w, t, at, n))
            return -1;
    }
    return 0;
}

/* What a file may hold beside the model's tensors: nothing in it changes the model. */
static int llama_load_spare(const char *name)
{
    static const char buffer[] = "rotary_emb.inv_freq";
    size_t length = strlen(name), tail = sizeof buffer - 1;
    if (strcmp(name, "lm_head.weight") == 0) return 1; /* of a tied model: another has it in its layout */
    return length >= tail && strcmp(name + length - tail, buffer) == 0;
}

/* One tensor of a file: checked, and in the second pass read (and checked again: the file may
 * have changed). */
static int llama_load_tensor(llama_load_work *w, const st_file *f, const char *part, const st_tensor *t,
                             int reading)
{
    const llama_layout *l = w->state->layout;
    const llama_tensor *const *found = (const llama_tensor *const *)bsearch(
        t->name, w->by_name, (size_t)l->n, sizeof *w->by_name, llama_find_name);
    upipe_err *err = &w->c->err;
    const char *mapped;
    if (w->map != NULL) {
        mapped = json_string_value(json_object_get(w->map, t->name));
        if (mapped == NULL || strcmp(mapped, part) != 0)
            return st_fail(err, f->path, "%.80s is not here by model.safetensors.index.json", t->name);
        ++w->mapped;
    }
    if (found == NULL)
        return llama_load_spare(t->name) ? 0
                                         : st_fail(err, f->path, "%.80s is no tensor of this model", t->name);
    if (t->dtype != ST_F64 && t->dtype != ST_F32 && t->dtype != ST_F16 && t->dtype != ST_BF16)
        return st_fail(err, f->path, "%.80s is %s, not F64, F32, F16 or BF16", t->name,
                       st_dtype_name(t->dtype));
    if (llama_load_shape(f, t, *found, err)) return -1;
    w->seen[*found - l->tensors] = 1;
    return reading ? llama_load_read(w, f, t, *found) : 0;
}

static int llama_load_part(llama_load_work *w, const char *part, int reading)
{
    char path[LLAMA_PATH];
    st_file f;
    int i, bad = 0;
    if (llama_path_in(path, w->path, part, &w->c->err) || st_open(&f, path, &w->c->err)) return -1;
    for (i = 0; i < f.n && !bad; ++i) bad = llama_load_tensor(w, &f, part, &f.tensors[i], reading);
    st_close(&f);
    return bad;
}

/* A file of the folder itself: a map is not to lead elsewhere. */
static int llama_load_part_name(const char *part)
{
    return part != NULL && part[0] != 0 && part[0] != '.' && strchr(part, '/') == NULL;
}

static int llama_load_parts(llama_load_work *w, int reading)
{
    upipe_err *err = &w->c->err;
    json_t *value;
    const char *name;
    int i, n = 0;
    if (w->map == NULL) return llama_load_part(w, "model.safetensors", reading);
    json_object_foreach((json_t *)(uintptr_t)w->map, name, value)
    {
        const char *part = json_string_value(value);
        if (!llama_load_part_name(part))
            return llama_config_fail(err, w->path, "the index names no file of the folder for %.80s", name);
        for (i = 0; i < n && strcmp(w->parts[i], part) != 0;) ++i;
        if (i < n) continue; /* read already */
        if (n == LLAMA_PARTS_MAX)
            return llama_config_fail(err, w->path, "the index names more than %d files", LLAMA_PARTS_MAX);
        w->parts[n++] = part;
        if (llama_load_part(w, part, reading)) return -1;
    }
    if (!reading && w->mapped != json_object_size(w->map))
        return llama_config_fail(err, w->path, "the index has %zu tensors, the files have %zu",
                                 json_object_size(w->map), w->mapped);
    return 0;
}

static int llama_load_all(llama_load_work *w)
{
    const llama_layout *l = w->state->layout;
    int i;
    for (i = 0; i < l->n; ++i) w->by_name[i] = &l->tensors[i];
    qsort(w->by_name, (size_t)l->n, sizeof *w->by_name, llama_by_name);
    if (llama_load_parts(w, 0)) return -1;
    for (i = 0; i < l->n; ++i)
        if (!w->seen[i]) return llama_config_fail(&w->c->err, w->path, "%s is missing", l->tensors[i].name);
    return llama_load_parts(w, 1);
}

/* The map of a model in several files, which belongs to *root: that is to be given back. NULL with a sentence. */
static json_t *llama_index(const char *path, json_t **root, upipe_err *err)
{
    char why[JSON_LOAD_WHY];
    size_t bytes;
    char *text = llama_file(path, LLAMA_INDEX_MAX, &bytes, err);
    json_t *map;
    *root = NULL;
    if (text == NULL) return NULL;
    *root = json_load(text, bytes, why);
    free(text);
    map = json_object_get(*root, "weight_map");
    if (json_is_object(map)) return map;
    llama_config_fail(err, path, "%s", *root == NULL ? why : "has no object weight_map");
    return NULL;
}

/* Fills w->map where the model is in several files; *root is to be given back. */
static int llama_load_index(llama_load_work *w, json_t **root)
{
    char path[LLAMA_PATH];
    upipe_err *err = &w->c->err;
    *root = NULL;
    if (llama_path_in(path, w->path, "model.safetensors", err)) return -1;
    if (access(path, F_OK) == 0) return 0;
    if (llama_path_in(path, w->path, "model.safetensors.index.json", err)) return -1;
    if (access(path, F_OK) != 0)
        return llama_config_fail(err, w->path,
                                 "has neither model.safetensors nor model.safetensors.index.json");
    w->map = llama_index(path, root, err);
    return w->map == NULL ? -1 : 0;
}

static int llama_same_file(const char *folder, const char *name, const char *path, upipe_err *err)
{
    char own[LLAMA_PATH];
    struct stat a, b;
    if (llama_path_in(own, folder, name, err)) return -1;
    return stat(own, &a) == 0 && stat(path, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* llama_reads -- whether path is one of the files of the model in a folder: 1 or 0, or -1 with a sentence */
__attribute__((unused)) static int llama_reads(const char *folder, const char *path, upipe_err *err)
{
    static const char *const names[] = {"config.json", "model.safetensors", "model.safetensors.index.json",
                                        "optimizer.safetensors"};
    char own[LLAMA_PATH];
    const char *name;
    json_t *map, *root, *value;
    size_t i;
    int same = 0;
    for (i = 0; i < sizeof names / sizeof *names && !same; ++i)
        same = llama_same_file(folder, names[i], path, err);
    if (same || llama_path_in(own, folder, "model.safetensors.index.json", err) || access(own, F_OK) != 0)
        return same;
    map = llama_index(own, &root, err);
    json_object_foreach(map, name, value)
    {
        if (!same && json_is_string(value))
            same = llama_same_file(folder, json_string_value(value), path, err);
    }
    json_decref(root);
    return map == NULL ? -1 : same;
}

/* llama_load_weights -- fills weights of both groups and, unless it is NULL, master from the safetensors in a
 * folder
 *
 * Values are converted to the storage type; a rank reads those alone that it holds. Every tensor of the layout must be there in its shape, and no
 * other but the head of a tied model and stored rotary frequencies. No call of other ranks is waited for.
 * After a failure the arrays hold anything; the sentence is in c->err.
 */
__attribute__((unused)) static upipe_status llama_load_weights(upipe_ctx *c, const char *path,
                                                               const llama_state *state)
{
    llama_load_work w;
    size_t n = (size_t)state->layout->n;
    json_t *root = NULL;
    int bad;
    memset(&w, 0, sizeof w);
    w.c = c;
    w.state = state;
    w.path = path;
    w.by_name = (const llama_tensor **)calloc(n, sizeof *w.by_name);
    w.seen = (char *)calloc(n, 1);
    w.host = (float *)malloc(LLAMA_CHUNK + LLAMA_CHUNK / 2);
    if (w.by_name == NULL || w.seen == NULL || w.host == NULL)
        bad = llama_config_fail(&c->err, path, "no memory for a chunk");
    else
        bad = llama_load_index(&w, &root);
    if (!bad) bad = llama_load_all(&w);
    json_decref(root);
    free((void *)(uintptr_t)w.by_name);
    free(w.seen);
    free(w.host);
    if (!bad) return UPIPE_OK;
    return c->err.status != UPIPE_OK ? c->err.status : UPIPE_ERR_BACKEND;
}

static const st_tensor *llama_load_entry(const st_file *f, const char *prefix, const llama_tensor *t,
                                         upipe_err *err)
{
    char name[96];
    const st_tensor *entry;
    snprintf(name, sizeof name, "%s%s", prefix, t->name);
    entry = st_find(f, name);
    if (entry == NULL) {
        st_fail(err, f->path, "%s is missing", name);
        return NULL;
    }
    if (entry->dtype != ST_F32) {
        st_fail(err, f->path, "%s is %s, not F32", name, st_dtype_name(entry->dtype));
        return NULL;
    }
    return llama_load_shape(f, entry, t, err) ? NULL : entry;
}

/* This rank's states of a group, from the tensors PREFIX.NAME. */
static int llama_load_states(upipe_ctx *c, const st_file *f, const llama_state *state, const char *prefix,
                             int group, float *data, void *host)
{
    const llama_layout *l = state->layout;
    int64_t at, n;
    int i;
    for (i = 0; i < l->n; ++i) {
        const llama_tensor *t = &l->tensors[i];
        const st_tensor *entry;
        llama_range r;
        if (t->is_vector != group) continue;
        entry = llama_load_entry(f, prefix, t, &c->err); /* parts of others' slices are checked too */
        if (entry == NULL) return -1;
        r = llama_held(state, UPIPE_ZERO_STATES, t);
        for (at = r.first; at < r.end; at += n) {
            n = r.end - at < LLAMA_CHUNK / 4 ? r.end - at : LLAMA_CHUNK / 4;
            if (st_read_raw(f, entry, at - t->at, n, host, &c->err) ||
                c->ops->copy(c, data + (at + r.shift), host, (size_t)n * 4) != UPIPE_OK)
                return -1;
        }
    }
    return 0;
}

static int llama_load_all_states(upipe_ctx *c, const st_file *f, const llama_state *state, void *host)
{
    const llama_layout *l = state->layout;
    int64_t want = 2 * (int64_t)l->n;
    int i, g;
    if (llama_state_dtype(state) == UPIPE_BF16)
        for (i = 0; i < l->n; ++i) want += !l->tensors[i].is_vector;
    for (g = 0; g < 2; ++g)
        if (llama_load_states(c, f, state, "exp_avg.", g, state->m[g], host) ||
            llama_load_states(c, f, state, "exp_avg_sq.", g, state->v[g], host))
            return -1;
    if (llama_state_dtype(state) == UPIPE_BF16 &&
        llama_load_states(c, f, state, "master.", 0, state->master, host))
        return -1;
    if (f->n != want)
        return st_fail(&c->err, f->path, "has %d tensors, not the %" PRId64 " of this model's optimizer",
                       f->n, want);
    return 0;
}

/* llama_load_optimizer -- fills what this rank has of m, v and, in a bf16 run, master; and *run
 *
 * To be called after llama_load_weights, which fills master with less exact values. The bits are those that
 * were saved, by however many ranks, in whatever stage of ZeRO. A run of another storage type is refused. Failures as there.
 */
__attribute__((unused)) static upipe_status llama_load_optimizer(upipe_ctx *c, const char *path,
                                                                 const llama_state *state, llama_run *run)
{
    char file[LLAMA_PATH];
    upipe_dtype dtype;
    st_file f;
    void *host = malloc(LLAMA_CHUNK);
    int bad = host == NULL
                  ? llama_config_fail(&c->err, path, "no memory for a chunk")
                  : llama_path_in(file, path, "optimizer.safetensors", &c->err) || st_open(&f, file, &c->err);
    if (!bad) {
        bad = llama_load_numbers(&f, run, &dtype, &c->err);
        if (!bad && dtype != llama_state_dtype(state))
            bad = st_fail(&c->err, f.path, "is of a run in %s; a run in %s cannot go on from it",
                          upipe_dtype_name(dtype), upipe_dtype_name(llama_state_dtype(state)));
        if (!bad) bad = llama_load_all_states(c, &f, state, host);
        st_close(&f);
    }
    free(host);
    if (!bad) return UPIPE_OK;
    return c->err.status != UPIPE_OK ? c->err.status : UPIPE_ERR_BACKEND;
}

#endif
