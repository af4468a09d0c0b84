"""Make untrusted text safe to print. Agents, models and tests may output any characters."""

from __future__ import annotations

_REPLACEMENTS = {
    **{n: chr(0x2400 + n) for n in range(32) if chr(n) not in "\n\t"},
    0x7F: "␡",
    **{n: f"\\x{n:02x}" for n in range(0x80, 0xA0)},
    # Characters that change the direction of the surrounding text or break the line, which can disguise its content.
    **{n: f"\\u{n:04x}" for n in (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))},
    **{n: f"\\u{n:04x}" for n in range(0xD800, 0xE000)},  # lone surrogates, which cannot be encoded
}


def sanitize(text: str) -> str:
    """Replace control characters, direction marks, line separators and lone surrogates with visible text. Keep newlines and tabs."""
    return text.translate(_REPLACEMENTS)


def sanitize_line(text: str) -> str:
    """Sanitize text, and also replace newlines and tabs, so that the text stays on one line."""
    return sanitize(text).replace("\n", "␊").replace("\t", " ")


def make_encodable(text: str) -> str:
    """Escape lone surrogates so that the text can be encoded as UTF-8.

    Lone surrogates come from file names with invalid bytes, and from JSON with unpaired surrogate escapes.
    """
    return text.encode("utf-8", "backslashreplace").decode()
