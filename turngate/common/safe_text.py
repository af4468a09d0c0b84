"""What others wrote, made harmless to look at: agents, models and tests may have put anything into it.

For terminals (`cli/`) and for pages of notebooks (`notebook.py`); pure functions of text.
"""

from __future__ import annotations

_PICTURES = {
    **{n: chr(0x2400 + n) for n in range(32) if chr(n) not in "\n\t"},
    0x7F: "␡",
    **{n: f"\\x{n:02x}" for n in range(0x80, 0xA0)},
    # Characters that turn the order of others around, so that a line reads as what it is not.
    **{n: f"\\u{n:04x}" for n in (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))},
    **{n: f"\\u{n:04x}" for n in range(0xD800, 0xE000)},  # halves of characters, which no terminal can be sent
}


def safe(text: str) -> str:
    """Control characters become pictures of themselves, so that they do nothing."""
    return text.translate(_PICTURES)


def one_line(text: str) -> str:
    """The same, where it may not take more than a line."""
    return safe(text).replace("\n", "␊").replace("\t", " ")
