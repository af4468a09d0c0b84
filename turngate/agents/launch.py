"""Plan one run of an agent: its files, environment and command line. This module does no I/O. The rollout executes the plan in a sandbox.

The key is passed in the environment or in files with mode 0600, never in a command line. The prompt is passed on standard input or in a
file if the agent supports that, and otherwise in an argument. A prompt that would not arrive intact is rejected.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path

import msgspec

from turngate.agents import placeholders
from turngate.agents.installation import PYTHON_VARIABLE, Installation
from turngate.agents.spec import AgentSpec
from turngate.common.validation import suggestion
from turngate.errors import AgentError
from turngate.sandboxes.base import Mount, Preload
from turngate.trace.signals import Signals

MAX_ARGUMENT_BYTES = 128 * 1024 - 1  # Linux's limit for one argument or environment variable, without the final NUL
QUOTED_SUFFIXES = (".json", ".toml", ".yaml", ".yml")  # in these files, values are escaped for double quotes
OWN_FOLDER = ".turngate"  # our folder in the sandbox's HOME


class LaunchFile(msgspec.Struct, frozen=True):
    """A file to write before the agent starts."""

    path: str
    data: bytes
    mode: int


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one run. All paths except the sources of mounts are paths in the sandbox."""

    files: tuple[LaunchFile, ...]
    env: dict[str, str]
    command: tuple[str, ...]
    program: str  # the first word of the agent's command; this program must exist in the sandbox
    cwd: str
    mounts: tuple[Mount, ...]
    check: tuple[str, ...]  # a command that must succeed before the run; empty if there is none
    stdout: str  # path of the file for the agent's output
    stderr: str
    transcript: str  # a glob pattern; empty if there is no transcript, or if the transcript is stdout
    subagents: str
    logs: tuple[str, ...]
    signals: Signals  # the agent's signals, with the model's name filled in


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The model's limits, which are set in the agent's configuration so that the agent can compact its context before reaching them."""

    context_tokens: int = 131072
    max_output_tokens: int = 16384


def plan_launch(
    spec: AgentSpec,
    installed: Installation,
    *,
    base_url: str,
    api_key: str,
    model: str,
    prompt: str,
    home: str,
    workdir: str,
    limits: ModelLimits = ModelLimits(),
    options: Mapping[str, str] | None = None,
) -> Launch:
    """Plan one run of the agent. Raise `AgentError` if an option is unknown or missing, or if a value cannot be passed to the agent."""
    own = f"{home}/{OWN_FOLDER}"
    values: dict[str, placeholders.Value] = {
        "base_url": base_url.rstrip("/"),
        "api_key": api_key,
        "model": model,
        "small_model": f"{model}-small",
        "context_tokens": limits.context_tokens,
        "max_output_tokens": limits.max_output_tokens,
        "home": home,
        "workdir": workdir,
        "prompt": prompt,
        "prompt_file": f"{own}/prompt.txt",
        "install": installed.folder,
        "program": installed.program,
        "node": installed.node,
        "python": installed.python,
        **_options(spec, options or {}),
    }
    files = [_fill_file(file.path, file.content, int(file.mode, 8), values) for file in spec.files]
    if spec.uses("prompt_file"):
        files.append(LaunchFile(f"{own}/prompt.txt", _encode_prompt(spec, prompt), 0o600))
    program, *arguments = words = tuple(placeholders.fill(word, values) for word in spec.command)
    command = (program, *(("--require", installed.code_cache) if installed.code_cache else ()), *arguments)
    if spec.stdin:
        files.append(LaunchFile(f"{own}/stdin", _encode_prompt(spec, placeholders.fill(spec.stdin, values)), 0o600))
        command = ("/bin/sh", "-c", 'exec "$@" < "$0"', f"{own}/stdin", *command)
    env = {PYTHON_VARIABLE: installed.python} if installed.python.startswith("/") else {}
    env |= {name: placeholders.fill(text, values) for name, text in spec.env.items()}
    _check_passable(spec, words, env)
    transcript = spec.transcript
    return Launch(
        files=tuple(files),
        env=env,
        command=command,
        program=program,
        cwd=workdir,
        mounts=tuple(Mount(source=folder, target=folder) for folder in installed.mounts),
        check=spec.install.check,
        stdout=f"{own}/stdout",
        stderr=f"{own}/stderr",
        transcript=f"{home}/{transcript.path}" if transcript and transcript.path else "",
        subagents=f"{home}/{transcript.subagents}" if transcript and transcript.subagents else "",
        logs=tuple(f"{home}/{pattern}" for pattern in spec.logs),
        signals=resolve_signals(spec.signals, model),
    )


def plan_preload(spec: AgentSpec, installed: Installation) -> Preload | None:
    """Plan a fork server, which starts the agent with its modules already imported.

    Return None if the agent's description has no `preload`, or if the sandbox uses its own Python.
    """
    if not spec.preload or not installed.python.startswith("/"):
        return None
    constant = {name: text for name, text in spec.env.items() if not placeholders.find_names(text)}
    return Preload(python=installed.python, folder=installed.folder, modules=spec.preload, env=constant)


def resolve_signals(signals: Signals, model: str) -> Signals:
    """Return the signals with the model's name filled into their model patterns."""
    name = glob.escape(model)
    values: dict[str, placeholders.Value] = {"model": name, "small_model": f"{name}-small"}
    filled = {placeholders.fill(pattern, values): role for pattern, role in signals.models.items()}
    return msgspec.structs.replace(signals, models=filled)


