/* safetensors_write.h -- writes the safetensors format; safetensors.h says what it is
 *
 *     st_writer w;
 *     st_writer_init(&w);
 *     int a = st_add(&w, "a", ST_F32, 2, shape, &err);
 *     st_write_begin(&w, path, &err);
 *     st_pwrite(&w, a, 0, 6, data, &err);
 *     st_write_end(&w, &err);
 *     st_writer_free(&w);
 */
#ifndef SAFETENSORS_WRITE_H
#define SAFETENSORS_WRITE_H

#include "safetensors.h"

typedef struct st_entry {
    char *name; /* UTF-8 */
    st_dtype dtype;
    int rank;
    int64_t shape[ST_RANK_MAX];
    int64_t n, at; /* elements; bytes from the start of the data */
} st_entry;

/* A text that grows; what found no memory is remembered. */
typedef struct st_text {
    char *data;
    size_t n, buf;
    int failed;
} st_text;

typedef struct st_writer {
    st_entry *entries; /* [n], in the order of st_add */
    int n, buf, fd;
    st_text metadata;       /* "format":"pt","step":"12" */
    int64_t data_at, bytes; /* of the file; known from st_write_begin or st_write_open on */
    char path[80];
} st_writer;

static void st_put(st_text *t, const char *data, size_t n)
{
    char *more;
    if (t->n + n > t->buf && !t->failed) {
        more = (char *)realloc(t->data, (t->n + n) * 2);
        t->failed = more == NULL;
        if (more != NULL) t->data = more;
        if (more != NULL) t->buf = (t->n + n) * 2;
    }
    if (t->failed) return;
    memcpy(t->data + t->n, data, n);
    t->n += n;
}

static void st_puts(st_text *t, const char *text)
{
    st_put(t, text, strlen(text));
}

static void st_put_string(st_text *t, const char *text)
{
    char one[8];
    st_puts(t, "\"");
    while (*text != '\0') {
        json_character(one, &text);
        st_puts(t, one);
    }
    st_puts(t, "\"");
}

static void st_put_number(st_text *t, int64_t number)
{
    char text[24];
    snprintf(text, sizeof text, "%" PRId64, number);
    st_puts(t, text);
}

static int st_is_utf8(const char *text)
{
    int n;
    for (; *text != '\0'; text += n) {
        n = json_utf8((const unsigned char *)text);
        if (n == 0) return 0;
    }
    return 1;
}

ST_API void st_writer_init(st_writer *w)
{
    memset(w, 0, sizeof *w);
    w->fd = -1;
}

/* Also closes the file, if st_write_end has not. */
ST_API void st_writer_free(st_writer *w)
{
    int i;
    if (w->fd >= 0) close(w->fd);
    for (i = 0; i < w->n; ++i) free(w->entries[i].name);
    free(w->entries);
    free(w->metadata.data);
    st_writer_init(w);
}

/* st_add -- a tensor to be written; returns its index, 0 for the first, or -1. A name that comes twice is found by
 * st_read_back. */
ST_API int st_add(st_writer *w, const char *name, st_dtype dtype, int rank, const int64_t *shape,
                  upipe_err *err)
{
    st_entry *e, *more;
    int i;
    if (strcmp(name, "__metadata__") == 0 || !st_is_utf8(name) || rank < 0 || rank > ST_RANK_MAX)
        return st_fail(err, "safetensors", "a tensor %.60s with %d dimensions cannot be added", name, rank);
    if (w->n == w->buf) {
        more = (st_entry *)realloc(w->entries, (size_t)(w->buf * 2 + 64) * sizeof *more);
        if (more == NULL) return st_fail(err, "safetensors", "no memory for %d tensors", w->n + 1);
        w->entries = more;
        w->buf = w->buf * 2 + 64;
    }
    e = &w->entries[w->n];
    memset(e, 0, sizeof *e);
    e->dtype = dtype;
    e->rank = rank;
    e->n = 1;
    for (i = 0; i < rank; ++i) {
        e->shape[i] = shape[i];
        if (!upipe_mul(&e->n, e->n, shape[i])) break;
    }
    if (i < rank || e->n > INT64_MAX / 8)
        return st_fail(err, "safetensors", "a tensor %.60s of so many elements cannot be added", name);
    e->name = (char *)malloc(strlen(name) + 1);
    if (e->name == NULL) return st_fail(err, "safetensors", "no memory for %d tensors", w->n + 1);
    strcpy(e->name, name);
    return w->n++;
}

