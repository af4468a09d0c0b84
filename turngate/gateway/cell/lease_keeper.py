"""Register a cell in the shared store, and renew its lease in a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from turngate.errors import TurngateError
from turngate.gateway.cell.lease import Lease, Renewal, lease_clock
from turngate.gateway.cell.lease_file import LeaseFile, new_cell_id
from turngate.store.outbox import ShippingQueue

log = logging.getLogger("turngate")


class CellName(msgspec.Struct, frozen=True):
    """The name and the address with which a cell is registered in the shared store."""

    name: str
    url: str


class LeaseRegistry(Protocol):
    """The part of the shared store that registers cells, and renews and ends their leases."""

    def register(self, cell: str, name: str, url: str, ttl_s: float, previous: Iterable[str] = ()) -> list[str]: ...

    def renew(self, cell: str) -> bool: ...

    def end(self, cell: str) -> None: ...


class LeaseKeeper:
    """Keeps the lease in `file` renewed until `stop`. `connect` opens the registry over a connection that only the keeper uses."""

    def __init__(
        self,
        file: LeaseFile,
        ttl_s: float,
        outbox: ShippingQueue,
        connect: Callable[[], LeaseRegistry],
        clock: Callable[[], float] = lease_clock,
    ) -> None:
        self._file = file
        self._outbox = outbox
        self._connect = connect
        self._clock = clock
        self._lease = Lease(file.cell, ttl_s, registered=file.registered)
        self._registry: LeaseRegistry | None = None
        self._name = CellName("", "")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turngate-lease", daemon=True)
        self._is_away = False

    def start(self, name: CellName) -> None:
        """Register the cell, then renew its lease in the background. Raise an error if the shared store cannot be used.

        If only this worker was restarted, the cell is still registered, and the shared store need not answer now.
        """
        self._name = name
        if not self._lease.registered:
            self._request()
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing the lease, and end it."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        deadline_was = self._file.deadline
        self._file.write(float("-inf"), registered=self._file.registered)
        try:
            if self._registry is not None and deadline_was > self._clock():
                self._registry.end(self._lease.cell)
        except TurngateError as error:
            log.warning(
                "cannot end this cell's lease: %s; the lease expires within %g s", error.message, self._lease.ttl_s
            )

    def _run(self) -> None:
        while not self._stopping.wait(max(0.0, self._lease.next_request() - self._clock())):
            try:
                self._request()
            except TurngateError as error:
                self._lease.fail(self._clock())
                if not self._is_away:
                    log.warning("cannot renew the lease or register this cell again: %s; retrying", error.message)
                self._is_away = True
            except Exception:
                self._lease.fail(self._clock())
                log.exception("cannot renew the lease; retrying")

    def _request(self) -> None:
        """Register the cell or renew its lease, and write the new deadline to the file.

        If the cell is no longer active in the shared store, choose a new id instead.
        """
        if self._registry is None:
            self._registry = self._connect()
        request = self._lease.send(self._clock())
        if not self._lease.registered:
            self._register(self._registry)
        elif not self._registry.renew(request.cell):
            self._start_over(request)
            return
        self._lease.confirm(request)
        self._file.write(self._lease.deadline, registered=True)
        if self._is_away:
            log.info("the shared store is answering again; the lease is renewed")
        self._is_away = False

    def _register(self, registry: LeaseRegistry) -> None:
        cell, previous = self._lease.cell, self._outbox.cells()
        adopted = registry.register(cell, self._name.name, self._name.url, self._lease.ttl_s, previous)
        self._outbox.start(cell, adopted)
        log.info("cell %s (%s) has a lease of %g s", self._name.name, cell, self._lease.ttl_s)

    def _start_over(self, request: Renewal) -> None:
        """Choose a new id, since the old id is no longer active in the shared store. The next request registers the new id."""
        log.warning(
            "cell %s is no longer active in the shared store; cancelling its sessions and registering a new id",
            self._lease.cell,
        )
        self._lease.lose(request)
        cell = new_cell_id()
        self._file.start_over(cell)
        self._lease.start_over(cell, self._clock())
