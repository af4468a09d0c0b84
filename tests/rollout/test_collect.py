"""Files of an agent are copied to the host without trust: they cannot cause writes elsewhere, run anything, or fail the rollout."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit import say
from tests.rollout.kit import Harness, open_harness, parse_agent
from tests.speed import paced
from turngate.rollout import collect as collecting
from turngate.rollout.collect import collect
from turngate.rollout.outcome import Outcome
from turngate.sandboxes.base import ExecResult, SandboxSpec
from turngate.sandboxes.local import LocalBackend

pytestmark = pytest.mark.process

WRITER = """
name = "writer"
title = "Writes transcripts"
dialect = "chat"
command = ["python3", "-"]
stdin = "{prompt}"
logs = ["logs/*.log"]
[env]
TURNGATE_BASE_URL = "{base_url}"
TURNGATE_API_KEY = "{api_key}"
TURNGATE_MODEL = "{model}"
[transcript]
path = "said/**/*.jsonl"
turn = "type == 'said' && {text: text, calls: calls}"
"""
ENTER_FOLDER = 'os.makedirs(os.environ["HOME"] + "/said/deep"); os.chdir(os.environ["HOME"] + "/said/deep")\n'


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with open_harness([say("Hello.")] * 5) as harness:
        yield harness


def list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())


async def run_writer(harness: Harness, program: str, **options: Any) -> Outcome:
    outcome = await harness.run(program, agent=parse_agent(WRITER), **options)
    assert outcome.status == "finished", outcome
    msgspec.json.encode(outcome)  # any content must be serializable
    return outcome


# ── transcript ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_matching_transcript_has_no_differences(harness: Harness) -> None:
    outcome = await run_writer(
        harness, ENTER_FOLDER + 'open("a.jsonl", "w").write(json.dumps({"type": "said", "text": ask("Hi")}))'
    )
    assert (outcome.collected.transcript_turns, outcome.collected.differences) == (1, ())
    assert list_files(harness.folder / outcome.session / "home") == ["said/deep/a.jsonl"]


async def test_transcript_with_other_text_is_reported(harness: Harness) -> None:
    program = ENTER_FOLDER + 'ask("Hi")\nopen("a.jsonl", "w").write(json.dumps({"type": "said", "text": "Goodbye."}))'
    outcome = await run_writer(harness, program)
    [difference] = outcome.collected.differences
    assert "transcript 'Goodbye.', trace 'Hello.'" in difference


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "content",
    [
        '"[" * 200_000',
        '"{\\"a\\":" * 100_000 + "1" + "}" * 100_000',
        'json.dumps({"type": "said", "text": "\\ud800\\udc00\\ud800"})',
        'json.dumps({"type": "said", "calls": [{"name": "\\ud800\\x1b[31m", "arguments": "[" * 100_000}]})',
        'json.dumps({"type": "said", "calls": "none", "text": 7})',
        '"\\x00" * 1000',
        '"1" * 100_000',
        '(json.dumps({"type": "said", "text": ""}) + "\\n") * 30_000',
    ],
    ids=["brackets", "braces", "halves", "call", "types", "nulls", "digits", "many"],
)
async def test_invalid_transcript_does_not_fail_rollout(content: str, harness: Harness) -> None:
    program = ENTER_FOLDER + f'ask("Hi")\nopen("a.jsonl", "w", errors="surrogatepass").write({content})'
    outcome = await run_writer(harness, program)
    messages = " ".join((*outcome.collected.differences, *outcome.notes))
    assert messages.isprintable() or "\x1b" not in msgspec.json.encode(outcome).decode()
    assert (
        "missing in transcript" in messages or "cannot be read" in messages or "text" in messages or "turns" in messages
    ), outcome


async def test_transcript_link_is_not_followed(harness: Harness, tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"type": "said", "text": "secret of the host"}')
    outcome = await run_writer(harness, ENTER_FOLDER + f'ask("Hi")\nos.symlink({str(secret)!r}, "a.jsonl")')
    assert outcome.collected.files == 0
    assert "secret of the host" not in json.dumps(msgspec.to_builtins(outcome))
    assert not any(b"secret of the host" in p.read_bytes() for p in harness.folder.rglob("*") if p.is_file())


async def test_file_names_of_any_bytes_are_kept(harness: Harness) -> None:
    program = (
        ENTER_FOLDER
        + 'ask("Hi")\nfor name in (b"\\xff\\x1b[31m.jsonl", b"new\\nline.jsonl", b"-rf.jsonl", b"$(x).jsonl"):'
    )
    outcome = await run_writer(harness, program + ' open(name, "w").write("x")')
    assert outcome.collected.files == 4
    names = sorted(os.fsencode(path.name) for path in (harness.folder / outcome.session / "home").rglob("*.jsonl"))
    assert names == [b"$(x).jsonl", b"-rf.jsonl", b"new\nline.jsonl", b"\xff\x1b[31m.jsonl"]


async def test_excess_and_oversized_files_are_skipped_and_named(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "_MAX_FILES", 3)
    monkeypatch.setattr(collecting, "_MAX_FILE_BYTES", 1000)
    program = 'ask("Hi")\nos.makedirs(os.environ["HOME"] + "/logs"); os.chdir(os.environ["HOME"] + "/logs")\n'
    outcome = await run_writer(harness, program + 'for n in range(5): open(f"{n}.log", "w").write("x" * 2000)')
    assert outcome.collected.files == 0
    assert len(outcome.collected.missing) == 4
    assert outcome.collected.missing[0] == "home: skipped 2 of 5 transcript and log files, because at most 3 are copied"
    assert "is larger than 1000 bytes" in outcome.collected.missing[1]


async def test_total_size_of_files_is_limited(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "_MAX_BYTES", 5000)
    program = 'ask("Hi")\nos.makedirs(os.environ["HOME"] + "/logs"); os.chdir(os.environ["HOME"] + "/logs")\n'
    outcome = await run_writer(harness, program + 'for n in range(5): open(f"{n}.log", "w").write("x" * 2000)')
    assert (outcome.collected.files, len(outcome.collected.missing)) == (2, 3)


# ── output ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_end_of_long_output_is_kept(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "_MAX_FILE_BYTES", 10_000)
    outcome = await harness.run('print("x" * 100_000)\nprint("the end")')
    assert outcome.status == "finished" and outcome.collected.stdout.endswith("the end\n")
    assert (harness.folder / outcome.session / "stdout").stat().st_size == 10_000
    [missing] = outcome.collected.missing
    assert missing.startswith("stdout: ") and missing.endswith("; only its end was copied")


async def test_output_is_kept_raw_and_reported_as_text(harness: Harness) -> None:
    outcome = await harness.run('sys.stdout.buffer.write(b"\\xff\\x1b]0;title\\x07<script>alert(1)</script>")')
    assert (
        harness.folder / outcome.session / "stdout"
    ).read_bytes() == b"\xff\x1b]0;title\x07<script>alert(1)</script>"
    assert outcome.collected.stdout == "\ufffd\x1b]0;title\x07<script>alert(1)</script>"
    msgspec.json.encode(outcome)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
async def test_replaced_output_file_is_ignored(kind: str, harness: Harness, tmp_path: Path) -> None:
    """The agent can replace the files that its output goes to."""
    make = {
        "link": f"os.symlink({str(tmp_path / 'nothing')!r}, out)",
        "pipe": "os.mkfifo(out)",
        "folder": "os.mkdir(out)",
        "device": 'os.symlink("/dev/zero", out)',
    }
    outcome = await harness.run(f'out = os.environ["HOME"] + "/.turngate/stdout"\nos.unlink(out)\n{make[kind]}')
    assert outcome.status == "finished", outcome
    assert outcome.collected.stdout == ""
    assert not (tmp_path / "nothing").exists()


# ── working folder ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_links_out_of_working_folder_are_skipped(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret of the host")
    program = f"""
