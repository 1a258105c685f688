/* compare.c -- one attention block over a real text, with one method of context parallelism after the other
 *
 *     compare --heads 16 --kv-heads 4 --tokens 8192 --json out.json
 *     compare --method ulysses --method zigzag --method usp --window 512
 *
 *     mpirun -np 4 compare_mpi --transport mpi --tokens 8192
 *
 * Ranks that are threads share this machine's memory: "less memory" is each rank's slab, not the process' size. Each
 * process makes the inputs from the seed; rank 0 has the reference and the results, reports and writes. Nothing is
 * written until every method has run, and then all files appear or none.
 */
#define PROGRAM "compare"

#include "upipe/upipe.h"

#include <signal.h>

#include "../common/cli.h"
#include "../common/files.h"
#include "../common/rounding.h"
#include "../common/trace.h"
#include "inputs.h"
#include "setup.h"
#include "options.h"
#include "oracle.h"
#include "promise.h"
#include "report.h"

typedef struct compare {
    options o;
    struct world net;
    upipe_ops ops; /* where the ranks compute; for plans */
    upipe_ops cpu; /* for inputs */
    inputs in;
    method methods[METHODS];
    files all;
    oracle_results ref;
    int shows_progress;
} compare;

static void progress(const compare *c, const char *what, const char *of)
{
    if (c->shows_progress) fprintf(stderr, PROGRAM ": %s%s ...\n", what, of);
}

/* Says no to what this machine's memory cannot hold, rather than to be killed for it. Before the dry runs the blocks'
 * own bytes are not known yet: what stays around them is the least. */
static int check_memory(const compare *c, const char *least)
{
    double have;
    const method *first = &c->methods[0];
    const upipe_plan_desc *d = &method_plan_of(first)->desc;
    const int copies = c->net.all != NULL ? c->net.near : 1; /* of the inputs */
    double need = copies * (method_token_bytes(first) + method_weight_bytes(first)), most = 0;
    int i;
    if (cli_memory(&have) != 0) return -1;
    for (i = 0; i < c->o.methods.n; ++i) {
        need += method_kept_bytes(&c->methods[i]);
        if (method_run_bytes(&c->methods[i]) > most) most = method_run_bytes(&c->methods[i]);
    }
    need += most;
    if (c->o.check == CHECK_ON && c->net.near_first == 0)
        need += 8 * (double)d->tokens * (double)d->batch *
                (2.0 * d->heads * d->head_dim + (double)d->heads * (d->v_dim + 1) +
                 2.0 * d->kv_heads * (d->head_dim + d->v_dim) + (double)d->model_dim);
    if (need <= have) return 0;
    return cli_fail("out of memory: the ranks share this machine's %.1f GiB, and the run takes %s%.1f GiB",
                    have / (1 << 30), least, need / (1 << 30));
}

enum { DUMPS = 12 };

static const char *const dump_names[DUMPS] = {"x",  "wq",  "wk",  "wv",  "out",   "dout",
                                              "dx", "dwq", "dwk", "dwv", "sinks", "dsinks"};

/* The last two are written if there are sinks. */
static int dumps(const compare *c)
{
    return c->o.sinks ? DUMPS : DUMPS - 2;
}

static int make_folders(compare *c)
{
    char folder[FILES_PATH];
    int i;
    if (c->o.trace != NULL && files_folder(&c->all, c->o.trace) != 0) return -1;
    if (c->o.dump == NULL) return 0;
    if (files_folder(&c->all, c->o.dump) != 0) return -1;
    for (i = 0; i < c->o.methods.n; ++i)
        if (files_path(folder, c->o.dump, c->methods[i].name, "") != 0 || files_folder(&c->all, folder) != 0)
            return -1;
    return 0;
}

static int reserve_output(compare *c, const char *path)
{
    return files_spare(path, "--data", c->o.data) != 0 ? -1 : files_reserve(&c->all, path);
}

