"""Transcripts of real runs, trimmed: read with the presets' expressions and compared with a trace."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from turngate.agents import spec, transcript
from turngate.agents.transcript import TranscriptCall, TranscriptTurn, read_transcripts
from turngate.errors import AgentError
from turngate.rollout.transcript_diff import Difference, compare_turns

SAMPLES = Path(__file__).parent / "samples"
# The path of each file below the agent's HOME.
PATHS = {
    "claude-code": ".claude/projects/-work/4a895d83.jsonl",
    "codex": ".codex/sessions/2026/11/15/rollout-2026-11-15T05-36-00-01a1.jsonl",
    "gemini-cli": ".gemini/tmp/work/chats/session-2026-11-15T05-36-4613.jsonl",
    "pi": ".pi/agent/sessions/--work--/2026-11-15_01a1.jsonl",
    "qwen-code": ".qwen/projects/-work/chats/33d7.jsonl",
    "mini-swe-agent": ".mini/trajectory.json",
}


def expected(
    read_call: TranscriptCall,
    edit: TranscriptCall,
    runs: tuple[TranscriptCall, ...],
    write: TranscriptCall,
    *,
    reasoning: bool = True,
) -> list[TranscriptTurn]:
    """The replies of the scripted model in each run."""
    return [
        TranscriptTurn(
            text="I will read the file.", reasoning="I read first." if reasoning else "", calls=(read_call,)
        ),
        TranscriptTurn(reasoning="Now edit." if reasoning else "", calls=(edit,)),
        TranscriptTurn(text="Run it.", calls=runs),
        TranscriptTurn(calls=(write,)),
        TranscriptTurn(text="All done: colour is now color."),
    ]


def bash(name: str, key: str = "command", **more: object) -> tuple[TranscriptCall, TranscriptCall]:
    listing = "env > env.txt; ls -la"
    return TranscriptCall(name, {key: "cat notes.txt", **more}), TranscriptCall(name, {key: listing, **more})


def described(name: str, first: str, second: str) -> tuple[TranscriptCall, TranscriptCall]:
    return (
        TranscriptCall(name, {"command": "cat notes.txt", "description": first}),
        TranscriptCall(name, {"command": "env > env.txt; ls -la", "description": second}),
    )


NOTES, DONE = "/work/notes.txt", "/work/done.txt"
PATCH = "*** Begin Patch\n*** Update File: notes.txt\n@@\n alpha\n-colour\n+color\n omega\n*** End Patch"
TRACES = {
    "claude-code": expected(
        TranscriptCall("Read", {"file_path": NOTES}),
        TranscriptCall("Edit", {"file_path": NOTES, "old_string": "colour", "new_string": "color"}),
        described("Bash", "Show the file", "List"),
        TranscriptCall("Write", {"file_path": DONE, "content": "done\n"}),
    ),
    "codex": expected(
        TranscriptCall("exec_command", {"cmd": "cat notes.txt"}),
        TranscriptCall("exec_command", {"cmd": f"apply_patch <<'EOF'\n{PATCH}\nEOF\n"}),
        bash("exec_command", "cmd"),
        TranscriptCall("exec_command", {"cmd": "echo done > done.txt", "workdir": "/work"}),
    ),
    "gemini-cli": expected(
        TranscriptCall("read_file", {"file_path": NOTES}),
        TranscriptCall(
            "replace",
            {
                "file_path": NOTES,
                "instruction": "Change colour to color",
                "old_string": "colour",
                "new_string": "color",
            },
        ),
        described("run_shell_command", "Show the file", "List"),
        TranscriptCall("write_file", {"file_path": DONE, "content": "done\n"}),
        reasoning=False,
    ),
    "pi": expected(
        TranscriptCall("read", {"path": "notes.txt"}),
        TranscriptCall("edit", {"path": "notes.txt", "edits": [{"oldText": "colour", "newText": "color"}]}),
        bash("bash"),
        TranscriptCall("write", {"path": "done.txt", "content": "done\n"}),
    ),
    "qwen-code": expected(
        TranscriptCall("read_file", {"file_path": NOTES}),
        TranscriptCall("edit", {"file_path": NOTES, "old_string": "colour", "new_string": "color"}),
        (
            TranscriptCall(
                "run_shell_command", {"command": "cat notes.txt", "description": "Show", "is_background": False}
            ),
            TranscriptCall(
                "run_shell_command", {"command": "env > env.txt; ls -la", "description": "List", "is_background": False}
            ),
        ),
        TranscriptCall("write_file", {"file_path": DONE, "content": "done\n"}),
    ),
    "mini-swe-agent": [
        *expected(
            TranscriptCall("bash", {"command": "cat notes.txt"}),
            TranscriptCall("bash", {"command": "sed -i s/colour/color/ notes.txt"}),
            bash("bash"),
            TranscriptCall("bash", {"command": "echo done > done.txt"}),
        )[:4],
        TranscriptTurn(
            text="All done: colour is now color.",
            calls=(TranscriptCall("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),),
        ),
    ],
}


def transcript_of(name: str) -> spec.Transcript:
    found = spec.find_agent(name).spec.transcript
    assert found is not None
    return found


def copy_sample(home: Path, sample: str, file: str) -> None:
    (home / file).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(SAMPLES / sample, home / file)


@pytest.mark.parametrize("name", PATHS)
def test_real_transcript_matches_trace(name: str, tmp_path: Path) -> None:
    copy_sample(tmp_path, f"{name}{Path(PATHS[name]).suffix}", PATHS[name])
    found = read_transcripts(transcript_of(name), tmp_path)
    assert len(found.main) == 5
    assert compare_turns(found.main, TRACES[name], fills_in=transcript_of(name).fills_in) == []


@pytest.mark.parametrize("name", ["claude-code", "codex", "pi", "mini-swe-agent"])
def test_turns_have_reply_ids(name: str, tmp_path: Path) -> None:
    copy_sample(tmp_path, f"{name}{Path(PATHS[name]).suffix}", PATHS[name])
    ids = [turn.id for turn in read_transcripts(transcript_of(name), tmp_path).main]
    assert len(set(ids)) == 5
    assert all(id.startswith(("msg_", "resp_", "chatcmpl-")) for id in ids)


def test_opencode_transcript_includes_compaction_summary(tmp_path: Path) -> None:
    found = read_transcripts(
        transcript_of("opencode"), tmp_path, (SAMPLES / "opencode.jsonl").read_bytes() + b"not json\n{cut off"
    )
    assert [turn.text.strip()[:9] for turn in found.main] == [
        "I will re", "", "Run it.", "<summary>", "", "Run it.", "", "All done:",
    ]  # fmt: skip
    summary = TranscriptTurn(text=found.main[3].text)
    trace = [turn for turn in found.main if turn.text != summary.text]
    assert compare_turns(found.main, trace, side=[summary]) == []
    assert [one.what for one in compare_turns(found.main, trace)] == ["missing in trace"]


def test_claude_subagents_are_separate(tmp_path: Path) -> None:
    copy_sample(tmp_path, "claude-code-sub.jsonl", ".claude/projects/-work/b1aa.jsonl")
    copy_sample(tmp_path, "claude-code-sub-agent.jsonl", ".claude/projects/-work/b1aa/subagents/agent-ac93.jsonl")
    found = read_transcripts(transcript_of("claude-code"), tmp_path)
    assert [call.name for turn in found.main for call in turn.calls] == ["Agent", "Read", "Edit"]
    assert [[call.name for turn in one for call in turn.calls] for one in found.subagents] == [["Bash"]]


def test_codex_subagents_are_separate(tmp_path: Path) -> None:
    copy_sample(tmp_path, "codex-sub-agent.jsonl", ".codex/sessions/2026/11/15/rollout-1.jsonl")
    copy_sample(tmp_path, "codex-sub.jsonl", ".codex/sessions/2026/11/15/rollout-2.jsonl")
    found = read_transcripts(transcript_of("codex"), tmp_path)
    names = [call.name.removeprefix("multi_agent_v1__") for turn in found.main for call in turn.calls]
    assert names == ["spawn_agent", "wait_agent", "close_agent"]
    assert found.main[0].calls[0].name == "multi_agent_v1__spawn_agent"  # the name that the model sees
    assert [[turn.text for turn in one] for one in found.subagents] == [["", "three lines"]]


def test_codex_subagent_transcript_excludes_parent_history(tmp_path: Path) -> None:
    begins = {"type": "event_msg", "payload": {"type": "task_started"}}
    inherited = {"type": "function_call", "name": "spawn_agent", "namespace": "collaboration", "arguments": "{}"}
    own_call = {"type": "custom_tool_call", "name": "exec", "namespace": "functions", "input": "ls"}
    records = [
        {"type": "session_meta", "payload": {"thread_source": "subagent"}},
        *(begins, {"type": "response_item", "payload": inherited}),
        *(begins, {"type": "response_item", "payload": own_call}),
        {"type": "token_usage_record", "payload": {"response_id": "resp_1"}},
    ]
    write(tmp_path / ".codex/sessions/2026/11/15/rollout-1.jsonl", records)
    assert read_transcripts(transcript_of("codex"), tmp_path).subagents == (
        (TranscriptTurn(calls=(TranscriptCall("exec", {"input": "ls"}),), id="resp_1"),),
    )


def test_qwen_subagent_calls_belong_to_preceding_text(tmp_path: Path) -> None:
    calls = [{"functionCall": {"name": name, "args": {}}} for name in ("read", "run")]
    counted = {"usageMetadata": {"totalTokenCount": 1}}
    first, last = (
        {"uuid": uuid, **counted, "message": {"parts": [{"text": text}]}}
        for uuid, text in (("u1", "Look."), ("u4", "Done."))
    )
    records = [first]
    records += [{"uuid": f"u{n}", "message": {"parts": [part]}} for n, part in enumerate(calls, 2)]
    file = tmp_path / ".qwen/projects/-work/subagents/33d7/agent-1.jsonl"
    write(file, [{"type": "assistant", **record} for record in (*records, last)])
    [found] = read_transcripts(transcript_of("qwen-code"), tmp_path).subagents
    assert [(turn.text, [call.name for call in turn.calls]) for turn in found] == [
        ("Look.", ["read", "run"]),
        ("Done.", []),
    ]


def test_mini_swe_agent_rejected_replies_are_turns(tmp_path: Path) -> None:
    reply = {"id": "chatcmpl-1", "choices": [{"message": {"content": "No call.", "tool_calls": None}}]}
    interrupted = {
        "role": "user",
        "content": "Call a tool.",
        "extra": {"interrupt_type": "FormatError", "response": reply},
    }
    file = tmp_path / PATHS["mini-swe-agent"]
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}, interrupted]}))
    assert read_transcripts(transcript_of("mini-swe-agent"), tmp_path).main == (
        TranscriptTurn(text="No call.", id="chatcmpl-1"),
    )


def write(file: Path, records: list[dict[str, object]]) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(json.dumps(record) for record in records))


def test_missing_transcripts_are_empty(tmp_path: Path) -> None:
    for name in (*PATHS, "opencode"):
        assert read_transcripts(transcript_of(name), tmp_path) == transcript.Transcripts()


def test_symlink_is_not_followed(tmp_path: Path) -> None:
    copy_sample(tmp_path / "host", "pi.jsonl", PATHS["pi"])
    home = tmp_path / "home"
    (home / ".pi" / "agent").mkdir(parents=True)
    (home / ".pi" / "agent" / "sessions").symlink_to(tmp_path / "host" / ".pi" / "agent" / "sessions")
    assert read_transcripts(transcript_of("pi"), home).main == ()


def test_malformed_transcript_is_tolerated(tmp_path: Path) -> None:
    file = tmp_path / PATHS["claude-code"]
    file.parent.mkdir(parents=True)
    file.write_bytes(
        b'{"type": "assistant"}\n{"type": "assistant", "message": {"content": 3}}\n[]\nnull\n\xff\xfe\n"x"\n'
    )
    assert [
        turn for turn in read_transcripts(transcript_of("claude-code"), tmp_path).main if turn.text or turn.calls
    ] == []


def test_deeply_nested_arguments_stay_text(tmp_path: Path) -> None:
    nested = "[" * 5000
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "bash", "arguments": nested}}]}
    file = tmp_path / PATHS["mini-swe-agent"]
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"messages": [message]}))
    [turn] = read_transcripts(transcript_of("mini-swe-agent"), tmp_path).main
    assert turn.calls == (TranscriptCall("bash", nested),)


@pytest.mark.parametrize(("limit", "value"), [("MAX_LINE_BYTES", 40), ("MAX_RECORDS", 1)])
@pytest.mark.parametrize("agent", ["mini-swe-agent", "claude-code"])
def test_oversized_transcript_is_refused(
    agent: str, limit: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an error, the turns of the trace would count as missing in the transcript."""
    monkeypatch.setattr(transcript, limit, value)
    file = tmp_path / PATHS[agent]
    file.parent.mkdir(parents=True)
    message = {"role": "assistant", "content": "x" * 40}
    file.write_text(json.dumps({"messages": [message, message]}) + ("\n{}" if agent == "claude-code" else ""))
    with pytest.raises(AgentError, match=r"the transcript (has more|is larger|has a line longer) than"):
        read_transcripts(transcript_of(agent), tmp_path)


