"""Engines whose weights can be changed while they serve.

`gateway/weights.py` closes the fence, calls these methods on every replica, and opens the fence at the new version. The trainer itself
changes an engine in its own process.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from turngate.engines.base import Engine, Health
from turngate.engines.pool import Pool

LOAD_S = 1800.0  # timeout for loading a model
COMMAND_S = 60.0  # timeout for other commands


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A version of the policy: a whole model from a folder, or an adapter that is served under a name.

    Paths are on the engine's machine. A name without a path was loaded by another program.
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
        """Pause sampling. Calls in flight are kept, and continue after `resume` with the weights of that time."""

    async def resume(self) -> None:
        """Resume sampling, also if it was not paused."""

    async def load(self, load: Load, *, frozen: bool) -> None:
        """Load these weights. `frozen`: calls in flight are paused and keep their cache.

        After a failed load of a whole model, the engine must not be used, and its health says so.
        """

    async def original(self, *, frozen: bool) -> None:
        """Reload the weights that it was started with."""

    async def abort_all(self) -> None:
        """Abort all calls in flight."""

    async def unload(self, name: str) -> None:
        """Unload an adapter. Calls in flight may still use it."""

    def expect(self, load: Load | None) -> None:
        """Count a replica without these weights as down. None: any weights are right."""


def replicas(engine: Engine | None) -> list[Updatable]:
    """List an engine's replicas whose weights can be loaded."""
    members: list[object] = list(engine.engines()) if isinstance(engine, Pool) else [engine]
    return [one for one in members if isinstance(one, Updatable)]
