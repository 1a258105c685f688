/* test_flags.c -- the table of flags: its rows, what a new one cannot escape, and what --help says of them */
#define PROGRAM "train"
#include "lib/test.h"

#include "examples/common/flags.h"
#include "examples/common/options.h"

static const struct {
    int bit;
    const char *name;
} programs[] = {{IN_TRAIN, "train"}, {IN_COMPARE, "compare"}, {IN_LOGITS, "logits"}, {IN_PLAN, "upipe-plan"}};

enum { PROGRAMS = sizeof programs / sizeof *programs };

static flag_set set_of(int bit)
{
    static const char *const none[] = {NULL};
    flag_set set = {flag_rows, FLAG_ROWS, 0, "", none, ""};
    set.programs = bit;
    return set;
}

/* What a program starts from: its defaults. */
static options defaults(int bit)
{
    char name[] = "program", *argv[] = {name, NULL};
    const flag_set set = set_of(bit);
    options o = {.program = bit};
    CHECK_INT(flags_read(&set, &o, o.given, 1, argv), 0);
    return o;
}

/* ---- the rows ---- */

static int same_place(const flag_row *a, const flag_row *b)
{
    return a->kind < FLAG_HELP && b->kind < FLAG_HELP && a->at == b->at;
}

static void test_rows(void)
{
    CHECK((int)FLAG_ROWS <= (int)FLAG_ROWS_MAX);
    for (int p = 0; p < PROGRAMS; ++p) {
        const char *section = NULL;
        for (int i = 0; i < FLAG_ROWS; ++i) {
            const flag_row *row = &flag_rows[i];
            if (!(row->programs & programs[p].bit)) continue;
            for (int k = 0; k < i; ++k) {
                const flag_row *other = &flag_rows[k];
                if (!(other->programs & programs[p].bit)) continue;
                CHECK(strcmp(row->name, other->name) !=
                      0); /* a flag of a program has one row, and a member */
                CHECK(!same_place(row, other));
                CHECK(row->section == section ||
                      other->section != row->section); /* sections are in one piece */
            }
            section = row->section;
            CHECK((row->value == NULL) == (row->kind == FLAG_SWITCH || row->kind >= FLAG_HELP));
            CHECK(row->help[0] != '\0' && row->least <= row->most);
        }
    }
}

/* ---- values ---- */

static int read_words(int bit, options *o, int n, const char *const *words)
{
    const flag_set set = set_of(bit);
    char text[8][32], *argv[10];
    int i;
    *o = (options){.program = bit};
    argv[0] = text[0];
    for (i = 0; i < n; ++i) {
        snprintf(text[i], sizeof text[i], "%s", words[i]);
        argv[i + 1] = text[i];
    }
    argv[n + 1] = NULL;
    cli_holds = 1;
    cli_held[0] = '\0';
    i = flags_read(&set, o, o->given, n + 1, argv);
    cli_holds = 0;
    return i;
}

static void test_numbers(void)
{
    static const struct {
        const char *text;
        int64_t value; /* -1: refused */
    } all[] = {{"64", 64},       {"64k", 65536}, {"64K", 65536},     {"1M", 1 << 20}, {"1.5M", 3 << 19},
               {"1e6", 1000000}, {"0.5k", 512},  {"5m", -1},         {"1.5", -1},     {"", -1},
               {"0x10", -1},     {"-1", -1},     {"+1", -1},         {" 1", -1},      {"1 ", -1},
               {"1e", -1},       {"1e99", -1},   {"2147483648", -1}, {"1.", -1},      {"3G", -1},
               {"1e-1", -1},     {"20e-1", -1}};
    static const struct {
        const char *text;
        double value;
    } reals[] = {{"0.5", 0.5}, {"1e-3", 1e-3}, {"2", 2},     {"0x1p3", -1}, {"1e999", -1}, {"nan", -1},
                 {"inf", -1},  {"-1", -1},     {"1001", -1}, {"1k", -1},    {"1e", -1}};
    static const double shown[] = {30, 0.5, 1e-5, 0.003, 1e12, 1.0 / 3, 1e-8, 1000000};
    static const char *const as[] = {"30",    "0.5",  "1e-05", "0.003", "1e+12", "0.3333333333333333",
                                     "1e-08", "1e+06"};
    char text[FLAG_VALUE];
    options o;
    for (size_t i = 0; i < sizeof shown / sizeof *shown; ++i) {
        flag_real_text(text, shown[i]);
        CHECK_TEXT(text, as[i]);
        CHECK(strtod(text, NULL) == shown[i]);
    }
    for (size_t i = 0; i < sizeof all / sizeof *all; ++i) {
        const char *words[] = {"--tokens", all[i].text};
        const int status = read_words(IN_TRAIN, &o, 2, words);
        CHECK_INT(status, all[i].value < 0 ? 1 + EXIT_USAGE : 0);
        if (all[i].value >= 0) CHECK_INT(o.tokens, all[i].value);
    }
    for (size_t i = 0; i < sizeof reals / sizeof *reals; ++i) {
        const char *words[] = {"--lr", reals[i].text};
        const int status = read_words(IN_TRAIN, &o, 2, words);
        CHECK_INT(status, reals[i].value < 0 ? 1 + EXIT_USAGE : 0);
        if (reals[i].value >= 0) CHECK(o.lr == reals[i].value);
    }
}

