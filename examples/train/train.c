/* train.c -- trains a Llama on the bytes of a text or on files of tokens, with any method of context parallelism in
 * methods.h
 *
 *     train --method upipe --ranks 4 --tokens 4096 --steps 100 --json out.json
 *     mpirun -np 4 train_mpi --transport mpi --method upipe ...       the same, with processes for ranks
 *
 * From main to upipe_layer_fwd: run_train (run/ranks.h), run_rank_main (run/rank.h), trainer_step (state/trainer.h),
 * model_fwd and model_layer_fwd (model/forward.h), attention_whole_fwd (model/attention.h). ../README.md says what else
 * stands where.
 */
#define PROGRAM "train"

#include "run/ranks.h"
#include "run/report.h"

/* A tokenizer beside the model is not used. */
static void find_tokenizer(const run *u)
{
    static const char *const names[] = {"tokenizer.json", "tokenizer.model", "vocab.json",
                                        "tokenizer_config.json"};
    char path[LLAMA_PATH];
    upipe_err e;
    size_t i;
    for (i = 0; i < sizeof names / sizeof *names; ++i) {
        if (llama_path_in(path, u->folder, names[i], &e) != 0 || access(path, F_OK) != 0) continue;
        cli_note("%s is not used: the text's bytes are the tokens 0 to 255, whatever they mean to this model",
                 path);
        return;
    }
}

/* The model is in the flags, or in the folder of --resume or --load. */
static int find_model(run *u)
{
    char kept[ACTIVATIONS_TEXT];
    upipe_err e;
    llama_config config = options_config(&u->o);
    memset(&e, 0, sizeof e);
    if (options_from(&u->o) != NULL) {
        char path[FILES_PATH];
        if (llama_checkpoint_find(options_from(&u->o), u->folder, &e) != 0) return cli_fail("%s", e.text);
        if (files_path(path, u->folder, "config", ".json") != 0) return -1;
        if (llama_config_read(&config, NULL, path, &u->o.ignore_key, &e) != 0) return cli_fail("%s", e.text);
        if (llama_config_is_part(path))
            cli_note("%s: of this model the text part alone is read, trained and saved", u->folder);
        u->from = u->folder;
        if (u->o.tokens_file == NULL && config.vocab < SAMPLE_BYTES)
            return cli_fail("%s: a vocabulary of %lld; bytes are tokens, so it needs %d", u->folder,
                            (long long)config.vocab, SAMPLE_BYTES);
        if (options_folder(&u->o, &config, path) != 0) return -1;
        if (u->o.tokens_file == NULL) find_tokenizer(u);
    }
    if (u->o.activations.k > config.layers)
        return cli_fail("--activations %s: the model has %lld layers",
                        activations_text(kept, &u->o.activations), (long long)config.layers);
    u->config = config;
    return 0;
}

/* A checkpoint is continued with what its data depends on, or not at all. */
static int find_position(run *u)
{
    upipe_err e;
    llama_run *p = &u->position;
    options *o = &u->o;
    upipe_dtype dtype;
    memset(&e, 0, sizeof e);
    if (o->resume == NULL) return 0;
    if (llama_load_run(u->from, p, &dtype, &e) != 0) return cli_fail("%s", e.text);
    if (options_resume(o, u->from, p, dtype) != 0) return -1;
    if (p->step < o->steps) return 0;
    if (!options_given(o, &o->steps))
        return cli_fail("%s has done all %lld steps of its training; --steps says more", u->from,
                        (long long)p->step);
    return cli_fail("%s has done %lld steps already, --steps says %lld", u->from, (long long)p->step,
                    (long long)o->steps);
}

/* Its tensors, and which are trained. An adapter that is not merged is. As a flag's reader: --train and --lora may say
 * what the model has not. */
