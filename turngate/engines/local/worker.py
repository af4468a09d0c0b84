"""The sampling thread. It uses no event loop: calls arrive in a queue, and results leave in batches (`outbox.py`).

The thread repeats this loop: run commands (new calls, aborts, holds, end) → place waiting calls into slots → fill (compute a bounded part
of the prompts) → step (one token id for every slot that samples) → flush. The Python cost of a step hardly grows with the number of slots,
because the slots' state is in numpy arrays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import msgspec
import numpy as np
import torch

from turngate.engines.local.cache import Places, PromptPiece, Slots
from turngate.engines.local.decode import Decoder, Pending, SlotStart
from turngate.engines.local.outbox import Deliver, End, Outbox
from turngate.engines.local.sampler import Adjustment
from turngate.errors import EngineError, EngineUnavailable
from turngate.types import Ids, Logprobs, Sampling

log = logging.getLogger(__name__)
_TRIES = 3  # consecutive failures after which the engine stops


class SamplingOrder(msgspec.Struct, frozen=True):
    """A generation request for the worker, with a unique `serial` number."""

    serial: int
    prompt: Ids
    max_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    salt: str
    wants_mask: bool = False


class _Hold(msgspec.Struct):
    """A request to pause sampling for a weight update. With `drain`, running calls may finish first."""

    reached: Future[None]
    drain: bool

    def signal(self) -> None:
        """Signal that sampling has paused, unless the requester has stopped waiting."""
        if not self.reached.done() and self.reached.set_running_or_notify_cancel():
            self.reached.set_result(None)


class _Running:
    """A call that the worker has accepted. `ids` contains the prompt, and any tokens sampled before a weight update."""

    __slots__ = ("adjusted", "drawn", "ids", "order", "seed", "was_interrupted")

    def __init__(self, order: SamplingOrder) -> None:
        self.order = order
        self.ids = order.prompt
        self.drawn = 0
        self.was_interrupted = False
        seed = order.sampling.seed
        self.seed = int.from_bytes(os.urandom(8), "little", signed=True) if seed is None else seed
        bias = [name for name in order.sampling.biases() if name != "greedy"]
        self.adjusted = bool(bias)


class Worker:
    """A worker that samples in its own thread. Public methods may be called from any thread."""

    def __init__(
        self, decoder: Decoder, slots: Slots, deliver: Deliver, *, fill_tokens: int, fill_s: float, flush_s: float
    ) -> None:
        self.broken = ""  # why sampling has stopped for good; empty while it works
        self._decoder = decoder
        self._slots = slots
        self._fill_tokens = fill_tokens
        self._fill_s = fill_s
        self._outbox = Outbox(deliver, flush_s)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: OrderedDict[int, _Running] = OrderedDict()
        self._running: dict[int, _Running] = {}  # by slot
        self._places: dict[int, int] = {}  # slot by serial
        self._filling: list[int] = []  # slots, oldest first
        self._filling_since = 0.0
        self._holds: list[_Hold] = []
        self._ending = False
        self._over = False  # whether the worker has ended and rejects new calls
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="turngate-local-engine", daemon=True)
        # Per slot: the call that samples in it (0: none), its length, tokens drawn and allowed, stop ids.
        count = slots.count
        self._serial = np.zeros(count, np.int64)
        self._length = np.zeros(count, np.int64)
        self._drawn = np.zeros(count, np.int64)
        self._max_tokens = np.zeros(count, np.int64)
        self._stops = np.full((count, 1), -1, np.int64)
        self._adjusted: set[int] = set()  # slots whose scores are adjusted
        self._pending: deque[tuple[Pending, Places]] = deque()
        self._version: int | None = None

    # ── for other threads ───────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._thread.start()

    def submit(self, order: SamplingOrder) -> None:
        self._commands.put(lambda: self._waiting.__setitem__(order.serial, _Running(order)))
        if self._over:
            raise EngineUnavailable("the local engine has stopped")

    def abort(self, serial: int) -> None:
        self._commands.put(lambda: self._abort(serial))

    def abort_all(self) -> None:
        """Fail all calls, including waiting ones."""
        self._commands.put(self._abort_all)

    def hold(self, drain: bool) -> Future[None]:
        """Pause sampling. Return a future that is done once sampling has paused. The caller must call `resume`."""
        hold = _Hold(Future(), drain)
        self._commands.put(lambda: self._holds.append(hold))
        if self._over or not self._thread.is_alive():
            hold.signal()
        return hold.reached

    def resume(self, version: int | None = None) -> None:
        """End a hold. When no holds remain, resume sampling with the weights of `version` (None: unknown).

        Interrupted calls keep their sampled tokens. Cached prefixes are discarded, because they were computed with the old weights.
        """
        self._commands.put(lambda: self._resume(version))

    def end(self) -> None:
        """Fail all calls, stop the thread, and wait for it to exit."""
        self._commands.put(lambda: setattr(self, "_ending", True))
        if self._thread.is_alive():
            self._thread.join()

    # ── commands, in the thread ─────────────────────────────────────────────────────────────────────────────────

    def _abort(self, serial: int) -> None:
        self._waiting.pop(serial, None)
        slot = self._places.get(serial)
        if slot is not None:
            self._free(slot)
            self._decoder.park([slot])

    def _abort_all(self) -> None:
        slots = list(self._running)
        self._fail_all(EngineUnavailable("the local engine aborted all calls; retry this call"), waiting=True)
        if slots:
            self._decoder.park(slots)

    def _resume(self, version: int | None) -> None:
        self._holds.pop(0)
        self._version = version  # earlier samples were flushed when sampling paused
        if self._holds:
            return
        self._slots.forget()
        interrupted = []
        for slot in sorted(self._running, key=lambda slot: self._running[slot].order.serial):
            call = self._running[slot]
            call.was_interrupted = True
            call.ids, call.drawn = self._slots.ids[slot, : self._length[slot]].copy(), int(self._drawn[slot])
            self._free(slot)
            interrupted.append(call)
        if interrupted:
            self._decoder.reset()
        self._slots.forget()
        for call in reversed(interrupted):
            self._waiting[call.order.serial] = call
            self._waiting.move_to_end(call.order.serial, last=False)

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        with torch.inference_mode(), self._decoder.thread_context():
            while not self._ending:
                try:
                    self._iterate()
                    if self._outbox.samples or self._outbox.ends:
                        self._failures = 0
                except Exception as error:  # reported to the calls that it fails
                    self._handle_failure(error)
                self._outbox.flush(self._version)
            self._over = True
            self._run_commands()
            self._fail_all(EngineUnavailable("the local engine has stopped"), waiting=True)
            self._signal_holds()
            self._outbox.flush(self._version, now=True)

    def _iterate(self) -> None:
        self._await_commands()
        if self._holds and not self._is_draining():
            self._collect(leave=0)
            self._outbox.flush(self._version, now=True)
            self._decoder.settle()
            self._signal_holds()
            return
        self._place()
        self._fill()
        self._step()

    def _signal_holds(self) -> None:
        for hold in self._holds:
            hold.signal()

    def _is_draining(self) -> bool:
        """Return whether started calls must end before sampling pauses. These include calls that an update has interrupted."""
        started = bool(self._running) or any(call.was_interrupted for call in self._waiting.values())
        return self._holds[0].drain and started

    def _await_commands(self) -> None:
        """Run queued commands. Wait for one if there is nothing else to do, or if sampling is paused."""
        if all(hold.reached.done() for hold in self._holds) and (self._holds or not (self._running or self._waiting)):
            self._outbox.flush(self._version, now=True)
            self._commands.get()()
        self._run_commands()

    def _run_commands(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _place(self) -> None:
        """Place waiting calls into free slots, oldest first."""
        for serial, call in list(self._waiting.items()):
            if self._slots.taken.all():
                return
            if self._holds and not call.was_interrupted:
                continue
            taken = self._slots.take(call.ids, call.order.salt)
            if taken is None:
                continue  # another call is computing a prefix that this one can use
            del self._waiting[serial]
            slot, source, size = taken
            if source != slot:
                self._decoder.cache.copy(source, slot, size)
            self._running[slot] = call
            self._places[serial] = slot
            self._length[slot] = len(call.ids)
            self._drawn[slot] = call.drawn
            self._max_tokens[slot] = call.order.max_tokens
            self._set_stops(slot, call.order.stop_ids)
            if not self._filling:
                self._filling_since = time.monotonic()
            self._filling.append(slot)

    def _set_stops(self, slot: int, stop_ids: Sequence[int]) -> None:
        if (more := len(stop_ids) - self._stops.shape[1]) > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, more)), constant_values=-1)
        self._stops[slot] = -1
        self._stops[slot, : len(stop_ids)] = stop_ids

    def _fill(self) -> None:
        """Compute a bounded part of the pending prompts. Calls whose whole prompt has been computed start sampling."""
        slots, room, pieces = self._slots, self._fill_tokens, []
        for slot in self._filling if self._filling_is_due() else ():
            start, end = int(slots.computed[slot]), int(slots.planned[slot])
            if start < end and room > 0:
                end = min(end, start + room)
                pieces.append(PromptPiece(slot, start, slots.ids[slot, start:end]))
                room -= end - start
        if pieces:
            self._decoder.fill(pieces)
        for piece in pieces:
            slots.computed[piece.slot] += len(piece.ids)
        ready = [slot for slot in self._filling if slots.computed[slot] == slots.planned[slot]]
        if ready:
            self._filling = [slot for slot in self._filling if slot not in ready]
            self._filling_since = time.monotonic()
            self._decoder.arm([self._start_slot(slot) for slot in ready])

    def _filling_is_due(self) -> bool:
        """Return whether to compute prompts now.

        On a GPU, computing many prompts costs little more than computing one, so the first prompt waits briefly for others.
        """
        waited = time.monotonic() - self._filling_since >= self._fill_s
        return waited or 8 * len(self._filling) >= self._slots.count or not self._serial.any()

    def _start_slot(self, slot: int) -> SlotStart:
        call, last = self._running[slot], int(self._length[slot]) - 1
        self._serial[slot] = call.order.serial
        if call.adjusted:
            self._adjusted.add(slot)
        return SlotStart(slot, int(call.ids[last]), last, call.seed, call.drawn, call.order.sampling.temperature)

    def _step(self) -> None:
        sampling = np.flatnonzero(self._serial)
        if sampling.size:
            if self._adjusted:
                self._collect(leave=0)  # adjustments need all sampled tokens
                sampling = np.flatnonzero(self._serial)
            if sampling.size:
                adjustments = [
                    _build_adjustment(row, self._running[slot].order, self._slots.ids[slot, : self._length[slot]])
                    for row, slot in enumerate(sampling.tolist())
                    if slot in self._adjusted
                ]
                pending = self._decoder.launch(sampling, adjustments)
                self._pending.append((pending, self._serial[sampling]))
        self._collect(leave=self._decoder.ahead if sampling.size and not self._adjusted else 0)

    def _collect(self, leave: int) -> None:
        """Collect the results of all pending steps except the newest `leave` steps."""
        while len(self._pending) > leave:
            pending, serials = self._pending.popleft()
            ids, logprobs = self._decoder.collect(pending)
            same = self._serial[pending.slots] == serials  # a call may have ended during its next step
            masks = {int(serials[row]): kept for row, kept in pending.masks.items() if same[row]}
            self._accept(pending.slots[same], serials[same], ids[same], logprobs[same], masks)

    def _accept(self, slots: Places, serials: Places, ids: Ids, logprobs: Logprobs, masks: Mapping[int, Ids]) -> None:
        if not slots.size:
            return
        broken = ~np.isfinite(logprobs)
        if broken.any():
            wrong = EngineError(
                "the model's scores are not finite; its weights may be damaged, or its training may have diverged"
            )
            self._finish(slots[broken], dict.fromkeys(serials[broken].tolist(), wrong))
            masks = {serial: kept for serial, kept in masks.items() if serial not in serials[broken]}
            slots, serials, ids, logprobs = slots[~broken], serials[~broken], ids[~broken], logprobs[~broken]
        self._slots.ids[slots, self._length[slots]] = ids
        self._slots.computed[slots] = self._slots.planned[slots] = self._length[slots]
        self._length[slots] += 1
        self._drawn[slots] += 1
        self._outbox.samples.append((serials, ids, logprobs))
        for serial, kept in masks.items():
            self._outbox.masks.setdefault(serial, []).append(kept)
        stopped = (ids[:, None] == self._stops[slots]).any(axis=1)
        over = stopped | (self._drawn[slots] >= self._max_tokens[slots])
        if over.any():
            why = zip(serials[over].tolist(), stopped[over].tolist(), strict=True)
            self._finish(slots[over], {serial: "stop" if stop else "length" for serial, stop in why})

    def _finish(self, slots: Places, ends: dict[int, End]) -> None:
        self._outbox.ends |= ends
        for slot in slots.tolist():
            self._free(slot)
        self._decoder.park(slots.tolist())

    def _free(self, slot: int) -> None:
        """Free a slot. Its computed prefix is kept for later calls that share it."""
        call = self._running.pop(slot)
        del self._places[call.order.serial]
        self._serial[slot] = 0
        self._adjusted.discard(slot)
        if slot in self._filling:
            self._filling.remove(slot)
        self._slots.leave(slot, int(self._slots.computed[slot]))

    # ── failures ────────────────────────────────────────────────────────────────────────────────────────────────

    def _handle_failure(self, error: Exception) -> None:
        """Fail all running calls after an error. Waiting calls are kept, unless errors occur repeatedly or the device is lost."""
        self._failures += 1
        log.error("the local engine failed: %s", error, exc_info=error)
        self._pending.clear()
        message = _explain(error)
        self._fail_all(EngineError(f"the local engine failed: {message}"), waiting=False)
        try:
            self._decoder.reset()
            self._slots.forget()
        except RuntimeError as lost:  # a faulted GPU no longer responds
            self.broken = f"{message}; the device is lost ({lost}); restart the gateway"
        if self._failures >= _TRIES:
            self.broken = f"it failed {_TRIES} times in a row: {message}; restart the gateway"
        if self.broken:
            self._fail_all(EngineUnavailable(f"the local engine has stopped: {self.broken}"), waiting=True)
            self._ending = True

    def _fail_all(self, error: EngineError, *, waiting: bool) -> None:
        for slot in list(self._running):
            self._outbox.ends[self._running[slot].order.serial] = error
            self._free(slot)
        if waiting:
            self._outbox.ends |= dict.fromkeys(self._waiting, error)
            self._waiting.clear()


def _build_adjustment(row: int, order: SamplingOrder, ids: Ids) -> Adjustment:
    size = len(order.prompt)
    return Adjustment(row, order.sampling, ids[:size], ids[size:], order.stop_ids, order.wants_mask)


def _explain(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of GPU memory; use fewer slots or a shorter context (engine_slots, max_context), or free memory on the device"
    if isinstance(error, MemoryError):
        return "out of memory; use fewer slots or a shorter context (engine_slots, max_context)"
    return f"{type(error).__name__}: {error}"
