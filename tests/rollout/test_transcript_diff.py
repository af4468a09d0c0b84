"""Compare an agent's transcript with the recorded trace in ambiguous cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit import renderer, say
from tests.rollout.kit import open_harness
from tests.verify.kit import verdict, wrong
from turngate.agents.spec import Transcript, find_agent
from turngate.cli.verify import compare_transcripts
from turngate.rollout.transcript_diff import compare_transcript
from turngate.trace.session import limit_message
from turngate.types import DeliveredTurn, Message, ToolCall

pytestmark = pytest.mark.process

TRANSCRIPTS = Path("home/.claude/projects/-work")


def assistant_message(text: str, *commands: str) -> dict[str, Any]:
    """Make an assistant's message as in Claude Code's transcript."""
    calls = [{"type": "tool_use", "name": "Bash", "input": {"command": c, "timeout": 5}} for c in commands]
    return {"type": "assistant", "message": {"id": f"msg_{text}", "content": [{"type": "text", "text": text}, *calls]}}


def make_trace(*turns: tuple[str, str, str, tuple[str, ...]], stop: str = "") -> tuple[list[DeliveredTurn], str]:
    """Make delivered turns from (role, thread, text, commands), and the reason why the session stopped."""
    delivered = []
    for role, thread, text, commands in turns:
        calls = tuple(ToolCall(f"c{n}", "Bash", json.dumps({"command": c})) for n, c in enumerate(commands))
        delivered.append(DeliveredTurn(role, thread, Message("assistant", text, tool_calls=calls)))
    return delivered, stop


@pytest.fixture
def compare(tmp_path: Path) -> Any:
    def compare(trace: Any, main: list[Any], *subagents: list[Any]) -> list[str]:
        transcripts = {"s.jsonl": main, **{f"s/subagents/agent-{n}.jsonl": turns for n, turns in enumerate(subagents)}}
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, records in transcripts.items():
            file = folder / TRANSCRIPTS / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(map(json.dumps, records)))
        transcript = find_agent("claude-code").spec.transcript
        assert transcript is not None
        return compare_transcript(transcript, folder, *trace)[1]

    return compare


def test_subagents_are_matched_by_their_turns(compare: Any) -> None:
    trace = make_trace(
        ("main", "a", "Go.", ()),
        ("subagent", "b", "I look.", ("wc -l",)),
        ("subagent", "c", "I look.", ("wc -w",)),
        ("subagent", "b", "Three.", ()),
        ("subagent", "c", "Three.", ()),
    )
    first, second = (
        [assistant_message("I look.", "wc -l"), assistant_message("Three.")],
        [assistant_message("I look.", "wc -w"), assistant_message("Three.")],
    )
    assert compare(trace, [assistant_message("Go.")], second, first) == []
    assert compare(trace, [assistant_message("Go.")], second) != [], "a subagent without a transcript must be reported"


def test_limit_message_is_not_a_difference(compare: Any) -> None:
    main = [assistant_message("Go."), assistant_message(limit_message("turns"))]
    assert compare(make_trace(("main", "a", "Go.", ()), stop="turns"), main) == []
    assert compare(make_trace(("main", "a", "Go.", ())), main) != []


async def test_verify_finds_transcript_of_agent_outside_the_catalog() -> None:
    own = msgspec.structs.replace(
        find_agent("shell").spec, name="my-own", transcript=Transcript(stdout=True, turn="{text: text}")
    )
    async with open_harness([say("Hello.")]) as harness:
        program = 'print(json.dumps({"text": ask("Hi")}))'
        outcome = await harness.run(program, agent=own, options={"command": "exec python3 -"})
        data, transcript = harness.gateway.database.parent, compare_transcripts(harness.folder)
        found = verdict(data, outcome.session, renderer=renderer(), transcript=transcript)
        assert found.ok and "transcript" in {finding.check for finding in found.findings}
        (harness.folder / outcome.session / "stdout").write_text('{"text": "Goodbye."}')
        found = verdict(data, outcome.session, renderer=renderer(), transcript=transcript)
        assert wrong(found) == {"transcript"}
        (harness.folder / outcome.session / "agent.json").unlink()  # as in a folder that an earlier version wrote
        [skipped] = verdict(data, outcome.session, renderer=renderer(), transcript=transcript).unchecked
        assert "unknown agent 'my-own'" in skipped.why
