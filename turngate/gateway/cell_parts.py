"""Divide the engines between projects, and each project's share between the cells that use the same engines.

A cell's *part* of a project's share is proportional to the number of the project's calls in that cell, running and waiting. When a call
ends, only the cell that ran it can use the engine capacity that becomes free. To choose its next call, a cell therefore compares its own
running calls of each project with its part. A cell leaves capacity free only while another cell has a waiting call that would fit within
that other cell's part. All functions here are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

Weight = Callable[[str], float]
_LEAST = 1e-9  # the smallest share, since rounding errors can leave nothing for a project with a tiny weight


class ProjectCalls(msgspec.Struct, frozen=True):
    """How many calls of each project are running, and how many are waiting."""

    running: Mapping[str, int] = {}
    waiting: Mapping[str, int] = {}

    def demand(self, project: str) -> int:
        return self.running.get(project, 0) + self.waiting.get(project, 0)


class OtherCells:
    """The calls of the other cells that use the same engines."""

    def __init__(self, cells: Sequence[ProjectCalls] = ()) -> None:
        self._cells = [cell for cell in cells if cell.running or cell.waiting]
        self._running = 0
        self._demands: dict[str, int] = {}
        for cell in self._cells:
            self._running += sum(cell.running.values())
            _add_demands(cell, self._demands)

    def __bool__(self) -> bool:
        return bool(self._cells)

    def divide(self, own: ProjectCalls, weight: Weight) -> dict[str, float]:
        """Return this cell's part of each project's share, for the projects that have calls here."""
        rates = self._rate(own, weight)
        return {project: rates[project] * own.demand(project) for project in {**own.running, **own.waiting}}

    def limit(self, own: ProjectCalls, weight: Weight) -> dict[str, int]:
        """Return how many calls of each project this cell may run, for the projects that have calls here.

        Return an empty dictionary (no limits) unless another cell has a waiting call that would fit within that other cell's part.
        """
        rates = self._rate(own, weight)
        if not any(self._lacks_calls(cell, rates) for cell in self._cells):
            return {}
        projects = {**own.running, **own.waiting}
        return {project: max(1, round(rates[project] * own.demand(project))) for project in projects}

    def _lacks_calls(self, cell: ProjectCalls, rates: Mapping[str, float]) -> bool:
        """Return whether a cell has a waiting call that would fit within its part."""
        return any(
            cell.running.get(project, 0) + 1 <= rates[project] * cell.demand(project) for project in cell.waiting
        )

    def _rate(self, own: ProjectCalls, weight: Weight) -> dict[str, float]:
        """Return, for each project, the fraction of its calls that may run, counted over all cells."""
        demands = self._demands.copy()
        _add_demands(own, demands)
        total = max(1, self._running + sum(own.running.values()))
        shares = divide_fairly(total, demands, weight)
        return {project: max(share, _LEAST) / demands[project] for project, share in shares.items()}


def _add_demands(cell: ProjectCalls, demands: dict[str, int]) -> None:
    for calls in (cell.running, cell.waiting):
        for project, number in calls.items():
            demands[project] = demands.get(project, 0) + number


def divide_fairly(total: float, demands: Mapping[str, int], weight: Weight) -> dict[str, float]:
    """Divide `total` between the projects by weight. A project gets at most its demand, and the rest is divided between the others."""
    shares: dict[str, float] = {}
    while len(shares) < len(demands):
        unmet = {project: demand for project, demand in demands.items() if project not in shares}
        level = (total - sum(shares.values())) / sum(map(weight, unmet))
        met = {project: float(demand) for project, demand in unmet.items() if demand <= level * weight(project)}
        shares |= met or {project: level * weight(project) for project in unmet}
    return shares
