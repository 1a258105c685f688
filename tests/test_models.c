/* test_models.c -- the table of families: its rows, and the page that is printed from it
 *
 *     test_models tests/cases/published.json docs/models.md          checks, the page too
 *     test_models tests/cases/published.json > docs/models.md        prints the page
 *
 * published.json has the config.json of models that people extend, written down after what their makers published: cases
 * that test_files tries.
 */
#define PROGRAM "train"
#include "lib/test.h"

#include "lib/cases.h"
#include "lib/page.h"

#include "examples/train/files/config_write.h"
#include "examples/plan/preset.h"

#define COMMAND "build/gcc/tests/test_models tests/cases/published.json > docs/models.md"

/* ---- the rows ---- */

/* Words with a blank around each, none twice and none of `others`. */
static void check_words(const char *words, const char *others)
{
    char word[80];
    size_t n;
    CHECK(words[0] == '\0' || (words[0] == ' ' && words[strlen(words) - 1] == ' '));
    for (; *words != '\0'; words += n) {
        n = strcspn(words, " ");
        snprintf(word, sizeof word, "%.*s", (int)n, words);
        n += words[n] == ' ';
        if (word[0] == '\0') continue;
        CHECK_SAY(!llama_is_word(others, word) && !(words[n] != '\0' && llama_is_word(words + n - 1, word)),
                  "%s comes twice", word);
    }
}

static void test_rows(void)
{
    int i, k;
    check_words(llama_keys, llama_keys_idle);
    check_words(llama_keys_idle, llama_keys);
    for (i = 0; i < LLAMA_FAMILIES; ++i) {
        const llama_family *f = &llama_families[i];
        for (k = 0; k < i; ++k) CHECK(strcmp(llama_families[k].type, f->type) != 0);
        check_words(f->keys, llama_keys);
        check_words(f->idle, llama_keys);
        check_words(f->idle, f->keys);
        check_words(f->keys, llama_keys_idle);
        check_words(f->idle, llama_keys_idle);
        CHECK((f->windows != LLAMA_WINDOWS_NONE && f->windows != LLAMA_WINDOWS_LINEAR) ==
              llama_is_word(f->keys, "sliding_window"));
        CHECK((f->whole == NULL) == (f->part == NULL) && (f->whole == NULL) == (f->others == NULL));
        check_words(f->rope_idle != NULL ? f->rope_idle : "", llama_keys);
        CHECK(f->norm_eps > 0 && f->rope_theta >= 1 && f->window >= 0 && f->pad >= 0);
    }
}

/* Presets are models that the trainer could make: what a family's file says gives the same numbers. */
static void test_presets(void)
{
    int i;
    for (i = 0; i < (int)PRESETS; ++i) {
        const llama_family *f = &llama_families[presets[i].family];
        llama_config c = {0}, back;
        char note[PRESET_NOTE], path[] = "test_models.json";
        upipe_err err;
        CHECK_INT(preset_find(&c, note, presets[i].name, NULL), 0);
        CHECK(c.qk_norm == f->qk_norm && c.family == presets[i].family);
        unlink(path);
        CHECK_SAY(llama_config_write(&c, UPIPE_BF16, 4096, path, &err) == 0, "%s", err.text);
        CHECK_SAY(llama_config_read(&back, NULL, path, NULL, &err) == 0, "%s: %s", presets[i].name, err.text);
        CHECK_BYTES(&back, &c, sizeof c);
        unlink(path);
    }
}

/* ---- the page ---- */

static json_t *published; /* cases of test_files: each group is a model, of one case */

static void print_keys(FILE *f, const char *words)
{
    size_t n;
    int some = 0;
    for (; *words != '\0'; words += n + (words[n] == ' ')) {
        n = strcspn(words, " ");
        if (n > 0) fprintf(f, "%s`%.*s`", some++ ? ", " : "", (int)n, words);
    }
    if (!some) fputc('-', f);
}

