"""Compare an agent's own transcript with the trace, turn by turn."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from turngate.agents.spec import Transcript
from turngate.agents.transcript import TranscriptCall, TranscriptTurn, parse_arguments, read_transcripts
from turngate.client.protocol import DecodedTrace, TraceContext
from turngate.errors import AgentError
from turngate.trace.session import limit_message
from turngate.types import DeliveredTurn, Message

# A transcript that exceeds the trace by more turns than this is not compared, because that would take too long.
_MAX_EXTRA_TURNS = 10_000
_MAX_DIFFERENCES = 100  # maximum number of differences in the result


class Difference(msgspec.Struct, frozen=True):
    """A difference between the transcript and the trace.

    `transcript` and `trace` are the positions of the turn in each, counted from 0. A position is None if the turn is missing there.
    """

    what: Literal["missing in trace", "missing in transcript", "text", "reasoning", "calls"]
    transcript: int | None
    trace: int | None
    detail: str = ""


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


def compare_turns(
    transcript: Sequence[TranscriptTurn],
    trace: Sequence[TranscriptTurn],
    *,
    side: Sequence[TranscriptTurn] = (),
    fills_in: bool = False,
) -> list[Difference]:
    """Return the differences between the agent's transcript and the trace. An empty list means that they agree.

    The transcript must contain the turns in `trace`. It may also contain the turns in `side`, such as summaries, which only some agents
    record. Text is compared without surrounding whitespace, and arguments as parsed JSON. Reasoning is compared only if the transcript
    contains it. The calls of a turn may be in any order, because agents record each call when it finishes. Set `fills_in` if the agent adds
    arguments that the model left out.
    """
    trace_shapes = [_shape(turn) for turn in trace]
    side_shapes = {_shape(turn) for turn in side} - set(trace_shapes)
    kept = [n for n, turn in enumerate(transcript) if _shape(turn) not in side_shapes]
    transcript_shapes = [_shape(transcript[n]) for n in kept]
    differences: list[Difference] = []
    for _, a, a_end, b, b_end in difflib.SequenceMatcher(
        None, transcript_shapes, trace_shapes, autojunk=False
    ).get_opcodes():
        pairs = min(a_end - a, b_end - b)
        for n in range(pairs):
            differences += _compare_turn(transcript[kept[a + n]], trace[b + n], kept[a + n], b + n, fills_in)
        differences += [
            Difference("missing in trace", n, None, _summarize(transcript[n])) for n in kept[a + pairs : a_end]
        ]
        differences += [
            Difference("missing in transcript", None, n, _summarize(trace[n])) for n in range(b + pairs, b_end)
        ]
    return differences


# ---- reading ----


def _shape(turn: TranscriptTurn) -> tuple[str, tuple[str, ...]]:
    """Return a turn's text and sorted tool names. They are used to match turns that may differ in their reasoning or arguments."""
    return turn.text.strip(), tuple(sorted(call.name for call in turn.calls))


def _compare_turn(
    written: TranscriptTurn, recorded: TranscriptTurn, a: int, b: int, fills_in: bool
) -> Iterator[Difference]:
    if written.text.strip() != recorded.text.strip():
        yield Difference(
            "text", a, b, f"transcript {_shorten(written.text.strip())}, trace {_shorten(recorded.text.strip())}"
        )
    if written.reasoning.strip() and written.reasoning.strip() != recorded.reasoning.strip():
        yield Difference(
            "reasoning",
            a,
            b,
            f"transcript {_shorten(written.reasoning.strip())}, trace {_shorten(recorded.reasoning.strip())}",
        )
    unmatched = list(recorded.calls)
    for call in written.calls:
        match = next((other for other in unmatched if _same_call(call, other, fills_in)), None)
        if match is None:
            yield Difference("calls", a, b, f"the trace has no call {call.name} {_shorten(json.dumps(call.arguments))}")
        else:
            unmatched.remove(match)
    for call in unmatched:
        yield Difference(
            "calls", a, b, f"the transcript has no call {call.name} {_shorten(json.dumps(call.arguments))}"
        )


def _same_call(written: TranscriptCall, recorded: TranscriptCall, fills_in: bool) -> bool:
    if written.name != recorded.name:
        return False
    if fills_in and isinstance(written.arguments, dict) and isinstance(recorded.arguments, dict):
        return all(
            name in written.arguments and written.arguments[name] == value for name, value in recorded.arguments.items()
        )
    return bool(written.arguments == recorded.arguments)


def _summarize(turn: TranscriptTurn) -> str:
    calls = ", ".join(call.name for call in turn.calls)
    return _shorten(turn.text.strip()) + (f" calls {calls}" if calls else "")


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:60]}…{text[-15:]}")
