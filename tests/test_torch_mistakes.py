#!/usr/bin/env python3
"""test_torch_mistakes.py LIBRARY TOP -- what a user of the PyTorch binding does wrong, and the sentence that it ends in

MISTAKES is the table: what is done, the code, and the words of the sentence, which is of upipe_abi.Error and comes at once, on
every rank. A row says where another's sentence stands, and where what is done is no mistake, and works. Processes of one rank
and of two, with torchrun's variables; and pairs of processes of which one ends. Then a team that is closed twenty times
leaves no descriptor and no thread. Where no Python here has both packages the test is left out (status 77).
"""

import copy
import functools
import gc
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import warnings
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end, equal, run_test, write  # pylint: disable=wrong-import-position
from launch import free_port  # pylint: disable=wrong-import-position
from ranks import LIBRARY, VERSIONS, launch  # pylint: disable=wrong-import-position
import torch  # pylint: disable=wrong-import-position
import transformers  # pylint: disable=wrong-import-position
from torch import distributed  # pylint: disable=wrong-import-position
from torch.autograd import forward_ad  # pylint: disable=wrong-import-position
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # pylint: disable=wrong-import-position
from torch.nn.parallel import DistributedDataParallel  # pylint: disable=wrong-import-position
from upipe_abi import Attention, Error  # pylint: disable=wrong-import-position
from upipe_team import Team, team_from_env  # pylint: disable=wrong-import-position
from upipe_torch import attention  # pylint: disable=wrong-import-position
from upipe_transformers import register, shard  # pylint: disable=wrong-import-position

TOKENS, SECONDS = 36, 30  # the library's deadline is 60 s
DOCUMENTS = torch.cat([torch.arange(n) for n in (5, 1, 20, 10)])[None]
WORKS = None


class Carried(str):
    """Words of a sentence of the library that stands in another's: a compiler's, or of a worker that another process reports."""


class Others(str):
    """Words of PyTorch's or transformers' own sentence: the library is not called."""


class Scene:
    """What a row begins with; each row has its own, as a failed call leaves a team that can only be closed."""

    @functools.cached_property
    def team(self):
        team = Team(LIBRARY)
        register(team)
        return team

    @functools.cached_property
    def u(self):
        """Of one rank, without a team."""
        return Attention(LIBRARY, tokens=TOKENS, heads=4, kv_heads=2, head_dim=32, causal=1)

    def model_of(self, seed=3, **more):
        return self.of(transformers.LlamaForCausalLM, seed, num_key_value_heads=2, head_dim=32, **more)

    def of(self, kind, seed=3, **more):
        torch.manual_seed(seed)
        config = kind.config_class(**{
            'vocab_size': 97, 'hidden_size': 64, 'intermediate_size': 80, 'num_hidden_layers': 2, 'num_attention_heads': 4,
            'pad_token_id': 0, 'attn_implementation': 'upipe', **more})
        return self.team and kind(config)

    @functools.cached_property
    def model(self):
        return self.model_of()

    @functools.cached_property
    def compiled(self):
        return compiled(self.model)

    @functools.cached_property
    def ids(self):
        return torch.randint(0, 97, (1, TOKENS), generator=torch.Generator().manual_seed(1))

    @functools.cached_property
    def batch(self):
        return shard(self.team, self.ids, self.ids)

    def without(self, name):
        return {key: value for key, value in self.batch.items() if key != name}

    def with_(self, **more):
        return {**self.batch, **more}

    def draw(self, heads=4, batch=1, dtype=torch.float32, rows=None):
        return torch.randn(batch, rows or self.team.rows(TOKENS)[1], heads, 32).to(dtype).requires_grad_(dtype.is_floating_point)

    def attend(self, q=None, k=None, v=None, **more):
        """A right call, but for what is given."""
        q = self.draw() if q is None else q
        k = self.draw(2, q.shape[0], q.dtype) if k is None else k
        return self.team.attention(q, k, k if v is None else v, **{'tokens': TOKENS, 'causal': True, **more})

    def last(self, value, other):
        """value on the last rank, other on the others."""
        return value if self.team.rank == self.team.ranks - 1 else other

    def close(self):
        for name in 'team', 'u':
            if name in self.__dict__:
                getattr(self, name).close()


def compiled(model):
    torch.compiler.reset()
    return torch.compile(model, backend='aot_eager', fullgraph=True)


