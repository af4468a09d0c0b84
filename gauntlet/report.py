"""The tables, for people and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gauntlet.costs import LATER_S, NOISE_MB, Cell, Cost, Costs
from gauntlet.run import Result
from gauntlet.score import Score, total
from gauntlet.trial import Rollout

DASH = "–"
MARKS = (
    "turns captured",
    "tokens exact",
    "tokens kept",
    "rows (best)",
    "trained twice",
    "side calls trained",
    "lost answers trained",
    "errors told",
    "fork causes right",
)


# ── marks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def table(results: Sequence[Result]) -> str:
    """One line for each gateway."""
    shapes = _shapes(results)
    head = ["gateway", "records", "dialects", *MARKS]
    head += [f"CPU ms/turn, {shape}" for shape in shapes]
    if shapes:
        head += ["added ms p50 / p99"]
    head += [f"MB/session, {turns} turns" for turns in _turns(results)]
    return _markdown(head, [_row(result, results, len(head)) for result in results])


def line(result: Result) -> str:
    """One gateway in one line, while the others are still to come."""
    told = zip(MARKS, _marks(result, result.score), strict=True)
    return f"{result.gateway}: " + (result.trouble or "; ".join(f"{what} {mark}" for what, mark in told))


def records(result: Result) -> str:
    """What a gateway records, as measured: exact tokens, or only what passes through it."""
    ways = [(dialect, streamed) for dialect in result.dialects for streamed in (False, True)]
    tried = {way: result.exact(*way) for way in ways if result.exact(*way) is not None}
    exact = [way for way, found in tried.items() if found]
    if not tried:
        return DASH
    if len(exact) == len(tried):
        return "exact tokens"
    if not exact:
        return "relays only"
    return "exact tokens in " + ", ".join(f"{dialect} {'streamed' if s else 'whole'}" for dialect, s in exact)


def by_dialect(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        for dialect in result.dialects:
            score = total(rollout.score for rollout in result.rollouts if rollout.dialect == dialect)
            if score.rollouts:
                rows.append([result.gateway, dialect, *_marks(result, score)])
    return _markdown(("gateway", "dialect", *MARKS), rows)


def by_scenario(results: Sequence[Result]) -> str:
    """Rows of each scenario over all dialects, beside the best; where something else was lost, that too."""
    able = [result for result in results if not result.trouble]
    names = list(dict.fromkeys(rollout.scenario for result in able for rollout in result.rollouts))
    rows = []
    for name in names:
        cells = [name]
        for result in able:
            cells.append(_cell(result, [rollout for rollout in result.rollouts if rollout.scenario == name]))
        rows.append(cells)
    return _markdown(("scenario", *(result.gateway for result in able)), rows)


def trouble(results: Sequence[Result]) -> list[str]:
    """What went wrong, one line each."""
    lines = []
    for result in results:
        if result.trouble:
            lines.append(f"{result.gateway}: did not run: {result.trouble}")
        for rollout in result.rollouts:
            if rollout.trouble:
                way = "streamed" if rollout.streamed else "whole"
                where = f"{result.gateway}, {rollout.scenario}, {rollout.dialect}, {way}"
                lines.append(f"{where}: {' '.join(rollout.trouble.split())[:400]}")
        if result.costs is not None:
            if result.costs.trouble:
                lines.append(f"{result.gateway}, costs: {result.costs.trouble}")
            lines += [f"{result.gateway}, {cost.cell}: {cost.trouble}" for cost in result.costs.cells if cost.trouble]
    return lines


def _row(result: Result, results: Sequence[Result], size: int) -> list[str]:
    if result.trouble:
        return [result.gateway, "did not run", *([DASH] * (size - 2))]
    row = [result.gateway, records(result), " ".join(result.dialects), *_marks(result, result.score)]
    costs = result.costs or Costs()
    shapes = _shapes(results)
    for shape in shapes:
        row.append(_mean([cost.cpu for cost in _good(costs) if str(cost.cell.shape) == shape]))
    if shapes:
        added = [_mean([cost.p50 for cost in _good(costs)]), _mean([cost.p99 for cost in _good(costs)])]
        row.append(" / ".join(added) if _good(costs) else DASH)
    row += [f"{costs.session_mb[turns]:.2f}" if turns in costs.session_mb else DASH for turns in _turns(results)]
    return row


def _marks(result: Result, score: Score) -> list[str]:
    trains = result.trains
    return [
        f"{score.captured}/{score.turns}"
        if score.captured or trains
        else f"{score.finished}/{score.rollouts} finished",
        _share(score.exact, score.trained) if trains else DASH,
        _share(score.learned, score.wanted) if trains else DASH,
        f"{score.rows} ({score.best_rows})" if trains else DASH,
        str(score.twice) if trains else DASH,
        str(score.side) if trains else DASH,
        str(score.lost) if trains else DASH,
        f"{score.faults_told}/{score.faults}" if score.faults else DASH,
        f"{score.forks_right}/{score.forks}" if result.names_causes and score.forks else DASH,
    ]


def _cell(result: Result, rollouts: Sequence[Rollout]) -> str:
    score = total(rollout.score for rollout in rollouts)
    failed = sum(rollout.failed for rollout in rollouts)
    if not score.rollouts:
        return DASH
    said = f"{score.rows}/{score.best_rows}" if result.trains else f"{score.finished}/{score.rollouts} finished"
    if result.trains and score.captured < score.turns:
        said += f", {score.captured}/{score.turns} turns"
    if score.exact < score.trained:
        said += f", {_share(score.exact, score.trained)} exact"
    if score.forks_right < score.forks:
        said += f", {score.forks_right}/{score.forks} causes"
    if score.faults_told < score.faults:
        said += f", {score.faults_told}/{score.faults} errors"
    for count, what in (
        (score.twice, "twice"),
        (score.side, "side"),
        (score.lost, "lost"),
        (score.unseen, "unseen"),
        (failed, "failed"),
    ):
        if count:
            said += f", {count} {what}"
    return said


# ── costs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def cpu(results: Sequence[Result]) -> str:
    """CPU milliseconds per turn, cell by cell."""
    return _costs(results, lambda cost: f"{cost.cpu:.2f}")


def latency(results: Sequence[Result]) -> str:
    """Added milliseconds, cell by cell."""
    return _costs(results, lambda cost: f"{cost.p50:.1f} / {cost.p99:.1f}")


def memory(results: Sequence[Result]) -> str:
    able = [result for result in results if result.costs is not None and result.costs.session_mb]
    rows = [["once it is ready", *(f"{_of(result).base_mb:.0f}" for result in able)]]
    for turns in _turns(results):
        cells = [_of(result).session(turns) for result in able]
        rows.append([f"a session of {turns} turns", *(DASH if mb is None else f"{mb:.2f}" for mb in cells)])
        cells = [_of(result).later(turns) for result in able]
        rows.append([f"the same, {LATER_S:.0f} s later", *(DASH if mb is None else f"{mb:.2f}" for mb in cells)])
    return _markdown(("MB", *(result.gateway for result in able)), rows)


def compare(results: Sequence[Result], ours: str) -> list[str]:
    """One gateway beside the cheapest of the others, in each cell: of those that record exact tokens, and of those that only relay."""
    own = next((result for result in results if result.gateway == ours), None)
    if own is None or own.costs is None:
        return []
    lines = []
    for exact, kind in (
        (True, "the cheapest peer that records exact tokens"),
        (False, "the cheapest that only relays"),
    ):
        found: list[tuple[float, str]] = []
        for cell in _cells(results):
            mine = own.costs.cell(cell)
            theirs = [
                (cost.cpu, result.gateway)
                for result in _peers(results, ours)
                if (cost := _of(result).cell(cell)) is not None and result.exact(cell.dialect, cell.streamed) is exact
            ]
            if mine is None or not theirs:
                continue
            least, name = min(theirs)
            times = least / mine.cpu
            found.append((times, f"{cell}: {ours} {mine.cpu:.2f} ms, {name} {least:.2f} ms, {times:.1f} times"))
        if found:
            lines.append(f"CPU per turn beside {kind}, worst cell: {min(found)[1]}")
            lines += [f"  {told}" for _, told in found]
    exact_peers = [result for result in _peers(results, ours) if records(result) == "exact tokens"]
    for turns in _turns(results):
        for when, of in (("", Costs.session), (f", {LATER_S:.0f} s later", Costs.later)):
            mb = of(own.costs, turns)
            theirs = sorted((held, peer.gateway) for peer in exact_peers if (held := of(_of(peer), turns)) is not None)
            if mb is not None and theirs:
                told = [f"{name} {held:.2f} MB ({_times(held, mb)})" for held, name in theirs]
                lines.append(f"memory of a session of {turns} turns{when}: {ours} {mb:.2f} MB, {', '.join(told)}")
    return lines


def _times(theirs: float, ours: float) -> str:
    """How much more; nothing where both are too little to tell."""
    if max(theirs, ours) < NOISE_MB:
        return "both next to nothing"
    return f"{theirs / ours:.1f} times" if ours >= NOISE_MB else f"ours is below {NOISE_MB} MB"


def _peers(results: Sequence[Result], ours: str) -> list[Result]:
    """Other gateways; not another way to run the same one."""
    return [result for result in results if result.gateway.partition("-")[0] != ours and result.costs is not None]


def _of(result: Result) -> Costs:
    return result.costs or Costs()


def _good(costs: Costs) -> list[Cost]:
    return [cost for cost in costs.cells if not cost.trouble]


def _cells(results: Sequence[Result]) -> list[Cell]:
    return list(dict.fromkeys(cost.cell for result in results for cost in _of(result).cells))


def _shapes(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(str(cell.shape) for cell in _cells(results)))


def _turns(results: Sequence[Result]) -> list[int]:
    return list(dict.fromkeys(turns for result in results for turns in _of(result).session_mb))


def _costs(results: Sequence[Result], show: Any) -> str:
    able = [result for result in results if _of(result).cells]
    rows = []
    for cell in _cells(results):
        found = [_of(result).cell(cell) for result in able]
        rows.append([str(cell), *(DASH if cost is None else show(cost) for cost in found)])
    return _markdown(("load", *(result.gateway for result in able)), rows)


# ── all of it ───────────────────────────────────────────────────────────────────────────────────────────────────────


def everything(results: Sequence[Result], ours: str) -> str:
    """Every table under its heading."""
    parts = [table(results), "### By dialect", by_dialect(results), "### By scenario", by_scenario(results)]
    if _cells(results):
        parts += ["### CPU milliseconds per turn", cpu(results)]
        parts += ["### Added milliseconds, p50 / p99", latency(results)]
        parts += ["### Memory", memory(results)]
    if compared := compare(results, ours):
        parts += [f"### {ours} beside the cheapest", "```\n" + "\n".join(compared) + "\n```"]
    return "\n\n".join(parts)


def as_json(results: Sequence[Result], about: dict[str, str], *, rollouts: bool = True) -> str:
    """For machines. Without rollouts, it has each gateway's score by dialect and way, which is small enough to be kept."""
    out = []
    for result in results:
        entry: dict[str, Any] = {
            "gateway": result.gateway,
            "about": result.about,
            "records": records(result),
            "trouble": result.trouble,
            "ready_s": round(result.ready_s, 2),
            "score": asdict(result.score),
            "parts": [
                {"dialect": dialect, "streamed": streamed, **asdict(result.part(dialect, streamed))}
                for dialect in result.dialects
                for streamed in (False, True)
                if result.part(dialect, streamed).rollouts
            ],
            "base_mb": round(_of(result).base_mb, 1),
            "later_mb": {str(turns): round(mb, 3) for turns, mb in _of(result).later_mb.items()},
            "session_mb": {str(turns): round(mb, 3) for turns, mb in _of(result).session_mb.items()},
            "costs": [_cost(cost) for cost in _of(result).cells],
        }
        if rollouts:
            entry["rollouts"] = [asdict(rollout) for rollout in result.rollouts]
        out.append(entry)
    return json.dumps({"about": about, "gateways": out}, indent=1, ensure_ascii=False) + "\n"


def _cost(cost: Cost) -> dict[str, Any]:
    cell = cost.cell
    told: dict[str, Any] = {"dialect": cell.dialect, "streamed": cell.streamed, "load": str(cell.shape)}
    if cost.trouble:
        return {**told, "trouble": cost.trouble}
    repeats = [round(ms, 3) for ms in cost.cpu_ms]
    return {**told, "cpu_ms": repeats, "added_p50_ms": round(cost.p50, 2), "added_p99_ms": round(cost.p99, 2)}


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f}" if values else DASH


def _share(part: int, whole: int) -> str:
    if not whole:
        return DASH
    share = 100 * part / whole
    return "100 %" if part == whole else f"{min(share, 99.9):.1f} %"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
