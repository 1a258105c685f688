/* backend.cpp -- a backend of a trainer's attention class: windows, scale, sinks and packed documents */
#include "port.h"

namespace
{

class UpipeAttention final : public AttentionBackend
{
  public:
    const char *name() const override
    {
        return "upipe";
    }

    bool supports(const AttentionParams &p) const override
    {
        return port_fits(p.B, p.T, p.Hq, p.Hkv, p.d);
    }

    void forward(AttentionParams &p) override
    {
        std::vector<std::int64_t> borders;
        port_forward(port_call(masked(p, borders), p.qkv, p.out, p.B, p.T, p.Hq, p.Hkv, p.d, p.stream),
                     p.lse);
    }

    void backward(AttentionParams &p) override
    {
        std::vector<std::int64_t> borders;
        const upipe_qkv call = masked(p, borders);
        port_backward(port_call(call, p.qkv, p.out, p.B, p.T, p.Hq, p.Hkv, p.d, p.stream),
                      port_call(call, p.d_qkv, p.d_out, p.B, p.T, p.Hq, p.Hkv, p.d, p.stream), p.d_sinks,
                      p.lse);
    }

  private:
    /* The session's call with this layer's mask, whose borders the caller keeps. */
    static upipe_qkv masked(const AttentionParams &p, std::vector<std::int64_t> &borders)
    {
        port_check(port_session != nullptr, "no session");
        upipe_qkv call = port_session->call;
        call.scale = p.scale;
        call.mask.causal = 1;
        call.mask.window = p.window;
        call.mask.sinks = p.sinks;
        if (p.cu_seqlens != nullptr) {
            borders.assign(p.cu_seqlens, p.cu_seqlens + p.documents + 1);
            call.mask.borders.cu_seqlens = borders.data();
            call.mask.borders.cu_seqlens_n = p.documents;
        }
        return call;
    }
};

/* Registers itself when the program starts. */
const bool registered = (AttentionBackendRegistry::instance().add(std::make_unique<UpipeAttention>()), true);

} // namespace
