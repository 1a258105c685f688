/* naive.c -- attention in plain loops, forward and backward, as llm.c's train_gpt2.c writes it
 *
 * The scores of all pairs stay in memory, keys past the query are skipped, the compiler vectorises what it
 * can; to be compiled as llm.c's Makefile does, with -Ofast -march=native -fopenmp. In f32. q, k, v, o and
 * their gradients are [tokens][heads][d], att is [heads][tokens][tokens]. The forward runs on all of OpenMP's
 * threads; llm.c's backward has none, and here it takes its heads side by side, where they share nothing.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

/* Threads of the calls that follow; 1 is always there. Returns those that there are. */
int32_t naive_threads(int32_t threads)
{
#ifdef _OPENMP
    omp_set_num_threads(threads);
    return threads;
#else
    (void)threads;
    return 1;
#endif
}

void naive_fwd(float *o, float *att, const float *q, const float *k, const float *v, int64_t tokens,
               int64_t heads, int64_t d, int32_t causal)
{
    float scale = 1.0f / sqrtf((float)d);
#pragma omp parallel for collapse(2)
    for (int64_t h = 0; h < heads; ++h)
        for (int64_t t = 0; t < tokens; ++t) {
            const float *q_t = q + (t * heads + h) * d;
            float *att_t = att + (h * tokens + t) * tokens, *o_t = o + (t * heads + h) * d;
            int64_t keys = causal ? t + 1 : tokens;
            float top = -10000.0f, sum = 0;
            for (int64_t j = 0; j < keys; ++j) {
                const float *k_j = k + (j * heads + h) * d;
                float s = 0;
                for (int64_t i = 0; i < d; ++i) s += q_t[i] * k_j[i];
                s *= scale;
                if (s > top) top = s;
                att_t[j] = s;
            }
            for (int64_t j = 0; j < keys; ++j) {
                float e = expf(att_t[j] - top);
                sum += e;
                att_t[j] = e;
            }
            for (int64_t j = 0; j < keys; ++j) att_t[j] *= 1 / sum;
            memset(o_t, 0, (size_t)d * sizeof *o_t);
            for (int64_t j = 0; j < keys; ++j) {
                const float *v_j = v + (j * heads + h) * d;
                for (int64_t i = 0; i < d; ++i) o_t[i] += att_t[j] * v_j[i];
            }
        }
}

/* gatt [heads][tokens] is scratch, a row a head. llm.c keeps the gradients of all weights and scores, and its
 * softmax sums the derivative over pairs of keys, tokens^3 in all: no yardstick for anyone. Here it is the
 * row's sum, as everywhere. */
void naive_bwd(float *dq, float *dk, float *dv, float *gatt, const float *att, const float *dout,
               const float *q, const float *k, const float *v, int64_t tokens, int64_t heads, int64_t d,
               int32_t causal)
{
    float scale = 1.0f / sqrtf((float)d);
    memset(dq, 0, (size_t)(tokens * heads * d) * sizeof *dq);
    memset(dk, 0, (size_t)(tokens * heads * d) * sizeof *dk);
    memset(dv, 0, (size_t)(tokens * heads * d) * sizeof *dv);
#pragma omp parallel for
    for (int64_t h = 0; h < heads; ++h)
        for (int64_t t = 0; t < tokens; ++t) {
            const float *q_t = q + (t * heads + h) * d, *dout_t = dout + (t * heads + h) * d;
            const float *att_t = att + (h * tokens + t) * tokens;
            float *dq_t = dq + (t * heads + h) * d, *gatt_t = gatt + h * tokens;
            int64_t keys = causal ? t + 1 : tokens;
            float sum = 0;
            for (int64_t j = 0; j < keys; ++j) {
                const float *v_j = v + (j * heads + h) * d;
                float *dv_j = dv + (j * heads + h) * d;
                float s = 0;
                for (int64_t i = 0; i < d; ++i) {
                    s += v_j[i] * dout_t[i];
                    dv_j[i] += att_t[j] * dout_t[i];
                }
                gatt_t[j] = s;
                sum += att_t[j] * s;
            }
            for (int64_t j = 0; j < keys; ++j) {
                const float *k_j = k + (j * heads + h) * d;
                float *dk_j = dk + (j * heads + h) * d, gs = att_t[j] * (gatt_t[j] - sum) * scale;
                for (int64_t i = 0; i < d; ++i) {
                    dq_t[i] += k_j[i] * gs;
                    dk_j[i] += q_t[i] * gs;
                }
            }
        }
}
