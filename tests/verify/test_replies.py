"""Stored replies are checked against the turns that they delivered."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit import calls, gateway, say
from tests.verify.kit import verdict, wrong

READ = {"type": "function", "name": "read_file", "parameters": {"type": "object"}}
# What was changed, and the words that describe it.
TAMPERED = {
    "UPDATE replies SET node=999 WHERE id=:id": "belongs to node 999, which is not a turn of this session",
    "UPDATE replies SET node=1 WHERE id=:id": "belongs to node 1, which is not a turn of this session",
    "UPDATE replies SET node='x' WHERE id=:id": "belongs to node x",
    "UPDATE replies SET tail=substr(tail, 1, 40) WHERE id=:id": "cannot be read",
    "UPDATE replies SET tail='x' WHERE id=:id": "is not stored as bytes",
    "UPDATE replies SET id='resp_other' WHERE id=:id": "contains a different id",
    "UPDATE replies SET node=4 WHERE id=:id": "has different calls from its turn",
    "UPDATE replies SET tail=CAST(replace(CAST(tail AS TEXT), 'It says', 'It sings') AS BLOB)": "has different text",
}


async def record(data: Path) -> tuple[str, str]:
    """Record two turns with stored replies. Return the session and the first reply."""
    async with gateway([say(calls(("read_file", {"path": "a"}))), say("It says x.")], data=data) as g:
        session = await g.open()
        client = g.client(session.key)
        first = await client.responses.create(model="m", input="Hi", tools=[READ])  # type: ignore[list-item]
        call = first.output[0]
        assert call.type == "function_call"
        await client.responses.create(
            model="m",
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "x"}],
            previous_response_id=first.id,
            tools=[READ],  # type: ignore[list-item]
        )
        return session.id, first.id


async def test_stored_replies_agree_with_their_turns(tmp_path: Path) -> None:
    session, _ = await record(tmp_path)
    found = verdict(tmp_path, session)
    assert found.ok, found.wrong
    [check] = [finding for finding in found.findings if finding.check == "replies"]
    assert check.ok


@pytest.mark.parametrize("change", TAMPERED)
async def test_tampered_replies_are_detected(tmp_path: Path, change: str) -> None:
    session, reply = await record(tmp_path)
    with closing(sqlite3.connect(tmp_path / "turngate.db")) as db:
        db.execute(change, {"id": reply} if ":id" in change else {})
        db.commit()
    found = verdict(tmp_path, session)
    assert wrong(found) == {"replies"}, found.wrong
    assert TAMPERED[change] in found.wrong[0].what
