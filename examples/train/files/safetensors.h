/* safetensors.h -- reads the safetensors format, trusting nothing that a file says
 *
 *     [8 bytes: N, little endian][N bytes: a JSON object][data]
 *     {"__metadata__": {"format": "pt"},
 *      "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
 *
 *     st_file f;
 *     if (st_open(&f, path, &err)) ...
 *     const st_tensor *t = st_find(&f, "a");
 *     st_read_f32(&f, t, 0, t->n, out, &err);
 *     st_close(&f);
 *
 * A file is accepted if every tensor's bytes are its shape's, the tensors cover the data without overlap or
 * hole, and the file ends with the last one. Memory is taken in proportion to bytes that the file has, not to
 * numbers that it claims. Functions return 0, or fill *err with a sentence and return -1. After st_open a
 * st_file is constant: threads may share it. Links with jansson; needs POSIX and a little-endian machine.
 */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../../upipe/upipe_base.h"
#include "../../common/json.h"
#include "../../common/regular.h"
#include "json_load.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors are little endian, and nothing here swaps bytes"
#endif

#define ST_API static __attribute__((unused))

enum {
    ST_HEADER_MAX = 100000000, /* bytes; the format's own limit */
    ST_RANK_MAX = 8,           /* dimensions of a tensor */
    ST_CHUNK = 16384           /* bytes that are read at once to be converted; on the stack */
};

typedef enum st_dtype {
    ST_F64,
    ST_F32,
    ST_F16,
    ST_BF16,
    ST_I64,
    ST_I32,
    ST_I16,
    ST_I8,
    ST_U64,
    ST_U32,
    ST_U16,
    ST_U8,
    ST_BOOL,
    ST_F8_E4M3,
    ST_F8_E5M2,
    ST_DTYPES
} st_dtype;

/* "F32" and so on. */
ST_API const char *st_dtype_name(st_dtype t)
{
    static const char *const names[] = {"F64", "F32", "F16", "BF16", "I64",  "I32",     "I16",    "I8",
                                        "U64", "U32", "U16", "U8",   "BOOL", "F8_E4M3", "F8_E5M2"};
    return names[t];
}

/* Bytes of one element. */
ST_API int st_dtype_bytes(st_dtype t)
{
    static const char bytes[] = {8, 4, 2, 2, 8, 4, 2, 1, 8, 4, 2, 1, 1, 1, 1};
    return bytes[t];
}

typedef struct st_tensor {
    const char *name; /* UTF-8, the file's */
    st_dtype dtype;
    int rank;
    int64_t shape[ST_RANK_MAX];
    int64_t n, bytes, at; /* elements; bytes, and the first one's place in the file */
} st_tensor;

typedef struct st_file {
    st_tensor *tensors; /* [n], by name */
    int n, fd;
    int64_t bytes;
    json_t *header; /* owns the names */
    char path[80];  /* the end of it, for sentences */
} st_file;

/* ---- sentences ---- */

static void st_path(char out[80], const char *path)
{
    size_t length = strlen(path);
    snprintf(out, 80, "%s%.76s", length > 76 ? "..." : "", length > 76 ? path + length - 76 : path);
}

__attribute__((format(printf, 3, 4))) static int st_fail(upipe_err *err, const char *path, const char *format,
                                                         ...)
{
    char text[176];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    upipe_fail(err, UPIPE_ERR_ARG, "%s: %s", path, text);
    return -1;
}

/* ---- reading ---- */

