"""The network: dense Llama, Qwen2 and Qwen3 models, in one class that the trainer and the engine share.

Both call `Model.run`, which runs the layers over ids of any shape, with the caller's attention function. The engine's attention function
reads and writes the engine's cache (`cache.py`), so sampling and training can use the same parameters without a copy. `Model.forward` is a
simpler interface: it takes padded or packed rows, and returns their logits.

Parameters that are multiplied by the same input form one matrix (queries, keys and values; gate and up), because the speed of a small model
depends more on the number of operations than on their size. `weights.py` translates to and from the names in Hugging Face folders.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from turngate.engines.local.shape import Rope, Shape

# Layer, queries (…, heads, head), keys and values (…, kv_heads, head) → the attention output (…, heads, head).
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A language model. `recompute` makes the backward pass recompute layers, which saves most of the memory of a training step."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.recompute = False
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape, index) for index in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.output = None if shape.tied else nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def forward(self, ids: Tensor, segments: Tensor | None = None, at: Tensor | None = None) -> Tensor:
        """Compute the logits (rows, length, vocabulary) for `ids` (rows, length).

        Rows may be padded at their end with any ids of the vocabulary. `segments` (rows, length) separates samples packed into one row:
        tokens attend only to their own segment, and positions count from its start. If `at` (rows, length; bool) is given, only the logits
        at the positions that it selects are computed, as (positions, vocabulary).
        """
        hidden = self.compute_hidden(ids, segments)
        return self.scores(hidden if at is None else hidden[at])

    def compute_hidden(self, ids: Tensor, segments: Tensor | None = None) -> Tensor:
        """Compute the hidden states before the output layer: (rows, length, hidden)."""
        if segments is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
            return self.run(ids, positions, _causal(None))
        place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        fresh = torch.ones_like(segments, dtype=torch.bool)
        fresh[:, 1:] = segments[:, 1:] != segments[:, :-1]
        positions = place - torch.cummax(torch.where(fresh, place, 0), dim=1).values
        same = segments[:, :, None] == segments[:, None, :]
        return self.run(ids, positions, _causal((same & (place[:, :, None] >= place[:, None, :]))[:, None]))

    def scores(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head)

    @property
    def head(self) -> Tensor:
        """The output layer's weights."""
        return self.embedding.weight if self.output is None else self.output.weight

    def run(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers over `ids`, which may have any shape. `attend` computes the attention."""
        x = self.embedding(ids)
        cos, sin = (table[positions].to(x.dtype)[..., None, :] for table in self.angles(x.device))
        again = self.recompute and torch.is_grad_enabled()
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False) if again else layer(x, cos, sin, attend)
        return self.norm(x)

    def angles(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rotary cosines and sines, each (context, head / 2). They are float32, because large positions need the precision."""
        if device not in self._tables:
            with torch.inference_mode(False), torch.device("cpu"):
                speeds = _speeds(self.shape.rope, self.shape.head)
                angles = torch.outer(torch.arange(self.shape.context, dtype=torch.float32), speeds)
                self._tables[device] = angles.cos().to(device), angles.sin().to(device)
        return self._tables[device]


class _Layer(nn.Module):
    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.index = index
        self.heads, self.kv_heads, self.head = shape.heads, shape.kv_heads, shape.head
        self.before = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.qkv = nn.Linear(shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.head, bias=shape.qkv_bias)
        self.q_norm = nn.RMSNorm(shape.head, shape.epsilon) if shape.head_norm else None
        self.k_norm = nn.RMSNorm(shape.head, shape.epsilon) if shape.head_norm else None
        self.out = nn.Linear(shape.heads * shape.head, shape.hidden, bias=shape.out_bias)
        self.between = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.inner, bias=shape.inner_bias)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=shape.inner_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv(self.before(x)).unflatten(-1, (-1, self.head))
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split((self.heads, self.kv_heads), dim=-2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=-2)
        q, k = _rotate(qk, cos, sin).split((self.heads, self.kv_heads), dim=-2)
        x = x + self.out(attend(self.index, q, k, v).flatten(-2))
        gate, up = self.gate_up(self.between(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of values, one from each half of a head, by the angle for the position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _speeds(rope: Rope, head: int) -> Tensor:
    speeds = 1.0 / rope.theta ** (torch.arange(0, head, 2, dtype=torch.float32) / head)
    if rope.kind == "linear":
        return speeds / rope.factor
    if rope.kind == "llama3":
        # Low frequencies are stretched to the longer context, high ones are unchanged, and those in between are blended.
        waves = 2 * math.pi / speeds
        blend = ((rope.original / waves - rope.low) / (rope.high - rope.low)).clamp(0, 1)
        return speeds / rope.factor * (1 - blend) + speeds * blend
    return speeds


def _causal(mask: Tensor | None) -> Attend:
    """Return a function that computes attention within each row of tensors (rows, length, heads, head). If `mask` is None, it is causal."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return output.transpose(1, 2)

    return attend
