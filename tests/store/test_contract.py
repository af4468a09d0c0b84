"""The contract of the store, on both databases."""

from __future__ import annotations

import hashlib
import time

import msgspec
import pytest

from tests.store.kit import add_session, event, finish_rollout, new_turn, put_outcome
from turngate.dialects.base import ReplyRecord
from turngate.errors import StoreError
from turngate.store import events as store_events
from turngate.store.outcomes import DamagedOutcome, RecordedOutcome
from turngate.store.queries import EventTotals, TimeBucket, TurnTotals
from turngate.store.store import SessionLoading, Store
from turngate.trace.session import SessionConfig
from turngate.trace.turn_rewards import TurnReward


def kinds(store: Store) -> list[tuple[str, str]]:
    return [(one.session, one.kind) for one in store.events.page("", 0, 1000)]


# ── sessions and turns ──────────────────────────────────────────────────────────────────────────────────────────


def test_session_is_found_by_id_key_and_secret(store: Store) -> None:
    config = SessionConfig(model="m", metadata={"task": "ü\u0001", "n": [1, None]})
    key = store.add_session("a", b"\x00\xff secret", config, 12.25, "words", event("a", "opened"))
    found = store.find("a")
    assert found is not None and (found.key, found.id, found.config, found.opened) == (key, "a", config, 12.25)
    assert (found.closed, found.status, found.stop, found.vocabulary) == (None, "open", "", "words")
    assert found == store.find_key(key) == store.find_secret(b"\x00\xff secret")
    assert store.find("b") is None and store.find_secret(b"no") is None
    assert store.open_sessions() == [("a", b"\x00\xff secret", 12.25)]
    assert type(store.open_sessions()[0][1]) is bytes


def test_taken_id_is_refused_and_leaves_no_event(store: Store) -> None:
    add_session(store, "a")
    with pytest.raises(KeyError, match="a"):
        add_session(store, "a")
    assert kinds(store) == [("a", "opened")]


def test_sessions_are_listed_newest_first_in_pages(store: Store) -> None:
    keys = [add_session(store, name) for name in "abcd"]
    store.close_session(keys[1], "sealed", "turns", 9.5, event("b", "sealed"))
    assert [row.id for row in store.sessions(limit=2)] == ["d", "c"]
    assert [row.id for row in store.sessions(before=keys[2])] == ["b", "a"]
    (sealed,) = store.sessions(status="sealed")
    assert (sealed.id, sealed.closed, sealed.stop) == ("b", 9.5, "turns")
    store.note_stop(keys[0], "context_tokens")
    assert store.load(store.find("a")).truncated and store.ids(3) == ["d", "c", "b"]


def test_slices_of_a_trace_read_each_node_once(store: Store) -> None:
    key = add_session(store, "a")
    store.commit([new_turn(key, n, "a") for n in range(20)])
    row = store.find("a")
    assert row is not None
    loading, slices, most = SessionLoading(row, None), 1, 0
    while not store.continue_loading(loading, 0):
        slices, most = slices + 1, max(most, len(loading.fetched))
    whole = store.load(row).trace
    assert [node.id for node in loading.session.trace.nodes] == [node.id for node in whole.nodes]
    assert slices == len(list(whole.nodes)) + 1
    assert 0 < most < 16  # a slice fetches only the next nodes, and none of them again


def test_turns_round_trip_with_checksums(store: Store) -> None:
    key = add_session(store, "a")
    store.commit([new_turn(key, 0, "a"), new_turn(key, 1, "a")])
    session = store.load(store.find("a"))
    assert [node.id for node in session.trace.nodes] == [1, 2, 3, 4] and session.turns == 2
    assert store.messages(key) == {1: b"[]", 2: b'{"role":"assistant"}', 3: b"[]", 4: b'{"role":"assistant"}'}
    assert store.shapes(key, key) == {key: (2, 2)} and store.preambles(key) == {b"digest": (b"[]", b"{}")}
    before = store.queries.state(key)
    store.mark_undelivered(key, 4)
    store.mark_undelivered(key, 4)  # the second time changes nothing
    assert store.queries.state(key) != before
    assert [node.delivered for node in store.load(store.find("a")).trace.nodes if node.id % 2 == 0] == [True, False]


