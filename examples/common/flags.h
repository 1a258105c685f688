/* flags.h -- a command line by a table of flags (flag_row.h): read, explained, written as settings
 *
 *     static const flag_set set = {flag_rows, FLAG_ROWS, IN_TRAIN, "usage: ...\n", more, ", products: ..."};
 *     int status = flags_read(&set, &options, options.given, argc, argv);
 *     if (status != 0) return status - 1;                    the sentence is out, or --help is
 *
 *     flags_json(f, &set, &options);                         the settings, members of a JSON object
 *
 * A flag is a word --name, its value the next word or what stands behind =. A flag that comes twice counts as it comes
 * last, but for lists. After a wrong word the others are still read, without a sentence: a rank needs them to meet
 * those whose words are right.
 */
#ifndef COMMON_FLAGS_H
#define COMMON_FLAGS_H

#include <assert.h>

#include "activations_flag.h"
#include "cli.h"
#include "flag_row.h"
#include "json.h"
#include "number.h"

/* flag_set -- the flags of a program
 *   programs  whose rows count
 *   usage     what --help says before the flags; more: behind them, a list that ends with NULL
 *   version   what --version says beside the version, from a comma on
 */
typedef struct flag_set {
    const flag_row *rows;
    int n, programs;
    const char *usage;
    const char *const *more;
    const char *version;
} flag_set;

enum { FLAG_VALUE = 512, FLAG_COLUMN = 21, FLAG_LINE = 112 };

static inline void *flag_member(const flag_row *row, const void *o)
{
    return (char *)o + row->at;
}

/* The member of another's options becomes what it is there. */
static inline void flag_copy(const flag_row *row, void *to, const void *from)
{
    static const size_t bytes[FLAG_HELP] = {sizeof(int),
                                            sizeof(int),
                                            sizeof(int64_t),
                                            sizeof(double),
                                            sizeof(double),
                                            sizeof(size_t),
                                            sizeof(int),
                                            sizeof(char *),
                                            sizeof(char *),
                                            sizeof(text_list),
                                            sizeof(int),
                                            sizeof(method_list),
                                            sizeof(activations_setting)};
    memcpy(flag_member(row, to), flag_member(row, from), bytes[row->kind]);
}

/* ---- values as text ---- */

/* Word number i of those between bars; its length, -1 if there are not so many. */
static inline int flag_word(const char *words, int i, const char **word)
{
    for (; i > 0 && words != NULL; --i) words = strchr(words, '|') != NULL ? strchr(words, '|') + 1 : NULL;
    *word = words;
    return words != NULL ? (int)strcspn(words, "|") : -1;
}

/* As many digits as say this number; %g leaves zeros at its end out. */
static inline void flag_real_text(char out[FLAG_VALUE], double x)
{
    int digits = 6;
    do snprintf(out, FLAG_VALUE, "%.*g", digits, x);
    while (++digits <= 17 && strtod(out, NULL) != x);
}

/* The value, as the flag would say it. */
static inline const char *flag_text(char out[FLAG_VALUE], const flag_row *row, const void *o)
{
    const void *at = flag_member(row, o);
    const method_list *methods = (const method_list *)at;
    const text_list *texts = (const text_list *)at;
    const char *word;
    int i, n, used = 0;
    out[0] = '\0';
    switch (row->kind) {
    case FLAG_SWITCH:
        return *(const int *)at ? "given" : "not given";
    case FLAG_INT:
        snprintf(out, FLAG_VALUE, "%d", *(const int *)at);
        break;
    case FLAG_WHOLE:
        snprintf(out, FLAG_VALUE, "%lld", (long long)*(const int64_t *)at);
        break;
    case FLAG_BYTES:
        snprintf(out, FLAG_VALUE, "%zu", *(const size_t *)at);
        break;
    case FLAG_REAL:
    case FLAG_SECONDS:
        flag_real_text(out, *(const double *)at);
        break;
    case FLAG_CHOICE:
        n = flag_word(row->value, *(const int *)at, &word);
        snprintf(out, FLAG_VALUE, "%.*s", n > 0 ? n : 0, word);
        break;
    case FLAG_METHOD:
        return method_kinds[*(const int *)at].name;
    case FLAG_METHODS:
        for (i = 0; i < methods->n; ++i)
            used += snprintf(out + used, (size_t)(FLAG_VALUE - used), "%s%s", i > 0 ? "," : "",
                             method_kinds[methods->at[i]].name);
        return methods->n > 0 ? out : "not given";
    case FLAG_TEXTS:
        for (i = 0; i < texts->n; ++i)
            used +=
                snprintf(out + used, (size_t)(FLAG_VALUE - used), "%s%.24s", i > 0 ? "," : "", texts->at[i]);
        return texts->n > 0 ? out : "not given";
    case FLAG_ACTIVATIONS:
        return activations_text(out, (const activations_setting *)at);
    default: /* text */
        snprintf(out, FLAG_VALUE, "%.500s",
                 *(const char *const *)at != NULL ? *(const char *const *)at : "not given");
    }
    return out;
}

