"""attn_peers.py -- attention by this library, by its peers, and by NumPy in double precision

Contestants and a problem as rates.py has them: `ours` and CONTESTANTS are made once, of the options (a LookupError says
why one cannot be had). Results are o, dq, dk, dv and lse, those that a contestant has: f32 [tokens][heads][d], lse
[tokens][heads]. Peers have one head dim; a problem whose values have another one is for ours alone.

All get the same numbers, each in the layout that suits it; nothing is converted, copied or allocated by us in a call.
"""

import ctypes
import glob
import os
import re
import shutil
import subprocess
import sys
import warnings

import numpy as np

import common
import rates

POINTER, INT32, INT64, DOUBLE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
NAIVE_TOKENS = 4096  # its memory grows with their square
TABLE = 64  # rows of which others are made


# ---- problems ----

class Problem:
    """One attention: its shape, its masks as in upipe_mask (packed: lengths of packed sequences), q, k, v and the
    gradient of o, f32 [tokens][heads][d] that the data type holds. Peers know no mask but `causal`.

    keys      as many as tokens, unless given
    v_dim     head dim of values; that of queries and keys, unless given
    repeated  every row is one of 64, and q five times as large, in place of normal values
    """

    def __init__(self, tokens, heads, head_dim, dtype, causal, *, keys=None, v_dim=None, window=0, packed=(),
                 softcap=0, repeated=False):
        self.tokens, self.heads, self.head_dim, self.dtype, self.causal = tokens, heads, head_dim, dtype, causal
        self.keys, self.window, self.softcap, self.repeated = keys or tokens, window, softcap, repeated
        self.v_dim = v_dim or head_dim
        self.cu_seqlens = np.cumsum([0, *packed], dtype=np.int64)
        self.fields = {'head_dim': head_dim, 'dtype': dtype, 'causal': causal, 'tokens': tokens, 'heads': heads}
        if v_dim:
            self.fields['v_dim'] = v_dim
        self.about = f'head dim {self.dims()}, {dtype}, {"causal" if causal else "full"}'
        random = np.random.default_rng(1)
        made = [self.draw(random, n, d) for n, d in ((tokens, head_dim), (self.keys, head_dim), (self.keys, self.v_dim),
                                                     (tokens, self.v_dim))]
        if repeated:
            made[0] *= np.float32(5)
        self.q, self.k, self.v, self.go = [rates.to_f32(rates.to_bf16(x)) for x in made] if dtype == 'bf16' else made

    def dims(self):
        return str(self.head_dim) if self.v_dim == self.head_dim else f'{self.head_dim}/{self.v_dim}'

    def draw(self, random, n, d):
        shape = TABLE if self.repeated else n, self.heads, d
        values = random.standard_normal(shape, dtype=np.float32)
        return values[random.integers(TABLE, size=n)] if self.repeated else values

    def sight(self):
        """Row i sees the keys [first[i], end[i])."""
        rows = np.arange(self.tokens)
        if not self.causal and not self.window and len(self.cu_seqlens) == 1:
            return np.zeros_like(rows), np.full_like(rows, self.keys)
        borders = self.cu_seqlens if len(self.cu_seqlens) > 1 else np.array([0, self.tokens])
        behind = np.searchsorted(borders, rows, side='right')
        first, end = borders[behind - 1], borders[behind]
        if self.window:
            first = np.maximum(first, rows - self.window + 1)
        return first, np.minimum(end, rows + 1) if self.causal else end

    def pairs(self):
        """Visible pairs of a query and a key, of all heads."""
        first, end = self.sight()
        return self.heads * int((end - first).sum())

    def flop(self, op):
        """2 d operations a pair and product: one with keys and one with values forward; three and two backward, as scores
        are recomputed."""
        return 2 * self.pairs() * (self.head_dim + self.v_dim if op == 'fwd' else 3 * self.head_dim + 2 * self.v_dim)

    def stored(self, x):
        return rates.to_bf16(x) if self.dtype == 'bf16' else x.copy()

    def reference(self):
        """o, lse, dq, dk, dv in double precision, by the definition."""
        out = {'o': np.empty(self.go.shape), 'dq': np.empty(self.q.shape), 'dk': np.empty(self.k.shape),
               'dv': np.empty(self.v.shape)}
        out['lse'] = np.empty((self.tokens, self.heads))
        scale, keys = self.head_dim ** -0.5, np.arange(self.keys)
        first, end = (side[:, None] for side in self.sight())
        for h in range(self.heads):
            q, k, v, go = (x[:, h].astype(np.float64) for x in (self.q, self.k, self.v, self.go))
            w, slope = q @ k.T * scale, scale
            if self.softcap:
                w = self.softcap * np.tanh(w / self.softcap)
                slope = scale * (1 - (w / self.softcap) ** 2)
            w[(keys < first) | (keys >= end)] = -np.inf
            most = w.max(axis=1, keepdims=True)
            np.exp(w - most, out=w)
            total = w.sum(axis=1, keepdims=True)
            w /= total
            gs = go @ v.T
            gs -= (w * gs).sum(axis=1, keepdims=True)
            gs *= w
            gs *= slope
            out['o'][:, h], out['dq'][:, h], out['dk'][:, h], out['dv'][:, h] = w @ v, gs @ k, gs.T @ q, w.T @ go
            out['lse'][:, h] = (most + np.log(total))[:, 0]
        return out


