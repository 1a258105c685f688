/* test_data.c -- files of tokens written here byte by byte from their layouts, documents, borders, targets and orders, and
 * files that change while they are read
 */
#define _GNU_SOURCE
#define PROGRAM "test_data"
#include "../examples/train/files/data.h"

#include "lib/test.h"

enum { TOKENS = 100, VOCAB = 1000 };

static char folder[] = "data.XXXXXX";

static const char *in(const char *name)
{
    static char path[4][256];
    static int turn;
    snprintf(path[turn = (turn + 1) % 4], sizeof path[0], "%s/%s", folder, name);
    return path[turn];
}

/* ---- files, byte by byte ---- */

typedef struct bytes {
    unsigned char at[1 << 16];
    size_t n;
} bytes;

static void put(bytes *b, int64_t value, int width)
{
    int i;
    for (i = 0; i < width; ++i) b->at[b->n++] = (unsigned char)((uint64_t)value >> 8 * i);
}

static void puts_of(bytes *b, const char *text, size_t n)
{
    memcpy(b->at + b->n, text, n);
    b->n += n;
}

static void write_bytes(const char *name, const bytes *b)
{
    FILE *f = fopen(in(name), "wb");
    if (f == NULL || fwrite(b->at, 1, b->n, f) != b->n || fclose(f) != 0) abort();
}

static int64_t id_of(int64_t i)
{
    return (i * 37 + 11) % 251;
}

static void put_ids(bytes *b, int64_t from, int64_t to, int width)
{
    for (; from < to; ++from) put(b, id_of(from), width);
}

static void write_raw(const char *name, int64_t from, int64_t to, int width)
{
    static bytes b;
    b.n = 0;
    put_ids(&b, from, to, width);
    write_bytes(name, &b);
}

static void write_npy_of(const char *name, const char *descr, const char *shape, int64_t n, int width)
{
    static bytes b;
    char text[118];
    memset(text, ' ', sizeof text);
    snprintf(text, sizeof text, "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }", descr, shape);
    text[strlen(text)] = ' ';
    text[sizeof text - 1] = '\n';
    b.n = 0;
    puts_of(&b, "\x93NUMPY\x01\x00", 8);
    put(&b, sizeof text, 2);
    puts_of(&b, text, sizeof text);
    put_ids(&b, 0, n, width);
    write_bytes(name, &b);
}

static void write_npy(const char *name, const char *descr, int64_t reported, int64_t n, int width)
{
    char shape[32];
    snprintf(shape, sizeof shape, "%lld,", (long long)reported);
    write_npy_of(name, descr, shape, n, width);
}

static void write_text(const char *name, const char *text, size_t n)
{
    static bytes b;
    b.n = 0;
    puts_of(&b, text, n);
    write_bytes(name, &b);
}

static void write_llmc(const char *name, int64_t magic, int64_t version, int64_t reported, int64_t n,
                       int width)
{
    static bytes b;
    int i;
    b.n = 0;
    put(&b, magic, 4);
    put(&b, version, 4);
    put(&b, reported, 4);
    for (i = 3; i < 256; ++i) put(&b, 0, 4);
    put_ids(&b, 0, n, width);
    write_bytes(name, &b);
}

/* X.bin and X.idx: sequences of these lengths, documents that begin at these sequences. */
static void write_megatron(const char *name, int type, int width, int64_t first, const int *lengths, int n,
                           const int *starts, int entries, int64_t wrong_offset)
{
    static bytes b;
    char file[64];
    int64_t at = 0;
    int i;
    b.n = 0;
    puts_of(&b, "MMIDIDX\0\0", 9);
    put(&b, 1, 8);
    put(&b, type, 1);
    put(&b, n, 8);
    put(&b, entries, 8);
    for (i = 0; i < n; ++i) put(&b, lengths[i], 4);
    for (i = 0; i < n; ++i) {
        put(&b, at * width + (i == 1 ? wrong_offset : 0), 8);
        at += lengths[i];
    }
    for (i = 0; i < entries; ++i) put(&b, starts[i], 8);
    snprintf(file, sizeof file, "%s.idx", name);
    write_bytes(file, &b);
    snprintf(file, sizeof file, "%s.bin", name);
    write_raw(file, first, first + at, width);
}