/* What ranks must agree on of a flag: its value, or of a path that may differ whether there is one. */
static inline uint64_t flag_hash(const flag_row *row, const void *o)
{
    char text[FLAG_VALUE];
    const char *value = flag_text(text, row, o);
    if (row->kind == FLAG_TEXT || row->kind == FLAG_LENGTHS) {
        const char *const path = *(const char *const *)flag_member(row, o);
        value = path == NULL ? "" : row->traits & FLAG_READ ? "given" : path;
    }
    return upipe_hash_bytes(UPIPE_HASH, value, strlen(value));
}

/* ---- a value ---- */

static inline int flag_refuse_number(const flag_row *row, const char *text)
{
    if (row->kind == FLAG_SECONDS)
        return cli_refuse("--%s wants seconds above 0, at most %.0f, not '%s'", row->name, row->most, text);
    if (row->kind == FLAG_BYTES)
        return cli_refuse(
            "--%s wants a size above 0 with its unit (64KiB, 80GB, 1.9TiB; GB is not GiB), not '%s'",
            row->name, text);
    if (row->kind == FLAG_REAL)
        return cli_refuse("--%s wants a number from %g to %g, not '%s'", row->name, row->least, row->most,
                          text);
    return cli_refuse("--%s wants a whole number from %lld to %lld, not '%s'", row->name,
                      (long long)row->least, (long long)flag_most(row), text);
}

/* Numbers of every kind, each within its range. */
static inline int flag_number(const flag_row *row, const char *text, void *at)
{
    int64_t whole = 0;
    double real = 0;
    int bad;
    if (row->kind == FLAG_REAL || row->kind == FLAG_SECONDS) {
        bad = number_real(text, &real) != 0;
    } else {
        bad = row->kind == FLAG_BYTES ? number_bytes(text, &whole) : number_whole(text, &whole);
        real = (double)whole;
    }
    if (bad || real < row->least || real > row->most || (row->kind == FLAG_SECONDS && real <= 0))
        return flag_refuse_number(row, text);
    if (row->kind == FLAG_INT) *(int *)at = (int)whole;
    if (row->kind == FLAG_WHOLE) *(int64_t *)at = whole;
    if (row->kind == FLAG_BYTES) *(size_t *)at = (size_t)whole;
    if (row->kind == FLAG_REAL || row->kind == FLAG_SECONDS) *(double *)at = real;
    return 0;
}

/* One of the row's words; -1 stands for a wrong one. */
static inline int flag_choice(const flag_row *row, const char *text, int *out)
{
    char words[FLAG_VALUE] = "";
    const char *word, *next;
    int i, n, used = 0;
    for (i = 0; (n = flag_word(row->value, i, &word)) >= 0; ++i) {
        *out = i;
        if (strlen(text) == (size_t)n && memcmp(text, word, (size_t)n) == 0) return 0;
        used += snprintf(words + used, sizeof words - (size_t)used, "%s%.*s",
                         i == 0                                    ? ""
                         : flag_word(row->value, i + 1, &next) < 0 ? " or "
                                                                   : ", ",
                         n, word);
    }
    *out = -1;
    return cli_refuse("--%s is %s, not '%s'", row->name, words, text);
}

static inline int flag_method(const char *text, int *out)
{
    *out = method_find(text);
    return *out < METHODS ? 0 : cli_refuse("--method: '%s' is no method that --help lists", text);
}

static inline int flag_methods(const char *text, method_list *list)
{
    int i, m, status = flag_method(text, &m);
    if (status != 0) return status;
    for (i = 0; i < list->n; ++i)
        if (list->at[i] == m) return cli_refuse("--method %s is given twice", text);
    list->at[list->n++] = m;
    return 0;
}

