/* test_safetensors.c -- the reader and the writer of safetensors: round trips, every kind of broken file, and
 * random damage
 *
 * What a damaged file that is accepted claims is checked again here, from its bytes, by code of its own.
 * UPIPE_FUZZ_SECONDS is the time for random damage (2), UPIPE_SEED its seed.
 */
#define _POSIX_C_SOURCE 200809L
#include <unistd.h>

/* What a system may do at any time: half of the bytes are written. */
static ssize_t half_pwrite(int fd, const void *data, size_t n, off_t at)
{
    return pwrite(fd, data, n - n / 2, at);
}

#define pwrite half_pwrite
#include "../examples/llama/files/safetensors_write.h"
#undef pwrite

#include <signal.h>
#include <sys/resource.h>
#include <time.h>

#include "lib/test.h"

static char folder[1024], path[1100];

/* ---- files ---- */

static void write_file(const char *name, const void *bytes, size_t n)
{
    FILE *f = fopen(name, "wb");
    if (f == NULL || fwrite(bytes, 1, n, f) != n || fclose(f) != 0) {
        perror(name);
        abort();
    }
}

/* A file of this header, its length in front, and `data` zero bytes. Returns its bytes. */
static size_t make_file(unsigned char *out, const char *header, size_t data)
{
    size_t n = strlen(header), i;
    for (i = 0; i < 8; ++i) out[i] = (unsigned char)((uint64_t)n >> 8 * i);
    memcpy(out + 8, header, n);
    memset(out + 8 + n, 0, data);
    return 8 + n + data;
}

/* ---- round trip ---- */

static const struct {
    const char *name;
    st_dtype dtype;
    int rank;
    int64_t shape[3], n;
} made[] = {
    {"flags", ST_BOOL, 1, {4, 0, 0}, 4},
    {"half", ST_F16, 2, {5, 3, 0}, 15},
    {"weight", ST_BF16, 2, {7, 3, 0}, 21},
    {"norm_weight", ST_F32, 1, {9, 0, 0}, 9},
    {"scalar", ST_F32, 0, {0, 0, 0}, 1},
    {"none", ST_F32, 2, {4, 0, 0}, 0},
    {"wide", ST_F64, 3, {2, 1, 3}, 6},
    {"count", ST_I64, 1, {2, 0, 0}, 2},
    {"\xc3\xa9t\xc3\xa9", ST_U8, 1, {5, 0, 0}, 5},
    {"signed", ST_I32, 1, {2, 0, 0}, 2},
};
enum { MADE = sizeof made / sizeof *made };

static void made_bytes(int i, unsigned char *out)
{
    int64_t k, n = made[i].n * st_dtype_bytes(made[i].dtype);
    for (k = 0; k < n; ++k) out[k] = (unsigned char)(17 * i + 31 * k + 1);
}

static void made_add(st_writer *w)
{
    upipe_err err;
    int i;
    st_writer_init(w);
    CHECK_INT(st_add_metadata(w, "format", "pt", &err), 0);
    for (i = 0; i < MADE; ++i)
        CHECK_INT(st_add(w, made[i].name, made[i].dtype, made[i].rank, made[i].shape, &err), i);
    CHECK_INT(st_add_metadata(w, "step", "12", &err), 0);
}

