"""Store the side data of turns (`trace/side_data.py`) in pieces of limited size.

A turn's side data can be a thousand times as large as its ids. It is written before the turn, piece by piece, so that other sessions can
write their turns in between. A crash may leave pieces of a turn that was never written. Such pieces are ignored.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from turngate.errors import StoreError
from turngate.store.connection import Connect
from turngate.trace.session import Session
from turngate.trace.side_data import concatenate_values, decode_values, encode_values
from turngate.trace.tree import SideRange
from turngate.types import RaggedArray, SideArray, SideValues

SIDE_DATA_TABLES = """
CREATE TABLE IF NOT EXISTS side_data (
    session INTEGER NOT NULL,
    node INTEGER NOT NULL,
    name TEXT NOT NULL,
    first INTEGER NOT NULL,       -- token of the first value, from the start of the turn; negative: in its prompt
    dtype TEXT NOT NULL,
    shape TEXT NOT NULL,          -- shape of one value, such as 48x8; -1: lists of different lengths
    data BLOB NOT NULL,           -- little-endian; lists are preceded by their number and their sizes (uint32)
    checksum INTEGER NOT NULL,
    PRIMARY KEY (session, node, name, first)
);
"""
PIECE_BYTES = 2**20
_COLUMNS = "node, name, first, dtype, shape, CAST(data AS BLOB), checksum"
_INSERT = "INSERT INTO side_data SELECT ?,?,?,?,?,?,?,? WHERE EXISTS (SELECT 1 FROM sessions WHERE key=?)"


class SideDataTable:
    def __init__(self, writing: Connect, reading: Connect, *, has_tables: bool = True) -> None:
        self._writing = writing
        self._reading = reading
        self._has_tables = has_tables  # False: a read-only file of an older version, without this table

    def write(self, session: int, node: int, arrays: Sequence[SideArray]) -> None:
        """Write the side data of a turn in pieces, before the turn itself. Each piece is written in a short transaction of its own."""
        with self._writing() as db:  # remove pieces that a crash has left behind
            db.execute("DELETE FROM side_data WHERE session=? AND node=?", (session, node))
        for array in arrays:
            for piece in split_array(array, PIECE_BYTES):
                row = encode_piece(node, piece)
                with self._writing() as db:
                    db.execute(_INSERT, (session, *row, session))

    def load(self, session: Session, names: Collection[str] | None = None) -> dict[int, list[SideArray]]:
        """Load a session's side data, by node id.

        With `names`, load only the side data with these names. Raise `StoreError` if the side data is damaged.
        """
        due = {
            (turn.id, side.name, side.first): side
            for turn in session.trace.turns()
            for side in turn.info.side
            if names is None or side.name in names
        }
        if not due or not self._has_tables:
            return {}
        wanted = sorted({name for _, name, _ in due})
        query = (
            f"SELECT {_COLUMNS} FROM side_data WHERE session=? AND name IN ({','.join('?' * len(wanted))})"
            " ORDER BY node, name, first"
        )
        with self._reading() as db:
            rows = db.execute(query, (session.key, *wanted)).fetchall()
        try:
            return _join_pieces(due, rows)
        except _DamagedPiece as error:
            raise StoreError(
                f"session {session.id}: the side data {error.name} of node {error.node} is damaged on disk and cannot be used"
            ) from None

    def list_names(self) -> list[str]:
        """Return the names of all recorded side data. This reads the whole index of the table."""
        if not self._has_tables:
            return []
        with self._reading() as db:
            return [name for (name,) in db.execute("SELECT DISTINCT name FROM side_data ORDER BY name").fetchall()]


class _DamagedPiece(Exception):
    def __init__(self, node: int, name: str) -> None:
        self.node, self.name = node, name


def split_array(array: SideArray, max_bytes: int) -> Iterator[SideArray]:
    """Split an array into pieces of at most `max_bytes` bytes.

    A piece covers at least one token, even if that token's data alone is larger.
    """
    values = array.values
    if isinstance(values, RaggedArray):
        yield from _split_lists(array.name, array.first, values, max_bytes)
        return
    step = max(1, max_bytes * len(values) // max(1, values.nbytes))
    for start in range(0, len(values), step):
        yield SideArray(array.name, array.first + start, values[start : start + step])


def _split_lists(name: str, first: int, values: RaggedArray, max_bytes: int) -> Iterator[SideArray]:
    ends = values.offsets[1:] * values.dtype.itemsize + 4 * np.arange(1, len(values) + 1)  # bytes up to each token
    start = 0
    while start < len(values):
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + max_bytes, "right")))
        yield SideArray(name, first + start, values[start:end])
        start = end


def encode_piece(node: int, piece: SideArray) -> tuple[object, ...]:
    """Encode a piece of side data as a row of the table, without the session's key."""
    values = piece.values
    dtype, shape, data = values.dtype.name, "x".join(map(str, values.shape[1:])), bytes(encode_values(values))
    return (
        node,
        piece.name,
        piece.first,
        dtype,
        shape,
        data,
        _checksum(node, piece.name, piece.first, dtype, shape, data),
    )


def _checksum(node: int, name: str, first: int, dtype: str, shape: str, data: bytes) -> int:
    """Return the checksum of a piece of side data. It does not cover the session's key, so it stays the same in another store."""
    return zlib.crc32(data, zlib.crc32(f"{node}/{name}/{first}/{dtype}/{shape}".encode()))


def _join_pieces(
    due: Mapping[tuple[int, str, int], SideRange], rows: Sequence[tuple[Any, ...]]
) -> dict[int, list[SideArray]]:
    """Join stored pieces of side data into the arrays listed in `due`. Raise `_DamagedPiece` if a piece is damaged or missing."""
    pieces = {row[:3]: row for row in rows}
    found: dict[int, list[SideArray]] = {}
    for (node, name, first), side in due.items():
        parts, at = [], first
        while at < first + side.count:
            row = pieces.get((node, name, at))
            values = None if row is None else _decode_piece(row, side)
            if values is None or not len(values):
                raise _DamagedPiece(node, name)
            parts.append(values)
            at += len(values)
        if at != first + side.count:
            raise _DamagedPiece(node, name)
        joined = parts[0] if len(parts) == 1 else concatenate_values(parts)
        found.setdefault(node, []).append(SideArray(name, first, joined))
    return found


def _decode_piece(row: tuple[Any, ...], side: SideRange) -> SideValues | None:
    """Return the values of a piece of side data, or None if it is damaged or does not have the type and shape recorded in its turn."""
    node, name, first, dtype, shape, data, checksum = row
    if dtype != side.dtype or shape != "x".join(map(str, side.shape)):
        return None
    if not isinstance(data, bytes) or checksum != _checksum(node, name, first, dtype, shape, data):
        return None
    try:
        return decode_values(data, dtype, side.shape)
    except ValueError:
        return None
