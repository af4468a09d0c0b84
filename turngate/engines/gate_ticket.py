"""One call at the gate: its state, and the validation of its answer. The answer has already been converted to arrays."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections import deque

import msgspec
import numpy as np

from turngate.engines.base import Chunk, Generate
from turngate.engines.gate_call import GateFinish
from turngate.errors import BadRequest, TurngateError
from turngate.types import Ids, Logprobs


class Ticket:
    """One call at the gate, from its arrival until it ends. Its fields are changed only under the gate's lock."""

    def __init__(self, request: Generate, loop: asyncio.AbstractEventLoop) -> None:
        self.id = request.request_id or os.urandom(16).hex()
        self.request = request
        self.loop = loop  # the gateway's loop, which waits for events
        self.notified = asyncio.Event()
        self.events: deque[Chunk | TurngateError] = deque()
        self.arrived_at = self.last_event_at = time.monotonic()
        self.lease = ""  # identifies the trainer that took the call; empty while the call is waiting
        self.until: float | None = None  # when the lease expires
        self.lease_s: float | None = None
        self.version = 0  # policy version when the call was taken
        self.sent = 0
        self.stopped = False  # whether the last token was a stop token
        self.last = b""  # digest of the last part of the answer

    def push(self, event: Chunk | TurngateError) -> None:
        self.events.append(event)
        self.last_event_at = time.monotonic()
        self.notify()

    def notify(self) -> None:
        with contextlib.suppress(RuntimeError):  # the gateway's loop is closed
            self.loop.call_soon_threadsafe(self.notified.set)

    def check_fits(self, ids: Ids, finish: GateFinish | None, vocabulary: int | None) -> None:
        """Check the length, ids and stop tokens of the next part of the answer."""
        request = self.request
        total = self.sent + len(ids)
        if total > request.max_tokens:
            raise BadRequest(
                f"the answer has {total} tokens, which exceeds max_tokens ({request.max_tokens}); "
                f"truncate it to {request.max_tokens} tokens, and set finish to 'length'",
                param="ids",
            )
        if finish is not None and not total:
            raise BadRequest(
                "ids is empty; an answer needs at least one token, which may be the stop token", param="ids"
            )
        if finish is None and not len(ids):
            alternative = ", or finish the call" if self.sent else ""
            raise BadRequest(f"ids is empty; pass at least one token{alternative}", param="ids")
        if vocabulary is not None and len(ids) and int(ids.max()) >= vocabulary:
            where = int(ids.argmax())
            raise BadRequest(
                f"ids[{where}] is {int(ids[where])}, which is outside the vocabulary of {vocabulary} tokens",
                param="ids",
            )
        if len(ids) and self.stopped:
            raise BadRequest(
                "ids must be empty, because the answer already ended with a stop token; finish the call", param="ids"
            )
        stops = np.flatnonzero(np.isin(ids, request.stop_ids))
        if len(stops) and (stops[0] != len(ids) - 1 or finish == "length"):
            where = int(stops[0])
            is_last = where == len(ids) - 1
            problem = (
                "so finish must be 'stop', not 'length'"
                if is_last
                else "but it is not the last id; end the answer there"
            )
            raise BadRequest(f"ids[{where}] is the stop token {int(ids[where])}, {problem}", param="ids")

    def version_range(self, version: int | None, current: int) -> tuple[int, int]:
        """Return the policy versions of the first and last token in a part of the answer. `current` is the gateway's version."""
        if version is None:
            return self.version, current
        if not 0 <= version <= current:
            raise BadRequest(
                f"version must be between 0 and the gateway's current version {current}, not {version}; before you answer with a "
                "newer version, resume the gateway at that version",
                param="version",
            )
        return version, version


class EndedCall(msgspec.Struct, frozen=True):
    """A record of an ended call, used to recognize a repeated answer and to explain why a late one is rejected."""

    reason: str
    answered: bool
    last: bytes


def digest_piece(lease: str, at: int, ids: Ids, logprobs: Logprobs | None, finish: GateFinish | None) -> bytes:
    """Compute a digest of part of an answer, to recognize a part that is sent twice."""
    digest = hashlib.blake2b(f"{lease} {at} {finish} {logprobs is None}".encode(), digest_size=16)
    digest.update(ids.tobytes())
    digest.update(b"" if logprobs is None else logprobs.tobytes())
    return digest.digest()
