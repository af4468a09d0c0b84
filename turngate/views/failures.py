"""Summarize failures by class: the most frequent messages, and examples of each."""

from __future__ import annotations

import re
import time

from turngate.store.store import Store
from turngate.types import Json
from turngate.views.rollout_index import RolloutIndex

MOST_MESSAGES = 50
EXAMPLES = 5
_NUMBER = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{8,}\b|\d+")  # a hexadecimal number may start with decimal digits


def remove_numbers(message: str) -> str:
    """Replace each decimal or hexadecimal number with `#`, so that messages that differ only in numbers are counted together."""
    return _NUMBER.sub("#", message)


def summarize_failures(index: RolloutIndex, store: Store, prefix: str) -> dict[str, Json]:
    """Count the failures of rollouts in groups whose names start with `prefix`, by class and message, most frequent first.

    Messages that differ only in numbers are counted together.
    """
    cursor, now = index.refresh(store), time.time()
    by_class: dict[str, dict[str, list[tuple[str, str]]]] = {}  # ids and messages, by class and message without numbers
    for entry in index.all(now):
        row, (kind, message) = entry.row, entry.failure
        if not kind or not row.group.startswith(prefix):
            continue
        by_class.setdefault(kind, {}).setdefault(remove_numbers(message), []).append((row.id, message))
    classes = []
    for kind, messages in sorted(by_class.items(), key=lambda item: -sum(map(len, item[1].values()))):
        frequent = sorted(messages.values(), key=len, reverse=True)[:MOST_MESSAGES]
        classes.append(
            {
                "class": kind,
                "count": sum(map(len, messages.values())),
                "messages": [
                    {
                        "message": rollouts[-1][1],
                        "count": len(rollouts),
                        "rollouts": [name for name, _ in rollouts[: -EXAMPLES - 1 : -1]],
                    }
                    for rollouts in frequent
                ],
            }
        )
    return {"classes": classes, "cursor": cursor}
