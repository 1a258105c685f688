/* machine.h -- what a machine has and how fast it is: presets, and files that say the same
 *
 *     machine m;
 *     machine_find(&m, "h100x8");        a preset, or the path of a file that machine_write wrote
 *
 * A file is a JSON object: "name", "base" (a preset for what is not said), "ranks", "ranks_per_node", "gpu_memory",
 * "gpu_reserve", "host_memory" (sizes with their units), and under "rates" for each name below a number, or an object
 * {"value": number, "origin": "where it is from"}. Rates are those that a program reaches, not those of data sheets.
 */
#ifndef PLAN_MACHINE_H
#define PLAN_MACHINE_H

#include "../common/cli.h"
#include "../common/json.h"
#include "../common/options.h"
#include "../train/files/config_file.h"
#include "upipe/net/upipe_net_threads.h"

/* machine_rate -- FLOP/s, bytes/s and seconds of one rank; but for UPDATE
 *   ATTN_FWD ATTN_BWD DENSE   of attention's kernels and of other products
 *   A2A A2A_NODES    all-to-all within a node, and what of it leaves the node
 *   RING RING_NODES  keys and values to a neighbour, within a node and beyond; sums of gradients too
 *   HOST             copies between device and host that run beside the kernels
 *   SEGMENTS         the same where the kernels wait for them: segments of the sequence
 *   MERGE            partial results of a ring's steps, through the device's memory
 *   STAGE            seconds of starting a stage, one pass;  LAYER  of starting a layer's kernels, all passes
 *   WAIT             for the slowest rank, as a part of attention's time: in the all-to-all, or in a ring
 *   NATIVE           attention of PyTorch's own ring, as a part of ATTN_FWD and ATTN_BWD
 *   UPDATE           the host's memory as a CPU's AdamW reads and writes it, of a node: its ranks share it
 */
enum {
    MACHINE_ATTN_FWD,
    MACHINE_ATTN_BWD,
    MACHINE_DENSE,
    MACHINE_A2A,
    MACHINE_A2A_NODES,
    MACHINE_RING,
    MACHINE_RING_NODES,
    MACHINE_HOST,
    MACHINE_SEGMENTS,
    MACHINE_MERGE,
    MACHINE_STAGE,
    MACHINE_LAYER,
    MACHINE_WAIT,
    MACHINE_NATIVE,
    MACHINE_UPDATE,
    MACHINE_RATES
};

enum { MACHINE_ORIGIN = 128 };

typedef struct machine {
    char name[64];
    const char *card; /* of attention's published rates */
    int ranks, ranks_node;
    int64_t gpu, reserve; /* bytes of a rank's device, 0: it shares the host's; of these not for tensors */
    int64_t host;         /* bytes of a node */
    double rate[MACHINE_RATES];
    char origin[MACHINE_RATES][MACHINE_ORIGIN];
} machine;

/* Of rates in a file: times stay finite. */
#define MACHINE_RATE_MIN 1e-12
#define MACHINE_RATE_MAX 1e24
#define MACHINE_GIB      (INT64_C(1) << 30)
#define MACHINE_FIT      "fitted on the paper's Llama3-8B tables of 8 GPUs"
#define MACHINE_LINK     "400 Gbit/s a GPU, the paper's section 5.1"

/* The paper's machine. The fitted rates are one least-squares fit of relative errors over the paper's tables of
 * Llama3-8B on 8 GPUs (throughput, runtime, batch, SAO, SAC: 104 cells), as bench/paper.py makes it; they hold all that
 * a training of its time lost. */
