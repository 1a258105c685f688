/* json_load.h -- JSON read by jansson, which is not to see a failing allocation
 *
 *     char why[JSON_LOAD_WHY];
 *     json_t *root = json_load(text, bytes, why);           NULL: why is a sentence; errno is ENOMEM: memory was out
 *
 * Out of memory, jansson 2.14 drops members of objects without an error, reads what it has freed, or frees it twice. So
 * its allocator does not return then: it leaves the parser. What the parser held stays allocated; the caller is about
 * to end. jansson is for reading alone: what is written here is written without it. Reading a finished tree allocates
 * nothing.
 */
#ifndef LLAMA_JSON_LOAD_H
#define LLAMA_JSON_LOAD_H

#include <errno.h>
#include <jansson.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

enum { JSON_LOAD_WHY = 160 };

/* Where this thread's parser is left to; NULL outside of json_load. */
static __thread jmp_buf *json_load_leave;

static void *json_load_malloc(size_t bytes)
{
    void *p = malloc(bytes);
    if (p == NULL && json_load_leave != NULL) longjmp(*json_load_leave, 1);
    return p;
}

static void json_load_init(void)
{
    json_set_alloc_funcs(json_load_malloc, free);
}

/* A text of `bytes` bytes, in which no object has a key twice. */
__attribute__((unused)) static json_t *json_load(const char *text, size_t bytes, char why[JSON_LOAD_WHY])
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    json_error_t where;
    jmp_buf leave;
    json_t *root;
    pthread_once(&once, json_load_init);
    if (setjmp(leave) != 0) {
        json_load_leave = NULL;
        snprintf(why, JSON_LOAD_WHY, "no memory to read %zu bytes of JSON", bytes);
        errno = ENOMEM;
        return NULL;
    }
    json_load_leave = &leave;
    root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
    json_load_leave = NULL;
    if (root == NULL) snprintf(why, JSON_LOAD_WHY, "line %d is no JSON: %.120s", where.line, where.text);
    errno = root == NULL ? EINVAL : 0;
    return root;
}

#endif
