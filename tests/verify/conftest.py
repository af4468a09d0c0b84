"""Load renderers once, and verify what gateways record."""

from __future__ import annotations

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
