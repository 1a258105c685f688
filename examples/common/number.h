/* number.h -- numbers as people write them, for the flags and files of all programs
 *
 *     number_whole("1e6", &n)           1000000: decimal
 *     number_whole("128k", &n)          131072: k and M are 2^10 and 2^20, as in the paper
 *     number_bytes("80GiB", &bytes)     a size of memory has a unit; GB is 10^9, GiB 2^30
 *     number_real("1e-3", &x)
 *
 * Each returns 0, or -1 for what is no such number, is no whole one where it is to be, leaves 63 bits, or is infinite.
 * No sign, no spaces, no hexadecimals.
 */
#ifndef COMMON_NUMBER_H
#define COMMON_NUMBER_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* value * factor, or -1 */
static inline int number_times(int64_t *value, int64_t factor)
{
    if (*value > INT64_MAX / factor) return -1;
    *value *= factor;
    return 0;
}

/* Digits, a point, an exponent: *mantissa * 10^*exponent. Returns what follows, NULL where no number is. */
static inline const char *number_decimal(const char *text, int64_t *mantissa, int *exponent)
{
    int digits = 0, more = 0, point = 0;
    *mantissa = 0;
    *exponent = 0;
    if (*text < '0' || *text > '9') return NULL;
    for (; (*text >= '0' && *text <= '9') || (*text == '.' && !point); ++text) {
        if (*text == '.') {
            point = 1;
            continue;
        }
        if (number_times(mantissa, 10) != 0 || *mantissa > INT64_MAX - (*text - '0')) return NULL;
        *mantissa += *text - '0';
        *exponent -= point;
        ++digits;
    }
    if (digits == 0 || text[-1] == '.') return NULL;
    if (*text != 'e' && *text != 'E') return text;
    for (digits = 0, ++text; *text >= '0' && *text <= '9' && digits < 3; ++text, ++digits)
        more = more * 10 + (*text - '0');
    *exponent += more;
    return digits > 0 ? text : NULL;
}

/* mantissa * 10^exponent * factor, which must be whole. */
static inline int number_scale(int64_t mantissa, int exponent, int64_t factor, int64_t *out)
{
    *out = mantissa;
    for (; exponent > 0 && mantissa > 0; --exponent)
        if (number_times(out, 10) != 0) return -1;
    for (; exponent < 0 && *out % 10 == 0 && *out > 0; ++exponent) *out /= 10;
    if (number_times(out, factor) != 0) return -1;
    for (; exponent < 0 && *out > 0; ++exponent) {
        if (*out % 10 != 0) return -1;
        *out /= 10;
    }
    return 0;
}

/* number_whole -- a whole number, which may end in k or M */
static inline int number_whole(const char *text, int64_t *out)
{
    int64_t mantissa, factor = 1;
    int exponent;
    const char *end = number_decimal(text, &mantissa, &exponent);
    if (end == NULL) return -1;
    if (*end == 'k' || *end == 'K' || *end == 'M') factor = *end++ == 'M' ? 1 << 20 : 1 << 10;
    return *end == '\0' ? number_scale(mantissa, exponent, factor, out) : -1;
}

/* number_bytes -- a size of memory, with its unit; bytes */
static inline int number_bytes(const char *text, int64_t *out)
{
    static const struct {
        const char *unit;
        int64_t bytes;
    } units[] = {{"B", 1},
                 {"kB", 1000},
                 {"MB", 1000000},
                 {"GB", 1000000000},
                 {"TB", INT64_C(1000000000000)},
                 {"KiB", INT64_C(1) << 10},
                 {"MiB", INT64_C(1) << 20},
                 {"GiB", INT64_C(1) << 30},
                 {"TiB", INT64_C(1) << 40}};
    int64_t mantissa;
    int exponent;
    size_t i;
    const char *end = number_decimal(text, &mantissa, &exponent);
    if (end != NULL && *end == ' ') ++end;
    for (i = 0; end != NULL && i < sizeof units / sizeof *units; ++i) {
        if (strcmp(end, units[i].unit) != 0) continue;
        /* a part of a byte is none */
        while (exponent < 0 && mantissa > INT64_MAX / units[i].bytes) mantissa /= 10, ++exponent;
        if (exponent >= 0) return number_scale(mantissa, exponent, units[i].bytes, out);
        for (*out = mantissa * units[i].bytes; exponent < 0; ++exponent) *out /= 10;
        return 0;
    }
    return -1;
}

/* number_real -- a number like 0.001 or 1e-3 */
static inline int number_real(const char *text, double *out)
{
    char *end = NULL;
    if (text[0] == '\0' || text[strspn(text, "0123456789.eE+-")] != '\0' || text[0] == '-' || text[0] == '+')
        return -1;
    *out = strtod(text, &end);
    return *end == '\0' && isfinite(*out) ? 0 : -1;
}

#endif
