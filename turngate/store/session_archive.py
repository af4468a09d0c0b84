"""An archive of sessions: a folder of Parquet files with one row per session (requires the extra `parquet`).

A file gets its final name once it is complete and synced, and never changes after that. Each row has a digest of its content. The digest
shows whether a session is already in the archive, and whether a row is damaged.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from turngate.errors import ConfigError, StoreError
from turngate.store.archived_session import ARCHIVED_NODE, ARCHIVED_TABLES, ArchivedSession, Row
from turngate.store.attempts import AttemptRow
from turngate.store.outcomes import RecordedOutcome, decode_outcome
from turngate.store.shipment import SESSION_COLUMNS
from turngate.types import ID_DTYPE, LOGPROB_DTYPE

_VERSION = 1
_METADATA = b"turngate"  # key of our metadata in a Parquet file: the version and the settings
_GROUP_BYTES = 8_000_000  # size of one row group
_STALE_S = 86400.0  # an older unfinished file was left behind by a crash
_KINDS = {  # columns that are not text
    **dict.fromkeys(("secret", "config", "outcome", "info", "messages", "digest", "tools", "kwargs", "data"), "bytes"),
    **dict.fromkeys(("arguments", "reply", "request", "head", "echo", "tail"), "bytes"),
    **dict.fromkeys(("opened", "closed", "recorded", "reward", "called", "answered", "time"), "number"),
    **dict.fromkeys(("started", "ended"), "number"),
    **dict.fromkeys(("node", "parent", "call", "repeated", "delivered", "attempt", "first", "checksum"), "int"),
}
_OWN_KINDS = {
    ("nodes", "id"): "int",
    ("refusals", "status"): "int",
    ("nodes", "ids"): "ids",
    ("nodes", "logprobs"): "logprobs",
}
_OUTCOME_COLUMNS = ("recorded", "outcome")
_FOUND_COLUMNS = ("group", "task", "kind", "reward")  # copied from the outcome, for queries


class ArchiveMetadata(msgspec.Struct, frozen=True):
    version: int
    settings: dict[str, str] = {}  # settings of the store that name the tokenizers and renderers of its sessions


class SessionArchive:
    """An archive of sessions in a folder. The first `write` creates the folder."""

    def __init__(self, folder: Path) -> None:
        if find_spec("pyarrow") is None:
            raise ConfigError(
                "archive: a Parquet archive requires pyarrow; run `pip install 'turngate[parquet]'`", param="archive"
            )
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"archive: {folder} is a file; pass a folder", param="archive")
        self.folder = folder
        self._arrow, self._parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        # What reading a damaged file can raise. Damage to the names of its columns is a `KeyError` or `TypeError`.
        self._damage = (OSError, self._arrow.ArrowException, ValueError, KeyError, TypeError)

    def files(self) -> list[Path]:
        """Return the files of the archive, oldest first."""
        return sorted(self.folder.glob("sessions-*.parquet"))

    # ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, sessions: Iterable[ArchivedSession], settings: Mapping[str, str]) -> Path | None:
        """Write sessions to a new file, and return its path. Return None if there are no sessions."""
        self._prepare_folder()
        unfinished = self.folder / f".sessions-{os.getpid()}-{time.time_ns()}.unfinished"
        names = hashlib.sha256()
        try:
            with os.fdopen(
                os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
            ) as raw:
                count = self._write_rows(raw, sessions, settings, names)
                raw.flush()
                os.fsync(raw.fileno())
            if not count:
                return None
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
            file = self.folder / f"sessions-{stamp}-{names.hexdigest()[:12]}.parquet"
            unfinished.replace(file)
            _sync_folder(self.folder)
        except OSError as error:
            raise ConfigError(
                f"archive: {self.folder} cannot be written to ({error.strerror or error}); choose another folder",
                param="archive",
            ) from None
        finally:
            unfinished.unlink(missing_ok=True)
        return file

    def _prepare_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for left in self.folder.glob(".sessions-*.unfinished"):
                if time.time() - left.stat().st_mtime > _STALE_S:
                    left.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"archive: {self.folder} cannot be written to ({error.strerror}); choose another folder",
                param="archive",
            ) from None

    def _write_rows(
        self, raw: Any, sessions: Iterable[ArchivedSession], settings: Mapping[str, str], names: Any
    ) -> int:
        metadata = {_METADATA: msgspec.json.encode(ArchiveMetadata(_VERSION, dict(settings)))}
        schema = self._schema().with_metadata(metadata)
        count, size, waiting = 0, 0, list[ArchivedSession]()
        with self._parquet.ParquetWriter(raw, schema, compression="zstd") as writer:
            for session in sessions:
                names.update(session.id.encode() + b"\0")
                waiting.append(session)
                count, size = count + 1, size + session.size
                if size > _GROUP_BYTES:
                    writer.write_table(self._make_table(schema, waiting))
                    size, waiting = 0, []
            if waiting:
                writer.write_table(self._make_table(schema, waiting))
        return count

    def _schema(self) -> Any:
        arrow = self._arrow
        session = [(name, self._type(_KINDS.get(name, "text"))) for name in SESSION_COLUMNS]
        found = [(name, self._type(_KINDS.get(name, "text"))) for name in (*_OUTCOME_COLUMNS, *_FOUND_COLUMNS)]
        lists = {"nodes": ARCHIVED_NODE, "attempts": AttemptRow.__struct_fields__, **ARCHIVED_TABLES}
        nested = [(table, arrow.list_(self._struct(table, names))) for table, names in lists.items()]
        return arrow.schema([*session, *found, *nested, ("content_digest", arrow.binary(32))])

    def _struct(self, table: str, names: Sequence[str]) -> Any:
        kinds = [(name, _OWN_KINDS.get((table, name)) or _KINDS.get(name, "text")) for name in names]
        return self._arrow.struct([(name, self._type(kind)) for name, kind in kinds])

    def _type(self, kind: str) -> Any:
        arrow = self._arrow
        return {
            "text": arrow.string(),
            "bytes": arrow.binary(),
            "number": arrow.float64(),
            "int": arrow.int64(),
            "ids": arrow.list_(arrow.int32()),
            "logprobs": arrow.list_(arrow.float32()),
        }[kind]

    def _make_table(self, schema: Any, sessions: Sequence[ArchivedSession]) -> Any:
        rows = [_to_record(session) for session in sessions]
        columns = [self._arrow.array([row[field.name] for row in rows], type=field.type) for field in schema]
        return self._arrow.Table.from_arrays(columns, schema=schema)

    # ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────

    def find_digests(self, ids: Iterable[str]) -> set[bytes]:
        """Return the digests of the archived sessions with these ids."""
        compute, wanted, found = import_module("pyarrow.compute"), self._arrow.array(list(ids), "string"), set[bytes]()
        for file in self.files():
            with self._open(file) as opened, self._report_damage(file):
                table = opened.read(columns=["id", "content_digest"])
                matching = table.filter(compute.is_in(table["id"], value_set=wanted))
                found.update(matching["content_digest"].to_pylist())
        return found

    def list_ids(self, file: Path) -> list[str]:
        """Return the ids of the sessions in a file."""
        with self._open(file) as opened, self._report_damage(file):
            ids: list[str] = opened.read(columns=["id"])["id"].to_pylist()
        return ids

    def read(self, file: Path, ids: Collection[str] | None = None) -> Iterator[ArchivedSession]:
        """Read the sessions of a file: all of them, or those with the given ids.

        Raise `ConfigError` if the file is not a readable archive, and `StoreError` if a session is damaged.
        """
        with self._open(file) as opened:
            for number in range(opened.num_row_groups):
                for session, digest in self._read_row_group(file, opened, number, ids):
                    if session.compute_digest() != digest:
                        raise StoreError(
                            f"session {session.id} is damaged in {file}; restore the file from a backup, or load other sessions by "
                            "their ids"
                        )
                    yield session

    def _read_row_group(
        self, file: Path, opened: Any, number: int, ids: Collection[str] | None
    ) -> list[tuple[ArchivedSession, bytes]]:
        """Read the sessions of a row group, each with the digest that was stored with it."""
        try:
            records = opened.read_row_group(number).to_pylist()
            selected = [record for record in records if ids is None or record["id"] in ids]
            return [(_from_record(record), record["content_digest"]) for record in selected]
        except self._damage as error:
            raise StoreError(
                f"{file} is damaged, so some of its sessions cannot be read ({error}); restore the file from a backup, or load sessions of "
                "other files by their ids"
            ) from None

    def read_settings(self, file: Path) -> dict[str, str]:
        """Return the settings that name the tokenizers and renderers of the sessions in a file."""
        with self._open(file) as opened:
            return self._read_metadata(file, opened).settings

    def _open(self, file: Path) -> Any:
        with self._report_damage(file):
            opened = self._parquet.ParquetFile(file)
        self._read_metadata(file, opened)
        return opened

    @contextmanager
    def _report_damage(self, file: Path) -> Iterator[None]:
        """Raise `ConfigError` if the file cannot be read."""
        try:
            yield
        except self._damage as error:
            raise ConfigError(
                f"archive: {file} cannot be read ({error}); check the file's permissions, or restore the file from a backup",
                param="archive",
            ) from None

    def _read_metadata(self, file: Path, opened: Any) -> ArchiveMetadata:
        raw = (opened.schema_arrow.metadata or {}).get(_METADATA, b"")
        try:
            metadata = msgspec.json.decode(raw, type=ArchiveMetadata)
        except msgspec.DecodeError:
            raise ConfigError(
                f"archive: {file} is not an archive of sessions; pass a folder that `turngate prune --archive` wrote",
                param="archive",
            ) from None
        if metadata.version != _VERSION:
            raise ConfigError(
                f"archive: {file} has format version {metadata.version}, but this version of Turngate supports only format version "
                f"{_VERSION}; use the version of Turngate that wrote the file",
                param="archive",
            )
        return metadata


def _to_record(session: ArchivedSession) -> dict[str, Any]:
    recorded, outcome = session.outcome or (None, None)
    known = None if outcome is None else decode_outcome(outcome)
    kind, reward, group, task = (
        (known.kind, known.reward, known.group, known.task)
        if isinstance(known, RecordedOutcome)
        else ("", None, "", "")
    )
    attempts = [msgspec.structs.asdict(attempt) for attempt in session.attempts]
    return {
        **dict(zip(SESSION_COLUMNS, session.session, strict=True)),
        **{"recorded": recorded, "outcome": outcome, "group": group, "task": task, "kind": kind, "reward": reward},
        "nodes": [_to_arrays(dict(zip(ARCHIVED_NODE, row, strict=True))) for row in session.nodes],
        "attempts": attempts,
        **{
            table: [dict(zip(names, row, strict=True)) for row in session.tables.get(table, ())]
            for table, names in ARCHIVED_TABLES.items()
        },
        "content_digest": session.compute_digest(),
    }


def _to_arrays(node: dict[str, Any]) -> dict[str, Any]:
    """Convert the ids and log-probabilities of a node from bytes to arrays that other programs can read."""
    logprobs = node["logprobs"]
    return {
        **node,
        "ids": np.frombuffer(node["ids"], ID_DTYPE),
        "logprobs": None if logprobs is None else np.frombuffer(logprobs, LOGPROB_DTYPE),
    }


def _from_record(record: dict[str, Any]) -> ArchivedSession:
    def rows(table: str, names: Sequence[str]) -> list[Row]:
        return [tuple(cells[name] for name in names) for cells in record[table]]

    for node in record["nodes"]:
        logprobs = node["logprobs"]
        node["ids"] = np.array(node["ids"], ID_DTYPE).tobytes()
        node["logprobs"] = None if logprobs is None else np.array(logprobs, LOGPROB_DTYPE).tobytes()
    return ArchivedSession(
        tuple(record[name] for name in SESSION_COLUMNS),
        rows("nodes", ARCHIVED_NODE),
        # Archives written before side data existed do not have that table.
        {
            table: rows(table, names)
            for table, names in ARCHIVED_TABLES.items()
            if table != "side_data" or record.get(table)
        },
        [AttemptRow(**attempt) for attempt in record["attempts"]],
        None if record["outcome"] is None else (record["recorded"], record["outcome"]),
    )


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that a new file in it keeps its name if the machine crashes."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
