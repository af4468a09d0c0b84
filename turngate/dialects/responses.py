"""OpenAI Responses: `POST /v1/responses`, and `/v1/responses/input_tokens`, which counts.

Every field of a request is checked here. What it says is in `responses_items`, what it offers in `responses_tools`, and how it is
answered in `responses_stream`. Nothing is kept for later calls: each one brings its whole conversation along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import orjson

from turngate.dialects.base import Route, Wire
from turngate.dialects.openai import PASSED, error_body, model_list, one_model
from turngate.dialects.responses_items import Items
from turngate.dialects.responses_stream import Asked, Offered, ResponsesStream, told
from turngate.dialects.responses_tools import ResponsesTools, flat, left_out
from turngate.dialects.wire import (
    ABSENT,
    UNREADABLE,
    any_tool,
    bearer,
    by_headers,
    checked_sampling,
    given,
    one_line,
    one_tool,
    param,
    reason,
    refused,
    shallow,
)
from turngate.errors import BadRequest, ContextOverflow, NotFound, TurngateError
from turngate.types import Call, Constraint, Done, History, Json, Tool

_ENCRYPTED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
# Chat templates know no effort beyond these.
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high", "ultra": "high"}


class PreviousResponseNotFound(BadRequest):
    """No response can be found by its id: none is kept."""

    kind = "previous_response_not_found"


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # its old name


class _Format(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None


class _Text(msgspec.Struct):
    format: _Format | None = None
    verbosity: str | None = None


class _Request(msgspec.Struct):
    model: str | None = None
    input: str | list[msgspec.Raw] | None = None
    instructions: str | None = None
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    text: msgspec.Raw = ABSENT
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    stream: bool | None = None
    top_logprobs: int | None = None
    metadata: msgspec.Raw = ABSENT
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    background: bool | None = None
    context_management: msgspec.Raw = ABSENT
    moderation: msgspec.Raw = ABSENT


_request = msgspec.json.Decoder(_Request)
_list = msgspec.json.Decoder(list[msgspec.Raw])


class Responses:
    """The dialect."""

    name = "responses"
    routes = (
        Route("/v1/responses"),
        Route("/responses"),
        Route("/v1/responses/input_tokens", "count"),
        Route("/responses/input_tokens", "count"),
    )
    area = "/v1/responses"
    list_field = "input"
    id_header = "x-request-id"

    def key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str:
        return bearer(headers)

    def decode(self, wire: Wire) -> Call:
        try:
            request = _request.decode(wire.body)
        except msgspec.ValidationError as error:
            raise BadRequest(reason(error), param=param(error)) from None
        except UNREADABLE as error:
            raise BadRequest(f"The body is not valid JSON: {error}") from None
        _refuse_what_we_do_not_do(request)
        items = _items(request, wire)
        offered = _offered(request, items)
        text = _text(request)
        constraint, tools = _constraint(request, text, offered, renewed=bool(items.offered))
        reasoning = request.reasoning or _Reasoning()
        asked = {"temperature": request.temperature, "top_p": request.top_p}
        return Call(
            model=request.model or "",
            history=items,
            tools=tools,
            sampling=checked_sampling({name: value for name, value in asked.items() if value is not None}),
            max_tokens=_max_tokens(request),
            constraint=constraint,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            template_kwargs=shallow(request.chat_template_kwargs or {}, "chat_template_kwargs"),
            template_hints=_hints(reasoning.effort, text.verbosity),
            stream=bool(request.stream),
            include_usage=True,
            dialect=self.name,
            body=wire.sent,
            wire=Asked(
                echo=_echo(request, reasoning),
                tools=Offered((*((offered,) if offered is not None else ()), *items.searched())),
                summary=bool(reasoning.summary or reasoning.generate_summary),
                seal=_ENCRYPTED in (request.include or ()),
            ),
            **by_headers(wire.headers, PASSED),
        )

    def go_on(self, call: Call, history: History, wire: Wire) -> Call | None:
        if not isinstance(history, Items) or history.offered or history.found:
            return None  # tools that come with the items are among those of the call
        return msgspec.structs.replace(call, history=history, body=wire.sent, **by_headers(wire.headers, PASSED))

    def history(self, raws: Sequence[bytes]) -> Items:
        return Items(raws)

    def stream(self, call: Call) -> ResponsesStream:
        return ResponsesStream(call)

    def whole(self, call: Call, done: Done) -> bytes:
        return ResponsesStream(call).whole(done)

    def count(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})

    def models(self, names: Sequence[str], created: int) -> bytes:
        return model_list(names, created)

    def model(self, name: str, created: int) -> bytes:
        return one_model(name, created)

    def status(self, error: TurngateError) -> int:
        return error.status

    def error(self, error: TurngateError) -> bytes:
        if isinstance(error, ContextOverflow):
            return orjson.dumps(error_body(error, message=told(error), param="input"))
        missing = isinstance(error, NotFound) and error.param == "model"
        return orjson.dumps(error_body(error, code="model_not_found" if missing else None))

    def in_stream(self, error: TurngateError) -> bool:
        # Agents look for it there, and make room. All else they understand by its HTTP status.
        return isinstance(error, ContextOverflow)


def _refuse_what_we_do_not_do(request: _Request) -> None:
    if request.previous_response_id:
        raise PreviousResponseNotFound(
            f"Previous response with id {request.previous_response_id!r} not found: responses are not stored here. "
            "Send the whole conversation as input.",
            param="previous_response_id",
        )
    for name, value in (("conversation", request.conversation), ("prompt", request.prompt)):
        if given(value):
            raise refused(name, "nothing is stored here that it could name; send the whole conversation as input")
    if request.background:
        raise refused("background", "is not supported, since no response is kept; stream it, or wait for it")
    if request.top_logprobs or _LOGPROBS in (request.include or ()):
        field = "top_logprobs" if request.top_logprobs else "include"
        raise refused(field, "log-probabilities are recorded by the gateway and not given to agents; leave them out")
    if given(request.context_management) and bytes(request.context_management) != b"[]":
        raise refused(
            "context_management", "the gateway does not compact conversations; leave it out and do so yourself"
        )
    if given(request.moderation):
        raise refused("moderation", "is not done here; leave it out")


def _items(request: _Request, wire: Wire) -> Items:
    said = request.input
    items = [bytes(item) for item in said] if isinstance(said, list) else [_message("user", said)] if said else []
    instructions = _message("system", request.instructions) if request.instructions else b""
    found = Items([*wire.known, *items], instructions, wire.history)
    if not found.raws:
        raise refused("input", "must hold at least one item")
    return found


def _message(role: str, text: str) -> bytes:
    """A piece for what stands outside the list of items, in the form of an item."""
    return msgspec.json.encode({"role": role, "content": text})


def _offered(request: _Request, items: Items) -> bytes | None:
    """All tools, whether they came with the request or with its items, as one list."""
    raw = bytes(request.tools) if given(request.tools) else b"[]"
    if items.offered:
        try:
            raw = b"[" + b",".join([*map(bytes, _list.decode(raw)), *items.offered]) + b"]"
        except UNREADABLE as error:
            raise BadRequest(f"tools: {reason(error)}", param="tools") from None
    return None if raw == b"[]" else raw


def _hints(effort: str | None, verbosity: str | None) -> dict[str, Json]:
    hints: dict[str, Json] = {}
    if effort is not None:
        hints["reasoning_effort"] = _EFFORTS.get(effort, effort)
    if effort == "none":
        hints |= {"enable_thinking": False, "thinking": False}
    if verbosity is not None:
        hints["verbosity"] = verbosity
    return hints


def _max_tokens(request: _Request) -> int | None:
    value = request.max_output_tokens
    if value is not None and value < 1:
        raise refused("max_output_tokens", f"{value} is less than 1")
    return value


def _text(request: _Request) -> _Text:
    if not given(request.text):
        return _Text()
    try:
        return msgspec.json.decode(request.text, type=_Text)
    except UNREADABLE as error:
        raise BadRequest(f"text: {reason(error)}", param="text") from None


def _constraint(
    request: _Request, text: _Text, offered: bytes | None, *, renewed: bool
) -> tuple[Constraint | None, ResponsesTools | None]:
    """What the output is forced into, and the tools that the model is shown."""
    try:
        choice: Json = msgspec.json.decode(request.tool_choice)
    except UNREADABLE as error:
        raise BadRequest(f"tool_choice: {reason(error)}", param="tool_choice") from None
    tools = None if offered is None else ResponsesTools(offered, renewed=renewed)
    forced, shown = _tool_choice(choice, tools, parallel=request.parallel_tool_calls is not False)
    shape = _shape(text)
    if forced is not None and shape is not None:
        raise refused("tool_choice", "a forced tool and text.format cannot both hold; leave one out")
    return forced or shape, shown


def _tool_choice(
    choice: Json, tools: ResponsesTools | None, *, parallel: bool
) -> tuple[Constraint | None, ResponsesTools | None]:
    match choice:
        case None | "auto":
            return None, tools
        case "none":
            return None, None
        case "required":
            return any_tool(_all(tools), parallel=parallel), tools
        case {"type": "function" | "custom", "name": str(name)}:
            return one_tool(_all(tools), flat(choice.get("namespace"), name), "tool_choice"), tools
        case {"type": "tool_search"}:
            return one_tool(_all(tools), "tool_search", "tool_choice"), tools
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(wanted)}:
            names = _allowed(wanted)
            some = [tool for tool in _all(tools) if tool.name in names]
            if mode == "required":
                return any_tool(some, parallel=parallel), tools
            # Only what the model is not shown it will surely not call.
            return None, tools.only(names) if tools is not None and some else None
        case {"type": str(kind)} if kind not in ("function", "custom", "allowed_tools"):
            raise refused("tool_choice", f"{kind!r} is run by the provider, and this gateway runs no tools")
        case _:
            raise refused(
                "tool_choice",
                "must be 'none', 'auto', 'required', {'type': 'function', 'name': …}, {'type': 'custom', 'name': …} "
                "or {'type': 'allowed_tools', 'mode': …, 'tools': […]}",
            )


def _allowed(wanted: list[Json]) -> set[str]:
    names: set[str] = set()
    for n, tool in enumerate(wanted):
        match tool:
            case {"type": "function" | "custom", "name": str(name)}:
                names.add(flat(tool.get("namespace"), name))
            case {"type": "tool_search"}:
                names.add("tool_search")
            case {"type": str(kind)} if left_out(kind):
                pass
            case _:
                raise refused(f"tool_choice.tools[{n}]", "must be {'type': 'function', 'name': …} or a custom tool")
    return names


def _all(tools: ResponsesTools | None) -> tuple[Tool, ...]:
    found = () if tools is None else tools.decode()
    if not found:
        raise refused("tool_choice", "forces a tool, but there are no tools")
    return found


def _shape(text: _Text) -> Constraint | None:
    form = text.format or _Format()
    if form.type == "text":
        return None
    if form.type == "json_object":
        return Constraint("json_object")
    if form.schema is None:
        raise refused("text.format.schema", "is missing")
    return Constraint("json_schema", shallow(form.schema, "text.format.schema"))


def _echo(request: _Request, reasoning: _Reasoning) -> bytes:
    """The request as the response repeats it; where it did otherwise than it was asked, what it did. Spelled as JSON, without its
    braces: calls that share a frame share this too."""

    def as_sent(raw: msgspec.Raw, default: Json) -> Json:
        return orjson.Fragment(one_line(bytes(raw).decode())) if given(raw) else default

    echo = {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": as_sent(request.metadata, {}),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "temperature": request.temperature,
        "text": as_sent(request.text, {"format": {"type": "text"}}),
        "tool_choice": as_sent(request.tool_choice, "auto"),
        "tools": as_sent(request.tools, []),
        "top_logprobs": 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "user": None,
    }
    return orjson.dumps(echo)[1:-1]