def _options(spec: AgentSpec, options: Mapping[str, str]) -> dict[str, str]:
    for name in options:
        if name not in spec.options:
            what = (
                f"no such option{suggestion(name, list(spec.options))}"
                if spec.options
                else "no options; remove this one"
            )
            raise AgentError(f"options.{name}: {spec.name} has {what}", param=f"options.{name}")
    values: dict[str, str] = {}
    for name, option in spec.options.items():
        value = options.get(name, option.default)
        if value is None:
            raise AgentError(
                f"options.{name}: {spec.name} requires this option ({option.about}); pass --set {name}=… on the command line, "
                "pass it in options= in Python, or set it in agent_options in a service's settings",
                param=f"options.{name}",
            )
        values[name] = value
    return values


def _fill_file(path: str, content: str, mode: int, values: Mapping[str, placeholders.Value]) -> LaunchFile:
    name = placeholders.fill(path, values)
    escape = placeholders.escape_quoted if Path(name).suffix in QUOTED_SUFFIXES else str
    target = name if name.startswith("/") else f"{values['home']}/{name}"
    return LaunchFile(target, placeholders.fill(content, values, escape).encode("utf-8", "surrogatepass"), mode)


def _encode_prompt(spec: AgentSpec, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise AgentError(
            f"{spec.name}: the prompt contains characters that UTF-8 cannot encode; remove them", param="prompt"
        ) from None


def _check_passable(spec: AgentSpec, command: tuple[str, ...], env: Mapping[str, str]) -> None:
    """Raise `AgentError` if an argument or environment variable contains a NUL character or is too long for the kernel."""
    words = [(f"command[{n}]", word) for n, word in enumerate(command)]
    words += [(f"env.{name}", f"{name}={value}") for name, value in env.items()]
    for field, word in words:
        if "\0" in word:
            raise AgentError(
                f"{spec.name}: {field} contains a NUL character, which arguments and environment variables cannot contain; remove it",
                param=field,
            )
        if (size := len(word.encode("utf-8", "surrogatepass"))) > MAX_ARGUMENT_BYTES:
            raise AgentError(
                f"{spec.name}: {field} is {size} bytes long, but the limit is {MAX_ARGUMENT_BYTES}; "
                "shorten it, or, if it contains the prompt, change the agent's description to pass the prompt on stdin or in {prompt_file}",
                param=field,
            )
