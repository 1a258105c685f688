/* test_checkpoint.c -- saving and loading: the same bits on any number of ranks, and nothing half written
 *
 * Contents are random bits of finite numbers that follow from the step and a count of saves, so that a loaded checkpoint shows
 * whether all its parts are of one save. Stops: a process that saves is killed at random instants
 * (20 + UPIPE_DRAWS / 200 times; each takes tens of milliseconds), and one is stopped before each of its
 * calls to the filesystem in turn. Failures: each of these calls fails in turn. Refusals: each kind of wrong
 * file, by the words of its sentence.
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
#include "../examples/llama/state/checkpoint.h"
#undef rename
#undef unlink
#undef rmdir
#undef mkdir
#undef fsync
#undef posix_fallocate
#undef pwrite
#undef pread
#undef opendir

#include "../upipe/cpu/upipe_cpu.h"
#include "../upipe/net/upipe_net_threads.h"
#include "lib/test.h"

static char folder[1024], dir[1100];
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
    t->run.step = step;
    t->run.tokens = 64 + step;
    t->run.batch = 3;
    t->run.accumulate = 2;
    t->run.text_bytes = 123456789012345;
    t->run.seed = (int64_t)save;
    t->run.text_hash = ~save;
    t->run.steps = 1000;
    t->run.warmup = 10;
    t->run.schedule = 3;
    t->run.decay = 7;
    t->run.lr = 1e-3;
    t->run.min_lr = 1.0 / 3;
    t->run.weight_decay = 0.1;
    t->run.beta1 = 0.9;
    t->run.beta2 = 0.95;
    t->run.adam_eps = 1e-8;
    t->run.clip = 0;
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
    slow_go(&r, &t, 1, 15, 100000000);
    CHECK_STATUS(r.status[0], UPIPE_OK, r.err[0]);
    CHECK_STATUS(r.status[1], UPIPE_OK, r.err[1]);
    CHECK(r.naps <= 0 && r.took >= 1500000000);
    check_newest(&t, 1, 1);
    clear(dir);
    slow_go(&r, &t, 0.25, 1, 2000000000);
    CHECK_STATUS(r.status[0], UPIPE_ERR_TIMEOUT, r.err[0]);
    CHECK_TEXT(r.err[0].text, "rank 1");
    CHECK(r.status[1] != UPIPE_OK);
    CHECK_SAY(r.took < 2000000000, "%lld ns", (long long)r.took);
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

/* ---- models of others ---- */

/* Writes model.safetensors (or a part with tensors from .. to) in any type, values k / 8 exact in all. */
static double value_of(const llama_tensor *one, int64_t k)
{
    return (double)((one->at + k) % 61 - 30) / 8 + (one->is_vector ? 0.5 : 0);
}

typedef struct twist {
    int missing, shape, type; /* tensor that is left out, has a row more, is I32; -1 = none */
    const char *extra;
    int tied; /* the head has the numbers of the embedding */
} twist;

static void write_model(const llama_layout *l, const char *name, st_dtype dtype, int from, int to,
                        const twist *how)
{
    st_writer w;
    upipe_err err = no_err();
    int i, index;
    int64_t k, shape[2], one = 1;
    st_writer_init(&w);
    for (i = from; i < to; ++i) {
        const llama_tensor *t = &l->tensors[i];
        shape[0] = t->rows + (how->shape == i);
        shape[1] = t->cols;
        if (how->missing != i)
            CHECK(st_add(&w, t->name, how->type == i ? ST_I32 : dtype, t->is_vector ? 1 : 2, shape, &err) >=
                  0);
    }
    if (how->extra != NULL) CHECK(st_add(&w, how->extra, dtype, 1, &one, &err) >= 0);
    mkdir(dir, 0777);
    unlink(in(dir, name));
    CHECK_SAY(st_write_begin(&w, in(dir, name), &err) == 0, "%s", err.text);
    for (i = from, index = 0; i < to; ++i) {
        if (how->missing == i) continue;
        for (k = 0; k < l->tensors[i].n; ++k) {
            const llama_tensor *t = &l->tensors[how->tied && l->tensors[i].kind == LLAMA_HEAD ? 0 : i];
            double x = value_of(t, k), size = fabs(x);
            float y = (float)x;
            uint32_t bits;
            uint16_t half;
            int exponent;
            const void *data = &x;
            memcpy(&bits, &y, 4);
            half = (uint16_t)(bits >> 16);
            if (dtype == ST_F16) {
                half = 0;
                if (size > 0) {
                    size = frexp(size, &exponent);
                    half = (uint16_t)((x < 0) << 15 | (exponent + 14) << 10 | ((int)(size * 2048) & 1023));
                }
            }
            if (dtype == ST_F32) data = &y;
            if (dtype == ST_F16 || dtype == ST_BF16) data = &half;
            CHECK_INT(st_pwrite(&w, index, k, 1, data, &err), 0);
        }
        ++index;
    }
    CHECK_INT(st_write_end(&w, &err), 0);
    st_writer_free(&w);
}

