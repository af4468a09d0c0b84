"""The gate for a trainer in another process: take calls, answer, fail, give back, keep. Under `/admin/gate`, behind the admin key.

Only where the gateway's engine is a gate (`--engine gate`). Bodies and replies are msgpack; token ids are raw 32-bit integers and
log-probabilities raw 32-bit floats (not a number: not known), both little-endian. `client/gate.py` is the other end.
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
        one = "/admin/gate/calls/{call}"
        return [
            route("/admin/gate", "GET", self.show, self._auth),
            route("/admin/gate/take", "POST", self.take, self._auth),
            route("/admin/gate/renew", "POST", self.renew, self._auth),
            route(f"{one}/answer", "POST", self.answer, self._auth),
            route(f"{one}/fail", "POST", self.fail, self._auth),
            route(f"{one}/give_back", "POST", self.give_back, self._auth),
        ]

    async def show(self, request: Request) -> Response:
        return json_response(self._gate.waiting())

    async def take(self, request: Request) -> Response:
        wanted = await packed(request, TakeCalls)
        calls: list[GateCall] = []
        if self._gate.closed:
            raise Stopping("the gateway is being stopped; come back in a moment")
        with DisconnectWatch(request.receive) as watch:
            try:
                calls = await self._gate.take(wanted.limit, wait_s=wanted.wait_s, lease_s=wanted.lease_s)
            except asyncio.CancelledError:
                if not watch.gone:
                    raise
        if watch.gone:  # whoever asked will not get them
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            for call in calls:
                with suppress(TurngateError):  # it is over meanwhile, which must not cost the others their turn
                    self._gate.give_back_of(call.id, call.lease)
            return Response(status_code=499)
        return _pack(LeasedCalls([_handed(call) for call in calls]))

    async def answer(self, request: Request) -> Response:
        given = await packed(request, CallAnswer)
        ids = _array(given.ids, ID_DTYPE, "ids")
        logprobs = None if given.logprobs is None else _array(given.logprobs, LOGPROB_DTYPE, "logprobs")
        call = request.path_params["call"]
        self._gate.piece_of(call, given.lease, given.at, ids, logprobs, given.finish, given.version)
        return _pack({})

    async def fail(self, request: Request) -> Response:
        given = await packed(request, CallFailure)
        self._gate.fail_of(request.path_params["call"], given.lease, given.message, given.fault)
        return _pack({})

    async def give_back(self, request: Request) -> Response:
        given = await packed(request, CallRelease)
        self._gate.give_back_of(request.path_params["call"], given.lease)
        return _pack({})

    async def renew(self, request: Request) -> Response:
        """Says for each call whether it is still worth working on."""
        given = await packed(request, RenewLeases)
        over: dict[str, str] = {}
        for call, lease in given.leases.items():
            try:
                self._gate.renew_of(call, lease)
            except (Gone, Conflict, NotFound) as error:
                over[call] = error.message
        return _pack(RenewedLeases(over))


async def packed(request: Request, kind: type[T]) -> T:
    """The body as `kind`; an empty one has only defaults."""
    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > MAX_BODY:
            raise TooLarge(f"the request has more than {MAX_BODY} bytes, which is the limit here")
    try:
        return msgspec.msgpack.decode(raw or b"\x80", type=kind)
    except msgspec.ValidationError as error:
        message, field = explain_error(error, kind)
        raise BadRequest(message, param=field) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid msgpack: {error}") from None
    except (UnicodeDecodeError, RecursionError) as error:
        field = _unreadable(raw, kind)
        wrong = "is nested too deep" if isinstance(error, RecursionError) else "has text that is not UTF-8"
        raise BadRequest(f"{field or 'the body'}: {wrong}", param=field) from None


def _unreadable(raw: bytes, kind: type) -> str | None:
    """The field that a decoder could not read, where it does not say so itself; None: the names of the fields are what it could not."""
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


def _array(raw: bytes, kind: type[np.generic], field: str) -> np.ndarray:
    little = np.dtype(kind).newbyteorder("<")
    if len(raw) % little.itemsize:
        raise BadRequest(f"{field}: {len(raw)} bytes are no whole number of {little.itemsize}-byte ones", param=field)
    return np.frombuffer(raw, little).astype(kind)


def _handed(call: GateCall) -> LeasedCall:
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
