"""What an agent can leave behind in its own sandbox: the work is taken all the same. What it can find there: nothing of the grade."""

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

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.full, pytest.mark.alone]

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


async def agent(sandbox: Sandbox, script: str, folder: Path) -> Work:
    """Run as an agent is: in the background, then killed with all it left, then its work is taken."""
    job = await sandbox.start(["/bin/sh", "-c", script])
    await asyncio.wait_for(job.wait(), scaled(60))
    await job.kill()
    return await collect_work(sandbox, folder)


async def worked(task: Task, ground: GradingEnvironment, script: str, folder: Path) -> Work:
    sandbox = await ground.backend.create(staging.build_sandbox_spec(task, ground.backend))
    try:
        await staging.upload_files(sandbox, task)
        await staging.run_setup(sandbox, task)
        return await agent(sandbox, script, folder)
    finally:
        await sandbox.stop()


async def test_a_mess_is_taken_and_graded(walled: GradingEnvironment, tmp_path: Path) -> None:
    task = kit.scripted(tmp_path / "task")
    work = await worked(task, walled, MESS, tmp_path / "work")
    assert not processes("turngate-left-over")
    (work.folder / "prices.py").write_text(kit.FIX)
    told = "\n".join(work.left_out)
    for name in ("absolute", "relative", "crooked", "out.txt", "pipe"):
        assert f"{name}: " in told, told
        assert not (work.folder / name).is_symlink() and not (work.folder / name).exists()
    assert (work.folder / "inside").is_symlink() and (work.folder / "closed").read_text() == "x"
    assert (work.folder / "shut" / "file").exists() and len(list((work.folder / "many").iterdir())) == 500
    assert b"not-utf8-\xff" in {path.name.encode("utf-8", "surrogateescape") for path in work.folder.iterdir()}
    assert "the path is too long" in told and not (work.folder / ".git").exists()
    found = await kit.graded(task, work, walled)
    assert (found.kind, found.reward) == ("graded", 1.0), (found.message, found.log)


async def test_everything_is_laid_down_and_nothing_else(walled: GradingEnvironment, tmp_path: Path) -> None:
    """Odd names arrive as they are; what the agent removed is gone; links of the task's own that lead out are still there."""
    listing = "find . -printf '%y %p -> %l\\n' | sort; echo 1 > $TURNGATE_LOGS/verifier/reward.txt\n"
    task = kit.scripted(tmp_path / "task", {"test.sh": listing})
    task = msgspec.structs.replace(task, setup="ln -s /usr/bin/env tool; mkdir gone; touch gone/file; ln -s gone was")
    work = await worked(
        task, walled, "rm -r gone was prices.py; touch \"$(printf 'odd\\377')\" a; ln -s a b", tmp_path / "work"
    )
    assert work.left_out == ("tool: the link leads out of the folder",)
    found = await kit.graded(task, work, walled)
    listed = [line for line in found.log.splitlines() if " ./" in line]
    assert [line.split(" ")[1] for line in listed if "odd" not in line] == ["./a", "./b", "./tool"]
    assert len(listed) == 4 and "l ./b -> a" in listed and "l ./tool -> /usr/bin/env" in listed


STALE = """
printf 'def total(prices):\n    return 0 * sum(prices)\n' >prices.py; mkdir deep; cp -p prices.py deep/prices.py
for folder in . deep; do
  (cd $folder && cp -p prices.py "$HOME/old" && python3 -c 'import prices' && sed -i s/0/1/ prices.py && touch -r "$HOME/old" prices.py)
done
python3 -c 'import prices; assert prices.total([2]) == 0' && ls __pycache__ deep/__pycache__
"""


async def test_what_python_remembers_of_an_older_source_is_not_graded(
    walled: GradingEnvironment, tmp_path: Path
) -> None:
    """The source was changed in the same second, and is as long: Python takes the cache for its own."""
    task = kit.scripted(tmp_path / "task")
    work = await worked(task, walled, STALE, tmp_path / "work")
    assert (work.folder / "__pycache__").is_dir() and (work.folder / "deep" / "__pycache__").is_dir()
    found = await kit.graded(task, work, walled)
    assert (found.kind, found.reward) == ("graded", 1.0), found.log


async def test_an_agent_that_removes_its_folder_left_nothing(walled: GradingEnvironment, tmp_path: Path) -> None:
    task = kit.scripted(tmp_path / "task")
    work = await worked(task, walled, 'rm -rf "$PWD"/* "$PWD"/.[!.]*', tmp_path / "work")
    assert list(work.folder.iterdir()) == []
    found = await kit.graded(task, work, walled)
    assert (found.kind, found.reward) == ("graded", 0.0)


async def test_more_than_can_be_taken_is_the_agent_s_own_doing(
    walled: GradingEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turngate.sandboxes.posix.FOLDER_LIMIT", 1_000_000)
    task = kit.scripted(tmp_path / "task")
    work = await worked(task, walled, "truncate -s 1T endless", tmp_path / "work")
    assert "working folder is too large to copy" in work.lost and not list(work.folder.iterdir())
    found = await kit.graded(task, work, walled)
    assert (found.kind, found.reward) == ("agent failed", None)


SEARCH = """
grep -rIlsF -e SENTINEL / --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr --exclude-dir=lib 2>/dev/null
grep -rasF -e SENTINEL /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | grep -av grep
git cat-file --batch-all-objects --batch 2>/dev/null | grep -aF SENTINEL
find / -xdev \\( -name 'test_more*' -o -name 'solve*' -o -path '/tests/*' -o -path '/logs/*' \\) -not -path '/proc/*' -not -path '/usr/*'
true
"""


@pytest.mark.parametrize("sandbox", backends("bubblewrap", "docker"))
async def test_neither_tests_nor_reference_can_be_found(sandbox: str, root: Path, tmp_path: Path) -> None:
    """All readable files, all processes and all git objects of an agent's sandbox are searched."""
    ground = kit.ground(sandbox, root)
    task = kit.repository(tmp_path / "task")
    task = msgspec.structs.replace(
        task, solution=Solution(patch="SENTINEL", files=kit.laid(tmp_path / "s", {"solve.sh": "SENTINEL"}))
    )
    grader = msgspec.structs.replace(kit.SWE, test_patch=kit.TEST_PATCH.replace("test_one", "SENTINEL"))
    task = msgspec.structs.replace(task, grader=grader)
    made = await ground.backend.create(staging.build_sandbox_spec(task, ground.backend))
    try:
        await staging.upload_files(made, task)
        await staging.run_setup(made, task)
        found = await made.exec(
            ["/bin/sh", "-c", 'word=SENT; eval "$(cat)"'],
            stdin=SEARCH.replace("SENTINEL", '"$word"INEL').encode(),
            timeout_s=scaled(100),
        )
        assert found.stdout == b"", found.stdout.decode()
    finally:
        await made.stop()


def test_names_for_people_are_harmless() -> None:
    told = work_module.format_names(["a\x1b[2J\n", "b\udcff", *("c" * 9000 for _ in range(80))])
    assert told[0] == "a�[2J�" and told[1] == "b�" and len(told) == 51 and told[-1] == "and 32 more"
    assert all(len(line) < 400 for line in told)
