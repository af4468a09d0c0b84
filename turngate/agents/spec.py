"""The description of an agent, loaded from TOML: how to install, configure and start the agent, and how to read its transcript.

The presets are in `catalog/`. Users can add their own files with `--agent ./my.toml`, `$TURNGATE_AGENTS` (files or folders) or
`~/.config/turngate/agents/`. A user's agent replaces a preset with the same name. A description is validated when it is loaded.
Unknown fields, unknown placeholders and `{api_key}` in a command line are errors.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jmespath
import msgspec

from turngate.agents import placeholders
from turngate.common.validation import explain_error, parse_toml, suggestion
from turngate.errors import AgentError
from turngate.trace import signals as trace_signals
from turngate.trace.signals import Signals
from turngate.types import Sampling

CATALOG = Path(__file__).parent / "catalog"
_DESCRIPTION = "agent.json"  # name of the file in a rollout's folder
Dialect = Literal["chat", "responses", "messages", "gemini", "any"]

# The placeholders that every description can use, in addition to the agent's own options.
PLACEHOLDERS = {
    "base_url": "the gateway's URL, without /v1",
    "api_key": "the session's secret; only in `env` and in files with mode 0600",
    "model": "the model's name",
    "small_model": "the model name for side calls: the model's name followed by -small",
    "context_tokens": "the model's context length",
    "max_output_tokens": "the token limit of one reply",
    "home": "$HOME in the sandbox",
    "workdir": "the agent's working folder",
    "prompt": "the task's text",
    "prompt_file": "a file that contains the task's text",
    "install": "the installation's folder",
    "program": "the installed program",
    "node": "a Node binary",
    "python": "the Python that the installation was built for: a path, or a name such as python3.11 in Docker and remote sandboxes",
}


class Install(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to install the agent: from npm, from PyPI, or not at all if the sandbox already has it."""

    npm: str = ""  # a package on npm
    pip: str = ""  # a package on PyPI
    version: str = ""  # exact version of the package
    also: tuple[str, ...] = ()  # pip: additional pinned requirements
    deps: bool = True  # pip: install the package's dependencies; false if `also` lists all of them
    python: str = ""  # pip: the Python version that the agent runs on, such as 3.11
    program: str = ""  # the program's path inside the installation
    prepare: tuple[str, ...] = ()  # a command that completes the installation, such as one that unpacks files
    check: tuple[str, ...] = ()  # a command that succeeds if the sandbox has the agent


class AgentFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file to write before the agent starts. Its path and content may contain placeholders.

    In .json, .toml, .yaml and .yml files, the values of placeholders are escaped for use inside double quotes.
    """

    path: str
    content: str
    mode: str = "0644"


class Transcript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the agent records its own turns, and how to read them. All expressions are in JMESPath.

    `turn` is evaluated on every record. It must return null or false if the record is not part of a turn. Otherwise it must return a turn
    or a part of one: {id, text, reasoning, calls: [{name, arguments}]}.

    `merge` says how parts form a turn:

    - `none`: every part is a turn.
    - `id`: parts with the same id form a turn. A part without an id belongs to the same turn as the part before it.
    - `last`: of all parts with the same id, the last one is the turn.
    - `end`: a turn ends with the first record for which the expression `end` returns a value. If this value is a string, it is the turn's
      id. If the expression `begin` returns a value for a record, the parts of the unfinished turn before that record are dropped, because
      they belong to a different conversation.
    """

    path: str = ""  # a glob pattern below HOME
    stdout: bool = False  # whether the transcript is the agent's output
    format: Literal["json", "jsonl"] = "jsonl"
    records: str = ""  # json: an expression that returns the list of records
    turn: str
    begin: str = ""
    end: str = ""
    merge: Literal["none", "id", "last", "end"] = "none"
    subagents: str = ""  # a glob pattern below HOME for the transcripts of sub-agents, if these are separate files
    subagent: str = ""  # an expression that is true only for a record in a sub-agent's transcript
    fills_in: bool = False  # whether the agent adds arguments that the model left out


