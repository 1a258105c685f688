/* logits.c -- a Hugging Face checkpoint's logits for given tokens, computed by ranks that share the sequence
 *
 *     logits --load SmolLM2-135M --ids ids.npy --out logits.npy --ranks 3
 *     mpirun -np 3 logits_mpi --transport mpi --load SmolLM2-135M --ids ids.npy --out logits.npy
 *     torchrun --nproc-per-node 3 --no-python logits_nccl --transport nccl --device cuda --load ...
 *
 * ids.npy: whole numbers [S], or another file that tokens.h knows by itself. logits.npy: float32 [S][V]. The forward is
 * train's (model.h). Ranks that are threads read one copy of the weights and write into one result; a process has a
 * copy, and sends its rows to rank 0.
 */
#define PROGRAM "logits"

#include "upipe/upipe.h"

#include "../common/cli.h"
#include "../common/files.h"
#include "../common/world.h"
#include "files/tokens.h"
#include "state/checkpoint.h"
#include "model/forward.h"
#include "model/setting.h"
#include "run/pools.h"
#include "run/rope_flags.h"

typedef struct logits {
    options o;
    llama_layout layout;
    llama_adapter adapter; /* of --load-adapter */
    upipe_ops ops;         /* of the device, for plans */
    struct world net;
    char folder[LLAMA_PATH];
    void *weights, *vectors;           /* one copy for all ranks, which only read it: on the device */
    void *host_weights, *host_vectors; /* where they are loaded */
    int32_t *ids;                      /* [S] */
    int64_t tokens;
    float
        *out; /* [S][V]; in a process that is not rank 0: [rows of the rank][V]; the device reaches it too */
    struct logits_place {
        model m;
        size_t slab_bytes, second_bytes;
        int blocks_max;
        pools p;
    } ranks[UPIPE_THREADS_MAX];
} logits;

static const char usage_text[] =
    "usage: logits --load DIR --ids FILE --out FILE [flags]\n"
    "\n"
    "Runs a Hugging Face checkpoint (docs/models.md lists which) over given tokens, shared by ranks that are\n"
    "threads of this process or processes, and writes the logits of every token.\n";

static const char usage_end[] = "\nExit status: 0, 1 for a run that failed, 2 for wrong usage.\n";

static const char *const usage_more[] = {method_usage, usage_end, NULL};
static const flag_set option_flags = {flag_rows,  FLAG_ROWS,  IN_LOGITS,
                                      usage_text, usage_more, ", products: " PRODUCTS};

/* The ranks of w are there when this returns; then the program ends with world_end. */
static int options_read(options *o, struct world *w, int argc, char **argv)
{
    int status;
    memset(o, 0, sizeof *o);
    o->program = IN_LOGITS;
    status = flags_read(&option_flags, o, o->given, argc, argv);
    if (status == 0 && (o->load == NULL || o->ids == NULL || o->out == NULL))
        status = cli_refuse("--load, --ids and --out must be given");
    status = world_begin(w, &option_flags, o, status);
    return status != 0 ? status : world_agree(w, method_resolve(&o->how, 1));
}

/* ---- tokens ---- */

typedef struct ids_call {
    logits *g;
    token_files files;
    int64_t at, id; /* one that is none, and its place */
    int wrong;
} ids_call;

static void ids_body(void *user)
{
    ids_call *c = (ids_call *)user;
    int file = 0;
    for (; c->at < c->g->tokens; ++c->at) {
        c->id = tokens_at(&c->files, &file, c->at);
        c->wrong = c->id < 0 || c->id >= c->g->layout.config.vocab;
        if (c->wrong) return;
        c->g->ids[c->at] = (int32_t)c->id;
    }
}

/* The files are open. */
static int ids_fill(logits *g, ids_call *c)
{
    g->tokens = c->files.n;
    if (g->tokens == 0) return cli_fail("--ids %s has no tokens", g->o.ids);
    g->ids = (int32_t *)malloc((size_t)g->tokens * sizeof *g->ids);
    if (g->ids == NULL) return cli_fail("out of memory: %lld tokens", (long long)g->tokens);
    if (mapped_read(ids_body, c) != 0) return cli_fail("--ids %s became shorter while it was read", g->o.ids);
    if (!c->wrong) return 0;
    return cli_fail("--ids %s: token %lld is %lld, the vocabulary has %lld", g->o.ids, (long long)c->at,
                    (long long)c->id, (long long)g->layout.config.vocab);
}

