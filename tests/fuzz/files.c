/* files.c -- any bytes in the place of what the trainer reads: config.json, safetensors, an index, a run's numbers, an
 * adapter's config
 *
 * The first letter of an input says in the place of what the rest stands:
 *   c  config.json
 *   a  adapter_config.json
 *   s  a safetensors file
 *   h  its header alone: the length before it and 64 bytes of data behind it are added
 *   m  the metadata of a checkpoint's optimizer, a JSON object
 *   i  the index of a model in several files, one of which there is
 *   t  a file of tokens that says what it is, and its own loss mask; u one of u16, whose documents end with token 7
 *   x  the index of a Megatron file of 100 bytes
 *   l  a list of token files
 */
#define _GNU_SOURCE
#define PROGRAM    "fuzz_files"
#define FUZZ_PARTS 1 /* files of all kinds */
#include "fuzz.h"

#include "examples/train/files/data.h"
#include "examples/train/model/lora_flag.h"
#include "examples/train/state/adapter.h"
#include "examples/train/state/checkpoint.h"

enum { DATA = 64 };

static char folder[64];

static const char *in(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void put(const char *name, const void *bytes, size_t n)
{
    FILE *f = fopen(in(name), "wb");
    if (f == NULL || fwrite(bytes, 1, n, f) != n || fclose(f) != 0) abort();
}

/* [length][before][text][after][DATA zeros] */
static void put_safetensors(const char *name, const char *before, const char *text, size_t n,
                            const char *after)
{
    static char bytes[FUZZ_MAX + 256];
    const size_t head = strlen(before), tail = strlen(after), length = head + n + tail;
    size_t i;
    memset(bytes, 0, sizeof bytes);
    for (i = 0; i < 8; ++i) bytes[i] = (char)(length >> 8 * i & 255);
    memcpy(bytes + 8, before, head);
    memcpy(bytes + 8 + head, text, n);
    memcpy(bytes + 8 + head + n, after, tail);
    put(name, bytes, 8 + length + DATA);
}

static void end(void)
{
    static const char *const names[] = {"config.json",
                                        "adapter_config.json",
                                        "file.safetensors",
                                        "optimizer.safetensors",
                                        "part.safetensors",
                                        "model.safetensors.index.json",
                                        "ids",
                                        "ids.bin",
                                        "ids.idx",
                                        "list"};
    size_t i;
    for (i = 0; i < sizeof names / sizeof *names; ++i) unlink(in(names[i]));
    rmdir(folder);
}

static void begin(void)
{
    static const char part[] =
        "{\"model.norm.weight\":{\"dtype\":\"F32\",\"shape\":[16],\"data_offsets\":[0,64]}}";
    const char *parent = getenv("TMPDIR"), *memory = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : ".";
    if (folder[0] != 0) return;
    snprintf(folder, sizeof folder, "%s/fuzz.XXXXXX", parent != NULL && *parent ? parent : memory);
    if (mkdtemp(folder) == NULL) abort();
    put_safetensors("part.safetensors", "", part, sizeof part - 1, "");
    atexit(end);
}

/* A refusal leaves a sentence. */
static int accepted(int bad, const upipe_err *err)
{
    CHECK(bad == 0 || strlen(err->text) > 20);
    return bad == 0;
}

static void fuzz_config(const char *text, size_t n)
{
    llama_config c;
    llama_layout l;
    upipe_dtype dtype;
    upipe_err err = {{0}, UPIPE_OK};
    put("config.json", text, n);
    if (!accepted(llama_config_read(&c, &dtype, in("config.json"), NULL, &err), &err)) return;
    CHECK(c.layers >= 1 && c.layers <= LLAMA_LAYERS_MAX && c.heads >= 1 && c.kv_heads >= 1 &&
          c.head_dim >= 2);
    CHECK(c.heads % c.kv_heads == 0 && c.rope_theta > 0 && c.norm_eps > 0 && c.window >= 0);
    CHECK(c.family >= 0 && c.family < LLAMA_FAMILIES && c.pad >= 0 && c.pad <= c.vocab);
    CHECK(llama_layout_init(&l, &c) == 0 && l.weights > 0);
    llama_layout_free(&l);
}

/* The smallest model: its tensors have 4,096 and 64 elements at most. */
static llama_config smallest(void)
{
    llama_config config;
    memset(&config, 0, sizeof config);
    config.layers = config.heads = config.kv_heads = config.tied = 1;
    config.dim = config.hidden = 16;
    config.head_dim = 2;
    config.vocab = 4;
    return config;
}

/* --lora can say what is accepted. */
static void fuzz_adapter(const char *text, size_t n)
{
    const llama_config config = smallest();
    upipe_err err = {{0}, UPIPE_OK};
    llama_lora lora, again;
    llama_adapter a;
    put("adapter_config.json", text, n);
    memset(&a, 0, sizeof a);
    if (!accepted(llama_adapter_read(&lora, config.layers, in("adapter_config.json"), &err), &err) ||
        lora.targets == 0 || /* the tensors say */
        !accepted(llama_adapter_layout(&a, &lora, &config, "adapter", &err), &err))
        return;
    CHECK(llama_lora_parse(&again, a.flag) == 0);
    CHECK(again.rank == lora.rank && again.alpha == lora.alpha && again.targets == lora.targets);
    llama_layout_free(&a.layout);
}

/* The bytes of an element of a type by its name; 0: no type has it. */
static int bytes_of(const char *dtype)
{
    static const char *const names[] = {"",
                                        " U8 I8 BOOL F8_E4M3 F8_E5M2 ",
                                        " F16 BF16 I16 U16 ",
                                        "",
                                        " F32 I32 U32 ",
                                        "",
                                        "",
                                        "",
                                        " F64 I64 U64 "};
    int size = 8;
    while (size > 0 && !llama_is_word(names[size], dtype)) --size;
    return size;
}

/* A tensor that the reader has, against what the header says of it. */
static void check_tensor(const st_file *f, const st_tensor *t, const json_t *said, const char *data,
                         unsigned char *covered)
{
    static unsigned char raw[FUZZ_MAX + 256];
    static float wide[FUZZ_MAX];
    const json_t *shape = json_object_get(said, "shape"), *offsets = json_object_get(said, "data_offsets");
    const char *dtype = json_string_value(json_object_get(said, "dtype"));
    const int64_t begin = json_integer_value(json_array_get(offsets, 0)),
                  end = json_integer_value(json_array_get(offsets, 1));
    upipe_err err = {{0}, UPIPE_OK};
    double n = 1;
    int64_t k;
    int i;
    if (!CHECK(dtype != NULL && bytes_of(dtype) > 0 && json_array_size(offsets) == 2)) return;
    CHECK_INT(t->rank, json_array_size(shape));
    for (i = 0; i < t->rank; ++i) {
        const json_t *dimension = json_array_get(shape, (size_t)i);
        CHECK(json_is_integer(dimension) && json_integer_value(dimension) >= 0);
        CHECK_INT(t->shape[i], json_integer_value(dimension));
        n *= (double)t->shape[i];
    }
    CHECK(n * bytes_of(dtype) == (double)(end - begin));
    CHECK_INT(t->bytes, end - begin);
    CHECK(t->at >= 8 + begin && t->at + t->bytes <= f->bytes);
    for (k = begin; k < end; ++k) CHECK(covered[k]++ == 0);
    CHECK_INT(st_read_raw(f, t, 0, t->n, raw, &err), 0);
    CHECK_BYTES(raw, data + begin, t->bytes);
    if (t->dtype <= ST_BF16) CHECK_INT(st_read_f32(f, t, 0, t->n, wide, &err), 0);
}

/* What the reader has accepted, looked at again from its bytes: each byte of the data belongs to exactly one tensor. */
static void fuzz_tensors(void)
{
    static unsigned char covered[FUZZ_MAX + 256];
    size_t bytes = 0, length = 0, i;
    upipe_err err = {{0}, UPIPE_OK};
    json_t *root, *said;
    const char *name;
    char *all;
    int tensors = 0;
    st_file f;
    if (!accepted(st_open(&f, in("file.safetensors"), &err), &err)) return;
    all = llama_file(in("file.safetensors"), sizeof covered, &bytes, &err);
    for (i = 0; i < 8 && all != NULL; ++i) length |= (size_t)(unsigned char)all[i] << 8 * i;
    if (!CHECK(all != NULL && bytes >= 10 && length <= bytes - 8)) return;
    memset(covered, 0, sizeof covered);
    root = json_loadb(all + 8, length, JSON_REJECT_DUPLICATES, NULL);
    CHECK(json_is_object(root));
    json_object_foreach(root, name, said)
    {
        const st_tensor *t = st_find(&f, name);
        CHECK((t == NULL) == (strcmp(name, "__metadata__") == 0));
        if (t == NULL) continue;
        ++tensors;
        check_tensor(&f, t, said, all + 8 + length, covered);
    }
    for (i = 0; i < bytes - 8 - length; ++i) CHECK(covered[i] == 1);
    CHECK_INT(f.n, tensors);
    (void)st_metadata(&f, "dtype");
    json_decref(root);
    free(all);
    st_close(&f);
}

static void fuzz_run(void)
{
    upipe_err err = {{0}, UPIPE_OK};
    upipe_dtype dtype;
    llama_run run;
    memset(&run, 0, sizeof run);
    if (!accepted(llama_load_run(folder, &run, &dtype, &err), &err)) return;
    CHECK(run.step >= 0 && run.steps >= 0 && run.tokens >= 1 && run.batch >= 1 && run.lr >= 0 &&
          isfinite(run.lr));
}

static upipe_status copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    (void)c;
    memcpy(dst, src, bytes);
    return UPIPE_OK;
}

