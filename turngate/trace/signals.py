"""What an agent's program tells of a call by itself: headers and fields that name its conversation, or the model for small jobs.

Which ones those are is the agent's affair (`agents/catalog/*.toml`); a session carries them in its settings. Read once per call by
the server; `roles` and `fork` listen to it before they look at the structure of the tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import msgspec

from turngate.types import Json, Told

Source = Annotated[str, msgspec.Meta(pattern=r"^(header|body):.+$")]
ToldRole = Literal["main", "subagent", "side"]
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LONGEST = 200  # of a name that is kept


class Signals(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where to look. A source is `header:NAME` or `body:a.b.c`; a string that holds JSON is looked into. The first that is there counts."""

    thread: tuple[Source, ...] = ()  # names the conversation
    parent: tuple[Source, ...] = ()  # names the conversation that began it
    kind: tuple[Source, ...] = ()  # what the call is for
    side: tuple[str, ...] = ()  # patterns of kinds that are side calls …
    subagent: tuple[str, ...] = ()  # … and that are sub-agents
    models: dict[str, ToldRole] = {}  # patterns of model names, and the role of calls to them

    def __bool__(self) -> bool:
        return bool(self.thread or self.parent or self.kind or self.models)


def read(signals: Signals, headers: Mapping[str, str], body: bytes, model: str) -> Told:
    def first(sources: tuple[str, ...]) -> str:
        return next((value for source in sources if (value := _value(source, headers, body))), "")[:_LONGEST]

    return Told(first(signals.thread), first(signals.parent), _role(signals, first(signals.kind), model))


def alias(signals: Signals, model: str) -> bool:
    """Whether the session knows this name as another one for its model."""
    return any(fnmatchcase(model, pattern) for pattern in signals.models)


def _role(signals: Signals, kind: str, model: str) -> Literal["", "main", "subagent", "side"]:
    if kind and any(fnmatchcase(kind, pattern) for pattern in signals.side):
        return "side"
    if kind and any(fnmatchcase(kind, pattern) for pattern in signals.subagent):
        return "subagent"
    return next((role for pattern, role in signals.models.items() if fnmatchcase(model, pattern)), "")


def _value(source: str, headers: Mapping[str, str], body: bytes) -> str:
    kind, _, name = source.partition(":")
    if kind == "header":
        return headers.get(name.lower(), "")
    first, *rest = name.split(".")
    try:
        raw = _fields.decode(body).get(first)
        value: Json = None if raw is None else msgspec.json.decode(raw)
        for key in rest:
            value = msgspec.json.decode(value) if isinstance(value, str) else value
            value = value.get(key) if isinstance(value, dict) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""  # what an agent says of itself is a hint; one that cannot be read is none
    return value if isinstance(value, str) else "" if value is None else str(value)
