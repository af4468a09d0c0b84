"""Parse the report that `witness.py` writes in the sandbox, up to the first invalid line."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath
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
    imported: tuple[str, ...] = ()
    places: tuple[str, ...] = ()


class WitnessReport(msgspec.Struct, frozen=True, kw_only=True):
    """The witness's observations of a test run. A test counts as passed only if the witness also saw the end of the run (`ended`)."""

    started: bool = False
    ended: bool = False
    outcomes: Mapping[str, WitnessOutcome] = {}
    replaced: frozenset[str] = frozenset()  # tests whose own function did not run
    tampered: frozenset[str] = frozenset()  # parts of pytest that were changed during the run
    imported: tuple[str, ...] = ()  # modules that pytest needs, which were imported from outside the working folder
    places: tuple[str, ...] = ()  # folders in the working folder that tests search first for modules

    def find_hidden(self, files: Collection[str]) -> tuple[str, ...]:
        """Return the modules among `files` that tests cannot import, because pytest itself imported other modules with the same names.

        `files` are paths in the working folder.
        """
        names = (name for module in self.imported for name in (f"{module}.py", f"{module}/__init__.py"))
        paths = {(PurePosixPath(place) / name).as_posix() for name in names for place in self.places}
        return tuple(sorted(paths.intersection(files)))

    def knows(self, case: str) -> bool:
        return bool(self._find_tests(case))

    def passed(self, case: str) -> bool:
        """Return whether the witness saw the case pass. An expected failure (xfail) counts as a pass."""
        tests = self._find_tests(case)
        passed = all(self.outcomes[test] in ("passed", "xfailed") and test not in self.replaced for test in tests)
        return self.ended and bool(tests) and passed

    def _find_tests(self, case: str) -> list[str]:
        """Return the names of the tests that a case refers to. A log may cut off a test's name at its first space."""
        return [case] if case in self.outcomes else [t for t in self.outcomes if t.split(maxsplit=1)[:1] == [case]]


def parse_report(key: bytes, report: bytes) -> WitnessReport:
    """Parse a report up to the first line whose signature or content is invalid. Each signature also covers the previous one."""
    last, started, ended = b"", False, False
    outcomes: dict[str, WitnessOutcome] = {}
    tampered: set[str] = set()
    replaced: set[str] = set()
    imported: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    for raw in report.split(b"\n"):
        mac, _, text = raw.partition(b" ")
        if not hmac.compare_digest(hmac.new(key, last + text, hashlib.sha256).hexdigest().encode(), mac):
            break
        last = mac
        try:
            line = msgspec.json.decode(text, type=_ReportLine)
        except msgspec.DecodeError:
            break
        started = started or bool(line.begin)
        if line.test:
            outcomes[line.test] = line.outcome
            ended = False  # until a later end record includes this test
            (replaced.add if line.other else replaced.discard)(line.test)
        if line.odd:
            tampered.add(line.odd)
        if line.imported:
            imported, places = line.imported, line.places
        if line.end >= 0:
            ended = line.end == len(outcomes)
    return WitnessReport(
        started=started,
        ended=ended,
        outcomes=outcomes,
        replaced=frozenset(replaced),
        tampered=frozenset(tampered),
        imported=imported,
        places=places,
    )