/* ---- opening ---- */

static data_request request_of(const char *name, token_type type)
{
    static char path[2][300];
    static int turn;
    data_request q;
    data_request_init(&q);
    turn = !turn;
    snprintf(path[turn], sizeof path[0], "%s%s", name[0] == '@' ? "@" : "", in(name + (name[0] == '@')));
    q.files = path[turn];
    q.type = type;
    q.tokens = 16;
    q.vocab = VOCAB;
    return q;
}

/* Opened and scanned, or the sentence has these words. */
static int opens(corpus *d, const data_request *q, const char *words)
{
    int bad;
    cli_held[0] = '\0';
    bad = data_open(d, q) != 0;
    if (!bad && data_scan(d, q) != 0) {
        data_close(d);
        bad = 1;
    }
    if (words == NULL && bad) printf("%s: %s\n", q->files, cli_held);
    CHECK_INT(bad, words != NULL);
    if (words != NULL && !CHECK(strstr(cli_held, words) != NULL))
        printf("%s: \"%s\" does not say \"%s\"\n", q->files, cli_held, words);
    return !bad;
}

static void refused(const data_request *q, const char *words)
{
    corpus d;
    if (opens(&d, q, words)) data_close(&d);
}

/* All ids are those of id_of, in order. */
static void same_ids(const char *name, token_type type, int64_t count)
{
    const data_request q = request_of(name, type);
    corpus d;
    int64_t i;
    int file = 0;
    if (!opens(&d, &q, NULL)) return;
    CHECK_INT(d.ids.n, TOKENS);
    for (i = 0; i < d.ids.n; ++i) CHECK_INT(tokens_at(&d.ids, &file, i), id_of(i));
    for (i = d.ids.n - 1; i >= 0; i -= 7) CHECK_INT(tokens_at(&d.ids, &file, i), id_of(i));
    CHECK_INT(d.documents.n, count);
    CHECK_INT(d.windows, (TOKENS - 2) / 16 + 1);
    data_close(&d);
}

static void test_formats(void)
{
    static const int lengths[] = {40, 0, 30, 30}, starts[] = {0, 1, 2, 4};
    static bytes list;
    char whole[PATH_MAX];
    static const struct {
        const char *descr;
        int width;
    } npy[] = {{"|u1", 1}, {"|b1", 1}, {"<u2", 2}, {"<u4", 4}, {"<i4", 4}, {"<i8", 8}};
    static const struct {
        token_type type;
        int width;
    } raw[] = {{TOKEN_U8, 1}, {TOKEN_U16, 2}, {TOKEN_U32, 4}, {TOKEN_I32, 4}, {TOKEN_I64, 8}};
    static const int megatron[][2] = {{8, 2}, {4, 4}, {5, 8}, {1, 1}}; /* types, and their widths */
    size_t i;
    for (i = 0; i < sizeof npy / sizeof *npy; ++i) {
        write_npy("a.npy", npy[i].descr, TOKENS, TOKENS, npy[i].width);
        same_ids("a.npy", TOKEN_AUTO, 0);
    }
    write_llmc("a.bin", 20240520, 1, TOKENS, TOKENS, 2);
    same_ids("a.bin", TOKEN_AUTO, 0);
    write_llmc("b.bin", 20240801, 7, TOKENS, TOKENS, 4);
    same_ids("b.bin", TOKEN_AUTO, 0);
    for (i = 0; i < sizeof raw / sizeof *raw; ++i) {
        write_raw("raw", 0, TOKENS, raw[i].width);
        same_ids("raw", raw[i].type, 0);
    }
    for (i = 0; i < sizeof megatron / sizeof *megatron; ++i) {
        write_megatron("m", megatron[i][0], megatron[i][1], 0, lengths, 4, starts, 4, 0);
        same_ids("m.bin", TOKEN_AUTO, 2); /* the one of 0 tokens is none */
    }
    /* shards, one of them empty, and one named from the root on */
    write_raw("s0", 0, 40, 2);
    write_raw("s1", 40, 40, 2);
    write_raw("s2", 40, TOKENS, 2);
    puts_of(&list, "s0\ns1\n\n", 7);
    CHECK(realpath(in("s2"), whole) != NULL);
    puts_of(&list, whole, strlen(whole));
    write_bytes("list", &list);
    same_ids("@list", TOKEN_U16, 0);
}

