"""The ways in which an engine can fail or lie, as answers of `ChaosEngine`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from tests.chaos.engine import CallInProgress, Misbehavior, Values
from tests.engines.standins import event

GARBAGE = b'data: {"choices": [{]]] \xff\xfe\n\n'


async def hang(call: CallInProgress) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError("unreachable")


async def stall(call: CallInProgress) -> web.StreamResponse:
    """Send the first tokens, then nothing."""
    return await call.send(_half(call), hang=True)


async def end_early(call: CallInProgress) -> web.StreamResponse:
    """End the reply in the middle, as if it were complete."""
    return await call.send(_half(call))


async def drop(call: CallInProgress) -> web.StreamResponse:
    assert call.request.transport is not None
    call.request.transport.abort()
    return web.Response()


async def send_garbage(call: CallInProgress) -> web.StreamResponse:
    return await call.send([*_half(call), GARBAGE])


async def send_no_http(call: CallInProgress) -> web.StreamResponse:
    assert call.request.transport is not None
    call.request.transport.write(b"\x00\x15\xff what is HTTP?\r\n\r\n")  # type: ignore[attr-defined]  # it is a Transport
    call.request.transport.close()
    return web.Response()


async def send_html(call: CallInProgress) -> web.StreamResponse:
    return web.Response(text="<html><body>Sign in to continue</body></html>", content_type="text/html")


async def redirect(call: CallInProgress) -> web.StreamResponse:
    return web.Response(status=302, headers={"location": "http://127.0.0.1:9/elsewhere"})


async def repeat_event(call: CallInProgress) -> web.StreamResponse:
    """Send one event twice. Only the number of tokens in the usage shows that."""
    events = call.events()
    return await call.send([events[0], *events] if call.body["stream"] else events)


async def omit_event(call: CallInProgress) -> web.StreamResponse:
    events = call.events()
    return await call.send([events[0], *events[2:]] if len(events) > 4 else events)


async def send_after_end(call: CallInProgress) -> web.StreamResponse:
    """Continue after the finish reason."""
    events = call.events()
    return await call.send([*events[:-2], events[0], *events[-2:]] if call.body["stream"] else events)


async def send_nothing(call: CallInProgress) -> web.StreamResponse:
    """Finish without a token."""
    empty: dict[str, Any] = {"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "stop"}]}
    return await call.send([event(empty) if call.body["stream"] else json.dumps(empty).encode()])


async def abort(call: CallInProgress) -> web.StreamResponse:
    return await call.send(call.events(finish="abort"))


async def fail_in_stream(call: CallInProgress) -> web.StreamResponse:
    error = {"error": {"message": "EngineCore encountered an issue", "type": "InternalServerError", "code": 500}}
    parts = _half(call)
    return await call.send([*parts, event(error)] if call.body["stream"] else [json.dumps(error).encode()])


async def omit_ids(call: CallInProgress) -> web.StreamResponse:
    """Send text without ids, as an engine does that ignores the request for them."""
    choice = {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
    return await call.send([event({"choices": [choice]})])


async def echo_other_prompt(call: CallInProgress) -> web.StreamResponse:
    call.generation.prompt[-1] ^= 1
    try:
        return await call.send(call.events())
    finally:
        call.generation.prompt[-1] ^= 1


def answer_status(status: int) -> Misbehavior:
    async def answer(call: CallInProgress) -> web.StreamResponse:
        return web.json_response({"error": {"message": "injected", "code": status}}, status=status)

    return answer


def change_ids(value: int) -> Misbehavior:
    """Replace an id in the middle with one that does not exist."""

    async def answer(call: CallInProgress) -> web.StreamResponse:
        ids = [*call.generation.ids]
        ids[len(ids) // 2] = value
        return await call.send(call.events(ids))

    return answer


def change_logprobs(value: float | None) -> Misbehavior:
    async def answer(call: CallInProgress) -> web.StreamResponse:
        logprobs: Values = [*call.generation.logprobs]
        logprobs[len(logprobs) // 2] = value
        return await call.send(call.events(logprobs=logprobs))

    return answer


async def add_logprobs(call: CallInProgress) -> web.StreamResponse:
    """Send one log-probability too many with each event."""
    return await call.send(
        [part.replace(b'"token_logprobs": [', b'"token_logprobs": [-0.5, ') for part in call.events()]
    )


def _half(call: CallInProgress) -> list[bytes]:
    events = call.events()
    return events[: max(1, len(events) // 2)] if call.body["stream"] else [events[0][: len(events[0]) // 2]]
