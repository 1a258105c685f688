/* verdict.c -- whether one attention kernel is right under one mask, and if not, what its fault looks like
 *
 *     verdict --list                         one case a line: `fwd90 128 causal`
 *     verdict CASE... [--evidence FILE]      a case's words; one line on stdout, which begins with them
 *
 * Exit status: 0 right, 1 wrong, 2 usage, 3 hangs (the watch fired), 4 failed (the runtime's sentence), 77 not for this
 * device. A process each, as a fault or a hang takes its whole process. What is run, and why in whole numbers,
 * is in verdict_data.h. FILE is for read_verdict.py: lines of text, at most 2 MiB,
 *
 *     verdict KERNEL D MASK                  name value ...: the call
 *     run NAME                               then for every result of the run
 *     tensor NAME N H D wrong W nan X unwritten U every E
 *     bins NAME COUNTS...                    of wrong elements by row % 64, row % 8, column / 8, row / 64
 *     NAME HEAD ROW COLUMN / GOT... / WANT... the wrong chunks of eight columns of every E-th row; `_`: never written
 *     watch NUMBER HEX                       what a block that hangs has written
 */
#define _GNU_SOURCE

#include "verdict_data.h"

#include "upipe/cuda/upipe_cuda_watch.h"

enum { RIGHT = 0, WRONG = 1, USAGE = 2, HANGS = 3, FAILED = 4, NOT_HERE = 77 };
enum { SHOWN = 1100, LINE = 256 }; /* chunks of a tensor in a file; bytes of one, about */
enum { UNWRITTEN16 = 0xf3de, BINS = 4, BINS_MOST = 128 }; /* what lies there before: -3.5e31 */

static const char *const bin_names[BINS] = {"row%64", "row%8", "column/8", "row/64"};

static device dev;
static char choice[UPIPE_CUDA_CHOICE];

/* ---- the list ---- */

static int case_at(int n, verdict_case *x)
{
    static const int kernels[] = {80, 32, 90}, order[] = {128, 64, 256, 96, 192};
    const int of_dim = MASKS + GROUPED + 2; /* forward all masks, backward the first four */
    int k = n / (5 * of_dim), m = n % of_dim;
    memset(x, 0, sizeof *x);
    if (n < 0 || k >= 3) return 0;
    x->kernel = kernels[k];
    x->d = order[n / of_dim % 5];
    x->backward = m >= MASKS;
    x->mask = m % MASKS;
    shape_case(x);
    return 1;
}

static void case_words(const verdict_case *x, char *to, size_t bytes)
{
    snprintf(to, bytes, "%s%d %d %s", x->backward ? "bwd" : "fwd", x->kernel, x->d, mask_names[x->mask]);
}

/* ---- the call ---- */

static upipe_dtype type_of(const verdict_case *x, int t)
{
    if (is_f32(x) || t == T_LSE || t == T_DELTA || t == T_DK || t == T_DV || (t == T_O && x->mask == MERGE))
        return UPIPE_F32;
    return UPIPE_BF16;
}

static int is_input(const verdict_case *x, int t)
{
    return t <= T_V || (x->backward && t <= T_DELTA);
}

static int is_output(const verdict_case *x, int t)
{
    return x->backward ? t >= T_DQ : t == T_O || t == T_LSE;
}

/* What holds a value before the call. */
static int is_added(const verdict_case *x, int t)
{
    return t == T_DK || t == T_DV || (x->mask == MERGE && !x->backward);
}

static int64_t elements(const tensor *t)
{
    return t->n * t->h * t->d;
}

static void to_store(void *to, upipe_dtype type, const float *x, int64_t n)
{
    for (int64_t e = 0; e < n; ++e)
        if (type == UPIPE_F32)
            ((float *)to)[e] = x[e];
        else
            ((uint16_t *)to)[e] = upipe_f32_to_bf16(x[e]);
}

typedef struct verdict {
    verdict_case of;
    tensor t[TENSORS];
    void *there[TENSORS]; /* on the device */
    void *store;          /* the greatest tensor, as it is stored */
    void *work;
    upipe_attn_grad g;
} verdict;

