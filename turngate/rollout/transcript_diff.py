"""The agent's own transcript, held against the trace: what it says it was told has to be what was recorded, turn by turn."""

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

_TOO_MANY = 10_000  # turns more than there are in the trace: comparing them would take for ever
_TOLD = 100  # differences that are told of


def compare_transcript(transcript: Transcript, folder: Path, trace: Json) -> tuple[int, list[str]]:
    """How many turns the agent wrote down, and the places where they and the trace disagree. It may have written anything."""
    try:
        turns, told = _compare_files(transcript, folder, trace)
    except (RecursionError, OSError) as error:
        raise AgentError(f"transcript: cannot be read: {error}", param="transcript") from None
    more = [f"and {len(told) - _TOLD} more"] if len(told) > _TOLD else []
    return turns, told[:_TOLD] + more


def _compare_files(transcript: Transcript, folder: Path, trace: Json) -> tuple[int, list[str]]:
    stdout = folder / "stdout"
    found = read_transcripts(transcript, folder / "home", stdout.read_bytes() if stdout.is_file() else b"")
    written = len(found.main) + sum(map(len, found.subagents))
    if written > len(trace["nodes"]) + _TOO_MANY:
        return written, [f"the transcript tells of {written} turns, far more than were made"]
    main = _list_turns(trace, "main")
    # Some agents write their own summaries down as turns, and all of them what they were told at the end.
    side = [*_list_turns(trace, "side"), TranscriptTurn(text=limit_message(trace["stop"]))]
    told = [
        _format_difference("main", d) for d in compare_turns(found.main, main, side=side, fills_in=transcript.fills_in)
    ]
    if found.subagents:
        told += [
            _format_difference("sub-agent", d)
            for d in _compare_subagents(found.subagents, trace, fills_in=transcript.fills_in)
        ]
    return written, told


def _compare_subagents(written: Sequence[Sequence[TranscriptTurn]], trace: Json, *, fills_in: bool) -> list[Difference]:
    """Sub-agents run side by side, and name themselves as they like: which of them is which is known by what they said."""
    recorded = _group_conversations(trace, "subagent")
    told: list[Difference] = []
    for turns in written:
        compared = [compare_turns(turns, other, fills_in=fills_in) for other in recorded]
        if not compared:
            told += compare_turns(turns, (), fills_in=fills_in)
            continue
        nearest = min(range(len(compared)), key=lambda n: len(compared[n]))
        told += compared[nearest]
        del recorded[nearest]
    return told + [difference for rest in recorded for difference in compare_turns((), rest)]


def _group_conversations(trace: Json, role: str) -> list[list[TranscriptTurn]]:
    """The turns of that role by the conversation that they belong to: as the agent's program names it, or by where it begins."""
    nodes = {node["id"]: node for node in trace["nodes"]}
    found: dict[str, list[TranscriptTurn]] = {}
    for node in trace["nodes"]:
        if node["kind"] == "sampled" and node["role"] == role and node["delivered"]:
            context = root = nodes[node["parent"]]
            while root["parent"] is not None:
                root = nodes[root["parent"]]
            found.setdefault(context["told"].get("thread") or str(root["id"]), []).append(_turn_from_node(node))
    return list(found.values())


def _list_turns(trace: Json, role: str) -> list[TranscriptTurn]:
    """What was sampled and delivered in that role, in order."""
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
