"""The calls of many cells, counted by project, so that fair shares hold for all cells that use the same engines.

Each process of a cell sends its counts with its reports to the shared fence (`shared_fence.py`), and then reads the counts of the other
processes. No call waits for this. Counts expire after two fifths of the lease, which is twice the time between regular reports. No counts
are sent while calls are held at the fence (as they are after the lease has lapsed), while no engine accepts calls, or as long as there has
never been more than one project. A process that cannot reach the shared store uses only its own counts.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Iterable, Sequence
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from turngate.common.addresses import is_loopback
from turngate.engines.pool import Pool
from turngate.gateway.cell_parts import OtherCells, ProjectCalls
from turngate.gateway.fair_shares import FairShares
from turngate.gateway.fence import Fence

log = logging.getLogger("turngate")
REPORT_S = 1.0  # between reports while calls wait for their share
_CELLS_PER_S = 100  # with many cells, reports are less frequent, since each of them reads the counts of all cells


_Calls = dict[str, Annotated[int, msgspec.Meta(gt=0, le=10**9)]]  # by project


class ReportedCalls(msgspec.Struct, frozen=True):
    """The calls of one process of a cell, and the engines that it uses."""

    engines: str  # from `identify_engines`
    running: _Calls
    waiting: _Calls


def identify_engines(addresses: Iterable[str], host: str) -> str:
    """Return a short id of a set of engines. A loopback address means a different engine on each `host`."""
    named = (f"{host} {address}" if is_loopback(urlsplit(address).hostname) else address for address in addresses)
    return hashlib.sha256("\n".join(sorted(named)).encode()).hexdigest()[:16]


class SharedCalls:
    """Reports the calls of one process of a cell, and uses the reports of the other processes, in this cell and in others."""

    def __init__(self, shares: FairShares, pool: Pool, fence: Fence) -> None:
        self._shares = shares
        self._pool = pool
        self._fence = fence
        self._host = socket.gethostname()
        self._cells = 0
        self._has_warned = False

    @property
    def _engines(self) -> str:
        return identify_engines((replica.address for replica in self._pool.replicas), self._host)

    def encode(self) -> str:
        """Return this process's report as JSON, or an empty string if it must not be sent now (see the module's docstring)."""
        if not (self._shares.is_active and self._fence.admits and self._pool.accepts_calls):
            return ""
        calls = self._shares.queue.count()
        report = ReportedCalls(self._engines, dict(calls.running), dict(calls.waiting))
        return msgspec.json.encode(report).decode()

    def update(self, reports: Sequence[str], fresh_s: float) -> None:
        """Use the reports of the other processes for the next `fresh_s` seconds."""
        self._cells = len(reports)
        engines = self._engines
        decoded = [report for text in reports if (report := self._decode(text)) is not None]
        cells = [ProjectCalls(report.running, report.waiting) for report in decoded if report.engines == engines]
        self._shares.count_others(OtherCells(cells), fresh_s)

    def _decode(self, report: str) -> ReportedCalls | None:
        try:
            return msgspec.json.decode(report, type=ReportedCalls)
        except msgspec.MsgspecError as error:
            if not self._has_warned:
                log.warning(
                    "cannot read how many calls another process reports: %s; its calls are not counted when the engines are shared "
                    "between projects; run the same version of Turngate in all cells",
                    error,
                )
            self._has_warned = True
            return None

    @property
    def longest_pause_s(self) -> float:
        """An upper limit on the time until the next report, in seconds.

        It is infinite unless calls are waiting, or calls are running and the engines are saturated.
        """
        return max(REPORT_S, self._cells / _CELLS_PER_S) if self._shares.is_contended else float("inf")