/* Two writers share a file; the second writes the odd tensors, and all tensors in two parts. */
static void write_made(void)
{
    st_writer w[2];
    unsigned char bytes[256];
    upipe_err err = {{0}, UPIPE_OK};
    int i;
    unlink(path);
    made_add(&w[0]);
    made_add(&w[1]);
    CHECK_SAY(st_write_begin(&w[0], path, &err) == 0, "%s", err.text);
    CHECK_SAY(st_write_open(&w[1], path, &err) == 0, "%s", err.text);
    for (i = 0; i < MADE; ++i) {
        int64_t n = made[i].n, some = n / 3;
        made_bytes(i, bytes);
        CHECK_INT(st_pwrite(&w[i & 1], i, some, n - some, bytes + some * st_dtype_bytes(made[i].dtype), &err),
                  0);
        CHECK_INT(st_pwrite(&w[i & 1], i, 0, some, bytes, &err), 0);
    }
    CHECK_INT(st_pwrite(&w[0], 3, 8, 2, bytes, &err), -1);
    CHECK_TEXT(err.text, "9 elements, not 2 from 8");
    CHECK_INT(st_pwrite(&w[0], 3, -1, 1, bytes, &err), -1);
    CHECK_INT(st_pwrite(&w[0], MADE, 0, 1, bytes, &err), -1);
    for (i = 0; i < 2; ++i) {
        CHECK_INT(st_write_end(&w[i], &err), 0);
        CHECK_INT(st_pwrite(&w[i], 0, 0, 1, bytes, &err), -1);
    }
    for (i = 0; i < 2; ++i) {
        CHECK_SAY(st_read_back(&w[i], path, &err) == 0, "%s", err.text);
        w[i].entries[i].shape[0] += 1;
        CHECK_INT(st_read_back(&w[i], path, &err), -1);
        CHECK_TEXT(err.text, "is not what was written");
        st_writer_free(&w[i]);
    }
}

/* Keys and values that JSON escapes come back as they were. */
static void test_escapes(void)
{
    static const char *const odd[] = {"\"\\/", "\x01\x1f\n\x7f", "\xc2\x9b\xe2\x82\xac\xf0\x9f\x93\x96", " "};
    const int64_t shape[1] = {3};
    upipe_err err = {{0}, UPIPE_OK};
    st_writer w;
    st_file f;
    int i;
    st_writer_init(&w);
    for (i = 0; i < 4; ++i) {
        CHECK_INT(st_add(&w, odd[i], ST_U8, 1, shape, &err), i);
        CHECK_INT(st_add_metadata(&w, odd[i], odd[3 - i], &err), 0);
    }
    unlink(path);
    CHECK_SAY(st_write_begin(&w, path, &err) == 0, "%s", err.text);
    CHECK_INT(st_write_end(&w, &err), 0);
    CHECK_SAY(st_read_back(&w, path, &err) == 0, "%s", err.text);
    st_writer_free(&w);
    if (!CHECK_SAY(st_open(&f, path, &err) == 0, "%s", err.text)) return;
    for (i = 0; i < 4; ++i) {
        CHECK(st_find(&f, odd[i]) != NULL);
        CHECK(st_metadata(&f, odd[i]) != NULL && strcmp(st_metadata(&f, odd[i]), odd[3 - i]) == 0);
    }
    st_close(&f);
}

static void test_round_trip(void)
{
    unsigned char bytes[256], got[256];
    upipe_err err = {{0}, UPIPE_OK};
    float wide[256];
    int64_t k;
    int i, j;
    st_file f;
    write_made();
    CHECK_SAY(st_open(&f, path, &err) == 0, "%s", err.text);
    CHECK_INT(f.n, MADE);
    CHECK(st_metadata(&f, "format") != NULL && strcmp(st_metadata(&f, "format"), "pt") == 0);
    CHECK(st_metadata(&f, "step") != NULL && strcmp(st_metadata(&f, "step"), "12") == 0);
    CHECK(st_metadata(&f, "other") == NULL);
    CHECK(st_find(&f, "other") == NULL && st_find(&f, "__metadata__") == NULL);
    for (i = 0; i < MADE; ++i) {
        const st_tensor *t = st_find(&f, made[i].name);
        int size = st_dtype_bytes(made[i].dtype);
        if (!CHECK(t != NULL)) continue;
        CHECK_INT(t->dtype, made[i].dtype);
        CHECK_INT(t->rank, made[i].rank);
        for (j = 0; j < t->rank; ++j) CHECK_INT(t->shape[j], made[i].shape[j]);
        CHECK_INT(t->n, made[i].n);
        CHECK_INT(t->at % size, 0);
        made_bytes(i, bytes);
        CHECK_INT(st_read_raw(&f, t, 0, t->n, got, &err), 0);
        CHECK_BYTES(got, bytes, t->n * size);
        if (t->n > 2) {
            CHECK_INT(st_read_raw(&f, t, 1, t->n - 2, got, &err), 0);
            CHECK_BYTES(got, bytes + size, (t->n - 2) * size);
        }
        CHECK_INT(st_read_raw(&f, t, 0, t->n + 1, got, &err), -1);
        CHECK_TEXT(err.text, "elements, not");
        CHECK_INT(st_read_raw(&f, t, INT64_MAX, INT64_MAX, got, &err), -1);
        if (made[i].dtype > ST_BF16) {
            CHECK_INT(st_read_f32(&f, t, 0, t->n, wide, &err), -1);
            CHECK_TEXT(err.text, "not F64, F32, F16 or BF16");
            continue;
        }
        CHECK_INT(st_read_f32(&f, t, 0, t->n, wide, &err), 0);
        for (k = 0; k < t->n && made[i].dtype == ST_BF16; ++k) {
            uint32_t want = (uint32_t)bytes[2 * k] << 16 | (uint32_t)bytes[2 * k + 1] << 24;
            CHECK_BYTES(&wide[k], &want, 4);
        }
        for (k = 0; k < t->n && made[i].dtype == ST_F64; ++k) {
            double x;
            float want;
            memcpy(&x, bytes + 8 * k, 8);
            want = (float)x;
            CHECK_BYTES(&wide[k], &want, 4);
        }
    }
    st_close(&f);
}

