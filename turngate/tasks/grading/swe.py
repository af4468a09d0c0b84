"""Tests of a repository decide: those that failed have to pass, and those that passed have to go on doing so.

    a fresh checkout → its tests become those of the base commit → the test patch → the work, but for what runs the tests → install → tests

Git and the test patch meet the fresh checkout only: hooks, filters and settings of the agent's are never where git runs. Of the work,
everything is laid down but the tests' own files (those the patch touches, the test folders around them, conftest.py and the like): these
stay as the task has them. What the agent added that would change how tests run is set aside, and named.

The log is read between two marks that only the wrapping shell knows. For pytest there is a witness beside it (`witness.py`): a case passed
where both say so.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from turngate.errors import SandboxError, SandboxGone, TaskError
from turngate.sandboxes.base import Sandbox
from turngate.tasks.grading import sandbox as fresh
from turngate.tasks.grading import witness
from turngate.tasks.grading.logs import parse_log
from turngate.tasks.grading.patch import find_touched_files
from turngate.tasks.grading.result import Control, GraderLog, GraderResult, RunEvidence, Undecided
from turngate.tasks.grading.types import CaseOutcome, Grade, GradingEnvironment, Work
from turngate.tasks.grading.witness_report import WitnessReport, parse_report
from turngate.tasks.grading.work import GIT, format_names
from turngate.tasks.task import Swe, Task

# What decides how tests are found and run. Where the base has one it stays the base's; an added one is set aside.
RUNNER_FILES = frozenset({"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"})
# What Python would run or take for pytest without being asked for it; caches of compiled code need not match any source.
FORBIDDEN_NAMES = frozenset({"sitecustomize.py", "usercustomize.py", GIT})
PYTEST_MODULES = frozenset({"pytest", "pytest.py", "_pytest", "_pytest.py", "pluggy", "pluggy.py"})
# What an interpreter reads before it reads a `sitecustomize`, from the folders of PYTHONPATH too.
STARTUP_MODULES = frozenset(
    {"encodings", "codecs.py", "io.py", "abc.py", "site.py", "os.py", "stat.py", "posixpath.py"}
) | {"genericpath.py", "_collections_abc.py", "_sitebuiltins.py", "zipimport.py", "warnings.py"}
FORBIDDEN_SUFFIXES = (".pth", ".egg-link", ".pyc")
TEST_FOLDERS = ("test", "tests")
# They hold other things as well: the agent's, unless what they say to pytest changed.
SETTINGS_FILES = frozenset({"pyproject.toml", "setup.cfg", "tox.ini"})
INSTALL_S = 1800.0
_MAX_REPORT_BYTES = 64_000_000  # bytes
_MAX_SETTINGS_BYTES = 2_000_000  # bytes of a settings file
_FAILED: tuple[CaseOutcome, ...] = ("failed", "error")
_NOT_RUN = 126  # exit codes from here on: nothing was run, or a signal ended it
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
# $1 the repository, $2 our folder: with `patch`, and the paths that it touches in `touched`; $3 the base commit
_PATCH = f"""{fresh.SYSTEM_PATH}
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
_LIST = f'{fresh.SYSTEM_PATH}; cd -- "$1" && find . -path ./{GIT} -prune -o ! -type d -print0'
_SUMS = f'{fresh.SYSTEM_PATH}; cd -- "$1" && xargs -0 sha256sum --'
_PREFER_BASH = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$@"; else exec sh -c "$@"; fi'
_INSTALL = 'exec </dev/null 2>&1; eval "$1"; eval "$2"'
# The marks come by stdin: nothing that runs below this shell finds them in an argument or a variable.
_RUN = """
IFS= read -r turngate_start; IFS= read -r turngate_end
exec </dev/null 2>&1
turngate_place=$1 turngate_command=$3
eval "$2"
PYTHONPATH="$turngate_place${PYTHONPATH:+:$PYTHONPATH}"; export PYTHONPATH
printf '\\n%s\\n' "$turngate_start"
( eval "$turngate_command" )
turngate_code=$?
printf '\\n%s %s\\n' "$turngate_end" "$turngate_code"
"""
# PYTHONPATH may hold the working folder: what the witness is made of comes from Python's own library, and from nowhere else.
_SITE = """
try:
    import os, sys
    turngate_path = list(sys.path)
    turngate_version = "python%d.%d" % sys.version_info[:2]
    turngate_own = [os.path.dirname(os.path.abspath(__file__))]
    for turngate_prefix in (sys.base_prefix, sys.base_exec_prefix):
        for turngate_lib in (getattr(sys, "platlibdir", "lib"), "lib", "lib64"):
            turngate_place = os.path.join(turngate_prefix, turngate_lib, turngate_version)
            turngate_own += [turngate_place, os.path.join(turngate_place, "lib-dynload")]
    sys.path[:] = [place for place in turngate_own if os.path.isdir(place)]
    try:
        import turngate_witness
        import importlib.machinery, importlib.util
    finally:
        sys.path[:] = turngate_path
    try:
        turngate_witness.start_witness()
    finally:
        turngate_witness.run_next_sitecustomize()
except Exception:
    pass
"""


