"""A witness report counts only as far as its signatures are valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngate.tasks.grading import witness
from turngate.tasks.grading.witness_report import parse_report

KEY = b"k" * 48


@pytest.fixture
def report(tmp_path: Path) -> bytes:
    write_entry = witness._make_signed_writer(KEY, str(tmp_path / "report"))
    write_entry(begin="9.0")
    write_entry(test="a.py::test_x", outcome="passed")
    write_entry(test="a.py::test_y[1 2]", outcome="failed")
    write_entry(end=2)
    return (tmp_path / "report").read_bytes()


def test_signed_report_is_accepted(report: bytes) -> None:
    parsed = parse_report(KEY, report)
    assert parsed.started and parsed.ended and parsed.passed("a.py::test_x")
    assert (
        not parsed.passed("a.py::test_y[1 2]") and parsed.knows("a.py::test_y[1") and not parsed.knows("a.py::test_z")
    )


def test_tampered_report_is_rejected(report: bytes) -> None:
    lines = report.splitlines(keepends=True)
    assert not parse_report(b"another key", report).started
    assert not parse_report(KEY, b"".join(lines[:-1])).ended
    for changed in (
        report.replace(b"failed", b"passed"),
        b"".join((lines[0], lines[1], lines[3])),  # an entry was removed
        b"".join((lines[0], lines[2], lines[1], lines[3])),
        b"".join((*lines[:2], b"0" * 64 + b' {"test": "a.py::test_z", "outcome": "passed"}\n', *lines[2:])),
        b"",
        b"\xff\n" + report,
    ):
        parsed = parse_report(KEY, changed)
        assert not parsed.ended and not parsed.passed("a.py::test_x") and not parsed.passed("a.py::test_z")


def test_entries_after_early_end_do_not_count(tmp_path: Path) -> None:
    write_entry = witness._make_signed_writer(KEY, str(tmp_path / "report"))
    write_entry(begin="9.0")
    write_entry(end=0)
    write_entry(test="a", outcome="passed")
    assert not parse_report(KEY, (tmp_path / "report").read_bytes()).ended
