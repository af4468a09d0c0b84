"""Draw how many machines each shared resource can serve, as an SVG image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from xml.sax.saxutils import escape

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 900, 280, 860, 84, 34
_INK, _SOFT, _BAR, _FIRST = "#1c2430", "#6b7686", "#2f6fde", "#e08a1e"
_MOST = 100_000


def draw_limits(limits: Mapping[str, float], note: str) -> str:
    """Draw one bar per resource, the smallest first, on a logarithmic scale from 1 to 100,000 machines."""
    ordered = sorted(limits.items(), key=lambda item: item[1])
    bottom = _TOP + _ROW * len(ordered)
    height = bottom + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="system-ui, sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(24, 30, "How many machines each shared resource can serve", size=16, weight="bold"),
        _text(24, 52, "machines at which it is full; the smallest number is the limit", color=_SOFT),
    ]
    for power in range(6):
        x = _place(10**power)
        parts.append(f'<path d="M{x:.1f} {_TOP - 8}V{bottom}" stroke="#e3e7ee"/>')
        parts.append(_text(x, bottom + 18, f"{10**power:,}", size=11, anchor="middle", color=_SOFT))
    for row, (name, machines) in enumerate(ordered):
        y, end = _TOP + _ROW * row, _place(machines)
        color = _BAR if row else _FIRST
        parts.append(_text(_LEFT - 12, y + 17, name, anchor="end"))
        parts.append(f'<rect x="{_LEFT}" y="{y + 3}" width="{max(1.0, end - _LEFT):.1f}" height="20" fill="{color}"/>')
        label = f"{machines:,.0f}" if machines < _MOST else "more than 100,000"
        inside = end > _RIGHT - 120
        parts.append(
            _text(
                end - 6 if inside else end + 6,
                y + 17,
                label,
                size=12,
                anchor="end" if inside else "start",
                color="#ffffff" if inside else _INK,
            )
        )
    parts.append(_text(24, height - 12, note, size=11, color=_SOFT))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _place(machines: float) -> float:
    share = math.log10(min(max(machines, 1.0), _MOST)) / math.log10(_MOST)
    return _LEFT + share * (_RIGHT - _LEFT)


def _text(
    x: float, y: float, text: str, *, size: int = 13, anchor: str = "start", color: str = _INK, weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
