"""Read the code blocks of the documentation, and split shell blocks into commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command of a shell block. It may span several lines."""

    block: Block
    text: str


def read_blocks(page: str) -> list[Block]:
    """Read the blocks of a page, including indented ones."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[2], re.sub(f"^{found[1]}", "", found[3], flags=re.M))
        for found in _FENCE.finditer(text)
    ]


def read_prose(page: str) -> str:
    """Read the page without its blocks and its inline code."""
    text = _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return re.sub(r"`[^`\n]+`", "", text)


def split_commands(block: Block) -> Iterator[Command]:
    """Yield the commands of a shell block, without blank lines and comments."""
    pending = ""
    for line in block.text.splitlines():
        pending += line
        if line.endswith("\\"):
            pending += "\n"
            continue
        try:
            is_empty = not shlex.split(pending, comments=True)
        except ValueError:  # an open quote
            pending += "\n"
            continue
        if not is_empty:
            yield Command(block, pending)
        pending = ""
    if pending:
        raise ValueError(f"{block.place}: a quote is not closed")
