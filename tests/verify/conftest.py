"""Load renderers once, and verify what gateways record."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.renderer_fixtures import renderers  # noqa: F401
from tests.verify.everywhere import verdicts
from turngate.server.app import Gateway
from turngate.verify import ScriptedScorer, Verdict


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """Verdicts on all sessions of this test's gateways, filled when they stop. All must pass, including replay."""
    found: list[Verdict] = []
    stop = Gateway.stop

    async def stopped(self: Gateway) -> None:
        await stop(self)
        found.extend(verdicts(self, ScriptedScorer()))

    monkeypatch.setattr(Gateway, "stop", stopped)
    return found


@pytest.fixture(scope="module")
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and id of a session that the module's `record` has recorded. Tests that change it use `copy`."""
    folder = tmp_path_factory.mktemp("recorded")
    return folder, asyncio.run(request.module.record(folder))


@pytest.fixture
def copy(recorded: tuple[Path, str], tmp_path: Path) -> tuple[Path, str]:
    """A copy of the recorded session, for one test."""
    shutil.copy(recorded[0] / "turngate.db", tmp_path)
    return tmp_path, recorded[1]