/* All numbers of 16 bits, against their definition. */
static void test_halves(void)
{
    static uint16_t all[65536];
    static float got[65536];
    const int64_t shape[1] = {65536};
    upipe_err err = {{0}, UPIPE_OK};
    st_writer w;
    st_file f;
    int i, wrong = 0;
    for (i = 0; i < 65536; ++i) all[i] = (uint16_t)i;
    unlink(path);
    st_writer_init(&w);
    CHECK_INT(st_add(&w, "half", ST_F16, 1, shape, &err), 0);
    CHECK_INT(st_write_begin(&w, path, &err), 0);
    CHECK_INT(st_pwrite(&w, 0, 0, 65536, all, &err), 0);
    CHECK_INT(st_write_end(&w, &err), 0);
    st_writer_free(&w);
    if (!CHECK_SAY(st_open(&f, path, &err) == 0, "%s", err.text)) return;
    CHECK_INT(st_read_f32(&f, st_find(&f, "half"), 1, 65535, got + 1, &err), 0);
    CHECK_INT(st_read_f32(&f, st_find(&f, "half"), 0, 1, got, &err), 0);
    for (i = 0; i < 65536; ++i) {
        int exponent = i >> 10 & 31, fraction = i & 1023;
        double want = exponent == 31
                          ? (fraction ? NAN : INFINITY)
                          : ldexp(exponent ? 1024 + fraction : fraction, (exponent ? exponent : 1) - 25);
        if (i >> 15) want = -want;
        wrong += isnan(want) ? !isnan(got[i]) : got[i] != (float)want || !signbit(got[i]) != !(i >> 15);
    }
    CHECK_INT(wrong, 0);
    st_close(&f);
}

static void test_writer_refuses(void)
{
    const int64_t shape[2] = {2, 3}, huge[2] = {INT64_MAX, 2}, negative[1] = {-1};
    int64_t many[ST_RANK_MAX + 1] = {0};
    upipe_err err = {{0}, UPIPE_OK};
    struct rlimit old, small;
    st_writer w, other;
    st_writer_init(&w);
    CHECK_INT(st_add(&w, "a", ST_F32, 2, shape, &err), 0);
    CHECK_INT(st_add(&w, "__metadata__", ST_F32, 2, shape, &err), -1);
    CHECK_INT(st_add(&w, "b", ST_F32, 2, huge, &err), -1);
    CHECK_INT(st_add(&w, "b", ST_F32, 1, negative, &err), -1);
    CHECK_INT(st_add(&w, "b", ST_F32, ST_RANK_MAX + 1, many, &err), -1);
    CHECK_INT(st_add(&w, "\xff\xfe", ST_F32, 2, shape, &err), -1);
    CHECK_INT(st_add_metadata(&w, "a", "\xff", &err), -1);
    write_file(path, "old", 3);
    CHECK_INT(st_write_begin(&w, path, &err), -1);
    CHECK_TEXT(err.text, "cannot be made");
    CHECK_INT(st_write_open(&w, path, &err), -1);
    CHECK_TEXT(err.text, "has 3 bytes, not");
    unlink(path);
    /* a name that comes twice is found when the file is read back */
    CHECK_INT(st_add(&w, "a", ST_F32, 2, shape, &err), 1);
    CHECK_INT(st_write_begin(&w, path, &err), 0);
    CHECK_INT(st_write_end(&w, &err), 0);
    CHECK_INT(st_read_back(&w, path, &err), -1);
    CHECK_TEXT(err.text, "duplicate");
    st_writer_free(&w);
    unlink(path);
    /* no buffer: found at once, and nothing is left */
    st_writer_init(&other);
    many[0] = 1 << 20;
    CHECK_INT(st_add(&other, "a", ST_F32, 1, many, &err), 0);
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    small.rlim_cur = 1 << 20;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &small);
    CHECK_INT(st_write_begin(&other, path, &err), -1);
    setrlimit(RLIMIT_FSIZE, &old);
    CHECK_TEXT(err.text, "no space for 41");
    CHECK(access(path, F_OK) != 0);
    CHECK_INT(st_write_open(&other, path, &err), -1);
    CHECK_TEXT(err.text, "cannot be opened");
    st_writer_free(&other);
}

