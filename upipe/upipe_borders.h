/* upipe_borders.h -- borders of packed documents        layer 1, includes upipe_base.h
 *
 * cu_seqlens has cu_seqlens_n + 1 ascending positions, in host memory: document i is [cu_seqlens[i], cu_seqlens[i + 1]),
 * which may be empty. A position before the first border, or from the last one on, lies in no document: a token there
 * sees nothing in attention, and linear attention takes none. NULL: there are no borders.
 */
#ifndef UPIPE_BORDERS_H
#define UPIPE_BORDERS_H

#include "upipe_base.h"

typedef struct upipe_borders {
    const int64_t *cu_seqlens;
    int64_t cu_seqlens_n;
} upipe_borders;

/* upipe_borders_check -- ARG unless the borders ascend and their number fits */
UPIPE_API upipe_status upipe_borders_check(upipe_err *e, const upipe_borders *b)
{
    const int64_t limit = INT64_C(1) << 60;
    int64_t i;
    if (b->cu_seqlens_n < 0 || (b->cu_seqlens == NULL) != (b->cu_seqlens_n == 0))
        return upipe_fail(e, UPIPE_ERR_ARG, "%lld packed documents, cu_seqlens is %sNULL",
                          (long long)b->cu_seqlens_n, b->cu_seqlens != NULL ? "not " : "");
    for (i = 0; i < b->cu_seqlens_n; ++i)
        if (b->cu_seqlens[i] > b->cu_seqlens[i + 1] || b->cu_seqlens[i] < -limit ||
            b->cu_seqlens[i + 1] > limit)
            return upipe_fail(e, UPIPE_ERR_ARG, "packed document %lld is [%lld, %lld)", (long long)i,
                              (long long)b->cu_seqlens[i], (long long)b->cu_seqlens[i + 1]);
    return UPIPE_OK;
}

/* upipe_borders_until -- how many borders lie at or before a position */
UPIPE_API int64_t upipe_borders_until(const upipe_borders *b, int64_t pos)
{
    int64_t low = 0, high = b->cu_seqlens != NULL ? b->cu_seqlens_n + 1 : 0;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (b->cu_seqlens[middle] <= pos)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* upipe_borders_hash -- as ranks and passes compare them */
UPIPE_API uint64_t upipe_borders_hash(const upipe_borders *b)
{
    const size_t n = b->cu_seqlens != NULL ? (size_t)(b->cu_seqlens_n + 1) : 0;
    return upipe_hash_bytes(UPIPE_HASH, b->cu_seqlens, n * sizeof *b->cu_seqlens);
}

/* upipe_border_before -- the last border at or before a position; INT64_MIN: there is none */
UPIPE_API int64_t upipe_border_before(const upipe_borders *b, int64_t pos)
{
    const int64_t n = upipe_borders_until(b, pos);
    return n > 0 ? b->cu_seqlens[n - 1] : INT64_MIN;
}

/* upipe_border_behind -- the first border behind a position; INT64_MAX: there is none */
UPIPE_API int64_t upipe_border_behind(const upipe_borders *b, int64_t pos)
{
    const int64_t n = upipe_borders_until(b, pos);
    return b->cu_seqlens != NULL && n <= b->cu_seqlens_n ? b->cu_seqlens[n] : INT64_MAX;
}

/* upipe_borders_at -- the packed document where a position lies, [*begin, *end). Returns 0 where there is none: then *begin
 *                     is INT64_MIN before the first border, and *end INT64_MAX behind the last one */
UPIPE_API int upipe_borders_at(const upipe_borders *b, int64_t pos, int64_t *begin, int64_t *end)
{
    const int64_t n = upipe_borders_until(b, pos);
    *begin = n > 0 ? b->cu_seqlens[n - 1] : INT64_MIN;
    *end = n <= b->cu_seqlens_n ? b->cu_seqlens[n] : INT64_MAX;
    return n > 0 && n <= b->cu_seqlens_n;
}

/* upipe_borders_cover -- ARG unless each of the positions [first, end) lies in a document, or there are no borders */
UPIPE_API upipe_status upipe_borders_cover(upipe_err *e, const upipe_borders *b, int64_t first, int64_t end)
{
    if (b->cu_seqlens == NULL || first >= end ||
        (b->cu_seqlens[0] <= first && end <= b->cu_seqlens[b->cu_seqlens_n]))
        return UPIPE_OK;
    return upipe_fail(e, UPIPE_ERR_ARG,
                      "packed documents, [%lld, %lld) in all, do not cover the tokens [%lld, %lld)",
                      (long long)b->cu_seqlens[0], (long long)b->cu_seqlens[b->cu_seqlens_n],
                      (long long)first, (long long)end);
}

#endif
