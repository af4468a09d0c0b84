"""`turngate export` as a person meets it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.cli.kit import ran, refused
from tests.kit import gateway, say


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
        assert "left out  1 × its session is open (--unfinished takes it)" in done.stdout
        assert "lost      log-probabilities and policy versions" in done.stdout
        [record] = [json.loads(line) for line in out.read_text().splitlines()]
        assert record["messages"] == [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
        told = await asyncio.to_thread(ran, "export", "sft", "--data", tmp_path / "data", "--out", out, "--json")
        assert json.loads(told.stdout)["records"] == 1
        assert session.key not in out.read_text() + done.output


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ([], "data: there is no "),
        (["--unscored", "zero"], "unscored: 'zero' is none of keep, drop"),
        (["--advantage", "best"], "advantage: 'best' is none of normalised, leave_one_out, none"),
        (["--keep", "some"], "keep: 'some' is none of all, best"),
        (["--min-reward", "nan"], "min_reward: nan is no finite number"),
        (["--as", "tokens"], "as: means nothing for rows; leave out --as"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_name_of_its_flag(more: list[str], line: str, tmp_path: Path) -> None:
    words = ["export", "rows", "--data", tmp_path / "nothing", "--out", tmp_path / "x.jsonl", *more]
    assert refused(*words).startswith(line)
    assert list(tmp_path.iterdir()) == []
