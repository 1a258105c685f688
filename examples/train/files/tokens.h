/* tokens.h -- files of token ids, read as one sequence
 *
 *     token_files t;
 *     tokens_open(&t, "--tokens-file", "ids.npy" or "@shards.txt", "--token-type", TOKEN_AUTO);
 *                                                     0, or -1 with the sentence out
 *     id = tokens_at(&t, &file, i);                   under mapped_read; file: where the last one was, from 0
 *     tokens_close(&t);
 *
 * A name behind @ is a list: a path a line, from the list's folder on. Their ids are one sequence, in the list's order.
 * What a file is, it says:
 *
 *     .npy                 NumPy, version 1, one dimension: |u1 |b1 <u2 <u4 <i4 <i8
 *     Megatron's .bin      ids alone; the .idx beside it says their type, and where documents end (documents.h):
 *                              "MMIDIDX\0\0", u64 1, u8 type (1 u8, 4 i32, 5 i64, 8 u16), u64 sequences,
 *                              u64 entries, i32 [sequences] lengths, i64 [sequences] byte offsets,
 *                              i64 [entries] first sequences
 *     llm.c's .bin         i32 [256]: 20240520, 1, ids (u16) or 20240801, 7, ids (u32); then the ids
 *     raw                  ids alone, whose type the caller says: none is guessed
 */
#ifndef LLAMA_TOKENS_H
#define LLAMA_TOKENS_H

#include <limits.h>
#include <stdlib.h>

#include "../../common/cli.h"
#include "mapped.h"

/* As --token-type has them. */
typedef enum token_type { TOKEN_AUTO, TOKEN_U8, TOKEN_U16, TOKEN_U32, TOKEN_I32, TOKEN_I64 } token_type;

static const int token_bytes[] = {0, 1, 2, 4, 4, 8};

typedef struct token_file {
    mapped_file map;
    mapped_file index; /* of Megatron; no data: none */
    const char *flag;  /* which names it, for sentences */
    char *path, *index_path;
    token_type type;
    int64_t at;       /* bytes before the first id */
    int64_t first, n; /* ids before it in the sequence, and its own */
} token_file;

typedef struct token_files {
    token_file *file;
    int files;
    int64_t n, bytes; /* of all files */
} token_files;

/* As tokens_open has it. */
typedef struct tokens_call {
    const char *flag, *type_flag;
    token_type type;
} tokens_call;

enum { TOKENS_LIST_MAX = 16 << 20 /* bytes of a list */ };

/* ---- ids ---- */

static inline int64_t token_file_at(const token_file *f, int64_t i)
{
    const unsigned char *at = f->map.data + f->at + i * token_bytes[f->type];
    uint16_t two;
    uint32_t four;
    int32_t whole;
    int64_t wide;
    switch (f->type) {
    case TOKEN_U8:
        return *at;
    case TOKEN_U16:
        memcpy(&two, at, sizeof two);
        return two;
    case TOKEN_U32:
        memcpy(&four, at, sizeof four);
        return four;
    case TOKEN_I64:
        memcpy(&wide, at, sizeof wide);
        return wide;
    default:
        memcpy(&whole, at, sizeof whole);
        return whole;
    }
}

/* Id i of all. */
static inline int64_t tokens_at(const token_files *t, int *file, int64_t i)
{
    while (i < t->file[*file].first) --*file;
    while (i >= t->file[*file].first + t->file[*file].n) ++*file;
    return token_file_at(&t->file[*file], i - t->file[*file].first);
}

/* ---- what a file is ---- */

typedef struct tokens_copy_call {
    void *to;
    const unsigned char *from;
    size_t bytes;
} tokens_copy_call;

static inline void tokens_copy_body(void *user)
{
    const tokens_copy_call *c = (const tokens_copy_call *)user;
    memcpy(c->to, c->from, c->bytes);
}

/* Bytes of a mapped file; -1 with the sentence out. */
static inline int tokens_copy(const mapped_file *m, int64_t at, void *to, int64_t bytes)
{
    tokens_copy_call call;
    call.to = to;
    call.from = m->data + at;
    call.bytes = (size_t)bytes;
    return mapped_read(tokens_copy_body, &call) == 0
               ? 0
               : cli_fail("%s became shorter while it was read", m->path);
}

