"""Attention of one query per slot over the cache. This is the most expensive part of a step on a GPU.

Each triton program reads the keys and values of one slot and head, up to the slot's length. This is four times as fast as torch's
attention, which needs the same length for all slots. torch's CUDA builds on Linux include triton. Without triton, the plain version below
reads the whole cache.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING or importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _attend_slot(  # type: ignore[no-untyped-def]  # triton would interpret annotations
        q,
        keys,
        values,
        positions,
        out,
        q_step,
        out_step,
        slot_step,
        head_step,
        spare,
        scale,
        GROUP: tl.constexpr,
        ROWS: tl.constexpr,
        HEAD: tl.constexpr,
        COLS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        slot, head = tl.program_id(0), tl.program_id(1)
        end = tl.load(positions + slot) + 1
        end = tl.where(end > spare, 1, end)  # an idle slot
        rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
        place = (head * GROUP + rows[:, None]) * HEAD + cols[None, :]
        mine = (rows[:, None] < GROUP) & (cols[None, :] < HEAD)
        query = tl.load(q + slot * q_step + place, mask=mine, other=0.0)
        base = slot.to(tl.int64) * slot_step + head * head_step
        most = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        summed = tl.zeros((ROWS, COLS), tl.float32)
        for start in range(0, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            key = tl.load(
                keys + base + at[None, :] * HEAD + cols[:, None],
                mask=(at[None, :] < end) & (cols[:, None] < HEAD),
                other=0.0,
            )
            value = tl.load(
                values + base + at[:, None] * HEAD + cols[None, :],
                mask=(at[:, None] < end) & (cols[None, :] < HEAD),
                other=0.0,
            )
            score = tl.dot(query, key, input_precision="ieee") * scale
            score = tl.where(at[None, :] < end, score, -float("inf"))
            higher = tl.maximum(most, tl.max(score, 1))
            fade = tl.exp(most - higher)
            weight = tl.exp(score - higher[:, None])
            total = total * fade + tl.sum(weight, 1)
            summed = summed * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            most = higher
        summed = summed / total[:, None]
        tl.store(out + slot * out_step + place, summed.to(out.dtype.element_ty), mask=mine)


def attend_slots(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, spare: int) -> Tensor:
    """Attend from each row of `q` to the slot with the same number, up to the row's position.

    `q` is (rows, heads, head); `keys` and `values` are (slots, kv_heads, length, head).
    """
    if not q.is_cuda or importlib.util.find_spec("triton") is None:
        return _attend_plain(q, keys, values, positions)
    rows, heads, head = q.shape
    kv_heads = keys.shape[1]
    out = torch.empty((rows, heads, head), dtype=q.dtype, device=q.device)
    _attend_slot[(rows, kv_heads)](
        q,
        keys,
        values,
        positions,
        out,
        q.stride(0),
        out.stride(0),
        keys.stride(0),
        keys.stride(1),
        spare,
        head**-0.5,
        GROUP=heads // kv_heads,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
        HEAD=head,
        COLS=max(16, triton.next_power_of_2(head)),
        BLOCK=64,
        num_warps=4,
        num_stages=3,
    )
    return out


def _attend_plain(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    rows = q.shape[0]
    seen = torch.arange(keys.shape[2], device=q.device) <= positions[:, None]
    queries = q.unflatten(1, (keys.shape[1], -1))  # heads that share keys are rows of one query
    output = F.scaled_dot_product_attention(queries, keys[:rows], values[:rows], attn_mask=seen[:, None, None])
    return output.flatten(1, 2)
