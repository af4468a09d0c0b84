"""The classes for checks, their results, and the findings that `turngate doctor` prints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from turngate.doctor.context import DoctorContext

CheckState = Literal["ok", "warning", "failure", "not checked"]
CheckScope = Literal["here", "gateway", "anywhere"]


class CheckOutcome(msgspec.Struct, frozen=True):
    """One result of a check: a line that says what was found and, if there is a problem, a line that says how to fix it."""

    state: CheckState
    message: str
    fix: str = ""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One result of a check as `turngate doctor` prints it, with the name and the duration of the check."""

    check: str
    state: CheckState
    message: str = msgspec.field(name="seen")
    fix: str = msgspec.field(default="", name="mend")
    seconds: float = 0.0


class DoctorCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One check: its name and description, when it can run, its time limit, and the function that runs it.

    `where` says when the check can run: without `--gateway` (`here`), with `--gateway` (`gateway`), or in both cases (`anywhere`).
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
