#!/usr/bin/env python3
"""test_trainer.py LIBRARY TOP -- transformers' Trainer and FSDP2 on a part of every sequence, against one process

The code is that of docs/python.md, sections Trainer and FSDP2, on two and four processes with torchrun's variables, and on one
where it is the plain Trainer's. Ten steps of two accumulated batches: each step's loss and norm of gradients, the loss of
the evaluation and the saved weights. Packed documents and rows of one length; the last batch of an epoch is smaller. What is
refused, on every rank: batches that differ, and options that a team has no answer for. Where no Python here has the packages
the test is left out (status 77).
"""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end, equal, load, read, run_test, write  # pylint: disable=wrong-import-position
from ranks import LIBRARY, VERSIONS, launch, refused  # pylint: disable=wrong-import-position
import torch  # pylint: disable=wrong-import-position
import transformers  # pylint: disable=wrong-import-position
import torch.distributed.fsdp  # pylint: disable=wrong-import-position
from safetensors.torch import load_file  # pylint: disable=wrong-import-position
from torch import distributed  # pylint: disable=wrong-import-position
import upipe_team  # pylint: disable=wrong-import-position
import upipe_transformers  # pylint: disable=wrong-import-position

TOKENS, STEPS = 37, 10
# A step of AdamW hardly depends on the size of gradients, and so would hide means in place of sums; where a gradient is nearly 0
# it has the sign of its rounding. SGD does neither.
RATE = 0.5


def shown(section):
    """The code of a section of the page."""
    page = read(os.path.join(sys.argv[2], 'docs', 'python.md')).decode()
    return re.search(rf'^## {section}\n(?:(?!^## ).)*?^```python\n(.*?)^```$', page, re.M | re.S).group(1)