/* st_add_metadata -- a pair of strings */
ST_API int st_add_metadata(st_writer *w, const char *key, const char *value, upipe_err *err)
{
    st_text *t = &w->metadata;
    if (!st_is_utf8(key) || !st_is_utf8(value))
        return st_fail(err, "safetensors", "the metadata %.60s cannot be added", key);
    if (t->n > 0) st_puts(t, ",");
    st_put_string(t, key);
    st_puts(t, ":");
    st_put_string(t, value);
    return t->failed ? st_fail(err, "safetensors", "no memory for the metadata %.60s", key) : 0;
}

/* Places of all tensors, wide types first so that each is aligned. */
static int st_place(st_writer *w, int64_t *bytes, upipe_err *err)
{
    int size, i;
    *bytes = 0;
    for (size = 8; size >= 1; size /= 2)
        for (i = 0; i < w->n; ++i) {
            st_entry *e = &w->entries[i];
            if (st_dtype_bytes(e->dtype) != size) continue;
            e->at = *bytes;
            if (e->n * size > INT64_MAX / 2 - *bytes)
                return st_fail(err, w->path, "the file's bytes leave 63 bits");
            *bytes += e->n * size;
        }
    return 0;
}

static void st_put_entry(st_text *t, const st_entry *e)
{
    int i;
    st_put_string(t, e->name);
    st_puts(t, ":{\"dtype\":\"");
    st_puts(t, st_dtype_name(e->dtype));
    st_puts(t, "\",\"shape\":[");
    for (i = 0; i < e->rank; ++i) {
        if (i > 0) st_puts(t, ",");
        st_put_number(t, e->shape[i]);
    }
    st_puts(t, "],\"data_offsets\":[");
    st_put_number(t, e->at);
    st_puts(t, ",");
    st_put_number(t, e->at + e->n * st_dtype_bytes(e->dtype));
    st_puts(t, "]}");
}

/* Places of all tensors, and *t: the start of the file, to be freed after a failure too. */
static int st_plan(st_writer *w, st_text *t, upipe_err *err)
{
    int64_t data;
    int i;
    memset(t, 0, sizeof *t);
    if (st_place(w, &data, err)) return -1;
    st_put(t, "\0\0\0\0\0\0\0\0{", 9); /* the length of what follows is known later */
    if (w->metadata.n > 0) {
        st_puts(t, "\"__metadata__\":{");
        st_put(t, w->metadata.data, w->metadata.n);
        st_puts(t, w->n > 0 ? "}," : "}");
    }
    for (i = 0; i < w->n; ++i) {
        if (i > 0) st_puts(t, ",");
        st_put_entry(t, &w->entries[i]);
    }
    st_puts(t, "}");
    while (t->n % 8 != 0 && !t->failed) st_puts(t, " ");
    if (t->failed || t->n - 8 > ST_HEADER_MAX)
        return st_fail(err, w->path, "no memory for a header of %d tensors", w->n);
    for (i = 0; i < 8; ++i) t->data[i] = (char)((t->n - 8) >> 8 * i & 255);
    w->data_at = (int64_t)t->n;
    w->bytes = w->data_at + data;
    return 0;
}

static int st_pwrite_bytes(st_writer *w, const void *data, int64_t n, int64_t at, upipe_err *err)
{
    const char *from = (const char *)data;
    while (n > 0) {
        ssize_t put = pwrite(w->fd, from, n < 1 << 30 ? (size_t)n : (size_t)1 << 30, (off_t)at);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0)
            return st_fail(err, w->path, "cannot be written at byte %" PRId64 " of %" PRId64 ": %s", at,
                           w->bytes, put < 0 ? strerror(errno) : "nothing was taken");
        from += put;
        at += put;
        n -= put;
    }
    return 0;
}

