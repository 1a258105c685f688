/* paper.h -- the paper's two tables of peak activation memory, as formulas
 *
 *     paper_units(PAPER_UPIPE, UPIPE_FWD_ATTN, group, stages, 1, layers)     a cell
 */
#ifndef COMMON_PAPER_H
#define COMMON_PAPER_H

#include "upipe/upipe_mem.h"

typedef enum paper_row { PAPER_ULYSSES, PAPER_ULYSSES_OFFLOAD, PAPER_FPDT, PAPER_UPIPE } paper_row;

/* paper_units -- a cell of the paper's two tables of peak activation memory, in units
 *   row     method
 *   phase   column: the forward table's four, then the backward table's four
 *   group   G;  stages  nu (UPipe's row);  chunks  pi (FPDT's row);  layers  L (Ulysses' row)
 *   paper   tables "Peak activation memory within the forward attention block" (section 2) and "... during
 *           the backward pass" (Appendix A)
 */
static inline double paper_units(paper_row row, upipe_phase phase, double group, double stages, double chunks,
                                 double layers)
{
    double gamma = 1 + 2 / group, nu = stages, pi = chunks, before = 2 * (nu - 1) / nu;
    double attn0 = 3 + 2 * gamma / nu, attn1 = 2 + 2 * gamma / nu + before;
    double cell[4][UPIPE_PHASES];
    int k;
    const double ulysses[] = {0, gamma + 1, gamma + 1, 2, 2, 3, 2 * gamma + 2, gamma + 1};
    const double offload[] = {1, gamma + 2, gamma + 2, 3, 3, 4, 2 * gamma + 3, gamma + 2};
    const double fpdt[] = {1, gamma + 2, 2 * gamma + 1, 2, 1, 3, 2 * gamma + 4, gamma + 2};
    const double upipe[] = {1,
                            2 + gamma / nu,
                            2 + gamma / nu,
                            2 + 1 / nu,
                            3,
                            3 + 1 / nu,
                            attn0 > attn1 ? attn0 : attn1,
                            2 + gamma / nu + before};
    for (k = 0; k < UPIPE_PHASES; ++k) {
        cell[PAPER_ULYSSES][k] = layers + ulysses[k];
        cell[PAPER_ULYSSES_OFFLOAD][k] = offload[k];
        cell[PAPER_FPDT][k] = fpdt[k] / pi;
        cell[PAPER_UPIPE][k] = upipe[k];
    }
    return phase < UPIPE_PHASES ? cell[row][phase] : 0;
}

#endif
