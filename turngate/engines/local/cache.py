"""The KV cache: the attention keys and values of current and earlier calls.

A *slot* contains one sequence, which is kept after its call has ended. The conversation's next turn can then continue in the slot, and
other calls can copy a common prefix from the slot instead of computing it. Calls with different cache salts, such as
calls at different policy versions, share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from turngate.engines.local.model import Attend
from turngate.engines.local.shape import Shape
from turngate.types import ID_DTYPE, Ids

Places = NDArray[np.int64]  # slot numbers, or positions in slots
_WORTH = 16  # a common prefix longer than this is worth waiting for
_HEAD = 64  # number of ids to compare before comparing whole sequences


class PromptPiece(msgspec.Struct, frozen=True):
    """Part of a prompt in one slot, starting at position `start`."""

    slot: int
    start: int
    ids: Ids


class KeyValues:
    """The cache tensor, of shape (layers, 2, slots, kv_heads, length, head). Idle slots write to the last position."""

    def __init__(self, shape: Shape, slots: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        self.spare = _round_up(length) - 1
        size = (shape.layers, 2, slots, shape.kv_heads, self.spare + 1, shape.head)
        if device.type == "cpu":
            # numpy allocates zeros lazily; torch would write all of them.
            raw = np.zeros(size, np.float32 if dtype == torch.float32 else np.uint16)
            self.tensor = torch.from_numpy(raw) if dtype == torch.float32 else torch.from_numpy(raw).view(dtype)
        else:
            self.tensor = torch.zeros(size, dtype=dtype, device=device)

    @staticmethod
    def bytes_per_slot(shape: Shape, length: int, dtype: torch.dtype) -> int:
        return shape.layers * 2 * shape.kv_heads * _round_up(length) * shape.head * dtype.itemsize

    def copy(self, source: int, target: int, size: int) -> None:
        self.tensor[:, :, target, :, :size] = self.tensor[:, :, source, :, :size]

    def prompt_attention(self, pieces: Sequence[PromptPiece], slots: Tensor, positions: Tensor) -> Attend:
        """Return the attention function for several pieces of prompts in one batch. Each piece attends only to its own slot."""
        masks = [_causal_mask(len(p.ids), p.start, self.tensor.device) for p in pieces]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.tensor[layer]
            keys[slots, :, positions], values[slots, :, positions] = k, v
            output, begin = torch.empty_like(q), 0
            for piece, mask in zip(pieces, masks, strict=True):
                size, end = len(piece.ids), piece.start + len(piece.ids)
                rows = slice(begin, begin + size)
                # (size, heads, head) → (kv_heads, group * size, head): heads that share keys are rows of one query.
                queries = q[rows].unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3).flatten(1, 2)
                group = queries.shape[1] // size
                attended = F.scaled_dot_product_attention(
                    queries[None],
                    keys[piece.slot, None, :, :end],
                    values[piece.slot, None, :, :end],
                    attn_mask=mask.repeat(group, 1),
                )
                output[rows] = attended[0].unflatten(1, (group, size)).permute(2, 0, 1, 3).flatten(1, 2)
                begin += size
            return output

        return attend

    def step_attention(self, slots: Places, positions: Places) -> Attend:
        """Return the attention function for one id per slot. `slots` must be in ascending order. Adjacent slots are read without a copy."""
        index, place = torch.from_numpy(slots), torch.from_numpy(positions)
        runs = []
        for rows in np.split(np.arange(len(slots)), np.flatnonzero(np.diff(slots) != 1) + 1):
            span = int(positions[rows].max()) + 1
            mask = torch.arange(span) <= place[rows[0] : rows[-1] + 1, None]
            runs.append(
                (slice(rows[0], rows[-1] + 1), slice(slots[rows[0]], slots[rows[-1]] + 1), span, mask[:, None, None])
            )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.tensor[layer]
            keys[index, :, place], values[index, :, place] = k, v
            queries = q.unflatten(1, (keys.shape[1], -1))  # heads that share keys are rows of one query
            outputs = [
                F.scaled_dot_product_attention(
                    queries[rows], keys[which, :, :span], values[which, :, :span], attn_mask=mask
                )
                for rows, which, span, mask in runs
            ]
            return torch.cat(outputs).flatten(1, 2)

        return attend


def _round_up(length: int) -> int:
    """Return the next multiple of 64 above `length`, which leaves room for the spare position."""
    return (length // 64 + 1) * 64


def _causal_mask(size: int, start: int, device: torch.device) -> Tensor:
    """Build the causal mask for `size` ids that start at position `start`. Its shape is (size, start + size)."""
    places = torch.arange(start + size, device=device)
    return places <= places[start:, None]


class Slots:
    """The ids in each slot, and which slots are in use (`taken`).

    `computed` is the number of a slot's ids that are in the cache. `planned` is the value that `computed` will have once the slot's prompt
    has been computed.
    """

    def __init__(self, slots: int, length: int) -> None:
        self.count = slots
        self.ids = np.zeros((slots, length), ID_DTYPE)
        self.computed = np.zeros(slots, np.int64)
        self.planned = np.zeros(slots, np.int64)
        self.taken = np.zeros(slots, bool)
        self._salts = [""] * slots
        self._used = np.zeros(slots, np.int64)
        self._clock = 0
        self.reused = 0  # number of ids that were found in the cache

    def forget(self) -> None:
        """Discard all computed prefixes, after a failure or when sampling resumes after a pause."""
        self.computed[:] = 0
        self.planned[:] = 0

    def take(self, ids: Ids, salt: str) -> tuple[int, int, int] | None:
        """Take a slot for a call. Return that slot, the slot to copy a common prefix from, and the length of that prefix.

        If both slots are the same, there is nothing to copy. Return None if no slot is free, or if another call is still computing a
        useful prefix. The prefix never includes the last id, which is the input of the first step.
        """
        free = np.flatnonzero(~self.taken)
        if not free.size:
            return None
        common = self._common(ids, salt)
        now, later = np.minimum(common, self.computed), np.minimum(common, self.planned)
        source = int(now.argmax())
        size = int(now[source])
        if later.max() > max(size, _WORTH):
            return None
        if not size:
            slot = source = self._stalest(free)
        elif not self.taken[source] and (2 * size >= self.computed[source] or free.size == 1):
            slot = source
        else:
            slot = self._stalest(free[free != source])
        self._clock += 1
        self.taken[slot] = True
        self.ids[slot, : len(ids)] = ids
        self.computed[slot], self.planned[slot] = size, len(ids) - 1
        self._salts[slot], self._used[slot] = salt, self._clock
        self.reused += size
        return slot, source, size

    def leave(self, slot: int, computed: int) -> None:
        """Free a slot. `computed` is the number of the slot's ids that are in the cache."""
        self._clock += 1
        self.taken[slot] = False
        self.computed[slot] = self.planned[slot] = computed
        self._used[slot] = self._clock

    def _stalest(self, free: Places) -> int:
        return int(free[np.where(self.computed[free] == 0, -1, self._used[free]).argmin()])

    def _common(self, ids: Ids, salt: str) -> Places:
        """Return, for each slot, the length of the prefix that it has in common with `ids[:-1]`, or 0 if its cache salt is not `salt`."""
        limit = len(ids) - 1
        common = np.zeros(self.count, np.int64)
        candidates = np.array([slot for slot in np.flatnonzero(self.planned) if self._salts[slot] == salt], np.int64)
        for size in dict.fromkeys((min(_HEAD, limit), limit)):
            if not candidates.size or not size:
                break
            same = self.ids[candidates, :size] == ids[:size]
            common[candidates] = np.where(same.all(axis=1), size, same.argmin(axis=1))
            candidates = candidates[common[candidates] == size]
        return common
