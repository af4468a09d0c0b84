"""Grading with a script: Harbor's `tests/test.sh` or any other. The reward is read from a file or from the exit code.

Without a probe, one sandbox is used. First the work is copied into it, then the tests (to /tests), and then the script runs. When the
script has ended, all processes that it left running are killed, and only then is the reward read. The work's code runs as the same user as
the script, so it can overwrite the reward file while the tests run. This setup stops common cheats, but not a determined attacker.

With a probe, two sandboxes are used. In the first, the probe runs the work. This sandbox contains no tests except `tests/run.sh` and
`tests/inputs/`. The second sandbox, in which the script runs, receives all tests and the files that the probe left in /logs/probe, but
not the work. The agent's code therefore never runs in the sandbox that contains the answers and decides the reward.

The local sandbox has other folders in place of /tests and /logs.
"""

from __future__ import annotations

import asyncio
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from turngate.errors import SandboxFileMissing, SandboxTooLarge, TaskError
from turngate.sandboxes.base import ExecResult, Sandbox
from turngate.tasks.grading import sandbox as grading_sandbox
from turngate.tasks.grading.result import Control, GraderLog, GraderResult, OutputUnreadable, Undecided, reading_output
from turngate.tasks.grading.types import Grade, GradingEnvironment, Work
from turngate.tasks.grading.work import format_names
from turngate.tasks.task import Script, Task

PROBE_FILES = ("run.sh", "inputs")  # the parts of tests/ that the probe's sandbox receives
_MAX_REWARD_BYTES = 64_000  # largest reward file that is accepted
_SIGNAL = 128  # exit code 128 + n means signal n
_MAX_SIGNAL = 64  # on Linux; larger exit codes are the script's own
_MISSING, _SUSPICIOUS = 44, 45
_FIXED_FOLDER = re.compile(rb"(?<![\w.}/-])/logs/verifier")  # not the end of another path
_EXEC = 'exec "$@" 2>&1'  # one log for stdout and stderr
# $1: the folder for logs, $2: the folder for tests. The three folders are the same as in Harbor.
_PREPARE = f"""{grading_sandbox.SYSTEM_PATH}
rm -rf -- "$1"/* "$2"/* && mkdir -p -- "$2" "$1/verifier" "$1/agent" "$1/artifacts"
"""
# $1: the folder for logs. Restores permissions that the probe removed from its output.
_OPEN = f"""{grading_sandbox.SYSTEM_PATH}
for folder in "$1" "$1/probe"; do [ -L "$folder" ] || chmod u+rwx -- "$folder"; done
[ -L "$1/probe" ] || chmod -R u+rwX -- "$1/probe"
"""
# Accepts only a regular file with a single link, writable by its owner, in a real folder. Anything else may have been planted.
_READ = f"""{grading_sandbox.SYSTEM_PATH}
for file in "$1/verifier/reward.txt" "$1/verifier/reward.json"; do
  [ -e "$file" ] || [ -L "$file" ] || continue
  [ ! -L "$1/verifier" ] && [ -f "$file" ] && [ ! -L "$file" ] || exit {_SUSPICIOUS}
  [ "$(find "$1/verifier" "$file" -prune -perm -200 | wc -l)" -eq 2 ] || exit {_SUSPICIOUS}
  [ -n "$(find "$file" -links 1)" ] || exit {_SUSPICIOUS}
  echo "${{file##*.}}"; exec head -c {_MAX_REWARD_BYTES + 1} -- "$file"
done
exit {_MISSING}
"""


async def run_grader(
    task: Task, grader: Script, work: Work | None, environment: GradingEnvironment, log: GraderLog, control: Control
) -> GraderResult:
    log.hide_secrets(grader.env)
    if grader.files is not None and not grader.files.is_dir():
        raise TaskError(f"task: {task.id}: the tests folder {grader.files} does not exist", param="tests")
    if not grader.probe:
        async with grading_sandbox.open_sandbox(task, environment, life_s=grader.timeout_s) as sandbox:
            notes = await _upload_work(sandbox, grader, work)
            reward = await _run_script(sandbox, grader, environment, log, {})
            return GraderResult(grade=Grade(kind="graded", reward=reward, notes=notes))
    async with grading_sandbox.scratch_folder() as folder:
        probe_env, notes = await _run_probe(task, grader, work, environment, log, folder)
        async with grading_sandbox.open_sandbox(task, environment, life_s=grader.timeout_s) as sandbox:
            reward = await _run_script(sandbox, grader, environment, log, probe_env, folder / "left")
            return GraderResult(grade=Grade(kind="graded", reward=reward, notes=notes))


