/* json.h -- strings as JSON has them
 *
 *     json_quote(f, "a path");                              "a path", quoted; NULL: null
 *
 * A path may hold any byte: one that is not UTF-8 is written as the character of that number.
 */
#ifndef COMMON_JSON_H
#define COMMON_JSON_H

#include <stdio.h>
#include <string.h>

/* Bytes of the UTF-8 sequence at s; 0 where none is. */
static inline int json_utf8(const unsigned char *s)
{
    int i, n = s[0] < 0x80 ? 1 : s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : s[0] < 0xf5 ? 4 : 0;
    for (i = 1; i < n; ++i)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90)) return 0; /* longer than need be */
    if ((s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf4 && s[1] > 0x8f)) return 0; /* no characters */
    return n;
}

/* The next character of *text, as it stands between quotes, into out with a 0 behind it; *text moves on. */
static inline void json_character(char out[8], const char **text)
{
    const unsigned char *s = (const unsigned char *)*text;
    int n = json_utf8(s);
    if (*s == '"' || *s == '\\')
        snprintf(out, 8, "\\%c", *s);
    else if (n == 0 || *s < 32)
        snprintf(out, 8, "\\u%04x", (unsigned)*s);
    else
        snprintf(out, 8, "%.*s", n, *text);
    *text += n > 0 ? n : 1;
}

static inline void json_quote(FILE *f, const char *text)
{
    char one[8];
    if (text == NULL) {
        fputs("null", f);
        return;
    }
    fputc('"', f);
    while (*text != '\0') {
        json_character(one, &text);
        fputs(one, f);
    }
    fputc('"', f);
}

#endif
