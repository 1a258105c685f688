#!/usr/bin/env python3
"""test_latents.py TRAIN LOGITS PLAN -- train, and logits beside it, on models whose K and V come from a latent, from the outside

A small random Youtu-LLM whose latent is gathered, and a dense DeepSeek-V2 whose heads are sent. Logits have one rank's bits
with every method of teams; what is sharded, kept or moved to the host changes none; documents have the losses that they have
alone; a training goes on as if it had not been stopped; what is loaded is saved. Adapters that are merged give the loss that
they give beside their matrices. What is not built is refused in a sentence.
"""

import array
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, equal, read, run_command, run_tests, write  # pylint: disable=wrong-import-position
from latents import MODELS, random_tensors  # pylint: disable=wrong-import-position
from programs import (BOOK, near, npy, packed, refused, safetensors, same, same_files, trained,  # pylint: disable=wrong-import-position
                      words_of, write_model)

TRAIN, LOGITS, PLAN = (os.path.abspath(path) for path in sys.argv[1:4])
TOKENS = 96
LORA = {'gathered': '3:6:q_a,q_b,kv_a,kv_b,o', 'heads': '3:6:q,kv_a,kv_b,o,down'}
LENGTHS = [20, 1, 40, 0, 36]  # of documents, a window and its last target


def run(what, **flags):
    return trained(TRAIN, what, **{'ranks': 1, 'tokens': TOKENS, 'steps': 1, 'sample': 0, **flags})


def alike(got, want, what):
    """Sums over other ranks: as close as test_train.py holds all methods to each other."""
    near(got['loss'] + got['grad_norm'], want['loss'] + want['grad_norm'], what, 1e-4)


def begin():
    """The models, and a text of two windows."""
    for name, config in MODELS.items():
        write_model(name, config, random_tensors(config))
    write('text', read(BOOK)[1000:1001 + 2 * TOKENS])


def test_logits(_):
    """The same bits for every number of ranks and every chunk; rings differ by the order of sums alone."""
    begin()
    write('ids.npy', npy(read('text')[:TOKENS]))
    built_in = run('products', load='heads', data='text')['config']['products'] == 'built-in'
    for name in MODELS:
        outs = {}
        for ranks, method, more in [(1, 'upipe', {}), (2, 'upipe', {}), (2, 'ulysses', {}), (4, 'upipe', {}), (3, 'ulysses', {}),
                                    (5, 'ulysses', {}), (2, 'upipe', {'overlap': True}), (3, 'zigzag', {}), (4, 'usp', {})]:
            what = f'{name}: logits of {ranks} ranks, {method} {more}'
            flags = {'load': name, 'ids': 'ids.npy', 'out': 'out.npy', 'ranks': ranks, 'method': method, **more}
            done = run_command([LOGITS, *words_of(flags)])
            equal((done.returncode, done.stderr), (0, ''), what)
            outs[what] = array.array('f', read('out.npy')[128:])
            want = next(iter(outs.values()))
            off = max(abs(a - b) for a, b in zip(outs[what], want))
            check(off <= 1e-5 * max(map(abs, want)), f'{what} are off by {off}')
            check(method in ('zigzag', 'usp') or outs[what] == want or not built_in, f'{what} have other bits')


def test_bits(_):
    """No bit depends on what is kept, sharded or moved, nor on the chunk; sums over ranks and micro-batches do."""
    begin()
    for name in MODELS:
        flags = {'load': name, 'data': 'text', 'steps': 2, 'lr': 1e-3, 'warmup': 0, 'batch': 2}
        alone = run(f'{name}, alone', **flags)
        for ranks in (2, 4):
            first = None
            for zero, more in [(0, {'method': 'ulysses'}), (1, {'activations': 'sac'}),
                               (2, {'activations': 'offload', 'offload_optimizer': True}), (3, {'activations': 'blocks:2'}),
                               (3, {'activations': 'sao:2,grad', 'overlap': ranks == 2})]:
                what = f'{name}, {ranks} ranks, ZeRO {zero}, {more}'
                got = run(what, ranks=ranks, zero=zero, **more, **flags)
                first = first or got
                same(got, first, what)
            alike(first, alone, f'{name}, {ranks} ranks')
        for more in ({'method': 'zigzag', 'ranks': 3}, {'method': 'usp', 'ranks': 4}, {'method': 'upipe-ring', 'ranks': 4},
                     {'replicas': 2, 'ranks': 4, 'batch': 1}):
            alike(run(f'{name}, {more}', **{**flags, **more}), alone, f'{name}, {more}')
        run(f'{name}, evaluated, with a sample', **{**flags, 'ranks': 3, 'eval': 'text', 'sample': 3})
        near(run(f'{name}, bf16', ranks=2, dtype='bf16', **flags)['loss'], alone['loss'], 'bf16', 2e-2)
        some = run('some are trained', train='*.kv_b_proj.weight,*.kv_a_layernorm.weight', ranks=2, **flags)
        equal(some['loss'][0], run('all of it', ranks=2, **flags)['loss'][0], 'some are trained: the first loss')


