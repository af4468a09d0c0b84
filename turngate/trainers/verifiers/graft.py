"""What the gateway recorded, as a trace of verifiers': its message graph, with ids, masks and log-probabilities.

verifiers trains every root-to-leaf branch of the graph, with all that the masks of its nodes say. A turn that two branches share would
be trained twice. So each branch gets nodes of its own here, and a turn is trained in the first one that has it: the branches of the
trace are then the rows that `trace/sample.py` makes, token for token. A turn that may not be trained is context, without
log-probabilities. A node is a message; the tokens that messages add stand, as in verifiers, before the answer to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import verifiers.v1 as vf

from turngate.types import Json
from turngate.views.trace import TraceView

_FINISH = ("stop", "length", "tool_calls")


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call, and what it added to the conversation before it."""

    id: int
    parent: int | None  # the turn that it goes on from
    first: bool  # of the agent's own work, rather than of a helper's
    messages: Sequence[Json]  # that are new since then, in OpenAI's form
    tools: Sequence[Json]
    context: Sequence[int]  # the ids of those
    ids: Sequence[int]
    logprobs: Sequence[float] | None
    untrained: str  # why it may not be trained; empty if it may
    message: Json
    finish: str
    model: str
    sampling: Mapping[str, Json] = {}
    started: float = 0.0
    ended: float = 0.0
    fault: str = ""


def turns_of(viewed: TraceView) -> list[Turn]:
    """The turns of a trace as the gateway tells it."""
    found = []
    for turn in viewed.turns:
        context = viewed.contexts[turn.parent]
        found.append(
            Turn(
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
                model=str(viewed.config.get("model", "")),
                sampling=turn.sampling or {},
                started=turn.started,
                ended=turn.ended,
                fault=turn.fault,
            )
        )
    return found


def graft(trace: vf.Trace, turns: Sequence[Turn]) -> None:
    """Put the turns into a trace that has none yet. Whole or not at all: it is built first, and then put in."""
    if trace.nodes:
        raise ValueError(f"trace {trace.id} has a message graph already")
    by_id = {turn.id: turn for turn in turns}
    nodes: list[vf.MessageNode] = []
    places: dict[int, int] = {}  # of each turn, the node that it is
    for chain in _chains(turns, by_id):
        _lay(chain, nodes, places)
    calls = [_call(turn, places.get(turn.id), _prompt_size(turn, by_id)) for turn in turns]
    trace.nodes, trace.calls = nodes, calls
    trace.tools = list({tool.name: tool for node in nodes for tool in node.tools}.values())
    trace.notify()


def _chains(turns: Sequence[Turn], by_id: Mapping[int, Turn]) -> list[list[Turn]]:
    """The branches with something to train; all of them where there is nothing, so that what was said can be read."""
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


def _path(leaf: Turn, by_id: Mapping[int, Turn]) -> list[Turn]:
    found = [leaf]
    while found[-1].parent is not None:
        found.append(by_id[found[-1].parent])
    return found[::-1]


def _size(chain: Sequence[Turn]) -> int:
    return sum(len(turn.context) + len(turn.ids) for turn in chain)


def _prompt_size(turn: Turn, by_id: Mapping[int, Turn]) -> int:
    return _size(_path(turn, by_id)) - len(turn.ids)


def _lay(chain: Sequence[Turn], nodes: list[vf.MessageNode], places: dict[int, int]) -> None:
    parent: int | None = None
    for turn in chain:
        for wire in turn.messages:
            tools = _tools(turn.tools) if parent is None else []
            nodes.append(vf.MessageNode(parent=parent, message=message(wire), tools=tools, timestamp=turn.started))
            parent = len(nodes) - 1
        own = turn.id not in places  # else it is what another branch begins with too
        trained = own and not turn.untrained and turn.logprobs is not None
        nodes.append(
            vf.MessageNode(
                parent=parent,
                message=message(turn.message),
                sampled=own
                and (bool(turn.ids) or turn.finish != "abort"),  # nothing came of a call that was cut short at once
                timestamp=turn.ended,
                token_ids=[*turn.context, *turn.ids],
                mask=[False] * len(turn.context) + [trained] * len(turn.ids),
                logprobs=list(turn.logprobs or ()) if trained else [],
            )
        )
        parent = len(nodes) - 1
        if own:
            places[turn.id] = parent


def _call(turn: Turn, node: int | None, prompt: int) -> vf.ModelCall:
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


def message(wire: Mapping[str, Any]) -> vf.Message:
    """A message in OpenAI's form as verifiers has it."""
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
    """Of a string or of parts. What is no text is not for a trace that trains tokens."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" if isinstance(part, dict) else str(part) for part in content)
    return content or ""


def _tools(given: Sequence[Json]) -> list[vf.Tool]:
    """Tools as agents declare them, in any of the dialects."""
    declared = [one for tool in given for one in tool.get("functionDeclarations") or [tool]]
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