static int ids_read(logits *g)
{
    ids_call c;
    int bad;
    memset(&c, 0, sizeof c);
    c.g = g;
    bad = tokens_open(&c.files, "--ids", g->o.ids, NULL, TOKEN_AUTO) != 0 || ids_fill(g, &c) != 0;
    tokens_close(&c.files);
    return -bad;
}

/* ---- a rank ---- */

/* One row of the device's logits into its place of the result; not there in a dry run. */
static upipe_status logits_store(logits *g, upipe_ctx *c, upipe_view buf, int64_t row, int64_t token)
{
    if (g->out == NULL) return UPIPE_OK;
    return c->ops->copy(c, g->out + token * buf.d, upipe_view_rows(buf, row, 1).data, (size_t)buf.d * 4);
}

/* This rank's tokens. */
static upipe_status logits_tokens(const logits *g, const model_rank *r)
{
    int32_t *to = r->tokens;
    int64_t i, n;
    int part;
    for (part = 0; part < model_parts(r->m); ++part) {
        const upipe_shard s = model_shard(r->m, part);
        for (i = 0; i < s.n; i += n, to += n) { /* neighbours in one message */
            n = s.step > 1 ? 1 : (i < s.piece[0].n ? s.piece[0].n : s.n) - i;
            UPIPE_TRY(r->c->ops->copy(r->c, to, g->ids + upipe_shard_pos(&s, i), (size_t)n * 4));
        }
    }
    return UPIPE_OK;
}

/* This rank's logits, row by row of the result. */
static upipe_status logits_rank(logits *g, const model *m, upipe_ctx *c, upipe_mem *second)
{
    int64_t vocab = g->layout.config.vocab, row, i;
    upipe_view x, buf;
    llama_state state;
    model_rank r;
    void *data;
    int head;
    memset(&r, 0, sizeof r);
    r.m = m;
    r.c = c;
    r.second = second;
    llama_state_init(&state, &g->layout, (upipe_dtype)g->o.dtype, 0, 0, 1);
    state.zero[LLAMA_WEIGHTS].weights = g->weights; /* all ranks read the same */
    r.zero = &state.zero[LLAMA_WEIGHTS];
    r.frozen = &state.frozen[LLAMA_WEIGHTS];
    UPIPE_TRY(model_vectors_alloc(&r, (const float *)g->vectors, NULL));
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, (size_t)m->rows * 4, UPIPE_USE_INPUT, "tokens", &c->err));
    r.tokens = (int32_t *)data;
    UPIPE_TRY(logits_tokens(g, &r));
    UPIPE_TRY(model_fwd(&r, &x, 0));
    head = model_unit_of(&r, model_head_kind(&r), -1);
    UPIPE_TRY(model_weights_begin(&r, head, -1));
    UPIPE_TRY(upipe_mem_alloc(c->mem, &data, (size_t)(UPIPE_TILE_LOSS_ROWS * vocab) * 4, UPIPE_USE_LOSS,
                              "logits", &c->err));
    for (row = 0; row < m->rows; row += UPIPE_TILE_LOSS_ROWS) {
        int64_t rows = m->rows - row < UPIPE_TILE_LOSS_ROWS ? m->rows - row : (int64_t)UPIPE_TILE_LOSS_ROWS;
        buf = upipe_view_packed(data, UPIPE_F32, rows, 1, (int32_t)vocab);
        UPIPE_TRY(model_logits(&r, buf, upipe_view_rows(x, row, rows)));
        for (i = 0; i < rows; ++i)
            UPIPE_TRY(
                logits_store(g, c, buf, i, world_is_root(&g->net) ? model_position(m, row + i) : row + i));
    }
    UPIPE_TRY(upipe_mem_free(c->mem, data, &c->err));
    UPIPE_TRY(model_weights_end(&r, head));
    UPIPE_TRY(model_free_block(&r, x));
    UPIPE_TRY(model_vectors_free(&r));
    return upipe_mem_free(c->mem, r.tokens, &c->err);
}

