/* trace.h -- a pool's trace as Chrome trace events, for Perfetto or chrome://tracing
 *
 *     fprintf(f, "[\n");
 *     trace_write(mem.events, mem.events_n, f, 0, 1);        a rank's; others follow, with 0
 *     fprintf(f, "]\n");
 *
 * Each block is a span with its tag as name. A counter shows the live bytes. Phases are spans on a track of their own.
 * Times are those of the pool's clock, so pools of ranks that share a clock are aligned.
 */
#ifndef COMMON_TRACE_H
#define COMMON_TRACE_H

#include <stdio.h>

#include "upipe/upipe_mem.h"

/* One JSON object a line, with a comma before all but the first.
 *   pid     the rank
 *   first   nonzero for the first pool of the file */
static inline void trace_write(const upipe_mem_event *events, int64_t n, FILE *file, int pid, int first)
{
    int64_t i;
    int open = 0;
    char last[32] = "0";
    fprintf(file,
            "%s{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}}\n"
            ",{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":1,\"args\":{\"name\":\"phases\"}}\n",
            first ? "" : ",", pid, pid, pid);
    for (i = 0; i < n; ++i) {
        const upipe_mem_event *e = &events[i];
        const int64_t ns =
            (int64_t)(e->seconds * 1e9 + 0.5); /* from the clock's own zero, which the ranks share */
        /* the point of a real number is the locale's */
        snprintf(last, sizeof last, "%lld.%03d", (long long)(ns / 1000), (int)(ns % 1000));
        if (e->kind == 0) {
            if (open) fprintf(file, ",{\"ph\":\"E\",\"pid\":%d,\"tid\":1,\"ts\":%s}\n", pid, last);
            fprintf(file,
                    ",{\"ph\":\"B\",\"name\":\"%s\",\"cat\":\"phase\",\"pid\":%d,\"tid\":1,\"ts\":%s}\n",
                    e->tag, pid, last);
            open = 1;
            continue;
        }
        fprintf(file,
                ",{\"ph\":\"%s\",\"name\":\"%s\",\"cat\":\"block\",\"id\":\"%d.%lld\",\"pid\":%d,\"tid\":2,"
                "\"ts\":%s,\"args\":{\"bytes\":%zu,\"offset\":%zu}}\n",
                e->kind > 0 ? "b" : "e", e->tag, pid, (long long)e->serial, pid, last, e->bytes, e->offset);
        fprintf(file, ",{\"ph\":\"C\",\"name\":\"live\",\"pid\":%d,\"ts\":%s,\"args\":{\"bytes\":%zu}}\n",
                pid, last, e->live);
    }
    if (open) fprintf(file, ",{\"ph\":\"E\",\"pid\":%d,\"tid\":1,\"ts\":%s}\n", pid, last);
}

#endif
