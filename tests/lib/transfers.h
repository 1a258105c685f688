/* transfers.h -- what the tests of all transports share: exact data, transfers in random lists, descriptions
 *
 * Every word names where it comes from and where it must land, so that a misrouted one shows.
 *
 *     lists t = {.seed = s, .rank = r, .ranks = n, .most = 3, .longest = 1000};      words_in_lists(&t): of each buffer
 *     lists_begin(&t);
 *     n = lists_next(&t, msg, send, send, recv);           the messages of a transfer, with the data to be sent
 *     ... start, wait ...
 *     lists_check(&t, recv);                               what has come, and that the gaps are as they were
 */
#ifndef UPIPE_TEST_TRANSFERS_H
#define UPIPE_TEST_TRANSFERS_H

#include "upipe/upipe_comm.h"

#include "test.h"

static inline uint32_t word_of(int source, int dest, int index)
{
    return (uint32_t)source << 24 | (uint32_t)dest << 16 | (uint32_t)index;
}

/* A table's copy and sync in plain memory. */
__attribute__((unused)) static upipe_status plain_copy(upipe_ctx *c, void *dst, const void *src, size_t bytes)
{
    (void)c;
    memcpy(dst, src, bytes);
    return UPIPE_OK;
}

__attribute__((unused)) static upipe_status plain_sync(upipe_ctx *c)
{
    (void)c;
    return UPIPE_OK;
}

/* ---- descriptions for upi_agree ---- */

/* Of one number. */
static inline upi_fields fields_of(const char *name, int64_t value)
{
    upi_fields f;
    f.n = 0;
    upi_field_int(&f, name, value);
    return f;
}

/* tokens 4096, heads, and one more number. */
static inline upi_fields fields_of_block(int64_t heads, const char *name, int64_t value)
{
    upi_fields f = fields_of("tokens", 4096);
    upi_field_int(&f, "heads", heads);
    upi_field_int(&f, name, value);
    return f;
}

/* The same, in which tokens are a real number. */
static inline upi_fields fields_of_real(double tokens, int64_t heads, const char *name, int64_t value)
{
    upi_fields f;
    f.n = 0;
    upi_field_real(&f, "tokens", tokens);
    upi_field_int(&f, "heads", heads);
    upi_field_int(&f, name, value);
    return f;
}

/* ---- a shift round a ring, in which every rank takes part ---- */

/* shift_start -- begins it: dst of rank r = src of rank (r - distance) mod ranks
 *   src, dst  `bytes` bytes each
 *   distance  any integer; a multiple of the ranks copies locally
 *   order, errors  as upipe_comm_start
 */
static inline upipe_status shift_start(upipe_ctx *c, upipe_comm *comm, void *dst, const void *src,
                                       size_t bytes, int distance)
{
    int ranks, rank;
    UPIPE_TRY(upipe_comm_idle(c, comm));
    ranks = comm->ranks, rank = comm->rank;
    comm->list[0] = (upipe_msg){.count = 1, .send = src, .send_bytes = bytes};
    comm->list[0].peer = ((rank + distance) % ranks + ranks) % ranks;
    comm->list[1] = (upipe_msg){.count = 1, .recv = dst, .recv_bytes = bytes};
    comm->list[1].peer = ((rank - distance) % ranks + ranks) % ranks;
    return upipe_comm_start(c, comm, comm->list, 2);
}

/* ---- numbers from every rank ---- */

/* Gathers some, none, or as many as there may be. */
static inline upipe_status gather_some(upipe_ctx *c, int round)
{
    int64_t mine[UPIPE_ALL_GATHER_MAX], *all = c->team->gathered;
    const int n = round == 3 ? 0 : round == 5 ? UPIPE_ALL_GATHER_MAX : 1 + round % 4;
    for (int i = 0; i < n; ++i) mine[i] = (int64_t)word_of(c->team->rank, round, i) * -3;
    UPIPE_TRY(upipe_comm_all_gather(c, c->team, all, mine, n));
    for (int r = 0; r < c->team->ranks; ++r)
        for (int i = 0; i < n; ++i) CHECK_INT(all[r * n + i], (int64_t)word_of(r, round, i) * -3);
    return UPIPE_OK;
}