static void write_text(const char *path, const char *text)
{
    FILE *f = fopen(path, "wb");
    if (f == NULL || fputs(text, f) < 0 || fclose(f) != 0) abort();
}

/* What the rank loads goes into t, its own part of master alone. */
static upipe_status load_model(truth *t, int rank, int ranks, upipe_err *err)
{
    upipe_ctx c = alone();
    llama_state s = share_state(t, 1, rank, ranks);
    const upipe_zero *z = &s.zero[LLAMA_WEIGHTS];
    upipe_status status = llama_load_weights(&c, dir, &s, NULL);
    int unit;
    memcpy(t->weights, z->weights, (size_t)t->layout.weights * upipe_dtype_bytes(t->dtype));
    memcpy(t->vectors, s.zero[LLAMA_VECTORS].weights, (size_t)t->layout.vectors * 4);
    for (unit = 0; unit < z->units && s.master != NULL; ++unit) {
        const upipe_zero_part p = upipe_zero_slice(z, unit);
        memcpy(t->master + p.first, s.master + p.at, (size_t)p.n * 4);
    }
    share_free(&s);
    *err = c.err;
    return status;
}

static void check_values(truth *t, int rank, int ranks)
{
    int64_t k;
    int i, wrong = 0;
    llama_state s;
    llama_state_init(&s, &t->layout, t->dtype, 1, rank, ranks);
    for (i = 0; i < t->layout.n; ++i) {
        const llama_tensor *one = &t->layout.tensors[i];
        const upipe_zero_part p = upipe_zero_slice(&s.zero[one->is_vector], one->is_vector ? 0 : one->unit);
        for (k = 0; k < one->n; ++k) {
            int64_t at = one->at + k;
            double want = value_of(one, k), got;
            if (one->is_vector)
                got = (double)t->vectors[at];
            else if (t->dtype == UPIPE_F32)
                got = (double)((const float *)t->weights)[at];
            else {
                uint32_t bits = (uint32_t)((const uint16_t *)t->weights)[at] << 16;
                float x;
                memcpy(&x, &bits, 4);
                got = (double)x;
                if (at >= p.first && at < p.first + p.n) wrong += (double)t->master[at] != want;
            }
            wrong += got != want;
        }
    }
    CHECK_INT(wrong, 0);
}

/* f32 to bf16: to the nearest, ties to even; infinities and NaN stay what they are. */
static void test_rounding(void)
{
    static const uint32_t pairs[][2] = {
        {0x3f800000, 0x3f80}, {0x3f807fff, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f808001, 0x3f81},
        {0x3f818000, 0x3f82}, {0xbf818000, 0xbf82}, {0x7f7fffff, 0x7f80}, {0xff800000, 0xff80},
        {0x7f800001, 0x7fc0}, {0xffffffff, 0xffff}, {0x7f810000, 0x7f81}, {0x00008001, 0x0001},
    };
    size_t i;
    for (i = 0; i < sizeof pairs / sizeof *pairs; ++i) {
        float x;
        memcpy(&x, &pairs[i][0], 4);
        CHECK_INT(llama_to_bf16(x), pairs[i][1]);
    }
}

