"""Verify the recorded sessions of a gateway when it stops. Tests in this folder use a fixture; all others use a plugin:

    pytest -p tests.verify.everywhere --verify-every 10

This verifies every tenth session. Without the option, it verifies all of them.

Sessions that a test damaged on purpose are skipped: those whose id, trace or outcome cannot be read, and those with an outcome but without
turns.
"""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from turngate.errors import NotFound, StoreError
from turngate.server.app import Gateway
from turngate.store.outcomes import DamagedOutcome
from turngate.store.store import Store
from turngate.verify import Renderers, Scorer, SessionReader, Verdict, VerifyOptions, verify
from turngate.views.session import open_row_source

SEEN: list[Verdict] = []
_stop = Gateway.stop
_numbers = itertools.count()  # of the recorded sessions


def verdicts(gateway: Gateway, scorer: Scorer | None = None, every: int = 1) -> list[Verdict]:
    """Verify one in `every` sessions of a gateway. All must be exact."""
    data, found = Path(gateway.config.data), []
    if not (data / "turngate.db").is_file():
        return []
    with SessionReader(data) as folder, open_row_source(data) as rows:
        for session in folder.session_ids():
            if next(_numbers) % every:
                continue
            try:
                rows(session, True)
            except (StoreError, NotFound):
                continue
            means = VerifyOptions(rows=rows, renderers=Renderers(given=gateway.renderer), scorer=scorer, tolerance=0.0)
            verdict = verify(folder, session, means)
            if {finding.check for finding in verdict.wrong} == {"outcome"} and _damaged_on_purpose(data, verdict):
                continue
            assert verdict.ok, "\n".join(f"{f.part}/{f.check}: {f.what} ({f.where})" for f in verdict.wrong)
            found.append(verdict)
    return found


def _damaged_on_purpose(data: Path, verdict: Verdict) -> bool:
    if not verdict.counts.turns:
        return True
    with closing(Store.reading(data)) as store:
        row = store.find(verdict.session)
        return row is not None and isinstance(store.outcomes.find(row.key), DamagedOutcome)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--verify-every", type=int, default=1, help="verify one in N recorded sessions (default: all)")


def pytest_configure(config: pytest.Config) -> None:
    every = config.getoption("--verify-every")

    async def stop(self: Gateway) -> None:
        await _stop(self)
        SEEN.extend(verdicts(self, every=every))

    Gateway.stop = stop  # type: ignore[method-assign]
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_Workers())


class _Workers:
    """Adds up the counts of the processes of `pytest -n`."""

    def __init__(self) -> None:
        self.sessions = self.turns = 0

    def pytest_sessionfinish(self, session: Any) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["verified"] = _counts()

    def pytest_testnodedown(self, node: Any) -> None:
        sessions, turns = getattr(node, "workeroutput", {}).get("verified", (0, 0))
        self.sessions += sessions
        self.turns += turns

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        sessions, turns = (a + b for a, b in zip(_counts(), (self.sessions, self.turns), strict=True))
        terminalreporter.write_line(f"verified {sessions} recorded sessions with {turns} turns")


def _counts() -> tuple[int, int]:
    return len(SEEN), sum(verdict.counts.turns for verdict in SEEN)
