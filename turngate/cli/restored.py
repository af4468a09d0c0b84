"""`turngate mark-restored`: note that a store was restored from a backup, so that trainers must state their positions again."""

from __future__ import annotations

from pathlib import Path

from turngate.common.database_url import is_database_url, refuse_password_flag
from turngate.common.terminal import console, say
from turngate.errors import ConfigError
from turngate.store.location import open_store
from turngate.store.projects import DEFAULT_PROJECT, locate_project
from turngate.store.sqlite import Store


def mark_restored(data: str) -> None:
    """Give a store, and the stores of its projects, a new history. A gateway on a folder must be stopped first."""
    refuse_password_flag(data)
    if not is_database_url(data) and not (Path(data) / "turngate.db").is_file():
        raise ConfigError(f"data: no turngate.db in {data}; pass the --data folder of a gateway", param="data")
    store = open_store(data)
    try:
        projects = [project.name for project in store.projects.list_projects() if project.name != DEFAULT_PROJECT]
        _mark(store, DEFAULT_PROJECT)
    finally:
        store.close()
    for project in projects:
        store = open_store(locate_project(data, project))
        try:
            _mark(store, project)
        finally:
            store.close()


def _mark(store: Store, project: str) -> None:
    store.restores.note(store.restores.history())
    say(
        console(),
        f"project {project}: restore noted; feeds to open again with the number in the trainer's checkpoint: {len(store.feeds.listing())}",
    )