/* The rows of other processes come to rank 0, one of each at a time: all ranks take part in a transfer. */
static upipe_status logits_gather(logits *g, upipe_ctx *c, upipe_comm *all)
{
    const int64_t vocab = g->layout.config.vocab;
    const size_t bytes = (size_t)vocab * sizeof *g->out;
    int64_t row, last = 0;
    int r, n;
    for (r = 0; r < all->ranks; ++r)
        if (g->ranks[r].m.rows > last) last = g->ranks[r].m.rows;
    for (row = 0; row < last; ++row) {
        for (r = 1, n = 0; r < all->ranks; ++r) {
            const model *m = &g->ranks[r].m;
            if (row >= m->rows) continue;
            if (all->rank == 0)
                upipe_msg_add(all->list, &n, r, 1, NULL, 0, 0, g->out + model_position(m, row) * vocab, bytes,
                              bytes);
            else if (all->rank == r)
                upipe_msg_add(all->list, &n, 0, 1, g->out + row * vocab, bytes, bytes, NULL, 0, 0);
        }
        UPIPE_TRY(upipe_comm_start(c, all, all->list, n));
        UPIPE_TRY(upipe_comm_wait(c, all));
    }
    return c->ops->sync(c);
}

static upipe_status logits_rank_main(void *user, int rank, upipe_err *why)
{
    logits *g = (logits *)user;
    struct logits_place *k = &g->ranks[rank];
    upipe_status s;
    upipe_ctx c;
    memset(&c, 0, sizeof c);
    world_use(&g->net, rank, &c);
    s = upipe_comm_barrier(&c, world_all(&g->net, rank)); /* all have started */
    if (s == UPIPE_OK)
        s = pools_open(&k->p, &c, g->o.device, &g->o.how, k->slab_bytes, k->second_bytes, k->blocks_max);
    if (s == UPIPE_OK) s = logits_rank(g, &k->m, &c, &k->p.host);
    if (s == UPIPE_OK && g->net.all != NULL) s = logits_gather(g, &c, g->net.all);
    if (s == UPIPE_OK) s = pools_destroy(&k->p, &c.err);
    *why = c.err;
    return s;
}

/* ---- the run ---- */

static int logits_fail(upipe_status s, const upipe_err *e)
{
    return cli_fail("%s%s", cli_status(s), e->text);
}

/* What the folder holds, and tokens that fit it. */
static int logits_find(logits *g)
{
    llama_config config;
    char path[FILES_PATH];
    upipe_err e;
    memset(&e, 0, sizeof e);
    if (llama_checkpoint_find(g->o.load, g->folder, &e) != 0) return cli_fail("%s", e.text);
    if (files_path(path, g->folder, "config", ".json") != 0) return -1;
    if (llama_config_read(&config, NULL, path, &g->o.ignore_key, &e) != 0) return cli_fail("%s", e.text);
    if (llama_config_is_part(path)) cli_note("%s: of this model the text part alone is read", g->folder);
    options_rope(&g->o, &config);
    if (options_rope_lacks(&g->o, &config) != 0) return -1;
    if (llama_layout_init(&g->layout, &config) != 0)
        return cli_fail("the model's bytes leave 63 bits, or memory is out");
    if (llama_load_check(g->folder, &g->layout, &e) != 0) return cli_fail("%s", e.text);
    if (g->o.load_adapter != NULL && llama_adapter_open(&g->adapter, g->o.load_adapter, &config, &e) != 0)
        return cli_fail("%s", e.text);
    return ids_read(g);
}

