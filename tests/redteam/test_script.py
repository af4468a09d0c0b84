"""Cheating works against a script with a reward file; and what only a judge can see through."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.redteam import attacks
from tests.sandboxes.kit import backends, processes
from tests.speed import scaled
from tests.tasks.grading import kit
from turngate.sandboxes.base import Resources
from turngate.tasks.grading.types import GradingEnvironment

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.full, pytest.mark.alone]


@pytest.fixture(scope="module")
def prices(tmp_path_factory: pytest.TempPathFactory) -> kit.Task:
    return kit.scripted(tmp_path_factory.mktemp("prices"), timeout_s=scaled(2))  # some works use it up


@pytest.mark.real
@pytest.mark.promise(6)
@pytest.mark.parametrize("name", attacks.SCRIPT)
async def test_cheating_does_not_pay(name: str, prices: kit.Task, walled: GradingEnvironment, tmp_path: Path) -> None:
    work = kit.worked(tmp_path / "work", {"prices.py": attacks.SCRIPT[name] + kit.BUG}, kit.FOLDER)
    found = await kit.graded(prices, work, walled)
    assert (found.kind, found.reward) == ("graded", 0.0), (found.message, found.log)
    assert not processes("tests/check.py")


@pytest.mark.parametrize("name", [*attacks.BEYOND, "writes the reward", "kills the script", "leaves a daemon"])
async def test_a_judge_sees_through_what_a_script_cannot(name: str, walled: GradingEnvironment, tmp_path: Path) -> None:
    cheat = {**attacks.SCRIPT, **attacks.BEYOND}[name]
    work = kit.worked(tmp_path / "work", {"prices.py": kit.BUG + cheat}, kit.FOLDER)
    found = await kit.graded(kit.probed(tmp_path / "task"), work, walled)
    assert (found.kind, found.reward) == ("graded", 0.0), (found.message, found.log)


async def test_the_probe_sees_no_answers(walled: GradingEnvironment, tmp_path: Path) -> None:
    """A work that looks for what is expected, wherever it runs, and says that."""
    look = """
import json, os, subprocess
def total(prices):
    found = subprocess.run("grep -rIls '10[.]5]' / --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr",
                           shell=True, capture_output=True, text=True).stdout
    return found + " ".join(sorted(os.listdir("/tests")))
"""
    task = kit.probed(tmp_path / "task")
    show = 'cat "$TURNGATE_LOGS/probe/answer.json"; ls -a "$(pwd)"; cat prices.py\n' + kit.JUDGE
    (tmp_path / "task" / "tests" / "test.sh").write_text(show)
    found = await kit.graded(task, kit.worked(tmp_path / "work", {"prices.py": look}, kit.FOLDER), walled)
    assert (found.kind, found.reward) == ("graded", 0.0)
    assert '["inputs run.sh", "inputs run.sh", "inputs run.sh"]' in found.log
    assert (
        kit.BUG in found.log and "subprocess" not in found.log.partition("── script")[2]
    )  # the judge has the task's own file


async def test_honest_work_is_paid_in_every_form(prices: kit.Task, walled: GradingEnvironment, tmp_path: Path) -> None:
    work = kit.worked(tmp_path / "work", {"prices.py": kit.FIX}, kit.FOLDER)
    for task in (prices, kit.probed(tmp_path / "task")):
        found = await kit.graded(task, work, walled)
        assert (found.kind, found.reward, found.message) == ("graded", 1.0, ""), found.log


@pytest.mark.parametrize("sandbox", backends("docker", "local"))
async def test_the_same_in_other_sandboxes(sandbox: str, prices: kit.Task, root: Path, tmp_path: Path) -> None:
    ground = kit.ground(sandbox, root, resources=Resources(pids=64))
    honest = kit.worked(tmp_path / "honest", {"prices.py": kit.FIX}, kit.FOLDER)
    assert (await kit.graded(prices, honest, ground)).reward == 1.0
    name = {"docker": "forks without end", "local": "leaves a daemon"}[sandbox]
    cheat = kit.worked(tmp_path / "cheat", {"prices.py": attacks.SCRIPT[name] + kit.BUG}, kit.FOLDER)
    found = await kit.graded(prices, cheat, ground)
    assert (found.kind, found.reward) == ("graded", 0.0), (found.message, found.log)


async def test_a_log_is_kept_by_its_ends_and_without_secrets(walled: GradingEnvironment, tmp_path: Path) -> None:
    loud = (
        'echo begin; echo "key $JUDGE_API_KEY"; head -c 100000000 /dev/zero | tr "\\0" x; echo; echo end\n'
        + kit.TEST_SH
    )
    task = kit.scripted(tmp_path / "task", {"test.sh": loud, "check.py": kit.CHECK}, env={"JUDGE_API_KEY": "hunter22"})
    ground = msgspec.structs.replace(walled, log=tmp_path / "logs" / "grade.log")
    found = await kit.graded(task, kit.worked(tmp_path / "work", {"prices.py": kit.FIX}, kit.FOLDER), ground)
    assert (found.kind, found.reward) == ("graded", 1.0)
    whole = (tmp_path / "logs" / "grade.log").read_bytes()
    assert b"\nbegin\nkey ***\n" in whole and whole.endswith(b"\nend\n") and b"bytes omitted" in whole
    assert len(whole) < 40_000_000 and len(found.log) <= 8000 and found.log.endswith("end\n")
    assert b"hunter22" not in whole
