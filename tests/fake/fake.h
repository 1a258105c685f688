/* fake.h -- controls of the fake CUDA: seeds, injected errors, counts; and the launch seam   tests
 *
 * The headers beside this one and fake*.cpp stand in for the CUDA runtime, cuBLAS and NCCL over host memory
 * and threads. What a program may not rely on does not happen:
 *
 *   streams  are lazy. An operation runs when something forces it (synchronize, a query that is repeated, a
 *            blocking copy, cudaFree), or when the seed lets it; with a seed some streams are hasty, too. A
 *            missing wait shows as wrong data.
 *   memory   is NaN when new (0xff), unreadable for the host at all times and for everybody once freed: a
 *            fault ends the process with a line that says what was touched.
 *   misuse   that the real library would leave undefined (an operand past the end of its allocation, a host
 *            pointer that the device cannot reach, a freed handle, a double free) is a finding: it ends the
 *            process with a report. So is a copy between devices: none has access to another's memory.
 *   NCCL     ranks are threads or processes, with a device each; sends meet receives in order; a rank that never comes is
 *            waited for.
 *
 * Environment: FAKE_SEED (0: nothing runs until it is forced), FAKE_EAGER=1 (everything runs at once),
 * FAKE_FAIL=k[s|k] (the k-th call of the process fails, 's': and all later ones, 'k': it kills the process), FAKE_HOST (the
 * machine's name), FAKE_CLEAN=1 (a process that leaves something ends with status 3), FAKE_PATIENCE (seconds that a
 * wait may see nothing move before it is a finding; 60), FAKE_CAPABILITY (of the devices: 80, 86 with less
 * shared memory, or 90 with more).
 */
#ifndef FAKE_H
#define FAKE_H

#include <stddef.h>
#include <stdint.h>

#include "cuda_runtime_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- order ---- */

/* As FAKE_SEED and FAKE_EAGER, for what is enqueued from now on. */
void fake_seed(uint64_t seed);
void fake_eager(int on);

/* For a pool over device memory, instead of AddressSanitizer's function: poisons only where everything runs
 * at once. Else work that is enqueued may still use what the host has given back. */
void fake_poison(const volatile void *p, size_t bytes);

/* ---- errors ---- */

enum { FAKE_ONCE = 0, FAKE_STICKY = 1 };

/* Every call of the three libraries that may fail counts, and so does every launch; what only reports does
 * not. A query that is repeated counts once. A call that is made to fail does nothing, but for those that
 * release: they release, and then fail. A thread counts for the rank that it has named itself, first -1. */
void fake_rank(int rank);
/* The k-th call from now on (1 is the next) of this rank, or of every thread (rank -1), fails. 0: none.
 * STICKY: and every later one of any thread, and what the streams still hold never runs, as after an error
 * that ends a CUDA context. */
void fake_fail_at(long k, int rank, int sticky);
/* Calls counted since the last fake_fail_at; rank as above. */
long fake_calls(int rank);
/* Name of the call that failed; NULL if none did. */
const char *fake_failed(void);

/* How often the host has waited for a device since the last call: by a call that returns when work is done, or by
 * asking again and again. Of the rank, by fake_rank; waits for what was done already do not count. */
long fake_waits(int rank);

/* ---- NCCL ---- */

/* Whether NCCL's operations of two communicators at the same time on one device are a finding; 0: no, the default. */
void fake_one_at_a_time(int on);
/* All-gathers of bytes, all ranks together, since the last call. */
long fake_gather_calls(void);

/* ---- residency ---- */

/* A device: how many multiprocessors it has, and what each has for blocks. */
typedef struct fake_processors {
    int count, registers, shared, threads, blocks;
} fake_processors;
/* From now on blocks of kernels, of cuBLAS's and NCCL's too, take their part of a multiprocessor and time on the device's
 * clock, and wait where there is no place. When several may start, the stream of the greater priority is first. A block
 * that runs is never put off. What needs no multiprocessor takes no time; events between which cudaEventElapsedTime is
 * asked say ticks. Before it, and before NULL, which ends it, no operation is enqueued. */
void fake_residency(const fake_processors *of);

/* ---- counts ---- */

size_t fake_device_live(void); /* bytes, all devices together, as asked for */
size_t fake_device_peak(void); /* the most since the last fake_peak_reset */
void fake_peak_reset(void);
size_t fake_pinned_live(void);
/* Bytes of a device; more than that is cudaErrorMemoryAllocation. 0: the default, 4 GiB. */
void fake_device_limit(size_t bytes);
long fake_live_handles(void); /* streams, events, cuBLAS handles and NCCL communicators */
/* 1 if nothing is live and no stream has work. Otherwise 0, and what there is on stderr. */
int fake_check_clean(void);

/* The machine's name: FAKE_HOST, or what it is. Programs are built with it in place of gethostname. */
int fake_gethostname(char *name, size_t bytes);

#ifdef __cplusplus
}

#include <functional>

/* What a kernel's blocks need of a multiprocessor; no blocks: nothing. */
struct fake_needs {
    int64_t blocks;
    int threads, registers;
    size_t shared;
    uint64_t ticks; /* that a block takes; 0: until its operation is done */
};

/* What a launch does: enqueues, and leaves its error to cudaGetLastError. Registers and ticks are those of
 * fake_kernels.h for this name and these columns. */
cudaError_t fake_enqueue(cudaStream_t stream, const char *name, std::function<void()> work,
                         fake_needs needs = fake_needs(), int columns = 0);
/* By work under way: its kernel has failed, and the context with it. As after a STICKY error. */
void fake_end_context(void);
#endif

#endif