/* Nobody leaves a barrier before the last one has come; on one machine with one clock. */
static inline upipe_status barrier_holds(upipe_ctx *c)
{
    int64_t *all = c->team->gathered, entered = upipe_net_now(), left;
    UPIPE_TRY(upipe_comm_barrier(c, c->team));
    left = upipe_net_now();
    UPIPE_TRY(upipe_comm_all_gather(c, c->team, all, &entered, 1));
    for (int r = 0; r < c->team->ranks; ++r) CHECK(all[r] <= left);
    return UPIPE_OK;
}

/* ---- an all-to-all of `count` blocks of `words` words a pair, the rank itself included ---- */

/* Its messages; returns their number. */
static inline int all_messages(upipe_msg *list, int ranks, uint32_t *send, uint32_t *recv, int count,
                               int words)
{
    for (int p = 0; p < ranks; ++p) {
        upipe_msg *s = &list[p];
        *s = (upipe_msg){.peer = p, .count = count};
        s->send = send + p * count * words;
        s->recv = recv + p * count * words;
        s->send_bytes = s->recv_bytes = (size_t)words * 4;
        if (count > 1) s->send_stride = s->recv_stride = s->send_bytes;
    }
    return ranks;
}

/* n words to each rank, and the check of n words from each. */
static inline void all_fill(uint32_t *send, int rank, int ranks, int n)
{
    for (int p = 0; p < ranks; ++p)
        for (int i = 0; i < n; ++i) send[p * n + i] = word_of(rank, p, i);
}

static inline void all_check(const uint32_t *recv, int rank, int ranks, int n)
{
    int wrong = 0;
    for (int p = 0; p < ranks; ++p)
        for (int i = 0; i < n; ++i) wrong += recv[p * n + i] != word_of(p, rank, i);
    CHECK_INT(wrong, 0);
}

/* ---- random lists: some messages from every rank to every rank, blocks with gaps, in any order ---- */

typedef struct lists {
    uint64_t seed;
    int rank, ranks, most; /* messages of a pair */
    int longest;           /* words of a block */
    /* the rest is lists_begin's */
    test_rng rng;
    int round, first;
    size_t sent_words; /* of the send buffer, in the last transfer */
    int64_t sent, moved;
} lists;

/* Part `index` of what `source` sends to `dest`: the same on both sides. In words. */
typedef struct list_part {
    int64_t count;
    int words, send_stride, recv_stride;
} list_part;

static inline list_part part_of(const lists *t, int source, int dest, int index)
{
    test_rng rng;
    list_part p;
    rng.state =
        t->seed ^ (uint64_t)t->round << 40 ^ (uint64_t)source << 24 ^ (uint64_t)dest << 8 ^ (uint64_t)index;
    test_u64(&rng);
    p.count = 1 + test_below(&rng, 4);
    p.words = 1 + test_below(&rng, test_below(&rng, 16) == 0 ? t->longest : 24);
    p.send_stride = p.words + test_below(&rng, 3);
    p.recv_stride = p.words + test_below(&rng, 3);
    return p;
}

static inline int parts_of(const lists *t, int source, int dest)
{
    const int n = part_of(t, source, dest, 99).words;
    return n % 9 == 0 ? t->most : n % 4;
}

/* A message's place in a buffer: 4 blocks with gaps. */
static inline size_t part_place(const lists *t)
{
    return 4 * ((size_t)t->longest + 2);
}

static inline size_t words_in_lists(const lists *t)
{
    return (size_t)(t->ranks * (t->most > 3 ? t->most : 3)) * part_place(t);
}

static inline uint32_t part_word(const lists *t, int source, int dest, int index, int at)
{
    return word_of(source << 4 | dest, (t->round & 15) << 4 | index, at);
}

