"""ATIF, the trajectories of Harbor (version 1.8): one per rollout, with every branch, its words, ids and log-probabilities.

The main branch is the trajectory itself; all others (sub-agents, side calls, what was before a compaction, abandoned lines) are embedded
in it. A step that another branch has already is marked as copied, so that nothing is trained twice. The whole prompt of a step, in ids, is
`new_prompt_token_ids` and `completion_token_ids` of the steps before it put together; `--prompt-ids` writes it out for every step, which
grows with the square of the turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np

from turngate.trace.sample import Sample, Span
from turngate.trace.tree import Context, Sampled, path_to
from turngate.trainers.export.base import Choices, Record, only
from turngate.trainers.export.files import Layout
from turngate.trainers.export.messages import Said, as_object, conversation, tools
from turngate.trainers.export.rows import about
from turngate.trainers.export.source import Group, Left, Rollout
from turngate.types import Json, Message

SCHEMA = "ATIF-v1.8"


class Atif:
    name = "atif"
    whole_groups = False

    def checked(self, choices: Choices) -> Choices:
        return only(choices, "prompt_ids")

    def layout(self, choices: Choices) -> Layout:
        return Layout(what="trajectories", folder="session_id")

    def lost(self, choices: Choices) -> tuple[str, ...]:
        return ("images and other parts that are no text, and log-probabilities of turns that lack some",)

    def scored(self, record: Record) -> str:
        return str(record["session_id"])

    def records(self, group: Group, choices: Choices, left: Left) -> Iterator[Record]:
        for rollout in group.wanted:
            if not rollout.branches:
                left.out("nothing was sampled in it")
                continue
            yield _root(rollout, choices)


def _root(rollout: Rollout, choices: Choices) -> Record:
    told: set[int] = set()
    main, *others = [_trajectory(rollout, row, told, choices) for row in rollout.branches]
    return {
        **main,
        "final_metrics": _totals(rollout, len(main["steps"])),
        "extra": {**main["extra"], "rollout": _about(rollout)},
        **({"subagent_trajectories": others} if others else {}),
    }


def _trajectory(rollout: Rollout, row: Sample, told: set[int], choices: Choices) -> dict[str, Json]:
    """`told`: nodes that a branch before has, to which this one's are added."""
    spans = {span.node: span for span in row.spans}
    nodes = {node.id: node for node in path_to(rollout.nodes[row.branch])}
    steps: list[dict[str, Json]] = []
    for said in conversation(rollout, row):
        node = nodes[said.node]
        if said.message.role == "tool":
            _observed(steps, said.message)
        elif isinstance(node, Sampled):
            steps.append(_turn(node, said, spans[node.id], choices))
        else:
            steps.append(_context(said.message))
        if said.node in told:
            steps[-1]["is_copied_context"] = True
    told.update(nodes)
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    offered = tools(rollout, row)
    metadata = rollout.row.config.metadata
    return {
        "schema_version": SCHEMA,
        "session_id": rollout.id,
        "trajectory_id": f"{rollout.id}:{row.branch}",
        "agent": {
            "name": str(metadata.get("agent") or "unknown"),
            "version": str(metadata.get("agent_version") or "unknown"),
            **({"model_name": rollout.row.config.model} if rollout.row.config.model else {}),
            **({"tool_definitions": offered} if offered else {}),
        },
        "steps": steps,
        "extra": {"branch": row.branch, "role": row.spans[-1].role, "fork": _cause(nodes[row.branch])},
    }


def _cause(leaf: object) -> str | None:
    """Why the branch is one, if it forked from another."""
    assert isinstance(leaf, Sampled)
    causes = [node.info.cause for node in path_to(leaf) if node.info.cause is not None]
    return causes[-1] if causes else None


def _context(message: Message) -> dict[str, Json]:
    """What the agent's program put into the conversation. An answer among it was not sampled here."""
    if message.role == "assistant":
        return {"source": "agent", "is_copied_context": True, **_spoken(message)}
    return {"source": "system" if message.role == "system" else "user", "message": message.content}


def _observed(steps: list[dict[str, Json]], message: Message) -> None:
    """The result of a tool belongs to the step that called it."""
    call = message.tool_call_id
    for step in reversed(steps):
        if any(made["tool_call_id"] == call for made in step.get("tool_calls", ())):
            step.setdefault("observation", {"results": []})["results"].append(
                {"source_call_id": call, "content": message.content}
            )
            return
    # Nobody here called it: the agent's program left that out of its history.
    steps.append({"source": "system", "message": "", "observation": {"results": [{"content": message.content}]}})


def _turn(node: Sampled, said: Said, span: Span, choices: Choices) -> dict[str, Json]:
    return {
        "source": "agent",
        "timestamp": datetime.fromtimestamp(node.info.ended, UTC).isoformat(),
        "llm_call_count": 1,
        **_spoken(said.message),
        "metrics": _metrics(node, span, choices),
        "extra": {"role": span.role, "finish": node.info.finish, "delivered": node.delivered},
    }


def _spoken(message: Message) -> dict[str, Json]:
    made: dict[str, Json] = {"message": message.content}
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            {"tool_call_id": call.id, "function_name": call.name, **_arguments(call.arguments)}
            for call in message.tool_calls
        ]
    return made


def _arguments(written: str) -> dict[str, Json]:
    """They have to be an object there; what the model wrote instead is kept beside it."""
    value = as_object(written)
    return {"arguments": value} if isinstance(value, dict) else {"arguments": {}, "extra": {"written": written}}


def _metrics(node: Sampled, span: Span, choices: Choices) -> dict[str, Json]:
    """Tokens that were seen are told as such; of an endpoint that told none there are none."""
    exact = node.info.capture == "tokens"
    given = [math.nan] if node.logprobs is None else node.logprobs
    scored = exact and len(given) == node.size and bool(np.isfinite(given).all())
    before = path_to(node.parent)
    return {
        **({"prompt_tokens": span.start, "completion_tokens": node.size} if exact else {}),
        **({"completion_token_ids": node.ids} if exact else {}),
        **({"prompt_token_ids": np.concatenate([one.ids for one in before])} if exact and choices.prompt_ids else {}),
        **({"logprobs": node.logprobs} if scored else {}),
        "extra": {
            "trained": span.trained,
            **({"untrained": span.reason} if span.reason else {}),
            "version_start": span.version_start,
            "version_end": span.version_end,
            "node": node.id,
            **({"new_prompt_token_ids": _added(node.parent)} if exact else {}),
        },
    }


def _added(context: Context) -> np.ndarray:
    return context.ids


def _totals(rollout: Rollout, steps: int) -> dict[str, Json]:
    turns = [node for node in rollout.session.trace.nodes if isinstance(node, Sampled)]
    return {
        "total_prompt_tokens": sum(turn.length - turn.size for turn in turns),
        "total_completion_tokens": sum(turn.size for turn in turns),
        "total_steps": steps,
    }


def _about(rollout: Rollout) -> dict[str, Json]:
    outcome = rollout.outcome
    return {
        **{name: value for name, value in about(rollout).items() if name != "session"},
        "status": rollout.row.status,
        "stop": rollout.session.stop,
        "message": "" if outcome is None else outcome.message,
    }
