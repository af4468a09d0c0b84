"""The interface of a client: build a request from a conversation, and read the reply, streamed or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]


class ReplyError(Exception):
    """The reply is an error or incomplete. `status` is 0 if the stream had already started."""

    def __init__(self, message: str, status: int = 0) -> None:
        self.status = status
        super().__init__(message)


@dataclass
class ReceivedCall:
    """A tool call as received from the gateway. Its arguments are JSON text in every dialect."""

    id: str
    name: str
    arguments: str
    opaque: Json = field(default_factory=dict)  # fields that the dialect adds and expects back


@dataclass
class Message:
    """One message of a conversation."""

    role: Literal["user", "assistant", "tool"]
    text: str = ""
    reasoning: str = ""
    calls: list[ReceivedCall] = field(default_factory=list)
    answers: ReceivedCall | None = None  # for a tool result: the call that it answers
    opaque: Json = field(default_factory=dict)


@dataclass
class Conversation:
    system: str
    tools: tuple[Json, ...]
    messages: list[Message]


@dataclass(frozen=True)
class Request:
    path: str
    body: Json
    headers: dict[str, str]


@dataclass(frozen=True)
class Event:
    name: str
    data: Json


class Client(ABC):
    name: str

    @abstractmethod
    def build_request(
        self, conversation: Conversation, *, model: str, key: str, stream: bool, temperature: float = 1.0
    ) -> Request: ...

    @abstractmethod
    def read_reply(self, reply: Json) -> Message:
        """Read a reply that was not streamed."""

    @abstractmethod
    def read_events(self, events: Sequence[Event]) -> Message:
        """Read a streamed reply. Raise `ReplyError` if its end is missing or it contains an error."""

    def is_last_event(self, event: Event) -> bool:
        """Return whether no relevant event follows this one."""
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


def extra_tool(n: int) -> Json:
    """Build a tool whose description is as long as those of real agents: about 600 bytes."""
    words = f"Tool number {n} of those that an agent has for the rare case. It takes a path and a limit, and says what came of it. "
    path = {"type": "string", "description": "What it is about: a path relative to the root of the repository."}
    limit = {"type": "integer", "description": "At most this many lines, from the first one on.", "minimum": 1}
    parameters = {"type": "object", "properties": {"path": path, "limit": limit}, "required": ["path"]}
    return {"name": f"further_{n}", "description": words * 2, "parameters": parameters}