static inline int flag_activations(const char *text, activations_setting *out)
{
    if (activations_parse(text, out) == 0) return 0;
    return cli_refuse(
        "--activations is ac, offload, sao:K, sac, sac:K or blocks:K, with K from 1 to %d, and \",grad\" "
        "behind it, not '%s'",
        INT32_MAX, text);
}

/* What the flag says, into its member. */
static inline int flag_value(const flag_row *row, const char *text, void *at)
{
    text_list *texts = (text_list *)at;
    switch (row->kind) {
    case FLAG_SWITCH:
        *(int *)at = 1;
        return 0;
    case FLAG_CHOICE:
        return flag_choice(row, text, (int *)at);
    case FLAG_TEXT:
    case FLAG_LENGTHS:
        *(const char **)at = text;
        return 0;
    case FLAG_TEXTS:
        if (texts->n == TEXTS_MAX) return cli_refuse("--%s may come %d times", row->name, (int)TEXTS_MAX);
        texts->at[texts->n++] = text;
        return 0;
    case FLAG_METHOD:
        return flag_method(text, (int *)at);
    case FLAG_METHODS:
        return flag_methods(text, (method_list *)at);
    case FLAG_ACTIVATIONS:
        return flag_activations(text, (activations_setting *)at);
    default:
        return flag_number(row, text, at);
    }
}

/* ---- --help ---- */

/* A word from this column on, or in a new line where it does not fit; the column behind it. */
static inline int flag_put(FILE *f, int column, const char *word, int n)
{
    const int first = column == FLAG_COLUMN, fits = first || column + 1 + n <= FLAG_LINE;
    if (!fits)
        fprintf(f, "\n%*s", FLAG_COLUMN, "");
    else if (!first)
        fputc(' ', f);
    fprintf(f, "%.*s", n, word);
    return (fits ? column + !first : FLAG_COLUMN) + n;
}

/* Words from column FLAG_COLUMN on, which is where the line is. */
static inline void flag_fill(FILE *f, const char *text)
{
    int column = FLAG_COLUMN;
    while (*text != '\0') {
        const int n = (int)strcspn(text, " ");
        column = flag_put(f, column, text, n);
        text += n + (text[n] == ' ');
    }
    fputc('\n', f);
}

/* The range of a number, in brackets behind a blank; nothing for what is none. */
static inline const char *flag_range(char out[FLAG_VALUE], const flag_row *row)
{
    out[0] = '\0';
    if (row->kind == FLAG_INT || row->kind == FLAG_WHOLE)
        snprintf(out, FLAG_VALUE, " [%lld to %lld]", (long long)row->least, (long long)flag_most(row));
    else if (row->kind == FLAG_REAL)
        snprintf(out, FLAG_VALUE, " [%g to %g]", row->least, row->most);
    else if (row->kind == FLAG_SECONDS)
        snprintf(out, FLAG_VALUE, " [above 0 to %g]", row->most);
    return out;
}

static inline void flag_explain(FILE *f, const flag_row *row)
{
    char left[64], range[FLAG_VALUE], help[1024];
    const char *const standard = row->standard != NULL ? row->standard : "";
    const char *const quote = row->kind == FLAG_TEXT && strchr(standard, ' ') ? "\"" : "";
    snprintf(left, sizeof left, "  --%s%s%s", row->name, row->value != NULL ? " " : "",
             row->value != NULL ? row->value : "");
    fprintf(f, "%-*s", FLAG_COLUMN, left);
    if (strlen(left) >= FLAG_COLUMN) fprintf(f, "\n%*s", FLAG_COLUMN, "");
    snprintf(help, sizeof help, "%s%s%s%s%s%s%s", row->help, row->standard != NULL ? " (" : "", quote,
             standard, quote, row->standard != NULL ? ")" : "", flag_range(range, row));
    flag_fill(f, help);
}

/* The names of the program's flags with a trait below a heading, if there are any; how many. */
static inline int flags_list(FILE *f, const flag_set *set, int trait, const char *heading)
{
    int some = 0, column = FLAG_COLUMN;
    for (int i = 0; i < set->n; ++i) {
        const flag_row *row = &set->rows[i];
        char name[64];
        if (!(row->programs & set->programs) || !(row->traits & trait)) continue;
        if (some++ == 0) fprintf(f, "\n%s\n%*s", heading, FLAG_COLUMN, "");
        snprintf(name, sizeof name, "--%s", row->name);
        column = flag_put(f, column, name, (int)strlen(name));
    }
    if (some > 0) fputc('\n', f);
    return some;
}

