"""What is said of a session: findings, notes, forks, and the verdict that they come to. Plain data, and the book they are kept in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec

Part = Literal["structure", "rows", "render", "replay", "transcript"]
_MAX_FINDINGS = 20  # findings of one check that are told one by one


class VerifyFinding(msgspec.Struct, frozen=True):
    """One check, and what came of it: one finding that it holds, or one for each place where it does not."""

    part: Part
    check: str
    ok: bool
    what: str
    where: str = ""
    node: int | None = None


class Note(msgspec.Struct, frozen=True):
    """Something that may be right and is worth knowing."""

    check: str
    what: str
    node: int | None = None


class SkippedCheck(msgspec.Struct, frozen=True):
    """What could not be looked at, and why."""

    part: Part
    check: str
    why: str


class TemplateDifference(msgspec.Struct, frozen=True):
    """Where the chat template, asked for the whole conversation, would say something else than what was sent, and why."""

    branch: int  # the turn at the end of it
    node: int  # where the difference lies
    token: int  # counted from the root
    why: str
    sent: str  # in context
    template: str


class Fork(msgspec.Struct, frozen=True):
    """Where a call did not go on from what was there: why, from which token on, and what that costs."""

    node: int
    recorded: str  # the cause as the gateway recorded it
    cause: str  # as the messages show it
    left: int | None  # the node whose line it left
    token: int  # the first that differs, counted from the root
    before: str  # the words up to there
    was: str  # how the line that it left goes on
    now: str  # and how it does
    shared: int  # tokens that stand in both rows: read twice by a trainer
    sent: int  # tokens of the prompt past the difference: read anew by the engine and by a trainer
    wasted: int = 0  # tokens that were sampled and then counted for nothing
    detail: str = ""


class Replay(msgspec.Struct, frozen=True):
    """Log-probabilities as recorded, against those that the engine gives to the same tokens now."""

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
    """Everything that is said of one session."""

    session: str
    ok: bool
    status: str
    counts: Counts
    findings: tuple[VerifyFinding, ...]
    notes: tuple[Note, ...] = ()
    unchecked: tuple[SkippedCheck, ...] = ()
    forks: tuple[Fork, ...] = ()
    differences: tuple[TemplateDifference, ...] = ()
    replay: Replay | None = None

    @property
    def wrong(self) -> tuple[VerifyFinding, ...]:
        return tuple(finding for finding in self.findings if not finding.ok)


def unreadable_verdict(session: str, why: str) -> Verdict:
    """The verdict on a session of which nothing can be told."""
    finding = VerifyFinding("structure", "readable", False, why)
    return Verdict(session=session, ok=False, status="unreadable", counts=Counts(), findings=(finding,))


class VerifyCheck:
    """One check while it is made."""

    def __init__(self, part: Part, name: str) -> None:
        self.part: Part = part
        self.name = name
        self.looked = 0
        self.wrong: list[VerifyFinding] = []
        self.skipped = ""

    def expect(self, holds: bool, what: str, *, node: int | None = None, where: str = "") -> bool:
        """`what`: what is wrong if it does not hold."""
        self.looked += 1
        if not holds:
            place = where or (f"node {node}" if node is not None else "")
            self.wrong.append(VerifyFinding(self.part, self.name, False, what, place, node))
        return holds

    def skip(self, why: str) -> None:
        self.skipped = why


class CheckResults:
    """Everything that is found, as it is found."""

    def __init__(self) -> None:
        self._checks: list[tuple[VerifyCheck, str]] = []
        self.notes: list[Note] = []
        self.forks: list[Fork] = []
        self.differences: list[TemplateDifference] = []
        self.replay: Replay | None = None

    @contextmanager
    def check(self, part: Part, name: str, promise: str) -> Iterator[VerifyCheck]:
        """`promise`: what it means that the check holds."""
        check = VerifyCheck(part, name)
        self._checks.append((check, promise))
        yield check

    def note(self, check: str, what: str, node: int | None = None) -> None:
        if sum(note.check == check for note in self.notes) < _MAX_FINDINGS:
            self.notes.append(Note(check, what, node))

    def findings(self) -> tuple[VerifyFinding, ...]:
        found: list[VerifyFinding] = []
        for check, promise in self._checks:
            if check.wrong:
                found += check.wrong[:_MAX_FINDINGS]
                if len(check.wrong) > _MAX_FINDINGS:
                    more = f"and {len(check.wrong) - _MAX_FINDINGS} more"
                    found.append(VerifyFinding(check.part, check.name, False, more))
            elif not check.skipped:
                found.append(VerifyFinding(check.part, check.name, True, promise, f"{check.looked} looked at"))
        return tuple(found)

    def unchecked(self) -> tuple[SkippedCheck, ...]:
        return tuple(SkippedCheck(c.part, c.name, c.skipped) for c, _ in self._checks if c.skipped)
