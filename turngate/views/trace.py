"""Parse the JSON of a trace (`GET /admin/sessions/{id}/trace`) into model calls, each with its prompt as ids and as messages.

This is for formats and views with one record per model call. `trace/sample.py` decides which turns may be trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from turngate.client.protocol import DecodedTrace, SessionTrace, TraceContext, TraceTurn
from turngate.common.validation import explain_error
from turngate.dialects import decode_stored_messages
from turngate.dialects.chat import message_to_wire
from turngate.errors import BadRequest
from turngate.trace.roles import OWN_ROLES, TurnRole
from turngate.trace.sample import TrainingPolicy, find_exclusion, untrainable_reason
from turngate.trace.tree import Context, ContextInfo, Sampled, SampledInfo, SideRange
from turngate.types import LOGPROB_TOLERANCE, NO_IDS, Capture, Finish, Json, decode_array

_CHAT = "chat"
_decoder = msgspec.json.Decoder(DecodedTrace, dec_hook=decode_array)


class ContextView(msgspec.Struct, frozen=True):
    """A context node: the messages that it adds, and their ids."""

    id: int
    parent: int | None
    ids: list[int]
    messages: list[Json]  # in OpenAI's format
    tools: list[Json]  # as the agent sent them, in its dialect
    dialect: str
    cause: str | None
    signals: Mapping[str, str]

    @property
    def told(self) -> Mapping[str, str]:
        """Deprecated: use `signals` instead. This name will be removed in 0.2.0."""
        return self.signals


class TurnView(msgspec.Struct, frozen=True):
    """One model call. `untrained` is the reason why the call may not be trained, or an empty string if it may."""

    id: int
    parent: int  # id of its context
    root: int  # id of the first context of its conversation
    ids: list[int]
    logprobs: list[float] | None  # None unless every id has one
    message: Json  # in OpenAI's format
    role: TurnRole
    evidence: str  # the evidence that decided its role
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
    """The tree of one session, as contexts and turns."""

    def __init__(self, trace: DecodedTrace) -> None:
        self.session = trace.session
        self.status = trace.status
        self.stop = trace.stop
        self.config = trace.config
        self.vocabulary = trace.vocabulary
        self.contexts: dict[int, ContextView] = {}
        self.turns: list[TurnView] = []  # oldest first
        self._turns: dict[int, TurnView] = {}
        policy = msgspec.convert(self.config.policy, TrainingPolicy)
        excluded = find_exclusion(trace.refused, policy)
        tools = {key: msgspec.json.decode(preamble.tools) or [] for key, preamble in trace.preambles.items()}
        for node in trace.nodes:
            if isinstance(node, TraceContext):
                self.contexts[node.id] = _view_context(node, tools.get(node.preamble, []))
            else:
                turn = _view_turn(node, self._root(node.parent), policy, excluded)
                self._turns[turn.id] = turn
                self.turns.append(turn)

    def _root(self, context: int) -> int:
        parent = self.contexts[context].parent
        return context if parent is None else self._turns[parent].root

    def path(self, turn: TurnView) -> list[ContextView | TurnView]:
        """Return the nodes from the root to `turn`."""
        nodes: list[ContextView | TurnView] = [turn]
        while True:
            context = self.contexts[nodes[-1].parent]  # type: ignore[index]  # a turn always has a parent
            nodes.append(context)
            if context.parent is None:
                return nodes[::-1]
            nodes.append(self._turns[context.parent])

    def prompt(self, turn: TurnView) -> list[int]:
        """Return the ids that were sent to the engine for a turn."""
        ids: list[int] = []
        for node in self.path(turn)[:-1]:
            ids += node.ids
        return ids

    def messages(self, turn: TurnView) -> list[Json]:
        """Return the messages that a turn answers, from the root on, in OpenAI's format."""
        messages: list[Json] = []
        for node in self.path(turn)[:-1]:
            messages += [node.message] if isinstance(node, TurnView) else node.messages
        return messages

    def tools(self, turn: TurnView) -> list[Json]:
        return self.contexts[turn.parent].tools


