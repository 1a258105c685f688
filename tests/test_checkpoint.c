/* test_checkpoint.c -- saving and loading: the same bits on any number of ranks, and nothing half written
 *
 * Contents are random bits of finite numbers that follow from the step and a count of saves, so that a loaded checkpoint shows
 * whether all its parts are of one save. Stops: a process that saves is killed at random instants
 * (20 + UPIPE_DRAWS / 200 times; each takes tens of milliseconds), and one is stopped before each of its
 * calls to the filesystem in turn. Failures: each of these calls fails in turn. test_loading has what is refused.
 */
#define _POSIX_C_SOURCE 200809L
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- the checkpoint's own calls to the filesystem: number `fault_at` fails, or ends the process ---- */

static long fault_calls, fault_at;
static int fault_kills;

static int fault(void)
{
    if (__atomic_add_fetch(&fault_calls, 1, __ATOMIC_RELAXED) != fault_at) return 0;
    if (fault_kills) _exit(77);
    errno = EIO;
    return 1;
}

static __thread ino_t on_disk[2]; /* the last folders whose names this rank has brought to the disk */
static long early;                /* folders that got their name before */

static int fault_rename(const char *from, const char *to)
{
    const size_t n = strlen(from);
    struct stat s;
    if (n > 4 && strcmp(from + n - 4, ".tmp") == 0 && stat(from, &s) == 0 && s.st_ino != on_disk[0] &&
        s.st_ino != on_disk[1])
        __atomic_add_fetch(&early, 1, __ATOMIC_RELAXED);
    return fault() ? -1 : rename(from, to);
}

static int fault_unlink(const char *path)
{
    return fault() ? -1 : unlink(path);
}

static int fault_rmdir(const char *path)
{
    return fault() ? -1 : rmdir(path);
}

static int fault_mkdir(const char *path, mode_t mode)
{
    return fault() ? -1 : mkdir(path, mode);
}

static long fault_spoils; /* the fsync of this number finds that the disk has changed the file's first byte */

static int fault_fsync(int fd)
{
    struct stat s;
    if (fstat(fd, &s) == 0 && S_ISDIR(s.st_mode)) {
        on_disk[0] = on_disk[1];
        on_disk[1] = s.st_ino;
    }
    if (fault_spoils > 0 && --fault_spoils == 0 && pwrite(fd, "!", 1, 0) != 1) abort();
    return fault() ? -1 : fsync(fd);
}

static int fault_fallocate(int fd, off_t at, off_t n)
{
    return fault() ? EIO : posix_fallocate(fd, at, n);
}

static ssize_t fault_pwrite(int fd, const void *data, size_t n, off_t at)
{
    return fault() ? -1 : pwrite(fd, data, n, at);
}

static __thread int64_t bytes_read; /* by this rank */

static ssize_t counted_pread(int fd, void *out, size_t n, off_t at)
{
    const ssize_t got = pread(fd, out, n, at);
    if (got > 0) bytes_read += got;
    return got;
}

static DIR *fault_opendir(const char *path)
{
    return fault() ? NULL : opendir(path);
}

#define rename          fault_rename
#define unlink          fault_unlink
#define rmdir           fault_rmdir
#define mkdir           fault_mkdir
#define fsync           fault_fsync
#define posix_fallocate fault_fallocate
#define pwrite          fault_pwrite
#define pread           counted_pread
#define opendir         fault_opendir
#include "../examples/train/state/checkpoint.h"
#undef rename
#undef unlink
#undef rmdir
#undef mkdir
#undef fsync
#undef posix_fallocate
#undef pwrite
#undef pread
#undef opendir

#include "../upipe/net/upipe_net_threads.h"
#include "lib/state.h"

/* ---- one rank, alone ---- */

static upipe_status save_alone(const truth *t, int keep, upipe_err *err)
{
    upipe_ctx c = alone();
    llama_state s = truth_state(t);
    upipe_status status = llama_save(&c, NULL, dir, &s, &t->run, keep);
    *err = c.err;
    return status;
}

/* Bytes of a checkpoint's file in front of its data. */
static int64_t header_bytes(const char *path, const char *name, int64_t data)
{
    char file[LLAMA_PATH];
    struct stat s;
    upipe_err err = no_err();
    memset(&s, 0, sizeof s);
    CHECK(llama_path_in(file, path, name, &err) == 0 && stat(file, &s) == 0);
    return (int64_t)s.st_size - data;
}

/* What loading reads at a rank that holds so many elements of weights and of states, by group: those alone, the model's
 * header twice, the optimizer's once. */
static int64_t need_bytes(const truth *t, const char *path, const int64_t *weights, const int64_t *states)
{
    const int64_t w = t->layout.weights, v = t->layout.vectors, size = (int64_t)upipe_dtype_bytes(t->dtype);
    const int64_t masters = t->dtype == UPIPE_BF16;
    return 2 * header_bytes(path, "model.safetensors", w * size + v * 4) +
           header_bytes(path, "optimizer.safetensors", (2 + masters) * w * 4 + 2 * v * 4) +
           weights[0] * size + weights[1] * 4 + (2 + masters) * states[0] * 4 + 2 * states[1] * 4;
}

