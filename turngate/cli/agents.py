"""`turngate agents` and its subcommands: list, install and check agents, and create the description of a new one."""

from __future__ import annotations

import asyncio
import shlex
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turngate.agents.install import ensure_installed, explain_missing
from turngate.agents.spec import AgentSpec, find_agent, load_catalog, parse_spec
from turngate.cli.prepare import parse_agent_options
from turngate.cli.run import RolloutDisplay
from turngate.cli.signals import cancel_on_signal
from turngate.common.terminal import console as new_console
from turngate.common.terminal import sanitize, say
from turngate.errors import AgentError
from turngate.rollout.agent_check import CheckOptions, CheckReport
from turngate.rollout.agent_check import check_agent as check_recording
from turngate.rollout.agent_draft import find_secrets, write_description
from turngate.rollout.agent_watch import COMMAND, WatchedRun, watch_command
from turngate.rollout.redaction import Redactor, is_secret, redact_command
from turngate.sandboxes import get_backend


def list_agents() -> None:
    table = Table(title="Agents", title_justify="left")
    for heading in ("name", "title", "version", "dialect", "installed"):
        table.add_column(heading, overflow="fold")
    notes = []
    for name, found in load_catalog().items():
        spec = found.spec
        table.add_row(name, sanitize(spec.title), spec.install.version or "–", spec.dialect, _installation(spec))
        if found.shadows is not None:
            notes.append(f"{name}: {found.file} overrides {found.shadows}")
    console = new_console()
    console.print(table)
    for note in notes:
        say(console, note, "yellow")
    say(console, "Run `turngate agents check NAME` to run an agent and check that everything was recorded.", "dim")


def _installation(spec: AgentSpec) -> str:
    if not (spec.install.npm or spec.install.pip):
        return "by the sandbox"
    return "yes" if explain_missing(spec) is None else "on first use"


def install_agents(names: list[str]) -> None:
    for spec in [find_agent(name).spec for name in names]:  # find all agents before installing the first one
        installed = ensure_installed(spec, lambda line: print(line, file=sys.stderr))
        print(f"{spec.name} {spec.install.version}: {installed.folder or 'nothing to install'}".replace(" :", ":"))


def check_agent(name: str, sandbox: str, image: str, keep: Path | None, settings: list[str]) -> bool:
    """Run an agent against the scripted engine, print the findings, and return whether every check passed."""
    spec = find_agent(name).spec
    if not spec.check:
        raise AgentError(
            f"agent {spec.name} has no [[check]] steps to run; add them to the agent's file or, for a preset, to a copy of its file "
            "(see turngate/agents/catalog for examples), and run `turngate agents check ./FILE.toml`",
            param="check",
        )
    options = CheckOptions(image=image, options=parse_agent_options(settings))
    console = new_console()
    sandboxes = get_backend(sandbox)
    installed = ensure_installed(spec, lambda line: say(console, line, "dim"))

    async def run(folder: Path) -> CheckReport:
        await sandboxes.check()
        await sandboxes.sweep()
        with RolloutDisplay(console) as display:
            return await check_recording(spec, installed, sandboxes, folder, options, display.update)

    with tempfile.TemporaryDirectory(prefix="turngate-check-") as scratch:
        try:
            report = asyncio.run(cancel_on_signal(run(keep or Path(scratch)), console))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    _print_report(report, console)
    if keep is not None and report.outcome.session:
        say(console, f"inspect: turngate show {report.outcome.session} --data {shlex.quote(str(keep / 'data'))}", "dim")
    return report.passed


def create_agent(name: str, command: list[str], variables: list[str], timeout_s: float) -> None:
    """Run a command once, watch what it does, and describe it as an agent in NAME.toml."""
    file = Path(f"{name}.toml")
    if file.exists():
        raise AgentError(f"{file} already exists; move it, or choose a different name", param="name")
    env = dict(_split_variable(text) for text in variables)
    console = new_console()
    say(console, f"running: {shlex.join(redact_command(command))}", "dim")
    watching = watch_command(name, command, env, get_backend("local"), timeout_s=timeout_s)
    try:
        run = asyncio.run(cancel_on_signal(watching, console))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    secrets = Redactor({name: value for name, value in env.items() if is_secret(name, value)})
    run = msgspec.structs.replace(run, output=secrets.redact_text(run.output))
    text = write_description(name, command, env, run)
    parse_spec(text, str(file))
    file.write_text(text, encoding="utf-8")
    _print_watched(run, console)
    if left_out := find_secrets(command, env):
        message = (
            f"values that look like secrets were left out of these fields in {file}: {', '.join(left_out)}; "
            "add them if the agent needs them"
        )
        say(console, sanitize(message), "yellow")
    say(console, f"wrote {file}; now run: turngate agents check ./{file}", "bold green")


def _split_variable(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise AgentError(f"--env must be NAME=VALUE, not {text!r}", param="env")
    return name, value


def _print_watched(run: WatchedRun, console: Console) -> None:
    calls = [call for call in run.calls if call.samples]
    tools = dict.fromkeys(tool.name for call in calls for tool in call.tools)
    asked = dict.fromkeys(f"{key} {value}" for call in calls for key, value in call.sampling.items())
    lines = {
        "requests": dict.fromkeys(f"{call.method} {call.path}" for call in run.calls),
        "endpoint and key read from": ["the command or --env" if name == COMMAND else name for name in run.variables],
        "tools offered": tools,
        "sampling requested": asked,
        "refused": dict.fromkeys(f"{call.status} {call.error[:200]}" for call in run.calls if call.is_refused),
    }
    for label, values in lines.items():
        say(console, sanitize(f"{label}: {', '.join(values) or 'none'}"), "dim")
    if run.exit_code != 0:
        ended = "the command timed out" if run.exit_code is None else f"the command exited with code {run.exit_code}"
        say(console, sanitize(f"note: {ended}; it printed: {run.output[-300:] or 'nothing'}"), "yellow")


def _print_report(report: CheckReport, console: Console) -> None:
    outcome = report.outcome
    agent = f"{outcome.agent} {outcome.version}".strip()
    table = Table(
        title=f"{agent} in the {outcome.sandbox} sandbox (turns: {outcome.turns}, "
        f"sampled tokens: {outcome.sampled_tokens})",
        title_justify="left",
    )
    for heading in ("", "check", "seen"):
        table.add_column(heading, overflow="fold")
    for finding in report.results:
        mark = Text("yes", style="green") if finding.ok else Text("NO", style="bold red")
        table.add_row(mark, finding.name, Text(sanitize(finding.detail)))
    console.print(table)
    say(console, sanitize(f"tools offered: {', '.join(report.tools) or 'none'}"), "dim")
    failed = sum(not finding.ok for finding in report.results)
    verdict = f"{failed} of {len(report.results)} checks failed." if failed else "Everything was recorded."
    console.print(verdict, style="bold green" if report.passed else "bold red")
