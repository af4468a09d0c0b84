"""A call at the gate as the trainer sees it: the request, and methods to answer it, fail it or give it back.

Calls are handed out by the gate itself (`gate.py`), or by its client in another process (`client/gate.py`). Answers may be lists or arrays.
They are converted to arrays and checked here.
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
    """The receiver of a trainer's answers: the gate itself, or a client of a remote gateway.

    Both raise `Gone`, `Conflict`, `BadRequest` or `NotFound` to reject an answer. The client also raises errors of its own.
    """

    async def piece(
        self, call: GateCall, ids: Ids, logprobs: Logprobs | None, finish: GateFinish | None, version: int | None
    ) -> None: ...

    async def fail(self, call: GateCall, message: str, fault: GateFault) -> None: ...

    async def give_back(self, call: GateCall) -> None: ...


class GateCall:
    """A call that the trainer has taken. Answer it once, whole or in parts, from one task at a time.

    If the call is used as a context manager and is unfinished on exit, it is given back, or failed if part of its answer was sent.
    """

    def __init__(self, backend: GateBackend, call_id: str, lease: str, request: GateRequest) -> None:
        self._backend = backend
        self.id = call_id
        self.lease = lease
        self.session = request.session
        self.prompt: Ids = request.prompt
        self.max_tokens = request.max_tokens
        self.sampling = request.sampling
        self.stop = request.stop  # strings that end the answer; the gateway checks them too
        self.stop_ids = request.stop_ids
        self.constraint = request.constraint
        self.stream = request.stream  # whether the agent receives a streamed reply
        self.version = request.version  # the gateway's policy version when the call was taken
        self.sent = 0  # number of tokens sent so far
        self.over = False
        self.gone = ""  # why the call no longer needs an answer; empty while it does

    async def answer(
        self,
        ids: Sequence[int] | np.ndarray,
        logprobs: Sequence[float | None] | np.ndarray | None,
        finish: GateFinish = "stop",
        *,
        version: int | None = None,
    ) -> None:
        """Send all sampled tokens, or the remaining ones, and finish the call.

        `ids` includes the stop token, if one was sampled. `logprobs` has one entry per id. Use None for an unknown log-probability, or
        for `logprobs` if all are unknown; the turn is then recorded but not used for training. `version` is the policy version that
        sampled the tokens. By default, the tokens are recorded as spanning all versions since the call was taken.
        """
        await self._send_piece(ids, logprobs, finish, version)

    async def send(
        self,
        ids: Sequence[int] | np.ndarray,
        logprobs: Sequence[float | None] | np.ndarray | None,
        *,
        version: int | None = None,
    ) -> None:
        """Send part of the answer to the agent. Complete the answer with `finish` or `answer`."""
        await self._send_piece(ids, logprobs, None, version)

    async def finish(self, finish: GateFinish = "stop") -> None:
        await self._send_piece((), None, finish, None)

    async def fail(self, message: str, fault: GateFault = "unavailable") -> None:
        """Fail the call, with an error for the agent.

        `fault` selects the error: `unavailable` is retryable, `error` is permanent, and `overflow` is a context overflow.
        """
        self._require_open()
        await self._backend.fail(self, message, fault)
        self.over = True

    async def give_back(self) -> None:
        """Return the call to the queue. This is not possible once part of the answer has been sent."""
        self._require_open()
        await self._backend.give_back(self)
        self.over = True

    async def __aenter__(self) -> GateCall:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.over:
            return
        with contextlib.suppress(Gone, Conflict, NotFound):  # the call has already ended
            await (self.fail("it stopped in the middle of its answer") if self.sent else self.give_back())

    async def _send_piece(
        self,
        ids: Sequence[int] | np.ndarray,
        logprobs: Sequence[float | None] | np.ndarray | None,
        finish: GateFinish | None,
        version: int | None,
    ) -> None:
        self._require_open()
        id_array, scores = to_arrays(ids, logprobs)
        try:
            await self._backend.piece(self, id_array, scores, finish, version)
        except Gone as error:
            self.gone, self.over = error.message, True
            raise
        self.sent += len(id_array)
        self.over = finish is not None

    def _require_open(self) -> None:
        if self.gone:
            raise Gone(self.gone)
        if self.over:
            raise Conflict(f"call {self.id} was already answered, failed or given back")


class GateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a generation request that a trainer needs."""

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
    """Convert a trainer's answer to arrays, and check it. A log-probability of None becomes NaN."""
    try:
        id_array = np.asarray(ids)
        scores = None if logprobs is None else np.asarray(logprobs)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor that requires gradients or is on a GPU
        raise BadRequest(
            f"ids or logprobs cannot be converted to an array ({error}); pass flat lists, or arrays on the CPU"
        ) from None
    if id_array.ndim != 1 or (id_array.dtype.kind not in "iu" and id_array.size):
        raise BadRequest(
            f"ids must be a flat list of integers, not a {id_array.ndim}-dimensional array of {id_array.dtype}",
            param="ids",
        )
    if id_array.size and not 0 <= int(id_array.min()) <= int(id_array.max()) < 2**31:
        raise BadRequest(
            "every id must be between 0 and 2147483647, because token ids are 32-bit integers", param="ids"
        )
    if scores is None:
        return id_array.astype(ID_DTYPE), None
    if scores.ndim != 1 or scores.dtype.kind not in "fiuO":
        raise BadRequest(
            f"logprobs must be a flat list of numbers, not a {scores.ndim}-dimensional array of {scores.dtype}",
            param="logprobs",
        )
    unknown = np.array([value is None for value in scores.tolist()]) if scores.dtype.kind == "O" else np.zeros(0, bool)
    try:
        numbers = scores.astype(np.float64)
    except (TypeError, ValueError):
        raise BadRequest("logprobs must be numbers, or None if unknown", param="logprobs") from None
    wrong = np.isnan(numbers)
    if unknown.size:
        wrong &= ~unknown
    if wrong.any():
        raise BadRequest(
            f"logprobs[{int(wrong.argmax())}] is not a number; pass None if it is unknown",
            param="logprobs",
        )
    return id_array.astype(ID_DTYPE), numbers.astype(LOGPROB_DTYPE)


def check_piece(ids: Ids, logprobs: Logprobs | None) -> None:
    """Check that ids and log-probabilities are valid, and that there is one log-probability per id. NaN marks an unknown value."""
    if ids.size and int(ids.min()) < 0:
        raise BadRequest("every id must be 0 or greater", param="ids")
    if logprobs is None:
        return
    if len(logprobs) != len(ids):
        raise BadRequest(
            f"logprobs has length {len(logprobs)}, but ids has length {len(ids)}; pass one log-probability per id",
            param="logprobs",
        )
    wrong = np.isinf(logprobs) | (logprobs > LOGPROB_TOLERANCE)
    if wrong.any():
        where = int(wrong.argmax())
        raise BadRequest(
            f"logprobs[{where}] is {float(logprobs[where])}; a log-probability must be finite and at most 0",
            param="logprobs",
        )