/* The file has what its header says, and no more. */
static inline int tokens_sized(const token_file *f, int64_t reported)
{
    const int64_t each = token_bytes[f->type], there = f->map.bytes - f->at;
    if (reported == there / each && there % each == 0) return 0;
    return cli_fail("%s %s says %lld tokens of %lld bytes, but %lld bytes follow", f->flag, f->path,
                    (long long)reported, (long long)each, (long long)there);
}

/* What stands behind a key of a .npy file's header, up to its ending; empty where there is no such key. */
static inline void tokens_npy_value(char out[32], const char *text, const char *key, char ending)
{
    const char *const at = strstr(text, key), *const from = at != NULL ? at + strlen(key) : "",
                      *const to = strchr(from, ending);
    snprintf(out, 32, "%.*s", to != NULL ? (int)(to - from) : 0, from);
}

/* The header's text has {'descr': '<u2', 'fortran_order': False, 'shape': (123,), } */
static inline int tokens_npy(token_file *f)
{
    static const char *const known[] = {"|u1", "|b1", "<u2", "<u4", "<i4", "<i8"};
    static const token_type types[] = {TOKEN_U8, TOKEN_U8, TOKEN_U16, TOKEN_U32, TOKEN_I32, TOKEN_I64};
    unsigned char lead[10] = {0};
    char text[4096], descr[32], shape[32], *end = NULL;
    int64_t length, n;
    size_t i;
    if (f->map.bytes >= 10 && tokens_copy(&f->map, 0, lead, 10) != 0) return -1;
    length = lead[8] | lead[9] << 8;
    if (lead[6] > 1)
        return cli_fail("%s %s is a .npy file of version %d; version 1 is read", f->flag, f->path, lead[6]);
    if (lead[6] != 1 || length >= (int64_t)sizeof text || length > f->map.bytes - 10)
        return cli_fail("%s %s is no whole .npy file: its header is cut or damaged", f->flag, f->path);
    if (tokens_copy(&f->map, 10, text, length) != 0) return -1;
    text[length] = '\0';
    tokens_npy_value(descr, text, "'descr': '", '\'');
    tokens_npy_value(shape, text, "'shape': (", ')');
    for (i = 0; i < sizeof known / sizeof *known; ++i)
        if (strcmp(descr, known[i]) == 0) f->type = types[i];
    if (f->type == TOKEN_AUTO)
        return cli_fail("%s %s: its numbers are '%s'; read are u1, b1, u2, u4, i4 and i8, little-endian",
                        f->flag, f->path, descr);
    errno = 0;
    n = strtoll(shape, &end, 10);
    if (end == shape || n < 0 || errno != 0 || strcmp(end, ",") != 0)
        return cli_fail("%s %s: its shape is (%s); one dimension is read", f->flag, f->path, shape);
    f->at = 10 + length;
    return tokens_sized(f, n);
}

/* llm.c's; 0 if it is another one's */
static inline int tokens_llmc(token_file *f)
{
    int32_t head[256];
    if (f->map.bytes < (int64_t)sizeof head) return 0;
    if (tokens_copy(&f->map, 0, head, sizeof head) != 0) return -1;
    if (head[0] != 20240520 && head[0] != 20240801) return 0;
    if (head[1] != (head[0] == 20240520 ? 1 : 7) || head[2] < 0)
        return cli_fail(
            "%s %s begins as llm.c's files of tokens do (%d), but its version is %d and its length %d",
            f->flag, f->path, (int)head[0], (int)head[1], (int)head[2]);
    f->type = head[0] == 20240520 ? TOKEN_U16 : TOKEN_U32;
    f->at = sizeof head;
    return tokens_sized(f, head[2]);
}

enum { TOKENS_INDEX_HEAD = 34 };