static const struct {
    const char *name;
    double value;
    const char *origin;
} machine_rates[MACHINE_RATES] = {
    {"attention_forward_flops", 690e12, MACHINE_FIT " (its runtime table: 651 to 713e12)"},
    {"attention_backward_flops", 604e12, MACHINE_FIT " (its runtime table: 586 to 613e12)"},
    {"dense_flops", 462e12, MACHINE_FIT},
    {"all_to_all_bytes", 81e9, MACHINE_FIT},
    {"all_to_all_bytes_nodes", 50e9, MACHINE_LINK},
    {"ring_bytes", 300e9, "of 450 GB/s of NVLink one way, assumed"},
    {"ring_bytes_nodes", 50e9, MACHINE_LINK},
    {"host_link_bytes", 28.4e9, MACHINE_FIT ": with and without activations on the host"},
    {"segments_link_bytes", 5.28e9, MACHINE_FIT ": FPDT's"},
    {"ring_merge_bytes", 375e9, MACHINE_FIT ": those of Ring"},
    {"stage_seconds", 0.41e-3, MACHINE_FIT ": UPipe's against Ulysses'"},
    {"layer_seconds", 9.7e-3, MACHINE_FIT},
    {"wait_part", 0.011, MACHINE_FIT ": all-to-all beyond 512K"},
    {"native_ring_attention_part", 0.508, MACHINE_FIT ": those of Native PyTorch"},
    {"host_update_bytes", 200e9, "of a node, assumed; --calibrate measures"}};

#define MACHINE_SHEET "h100x8's, by the ratio of the data sheets' dense bf16 rates, links or memory"

/* A card's memory is its data sheet's. Without NVLink ranks trade over PCIe. */
static const struct {
    const char *name, *card; /* card: whose attention rates it has */
    int ranks_node;
    int64_t gpu, host;
    double speed, link, pcie, memory; /* against an H100: 989 TFLOP/s, 450 and 64 GB/s one way, 3,350 GB/s */
    const char *why;
} machine_cards[] = {
    {"h100", "h100", 8, 80, 1945, 1, 1, 1, 1, NULL}, /* 1.9 TiB a node, the paper's section 5.1 */
    {"h100-96g", "h100", 8, 95, 1945, 1, 1, 1, 1, "as h100x8, though its memory is slower"},
    {"h200", "h100", 8, 140, 1945, 1, 1, 1, 1, "as h100x8: the same processor"},
    {"a100", "a100", 8, 80, 1024, 312.0 / 989, 0.5, 0.5, 0.5,
     "h100x8's, by the ratio of the data sheets' bf16 rates or links"},
    {"b200", "b200", 8, 178, 1945, 2250.0 / 989, 2, 1, 8000.0 / 3350, MACHINE_SHEET}, /* 192 GB */
    {"rtxpro6000", "rtxpro6000", 8, 96, 1024, 503.8 / 989, 64.0 / 450, 1, 1597.0 / 3350, MACHINE_SHEET},
    {"l40s", "l40s", 8, 48, 1024, 362.05 / 989, 32.0 / 450, 0.5, 864.0 / 3350, MACHINE_SHEET},
    {"5090", "5090", 8, 32, 1024, 209.5 / 989, 64.0 / 450, 1, 1792.0 / 3350, MACHINE_SHEET},
    {"4090", "4090", 8, 24, 512, 165.2 / 989, 32.0 / 450, 0.5, 1008.0 / 3350, MACHINE_SHEET},
    {"cpu", "cpu", 8, 0, 0, 60e9 / 664e12, 0.1, 0.1, 0.1, "assumed; --calibrate measures"}};

enum { MACHINE_CARDS = sizeof machine_cards / sizeof *machine_cards };

/* The card of a name like h100x16, and its number; a CPU has none. -1: there is no such machine. */
static inline int machine_card(const char *name, int *ranks)
{
    const char *x = strrchr(name, 'x');
    const size_t used = x != NULL ? (size_t)(x - name) : strlen(name);
    int64_t n = 0;
    int i = 0;
    while (i < MACHINE_CARDS &&
           (strlen(machine_cards[i].name) != used || strncmp(machine_cards[i].name, name, used) != 0))
        ++i;
    if (i == MACHINE_CARDS || (x == NULL) != (machine_cards[i].gpu == 0)) return -1;
    if (x != NULL && (number_whole(x + 1, &n) != 0 || n < 1 || n > FLAG_RANKS_MAX)) return -1;
    *ranks = x != NULL ? (int)n : machine_cards[i].ranks_node;
    return i;
}

