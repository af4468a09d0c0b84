"""The first command: `turngate run` without a flag runs a real agent on the bundled task, and every agent earns its reward."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.kit import run_cli, start_cli
from tools.agent_names import AGENTS
from turngate.agents.install import cache_folder
from turngate.tasks import BUNDLED_TASK

pytestmark = pytest.mark.process
TASKS = Path(__file__).parents[2] / "examples" / "tasks"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, because sandboxes put unix sockets below it."""
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    yield folder
    shutil.rmtree(folder)


def run(folder: Path, *flags: str | Path) -> tuple[str, Any]:
    """Run `turngate run`, and return what it prints and its outcome."""
    (folder / "tmp").mkdir()
    env = {"TMPDIR": str(folder / "tmp"), "TURNGATE_CACHE": str(cache_folder())}
    with start_cli("run", "--data", folder / "data", *flags, **env) as running:
        code = running.wait_for_exit(240)
    assert code == 0, running.output
    [outcome] = (folder / "data" / "rollouts").glob("*/outcome.json")
    return running.plain, json.loads(outcome.read_text())


@pytest.mark.real
@pytest.mark.needs("agent:mini-swe-agent")
def test_run_without_arguments(folder: Path) -> None:
    printed, outcome = run(folder)
    assert printed.startswith("Running the bundled task fix-add.")
    assert "  grade   reward 1 (graded)" in printed
    assert "a scripted model replayed the task's reference solution" in printed and "synthetic" in printed
    assert (outcome["agent"], outcome["task"], outcome["status"]) == ("mini-swe-agent", "fix-add", "finished")
    assert (outcome["reward"], outcome["turns"], outcome["rows"]) == (1.0, 2, 1)
    [command] = [line for line in printed.splitlines() if line.endswith(" --tokens")]
    shown = run_cli(*command.split()[1:])
    assert (
        shown.exit_code == 0 and "return a + b" in run_cli("show", "last", "--data", folder / "data", "--full").stdout
    )
    assert "log-probability" in shown.stdout and "replayed reference solution" in shown.stdout
    exported = run_cli("export", "sft", "--data", folder / "data", "--out", folder / "sft.jsonl")
    left_out = "a rollout with a scripted model instead of a real one (replayed: reference solution)"
    assert left_out in exported.output and exported.exit_code != 0


ONLY = {("codex", "fix-add"), ("pi", "csv-totals")}  # in `make test-all`; the others in `make soak`


def replays() -> list[Any]:
    """Return every agent with the bundled task, and the agent that starts fastest with each of the examples."""
    pairs = [(agent, BUNDLED_TASK.name) for agent in AGENTS if agent != "mini-swe-agent"]
    pairs += [("pi", path.name) for path in sorted(TASKS.iterdir()) if path.name != BUNDLED_TASK.name]
    found = []
    for agent, task in pairs:
        tier = pytest.mark.full if (agent, task) in ONLY else pytest.mark.repeat
        found.append(pytest.param(agent, task, marks=[pytest.mark.needs(f"agent:{agent}"), tier], id=f"{agent}-{task}"))
    return found


@pytest.mark.parametrize(("agent", "task"), replays())
def test_replay_by_every_agent(folder: Path, agent: str, task: str) -> None:
    printed, outcome = run(folder, "--agent", agent, "--task", TASKS / task, "--script", "reference")
    assert (outcome["reward"], outcome["rows"]) == (1.0, 1), printed


@pytest.mark.needs("agent:mini-swe-agent", "bubblewrap")
@pytest.mark.repeat
def test_replay_in_bubblewrap(folder: Path) -> None:
    printed, outcome = run(folder, "--task", TASKS / "csv-totals", "--sandbox", "bubblewrap", "--script", "reference")
    assert (outcome["reward"], outcome["rows"]) == (1.0, 1), printed
