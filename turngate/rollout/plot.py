"""Plots of a batch: rewards, pass@k, turns, tokens and time per stage, as terminal bars and as an SVG file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

import msgspec

from turngate.rollout.ledger import FinishedRollout
from turngate.rollout.summary import PHASES, Summary

_WIDTH, _HEIGHT = 900, 640
_PANEL_W, _PANEL_H = 430, 290
_PHASE_COLORS = {"start": "#8a94a6", "run": "#2f6fde", "grade": "#e08a1e"}
_INK, _MUTED, _BAR, _SECOND = "#1c2430", "#6b7686", "#2f6fde", "#e08a1e"
_BLOCKS = "▏▎▍▌▋▊▉█"
_BINS = 12


class Bar(msgspec.Struct, frozen=True):
    label: str
    value: float
    text: str
    color: str = _BAR


class Panel(msgspec.Struct, frozen=True):
    title: str
    bars: tuple[Bar, ...]
    note: str = ""  # shown below the title
    full: float | None = None  # value of a full-length bar; None: the largest value


def build_panels(summary: Summary, finished: Iterable[FinishedRollout]) -> tuple[Panel, ...]:
    """Build the panels of a batch: rewards, pass@k, turns, tokens, and time per stage."""
    ran = [rollout for rollout in finished if "agent" in rollout.seconds]
    return (
        _build_rewards(summary),
        _build_pass_at(summary),
        _build_histogram("turns per rollout", [rollout.turns for rollout in ran], _BAR),
        _build_histogram("sampled tokens per rollout", [rollout.sampled_tokens for rollout in ran], _SECOND),
        _build_stages(summary),
    )


def _build_rewards(summary: Summary) -> Panel:
    unknown = summary.overall.finished - summary.overall.graded
    note = f"not shown: {unknown} without a reward" if unknown else ""
    bars = (
        Bar(f"{b.low:.2g} to {b.high:.2g}", b.count, str(b.count), _BAR if b.count else _MUTED)
        for b in summary.histogram
    )
    return Panel("rewards", tuple(bars), note)


def _build_pass_at(summary: Summary) -> Panel:
    tasks = len(summary.tasks)
    fewer = [p.k for p in summary.overall.pass_at if p.tasks < tasks]
    note = f"for k ≥ {fewer[0]}, not all {tasks} tasks are included" if fewer else ""
    bars = tuple(Bar(f"k = {p.k}", p.estimate, f"{p.estimate:.1%}") for p in summary.overall.pass_at)
    return Panel("pass@k", bars, note, full=1.0)


def _build_histogram(title: str, values: Sequence[int], color: str) -> Panel:
    if not values:
        return Panel(title, ())
    low, high = min(values), max(values)
    width = max(1, -(-(high - low + 1) // _BINS))
    counts = [0] * ((high - low) // width + 1)
    for value in values:
        counts[(value - low) // width] += 1
    bars = []
    for n, count in enumerate(counts):
        first, last = low + n * width, low + (n + 1) * width - 1
        bars.append(Bar(f"{first:,}" if first == last else f"{first:,} to {last:,}", count, str(count), color))
    return Panel(title, tuple(bars))


def _build_stages(summary: Summary) -> Panel:
    seconds = summary.overall.stages
    bars = tuple(Bar(stage, s, f"{s:.2f} s", _PHASE_COLORS[PHASES[stage]]) for stage, s in seconds.items())
    return Panel("mean seconds per stage", bars)


# ── for a terminal ──────────────────────────────────────────────────────────────────────────────────────────────────


def render_lines(panel: Panel, width: int = 40) -> list[str]:
    """Draw a panel for a terminal: its title, and one line for each bar, with a resolution of an eighth of a character."""
    if not panel.bars:
        return [f"{panel.title}: no data"]
    label = max(len(bar.label) for bar in panel.bars)
    largest = panel.full or max(bar.value for bar in panel.bars) or 1.0
    head = panel.title + (f"  ({panel.note})" if panel.note else "")
    return [head, *(f"  {b.label:>{label}}  {_render_bar(b.value / largest, width)} {b.text}" for b in panel.bars)]


def _render_bar(share: float, width: int) -> str:
    eighths = round(share * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_BLOCKS[rest - 1] if rest else "")


# ── as a file ───────────────────────────────────────────────────────────────────────────────────────────────────────


def render_svg(summary: Summary, finished: Iterable[FinishedRollout]) -> str:
    """Draw all panels into one SVG image. Labels are text elements, so they can be searched. Names are escaped."""
    rewards, passes, turns, tokens, stages = build_panels(summary, finished)
    overall = summary.overall
    mean = "no rewards" if overall.mean_reward is None else f"mean reward {overall.mean_reward:.3f}"
    title = f"batch {summary.batch}: {overall.finished} of {overall.wanted} rollouts, {overall.graded} graded, {mean}"
    body = [
        _render_text(20, 30, title, size=16, weight="bold"),
        _render_bars(rewards, 20, 50, _PANEL_W, _PANEL_H),
        _render_curve(passes, 460, 50, _PANEL_W, _PANEL_H),
        _render_bars(turns, 20, 350, _PANEL_W // 2 - 5, _PANEL_H - 20),
        _render_bars(tokens, 20 + _PANEL_W // 2 + 5, 350, _PANEL_W // 2 - 5, _PANEL_H - 20),
        _render_bars(stages, 460, 350, _PANEL_W, _PANEL_H - 20),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _render_bars(panel: Panel, x: float, y: float, width: float, height: float) -> str:
    parts = [_render_text(x, y + 14, panel.title, weight="bold")]
    if panel.note or not panel.bars:
        parts.append(_render_text(x, y + 30, panel.note or "no data", color=_MUTED, size=11))
    if not panel.bars:
        return "\n".join(parts)
    top = y + 40
    step = min(24.0, (height - 40) / len(panel.bars))
    longest = max(len(bar.label) for bar in panel.bars)
    left = x + min(width * 0.45, longest * 6.2 + 8)
    room = x + width - left - 50
    largest = max(bar.value for bar in panel.bars) or 1.0
    for n, bar in enumerate(panel.bars):
        y_bar = top + n * step
        length = max(0.0, room * bar.value / largest)
        parts.append(_render_text(left - 6, y_bar + step * 0.7, bar.label, size=10, anchor="end", color=_MUTED))
        parts.append(
            f'<rect x="{left:.1f}" y="{y_bar + 1:.1f}" width="{length:.1f}" height="{step - 3:.1f}" fill="{bar.color}"/>'
        )
        parts.append(_render_text(left + length + 5, y_bar + step * 0.7, bar.text, size=10))
    return "\n".join(parts)


def _render_curve(panel: Panel, x: float, y: float, width: float, height: float) -> str:
    """Return the SVG elements of a line plot of values between 0 and 1, with k on the horizontal axis."""
    parts = [_render_text(x, y + 14, panel.title, weight="bold")]
    if panel.note or not panel.bars:
        parts.append(_render_text(x, y + 30, panel.note or "no data", color=_MUTED, size=11))
    if not panel.bars:
        return "\n".join(parts)
    left, top, right, bottom = x + 40, y + 44, x + width - 20, y + height - 24
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = bottom - share * (bottom - top)
        parts.append(f'<path d="M{left:.1f} {at:.1f}H{right:.1f}" stroke="#e3e7ee"/>')
        parts.append(_render_text(left - 6, at + 4, f"{share:.0%}", size=10, anchor="end", color=_MUTED))
    count = len(panel.bars)
    points = [
        (left + (right - left) * (n / (count - 1) if count > 1 else 0.5), bottom - bar.value * (bottom - top))
        for n, bar in enumerate(panel.bars)
    ]
    line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{_BAR}" stroke-width="2"/>')
    every = max(1, -(-count // 12))
    for n, ((px, py), bar) in enumerate(zip(points, panel.bars, strict=True)):
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{_BAR}"/>')
        if n % every == 0 or n == count - 1:
            parts.append(_render_text(px, bottom + 16, bar.label, size=10, anchor="middle", color=_MUTED))
            parts.append(_render_text(px, py - 8, bar.text, size=10, anchor="middle"))
    return "\n".join(parts)


def _render_text(
    x: float, y: float, text: str, *, size: int = 13, anchor: str = "start", color: str = _INK, weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