def make_model(name):
    torch.manual_seed(3)
    config = getattr(transformers, name + 'Config')(
        vocab_size=97, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    getattr(transformers, name + 'ForCausalLM')(config).save_pretrained('model')


def draw_rows(number, packed, seed):
    """Documents of any length, whose labels are the collator's; or rows of one length, with labels of which some are ignored."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(number):
        length, ignored = torch.randint(5, TOKENS, (2,), generator=draw).tolist()
        ids = torch.randint(0, 97, (length if packed else TOKENS,), generator=draw).tolist()
        rows.append({'input_ids': ids} | ({} if packed else {'labels': [-100] * ignored + ids[ignored:]}))
    return rows


def batch_of(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def alone(body, *arguments):
    """In a process that no launcher has started."""
    process = multiprocessing.get_context('fork').Process(target=body, args=arguments)
    process.start()
    process.join()
    equal(process.exitcode, 0, f'the status of {body.__name__}')


def finish(team):
    team.close()
    distributed.barrier()
    distributed.destroy_process_group()


def trainer_arguments():
    return functools.partial(transformers.TrainingArguments, optim='sgd', learning_rate=RATE, report_to=[], disable_tqdm=True)


def prepare(folder, plain=False):
    """The current folder, and what the section of transformers has before its loop."""
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    team = None if plain else upipe_team.team_from_env(LIBRARY)
    if team:
        upipe_transformers.register(team)
    return team, transformers.AutoModelForCausalLM.from_pretrained('../model', attn_implementation='upipe' if team else 'eager')


def run_trainer(folder, packed, plain=False):
    team, model = prepare(folder, plain)
    if plain:
        upipe_transformers.trainer_class = lambda team, base: base
    transformers.TrainingArguments = trainer_arguments()
    if not packed:
        transformers.DataCollatorWithFlattening = lambda: transformers.default_data_collator
    names = {'team': team, 'model': model, 'upipe_transformers': upipe_transformers, 'transformers': transformers,
             'train': draw_rows(4 * STEPS - 1, packed, 1), 'held_out': draw_rows(5, packed, 2)}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(shown('Trainer'), names)  # pylint: disable=exec-used
    write(f'log{team.rank if team else 0}.json', json.dumps(names['trainer'].state.log_history))
    if team:
        finish(team)


def summary(folder, rank):
    log = load(f'{folder}/log{rank}.json')
    return {name: torch.tensor([line[name] for line in log if name in line], dtype=torch.double)
            for name in ('loss', 'grad_norm', 'eval_loss', 'train_loss')}


def same(what, got, want, limit=2e-6):
    equal(got.shape, want.shape, f'{what}: the shape')
    off = (got - want).abs().max().item() / want.abs().max().item()
    check(off <= limit, f'{what} is off by {off:.3g} of the largest')


def same_weights(what, got, want):
    got, want = load_file(got), load_file(want)
    equal(sorted(got), sorted(want), f'{what}: names')
    for name, weight in want.items():
        same(f'{what}: {name}', got[name], weight)


def test_trainer(folder):
    os.chdir(folder)
    make_model('Qwen3')
    for packed in True, False:
        plain = f'{folder}/plain{packed}'
        alone(run_trainer, plain, packed, True)
        want = summary(plain, 0)
        equal([len(values) for values in want.values()], [STEPS, STEPS, 1, 1], 'the lines of the log')
        for ranks in (2, 4) if packed else (2,):
            what = f'Trainer on {ranks} ranks{", packed" if packed else ""}'
            own = f'{folder}/own{packed}{ranks}'
            launch(ranks, run_trainer, own, packed)
            for rank in range(ranks):
                for name, values in summary(own, rank).items():
                    same(f'{what}: {name} of rank {rank}', values, want[name])
            for saved in 'out', f'out/checkpoint-{STEPS}':
                same_weights(f'{what}: {saved}', f'{own}/{saved}/model.safetensors', f'{plain}/{saved}/model.safetensors')
                equal(sorted(os.listdir(f'{own}/{saved}')), sorted(os.listdir(f'{plain}/{saved}')), f'{what}: {saved}')


def draw_batches():
    rows = draw_rows(4 * STEPS, False, 3)
    return [[batch_of(rows[at:at + 2]), batch_of(rows[at + 2:at + 4])] for at in range(0, 4 * STEPS, 4)]


def count(batches):
    return sum((batch['labels'][:, 1:] != -100).sum() for batch in batches)


def recorded(body, values, value_of):
    def call(*arguments):
        out = body(*arguments)
        values.append(value_of(out if out is not None else arguments[0]))
        return out
    return call


def run_loop(folder, plain=False):
    """Writes losses, the last of which is the evaluation's, and norms of gradients."""
    team, model = prepare(folder, plain)
    losses, norms, held = [], [], 1
    value_of = torch.Tensor.item if plain else lambda norm: norm.full_tensor().item()
    torch.nn.utils.clip_grad_norm_ = recorded(torch.nn.utils.clip_grad_norm_, norms, value_of)
    batches, held_out = draw_batches(), batch_of(draw_rows(3, False, 4))
    if plain:
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for accumulated in batches:
            parts = []
            for batch in accumulated:
                parts.append(model(**batch, num_items_in_batch=count(accumulated)).loss)
                parts[-1].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(parts).item())
        model.save_pretrained('out')
    else:
        team.sum = recorded(team.sum, losses, torch.Tensor.item)
        torch.optim.AdamW = lambda parameters: torch.optim.SGD(parameters, RATE)
        exec(shown('FSDP2'), {'team': team, 'model': model, 'upipe_transformers': upipe_transformers,  # pylint: disable=exec-used
                              'torch': torch, 'batches': batches})
        held = sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        loss = model(**held_out if plain else upipe_transformers.shard(team, **held_out)).loss
    if plain:
        losses.append(loss.item())
    else:
        team.sum(loss)
    write(f'log{team.rank if team else 0}.json', json.dumps([losses, norms]))
    if team:
        finish(team)
    return held


def test_fsdp(folder):
    os.chdir(folder)
    make_model('Llama')
    plain = f'{folder}/plain'
    alone(run_loop, plain, True)
    want = load(f'{plain}/log0.json')
    equal([len(values) for values in want], [STEPS + 1, STEPS], 'losses and norms')
    for ranks in 2, 3:
        what, own = f'FSDP2 on {ranks} ranks', f'{folder}/own{ranks}'
        held = launch(ranks, run_loop, own)
        check(max(held.values()) < 1.1 / ranks, f'{what}: ranks hold {held} of the parameters')
        for rank in range(ranks):
            for name, got, values in zip(('losses', 'norms'), load(f'{own}/log{rank}.json'), want):
                same(f'{what}: {name} of rank {rank}', torch.tensor(got).double(), torch.tensor(values).double())
        same_weights(what, f'{own}/out/model.safetensors', f'{plain}/out/model.safetensors')
        equal(load(f'{own}/out/config.json')['architectures'], ['LlamaForCausalLM'], f'{what}: the class that is saved')


