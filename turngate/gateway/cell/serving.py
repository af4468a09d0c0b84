"""Decide whether this worker of a cell may serve, and act when that changes.

lease held     serve
lease lapsed   abort the calls in flight, which agents repeat; hold new model calls; refuse new sessions and outcomes
lease lost     also cancel the sessions of the lost id, then serve under the new id
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from turngate.errors import Busy, LeaseLapsed, TurngateError
from turngate.gateway.cell.lease import lease_clock
from turngate.gateway.cell.lease_file import LeaseFile
from turngate.gateway.fence import Fence
from turngate.gateway.sessions import Sessions
from turngate.store.outbox import OutboxTable

log = logging.getLogger("turngate")
_POLL_S = 0.1  # between reads of the lease file, which another process may have written
_UNSHIPPED_CHECK_S = 1.0  # between counts of the unshipped sessions


class ServingPermit:
    """The lease as one worker sees it. A worker serves under a new id only after it has cancelled the sessions of the old id."""

    def __init__(self, file: LeaseFile, clock: Callable[[], float] = lease_clock) -> None:
        self._file = file
        self._clock = clock
        self._term = 0  # the term under which this worker serves; 0: none yet
        self._granted = asyncio.Event()

    @property
    def is_held(self) -> bool:
        return self._clock() < self._file.deadline and self._file.term == self._term

    @property
    def seconds_left(self) -> float:
        """Seconds until this worker stops serving if the lease is not renewed; 0 if it is not serving."""
        return max(0.0, self._file.deadline - self._clock()) if self.is_held else 0.0

    @property
    def has_new_id(self) -> bool:
        """Whether the cell has an id under which this worker is not serving yet."""
        return self._file.term != self._term

    @property
    def cell(self) -> str:
        return self._file.cell

    def accept_id(self, term: int) -> None:
        self._term = term

    @property
    def term(self) -> int:
        """The term of the cell's current id. This worker may not have switched to that id yet."""
        return self._file.term

    def require(self) -> None:
        """Raise `LeaseLapsed` unless the lease is held."""
        if not self.is_held:
            raise LeaseLapsed(
                "this cell cannot accept this request, because it holds no lease from the shared store or is still switching to a new one; "
                "retry in a moment"
            )

    async def wait(self) -> None:
        """Wait until the lease is held."""
        while not self.is_held:
            self._granted.clear()
            await self._granted.wait()

    def wake(self) -> None:
        """Let waiting calls check the lease again."""
        self._granted.set()


class LeasedFence(Fence):
    """A fence that also holds calls while the cell's lease is not held."""

    def __init__(self, permit: ServingPermit, version: int = 0, model: str = "") -> None:
        super().__init__(version, model)
        self._permit = permit

    @property
    def admits(self) -> bool:
        return super().admits and self._permit.is_held

    async def enter(self) -> None:
        while not self.admits:
            await (self._open.wait() if self.paused else self._permit.wait())
        await super().enter()  # without waiting


class ServingGuard:
    """Aborts this worker's calls when the lease lapses, and lets waiting calls through when the lease is held again.

    The guard also cancels the sessions of an id that the cell has lost. `run` does all of this until it is cancelled.
    """

    def __init__(self, permit: ServingPermit, max_unshipped: int) -> None:
        self.permit = permit
        self._max_unshipped = max_unshipped
        self._unshipped: dict[OutboxTable, tuple[int, float]] = {}  # the number in each outbox, and when it was counted
        self._parts: list[tuple[OutboxTable, Sessions]] = []  # one for each project
        self._is_failing = False  # to switch to the cell's new id

    def add(self, outbox: OutboxTable, sessions: Sessions) -> None:
        """Guard the sessions of one more project."""
        self._parts.append((outbox, sessions))

    def remove(self, outbox: OutboxTable) -> None:
        """Stop guarding the sessions of a project that was deleted."""
        self._parts = [part for part in self._parts if part[0] is not outbox]
        self._unshipped.pop(outbox, None)

    def require_room(self, outbox: OutboxTable) -> None:
        """Raise an error if the lease is not held, or if the project has too many unshipped sessions to open another one."""
        self.permit.require()
        unshipped, counted = self._unshipped.get(outbox, (0, 0.0))
        if (now := lease_clock()) - counted > _UNSHIPPED_CHECK_S:
            unshipped = outbox.state().unshipped
            self._unshipped[outbox] = unshipped, now
        if unshipped >= self._max_unshipped:
            raise Busy(
                f"this cell has too many ended sessions of this project that are not in the shared store yet ({unshipped}; max_unshipped "
                f"is {self._max_unshipped}); retry in a moment"
            )

    async def run(self) -> None:
        was_held = self.permit.is_held
        while True:
            if self.permit.has_new_id:
                await self._try_to_switch()
            is_held = self.permit.is_held
            if is_held:
                self.permit.wake()
            elif was_held:
                log.warning(
                    "this cell no longer holds its lease; calls in flight are aborted, and new calls wait until it holds a lease again"
                )
                await self.interrupt_calls()
            was_held = is_held
            left = self.permit.seconds_left
            await asyncio.sleep(min(_POLL_S, left) if is_held else _POLL_S)

    async def interrupt_calls(self) -> None:
        """Abort the calls in flight of all projects. Agents will repeat them."""
        ends = await asyncio.gather(
            *(sessions.interrupt_calls() for _, sessions in self._parts), return_exceptions=True
        )
        for error in ends:
            if isinstance(error, Exception):
                log.error("could not abort all calls in flight", exc_info=error)

    async def _try_to_switch(self) -> None:
        """Switch to the cell's new id. If that fails, log the error. `run` tries again at the next poll."""
        try:
            await self.stop_foreign_sessions()
            self._is_failing = False
        except Exception as error:
            if not self._is_failing:
                reason = error.message if isinstance(error, TurngateError) else repr(error)
                log.warning(
                    "cannot switch this cell to its new id: %s; calls wait in the meantime, and the cell keeps retrying",
                    reason,
                    exc_info=not isinstance(error, TurngateError),
                )
            self._is_failing = True

    async def stop_foreign_sessions(self) -> None:
        """Cancel this worker's sessions that belong to earlier ids of the cell, then serve under the current id.

        If a session cannot be cancelled and could still serve calls, do not serve yet. `run` tries again.
        """
        term, cell = self.permit.term, self.permit.cell
        for outbox, sessions in list(self._parts):
            outbox.cell = cell
            for session_id in outbox.find_foreign(cell):
                if not await self._cancel(sessions, session_id):
                    return  # try again at the next poll; a session that cannot be loaded serves no calls anyway
        self.permit.accept_id(term)

    async def _cancel(self, sessions: Sessions, session_id: str) -> bool:
        """Cancel a session if this worker owns it. Return False if that failed and the session can still serve calls."""
        if not sessions.owns(session_id):
            return True
        try:
            await sessions.end(session_id, "cancelled", "lease lost")
        except TurngateError as error:
            log.warning("cannot cancel session %s: %s", session_id, error.message)
            return sessions.find_live(session_id) is None
        return True