/* A mask is in any format, whatever the type of raw ids, or raw u8 itself. */
static void test_masks(void)
{
    static const int lengths[] = {TOKENS}, starts[] = {0, 1};
    static const char *const names[] = {"mask", "mask.npy", "b.npy", "i.npy", "c.bin", "m.bin", "@list"};
    data_request q = request_of("raw", TOKEN_U16);
    size_t k;
    write_raw("raw", 0, TOKENS, 2);
    write_raw("mask", 0, TOKENS, 1);
    write_npy("mask.npy", "|u1", TOKENS, TOKENS, 1);
    write_npy("b.npy", "|b1", TOKENS, TOKENS, 1);
    write_npy("i.npy", "<i8", TOKENS, TOKENS, 8);
    write_llmc("c.bin", 20240520, 1, TOKENS, TOKENS, 2);
    write_megatron("m", 1, 1, 0, lengths, 1, starts, 2, 0);
    write_text("list", "mask.npy", 8);
    for (k = 0; k < 2 * sizeof names / sizeof *names; ++k) {
        const char *const name = names[k / 2];
        char list[300];
        corpus d;
        int64_t i;
        int file = 0;
        snprintf(list, sizeof list, "@%s", in("list"));
        q.mask = name[0] == '@' ? list : in(name);
        q.held = k % 2;
        if (!opens(&d, &q, NULL)) continue;
        CHECK_INT(d.mask.n, TOKENS);
        for (i = 0; i < d.mask.n; ++i) CHECK_INT(tokens_at(&d.mask, &file, i), id_of(i));
        data_close(&d);
    }
    write_npy("mask.npy", "<f4", TOKENS, TOKENS, 4);
    q.mask = in("mask.npy");
    for (q.held = 0; q.held < 2; ++q.held) {
        refused(&q, q.held ? "--eval-mask data." : "--loss-mask data.");
        refused(&q, "mask.npy: its numbers are '<f4'");
    }
}

/* What a .npy file is that is not read: each condition says so. */
static void test_npy(void)
{
    static const struct {
        const char *descr, *shape, *says;
    } cases[] = {
        {"<f4", "100,", "a.npy: its numbers are '<f4'; read are u1, b1, u2, u4, i4 and i8, little-endian"},
        {">u2", "100,", "its numbers are '>u2'"},
        {"<i2", "100,", "its numbers are '<i2'"},
        {"<u8", "100,", "its numbers are '<u8'"},
        {"<u4", "10, 10", "a.npy: its shape is (10, 10); one dimension is read"},
        {"<u4", "1, 100", "its shape is (1, 100)"},
        {"<u4", "", "its shape is ()"},
        {"<u4", "-1,", "its shape is (-1,)"},
        {"<u4", "99999999999999999999,", "its shape is (99999999999999999999,)"},
        {"<u4", "9223372036854775807,", "says 9223372036854775807 tokens of 4 bytes, but 400 bytes follow"},
        {"<u4", "99,", "says 99 tokens of 4 bytes, but 400 bytes follow"},
        {"<u4", "101,", "says 101 tokens of 4 bytes, but 400 bytes follow"}};
    const data_request q = request_of("a.npy", TOKEN_AUTO);
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; ++i) {
        write_npy_of("a.npy", cases[i].descr, cases[i].shape, TOKENS, 4);
        refused(&q, cases[i].says);
        refused(&q, "--tokens-file data.");
    }
    write_text("a.npy", "\x93NUMPY\x02\x00\x76\0\0\0", 12);
    refused(&q, "is a .npy file of version 2; version 1 is read");
    write_text("a.npy", "\x93NUMPY\x01\x00\x76\0{", 11);
    refused(&q, "is no whole .npy file: its header is cut");
    write_text("a.npy", "\x93NUMPY\x01\x00\x03\0{} ", 13);
    refused(&q, "its numbers are ''");
}

