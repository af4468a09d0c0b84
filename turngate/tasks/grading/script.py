"""A script decides: Harbor's `tests/test.sh`, or any other, by a reward file or by its exit code.

In one sandbox, the plain form: fresh, the work is laid down, then /tests, then the script runs. When it has ended, everything it left
running is killed, and only then its reward is read. The work's code runs there under the script's own user, so that a work that knows the
form can write the reward file while the tests run: the plain form stops common cheats, not a determined one.

In two, with a probe: the probe runs the work where nothing but `tests/run.sh` and `tests/inputs/` is; what it leaves in /logs/probe is all
that the second sandbox, the judge's, gets of it. No code of the agent's ever runs where the reward is decided, or where the answers are.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from turngate.errors import SandboxFileMissing, SandboxTooLarge, TaskError
from turngate.sandboxes.base import Result, Sandbox
from turngate.tasks.grading import sandbox as fresh
from turngate.tasks.grading.result import Control, Found, Log, Spoiled, Undecided, reading
from turngate.tasks.grading.types import Grade, Ground, Work
from turngate.tasks.grading.work import named
from turngate.tasks.task import Script, Task

PROBED = ("run.sh", "inputs")  # what of tests/ the probe's sandbox gets
_LARGEST = 64_000  # bytes of a reward file
_SIGNAL = 128  # exit codes above are a signal's
_MISSING, _ODD = 44, 45
_EXEC = 'exec "$@" 2>&1'  # one log, in the order in which it was printed
# $1 logs, $2 tests. Harbor makes these three.
_PREPARE = f"""{fresh.SYSTEM}
rm -rf -- "$1"/* "$2"/* && mkdir -p -- "$2" "$1/verifier" "$1/agent" "$1/artifacts"
"""
# $1 logs. The probe's output may be closed to its owner, and is its output all the same.
_OPEN = f"""{fresh.SYSTEM}
for folder in "$1" "$1/probe"; do [ -L "$folder" ] || chmod u+rwx -- "$folder"; done
[ -L "$1/probe" ] || chmod -R u+rwX -- "$1/probe"
"""
# A regular file with one name, that its owner can write, in a folder that is one: not what somebody laid there to be kept or followed.
_READ = f"""{fresh.SYSTEM}
for file in "$1/verifier/reward.txt" "$1/verifier/reward.json"; do
  [ -e "$file" ] || [ -L "$file" ] || continue
  [ ! -L "$1/verifier" ] && [ -f "$file" ] && [ ! -L "$file" ] || exit {_ODD}
  [ "$(find "$1/verifier" "$file" -prune -perm -200 | wc -l)" -eq 2 ] || exit {_ODD}
  [ -n "$(find "$file" -links 1)" ] || exit {_ODD}
  echo "${{file##*.}}"; exec head -c {_LARGEST + 1} -- "$file"
done
exit {_MISSING}
"""


async def attempt(task: Task, grader: Script, work: Work | None, ground: Ground, log: Log, control: Control) -> Found:
    log.hide(grader.env)
    if grader.files is not None and not grader.files.is_dir():
        raise TaskError(f"task: {task.id}: tests: there is no folder {grader.files}", param="tests")
    if not grader.probe:
        async with fresh.opened(task, ground, life_s=grader.timeout_s) as sandbox:
            notes = await fresh.lay(sandbox, work.folder) if work is not None else ()
            reward = await _decided(sandbox, grader, ground, log, {})
            return Found(grade=Grade(kind="graded", reward=reward, notes=notes))
    async with fresh.scratch() as folder:
        left, notes = await _probed(task, grader, work, ground, log, folder)
        async with fresh.opened(task, ground, life_s=grader.timeout_s) as sandbox:
            reward = await _decided(sandbox, grader, ground, log, left, folder / "left")
            return Found(grade=Grade(kind="graded", reward=reward, notes=notes))


async def _probed(
    task: Task, grader: Script, work: Work | None, ground: Ground, log: Log, folder: Path
) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Run the work, and copy what that left to the host. How it ended is for the judge to know."""
    await asyncio.to_thread(_pick, grader.files, folder / "tests")
    (folder / "left").mkdir()
    async with fresh.opened(task, ground, life_s=grader.timeout_s) as sandbox:
        notes = await fresh.lay(sandbox, work.folder) if work is not None else ()
        tests, logs = await _prepared(sandbox, ground, folder / "tests")
        await sandbox.exec(["mkdir", "-p", f"{logs}/probe"], cwd="/", timeout_s=fresh.STEP_S)
        done = await _run(sandbox, grader.probe, grader.timeout_s, tests, logs, {})
        log.add(f"probe: {_ending(done)}", done.stdout)
        try:
            with reading():
                await sandbox.exec(["/bin/sh", "-c", _OPEN, "sh", logs], cwd="/", timeout_s=fresh.STEP_S)
                left = await sandbox.download(f"{logs}/probe", folder / "left")
        except SandboxFileMissing:
            left = ("the probe's folder itself",)
        except Spoiled as error:
            if isinstance(error.__cause__, SandboxTooLarge):
                raise Undecided(f"the probe left more than can be taken: {error.message}") from None
            raise
    code = "timeout" if done.timed_out else str(done.exit_code)
    return {"TURNGATE_PROBE_EXIT": code}, (*notes, *named([f"probe: {line}" for line in left]))


def _pick(files: Path | None, target: Path) -> None:
    """What the probe may see. Expected answers are not among it."""
    target.mkdir()
    for name in PROBED:
        source = (files or target) / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True)
        elif source.is_file():
            shutil.copy2(source, target / name)


async def _decided(
    sandbox: Sandbox, grader: Script, ground: Ground, log: Log, env: Mapping[str, str], probed: Path | None = None
) -> float:
    """Run the script, and take its decision. `Undecided`: there is none."""
    tests, logs = await _prepared(sandbox, ground, grader.files)
    if probed is not None:
        await sandbox.upload(probed, f"{logs}/probe")
    done = await _run(sandbox, grader.command, grader.timeout_s, tests, logs, {**grader.env, **env})
    log.add(f"script: {_ending(done)}", done.stdout)
    if done.timed_out:
        raise Undecided(f"the grader's script ran out of its {grader.timeout_s:.0f} s")
    if done.exit_code > _SIGNAL:
        raise Undecided(f"the grader's script was ended by signal {done.exit_code - _SIGNAL}: it decided nothing")
    if grader.decides == "exit code":
        if done.exit_code in (0, 1):
            return 1.0 - done.exit_code
        raise Undecided(f"the grader's script ended with {done.exit_code}, which is neither 0 (yes) nor 1 (no)")
    return await _reward(sandbox, logs)


async def _prepared(sandbox: Sandbox, ground: Ground, files: Path | None) -> tuple[str, str]:
    tests, logs = fresh.places(sandbox, ground)
    await fresh.step(sandbox, _PREPARE, logs, tests)
    if files is not None:
        await sandbox.upload(files, tests)
    return tests, logs


async def _run(
    sandbox: Sandbox, command: Sequence[str], timeout_s: float, tests: str, logs: str, env: Mapping[str, str]
) -> Result:
    words = [word.replace(fresh.TESTS, tests, 1) if _below(word) else word for word in command]
    return await sandbox.exec(
        ["/bin/sh", "-c", _EXEC, "sh", *words],
        env={**env, "TURNGATE_TESTS": tests, "TURNGATE_LOGS": logs},
        timeout_s=timeout_s,
        keep=fresh.KEEP,
        leave=False,
    )


def _below(word: str) -> bool:
    return word == fresh.TESTS or word.startswith(f"{fresh.TESTS}/")


def _ending(done: Result) -> str:
    return "ran out of time" if done.timed_out else f"exit code {done.exit_code}"


async def _reward(sandbox: Sandbox, logs: str) -> float:
    with reading():
        done = await sandbox.exec(["/bin/sh", "-c", _READ, "sh", logs], cwd="/", timeout_s=fresh.STEP_S)
    if done.exit_code == _MISSING:
        raise Undecided(
            "the grader's script left neither reward.txt nor reward.json in $TURNGATE_LOGS/verifier (/logs/verifier)"
        )
    if done.exit_code == _ODD:
        raise Undecided("the reward file is no plain file that its script could write: somebody else laid it there")
    kind, _, content = done.stdout.partition(b"\n")
    if done.exit_code or len(content) > _LARGEST:
        raise Undecided("the reward file cannot be read, or is far too long")
    return _number(kind.decode(), content)


def _number(kind: str, content: bytes) -> float:
    """The reward in a file, in Harbor's forms: a number; or as JSON a number, or an object of numbers with `reward` or only one in it."""
    try:
        value: object = float(content) if kind == "txt" else msgspec.json.decode(content)
    except (ValueError, msgspec.DecodeError):
        raise Undecided(f"reward.{kind} holds no number: {content[:80]!r}") from None
    if isinstance(value, dict):
        numbers = {name: one for name, one in value.items() if _is_number(one)}
        value = numbers.get("reward", next(iter(numbers.values())) if len(numbers) == len(value) == 1 else None)
    if not _is_number(value):
        raise Undecided(f'reward.{kind} holds no finite number, and no object with one as "reward": {content[:80]!r}')
    assert isinstance(value, int | float)
    return float(value)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
