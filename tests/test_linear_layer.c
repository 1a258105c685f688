/* test_linear_layer -- a layer of linear attention on the CPU: lib/linear_layer.h, bits over the host's threads, refusals
 *
 *     test_linear_layer                     all checks
 *     test_linear_layer FILE RANKS          runs the layer in FILE, and writes what it gives to FILE.out (test_gated_delta.py)
 */
#include "upipe/cpu/upipe_cpu_linear.h"

#include "lib/linear_layer.h"
#include "lib/workers.h"

/* ---- bits ---- */

/* The host's threads and tiles change no bit. */
static void test_threads(void)
{
    static const int64_t borders[] = {-1, 20, 64, 100, 102, 140, 200};
    test_rng r = {11};
    for (int t = UPIPE_F32; t <= UPIPE_BF16; ++t)
        for (int packed = 0; packed < 2; ++packed) {
            layer a = large(&r, (upipe_dtype)t), b;
            if (packed) a.borders = (upipe_borders){borders, 6};
            run(&a);
            for (int kind = 0; kind < WORKERS_KINDS; ++kind) {
                host_threads w;
                workers_begin(&w, kind);
                b = twin_of(&a);
                b.ops.par = &w.par;
                b.tile_rows = kind % 2 ? 64 : 0;
                run(&b);
                check_rows(&a, &b, 0, a.n, "threads");
                check_weights(&a, &b, "threads");
                workers_end(&w);
            }
            buffers_free(0);
        }
}

/* ---- refusals ---- */