/* The text that Git has in the place of a large file is told from the file at every door; a text about it is one. */
static void test_pointers(void)
{
    static const char pointer[] =
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n";
    static const int lengths[] = {TOKENS}, starts[] = {0, 1};
    static const char says[] =
        "cannot be read: it is a Git LFS pointer, not the file, which `git lfs pull` fetches";
    data_request q = request_of("raw", TOKEN_U8);
    char text[256];
    write_text("raw", pointer, sizeof pointer - 1);
    refused(&q, says);
    q.files = NULL;
    q.text = in("raw");
    refused(&q, says);
    q = request_of("@raw", TOKEN_U8);
    refused(&q, says);
    write_text("raw", pointer + 1, sizeof pointer - 2);
    q = request_of("raw", TOKEN_U8);
    refused(&q, NULL);
    write_text("mask", pointer, sizeof pointer - 1);
    snprintf(text, sizeof text, "%s", in("mask"));
    q.mask = text;
    refused(&q, says);
    write_megatron("m", 1, 1, 0, lengths, 1, starts, 2, 0);
    write_text("m.idx", pointer, sizeof pointer - 1);
    q = request_of("m.bin", TOKEN_AUTO);
    refused(&q, says);
    unlink(in("m.idx"));
}

/* An id that no vocabulary of 1,000 has, in the middle of a raw file. */
static void test_wrong_ids(void)
{
    static const struct {
        token_type type;
        int width;
        int64_t id;
        const char *says;
    } cases[] = {{TOKEN_U16, 2, VOCAB, "raw: token 50 is 1000, the vocabulary has 1000"},
                 {TOKEN_U16, 2, 65535, "raw: token 50 is 65535, the"},
                 {TOKEN_I32, 4, -1, "raw: token 50 is -1, the"},
                 {TOKEN_U32, 4, -1, "raw: token 50 is 4294967295, the"},
                 {TOKEN_I64, 8, INT64_C(1) << 32, "raw: token 50 is 4294967296, the"},
                 {TOKEN_I64, 8, INT64_MIN, "raw: token 50 is -9223372036854775808, the"}};
    static bytes b;
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const data_request q = request_of("raw", cases[i].type);
        b.n = 0;
        put_ids(&b, 0, 50, cases[i].width);
        put(&b, cases[i].id, cases[i].width);
        put_ids(&b, 51, 60, cases[i].width);
        write_bytes("raw", &b);
        refused(&q, cases[i].says);
    }
}

/* A file that is not what it says, or what is asked of it. */
static void test_wrong(void)
{
    data_request q = request_of("none.npy", TOKEN_AUTO);
    refused(&q, "none.npy cannot be read: No such file");
    q = request_of("a.npy", TOKEN_AUTO);
    write_npy("a.npy", "<u2", TOKENS, TOKENS, 2);
    q.vocab = 249;
    refused(&q, "a.npy: token 20 is 249, the vocabulary has 249");
    q = request_of("a.npy", TOKEN_U16);
    refused(&q, "--token-type is for raw files");
    q = request_of("a.npy", TOKEN_AUTO);
    q.tokens = 100;
    refused(&q, "has 100 tokens, but a sequence of 100 tokens needs 101");
    q.tokens = 16;
    q.by_documents = 1;
    refused(&q, "does not say where documents end");
    write_llmc("a.bin", 20240520, 2, TOKENS, TOKENS, 2);
    q = request_of("a.bin", TOKEN_AUTO);
    refused(&q, "its version is 2");
    write_llmc("a.bin", 20240801, 7, TOKENS, TOKENS, 2);
    refused(&q, "says 100 tokens of 4 bytes, but 200 bytes follow");
    write_raw("raw", 0, TOKENS, 1);
    q = request_of("raw", TOKEN_AUTO);
    refused(&q, "--token-type says their type");
    write_raw("raw", 0, TOKENS + 1, 1);
    q = request_of("raw", TOKEN_U16);
    refused(&q, "has 101 bytes, which are no tokens of 2 bytes");
    write_raw("a.npy", 0, TOKENS, 1);
    q = request_of("a.npy", TOKEN_U8);
    q.mask = "none";
    refused(&q, "--loss-mask none cannot be read");
    write_raw("mask", 0, TOKENS - 1, 1);
    q.mask = in("mask");
    refused(&q, "has 99 numbers, but there are 100 tokens");
    q = request_of("@list", TOKEN_AUTO);
    write_text("list", "", 0);
    refused(&q, "names no file");
    write_raw("s0", 0, TOKENS, 1);
    q.type = TOKEN_U8;
    write_text("list", "s0\n\0", 4);
    refused(&q, "byte 3 of the list");
    write_text("list", "s0\0s0\n", 6);
    refused(&q, "is 0, which no path has");
}

