"""What all commands print with: nothing that others wrote is taken for markup, and nothing of it can command a terminal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

_PICTURES = {
    **{n: chr(0x2400 + n) for n in range(32) if chr(n) not in "\n\t"},
    0x7F: "␡",
    **{n: f"\\x{n:02x}" for n in range(0x80, 0xA0)},
    # Characters that turn the order of others around, so that a line reads as what it is not.
    **{n: f"\\u{n:04x}" for n in (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))},
    **{n: f"\\u{n:04x}" for n in range(0xD800, 0xE000)},  # halves of characters, which no terminal can be sent
}


def safe(text: str) -> str:
    """What others wrote, for a terminal: control characters become pictures of themselves, so that they do nothing."""
    return text.translate(_PICTURES)


def one_line(text: str) -> str:
    """The same, where it may not take more than a line."""
    return safe(text).replace("\n", "␊").replace("\t", " ")


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
