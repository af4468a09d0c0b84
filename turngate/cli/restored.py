"""`turngate mark-restored`: mark a store as restored from a backup. Trainers must then reopen feeds at the position in their checkpoint."""

from __future__ import annotations

from turngate.common.database_url import refuse_password_flag
from turngate.common.terminal import console, say
from turngate.store.location import open_all_projects


def mark_restored(data: str) -> None:
    """Mark a store and the stores of its projects as restored. The gateway of a data folder must be stopped first."""
    refuse_password_flag(data)
    for project, store in open_all_projects(data):
        store.restores.note(store.restores.history())
        count = len(store.feeds.listing())
        say(
            console(),
            f"project {project}: marked as restored; trainers must reopen each feed at the position in their checkpoint (feeds: {count})",
        )