/* Loads a rank's state into fresh memory of exact sizes and compares all of it. */
static void check_load(const truth *t, const char *path, upipe_comm *team, int stage, int rank, int ranks)
{
    upipe_ctx c = alone();
    int64_t weights_n[LLAMA_GROUPS], states_n[LLAMA_GROUPS];
    llama_state want = share_state(t, stage, rank, ranks), got = share_state(t, stage, rank, ranks);
    llama_run run;
    upipe_status status;
    int k;
    c.team = team;
    bytes_read = 0;
    for (k = 0; k < LLAMA_GROUPS; ++k) {
        const upipe_zero *z = &got.zero[k];
        const size_t states = (size_t)upipe_zero_held(z, UPIPE_ZERO_STATES) * 4;
        memset(z->weights, 0xff,
               (size_t)upipe_zero_held(z, UPIPE_ZERO_WEIGHTS) * upipe_dtype_bytes(z->dtype));
        weights_n[k] = upipe_zero_held(z, UPIPE_ZERO_WEIGHTS);
        states_n[k] = upipe_zero_held(z, UPIPE_ZERO_STATES);
        memset(got.m[k], 0xff, states);
        memset(got.v[k], 0xff, states);
        if (z->dtype == UPIPE_BF16) memset(got.master, 0xff, states);
    }
    memset(&run, 0, sizeof run);
    status = llama_load_weights(&c, path, &got, NULL);
    CHECK_STATUS(status, UPIPE_OK, c.err);
    if (status == UPIPE_OK) {
        status = llama_load_optimizer(&c, path, &got, &run);
        CHECK_STATUS(status, UPIPE_OK, c.err);
    }
    for (k = 0; k < LLAMA_GROUPS && status == UPIPE_OK; ++k) {
        const upipe_zero *z = &got.zero[k];
        const int64_t states = upipe_zero_held(z, UPIPE_ZERO_STATES) * 4;
        CHECK_BYTES(z->weights, want.zero[k].weights,
                    upipe_zero_held(z, UPIPE_ZERO_WEIGHTS) * (int64_t)upipe_dtype_bytes(z->dtype));
        CHECK_BYTES(got.m[k], want.m[k], states);
        CHECK_BYTES(got.v[k], want.v[k], states);
        if (z->dtype == UPIPE_BF16) CHECK_BYTES(got.master, want.master, states);
    }
    if (status == UPIPE_OK) CHECK_BYTES(&run, &t->run, sizeof run);
    if (status == UPIPE_OK) CHECK_INT(bytes_read, need_bytes(t, path, weights_n, states_n));
    share_free(&got);
    share_free(&want);
}

/* The newest checkpoint of `dir` is whole, and of a save with a number from `least` to `most`, which is
 * returned. */
static int64_t check_newest(truth *t, int64_t least, int64_t most)
{
    char path[LLAMA_PATH];
    upipe_err err = no_err();
    upipe_dtype dtype;
    llama_run run;
    if (!CHECK_SAY(llama_checkpoint_find(dir, path, &err) == 0, "%s", err.text)) return -1;
    if (!CHECK_SAY(llama_load_run(path, &run, &dtype, &err) == 0, "%s", err.text)) return -1;
    CHECK_INT(dtype, t->dtype);
    CHECK_SAY(run.seed >= least && run.seed <= most, "save %lld, not %lld to %lld", (long long)run.seed,
              (long long)least, (long long)most);
    truth_fill(t, run.step, (uint64_t)run.seed);
    check_load(t, path, NULL, 1, 0, 1);
    CHECK_BYTES(&run, &t->run, sizeof run);
    return run.seed;
}

/* What lies in `dir`, sorted by number, as one line. */
static const char *listing(void)
{
    static char out[512];
    struct dirent **all;
    int n = scandir(dir, &all, NULL, alphasort), i;
    out[0] = 0;
    for (i = 0; i < n; ++i) {
        if (strcmp(all[i]->d_name, ".") != 0 && strcmp(all[i]->d_name, "..") != 0 &&
            strlen(out) + strlen(all[i]->d_name) + 2 < sizeof out) {
            strcat(out, " ");
            strcat(out, all[i]->d_name);
        }
        free(all[i]);
    }
    if (n >= 0) free(all);
    return out;
}

#define CHECK_LISTING(want)                                                                               \
    do {                                                                                                  \
        const char *got_ = listing();                                                                     \
        test_check(strcmp(got_, want) == 0, __FILE__, __LINE__, "in the folder:%s, not%s", got_, (want)); \
    } while (0)

/* ---- teams ---- */

typedef struct team_run {
    upipe_threads team;
    const truth *t;
    const char *path; /* to load; NULL = save */
    int keep, again;  /* again: this many saves more on the same team, which must work */
    int fails;        /* rank whose copies fail in the first save; -1 = none */
    int stage;
    int64_t bytes_read[4]; /* by each rank that loads */
    upipe_err errors[4];
} team_run;

static upipe_status failing_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    int *left = (int *)c->user;
    if ((*left)-- == 0) return upipe_fail(&c->err, UPIPE_ERR_BACKEND, "the device is gone");
    return ops.copy(c, dst, src, bytes);
}

