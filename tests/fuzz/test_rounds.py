"""Rounds of fuzzing collect findings, go on after them, and leave their figures in the results folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.fuzz import __main__ as command
from tests.fuzz import rounds, together
from tests.fuzz.rounds import Round
from tests.fuzz.targets import Target
from tests.speed import scaled

MINUTE = 60.0


def plant(monkeypatch: pytest.MonkeyPatch, check: Callable[[Any], None], name: str = "planted") -> None:
    """Replace the targets by one that checks numbers, or bytes if it is guided by coverage."""
    numbers = st.integers(0, 1_000_000)
    target = Target(name, numbers, check, lambda: [b"x12345"], "tests/fuzz")
    monkeypatch.setattr(rounds, "TARGETS", (target,))


def end(one: Round) -> None:
    one._end = time.monotonic() - 1


@pytest.mark.parametrize("name", ["planted", "covered-planted"])
def test_finding_does_not_end_the_round(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def check(value: Any) -> None:
        if one.inputs == 200:
            end(one)
        if one.inputs % 2:
            raise ValueError(f"planted {one.inputs}")

    plant(monkeypatch, check)
    one = Round(name, MINUTE, 1)
    one.run()
    assert (one.inputs, one.found, one.complete) == (200, 100, True)
    [found] = one.findings.values()  # one kind: the messages differ only in a number
    assert found.error == "ValueError('planted 1')"
    assert "in check" in found.place


def test_shrinking_finds_a_smaller_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(value: int) -> None:
        if value > 1000:
            end(one)
            raise ValueError("planted")

    plant(monkeypatch, check)
    one = Round("planted", MINUTE, 1, shrink=True)
    one.run()
    [found] = one.findings.values()
    assert "value=1001" in found.notes


def test_round_that_is_killed_has_left_its_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inputs = 0

    def check(value: int) -> None:
        nonlocal inputs
        inputs += 1
        if inputs == 3:
            raise ValueError("planted")
        if inputs % 20 == 0:
            raise KeyboardInterrupt

    plant(monkeypatch, check, "call-forms")
    monkeypatch.setattr(rounds, "_REPORT_S", -1.0)
    together.make_folders(tmp_path)
    for _ in range(2):  # the second process continues with the next round
        with pytest.raises(KeyboardInterrupt):
            together.fuzz_in_rounds(tmp_path, "call-forms", time.time() + MINUTE, MINUTE, 1)
    first, second = together.read_rounds(tmp_path, "call-forms")
    assert (first["round"], first["inputs"], first["found"], first["complete"]) == (1, 19, 1, False)
    assert (second["round"], second["inputs"], second["found"]) == (2, 19, 0)
    assert first["seed"] != second["seed"]
    assert sorted(file.suffix for file in (tmp_path / "findings").iterdir()) == [".input", ".txt"]
    summary = together.summarize(tmp_path)
    assert "| `parse-…` (7), `call-forms` | 0 of 2 | 38 | 0.0 | 1 |" in summary
    assert "incomplete rounds [1, 2]; FOUND" in summary


@pytest.mark.full
@pytest.mark.process
def test_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = str(scaled(8))  # includes starting the processes
    options = ["--results", str(tmp_path), "--seconds", seconds, "--round", "5", "--only", "transcript"]
    monkeypatch.setattr(sys, "argv", ["fuzz", *options])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert not ended.value.code, capsys.readouterr().out
    for name in ("transcript", "covered-transcript"):
        assert all(one["inputs"] for one in together.read_rounds(tmp_path, name)[:-1])
        assert together.read_rounds(tmp_path, name)[0]["complete"]


def test_every_target_is_in_one_row_of_the_summary() -> None:
    rows = together.group_targets().values()
    assert all(rows)
    assert sorted(name for names in rows for name in names) == sorted(rounds.NAMES)
    assert len(rounds.NAMES) == 37  # as in docs/reliability.md
