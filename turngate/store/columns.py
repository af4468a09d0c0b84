"""Read columns that may be damaged on disk. SQLite stores a value of any type in any column.

`decode_text` returns text that is not UTF-8 as bytes, so that `as_text` and `as_name` recognize it as damaged.
"""

from __future__ import annotations

MAX_INTEGER = 2**63 - 1  # the largest integer that the store can hold


def decode_text(stored: bytes) -> str | bytes:
    """Decode a text column. Text that is not UTF-8 is returned as bytes, so that a damaged row does not make a query fail."""
    try:
        return stored.decode()
    except UnicodeDecodeError:
        return stored


def as_number(value: object) -> float:
    """Return a stored number, or 0.0 if the value is damaged."""
    return value if isinstance(value, int | float) else 0.0


def as_text(value: object) -> str:
    """Return stored text, or an empty string if the value is damaged."""
    return value if isinstance(value, str) else ""


def as_name(value: object) -> str:
    """Return a stored id. In a damaged id, unreadable bytes are replaced, so that the id can still be shown."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def as_blob(value: object) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "replace") if isinstance(value, str) else b""