def in_child(body):
    """What body ends with in a forked child."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except Error as error:
            os.write(writes, str(error).encode())
        finally:
            os._exit(0)  # pylint: disable=protected-access
    os.close(writes)
    with open(reads, encoding='utf-8') as file:
        said = file.read()
    os.waitpid(pid, 0)
    if said:
        raise Error(said)


def pair(*bodies):
    """Two processes of a team; bodies[rank](scene). Rank 0 says with what it has ended, which is raised here."""
    ends, pids, port = [os.pipe() for _ in bodies], [], free_port()
    for rank, body in enumerate(bodies):
        pids.append(os.fork())
        if pids[rank] == 0:
            os.environ |= {'RANK': str(rank), 'WORLD_SIZE': '2', 'MASTER_ADDR': 'localhost', 'MASTER_PORT': str(port)}
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background may have it ignored
            said = b''
            try:
                scene = Scene()
                scene.team = team_from_env(LIBRARY)
                scene.pids = scene.team.of_all(os.getpid())
                body(scene)
            except BaseException as error:  # pylint: disable=broad-except
                parts = [error] + [error.__context__] * (error.__context__ is not None)
                said = '|'.join(f'{type(part).__name__}: {part}' for part in parts).encode()
            finally:
                os.write(ends[rank][1], said)
                os._exit(1)  # pylint: disable=protected-access
    for _, writes in ends:
        os.close(writes)
    said = []
    for (reads, _), pid in zip(ends, pids):
        with open(reads, encoding='utf-8') as file:
            said.append(file.read())
        os.waitpid(pid, 0)
    kind, _, sentence = said[0].partition(': ')
    if kind == 'Error':
        raise Error(sentence)
    raise RuntimeError(said[0])


def raises_between(scene):
    o = scene.attend()
    raise ValueError(f'of the user, after a forward of {tuple(o.shape)}')


def twice_threaded(scene):
    """Both threads of rank 0 are in a call, until one is refused."""
    scene.team, failed = scene.team, []  # on this thread, as all ranks

    def call():
        try:
            scene.attend()
        except Error as error:
            failed.append(str(error))

    if scene.team.rank == 0:
        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        equal(len(failed), 2, 'threads that are told')
    distributed.barrier()
    scene.attend()


class OfWorkers(torch.utils.data.Dataset):
    def __init__(self, team, call):
        self.team, self.call = team, call

    def __len__(self):
        return 2

    def __getitem__(self, at):
        return self.call(at)


def load(scene, call, **more):
    return list(torch.utils.data.DataLoader(OfWorkers(scene.team, call), num_workers=1, batch_size=None, **more))


def holding(scene):
    scene.model.team = scene.team
    return scene.model


def save(what):
    with tempfile.TemporaryFile() as file:
        torch.save(what, file)


def doubled(scene):
    q = scene.draw()
    slope, = torch.autograd.grad(scene.attend(q).square().sum(), q, create_graph=True)
    slope.sum().backward()


def again(scene, **more):
    o = scene.attend()
    o.sum().backward(**more)
    o.sum().backward()


def forward_mode(attend, q):
    with forward_ad.dual_level():
        attend(forward_ad.make_dual(q, torch.ones_like(q)))


def bigcode(scene):
    """Its attention is given no positions."""
    return scene.of(transformers.GPTBigCodeForCausalLM, num_attention_heads=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)


def compiled_positions(scene):
    """On the last rank alone; the others wait for it in the first layer."""
    position_ids = scene.batch['position_ids']
    scene.compiled(**scene.with_(position_ids=scene.last(position_ids + 1, position_ids)))


def frozen_later(scene):
    scene.model(**scene.batch).loss.backward()
    scene.last(scene.model.model.norm, torch.nn.Identity()).requires_grad_(False)
    scene.team.sum_gradients(scene.model)


def sums_twice(scene):
    for _ in range(2):
        scene.model(**scene.batch).loss.backward()
        scene.team.sum_gradients(scene.model)


def not_summed(scene):
    scene.model(**scene.batch).loss.backward()
    torch.optim.AdamW(scene.model.parameters()).step()
    shard(scene.team, scene.ids, scene.ids)


def unused(scene):
    scene.model.extra = torch.nn.Parameter(torch.ones(3))
    scene.model(**scene.batch).loss.backward()
    scene.team.sum_gradients(scene.model)
    check(scene.model.extra.grad is None, 'a parameter that nobody uses has a gradient')


def calls_twice(scene, compiles):
    torch.compiler.reset()
    compiles(scene.model)
    for _ in range(2):
        scene.model(**scene.batch).loss.backward()


def wrapped(scene, wrap):
    model = wrap(scene.model)
    model(**scene.batch).loss.backward()
    scene.team.sum_gradients(model)


def second_team(scene):
    """The last team that is registered is used."""
    scene.model.eval()
    scene.team.close()
    del scene.team
    return scene.model(**scene.batch)


def other_group(scene):
    """A team of a group of one rank, and a batch that is cut for another."""
    groups = [distributed.new_group([rank]) for rank in range(scene.team.ranks)]
    batch, other = scene.batch, Team(LIBRARY, groups[scene.team.rank])
    register(other)
    try:
        scene.model(**batch)
    finally:
        other.close()


def not_in_group(scene):
    groups = [distributed.new_group([rank]) for rank in range(scene.team.ranks)]
    Team(LIBRARY, groups[1 - scene.team.rank])


def with_secret(scene, **more):
    with mock.patch.dict(os.environ, {**more, **scene.last({'UPIPE_SECRET': 'x' * 20}, {'UPIPE_SECRET': 'y' * 20})}):
        Team(LIBRARY)


def with_variables(variables):
    with mock.patch.dict(os.environ, variables):
        Team(LIBRARY)


def without_address(scene):
    fails = scene.last(OSError('no way there'), None)
    with mock.patch('upipe_team.own_address', side_effect=fails, return_value='127.0.0.1'):
        Team(LIBRARY)


def other_file(text=None):
    if text is None:
        return Attention('/nowhere/libupipe_abi.so', ranks=1)
    with tempfile.NamedTemporaryFile() as file:
        write(file.name, text)
        return Attention(file.name, ranks=1)


def closed(scene, times=1):
    for _ in range(times):
        scene.team.close()
    return scene.team


def closed_in_a_call(scene):
    """Rank 0 closes while a thread of it waits for rank 1. The call goes on as if nothing had been."""
    u, began, said, found = scene.team.u, threading.Event(), None, []
    ask = u.ask

    def seen(rank, name, *more):
        if name == 'qkv_fwd':
            began.set()
        ask(rank, name, *more)

    if scene.team.rank == 0:
        with mock.patch.object(u, 'ask', seen):
            thread = threading.Thread(target=lambda: found.append(scene.attend()))
            thread.start()
            began.wait()
            time.sleep(0.5)  # until the library is in it
            try:
                scene.team.close()
            except Error as error:
                said = error
            distributed.barrier()
            thread.join()
        equal(len(found), 1, 'calls that end well')
        if said:
            raise said
    else:
        distributed.barrier()
        scene.attend()


def interrupted(scene):
    """Ctrl-C reaches all processes of a terminal. This one waits for the other, which sleeps."""
    def strike():
        time.sleep(1)  # until the call waits; one that does not yet is interrupted all the same
        for pid in reversed(scene.pids):
            os.kill(pid, signal.SIGINT)

    threading.Thread(target=strike).start()
    scene.attend()
    time.sleep(SECONDS)


MISTAKES = [
    # ---- transformers: the batch
    (1, 'shard() is forgotten', lambda s: s.model(s.ids), 'without what shard() returns'),
    (1, 'shard() is forgotten, with labels', lambda s: s.model(input_ids=s.ids, labels=s.ids), 'without what shard() returns'),
    (2, 'shard() of what shard() has returned', lambda s: shard(s.team, **s.batch), 'not what shard() has returned'),
    (2, 'a batch that another team has cut', other_group, "shard()'s, of this team"),
    (1, 'tokens of another vocabulary', lambda s: s.model(**s.with_(input_ids=s.batch['input_ids'] + 97)), Others('out of range')),
    (1, 'positions of one\'s own', lambda s: s.model(**s.with_(position_ids=torch.arange(TOKENS)[None])), 'position_ids are not those'),
    (2, 'positions are missing', lambda s: s.model(**s.without('position_ids')), 'position_ids are not those'),
    (2, 'positions are those of all tokens', lambda s: s.model(**s.with_(position_ids=torch.arange(TOKENS)[None].int())),
     "shard()'s, of this team"),
    (2, 'positions of a rank are those of all tokens, compiled', compiled_positions, Carried("shard()'s, of this team")),
    (1, 'positions are missing where attention is not given them', lambda s: bigcode(s)(**s.without('position_ids')),
     'position_ids are not those'),
    (2, 'positions are those of another rank, where attention is not given them',
     lambda s: bigcode(s)(**s.with_(position_ids=torch.arange(TOKENS // 2)[None].int())), "shard()'s, of this team"),
    (2, 'positions begin at 0 on each rank', lambda s: s.model(**s.with_(position_ids=torch.arange(TOKENS // 2)[None].int())),
     "shard()'s, of this team"),
    (1, 'borders are missing', lambda s: s.model(**s.without('cu_seq_lens_q')), 'without what shard() returns'),
    (1, 'the number of tokens is missing', lambda s: s.model(**s.without('team_tokens')), 'without what shard() returns'),
    (1, 'padding', lambda s: shard(s.team, s.ids, attention_mask=(s.ids != s.ids[0, -1]).long()), 'padding is not served'),
    (1, 'padding on the left', lambda s: shard(s.team, s.ids, attention_mask=(torch.arange(TOKENS) > 3)[None]), 'padding is not served'),
    (1, 'a mask of ones', lambda s: s.model(**shard(s.team, s.ids, attention_mask=torch.ones_like(s.ids))), WORKS),
    (1, 'a mask that is a list', lambda s: shard(s.team, s.ids, attention_mask=[[1] * TOKENS]), 'attention_mask is a list'),
    (1, 'a mask of another shape', lambda s: shard(s.team, s.ids, attention_mask=torch.ones(1, 3)),
     'attention_mask is torch.float32 (1, 3)'),
    (1, 'a mask for the model', lambda s: s.model(**s.with_(attention_mask=s.ids)), 'attention_mask is not served'),
    (1, 'labels of another shape', lambda s: shard(s.team, s.ids, s.ids[:, 1:]), 'labels is torch.int64 (1, 35)'),
    (1, 'labels of more tokens', lambda s: shard(s.team, s.ids[:, 1:], s.ids), 'labels is torch.int64 (1, 36)'),
    (1, 'tokens that are a list', lambda s: shard(s.team, s.ids.tolist()), 'input_ids is a list'),
    (2, 'embeddings in place of tokens', lambda s: shard(s.team, inputs_embeds=torch.zeros(1, TOKENS, 64)), 'shard() takes no inputs_embeds'),
    (2, "flash-attention's borders", lambda s: shard(s.team, s.ids, cu_seq_lens_q=torch.tensor([0, TOKENS])),
     'position_ids say where documents begin'),
    (1, 'tokens of one dimension', lambda s: shard(s.team, s.ids[0]), 'input_ids is torch.int64 (36,)'),
    (1, 'tokens that are no integers', lambda s: shard(s.team, s.ids.float()), 'input_ids is torch.float32'),
    (1, 'tokens on meta', lambda s: shard(s.team, s.ids.to('meta')), 'input_ids is torch.int64 (1, 36) on meta'),
    (2, 'fewer tokens than ranks', lambda s: shard(s.team, s.ids[:, :1]), '1 tokens for 2 ranks'),
    (1, 'positions of one dimension', lambda s: shard(s.team, s.ids, position_ids=DOCUMENTS[0]), 'position_ids is torch.int64 (36,)'),
    (1, 'positions of fewer tokens', lambda s: shard(s.team, s.ids, position_ids=DOCUMENTS[:, 1:]), 'position_ids is torch.int64 (1, 35)'),
    (1, 'documents that begin at 1', lambda s: shard(s.team, s.ids, position_ids=DOCUMENTS + 1), '0, 1, 2 ... of each document'),
    (1, 'rows with other documents', lambda s: shard(s.team, s.ids.repeat(2, 1), position_ids=torch.cat([DOCUMENTS, DOCUMENTS.flip(1)])),
     'the same in each row'),
    (1, 'documents in two rows', lambda s: shard(s.team, s.ids.repeat(2, 1), position_ids=DOCUMENTS), 'documents in a batch of 2'),
    # ---- transformers: the model
    (1, 'a cache', lambda s: s.model(**s.with_(use_cache=True)), 'use_cache is not served'),
    (1, 'generate()', lambda s: s.model.generate(s.ids, max_new_tokens=2), 'generate() is not served'),
    (1, 'generate() of a batch', lambda s: s.model.generate(**s.without('labels'), max_new_tokens=2), Others('not used by the model')),
    (1, 'dropout in training', lambda s: s.model_of(attention_dropout=0.5).train()(**s.batch), 'dropout 0.5 is not served'),
    (1, 'dropout in evaluation', lambda s: s.model_of(attention_dropout=0.5).eval()(**s.batch), WORKS),
    (1, 'output_attentions', lambda s: s.model(**s.batch, output_attentions=True), 'output_attentions is not served'),
    (1, 'a model on meta', lambda s: s.model.to('meta')(**{name: t.to('meta') if torch.is_tensor(t) else t for name, t in s.batch.items()}),
     Others('meta')),
    (1, 'a model on meta, and its batch is not', lambda s: s.model.to('meta')(**s.batch), 'model.embed_tokens.weight is on meta'),
    (1, 'a model of float16', lambda s: s.model.half()(**s.batch), 'torch.float16, which is not served'),
    (1, 'a model of float64', lambda s: s.model.double()(**s.batch), 'torch.float64, which is not served'),
    (1, 'attn_implementation is forgotten', lambda s: s.model_of(attn_implementation='sdpa')(**s.batch), 'attn_implementation is sdpa'),
    (1, 'attn_implementation is eager', lambda s: s.model_of(attn_implementation='eager')(**s.batch), 'attn_implementation is eager'),
    (1, 'set_attn_implementation before register()', lambda s: s.model.set_attn_implementation('unregistered'), Others('unregistered')),
    (2, 'register() of a second team', second_team, WORKS),
    (1, 'DistributedDataParallel', lambda s: wrapped(s, DistributedDataParallel), 'leave sum_gradients() out'),
    (1, 'DistributedDataParallel, compiled', lambda s: s.team.sum_gradients(torch.compile(DistributedDataParallel(s.model))),
     'leave sum_gradients() out'),
    (1, 'FSDP2', lambda s: wrapped(s, lambda m: fully_shard(m, mesh=distributed.device_mesh.init_device_mesh('cpu', (1,)))),
     'leave sum_gradients() out'),
    (1, 'FSDP', lambda s: s.team.sum_gradients(FullyShardedDataParallel(s.model, device_id=torch.device('cpu'))),
     'leave sum_gradients() out'),
    (2, 'other weights', lambda s: s.model_of(seed=s.team.rank)(**s.batch), 'other model.embed_tokens.weight than rank 0: all ranks begin'),
    (2, 'other frozen weights', lambda s: s.last(s.model.model.norm, torch.nn.Identity()).requires_grad_(False) and s.model(**s.batch),
     'other model.norm.weight than rank 0: all ranks begin'),
    (2, 'weights that are frozen later', frozen_later, 'other model.norm.weight than rank 0: all ranks train'),
    (2, 'a model on meta on a rank', lambda s: s.model.to(s.last('meta', 'cpu'))(**s.batch), 'model.embed_tokens.weight is on meta'),
    (1, 'forward() of a head that is not listed', lambda s: s.of(transformers.LlamaForSequenceClassification).forward(**s.without('labels')),
     'LlamaForSequenceClassification is not served'),
    (1, 'forward() of a model without a head', lambda s: s.of(transformers.LlamaModel).forward(**s.without('labels')),
     'call it, and not its forward()'),
    (1, 'forward() of a listed head', lambda s: s.model.forward(**s.batch), WORKS),
    (1, 'layers are left out by chance', lambda s: s.of(transformers.OPTForCausalLM, word_embed_proj_dim=64, ffn_dim=48, layerdrop=0.5).train()(
        **s.batch), 'layerdrop is not served'),
    (2, 'gradients are summed after each of several backwards', sums_twice, 'has been summed before'),
    (2, 'parameters that nobody uses', unused, WORKS),
    (2, 'gradients are not summed', not_summed, 'rank 1 has other weights than rank 0'),
    # ---- transformers, compiled
    (1, 'compiled in place', lambda s: calls_twice(s, lambda m: m.compile(backend='aot_eager')), WORKS),
    (1, 'layers are compiled in place', lambda s: calls_twice(s, lambda m: [part.compile(backend='aot_eager') for part in m.model.layers]), WORKS),
    (1, 'compiled: no mistake', lambda s: s.compiled(**s.batch).loss.backward(), WORKS),
    (1, 'compiled: shard() is forgotten', lambda s: s.compiled(s.ids, use_cache=False), Carried('without what shard() returns')),
    (1, 'compiled: positions are missing', lambda s: s.compiled(**s.without('position_ids')), Carried('position_ids are not those')),
    (1, 'compiled: a mask', lambda s: s.compiled(**s.with_(attention_mask=s.ids)), Carried('attention_mask is not served')),
    (1, 'compiled: a cache', lambda s: s.compiled(**s.with_(use_cache=True, past_key_values=transformers.DynamicCache())),
     Carried('use_cache is not served')),
    (1, 'compiled: dropout', lambda s: compiled(s.model_of(attention_dropout=0.5).train())(**s.batch),
     Carried('dropout 0.5 is not served')),
    (1, 'compiled: attn_implementation is forgotten', lambda s: compiled(s.model_of(attn_implementation='sdpa'))(**s.batch),
     Carried('attn_implementation is sdpa')),
    (1, 'compiled: float16', lambda s: compiled(s.model.half())(**s.batch), Carried('torch.float16, which is not served')),
    (1, 'compiled: a closed team', lambda s: s.batch and closed(s) and s.compiled(**s.batch), Carried('the handle is closed')),
    # ---- attention: tensors
    (1, 'float16', lambda s: s.attend(s.draw(dtype=torch.float16)), 'q is torch.float16, which is not served'),
    (1, 'float64', lambda s: s.attend(s.draw(dtype=torch.float64)), 'q is torch.float64, which is not served'),
    (1, 'integers', lambda s: s.attend(s.draw(dtype=torch.int64)), 'q is torch.int64, which is not served'),
    (1, 'another type of k', lambda s: s.attend(k=s.draw(2, dtype=torch.bfloat16)), 'k is torch.bfloat16'),
    (1, 'on meta', lambda s: s.attend(s.draw().to('meta')), 'q is on meta'),
    (1, 'k on meta', lambda s: s.attend(k=s.draw(2).to('meta')), 'k is on meta'),
    (2, 'k on meta on a rank', lambda s: s.attend(k=s.draw(2).to(s.last('meta', 'cpu'))), 'k is on meta'),
    (1, 'NumPy', lambda s: s.attend(s.draw().detach().numpy(), s.draw(2)), 'q is a ndarray'),
    (1, 'heads before rows', lambda s: s.attend(*(s.draw(h).transpose(1, 2) for h in (4, 2, 2))), 'batch, rows, heads, head dim'),
    (1, 'without a batch', lambda s: s.attend(*(s.draw(h)[0] for h in (4, 2, 2))), 'batch, rows, heads, head dim'),
    (2, 'k and v of all tokens', lambda s: s.attend(k=s.draw(2, rows=TOKENS)), 'k is (1, 36, 2, 32)'),
    (1, 'v of fewer rows', lambda s: s.attend(v=s.draw(2)[:, 1:]), 'v is (1, 35, 2, 32)'),
    (1, 'heads that are no multiple', lambda s: s.attend(k=s.draw(3)), '4 query heads are no multiple of 3'),
    (2, 'a rank with fewer rows', lambda s: s.attend(*(s.draw(h, rows=s.last(17, 18)) for h in (4, 2))), 'q is (1, 17, 4, 32)'),
    (2, 'no tokens for a rank', lambda s: s.attend(s.draw(rows=1), tokens=1), '1 tokens are fewer than 2'),
    (1, 'a batch of 0', lambda s: s.attend(s.draw(batch=0)), 'q is (0, 36, 4, 32)'),
    (2, 'a batch of 0 on a rank', lambda s: s.attend(s.draw(batch=s.last(0, 1))), 'q is (0, 18, 4, 32)'),
    (1, 'no query heads', lambda s: s.attend(s.draw(0)), 'q is (1, 36, 0, 32)'),
    (1, 'no heads of k and v', lambda s: s.attend(k=s.draw(0)), 'k is (1, 36, 0, 32)'),
    (1, 'another head dim of v', lambda s: s.attend(v=torch.zeros(1, TOKENS, 2, 16)), 'v has head dim 16 and q 32'),
    (1, 'a head dim of 0', lambda s: s.attend(*(s.draw(h)[..., :0] for h in (4, 2))), 'q is (1, 36, 4, 0)'),
    (2, 'another batch', lambda s: s.attend(s.draw(batch=s.last(2, 1))), 'batch is 1 on rank 0 and 2 on rank 1'),
    (2, 'another type on a rank', lambda s: s.attend(s.draw(dtype=s.last(torch.bfloat16, torch.float32))),
     'is 0 on rank 0 and 1 on rank 1'),
    # ---- attention: options
    (2, 'tokens= is forgotten', lambda s: attention(s.team.u, s.team.rank, s.draw(), s.draw(2), s.draw(2)), 'tokens= is missing'),
    (1, 'the team in place of its handle', lambda s: attention(s.team, 0, s.draw(), s.draw(2), s.draw(2), tokens=TOKENS), 'team.u'),
    (2, 'the number of another rank', lambda s: attention(s.team.u, 1 - s.team.rank, s.draw(), s.draw(2), s.draw(2), tokens=TOKENS),
     'no rank of this number'),
    (2, 'causal on one rank', lambda s: s.attend(causal=s.last(False, True)), 'causal is 1 on rank 0 and 0 on rank 1'),
    (2, 'another window', lambda s: s.attend(window=s.last(3, 4)), 'window is 4 on rank 0 and 3 on rank 1'),
    (2, 'another scale', lambda s: s.attend(scale=s.last(0.5, 0.25)), 'scale is 0.25 on rank 0 and 0.5 on rank 1'),
    (2, 'borders on one rank', lambda s: s.attend(cu_seqlens=s.last([0, 5, TOKENS], ())), 'cu_seqlens_n is 0 on rank 0 and 2 on rank 1'),
    (2, 'other borders', lambda s: s.attend(cu_seqlens=s.last([0, 5, TOKENS], [0, 6, TOKENS])), 'cu_seqlens (hash) is'),
    (1, 'borders without an end', lambda s: s.attend(cu_seqlens=[0, 5]), 'packed sequences up to 5'),
    (1, 'borders that descend', lambda s: s.attend(cu_seqlens=[0, 9, 5, TOKENS]), 'packed sequence 1 is [9, 5)'),
    (1, 'borders that are no integers', lambda s: s.attend(cu_seqlens=[0., 5., TOKENS]), 'cu_seqlens is torch.float32'),
    (2, 'borders that are a number, on a rank', lambda s: s.attend(cu_seqlens=s.last(5, ())), (' no len()', Others(' no len()'))),
    (2, 'a window that is no integer', lambda s: s.attend(window=3.5), Others('window')),
    (1, 'sinks on meta', lambda s: s.attend(sinks=torch.zeros(4, device='meta')), 'sinks is on meta'),
    (1, 'borders on meta', lambda s: s.attend(cu_seqlens=torch.zeros(3, device='meta')), 'cu_seqlens is on meta'),
    (1, 'sinks of another size', lambda s: s.attend(sinks=torch.zeros(2)), 'sinks is torch.float32 (2,)'),
    (1, 'an option of another name', lambda s: Attention(LIBRARY, token=3), 'no such option: token'),
    # ---- autograd
    (1, 'no_grad', lambda s: torch.no_grad()(s.attend)(), WORKS),
    (1, 'inference_mode', lambda s: torch.inference_mode()(s.attend)(), WORKS),
    (1, 'derivatives of derivatives', doubled, 'attention has no derivatives of derivatives'),
    (1, 'backward twice, retained', lambda s: again(s, retain_graph=True), WORKS),
    (1, 'backward twice', again, Others('Trying to backward through the graph a second time')),
    (1, 'vmap', lambda s: torch.vmap(s.attend)(s.draw()[None], s.draw(2)[None]), 'attention is not mapped'),
    (1, 'torch.func.grad', lambda s: torch.func.grad(lambda q, k: s.attend(q, k).sum())(s.draw(), s.draw(2)), Others('functorch')),
    (1, 'forward mode', lambda s: forward_mode(s.attend, s.draw()), 'no derivatives in forward mode'),
    (1, 'torch.func.jvp', lambda s: torch.func.jvp(s.attend, *2 * [(s.draw(), s.draw(2))]), 'no derivatives in forward mode'),
    # ---- teams and processes
    (1, 'a handle is pickled', lambda s: pickle.dumps(s.team.u), 'a handle is of its process'),
    (1, 'a handle is copied', lambda s: copy.copy(s.team.u), 'a handle is of its process'),
    (1, 'a team is pickled', lambda s: pickle.dumps(s.team), 'a team is of its processes'),
    (1, 'a team is copied', lambda s: copy.copy(s.team), 'a team is of its processes'),
    (1, 'a team is copied deeply', lambda s: copy.deepcopy(s.team), 'a team is of its processes'),
    (1, 'a model that holds a team is copied', lambda s: copy.deepcopy(holding(s)), 'a team is of its processes'),
    (1, 'a model that holds a team is saved', lambda s: save(holding(s)), 'a team is of its processes'),
    (1, 'the state of a model that holds a team is saved', lambda s: save(holding(s).state_dict()), WORKS),
    (1, 'a forked child calls', lambda s: s.team and in_child(s.attend), 'the process that has forked this one'),
    (1, 'a forked child closes', lambda s: in_child(s.team.close) or s.attend(), WORKS),
    (1, 'a worker of a DataLoader cuts', lambda s: load(s, lambda at: s.team.rows(TOKENS)), WORKS),
    (1, 'a worker of a DataLoader calls', lambda s: load(s, lambda at: s.attend()), Carried('the process that has forked this one')),
    (1, 'a worker of a DataLoader that is started anew', lambda s: load(s, print, multiprocessing_context='spawn'),
     'a team is of its processes'),
    (2, 'two threads of a rank', twice_threaded, 'another thread is in a call of this rank'),
    (2, 'a closed team', lambda s: closed(s).attention(*3 * [torch.zeros(1, 18, 2, 32)], tokens=TOKENS), 'the handle is closed'),
    (2, 'closed twice', lambda s: closed(s, 2), WORKS),
    (2, 'closed while a thread is in a call', closed_in_a_call, ('another thread is in a call of it', WORKS)),
    (2, 'one rank has closed', lambda s: s.last(lambda: closed(s), s.attend)() and s.attend(),
     ('rank 1 has freed its team', 'the handle is closed')),
    (2, 'a group without this rank', not_in_group, 'is not in its group'),
    (2, 'other secrets', with_secret, 'another secret than rank 0'),
    (2, 'a short secret on a rank', lambda s: with_variables({'UPIPE_SECRET': s.last('short', 20 * 'x')}),
     ('rank 1: the secret has 5 bytes', 'the secret has 5 bytes')),
    (2, 'no address on a rank', without_address, ('rank 1: no way there', 'no way there')),
    (2, 'a short secret', lambda s: with_secret(s, UPIPE_SECRET_FILE='/nowhere'), 'both set'),
    (0, 'no process group', lambda s: Team(LIBRARY), 'has no process group'),
    (0, 'no launcher', lambda s: team_from_env(LIBRARY), 'RANK is not set'),
    (0, 'no library', lambda s: other_file(), 'no library is loaded: /nowhere/libupipe_abi.so'),
    (0, 'a library that is no library', lambda s: other_file('text'), 'no library is loaded'),
    (0, 'another library', lambda s: Attention('libm.so.6', ranks=1), 'libm.so.6 is no library of upipe'),
    (0, 'no library for a team', lambda s: team_from_env('/nowhere/libupipe_abi.so'), '/nowhere/libupipe_abi.so'),
    (0, 'a rank raises before its backward', lambda s: pair(lambda s: s.attend().sum().backward(), raises_between),
     'its connection to rank 1 has ended'),
    (0, 'a rank is interrupted', lambda s: pair(interrupted, lambda s: time.sleep(SECONDS)), Others('KeyboardInterrupt')),
]


def try_row(body, words):
    scene, error, began = Scene(), None, time.monotonic()
    try:
        body(scene)
    except BaseException as caught:  # pylint: disable=broad-except
        error = caught
    spent = time.monotonic() - began
    words = words[scene.team.rank] if isinstance(words, tuple) else words
    scene.close()
    if words is WORKS:
        return f'{type(error).__name__}: {error}' if error else None
    if error is None:
        return 'is not refused'
    said = f'{type(error).__name__}: {error}'
    if words not in str(error):
        return f'says not "{words}" but {said}'
    if not isinstance(words, (Carried, Others)) and (not isinstance(error, Error) or '\n' in str(error)):
        return f'is no sentence of the library: {said}'
    if spent > SECONDS:
        return f'takes {spent:.1f} s'
    return None


def try_rows(ranks):
    for number, what, body, words in MISTAKES:
        if number == ranks:
            why = try_row(body, words)
            check(why is None, f'{what}: {why}')
            if ranks > 1:
                distributed.barrier()


def test_closed():
    """A team that has made a call leaves no descriptor and no thread."""
    def held():
        return len(os.listdir('/proc/self/fd')), threading.active_count(), len(os.listdir('/proc/self/task'))

    gc.collect()
    counts, kept = [], []
    for _ in range(21):
        kept.append(Scene())  # else Python would close what close() has left
        kept[-1].attend().sum().backward()
        kept[-1].close()
        distributed.barrier()
        counts.append(held())
    equal(counts[1:], counts[:1] * 20, 'descriptors and threads after each close')


def rank_main():
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    distributed.init_process_group('gloo')
    try_rows(distributed.get_world_size())
    test_closed()
    distributed.destroy_process_group()
    return end(f'rank {os.environ["RANK"]} of {os.environ["WORLD_SIZE"]}')


def test_mistakes(ranks):
    equal(launch(ranks, rank_main), dict.fromkeys(range(ranks), 0), f'what {ranks} ranks return')


def main():
    torch.set_num_threads(1)
    names = [what for _, what, *_ in MISTAKES]
    check(len(set(names)) == len(names) >= 40, f'{len(names)} mistakes')
    for ranks in 1, 2:
        run_test(test_mistakes, ranks)
    try_rows(0)
    return end(f'{len(names)} mistakes, {VERSIONS}')


if __name__ == '__main__':
    sys.exit(main())
