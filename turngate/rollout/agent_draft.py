"""Draft an agent's TOML description from one watched run (`agent_watch.py`), and find the agent's shell tool. No I/O."""

from __future__ import annotations

import glob
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from turngate.agents.spec import AgentSpec
from turngate.common.safe_text import make_encodable
from turngate.errors import AgentError
from turngate.rollout.agent_watch import (
    KEY_VARIABLES,
    MODEL,
    MODEL_VARIABLES,
    URL_VARIABLES,
    VARIABLES,
    WatchedRun,
)
from turngate.rollout.call_log import LoggedCall
from turngate.rollout.redaction import is_secret, redact_command
from turngate.telemetry.logs import REDACTED
from turngate.types import Json, Tool

_COMMAND_ARGUMENTS = ("command", "cmd", "script")  # arguments of a shell tool
_SHELL_NAME = re.compile(r"shell|bash|terminal|command|exec|run", re.IGNORECASE)
_THREAD_HEADER = re.compile(r"session|thread|conversation")
_TASK_COMMANDS = (  # commands that do the task of `turngate agents check`
    ("I will read the file.", ("cat notes.txt",)),
    ("Now I edit it.", ("sed -i s/colour/color/ notes.txt",)),
    ("Let me look at it.", ("cat notes.txt", "ls")),
    ("", ("echo done > done.txt",)),
)
_LAST_STEP = "Done: colour is color now."


class ShellTool(msgspec.Struct, frozen=True):
    """The agent's tool for running shell commands, and the arguments of a call to it."""

    name: str
    arguments: dict[str, Json]  # {command} is the placeholder for the shell command


def explain_failure(run: WatchedRun) -> str:
    """Return why no description can be written from the run, or "" if a model call succeeded."""
    printed = f"; it printed: {run.output[-400:]}" if run.output else "; it printed nothing"
    model_calls = [call for call in run.calls if call.samples]
    if any(call.status == 200 for call in model_calls):
        return ""
    if run.exit_code == 127 and not model_calls:
        return f"the command ended with exit code 127, which usually means that a program was not found{printed}"
    ended = "did not end in time" if run.exit_code is None else f"ended with exit code {run.exit_code}"
    if not run.calls:
        return (
            f"the command made no request to the gateway and {ended}{printed}; pass the gateway's address in a flag, as "
            "{base_url}/v1, or in an environment variable: `--env NAME={base_url}/v1 --env KEY_NAME={api_key}`"
        )
    if not model_calls:
        seen = ", ".join(dict.fromkeys(f"{call.method} {call.path}" for call in run.calls))
        return (
            f"the command made no model call, only these requests: {seen}; check the path of its base URL (most programs need "
            "{base_url}/v1)"
        )
    first = next((call for call in model_calls if call.status), None)
    if first is None:
        return f"no model call got a response, and the command {ended}{printed}"
    hint = f"; pass the model's name as {{model}}, not {first.model}" if first.model not in ("", MODEL) else ""
    return f"no model call succeeded; the first returned status {first.status}: {first.error[:300]}{hint}"


def find_shell_tool(tools: Sequence[Tool]) -> ShellTool | None:
    """Return the tool that most likely runs shell commands, or None if no tool takes a command."""
    ranked = sorted(tools, key=lambda tool: _SHELL_NAME.search(tool.name) is None)
    for tool in ranked:
        schema = tool.wire.get("function", {}).get("parameters") or {}
        properties = schema.get("properties") or {}
        argument = next((name for name in _COMMAND_ARGUMENTS if _is_text(properties.get(name))), None)
        if argument is not None:
            required = [name for name in schema.get("required") or () if name != argument]
            return ShellTool(
                tool.name, {argument: "{command}"} | {name: _example(properties.get(name)) for name in required}
            )
    return None


def write_description(name: str, command: Sequence[str], env: Mapping[str, str], run: WatchedRun) -> str:
    """Return the TOML description of the watched agent. Values that look like secrets are left out (`find_secrets`).

    Raise `AgentError` if no model call succeeded (`explain_failure`).
    """
    if problem := explain_failure(run):
        raise AgentError(f"{name}: {problem}", param="command")
    calls = [call for call in run.calls if call.samples]
    tools = tuple({tool.name: tool for call in calls for tool in call.tools}.values())
    shell = find_shell_tool(tools)
    return "\n".join(
        [
            *_head(name, command, calls, does_task=shell is not None),
            *_environment(env, run),
            *_sampling(calls),
            *_signals(calls),
            *_steps(tools, shell),
        ]
    )


