/* options.h -- the command line of compare: read, checked, defaults filled in
 *
 *     int status = options_read(&options, &world, argc, argv);      0: run; otherwise the sentence is out, exit with
 *                                                                   status - 1
 *
 * A flag that would have no effect is refused: what is accepted is honoured.
 */
#ifndef COMPARE_OPTIONS_H
#define COMPARE_OPTIONS_H

#include <string.h>

#include "upipe/net/upipe_net_threads.h"
#include "upipe/upipe.h"

#include "../common/cli.h"
#include "../common/methods.h"
#include "../common/world.h"
#include "../common/random.h"
#include "../train/run/rope_flags.h"

enum { CHECK_AUTO_TOKENS = 2048, CU_SEQLENS_MAX = 65536 };

static const char usage_text[] =
    "usage: compare [flags]\n"
    "\n"
    "Runs one attention block, forward and backward, over the tokens (bytes) of a text, with methods of\n"
    "context parallelism, on ranks that are threads of this process or processes. Prints what each holds,\n"
    "sends and computes.\n";

static const char usage_end[] =
    "\n"
    "Exit status: 0, 1 for a run that failed or broke a promise (bytes, errors, bits), 2 for wrong usage.\n";

static const char *const usage_more[] = {method_usage, usage_end, NULL};
static const flag_set option_flags = {flag_rows,  FLAG_ROWS,  IN_COMPARE,
                                      usage_text, usage_more, ", products: " PRODUCTS};

static int options_ascending(const void *a, const void *b)
{
    int64_t one = *(const int64_t *)a, other = *(const int64_t *)b;
    return (one > other) - (one < other);
}

/* A number of tokens or of packed sequences. */
static int options_count(const char *text, int64_t least, int64_t most, int64_t *out)
{
    if (number_whole(text, out) == 0 && *out >= least && *out <= most) return 0;
    return cli_refuse("--cu-seqlens wants a whole number from %lld to %lld, not '%s'", (long long)least,
                      (long long)most, text);
}

/* The packed sequences' borders: from lengths with commas between them, or of a number of random packed
 * sequences, which may be empty. Tokens beyond 63 bits are left to the plan to refuse. */
static int options_cu_seqlens(options *o)
{
    const char *text = o->cu_seqlens, *comma;
    int64_t total, n = 1, i, length = 0;
    random_state r = {~(uint64_t)o->seed, 0, 0}; /* not the numbers of the inputs */
    int status;
    if (text == NULL || !upipe_mul(&total, o->batch, o->tokens)) return 0;
    for (comma = text; (comma = strchr(comma, ',')) != NULL; ++comma) ++n;
    o->borders_n = n;
    if (n == 1) {
        status = options_count(text, 1, CU_SEQLENS_MAX, &o->borders_n);
        if (status != 0) return status;
    }
    o->borders = (int64_t *)calloc((size_t)o->borders_n + 1, sizeof *o->borders);
    if (o->borders == NULL)
        return cli_fail("out of memory for %lld packed sequences", (long long)o->borders_n), 1 + EXIT_RUN;
    for (i = 1; n == 1 && i < o->borders_n; ++i)
        o->borders[i] = (int64_t)(random_uniform(&r) * (double)total);
    if (n == 1) {
        o->borders[o->borders_n] = total;
        qsort(o->borders, (size_t)o->borders_n, sizeof *o->borders, options_ascending);
        return 0;
    }
    for (i = 0; i < n; ++i, text += strcspn(text, ",") + 1) {
        const int digits = (int)strcspn(text, ",");
        char one[32];
        if (snprintf(one, sizeof one, "%.*s", digits, text) >= (int)sizeof one)
            return cli_refuse("--cu-seqlens has a length of %d characters", digits);
        status = options_count(one, 0, total - o->borders[i], &length);
        if (status != 0) return status;
        o->borders[i + 1] = o->borders[i] + length;
    }
    if (o->borders[n] == total) return 0;
    return cli_refuse("--cu-seqlens has %lld tokens, the text %lld x %lld", (long long)o->borders[n],
                      (long long)o->batch, (long long)o->tokens);
}

