/* random.h -- numbers from a seed: splitmix64, and Box-Muller on top of it */
#ifndef COMMON_RANDOM_H
#define COMMON_RANDOM_H

#include <math.h>
#include <stdint.h>

typedef struct random_state {
    uint64_t state;
    double spare;
    int has_spare;
} random_state;

static double random_uniform(random_state *r) /* above 0, at most 1 */
{
    uint64_t z = (r->state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return ((double)(z >> 11) + 1) * 0x1p-53;
}

static double random_normal(random_state *r)
{
    double radius, angle;
    r->has_spare = !r->has_spare;
    if (!r->has_spare) return r->spare;
    radius = sqrt(-2 * log(random_uniform(r)));
    angle = 6.283185307179586 * random_uniform(r);
    r->spare = radius * sin(angle);
    return radius * cos(angle);
}

#endif
