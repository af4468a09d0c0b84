"""Wait until each process that follows the shared fence has carried out a change or can no longer serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from turngate.store.shared.fence import FenceFollowerRow, FenceTable

log = logging.getLogger("turngate")
POLL_S = 0.1  # between checks of the followers
_PRUNE_S = 3600.0


def find_blocking(
    rows: Sequence[FenceFollowerRow], epoch: int, since: float, *, drains: bool = False
) -> list[FenceFollowerRow]:
    """Return the followers that may still serve without having carried out the change `epoch`.

    A follower may serve for `ttl` seconds after each report. `since` is a time after the change was written. A follower that reports
    after `since` receives the change in the reply, so the report does not extend the time for which it may serve without the change.
    If the change is a drain, the follower may still have calls in flight, so each report extends this time.
    """
    return [
        row for row in rows if row.epoch < epoch and row.now < (row.seen if drains else min(row.seen, since)) + row.ttl
    ]


def find_busy(rows: Sequence[FenceFollowerRow], url: str) -> list[FenceFollowerRow]:
    """Return the followers that have calls at a draining engine.

    A follower that has not reported for `ttl` seconds is left out, because it has aborted its calls by then.
    """
    return [row for row in rows if url in row.busy.split() and row.now < row.seen + row.ttl]


async def wait_for_followers(table: FenceTable, epoch: int, *, drains: bool = False) -> None:
    """Wait until every follower has carried out the change `epoch` or can no longer serve. With `drains`, the change is a drain."""
    rows = await asyncio.to_thread(table.list_followers)
    since = max((row.now for row in rows), default=0.0)
    while find_blocking(rows, epoch, since, drains=drains):
        await asyncio.sleep(POLL_S)
        rows = await asyncio.to_thread(table.list_followers)
    late = [row.name for row in rows if row.epoch < epoch and row.seen + row.ttl > since]
    if late:
        log.warning(
            "these cells have not confirmed a change to the fence or the engines: %s; they start no new calls until they have applied it",
            ", ".join(late),
        )
    await asyncio.to_thread(table.prune, _PRUNE_S)


async def wait_until_idle_everywhere(table: FenceTable, url: str) -> None:
    """Wait until no follower has calls at an engine. Call this after all followers know that the engine is draining."""
    rows = await asyncio.to_thread(table.list_followers)
    while find_busy(rows, url):
        await asyncio.sleep(POLL_S)
        rows = await asyncio.to_thread(table.list_followers)