/* All of --help behind its first lines. */
static inline void flags_print(FILE *f, const flag_set *set)
{
    const char *const *more, *section = NULL;
    for (int i = 0; i < set->n; ++i) {
        const flag_row *row = &set->rows[i];
        if (!(row->programs & set->programs)) continue;
        if (row->section != section) fprintf(f, "\n%s%s", row->section, row->section[0] != '\0' ? "\n" : "");
        section = row->section;
        flag_explain(f, row);
    }
    fputs(
        "\nA value is the next word, or stands behind =. Of a flag that comes twice the last one counts, and a note\n"
        "says so, but where it may come several times. (...) is the default, [...] the range of a number. A whole\n"
        "number may be 64k, 1M or 1e6: k is 2^10, M is 2^20. A size of memory has a unit: 64KiB, 80GB; GB is 10^9\n"
        "bytes, GiB 2^30.\n",
        f);
    flags_list(
        f, set, FLAG_READ,
        "Ranks that are processes compare their flags before the first step, and end with a sentence where\n"
        "they differ. Of these paths the content is compared, and the name may differ:");
    if (flags_list(f, set, FLAG_SCHEDULE,
                   "A resumed run has these from the checkpoint, or from the flag where it is given:")) {
        flags_list(f, set, FLAG_DATA,
                   "A resumed run has these from the checkpoint, and refuses another value:");
        flags_list(
            f, set, FLAG_MODEL,
            "A resumed or loaded model has these from its folder. Another value is refused, but for the RoPE\n"
            "of a loaded one:");
    }
    for (more = set->more; *more != NULL; ++more) fputs(*more, f);
}

/* All of --help; 1, or 1 + the exit status with the sentence out. */
static inline int flags_explain(const flag_set *set)
{
    fputs(set->usage, stdout);
    flags_print(stdout, set);
    return cli_print("help", "");
}

/* ---- the command line ---- */

enum { FLAG_NAME = 32 };

/* Letters that are wrong, missing or too many in a word of n letters, beside a name. */
static inline int flag_distance(const char *word, int n, const char *name)
{
    int row[FLAG_NAME + 1], i, k;
    const int m = (int)strlen(name);
    if (n > FLAG_NAME || m > FLAG_NAME) return FLAG_NAME;
    for (k = 0; k <= m; ++k) row[k] = k;
    for (i = 1; i <= n; ++i) {
        int diagonal = row[0]; /* of the row above, as row[k] is until it is overwritten */
        row[0] = i;
        for (k = 1; k <= m; ++k) {
            const int above = row[k], left = row[k - 1], same = diagonal + (word[i - 1] != name[k - 1]);
            row[k] = same <= above && same <= left ? same : (above < left ? above : left) + 1;
            diagonal = above;
        }
    }
    return row[m];
}

/* The flag that a wrong word, of n letters behind its --, may have been meant for: it begins so, or two letters differ, but not
 * half of them. NULL if there is none. */
static inline const flag_row *flag_nearest(const flag_set *set, const char *word, int n)
{
    const flag_row *nearest = NULL;
    int i, least = 3;
    for (i = 0; i < set->n; ++i) {
        const flag_row *row = &set->rows[i];
        int far = flag_distance(word, n, row->name);
        if (!(row->programs & set->programs) || n < 2) continue;
        if (n >= 3 && strncmp(row->name, word, (size_t)n) == 0) far = 1;
        if (far >= least || 2 * far >= n) continue;
        least = far;
        nearest = row;
    }
    return nearest;
}

static inline int flags_unknown(const flag_set *set, const char *word, int n)
{
    const flag_row *near = strncmp(word, "--", 2) == 0 ? flag_nearest(set, word + 2, n - 2) : NULL;
    if (near == NULL) return cli_refuse("'%s' is no flag of this program", word);
    return cli_refuse("'%s' is no flag of this program: --%s is", word, near->name);
}

