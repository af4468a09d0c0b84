"""From a data folder to files that trainers read. A new format is one file and one line here.

    what = Choices(format="verl", wanted=Wanted(groups=("run1.*",)))
    told = export(Path("turngate-data"), Path("rows.parquet"), what)

`source.py` reads rollouts, group by group; a format turns each group into records; `files.py` writes them. In memory is one group, and of
all others the names and keys. The folder may be served by a gateway meanwhile. Called by `turngate export`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from turngate.errors import ConfigError
from turngate.trainers.export import atif, dpo, rejection, rows, sft, slime, verl
from turngate.trainers.export.base import Choices, Format
from turngate.trainers.export.files import Unwritable, written
from turngate.trainers.export.source import Left, Source, Wanted

FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        rows.Rows(),
        sft.Sft(),
        rejection.Rejection(),
        dpo.Dpo(),
        verl.Verl(),
        slime.Slime(),
        atif.Atif(),
    )
}


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    out: Path
    replaced: bool  # something of that name was there before
    records: int
    rollouts: int  # that were looked at
    groups: int
    lost: tuple[str, ...]  # what the format has no place for
    left_out: Mapping[str, int]  # why, and how often


def export(data: Path, out: Path, choices: Choices) -> Exported:
    """Write a file, whole or not at all."""
    format = FORMATS.get(choices.format)
    if format is None:
        raise ConfigError(f"format: {choices.format!r} is none of {', '.join(FORMATS)}", param="format")
    choices = format.checked(choices)
    replaced = out.is_file()
    left = Left()
    rollouts = groups = 0
    with (
        Source(data, choices.wanted, left, whole=format.whole_groups) as source,
        written(out, format.layout(choices)) as file,
    ):
        for group in source.groups():
            groups += 1
            rollouts += len(group.wanted)
            for record in format.records(group, choices, left):
                try:
                    file.add(record)
                except Unwritable as error:
                    left.out(str(error))
    return Exported(
        out=out,
        replaced=replaced,
        records=file.records,
        rollouts=rollouts,
        groups=groups,
        lost=format.lost(choices),
        left_out=left.counts,
    )


__all__ = ["FORMATS", "Choices", "Exported", "Wanted", "export"]