def pointer(array):
    return array.ctypes.data_as(POINTER)


# ---- this library ----

class Case(ctypes.Structure):
    """bench_case of kernels.c"""
    _fields_ = [*((name, POINTER) for name in ('q', 'k', 'v', 'o', 'go', 'dq', 'dk', 'dv', 'lse', 'delta', 'work',
                                               'cu_seqlens')),
                *((name, INT64) for name in ('work_bytes', 'tokens', 'keys', 'cu_seqlens_n', 'window')),
                *((name, INT32) for name in ('heads', 'head_dim', 'v_dim', 'causal', 'bf16')), ('softcap', ctypes.c_float)]


class Ours(common.Kernels):
    def __init__(self, options):
        case, why = ctypes.POINTER(Case), ctypes.c_char_p
        super().__init__('kernels.c', options.isa, ('bench_use_bf16', why, [POINTER]), ('bench_bf16_name', why, []),
                         ('bench_bandwidth', DOUBLE, [POINTER, INT64]), ('bench_attn_bytes', INT64, [POINTER, case]),
                         ('bench_attn_fwd', why, [POINTER, case]), ('bench_attn_bwd', why, [POINTER, case]))

    def bandwidth(self, threads, floats):
        return self.c.bench_bandwidth(self.open(threads), floats)

    def serve(self, p, threads):
        handle = self.open(threads)
        arrays = {name: p.stored(getattr(p, name)) for name in ('q', 'k', 'v', 'go')}
        arrays.update(o=np.zeros_like(arrays['go']), dq=np.zeros_like(arrays['q']))
        arrays.update(dk=np.zeros_like(p.k), dv=np.zeros_like(p.v))
        arrays.update({name: np.zeros((p.tokens, p.heads), np.float32) for name in ('lse', 'delta')})
        case = Case(tokens=p.tokens, keys=p.keys, heads=p.heads, head_dim=p.head_dim, v_dim=p.v_dim,
                    causal=p.causal, bf16=p.dtype == 'bf16', window=p.window, softcap=p.softcap,
                    **{name: array.ctypes.data for name, array in arrays.items()})
        if len(p.cu_seqlens) > 1:
            case.cu_seqlens, case.cu_seqlens_n = p.cu_seqlens.ctypes.data, len(p.cu_seqlens) - 1
        case.work_bytes = self.c.bench_attn_bytes(handle, case)
        work = common.aligned(case.work_bytes)
        case.work = work.ctypes.data
        case.kept = arrays, work, p.cu_seqlens  # as long as somebody may call

        def results():
            return {name: rates.to_f32(arrays[name])
                    for name in ('o', 'lse', 'dq', 'dk', 'dv')}
        return {'fwd': lambda: common.check(self.c.bench_attn_fwd(handle, case)),
                'bwd': lambda: common.check(self.c.bench_attn_bwd(handle, case)), 'results': results}