@pytest.mark.parametrize("damage", ["ids=CAST(? AS BLOB)", "delivered=2+length(?)", "checksum=checksum+length(?)"])
def test_damaged_node_is_refused(store: Store, damage: str) -> None:
    key = add_session(store, "a")
    store.commit([new_turn(key, 0)])
    with store._writing() as db:
        assert db.execute(f"UPDATE nodes SET {damage} WHERE session=? AND id=2", (b"abcd", key)).rowcount == 1
    with pytest.raises(StoreError, match="node 2 is damaged"):
        store.load(store.find("a"))


def test_batch_of_turns_is_written_whole_or_not_at_all(store: Store) -> None:
    key = add_session(store, "a")
    with pytest.raises(StoreError):
        store.commit([new_turn(key, 0, "a"), new_turn(key, 0, "a")])
    assert store.messages(key) == {} and kinds(store) == [("a", "opened")]
    store.commit([new_turn(key, 0, "a")])  # the store goes on
    with pytest.raises(StoreError, match="was deleted"):
        store.commit([new_turn(key + 1, 0)])


def test_deleted_session_leaves_only_the_event_of_its_deletion(store: Store) -> None:
    key = finish_rollout(store, "a", "g")
    other = finish_rollout(store, "b", "g")
    store.delete_session(key, event("a", "deleted"))
    assert store.find("a") is None and store.messages(key) == {} and store.outcomes.find(key) is None
    assert [one for one in kinds(store) if one[0] == "a"] == [("a", "deleted")]
    assert store.events.knows("b") and not store.events.knows("a") and store.queries.list_deleted() == ["a"]
    assert store.messages(other) and add_session(store, "a") > other  # keys are never reused


def test_damaged_settings_are_marked_in_listings(store: Store) -> None:
    key = add_session(store, "a")
    with store._writing() as db:
        db.execute("UPDATE sessions SET config=? WHERE key=?", (b"{", key))
    assert "settings are damaged" in store.sessions()[0].damaged
    with pytest.raises(StoreError, match="session a: its settings are damaged"):
        store.find("a")


# ── events and settings ─────────────────────────────────────────────────────────────────────────────────────────


def test_events_are_numbered_from_one_and_paged(store: Store) -> None:
    assert store.events.newest() == 0 and store.events.page("", 0, 9) == []
    assert [store.events.add(event("ab"[n % 2], "note", n, n=n)) for n in range(5)] == [1, 2, 3, 4, 5]
    assert [(one.seq, one.time, one.data) for one in store.events.page("a", 1, 9)] == [
        (3, 2.0, {"n": 2}),
        (5, 4.0, {"n": 4}),
    ]
    assert [one.seq for one in store.events.page("", 2, 2)] == [3, 4] and store.events.newest() == 5


def test_failed_transaction_uses_no_event_number(store: Store) -> None:
    with pytest.raises(RuntimeError), store._writing() as db:
        db.execute("INSERT INTO events (time, session, kind, data) VALUES (?,?,?,?)", (1.0, "", "lost", b"{}"))
        raise RuntimeError
    assert store.events.add(event("", "kept")) == 1


def test_pruning_removes_old_events_and_remembers_the_last(store: Store) -> None:
    for n in range(1, 6):
        store.events.add(event("a", "note", float(n)))
    assert (sum(store.events.prune(3.5)), store.events.last_pruned()) == (3, 3)
    assert (sum(store.events.prune(3.5)), store.events.last_pruned()) == (0, 3)
    assert [one.seq for one in store.events.page("", 0, 9)] == [4, 5] and store.events.newest() == 5
    assert sum(store.events.prune(100.0)) == 2 and store.events.last_pruned() == 5
    assert store.events.newest() == 5 and store.events.add(event("a", "note")) == 6  # numbers are never reused


