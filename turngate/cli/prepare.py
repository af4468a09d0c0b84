"""Build the agent, the session settings and the end policy of a rollout from flags, and check the output folder.

Invalid flags are reported here, before a gateway or a sandbox is started.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar, cast, get_args

import msgspec

from turngate.agents.install import ensure_installed
from turngate.agents.installation import Installation
from turngate.agents.interpreters import find_python
from turngate.agents.launch import ModelLimits, plan_launch
from turngate.agents.spec import AgentSpec, find_agent
from turngate.cli.options import RolloutOptions, RunOptions
from turngate.errors import BadRequest, ConfigError
from turngate.rollout.sampling import AGENT_CHOICE, NEUTRAL_CHOICE, parse_sampling
from turngate.rollout.spec import EndAction, EndPolicy
from turngate.tasks.staging import IMAGELESS
from turngate.types import Json, Sampling

Number = TypeVar("Number", int, float, int | None, float | None)


class PreparedAgent(msgspec.Struct, frozen=True):
    """An installed agent, with its limits and options."""

    spec: AgentSpec
    installed: Installation
    limits: ModelLimits
    options: Mapping[str, str]


def prepare_agent(
    name: str, *, options: Sequence[str] | None, context_tokens: int | None, instruction: str, sandbox: str = ""
) -> PreparedAgent:
    """Find and install an agent, and check that it accepts the options and the instruction.

    If the sandbox uses the programs on this machine, first check that the machine has the Python version that the agent needs.
    """
    found = find_agent(name)
    if found.shadows is not None:
        print(f"agent {found.spec.name}: {found.file} overrides {found.shadows}", file=sys.stderr)
    python = found.spec.install.python
    if python and sandbox in IMAGELESS and find_python(python) is None:
        raise ConfigError(
            f"{found.spec.name} needs python{python}, which is not installed on this machine; install it, choose a different "
            f"--agent, or use --sandbox docker with an image that contains it, such as python:{python}",
            param="agent",
        )
    limits = ModelLimits()
    if context_tokens is not None:
        limits = ModelLimits(context_tokens=require_positive("context_tokens", context_tokens))
    installed = ensure_installed(found.spec, lambda line: print(line, file=sys.stderr))
    parsed = parse_agent_options(options or ())
    dry = {"base_url": "", "api_key": "", "model": "", "home": "", "workdir": ""}
    plan_launch(found.spec, installed, prompt=instruction, limits=limits, options=parsed, **dry)
    return PreparedAgent(found.spec, installed, limits, parsed)


def add_command(agent: str, options: Sequence[str] | None, command: Sequence[str] | None) -> list[str]:
    """Return the agent's options. If a command was passed after --, include it as the option `command`."""
    spec = find_agent(agent).spec
    pairs = list(options or ())
    names = {pair.partition("=")[0] for pair in pairs}
    option = spec.options.get("command")
    if not command:
        is_missing = option is not None and option.default is None and "command" not in names
        # An unknown option in --set may be a misspelling of `command`. A later check reports it.
        if is_missing and names <= set(spec.options):
            raise ConfigError(
                f"{spec.name} needs a command; add it after --, as in `turngate run --agent {shlex.quote(agent)} -- COMMAND`",
                param="command",
            )
        return pairs
    if option is None:
        raise ConfigError(
            f"{spec.name} does not take a command, but one was passed ({shlex.join(command)}); pass an instruction as --prompt TEXT, a "
            "task as --task PATH, or a command to --agent shell",
            param="command",
        )
    if "command" in names:
        raise ConfigError(
            "the command is set both after -- and with --set command=…; remove one of them", param="command"
        )
    return [*pairs, f"command={shlex.join(command)}"]


def parse_agent_options(pairs: Iterable[str]) -> dict[str, str]:
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set must be NAME=VALUE, not {pair!r}", param="set")
        options[name] = value
    return options


def parse_network(value: str) -> Literal["none", "open"]:
    if value not in ("none", "open"):
        raise ConfigError(f"network must be none or open, not {value!r}", param="network")
    return cast(Literal["none", "open"], value)


def build_end_policy(options: RolloutOptions) -> EndPolicy:
    """Build the policy for rollouts whose agent did not finish normally."""
    choices = {"on_timeout": options.on_timeout, "on_failure": options.on_failure, "on_limit": options.on_limit}
    for flag, choice in choices.items():
        if choice not in get_args(EndAction):
            raise ConfigError(
                f"{flag} must be one of {', '.join(get_args(EndAction))}, not {choice!r}",
                param=flag,
            )
    if options.on_lost not in ("exclude", "zero"):
        raise ConfigError(f"on_lost must be exclude or zero, not {options.on_lost!r}", param="on_lost")
    return msgspec.convert(
        {
            "timed_out": options.on_timeout,
            "failed": options.on_failure,
            "limit": options.on_limit,
            "lost": options.on_lost,
        },
        EndPolicy,
    )


def build_session_settings(options: RolloutOptions) -> dict[str, Json]:
    limits = {
        "turns": require_positive("max_turns", options.max_turns),
        "sampled_tokens": require_positive("max_tokens", options.max_tokens),
    }
    limits = {name: value for name, value in limits.items() if value is not None}
    if options.on_refused not in ("exclude", "train"):
        raise ConfigError(f"on_refused must be exclude or train, not {options.on_refused!r}", param="on_refused")
    return {
        **({"limits": limits} if limits else {}),
        **({"policy": {"refused": True}} if options.on_refused == "train" else {}),
        **_build_sampling(options),
    }


def _build_sampling(options: RolloutOptions) -> dict[str, Json]:
    """Return the session settings for sampling. They include `seed` only for `turngate run`, because a batch derives a seed per rollout."""
    names = [field.name for field in msgspec.structs.fields(Sampling)]
    flags = {name: getattr(options, name) for name in names if name != "seed" or isinstance(options, RunOptions)}
    pinned = {name: value for name, value in flags.items() if value is not None}
    if options.sampling not in (NEUTRAL_CHOICE, AGENT_CHOICE):
        raise ConfigError(f"sampling must be neutral or agent, not {options.sampling!r}", param="sampling")
    try:
        return {**parse_sampling(options.sampling), **parse_sampling(pinned)}
    except BadRequest as error:
        flag = (error.param or "").removeprefix("sampling.")
        raise ConfigError(error.message.removeprefix("sampling."), param=flag) from None


def require_writable(folder: Path) -> Path:
    """Return the folder. Raise ConfigError if it cannot be created, or is not a writable folder."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise ConfigError(f"out: {existing} is not a folder; choose a different --out folder", param="out")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"out: {existing} is not writable; choose a different --out folder", param="out")
    return folder


def require_positive(name: str, value: Number) -> Number:
    """Return the value of an option. Raise ConfigError if it is set but is not a finite number greater than 0."""
    if value is not None and not 0 < value < math.inf:
        bound = "finite" if value == math.inf else "greater than 0"
        raise ConfigError(f"{name} must be {bound}, not {value}", param=name)
    return value