static void test_refusals(void)
{
    test_rng r = {23};
    layer a = {
        .n = 6, .model = 4, .heads = 2, .key_heads = 1, .key_dim = 3, .value_dim = 5, .taps = 4, .chunk = 4};
    const int64_t down[] = {3, 1}, documents[] = {0, 3, 6};
    upipe_comm_self_state alone;
    upipe_comm self;
    upipe_mem mem;
    upipe_ctx c = {.team = &self};
    upipe_linear_ops half = {.name = "half"}, small = rules;
    const upipe_linear_ops sizes = {.name = "sizes", .chunk_max = rules.chunk_max, .bytes = rules.bytes};
    part p = {0}, q;
    upipe_plan_desc d = {.tokens = 6, .batch = 2, .model_dim = 4, .heads = 8, .head_dim = 32};
    upipe_plan batch, zigzag, longer;
    draw(&a, &r);
    rank_begin(&c, &mem, &a, 0, 1 << 20);
    upipe_comm_self(&self, &alone, a.ops.copy);
    CHECK_STATUS(part_init(&a, 0, 0, &p, &c.err), UPIPE_OK, c.err);
    CHECK_STATUS(upipe_plan_init(&batch, &d, &c.err), UPIPE_OK, c.err);
    d.batch = 1, d.ring = 2, d.layout = UPIPE_ZIGZAG;
    CHECK_STATUS(upipe_plan_init(&zigzag, &d, &c.err), UPIPE_OK, c.err);
    d.ring = 1, d.tokens = 7;
    CHECK_STATUS(upipe_plan_init(&longer, &d, &c.err), UPIPE_OK, c.err);
    part_weights(&c, &a, &p, 1);
    part_rows(&c, &a, &p);
#define FWD(q) upipe_linear_layer_fwd(&c, &self, &(q).l, &(q).saved, (q).y, (q).x, NULL)
#define BWD(q) upipe_linear_layer_bwd(&c, &self, &(q).l, (q).dx, &(q).grads, &(q).saved, (q).dy, (q).x, NULL)
#define REFUSED(change, status, words)                           \
    do {                                                         \
        q = p, change;                                           \
        CHECK_REFUSED(FWD(q), UPIPE_ERR_##status, c.err, words); \
        CHECK_REFUSED(BWD(q), UPIPE_ERR_##status, c.err, words); \
        CHECK_INT(mem.live, 0);                                  \
    } while (0)
    REFUSED(q.l.plan = NULL, ARG, "it, its plan or its rules are NULL");
    REFUSED(q.l.rules = &half, UNSUPPORTED, "the rules half have no convolution and no gates");
    REFUSED(q.l.w_z = NULL, ARG, "a weight is NULL");
    REFUSED(q.l.key_heads = 3, ARG, "2 heads over 3 key heads");
    REFUSED(q.l.stage_keys = -1, ARG, "stages of -1 key heads");
    REFUSED(q.l.tile_rows = 65, ARG, "tiles of 65 rows, no multiple of 64");
    REFUSED(q.l.key_dim = 257, UNSUPPORTED, "a state of 257 x 5; 1 to 256 each are built");
    REFUSED(q.l.taps = 9, UNSUPPORTED, "a convolution of 9 taps; 2 to 8 are built");
    REFUSED(q.l.taps = 1, UNSUPPORTED, "a convolution of 1 taps");
    REFUSED(q.l.chunk = 257, ARG, "chunks of 257 tokens");
    small.chunk_max = 3;
    REFUSED(q.l.rules = &small, UNSUPPORTED, "chunks of 4 tokens; the rules");
    REFUSED((q.l.rules = &small, q.l.chunk = 0), UNSUPPORTED, "linear layer: chunks of 64 tokens; the rules");
    CHECK_INT(mem.peak, 0);
    CHECK(alone.failure.status == UPIPE_OK);
    REFUSED(q.l.norm_eps = -1, ARG, "norm_eps -1");
    REFUSED((q.l.heads = q.l.key_heads = 1 << 30), OVERFLOW, "1073741824 heads of 3 x 5");
    REFUSED(q.l.plan = &batch, UNSUPPORTED, "a scan of 2 sequences");
    REFUSED(q.l.plan = &zigzag, UNSUPPORTED, "neighbours of a zigzag ring hold no neighbouring tokens");
    REFUSED((q.l.borders = (upipe_borders){down, 1}), ARG, "packed document 0 is [3, 1)");
    REFUSED(q.x.n = 5, ARG, "x is f32 [5][1][4], not f32 [6][1][4]");
    q = p;
    CHECK_REFUSED(BWD(q), UPIPE_ERR_ARG, c.err, "save is NULL, or not there any more");
    q = p, q.dx = q.x;
    CHECK_REFUSED(BWD(q), UPIPE_ERR_ARG, c.err, "dx lies over x");
    q = p, q.y.dtype = UPIPE_BF16;
    CHECK_REFUSED(FWD(q), UPIPE_ERR_ARG, c.err, "y is bf16 [6][1][4]");
    q = p;
    CHECK_STATUS(FWD(q), UPIPE_OK, c.err);
    q.l.chunk = 5;
    CHECK_REFUSED(BWD(q), UPIPE_ERR_ARG, c.err, "its chunk is not that of the forward");
    q.l.chunk = 4, q.l.borders = (upipe_borders){documents, 2};
    CHECK_REFUSED(BWD(q), UPIPE_ERR_ARG, c.err, "cu_seqlens_n is not that of the forward");
    q.l.borders = p.l.borders, q.l.first = 6;
    CHECK_REFUSED(BWD(q), UPIPE_ERR_ARG, c.err, "position of its first token is not that of the forward");
    q.l.first = 0, q.l.plan = &longer;
    q.x.n = q.dx.n = q.dy.n = 7; /* which nothing reads */
    CHECK_REFUSED(BWD(q), UPIPE_ERR_ARG, c.err, "another plan than in the forward");
    q.l.plan = p.l.plan, q.x = p.x, q.dx = p.dx, q.dy = p.dy;
    CHECK_STATUS(BWD(q), UPIPE_OK, c.err);
    CHECK_REFUSED(BWD(q), UPIPE_ERR_ARG, c.err, "consumed");
    small = rules, small.gates = NULL; /* a dry run says so too, where the table is not one of sizes alone */
    q = p, q.l.rules = &small;
    CHECK_INT(part_dry(&q, &a.ops, 0), UPIPE_ERR_UNSUPPORTED);
    q.l.rules = &sizes;
    CHECK_INT(part_dry(&q, &a.ops, 0), UPIPE_OK);
    upipe_mem_destroy(&mem, NULL);
#undef REFUSED
#undef FWD
#undef BWD
    buffers_free(0);
}

static int differs; /* in what ranks of differing_body do */

/* Ranks that do not agree say on what. */
static upipe_status differing_body(void *user, int rank)
{
    static const char *const words[] = {"its chunk is 4 on rank 0 and 5 on rank 1",
                                        "carry is 0 on rank 0 and 1 on rank 1",
                                        "tokens of the scan is 6 on rank 0 and 5 on rank 1"};
    layer *a = (layer *)user;
    float *carry = NULL;
    upipe_mem mem;
    upipe_ctx c = {.team = upipe_threads_comm(&a->team, rank)};
    part p = {0};
    upipe_plan_desc d;
    rank_begin(&c, &mem, a, rank, 1 << 20);
    UPIPE_TRY(part_init(a, rank, 0, &p, &c.err));
    part_weights(&c, a, &p, 0);
    part_rows(&c, a, &p);
    if (differs == 0) p.l.chunk = 4 + rank;
    if (differs == 1 && rank == 1) carry = (float *)zeros_there(&c, upipe_linear_layer_state_bytes(&p.l));
    d = p.plan.desc;
    if (differs == 2 && rank == 1) d.tokens = 5; /* as many rows of rank 1 */
    UPIPE_TRY(upipe_plan_init(&p.plan, &d, &c.err));
    CHECK_REFUSED(upipe_linear_layer_fwd(&c, c.team, &p.l, &p.saved, p.y, p.x, carry), UPIPE_ERR_MISMATCH,
                  c.err, words[differs]);
    CHECK_INT(mem.live, 0);
    upipe_mem_destroy(&mem, NULL);
    return UPIPE_OK;
}

/* One rank goes forward, the other one back. */
static upipe_status crossing_body(void *user, int rank)
{
    layer *a = (layer *)user;
    upipe_mem mem;
    upipe_ctx c = {.team = upipe_threads_comm(&a->team, rank)};
    part p = {0};
    upi_fields f;
    upipe_status s;
    rank_begin(&c, &mem, a, rank, 1 << 20);
    UPIPE_TRY(part_init(a, rank, 0, &p, &c.err));
    part_weights(&c, a, &p, 1);
    part_rows(&c, a, &p);
    f = upi_lin_fields(&p.l);
    if (rank > 0) UPIPE_TRY(upi_lin_given(&c, &p.l, &f, &p.saved.given));
    s = rank > 0 ? upipe_linear_layer_bwd(&c, c.team, &p.l, p.dx, &p.grads, &p.saved, p.dy, p.x, NULL)
                 : upipe_linear_layer_fwd(&c, c.team, &p.l, &p.saved, p.y, p.x, NULL);
    CHECK_REFUSED(s, UPIPE_ERR_MISMATCH, c.err, "its direction (1: backward) is 0 on rank 0 and 1 on rank 1");
    CHECK_INT(mem.live, 0);
    upipe_mem_destroy(&mem, NULL);
    return UPIPE_OK;
}

static void test_differing(void)
{
    test_rng r = {29};
    layer a = {
        .n = 6, .model = 4, .heads = 2, .key_heads = 1, .key_dim = 3, .value_dim = 5, .taps = 4, .chunk = 4};
    upipe_err e;
    draw(&a, &r);
    a.ranks = 2;
    for (differs = 0; differs < 3; ++differs) {
        CHECK_STATUS(upipe_threads_init(&a.team, 2, 20, &e), UPIPE_OK, e);
        CHECK_STATUS(upipe_threads_run(&a.team, differing_body, &a, NULL, &e), UPIPE_OK, e);
        upipe_threads_free(&a.team);
    }
    CHECK_STATUS(upipe_threads_init(&a.team, 2, 20, &e), UPIPE_OK, e);
    CHECK_STATUS(upipe_threads_run(&a.team, crossing_body, &a, NULL, &e), UPIPE_OK, e);
    upipe_threads_free(&a.team);
    buffers_free(0);
}

/* ---- a file ---- */

/* The file: tokens, model_dim, heads, key heads, key_dim, value_dim, taps, chunk as i32, eps; the tensors and dy, f32. Written:
 * y, the gradients, the state. */
static int run_file(const char *path, int ranks)
{
    test_rng r = {1};
    layer a = {0};
    int32_t numbers[8];
    char out[4096];
    FILE *file = fopen(path, "rb");
    int ok = file != NULL && fread(numbers, sizeof numbers, 1, file) == 1 && fread(&a.eps, 4, 1, file) == 1;
    if (!ok || snprintf(out, sizeof out, "%s.out", path) >= (int)sizeof out) return 1;
    a.n = numbers[0], a.model = numbers[1], a.heads = numbers[2], a.key_heads = numbers[3];
    a.key_dim = numbers[4], a.value_dim = numbers[5], a.taps = numbers[6], a.chunk = numbers[7];
    draw(&a, &r);
    for (int i = 0; i < Y; ++i) ok = ok && fread(a.data[i], (size_t)count_of(&a, i) * 4, 1, file) == 1;
    fclose(file);
    a.ranks = ranks;
    a.end = floats(state_of(&a));
    run(&a);
    file = fopen(out, "wb");
    ok = ok && file != NULL && fwrite(a.data[Y], (size_t)count_of(&a, Y) * 4, 1, file) == 1;
    for (int i = 0; i < TENSORS; ++i) ok = ok && fwrite(a.grad[i], (size_t)count_of(&a, i) * 4, 1, file) == 1;
    ok = ok && fwrite(a.end, (size_t)state_of(&a) * 4, 1, file) == 1;
    ok = file != NULL && fclose(file) == 0 && ok;
    buffers_free(0);
    return !ok || test_failures != 0;
}
int main(int argc, char **argv)
{
    upipe_cpu_linear(&rules);
    if (argc == 3) return run_file(argv[1], atoi(argv[2]));
    test_begin(argc, argv);
    TEST(check_drawn(BRIEF ? 4 : test_full() ? 16 : 8));
    TEST(check_bits());
    TEST(test_threads());
    TEST(check_documents());
    TEST(check_types());
    TEST(check_golden_states());
    TEST(check_out_of_memory(BRIEF ? 3 : 1));
    TEST(test_refusals());
    TEST(test_differing());
    return test_end("linear_layer");
}
