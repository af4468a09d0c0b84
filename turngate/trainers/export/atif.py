"""The `atif` format: Harbor's trajectory format (version 1.8), with the text, ids and log-probabilities of every branch.

Each rollout is one trajectory. The main branch is the trajectory itself, and the other branches (sub-agents, side calls, history before a
compaction, abandoned branches) are embedded in it. A step that an earlier branch already contains is marked as copied, so that it is not
trained twice.

The prompt of a step consists of the `new_prompt_token_ids` and `completion_token_ids` of all earlier steps, followed by its own
`new_prompt_token_ids`. `--prompt-ids` also writes the full prompt of every step, which makes the file size grow with the square of the
number of turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np

from turngate.trace.sample import RowSpan, Sample
from turngate.trace.tree import Sampled, path_to
from turngate.trainers.export.base import ExportChoices, Record, reject_unused
from turngate.trainers.export.files import RecordLayout
from turngate.trainers.export.messages import BranchMessage, parse_arguments, read_conversation, read_tools
from turngate.trainers.export.rows import describe_rollout
from turngate.trainers.export.source import Exclusions, RecordedGroup, RecordedRollout
from turngate.types import Json, Message

SCHEMA = "ATIF-v1.8"


class Atif:
    name = "atif"
    whole_groups = False

    def check(self, choices: ExportChoices) -> ExportChoices:
        return reject_unused(choices, "prompt_ids")

    def layout(self, choices: ExportChoices) -> RecordLayout:
        return RecordLayout(what="trajectories", folder="session_id")

    def list_losses(self, choices: ExportChoices) -> tuple[str, ...]:
        return ("images and other non-text parts, and all log-probabilities of a turn if some of its tokens lack them",)

    def find_scored_session(self, record: Record) -> str:
        return str(record["session_id"])

    def records(self, group: RecordedGroup, choices: ExportChoices, exclusions: Exclusions) -> Iterator[Record]:
        for rollout in group.selected:
            if not rollout.branches:
                exclusions.add("a rollout without turns")
                continue
            yield _build_record(rollout, choices)


def _build_record(rollout: RecordedRollout, choices: ExportChoices) -> Record:
    written: set[int] = set()
    main, *others = [_build_trajectory(rollout, row, written, choices) for row in rollout.branches]
    return {
        **main,
        "final_metrics": _totals(rollout, len(main["steps"])),
        "extra": {**main["extra"], "rollout": _describe_rollout(rollout)},
        **({"subagent_trajectories": others} if others else {}),
    }


def _build_trajectory(
    rollout: RecordedRollout, row: Sample, written: set[int], choices: ExportChoices
) -> dict[str, Json]:
    """Build the trajectory of a branch. Add the ids of its nodes to `written`, which contains those of earlier branches."""
    spans = {span.node: span for span in row.spans}
    nodes = {node.id: node for node in path_to(rollout.nodes[row.branch])}
    steps: list[dict[str, Json]] = []
    for entry in read_conversation(rollout, row):
        node = nodes[entry.node]
        if entry.message.role == "tool":
            _attach_observation(steps, entry.message)
        elif isinstance(node, Sampled):
            steps.append(_turn_step(node, entry, spans[node.id], choices))
        else:
            steps.append(_context_step(entry.message))
        if entry.node in written:
            steps[-1]["is_copied_context"] = True
    written.update(nodes)
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    offered = read_tools(rollout, row)
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
        "extra": {"branch": row.branch, "role": row.spans[-1].role, "fork": _fork_cause(nodes[row.branch])},
    }


def _fork_cause(leaf: object) -> str | None:
    """Return why the branch forked from another branch, or None if it did not fork."""
    assert isinstance(leaf, Sampled)
    causes = [node.info.cause for node in path_to(leaf) if node.info.cause is not None]
    return causes[-1] if causes else None


def _context_step(message: Message) -> dict[str, Json]:
    """Build the step for a message that the agent sent. An assistant message is marked as copied, because the gateway did not sample it."""
    if message.role == "assistant":
        return {"source": "agent", "is_copied_context": True, **_message_fields(message)}
    return {"source": "system" if message.role == "system" else "user", "message": message.content}


def _attach_observation(steps: list[dict[str, Json]], message: Message) -> None:
    """Add the result of a tool to the step that called it. If no step called it, add a separate step."""
    call = message.tool_call_id
    for step in reversed(steps):
        if any(one["tool_call_id"] == call for one in step.get("tool_calls", ())):
            step.setdefault("observation", {"results": []})["results"].append(
                {"source_call_id": call, "content": message.content}
            )
            return
    # The agent removed the call from its history.
    steps.append({"source": "system", "message": "", "observation": {"results": [{"content": message.content}]}})


def _turn_step(node: Sampled, entry: BranchMessage, span: RowSpan, choices: ExportChoices) -> dict[str, Json]:
    return {
        "source": "agent",
        "timestamp": datetime.fromtimestamp(node.info.ended, UTC).isoformat(),
        "llm_call_count": 1,
        **_message_fields(entry.message),
        "metrics": _metrics(node, span, choices),
        "extra": {"role": span.role, "finish": node.info.finish, "delivered": node.delivered},
    }


def _message_fields(message: Message) -> dict[str, Json]:
    fields: dict[str, Json] = {"message": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {"tool_call_id": call.id, "function_name": call.name, **_arguments(call.arguments)}
            for call in message.tool_calls
        ]
    return fields


def _arguments(written: str) -> dict[str, Json]:
    """Return the arguments of a tool call as an object, which ATIF requires. Keep arguments that are not an object as text in `extra`."""
    value = parse_arguments(written)
    return {"arguments": value} if isinstance(value, dict) else {"arguments": {}, "extra": {"written": written}}


def _metrics(node: Sampled, span: RowSpan, choices: ExportChoices) -> dict[str, Json]:
    """Return the metrics of a turn.

    Token counts, ids and log-probabilities are left out if the endpoint returned no token ids. Log-probabilities are also left out if any
    of them is missing.
    """
    exact = node.info.capture == "tokens"
    logprobs = [math.nan] if node.logprobs is None else node.logprobs
    scored = exact and len(logprobs) == node.size and bool(np.isfinite(logprobs).all())
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
            **({"version_runs": span.version_runs} if span.version_runs else {}),
            "node": node.id,
            **({"new_prompt_token_ids": node.parent.ids} if exact else {}),
        },
    }


def _totals(rollout: RecordedRollout, steps: int) -> dict[str, Json]:
    turns = [node for node in rollout.session.trace.nodes if isinstance(node, Sampled)]
    return {
        "total_prompt_tokens": sum(turn.length - turn.size for turn in turns),
        "total_completion_tokens": sum(turn.size for turn in turns),
        "total_steps": steps,
    }


def _describe_rollout(rollout: RecordedRollout) -> dict[str, Json]:
    outcome = rollout.outcome
    return {
        **{name: value for name, value in describe_rollout(rollout).items() if name != "session"},
        "status": rollout.row.status,
        "stop": rollout.session.stop,
        "message": "" if outcome is None else outcome.message,
    }