def find_secrets(command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the names of the description's fields that seem to contain secrets. `write_description` leaves these secrets out."""
    words = ["command"] if redact_command(command) != list(command) else []
    return words + [f"env.{name}" for name, value in env.items() if is_secret(name, value)]


def _head(name: str, command: Sequence[str], calls: Sequence[LoggedCall], *, does_task: bool) -> list[str]:
    dialects = Counter(call.dialect for call in calls)
    spec = AgentSpec(name=name, title=name, dialect="any", command=tuple(command))
    shown = redact_command(command)
    lines = [
        f"name = {_quote(name)}",
        f"title = {_quote(name)}",
        f"dialect = {_quote(next(iter(dialects)) if len(dialects) == 1 else 'any')}",
        *([f"# {REDACTED} replaces a value that looks like a secret."] if shown != list(command) else []),
        f"command = {_value(shown)}",
    ]
    if not (spec.uses("prompt") or spec.uses("prompt_file")):
        lines.append('stdin = "{prompt}"')
    if not does_task:
        lines.append("check_task = false  # the steps below do not change files; delete this line once they do")
    lines += [
        "",
        "# The program comes from this machine. To pin a version that works in every sandbox, name the package and the program:",
        "# [install]",
        '# npm = "…"  (or pip = "…" and python = "3.12")',
        '# version = "1.2.3"',
        '# program = "node_modules/…"  (or "bin/…"), and "{program}" as the first word of the command',
    ]
    return lines


def _environment(env: Mapping[str, str], run: WatchedRun) -> list[str]:
    """Return the lines of the [env] table, if there are any variables.

    They are the variables that the agent read, the model variables of the same providers, and those in `env`.
    """
    used = {name: VARIABLES[name] for name in VARIABLES if name in run.variables}
    providers = {name.partition("_")[0] for name in used if name in URL_VARIABLES or name in KEY_VARIABLES}
    used |= {name: value for name, value in MODEL_VARIABLES.items() if name.partition("_")[0] in providers}
    used |= env
    return ["", "[env]", *(_variable(name, value) for name, value in used.items())] if used else []


def _variable(name: str, value: str) -> str:
    if is_secret(name, value):
        return f'{_key(name)} = ""  # left out: the value looks like a secret'
    return f"{_key(name)} = {_quote(value)}"


def _sampling(calls: Sequence[LoggedCall]) -> list[str]:
    if not any(call.sampling.get("temperature") == 0 for call in calls):
        return []
    return [
        "",
        "# The agent asks for temperature 0. Turns sampled at 0 cannot be trained on, so rollouts use temperature 1. To change that, set:",
        "# [sampling]",
        "# temperature = 0.6",
    ]


def _signals(calls: Sequence[LoggedCall]) -> list[str]:
    headers = sorted({name for call in calls for name in call.headers if _THREAD_HEADER.search(name)})
    others = dict.fromkeys(call.model for call in calls if call.status == 404 and call.model not in ("", MODEL))
    lines = []
    if headers:
        lines += [
            "# Headers that may identify the conversation. Keep only those with a separate value for each conversation.",
            f"thread = {_value([f'header:{name}' for name in headers])}",
        ]
    if others:
        lines += [
            "# Other models that the agent called. The trained model answers these calls; they count as side calls, which are not trained.",
            f"models = {_value({glob.escape(name): 'side' for name in others})}",
        ]
    return ["", "[signals]", *lines] if lines else []


def _steps(tools: Sequence[Tool], shell: ShellTool | None) -> list[str]:
    """Return the lines with the [[check]] steps for `turngate agents check`. With a shell tool, the steps do the whole task."""
    names = ", ".join(_key(tool.name) for tool in tools)
    offered = ["", f"# Tools that the agent offered: {names or 'none'}"]
    if shell is None:
        return [
            *offered,
            "[[check]]",
            f"say = {_quote(_LAST_STEP)}",
            "",
        ]
    lines = [*offered, "[shell_call]", f"tool = {_quote(shell.name)}", f"arguments = {_value(shell.arguments)}"]
    for say, commands in _TASK_COMMANDS:
        lines += ["", "[[check]]", *([f"say = {_quote(say)}"] if say else []), "calls = ["]
        for text in commands:
            arguments = {key: text if value == "{command}" else value for key, value in shell.arguments.items()}
            lines.append(f"    {{ tool = {_quote(shell.name)}, arguments = {_value(arguments)} }},")
        lines.append("]")
    return [*lines, "", "[[check]]", f"say = {_quote(_LAST_STEP)}", ""]


def _is_text(schema: Json) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string"


def _example(schema: Json) -> Json:
    """Return an example value for a required argument with this JSON schema."""
    found = schema if isinstance(schema, dict) else {}
    if found.get("enum"):
        return found["enum"][0]
    match found.get("type"):
        case "boolean":
            return False
        case "integer" | "number":
            return 60
        case "array":
            return []
        case "object":
            return {}
        case _:
            return "Run the command"


def _quote(text: str) -> str:
    return json.dumps(make_encodable(text), ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Json) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case dict():
            return (
                "{ " + ", ".join(f"{_key(name)} = {_value(item)}" for name, item in value.items()) + " }"
                if value
                else "{}"
            )
        case list():
            return "[" + ", ".join(_value(item) for item in value) + "]"
        case str():
            return _quote(value)
        case _:
            return json.dumps(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quote(name)
