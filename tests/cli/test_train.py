"""`turngate train`: resuming a run, validation and reports."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tests import kit
from tests.batch.kit import AGENT, plan
from tests.cli.kit import run_cli, run_rejected
from tests.engines import local_kit  # skips without torch
from turngate.agents.spec import find_agent
from turngate.cli import app
from turngate.cli.options import TrainOptions
from turngate.cli.train import _HELD_OUT, _OPTIONS, _count_rounds
from turngate.config import MismatchLimits
from turngate.engines.local.weights import save
from turngate.errors import ConfigError
from turngate.render import BUILTIN_TOKENIZER
from turngate.rollout.ledger import LEDGER_NAME, LedgerHeader
from turngate.trainers.local import report
from turngate.trainers.local.display import print_result
from turngate.trainers.local.grpo import Step, UpdateMetrics
from turngate.trainers.local.run import TrainingResult, write_files
from turngate.trainers.local.training import StepTime

TASKS = f"{Path(__file__).parents[2] / 'examples' / 'train' / 'errands.py'}:training"
TASK_MODULE = "from tests.batch.kit import task\n\n\ndef some():\n    return [task('well-0')]\n"


def model_folder(folder: Path, hidden: int = local_kit.SHAPE.hidden) -> Path:
    """Write a model with random weights for the builtin tokenizer."""
    model = local_kit.model(vocabulary=kit.tokenizer().vocab_size, hidden=hidden)
    shape = model.shape
    save(model, folder)
    config = {
        "model_type": shape.kind,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "rms_norm_eps": shape.epsilon,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": shape.tied,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def arguments(tmp_path: Path) -> list[str | Path]:
    """Arguments of a run that takes seconds; later arguments override them."""
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "guesses.py").write_text(TASK_MODULE)
    agent = ["--agent", "shell", "--set", f"command=exec {sys.executable} -I -S {tmp_path / 'agent.py'}"]
    model: list[str | Path] = ["--model-folder", model_folder(tmp_path / "model"), "--tokenizer", BUILTIN_TOKENIZER]
    size = ["--n", "2", "--groups", "1", "--steps", "2", "--sandbox", "local"]
    return ["train", *agent, "--tasks", f"{tmp_path / 'guesses.py'}:some", *model, *size, "--out", tmp_path / "out"]


@pytest.mark.full
@pytest.mark.process
def test_resume_and_conflicting_options(arguments: list[str | Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = run_cli(*arguments)
    assert first.exit_code == 0 and "learning rate" not in first.output, first.output

    error = run_rejected(*arguments, "--steps", "3", "--n", "4")
    assert error == (
        f"{out} contains a run with different options (--n: was 2, is now 4); resume it with its original --n, or choose a "
        "different --out folder"
    )
    error = run_rejected(*arguments, "--steps", "3", "--model-folder", model_folder(tmp_path / "other"))
    assert "(--model-folder: was model, is now other)" in error and "or choose a different --out folder" in error
    error = run_rejected(*arguments, "--steps", "3", "--temperature", "0.5", "--seed", "3")
    assert "with its original --seed and --temperature or --max-turns, or choose a different --out folder" in error

    more = run_cli(*arguments, "--steps", "3", "--learning-rate", "0.002")
    assert more.exit_code == 0, more.output
    assert more.output.count("the learning rate is 0.002 from step 3 on; the checkpoint used 1e-05\n") == 1
    again = run_cli(*arguments, "--steps", "3", "--learning-rate", "0.1")
    assert "there is nothing to train" in again.output and "learning rate" not in again.output, again.output

    shutil.move(out / "checkpoints", tmp_path / "away")
    error = run_rejected(*arguments, "--steps", "2")
    assert error.startswith(
        f"--steps must be at least 3, not 2: {out / 'rollouts'} contains rollouts of later steps, but "
    )
    assert "has no checkpoint;" in error and "pass --steps 3 or more, or choose a different --out folder" in error
    assert run_cli(*arguments, "--steps", "3").exit_code == 0


@pytest.mark.full
@pytest.mark.process
def test_changed_held_out_set_is_rejected(arguments: list[str | Path], tmp_path: Path) -> None:
    held_out = ["--held-out", f"{tmp_path / 'guesses.py'}:some", "--steps", "1"]
    assert run_cli(*arguments, *held_out).exit_code == 0
    error = run_rejected(*arguments, *held_out, "--held-out-n", "2")
    assert "(--held-out-n: was 1, is now 2)" in error and "resume it with its original --held-out-n, or choose" in error


def test_changed_agent_sampling_names_the_flag(tmp_path: Path) -> None:
    first = plan(tmp_path / "out", tmp_path / "s", ["well-0"])
    header = LedgerHeader(batch="b", terms=first.terms(), tasks=first.digests(), made=1.0)
    first.folder.mkdir()
    (first.folder / LEDGER_NAME).write_bytes(msgspec.json.encode(header) + b"\n")
    agent = msgspec.structs.replace(first.agent, sampling={"top_p": 0.9})
    with pytest.raises(
        ConfigError, match=r'--agent: was not set, is now {"top_p":0.9}.* with its original --agent, or'
    ):
        _count_rounds(msgspec.structs.replace(first, agent=agent), _OPTIONS, tmp_path)


def test_every_changeable_term_names_a_flag(tmp_path: Path) -> None:
    fixed = {"image", "network", "cpus, memory", "environment", "endpoint's sampling", "grade"}
    fixed |= {"on-timeout", "on-failure", "on-limit", "on-lost"}
    agent = msgspec.structs.replace(find_agent("shell").spec, sampling={"top_p": 0.9})
    terms = {*plan(tmp_path / "out", tmp_path / "s", ["well-0"], agent=agent, name="a").terms(), "tasks"}
    commands: Any = typer.main.get_command(app)
    flags = {flag for option in commands.commands["train"].params for flag in option.opts}
    for options in (_OPTIONS, _HELD_OUT):
        named = {f"--{options.get(term, term)}".partition(" or ")[0] for term in terms - fixed}
        assert named <= flags


def test_alarm_flags_have_the_defaults_of_the_gateway() -> None:
    defaults = {name: getattr(TrainOptions, name) for name in ("mismatch_difference", "mismatch_share", "mismatch_kl")}
    limits = MismatchLimits()
    assert list(defaults.values()) == [limits.difference, limits.share, limits.kl]
    assert TrainOptions.stale_kl == limits.stale_kl


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--every", "0"], "--every must be at least 1, not 0"),
        (["--held-out-n", "0"], "--held-out-n must be at least 1, not 0"),
        (["--held-out", "nope"], "--held-out: nope does not exist; specify a task folder"),
        (["--tasks", "nope"], "--tasks: nope does not exist; specify a task folder"),
        (["--tasks", "x" * 300], f"--tasks: {'x' * 300} does not exist; specify a task folder"),
    ],
)
def test_invalid_option_is_named(arguments: list[str | Path], options: list[str], expected: str) -> None:
    assert run_rejected(*arguments, *options).startswith(expected)
    assert not Path(arguments[-1]).exists()


def step(number: int, tokens: int) -> Step:
    measured = UpdateMetrics(
        rows=1, tokens=1, loss=0.0, entropy=0.0, divergence=0.0, clipped=0.0, compared=0, difference=None, largest=None,
        refused=(), signal=True,
    )  # fmt: skip
    return Step(
        step=number, version=number, first=number, last=number, reward=1.0, rewards=(1.0,), passed=1.0, excluded=0, stale=0,
        measured=measured, gradient=0.0, seconds={}, sampled_tokens=tokens,
    )  # fmt: skip


def test_resumed_run_counts_its_own_tokens_and_minutes(tmp_path: Path) -> None:
    share = StepTime(whole=10.0, training=1.0, sampling=1.0, turngate=1.0)
    result = TrainingResult(steps=(step(1, 9000), step(2, 50)), shares=(share,), before=None, after=None, seconds=60.0)
    printed = io.StringIO()
    print_result(result, Console(file=printed, width=200))
    assert "50 sampled tokens, 5 per second" in printed.getvalue()
    assert "steps: 2, rollouts: 2, 1.0 minutes from step 2 on" in write_files(result, tmp_path, "t").read_text()


def test_folder_without_model_is_rejected(tmp_path: Path) -> None:
    arguments = ["train", "--tasks", TASKS, "--model-folder", str(tmp_path), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and "--model-folder" in done.output and "config.json" in done.output
    assert not (tmp_path / "out").exists()


def test_curve_ends_are_compared() -> None:
    found = report.compare_ends([0.1, 0.2, 0.3, 0.4, 0.8, 0.9, 1.0])
    assert found is not None and (round(found.before, 6), round(found.after, 6)) == (0.2, 0.9)
    assert report.compare_ends([0.5]) is None and report.compare_ends([None, 0.5]) is None
    short = report.compare_ends([0.25, 0.75])
    assert short is not None and (short.before, short.after) == (0.25, 0.75)


def test_unknown_reward_is_not_drawn_as_zero() -> None:
    assert report.draw_curve([None, 0.5])[1].endswith("unknown") and "0.00" not in report.draw_curve([None, 0.5])[1]
    assert report.draw_svg("t", [0.5, None, 1.0], []).count("<circle") == 2


def test_draw_svg() -> None:
    drawn = report.draw_svg("a < b", [0.0, 0.5, 1.0], [report.Comparison("held-out", 0.1, 0.9)], "note")
    assert drawn.startswith("<svg") and "a &lt; b" in drawn and drawn.count("<circle") == 3 and "0.90 after" in drawn
