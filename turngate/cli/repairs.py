"""`turngate tasks make repairs`: make repair tasks from packages with tests, and print a summary."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
from rich.console import Console
from rich.table import Table

from turngate.cli.options import MakeRepairsOptions
from turngate.cli.signals import cancel_on_signal
from turngate.common.terminal import console as new_console
from turngate.common.terminal import sanitize_line, say
from turngate.errors import ConfigError, TaskError
from turngate.sandboxes import get_backend
from turngate.tasks.repairs.make import (
    Fate,
    Hint,
    PackageRepairs,
    RepairSettings,
    Split,
    build_row,
    describe_package,
    make_repairs,
    split_packages,
)
from turngate.tasks.repairs.package import Package, load_package

SPLITS: tuple[Split, ...] = get_args(Split)
PACKAGES_FILE = "packages.json"
_HEADINGS: dict[Fate, str] = {
    "not caught by tests": "not caught by tests",
    "breaks most tests": "break most",
    "hangs": "hang",
    "duplicate": "duplicates",
    "function has enough bugs": "function has enough",
}


def make_repair_tasks(options: MakeRepairsOptions) -> bool:
    """Make the tasks and write them. Return whether every source produced at least one task."""
    console = new_console()
    if options.hint not in get_args(Hint):
        raise ConfigError(f"hint must be one of {', '.join(get_args(Hint))}, not {options.hint!r}", param="hint")
    if options.concurrency < 1:
        raise ConfigError(f"concurrency must be at least 1, not {options.concurrency}", param="concurrency")
    if options.out.exists() and not options.out.is_dir():
        raise ConfigError(f"out: {options.out} is not a folder; choose a new folder", param="out")
    if options.out.exists() and any(options.out.iterdir()):
        raise ConfigError(f"out: {options.out} is not empty; choose a new folder", param="out")
    settings = RepairSettings(
        per_package=options.per_package,
        seed=options.seed,
        hint=msgspec.convert(options.hint, Hint),
        benches=min(2, options.concurrency),
        image=options.image,
    )
    packages = [load_package(source) for source in options.sources]
    named: dict[str, str] = {}
    for package, source in zip(packages, options.sources, strict=True):
        if package.slug in named:
            raise ConfigError(
                f"sources: {named[package.slug]} and {source} are both the package {package.name!r}; list each package once",
                param="sources",
            )
        named[package.slug] = source
    splits = split_packages([package.name for package in packages], options.held_out, options.seed)
    made = asyncio.run(cancel_on_signal(_make_all(packages, options, settings, console), console))
    if made is None:
        raise KeyboardInterrupt
    _write(made, splits, settings, options.out)
    _print_summary(made, splits, options.out, console)
    return len(made) == len(packages) and all(one.repairs for one in made)


async def _make_all(
    packages: Sequence[Package], options: MakeRepairsOptions, settings: RepairSettings, console: Console
) -> list[PackageRepairs] | None:
    """Make the tasks of each package. Report and skip a package whose tests cannot be used. Return None if interrupted."""
    backend = get_backend(options.sandbox)
    slots = asyncio.Semaphore(max(1, options.concurrency // settings.benches))

    async def make_one(package: Package) -> PackageRepairs | None:
        async with slots:
            try:
                made = await make_repairs(package, backend, settings)
            except TaskError as error:
                say(console, sanitize_line(error.message), "red")
                return None
            count, tried = len(made.repairs), sum(made.fates.values())
            say(console, f"{sanitize_line(package.name)}: tasks made: {count}, bugs tried: {tried}")
            return made

    try:
        await backend.check()
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(make_one(package)) for package in packages]
    except asyncio.CancelledError:
        return None
    return [made for task in running if (made := task.result()) is not None]


def _write(made: Sequence[PackageRepairs], splits: dict[str, Split], settings: RepairSettings, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        rows = [
            build_row(one, repair, settings, split)
            for one in made
            if splits[one.package.name] == split
            for repair in one.repairs
        ]
        if rows:
            content = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
            (out / f"{split}.jsonl").write_bytes(content)
    about = [dict(describe_package(one, splits[one.package.name])) for one in made]
    (out / PACKAGES_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(about)) + b"\n")


def _print_summary(made: Sequence[PackageRepairs], splits: dict[str, Split], out: Path, console: Console) -> None:
    table = Table(title=f"Repair tasks in {sanitize_line(str(out))}", title_justify="left")
    for heading in ("package", "license", "split", "tasks", *_HEADINGS.values()):
        table.add_column(heading, overflow="fold")
    for one in made:
        fates = [one.fates.get(fate, 0) for fate in _HEADINGS]
        table.add_row(
            sanitize_line(f"{one.package.name} {one.package.version}"),
            sanitize_line(one.package.license) or "not stated",
            splits[one.package.name],
            str(len(one.repairs)),
            *map(str, fates),
        )
    console.print(table)
    first = next(
        (split for split in SPLITS if any(one.repairs and splits[one.package.name] == split for one in made)), None
    )
    if first is not None:
        say(console, f"To prove the tasks, run: turngate tasks check {sanitize_line(str(out))}/{first}.jsonl", "dim")
