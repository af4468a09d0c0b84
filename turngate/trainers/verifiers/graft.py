"""Convert recorded turns to a verifiers trace: a message graph with ids, masks and log-probabilities.

verifiers trains every root-to-leaf branch of the graph according to the masks of its nodes, so a turn shared by two branches would be
trained twice. Therefore each branch gets its own nodes, and a turn is trained only in the first branch that contains it. If any turn is
trained, the branches equal the rows of `trace/sample.py`, token for token. An untrained turn becomes context, without log-probabilities.
Each node is one message. As in verifiers, the node of an answer also contains the tokens of the new messages before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import verifiers.v1 as vf

from turngate.types import Json
from turngate.views.trace import TraceView

_FINISH = ("stop", "length", "tool_calls")


class GraftTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A model call, with the messages and tokens it adds to the conversation."""

    id: int
    parent: int | None  # the turn that this one continues
    first: bool  # made by the main agent, so its branch comes before those of sub-agents and side calls
    messages: Sequence[Json]  # new since the parent, in OpenAI's format
    tools: Sequence[Json]
    context: Sequence[int]  # ids of the new messages
    ids: Sequence[int]
    logprobs: Sequence[float] | None
    untrained: str  # why the turn is not trained; empty if it is
    message: Json
    finish: str
    model: str
    sampling: Mapping[str, Json] = {}
    started: float = 0.0
    ended: float = 0.0
    fault: str = ""


def turns_from_view(view: TraceView) -> list[GraftTurn]:
    """Convert a gateway's trace to turns."""
    turns = []
    for turn in view.turns:
        context = view.contexts[turn.parent]
        turns.append(
            GraftTurn(
                id=turn.id,
                parent=context.parent,
                first=turn.role == "main",
                messages=context.messages,
                tools=context.tools,
                context=context.ids,
                ids=turn.ids,
                logprobs=turn.logprobs,
                untrained=turn.untrained,
                message=turn.message,
                finish=turn.finish,
                model=view.config.model,
                sampling=turn.sampling or {},
                started=turn.started,
                ended=turn.ended,
                fault=turn.fault,
            )
        )
    return turns


def graft(trace: vf.Trace, turns: Sequence[GraftTurn]) -> None:
    """Add the turns to an empty trace. If the conversion fails, the trace is unchanged."""
    if trace.nodes:
        raise ValueError(f"trace {trace.id} already has a message graph; pass a trace without nodes")
    by_id = {turn.id: turn for turn in turns}
    nodes: list[vf.MessageNode] = []
    places: dict[int, int] = {}  # index of each turn's node
    for chain in _chains(turns, by_id):
        _append_chain(chain, nodes, places)
    calls = [_build_call(turn, places.get(turn.id), _prompt_size(turn, by_id)) for turn in turns]
    trace.nodes, trace.calls = nodes, calls
    trace.tools = list({tool.name: tool for node in nodes for tool in node.tools}.values())
    trace.notify()


def _chains(turns: Sequence[GraftTurn], by_id: Mapping[int, GraftTurn]) -> list[list[GraftTurn]]:
    """Return the branches that add at least one trained turn. If there are none, return all branches, so that the trace is not empty."""
    parents = {turn.parent for turn in turns}
    leaves = [turn for turn in turns if turn.id not in parents]
    chains = [_path(leaf, by_id) for leaf in leaves]
    chains.sort(key=lambda chain: (not chain[-1].first, -_size(chain), chain[-1].id))
    claimed: set[int] = set()
    trained = []
    for chain in chains:
        new = {turn.id for turn in chain} - claimed
        claimed |= new
        if any(not turn.untrained and turn.ids for turn in chain if turn.id in new):
            trained.append(chain)
    return trained or chains


def _path(leaf: GraftTurn, by_id: Mapping[int, GraftTurn]) -> list[GraftTurn]:
    found = [leaf]
    while found[-1].parent is not None:
        found.append(by_id[found[-1].parent])
    return found[::-1]


def _size(chain: Sequence[GraftTurn]) -> int:
    return sum(len(turn.context) + len(turn.ids) for turn in chain)


def _prompt_size(turn: GraftTurn, by_id: Mapping[int, GraftTurn]) -> int:
    return _size(_path(turn, by_id)) - len(turn.ids)


def _append_chain(chain: Sequence[GraftTurn], nodes: list[vf.MessageNode], places: dict[int, int]) -> None:
    parent: int | None = None
    for turn in chain:
        for wire in turn.messages:
            tools = _tools(turn.tools) if parent is None else []
            nodes.append(
                vf.MessageNode(parent=parent, message=to_vf_message(wire), tools=tools, timestamp=turn.started)
            )
            parent = len(nodes) - 1
        own = turn.id not in places  # otherwise an earlier branch contains it
        trained = own and not turn.untrained and turn.logprobs is not None
        nodes.append(
            vf.MessageNode(
                parent=parent,
                message=to_vf_message(turn.message),
                sampled=own
                and (bool(turn.ids) or turn.finish != "abort"),  # not a call aborted before it sampled anything
                timestamp=turn.ended,
                token_ids=[*turn.context, *turn.ids],
                mask=[False] * len(turn.context) + [trained] * len(turn.ids),
                logprobs=list(turn.logprobs or ()) if trained else [],
            )
        )
        parent = len(nodes) - 1
        if own:
            places[turn.id] = parent


def _build_call(turn: GraftTurn, node: int | None, prompt: int) -> vf.ModelCall:
    return vf.ModelCall(
        node=node,
        model=turn.model or None,
        sampling=vf.Sampling(**turn.sampling),
        endpoint="/chat/completions",
        finish_reason=turn.finish if turn.finish in _FINISH else None,
        usage=vf.Usage(prompt_tokens=prompt, completion_tokens=len(turn.ids)),
        time=vf.TimeSpan(start=turn.started, end=turn.ended),
        error=vf.Error(type="EngineError", message=turn.fault) if turn.fault else None,
    )


def to_vf_message(wire: Mapping[str, Any]) -> vf.Message:
    """Convert a message from OpenAI's format to a verifiers message."""
    content = wire.get("content")
    match wire["role"]:
        case "assistant":
            calls = [
                vf.ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
                for call in wire.get("tool_calls") or ()
            ]
            return vf.AssistantMessage(
                content=_text(content) or None,
                reasoning_content=wire.get("reasoning_content") or wire.get("reasoning") or None,
                tool_calls=calls or None,
            )
        case "tool":
            return vf.ToolMessage(
                tool_call_id=wire.get("tool_call_id") or "", content=_text(content), name=wire.get("name")
            )
        case "user":
            return vf.UserMessage(content=_text(content))
        case _:  # system, developer
            return vf.SystemMessage(content=_text(content))


def _text(content: Json) -> str:
    """Return the content of a message as text. Parts that are not text are dropped: training uses the token ids, not this text."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" if isinstance(part, dict) else str(part) for part in content)
    return content or ""


def _tools(wire: Sequence[Json]) -> list[vf.Tool]:
    """Convert tools in any dialect's format to verifiers tools."""
    declared = [one for tool in wire for one in tool.get("functionDeclarations") or [tool]]
    functions = [tool.get("function") or tool for tool in declared]
    return [
        vf.Tool(
            name=function["name"],
            description=function.get("description") or "",
            parameters=function.get("parameters") or function.get("input_schema") or {},
        )
        for function in functions
        if function.get("name")
    ]
