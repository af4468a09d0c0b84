"""The results, exceptions and log of graders."""

from __future__ import annotations

import errno
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from turngate.common.safe_text import sanitize
from turngate.errors import SandboxError, SandboxFileMissing, SandboxGone
from turngate.tasks.grading.types import CaseOutcome, Grade
from turngate.tasks.grading.witness_report import WitnessReport

TAIL_CHARS = 8000  # characters of the log that a grade includes
OUTPUT_FOLLOWS = "; the output ended with:\n"  # in a message, between the reason and the output's last lines
_LAST_LINES = 5  # lines of output to show if a grader gave no reward
_LINE_CHARS = 200  # characters of each of these lines
_MIN_SECRET = 6  # characters
_SECRET = re.compile(
    r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)\Z", re.IGNORECASE
)  # matches the end of a variable's name

_HOST_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EROFS,
)  # errors caused by the host itself


class Undecided(Exception):
    """The grader gave no valid grade.

    If it graded an agent's work, a run of the grader on the untouched task then shows whether the task or the work is at fault.

    `output` is the end of the grader's output, safe to print. It may be empty.
    """

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = output


class OutputUnreadable(SandboxError):
    """The output in the grader's sandbox cannot be read. If this happens twice with the same work, `Undecided` is raised."""


@contextmanager
def reading_output() -> Iterator[None]:
    """Convert a failed read to `OutputUnreadable`, because the work's code has already run and may be at fault.

    A lost sandbox, a missing file and errors of the host itself are not converted.
    """
    try:
        yield
    except (SandboxGone, SandboxFileMissing, OutputUnreadable):
        raise
    except SandboxError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _HOST_ERRORS:
            raise
        raise OutputUnreadable(error.message) from error


class RunEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence from a test run: the outcomes in its log, and the witness's report."""

    cases: Mapping[str, CaseOutcome]
    report: WitnessReport


class GraderResult(msgspec.Struct, frozen=True, kw_only=True):
    """A grader's decision. Only the SWE grader sets `evidence`."""

    grade: Grade
    evidence: RunEvidence | None = None


Control = Callable[[], Awaitable[GraderResult]]  # runs the same grader on the untouched task, at most once


class GraderLog:
    """The output of graders, in which secret values of at least 6 characters are replaced with `***`.

    The secrets are the values in `hidden`, and the values of environment variables that `hide_secrets` recognizes by name, such as
    `API_KEY`.
    """

    def __init__(self, hidden: Iterable[str] = ()) -> None:
        self._parts: list[bytes] = []
        self._last_output = b""
        self._secrets = {value.encode() for value in hidden if len(value) >= _MIN_SECRET}

    def hide_secrets(self, env: Mapping[str, str]) -> None:
        self._secrets |= {
            value.encode() for name, value in env.items() if _SECRET.search(name) and len(value) >= _MIN_SECRET
        }

    def add(self, heading: str, output: bytes) -> None:
        for secret in self._secrets:
            output = output.replace(secret, b"***")
        self._last_output = output
        self._parts.append(
            f"── {heading} ──\n".encode() + output + (b"" if output.endswith(b"\n") or not output else b"\n")
        )

    @property
    def has_output(self) -> bool:
        return bool(self._parts)

    def last_lines(self, names: Mapping[str, str]) -> str:
        """Return the last lines of the output that was added last, safe to print. Each path in `names` is replaced with its name."""
        text = self._last_output[-TAIL_CHARS:].decode("utf-8", "replace")
        for path, name in names.items():
            text = text.replace(path, name)
        lines = [sanitize(line.rstrip()) for line in text.split("\n") if line.strip()][-_LAST_LINES:]
        return "\n".join(line if len(line) <= _LINE_CHARS else f"{line[: _LINE_CHARS - 1]}…" for line in lines)

    def tail(self) -> str:
        whole = b"".join(self._parts[-4:])[-4 * TAIL_CHARS :]
        return whole.decode("utf-8", "replace")[-TAIL_CHARS:]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.writelines(self._parts)