static void make_call(verdict *v)
{
    const verdict_case *x = &v->of;
    upipe_view view[TENSORS];
    size_t most = 0;
    for (int k = 0; k < TENSORS; ++k) {
        tensor *t = &v->t[k];
        const int by_key = k == T_K || k == T_V || k == T_DK || k == T_DV;
        const int64_t rows = by_key ? x->keys : x->queries;
        t->n = by_key ? x->seen : x->queries;
        t->h = by_key ? x->kv_heads : x->heads;
        t->d = k == T_LSE || k == T_DELTA ? 1 : x->d;
        t->x = (float *)malloc((size_t)elements(t) * sizeof *t->x);
        t->slack = (float *)malloc((size_t)elements(t) * sizeof *t->x);
        t->got = (float *)malloc((size_t)elements(t) * sizeof *t->x);
        if (t->x == NULL || t->slack == NULL || t->got == NULL) exit(FAILED);
        if ((size_t)elements(t) * 4 > most) most = (size_t)elements(t) * 4;
        if (is_input(x, k) || is_output(x, k)) /* full of NaNs */
            v->there[k] = device_new(&dev, (size_t)(rows * t->h * t->d) * upipe_dtype_bytes(type_of(x, k)));
        view[k] = upipe_view_packed(v->there[k], type_of(x, k), rows, t->h, t->d);
    }
    v->store = malloc(most);
    v->g.a = mask_of(x);
    v->g.a.q = view[T_Q], v->g.a.k = view[T_K], v->g.a.v = view[T_V], v->g.a.o = view[T_O],
    v->g.a.lse = view[T_LSE];
    v->g.a.merge = x->mask == MERGE;
    v->g.dout = view[T_DOUT], v->g.delta = view[T_DELTA];
    v->g.dq = view[T_DQ], v->g.dk = view[T_DK], v->g.dv = view[T_DV];
    v->g.a.work_bytes = dev.ops.attn_bytes(&dev.ops, &v->g.a, x->backward);
    v->g.a.work = v->work = device_new(&dev, v->g.a.work_bytes);
    if (x->kernel == 80) dev.cuda.avoid = UPIPE_CUDA_AVOID_FWD90 | UPIPE_CUDA_AVOID_BWD90;
    if (x->kernel == 90 && x->margin_left > 0 && x->margin_left < dev.cuda.processors)
        dev.cuda.margin = dev.cuda.processors - x->margin_left;
    dev.cuda.choice = choice;
}

/* The kernels once; `got` of the results. */
static upipe_status call(verdict *v, int run)
{
    const verdict_case *x = &v->of;
    for (int k = 0; k < TENSORS; ++k) {
        const size_t bytes = (size_t)elements(&v->t[k]) * upipe_dtype_bytes(type_of(x, k));
        tensor *t = &v->t[k];
        if (is_input(x, k)) to_store(v->store, type_of(x, k), t->x, elements(t));
        if (is_output(x, k) && is_added(x, k)) {
            for (int64_t e = 0; e < elements(t); ++e)
                t->got[e] = start_value(run, k, e / t->d / t->h, (int)(e / t->d % t->h), (int)(e % t->d));
            to_store(v->store, type_of(x, k), t->got, elements(t));
        } else if (is_output(x, k))
            for (size_t e = 0; e < bytes / 2; ++e) ((uint16_t *)v->store)[e] = UNWRITTEN16;
        if (is_input(x, k) || is_output(x, k)) UPIPE_TRY(dev.ops.copy(&dev.c, v->there[k], v->store, bytes));
    }
    v->g.a.scale = scale_of(x, run);
    UPIPE_TRY(x->backward ? upipe_attn_bwd(&dev.c, &v->g) : upipe_attn_fwd(&dev.c, &v->g.a));
    UPIPE_TRY(dev.ops.sync(&dev.c));
    for (int k = 0; k < TENSORS; ++k) {
        tensor *t = &v->t[k];
        const size_t bytes = (size_t)elements(t) * upipe_dtype_bytes(type_of(x, k));
        if (!is_output(x, k)) continue;
        UPIPE_TRY(dev.ops.copy(&dev.c, v->store, v->there[k], bytes));
        for (int64_t e = 0; e < elements(t); ++e)
            t->got[e] = type_of(x, k) == UPIPE_F32 ? ((float *)v->store)[e]
                                                   : upipe_bf16_to_f32(((uint16_t *)v->store)[e]);
    }
    return UPIPE_OK;
}

