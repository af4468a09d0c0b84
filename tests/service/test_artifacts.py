"""Agent files and logs in results, with notes about what is left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from turngate.service.artifacts import read_log_tails, read_tail, read_workdir
from turngate.service.config import Clamp
from turngate.service.truncation import Truncator
from turngate.telemetry.logs import register_secrets


@pytest.mark.parametrize(
    ("data", "shown", "note"),
    [
        (b"x" * 100, "x" * 10, "90 of 100"),
        (b"\xff" * 100, "\ufffd" * 10, "90 of 100"),
        ("é".encode() * 100, "é" * 10, "180 of 200"),
        ("\U0001f600".encode() * 100, "\U0001f600" * 10, "360 of 400"),
        (b"\xff" * 12, "\ufffd" * 10, "2 of 12"),
        (b"\xff" * 10, "\ufffd" * 10, ""),
    ],
)
def test_log_tail_notes_omitted_bytes(tmp_path: Path, data: bytes, shown: str, note: str) -> None:
    (tmp_path / "log").write_bytes(data)
    truncator = Truncator(Clamp())
    assert read_tail(tmp_path / "log", "log", truncator, 10) == shown
    assert [one.split(":")[1].strip().startswith(note) for one in truncator.notes] == ([True] if note else [])


def test_undecodable_file_names_are_noted(tmp_path: Path) -> None:
    for name in ("work", "home"):
        (tmp_path / name).mkdir()
        Path(os.fsdecode(os.fsencode(tmp_path / name) + b"/odd-\xff")).write_bytes(b"x")
        (tmp_path / name / "good").write_text("y")
    truncator = Truncator(Clamp())
    assert read_workdir(tmp_path / "work", tmp_path / "none", truncator) == {"good": "y"}
    assert read_log_tails(tmp_path, truncator) == {"home/good": "y"}
    for field, note in zip(("workdir_files", "log_tails"), truncator.notes, strict=True):
        assert (
            note.startswith(f"{field}: files left out because their names are not valid UTF-8 (1)") and "odd-" in note
        )


def test_redacted_file_is_not_noted_as_cut(tmp_path: Path) -> None:
    register_secrets("a-very-secret-key-of-many-characters")
    (tmp_path / "a").write_text("key: a-very-secret-key-of-many-characters")
    (tmp_path / "b").write_text("é" * 30)
    truncator = Truncator(Clamp(file=25))
    found = read_workdir(tmp_path, tmp_path / "none", truncator)
    assert found["a"] == "key: [secret]" and found["b"] == "é" * 25
    assert truncator.notes == ["workdir_files['b']: 10 of 60 bytes left out"]
