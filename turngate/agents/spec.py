"""The description of one agent, read from TOML: what it is, how it is installed, configured, started and read.

Presets lie in `catalog/`. A user's own files come from `--agent ./my.toml`, `$TURNGATE_AGENTS` (files or folders) and
`~/.config/turngate/agents/`; one that has a preset's name takes its place, visibly. Everything that can be wrong with a
description is found when it is read: unknown fields, unknown placeholders, a key that would end up in a command line.
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
from turngate.trace import signals as told
from turngate.trace.signals import Signals

CATALOG = Path(__file__).parent / "catalog"
Dialect = Literal["chat", "responses", "messages", "gemini", "any"]

# What every run knows. Options of the agent's own come on top.
PLACEHOLDERS = {
    "base_url": "where the gateway listens, without /v1",
    "api_key": "the session's secret; only in `env` and in files of mode 0600",
    "model": "the model's name",
    "small_model": "the name for side calls: the model's, with -small behind it",
    "context_tokens": "the model's context length",
    "max_output_tokens": "the most tokens of one reply",
    "home": "$HOME in the sandbox",
    "workdir": "where the agent works",
    "prompt": "the task's text",
    "prompt_file": "a file that holds the task's text",
    "install": "the folder of the installation",
    "program": "the installed program",
    "node": "a Node binary",
    "python": "the Python that the installation was made for",
}


class Install(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the program comes from: npm, PyPI, or it is in the sandbox's image already."""

    npm: str = ""  # a package on npm
    pip: str = ""  # a package on PyPI
    version: str = ""  # the pin of either
    also: tuple[str, ...] = ()  # pip: further requirements, pinned
    deps: bool = True  # pip: what the package asks for comes too; false where `also` is the whole list
    python: str = ""  # pip: the Python to install for, like 3.11; the sandbox must have it
    program: str = ""  # the program, as a path inside the installation
    check: tuple[str, ...] = ()  # a command that succeeds where the agent is in the image


class AgentFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that is written before the agent starts. In .json, .toml and .yaml files values are put in as inside quotes."""

    path: str
    content: str
    mode: str = "0644"


class Transcript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the agent writes down its own turns, and how to read them. The expressions are JMESPath.

    `turn` is tried on every record; it gives null or false, or a turn or a part of one: {id, text, reasoning, calls: [{name, arguments}]}.
    Parts are put together by `merge`: `id` joins those of one id, and those without one with the part before; `last` keeps the last of
    one id; `end` joins all up to a record that `end` says something about, which is the turn's id. At a record of `begin`, what has no
    end yet was somebody else's.
    """

    path: str = ""  # below HOME, as in file names
    stdout: bool = False  # the transcript is what the agent prints
    format: Literal["json", "jsonl"] = "jsonl"
    records: str = ""  # json: the list of records
    turn: str
    begin: str = ""
    end: str = ""
    merge: Literal["none", "id", "last", "end"] = "none"
    subagents: str = ""  # where sub-agents' transcripts lie, if not beside the main one
    subagent: str = ""  # true for a record that only a sub-agent's transcript has
    fills_in: bool = False  # the agent adds arguments that the model left out


class Option(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A placeholder of the agent's own, to be set for one run. Without a default it has to be."""

    about: str
    default: str | None = None


class CheckCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of one of the agent's tools. {workdir} may be in its arguments."""

    tool: str
    arguments: dict[str, Any] = {}


class CheckStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the scripted engine says in one turn of `turngate agents check`."""

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
    stdin: str = ""  # what the command reads: usually {prompt}
    install: Install = Install()
    files: tuple[AgentFile, ...] = ()
    env: dict[str, str] = {}
    options: dict[str, Option] = {}
    transcript: Transcript | None = None
    logs: tuple[str, ...] = ()  # below HOME, as in file names
    off: dict[str, str] = {}  # what is switched off for training, and how
    signals: Signals = Signals()
    limits: tuple[str, ...] = ()  # what does not work, in words
    check: tuple[CheckStep, ...] = ()  # how the model does the task of `turngate agents check` with this agent's tools

    def texts(self) -> Iterator[tuple[str, str]]:
        """Every text that may hold placeholders, with the name of its field."""
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
    """An agent and the file it was read from; `shadows` is the file whose place it takes."""

    spec: AgentSpec
    file: Path
    shadows: Path | None = None


def find_agent(name: str, cwd: Path | None = None) -> CatalogEntry:
    """The agent of that name, or in that file: anything with a slash or with .toml at its end is a file."""
    if "/" in name or name.endswith(".toml"):
        file = (cwd or Path.cwd()) / Path(name).expanduser()
        spec = load_spec(file)
        known = load_catalog().get(spec.name)
        return CatalogEntry(spec, file, known.file if known and known.file.resolve() != file.resolve() else None)
    agents = load_catalog()
    if name not in agents:
        near = suggestion(name, list(agents)).rstrip("?") + "."
        raise AgentError(
            f"agent: there is none called {name!r}{near} A file of your own is given as ./{name}.toml", param="agent"
        )
    return agents[name]


def load_catalog() -> dict[str, CatalogEntry]:
    """Every agent that is known, by name: presets, and the user's own over them."""
    agents: dict[str, CatalogEntry] = {}
    for layer in (_toml_files(CATALOG), *_user_layers()):
        seen: dict[str, Path] = {}
        for file in layer:
            spec = load_spec(file)
            if spec.name in seen:
                raise AgentError(f"{file}: name: {spec.name!r} is also the name in {seen[spec.name]}", param="name")
            seen[spec.name] = file
            below = agents.get(spec.name)
            agents[spec.name] = CatalogEntry(spec, file, below.file if below else None)
    return dict(sorted(agents.items()))


def load_spec(file: Path) -> AgentSpec:
    """One description, checked."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise AgentError(f"{file}: cannot be read ({error.strerror})", param="agent") from None
    except UnicodeDecodeError:
        raise AgentError(f"{file}: is not UTF-8 text", param="agent") from None
    return parse_spec(text, str(file))


def parse_spec(text: str, where: str) -> AgentSpec:
    """A description's text; `where` names it in errors."""
    try:
        spec = msgspec.convert(tomllib.loads(text), AgentSpec)
    except tomllib.TOMLDecodeError as error:
        raise AgentError(f"{where}: is not valid TOML: {error}", param="agent") from None
    except msgspec.ValidationError as error:
        message, field = explain_error(error, AgentSpec)
        raise AgentError(f"{where}: {message}", param=field) from None
    for field, wrong in _faults(spec):
        raise AgentError(f"{where}: {field}: {wrong}", param=field)
    return spec


def _user_layers() -> Iterator[list[Path]]:
    """The user's files, the weaker first."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    yield _toml_files(config / "turngate" / "agents")
    for entry in reversed((os.environ.get("TURNGATE_AGENTS") or "").split(os.pathsep)):
        if entry:
            place = Path(entry).expanduser()
            if not place.exists():
                raise AgentError(f"TURNGATE_AGENTS: {place} does not exist", param="TURNGATE_AGENTS")
            yield _toml_files(place) if place.is_dir() else [place]


def _toml_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.toml"))


# ---- what types cannot say ----


def _faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    """The field and what is wrong with it; the first is shown."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", spec.name):
        yield "name", f"{spec.name!r} may only hold a-z, 0-9 and -"
    if not spec.command:
        yield "command", "is empty; give the program and its arguments as a list"
    yield from _install_faults(spec)
    yield from _option_faults(spec)
    yield from _placeholder_faults(spec)
    yield from _key_faults(spec)
    yield from told.find_faults(spec.signals)
    if spec.transcript:
        yield from _transcript_faults(spec.transcript)