/* A Megatron file whose index is not of it. */
static void test_wrong_index(void)
{
    static const int lengths[] = {40, 0, 30, 30}, starts[] = {0, 1, 2, 4}, backwards[] = {0, 2, 1, 4};
    const data_request q = request_of("m.bin", TOKEN_AUTO);
    static bytes b;
    write_megatron("m", 6, 2, 0, lengths, 4, starts, 4, 0);
    refused(&q, "of type 6");
    write_megatron("m", 8, 2, 0, lengths, 4, backwards, 4, 0);
    refused(&q, "do not begin at ascending sequences");
    write_megatron("m", 8, 2, 0, lengths, 4, starts, 4, 2);
    refused(&q, "sequence 1: it does not begin where the one before it ends");
    write_megatron("m", 8, 2, 0, lengths, 4, starts, 4, 0);
    write_raw("m.bin", 0, TOKENS - 1, 2);
    refused(&q, "sequence 3: it does not lie within the file");
    write_raw("m.bin", 0, TOKENS + 1, 2);
    refused(&q, "the file has more tokens than the sequences");
    b.n = 0;
    puts_of(&b, "MMIDIDX\0\0\1\0\0\0\0\0\0\0\10\377\377\377\377\377\377\377\177\0\0\0\0\0\0\0\0", 34);
    write_bytes("m.idx", &b);
    refused(&q, "do not fill");
    b.n = 20;
    write_bytes("m.idx", &b);
    refused(&q, "is no index of Megatron's, version 1");
    unlink(in("m.idx"));
}

/* ---- documents ---- */

enum { PIECES = 7, PACKED = 97, WINDOW = 16 };
static const int piece_lengths[PIECES] = {5, 1, 0, 10, 1, 60, 20},
                 piece_starts[PIECES + 1] = {0, 1, 2, 3, 4, 5, 6, 7};

/* Which document a token is in, by plain counting. */
static int document_of(int64_t at)
{
    int i = 0;
    while (at >= piece_lengths[i]) at -= piece_lengths[i++];
    return i;
}

