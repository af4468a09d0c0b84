"""Remove old sessions from a store, optionally after writing them to an archive.

Groups of sessions are archived in files of limited size. Once a file is complete, its sessions are removed in short transactions, so that
gateways and cells can keep writing. After a crash, the next run does not rewrite sessions that the archive already contains.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from itertools import islice
from pathlib import Path

import msgspec

from turngate.errors import ConfigError, StoreError
from turngate.store.archived_session import ArchivedSession, read_session, tokenizer_settings, write_session
from turngate.store.projects import DEFAULT_PROJECT
from turngate.store.retention import OTHERS_KEPT, OldSession
from turngate.store.score_cache import locate_store_cache, remove_orphans
from turngate.store.session_archive import SessionArchive
from turngate.store.store import Store

_REMOVED_SESSIONS = 10  # per transaction
_REMOVED_NODES = 500  # per transaction, unless a single session has more
_PAUSE_S = 0.002  # between transactions, so that waiting turns can be written
_FILE_SESSIONS = 1000
_FILE_BYTES = 256_000_000  # no group is added to a file that has reached this size


class PruneResult(msgspec.Struct):
    """How many sessions a pruning run removed and kept or, after a dry run, how many a real run would remove and keep."""

    removed: int = 0  # sessions
    archived: int = 0  # sessions that this run wrote to the archive
    files: list[Path] = []  # new files of the archive
    kept: Counter[str] = msgspec.field(default_factory=Counter)  # sessions by reason
    damaged: list[str] = []  # the reasons that name a damaged session


def prune(
    store: Store,
    before: float,
    archive: Path | None = None,
    *,
    dry_run: bool = False,
    is_stopping: Callable[[], bool] = lambda: False,
) -> PruneResult:
    """Remove the sessions that ended before the time `before` and are no longer needed.

    With `dry_run`, only count these sessions. With `archive`, a session is removed only once it is in the archive. A damaged session
    cannot be archived, so its group is kept. The teacher scores of removed sessions are not archived. They are removed from the
    default score cache. Raise `Conflict` if another process is removing sessions from the same shared store.
    """
    files = None if archive is None else SessionArchive(archive)
    with nullcontext() if dry_run else store.retention.claim(), closing(store.open_reader()) as reader:
        plan = reader.retention.plan(before)
        pruner = _Pruner(store, reader, PruneResult(kept=plan.kept, damaged=plan.damaged), is_stopping)
        if dry_run:
            pruner.result.removed = sum(map(len, plan.removable))
        elif files is None:
            pruner.remove(plan.removable)
        else:
            pruner.archive(plan.removable, files)
    if not dry_run:
        remove_orphans(store, locate_store_cache(store))
    return pruner.result


def locate_archive(archive: Path | None, project: str) -> Path | None:
    """Return the folder for the archived sessions of a project, or None if `archive` is None."""
    return archive if archive is None or project == DEFAULT_PROJECT else archive / "projects" / project


class _Pruner:
    """One pruning run. It ends early if `is_stopping` returns True."""

    def __init__(self, store: Store, reader: Store, result: PruneResult, is_stopping: Callable[[], bool]) -> None:
        self._store = store
        self._reader = reader
        self.result = result
        self._is_stopping = is_stopping

    def archive(self, groups: Sequence[list[OldSession]], archive: SessionArchive) -> None:
        """Write groups to the archive, one file at a time. After each file, remove its groups from the store.

        A session that the archive already contains is removed without being written again.
        """
        known = archive.find_digests(session.id for group in groups for session in group)
        settings = tokenizer_settings(self._store)
        left = deque(groups)
        while left and not self._is_stopping():
            archived: list[list[OldSession]] = []
            file = archive.write(self._read_groups(left, archived, known), settings)
            if file is not None:
                self.result.files.append(file)
            self.remove(archived)

    def _read_groups(
        self, left: deque[list[OldSession]], archived: list[list[OldSession]], known: set[bytes]
    ) -> Iterator[ArchivedSession]:
        """Move the groups for one file from `left` to `archived`, and yield the sessions of these groups that the archive does not have.

        Groups with unreadable sessions are kept in the store.
        """
        count = size = 0
        while left and count < _FILE_SESSIONS and size < _FILE_BYTES and not self._is_stopping():
            group = left.popleft()
            if not self._is_readable(group):
                continue
            archived.append(group)
            count += len(group)
            for old in group:  # read again, because a group may be too large for memory
                session = self._read(old)
                if session.compute_digest() not in known:
                    size += session.size
                    self.result.archived += 1
                    yield session

    def _is_readable(self, group: Sequence[OldSession]) -> bool:
        """Return whether all sessions of a group can be read. If not, count the group as kept."""
        reasons: Counter[str] = Counter()
        for session in group:
            try:
                self._read(session)
            except StoreError as error:
                reasons[f"session {session.id} cannot be archived: {error.message}"] += 1
        if reasons:
            self.result.damaged.extend(reasons)
            self._keep(group, reasons)
        return not reasons

    def _read(self, session: OldSession) -> ArchivedSession:
        self._store.retention.renew_claim()
        with self._reader.snapshot(), self._reader.database.reading() as db:
            return read_session(db, session.key)

    def remove(self, groups: Sequence[list[OldSession]]) -> None:
        """Remove groups of sessions. If a session is needed again or has changed, its whole group is kept.

        If the run is stopping, groups whose removal has begun are still removed. Each session is checked once more in the transaction that
        removes it. A session that fails only this last check is kept, but the rest of its group may be removed.
        """
        left = deque(groups)
        while left and not self._is_stopping():
            sessions: deque[OldSession] = deque()
            while left and len(sessions) < _REMOVED_SESSIONS:
                self._store.retention.renew_claim()
                group = left.popleft()
                if reasons := self._reader.retention.find_reasons(group):
                    self._keep(group, reasons)
                else:
                    sessions.extend(group)
            while sessions:
                self._store.retention.renew_claim()
                chunk = self._take_chunk(sessions)
                kept = self._store.retention.remove(chunk)
                self.result.kept.update(kept)
                self.result.removed += len(chunk) - kept.total()
                time.sleep(_PAUSE_S)

    def _keep(self, group: Sequence[OldSession], reasons: Counter[str]) -> None:
        """Count the sessions of a group as kept. `reasons` contains the number of sessions that must be kept, by reason."""
        self.result.kept.update(reasons)
        if others := len(group) - reasons.total():
            self.result.kept[OTHERS_KEPT] += others

    def _take_chunk(self, left: deque[OldSession]) -> list[OldSession]:
        """Take the sessions for one transaction from `left`: at least one, and more as long as their total number of nodes stays small."""
        candidates = list(islice(left, _REMOVED_SESSIONS))
        sizes = self._reader.retention.count_nodes([session.key for session in candidates])
        chunk: list[OldSession] = []
        nodes = 0
        for session in candidates:
            nodes += sizes.get(session.key, 0)
            if chunk and nodes > _REMOVED_NODES:
                break
            chunk.append(left.popleft())
        return chunk


def load_archive(archive: Path, store: Store, sessions: Sequence[str] = ()) -> tuple[int, int]:
    """Add the sessions of an archive to a store, or only those with the given ids. The oldest file is read first.

    Return how many were added, and how many the store already had. If several files contain a session, it is read from the newest one.
    Raise `ConfigError` and add nothing if the archive lacks one of the given ids. Raise `StoreError` if a session to load is damaged, or
    if the store has a different session with the same id. Sessions that were added before the error are kept.
    """
    files, added, had = SessionArchive(archive), 0, 0
    last = {name: file for file in files.files() for name in files.list_ids(file)}
    if missing := [name for name in sessions if name not in last]:
        raise ConfigError(
            f"archive: {archive} has no session {' or '.join(missing)}, so nothing was loaded; pass the ids of archived sessions",
            param="session",
        )
    selected: dict[Path, set[str]] = {}
    for name in sessions or last:
        selected.setdefault(last[name], set()).add(name)
    try:
        for file in sorted(selected):
            settings = files.read_settings(file)
            store.set_settings({name: value for name, value in settings.items() if store.setting(name) is None})
            for session in files.read(file, selected[file]):
                if write_session(store, session):
                    added += 1
                else:
                    had += 1
    except StoreError as error:
        kept = "1 session was" if added == 1 else f"{added:,} sessions were"
        raise StoreError(f"{error.message}; {kept} added before this error and kept") from None
    return added, had
