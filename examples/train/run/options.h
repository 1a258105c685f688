/* options.h -- the command line of train: read, checked, defaults filled in
 *
 *     int status = options_read(&options, &world, argc, argv);      0: run; otherwise the sentence is out, exit with
 *                                                           status - 1
 *
 * A flag that would have no effect is refused: what is accepted is honoured. Where --resume or --load names a folder, its
 * config.json has the model, and a checkpoint the schedule: the program calls options_folder and options_resume when it
 * has read them.
 */
#ifndef LLAMA_OPTIONS_H
#define LLAMA_OPTIONS_H

#include <string.h>

#include "upipe/upipe.h"

#include "../../common/cli.h"
#include "../../common/world.h"
#include "../files/data.h"
#include "../state/checkpoint.h"
#include "../model/plans.h"
#include "rope_flags.h"

static const char usage_text[] =
    "usage: train [flags]\n"
    "\n"
    "Trains a Llama on the bytes of a text, or on files of tokens, its sequences shared by ranks, with UPipe\n"
    "or another method. The ranks are threads of this process, or processes. Prints loss, speed and memory, and writes a little "
    "text.\n";

static const char usage_end[] =
    "\n"
    "Exit status: 0, 1 for a run that failed or broke a promise (bytes, bits), 2 for wrong usage, 128 + N\n"
    "after signal N (interrupt, hangup, terminate), which ends the training after the step and its files.\n";

static const char *const usage_more[] = {method_usage, activations_usage, usage_end, NULL};
static const flag_set option_flags = {flag_rows,  FLAG_ROWS,  IN_TRAIN,
                                      usage_text, usage_more, ", products: " PRODUCTS};

/* The folder whose weights the training starts from; NULL = none. */
static inline const char *options_from(const options *o)
{
    return o->resume != NULL ? o->resume : o->load;
}

/* ---- the model, and a checkpoint's numbers, as flags ---- */

/* The numbers of a table that are flags' too: into the flags, or from them. */
static inline void options_fields(options *o, const field *rows, int n, void *of, int into)
{
    const field *row;
    for (row = rows; row < rows + n; ++row) {
        const flag_row *flag = flag_find(IN_TRAIN, row->flag);
        void *at = (char *)of + row->at;
        void *member = flag != NULL ? flag_member(flag, o) : NULL;
        if (flag == NULL) continue;
        if (row->kind == FLAG_REAL)
            memcpy(into ? member : at, into ? at : member, sizeof(double));
        else if (into)
            field_set(flag->kind, member, field_whole(row->kind, at) ^ row->opposite);
        else
            field_set(row->kind, at, field_whole(flag->kind, member) ^ row->opposite);
    }
}

static inline llama_config options_config(const options *o)
{
    options flags = *o;
    llama_config c;
    int family;
    memset(&c, 0, sizeof c);
    options_fields(&flags, llama_fields, LLAMA_FIELDS, &c, 0);
    options_rope(o, &c);
    family = llama_family_of(&c);
    c.family = family < 0 ? LLAMA_IS_LLAMA : family;
    return c;
}

/* Flags of this trait that were not given become those of `found`. The first that was, and says otherwise; NULL: none. */
static inline const flag_row *options_adopt(options *o, const options *found, int trait)
{
    options all = *found;
    int i;
    for (i = 0; i < FLAG_ROWS; ++i) {
        const flag_row *row = &flag_rows[i];
        if (!(row->programs & IN_TRAIN) || !o->given[i]) continue;
        if ((row->traits & trait & (FLAG_MODEL | FLAG_DATA)) && flag_hash(row, o) != flag_hash(row, found))
            return row;
        if (row->traits & trait & FLAG_SCHEDULE) flag_copy(row, &all, o);
    }
    *o = all;
    return NULL;
}

/* ---- what contradicts ---- */