static int find_layout(run *u)
{
    const int own = options_given(&u->o, &u->o.train) || options_given(&u->o, &u->o.lora);
    upipe_status s;
    upipe_err e;
    memset(&e, 0, sizeof e);
    if (u->o.load_adapter != NULL) {
        if (llama_adapter_open(&u->adapter, u->o.load_adapter, &u->config, &e) != 0)
            return cli_fail("%s", e.text);
        if (!u->o.merge) u->o.lora = u->adapter.flag;
    }
    if (u->o.save_adapter != NULL && u->o.lora == NULL)
        return cli_fail("--save-adapter wants --lora or --load-adapter: no adapter is trained");
    s = llama_layout_trained(&u->layout, &u->config, u->o.train, u->o.lora, &e);
    if (s == UPIPE_ERR_ARG && own) return cli_refuse("%s", e.text);
    if (s != UPIPE_OK) return cli_fail("%s", e.text);
    if (u->from != NULL && !u->o.plan && llama_load_check(u->from, &u->layout, &e) != 0)
        return cli_fail("%s", e.text);
    return 0;
}

/* What it is trained on. All of it is read once: by rank 0, and by every process that looks for the ends of
 * documents. */
static int find_data(run *u)
{
    const llama_config *config = &u->layout.config;
    const data_request q = options_request(&u->o, config->vocab),
                       held = options_eval_request(&u->o, config->vocab);
    if (q.end_token >= q.vocab)
        return cli_fail("--end-token %s: the vocabulary has %lld", u->o.end_token, (long long)q.vocab);
    if (data_open(&u->text, &q) != 0) return -1;
    if (q.files != NULL && q.end_token < 0 && u->text.documents.n == 0 &&
        options_given(&u->o, &u->o.documents))
        return cli_fail(
            "--documents would have no effect: neither an .idx nor --end-token says what they are");
    if (u->o.eval != NULL && data_open(&u->held, &held) != 0) return -1;
    if ((u->text.packed || u->held.packed) &&
        (config->rope_type == LLAMA_ROPE_DYNAMIC || config->rope_type == LLAMA_ROPE_LONGROPE))
        return cli_fail(
            "packed documents with RoPE of the type %s: its rates depend on the length, which is each "
            "document's own; --documents joined makes one text of them",
            llama_rope_names[config->rope_type]);
    if (!world_is_root(&u->net) && q.end_token < 0) return 0;
    return data_scan(&u->text, &q) != 0 || (u->o.eval != NULL && data_scan(&u->held, &held) != 0) ? -1 : 0;
}

/* All processes read the same model and data; the hash of all of it is rank 0's. */
static int find_same(run *u)
{
    uint64_t hash = UPIPE_HASH, parts = 0, held = 0;
    upipe_err e;
    if (u->net.all == NULL) return 0;
    if (world_agree(&u->net, data_probe(&u->text, &parts) != 0 ||
                                     (u->o.eval != NULL && data_probe(&u->held, &held) != 0)
                                 ? -1
                                 : 0) != 0)
        return -1;
    hash = upipe_hash_bytes(hash, &u->position.step, sizeof u->position.step);
    hash = upipe_hash_bytes(hash, &u->layout.config, sizeof u->layout.config) ^ parts;
    hash = upipe_hash_bytes(hash, &held, sizeof held);
    if (world_same_flags(&u->net, &option_flags, &u->o) != 0)
        return -1; /* what folders have said is in them */
    if (world_same(&u->net, "--data, --tokens-file, --eval, --resume or --load finds something else here",
                   hash) != 0)
        return -1;
    return world_broadcast(&u->net, 0, &u->text.hash, sizeof u->text.hash, &e) == UPIPE_OK
               ? 0
               : cli_fail("%s", e.text);
}

/* The text must be the one that a checkpoint was trained on. */
static int find_text(run *u)
{
    const llama_run *p = &u->position;
    const char *const name = u->o.data != NULL ? u->o.data : u->o.tokens_file;
    if (u->o.resume == NULL) return 0;
    if (p->text_bytes != u->text.ids.bytes)
        return cli_fail(
            "%s was trained with a text of %lld bytes, %s has %lld; --load starts anew with its weights",
            u->from, (long long)p->text_bytes, name, (long long)u->text.ids.bytes);
    if (p->text_hash != u->text.hash)
        return cli_fail(
            "%s was trained with another text than %s, of the same length%s; --load starts anew with its "
            "weights",
            u->from, name,
            u->o.data != NULL
                ? ""
                : ", or with another of --token-type, --end-token, --documents, --shuffle, --loss-mask");
    return 0;
}