/* Flags that no method heeds. */
static int options_heeded(const options *o)
{
    int i, chunked = 0, ringed = 0, free_mode = 0, inner = 0, segmented = 0, whole = 0, overlaps = 0;
    for (i = 0; i < o->methods.n; ++i) {
        const method_kind *k = &method_kinds[o->methods.at[i]];
        chunked |= k->stage == METHOD_CHUNK;
        ringed |= k->shape == METHOD_IS_GRID;
        free_mode |= k->shape == METHOD_IS_GRID && k->mode == UPIPE_RING_AUTO;
        inner |= k->inner;
        segmented |= k->segmented;
        whole |= !k->segmented;
        overlaps |= method_overlaps(k);
    }
    if (options_given(o, &o->how.chunk) && !chunked)
        return cli_refuse("no method here heeds --chunk %d", o->how.chunk);
    if (options_given(o, &o->how.ring) && !ringed)
        return cli_refuse("no method here heeds --ring %d", o->how.ring);
    if (options_given(o, &o->ring_mode) && !free_mode) return cli_refuse("no method here heeds --ring-mode");
    if (options_given(o, &o->how.inner) && !inner)
        return cli_refuse("no method here heeds --inner %d", o->how.inner);
    if (options_given(o, &o->how.segments) && !segmented)
        return cli_refuse("no method here heeds --segments %d", o->how.segments);
    if (options_given(o, &o->how.overlap) && !overlaps) return cli_refuse("no method here heeds --overlap");
    if (options_given(o, &o->offload) && !whole)
        return cli_refuse(
            "--offload says nothing new of these methods: they keep inputs in the host's memory");
    if (ringed && o->how.ranks % o->how.ring != 0)
        return cli_refuse("--ranks %d do not divide into rings of %d (--ring)", o->how.ranks, o->how.ring);
    return 0;
}

static llama_config options_rope_config(const options *o)
{
    llama_config c;
    memset(&c, 0, sizeof c);
    c.head_dim = o->head_dim;
    c.rope_theta = o->rope_theta;
    options_rope(o, &c);
    return c;
}

static int options_rope_check(const options *o)
{
    const void *const of[] = {&o->rope_theta, &o->rope_type, &o->rope_factor, &o->rope_original};
    const llama_config c = options_rope_config(o);
    int i;
    for (i = 0; i < 4 && !o->rope; ++i)
        if (options_given(o, of[i]))
            return cli_refuse("--%s would have no effect without --rope",
                              flag_rows[options_row(o, of[i])].name);
    return options_rope_lacks(o, &c);
}

/* Flags that exclude each other, and defaults that depend on other flags. */
static int options_resolve(options *o)
{
    int status;
    if (o->methods.n == 0) {
        o->methods.at[o->methods.n++] = METHOD_ULYSSES;
        o->methods.at[o->methods.n++] = METHOD_UPIPE;
    }
    if (o->how.ring == 0) o->how.ring = 2;
    if (o->how.inner == 0) o->how.inner = 2;
    if (o->how.segments == 0) o->how.segments = 4;
    status = options_heeded(o);
    if (status == 0) status = options_rope_check(o);
    if (status != 0) return status;
    if (o->trace != NULL && o->dump != NULL && strcmp(o->trace, o->dump) == 0)
        return cli_refuse("--trace and --dump name the same folder, %s", o->trace);
    if (o->json != NULL && ((o->trace != NULL && strcmp(o->json, o->trace) == 0) ||
                            (o->dump != NULL && strcmp(o->json, o->dump) == 0)))
        return cli_refuse("--json names %s, which --trace or --dump takes for a folder", o->json);
    if (o->kv_heads == 0) o->kv_heads = o->heads;
    if (o->v_dim == 0) o->v_dim = o->head_dim;
    if (o->model_dim == 0 &&
        (int64_t)o->heads * o->head_dim <= INT32_MAX) /* otherwise the plan refuses them */
        o->model_dim = (int64_t)o->heads * o->head_dim;
    if (o->check == CHECK_AUTO) o->check = o->tokens <= CHECK_AUTO_TOKENS ? CHECK_ON : CHECK_OFF;
    return options_cu_seqlens(o);
}

static void options_free(options *o)
{
    free(o->borders);
    o->borders = NULL;
}

/* The ranks of w are there when this returns; then the program ends with world_end and options_free. */
static int options_read(options *o, struct world *w, int argc, char **argv)
{
    int status;
    memset(o, 0, sizeof *o);
    o->program = IN_COMPARE;
    status = world_begin(w, &option_flags, o, flags_read(&option_flags, o, o->given, argc, argv));
    if (status == 0) status = world_agree(w, options_resolve(o));
    if (status != 0) options_free(o);
    return status;
}

#endif
