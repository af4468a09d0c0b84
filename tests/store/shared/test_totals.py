"""The totals over events stay equal to sums over all events, and a store of the previous version is migrated."""

from __future__ import annotations

import pytest

from tests.postgres import PostgresServer
from tests.store.kit import event, finish_rollout, new_turn, open_shared
from turngate.store.queries import EventTotals
from turngate.store.shared.totals import BUCKET_SECONDS
from turngate.store.store import Store

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.full]
TO_VERSION_1 = """
DROP TRIGGER events_added ON events; DROP TRIGGER events_removed ON events;
DROP FUNCTION add_to_totals; DROP FUNCTION remove_from_totals; DROP TABLE session_totals; DROP TABLE bucket_totals;
DROP INDEX events_stages; DROP INDEX events_deleted;
DROP TABLE rollout_list, group_list, rollout_counts, delivery_list, version_list, rollout_list_state;
UPDATE turngate_version SET version=1;
"""


def sum_by_hand(store: Store) -> tuple[dict[str, EventTotals], dict[int, tuple[int, int, int]]]:
    sessions: dict[str, EventTotals] = {}
    buckets: dict[int, tuple[int, int, int]] = {}
    for one in store.events.page("", 0, 100_000):
        turn = one.kind == "turn"
        tokens = int(one.data.get("sampled_tokens", 0)) if turn else 0  # type: ignore[arg-type]
        counted = turn and one.data.get("finish") != "abort"
        if one.session:
            old = sessions.get(one.session, EventTotals(one.session, 0, 0.0, 0, 0, 0))
            sessions[one.session] = EventTotals(
                one.session,
                one.seq,
                one.time,
                old.turns + counted,
                old.sampled_tokens + tokens,
                old.stages + (one.kind == "stage"),
            )
        if turn or one.kind == "outcome":
            number = int(one.time / BUCKET_SECONDS)
            turns, sampled, outcomes = buckets.get(number, (0, 0, 0))
            buckets[number] = (turns + counted, sampled + tokens, outcomes + (one.kind == "outcome"))
    return sessions, buckets


def check(store: Store) -> None:
    sessions, buckets = sum_by_hand(store)
    assert {one.session: one for one in store.queries.sum_events()} == sessions
    found = {
        one.number: (one.turns, one.sampled_tokens, one.outcomes) for one in store.queries.bucket_events(BUCKET_SECONDS)
    }
    assert found == buckets
    assert sorted(store.queries.bucket_events(7.0), key=lambda bucket: bucket.number) != []


def record(store: Store) -> list[int]:
    keys = [finish_rollout(store, f"r{n}", "g", at=50.0 * n) for n in range(6)]
    store.commit([new_turn(keys[0], n, "r0", 31.0 * n, "abort" if n % 2 else "stop") for n in range(1, 9)])
    for n in range(3):
        store.events.add(event("r1", "stage", 10.0 * n))
    return keys


def test_totals_follow_additions_deletions_and_pruning(postgres_url: str) -> None:
    store = open_shared(postgres_url)
    keys = record(store)
    check(store)
    store.delete_session(keys[2], event("r2", "deleted", 400.0))
    check(store)
    assert sum(store.events.prune(90.0)) > 0
    check(store)
    store.close()


def test_store_of_the_previous_version_is_migrated(postgres_server: PostgresServer, postgres_url: str) -> None:
    store = open_shared(postgres_url)
    record(store)
    store.close()
    postgres_server.query(TO_VERSION_1, postgres_url.rpartition("/")[2])
    with pytest.raises(Exception, match="has version 1; start `turngate serve"):
        open_shared(postgres_url, read_only=True)
    store = open_shared(postgres_url)
    check(store)
    finish_rollout(store, "after", "g")
    check(store)
    store.close()
