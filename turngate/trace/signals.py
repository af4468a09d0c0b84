"""What an agent says about its own calls: which conversation a call belongs to, and what it is for.

Each agent's description (`agents/catalog/*.toml`) says where to look, and a session has it in its settings. Roles and fork causes follow
these signals before the structure of the trace. A source is one of

    header:NAME            a header's value
    header:NAME.PATH       a value inside a header that holds JSON
    body:PATH              a value of the request's body; PATH has dots, and goes into strings that hold JSON
    tool:NAME              NAME, where the request offers a tool of that name
    model                  the model's name
    system                 the system prompt, where the conversation begins with one
    last                   the last message, if it is the user's: not a tool's output, which the model could have arranged
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from turngate.types import Call, CallSignals, Json

_SOURCE = re.compile(r"header:[A-Za-z0-9-]+(\.[\w-]+)*|body:[\w-]+(\.[\w-]+)*|tool:[\w.-]+|model|system|last")
SignalRole = Literal["main", "subagent", "side"]
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MAX_LENGTH = 200  # characters of a stored name


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call has `role` if the value of `source` matches `match`."""

    role: SignalRole
    source: str
    match: str = "*"  # as in file names: * and ?
    why: str = ""  # shown beside the role: title, summary, sub-agent


class Signals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where to look. The first source with a value wins, and so does the first rule that matches."""

    thread: tuple[str, ...] = ()  # names the conversation
    parent: tuple[str, ...] = ()  # names the conversation that began it
    rules: tuple[Rule, ...] = ()
    models: dict[str, SignalRole] = {}  # patterns of model names, and the role of calls to them

    def __bool__(self) -> bool:
        return bool(self.thread or self.parent or self.rules or self.models)


def read_signals(signals: Signals, headers: Mapping[str, str], call: Call) -> CallSignals:
    """Read the signals of a call. A rule beats the model's name."""

    def first(sources: Iterable[str]) -> str:
        return next((value for source in sources if (value := _read_source(source, headers, call))), "")[:_MAX_LENGTH]

    thread, parent = first(signals.thread), first(signals.parent)
    for rule in signals.rules:
        value = _read_source(rule.source, headers, call)
        if value and fnmatchcase(value, rule.match):
            return CallSignals(thread, parent, rule.role, rule.why)
    role = next((role for pattern, role in signals.models.items() if fnmatchcase(call.model, pattern)), None)
    return (
        CallSignals(thread, parent)
        if role is None
        else CallSignals(thread, parent, role, f"model {call.model}"[:_MAX_LENGTH])
    )


def find_faults(signals: Signals) -> Iterator[tuple[str, str]]:
    """Find invalid fields, each with what is wrong with it."""
    sources = [(f"thread[{n}]", source) for n, source in enumerate(signals.thread)]
    sources += [(f"parent[{n}]", source) for n, source in enumerate(signals.parent)]
    sources += [(f"rules[{n}].source", rule.source) for n, rule in enumerate(signals.rules)]
    for field, source in sources:
        if not _SOURCE.fullmatch(source):
            yield (
                f"signals.{field}",
                f"{source!r} is not a source; there are header:NAME, body:PATH, tool:NAME, model, system, last",
            )


def is_model_alias(signals: Signals, model: str) -> bool:
    """Whether the session accepts this name as another one for its model."""
    return any(fnmatchcase(model, pattern) for pattern in signals.models)


def _read_source(source: str, headers: Mapping[str, str], call: Call) -> str:
    kind, _, rest = source.partition(":")
    match kind:
        case "header":
            name, *path = rest.split(".")
            held = headers.get(name.lower(), "")
            return _to_text(_look_up(held, path)) if path else held
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
    # Decode only if the name is in the text.
    return (
        call.tools is not None
        and f'"{name}"'.encode() in call.tools.raw
        and any(tool.name == name for tool in call.tools.decode())
    )


def _message_text(call: Call, index: int, role: str) -> str:
    messages = call.history.decode(index) if call.history.raws else ()
    return "\n".join(message.content for message in messages if message.role == role)


def _body_field(body: bytes, name: str) -> Json:
    # Signals are hints: one that cannot be decoded is ignored.
    try:
        raw = _fields.decode(body).get(name)
        return None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _look_up(holder: Json, path: list[str]) -> Json:
    for part in path:
        if isinstance(holder, str):
            try:
                holder = msgspec.json.decode(holder)
            except (msgspec.DecodeError, RecursionError):
                return None
        holder = holder.get(part) if isinstance(holder, dict) else None
    return holder


def _to_text(found: Json) -> str:
    if found is None or isinstance(found, dict | list):
        return ""
    return found if isinstance(found, str) else msgspec.json.encode(found).decode()