/* A full disk must be found before the work, not in the middle of it. */
static int st_reserve(st_writer *w, upipe_err *err)
{
    int error;
    do {
        error = posix_fallocate(w->fd, 0, (off_t)w->bytes);
    } while (error == EINTR);
    if (error == EOPNOTSUPP || error == EINVAL) error = ftruncate(w->fd, (off_t)w->bytes) != 0 ? errno : 0;
    if (error == 0) return 0;
    return st_fail(err, w->path, "no space for %" PRId64 " bytes: %s", w->bytes, strerror(error));
}

/* st_write_begin -- makes the file, which must not exist, of its whole size, with its header
 *
 * A failure leaves no file behind.
 */
ST_API int st_write_begin(st_writer *w, const char *path, upipe_err *err)
{
    st_text text;
    int bad;
    st_path(w->path, path);
    bad = st_plan(w, &text, err);
    if (!bad) {
        w->fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (w->fd < 0) bad = st_fail(err, w->path, "cannot be made: %s", strerror(errno));
    }
    if (w->fd < 0) {
        free(text.data);
        return -1;
    }
    bad = st_reserve(w, err);
    if (!bad) bad = st_pwrite_bytes(w, text.data, w->data_at, 0, err);
    free(text.data);
    if (!bad) return 0;
    close(w->fd);
    w->fd = -1;
    unlink(path);
    return -1;
}

/* st_write_open -- joins in the writing of a file that another writer with the same tensors has begun */
ST_API int st_write_open(st_writer *w, const char *path, upipe_err *err)
{
    struct stat about;
    st_text text;
    int bad;
    st_path(w->path, path);
    bad = st_plan(w, &text, err);
    free(text.data);
    if (bad) return -1;
    w->fd = open(path, O_RDWR | O_CLOEXEC);
    if (w->fd < 0 || fstat(w->fd, &about) != 0)
        return st_fail(err, w->path, "cannot be opened for writing: %s", strerror(errno));
    if ((int64_t)about.st_size != w->bytes)
        return st_fail(err, w->path, "has %lld bytes, not %" PRId64, (long long)about.st_size, w->bytes);
    return 0;
}

/* st_pwrite -- n elements from `first` on of tensor `index`; threads and processes may write side by side */
ST_API int st_pwrite(st_writer *w, int index, int64_t first, int64_t n, const void *data, upipe_err *err)
{
    const st_entry *e;
    int64_t size;
    if (index < 0 || index >= w->n || w->fd < 0)
        return st_fail(err, w->path, "tensor %d of %d, or no file is open", index, w->n);
    e = &w->entries[index];
    size = st_dtype_bytes(e->dtype);
    if (st_check_range(w->path, "to write", e->n, first, n, err)) return -1;
    return st_pwrite_bytes(w, data, n * size, w->data_at + e->at + first * size, err);
}

/* st_write_end -- what this writer wrote is on the disk */
ST_API int st_write_end(st_writer *w, upipe_err *err)
{
    int bad = fsync(w->fd) != 0;
    if (bad) st_fail(err, w->path, "cannot be brought to the disk: %s", strerror(errno));
    if (close(w->fd) != 0 && !bad) bad = st_fail(err, w->path, "cannot be closed: %s", strerror(errno));
    w->fd = -1;
    return bad ? -1 : 0;
}

/* st_read_back -- the file at path, which any writer with the same tensors has finished, is what was to be written:
 *                 the reader accepts it, and finds these tensors at their places */
ST_API int st_read_back(const st_writer *w, const char *path, upipe_err *err)
{
    st_file f;
    int i, bad;
    if (st_open(&f, path, err)) return -1;
    bad = f.n != w->n;
    for (i = 0; i < w->n && !bad; ++i) {
        const st_entry *e = &w->entries[i];
        const st_tensor *t = st_find(&f, e->name);
        bad = t == NULL || t->dtype != e->dtype || t->rank != e->rank || t->at != w->data_at + e->at ||
              memcmp(t->shape, e->shape, sizeof e->shape) != 0;
    }
    st_close(&f);
    return bad ? st_fail(err, w->path, "is not what was written") : 0;
}

#endif
