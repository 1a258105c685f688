"""linear_rules.py -- the rules of linear attention by this library and in double precision, for linear.py and states.py

    library = Library('native')
    call = library.call(Problem(tokens, heads, dim, 'delta'), threads)
    call.run(0), call.run(1)                 forward, backward: call.arrays has o, out, dq and so on
    reference(problem)                       all of it in double precision, token by token
"""

import ctypes

import numpy as np

import common

POINTER, INT32, INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
INPUTS = ['q', 'k', 'v', 'g', 'beta', 'state', 'dout', 'dend']
RESULTS = {'o': 'v', 'out': 'state', 'dq': 'q', 'dk': 'k', 'dv': 'v', 'dg': 'g', 'dbeta': 'g', 'dstate': 'state'}
GATE = 0.05  # the mean logarithm of a decay


class Problem:
    """A sequence: rows of q and k of length 1, as the models have them; `gate`, the mean of -g, whose values are
    uniform. With the rule `decay` there is no beta."""

    def __init__(self, tokens, heads, dim, rule, gate=GATE, seed=1):
        draw = np.random.default_rng(seed)
        self.tokens, self.heads, self.dim, self.rule = tokens, heads, dim, rule

        def normal(*shape):
            return draw.standard_normal(shape, dtype=np.float32)
        self.arrays = {name: normal(tokens, heads, dim) for name in ('q', 'k', 'v', 'dout')}
        for name in 'q', 'k':
            self.arrays[name] /= np.linalg.norm(self.arrays[name], axis=-1, keepdims=True)
        self.arrays['g'] = -2 * np.float32(gate) * draw.random((tokens, heads), dtype=np.float32)
        if rule == 'delta':
            self.arrays['beta'] = draw.random((tokens, heads), dtype=np.float32)
        self.arrays.update(state=normal(heads, dim, dim), dend=normal(heads, dim, dim))


class Case(ctypes.Structure):
    """bench_rule of linear.c"""
    _fields_ = [*((name, POINTER) for name in (*INPUTS, *RESULTS, 'work')),
                *((name, INT64) for name in ('work_bytes', 'tokens', 'first')),
                *((name, INT32) for name in ('key_heads', 'heads', 'key_dim', 'value_dim'))]


def check(why):
    if why:
        common.fail(why.decode())


class Call:
    """A problem's arrays and results, and the calls over them."""

    def __init__(self, library, handle, problem, first):
        self.library, self.handle = library, handle
        given = problem.arrays
        self.arrays = {**given, **{name: np.zeros_like(given[like]) for name, like in RESULTS.items()
                                   if name != 'dbeta' or 'beta' in given}}
        self.case = Case(tokens=problem.tokens, first=first, key_heads=problem.heads, heads=problem.heads,
                         key_dim=problem.dim, value_dim=problem.dim,
                         **{name: array.ctypes.data for name, array in self.arrays.items()})
        self.case.work_bytes = library.bench_linear_bytes(handle, self.case)
        self.work = np.zeros(self.case.work_bytes + 64, np.uint8)
        self.case.work = (self.work.ctypes.data + 63) // 64 * 64

    def run(self, backward):
        check(self.library.bench_linear(self.handle, self.case, backward))

    def products(self, backward):
        """A call of the products alone, until those of another call are noted."""
        check(self.library.bench_products(self.handle, self.case, backward))
        scratch = np.zeros(self.case.work_bytes + 64, np.uint8)
        work = (scratch.ctypes.data + 63) // 64 * 64

        def call(_=scratch):  # which it keeps
            check(self.library.bench_products_run(self.handle, work, self.case.work_bytes))
        return call

    def exact(self, state):
        """o in double precision, one head; state [dim][dim] goes on."""
        o = np.zeros((self.case.tokens, self.case.value_dim))
        self.library.bench_linear_f64(self.case, state.ctypes.data, o.ctypes.data)
        return o


