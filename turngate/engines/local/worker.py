"""The thread that samples. It knows nothing of event loops: calls come in by a queue, what was sampled goes out in batches (`Deliver`).

Each turn of its loop: obey (new calls, aborts, hold, end) → place (waiting calls into slots) → fill (a bounded piece of prompts) →
step (one id for every slot that samples) → hand over. What a step costs in Python does not grow with the number of slots: their
bookkeeping is numpy arrays, and a batch is handed over at most every `flush_s`, unless a call has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal

import msgspec
import numpy as np
import torch

from turngate.engines.local.cache import Places, PromptPiece, Slots
from turngate.engines.local.decode import Decoder, Pending, SlotStart
from turngate.engines.local.sampler import Adjustment
from turngate.errors import EngineError, EngineUnavailable
from turngate.types import ID_DTYPE, LOGPROB_DTYPE, Ids, Logprobs, Sampling

log = logging.getLogger(__name__)
_TRIES = 3  # failures in a row, after which the engine gives up

End = Literal["stop", "length"] | EngineError


class SamplingOrder(msgspec.Struct, frozen=True):
    """One generation, as the thread is asked for it. `serial` is never given twice."""

    serial: int
    prompt: Ids
    most: int  # tokens to sample
    sampling: Sampling
    stop_ids: tuple[int, ...]
    salt: str


class SampledBatch(msgspec.Struct, frozen=True):
    """What was sampled since the last batch, sorted by call, and which calls have ended. `version`: of the weights, where it is known."""

    serials: Places
    ids: Ids
    logprobs: Logprobs
    ends: dict[int, End]
    version: int | None


Deliver = Callable[[SampledBatch], None]


class _Hold(msgspec.Struct):
    """Somebody wants to change the weights. `drain`: not before the calls under way have ended."""

    reached: Future[None]
    drain: bool

    def tell(self) -> None:
        """That nothing is sampled any more; whoever asked may have gone."""
        if not self.reached.done() and self.reached.set_running_or_notify_cancel():
            self.reached.set_result(None)


class _Running:
    """A call in the thread's hands. `ids` is its prompt, and what it sampled before it was put back among those that wait (`begun`)."""

    __slots__ = ("begun", "bent", "drawn", "ids", "order", "seed")

    def __init__(self, order: SamplingOrder) -> None:
        self.order = order
        self.ids = order.prompt
        self.drawn = 0
        self.begun = False
        given = order.sampling.seed
        self.seed = int.from_bytes(os.urandom(8), "little", signed=True) if given is None else given
        bias = [name for name in order.sampling.biases() if name != "greedy"]
        self.bent = bool(bias)