/* Files that are written under one name. */
static inline int options_files(const options *o)
{
    static const char *const names[] = {"json", "trace", "log"};
    const char *const paths[] = {o->json, o->trace, o->log};
    int i, k;
    for (i = 0; i < 3; ++i) {
        if (paths[i] == NULL) continue;
        for (k = i + 1; k < 3; ++k)
            if (paths[k] != NULL && strcmp(paths[i], paths[k]) == 0)
                return cli_refuse("--%s and --%s name the same file, %s", names[i], names[k], paths[i]);
        if (o->save != NULL && strcmp(paths[i], o->save) == 0)
            return cli_refuse("--%s names %s, which --save takes for a folder", names[i], paths[i]);
    }
    return 0;
}

/* Flags that exclude each other or would have no effect. */
static inline int options_contradictions(const options *o)
{
    const llama_config c = options_config(o);
    const void *const rope[] = {&o->rope_theta, &o->rope_type, &o->rope_factor, &o->rope_original};
    const void *const sampled[] = {&o->prompt, &o->temperature, &o->stop_token};
    int status = 0, i;
    for (i = 0; i < 4 && o->resume != NULL; ++i)
        if (options_given(o, rope[i]))
            return cli_refuse(
                "--%s would change the model that --resume continues; --load starts anew with its weights",
                flag_rows[options_row(o, rope[i])].name);
    if (options_from(o) == NULL) status = options_rope_lacks(o, &c);
    if (status != 0) return status;
    if (llama_family_of(&c) < 0)
        return cli_refuse(
            "--window, --qk-norm and --attention-bias contradict each other: no model that is built has these together");
    if (options_given(o, &o->activations) && o->offload)
        return cli_refuse("--offload is --activations offload: only one of them can be given");
    if (o->offload_weights && (o->zero < 3 || !o->offload_optimizer))
        return cli_refuse("--offload-weights wants --zero 3 and --offload-optimizer");
    if (o->zero_prefetch && o->zero < 3)
        return cli_refuse("--zero-prefetch would have no effect with --zero %d: no weights are gathered",
                          o->zero);
    if (o->resume != NULL && o->load != NULL)
        return cli_refuse(
            "--resume %s and --load %s contradict each other: the weights come from one of them", o->resume,
            o->load);
    if (o->load_adapter != NULL && o->load == NULL)
        return cli_refuse("--load-adapter wants --load, the model that %s adapts", o->load_adapter);
    if (o->merge && o->load_adapter == NULL) return cli_refuse("--merge wants --load-adapter");
    if (o->load_adapter != NULL && !o->merge && (o->lora != NULL || o->train != NULL))
        return cli_refuse("--%s would have no effect: --load-adapter says what is trained, unless --merge",
                          o->lora != NULL ? "lora" : "train");
    if (o->ignore_key.n > 0 && options_from(o) == NULL)
        return cli_refuse("--ignore-key would have no effect: no folder's config.json is read");
    for (i = 0; i < FLAG_ROWS && o->plan; ++i)
        if (o->given[i] && (flag_rows[i].traits & FLAG_TRAINING))
            return cli_refuse("--plan trains nothing, so --%s would have no effect", flag_rows[i].name);
    if (o->eval == NULL && options_given(o, &o->eval_every)) return cli_refuse("--eval-every wants --eval");
    if (o->eval == NULL && o->eval_mask != NULL) return cli_refuse("--eval-mask wants --eval");
    if (o->save == NULL && options_given(o, &o->save_every)) return cli_refuse("--save-every wants --save");
    if (o->save == NULL && options_given(o, &o->keep)) return cli_refuse("--keep wants --save");
    for (i = 0; i < 3 && o->sample == 0; ++i)
        if (options_given(o, sampled[i]))
            return cli_refuse("--%s would have no effect, as --sample is 0",
                              flag_rows[options_row(o, sampled[i])].name);
    return options_files(o);
}

