"""Signals in an agent's requests: which conversation a call belongs to, and what it is for.

Each agent's description (`agents/catalog/*.toml`) lists the sources to read, and each session's settings contain a copy of this list. For
roles and fork causes, signals take precedence over the structure of the trace. A source is one of:

    header:NAME            a header's value
    header:NAME.PATH       a value inside a header that contains JSON
    body:PATH              a value in the request body; PATH is dotted and may lead into strings that contain JSON
    tool:NAME              NAME, if the request offers a tool with that name
    model                  the model's name
    system                 the system prompt, if the conversation begins with one
    last                   the last message, if it is from the user; never a tool's output, which the model could control
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from turngate.types import Call, CallSignals, Json

_SOURCE = re.compile(r"header:[A-Za-z0-9-]+(\.[\w-]+)*|body:[\w-]+(\.[\w-]+)*|tool:[\w.-]+|model|system|last")
SignalRole = Literal["main", "subagent", "side", "summary"]
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MAX_LENGTH = 200  # characters; longer values are cut


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule that assigns `role` to a call if the value of `source` matches the pattern `match`."""

    role: SignalRole
    source: str
    match: str = "*"  # a glob pattern, as for file names
    why: str = ""  # shown next to the role, such as title, summary or sub-agent


class Signals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The sources of an agent's signals.

    `thread` and `parent` use the first of their sources that has a value. The first rule that matches sets the role.
    """

    thread: tuple[str, ...] = ()  # sources of the conversation's name
    parent: tuple[str, ...] = ()  # sources of the name of the conversation that started it
    rules: tuple[Rule, ...] = ()
    models: dict[str, SignalRole] = {}  # glob patterns of model names, and the role of calls to them

    def __bool__(self) -> bool:
        return bool(self.thread or self.parent or self.rules or self.models)


def read_signals(signals: Signals, headers: Mapping[str, str], call: Call) -> CallSignals:
    """Read the signals of a call. Rules take precedence over roles by model name."""

    def first(sources: Iterable[str]) -> str:
        return next((value for source in sources if (value := _read_source(source, headers, call))), "")[:_MAX_LENGTH]

    thread, parent = first(signals.thread), first(signals.parent)
    for rule in signals.rules:
        value = _read_source(rule.source, headers, call)
        if value and fnmatchcase(value, rule.match):
            return CallSignals(thread, parent, rule.role, rule.why, rule.source)
    role = next((role for pattern, role in signals.models.items() if fnmatchcase(call.model, pattern)), None)
    return (
        CallSignals(thread, parent)
        if role is None
        else CallSignals(thread, parent, role, f"model {call.model}"[:_MAX_LENGTH], "model")
    )


def find_faults(signals: Signals) -> Iterator[tuple[str, str]]:
    """Yield the name of each invalid field, and what is wrong with it."""
    sources = [(f"thread[{n}]", source) for n, source in enumerate(signals.thread)]
    sources += [(f"parent[{n}]", source) for n, source in enumerate(signals.parent)]
    sources += [(f"rules[{n}].source", rule.source) for n, rule in enumerate(signals.rules)]
    for field, source in sources:
        if not _SOURCE.fullmatch(source):
            yield (
                f"signals.{field}",
                f"unknown source {source!r}; use header:NAME, body:PATH, tool:NAME, model, system or last",
            )


def is_model_alias(signals: Signals, model: str) -> bool:
    """Return whether a session with these signals accepts this name as an alias of its model."""
    return any(fnmatchcase(model, pattern) for pattern in signals.models)


def _read_source(source: str, headers: Mapping[str, str], call: Call) -> str:
    kind, _, rest = source.partition(":")
    match kind:
        case "header":
            name, *path = rest.split(".")
            value = headers.get(name.lower(), "")
            return _to_text(_look_up(value, path)) if path else value
        case "body":
            name, *path = rest.split(".")
            return _to_text(_look_up(_body_field(call.body, name), path))
        case "tool":
            return rest if _offers(call, rest) else ""
        case "model":
            return call.model
        case "system":
            return _message_text(call, 0, "system")
        case _:
            return _message_text(call, len(call.history.raws) - 1, "user")


def _offers(call: Call, name: str) -> bool:
    # Decode only if the raw text contains the name.
    return (
        call.tools is not None
        and f'"{name}"'.encode() in call.tools.raw
        and any(tool.name == name for tool in call.tools.decode())
    )


def _message_text(call: Call, index: int, role: str) -> str:
    messages = call.history.decode(index) if call.history.raws else ()
    return "\n".join(message.content for message in messages if message.role == role)


def _body_field(body: bytes, name: str) -> Json:
    # Signals are hints, so a value that cannot be decoded is ignored.
    try:
        raw = _fields.decode(body).get(name)
        return None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _look_up(value: Json, path: list[str]) -> Json:
    for part in path:
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except (msgspec.DecodeError, RecursionError):
                return None
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _to_text(value: Json) -> str:
    if value is None or isinstance(value, dict | list):
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
