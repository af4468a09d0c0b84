"""Project quotas: each process takes a part of a quota from the store, a thread takes more in time, and measures the stored bytes.

A model call only compares the number of tokens sampled so far with this process's part, in memory. The call waits only if the part is used
up before the thread has taken more. Calls in flight always finish, so a project can exceed its quota by the tokens of these calls.

The thread takes more when the part is nearly used up. The quota of stored bytes is not divided into parts.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable
from math import inf

from turngate.errors import QuotaExceeded, TurngateError
from turngate.store.projects import Quotas
from turngate.store.quotas import QuotaTable
from turngate.telemetry.metrics import Metrics

log = logging.getLogger("turngate")
DAY_S = 86400
PARTS = 20  # a quota is taken in this many parts
REFRESH_S = 1.0  # between checks of the parts
HOLD_S = 60.0  # how long a process that has died still holds its part of the live sessions
_MEASURE_S = 5.0  # between measurements of what a project stores
_WAIT_S = 3.0  # how long a call waits for a part before it is refused


class ProjectQuota:
    """How much a project may use in this process. Without quotas, there is no limit."""

    def __init__(
        self,
        project: str,
        metrics: Metrics,
        count_sessions: Callable[[], int],
        count_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`count_sessions` counts the project's live sessions in this process, and `count_bytes` measures the project's own store."""
        self.project = project
        self.metrics = metrics
        self.count_sessions = count_sessions
        self.count_bytes = count_bytes
        self.stored_bytes = 0  # as last measured; only if there is a quota
        self.limits = Quotas()
        self.max_tokens = inf  # the value of `metrics.sampled_tokens` at which the part is used up
        self.max_sessions = inf
        self.store_error = ""  # why the store did not answer the last request; empty: it answered
        self.need = threading.Event()  # set if a call is waiting for a part
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def has_tokens(self) -> bool:
        return self.max_tokens == inf or self.metrics.sampled_tokens < self.max_tokens

    async def require_tokens(self) -> None:
        """Wait for more tokens if this process has used up its part of the quota. Raise `QuotaExceeded` if it cannot get more."""
        if not self.has_tokens and not await self._wait(lambda: self.has_tokens):
            self._require_answer()
            raise QuotaExceeded(
                f"project {self.project!r} has used its quota of {self.limits.tokens_per_day:,} sampled tokens for today "
                "(tokens_per_day); wait until midnight UTC, or ask the operator to raise the quota: "
                f"`turngate projects change {self.project} --tokens-per-day N`"
            )

    async def require_session(self) -> None:
        """Raise `QuotaExceeded` if this process may not open another session of the project.

        Wait briefly first, because this process may get a larger part of the quota.
        """
        if self._has_room() or await self._wait(self._has_room):
            return
        if self._is_full:
            raise QuotaExceeded(
                f"project {self.project!r} stores {self.stored_bytes:,} bytes and has used up its quota of "
                f"{self.limits.stored_bytes:,} (stored_bytes); delete old sessions, or ask the operator to prune them "
                f"(`turngate prune`) or to raise the quota (`turngate projects change {self.project} --stored-bytes N`)"
            )
        self._require_answer()
        plural = "" if self.limits.live_sessions == 1 else "s"
        raise QuotaExceeded(
            f"project {self.project!r} has reached its quota of {self.limits.live_sessions:,} live session{plural} "
            "(live_sessions); seal or cancel a session, or ask the operator to raise the quota: "
            f"`turngate projects change {self.project} --live-sessions N`"
        )

    def _require_answer(self) -> None:
        """Raise `QuotaExceeded` with the store's error if the store did not answer: the project may still have quota left."""
        if self.store_error:
            raise QuotaExceeded(
                f"this gateway has used up its share of the quota for project {self.project!r} and cannot get more ({self.store_error}); "
                "retry in a moment"
            )

    @property
    def _is_full(self) -> bool:
        limit = self.limits.stored_bytes
        return limit is not None and self.stored_bytes >= limit

    def _has_room(self) -> bool:
        return not self._is_full and (self.max_sessions == inf or self.count_sessions() < self.max_sessions)

    async def _wait(self, is_free: Callable[[], bool]) -> bool:
        """Ask the thread for a larger part of the quotas, and wait for its answer. Then return the result of `is_free`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _WAIT_S
        for _ in range(2):  # the thread may have read the store just before this call
            answered: asyncio.Future[None] = loop.create_future()
            self._waiters.append(answered)
            self.need.set()
            try:
                async with asyncio.timeout_at(end):
                    await answered
            except TimeoutError:
                self.store_error = self.store_error or "the store does not answer"
                return is_free()
            if is_free():
                return True
        return False

    def wake(self) -> None:
        """Let waiting calls check their quota again. This may be called from any thread."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.get_loop().call_soon_threadsafe(_resolve, waiter)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class _Parts:
    """This process's part of one project's daily token quota, and when the project's other quotas are next due for a refresh."""

    def __init__(self) -> None:
        self.day = 0
        self.taken = 0
        self.base = 0.0  # the value of `metrics.sampled_tokens` when this process first saw the day
        self.renew_at = 0.0
        self.measure_at = 0.0
        self.is_away = False  # whether the last refresh failed