/* The weights, where the device reaches them too. */
static int logits_load(logits *g)
{
    size_t bytes = (size_t)g->layout.weights * upipe_dtype_bytes((upipe_dtype)g->o.dtype);
    size_t vector_bytes = (size_t)g->layout.vectors * sizeof(float);
    upipe_ops cpu;
    llama_state state;
    upipe_ctx c;
    upipe_status s;
    memset(&c, 0, sizeof c);
    g->host_weights = malloc(bytes);
    g->host_vectors = malloc(vector_bytes);
    if (g->host_weights == NULL || g->host_vectors == NULL)
        return cli_fail("out of memory: %lld weights", (long long)g->layout.weights);
    llama_state_init(&state, &g->layout, (upipe_dtype)g->o.dtype, 0, 0, 1);
    state.zero[LLAMA_WEIGHTS].weights = g->host_weights;
    state.zero[LLAMA_VECTORS].weights = g->host_vectors;
    products_ops(&cpu);
    c.ops = &cpu;
    s = llama_load_weights(&c, g->folder, &state, g->o.load_adapter != NULL ? &g->adapter : NULL);
    if (s == UPIPE_OK) s = device_resident(g->o.device, &g->weights, bytes, g->host_weights, &c.err);
    if (s == UPIPE_OK) s = device_resident(g->o.device, &g->vectors, vector_bytes, g->host_vectors, &c.err);
    return s == UPIPE_OK ? 0 : logits_fail(s, &c.err);
}

/* The plans, and the ranks' slabs by dry runs of their own code. */
static int logits_plan(logits *g)
{
    upipe_dry *dry = (upipe_dry *)malloc(sizeof *dry);
    setting set = setting_of(&g->o, &g->layout);
    upipe_status s = UPIPE_OK;
    float nothing;
    int r;
    if (dry == NULL) return cli_fail("out of memory");
    g->weights = g->vectors = &nothing; /* for the dry run, which touches nothing */
    memset(&dry->ctx, 0, sizeof dry->ctx);
    set.tokens = g->tokens;
    for (r = 0; r < g->o.how.ranks && s == UPIPE_OK; ++r) {
        struct logits_place *k = &g->ranks[r];
        s = setting_model(&k->m, &set, r, &dry->ctx.err);
        if (s == UPIPE_OK) s = upipe_dry_init(dry, &k->m.plan, &g->ops);
        if (s == UPIPE_OK) s = logits_rank(g, &k->m, &dry->ctx, &dry->host);
        k->slab_bytes = dry->mem.need;
        k->second_bytes = dry->host.need;
        k->blocks_max =
            dry->mem.blocks_peak > dry->host.blocks_peak ? dry->mem.blocks_peak : dry->host.blocks_peak;
    }
    if (s != UPIPE_OK) logits_fail(s, &dry->ctx.err);
    g->weights = g->vectors = NULL;
    free(dry);
    return s == UPIPE_OK ? 0 : -1;
}

/* Rows of the result that a process keeps. */
static int64_t logits_rows(const logits *g, int first)
{
    return first == 0 ? g->tokens : g->ranks[first].m.rows;
}

/* Everything of this machine at once: the weights, the ranks' slabs, the result. */
static int logits_check_memory(const logits *g)
{
    const int processes = g->net.all != NULL, first = g->net.near_first;
    const int ranks = g->net.near;
    double have, need = (double)g->layout.vectors * 4;
    double slabs = 0, second = 0, rows = 0;
    int r;
    if (cli_memory(&have) != 0) return -1;
    for (r = first; r < first + ranks; ++r) {
        slabs += (double)g->ranks[r].slab_bytes;
        second += (double)g->ranks[r].second_bytes;
        if (processes || r == 0) rows += (double)logits_rows(g, r);
    }
    need += (double)g->layout.weights * (double)upipe_dtype_bytes((upipe_dtype)g->o.dtype);
    if (processes) need *= ranks;
    if (device_has_buf(g->o.device, slabs + need) != 0) return -1;
    need += second + rows * (double)g->layout.config.vocab * 4;
    if (g->o.device == DEVICE_CPU) need += slabs;
    if (need <= have) return 0;
    return cli_fail("out of memory: the run takes %.1f GiB of this machine's %.1f GiB", need / (1 << 30),
                    have / (1 << 30));
}

static int logits_run(logits *g)
{
    const int64_t rows = logits_rows(g, g->net.first);
    void *out = NULL;
    upipe_status s;
    upipe_err e;
    int r, bad;
    memset(&e, 0, sizeof e);
    s = device_shared(g->o.device, &out, (size_t)(rows * g->layout.config.vocab) * sizeof *g->out, &e);
    g->out = (float *)out;
    bad = s != UPIPE_OK ? cli_fail("%s%lld tokens' logits: %s", cli_status(s), (long long)rows, e.text) : 0;
    if (world_agree(&g->net, bad) != 0) return -1;
    s = world_split(&g->net, g->o.how.ranks / g->o.how.ring, g->o.how.ring, &e);
    if (s != UPIPE_OK) return logits_fail(s, &e);
    bad = world_run(&g->net, logits_rank_main, g, "");
    world_join(&g->net);
    if (world_broken(&g->net)) return -1; /* peers may still access the slabs: world_end ends the process */
    for (r = g->net.first; r < g->net.first + g->net.here; ++r) {
        s = pools_close(&g->ranks[r].p, &e);
        if (!bad && s != UPIPE_OK) bad = logits_fail(s, &e);
    }
    return world_agree(&g->net, bad);
}

