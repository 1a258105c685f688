/* test_rope -- the rates of RoPE and the factor of what it turns, of each type, against transformers' functions in f64
 *
 * Golden are 5.23's modeling_rope_utils.py with torch.float and torch.float32 set to torch.float64, for heads of 16.
 */
#include "lib/test.h"

#include "examples/train/model/rope.h"

enum { PAIRS = 8 };

typedef struct golden {
    const char *name;
    llama_config config;
    int64_t tokens;
    double factor, rates[PAIRS];
} golden;

/* clang-format off */
#define SHORT {1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7}
#define LONG {1, 2, 4, 8, 16, 32, 40, 48}

static const golden cases[] = {
    {"linear", {.rope_type = LLAMA_ROPE_LINEAR, .rope_theta = 10000, .rope_factor = 4}, 9, 0,
     {0.25, 0.07905694150420949, 0.025, 0.007905694150420948, 0.0025, 0.0007905694150420947, 0.00025,
      7.905694150420948e-05}},
    {"dynamic, longer", {.rope_type = LLAMA_ROPE_DYNAMIC, .rope_theta = 10000, .rope_factor = 2, .rope_positions = 4096},
     12000, 0,
     {1.0, 0.2522999030103896, 0.063655241059052, 0.01606021114530179, 0.004051989714286019, 0.0010223166119134588,
      0.0002579303820316758, 6.507581037002453e-05}},
    {"dynamic", {.rope_type = LLAMA_ROPE_DYNAMIC, .rope_theta = 10000, .rope_factor = 2, .rope_positions = 4096}, 1000, 0,
     {1.0, 0.31622776601683794, 0.1, 0.03162277660168379, 0.01, 0.003162277660168379, 0.001, 0.00031622776601683794}},
    {"llama3",
     {.rope_type = LLAMA_ROPE_LLAMA3, .rope_theta = 500000, .rope_factor = 8, .rope_low = 1, .rope_high = 4,
      .rope_original = 8192}, 9, 0,
     {1.0, 0.19392274474868576, 0.03760603093086393, 0.0072926647372171085, 0.0005248461609929547, 3.428102195952591e-05,
      6.647869871181236e-06, 1.2891731721515574e-06}},
    {"yarn", {.rope_type = LLAMA_ROPE_YARN, .rope_theta = 10000, .rope_factor = 4, .rope_original = 2048}, 9,
     1.138629436111989,
     {1.0, 0.31622776601683794, 0.1, 0.02569350598886808, 0.00625, 0.0013834964763236657, 0.00025, 7.905694150420948e-05}},
    {"yarn, all numbers",
     {.rope_type = LLAMA_ROPE_YARN, .rope_theta = 10000, .rope_positions = 16384, .rope_original = 2048,
      .rope_beta_fast = 16, .rope_beta_slow = 2, .rope_mscale = 1, .rope_mscale_all = 0.5, .rope_untruncated = 1}, 9,
     1.094179988101349,
     {1.0, 0.31622776601683794, 0.1, 0.025771617010610374, 0.003305222402196121, 0.00039528470752104737, 0.000125,
      3.952847075210474e-05}},
    {"yarn of half a head",
     {.rope_type = LLAMA_ROPE_YARN, .rope_theta = 10000, .rope_factor = 4, .rope_original = 2048, .rope_partial = 0.5,
      .rope_attention = 1.5}, 9, 1.5, {1.0, 0.1, 0.00625, 0.00025}},
    {"longrope, longer",
     {.rope_type = LLAMA_ROPE_LONGROPE, .rope_theta = 10000, .rope_factor = 32, .rope_original = 4096,
      .rope_short = SHORT, .rope_long = LONG}, 4097, 1.1902380714238083,
     {1.0, 0.15811388300841897, 0.025, 0.003952847075210474, 0.000625, 9.882117688026184e-05, 2.5e-05,
      6.588078458684123e-06}},
    {"longrope",
     {.rope_type = LLAMA_ROPE_LONGROPE, .rope_theta = 10000, .rope_positions = 131072, .rope_original = 4096,
      .rope_short = SHORT, .rope_long = LONG}, 4096, 1.1902380714238083,
     {1.0, 0.2874797872880344, 0.08333333333333333, 0.024325212770525996, 0.007142857142857143, 0.0021081851067789193,
      0.000625, 0.00018601633295108115}},
};
/* clang-format on */

static void test_golden(void)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const golden *g = &cases[i];
        llama_config c = g->config;
        llama_rates r;
        c.head_dim = 16;
        llama_rates_make(&r, &c, g->tokens);
        CHECK_SAY(r.own == 1 && r.dims == (c.rope_partial > 0 ? 8 : 0), "%s: %d dims", g->name, r.dims);
        CHECK_SAY(fabs(r.factor - g->factor) <= 1e-15 * g->factor, "%s: factor %.17g", g->name, r.factor);
        for (int p = 0; p < PAIRS; ++p)
            CHECK_SAY(fabs(r.value[p] - g->rates[p]) <= 2e-15 * g->rates[p],
                      "%s: rate %d is %.17g, not %.17g", g->name, p, r.value[p], g->rates[p]);
    }
}

/* A plain model has no rates of its own, whatever part of a head turns. */
static void test_plain(void)
{
    static llama_config c = {.head_dim = 64, .rope_theta = 500000};
    static const llama_rates none;
    llama_rates r;
    llama_rates_make(&r, &c, 1 << 20);
    CHECK_BYTES(&r, &none, sizeof r);
    c.rope_partial = 0.75;
    llama_rates_make(&r, &c, 1 << 20);
    CHECK(r.own == 0 && r.factor == 0);
    CHECK_INT(r.dims, 48);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    TEST(test_golden());
    TEST(test_plain());
    return test_end("rope");
}