static void print_row(FILE *f, const llama_family *one)
{
    static const char *const windows[] = {"none", "all layers", "with `use_sliding_window`, by layer",
                                          "by layer", "none; linear attention by layer"};
    static const char *const biases[] = {"none", "q, k, v", "q, k, v, o"};
    fprintf(f, "| `%s` | %s | %s%s | %s%s |", one->type, one->architecture,
            one->latent                                      ? "q_a, kv_a, o"
            : llama_is_word(one->keys, "attention_out_bias") ? "q, k, v; o"
                                                             : biases[one->bias],
            one->bias_always ? ", always" : "", windows[one->windows],
            llama_is_word(one->keys, "no_rope_layers") ? "; layers without RoPE"
            : one->nope                                ? "; RoPE where there is one"
            : one->local > 0                           ? ", with a theta of their own"
                                                       : "");
    fprintf(f, " %s%s%s%s%s%s%s%s%s%s%s |", one->qk_norm ? "QK norm; " : "",
            one->latent & LLAMA_LATENT_DENSE ? "K and V of a latent, no experts; "
            : one->latent                    ? "K and V of a latent; "
                                             : "",
            one->norms == LLAMA_NORMS_RESULTS ? "norms of both halves' results alone; "
            : one->norms != LLAMA_NORMS_PRE   ? "norms of both halves' results; "
                                              : "",
            one->fused & LLAMA_FUSED_GATE ? "attention's output times a gate; " : "",
            one->shifted ? "1 + weight; " : "",
            one->gemma ? "GELU; the embedding times the root of hidden_size; " : "",
            one->logit_cap > 0 ? "soft-caps; " : "",
            llama_is_word(one->keys, "embedding_multiplier") || one->latent & LLAMA_LATENT_DEPTH
                ? "multipliers; "
                : "",
            one->latent & LLAMA_LATENT_EITHER                      ? "pairs by `rope_interleave`; "
            : one->interleaved || one->latent & LLAMA_LATENT_PAIRS ? "interleaved pairs; "
                                                                   : "",
            one->partial > 0 ? "a part of the head; " : "",
            one->ropes ? "default and longrope alone" : "all types of RoPE");
    fprintf(f, " %s%s%s |\n", one->fused & LLAMA_FUSED_QKV ? "`qkv_proj` " : "",
            one->fused & LLAMA_FUSED_GATE ? "`q_proj`, of q and the gate head by head" : "",
            one->fused & LLAMA_FUSED_MLP ? "`gate_up_proj`"
            : one->fused                 ? ""
                                         : "-");
}

static void print_defaults(FILE *f, const llama_family *one)
{
    fprintf(f, "| `%s` | %s | ", one->type, one->kv_heads ? "as heads" : "must be there");
    if (one->head_dim > 0) fprintf(f, "%d", one->head_dim);
    if (one->latent) fputs("qk_nope + qk_rope", f);
    if (one->head_dim == LLAMA_HEAD_DIVIDED && !one->latent) fputs("hidden_size / heads", f);
    if (one->head_dim == LLAMA_HEAD_GIVEN) fputs("must be there", f);
    fprintf(f, " | %g | %g | %s | ", one->norm_eps, one->rope_theta, one->tied ? "true" : "false");
    if (one->pad > 0)
        fprintf(f, "%" PRId64 " | ", one->pad - 1);
    else
        fputs("none | ", f);
    if (one->window > 0)
        fprintf(f, "%" PRId64 "%s |\n", one->window,
                one->full_every     ? ", every 4th layer from the first on all"
                : one->pattern == 6 ? ", every 6th layer all"
                : one->pattern == 4 ? ", every 4th layer all"
                : one->pattern == 2 ? ", every 2nd layer all"
                                    : "");
    else
        fputs("none |\n", f);
}

/* What of the published files is read. */
static void print_published(FILE *f)
{
    const char *name;
    json_t *group;
    size_t k, all = 0, plain = 0, flags = 0;
    json_object_foreach(published, name, group)
    {
        all += json_is_array(group);
        plain += json_is_object(json_array_get(json_array_get(group, 0), 2));
        flags += json_is_array(json_array_get(json_array_get(group, 0), 3));
    }
    fprintf(
        f,
        "\n## Published files\n\nOf %zu files as people download them, in [published.json](../tests/cases/published.json), %zu are\n"
        "read without a flag, %zu with `--ignore-key`, and %zu are refused, as the model is not built.\n\n"
        "| `config.json` of | it takes |\n|---|---|\n",
        all, plain, flags, all - plain - flags);
    json_object_foreach(published, name, group)
    {
        const json_t *const one = json_array_get(group, 0), *const keys = json_array_get(one, 3);
        if (one == NULL) continue;
        fprintf(f, "| %s | %s", name,
                keys != NULL                             ? "`--ignore-key` "
                : json_is_object(json_array_get(one, 2)) ? "nothing"
                                                         : "refused");
        for (k = 0; k < json_array_size(keys); ++k)
            fprintf(f, "%s`%s`", k > 0 ? ", " : "", json_string_value(json_array_get(keys, k)));
        fputs(" |\n", f);
    }
}

