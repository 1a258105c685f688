/* step.h -- what the two units of the consumer share */
#ifndef STEP_H
#define STEP_H

#include "upipe/upipe.h"

/* Takes a buffer of the plan's unit from the context's pool, passes it round the team, gives it back. */
upipe_status step(upipe_ctx *ctx, const upipe_plan *plan);

#endif
