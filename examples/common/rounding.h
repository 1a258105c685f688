/* rounding.h -- how far apart results may be that differ in rounding alone
 *
 *     rounding_block(&plan.desc)            the relative L2 error of a block's results
 *
 * docs/numerics.md says where sums are cut; here are the numbers that follow.
 */
#ifndef COMMON_ROUNDING_H
#define COMMON_ROUNDING_H

#include <math.h>

#include "upipe/upipe_plan.h"

/* Terms of the largest part of a product's sums, over the kernels' instructions. */
enum { ROUNDING_PART_MOST = 640 };

static const double rounding_unit = 0x1p-24; /* half the distance of f32's neighbours from 1 */

/* The relative L2 error that a sound result stays below: each element is the end of a few sums (projection, scores,
 * attention, projection) in parts, which are added again. Roundings walk at random over the longest of these chains,
 * and over as many roundings to the storage type, 2^-9 each in bf16, that attention's backward may amplify. */
static inline double rounding_block(const upipe_plan_desc *d)
{
    const double storage = d->dtype == UPIPE_BF16 ? 0x1p-9 : 0;
    double longest = (double)d->batch * (double)d->tokens + (double)d->model_dim;
    longest += (double)(d->heads + (int64_t)d->kv_heads) * d->head_dim + (double)d->kv_heads * d->v_dim;
    if (longest > ROUNDING_PART_MOST) longest = ROUNDING_PART_MOST + longest / ROUNDING_PART_MOST;
    return 4 * rounding_unit * sqrt(longest) + 8 * storage;
}

#endif
