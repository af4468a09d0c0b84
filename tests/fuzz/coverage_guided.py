"""A small coverage-guided fuzzer: mutate inputs that reached new lines of the package, and keep those that reach more.

Atheris does not have wheels for all platforms, and building it needs a clang with libFuzzer. The code under test is plain Python, so line
events are enough as feedback.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
MAX_BYTES = 4_000  # of a mutated input
_TOKENS = [
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"[]",
    b"{}",
    b'""',
    b'"',
    b"\\",
    b"\\u0000",
    b"\\ud800",
    b"\xff",
    b"[" * 40,
    b"\0",
]


class CoverageGuidedFuzzer:
    """Fuzz one function of bytes. `covers` is the folder whose lines count."""

    def __init__(self, check: Callable[[bytes], None], seeds: Iterable[bytes], covers: str, seed: int) -> None:
        self._check = check
        self._folder = str(ROOT / covers)
        self._draw = random.Random(seed)
        self._lines: set[tuple[str, int, int]] = set()
        self._tokens = list(_TOKENS)
        self.corpus: list[bytes] = []
        self.runs = 0
        for raw in seeds:
            self._tokens += [part for part in raw.replace(b":", b",").split(b",") if 2 < len(part) < 40][:40]
            self._try(raw)

    @property
    def coverage(self) -> int:
        """The number of steps from one line to another that were seen."""
        return len(self._lines)

    def run(self, seconds: float) -> None:
        """Fuzz for some time. Raise the first exception that the check raises, with the input as a note."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._try(self._mutate(self._draw.choice(self.corpus)))

    def run_times(self, runs: int) -> None:
        for _ in range(runs):
            self._try(self._mutate(self._draw.choice(self.corpus)))

    def _try(self, raw: bytes) -> None:
        self.runs += 1
        seen: set[tuple[str, int, int]] = set()
        try:
            sys.settrace(self._trace(seen))
            try:
                self._check(raw)
            finally:
                sys.settrace(None)
        except Exception as error:
            error.add_note(f"input: {raw!r}")
            raise
        if not seen <= self._lines or not self.corpus:
            self._lines |= seen
            self.corpus.append(raw)

    def _trace(self, seen: set[tuple[str, int, int]]) -> Any:
        folder = self._folder

        def enter(frame: FrameType, event: str, _: object) -> Any:
            name = frame.f_code.co_filename
            if not name.startswith(folder):
                return None
            last = frame.f_code.co_firstlineno

            def line(frame: FrameType, event: str, _: object) -> Any:
                nonlocal last
                if event == "line":
                    seen.add((name, last, frame.f_lineno))
                    last = frame.f_lineno
                return line

            return line

        return enter

    def _mutate(self, raw: bytes) -> bytes:
        data = bytearray(raw)
        for _ in range(self._draw.choice((1, 1, 2, 4))):
            at = self._draw.randrange(len(data) + 1)
            match self._draw.randrange(6):
                case 0:
                    data[at:at] = self._draw.choice(self._tokens)
                case 1:
                    del data[at : at + self._draw.choice((1, 2, 8, 40))]
                case 2 if data:
                    data[at % len(data)] = self._draw.randrange(256)
                case 3:
                    end = min(len(data), at + self._draw.choice((4, 16, 60)))
                    data[at:at] = data[at:end]
                case 4:
                    other = self._draw.choice(self.corpus)
                    start = self._draw.randrange(len(other) + 1)
                    data[at:at] = other[start : start + self._draw.choice((8, 40, 200))]
                case _:
                    size = self._draw.choice((1, 4, 12))
                    data[at : at + size] = self._draw.choice(self._tokens)
        return bytes(data[:MAX_BYTES])
