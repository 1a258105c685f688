/* checkpoint_save.h -- a model and its optimizer to the disk; checkpoint.h says how */
#ifndef LLAMA_CHECKPOINT_SAVE_H
#define LLAMA_CHECKPOINT_SAVE_H

#include "../../../upipe/net/upipe_net_clock.h"
#include "../../../upipe/upipe_comm.h"
#include "../files/safetensors_write.h"
#include "checkpoint_run.h"

enum {
    LLAMA_RANKS_MAX = 1024, /* of a world that saves */
    LLAMA_SAVE_BEATS = 4    /* a rank that writes says so this often within the deadline, at least */
};

typedef struct llama_save_work {
    upipe_ctx *c;
    upipe_comm *world; /* NULL: one rank */
    const llama_state *state;
    const llama_run *run;
    const char *dir;
    void *host;                 /* [LLAMA_CHUNK] bytes */
    st_writer model, optimizer; /* of an adapter (adapter_save.h) the latter alone: what is trained */
    char tmp[LLAMA_PATH], whole[LLAMA_PATH], old[LLAMA_PATH];
    int64_t all[LLAMA_RANKS_MAX]; /* LLAMA_SAVE_BUSY, ... */
    int64_t met;                  /* when the ranks last met, ns */
} llama_save_work;

static inline int llama_add_tensor(st_writer *w, const char *prefix, const llama_tensor *t, st_dtype dtype,
                                   upipe_err *err)
{
    char name[112];
    int64_t shape[3];
    const int rank = llama_shape(t, shape);
    snprintf(name, sizeof name, "%s%s", prefix, t->name);
    return st_add(w, name, dtype, rank, shape, err) < 0 ? -1 : 0;
}

/* The run's numbers as text, reals with all their digits; what --resume would refuse is not saved. */
static inline int llama_save_run(llama_save_work *s)
{
    upipe_err *err = &s->c->err;
    const field *row;
    char text[32];
    snprintf(text, sizeof text, "%d", LLAMA_CHECKPOINT_VERSION);
    if (st_add_metadata(&s->optimizer, "dtype", upipe_dtype_name(llama_state_dtype(s->state)), err) ||
        st_add_metadata(&s->optimizer, "format_version", text, err))
        return -1;
    snprintf(text, sizeof text, "%" PRIu64, s->run->text_hash);
    if (st_add_metadata(&s->optimizer, "text_hash", text, err)) return -1;
    if (s->run->lora[0] != 0 && st_add_metadata(&s->optimizer, "lora", s->run->lora, err)) return -1;
    if (s->run->train[0] != 0 && st_add_metadata(&s->optimizer, "train", s->run->train, err)) return -1;
    for (row = llama_run_fields; row < llama_run_fields + LLAMA_RUN_FIELDS; ++row) {
        const flag_row *l = flag_limits(row->flag);
        const void *at = (const char *)s->run + row->at;
        if (row->kind == FLAG_REAL) {
            const double x = *(const double *)at;
            snprintf(text, sizeof text, "%.17g", x);
            if (!(x >= l->least && x <= l->most))
                return llama_config_fail(err, s->dir, "a run whose %s is %g cannot be saved", row->key, x);
        } else {
            const int64_t n = *(const int64_t *)at;
            snprintf(text, sizeof text, "%" PRId64, n);
            if (n < (int64_t)l->least || n > flag_most(l))
                return llama_config_fail(err, s->dir, "a run whose %s is %s cannot be saved", row->key, text);
        }
        if (st_add_metadata(&s->optimizer, row->key, text, err)) return -1;
    }
    return 0;
}

/* The tensors of both files: tensor i of the layout is model's number i, trained tensor i of n optimizer's i, n + i,
 * 2n + i. */