/* Folders and files that cannot be written are found now; nothing of them stays. */
static int reserve_outputs(compare *c)
{
    char path[FILES_PATH], folder[FILES_PATH];
    int i, k;
    if (make_folders(c) != 0) return -1;
    if (c->o.json != NULL && reserve_output(c, c->o.json) != 0) return -1;
    for (i = 0; i < c->o.methods.n; ++i) {
        const char *name = c->methods[i].name;
        if (c->o.trace != NULL &&
            (files_path(path, c->o.trace, name, ".json") != 0 || reserve_output(c, path) != 0))
            return -1;
        if (c->o.dump == NULL) continue;
        if (files_path(folder, c->o.dump, name, "") != 0) return -1;
        for (k = 0; k < dumps(c); ++k)
            if (files_path(path, folder, dump_names[k], ".npy") != 0 || reserve_output(c, path) != 0)
                return -1;
    }
    return 0;
}

typedef struct distance {
    double error, truth; /* sums of squares */
} distance;

static void add_distance(distance *d, double got, double truth)
{
    d->error += (got - truth) * (got - truth);
    d->truth += truth * truth;
}

/* Relative L2. */
static double relative(distance d)
{
    return d.error == 0 ? 0 : sqrt(d.error / d.truth);
}

/* What the distance of dsinks is relative to, squared: its terms, as they may cancel, above all where there are few
 * heads. A term is an element of out times that of dout, times the sink's share of the softmax, which is 1 at most
 * where there is no reference. Roundings of the terms walk at random, so the squares are added. */
static double sinks_terms(const compare *c)
{
    const int64_t dim = c->o.v_dim;
    int64_t n, i;
    const float *out = method_result(&c->methods[0], RESULT_OUT, &n);
    double sum = 0;
    for (i = 0; i < n; ++i) {
        const double share = c->ref.sink != NULL ? c->ref.sink[i / dim] : 1;
        const double term = share * (double)out[i] * (double)c->in.dout[i];
        sum += term * term;
    }
    return sum;
}

static void measure_errors(const compare *c, method *m)
{
    const double *const truth[RESULTS] = {c->ref.out,   c->ref.dx,    c->ref.dw[0],
                                          c->ref.dw[1], c->ref.dw[2], c->ref.dsinks};
    distance d[MEASURES];
    int which;
    memset(d, 0, sizeof d);
    for (which = 0; which < RESULTS; ++which) {
        int64_t n, i;
        const float *got = method_result(m, (result)which, &n);
        for (i = 0; i < n; ++i)
            add_distance(&d[result_measure((result)which)], (double)got[i], truth[which][i]);
    }
    d[MEASURE_DSINKS].truth = sinks_terms(c);
    for (which = 0; which < MEASURES; ++which) m->err[which] = relative(d[which]);
}

static int run_reference(compare *c)
{
    oracle_inputs in;
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    int which;
    progress(c, "the reference in double precision", "");
    memset(&in, 0, sizeof in);
    in.x = c->in.x;
    for (which = 0; which < 3; ++which) in.w[which] = c->in.w[which];
    in.dout = c->in.dout;
    in.tokens = c->o.tokens;
    in.batch = c->o.batch;
    in.dim = c->o.model_dim;
    in.heads = c->o.heads;
    in.kv_heads = c->o.kv_heads;
    in.head_dim = c->o.head_dim;
    in.v_dim = c->o.v_dim;
    in.full = c->o.full;
    in.window = c->o.window;
    in.cu_seqlens = c->o.borders;
    in.cu_seqlens_n = c->o.borders_n;
    in.softcap = (double)(float)c->o.softcap; /* as the library rounds it */
    in.sinks = c->in.sinks;
    in.theta = c->o.rope ? c->o.rope_theta : 0;
    in.rates = c->methods[0].ranks[0].layer.rope_rates;
    in.factor = c->methods[0].ranks[0].rates.factor;
    in.threads = processors < 1 ? 1 : processors > ORACLE_THREADS_MAX ? ORACLE_THREADS_MAX : (int)processors;
    if (oracle_run(&in, &c->ref) == 0) return 0;
    return cli_fail("the reference in double precision found no memory or no threads");
}