class Bf16(Ours):
    """This library's other attention, a table entry for processors with bf16 instructions."""

    def __init__(self, options):
        super().__init__(options)
        why = self.c.bench_use_bf16(self.open(1))
        if why:
            raise LookupError(why.decode())
        self.about = self.c.bench_bf16_name().decode()

    def serve(self, p, threads):
        if p.dtype != 'bf16':
            return None
        self.c.bench_use_bf16(self.open(threads))
        return super().serve(p, threads)


# ---- peers ----

class Naive:
    """Plain loops as in llm.c."""

    def __init__(self, _):
        threads = ['-fopenmp'] if common.accepts('-fopenmp') else []
        self.library = common.compile_library('naive.c', 'native', ['-Ofast', *threads], threads)
        self.about = (f'C as in llm.c, {" ".join(["-Ofast", "-march=native", *threads])}, f32, '
                      f'up to {NAIVE_TOKENS} tokens')

    def serve(self, p, threads):
        if p.dtype != 'f32' or p.tokens > NAIVE_TOKENS or self.library.naive_threads(threads) != threads:
            return None
        q, k, v, go = (x.copy() for x in (p.q, p.k, p.v, p.go))
        o, dq, dk, dv = (np.zeros_like(q) for _ in range(4))
        att = np.zeros((p.heads, p.tokens, p.tokens), np.float32)
        gatt = np.zeros((p.heads, p.tokens), np.float32)
        shape = [INT64(p.tokens), INT64(p.heads), INT64(p.head_dim), INT32(p.causal)]
        return {'fwd': lambda: self.library.naive_fwd(*map(pointer, (o, att, q, k, v)), *shape),
                'bwd': lambda: self.library.naive_bwd(*map(pointer, (dq, dk, dv, gatt, att, go, q, k, v)), *shape),
                'results': lambda: {'o': o, 'dq': dq, 'dk': dk, 'dv': dv}}


def import_torch():
    try:
        import torch
    except (ImportError, OSError) as error:
        raise LookupError(f'PyTorch cannot be imported: {error}') from error
    return torch


class Torch:
    """scaled_dot_product_attention with its FlashAttention for CPUs, [1][heads][tokens][d]."""

    def __init__(self, _):
        self.torch = import_torch()
        self.about = (f'PyTorch {self.torch.__version__}, FLASH_ATTENTION, '
                      f'{self.torch.backends.cpu.get_cpu_capability()}')

    def tensors(self, p):
        """q, k, v and the gradient of o."""
        kind = self.torch.bfloat16 if p.dtype == 'bf16' else self.torch.float32
        return [self.torch.from_numpy(np.ascontiguousarray(x.transpose(1, 0, 2)))[None].to(kind)
                for x in (p.q, p.k, p.v, p.go)]

    def serve(self, p, threads):
        torch, made = self.torch, {}
        torch.set_num_threads(threads)
        *inputs, go = self.tensors(p)

        def forward(tensors):
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=bool(p.causal))

        def fwd():
            with torch.no_grad():
                made['o'] = forward(inputs)

        leaves = [x.clone().requires_grad_() for x in inputs]
        out = forward(leaves)
        if 'FlashAttentionForCpu' not in out.grad_fn.name():
            common.fail(f'PyTorch took {out.grad_fn.name()} in place of its flash attention')

        def bwd():
            made['dq'], made['dk'], made['dv'] = torch.autograd.grad(out, leaves, go, retain_graph=True)
        return {'fwd': fwd, 'bwd': bwd, 'results': lambda: self.arrays(made)}

    @staticmethod
    def arrays(made):
        return {name: x[0].float().numpy().transpose(1, 0, 2) for name, x in made.items()}


