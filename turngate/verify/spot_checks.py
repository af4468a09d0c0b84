"""Spot checks in a running gateway: a low-priority thread verifies every n-th session that ends."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from turngate.errors import TurngateError
from turngate.verify.findings import Verdict

log = logging.getLogger("turngate")
_MAX_WAITING = 64  # sessions in the queue; while it is full, further sessions are not verified
_LOWEST_PRIORITY = 19  # a `nice` value


class SpotChecker:
    """Verifies every n-th submitted session in a thread. The thread calls `verify`, then `report` with the verdict."""

    def __init__(self, every: int, verify: Callable[[str], Verdict], report: Callable[[Verdict], None]) -> None:
        self._every = max(1, every)
        self._verify = verify
        self._report = report
        self._seen = 0
        self._waiting: queue.Queue[str | None] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.verified = 0
        self.dropped = 0  # sessions that were not verified because the queue was full

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="turngate-verify", daemon=True)
        self._thread.start()

    def stop(self, interrupt: Callable[[], None] = lambda: None) -> None:
        """Stop after the current session, or immediately if `interrupt` aborts its verification. Sessions in the queue are dropped."""
        self._stopping = True
        interrupt()
        if self._thread is not None:
            with suppress(queue.Full):
                self._waiting.put_nowait(None)
            self._thread.join()

    def submit(self, session_id: str) -> None:
        """Submit a session that has ended. Only every n-th session is queued."""
        self._seen += 1
        if self._seen % self._every:
            return
        try:
            self._waiting.put_nowait(session_id)
        except queue.Full:
            self.dropped += 1

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # a lower priority is optional
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while not self._stopping:
            session_id = self._waiting.get()
            if session_id is None:
                return
            try:
                verdict = self._verify(session_id)
            except TurngateError as error:
                if self._stopping:
                    return
                log.warning("session %s could not be verified: %s", session_id, error.message)
                continue
            except Exception:  # a bug in a check must not stop the other checks or the gateway
                log.exception("session %s could not be verified", session_id)
                continue
            self.verified += 1
            if not verdict.ok:
                findings = "; ".join(
                    f"{f.check}: {f.what}" + (f" ({f.where})" if f.where else "") for f in verdict.wrong[:5]
                )
                log.error("session %s failed verification: %s", session_id, findings)
            self._report(verdict)


def summarize_verdict(verdict: Verdict) -> dict[str, object]:
    """Return the data of the event that reports a verdict."""
    wrong = [{"check": f.check, "what": f.what, "node": f.node} for f in verdict.wrong[:5]]
    return {"ok": verdict.ok, "wrong": wrong, "notes": len(verdict.notes), "forks": len(verdict.forks)}