static void print_page(FILE *f)
{
    int i;
    fputs(
        "# Models\n\n"
        "Which models `train --load` and `logits --load` read, and `--save` writes again, from the table in\n"
        "[families.h](../examples/train/model/families.h). A new family is a row there;\n"
        "`test_models tests/cases/published.json > docs/models.md` prints this page. [checkpoints.md](checkpoints.md) says\n"
        "how a folder is read and what is refused.\n\n"
        "A layer is that of a Llama: RMS norm, attention with RoPE, RMS norm, an MLP with SiLU and a gate. The families\n"
        "differ in what the table says. Biases are those that `attention_bias` gives. Types of RoPE are default, linear,\n"
        "dynamic, llama3, yarn and longrope. Tensors are named as in `transformers`; what a family stores as one tensor\n"
        "is read and written as one.\n\n"
        "| `model_type` | architecture | biases | windows | RoPE and norms | one tensor |\n|---|---|---|---|---|---|\n",
        f);
    for (i = 0; i < LLAMA_FAMILIES; ++i) print_row(f, &llama_families[i]);
    fputs(
        "\n## Where a key is absent\n\n"
        "The values of `transformers`. A number of heads is not guessed, and no number of linear attention or of a latent, but\n"
        "for `v_head_dim` of a `minicpm3`: hidden_size / heads.\n\n"
        "| `model_type` | num_key_value_heads | head_dim | rms_norm_eps | rope_theta | tie_word_embeddings | pad_token_id |"
        " sliding_window |\n|---|---|---|---|---|---|---|---|\n",
        f);
    for (i = 0; i < LLAMA_FAMILIES; ++i) print_defaults(f, &llama_families[i]);
    fputs(
        "\n## K and V of a latent\n\n"
        "The keys that count are those of `transformers`: `q_lora_rank` (null: `q_proj` makes Q), `kv_lora_rank`,\n"
        "`qk_nope_head_dim`, `qk_rope_head_dim`, `v_head_dim`. `head_dim` may say `qk_rope_head_dim`, `qk_head_dim` the sum of\n"
        "both. The norms of what is projected down have the epsilon 1e-6, whatever `rms_norm_eps` says. With YaRN\n"
        "`mscale_all_dim` scales scores too. `attention_bias` gives biases of `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj`.\n"
        "`first_k_dense_replace` must be the number of layers or more: a mixture of experts is refused. Keys of experts then\n"
        "change nothing. [training](training.md#k-and-v-of-a-latent) says what these models do not have.\n",
        f);
    fputs("\n## Keys\n\nThese count in every family: they are used, or must say what is built. ", f);
    print_keys(f, llama_keys);
    fputs(".\n\nThese change nothing in any: ", f);
    print_keys(f, llama_keys_idle);
    fputs(
        ".\n\nAny other key is refused by its name, all of them in one sentence, unless `--ignore-key NAME` says to read on without\n"
        "it. A key inside `rope_scaling` or `rope_parameters` is named with the object: `rope_scaling.attn_factor`.\n\n"
        "| `model_type` | these count too | these change nothing |\n|---|---|---|\n",
        f);
    for (i = 0; i < LLAMA_FAMILIES; ++i) {
        fprintf(f, "| `%s` | ", llama_families[i].type);
        print_keys(f, llama_families[i].keys);
        fputs(" | ", f);
        print_keys(f, llama_families[i].idle);
        fputs(" |\n", f);
    }
    for (i = 0; i < LLAMA_FAMILIES; ++i) {
        const llama_family *one = &llama_families[i];
        if (one->whole == NULL) continue;
        fprintf(f, "\nIn `rope_parameters` of a `%s` these change nothing: ", one->type);
        print_keys(f, one->rope_idle);
        fprintf(
            f,
            ": the positions of a text are the same in all three of its sections. A file of a\n`%s` is read too, with a "
            "note: of it `text_config` counts, and the tensors `%s*`.\nBeside these the file may have the keys ",
            one->whole, one->part);
        print_keys(f, llama_keys_whole);
        fputs(" and tensors ", f);
        print_keys(f, one->others);
        fprintf(f, "\n(what their names begin with). What is saved is a `%s`.\n", one->type);
    }
    print_published(f);
    fputs("\n## By name\n\n`upipe-plan --model NAME` knows these: ", f);
    for (i = 0; i < (int)PRESETS; ++i) fprintf(f, "%s`%s`", i > 0 ? ", " : "", presets[i].name);
    fputs(".\nOf these it plans [the attention of one layer](latent.md#two-forms): ", f);
    for (i = 0; i < (int)LATENT_MODELS; ++i) fprintf(f, "%s`%s`", i > 0 ? ", " : "", latent_models[i].name);
    fputs(".\n", f);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: %s tests/cases/published.json [docs/models.md]\n", argv[0]);
        return 2;
    }
    published = cases_load(argv[1]);
    if (argc < 3) {
        print_page(stdout);
        return test_failures != 0;
    }
    test_begin(argc - 2, argv + 2);
    TEST(test_rows());
    TEST(test_presets());
    TEST_OF("page", page_check(argv[2], print_page, COMMAND));
    json_decref(published);
    return test_end("models");
}
