"""The decoder for a GPU, where launching a thousand operations takes longer than a small model's computation.

A step (run the network, draw ids, and update the state for the next step) is recorded once as a CUDA graph and replayed with one launch.
The next step can therefore be launched while the results of the previous one are being copied. A graph has a fixed number of rows,
enough for every slot up to the last one that samples. Idle slots in these rows are computed too, but they write to the cache's spare
position and their results are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from turngate.engines.local.cache import Places, PromptPiece
from turngate.engines.local.decode import Decoder, Pending
from turngate.engines.local.kernels import attend_slots
from turngate.engines.local.model import Attend, Model
from turngate.engines.local.sampler import Adjustment, adjust_scores, draw, find_kept
from turngate.types import ID_DTYPE, Ids, Logprobs

_ROWS = 8  # rows of the smallest graph; each larger one has twice as many
_MASK = 1 << 28  # maximum number of elements in the attention mask of a group of prompts


class _Results(msgspec.Struct):
    """Host buffers for the results of one step, and an event that is set when they arrive."""

    ids: Tensor
    logprobs: Tensor
    arrived: torch.cuda.Event


class GraphDecoder(Decoder):
    """A decoder that replays CUDA graphs."""

    ahead = 1

    def __init__(self, model: Model, slots: int, length: int) -> None:
        super().__init__(model, slots, length)
        self._ids = torch.zeros(slots, dtype=torch.int64, device=model.device)
        self._logprobs = torch.zeros(slots, device=model.device)
        self._scores: Tensor | None = None  # only for steps with adjustments
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._pool: tuple[int, int] | None = None
        self._results: list[_Results] = []
        self._turn = 0
        model.angles(model.device)
        if model.device.type == "cuda":  # false only in tests, which run the arithmetic on a CPU
            self._stream = torch.cuda.Stream(model.device)
            self._results = [
                _Results(
                    torch.zeros(slots, dtype=torch.int64, pin_memory=True),
                    torch.zeros(slots, pin_memory=True),
                    torch.cuda.Event(),
                )
                for _ in range(self.ahead + 2)
            ]
            torch.cuda.synchronize(model.device)

    @contextmanager
    def thread_context(self) -> Iterator[None]:
        with torch.cuda.device(self.model.device), torch.cuda.stream(self._stream):
            yield

    def launch(self, slots: Places, adjustments: Sequence[Adjustment]) -> Pending:
        rows = _round_rows(int(slots[-1]) + 1, _ROWS, self.state.shape[1])
        self._replay(rows, draws=not adjustments)
        masks: dict[int, Ids] = {}
        if adjustments:
            assert self._scores is not None
            for row in adjustments:
                placed = msgspec.structs.replace(row, row=int(slots[row.row]))
                adjust_scores(self._scores, placed)
                if row.wants_mask:
                    masks[row.row] = find_kept(self._scores, placed)
            self._draw(self._scores[:rows], rows)
        results = self._results[self._turn % len(self._results)]
        self._turn += 1
        results.ids[:rows].copy_(self._ids[:rows], non_blocking=True)
        results.logprobs[:rows].copy_(self._logprobs[:rows], non_blocking=True)
        results.arrived.record(self._stream)
        return Pending(slots, results.ids, results.logprobs, results.arrived, masks)

    def collect(self, pending: Pending) -> tuple[Ids, Logprobs]:
        assert pending.arrived is not None
        pending.arrived.synchronize()
        return pending.ids.numpy()[pending.slots].astype(ID_DTYPE), pending.logprobs.numpy()[pending.slots]

    def fill(self, pieces: Sequence[PromptPiece]) -> None:
        for group in self._group_by_size(pieces):
            super().fill(group)

    def settle(self) -> None:
        torch.cuda.synchronize(self.model.device)

    def reset(self) -> None:
        torch.cuda.synchronize(self.model.device)  # fails if the device is lost
        super().reset()
        torch.cuda.empty_cache()

    # ── the step ────────────────────────────────────────────────────────────────────────────────────────────────

    def _replay(self, rows: int, draws: bool) -> None:
        if (rows, draws) not in self._graphs:
            self._graphs[rows, draws] = self._record_graph(rows, draws)
        self._graphs[rows, draws].replay()

    def _record_graph(self, rows: int, draws: bool) -> torch.cuda.CUDAGraph:
        """Record a step as a graph. `draws` selects whether the step also samples.

        First, the step is run once to warm up libraries. Then the state is restored, so that the first replay repeats the step. The
        cache entries that the run has written stay valid.
        """
        if not draws and self._scores is None:
            size = (self.state.shape[1], self.model.shape.vocabulary)
            self._scores = torch.zeros(size, device=self.model.device)
        before = self.state.clone()
        self._step(rows, draws)
        self.state.copy_(before)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.current_stream().synchronize()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            self._step(rows, draws)
        return graph

    def _step(self, rows: int, draws: bool) -> None:
        tokens, positions = self.state[0, :rows], self.state[1, :rows]
        within = positions.clamp(max=self.model.shape.context - 1)  # idle slots have positions beyond the context
        scores = self._compute_scores(self.model.run(tokens, within, self._attend(rows, positions)))
        if draws:
            self._draw(scores, rows)
        else:
            assert self._scores is not None
            self._scores[:rows].copy_(scores)

    def _draw(self, scores: Tensor, rows: int) -> None:
        state = self.state[:, :rows]
        ids, logprobs = draw(scores, self.temperature[:rows], state[2], state[3])
        self._ids[:rows].copy_(ids)
        self._logprobs[:rows].copy_(logprobs)
        state[0].copy_(ids)
        state[1].add_(1).clamp_(max=self.cache.spare)
        state[3].add_(1)

    def _attend(self, rows: int, positions: Tensor) -> Attend:
        slots = torch.arange(rows, device=self.model.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache.tensor[layer]
            keys[slots, :, positions], values[slots, :, positions] = k, v
            return attend_slots(q, keys, values, positions, self.cache.spare)

        return attend

    # ── prompts ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _group_by_size(self, pieces: Sequence[PromptPiece]) -> Iterator[list[PromptPiece]]:
        """Group pieces of similar size. The pieces of a group are padded and computed together."""
        group: list[PromptPiece] = []
        heads = self.model.shape.heads
        for piece in sorted(pieces, key=lambda p: len(p.ids)):
            size, span = len(piece.ids), max([p.start + len(p.ids) for p in (*group, piece)])
            if group and (size > 2 * len(group[0].ids) + 16 or (len(group) + 1) * heads * size * span > _MASK):
                yield group
                group = []
            group.append(piece)
        if group:
            yield group

    def _prompt_attention(self, pieces: Sequence[PromptPiece], slots: Tensor, positions: Tensor) -> Attend:
        device, dtype = self.model.device, self.model.dtype
        sizes = [len(piece.ids) for piece in pieces]
        size, span = max(sizes), _round_up(max(p.start + n for p, n in zip(pieces, sizes, strict=True)))
        span = min(span, self.cache.spare + 1)
        which = self._to_device(np.array([p.slot for p in pieces], np.int64))
        # Positions of the flat batch in the padded one.
        flat = np.concatenate([row * size + np.arange(n) for row, n in enumerate(sizes)])
        at = self._to_device(flat.astype(np.int64))
        starts = self._to_device(np.array([p.start for p in pieces], np.int64))
        places = starts[:, None] + torch.arange(size, device=device)
        seen = torch.arange(span, device=device) <= places[..., None]  # (pieces, size, span)
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)
        kv = self.model.shape.kv_heads
        group = self.model.shape.heads // kv
        bias = mask[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3).expand(-1, kv, -1, -1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache.tensor[layer]
            keys[slots, :, positions], values[slots, :, positions] = k, v
            padded = q.new_zeros((len(pieces) * size, *q.shape[1:]))
            padded[at] = q
            # (pieces * size, heads, head) → (pieces, kv_heads, group * size, head)
            queries = padded.view(len(pieces), size, kv, group, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
            output = F.scaled_dot_product_attention(
                queries, keys[which, :, :span], values[which, :, :span], attn_mask=bias
            )
            output = output.unflatten(2, (group, size)).permute(0, 3, 1, 2, 4).reshape(padded.shape)
            return output[at]

        return attend


def _round_rows(rows: int, least: int, most: int) -> int:
    """Round up to a power of two times `least`, but not above `most`."""
    size = least
    while size < rows:
        size *= 2
    return min(size, most)


def _round_up(size: int) -> int:
    return -(-size // 64) * 64
