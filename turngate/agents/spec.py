"""The description of one agent, loaded from TOML: how it is installed, configured and started, and how its transcript is read.

Presets are in `catalog/`. Users add their own files with `--agent ./my.toml`, `$TURNGATE_AGENTS` (files or folders) and
`~/.config/turngate/agents/`; a user's file with a preset's name replaces the preset, and this is shown. A description is validated
completely when it is loaded: unknown fields, unknown placeholders, a key that would end up in a command line.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jmespath
import msgspec

from turngate.agents import placeholders
from turngate.common.validation import explain_error, suggestion
from turngate.errors import AgentError
from turngate.trace import signals as trace_signals
from turngate.trace.signals import Signals

CATALOG = Path(__file__).parent / "catalog"
Dialect = Literal["chat", "responses", "messages", "gemini", "any"]

# Available in every run, in addition to the agent's own options.
PLACEHOLDERS = {
    "base_url": "the gateway's URL, without /v1",
    "api_key": "the session's secret; only in `env` and in files of mode 0600",
    "model": "the model's name",
    "small_model": "the name for side calls: the model's, followed by -small",
    "context_tokens": "the model's context length",
    "max_output_tokens": "the token limit of one reply",
    "home": "$HOME in the sandbox",
    "workdir": "the agent's working folder",
    "prompt": "the task's text",
    "prompt_file": "a file that holds the task's text",
    "install": "the installation's folder",
    "program": "the installed program",
    "node": "a Node binary",
    "python": "the Python that the installation was built for",
}


class Install(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the program comes from: npm, PyPI, or the sandbox's image."""

    npm: str = ""  # a package on npm
    pip: str = ""  # a package on PyPI
    version: str = ""  # its exact version
    also: tuple[str, ...] = ()  # pip: more requirements, pinned
    deps: bool = True  # pip: install the package's dependencies; false if `also` lists all of them
    python: str = ""  # pip: the Python to install for, like 3.11; the sandbox must have it
    program: str = ""  # the program's path inside the installation
    check: tuple[str, ...] = ()  # a command that succeeds if the image contains the agent


class AgentFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file to write before the agent starts. In .json, .toml and .yaml files, values are escaped for double quotes."""

    path: str
    content: str
    mode: str = "0644"


class Transcript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the agent records its own turns, and how to read them. The expressions are JMESPath.

    `turn` is evaluated on every record. It gives null or false, or a turn or a part of one:
    {id, text, reasoning, calls: [{name, arguments}]}.
    `merge` says how parts form a turn: `id` joins parts of the same id, and parts without one with the part before; `last` keeps the last
    part of each id; `end` joins all parts up to a record for which `end` gives a value, which is the turn's id. At a record that matches
    `begin`, parts without an end are dropped: they belong to another conversation.
    """

    path: str = ""  # a glob pattern below HOME
    stdout: bool = False  # the transcript is the agent's output
    format: Literal["json", "jsonl"] = "jsonl"
    records: str = ""  # json: the list of records
    turn: str
    begin: str = ""
    end: str = ""
    merge: Literal["none", "id", "last", "end"] = "none"
    subagents: str = ""  # a glob pattern of sub-agents' transcripts, if they are separate files
    subagent: str = ""  # true for a record that occurs only in a sub-agent's transcript
    fills_in: bool = False  # the agent adds arguments that the model left out


