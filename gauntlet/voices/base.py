"""What a voice does: a conversation to a request, and a reply, whole or streamed, back to what was said."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]


class Broken(Exception):
    """The reply is an error, or not whole. `status` is 0 where it came in a stream that had begun."""

    def __init__(self, message: str, status: int = 0) -> None:
        self.status = status
        super().__init__(message)


@dataclass
class Called:
    """A tool call, as the gateway told it. Arguments are JSON text here, whatever the dialect makes of them."""

    id: str
    name: str
    arguments: str
    opaque: Json = field(default_factory=dict)  # what the dialect adds and wants back


@dataclass
class Said:
    """One message of a conversation."""

    role: Literal["user", "assistant", "tool"]
    text: str = ""
    reasoning: str = ""
    calls: list[Called] = field(default_factory=list)
    answers: Called | None = None  # a tool's result: to which call
    opaque: Json = field(default_factory=dict)


@dataclass
class Conversation:
    system: str
    tools: tuple[Json, ...]
    said: list[Said]


@dataclass(frozen=True)
class Request:
    path: str
    body: Json
    headers: dict[str, str]


@dataclass(frozen=True)
class Event:
    name: str
    data: Json


class Voice(ABC):
    name: str

    @abstractmethod
    def request(self, conversation: Conversation, *, model: str, key: str, stream: bool) -> Request: ...

    @abstractmethod
    def whole(self, reply: Json) -> Said:
        """A reply that was not streamed."""

    @abstractmethod
    def streamed(self, events: Sequence[Event]) -> Said:
        """A reply that was. Raises `Broken` if its end is missing or it tells of an error."""

    def ended(self, event: Event) -> bool:
        """Nothing that matters comes after this event."""
        return False


TOOLS: tuple[Json, ...] = (
    {
        "name": "bash",
        "description": "Run a command in a shell.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string"},
                "timeout": {"type": "integer"},
                "env": {"type": "object"},
            },
            "required": ["command"],
        },
    },
    {
        "name": "read_file",
        "description": "Read lines of a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "lines": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["path"],
        },
    },
    {
        "name": "delegate",
        "description": "Have a helper do something.",
        "parameters": {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]},
    },
)
MAX_TOKENS = 4096


def further_tool(n: int) -> Json:
    """A tool with as much description as those of real agents have: some 600 bytes."""
    words = f"Tool number {n} of those that an agent has for the rare case. It takes a path and a limit, and says what came of it. "
    path = {"type": "string", "description": "What it is about: a path relative to the root of the repository."}
    limit = {"type": "integer", "description": "At most this many lines, from the first one on.", "minimum": 1}
    parameters = {"type": "object", "properties": {"path": path, "limit": limit}, "required": ["path"]}
    return {"name": f"further_{n}", "description": words * 2, "parameters": parameters}
