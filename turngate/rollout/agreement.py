"""The agent's own transcript, held against the trace: what it says it was told has to be what was recorded, turn by turn."""

from __future__ import annotations

from pathlib import Path

from turngate.agents.spec import Transcript
from turngate.agents.transcript import Call, Difference, Turn, agree, parsed, read
from turngate.types import Json


def differences(transcript: Transcript, folder: Path, trace: Json) -> tuple[int, list[str]]:
    """How many turns the agent wrote down, and every place where they and the trace disagree."""
    stdout = folder / "stdout"
    found = read(transcript, folder / "home", stdout.read_bytes() if stdout.is_file() else b"")
    main = _turns(trace, "main")
    side = _turns(trace, "side")  # some agents write their own summaries down as turns
    told = [_line("main", d) for d in agree(found.main, main, side=side, fills_in=transcript.fills_in)]
    # Sub-agents run side by side; which of them is which is known by what they said.
    helpers = [turn for turns in found.subagents for turn in turns]
    if helpers:
        recorded = _turns(trace, "subagent")
        told += [
            _line("sub-agent", d)
            for d in agree(sorted(helpers, key=_key), sorted(recorded, key=_key), fills_in=transcript.fills_in)
        ]
    return len(found.main) + len(helpers), told


def _turns(trace: Json, role: str) -> list[Turn]:
    """What was sampled and delivered in that role, in order."""
    return [
        _turn(node)
        for node in trace["nodes"]
        if node["kind"] == "sampled" and node["role"] == role and node["delivered"]
    ]


def _turn(node: Json) -> Turn:
    message = node["message"]
    calls = tuple(Call(call["name"], parsed(call["arguments"])) for call in message.get("tool_calls", ()))
    return Turn(text=message.get("content", ""), reasoning=message.get("reasoning", ""), calls=calls)


def _key(turn: Turn) -> str:
    return f"{turn.text.strip()}\0{[call.name for call in turn.calls]}"


def _line(which: str, difference: Difference) -> str:
    at = [
        f"{side} turn {n + 1}"
        for side, n in (("transcript", difference.transcript), ("trace", difference.trace))
        if n is not None
    ]
    return f"{which}: {difference.what} ({', '.join(at)}): {difference.detail}"