async def _run_probe(
    task: Task, grader: Script, work: Work | None, environment: GradingEnvironment, log: GraderLog, folder: Path
) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Run the probe on the work in a separate sandbox, and copy the probe's output to the host.

    Return the environment variables that tell the script how the probe ended, and notes on the files that could not be copied.
    """
    await asyncio.to_thread(_copy_probe_files, grader.files, folder / "tests")
    (folder / "left").mkdir()
    async with grading_sandbox.open_sandbox(task, environment, life_s=grader.timeout_s) as sandbox:
        notes = await _upload_work(sandbox, grader, work)
        tests, logs = await _prepare(sandbox, environment, folder / "tests")
        await sandbox.exec(["mkdir", "-p", f"{logs}/probe"], cwd="/", timeout_s=grading_sandbox.STEP_TIMEOUT_S)
        done = await _exec(sandbox, grader.probe, grader.timeout_s, tests, logs, {})
        log.add(f"probe: {_describe_exit(done)}", done.stdout)
        try:
            with reading_output():
                await sandbox.exec(
                    ["/bin/sh", "-c", _OPEN, "sh", logs], cwd="/", timeout_s=grading_sandbox.STEP_TIMEOUT_S
                )
                skipped = await sandbox.download(f"{logs}/probe", folder / "left")
        except SandboxFileMissing:
            skipped = ("the output folder no longer exists",)
        except OutputUnreadable as error:
            if isinstance(error.__cause__, SandboxTooLarge):
                raise Undecided(f"the probe's output is too large to copy: {error.message}") from None
            raise
    code = "timeout" if done.timed_out else str(done.exit_code)
    return {"TURNGATE_PROBE_EXIT": code}, (*notes, *format_names([f"probe: {line}" for line in skipped]))


async def _upload_work(sandbox: Sandbox, grader: Script, work: Work | None) -> tuple[str, ...]:
    return () if work is None else await grading_sandbox.upload_work(sandbox, work.folder, git=grader.git)


def _copy_probe_files(files: Path | None, target: Path) -> None:
    """Copy the files that the probe may see. The expected answers are not among them."""
    target.mkdir()
    for name in PROBE_FILES:
        source = (files or target) / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True)
        elif source.is_file():
            shutil.copy2(source, target / name)


async def _run_script(
    sandbox: Sandbox,
    grader: Script,
    environment: GradingEnvironment,
    log: GraderLog,
    env: Mapping[str, str],
    probed: Path | None = None,
) -> float:
    """Run the script and return its reward. Raise `Undecided` if the script gives no reward."""
    tests, logs = await _prepare(sandbox, environment, grader.files)
    if probed is not None:
        await sandbox.upload(probed, f"{logs}/probe")
    done = await _exec(sandbox, grader.command, grader.timeout_s, tests, logs, {**grader.env, **env})
    log.add(f"script: {_describe_exit(done)}", done.stdout)
    try:
        return await _decide(sandbox, grader, done, logs)
    except Undecided as reason:
        # Sandbox folders on the host have random names. Replace them, so that the same failure always has the same message.
        names = {tests: "$TURNGATE_TESTS", logs: "$TURNGATE_LOGS", sandbox.home: "$HOME", sandbox.workdir: "."}
        output = log.last_lines({} if logs == grading_sandbox.LOGS else names)
        raise Undecided(f"{reason}{'' if output else '; the script printed nothing'}", output) from None


async def _decide(sandbox: Sandbox, grader: Script, done: ExecResult, logs: str) -> float:
    """Return the reward of a script that has ended. Raise `Undecided` if it gave none."""
    if done.timed_out:
        raise Undecided(f"the grader's script took longer than its limit of {grader.timeout_s:g} s")
    code = done.exit_code
    if _SIGNAL < code <= _SIGNAL + _MAX_SIGNAL:
        raise Undecided(
            f"the grader's script was killed by signal {code - _SIGNAL} (exit code {code}), so its reward, if any, does not count"
        )
    if grader.decides == "exit code":
        if code in (0, 1):
            return 1.0 - code
        raise Undecided(f"the grader's script ended with exit code {code}, which is neither 0 (passed) nor 1 (failed)")
    try:
        return await _read_reward(sandbox, grader, logs)
    except Undecided as reason:
        raise Undecided(f"the grader's script gave no reward (exit code {code}): {reason}") from None


async def _prepare(sandbox: Sandbox, environment: GradingEnvironment, files: Path | None) -> tuple[str, str]:
    tests, logs = grading_sandbox.tests_and_logs(sandbox, environment)
    await grading_sandbox.run_step(sandbox, _PREPARE, logs, tests)
    if files is not None:
        await sandbox.upload(files, tests)
    return tests, logs


async def _exec(
    sandbox: Sandbox, command: Sequence[str], timeout_s: float, tests: str, logs: str, env: Mapping[str, str]
) -> ExecResult:
    words = [word.replace(grading_sandbox.TESTS, tests, 1) if _is_in_tests(word) else word for word in command]
    return await sandbox.exec(
        ["/bin/sh", "-c", _EXEC, "sh", *words],
        env={**env, "TURNGATE_TESTS": tests, "TURNGATE_LOGS": logs},
        timeout_s=timeout_s,
        keep=grading_sandbox.OUTPUT_LIMIT,
        leave=False,
    )


def _is_in_tests(word: str) -> bool:
    return word == grading_sandbox.TESTS or word.startswith(f"{grading_sandbox.TESTS}/")


def _describe_exit(done: ExecResult) -> str:
    return "timed out" if done.timed_out else f"exit code {done.exit_code}"


async def _read_reward(sandbox: Sandbox, grader: Script, logs: str) -> float:
    with reading_output():
        done = await sandbox.exec(
            ["/bin/sh", "-c", _READ, "sh", logs], cwd="/", timeout_s=grading_sandbox.STEP_TIMEOUT_S
        )
    if done.exit_code == _MISSING:
        is_moved = logs != grading_sandbox.LOGS
        hint = await asyncio.to_thread(_explain_fixed_folder, grader) if is_moved else ""
        where = "$TURNGATE_LOGS" if is_moved else logs
        raise Undecided(f"it wrote neither reward.txt nor reward.json to {where}/verifier{hint}")
    if done.exit_code == _SUSPICIOUS:
        raise Undecided(
            "the reward file may have been planted: it must be a regular, writable file with a single hard link, in a writable folder "
            "that is not a link"
        )
    kind, _, content = done.stdout.partition(b"\n")
    if done.exit_code or len(content) > _MAX_REWARD_BYTES:
        raise Undecided(f"the reward file cannot be read, or is longer than {_MAX_REWARD_BYTES} bytes")
    return _parse_reward(kind.decode(), content)


def _explain_fixed_folder(grader: Script) -> str:
    """Return a hint if the script mentions the fixed path /logs/verifier and never `TURNGATE_LOGS`. Otherwise, return an empty string."""
    texts = [word.encode("utf-8", "surrogateescape") for word in grader.command]
    for word in grader.command:
        if grader.files is not None and _is_in_tests(word):
            with suppress(OSError):
                texts.append((grader.files / word[len(grading_sandbox.TESTS) + 1 :]).read_bytes())
    script = b"\n".join(texts)
    if b"TURNGATE_LOGS" in script or not _FIXED_FOLDER.search(script):
        return ""
    return (
        f"; the script uses {grading_sandbox.LOGS}/verifier, but in the local sandbox the folder is elsewhere: use "
        f'"${{TURNGATE_LOGS:-{grading_sandbox.LOGS}}}/verifier"'
    )


def _parse_reward(kind: str, content: bytes) -> float:
    """Parse a reward file in one of Harbor's formats.

    A text file contains a number. A JSON file contains a number, or an object with a number as `reward` or as its only field.
    """
    expected = (
        "a finite number"
        if kind == "txt"
        else 'a finite number, or an object with a finite number as "reward" or as its only field'
    )
    problem = f"reward.{kind} must contain {expected}, not {content[:80]!r}"
    try:
        value: object = float(content) if kind == "txt" else msgspec.json.decode(content)
    except (ValueError, msgspec.DecodeError, RecursionError):
        raise Undecided(problem) from None
    if isinstance(value, dict):
        numbers = {name: number for name, number in value.items() if _is_number(number)}
        value = numbers.get("reward", next(iter(numbers.values())) if len(numbers) == len(value) == 1 else None)
    if not _is_number(value):
        raise Undecided(problem)
    assert isinstance(value, int | float)
    return float(value)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