/* n bytes from `at` on, all of them. */
static int st_pread(int fd, void *out, int64_t n, int64_t at, const char *path, upipe_err *err)
{
    char *to = (char *)out;
    while (n > 0) {
        ssize_t got = pread(fd, to, n < 1 << 30 ? (size_t)n : (size_t)1 << 30, (off_t)at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return st_fail(err, path, "cannot be read at byte %" PRId64 ": %s", at, strerror(errno));
        if (got == 0) return st_fail(err, path, "ends at byte %" PRId64 ", shorter than it was", at);
        to += got;
        at += got;
        n -= got;
    }
    return 0;
}

static int st_by_place(const void *a, const void *b)
{
    const st_tensor *x = (const st_tensor *)a, *y = (const st_tensor *)b;
    if (x->at != y->at) return x->at < y->at ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static int st_by_name(const void *a, const void *b)
{
    return strcmp(((const st_tensor *)a)->name, ((const st_tensor *)b)->name);
}

/* Fills *t from one entry of the header; its place is still counted from the start of the data. */
static int st_parse_tensor(st_tensor *t, const char *name, const json_t *j, const char *path, upipe_err *err)
{
    const json_t *dtype = json_object_get(j, "dtype"), *shape = json_object_get(j, "shape");
    const json_t *offsets = json_object_get(j, "data_offsets");
    const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
    int64_t b, e;
    int i;
    memset(t, 0, sizeof *t);
    t->name = name;
    if (!json_is_string(dtype) || !json_is_array(shape) || !json_is_array(offsets) ||
        json_object_size(j) != 3)
        return st_fail(err, path, "tensor %.60s is not a dtype, a shape and data_offsets, and nothing else",
                       name);
    for (i = 0; i < ST_DTYPES; ++i)
        if (strcmp(json_string_value(dtype), st_dtype_name((st_dtype)i)) == 0) break;
    if (i == ST_DTYPES)
        return st_fail(err, path, "tensor %.60s has the dtype %.20s, which is not known", name,
                       json_string_value(dtype));
    t->dtype = (st_dtype)i;
    if (json_array_size(shape) > ST_RANK_MAX)
        return st_fail(err, path, "tensor %.60s has %zu dimensions, the most is %d", name,
                       json_array_size(shape), ST_RANK_MAX);
    t->rank = (int)json_array_size(shape);
    t->n = 1;
    for (i = 0; i < t->rank; ++i) {
        const json_t *size = json_array_get(shape, (size_t)i);
        if (!json_is_integer(size) || json_integer_value(size) < 0)
            return st_fail(err, path, "tensor %.60s: dimension %d is not a whole number from 0 on", name, i);
        t->shape[i] = json_integer_value(size);
        if (!upipe_mul(&t->n, t->n, t->shape[i]))
            return st_fail(err, path, "tensor %.60s: the product of its shape leaves 63 bits", name);
    }
    if (!upipe_mul(&t->bytes, t->n, st_dtype_bytes(t->dtype)))
        return st_fail(err, path, "tensor %.60s: the bytes of its shape leave 63 bits", name);
    if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end))
        return st_fail(err, path, "tensor %.60s: data_offsets are not two whole numbers", name);
    b = json_integer_value(begin);
    e = json_integer_value(end);
    if (b < 0 || e < b || e - b != t->bytes)
        return st_fail(err, path,
                       "tensor %.60s: data_offsets %" PRId64 " to %" PRId64 ", but its shape has %" PRId64
                       " bytes",
                       name, b, e, t->bytes);
    t->at = b;
    return 0;
}

static int st_parse_metadata(const json_t *metadata, const char *path, upipe_err *err)
{
    const char *key;
    json_t *value;
    if (!json_is_object(metadata)) return st_fail(err, path, "__metadata__ is not an object");
    json_object_foreach((json_t *)(uintptr_t)metadata, key, value)
    {
        if (!json_is_string(value)) return st_fail(err, path, "__metadata__: %.60s is not a string", key);
    }
    return 0;
}

/* The tensors follow each other without a gap, from the start of the data (byte `at`) to the file's end. */
static int st_check_cover(st_file *f, int64_t at, upipe_err *err)
{
    int64_t next = 0, buf = f->bytes - at;
    int i;
    qsort(f->tensors, (size_t)f->n, sizeof *f->tensors, st_by_place);
    for (i = 0; i < f->n; ++i) {
        st_tensor *t = &f->tensors[i];
        if (t->at != next)
            return st_fail(err, f->path,
                           "tensor %.60s begins at %" PRId64 ", but the one before ends at %" PRId64 ": %s",
                           t->name, t->at, next, t->at < next ? "they overlap" : "a hole");
        if (t->bytes > buf - next)
            return st_fail(err, f->path,
                           "tensor %.60s ends at %" PRId64 ", but there are %" PRId64 " bytes of data",
                           t->name, next + t->bytes, buf);
        next += t->bytes;
        t->at += at;
    }
    if (next != buf)
        return st_fail(err, f->path,
                       "the tensors end at %" PRId64 ", but there are %" PRId64 " bytes of data", next, buf);
    qsort(f->tensors, (size_t)f->n, sizeof *f->tensors, st_by_name);
    return 0;
}

static int st_parse(st_file *f, const char *text, int64_t length, upipe_err *err)
{
    char why[JSON_LOAD_WHY];
    const char *name;
    json_t *value;
    if (text[0] != '{') return st_fail(err, f->path, "the header does not begin with {");
    f->header = json_load(text, (size_t)length, why);
    if (f->header == NULL) return st_fail(err, f->path, "the header: %s", why);
    if (json_object_size(f->header) > INT32_MAX) return st_fail(err, f->path, "has too many tensors");
    f->tensors = (st_tensor *)calloc(json_object_size(f->header) + 1, sizeof *f->tensors);
    if (f->tensors == NULL)
        return st_fail(err, f->path, "no memory for %zu tensors", json_object_size(f->header));
    json_object_foreach(f->header, name, value)
    {
        if (strcmp(name, "__metadata__") == 0) {
            if (st_parse_metadata(value, f->path, err)) return -1;
        } else if (st_parse_tensor(&f->tensors[f->n++], name, value, f->path, err))
            return -1;
    }
    return st_check_cover(f, 8 + length, err);
}

