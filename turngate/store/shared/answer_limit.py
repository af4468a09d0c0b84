"""Limit the time that PostgreSQL may take to answer, because a query blocks the event loop or the thread that runs it.

After a server has failed to answer in time, new connections to it fail immediately for a few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from turngate.errors import StoreError

if TYPE_CHECKING:
    import psycopg

CONNECT_S = 2  # the least that libpq accepts
_PAUSE_S = 5.0


class AnswerLimit:
    """The limit on answer times for all connections to one database."""

    def __init__(self, seconds: float, name: str) -> None:
        self._seconds = seconds
        self._name = name
        self._silent_until = 0.0

    def connect(self, driver: Any, address: str, **settings: Any) -> psycopg.Connection:
        """Connect with psycopg (`driver`). Raise `StoreError` without trying if the server has just failed to answer."""
        if time.monotonic() < self._silent_until:
            raise StoreError(
                f"{self._name} does not answer; check the PostgreSQL server (a new connection is attempted at most every {_PAUSE_S:.0f} s)"
            )
        limit = self

        class LimitedConnection(driver.Connection):  # type: ignore[misc]  # imported only if it is used
            def wait(self, waits: Any, *arguments: Any, **options: Any) -> Any:
                return super().wait(limit._apply(driver, self, waits), *arguments, **options)

        try:
            return LimitedConnection.connect(address, **{**settings, "connect_timeout": CONNECT_S})  # type: ignore[no-any-return]
        except driver.errors.ConnectionTimeout:
            self._silent_until = time.monotonic() + _PAUSE_S
            raise

    def _apply(self, driver: Any, db: psycopg.Connection, waits: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Wrap the generator with which psycopg waits for the server, and raise an error when the time limit has passed.

        The generator yields the socket state that it waits for. psycopg resumes it with 0 if that state has not been reached yet.
        """
        end = time.monotonic() + self._seconds
        try:
            state = next(waits)
            while True:
                ready = yield state
                state = waits.send(ready)
                if not ready and time.monotonic() > end:
                    db.pgconn.finish()  # a late answer would be mistaken for the answer to the next statement
                    self._silent_until = time.monotonic() + _PAUSE_S
                    raise driver.OperationalError(f"no answer within {self._seconds:.0f} s")
        except StopIteration as stop:
            return stop.value
