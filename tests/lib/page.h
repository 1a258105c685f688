/* page.h -- a page of the documentation that a test prints from a table: the file must be that, to the byte */
#ifndef TESTS_PAGE_H
#define TESTS_PAGE_H

#include "test.h"

static void page_check(const char *path, void (*print)(FILE *f))
{
    char *page = NULL, *want;
    size_t n = 0, got;
    FILE *f = open_memstream(&page, &n), *file = fopen(path, "rb");
    CHECK(f != NULL && file != NULL);
    if (f == NULL || file == NULL) return;
    print(f);
    fclose(f);
    want = (char *)calloc(n + 2, 1);
    got = fread(want, 1, n + 1, file);
    fclose(file);
    CHECK_INT((long long)got, (long long)n); /* print it again: the test without arguments does */
    CHECK(strcmp(page, want) == 0);
    free(want);
    free(page);
}

#endif