static void measure_beside(const compare *c, method *m)
{
    const method *first = &c->methods[0];
    distance d[MEASURES];
    int which;
    memset(d, 0, sizeof d);
    for (which = 0; which < RESULTS; ++which) {
        int64_t n, i;
        const float *got = method_result(m, (result)which, &n),
                    *other = method_result(first, (result)which, &n);
        for (i = 0; i < n; ++i)
            add_distance(&d[result_measure((result)which)], (double)got[i], (double)other[i]);
        m->same[which] = n == 0 || memcmp(got, other, (size_t)n * sizeof *got) == 0;
    }
    d[MEASURE_DSINKS].truth = sinks_terms(c);
    for (which = 0; which < MEASURES; ++which) m->apart[which] = relative(d[which]);
}

/* All processes together: the others wait while rank 0 computes the reference. */
static int run_methods(compare *c)
{
    const int is_root = world_is_root(&c->net);
    int i, k;
    if (world_agree(&c->net, is_root && c->o.check == CHECK_ON ? run_reference(c) : 0) != 0) return -1;
    for (i = 0; i < c->o.methods.n; ++i) {
        method *m = &c->methods[i];
        progress(c, "forward and backward with ", m->name);
        if (method_run(m, &c->in) != 0) return -1;
        if (!is_root) continue;
        for (k = 0; k < MEASURES; ++k) m->err[k] = NAN;
        if (c->o.check == CHECK_ON) measure_errors(c, m);
        if (!c->o.sinks) m->err[MEASURE_DSINKS] = NAN;
        measure_beside(c, m);
    }
    return 0;
}

static void write_trace_rank(void *user, FILE *f, int r)
{
    const method *m = (const method *)user;
    trace_write(m->ranks[r].events, m->ranks[r].events_n, f, r, r == 0);
}

/* All processes together; rank 0's writes, unless it is bad there already. */
static int write_trace(compare *c, method *m, int bad)
{
    char path[FILES_PATH];
    FILE *f = NULL;
    int r;
    if (world_is_root(&c->net) && bad == 0) {
        bad = files_path(path, c->o.trace, m->name, ".json");
        if (bad == 0) f = files_open(&c->all, path);
        if (f == NULL) bad = -1;
    }
    if (f != NULL) fprintf(f, "[\n");
    for (r = 0; r < c->o.how.ranks; ++r)
        if (world_text(&c->net, f, r, write_trace_rank, m) != 0) bad = -1;
    if (f == NULL) return bad;
    fprintf(f, "]\n");
    return files_close(&c->all, f) != 0 ? -1 : bad;
}

static int write_dump(compare *c, const method *m)
{
    const inputs *in = &c->in;
    float *const *dw = m->ranks[0].grads;
    const float *data[DUMPS] = {in->x, in->w[0], in->w[1], in->w[2], m->out,    in->dout,
                                m->dx, dw[0],    dw[1],    dw[2],    in->sinks, dw[3]};
    const int64_t *w = in->width, all = in->rows, dim = in->dim, out = in->out_width, heads = c->o.heads;
    const int64_t rows[DUMPS] = {all, w[0], w[1], w[2], all, all, all, w[0], w[1], w[2], 1, 1};
    const int64_t cols[DUMPS] = {dim, dim, dim, dim, out, out, dim, dim, dim, dim, heads, heads};
    char folder[FILES_PATH], path[FILES_PATH];
    int k;
    if (files_path(folder, c->o.dump, m->name, "") != 0) return -1;
    for (k = 0; k < dumps(c); ++k)
        if (files_path(path, folder, dump_names[k], ".npy") != 0 ||
            files_npy(&c->all, path, data[k], rows[k], cols[k]) != 0)
            return -1;
    return 0;
}