/* A token's number from its text; -1 of none. */
static inline int options_id(const char *text, const char *flag, int64_t *id)
{
    *id = -1;
    if (text == NULL || (number_whole(text, id) == 0 && *id <= INT32_MAX)) return 0;
    return cli_refuse("--%s wants a token's number, not '%s'", flag, text);
}

/* Flags of tokens and their files. */
static inline int options_tokens(options *o)
{
    const void *const members[] = {&o->token_type, &o->end_token, &o->documents,
                                   &o->shuffle,    &o->loss_mask, &o->eval_mask};
    size_t i;
    int status;
    if (o->tokens_file != NULL && o->data != NULL)
        return cli_refuse("--data %s and --tokens-file %s contradict each other: one of them is read",
                          o->data, o->tokens_file);
    for (i = 0; i < sizeof members / sizeof *members && o->tokens_file == NULL; ++i)
        if (options_given(o, members[i]))
            return cli_refuse("--%s wants --tokens-file", flag_rows[options_row(o, members[i])].name);
    status = options_id(o->end_token, "end-token", &o->end_id);
    return status != 0 ? status : options_id(o->stop_token, "stop-token", &o->stop_id);
}

/* What the flags say of the data, for a vocabulary. */
static inline data_request options_request(const options *o, int64_t vocab)
{
    data_request q;
    data_request_init(&q);
    q.text = o->data;
    q.files = o->tokens_file;
    q.type = (token_type)o->token_type;
    q.end_token = o->end_id;
    q.joined = o->documents;
    q.by_documents = o->shuffle;
    q.mask = o->loss_mask;
    q.tokens = o->tokens;
    q.vocab = vocab;
    return q;
}

/* And of what is evaluated, which is cut in its order. */
static inline data_request options_eval_request(const options *o, int64_t vocab)
{
    data_request q = options_request(o, vocab);
    q.text = o->data != NULL ? o->eval : NULL;
    q.files = o->data != NULL ? NULL : o->eval;
    q.by_documents = 0;
    q.mask = o->eval_mask;
    q.held = 1;
    return q;
}

/* To stand before a flag's name: whose value it is. */
static inline const char *options_whose(const options *o, const void *member)
{
    return o->resume != NULL && !options_given(o, member) ? "the checkpoint's " : "";
}

/* What must fit the schedule. */
static inline int options_schedule(options *o)
{
    char name[FLAG_VALUE];
    if (o->schedule == SCHEDULE_WSD && o->decay == 0 && !options_given(o, &o->decay))
        o->decay = o->steps < 10 ? 1 : o->steps / 10;
    if (o->min_lr > o->lr)
        return cli_refuse("%s--min-lr %g is above %s--lr %g", options_whose(o, &o->min_lr), o->min_lr,
                          options_whose(o, &o->lr), o->lr);
    if (o->warmup > o->steps)
        return cli_refuse("%s--warmup %lld is longer than the %lld steps of the training",
                          options_whose(o, &o->warmup), (long long)o->warmup, (long long)o->steps);
    if (o->schedule == SCHEDULE_WSD && o->decay > o->steps - o->warmup)
        return cli_refuse(
            "%s--decay %lld and the %lld steps of the warmup are longer than the %lld steps of the training",
            options_whose(o, &o->decay), (long long)o->decay, (long long)o->warmup, (long long)o->steps);
    if (o->schedule != SCHEDULE_WSD && options_given(o, &o->decay))
        return cli_refuse("--decay would have no effect with the schedule %s",
                          flag_text(name, flag_find(IN_TRAIN, "schedule"), o));
    if (o->schedule == SCHEDULE_CONSTANT && options_given(o, &o->min_lr))
        return cli_refuse("--min-lr would have no effect with the schedule constant");
    if (o->eval_every > o->steps)
        return cli_refuse("--eval-every %lld is longer than the %lld steps of the training",
                          (long long)o->eval_every, (long long)o->steps);
    if (o->save_every > o->steps)
        return cli_refuse("--save-every %lld is longer than the %lld steps of the training",
                          (long long)o->save_every, (long long)o->steps);
    return 0;
}

