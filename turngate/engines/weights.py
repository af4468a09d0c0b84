"""The interface of engines whose weights can be changed while they serve, its time limits, and the policy versions of weight labels.

`gateway/weights.py` pauses model calls, updates every replica through this interface, and resumes the calls at the new version. An
engine that runs in the trainer's process is updated by the trainer itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from turngate.engines.base import Engine, Generate, Health, VersionRuns
from turngate.engines.pool import Pool
from turngate.errors import EngineRejected

LOAD_S = 1800.0  # timeout for loading a model
COMMAND_S = 60.0  # timeout for other commands


class PolicyWeights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The weights of one policy version: a whole model, or an adapter that is served under a name.

    Paths are on the engine's machine. If both paths are empty, the gateway did not load these weights: they are the engine's initial ones,
    or another program loaded them.
    """

    version: int
    path: str = ""
    lora_path: str = ""
    name: str = ""

    @property
    def is_adapter(self) -> bool:
        return not self.path and bool(self.name)


@runtime_checkable
class UpdatableReplica(Protocol):
    """A replica whose weights can be changed. Its methods raise only `TurngateError`s."""

    @property
    def address(self) -> str: ...

    reports_weights: bool  # whether the replica's health shows which weights it has

    async def health(self) -> list[Health]: ...

    async def pause(self) -> None:
        """Pause sampling. Calls in flight are kept. After `resume`, they continue with the weights that have been loaded by then."""

    async def resume(self) -> None:
        """Resume sampling. Do nothing if sampling is not paused."""

    async def load(self, weights: PolicyWeights, *, frozen: bool) -> None:
        """Load these weights. Set `frozen` if calls in flight are paused: the engine then keeps its cache if they need it.

        If a failed load of a whole model leaves unusable weights, `health` must report the replica as unhealthy. The same applies if
        both paths are empty: the location of the weights is unknown, so loading them always fails.
        """

    async def reload_initial_weights(self, *, frozen: bool) -> None:
        """Reload the weights that the engine was started with. If this fails, `health` must report the replica as unhealthy."""

    async def abort_all(self) -> None:
        """Abort all calls in flight."""

    async def unload(self, name: str) -> None:
        """Unload an adapter, even if calls in flight are still using it."""

    def expect(self, weights: PolicyWeights | None) -> None:
        """From now on, report the replica as unhealthy unless it has these weights. If `weights` is None, accept any weights."""


class VersionSpan(msgspec.Struct):
    """Tokens `start` to `end` (exclusive) of a reply, with the label that vLLM or SGLang reports for the weights that sampled them."""

    version: str
    start: int
    end: int


class ExpectedWeights:
    """The weights that a replica should have. All lanes of the replica share this object."""

    def __init__(self) -> None:
        self.weights: PolicyWeights | None = None

    def read_runs(self, spans: Sequence[VersionSpan] | None, request: Generate) -> VersionRuns | None:
        """Convert the reported spans to policy versions. Return None if this is not possible.

        The labels are policy versions only if the gateway loaded the weights as a whole model.
        """
        if not spans or self.weights is None or self.weights.is_adapter or request.model:
            return None
        return parse_version_spans(spans, request.version, self.weights.version)


def parse_version_spans(spans: Sequence[VersionSpan], begun_at: int, newest: int) -> VersionRuns | None:
    """Return (version, number of tokens) for each version in the spans.

    Return None if the spans have gaps, or if their labels are not policy versions up to `newest` in ascending order. An engine has a label
    of its own, such as "default", for the weights that it was started with. Tokens with this label get `begun_at`, the version at which
    the call began.
    """
    runs: list[tuple[int, int]] = []
    at = 0
    for span in spans:
        if span.start != at or span.end < span.start:
            return None
        at = span.end
        is_number = span.version.isascii() and span.version.isdigit()
        if not is_number and runs:
            return None
        version = int(span.version) if is_number else begun_at
        if version > max(newest, begun_at) or (runs and version < runs[-1][0]):
            return None
        if runs and runs[-1][0] == version:
            runs[-1] = version, runs[-1][1] + span.end - span.start
        elif span.end > span.start:
            runs.append((version, span.end - span.start))
    return tuple(runs) or None


def unknown_path_error(engine: str) -> EngineRejected:
    """Build the error for a replica whose previous weights cannot be restored."""
    return EngineRejected(
        f"{engine}: the previous weights cannot be restored because their path is unknown (another program may have loaded them); load "
        "weights again or restart the engine"
    )


def list_updatable_replicas(engine: Engine | None) -> list[UpdatableReplica]:
    """List an engine's replicas whose weights can be changed."""
    members: list[object] = list(engine.engines()) if isinstance(engine, Pool) else [engine]
    return [member for member in members if isinstance(member, UpdatableReplica)]