async def run_grader(
    task: Task, grader: Swe, work: Work | None, ground: GradingEnvironment, log: GraderLog, control: Control
) -> GraderResult:
    if not (grader.fail_to_pass or grader.pass_to_pass):
        raise TaskError(
            f"task: {task.id}: FAIL_TO_PASS and PASS_TO_PASS are empty: nothing decides", param="FAIL_TO_PASS"
        )
    async with fresh.open_sandbox(task, ground, life_s=grader.timeout_s + INSTALL_S) as sandbox:
        guard = _TestFiles(_find_patched_tests(task, grader), await _list_files(sandbox), _expected_cases(grader))
        found = await _checksum_files(sandbox, guard) if work is not None else {}
        await _apply_test_patch(sandbox, task, grader, guard.changed, log)
        base = await _list_files(sandbox)
        notes = await _lay_work_around_tests(sandbox, work, guard, found, base) if work is not None else ()
        await _install_work(sandbox, grader, log)
        seen, code = await _run_tests(sandbox, grader, [path for path in base if guard(path)], log)
    _check_decisive(grader, seen, code, untouched=work is None)
    if work is not None and (doubt := _find_doubtful(grader, seen)):
        seen, more = _weigh_doubts(grader, seen, doubt, (await control()).seen)
        notes = (*notes, *more)
    return GraderResult(grade=_grade(grader, seen, notes), seen=seen)


# ---- the checkout and the work ----


def _find_patched_tests(task: Task, grader: Swe) -> tuple[str, ...]:
    changed = find_touched_files(grader.test_patch)
    for path in changed:
        if not path or path.startswith("/") or ".." in PurePosixPath(path).parts or "\n" in path:
            raise TaskError(f"task: {task.id}: test_patch: {path!r} is no path in a repository", param="test_patch")
    return changed


async def _apply_test_patch(sandbox: Sandbox, task: Task, grader: Swe, changed: Sequence[str], log: GraderLog) -> None:
    """The tests as the task wants them, on a checkout that no agent has seen."""
    names = b"".join(os.fsencode(path) + b"\n" for path in changed)
    patch = grader.test_patch.encode("utf-8", "surrogateescape")
    ours = await fresh.upload_private_files(sandbox, {"touched": names, "patch": patch})
    command = ["/bin/sh", "-c", _PATCH, "sh", sandbox.workdir, ours, grader.base_commit]
    done = await sandbox.exec(command, cwd="/", timeout_s=fresh.STEP_TIMEOUT_S, leave=False)
    said = (done.stdout + done.stderr).decode("utf-8", "replace").strip()[-500:]
    if done.exit_code == _NO_PATCH:
        log.add("test patch", done.stdout + done.stderr)
        raise TaskError(f"task: {task.id}: test_patch cannot be applied to the base commit: {said}", param="test_patch")
    if done.exit_code or done.timed_out:
        raise SandboxError(f"the tests could not be put in place: {said or f'exit code {done.exit_code}'}")


class _TestFiles:
    """Which files are the tests' own: those that the test patch touches or that the task's cases name, the test folders around the
    former, and what steers the runner. `base`: the files of the base commit."""

    def __init__(self, changed: Sequence[str], base: Iterable[str], cases: Iterable[str]) -> None:
        self.changed = tuple(changed)
        files = frozenset(base)
        self._own = frozenset(changed) | (files & {_case_file(case) for case in cases})
        self._folders = {folder for path in changed if (folder := _test_folder(path))}
        # A repository may be pytest itself, or a part of Python: what it has of that is the agent's to change.
        self._known = {prefix for path in files for part, prefix in _shadowing_parts(PurePosixPath(path).parts)}
        self.settings: set[str] = set()
        self.packages: frozenset[str] = frozenset()  # folders of the work with an __init__.py

    def __call__(self, path: str) -> bool:
        parts = PurePosixPath(path).parts
        below = any("/".join(parts[: n + 1]) in self._folders for n in range(len(parts)))
        return below or path in self._own or path in self.settings or _steers_runner(parts) or self._instead(parts)

    def _instead(self, parts: Sequence[str]) -> bool:
        """Whether it would be taken for a part of pytest or of Python. A module in a package is not."""
        for part, prefix in _shadowing_parts(parts):
            inside = part in STARTUP_MODULES and prefix.rpartition("/")[0] in self.packages
            if prefix not in self._known and not inside:
                return True
        return False


