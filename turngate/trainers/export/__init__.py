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

from turngate.engines.scripted import MADE_UP
from turngate.errors import ConfigError
from turngate.trainers.export import atif, dpo, rejection, rows, sft, slime, verl
from turngate.trainers.export.base import Choices, Format
from turngate.trainers.export.files import Unwritable, written
from turngate.trainers.export.source import Left, Source, Wanted, counted
from turngate.trainers.export.synthetic import is_made_up

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
    replaced_files: int  # how many; more than one where each record is a file
    other_files: int  # of other records, that were there before and stay
    records: int
    rollouts: int  # that were looked at
    groups: int
    lost: tuple[str, ...]  # what the format has no place for
    left_out: Mapping[str, int]  # why, and how often
    notes: tuple[str, ...]  # what to know before training on it


def export(data: Path | str, out: Path | str, choices: Choices) -> Exported:
    """Write a file, whole or not at all. An `out` that ends in / is a folder. Where no record comes of it, nothing is written."""
    format = FORMATS.get(choices.format)
    if format is None:
        raise ConfigError(f"format: {choices.format!r} is none of {', '.join(FORMATS)}", param="format")
    choices = format.checked(choices)
    folder = isinstance(out, str) and out.endswith("/")
    data, out = Path(data), Path(out)
    left = Left()
    rollouts = groups = made_up = 0
    with (
        Source(data, choices.wanted, left, whole=format.whole_groups) as source,
        written(out, format.layout(choices), folder=folder) as file,
    ):
        for group in source.groups():
            groups += 1
            rollouts += len(group.wanted)
            scored = set()
            for record in format.records(group, choices, left):
                try:
                    file.add(record)
                    scored.add(format.scored(record))
                except Unwritable as error:
                    left.out(str(error))
            made_up += sum(is_made_up(one) for one in group.wanted if one.id in scored)
        if not file.records:
            raise ConfigError(
                f"data: no record comes of {counted(rollouts)}, so nothing is written; left out: {left}", param="data"
            )
    return Exported(
        out=out,
        replaced=file.replaced > 0,
        replaced_files=file.replaced,
        other_files=file.others,
        records=file.records,
        rollouts=rollouts,
        groups=groups,
        lost=format.lost(choices),
        left_out=left.counts,
        notes=(f"{counted(made_up)}: {MADE_UP}",) if made_up else (),
    )


__all__ = ["FORMATS", "Choices", "Exported", "Wanted", "export"]