os.symlink({str(tmp_path / "secret")!r}, "file")
os.symlink({str(tmp_path)!r}, "folder")
os.symlink("../../../../../etc", "up")
os.mkdir("d"); os.symlink("..", "d/fine"); os.symlink("d", "e"); os.symlink("e/../../x", "sly")
open("plain", "w").write("x"); os.chmod("plain", 0o7777)
os.mkfifo("pipe")
import socket; socket.socket(socket.AF_UNIX).bind("socket")
"""
    outcome = await harness.run(program)
    assert outcome.collected.work
    work = harness.folder / outcome.session / "work"
    assert list_files(work) == ["d/fine", "e", "plain"]
    assert (work / "plain").stat().st_mode & 0o7000 == 0  # no setuid bit on the host


async def test_oversized_working_folder_is_skipped_and_named(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    from turngate.sandboxes import posix

    monkeypatch.setattr(posix, "FOLDER_LIMIT", 1_000_000)
    outcome = await harness.run('open("big", "wb").truncate(5_000_000)\nprint("done")')
    assert (outcome.status, outcome.collected.work, outcome.collected.stdout) == ("finished", False, "done\n")
    assert outcome.collected.missing[0].startswith("work: ") and "1000000 bytes" in outcome.collected.missing[0]


async def test_slow_copy_of_working_folder_is_skipped_and_named(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing the folder never ends, as with a file of a terabyte."""
    from turngate.rollout import rollout, stages
    from turngate.sandboxes import posix

    limit_s = paced(1.5)
    for module in (rollout, stages):
        monkeypatch.setattr(module, "LIMITS_S", {**stages.LIMITS_S, "collect": limit_s})
    monkeypatch.setattr(posix, "DOWNLOAD", "exec sleep 3600")
    outcome = await harness.run('print("done")')
    assert (outcome.status, outcome.collected.work, outcome.collected.stdout) == ("finished", False, "done\n")
    assert outcome.collected.missing == (f"work: copying took longer than {limit_s / 2:.0f} s",)