/* The last one counts; after a wrong word the others are read, and the first sentence stays. */
static void test_words(void)
{
    const char *const twice[] = {"--tokens", "64", "--tokens=32", "--overlap", "--overlap"};
    const char *const wrong[] = {"--tokens", "1x", "--lr", "-1", "--transport", "mpi", "word"};
    const char *const lists[] = {"--method", "ring", "--method", "usp", "--method", "ring"};
    options o;
    CHECK_INT(read_words(IN_TRAIN, &o, 5, twice), 0);
    CHECK_INT(o.tokens, 32);
    CHECK_INT(options_given(&o, &o.tokens), 2);
    CHECK_INT(options_given(&o, &o.lr), 0);
    CHECK_INT(read_words(IN_TRAIN, &o, 7, wrong), 1 + EXIT_USAGE);
    CHECK(strstr(cli_held, "'1x'") != NULL);
    CHECK_INT(o.transport, 1);
    CHECK_INT(read_words(IN_COMPARE, &o, 6, lists), 1 + EXIT_USAGE);
    CHECK_INT(o.methods.n, 2);
    CHECK(strstr(cli_held, "given twice") != NULL);
}

/* Writes something else into a member than its default. */
static void change(const flag_row *row, options *o)
{
    void *at = flag_member(row, o);
    activations_setting *kept = (activations_setting *)at;
    switch (row->kind) {
    case FLAG_SWITCH:
    case FLAG_INT:
    case FLAG_CHOICE:
    case FLAG_METHOD:
        ++*(int *)at;
        return;
    case FLAG_WHOLE:
        ++*(int64_t *)at;
        return;
    case FLAG_BYTES:
        ++*(size_t *)at;
        return;
    case FLAG_REAL:
    case FLAG_SECONDS: /* the smallest difference that there is */
        *(double *)at = nextafter(*(double *)at, INFINITY);
        return;
    case FLAG_TEXTS:
    case FLAG_METHODS:
        ((method_list *)at)->n = 1;
        if (row->kind == FLAG_TEXTS) ((text_list *)at)->at[0] = "other";
        return;
    case FLAG_ACTIVATIONS:
        kept->grad = !kept->grad;
        return;
    default:
        *(const char **)at = "other";
    }
}

/* Ranks agree on every flag but those that say that they need not; a default, said as text, is what it was. */
static void test_agreement(void)
{
    int differ = 0;
    for (int p = 0; p < PROGRAMS; ++p) {
        for (int i = 0; i < FLAG_ROWS; ++i) {
            const flag_row *row = &flag_rows[i];
            options one = defaults(programs[p].bit), two = one;
            char text[FLAG_VALUE], other[FLAG_VALUE];
            if (!(row->programs & programs[p].bit) || row->kind >= FLAG_HELP) continue;
            CHECK(flag_hash(row, &one) == flag_hash(row, &two));
            change(row, &two);
            CHECK(flag_hash(row, &one) != flag_hash(row, &two));
            CHECK(strcmp(flag_text(text, row, &one), flag_text(other, row, &two)) != 0);
            flag_copy(row, &one, &two);
            CHECK(flag_hash(row, &one) == flag_hash(row, &two));
            differ += (row->traits & FLAG_FREE) != 0;
            /* paths that may differ: whether there is one is compared */
            if (!(row->traits & FLAG_READ)) continue;
            *(const char **)flag_member(row, &one) = "elsewhere";
            CHECK(flag_hash(row, &one) == flag_hash(row, &two));
        }
    }
    CHECK_INT(differ, 3); /* --progress of three programs: whoever adds one to these means it */
}

/* ---- --help ---- */

/* What --help prints, in one line; the caller frees it. */
static char *help_of(int bit)
{
    static const char *const more[] = {NULL};
    flag_set set = set_of(bit);
    char *text = NULL, *to;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    set.more = more;
    CHECK(f != NULL);
    if (f == NULL) return NULL;
    flags_print(f, &set);
    fclose(f);
    to = text;
    for (const char *from = text; *from != '\0'; ++from)
        if (*from != '\n' && (*from != ' ' || (to > text && to[-1] != ' ')))
            *to++ = *from;
        else if (to > text && to[-1] != ' ')
            *to++ = ' ';
    *to = '\0';
    return text;
}

