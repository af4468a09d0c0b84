"""`turngate mark-restored`: mark a store as restored from a backup, so that trainers must state their positions again."""

from __future__ import annotations

from turngate.common.database_url import refuse_password_flag
from turngate.common.terminal import console, say
from turngate.store.location import open_all_projects


def mark_restored(data: str) -> None:
    """Give a store, and the stores of its projects, a new history. A gateway on a folder must be stopped first."""
    refuse_password_flag(data)
    for project, store in open_all_projects(data):
        store.restores.note(store.restores.history())
        feeds = len(store.feeds.listing())
        say(
            console(),
            f"project {project}: restore noted; feeds to open again with the number in the trainer's checkpoint: {feeds}",
        )
