"""Format the results as tables and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gauntlet.costs import LATER_S, NOISE_MB, Cell, Cost, Costs
from gauntlet.feature_report import COLUMN, describe_features, feature_section
from gauntlet.run import Result
from gauntlet.score import Score, sum_scores
from gauntlet.table import DASH, format_table
from gauntlet.trial import Rollout

FEATURES_BEGIN, FEATURES_END = "<!-- features -->", "<!-- /features -->"  # around their section in the page
MARKS = (
    "turns captured",
    "tokens exact",
    "tokens kept",
    "rows (best)",
    "trained twice",
    "side calls trained",
    "lost answers trained",
    "greedy answers trained",
    "errors reported",
    "refusals reported",
    "fork causes right",
)


# ── marks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def table(results: Sequence[Result]) -> str:
    """Format a table with one row per gateway."""
    shapes = _shapes(results)
    head = ["gateway", "records", "dialects", *MARKS]
    head += [f"CPU ms/turn, {shape}" for shape in shapes]
    if shapes:
        head += ["added ms p50 / p99"]
    head += [f"MB/session, {turns} turns" for turns in _turns(results)]
    return format_table(head, [_row(result, results, len(head)) for result in results])


def summary(results: Sequence[Result]) -> str:
    """A few columns for a README: the longest load, everything that was trained but should not have been, and what rows carry."""
    shapes, turns = _shapes(results)[-1:], _turns(results)[-1:]
    head = ["gateway", "dialects", "turns captured", "tokens exact", "turns trained wrongly"]
    head += [f"CPU ms/turn ({shape})" for shape in shapes] or [f"MB/session ({count} turns)" for count in turns]
    head += [COLUMN] if any(result.features for result in results) else []
    rows = []
    for result in results:
        if result.error:
            rows.append([result.gateway, "did not run", *([DASH] * (len(head) - 2))])
            continue
        score, costs = result.score, result.costs or Costs()
        row = [result.gateway, ", ".join(result.dialects), f"{score.captured}/{score.turns}"]
        row += (
            [_share(score.exact, score.trained), str(score.twice + score.side + score.lost + score.greedy)]
            if result.trains
            else [DASH] * 2
        )
        row += [
            _mean([cost.cpu for cost in _successful(costs) if str(cost.cell.shape) == shape]) for shape in shapes
        ] or [f"{costs.session_mb[count]:.2f}" if count in costs.session_mb else DASH for count in turns]
        row += [describe_features(result)] if COLUMN in head else []
        rows.append(row)
    return format_table(head, rows)


def describe_result(result: Result) -> str:
    """Describe the result of one gateway in one line."""
    marks = zip(MARKS, _marks(result, result.score), strict=True)
    return f"{result.gateway}: " + (result.error or "; ".join(f"{name} {mark}" for name, mark in marks))


def describe_records(result: Result) -> str:
    """Describe what a gateway was measured to record: exact tokens, some of them, or only what passes through it."""
    ways = [(dialect, streamed) for dialect in result.dialects for streamed in (False, True)]
    tested = {way: result.exact(*way) for way in ways if result.exact(*way) is not None}
    exact = [way for way, is_exact in tested.items() if is_exact]
    if not tested:
        return DASH
    if len(exact) == len(tested):
        return "exact tokens"
    if not exact:
        return "some tokens" if result.score.trained else "relays only"
    return "exact tokens in " + ", ".join(f"{dialect} {'streamed' if s else 'whole'}" for dialect, s in exact)


def by_dialect(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        for dialect in result.dialects:
            score = sum_scores(rollout.score for rollout in result.rollouts if rollout.dialect == dialect)
            if score.rollouts:
                rows.append([result.gateway, dialect, *_marks(result, score)])
    return format_table(("gateway", "dialect", *MARKS), rows)


def by_scenario(results: Sequence[Result]) -> str:
    """Format the rows of each scenario over all dialects, next to the best possible number, with any other losses."""
    working = [result for result in results if not result.error]
    names = list(dict.fromkeys(rollout.scenario for result in working for rollout in result.rollouts))
    rows = []
    for name in names:
        cells = [name]
        for result in working:
            cells.append(_cell(result, [rollout for rollout in result.rollouts if rollout.scenario == name]))
        rows.append(cells)
    return format_table(("scenario", *(result.gateway for result in working)), rows)


def list_errors(results: Sequence[Result]) -> list[str]:
    """List all errors, one line each."""
    lines = []
    for result in results:
        if result.error:
            lines.append(f"{result.gateway}: did not run: {result.error}")
        for rollout in result.rollouts:
            if rollout.error:
                way = "streamed" if rollout.streamed else "whole"
                where = f"{result.gateway}, {rollout.scenario}, {rollout.dialect}, {way}"
                lines.append(f"{where}: {' '.join(rollout.error.split())[:400]}")
        if result.costs is not None:
            if result.costs.error:
                lines.append(f"{result.gateway}, costs: {result.costs.error}")
            lines += [f"{result.gateway}, {cost.cell}: {cost.error}" for cost in result.costs.cells if cost.error]
    return lines


def _row(result: Result, results: Sequence[Result], size: int) -> list[str]:
    if result.error:
        return [result.gateway, "did not run", *([DASH] * (size - 2))]
    row = [result.gateway, describe_records(result), " ".join(result.dialects), *_marks(result, result.score)]
    costs = result.costs or Costs()
    shapes = _shapes(results)
    for shape in shapes:
        row.append(_mean([cost.cpu for cost in _successful(costs) if str(cost.cell.shape) == shape]))
    if shapes:
        added = [_mean([cost.p50 for cost in _successful(costs)]), _mean([cost.p99 for cost in _successful(costs)])]
        row.append(" / ".join(added) if _successful(costs) else DASH)
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
        str(score.greedy) if trains else DASH,
        f"{score.faults_told}/{score.faults}" if score.faults else DASH,
        f"{score.refused_told}/{score.refused}" if result.reports_refusals and score.refused else DASH,
        f"{score.forks_right}/{score.forks}" if result.names_causes and score.forks else DASH,
    ]


def _cell(result: Result, rollouts: Sequence[Rollout]) -> str:
    score = sum_scores(rollout.score for rollout in rollouts)
    failed = sum(rollout.failed for rollout in rollouts)
    if not score.rollouts:
        return DASH
    text = f"{score.rows}/{score.best_rows}" if result.trains else f"{score.finished}/{score.rollouts} finished"
    if result.trains and score.captured < score.turns:
        text += f", {score.captured}/{score.turns} turns"
    if score.exact < score.trained:
        text += f", {_share(score.exact, score.trained)} exact"
    if score.forks_right < score.forks:
        text += f", {score.forks_right}/{score.forks} causes"
    if score.faults_told < score.faults:
        text += f", {score.faults_told}/{score.faults} errors"
    if result.reports_refusals and score.refused_told < score.refused:
        text += f", {score.refused_told}/{score.refused} refusals"
    for count, what in (
        (score.twice, "twice"),
        (score.side, "side"),
        (score.lost, "lost"),
        (score.greedy, "greedy"),
        (score.unseen, "unseen"),
        (failed, "failed"),
    ):
        if count:
            text += f", {count} {what}"
    return text


# ── costs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def cpu_table(results: Sequence[Result]) -> str:
    """Format the CPU milliseconds per turn of each cell."""
    return _cost_table(results, lambda cost: f"{cost.cpu:.2f}")


def latency_table(results: Sequence[Result]) -> str:
    """Format the added milliseconds of each cell."""
    return _cost_table(results, lambda cost: f"{cost.p50:.1f} / {cost.p99:.1f}")


def memory_table(results: Sequence[Result]) -> str:
    working = [result for result in results if result.costs is not None and result.costs.session_mb]
    rows = [["after startup", *(f"{_costs_of(result).base_mb:.0f}" for result in working)]]
    for turns in _turns(results):
        cells = [_costs_of(result).session(turns) for result in working]
        rows.append([f"a session of {turns} turns", *(DASH if mb is None else f"{mb:.2f}" for mb in cells)])
        cells = [_costs_of(result).later(turns) for result in working]
        rows.append([f"the same, {LATER_S:.0f} s later", *(DASH if mb is None else f"{mb:.2f}" for mb in cells)])
    return format_table(("MB", *(result.gateway for result in working)), rows)


def compare(results: Sequence[Result], ours: str) -> list[str]:
    """Compare one gateway with the cheapest of the others in each cell: of those that record exact tokens, and of those that only relay."""
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
                if (cost := _costs_of(result).cell(cell)) is not None
                and result.exact(cell.dialect, cell.streamed) is exact
            ]
            if mine is None or not theirs:
                continue
            least, name = min(theirs)
            times = least / mine.cpu
            found.append((times, f"{cell}: {ours} {mine.cpu:.2f} ms, {name} {least:.2f} ms, {times:.1f} times"))
        if found:
            lines.append(f"CPU per turn compared with {kind}, worst cell: {min(found)[1]}")
            lines += [f"  {text}" for _, text in found]
    exact_peers = [result for result in _peers(results, ours) if describe_records(result) == "exact tokens"]
    for turns in _turns(results):
        for when, get in (("", Costs.session), (f", {LATER_S:.0f} s later", Costs.later)):
            mb = get(own.costs, turns)
            theirs = sorted(
                (held, peer.gateway) for peer in exact_peers if (held := get(_costs_of(peer), turns)) is not None
            )
            if mb is not None and theirs:
                peers = [f"{name} {held:.2f} MB ({_describe_factor(held, mb)})" for held, name in theirs]
                lines.append(f"memory of a session of {turns} turns{when}: {ours} {mb:.2f} MB, {', '.join(peers)}")
    return lines


def _describe_factor(theirs: float, ours: float) -> str:
    """Describe how much more memory a peer uses, unless both use too little to compare."""
    if max(theirs, ours) < NOISE_MB:
        return "both next to nothing"
    return f"{theirs / ours:.1f} times" if ours >= NOISE_MB else f"ours is below {NOISE_MB} MB"


def _peers(results: Sequence[Result], ours: str) -> list[Result]:
    """List the other gateways, without variants of ours."""
    return [result for result in results if result.gateway.partition("-")[0] != ours and result.costs is not None]


def _costs_of(result: Result) -> Costs:
    return result.costs or Costs()


def _successful(costs: Costs) -> list[Cost]:
    return [cost for cost in costs.cells if not cost.error]


def _cells(results: Sequence[Result]) -> list[Cell]:
    return list(dict.fromkeys(cost.cell for result in results for cost in _costs_of(result).cells))


def _shapes(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(str(cell.shape) for cell in _cells(results)))


def _turns(results: Sequence[Result]) -> list[int]:
    return list(dict.fromkeys(turns for result in results for turns in _costs_of(result).session_mb))


def _cost_table(results: Sequence[Result], show: Any) -> str:
    working = [result for result in results if _costs_of(result).cells]
    rows = []
    for cell in _cells(results):
        found = [_costs_of(result).cell(cell) for result in working]
        rows.append([str(cell), *(DASH if cost is None else show(cost) for cost in found)])
    return format_table(("load", *(result.gateway for result in working)), rows)


# ── full report ──────────────────────────────────────────────────────────────────────────────────────────────────────


def full_report(results: Sequence[Result], ours: str) -> str:
    """Format all tables with their headings."""
    parts = [table(results)]
    if any(result.features for result in results):
        parts += [FEATURES_BEGIN, feature_section(results), FEATURES_END]
    parts += ["### By dialect", by_dialect(results), "### By scenario", by_scenario(results)]
    if _cells(results):
        parts += ["### CPU milliseconds per turn", cpu_table(results)]
        parts += ["### Added milliseconds, p50 / p99", latency_table(results)]
        parts += ["### Memory", memory_table(results)]
    if compared := compare(results, ours):
        parts += [f"### {ours} compared with the cheapest", "```text\n" + "\n".join(compared) + "\n```"]
    return "\n\n".join(parts)


def to_json(results: Sequence[Result], about: dict[str, str], *, rollouts: bool = True) -> str:
    """Encode the results as JSON. Without rollouts, the scores by dialect remain, which is small enough to commit."""
    out = []
    for result in results:
        entry: dict[str, Any] = {
            "gateway": result.gateway,
            "about": result.about,
            "records": describe_records(result),
            "trouble": result.error,
            "ready_s": round(result.ready_s, 2),
            "score": asdict(result.score),
            "parts": [
                {"dialect": dialect, "streamed": streamed, **asdict(result.part(dialect, streamed))}
                for dialect in result.dialects
                for streamed in (False, True)
                if result.part(dialect, streamed).rollouts
            ],
            "base_mb": round(_costs_of(result).base_mb, 1),
            "later_mb": {str(turns): round(mb, 3) for turns, mb in _costs_of(result).later_mb.items()},
            "session_mb": {str(turns): round(mb, 3) for turns, mb in _costs_of(result).session_mb.items()},
            "costs": [_cost_entry(cost) for cost in _costs_of(result).cells],
            "features": features_entry(result),
        }
        if rollouts:
            entry["rollouts"] = [_rollout_entry(rollout) for rollout in result.rollouts]
        out.append(entry)
    return json.dumps({"about": about, "gateways": out}, indent=1, ensure_ascii=False) + "\n"


def features_entry(result: Result) -> dict[str, Any]:
    return {feature: asdict(verdict) for feature, verdict in result.features.items()}


def _rollout_entry(rollout: Rollout) -> dict[str, Any]:
    """Return the fields of a rollout. In the JSON format, errors are named `trouble`."""
    return {"trouble" if name == "error" else name: value for name, value in asdict(rollout).items()}


def _cost_entry(cost: Cost) -> dict[str, Any]:
    cell = cost.cell
    entry: dict[str, Any] = {"dialect": cell.dialect, "streamed": cell.streamed, "load": str(cell.shape)}
    if cost.error:
        return {**entry, "trouble": cost.error}
    repeats = [round(ms, 3) for ms in cost.cpu_ms]
    return {**entry, "cpu_ms": repeats, "added_p50_ms": round(cost.p50, 2), "added_p99_ms": round(cost.p99, 2)}


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f}" if values else DASH


def _share(part: int, whole: int) -> str:
    if not whole:
        return DASH
    share = 100 * part / whole
    return "100 %" if part == whole else f"{min(share, 99.9):.1f} %"