/* Each flag stands there with its text, a number with its range, and of a training whose value counts when it resumes. */
static void test_help(void)
{
    static const struct {
        int bit;
        const char *text;
    } all[] = {
        {IN_PLAN, "--machine NAME|FILE so many GPUs,"},
        {IN_PLAN, "or a file (h100x8) --method"},
        {IN_PLAN, "ranks of a ring of usp and upipe-ring (2) [1 to 256]"},
        {IN_COMPARE, "(2048) [1 to 9223372036854775807]"},
        {IN_COMPARE, "before it aborts (600) [above 0 to 1e+06]"},
        {IN_TRAIN, "decay of the mean of gradients (0.9) [0 to 0.99999]"},
        {IN_TRAIN, "at most --tokens (\"In the beginning \")"},
        {IN_LOGITS, "and the name may differ: --load --ids --load-adapter "},
        {IN_TRAIN, "and the name may differ: --data --tokens-file "},
        {IN_TRAIN, "or from the flag where it is given: --steps --lr "},
        {IN_TRAIN, "from the checkpoint, and refuses another value: --tokens --batch "},
        {IN_TRAIN, "but for the RoPE of a loaded one: --layers --model-dim "},
    };
    for (int p = 0; p < PROGRAMS; ++p) {
        char *help = help_of(programs[p].bit), text[1024];
        if (help == NULL) return;
        for (int i = 0; i < FLAG_ROWS; ++i) {
            const flag_row *row = &flag_rows[i];
            if (!(row->programs & programs[p].bit)) continue;
            snprintf(text, sizeof text, "--%s%s%s %s", row->name, row->value != NULL ? " " : "",
                     row->value != NULL ? row->value : "", row->help);
            CHECK_TEXT(help, text);
        }
        for (size_t i = 0; i < sizeof all / sizeof *all; ++i)
            if (all[i].bit == programs[p].bit) CHECK_TEXT(help, all[i].text);
        CHECK((strstr(help, "resumed") != NULL) == (programs[p].bit == IN_TRAIN));
        free(help);
    }
}

/* A wrong flag is refused with the one that it may have been meant for; one that is like none is not explained. */
static void test_nearest(void)
{
    static const struct {
        int bit;
        const char *word, *said;
    } all[] = {
        {IN_TRAIN, "--rank", "'--rank' is no flag of this program: --ranks is"},
        {IN_TRAIN, "--ofload-optimizer", ": --offload-optimizer is"},
        {IN_TRAIN, "--learning-rate", "'--learning-rate' is no flag of this program"},
        {IN_TRAIN, "--model_dim", ": --model-dim is"},
        {IN_TRAIN, "--activatoins=ac", ": --activations is"},
        {IN_PLAN, "--max-token", ": --max-tokens is"},
        {IN_PLAN, "--wr", "'--wr' is no flag of this program"},
        {IN_PLAN, "--step", "'--step' is no flag of this program"}, /* --steps is the trainer's */
        {IN_PLAN, "-ranks", "'-ranks' is no flag of this program"},
        {IN_COMPARE, "--x", "'--x' is no flag of this program"},
        {IN_PLAN, "--best=1", "--best takes no value"},
        {IN_TRAIN, "ranks", "'ranks' is not a flag"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; ++i) {
        options o;
        CHECK_INT(read_words(all[i].bit, &o, 1, &all[i].word), 1 + EXIT_USAGE);
        CHECK_TEXT(cli_held, all[i].said);
        CHECK((strstr(all[i].said, ": --") != NULL) == (strstr(cli_held, ": --") != NULL));
    }
    /* every flag of a program with a letter too many, or with one left out, is that flag's, or one as near */
    for (int p = 0; p < PROGRAMS; ++p) {
        const flag_set set = set_of(programs[p].bit);
        for (int i = 0; i < FLAG_ROWS; ++i) {
            const flag_row *row = &flag_rows[i];
            const int n = (int)strlen(row->name);
            char name[64];
            if (!(row->programs & programs[p].bit) || n < 4) continue;
            for (int cut = 0; cut < n; ++cut) {
                const flag_row *near;
                snprintf(name, sizeof name, "%.*s%s", cut, row->name, row->name + cut + 1);
                near = flag_nearest(&set, name, n - 1);
                CHECK(near != NULL && flag_distance(name, n - 1, near->name) <= 1);
                snprintf(name, sizeof name, "%.*sq%s", cut, row->name, row->name + cut);
                near = flag_nearest(&set, name, n + 1);
                CHECK(near != NULL && flag_distance(name, n + 1, near->name) <= 1);
            }
        }
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_rows());
    TEST(test_numbers());
    TEST(test_words());
    TEST(test_agreement());
    TEST(test_help());
    TEST(test_nearest());
    return test_end("flags");
}