/* ---- broken files, one by one ---- */

#define T(name, dtype, shape, b, e) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" b "," e "]}"

static const struct {
    const char *header;
    size_t data;
    const char *says; /* NULL: accepted */
} cases[] = {
    {"{}", 0, NULL},
    {"{}      ", 0, NULL},
    {"{" T("a", "F32", "2", "0", "8") "}", 8, NULL},
    {"{" T("b", "F32", "2", "8", "16") "," T("a", "U8", "8", "0", "8") "}", 16, NULL},
    {"{" T("a", "F32", "0", "0", "0") "," T("b", "U8", "1", "0", "1") "," T("c", "F32", "0", "1", "1") "}", 1,
     NULL},
    {"{\"__metadata__\":{\"a\":\"b\"}}", 0, NULL},
    {"{" T("a", "F32", "2", "0", "8") "}", 9, "tensors end at 8, but there are 9"},
    {"{" T("a", "F32", "2", "0", "8") "}", 7, "ends at 8, but there are 7"},
    {"{}", 1, "tensors end at 0, but there are 1"},
    {"{" T("a", "F32", "3", "0", "8") "}", 8, "its shape has 12 bytes"},
    {"{" T("a", "F32", "2", "1", "9") "}", 9, "begins at 1, but the one before ends at 0: a hole"},
    {"{" T("a", "F32", "2", "0", "8") "," T("b", "F32", "1", "12", "16") "}", 16, "ends at 8: a hole"},
    {"{" T("a", "F32", "2", "0", "8") "," T("b", "F32", "1", "4", "8") "}", 8, "ends at 8: they overlap"},
    {"{" T("a", "F32", "2", "0", "8") "," T("b", "F32", "2", "0", "8") "}", 8, "they overlap"},
    {"{" T("a", "F32", "2", "0", "8") "," T("a", "F32", "2", "8", "16") "}", 16, "duplicate"},
    {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "duplicate"},
    {"{" T("a", "F32", "2", "8", "0") "}", 8, "data_offsets 8 to 0"},
    {"{" T("a", "F32", "2", "-8", "0") "}", 8, "data_offsets -8 to 0"},
    {"{" T("a", "F32", "2", "9223372036854775800", "9223372036854775807") "}", 8,
     "but its shape has 8 bytes"},
    {"{" T("a", "F32", "2", "0", "9223372036854775808") "}", 8, "no JSON: too big"},
    {"{" T("a", "F32", "2", "0.0", "8") "}", 8, "not two whole numbers"},
    {"{" T("a", "F32", "2.0", "0", "8") "}", 8, "dimension 0 is not a whole number"},
    {"{" T("a", "F32", "-2", "0", "8") "}", 8, "dimension 0 is not a whole number"},
    {"{" T("a", "F32", "2,\"1\"", "0", "8") "}", 8, "dimension 1 is not a whole number"},
    {"{" T("a", "F32", "4294967296,4294967296", "0", "8") "}", 8, "product of its shape leaves 63 bits"},
    {"{" T("a", "F32", "4611686018427387904", "0", "8") "}", 8, "bytes of its shape leave 63 bits"},
    {"{" T("a", "F32", "1,1,1,1,1,1,1,1,2", "0", "8") "}", 8, "has 9 dimensions, the most is 8"},
    {"{" T("a", "F33", "2", "0", "8") "}", 8, "the dtype F33, which is not known"},
    {"{" T("a", "f32", "2", "0", "8") "}", 8, "the dtype f32, which is not known"},
    {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "tensor a is not a dtype, a shape"},
    {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, "tensor a is not a dtype, a shape"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "tensor a is not a dtype, a shape"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}", 8, "and nothing else"},
    {"{\"a\":{\"dtype\":1,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "tensor a is not a dtype"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":{},\"data_offsets\":[0,8]}}", 8, "tensor a is not a dtype"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":8}}", 8, "tensor a is not a dtype"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", 8, "not two whole numbers"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,8]}}", 8, "not two whole numbers"},
    {"{\"a\":[1,2]}", 0, "tensor a is not a dtype"},
    {"{\"a\":null}", 0, "tensor a is not a dtype"},
    {"{\"__metadata__\":[]}", 0, "__metadata__ is not an object"},
    {"{\"__metadata__\":{\"k\":1}}", 0, "__metadata__: k is not a string"},
    {"[]", 0, "does not begin with {"},
    {" {}", 0, "does not begin with {"},
    {"{", 1, "a header of 1 bytes"},
    {"{\"a\":", 0, "no JSON"},
    {"{} x", 0, "no JSON"},
    {"{\"\xff\":1}", 0, "no JSON"},
    {"{\"a\\u0000b\":1}", 0, "no JSON"},
};

