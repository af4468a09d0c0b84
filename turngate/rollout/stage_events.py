"""Report the stages of a rollout to the gateway, which adds them to the same event stream as the turns."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Literal
from urllib.parse import urlsplit

from turngate.client.gateway import GatewayClient
from turngate.common.addresses import is_loopback
from turngate.common.owner import current_owner
from turngate.errors import TurngateError
from turngate.rollout.outcome import Outcome, Stage
from turngate.types import Json

_FLUSH_S = 5.0  # time to send the last events when the rollout ends
_MAX_CHARS = 2000  # per string in an event
_FIRST: Stage = "sandbox"


class StageEvents(AbstractAsyncContextManager["StageEvents"]):
    """Sends the stage events of one rollout in the background. An event that cannot be sent is dropped; the rollout continues."""

    def __init__(self, gateway: GatewayClient, session: str, batch: str = "") -> None:
        self._gateway = gateway
        self._session = session
        self._batch = batch
        self._queue: asyncio.Queue[dict[str, Json] | None] = asyncio.Queue()
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> StageEvents:
        self._sending = asyncio.create_task(self._send_all())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._sending is not None
        self._queue.put_nowait(None)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._sending, _FLUSH_S)

    def send(self, stage: Stage | Literal["done"], outcome: Outcome) -> None:
        """Queue the event for the start of a stage, or for the end of the rollout."""
        event = _build_event(stage, outcome, self._batch)
        if stage == _FIRST and is_loopback(urlsplit(self._gateway.url).hostname):
            event["runner"] = str(current_owner())  # a gateway on another machine could not check this process
        self._queue.put_nowait(event)

    async def _send_all(self) -> None:
        while (data := await self._queue.get()) is not None:
            with suppress(TurngateError):
                await self._gateway.announce(self._session, "stage", data)


def _build_event(stage: Stage | Literal["done"], outcome: Outcome, batch: str) -> dict[str, Json]:
    """Build the event for a stage. The last event contains the outcome, which is safe because agents cannot read the stream."""
    event: dict[str, Json] = {"stage": stage, "rollout": outcome.rollout, "attempt": outcome.attempt}
    if stage == _FIRST:  # the session, whose metadata has these fields, does not exist yet
        about = {"task": outcome.task, "group": outcome.group, "agent": outcome.agent, "model": outcome.model}
        about |= {"batch": batch}
        return {**event, **{name: value[:_MAX_CHARS] for name, value in about.items()}}
    if stage != "done":
        return event
    event |= {"status": outcome.status, "class": outcome.kind, "reward": outcome.reward}
    if (fault := outcome.fault) is not None:  # there may be no session to record the outcome in
        event["fault"] = {"stage": fault.stage, "boundary": fault.boundary}
        event["message"] = fault.message[:_MAX_CHARS]
    return event