class QuotaKeeper:
    """Takes this process's parts of all projects' quotas from the store, in a background thread, until `stop` is called.

    The thread calls `connect` to open the quota table.
    """

    def __init__(
        self,
        read_limits: Callable[[str], Quotas],
        connect: Callable[[], QuotaTable],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._read_limits = read_limits
        self._connect = connect
        self._clock = clock
        self._holder = uuid.uuid4().hex
        self._table: QuotaTable | None = None
        self._quotas: dict[str, tuple[ProjectQuota, _Parts]] = {}
        self._need = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="turngate-quotas", daemon=True)

    def add(self, quota: ProjectQuota) -> None:
        quota.need = self._need
        self._quotas[quota.project] = (quota, _Parts())

    def remove(self, quota: ProjectQuota) -> None:
        """Stop taking quotas for a project that was deleted."""
        self._quotas.pop(quota.project, None)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and return the unused parts to the store."""
        self._stopping = True
        self._need.set()
        if self._thread.ident is not None:
            self._thread.join()
        for quota, part in self._quotas.values():
            self._give_back(quota, part)

    def _give_back(self, quota: ProjectQuota, part: _Parts) -> None:
        if self._table is None:
            return
        try:
            unused = int(part.base + part.taken - quota.metrics.sampled_tokens)
            if part.taken and unused > 0:
                self._table.give_back(quota.project, "tokens_per_day", self._holder, unused, part.day)
            if quota.max_sessions != inf:
                self._table.give_back(quota.project, "live_sessions", self._holder, int(quota.max_sessions))
        except TurngateError as error:
            log.warning("cannot return the unused quota of project %s: %s", quota.project, error.message)

    def _run(self) -> None:
        while not self._stopping:
            self._need.wait(REFRESH_S)
            self._need.clear()
            for quota, part in list(self._quotas.values()):
                self.refresh(quota, part)

    def refresh(self, quota: ProjectQuota, part: _Parts) -> None:
        """Take the next parts of a project's quotas if it needs them. If the store does not answer, the project keeps the parts it has."""
        try:
            quota.limits = limits = self._read_limits(quota.project)
            self._refresh_tokens(quota, part, limits.tokens_per_day)
            self._refresh_sessions(quota, part, limits.live_sessions)
            self._refresh_bytes(quota, part, limits.stored_bytes)
            part.is_away, quota.store_error = False, ""
        except TurngateError as error:
            quota.store_error = error.message
            if not part.is_away:
                log.warning(
                    "cannot refresh the quotas of project %s: %s; this gateway keeps the share that it already has",
                    quota.project,
                    error.message,
                )
            part.is_away = True
        finally:
            quota.wake()

    def _refresh_tokens(self, quota: ProjectQuota, part: _Parts, limit: int | None) -> None:
        if limit is None:
            quota.max_tokens = inf
            return
        used, day = quota.metrics.sampled_tokens, int(self._clock() // DAY_S)
        if day != part.day:
            part.day, part.taken, part.base = day, 0, used
        size = -(-limit // PARTS)
        left = part.base + part.taken - used
        if left < size / 2 or part.taken > limit:
            wanted = max(0, int(used - part.base)) + size
            part.taken = self._open().take(
                quota.project, "tokens_per_day", self._holder, wanted=wanted, limit=limit, period=day
            )
        quota.max_tokens = part.base + part.taken

    def _refresh_sessions(self, quota: ProjectQuota, part: _Parts, limit: int | None) -> None:
        if limit is None:
            quota.max_sessions = inf
            return
        now, step = self._clock(), max(1, limit // PARTS)
        room = quota.max_sessions - quota.count_sessions()
        if step / 2 <= room <= 2 * step and quota.max_sessions <= limit and now < part.renew_at:
            return
        wanted = min(limit, quota.count_sessions() + step)
        quota.max_sessions = self._open().take(
            quota.project, "live_sessions", self._holder, wanted=wanted, limit=limit, until=now + HOLD_S
        )
        part.renew_at = now + HOLD_S / 3

    def _refresh_bytes(self, quota: ProjectQuota, part: _Parts, limit: int | None) -> None:
        """Measure how much a project stores, if it has a quota for that.

        This happens every few seconds or, while the quota is used up, on every refresh.
        """
        now = self._clock()
        if limit is None or (now < part.measure_at and quota.stored_bytes < limit):
            return
        measured = self._open().measure(quota.project)
        quota.stored_bytes = quota.count_bytes() if measured is None else measured
        part.measure_at = now + _MEASURE_S

    def _open(self) -> QuotaTable:
        if self._table is None:
            self._table = self._connect()
        return self._table