/* All processes together, as traces come from each. Nothing is written where it is bad already. */
static int write_outputs(compare *c, int bad)
{
    const int is_root = world_is_root(&c->net);
    int i;
    files_begin(&c->all);
    if (is_root && bad == 0) bad = make_folders(c);
    for (i = 0; i < c->o.methods.n && c->o.trace != NULL; ++i) bad = write_trace(c, &c->methods[i], bad);
    if (!is_root || bad != 0) return bad;
    if (c->o.json != NULL) {
        FILE *f = files_open(&c->all, c->o.json);
        if (f == NULL) return -1;
        report_json(f, c->methods, c->o.methods.n, &c->o);
        if (files_close(&c->all, f) != 0) return -1;
    }
    for (i = 0; i < c->o.methods.n && c->o.dump != NULL; ++i)
        if (write_dump(c, &c->methods[i]) != 0) return -1;
    return files_commit(&c->all);
}

/* One rank's bytes, planned and measured. */
static int check_rank(const method *m, int r)
{
    static const char *const ways[SENT_WAYS] = {"sent to its team", "sent to its ring",
                                                "moved between device and host"};
    const method_bytes *plan = &m->ranks[r].planned, *got = &m->ranks[r].measured;
    int phase, way, bad = 0;
    for (phase = 0; phase < UPIPE_PHASES; ++phase) {
        if (got->phase[phase] == plan->phase[phase]) continue;
        bad = cli_fail("%s: rank %d held %zu bytes in %s, the plan says %zu", m->name, r, got->phase[phase],
                       upipe_phase_name(phase), plan->phase[phase]);
    }
    if (got->intermediate != plan->intermediate)
        bad = cli_fail("%s: rank %d held %zu bytes of Q, K and V in the forward, the plan says %zu", m->name,
                       r, got->intermediate, plan->intermediate);
    if (got->host != plan->host)
        bad = cli_fail("%s: rank %d held %zu bytes of the host's pool, the plan says %zu", m->name, r,
                       got->host, plan->host);
    for (way = 0; way < SENT_WAYS; ++way)
        for (phase = 0; phase < 2; ++phase) {
            if (got->sent[way][phase] == plan->sent[way][phase]) continue;
            bad = cli_fail("%s: rank %d: %lld bytes %s %s, the plan says %lld", m->name, r,
                           (long long)got->sent[way][phase], ways[way], phase == 0 ? "forward" : "backward",
                           (long long)plan->sent[way][phase]);
        }
    return bad;
}

/* Errors, and the distance from the first method's results: two sound ones are at most twice as far apart. NaN is not
 * sound. */
static int check_errors(const compare *c, const method *m, double limit)
{
    int k, bad = 0;
    for (k = 0; k < (m->o->sinks ? MEASURES : MEASURE_DSINKS); ++k) {
        if (c->o.check == CHECK_ON && !(m->err[k] <= limit))
            bad = cli_fail("%s: the relative error of %s is %.2e; at most %.1e is sound", m->name,
                           measure_names[k], m->err[k], limit);
        if (!(m->apart[k] <= 2 * limit))
            bad = cli_fail("%s: %s is %.2e from what %s gives, relative; at most %.1e is sound", m->name,
                           measure_names[k], m->apart[k], c->methods[0].name, 2 * limit);
    }
    return bad;
}

static int check_bits(const method *first, const method *m)
{
    int which, bad = 0;
    for (which = 0; which < RESULTS; ++which)
        if (!m->same[which] && promise_bits(first, m, (result)which))
            bad = cli_fail("%s: %s has other bits than %s gives, which their plans rule out", m->name,
                           result_names[which], first->name);
    return bad;
}