def test_files(_):
    """What is loaded is saved; what was saved is saved again to the byte, by however many ranks."""
    begin()
    for name, config in MODELS.items():
        run('saved', load=name, data='text', steps=0, save=f'{name}1')
        equal(safetensors(f'{name}1/checkpoint-0/model.safetensors')[1], random_tensors(config), f'{name}: tensors')
        for ranks, zero in [(1, 0), (3, 3)]:
            run('saved again', load=f'{name}1', data='text', steps=0, ranks=ranks, zero=zero, save=f'{name}2{zero}')
            same_files(f'{name}2{zero}/checkpoint-0', f'{name}1/checkpoint-0', f'{name}: saved by {ranks} ranks')
        saved = json.loads(read(f'{name}1/checkpoint-0/config.json'))
        for key, value in config.items():
            if key not in ('rope_scaling', 'max_position_embeddings'):
                equal(saved[key], value, f'{name}: {key}')
        check('head_dim' not in saved, 'head_dim is written, which transformers reads as something else')


def test_resume(_):
    begin()
    for name, more in [('gathered', {}), ('heads', {'dtype': 'bf16', 'zero': 3})]:
        flags = {'data': 'text', 'steps': 4, 'lr': 1e-3, 'min_lr': 1e-3, 'warmup': 0, 'ranks': 2}
        whole = run(name, load=name, save=f'{name} whole', save_every=2, keep=2, **flags, **more)
        rest = run(f'{name}, resumed', resume=f'{name} whole/checkpoint-2', save=f'{name} rest', **flags, **more)
        same(rest, whole, f'{name}, resumed', 2)
        same_files(f'{name} rest/checkpoint-4', f'{name} whole/checkpoint-4', name)
        check(whole['loss'][2] < whole['loss'][0], f'{name}: nothing was learnt: {whole["loss"]}')


def test_documents(_):
    """Documents have the losses that they have alone."""
    begin()
    ids, at = list(read(BOOK)[7000:7000 + sum(LENGTHS)]), 0
    packed('all', ids, LENGTHS, 1)
    sums = dict.fromkeys(MODELS, 0)
    for i, n in enumerate(LENGTHS):
        if n > 1:
            packed(f'one{i}', ids[at:at + n], [n], 1)
            for name in MODELS:
                sums[name] += run(f'document {i}', load=name, tokens_file=f'one{i}.bin', tokens=n - 1)['loss'][0] * (n - 1)
        at += n
    for name, total in sums.items():
        wanted = total / sum(n - 1 for n in LENGTHS if n > 1)
        for ranks, more in [(1, {}), (2, {'activations': 'sac'}), (4, {'method': 'usp'})]:
            got = run(f'{name}, packed, {ranks} ranks', load=name, tokens_file='all.bin', ranks=ranks, **more)
            near(got['loss'], [wanted], f'{name}, packed, {ranks} ranks')
        joined = run('joined', load=name, documents='joined', tokens_file='all.bin')['loss'][0]
        check(abs(joined - wanted) > 1e-3 * wanted, 'borders make no difference')


