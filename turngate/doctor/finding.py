"""The nouns of an examination."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from turngate.doctor.context import Subject

State = Literal["ok", "warning", "failure", "not checked"]
Where = Literal["here", "gateway", "anywhere"]


class Seen(msgspec.Struct, frozen=True):
    """What a check saw: one line, and one line on how to mend it, where there is something to mend."""

    state: State
    what: str
    mend: str = ""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The same, with the check's name: what is printed."""

    check: str
    state: State
    seen: str
    mend: str = ""
    seconds: float = 0.0


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """`where`: of the machine that is to serve, of a gateway that runs, or of any machine."""

    name: str
    about: str
    where: Where
    within_s: float
    look: Callable[[Subject], Awaitable[list[Seen]]]


def ok(what: str) -> Seen:
    return Seen("ok", what)


def warning(what: str, mend: str) -> Seen:
    return Seen("warning", what, mend)


def failure(what: str, mend: str) -> Seen:
    return Seen("failure", what, mend)


def unchecked(why: str, mend: str = "") -> Seen:
    return Seen("not checked", why, mend)
