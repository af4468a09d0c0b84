"""The gate API under `/admin/gate`, for a trainer in another process: take, answer, fail and return calls, and renew leases.

It requires the admin key, and is available only with `--engine gate`. Bodies and replies are msgpack, except that errors and the reply to
`GET /admin/gate` are JSON. Token ids are raw 32-bit integers, and log-probabilities are raw 32-bit floats (NaN if unknown). Both are
little-endian.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.routing import Route

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
from turngate.engines.gate import Gate, QueueStatus
from turngate.engines.gate_call import GateCall
from turngate.errors import BadRequest, Conflict, Gone, NotFound, Stopping, TurngateError
from turngate.server.asgi import DisconnectWatch
from turngate.server.auth import Auth
from turngate.server.decoding import MSGPACK
from turngate.server.http import json_response, route
from turngate.server.operations import JsonReply, MsgpackReply
from turngate.types import ID_DTYPE, LOGPROB_DTYPE, Json

T = TypeVar("T")


class GateRoutes:
    def __init__(self, gate: Gate, auth: Auth) -> None:
        self._gate = gate
        self._auth = auth

    def routes(self) -> list[Route]:
        call = "/admin/gate/calls/{call}"
        return [
            route("/admin/gate", "GET", self.show, self._auth),
            route("/admin/gate/take", "POST", self.take, self._auth, body_media=MSGPACK),
            route("/admin/gate/renew", "POST", self.renew, self._auth, body_media=MSGPACK),
            route(f"{call}/answer", "POST", self.answer, self._auth, body_media=MSGPACK),
            route(f"{call}/fail", "POST", self.fail, self._auth, body_media=MSGPACK),
            route(f"{call}/give_back", "POST", self.give_back, self._auth, body_media=MSGPACK),
        ]

    async def show(self, request: Request) -> JsonReply[QueueStatus]:
        """Return the state of the gate's queue."""
        return json_response(self._gate.queue_status())

    async def take(self, request: Request, body: TakeCalls) -> MsgpackReply[LeasedCalls]:
        """Take calls that are waiting for an answer."""
        calls: list[GateCall] = []
        if self._gate.closed:
            raise Stopping("the gateway is stopping; retry in a moment")
        with DisconnectWatch(request.receive) as watch:
            try:
                calls = await self._gate.take(body.limit, wait_s=body.wait_s, lease_s=body.lease_s)
            except asyncio.CancelledError:
                if not watch.disconnected:
                    raise
        if watch.disconnected:  # the trainer will not receive the calls
            watch.uncancel()
            for call in calls:
                with suppress(TurngateError):  # even if this call has ended, the others must be returned
                    self._gate.return_call(call.id, call.lease)
            return MsgpackReply(status_code=499)
        return _pack(LeasedCalls([_to_leased_call(call) for call in calls]))

    async def answer(self, request: Request, body: CallAnswer) -> MsgpackReply[dict[str, Json]]:
        """Answer a call, all at once or in parts."""
        ids = _parse_array(body.ids, ID_DTYPE, "ids")
        logprobs = None if body.logprobs is None else _parse_array(body.logprobs, LOGPROB_DTYPE, "logprobs")
        call = request.path_params["call"]
        self._gate.accept_piece(call, body.lease, body.at, ids, logprobs, body.finish, body.version)
        return _pack({})

    async def fail(self, request: Request, body: CallFailure) -> MsgpackReply[dict[str, Json]]:
        """Answer a call with an error."""
        self._gate.fail_call(request.path_params["call"], body.lease, body.message, body.fault)
        return _pack({})

    async def give_back(self, request: Request, body: CallRelease) -> MsgpackReply[dict[str, Json]]:
        """Return a call to the queue."""
        self._gate.return_call(request.path_params["call"], body.lease)
        return _pack({})

    async def renew(self, request: Request, body: RenewLeases) -> MsgpackReply[RenewedLeases]:
        """Renew leases. Return the calls whose lease is no longer valid, each with the reason."""
        over: dict[str, str] = {}
        for call, lease in body.leases.items():
            try:
                self._gate.renew_lease(call, lease)
            except (Gone, Conflict, NotFound) as error:
                over[call] = error.message
        return _pack(RenewedLeases(over))


def _pack(value: T) -> MsgpackReply[T]:
    return MsgpackReply(msgspec.msgpack.encode(value))


def _parse_array(raw: bytes, kind: type[np.generic], field: str) -> np.ndarray:
    little_endian = np.dtype(kind).newbyteorder("<")
    if len(raw) % little_endian.itemsize:
        raise BadRequest(
            f"{field}: its length in bytes must be a multiple of {little_endian.itemsize}, not {len(raw)}",
            param=field,
        )
    return np.frombuffer(raw, little_endian).astype(kind)


def _to_leased_call(call: GateCall) -> LeasedCall:
    return LeasedCall(
        id=call.id,
        lease=call.lease,
        session=call.session,
        version=call.version,
        prompt=np.ascontiguousarray(call.prompt, "<i4").tobytes(),
        max_tokens=call.max_tokens,
        sampling=call.sampling,
        stop=call.stop,
        stop_ids=call.stop_ids,
        constraint=call.constraint,
        stream=call.stream,
    )
