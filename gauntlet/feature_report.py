"""Format what the rows of each gateway carry besides ids, mask and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from gauntlet.features import FEATURES
from gauntlet.run import Result
from gauntlet.table import DASH, format_table

COLUMN = "rows also carry"  # in the summary


def feature_table(results: Sequence[Result]) -> str:
    """Format a table with one row per gateway and one column per feature."""
    rows = []
    for result in results:
        marks = [result.features[feature].mark if feature in result.features else DASH for feature in FEATURES]
        rows.append([result.gateway, *marks])
    return format_table(("gateway", *FEATURES), rows)


def list_reasons(results: Sequence[Result]) -> list[str]:
    """List what every mark is based on, one line per gateway and reason."""
    lines = []
    for result in results:
        features: dict[tuple[str, str], list[str]] = {}
        for feature, verdict in result.features.items():
            if verdict.detail:
                features.setdefault((verdict.mark, verdict.detail), []).append(feature)
        for (mark, detail), names in features.items():
            lines.append(f"`{result.gateway}`, {', '.join(names)}: {mark}: {detail}")
    return lines


def describe_features(result: Result) -> str:
    """Name the features of which every value was right."""
    return ", ".join(name for name, verdict in result.features.items() if verdict.mark == "yes") or DASH


def feature_section(results: Sequence[Result]) -> str:
    parts = ["### What rows carry", feature_table(results), "\n".join(f"- {line}" for line in list_reasons(results))]
    return "\n\n".join(part for part in parts if part)
