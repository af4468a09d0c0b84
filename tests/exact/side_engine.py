"""An engine that reports side data from which each token, its context and the reporting call can be told."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np

from turngate.engines.base import Chunk, Generate
from turngate.engines.scripted import Scripted
from turngate.types import RaggedArray, SideArray

EXPERTS = "routed_experts"  # 2 × 3 small integers for tokens of the prompt and the reply, at the end of a call
SCORES = "scores"  # one number for each token of the reply, with each chunk
LISTS = "lists"  # a list of 0 to 4 numbers for each token of the reply, with each chunk


class Report(NamedTuple):
    """Which tokens a call reported, counted from the root."""

    call: int
    prompt: bytes
    reply: bytes
    experts: range
    scores: range


class SideEngine(Scripted):
    """What a call reports depends on its prompt, so that equal calls report the same tokens."""

    forms: tuple[str, ...] = ("all", "all", "last", "reply", "prompt", "none")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.reports: list[Report] = []

    @asynccontextmanager
    async def generate(self, request: Generate) -> AsyncIterator[AsyncIterator[Chunk]]:
        async with super().generate(request) as chunks:
            yield self._add_side_data(request, len(self.received), chunks)

    async def _add_side_data(self, request: Generate, call: int, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        prompt = np.array(request.prompt, np.int32)
        ids, size = prompt.tolist(), len(prompt)
        experts, scores = range(0), range(0)
        self.reports.append(Report(call, prompt.tobytes(), b"", experts, scores))
        at = len(self.reports) - 1
        async for chunk in chunks:
            before = len(ids)
            ids += chunk.ids
            hashes, side = hash_prefixes(ids), []
            form = self.forms[zlib.crc32(prompt.tobytes()) % len(self.forms)]
            if form in ("all", "reply") and chunk.ids:
                side.append(SideArray(SCORES, before - size, hashes[before:].astype(np.float32)))
                side.append(SideArray(LISTS, before - size, make_lists(hashes[before:])))
                scores = range(size, len(ids))
            first = size if form == "last" else 0
            end = size if form == "prompt" else len(ids) - 1
            if chunk.finish is not None and form in ("all", "last", "prompt") and end > first:
                experts = range(first, end)
                side.append(SideArray(EXPERTS, first - size, make_experts(hashes[first:end], call)))
            # Before the yield: if the gateway stops reading, the rest of this function does not run.
            reply = np.array(ids[size:], np.int32).tobytes()
            self.reports[at] = Report(call, prompt.tobytes(), reply, experts, scores)
            yield msgspec.structs.replace(chunk, side=tuple(side))


def hash_prefixes(ids: Sequence[int]) -> np.ndarray:
    """A number for each token that depends on all tokens up to it, and is exact as a 32-bit float."""
    state, found = 0, []
    for token in ids:
        state = zlib.crc32(int(token).to_bytes(4, "little"), state)
        found.append(state >> 8)
    return np.array(found, np.int64)


def make_experts(hashes: np.ndarray, call: int) -> np.ndarray:
    values = [[[h & 255, h >> 8 & 255, h >> 16], [call & 255, call >> 8, 7]] for h in hashes.tolist()]
    return np.array(values, np.uint8)


def make_lists(hashes: np.ndarray) -> RaggedArray:
    return RaggedArray.from_lists([[h] * (h % 5) for h in hashes.tolist()])
