/* fake_pool.h -- include it before the library: pools over the fake's device memory poison it by fake_poison */
#ifndef FAKE_POOL_H
#define FAKE_POOL_H

#include "fake.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#undef __asan_poison_memory_region
#define __asan_poison_memory_region(p, bytes) fake_poison((p), (bytes))
#endif

#endif