/* What the library promises, held against what was measured. */
static int check_promises(const compare *c)
{
    const double limit = rounding_block(&method_plan_of(&c->methods[0])->desc);
    int i, r, bad = 0;
    for (i = 0; i < c->o.methods.n; ++i) {
        const method *m = &c->methods[i];
        for (r = 0; r < c->o.how.ranks; ++r)
            if (check_rank(m, r) != 0) bad = -1;
        if (check_errors(c, m, limit) != 0 || check_bits(&c->methods[0], m) != 0) bad = -1;
    }
    return bad;
}

/* Everything that can be refused before there are inputs. */
static int run_plan(compare *c)
{
    int i, status, overlaps = 0;
    for (i = 0; i < c->o.methods.n; ++i) {
        method *m = &c->methods[i];
        m->kind = &method_kinds[c->o.methods.at[i]];
        m->name = m->kind->name;
        m->o = &c->o;
        m->ops = &c->ops;
        m->net = &c->net;
        if (method_plan(m) != 0) return -1;
        overlaps |= method_on_side_stream(m, &m->ranks[0]);
    }
    if (c->o.how.overlap && !overlaps)
        return cli_fail("--overlap would have no effect: no method here has more than one stage or segment");
    /* A dry run loops over every tile of tokens: check their number first. */
    if (inputs_check(&c->o) != 0 || check_memory(c, "at least ") != 0) return -1;
    progress(c, "the slabs, by dry runs", "");
    for (i = 0; i < c->o.methods.n; ++i)
        if (method_dry(&c->methods[i]) != 0) return -1;
    if (check_memory(c, "") != 0) return -1;
    if (!world_is_root(&c->net)) return 0;
    files_begin(&c->all);
    status = reserve_outputs(c);
    return files_abandon(&c->all) != 0 ? -1 : status;
}

/* All processes have made the same inputs. */
static int run_same(compare *c)
{
    const inputs *in = &c->in;
    uint64_t hash = upipe_hash_bytes(UPIPE_HASH, in->x, (size_t)(in->rows * in->dim) * sizeof *in->x);
    hash = upipe_hash_bytes(hash, in->dout, (size_t)(in->rows * in->out_width) * sizeof *in->dout);
    return world_same(&c->net, "--data finds something else here", hash);
}

static int run(compare *c)
{
    int status = 0, bad = 0;
    if (world_agree(&c->net, run_plan(c)) != 0) return -1;
    progress(c, "embeddings and weights for ", c->o.data);
    if (world_agree(&c->net, inputs_make(&c->in, &c->o, &c->cpu)) != 0 || run_same(c) != 0) return -1;
    if (run_methods(c) != 0) return -1;
    if (world_is_root(&c->net)) {
        report_table(c->methods, c->o.methods.n, &c->o);
        bad = cli_flush("the table");
        if (bad == 0) status = check_promises(c);
    }
    return write_outputs(c, bad) != 0 ? -1 : status;
}

int main(int argc, char **argv)
{
    compare *c = (compare *)calloc(1, sizeof *c);
    int i, status;
    cli_start();
    if (c == NULL) {
        cli_fail("out of memory");
        return EXIT_RUN;
    }
    world_mute();
    signal(SIGPIPE, SIG_IGN); /* what cannot be written is said, and cleaned up after */
    signal(SIGXFSZ, SIG_IGN);
    status = options_read(&c->o, &c->net, argc, argv);
    if (status == 0) {
        if (c->o.data == NULL) c->o.data = cli_book();
        c->shows_progress = world_is_root(&c->net) && (c->o.progress || isatty(STDERR_FILENO));
        products_ops(&c->cpu);
        device_table(c->o.device, &c->ops);
        status = run(c) == 0 ? 0 : EXIT_RUN;
        files_abandon(&c->all);
    } else {
        --status;
    }
    status = world_end(&c->net, status); /* peers may access the slabs until here */
    for (i = 0; i < c->o.methods.n; ++i) method_free(&c->methods[i]);
    options_free(&c->o);
    inputs_free(&c->in);
    oracle_free(&c->ref);
    free(c);
    return status;
}
