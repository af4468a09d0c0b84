"""Side data in exported records: base64 with its type, shape and spans, since lists of numbers would be many times as large."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from turngate.errors import ConfigError
from turngate.trace.sample import Sample
from turngate.trace.side_data import DTYPES, SideColumn
from turngate.trainers.export.source import Exclusions
from turngate.types import Json


class ExportedColumn(msgspec.Struct, frozen=True):
    """Side data of a row: a value for each token inside a span; tokens outside have none."""

    dtype: str
    shape: tuple[int, ...]  # of one value
    spans: tuple[tuple[int, int], ...]
    data: bytes  # base64 in JSON; little-endian


def encode_columns(row: Sample, names: Sequence[str], exclusions: Exclusions) -> dict[str, Json]:
    """Encode the side data of a row, by name. Names that were not recorded for it are left out, and counted."""
    for name in names:
        if name not in row.side:
            exclusions.add(f"the {name} of a row, which were not recorded")
    return {name: _encode_column(row.side[name]) for name in names if name in row.side}


def _encode_column(column: SideColumn) -> Json:
    values = np.ascontiguousarray(column.values, column.values.dtype.newbyteorder("<"))
    return {
        "dtype": values.dtype.name,
        "shape": list(values.shape[1:]),
        "spans": [list(span) for span in column.spans],
        "data": base64.b64encode(values.reshape(-1).view(np.uint8).data).decode(),
    }


def decode_columns(side: Json) -> Mapping[str, SideColumn]:
    """Decode the field `side` of an exported row: its value in a JSON Lines file, or its text in a Parquet file."""
    try:
        raw = side.encode() if isinstance(side, str) else msgspec.json.encode(side)
        columns = msgspec.json.decode(raw, type=dict[str, ExportedColumn])
    except msgspec.DecodeError as error:
        raise ConfigError(f"side is not the side data of an exported row: {error}", param="side") from None
    return {name: _decode_column(name, column) for name, column in columns.items()}


def _decode_column(name: str, column: ExportedColumn) -> SideColumn:
    count = sum(end - start for start, end in column.spans)
    if column.dtype not in DTYPES:
        raise ConfigError(f"side.{name}.dtype must be one of {', '.join(DTYPES)}, not {column.dtype!r}", param="side")
    dtype = np.dtype(column.dtype).newbyteorder("<")
    if len(column.data) != count * dtype.itemsize * math.prod(column.shape):
        raise ConfigError(
            f"side.{name}.data has {len(column.data)} bytes, which does not match its spans", param="side"
        )
    return SideColumn(column.spans, np.frombuffer(column.data, dtype).reshape(count, *column.shape))
