"""Verify detects every alteration of stored side data, and rows whose side data is not at its own token."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests import kit
from tests.exact.agent import World
from tests.exact.side_engine import EXPERTS, SideEngine
from tests.verify.kit import Tampering, run_verify, tampering, wrong
from turngate.trace.sample import Sample
from turngate.trace.side_data import SideColumn


class Reporting(SideEngine):
    """An engine whose calls all report everything."""

    forms = ("all",)


async def record(folder: Path) -> str:
    async with World.of(folder, kit.renderer(), engine=Reporting) as world:
        agent = world.agent()
        agent.messages = [kit.user("Begin.")]
        for text in ("One.", "Two."):
            reply = await agent.call(kit.say(text))
            agent.messages += [reply.message, kit.user("Go on.")]
        return agent.session_id


def test_unchanged_session_passes(recorded: tuple[Path, str]) -> None:
    found = run_verify(*recorded)
    assert found.ok and not found.notes, found
    assert [f.part for f in found.findings if f.check == "side data"] == ["structure", "rows"]


def set_shape(t: Tampering, shape: tuple[int, ...]) -> None:
    """Change the shape of the scores of the last turn, which are single numbers, and correct the checksum."""
    rewrite(t, "shape=?", "x".join(map(str, shape)), name="scores")
    turn = t.of_kind("sampled")[-1]
    t.facts(
        turn, side=[msgspec.structs.replace(s, shape=shape) if s.name == "scores" else s for s in t.fact(turn).side]
    )


def rewrite(t: Tampering, change: str, *values: object, name: str = EXPERTS) -> None:
    """Change the experts, or other side data, of the last turn, and correct the checksum."""
    node = t.of_kind("sampled")[-1]
    t.sql(f"UPDATE side_data SET {change} WHERE session=? AND node=? AND name=?", *values, t.key, node, name)
    query = "SELECT node, name, first, dtype, shape, data FROM side_data WHERE session=? AND node=? AND name=?"
    [(*place, data)] = t._db.execute(query, (t.key, node, name)).fetchall()
    checksum = zlib.crc32("/".join(map(str, place)).encode() + data)
    t.sql("UPDATE side_data SET checksum=? WHERE session=? AND node=? AND name=?", checksum, t.key, node, name)


ALTERATIONS: dict[str, Callable[[Tampering], None]] = {
    "other bytes": lambda t: t.sql("UPDATE side_data SET data=zeroblob(length(data)) WHERE session=?", t.key),
    "checksum": lambda t: t.sql("UPDATE side_data SET checksum=checksum+1 WHERE session=?", t.key),
    "missing": lambda t: t.sql("DELETE FROM side_data WHERE session=? AND name=?", t.key, EXPERTS),
    "shifted": lambda t: rewrite(t, "first=first+1"),
    "shortened": lambda t: rewrite(t, "data=substr(data, 7)"),
    "torn value": lambda t: rewrite(t, "data=substr(data, 2)"),
    "other shape": lambda t: rewrite(t, "shape='3x2'"),
    "negative shape": lambda t: set_shape(t, (-1, -1)),
    "too many dimensions": lambda t: set_shape(t, (1,) * 64),
    "other type": lambda t: rewrite(t, "dtype='int32'"),
    "text": lambda t: t.sql("UPDATE side_data SET data='text' WHERE session=?", t.key),
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_alteration_is_detected(name: str, copy: tuple[Path, str]) -> None:
    with tampering(*copy) as t:
        ALTERATIONS[name](t)
    assert "side data" in wrong(run_verify(*copy))


def test_overlapping_side_data_is_detected(copy: tuple[Path, str]) -> None:
    with tampering(*copy) as t:
        turn = t.of_kind("sampled")[-1]
        side = [msgspec.structs.replace(s, first=s.first - 1) if s.name == EXPERTS else s for s in t.fact(turn).side]
        t.facts(turn, side=side)
    assert "side data" in wrong(run_verify(*copy))


@pytest.mark.parametrize("count", [0, -1])
def test_side_data_for_no_tokens_is_detected(count: int, copy: tuple[Path, str]) -> None:
    with tampering(*copy) as t:
        turn = t.of_kind("sampled")[-1]
        t.facts(turn, side=[msgspec.structs.replace(s, count=count) for s in t.fact(turn).side])
    assert "side data" in wrong(run_verify(*copy))


def test_leftovers_of_a_crash_are_noted(copy: tuple[Path, str]) -> None:
    with tampering(*copy) as t:
        t.sql("INSERT INTO side_data VALUES (?,99,'routed_experts',0,'uint8','',?,0)", t.key, b"x")
    found = run_verify(*copy)
    assert found.ok and "no turn lists the side data of these nodes: 99" in found.notes[0].what


def change_column(row: Sample, change: Callable[[SideColumn], SideColumn]) -> Sample:
    return msgspec.structs.replace(row, side={**row.side, EXPERTS: change(row.side[EXPERTS])})


def set_first(values: np.ndarray) -> np.ndarray:
    values = values.copy()
    values[3] += 1
    return values


ROW_CHANGES: dict[str, Callable[[Sample], Sample]] = {
    "without": lambda row: msgspec.structs.replace(row, side={}),
    "other value": lambda row: change_column(row, lambda c: SideColumn(c.spans, set_first(c.values))),
    "shifted": lambda row: change_column(
        row, lambda c: SideColumn(tuple((start + 1, end + 1) for start, end in c.spans), c.values)
    ),
    "filled": lambda row: change_column(row, lambda c: SideColumn(((0, len(row.ids)),), c.fill(len(row.ids), 0))),
    "too short": lambda row: change_column(row, lambda c: SideColumn(c.spans, c.values[:-1])),
    "invented": lambda row: msgspec.structs.replace(row, side={**row.side, "other": row.side[EXPERTS]}),
}


@pytest.mark.parametrize("name", ROW_CHANGES)
def test_wrong_row_is_detected(name: str, recorded: tuple[Path, str]) -> None:
    found = run_verify(*recorded, ROW_CHANGES[name])
    assert [(finding.part, finding.check) for finding in found.wrong][:1] == [("rows", "side data")], found.wrong
