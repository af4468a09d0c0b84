"""Parsers for the output of test runners. Each returns the outcomes of the tests in a log.

| name | parser |
|---|---|
| `pytest` | our own, for pytest's short summary (`-rA`) and its progress lines (`-v`, with or without xdist) |
| `unittest` | our own, for `python -m unittest -v` |
| `swebench:<owner/repo>` | the `swebench` package's parser for that repository (extra `swe`) |
| `swebench:<parser>`, `rebench:<parser>` | the `swebench` package's parser with that name, such as `parse_log_pytest` (extra `swe`) |

The agent's code can write anything to a log, so parsing must be fast for any input. Our own parsers take linear time. Those of `swebench`
do not, so they run in a separate process with a time limit.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from itertools import islice
from typing import Literal, NamedTuple

from turngate.errors import ConfigError, TaskError
from turngate.tasks.grading.result import Undecided
from turngate.tasks.grading.types import CaseOutcome

FOREIGN_TIMEOUT_S = 60.0  # time limit for a `swebench` parser
MAX_LINE = 8192  # characters; longer lines are never results
FOREIGN_KINDS = ("swebench", "rebench")

# Outcomes in the output of pytest and `swebench`. As in `swebench`, an unexpected pass (XPASS) is ignored, so its test counts as missing.
_CASES: dict[str, CaseOutcome] = {
    "PASSED": "passed",
    "XFAIL": "passed",
    "FAILED": "failed",
    "ERROR": "error",
    "SKIPPED": "skipped",
}
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])")


def parse_log(name: str, log: str) -> dict[str, CaseOutcome]:
    """Return the outcomes of the tests in a log. This may block for minutes, so do not call it in an event loop.

    Raise `Undecided` if the parser cannot read the log, and `TaskError` if the parser does not exist. Raise `ConfigError` if the parser
    needs the `swebench` package, but the package is not installed or cannot be imported.
    """
    if name in _OWN_PARSERS:
        return _OWN_PARSERS[name](_clean_lines(log))
    parser = _find_foreign_parser(name)
    statuses = _run_foreign_parser(parser.kind, parser.name, log)
    return {test: _CASES[status] for test, status in statuses.items() if status in _CASES}


def require_parser(name: str) -> None:
    """Raise `TaskError` if no parser has this name.

    Raise `ConfigError` if the parser needs the `swebench` package, but the package is not installed or cannot be imported.
    """
    if name not in _OWN_PARSERS:
        _find_foreign_parser(name)


# ---- pytest ----

_HEADER = re.compile(r"=+ (.{1,200}?) =+")
_START, _SUMMARY = "test session starts", "short test summary info"
# "=== 1 failed, 2 passed in 0.50s (0:00:00) ===", without "=" with -q, and "in 0.50 seconds" in old versions
_END = re.compile(
    r"(?:=+ )?(?:no tests ran|\d+ [a-z]+)\b[^=]{0,200} in \d+(?:\.\d+)?(?:s| seconds)(?: \([^)]{1,40}\))?(?: =+)?"
)
_RESULT = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|SUBFAIL(?:ED)?(?:\[[^\]]*\]|\([^)]*\))*) (\S.*)")
_COUNTED = re.compile(r"\[\d+\] ")  # "SKIPPED [2] test_a.py:7: why" names locations, not tests
_WORKER = re.compile(r"\[gw\d+\]\s+(?:\[\s*\d+%\]\s+)?(PASSED|FAILED|ERROR|SKIPPED|XFAIL) (\S.*)")
_WORD = re.compile(r" (PASSED|FAILED|ERROR|SKIPPED|XFAIL)(?= |$)")
_WORDS = 8  # how many outcome words to try: a parameter may contain some before the outcome
_AFTER = re.compile(r"(?: \(.*\)?)?(?: *\[ *\d+(?:%|/\d+)\])?")  # a reason, which may be cut off, and the progress
_ELSEWHERE = re.compile(r" <- \S+$")


def _parse_pytest(lines: Iterator[str]) -> dict[str, CaseOutcome]:
    """Parse pytest's output. The summary takes precedence over progress lines. The captured output of tests is ignored."""
    progress: dict[str, CaseOutcome] = {}
    summary: dict[str, CaseOutcome] = {}
    last: dict[str, CaseOutcome] = {}  # the current run's last summary, because a test may have printed one earlier
    part: Literal["progress", "reports", "summary"] = "progress"
    for line in lines:
        if _END.fullmatch(line):  # the log may contain further runs
            summary |= last
            last, part = {}, "progress"
        elif header := _HEADER.fullmatch(line):
            if header[1] == _SUMMARY:
                last, part = {}, "summary"
            else:
                part = "progress" if header[1] == _START else "reports"
        elif part == "summary":
            if result := _parse_summary_line(line):
                last[result[0]] = _worse(last.get(result[0]), result[1])
        elif part == "progress" and (result := _parse_progress_line(line)):
            progress[result[0]] = result[1]
    return {**progress, **summary, **last}


