"""Store the policy version and the state of the fence, at which calls wait during an update, so that both survive a restart."""

from __future__ import annotations

import msgspec

from turngate.engines.weights import PolicyWeights
from turngate.store.events import NewEvent
from turngate.store.store import Store

_VERSION = "policy_version"
_HELD = "fence_held"  # the time until which calls are held; empty: not held
_FOREVER = "inf"
_LOADING = "weights_loading"
_FROZEN = "engines_frozen"


class FenceState:
    """The policy version and the state of the fence, kept in the store's settings."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read_policy(self) -> tuple[int, str]:
        """Return the current policy version and the model name under which the engine serves it, or "" if no name was recorded."""
        version = int(self._store.setting(_VERSION) or 0)
        load = self.read_weights(version)
        return version, "" if load is None else load.name

    def write_open(self, version: int, event: NewEvent | None = None) -> None:
        """Record in one transaction the version, and that no hold or load is in progress.

        If only part of this were recorded, turns could be labeled with the wrong version.
        """
        self._store.set_settings({_VERSION: str(version), _HELD: "", _LOADING: ""}, event)

    def read_hold(self) -> float | None:
        """Return the time until which calls are held, infinity if there is no time limit, or None if calls are not held."""
        stored = self._store.setting(_HELD)
        return float(stored) if stored else None

    def write_hold(self, until: float | None) -> None:
        """Record a hold before it begins, so that a gateway that restarts during the hold continues to hold calls.

        If `until` is None, the hold has no time limit.
        """
        self._store.set_setting(_HELD, _FOREVER if until is None else repr(until))

    def read_weights(self, version: int) -> PolicyWeights | None:
        """Return the weights that were recorded for a version, or None."""
        return self._read_load(f"weights:{version}")

    def write_weights(self, load: PolicyWeights) -> None:
        """Record the weights of a version before the version becomes current, so that a crash in between leaves a consistent state."""
        self._store.set_setting(f"weights:{load.version}", msgspec.json.encode(load).decode())

    def read_unfinished_load(self) -> PolicyWeights | None:
        """Return the weights of an unfinished load, or None. Some engines may already have these weights."""
        return self._read_load(_LOADING)

    def write_loading(self, load: PolicyWeights) -> None:
        """Record weights before the engines load them. Until calls resume, some engines may have these weights and others may not."""
        encoded = msgspec.json.encode(load).decode()
        self._store.set_settings({f"weights:{load.version}": encoded, _LOADING: encoded})

    def read_frozen(self) -> bool:
        """Return whether the engines were paused and have not been resumed since."""
        return self._store.setting(_FROZEN) == "1"

    def write_frozen(self, frozen: bool) -> None:
        self._store.set_setting(_FROZEN, "1" if frozen else "")

    def _read_load(self, name: str) -> PolicyWeights | None:
        stored = self._store.setting(name)
        return msgspec.json.decode(stored, type=PolicyWeights) if stored else None
