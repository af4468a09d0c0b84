"""Grading with a repository's tests: those that fail without the work must pass with it, and those that already pass must still pass.

    fresh checkout → its tests at the base commit → the test patch → the work, without test files → install → run the tests

Git and the test patch are used only on the fresh checkout, which has none of the agent's hooks, filters and settings. All of the work is
then copied in, except Python's caches and the test files, such as the files that the patch touches, the test folders around them, and
conftest.py. Test files stay as the task defines them. Files that the agent added are set aside and reported if they would change how
tests run.

For pytest, a witness (`witness.py`) also observes the run (`observed_run.py`). A case counts as passed only if both the log and the witness
say so. If the witness misses a passed test or the end of the run even on the untouched task, the log alone decides.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from turngate.errors import SandboxError, SandboxGone, TaskError
from turngate.sandboxes.base import Sandbox
from turngate.tasks.grading import sandbox as grading_sandbox
from turngate.tasks.grading.logs import parse_log
from turngate.tasks.grading.observed_run import PREFER_BASH, run_observed
from turngate.tasks.grading.patch import find_touched_files
from turngate.tasks.grading.result import Control, GraderLog, GraderResult, RunEvidence, Undecided
from turngate.tasks.grading.types import CaseOutcome, Grade, GradingEnvironment, Work
from turngate.tasks.grading.witness_report import WitnessReport
from turngate.tasks.grading.work import GIT, format_names
from turngate.tasks.task import Swe, Task

# Files that control how tests are found and run. The base commit's versions are kept, and files that the agent added are set aside.
RUNNER_FILES = frozenset({"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"})
# Files that Python would run or import on its own. They include compiled code, which need not match its source.
FORBIDDEN_NAMES = frozenset({"sitecustomize.py", "usercustomize.py", GIT})
PYTEST_MODULES = frozenset({"pytest", "pytest.py", "_pytest", "_pytest.py", "pluggy", "pluggy.py"})
# Modules that an interpreter imports before `sitecustomize`, even from folders on PYTHONPATH.
STARTUP_MODULES = frozenset(
    {"encodings", "codecs.py", "io.py", "abc.py", "site.py", "os.py", "stat.py", "posixpath.py"}
) | {"genericpath.py", "_collections_abc.py", "_sitebuiltins.py", "zipimport.py", "warnings.py"}
FORBIDDEN_SUFFIXES = (".pth", ".egg-link", ".pyc")
TEST_FOLDERS = ("test", "tests")
# These files contain other settings too, so the agent's versions are used unless their pytest settings have changed.
SETTINGS_FILES = frozenset({"pyproject.toml", "setup.cfg", "tox.ini"})
INSTALL_S = 1800.0
_MAX_SETTINGS_BYTES = 2_000_000
_FAILED: tuple[CaseOutcome, ...] = ("failed", "error")
_NOT_RUN = 126  # exit codes from 126 on mean that nothing was run, or that a signal killed it
_NO_PATCH = 46
_HEADER = re.compile(r"\[[\w:.,{} *\"'/-]+\]\s*")

_GIT = """
GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL="$ours/gitconfig" HOME="$ours" GIT_ATTR_NOSYSTEM=1 GIT_TERMINAL_PROMPT=0
export GIT_CONFIG_NOSYSTEM GIT_CONFIG_GLOBAL HOME GIT_ATTR_NOSYSTEM GIT_TERMINAL_PROMPT
printf '[safe]\\n\\tdirectory = *\\n' >"$ours/gitconfig"; cp "$ours/gitconfig" "$ours/.gitconfig"
g() {
  git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.attributesFile=/dev/null -c diff.external= \\
    -c core.autocrlf=false -c core.safecrlf=false -c submodule.recurse=false -c gc.auto=0 -c advice.detachedHead=false "$@"
}
"""
# $1: the repository; $2: our folder, with `patch` and, in `touched`, the paths that it touches; $3: the base commit
_PATCH = f"""{grading_sandbox.SYSTEM_PATH}
cd -- "$1" && ours=$2 base=$3 || exit 1
GIT_CEILING_DIRECTORIES=$(dirname -- "$1"); export GIT_CEILING_DIRECTORIES
{_GIT}
if [ -e {GIT} ] && command -v git >/dev/null && g rev-parse --quiet --verify "$base^{{commit}}" >/dev/null 2>&1; then
  while IFS= read -r path; do
    if g cat-file -e "$base:$path" 2>/dev/null; then g checkout --quiet "$base" -- ":(literal)$path" || exit 1
    else rm -rf -- "$path"; fi
  done <"$ours/touched"
