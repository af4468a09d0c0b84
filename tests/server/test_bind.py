"""Test which gateway counts as running in a data folder, and the addresses in messages."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import msgspec
import pytest

from turngate.config import ServeConfig
from turngate.errors import ConfigError
from turngate.server.bind import (
    RunningGateway,
    find_running_gateway,
    has_stale_note,
    local_url,
    open_listener,
    publish_address,
    startup_message,
)

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


def test_no_process_reads_an_incomplete_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, notes = Path.write_bytes, []

    def write_slowly(file: Path, content: bytes) -> int:
        write(file, content[:5])
        notes.append((tmp_path / "gateway.json").exists())
        return write(file, content)

    monkeypatch.setattr(Path, "write_bytes", write_slowly)
    with socket.create_server(("127.0.0.1", 0)) as listener, publish_address(tmp_path, listener):
        assert notes == [False]
        assert find_running_gateway(tmp_path) == RunningGateway(local_url(listener), os.getpid())
        assert [file.name for file in tmp_path.iterdir()] == ["gateway.json"]
    assert not [*tmp_path.iterdir()]


def test_addresses_of_ipv6_hosts_have_brackets(tmp_path: Path) -> None:
    config = ServeConfig(host="::1", port=0, data=str(tmp_path), engine="scripted")
    try:
        listener = open_listener(config)
    except ConfigError as error:
        if error.__context__ is not None and getattr(error.__context__, "errno", None) == errno.EADDRNOTAVAIL:
            pytest.skip("this machine has no IPv6")
        raise
    with listener:
        port = listener.getsockname()[1]
        assert local_url(listener) == f"http://[::1]:{port}"
        assert startup_message(config, listener).startswith(f"turngate listens on http://[::1]:{port} · ")
        with pytest.raises(ConfigError, match=rf"^cannot listen on \[::1\]:{port}: "):
            open_listener(ServeConfig(host="::1", port=port, data=str(tmp_path), engine="scripted"))
