"""The tool_calls table: calls of host tools (`trace/tool_schema.py`) and their replies."""

from __future__ import annotations

from typing import Literal

import msgspec

from turngate.common import clock
from turngate.store.columns import MAX_INTEGER, as_name
from turngate.store.connection import FOR_UPDATE, Connect
from turngate.store.events import insert_event, new_event

TOOL_CALL_TABLES = """
CREATE TABLE IF NOT EXISTS tool_calls (
    session INTEGER NOT NULL,     -- key of the session
    call INTEGER NOT NULL,        -- 1, 2, … in the order of arrival
    tool TEXT NOT NULL,
    repeat TEXT NOT NULL,         -- the caller's id for this call, used to detect repeats; empty: none
    called REAL NOT NULL,
    answered REAL,
    answered_by TEXT NOT NULL DEFAULT '',
    arguments BLOB NOT NULL,      -- JSON
    reply BLOB,                   -- JSON; NULL: not answered
    PRIMARY KEY (session, call)
) WITHOUT ROWID;
"""
_COLUMNS = "call, tool, arguments, called, repeat, reply, answered, answered_by"
AnsweredBy = Literal["", "tool", "host", "time"]  # not answered yet; by the tool itself; by the host; by the time limit


class HostToolCall(msgspec.Struct, frozen=True):
    """One call of a host tool, and its reply if there is one."""

    call: int
    tool: str
    arguments: msgspec.Raw
    called: float
    repeat: str
    reply: msgspec.Raw | None
    answered: float | None
    answered_by: AnsweredBy


class ToolCalls:
    def __init__(self, writing: Connect, reading: Connect) -> None:
        self._writing = writing
        self._reading = reading

    def add(
        self, session: int, name: str, tool: str, arguments: bytes, repeat: str, reply: bytes | None, most: int
    ) -> HostToolCall | None:
        """Add a host-tool call and its event. `name` is the session's id. Return None if the session already has `most` calls."""
        with self._writing() as db:
            db.execute(f"SELECT key FROM sessions WHERE key=? {FOR_UPDATE}", (session,)).fetchall()
            (count,) = db.execute("SELECT count(*) FROM tool_calls WHERE session=?", (session,)).fetchone()
            if count >= most:
                return None
            now = clock.now()
            answered = None if reply is None else now
            by: AnsweredBy = "" if reply is None else "tool"
            db.execute(
                f"INSERT INTO tool_calls (session, {_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?)",
                (session, count + 1, tool, arguments, now, repeat, reply, answered, by),
            )
            insert_event(db, new_event(name, "tool", {"call": count + 1, "tool": tool}))
        return _tool_call_from_row((count + 1, tool, arguments, now, repeat, reply, answered, by))

    def answer(self, session: int, name: str, call: HostToolCall, reply: bytes, by: AnsweredBy) -> None:
        with self._writing() as db:
            db.execute(
                "UPDATE tool_calls SET reply=?, answered=?, answered_by=? WHERE session=? AND call=?",
                (reply, clock.now(), by, session, call.call),
            )
            insert_event(db, new_event(name, "answered", {"call": call.call, "tool": call.tool, "by": by}))

    def page(self, session: int, after: int, limit: int) -> list[HostToolCall]:
        return self._select(session, "call>? ORDER BY call LIMIT ?", after, limit)

    def find(self, session: int, call: int) -> HostToolCall | None:
        if call > MAX_INTEGER:
            return None
        return next(iter(self._select(session, "call=?", call)), None)

    def find_repeat(self, session: int, repeat: str) -> HostToolCall | None:
        """Return the call that was made with this idempotency key, or None."""
        return next(iter(self._select(session, "repeat=? LIMIT 1", repeat)), None)

    def _select(self, session: int, where: str, *values: object) -> list[HostToolCall]:
        with self._reading() as db:
            query = f"SELECT {_COLUMNS} FROM tool_calls WHERE session=? AND {where}"
            return [_tool_call_from_row(row) for row in db.execute(query, (session, *values)).fetchall()]


def _tool_call_from_row(
    row: tuple[int, str, bytes, float, str, bytes | None, float | None, AnsweredBy],
) -> HostToolCall:
    call, tool, arguments, called, repeat, reply, answered, by = row
    raw = None if reply is None else msgspec.Raw(reply)
    return HostToolCall(call, as_name(tool), msgspec.Raw(arguments), called, repeat, raw, answered, by)