static void fuzz_index(void)
{
    static float weights[4096], vectors[64];
    const llama_config config = smallest();
    llama_layout l;
    llama_state state;
    upipe_ops ops;
    upipe_ctx c;
    memset(&ops, 0, sizeof ops);
    memset(&c, 0, sizeof c);
    ops.copy = copy;
    c.ops = &ops;
    if (llama_layout_init(&l, &config) != 0) abort();
    CHECK(l.weights <= 4096 && l.vectors <= 64);
    llama_state_init(&state, &l, UPIPE_F32, 0, 0, 1);
    state.zero[LLAMA_WEIGHTS].weights = weights;
    state.zero[LLAMA_VECTORS].weights = vectors;
    accepted(llama_load_weights(&c, folder, &state, NULL) != UPIPE_OK, &c.err);
    llama_layout_free(&l);
}

/* What is accepted can be read from end to end: ids below the vocabulary, borders that ascend. */
static void fuzz_data(const char *name, token_type type)
{
    static int32_t inputs[8], targets[8];
    static int64_t borders[16];
    const upipe_shard s = upi_shard_range(0, 8);
    char path[128];
    data_request q;
    data_order order;
    corpus d;
    int64_t k, i, n, w;
    data_request_init(&q);
    snprintf(path, sizeof path, "%s%s", name[0] == '@' ? "@" : "", in(name + (name[0] == '@')));
    q.files = path;
    q.type = type;
    q.tokens = 8;
    q.vocab = 1 << 14;
    q.end_token = type == TOKEN_U16 ? 7 : -1;
    q.mask = type == TOKEN_AUTO ? path : NULL; /* which fits where it says its own type */
    cli_holds = 1;
    cli_held[0] = 0;
    if (data_open(&d, &q) != 0) {
        CHECK(strlen(cli_held) > 20);
        return;
    }
    q.by_documents = d.by_documents = d.documents.n > 0 && d.ids.n % 2 == 0;
    CHECK(data_scan(&d, &q) == 0 || strlen(cli_held) > 20);
    data_order_init(&order);
    for (k = 0; k < d.windows && cli_held[0] == 0; ++k) {
        w = data_window(&d, &order, 1, k);
        CHECK_INT(data_fill(&d, &order, w, &s, inputs, targets), 0);
        for (i = 0; i < 8; ++i) CHECK(inputs[i] >= 0 && inputs[i] < q.vocab && targets[i] < q.vocab);
        n = data_borders(&d, &order, w, 0, borders);
        CHECK(n < data_borders_max(&d, 1) && borders[0] == 0 && borders[n] == 8);
        for (i = 0; i < n; ++i) CHECK(borders[i] < borders[i + 1]);
    }
    data_order_free(&order);
    data_close(&d);
}

