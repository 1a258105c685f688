#!/usr/bin/env python3
"""test_hybrid.py TRAIN LOGITS PLAN -- train, and logits beside it, on a model with linear attention, from the outside

A small random Qwen3.5, three layers of linear attention to one with a gated output. Where ranks begin at multiples of the
rule's chunk, logits have the bits of one rank; what is sharded, kept or moved to the host changes none; documents have the
losses that they have alone; a training goes on as if it had not been stopped; what is loaded is saved. What is not built is
refused in a sentence.
"""

import array
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, equal, read, run_command, run_tests, write  # pylint: disable=wrong-import-position
from hybrid import CONFIG, random_tensors  # pylint: disable=wrong-import-position
from programs import BOOK, near, npy, packed, refused, safetensors, same, same_files, trained, words_of, write_model  # pylint: disable=wrong-import-position

TRAIN, LOGITS, PLAN = (os.path.abspath(path) for path in sys.argv[1:4])
CHUNK, TOKENS = 64, 384  # of the rule; of a sequence, of which two and three ranks hold whole chunks
LENGTHS = [128, 1, 63, 64, 0, 129]  # of documents, a window and its last target: most begin at chunks
WHOLE = {'architectures': ['Qwen3_5ForConditionalGeneration'], 'image_token_id': 9, 'model_type': 'qwen3_5', 'text_config': CONFIG,
         'tie_word_embeddings': False, 'transformers_version': '4.57.0.dev0', 'video_token_id': 10, 'vision_config': {'depth': 1},
         'vision_end_token_id': 12, 'vision_start_token_id': 11}


def run(what, **flags):
    return trained(TRAIN, what, **{'ranks': 1, 'tokens': TOKENS, 'steps': 1, 'sample': 0, **({} if flags.get('resume') else {'load': 'model'}),
                                   **flags})


def alike(got, want, what):
    """Sums over other ranks: as close as test_train.py holds all methods to each other."""
    near(got['loss'] + got['grad_norm'], want['loss'] + want['grad_norm'], what, 1e-4)


def begin():
    """The model, and a text of two windows."""
    write_model('model', CONFIG, random_tensors(CONFIG))
    write('text', read(BOOK)[1000:1001 + 2 * TOKENS])


def test_logits(_):
    begin()
    write('ids.npy', npy(read('text')[:TOKENS]))
    outs = {}
    for ranks, method in [(1, 'upipe'), (2, 'upipe'), (3, 'ulysses'), (6, 'upipe'), (4, 'upipe'), (5, 'ulysses')]:
        done = run_command([LOGITS, *words_of({'load': 'model', 'ids': 'ids.npy', 'out': 'out.npy', 'ranks': ranks, 'method': method})])
        equal((done.returncode, done.stderr), (0, ''), f'logits of {ranks} ranks')
        outs[ranks] = read('out.npy')
    built_in = run('products', data='text')['config']['products'] == 'built-in'
    for ranks in (2, 3, 6):
        check(outs[ranks] == outs[1] or not built_in, f'logits of {ranks} ranks, which hold whole chunks, have other bits')
    want = array.array('f', outs[1][128:])
    for ranks, out in outs.items():
        got = array.array('f', out[128:])
        off = max(abs(a - b) for a, b in zip(got, want))
        check(off <= 1e-4 * max(map(abs, want)), f'logits of {ranks} ranks are off by {off}')


def test_bits(_):
    """No bit depends on what is kept, sharded or moved; sums over ranks and micro-batches do."""
    begin()
    flags = {'data': 'text', 'steps': 2, 'lr': 1e-3, 'warmup': 0, 'accumulate': 2}
    alone = run('alone', **flags)
    for ranks, method in [(2, 'upipe'), (3, 'ulysses'), (4, 'upipe')]:
        first = {}
        for zero, more in [(0, {}), (1, {'activations': 'sac'}), (1, {'activations': 'offload', 'offload_optimizer': True}), (2, {}),
                           (2, {'activations': 'sac:2,grad'}), (3, {'activations': 'blocks:2'}),
                           (3, {'activations': 'sao:3', 'offload_optimizer': True, 'offload_weights': True}), (3, {'zero_prefetch': True})]:
            got = run(f'{ranks} ranks, ZeRO {zero}, {more}', ranks=ranks, method=method, zero=zero, **more, **flags)
            same(got, first.setdefault(zero > 1, got), f'{ranks} ranks, ZeRO {zero}, {more}')
        alike(first[0], alone, f'{ranks} ranks')
    for ranks in (5, 8):  # which begin within chunks, not all at the same place
        got = run(f'{ranks} ranks', ranks=ranks, method='ulysses', **flags)
        alike(got, alone, f'{ranks} ranks')
    got = run('replicas', ranks=4, replicas=2, **{**flags, 'accumulate': 1})
    alike(got, alone, 'replicas')
    some = run('some are trained', train='*.linear_attn.in_proj_qkv.weight,*.linear_attn.A_log', ranks=2, **flags)
    equal(some['loss'][0], run('all of it', ranks=2, **flags)['loss'][0], 'some are trained: the first loss')
    run('overlapped, evaluated, with a sample', **{**flags, 'ranks': 2, 'method': 'upipe', 'overlap': True, 'eval': 'text', 'sample': 3})
    near(run('bf16', ranks=2, dtype='bf16', **flags)['loss'], alone['loss'], 'bf16', 2e-2)


