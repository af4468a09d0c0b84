"""Warn while a gateway does not answer, so that a client that keeps retrying does not look stuck."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger("turngate")
_FIRST_S = 10.0  # length of the outage before the first warning
_LONGEST_S = 600.0  # the longest time between two warnings


class OutageReport:
    """Warns at growing intervals while one gateway does not answer.

    All calls of a client share one report, so each warning appears once.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._clock = clock
        self._since: float | None = None  # the time of the first failure after the last answer
        self._next_s = _FIRST_S  # the length of the outage at which the next warning is due

    def add_failure(self) -> None:
        now = self._clock()
        if self._since is None:
            self._since = now
        silent_s = now - self._since
        if silent_s >= self._next_s:
            self._next_s = silent_s + min(silent_s, _LONGEST_S)
            log.warning(
                "gateway %s has not answered for %.0f s; still retrying; if it has stopped, restart it with `turngate serve --data …`",
                self._url,
                silent_s,
            )

    def add_answer(self) -> None:
        if self._next_s > _FIRST_S:
            log.warning("gateway %s is answering again", self._url)
        self._since, self._next_s = None, _FIRST_S
