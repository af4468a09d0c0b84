"""The engine interface for a model in this process: calls in, chunks out.

    engine = LocalEngine("path/to/model")
    await engine.start()
    async with engine.updating(version=1):   # sampling pauses; calls in flight continue with the new weights
        optimizer.step()                     # over engine.model.parameters()

The event loop does no computation: `worker.py` samples in its own thread, and this module turns the worker's batches into streams.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import itertools
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from turngate.common.aio import run_to_completion
from turngate.engines.base import Chunk, Generate, Health, VersionRuns, refuse_top_logprobs
from turngate.engines.local.cache import KeyValues, Slots
from turngate.engines.local.decode import Decoder
from turngate.engines.local.model import Model
from turngate.engines.local.outbox import End, SampledBatch
from turngate.engines.local.weights import load as load_model
from turngate.engines.local.weights import load_into
from turngate.engines.local.worker import SamplingOrder, Worker
from turngate.engines.sampling_mask import build_masks
from turngate.engines.weights import unknown_path_error
from turngate.errors import ConfigError, ContextOverflow, EngineError, EngineRejected, EngineUnavailable
from turngate.types import ID_DTYPE, Ids, SideArray

if TYPE_CHECKING:
    from turngate.engines.weights import PolicyWeights

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SLOTS = {"cpu": 16, "cuda": 256}
_FILL_TOKENS = {"cpu": 512, "cuda": 16_384}
_FILL_S = {"cpu": 0.0, "cuda": 0.015}


class LocalEngine:
    """An engine that samples in this process. `model` is a folder, or a model that is being trained.

    `dtype` "auto" is float32 on a CPU and bfloat16 on a GPU. If the given model has a different dtype, the engine samples from a copy
    that is refreshed after every update. Otherwise, the trainer and the engine share parameters. `slots` is the number of calls that are
    sampled concurrently; other calls wait. `max_context` is capped at the model's own limit. Each slot reserves memory for `max_context`
    tokens.
    """

    def __init__(
        self,
        model: Model | str | Path,
        *,
        device: Device = "auto",
        dtype: Dtype = "auto",
        slots: int | None = None,
        max_context: int | None = None,
        served: str = "",
        name: str = "local",
        fill_tokens: int | None = None,
        flush_s: float = 0.02,
    ) -> None:
        self.name = name
        self.served = served or (Path(model).name if not isinstance(model, Model) else name)
        kind = model.device.type if isinstance(model, Model) else _choose_device(device)
        sampling_dtype = _choose_dtype(dtype, kind)
        self.model = model if isinstance(model, Model) else load_model(model, kind, sampling_dtype)
        self.max_context = min(max_context or self.model.shape.context, self.model.shape.context)
        self._sampling_copy = (
            None
            if self.model.dtype == sampling_dtype
            else copy.deepcopy(self.model).requires_grad_(False).to(sampling_dtype)
        )
        sampled = self._sampling_copy or self.model
        self.slots = slots or _choose_slots(sampled, self.max_context, kind)
        self._decoder = _create_decoder(sampled, self.slots, self.max_context)
        self._table = Slots(self.slots, self.max_context)
        self._worker = Worker(
            self._decoder,
            self._table,
            self._deliver,
            fill_tokens=fill_tokens or _FILL_TOKENS[kind],
            fill_s=_FILL_S[kind],
            flush_s=flush_s,
        )
        self._serials = itertools.count(1)
        self._open: dict[int, LocalGeneration] = {}
        self._guard = threading.Lock()  # guards `_open`, which the event loops and the worker's thread use
        self._state: Literal["new", "started", "closed"] = "new"
        self._folder = None if isinstance(model, Model) else model
        self._paused = False
        self._version: int | None = None  # version of the weights, if known
        self._expected: int | None = None
        self._has_weights = True  # False after a failed load, which may leave a mix of old and new weights
        self.reports_weights = True

    def __repr__(self) -> str:
        return f"LocalEngine({self.served!r}, device={self.model.device}, dtype={self._decoder.model.dtype}, slots={self.slots})"

    @property
    def reused_tokens(self) -> int:
        """The number of prompt tokens that were found in the cache."""
        return self._table.reused

    async def start(self) -> None:
        if self._state == "new":
            self._state = "started"
            self._worker.start()
            atexit.register(self._worker.end)  # a running thread would crash the interpreter at exit

    async def close(self) -> None:
        started, self._state = self._state == "started", "closed"
        if started:
            await asyncio.to_thread(self._worker.end)
            atexit.unregister(self._worker.end)

    async def health(self) -> list[Health]:
        detail = self._why_unavailable()
        wrong = not self._has_weights or (self._expected is not None and self._expected != self._version)
        if wrong:
            detail = detail or f"weight version {self._expected} is not loaded; repeat POST /admin/weights"
        return [
            Health(
                url=self.address,
                ok=not detail,
                detail=detail,
                model=self.served,
                max_context=self.max_context,
                in_flight=len(self._open),
                wrong=wrong,
            )
        ]

    def release(self, session: str) -> None:
        """Do nothing: a session's cached prefix is overwritten when its slot is the least recently used."""

    def generate(self, request: Generate) -> LocalGeneration:
        return LocalGeneration(self, request)

    @asynccontextmanager
    async def updating(self, version: int | None = None, *, drain: bool = False) -> AsyncIterator[Model]:
        """Pause sampling to change the weights.

        With `drain`, wait until running calls have finished. Otherwise, they keep their sampled tokens and continue afterwards with the new
        weights. Cached prefixes are recomputed, so each log-probability is computed with a single set of weights.

        `version` is the policy version after the update. If it is set, chunks carry the version that sampled them. Otherwise the
        gateway records each chunk with the policy version that is current when the chunk arrives.
        """
        reached = self._worker.hold(drain)
        next_version: int | None = self._version
        try:
            await asyncio.wrap_future(reached)
            yield self.model
            await asyncio.to_thread(self._refresh_copy)
            next_version = version
        finally:
            self._resume(next_version)

    @contextmanager
    def updating_here(self, version: int | None = None, *, drain: bool = False) -> Iterator[Model]:
        """Pause sampling like `updating`, for a thread without an event loop."""
        reached = self._worker.hold(drain)
        next_version: int | None = self._version
        try:
            reached.result()
            yield self.model
            self._refresh_copy()
            next_version = version
        finally:
            self._resume(next_version)

    def _resume(self, version: int | None) -> None:
        self._version = version
        self._worker.resume(version)

    def _refresh_copy(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # the trainer uses a different stream
        if self._sampling_copy is not None:
            with torch.no_grad():
                for copied, trained in zip(self._sampling_copy.parameters(), self.model.parameters(), strict=True):
                    copied.copy_(trained)
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)

    # ── weights from a folder (`engines/weights.py`) ────────────────────────────────────────────────────────────────

    @property
    def address(self) -> str:
        return f"{self.name}:{self.model.device}"

    async def pause(self) -> None:
        if not self._paused:
            self._paused = True
            await asyncio.wrap_future(self._worker.hold(drain=False))

    async def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._worker.resume(self._version)

    async def load(self, weights: PolicyWeights, *, frozen: bool) -> None:
        """Load weights. Calls in flight recompute their context with the new weights, whether `frozen` is set or not."""
        if weights.is_adapter:
            raise EngineRejected(
                f"{self.name} does not support adapters; merge {weights.name!r} into the model, and load the merged model"
            )
        await self._load(weights.path, weights.version)

    async def reload_initial_weights(self, *, frozen: bool) -> None:
        try:
            await self._load(self._folder or "", None)
        except EngineRejected:  # the weights that it should no longer have are still loaded
            self._reject_calls()
            raise

    async def abort_all(self) -> None:
        self._worker.abort_all()

    async def unload(self, name: str) -> None:
        """Do nothing: this engine has no adapters."""

    def expect(self, weights: PolicyWeights | None) -> None:
        self._expected = None if weights is None else weights.version

    async def _load(self, folder: str | Path, version: int | None) -> None:
        """Load weights.

        If `folder` is empty, or if loading fails or is cancelled after weights may have changed, reject calls until another load succeeds.
        """
        if not folder:
            self._reject_calls()
            raise unknown_path_error(self.name)
        async with self.updating(version):
            try:
                await run_to_completion(asyncio.to_thread(load_into, self.model, folder))
            except ConfigError as error:  # raised before any weight is changed
                raise EngineRejected(f"{self.name}: {error.message}") from None
            except BaseException as error:
                self._reject_calls()
                if not isinstance(error, RuntimeError | MemoryError):
                    raise
                why = str(error).partition("\n")[0] or "out of memory"
                raise EngineError(
                    f"{self.name}: the weights in {folder} may have been loaded only partly ({why}); load weights again "
                    "or restart the engine"
                ) from error
        self._has_weights = True

    def _reject_calls(self) -> None:
        self._has_weights = False
        self._worker.abort_all()

    # ── calls ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _why_unavailable(self) -> str:
        if self._worker.broken:
            return self._worker.broken
        if not self._has_weights:
            return "its last weight update failed, so it may have the wrong weights; load weights again or restart the engine"
        if self._state == "started":
            return ""
        return "it was closed" if self._state == "closed" else "it was not started"

    def build_order(self, request: Generate) -> SamplingOrder:
        """Build the worker's order for a request. Reject a request that the engine cannot serve."""
        if why := self._why_unavailable():
            raise EngineUnavailable(f"the engine {self.name!r} is unavailable: {why}")
        refuse_top_logprobs(self.name, request)
        if request.constraint is not None:
            raise EngineRejected(
                f"{self.name} does not support constrained output ({request.constraint.kind}); "
                "use vLLM or SGLang, or remove the constraint"
            )
        prompt = np.ascontiguousarray(request.prompt, ID_DTYPE)
        if not prompt.size:
            raise EngineRejected(f"{self.name}: the prompt is empty")
        vocabulary = self.model.shape.vocabulary
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            wrong = int(prompt[(prompt < 0) | (prompt >= vocabulary)][0])
            raise EngineRejected(
                f"{self.name}: id {wrong} is outside the model's vocabulary of {vocabulary} tokens; use the model's own tokenizer"
            )
        room = self.max_context - prompt.size
        if room < 1:
            raise ContextOverflow(
                f"{self.name}: the prompt has {prompt.size} tokens, which leaves no room for a reply in a context of {self.max_context}",
                limit=self.max_context,
                size=int(prompt.size),
            )
        if request.max_tokens < 1:
            raise EngineRejected(f"{self.name}: max_tokens must be 1 or more, not {request.max_tokens}")
        stop_ids = tuple(i for i in request.stop_ids if 0 <= i < vocabulary)
        max_tokens = min(request.max_tokens, room)
        return SamplingOrder(
            next(self._serials),
            prompt,
            max_tokens,
            request.sampling,
            stop_ids,
            request.cache_salt,
            request.sampling_mask,
        )

    def submit(self, order: SamplingOrder, generation: LocalGeneration) -> None:
        with self._guard:
            self._open[order.serial] = generation
        self._worker.submit(order)

    def leave(self, serial: int, *, over: bool) -> None:
        with self._guard:
            self._open.pop(serial, None)
        if not over:
            self._worker.abort(serial)

    def _deliver(self, batch: SampledBatch) -> None:
        """Pass a batch to the event loop of each call. This runs in the worker's thread."""
        with self._guard:
            loops = {generation.loop for generation in self._open.values()}
        for loop in loops:
            try:
                loop.call_soon_threadsafe(self._hand_out, loop, batch)
            except RuntimeError:  # the loop was closed with open calls
                self._abandon(loop)

    def _abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._guard:
            serials = [serial for serial, generation in self._open.items() if generation.loop is loop]
        for serial in serials:
            self.leave(serial, over=False)

    def _hand_out(self, loop: asyncio.AbstractEventLoop, batch: SampledBatch) -> None:
        """Hand a batch to the calls whose event loop is `loop`. This runs in that loop."""
        bounds = np.flatnonzero(np.diff(batch.serials)) + 1
        for serials, ids, logprobs in zip(
            np.split(batch.serials, bounds), np.split(batch.ids, bounds), np.split(batch.logprobs, bounds), strict=True
        ):
            generation = self._open.get(int(serials[0])) if serials.size else None
            if generation is not None and generation.loop is loop:
                generation.take(ids.tolist(), logprobs.tolist(), batch.version, batch.masks.get(int(serials[0]), ()))
        for serial, end in batch.ends.items():
            generation = self._open.get(serial)
            if generation is not None and generation.loop is loop:
                generation.finish(end)