class Worker:
    def __init__(
        self, decoder: Decoder, slots: Slots, deliver: Deliver, *, fill_tokens: int, fill_s: float, flush_s: float
    ) -> None:
        self.broken = ""  # why nothing is sampled any more
        self._decoder = decoder
        self._slots = slots
        self._deliver = deliver
        self._fill_tokens = fill_tokens
        self._fill_s = fill_s
        self._flush_s = flush_s
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: OrderedDict[int, _Running] = OrderedDict()
        self._running: dict[int, _Running] = {}  # by slot
        self._places: dict[int, int] = {}  # slot by serial
        self._filling: list[int] = []  # slots, in the order in which they came
        self._filling_since = 0.0
        self._holds: list[_Hold] = []
        self._ending = False
        self._over = False  # whatever is asked for from now on is not answered
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="turngate-local-engine", daemon=True)
        # Of each slot: the call that samples in it (0: none), its length, what it has drawn and may draw, what ends it.
        count = slots.count
        self._serial = np.zeros(count, np.int64)
        self._length = np.zeros(count, np.int64)
        self._drawn = np.zeros(count, np.int64)
        self._most = np.zeros(count, np.int64)
        self._stops = np.full((count, 1), -1, np.int64)
        self._bent: set[int] = set()  # slots whose scores are bent
        self._pending: deque[tuple[Pending, Places]] = deque()
        self._out: list[tuple[Places, Ids, Logprobs]] = []
        self._ends: dict[int, End] = {}
        self._flushed = 0.0
        self._version: int | None = None

    # ── for other threads ───────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._thread.start()

    def submit(self, order: SamplingOrder) -> None:
        self._commands.put(lambda: self._waiting.__setitem__(order.serial, _Running(order)))
        if self._over:
            raise EngineUnavailable("the local engine was closed")

    def abort(self, serial: int) -> None:
        self._commands.put(lambda: self._abort(serial))

    def give_up(self) -> None:
        """Every call, also those that wait."""
        self._commands.put(self._give_up)

    def hold(self, drain: bool) -> Future[None]:
        """Done when nothing is sampled any more; `resume` must follow."""
        hold = _Hold(Future(), drain)
        self._commands.put(lambda: self._holds.append(hold))
        if self._over or not self._thread.is_alive():
            hold.tell()
        return hold.reached

    def resume(self, version: int | None = None) -> None:
        """The weights may have changed, and are of this version: whatever was computed with the old ones is computed again."""
        self._commands.put(lambda: self._resume(version))

    def end(self) -> None:
        """Every call is failed, and the thread ends. Returns when it has."""
        self._commands.put(self._end)
        if self._thread.is_alive():
            self._thread.join()

    # ── commands, in the thread ─────────────────────────────────────────────────────────────────────────────────

    def _abort(self, serial: int) -> None:
        self._waiting.pop(serial, None)
        slot = self._places.get(serial)
        if slot is not None:
            self._free(slot)
            self._decoder.park([slot])

    def _give_up(self) -> None:
        slots = list(self._running)
        self._fail_all(EngineUnavailable("the local engine was told to give up its calls"), waiting=True)
        if slots:
            self._decoder.park(slots)

    def _resume(self, version: int | None) -> None:
        self._holds.pop(0)
        self._version = version  # all that was sampled before was handed over when the hold was reached
        if self._holds:
            return
        self._slots.forget()
        interrupted = []
        for slot in sorted(self._running, key=lambda slot: self._running[slot].order.serial):
            call = self._running[slot]
            call.begun = True
            call.ids, call.drawn = self._slots.ids[slot, : self._length[slot]].copy(), int(self._drawn[slot])
            self._free(slot)
            interrupted.append(call)
        if interrupted:
            self._decoder.reset()
        self._slots.forget()
        for call in reversed(interrupted):
            self._waiting[call.order.serial] = call
            self._waiting.move_to_end(call.order.serial, last=False)

    def _end(self) -> None:
        self._ending = True

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        with torch.inference_mode(), self._decoder.here():
            while not self._ending:
                try:
                    self._turn()
                    if self._out or self._ends:
                        self._failures = 0
                except Exception as error:  # whatever it is: it belongs to those who wait
                    self._failed(error)
                self._flush()
            self._over = True
            self._obey_all()
            self._fail_all(EngineUnavailable("the local engine was closed"), waiting=True)
            self._reach()
            self._flush(now=True)

    def _turn(self) -> None:
        self._obey()
        if self._holds and not self._draining():
            self._collect(leave=0)
            self._flush(now=True)
            self._decoder.settle()
            self._reach()
            return
        self._place()
        self._fill()
        self._step()

    def _reach(self) -> None:
        for hold in self._holds:
            hold.tell()

    def _draining(self) -> bool:
        """Calls that were begun are to end first. Some may have been interrupted by an update just before."""
        begun = bool(self._running) or any(call.begun for call in self._waiting.values())
        return self._holds[0].drain and begun

    def _obey(self) -> None:
        """Do as told. With nothing to do, or held, wait until told something."""
        if all(hold.reached.done() for hold in self._holds) and (self._holds or not (self._running or self._waiting)):
            self._flush(now=True)
            self._commands.get()()
        self._obey_all()

    def _obey_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _place(self) -> None:
        """Waiting calls into free slots, in the order in which they came."""
        for serial, call in list(self._waiting.items()):
            if self._slots.taken.all():
                return
            if self._holds and not call.begun:
                continue
            taken = self._slots.take(call.ids, call.order.salt)
            if taken is None:
                continue  # its beginning is just being computed
            del self._waiting[serial]
            slot, source, size = taken
            if source != slot:
                self._decoder.cache.copy(source, slot, size)
            self._running[slot] = call
            self._places[serial] = slot
            self._length[slot] = len(call.ids)
            self._drawn[slot] = call.drawn
            self._most[slot] = call.order.most
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
        """A bounded piece of the prompts that are not computed yet; whoever has all of its own samples from now on."""
        slots, room, pieces = self._slots, self._fill_tokens, []
        for slot in self._filling if self._filling_is_due() else ():
            start, end = int(slots.known[slot]), int(slots.wanted[slot])
            if start < end and room > 0:
                end = min(end, start + room)
                pieces.append(PromptPiece(slot, start, slots.ids[slot, start:end]))
                room -= end - start
        if pieces:
            self._decoder.fill(pieces)
        for piece in pieces:
            slots.known[piece.slot] += len(piece.ids)
        ready = [slot for slot in self._filling if slots.known[slot] == slots.wanted[slot]]
        if ready:
            self._filling = [slot for slot in self._filling if slot not in ready]
            self._filling_since = time.monotonic()
            self._decoder.arm([self._armed(slot) for slot in ready])

    def _filling_is_due(self) -> bool:
        """On a GPU a filling costs about the same for one prompt as for many, so the first waits a little for others."""
        waited = time.monotonic() - self._filling_since >= self._fill_s
        return waited or 8 * len(self._filling) >= self._slots.count or not self._serial.any()

    def _armed(self, slot: int) -> SlotStart:
        call, last = self._running[slot], int(self._length[slot]) - 1
        self._serial[slot] = call.order.serial
        if call.bent:
            self._bent.add(slot)
        return SlotStart(slot, int(call.ids[last]), last, call.seed, call.drawn, call.order.sampling.temperature)

    def _step(self) -> None:
        sampling = np.flatnonzero(self._serial)
        if sampling.size:
            if self._bent:
                self._collect(leave=0)  # what bends the scores must be known
                sampling = np.flatnonzero(self._serial)
            if sampling.size:
                bent = [self._bending(row, slot) for row, slot in enumerate(sampling.tolist()) if slot in self._bent]
                pending = self._decoder.launch(sampling, bent)
                self._pending.append((pending, self._serial[sampling]))
        self._collect(leave=self._decoder.ahead if sampling.size and not self._bent else 0)

    def _bending(self, row: int, slot: int) -> Adjustment:
        order, ids = self._running[slot].order, self._slots.ids[slot, : self._length[slot]]
        size = len(order.prompt)
        return Adjustment(row, order.sampling, ids[:size], ids[size:], order.stop_ids)

    def _collect(self, leave: int) -> None:
        """Take what steps have sampled, but for the newest `leave` of them."""
        while len(self._pending) > leave:
            pending, serials = self._pending.popleft()
            ids, logprobs = self._decoder.collect(pending)
            same = self._serial[pending.slots] == serials  # a call may have ended while its next step was under way
            self._sampled(pending.slots[same], serials[same], ids[same], logprobs[same])

    def _sampled(self, slots: Places, serials: Places, ids: Ids, logprobs: Logprobs) -> None:
        if not slots.size:
            return
        broken = ~np.isfinite(logprobs)
        if broken.any():
            wrong = EngineError("the model's scores are not numbers: its weights are damaged, or its training diverged")
            self._ended(slots[broken], dict.fromkeys(serials[broken].tolist(), wrong))
            slots, serials, ids, logprobs = slots[~broken], serials[~broken], ids[~broken], logprobs[~broken]
        self._slots.ids[slots, self._length[slots]] = ids
        self._slots.known[slots] = self._slots.wanted[slots] = self._length[slots]
        self._length[slots] += 1
        self._drawn[slots] += 1
        self._out.append((serials, ids, logprobs))
        stopped = (ids[:, None] == self._stops[slots]).any(axis=1)
        over = stopped | (self._drawn[slots] >= self._most[slots])
        if over.any():
            why = zip(serials[over].tolist(), stopped[over].tolist(), strict=True)
            self._ended(slots[over], {serial: "stop" if stop else "length" for serial, stop in why})

    def _ended(self, slots: Places, ends: dict[int, End]) -> None:
        self._ends |= ends
        for slot in slots.tolist():
            self._free(slot)
        self._decoder.park(slots.tolist())

    def _free(self, slot: int) -> None:
        """The call in this slot is over. What is computed of it stays, for whoever begins the same way."""
        call = self._running.pop(slot)
        del self._places[call.order.serial]
        self._serial[slot] = 0
        self._bent.discard(slot)
        if slot in self._filling:
            self._filling.remove(slot)
        self._slots.leave(slot, int(self._slots.known[slot]))

    # ── what goes out ───────────────────────────────────────────────────────────────────────────────────────────

    def _flush(self, now: bool = False) -> None:
        if not (self._out or self._ends):
            return
        clock = time.monotonic()
        if not (now or self._ends or clock - self._flushed >= self._flush_s):
            return
        self._flushed = clock
        out, self._out = self._out, []
        ends, self._ends = self._ends, {}
        out.append((np.empty(0, np.int64), np.empty(0, ID_DTYPE), np.empty(0, LOGPROB_DTYPE)))  # for ends alone
        serials, ids, logprobs = (np.concatenate([part[n] for part in out]) for n in range(3))
        order = np.argsort(serials, kind="stable")
        self._deliver(SampledBatch(serials[order], ids[order], logprobs[order], ends, self._version))

    def _failed(self, error: Exception) -> None:
        """A step failed: the calls in it are lost, those that wait are not, unless it fails again and again."""
        self._failures += 1
        log.error("the local engine failed: %s", error, exc_info=error)
        self._pending.clear()
        said = _explain(error)
        self._fail_all(EngineError(said), waiting=False)
        try:
            self._decoder.reset()
            self._slots.forget()
        except RuntimeError as lost:  # a GPU that has faulted answers nothing any more
            self.broken = f"{said}; the device is lost ({lost}); start the gateway again"
        if self._failures >= _TRIES:
            self.broken = f"{said}; {_TRIES} times in a row"
        if self.broken:
            self._fail_all(EngineUnavailable(f"the local engine has stopped: {self.broken}"), waiting=True)
            self._ending = True

    def _fail_all(self, error: EngineError, *, waiting: bool) -> None:
        for slot in list(self._running):
            self._ends[self._running[slot].order.serial] = error
            self._free(slot)
        if waiting:
            self._ends |= dict.fromkeys(self._waiting, error)
            self._waiting.clear()


def _explain(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "the local engine is out of GPU memory; give it fewer slots, a shorter max_context, or nothing beside it"
    if isinstance(error, MemoryError):
        return "the local engine is out of memory; give it fewer slots or a shorter max_context"
    return f"the local engine failed: {type(error).__name__}: {error}"
