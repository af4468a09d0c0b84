"""Gate client: lets a trainer in another process take model calls and answer them over HTTP.

    async with GatewayClient(url, key) as client, RemoteGate(client) as gate:
        async for call in gate:
            ids, logprobs = await asyncio.to_thread(sample, call.prompt, call.max_tokens, call.sampling)
            await call.answer(ids, logprobs)

A call is leased to the trainer that takes it. The lease is renewed while the gate is open and its event loop is running. If the process
dies, the leases of its calls expire. Then the calls that it had answered in part fail, and other trainers can take its other calls.
Sampling must not block the event loop for so long that a lease expires: sample in a thread, as above, or choose a longer lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, suppress
from urllib.parse import quote

import numpy as np

from turngate.client.gate_protocol import (
    CallAnswer,
    CallFailure,
    CallRelease,
    LeasedCall,
    LeasedCalls,
    RenewedLeases,
    RenewLeases,
    TakeCalls,
)
from turngate.client.gateway import GatewayClient, GatewayUnreachable, RequestRejected
from turngate.client.retry import PAUSES_S, Backoff
from turngate.engines.gate_call import GateCall, GateFault, GateFinish, GateRequest
from turngate.errors import BadRequest, ConfigError, Conflict, Gone, NotFound, TurngateError
from turngate.types import ID_DTYPE, Ids, Logprobs

log = logging.getLogger("turngate")
_MEANS: dict[int, type[TurngateError]] = {400: BadRequest, 404: NotFound, 409: Conflict, 410: Gone, 413: BadRequest}
_POLL_S = 20.0


class RemoteGate(AbstractAsyncContextManager["RemoteGate"]):
    """Takes model calls and answers them.

    If this process dies, the leases of its calls expire after at most `lease_s` seconds. Then, other trainers can take the calls, except
    those that were answered in part, which fail.
    """

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
        """Give back the calls that were not answered, and fail those that were answered in part."""
        self._closed.set()
        if self._renewing is not None:
            self._renewing.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewing
        for call in list(self._mine.values()):
            with suppress(TurngateError):  # the call is over, or its lease will expire
                await call.__aexit__()

    def __aiter__(self) -> AsyncIterator[GateCall]:
        return self._each()

    async def _each(self) -> AsyncIterator[GateCall]:
        while calls := await self.take():
            yield calls[0]

    async def take(self, limit: int = 1, *, wait_s: float | None = None) -> list[GateCall]:
        """Take up to `limit` calls, oldest first. Return an empty list if none arrives within `wait_s` seconds or the gate is closed.

        If `wait_s` is None, wait without a time limit. Keep trying while the gateway cannot be reached. Raise an error if the key is wrong,
        or if the gateway's engine is not the gate.
        """
        loop = asyncio.get_running_loop()
        end = None if wait_s is None else loop.time() + wait_s
        backoff = Backoff()
        while not self._closed.is_set():
            left = _POLL_S if end is None else max(0.0, min(_POLL_S, end - loop.time()))
            try:
                request = TakeCalls(limit, left, self._lease_s)
                taken = await self._client.post_msgpack("/admin/gate/take", request, LeasedCalls, left + 30)
                backoff.reset()
                if taken.calls:
                    return [self._call(leased) for leased in taken.calls]
            except RequestRejected as error:
                if error.answered == 404:
                    raise ConfigError(
                        f"gateway: {self._client.url} does not use the engine 'gate'; restart it with --engine gate (docs/gate.md)",
                        param="gateway",
                    ) from None
                raise
            except GatewayUnreachable:
                await backoff.pause(None if end is None else max(0.0, end - loop.time()))
            if end is not None and loop.time() >= end:
                return []
        return []

    def _call(self, leased: LeasedCall) -> GateCall:
        prompt = np.frombuffer(leased.prompt, "<i4").astype(ID_DTYPE)
        request = GateRequest(
            session=leased.session,
            prompt=prompt,
            max_tokens=leased.max_tokens,
            sampling=leased.sampling,
            stop=leased.stop,
            stop_ids=leased.stop_ids,
            constraint=leased.constraint,
            stream=leased.stream,
            version=leased.version,
        )
        call = self._mine[leased.id] = GateCall(self, leased.id, leased.lease, request)
        return call

    # ── answering a call ────────────────────────────────────────────────────────────────────────────────────────

    async def piece(
        self, call: GateCall, ids: Ids, logprobs: Logprobs | None, finish: GateFinish | None, version: int | None
    ) -> None:
        scores = None if logprobs is None else logprobs.astype("<f4").tobytes()
        answer = CallAnswer(
            lease=call.lease,
            ids=ids.astype("<i4").tobytes(),
            logprobs=scores,
            at=call.sent,
            finish=finish,
            version=version,
        )
        await self._send(call, "answer", answer)
        if finish is not None:
            self._mine.pop(call.id, None)

    async def fail(self, call: GateCall, message: str, fault: GateFault) -> None:
        await self._send(call, "fail", CallFailure(call.lease, message, fault))
        self._mine.pop(call.id, None)

    async def give_back(self, call: GateCall) -> None:
        await self._send(call, "give_back", CallRelease(call.lease))
        self._mine.pop(call.id, None)

    async def _send(self, call: GateCall, verb: str, message: object) -> None:
        """Send a message, and repeat it if no reply arrives. No token is added twice: the gateway recognizes chunks that it already has."""
        path = f"/admin/gate/calls/{quote(call.id, safe='')}/{verb}"
        is_receipt_lost = False
        for pause in (*PAUSES_S, None):
            try:
                await self._client.post_msgpack(path, message, dict)
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
                log.warning("cannot renew leases (calls: %d): %s; retrying", len(leases), error.message)
                continue
            for call_id, why in renewed.over.items():
                if (call := self._mine.pop(call_id, None)) is not None and not call.over:
                    call.gone = why