/* The numbers of an index, which fill it. */
static inline int tokens_index_head(const token_file *f, int64_t *sequences, int64_t *entries, int *type)
{
    unsigned char head[TOKENS_INDEX_HEAD] = {0};
    uint64_t version;
    const int64_t bytes = f->index.bytes;
    if (bytes >= TOKENS_INDEX_HEAD && tokens_copy(&f->index, 0, head, sizeof head) != 0) return -1;
    memcpy(&version, head + 9, 8);
    memcpy(sequences, head + 18, 8);
    memcpy(entries, head + 26, 8);
    *type = head[17];
    if (memcmp(head, "MMIDIDX\0\0", 9) != 0 || version != 1)
        return cli_fail("%s is no index of Megatron's, version 1; where %s has none, move it away",
                        f->index_path, f->path);
    if (*sequences >= 0 && *sequences <= bytes && *entries >= 0 && *entries <= bytes &&
        bytes == TOKENS_INDEX_HEAD + *sequences * 12 + *entries * 8)
        return 0;
    return cli_fail("%s has %lld bytes, which its %lld sequences and %lld documents do not fill",
                    f->index_path, (long long)bytes, (long long)*sequences, (long long)*entries);
}

/* Megatron's, by the index beside it. */
static inline int tokens_megatron(token_file *f)
{
    static const token_type types[] = {TOKEN_AUTO, TOKEN_U8,   TOKEN_AUTO, TOKEN_AUTO, TOKEN_I32,
                                       TOKEN_I64,  TOKEN_AUTO, TOKEN_AUTO, TOKEN_U16};
    int64_t sequences, entries;
    const char *why;
    int type;
    if (mapped_open(&f->index, f->index_path, &why) != 0)
        return cli_fail("%s: the index %s cannot be read: %s", f->flag, f->index_path, why);
    if (tokens_index_head(f, &sequences, &entries, &type) != 0) return -1;
    f->type = type < (int)(sizeof types / sizeof *types) ? types[type] : TOKEN_AUTO;
    return f->type != TOKEN_AUTO
               ? 0
               : cli_fail("%s: its tokens are of type %d; read are 1 (u8), 4 (i32), 5 (i64) and 8 (u16)",
                          f->index_path, type);
}

/* index_path becomes X.idx of X.bin if there is such a file. 0, or -1 with the sentence out */
static inline int tokens_find_index(token_file *f)
{
    const size_t n = strlen(f->path);
    char *index;
    int bad = 0;
    if (n < 4 || strcmp(f->path + n - 4, ".bin") != 0) return 0;
    index = strdup(f->path);
    if (index == NULL) return cli_fail("out of memory: the name of an index");
    memcpy(index + n - 4, ".idx", 4);
    if (access(index, F_OK) == 0) {
        f->index_path = index;
        return 0;
    }
    if (errno != ENOENT) bad = cli_fail("the index %s cannot be found: %s", index, strerror(errno));
    free(index);
    return bad;
}

/* Its type and its ids. */
static inline int tokens_kind(token_file *f, const tokens_call *c)
{
    unsigned char lead[6] = {0};
    int bad = 0;
    if (tokens_find_index(f) != 0) return -1;
    if (f->map.bytes >= 6 && tokens_copy(&f->map, 0, lead, 6) != 0) return -1;
    if (f->index_path != NULL)
        bad = tokens_megatron(f);
    else if (memcmp(lead, "\x93NUMPY", 6) == 0)
        bad = tokens_npy(f);
    else
        bad = tokens_llmc(f);
    if (bad) return -1;
    if (f->type != TOKEN_AUTO && c->type != TOKEN_AUTO && c->type_flag != NULL)
        return cli_fail("%s %s says itself what its tokens are: %s is for raw files", f->flag, f->path,
                        c->type_flag);
    if (f->type == TOKEN_AUTO) f->type = c->type;
    if (f->type == TOKEN_AUTO && c->type_flag == NULL)
        return cli_fail("%s %s is no .npy, has no header of llm.c's and no .idx beside it", f->flag, f->path);
    if (f->type == TOKEN_AUTO)
        return cli_fail(
            "%s %s is no .npy, has no header of llm.c's and no .idx beside it: if its ids are all that is "
            "in it, %s says their type",
            f->flag, f->path, c->type_flag);
    if ((f->map.bytes - f->at) % token_bytes[f->type] != 0)
        return cli_fail("%s %s has %lld bytes, which are no tokens of %d bytes", f->flag, f->path,
                        (long long)f->map.bytes, token_bytes[f->type]);
    f->n = (f->map.bytes - f->at) / token_bytes[f->type];
    return 0;
}

