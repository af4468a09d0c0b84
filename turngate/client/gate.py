"""A client of the gate: a trainer in another process takes model calls and answers them over HTTP.

    async with GatewayClient(url, key) as client, RemoteGate(client) as gate:
        async for call in gate:
            await call.answer(*sample(call.prompt, call.max_tokens, call.sampling))

A taken call is leased. The lease is renewed while the gate is open and its event loop runs; if the process dies, another trainer gets its
calls. So sample in a thread (`asyncio.to_thread`), or use a lease that lasts longer than sampling.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, suppress
from urllib.parse import quote

import numpy as np

from turngate.client.gateway import GatewayClient, GatewayUnreachable, RequestRejected
from turngate.client.protocol import (
    CallAnswer,
    CallFailure,
    CallRelease,
    LeasedCall,
    LeasedCalls,
    RenewedLeases,
    RenewLeases,
    TakeCalls,
)
from turngate.client.retry import PAUSES_S, Backoff
from turngate.engines.gate_call import GateCall, GateFault, GateFinish, GateRequest
from turngate.errors import BadRequest, ConfigError, Conflict, Gone, NotFound, TurngateError
from turngate.types import ID_DTYPE, Ids, Logprobs

log = logging.getLogger("turngate")
_MEANS: dict[int, type[TurngateError]] = {400: BadRequest, 404: NotFound, 409: Conflict, 410: Gone, 413: BadRequest}
_POLL_S = 20.0


class RemoteGate(AbstractAsyncContextManager["RemoteGate"]):
    """Takes calls and answers them. `lease_s`: how soon another trainer gets the calls of one that died."""

    def __init__(self, client: GatewayClient, *, lease_s: float = 60.0) -> None:
        self._client = client
        self._lease_s = lease_s
        self._mine: dict[str, GateCall] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()

    async def __aenter__(self) -> RemoteGate:
        self._renewing = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give back calls that were taken and not answered."""
        self._closed.set()
        if self._renewing is not None:
            self._renewing.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewing
        for call in list(self._mine.values()):
            with suppress(TurngateError):  # it is over, or its lease will expire
                await call.__aexit__()

    def __aiter__(self) -> AsyncIterator[GateCall]:
        return self._each()

    async def _each(self) -> AsyncIterator[GateCall]:
        while found := await self.take():
            yield found[0]

    async def take(self, limit: int = 1, *, wait_s: float | None = None) -> list[GateCall]:
        """Take the oldest calls, at most `limit`. Waits for the first; returns none only after `wait_s`.

        Waits for a gateway that cannot be reached. Raises for a wrong key, or if the gateway's engine is not a gate.
        """
        loop = asyncio.get_running_loop()
        end = None if wait_s is None else loop.time() + wait_s
        backoff = Backoff()
        while not self._closed.is_set():
            left = _POLL_S if end is None else max(0.0, min(_POLL_S, end - loop.time()))
            try:
                wanted = TakeCalls(limit, left, self._lease_s)
                taken = await self._client.post_msgpack("/admin/gate/take", wanted, LeasedCalls, left + 30)
                backoff.reset()
                if taken.calls:
                    return [self._call(handed) for handed in taken.calls]
            except RequestRejected as refused:
                if refused.answered == 404:
                    raise ConfigError(
                        f"gateway: {self._client.url} answers its calls itself; start it with --engine gate (docs/gate.md)",
                        param="gateway",
                    ) from None
                raise
            except GatewayUnreachable:
                await backoff.pause()
            if end is not None and loop.time() >= end:
                return []
        return []

    def _call(self, handed: LeasedCall) -> GateCall:
        prompt = np.frombuffer(handed.prompt, "<i4").astype(ID_DTYPE)
        asked = GateRequest(
            session=handed.session,
            prompt=prompt,
            max_tokens=handed.max_tokens,
            sampling=handed.sampling,
            stop=handed.stop,
            stop_ids=handed.stop_ids,
            constraint=handed.constraint,
            stream=handed.stream,
            version=handed.version,
        )
        call = self._mine[handed.id] = GateCall(self, handed.id, handed.lease, asked)
        return call

    # ── a desk: how a call is answered ──────────────────────────────────────────────────────────────────────────

    async def piece(
        self, call: GateCall, ids: Ids, logprobs: Logprobs | None, finish: GateFinish | None, version: int | None
    ) -> None:
        scores = None if logprobs is None else logprobs.astype("<f4").tobytes()
        given = CallAnswer(
            lease=call.lease,
            ids=ids.astype("<i4").tobytes(),
            logprobs=scores,
            at=call.sent,
            finish=finish,
            version=version,
        )
        await self._tell(call, "answer", given)
        if finish is not None:
            self._mine.pop(call.id, None)

    async def fail(self, call: GateCall, message: str, fault: GateFault) -> None:
        await self._tell(call, "fail", CallFailure(call.lease, message, fault))
        self._mine.pop(call.id, None)

    async def give_back(self, call: GateCall) -> None:
        await self._tell(call, "give_back", CallRelease(call.lease))
        self._mine.pop(call.id, None)

    async def _tell(self, call: GateCall, verb: str, sent: object) -> None:
        """Send, and repeat if no receipt came: the gateway recognises a piece that it already has."""
        path = f"/admin/gate/calls/{quote(call.id, safe='')}/{verb}"
        is_receipt_lost = False
        for pause in (*PAUSES_S, None):
            try:
                await self._client.post_msgpack(path, sent, dict)
                return
            except GatewayUnreachable:
                if pause is None:
                    raise
                is_receipt_lost = True
                await asyncio.sleep(pause)
            except RequestRejected as error:
                if is_receipt_lost and verb != "answer" and error.answered == 409:
                    return  # the first attempt arrived
                if error.answered != 400:  # after a 400 the caller can correct its answer
                    self._mine.pop(call.id, None)
                if error.answered in _MEANS:
                    raise _MEANS[error.answered](error.message) from None
                raise

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            if not self._mine:
                continue
            leases = {call.id: call.lease for call in self._mine.values()}
            try:
                renewed = await self._client.post_msgpack(
                    "/admin/gate/renew", RenewLeases(leases), RenewedLeases, self._lease_s
                )
            except TurngateError as error:
                log.warning("the leases of %d calls could not be renewed: %s", len(leases), error.message)
                continue
            for call_id, why in renewed.over.items():
                if (call := self._mine.pop(call_id, None)) is not None and not call.over:
                    call.gone = why
