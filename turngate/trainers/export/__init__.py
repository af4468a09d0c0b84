"""Export rollouts from a data folder or a shared store to files for trainers, in one of several formats (`FORMATS`).

    choices = ExportChoices(format="verl", wanted=RolloutFilter(groups=("run1.*",)))
    result = export(Path("turngate-data"), Path("rows.parquet"), choices)

`source.py` reads rollouts group by group, a format converts each group to records, and `files.py` writes the records. Only one group is in
memory at a time. Exporting works even while a gateway uses the store. To add a format, write a module for it and add it to `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from turngate.engines.scripted import SYNTHETIC_NOTE
from turngate.errors import ConfigError
from turngate.trainers.export import areal, atif, dpo, rejection, rows, sft, slime, tinker, tree, verl
from turngate.trainers.export.base import ExportChoices, Format
from turngate.trainers.export.files import UnwritableRecord, open_output
from turngate.trainers.export.side_data import check_recorded
from turngate.trainers.export.source import Exclusions, RolloutFilter, RolloutSource, count_rollouts
from turngate.trainers.export.synthetic import is_synthetic
from turngate.trainers.export.teacher import Watch, open_scores
from turngate.trainers.teacher.scoring import TeacherSummary
from turngate.types import SAMPLING_MASK

FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        rows.Rows(),
        tree.Tree(),
        sft.Sft(),
        rejection.Rejection(),
        dpo.Dpo(),
        verl.Verl(),
        slime.Slime(),
        areal.Areal(),
        tinker.Tinker(),
        atif.Atif(),
    )
}


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of an export."""

    out: Path
    replaced: bool  # a file with the same name existed
    replaced_files: int  # at most one, unless each record has its own file
    other_files: int  # existing files of other records, left unchanged
    records: int
    rollouts: int  # rollouts that the filter selected
    groups: int
    lost: tuple[str, ...]  # information that the format cannot represent
    left_out: Mapping[str, int]  # counts by reason
    notes: tuple[str, ...]  # warnings for anyone who trains on the file
    teacher: TeacherSummary | None = None  # None: the export has no teacher


def export(
    data: Path | str, out: Path | str, choices: ExportChoices, watch_teacher: Watch = lambda summary: None
) -> ExportResult:
    """Export rollouts to the file `out`, which is written completely or not at all.

    For the format `atif`, `out` is a folder if it ends in '/', has no suffix, or exists as a folder. Each record then becomes a file in it,
    and files written before a failure are kept. Raise `ConfigError` if an argument is invalid or there are no records to write.
    `watch_teacher` is called in another thread after each successful call to the teacher.
    """
    format = FORMATS.get(choices.format)
    if format is None:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}, not {choices.format!r}", param="format")
    choices = format.check(choices)
    folder = isinstance(out, str) and out.endswith("/")
    out = Path(out)
    exclusions = Exclusions()
    rollouts = groups = synthetic = 0
    with (
        RolloutSource(data, choices.wanted, exclusions, whole_groups=format.whole_groups) as source,
        open_output(out, format.layout(choices), folder=folder) as file,
        open_scores(data, choices, watch_teacher) as teacher,
    ):
        check_recorded(choices.side, source.store.side_data)
        source.teacher, source.masks = teacher, SAMPLING_MASK in choices.side
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
            synthetic += sum(is_synthetic(rollout) for rollout in group.selected if rollout.id in scored)
        if not file.records:
            raise ConfigError(
                f"data: {count_rollouts(rollouts)} yielded no records, so no file was written; left out: {exclusions}",
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
        notes=(
            *([f"{count_rollouts(synthetic)}: {SYNTHETIC_NOTE}"] if synthetic else []),
            *(f"{flag} matches no recorded rollout" for flag in source.unmatched),
        ),
        teacher=None if teacher is None else teacher.summary,
    )


__all__ = ["FORMATS", "ExportChoices", "ExportResult", "RolloutFilter", "export"]
