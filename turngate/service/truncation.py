"""Truncate the large text fields of results."""

from __future__ import annotations

from turngate.service.config import Clamp


class Truncator:
    """Truncates text fields. `notes` describes everything that is left out of a result."""

    def __init__(self, clamp: Clamp) -> None:
        self.clamp = clamp
        self.notes: list[str] = []

    def cut_middle(self, field: str, text: str, limit: int) -> str:
        """Keep `limit` characters in total from a text's beginning and end, and replace the middle with a marker. 0 means no limit."""
        if not limit or len(text) <= limit:
            return text
        missing = len(text) - limit
        self.notes.append(f"{field}: {missing:,} of {len(text):,} characters left out")
        head, tail = text[: limit // 2], text[len(text) - (limit - limit // 2) :]
        return f"{head}\n[… {missing:,} of {len(text):,} characters left out …]\n{tail}"

    def keep_end(self, field: str, text: str, limit: int) -> str:
        """Return at most `limit` characters from the end of a log. A limit of 0 means no limit."""
        if not limit or len(text) <= limit:
            return text
        self.notes.append(f"{field}: {len(text) - limit:,} of {len(text):,} characters left out")
        return text[-limit:]