static upipe_status team_body(void *user, int rank)
{
    team_run *r = (team_run *)user;
    upipe_ctx c = alone();
    upipe_ops bad = ops;
    llama_state s = share_state(r->t, r->stage, rank, r->team.ranks);
    upipe_status status;
    int left = 5, i;
    bad.copy = failing_copy;
    c.team = upipe_threads_comm(&r->team, rank);
    if (r->path != NULL) {
        check_load(r->t, r->path, c.team, r->stage, rank, r->team.ranks);
        r->bytes_read[rank] = bytes_read;
        share_free(&s);
        return UPIPE_OK;
    }
    if (r->fails == rank) c.ops = &bad, c.user = &left;
    status = llama_save(&c, c.team, dir, &s, &r->t->run, r->keep);
    r->errors[rank] = c.err;
    c.ops = &ops;
    for (i = 0; i < r->again; ++i)
        CHECK_STATUS(llama_save(&c, c.team, dir, &s, &r->t->run, r->keep), UPIPE_OK, c.err);
    share_free(&s);
    if (r->fails < 0) return status;
    CHECK(status != UPIPE_OK);
    return UPIPE_OK;
}

static void team_go(team_run *r, const truth *t, int ranks, const char *path)
{
    upipe_err err = no_err();
    r->t = t;
    r->path = path;
    memset(r->errors, 0, sizeof r->errors);
    CHECK_STATUS(upipe_threads_init(&r->team, ranks, 0, &err), UPIPE_OK, err);
    CHECK_STATUS(upipe_threads_run(&r->team, team_body, r, NULL, NULL), UPIPE_OK, r->errors[0]);
    upipe_threads_free(&r->team);
}

/* ---- a rank that writes for longer than the deadline, and one that stops ---- */

typedef struct slow_team {
    const truth *t;
    upipe_threads team;
    int naps;      /* of rank 1, before its first so many copies */
    int64_t nap;   /* ns */
    int64_t began; /* of the team, and how long rank 0 took */
    int64_t took;
    upipe_status status[2];
    upipe_err err[2];
} slow_team;

static upipe_status slow_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    slow_team *r = (slow_team *)c->user;
    struct timespec t = {(time_t)(r->nap / 1000000000), (long)(r->nap % 1000000000)};
    if (r->naps-- > 0) nanosleep(&t, NULL);
    return ops.copy(c, dst, src, bytes);
}

static upipe_status slow_body(void *user, int rank)
{
    slow_team *r = (slow_team *)user;
    upipe_ctx c = alone();
    upipe_ops slow = ops;
    llama_state s = share_state(r->t, 1, rank, 2);
    slow.copy = slow_copy;
    c.team = upipe_threads_comm(&r->team, rank);
    if (rank == 1) c.ops = &slow, c.user = r;
    r->status[rank] = llama_save(&c, c.team, dir, &s, &r->t->run, 0);
    if (rank == 0) r->took = upipe_net_now() - r->began;
    r->err[rank] = c.err;
    share_free(&s);
    return UPIPE_OK;
}

static void slow_go(slow_team *r, const truth *t, double deadline, int naps, int64_t nap)
{
    upipe_err err = no_err();
    memset(r, 0, sizeof *r);
    r->t = t;
    r->naps = naps;
    r->nap = nap;
    CHECK_STATUS(upipe_threads_init(&r->team, 2, deadline, &err), UPIPE_OK, err);
    r->began = upipe_net_now();
    CHECK_STATUS(upipe_threads_run(&r->team, slow_body, r, NULL, NULL), UPIPE_OK, err);
    upipe_threads_free(&r->team);
}

static void test_slow(void)
{
    slow_team r;
    truth t;
    truth_make(&t, UPIPE_F32, 0, 0, 11);
    truth_fill(&t, 1, 1);
    /* a nap and what the disk takes for a chunk, a second or two where it is busy, are less than the deadline */
    slow_go(&r, &t, 4, 11, 400000000);
    CHECK_STATUS(r.status[0], UPIPE_OK, r.err[0]);
    CHECK_STATUS(r.status[1], UPIPE_OK, r.err[1]);
    CHECK(r.naps <= 0 && r.took >= 4400000000);
    check_newest(&t, 1, 1);
    clear(dir);
    slow_go(&r, &t, 1, 1, 5000000000);
    CHECK_STATUS(r.status[0], UPIPE_ERR_TIMEOUT, r.err[0]);
    CHECK_TEXT(r.err[0].text, "rank 1");
    CHECK(r.status[1] != UPIPE_OK);
    CHECK_SAY(r.took < 5000000000, "%lld ns", (long long)r.took);
    truth_free(&t);
    clear(dir);
}

/* ---- the same bits ---- */