def test_adapters(folder):
    """Adapters beside their matrices, and merged; and as PEFT names them."""
    begin()
    for name, flag in LORA.items():
        base = run(f'{name}, the base', load=name, data='text')
        flags = {'data': 'text', 'steps': 3, 'lr': 1e-2, 'min_lr': 1e-2, 'warmup': 0}
        got = run(f'{name}, adapted', load=name, lora=flag, save_adapter=f'{name} adapter', ranks=2, **flags)
        near(got['loss'][:1], base['loss'], f'{name}: the first loss')
        check(got['loss'][2] < got['loss'][0], f'{name}: nothing was learnt: {got["loss"]}')
        names = {one.split('.')[-3] for one in safetensors(f'{name} adapter/adapter_model.safetensors')[1]}
        equal(set(json.loads(read(f'{name} adapter/adapter_config.json'))['target_modules']), names, f'{name}: target_modules')
        equal(len(names), flag.count(',') + 1, f'{name}: {names}')
        check({'kv_a_proj_with_mqa', 'kv_b_proj'} < names, f'{name}: {names}')
        more = run(f'{name}, loaded', load=name, load_adapter=f'{name} adapter', data='text', zero=3, ranks=2)
        run(f'{name}, merged', load=name, load_adapter=f'{name} adapter', merge=True, data='text', steps=0, save=f'{name} merged')
        near(run(f'{name}, of merged', load=f'{name} merged', data='text')['loss'], more['loss'], f'{name}: merged', 1e-6)
    adapted = json.loads(read('heads adapter/adapter_config.json'))
    write('heads adapter/adapter_config.json', json.dumps({**adapted, 'target_modules': ['q_a_proj']}))
    base = {'data': 'text', 'tokens': TOKENS}
    for model, status, more, words in [
        ('gathered', 2, {'lora': '2'}, 'this youtu has no q_proj'), ('heads', 2, {'lora': '2'}, 'this deepseek_v2 has no v_proj'),
        ('heads', 2, {'lora': '2:4:q_b'}, 'this deepseek_v2 has no q_b_proj'), ('gathered', 2, {'lora': '2:4:kv_b,k'}, 'has no k_proj'),
        ('heads', 1, {'load_adapter': 'heads adapter'}, 'target_modules has q_a_proj, which this deepseek_v2 has not'),
    ]:
        refused([TRAIN, *words_of({**base, 'load': model, **more})], folder, status, [words])
    refused([TRAIN, *words_of({**base, 'lora': '2:4:kv_a'})], folder, 2, ['--lora: this llama has no kv_a_proj_with_mqa'])


def test_refusals(folder):
    begin()
    base = {'load': 'heads', 'data': 'text', 'tokens': TOKENS, 'ranks': 2, 'save': 'out', 'json': 'out.json'}
    for more in ({'method': 'fpdt', 'segments': 3}, {'method': 'upipe-fpdt', 'segments': 3}):
        refused([TRAIN, *words_of({**base, **more})], folder, 1, ['3 segments: K and V of a deepseek_v2 come from a latent'])
    write('ids.npy', npy(read('text')[:TOKENS]))
    refused([LOGITS, *words_of({'load': 'heads', 'ids': 'ids.npy', 'out': 'out.npy', 'ranks': 2, 'method': 'fpdt'})], folder, 1,
            ['4 segments: K and V of a deepseek_v2 come from a latent'])
    refused([PLAN, '--model', 'heads', '--machine', 'h100x8', '--tokens', '1M', '--as', 'paper'], folder, 2, ['come from a latent'])
    for device in 'cpu', 'cuda':
        done = run_command([TRAIN, *words_of({'load': 'gathered', 'tokens': TOKENS, 'ranks': 2, 'plan': True, 'device': device})])
        equal((done.returncode, done.stderr), (0, ''), f'--plan for {device}')
    tensors = random_tensors(MODELS['heads'])
    write_model('more', MODELS['heads'], {**tensors, 'model.layers.3.eh_proj.weight': ('F32', [1], bytes(4))})
    refused([TRAIN, *words_of({**base, 'load': 'more'})], folder, 1, ['model.layers.3.eh_proj.weight is no tensor of this model'])
    for name, change, words in [
        ('experts', {'first_k_dense_replace': 2}, 'have a mixture of experts, which is not built: it is 2 of 3 layers'),
        ('fp8', {'quantization_config': {'quant_method': 'fp8'}}, 'quantization_config is set'),
        ('narrow', {'qk_nope_head_dim': 21}, 'head dim 29; 32 to 256 in steps of 8'),
    ]:
        config = {**MODELS['heads'], **change}
        write_model(name, config, random_tensors(config))
        refused([TRAIN, *words_of({**base, 'load': name})], folder, 1, [words])
    refused([PLAN, '--model', 'experts', '--machine', 'h100x8', '--tokens', '1M'], folder, 2, ['have a mixture of experts'])


if __name__ == '__main__':
    sys.exit(run_tests('latents', test_logits, test_bits, test_files, test_resume, test_documents, test_adapters, test_refusals))
