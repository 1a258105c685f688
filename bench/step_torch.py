"""step_torch.py -- training steps of a Llama by transformers on PyTorch, in a process of their own for step.py

    python step_torch.py                      prints the versions
    python step_torch.py '{"load": FOLDER, "data": FILE, "log": FILE, "steps": N, "threads": N, "dtype": "f32",
                           "checkpointed": false, "lr": X, "weight-decay": X, "beta1": X, "beta2": X, "adam-eps": X, "clip": X}'

A step is that of examples/train: the mean loss of every next byte of the file, its gradients, their norm clipped, fused
AdamW, whose decay is that of matrices. bf16 is autocast over weights in f32. A line of the log is as `train --log` has it.
"""

import json
import os
import resource
import sys
import time

os.environ |= {'TRANSFORMERS_OFFLINE': '1', 'HF_HUB_OFFLINE': '1', 'TQDM_DISABLE': '1'}
import torch  # pylint: disable=wrong-import-position
import transformers  # pylint: disable=wrong-import-position


def main():
    if len(sys.argv) == 1:
        print(f'transformers {transformers.__version__}, torch {torch.__version__}, SDPA, fused AdamW')
        return
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given['threads'])
    imported = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = transformers.AutoModelForCausalLM.from_pretrained(given['load'], dtype=torch.float32, attn_implementation='sdpa')
    model.train()
    if given['checkpointed']:
        model.gradient_checkpointing_enable({'use_reentrant': False})
    weights = list(model.parameters())
    groups = [{'params': [w for w in weights if (w.dim() == 2) == matrices], 'weight_decay': decay}
              for matrices, decay in ((True, given['weight-decay']), (False, 0.0))]
    adamw = torch.optim.AdamW(groups, lr=given['lr'], betas=(given['beta1'], given['beta2']), eps=given['adam-eps'], fused=True)
    with open(given['data'], 'rb') as source:
        ids = torch.tensor(list(source.read()))
    with open(given['log'], 'w', encoding='utf-8') as log:
        for step in range(given['steps']):
            start = time.perf_counter()
            adamw.zero_grad()
            with torch.autocast('cpu', torch.bfloat16, enabled=given['dtype'] == 'bf16'):
                logits = model(ids[None, :-1], use_cache=False).logits[0]
            loss = torch.nn.functional.cross_entropy(logits.float(), ids[1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, given['clip'])
            adamw.step()
            seconds = {'step': time.perf_counter() - start}
            log.write(json.dumps({'step': step + 1, 'loss': loss.item(), 'seconds': seconds, 'imported_rss': imported}) + '\n')


if __name__ == '__main__':
    main()
