/* lost.h -- a world of 2 x 2 ranks loses one: the others wait for each other and for it, and all say which it is
 *
 *     lost_rank k = {.world = ..., .team = ..., .ring = ..., .side = ..., .rank = r, .victim = v};
 *     lost_parts(&k);                              unless they are parts of the world already
 *     lost_run(&k);                                every rank; ranks 2 t and 2 t + 1 are a team
 *
 * The victim's mate waits for it in their team; who is across from the mate waits for the mate, in their ring or in the side
 * communicator of all; the last one for that one, in their team, and its deadline is over first.
 */
#ifndef UPIPE_TEST_LOST_H
#define UPIPE_TEST_LOST_H

#include "test.h"

#include "upipe/upipe_comm.h"

typedef struct lost_rank {
    upipe_comm *world, *team, *ring, *side; /* this rank's */
    const upipe_ops *ops;
    int rank, victim;
    int in_side;
} lost_rank;

/* As the host does where nobody has yet. */
__attribute__((unused)) static void lost_parts(const lost_rank *k)
{
    upipe_comm_part(k->team, k->world, k->rank / 2 * 2, 1);
    upipe_comm_part(k->ring, k->world, k->rank % 2, 2);
    upipe_comm_part(k->side, k->world, 0, 1);
}

/* All parts work, and say who is who. */
static void lost_nobody(const lost_rank *k)
{
    upipe_comm *const all[] = {k->world, k->team, k->ring, k->side};
    upipe_ctx c = {.ops = k->ops};
    for (int i = 0; i < 4; ++i) {
        CHECK_INT(upi_comm_called(all[i], all[i]->rank), k->rank);
        all[i]->deadline = 20;
        CHECK_STATUS(upipe_comm_barrier(&c, all[i]), UPIPE_OK, c.err);
    }
}

static void lost_run(const lost_rank *k)
{
    const int mate = k->victim ^ 1, across = mate ^ 2;
    upipe_comm *const comm = k->rank == across ? k->in_side ? k->side : k->ring : k->team;
    upipe_ctx c = {.ops = k->ops};
    char name[48], text[sizeof c.err.text];
    upipe_status s;
    lost_nobody(k);
    snprintf(name, sizeof name, " for rank %d to come", k->victim);
    if (k->rank == k->victim) {
        test_nap(0.9);
    } else {
        comm->deadline = k->rank == mate ? 0.6 : k->rank == across ? 0.5 : 0.4;
        s = upipe_comm_barrier(&c, comm);
        CHECK(s == UPIPE_ERR_TIMEOUT || s == UPIPE_ERR_ABORTED);
        CHECK_TEXT(c.err.text, name);
        memcpy(text, c.err.text, sizeof text);
        CHECK_REFUSED(upipe_comm_barrier(&c, k->side), UPIPE_ERR_ABORTED, c.err,
                      text); /* all parts have failed */
    }
    /* nobody comes to the world's barrier, so that it ends by the failure; to the team's the victim's mate has come */
    CHECK_REFUSED(upipe_comm_barrier(&c, k->world), UPIPE_ERR_ABORTED, c.err, name);
    CHECK_REFUSED(upipe_comm_barrier(&c, k->team), UPIPE_ERR_ABORTED, c.err, name);
    comm->deadline = 20; /* for the end */
}

#endif
