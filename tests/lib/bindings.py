"""bindings.py -- what test_abi.py and test_torch.py give the bindings: handles and packed sequences drawn at random, and mistakes

    for seed in draws(10):              # checks.py
        desc, borders = draw_call(random.Random(seed))
"""

RANKS = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (2, 2), (1, 4)]  # of a team, and of a ring


def draw_call(draw):
    """A description of upipe_abi.Attention, and borders of packed sequences in its flattened batch; []: none."""
    ranks, ring = draw.choice(RANKS)
    kv_heads, group, tokens = draw.randint(1, 3), draw.randint(1, 3), draw.randint(12, 20)
    if min(ranks, ring) > 1:  # K and V go round of even heads
        kv_heads = ranks
    heads = kv_heads * max(group, -(-ranks // kv_heads))
    desc = {'tokens': tokens, 'batch': draw.randint(1, 3), 'ranks': ranks, 'ring': ring, 'heads': heads, 'kv_heads': kv_heads,
            'head_dim': draw.choice((32, 40)), 'chunk': draw.choice((0, ranks, heads)), 'causal': draw.randint(0, 1),
            'window': draw.choice((0, 0, draw.randint(1, tokens))), 'softcap': draw.choice((0.0, 2.0)), 'scale': draw.choice((0.0, 0.25)),
            'dtype': draw.randint(0, 1)}
    if ring > 1:
        desc |= {'layout': draw.randint(0, 2), **({'ring_mode': 1, 'ring_inner': 2} if ring == 4 else {'ring_mode': draw.randint(0, 2)})}
    borders = []
    if draw.random() < 0.6:
        for first in range(0, desc['batch'] * tokens, tokens):
            borders += [first, *sorted(draw.randint(first, first + tokens) for _ in range(draw.randint(0, 3)))]
        borders.append(desc['batch'] * tokens)
    return desc, borders


def sees(desc, borders, b, i, j):
    """Whether the query at position i of sequence b sees the key at position j."""
    same = sum(border <= b * desc['tokens'] + i for border in borders) == sum(border <= b * desc['tokens'] + j for border in borders)
    return same and not (desc.get('causal') and j > i) and not (desc.get('window') and j <= i - desc['window'])


def dense(q, k, v, sinks, desc, mask):
    """Attention of PyTorch's tensors in whole matrices, [batch][tokens][heads][head_dim], under a mask [batch][tokens][tokens]; in
    their type."""
    import torch  # test_abi.py needs none  # pylint: disable=import-outside-toplevel
    groups, cap = desc['heads'] // desc['kv_heads'], desc['softcap']
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = q @ k.transpose(2, 3) * (desc['scale'] or desc['head_dim']**-0.5)
    scores = (cap * torch.tanh(scores / cap) if cap else scores).masked_fill(~mask[:, None], float('-inf'))
    more = [] if sinks is None else [sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)]
    return (torch.cat([scores, *more], 3).softmax(3)[..., :k.shape[2]] @ v).transpose(1, 2)


def wrong_borders(tokens):
    """(batch, cu_seqlens, words of the refusal)."""
    both = 2 * tokens
    return [(1, [1, tokens], 'cu_seqlens begins at 1, not at 0'),
            (1, [-1, tokens], 'cu_seqlens begins at -1, not at 0'),
            (1, [0], '0 packed sequences, cu_seqlens is not NULL'),
            (1, [0, 6, 4, tokens], 'packed sequence 1 is [6, 4)'),
            (1, [0, tokens - 1], f'1 packed sequences up to {tokens - 1}, not 1 up to {tokens}, batch * tokens'),
            (1, [0, 5, 5], f'1 packed sequences up to 5, not 1 up to {tokens}'),
            (1, [0, both], f'packed sequence 0 is [0, {both}), in a sequence of the batch that ends at {tokens}'),
            (1, [0, tokens, 5], f'1 packed sequences up to {tokens}, not 2 up to {tokens}'),
            (1, [0, 2**63 - 1], 'packed sequence 0 is [0, 9223372036854775807)'),
            (2, [0, 5, tokens], f'2 packed sequences up to {tokens}, not 2 up to {both}'),
            (2, [0, tokens], f'1 packed sequences up to {tokens}, not 1 up to {both}'),
            (2, [0, 5, both], f'packed sequence 1 is [5, {both}), in a sequence of the batch that ends at {tokens}'),
            (2, [0, tokens, tokens + 6, tokens + 4, both], f'packed sequence 2 is [{tokens + 6}, {tokens + 4})'),
            (2, [0, tokens, both - 1], f'2 packed sequences up to {both - 1}, not 2 up to {both}')]
