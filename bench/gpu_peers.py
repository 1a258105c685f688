#!/usr/bin/env python3
"""gpu_peers.py -- attention of PyTorch and of the FlashAttention packages on a CUDA device, at the shapes that it is given

Reads a JSON object a line from stdin: a shape of `gpu attention` (tokens, heads, head_dim, v_dim, causal, fwd_flop, bwd_flop), or
{"roofline": true}. Writes a JSON object a contestant, then {"end": true}. gpu.py starts it early, as PyTorch takes seconds
to be imported, and asks it right after our kernels. Without PyTorch for CUDA it writes {"missing": WHY} and ends.
"""

import json
import statistics
import sys

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as missing:
    print(json.dumps({'missing': f'there is no PyTorch ({missing})'}), flush=True)
    sys.exit(0)

VERSIONS = {'torch': torch.__version__}
WARM, RUNS = 2, 9


def sdpa(backend, same_bits):
    def make(q, k, v, causal):
        torch.use_deterministic_algorithms(same_bits)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return make, (0, 2, 1, 3)


def package(name, same_bits):
    function = __import__(name, fromlist=['flash_attn_func']).flash_attn_func

    def make(q, k, v, causal):
        made = function(q, k, v, causal=causal, deterministic=same_bits)
        return made[0] if isinstance(made, tuple) else made
    return make, (0, 1, 2, 3)


def contestants():
    made = {'sdpa_flash': sdpa(SDPBackend.FLASH_ATTENTION, False),
            'sdpa_flash_deterministic': sdpa(SDPBackend.FLASH_ATTENTION, True),
            'sdpa_cudnn': sdpa(SDPBackend.CUDNN_ATTENTION, False)}
    for name, module in (('fa2', 'flash_attn'), ('fa3', 'flash_attn_interface')):
        try:
            made[name], made[name + '_deterministic'] = package(module, False), package(module, True)
            VERSIONS[name] = getattr(__import__(module), '__version__', 'there')
        except ImportError:
            pass
    return made


def seconds(call):
    """Median, between events."""
    runs = []
    for i in range(WARM + RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        if i >= WARM:
            runs.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(runs)


def attention(shape, make, order):
    def random(dim):
        size = [1, shape['tokens'], shape['heads'], dim]
        return torch.randn([size[i] for i in order], device='cuda', dtype=torch.bfloat16, requires_grad=True)
    q, k, v = random(shape['head_dim']), random(shape['head_dim']), random(shape['v_dim'])
    with torch.no_grad():
        fwd = seconds(lambda: make(q, k, v, shape['causal']))
    out = make(q, k, v, shape['causal'])
    grad = torch.randn_like(out)
    bwd = seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    return {'fwd_seconds': fwd, 'bwd_seconds': bwd, 'fwd_flop_per_s': shape['fwd_flop'] / fwd,
            'bwd_flop_per_s': shape['bwd_flop'] / bwd}


def roofline(n=8192):
    a, b = (torch.randn(n, n, device='cuda', dtype=torch.bfloat16) for _ in range(2))
    x, y = (torch.empty(1 << 30, device='cuda', dtype=torch.uint8) for _ in range(2))
    return {'product_flop_per_s': 2 * n ** 3 / seconds(lambda: torch.matmul(a, b)),
            'copy_bytes_per_s': 2 * x.numel() / seconds(lambda: y.copy_(x))}


def main():
    # In deterministic mode PyTorch would fill every result with NaN first, which is no part of attention.
    torch.utils.deterministic.fill_uninitialized_memory = False
    if not torch.cuda.is_available():
        print(json.dumps({'missing': 'PyTorch has no CUDA device'}), flush=True)
        return
    made = contestants()
    print(json.dumps({'end': True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        for name, how in ({'torch': None} if 'roofline' in asked else made).items():
            figure = {'name': name, 'versions': VERSIONS}
            try:
                figure.update(roofline() if how is None else attention(asked, *how))
            except Exception as error:  # pylint: disable=broad-exception-caught
                figure['refused'] = (str(error) or type(error).__name__).split('\n')[0][:200]
            print(json.dumps(figure), flush=True)
        print(json.dumps({'end': True}), flush=True)


if __name__ == '__main__':
    main()
