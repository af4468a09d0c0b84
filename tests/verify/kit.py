"""Helpers for the tests of verify: verify a session, and tamper with one."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests import kit
from turngate.render import Renderer
from turngate.trace.sample import Sample
from turngate.verify import Renderers, RowSource, ScriptedScorer, SessionReader, Verdict, VerifyOptions, verify
from turngate.verify.store_reader import ContextFacts, NodeRow, TurnFacts
from turngate.views.session import open_row_source


def verdict(
    data: Path,
    session: str = "last",
    *,
    renderer: Renderer | None = None,
    rows: RowSource | None = None,
    replay: bool = True,
    **means: Any,
) -> Verdict:
    """Verify a session of a data folder."""
    with SessionReader(data) as folder, open_row_source(data) as real:
        given = VerifyOptions(
            rows=rows or real,
            renderers=Renderers(given=renderer),
            scorer=ScriptedScorer() if replay else None,
            tolerance=0.0,
            **means,
        )
        return verify(folder, folder.resolve_id(session), given)


def run_verify(data: Path, session: str, change: Callable[[Sample], Sample] | None = None) -> Verdict:
    """Verify a session of the kit's renderer without replay. `change` alters each row that verify compares."""
    with open_row_source(data) as real:
        rows = None if change is None else lambda name, everything: [change(row) for row in real(name, everything)]
        return verdict(data, session, renderer=kit.renderer(), replay=False, rows=rows)


def verify_all(data: Path, *, renderer: Renderer | None = None, replay: bool = True) -> list[Verdict]:
    """Verify every session of a folder; all must pass."""
    with SessionReader(data) as folder:
        sessions = folder.session_ids()
    found = [verdict(data, session, renderer=renderer, replay=replay) for session in sessions]
    for one in found:
        assert one.ok, "\n".join(f"{f.part}/{f.check}: {f.what} ({f.where})" for f in one.wrong)
    return found


def wrong(found: Verdict) -> set[str]:
    """The names of the failed checks."""
    return {finding.check for finding in found.wrong}


class Tampering:
    """Changes a stored session. `node` updates the checksum, `sql` does not."""

    def __init__(self, db: sqlite3.Connection, session: str) -> None:
        self._db = db
        self.name = session
        self.key = db.execute("SELECT key FROM sessions WHERE id=?", (session,)).fetchone()[0]

    def sql(self, statement: str, *values: object) -> None:
        assert self._db.execute(statement, values).rowcount != 0, statement

    def event_data(self, kind: str) -> list[bytes]:
        """The data of its events of a kind, as JSON."""
        query = "SELECT data FROM events WHERE session=? AND kind=? ORDER BY seq"
        return [data for (data,) in self._db.execute(query, (self.name, kind))]

    def rows(self) -> list[NodeRow]:
        found = self._db.execute(
            "SELECT id, parent, kind, ids, logprobs, info, messages, delivered, checksum FROM nodes WHERE session=? ORDER BY id",
            (self.key,),
        )
        return [NodeRow(*row) for row in found]

    def row(self, node: int) -> NodeRow:
        return next(row for row in self.rows() if row.id == node)

    def of_kind(self, kind: str) -> list[int]:
        return [row.id for row in self.rows() if row.kind == kind]

    def node(self, node: int, *, update_checksum: bool = True, **changes: Any) -> None:
        """Change columns of a node."""
        was = self.row(node)
        now = msgspec.structs.replace(was, **changes)
        if update_checksum:
            now = msgspec.structs.replace(now, checksum=now.compute_checksum(self.key))
        self.sql("DELETE FROM nodes WHERE session=? AND id=?", self.key, node)
        self._insert(now)

    def facts(self, node: int, **changes: Any) -> None:
        """Change the facts of a node and its checksum."""
        row = self.row(node)
        kind = ContextFacts if row.kind == "context" else TurnFacts
        # As a list, to keep the fields that verify does not read.
        values = msgspec.msgpack.decode(row.info)
        names = [field.name for field in msgspec.structs.fields(kind)]
        defaults = msgspec.to_builtins(msgspec.msgpack.decode(row.info, type=kind))
        values += defaults[len(values) :]
        for name, value in changes.items():
            values[names.index(name)] = value
        self.node(node, info=msgspec.msgpack.encode(values))

    def fact(self, node: int) -> Any:
        row = self.row(node)
        return msgspec.msgpack.decode(row.info, type=ContextFacts if row.kind == "context" else TurnFacts)

    def add(self, row: NodeRow) -> None:
        self._insert(msgspec.structs.replace(row, checksum=row.compute_checksum(self.key)))

    def _insert(self, row: NodeRow) -> None:
        self.sql(
            "INSERT INTO nodes (session, id, parent, kind, ids, logprobs, info, messages, delivered, checksum)"
            " VALUES (?,?,?,?,?,?,?,?,?,?)",
            self.key,
            *msgspec.structs.astuple(row),
        )


@contextmanager
def tampering(data: Path, session: str) -> Iterator[Tampering]:
    with closing(sqlite3.connect(data / "turngate.db", isolation_level=None)) as db:
        yield Tampering(db, session)
