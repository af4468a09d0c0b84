"""A call that waits at the gate, as whoever answers it sees it: what is asked, and answer, send, fail, give back.

Handed out by the gate itself (`gate.py`) and by its twin in another process (`trainers/gate.py`); each is the desk at which its calls
are answered. What a trainer gives is turned into arrays here, and checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from turngate.errors import BadRequest, Conflict, Gone, NotFound
from turngate.types import ID_DTYPE, LOGPROB_DTYPE, LOGPROB_TOLERANCE, Constraint, Ids, Logprobs, Sampling

GateFinish = Literal["stop", "length"]
GateFault = Literal["unavailable", "error", "overflow"]


class GateBackend(Protocol):
    """Where a taken call is answered: the gate itself, or a gateway elsewhere. Raises `Gone`, `Conflict`, `BadRequest`, `NotFound`."""

    async def piece(
        self, call: GateCall, ids: Ids, logprobs: Logprobs | None, finish: GateFinish | None, version: int | None
    ) -> None: ...

    async def fail(self, call: GateCall, message: str, fault: GateFault) -> None: ...

    async def give_back(self, call: GateCall) -> None: ...


class GateCall:
    """One call that the trainer has taken. To be answered once, in one go or in pieces; by one task at a time.

    As a context manager it ends with its block: a call that was not answered there is given back, so that somebody else can take it.
    """

    def __init__(self, desk: GateBackend, call_id: str, lease: str, asked: GateRequest) -> None:
        self._desk = desk
        self.id = call_id
        self.lease = lease
        self.session = asked.session
        self.prompt: Ids = asked.prompt
        self.max_tokens = asked.max_tokens
        self.sampling = asked.sampling
        self.stop = asked.stop  # strings that end the answer; the gateway looks for them too
        self.stop_ids = asked.stop_ids
        self.constraint = asked.constraint
        self.stream = asked.stream  # the agent reads along
        self.version = asked.version  # the gateway's policy version when it was taken
        self.sent = 0  # tokens
        self.over = False
        self.gone = ""  # why nobody waits for it any more, as soon as that is known

    async def answer(
        self,
        ids: Sequence[int] | np.ndarray,
        logprobs: Sequence[float | None] | np.ndarray | None,
        finish: GateFinish = "stop",
        *,
        version: int | None = None,
    ) -> None:
        """All that was sampled, or what is left of it, with the stop token if there is one; one log-probability each.

        None in place of a log-probability, or of all: it is not known, and the turn is recorded and never trained. `version`: of the
        policy that sampled it; left out, the turn spans all versions from the taking of the call to its answer.
        """
        await self._tell(ids, logprobs, finish, version)

    async def send(
        self,
        ids: Sequence[int] | np.ndarray,
        logprobs: Sequence[float | None] | np.ndarray | None,
        *,
        version: int | None = None,
    ) -> None:
        """A piece of the answer, which the agent reads at once. `finish` or `answer` ends it."""
        await self._tell(ids, logprobs, None, version)

    async def finish(self, finish: GateFinish = "stop") -> None:
        await self._tell((), None, finish, None)

    async def fail(self, message: str, fault: GateFault = "unavailable") -> None:
        """The agent is told so, in its own dialect: to try again, not to (`error`), or to make its prompt shorter (`overflow`)."""
        self._require_open()
        await self._desk.fail(self, message, fault)
        self.over = True

    async def give_back(self) -> None:
        """Somebody else shall take it. Not after the first piece."""
        self._require_open()
        await self._desk.give_back(self)
        self.over = True

    async def __aenter__(self) -> GateCall:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.over:
            return
        with contextlib.suppress(Gone, Conflict, NotFound):  # it is over, in another way
            await (self.fail("the trainer broke off its answer") if self.sent else self.give_back())

    async def _tell(
        self,
        ids: Sequence[int] | np.ndarray,
        logprobs: Sequence[float | None] | np.ndarray | None,
        finish: GateFinish | None,
        version: int | None,
    ) -> None:
        self._require_open()
        given, scores = to_arrays(ids, logprobs)
        try:
            await self._desk.piece(self, given, scores, finish, version)
        except Gone as error:
            self.gone, self.over = error.message, True
            raise
        self.sent += len(given)
        self.over = finish is not None

    def _require_open(self) -> None:
        if self.gone:
            raise Gone(self.gone)
        if self.over:
            raise Conflict(f"call {self.id} was answered, failed or given back already")


class GateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What of a generation request concerns whoever generates."""

    session: str
    prompt: Ids
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    constraint: Constraint | None
    stream: bool
    version: int


def to_arrays(
    ids: Sequence[int] | np.ndarray | Any, logprobs: Sequence[float | None] | np.ndarray | None
) -> tuple[Ids, Logprobs | None]:
    """What a trainer gives, as arrays that are checked; not a number where a log-probability is None."""
    try:
        given = np.asarray(ids)
        scores = None if logprobs is None else np.asarray(logprobs)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor that needs gradients, or lies on a device
        raise BadRequest(
            f"ids, logprobs: cannot be read as arrays ({error}); give lists or arrays on the CPU"
        ) from None
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise BadRequest(
            f"ids: must be one list of whole numbers, not {given.ndim} dimensions of {given.dtype}", param="ids"
        )
    if given.size and not 0 <= int(given.min()) <= int(given.max()) < 2**31:
        raise BadRequest("ids: must be between 0 and the size of the vocabulary", param="ids")
    if scores is None:
        return given.astype(ID_DTYPE), None
    if scores.ndim != 1 or scores.dtype.kind not in "fiuO":
        raise BadRequest(f"logprobs: must be one list of numbers, not {scores.dtype}", param="logprobs")
    unknown = np.array([value is None for value in scores.tolist()]) if scores.dtype.kind == "O" else np.zeros(0, bool)
    try:
        numbers = scores.astype(np.float64)
    except (TypeError, ValueError):
        raise BadRequest("logprobs: must be numbers, or None where one is not known", param="logprobs") from None
    wrong = np.isnan(numbers)
    if unknown.size:
        wrong &= ~unknown
    if wrong.any():
        raise BadRequest(
            f"logprobs: the one at {int(wrong.argmax())} is not a number; give None where it is not known",
            param="logprobs",
        )
    return given.astype(ID_DTYPE), numbers.astype(LOGPROB_DTYPE)


def check_piece(ids: Ids, logprobs: Logprobs | None) -> None:
    """That they belong together, and can be log-probabilities; not a number stands for one that is not known."""
    if ids.size and int(ids.min()) < 0:
        raise BadRequest("ids: must be 0 or more", param="ids")
    if logprobs is None:
        return
    if len(logprobs) != len(ids):
        raise BadRequest(f"logprobs: {len(logprobs)} of them for {len(ids)} ids", param="logprobs")
    wrong = np.isinf(logprobs) | (logprobs > LOGPROB_TOLERANCE)
    if wrong.any():
        where = int(wrong.argmax())
        raise BadRequest(
            f"logprobs: {float(logprobs[where])} at {where} cannot be one: they are finite, and at most 0",
            param="logprobs",
        )
