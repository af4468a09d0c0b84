"""Base classes of the commands: they simplify the types in the help, and let error messages name flags."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import typer
import typer.core

from turngate.errors import TurngateError

F = TypeVar("F", bound=Callable[..., Any])
_context: ContextVar[Any] = ContextVar("context")  # typer's context of the running command


class Command(typer.core.TyperCommand):
    """A command that provides its flags to `list_flags` while it runs."""

    def get_params(self, ctx: Any) -> Any:
        return hide_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        token = _context.set(ctx)
        try:
            return super().invoke(ctx)
        finally:
            _context.reset(token)


class Group(typer.core.TyperGroup):
    """A group of commands, with simplified types in its help."""

    def get_params(self, ctx: Any) -> Any:
        return hide_types(super().get_params(ctx))


class CommandGroup(typer.Typer):
    """A `Typer` that creates a `Group` of `Command`s."""

    def __init__(self, *, cls: type[Group] = Group, **settings: Any) -> None:
        super().__init__(cls=cls, **settings)

    def command(
        self, name: str | None = None, *, cls: type[typer.core.TyperCommand] | None = None, **settings: Any
    ) -> Callable[[F], F]:
        return super().command(name, cls=cls or Command, **settings)


def hide_types(params: Sequence[Any]) -> Sequence[Any]:
    """Simplify the types in the help: <str> for repeatable options, and none for repeatable arguments and for flags without a value."""
    for param in params:
        if not isinstance(param, typer.core.TyperOption):
            if param.nargs != 1:
                param.display_type_rich = lambda ctx: None
        elif param.metavar is None and (param.is_flag or param.multiple):
            param.metavar = "" if param.is_flag else "<str>"
    return params


def list_flags() -> dict[str, str]:
    """Return the flag of each option of the running command, by the option's name, or an empty dictionary if no command is running.

    If a config file was passed, return only the flags on the command line, because the other values may come from the file.
    """
    context = _context.get(None)
    if context is None:
        return {}
    has_file = context.params.get("config") is not None
    flags = {}
    for option in context.command.params:
        source = context.get_parameter_source(option.name)
        if isinstance(option, typer.core.TyperOption) and (not has_file or source.name == "COMMANDLINE"):
            flags[option.name] = max(option.opts, key=len)
    return flags


def name_flags(error: TurngateError, flags: Mapping[str, str]) -> str:
    """Return an error's message with flags (`--max-turns`) instead of option names (`max_turns`). `flags` maps names to flags.

    A name without an underscore may be an ordinary word, so it is replaced only where it is the subject of the message.
    """
    message = error.message
    if error.param == "tasks" and "tasks" in flags:  # the error is about the value of --tasks, not about a single task
        message = re.sub(r"^tasks?: ", f"{flags['tasks']}: ", message)
    if error.param and error.param in flags:
        message = re.sub(
            rf"^('?){error.param}\1(?= (?:applies|cannot|has|is|must|needs) )", flags[error.param], message
        )
    for name, flag in flags.items():
        if "_" in name:
            message = re.sub(rf"(?<![\w./='\"-]){name}(?![\w/='\"-]|\.\w)", flag, message)
    return message