/* ---- what is wrong ---- */

static int is_unwritten(const verdict *v, int k, float x)
{
    const uint32_t want = type_of(&v->of, k) == UPIPE_F32 ? 0xf3def3deu : 0xf3de0000u;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits == want;
}

static int is_wrong(const tensor *t, int64_t e)
{
    if (t->got[e] == t->x[e]) return 0; /* infinities too */
    return !(fabsf(t->got[e] - t->x[e]) <= t->slack[e]);
}

typedef struct count {
    int64_t wrong, nan, unwritten, chunks, first; /* elements; chunks of eight columns; first wrong element */
    int64_t bin[BINS][BINS_MOST];
} count;

static int chunk_of(const tensor *t)
{
    return t->d < 8 ? t->d : 8;
}

static void count_wrong(const verdict *v, int k, count *x)
{
    const tensor *t = &v->t[k];
    int64_t in_chunk = 0;
    memset(x, 0, sizeof *x);
    for (int64_t e = 0; e < elements(t); ++e) {
        const int64_t i = e / t->d / t->h, c = e % t->d;
        if (e % chunk_of(t) == 0) in_chunk = 0;
        if (!is_wrong(t, e)) continue;
        if (x->wrong++ == 0) x->first = e;
        x->chunks += in_chunk++ == 0;
        x->nan += isnan(t->got[e]);
        x->unwritten += is_unwritten(v, k, t->got[e]);
        ++x->bin[0][i % 64], ++x->bin[1][i % 8], ++x->bin[2][c / 8],
            ++x->bin[3][i / 64 < BINS_MOST ? i / 64 : BINS_MOST - 1];
    }
}

static int bins_of(const tensor *t, int b)
{
    return b == 0 ? 64 : b == 1 ? 8 : b == 2 ? (t->d + 7) / 8 : (int)((t->n + 63) / 64);
}

/* Which bins have wrong elements: `8-15`, or `all`. */
static void say_bins(const int64_t *bin, int n, char *to, size_t bytes)
{
    size_t at = 0;
    to[0] = 0;
    for (int first = 0, end; first < n; first = end + 1) {
        for (end = first; end < n && bin[end] > 0; ++end) continue;
        if (end == first || at + 16 > bytes) continue;
        if (end - first == n)
            snprintf(to, bytes, "all");
        else
            at += (size_t)snprintf(to + at, bytes - at, end - first == 1 ? "%s%d" : "%s%d-%d",
                                   at > 0 ? "," : "", first, end - 1);
    }
}

/* Another chunk whose results these would be; 0: there is none. */
static int right_at(const tensor *t, int64_t e, int64_t *there)
{
    const int n = chunk_of(t);
    const float *got = t->got + e / n * n;
    for (*there = 0; *there < elements(t) && n == 8; *there += n) {
        int same = 1, some = 0;
        for (int c = 0; c < n; ++c) {
            same &= fabsf(got[c] - t->x[*there + c]) <= t->slack[*there + c];
            some |= got[c] != 0;
        }
        if (same && some) return 1;
    }
    return 0;
}

static void say_first(const tensor *t, int k, const count *x)
{
    const int64_t e = x->first;
    int64_t there;
    printf("; first %s head %lld row %lld column %lld got %g want %g", tensor_names[k],
           (long long)(e / t->d % t->h), (long long)(e / t->d / t->h), (long long)(e % t->d),
           (double)t->got[e], (double)t->x[e]);
    if (right_at(t, e, &there))
        printf(" (right at head %lld row %lld column %lld)", (long long)(there / t->d % t->h),
               (long long)(there / t->d / t->h), (long long)(there % t->d + e % 8));
    for (int b = 0; b < BINS; ++b) {
        char text[LINE];
        say_bins(x->bin[b], bins_of(t, b), text, sizeof text);
        if (k != T_LSE || b != 2) printf(", %s %s", bin_names[b], text);
    }
}

/* ---- evidence ---- */

static void write_number(FILE *out, const verdict *v, int k, float x)
{
    if (is_unwritten(v, k, x))
        fputs(" _", out);
    else
        fprintf(out, " %.7g", (double)x);
}