def _worse(one: CaseOutcome | None, other: CaseOutcome) -> CaseOutcome:
    """Return the later of two outcomes of one test (`other`), or the earlier one if only that one is a failure or an error.

    A test that passed and then failed in teardown has two lines, in the order given to `-r`.
    """
    return one if one in ("failed", "error") and other not in ("failed", "error") else other


def _parse_summary_line(line: str) -> tuple[str, CaseOutcome] | None:
    match = _RESULT.fullmatch(line)
    if match is None or (match[1] == "SKIPPED" and _COUNTED.match(match[2])):
        return None
    if match[1] == "PASSED":  # without a reason
        return match[2], "passed"
    case: CaseOutcome = "failed" if match[1].startswith("SUBFAIL") else _CASES[match[1]]
    return _strip_reason(match[2]), case


def _strip_reason(text: str) -> str:
    """Return the test's name from `path::test[a - b] - why`.

    Parameters may contain " - ", so the reason starts after the closing bracket.
    """
    at = text.find(" - ")
    first = at
    while at >= 0:
        head = text[:at]
        if "[" not in head or head.endswith("]"):
            return head
        at = text.find(" - ", at + 1)
    return text if first < 0 or text.endswith("]") else text[:first]


def _parse_progress_line(line: str) -> tuple[str, CaseOutcome] | None:
    if match := _WORKER.fullmatch(line):
        return match[2], _CASES[match[1]]
    if "::" not in line:
        return None
    for word in islice(_WORD.finditer(line), _WORDS):
        if _AFTER.fullmatch(line, word.end()) and "::" in line[: word.start()]:
            return _ELSEWHERE.sub("", line[: word.start()].rstrip()), _CASES[word[1]]
    return None


# ---- unittest ----

_NAMED = re.compile(r"\w+ \([\w.<>]+\)")
_OUTCOME = re.compile(r"(ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)")
_AGAIN = re.compile(r"(FAIL|ERROR): (\w+ \([\w.<>]+\))")


def _parse_unittest(lines: Iterator[str]) -> dict[str, CaseOutcome]:
    """Parse lines like `test_x (module.Class.test_x) ... ok`. A test's docstring or output may separate its name from its outcome."""
    cases: dict[str, CaseOutcome] = {}
    test = ""
    for line in lines:
        if again := _AGAIN.match(line):  # a report at the end; failed subtests are named only there
            cases[again[2]] = "failed" if again[1] == "FAIL" else "error"
            continue
        if named := _NAMED.match(line):
            test = named[0]
        outcome = _OUTCOME.fullmatch(line.rpartition(" ... ")[2].strip())
        if test and outcome and (" ... " in line or line == outcome[0]):
            if (case := _unittest_case(outcome[0])) is not None:
                cases[test] = case
            test = ""
    return cases


def _unittest_case(word: str) -> CaseOutcome | None:
    if word.startswith("skipped"):
        return "skipped"
    outcomes: dict[str, CaseOutcome] = {
        "ok": "passed",
        "expected failure": "passed",
        "FAIL": "failed",
        "ERROR": "error",
    }
    return outcomes.get(word)  # an unexpected success counts as missing, as with pytest


def _clean_lines(log: str) -> Iterator[str]:
    """Yield the lines of a log, without colors. Lines longer than `MAX_LINE` are skipped, because they are never results."""
    for line in log.split("\n"):
        if len(line) <= MAX_LINE:
            yield _ANSI.sub("", line).replace("\r", "").rstrip()


_OWN_PARSERS: dict[str, Callable[[Iterator[str]], dict[str, CaseOutcome]]] = {
    "pytest": _parse_pytest,
    "unittest": _parse_unittest,
}


# ---- swebench ----