static void test_models(void)
{
    static const st_dtype types[] = {ST_F64, ST_F32, ST_F16, ST_BF16};
    const twist plain = {-1, -1, -1, NULL, 0};
    twist how;
    upipe_err err = no_err();
    char map[4096];
    int kind, i;
    truth t;
    for (kind = 0; kind < 8; ++kind) {
        truth_make(&t, kind & 1 ? UPIPE_BF16 : UPIPE_F32, 1, 0, 11);
        how = plain;
        how.extra = "model.layers.0.self_attn.rotary_emb.inv_freq";
        write_model(&t.layout, "model.safetensors", types[kind >> 1], 0, t.layout.n, &how);
        CHECK_STATUS(load_model(&t, 1, 3, &err), UPIPE_OK, err);
        check_values(&t, 1, 3);
        truth_free(&t);
    }
    /* refusals, by name */
    truth_make(&t, UPIPE_F32, 0, 0, 11);
    for (i = 0; i < t.layout.n; ++i) {
        how = plain, how.missing = i;
        write_model(&t.layout, "model.safetensors", ST_F32, 0, t.layout.n, &how);
        CHECK_STATUS(load_model(&t, 0, 1, &err), UPIPE_ERR_ARG, err);
        CHECK_TEXT(err.text, t.layout.tensors[i].name);
        CHECK_TEXT(err.text, "is missing");
        how = plain, how.shape = i;
        write_model(&t.layout, "model.safetensors", ST_F32, 0, t.layout.n, &how);
        CHECK_STATUS(load_model(&t, 0, 1, &err), UPIPE_ERR_ARG, err);
        CHECK_TEXT(err.text, t.layout.tensors[i].name);
        CHECK_TEXT(err.text, t.layout.tensors[i].is_vector ? "the first 7, not 1 of 6" : ", not 2, ");
        how = plain, how.type = i;
        write_model(&t.layout, "model.safetensors", ST_F32, 0, t.layout.n, &how);
        CHECK_STATUS(load_model(&t, 0, 1, &err), UPIPE_ERR_ARG, err);
        CHECK_TEXT(err.text, "is I32, not F64, F32");
    }
    how = plain, how.extra = "model.layers.2.mlp.up_proj.weight";
    write_model(&t.layout, "model.safetensors", ST_F32, 0, t.layout.n, &how);
    CHECK_STATUS(load_model(&t, 0, 1, &err), UPIPE_ERR_ARG, err);
    CHECK_TEXT(err.text, "model.layers.2.mlp.up_proj.weight is no tensor of this model");
    write_model(&t.layout, "model.safetensors", ST_F32, 0, t.layout.n, &plain);
    CHECK_INT(truncate(in(dir, "model.safetensors"), 4000), 0);
    CHECK_STATUS(load_model(&t, 0, 1, &err), UPIPE_ERR_ARG, err);
    CHECK_TEXT(err.text, "of data");
    /* in parts */
    unlink(in(dir, "model.safetensors"));
    CHECK_STATUS(load_model(&t, 0, 1, &err), UPIPE_ERR_ARG, err);
    CHECK_TEXT(err.text, "has neither model.safetensors nor");
    write_model(&t.layout, "a.safetensors", ST_F32, 0, 5, &plain);
    write_model(&t.layout, "b.safetensors", ST_BF16, 5, t.layout.n, &plain);
    for (kind = 0; kind < 7; ++kind) {
        const char *const says[] = {
            NULL, "is missing", "files have", "not here by", "names no file", "b.safetensor", "no JSON"};
        int at = snprintf(map, sizeof map, "{\"metadata\":{},\"weight_map\":{");
        for (i = kind == 1 ? 5 : 0; i < t.layout.n; ++i)
            at += snprintf(map + at, sizeof map - (size_t)at, "%s\"%s\":\"%s\"",
                           map[at - 1] == '{' ? "" : ",", t.layout.tensors[i].name,
                           (i < 5) != (kind == 3 && i == 7) ? "a.safetensors" : "b.safetensors");
        if (kind == 2) at += snprintf(map + at, sizeof map - (size_t)at, ",\"x\":\"a.safetensors\"");
        if (kind == 4) at += snprintf(map + at, sizeof map - (size_t)at, ",\"x\":\"../a.safetensors\"");
        snprintf(map + at, sizeof map - (size_t)at, kind == 6 ? "}" : "}}");
        write_text(in(dir, "model.safetensors.index.json"), map);
        if (kind == 5) CHECK_INT(truncate(in(dir, "b.safetensors"), 100), 0);
        memset(t.weights, 0, 8);
        CHECK_STATUS(load_model(&t, 0, 1, &err), says[kind] ? UPIPE_ERR_ARG : UPIPE_OK, err);
        if (says[kind] != NULL) CHECK_TEXT(err.text, says[kind]);
        if (kind == 0) check_values(&t, 0, 1);
    }
    truth_free(&t);
    clear(dir);
}

