/* simt_warp.h -- what the lanes of a warp do together: shuffles, votes, matrices     part of simt.h
 *
 * The lanes of the mask meet at one line; the last to come does the work for all. A lane that comes to
 * another line, or with another mask, is a finding.
 */
#ifndef SIMT_WARP_H
#define SIMT_WARP_H

/* Works on what the lanes brought. */
typedef void (*simt_joint)(void **args, uint32_t mask);

SIMT_QUIET __attribute__((noinline)) inline void simt_meet(const char *what, uint32_t mask, void *arg,
                                                           simt_joint work, const char *file, int line)
{
    simt_block *b = simt_here;
    simt_fiber *me = simt_fiber_now;
    simt_meeting *m = NULL, *spare = NULL;
    unsigned i;
    simt_mark(file, line);
    if ((mask >> me->lane & 1) == 0)
        simt_finding("divergence: lane %u is not in the mask %08x of %s at %s:%d", me->lane, mask, what, file,
                     line);
    for (i = 0; i < 4 && m == NULL; ++i) {
        simt_meeting *at = &b->meeting[me->warp][i];
        if (at->mask & mask) m = at;
        if (at->mask == 0) spare = at;
    }
    if (m == NULL) {
        if (spare == NULL) simt_finding("divergence: a warp waits at more than 4 places");
        m = spare;
        m->mask = mask;
        m->arrived = 0;
        m->what = what;
        m->file = file;
        m->line = line;
    }
    if (m->mask != mask || m->what != what || m->line != line ||
        (m->file != file && strcmp(m->file, file) != 0))
        simt_finding("divergence: lane %u is at %s of mask %08x, %s:%d; others are at %s of mask %08x, %s:%d",
                     me->lane, what, mask, file, line, m->what, m->mask, m->file, m->line);
    m->args[me->lane] = arg;
    m->arrived |= 1u << me->lane;
    if (m->arrived != mask) {
        simt_wait(b, what);
        return;
    }
    b->place = __builtin_return_address(0);
    if (work != NULL) work(m->args, mask);
    m->mask = 0;
    for (i = 0; i < SIMT_WARP; ++i)
        if ((mask >> i & 1) && i != me->lane) simt_make_ready(b, me->warp * SIMT_WARP + i);
}

/* ---- shuffles and votes ---- */

struct simt_shuffle_arg {
    uint64_t value, result;
    unsigned from;
};

SIMT_QUIET inline void simt_shuffle_work(void **args, uint32_t mask)
{
    unsigned i;
    for (i = 0; i < SIMT_WARP; ++i) {
        simt_shuffle_arg *a = (simt_shuffle_arg *)args[i];
        if ((mask >> i & 1) == 0) continue;
        if ((mask >> a->from & 1) == 0)
            simt_finding("divergence: lane %u takes a value of lane %u, which is not in the mask %08x", i,
                         a->from, mask);
        a->result = ((simt_shuffle_arg *)args[a->from])->value;
    }
}

template <class T>
SIMT_QUIET T simt_shuffle(const char *what, uint32_t mask, T value, unsigned from, const char *file, int line)
{
    simt_shuffle_arg a = {0, 0, from};
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles take 4 or 8 bytes");
    memcpy(&a.value, &value, sizeof value);
    simt_meet(what, mask, &a, simt_shuffle_work, file, line);
    memcpy(&value, &a.result, sizeof value);
    return value;
}

struct simt_vote_arg {
    uint32_t vote, result;
};

SIMT_QUIET inline void simt_vote_work(void **args, uint32_t mask)
{
    uint32_t votes = 0;
    unsigned i;
    for (i = 0; i < SIMT_WARP; ++i)
        if ((mask >> i & 1) && ((simt_vote_arg *)args[i])->vote) votes |= 1u << i;
    for (i = 0; i < SIMT_WARP; ++i)
        if (mask >> i & 1) ((simt_vote_arg *)args[i])->result = votes;
}

SIMT_QUIET inline uint32_t simt_vote(const char *what, uint32_t mask, int vote, const char *file, int line)
{
    simt_vote_arg a = {vote != 0, 0};
    simt_meet(what, mask, &a, simt_vote_work, file, line);
    return a.result;
}

/* ---- matrices ---- */

struct simt_load_arg {
    uint32_t address;
    uint32_t *r;
};

template <int TRANS> SIMT_QUIET void simt_load_matrices(void **args, uint32_t)
{
    uint32_t r[SIMT_WARP][4];
    int m, row, c;
    for (m = 0; m < 4; ++m)
        for (row = 0; row < 8; ++row) {
            int owner = m * 8 + row;
            const char *p = simt_shared_at(((simt_load_arg *)args[owner])->address, 16, "ldmatrix");
            simt_race_matrix_row((unsigned)owner, p, SIMT_READ);
            for (c = 0; c < 8; ++c) {
                int i = TRANS ? c : row, j = TRANS ? row : c; /* where the element goes */
                memcpy((char *)&r[4 * i + j / 2][m] + 2 * (j & 1), p + 2 * c, 2);
            }
        }
    for (c = 0; c < SIMT_WARP; ++c) memcpy(((simt_load_arg *)args[c])->r, r[c], sizeof r[c]);
}

struct simt_store_arg {
    uint32_t address;
    const uint32_t *r;
};

SIMT_QUIET inline void simt_store_matrices(void **args, uint32_t)
{
    int m, row, c;
    for (m = 0; m < 4; ++m)
        for (row = 0; row < 8; ++row) {
            int owner = m * 8 + row;
            char *p = simt_shared_at(((simt_store_arg *)args[owner])->address, 16, "stmatrix");
            simt_race_matrix_row((unsigned)owner, p, SIMT_WRITE);
            for (c = 0; c < 4; ++c) memcpy(p + 4 * c, &((simt_store_arg *)args[4 * row + c])->r[m], 4);
        }
}

struct simt_mma_arg {
    float *d;
    const uint32_t *a, *b;
};

SIMT_QUIET inline float simt_bf16(uint32_t bits)
{
    float f;
    bits <<= 16;
    memcpy(&f, &bits, 4);
    return f;
}

SIMT_QUIET SIMT_FAST inline void simt_multiply(void **args, uint32_t)
{
    float a[16][16], b[16][8], d[16][8];
    int l, i, k, j;
    for (l = 0; l < SIMT_WARP; ++l) {
        const simt_mma_arg *x = (const simt_mma_arg *)args[l];
        int row = l / 4, pair = l % 4 * 2;
        for (i = 0; i < 4; ++i) {
            float *p = &a[row + 8 * (i & 1)][pair + 8 * (i >> 1)];
            p[0] = simt_bf16(x->a[i] & 0xffff);
            p[1] = simt_bf16(x->a[i] >> 16);
            d[row + 8 * (i >> 1)][pair + (i & 1)] = x->d[i];
        }
        for (i = 0; i < 2; ++i) {
            b[pair + 8 * i][row] = simt_bf16(x->b[i] & 0xffff);
            b[pair + 8 * i + 1][row] = simt_bf16(x->b[i] >> 16);
        }
    }
    for (i = 0; i < 16; ++i)
        for (k = 0; k < 16; ++k)
            for (j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
    for (l = 0; l < SIMT_WARP; ++l)
        for (i = 0; i < 4; ++i)
            ((simt_mma_arg *)args[l])->d[i] = d[l / 4 + 8 * (i >> 1)][l % 4 * 2 + (i & 1)];
}

#endif