/* Every token once, in some rank's part. */
static void test_packed(int by_end, int masked)
{
    data_request q = request_of("p.bin", TOKEN_AUTO);
    static bytes b;
    corpus d;
    data_order order;
    int64_t w, i, k, n, cu[64];
    int32_t inputs[WINDOW], targets[WINDOW];
    write_megatron("p", 8, 2, 0, piece_lengths, PIECES, piece_starts, PIECES + 1, 0);
    if (by_end) { /* the same ends by a token that is elsewhere none, in two files */
        const size_t cut = 60;
        int64_t at = 0;
        b.n = 0;
        put_ids(&b, 0, PACKED, 2);
        for (i = 0; i < PIECES; ++i) {
            at += piece_lengths[i];
            if (at < PACKED) b.at[2 * (at - 1)] = 255;
        }
        b.n = cut;
        write_bytes("s0", &b);
        b.n = 2 * PACKED - cut;
        memmove(b.at, b.at + cut, b.n);
        write_bytes("s1", &b);
        write_text("list", "s0\ns1", 5);
        q = request_of("@list", TOKEN_U16);
        q.end_token = 255;
    }
    b.n = 0;
    for (i = 0; i < PACKED; ++i) put(&b, i % 3 != 0, 1);
    write_bytes("mask", &b);
    if (masked) q.mask = in("mask");
    if (!opens(&d, &q, NULL)) return;
    CHECK_INT(d.documents.n, 6);
    CHECK_INT(data_documents_max(&d), 5); /* parts of two, and of 1, 1 and 5 tokens */
    CHECK(d.packed);
    data_order_init(&order);
    for (k = 0; k < d.windows; ++k) {
        const upipe_shard s = upi_shard_range(0, WINDOW);
        w = data_window(&d, &order, 3, k);
        CHECK_INT(data_fill(&d, &order, w, &s, inputs, targets), 0);
        for (i = 0; i < WINDOW; ++i) {
            const int64_t at = w * WINDOW + i;
            const int goes_on = at + 1 < PACKED && document_of(at) == document_of(at + 1);
            const int counts = goes_on && (!masked || (at + 1) % 3 != 0);
            int file = 0;
            CHECK_INT(inputs[i], at < PACKED - 1 ? tokens_at(&d.ids, &file, at) : 0);
            CHECK_INT(targets[i], counts ? tokens_at(&d.ids, &file, at + 1) : DATA_IGNORE);
        }
        n = data_borders(&d, &order, w, 1000, cu);
        CHECK(n + 1 <= data_borders_max(&d, 1) && n <= data_documents_max(&d));
        CHECK_INT(cu[0], 1000);
        CHECK_INT(cu[n], 1000 + WINDOW);
        for (i = 1, w *= WINDOW; i < WINDOW; ++i) {
            int64_t j;
            int border = 0;
            for (j = 1; j < n; ++j) border |= cu[j] == 1000 + i;
            CHECK_INT(border,
                      w + i == PACKED || (w + i < PACKED && document_of(w + i) != document_of(w + i - 1)));
        }
    }
    data_order_free(&order);
    data_close(&d);
}

/* Files of a list, with an index and without: each that has none is a document, wherever it stands. */
static void test_some_indices(void)
{
    static const int lengths[] = {7, 0, 13}, starts[] = {0, 1, 2, 3};
    static const int64_t ends[] = {10, 17, 30, 50, 59};
    const data_request q = request_of("@list", TOKEN_AUTO);
    corpus d;
    int64_t there = 0;
    int i;
    write_npy("a.npy", "<u2", 10, 10, 2);
    write_megatron("m", 8, 2, 0, lengths, 3, starts, 4, 0);
    write_llmc("a.bin", 20240520, 1, 20, 20, 2);
    write_llmc("b.bin", 20240801, 7, 9, 9, 4);
    write_text("list", "a.npy\nm.bin\na.bin\nb.bin", 23);
    if (!opens(&d, &q, NULL)) return;
    CHECK_INT(d.documents.n, 5);
    for (i = 0; i < 5 && i < d.documents.n; ++i) CHECK_INT(d.documents.ends[i], ends[i]);
    for (i = 0; i < d.ids.files; ++i) there += d.ids.file[i].map.about.st_size;
    CHECK_INT(d.ids.bytes, there);
    data_close(&d);
}

/* Each epoch has every document, whole, in an order of its own. */
static void test_shuffled_documents(void)
{
    data_request q = request_of("p.bin", TOKEN_AUTO);
    int64_t epoch, k, i, ends[2][6];
    int32_t inputs[WINDOW], targets[WINDOW], text[128], all[128];
    corpus d;
    data_order order;
    const upipe_shard s = upi_shard_range(0, WINDOW);
    write_megatron("p", 8, 2, 0, piece_lengths, PIECES, piece_starts, PIECES + 1, 0);
    q.by_documents = 1;
    if (!opens(&d, &q, NULL)) return;
    data_order_init(&order);
    for (epoch = 0; epoch < 2; ++epoch) {
        int64_t at = 0, found = 0;
        for (k = 0; k < d.windows; ++k) {
            CHECK_INT(data_window(&d, &order, 3, epoch * d.windows + k), k);
            CHECK_INT(data_fill(&d, &order, k, &s, inputs, targets), 0);
            memcpy(text + k * WINDOW, inputs, sizeof inputs);
            memcpy(all + k * WINDOW, targets, sizeof targets);
        }
        memcpy(ends[epoch], order.ends, sizeof ends[epoch]);
        for (i = 0; i < d.documents.n; at = order.ends[i++]) {
            const int64_t n = order.ends[i] - at, first = data_document_first(&d, order.at[i]);
            for (k = 0; k < n; ++k) {
                if (at + k < PACKED - 1) CHECK_INT(text[at + k], id_of(first + k));
                if (at + k < PACKED - 1)
                    CHECK_INT(all[at + k], k + 1 < n ? id_of(first + k + 1) : DATA_IGNORE);
            }
            found += n;
        }
        CHECK_INT(found, PACKED);
    }
    CHECK(memcmp(ends[0], ends[1], sizeof ends[0]) != 0);
    data_order_free(&order);
    data_close(&d);
}