/* Layers of two kinds: their shapes, and a q_proj with the gate of each head behind its q. */
static void check_two_kinds(const truth *t, const st_file *f)
{
    const llama_config *c = &t->layout.config;
    const int64_t head = c->head_dim * c->dim, size = (int64_t)upipe_dtype_bytes(t->dtype);
    const st_tensor *conv = st_find(f, "model.layers.0.linear_attn.conv1d.weight"),
                    *log = st_find(f, "model.layers.0.linear_attn.A_log"),
                    *q = st_find(f, "model.layers.1.self_attn.q_proj.weight");
    char *file;
    upipe_err err;
    int64_t i;
    if (!CHECK(conv != NULL && log != NULL && q != NULL)) return;
    CHECK(conv->rank == 3 && conv->shape[0] == 32 && conv->shape[1] == 1 && conv->shape[2] == 4);
    CHECK(log->rank == 1 && log->shape[0] == 4 && log->dtype == ST_F32);
    CHECK(q->rank == 2 && q->shape[0] == 2 * c->heads * c->head_dim && q->shape[1] == c->dim);
    CHECK(st_find(f, "model.layers.0.self_attn.q_proj.weight") == NULL);
    CHECK(st_find(f, "model.layers.1.self_attn.g_proj.weight") == NULL);
    CHECK(st_find(f, "model.layers.1.linear_attn.A_log") == NULL);
    file = (char *)buf(q->bytes);
    CHECK_INT(st_read_raw(f, q, 0, q->n, file, &err), 0);
    for (i = 0; i < 2 * c->heads; ++i) {
        const llama_tensor *of = llama_find(&t->layout, i % 2 ? LLAMA_WG : LLAMA_WQ, 1);
        CHECK_BYTES(file + i * head * size, (char *)t->weights + (of->at + i / 2 * head) * size,
                    (size_t)(head * size));
    }
    free(file);
}

static void check_files(const truth *t, const char *path)
{
    upipe_err err = no_err();
    llama_config config;
    upipe_dtype dtype = UPIPE_F32;
    st_file f;
    int i;
    CHECK_SAY(llama_config_read(&config, &dtype, in(path, "config.json"), NULL, &err) == 0, "%s", err.text);
    CHECK_BYTES(&config, &t->layout.config, sizeof config);
    CHECK_INT(dtype, t->dtype);
    if (!CHECK_SAY(st_open(&f, in(path, "model.safetensors"), &err) == 0, "%s", err.text)) return;
    CHECK_INT(f.n, t->layout.stored_n);
    CHECK((st_find(&f, "model.layers.1.self_attn.qkv_proj.weight") != NULL) ==
          (config.family == LLAMA_IS_PHI3));
    CHECK((st_find(&f, "model.layers.1.mlp.up_proj.weight") == NULL) == (config.family == LLAMA_IS_PHI3));
    CHECK(st_metadata(&f, "format") != NULL && strcmp(st_metadata(&f, "format"), "pt") == 0);
    CHECK((st_find(&f, "lm_head.weight") == NULL) == t->layout.config.tied);
    CHECK((st_find(&f, "model.layers.1.self_attn.q_norm.weight") != NULL) == t->layout.config.qk_norm);
    CHECK((st_find(&f, "model.layers.1.self_attn.o_proj.bias") != NULL) ==
          (t->layout.config.attention_bias != LLAMA_BIAS_NONE));
    if (config.family == LLAMA_IS_QWEN3_5) check_two_kinds(t, &f);
    for (i = 0; i < t->layout.n; ++i) {
        const llama_tensor *want = &t->layout.tensors[i];
        const llama_tensor *stored = t->layout.stored; /* the one that has it */
        const st_tensor *got;
        unsigned char bytes[4];
        while (stored->is_vector != want->is_vector || stored->at + stored->n <= want->at) ++stored;
        got = st_find(&f, stored->name);
        if (!CHECK(got != NULL)) continue;
        CHECK_INT(got->dtype, want->is_vector || t->dtype == UPIPE_F32 ? ST_F32 : ST_BF16);
        CHECK_INT(st_read_raw(&f, got,
                              want->kind == LLAMA_WG ? config.head_dim * config.dim : want->at - stored->at,
                              1, bytes, &err),
                  0);
        if (want->is_vector) CHECK_BYTES(bytes, t->vectors + want->at, 4);
        if (!want->is_vector && t->dtype == UPIPE_BF16)
            CHECK_BYTES(bytes, (uint16_t *)t->weights + want->at, 2);
    }
    st_close(&f);
}

/* All ranks together read what is sharded once, and what each holds whole once each: vectors, their states in stage 0
 * alone. */
static void check_read(const team_run *r, int ranks)
{
    const truth *t = r->t;
    const int64_t none[LLAMA_GROUPS] = {0, 0};
    const int64_t weights[LLAMA_GROUPS] = {t->layout.weights * (r->stage < 3 ? ranks : 1),
                                           t->layout.vectors * ranks};
    const int64_t states[LLAMA_GROUPS] = {t->layout.weights * (r->stage < 1 ? ranks : 1),
                                          t->layout.vectors * (r->stage < 1 ? ranks : 1)};
    int64_t sum = 0;
    int rank;
    for (rank = 0; rank < ranks; ++rank) sum += r->bytes_read[rank];
    CHECK_INT(sum,
              need_bytes(t, r->path, weights, states) + (ranks - 1) * need_bytes(t, r->path, none, none));
}

static void test_bits(void)
{
    int kind, ranks, loading;
    for (kind = 0; kind < 10; ++kind) {
        truth t;
        team_run r;
        memset(&r, 0, sizeof r);
        r.fails = -1;
        /* one vocabulary makes the embedding larger than a chunk */
        truth_make(&t, kind & 1 ? UPIPE_BF16 : UPIPE_F32, kind >> 1 & 1,
                   kind >= 8       ? 3
                   : kind >> 2 & 1 ? 1
                                   : kind & 2,
                   kind < 2 ? 100003 : 11);
        for (ranks = 1; ranks <= 4; ++ranks) {
            truth_fill(&t, ranks, (uint64_t)kind);
            r.stage = (kind + ranks) % 4;
            team_go(&r, &t, ranks, NULL);
            for (loading = 1; loading <= 4; ++loading) {
                char path[LLAMA_PATH];
                upipe_err err = no_err();
                CHECK_INT(llama_checkpoint_find(dir, path, &err), 0);
                check_files(&t, path);
                r.stage = (kind / 2 + loading) % 4;
                team_go(&r, &t, loading, path);
                check_read(&r, loading);
            }
        }
        truth_free(&t);
        clear(dir);
    }
}

