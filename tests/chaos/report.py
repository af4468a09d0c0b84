"""The table of a run."""

from __future__ import annotations

from collections.abc import Sequence

from tests.chaos.suite import VERIFY, Row

_HEAD = (
    "fault",
    "rollouts",
    "calls",
    "errors reported",
    "cut off",
    "lost",
    "duplicated",
    "inexact",
    "wrong rewards",
    "recovery (s)",
)


def print_row(row: Row) -> None:
    print(" | ".join(_cells(row)) + ("" if row.is_clean else "   ← broken"), flush=True)


def merge_rows(rows: Sequence[Row]) -> list[Row]:
    """Add up the rows of each fault. The recovery time is the longest one."""
    merged: dict[str, Row] = {}
    for row in rows:
        if row.fault not in merged:
            merged[row.fault] = Row(row.fault, recovery_s=0.0)
        total = merged[row.fault]
        total.rollouts += row.rollouts
        total.counts.calls += row.counts.calls
        total.counts.errors_told += row.counts.errors_told
        total.counts.broken_off += row.counts.broken_off
        total.untold += row.untold
        total.breaches.add(row.breaches)
        is_known = total.recovery_s is not None and row.recovery_s is not None
        total.recovery_s = max(total.recovery_s or 0.0, row.recovery_s or 0.0) if is_known else None
    return list(merged.values())


def write_table(rows: Sequence[Row]) -> str:
    """Write the results as a Markdown table, one line for each kind of fault."""
    lines = [" | ".join(_HEAD), "|".join("---" for _ in _HEAD)]
    merged = merge_rows([row for row in rows if row.fault != VERIFY])
    lines += [" | ".join(_cells(row)) for row in merged]
    lines += [" | ".join(_cells(total)) for total in merge_rows([_rename(row) for row in merged])]
    return "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines)


def _rename(row: Row) -> Row:
    return Row("**all**", row.counts, row.rollouts, row.breaches, row.untold, row.recovery_s)


def _cells(row: Row) -> list[str]:
    counts, breaches = row.counts, row.breaches
    numbers = (row.rollouts, counts.calls, counts.errors_told, counts.broken_off)
    numbers += (breaches.lost, breaches.duplicated, breaches.inexact, breaches.wrong_rewards)
    recovery = "never" if row.recovery_s is None else f"{row.recovery_s:.1f}"
    return [row.fault, *map(str, numbers), recovery]