/* Opens the file at path; the sentence must name the words. */
static void check_refused(const char *says)
{
    upipe_err err = {{0}, UPIPE_OK};
    st_file f;
    int bad = st_open(&f, path, &err);
    CHECK_SAY(bad == (says != NULL ? -1 : 0), "refused %d: \"%s\", expected \"%s\"", bad, err.text,
              says != NULL ? says : "nothing");
    if (!bad) st_close(&f);
    if (bad && says != NULL) {
        CHECK_TEXT(err.text, says);
        CHECK_TEXT(err.text, "file.safetensors: ");
    }
}

static void test_broken(void)
{
    unsigned char bytes[1024];
    char deep[20000], big[64];
    size_t i, n;
    st_file f;
    const st_tensor *t;
    upipe_err err = {{0}, UPIPE_OK};
    for (i = 0; i < sizeof cases / sizeof *cases; ++i) {
        write_file(path, bytes, make_file(bytes, cases[i].header, cases[i].data));
        check_refused(cases[i].says);
    }
    write_file(path, "", 0);
    check_refused("has 0 bytes, too few");
    write_file(path, "1234567", 7);
    check_refused("has 7 bytes, too few");
    n = make_file(bytes, "{}", 0);
    write_file(path, bytes, n - 1);
    check_refused("a header of 2 bytes in a file of 9");
    bytes[0] = 3;
    write_file(path, bytes, n);
    check_refused("a header of 3 bytes in a file of 10");
    memset(bytes, 255, 8);
    write_file(path, bytes, n);
    check_refused("a header of 18446744073709551615 bytes, the most is 100000000");
    memset(bytes, 0, 8);
    write_file(path, bytes, n);
    check_refused("a header of 0 bytes");
    /* claims 100 million, has few: refused before it takes memory */
    bytes[0] = 100000000 & 255, bytes[1] = 100000000 >> 8 & 255, bytes[2] = 100000000 >> 16 & 255;
    bytes[3] = 100000000 >> 24;
    write_file(path, bytes, n);
    check_refused("a header of 100000000 bytes in a file of 10");
    ++bytes[0];
    write_file(path, bytes, n);
    check_refused("a header of 100000001 bytes, the most is 100000000");
    memset(deep, '[', sizeof deep);
    memcpy(deep, "{\"a\":", 5);
    deep[sizeof deep - 1] = 0;
    {
        unsigned char *large = (unsigned char *)malloc(sizeof deep + 8);
        write_file(path, large, make_file(large, deep, 0));
        free(large);
    }
    check_refused("no JSON");
    CHECK_INT(st_open(&f, folder, &err), -1);
    CHECK_TEXT(err.text, "cannot be opened: it is no regular file");
    snprintf(big, sizeof big, "no such file");
    CHECK_INT(st_open(&f, big, &err), -1);
    CHECK_TEXT(err.text, "no such file: cannot be opened: No such file");
    /* what Git has in a large file's place */
    n = (size_t)snprintf(deep, sizeof deep,
                         "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n");
    write_file(path, deep, n);
    check_refused("cannot be opened: it is a Git LFS pointer, not the file, which `git lfs pull` fetches");
    unlink(path);
    CHECK_INT(mkfifo(path, 0600), 0);
    check_refused("cannot be opened: it is no regular file");
    unlink(path);
    /* a file that gets shorter while it is open */
    write_file(path, bytes, make_file(bytes, "{" T("a", "F32", "2", "0", "8") "}", 8));
    CHECK_INT(st_open(&f, path, &err), 0);
    CHECK_INT(truncate(path, f.bytes - 4), 0);
    t = st_find(&f, "a");
    CHECK_INT(st_read_raw(&f, t, 0, 2, bytes, &err), -1);
    CHECK_TEXT(err.text, "shorter than it was");
    st_close(&f);
}

