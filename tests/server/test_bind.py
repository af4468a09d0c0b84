"""Test which gateway counts as running in a data folder."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from turngate.server.bind import RunningGateway, find_running_gateway, has_stale_note

ENDED = 2**22 + 1  # higher than every process id


def write_note(data: Path, pid: int) -> RunningGateway:
    gateway = RunningGateway("http://127.0.0.1:8600", pid)
    (data / "gateway.json").write_bytes(msgspec.json.encode(gateway))
    return gateway


def test_gateway_of_this_user_is_running(tmp_path: Path) -> None:
    assert find_running_gateway(tmp_path) is None
    gateway = write_note(tmp_path, os.getpid())
    assert find_running_gateway(tmp_path) == gateway and not has_stale_note(tmp_path)


def test_gateway_of_another_user_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = write_note(tmp_path, ENDED)
    assert find_running_gateway(tmp_path) is None and has_stale_note(tmp_path)

    def deny(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr("os.kill", deny)
    assert find_running_gateway(tmp_path) == gateway and not has_stale_note(tmp_path)


@pytest.mark.parametrize("note", ["", "{", "{}", '{"url": "", "pid": 1e99}', '{"url": "", "pid": 9223372036854775807}'])
def test_damaged_note_names_no_gateway(note: str, tmp_path: Path) -> None:
    (tmp_path / "gateway.json").write_text(note)
    assert find_running_gateway(tmp_path) is None and has_stale_note(tmp_path)