static void write_tensor(FILE *out, const verdict *v, int k)
{
    const tensor *t = &v->t[k];
    const int n = chunk_of(t);
    int64_t every, at = 0, in_row = 0;
    count x;
    count_wrong(v, k, &x);
    every = (x.chunks + SHOWN - 1) / SHOWN;
    while (every > 1 && (every % 2 == 0 || every % 3 == 0)) ++every; /* all heads have their share */
    fprintf(out, "tensor %s %lld %d %d wrong %lld nan %lld unwritten %lld every %lld\n", tensor_names[k],
            (long long)t->n, t->h, t->d, (long long)x.wrong, (long long)x.nan, (long long)x.unwritten,
            (long long)every);
    for (int b = 0; b < BINS && x.wrong > 0; ++b) {
        fprintf(out, "bins %s", bin_names[b]);
        for (int i = 0; i < bins_of(t, b); ++i) fprintf(out, " %lld", (long long)x.bin[b][i]);
        fputc('\n', out);
    }
    for (int64_t e = 0; e < elements(t); e += n) {
        int wrong = 0;
        if (e % t->d == 0) at += in_row, in_row = 0;
        for (int c = 0; c < n; ++c) wrong |= is_wrong(t, e + c);
        in_row |= wrong;
        if (!wrong || at % every != 0) continue;
        fprintf(out, "%s %lld %lld %lld /", tensor_names[k], (long long)(e / t->d % t->h),
                (long long)(e / t->d / t->h), (long long)(e % t->d));
        for (int c = 0; c < n; ++c) write_number(out, v, k, t->got[e + c]);
        fputs(" /", out);
        for (int c = 0; c < n; ++c) write_number(out, v, k, t->x[e + c]);
        fputc('\n', out);
    }
}

static void write_run(FILE *out, const verdict *v, int run)
{
    fprintf(out, "run %s\n", run_names[run]);
    for (int k = 0; k < TENSORS; ++k)
        if (is_output(&v->of, k)) write_tensor(out, v, k);
}

static FILE *open_evidence(const char *path, const verdict *v)
{
    const verdict_case *x = &v->of;
    const char *tile = strstr(choice, "tiles of ");
    FILE *out = path != NULL ? fopen(path, "w") : NULL;
    char words[64];
    if (out == NULL) return NULL;
    case_words(x, words, sizeof words);
    fprintf(out, "verdict %s\nqueries %lld\nkeys %lld\nheads %d\nkv_heads %d\nq_pos %lld\ntile %d\n", words,
            (long long)x->queries, (long long)x->keys, x->heads, x->kv_heads, (long long)x->q_pos,
            tile != NULL ? atoi(tile + 9) : 0);
    fprintf(out, "borders");
    for (int64_t b = 0; b <= v->g.a.mask.borders.cu_seqlens_n && v->g.a.mask.borders.cu_seqlens != NULL; ++b)
        fprintf(out, " %lld", (long long)v->g.a.mask.borders.cu_seqlens[b]);
    fprintf(out, "\nscale %g\ncapability %d\nprocessors %d\nmargin %d\nchoice %s\n",
            (double)scale_of(x, LABELS), dev.cuda.capability, dev.cuda.processors, dev.cuda.margin, choice);
    return out;
}

/* ---- a case ---- */

/* The end of a case whose call failed: the watch's sentence, or the runtime's. */
static int failed(const char *words, const verdict *v, const char *path)
{
    char text[UPIPE_CUDA_WATCH_TEXT];
    if (upipe_cuda_watch_text(dev.cuda.watch, text, sizeof text) > 0) {
        const upi_cuda_watch_record *all = (const upi_cuda_watch_record *)dev.cuda.watch;
        FILE *out = open_evidence(path, v);
        for (int i = 0; out != NULL && i < UPI_CUDA_WATCH_RECORDS; ++i) {
            if (all[i].d == 0) continue;
            fprintf(out, "watch %d ", i);
            for (size_t b = 0; b < sizeof all[i]; ++b)
                fprintf(out, "%02x", ((const unsigned char *)&all[i])[b]);
            fputc('\n', out);
        }
        if (out != NULL) {
            fprintf(out, "hangs %s\n", text);
            fclose(out);
        }
        printf("%s: HANGS %s\n", words, text);
        return HANGS;
    }
    printf("%s: FAILED %s\n", words, dev.c.err.text);
    return FAILED;
}

