"""Work that tries to cheat: a script with a reward file, and a probe with a separate judge."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.redteam import attacks
from tests.sandboxes.kit import backends, processes
from tests.speed import paced
from tests.tasks.grading import kit
from turngate.sandboxes.base import Resources
from turngate.tasks.grading.types import GradingEnvironment

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.full, pytest.mark.alone]
DOCKER = [pytest.mark.needs("docker"), pytest.mark.repeat]
ENDLESS = ("never ends", "forks without end")


@pytest.fixture(scope="module")
def prices(tmp_path_factory: pytest.TempPathFactory) -> kit.Task:
    return kit.script_task(tmp_path_factory.mktemp("prices"))


@pytest.fixture(scope="module")
def short_prices(tmp_path_factory: pytest.TempPathFactory) -> kit.Task:
    """The same task with a timeout that endless work runs into."""
    return kit.script_task(tmp_path_factory.mktemp("prices"), timeout_s=paced(2))


@pytest.mark.real
@pytest.mark.promise(6)
@pytest.mark.parametrize("name", attacks.SCRIPT)
async def test_cheating_work_scores_zero(
    name: str, prices: kit.Task, short_prices: kit.Task, isolated: GradingEnvironment, tmp_path: Path
) -> None:
    work = kit.make_work(tmp_path / "work", {"prices.py": attacks.SCRIPT[name] + kit.BUG}, kit.FOLDER)
    result = await kit.grade_and_check(short_prices if name in ENDLESS else prices, work, isolated)
    assert (result.kind, result.reward) == ("graded", 0.0), (result.message, result.log)
    assert not processes("tests/check.py")


@pytest.mark.parametrize(
    "name", [*attacks.SCRIPT_UNDETECTED, "writes the reward", "kills the script", "leaves a daemon"]
)
async def test_probe_detects_what_script_cannot(name: str, isolated: GradingEnvironment, tmp_path: Path) -> None:
    cheat = {**attacks.SCRIPT, **attacks.SCRIPT_UNDETECTED}[name]
    work = kit.make_work(tmp_path / "work", {"prices.py": kit.BUG + cheat}, kit.FOLDER)
    result = await kit.grade_and_check(kit.probe_task(tmp_path / "task"), work, isolated)
    assert (result.kind, result.reward) == ("graded", 0.0), (result.message, result.log)


async def test_probe_cannot_read_expected_answers(isolated: GradingEnvironment, tmp_path: Path) -> None:
    """The work searches for the expected answers and returns what it finds."""
    look = """
import json, os, subprocess
def total(prices):
    found = subprocess.run("grep -rIls '10[.]5]' / --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr",
                           shell=True, capture_output=True, text=True).stdout
    return found + " ".join(sorted(os.listdir("/tests")))
