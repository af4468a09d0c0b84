"""Add a teacher's scores to exported records. All rows are scored first, so that no file is written if the teacher fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from turngate.errors import ConfigError, EngineError
from turngate.render import Tokenizer, find_tokenizer
from turngate.store.score_cache import locate_cache, remove_orphans
from turngate.trace.sample import Sample
from turngate.trainers.export.base import ExportChoices
from turngate.trainers.export.side_data import encode_column
from turngate.trainers.export.source import Exclusions, RecordedRollout, RolloutSource
from turngate.trainers.teacher.scoring import TEACHER_COLUMNS, Teacher, TeacherSummary
from turngate.types import SAMPLING_MASK, Json

Watch = Callable[[TeacherSummary], None]


class ScoredRow(NamedTuple):
    row: Sample
    unscored: str  # why the teacher's scores are missing; empty if they are not


@contextmanager
def open_scores(data: Path | str, choices: ExportChoices, watch: Watch) -> Iterator[Teacher | None]:
    """Have the teacher score all rows that the export selects, then yield the teacher. Yield None if the export has no teacher.

    Scores that are cached are not computed again. Raise an error if the teacher fails, or if there are rows but the teacher has scored none
    of them by the end of the block.
    """
    if choices.teacher is None:
        yield None
        return
    cache = choices.teacher_cache or locate_cache(data)
    with RolloutSource(data, choices.wanted, Exclusions()) as source:
        source.masks = SAMPLING_MASK in choices.side
        if choices.teacher_cache is None:  # a file that the user chose may belong to several stores
            remove_orphans(source.store, cache)
        with Teacher(choices.teacher, cache, watch=watch) as teacher:
            policies = _PolicyTokenizers(source, choices.tokenizer)
            for group in source.groups():
                for rollout in group.selected:
                    if rollout.row.vocabulary:
                        policy = policies.find(rollout.row.vocabulary, teacher)
                        teacher.submit(rollout.id, rollout.rows, policy)
                    else:
                        teacher.refuse(rollout.rows, "the tokenizer of the row's session is not recorded")
            teacher.wait()
            yield teacher
            _require_scores(teacher.summary)


def _require_scores(summary: TeacherSummary) -> None:
    if summary.unscored and not summary.scored_rows:
        [(reason, _)] = summary.unscored.most_common(1)
        raise EngineError(
            f"no file was written, because the teacher scored no rows (unscored: {summary.unscored.total()}); the most "
            f"frequent reason: {reason}"
        )


class _PolicyTokenizers:
    """Finds the tokenizer of a vocabulary: the one that the user passed, or else the one whose folder the store recorded."""

    def __init__(self, source: RolloutSource, given: str) -> None:
        self._source = source
        self._given = Tokenizer(find_tokenizer(given)) if given else None
        self._found: dict[str, Tokenizer | None] = {}

    def find(self, vocabulary: str, teacher: Teacher) -> Tokenizer | None:
        """Return the tokenizer with this vocabulary, or None if the teacher is known to have the same vocabulary."""
        if vocabulary not in self._found:
            self._found[vocabulary] = None if teacher.has_vocabulary(vocabulary) else self._load(vocabulary)
        return self._found[vocabulary]

    def _load(self, vocabulary: str) -> Tokenizer:
        folder = self._source.store.setting(f"tokenizer:{vocabulary}")
        known = self._given
        if known is None and folder is not None and Path(folder, "tokenizer.json").is_file():
            known = Tokenizer(Path(folder))
        if known is not None and known.digest == vocabulary:
            return known
        if known is not None:
            problem = f"the tokenizer in {known.folder} has a different vocabulary"
        elif folder is not None:
            problem = f"its tokenizer folder, {folder}, contains no tokenizer.json on this machine"
        else:
            problem = "its tokenizer folder is not recorded"
        raise ConfigError(
            f"tokenizer: the rollouts were recorded with the vocabulary {vocabulary}, but {problem}; "
            "pass --tokenizer with the folder of the tokenizer that the rollouts were recorded with",
            param="tokenizer",
        )


def add_scores(rollout: RecordedRollout, choices: ExportChoices, exclusions: Exclusions) -> list[ScoredRow]:
    """Return the rows of a rollout with the teacher's scores, if there is a teacher. Count rows without scores in `exclusions`."""
    rows = rollout.rows_with(choices.side)
    if rollout.teacher is None:
        return [ScoredRow(row, "") for row in rows]
    scored = [_add_row_scores(row, rollout.teacher) for row in rows]
    for _, unscored in scored:
        if unscored:
            exclusions.add(f"the teacher scores of a row: {unscored}")
    return scored


def _add_row_scores(row: Sample, teacher: Teacher) -> ScoredRow:
    found = teacher.columns(row)
    return ScoredRow(row, found) if isinstance(found, str) else ScoredRow(row.with_side(found), "")


def encode_scores(row: Sample) -> dict[str, Json]:
    """Encode the teacher's scores of a row as side data."""
    return {name: encode_column(row.side[name]) for name in TEACHER_COLUMNS if name in row.side}


def describe_teacher(teacher: Teacher | None, unscored: Json) -> dict[str, Json]:
    """Return the field `teacher` of a record, if there is a teacher."""
    if teacher is None:
        return {}
    summary = teacher.summary
    facts = {"model": summary.model, "version": summary.version, "top_k": summary.top_k}
    return {"teacher": {**facts, "unscored": unscored}}
