"""What `turngate doctor` does and prints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.text import Text

from turngate import __version__
from turngate.agents.spec import find_agent
from turngate.cli.terminal import console as new_console
from turngate.cli.terminal import say
from turngate.client.gateway import GatewayClient
from turngate.client.keys import read_admin_key
from turngate.common.validation import suggestion
from turngate.config import ServeConfig, load_config
from turngate.doctor import CHECKS, Finding, State, Subject, examine
from turngate.errors import ConfigError
from turngate.sandboxes import BACKENDS
from turngate.server.app import read_engine_key
from turngate.telemetry import logs

_STYLES: dict[State, str] = {"ok": "green", "warning": "yellow", "failure": "bold red", "not checked": "dim"}
_OWN = ("gateway", "agent", "sandbox", "image", "only", "as_json")
_OF_A_GATEWAY = ("config", "log_format")  # of the settings, what goes with --gateway


class Report(msgspec.Struct, frozen=True):
    version: str
    passed: bool  # nothing failed
    counts: dict[str, int]
    findings: list[Finding]


def examined(given: Mapping[str, Any]) -> bool:
    """Print the findings; False if one is a failure."""
    subject = _subject(given)
    only = _only(given)
    with logs.log_to_stderr(
        "text", logging.ERROR
    ):  # what is wrong is a finding; the parts' own warnings would say it twice
        findings = asyncio.run(examine(subject, only))
    passed = not any(finding.state == "failure" for finding in findings)
    if given["as_json"]:
        counts: dict[str, int] = {state: sum(found.state == state for found in findings) for state in _STYLES}
        print(msgspec.json.encode(Report(__version__, passed, counts, findings)).decode())
    else:
        _tell(findings)
    return passed


def _only(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The checks that were named, each of them one that there is something to look at for."""
    checks = {check.name: check for check in CHECKS}
    for name in given["only"] or ():
        if name not in checks:
            raise ConfigError(f"only: there is no check {name!r}{suggestion(name, list(checks))}", param="only")
        if checks[name].where == "gateway" and not given["gateway"]:
            raise ConfigError(f"only: {name!r} is of a gateway that runs; give --gateway URL, too", param="only")
        if checks[name].where == "here" and given["gateway"]:
            raise ConfigError(
                f"only: {name!r} is of the machine that serves; leave out --gateway, and look there", param="only"
            )
    return tuple(given["only"] or ())


def _subject(given: Mapping[str, Any]) -> Subject:
    for name in given["sandbox"] or ():
        if name not in BACKENDS:
            raise ConfigError(f"sandbox: {name!r} is none of {', '.join(BACKENDS)}", param="sandbox")
    for name in given["agent"] or ():
        find_agent(name)  # says what there is
    settings = {name: value for name, value in given.items() if name not in (*_OWN, "config")}
    settings["engine_url"] = settings["engine_url"] or None
    gateway, key = given["gateway"], ""
    if gateway:
        for name, value in settings.items():
            if value is not None and name not in _OF_A_GATEWAY:
                flag = name.replace("_", "-")
                raise ConfigError(f"{name}: the gateway at {gateway} has its own; leave out --{flag}", param=name)
        key = read_admin_key()
        GatewayClient(gateway, key)  # says what is wrong with it
        config = ServeConfig()
    else:
        config = load_config(given["config"], settings)
        read_engine_key(config)  # an environment variable that is not set is told at once
    return Subject(
        config,
        gateway=gateway,
        admin_key=key,
        agents=tuple(given["agent"] or ()),
        sandboxes=tuple(given["sandbox"] or ()),
        image=given["image"],
    )


def _tell(findings: Sequence[Finding]) -> None:
    console = new_console()
    before = ""
    for finding in findings:
        name = finding.check if finding.check != before else ""
        before = finding.check
        line = Text(f"{finding.state:<12}", style=_STYLES[finding.state])
        line.append(f"{name:<18}", style="bold").append(finding.seen, style="default")
        say(console, line)
        if finding.mend:
            say(console, f"{'':<30}→ {finding.mend}", "dim" if finding.state == "not checked" else "cyan")
    counts = [(state, sum(finding.state == state for finding in findings)) for state in _STYLES]
    summed = ", ".join(f"{count} {state}" for state, count in counts if count)
    failed = any(finding.state == "failure" for finding in findings)
    say(console, summed or "nothing was looked at", "bold red" if failed else "bold")
