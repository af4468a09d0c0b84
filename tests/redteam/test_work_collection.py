"""Any work that an agent leaves can be collected, and its sandbox contains nothing of the grader."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.sandboxes.kit import backends, processes
from tests.speed import scaled
from tests.tasks.grading import kit
from turngate.sandboxes.base import Sandbox
from turngate.tasks import staging
from turngate.tasks.grading import work as work_module
from turngate.tasks.grading.types import GradingEnvironment, Work
from turngate.tasks.grading.work import collect_work
from turngate.tasks.task import Solution, Task

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.full]

MESS = r"""
mkdir -p deep/dir
ln -s /tests/test.sh absolute; ln -s ../../../etc/passwd relative; ln -s deep/../../up crooked; ln -s deep inside
ln -s /logs/verifier/reward.txt out.txt; ln -s . self; mkfifo pipe
printf x > "$(printf 'new\nline')"; printf x > "$(printf 'not-utf8-\377')"; printf x > '-rf'; printf x > "$(printf 'n%.0s' $(seq 250))"
printf x > closed; chmod 000 closed; mkdir shut; printf x > shut/file; chmod 000 shut
d=.; for i in $(seq 50); do d="$d/a-long-name-of-a-folder-that-lies-in-another-like-it-$i"; mkdir "$d"; done; printf x > "$d/bottom"
long=$(printf 'n%.0s' $(seq 250)); mkdir abyss; cd abyss; for i in $(seq 14); do mkdir $long; cd $long; done; printf x > bottom
cd "$HOME/../../workspace"; mkdir many; cd many; seq 500 | xargs touch; cd ..
git init -q . 2>/dev/null; mkdir -p .git/hooks; printf '#!/bin/sh\ntouch /tmp/evil' > .git/hooks/pre-commit; chmod +x .git/hooks/*
(setsid sh -c 'while :; do echo evil > prices.py; sleep 0.05; done' turngate-left-over &) </dev/null >/dev/null 2>&1
"""


async def run_agent(sandbox: Sandbox, script: str, folder: Path) -> Work:
    """Run a script as an agent: start it in the background, kill it with all its processes, then collect its work."""
    job = await sandbox.start(["/bin/sh", "-c", script])
    await asyncio.wait_for(job.wait(), scaled(60))
    await job.kill()
    return await collect_work(sandbox, folder)


async def run_agent_on_task(task: Task, environment: GradingEnvironment, script: str, folder: Path) -> Work:
    sandbox = await environment.backend.create(staging.build_sandbox_spec(task, environment.backend))
    try:
        await staging.upload_files(sandbox, task)
        await staging.run_setup(sandbox, task)
        return await run_agent(sandbox, script, folder)
    finally:
        await sandbox.stop()


async def test_messy_folder_is_collected_and_graded(isolated: GradingEnvironment, tmp_path: Path) -> None:
    task = kit.script_task(tmp_path / "task")
    work = await run_agent_on_task(task, isolated, MESS, tmp_path / "work")
    assert not processes("turngate-left-over")
    (work.folder / "prices.py").write_text(kit.FIX)
    reported = "\n".join(work.left_out)
    for name in ("absolute", "relative", "crooked", "out.txt", "pipe"):
        assert f"{name}: " in reported, reported
        assert not (work.folder / name).is_symlink() and not (work.folder / name).exists()
    assert (work.folder / "inside").is_symlink() and (work.folder / "closed").read_text() == "x"
    assert (work.folder / "shut" / "file").exists() and len(list((work.folder / "many").iterdir())) == 500
    assert b"not-utf8-\xff" in {path.name.encode("utf-8", "surrogateescape") for path in work.folder.iterdir()}
    assert "the path is too long" in reported and not (work.folder / ".git").exists()
    result = await kit.grade_and_check(task, work, isolated)
    assert (result.kind, result.reward) == ("graded", 1.0), (result.message, result.log)


async def test_grader_receives_exactly_the_collected_work(isolated: GradingEnvironment, tmp_path: Path) -> None:
    """Odd names are kept, files that the agent removed are gone, and the task's own links to outside are still there."""
    listing = "find . -printf '%y %p -> %l\\n' | sort; echo 1 > $TURNGATE_LOGS/verifier/reward.txt\n"
    task = kit.script_task(tmp_path / "task", {"test.sh": listing})
    task = msgspec.structs.replace(task, setup="ln -s /usr/bin/env tool; mkdir gone; touch gone/file; ln -s gone was")
    work = await run_agent_on_task(
        task, isolated, "rm -r gone was prices.py; touch \"$(printf 'odd\\377')\" a; ln -s a b", tmp_path / "work"
    )
    assert work.left_out == ("tool: the link could point outside the folder",)
    result = await kit.grade_and_check(task, work, isolated)
    listed = [line for line in result.log.splitlines() if " ./" in line]
    assert [line.split(" ")[1] for line in listed if "odd" not in line] == ["./a", "./b", "./tool"]
    assert len(listed) == 4 and "l ./b -> a" in listed and "l ./tool -> /usr/bin/env" in listed


STALE = """
printf 'def total(prices):\n    return 0 * sum(prices)\n' >prices.py; mkdir deep; cp -p prices.py deep/prices.py
for folder in . deep; do
  (cd $folder && cp -p prices.py "$HOME/old" && python3 -c 'import prices' && sed -i s/0/1/ prices.py && touch -r "$HOME/old" prices.py)
done
python3 -c 'import prices; assert prices.total([2]) == 0' && ls __pycache__ deep/__pycache__
"""


async def test_stale_bytecode_is_not_graded(isolated: GradingEnvironment, tmp_path: Path) -> None:
    """The source changed within the same second and kept its length, so Python considers the cache valid."""
    task = kit.script_task(tmp_path / "task")
    work = await run_agent_on_task(task, isolated, STALE, tmp_path / "work")
    assert (work.folder / "__pycache__").is_dir() and (work.folder / "deep" / "__pycache__").is_dir()
    result = await kit.grade_and_check(task, work, isolated)
    assert (result.kind, result.reward) == ("graded", 1.0), result.log


async def test_emptied_folder_scores_zero(isolated: GradingEnvironment, tmp_path: Path) -> None:
    task = kit.script_task(tmp_path / "task")
    work = await run_agent_on_task(task, isolated, 'rm -rf "$PWD"/* "$PWD"/.[!.]*', tmp_path / "work")
    assert list(work.folder.iterdir()) == []
    result = await kit.grade_and_check(task, work, isolated)
    assert (result.kind, result.reward) == ("graded", 0.0)


async def test_oversized_work_is_agent_failure(
    isolated: GradingEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turngate.sandboxes.posix.FOLDER_LIMIT", 1_000_000)
    task = kit.script_task(tmp_path / "task")
    work = await run_agent_on_task(task, isolated, "truncate -s 1G endless", tmp_path / "work")
    assert "working folder is too large to copy" in work.lost and not list(work.folder.iterdir())
    result = await kit.grade_and_check(task, work, isolated)
    assert (result.kind, result.reward) == ("agent failed", None)


SEARCH = """
grep -rIlsF -e SENTINEL / --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr --exclude-dir=lib 2>/dev/null
grep -rasF -e SENTINEL /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | grep -av grep
git cat-file --batch-all-objects --batch 2>/dev/null | grep -aF SENTINEL
find / -xdev \\( -name 'test_more*' -o -name 'solve*' -o -path '/tests/*' -o -path '/logs/*' \\) -not -path '/proc/*' -not -path '/usr/*'
true
"""


@pytest.mark.parametrize("sandbox", backends("bubblewrap", "docker"))
async def test_agent_cannot_find_tests_or_solution(sandbox: str, root: Path, tmp_path: Path) -> None:
    """Search all readable files, processes and git objects of an agent's sandbox."""
    environment = kit.grading_environment(sandbox, root)
    task = kit.repository_task(tmp_path / "task")
    task = msgspec.structs.replace(
        task, solution=Solution(patch="SENTINEL", files=kit.write_files(tmp_path / "s", {"solve.sh": "SENTINEL"}))
    )
    grader = msgspec.structs.replace(kit.SWE, test_patch=kit.TEST_PATCH.replace("test_one", "SENTINEL"))
    task = msgspec.structs.replace(task, grader=grader)
    created = await environment.backend.create(staging.build_sandbox_spec(task, environment.backend))
    try:
        await staging.upload_files(created, task)
        await staging.run_setup(created, task)
        result = await created.exec(
            ["/bin/sh", "-c", 'word=SENT; eval "$(cat)"'],
            stdin=SEARCH.replace("SENTINEL", '"$word"INEL').encode(),
            timeout_s=scaled(100),
        )
        assert result.stdout == b"", result.stdout.decode()
    finally:
        await created.stop()


def test_reported_names_are_sanitized() -> None:
    reported = work_module.format_names(["a\x1b[2J\n", "b\udcff", *("c" * 9000 for _ in range(80))])
    assert reported[0] == "a�[2J�" and reported[1] == "b�" and len(reported) == 51 and reported[-1] == "and 32 more"
    assert all(len(line) < 400 for line in reported)