def refuse_batches(team):
    """Each rank has something of its own, or one of them has."""
    ids, at = torch.arange(2 * TOKENS).view(2, TOKENS), torch.arange(TOKENS)[None]
    own, one = ids + team.rank, team.rank == 2
    swapped = ids.flip(1) if one else ids
    words = 'all ranks of a team take the same batches'
    refused(f'rank 1 has other input_ids than rank 0: {words}', lambda: upipe_transformers.shard(team, own, ids))
    refused('rank 2 has other input_ids', lambda: upipe_transformers.shard(team, swapped, ids))
    refused('rank 2 has other input_ids', lambda: upipe_transformers.shard(team, ids[:, :TOKENS - one]))
    refused('rank 1 has other labels', lambda: upipe_transformers.shard(team, ids, own))
    refused('rank 2 has other labels', lambda: upipe_transformers.shard(team, ids, None if one else ids))
    refused('rank 2 has other position_ids', lambda: upipe_transformers.shard(team, ids, ids, at * (not one)))
    refused('rank 2 has other attention_mask', lambda: upipe_transformers.shard(team, ids, ids, at, torch.full_like(ids, not one)))


def refuse_sampler(team, model):
    """What Trainer does by itself under torchrun."""
    class OwnBatches(transformers.Trainer):
        def compute_loss(self, model, inputs, *_, **more):
            return model(**upipe_transformers.shard(team, **inputs)).loss

    args = trainer_arguments()('out', use_cpu=True)
    trainer = OwnBatches(model, args, train_dataset=draw_rows(32, False, 1))
    refused('rank 1 has other input_ids than rank 0', trainer.train)


def refuse_options(team, model):
    Trainer = upipe_transformers.trainer_class(team, transformers.Trainer)

    def refuse(words, model=model, set_on=(), more=None, **options):
        args = trainer_arguments()('out', use_cpu=True, **options)
        for name, value in dict(set_on).items():
            setattr(args, name, value)
        refused(words, lambda: Trainer(model, args, **(more or {})))

    refuse('label_smoothing_factor is not served by a Trainer on a team', label_smoothing_factor=0.1)
    refuse('load_best_model_at_end is not served', load_best_model_at_end=True, save_strategy='epoch', eval_strategy='epoch')
    for name in 'deepspeed', 'deepspeed_plugin', 'fsdp', 'fsdp_plugin_args', 'parallelism_config', 'predict_with_generate':
        refuse(f'{name} is not served', set_on={name: True})
    for name in 'compute_metrics', 'compute_loss_func':
        refuse(f'{name} is not served', more={name: print})
    refuse('neftune_noise_alpha is not served', neftune_noise_alpha=5.0)
    refuse('it steps within the backward', optim='galore_adamw_layerwise', optim_target_modules='all-linear')
    refuse('it steps within the backward', optim='lomo')
    refuse('model is missing', None, more={'model_init': print})
    refused('args is missing', lambda: Trainer(model))
    for name in 'compute_loss', 'training_step':
        own = type('Own', (transformers.Trainer,), {name: lambda *_, **__: None})
        refused(f'Own has a {name} of its own', lambda own=own: upipe_transformers.trainer_class(team, own)(model, None))
    refuse('DataParallel takes means of gradients', torch.nn.DataParallel(model))
    refuse('DistributedDataParallel takes means of gradients', torch.nn.parallel.DistributedDataParallel(model))
    args = trainer_arguments()('out', use_cpu=True)
    Trainer(model, args)
    refused(f'Trainer has process {team.rank} of 1, the team rank {team.rank} of 3', lambda: Trainer(model, args))
    model.hf_device_map = {'model.layers.0': 0, 'model.layers.1': 1}
    refuse('device_map has put the model on several devices')


def run_refused(folder):
    team, model = prepare(folder)
    refuse_batches(team)
    refuse_sampler(team, model)
    refuse_options(team, model)
    finish(team)
    return end(f'rank {team.rank}')


def test_refused(folder):
    os.chdir(folder)
    make_model('Llama')
    equal(launch(3, run_refused, f'{folder}/refused'), dict.fromkeys(range(3), 0), 'what the ranks return')


def main():
    # No torch.set_num_threads here: forked processes would race for its pool (PyTorch 2.10: "Invalid thread pool!").
    transformers.utils.logging.disable_progress_bar()
    for test in test_trainer, test_fsdp, test_refused:
        with tempfile.TemporaryDirectory() as folder:
            run_test(test, folder)
            os.chdir('/')
    return end(VERSIONS)


if __name__ == '__main__':
    sys.exit(main())
