"""linear_rules.py -- the rules of linear attention by this library and in double precision, for linear.py and states.py

    library = Library('native')
    call = library.call(Problem(tokens, heads, dim, 'delta'), threads)
    call.run(0), call.run(1)                 forward, backward: call.arrays has o, out, dq and so on
"""

import ctypes

import numpy as np

import common

POINTER, INT32, INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
INPUTS = ['q', 'k', 'v', 'g', 'beta', 'state', 'dout', 'dend']
RESULTS = {'o': 'v', 'out': 'state', 'dq': 'q', 'dk': 'k', 'dv': 'v', 'dg': 'g', 'dbeta': 'g', 'dstate': 'state'}
GATE = 0.05  # the mean logarithm of a decay
CHUNK = 64
# Products with a state, and of rows of a chunk up to the diagonal, that a chunked rule needs.
WORK = {('fwd', 'delta'): (3, 4), ('bwd', 'delta'): (8, 11), ('fwd', 'decay'): (2, 2), ('bwd', 'decay'): (5, 5)}


class Problem:
    """A sequence: rows of q and k of length 1, as the models have them; `gate`, the mean of -g, whose values are
    uniform. With the rule `decay` there is no beta."""

    def __init__(self, tokens, heads, dim, rule, gate=GATE, seed=1):
        draw = np.random.default_rng(seed)
        self.tokens, self.heads, self.dim, self.rule, self.dtype = tokens, heads, dim, rule, 'f32'
        self.fields = {'rule': rule, 'head_dim': dim, 'dtype': 'f32', 'heads': heads, 'tokens': tokens}
        self.about = f'dim {dim}, {rule}'

        def normal(*shape):
            return draw.standard_normal(shape, dtype=np.float32)
        self.arrays = {name: normal(tokens, heads, dim) for name in ('q', 'k', 'v', 'dout')}
        for name in 'q', 'k':
            self.arrays[name] /= np.linalg.norm(self.arrays[name], axis=-1, keepdims=True)
        self.arrays['g'] = -2 * np.float32(gate) * draw.random((tokens, heads), dtype=np.float32)
        if rule == 'delta':
            self.arrays['beta'] = draw.random((tokens, heads), dtype=np.float32)
        self.arrays.update(state=normal(heads, dim, dim), dend=normal(heads, dim, dim))

    def flop(self, op):
        """Squares of the state and triangles of a chunk, of each token and head."""
        squares, triangles = WORK[op, self.rule]
        return self.tokens * self.heads * self.dim * (2 * squares * self.dim + CHUNK * triangles)

    def reference(self):
        """All results in double precision, token by token: o, out and the gradients."""
        x = {name: array.astype(np.float64) for name, array in self.arrays.items()}
        scale, decay, delta = self.dim ** -0.5, np.exp(x['g']), self.rule == 'delta'
        beta = x['beta'] if delta else np.ones_like(x['g'])
        truth = {name: np.zeros_like(x[like]) for name, like in RESULTS.items()}
        states, values, rest = [x['state']], [], []
        for t in range(self.tokens):
            kept = decay[t][:, None, None] * states[-1]
            rest.append(x['v'][t] - (np.einsum('hab,ha->hb', kept, x['k'][t]) if delta else 0))
            values.append(beta[t][:, None] * rest[-1])
            states.append(kept + np.einsum('ha,hb->hab', x['k'][t], values[-1]))
            truth['o'][t] = scale * np.einsum('hab,ha->hb', states[-1], x['q'][t])
        truth['out'], ds = states[-1], x['dend'].copy()
        for t in reversed(range(self.tokens)):
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


class Case(ctypes.Structure):
    """bench_rule of linear.c"""
    _fields_ = [*((name, POINTER) for name in (*INPUTS, *RESULTS, 'work')),
                *((name, INT64) for name in ('work_bytes', 'tokens', 'first')),
                *((name, INT32) for name in ('key_heads', 'heads', 'key_dim', 'value_dim'))]


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
        self.work = common.aligned(self.case.work_bytes)
        self.case.work = self.work.ctypes.data

    def run(self, backward):
        common.check(self.library.bench_linear(self.handle, self.case, backward))

    def products(self, backward):
        """A call of the products alone, until those of another call are noted."""
        common.check(self.library.bench_products(self.handle, self.case, backward))
        scratch = common.aligned(self.case.work_bytes)
        return lambda: common.check(self.library.bench_products_run(self.handle, scratch.ctypes.data, len(scratch)))

    def exact(self, state):
        """o in double precision, one head; state [dim][dim] goes on."""
        o = np.zeros((self.case.tokens, self.case.value_dim))
        self.library.bench_linear_f64(self.case, state.ctypes.data, o.ctypes.data)
        return o


class Library(common.Kernels):
    def __init__(self, isa):
        case, why = ctypes.POINTER(Case), ctypes.c_char_p
        super().__init__('linear.c', isa, ('bench_linear_bytes', INT64, [POINTER, case]),
                         ('bench_linear', why, [POINTER, case, INT32]), ('bench_products', why, [POINTER, case, INT32]),
                         ('bench_products_run', why, [POINTER, POINTER, INT64]),
                         ('bench_linear_f64', None, [case, POINTER, POINTER]))

    def call(self, problem, threads, first=0):
        return Call(self.c, self.open(threads), problem, first)


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
