"""The isolation tests, unchanged, with commands that a warm process starts in a sandbox below a fork server's user namespace."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.sandboxes import kit
from tests.sandboxes.test_isolation import (  # noqa: F401
    secret,
    test_commands_share_one_loopback,
    test_host_abstract_sockets_are_unreachable,
    test_host_files_are_unreadable,
    test_host_processes_are_invisible,
    test_kernel_settings_are_not_writable,
    test_links_to_host_files_are_not_followed,
    test_mounts_are_read_only_by_default,
    test_network_is_unreachable,
    test_other_sandbox_is_unreachable,
    test_system_is_read_only_and_unprivileged,
)
from tests.sandboxes.warm_kit import WarmBackend, WarmSandbox, install
from turngate.sandboxes import warm_start
from turngate.sandboxes.base import SandboxSpec

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.full]


@pytest.fixture
def backend(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmBackend]:
    kit.need("bubblewrap")
    monkeypatch.setattr(warm_start, "PLAIN_STARTS", 0)
    warm_start.counts.clear()
    yield WarmBackend("bubblewrap", root, install(tmp_path / "installed"))
    warm_start.close_servers()
    assert set(warm_start.counts) <= {"warm"}


@pytest.fixture
async def sandbox(backend: WarmBackend) -> AsyncIterator[WarmSandbox]:
    sandbox = WarmSandbox(backend, await backend.create(SandboxSpec(env={"FROM_SPEC": "yes"})))
    try:
        yield sandbox
    finally:
        await sandbox.inner.stop()