def parse_trace(trace: DecodedTrace | Mapping[str, Any], /) -> TraceView:
    """Parse a trace, given as a struct or as the JSON object that the admin API returns."""
    return TraceView(trace if isinstance(trace, SessionTrace) else decode_trace(msgspec.json.encode(trace)))


def decode_trace(encoded: bytes) -> DecodedTrace:
    """Decode the JSON of a trace. Raise `BadRequest` if it is not a valid trace."""
    try:
        return _decoder.decode(encoded)
    except msgspec.ValidationError as error:
        problem, _ = explain_error(error, DecodedTrace)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = f"it is not valid JSON: {error}"
    except RecursionError:
        problem = "a value is nested too deeply"
    raise BadRequest(
        f"invalid trace: {problem}; pass the complete reply of GET /admin/sessions/ID/trace", param="trace"
    )


def training_role(role: TurnRole) -> Literal["agent", "auxiliary", "discarded"]:
    """Return the role in OpenEnv's format that corresponds to a turn's role."""
    if role in OWN_ROLES:
        return "agent"
    return "auxiliary" if role in ("side", "summary") else "discarded"


def _view_context(node: TraceContext, tools: list[Json]) -> ContextView:
    messages: list[Json] = (
        msgspec.json.decode(node.messages)
        if node.dialect == _CHAT
        else [message_to_wire(message) for message in decode_stored_messages(node.dialect, bytes(node.messages))]
    )
    return ContextView(node.id, node.parent, node.ids.tolist(), messages, tools, node.dialect, node.cause, node.signals)


def _view_turn(turn: TraceTurn, root: int, policy: TrainingPolicy, excluded: str) -> TurnView:
    role = cast(TurnRole, turn.role)
    reason = untrainable_reason(_to_sampled(turn), role, policy, masked=False) or excluded
    logprobs: list[float] | None = None if turn.logprobs is None else turn.logprobs.tolist()
    if logprobs is not None and (len(logprobs) != len(turn.ids) or not all(map(_is_logprob, logprobs))):
        logprobs = None
        reason = reason or "invalid log-probabilities"
    return TurnView(
        id=turn.id,
        parent=turn.parent,
        root=root,
        ids=turn.ids.tolist(),
        logprobs=logprobs,
        message=message_to_wire(turn.decode_message()),
        role=role,
        evidence=turn.evidence,
        untrained=reason,
        finish=turn.finish,
        version_start=turn.version_start,
        version_end=turn.version_end,
        started=turn.started,
        ended=turn.ended,
        sampling=msgspec.json.decode(turn.sampling),
        biases=list(turn.biases),
        cause=turn.cause,
        capture=turn.capture,
        fault=turn.fault,
        delivered=turn.delivered,
    )


def _is_logprob(value: float) -> bool:
    """Return whether a value is a valid log-probability: finite and at most 0, with a small tolerance for rounding errors."""
    return math.isfinite(value) and value <= LOGPROB_TOLERANCE


def _to_sampled(turn: TraceTurn) -> Sampled:
    """Build a sampled node with the fields that `untrainable_reason` reads."""
    context = Context(turn.parent, None, NO_IDS, ContextInfo(b"", b"", "", False))
    info = SampledInfo(
        b"",
        b"",
        b"",
        cast(Finish, turn.finish),
        turn.version_start,
        turn.version_end,
        turn.started,
        turn.ended,
        biases=turn.biases,
        capture=cast(Capture, turn.capture),
        fault=turn.fault,
        side=() if turn.side is msgspec.UNSET else tuple(SideRange(*msgspec.structs.astuple(s)) for s in turn.side),
    )
    return Sampled(turn.id, context, turn.ids, turn.logprobs, info)
