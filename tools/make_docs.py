"""Write the parts of `docs/` that are generated from the code, such as settings, agents and commands. `--check` only compares."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import typer

from turngate import cli, config
from turngate.agents.spec import CATALOG, load_spec
from turngate.doctor import CHECKS
from turngate.service import catalog
from turngate.service import config as service_config
from turngate.service.mcp_tools import TOOLS
from turngate.telemetry.metrics import FAMILIES

ROOT = Path(__file__).parents[1]
# Folders with modules that are not part of the package.
BESIDE_THE_PACKAGE = {
    "tools": "Programs that the Makefile and maintainers run.",
    "tests": "Code that the tests share. Each folder of tests is named after what it tests.",
    "tests/chaos": "`make chaos`: faults that are injected into live gateways.",
    "tests/fuzz": "`make fuzz`: random and damaged input.",
    "bench": "Measurements of speed and memory. `make bench` runs `overhead.py`.",
    "bench/scale": "The model of a cluster, and the measurements that it needs.",
}


def settings() -> str:
    return fields(config.ServeConfig, config)


def service() -> str:
    return fields(service_config.ServiceConfig, service_config)


def clamp() -> str:
    return fields(service_config.Clamp, service_config)


def endpoint() -> str:
    return fields(catalog.Endpoint, catalog)


def fields(struct: type[msgspec.Struct], module: ModuleType) -> str:
    """Return a table with one row per field of a settings struct: its default, and its description or comment."""
    source = Path(module.__file__ or "").read_text(encoding="utf-8")
    body = source.partition(f"class {struct.__name__}(")[2].partition("\nclass ")[0]
    comments = dict(re.findall(r"^    (\w+): [^\n#]*?(?:  # ([^\n]*))?$", body, re.M))
    hints = get_type_hints(struct, include_extras=True)
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for field in msgspec.structs.fields(struct):
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        about = next(
            (
                one
                for one in getattr(hints[field.name], "__metadata__", ())
                if isinstance(one, msgspec.Meta) and one.description
            ),
            None,
        )
        meaning = comments.get(field.name, "") if about is None else (about.description or "").removesuffix(".")
        if not meaning:
            raise SystemExit(f"{module.__file__}: {field.name} has neither a description nor a comment")
        kind = hints[field.name] if about is None else get_args(hints[field.name])[0]
        values = get_args(kind) if get_origin(kind) is Literal else ()
        allowed = (
            f" (one of {', '.join(f'`{value}`' for value in values)})"
            if any(value not in meaning for value in values)
            else ""
        )
        shown = "" if default is None or isinstance(default, msgspec.Struct) else f"`{default!r}`"
        rows.append(f"| `{field.name}` | {shown} | {meaning}{allowed} |")
    return "\n".join(rows) + "\n"


def agents() -> str:
    """Return a table with one row per bundled agent."""
    rows = ["| agent | version tested | dialect | switched off for training | known limits |", "|---|---|---|---|---|"]
    for file in sorted(CATALOG.glob("*.toml")):
        spec = load_spec(file)
        off = "<br>".join(spec.off) or "–"
        limits = "<br>".join(spec.limits) or "–"
        package = spec.install.npm or spec.install.pip
        version = f"{spec.install.version}<br>`{package}`" if package else "–"
        rows.append(f"| `{spec.name}`<br>{spec.title} | {version} | {spec.dialect} | {off} | {limits} |")
    return "\n".join(rows) + "\n"


def commands() -> str:
    """Return a section for each command, with its help, arguments and options."""
    root = typer.main.get_command(cli.app)
    return "\n".join(_command("turngate", root))


def _command(path: str, command: Any) -> Iterator[str]:
    """Yield the sections of a command and its subcommands. Its type is `Any`, because typer's classes are not those of click."""
    if inside := vars(command).get("commands"):
        for name, inner in inside.items():
            if not inner.hidden:
                yield from _command(f"{path} {name}", inner)
        return
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    yield f"## `{path}`\n\n{_prose(command.help or '')}\n"
    single = [
        param.name.upper() if param.required else f"[{param.name.upper()}]" for param in arguments if param.nargs == 1
    ]
    several = [
        f"{param.name.upper()} ..." if param.required else f"[{param.metavar or param.name.upper()} ...]"
        for param in arguments
        if param.nargs != 1
    ]
    yield f"    {' '.join([path, *single, '[OPTIONS]', *several])}\n"
    yield "| option | default | |\n|---|---|---|"
    for param in command.params:
        if param.param_type_name != "option" or param.hidden:
            continue
        names = "<br>".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
        default = "" if callable(param.default) or param.default in (None, "", False, (), []) else f"`{param.default}`"
        text, _, shown = (param.help or "").partition(" \\[default: ")
        yield f"| {names} | {f'`{shown[:-1]}`' if shown else default} | {_prose(text)} |"
    yield ""


