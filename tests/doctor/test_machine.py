"""The doctor's checks of the machine: folders, ports, keys and limits."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import sys
from pathlib import Path

import msgspec
import pytest

from tests.doctor.kit import run_check, settings
from tests.kit import gateway, say
from turngate.config import ServeConfig
from turngate.doctor import CHECKS, DoctorContext, diagnose, machine
from turngate.doctor.finding import CheckOutcome


async def test_healthy_machine_passes_and_nothing_is_written(tmp_path: Path) -> None:
    names = ("python", "extras", "data folder", "disk", "admin key", "clock", "open files", "memory")
    folder = tmp_path / "not" / "there"
    findings = await diagnose(DoctorContext(settings(folder, port=0)), (*names, "port"))
    assert [finding.check for finding in findings] == [c.name for c in CHECKS if c.name in (*names, "port")]
    assert not [finding for finding in findings if finding.state == "failure"]
    assert list(tmp_path.iterdir()) == []


async def test_unwritable_folder_and_damaged_database_are_failures(tmp_path: Path) -> None:
    finding = await run_check(settings(Path("/proc/nowhere")), "data folder")
    assert finding.state == "failure" and "cannot be written" in finding.message and "--data" in finding.fix
    (tmp_path / "turngate.db").write_bytes(b"this is no database, but long enough to look at" * 100)
    damaged = await run_check(settings(tmp_path), "data folder")
    assert (
        damaged.state == "failure"
        and "cannot be read" in damaged.message
        and "backup" in damaged.message
        and "--data" in damaged.fix
    )


async def test_network_file_system_is_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_file_system", lambda folder: "nfs4")
    finding = await run_check(settings(tmp_path), "data folder")
    assert finding.state == "warning" and "nfs4" in finding.message


async def test_free_disk_space_thresholds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, state in ((50_000_000, "failure"), (1_000_000_000, "warning"), (9_000_000_000, "ok")):
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _, free=free: type("Usage", (), {"free": free})())
        assert (await run_check(settings(tmp_path), "disk")).state == state


async def test_admin_key_file_must_be_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no key yet; the gateway creates" in (await run_check(settings(tmp_path), "admin key")).message
    file = tmp_path / "admin-key"
    file.write_text("planted-admin-key-0123456789\n")
    file.chmod(0o644)
    finding = await run_check(settings(tmp_path), "admin key")
    assert (
        finding.state == "failure" and "is accessible to other users" in finding.message and "chmod 600" in finding.fix
    )
    file.chmod(0o600)
    fine = await run_check(settings(tmp_path), "admin key")
    assert fine.state == "ok" and "0600" in fine.message and "planted" not in fine.message
    monkeypatch.setenv("TURNGATE_ADMIN_KEY", "short")
    assert (await run_check(settings(tmp_path), "admin key")).state == "failure"
    monkeypatch.setenv("TURNGATE_ADMIN_KEY", "planted-admin-key-0123456789")
    monkeypatch.setenv("TURNGATE_METRICS_KEY", "short")
    wrong = await run_check(settings(tmp_path), "admin key")
    assert wrong.state == "failure" and "TURNGATE_METRICS_KEY" in wrong.message


async def test_port_in_use_names_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        finding = await run_check(settings(tmp_path, port=other.getsockname()[1]), "port")
    assert finding.state == "failure" and f"(process {os.getpid()})" in finding.message and "--port" in finding.fix
    elsewhere = await run_check(settings(tmp_path, host="192.0.2.1"), "port")
    assert elsewhere.state == "failure" and "--host" in elsewhere.fix


async def test_missing_extras_are_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_is_installed", lambda module: module not in ("opentelemetry.sdk", "e2b"))
    needed = await run_check(ServeConfig(spans=True), "extras", sandboxes=("e2b",))
    assert needed.state == "failure" and needed.fix == "run: pip install 'turngate[otel,e2b]'"
    assert (await run_check(ServeConfig(), "extras")).state == "ok"
    monkeypatch.setattr(machine, "_is_installed", lambda module: False)
    shared = await run_check(ServeConfig(data="postgresql://db/turngate"), "extras")
    assert shared.state == "failure" and "postgres" in shared.message


async def test_open_files_and_memory_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    for hard, state in ((512, "failure"), (4096, "warning"), (100_000, "ok"), (resource.RLIM_INFINITY, "ok")):
        monkeypatch.setattr(machine.resource, "getrlimit", lambda _, hard=hard: (256, hard))
        assert (await run_check(ServeConfig(), "open files")).state == state
    for free, state in ((None, "not checked"), (1e8, "warning"), (8e9, "ok")):
        monkeypatch.setattr(machine, "_available_memory", lambda free=free: free)
        assert (await run_check(ServeConfig(), "memory")).state == state


async def test_clock_jump_is_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 100.05, 105.1, 105.15, 105.2, 105.25] + [1.8e9] * 9)
    monkeypatch.setattr(machine.time, "time", lambda: next(now))
    finding = await run_check(ServeConfig(), "clock")
    assert finding.state == "warning" and "the wall clock moved by" in finding.message


async def test_hanging_check_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(subject: DoctorContext) -> list[CheckOutcome]:
        await asyncio.Event().wait()
        return []

    hanging = msgspec.structs.replace(CHECKS[0], run=hang, timeout_s=0.05)
    monkeypatch.setattr(sys.modules["turngate.doctor.checks"], "CHECKS", (hanging,))
    [finding] = await diagnose(DoctorContext(ServeConfig()))
    assert finding.state == "failure" and "the check did not finish within" in finding.message


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ETIMEDOUT, "Connection timed out", "/mnt/data"), "Connection timed out /mnt/data"),
        (TimeoutError(), "an operation timed out"),
    ],
)
async def test_timeout_of_an_operation_is_not_one_of_the_check(
    error: OSError, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(subject: DoctorContext) -> list[CheckOutcome]:
        raise error

    failing = msgspec.structs.replace(CHECKS[0], run=fail)
    monkeypatch.setattr(sys.modules["turngate.doctor.checks"], "CHECKS", (failing,))
    [finding] = await diagnose(DoctorContext(ServeConfig()))
    assert (finding.state, finding.message) == ("failure", message)


async def test_data_folder_in_use_by_gateway_is_ok(tmp_path: Path) -> None:
    async with gateway([say("Hello.")], data=tmp_path):
        assert (await run_check(settings(tmp_path), "data folder")).state == "ok"
