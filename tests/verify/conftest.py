"""Shares the loaded renderers, and looks at what gateways leave."""

from __future__ import annotations

import pytest

from tests.renderer_fixtures import renderers  # noqa: F401
from tests.verify.everywhere import verdicts
from turngate.server.app import Gateway
from turngate.verify import ScriptedScorer, Verdict


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """Verdicts on what the gateways of this test have recorded, once they have stopped: all of it is fine, replayed too."""
    found: list[Verdict] = []
    stop = Gateway.stop

    async def stopped(self: Gateway) -> None:
        await stop(self)
        found.extend(verdicts(self, ScriptedScorer()))

    monkeypatch.setattr(Gateway, "stop", stopped)
    return found
