"""The groups of a feed: completing, replacing and faults, one by one and many at a time."""

from __future__ import annotations

import random

import pytest

from turngate.store.group_completion import FeedEntry, FeedGroups, NewEntry

Row = tuple[int, str, str, int | None]  # session, rollout, group, number


def entry(session: int, group: str = "g", *, rollout: str = "", fault: bool = False) -> NewEntry:
    return NewEntry(session, f"s{session}", rollout, group, b"{}", fault)


def add(rows: dict[int, Row], newest: int, entries: list[NewEntry], n: int, prefix: str = "") -> tuple[int, list[str]]:
    """Add entries in one transaction to rows by place. Return the newest number, and the groups completed by it."""
    known = [FeedEntry(*row, place=place) for place, row in rows.items()]
    groups = FeedGroups(n, prefix, newest, known)
    for one in entries:
        groups.add(one)
    for place in groups.removed:
        del rows[place]
    for number, _, members in groups.completed:
        for member in members:
            if member.place:
                rows[member.place] = (member.session, member.rollout, member.group, number)
    for place, one in enumerate(groups.added, max(rows, default=0) + 1):
        rows[place] = (one.session, one.rollout, one.group, one.number)
    return groups.newest, [f"{number}:{group}:{len(members)}" for number, group, members in groups.completed]


@pytest.mark.parametrize(
    "entries, delivered",
    [
        ([entry(1), entry(2)], ["1:g:2"]),
        ([entry(1), entry(2), entry(3), entry(4)], ["1:g:2", "2:g:2"]),
        ([entry(1), entry(1), entry(2)], ["1:g:2"]),
        ([entry(1), entry(1, "h"), entry(2)], []),
        ([entry(1, rollout="r"), entry(2, rollout="r"), entry(3)], ["1:g:2"]),
        ([entry(1), entry(1, fault=True), entry(2)], []),
        ([entry(1), entry(2), entry(1), entry(3)], ["1:g:2"]),
        ([entry(1, rollout="r"), entry(2), entry(3, rollout="r"), entry(4)], ["1:g:2"]),
        ([entry(1, "")], ["1::1"]),
        ([entry(1, "other"), entry(2, "other")], []),
    ],
    ids=["pair", "twice", "replaced", "moved", "retried", "fault", "late", "late retry", "no group", "prefix"],
)
def test_groups_complete(entries: list[NewEntry], delivered: list[str]) -> None:
    prefix = "g" if entries[0].group == "other" else ""
    assert add({}, 0, entries, 2, prefix)[1] == delivered


def test_entries_added_together_or_one_by_one_give_the_same_groups() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        entries = [
            entry(
                rng.randrange(1, 9),
                rng.choice(("", "g", "h", "x")),
                rollout=rng.choice(("", "r1", "r2", "r3")),
                fault=rng.random() < 0.15,
            )
            for _ in range(20)
        ]
        results = []
        for size in (1, 3, 20):
            rows: dict[int, Row] = {}
            newest, delivered = 0, []
            for start in range(0, 20, size):
                newest, completed = add(rows, newest, entries[start : start + size], 3, "" if seed % 2 else "g")
                delivered += completed
            results.append((newest, delivered, list(rows.values())))
        assert results[0] == results[1] == results[2], seed
