"""Engines whose weights can be changed while they serve: what is loaded, and the calls that each of them answers to.

`server/weights.py` puts up the fence, calls these on every replica, and takes it down at the new version. vLLM and SGLang have them; an
engine that lives in the trainer's process is changed by the trainer itself.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from turngate.engines.base import Engine, Health
from turngate.engines.pool import Pool

LOAD_S = 1800.0  # what an engine may take to load a model
COMMAND_S = 60.0  # what it may take for anything else


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One version of the policy as engines have it: a whole model from a folder, or an adapter that is served under a name.

    Paths are the engine's, not the gateway's. A name without a path is one that somebody else has loaded.
    """

    version: int
    path: str = ""
    lora_path: str = ""
    name: str = ""

    @property
    def is_adapter(self) -> bool:
        return not self.path and bool(self.name)


@runtime_checkable
class Updatable(Protocol):
    """One replica. All of these raise only `TurngateError`s."""

    @property
    def address(self) -> str: ...

    async def health(self) -> list[Health]: ...

    async def pause(self) -> None:
        """Nothing is sampled from now on. Calls in flight stay, and go on after `resume` with whatever weights there are then."""

    async def resume(self) -> None:
        """Sample again. Also where nothing was paused."""

    async def load(self, load: Load, *, frozen: bool) -> None:
        """Have these weights. `frozen`: calls in flight are paused, and hold on to what is cached for them.

        A failed load of a whole model leaves an engine that must not be used, and says so by its health from then on.
        """

    async def original(self, *, frozen: bool) -> None:
        """Have the weights again that it was started with."""

    async def abort_all(self) -> None:
        """Give up every call in flight."""

    async def unload(self, name: str) -> None:
        """An adapter is not needed any more. Calls in flight may still use it."""

    def expect(self, load: Load | None) -> None:
        """A replica that does not have these counts as down. None: whatever it has is right."""


def replicas(engine: Engine | None) -> list[Updatable]:
    """All of an engine's replicas; none where its weights are not loaded from here."""
    each: list[object] = list(engine.engines()) if isinstance(engine, Pool) else [engine]
    return [one for one in each if isinstance(one, Updatable)]
