"""The verdict on a session: findings and notes (at most 20 per check, and a count of the rest), forks and differences.

`CheckResults` collects them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec

Part = Literal["structure", "rows", "render", "replay", "transcript"]
_MAX_FINDINGS = 20  # findings, and notes, of one check that are listed individually


class VerifyFinding(msgspec.Struct, frozen=True):
    """A result of one check. A check that passes has a single finding. A check that fails has one per problem, up to a limit."""

    part: Part
    check: str
    ok: bool
    what: str
    where: str = ""
    node: int | None = None


class Note(msgspec.Struct, frozen=True):
    """An observation that is worth knowing, but not an error."""

    check: str
    what: str
    node: int | None = None


class SkippedCheck(msgspec.Struct, frozen=True):
    """A check that could not be performed, and the reason."""

    part: Part
    check: str
    why: str


class TemplateDifference(msgspec.Struct, frozen=True):
    """A difference between the ids that were sent and the ids that the chat template renders for the whole conversation."""

    branch: int  # id of the last turn of the branch
    node: int  # id of the node that contains the difference
    token: int  # position, counted from the root
    why: str
    sent: str  # the text that was sent, around the difference
    template: str


class ForkReport(msgspec.Struct, frozen=True):
    """A call that did not continue an existing branch: its cause, where it diverges, and what that costs."""

    node: int
    recorded: str  # the cause that the gateway recorded
    cause: str  # the cause that the messages show
    left: int | None  # id of the node at the end of the branch that the call left; None if no branch precedes the call
    token: int  # the first token that differs, counted from the root
    before: str  # the text before that token
    was: str  # how the old branch continues
    now: str  # how the new branch continues
    shared: int  # tokens that are in the rows of both branches, so that a trainer reads them twice
    sent: int  # prompt tokens after the difference, which the engine and the trainer must process again
    wasted: int = 0  # sampled tokens that are not used
    detail: str = ""


class Replay(msgspec.Struct, frozen=True):
    """A comparison of the recorded log-probabilities with those that an engine computes again for the same tokens."""

    engine: str
    tolerance: float
    turns: int
    tokens: int
    largest: float
    mean: float
    outliers: int


class Counts(msgspec.Struct, frozen=True):
    nodes: int = 0
    turns: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    rows: int = 0
    trained_tokens: int = 0


class Verdict(msgspec.Struct, frozen=True):
    """The result of verifying one session."""

    session: str
    ok: bool
    status: str
    counts: Counts
    findings: tuple[VerifyFinding, ...]
    notes: tuple[Note, ...] = ()
    unchecked: tuple[SkippedCheck, ...] = ()
    forks: tuple[ForkReport, ...] = ()
    differences: tuple[TemplateDifference, ...] = ()
    replay: Replay | None = None

    @property
    def wrong(self) -> tuple[VerifyFinding, ...]:
        return tuple(finding for finding in self.findings if not finding.ok)


def unreadable_verdict(session: str, why: str) -> Verdict:
    """Build the verdict on a session that cannot be read. `why` is the reason."""
    finding = VerifyFinding("structure", "readable", False, why)
    return Verdict(session=session, ok=False, status="unreadable", counts=Counts(), findings=(finding,))


class VerifyCheck:
    """A check in progress: how many items it has examined, and the problems that it has found."""

    def __init__(self, part: Part, name: str) -> None:
        self.part: Part = part
        self.name = name
        self.examined = 0
        self.wrong: list[VerifyFinding] = []
        self.skipped = ""

    def expect(self, holds: bool, what: str, *, node: int | None = None, where: str = "") -> bool:
        """Count one examined item. If `holds` is False, record the problem `what` as a finding. Return `holds`."""
        self.examined += 1
        if not holds:
            where = where or (f"node {node}" if node is not None else "")
            self.wrong.append(VerifyFinding(self.part, self.name, False, what, where, node))
        return holds

    def skip(self, why: str) -> None:
        self.skipped = why


class CheckResults:
    """The collected results of all checks of one session."""

    def __init__(self) -> None:
        self._checks: list[tuple[VerifyCheck, str]] = []
        self._notes: dict[str, list[Note]] = {}  # by check
        self.forks: list[ForkReport] = []
        self.differences: list[TemplateDifference] = []
        self.replay: Replay | None = None

    @contextmanager
    def check(self, part: Part, name: str, promise: str) -> Iterator[VerifyCheck]:
        """Begin a check. `promise` says what is proved if the check passes."""
        check = VerifyCheck(part, name)
        self._checks.append((check, promise))
        yield check

    def note(self, check: str, what: str, node: int | None = None) -> None:
        self._notes.setdefault(check, []).append(Note(check, what, node))

    @property
    def notes(self) -> tuple[Note, ...]:
        notes: list[Note] = []
        for check, found in self._notes.items():
            notes += found[:_MAX_FINDINGS]
            if len(found) > _MAX_FINDINGS:
                notes.append(Note(check, f"and {len(found) - _MAX_FINDINGS} more"))
        return tuple(notes)

    def findings(self) -> tuple[VerifyFinding, ...]:
        findings: list[VerifyFinding] = []
        for check, promise in self._checks:
            if check.wrong:
                findings += check.wrong[:_MAX_FINDINGS]
                if len(check.wrong) > _MAX_FINDINGS:
                    more = f"and {len(check.wrong) - _MAX_FINDINGS} more"
                    findings.append(VerifyFinding(check.part, check.name, False, more))
            elif not check.skipped:
                findings.append(VerifyFinding(check.part, check.name, True, promise, f"{check.examined} checked"))
        return tuple(findings)

    def list_skipped(self) -> tuple[SkippedCheck, ...]:
        return tuple(SkippedCheck(c.part, c.name, c.skipped) for c, _ in self._checks if c.skipped)
