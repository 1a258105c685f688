/* cases.h -- tests whose cases are data: files of JSON */
#ifndef TESTS_CASES_H
#define TESTS_CASES_H

#include "examples/train/files/json_load.h"
#include "examples/train/files/whole_file.h"

#include "test.h"

/* An object of a file, whose members are in the file's order; the caller gives it back. NULL: a check has failed. */
static json_t *cases_load(const char *path)
{
    char why[JSON_LOAD_WHY];
    upipe_err err = {{0}, UPIPE_OK};
    json_t *root = NULL;
    size_t bytes = 0;
    char *text = llama_file(path, (size_t)1 << 20, &bytes, &err);
    if (CHECK_SAY(text != NULL, "%s", err.text)) {
        root = json_load(text, bytes, why);
        CHECK_SAY(json_is_object(root), "%s: %s", path, why);
    }
    free(text);
    return root;
}

#endif
