"""Open the store that `--data` names: a folder, or `postgresql://…` for a shared store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from turngate.common.database_url import is_database_url, parse_database_url
from turngate.common.sharding import SINGLE_SHARD, Shard
from turngate.errors import NoRecordings
from turngate.store.connection import Durability
from turngate.store.projects import DEFAULT_PROJECT, locate_project
from turngate.store.shared.store import SharedStore
from turngate.store.store import Store


def open_store(
    data: str, durability: Durability = "process", shard: Shard = SINGLE_SHARD, *, answer_s: float | None = None
) -> Store:
    """Open a store for reading and writing, and create it if necessary.

    With `answer_s`, a query to a shared store fails if it is not answered within that many seconds.
    """
    if is_database_url(data):
        return SharedStore(parse_database_url(data), answer_s=answer_s)
    return Store(Path(data), durability, shard)


def open_store_for_reading(data: str | Path) -> Store:
    """Open a store read-only. Gateways may be writing to it at the same time."""
    if is_database_url(str(data)):
        return SharedStore(parse_database_url(str(data)), read_only=True)
    return Store.reading(Path(data))


def open_all_projects(data: str, *, read_only: bool = False) -> Iterator[tuple[str, Store]]:
    """Yield each project's name and store. The first project is `default`, whose store is the one that `data` names.

    Each store is closed when the next one is requested. With `read_only`, projects that have no store yet are left out. Raise
    `NoRecordings` if `data` names no store.
    """
    if not is_database_url(data) and not (Path(data) / "turngate.db").is_file():
        raise NoRecordings.in_folder(Path(data))
    if is_database_url(data):
        open_store_for_reading(data).close()  # raises an error if there are no tables; `open_store` would create them
    names = [DEFAULT_PROJECT]
    while names:
        name = names.pop(0)
        where = locate_project(data, name)
        try:
            store = open_store_for_reading(where) if read_only else open_store(where)
        except NoRecordings:
            if name == DEFAULT_PROJECT:
                raise
            continue
        try:
            if name == DEFAULT_PROJECT:
                names += [project.name for project in store.projects.list_projects() if project.name != name]
            yield name, store
        finally:
            store.close()


def count_unfinished(data: str, project: str) -> int:
    """Return how many sessions of a project are open, or are in a cell that has not shipped them yet."""
    where = locate_project(data, project)
    if not is_database_url(where) and not (Path(where) / "turngate.db").is_file():
        return 0  # nothing was recorded yet
    store = open_store(where) if is_database_url(where) else Store.reading(Path(where))
    query = (
        "SELECT (SELECT count(*) FROM sessions WHERE status='open') + (SELECT count(*) FROM attempts WHERE state='running'"
        " AND session<>'' AND NOT EXISTS (SELECT 1 FROM sessions WHERE sessions.id=attempts.session))"
    )
    try:
        with store.database.reading() as db:
            return int(db.execute(query).fetchone()[0])
    finally:
        store.close()
