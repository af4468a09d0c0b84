"""A rollout's stages, told to the gateway, so that they stand in one stream with its turns. In order, and without anybody waiting."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType

from turngate.client.gateway import GatewayClient
from turngate.errors import TurngateError
from turngate.types import Json

_FLUSH_S = 5.0  # for what is still to be told when the rollout ends


class StageEvents(AbstractAsyncContextManager["StageEvents"]):
    """Of one rollout. What cannot be told is dropped: a stream that lacks a stage is no reason to lose a rollout."""

    def __init__(self, gateway: GatewayClient, session: str) -> None:
        self._gateway = gateway
        self._session = session
        self._waiting: asyncio.Queue[tuple[str, dict[str, Json]] | None] = asyncio.Queue()
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> StageEvents:
        self._sending = asyncio.create_task(self._send())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._sending is not None
        self._waiting.put_nowait(None)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._sending, _FLUSH_S)

    def say(self, kind: str, data: dict[str, Json]) -> None:
        self._waiting.put_nowait((kind, data))

    async def _send(self) -> None:
        while (said := await self._waiting.get()) is not None:
            with suppress(TurngateError):
                await self._gateway.announce(self._session, *said)