static int run_case(verdict *v, const char *words, const char *path)
{
    const verdict_case *x = &v->of;
    float *again[TENSORS];
    count wrong[TENSORS];
    int64_t others = 0;
    int first = -1, k;
    FILE *out;
    if (!device_open(&dev)) {
        printf("%s: FAILED %s\n", words, dev.c.err.text[0] ? dev.c.err.text : "no device");
        return FAILED;
    }
    if (x->kernel == 90 && dev.cuda.capability / 10 != 9) {
        printf("%s: not for a device of compute capability %d.%d\n", words, dev.cuda.capability / 10,
               dev.cuda.capability % 10);
        return NOT_HERE;
    }
    if (upipe_cuda_host_slab(&dev.cuda.watch, UPIPE_CUDA_WATCH, &dev.c.err) != UPIPE_OK)
        return failed(words, v, path);
    memset(dev.cuda.watch, 0, UPIPE_CUDA_WATCH);
    make_call(v);
    make_run(x, CHECK_RUN, v->t);
    if (test_failures > 0 || call(v, CHECK_RUN) != UPIPE_OK) return failed(words, v, path);
    if (strstr(choice, x->kernel == 90   ? "kernels for 9.0"
                       : x->kernel == 80 ? "kernels for 8.0"
                                         : "kernels for f32") == NULL) {
        printf("%s: FAILED another kernel ran: %s\n", words, choice);
        return FAILED;
    }
    for (k = 0; k < TENSORS; ++k) {
        if (!is_output(x, k)) continue;
        count_wrong(v, k, &wrong[k]);
        if (wrong[k].wrong > 0 && (first < 0 || first == T_LSE)) first = k;
    }
    if (first < 0) {
        printf("%s: right\n", words);
        return RIGHT;
    }
    printf("%s: WRONG", words);
    for (k = 0; k < TENSORS; ++k)
        if (is_output(x, k))
            printf(" %s %lld/%lld", tensor_names[k], (long long)wrong[k].wrong,
                   (long long)elements(&v->t[k]));
    say_first(&v->t[first], first, &wrong[first]);
    out = open_evidence(path, v);
    if (out != NULL) write_run(out, v, CHECK_RUN);
    for (k = 0; k < TENSORS; ++k) {
        again[k] = v->t[k].got;
        v->t[k].got = (float *)malloc((size_t)elements(&v->t[k]) * sizeof(float));
    }
    if (call(v, CHECK_RUN) != UPIPE_OK) return failed("; again", v, NULL);
    for (k = 0; k < TENSORS; ++k)
        for (int64_t e = 0; e < elements(&v->t[k]) && is_output(x, k); ++e)
            others += memcmp(&again[k][e], &v->t[k].got[e], sizeof(float)) != 0;
    if (others == 0) printf("; again: the same bits\n");
    if (others > 0) printf("; again: %lld numbers differ\n", (long long)others);
    fflush(stdout);
    if (out != NULL) fprintf(out, "again %lld\n", (long long)others);
    for (int run = LABELS; out != NULL && run < (x->backward ? RUNS : GRADS); ++run) {
        make_run(x, run, v->t);
        if (call(v, run) != UPIPE_OK) break; /* what has been written is read without it */
        write_run(out, v, run);
    }
    if (out != NULL) fclose(out);
    return WRONG;
}

int main(int argc, char **argv)
{
    static verdict v;
    const char *path = argc == 6 && strcmp(argv[4], "--evidence") == 0 ? argv[5] : NULL;
    char words[64], given[64];
    setenv("FAKE_CAPABILITY", "90", 0);
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (int n = 0; case_at(n, &v.of); ++n) {
            case_words(&v.of, words, sizeof words);
            puts(words);
        }
        return 0;
    }
    if (argc == 4 || path != NULL) snprintf(given, sizeof given, "%s %s %s", argv[1], argv[2], argv[3]);
    for (int n = 0; (argc == 4 || path != NULL) && case_at(n, &v.of); ++n) {
        case_words(&v.of, words, sizeof words);
        if (strcmp(words, given) == 0) return run_case(&v, words, path);
    }
    fprintf(stderr, "usage: verdict --list\n       verdict KERNEL D MASK [--evidence FILE]\n");
    return USAGE;
}
