"""Turn a command's error into a message and an exit code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import typer

from turngate.cli.command import list_flags, name_flags
from turngate.errors import TurngateError

T = TypeVar("T")


def or_exit(action: Callable[[], T]) -> T:
    """Run an action and return its result. On a TurngateError, print its message and exit with code 2. On Ctrl-C, exit with code 130."""
    try:
        return action()
    except TurngateError as error:
        typer.echo(f"turngate: {name_flags(error, list_flags())}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("turngate: stopped", err=True)
        raise typer.Exit(130) from None
