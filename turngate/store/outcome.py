"""How a rollout ended, as it is recorded beside its trace: written once by whoever ran it, through `Control.record`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from turngate.errors import BadRequest
from turngate.types import Json

Class = Literal["graded", "agent failed", "invalid task", "infrastructure fault"]
NO_REWARD: tuple[Class, ...] = ("invalid task", "infrastructure fault")  # nobody judged the agent's work
LARGEST = 256 * 1024  # bytes of an outcome
DAMAGED = "its outcome is damaged on disk"
_UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)  # what damaged bytes make the decoder raise


class Recorded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`reward` is None wherever it is not known, and never 0 for that reason."""

    kind: Class
    reward: float | None = None
    resolved: bool | None = None
    message: str = ""
    group: str = ""
    task: str = ""
    attempt: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 1
    data: Json = None  # the caller's own

    def facts(self) -> dict[str, Json]:
        """What the stream of events tells of it."""
        return {
            "kind": self.kind,
            "reward": self.reward,
            "resolved": self.resolved,
            "task": self.task,
            "group": self.group,
            "attempt": self.attempt,
        }

    def check(self) -> bytes:
        """As it is stored, the same bytes for the same outcome. `BadRequest` where it cannot be true."""
        if self.reward is not None and not math.isfinite(self.reward):
            raise BadRequest(f"reward: {self.reward} is no finite number", param="reward")
        if self.reward is not None and self.kind in NO_REWARD:
            raise BadRequest(
                f"reward: there is none where nobody judged the agent ({self.kind}); send null", param="reward"
            )
        try:
            written = msgspec.json.encode(self, order="sorted")
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"data: cannot be written as JSON ({error})", param="data") from None
        if len(written) > LARGEST:
            raise BadRequest(f"data: the outcome has {len(written)} bytes, the limit is {LARGEST}", param="data")
        return written


_recorded = msgspec.json.Decoder(Recorded)


def read(written: bytes) -> Recorded | None:
    """As it was recorded. None: it is damaged on disk."""
    try:
        return _recorded.decode(written)
    except _UNREADABLE:
        return None