def test_files(_):
    """What is loaded is saved; what was saved is saved again to the byte, by however many ranks."""
    begin()
    run('saved', data='text', steps=0, save='one')
    equal(safetensors('one/checkpoint-0/model.safetensors')[1], random_tensors(CONFIG), 'tensors')
    for ranks, zero in [(1, 0), (3, 3)]:
        run('saved again', load='one', data='text', steps=0, ranks=ranks, zero=zero, save=f'two{zero}')
        same_files(f'two{zero}/checkpoint-0', 'one/checkpoint-0', f'saved by {ranks} ranks')
    config = json.loads(read('one/checkpoint-0/config.json'))
    equal((config['model_type'], config['architectures'], config['partial_rotary_factor'], config['layer_types']),
          ('qwen3_5_text', ['Qwen3_5ForCausalLM'], 0.25, ['linear_attention'] * 3 + ['full_attention']), 'config.json')


def test_resume(_):
    begin()
    flags = {'data': 'text', 'steps': 4, 'lr': 1e-3, 'min_lr': 1e-3, 'warmup': 0, 'ranks': 2}
    for what, more in [('f32', {}), ('bf16', {'dtype': 'bf16', 'zero': 3})]:
        whole = run(what, save=what, save_every=2, keep=2, **flags, **more)
        rest = run(f'{what}, resumed', resume=f'{what}/checkpoint-2', save=f'rest {what}', **flags, **more)
        same(rest, whole, f'{what}, resumed', 2)
        same_files(f'rest {what}/checkpoint-4', f'{what}/checkpoint-4', what)
        check(whole['loss'][2] < whole['loss'][0], f'{what}: nothing was learnt: {whole["loss"]}')


def test_documents(_):
    """A border ends the state and the convolution: documents have the losses that they have alone."""
    begin()
    ids, sums, at = list(read(BOOK)[7000:7000 + sum(LENGTHS)]), 0, 0
    packed('all', ids, LENGTHS, 1)
    for i, n in enumerate(LENGTHS):
        if n > 1:
            packed(f'one{i}', ids[at:at + n], [n], 1)
            sums += run(f'document {i}', tokens_file=f'one{i}.bin', tokens=n - 1)['loss'][0] * (n - 1)
        at += n
    wanted = sums / sum(n - 1 for n in LENGTHS if n > 1)
    flags = {'tokens_file': 'all.bin', 'steps': 2, 'lr': 1e-3, 'warmup': 0}
    first = run('packed', **flags)
    near(first['loss'][:1], [wanted], 'the loss of packed documents')
    check(abs(run('joined', documents='joined', **flags)['loss'][0] - wanted) > 1e-3 * wanted, 'borders make no difference')
    for ranks, more in [(2, {}), (3, {'activations': 'sac', 'method': 'ulysses'}), (5, {'zero': 3})]:
        got = run(f'packed, {ranks} ranks', ranks=ranks, **more, **flags)
        alike(got, first, f'packed, {ranks} ranks')
    # windows of other documents each: the scratch is the same in every step
    packed('many', list(read(BOOK)[3000:3000 + 30 * 33]), list(range(1, 31)) + [30 * 33 - 31 * 15], 1)
    for ranks, more in [(1, {}), (3, {'shuffle': 'documents'}), (4, {'accumulate': 2, 'eval': 'all.bin', 'sample': 2})]:
        run(f'many documents, {ranks} ranks', ranks=ranks, **more, **{**flags, 'tokens_file': 'many.bin', 'tokens': 96, 'steps': 9})

    # a window whose borders are none of a chunk's ends makes more chunks than that of the first step, whose borders are
    packed('odd', list(read(BOOK)[3000:3000 + 1499]), [2] * 249 + [1] + [2] * 500, 1)
    run('odd borders', **{**flags, 'tokens_file': 'odd.bin', 'tokens': 498, 'steps': 3, 'seed': 3})


