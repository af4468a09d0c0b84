"""Folders of tests in memory do not outlive a killed run for long."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import kit

NO_PROCESS = 4_194_305  # above the kernel's highest process id


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "MEMORY_FOLDER", str(tmp_path))
    dead, other = tmp_path / f"turngate-test-{NO_PROCESS}-x", tmp_path / "another-folder"
    for folder in (dead / "data", other):
        folder.mkdir(parents=True)
    with kit.memory_folder() as own:
        kit.sweep_memory_folders()
        assert sorted(tmp_path.iterdir()) == sorted([own, other])
    assert list(tmp_path.iterdir()) == [other]