def test_differences_are_named() -> None:
    one, two = TranscriptTurn(text="one"), TranscriptTurn(text="two", calls=(TranscriptCall("run", {"a": 1}),))
    assert compare_turns([one, two], [one, two]) == []
    assert compare_turns([one], [one, two]) == [Difference("missing in transcript", None, 1, "'two' calls run")]
    assert compare_turns([one, two], [two]) == [Difference("missing in trace", 0, None, "'one'")]
    assert [found.what for found in compare_turns([one], [TranscriptTurn(text="other")])] == ["text"]
    changed = TranscriptTurn(text="two", calls=(TranscriptCall("run", {"a": 2}),))
    assert [found.detail for found in compare_turns([two], [changed])] == [
        "the trace has no call run '{\"a\": 1}'",
        "the transcript has no call run '{\"a\": 2}'",
    ]


def test_only_insignificant_differences_are_ignored() -> None:
    calls = (TranscriptCall("a", {"x": 1, "y": [2]}), TranscriptCall("b", {}))
    ours = TranscriptTurn(text=" text\n", reasoning="", calls=calls)
    assert compare_turns([ours], [TranscriptTurn(text="text", reasoning="thought", calls=calls[::-1])]) == []
    assert (
        compare_turns([TranscriptTurn(reasoning="other")], [TranscriptTurn(reasoning="thought")])[0].what == "reasoning"
    )
    filled = TranscriptTurn(calls=(TranscriptCall("a", {"x": 1, "all": False}),))
    left_out = TranscriptTurn(calls=(TranscriptCall("a", {"x": 1}),))
    assert compare_turns([filled], [left_out], fills_in=True) == []
    assert compare_turns([filled], [left_out]) != []
    assert compare_turns([left_out], [filled], fills_in=True) != []
