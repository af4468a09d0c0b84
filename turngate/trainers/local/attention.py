"""Attention over rows that are packed into one sequence, for the trainer's forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from turngate.engines.local.model import Attend
from turngate.trainers.tree_attention import make_block_mask, make_dense_mask

# PyTorch 2.11 and later: cuDNN's attention with a mask can return NaN gradients on Hopper GPUs if the number of tokens is half a tile more
# than a multiple of the tile size (https://github.com/pytorch/pytorch/issues/196678). Observed with Qwen2.5 in bfloat16.
_CUDNN_TILE = 128


def attend_densely(until: Tensor) -> Attend:
    """Return a function that computes attention over packed rows. The mask takes n² bytes for n tokens."""
    size = len(until)
    extra = int(size % _CUDNN_TILE == _CUDNN_TILE // 2)
    mask = make_dense_mask(F.pad(until, (0, extra), value=size + extra))  # no other token attends to the extra one

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if extra:
            q, k, v = (F.pad(x, (0, 0, 0, extra)) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[:, :, :size].transpose(1, 2)

    return attend


def attend_flexibly(until: Tensor) -> Attend:
    """Return a function that computes attention over packed rows.

    The function uses FlexAttention. On a GPU, it skips blocks of tokens that may not attend to each other.
    """
    mask = make_block_mask(until)
    # Without compiling, FlexAttention computes all pairs of tokens.
    attention = flex_attention if until.device.type == "cpu" else _compile_flex_attention()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        output = attention(q, k, v, block_mask=mask, enable_gqa=True)
        assert isinstance(output, Tensor), "flex_attention returns a tuple only if auxiliary outputs are requested"
        return output.transpose(1, 2)

    return attend


@functools.cache
def _compile_flex_attention() -> Callable[..., object]:
    compiled: Callable[..., object] = torch.compile(flex_attention, dynamic=True)
    return compiled