def test_pruning_goes_past_events_that_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_events, "_PRUNED", 2)  # events per transaction
    store.outbox.start("cell", ())
    add_session(store, "unshipped", 1.0)
    for name, at in [("unshipped", 1.0)] * 4 + [("a", 1.0), ("a", 9.0), ("a", 2.0), ("a", 9.0), ("a", 9.0), ("a", 1.0)]:
        store.events.add(event(name, "note", at))
    removed = list(store.events.prune(3.0))
    assert sum(removed) == 2 and max(removed) <= 2 and store.events.last_pruned() == 8
    assert [one.seq for one in store.events.page("a", 0, 99)] == [
        7,
        9,
        10,
        11,
    ]  # two new events in a row end the removal
    assert len(store.events.page("unshipped", 0, 99)) == 5
    assert sum(store.events.prune(3.0)) == 0


def test_change_of_another_connection_is_noticed(store: Store) -> None:
    reader = store.open_reader()
    before = reader.events.state()
    store.events.add(event("", "note"))
    assert reader.events.state() != before
    with pytest.raises(StoreError):
        reader.events.add(event("", "note"))
    reader.close()


def test_snapshot_hides_later_writes(store: Store) -> None:
    reader = store.open_reader()
    with reader.snapshot():
        assert reader.events.newest() == 0 and reader.events.page("", 0, 9) == []
        store.events.add(event("", "note"))
        assert reader.events.newest() == 0 and reader.events.page("", 0, 9) == []
    assert reader.events.newest() == 1
    reader.close()


