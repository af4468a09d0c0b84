"""What `turngate agents`, `agents install` and `agents check` do and print."""

from __future__ import annotations

import asyncio
import shlex
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from turngate.agents.install import ensure_installed, explain_missing
from turngate.agents.spec import AgentSpec, find_agent, load_catalog
from turngate.cli.run import Watching, stoppable
from turngate.cli.terminal import console as new_console
from turngate.cli.terminal import sanitize, say
from turngate.errors import AgentError
from turngate.rollout.agent_check import CheckOptions, CheckReport
from turngate.rollout.agent_check import check_agent as checked
from turngate.sandboxes import get_backend


def listing() -> None:
    table = Table(title="Agents", title_justify="left")
    for heading in ("name", "what", "version", "dialect", "here"):
        table.add_column(heading, overflow="fold")
    notes = []
    for name, found in load_catalog().items():
        spec = found.spec
        table.add_row(name, sanitize(spec.title), spec.install.version or "–", spec.dialect, _here(spec))
        if found.shadows is not None:
            notes.append(f"{name}: {found.file} takes the place of {found.shadows}")
    console = new_console()
    console.print(table)
    for note in notes:
        say(console, note, "yellow")
    say(console, "turngate agents check NAME runs one and says whether it was captured whole.", "dim")


def _here(spec: AgentSpec) -> str:
    if not (spec.install.npm or spec.install.pip):
        return "as it is in the sandbox"
    return "yes" if explain_missing(spec) is None else "on first use"


def install(names: list[str]) -> None:
    for spec in [find_agent(name).spec for name in names]:  # all of them are looked for before one is installed
        made = ensure_installed(spec, lambda line: print(line, file=sys.stderr))
        print(f"{spec.name} {spec.install.version}: {made.folder or 'nothing to install'}".replace(" :", ":"))


def check(name: str, sandbox: str, image: str, keep: Path | None) -> bool:
    """Print the findings; True if every one is as it should be."""
    spec = find_agent(name).spec
    if not spec.check:
        raise AgentError(
            f"{spec.name}: check: there are no [[check]] steps to play; describe your command in a file with some "
            "(turngate/agents/catalog has examples), and check that",
            param="check",
        )
    console = new_console()
    place = get_backend(sandbox)
    installed = ensure_installed(spec, lambda line: say(console, line, "dim"))

    async def run(folder: Path) -> CheckReport:
        await place.check()
        await place.sweep()
        with Watching(console) as watching:
            return await checked(spec, installed, place, folder, CheckOptions(image=image), watching.see)

    with tempfile.TemporaryDirectory(prefix="turngate-check-") as scratch:
        try:
            report = asyncio.run(stoppable(run(keep or Path(scratch)), console))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    _tell(report, console)
    if keep is not None and report.outcome.session:
        say(console, f"look: turngate show {report.outcome.session} --data {shlex.quote(str(keep / 'data'))}", "dim")
    return report.passed


def _tell(report: CheckReport, console: Console) -> None:
    outcome = report.outcome
    table = Table(
        title=f"{outcome.agent} {outcome.version} in the {outcome.sandbox} sandbox: {outcome.turns} turns, "
        f"{outcome.sampled_tokens} sampled tokens",
        title_justify="left",
    )
    for heading in ("", "what", "seen"):
        table.add_column(heading, overflow="fold")
    for finding in report.results:
        mark = Text("yes", style="green") if finding.ok else Text("NO", style="bold red")
        table.add_row(mark, finding.name, Text(sanitize(finding.detail)))
    console.print(table)
    verdict = "Captured whole." if report.passed else "NOT captured whole."
    console.print(verdict, style="bold green" if report.passed else "bold red")
