#!/usr/bin/env python3
"""make_golden.py OUT -- writes two_layers.safetensors: a small Llama, its loss and all its gradients in f64

The gradients come from an automatic differentiator (HIPS autograd) and are checked against finite differences, so
nothing here shares a derivation with the C code. Of the same model a naive implementation in f32 is measured too, in
several orders of summation: tests/lib/tolerance.h compares the C code's errors with its errors. README.md says more.
"""

import json
import os
import struct
import sys
from importlib.metadata import version

# One thread, so that a product sums in the same order in every run; NumPy reads this when it is imported.
os.environ['OPENBLAS_NUM_THREADS'] = '1'

import autograd
import autograd.numpy as anp
import numpy as np
from autograd.extend import defvjp, primitive

AUTOGRAD = version('autograd')
SEED = 7
VOCAB, DIM, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 24, 32, 40, 4, 2, 32, 2
BATCH, TOKENS = 2, 16
NORM_EPS, ROPE_THETA = 1e-5, 10000.0
EMBED, HEAD, NORM = 'model.embed_tokens.weight', 'lm_head.weight', 'model.norm.weight'

# Orders in which f32 sums: NumPy's own, and plain loops up and down, multiply and add apart or fused.
WAYS = ['numpy', 'up', 'down', 'up fused', 'down fused']


# ---- the model ----

def shapes():
    """Name -> shape, as Hugging Face names and stores them: [out][in], norm weights [n]."""
    names = {EMBED: (VOCAB, DIM)}
    for i in range(LAYERS):
        layer = f'model.layers.{i}.'
        names |= {
            layer + 'input_layernorm.weight': (DIM,),
            layer + 'self_attn.q_proj.weight': (HEADS * HEAD_DIM, DIM),
            layer + 'self_attn.k_proj.weight': (KV_HEADS * HEAD_DIM, DIM),
            layer + 'self_attn.v_proj.weight': (KV_HEADS * HEAD_DIM, DIM),
            layer + 'self_attn.o_proj.weight': (DIM, HEADS * HEAD_DIM),
            layer + 'self_attn.q_norm.weight': (HEAD_DIM,),
            layer + 'self_attn.k_norm.weight': (HEAD_DIM,),
            layer + 'post_attention_layernorm.weight': (DIM,),
            layer + 'mlp.gate_proj.weight': (HIDDEN, DIM),
            layer + 'mlp.up_proj.weight': (HIDDEN, DIM),
            layer + 'mlp.down_proj.weight': (DIM, HIDDEN),
        }
    return names | {NORM: (DIM,), HEAD: (VOCAB, DIM)}


def draw():
    """Weights (f32), tokens, targets and biases (f32). RandomState's streams are frozen: every NumPy draws the same."""
    random = np.random.RandomState(SEED)
    weights = {}
    for name, shape in shapes().items():
        x = random.standard_normal(shape)
        if len(shape) == 1:
            x = 1 + 0.2 * x
        else:
            # As a head the embedding table must not saturate the softmax.
            x = x * 0.4 if name == EMBED else x / np.sqrt(shape[1])
        weights[name] = x.astype(np.float32)
    tokens = random.randint(0, VOCAB, (BATCH, TOKENS)).astype(np.int32)
    # Each token predicts the next one, the last one nothing. Valid targets in the four quarters of the sequence,
    # both rows together: 7, 8, 4, 6.
    targets = np.full_like(tokens, -1)
    targets[:, :-1] = tokens[:, 1:]
    targets[1, 2] = -1
    targets[0, 8:12] = -1
    biases = {}
    for i in range(LAYERS):
        for name in 'q_proj', 'k_proj', 'v_proj', 'o_proj':
            weight = f'model.layers.{i}.self_attn.{name}.weight'
            bias = 0.5 * random.standard_normal(weights[weight].shape[0])
            biases[weight.replace('weight', 'bias')] = bias.astype(np.float32)
    return weights, tokens, targets, biases