def _shadowing_parts(parts: Sequence[str]) -> list[tuple[str, str]]:
    """Each part of a path that has a name of pytest's or Python's, and the path up to it."""
    return [
        (part, "/".join(parts[: n + 1]))
        for n, part in enumerate(parts)
        if part in PYTEST_MODULES or part in STARTUP_MODULES
    ]


def _case_file(case: str) -> str:
    """The file that a case names. A doctest's is no test file: `shop/sums.py::shop.sums.total`."""
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


async def _lay_work_around_tests(
    sandbox: Sandbox, work: Work, guard: _TestFiles, found: Mapping[str, str], base: set[str]
) -> tuple[str, ...]:
    """Lay the work down around the tests. `found`: their files as the agent found them. What of the work was set aside."""
    mine = await asyncio.to_thread(_list_work_files, work.folder)
    guard.packages = frozenset(path.rpartition("/")[0] for path in mine if PurePosixPath(path).name == "__init__.py")
    guard.settings = await _find_changed_settings(sandbox, work.folder, mine, base, found)
    held = sorted(path for path in base if guard(path) and not _is_cache(path))
    exclude = {path for path in mine if guard(path) or _is_cache(path)}
    own = {path: value for path, value in found.items() if guard(path)}
    told = await asyncio.to_thread(_note_changes, work.folder, exclude, mine, own, guard.settings & base)
    return (*format_names(told), *await fresh.lay_work(sandbox, work.folder, exclude=exclude, held=held))


def _is_cache(path: str) -> bool:
    return fresh.PYTHON_CACHE in PurePosixPath(path).parts


async def _list_files(sandbox: Sandbox) -> set[str]:
    listed = await fresh.run_step(sandbox, _LIST, sandbox.workdir)
    return {os.fsdecode(path).removeprefix("./") for path in listed.stdout.split(b"\0") if path}


def _list_work_files(folder: Path) -> set[str]:
    """All that is no folder, by its path in it; links to folders are links."""
    found = set()
    for place, folders, files in os.walk(folder):
        rest = [name for name in folders if Path(place, name).is_symlink()]
        found |= {str(Path(place, name).relative_to(folder)) for name in (*files, *rest)}
    return found


def _note_changes(
    folder: Path, exclude: set[str], mine: set[str], found: Mapping[str, str], settings: set[str]
) -> list[str]:
    """What the agent did to files that are not its to change."""
    told = []
    for path in sorted(exclude):
        if _is_cache(path):
            continue
        if path in settings:
            told.append(f"{path}: what it says to pytest was changed by the work; the task's own is used")
        elif path not in found:
            told.append(f"{path}: added by the work, and set aside")
        elif (folder / path).is_symlink() or _checksum(folder / path) != found[path]:
            told.append(f"{path}: changed by the work; the task's own is used")
    return told + [f"{path}: removed by the work; the task's own is used" for path in sorted(found) if path not in mine]


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _checksum_files(sandbox: Sandbox, guard: _TestFiles) -> dict[str, str]:
    """The tests' own files, and settings, as the agent found them."""
    listed = await _list_files(sandbox)
    paths = [
        path for path in listed if (guard(path) or PurePosixPath(path).name in SETTINGS_FILES) and not _is_cache(path)
    ]
    if not paths:
        return {}
    names = b"".join(os.fsencode(f"./{path}") + b"\0" for path in paths)
    command = ["/bin/sh", "-c", _SUMS, "sh", sandbox.workdir]
    done = await sandbox.exec(
        command, cwd="/", stdin=names, timeout_s=fresh.STEP_TIMEOUT_S
    )  # links that lead nowhere have none
    sums = dict.fromkeys(paths, "")
    for line in filter(None, done.stdout.split(b"\n")):
        odd = line.startswith(b"\\")  # as sha256sum writes a name with a line end in it
        value, _, name = line.removeprefix(b"\\").partition(b"  ")
        if odd:
            name = name.replace(b"\\n", b"\n").replace(b"\\\\", b"\\")
        sums[os.fsdecode(name).removeprefix("./")] = value.decode("ascii", "replace")
    return sums


