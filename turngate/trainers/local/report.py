"""Draw the reward curve of a training run, as an SVG image or as lines for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

import msgspec

from turngate.rollout.plot import Bar, Panel, render_lines

_WIDTH, _HEIGHT = 900, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 620, 70, 360
_INK, _SOFT, _LINE, _SECOND = "#1c2430", "#6b7686", "#2f6fde", "#e08a1e"
_ENDS = 3  # steps to compare at each end


class Comparison(msgspec.Struct, frozen=True):
    """The value of a metric, such as the mean reward, at the start and at the end of training."""

    name: str
    before: float
    after: float


def compare_ends(rewards: Sequence[float | None]) -> Comparison | None:
    """Compare the mean reward of the first few steps with that of the last few. Return None if fewer than two rewards are known."""
    known = [reward for reward in rewards if reward is not None]
    ends = min(_ENDS, len(known) // 2)
    if not ends:
        return None
    return Comparison(
        f"reward, first and last {ends} steps" if ends > 1 else "reward, first and last step",
        sum(known[:ends]) / ends,
        sum(known[-ends:]) / ends,
    )


def draw_curve(rewards: Sequence[float | None]) -> list[str]:
    """Draw the reward curve as lines of text, one bar per step. A step with an unknown reward has no bar."""
    bars = tuple(
        Bar(f"step {n}", reward or 0.0, "unknown" if reward is None else f"{reward:.2f}")
        for n, reward in enumerate(rewards, 1)
    )
    return render_lines(Panel("mean reward of each step's rollouts", bars, full=1.0))


def draw_svg(title: str, rewards: Sequence[float | None], compared: Sequence[Comparison], note: str = "") -> str:
    """Draw the reward curve as SVG, with the comparisons next to it. Rewards must be between 0 and 1. Unknown rewards are skipped."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="system-ui, sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT - 30, 30, title, size=16, weight="bold"),
        _text(_LEFT - 30, 50, "mean reward of each step's rollouts", color=_SOFT),
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = _BOTTOM - share * (_BOTTOM - _TOP)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{_RIGHT}" stroke="#e3e7ee"/>')
        parts.append(_text(_LEFT - 8, at + 4, f"{share:g}", size=11, anchor="end", color=_SOFT))
    count = len(rewards)
    places = [
        (n, _LEFT + (_RIGHT - _LEFT) * ((n + 0.5) / count), _BOTTOM - reward * (_BOTTOM - _TOP))
        for n, reward in enumerate(rewards)
        if reward is not None
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for _, x, y in places)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{_LINE}" stroke-width="2.5"/>')
    every = max(1, -(-count // 15))
    for n, x, y in places:
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{_LINE}"/>')
        if n % every == 0 or n == count - 1:
            parts.append(_text(x, _BOTTOM + 18, str(n + 1), size=11, anchor="middle", color=_SOFT))
    parts.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 38, "step", size=11, anchor="middle", color=_SOFT))
    parts += _bars(compared)
    if note:
        parts.append(_text(_LEFT - 30, _HEIGHT - 8, note, size=11, color=_SOFT))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bars(compared: Sequence[Comparison]) -> list[str]:
    x, width, parts = _RIGHT + 40, _WIDTH - _RIGHT - 110, []
    for n, one in enumerate(compared):
        y = _TOP + 90 * n
        parts.append(_text(x, y, one.name, size=12, weight="bold"))
        for row, (label, value, color) in enumerate((("before", one.before, _SECOND), ("after", one.after, _LINE))):
            at = y + 14 + 26 * row
            parts.append(f'<rect x="{x}" y="{at}" width="{max(1.0, value * width):.1f}" height="18" fill="{color}"/>')
            parts.append(_text(x + max(1.0, value * width) + 6, at + 14, f"{value:.2f} {label}", size=11))
    return parts


def _text(
    x: float, y: float, text: str, *, size: int = 13, anchor: str = "start", color: str = _INK, weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
