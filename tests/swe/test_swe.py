"""Real tasks from releases of PyPI packages: they load as SWE rows, are proven in Docker, and hide later commits.

`tools/swe_tasks.py` builds them once. Two are proven at a time.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.speed import scaled
from tools import swe_tasks
from turngate.errors import TaskError
from turngate.sandboxes.base import Sandbox
from turngate.sandboxes.docker import DockerBackend
from turngate.tasks import staging
from turngate.tasks.grading.types import Grade, GradingEnvironment
from turngate.tasks.loaders.load import read_tasks
from turngate.tasks.proof import Proof, prove_task
from turngate.tasks.task import Swe, Task

pytestmark = [pytest.mark.needs("docker", "swe-tasks", "swebench"), pytest.mark.full]

CONCURRENCY = 2
ONLY = ("toolz", "parse", "deepmerge")  # `make test-all` proves these tasks, `make soak` the others


def list_pairs() -> list[Any]:
    marks = {pair.name: [] if pair.name in ONLY else [pytest.mark.repeat] for pair in swe_tasks.PAIRS}
    return [pytest.param(pair, marks=marks[pair.name], id=pair.name) for pair in swe_tasks.PAIRS]


PAIRS = pytest.mark.parametrize("pair", list_pairs())


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Task]:
    """All tasks by id, as the loader reads them."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in swe_tasks.rows()))
    return {task.id: task for task in read_tasks(str(file))}


@pytest.fixture(scope="module")
def proofs(
    request: pytest.FixtureRequest, tasks: dict[str, Task], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Proof]:
    """The proofs of the tasks that this run tests."""
    tested = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = {params["pair"].instance for params in tested if isinstance(params.get("pair"), swe_tasks.Pair)}
    return asyncio.run(_prove_all([tasks[name] for name in chosen], tmp_path_factory.mktemp("sandboxes")))


async def _prove_all(tasks: list[Task], root: Path) -> dict[str, Proof]:
    semaphore = asyncio.Semaphore(CONCURRENCY)
    environment = GradingEnvironment(backend=DockerBackend(root))

    async def prove(task: Task) -> Proof:
        async with semaphore:
            return await prove_task(task, environment)

    return {proof.task: proof for proof in await asyncio.gather(*map(prove, tasks))}


def grader(task: Task) -> Swe:
    assert isinstance(task.grader, Swe)
    return task.grader


def assert_graded(grade: Grade | None, proof: Proof) -> Grade:
    assert grade is not None and grade.kind == "graded", proof.message
    return grade


def test_tasks_cover_six_repositories_with_tests_to_fix(tasks: dict[str, Task]) -> None:
    assert list(tasks) == [pair.instance for pair in swe_tasks.PAIRS]
    assert len({pair.repo for pair in swe_tasks.PAIRS}) >= 6
    for task in tasks.values():
        assert grader(task).fail_to_pass and grader(task).pass_to_pass
        assert task.solution is not None and task.solution.patch not in task.instruction


@PAIRS
def test_reference_patch_resolves_task(pair: swe_tasks.Pair, tasks: dict[str, Task], proofs: dict[str, Proof]) -> None:
    proof = proofs[pair.instance]
    assert proof.verdict == "proven", proof.message
    solved = assert_graded(proof.solved, proof)
    assert (solved.reward, solved.resolved) == (1.0, True)
    wanted = grader(tasks[pair.instance])
    assert solved.cases == dict.fromkeys((*wanted.fail_to_pass, *wanted.pass_to_pass), "passed")
    assert solved.notes == ()  # no part of the patch was set aside, and the witness reported


@PAIRS
def test_empty_patch_does_not_resolve_task(
    pair: swe_tasks.Pair, tasks: dict[str, Task], proofs: dict[str, Proof]
) -> None:
    proof = proofs[pair.instance]
    untouched = assert_graded(proof.untouched, proof)
    assert (untouched.reward, untouched.resolved) == (0.0, False)
    wanted = grader(tasks[pair.instance])
    assert all(untouched.cases[test] == "passed" for test in wanted.pass_to_pass)
    assert all(untouched.cases[test] in ("failed", "error") for test in wanted.fail_to_pass)


