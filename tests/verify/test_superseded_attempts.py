"""Verify compares the superseded attempts of a session with their events, which may precede the session's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import kit
from tests.verify.kit import tampering, verdict, wrong

EVENTS = "session=? AND kind='superseded'"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("", set()),
        (f"UPDATE events SET seq=-1 WHERE {EVENTS}", set()),  # a lost cell shipped the session later
        (f"DELETE FROM events WHERE {EVENTS}", {"events"}),
        (f"UPDATE events SET seq=-1, data='{{}}' WHERE {EVENTS}", {"events"}),
    ],
)
async def test_event_of_superseded_attempt(tmp_path: Path, change: str, expected: set[str]) -> None:
    async with kit.gateway([kit.say("Hello.")], data=tmp_path) as g:
        session = await g.open(rollout="r", attempt=1)
        await g.ask(session.key, [kit.user("Hi")])
        given_up = {"rollout": "r", "attempt": 1, "session": session.id}
        (await g.admin.post("/admin/attempts/supersede", json=given_up)).raise_for_status()
        await g.seal(session.id)
    if change:
        with tampering(tmp_path, session.id) as store:
            store.sql(change, session.id)
    assert wrong(verdict(tmp_path, session.id, renderer=kit.renderer())) == expected
    (tmp_path / "turngate.db").unlink()  # else tests/verify/everywhere.py finds the damage, too
