"""Tests for the mutations of Python code: what each kind changes, and what is left alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from turngate.tasks.repairs.mutations import Kind, find_mutations

CASES: list[tuple[Kind, str, set[str]]] = [
    ("comparison", "return a < b", {"return a <= b"}),
    ("comparison", "return a is not None", {"return a is None"}),
    ("comparison", "return (a) in (b)", {"return (a) not in (b)"}),
    ("comparison", "return a == b == c", set()),  # a chain is left alone
    ("arithmetic", "return a + b", {"return a - b"}),
    ("arithmetic", "return a // b", {"return a / b"}),
    ("arithmetic", "return 'x' + a", set()),  # texts cannot be subtracted
    ("boolean", "return a and b", {"return a or b"}),
    ("dropped negation", "return not a", {"return a"}),
    ("condition", "return 'x' if a else 'y'", {"return 'x' if not a else 'y'"}),
    ("off by one", "return a[1:]", {"return a[2:]", "return a[0:]"}),
    ("off by one", "return a[0]", {"return a[1]"}),
    ("off by one", "return a * 1000", set()),
    ("off by one", "return 0x1f", set()),
    ("wrong constant", "return True", {"return False"}),
    ("swapped arguments", "return f(a,  b)", {"return f(b,  a)"}),
    ("swapped arguments", "return f(*a, b)", set()),
    ("wrong variable", "return len(b)", {"return len(a)"}),
    ("wrong call", "return min(a)", {"return max(a)"}),
    ("wrong call", "return a.lstrip()", {"return a.rstrip()"}),
]


@pytest.mark.parametrize(("kind", "line", "expected"), CASES, ids=[f"{kind}: {line}" for kind, line, _ in CASES])
def test_kinds(kind: Kind, line: str, expected: set[str]) -> None:
    source = f"def function(a, b):\n    {line}\n"
    found = {one.apply(source).split("\n")[1].strip() for one in find_mutations(source) if one.kind == kind}
    assert found == expected


@pytest.mark.parametrize(
    ("kind", "dropped"),
    [("dropped branch", "    if a:\n        return b\n"), ("dropped statement", "    b.append(a)\n")],
)
def test_dropped_statements(kind: Kind, dropped: str) -> None:
    source = f"def function(a, b):\n{dropped}    return a\n"
    [mutation] = [one for one in find_mutations(source) if one.kind == kind]
    assert mutation.apply(source) == source.replace(dropped, "")
    alone = f"def function(a, b):\n{dropped}"
    assert kind not in {one.kind for one in find_mutations(alone)}  # an empty function would not be valid


def test_wrong_defaults() -> None:
    source = "def function(a=1, *, b=True):\n    return a\n"
    found = {one.apply(source).split("\n")[0] for one in find_mutations(source) if one.kind == "wrong default"}
    assert found == {"def function(a=2, *, b=True):", "def function(a=1, *, b=False):"}


@pytest.mark.parametrize(
    "source",
    [
        "LIMIT = 3\n",  # outside of functions
        "def function(a: list[1]) -> tuple[2]:\n    '''Doc 1 < 2.'''\n    x: int = a\n    return x\n",
        "@decorate(1, 2)\ndef function():\n    pass\n",
        "def function(a):\n    raise ValueError(1, a)\n",
        "def function(a):\n    return f'{a + 1}'\n",
    ],
)
def test_passive_code_is_left_alone(source: str) -> None:
    assert find_mutations(source) == []


def test_operators_are_found_behind_comments_and_brackets() -> None:
    source = "def function(a, b):\n    return ((a)  # less (<) than\n            < (b))\n"
    [mutation] = [one for one in find_mutations(source) if one.kind == "comparison"]
    assert mutation.apply(source) == source.replace("            < (b)", "            <= (b)")
    assert mutation.line == 3


def test_columns_count_characters_not_bytes() -> None:
    source = "def function(a, b):\n    return ('ä€😀', a < b)\n"
    [mutation] = [one for one in find_mutations(source) if one.kind == "comparison"]
    assert mutation.apply(source) == source.replace("<", "<=")


def test_place_of_a_mutation() -> None:
    source = "class Reader:\n    @property\n    def size(self):\n        def inner():\n            return 1\n        return inner()\n"
    mutations = find_mutations(source)
    assert {(one.function, one.first, one.last, one.line) for one in mutations} == {("Reader.size", 2, 6, 5)}


@pytest.mark.full
def test_every_mutation_is_valid_and_different() -> None:
    source = Path(ast.__file__).read_text(encoding="utf-8")
    trees = {ast.dump(ast.parse(source))}
    mutations = find_mutations(source)[::25]
    assert len(mutations) > 20
    for mutation in mutations:
        trees.add(ast.dump(ast.parse(mutation.apply(source))))
    assert len(trees) == len(mutations) + 1
