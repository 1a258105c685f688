/* page.h -- a page of the documentation that a test prints from a table: the file must be that, to the byte */
#ifndef TESTS_PAGE_H
#define TESTS_PAGE_H

#include "test.h"

/* `command` prints the page. */
static void page_check(const char *path, void (*print)(FILE *f), const char *command)
{
    char *page = NULL, *text;
    size_t bytes = 0, n, at = 0;
    int line = 1;
    FILE *printed = open_memstream(&page, &bytes), *file = fopen(path, "rb");
    CHECK(printed != NULL && file != NULL);
    if (printed == NULL || file == NULL) return;
    print(printed);
    fclose(printed);
    text = (char *)calloc(bytes + 2, 1);
    n = fread(text, 1, bytes + 1, file);
    fclose(file);
    while (at < bytes && text[at] == page[at]) line += page[at++] == '\n';
    while (at > 0 && page[at - 1] != '\n') --at;
    CHECK_SAY(n == bytes && memcmp(text, page, bytes) == 0,
              "%s:%d is not what \"%s\" prints: it is \"%.*s\", not \"%.*s\"", path, line, command,
              (int)strcspn(text + at, "\n"), text + at, (int)strcspn(page + at, "\n"), page + at);
    free(text);
    free(page);
}

#endif