async def _find_changed_settings(
    sandbox: Sandbox, folder: Path, mine: set[str], base: set[str], found: Mapping[str, str]
) -> set[str]:
    """Settings files, wherever they lie, in which the agent changed what is said to pytest."""
    changed = set()
    for path in sorted(mine | base):
        name = PurePosixPath(path).name
        if name not in SETTINGS_FILES or await asyncio.to_thread(_is_unchanged, folder / path, found.get(path)):
            continue
        ours = await asyncio.to_thread(_read_settings, folder / path) if path in mine else b""
        theirs = await _read_base_settings(sandbox, path) if path in base else b""
        if ours is None or theirs is None or not await asyncio.to_thread(_same_pytest_settings, name, ours, theirs):
            changed.add(path)
    return changed


def _is_unchanged(path: Path, found: str | None) -> bool:
    try:
        return found is not None and not path.is_symlink() and path.is_file() and _checksum(path) == found
    except OSError:
        return False


def _read_settings(path: Path) -> bytes | None:
    """None: it is nothing that anybody would read."""
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
    except SandboxError:  # too large, or a link that leads nowhere
        return None


def _same_pytest_settings(name: str, ours: bytes, theirs: bytes) -> bool:
    """Whether two settings files say the same to pytest. What cannot be read says something else than any other."""
    try:
        if name.endswith(".toml"):
            one, other = (tomllib.loads(text.decode()).get("tool", {}).get("pytest") for text in (ours, theirs))
            return repr(one) == repr(other)
        return _same_ini_settings(ours.decode(), theirs.decode())
    except Exception:  # whatever an agent writes there
        return False


def _same_ini_settings(ours: str, theirs: str) -> bool:
    """Readers of such files differ about what a header is: so no line with pytest in it may differ, and none that is an odd header."""
    one, other = ours.splitlines(), theirs.splitlines()
    for line in (line for line in {*one} ^ {*other} if line):
        if "pytest" in line.lower() or (line.lstrip().startswith("[") and not _HEADER.fullmatch(line)):
            return False
    return _pytest_lines(one) == _pytest_lines(other)


def _pytest_lines(lines: Iterable[str]) -> list[str]:
    """The lines of all sections that have pytest in their name."""
    said, within = [], False
    for line in lines:
        if line.startswith("["):
            within = "pytest" in line.lower()
        if within and line.strip():
            said.append(line)
    return said


# ---- the tests ----


async def _install_work(sandbox: Sandbox, grader: Swe, log: GraderLog) -> None:
    if not grader.install:
        return
    command = ["/bin/sh", "-c", _PREFER_BASH, "sh", _INSTALL, "sh", grader.before, grader.install]
    done = await sandbox.exec(command, timeout_s=INSTALL_S, keep=fresh.OUTPUT_LIMIT, leave=False)
    log.add(f"install: {'ran out of time' if done.timed_out else f'exit code {done.exit_code}'}", done.stdout)
    if done.timed_out or done.exit_code:
        raise Undecided("the work cannot be installed")


async def _run_tests(sandbox: Sandbox, grader: Swe, own: Iterable[str], log: GraderLog) -> tuple[RunEvidence, int]:
    """Run the tests. `own`: their files. What the log and the witness say, and the exit code."""
    key, start, end = (secrets.token_hex(24) for _ in range(3))
    source = await asyncio.to_thread(Path(witness.__file__).read_bytes)
    tests = b"\0".join(os.fsencode(path) for path in (sandbox.workdir, *own))
    files = {"turngate_witness.py": source, "sitecustomize.py": _SITE.encode(), "key": key.encode(), "tests": tests}
    ours = await fresh.upload_private_files(sandbox, files)
    done = await sandbox.exec(
        ["/bin/sh", "-c", _PREFER_BASH, "sh", _RUN, "sh", ours, grader.before, grader.test_cmd],
        stdin=f"{start}\n{end}\n".encode(),
        timeout_s=grader.timeout_s,
        keep=fresh.OUTPUT_LIMIT,
        leave=False,
    )
    said = done.stdout.decode("utf-8", "replace")
    log.add(
        f"tests: {'ran out of time' if done.timed_out else f'exit code {done.exit_code}'}",
        done.stdout.replace(start.encode(), b"(start)").replace(end.encode(), b"(end)"),
    )
    if done.timed_out:
        raise Undecided(f"the tests ran out of their {grader.timeout_s:.0f} s")
    _, began, rest = said.partition(f"\n{start}\n")
    between, ended, last = rest.rpartition(f"\n{end} ")
    if not began or not ended or not last.strip().isdigit():
        raise Undecided("the tests were ended before they came to their end")
    cases = await asyncio.to_thread(parse_log, grader.parser, between)
    try:
        report = await sandbox.read(f"{ours}/report", limit=_MAX_REPORT_BYTES)
    except SandboxGone:
        raise
    except SandboxError:  # there is none, or what lies there is no report: nothing was testified
        report = b""
    testimony = await asyncio.to_thread(parse_report, key.encode(), report)
    if testimony.begun:
        how = "its end was seen" if testimony.ended else "its end was not seen"
        changed = f"; changed while it ran: {', '.join(sorted(testimony.odd))}" if testimony.odd else ""
        other = f"; something else ran in the place of {len(testimony.others)}" if testimony.others else ""
        log.add(f"witness: {len(testimony.outcomes)} tests, {how}{changed}{other}", b"")
    return RunEvidence(cases=cases, testimony=testimony), int(last)


