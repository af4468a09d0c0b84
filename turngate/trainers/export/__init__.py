"""Write files that trainers read, from a data folder. A new format is one file and one line here.

    choices = ExportChoices(format="verl", wanted=RolloutFilter(groups=("run1.*",)))
    result = export(Path("turngate-data"), Path("rows.parquet"), choices)

`source.py` reads rollouts group by group, a format turns each group into records, and `files.py` writes them. Only one group is in
memory at a time. A gateway may serve the folder meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from turngate.engines.scripted import SYNTHETIC_NOTE
from turngate.errors import ConfigError
from turngate.trainers.export import atif, dpo, rejection, rows, sft, slime, verl
from turngate.trainers.export.base import ExportChoices, Format
from turngate.trainers.export.files import UnwritableRecord, open_output
from turngate.trainers.export.source import Exclusions, RolloutFilter, RolloutSource, count_rollouts
from turngate.trainers.export.synthetic import is_synthetic

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


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """What an export wrote and left out."""

    out: Path
    replaced: bool  # a file of that name existed
    replaced_files: int  # more than one only where each record is a file
    other_files: int  # existing files of other records, which are kept
    records: int
    rollouts: int  # that were read
    groups: int
    lost: tuple[str, ...]  # information that the format cannot hold
    left_out: Mapping[str, int]  # counts by reason
    notes: tuple[str, ...]  # what to know before training on it


def export(data: Path | str, out: Path | str, choices: ExportChoices) -> ExportResult:
    """Write a file completely or not at all. An `out` that ends in / is a folder. Fails if there are no records."""
    format = FORMATS.get(choices.format)
    if format is None:
        raise ConfigError(f"format: {choices.format!r} is none of {', '.join(FORMATS)}", param="format")
    choices = format.check(choices)
    folder = isinstance(out, str) and out.endswith("/")
    data, out = Path(data), Path(out)
    exclusions = Exclusions()
    rollouts = groups = synthetic = 0
    with (
        RolloutSource(data, choices.wanted, exclusions, whole_groups=format.whole_groups) as source,
        open_output(out, format.layout(choices), folder=folder) as file,
    ):
        for group in source.groups():
            groups += 1
            rollouts += len(group.selected)
            scored = set()
            for record in format.records(group, choices, exclusions):
                try:
                    file.add(record)
                    scored.add(format.find_scored_session(record))
                except UnwritableRecord as error:
                    exclusions.add(str(error))
            synthetic += sum(is_synthetic(one) for one in group.selected if one.id in scored)
        if not file.records:
            raise ConfigError(
                f"data: {count_rollouts(rollouts)} gave no record, so nothing is written; left out: {exclusions}",
                param="data",
            )
    return ExportResult(
        out=out,
        replaced=file.replaced > 0,
        replaced_files=file.replaced,
        other_files=file.others,
        records=file.records,
        rollouts=rollouts,
        groups=groups,
        lost=format.list_losses(choices),
        left_out=exclusions.counts,
        notes=(f"{count_rollouts(synthetic)}: {SYNTHETIC_NOTE}",) if synthetic else (),
    )


__all__ = ["FORMATS", "ExportChoices", "ExportResult", "RolloutFilter", "export"]
