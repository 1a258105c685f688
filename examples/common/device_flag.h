/* device_flag.h -- the flag --device, and what a device has space for */
#ifndef COMMON_DEVICE_FLAG_H
#define COMMON_DEVICE_FLAG_H

#include "cli.h"
#include "device.h"

/* The value of a flag --device, of which only sizes are asked. */
static inline int device_flag_planned(const char *flag, const char *text, int *kind)
{
    for (*kind = 0; *kind < DEVICES && strcmp(text, device_names[*kind]) != 0;) ++*kind;
    return *kind < DEVICES ? 0 : cli_refuse("--%s is cpu or cuda, not '%s'", flag, text);
}

/* Is the program built for that kind? */
static inline int device_flag_built(const char *flag, int kind)
{
    if (device_lacks(kind) == NULL) return 0;
    return cli_refuse("--%s %s: %s", flag, device_names[kind], device_lacks(kind));
}

/* The value of a flag --device. */
static inline int device_flag(const char *flag, const char *text, int *kind)
{
    const int status = device_flag_planned(flag, text, kind);
    return status != 0 ? status : device_flag_built(flag, *kind);
}

/* 0 if a device with memory of its own has so many bytes free; else -1, with the sentence printed. */
static inline int device_has_buf(int kind, double bytes)
{
#ifdef UPIPE_WITH_CUDA
    size_t left, total;
    upipe_err e;
    if (kind == DEVICE_CUDA &&
        upipe_cuda_check(&e, cudaMemGetInfo(&left, &total), "cudaMemGetInfo") != UPIPE_OK)
        return cli_fail("%s", e.text);
    if (kind == DEVICE_CUDA && bytes > (double)left)
        return cli_fail("out of memory: %.1f GiB of the device are free, and the run takes %.1f GiB",
                        (double)left / (1 << 30), bytes / (1 << 30));
#endif
    (void)kind;
    (void)bytes;
    return 0;
}

#endif