async def test_removed_working_folder_is_named(harness: Harness) -> None:
    outcome = await harness.run('import shutil; shutil.rmtree(os.getcwd()); print("done")')
    assert (outcome.status, outcome.collected.stdout) == ("finished", "done\n")
    assert outcome.collected.missing == ("work: the working folder no longer exists",)


async def test_removed_home_folder_is_tolerated(harness: Harness) -> None:
    program = 'ask("Hi")\nimport shutil; shutil.rmtree(os.environ["HOME"])'
    outcome = await run_writer(harness, program)
    assert outcome.collected.files == 0 and outcome.turns == 1


# ── forged file list ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_forged_file_list_cannot_escape_folder(tmp_path: Path) -> None:
    """In its container, an agent may have replaced `find` and `sh`."""
    backend = LocalBackend(tmp_path / "root")
    sandbox = await backend.create(SandboxSpec())
    home = sandbox.home
    names = [
        f"{home}/../../../../../../etc/passwd",
        "/etc/passwd",
        f"{home}x/file",
        home,
        f"{home}/",
        f"{home}//..//file",
        f"{home}/a",
        f"{home}/a/b",  # both a file and a folder
        f"{home}/{'n' * 300}",
        f"{home}/./c",
        "relative",
    ]
    listed = b"\0".join(os.fsencode(name) for name in names) + b"\0\xff\0"

    class ForgedSandbox:
        def __getattr__(self, name: str) -> Any:
            return getattr(sandbox, name)

        async def exec(self, command: Sequence[str], **options: Any) -> ExecResult:
            return ExecResult(0, listed) if "find" in command[2] else await sandbox.exec(command, **options)

        async def read(self, path: str, *, limit: int = 0) -> bytes:
            return b"read"

    try:
        launch = plan_agent_launch(home)
        collected = await collect(ForgedSandbox(), launch, tmp_path / "left")  # type: ignore[arg-type]
    finally:
        await sandbox.stop()
    assert list_files(tmp_path / "left") == ["home/a", "home/c", "stderr", "stdout"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["left", "root"]
    assert collected.files == 2
    assert len(collected.missing) == 10
    msgspec.json.encode(collected)


def plan_agent_launch(home: str) -> Any:
    from turngate.agents.installation import Installation
    from turngate.agents.launch import plan_launch

    words = dict.fromkeys(("base_url", "api_key", "model", "prompt"), "x")
    return plan_launch(parse_agent(WRITER), Installation(), home=home, workdir=f"{home}/../work", **words)