/* A head stored beside the embedding that it is tied to is checked as any tensor, and has its numbers. No weight is kept. */
static void test_tied(void)
{
    const twist plain = {-1, -1, -1, NULL, 0};
    twist how = plain;
    upipe_err err = no_err();
    truth t, untied;
    int head;
    truth_make(&t, UPIPE_F32, 1, 0, 11);
    truth_make(&untied, UPIPE_F32, 0, 0, 11);
    head = (int)(llama_find(&untied.layout, LLAMA_HEAD, -1) - untied.layout.tensors);
    write_model(&untied.layout, "model.safetensors", ST_F32, 0, untied.layout.n, &plain);
    CHECK_INT(llama_load_check(dir, &untied.layout, &err), 0);
    CHECK_INT(llama_load_check(dir, &t.layout, &err), -1);
    CHECK_TEXT(err.text, "model.safetensors: lm_head.weight is not the embedding, and tie_word_embeddings");
    how.tied = 1;
    write_model(&untied.layout, "model.safetensors", ST_F32, 0, untied.layout.n, &how);
    CHECK_SAY(llama_load_check(dir, &t.layout, &err) == 0, "%s", err.text);
    CHECK_STATUS(load_model(&t, 1, 3, &err), UPIPE_OK, err);
    check_values(&t, 1, 3);
    how.shape = head;
    write_model(&untied.layout, "model.safetensors", ST_F32, 0, untied.layout.n, &how);
    CHECK_INT(llama_load_check(dir, &t.layout, &err), -1);
    CHECK_TEXT(err.text, "lm_head.weight has 2 dimensions, 12 x 6, not 2, 11 x 6");
    how = plain, how.type = head;
    write_model(&untied.layout, "model.safetensors", ST_F32, 0, untied.layout.n, &how);
    CHECK_INT(llama_load_check(dir, &t.layout, &err), -1);
    CHECK_TEXT(err.text, "lm_head.weight is I32, not F64, F32");
    how = plain, how.missing = 0; /* the head alone */
    write_model(&untied.layout, "model.safetensors", ST_F32, 0, untied.layout.n, &how);
    CHECK_INT(llama_load_check(dir, &t.layout, &err), -1);
    CHECK_TEXT(err.text, "model.embed_tokens.weight is missing");
    truth_free(&untied);
    truth_free(&t);
    clear(dir);
}

/* Loads checkpoint-1's optimizer after a change; it must be refused with these words. */
static void check_optimizer(const truth *t, const char *says)
{
    upipe_ctx c = alone();
    llama_state s = truth_state(t);
    llama_run run;
    CHECK_STATUS(llama_load_optimizer(&c, in(dir, "checkpoint-1"), &s, &run), UPIPE_ERR_ARG, c.err);
    CHECK_TEXT(c.err.text, says);
}