"""
    task = kit.probe_task(tmp_path / "task")
    show = 'cat "$TURNGATE_LOGS/probe/answer.json"; ls -a "$(pwd)"; cat prices.py\n' + kit.JUDGE
    (tmp_path / "task" / "tests" / "test.sh").write_text(show)
    result = await kit.grade_and_check(
        task, kit.make_work(tmp_path / "work", {"prices.py": look}, kit.FOLDER), isolated
    )
    assert (result.kind, result.reward) == ("graded", 0.0)
    assert '["inputs run.sh", "inputs run.sh", "inputs run.sh"]' in result.log
    assert (
        kit.BUG in result.log and "subprocess" not in result.log.partition("── script")[2]
    )  # the judge has the task's own file


async def test_honest_work_scores_one_with_and_without_probe(
    prices: kit.Task, isolated: GradingEnvironment, tmp_path: Path
) -> None:
    work = kit.make_work(tmp_path / "work", {"prices.py": kit.FIX}, kit.FOLDER)
    for task in (prices, kit.probe_task(tmp_path / "task")):
        result = await kit.grade_and_check(task, work, isolated)
        assert (result.kind, result.reward, result.message) == ("graded", 1.0, ""), result.log


# Docker's limit on processes is also tested in test_exhaustion.py.
@pytest.mark.parametrize("sandbox", [pytest.param("docker", marks=DOCKER), *backends("local")])
async def test_honest_and_cheating_work_in_other_sandboxes(
    sandbox: str, prices: kit.Task, short_prices: kit.Task, root: Path, tmp_path: Path
) -> None:
    environment = kit.grading_environment(sandbox, root, resources=Resources(pids=64))
    honest = kit.make_work(tmp_path / "honest", {"prices.py": kit.FIX}, kit.FOLDER)
    assert (await kit.grade_and_check(prices, honest, environment)).reward == 1.0
    name = {"docker": "forks without end", "local": "leaves a daemon"}[sandbox]
    cheat = kit.make_work(tmp_path / "cheat", {"prices.py": attacks.SCRIPT[name] + kit.BUG}, kit.FOLDER)
    result = await kit.grade_and_check(short_prices if name in ENDLESS else prices, cheat, environment)
    assert (result.kind, result.reward) == ("graded", 0.0), (result.message, result.log)


async def test_grade_log_is_truncated_and_redacted(isolated: GradingEnvironment, tmp_path: Path) -> None:
    loud = (
        'echo begin; echo "key $JUDGE_API_KEY"; head -c 100000000 /dev/zero | tr "\\0" x; echo; echo end\n'
        + kit.TEST_SH
    )
    task = kit.script_task(
        tmp_path / "task", {"test.sh": loud, "check.py": kit.CHECK}, env={"JUDGE_API_KEY": "hunter22"}
    )
    environment = msgspec.structs.replace(isolated, log=tmp_path / "logs" / "grade.log")
    result = await kit.grade_and_check(
        task, kit.make_work(tmp_path / "work", {"prices.py": kit.FIX}, kit.FOLDER), environment
    )
    assert (result.kind, result.reward) == ("graded", 1.0)
    whole = (tmp_path / "logs" / "grade.log").read_bytes()
    assert b"\nbegin\nkey ***\n" in whole and whole.endswith(b"\nend\n") and b"bytes omitted" in whole
    assert len(whole) < 40_000_000 and len(result.log) <= 8000 and result.log.endswith("end\n")
    assert b"hunter22" not in whole


async def test_reason_has_last_lines_redacted(isolated: GradingEnvironment, tmp_path: Path) -> None:
    """If a script gives no reward, the reason includes the last lines of its output, safe to print."""
    loud = 'seq 100; head -c 9000 /dev/zero | tr "\\0" x; printf "\\n\\n\\033[31mkey %s\\n" "$JUDGE_API_KEY"; exit 3'
    task = kit.script_task(tmp_path / "task", {"test.sh": loud}, env={"JUDGE_API_KEY": "hunter22"})
    work = kit.make_work(tmp_path / "work", {"prices.py": kit.FIX}, kit.FOLDER)
    for graded in (None, work):
        result = await kit.grade_and_check(task, graded, isolated)
        assert (result.kind, result.reward) == ("invalid task", None)
        reason, long, last = result.message.split("\n")
        assert "(exit code 3): it wrote neither reward.txt nor reward.json to /logs/verifier;" in reason
        assert len(long) == 200 and last == "␛[31mkey ***"


async def test_output_of_broken_grader_is_shown_with_reason(isolated: GradingEnvironment, tmp_path: Path) -> None:
    script = 'if grep -q break prices.py; then echo "it broke"; exit 3; fi; echo 1 > $TURNGATE_LOGS/verifier/reward.txt'
    task = kit.script_task(tmp_path / "task", {"test.sh": script})
    work = kit.make_work(tmp_path / "work", {"prices.py": "# break\n"}, kit.FOLDER)
    result = await kit.grade_and_check(task, work, isolated)
    assert (result.kind, result.reward) == ("graded", 0.0)
    assert result.message.endswith("so the work broke the grader; the output ended with:\nit broke")
