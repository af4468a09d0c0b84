"""Check a cell: whether the shared store answers, and whether the cell ships its ended sessions there in time."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from turngate.common.database_url import parse_database_url
from turngate.config import ServeConfig
from turngate.doctor.context import DoctorContext
from turngate.doctor.finding import CheckOutcome, failure, not_checked, ok, warning
from turngate.errors import ConfigError
from turngate.store.shared.store import SharedStore
from turngate.store.store import Store

_MAX_NAMED = 10  # maximum number of cells named in a finding
_LATE_S = 60.0  # a session that should have been shipped this long ago is late


async def check_shared_store(context: DoctorContext) -> list[CheckOutcome]:
    """Check that the shared store answers, and that this cell ships its sessions in time."""
    if not context.config.shared:
        return [not_checked("not a cell", "to check a cell, pass --shared or set TURNGATE_SHARED")]
    return await asyncio.to_thread(_check, context.config)


def _check(config: ServeConfig) -> list[CheckOutcome]:
    url = parse_database_url(config.shared)
    began = time.monotonic()
    try:
        shared = SharedStore(url, read_only=True)
    except ConfigError as error:
        return [
            failure(
                error.message.removeprefix("data: "),
                "do what the message says; if PostgreSQL does not answer, start it, and check the URL and the password",
            )
        ]
    try:
        answered_s = time.monotonic() - began
        cells = [cell for cell in shared.cells.list_cells() if cell.left_s > 0]
    finally:
        shared.close()
    names = ", ".join(cell.name for cell in cells[:_MAX_NAMED]) + (", …" if len(cells) > _MAX_NAMED else "") or "none"
    found = [ok(f"{url.name} answered in {answered_s * 1000:.0f} ms; cells with a lease: {names}")]
    return found + _check_outbox(Path(config.data))


def _check_outbox(data: Path) -> list[CheckOutcome]:
    if not (data / "turngate.db").is_file():
        return []
    store = Store.reading(data)
    try:
        state, failures = store.outbox.state(), store.outbox.failures(3)
    finally:
        store.close()
    waited = 0.0 if state.oldest_due is None else time.time() - state.oldest_due
    if failures:
        names = "; ".join(f"{session}: {error}" for session, error in failures)
        fix = "the sessions stay in this cell; restore damaged ones from a backup of the data folder, then restart the cell"
        return [failure(f"sessions that cannot be shipped: {state.failed} ({names})", fix)]
    message = f"ended sessions not in the shared store yet: {state.unshipped}"
    if waited > _LATE_S:
        return [
            warning(
                f"{message}; the oldest should have been shipped {waited:.0f} s ago",
                "start the cell; if it is running, check its log",
            )
        ]
    return [ok(message)]
