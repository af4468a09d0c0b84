"""What every grader returns, and how it says that it could not decide."""

from __future__ import annotations

import errno
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from turngate.errors import SandboxError, SandboxFileMissing, SandboxGone
from turngate.tasks.grading.types import CaseOutcome, Grade
from turngate.tasks.grading.witness_report import WitnessReport

TAIL_CHARS = 8000  # characters of a log that a grade carries
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)\Z", re.IGNORECASE)  # the end of a variable's name

_HOST_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EROFS,
)  # the host's own faults


class Undecided(Exception):
    """The grader gave no reward. The control says whose fault that is."""


class OutputUnreadable(SandboxError):
    """The output in the grader's sandbox cannot be read. If that happens twice under a work, the work is at fault."""


@contextmanager
def reading_output() -> Iterator[None]:
    """Wrap reads that follow code of the work: their failure need not be the sandbox's fault."""
    try:
        yield
    except (SandboxGone, SandboxFileMissing, OutputUnreadable):
        raise
    except SandboxError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _HOST_ERRORS:
            raise
        raise OutputUnreadable(error.message) from error


class RunEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a test run showed: the outcomes in its log, and the witness's report."""

    cases: Mapping[str, CaseOutcome]
    report: WitnessReport


class GraderResult(msgspec.Struct, frozen=True, kw_only=True):
    """A grader's decision. `evidence`: if tests decided."""

    grade: Grade
    evidence: RunEvidence | None = None


Control = Callable[[], Awaitable[GraderResult]]  # runs the same grader on the untouched task, at most once


class GraderLog:
    """What graders printed, without the values of secret variables."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._secrets: set[bytes] = set()

    def hide_secrets(self, env: Mapping[str, str]) -> None:
        self._secrets |= {value.encode() for name, value in env.items() if _SECRET.search(name) and len(value) >= 6}

    def add(self, heading: str, output: bytes) -> None:
        for secret in self._secrets:
            output = output.replace(secret, b"***")
        self._parts.append(
            f"── {heading} ──\n".encode() + output + (b"" if output.endswith(b"\n") or not output else b"\n")
        )

    def tail(self) -> str:
        whole = b"".join(self._parts[-4:])[-4 * TAIL_CHARS :]
        return whole.decode("utf-8", "replace")[-TAIL_CHARS:]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.writelines(self._parts)