fi
[ -s "$ours/patch" ] || exit 0
if command -v git >/dev/null; then
  g apply --whitespace=nowarn "$ours/patch" || g apply --whitespace=nowarn --ignore-whitespace "$ours/patch" || exit {_NO_PATCH}
elif command -v patch >/dev/null; then
  patch --batch --forward --fuzz=0 --no-backup-if-mismatch -p1 -i "$ours/patch" || exit {_NO_PATCH}
else
  echo "the image has neither git nor patch"; exit {_NO_PATCH}
fi
"""
_LIST = f'{grading_sandbox.SYSTEM_PATH}; cd -- "$1" && find . -path ./{GIT} -prune -o ! -type d -print0'
_SUMS = f'{grading_sandbox.SYSTEM_PATH}; cd -- "$1" && xargs -0 sha256sum --'
_INSTALL = 'exec </dev/null 2>&1; eval "$1"; eval "$2"'


async def run_grader(
    task: Task, grader: Swe, work: Work | None, environment: GradingEnvironment, log: GraderLog, control: Control
) -> GraderResult:
    if not (grader.fail_to_pass or grader.pass_to_pass):
        raise TaskError(
            f"task: {task.id}: fail_to_pass and pass_to_pass are empty; name at least one test", param="FAIL_TO_PASS"
        )
    async with grading_sandbox.open_sandbox(task, environment, life_s=grader.timeout_s + INSTALL_S) as sandbox:
        test_files = _TestFiles(_find_patched_tests(task, grader), await _list_files(sandbox), _all_cases(grader))
        checksums = await _checksum_files(sandbox, test_files) if work is not None else {}
        await _apply_test_patch(sandbox, task, grader, test_files.changed, log)
        base = await _list_files(sandbox)
        notes = await _upload_work_around_tests(sandbox, work, test_files, checksums, base) if work is not None else ()
        await _install_work(sandbox, grader, log)
        evidence, code = await _run_tests(sandbox, grader, [path for path in base if test_files(path)], base, log)
    _check_decisive(grader, evidence, code, untouched=work is None)
    if work is not None and (doubt := _find_doubtful(grader, evidence)):
        evidence, more = _weigh_doubts(grader, evidence, doubt, (await control()).evidence)
        notes = (*notes, *more)
    return GraderResult(grade=_grade(grader, evidence, notes), evidence=evidence)


# ---- the checkout and the work ----


def _find_patched_tests(task: Task, grader: Swe) -> tuple[str, ...]:
    changed = find_touched_files(grader.test_patch)
    for path in changed:
        if not path or path.startswith("/") or ".." in PurePosixPath(path).parts or "\n" in path:
            raise TaskError(
                f"task: {task.id}: test_patch contains {path!r}, which is not a valid path inside the repository",
                param="test_patch",
            )
    return changed


async def _apply_test_patch(sandbox: Sandbox, task: Task, grader: Swe, changed: Sequence[str], log: GraderLog) -> None:
    """Set up the task's tests in a checkout that no agent has touched."""
    names = b"".join(os.fsencode(path) + b"\n" for path in changed)
    patch = grader.test_patch.encode("utf-8", "surrogateescape")
    ours = await grading_sandbox.upload_private_files(sandbox, {"touched": names, "patch": patch})
    command = ["/bin/sh", "-c", _PATCH, "sh", sandbox.workdir, ours, grader.base_commit]
    done = await sandbox.exec(command, cwd="/", timeout_s=grading_sandbox.STEP_TIMEOUT_S, leave=False)
    output = (done.stdout + done.stderr).decode("utf-8", "replace").strip()[-500:]
    if done.exit_code == _NO_PATCH:
        log.add("test patch", done.stdout + done.stderr)
        raise TaskError(f"task: {task.id}: test_patch cannot be applied: {output}", param="test_patch")
    if done.exit_code or done.timed_out:
        failed = output or f"exit code {done.exit_code}"
        reason = f"it took longer than {grading_sandbox.STEP_TIMEOUT_S:g} s" if done.timed_out else failed
        raise SandboxError(f"could not set up the tests: {reason}")


