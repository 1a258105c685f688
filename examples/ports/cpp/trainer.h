/* trainer.h -- the shapes of two interfaces by which C++ trainers call attention
 *
 * A port includes its trainer's own headers in place of this one. The tensors are those of this rank: T is the number of
 * its tokens of a sequence, and qkv is [B][T][Hq + 2 Hkv][d]. Attention is causal.
 */
#ifndef TRAINER_H
#define TRAINER_H

#include <cstdint>
#include <memory>
#include <vector>

typedef float floatX;                     /* or a type of two bytes, bf16 */
typedef struct CUstream_st *cudaStream_t; /* as CUDA declares it; NULL on the CPU */

/* ---- a pair of functions ---- */

/* out [B][T][Hq][d], stats f32 [B][Hq][T]: a layer's own, from its forward to its backward */
void attention_forward_cudnn(floatX *out, float *stats, floatX *inp, int B, int T, int Hq, int Hkv, int d,
                             cudaStream_t stream);
void attention_backward_cudnn(floatX *dqkv, floatX *dout, floatX *qkv, floatX *o, float *stats, int B, int T,
                              int Hq, int Hkv, int d, cudaStream_t stream);

/* ---- a class, of which the first that supports a call serves it ---- */

/* window: keys that a query sees, its own included; 0 = all. scale: 0 = 1/sqrt(d). sinks [Hq], and d_sinks += : NULL without.
 * cu_seqlens [documents + 1], host memory: where documents begin in the flattened batch of whole sequences; NULL without */
struct AttentionParams {
    floatX *qkv, *out, *d_qkv, *d_out;
    float *lse, *sinks, *d_sinks;
    const std::int32_t *cu_seqlens;
    int B, T, Hq, Hkv, d, window, documents;
    float scale;
    cudaStream_t stream;
};

class AttentionBackend
{
  public:
    virtual ~AttentionBackend() = default;
    virtual const char *name() const = 0;
    virtual bool supports(const AttentionParams &p) const = 0;
    virtual void forward(AttentionParams &p) = 0;
    virtual void backward(AttentionParams &p) = 0;
};

class AttentionBackendRegistry
{
  public:
    static AttentionBackendRegistry &instance()
    {
        static AttentionBackendRegistry registry;
        return registry;
    }
    void add(std::unique_ptr<AttentionBackend> backend)
    {
        backends.push_back(std::move(backend));
    }
    AttentionBackend *select(const AttentionParams &p)
    {
        for (auto &backend : backends)
            if (backend->supports(p)) return backend.get();
        return nullptr;
    }

  private:
    std::vector<std::unique_ptr<AttentionBackend>> backends;
};

#endif
