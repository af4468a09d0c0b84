"""Checks, their results, and the findings that `turngate doctor` prints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from turngate.doctor.context import DoctorContext

CheckState = Literal["ok", "warning", "failure", "not checked"]
CheckScope = Literal["here", "gateway", "anywhere"]


class CheckOutcome(msgspec.Struct, frozen=True):
    """The result of a check: one line about what was found, and one about how to fix it."""

    state: CheckState
    message: str
    fix: str = ""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check as printed, with the check's name."""

    check: str
    state: CheckState
    message: str = msgspec.field(name="seen")
    fix: str = msgspec.field(default="", name="mend")
    seconds: float = 0.0


class DoctorCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A check.

    `where` sets the scope of the check: the machine that will run the gateway (`here`), a running gateway (`gateway`), or both
    (`anywhere`).
    """

    name: str
    description: str
    where: CheckScope
    timeout_s: float
    run: Callable[[DoctorContext], Awaitable[list[CheckOutcome]]]


def ok(message: str) -> CheckOutcome:
    return CheckOutcome("ok", message)


def warning(message: str, fix: str) -> CheckOutcome:
    return CheckOutcome("warning", message, fix)


def failure(message: str, fix: str) -> CheckOutcome:
    return CheckOutcome("failure", message, fix)


def not_checked(reason: str, fix: str = "") -> CheckOutcome:
    return CheckOutcome("not checked", reason, fix)
