"""Values in a task's environments that come from this machine's environment variables.

A task's file names the variables, so that it need not contain secrets.

A task that is sent to another machine names only the variables, and that machine uses its own values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from turngate.errors import ConfigError
from turngate.tasks.task import Script, Task, change_graders

RESERVED_PREFIXES = ("TURNGATE_", "PG")  # keys of this machine's gateway and of its database


def remove_host_values(task: Task) -> Task:
    """Return the task without the values that come from this machine. `task.host_env` still names the variables."""
    removed = {(variable.place, variable.name) for variable in task.host_env}

    def keep(place: str, env: Mapping[str, str]) -> Mapping[str, str]:
        return {name: value for name, value in env.items() if (place, name) not in removed}

    return _change_env(task, keep) if removed else task


def add_host_values(task: Task, environment: Mapping[str, str]) -> Task:
    """Return the task with values from `environment` in place of those that `remove_host_values` removed."""
    values = {
        (one.place, one.name): read_variable(one.variable, environment, f"task {task.id}", one.default)
        for one in task.host_env
    }

    def add(place: str, env: Mapping[str, str]) -> Mapping[str, str]:
        return {**env, **{name: value for (where, name), value in values.items() if where == place}}

    return _change_env(task, add) if values else task


def find_host_values(task: Task) -> list[str]:
    """Return the values in the task's environments that come from this machine and may be secret.

    Defaults from the task's file are left out, because they are not secret.
    """
    found: list[str] = []

    def collect(place: str, env: Mapping[str, str]) -> Mapping[str, str]:
        here = [one for one in task.host_env if one.place == place and one.name in env]
        found.extend(env[one.name] for one in here if env[one.name] != one.default)
        return env

    _change_env(task, collect)
    return found


def read_variable(name: str, environment: Mapping[str, str], user: str, default: str | None = None) -> str:
    """Return the value of a variable in `environment`, or `default` if it is not set.

    Raise `ConfigError` if both are missing, or if the name is reserved. In error messages, `user` describes what needs the variable.
    """
    if name.startswith(RESERVED_PREFIXES):
        raise ConfigError(
            f"{user} must not use the environment variable {name}, because names that start with "
            f"{' or '.join(RESERVED_PREFIXES)} are reserved for Turngate and its database; use a different name",
            param=name,
        )
    value = environment.get(name, default)
    if value is None:
        raise ConfigError(
            f"{user} needs the environment variable {name}, which is not set in the environment of the cell that ran it; set it "
            "there, and restart the cell",
            param=name,
        )
    return value


def _change_env(task: Task, change: Callable[[str, Mapping[str, str]], Mapping[str, str]]) -> Task:
    """Return the task with `change` applied to the environments of the sandbox, the graders and the solution."""

    def change_script(script: Script, _: str) -> Script:
        return msgspec.structs.replace(script, env=change("grader", script.env))

    solution = task.solution
    if solution is not None:
        solution = msgspec.structs.replace(solution, env=change("solution", solution.env))
    return msgspec.structs.replace(
        task,
        env=change("environment", task.env),
        grader=change_graders(task.grader, change_script),
        solution=solution,
    )
