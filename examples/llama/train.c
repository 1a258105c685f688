/* train.c -- trains a Llama on the bytes of a text, with any method of context parallelism in methods.h
 *
 *     train --method upipe --ranks 4 --tokens 4096 --steps 100 --json out.json
 *     mpirun -np 4 train_mpi --transport mpi --method upipe ...       the same, with processes for ranks
 *
 * Where to read: model.h (a forward and a backward assembled from upipe's primitives), trainer.h (a step),
 * memory.h (its bytes, by a dry run), run.h (ranks, steps, checkpoints), checkpoint.h, sample.h, data.h.
 */
#define PROGRAM "train"

#include "report.h"

/* The model is in the flags, or in the folder of --resume or --load. */
static int find_model(run *u, char folder[LLAMA_PATH])
{
    upipe_err e;
    llama_config config = u->o.config;
    int flag;
    memset(&e, 0, sizeof e);
    if (u->o.from != NULL) {
        char path[FILES_PATH];
        if (llama_checkpoint_find(u->o.from, folder, &e) != 0) return cli_fail("%s", e.text);
        if (files_path(path, folder, "config", ".json") != 0) return -1;
        if (llama_config_read(&config, NULL, path, &e) != 0) return cli_fail("%s", e.text);
        u->from = folder;
        if (config.vocab < SAMPLE_BYTES)
            return cli_fail("%s: a vocabulary of %lld; bytes are tokens, so it needs %d", folder,
                            (long long)config.vocab, SAMPLE_BYTES);
        flag = options_other_model(&u->o, &config);
        if (flag >= 0)
            return cli_fail("--%s says otherwise than %s, which says what the model is",
                            option_list[flag].name, path);
    }
    if (activations_fit(&u->o.activations, config.layers) != 0) return -1;
    return llama_layout_init(&u->layout, &config) == 0
               ? 0
               : cli_fail("the model's bytes leave 63 bits, or memory is out");
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
    if (options_resume(o, p, dtype) != 0) return -1;
    if (dtype != o->dtype)
        return cli_fail("%s was trained with --dtype %s, not %s; --load starts anew with its weights",
                        u->from, upipe_dtype_name(dtype), upipe_dtype_name(o->dtype));
    if (p->seed != o->seed || p->tokens != o->tokens || p->batch != o->batch)
        return cli_fail(
            "%s was trained with --seed %lld --tokens %lld --batch %lld, not --seed %lld --tokens %lld "
            "--batch %lld; --load starts anew with its weights",
            u->from, (long long)p->seed, (long long)p->tokens, (long long)p->batch, (long long)o->seed,
            (long long)o->tokens, (long long)o->batch);
    if (p->step >= o->steps)
        return cli_fail("%s has done %lld steps already, --steps says %lld", u->from, (long long)p->step,
                        (long long)o->steps);
    return 0;
}

/* All processes read the same model and text; the text's hash, for which all of it is read, is rank 0's. */
static int find_same(run *u)
{
    uint64_t hash = UPI_HASH;
    upipe_err e;
    if (u->net.all == NULL) {
        u->text.hash = text_hash(&u->text);
        return 0;
    }
    hash = upi_hash_bytes(hash, &u->position.step, sizeof u->position.step);
    hash = upi_hash_bytes(hash, &u->layout.weights, sizeof u->layout.weights) ^ text_probe(&u->text);
    if (world_same(&u->net, "--data, --resume or --load finds something else here", hash) != 0) return -1;
    if (world_speaks(&u->net)) u->text.hash = text_hash(&u->text);
    return world_tell(&u->net, 0, &u->text.hash, sizeof u->text.hash, &e) == UPIPE_OK
               ? 0
               : cli_fail("%s", e.text);
}

/* The text must be the one that a checkpoint was trained on. */
static int find_text(run *u)
{
    const llama_run *p = &u->position;
    if (u->o.resume == NULL) return 0;
    if (p->text_bytes != u->text.bytes)
        return cli_fail(
            "%s was trained with a text of %lld bytes, %s has %lld; --load starts anew with its weights",
            u->from, (long long)p->text_bytes, u->o.data, (long long)u->text.bytes);
    if (p->text_hash != u->text.hash)
        return cli_fail(
            "%s was trained with another text than %s, of the same length; --load starts anew with its "
            "weights",
            u->from, u->o.data);
    return 0;
}

static int train(run *u, files *all)
{
    char folder[LLAMA_PATH];
    report_total slope;
    int bad, status;
    bad = find_model(u, folder) != 0 || find_position(u) != 0 ||
          (!u->o.plan && text_open(&u->text, u->o.data, u->o.tokens) != 0);
    if (world_agree(&u->net, -bad) != 0 || (!u->o.plan && find_same(u) != 0)) return -1;
    bad = (!u->o.plan && find_text(u) != 0) || run_plan(u) != 0 ||
          (!u->o.plan && run_check_memory(u, 1) != 0) || report_reserve(u, all) != 0;
    if (world_agree(&u->net, -bad) != 0) return -1;
    if (u->o.plan) {
        if (world_speaks(&u->net) && report_plan(u, &slope) != 0) return -1;
    } else {
        u->failed = run_train(u) != 0;
        if (u->failed && u->done == 0) return -1;
        if (!u->failed && world_speaks(&u->net)) report_table(u);
    }
    status = fflush(stdout) != 0 || ferror(stdout)
                 ? cli_fail("the table cannot be written: %s", strerror(errno))
                 : 0;
    if (report_files(u, all, u->o.plan ? &slope : NULL) != 0) return -1;
    return u->failed || u->broke ? -1 : status;
}

int main(int argc, char **argv)
{
    run *u = (run *)calloc(1, sizeof *u);
    files *all = (files *)calloc(1, sizeof *all);
    int status;
    if (u == NULL || all == NULL) {
        free(u);
        free(all);
        cli_fail("out of memory");
        return EXIT_RUN;
    }
    world_hush();
    signal(SIGPIPE, SIG_IGN); /* what cannot be written is said, and cleaned up after */
    signal(SIGXFSZ, SIG_IGN);
    status = options_read(&u->o, &u->net, argc, argv);
    if (status == 0) {
        u->o.progress = world_speaks(&u->net) && (u->o.progress || isatty(STDERR_FILENO));
        device_table(u->o.device, &u->ops);
        status = train(u, all) == 0 ? 0 : EXIT_RUN;
        files_abandon(all);
        if (status == 0 && run_signal != 0) {
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