class Option(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An option of the agent, which each run can set. It replaces the placeholder of the same name. Without a default, it is required."""

    about: str
    default: str | None = None


class CheckCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call to one of the agent's tools, for `turngate agents check`. Its arguments may contain {workdir}."""

    tool: str
    arguments: dict[str, Any] = {}


class ShellCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to call the agent's shell tool. The arguments must contain {command} and may contain {workdir}."""

    tool: str
    arguments: dict[str, Any]


class CheckStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scripted engine's reply in one turn of `turngate agents check`."""

    say: str = ""
    think: str = ""
    calls: tuple[CheckCall, ...] = ()


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of one agent: the content of its TOML file."""

    name: str
    title: str
    homepage: str = ""
    dialect: Dialect
    command: tuple[str, ...]
    stdin: str = ""  # the command's standard input, usually {prompt}
    install: Install = Install()
    preload: tuple[str, ...] = ()  # pip: modules that a fork server imports once for many runs
    code_cache: bool = False  # npm: compile the agent's code at installation
    files: tuple[AgentFile, ...] = ()
    env: dict[str, str] = {}
    options: dict[str, Option] = {}
    transcript: Transcript | None = None
    logs: tuple[str, ...] = ()  # glob patterns below HOME for the agent's log files
    off: dict[str, str] = {}  # features that are switched off for training, each with the settings that do this
    signals: Signals = Signals()
    sampling: dict[str, int | float] = {}  # sampling settings to use if a run does not set them
    limits: tuple[str, ...] = ()  # known limitations, which the documentation lists
    # The scripted engine's replies for `turngate agents check`. The last one ends the conversation.
    check: tuple[CheckStep, ...] = ()
    check_task: bool = True  # whether the check steps solve a task; false if the agent cannot change files
    shell_call: ShellCall | None = None  # None if the agent has no tool that runs a shell command

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield the field name and the value of each text that may contain placeholders, except for those in `check` and `shell_call`."""
        yield from ((f"command[{n}]", word) for n, word in enumerate(self.command))
        yield "stdin", self.stdin
        yield from ((f"install.prepare[{n}]", word) for n, word in enumerate(self.install.prepare))
        yield from ((f"env.{name}", text) for name, text in self.env.items())
        for n, file in enumerate(self.files):
            yield f"files[{n}].path", file.path
            yield f"files[{n}].content", file.content
        yield from ((f"signals.models.{pattern}", pattern) for pattern in self.signals.models)

    def uses(self, placeholder: str) -> bool:
        return any(placeholder in placeholders.find_names(text) for _, text in self.texts())


# Make msgspec inspect these types now, because it crashes if two threads trigger this at the same time.
for _type in (AgentSpec, Sampling):
    msgspec.json.Decoder(_type)


class CatalogEntry(msgspec.Struct, frozen=True):
    """An agent and the file that it was loaded from. If it replaces an agent of the same name, `shadows` is that agent's file."""

    spec: AgentSpec
    file: Path
    shadows: Path | None = None


def find_agent(name: str, cwd: Path | None = None) -> CatalogEntry:
    """Find an agent by name, or load it from a file if `name` contains a slash or ends in .toml. Raise `AgentError` if that fails."""
    if "/" in name or name.endswith(".toml"):
        file = (cwd or Path.cwd()) / Path(name).expanduser()
        spec = load_spec(file)
        preset = load_catalog().get(spec.name)
        return CatalogEntry(spec, file, preset.file if preset and preset.file.resolve() != file.resolve() else None)
    agents = load_catalog()
    if name not in agents:
        hint = suggestion(name, list(agents))
        end = "" if hint.endswith("?") else "."
        raise AgentError(
            f"unknown agent {name!r}{hint}{end} To use an agent file, pass its path, such as ./{name}.toml",
            param="agent",
        )
    return agents[name]


def load_catalog() -> dict[str, CatalogEntry]:
    """Load all agents by name: the presets, and the user's own agents, which replace presets of the same name."""
    agents: dict[str, CatalogEntry] = {}
    for layer in (_toml_files(CATALOG), *_user_layers()):
        seen: dict[str, Path] = {}
        for file in layer:
            spec = load_spec(file)
            if spec.name in seen:
                raise AgentError(
                    f"{file}: the name {spec.name!r} is already used in {seen[spec.name]}; change the name in one of the files",
                    param="name",
                )
            seen[spec.name] = file
            below = agents.get(spec.name)
            agents[spec.name] = CatalogEntry(spec, file, below.file if below else None)
    return dict(sorted(agents.items()))


def load_spec(file: Path) -> AgentSpec:
    """Load the description of an agent from a file, and validate it."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise AgentError(f"agent: {file} cannot be read ({error.strerror})", param="agent") from None
    except UnicodeDecodeError:
        raise AgentError(f"agent: {file} is not UTF-8 text; save it as UTF-8", param="agent") from None
    return parse_spec(text, str(file))


@functools.lru_cache(maxsize=64)  # cached, because every rollout loads the whole catalog to find its agent
def parse_spec(text: str, where: str) -> AgentSpec:
    """Parse and validate the description of an agent. `where` is the file name for error messages."""
    try:
        spec = msgspec.convert(parse_toml(text), AgentSpec)
    except msgspec.ValidationError as error:
        message, field = explain_error(error, AgentSpec)
        raise AgentError(f"{where}: {message}", param=field) from None
    except ValueError as error:
        raise AgentError(f"{where}: invalid TOML: {error}", param="agent") from None
    for field, problem in _faults(spec):
        raise AgentError(f"{where}: {problem}", param=field)
    return spec


def write_description(spec: AgentSpec, folder: Path) -> None:
    """Write the agent's description to the folder with the agent's logs. Raise `AgentError` on failure.

    `turngate verify` uses the description to parse the agent's transcript.
    """
    try:
        (folder / _DESCRIPTION).write_bytes(msgspec.json.format(msgspec.json.encode(spec)))
    except OSError as error:
        raise AgentError(f"{folder / _DESCRIPTION} could not be written ({error.strerror})") from None


def read_description(folder: Path) -> AgentSpec | None:
    """Read the agent's description from the folder with the agent's logs.

    Return None if there is none, as in folders that older versions of Turngate wrote. Raise `AgentError` if it cannot be read.
    """
    file = folder / _DESCRIPTION
    try:
        return msgspec.json.decode(file.read_bytes(), type=AgentSpec)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AgentError(f"{file} cannot be read ({error.strerror})", param="agent") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AgentError(f"{file} is not a valid agent description: {error}", param="agent") from None


def _user_layers() -> Iterator[list[Path]]:
    """Yield lists of the user's files. An agent in a later list replaces an agent of the same name in an earlier list."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    yield _toml_files(config / "turngate" / "agents")
    for entry in reversed((os.environ.get("TURNGATE_AGENTS") or "").split(os.pathsep)):
        if entry:
            path = Path(entry).expanduser()
            if not path.exists():
                raise AgentError(f"TURNGATE_AGENTS: {path} does not exist", param="TURNGATE_AGENTS")
            yield _toml_files(path) if path.is_dir() else [path]


def _toml_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.toml"))


# ---- constraints across fields ----


def _faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    """Yield the name of each invalid field, with a message. The caller reports only the first one."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", spec.name):
        yield "name", f"name is {spec.name!r}, but must start with a-z or 0-9 and contain only a-z, 0-9 and '-'"
    if not spec.command:
        yield "command", "command is empty; set it to a list of the program and its arguments"
    yield from _install_faults(spec)
    yield from _preload_faults(spec)
    yield from _code_cache_faults(spec)
    yield from _option_faults(spec)
    yield from _placeholder_faults(spec)
    yield from _key_faults(spec)
    yield from ((field, f"{field}: {problem}") for field, problem in trace_signals.find_faults(spec.signals))
    yield from _sampling_faults(spec)
    if spec.transcript:
        yield from _transcript_faults(spec.transcript)
    if spec.shell_call:
        yield from _shell_call_faults(spec.shell_call)


def _install_faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    install = spec.install
    if install.npm and install.pip:
        yield "install", "install.npm and install.pip cannot both be set; remove one of them"
    packaged = bool(install.npm or install.pip)
    if packaged and not re.fullmatch(r"[0-9][\w.+-]*", install.version):
        yield "install.version", f"install.version must be an exact version such as 1.2.3, not {install.version!r}"
    if not packaged and (install.version or install.program or install.prepare):
        yield (
            "install",
            "install.version, install.program and install.prepare need a package; set install.npm or install.pip",
        )
    if install.npm and not install.program:
        yield (
            "install.program",
            "install.program is missing; set it to the program's path inside the installation, such as node_modules/x/bin/x.js",
        )
    if not install.pip and (install.also or install.python or not install.deps):
        yield "install", "install.also, install.python and install.deps apply only to pip packages; remove them"
    if install.pip and not re.fullmatch(r"3\.[0-9]+", install.python):
        yield "install.python", f"install.python must be a Python version such as 3.11, not {install.python!r}"
    for n, requirement in enumerate(install.also):
        if not re.fullmatch(r"[\w.\[\]-]+==[\w.+!-]+", requirement):
            yield f"install.also[{n}]", f"install.also[{n}] must be pinned as name==version, not {requirement!r}"
    if Path(install.program).is_absolute() or ".." in Path(install.program).parts:
        yield "install.program", f"install.program must be a path inside the installation, not {install.program!r}"


def _preload_faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    if spec.preload and (not spec.install.pip or spec.command[:2] != ("{python}", "{install}") or spec.stdin):
        yield (
            "preload",
            'preload needs install.pip, a command that begins with "{python}", "{install}", and no stdin; change these, or remove preload',
        )
    for n, module in enumerate(spec.preload):
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module):
            yield f"preload[{n}]", f"preload[{n}] must be the name of a module such as package.module, not {module!r}"


def _code_cache_faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    if spec.code_cache and (not spec.install.npm or spec.command[:1] != ("{node}",)):
        yield (
            "code_cache",
            'code_cache needs install.npm and a command that begins with "{node}"; change these, or remove code_cache',
        )


def _option_faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    for name in spec.options:
        if name in PLACEHOLDERS:
            yield f"options.{name}", f"options.{name}: {{{name}}} is a built-in placeholder; choose a different name"
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            yield (
                f"options.{name}",
                f"options.{name}: an option's name must start with a-z and contain only a-z, 0-9 and '_'",
            )


def _placeholder_faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    known = [*PLACEHOLDERS, *spec.options]
    samples: dict[str, placeholders.Value] = dict.fromkeys(known, "x")
    samples |= {"context_tokens": 1, "max_output_tokens": 1}
    for field, text in spec.texts():
        try:
            placeholders.fill(text, samples)
        except placeholders.UnknownPlaceholder as error:
            hint = suggestion(error.name, known) if error.name not in known else ""
            yield field, f"{field}: {{{error.name}}} {error}{hint}"
        if field.startswith("install.prepare") and set(placeholders.find_names(text)) - {"install", "program", "node"}:
            yield field, f"{field}: only {{install}}, {{program}} and {{node}} can be used here"
        if field.startswith("signals.") and set(placeholders.find_names(text)) - {"model", "small_model"}:
            yield field, f"{field}: only {{model}} and {{small_model}} can be used here"
    for n, step in enumerate(spec.check):
        try:
            placeholders.fill(msgspec.json.encode(step).decode(), {"workdir": "x"})
        except placeholders.UnknownPlaceholder as error:
            hint = "" if error.name == "workdir" else "; only {workdir} can be used here"
            yield f"check[{n}]", f"check[{n}]: {{{error.name}}} {error}{hint}"
    install = spec.install
    for name, field, value in (
        ("install", "npm or pip", install.npm or install.pip),
        ("program", "program", install.program),
        ("python", "python", install.python),
    ):
        if spec.uses(name) and not value:
            yield "install", f"install must set {field}, because {{{name}}} is used"


def _key_faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    """For each field that would expose the key or that gives a file an invalid path or mode, yield its name and a message.

    Other processes can read command lines, and other users can read files unless their mode forbids it.
    """
    for field, text in spec.texts():
        if (
            "api_key" in placeholders.find_names(text)
            and not field.startswith("env.")
            and not field.endswith(".content")
        ):
            yield field, f"{field}: {{api_key}} may only be used in env or in a file with mode 0600"
    for n, file in enumerate(spec.files):
        outside = file.path.startswith("/") or ".." in Path(file.path).parts
        if outside or not file.path.strip():
            yield (
                f"files[{n}].path",
                f"files[{n}].path must be below HOME or {{workdir}}, such as .config/x.json, not {file.path!r}",
            )
        if not re.fullmatch(r"0?[0-7]{3}", file.mode):
            yield f"files[{n}].mode", f"files[{n}].mode must be an octal mode such as 0644, not {file.mode!r}"
        elif "api_key" in placeholders.find_names(file.content) and int(file.mode, 8) & 0o077:
            yield (
                f"files[{n}].mode",
                f'files[{n}].mode is {file.mode}, but the file contains {{api_key}}; set mode = "0600"',
            )


def _sampling_faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    try:
        msgspec.convert(spec.sampling, Sampling)
    except msgspec.ValidationError as error:
        message, field = explain_error(error, Sampling, "setting")
        yield f"sampling.{field}", f"sampling.{message}"


def _shell_call_faults(call: ShellCall) -> Iterator[tuple[str, str]]:
    text = msgspec.json.encode(call.arguments).decode()
    used = set(placeholders.find_names(text))
    if "command" not in used:
        yield "shell_call.arguments", 'shell_call.arguments must contain {command}, such as { command = "{command}" }'
    for name in sorted(used - {"command", "workdir"}):
        yield (
            "shell_call.arguments",
            f"shell_call.arguments: {{{name}}} cannot be used here; use {{command}} or {{workdir}}",
        )


def _transcript_faults(transcript: Transcript) -> Iterator[tuple[str, str]]:
    if transcript.stdout == bool(transcript.path):
        yield "transcript", "transcript must set either path or stdout = true, but not both"
    for field, glob in (("path", transcript.path), ("subagents", transcript.subagents)):
        pattern = Path(glob)
        if pattern.is_absolute() or ".." in pattern.parts:
            yield f"transcript.{field}", f"transcript.{field} must be a path below HOME, not {str(pattern)!r}"
    if (transcript.format == "json") != bool(transcript.records):
        yield "transcript.records", 'transcript.records is required if format = "json", and not allowed otherwise'
    if (transcript.merge == "end") != bool(transcript.end):
        yield "transcript.end", 'transcript.end is required if merge = "end", and not allowed otherwise'
    if transcript.begin and transcript.merge != "end":
        yield "transcript.begin", 'transcript.begin is only allowed if merge = "end"'
    expressions = {
        "records": transcript.records,
        "turn": transcript.turn,
        "begin": transcript.begin,
        "end": transcript.end,
        "subagent": transcript.subagent,
    }
    for field, expression in expressions.items():
        try:
            if expression:
                jmespath.compile(expression)
        except jmespath.exceptions.JMESPathError as error:
            yield f"transcript.{field}", f"transcript.{field} is not valid JMESPath: {str(error).splitlines()[0]}"
