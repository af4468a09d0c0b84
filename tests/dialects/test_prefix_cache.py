"""Test that requests decoded with the prefix cache equal the same requests decoded in full."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turngate.dialects import DIALECTS, Dialect, WireRequest
from turngate.dialects.prefix_cache import FrameCache, PrefixCache
from turngate.dialects.wire import without_lone_surrogates
from turngate.errors import BadRequest
from turngate.types import Call

BY_NAME = {dialect.name: dialect for dialect in DIALECTS}


class CountingDialect:
    """A dialect that records the size of each body it decodes."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dialect, name)

    def decode(self, wire: WireRequest) -> Call:
        self.sizes.append(len(wire.body))
        return self._dialect.decode(wire)


def _assert_same(cache: PrefixCache, dialect: Dialect, body: bytes) -> None:
    """Check that both ways give the same call or the same error."""
    headers = {"idempotency-key": str(len(body)), "x-stainless-retry-count": str(len(body) % 2), "openai-beta": "x"}
    wire = WireRequest(body, headers, model="m")
    try:
        whole = dialect.decode(WireRequest(without_lone_surrogates(body), headers, model="m"))
    except BadRequest as error:
        with pytest.raises(BadRequest) as caught:
            cache.decode(wire)
        assert (caught.value.message, caught.value.param) == (error.message, error.param)
        return
    call = cache.decode(wire)
    for field in Call.__struct_fields__:
        if field not in ("history", "tools", "reply_options"):
            assert getattr(call, field) == getattr(whole, field), field
    assert list(call.history.raws) == list(whole.history.raws)
    assert list(call.history.items) == list(whole.history.items)
    for n in range(len(whole.history.raws)):
        assert _decode_or_error(call, n) == _decode_or_error(whole, n)
    assert (call.tools and call.tools.raw) == (whole.tools and whole.tools.raw)
    assert (call.tools and call.tools.decode()) == (whole.tools and whole.tools.decode())


def _decode_or_error(call: Call, index: int) -> object:
    try:
        return call.history.decode(index)
    except BadRequest as error:
        return error.message


# ── request strategies ──────────────────────────────────────────────────────────────────────────────────────────────

_TEXT = st.sampled_from(["", "x", "Grüße", 'a "messages":[ in it', '],"input":[{', "half \ud83d of one", "two\nlines"])


def _chat(text: str, kind: int) -> Any:
    if kind == 0:
        return {"role": "user", "content": text}
    if kind == 1:
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
        return {"role": "assistant", "content": text, "tool_calls": [call]}
    if kind == 2:
        return {"role": "tool", "tool_call_id": "c1", "content": text}
    return [{"role": "system", "content": text}, 17, {"role": "nobody"}, text][len(text) % 4]


def _messages(text: str, kind: int) -> Any:
    if kind == 0:
        return {"role": "user", "content": text or "x"}
    if kind == 1:
        return {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": text}}]}
    if kind == 2:
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": text}]}
    return [{"role": "system", "content": text}, 17, {"role": "nobody"}, {"content": [], "role": "user"}][len(text) % 4]


def _responses(text: str, kind: int) -> Any:
    if kind == 0:
        return {"role": "user", "content": text}
    if kind == 1:
        return {
            "type": "function_call",
            "call_id": "c1",
            "name": "f",
            "arguments": "{}",
            "id": f"fc_tg{text[:1] * 24}_1",
        }
    if kind == 2:
        return {"type": "function_call_output", "call_id": "c1", "output": text}
    return [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]},
        17,
        {"type": "message", "role": "assistant", "content": text},
        {"type": "additional_tools", "tools": [{"type": "function", "name": text}]},
    ][len(text) % 4]


def _gemini(text: str, kind: int) -> Any:
    if kind == 0:
        return {"role": "user", "parts": [{"text": text}]}
    if kind == 1:
        return {"parts": [{"functionCall": {"name": "f", "args": {"a": text}}}], "role": "model"}
    if kind == 2:
        return {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": text}}}]}
    return [{"parts": [{"text": text}]}, 17, {"role": "nobody"}, {"role": "model", "parts": [{"text": text}]}][
        len(text) % 4
    ]


_SCHEMA = {"type": "object", "properties": {"messages": {"type": "array"}, "input": {"enum": [{"role": "user"}]}}}
_TOOLS: dict[str, Any] = {
    "chat": [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}],
    "messages": [{"name": "f", "input_schema": _SCHEMA}],
    "responses": [{"type": "function", "name": "f", "parameters": _SCHEMA}],
    "gemini": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": _SCHEMA}]}],
}
_STYLES = st.tuples(
    st.sampled_from([0, 0, 0, 1, 1, 2]),  # position of the list: last, first or twice
    st.integers(0, 3),
    st.sampled_from([(",", ":"), (",", ":"), (", ", ": "), (" ,", " : ")]),
    st.booleans(),
)
_MAKERS = {"chat": _chat, "messages": _messages, "responses": _responses, "gemini": _gemini}


