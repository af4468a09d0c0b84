"""What every grader gives back, and how it says that it could not decide. `run.py` makes grades of these."""

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
)  # our own troubles


class Undecided(Exception):
    """The grader gave no reward. Whose fault that is, the control says."""


class OutputUnreadable(SandboxError):
    """What ran in the grader's sandbox left something there that cannot be read. Under a work, twice, that is the work's doing."""


@contextmanager
def reading_output() -> Iterator[None]:
    """Around what is read after code of the work has run: that it fails need not be the sandbox's fault."""
    try:
        yield
    except (SandboxGone, SandboxFileMissing, OutputUnreadable):
        raise
    except SandboxError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _HOST_ERRORS:
            raise
        raise OutputUnreadable(error.message) from error


class RunEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of tests showed, by its log and by its witness."""

    cases: Mapping[str, CaseOutcome]
    testimony: WitnessReport


class GraderResult(msgspec.Struct, frozen=True, kw_only=True):
    """A grader's decision. `seen`: where tests decided."""

    grade: Grade
    seen: RunEvidence | None = None


Control = Callable[[], Awaitable[GraderResult]]  # the same grader on the untouched task; run at most once


class GraderLog:
    """What graders printed. Values of secret variables are not in it."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._secrets: set[bytes] = set()

    def hide(self, env: Mapping[str, str]) -> None:
        self._secrets |= {value.encode() for name, value in env.items() if _SECRET.search(name) and len(value) >= 6}

    def add(self, heading: str, said: bytes) -> None:
        for secret in self._secrets:
            said = said.replace(secret, b"***")
        self._parts.append(f"── {heading} ──\n".encode() + said + (b"" if said.endswith(b"\n") or not said else b"\n"))

    def tail(self) -> str:
        whole = b"".join(self._parts[-4:])[-4 * TAIL_CHARS :]
        return whole.decode("utf-8", "replace")[-TAIL_CHARS:]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.writelines(self._parts)