/* 0; -1: there is none of this name; or as a flag's reader, where what it is cannot be found out. */
static inline int machine_preset(machine *m, const char *name)
{
    double host;
    int ranks, k, i = machine_card(name, &ranks);
    if (i < 0) return -1;
    host = (double)(machine_cards[i].host * MACHINE_GIB);
    if (machine_cards[i].gpu == 0 && cli_memory(&host) != 0) return 1 + EXIT_RUN;
    memset(m, 0, sizeof *m);
    snprintf(m->name, sizeof m->name, "%s", name);
    m->card = machine_cards[i].card;
    m->ranks = ranks;
    m->ranks_node = ranks < machine_cards[i].ranks_node ? ranks : machine_cards[i].ranks_node;
    m->gpu = machine_cards[i].gpu * MACHINE_GIB;
    m->reserve = m->gpu > 0 ? 5 * MACHINE_GIB : 0; /* context, NCCL, fragmentation */
    m->host = (int64_t)host;
    for (k = 0; k < MACHINE_RATES; ++k) {
        const int own = k == MACHINE_UPDATE && m->gpu > 0; /* the host's, whatever the cards are */
        const double factor = own                                          ? 1
                              : k <= MACHINE_DENSE                         ? machine_cards[i].speed
                              : k == MACHINE_HOST || k == MACHINE_SEGMENTS ? machine_cards[i].pcie
                              : k == MACHINE_MERGE || k == MACHINE_UPDATE  ? machine_cards[i].memory
                              : k < MACHINE_MERGE                          ? machine_cards[i].link
                                                                           : 1;
        m->rate[k] = machine_rates[k].value * factor;
        snprintf(m->origin[k], MACHINE_ORIGIN, "%s",
                 machine_cards[i].why != NULL && !own ? machine_cards[i].why : machine_rates[k].origin);
    }
    return 0;
}

static inline int machine_rate_known(double rate)
{
    return rate >= MACHINE_RATE_MIN && rate <= MACHINE_RATE_MAX;
}

static inline int machine_rate(machine *m, const char *path, const char *name, json_t *rate)
{
    const json_t *value = json_is_object(rate) ? json_object_get(rate, "value") : rate,
                 *origin = json_object_get(rate, "origin");
    const char *key;
    json_t *other;
    int k = 0;
    while (k < MACHINE_RATES && strcmp(name, machine_rates[k].name) != 0) ++k;
    if (k == MACHINE_RATES) return cli_refuse("%s: there is no rate %s", path, name);
    json_object_foreach(rate, key, other) /* none in a number */
    {
        if (other != value && other != origin) return cli_refuse("%s: there is no %s in a rate", path, key);
    }
    if (origin != NULL && !json_is_string(origin)) return cli_refuse("%s: origin is no string", path);
    if (!json_is_number(value) || !machine_rate_known(json_number_value(value)))
        return cli_refuse("%s: %s wants a number from %g to %g", path, name, MACHINE_RATE_MIN,
                          MACHINE_RATE_MAX);
    m->rate[k] = json_number_value(value);
    snprintf(m->origin[k], MACHINE_ORIGIN, "%s", origin != NULL ? json_string_value(origin) : path);
    return 0;
}

/* A key of a machine file; "base" and "name" have been taken if they are strings. */
static inline int machine_key(machine *m, const char *path, const char *key, json_t *j)
{
    const struct {
        const char *key;
        int *count;
        int64_t *bytes;
    } known[] = {{"name", NULL, NULL},           {"base", NULL, NULL},
                 {"ranks", &m->ranks, NULL},     {"ranks_per_node", &m->ranks_node, NULL},
                 {"gpu_memory", NULL, &m->gpu},  {"gpu_reserve", NULL, &m->reserve},
                 {"host_memory", NULL, &m->host}};
    size_t i = 0;
    while (i < sizeof known / sizeof *known && strcmp(known[i].key, key) != 0) ++i;
    if (i == sizeof known / sizeof *known)
        return cli_refuse("%s: there is no %s in a machine file", path, key);
    if (known[i].count != NULL) {
        if (!json_is_integer(j) || json_integer_value(j) < 1 || json_integer_value(j) > UPIPE_THREADS_MAX)
            return cli_refuse("%s: %s wants a whole number from 1 to %d", path, key, UPIPE_THREADS_MAX);
        *known[i].count = (int)json_integer_value(j);
    } else if (known[i].bytes != NULL) {
        if (!json_is_string(j) || number_bytes(json_string_value(j), known[i].bytes) != 0)
            return cli_refuse("%s: %s wants a size with its unit, like \"80GiB\"", path, key);
    } else if (!json_is_string(j)) {
        return cli_refuse("%s: %s is no string", path, key);
    }
    return 0;
}

