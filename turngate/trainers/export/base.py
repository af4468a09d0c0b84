"""What a format is, and what can be chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, Protocol

import msgspec

from turngate.errors import ConfigError
from turngate.trace.advantage import Choice
from turngate.trainers.export.files import Layout
from turngate.trainers.export.source import Group, Left, Wanted
from turngate.types import Json

Form = Literal["", "messages", "completions", "tokens"]
Record = Mapping[str, Json]


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """What to write of what. Each format knows some of these, and refuses others that are set."""

    format: str
    wanted: Wanted = Wanted()
    form: Form = ""  # empty: the format's first
    advantage: Choice = "normalised"
    imitate: bool = (
        False  # also turns without log-probabilities, or sampled with a bias: good to imitate, not to reinforce
    )
    keep: Literal["all", "best"] = "all"  # of a group, when rejecting
    margin: float = 0.0  # by which the rewards of a pair differ, and more
    pairs: int = 4  # of a group at most
    prompt_ids: bool = False  # of every step, whole


class Format(Protocol):
    """One file format. It has no state."""

    @property
    def name(self) -> str: ...

    @property
    def whole_groups(self) -> bool:
        """Whether it looks at rollouts of a group that are not wanted themselves."""

    def checked(self, choices: Choices) -> Choices:
        """With what is not given filled in. What does not go with the format is refused by the name of its flag."""

    def layout(self, choices: Choices) -> Layout: ...

    def records(self, group: Group, choices: Choices, left: Left) -> Iterator[Record]: ...

    def scored(self, record: Record) -> str:
        """The session whose log-probabilities a record has; empty: it has none."""

    def lost(self, choices: Choices) -> tuple[str, ...]:
        """What the format has no place for."""


_DEFAULTS = Choices(format="")
_FLAGS = ("form", "advantage", "imitate", "keep", "margin", "pairs", "prompt_ids")
_SHOWN = {"form": "as"}


def only(choices: Choices, *known: str, forms: tuple[Form, ...] = ()) -> Choices:
    """Refuse what is chosen and has no meaning here; the first of the forms is the default."""
    for name in _FLAGS:
        if name not in known and getattr(choices, name) != getattr(_DEFAULTS, name):
            flag = _SHOWN.get(name, name)
            raise ConfigError(
                f"{flag}: means nothing for {choices.format}; leave out --{flag.replace('_', '-')}", param=flag
            )
    if choices.form and choices.form not in forms:
        raise ConfigError(f"as: {choices.form!r} is none of {', '.join(forms)} for {choices.format}", param="as")
    return choices if choices.form or not forms else msgspec.structs.replace(choices, form=forms[0])
