#!/usr/bin/env python3
"""test_wheel.py TOP -- the wheel of examples/bindings/python: pip builds it, and attention runs from what is in it alone

With PyTorch and transformers it is installed, with what it asks for, in an environment that has these, and the example of
docs/python.md is trained by two of torchrun's processes; losses are those of the whole sequences. Where pip cannot fetch
meson-python the test is left out (status 77). The kernels are those that compile fastest.
"""

import glob
import importlib.util
import os
import re
import sys
import sysconfig
import tempfile
import zipfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import check, end, equal, needed, read, run_command, write  # pylint: disable=wrong-import-position

RUN = """
import ctypes, os, sys
import upipe_abi
u = upipe_abi.Attention(os.path.join(sys.argv[1], 'libupipe_abi.so'), tokens=2, heads=1, head_dim=32)
v = (ctypes.c_float * 64)(*64 * [3])
o = (ctypes.c_float * 64)()
u.qkv_fwd(0, o, v, v, v)
print(*o)
"""
BEFORE = """
import os, torch, transformers
torch.manual_seed(0)
path, ids = 'model' + os.environ['RANK'], torch.randint(0, 97, (2, 37))
batches = 5 * [ids]
transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=97, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=2, head_dim=32)).save_pretrained(path)
"""
AFTER = """
loss = team.sum(loss)
model = transformers.AutoModelForCausalLM.from_pretrained(path)
optimizer = torch.optim.AdamW(model.parameters())
for ids in batches:
    want = model(input_ids=ids, labels=ids).loss
    want.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(), optimizer.zero_grad()
print(float(loss), float(want), file=open(path + '/losses', 'w'))
team.close()
"""


def check_example(folder):
    """Of the folder's wheel, in an environment that sees this one's packages."""
    python, page = os.path.join(folder, 'venv', 'bin', 'python'), read(os.path.join(sys.argv[1], 'docs', 'python.md')).decode()
    needed(run_command([sys.executable, '-m', 'venv', '--without-pip', os.path.join(folder, 'venv')]).returncode == 0, 'no environment')
    write(glob.glob(os.path.join(folder, 'venv', 'lib', '*', 'site-packages'))[0] + '/packages.pth', sysconfig.get_path('purelib'))
    done = run_command([python, '-m', 'pip', '-q', 'install', '--no-index', '--find-links', folder, 'upipe[transformers]'])
    needed(done.returncode == 0, f'pip does not install it: {done.stdout}{done.stderr}')
    example = re.search(r'\n## transformers\n.*?\n```python\n(.*?)```', page, re.DOTALL).group(1)
    write(os.path.join(folder, 'example.py'), BEFORE + example + AFTER)
    done = run_command([python, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', 'example.py'], cwd=folder,
                       variables={'OMP_NUM_THREADS': 1, 'HF_HUB_OFFLINE': 1})
    needed(done.returncode == 0, f'the example fails: {done.stdout}{done.stderr[-3000:]}')
    for rank in range(2):
        loss, want = map(float, read(os.path.join(folder, f'model{rank}', 'losses')).split())
        check(abs(loss - want) < 1e-4 * want, f'the last loss is {loss} on rank {rank}, that of the whole sequences {want}')


def main():
    pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check', '-q']
    with tempfile.TemporaryDirectory() as folder:
        if run_command([*pip, 'download', '--no-deps', '-d', folder, 'meson-python']).returncode != 0:
            print('left out: meson-python, which pip cannot fetch')
            return 77
        done = run_command([*pip, 'wheel', '--no-deps', '--config-settings=setup-args=-Dbuildtype=plain', '-w', folder,
                            os.path.join(sys.argv[1], 'examples', 'bindings', 'python')], variables={'CFLAGS': '-O0 -DUPIPE_CPU_SCALAR'})
        needed(done.returncode == 0, f'no wheel: {done.stdout}{done.stderr}')
        wheel = [name for name in os.listdir(folder) if name.startswith('upipe-') and name.endswith('.whl')]
        equal(len(wheel), 1, f'wheels in {os.listdir(folder)}')
        with zipfile.ZipFile(os.path.join(folder, wheel[0])) as packed:
            packed.extractall(os.path.join(folder, 'site'))
        modules = [name for name in os.listdir(os.path.join(sys.argv[1], 'examples', 'bindings', 'python')) if name.endswith('.py')]
        inside = os.listdir(os.path.join(folder, 'site'))
        check(set(modules) <= set(inside), f'the wheel has {sorted(inside)}, the folder {sorted(modules)}')
        done = run_command([sys.executable, '-c', RUN, 'site'], cwd=folder, variables={'PYTHONPATH': 'site'})
        equal(done.stdout.split(), 64 * ['3.0'], f'what attention says, {done.stderr}')
        if importlib.util.find_spec('torch') and importlib.util.find_spec('transformers'):
            check_example(folder)
        else:
            print('left out: the example of docs/python.md in the wheel\'s test, as this Python lacks PyTorch or transformers')
    return end('wheel')


if __name__ == '__main__':
    sys.exit(main())
