"""Calls of real agents, repeated and damaged, translated for each observed endpoint. Their tool-call ids often collide."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st

from tests.fuzz.cpu_limit import limit_cpu_time
from tests.fuzz.json_values import bodies, damaged
from tests.fuzz.requests import read_calls
from turngate.dialects import DIALECTS, Dialect, WireRequest
from turngate.engines.base import RelayRequest
from turngate.engines.observe.anthropic import AnthropicRelay
from turngate.engines.observe.gemini import GeminiRelay
from turngate.engines.observe.openai import OpenAIRelay
from turngate.engines.observe.relay import StreamingRelay
from turngate.engines.observe.responses import ResponsesRelay
from turngate.errors import TurngateError

Json = Any
HANG_S = 5.0  # CPU time for one call and all endpoints
_DIALECTS = {dialect.name: dialect for dialect in DIALECTS}
_URL = "http://127.0.0.1:1"  # never connected to
_STREAMING = (AnthropicRelay(_URL), GeminiRelay(_URL), ResponsesRelay(_URL))
_OPENAI = OpenAIRelay(_URL)
_HISTORY = ("messages", "input", "contents")
_ID_FIELDS = ("id", "call_id", "tool_call_id", "tool_use_id")
_REJECTED = ("previous_response_id", "text", "stop", "stop_sequences")  # fields for which most calls would be rejected
_MARKS = ('"tool_calls"', '"tool_use"', '"functionCall"', '"function_call"')
_IDS = st.sampled_from(["a", "a", "a_1", "a_2", "a_3", "a.2", "a 2", "", "é"])


class RelayCall(msgspec.Struct, frozen=True):
    dialect: str
    body: bytes


@cache
def _read_conversations(dialect: str) -> list[tuple[Json, str]]:
    """Return calls whose history has tool calls, with the name of the field that holds the history."""
    calls = [{name: one for name, one in call.items() if name not in _REJECTED} for call in read_calls(dialect)]
    with_history = [(call, name) for call in calls for name in _HISTORY if isinstance(call.get(name), list)]
    return [(call, name) for call, name in with_history if any(mark in json.dumps(call[name]) for mark in _MARKS)]


@st.composite
def relay_calls(draw: Callable[..., Any]) -> RelayCall:
    dialect = draw(st.sampled_from(sorted(_DIALECTS)))
    call, name = draw(st.sampled_from(_read_conversations(dialect)))
    history = [copy.deepcopy(one) for _ in range(draw(st.integers(1, 4))) for one in call[name]]
    _replace_ids(draw, history)
    call = {**call, name: draw(damaged(st.just(history), most=2))}
    return RelayCall(dialect, draw(bodies(damaged(st.just(call), most=1))))


def _replace_ids(draw: Callable[..., Any], value: Json) -> None:
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _replace_ids(draw, inner)
    if isinstance(value, dict):
        value.update({name: draw(_IDS) for name in _ID_FIELDS if name in value})


def check_relay(call: RelayCall) -> None:
    """Build the bodies for all endpoints: each is JSON, or an error of the client. The ids of translated tool calls are unique."""
    with limit_cpu_time(HANG_S):
        for endpoint in ("chat", *(relay.dialect for relay in _STREAMING)):
            try:
                body = _write(endpoint, _decode(_DIALECTS[call.dialect], call.body))
            except TurngateError as error:
                assert error.status < 500, f"{endpoint}: {error!r}"
                continue
            if endpoint != call.dialect:
                ids = list(_list_call_ids(endpoint, json.loads(body)))
                assert len(ids) == len(set(ids)), f"{endpoint}: repeated tool-call ids {ids}"


def _decode(dialect: Dialect, body: bytes) -> RelayRequest:
    call = dialect.decode(WireRequest(body, verb="generate", model="m"))
    for index in range(len(call.history.raws)):
        call.history.decode(index)
    return RelayRequest(call=call, max_tokens=call.max_tokens)


def _write(endpoint: str, request: RelayRequest) -> bytes:
    if endpoint == "chat":
        return msgspec.json.encode(_OPENAI._write(request, _OPENAI._capture_request, frozenset()).body)
    relay: StreamingRelay = next(one for one in _STREAMING if one.dialect == endpoint)
    return msgspec.json.encode(relay._write(request, frozenset()).body)


def _list_call_ids(endpoint: str, body: Json) -> Iterator[str]:
    match endpoint:
        case "chat":
            yield from (call["id"] for one in body["messages"] for call in one.get("tool_calls") or ())
        case "messages":
            blocks = (block for one in body["messages"] for block in one["content"])
            yield from (block["id"] for block in blocks if block["type"] == "tool_use")
        case "gemini":
            parts = (part for one in body["contents"] for part in one["parts"])
            yield from (part["functionCall"]["id"] for part in parts if "functionCall" in part)
        case _:
            yield from (item["call_id"] for item in body["input"] if item["type"] == "function_call")
