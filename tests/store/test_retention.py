"""Old sessions are removed only if nothing needs them, after they are in the archive, on both databases."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.store.kit import add_session, event, finish_rollout, new_turn, put_outcome, turn_with
from turngate.errors import ConfigError, Conflict, Gone, NotFound, StoreError
from turngate.store import pruning, retention
from turngate.store.archived_session import ArchivedSession, read_session
from turngate.store.pruning import load_archive, prune
from turngate.store.session_archive import SessionArchive
from turngate.store.store import Store
from turngate.trace.session import SessionConfig
from turngate.types import SideArray

TABLES = (
    "sessions",
    "nodes",
    "preambles",
    "outcomes",
    "tool_calls",
    "replies",
    "reply_echoes",
    "refusals",
    "side_data",
)
LATER = 100.0


def ids(store: Store) -> list[str]:
    return sorted(store.ids(1000))


def count_rows(store: Store) -> dict[str, int]:
    with store.database.reading() as db:
        return {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES}


def add_tool_call(store: Store, key: int) -> None:
    with store.database.writing() as db:
        query = "INSERT INTO tool_calls (session, call, tool, repeat, called, arguments) VALUES (?,1,'tool','',2.5,?)"
        db.execute(query, (key, b"{}"))


def finish_attempt(store: Store, name: str, rollout: str, attempt: int = 1) -> int:
    key = add_session(store, name, rollout=rollout, attempt=attempt)
    store.commit([new_turn(key, 0, name)])
    store.close_session(key, "sealed", "", 2.0, event(name, "sealed", 2.0))
    put_outcome(store, key, name, "", attempt=attempt)
    return key


# ── what is kept ────────────────────────────────────────────────────────────────────────────────────────────────


def test_sessions_are_removed_with_all_their_rows(store: Store) -> None:
    finish_rollout(store, "a", "g")
    add_tool_call(store, finish_rollout(store, "b", ""))
    done = prune(store, LATER)
    assert (done.removed, done.kept.total()) == (2, 0)
    assert set(count_rows(store).values()) == {0}
    assert [(one.session, one.kind, one.data) for one in store.events.page("", 0, 100)] == [
        (name, "deleted", {"reason": "pruned"}) for name in "ab"
    ]
    assert prune(store, LATER).removed == 0


def test_open_and_recent_sessions_are_kept(store: Store) -> None:
    add_session(store, "open")
    finish_rollout(store, "old", "")
    finish_rollout(store, "recent", "", at=LATER + 1)
    late = finish_rollout(store, "late-outcome", "")
    put_outcome(store, late, "late-outcome", "", at=LATER + 1, reward=0.0)
    done = prune(store, LATER)
    assert (done.removed, ids(store)) == (1, ["late-outcome", "open", "recent"])
    assert done.kept == {retention.OPEN: 1, retention.TOO_NEW: 2}


def test_groups_are_removed_as_a_whole(store: Store) -> None:
    finish_rollout(store, "a", "g")
    finish_rollout(store, "b", "g", at=LATER + 1)
    finish_rollout(store, "c", "h")
    add_session(store, "d", metadata={"group": "h"})  # open, so its group is known only from its settings
    finish_rollout(store, "e", "done")
    done = prune(store, LATER)
    assert ids(store) == ["a", "b", "c", "d"] and done.kept[retention.OTHERS_KEPT] == 2


def test_feeds_keep_what_they_have_not_delivered(store: Store) -> None:
    feed = store.feeds.open("f", b"{}", 2, "", from_start=False)
    for name, group in (("a", "g"), ("b", "g"), ("c", "h"), ("d", "h"), ("e", "i")):
        finish_rollout(store, name, group)
    reader = store.feeds.take_over("f").reader
    store.feeds.hand_out(feed.key, reader, 2)
    assert prune(store, LATER).kept == {
        "the trainer of feed 'f' has not committed it": 4,
        "it is waiting for the rest of its group in feed 'f'": 1,
    }
    store.feeds.commit(feed.key, reader, 1)
    assert prune(store, LATER).removed == 2 and ids(store) == ["c", "d", "e"]
    assert [member.id for member in store.feeds.members(feed.key, 1)] == ["a", "b"]  # the log of deliveries stays
    store.feeds.delete(feed.key)
    assert prune(store, LATER).removed == 3


def test_a_feed_that_is_being_filled_keeps_everything(store: Store) -> None:
    finish_rollout(store, "a", "g")
    feed = store.feeds.open("f", b"{}", 1, "", from_start=True)
    assert list(prune(store, LATER).kept) == ["feed 'f' is still being filled with earlier outcomes"]
    while store.feeds.fill(feed.key, 10):
        pass
    assert "not committed" in next(iter(prune(store, LATER).kept))


def test_unshipped_sessions_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.outbox.start("cell", ())
    finish_rollout(store, "a", "")
    assert prune(store, LATER).kept == {retention.UNSHIPPED: 1}
    store.outbox.remove(store.outbox.find_due(time.time(), 10))
    assert prune(store, LATER).removed == 1
    store.close()


def test_a_session_that_changes_meanwhile_is_kept(store: Store) -> None:
    key = finish_rollout(store, "a", "")
    plan = store.retention.plan(LATER)
    put_outcome(store, key, "a", "", at=3.0, reward=0.5)
    assert store.retention.remove(plan.removable[0]) == {retention.CHANGED: 1}
    plan = store.retention.plan(LATER)
    store.events.add(event("a", "note"))
    assert store.retention.remove(plan.removable[0]) == {retention.CHANGED: 1}
    plan = store.retention.plan(LATER)
    store.feeds.open("f", b"{}", 1, "", from_start=True)
    assert list(store.retention.remove(plan.removable[0])) == ["feed 'f' is still being filled with earlier outcomes"]


def test_group_of_a_session_that_changes_meanwhile_is_kept(store: Store) -> None:
    finish_rollout(store, "a", "g")
    key = finish_rollout(store, "b", "g")
    finish_rollout(store, "c", "h")

    def change_and_continue() -> bool:
        put_outcome(store, key, "b", "g", at=3.0, reward=0.5)
        return False

    done = prune(store, LATER, is_stopping=change_and_continue)
    assert ids(store) == ["a", "b"] and done.kept == {retention.CHANGED: 1, retention.OTHERS_KEPT: 1}


def test_a_run_does_not_stop_within_a_group(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "_REMOVED_SESSIONS", 2)
    for name, group in (("a", "g"), ("b", "h"), ("c", "g"), ("d", "g"), ("e", "h")):
        finish_rollout(store, name, group)
    answers = iter([False, True])
    done = prune(store, LATER, is_stopping=lambda: next(answers))
    assert (done.removed, ids(store)) == (3, ["b", "e"])


def test_transactions_are_limited_by_nodes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "_REMOVED_NODES", 6)
    for name, turns in (("a", 1), ("b", 2), ("c", 1), ("d", 5), ("e", 1)):  # a turn has two nodes
        key = add_session(store, name)
        store.commit([new_turn(key, number, name) for number in range(turns)])
        store.close_session(key, "sealed", "", 2.0, event(name, "sealed", 2.0))
    removed: list[list[str]] = []
    remove = store.retention.remove

    def remove_and_note(sessions: Sequence[retention.OldSession]) -> Counter[str]:
        removed.append([session.id for session in sessions])
        return remove(sessions)

    monkeypatch.setattr(store.retention, "remove", remove_and_note)
    assert prune(store, LATER).removed == 5
    assert removed == [["a", "b"], ["c"], ["d"], ["e"]]


def test_dry_run_changes_nothing(store: Store, tmp_path: Path) -> None:
    finish_rollout(store, "a", "")
    done = prune(store, LATER, tmp_path / "archive", dry_run=True)
    assert (done.removed, done.files, ids(store)) == (1, [], ["a"])
    assert not (tmp_path / "archive").exists()


# ── attempts ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rollout_that_counts_is_not_run_again(store: Store) -> None:
    finish_attempt(store, "s", "r")
    assert prune(store, LATER).removed == 1
    (attempt,) = store.attempts.list_attempts("r")
    assert (attempt.session, attempt.state) == ("", "settled")
    with pytest.raises(Conflict, match="removed because of its age; do not run"):
        add_session(store, "again", rollout="r")
    with pytest.raises(Conflict, match="already has an outcome, recorded by attempt 1"):
        add_session(store, "next", rollout="r", attempt=2)
    with pytest.raises(Gone, match="removed because of its age"):
        store.attempts.supersede("r", 1, "s")


def test_an_attempt_without_an_outcome_is_superseded(store: Store) -> None:
    key = add_session(store, "s", rollout="r")
    store.close_session(key, "sealed", "", 2.0)
    assert prune(store, LATER).removed == 1
    assert [attempt.state for attempt in store.attempts.list_attempts("r")] == ["superseded"]
    finish_attempt(store, "t", "r", 2)


def test_outcome_of_a_removed_session_is_refused(store: Store) -> None:
    key = finish_rollout(store, "a", "")
    prune(store, LATER)
    with pytest.raises(NotFound, match="its session was deleted"):
        put_outcome(store, key, "a", "")


# ── archive ─────────────────────────────────────────────────────────────────────────────────────────────────────


def fill(store: Store) -> None:
    """Record sessions with a row in every table."""
    store.set_settings({"tokenizer:v": "/models/x", "renderer:v": "template"})
    key = finish_attempt(store, "s", "r")
    add_tool_call(store, key)
    experts = SideArray("routed_experts", -3, np.arange(24, dtype=np.uint8).reshape(4, 2, 3))
    store.commit([turn_with(key, 1, experts, name="s")])
    store.mark_undelivered(key, 4)
    key = finish_rollout(store, "t", "g")
    with store.database.writing() as db:
        db.execute("INSERT INTO refusals VALUES (?,1,400,'no such model',?,0)", (key, b"digest"))
        db.execute("INSERT INTO replies VALUES (?,'resp_1',2,?,?,?,?)", (key, b"{", b"d", b"}", b"[]"))
        db.execute("INSERT INTO reply_echoes VALUES (?,?,?)", (key, b"d", b"x"))
    key = store.add_session("u", b"u-secret", SessionConfig(metadata={"task": "ü"}), 1.0)
    store.close_session(key, "cancelled", "cancelled", 2.0)


def digests(store: Store) -> dict[str, bytes]:
    with store.database.reading() as db:
        keys = [key for (key,) in db.execute("SELECT key FROM sessions").fetchall()]
        return {one.id: one.compute_digest() for one in (read_session(db, key) for key in keys)}


def test_archived_sessions_can_be_loaded_again(store: Store, tmp_path: Path) -> None:
    fill(store)
    before, archive = digests(store), tmp_path / "archive"
    done = prune(store, LATER, archive)
    assert (done.removed, done.archived, len(done.files), ids(store)) == (3, 3, 1, [])
    assert done.files == SessionArchive(archive).files() and not list(archive.glob(".*"))
    loaded = Store(tmp_path / "loaded")
    add_session(loaded, "other")  # so that the keys differ
    assert load_archive(archive, loaded) == (3, 0) and load_archive(archive, loaded) == (0, 3)
    after = digests(loaded)
    assert {name: after[name] for name in before} == before
    assert loaded.setting("tokenizer:v") == "/models/x"
    assert [turn.delivered for turn in loaded.load(loaded.find("s")).trace.turns()] == [True, False]
    one = Store(tmp_path / "one")
    assert load_archive(archive, one, ["t"]) == (1, 0) and ids(one) == ["t"]
    loaded.close()
    one.close()


def test_rows_can_be_read_by_other_programs(store: Store, tmp_path: Path) -> None:
    from pyarrow import parquet

    finish_rollout(store, "a", "g")
    (file,) = prune(store, LATER, tmp_path).files
    (row,) = parquet.read_table(file).to_pylist()
    assert (row["id"], row["group"], row["reward"], row["kind"]) == ("a", "g", 1.0, "graded")
    assert [(node["kind"], node["ids"], node["logprobs"]) for node in row["nodes"]] == [
        ("context", [0, 1, 2], None),
        ("sampled", [0, 1], [0.0, 0.0]),
    ]


@pytest.mark.parametrize("where", ["remove", "read_session"])
def test_a_crash_neither_loses_nor_duplicates(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    for number in range(5):
        finish_rollout(store, f"s{number}", "")
    monkeypatch.setattr(pruning, "_REMOVED_SESSIONS", 2)
    owner = store.retention if where == "remove" else pruning
    real, calls = getattr(owner, where), itertools.count(1)

    def crash(*arguments: object) -> object:
        if next(calls) == 2:
            raise RuntimeError("killed")
        return real(*arguments)

    monkeypatch.setattr(owner, where, crash)
    with pytest.raises(RuntimeError, match="killed"):
        prune(store, LATER, tmp_path / "archive")
    monkeypatch.undo()
    assert len(ids(store)) == (3 if where == "remove" else 5)
    done = prune(store, LATER, tmp_path / "archive")
    assert (done.removed, done.archived) == ((3, 0) if where == "remove" else (5, 5))
    archive = SessionArchive(tmp_path / "archive")
    names = [one.id for file in archive.files() for one in archive.read(file)]
    assert sorted(names) == [f"s{number}" for number in range(5)]
    assert not list((tmp_path / "archive").glob(".*"))


def test_large_archives_have_several_files(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "_FILE_SESSIONS", 2)
    monkeypatch.setattr("turngate.store.session_archive._GROUP_BYTES", 1)
    for number in range(5):
        finish_rollout(store, f"s{number}", "")
    done = prune(store, LATER, tmp_path)
    assert (len(done.files), done.removed) == (3, 5)
    assert sum(len(list(SessionArchive(tmp_path).read(file))) for file in done.files) == 5


def test_sessions_are_loaded_in_their_order_and_in_their_last_version(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        finish_rollout(store, f"s{number}", "")
    with monkeypatch.context() as patch:
        patch.setattr(store.retention, "remove", lambda chunk: Counter({"killed": len(chunk)}))
        prune(store, LATER, tmp_path / "archive")
    row = store.find("s0")
    assert row is not None
    put_outcome(store, row.key, "s0", "", reward=0.25)  # it changes after the crash
    assert prune(store, LATER, tmp_path / "archive").archived == 1
    loaded = Store(tmp_path / "loaded")
    assert load_archive(tmp_path / "archive", loaded) == (3, 0)
    assert loaded.ids(9) == ["s0", "s2", "s1"]  # newest first
    row = loaded.find("s0")
    assert row is not None and loaded.outcomes.find(row.key).reward == 0.25
    loaded.close()


def test_damaged_sessions_are_not_archived_and_stay(store: Store, tmp_path: Path) -> None:
    key = finish_rollout(store, "a", "")
    with store.database.writing() as db:
        db.execute("UPDATE nodes SET checksum=1 WHERE session=?", (key,))
    done = prune(store, LATER, tmp_path)
    assert done.kept == {"session a cannot be archived: node 1 is damaged on disk": 1} and not done.files
    assert done.damaged == list(done.kept)
    assert prune(store, LATER).removed == 1


def test_session_with_a_damaged_record_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "data")  # PostgreSQL does not store text in a column of numbers
    finish_rollout(store, "a", "g")
    key = finish_rollout(store, "b", "g")
    with store.database.writing() as db:
        db.execute("UPDATE sessions SET closed='text' WHERE key=?", (key,))
    done = prune(store, LATER)
    assert done.kept == {"session b: its session record is damaged on disk": 1, retention.OTHERS_KEPT: 1}
    assert done.damaged == ["session b: its session record is damaged on disk"] and ids(store) == ["a", "b"]
    store.close()


def test_groups_are_archived_as_a_whole(store: Store, tmp_path: Path) -> None:
    finish_rollout(store, "a", "g")
    key = finish_rollout(store, "b", "g")
    finish_rollout(store, "c", "h")
    with store.database.writing() as db:
        db.execute("UPDATE nodes SET checksum=1 WHERE session=?", (key,))
    done = prune(store, LATER, tmp_path)
    assert (done.removed, done.archived, ids(store)) == (1, 1, ["a", "b"])
    assert done.kept == {
        "session b cannot be archived: node 1 is damaged on disk": 1,
        retention.OTHERS_KEPT: 1,
    }
    assert SessionArchive(tmp_path).list_ids(done.files[0]) == ["c"]
    assert prune(store, LATER).removed == 2


def test_values_of_the_wrong_type_are_not_archived(tmp_path: Path) -> None:
    store = Store(tmp_path / "data")  # PostgreSQL does not store them
    key = finish_rollout(store, "a", "")
    with store.database.writing() as db:
        db.execute("UPDATE nodes SET info='text' WHERE session=? AND id=1", (key,))
    done = prune(store, LATER, tmp_path / "archive")
    assert done.kept == {"session a cannot be archived: node 1 is damaged on disk: a value has the wrong type": 1}
    assert not done.files and ids(store) == ["a"]
    store.close()


def test_a_damaged_archive_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "data")
    finish_rollout(store, "a", "")
    monkeypatch.setattr("turngate.store.archived_session.ArchivedSession.compute_digest", lambda self: b"\1" * 32)
    (file,) = prune(store, LATER, tmp_path / "archive").files
    monkeypatch.undo()
    with pytest.raises(StoreError, match="session a is damaged"):
        load_archive(tmp_path / "archive", store)
    file.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_archive(tmp_path / "archive", store)
    store.close()


@pytest.mark.parametrize(
    ("column", "raised", "problem"),
    [("id", ConfigError, "sessions-.* cannot be read"), ("secret", StoreError, "sessions-.* is damaged")],
)
def test_a_damaged_page_of_an_archive_is_noticed(
    column: str, raised: type[Exception], problem: str, tmp_path: Path
) -> None:
    from pyarrow import parquet

    store, loaded, archive = Store(tmp_path / "data"), Store(tmp_path / "loaded"), tmp_path / "archive"
    for name in "ab":
        finish_rollout(store, name, "")
        (file,) = prune(store, LATER, archive).files
    group = parquet.ParquetFile(file).metadata.row_group(0)
    (chunk,) = (c for n in range(group.num_columns) if (c := group.column(n)).path_in_schema == column)
    content = bytearray(file.read_bytes())
    content[chunk.data_page_offset : chunk.data_page_offset + 8] = b"\xff" * 8
    file.write_bytes(content)
    with pytest.raises(raised, match=problem) as error:
        load_archive(archive, loaded)
    if raised is StoreError:
        assert "1 session was added before this error and kept" in str(error.value) and ids(loaded) == ["a"]
        assert load_archive(archive, loaded, ["a"]) == (0, 1)
    else:
        finish_rollout(store, "c", "")
        with pytest.raises(ConfigError, match=problem):
            prune(store, LATER, archive)
        assert ids(store) == ["c"]
    store.close()
    loaded.close()


def test_a_damaged_session_does_not_block_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, loaded, archive = Store(tmp_path / "data"), Store(tmp_path / "loaded"), tmp_path / "archive"
    for name in "abc":
        finish_rollout(store, name, "")
    real = ArchivedSession.compute_digest
    monkeypatch.setattr(ArchivedSession, "compute_digest", lambda one: b"\1" * 32 if one.id == "b" else real(one))
    prune(store, LATER, archive)
    monkeypatch.undo()
    assert load_archive(archive, loaded, ["c"]) == (1, 0) and ids(loaded) == ["c"]
    with pytest.raises(StoreError, match=r"session b is damaged in .*; 1 session was added before this error and kept"):
        load_archive(archive, loaded)
    assert ids(loaded) == ["a", "c"]
    store.close()
    loaded.close()


def test_another_session_with_the_same_id_is_not_overwritten(tmp_path: Path) -> None:
    store = Store(tmp_path / "data")
    finish_rollout(store, "a", "")
    prune(store, LATER, tmp_path / "archive")
    finish_rollout(store, "a", "")
    with pytest.raises(StoreError, match="already has another session"):
        load_archive(tmp_path / "archive", store)
    store.close()