class LocalGeneration:
    """A call as a stream of chunks. The call starts when the first chunk is requested. Leaving the context early aborts the call."""

    def __init__(self, engine: LocalEngine, request: Generate) -> None:
        self.loop = asyncio.get_running_loop()
        self._engine, self._request = engine, request
        self._serial = 0
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._masks: list[Ids] = []
        self._sampled = 0  # tokens in earlier chunks
        self._versions: tuple[int | None, int | None] = (None, None)
        # (version, number of tokens) of all tokens so far; None is an unknown version
        self._runs: list[tuple[int | None, int]] = []
        self._end: End | None = None
        self._done = False  # whether the last chunk was returned
        self._waiter: asyncio.Future[None] | None = None
        self._echo = request.echo_prompt
        self._in_pieces = request.stream or bool(request.stop)  # a stop string may end the call early

    async def __aenter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._serial:
            self._engine.leave(self._serial, over=self._end is not None)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._done:
            raise StopAsyncIteration
        if not self._serial:
            order = self._engine.build_order(self._request)
            self._serial = order.serial
            self._engine.submit(order, self)
        while self._end is None and not (self._ids and self._in_pieces):
            self._waiter = self.loop.create_future()
            await self._waiter
        if self._end is not None and not isinstance(self._end, str) and not self._ids:
            self._done = True
            raise type(self._end)(self._end.message)  # a separate exception for each call
        return self._chunk()

    def take(self, ids: list[int], logprobs: list[float], version: int | None, masks: Sequence[Ids]) -> None:
        if not self._ids:
            self._versions = (version, version)
        self._versions = (self._versions[0], version)
        if self._runs and self._runs[-1][0] == version:
            self._runs[-1] = (version, self._runs[-1][1] + len(ids))
        elif ids:
            self._runs.append((version, len(ids)))
        self._ids += ids
        self._logprobs += logprobs
        self._masks += masks
        if self._in_pieces:
            self._wake()

    def finish(self, end: End) -> None:
        self._end = end
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _chunk(self) -> Chunk:
        ids, self._ids = self._ids, []
        logprobs, self._logprobs = self._logprobs, []
        finish = self._end if isinstance(self._end, str) else None
        self._done = finish is not None
        prompt = self._request.prompt.tolist() if self._echo else None
        self._echo = False
        side: tuple[SideArray, ...] = ()
        if self._request.sampling_mask:
            masks, self._masks = self._masks, []
            side = build_masks(self._engine.name, self._sampled, ids, masks)
            self._sampled += len(ids)
        return Chunk(ids, logprobs, finish, prompt, self._span(), version_runs=self._list_runs(), side=side)

    def _span(self) -> tuple[int, int] | None:
        """Return the policy versions of the chunk's first and last token, or None if the last version is unknown.

        If only the first version is unknown, the request's version replaces it.
        """
        first, last = self._versions
        return None if last is None else (self._request.version if first is None else first, last)

    def _list_runs(self) -> VersionRuns | None:
        """Return the policy versions of all tokens so far, or None if the version has not changed since the first token.

        As in `_span`, the request's version replaces an unknown first version. The result is also None if a later version is unknown, or
        if the versions are not ascending.
        """
        if len(self._runs) < 2:
            return None
        (first, tokens), *later = self._runs
        known = tuple((version, count) for version, count in later if version is not None)
        runs = ((self._request.version if first is None else first, tokens), *known)
        is_valid = len(known) == len(later) and all(one[0] < other[0] for one, other in pairwise(runs))
        return runs if is_valid else None


def _choose_device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, not {device!r}", param="device")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device (engine_device in a gateway's settings) is cuda, but torch found no CUDA device; use cpu instead",
            param="device",
        )
    return device


def _choose_dtype(dtype: str, kind: str) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if kind == "cuda" else torch.float32
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be auto, float32 or bfloat16, not {dtype!r}", param="dtype")
    return _DTYPES[dtype]


def _choose_slots(model: Model, length: int, kind: str) -> int:
    """Return the default number of slots, or fewer if their cache would need too much memory.

    The limit is half of the machine's memory for a CPU, and half of the free GPU memory for a GPU.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = torch.cuda.mem_get_info(model.device)[0] if kind == "cuda" else machine
    return max(1, min(_SLOTS[kind], memory // 2 // KeyValues.bytes_per_slot(model.shape, length, model.dtype)))


def _create_decoder(model: Model, slots: int, length: int) -> Decoder:
    if model.device.type == "cuda":
        from turngate.engines.local.graphs import GraphDecoder

        return GraphDecoder(model, slots, length)
    return Decoder(model, slots, length)