/* options_folder -- the model is what the folder's config.json says, and RoPE what the flags say that were given: *c
 * becomes so. 0, or -1 with the sentence out */
static inline int options_folder(options *o, llama_config *c, const char *path)
{
    options found = *o;
    const flag_row *row;
    options_rope(o, c);
    if (options_rope_lacks(o, c) != 0) return -1;
    options_fields(&found, llama_fields, LLAMA_FIELDS, c, 1);
    if (c->rope_type == LLAMA_ROPE_DYNAMIC) found.rope_original = c->rope_positions;
    row = options_adopt(o, &found, FLAG_MODEL);
    return row == NULL
               ? 0
               : cli_fail("--%s says otherwise than %s, which says what the model is", row->name, path);
}

/* options_resume -- what the checkpoint says of the schedule, where no flag says otherwise, and of the data. 0, or -1 with
 * the sentence out
 */
static inline int options_resume(options *o, const char *folder, llama_run *run, upipe_dtype dtype)
{
    char was[FLAG_VALUE], is[FLAG_VALUE];
    options found = *o;
    const flag_row *row;
    options_fields(&found, llama_run_fields, LLAMA_RUN_FIELDS, run, 1);
    found.dtype = (int)dtype;
    found.lora = run->lora[0] != 0 ? run->lora : NULL;
    found.train = run->train[0] != 0 ? run->train : NULL;
    found.accumulate /= o->replicas;
    if (found.accumulate * o->replicas != run->accumulate)
        return cli_fail(
            "%s was trained with %lld micro-batches a step, which do not divide among --replicas %d", folder,
            (long long)run->accumulate, o->replicas);
    row = options_adopt(o, &found, FLAG_DATA | FLAG_SCHEDULE);
    if (row == NULL) return options_schedule(o) == 0 ? 0 : -1;
    return cli_fail("%s was trained with --%s %s, not --%s %s; --load starts anew with its weights", folder,
                    row->name, flag_text(was, row, &found), row->name, flag_text(is, row, o));
}

/* Defaults that depend on other flags, and what must fit them. */
static inline int options_resolve(options *o)
{
    const int64_t head_dim = (o->model_dim + o->heads - 1) / o->heads;
    int status = options_contradictions(o);
    if (status == 0) status = options_tokens(o);
    if (status == 0) status = method_resolve(&o->how, o->replicas);
    if (status != 0) return status;
    if (o->accumulate * o->replicas > (int64_t)flag_limits("accumulate")->most)
        return cli_refuse("--accumulate %lld with --replicas %d: a step has at most %.0f micro-batches",
                          (long long)o->accumulate, o->replicas, flag_limits("accumulate")->most);
    if (!options_given(o, &o->head_dim)) o->head_dim = head_dim < 32 ? 32 : (int)((head_dim + 7) / 8 * 8);
    if (!options_given(o, &o->ff_dim)) o->ff_dim = (8 * o->model_dim + 191) / 192 * 64;
    if (o->offload) o->activations.kind = ACTIVATIONS_OFFLOAD;
    if (o->data == NULL && o->tokens_file == NULL) o->data = cli_book();
    if (o->resume != NULL) return 0; /* the checkpoint has the schedule: options_resume */
    if (!options_given(o, &o->min_lr)) o->min_lr = o->lr / 10;
    if (!options_given(o, &o->warmup)) o->warmup = o->steps < 10 ? o->steps > 0 : o->steps / 10;
    return options_schedule(o);
}

/* The ranks of w are there when this returns; then the program ends with world_end. */
static inline int options_read(options *o, struct world *w, int argc, char **argv)
{
    int status;
    memset(o, 0, sizeof *o);
    o->program = IN_TRAIN;
    status = world_begin(w, &option_flags, o, flags_read(&option_flags, o, o->given, argc, argv));
    return status != 0 ? status : world_agree(w, options_resolve(o));
}

#endif
