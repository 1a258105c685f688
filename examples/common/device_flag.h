/* device_flag.h -- is a program built for the device of --device, and what has that space for? */
#ifndef COMMON_DEVICE_FLAG_H
#define COMMON_DEVICE_FLAG_H

#include "cli.h"
#include "device.h"

/* Is the program built for that kind? */
static inline int device_flag_built(const char *flag, int kind)
{
    if (device_lacks(kind) == NULL) return 0;
    return cli_refuse("--%s %s: %s", flag, device_names[kind], device_lacks(kind));
}

/* 0 if a device with memory of its own has so many bytes free; else -1, with the sentence printed. */
static inline int device_has_buf(int kind, double bytes)
{
    size_t left;
    upipe_err e;
    if (device_left(kind, &left, &e) != UPIPE_OK) return cli_fail("%s", e.text);
    if (kind == DEVICE_CUDA && bytes > (double)left)
        return cli_fail("out of memory: %.1f GiB of the device are free, and the run takes %.1f GiB",
                        (double)left / (1 << 30), bytes / (1 << 30));
    return 0;
}

#endif
