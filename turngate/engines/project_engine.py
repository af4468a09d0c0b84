"""A project's view of a shared engine. It separates the project's sessions and cached prefixes from those of other projects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import msgspec

from turngate.engines.base import Chunk, Engine, Generate, Health


class ProjectEngine:
    """One project's view of an engine that several projects share. The engine's owner starts and closes it."""

    def __init__(self, engine: Engine, project: str) -> None:
        self.name = engine.name
        self._engine = engine
        self._project = project

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def health(self) -> list[Health]:
        return await self._engine.health()

    def generate(self, request: Generate) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:
        # Each project has its own salt, so response times do not reveal which prompts another project has cached.
        salt = f"{self._project}:{request.cache_salt}"
        own = msgspec.structs.replace(request, session=self._name(request.session), cache_salt=salt)
        return self._engine.generate(own)

    def release(self, session: str) -> None:
        self._engine.release(self._name(session))

    def _name(self, session: str) -> str:
        return f"{self._project}/{session}" if session else ""
