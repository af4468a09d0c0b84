"""A witness is believed as far as its signature holds, and no further."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngate.tasks.grading import witness
from turngate.tasks.grading.witness_report import parse_report

KEY = b"k" * 48


@pytest.fixture
def report(tmp_path: Path) -> bytes:
    say = witness._make_signed_writer(KEY, str(tmp_path / "report"))
    say(begin="9.0")
    say(test="a.py::test_x", outcome="passed")
    say(test="a.py::test_y[1 2]", outcome="failed")
    say(end=2)
    return (tmp_path / "report").read_bytes()


def test_what_was_signed_is_heard(report: bytes) -> None:
    found = parse_report(KEY, report)
    assert found.started and found.ended and found.passed("a.py::test_x")
    assert not found.passed("a.py::test_y[1 2]") and found.knows("a.py::test_y[1") and not found.knows("a.py::test_z")


def test_what_was_not_is_not(report: bytes) -> None:
    lines = report.splitlines(keepends=True)
    assert not parse_report(b"another key", report).started
    assert not parse_report(KEY, b"".join(lines[:-1])).ended
    for changed in (
        report.replace(b"failed", b"passed"),
        b"".join((lines[0], lines[1], lines[3])),  # one was taken out
        b"".join((lines[0], lines[2], lines[1], lines[3])),
        b"".join((*lines[:2], b"0" * 64 + b' {"test": "a.py::test_z", "outcome": "passed"}\n', *lines[2:])),
        b"",
        b"\xff\n" + report,
    ):
        found = parse_report(KEY, changed)
        assert not found.ended and not found.passed("a.py::test_x") and not found.passed("a.py::test_z")


def test_an_early_end_counts_only_what_was_before_it(tmp_path: Path) -> None:
    say = witness._make_signed_writer(KEY, str(tmp_path / "report"))
    say(begin="9.0")
    say(end=0)
    say(test="a", outcome="passed")
    assert not parse_report(KEY, (tmp_path / "report").read_bytes().rpartition(b"\n")[0] + b"\nx").passed("b")
