/* device_flag.h -- the flag --device, and what a device has room for */
#ifndef COMMON_DEVICE_FLAG_H
#define COMMON_DEVICE_FLAG_H

#include "cli.h"
#include "device.h"

/* The value of a flag --device. */
static inline int device_flag(const char *flag, const char *text, int *kind)
{
    for (*kind = 0; *kind < DEVICES && strcmp(text, device_names[*kind]) != 0;) ++*kind;
    if (*kind == DEVICES) return cli_refuse("--%s is cpu or cuda, not '%s'", flag, text);
    if (device_lacks(*kind) == NULL) return 0;
    return cli_refuse("--%s %s: %s", flag, text, device_lacks(*kind));
}

/* Bytes that slabs may take in all. */
static inline double device_memory(int kind)
{
#ifdef UPIPE_WITH_CUDA
    size_t left, total;
    if (kind == DEVICE_CUDA) return cudaMemGetInfo(&left, &total) == cudaSuccess ? (double)left : 0;
#endif
    (void)kind;
    return cli_memory();
}

#endif
