"""Print to the terminal. Text is not interpreted as markup. It is not sanitized: callers must sanitize text from agents and models."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from turngate.common.safe_text import sanitize, sanitize_line

__all__ = ["CommandConsole", "LiveDisplay", "console", "sanitize", "sanitize_line", "say"]


class CommandConsole(Console):
    """A console that stops its command when the reader of its output exits, as in `turngate run | head -1`.

    `on_closed_output` stops the command and lets it clean up. If it is None, the process exits.
    """

    on_closed_output: Callable[[], object] | None = None

    def on_broken_pipe(self) -> None:
        self.quiet = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.file.fileno())  # so that buffered output causes no error at exit
        os.close(null)
        if self.on_closed_output is None:
            raise SystemExit(1)
        self.on_closed_output()


def console(*, stderr: bool = False) -> CommandConsole:
    return CommandConsole(highlight=False, markup=False, emoji=False, stderr=stderr)


def say(to: Console, text: str | Text, style: str = "") -> None:
    """Print a line without wrapping it, however long it is, so that it can be copied and searched."""
    to.print(text, style=style or None, soft_wrap=True)


class LiveDisplay(ABC):
    """A live progress display on a terminal. If the output is not a terminal, subclasses may print plain lines instead."""

    def __init__(self, to: Console) -> None:
        self._console = to
        self._live: Live | None = None

    @abstractmethod
    def _render(self) -> RenderableType: ...

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # Rendering again at each refresh keeps clocks running.
            self._live = Live(console=self._console, refresh_per_second=4, transient=True, get_renderable=self._render)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