def _install_faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    made = spec.install
    if made.npm and made.pip:
        yield "install", "give npm or pip, not both"
    packaged = bool(made.npm or made.pip)
    if packaged and not re.fullmatch(r"[0-9][\w.+-]*", made.version):
        yield "install.version", f"{made.version!r} is not an exact version; pin one, like 1.2.3"
    if not packaged and (made.version or made.program):
        yield "install", "version and program belong to a package; give npm or pip too"
    if made.npm and not made.program:
        yield "install.program", "is missing: the program's path inside the installation, like node_modules/x/bin/x.js"
    if made.npm and (made.also or made.python or not made.deps):
        yield "install", "also, python and deps belong to pip"
    if made.pip and not re.fullmatch(r"3\.[0-9]+", made.python):
        yield "install.python", f"{made.python!r} is not a version of Python like 3.11"
    for n, requirement in enumerate(made.also):
        if not re.fullmatch(r"[\w.\[\]-]+==[\w.+!-]+", requirement):
            yield f"install.also[{n}]", f"{requirement!r} is not pinned; write name==version"
    if Path(made.program).is_absolute() or ".." in Path(made.program).parts:
        yield "install.program", f"{made.program!r} is not a path inside the installation"


def _option_faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    for name in spec.options:
        if name in PLACEHOLDERS:
            yield f"options.{name}", "is a placeholder of Turngate's own; choose another name"
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            yield f"options.{name}", "may only hold a-z, 0-9 and _"


def _placeholder_faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    known = [*PLACEHOLDERS, *spec.options]
    samples: dict[str, placeholders.Value] = dict.fromkeys(known, "x")
    samples |= {"context_tokens": 1, "max_output_tokens": 1}
    for field, text in spec.texts():
        try:
            placeholders.fill(text, samples)
        except placeholders.UnknownPlaceholder as error:
            near = suggestion(error.name, known) if error.name not in known else ""
            yield field, f"{{{error.name}}} {error}{near}"
        if field.startswith("signals.") and set(placeholders.find_names(text)) - {"model", "small_model"}:
            yield field, "only {model} and {small_model} can be used here"
    made = spec.install
    for name, field, given in (
        ("install", "npm or pip", made.npm or made.pip),
        ("program", "program", made.program),
        ("python", "python", made.python),
    ):
        if spec.uses(name) and not given:
            yield "install", f"{{{name}}} is used, but [install] has no {field}"


def _key_faults(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    """A command line is seen by every process of the machine; a file of another mode by every user."""
    for field, text in spec.texts():
        if (
            "api_key" in placeholders.find_names(text)
            and not field.startswith("env.")
            and not field.endswith(".content")
        ):
            yield field, "{api_key} may only be in env, or in a file of mode 0600"
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
            yield f"files[{n}].mode", f'is {file.mode}, but the file holds {{api_key}}; write mode = "0600"'


def _transcript_faults(transcript: Transcript) -> Iterator[tuple[str, str]]:
    if transcript.stdout == bool(transcript.path):
        yield "transcript", "give path or stdout = true, one of them"
    for field, place in (("path", transcript.path), ("subagents", transcript.subagents)):
        pattern = Path(place)
        if pattern.is_absolute() or ".." in pattern.parts:
            yield f"transcript.{field}", f"{str(pattern)!r} is not a path below HOME"
    if (transcript.format == "json") != bool(transcript.records):
        yield "transcript.records", "belongs to format json, which needs it"
    if (transcript.merge == "end") != bool(transcript.end):
        yield "transcript.end", 'belongs to merge = "end", which needs it'
    if transcript.begin and transcript.merge != "end":
        yield "transcript.begin", 'belongs to merge = "end"'
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
