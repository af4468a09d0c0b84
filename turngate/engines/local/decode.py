"""Decoding: in each step, compute the scores and draw one id for every slot that samples. It runs in the worker's thread.

`Decoder` runs on a CPU, and `graphs.GraphDecoder` on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngate.engines.local.cache import KeyValues, Places, PromptPiece
from turngate.engines.local.model import Attend, Model
from turngate.engines.local.sampler import Adjustment, adjust_scores, draw, find_kept
from turngate.types import ID_DTYPE, Ids, Logprobs


class SlotStart(msgspec.Struct, frozen=True):
    """The state in which a slot starts sampling. `token` is the slot's last id, and `position` is that id's index.

    `drawn` is the number of tokens drawn so far.
    """

    slot: int
    token: int
    position: int
    seed: int
    drawn: int
    temperature: float


class Pending(msgspec.Struct, frozen=True):
    """A launched step: its slots, and the tensors that will contain the results."""

    slots: Places
    ids: Tensor
    logprobs: Tensor
    arrived: torch.cuda.Event | None = None  # set when the results are on the host; None if they already are
    masks: Mapping[int, Ids] = {}  # the ids that were left to sample from, by index into `slots`, where requested


class Decoder:
    """A decoder for a CPU. `ahead` is the number of steps whose results may still be uncollected when the next step is launched."""

    ahead = 0

    def __init__(self, model: Model, slots: int, length: int) -> None:
        self.model = model
        self.cache = KeyValues(model.shape, slots, length, model.device, model.dtype)
        # Per slot: the last id, its position, the seed, and the number of drawn tokens.
        self.state = torch.zeros((4, slots), dtype=torch.int64, device=model.device)
        self.temperature = torch.ones(slots, device=model.device)
        self.state[1] = self.cache.spare

    def thread_context(self) -> AbstractContextManager[None]:
        """Return a context manager in which the worker's thread must run."""
        return nullcontext()

    def arm(self, armed: Sequence[SlotStart]) -> None:
        """Start sampling in these slots, beginning with the next step."""
        slots = self._to_device(np.array([a.slot for a in armed], np.int64))
        values = np.array([(a.token, a.position, a.seed, a.drawn) for a in armed], np.int64).T
        self.state[:, slots] = self._to_device(values)
        self.temperature[slots] = self._to_device(np.array([a.temperature for a in armed], np.float32))

    def park(self, slots: Sequence[int]) -> None:
        """Stop sampling in these slots."""
        self.state[1, self._to_device(np.array(slots, np.int64))] = self.cache.spare

    def fill(self, pieces: Sequence[PromptPiece]) -> None:
        """Compute the keys and values of these pieces of prompts."""
        sizes = [len(piece.ids) for piece in pieces]
        ids = self._to_device(np.concatenate([piece.ids for piece in pieces]).astype(np.int64))
        slots = self._to_device(np.repeat(np.array([piece.slot for piece in pieces], np.int64), sizes))
        places = [np.arange(p.start, p.start + n, dtype=np.int64) for p, n in zip(pieces, sizes, strict=True)]
        positions = self._to_device(np.concatenate(places))
        self.model.run(ids, positions, self._prompt_attention(pieces, slots, positions))

    def _prompt_attention(self, pieces: Sequence[PromptPiece], slots: Tensor, positions: Tensor) -> Attend:
        return self.cache.prompt_attention(pieces, slots, positions)

    def _to_device(self, values: NDArray[Any]) -> Tensor:
        """Copy values to the model's device without synchronizing."""
        here = torch.from_numpy(np.ascontiguousarray(values))
        return here.pin_memory().to(self.state.device, non_blocking=True) if self.state.is_cuda else here

    def launch(self, slots: Places, adjustments: Sequence[Adjustment]) -> Pending:
        """Launch a step for `slots`, which must be in ascending order.

        If there are adjustments, the results of all earlier steps must have been collected.
        """
        index = torch.from_numpy(slots)
        tokens, positions, seeds, drawn = self.state[:, index]
        attend = self.cache.step_attention(slots, positions.numpy())
        scores = self._compute_scores(self.model.run(tokens, positions, attend))
        for row in adjustments:
            adjust_scores(scores, row)
        masks = {row.row: find_kept(scores, row) for row in adjustments if row.wants_mask}
        temperature = self.temperature[index]
        ids, logprobs = draw(scores, temperature, seeds, drawn, some_greedy=bool((temperature == 0).any()))
        self.state[0, index] = ids
        self.state[1, index] = positions + 1
        self.state[3, index] = drawn + 1
        return Pending(slots, ids, logprobs, masks=masks)

    def _compute_scores(self, hidden: Tensor) -> Tensor:
        """Compute scores in float32. On a GPU, they are never rounded to bfloat16, whose values above 16 are at least an eighth apart."""
        if hidden.is_cuda and hidden.dtype != torch.float32:
            return torch.mm(hidden, self.model.head.t(), out_dtype=torch.float32)
        return self.model.scores(hidden).float()

    def collect(self, pending: Pending) -> tuple[Ids, Logprobs]:
        return pending.ids.numpy().astype(ID_DTYPE), pending.logprobs.numpy()

    def settle(self) -> None:
        """Wait for all launched work."""

    def reset(self) -> None:
        """Stop sampling in all slots, after a failure, a pause or a weight update."""
        self.state[1] = self.cache.spare
