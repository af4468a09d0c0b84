"""Bounds large fields of what callers get, and notes what that cost."""

from __future__ import annotations

from turngate.service.config import Clamp


class Cut:
    """Bounds fields, and notes what that cost."""

    def __init__(self, clamp: Clamp) -> None:
        self.clamp = clamp
        self.told: list[str] = []

    def middle(self, field: str, text: str, most: int) -> str:
        """The beginning and the end of a text."""
        if not most or len(text) <= most:
            return text
        left = len(text) - most
        self.told.append(f"{field}: {left:,} of {len(text):,} characters left out")
        return f"{text[: most // 2]}\n[… {left:,} characters left out …]\n{text[len(text) - (most - most // 2) :]}"

    def end(self, field: str, text: str, most: int) -> str:
        """The end of a log."""
        if not most or len(text) <= most:
            return text
        self.told.append(f"{field}: {len(text) - most:,} of {len(text):,} characters left out")
        return text[-most:]
