"""`turngate export` as a person meets it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.cli.kit import process, ran, refused
from tests.kit import gateway, say
from turngate.engines.scripted import SYNTHETIC_NOTE


async def test_a_folder_that_is_served_is_exported_and_what_is_lost_is_told(tmp_path: Path) -> None:
    async with gateway([say("Hello."), say("Hm.")], data=tmp_path / "data") as g:
        session = await g.open()
        await g.ask(session.key, "Hi.")
        await g.seal(session.id)
        other = await g.open()
        await g.ask(other.key, "Hi.")
        out = tmp_path / "out" / "sft.jsonl"
        done = await asyncio.to_thread(ran, "export", "sft", "--data", tmp_path / "data", "--out", out)
        assert done.exit_code == 0, done.output
        assert f"1 record of 1 rollout in 1 group → {out}" in done.stdout
        assert "left out  1 × its session is open (--unfinished includes it)" in done.stdout
        assert "lost      log-probabilities and policy versions" in done.stdout
        [record] = [json.loads(line) for line in out.read_text().splitlines()]
        assert record["messages"] == [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
        told = await asyncio.to_thread(ran, "export", "sft", "--data", tmp_path / "data", "--out", out, "--json")
        assert json.loads(told.stdout)["records"] == 1
        assert session.key not in out.read_text() + done.output


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ([], "data: no turngate.db in "),
        (["--unscored", "zero"], "unscored must be one of keep, drop, not 'zero'"),
        (["--advantage", "best"], "advantage must be one of normalised, leave_one_out, none, not 'best'"),
        (["--keep", "some"], "keep must be one of all, best, not 'some'"),
        (["--min-reward", "nan"], "min_reward must be a finite number, not nan"),
        (["--as", "tokens"], "as does not apply to format rows; leave out --as"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_name_of_its_flag(more: list[str], line: str, tmp_path: Path) -> None:
    words = ["export", "rows", "--data", tmp_path / "nothing", "--out", tmp_path / "x.jsonl", *more]
    assert refused(*words).startswith(line)
    assert list(tmp_path.iterdir()) == []


async def _recorded(data: Path, count: int) -> list[str]:
    async with gateway([say("Hello.")] * count, data=data) as g:
        sessions = []
        for _ in range(count):
            session = await g.open()
            await g.ask(session.key, "Hi.")
            await g.seal(session.id)
            sessions.append(session.id)
    return sessions


async def test_log_probabilities_that_are_made_up_are_noted(tmp_path: Path) -> None:
    await _recorded(tmp_path / "data", 2)
    words = ["--data", tmp_path / "data", "--out", tmp_path / "out.jsonl"]
    for format in ("rows", "verl", "slime"):
        assert f"note      2 rollouts: {SYNTHETIC_NOTE}" in ran("export", format, *words).stdout
    assert json.loads(ran("export", "rows", *words, "--json").stdout)["notes"] == [f"2 rollouts: {SYNTHETIC_NOTE}"]
    assert SYNTHETIC_NOTE not in ran("export", "sft", *words).stdout


async def test_what_was_in_a_folder_is_told(tmp_path: Path) -> None:
    one, other = await _recorded(tmp_path / "data", 2)
    folder = tmp_path / "trajectories"
    words = ["export", "atif", "--data", tmp_path / "data", "--out", folder]
    assert f"→ {folder}\n" in ran(*words, "--session", one).stdout
    assert f"→ {folder} (1 other file kept)\n" in ran(*words, "--session", other).stdout
    assert f"→ {folder} (2 files replaced)\n" in ran(*words).stdout


@pytest.mark.process
@pytest.mark.parametrize("spelled", [["--out", "{}/"], ["--out={}/"]])
async def test_a_slash_at_the_end_is_a_folder_and_replaces_no_file(tmp_path: Path, spelled: list[str]) -> None:
    await _recorded(tmp_path / "data", 1)
    out = tmp_path / "rows.jsonl"
    out.write_text("before")
    words = [word.format(out) for word in spelled]
    with process("export", "rows", "--data", tmp_path / "data", *words) as one:
        one.until(lambda: "remove the trailing /" in one.output)
    with process("export", "atif", "--data", tmp_path / "data", *words) as one:
        one.until(lambda: "is a file, but a folder is needed" in one.output)
    assert out.read_text() == "before"


async def test_filters_that_leave_nothing_are_named(tmp_path: Path) -> None:
    await _recorded(tmp_path / "data", 1)
    words = ["export", "rows", "--data", tmp_path / "data", "--out", tmp_path / "out.jsonl"]
    for more in (["--min-reward", "5"], ["--resolved"], ["--session", "nope"], ["--unscored", "drop"]):
        assert refused(*words, *more).startswith(
            f"data: no rollout in the folder matches {' '.join(more)} (it contains 1 rollout); change the filters"
        )
    assert "so no file was written; left out: 1 × it has no group" in refused(words[0], "dpo", *words[2:])
    assert not (tmp_path / "out.jsonl").exists()