def _prose(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def tools() -> str:
    """Return a section for each MCP tool, with the arguments in its schema."""
    parts = []
    for tool in TOOLS.values():
        hints = [
            word
            for word, holds in (
                ("read-only", tool.is_read_only),
                ("destructive", tool.is_destructive),
                ("idempotent", tool.is_idempotent),
            )
            if holds
        ]
        parts.append(
            f"### {tool.name}\n\n{tool.description} Returns `{tool.result.__name__}`{''.join(f'; {hint}' for hint in hints)}.\n"
        )
        schema = tool.input_schema()
        if schema["properties"]:
            rows = ["| argument | | |", "|---|---|---|"]
            for name, value in schema["properties"].items():
                default = "required" if name in schema["required"] else f"`{json.dumps(value.get('default'))}`"
                default = "" if default in ('`""`', "`null`", "`{}`") else default
                rows.append(f"| `{name}` | {default} | {value['description']} |")
            parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def checks() -> str:
    """Return a table with one row per check of `turngate doctor`."""
    places = {"here": "on the machine that serves", "gateway": "with `--gateway`", "anywhere": "always"}
    rows = ["| check | runs | passes if | time limit |", "|---|---|---|---|"]
    rows += [
        f"| {check.name} | {places[check.where]} | {check.description} | {check.timeout_s:.0f} s |" for check in CHECKS
    ]
    return "\n".join(rows) + "\n"


def metrics() -> str:
    """Return a table with one row per metric."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{family.name}` | {family.kind} | {labels} | {family.about} |")
    return "\n".join(rows) + "\n"


def modules() -> str:
    """Return one table per package, with the first sentence of each module's docstring."""
    parts = []
    for package in sorted(path.parent for path in (ROOT / "turngate").rglob("__init__.py")):
        rows = _list_modules(package)
        if rows:
            parts.append(_folder_table(package, _first_sentence(package / "__init__.py"), rows))
    pages = [*sorted((ROOT / "turngate/ui").rglob("*.js")), *sorted((ROOT / "turngate/ui").rglob("*.css"))]
    rows = [f"| `{path.relative_to(ROOT / 'turngate/ui').as_posix()}` | {_first_comment(path)} |" for path in pages]
    parts.append(_folder_table(ROOT / "turngate/ui", "The web page: plain JavaScript modules and CSS.", rows))
    parts += [_folder_table(ROOT / name, text, _list_modules(ROOT / name)) for name, text in BESIDE_THE_PACKAGE.items()]
    return "\n\n".join(parts) + "\n"


def _list_modules(folder: Path) -> list[str]:
    """Return a table row for each module of a folder, without its tests."""
    files = [path for path in sorted(folder.glob("*.py")) if path.name not in ("__init__.py", "__main__.py")]
    return [f"| `{path.name}` | {_first_sentence(path)} |" for path in files if not path.name.startswith("test_")]


def _folder_table(folder: Path, text: str, rows: list[str]) -> str:
    return "\n".join([f"### `{folder.relative_to(ROOT).as_posix()}/`\n", f"{text}\n", "| file | |", "|---|---|", *rows])


def _first_comment(path: Path) -> str:
    """Return the first sentence of the comment at the start of a file of the web page."""
    found = re.match(r"/\*+\s*(.*?)\*/", path.read_text(encoding="utf-8"), re.S)
    if not found:
        raise SystemExit(f"{path.relative_to(ROOT)} does not begin with a comment")
    text = _prose(re.sub(r"^\s*\*", "", found[1].partition("\n *\n")[0], flags=re.M))
    return re.split(r"(?<=[.?!])\s", text, maxsplit=1)[0]


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    if not text:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring")
    return re.split(r"(?<=[.?!])\s", _prose(text.partition("\n\n")[0]), maxsplit=1)[0]


PARTS = {
    "modules": ("architecture.md", modules),
    "checks": ("doctor.md", checks),
    "metrics": ("observability.md", metrics),
    "settings": ("configuration.md", settings),
    "service": ("service.md", service),
    "endpoint": ("service.md", endpoint),
    "clamp": ("service.md", clamp),
    "agents": ("agents.md", agents),
    "tools": ("mcp.md", tools),
    "commands": ("reference/cli.md", commands),
}


def main() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if left := re.findall(r"^[A-Z]+_[A-Z_]+$", readme, re.M):
        raise SystemExit(f"README.md: replace the placeholder {left[0]}")
    stale = set()
    for name, (page, make) in PARTS.items():
        path = ROOT / "docs" / page
        begin, end = f"<!-- {name}: made by tools/make_docs.py -->\n", f"<!-- end of {name} -->"
        text = path.read_text(encoding="utf-8")
        if begin not in text or end not in text:
            raise SystemExit(
                f"docs/{page} does not contain the markers of the section {name}; add: {begin.strip()} … {end}"
            )
        head, _, rest = text.partition(begin)
        made = head + begin + "\n" + make() + "\n" + end + rest.partition(end)[2]
        if "--check" in sys.argv:
            stale |= {f"docs/{page}"} if made != text else set()
        else:
            path.write_text(made, encoding="utf-8")
    if stale:
        raise SystemExit(f"out of date: {', '.join(sorted(stale))}; run: make format")


if __name__ == "__main__":
    main()