/* The sample begins with a text's bytes, or with ids: those of --prompt, or else the end token, or token 0. */
static int find_prompt(run *u)
{
    const char *at = u->o.prompt, *end;
    const int given = options_given(&u->o, &u->o.prompt);
    const size_t n = strlen(at);
    u->prompt = (int32_t *)calloc(n + 1, sizeof *u->prompt);
    if (u->prompt == NULL) return cli_fail("out of memory: the prompt");
    if (u->o.tokens_file == NULL) {
        while (u->prompt_n < (int64_t)n) {
            u->prompt[u->prompt_n] = (unsigned char)at[u->prompt_n];
            ++u->prompt_n;
        }
        return 0;
    }
    if (!given) {
        u->prompt[u->prompt_n++] = u->o.end_id >= 0 ? (int32_t)u->o.end_id : 0;
        return 0;
    }
    for (; *(at += strspn(at, " ,")) != '\0'; at = end) {
        int64_t id = strtoll(at, (char **)(uintptr_t)&end, 10);
        if (end == at || id < 0 || id >= u->layout.config.vocab)
            return cli_fail("--prompt %s: with --tokens-file it is numbers of tokens, below %lld",
                            u->o.prompt, (long long)u->layout.config.vocab);
        u->prompt[u->prompt_n++] = (int32_t)id;
    }
    return u->prompt_n > 0 ? 0 : cli_fail("--prompt has no token");
}

/* All that is known before a rank is there: 0 if it can be done; else as a flag's reader. */
static int prepare(run *u, files *all)
{
    const int plan = u->o.plan;
    int bad, status = find_model(u) != 0 || find_position(u) != 0 ? -1 : find_layout(u);
    if (status == 0 && (find_prompt(u) != 0 || (!plan && find_data(u) != 0))) status = -1;
    status = world_agree(&u->net, status);
    if (status != 0) return status;
    if (!plan && find_same(u) != 0) return -1;
    bad = (!plan && find_text(u) != 0) || run_plan(u) != 0 || (!plan && run_check_memory(u, 1) != 0) ||
          report_reserve(u, all) != 0;
    return world_agree(&u->net, -bad);
}

/* What was planned, or trained, is said and written. */
static int report(run *u, files *all)
{
    const int is_root = world_is_root(&u->net);
    report_total slope;
    int status;
    if (u->o.plan && is_root && report_plan(u, &slope) != 0) return -1;
    if (!u->o.plan && is_root && !u->failed) report_table(u);
    status = is_root ? cli_flush("the table") : 0;
    if (report_files(u, all, u->o.plan ? &slope : NULL) != 0) return -1;
    return u->failed || u->broke || u->log_failed ? -1 : status;
}

int main(int argc, char **argv)
{
    run *u = (run *)calloc(1, sizeof *u);
    files *all = (files *)calloc(1, sizeof *all);
    int status, bad;
    cli_start();
    if (u == NULL || all == NULL) {
        free(u);
        free(all);
        cli_fail("out of memory");
        return EXIT_RUN;
    }
    world_mute();
    signal(SIGPIPE, SIG_IGN); /* what cannot be written is said, and cleaned up after */
    signal(SIGXFSZ, SIG_IGN);
    status = options_read(&u->o, &u->net, argc, argv);
    if (status == 0) {
        u->o.progress = world_is_root(&u->net) && (u->o.progress || isatty(STDERR_FILENO));
        device_table(u->o.device, &u->ops);
        status = prepare(u, all);
        bad = status != 0;
        if (!bad && !u->o.plan) u->failed = run_train(u) != 0;
        bad = bad || (u->failed && u->done == 0) || report(u, all) != 0;
        status = status > 0 ? status - 1 : bad ? EXIT_RUN : 0;
        files_abandon(all);
        if (status == 0 && run_signal != 0) {
            if (u->saved >= 0 && u->saved < u->o.steps)
                cli_fail("ended by a signal: %s; --resume %s continues after step %lld",
                         strsignal(run_signal), u->o.save, (long long)u->saved);
            else
                cli_fail("ended by a signal: %s", strsignal(run_signal));
            status = 128 + run_signal;
        }
    } else {
        --status;
    }
    llama_lock_free(&u->lock);
    status = world_end(&u->net, status); /* peers may send from the pools and into them until here */
    run_free(u);
    free(u);
    free(all);
    return status;
}
