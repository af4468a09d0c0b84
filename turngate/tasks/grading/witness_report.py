"""What the witness of a pytest run said, as far as its signature holds. `witness.py` is the other end, in the sandbox."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Literal

import msgspec

WitnessOutcome = Literal["passed", "failed", "skipped", "xfailed"]


class _ReportLine(msgspec.Struct, frozen=True):
    begin: str = ""
    test: str = ""
    outcome: WitnessOutcome = "failed"
    other: bool = False
    odd: str = ""
    end: int = -1


class WitnessReport(msgspec.Struct, frozen=True, kw_only=True):
    """`ended`: the run came to its end before the eyes of the witness. Without that, nothing passed."""

    begun: bool = False
    ended: bool = False
    outcomes: Mapping[str, WitnessOutcome] = {}
    others: frozenset[str] = frozenset()  # tests in whose place something else ran
    odd: frozenset[str] = frozenset()  # what of pytest's own was changed while it ran

    def knows(self, case: str) -> bool:
        return bool(self._of(case))

    def passed(self, case: str) -> bool:
        """By the witness's own eyes."""
        found = self._of(case)
        passed = all(self.outcomes[test] in ("passed", "xfailed") and test not in self.others for test in found)
        return self.ended and bool(found) and passed

    def _of(self, case: str) -> list[str]:
        """A log may cut a name at its first blank."""
        return [case] if case in self.outcomes else [t for t in self.outcomes if t.split(maxsplit=1)[:1] == [case]]


def parse_report(key: bytes, report: bytes) -> WitnessReport:
    """The lines of a report, up to the first that is not signed in its place."""
    last, begun, ended = b"", False, False
    outcomes: dict[str, WitnessOutcome] = {}
    odd: set[str] = set()
    others: set[str] = set()
    for raw in report.split(b"\n"):
        mac, _, text = raw.partition(b" ")
        if not hmac.compare_digest(hmac.new(key, last + text, hashlib.sha256).hexdigest().encode(), mac):
            break
        last = mac
        try:
            line = msgspec.json.decode(text, type=_ReportLine)
        except msgspec.DecodeError:
            break
        begun = begun or bool(line.begin)
        if line.test:
            outcomes[line.test] = line.outcome
            (others.add if line.other else others.discard)(line.test)
        if line.odd:
            odd.add(line.odd)
        if line.end >= 0:
            ended = line.end == len(outcomes)
    return WitnessReport(begun=begun, ended=ended, outcomes=outcomes, others=frozenset(others), odd=frozenset(odd))
