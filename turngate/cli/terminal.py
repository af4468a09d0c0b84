"""What all commands print with: nothing that others wrote is taken for markup, and nothing of it can command a terminal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from turngate.common.safe_text import sanitize, sanitize_line

__all__ = ["Showing", "console", "sanitize", "sanitize_line", "say"]


def console(*, stderr: bool = False) -> Console:
    return Console(highlight=False, markup=False, emoji=False, stderr=stderr)


def say(to: Console, text: str | Text, style: str = "") -> None:
    """Print what may be longer than a line: never broken up by us, so that it can be copied and searched."""
    to.print(text, style=style or None, soft_wrap=True)


class Showing(ABC):
    """Live progress: a picture that changes, on a terminal; elsewhere whoever shows it says plain lines."""

    def __init__(self, to: Console) -> None:
        self._console = to
        self._live: Live | None = None

    @abstractmethod
    def _picture(self) -> RenderableType: ...

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # Asked for again at each refresh, so that clocks go on.
            self._live = Live(console=self._console, refresh_per_second=4, transient=True, get_renderable=self._picture)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
