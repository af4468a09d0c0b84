"""Tests for the warnings about groups of another size than the feed expects."""

from __future__ import annotations

import pytest

from turngate.client.group_sizes import GroupSizeWatch
from turngate.store.feeds import IncompleteGroup


def test_warning_only_while_groups_do_not_grow(caplog: pytest.LogCaptureFixture) -> None:
    watch = GroupSizeWatch("math", 8)
    looks = []
    for waited_s in range(0, 500, 10):
        if watch.is_look_due(waited_s):
            looks.append(waited_s)
            # The first group grows until the fourth look.
            watch.add_incomplete((IncompleteGroup("b.one", min(len(looks), 4)), IncompleteGroup("b.two", 1)), waited_s)
    assert looks == [10, 30, 60, 120, 240, 480]
    assert [message.partition("; ")[0] for message in caplog.messages] == [
        "feed math: still waiting for a group after 10 s: group b.one has 1 of 8 rollouts (incomplete groups: 2)",
        *(
            f"feed math: still waiting for a group after {waited} s: group b.one has 4 of 8 rollouts (incomplete groups: 2)"
            for waited in (240, 480)
        ),
    ]


def test_only_the_wait_is_reported_for_an_empty_feed_and_after_a_delivery(caplog: pytest.LogCaptureFixture) -> None:
    watch = GroupSizeWatch("math", 8)
    watch.add_incomplete((), 10)
    [message] = caplog.messages
    assert message.startswith("feed math: still waiting for a group after 10 s: there are no undelivered rollouts;")
    caplog.clear()
    watch.add_incomplete((), 30)
    watch.add_incomplete((), 60)
    stuck = (IncompleteGroup("b.one", 4),)
    watch.add_incomplete(stuck, 120)
    watch.add_delivery("b.two", 8, waited_s=120)
    assert caplog.messages == [] and not watch.is_look_due(239) and watch.is_look_due(240)
    watch.add_incomplete(stuck, 240)
    assert [message.partition(" after ")[0] for message in caplog.messages] == ["feed math: still waiting for a group"]


def test_split_group_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = GroupSizeWatch("math", 2)
    for group in ("", "", "b.one", "b.one", "b.two", "b.two"):
        watch.add_delivery(group, 2)
    [message] = caplog.messages
    assert message.startswith("feed math: group b.one is split into several deliveries")


@pytest.mark.parametrize(
    ("groups", "reported"),
    [
        ([("a", 4), ("b", 4), ("c", 8)], [("a", 4)]),
        ([("a", 7), ("b", 4), ("c", 7)], [("a", 7), ("b", 4)]),
        ([("a", 8), ("a", 3)], []),  # the rest of a group that was split
        ([("", 1), ("", 1)], []),  # rollouts without a group
    ],
)
def test_small_groups_are_reported_once_for_each_size(
    groups: list[tuple[str, int]], reported: list[tuple[str, int]], caplog: pytest.LogCaptureFixture
) -> None:
    watch = GroupSizeWatch("math", 8)
    for group, rollouts in groups:
        watch.add_delivery(group, rollouts)
    small = [message for message in caplog.messages if "was closed with" in message]
    assert [message.partition(";")[0] for message in small] == [
        f"feed math: group {group} was closed with {rollouts} of 8 rollouts" for group, rollouts in reported
    ]
    assert all(message.endswith("open a feed with another name and set its n to the batch's --n") for message in small)
