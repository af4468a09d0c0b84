"""The real parts that tests need: check whether they are installed, and say how to install them.

A test names its parts in a mark, `@pytest.mark.needs("docker")`, and `tests/tiers.py` skips it if one is missing. A helper that uses a part
calls `require`, which fails a test without the mark when it runs, or declares the part with `uses`, which fails it at collection.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import pytest

from tools import base_image, parts, swe_tasks
from tools.agent_names import AGENTS, MORE_AGENTS

Function = TypeVar("Function", bound=Callable[..., Any])
running: pytest.Item | None = None  # the current test


def _missing_root() -> str | None:
    return None if os.geteuid() == 0 else "root is needed (run: sudo make test)"


def _missing_module(name: str, command: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"{name} is not installed (run: {command})"


def _missing_program(name: str, package: str) -> str | None:
    return None if shutil.which(name) else f"{name} is missing (run: apt-get install {package}, as root)"


def _missing_postgres() -> str | None:
    """The server comes from Debian for root, else from the cache; the client library is a development dependency."""
    server = base_image.missing_postgres() if os.geteuid() == 0 else parts.missing("postgres")
    return server or _missing_module("psycopg", "make setup")


def _missing_node() -> str | None:
    installed = parts.cache() / "node" / "bin" / "node"
    return None if installed.exists() or shutil.which("node") else "node is missing (run: turngate agents install pi)"


def _missing_agent(name: str) -> str | None:
    from turngate.agents import install
    from turngate.agents.spec import find_agent

    reason = install.explain_missing(find_agent(name).spec)
    return f"{reason} (run: turngate agents install {name})" if reason else None


# Each check returns why the part is missing and how to install it, or None. Tests of the first parts run first.
MORE_PARTS = ("coder", "sglang", "tiny-qwen3-moe", "trainers")  # only in `make test-all`
LIGHT_AGENT = "mini-swe-agent"
HEAVY: dict[str, Callable[[], str | None]] = {
    **{
        name: partial(parts.missing, name)
        for name in ("trl", "vllm", "smollm2", "verifiers", "tiny-qwen3", "clients", "js-clients", "ray", *MORE_PARTS)
    },
    "postgres": _missing_postgres,
    "pgbouncer": base_image.missing_pgbouncer,
    "slurm": base_image.missing_slurm,
    "docker": base_image.missing_docker,
    "chromium": base_image.missing_chromium,
    "swe-tasks": swe_tasks.missing,
    **{f"agent:{name}": partial(_missing_agent, name) for name in (*AGENTS, *MORE_AGENTS) if name != LIGHT_AGENT},
    "bubblewrap": base_image.missing_bubblewrap,
}
LIGHT: dict[str, Callable[[], str | None]] = {  # small enough for `make test`
    f"agent:{LIGHT_AGENT}": partial(_missing_agent, LIGHT_AGENT),
    "tokenizers": partial(parts.missing, "tokenizers"),
    "templates": partial(parts.missing, "templates"),
    "torch": partial(_missing_module, "torch", "make setup"),
    "swebench": partial(_missing_module, "swebench", "make test"),
    "cyclonedx": partial(_missing_module, "cyclonedx", "pip install 'cyclonedx-python-lib[json-validation]'"),
    "systemd-analyze": partial(_missing_program, "systemd-analyze", "systemd"),
    "node": _missing_node,
    "curl": partial(_missing_program, "curl", "curl"),
    "perl": partial(_missing_program, "perl", "perl"),
    "root": _missing_root,
}
PARTS = HEAVY | LIGHT
IN_PROCESS = {
    "smollm2",
    "coder",
    "tokenizers",
    "templates",
    "torch",
    "swebench",
    "cyclonedx",
}  # parts that a test can use without starting a process


@cache
def missing(part: str) -> str | None:
    """Return why a part is missing and how to install it, or None if it is installed."""
    return PARTS[part]()


def require(*needed: str) -> None:
    """Skip the current test if a part is missing, or fail it with CI=true. Fail a test without the mark."""
    for part in needed:
        if running is not None and part not in needs(running):
            pytest.fail(f'this test needs {part}: mark it with @pytest.mark.needs("{part}")')
        if reason := missing(part):
            if part == "root":  # not a part that CI could install
                pytest.skip(reason)
            (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


def uses(*needed: str) -> Callable[[Function], Function]:
    """Declare the parts that a function needs. Collection fails for tests that call it without the mark."""

    def declare(function: Function) -> Function:
        function.__needs__ = needed  # type: ignore[attr-defined]
        return function

    return declare


def needs(item: pytest.Item) -> set[str]:
    """Return the parts that a test is marked with."""
    return {part for mark in item.iter_markers("needs") for part in mark.args}