def _expected_cases(grader: Swe) -> tuple[str, ...]:
    return (*grader.fail_to_pass, *grader.pass_to_pass)


def _check_decisive(grader: Swe, seen: RunEvidence, code: int, *, untouched: bool) -> None:
    """Whether the tests said anything. `Undecided`, where they did not."""
    failures = any(case in _FAILED for case in seen.cases.values())
    whole = untouched and not grader.pass_to_pass and code < _NOT_RUN  # nothing has to pass yet, so all may fail in one
    if code and not failures and not whole:
        raise Undecided(f"the tests ended with exit code {code}, and no test is known to have failed")
    if untouched and grader.pass_to_pass and not any(seen.cases.get(case) == "passed" for case in grader.pass_to_pass):
        raise Undecided("of the tests that pass before any change, none does")
    if untouched and not code and not any(case in seen.cases for case in _expected_cases(grader)):
        raise Undecided("the log tells of none of the task's tests")


def _find_doubtful(grader: Swe, seen: RunEvidence) -> frozenset[str]:
    """Cases that passed by the log, and not by the witness; all of them where something about pytest was changed."""
    passed = frozenset(case for case in _expected_cases(grader) if seen.cases.get(case) == "passed")
    if seen.testimony.odd:
        return passed
    return frozenset(case for case in passed if not seen.testimony.passed(case))


def _weigh_doubts(
    grader: Swe, seen: RunEvidence, doubt: frozenset[str], base: RunEvidence | None
) -> tuple[RunEvidence, tuple[str, ...]]:
    """Doubts count where the witness saw the same tests of the untouched task without any."""
    assert base is not None
    if not base.testimony.ended or _find_doubtful(grader, _without_tampering(base)):
        return seen, ("there is no witness for the tests of this task: the log alone decides",)
    changed = seen.testimony.odd - base.testimony.odd
    others = seen.testimony.others - base.testimony.others  # where it is so in the untouched task, it is the task's way
    if not changed:
        known = msgspec.structs.replace(seen.testimony, odd=frozenset(), others=others)
        doubt = _find_doubtful(grader, RunEvidence(cases=seen.cases, testimony=known))
    if not doubt:
        return seen, ()
    cases = {**seen.cases, **{case: _unwitnessed_outcome(case, seen.testimony) for case in doubt}}
    how = (
        f"the work changed what decides about tests ({', '.join(sorted(changed)[:5])})"
        if changed
        else f"something else ran in the place of {', '.join(sorted(others)[:5])}"
        if others
        else "the witness of the run did not see that"
        if seen.testimony.ended
        else "the witness did not see the run come to its end"
    )
    return RunEvidence(cases=cases, testimony=seen.testimony), (f"{len(doubt)} tests passed by the log; {how}",)


def _without_tampering(seen: RunEvidence) -> RunEvidence:
    return RunEvidence(
        cases=seen.cases, testimony=msgspec.structs.replace(seen.testimony, odd=frozenset(), others=frozenset())
    )


def _unwitnessed_outcome(case: str, testimony: WitnessReport) -> CaseOutcome:
    return "failed" if testimony.knows(case) else "missing"


def _case_outcome(case: str, seen: RunEvidence) -> CaseOutcome:
    """Logs name tests that passed or failed; those that were skipped, not always."""
    if case not in seen.cases and seen.testimony.outcomes.get(case) == "skipped":
        return "skipped"
    return seen.cases.get(case, "missing")


def _grade(grader: Swe, seen: RunEvidence, notes: Iterable[str]) -> Grade:
    wanted = _expected_cases(grader)
    cases = {case: _case_outcome(case, seen) for case in wanted}
    passed = sum(case == "passed" for case in cases.values())
    resolved = passed == len(cases)
    reward = float(resolved) if grader.reward == "resolved" else passed / len(cases)
    message = "" if resolved else f"{passed} of {len(cases)} tests passed"
    return Grade(kind="graded", reward=reward, resolved=resolved, cases=cases, message=message, notes=tuple(notes))