/* Names and places of a layout, against what they must be. */
static void test_layout(void)
{
    truth t;
    int kind, i, n;
    int64_t layer, at[2];
    for (kind = 0; kind < 4; ++kind) {
        truth_make(&t, UPIPE_F32, kind & 1, kind >> 1, 11);
        n = 0;
        for (i = LLAMA_EMBED; i <= LLAMA_HEAD; ++i)
            for (layer = -2; layer < 4; ++layer) {
                const llama_tensor *one = llama_find(&t.layout, (llama_kind)i, layer);
                if (one == NULL) continue;
                ++n;
                CHECK_INT(one->kind, i);
                CHECK_INT(one->layer, layer);
            }
        CHECK_INT(n, t.layout.n);
        CHECK_INT(n, 2 + 2 * 9 + !(kind & 1) + 2 * 6 * (kind >> 1));
        at[0] = at[1] = 0;
        for (i = 0; i < t.layout.n; ++i) {
            const llama_tensor *one = &t.layout.tensors[i];
            CHECK_INT(one->at, at[one->is_vector]);
            CHECK_INT(one->n, one->rows * one->cols);
            at[one->is_vector] += one->n;
        }
        CHECK_INT(t.layout.weights, at[0]);
        CHECK_INT(t.layout.vectors, at[1]);
        CHECK(strcmp(llama_find(&t.layout, LLAMA_DOWN, 1)->name, "model.layers.1.mlp.down_proj.weight") == 0);
        CHECK_INT(llama_find(&t.layout, LLAMA_DOWN, 1)->rows, 6);
        CHECK_INT(llama_find(&t.layout, LLAMA_WO, 0)->cols, 8);
        CHECK_INT(llama_find(&t.layout, LLAMA_WK, 0)->rows, 4);
        truth_free(&t);
    }
}

/* ---- what stays in the folder ---- */

static void test_keep(void)
{
    truth t;
    upipe_err err = no_err();
    char path[LLAMA_PATH];
    int64_t step;
    truth_make(&t, UPIPE_BF16, 1, 0, 11);
    CHECK_INT(llama_checkpoint_find(dir, path, &err), -1);
    CHECK_TEXT(err.text, "the folder cannot be read");
    for (step = 8; step < 12; ++step) {
        truth_fill(&t, step, (uint64_t)step);
        CHECK_STATUS(save_alone(&t, 2, &err), UPIPE_OK, err);
    }
    CHECK_LISTING(" checkpoint-10 checkpoint-11");
    check_newest(&t, 11, 11);
    /* the same step again replaces; an earlier one leaves the later ones */
    truth_fill(&t, 11, 90);
    CHECK_STATUS(save_alone(&t, 2, &err), UPIPE_OK, err);
    CHECK_LISTING(" checkpoint-10 checkpoint-11");
    check_newest(&t, 90, 90);
    truth_fill(&t, 9, 9);
    CHECK_STATUS(save_alone(&t, 1, &err), UPIPE_OK, err);
    CHECK_LISTING(" checkpoint-10 checkpoint-11 checkpoint-9");
    truth_fill(&t, 12, 12);
    CHECK_STATUS(save_alone(&t, 0, &err), UPIPE_OK, err);
    CHECK_LISTING(" checkpoint-10 checkpoint-11 checkpoint-12 checkpoint-9");
    /* a run was stopped between two renames: the one set aside counts, and gets its name back */
    CHECK_INT(rename(in(dir, "checkpoint-12"), in(dir, ".checkpoint-12.old")), 0);
    CHECK_INT(mkdir(in(dir, ".checkpoint-12.tmp"), 0777), 0);
    CHECK_INT(close(open(in(dir, ".checkpoint-12.tmp/other"), O_CREAT | O_WRONLY, 0600)), 0);
    CHECK_INT(mkdir(in(dir, "checkpoint-012"), 0777), 0); /* not ours, nor a valid name */
    CHECK_INT(mkdir(in(dir, "checkpoint-13x"), 0777), 0);
    check_newest(&t, 12, 12);
    truth_fill(&t, 13, 13);
    CHECK_STATUS(save_alone(&t, 2, &err), UPIPE_OK, err);
    CHECK_LISTING(" checkpoint-012 checkpoint-12 checkpoint-13 checkpoint-13x");
    check_newest(&t, 13, 13);
    /* a folder that is a model itself */
    CHECK_INT(llama_checkpoint_find(in(dir, "checkpoint-12"), path, &err), 0);
    CHECK_TEXT(path, "checkpoint-12");
    CHECK_INT(llama_checkpoint_find(in(dir, "checkpoint-012"), path, &err), 1);
    CHECK_TEXT(err.text, "holds neither a config.json nor a checkpoint");
    /* one with another's name, as it is found and as all of a folder are looked at */
    CHECK_INT(llama_names_fit(dir, &err), 0);
    CHECK_INT(rename(in(dir, "checkpoint-12"), in(dir, ".checkpoint-14.old")), 0);
    CHECK_INT(llama_checkpoint_find(dir, path, &err), -1);
    CHECK_TEXT(err.text, "has done 12 steps, and not the 14 of its name: name it checkpoint-12");
    CHECK_INT(rename(in(dir, ".checkpoint-14.old"), in(dir, "checkpoint-7")), 0);
    check_newest(&t, 13, 13);
    CHECK_INT(llama_names_fit(dir, &err), -1);
    CHECK_TEXT(err.text, "has done 12 steps, and not the 7 of its name");
    truth_free(&t);
    clear(dir);
}

