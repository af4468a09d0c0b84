"""The messages that a gateway and a trainer exchange at the gate.

Messages are encoded as msgpack. The token ids of prompts and answers are int32, and log-probabilities are float32, both little-endian.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from turngate.client.protocol import MAX_WAIT_S
from turngate.engines.gate_call import GateFault, GateFinish
from turngate.types import Constraint, Sampling


class TakeCalls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer's request for model calls to answer."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 20.0
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 60.0


class LeasedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One model call that is leased to a trainer. Only the holder of `lease` may answer the call."""

    id: str
    lease: str
    session: str
    version: int
    prompt: bytes
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    stream: bool = True


class LeasedCalls(msgspec.Struct, frozen=True):
    calls: list[LeasedCall]


class CallAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A chunk of an answer, starting at token `at`. The last chunk, which may be the only one, sets `finish`."""

    lease: str
    ids: bytes
    logprobs: bytes | None
    at: Annotated[int, msgspec.Meta(ge=0)] = 0
    finish: GateFinish | None = None
    version: int | None = None


class CallFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lease: str
    message: str
    fault: GateFault = "unavailable"


class CallRelease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to give a call back, so that another trainer can take it."""

    lease: str


class RenewLeases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    leases: dict[str, str]  # by call id


class RenewedLeases(msgspec.Struct, frozen=True):
    over: dict[str, str]  # by call id: why the lease was lost
