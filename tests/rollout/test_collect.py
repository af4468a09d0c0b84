"""What an agent leaves is copied to the host and not trusted there: it cannot make us write elsewhere, run anything, or fail."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit import say
from tests.rollout.kit import Stage, open_stage, own_agent
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
LINE = 'os.makedirs(os.environ["HOME"] + "/said/deep"); os.chdir(os.environ["HOME"] + "/said/deep")\n'


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with open_stage([say("Hello.")] * 5) as stage:
        yield stage


def every_file(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())


async def run_writer(stage: Stage, program: str, **how: Any) -> Outcome:
    outcome = await stage.run(program, agent=own_agent(WRITER), **how)
    assert outcome.status == "finished", outcome
    msgspec.json.encode(outcome)  # it can be written down, whatever is in it
    return outcome


# ── its transcript ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_transcript_that_agrees(stage: Stage) -> None:
    outcome = await run_writer(
        stage, LINE + 'open("a.jsonl", "w").write(json.dumps({"type": "said", "text": ask("Hi")}))'
    )
    assert (outcome.collected.transcript_turns, outcome.collected.differences) == (1, ())
    assert every_file(stage.folder / outcome.session / "home") == ["said/deep/a.jsonl"]


async def test_a_transcript_that_says_something_else(stage: Stage) -> None:
    program = LINE + 'ask("Hi")\nopen("a.jsonl", "w").write(json.dumps({"type": "said", "text": "Goodbye."}))'
    outcome = await run_writer(stage, program)
    [difference] = outcome.collected.differences
    assert "transcript 'Goodbye.', trace 'Hello.'" in difference


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
async def test_a_transcript_that_is_nonsense_does_not_fail_the_rollout(content: str, stage: Stage) -> None:
    program = LINE + f'ask("Hi")\nopen("a.jsonl", "w", errors="surrogatepass").write({content})'
    outcome = await run_writer(stage, program)
    told = " ".join((*outcome.collected.differences, *outcome.notes))
    assert told.isprintable() or "\x1b" not in msgspec.json.encode(outcome).decode()
    assert "missing in transcript" in told or "cannot be read" in told or "text" in told or "turns" in told, outcome


async def test_a_transcript_that_is_a_link_is_not_followed(stage: Stage, tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"type": "said", "text": "secret of the host"}')
    outcome = await run_writer(stage, LINE + f'ask("Hi")\nos.symlink({str(secret)!r}, "a.jsonl")')
    assert outcome.collected.files == 0
    assert "secret of the host" not in json.dumps(msgspec.to_builtins(outcome))
    assert not any(b"secret of the host" in p.read_bytes() for p in stage.folder.rglob("*") if p.is_file())


async def test_names_of_any_bytes_are_kept(stage: Stage) -> None:
    program = (
        LINE + 'ask("Hi")\nfor name in (b"\\xff\\x1b[31m.jsonl", b"new\\nline.jsonl", b"-rf.jsonl", b"$(x).jsonl"):'
    )
    outcome = await run_writer(stage, program + ' open(name, "w").write("x")')
    assert outcome.collected.files == 4
    names = sorted(os.fsencode(path.name) for path in (stage.folder / outcome.session / "home").rglob("*.jsonl"))
    assert names == [b"$(x).jsonl", b"-rf.jsonl", b"new\nline.jsonl", b"\xff\x1b[31m.jsonl"]


async def test_too_many_and_too_large_files_are_left_out_and_named(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "_MAX_FILES", 3)
    monkeypatch.setattr(collecting, "_MAX_FILE_BYTES", 1000)
    program = 'ask("Hi")\nos.makedirs(os.environ["HOME"] + "/logs"); os.chdir(os.environ["HOME"] + "/logs")\n'
    outcome = await run_writer(stage, program + 'for n in range(5): open(f"{n}.log", "w").write("x" * 2000)')
    assert outcome.collected.files == 0
    assert len(outcome.collected.missing) == 4
    assert outcome.collected.missing[0] == "home: 2 of 5 transcript and log files were not copied"
    assert "is larger than 1000 bytes" in outcome.collected.missing[1]


async def test_all_files_together_have_a_limit(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "_MAX_BYTES", 5000)
    program = 'ask("Hi")\nos.makedirs(os.environ["HOME"] + "/logs"); os.chdir(os.environ["HOME"] + "/logs")\n'
    outcome = await run_writer(stage, program + 'for n in range(5): open(f"{n}.log", "w").write("x" * 2000)')
    assert (outcome.collected.files, len(outcome.collected.missing)) == (2, 3)


# ── its output ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_of_too_much_output_the_end_is_kept(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "_MAX_FILE_BYTES", 10_000)
    outcome = await stage.run('print("x" * 100_000)\nprint("the end")')
    assert outcome.status == "finished" and outcome.collected.stdout.endswith("the end\n")
    assert (stage.folder / outcome.session / "stdout").stat().st_size == 10_000
    [missing] = outcome.collected.missing
    assert missing.startswith("stdout: ") and missing.endswith("; only its end was copied")


async def test_output_is_kept_as_it_is_and_told_as_text(stage: Stage) -> None:
    outcome = await stage.run('sys.stdout.buffer.write(b"\\xff\\x1b]0;title\\x07<script>alert(1)</script>")')
    assert (stage.folder / outcome.session / "stdout").read_bytes() == b"\xff\x1b]0;title\x07<script>alert(1)</script>"
    assert outcome.collected.stdout == "\ufffd\x1b]0;title\x07<script>alert(1)</script>"
    msgspec.json.encode(outcome)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
async def test_output_that_was_made_into_something_else(kind: str, stage: Stage, tmp_path: Path) -> None:
    """The agent owns the files that its output goes to."""
    make = {
        "link": f"os.symlink({str(tmp_path / 'nothing')!r}, out)",
        "pipe": "os.mkfifo(out)",
        "folder": "os.mkdir(out)",
        "device": 'os.symlink("/dev/zero", out)',
    }
    outcome = await stage.run(f'out = os.environ["HOME"] + "/.turngate/stdout"\nos.unlink(out)\n{make[kind]}')
    assert outcome.status == "finished", outcome
    assert outcome.collected.stdout == ""
    assert not (tmp_path / "nothing").exists()


# ── its working folder ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_links_that_lead_out_of_the_working_folder_are_left_out(stage: Stage, tmp_path: Path) -> None:
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
    outcome = await stage.run(program)
    assert outcome.collected.work
    work = stage.folder / outcome.session / "work"
    assert every_file(work) == ["d/fine", "e", "plain"]
    assert (work / "plain").stat().st_mode & 0o7000 == 0  # no set-user-id of the host's


async def test_a_working_folder_that_is_too_large_is_left_out_and_named(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turngate.sandboxes import posix

    monkeypatch.setattr(posix, "FOLDER_LIMIT", 1_000_000)
    outcome = await stage.run('open("big", "wb").truncate(5_000_000)\nprint("done")')
    assert (outcome.status, outcome.collected.work, outcome.collected.stdout) == ("finished", False, "done\n")
    assert outcome.collected.missing[0].startswith("work: ") and "1000000 bytes" in outcome.collected.missing[0]


async def test_a_working_folder_that_takes_too_long_is_left_out_and_named(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a file of a terabyte: what packs the folder comes to no end."""
    from turngate.rollout import rollout, stage_reporting
    from turngate.sandboxes import posix

    limit_s = paced(1.5)
    for module in (rollout, stage_reporting):
        monkeypatch.setattr(module, "LIMITS_S", {**stage_reporting.LIMITS_S, "collect": limit_s})
    monkeypatch.setattr(posix, "DOWNLOAD", "exec sleep 3600")
    outcome = await stage.run('print("done")')
    assert (outcome.status, outcome.collected.work, outcome.collected.stdout) == ("finished", False, "done\n")
    assert outcome.collected.missing == (f"work: copying took longer than {limit_s / 2:.0f} s",)


