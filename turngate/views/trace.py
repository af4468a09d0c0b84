"""Read a trace's JSON view (`GET /admin/sessions/{id}/trace`) back, call by call: the prompt of each in ids and in messages.

For formats with a record per model call, in the gateway and in trainers alike. `trace/sample.py` decides what may be trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from turngate.dialects import decode_stored_messages
from turngate.dialects.chat import message_to_wire
from turngate.errors import BadRequest
from turngate.trace.roles import TurnRole
from turngate.trace.sample import TrainingPolicy, untrainable_reason
from turngate.trace.tree import Context, ContextInfo, Sampled, SampledInfo
from turngate.types import ID_DTYPE, LOGPROB_DTYPE, Json, Message

_CHAT = "chat"


class ContextView(msgspec.Struct, frozen=True):
    """A context node: the messages that were added, and their ids."""

    id: int
    parent: int | None
    ids: list[int]
    messages: list[Json]  # in the OpenAI format
    tools: list[Json]  # as the agent sent them, in its dialect
    dialect: str
    cause: str | None
    told: Mapping[str, str]


class TurnView(msgspec.Struct, frozen=True):
    """One model call. `untrained` is the reason why it may not be trained; empty if it may."""

    id: int
    parent: int  # its context
    root: int  # the first context of its conversation
    ids: list[int]
    logprobs: list[float] | None  # None unless there is one for each id
    message: Json  # in the OpenAI format
    role: TurnRole
    untrained: str
    finish: str
    version_start: int
    version_end: int
    started: float
    ended: float
    sampling: Json
    biases: list[str]
    cause: str | None
    capture: str
    fault: str
    delivered: bool


class TraceView:
    """The tree of one session, by context and turn."""

    def __init__(self, view: Mapping[str, Any]) -> None:
        self.session: str = view["session"]
        self.status: str = view["status"]
        self.stop: str = view["stop"]
        self.config: Mapping[str, Json] = view["config"]
        self.contexts: dict[int, ContextView] = {}
        self.turns: list[TurnView] = []  # oldest first
        self._turns: dict[int, TurnView] = {}
        policy = msgspec.convert(self.config.get("policy", {}), TrainingPolicy)
        for node in view["nodes"]:
            if node["kind"] == "context":
                self.contexts[node["id"]] = _context(node, view["preambles"])
            else:
                root = self._root(node["parent"])
                turn = _turn(node, root, policy)
                self._turns[turn.id] = turn
                self.turns.append(turn)

    def _root(self, context: int) -> int:
        parent = self.contexts[context].parent
        return context if parent is None else self._turns[parent].root

    def path(self, turn: TurnView) -> list[ContextView | TurnView]:
        """The nodes from the root to `turn`."""
        found: list[ContextView | TurnView] = [turn]
        while True:
            context = self.contexts[found[-1].parent]  # type: ignore[index]  # a turn always has one
            found.append(context)
            if context.parent is None:
                return found[::-1]
            found.append(self._turns[context.parent])

    def prompt(self, turn: TurnView) -> list[int]:
        """The ids that were sent to the engine."""
        ids: list[int] = []
        for node in self.path(turn)[:-1]:
            ids += node.ids
        return ids

    def messages(self, turn: TurnView) -> list[Json]:
        """The conversation that a turn answers, in the OpenAI format."""
        found: list[Json] = []
        for node in self.path(turn)[:-1]:
            found += [node.message] if isinstance(node, TurnView) else node.messages
        return found

    def tools(self, turn: TurnView) -> list[Json]:
        return self.contexts[turn.parent].tools


def parse_trace(view: Mapping[str, Any]) -> TraceView:
    """Parse the trace that the admin API sends."""
    missing = [name for name in ("session", "status", "stop", "config", "preambles", "nodes") if name not in view]
    if missing:
        raise BadRequest(f"trace: {', '.join(missing)}: missing; give what GET /admin/sessions/ID/trace answers")
    return TraceView(view)


def training_role(role: TurnRole) -> Literal["agent", "auxiliary", "discarded"]:
    """Map the role of a turn to the three roles of compatible formats."""
    if role in ("main", "subagent"):
        return "agent"
    return "auxiliary" if role == "side" else "discarded"


def _context(node: Mapping[str, Any], preambles: Mapping[str, Any]) -> ContextView:
    messages = node["messages"]
    if node["dialect"] != _CHAT:
        messages = [message_to_wire(m) for m in decode_stored_messages(node["dialect"], msgspec.json.encode(messages))]
    tools = preambles.get(node["preamble"], {}).get("tools") or []
    return ContextView(
        node["id"], node["parent"], node["ids"], messages, tools, node["dialect"], node["cause"], node["told"]
    )


def _turn(node: Mapping[str, Any], root: int, policy: TrainingPolicy) -> TurnView:
    reason = untrainable_reason(_to_sampled(node), node["role"], policy)
    logprobs = node["logprobs"]
    if logprobs is not None and (len(logprobs) != len(node["ids"]) or not all(map(_is_logprob, logprobs))):
        logprobs = None
        reason = reason or "log-probabilities that are none"
    message = msgspec.convert(node["message"], Message)
    return TurnView(
        id=node["id"],
        parent=node["parent"],
        root=root,
        ids=node["ids"],
        logprobs=logprobs,
        message=message_to_wire(message),
        role=node["role"],
        untrained=reason,
        finish=node["finish"],
        version_start=node["version_start"],
        version_end=node["version_end"],
        started=node["started"],
        ended=node["ended"],
        sampling=node["sampling"],
        biases=node["biases"],
        cause=node["cause"],
        capture=node["capture"],
        fault=node["fault"],
        delivered=node["delivered"],
    )


def _is_logprob(value: float | None) -> bool:
    """Whether a value is a log-probability: a finite number of at most 0."""
    return value is not None and math.isfinite(value) and value <= 0


def _to_sampled(node: Mapping[str, Any]) -> Sampled:
    """Rebuild as much of the node as `untrainable` reads."""
    context = Context(node["parent"], None, np.empty(0, ID_DTYPE), ContextInfo(b"", b"", "", False))
    given = node["logprobs"]
    logprobs = None if given is None else np.array([np.nan if v is None else v for v in given], LOGPROB_DTYPE)
    info = SampledInfo(
        b"",
        b"",
        b"",
        node["finish"],
        node["version_start"],
        node["version_end"],
        node["started"],
        node["ended"],
        biases=tuple(node["biases"]),
        capture=node["capture"],
        fault=node["fault"],
    )
    return Sampled(node["id"], context, np.array(node["ids"], ID_DTYPE), logprobs, info)