class _TestFiles:
    """A predicate that returns whether a file belongs to the tests.

    The tests include the files that the test patch touches, the test folders around them, the files with the task's test cases, and files
    that control how tests are run. Without a test patch, they also include the test folders around the files with the test cases. `base`
    lists the files of the fresh checkout.
    """

    def __init__(self, changed: Sequence[str], base: Iterable[str], cases: Iterable[str]) -> None:
        self.changed = tuple(changed)
        files = frozenset(base)
        self._own = frozenset(changed) | (files & {_case_file(case) for case in cases})
        # Without a patch, the task's files contain the tests already.
        self._folders = {folder for path in changed or self._own if (folder := _test_folder(path))}
        # If the repository is pytest itself or a part of Python, the agent may change those modules.
        self._known = {prefix for path in files for part, prefix in _shadowing_parts(PurePosixPath(path).parts)}
        self.settings: set[str] = set()
        self.packages: frozenset[str] = frozenset()  # folders of the work that contain an __init__.py

    def __call__(self, path: str) -> bool:
        parts = PurePosixPath(path).parts
        below = any("/".join(parts[: n + 1]) in self._folders for n in range(len(parts)))
        return (
            below or path in self._own or path in self.settings or _steers_runner(parts) or self._shadows_module(parts)
        )

    def _shadows_module(self, parts: Sequence[str]) -> bool:
        """Return whether Python would import a file in place of a pytest or Python module.

        A file inside a package cannot replace a startup module.
        """
        for part, prefix in _shadowing_parts(parts):
            inside = part in STARTUP_MODULES and prefix.rpartition("/")[0] in self.packages
            if prefix not in self._known and not inside:
                return True
        return False


