/* test_loading.c -- weights of models of others and an optimizer's tensors: read from any type, in one file or several, and
 * refused by their names
 *
 * What headers, config.json and a run's numbers may say are cases of test_files.
 */
#define _POSIX_C_SOURCE 200809L
#include "lib/state.h"

/* ---- models ---- */

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
    state_begin("test_loading");
    test_begin(argc, argv);
    TEST(test_rounding());
    TEST(test_models());
    TEST(test_tied());
    TEST(test_optimizers());
    CHECK_INT(rmdir(folder), 0);
    return test_end("loading");
}
