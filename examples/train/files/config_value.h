/* config_value.h -- one value of a config.json: read, or refused with a sentence that has its key
 *
 *     int64_t n;
 *     if (llama_config_count(&n, root, "vocab_size", "vocab", 0, path, err)) ...      0, or -1 with *err filled
 *
 * A number may be what its flag may say.
 */
#ifndef LLAMA_CONFIG_VALUE_H
#define LLAMA_CONFIG_VALUE_H

#include "../model/config.h"
#include "json_load.h"
#include "whole_file.h"

/* A whole number that the flag may say, from 1 on unless it may be 0; absent is `otherwise`, or refused if that is
 * 0. */
static inline int llama_config_count(int64_t *out, const json_t *root, const char *key, const char *flag,
                                     int64_t otherwise, const char *path, upipe_err *err)
{
    const json_t *j = json_object_get(root, key);
    const flag_row *l = flag_limits(flag);
    const int64_t most = flag_most(l), least = l->least < 0 ? (int64_t)l->least : 1;
    if (j == NULL) {
        if (otherwise == 0) return llama_config_fail(err, path, "%s is missing", key);
        *out = otherwise;
        return 0;
    }
    if (!json_is_integer(j)) return llama_config_fail(err, path, "%s is not an integer", key);
    *out = json_integer_value(j);
    if (*out < least || *out > most)
        return llama_config_fail(err, path, "%s is %" PRId64 ", not in %" PRId64 " .. %" PRId64, key, *out,
                                 least, most);
    return 0;
}

static inline int llama_config_number(double *out, const json_t *j, const char *key, const char *flag,
                                      const char *path, upipe_err *err)
{
    const flag_row *l = flag_limits(flag);
    if (!json_is_number(j)) return llama_config_fail(err, path, "%s is not a number", key);
    *out = json_number_value(j);
    if (!(*out >= l->least && *out <= l->most))
        return llama_config_fail(err, path, "%s is %g, not in %g .. %g", key, *out, l->least, l->most);
    return 0;
}

/* A number that the flag may say; absent leaves *out as it is. */
static inline int llama_config_real(double *out, const json_t *root, const char *key, const char *flag,
                                    const char *path, upipe_err *err)
{
    const json_t *j = json_object_get(root, key);
    return j == NULL ? 0 : llama_config_number(out, j, key, flag, path, err);
}

/* true or false; absent leaves *out as it is. */
static inline int llama_config_flag(int *out, const json_t *root, const char *key, const char *path,
                                    upipe_err *err)
{
    const json_t *j = json_object_get(root, key);
    if (j == NULL) return 0;
    if (!json_is_boolean(j)) return llama_config_fail(err, path, "%s is neither true nor false", key);
    *out = json_is_true(j);
    return 0;
}

/* What must not be there, or have no effect: a flag that is set, a number other than `neutral`. */
static inline int llama_config_neutral(const json_t *root, const char *key, double neutral, const char *path,
                                       upipe_err *err)
{
    const json_t *j = json_object_get(root, key);
    if (j == NULL || json_is_false(j)) return 0;
    if (json_is_number(j) && json_number_value(j) == neutral) return 0;
    if (json_is_number(j))
        return llama_config_fail(err, path, "%s is %g; only %g is built", key, json_number_value(j), neutral);
    return llama_config_fail(err, path, json_is_null(j) ? "%s is null" : "%s is set, and not built", key);
}

/* The same of a key whose null is none. */
static inline int llama_config_none(const json_t *root, const char *key, const char *path, upipe_err *err)
{
    return json_is_null(json_object_get(root, key)) ? 0 : llama_config_neutral(root, key, 0, path, err);
}

/* A list with an entry for each layer; absent or null: NULL. */
static inline int llama_config_list(const json_t **out, const llama_config *c, const json_t *root,
                                    const char *key, const char *path, upipe_err *err)
{
    const json_t *j = json_object_get(root, key);
    *out = NULL;
    if (j == NULL || json_is_null(j)) return 0;
    if (!json_is_array(j)) return llama_config_fail(err, path, "%s is not a list", key);
    if ((int64_t)json_array_size(j) != c->layers)
        return llama_config_fail(err, path, "%s has %zu entries, not one for each of %" PRId64 " layers", key,
                                 json_array_size(j), c->layers);
    *out = j;
    return 0;
}

#endif
