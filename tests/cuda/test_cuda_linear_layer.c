/* test_cuda_linear_layer.c -- a layer of linear attention with the CUDA table and rules: lib/linear_layer.h; what is refused, and
 * sizes without a device
 *
 * Each rank has a stream, a cuBLAS handle and a slab on one device; weights, rows, gradients and carries are an allocation each.
 * The host computes nothing.
 */
#include "fake/fake_pool.h"

#include "upipe/cuda/upipe_cuda_bytes.h"
#include "upipe/cuda/upipe_cuda_linear_bytes.h"

#include "../lib/linear_layer.h"
#include "cuda/device.h"

void app_linear(upipe_linear_ops *rules); /* 09_cuda.cu */

enum { HELD_MAX = 256 };

static struct {
    device d;
    void *held[HELD_MAX]; /* freed by close */
    int n;
} there[RANKS_MAX];

static void there_open(int ranks)
{
    for (int i = 0; i < ranks; ++i) device_open(&there[i].d);
}

static void there_close(int ranks)
{
    for (int i = 0; i < ranks; ++i) {
        while (there[i].n > 0) device_free(&there[i].d, there[i].held[--there[i].n]);
        device_close(&there[i].d);
    }
}

static void there_begin(upipe_ctx *c, const layer *a, int rank)
{
    (void)a;
    (void)cudaSetDevice(there[rank].d.cuda.device);
    fake_rank(rank);
    c->ops = &there[rank].d.ops;
    c->stream = there[rank].d.stream;
}

static void *there_slab(upipe_ctx *c, size_t bytes)
{
    int rank = 0;
    while (rank < RANKS_MAX - 1 && c->ops != &there[rank].d.ops) ++rank;
    CHECK(there[rank].n < HELD_MAX);
    return there[rank].held[there[rank].n++] = device_new(&there[rank].d, bytes);
}

static void *there_put(upipe_ctx *c, const void *host, size_t bytes)
{
    void *p = there_slab(c, bytes);
    CHECK_STATUS(c->ops->copy(c, p, host, bytes), UPIPE_OK, c->err);
    return p;
}

static void there_get(upipe_ctx *c, void *host, const void *from, size_t bytes)
{
    CHECK_STATUS(c->ops->copy(c, host, from, bytes), UPIPE_OK, c->err);
}

/* What a plan for a GPU says without one: a dry run by tables that have sizes alone. */
static void check_plan(void)
{
    test_rng r = {37};
    layer a = large(&r, UPIPE_BF16);
    upipe_linear_ops sizes;
    upipe_ops ops;
    upipe_mem mem;
    upipe_ctx c = {0};
    part p = {0}, q;
    a.stage_keys = 1;
    upipe_cuda_plan_ops(&ops);
    upipe_cuda_plan_linear(&sizes);
    place.open(1);
    rank_begin(&c, &mem, &a, 0, 1 << 20);
    CHECK_STATUS(part_init(&a, 0, 0, &p, &c.err), UPIPE_OK, c.err);
    part_weights(&c, &a, &p, 1);
    part_rows(&c, &a, &p);
    q = p;
    q.l.rules = &sizes;
    CHECK_INT(part_dry(&p, c.ops, 0), UPIPE_OK);
    CHECK_INT(part_dry(&q, &ops, 0), UPIPE_OK);
    CHECK_INT(q.bytes[0].most, p.bytes[0].most);
    CHECK_INT(q.bytes[1].most, p.bytes[1].most);
    upipe_mem_destroy(&mem, NULL);
    place.close(1);
    buffers_free(0);
}

/* What the rules do not take is refused before anything is sent or allocated. */
static void check_refused(void)
{
    test_rng r = {43};
    layer a = {.n = 70,
               .model = 4,
               .heads = 2,
               .key_heads = 1,
               .key_dim = 3,
               .value_dim = 5,
               .taps = 4,
               .chunk = 65};
    upipe_comm_self_state alone;
    upipe_comm self;
    upipe_mem mem;
    upipe_ctx c = {.team = &self};
    part p = {0};
    draw(&a, &r);
    place.open(1);
    rank_begin(&c, &mem, &a, 0, 1 << 20);
    upipe_comm_self(&self, &alone, c.ops->copy);
    CHECK_STATUS(part_init(&a, 0, 0, &p, &c.err), UPIPE_OK, c.err);
    part_weights(&c, &a, &p, 1);
    part_rows(&c, &a, &p);
    CHECK_REFUSED(upipe_linear_layer_fwd(&c, &self, &p.l, &p.saved, p.y, p.x, NULL), UPIPE_ERR_UNSUPPORTED,
                  c.err, "linear layer: chunks of 65 tokens; the rules cuda have at most 64");
    CHECK_INT(mem.peak, 0);
    upipe_mem_destroy(&mem, NULL);
    place.close(1);
    buffers_free(0);
}

int main(int argc, char **argv)
{
    const layer_place device_place = {there_open, there_close, there_begin, there_slab, there_put, there_get};
    place = device_place;
    app_linear(&rules);
    test_begin(argc, argv);
    TEST(check_drawn(BRIEF ? 2 : test_full() ? 12 : 4));
    TEST(check_bits());
    TEST(check_documents());
    TEST(check_types());
    TEST(check_golden_states());
    TEST(check_out_of_memory(9));
    TEST(check_plan());
    TEST(check_refused());
    CHECK(fake_check_clean());
    return test_end("test_cuda_linear_layer");
}
