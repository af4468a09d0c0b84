"""`tools/check_names.py` reports bad names and accepts good ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_names

BAD = {
    "an action": "def made_up_for(): pass",
    "verb": "async def _worked(self): pass",
    "methods, but at most 30": "class Big:\n" + "".join(f"    def step_{n}(self): pass\n" for n in range(31)),
    "has 61 lines": "def long():\n" + "    pass\n" * 60,
    "601 lines": "x = 1\n" * 600,
    "whoever": '"""For whoever reads it."""',
    "nobody": "x = 1  # nobody reads it",
    "mend": 'raise ValueError("mend it")',
}
GOOD = [
    "def make(): pass",
    "def is_sealed() -> bool: return True",
    "class Session:\n    @property\n    def closed(self) -> float: return 1.0",
    "def feed(): pass",
    "def expected_cases(): pass",
    '"""Sort the rows in order to compare them, in order of time."""',
]


@pytest.mark.parametrize("expected", BAD)
def test_violation_is_reported(expected: str, tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(BAD[expected] + "\n")
    [problem] = check_names.check_file(file)
    assert expected in problem


@pytest.mark.parametrize("source", GOOD)
def test_good_code_passes(source: str, tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(source + "\n")
    assert list(check_names.check_file(file)) == []


def test_unclear_module_name_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "beside.py"
    file.write_text("")
    assert "module" in next(iter(check_names.check_file(file)))


def test_duplicate_class_name_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_names, "ROOT", tmp_path)
    for name, source in (
        ("a.py", "class Asked: pass"),
        ("b.py", "class Asked: pass\nclass _Own: pass"),
        ("c.py", "class _Own: pass"),
    ):
        (tmp_path / name).write_text(source)
    [problem] = check_names.check_class_names(sorted(tmp_path.glob("*.py")))
    assert problem == "b.py:1: class Asked is also in a.py"
