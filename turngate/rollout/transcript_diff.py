"""Compare an agent's own transcript with the trace, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from turngate.agents.spec import Transcript
from turngate.agents.transcript import (
    Difference,
    TranscriptCall,
    TranscriptTurn,
    compare_turns,
    parse_arguments,
    read_transcripts,
)
from turngate.errors import AgentError
from turngate.trace.session import limit_message
from turngate.types import Json

_MAX_EXTRA_TURNS = 10_000  # beyond those in the trace: comparing more would take too long
_MAX_DIFFERENCES = 100  # in the result


def compare_transcript(transcript: Transcript, folder: Path, trace: Json) -> tuple[int, list[str]]:
    """Return how many turns the transcript has, and how they differ from the trace. An agent may write anything."""
    try:
        turns, differences = _compare_files(transcript, folder, trace)
    except (RecursionError, OSError) as error:
        raise AgentError(f"transcript: cannot be read: {error}", param="transcript") from None
    extra = len(differences) - _MAX_DIFFERENCES
    return turns, differences[:_MAX_DIFFERENCES] + ([f"and {extra} more"] if extra > 0 else [])


def _compare_files(transcript: Transcript, folder: Path, trace: Json) -> tuple[int, list[str]]:
    stdout = folder / "stdout"
    found = read_transcripts(transcript, folder / "home", stdout.read_bytes() if stdout.is_file() else b"")
    written = len(found.main) + sum(map(len, found.subagents))
    if written > len(trace["nodes"]) + _MAX_EXTRA_TURNS:
        return written, [f"the transcript has {written} turns, far more than the trace"]
    main = _list_turns(trace, "main")
    # Some agents write their summaries as turns, and all of them the gateway's last message.
    side = [*_list_turns(trace, "side"), TranscriptTurn(text=limit_message(trace["stop"]))]
    differences = [
        _format_difference("main", d) for d in compare_turns(found.main, main, side=side, fills_in=transcript.fills_in)
    ]
    if found.subagents:
        differences += [
            _format_difference("sub-agent", d)
            for d in _compare_subagents(found.subagents, trace, fills_in=transcript.fills_in)
        ]
    return written, differences


def _compare_subagents(written: Sequence[Sequence[TranscriptTurn]], trace: Json, *, fills_in: bool) -> list[Difference]:
    """Match each written conversation with the most similar recorded one: sub-agents run in parallel, and their names say nothing."""
    recorded = _group_conversations(trace, "subagent")
    differences: list[Difference] = []
    for turns in written:
        compared = [compare_turns(turns, other, fills_in=fills_in) for other in recorded]
        if not compared:
            differences += compare_turns(turns, (), fills_in=fills_in)
            continue
        nearest = min(range(len(compared)), key=lambda n: len(compared[n]))
        differences += compared[nearest]
        del recorded[nearest]
    return differences + [difference for rest in recorded for difference in compare_turns((), rest)]


def _group_conversations(trace: Json, role: str) -> list[list[TranscriptTurn]]:
    """Group the turns of a role by conversation: by the thread that the agent names, or by their root."""
    nodes = {node["id"]: node for node in trace["nodes"]}
    conversations: dict[str, list[TranscriptTurn]] = {}
    for node in trace["nodes"]:
        if node["kind"] == "sampled" and node["role"] == role and node["delivered"]:
            context = root = nodes[node["parent"]]
            while root["parent"] is not None:
                root = nodes[root["parent"]]
            conversations.setdefault(context["told"].get("thread") or str(root["id"]), []).append(_turn_from_node(node))
    return list(conversations.values())


def _list_turns(trace: Json, role: str) -> list[TranscriptTurn]:
    """List the turns that were sampled and delivered in a role, oldest first."""
    return [
        _turn_from_node(node)
        for node in trace["nodes"]
        if node["kind"] == "sampled" and node["role"] == role and node["delivered"]
    ]


def _turn_from_node(node: Json) -> TranscriptTurn:
    message = node["message"]
    calls = tuple(
        TranscriptCall(call["name"], parse_arguments(call["arguments"])) for call in message.get("tool_calls", ())
    )
    return TranscriptTurn(text=message.get("content", ""), reasoning=message.get("reasoning", ""), calls=calls)


def _format_difference(which: str, difference: Difference) -> str:
    at = [
        f"{side} turn {n + 1}"
        for side, n in (("transcript", difference.transcript), ("trace", difference.trace))
        if n is not None
    ]
    return f"{which}: {difference.what} ({', '.join(at)}): {difference.detail}"