static inline void lists_begin(lists *t)
{
    t->rng.state = t->seed + (uint64_t)t->rank * 1000003;
    t->round = -1;
}

/* Data go to `fill`; messages say `send` and `recv`, which may be a device's. recv is full of 0xee before. */
static inline int lists_next(lists *t, upipe_msg *list, uint32_t *fill, const uint32_t *send, uint32_t *recv)
{
    const int sends_first = test_below(&t->rng, 2);
    size_t send_at = 0, recv_at = 0;
    int n = 0;
    ++t->round;
    t->first = test_below(&t->rng, t->ranks);
    for (int p = 0; p < 2 * t->ranks; ++p) {
        const int peer = (t->first + p / 2) % t->ranks, sending = p % 2 == sends_first;
        const int from = sending ? t->rank : peer, to = sending ? peer : t->rank;
        for (int i = 0; i < parts_of(t, from, to); ++i) {
            const list_part q = part_of(t, from, to, i);
            upipe_msg *msg = &list[n++];
            *msg = (upipe_msg){.peer = peer, .count = q.count};
            if (sending) {
                msg->send = send + send_at;
                msg->send_bytes = (size_t)q.words * 4;
                msg->send_stride = (size_t)q.send_stride * 4;
                for (int b = 0; b < q.count; ++b)
                    for (int w = 0; w < q.words; ++w)
                        fill[send_at + (size_t)(b * q.send_stride + w)] =
                            part_word(t, from, to, i, b * q.words + w);
                send_at += part_place(t);
                if (peer != t->rank) t->sent += q.count * q.words * 4;
            } else {
                msg->recv = recv + recv_at;
                msg->recv_bytes = (size_t)q.words * 4;
                msg->recv_stride = (size_t)q.recv_stride * 4;
                recv_at += part_place(t);
                if (peer != t->rank) t->moved += q.count * q.words * 4;
            }
        }
    }
    t->sent_words = send_at;
    return n;
}

static inline void lists_check(const lists *t, const uint32_t *recv)
{
    for (int p = 0; p < t->ranks; ++p) {
        const int peer = (t->first + p) % t->ranks;
        for (int i = 0; i < parts_of(t, peer, t->rank); ++i, recv += part_place(t)) {
            const list_part q = part_of(t, peer, t->rank, i);
            int wrong = 0;
            for (int b = 0; b < q.count; ++b)
                for (int w = 0; w < q.recv_stride; ++w)
                    wrong += recv[b * q.recv_stride + w] !=
                             (w < q.words ? part_word(t, peer, t->rank, i, b * q.words + w) : 0xeeeeeeeeu);
            CHECK_SAY(wrong == 0, "seed %llu, %d ranks, transfer %d, part %d of %d to %d: %d words differ",
                      (unsigned long long)t->seed, t->ranks, t->round, i, peer, t->rank, wrong);
        }
    }
}

/* ---- a team that has failed ---- */

/* Every call fails at once, with the first reason: NULL is what the first of them says. */
static inline void check_dead_calls(upipe_ctx *c, const char *reason)
{
    const upi_fields fields = fields_of("never compared", 99);
    int64_t one = 1, all[64];
    upipe_msg none = {0};
    char first[256];
    c->team->deadline = 60;
    CHECK_STATUS(upipe_comm_barrier(c, c->team), UPIPE_ERR_ABORTED, c->err);
    if (reason != NULL) CHECK(strcmp(c->err.text, reason) == 0);
    snprintf(first, sizeof first, "%s", c->err.text);
    CHECK_STATUS(upipe_comm_start(c, c->team, &none, 0), UPIPE_ERR_ABORTED, c->err);
    CHECK(strcmp(c->err.text, first) == 0);
    CHECK_STATUS(upipe_comm_all_gather(c, c->team, all, &one, 1), UPIPE_ERR_ABORTED, c->err);
    CHECK_STATUS(upi_agree(c, c->team, &fields), UPIPE_ERR_ABORTED, c->err);
    CHECK(strcmp(c->err.text, first) == 0);
    CHECK(!c->team->started);
}

#endif