/* ---- random damage ---- */

enum { FUZZ_MAX = 8192 };

typedef struct fuzz_file {
    unsigned char bytes[FUZZ_MAX];
    int n;
} fuzz_file;

/* [from, to) becomes these bytes, if they fit. */
static void fuzz_replace(fuzz_file *f, int from, int to, const void *bytes, int n)
{
    if (f->n - (to - from) + n > FUZZ_MAX) return;
    memmove(f->bytes + from + n, f->bytes + to, (size_t)(f->n - to));
    memcpy(f->bytes + from, bytes, (size_t)n);
    f->n += n - (to - from);
}

static int fuzz_header(const fuzz_file *f)
{
    int n = f->n >= 8 ? f->bytes[0] | f->bytes[1] << 8 : 0;
    return n < f->n - 8 ? n : f->n > 8 ? f->n - 8 : 0;
}

/* A run of digits in the header, the k-th or so; 0 if there is none. */
static int fuzz_number(const fuzz_file *f, int k, int *from, int *to)
{
    int end = 8 + fuzz_header(f), at, round;
    for (round = 0; round < 2; ++round)
        for (at = 8; at < end; at = *to + 1) {
            for (*from = at; *from < end && (f->bytes[*from] < '0' || f->bytes[*from] > '9');) ++*from;
            for (*to = *from; *to < end && f->bytes[*to] >= '0' && f->bytes[*to] <= '9';) ++*to;
            if (*from < *to && k-- <= 0) return 1;
        }
    return 0;
}

static void fuzz_length(fuzz_file *f, int n)
{
    if (f->n < 8 || n < 0) return;
    memset(f->bytes, 0, 8);
    f->bytes[0] = (unsigned char)(n & 255);
    f->bytes[1] = (unsigned char)(n >> 8);
}