class Option(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A placeholder of the agent's own, set per run. Required if it has no default."""

    about: str
    default: str | None = None


class CheckCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call of one of the agent's tools. Its arguments may contain {workdir}."""

    tool: str
    arguments: dict[str, Any] = {}


class CheckStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the scripted engine answers in one turn of `turngate agents check`."""

    say: str = ""
    think: str = ""
    calls: tuple[CheckCall, ...] = ()


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One agent."""

    name: str
    title: str
    homepage: str = ""
    dialect: Dialect
    command: tuple[str, ...]
    stdin: str = ""  # the command's input, usually {prompt}
    install: Install = Install()
    files: tuple[AgentFile, ...] = ()
    env: dict[str, str] = {}
    options: dict[str, Option] = {}
    transcript: Transcript | None = None
    logs: tuple[str, ...] = ()  # glob patterns below HOME
    off: dict[str, str] = {}  # features that are switched off for training, and how
    signals: Signals = Signals()
    limits: tuple[str, ...] = ()  # known limits, for people
    check: tuple[
        CheckStep, ...
    ] = ()  # how the model solves the task of `turngate agents check` with this agent's tools

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield every text that may hold placeholders, with the name of its field."""
        yield from ((f"command[{n}]", word) for n, word in enumerate(self.command))
        yield "stdin", self.stdin
        yield from ((f"env.{name}", text) for name, text in self.env.items())
        for n, file in enumerate(self.files):
            yield f"files[{n}].path", file.path
            yield f"files[{n}].content", file.content
        yield from ((f"signals.models.{pattern}", pattern) for pattern in self.signals.models)

    def uses(self, placeholder: str) -> bool:
        return any(placeholder in placeholders.find_names(text) for _, text in self.texts())


class CatalogEntry(msgspec.Struct, frozen=True):
    """An agent and the file it was loaded from. `shadows`: the file that it replaces."""

    spec: AgentSpec
    file: Path
    shadows: Path | None = None


def find_agent(name: str, cwd: Path | None = None) -> CatalogEntry:
    """Find an agent by name, or load it from a file: a name with a slash or a .toml ending is a file."""
    if "/" in name or name.endswith(".toml"):
        file = (cwd or Path.cwd()) / Path(name).expanduser()
        spec = load_spec(file)
        preset = load_catalog().get(spec.name)
        return CatalogEntry(spec, file, preset.file if preset and preset.file.resolve() != file.resolve() else None)
    agents = load_catalog()
    if name not in agents:
        hint = suggestion(name, list(agents)).rstrip("?") + "."
        raise AgentError(
            f"agent: there is none called {name!r}{hint} To use a file of your own, write ./{name}.toml", param="agent"
        )
    return agents[name]


def load_catalog() -> dict[str, CatalogEntry]:
    """Load all known agents by name: the presets, and the user's own, which replace presets of the same name."""
    agents: dict[str, CatalogEntry] = {}
    for layer in (_toml_files(CATALOG), *_user_layers()):
        seen: dict[str, Path] = {}
        for file in layer:
            spec = load_spec(file)
            if spec.name in seen:
                raise AgentError(
                    f"{file}: name: {spec.name!r} is already used in {seen[spec.name]}; rename one", param="name"
                )
            seen[spec.name] = file
            below = agents.get(spec.name)
            agents[spec.name] = CatalogEntry(spec, file, below.file if below else None)
    return dict(sorted(agents.items()))


def load_spec(file: Path) -> AgentSpec:
    """Load and validate one description."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise AgentError(f"{file}: cannot be read ({error.strerror})", param="agent") from None
    except UnicodeDecodeError:
        raise AgentError(f"{file}: is not UTF-8 text", param="agent") from None
    return parse_spec(text, str(file))


def parse_spec(text: str, where: str) -> AgentSpec:
    """Parse and validate a description. `where` names it in errors."""
    try:
        spec = msgspec.convert(tomllib.loads(text), AgentSpec)
    except tomllib.TOMLDecodeError as error:
        raise AgentError(f"{where}: is not valid TOML: {error}", param="agent") from None
    except msgspec.ValidationError as error:
        message, field = explain_error(error, AgentSpec)
        raise AgentError(f"{where}: {message}", param=field) from None
    for field, problem in _faults(spec):
        raise AgentError(f"{where}: {field}: {problem}", param=field)
    return spec


def _user_layers() -> Iterator[list[Path]]:
    """Yield the user's files, those of lower precedence first."""
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
    """Yield the fields that are wrong, and why. Only the first is reported."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", spec.name):
        yield "name", f"{spec.name!r} may only contain a-z, 0-9 and -"
    if not spec.command:
        yield "command", "is empty; give the program and its arguments as a list"
    yield from _install_faults(spec)
    yield from _option_faults(spec)
    yield from _placeholder_faults(spec)
    yield from _key_faults(spec)
    yield from trace_signals.find_faults(spec.signals)
    if spec.transcript:
        yield from _transcript_faults(spec.transcript)


def _install_faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    install = spec.install
    if install.npm and install.pip:
        yield "install", "give npm or pip, not both"
    packaged = bool(install.npm or install.pip)
    if packaged and not re.fullmatch(r"[0-9][\w.+-]*", install.version):
        yield "install.version", f"{install.version!r} is not an exact version; pin one, like 1.2.3"
    if not packaged and (install.version or install.program):
        yield "install", "version and program describe a package; also give npm or pip"
    if install.npm and not install.program:
        yield (
            "install.program",
            "is missing; give the program's path inside the installation, like node_modules/x/bin/x.js",
        )
    if install.npm and (install.also or install.python or not install.deps):
        yield "install", "also, python and deps apply to pip only"
    if install.pip and not re.fullmatch(r"3\.[0-9]+", install.python):
        yield "install.python", f"{install.python!r} is not a version of Python like 3.11"
    for n, requirement in enumerate(install.also):
        if not re.fullmatch(r"[\w.\[\]-]+==[\w.+!-]+", requirement):
            yield f"install.also[{n}]", f"{requirement!r} is not pinned; write name==version"
    if Path(install.program).is_absolute() or ".." in Path(install.program).parts:
        yield "install.program", f"{install.program!r} is not a path inside the installation"


def _option_faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    for name in spec.options:
        if name in PLACEHOLDERS:
            yield f"options.{name}", "is one of Turngate's own placeholders; choose another name"
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            yield f"options.{name}", "may only contain a-z, 0-9 and _"


def _placeholder_faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    known = [*PLACEHOLDERS, *spec.options]
    samples: dict[str, placeholders.Value] = dict.fromkeys(known, "x")
    samples |= {"context_tokens": 1, "max_output_tokens": 1}
    for field, text in spec.texts():
        try:
            placeholders.fill(text, samples)
        except placeholders.UnknownPlaceholder as error:
            hint = suggestion(error.name, known) if error.name not in known else ""
            yield field, f"{{{error.name}}} {error}{hint}"
        if field.startswith("signals.") and set(placeholders.find_names(text)) - {"model", "small_model"}:
            yield field, "only {model} and {small_model} can be used here"
    install = spec.install
    for name, field, given in (
        ("install", "npm or pip", install.npm or install.pip),
        ("program", "program", install.program),
        ("python", "python", install.python),
    ):
        if spec.uses(name) and not given:
            yield "install", f"{{{name}}} is used, but [install] has no {field}"


def _key_faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    """Check where the key goes: every process of the machine can see a command line, and every user a file that is not private."""
    for field, text in spec.texts():
        if (
            "api_key" in placeholders.find_names(text)
            and not field.startswith("env.")
            and not field.endswith(".content")
        ):
            yield field, "{api_key} may only be used in env, or in a file of mode 0600"
    for n, file in enumerate(spec.files):
        outside = file.path.startswith("/") or ".." in Path(file.path).parts
        if outside or not file.path.strip():
            yield (
                f"files[{n}].path",
                f"{file.path!r} is not below HOME or {{workdir}}; write a path like .config/x.json",
            )
        if not re.fullmatch(r"0?[0-7]{3}", file.mode):
            yield f"files[{n}].mode", f"{file.mode!r} is not a mode like 0644"
        elif "api_key" in placeholders.find_names(file.content) and int(file.mode, 8) & 0o077:
            yield f"files[{n}].mode", f'is {file.mode}, but the file contains {{api_key}}; write mode = "0600"'


def _transcript_faults(transcript: Transcript) -> Iterator[tuple[str, str]]:
    if transcript.stdout == bool(transcript.path):
        yield "transcript", "give either path or stdout = true"
    for field, glob in (("path", transcript.path), ("subagents", transcript.subagents)):
        pattern = Path(glob)
        if pattern.is_absolute() or ".." in pattern.parts:
            yield f"transcript.{field}", f"{str(pattern)!r} is not a path below HOME"
    if (transcript.format == "json") != bool(transcript.records):
        yield "transcript.records", 'is required for format = "json", and not allowed otherwise'
    if (transcript.merge == "end") != bool(transcript.end):
        yield "transcript.end", 'is required for merge = "end", and not allowed otherwise'
    if transcript.begin and transcript.merge != "end":
        yield "transcript.begin", 'is only allowed with merge = "end"'
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
            yield f"transcript.{field}", f"is not valid JMESPath: {str(error).splitlines()[0]}"
