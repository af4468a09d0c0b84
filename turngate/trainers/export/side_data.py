"""Side data in exported records. It is encoded as base64, because lists of numbers would be many times larger."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from turngate.common.validation import parse_json
from turngate.engines.routed_experts import ROUTED_EXPERTS
from turngate.errors import ConfigError
from turngate.store.side_data import SideDataTable
from turngate.trace.sample import Sample
from turngate.trace.side_data import DTYPES, SideColumn, decode_values, encode_values
from turngate.trainers.export.base import ExportChoices
from turngate.trainers.export.source import Exclusions
from turngate.trainers.routed_experts import has_all_experts
from turngate.types import SAMPLING_MASK, Json

_NAMES = (ROUTED_EXPERTS, SAMPLING_MASK)  # side data that Turngate records; engines and trainers may record more


class ExportedColumn(msgspec.Struct, frozen=True):
    """The side data of a record under one name. Each token inside a span has a value; other tokens have none."""

    dtype: str
    shape: tuple[int, ...]  # of one token's value; (-1,): lists of different lengths
    spans: tuple[tuple[int, int], ...]
    data: bytes  # base64 in JSON; see `encode_values`


def encode_columns(side: Mapping[str, SideColumn], names: Sequence[str], exclusions: Exclusions) -> dict[str, Json]:
    """Encode a row's side data under the given names. Names under which nothing was recorded for the row are counted in `exclusions`."""
    count_missing(side, names, exclusions)
    return {name: encode_column(side[name]) for name in names if name in side}


def count_missing(side: Mapping[str, SideColumn], names: Sequence[str], exclusions: Exclusions) -> None:
    for name in names:
        if name not in side:
            exclusions.add(f"the {name} of a row: not recorded")


def check_recorded(names: Sequence[str], table: SideDataTable) -> None:
    """Raise `ConfigError` if a name is unknown: Turngate does not record side data under this name, and the store contains none."""
    if set(names) <= set(_NAMES):
        return
    known = sorted({*_NAMES, *table.list_names()})
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--side must be one of {', '.join(known)}, not {', '.join(unknown)}", param="side")


def encode_column(column: SideColumn) -> Json:
    values = column.values
    return {
        "dtype": values.dtype.name,
        "shape": list(values.shape[1:]),
        "spans": [list(span) for span in column.spans],
        "data": base64.b64encode(encode_values(values)).decode(),
    }


def check_experts(choices: ExportChoices) -> ExportChoices:
    """Raise `ConfigError` if side data other than routed experts is requested.

    Call this for formats that have no field for other side data.
    """
    if others := [name for name in choices.side if name != ROUTED_EXPERTS]:
        raise ConfigError(
            f"--side must name only {ROUTED_EXPERTS} for format {choices.format}, not {', '.join(others)}",
            param="side",
        )
    return choices


def encode_experts(
    row: Sample, tokens: int, names: Sequence[str], exclusions: Exclusions, field: str = ROUTED_EXPERTS
) -> dict[str, Json] | None:
    """Encode the routed experts of the first `tokens` tokens of a row, except the last of them, whose experts trainers do not need.

    `names` is the requested side data; if it is empty, return an empty dictionary. Return None if experts are missing, because the row must
    then be left out.
    """
    if not names:
        return {}
    column = row.side.get(ROUTED_EXPERTS)
    if column is None or not has_all_experts(column, tokens):
        exclusions.add("a row without the routed experts of all its tokens")
        return None
    return {field: encode_column(column.cut(0, tokens - 1))}


def decode_experts(value: Json) -> np.ndarray:
    """Decode the routed experts of an exported record to an array of shape (tokens, layers, experts per token), for verl and miles."""
    try:
        column = parse_json(value) if isinstance(value, str) else value  # text in a Parquet file
    except ValueError as error:
        raise ConfigError(f"{ROUTED_EXPERTS} cannot be read as JSON: {error}", param=ROUTED_EXPERTS) from None
    values = decode_columns({ROUTED_EXPERTS: column})[ROUTED_EXPERTS].values
    assert isinstance(values, np.ndarray), "every token has the same number of experts"
    return values


def decode_columns(side: Json) -> Mapping[str, SideColumn]:
    """Decode the `side` field of an exported record. The field is an object in a JSON Lines file and text in a Parquet file."""
    try:
        raw = side.encode() if isinstance(side, str) else msgspec.json.encode(side)
        columns = msgspec.json.decode(raw, type=dict[str, ExportedColumn])
    except ValueError as error:  # includes text that cannot be encoded as UTF-8
        raise ConfigError(f"the side data is invalid: {error}", param="side") from None
    except RecursionError:
        raise ConfigError("the side data is invalid: it is nested too deeply", param="side") from None
    return {name: _decode_column(name, column) for name, column in columns.items()}


def _decode_column(name: str, column: ExportedColumn) -> SideColumn:
    if column.dtype not in DTYPES:
        raise ConfigError(
            f"side data {name}: dtype must be one of {', '.join(DTYPES)}, not {column.dtype!r}", param="side"
        )
    try:
        values = decode_values(column.data, column.dtype, column.shape)
    except ValueError:
        values = None
    if values is None or len(values) != sum(end - start for start, end in column.spans):
        raise ConfigError(
            f"side data {name}: the decoded 'data' has {len(column.data)} bytes, which does not match 'dtype', 'shape' and 'spans'",
            param="side",
        )
    return SideColumn(column.spans, values)