static void fuzz_damage(fuzz_file *f, const fuzz_file *other, test_rng *rng)
{
    static const char *const numbers[] = {"0",
                                          "1",
                                          "4",
                                          "8",
                                          "24",
                                          "-1",
                                          "4294967296",
                                          "9223372036854775807",
                                          "9223372036854775808",
                                          "18446744073709551615",
                                          "1e308",
                                          "1e400",
                                          "0.5",
                                          "4611686018427387904",
                                          "00",
                                          "null"};
    static const char *const words[] = {
        "{",    "}",  "[",       "]",       "\"",           ",",     ":",     "F32",
        "BF16", "U8", "\\u0000", "\\ud800", "__metadata__", "shape", "dtype", "data_offsets",
        "true", " "};
    unsigned char piece[512];
    int header = fuzz_header(f), from, to, n, i;
    int inside = 8 + test_below(rng, header + 1); /* a place in the header */
    switch (test_below(rng, 10)) {
    case 0:
        if (f->n > 0) f->bytes[test_below(rng, f->n)] ^= (unsigned char)(1 << test_below(rng, 8));
        break;
    case 1:
        if (f->n > 0) f->bytes[test_below(rng, f->n)] = (unsigned char)test_below(rng, 256);
        break;
    case 2:
        f->n = test_below(rng, f->n + 1);
        break;
    case 3:
        for (n = test_below(rng, 32), i = 0; i < n && f->n < FUZZ_MAX; ++i) f->bytes[f->n++] = 0;
        break;
    case 4: /* a piece of the other file */
        from = test_below(rng, other->n);
        n = test_below(rng, other->n - from < 256 ? other->n - from : 256);
        to = test_below(rng, f->n + 1);
        fuzz_replace(f, to, to + test_below(rng, f->n - to + 1), other->bytes + from, n);
        break;
    case 5:
        if (f->n >= 8) f->bytes[test_below(rng, 8)] = (unsigned char)test_below(rng, 256);
        break;
    case 6:
        if (!fuzz_number(f, test_below(rng, 12), &from, &to)) break;
        i = test_below(rng, (int)(sizeof numbers / sizeof *numbers));
        fuzz_replace(f, from, to, numbers[i], (int)strlen(numbers[i]));
        fuzz_length(f, header + (int)strlen(numbers[i]) - (to - from));
        break;
    case 7: /* a piece of the header twice: keys, too */
        if (inside > f->n) break;
        n = test_below(rng, (f->n - inside < 200 ? f->n - inside : 200) + 1);
        memcpy(piece, f->bytes + inside, (size_t)n);
        fuzz_replace(f, inside + n, inside + n, piece, n);
        fuzz_length(f, header + n);
        break;
    case 8:
        if (inside > f->n) break;
        n = 1 + test_below(rng, (int)sizeof piece - 1);
        memset(piece, "[{"[test_below(rng, 2)], (size_t)n);
        fuzz_replace(f, inside, inside, piece, n);
        fuzz_length(f, header + n);
        break;
    default:
        if (inside > f->n) break;
        i = test_below(rng, (int)(sizeof words / sizeof *words));
        fuzz_replace(f, inside, inside, words[i], (int)strlen(words[i]));
        fuzz_length(f, header + (int)strlen(words[i]));
        break;
    }
}

