"""The stored list of engines: the configured ones, and the changes made while the gateway was running.

A change survives a restart. An engine that was removed stays removed, even if it is still configured, until it is added again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from turngate.client.protocol import EngineState
from turngate.store.store import Store

log = logging.getLogger("turngate")
_SETTING = "engines"
StoredState = EngineState | None  # None: removed
_ACTIVE: StoredState = "active"


class EngineStates(NamedTuple):
    """The engines to use, with their states, and the failed engines, with the reasons why they failed."""

    used: dict[str, EngineState]
    failed: dict[str, str]


class ListedEngines(Protocol):
    """A list of engines and their states, by address."""

    def read(self) -> EngineStates: ...

    def write(self, url: str, state: StoredState) -> None:
        """Record the state of an engine. None removes the engine."""


def merge_engines(configured: Sequence[str], stored: Mapping[str, StoredState]) -> dict[str, EngineState]:
    """Return the engines to use and their states: the configured ones first, then the other stored ones."""
    states: dict[str, StoredState] = {**dict.fromkeys(configured, _ACTIVE), **stored}
    return {url: state for url, state in states.items() if state is not None}


class EngineList:
    """A gateway's list of engines by address, kept in the store's settings. All processes that share the store see the same list."""

    def __init__(self, store: Store, configured: Sequence[str]) -> None:
        self._store = store
        self._configured = list(configured)

    def read(self) -> EngineStates:
        return EngineStates(merge_engines(self._configured, self._read_stored(self._store.setting(_SETTING))), {})

    def write(self, url: str, state: StoredState) -> None:
        """Record the state of an engine. This also stores the configured engines, so that they stay listed if the configuration changes."""

        def change(value: str | None) -> str:
            stored: dict[str, StoredState] = {**merge_engines(self._configured, self._read_stored(value))}
            removed = {url: None for url, state in self._read_stored(value).items() if state is None}
            return msgspec.json.encode({**removed, **stored, url: state}).decode()

        self._store.change_setting(_SETTING, change)

    def warn_about_removed(self) -> None:
        """Log a warning for each configured engine that is not used because it was removed."""
        stored = self._read_stored(self._store.setting(_SETTING))
        for url in [url for url in self._configured if url in stored and stored[url] is None]:
            log.warning(
                "engine %s is configured but not used, because it was removed; to use it, run `turngate engines add %s`",
                url,
                url,
            )

    def _read_stored(self, value: str | None) -> dict[str, StoredState]:
        return msgspec.json.decode(value, type=dict[str, EngineState | None]) if value else {}
