"""Writes the parts of `docs/` that follow from the code: the table of settings. `--check` only compares."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import msgspec

from turngate import config

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- settings: made by tools/make_docs.py -->\n", "<!-- end of settings -->"


def table() -> str:
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


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    made = head + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if left := re.findall(r"^[A-Z]+_[A-Z_]+$", readme, re.M):
        raise SystemExit(f"README.md: {left[0]} is a placeholder that was not filled in")
    if "--check" in sys.argv:
        if made != page:
            raise SystemExit(f"{PAGE.relative_to(ROOT)} is not up to date; run: make format")
        return
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