/* The hash knows the files, their index, the mask and how documents are cut; of a text it is that of its bytes. */
static void test_hash(void)
{
    data_request q = request_of("p.bin", TOKEN_AUTO);
    uint64_t seen[16];
    int n = 0, i, k;
    corpus d;
    for (i = 0; i < 7; ++i) {
        data_request one = q;
        write_megatron("p", 8, 2, i == 1, piece_lengths, PIECES, piece_starts, i == 2 ? 1 : PIECES + 1, 0);
        write_raw("mask", i == 6, PACKED + (i == 6), 1);
        if (i == 3) one.joined = 1;
        if (i == 4) one.by_documents = 1;
        if (i >= 5) one.mask = in("mask");
        if (!opens(&d, &one, NULL)) return;
        seen[n++] = d.hash;
        data_close(&d);
    }
    for (i = 0; i < n; ++i)
        for (k = 0; k < i; ++k) CHECK(seen[i] != seen[k]);
    write_raw("text", 0, PACKED, 1);
    memset(&q, 0, sizeof q);
    q.text = in("text");
    q.end_token = -1;
    q.tokens = WINDOW;
    q.vocab = 256;
    if (!opens(&d, &q, NULL)) return;
    CHECK(d.hash == data_hash_bytes(data_hash_start, d.ids.file[0].map.data, PACKED));
    data_close(&d);
}

/* ---- files that change ---- */

enum { LONG = 1 << 15 };

static void test_changes(int how)
{
    static int32_t inputs[LONG], targets[LONG];
    data_request q = request_of("raw", TOKEN_U16);
    static bytes b;
    const upipe_shard s = upi_shard_range(0, LONG - 2);
    corpus d;
    data_order order;
    int64_t i;
    b.n = 0;
    for (i = 0; i < LONG - 1; ++i) put(&b, id_of(i), 2);
    write_bytes("raw", &b);
    q.tokens = LONG - 2;
    if (!opens(&d, &q, NULL)) return;
    data_order_init(&order);
    CHECK_INT(data_window(&d, &order, 1, 0), 0);
    CHECK_INT(data_fill(&d, &order, 0, &s, inputs, targets), 0);
    CHECK(order.lost == NULL);
    if (how == 0) CHECK_INT(truncate(in("raw"), 10), 0);
    if (how ==
        1) { /* an id beyond the vocabulary, of which the system says nothing yet: the times are as before */
        struct timespec times[2] = {d.ids.file[0].map.about.st_atim, d.ids.file[0].map.about.st_mtim};
        FILE *f = fopen(in("raw"), "r+b");
        if (f == NULL || fputs("\xff\xff", f) < 0 || fclose(f) != 0) abort();
        CHECK_INT(utimensat(AT_FDCWD, in("raw"), times, 0), 0);
    }
    if (how == 2) {
        struct timespec times[2] = {{1, 0}, {1, 0}};
        CHECK_INT(utimensat(AT_FDCWD, in("raw"), times, 0), 0);
    }
    if (how == 3) unlink(in("raw")); /* what is mapped stays */
    CHECK_INT(data_fill(&d, &order, 0, &s, inputs, targets), how == 3 ? 0 : -1);
    CHECK((order.lost == NULL) == (how == 3));
    cli_held[0] = '\0';
    if (how == 0) {
        CHECK_INT(data_scan(&d, &q), -1);
        CHECK(strstr(cli_held, "became shorter") != NULL);
    }
    data_order_free(&order);
    data_close(&d);
}

