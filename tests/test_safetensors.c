/* test_safetensors.c -- the reader and the writer of safetensors: round trips, and files that are broken
 *
 * Headers, good and bad, are cases/safetensors.json, which test_files reads; fuzz/files.c has random damage.
 */
#define _POSIX_C_SOURCE 200809L
#include <unistd.h>

/* What a system may do at any time: half of the bytes are written. */
static ssize_t half_pwrite(int fd, const void *data, size_t n, off_t at)
{
    return pwrite(fd, data, n - n / 2, at);
}

#define pwrite half_pwrite
#include "../examples/train/files/safetensors_write.h"
#undef pwrite

#include <signal.h>
#include <sys/resource.h>

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

/* Opens the file at path; the sentence must name the words. */
static void check_refused(const char *says)
{
    upipe_err err = {{0}, UPIPE_OK};
    st_file f;
    if (!CHECK_SAY(st_open(&f, path, &err) == -1, "accepted, not \"%s\"", says)) {
        st_close(&f);
        return;
    }
    CHECK_TEXT(err.text, says);
    CHECK_TEXT(err.text, "file.safetensors: ");
}

/* A file whose length in front is none of a header, or not that of its own: refused before it takes memory. */
static void test_lengths(void)
{
    static const struct {
        uint64_t header;
        size_t file;
        const char *says;
    } cases[] = {{2, 0, "has 0 bytes, too few"},
                 {2, 7, "has 7 bytes, too few"},
                 {2, 9, "a header of 2 bytes in a file of 9"},
                 {3, 10, "a header of 3 bytes in a file of 10"},
                 {0, 10, "a header of 0 bytes"},
                 {UINT64_MAX, 10, "a header of 18446744073709551615 bytes, the most is 100000000"},
                 {100000000, 10, "a header of 100000000 bytes in a file of 10"},
                 {100000001, 10, "a header of 100000001 bytes, the most is 100000000"}};
    unsigned char bytes[16];
    size_t i, k;
    make_file(bytes, "{}", 0);
    for (i = 0; i < sizeof cases / sizeof *cases; ++i) {
        for (k = 0; k < 8; ++k) bytes[k] = (unsigned char)(cases[i].header >> 8 * k);
        write_file(path, bytes, cases[i].file);
        check_refused(cases[i].says);
    }
}

/* What a path may lead to, and text that is no JSON. */
static void test_broken(void)
{
    static const char pointer[] = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n";
    static unsigned char bytes[20008];
    char deep[20000];
    st_file f;
    const st_tensor *t;
    upipe_err err = {{0}, UPIPE_OK};
    write_file(path, bytes, make_file(bytes, "{\"\xff\":1}", 0));
    check_refused("no JSON");
    memset(deep, '[', sizeof deep);
    memcpy(deep, "{\"a\":", 5);
    deep[sizeof deep - 1] = 0;
    write_file(path, bytes, make_file(bytes, deep, 0));
    check_refused("no JSON");
    CHECK_INT(st_open(&f, folder, &err), -1);
    CHECK_TEXT(err.text, "cannot be opened: it is no regular file");
    CHECK_INT(st_open(&f, "no such file", &err), -1);
    CHECK_TEXT(err.text, "no such file: cannot be opened: No such file");
    write_file(path, pointer, sizeof pointer - 1); /* what Git has in a large file's place */
    check_refused("cannot be opened: it is a Git LFS pointer, not the file, which `git lfs pull` fetches");
    unlink(path);
    CHECK_INT(mkfifo(path, 0600), 0);
    check_refused("cannot be opened: it is no regular file");
    unlink(path);
    /* a file that gets shorter while it is open */
    write_file(path, bytes,
               make_file(bytes, "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8));
    CHECK_INT(st_open(&f, path, &err), 0);
    CHECK_INT(truncate(path, f.bytes - 4), 0);
    t = st_find(&f, "a");
    CHECK_INT(st_read_raw(&f, t, 0, 2, bytes, &err), -1);
    CHECK_TEXT(err.text, "shorter than it was");
    st_close(&f);
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
    TEST(test_lengths());
    TEST(test_broken());
    unlink(path);
    CHECK_INT(rmdir(folder), 0);
    return test_end("safetensors");
}
