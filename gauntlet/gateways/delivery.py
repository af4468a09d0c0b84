"""What a gateway delivers to a trainer besides ids, mask and log-probabilities, or why it does not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gauntlet.gateways.base import Row

Feature = Literal["experts", "masks", "tree", "turn rewards", "teacher", "versions", "loaders"]


@dataclass(frozen=True)
class Verdict:
    mark: Literal["yes", "wrong", "no", "not tested"]
    detail: str = ""  # what is wrong, how it is known that the gateway lacks it, or why it was not tested


@dataclass(frozen=True)
class Absence:
    """Why a gateway lacks a feature, with a file in its installed package that shows it.

    The file must contain `says`, if given, and nothing that matches the pattern `without`, if given. Otherwise, the verdict is
    "not tested", because a new version of the package may have gained the feature.
    """

    why: str
    file: str  # relative to the folder of the installed packages
    says: str = ""
    without: str = ""

    def check(self, packages: Path) -> Verdict:
        path = packages / self.file
        if not path.is_file():
            return Verdict("not tested", f"{self.file} was not found")
        text = path.read_text(encoding="utf-8")
        if self.without and (found := re.search(self.without, text)):
            return Verdict(
                "not tested", f"{self.file} mentions {found[0]!r}; check whether the gateway still lacks this"
            )
        if self.says not in text:
            return Verdict(
                "not tested", f"{self.file} does not contain {self.says!r}; check whether the gateway still lacks this"
            )
        return Verdict("no", f"{self.why} (`{self.file}`)")


@dataclass(frozen=True)
class Segment:
    """A part of a tree of rows: the tokens that follow those of its parent."""

    parent: int | None
    ids: Sequence[int]


@dataclass(frozen=True)
class Delivery:
    """What a gateway delivers to a trainer for one feature."""

    rows: Sequence[Row]
    values: Sequence[Sequence[Any]] = ()  # for each row, one per token; None where there is none
    segments: Sequence[Segment] = ()
    leaves: Sequence[int] = ()  # for each row, the segment at which it ends
    loaded: Mapping[str, Sequence[Row]] = field(default_factory=dict)  # by trainer: the rows that its package loaded
