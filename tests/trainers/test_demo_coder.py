"""Tests for the parts of `make demo MODEL=coder` that need no GPU: the refusal, and the commands."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from examples import demo_coder
from examples.demo_coder import EXAMPLE, Gpu, explain_refusal, list_held_out, plan_tasks, plan_training
from turngate.cli.options import MakeRepairsOptions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("gpu", "texts"),
    [
        (Gpu("2.13.0+cpu", cuda=False, driver=False), ["no NVIDIA driver", "at least 48 GB", "run `make demo`"]),
        (Gpu("", cuda=False, driver=True), ["torch is not installed", "pip install torch"]),
        (Gpu("2.13.0+cpu", cuda=False, driver=True), ["torch 2.13.0+cpu cannot use a GPU", "--force-reinstall torch"]),
        (Gpu("2.13.0", cuda=True, driver=True, memory_gb=25.4), ["needs about 48 GB", "this GPU has 25 GB"]),
    ],
    ids=["no GPU", "no torch", "torch without CUDA", "too little memory"],
)
def test_refusal_says_what_to_do(gpu: Gpu, texts: list[str]) -> None:
    refusal = explain_refusal(gpu)
    assert all(text in refusal for text in texts), refusal


def test_large_gpu_is_accepted() -> None:
    assert explain_refusal(Gpu("2.13.0", cuda=True, driver=True, memory_gb=51.5)) == ""


def test_demo_refuses_before_it_downloads_or_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "demo" / "result.json"
    kept.parent.mkdir()
    kept.write_text("{}")
    monkeypatch.setattr(demo_coder, "find_gpu", lambda: Gpu("2.13.0+cpu", cuda=False, driver=False))
    monkeypatch.setattr("sys.argv", ["demo.py", "--model", "coder", "--out", str(kept.parent)])
    with pytest.raises(SystemExit, match="needs a GPU"):
        runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="__main__")
    assert kept.exists()


def test_tasks_are_made_with_known_options() -> None:
    command = plan_tasks(Path("/out"))
    assert command[1:6] == ["-m", "turngate", "tasks", "make", "repairs"]
    flags = {word.removeprefix("--").replace("-", "_") for word in command if word.startswith("--")}
    assert flags <= set(MakeRepairsOptions.__dataclass_fields__) and "/out/tasks" in command


@pytest.mark.parametrize("sandbox", ["bubblewrap", "local"])
def test_training_uses_the_tasks_and_no_held_out_package(sandbox: str, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    row = {"id": "t", "metadata": {"package": "munch"}}
    (tmp_path / "tasks" / "held-out.jsonl").write_text(json.dumps(row) + "\n")
    held_out = list_held_out(tmp_path / "tasks")
    assert held_out == {"munch"}
    expert, reviews, train = plan_training(tmp_path, Path("/model"), held_out, sandbox, fast=True, seed=3)
    assert [Path(command[1]).name for command in (expert, reviews, train)] == ["expert.py", "reviews.py", "train.py"]
    assert "munch==4.0.0" not in reviews and "tinydb==4.9.0" in reviews
    start = train.index("--sft")
    assert train[start + 1 : start + 3] == [str(tmp_path / "expert" / "sft.jsonl"), str(tmp_path / "reviews.jsonl")]
    assert train[train.index("--seed") + 1] == "3" and train[train.index("--sandbox") + 1] == sandbox
    assert ("--cold" in train) == ("--cold" in expert) == (sandbox != "local")


@pytest.mark.parametrize("fast", [True, False])
def test_programs_know_the_options(fast: bool) -> None:
    for command in plan_training(Path("/out"), Path("/model"), (), "bubblewrap", fast=fast, seed=0):
        source = Path(command[1]).read_text()
        assert Path(command[1]).parent == EXAMPLE
        for word in command[2:]:
            assert not word.startswith("--") or f'"{word}"' in source, f"{command[1]} has no option {word}"