def _shadowing_parts(parts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the parts of a path that have the name of a pytest or Python module, each with the path up to and including that part."""
    return [
        (part, "/".join(parts[: n + 1]))
        for n, part in enumerate(parts)
        if part in PYTEST_MODULES or part in STARTUP_MODULES
    ]


def _case_file(case: str) -> str:
    """Return the file part of the name of a test case, such as `tests/test_sums.py::test_add`.

    Return an empty string for a doctest (`shop/sums.py::shop.sums.total`), whose file is not a test file.
    """
    path, _, rest = case.partition("::")
    return "" if "." in rest.partition("::")[0].partition("[")[0] else path


def _test_folder(path: str) -> str:
    parts = PurePosixPath(path).parts[:-1]
    return next(("/".join(parts[: n + 1]) for n, part in enumerate(parts) if part.lower() in TEST_FOLDERS), "")


def _steers_runner(parts: Sequence[str]) -> bool:
    return (
        parts[-1] in RUNNER_FILES
        or parts[-1].endswith(FORBIDDEN_SUFFIXES)
        or any(part in FORBIDDEN_NAMES for part in parts)
    )


async def _upload_work_around_tests(
    sandbox: Sandbox, work: Work, test_files: _TestFiles, checksums: Mapping[str, str], base: set[str]
) -> tuple[str, ...]:
    """Copy the work into the sandbox without changing the tests.

    `checksums` contains the checksums of the test files and the settings files, as the agent found them. Return notes on the agent's
    changes to test files, and on files that could not be copied.
    """
    work_files = await asyncio.to_thread(_list_work_files, work.folder)
    test_files.packages = frozenset(
        path.rpartition("/")[0] for path in work_files if PurePosixPath(path).name == "__init__.py"
    )
    test_files.settings = await _find_changed_settings(sandbox, work.folder, work_files, base, checksums)
    held = sorted(path for path in base if test_files(path) and not _is_cache(path))
    exclude = {path for path in work_files if test_files(path) or _is_cache(path)}
    originals = {path: value for path, value in checksums.items() if test_files(path)}
    notes = await asyncio.to_thread(
        _note_changes, work.folder, exclude, work_files, originals, test_files.settings & base
    )
    return (*format_names(notes), *await grading_sandbox.upload_work(sandbox, work.folder, exclude=exclude, held=held))


def _is_cache(path: str) -> bool:
    return grading_sandbox.PYTHON_CACHE in PurePosixPath(path).parts


async def _list_files(sandbox: Sandbox) -> set[str]:
    listed = await grading_sandbox.run_step(sandbox, _LIST, sandbox.workdir)
    return {os.fsdecode(path).removeprefix("./") for path in listed.stdout.split(b"\0") if path}


def _list_work_files(folder: Path) -> set[str]:
    """Return the paths of all files in a folder, except those in its `.git`. A link to a folder counts as a file."""
    paths = set()
    for place, folders, files in os.walk(folder):
        if GIT in folders and Path(place) == folder and not (folder / GIT).is_symlink():
            folders.remove(GIT)
        links = [name for name in folders if Path(place, name).is_symlink()]
        paths |= {str(Path(place, name).relative_to(folder)) for name in (*files, *links)}
    return paths


def _note_changes(
    folder: Path, exclude: set[str], work_files: set[str], originals: Mapping[str, str], settings: set[str]
) -> list[str]:
    """Describe the agent's changes to files that it must not change."""
    notes = []
    for path in sorted(exclude):
        if _is_cache(path):
            continue
        if path in settings:
            notes.append(f"{path}: pytest settings changed by the work; the task's own file is used")
        elif path not in originals:
            notes.append(f"{path}: added by the work and set aside")
        elif (folder / path).is_symlink() or _checksum(folder / path) != originals[path]:
            notes.append(f"{path}: changed by the work; the task's own file is used")
    return notes + [
        f"{path}: removed by the work; the task's own file is used"
        for path in sorted(originals)
        if path not in work_files
    ]


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _checksum_files(sandbox: Sandbox, test_files: _TestFiles) -> dict[str, str]:
    """Return the checksums of the test files and the settings files, as the agent found them."""
    listed = await _list_files(sandbox)
    paths = [
        path
        for path in listed
        if (test_files(path) or PurePosixPath(path).name in SETTINGS_FILES) and not _is_cache(path)
    ]
    if not paths:
        return {}
    names = b"".join(os.fsencode(f"./{path}") + b"\0" for path in paths)
    command = ["/bin/sh", "-c", _SUMS, "sh", sandbox.workdir]
    # Dangling links have no checksum.
    done = await sandbox.exec(command, cwd="/", stdin=names, timeout_s=grading_sandbox.STEP_TIMEOUT_S)
    sums = dict.fromkeys(paths, "")
    for line in filter(None, done.stdout.split(b"\n")):
        is_escaped = line.startswith(b"\\")  # sha256sum escapes names that contain a line break
        value, _, name = line.removeprefix(b"\\").partition(b"  ")
        if is_escaped:
            name = name.replace(b"\\n", b"\n").replace(b"\\\\", b"\\")
        sums[os.fsdecode(name).removeprefix("./")] = value.decode("ascii", "replace")
    return sums


async def _find_changed_settings(
    sandbox: Sandbox, folder: Path, work_files: set[str], base: set[str], checksums: Mapping[str, str]
) -> set[str]:
    """Return the settings files in which the agent changed the pytest settings, and the changed files that cannot be compared."""
    changed = set()
    for path in sorted(work_files | base):
        name = PurePosixPath(path).name
        if name not in SETTINGS_FILES or await asyncio.to_thread(_is_unchanged, folder / path, checksums.get(path)):
            continue
        ours = await asyncio.to_thread(_read_settings, folder / path) if path in work_files else b""
        theirs = await _read_base_settings(sandbox, path) if path in base else b""
        if ours is None or theirs is None or not await asyncio.to_thread(_same_pytest_settings, name, ours, theirs):
            changed.add(path)
    return changed


def _is_unchanged(path: Path, checksum: str | None) -> bool:
    try:
        return checksum is not None and not path.is_symlink() and path.is_file() and _checksum(path) == checksum
    except OSError:
        return False


def _read_settings(path: Path) -> bytes | None:
    """Read a settings file. Return None if it is a link, is too large, or cannot be read."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_SETTINGS_BYTES:
            return None
        return path.read_bytes()
    except OSError:
        return None


async def _read_base_settings(sandbox: Sandbox, path: str) -> bytes | None:
    try:
        return await sandbox.read(f"{sandbox.workdir}/{path}", limit=_MAX_SETTINGS_BYTES)
    except SandboxGone:
        raise
    except SandboxError:  # too large, or a dangling link
        return None


def _same_pytest_settings(name: str, ours: bytes, theirs: bytes) -> bool:
    """Return whether two settings files have the same pytest settings. A file that cannot be parsed differs from every other file."""
    try:
        if name.endswith(".toml"):
            one, other = (tomllib.loads(text.decode()).get("tool", {}).get("pytest") for text in (ours, theirs))
            return repr(one) == repr(other)
        return _same_ini_settings(ours.decode(), theirs.decode())
    except Exception:  # an agent may write anything
        return False


def _same_ini_settings(ours: str, theirs: str) -> bool:
    """Return whether two ini files have the same pytest settings.

    Parsers disagree about section headers. Files therefore also count as different if they differ in a line that mentions pytest, or in an
    unusual header.
    """
    one, other = ours.splitlines(), theirs.splitlines()
    for line in (line for line in {*one} ^ {*other} if line):
        if "pytest" in line.lower() or (line.lstrip().startswith("[") and not _HEADER.fullmatch(line)):
            return False
    return _pytest_lines(one) == _pytest_lines(other)


def _pytest_lines(lines: Iterable[str]) -> list[str]:
    """Return the lines of all sections with pytest in their name."""
    kept, within = [], False
    for line in lines:
        if line.startswith("["):
            within = "pytest" in line.lower()
        if within and line.strip():
            kept.append(line)
    return kept


# ---- the tests ----


async def _install_work(sandbox: Sandbox, grader: Swe, log: GraderLog) -> None:
    if not grader.install:
        return
    command = ["/bin/sh", "-c", PREFER_BASH, "sh", _INSTALL, "sh", grader.before, grader.install]
    done = await sandbox.exec(command, timeout_s=INSTALL_S, keep=grading_sandbox.OUTPUT_LIMIT, leave=False)
    log.add(f"install: {'timed out' if done.timed_out else f'exit code {done.exit_code}'}", done.stdout)
    if done.timed_out or done.exit_code:
        raise Undecided(
            f"the install command took longer than {INSTALL_S:g} s"
            if done.timed_out
            else f"the install command failed with exit code {done.exit_code}"
        )


async def _run_tests(
    sandbox: Sandbox, grader: Swe, own: Iterable[str], base: Collection[str], log: GraderLog
) -> tuple[RunEvidence, int]:
    """Run the tests. Return the evidence from the log and the witness, and the exit code.

    `own` lists the test files, and `base` lists all of the task's files.
    """
    run = await run_observed(sandbox, grader.test_cmd, before=grader.before, test_files=own, timeout_s=grader.timeout_s)
    log.add(f"tests: {'timed out' if run.timed_out else f'exit code {run.exit_code}'}", run.output)
    if run.timed_out:
        raise Undecided(f"the tests took longer than their limit of {grader.timeout_s:g} s")
    if run.log is None:
        raise Undecided("the test run was cut short")
    if hidden := run.report.find_hidden(base):
        raise Undecided(
            f"the tests cannot import {', '.join(hidden[:3])}, because pytest itself imports other modules of the same names; no work can "
            "change that, so remove the task"
        )
    cases = await asyncio.to_thread(parse_log, grader.parser, run.log)
    report = run.report
    if report.started:
        end = "and the end of the run" if report.ended else "but not the end of the run"
        changed = f"; changed during the run: {', '.join(sorted(report.tampered))}" if report.tampered else ""
        other = f"; tests replaced by other code: {len(report.replaced)}" if report.replaced else ""
        log.add(f"witness: saw the start {end}; tests seen: {len(report.outcomes)}{changed}{other}", b"")
    return RunEvidence(cases=cases, report=report), run.exit_code


def _all_cases(grader: Swe) -> tuple[str, ...]:
    return (*grader.fail_to_pass, *grader.pass_to_pass)


def _check_decisive(grader: Swe, evidence: RunEvidence, code: int, *, untouched: bool) -> None:
    """Raise `Undecided` if the test run does not allow a decision."""
    failures = any(case in _FAILED for case in evidence.cases.values())
    # On the untouched task, all tests may fail if none has to pass yet.
    may_fail = untouched and not grader.pass_to_pass and code < _NOT_RUN
    if code and not failures and not may_fail:
        raise Undecided(f"the tests ended with exit code {code}, but the log contains no failed test")
    if (
        untouched
        and grader.pass_to_pass
        and not any(evidence.cases.get(case) == "passed" for case in grader.pass_to_pass)
    ):
        raise Undecided("none of the PASS_TO_PASS tests passed on the untouched task")
    if untouched and not code and not any(case in evidence.cases for case in _all_cases(grader)):
        raise Undecided("the log contains none of the task's tests")


def _find_doubtful(grader: Swe, evidence: RunEvidence) -> frozenset[str]:
    """Return the cases that passed according to the log, but not according to the witness.

    If pytest was changed during the run, return all cases that passed.
    """
    passed = frozenset(case for case in _all_cases(grader) if evidence.cases.get(case) == "passed")
    if evidence.report.tampered:
        return passed
    return frozenset(case for case in passed if not evidence.report.passed(case))


def _weigh_doubts(
    grader: Swe, evidence: RunEvidence, doubt: frozenset[str], base: RunEvidence | None
) -> tuple[RunEvidence, tuple[str, ...]]:
    """Decide the outcomes of the doubtful cases. Return the evidence with these outcomes, and notes.

    `base` is the evidence from the untouched task. If the witness cannot watch the tests even on the untouched task, the log alone decides.
    """
    assert base is not None
    if not base.report.ended or _find_doubtful(grader, _without_tampering(base)):
        return evidence, ("the witness cannot watch this task's tests, so the log alone decides",)
    changed = evidence.report.tampered - base.report.tampered
    # Tests that are also replaced on the untouched task were replaced by the task itself.
    replaced = evidence.report.replaced - base.report.replaced
    if not changed:
        known = msgspec.structs.replace(evidence.report, tampered=frozenset(), replaced=replaced)
        doubt = _find_doubtful(grader, RunEvidence(cases=evidence.cases, report=known))
    if not doubt:
        return evidence, ()
    cases = {**evidence.cases, **{case: _outcome_without_witness(case, evidence.report) for case in doubt}}
    reason = (
        f"the agent's work changed how pytest determines the outcomes of tests ({', '.join(sorted(changed)[:5])})"
        if changed
        else f"other code ran in place of {', '.join(sorted(replaced)[:5])}"
        if replaced
        else "the witness did not see them pass"
        if evidence.report.ended
        else "the witness did not see the end of the run"
    )
    return RunEvidence(cases=cases, report=evidence.report), (
        f"tests that passed according to the log, but do not count: {len(doubt)} ({reason})",
    )


def _without_tampering(evidence: RunEvidence) -> RunEvidence:
    return RunEvidence(
        cases=evidence.cases,
        report=msgspec.structs.replace(evidence.report, tampered=frozenset(), replaced=frozenset()),
    )


def _outcome_without_witness(case: str, report: WitnessReport) -> CaseOutcome:
    return "failed" if report.knows(case) else "missing"


def _case_outcome(case: str, evidence: RunEvidence) -> CaseOutcome:
    """Return the outcome of a case. A case that the log does not mention counts as skipped if the witness saw it skipped."""
    if case not in evidence.cases and evidence.report.outcomes.get(case) == "skipped":
        return "skipped"
    return evidence.cases.get(case, "missing")


def _grade(grader: Swe, evidence: RunEvidence, notes: Iterable[str]) -> Grade:
    expected = _all_cases(grader)
    cases = {case: _case_outcome(case, evidence) for case in expected}
    passed = sum(case == "passed" for case in cases.values())
    resolved = passed == len(cases)
    reward = float(resolved) if grader.reward == "resolved" else passed / len(cases)
    message = "" if resolved else f"{passed} of {len(cases)} tests passed"
    return Grade(kind="graded", reward=reward, resolved=resolved, cases=cases, message=message, notes=tuple(notes))