static inline int llama_save_lists(llama_save_work *s)
{
    static const char *const states[] = {"exp_avg.", "exp_avg_sq.", "master."};
    const llama_layout *l = s->state->layout;
    const int half = llama_state_dtype(s->state) == UPIPE_BF16;
    upipe_err *err = &s->c->err;
    int i, k;
    if (st_add_metadata(&s->model, "format", "pt", err) || llama_save_run(s)) return -1;
    for (i = 0; i < l->stored_n; ++i)
        if (llama_add_tensor(&s->model, "", &l->stored[i], half && !l->stored[i].is_vector ? ST_BF16 : ST_F32,
                             err))
            return -1;
    for (k = 0; k < 2 + half; ++k)
        for (i = 0; i < l->stored_n && !(k == 2 && l->stored[i].is_vector); ++i)
            if (!l->stored[i].frozen &&
                llama_add_tensor(&s->optimizer, states[k], &l->stored[i], ST_F32, err))
                return -1;
    return 0;
}

static inline int llama_save_prepare(llama_save_work *s)
{
    upipe_err *err = &s->c->err;
    if (llama_path(s->tmp, s->dir, ".", s->run->step, ".tmp", err) ||
        llama_path(s->old, s->dir, ".", s->run->step, ".old", err) ||
        llama_path(s->whole, s->dir, "", s->run->step, "", err) || llama_save_lists(s))
        return -1;
    s->host = malloc(LLAMA_CHUNK);
    return s->host == NULL ? llama_config_fail(err, s->dir, "no memory for a chunk") : 0;
}

/* Both files: st_write_begin makes them, st_write_open joins in. */
static inline int llama_save_open(llama_save_work *s,
                                  int (*one)(st_writer *w, const char *path, upipe_err *err))
{
    char path[LLAMA_PATH];
    upipe_err *err = &s->c->err;
    if (llama_path_in(path, s->tmp, "model.safetensors", err) || one(&s->model, path, err)) return -1;
    if (llama_path_in(path, s->tmp, "optimizer.safetensors", err)) return -1;
    return one(&s->optimizer, path, err);
}

/* Makes the folder, and all files in their whole sizes; rank 0 alone, as everything that deals with names. */
static inline int llama_save_begin(llama_save_work *s)
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
    return llama_save_open(s, st_write_begin);
}

enum { LLAMA_SAVE_BUSY, LLAMA_SAVE_DONE, LLAMA_SAVE_BAD };

/* What every rank is at, to s->all. */
static inline int llama_save_meet(llama_save_work *s, int64_t mine)
{
    s->met = upipe_net_now();
    return upipe_comm_all_gather(s->c, s->world, s->all, &mine, 1) == UPIPE_OK ? 0 : -1;
}

/* After each chunk: now and then the others hear that this rank still writes. What it wrote so far is brought to the
 * disk, so that no wait for that is much longer than a beat. */
static inline int llama_save_beat(llama_save_work *s)
{
    const upipe_comm *world = s->world;
    if (world == NULL || (double)(upipe_net_now() - s->met) < world->deadline / LLAMA_SAVE_BEATS * 1e9)
        return 0;
    if ((s->model.fd >= 0 && fsync(s->model.fd) != 0) || fsync(s->optimizer.fd) != 0)
        return llama_config_fail(&s->c->err, s->tmp, "cannot be brought to the disk: %s", strerror(errno));
    return llama_save_meet(s, LLAMA_SAVE_BUSY);
}

/* Writes this rank's slices of a group, from an array that holds its whole or this rank's shard of it. The file has its
 * tensors from number `entry` on; of the optimizer's the frozen ones are none. */
