"""Checks that go on while the gateway serves: every n-th session that ends is looked at, in a thread that gives way to everything else."""

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
_MAX_WAITING = 64  # sessions that wait; what comes when more do is not looked at
_LOWEST_PRIORITY = 19  # as `nice` counts


class SpotChecker:
    """`ended` is told of every session that ends. `verify` and `report` run in the sampler's own thread."""

    def __init__(self, every: int, verify: Callable[[str], Verdict], report: Callable[[Verdict], None]) -> None:
        self._every = max(1, every)
        self._verify = verify
        self._report = report
        self._seen = 0
        self._waiting: queue.Queue[str | None] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.looked = 0
        self.missed = 0  # that were due, while too many waited

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="turngate-verify", daemon=True)
        self._thread.start()

    def stop(self, interrupt: Callable[[], None] = lambda: None) -> None:
        """Ends after the session that is being looked at, or `interrupt`s that; those that wait are left."""
        self._stopping = True
        interrupt()
        if self._thread is not None:
            with suppress(queue.Full):
                self._waiting.put_nowait(None)
            self._thread.join()

    def ended(self, session_id: str) -> None:
        self._seen += 1
        if self._seen % self._every:
            return
        try:
            self._waiting.put_nowait(session_id)
        except queue.Full:
            self.missed += 1

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # where a thread cannot be made to give way, it still works
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
            except Exception:  # a fault of ours in a check must not end the checks, nor the gateway
                log.exception("session %s could not be verified", session_id)
                continue
            self.looked += 1
            if not verdict.ok:
                told = "; ".join(
                    f"{f.check}: {f.what}" + (f" ({f.where})" if f.where else "") for f in verdict.wrong[:5]
                )
                log.error("session %s is not as it should be: %s", session_id, told)
            self._report(verdict)


def summarize_verdict(verdict: Verdict) -> dict[str, object]:
    """What an event tells of a verdict."""
    wrong = [{"check": f.check, "what": f.what, "node": f.node} for f in verdict.wrong[:5]]
    return {"ok": verdict.ok, "wrong": wrong, "notes": len(verdict.notes), "forks": len(verdict.forks)}
