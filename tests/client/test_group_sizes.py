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
            # The first group grows until the third look.
            watch.add_incomplete(
                (IncompleteGroup("b.one", min(len(looks) + 1, 4)), IncompleteGroup("b.two", 1)), waited_s
            )
    assert looks == [30, 60, 120, 240, 480]
    assert [message.partition("; ")[0] for message in caplog.messages] == [
        f"feed math: no delivery for {waited} s: group b.one has 4 of 8 rollouts (incomplete groups: 2)"
        for waited in (240, 480)
    ]


def test_empty_feed_and_new_delivery_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    watch = GroupSizeWatch("math", 8)
    watch.add_incomplete((), 30)
    watch.add_incomplete((), 60)
    stuck = (IncompleteGroup("b.one", 4),)
    watch.add_incomplete(stuck, 120)
    watch.add_delivery("b.two")
    assert watch.is_look_due(30)
    watch.add_incomplete(stuck, 30)
    assert caplog.messages == []


def test_split_group_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = GroupSizeWatch("math", 2)
    for group in ("", "", "b.one", "b.one", "b.two", "b.two"):
        watch.add_delivery(group)
    [message] = caplog.messages
    assert message.startswith("feed math: group b.one has more than 2 rollouts")