/* ---- failures ---- */

static void test_refusals(void)
{
    truth t;
    team_run r;
    upipe_err err = no_err();
    struct rlimit old, small;
    int rank, status;
    pid_t child;
    truth_make(&t, UPIPE_F32, 0, 0, 11);
    truth_fill(&t, 1, 1);
    CHECK_STATUS(save_alone(&t, 0, &err), UPIPE_OK, err);
    /* a full disk, on any number of ranks */
    truth_fill(&t, 2, 2);
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    small.rlim_cur = 3000;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &small);
    CHECK(save_alone(&t, 0, &err) != UPIPE_OK);
    setrlimit(RLIMIT_FSIZE, &old);
    CHECK_TEXT(err.text, "no space for");
    CHECK_LISTING(" checkpoint-1");
    check_newest(&t, 1, 1);
    /* one rank cannot go on: all know, nothing is left, and the team works on */
    for (rank = 0; rank < 3; ++rank) {
        memset(&r, 0, sizeof r);
        r.fails = rank;
        r.again = rank == 2;
        r.stage = rank + 1;
        truth_fill(&t, 2, 2);
        team_go(&r, &t, 3, NULL);
        CHECK_TEXT(r.errors[rank].text, "the device is gone");
        CHECK_TEXT(r.errors[(rank + 1) % 3].text, "could not write: ");
        CHECK_TEXT(r.errors[(rank + 1) % 3].text, "the device is gone"); /* of a rank that cannot say it */
        /* so that a program can tell who has the reason */
        CHECK(r.errors[rank].status != UPIPE_ERR_ABORTED);
        CHECK_INT(r.errors[(rank + 1) % 3].status, UPIPE_ERR_ABORTED);
        if (rank < 2) CHECK_LISTING(" checkpoint-1");
        check_newest(&t, rank < 2 ? 1 : 2, rank < 2 ? 1 : 2);
    }
    /* a folder that must not be written to; root may write everywhere, so as somebody else */
    truth_fill(&t, 3, 3);
    fflush(NULL);
    child = fork();
    if (child == 0) {
        int wrong = chmod(dir, 0555) != 0 || chmod(folder, 0755) != 0;
        if (geteuid() == 0) wrong += setuid(65534) != 0;
        wrong += save_alone(&t, 0, &err) == UPIPE_OK || strstr(err.text, "cannot be") == NULL;
        _exit(wrong);
    }
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    CHECK_INT(chmod(dir, 0755), 0);
    CHECK_LISTING(" checkpoint-1 checkpoint-2");
    check_newest(&t, 2, 2);
    /* a team and a state that do not fit */
    {
        upipe_ctx c = alone();
        llama_state s = share_state(&t, 1, 1, 2);
        CHECK_STATUS(llama_save(&c, NULL, dir, &s, &t.run, 0), UPIPE_ERR_ARG, c.err);
        CHECK_TEXT(c.err.text, "rank 1 of 2");
        share_free(&s);
    }
    truth_free(&t);
    clear(dir);
    /* a file where the folder is to be */
    truth_make(&t, UPIPE_F32, 0, 0, 11);
    close(open(dir, O_CREAT | O_WRONLY, 0600));
    CHECK(save_alone(&t, 0, &err) != UPIPE_OK);
    CHECK_TEXT(err.text, "folder cannot be read");
    unlink(dir);
    truth_free(&t);
}

/* A number that is none, in each array in turn: what was there stays, and no trace of the other. */
static void test_not_finite(void)
{
    static const char *const says[] = {"weight is not finite",
                                       "norm.weight is not finite",
                                       "exp_avg.",
                                       "exp_avg.",
                                       "exp_avg_sq.",
                                       "exp_avg_sq.",
                                       "master."};
    truth t;
    upipe_err err = no_err();
    int kind, which, bad;
    for (kind = 0; kind < 2; ++kind)
        for (which = 0; which < 6 + kind; ++which)
            for (bad = 0; bad < 3; ++bad) {
                const float wrong[] = {NAN, INFINITY, -INFINITY};
                const uint16_t halves[] = {0x7f81, 0x7f80, 0xff80};
                float *at;
                truth_make(&t, kind ? UPIPE_BF16 : UPIPE_F32, 0, 1, 11);
                truth_fill(&t, 1, 1);
                CHECK_STATUS(save_alone(&t, 1, &err), UPIPE_OK, err);
                truth_fill(&t, 2, 2);
                at = which == 0   ? (float *)t.weights
                     : which == 1 ? t.vectors
                     : which < 4  ? t.m[which - 2]
                     : which < 6  ? t.v[which - 4]
                                  : t.master;
                if (which == 0 && kind)
                    ((uint16_t *)t.weights)[t.layout.weights - 1] = halves[bad];
                else
                    at[which % 2 && which < 6 ? t.layout.vectors - 1 : t.layout.weights / 2] = wrong[bad];
                err = no_err();
                CHECK_STATUS(save_alone(&t, 1, &err), UPIPE_ERR_ARG, err);
                CHECK_TEXT(err.text, says[which]);
                CHECK_TEXT(err.text, "is not finite, and is not saved");
                CHECK_LISTING(" checkpoint-1");
                check_newest(&t, 1, 1);
                truth_free(&t);
                clear(dir);
            }
}