@pytest.mark.real
@pytest.mark.parametrize("name", ["toolz", "parse"])
async def test_setup_removes_later_commits(name: str, tasks: dict[str, Task], tmp_path: Path) -> None:
    [pair] = swe_tasks.chosen([name])
    task = tasks[pair.instance]
    backend = DockerBackend(tmp_path)
    sandbox = await backend.create(staging.build_sandbox_spec(task, backend))
    try:
        assert await list_git_history(sandbox) >= {
            f"v{pair.new}",
            "origin",
            f"{pair.name} {pair.new}",
        }  # the image has both releases
        await staging.run_setup(sandbox, task)
        assert await list_git_history(sandbox) == {
            f"v{pair.old}",
            "main",
            f"Begin {pair.name}",
            f"{pair.name} {pair.old}",
        }
        assert await run_shell(sandbox, "git status --porcelain") == ""
        assert await run_shell(sandbox, "git rev-parse HEAD") == grader(task).base_commit
    finally:
        await sandbox.stop()


async def list_git_history(sandbox: Sandbox) -> set[str]:
    """List tags, branches, remotes and the subjects of all commits in the repository, reachable or not."""
    everything = """
        git tag; git for-each-ref --format='%(refname:lstrip=2)' refs/heads; git remote
        git cat-file --batch-all-objects --batch-check='%(objecttype) %(objectname)' |
          while read -r kind name; do if [ $kind = commit ]; then git log -1 --format=%s $name; fi; done
    """
    return set((await run_shell(sandbox, everything)).splitlines())


async def run_shell(sandbox: Sandbox, command: str) -> str:
    done = await sandbox.exec(["sh", "-c", command], timeout_s=scaled(60))
    assert done.exit_code == 0, done.stderr
    return done.stdout.decode().strip()


def test_repository_is_reproducible(tasks: dict[str, Task]) -> None:
    [pair] = swe_tasks.chosen(["deepmerge"])
    with tempfile.TemporaryDirectory() as scratch:
        base, newer = swe_tasks.repository(pair, Path(scratch, "testbed"), Path(scratch))
    assert base == grader(tasks[pair.instance]).base_commit != newer


def test_release_that_fixes_no_test_is_refused(tasks: dict[str, Task], tmp_path: Path) -> None:
    [row] = swe_tasks.rows(["deepmerge"])
    unrelated_patch = (
        "diff --git a/notes b/notes\nnew file mode 100644\n--- /dev/null\n+++ b/notes\n@@ -0,0 +1 @@\n+nothing\n"
    )
    with pytest.raises(swe_tasks.SweError, match="the patch fixes 0 tests and keeps 6"):
        swe_tasks.measured({**row, "patch": unrelated_patch}, tmp_path)


def test_release_with_flaky_test_is_refused(tasks: dict[str, Task], tmp_path: Path) -> None:
    [row] = swe_tasks.rows(["deepmerge"])
    chance = ["echo '=== short test summary info ==='", "echo PASSED test_$(cat /proc/sys/kernel/random/uuid)"]
    unsteady = {**row, "install_config": {"test_cmd": chance, "log_parser": "pytest"}}
    with pytest.raises(swe_tasks.SweError, match="these tests are flaky"):
        swe_tasks.measured(unsteady, tmp_path)


def test_lists_may_be_json_text_and_invalid_row_is_named(tasks: dict[str, Task], tmp_path: Path) -> None:
    rows = swe_tasks.rows()
    assert {type(row["FAIL_TO_PASS"]) for row in rows} == {str, list}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({**rows[0], "PASS_TO_PASS": "not a list"}) + "\n")
    with pytest.raises(TaskError, match=f"{rows[0]['instance_id']}.*PASS_TO_PASS"):
        list(read_tasks(str(file)))