async def test_a_working_folder_that_is_gone(stage: Stage) -> None:
    outcome = await stage.run('import shutil; shutil.rmtree(os.getcwd()); print("done")')
    assert (outcome.status, outcome.collected.stdout) == ("finished", "done\n")
    assert outcome.collected.missing == ("work: the working folder itself, which no longer exists",)


async def test_a_home_that_is_gone(stage: Stage) -> None:
    program = 'ask("Hi")\nimport shutil; shutil.rmtree(os.environ["HOME"])'
    outcome = await run_writer(stage, program)
    assert outcome.collected.files == 0 and outcome.turns == 1


# ── a list of files that lies ───────────────────────────────────────────────────────────────────────────────────────


async def test_the_list_of_files_may_say_anything(tmp_path: Path) -> None:
    """In a container of its own an agent may have put its own programs in the place of `find` and `sh`."""
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

    class Lying:
        def __getattr__(self, name: str) -> Any:
            return getattr(sandbox, name)

        async def exec(self, command: Sequence[str], **how: Any) -> ExecResult:
            return ExecResult(0, listed) if "find" in command[2] else await sandbox.exec(command, **how)

        async def read(self, path: str, *, limit: int = 0) -> bytes:
            return b"read"

    try:
        launch = _launch(home)
        left = await collect(Lying(), launch, tmp_path / "left")  # type: ignore[arg-type]
    finally:
        await sandbox.stop()
    assert every_file(tmp_path / "left") == ["home/a", "home/c", "stderr", "stdout"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["left", "root"]
    assert left.files == 2
    assert len(left.missing) == 10
    msgspec.json.encode(left)


def _launch(home: str) -> Any:
    from turngate.agents.install import Installation
    from turngate.agents.launch import plan_launch

    words = dict.fromkeys(("base_url", "api_key", "model", "prompt"), "x")
    return plan_launch(own_agent(WRITER), Installation(), home=home, workdir=f"{home}/../work", **words)
