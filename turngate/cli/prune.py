"""`turngate prune` and `turngate load-archive`: remove old sessions from a store, and load archived sessions into a data folder."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from turngate.common.database_url import is_database_url, refuse_password_flag
from turngate.common.terminal import console, sanitize_line, say
from turngate.errors import ConfigError
from turngate.store.location import open_all_projects
from turngate.store.projects import DEFAULT_PROJECT
from turngate.store.pruning import PruneResult, load_archive, locate_archive, prune
from turngate.store.session_archive import SessionArchive
from turngate.store.store import Store

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def prune_stores(data: str, older_than: str, archive: Path | None, dry_run: bool, as_json: bool) -> None:
    """Remove old sessions from a store and from the stores of its projects, and print how many were removed and kept.

    With `archive`, first add the sessions to the archive in that folder. With `dry_run`, change nothing, and print how many sessions would
    be removed and kept.
    """
    refuse_password_flag(data)
    before = time.time() - parse_age(older_than)
    results = {
        project: prune(store, before, locate_archive(archive, project), dry_run=dry_run)
        for project, store in open_all_projects(data, read_only=dry_run)
    }
    if as_json:
        print(msgspec.json.encode({"dry_run": dry_run, "projects": results}, enc_hook=str).decode())
        return
    for project, result in results.items():
        _print_result("" if project == DEFAULT_PROJECT else f"project {project}: ", result, dry_run)


def parse_age(text: str) -> float:
    """Convert an age such as 30d to seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text.strip())
    if found is None:
        raise ConfigError(
            f"older_than must be a number of minutes (m), hours (h), days (d) or weeks (w), such as 30d, not {text!r}",
            param="older_than",
        )
    return float(found[1]) * _UNITS[found[2]]


def _print_result(prefix: str, result: PruneResult, dry_run: bool) -> None:
    out = console()
    verb = "would remove" if dry_run else "removed"
    archived = f" (written to the archive: {result.archived:,})" if result.files else ""
    say(out, f"{prefix}{verb} {_count(result.removed)}{archived}; kept {_count(result.kept.total())}")
    for file in result.files:
        say(out, f"  archive  {file}")
    for reason, count in result.kept.most_common():
        say(out, f"  kept     {count:,} × {sanitize_line(reason)}", "yellow")


def load_sessions(archive: Path, data: str, sessions: Sequence[str]) -> None:
    """Add sessions from an archive to a data folder, and print how many were added. If `sessions` is empty, add every session."""
    if is_database_url(data):
        raise ConfigError(
            "data: an archive can only be loaded into a folder, not into a database; pass a folder", param="data"
        )
    if not SessionArchive(archive).files():
        raise ConfigError(
            f"archive: {archive} has no sessions; pass the folder that `turngate prune --archive` wrote to or, for the sessions of a "
            "project, its subfolder projects/NAME",
            param="archive",
        )
    store = Store(Path(data))
    try:
        added, had = load_archive(archive, store, sessions)
    finally:
        store.close()
    say(console(), f"added {_count(added)} to {data}" + (f"; already there: {had:,}" if had else ""))


def _count(sessions: int) -> str:
    return f"{sessions:,} session{'' if sessions == 1 else 's'}"
