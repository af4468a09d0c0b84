"""`turngate doctor`: run the checks and print the findings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec
from rich.text import Text

from turngate import __version__
from turngate.agents.spec import find_agent
from turngate.cli.options import DoctorOptions
from turngate.cli.serve import load_optional_cell_config
from turngate.client.gateway import GatewayClient
from turngate.client.keys import read_admin_key
from turngate.common.terminal import console as new_console
from turngate.common.terminal import say
from turngate.common.validation import suggestion
from turngate.config import ServeConfig
from turngate.doctor import CHECKS, CheckState, DoctorContext, Finding, diagnose
from turngate.errors import ConfigError
from turngate.sandboxes import BACKENDS
from turngate.server.engine_factory import read_engine_key
from turngate.telemetry import logs

_STYLES: dict[CheckState, str] = {"ok": "green", "warning": "yellow", "failure": "bold red", "not checked": "dim"}
_ALLOWED_WITH_GATEWAY = ("log_format",)  # settings that may be combined with --gateway


class Report(msgspec.Struct, frozen=True):
    version: str
    passed: bool  # no check failed
    counts: dict[str, int]
    findings: list[Finding]


def run_checks(options: DoctorOptions) -> bool:
    """Run the checks, print the findings, and return True if no check failed."""
    subject = _build_subject(options)
    only = _select_checks(options)
    # Log only errors, because logged warnings would repeat the findings.
    with logs.log_to_stderr("text", logging.ERROR):
        findings = asyncio.run(diagnose(subject, only))
    passed = not any(finding.state == "failure" for finding in findings)
    if options.as_json:
        counts: dict[str, int] = {state: sum(finding.state == state for finding in findings) for state in _STYLES}
        print(msgspec.json.encode(Report(__version__, passed, counts, findings)).decode())
    else:
        _print_findings(findings)
    return passed


def _select_checks(options: DoctorOptions) -> tuple[str, ...]:
    """Return the names of the checks that were passed as --only.

    Raise ConfigError if a check is unknown, if it needs --gateway but --gateway was not passed, or if it cannot run with --gateway.
    """
    checks = {check.name: check for check in CHECKS}
    for name in options.only or ():
        if name not in checks:
            raise ConfigError(f"unknown check {name!r} in --only{suggestion(name, list(checks))}", param="only")
        if checks[name].where == "gateway" and not options.gateway:
            raise ConfigError(f"check {name!r} needs a running gateway; also pass --gateway URL", param="only")
        if checks[name].where == "here" and options.gateway:
            raise ConfigError(
                f"check {name!r} inspects the gateway's machine; run it there without --gateway", param="only"
            )
    return tuple(options.only or ())


def _build_subject(options: DoctorOptions) -> DoctorContext:
    for name in options.sandbox or ():
        if name not in BACKENDS:
            raise ConfigError(f"sandbox must be one of {', '.join(BACKENDS)}, not {name!r}", param="sandbox")
    for name in options.agent or ():
        find_agent(name)  # raises an error that lists the available agents
    gateway, key = options.gateway, ""
    if gateway:
        for name, value in {"config": options.config, **options.settings}.items():
            if value is not None and name not in _ALLOWED_WITH_GATEWAY:
                flag = ("no-" if value is False else "") + name.replace("_", "-")
                raise ConfigError(
                    f"{name} cannot be set for the running gateway at {gateway}; remove --{flag}", param=name
                )
        key = read_admin_key()
        GatewayClient(gateway, key)  # raises an error if the URL is malformed
        config = ServeConfig()
    else:
        config = load_optional_cell_config(options)
        read_engine_key(config)  # raises an error if the environment variable is not set
    return DoctorContext(
        config,
        gateway=gateway,
        admin_key=key,
        agents=tuple(options.agent or ()),
        sandboxes=tuple(options.sandbox or ()),
        image=options.image,
    )


def _print_findings(findings: Sequence[Finding]) -> None:
    console = new_console()
    previous = ""
    for finding in findings:
        name = finding.check if finding.check != previous else ""
        previous = finding.check
        line = Text(f"{finding.state:<12}", style=_STYLES[finding.state])
        line.append(f"{name:<18}", style="bold").append(finding.message, style="default")
        say(console, line)
        if finding.fix:
            say(console, f"{'':<30}→ {finding.fix}", "dim" if finding.state == "not checked" else "cyan")
    counts = [(state, sum(finding.state == state for finding in findings)) for state in _STYLES]
    totals = ", ".join(f"{count} {state}" for state, count in counts if count)
    failed = any(finding.state == "failure" for finding in findings)
    say(console, totals or "no checks ran", "bold red" if failed else "bold")