class OneDnn(Torch):
    """oneDNN's graph API: the partition of product, scale, mask, softmax and product that TorchScript hands to it.
    Forward alone; a causal mask is a tensor that it adds, and hidden pairs are computed too."""

    def __init__(self, options):
        super().__init__(options)
        if not hasattr(self.torch.jit, 'enable_onednn_fusion'):
            raise LookupError("this PyTorch does not hand graphs to oneDNN")
        found = re.search(r'MKL-DNN v([\d.]+)', self.torch.__config__.show())
        self.about = (f'oneDNN {found.group(1) if found else "?"} of PyTorch {self.torch.__version__}, graph API, '
                      'forward alone')

    def serve(self, p, threads):
        torch, made = self.torch, {}
        torch.set_num_threads(threads)
        q, k, v, _ = self.tensors(p)
        inputs, root = [q, k, v], p.head_dim ** 0.5
        if p.causal:
            inputs.append(torch.full((p.tokens, p.tokens), -1e30, dtype=q.dtype).triu(1)[None, None])

        class Attention(torch.nn.Module):
            def forward(self, q, k, v, mask=None):
                s = torch.matmul(q, k.transpose(-1, -2)) / root
                return torch.matmul(torch.softmax(s if mask is None else s + mask, dim=-1), v)

        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter('ignore')  # TorchScript is said to be deprecated
            torch.jit.enable_onednn_fusion(True)
            fused = torch.jit.freeze(torch.jit.trace(Attention().eval(), tuple(inputs)))
            for _ in range(2):  # the graph is made in the first calls
                fused(*inputs)
            torch.jit.enable_onednn_fusion(False)
            if 'oneDNNFusionGroup' not in str(torch.jit.last_executed_optimized_graph()):
                common.log(f'left out: oneDNN in {p.dtype}, as TorchScript hands it no such graph with these instructions')
                return None

        def fwd():
            with torch.no_grad():
                made['o'] = fused(*inputs)
        return {'fwd': fwd, 'results': lambda: self.arrays(made)}