static int st_read_header(st_file *f, upipe_err *err)
{
    unsigned char head[8];
    uint64_t length = 0;
    char *text;
    int i, bad;
    if (f->bytes < 8) return st_fail(err, f->path, "has %" PRId64 " bytes, too few for a header", f->bytes);
    if (st_pread(f->fd, head, 8, 0, f->path, err)) return -1;
    for (i = 7; i >= 0; --i) length = length << 8 | head[i];
    if (length > ST_HEADER_MAX)
        return st_fail(err, f->path, "a header of %" PRIu64 " bytes, the most is %d", length, ST_HEADER_MAX);
    if (length < 2 || (int64_t)length > f->bytes - 8)
        return st_fail(err, f->path, "a header of %" PRIu64 " bytes in a file of %" PRId64, length, f->bytes);
    text = (char *)malloc((size_t)length);
    if (text == NULL) return st_fail(err, f->path, "no memory for a header of %" PRIu64 " bytes", length);
    bad = st_pread(f->fd, text, (int64_t)length, 8, f->path, err);
    if (!bad) bad = st_parse(f, text, (int64_t)length, err);
    free(text);
    return bad;
}

ST_API void st_close(st_file *f)
{
    if (f->fd >= 0) close(f->fd);
    json_decref(f->header);
    free(f->tensors);
    memset(f, 0, sizeof *f);
    f->fd = -1;
}

/* st_open -- opens a file and checks all of its header; after a failure there is nothing to close */
ST_API int st_open(st_file *f, const char *path, upipe_err *err)
{
    const char *why;
    int bad;
    memset(f, 0, sizeof *f);
    st_path(f->path, path);
    f->fd = regular_fd(path, &f->bytes, &why);
    bad = f->fd < 0 ? st_fail(err, f->path, "cannot be opened: %s", why) : st_read_header(f, err);
    if (bad) st_close(f);
    return bad;
}

/* The tensor of this name, or NULL. */
ST_API const st_tensor *st_find(const st_file *f, const char *name)
{
    st_tensor key;
    memset(&key, 0, sizeof key);
    key.name = name;
    if (f->n == 0) return NULL;
    return (const st_tensor *)bsearch(&key, f->tensors, (size_t)f->n, sizeof *f->tensors, st_by_name);
}

/* The value of a metadata key, or NULL. */
ST_API const char *st_metadata(const st_file *f, const char *key)
{
    return json_string_value(json_object_get(json_object_get(f->header, "__metadata__"), key));
}

static int st_check_range(const char *path, const char *name, int64_t all, int64_t first, int64_t n,
                          upipe_err *err)
{
    if (first >= 0 && n >= 0 && n <= all && first <= all - n) return 0;
    return st_fail(err, path, "tensor %.60s has %" PRId64 " elements, not %" PRId64 " from %" PRId64 " on",
                   name, all, n, first);
}

/* st_read_raw -- n elements from `first` on, as they lie in the file */
ST_API int st_read_raw(const st_file *f, const st_tensor *t, int64_t first, int64_t n, void *out,
                       upipe_err *err)
{
    int64_t size = st_dtype_bytes(t->dtype);
    if (st_check_range(f->path, t->name, t->n, first, n, err)) return -1;
    return st_pread(f->fd, out, n * size, t->at + first * size, f->path, err);
}

static float st_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Exact: every f16 is an f32. */
static float st_from_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 1023u;
    float tiny;
    if (exponent == 31) return st_from_bits(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return st_from_bits(sign | (exponent + 112) << 23 | fraction << 13);
    tiny = (float)fraction * 0x1p-24f;
    return sign ? -tiny : tiny;
}

static void st_convert(float *out, const unsigned char *in, int64_t n, st_dtype dtype)
{
    int64_t i;
    uint16_t bits;
    double wide;
    for (i = 0; i < n; ++i) {
        if (dtype == ST_F64) {
            memcpy(&wide, in + i * 8, 8);
            out[i] = (float)wide;
            continue;
        }
        memcpy(&bits, in + i * 2, 2);
        out[i] = dtype == ST_F16 ? st_from_f16(bits) : st_from_bits((uint32_t)bits << 16);
    }
}

/* st_read_f32 -- n elements from `first` on as f32; of a tensor F64 (rounded), F32, F16 or BF16 */
ST_API int st_read_f32(const st_file *f, const st_tensor *t, int64_t first, int64_t n, float *out,
                       upipe_err *err)
{
    unsigned char chunk[ST_CHUNK];
    int64_t step = ST_CHUNK / st_dtype_bytes(t->dtype), i, count;
    if (t->dtype == ST_F32) return st_read_raw(f, t, first, n, out, err);
    if (t->dtype != ST_F64 && t->dtype != ST_F16 && t->dtype != ST_BF16)
        return st_fail(err, f->path, "tensor %.60s is %s, not F64, F32, F16 or BF16", t->name,
                       st_dtype_name(t->dtype));
    if (st_check_range(f->path, t->name, t->n, first, n, err)) return -1;
    for (i = 0; i < n; i += count) {
        count = n - i < step ? n - i : step;
        if (st_read_raw(f, t, first + i, count, chunk, err)) return -1;
        st_convert(out + i, chunk, count, t->dtype);
    }
    return 0;
}

#endif
