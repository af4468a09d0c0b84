"""A thread that ships due sessions from a cell's outbox to the shared store.

The thread reads sessions and writes to the shared store through its own connections, so turns do not wait for that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from turngate.errors import TurngateError
from turngate.store.outbox import OpenAttempt, OutboxTable, ShippingPosition, UnshippedSession
from turngate.store.shipment import ConflictingShipment, RejectedShipment, Shipment, read_shipments
from turngate.store.store import Store

log = logging.getLogger("turngate")
_IDLE_S = 0.05  # between checks of an empty outbox; other workers wait for the next check when they open a session
_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)  # after failed transactions
_SESSIONS = 32  # per transaction
_CHECK_S = 5.0  # between checks for a shared store that was restored from a backup
_PAGE = 500  # sessions per query after a restore
_ANNOUNCED = 256  # open sessions announced at a time
_BYTES = 16_000_000  # no session is added to a transaction that has exceeded this size


class ShipmentTarget(Protocol):
    """Writes sessions to the shared store."""

    def write(self, shipments: Sequence[Shipment]) -> None:
        """Write all shipments in one transaction. Writing a shipment again changes nothing."""

    def announce(self, attempts: Sequence[OpenAttempt]) -> set[str]:
        """Register open sessions as attempts that this cell is running.

        Return the ids of the sessions whose attempts are superseded or replaced.
        """

    def find_history(self, position: ShippingPosition) -> str:
        """Return the id of the shared store's history, which changes when the store is restored from a backup.

        `position` contains the history that the cell knows and the last session that it shipped. If the cell knows the store's history, but
        the session is missing, the store was restored, and this call gives the store a new history id.
        """

    def find_missing(self, sessions: Sequence[tuple[str, int]]) -> set[str]:
        """Return the ids of the sessions that the shared store lacks, or whose newest event it lacks.

        Each item of `sessions` is a pair: a session id, and the number of that session's newest event. Sessions that
        were deleted from the shared store are left out.
        """


class Shipper:
    """Announces open sessions and ships ended ones until `stop`. `reader` opens the cell's store, and `connect` opens the target."""

    def __init__(self, outbox: OutboxTable, reader: Callable[[], Store], connect: Callable[[], ShipmentTarget]) -> None:
        self.outbox = outbox
        self._open_reader = reader
        self._connect = connect
        self._reader: Store | None = None
        self._target: ShipmentTarget | None = None
        self._failures = 0
        self._check_at = 0.0
        self._stopping = threading.Event()
        self._wakeup = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turngate-shipping", daemon=True)
        self.shipped = 0

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Make the thread announce and ship now, unless it is waiting to retry after a failure."""
        if not self._failures:
            self._wakeup.set()

    def stop(self, wait_s: float) -> None:
        """Ship due sessions for up to `wait_s` seconds, or until a failure, then stop. Sessions not shipped by then stay in the outbox."""
        try:
            self._wait_until_shipped(wait_s)
        except TurngateError as error:
            log.warning(
                "cannot ship the last sessions before this cell stops: %s; they stay in the outbox", error.message
            )
        finally:
            self._end_thread()

    def _wait_until_shipped(self, wait_s: float) -> None:
        end = time.monotonic() + wait_s
        while time.monotonic() < end and self._thread.is_alive() and not self._failures:
            if not self.outbox.find_due(time.time(), 1):
                return
            time.sleep(0.05)

    def _end_thread(self) -> None:
        self._stopping.set()
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._reader is not None:
            self._reader.close()

    def _run(self) -> None:
        pause = 0.0
        while True:
            self._wakeup.wait(pause)
            self._wakeup.clear()
            if self._stopping.is_set():
                return
            try:
                self._check_history()
                self.announce()
                pause = 0.0 if self.ship() else _IDLE_S
                if self._failures:
                    log.info("shipping of sessions has resumed")
                self._failures = 0
            except TurngateError as error:
                pause = self._back_off(error.message)
            except Exception as error:
                log.exception("cannot ship sessions")
                pause = self._back_off(str(error))

    def _check_history(self) -> None:
        """If the shared store was restored from a backup, put the sessions that it lost into the outbox again."""
        if time.monotonic() < self._check_at:
            return
        if self._target is None:
            self._target = self._connect()
        position = self.outbox.read_position()
        history = self._target.find_history(position)
        if position.history is not None and history != position.history:
            self.outbox.announce_again()
            lost = sum(self._add_missing(self._target))
            log.warning("the shared store was restored from a backup; number of lost sessions to ship again: %d", lost)
        if history != position.history:
            self.outbox.set_history(history)
        self._check_at = time.monotonic() + _CHECK_S

    def _add_missing(self, target: ShipmentTarget) -> Iterator[int]:
        """Put the sessions that the shared store lacks into the outbox again, page by page. Yield the number added from each page."""
        after = 0
        while page := self.outbox.list_shipped(after, _PAGE):
            missing = target.find_missing([(session.id, session.newest) for session in page])
            self.outbox.add_again(session.key for session in page if session.id in missing)
            yield len(missing)
            after = page[-1].key

    def announce(self) -> None:
        """Announce open sessions to the shared store, and record which of them belong to superseded attempts."""
        opened = self.outbox.find_unannounced(_ANNOUNCED)
        if opened:
            if self._target is None:
                self._target = self._connect()
            superseded = self._target.announce(opened)
            self.outbox.mark_announced(opened, superseded)
            for session in sorted(superseded):
                log.warning(
                    "the outcome of session %s will not count: its attempt has been superseded in the shared store",
                    session,
                )

    def _back_off(self, message: str) -> float:
        if not self._failures:
            log.warning("cannot ship sessions: %s; retrying", message)
        self._failures += 1
        return _RETRY_S[min(self._failures, len(_RETRY_S)) - 1]

    def ship(self) -> int:
        """Ship due sessions, usually in one transaction. Return how many of them were found, which is at most `_SESSIONS`.

        If these sessions are too large for one transaction (`_BYTES`), later calls ship the rest.
        """
        rows = self.outbox.find_due(time.time(), _SESSIONS)
        if not rows:
            return 0
        if self._reader is None:
            self._reader = self._open_reader()
        batch = read_shipments(self._reader, rows, _BYTES)
        for row, reason in batch.damaged:
            self._set_aside(row, reason)
        if batch.deleted:
            self.outbox.remove(batch.deleted)
        if batch.shipments:
            if self._target is None:
                self._target = self._connect()
            self._write(self._target, batch.shipments)
        return len(rows)

    def _write(self, target: ShipmentTarget, read: list[tuple[UnshippedSession, Shipment]]) -> None:
        try:
            target.write([shipment for _, shipment in read])
        except ConflictingShipment as error:
            for row, shipment in read:
                if shipment.id == error.session:
                    self._set_aside(row, error.message)
            return  # the next batch contains the others
        except RejectedShipment as error:
            if len(read) == 1:
                self._set_aside(read[0][0], f"session {read[0][1].id}: {error.message}")
            else:  # find out which one is rejected, and ship the others
                for one in read:
                    self._write(target, [one])
            return
        self.outbox.remove(row for row, _ in read)
        self.shipped += len(read)

    def _set_aside(self, row: UnshippedSession, message: str) -> None:
        log.error(
            "cannot ship a session to the shared store: %s; the session stays in this cell and is tried again when it changes or when the "
            "cell restarts",
            message,
        )
        self.outbox.mark_failed(row, message)
