"""`turngate export`: its output, options and errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.cli.kit import run_cli, run_rejected, start_cli
from tests.kit import gateway, say
from turngate.engines.scripted import SYNTHETIC_NOTE


async def test_export_from_served_folder_reports_losses(tmp_path: Path) -> None:
    async with gateway([say("Hello."), say("Hm.")], data=tmp_path / "data") as g:
        session = await g.open()
        await g.ask(session.key, "Hi.")
        await g.seal(session.id)
        other = await g.open()
        await g.ask(other.key, "Hi.")
        out = tmp_path / "out" / "sft.jsonl"
        done = await asyncio.to_thread(run_cli, "export", "sft", "--data", tmp_path / "data", "--out", out)
        assert done.exit_code == 0, done.output
        assert f"1 record of 1 rollout in 1 group → {out}" in done.stdout
        assert "left out  1 × a rollout: its session is open (--unfinished includes it)" in done.stdout
        assert "lost      log-probabilities and policy versions" in done.stdout
        [record] = [json.loads(line) for line in out.read_text().splitlines()]
        assert record["messages"] == [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
        as_json = await asyncio.to_thread(run_cli, "export", "sft", "--data", tmp_path / "data", "--out", out, "--json")
        assert json.loads(as_json.stdout)["records"] == 1
        assert session.key not in out.read_text() + done.output


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ([], "data: no recordings in "),
        (["--unscored", "zero"], "--unscored must be one of keep, drop, not 'zero'"),
        (["--advantage", "best"], "--advantage must be one of normalised, leave_one_out, none, not 'best'"),
        (["--keep", "some"], "--keep must be one of all, best, not 'some'"),
        (["--min-reward", "nan"], "--min-reward must be a finite number, not nan"),
        (["--as", "tokens"], "--as does not apply to format rows; leave it out"),
    ],
)
def test_invalid_option_is_named(more: list[str], line: str, tmp_path: Path) -> None:
    arguments = ["export", "rows", "--data", tmp_path / "nothing", "--out", tmp_path / "x.jsonl", *more]
    assert run_rejected(*arguments).startswith(line)
    assert list(tmp_path.iterdir()) == []


async def record_sessions(data: Path, count: int) -> list[str]:
    async with gateway([say("Hello.")] * count, data=data) as g:
        sessions = []
        for _ in range(count):
            session = await g.open()
            await g.ask(session.key, "Hi.")
            await g.seal(session.id)
            sessions.append(session.id)
    return sessions


async def test_synthetic_logprobs_are_noted(tmp_path: Path) -> None:
    await record_sessions(tmp_path / "data", 2)
    arguments = ["--data", tmp_path / "data", "--out", tmp_path / "out.jsonl"]
    for format in ("rows", "verl", "slime"):
        assert f"note      2 rollouts: {SYNTHETIC_NOTE}" in run_cli("export", format, *arguments).stdout
    assert json.loads(run_cli("export", "rows", *arguments, "--json").stdout)["notes"] == [
        f"2 rollouts: {SYNTHETIC_NOTE}"
    ]
    assert SYNTHETIC_NOTE not in run_cli("export", "sft", *arguments).stdout


async def test_kept_and_replaced_files_are_reported(tmp_path: Path) -> None:
    one, other = await record_sessions(tmp_path / "data", 2)
    folder = tmp_path / "trajectories"
    arguments = ["export", "atif", "--data", tmp_path / "data", "--out", folder]
    assert f"→ {folder}\n" in run_cli(*arguments, "--session", one).stdout
    assert f"→ {folder} (1 other file kept)\n" in run_cli(*arguments, "--session", other).stdout
    assert f"→ {folder} (2 files replaced)\n" in run_cli(*arguments).stdout


@pytest.mark.sample(1)
@pytest.mark.process
@pytest.mark.parametrize("out_option", [["--out", "{}/"], ["--out={}/"]])
async def test_trailing_slash_does_not_replace_file(tmp_path: Path, out_option: list[str]) -> None:
    await record_sessions(tmp_path / "data", 1)
    out = tmp_path / "rows.jsonl"
    out.write_text("before")
    arguments = [word.format(out) for word in out_option]
    with start_cli("export", "rows", "--data", tmp_path / "data", *arguments) as one:
        one.wait_until(lambda: "names a folder, but rows are written to a single file" in one.output)
    with start_cli("export", "atif", "--data", tmp_path / "data", *arguments) as one:
        one.wait_until(lambda: "is a file, but a folder is needed" in one.output)
    assert out.read_text() == "before"


async def test_filters_without_match_are_named(tmp_path: Path) -> None:
    await record_sessions(tmp_path / "data", 1)
    arguments = ["export", "rows", "--data", tmp_path / "data", "--out", tmp_path / "out.jsonl"]
    for more in (["--min-reward", "5"], ["--resolved"], ["--session", "nope"], ["--unscored", "drop"]):
        assert run_rejected(*arguments, *more).startswith(
            f"data: no rollout can be exported with {' '.join(more)} (recorded: 1 rollout); change the filters"
        )
    error = run_rejected(arguments[0], "dpo", *arguments[2:])
    assert "so no file was written; left out: 1 × a rollout that cannot be compared, because it has no group" in error
    assert not (tmp_path / "out.jsonl").exists()
