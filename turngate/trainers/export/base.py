"""The `Format` protocol, and the options of an export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from turngate.errors import ConfigError
from turngate.trace.advantage import Choice
from turngate.trace.turn_advantage import TurnCredit
from turngate.trainers.export.files import RecordLayout
from turngate.trainers.export.source import Exclusions, RecordedGroup, RolloutFilter
from turngate.trainers.teacher.config import TeacherConfig
from turngate.trainers.teacher.scoring import TEACHER_COLUMNS
from turngate.types import Json

Form = Literal["", "messages", "completions", "tokens"]
Record = Mapping[str, Json]


class ExportChoices(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an export. A format rejects options that do not apply to it."""

    format: str
    wanted: RolloutFilter = RolloutFilter()
    form: Form = ""  # empty: the format's default
    advantage: Choice = "normalised"
    imitate: bool = False  # include turns that can only be imitated: without log-probabilities, or sampled with a bias
    keep: Literal["all", "best"] = "all"  # rejection: which rollouts of each group to export
    margin: float = 0.0  # dpo: minimum difference between the rewards of a pair
    pairs: int = 4  # dpo: maximum number of pairs per group
    prompt_ids: bool = False  # atif: include the full prompt of every step
    side: tuple[str, ...] = ()  # rows, tree, verl, slime: names of the side data to include
    turn_rewards: bool = False  # rows, tree, verl, slime: include the rewards of turns
    credit: TurnCredit | None = None  # rows, tree: how to compute turn advantages; None: leave them out
    teacher: TeacherConfig | None = None  # rows, tree: a model that scores the sampled tokens
    teacher_cache: Path | None = None  # file for the teacher's scores; None: a file in the data folder
    tokenizer: str = ""  # with a teacher: the tokenizer of the recorded ids, if its folder is not on this machine


class Format(Protocol):
    """An export format, which converts groups of rollouts to records. Implementations are stateless."""

    @property
    def name(self) -> str: ...

    @property
    def whole_groups(self) -> bool:
        """Whether the format needs every rollout of a group, including those that the filter does not select."""

    def check(self, choices: ExportChoices) -> ExportChoices:
        """Return the options with defaults filled in. If an option does not apply, raise a `ConfigError` that names its flag."""

    def layout(self, choices: ExportChoices) -> RecordLayout: ...

    def records(self, group: RecordedGroup, choices: ExportChoices, exclusions: Exclusions) -> Iterator[Record]: ...

    def find_scored_session(self, record: Record) -> str:
        """Return the id of a record's session if the format includes log-probabilities. Otherwise, return an empty string."""

    def list_losses(self, choices: ExportChoices) -> tuple[str, ...]:
        """List the information that the format cannot represent."""


_DEFAULTS = ExportChoices(format="")
_FLAGS = (
    "form",
    "advantage",
    "imitate",
    "keep",
    "margin",
    "pairs",
    "prompt_ids",
    "side",
    "turn_rewards",
    "credit",
    "teacher",
)
_FLAG_NAMES = {"form": "as"}
_TEACHER_FLAGS = ("teacher_cache", "tokenizer")


def reject_unused(choices: ExportChoices, *known: str, forms: tuple[Form, ...] = ()) -> ExportChoices:
    """Return the options. If no form is set, fill in the first of `forms`, if any.

    Raise `ConfigError` if an option that is not in `known` or a form that is not in `forms` is set, or if options contradict each other.
    """
    for name in _FLAGS:
        if name not in known and getattr(choices, name) != getattr(_DEFAULTS, name):
            flag = _FLAG_NAMES.get(name, name)
            raise ConfigError(
                f"--{flag.replace('_', '-')} does not apply to format {choices.format}; leave it out", param=flag
            )
    for name in _TEACHER_FLAGS if choices.teacher is None else ():
        if getattr(choices, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} applies only with a teacher; leave it out, or also pass --teacher "
                "(formats rows and tree only)",
                param=name,
            )
    if taken := set(choices.side) & set(TEACHER_COLUMNS if choices.teacher is not None else ()):
        raise ConfigError(
            f"--side must not include {', '.join(sorted(taken))}, because --teacher adds this side data; leave it out of --side",
            param="side",
        )
    if choices.form and choices.form not in forms:
        raise ConfigError(
            f"--as must be one of {', '.join(forms)} for format {choices.format}, not {choices.form!r}", param="as"
        )
    return choices if choices.form or not forms else msgspec.structs.replace(choices, form=forms[0])
