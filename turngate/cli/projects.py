"""Implement `turngate projects`, `turngate keys` and `turngate audit`: send requests to a running gateway and print the replies."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.table import Table

from turngate.client.keys import read_admin_key
from turngate.client.projects import ProjectClient
from turngate.client.protocol import KeyView, NewKey, ProjectView
from turngate.common.terminal import console as new_console
from turngate.common.terminal import say
from turngate.errors import ConfigError
from turngate.store.audit import AuditEntry

T = TypeVar("T")


def ask(gateway: str, request: Callable[[ProjectClient], Awaitable[T]]) -> T:
    """Send a request to a gateway, using the key in TURNGATE_ADMIN_KEY, and return the reply."""

    async def send() -> T:
        async with ProjectClient(gateway, read_admin_key()) as client:
            return await request(client)

    return asyncio.run(send())


def parse_quotas(**given: int | None) -> dict[str, int]:
    """Return the quotas that the flags set for a new project. A value of 0 means no limit."""
    return {name: value for name, value in given.items() if value}


async def change_project(client: ProjectClient, name: str, weight: float | None, **given: int | None) -> ProjectView:
    """Change the weight and quotas of a project. An argument that is None changes nothing. A quota of 0 removes the limit."""
    if all(value is None for value in given.values()):
        return await client.change_project(name, weight=weight)
    old = next((msgspec.structs.asdict(one.quotas) for one in await client.projects() if one.name == name), {})
    new = {quota: old.get(quota) if value is None else value or None for quota, value in given.items()}
    return await client.change_project(name, weight=weight, quotas=new)


def print_projects(projects: Sequence[ProjectView], as_json: bool) -> None:
    if as_json:
        _print_json({"projects": projects})
        return
    rows = [
        (
            project.name,
            f"{project.weight:g}",
            _limit(project.quotas.live_sessions),
            _limit(project.quotas.tokens_per_day),
            _limit(project.quotas.stored_bytes),
            str(project.keys),
        )
        for project in projects
    ]
    _print_table(("project", "weight", "live sessions", "tokens per day", "stored bytes", "keys"), rows)


def print_keys(keys: Sequence[KeyView], as_json: bool) -> None:
    if as_json:
        _print_json({"keys": keys})
        return
    rows = [(key.prefix, key.project, " ".join(key.scopes), _state(key), key.note) for key in keys]
    _print_table(("key", "project", "scopes", "state", "note"), rows)


def show_new_key(new: NewKey, out: Path | None, as_json: bool) -> None:
    """Print a new key or, if it was written to the file `out`, the path of that file."""
    if out is None:
        if as_json:
            _print_json(new)
        else:
            print(new.key)
        return
    _print_json({**msgspec.to_builtins(new), "key": str(out)}) if as_json else say(
        new_console(), f"Wrote key {new.prefix} to {out}."
    )


def open_key_file(out: Path) -> int:
    """Create a file for a key and return its descriptor. Do this before creating the key: a key that cannot be written would be lost."""
    try:
        return os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"out: {out} already exists; choose another file", param="out") from None
    except OSError as error:
        raise ConfigError(f"out: cannot create {out} ({error.strerror}); choose another file", param="out") from None


def create_key(gateway: str, request: Callable[[ProjectClient], Awaitable[NewKey]], out: Path | None) -> NewKey:
    """Send a request that creates a key. If `out` is set, write the key to that file."""
    if out is None:
        return ask(gateway, request)
    with os.fdopen(open_key_file(out), "w", encoding="utf-8") as file:
        try:
            new = ask(gateway, request)
        except BaseException:
            out.unlink(missing_ok=True)
            raise
        file.write(new.key + "\n")
    return new


def print_audit(entries: Sequence[AuditEntry], as_json: bool) -> None:
    if as_json:
        _print_json({"entries": entries})
        return
    rows = [
        (
            str(entry.number),
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry.at)),
            entry.actor,
            entry.project,
            entry.action,
            entry.subject,
        )
        for entry in entries
    ]
    _print_table(("number", "time (UTC)", "who", "project", "action", "what"), rows)


def _print_json(value: Any) -> None:
    print(msgspec.json.encode(value).decode())


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    new_console().print(table)


def _limit(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _state(key: KeyView) -> str:
    if key.revoked is not None:
        return "revoked"
    if key.expires is None:
        return "valid"
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(key.expires))
    return f"valid until {day}" if key.valid else f"expired {day}"
