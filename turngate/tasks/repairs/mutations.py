"""Mutations: small edits to Python code that resemble a programmer's mistakes.

`find_mutations` lists every mutation of a file. A mutation replaces one piece of the text, so the formatting and the comments of the
rest of the file stay unchanged. Every mutation is inside a function, changes the code itself (not just annotations or docstrings), and
leaves it syntactically valid.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

Kind = Literal[
    "comparison",  # a < b       → a <= b
    "arithmetic",  # a + b       → a - b
    "boolean",  # a and b        → a or b
    "condition",  # if a:        → if not a:
    "off by one",  # items[1:]   → items[2:]
    "wrong default",  # f(a=True)   → f(a=False)
    "wrong constant",  # return True  → return False
    "swapped arguments",  # f(a, b)  → f(b, a)
    "wrong variable",  # a           → b, another parameter
    "wrong call",  # min(a)          → max(a)
    "dropped branch",  # if a: return b  → nothing
    "dropped statement",  # a.append(b)  → nothing
    "dropped negation",  # not a     → a
]

_COMPARISONS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is not": "is",
    "is": "is not",
    "not in": "in",
    "in": "not in",
}
_ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "/", "%": "//", "**": "*"}
_BOOLEANS = {"and": "or", "or": "and"}
_CALLS = {
    one: other
    for pair in (
        ("min", "max"),
        ("any", "all"),
        ("startswith", "endswith"),
        ("lstrip", "rstrip"),
        ("append", "extend"),
        ("lower", "upper"),
        ("split", "rsplit"),
        ("partition", "rpartition"),
        ("find", "rfind"),
        ("floor", "ceil"),
        ("keys", "values"),
    )
    for one, other in (pair, pair[::-1])
}
# Annotations, decorators, and parameter defaults. Defaults have their own kind of mutation.
_SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "type_params", "defaults", "kw_defaults"}
_LARGEST_OFF_BY_ONE = 100  # larger numbers are rarely counts or positions


class Mutation(msgspec.Struct, frozen=True, kw_only=True):
    """One edit: the text between the character offsets `start` and `end` becomes `text`."""

    kind: Kind
    function: str  # the function that contains the edit, such as Reader.read
    first: int  # first line of that function, including decorators
    last: int
    line: int  # the line of the edit
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def find_mutations(source: str) -> list[Mutation]:
    """List the mutations of a file in the order of their positions, without duplicates.

    Raise `SyntaxError` if the file is not valid Python.
    """
    search = _Search(source)
    found: list[Mutation] = []
    seen: set[tuple[int, str]] = set()
    for mutation in sorted(search.run(ast.parse(source)), key=lambda one: (one.start, one.end, one.kind, one.text)):
        # Parse only the function, not the whole file: a file can have thousands of mutations.
        start, end = search.find_lines(mutation.first, mutation.last)
        before, after = source[start : mutation.start], source[mutation.end : end]
        seen.add((start, _dump_function(source[start:end])))
        try:
            changed = _dump_function(before + mutation.text + after)
        except (SyntaxError, ValueError):
            continue
        if (start, changed) not in seen:
            seen.add((start, changed))
            found.append(mutation)
    return found


@functools.lru_cache(maxsize=8)
def _dump_function(text: str) -> str:
    return ast.dump(ast.parse(f"if True:\n{text}" if text[0].isspace() else text))


class _Function(msgspec.Struct, frozen=True):
    name: str
    first: int
    last: int
    parameters: tuple[str, ...]


class _Search:
    """Walks a syntax tree and yields the mutations of every function in it."""

    def __init__(self, source: str) -> None:
        self._source = source
        lines = re.findall(r"[^\n]*\n|[^\n]+", source)  # str.splitlines would also split at form feeds
        self._lines = [line.encode() for line in lines]
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._function: _Function | None = None
        self._scope: tuple[str, ...] = ()

    def run(self, tree: ast.Module) -> Iterator[Mutation]:
        yield from self._visit_children(tree)

    def _visit_children(self, node: ast.AST) -> Iterator[Mutation]:
        for name, value in ast.iter_fields(node):
            if name in _SKIPPED_FIELDS:
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._visit(child, node)

    def _visit(self, node: ast.AST, parent: ast.AST) -> Iterator[Mutation]:
        if _is_passive(node):
            return
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from self._visit_scope(node)
            return
        if self._function is not None:
            for edit in _EDITS:
                yield from edit(self, node, parent)
        yield from self._visit_children(node)

    def _visit_scope(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Mutation]:
        outer, scope = self._function, self._scope
        self._scope = (*scope, node.name)
        if isinstance(node, ast.ClassDef):
            self._function = None
        elif outer is None:  # a nested function belongs to the outer one
            arguments = node.args
            names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            self._function = _Function(
                ".".join(self._scope),
                min([node.lineno, *(one.lineno for one in node.decorator_list)]),
                node.end_lineno or node.lineno,
                tuple(name for name in names if name not in ("self", "cls")),
            )
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from self._find_wrong_defaults(node.args)
        yield from self._visit_children(node)
        self._function, self._scope = outer, scope

    def find_lines(self, first: int, last: int) -> tuple[int, int]:
        """Return the offset at which line `first` starts, and the offset at which line `last` ends."""
        return self._starts[first - 1], self._starts[last]

    # ── positions ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _offset(self, line: int, column: int) -> int:
        """Convert a line and a byte column, as in syntax trees, to an offset in characters."""
        return self._starts[line - 1] + len(self._lines[line - 1][:column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self._source[start:end]

    def _edit(self, kind: Kind, start: int, end: int, text: str) -> Mutation:
        assert self._function is not None
        return Mutation(
            kind=kind,
            function=self._function.name,
            first=self._function.first,
            last=self._function.last,
            line=self._source.count("\n", 0, start) + 1,
            start=start,
            end=end,
            text=text,
        )

    def _replace(self, kind: Kind, node: ast.expr | ast.stmt, text: str) -> Mutation:
        return self._edit(kind, *self._span(node), text)

    def _replace_operator(
        self, kind: Kind, left: ast.expr, right: ast.expr, table: dict[str, str]
    ) -> Iterator[Mutation]:
        """Yield the mutation that replaces the operator between two operands.

        Brackets, line breaks and comments may surround the operator.
        """
        start, end = self._span(left)[1], self._span(right)[0]
        words = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in sorted(table, key=len, reverse=True))
        match = re.search(words, re.sub(r"#[^\n]*", lambda comment: " " * len(comment[0]), self._source[start:end]))
        if match is not None:
            new = table[" ".join(match[0].split())]
            yield self._edit(kind, start + match.start(), start + match.end(), new)

    # ── the kinds ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _edit_comparison(self, node: ast.AST, parent: ast.AST) -> Iterator[Mutation]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from self._replace_operator("comparison", node.left, node.comparators[0], _COMPARISONS)

    def _edit_arithmetic(self, node: ast.AST, parent: ast.AST) -> Iterator[Mutation]:
        if isinstance(node, ast.BinOp) and not any(_is_text(side) for side in (node.left, node.right)):
            yield from self._replace_operator("arithmetic", node.left, node.right, _ARITHMETIC)

    def _edit_boolean(self, node: ast.AST, parent: ast.AST) -> Iterator[Mutation]:
        if isinstance(node, ast.BoolOp) and len(node.values) == 2:
            yield from self._replace_operator("boolean", node.values[0], node.values[1], _BOOLEANS)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._replace("dropped negation", node, self._text(node.operand))

    def _edit_condition(self, node: ast.AST, parent: ast.AST) -> Iterator[Mutation]:
        if isinstance(node, ast.If | ast.IfExp) and isinstance(node.test, ast.Name | ast.Call | ast.Attribute):
            yield self._replace("condition", node.test, f"not {self._text(node.test)}")

    def _edit_constant(self, node: ast.AST, parent: ast.AST) -> Iterator[Mutation]:
        if not isinstance(node, ast.Constant):
            return
        if isinstance(node.value, bool):
            if isinstance(parent, ast.Return | ast.keyword | ast.Assign):
                yield self._replace("wrong constant", node, str(not node.value))
        elif isinstance(node.value, int) and abs(node.value) <= _LARGEST_OFF_BY_ONE and self._text(node).isdigit():
            yield self._replace("off by one", node, str(node.value + 1))
            if node.value > 0:
                yield self._replace("off by one", node, str(node.value - 1))

    def _find_wrong_defaults(self, arguments: ast.arguments) -> Iterator[Mutation]:
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if isinstance(default, ast.Constant) and isinstance(default.value, bool):
                yield self._replace("wrong default", default, str(not default.value))
            elif isinstance(default, ast.Constant) and isinstance(default.value, int) and self._text(default).isdigit():
                yield self._replace("wrong default", default, str(default.value + 1))

    def _edit_call(self, node: ast.AST, parent: ast.AST) -> Iterator[Mutation]:
        if not isinstance(node, ast.Call):
            return
        name = node.func
        if isinstance(name, ast.Name) and name.id in _CALLS:
            yield self._replace("wrong call", name, _CALLS[name.id])
        if isinstance(name, ast.Attribute) and name.attr in _CALLS:
            end = self._span(name)[1]
            yield self._edit("wrong call", end - len(name.attr), end, _CALLS[name.attr])
        if len(node.args) >= 2 and not any(isinstance(one, ast.Starred) for one in node.args[:2]):
            first, second = node.args[:2]
            (start, _), (_, end) = self._span(first), self._span(second)
            between = self._source[self._span(first)[1] : self._span(second)[0]]
            yield self._edit("swapped arguments", start, end, self._text(second) + between + self._text(first))

    def _edit_variable(self, node: ast.AST, parent: ast.AST) -> Iterator[Mutation]:
        assert self._function is not None
        names = self._function.parameters
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names and len(names) > 1:
            yield self._replace("wrong variable", node, names[(names.index(node.id) + 1) % len(names)])

    def _edit_statement(self, node: ast.AST, parent: ast.AST) -> Iterator[Mutation]:
        """Yield the mutation that drops an `if` without `else`, an update such as `a += b`, or a call.

        A statement that is alone in its block is kept.
        """
        if isinstance(node, ast.If) and not node.orelse:
            kind: Kind = "dropped branch"
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            kind = "dropped statement"
        else:
            return
        blocks = [getattr(parent, name, None) for name in ("body", "orelse", "finalbody")]
        block = next((one for one in blocks if isinstance(one, list) and node in one), [])
        if len(block) < 2 or _is_elif(node, block, parent):
            return
        assert isinstance(node, ast.stmt) and node.end_lineno is not None
        start, end = self._starts[node.lineno - 1], self._starts[node.end_lineno]
        has_more = (
            self._source[start:end].strip() != self._text(node).strip()
        )  # the lines contain something else, such as a comment
        if not has_more:
            yield self._edit(kind, start, end, "")


_Edit = Callable[[_Search, ast.AST, ast.AST], Iterator[Mutation]]
_EDITS: tuple[_Edit, ...] = (
    _Search._edit_comparison,
    _Search._edit_arithmetic,
    _Search._edit_boolean,
    _Search._edit_condition,
    _Search._edit_constant,
    _Search._edit_call,
    _Search._edit_variable,
    _Search._edit_statement,
)


def _is_passive(node: ast.AST) -> bool:
    """Return whether a node must stay unchanged: a docstring, import, `TYPE_CHECKING` block, raise, assertion or f-string."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    return isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_elif(node: ast.AST, block: list[ast.stmt], parent: ast.AST) -> bool:
    return isinstance(parent, ast.If) and block is parent.orelse and block[0] is node and isinstance(node, ast.If)