/* A result that is no number is none. */
static int logits_check(const logits *g)
{
    const int64_t vocab = g->layout.config.vocab;
    int64_t i;
    for (i = 0; i < g->tokens * vocab; ++i)
        if (!isfinite(g->out[i]))
            return cli_fail("the logits of token %lld are not finite; nothing was written",
                            (long long)(i / vocab));
    return 0;
}

/* A name that cannot be written, or that is another file's, is found before the work. */
static int logits_reserve(const logits *g, files *all)
{
    const char *const folders[] = {g->folder, g->o.load_adapter};
    upipe_err e;
    int reads, bad, i;
    if (!world_is_root(&g->net)) return 0;
    if (files_spare(g->o.out, "--ids", g->o.ids) != 0) return -1;
    for (i = 0; i < 2; ++i) {
        reads = folders[i] != NULL ? llama_reads(folders[i], g->o.out, &e) : 0;
        if (reads < 0) return cli_fail("%s", e.text);
        if (reads) return cli_fail("%s would replace a file of the model in %s", g->o.out, folders[i]);
    }
    files_begin(all);
    bad = files_reserve(all, g->o.out);
    return files_abandon(all) != 0 ? -1 : bad;
}

/* All processes read the same tokens, for the same model. */
static int logits_same(logits *g)
{
    uint64_t hash = upipe_hash_bytes(UPIPE_HASH, &g->layout.config, sizeof g->layout.config);
    hash = upipe_hash_bytes(hash, g->ids, (size_t)g->tokens * sizeof *g->ids);
    return world_same(&g->net, "--ids or --load finds something else here", hash);
}

static int logits_main(logits *g, files *all)
{
    int bad = logits_find(g);
    if (world_agree(&g->net, bad) != 0 || logits_same(g) != 0) return -1;
    bad = logits_plan(g) != 0 || logits_check_memory(g) != 0 || logits_reserve(g, all) != 0;
    if (world_agree(&g->net, -bad) != 0) return -1;
    if (world_agree(&g->net, logits_load(g)) != 0 || logits_run(g) != 0) return -1;
    if (!world_is_root(&g->net)) return 0;
    if (logits_check(g) != 0) return -1;
    model_logits_cap(&g->layout.config, g->out, g->tokens * g->layout.config.vocab);
    files_begin(all);
    if (files_npy(all, g->o.out, g->out, g->tokens, g->layout.config.vocab) != 0) return -1;
    return files_commit(all);
}

int main(int argc, char **argv)
{
    logits *g = (logits *)calloc(1, sizeof *g);
    files *all = (files *)calloc(1, sizeof *all);
    int status = 1 + EXIT_RUN;
    cli_start();
    if (g == NULL || all == NULL) {
        cli_fail("out of memory");
    } else {
        world_mute();
        signal(SIGPIPE, SIG_IGN);
        signal(SIGXFSZ, SIG_IGN);
        status = options_read(&g->o, &g->net, argc, argv);
        if (status == 0) device_table(g->o.device, &g->ops);
        if (status == 0) status = 1 + (logits_main(g, all) == 0 ? 0 : EXIT_RUN);
        files_abandon(all);
        status = 1 + world_end(&g->net, status - 1); /* peers may access the result until here */
        llama_layout_free(&g->layout);
        llama_adapter_close(&g->adapter);
        device_resident_free(g->o.device, g->weights, g->host_weights);
        device_resident_free(g->o.device, g->vectors, g->host_vectors);
        free(g->host_weights);
        free(g->host_vectors);
        free(g->ids);
        device_shared_free(g->o.device, g->out);
    }
    free(g);
    free(all);
    return status - 1;
}