def test_whole(_):
    """Of a larger model the text part is read, with a note, from one file or several."""
    begin()
    tensors = random_tensors(CONFIG)
    whole = {name.replace('model.', 'model.language_model.', 1): t for name, t in tensors.items()}
    other = {'model.visual.merger.norm.bias': ('F32', [2], bytes(8)), 'mtp.norm.weight': ('F32', [1], bytes(4))}
    write_model('whole', WHOLE, {**whole, **other})
    want = run('the text model', data='text')
    same(run('of a larger model', said=1, load='whole', data='text', save='text part'), want, 'of a larger model')
    same(run('saved and loaded', load='text part', data='text', lr=0, min_lr=0, steps=1), run('the same', load='text part', data='text'), 'saved')
    write_model('parts', WHOLE, whole)
    os.rename('parts/model.safetensors', 'parts/part')
    write('parts/model.safetensors.index.json', json.dumps({'weight_map': {name: 'part' for name in whole}}))
    same(run('in parts', said=1, load='parts', data='text'), want, 'in parts')
    write_model('more', WHOLE, {**whole, 'model.audio.weight': ('F32', [1], bytes(4))})
    refused([TRAIN, *words_of({'load': 'more', 'data': 'text'})], '.', 1, ['model.audio.weight is no tensor of this model'], lines=2)
    write_model('twice', WHOLE, {**whole, 'model.norm.weight': tensors['model.norm.weight']})
    refused([TRAIN, *words_of({'load': 'twice', 'data': 'text'})], '.', 1, ['model.*norm.weight is there twice, by two names'], lines=2)
    # a tied head that is stored beside its embedding
    tied = {**WHOLE, 'tie_word_embeddings': True, 'text_config': {**CONFIG, 'tie_word_embeddings': True}}
    embed = whole['model.language_model.embed_tokens.weight']
    write_model('tied', tied, {**whole, 'lm_head.weight': embed})
    run('tied', said=1, load='tied', data='text')
    write_model('untied', tied, whole)
    refused([TRAIN, *words_of({'load': 'untied', 'data': 'text'})], '.', 1, ['lm_head.weight is not the embedding'], lines=2)


def test_refusals(folder):
    begin()
    base = {'load': 'model', 'data': 'text', 'tokens': TOKENS, 'ranks': 2, 'save': 'out', 'json': 'out.json'}
    for more, status, *words in [
        ({'method': 'ring'}, 1, 'a ring of 2 ranks', 'linear attention'), ({'method': 'usp', 'ranks': 4}, 1, 'a ring of 2 ranks'),
        ({'method': 'zigzag'}, 1, 'a ring of 2'), ({'method': 'stripe'}, 1, 'a ring of 2'),
        ({'method': 'fpdt', 'segments': 3}, 1, '3 segments', 'linear attention'),
        ({'batch': 2}, 1, '--batch 2', '--accumulate 2'), ({'lora': '4'}, 2, '--lora', 'qwen3_5_text'),
    ]:
        refused([TRAIN, *words_of({**base, **more})], folder, status, words)
    write('ids.npy', npy(read('text')[:TOKENS]))
    refused([LOGITS, *words_of({'load': 'model', 'ids': 'ids.npy', 'out': 'out.npy', 'ranks': 2, 'method': 'ring'})], folder, 1,
            ['a ring of 2 ranks', 'linear attention'])
    refused([PLAN, '--model', 'model', '--machine', 'h100x8', '--tokens', '1M'], folder, 2, ['linear attention', 'train --plan'])
    for device in 'cpu', 'cuda':
        done = run_command([TRAIN, *words_of({'load': 'model', 'tokens': TOKENS, 'ranks': 2, 'plan': True, 'device': device})])
        equal((done.returncode, done.stderr), (0, ''), f'--plan for {device}')
    for name, config, words in [
        ('experts', {**CONFIG, 'model_type': 'qwen3_5_moe_text'}, 'model_type qwen3_5_moe_text .* is not built'),
        ('whole experts', {**WHOLE, 'model_type': 'qwen3_5_moe'}, 'model_type qwen3_5_moe .* is not built'),
        ('ungated', {**CONFIG, 'attn_output_gate': False}, 'attn_output_gate is not true'),
    ]:
        write_model(name, config, {})
        refused([TRAIN, *words_of({**base, 'load': name})], folder, 1, [words])


if __name__ == '__main__':
    sys.exit(run_tests('hybrid', test_logits, test_bits, test_files, test_resume, test_documents, test_whole, test_refusals))