/* ---- all files ---- */

static inline void tokens_close(token_files *t)
{
    int i;
    for (i = 0; i < t->files; ++i) {
        mapped_close(&t->file[i].map);
        mapped_close(&t->file[i].index);
        free(t->file[i].path);
        free(t->file[i].index_path);
    }
    free(t->file);
    memset(t, 0, sizeof *t);
}

/* One more file, of this name: n bytes, behind the folder's where they do not begin with a slash. */
static inline int tokens_add(token_files *t, const tokens_call *c, const char *folder, int folder_n,
                             const char *name, int n)
{
    token_file *more = (token_file *)realloc(t->file, (size_t)(t->files + 1) * sizeof *more), *f;
    const int from = name[0] == '/' ? 0 : folder_n;
    const char *why;
    if (more == NULL) return cli_fail("out of memory: %d files", t->files + 1);
    t->file = more;
    f = &more[t->files++];
    memset(f, 0, sizeof *f);
    f->flag = c->flag;
    f->path = (char *)malloc((size_t)from + (size_t)n + 1);
    if (f->path == NULL) return cli_fail("out of memory: the name of a file");
    sprintf(f->path, "%.*s%.*s", from, folder, n, name);
    if (mapped_open(&f->map, f->path, &why) != 0)
        return cli_fail("%s %s cannot be read: %s", f->flag, f->path, why);
    if (tokens_kind(f, c) != 0) return -1;
    f->first = t->n;
    t->n += f->n;
    t->bytes += f->map.bytes;
    return 0;
}

/* The files that a list names. */
static inline int tokens_list(token_files *t, const tokens_call *c, const char *path)
{
    const char *slash = strrchr(path, '/'), *why;
    const int folder = slash != NULL ? (int)(slash + 1 - path) : 0;
    mapped_file list;
    char *text, *at, *end;
    int bad;
    if (mapped_open(&list, path, &why) != 0)
        return cli_fail("%s: the list %s cannot be read: %s", c->flag, path, why);
    text = list.bytes < TOKENS_LIST_MAX ? (char *)calloc((size_t)list.bytes + 1, 1) : NULL;
    bad = text == NULL ? cli_fail("%s: the list %s has %lld bytes, for which there is no memory", c->flag,
                                  path, (long long)list.bytes)
                       : list.bytes > 0 && tokens_copy(&list, 0, text, list.bytes) != 0;
    if (!bad && strlen(text) < (size_t)list.bytes)
        bad = cli_fail("%s: byte %zu of the list %s is 0, which no path has", c->flag, strlen(text), path);
    mapped_close(&list);
    for (at = text; !bad && *at != '\0'; at = end + (*end != '\0')) {
        end = at + strcspn(at, "\n");
        if (end > at) bad = tokens_add(t, c, path, folder, at, (int)(end - at));
    }
    free(text);
    return bad == 0 && t->files == 0 ? cli_fail("%s: the list %s names no file", c->flag, path) : bad;
}

/* tokens_open -- the files of a name, or of a list
 *   flag       stands before a name in sentences; stays the caller's
 *   type       of raw files; TOKEN_AUTO: there must be none
 *   type_flag  says the type, which no other file may have then; NULL: none does
 * 0, or -1 with the sentence out; tokens_close all the same
 */
static inline int tokens_open(token_files *t, const char *flag, const char *name, const char *type_flag,
                              token_type type)
{
    const tokens_call c = {flag, type_flag, type};
    memset(t, 0, sizeof *t);
    return name[0] == '@' ? tokens_list(t, &c, name + 1) : tokens_add(t, &c, "", 0, name, (int)strlen(name));
}

#endif
