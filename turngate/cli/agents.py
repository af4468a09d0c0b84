"""What `turngate agents`, `agents install` and `agents check` do and print."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from turngate.agents.install import ensure, missing
from turngate.agents.spec import catalog, find
from turngate.cli.run import Watching
from turngate.cli.show import safe
from turngate.rollout.check import Report, Staging
from turngate.rollout.check import check as checked
from turngate.sandboxes import backend


def listing() -> None:
    table = Table(title="Agents", title_justify="left")
    for heading in ("name", "what", "version", "dialect", "here"):
        table.add_column(heading, overflow="fold")
    notes = []
    for name, found in catalog().items():
        spec = found.spec
        packaged = bool(spec.install.npm or spec.install.pip)
        here = ("yes" if missing(spec) is None else "on first use") if packaged else "as it is in the sandbox"
        table.add_row(name, spec.title, spec.install.version or "–", spec.dialect, here)
        if found.shadows is not None:
            notes.append(f"{name}: {found.file} takes the place of {found.shadows}")
    console = Console(highlight=False)
    console.print(table)
    for note in notes:
        console.print(note, style="yellow", markup=False)
    console.print("turngate agents check NAME runs one and says whether it was captured whole.", style="dim")


def install(names: list[str]) -> None:
    for name in names:
        spec = find(name).spec
        made = ensure(spec, lambda line: print(line, file=sys.stderr))
        print(f"{spec.name} {spec.install.version}: {made.folder or 'nothing to install'}")


def check(name: str, sandbox: str, image: str, keep: Path | None) -> bool:
    """Print the findings; True if every one is as it should be."""
    spec = find(name).spec
    console = Console(highlight=False)
    installed = ensure(spec, lambda line: console.print(line, style="dim", markup=False))
    place = backend(sandbox)

    async def run(folder: Path) -> Report:
        await place.check()
        await place.sweep()
        with Watching(console) as watching:
            return await checked(spec, installed, place, folder, Staging(image=image), watching.see)

    with tempfile.TemporaryDirectory(prefix="turngate-check-") as scratch:
        report = asyncio.run(run(keep or Path(scratch)))
    _tell(report, console)
    if keep is not None:
        console.print(f"look: turngate show {report.outcome.session} --data {keep / 'data'}", style="dim")
    return report.whole


def _tell(report: Report, console: Console) -> None:
    outcome = report.outcome
    table = Table(
        title=f"{outcome.agent} {outcome.version} in the {outcome.sandbox} sandbox: {outcome.turns} turns, "
        f"{outcome.sampled_tokens} sampled tokens",
        title_justify="left",
    )
    for heading in ("", "what", "seen"):
        table.add_column(heading, overflow="fold")
    for finding in report.findings:
        mark = Text("yes", style="green") if finding.ok else Text("NO", style="bold red")
        table.add_row(mark, finding.what, Text(safe(finding.detail)))
    console.print(table)
    verdict = "Captured whole." if report.whole else "NOT captured whole."
    console.print(verdict, style="bold green" if report.whole else "bold red")
