"""Shared helpers for the relay tests: calls in native and foreign dialects, and the chunks they produce."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from tests.engines.standins import Answer, StandIn, serving
from turngate.dialects.chat_tools import ChatTools
from turngate.engines.base import Relay, RelayChunk, RelayRequest
from turngate.types import Call, CallDelta, Constraint, Delta, Message

Json = Any
TOOL = {"type": "function", "function": {"name": "bash", "description": "Runs.", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


class DecodedHistory:
    """An already decoded history: one or more messages per piece."""

    def __init__(self, pieces: Sequence[Message | tuple[Message, ...]], items: Sequence[bytes] = ()) -> None:
        self.items = items
        self._pieces = [piece if isinstance(piece, tuple) else (piece,) for piece in pieces]
        self.raws = [b"{}"] * len(self._pieces)

    def decode(self, index: int) -> tuple[Message, ...]:
        return self._pieces[index]


def foreign_call(*messages: Message | tuple[Message, ...], tools: Sequence[Json] = (), **fields: Any) -> Call:
    """Make a call in a dialect that no endpoint speaks, so that it has to be translated."""
    offered = ChatTools(json.dumps(list(tools)).encode()) if tools else None
    return Call(**{"model": "m", "dialect": "elsewhere", **fields}, history=DecodedHistory(messages), tools=offered)


class _ListedItems(msgspec.Struct):
    input: str | list[msgspec.Raw] = []


def native_call(dialect: str, body: Json, **fields: Any) -> Call:
    """Make a call in the endpoint's own dialect, whose body is forwarded."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    listed: str | list[msgspec.Raw] = []
    with suppress(msgspec.DecodeError):
        listed = msgspec.json.decode(raw, type=_ListedItems).input
    history = DecodedHistory([], [bytes(item) for item in listed] if isinstance(listed, list) else [])
    return Call(**{"model": "m", **fields}, history=history, dialect=dialect, body=raw)


def require_tools(*names: str) -> Constraint:
    choices = [{"properties": {"name": {"const": name}}} for name in names]
    return Constraint("tools", {"items": {"anyOf": choices}})


@asynccontextmanager
async def started(relay: Relay) -> AsyncIterator[Relay]:
    await relay.start()
    try:
        yield relay
    finally:
        await relay.close()


async def relay_call(relay: Relay, call: Call, **fields: Any) -> list[RelayChunk]:
    async with relay.relay(RelayRequest(call=call, **fields)) as chunks:
        seen = [chunk async for chunk in chunks]
    assert seen[-1].finish is not None and all(chunk.finish is None for chunk in seen[:-1])
    return seen


async def relay_answer(make: Callable[[str], Relay], answer: Answer, call: Call, **fields: Any) -> list[RelayChunk]:
    """Relay one call to an endpoint that gives this answer."""
    async with serving(StandIn(answer)) as server, started(make(server.url)) as relay:
        return await relay_call(relay, call, **fields)


def events_of(chunks: Sequence[RelayChunk]) -> list[Delta | CallDelta]:
    return [event for chunk in chunks for event in chunk.events]


def lost_fields(chunks: Sequence[RelayChunk]) -> tuple[str, ...]:
    return tuple(name for chunk in chunks for name in chunk.lost)
