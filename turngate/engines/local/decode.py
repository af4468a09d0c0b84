"""One step for all slots that sample: the network, the drawing, and the state that goes from step to step.

Called by `worker.py`, in its thread.
`Decoder` is the plain one, for a CPU: it computes only the slots that sample. `graphs.GraphDecoder` does the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngate.engines.local.cache import KeyValues, Places, PromptPiece
from turngate.engines.local.model import Attend, Model
from turngate.engines.local.sampler import Adjustment, adjust_scores, draw
from turngate.types import ID_DTYPE, Ids, Logprobs


class SlotStart(msgspec.Struct, frozen=True):
    """What a slot begins to sample with: its last id, that id's position, and how it is drawn."""

    slot: int
    token: int
    position: int
    seed: int
    drawn: int
    temperature: float


class Pending(msgspec.Struct, frozen=True):
    """A step under way: its rows' slots, and where the results will be."""

    slots: Places
    ids: Tensor
    logprobs: Tensor
    arrived: torch.cuda.Event | None = None  # when, where that is not at once


class Decoder:
    """`ahead`: how many steps may be under way before the first is collected."""

    ahead = 0

    def __init__(self, model: Model, slots: int, length: int) -> None:
        self.model = model
        self.cache = KeyValues(model.shape, slots, length, model.device, model.dtype)
        # Of each slot: the id to go on from, its position, the call's seed, and how many it has drawn.
        self.state = torch.zeros((4, slots), dtype=torch.int64, device=model.device)
        self.temperature = torch.ones(slots, device=model.device)
        self.state[1] = self.cache.spare

    def here(self) -> AbstractContextManager[None]:
        """What the thread that uses the decoder has to be in."""
        return nullcontext()

    def arm(self, armed: Sequence[SlotStart]) -> None:
        """These slots sample from the next step on."""
        slots = self._moved(np.array([a.slot for a in armed], np.int64))
        values = np.array([(a.token, a.position, a.seed, a.drawn) for a in armed], np.int64).T
        self.state[:, slots] = self._moved(values)
        self.temperature[slots] = self._moved(np.array([a.temperature for a in armed], np.float32))

    def park(self, slots: Sequence[int]) -> None:
        """These slots sample no more."""
        self.state[1, self._moved(np.array(slots, np.int64))] = self.cache.spare

    def fill(self, pieces: Sequence[PromptPiece]) -> None:
        """Compute the keys and values of these ids."""
        sizes = [len(piece.ids) for piece in pieces]
        ids = self._moved(np.concatenate([piece.ids for piece in pieces]).astype(np.int64))
        slots = self._moved(np.repeat(np.array([piece.slot for piece in pieces], np.int64), sizes))
        places = [np.arange(p.start, p.start + n, dtype=np.int64) for p, n in zip(pieces, sizes, strict=True)]
        positions = self._moved(np.concatenate(places))
        self.model.run(ids, positions, self._filling(pieces, slots, positions))

    def _filling(self, pieces: Sequence[PromptPiece], slots: Tensor, positions: Tensor) -> Attend:
        return self.cache.filling(pieces, slots, positions)

    def _moved(self, values: NDArray[Any]) -> Tensor:
        """To the model's device, without waiting for what is under way there."""
        here = torch.from_numpy(np.ascontiguousarray(values))
        return here.pin_memory().to(self.state.device, non_blocking=True) if self.state.is_cuda else here

    def launch(self, slots: Places, bent: Sequence[Adjustment]) -> Pending:
        """Begin a step for these slots (ascending). With anything bent, all steps before it must have been collected."""
        index = torch.from_numpy(slots)
        tokens, positions, seeds, drawn = self.state[:, index]
        attend = self.cache.stepping(slots, positions.numpy())
        scores = self._scored(self.model.run(tokens, positions, attend))
        for row in bent:
            adjust_scores(scores, row)
        warm = self.temperature[index]
        ids, logprobs = draw(scores, warm, seeds, drawn, some_greedy=bool((warm == 0).any()))
        self.state[0, index] = ids
        self.state[1, index] = positions + 1
        self.state[3, index] = drawn + 1
        return Pending(slots, ids, logprobs)

    def _scored(self, hidden: Tensor) -> Tensor:
        """In float32. On a GPU they are never rounded to bfloat16, in which scores of 16 and more lie an eighth apart."""
        if hidden.is_cuda and hidden.dtype != torch.float32:
            return torch.mm(hidden, self.model.head.t(), out_dtype=torch.float32)
        return self.model.scores(hidden).float()

    def collect(self, pending: Pending) -> tuple[Ids, Logprobs]:
        return pending.ids.numpy().astype(ID_DTYPE), pending.logprobs.numpy()

    def settle(self) -> None:
        """Return when nothing is under way any more."""

    def reset(self) -> None:
        """After a failure: no slot samples."""
        self.state[1] = self.cache.spare
