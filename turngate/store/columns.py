"""Values of columns that may be damaged on disk. SQLite stores a value of any type in any column.

Text that is not UTF-8 arrives as bytes (`decode_text`), so it counts as a value of the wrong type, like any other.
"""

from __future__ import annotations


def decode_text(stored: bytes) -> str | bytes:
    """Decode a text column. Text that is not UTF-8 stays bytes: one damaged row must not fail a query over many."""
    try:
        return stored.decode()
    except UnicodeDecodeError:
        return stored


def as_number(value: object) -> float:
    """Return a stored number, or 0.0 if the column is damaged."""
    return value if isinstance(value, int | float) else 0.0


def as_text(value: object) -> str:
    """Return a stored text, or an empty one if the column is damaged."""
    return value if isinstance(value, str) else ""


def as_name(value: object) -> str:
    """Return a stored id. The unreadable bytes of a damaged one are replaced, so that it can still be shown."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def as_blob(value: object) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "replace") if isinstance(value, str) else b""
