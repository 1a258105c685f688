"""wide.py -- modules of transformers in double precision that compute in f32, whatever they are given

    with in_double(modeling_qwen3_5):
        y = module.double()(x)
"""

import contextlib
from unittest import mock

import torch


class Wide:
    """PyTorch whose single precision is double."""

    def __getattr__(self, name):
        return torch.float64 if name == 'float32' else getattr(torch, name)


@contextlib.contextmanager
def in_double(modeling):
    with mock.patch.object(modeling, 'torch', Wide()), mock.patch.object(torch.Tensor, 'float', torch.Tensor.double):
        yield
