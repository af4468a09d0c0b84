"""The gate API under `/admin/gate`, for a trainer in another process: take, answer, fail, return and renew calls. Requires the admin key.

Available only with `--engine gate`. Bodies and replies are msgpack. Token ids are raw 32-bit integers and
log-probabilities raw 32-bit floats (NaN if unknown), both little-endian.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
from turngate.common.validation import explain_error
from turngate.engines.gate import Gate
from turngate.engines.gate_call import GateCall
from turngate.errors import BadRequest, Conflict, Gone, NotFound, Stopping, TooLarge, TurngateError
from turngate.server.asgi import DisconnectWatch
from turngate.server.auth import Auth
from turngate.server.http import json_response, route
from turngate.types import ID_DTYPE, LOGPROB_DTYPE

T = TypeVar("T")
MSGPACK = "application/msgpack"
MAX_BODY = 32_000_000  # four million tokens


class GateRoutes:
    def __init__(self, gate: Gate, auth: Auth) -> None:
        self._gate = gate
        self._auth = auth

    def routes(self) -> list[Route]:
        call = "/admin/gate/calls/{call}"
        return [
            route("/admin/gate", "GET", self.show, self._auth),
            route("/admin/gate/take", "POST", self.take, self._auth),
            route("/admin/gate/renew", "POST", self.renew, self._auth),
            route(f"{call}/answer", "POST", self.answer, self._auth),
            route(f"{call}/fail", "POST", self.fail, self._auth),
            route(f"{call}/give_back", "POST", self.give_back, self._auth),
        ]

    async def show(self, request: Request) -> Response:
        return json_response(self._gate.queue_status())

    async def take(self, request: Request) -> Response:
        body = await decode_msgpack(request, TakeCalls)
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
                with suppress(TurngateError):  # this call has ended, but the others must still be returned
                    self._gate.return_call(call.id, call.lease)
            return Response(status_code=499)
        return _pack(LeasedCalls([_to_leased_call(call) for call in calls]))

    async def answer(self, request: Request) -> Response:
        body = await decode_msgpack(request, CallAnswer)
        ids = _parse_array(body.ids, ID_DTYPE, "ids")
        logprobs = None if body.logprobs is None else _parse_array(body.logprobs, LOGPROB_DTYPE, "logprobs")
        call = request.path_params["call"]
        self._gate.accept_piece(call, body.lease, body.at, ids, logprobs, body.finish, body.version)
        return _pack({})

    async def fail(self, request: Request) -> Response:
        body = await decode_msgpack(request, CallFailure)
        self._gate.fail_call(request.path_params["call"], body.lease, body.message, body.fault)
        return _pack({})

    async def give_back(self, request: Request) -> Response:
        body = await decode_msgpack(request, CallRelease)
        self._gate.return_call(request.path_params["call"], body.lease)
        return _pack({})

    async def renew(self, request: Request) -> Response:
        """Renew the leases. Return the calls that have ended, each with the reason."""
        body = await decode_msgpack(request, RenewLeases)
        over: dict[str, str] = {}
        for call, lease in body.leases.items():
            try:
                self._gate.renew_lease(call, lease)
            except (Gone, Conflict, NotFound) as error:
                over[call] = error.message
        return _pack(RenewedLeases(over))


async def decode_msgpack(request: Request, kind: type[T]) -> T:
    """Decode a request's body as `kind`. An empty body means all defaults."""
    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > MAX_BODY:
            raise TooLarge(f"the request body is larger than the limit of {MAX_BODY} bytes")
    try:
        return msgspec.msgpack.decode(raw or b"\x80", type=kind)
    except msgspec.ValidationError as error:
        message, field = explain_error(error, kind)
        raise BadRequest(message, param=field) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid msgpack: {error}") from None
    except (UnicodeDecodeError, RecursionError) as error:
        field = _find_undecodable(raw, kind)
        reason = "is nested too deeply" if isinstance(error, RecursionError) else "contains text that is not UTF-8"
        raise BadRequest(f"{field or 'the body'} {reason}", param=field) from None


def _find_undecodable(raw: bytes, kind: type) -> str | None:
    """Return the field that the decoder failed on, or None if it failed on the field names."""
    try:
        parts = msgspec.msgpack.decode(raw, type=dict[str, msgspec.Raw])
        known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    for name, part in parts.items():
        try:
            msgspec.msgpack.decode(part, type=known.get(name, msgspec.Raw))
        except (UnicodeDecodeError, RecursionError):
            return name
        except msgspec.DecodeError:
            continue
    return None


def _pack(value: object) -> Response:
    return Response(msgspec.msgpack.encode(value), media_type=MSGPACK)


def _parse_array(raw: bytes, kind: type[np.generic], field: str) -> np.ndarray:
    little_endian = np.dtype(kind).newbyteorder("<")
    if len(raw) % little_endian.itemsize:
        raise BadRequest(
            f"{field} is {len(raw)} bytes long, but its length must be a multiple of {little_endian.itemsize} bytes",
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
