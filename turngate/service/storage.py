"""The service's durable data, below `DATA/service`.

    service.db              the state and the events of every rollout; an event is written before callers see it
    results/ID.json         the result; results/ID.messages.json is the whole conversation
    left/ID/                the files that the agent left behind
    inputs/ID/              the files and tests that the caller sent; deleted when the rollout ends

Database methods run on the event loop, because a commit takes only about 0.05 ms. Call file methods in threads, because they take longer.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from turngate.errors import ConfigError, StoreError
from turngate.service.result import ConversationMessage, RolloutEvent, RolloutResult, RolloutState
from turngate.store.lock import lock_folder

log = logging.getLogger("turngate")
_SCHEMA = 1
# `place` is the name of the rollout's gateway.
_TABLES = """
CREATE TABLE rollouts (id TEXT PRIMARY KEY, place TEXT NOT NULL, state BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE events (rollout TEXT NOT NULL, cursor INTEGER NOT NULL, event BLOB NOT NULL, PRIMARY KEY (rollout, cursor)) WITHOUT ROWID;
"""
T = TypeVar("T")


class ServiceStorage:
    """The database and files of the service. Their folder is locked, so that only one process can use it. Call `close` when done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with ExitStack() as opened:
            opened.enter_context(lock_folder(folder))
            try:
                for name in ("results", "left", "inputs"):
                    (folder / name).mkdir(mode=0o700, exist_ok=True)
                self._db = sqlite3.connect(folder / "service.db", isolation_level=None, check_same_thread=False)
                opened.callback(self._db.close)
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = NORMAL")
                self._create_tables()
            except (OSError, sqlite3.Error) as error:
                raise ConfigError(
                    f"data: {folder} cannot be used ({error}); check the disk and the folder's permissions, or choose a different folder",
                    param="data",
                ) from None
            self._opened = opened.pop_all()

    def _create_tables(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_SCHEMA}; COMMIT;")
        elif version != _SCHEMA:
            raise ConfigError(
                f"data folder {self.folder} has schema version {version}, but this version of Turngate supports only schema version "
                f"{_SCHEMA}; choose a different folder",
                param="data",
            )

    def close(self) -> None:
        """Close the database, and unlock the folder."""
        self._opened.close()

    # ── states and events ───────────────────────────────────────────────────────────────────────────────────────

    def read_states(self) -> Iterator[tuple[str, str, RolloutState | None]]:
        """Yield each stored rollout, the name of its gateway, and its state, oldest first. The state is None if it is damaged."""
        with _store_errors():
            rows = self._db.execute("SELECT id, place, state FROM rollouts ORDER BY id").fetchall()
        for rollout, gateway, data in rows:
            try:
                state = msgspec.json.decode(data, type=RolloutState)
            except ValueError as error:
                log.error(
                    "the state of rollout %s is damaged (%s), so the rollout is not listed; restore service.db in %s from a backup",
                    rollout,
                    error,
                    self.folder,
                )
                state = None
            yield rollout, gateway, state

    def save_state(self, state: RolloutState, gateway: str) -> None:
        with _store_errors():
            values = (state.rollout_id, gateway, msgspec.json.encode(state))
            self._db.execute("INSERT OR REPLACE INTO rollouts VALUES (?, ?, ?)", values)

    def add_event(self, rollout: str, event: RolloutEvent) -> None:
        with _store_errors():
            values = (rollout, event.cursor, msgspec.json.encode(event))
            self._db.execute("INSERT INTO events VALUES (?, ?, ?)", values)

    def read_events(self, rollout: str, after: int, limit: int) -> list[RolloutEvent]:
        """Return the first `limit` events after a cursor, or all of them if `limit` is -1."""
        with _store_errors():
            rows = self._db.execute(
                "SELECT event FROM events WHERE rollout = ? AND cursor > ? ORDER BY cursor LIMIT ?",
                (rollout, after, limit),
            ).fetchall()
            return [msgspec.json.decode(event, type=RolloutEvent) for (event,) in rows]

    def delete_rows(self, rollouts: Sequence[str]) -> None:
        """Delete the states and events of rollouts. If that fails, delete nothing and raise `StoreError`."""
        with _store_errors():
            self._db.execute("BEGIN")
            try:
                for rollout in rollouts:
                    self._db.execute("DELETE FROM events WHERE rollout = ?", (rollout,))
                    self._db.execute("DELETE FROM rollouts WHERE id = ?", (rollout,))
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    # ── files (blocking) ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def artifacts(self) -> Path:
        """The folder for the agents' files. It contains one folder for each rollout."""
        return self.folder / "left"

    def artifacts_folder(self, rollout: str) -> Path:
        return self.artifacts / rollout

    def inputs_folder(self, rollout: str) -> Path:
        return self.folder / "inputs" / rollout

    def write_result(self, result: RolloutResult, messages: Sequence[ConversationMessage]) -> None:
        """Write the conversation and then the result. This order guarantees that every stored result has its conversation."""
        _write_atomically(self._messages_file(result.rollout_id), msgspec.json.encode(messages))
        _write_atomically(self._result_file(result.rollout_id), msgspec.json.encode(result))

    def read_result(self, rollout: str) -> RolloutResult | None:
        return _read(self._result_file(rollout), lambda data: msgspec.json.decode(data, type=RolloutResult))

    def read_messages(self, rollout: str) -> list[ConversationMessage]:
        kind = list[ConversationMessage]
        return _read(self._messages_file(rollout), lambda data: msgspec.json.decode(data, type=kind)) or []

    def delete_inputs(self, rollout: str) -> None:
        shutil.rmtree(self.inputs_folder(rollout), ignore_errors=True)

    def delete_work(self, rollout: str) -> None:
        shutil.rmtree(self.artifacts_folder(rollout) / "work", ignore_errors=True)

    def delete_files(self, rollout: str) -> None:
        """Delete all files of a rollout, but not its rows in the database."""
        for file in (self._result_file(rollout), self._messages_file(rollout)):
            with suppress(OSError):
                file.unlink(missing_ok=True)
        shutil.rmtree(self.artifacts_folder(rollout), ignore_errors=True)
        self.delete_inputs(rollout)

    def _result_file(self, rollout: str) -> Path:
        return self.folder / "results" / f"{rollout}.json"

    def _messages_file(self, rollout: str) -> Path:
        return self.folder / "results" / f"{rollout}.messages.json"


def _write_atomically(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    try:
        new.write_bytes(data)
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise StoreError(
            f"{path} cannot be written ({error.strerror}); check the disk and the permissions of the service's data folder"
        ) from None


def _read(path: Path, decode: Callable[[bytes], T]) -> T | None:
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: invalid JSON or UTF-8
        raise StoreError(
            f"{path} cannot be read ({error}); check the disk and the file's permissions, or restore the file from a backup"
        ) from None


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, ValueError) as error:  # ValueError: a row with invalid JSON or UTF-8
        raise StoreError(
            f"the service's database failed ({error}); check the disk and the permissions of the service's data folder"
        ) from None
