"""What the service remembers, below `DATA/service`, so that it outlives the process.

    service.db              every rollout's state, and its events, each written before anybody is told of it
    results/ID.json         how it ended; results/ID.messages.json: the whole conversation
    left/ID/                what its agent left behind
    inputs/ID/              files and tests that its caller gave, for as long as it runs

The database is written where the event loop runs: a commit takes a twentieth of a millisecond. Files are written in threads. Used by
`Rollouts` alone.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from turngate.errors import ConfigError, StoreError
from turngate.service.result import Event, RolloutResult, RolloutState, Said
from turngate.store.lock import lock_folder

_SCHEMA = 1
_TABLES = """
CREATE TABLE rollouts (id TEXT PRIMARY KEY, place TEXT NOT NULL, state BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE events (rollout TEXT NOT NULL, cursor INTEGER NOT NULL, event BLOB NOT NULL, PRIMARY KEY (rollout, cursor)) WITHOUT ROWID;
"""
T = TypeVar("T")


class Books:
    """Made by one process at a time: the folder is locked. `close` when it is no longer needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = lock_folder(folder)
        try:
            for name in ("results", "left", "inputs"):
                (folder / name).mkdir(mode=0o700, exist_ok=True)
            self._db = sqlite3.connect(folder / "service.db", isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._made()
        except (OSError, sqlite3.Error) as error:
            self._lock.close()
            raise ConfigError(f"data: {folder} cannot be used ({error}); choose another folder", param="data") from None

    def _made(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_SCHEMA}; COMMIT;")
        elif version != _SCHEMA:
            raise ConfigError(
                f"data: {self.folder} is of another version of turngate (schema {version}); choose another folder",
                param="data",
            )

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    # ── states and events ───────────────────────────────────────────────────────────────────────────────────────

    def states(self) -> Iterator[tuple[RolloutState, str]]:
        """Every rollout that is remembered, oldest first, and the place of its gateway."""
        with _kept():
            rows = self._db.execute("SELECT state, place FROM rollouts ORDER BY id").fetchall()
        return ((msgspec.json.decode(state, type=RolloutState), place) for state, place in rows)

    def put(self, state: RolloutState, place: str) -> None:
        with _kept():
            values = (state.rollout_id, place, msgspec.json.encode(state))
            self._db.execute("INSERT OR REPLACE INTO rollouts VALUES (?, ?, ?)", values)

    def add(self, rollout: str, event: Event) -> None:
        with _kept():
            values = (rollout, event.cursor, msgspec.json.encode(event))
            self._db.execute("INSERT INTO events VALUES (?, ?, ?)", values)

    def page(self, rollout: str, after: int, limit: int) -> list[Event]:
        """The oldest events past a cursor."""
        with _kept():
            rows = self._db.execute(
                "SELECT event FROM events WHERE rollout = ? AND cursor > ? ORDER BY cursor LIMIT ?",
                (rollout, after, limit),
            ).fetchall()
        return [msgspec.json.decode(event, type=Event) for (event,) in rows]

    def forget(self, rollouts: Sequence[str]) -> None:
        """All of them or, with a `StoreError`, none."""
        with _kept():
            self._db.execute("BEGIN")
            try:
                for rollout in rollouts:
                    self._db.execute("DELETE FROM events WHERE rollout = ?", (rollout,))
                    self._db.execute("DELETE FROM rollouts WHERE id = ?", (rollout,))
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    # ── files; these block, and are for threads ─────────────────────────────────────────────────────────────────

    def left(self, rollout: str) -> Path:
        return self.folder / "left" / rollout

    def inputs(self, rollout: str) -> Path:
        return self.folder / "inputs" / rollout

    def write(self, result: RolloutResult, said: Sequence[Said]) -> None:
        """The result last: where it is, all of it is."""
        _whole(self._messages(result.rollout_id), msgspec.json.encode(said))
        _whole(self._result(result.rollout_id), msgspec.json.encode(result))

    def result(self, rollout: str) -> RolloutResult | None:
        return _read(self._result(rollout), lambda data: msgspec.json.decode(data, type=RolloutResult))

    def messages(self, rollout: str) -> list[Said]:
        return _read(self._messages(rollout), lambda data: msgspec.json.decode(data, type=list[Said])) or []

    def clear_inputs(self, rollout: str) -> None:
        shutil.rmtree(self.inputs(rollout), ignore_errors=True)

    def clear_work(self, rollout: str) -> None:
        shutil.rmtree(self.left(rollout) / "work", ignore_errors=True)

    def clear(self, rollout: str) -> None:
        """Everything of a rollout but its rows."""
        for file in (self._result(rollout), self._messages(rollout)):
            with suppress(OSError):
                file.unlink(missing_ok=True)
        shutil.rmtree(self.left(rollout), ignore_errors=True)
        self.clear_inputs(rollout)

    def _result(self, rollout: str) -> Path:
        return self.folder / "results" / f"{rollout}.json"

    def _messages(self, rollout: str) -> Path:
        return self.folder / "results" / f"{rollout}.messages.json"


def _whole(path: Path, data: bytes) -> None:
    """A file that is there has all of it."""
    new = path.with_suffix(".new")
    try:
        new.write_bytes(data)
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise StoreError(f"{path} cannot be written: {error.strerror}") from None


def _read(path: Path, decode: Callable[[bytes], T]) -> T | None:
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from None


@contextmanager
def _kept() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"the service's database cannot be used: {error}") from None