/* What was written is read before it counts: config.json, model.safetensors, optimizer.safetensors. */
static void test_read_back(void)
{
    static const char *const says[] = {"config.json", "model.safetensors", "optimizer.safetensors"};
    truth t;
    upipe_err err = no_err();
    int file;
    truth_make(&t, UPIPE_BF16, 0, 1, 11);
    truth_fill(&t, 1, 1);
    CHECK_STATUS(save_alone(&t, 1, &err), UPIPE_OK, err);
    for (file = 0; file < 3; ++file) {
        truth_fill(&t, 1 + file % 2, 2);
        fault_spoils = file + 1;
        CHECK(save_alone(&t, 1, &err) != UPIPE_OK);
        CHECK_INT(fault_spoils, 0);
        CHECK_TEXT(err.text, says[file]);
        CHECK_LISTING(" checkpoint-1");
        check_newest(&t, 1, 1);
    }
    truth_free(&t);
    clear(dir);
}

/* One program at a time has a folder, until it gives it back or dies. */
static void test_locks(void)
{
    llama_lock one, two;
    upipe_err err = no_err();
    int ends[2], status;
    char byte = 0;
    pid_t child;
    CHECK_SAY(llama_lock_init(&one, dir, &err) == 0, "%s", err.text);
    CHECK_LISTING(" .lock");
    CHECK_INT(llama_lock_init(&two, dir, &err), -1);
    CHECK_TEXT(err.text, "run: another training writes its checkpoints there");
    llama_lock_free(&two);
    CHECK_LISTING(" .lock");
    llama_lock_free(&one);
    CHECK(access(dir, F_OK) != 0);
    if (pipe(ends) != 0) abort();
    fflush(NULL);
    child = fork();
    if (child == 0) {
        status = llama_lock_init(&one, dir, &err) != 0 || write(ends[1], &byte, 1) != 1;
        for (;;) pause();
    }
    CHECK_INT(read(ends[0], &byte, 1), 1);
    CHECK_INT(llama_lock_init(&two, dir, &err), -1);
    CHECK_TEXT(err.text, "another training");
    kill(child, SIGKILL);
    CHECK_INT(waitpid(child, &status, 0), child);
    close(ends[0]);
    close(ends[1]);
    CHECK_LISTING(" .lock");
    CHECK_SAY(llama_lock_init(&two, dir, &err) == 0, "%s", err.text);
    llama_lock_free(&two);
    llama_lock_free(&two);
    CHECK_LISTING("");
    CHECK_INT(rmdir(dir), 0);
}

/* checkpoint-4, and checkpoint-5 of save 1; then save 2 replaces the latter, and removes the former. */
static upipe_status fault_scene(truth *t, long at, int kills, upipe_err *err)
{
    upipe_status status;
    clear(dir);
    truth_fill(t, 4, 0);
    CHECK_STATUS(save_alone(t, 0, err), UPIPE_OK, *err);
    truth_fill(t, 5, 1);
    CHECK_STATUS(save_alone(t, 0, err), UPIPE_OK, *err);
    truth_fill(t, 5, 2);
    fault_calls = 0;
    fault_at = at;
    fault_kills = kills;
    *err = no_err();
    status = save_alone(t, 1, err);
    fault_at = 0;
    return status;
}

/* Every name that counts is a whole checkpoint. */
static void check_names(truth *t)
{
    static const char *const names[] = {"checkpoint-4", "checkpoint-5", ".checkpoint-5.old"};
    size_t i;
    for (i = 0; i < sizeof names / sizeof *names; ++i) {
        upipe_err err = no_err();
        upipe_dtype dtype;
        llama_run run;
        const char *path = in(dir, names[i]);
        if (access(path, F_OK) != 0) continue;
        if (!CHECK_SAY(llama_load_run(path, &run, &dtype, &err) == 0, "%s", err.text)) continue;
        truth_fill(t, run.step, (uint64_t)run.seed);
        check_load(t, in(dir, names[i]), NULL, 1, 0, 1);
    }
}