def test_settings_change_in_one_transaction(store: Store) -> None:
    assert store.setting("a") is None
    store.set_settings({"a": "1", "b": "%s ' ?"}, event("", "note"))
    store.change_setting("a", lambda old: f"{old}2")
    store.change_setting("c", lambda old: str(old))
    assert [store.setting(name) for name in "abc"] == ["12", "%s ' ?", "None"] and kinds(store) == [("", "note")]
    with pytest.raises(ZeroDivisionError):
        store.change_setting("d", lambda old: str(1 // 0))
    assert store.setting("d") is None
    store.probe()


# ── outcomes and feeds ──────────────────────────────────────────────────────────────────────────────────────────


def test_outcome_is_kept_or_replaced(store: Store) -> None:
    key = add_session(store, "a")
    first = RecordedOutcome(kind="graded", reward=0.5, data={"x": "\u0000"}).encode()
    second = RecordedOutcome(kind="agent failed").encode()
    assert store.outcomes.put(key, first, event("a", "outcome"), replace=False) is None
    assert store.outcomes.put(key, second, event("a", "outcome"), replace=False) == first
    assert store.outcomes.find(key) == msgspec.json.decode(first, type=RecordedOutcome)
    assert store.outcomes.put(key, second, event("a", "outcome"), replace=True) == first
    assert store.outcomes.put(key, second, event("a", "outcome"), replace=True) == second
    assert store.outcomes.find(key) == RecordedOutcome(kind="agent failed")
    assert kinds(store).count(("a", "outcome")) == 2 and store.outcomes.find(key + 1) is None
    with store._writing() as db:
        db.execute("UPDATE outcomes SET outcome=?", (b"\xff{",))
    assert isinstance(store.outcomes.find(key), DamagedOutcome)
    assert store.sessions()[0].damaged == "its outcome is damaged on disk"


def test_turn_rewards_are_kept_in_outcomes_and_feeds(store: Store) -> None:
    rewards = (
        TurnReward(turn=2, value=1 / 3, kind="part", name="ü"),
        TurnReward(turn=4, call=1, value=2 / 3, kind="part", start=0, end=1),
    )
    outcome = RecordedOutcome(kind="graded", reward=1.0, group="g", turn_rewards=rewards)
    feed = store.feeds.open("f", b"{}", 1, "", from_start=False)
    key = add_session(store, "a")
    store.close_session(key, "sealed", "", 9.5, event("a", "sealed"))
    store.outcomes.put(key, outcome.encode(), event("a", "outcome"), replace=False)
    assert store.outcomes.find(key) == outcome
    [member] = store.feeds.members(feed.key, 1)
    assert member.outcome.turn_rewards == rewards


def test_group_completes_once_and_keeps_its_members(store: Store) -> None:
    feed = store.feeds.open("f", b"{}", 2, "g", from_start=False)
    assert store.feeds.open("f", b"other", 9, "", from_start=False) == feed
    keys = [
        finish_rollout(store, name, group) for name, group in [("a", "g1"), ("b", "g2"), ("c", "g1"), ("d", "other")]
    ]
    row = store.feeds.find("f")
    assert row is not None and (row.newest, row.handed, row.committed) == (1, 0, 0)
    assert [(m.session, m.id, m.group) for m in store.feeds.members(feed.key, 1)] == [
        (keys[0], "a", "g1"),
        (keys[2], "c", "g1"),
    ]
    assert [(w.group, w.rollouts) for w in store.feeds.waiting(feed.key, 9)] == [("g2", 1)]
    assert store.feeds.waiting_counts() == {feed.key: (1, 1)} and store.feeds.listing() == [row]
    put_outcome(store, keys[0], "a", "g2", message="changed")  # a delivered rollout never changes
    assert [m.outcome.message for m in store.feeds.members(feed.key, 1)] == ["", ""]
    assert store.feeds.close_group("g2") == [("f", 2)] and store.feeds.close_group("g2") == []
    deliveries = [one.data for one in store.events.page("", 0, 99) if one.kind == "delivery"]
    assert [(one["number"], one["group"], one["rollouts"]) for one in deliveries] == [(1, "g1", 2), (2, "g2", 1)]


def test_reader_commits_only_what_it_was_handed(store: Store) -> None:
    feed = store.feeds.open("f", b"{}", 1, "", from_start=False)
    for name in "abc":
        finish_rollout(store, name, "")
    reader = store.feeds.take_over("f")
    assert reader is not None and reader.newest == 3 and store.feeds.take_over("missing") is None
    assert store.feeds.hand_out(feed.key, reader.reader, 2) and store.feeds.hand_out(feed.key, reader.reader, 1)
    for number, committed in [(3, 0), (1, 1), (2, 2), (1, 2)]:
        row = store.feeds.commit(feed.key, reader.reader, number)
        assert row is not None and (row.handed, row.committed) == (2, committed)
    store.feeds.take_over("f")
    assert (
        not store.feeds.hand_out(feed.key, reader.reader, 3) and store.feeds.commit(feed.key, reader.reader, 2) is None
    )
    store.feeds.delete(feed.key)
    assert store.feeds.find("f") is None and store.feeds.members(feed.key, 1) == []


def test_feed_is_filled_with_earlier_outcomes_in_order(store: Store) -> None:
    names = "abcdefg"
    for n, name in enumerate(names):
        finish_rollout(store, name, f"g{n // 2}", at=10.0 - n)
    feed = store.feeds.open("f", b"{}", 2, "", from_start=True)
    assert store.feeds.is_filling(feed.key)
    late = finish_rollout(store, "h", "g3", at=0.5)
    assert store.feeds.close_group("g3") == []  # postponed
    while store.feeds.fill(feed.key, 2):
        pass
    members = {n: [m.id for m in store.feeds.members(feed.key, n)] for n in range(1, 6)}
    assert members == {1: ["f", "e"], 2: ["d", "c"], 3: ["b", "a"], 4: ["g", "h"], 5: []}
    assert not store.feeds.is_filling(feed.key) and late == store.feeds.members(feed.key, 4)[1].session


def test_damaged_outcome_enters_a_feed_without_reward(store: Store) -> None:
    feed = store.feeds.open("f", b"{}", 2, "", from_start=False)
    key = add_session(store, "a", metadata={"group": "g", "task": "t"})
    store.outcomes.put(key, b"\xffdamaged", event("a", "outcome"), replace=True)
    finish_rollout(store, "b", "g")
    damaged, intact = store.feeds.members(feed.key, 1)
    assert (damaged.outcome.kind, damaged.outcome.reward, damaged.outcome.task) == ("infrastructure fault", None, "t")
    assert intact.outcome.reward == 1.0


# ── refusals, replies, tool calls ───────────────────────────────────────────────────────────────────────────────


def test_refused_calls_count_until_repeated(store: Store) -> None:
    key = add_session(store, "a")
    assert store.refusals.find(key) is None
    store.refusals.add(key, "a", 429, "slow down", b"one")
    calls = store.refusals.add(key, "a", 400, "bad", None)
    assert calls is not None and (calls.count, calls.status, calls.message) == (2, 429, "slow down")
    calls = store.refusals.mark_repeated(key, "a", b"one")
    assert calls == store.refusals.find(key) and calls is not None and (calls.count, calls.status) == (1, 400)
    assert store.refusals.add(key + 1, "b", 400, "bad", None) is None  # no such session
    assert kinds(store)[1:] == [("a", "refused"), ("a", "refused"), ("a", "repeated")]


def test_reply_is_found_with_its_path(store: Store) -> None:
    key = add_session(store, "a")
    store.commit([new_turn(key, 0)])
    record = ReplyRecord("r1", b"\x00head", b"echo", b"tail", ())
    digest = store.replies.add(key, 2, record)
    assert store.replies.add(key, 2, ReplyRecord("r2", b"h", b"", b"t", ()), digest) == digest
    found = store.replies.find(key, "r1")
    assert found is not None and found.body == b"\x00headechotail" and store.replies.find(key, "r3") is None
    assert store.replies.delete(key, "r2") and not store.replies.delete(key, "r2")
    assert [node.tail for node in store.replies.path(key, 2)] == [None, b"tail"]


def test_tool_calls_are_numbered_and_answered(store: Store) -> None:
    key = add_session(store, "a")
    call = store.tool_calls.add(key, "a", "search", b'{"q":1}', "id-1", None, 2)
    assert call is not None and (call.call, call.answered_by, call.reply) == (1, "", None)
    assert store.tool_calls.find_repeat(key, "id-1") == call and store.tool_calls.find(key, 2) is None
    store.tool_calls.answer(key, "a", call, b'"yes"', "host")
    answered = store.tool_calls.find(key, 1)
    assert answered is not None and bytes(answered.reply or b"") == b'"yes"' and answered.answered_by == "host"
    assert store.tool_calls.add(key, "a", "search", b"{}", "", b"1", 2) is not None
    assert store.tool_calls.add(key, "a", "search", b"{}", "", b"1", 2) is None  # the limit
    assert [one.call for one in store.tool_calls.page(key, 1, 9)] == [2]


def test_times_of_tool_calls_do_not_follow_the_clock(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is set back by an hour while the call waits."""
    key = add_session(store, "a")
    call = store.tool_calls.add(key, "a", "search", b"{}", "", None, 1)
    assert call is not None
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    store.tool_calls.answer(key, "a", call, b'"yes"', "host")
    answered = store.tool_calls.find(key, 1)
    assert answered is not None and answered.answered is not None and answered.answered >= answered.called


# ── queries ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_totals_count_turns_tokens_and_stages(store: Store) -> None:
    key = add_session(store, "a", 1.0)
    turns = [new_turn(key, n, "a", 60.0 * n, finish) for n, finish in [(1, "stop"), (2, "abort"), (3, "length")]]
    store.commit(turns)
    for at, stage in [(200.0, "setup"), (210.0, "run")]:
        store.events.add(event("a", "stage", at, stage=stage))
    with store._writing() as db:  # damaged data counts as 0
        db.execute("INSERT INTO events (time, session, kind, data) VALUES (?,?,?,?)", (205.0, "a", "turn", b"\xff{"))
    put_outcome(store, key, "a", "g", at=190.0)
    store.events.add(event("", "weights", 500.0))
    newest = store.events.newest() - 1
    assert store.queries.sum_events() == [EventTotals("a", newest, 190.0, 2, 6, 2)]
    buckets = sorted(store.queries.bucket_events(60), key=lambda bucket: bucket.number)
    assert buckets == [TimeBucket(1, 1, 2, 0), TimeBucket(2, 0, 2, 0), TimeBucket(3, 1, 2, 1)]
    assert store.queries.count_turns(key) == TurnTotals(2, 6, 1, 3) and store.queries.versions(key) == (1, 3)
    assert store.queries.versions(key + 1) is None


def test_queries_over_sessions_and_events(store: Store) -> None:
    assert store.queries.oldest() is None and store.queries.sessions(0, 10) == []
    keys = [finish_rollout(store, name, "g", at=float(n)) for n, name in enumerate("abc")]
    assert [one.id for one in store.queries.sessions(keys[0], 1)] == ["b"]
    found = store.queries.find_sessions([f"no-{n}" for n in range(700)] + ["c", "a"])
    assert sorted(one.id for one in found) == ["a", "c"] and all(type(one.config) is bytes for one in found)
    outcomes = store.queries.outcomes([*keys, 10**9])
    assert sorted(outcomes) == keys and outcomes[keys[2]][0] == 2.0
    for at, stage in enumerate(["setup", "run"]):
        for name in "ab":
            store.events.add(event(name, "stage", float(at), stage=stage))
    last = store.queries.last_stages()
    assert sorted((one.session, one.data) for one in last) == [("a", b'{"stage":"run"}'), ("b", b'{"stage":"run"}')]
    first = store.queries.first_stage("b")
    assert first is not None and b"setup" in first.data and len(store.queries.stages("b")) == 2
    assert store.queries.has_opened_event("a") and not store.queries.has_opened_event("x")
    changed = store.queries.list_changed(0, 1)
    assert len(changed) == 2 and set(changed) <= set("abc")
    assert [one.seq for one in store.queries.list_events_after(2, 2)] == [3, 4] and store.queries.oldest() == 0.0
    store.events.add(event("", "weights", 1.0))
    assert [one.kind for one in store.queries.list_gateway_events(["weights", "held"])] == ["weights"]


def test_bytes_of_a_blob_come_back_unchanged(store: Store) -> None:
    content = bytes(range(256)) * 100
    key = add_session(store, "a")
    store.replies.add(key, 1, ReplyRecord("r", content, b"", b"", ()))
    found = store.replies.find(key, "r")
    assert found is not None and hashlib.sha256(found.head).digest() == hashlib.sha256(content).digest()


def test_a_feed_opened_later_delivers_groups_that_were_closed(store: Store) -> None:
    """A group that was closed with too few rollouts is complete in feeds that are opened later, too."""
    for number, name in enumerate(("a1", "a2", "b1")):
        finish_rollout(store, name, name[0], at=time.time() - 100 + number)
    assert store.feeds.close_group("a") == []
    finish_rollout(store, "a3", "a", at=time.time() + 100)  # of a later batch that uses the same name
    feed = store.feeds.open("f", b"{}", 3, "", from_start=True)
    while store.feeds.fill(feed.key, 2):
        pass
    assert [member.id for member in store.feeds.members(feed.key, 1)] == ["a1", "a2"]
    assert [(group.group, group.rollouts) for group in store.feeds.waiting(feed.key, 10)] == [("b", 1), ("a", 1)]
    store.feeds.close_group("b")
    later = store.feeds.open("g", b"{}", 3, "", from_start=True)
    while store.feeds.fill(later.key, 100):
        pass
    assert [[m.id for m in store.feeds.members(later.key, n)] for n in (1, 2)] == [["a1", "a2"], ["b1"]]
