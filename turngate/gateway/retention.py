"""Remove old sessions while the gateway is running, if `session_days` is set."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path

from turngate.common.database_url import is_database_url
from turngate.errors import Conflict, TurngateError
from turngate.gateway.events import Events
from turngate.store.location import open_store
from turngate.store.pruning import PruneResult, prune
from turngate.store.session_archive import SessionArchive
from turngate.store.store import Store

log = logging.getLogger("turngate")
_FIRST_S = 5.0  # after the start
_INTERVAL_S = 3600.0


class SessionPruner:
    """Prunes old sessions of a project once an hour, in a thread. `days=0` keeps all sessions."""

    def __init__(self, store: Store, data: str, events: Events, *, days: float, archive: Path | None) -> None:
        """`data` is the address of the store, as in the settings. Pruned sessions are moved to `archive`, or deleted if it is None."""
        if archive is not None:
            SessionArchive(archive)  # raises an error now if the extra is not installed
        self._store = store
        self._data = data
        self._events = events
        self._age_s = days * 86400
        self._archive = archive
        self._stopping = threading.Event()
        self._reported: set[str] = set()  # reasons that name a damaged session
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._age_s:
            self._task = asyncio.create_task(asyncio.to_thread(self._run, asyncio.get_running_loop()))

    async def stop(self) -> None:
        """Stop, but first finish removing the groups whose removal has begun."""
        self._stopping.set()
        if self._task is not None:
            await self._task

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        pause = _FIRST_S
        while not self._stopping.wait(pause):
            pause = _INTERVAL_S
            try:
                result = self._prune()
            except Conflict as error:  # another gateway on the same store is doing it
                log.info("not removing old sessions now: %s", error.message)
            except TurngateError as error:
                log.warning("cannot remove old sessions: %s", error.message)
            except Exception:
                log.exception("cannot remove old sessions")
            else:
                self._report_damaged(result.damaged)
                if result.removed:
                    log.info("sessions removed because they ended more than session_days ago: %d", result.removed)
                    with suppress(RuntimeError):  # the loop has ended
                        loop.call_soon_threadsafe(self._events.wake, "")

    def _report_damaged(self, reasons: Sequence[str]) -> None:
        for reason in reasons:
            if reason not in self._reported:
                self._reported.add(reason)
                log.warning("%s; the session and its group are not removed (see docs/retention.md)", reason)

    def _prune(self) -> PruneResult:
        before = time.time() - self._age_s
        # In a shared store, pruning may wait for other machines, so it has its own connection.
        with closing(open_store(self._data)) if is_database_url(self._data) else nullcontext(self._store) as store:
            return prune(store, before, self._archive, is_stopping=self._stopping.is_set)
