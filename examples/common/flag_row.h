/* flag_row.h -- what is known of a flag: its name, its value, its range, its default, what it is for
 *
 * A program's flags are an array of such rows and a struct with their values: options.h has those of train, compare,
 * logits and upipe-plan, and flags.h reads a command line by them.
 */
#ifndef COMMON_FLAG_ROW_H
#define COMMON_FLAG_ROW_H

#include <stddef.h>
#include <stdint.h>

#include "methods.h"

/* flag_kind -- the member of options behind a flag
 *   SWITCH, INT, CHOICE int: of a switch 0 or 1, of a choice the place of the word    METHOD int, METHODS method_list
 *   WHOLE int64_t   REAL, SECONDS double   BYTES size_t   TEXT const char *, NULL = none   TEXTS text_list
 *   LENGTHS as TEXT: the program reads it when it knows more, and says in JSON what it has read
 */
typedef enum flag_kind {
    FLAG_SWITCH,
    FLAG_INT,
    FLAG_WHOLE,
    FLAG_REAL,
    FLAG_SECONDS,
    FLAG_BYTES,
    FLAG_CHOICE,
    FLAG_TEXT,
    FLAG_LENGTHS,
    FLAG_TEXTS,
    FLAG_METHOD,
    FLAG_METHODS,
    FLAG_ACTIVATIONS,
    FLAG_HELP,
    FLAG_VERSION
} flag_kind;

/* Ranks must agree on a flag, and a resumed or loaded run may change it, unless a trait says otherwise. */
enum {
    FLAG_MODEL = 1,     /* the folder of --resume or --load says it, and no flag otherwise */
    FLAG_DATA = 2,      /* a checkpoint says it, and a resumed run cannot have it otherwise */
    FLAG_SCHEDULE = 4,  /* a checkpoint says it, unless the flag does */
    FLAG_READ = 8,      /* a path that may differ over ranks; what they read there is compared */
    FLAG_FREE = 16,     /* ranks need not agree */
    FLAG_TRAINING = 32, /* has no effect with --plan */
    FLAG_NULL = 64      /* 0 is none: null in JSON */
};

/* flag_row
 *   value     what stands behind the flag in --help; of a choice its words, f32|bf16; NULL: nothing
 *   programs  bits: whose flag it is
 *   section   a heading of --help, under which rows stand together
 *   at        offset of the member
 *   standard  the default, as the flag would say it; NULL: 0, or what the help says
 */
typedef struct flag_row {
    const char *name, *value;
    int programs;
    const char *section;
    flag_kind kind;
    size_t at;
    double least, most;
    const char *standard;
    int traits;
    const char *help;
} flag_row;

enum { TEXTS_MAX = 16 };

typedef struct method_list {
    int n, at[METHODS]; /* in the order of the command line */
} method_list;

typedef struct text_list {
    int n;
    const char *at[TEXTS_MAX];
} text_list;

static inline int flag_same_name(const char *a, const char *b)
{
    while (*a != '\0' && (*a == *b || (*a == '-' && *b == '_'))) ++a, ++b;
    return *a == *b;
}

/* The largest that a whole number may be; 63 bits end where a double has no more. */
static inline int64_t flag_most(const flag_row *row)
{
    return row->most >= (double)INT64_MAX ? INT64_MAX : (int64_t)row->most;
}

#endif
