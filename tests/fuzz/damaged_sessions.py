"""A recorded session with cells of its tables damaged, and the verifier run over it."""

from __future__ import annotations

import asyncio
import copy
import io
import math
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st
from rich.console import Console

from tests import kit
from tests.exact.agent import World
from tests.fuzz.cpu_limit import limit_cpu_time
from tests.fuzz.json_values import VALUES, _places, damaged, encode
from tests.verify.kit import tampering
from tests.verify.sessions import SIGNALS, record_branches
from tests.verify.test_side_data import Reporting
from turngate.cli.verify import print_verdict
from turngate.errors import TurngateError
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.turn_rewards import TurnReward
from turngate.verify import Renderers, ScriptedScorer, SessionReader, VerifyOptions, verify
from turngate.views.session import open_row_source

Json = Any
Cell = None | int | float | str | bytes
_BLOBS = {"nodes": ("ids", "logprobs", "info", "messages"), "outcomes": ("outcome",) * 4, "events": ("data",) * 2}
_NUMBERS = (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\x80\x7f", b"\0\0\0\x80")  # ids, or log-probabilities
HANG_S = 20.0  # CPU time for one session
_MEMORY = Path("/dev/shm")
_TABLES = ("sessions", "nodes", "preambles", "outcomes", "events", "refusals", "attempts", "side_data")
_CELLS = st.sampled_from(
    [None, "", "x", "sealed", "open", b"", b"\xff", b"{", b"{}", b"null", b"\xc1", b"\x90", b"\0" * 10]
)
_CELLS |= st.sampled_from([0, 1, 5, -1, 2**31, 2**63 - 1, -(2**63), 0.5, 1e308, float("inf")]) | st.binary(max_size=8)


class CellDamage(msgspec.Struct, frozen=True):
    """A cell and its new value. `place` counts the rows of the table."""

    table: str
    column: str
    place: int
    value: Cell


class SessionDamage(msgspec.Struct, frozen=True):
    cells: list[CellDamage]
    corrects_checksums: bool  # of the nodes, so that the checks behind that of the checksum have something to find


@cache
def _record() -> tuple[str, bytes]:
    """Return the id of a session with every kind of branch, side data and turn rewards, and the database that it is in."""
    with tempfile.TemporaryDirectory(dir=_MEMORY, prefix="turngate-fuzz-") as folder:
        session = asyncio.run(_record_in(Path(folder)))
        with closing(sqlite3.connect(Path(folder) / "turngate.db")) as db:
            db.execute("PRAGMA journal_mode=DELETE")
            return session, db.serialize()


async def _record_in(folder: Path) -> str:
    async with World.of(folder, kit.renderer(), engine=Reporting) as world:
        agent = world.agent(signals=SIGNALS)
        await record_branches(agent, world)
        await agent.call(kit.say("Never sampled."), temperature=-5)
        first, second = [turn.id for turn in agent.session.trace.turns()][:2]
        await world.gateway.sessions.seal(agent.session_id)
        parts = [TurnReward(turn=first, value=0.75, kind="part"), TurnReward(turn=second, value=0.25, kind="part")]
        extra = TurnReward(turn=second, value=-1.0, kind="extra", start=0, end=1, name="style")
        outcome = RecordedOutcome(kind="graded", reward=1.0, turn_rewards=(*parts, extra))
        world.gateway.outcomes.record(agent.session_id, outcome)
        return agent.session_id


@cache
def _read_tables() -> dict[str, list[dict[str, Cell]]]:
    """Return the rows of the tables, as long as they have any."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.deserialize(_record()[1])
        db.row_factory = sqlite3.Row
        tables = {table: [dict(row) for row in db.execute(f"SELECT * FROM {table}")] for table in _TABLES}
    return {table: rows for table, rows in tables.items() if rows}


@st.composite
def session_damages(draw: Callable[..., Any]) -> SessionDamage:
    tables = _read_tables()
    cells = []
    for _ in range(draw(st.integers(1, 2))):
        table = draw(st.sampled_from(("nodes", "nodes", "nodes", "outcomes", "outcomes", *tables)))
        place = draw(st.integers(0, len(tables[table]) - 1))
        columns = tables[table][place]
        column = draw(st.sampled_from(_BLOBS.get(table, ()) * 2 + tuple(columns)))
        others = [row[column] for row in tables[table]]
        cells.append(CellDamage(table, column, place, _draw_value(draw, columns[column], others)))
    return SessionDamage(cells, draw(st.sampled_from((True, True, True, False))))


def _draw_value(draw: Callable[..., Any], was: Cell, others: list[Cell]) -> Cell:
    """Draw any value, one of another row, or a damaged copy of the old value."""
    kind = draw(st.sampled_from(("damaged", "damaged", "damaged", "damaged", "any", "other")))
    if kind == "other":
        return draw(st.sampled_from(others))
    if kind == "any" or not isinstance(was, bytes):
        return draw(_CELLS)
    for decode, write in ((msgspec.json.decode, encode), (msgspec.msgpack.decode, _to_msgpack)):
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            value = decode(was)
            if isinstance(value, (dict, list)):
                return write(draw(_replaced(value) | damaged(st.just(value), most=2)))
    at = 4 * draw(st.integers(0, len(was) // 4))  # between two ids or log-probabilities
    number = draw(st.sampled_from(_NUMBERS))
    return draw(st.sampled_from([was[:at], was[at:], was + was, was[: at + 1], was[:at] + number + was[at + 4 :]]))


@st.composite
def _replaced(draw: Callable[..., Any], value: Json) -> Json:
    """Return a copy in which one number or text is replaced by another one, so that decoders still accept it."""
    value = copy.deepcopy(value)
    places = [(holder, key) for holder, key in _places(value) if not isinstance(holder[key], (dict, list))]
    if places:
        holder, key = draw(st.sampled_from(places))
        match holder[key]:
            case bool() as was:
                holder[key] = not was
            case int():
                holder[key] = draw(st.sampled_from([-1, 0, 1, 2, 7, 99, 2**31, 2**40, 2**63 - 1, -(2**63)]))
            case float():
                holder[key] = draw(st.sampled_from([math.nan, math.inf, -1.0, 0.0, 0.5, 2.0**40, 1e308, -1e308]))
            case str() | bytes() as was:
                holder[key] = draw(st.sampled_from([was[:0], was[1:], was + was, was[::-1]]))
            case _:
                holder[key] = draw(VALUES)
    return value


def _to_msgpack(value: Json) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError, ValueError):
        return b"\xc1"


def check_verify(damage: SessionDamage) -> None:
    """Verify the damaged session: this results in a verdict that can be printed, or an error that a user may see."""
    session, database = _record()
    with tempfile.TemporaryDirectory(dir=_MEMORY, prefix="turngate-fuzz-") as folder:
        data = Path(folder)
        (data / "turngate.db").write_bytes(database)
        _apply(damage, data, session)
        with (
            limit_cpu_time(HANG_S),
            suppress(TurngateError),
            SessionReader(data) as reader,
            open_row_source(data) as rows,
        ):
            renderers = Renderers(given=_renderer())
            options = VerifyOptions(rows=rows, renderers=renderers, scorer=ScriptedScorer(), tolerance=0.0)
            verdict = verify(reader, reader.resolve_id("last"), options)
            msgspec.json.encode(verdict)
            print_verdict(verdict, Console(file=io.StringIO()))


_renderer = cache(kit.renderer)


def _apply(damage: SessionDamage, data: Path, session: str) -> None:
    with tampering(data, session) as stored:
        for cell in damage.cells:
            columns = stored._db.execute(f"PRAGMA table_info({cell.table})")
            keys = [name for _, name, *_, key in columns if key]
            where = " AND ".join(f"{key}=?" for key in keys)
            row = _read_tables()[cell.table][cell.place]
            with suppress(sqlite3.IntegrityError, AssertionError):  # the first damage may have changed the key
                stored.sql(
                    f"UPDATE {cell.table} SET {cell.column}=? WHERE {where}", cell.value, *(row[key] for key in keys)
                )
        if damage.corrects_checksums:
            for node in stored.rows():
                with suppress(TypeError, AttributeError, UnicodeEncodeError):  # a cell has a wrong type
                    checksum = node.compute_checksum(stored.key)
                    stored.sql("UPDATE nodes SET checksum=? WHERE session=? AND id=?", checksum, stored.key, node.id)