static inline int llama_save_slices(llama_save_work *s, st_writer *w, int entry, const upipe_zero *z,
                                    const void *data, size_t size, int sharded)
{
    const llama_layout *l = s->state->layout;
    int i;
    for (i = 0; i < l->stored_n; ++i) {
        const llama_tensor *t = &l->stored[i];
        const int number = entry;
        llama_range r;
        int64_t at, n, there;
        if (w == &s->optimizer && t->frozen) continue;
        ++entry;
        if (llama_zero(s->state, t) != z) continue;
        r = llama_range_of(t, upipe_zero_slice(z, t->is_vector ? 0 : t->unit), sharded);
        for (at = r.first; at < r.end; at += n) {
            n = LLAMA_CHUNK / (int64_t)size;
            if (n > r.end - at) n = r.end - at;
            there = llama_in_file(t, at - t->at, &n);
            if (s->c->ops->copy(s->c, s->host, (const char *)data + (size_t)(at + r.shift) * size,
                                (size_t)n * size) != UPIPE_OK)
                return -1;
            if (!llama_finite(s->host, n, size))
                return llama_config_fail(&s->c->err, s->whole, "%s is not finite, and is not saved",
                                         w->entries[number].name);
            if (st_pwrite(w, number, there, n, s->host, &s->c->err) || llama_save_beat(s)) return -1;
        }
    }
    return 0;
}

static inline int llama_save_weights(llama_save_work *s, const upipe_zero *z)
{
    return llama_save_slices(s, &s->model, 0, z, z->weights, upipe_dtype_bytes(z->dtype),
                             upipe_zero_sharded(z, UPIPE_ZERO_WEIGHTS));
}

static inline int llama_save_write(llama_save_work *s)
{
    const llama_state *state = s->state;
    const llama_layout *l = state->layout;
    int g, i, n = 0;
    for (i = 0; i < l->stored_n; ++i) n += !l->stored[i].frozen;
    for (g = 0; g < LLAMA_GROUPS; ++g) {
        const upipe_zero *z = &state->zero[g], *frozen = &state->frozen[g];
        const int sharded = upipe_zero_sharded(z, UPIPE_ZERO_STATES);
        if (llama_save_weights(s, frozen) || llama_save_weights(s, z) ||
            llama_save_slices(s, &s->optimizer, 0, z, state->m[g], 4, sharded) ||
            llama_save_slices(s, &s->optimizer, n, z, state->v[g], 4, sharded))
            return -1;
        if (z->dtype == UPIPE_BF16 &&
            llama_save_slices(s, &s->optimizer, 2 * n, z, state->master, 4, sharded))
            return -1;
    }
    return st_write_end(&s->model, &s->c->err) || st_write_end(&s->optimizer, &s->c->err) ? -1 : 0;
}

/* What --resume will read, it reads already. */
static inline int llama_save_read_back(llama_save_work *s)
{
    const llama_config *written = &s->state->layout->config;
    char path[LLAMA_PATH], is[FIELD_TEXT], was[FIELD_TEXT];
    upipe_err *err = &s->c->err;
    const field *differs;
    llama_config config;
    llama_run run;
    upipe_dtype dtype;
    if (llama_path_in(path, s->tmp, "config.json", err) ||
        llama_config_read(&config, &dtype, path, NULL, err))
        return -1;
    differs = fields_differ(llama_fields, LLAMA_FIELDS, &config, written);
    if (differs != NULL)
        return llama_config_fail(err, path, "is not what was written: %s is %s, not %s", differs->flag,
                                 field_text(is, differs, &config), field_text(was, differs, written));
    if (dtype != llama_state_dtype(s->state)) return llama_config_fail(err, path, "is not what was written");
    if (llama_path_in(path, s->tmp, "model.safetensors", err) || st_read_back(&s->model, path, err) ||
        llama_path_in(path, s->tmp, "optimizer.safetensors", err) || st_read_back(&s->optimizer, path, err))
        return -1;
    if (llama_load_run(s->tmp, &run, &dtype, err)) return -1;
    if (memcmp(&run, s->run, sizeof run) == 0 && dtype == llama_state_dtype(s->state)) return 0;
    return llama_config_fail(err, path, "has other numbers than were written");
}