/* Whichever of the files has changed is named: of the ids or of the mask, the first of a list or a later one. */
static void test_changed_name(const char *name)
{
    const struct timespec times[2] = {{1, 0}, {1, 0}};
    data_request q = request_of("@list", TOKEN_U16);
    const upipe_shard s = upi_shard_range(0, WINDOW);
    int32_t inputs[WINDOW], targets[WINDOW];
    char masks[300];
    corpus d;
    data_order order;
    write_raw("s0", 0, 40, 2);
    write_raw("s1", 40, TOKENS, 2);
    write_text("list", "s0\ns1", 5);
    write_npy("b.npy", "|b1", 30, 30, 1);
    write_raw("mask", 30, TOKENS, 1);
    write_text("text", "b.npy\nmask", 10);
    snprintf(masks, sizeof masks, "@%s", in("text"));
    q.mask = masks;
    if (!opens(&d, &q, NULL)) return;
    data_order_init(&order);
    CHECK_INT(data_fill(&d, &order, 0, &s, inputs, targets), 0);
    CHECK_INT(utimensat(AT_FDCWD, in(name), times, 0), 0);
    CHECK_INT(data_fill(&d, &order, 0, &s, inputs, targets), -1);
    CHECK(order.lost != NULL && strcmp(order.lost, in(name)) == 0);
    data_order_free(&order);
    data_close(&d);
}

/* 8 GiB of which only the end is there: offsets beyond 32 bits, and nothing is read that is not asked for. */
static void test_sparse(void)
{
    const int64_t n = INT64_C(1) << 32;
    const upipe_shard s = upi_shard_range(0, WINDOW);
    data_request q = request_of("raw", TOKEN_U16);
    int32_t inputs[WINDOW], targets[WINDOW];
    data_order order;
    corpus d;
    int64_t i;
    FILE *f = fopen(in("raw"), "wb");
    if (f == NULL || fseeko(f, 2 * n - 2 * WINDOW, SEEK_SET) != 0) abort();
    for (i = 0; i < WINDOW; ++i)
        if (fputc((int)i + 1, f) < 0 || fputc(0, f) < 0) abort();
    if (fclose(f) != 0) abort();
    if (!CHECK(data_open(&d, &q) == 0)) return;
    CHECK_INT(d.ids.n, n);
    CHECK_INT(d.windows, n / WINDOW);
    data_order_init(&order);
    CHECK_INT(data_fill(&d, &order, d.windows - 1, &s, inputs, targets), 0);
    for (i = 0; i < WINDOW; ++i) {
        CHECK_INT(inputs[i], i < WINDOW - 1 ? i + 1 : 0);
        CHECK_INT(targets[i], i < WINDOW - 1 ? i + 2 : DATA_IGNORE);
    }
    data_close(&d);
}

int main(int argc, char **argv)
{
    static const char *const names[] = {"a.npy", "a.bin", "b.bin", "raw",   "m.bin", "m.idx",
                                        "s0",    "s1",    "s2",    "list",  "mask",  "p.bin",
                                        "p.idx", "text",  "b.npy", "i.npy", "c.bin", "mask.npy"};
    static const char *const changed[] = {"s0", "s1", "b.npy", "mask"};
    size_t i;
    int how;
    if (mkdtemp(folder) == NULL) abort();
    cli_holds = 1; /* sentences are held, not printed */
    test_begin(argc, argv);
    TEST(test_formats());
    TEST(test_masks());
    TEST(test_npy());
    TEST(test_pointers());
    TEST(test_wrong_ids());
    TEST(test_wrong());
    TEST(test_wrong_index());
    for (how = 0; how < 4; ++how) TEST(test_packed(how & 1, how >> 1));
    TEST(test_some_indices());
    TEST(test_shuffled_documents());
    TEST(test_hash());
    for (how = 0; how < 4; ++how) TEST(test_changes(how));
    for (how = 0; how < 4; ++how) TEST(test_changed_name(changed[how]));
    TEST(test_sparse());
    for (i = 0; i < sizeof names / sizeof *names; ++i) unlink(in(names[i]));
    rmdir(folder);
    return test_end("data");
}
