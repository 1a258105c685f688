/* test_files.c -- what files of a model and of a run may say, good and bad: the cases of tests/cases
 *
 *     test_files tests/cases
 *
 * A file of cases has bases by name and groups of cases. A case is [base, change, outcome]: the change is laid over the base
 * of that name, objects within objects too, and what comes of it is written and read. A change that is a string is the text
 * itself; "" is no base. The outcome is what the sentence that refuses it must say, or an object: by name what it is read
 * as, beside what "usual" says of every case.
 * [base, [keys], outcome, [values]] are cases of each key with each value, and without values of the base that lacks
 * the key. Their sentence has the key before the outcome, and the value where the outcome says VALUE.
 * A config.json has a fourth member otherwise: the keys that --ignore-key must name, each of them, for it to be read.
 */
#define _GNU_SOURCE
#define PROGRAM "test_files"
#include <sys/stat.h>

#include "examples/train/state/adapter.h"
#include "examples/train/state/checkpoint.h"

#include "lib/cases.h"

static char folder[1024];
static const char *cases; /* the folder of them */

static const char *in(const char *name)
{
    static char path[LLAMA_PATH];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_bytes(const char *name, const void *bytes, size_t n)
{
    FILE *f = fopen(in(name), "wb");
    if (f == NULL || fwrite(bytes, 1, n, f) != n || fclose(f) != 0) abort();
}

/* A value as a file of JSON has it, and a string as it is; the caller frees it. */
static char *text_of(const json_t *value)
{
    char *text =
        json_is_string(value) ? strdup(json_string_value(value)) : json_dumps(value, JSON_ENCODE_ANY);
    if (text == NULL) abort();
    return text;
}

/* A file of this header, its length in front, and `data` zero bytes. */
static void write_tensors(const char *name, const char *header, size_t data)
{
    const size_t n = strlen(header);
    unsigned char *bytes = (unsigned char *)calloc(8 + n + data, 1);
    size_t i;
    if (bytes == NULL) abort();
    for (i = 0; i < 8; ++i) bytes[i] = (unsigned char)((uint64_t)n >> 8 * i);
    memcpy(bytes + 8, header, n);
    write_bytes(name, bytes, 8 + n + data);
    free(bytes);
}

/* Of a table: a row by its key, or its flag where it has none; as JSON has it. */
static const char *field_said(char out[FIELD_TEXT], const field *rows, int n, const void *of,
                              const char *name)
{
    int i;
    for (i = 0; i < n; ++i)
        if (strcmp(rows[i].key != NULL ? rows[i].key : rows[i].flag, name) == 0)
            return field_text(out, &rows[i], of);
    return "no number of this name";
}

/* ---- config.json ---- */

static llama_config config;

static int config_read(const char *text, const text_list *ignored, upipe_err *err)
{
    write_bytes("config.json", text, strlen(text));
    return llama_config_read(&config, NULL, in("config.json"), ignored, err);
}

static int config_case(const char *text, const json_t *one, upipe_err *err)
{
    (void)one;
    return config_read(text, NULL, err);
}

/* layers: those that see all (A), turn nothing (N), both (B), have linear attention (L). */
static const char *config_said(char out[FIELD_TEXT], const char *name)
{
    int64_t i;
    if (strcmp(name, "layers") != 0) return field_said(out, llama_fields, LLAMA_FIELDS, &config, name);
    for (i = 0; i < config.layers && i < FIELD_TEXT - 1; ++i) out[i] = ".ANBL"[config.by_layer[i]];
    out[i] = 0;
    return out;
}

/* What was read is written, and read as the same. */
static void config_again(void)
{
    llama_config back;
    upipe_dtype dtype;
    upipe_err err = {{0}, UPIPE_OK};
    unlink(in("config.json"));
    CHECK_SAY(llama_config_write(&config, UPIPE_BF16, 77, in("config.json"), &err) == 0, "%s", err.text);
    CHECK_SAY(llama_config_read(&back, &dtype, in("config.json"), NULL, &err) == 0, "%s", err.text);
    CHECK_BYTES(&back, &config, sizeof back);
    CHECK_INT(dtype, UPIPE_BF16);
}

/* With all of these keys it is read, without any of them it is still refused, and none is named that is not there. */
static void config_ignored(const char *text, const json_t *keys)
{
    const char *const last = json_string_value(json_array_get(keys, json_array_size(keys) - 1));
    text_list ignored = {(int)json_array_size(keys), {0}};
    upipe_err err = {{0}, UPIPE_OK};
    int i;
    for (i = 0; i < ignored.n; ++i) ignored.at[i] = json_string_value(json_array_get(keys, (size_t)i));
    CHECK_SAY(config_read(text, &ignored, &err) == 0, "%s", err.text);
    for (i = 0, --ignored.n; i <= ignored.n; ++i) {
        const char *const left = ignored.at[i];
        ignored.at[i] = last;
        CHECK_INT(config_read(text, &ignored, &err), -1);
        ignored.at[i] = left;
    }
    ++ignored.n;
    ignored.at[ignored.n++] = "rope_scaling.none";
    CHECK_INT(config_read(text, &ignored, &err), -1);
    CHECK_TEXT(err.text, "has no key rope_scaling.none, which --ignore-key names");
}

/* ---- adapter_config.json, of a model of two layers ---- */

static llama_lora lora;

static int adapter_case(const char *text, const json_t *one, upipe_err *err)
{
    (void)one;
    write_bytes(LLAMA_ADAPTER_CONFIG, text, strlen(text));
    return llama_adapter_read(&lora, 2, in(LLAMA_ADAPTER_CONFIG), err);
}

/* flag: as --lora would say it; without projections where the tensors say which. */
static const char *adapter_said(char out[FIELD_TEXT], const char *name)
{
    const char *before = ":";
    int i, n = snprintf(out, FIELD_TEXT, "%d:%.6g", lora.rank, lora.alpha);
    if (strcmp(name, "flag") != 0) return "no number of this name";
    for (i = 0; i < LLAMA_LORAS; ++i) {
        if (!(lora.targets >> i & 1)) continue;
        n += snprintf(out + n, (size_t)(FIELD_TEXT - n), "%s%s", before, llama_lora_names[i]);
        before = ",";
    }
    return out;
}

/* ---- the numbers of a run, in the metadata of its optimizer ---- */

static llama_run run;

static int run_case(const char *text, const json_t *one, upipe_err *err)
{
    upipe_dtype dtype;
    char *header = NULL;
    (void)one;
    if (asprintf(&header, "{\"__metadata__\": %s}", text) < 0) abort();
    write_tensors("optimizer.safetensors", header, 0);
    free(header);
    return llama_load_run(folder, &run, &dtype, err);
}

static const char *run_said(char out[FIELD_TEXT], const char *name)
{
    return field_said(out, llama_run_fields, LLAMA_RUN_FIELDS, &run, name);
}

/* ---- the header of a safetensors file: in the place of the base a number of zero bytes behind it ---- */

static int64_t tensors_read;

static int tensors_case(const char *text, const json_t *one, upipe_err *err)
{
    st_file f;
    write_tensors("file.safetensors", text, (size_t)json_integer_value(json_array_get(one, 0)));
    if (st_open(&f, in("file.safetensors"), err)) return -1;
    tensors_read = f.n;
    st_close(&f);
    return 0;
}

static const char *tensors_said(char out[FIELD_TEXT], const char *name)
{
    snprintf(out, FIELD_TEXT, "%" PRId64, tensors_read);
    return strcmp(name, "tensors") == 0 ? out : "no number of this name";
}

/* ---- cases ---- */

typedef struct kind {
    const char *cases, *file; /* of the cases, and what is written of each */
    int (*read)(const char *text, const json_t *one, upipe_err *err);
    const char *(*said)(char out[FIELD_TEXT], const char *name); /* what was read, by name */
} kind;

static const kind kinds[] = {{"config.json", "config.json", config_case, config_said},
                             {"adapter_config.json", LLAMA_ADAPTER_CONFIG, adapter_case, adapter_said},
                             {"published.json", "config.json", config_case, config_said},
                             {"run.json", "optimizer.safetensors", run_case, run_said},
                             {"safetensors.json", "file.safetensors", tensors_case, tensors_said}};

/* What was read is what the outcome says, and what is usual for the rest. */
static void check_read(const kind *k, const json_t *usual, const json_t *outcome, const char *text)
{
    json_t *all = json_is_object(usual) ? json_deep_copy(usual) : json_object(), *value;
    const char *name;
    json_object_update(all, (json_t *)(uintptr_t)outcome);
    json_object_foreach(all, name, value)
    {
        char out[FIELD_TEXT], *want = text_of(value);
        const char *got = k->said(out, name);
        const int same =
            json_is_real(value) ? strtod(got, NULL) == json_real_value(value) : strcmp(got, want) == 0;
        CHECK_SAY(same, "%s: %s is %s, not %s", text, name, got, want);
        free(want);
    }
    json_decref(all);
}

/* The file is read as the outcome says, or refused by this sentence. */
static void check_file(const kind *k, const json_t *root, const json_t *one, const char *text,
                       const char *says)
{
    const json_t *outcome = json_array_get(one, 2), *keys = json_array_get(one, 3);
    upipe_err err = {{0}, UPIPE_OK};
    const int bad = k->read(text, one, &err);
    if (!CHECK_SAY(bad == (says != NULL ? -1 : 0), "%s: \"%s\", not \"%s\"", text, err.text,
                   says != NULL ? says : "read"))
        return;
    if (says != NULL)
        CHECK_SAY(strstr(err.text, says) != NULL && strstr(err.text, k->file) != NULL,
                  "%s: \"%s\" does not say \"%s\"", text, err.text, says);
    else
        check_read(k, json_object_get(root, "usual"), outcome, text);
    if (k->read != config_case) return;
    if (says == NULL) config_again();
    if (says != NULL && json_is_array(keys) && json_is_object(json_array_get(one, 1)))
        config_ignored(text, keys);
}

/* The base of a case; the caller gives it back. */
static json_t *base_of(const json_t *root, const json_t *one)
{
    const json_t *name = json_array_get(one, 0);
    const json_t *base =
        json_object_get(json_object_get(root, "bases"), json_is_string(name) ? json_string_value(name) : "");
    CHECK_SAY(base != NULL || json_is_integer(name) || !*json_string_value(name), "no base is %s",
              json_string_value(name));
    return base != NULL ? json_deep_copy(base) : json_object();
}

/* "KEY outcome", with the value in the place of VALUE. */
static void sentence_of(char *out, size_t bytes, const char *key, const char *outcome, const json_t *value)
{
    const char *at = strstr(outcome, "VALUE");
    char *text = value != NULL ? text_of(value) : NULL;
    if (at == NULL || text == NULL)
        snprintf(out, bytes, "%s %s", key, outcome);
    else
        snprintf(out, bytes, "%s %.*s%s%s", key, (int)(at - outcome), outcome, text, at + strlen("VALUE"));
    free(text);
}

/* Each key of a list with each value, or without. */
static void check_keys(const kind *k, const json_t *root, const json_t *one)
{
    const json_t *keys = json_array_get(one, 1), *values = json_array_get(one, 3);
    const char *outcome = json_string_value(json_array_get(one, 2));
    size_t i, n;
    for (i = 0; i < json_array_size(keys); ++i)
        for (n = 0; n < (values != NULL ? json_array_size(values) : 1); ++n) {
            const char *key = json_string_value(json_array_get(keys, i));
            json_t *all = base_of(root, one);
            char says[256], *text;
            sentence_of(says, sizeof says, key, outcome, json_array_get(values, n));
            if (values != NULL)
                json_object_set(all, key, json_array_get(values, n));
            else
                CHECK_SAY(json_object_del(all, key) == 0, "the base has no %s", key);
            text = text_of(all);
            check_file(k, root, one, text, says);
            free(text);
            json_decref(all);
        }
}

static void check_case(const kind *k, const json_t *root, const json_t *one)
{
    const json_t *change = json_array_get(one, 1), *outcome = json_array_get(one, 2);
    json_t *all;
    char *text;
    if (!CHECK(json_is_string(outcome) || json_is_object(outcome))) return;
    if (json_is_array(change)) {
        check_keys(k, root, one);
        return;
    }
    all = base_of(root, one);
    if (json_is_object(change)) json_object_update_recursive(all, (json_t *)(uintptr_t)change);
    text = text_of(json_is_string(change) ? change : all);
    check_file(k, root, one, text, json_string_value(outcome));
    free(text);
    json_decref(all);
}

/* A file of cases. */
static json_t *load(const char *name)
{
    char path[LLAMA_PATH];
    snprintf(path, sizeof path, "%s/%s", cases, name);
    return cases_load(path);
}

static void test_cases(const kind *k)
{
    json_t *root = load(k->cases), *group;
    const char *name;
    size_t i, n = 0;
    json_object_foreach(root, name, group)
    {
        for (i = 0; i < json_array_size(group); ++i, ++n) {
            test_at("case %zu of \"%s\"", i + 1, name);
            check_case(k, root, json_array_get(group, i));
        }
    }
    test_at("%s", "");
    CHECK_SAY(n > 10, "%zu cases of %s", n, k->cases);
    json_decref(root);
}

/* ---- config.json beside the cases ---- */

/* Numbers that are written are read as the same bits. */
static void test_numbers(json_t *bases)
{
    static const double numbers[] = {1, 10000, 500000, 1e6, 1.1, 4.0 / 3, 123456789.25, 1e12};
    upipe_err err = {{0}, UPIPE_OK};
    size_t i;
    for (i = 0; i < sizeof numbers / sizeof *numbers; ++i) {
        char *text = text_of(json_object_get(bases, i % 2 ? "mistral" : "llama"));
        CHECK_INT(config_read(text, NULL, &err), 0);
        config.rope_theta = numbers[i];
        config.norm_eps = 1 / numbers[i];
        config.window = i % 2 ? (int64_t)i : 0;
        CHECK_INT(llama_config_write(&config, UPIPE_BF16, 77, in("config.json"), &err), -1);
        CHECK_TEXT(err.text, "cannot be made");
        config_again();
        free(text);
    }
}

/* What is no file of JSON. */
static void test_no_file(void)
{
    const size_t most = LLAMA_CONFIG_BYTES_MAX;
    char *big = (char *)malloc(most + 2);
    upipe_err err = {{0}, UPIPE_OK};
    if (big == NULL) abort();
    memset(big, ' ', most + 1);
    big[most + 1] = 0;
    CHECK_INT(config_read(big, NULL, &err), -1);
    CHECK_TEXT(err.text, "is longer than 1048576 bytes");
    free(big);
    CHECK_INT(llama_config_read(&config, NULL, folder, NULL, &err), -1);
    CHECK_TEXT(err.text, "cannot be read: it is no regular file");
    unlink(in("config.json"));
    CHECK_INT(mkfifo(in("config.json"), 0600), 0); /* nobody writes to it */
    CHECK_INT(llama_config_read(&config, NULL, in("config.json"), NULL, &err), -1);
    CHECK_TEXT(err.text, "cannot be read: it is no regular file");
    unlink(in("config.json"));
    CHECK_INT(llama_config_read(&config, NULL, in("config.json"), NULL, &err), -1);
    CHECK_TEXT(err.text, "cannot be read: No such file");
}

/* A base with one key more is read, or refused by these words. */
static void check_more(const json_t *base, const char *key, const text_list *ignored, const char *says)
{
    upipe_err err = {{0}, UPIPE_OK};
    json_t *all = json_deep_copy(base);
    char *text;
    json_object_set_new(all, key, json_integer(1));
    text = text_of(all);
    CHECK_SAY(config_read(text, ignored, &err) == (says != NULL ? -1 : 0), "%s: %s", text, err.text);
    if (says != NULL) CHECK_TEXT(err.text, says);
    free(text);
    json_decref(all);
}

/* Each key is known or refused by its name, with each family; --ignore-key reads on without it. Keys without effect have
 * none. */
static void test_keys(json_t *bases)
{
    static const char *const unknown[] = {"attn_softcapping", "logit_scale", "use_cach",
                                          "num_experts",      "activation",  "clip_qkv"};
    const text_list other = {1, {"else"}};
    int family, n;
    size_t i;
    for (family = 0; family < LLAMA_FAMILIES; ++family) {
        const llama_family *f = &llama_families[family];
        const json_t *base = json_object_get(bases, f->type);
        const char *at, *const idle[] = {llama_keys_idle, f->idle};
        llama_config plain;
        char words[200];
        if (!CHECK_SAY(base != NULL, "no base is %s", f->type)) continue;
        for (i = 0; i < sizeof unknown / sizeof *unknown; ++i) {
            const text_list ignored = {1, {unknown[i]}};
            snprintf(words, sizeof words, "%s is a key that is not known of a %s", unknown[i], f->type);
            check_more(base, unknown[i], NULL, words);
            check_more(base, unknown[i], &ignored, NULL);
            check_more(base, unknown[i], &other, "has no key else, which --ignore-key names");
        }
        check_more(base, unknown[0], &(text_list){1, {unknown[0]}}, NULL);
        plain = config;
        for (i = 0; i < 2; ++i)
            for (at = idle[i] + strspn(idle[i], " "); *at != 0; at += n + (int)strspn(at + n, " ")) {
                n = (int)strcspn(at, " ");
                snprintf(words, sizeof words, "%.*s", n, at);
                check_more(base, words, NULL, NULL);
                CHECK_BYTES(&config, &plain, sizeof plain);
                CHECK(!llama_is_word(llama_keys, words) && !llama_is_word(f->keys, words));
            }
    }
}

/* A new model is written as a family that has its biases, window and norms, if there is one. */
static void test_families_of(json_t *bases)
{
    char *text = text_of(json_object_get(bases, "llama"));
    upipe_err err = {{0}, UPIPE_OK};
    int i, built = 0;
    CHECK_INT(config_read(text, NULL, &err), 0);
    free(text);
    for (i = 0; i < 12; ++i) {
        config.attention_bias = (llama_bias)(i % 3);
        config.window = i / 3 % 2 ? 5 : 0;
        config.qk_norm = i / 6 != 0;
        config.family = llama_family_of(&config);
        if (config.family < 0) continue;
        ++built;
        config_again();
    }
    CHECK_INT(built, 6); /* none, window, QK norm; qkv; qkvo without and with QK norm */
}

/* Every byte of the struct belongs to a row, but for those from `from` to `to`: what has no row is not compared, not
 * written and not read. */
static void check_fields(const char *what, const field *rows, int n, size_t bytes, size_t from, size_t to)
{
    static char a[8192], b[8192];
    size_t i;
    int k;
    CHECK(bytes <= sizeof a);
    memset(b, 0, sizeof b);
    CHECK(fields_differ(rows, n, a, b) == NULL);
    for (i = 0; i < bytes; ++i) {
        b[i] = 1;
        CHECK_SAY((fields_differ(rows, n, a, b) == NULL) == (i >= from && i < to), "byte %zu of %s: row %s",
                  i, what,
                  fields_differ(rows, n, a, b) != NULL ? fields_differ(rows, n, a, b)->flag : "none");
        b[i] = 0;
    }
    for (k = 0; k < n; ++k)
        CHECK_SAY(flag_find(IN_TRAIN | IN_CHECKPOINT, rows[k].flag) != NULL, "%s: no flag %s", what,
                  rows[k].flag);
}

static void test_fields(void)
{
    llama_config a = {.layers = 2,
                      .dim = 64,
                      .hidden = 96,
                      .vocab = 50,
                      .heads = 4,
                      .kv_heads = 2,
                      .head_dim = 16,
                      .attention_bias = LLAMA_BIAS_NONE,
                      .rope_theta = 10000,
                      .norm_eps = 1e-5},
                 b = a;
    char text[FIELD_TEXT];
    const field *f;
    check_fields("llama_config", llama_fields, LLAMA_FIELDS, sizeof a, 0, 0);
    check_fields("llama_run", llama_run_fields, LLAMA_RUN_FIELDS, sizeof(llama_run),
                 offsetof(llama_run, train),
                 offsetof(llama_run, text_hash) + sizeof(uint64_t)); /* no number that a flag says */
    b.rope_theta = 500000;
    f = fields_differ(llama_fields, LLAMA_FIELDS, &a, &b);
    CHECK(f != NULL && strcmp(f->key, "rope_theta") == 0);
    CHECK(strcmp(field_text(text, f, &a), "10000.0") == 0);
    CHECK(strcmp(field_text(text, f, &b), "500000.0") == 0);
}

int main(int argc, char **argv)
{
    const char *parent = getenv("TMPDIR"), *memory = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : ".";
    json_t *root, *bases;
    size_t i;
    if (argc < 2) {
        fprintf(stderr, "usage: %s tests/cases\n", argv[0]);
        return 2;
    }
    snprintf(folder, sizeof folder, "%s/test_files.XXXXXX", parent != NULL && *parent ? parent : memory);
    if (mkdtemp(folder) == NULL) {
        perror(folder);
        return 1;
    }
    test_begin(argc - 1, argv + 1);
    cases = argv[1];
    root = load("config.json");
    bases = json_object_get(root, "bases");
    for (i = 0; i < sizeof kinds / sizeof *kinds; ++i) TEST_OF(kinds[i].cases, test_cases(&kinds[i]));
    TEST(test_numbers(bases));
    TEST(test_no_file());
    TEST(test_keys(bases));
    TEST(test_families_of(bases));
    TEST(test_fields());
    json_decref(root);
    for (i = 0; i < sizeof kinds / sizeof *kinds; ++i) unlink(in(kinds[i].file));
    CHECK_INT(rmdir(folder), 0);
    return test_end("files");
}