/* Gives the finished folder its name; at every instant the old one or the new one has a name that counts. */
static inline int llama_save_commit(llama_save_work *s, int keep)
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
static inline int llama_save_agree(llama_save_work *s, int bad)
{
    upipe_comm *const world = s->world;
    const upipe_err own = s->c->err;
    int64_t mine[sizeof own.text / sizeof(int64_t)];
    int r = 0;
    if (world == NULL) return bad;
    while (r < world->ranks) {
        if (llama_save_meet(s, bad ? LLAMA_SAVE_BAD : LLAMA_SAVE_DONE)) {
            if (bad) s->c->err = own;
            return -1;
        }
        for (r = 0; r < world->ranks && s->all[r] != LLAMA_SAVE_BUSY; ++r) {
        }
    }
    for (r = 0; r < world->ranks && s->all[r] != LLAMA_SAVE_BAD;) ++r;
    if (r == world->ranks) return 0;
    memcpy(mine, own.text, sizeof mine);
    if (upipe_comm_all_gather(s->c, world, world->gathered, mine, (int)(sizeof mine / sizeof *mine)) ==
            UPIPE_OK &&
        !bad)
        upipe_fail(&s->c->err, UPIPE_ERR_ABORTED, "rank %d of %d could not write: %s", r, world->ranks,
                   (const char *)(world->gathered + (size_t)r * (sizeof mine / sizeof *mine)));
    if (bad) s->c->err = own;
    return -1;
}

/* NULL: no memory, which c->err says and the other ranks hear. */
static inline llama_save_work *llama_save_work_make(upipe_ctx *c, upipe_comm *world, const char *dir,
                                                    const llama_state *state)
{
    llama_save_work *s = (llama_save_work *)calloc(1, sizeof *s);
    if (s == NULL) {
        upipe_comm_abort(world, "a rank has no memory to save");
        upipe_fail(&c->err, UPIPE_ERR_MEMORY, "%s: no memory to save", dir);
        return NULL;
    }
    s->c = c;
    s->world = world;
    s->state = state;
    s->dir = dir;
    st_writer_init(&s->model);
    st_writer_init(&s->optimizer);
    s->met = upipe_net_now();
    return s;
}

/* llama_save -- writes DIR/checkpoint-N, N = run->step, on all ranks of the world together
 *
 *   world  NULL: one rank
 *   dir    made if it is not there; leftovers of a run that was stopped are removed
 *   keep   so many checkpoints up to N stay, the newest; 0 = all
 *
 * One of the same step is replaced. Returns OK on all ranks when everything is on the disk, or on none. Then
 * the sentence is in c->err, that of the rank that failed; the others return ABORTED. Checkpoints
 * that were there are whole, and the world is as good as before unless a rank did not come.
 *
 * A rank that writes for long tells the others: one that is gone is missed within the world's deadline. A chunk and a
 * beat's bytes must reach the disk within it.
 */
static inline upipe_status llama_save(upipe_ctx *c, upipe_comm *world, const char *dir,
                                      const llama_state *state, const llama_run *run, int keep)
{
    const int rank = state->zero[LLAMA_WEIGHTS].rank, ranks = state->zero[LLAMA_WEIGHTS].ranks;
    llama_save_work *s;
    upipe_err ignored;
    int bad;
    if (world != NULL ? world->rank != rank || world->ranks != ranks || ranks > LLAMA_RANKS_MAX : ranks != 1)
        return upipe_fail(&c->err, UPIPE_ERR_ARG,
                          "%s: the state is rank %d of %d, the world has %d, at most %d", dir, rank, ranks,
                          world != NULL ? world->ranks : 1, LLAMA_RANKS_MAX);
    s = llama_save_work_make(c, world, dir, state);
    if (s == NULL) return c->err.status;
    s->run = run;
    bad = llama_save_prepare(s);
    if (!bad && rank == 0) bad = llama_save_begin(s);
    bad = llama_save_agree(s, bad);
    if (!bad) {
        if (rank != 0) bad = llama_save_open(s, st_write_open);
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
#endif
