"""Whatever is recorded, with any gateway, is verified when that gateway stops. A fixture for tests here; a plugin for all others:

    pytest -p tests.verify.everywhere -m "not real"

Traces that a test has damaged on purpose are its own affair: those are refused by the gateway itself, and passed over. So are
outcomes of which the same can be said, and those that a test has put into the store beside sessions without a turn.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from turngate.errors import StoreError
from turngate.server.app import Gateway
from turngate.store.sqlite import Store
from turngate.verdicts import stored_rows
from turngate.verify import Folder, Means, Renderers, Scorer, Verdict, verify

SEEN: list[Verdict] = []
_stop = Gateway.stop


def verdicts(gateway: Gateway, scorer: Scorer | None = None) -> list[Verdict]:
    """On every session of its folder, all of which have to be fine."""
    data, found = Path(gateway.config.data), []
    if not (data / "turngate.db").is_file():
        return []
    with Folder(data) as folder, stored_rows(data) as rows:
        for session in folder.sessions():
            try:
                rows(session, True)
            except StoreError:
                continue
            means = Means(rows=rows, renderers=Renderers(given=gateway.renderer), scorer=scorer, tolerance=0.0)
            verdict = verify(folder, session, means)
            if {finding.check for finding in verdict.wrong} == {"outcome"} and _own_affair(data, verdict):
                continue
            assert verdict.ok, "\n".join(f"{f.part}/{f.check}: {f.what} ({f.where})" for f in verdict.wrong)
            found.append(verdict)
    return found


def _own_affair(data: Path, verdict: Verdict) -> bool:
    if not verdict.counts.turns:
        return True
    with closing(Store.reading(data)) as store:
        row = store.find(verdict.session)
        return row is not None and bool(store.outcomes.damaged(row.key, row.key))


async def _verified(self: Gateway) -> None:
    await _stop(self)
    SEEN.extend(verdicts(self))


def pytest_configure(config: Any) -> None:
    Gateway.stop = _verified  # type: ignore[method-assign]
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_Workers())


class _Workers:
    """What the processes of `pytest -n` have seen, added up."""

    def __init__(self) -> None:
        self.sessions = self.turns = 0

    def pytest_sessionfinish(self, session: Any) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["verified"] = _seen()

    def pytest_testnodedown(self, node: Any) -> None:
        sessions, turns = getattr(node, "workeroutput", {}).get("verified", (0, 0))
        self.sessions += sessions
        self.turns += turns

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        sessions, turns = (a + b for a, b in zip(_seen(), (self.sessions, self.turns), strict=True))
        terminalreporter.write_line(f"verified everywhere: {sessions} sessions with {turns} turns")


def _seen() -> tuple[int, int]:
    return len(SEEN), sum(verdict.counts.turns for verdict in SEEN)
