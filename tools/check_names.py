#!/usr/bin/env python3
"""Check names, prose and sizes: `python tools/check_names.py [PATH …]`. Part of `make check`.

Reasons: docs/decisions/0015-names-and-layout.md.

- The name of a function that does something starts with an imperative verb. Past participles are for properties and predicates.
- A public class name means one thing in the whole package, and a module is named for the thing in it.
- Docstrings, comments and messages avoid the words in `BANNED`.
- A class has at most 30 methods, a function 60 lines, a file 600 lines.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "turngate"
SHARED_NAMES = {"TurngateEnv"}  # a verifiers environment and an OpenEnv client, each named by that library's convention
METHODS, FUNCTION_LINES, FILE_LINES = 30, 60, 600

PARTICIPLES = re.compile(
    "asked|begun|beaten|bent|born|bought|bound|broken|brought|built|burnt|caught|chosen|come|done|drawn|driven|dug|eaten|fallen|felt|flown|forgotten"
    "|fought|found|frozen|given|gone|gotten|grown|heard|held|hidden|kept|known|laid|left|lent|lost|made|meant|met|paid|risen|said|seen|sent|shown"
    "|sold|spent|spoken|stolen|stood|struck|swept|taken|taught|thought|thrown|told|torn|understood|woken|won|worn|written|[a-z]{3,}ed"
)
# Participles that may start a noun phrase, as in `_expected_cases()`. Without a noun, they are rejected.
ADJECTIVES = re.compile(
    "allowed|expected|installed|known|observed|recorded|requested|required|sampled|stored|supported"
)
VERBS = re.compile("embed|exceed|feed|heed|need|proceed|seed|shed|speed|succeed")
MODULES = re.compile(
    "apart|asked|beside|books|clamped|close|endings|gone|known|left|live|made|meaning|orders|passes|places|rest|shown|siblings|slots|subject|survey"
    "|tally|told|together|usable|viewed|wishes|words"
)
BANNED = re.compile(
    r"\b(whoever|nobody|mend(s|ed|ing)?|come by|comes by|came of|made up for|in order(?! to\b| of\b)|is told|are told|was told)\b",
    re.IGNORECASE,
)


def is_participle(name: str) -> bool:
    """Return whether the first word of a function's name is a past participle."""
    word, _, noun = name.strip("_").partition("_")
    return bool(PARTICIPLES.fullmatch(word)) and not VERBS.fullmatch(word) and not (noun and ADJECTIVES.fullmatch(word))


def names_an_action(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is an action, which means that it is neither a property nor a predicate."""
    decorators = {ast.unparse(one).rpartition(".")[2] for one in function.decorator_list}
    returns = ast.unparse(function.returns) if function.returns else ""
    return not decorators & {"property", "cached_property", "setter"} and not returns.startswith(
        ("bool", "TypeGuard", "TypeIs")
    )


def check_file(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8")
    place = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    if MODULES.fullmatch(path.stem):
        yield f"{place}:1: the module's name does not describe its content; rename it after the thing in it"
    if (lines := source.count("\n")) > FILE_LINES:
        yield f"{place}:1: {lines} lines, but at most {FILE_LINES} are allowed"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if is_participle(node.name) and names_an_action(node):
                yield f"{place}:{node.lineno}: {node.name}() is an action; start its name with an imperative verb"
            if (size := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES:
                yield f"{place}:{node.lineno}: {node.name}() has {size} lines, but at most {FUNCTION_LINES} are allowed"
        elif isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            if len(methods) > METHODS:
                yield f"{place}:{node.lineno}: {node.name} has {len(methods)} methods, but at most {METHODS} are allowed"
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_prose = token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string)
        if is_prose and (found := BANNED.search(token.string)):
            line = token.start[0] + token.string[: found.start()].count("\n")
            yield f"{place}:{line}: reword “{found[0]}” in plain English"


def check_class_names(paths: list[Path]) -> Iterator[str]:
    """Find public class names that several modules of the package define."""
    first: dict[str, Path] = {}
    for path in paths:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                if node.name in first and node.name not in SHARED_NAMES:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: class {node.name} is also in {first[node.name].relative_to(ROOT)}"
                first.setdefault(node.name, path)


def main() -> int:
    wanted = [Path(one).resolve() for one in sys.argv[1:]] or [PACKAGE]
    paths = sorted({path for one in wanted for path in ([one] if one.is_file() else one.rglob("*.py"))})
    problems = [problem for path in paths for problem in check_file(path)]
    inside = {str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT)}
    problems += [
        one
        for one in check_class_names(sorted(PACKAGE.rglob("*.py")))
        if one.partition(":")[0] in inside or not sys.argv[1:]
    ]
    print("\n".join(problems))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