class Ggml:
    """ggml_flash_attn_ext: forward alone. Queries in f32, keys and values in f32 or, in bf16's place, in f16, which is
    its own default."""

    def __init__(self, options):
        source = os.path.join(common.BUILD, 'llama-cpp-python', 'vendor', 'llama.cpp', 'ggml')
        made = os.path.join(common.BUILD, f'ggml_{options.peer_isa}')
        if not os.path.isdir(source):
            raise LookupError("ggml's sources could not be fetched from PyPI")
        self.build(source, made, options.peer_isa)
        for part in 'base', 'cpu':
            found = glob.glob(os.path.join(made, '**', f'libggml-{part}.so'), recursive=True)
            setattr(self, part, ctypes.CDLL(found[0], mode=ctypes.RTLD_GLOBAL))
        common.declare(self.base, ('ggml_version', ctypes.c_char_p, []), ('ggml_tensor_overhead', ctypes.c_size_t, []),
                       ('ggml_graph_overhead', ctypes.c_size_t, []), ('ggml_init', POINTER, [Memory]),
                       ('ggml_free', None, [POINTER]),
                       ('ggml_new_tensor_3d', POINTER, [POINTER, ctypes.c_int, INT64, INT64, INT64]),
                       ('ggml_get_data', POINTER, [POINTER]),
                       ('ggml_flash_attn_ext', POINTER, [POINTER] * 5 + [ctypes.c_float] * 3),
                       ('ggml_new_graph', POINTER, [POINTER]), ('ggml_build_forward_expand', None, [POINTER, POINTER]),
                       ('ggml_backend_graph_compute', ctypes.c_int, [POINTER, POINTER]))
        common.declare(self.cpu, ('ggml_backend_cpu_init', POINTER, []),
                       ('ggml_backend_cpu_set_n_threads', None, [POINTER, ctypes.c_int]))
        self.backend = self.cpu.ggml_backend_cpu_init()
        self.about = f'ggml {self.base.ggml_version().decode()}, built for {options.peer_isa}, forward alone'

    @staticmethod
    def build(source, made, isa):
        if os.path.exists(os.path.join(made, 'built')):
            return
        cmake = shutil.which('cmake', path=os.path.dirname(sys.executable)) or shutil.which('cmake')
        if not cmake:
            raise LookupError('ggml cannot be built: there is no cmake')
        common.log(f'building ggml for {isa}: some two minutes')
        # The package lacks this file, which only an installation needs.
        with open(os.path.join(source, 'ggml.pc.in'), 'a', encoding='utf-8'):
            pass
        flags = {'native': ['-DGGML_NATIVE=ON'], 'avx2': ['-DGGML_NATIVE=OFF'],
                 'avx512': ['-DGGML_NATIVE=OFF', '-DGGML_AVX512=ON']}[isa]
        for command in ([cmake, '-S', source, '-B', made, '-DCMAKE_BUILD_TYPE=Release', '-DGGML_BUILD_TESTS=OFF',
                         '-DGGML_BUILD_EXAMPLES=OFF', *flags],
                        [cmake, '--build', made, '-j', str(common.cores())]):
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode != 0:
                raise LookupError(f'ggml cannot be built: {" ".join(command)}: {done.stderr.strip()[-300:]}')
        with open(os.path.join(made, 'built'), 'w', encoding='utf-8'):
            pass

    def tensor(self, context, array, kind):
        """A tensor of ggml's, whose first dimension is our last, with these values."""
        dims = (*array.shape[::-1], 1)[:3]
        made = self.base.ggml_new_tensor_3d(context, kind, *dims)
        ctypes.memmove(self.base.ggml_get_data(made), array.ctypes.data, array.nbytes)
        return made

    def serve(self, p, threads):
        kind, store = (0, np.float32) if p.dtype == 'f32' else (1, np.float16)  # GGML_TYPE_F32, GGML_TYPE_F16
        q = np.ascontiguousarray(p.q.transpose(1, 0, 2))
        k, v = (np.ascontiguousarray(x.transpose(1, 0, 2)).astype(store) for x in (p.k, p.v))
        mask = None
        if p.causal:
            mask = np.zeros((p.tokens, p.tokens), np.float16)
            for row in range(p.tokens):
                mask[row, row + 1:] = -np.inf
        size = 2 * q.nbytes + k.nbytes + v.nbytes + (mask.nbytes if p.causal else 0)
        context = self.base.ggml_init(Memory(size + 16 * self.base.ggml_tensor_overhead() +
                                             self.base.ggml_graph_overhead() + 4096, None, False))
        out = self.base.ggml_flash_attn_ext(context, self.tensor(context, q, 0), self.tensor(context, k, kind),
                                            self.tensor(context, v, kind),
                                            self.tensor(context, mask, 1) if p.causal else None,
                                            p.head_dim ** -0.5, 0.0, 0.0)
        graph = self.base.ggml_new_graph(context)
        self.base.ggml_build_forward_expand(graph, out)

        def fwd():
            # Set here, as a call of another number of threads may have come between.
            self.cpu.ggml_backend_cpu_set_n_threads(self.backend, threads)
            if self.base.ggml_backend_graph_compute(self.backend, graph) != 0:
                common.fail('ggml_backend_graph_compute failed')

        def results():
            at = ctypes.cast(self.base.ggml_get_data(out), ctypes.POINTER(ctypes.c_float))
            return {'o': np.ctypeslib.as_array(at, (p.tokens, p.heads, p.head_dim))}
        return {'fwd': fwd, 'results': results, 'free': lambda: self.base.ggml_free(context)}


class Memory(ctypes.Structure):
    """ggml_init_params"""
    _fields_ = [('mem_size', ctypes.c_size_t), ('mem_buffer', POINTER), ('no_alloc', ctypes.c_bool)]


CONTESTANTS = {'torch': Torch, 'onednn': OneDnn, 'ggml': Ggml, 'naive': Naive, 'bf16': Bf16}