/* What the reader has accepted, looked at again: each byte of the data belongs to exactly one tensor. */
static void fuzz_verify(const fuzz_file *f, const st_file *got)
{
    static const struct {
        const char *name;
        int bytes;
    } sizes[] = {{"F64", 8}, {"F32", 4}, {"F16", 2},  {"BF16", 2},    {"I64", 8},
                 {"I32", 4}, {"I16", 2}, {"I8", 1},   {"U64", 8},     {"U32", 4},
                 {"U16", 2}, {"U8", 1},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
    static unsigned char covered[FUZZ_MAX], raw[FUZZ_MAX];
    static float wide[FUZZ_MAX];
    uint64_t length = 0;
    int64_t header, data, k;
    const char *name;
    json_t *root, *value;
    upipe_err err = {{0}, UPIPE_OK};
    int i, tensors = 0;
    for (i = 0; i < 8; ++i) length |= (uint64_t)f->bytes[i] << 8 * i;
    if (!CHECK(f->n >= 10 && length <= (uint64_t)f->n - 8)) return;
    header = (int64_t)length;
    data = f->n - 8 - header;
    memset(covered, 0, sizeof covered);
    root = json_loadb((const char *)f->bytes + 8, (size_t)header, JSON_REJECT_DUPLICATES, NULL);
    if (!CHECK(json_is_object(root))) return;
    json_object_foreach(root, name, value)
    {
        const char *dtype = json_string_value(json_object_get(value, "dtype"));
        const json_t *shape = json_object_get(value, "shape"),
                     *offsets = json_object_get(value, "data_offsets");
        const st_tensor *t = st_find(got, name);
        int64_t begin, end;
        double n = 1;
        size_t d;
        if (strcmp(name, "__metadata__") == 0) {
            CHECK(t == NULL);
            continue;
        }
        ++tensors;
        if (!CHECK(t != NULL && dtype != NULL && json_array_size(offsets) == 2)) continue;
        begin = json_integer_value(json_array_get(offsets, 0));
        end = json_integer_value(json_array_get(offsets, 1));
        for (i = 0; i < 15; ++i)
            if (strcmp(sizes[i].name, dtype) == 0) break;
        if (!CHECK(i < 15 && begin >= 0 && end >= begin && end <= data)) continue;
        CHECK_INT(t->rank, json_array_size(shape));
        for (d = 0; d < json_array_size(shape); ++d) {
            CHECK(json_is_integer(json_array_get(shape, d)) &&
                  json_integer_value(json_array_get(shape, d)) >= 0);
            CHECK_INT(t->shape[d], json_integer_value(json_array_get(shape, d)));
            n *= (double)json_integer_value(json_array_get(shape, d));
        }
        CHECK(n * sizes[i].bytes == (double)(end - begin));
        CHECK_INT(t->bytes, end - begin);
        CHECK_INT(t->at, 8 + header + begin);
        for (k = begin; k < end; ++k) CHECK(covered[k]++ == 0);
        CHECK_INT(st_read_raw(got, t, 0, t->n, raw, &err), 0);
        CHECK_BYTES(raw, f->bytes + t->at, t->bytes);
        if (i < 4) CHECK_INT(st_read_f32(got, t, 0, t->n, wide, &err), 0);
    }
    for (k = 0; k < data; ++k) CHECK(covered[k] == 1);
    CHECK_INT(got->n, tensors);
    json_decref(root);
}

static void test_fuzz(void)
{
    static fuzz_file bases[3], f;
    test_rng rng;
    long refused = 0, accepted = 0;
    double end = test_seconds() + (double)test_env("UPIPE_FUZZ_SECONDS", 2);
    int i, n, fd;
    FILE *file;
    st_file got;
    upipe_err err = {{0}, UPIPE_OK};
    rng.state = (uint64_t)test_env("UPIPE_SEED", 1);
    write_made();
    file = fopen(path, "rb");
    if (!CHECK(file != NULL)) return;
    bases[0].n = (int)fread(bases[0].bytes, 1, FUZZ_MAX, file);
    fclose(file);
    bases[1].n = (int)make_file(bases[1].bytes,
                                "{" T("a", "F32", "2", "0", "8") "," T("b", "U8", "8", "8", "16") "}", 16);
    bases[2].n = (int)make_file(bases[2].bytes,
                                "{\"__metadata__\":{\"a\":\"b\"}," T("w", "BF16", "2,1", "0", "4") "}", 4);
    fd = open(path, O_RDWR | O_TRUNC);
    while (test_seconds() < end) {
        i = test_below(&rng, 3);
        f = bases[i];
        for (n = 1 + test_below(&rng, 4); n > 0; --n) fuzz_damage(&f, &bases[test_below(&rng, 3)], &rng);
        if (pwrite(fd, f.bytes, (size_t)f.n, 0) != f.n || ftruncate(fd, f.n) != 0) abort();
        err.text[0] = 0;
        if (st_open(&got, path, &err) != 0) {
            ++refused;
            CHECK(strlen(err.text) > 20);
            continue;
        }
        ++accepted;
        fuzz_verify(&f, &got);
        st_close(&got);
    }
    close(fd);
    printf("damage: %ld refused, %ld accepted\n", refused, accepted);
    CHECK(refused > 10 && accepted > 10);
}

int main(int argc, char **argv)
{
    const char *parent = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/test_safetensors.XXXXXX", parent != NULL && *parent ? parent : ".");
    if (mkdtemp(folder) == NULL) {
        perror(folder);
        return 1;
    }
    snprintf(path, sizeof path, "%s/file.safetensors", folder);
    test_begin(argc, argv);
    TEST(test_round_trip());
    TEST(test_escapes());
    TEST(test_halves());
    TEST(test_writer_refuses());
    TEST(test_broken());
    TEST(test_fuzz());
    unlink(path);
    CHECK_INT(rmdir(folder), 0);
    return test_end("safetensors");
}
