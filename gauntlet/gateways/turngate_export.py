"""What Turngate delivers besides ids, mask and log-probabilities, through `turngate export`."""

from __future__ import annotations

import base64
import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gauntlet.commands import CommandError, run_command
from gauntlet.gateways.base import PACKAGE, CannotStart, Row
from gauntlet.gateways.delivery import Delivery, Feature, Segment
from gauntlet.sampler import MODEL
from gauntlet.tokens import Json, cache_folder

SIDE_DATA: dict[Feature, str] = {"experts": "routed_experts", "masks": "sampling_mask", "teacher": "teacher_logprobs"}
_FORMATS: dict[str, str] = {"verl": "verl", "slime": "miles", "areal": "areal", "tinker": "tinker"}  # → trainer
_KINDS = {"uint8": "B", "uint16": "H", "int32": "i", "float32": "f"}


async def deliver(feature: Feature, data: Path, engine_url: str) -> Delivery:
    """Export the only session of a data folder, in the format that has the feature."""
    if feature == "tree":
        return _read_tree(await _export(data, "rows"), *await _export(data, "tree"))
    if feature == "loaders":
        return await _load(data)
    if feature == "versions":
        records = await _export(data, "rows")
        return Delivery(_read_rows(records), [_list_versions(record) for record in records])
    if feature == "turn rewards":
        records = await _export(data, "rows", "--turn-rewards")
        return Delivery(_read_rows(records), [record["token_rewards"] for record in records])
    name = SIDE_DATA[feature]
    teacher = ("--teacher", "vllm", "--teacher-url", engine_url, "--teacher-model", MODEL)
    records = await _export(data, "rows", *(teacher if feature == "teacher" else ("--side", name)))
    return Delivery(_read_rows(records), [_decode_side(record, name) for record in records])


async def _export(data: Path, format: str, *options: str) -> list[Json]:
    out = data.parent / f"{format}.jsonl"
    out.unlink(missing_ok=True)
    command = ["-m", "turngate", "export", format, "--data", str(data), "--out", str(out), *options]
    await _run([sys.executable, *command], {"PYTHONPATH": str(PACKAGE.parent)})
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def _read_rows(records: Sequence[Json]) -> list[Row]:
    return [Row(record["ids"], record["mask"], record["logprobs"]) for record in records]


def _list_versions(record: Json) -> list[int | None]:
    """Return the policy version of each token of a row, or None if it is unknown."""
    versions: list[int | None] = [None] * len(record["ids"])
    for span in record["spans"]:
        size = span["end"] - span["start"]
        is_same = span["version_start"] == span["version_end"]
        runs = span.get("version_runs") or [[span["version_start"] if is_same else None, size]]
        versions[span["start"] : span["end"]] = [version for version, count in runs for _ in range(count)]
    return versions


def _decode_side(record: Json, name: str) -> list[Any]:
    """Decode the side data of a row: one value per token, None for tokens without one."""
    values: list[Any] = [None] * len(record["ids"])
    column = record["side"].get(name)
    if column is None:
        return values
    places = [n for start, end in column["spans"] for n in range(start, end)]
    data, kind = base64.b64decode(column["data"]), _KINDS[column["dtype"]]
    if column["shape"] == [-1]:  # lists of different lengths: their number, their lengths, and all numbers
        (count,) = struct.unpack_from("<I", data)
        sizes = struct.unpack_from(f"<{count}I", data, 4)
        numbers = struct.unpack_from(f"<{sum(sizes)}{kind}", data, 4 + 4 * count)
    else:
        numbers = struct.unpack(f"<{len(data) // struct.calcsize(kind)}{kind}", data)
        sizes = (len(numbers) // len(places),) * len(places)
    at = 0
    for place, size in zip(places, sizes, strict=True):
        values[place] = list(numbers[at : at + size]) if column["shape"] else numbers[at]
        at += size
    return values


def _read_tree(records: Sequence[Json], tree: Json) -> Delivery:
    segments = [Segment(each["parent"], tree["ids"][each["start"] : each["end"]]) for each in tree["segments"]]
    leaves = {row["branch"]: row["segments"][-1] for row in tree["rows"]}
    return Delivery(_read_rows(records), segments=segments, leaves=[leaves[record["branch"]] for record in records])


async def _load(data: Path) -> Delivery:
    """Export the rows for each trainer, and load them with its own package."""
    python, packages = cache_folder() / "trl" / "bin" / "python", cache_folder() / "trainers"
    if not python.exists() or not packages.exists():
        raise CannotStart("the trainers are not installed; run python tools/parts.py trainers")
    rows = _read_rows(await _export(data, "rows"))
    files = []
    for format in _FORMATS:
        await _export(data, format)
        files.append(f"{format}={data.parent / f'{format}.jsonl'}")
    added = {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", "HOME": str(data.parent)}
    out = await _run([str(python), str(PACKAGE / "inside" / "load_rows.py"), *files], added, data.parent)
    loaded = json.loads(out.splitlines()[-1])
    return Delivery(rows, loaded={_FORMATS[name]: [Row(**row) for row in found] for name, found in loaded.items()})


async def _run(command: Sequence[str], variables: dict[str, str], folder: Path = PACKAGE.parent) -> str:
    try:
        return (await run_command(command, variables=variables, folder=folder)).out
    except CommandError as error:
        raise ValueError(f"{' '.join(command[1:5])}: {error.detail}") from None
