"""What an agent's requests tell about the conversation they belong to: its thread, its parent, and what the call is for.

An agent's description names the places to look at; `read` looks at one request. No I/O. A source is one of

    header:NAME            a header's value
    header:NAME.PATH       a value inside a header that holds JSON
    body:PATH              a value of the request's body; PATH has dots, and goes into strings that hold JSON
    tool:NAME              NAME, where the request offers a tool of that name
    model                  the model's name
    system                 the system prompt
    last                   the text of the last message
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec

Role = Literal["main", "subagent", "side"]
SOURCE = re.compile(r"header:[A-Za-z0-9-]+(\.[\w-]+)*|body:[\w-]+(\.[\w-]+)*|tool:[\w.-]+|model|system|last")


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call whose `source` has a value that `match` fits plays `role`."""

    role: Role
    source: str
    match: str = "*"  # as in file names: * and ?
    why: str = ""  # shown beside the role: title, compaction, sub-agent


class Signals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an agent tells which conversation a call belongs to. The first source that has a value, and the first rule that fits, win."""

    thread: tuple[str, ...] = ()  # names the conversation
    parent: tuple[str, ...] = ()  # names the conversation that started it
    rules: tuple[Rule, ...] = ()
    models: dict[
        str, Role
    ] = {}  # a model's name, as in file names, and the role of calls to it; {model} is the trained one


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What signals are read from. Header names are in lower case."""

    headers: Mapping[str, str]
    body: Any = None  # the parsed body
    model: str = ""
    tools: Collection[str] = ()
    system: str = ""
    last: str = ""


class Told(msgspec.Struct, frozen=True):
    """What one request told. Empty, or None: nothing."""

    thread: str = ""
    parent: str = ""
    role: Role | None = None
    why: str = ""


def read(signals: Signals, request: Request) -> Told:
    """What this request tells. A rule beats the model's name."""
    thread = next(filter(None, (value(source, request) for source in signals.thread)), "")
    parent = next(filter(None, (value(source, request) for source in signals.parent)), "")
    for rule in signals.rules:
        found = value(rule.source, request)
        if found and fnmatch.fnmatchcase(found, rule.match):
            return Told(thread, parent, rule.role, rule.why)
    for pattern, role in signals.models.items():
        if fnmatch.fnmatchcase(request.model, pattern):
            return Told(thread, parent, role, f"model {request.model}")
    return Told(thread, parent)


def value(source: str, request: Request) -> str:
    """What one source says; empty where it says nothing."""
    kind, _, rest = source.partition(":")
    match kind:
        case "header":
            name, _, path = rest.partition(".")
            held = request.headers.get(name.lower(), "")
            return _text(_inside(held, path.split("."))) if path else held
        case "body":
            return _text(_inside(request.body, rest.split(".")))
        case "tool":
            return rest if rest in request.tools else ""
        case "model":
            return request.model
        case "system":
            return request.system
        case _:
            return request.last


def _inside(holder: Any, path: list[str]) -> Any:
    for part in path:
        if isinstance(holder, str):
            try:
                holder = json.loads(holder)
            except ValueError:
                return None
        if not isinstance(holder, dict):
            return None
        holder = holder.get(part)
    return holder


def _text(found: Any) -> str:
    if found is None or isinstance(found, dict | list):
        return ""
    return found if isinstance(found, str) else json.dumps(found)