static inline int machine_read(machine *m, const char *path, json_t *root)
{
    json_t *rates = json_object_get(root, "rates"), *j;
    const char *base = json_string_value(json_object_get(root, "base")),
               *name = json_string_value(json_object_get(root, "name")), *key;
    int status = machine_preset(m, base != NULL ? base : "h100x8");
    if (status != 0) return status > 0 ? status : cli_refuse("%s: base %s is no preset", path, base);
    snprintf(m->name, sizeof m->name, "%s", name != NULL ? name : path);
    json_object_foreach(root, key, j)
    {
        if (j != rates && (status = machine_key(m, path, key, j)) != 0) return status;
    }
    if (rates != NULL && !json_is_object(rates)) return cli_refuse("%s: rates is no object", path);
    json_object_foreach(rates, key, j)
    {
        if ((status = machine_rate(m, path, key, j)) != 0) return status;
    }
    return 0;
}

/* What is wrong with a file that a flag names: as a flag's reader. That it cannot be read, or that memory is out, is no
 * wrong usage. */
static inline int machine_unread(const upipe_err *e)
{
    if (e->status == UPIPE_ERR_ARG) return cli_refuse("%s", e->text);
    return cli_fail("%s", e->text), 1 + EXIT_RUN;
}

/* machine_json -- a file's JSON, an object; json_decref(*root) where it is 0. Else as a flag's reader */
static inline int machine_json(json_t **root, const char *path)
{
    char why[JSON_LOAD_WHY];
    upipe_err e;
    size_t bytes;
    int lost;
    char *text = llama_file(path, LLAMA_CONFIG_BYTES_MAX, &bytes, &e);
    if (text == NULL) return machine_unread(&e);
    *root = json_load(text, bytes, why);
    lost = *root == NULL && errno == ENOMEM;
    free(text);
    if (lost) return cli_fail("%s: %s", path, why), 1 + EXIT_RUN;
    if (*root == NULL) return cli_refuse("%s: %s", path, why);
    if (json_is_object(*root)) return 0;
    json_decref(*root);
    return cli_refuse("%s: no JSON object", path);
}

/* machine_find -- 0, or as a flag's reader */
static inline int machine_find(machine *m, const char *name)
{
    json_t *root;
    int status;
    if ((status = machine_preset(m, name)) >= 0) return status;
    if (access(name, F_OK) != 0 && (errno == ENOENT || errno == ENOTDIR))
        return cli_refuse(
            "--machine %s is neither a file nor cpu, nor GPUs as h100x16, of h100, h100-96g, h200, a100, b200, rtxpro6000, l40s, "
            "5090 and 4090, at most 256",
            name);
    if ((status = machine_json(&root, name)) != 0) return status;
    status = machine_read(m, name, root);
    json_decref(root);
    return status;
}

/* As machine_find reads it. */
static inline void machine_write(FILE *f, const machine *m)
{
    int k;
    fputs("{\n  \"name\": ", f);
    json_quote(f, m->name);
    fprintf(f, ",\n  \"ranks\": %d,\n  \"ranks_per_node\": %d,\n  \"gpu_memory\": \"%lldB\",\n", m->ranks,
            m->ranks_node, (long long)m->gpu);
    fprintf(f, "  \"gpu_reserve\": \"%lldB\",\n  \"host_memory\": \"%lldB\",\n  \"rates\": {",
            (long long)m->reserve, (long long)m->host);
    for (k = 0; k < MACHINE_RATES; ++k) {
        fprintf(f, "%s\n    \"%s\": {\"value\": %.6g, \"origin\": ", k > 0 ? "," : "", machine_rates[k].name,
                m->rate[k]);
        json_quote(f, m->origin[k]);
        fputs("}", f);
    }
    fputs("\n  }\n}\n", f);
}

#endif