class Arithmetic:
    """Products and sums of one type in one order; every sum of the model goes through here."""

    def __init__(self, dtype, way):
        self.dtype, self.way = dtype, way

        @primitive
        def loops(a, b):
            a, b = np.broadcast_arrays(a[..., None], b[..., None, :, :])
            steps = range(a.shape[-2])
            total = np.zeros(a.shape[:-2] + a.shape[-1:], dtype)
            for k in steps if 'up' in way else reversed(steps):
                if 'fused' in way:
                    # In f64 the product of two f32 is exact.
                    total = (total + a[..., k, :].astype(np.float64) * b[..., k, :]).astype(dtype)
                else:
                    total = total + a[..., k, :] * b[..., k, :]
            return total

        # Both operands have the same leading dimensions, so nothing broadcast has to be summed here.
        defvjp(loops,
               lambda y, a, b: lambda g: loops(g, np.swapaxes(b, -1, -2)),
               lambda y, a, b: lambda g: loops(np.swapaxes(a, -1, -2), g))
        self.loops = loops

    def product(self, a, b):
        """[..., m, k] times [..., k, n], with the same leading dimensions."""
        return anp.matmul(a, b) if self.way == 'numpy' else self.loops(a, b)

    def sum(self, x):
        """[..., n] -> [..., 1]."""
        if self.way == 'numpy':
            return anp.sum(x, axis=-1, keepdims=True)
        rows = anp.reshape(x, (-1, x.shape[-1]))
        return anp.reshape(self.loops(rows, np.ones((x.shape[-1], 1), self.dtype)), x.shape[:-1] + (1,))

    def linear(self, x, w):
        """x [..., in] times w [out, in] transposed."""
        y = self.product(anp.reshape(x, (-1, x.shape[-1])), anp.transpose(w))
        return anp.reshape(y, x.shape[:-1] + (w.shape[0],))

    def projection(self, x, w, name):
        """The same with the bias name.bias, if there is one. Its gradient is a sum over tokens: a product with ones,
        which sums as all products do."""
        y = self.linear(x, w[name + '.weight'])
        if name + '.bias' not in w:
            return y
        rows = np.ones((int(np.prod(y.shape[:-1])), 1), self.dtype)
        return y + anp.reshape(self.product(rows, anp.reshape(w[name + '.bias'], (1, -1))), y.shape)

    def number(self, x):
        return self.dtype(x)

    def rmsnorm(self, x, norm_weight):
        mean = self.sum(x * x) / self.number(x.shape[-1])
        return x / anp.sqrt(mean + self.number(NORM_EPS)) * norm_weight

    def rope(self, x):
        """x [B, heads, S, d]: the first half of a head is rotated against the second half."""
        half = HEAD_DIM // 2
        angles = np.arange(TOKENS)[:, None] * ROPE_THETA ** (-np.arange(half) / half)
        cos, sin = np.cos(angles).astype(self.dtype), np.sin(angles).astype(self.dtype)
        a, b = x[..., :half], x[..., half:]
        return anp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attention(self, x, w, layer):
        def heads(name, n, norm=None):
            y = anp.reshape(self.projection(x, w, layer + f'self_attn.{name}'), (BATCH, TOKENS, n, HEAD_DIM))
            if norm and layer + f'self_attn.{norm}.weight' in w:
                y = self.rmsnorm(y, w[layer + f'self_attn.{norm}.weight'])
            return anp.transpose(y, (0, 2, 1, 3))

        q = self.rope(heads('q_proj', HEADS, 'q_norm'))
        k = anp.repeat(self.rope(heads('k_proj', KV_HEADS, 'k_norm')), HEADS // KV_HEADS, axis=1)
        v = anp.repeat(heads('v_proj', KV_HEADS), HEADS // KV_HEADS, axis=1)
        scores = self.product(q, anp.swapaxes(k, -1, -2)) * self.number(HEAD_DIM ** -0.5)
        seen = np.tril(np.ones((TOKENS, TOKENS), bool))
        p = anp.where(seen, anp.exp(anp.where(seen, scores - self.greatest(scores, seen), 0)), 0)
        out = self.product(p / self.sum(p), v)
        out = anp.reshape(anp.transpose(out, (0, 2, 1, 3)), (BATCH, TOKENS, HEADS * HEAD_DIM))
        return self.projection(out, w, layer + 'self_attn.o_proj')

    @staticmethod
    def greatest(x, seen=True):
        """The row's maximum, a constant to the differentiator: softmax does not depend on it."""
        return np.max(np.where(seen, autograd.tracer.getval(x), -np.inf), axis=-1, keepdims=True)

    def loss(self, w, tokens, targets):
        """Mean over the valid targets of -log softmax. Without a head in w the embedding table is the head."""
        x = w[EMBED][tokens]
        for i in range(LAYERS):
            layer = f'model.layers.{i}.'
            x = x + self.attention(self.rmsnorm(x, w[layer + 'input_layernorm.weight']), w, layer)
            y = self.rmsnorm(x, w[layer + 'post_attention_layernorm.weight'])
            gate = self.linear(y, w[layer + 'mlp.gate_proj.weight'])
            up = self.linear(y, w[layer + 'mlp.up_proj.weight'])
            y = gate / (self.number(1) + anp.exp(-gate)) * up
            x = x + self.linear(y, w[layer + 'mlp.down_proj.weight'])
        logits = self.linear(self.rmsnorm(x, w[NORM]), w[HEAD if HEAD in w else EMBED])
        shifted = logits - self.greatest(logits)
        chosen = np.zeros(logits.shape, self.dtype)
        rows, columns = np.nonzero(targets >= 0)
        chosen[rows, columns, targets[rows, columns]] = 1
        losses = (anp.log(self.sum(anp.exp(shifted))) - self.sum(shifted * chosen))[rows, columns, 0]
        return anp.reshape(self.sum(losses), ()) / self.number(len(rows))


def run(dtype, way, weights, tokens, targets):
    """The loss and the gradients, name -> array; asserts that no other type crept in."""
    model = Arithmetic(dtype, way)
    typed = {name: x.astype(dtype) for name, x in weights.items()}
    gradients, loss = autograd.value_and_grad(model.loss)(typed, tokens, targets)[::-1]
    loss = np.asarray(loss)
    assert loss.dtype == dtype, loss.dtype
    for name, g in gradients.items():
        assert g.dtype == dtype and g.shape == weights[name].shape, (name, g.dtype, g.shape)
    return loss, gradients


# ---- checks ----

def check_differences(weights, tokens, targets, gradients):
    """Central differences of fourth order at the entry of each tensor with the greatest gradient, and at one more.
    Returns the greatest relative difference."""
    model = Arithmetic(np.float64, 'numpy')
    base = {name: x.astype(np.float64) for name, x in weights.items()}
    worst = 0
    for name, g in gradients.items():
        order = np.argsort(-np.abs(g), axis=None)
        for flat in order[[0, g.size // 4]]:
            at = np.unravel_index(flat, g.shape)
            step, values = 2e-3, []
            for times in (-2, -1, 1, 2):
                moved = dict(base)
                moved[name] = base[name].copy()
                moved[name][at] += times * step
                values.append(float(model.loss(moved, tokens, targets)))
            slope = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step)
            relative = abs(slope - g[at]) / abs(g[at])
            assert relative <= 1e-7, f'd loss / d {name}{list(at)} is {g[at]}, by differences {slope}'
            worst = max(worst, relative)
    return worst


def check_loops(weights, tokens, targets, loss, gradients):
    """The loops' own derivative, in f64, is the differentiator's of its matrix product."""
    other, others = run(np.float64, 'up', weights, tokens, targets)
    assert abs(other - loss) <= 1e-13 * abs(loss)
    for name, g in gradients.items():
        assert np.max(np.abs(others[name] - g)) <= 1e-12 * np.max(np.abs(g)), name


# ---- the file ----

def write(path, tensors):
    """safetensors: u64 length of the header, the header in JSON, the arrays one after another."""
    codes = {'float32': 'F32', 'float64': 'F64', 'int32': 'I32'}
    header, parts, at = {}, [], 0
    # The widest elements first, so that each array is aligned for its type.
    for name, x in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        data = x.astype(x.dtype.newbyteorder('<')).tobytes()
        header[name] = {'dtype': codes[x.dtype.name], 'shape': list(x.shape), 'data_offsets': [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as out:
        out.write(struct.pack('<Q', len(text)) + text + b''.join(parts))


def golden(weights, tokens, targets, prefix, keep):
    """Tensors of one model: its loss, the gradients that keep says, and the naive implementation's errors."""
    loss, gradients = run(np.float64, 'numpy', weights, tokens, targets)
    check_loops(weights, tokens, targets, loss, gradients)
    difference = check_differences(weights, tokens, targets, gradients)
    truth = {'loss': loss} | {'grad.' + name: g for name, g in gradients.items()}
    errors = {name: np.zeros(2) for name in truth}
    for way in WAYS:
        f32_loss, f32_gradients = run(np.float32, way, weights, tokens, targets)
        for name, x in ({'loss': f32_loss} | {'grad.' + n: g for n, g in f32_gradients.items()}).items():
            error = np.abs(x.astype(np.float64) - truth[name])
            errors[name] = np.maximum(errors[name], [np.max(error), np.mean(error)])
    print(f'{prefix or "untied"}: loss {float(loss):.15f}, finite differences agree to {difference:.1e}')
    tensors = {}
    for name, x in truth.items():
        short = name.removeprefix('grad.')
        if short != 'loss' and not keep(short):
            continue
        print(f'  {prefix}{name:50s} largest {np.max(np.abs(x)):.4f}, median {np.median(np.abs(x)):.4f}, '
              f'naive f32 error max {errors[name][0]:.1e}, mean {errors[name][1]:.1e}')
        tensors[prefix + name] = np.reshape(x, (1,)) if short == 'loss' else x
        tensors[f'{prefix}naive.{short}'] = errors[name]
    return tensors


def main():
    if len(sys.argv) != 2:
        sys.exit('usage: make_golden.py OUT')
    weights, tokens, targets, biases = draw()
    tensors = weights | biases | {'tokens': tokens, 'targets': targets}
    tensors |= golden(weights, tokens, targets, '', lambda name: True)
    tied = {name: x for name, x in weights.items() if name != HEAD}
    # Of the other models only small tensors are kept, for the file's sake.
    tensors |= golden(tied, tokens, targets, 'tied.', lambda name: name == EMBED or 'norm' in name)
    biased = {name: x for name, x in weights.items() if 'q_norm' not in name and 'k_norm' not in name} | biases
    tensors |= golden(biased, tokens, targets, 'biased.',
                      lambda name: name == EMBED or 'norm' in name or name in biases)
    write(sys.argv[1], tensors)
    valid = [int((targets[:, i:i + TOKENS // 4] >= 0).sum()) for i in range(0, TOKENS, TOKENS // 4)]
    print(f'valid targets in the quarters of the sequence: {valid}')
    print(f'{sys.argv[1]}: {len(tensors)} tensors, {os.path.getsize(sys.argv[1])} bytes; '
          f'NumPy {np.__version__}, autograd {AUTOGRAD}, seed {SEED}')


if __name__ == '__main__':
    main()
