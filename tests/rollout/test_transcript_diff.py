"""What an agent wrote down against what was recorded, where it is not obvious what belongs to what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from turngate.agents.spec import find_agent
from turngate.rollout.transcript_diff import compare_transcript
from turngate.trace.session import limit_message
from turngate.types import DeliveredTurn, Message, ToolCall

pytestmark = pytest.mark.process

PLACE = Path("home/.claude/projects/-work")


def says(text: str, *commands: str) -> dict[str, Any]:
    """An assistant's message as Claude Code writes it down."""
    calls = [{"type": "tool_use", "name": "Bash", "input": {"command": c, "timeout": 5}} for c in commands]
    return {"type": "assistant", "message": {"id": f"msg_{text}", "content": [{"type": "text", "text": text}, *calls]}}


def make_trace(*turns: tuple[str, str, str, tuple[str, ...]], stop: str = "") -> tuple[list[DeliveredTurn], str]:
    """Delivered turns (role, thread, text, commands), and why the session stopped."""
    delivered = []
    for role, thread, text, commands in turns:
        calls = tuple(ToolCall(f"c{n}", "Bash", json.dumps({"command": c})) for n, c in enumerate(commands))
        delivered.append(DeliveredTurn(role, thread, Message("assistant", text, tool_calls=calls)))
    return delivered, stop


@pytest.fixture
def compared(tmp_path: Path) -> Any:
    def compare(trace: Any, main: list[Any], *helpers: list[Any]) -> list[str]:
        files = {"s.jsonl": main, **{f"s/subagents/agent-{n}.jsonl": turns for n, turns in enumerate(helpers)}}
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, records in files.items():
            file = folder / PLACE / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(map(json.dumps, records)))
        transcript = find_agent("claude-code").spec.transcript
        assert transcript is not None
        return compare_transcript(transcript, folder, *trace)[1]

    return compare


def test_helpers_are_told_apart_by_what_they_did(compared: Any) -> None:
    trace = make_trace(
        ("main", "a", "Go.", ()),
        ("subagent", "b", "I look.", ("wc -l",)),
        ("subagent", "c", "I look.", ("wc -w",)),
        ("subagent", "b", "Three.", ()),
        ("subagent", "c", "Three.", ()),
    )
    one, other = (
        [says("I look.", "wc -l"), says("Three.")],
        [says("I look.", "wc -w"), says("Three.")],
    )
    assert compared(trace, [says("Go.")], other, one) == []
    assert compared(trace, [says("Go.")], other) != [], "a helper that was not written down is missed"


def test_the_words_at_a_limit_were_never_sampled(compared: Any) -> None:
    main = [says("Go."), says(limit_message("turns"))]
    assert compared(make_trace(("main", "a", "Go.", ()), stop="turns"), main) == []
    assert compared(make_trace(("main", "a", "Go.", ())), main) != []