class Library:
    def __init__(self, isa):
        self.library, self.handles = common.compile_library('linear.c', isa), {}
        case = ctypes.POINTER(Case)
        for name, result, argtypes in (
                ('bench_open', POINTER, [INT32]), ('bench_name', ctypes.c_char_p, [POINTER]),
                ('bench_peak', ctypes.c_double, [POINTER]), ('bench_linear_bytes', INT64, [POINTER, case]),
                ('bench_linear', ctypes.c_char_p, [POINTER, case, INT32]),
                ('bench_products', ctypes.c_char_p, [POINTER, case, INT32]),
                ('bench_products_run', ctypes.c_char_p, [POINTER, POINTER, INT64]),
                ('bench_linear_f64', None, [case, POINTER, POINTER])):
            call = getattr(self.library, name)
            call.restype, call.argtypes = result, argtypes
        self.about = self.library.bench_name(self.open(1)).decode()

    def open(self, threads):
        """The handle of so many threads, opened once."""
        if threads not in self.handles:
            self.handles[threads] = self.library.bench_open(threads)
            if not self.handles[threads]:
                common.fail(f'no {threads} threads, or no memory for them')
        return self.handles[threads]

    def peak(self, threads):
        return self.library.bench_peak(self.open(threads))

    def call(self, problem, threads, first=0):
        return Call(self.library, self.open(threads), problem, first)


class Transformers:
    """The gated delta rule of Qwen3-Next in chunks, on PyTorch's operators, as it stands in transformers."""

    def __init__(self, _=None):
        try:
            import torch
            import transformers
            from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
        except (ImportError, OSError) as error:
            raise LookupError(f'transformers cannot be imported: {error}') from error
        torch.set_num_threads(1)
        self.torch, self.of_chunks = torch, torch_chunk_gated_delta_rule
        self.about = f'transformers {transformers.__version__}, PyTorch {torch.__version__}'

    def tensor(self, problem, name):
        return self.torch.from_numpy(problem.arrays[name])[None]

    def rule(self, x):
        """o and the state behind it, of q, k, v, g, beta, state."""
        return self.of_chunks(*x[:5], initial_state=x[5], output_final_state=True)


def reference(problem):
    """All results in double precision, token by token: o, out and the gradients."""
    x = {name: array.astype(np.float64) for name, array in problem.arrays.items()}
    scale, decay, delta = problem.dim ** -0.5, np.exp(x['g']), problem.rule == 'delta'
    beta = x['beta'] if delta else np.ones_like(x['g'])
    truth = {name: np.zeros_like(x[like]) for name, like in RESULTS.items()}
    states, values, rest = [x['state']], [], []
    for t in range(problem.tokens):
        kept = decay[t][:, None, None] * states[-1]
        rest.append(x['v'][t] - (np.einsum('hab,ha->hb', kept, x['k'][t]) if delta else 0))
        values.append(beta[t][:, None] * rest[-1])
        states.append(kept + np.einsum('ha,hb->hab', x['k'][t], values[-1]))
        truth['o'][t] = scale * np.einsum('hab,ha->hb', states[-1], x['q'][t])
    truth['out'], ds = states[-1], x['dend'].copy()
    for t in reversed(range(problem.tokens)):
        k, dout, kept = x['k'][t], x['dout'][t], decay[t][:, None, None] * states[t]
        ds += scale * np.einsum('ha,hb->hab', x['q'][t], dout)
        truth['dq'][t] = scale * np.einsum('hab,hb->ha', states[t + 1], dout)
        du = np.einsum('hab,ha->hb', ds, k)
        truth['dk'][t] = np.einsum('hab,hb->ha', ds, values[t])
        truth['dv'][t] = beta[t][:, None] * du
        truth['dbeta'][t] = (du * rest[t]).sum(-1)
        if delta:
            truth['dk'][t] -= np.einsum('hab,hb->ha', kept, truth['dv'][t])
            ds -= np.einsum('ha,hb->hab', k, truth['dv'][t])
        truth['dg'][t] = (kept * ds).sum((1, 2))
        ds *= decay[t][:, None, None]
    truth['dstate'] = ds
    if not delta:
        del truth['dbeta']
    return truth