@st.composite
def _requests(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """Draw a dialect and the requests of one session, each continuing an earlier one."""
    name = draw(st.sampled_from(sorted(_MAKERS)))
    kinds = st.sampled_from([0, 1, 2, 0, 1, 2, 0, 1, 2, 3])
    item = st.builds(_MAKERS[name], _TEXT, kinds)
    items: list[Any] = []
    bodies = []
    style = draw(_STYLES)
    for _ in range(draw(st.integers(1, 6))):
        style = draw(st.sampled_from([style, style, style, draw(_STYLES)]))
        items = items[: len(items) - draw(st.sampled_from([0, 0, 0, 0, 1, 2]))] + draw(st.lists(item, max_size=4))
        bodies.append(_body(name, items, style))
    return name, bodies


def _body(name: str, items: list[Any], style: tuple[int, int, tuple[str, str], bool]) -> bytes:
    shape, variant, spaces, ascii_only = style
    field = BY_NAME[name].list_field
    extra: dict[str, Any] = {"messages": {"system": "s", "max_tokens": 9}, "responses": {"instructions": "s"}}.get(
        name, {}
    )
    model = {} if name == "gemini" else {"model": "m"}
    extras = [{}, {"tools": _TOOLS[name]}, {"metadata": {field: []}, "temperature": 0.5}, {"stream": True}][variant]
    whole = {**model, **extra, **extras, field: items} if shape == 0 else {field: items, **model, **extra, **extras}
    text = json.dumps(whole, separators=spaces, ensure_ascii=ascii_only or "half" in repr(items))
    if shape == 2:  # the list twice: the later one wins
        text = text[:-1] + f',"{field}":' + json.dumps(items[:1] + items[2:], separators=(",", ":")) + "}"
    return text.encode("utf-8", "surrogatepass")


@given(_requests())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_cached_decoding_equals_full_decoding(case: tuple[str, list[bytes]]) -> None:
    name, bodies = case
    cache = PrefixCache(BY_NAME[name], FrameCache())
    for body in bodies:
        _assert_same(cache, BY_NAME[name], body)


# ── decoded sizes ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", sorted(_MAKERS))
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_known_items_are_not_decoded_again(name: str, separators: tuple[str, str]) -> None:
    dialect = CountingDialect(BY_NAME[name])
    cache = PrefixCache(dialect, FrameCache())
    items = [_MAKERS[name]("long " * 1000, 0)]
    for turn in range(5):
        items += [_MAKERS[name](f"x{turn}", 1), _MAKERS[name](f"y{turn}", 2)]
        body = json.dumps({dialect.list_field: items}, separators=separators).encode()
        assert list(cache.decode(WireRequest(body)).history.items) == [
            json.dumps(i, separators=separators).encode() for i in items
        ]
    assert dialect.sizes[0] > 5000
    assert all(size < 500 for size in dialect.sizes[1:])


def test_interleaved_conversations_are_all_cached() -> None:
    dialect = CountingDialect(BY_NAME["chat"])
    cache = PrefixCache(dialect, FrameCache())
    lines = [[_chat(f"task {line} " * 500, 0)] for line in range(4)]
    for turn in range(5):
        for items in lines:
            items.append(_chat(f"{turn}", turn % 2))
            cache.decode(WireRequest(json.dumps({"messages": items}).encode()))
    assert all(size < 1000 for size in dialect.sizes[4:])


def test_changed_end_keeps_cached_prefix() -> None:
    """Claude Code moves its cache markers and changes the text before the list with every call."""
    dialect = CountingDialect(BY_NAME["messages"])
    cache = PrefixCache(dialect, FrameCache())
    items: list[Any] = [_messages("long " * 1000, 0)]
    for turn in range(5):
        items += [_messages(f"x{turn}", 1), _messages(f"y{turn}", 2)]
        marked = [*items[:-1], {**items[-1], "cache_control": {"type": "ephemeral"}}]
        body = json.dumps({"system": f"call {turn}", "max_tokens": 9, "messages": marked}).encode()
        _assert_same(cache, BY_NAME["messages"], body)
        cache.decode(WireRequest(body))
    assert dialect.sizes[0] > 5000
    assert all(size < 700 for size in dialect.sizes[2:])


def test_earlier_history_is_not_changed_by_later_request() -> None:
    """Later requests do not change the history of an earlier call."""
    for name in sorted(_MAKERS):
        dialect, cache = BY_NAME[name], PrefixCache(BY_NAME[name], FrameCache())
        first = [_MAKERS[name]("a", 0), _MAKERS[name]("b", 1)]
        field = dialect.list_field
        extra = {"max_tokens": 9}
        short = cache.decode(WireRequest(json.dumps({field: [*first, _MAKERS[name]("c", 2)], **extra}).encode()))
        raws = list(short.history.raws)
        cache.decode(
            WireRequest(json.dumps({field: [*first, _MAKERS[name]("c", 2), _MAKERS[name]("d", 0)], **extra}).encode())
        )
        assert short.history.raws == raws


def test_request_over_http_is_checked_although_it_extends_one_over_a_websocket() -> None:
    cache = PrefixCache(BY_NAME["responses"], FrameCache())

    def body(items: int) -> bytes:
        return json.dumps({"generate": False, "input": [_responses("x", 0)] * items, "model": "m"}).encode()

    cache.decode(WireRequest(body(1), over_socket=True))
    with pytest.raises(BadRequest, match="only over a WebSocket"):
        cache.decode(WireRequest(body(2)))
    assert len(cache.decode(WireRequest(body(2), over_socket=True)).history.raws) == 2
