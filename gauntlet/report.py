"""The table, for people and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict

from gauntlet.run import Cost, Result
from gauntlet.score import Score, total

DASH = "–"
HEAD = (
    "gateway",
    "dialects",
    "turns captured",
    "tokens exact",
    "tokens kept",
    "rows (best)",
    "trained twice",
    "side calls trained",
    "lost answers trained",
    "errors told",
    "fork causes right",
    "CPU ms/turn",
    "p50 added ms",
    "MB/session",
)


def table(results: Sequence[Result]) -> str:
    """Markdown."""
    return _markdown(HEAD, [_row(result) for result in results])


def line(result: Result) -> str:
    """One gateway in one line, while the others are still to come."""
    told = zip(HEAD[1:], _row(result)[1:], strict=True)
    return f"{result.gateway}: " + (result.trouble or "; ".join(f"{what} {mark}" for what, mark in told))


def by_dialect(results: Sequence[Result], dialects: Sequence[str]) -> str:
    """Exactness and cost, dialect by dialect."""
    rows = []
    for result in results:
        for dialect in dialects:
            if dialect not in result.dialects or result.trouble:
                continue
            score = total(rollout.score for rollout in result.rollouts if rollout.dialect == dialect)
            costs = [cost for cost in result.costs if cost.dialect == dialect]
            rows.append([result.gateway, dialect, *_marks(result, score), *_costs(costs)])
    return _markdown(("gateway", "dialect", *HEAD[2:-1]), rows)


def by_scenario(results: Sequence[Result]) -> str:
    """Rows of each scenario over all dialects, beside the best; where something else was lost, that too."""
    able = [result for result in results if not result.trouble]
    names = list(dict.fromkeys(rollout.scenario for result in able for rollout in result.rollouts))
    rows = []
    for name in names:
        cells = [name]
        for result in able:
            cells.append(_cell(result, [r.score for r in result.rollouts if r.scenario == name]))
        rows.append(cells)
    return _markdown(("scenario", *(result.gateway for result in able)), rows)


def trouble(results: Sequence[Result]) -> list[str]:
    """What went wrong, one line each."""
    lines = [f"{result.gateway}: {result.trouble}" for result in results if result.trouble]
    for result in results:
        for rollout in result.rollouts:
            if rollout.trouble:
                way = "streamed" if rollout.streamed else "whole"
                where = f"{result.gateway}, {rollout.scenario}, {rollout.dialect}, {way}"
                lines.append(f"{where}: {' '.join(rollout.trouble.split())[:200]}")
    return lines


def as_json(results: Sequence[Result]) -> str:
    return json.dumps([{**asdict(result), "score": asdict(result.score)} for result in results], indent=1)


def _row(result: Result) -> list[str]:
    if result.trouble:
        return [result.gateway, "did not run", *([DASH] * (len(HEAD) - 2))]
    return [
        result.gateway,
        " ".join(result.dialects),
        *_marks(result, result.score),
        *_costs(result.costs),
        _memory(result),
    ]


def _marks(result: Result, score: Score) -> list[str]:
    trains = result.trains
    return [
        f"{score.captured}/{score.turns}" if trains else f"{score.finished}/{score.rollouts} finished",
        _share(score.exact, score.trained) if trains else DASH,
        _share(score.learned, score.wanted) if trains else DASH,
        f"{score.rows} ({score.best_rows})" if trains else DASH,
        str(score.twice) if trains else DASH,
        str(score.side) if trains else DASH,
        str(score.lost) if trains else DASH,
        f"{score.faults_told}/{score.faults}",
        f"{score.forks_right}/{score.forks}" if result.names_causes and score.forks else DASH,
    ]


def _costs(costs: Sequence[Cost]) -> list[str]:
    able = [cost for cost in costs if not cost.trouble]
    if not able:
        return [DASH] * 2
    of: tuple[Callable[[Cost], float], ...] = (lambda cost: cost.cpu_ms, lambda cost: cost.added_ms)
    return [f"{statistics.mean(pick(cost) for cost in able):.1f}" for pick in of]


def _memory(result: Result) -> str:
    return f"{result.session_mb:.2f}" if result.costs else DASH


def _cell(result: Result, scores: Sequence[Score]) -> str:
    score = total(scores)
    if not score.rollouts:
        return DASH
    if not result.trains:
        return f"{score.finished}/{score.rollouts} finished"
    said = f"{score.rows}/{score.best_rows}"
    if score.captured < score.turns:
        said += f", {score.captured}/{score.turns} turns"
    if score.exact < score.trained:
        said += f", {_share(score.exact, score.trained)} exact"
    if score.forks_right < score.forks:
        said += f", {score.forks_right}/{score.forks} causes"
    if score.faults_told < score.faults:
        said += f", {score.faults_told}/{score.faults} errors"
    for count, what in ((score.twice, "twice"), (score.side, "side"), (score.lost, "lost"), (score.unseen, "unseen")):
        if count:
            said += f", {count} {what}"
    return said


def _share(part: int, whole: int) -> str:
    if not whole:
        return DASH
    share = 100 * part / whole
    return "100 %" if part == whole else f"{min(share, 99.9):.1f} %"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