# Runs in a separate process. The package's parsers need only the standard library and `unidiff`, but its `harness` also imports Docker,
# Modal and datasets, which takes seconds. An empty module therefore replaces it.
_SWEBENCH_SCRIPT = """
import json, sys, types
import swebench
inside = types.ModuleType("swebench.harness")
inside.__path__ = [swebench.__path__[0] + "/harness"]
sys.modules["swebench.harness"] = inside
import swebench.harness.log_parsers as parsers
from swebench.types import TestSpec
repos = {}
for language in list(vars(parsers).values()):
    for name, found in list(vars(language).items()) if isinstance(language, types.ModuleType) else ():
        if name.startswith("MAP_REPO_TO_PARSER"):
            repos.update({repo.lower(): parser for repo, parser in found.items()})
if len(sys.argv) == 1:
    answer = {"parsers": sorted(parsers.PARSER_REGISTRY), "repos": sorted(repos)}
else:
    kind, name = sys.argv[1:]
    parser = repos[name] if kind == "repo" else parsers.PARSER_REGISTRY[name]
    log = sys.stdin.buffer.read().decode("utf-8", "replace")
    answer = parser(log, TestSpec("", "", [], name, "", [], []))
sys.stdout.buffer.write(json.dumps(answer).encode())
"""


class SwebenchParsers(NamedTuple):
    """The parsers and repositories that the installed `swebench` supports."""

    parsers: tuple[str, ...]
    repos: tuple[str, ...]


class ForeignParser(NamedTuple):
    kind: str  # "repo" or "parser"
    name: str


def _find_foreign_parser(name: str) -> ForeignParser:
    kind, _, rest = name.partition(":")
    if kind not in FOREIGN_KINDS or not rest:
        forms = ", ".join([*_OWN_PARSERS, "swebench:<owner/repo>", "swebench:<parser>", "rebench:<parser>"])
        raise TaskError(f"unknown log parser {name!r}; use one of: {forms}", param="log_parser")
    available = _list_swebench_parsers()
    if rest in available.parsers:
        return ForeignParser("parser", rest)
    if kind == "swebench" and rest.lower() in available.repos:
        return ForeignParser("repo", rest.lower())
    names = available.repos if kind == "swebench" and "/" in rest else available.parsers
    raise TaskError(
        f"log_parser: swebench has no parser for {rest!r}; use {kind}:NAME with one of these names: {', '.join(names)}; "
        f"or use one of Turngate's own parsers: {', '.join(_OWN_PARSERS)}",
        param="log_parser",
    )


@cache
def _list_swebench_parsers() -> SwebenchParsers:
    if find_spec("swebench") is None:
        raise ConfigError(
            "log_parser: the parsers swebench:… and rebench:… need the swebench package; run `pip install 'turngate[swe]'`",
            param="log_parser",
        )
    answer = _run_swebench([], b"")
    return SwebenchParsers(tuple(answer["parsers"]), tuple(answer["repos"]))


def _run_foreign_parser(kind: str, name: str, log: str) -> dict[str, str]:
    # Keep colors, because some of these parsers search for them. Drop overlong lines, which are never results.
    text = "\n".join(line for line in log.split("\n") if len(line) <= MAX_LINE)
    statuses = _run_swebench([kind, name], text.encode("utf-8", "replace"))
    return {str(test): str(status) for test, status in statuses.items()}


def _run_swebench(arguments: list[str], stdin: bytes) -> dict[str, list[str]]:
    """Run `swebench` in a separate process. Without `arguments`, it lists its parsers and repositories.

    Raise `Undecided` if it cannot parse a log, because the work may be at fault, and `ConfigError` if it cannot list its parsers.
    """
    command = [sys.executable, "-I", "-c", _SWEBENCH_SCRIPT, *arguments]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=FOREIGN_TIMEOUT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        if arguments:
            raise Undecided(
                f"swebench's log parser ({arguments[-1]}) took longer than {FOREIGN_TIMEOUT_S:g} s"
            ) from None
        raise ConfigError(
            f"log_parser: importing swebench took longer than {FOREIGN_TIMEOUT_S:g} s; try again when the machine is less busy"
        ) from None
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        if arguments:
            raise Undecided(f"swebench's log parser ({arguments[-1]}) cannot read the log: {last}")
        raise ConfigError(
            f"log_parser: swebench is installed, but its parsers cannot be imported: {last}; run `pip install 'turngate[swe]'`"
        )
    answer: dict[str, list[str]] = json.loads(done.stdout)
    return answer