/* The word argv[*at], and the next one if that is its value. */
static inline int flags_word(const flag_set *set, void *o, int *given, char **argv, int *at)
{
    const char *word = argv[*at], *text = NULL;
    const size_t n = strcspn(word, "=");
    const flag_row *row;
    int i = 0;
    if (word[0] != '-') return cli_refuse("'%s' is not a flag", word);
    while (i < set->n &&
           !((set->rows[i].programs & set->programs) && strncmp(word, "--", 2) == 0 &&
             strlen(set->rows[i].name) == n - 2 && memcmp(set->rows[i].name, word + 2, n - 2) == 0))
        ++i;
    if (i == set->n) return flags_unknown(set, word, (int)n);
    row = &set->rows[i];
    if (row->value == NULL && word[n] == '=') return cli_refuse("--%s takes no value: '%s'", row->name, word);
    if (row->kind == FLAG_HELP || row->kind == FLAG_VERSION) {
        if (cli_mute) return 0;
        if (cli_holds) return 1; /* another process prints it */
        return row->kind == FLAG_HELP ? flags_explain(set) : cli_version("version", set->version);
    }
    if (row->value != NULL) text = word[n] == '=' ? word + n + 1 : argv[*at + 1] != NULL ? argv[++*at] : NULL;
    if (row->value != NULL && text == NULL) return cli_refuse("%s wants a value", word);
    if (text != NULL && text[0] == '\0') return cli_refuse("--%s is empty", row->name);
    if (given[i]++ == 1 && row->kind != FLAG_METHODS && row->kind != FLAG_TEXTS)
        cli_note("--%s is given twice: the last one counts", row->name);
    return flag_value(row, text, flag_member(row, o));
}

/* flags_read -- 0; 1 if the text of --help or --version is out; 1 + the exit status if a sentence is
 *   given   [set->n], zeros: how often each row's flag comes
 *   argv    ends with NULL
 */
static inline int flags_read(const flag_set *set, void *o, int *given, int argc, char **argv)
{
    int i, status = 0;
    for (i = 0; i < set->n; ++i) {
        const flag_row *row = &set->rows[i];
        if ((row->programs & set->programs) && row->standard != NULL)
            status = flag_value(row, row->standard, flag_member(row, o));
        assert(status == 0);
    }
    for (i = 1; i < argc && status != 1; ++i) {
        const int one = flags_word(set, o, given, argv, &i);
        if (status == 0) status = one;
        cli_mute = status != 0;
    }
    cli_mute = 0;
    return status;
}

/* ---- settings ---- */

static inline void flag_json(FILE *f, const flag_row *row, const void *o)
{
    char text[FLAG_VALUE];
    const char *const value = flag_text(text, row, o), *word;
    const void *at = flag_member(row, o);
    const method_list *methods = (const method_list *)at;
    const text_list *texts = (const text_list *)at;
    int i;
    if (row->kind == FLAG_TEXT) {
        json_quote(f, *(const char *const *)at);
    } else if (row->kind == FLAG_METHODS) {
        for (i = 0; i < methods->n; ++i) {
            fputs(i > 0 ? ", " : "[", f);
            json_quote(f, method_kinds[methods->at[i]].name);
        }
        fputs("]", f);
    } else if (row->kind == FLAG_TEXTS) {
        fputs("[", f);
        for (i = 0; i < texts->n; ++i) {
            fputs(i > 0 ? ", " : "", f);
            json_quote(f, texts->at[i]);
        }
        fputs("]", f);
    } else if (row->kind == FLAG_SWITCH) {
        fputs(*(const int *)at ? "true" : "false", f);
    } else if (row->kind == FLAG_CHOICE || row->kind == FLAG_METHOD || row->kind == FLAG_ACTIVATIONS) {
        json_quote(f, value);
    } else {
        word = (row->traits & FLAG_NULL) && strcmp(value, "0") == 0 ? "null" : value;
        fputs(word, f);
    }
}

/* flags_json -- a member for each flag, with a comma behind it */
static inline void flags_json(FILE *f, const flag_set *set, const void *o)
{
    int i;
    for (i = 0; i < set->n; ++i) {
        const flag_row *row = &set->rows[i];
        const char *at;
        if (!(row->programs & set->programs) || row->kind >= FLAG_HELP || row->kind == FLAG_LENGTHS) continue;
        fputs("    \"", f);
        for (at = row->name; *at != '\0'; ++at) fputc(*at == '-' ? '_' : *at, f);
        fputs("\": ", f);
        flag_json(f, row, o);
        fputs(",\n", f);
    }
}

#endif