/* Before each call of a save to the filesystem the process stops, or the call fails. */
static void test_each_call(void)
{
    truth t;
    upipe_err err = no_err();
    long calls, at, old = 0, fresh = 0;
    int kills;
    truth_make(&t, UPIPE_BF16, 1, 0, 11);
    CHECK_STATUS(fault_scene(&t, 0, 0, &err), UPIPE_OK, err);
    calls = fault_calls;
    CHECK(calls > 80);
    CHECK_LISTING(" checkpoint-5");
    for (kills = 0; kills < 2; ++kills)
        for (at = 1; at <= calls; ++at) {
            int status;
            if (kills) {
                pid_t child;
                fflush(NULL);
                child = fork();
                if (child == 0) {
                    fault_scene(&t, at, 1, &err);
                    _exit(1);
                }
                CHECK_INT(waitpid(child, &status, 0), child);
                CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 77);
            } else {
                CHECK(fault_scene(&t, at, 0, &err) != UPIPE_OK);
                CHECK_TEXT(err.text, "Input/output error");
                CHECK(access(in(dir, "checkpoint-5"), F_OK) == 0);
            }
            check_names(&t);
            if (check_newest(&t, 1, 2) == 1)
                ++old;
            else
                ++fresh;
            /* the next save finds its way, and clears up */
            truth_fill(&t, 6, 3);
            CHECK_STATUS(save_alone(&t, 1, &err), UPIPE_OK, err);
            CHECK_LISTING(" checkpoint-6");
        }
    CHECK(old > 0 && fresh > 0);
    truth_free(&t);
    clear(dir);
}

/* An adapter has its name when all its bytes and names are on the disk: what fails before is said, and leaves nothing. */
static void test_adapter_calls(void)
{
    const llama_lora lora = {2, 1, 3};
    upipe_threads team;
    upipe_err err = no_err();
    llama_layout layout;
    llama_state s;
    truth t;
    long calls = 0, at;
    truth_make(&t, UPIPE_F32, 0, 0, 11);
    CHECK_INT(llama_layout_adapted(&layout, &t.layout.config, &lora), 0);
    llama_state_init(&s, &layout, UPIPE_F32, 1, 0, 1);
    s.zero[LLAMA_WEIGHTS].weights = calloc((size_t)layout.weights, 4);
    CHECK_STATUS(upipe_threads_init(&team, 1, 0, &err), UPIPE_OK, err);
    for (at = 0; at <= calls; ++at) {
        upipe_ctx c = alone();
        upipe_status status;
        c.team = upipe_threads_comm(&team, 0);
        fault_calls = 0;
        fault_at = at;
        status = llama_save_adapter(&c, c.team, dir, &s);
        fault_at = 0;
        if (at == 0) calls = fault_calls;
        CHECK_SAY((status == UPIPE_OK) == (at == 0), "call %ld of %ld: %s", at, calls, c.err.text);
        CHECK_INT(access(dir, F_OK) == 0, at == 0);
        CHECK(access(in(folder, "run.tmp"), F_OK) != 0);
        clear(dir);
    }
    CHECK(calls > 8);
    upipe_threads_free(&team);
    free(s.zero[LLAMA_WEIGHTS].weights);
    llama_layout_free(&layout);
    truth_free(&t);
}

/* ---- kill -9 ---- */

/* Saves for ever, each step twice, on two ranks; tells the number of each finished save. */
static void kill_child(truth *t, int64_t save, int out)
{
    for (;; ++save) {
        team_run r;
        memset(&r, 0, sizeof r);
        r.fails = -1;
        r.keep = 2;
        r.stage = (int)(save % 4);
        truth_fill(t, save / 2, (uint64_t)save);
        team_go(&r, t, 2, NULL);
        if (test_failures > 0 || write(out, &save, sizeof save) != sizeof save) _exit(1);
    }
}

static void test_kills(void)
{
    test_rng rng;
    truth t;
    long draws = 20 + test_draws_wanted() / 200, draw;
    int64_t done = 1, next = 2;
    upipe_err err = no_err();
    rng.state = (uint64_t)test_env("UPIPE_SEED", 1);
    truth_make(&t, UPIPE_BF16, 0, 1, 5003);
    truth_fill(&t, 0, 1);
    CHECK_STATUS(save_alone(&t, 0, &err), UPIPE_OK, err);
    for (draw = 0; draw < draws && test_failures == 0; ++draw) {
        struct timespec wait = {0, 0};
        int ends[2], status;
        int64_t told;
        pid_t child;
        if (pipe(ends) != 0) abort();
        fflush(NULL);
        child = fork();
        if (child == 0) kill_child(&t, next, ends[1]);
        close(ends[1]);
        /* every other one may finish a save first, on however slow a machine */
        if (draw % 2 == 1 && CHECK(read(ends[0], &told, sizeof told) == sizeof told)) done = told;
        wait.tv_nsec = test_below(&rng, 60) * 1000000 + test_below(&rng, 1000000);
        nanosleep(&wait, NULL);
        kill(child, SIGKILL);
        CHECK_INT(waitpid(child, &status, 0), child);
        CHECK(WIFSIGNALED(status));
        while (read(ends[0], &told, sizeof told) == sizeof told) done = told;
        close(ends[0]);
        done = check_newest(&t, done, done + (done + 1 < next ? next - done : 1));
        next = done + 1;
    }
    printf("kills: %ld, saves: %lld\n", draw, (long long)done);
    CHECK(done > 1);
    truth_free(&t);
    clear(dir);
}

int main(int argc, char **argv)
{
    state_begin("test_checkpoint");
    test_begin(argc, argv);
    TEST(test_layout());
    TEST(test_bits());
    TEST(test_slow());
    TEST(test_keep());
    TEST(test_refusals());
    TEST(test_not_finite());
    TEST(test_read_back());
    TEST(test_locks());
    TEST(test_each_call());
    TEST(test_adapter_calls());
    TEST(test_kills());
    CHECK_INT(early, 0);
    CHECK_INT(rmdir(folder), 0);
    return test_end("checkpoint");
}
