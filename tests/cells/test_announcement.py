"""A new session waits for its announcement, but not for long."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.store.kit import add_session
from turngate.gateway.cell import announcement
from turngate.gateway.cell.announcement import AnnouncementWait
from turngate.store.store import Store


async def test_it_ends_with_the_announcement(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.outbox.start("a", ())
    key = add_session(store, "s", rollout="r")
    woken = []

    def announce() -> None:
        woken.append(1)
        store.outbox.mark_announced(store.outbox.find_unannounced(10))

    await AnnouncementWait(store.outbox, announce).wait(key)
    assert woken == [1] and store.outbox.is_announced(key)
    store.close()


async def test_it_ends_if_the_shared_store_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcement, "_WAIT_S", 0.05)
    store = Store(tmp_path)
    store.outbox.start("a", ())
    key = add_session(store, "s", rollout="r")
    woken: list[int] = []
    wait = AnnouncementWait(store.outbox, lambda: woken.append(1))
    start = time.monotonic()
    await wait.wait(key)
    assert 0.05 <= time.monotonic() - start < 5
    await wait.wait(key)  # the next sessions do not wait
    assert woken == [1] and not store.outbox.is_announced(key)
    store.close()
