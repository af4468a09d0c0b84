"""`turngate train`: what is wrong is told before anything is made."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from tests.engines import local_kit  # noqa: F401  # skips where there is no torch
from turngate.cli import app
from turngate.trainers.local import report

TASKS = f"{Path(__file__).parents[2] / 'examples' / 'train' / 'errands.py'}:training"


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    words = ["train", "--tasks", TASKS, "--model-folder", str(tmp_path), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "model_folder" in done.output and "config.json" in done.output
    assert not (tmp_path / "out").exists()


def test_a_curve_compares_its_ends() -> None:
    found = report.gain([0.1, 0.2, 0.3, 0.4, 0.8, 0.9, 1.0])
    assert found is not None and (round(found.before, 6), round(found.after, 6)) == (0.2, 0.9)
    assert report.gain([0.5]) is None and report.gain([None, 0.5]) is None
    short = report.gain([0.25, 0.75])
    assert short is not None and (short.before, short.after) == (0.25, 0.75)


def test_a_reward_that_is_not_known_is_not_drawn_as_none_at_all() -> None:
    assert report.curve([None, 0.5])[1].endswith("not known") and "0.00" not in report.curve([None, 0.5])[1]
    assert report.svg("t", [0.5, None, 1.0], []).count("<circle") == 2


def test_a_picture_is_a_picture() -> None:
    drawn = report.svg("a < b", [0.0, 0.5, 1.0], [report.Compared("held-out", 0.1, 0.9)], "note")
    assert drawn.startswith("<svg") and "a &lt; b" in drawn and drawn.count("<circle") == 3 and "0.90 after" in drawn
