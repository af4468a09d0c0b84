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
from turngate.client.protocol import DecodedTrace, TraceContext
from turngate.errors import AgentError
from turngate.trace.session import limit_message
from turngate.types import DeliveredTurn, Message

# A transcript that exceeds the trace by more turns than this is not compared, because that would take too long.
_MAX_EXTRA_TURNS = 10_000
_MAX_DIFFERENCES = 100  # maximum number of differences in the result


def list_delivered_turns(trace: DecodedTrace) -> list[DeliveredTurn]:
    """Return the turns whose replies reached the agent, oldest first."""
    contexts: dict[int, TraceContext] = {}
    root_of: dict[int, int] = {}  # parents come before their children
    delivered = []
    for node in trace.nodes:
        root_of[node.id] = node.id if node.parent is None else root_of[node.parent]
        if isinstance(node, TraceContext):
            contexts[node.id] = node
        elif node.delivered:
            thread = contexts[node.parent].signals.get("thread") or str(root_of[node.id])
            delivered.append(DeliveredTurn(node.role, thread, node.decode_message()))
    return delivered


def compare_transcript(
    transcript: Transcript, folder: Path, recorded: Sequence[DeliveredTurn], stop: str
) -> tuple[int, list[str]]:
    """Compare an untrusted transcript with the recorded turns. Return the number of turns in the transcript, and the differences."""
    try:
        turns, differences = _compare_files(transcript, folder, recorded, stop)
    except (RecursionError, OSError) as error:
        raise AgentError(f"the agent's transcript cannot be read: {error}", param="transcript") from None
    extra = len(differences) - _MAX_DIFFERENCES
    return turns, differences[:_MAX_DIFFERENCES] + ([f"and {extra} more"] if extra > 0 else [])


def _compare_files(
    transcript: Transcript, folder: Path, recorded: Sequence[DeliveredTurn], stop: str
) -> tuple[int, list[str]]:
    stdout = folder / "stdout"
    transcripts = read_transcripts(transcript, folder / "home", stdout.read_bytes() if stdout.is_file() else b"")
    written = len(transcripts.main) + sum(map(len, transcripts.subagents))
    if written > len(recorded) + _MAX_EXTRA_TURNS:
        return written, [f"the transcript has {written} turns, far more than the trace, so they were not compared"]
    main = _list_turns(recorded, "main")
    # Some agents also write their summaries as turns, and all agents write the gateway's message about a reached limit.
    aside = [turn for role in ("side", "summary") for turn in _list_turns(recorded, role)]
    side = [*aside, TranscriptTurn(text=limit_message(stop))]
    differences = [
        _format_difference("main", d)
        for d in compare_turns(transcripts.main, main, side=side, fills_in=transcript.fills_in)
    ]
    if transcripts.subagents:
        differences += [
            _format_difference("sub-agent", d)
            for d in _compare_subagents(transcripts.subagents, recorded, fills_in=transcript.fills_in)
        ]
    return written, differences


def _compare_subagents(
    written: Sequence[Sequence[TranscriptTurn]], recorded: Sequence[DeliveredTurn], *, fills_in: bool
) -> list[Difference]:
    """Compare each sub-agent's transcript with the most similar of the recorded conversations that are not yet matched.

    The name and the position of a transcript do not identify its conversation.
    """
    conversations = _group_conversations(recorded, "subagent")
    differences: list[Difference] = []
    for turns in written:
        compared = [compare_turns(turns, other, fills_in=fills_in) for other in conversations]
        if not compared:
            differences += compare_turns(turns, (), fills_in=fills_in)
            continue
        nearest = min(range(len(compared)), key=lambda n: len(compared[n]))
        differences += compared[nearest]
        del conversations[nearest]
    return differences + [difference for rest in conversations for difference in compare_turns((), rest)]


def _group_conversations(recorded: Sequence[DeliveredTurn], role: str) -> list[list[TranscriptTurn]]:
    conversations: dict[str, list[TranscriptTurn]] = {}
    for turn in recorded:
        if turn.role == role:
            conversations.setdefault(turn.conversation, []).append(_to_transcript_turn(turn.message))
    return list(conversations.values())


def _list_turns(recorded: Sequence[DeliveredTurn], role: str) -> list[TranscriptTurn]:
    return [_to_transcript_turn(turn.message) for turn in recorded if turn.role == role]


def _to_transcript_turn(message: Message) -> TranscriptTurn:
    calls = tuple(TranscriptCall(call.name, parse_arguments(call.arguments)) for call in message.tool_calls)
    return TranscriptTurn(text=message.content, reasoning=message.reasoning, calls=calls)


def _format_difference(which: str, difference: Difference) -> str:
    at = [
        f"{side} turn {n + 1}"
        for side, n in (("transcript", difference.transcript), ("trace", difference.trace))
        if n is not None
    ]
    return f"{which}: {difference.what} ({', '.join(at)}): {difference.detail}"