static void fuzz_one(const char *input, size_t n)
{
    static const char hundred[100];
    if (n == 0) return;
    begin();
    ++input, --n;
    switch (input[-1]) {
    case 'c':
        fuzz_config(input, n);
        break;
    case 'a':
        fuzz_adapter(input, n);
        break;
    case 's':
        put("file.safetensors", input, n);
        fuzz_tensors();
        break;
    case 'h':
        put_safetensors("file.safetensors", "", input, n, "");
        fuzz_tensors();
        break;
    case 'm':
        put_safetensors("optimizer.safetensors", "{\"__metadata__\":", input, n,
                        ",\"a\":{\"dtype\":\"U8\",\"shape\":[64],\"data_offsets\":[0,64]}}");
        fuzz_run();
        break;
    case 'i':
        put("model.safetensors.index.json", input, n);
        fuzz_index();
        break;
    case 't':
        put("ids", input, n);
        fuzz_data("ids", TOKEN_AUTO);
        break;
    case 'u':
        put("ids", input, n);
        fuzz_data("ids", TOKEN_U16);
        break;
    case 'x':
        put("ids.bin", hundred, sizeof hundred);
        put("ids.idx", input, n);
        fuzz_data("ids.bin", TOKEN_AUTO);
        break;
    case 'l':
        put("ids", hundred, sizeof hundred);
        put("list", input, n);
        fuzz_data("@list", TOKEN_U8);
        break;
    default:
        break;
    }
}
