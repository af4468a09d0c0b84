"""Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DASH = "–"


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def set_column(table: str, column: str, values: Mapping[str, str]) -> str:
    """Set a column of a table, or add it. `values` are by the first cell of a row; other rows get a dash."""
    head, _, *rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]
    if column in head:
        at = head.index(column)
        rows = [[*row[:at], *row[at + 1 :]] for row in rows]
        head.remove(column)
    return format_table([*head, column], [[*row, values.get(row[0], DASH)] for row in rows])
