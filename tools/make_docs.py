"""Writes the parts of `docs/` that follow from the code: the table of settings, the table of agents. `--check` only compares."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import msgspec

from turngate import config
from turngate.agents.spec import CATALOG, read

ROOT = Path(__file__).parents[1]


def settings() -> str:
    """One row per field of `ServeConfig`, with the comment that stands beside it."""
    source = Path(config.__file__).read_text(encoding="utf-8")
    comments = dict(re.findall(r"^    (\w+): [^\n#]*?(?:  # ([^\n]*))?$", source, re.M))
    hints = get_type_hints(config.ServeConfig)
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for field in msgspec.structs.fields(config.ServeConfig):
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        meaning = comments.get(field.name, "")
        if not meaning:
            raise SystemExit(f"turngate/config.py: {field.name} has no comment to say what it means")
        values = get_args(hints[field.name]) if get_origin(hints[field.name]) is Literal else ()
        allowed = f" (one of {', '.join(f'`{value}`' for value in values)})" if values else ""
        shown = "" if default is None else f"`{default!r}`"
        rows.append(f"| `{field.name}` | {shown} | {meaning}{allowed} |")
    return "\n".join(rows) + "\n"


def agents() -> str:
    """One row per preset, from its own description."""
    rows = ["| agent | version tested | dialect | switched off for training | known limits |", "|---|---|---|---|---|"]
    for file in sorted(CATALOG.glob("*.toml")):
        spec = read(file)
        off = "<br>".join(spec.off) or "–"
        limits = "<br>".join(spec.limits) or "–"
        package = spec.install.npm or spec.install.pip
        version = f"{spec.install.version}<br>`{package}`" if package else "–"
        rows.append(f"| `{spec.name}`<br>{spec.title} | {version} | {spec.dialect} | {off} | {limits} |")
    return "\n".join(rows) + "\n"


PARTS = {"settings": ("configuration.md", settings), "agents": ("agents.md", agents)}


def main() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if left := re.findall(r"^[A-Z]+_[A-Z_]+$", readme, re.M):
        raise SystemExit(f"README.md: {left[0]} is a placeholder that was not filled in")
    for name, (page, make) in PARTS.items():
        path = ROOT / "docs" / page
        begin, end = f"<!-- {name}: made by tools/make_docs.py -->\n", f"<!-- end of {name} -->"
        text = path.read_text(encoding="utf-8")
        if begin not in text or end not in text:
            raise SystemExit(f"docs/{page} has no place for the {name}: {begin.strip()} … {end}")
        head, _, rest = text.partition(begin)
        made = head + begin + "\n" + make() + "\n" + end + rest.partition(end)[2]
        if "--check" in sys.argv:
            if made != text:
                raise SystemExit(f"docs/{page} is not up to date; run: make format")
        else:
            path.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