/* Numbers of a run that a flag may say. */
static void add_run(st_writer *w)
{
    static const char *const others[][2] = {{"dtype", "bf16"}, {"format_version", "1"}, {"text_hash", "1"}};
    upipe_err err = no_err();
    size_t i;
    for (i = 0; i < LLAMA_RUN_FIELDS; ++i) {
        const char *key = llama_run_fields[i].key;
        const char *text = strncmp(key, "beta", 4) == 0 ? "0.5" : strcmp(key, "text_bytes") == 0 ? "2" : "1";
        CHECK_INT(st_add_metadata(w, key, text, &err), 0);
    }
    for (i = 0; i < sizeof others / sizeof *others; ++i)
        CHECK_INT(st_add_metadata(w, others[i][0], others[i][1], &err), 0);
}

/* An optimizer file with something wrong in its tensors, which are of zeros. */
static void write_optimizer(const truth *t, int missing, int kind, const char *extra)
{
    upipe_err err = no_err();
    st_writer w;
    int64_t shape[2], one = 1;
    int i, k;
    char name[96];
    st_writer_init(&w);
    add_run(&w);
    for (k = 0; k < 3; ++k)
        for (i = 0; i < t->layout.n; ++i) {
            const llama_tensor *a = &t->layout.tensors[i];
            if (k == 2 && a->is_vector) break;
            shape[0] = a->rows + (i == missing && k == kind - 3);
            shape[1] = a->cols;
            snprintf(name, sizeof name, "%s.%s",
                     k == 0   ? "exp_avg"
                     : k == 1 ? "exp_avg_sq"
                              : "master",
                     a->name);
            if (i != missing || k != kind)
                CHECK(st_add(&w, name, i == missing && k == kind - 6 ? ST_BF16 : ST_F32, a->is_vector ? 1 : 2,
                             shape, &err) >= 0);
        }
    if (extra != NULL) CHECK(st_add(&w, extra, ST_F32, 1, &one, &err) >= 0);
    mkdir(dir, 0777);
    mkdir(in(dir, "checkpoint-1"), 0777);
    unlink(in(dir, "checkpoint-1/optimizer.safetensors"));
    CHECK_SAY(st_write_begin(&w, in(dir, "checkpoint-1/optimizer.safetensors"), &err) == 0, "%s", err.text);
    CHECK_INT(st_write_end(&w, &err), 0);
    st_writer_free(&w);
}

static void test_optimizers(void)
{
    truth t;
    int k, one;
    truth_make(&t, UPIPE_BF16, 0, 1, 11);
    for (k = 0; k < 9; ++k) /* missing, another shape, another type; of exp_avg, exp_avg_sq, master */
        for (one = 0; one < t.layout.n; one += 7) {
            if (k % 3 == 2 && t.layout.tensors[one].is_vector) continue;
            write_optimizer(&t, one, k, NULL);
            check_optimizer(&t, k < 3 ? "is missing" : k < 6 ? "dimensions, " : "is BF16, not F32");
            check_optimizer(&t, t.layout.tensors[one].name);
        }
    write_optimizer(&t, -1, 0, "exp_avg.other");
    check_optimizer(&t, "tensors, not the");
    write_optimizer(&t, -1, 0, NULL);
    t.dtype = UPIPE_F32;
    check_optimizer(&t, "a run in bf16; a run in f32 cannot go on");
    CHECK_INT(truncate(in(dir, "checkpoint-1/optimizer.safetensors"), 12000), 0);
    check_optimizer(&t, "of data");
    unlink(in(dir, "checkpoint-1/optimizer.safetensors"));
    check_optimizer(&t, "cannot be opened");
    t.dtype = UPIPE_BF16;
    truth_free(&t);
    clear(dir);
}

int main(int argc, char **argv)
{
    const char *parent = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/test_checkpoint.XXXXXX", parent != NULL && *parent ? parent : ".");
    if (mkdtemp(folder) == NULL) {
        perror(folder);
        return 1;
    }
    snprintf(dir, sizeof dir, "%s/run", folder);
    upipe_cpu_ops(&ops);
    test_begin(argc, argv);
    TEST(test_layout());
    TEST(test_bits());
    TEST(test_slow());
    TEST(test_keep());
    TEST(test_rounding());
    TEST(test_models());
    TEST(test_tied());
    TEST(test_optimizers());
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
