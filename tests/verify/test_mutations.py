"""Verify detects every alteration of a stored session and names the right check.

Alterations update the checksum, except in the tests of the checksum itself.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests import kit
from tests.verify.kit import Tampering, tampering, verdict, wrong
from tests.verify.sessions import record_sessions
from turngate.trace.sample import Sample
from turngate.verify import RowSource, Verdict
from turngate.verify.store_reader import TurnFacts
from turngate.views.session import open_row_source

Recorded = tuple[Path, str, str]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A data folder and its two sessions."""
    folder = tmp_path_factory.mktemp("recorded")
    return folder, *asyncio.run(record_sessions(folder, kit.renderer()))


@pytest.fixture
def copy(recorded: Recorded, tmp_path: Path) -> Recorded:
    folder, *sessions = recorded
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(folder / "turngate.db", data)
    return data, *sessions


def run_verify(data: Path, session: str, *, replay: bool = False, rows: RowSource | None = None) -> Verdict:
    return verdict(data, session, renderer=kit.renderer(), replay=replay, rows=rows)


def test_unchanged_sessions_pass(recorded: Recorded) -> None:
    data, *sessions = recorded
    for session in sessions:
        found = run_verify(data, session, replay=True)
        assert found.ok and not found.notes and not found.unchecked, found


# ── checksums ───────────────────────────────────────────────────────────────────────────────────────────────────────


def flip_bit(blob: bytes, at: int = 0) -> bytes:
    return blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]


@pytest.mark.parametrize("column", ["ids", "logprobs", "info", "messages", "parent", "kind", "id", "checksum"])
def test_changed_column_breaks_checksum(column: str, copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        turn = t.row(t.of_kind("sampled")[3])
        was = getattr(turn, column)
        now: Any = flip_bit(was) if isinstance(was, bytes) else "context" if column == "kind" else was + 100
        t.sql(f"UPDATE nodes SET {column}=? WHERE session=? AND id=?", now, t.key, turn.id)
    assert "checksum" in wrong(run_verify(data, session))


def test_turn_moved_to_other_session_breaks_checksum(copy: Recorded) -> None:
    data, session, other = copy
    with tampering(data, session) as t, tampering(data, other) as o:
        t.sql("UPDATE nodes SET session=? WHERE session=? AND id=?", o.key, t.key, t.of_kind("sampled")[-1])
    assert "checksum" in wrong(run_verify(data, other))
    assert "tree" in wrong(run_verify(data, session)), "its context has no turn left"


# ── alterations with a valid checksum ────────────────────────────────────────────────────────────────────────────────────────


def turns(t: Tampering, **facts: Any) -> list[int]:
    """The sampled nodes with these facts."""
    return [n for n in t.of_kind("sampled") if all(getattr(t.fact(n), name) == value for name, value in facts.items())]


def roots(t: Tampering, cause: str | None) -> list[int]:
    return [n for n in t.of_kind("context") if t.row(n).parent is None and t.fact(n).cause == cause]


def signals_of(thread: str = "", parent: str = "", role: str = "", why: str = "") -> list[str]:
    return [thread, parent, role, why]


def change_id(t: Tampering, node: int, at: int) -> None:
    ids = np.frombuffer(t.row(node).ids, np.int32).copy()
    ids[at] = ids[at] + 1 if ids[at] < 500 else ids[at] - 1
    t.node(node, ids=ids.tobytes())


def drop_logprob(t: Tampering) -> None:
    turn = t.row(turns(t, finish="stop")[0])
    t.node(turn.id, logprobs=(turn.logprobs or b"")[:-4])


def set_positive_logprobs(t: Tampering) -> None:
    turn = t.row(turns(t, finish="stop")[0])
    t.node(turn.id, logprobs=np.full(len(turn.ids) // 4, 0.5, np.float32).tobytes())


def swap_turns(t: Tampering) -> None:
    """Swap two turns completely."""
    one, other = (t.row(n) for n in turns(t, finish="stop", cause=None)[:2])
    for place, content in ((one, other), (other, one)):
        t.node(place.id, ids=content.ids, logprobs=content.logprobs, info=content.info, messages=content.messages)


def swap_ids(t: Tampering) -> None:
    """Swap the ids and log-probabilities of two turns."""
    one, other = (t.row(n) for n in turns(t, finish="stop", cause=None)[:2])
    t.node(one.id, ids=other.ids, logprobs=other.logprobs)
    t.node(other.id, ids=one.ids, logprobs=one.logprobs)


def renumber_before_parent(t: Tampering) -> None:
    """Give a turn a lower number than its parent."""
    last = t.of_kind("sampled")[-1]
    row = t.row(last)
    t.sql("DELETE FROM nodes WHERE session=? AND id=?", t.key, last)
    t.add(msgspec.structs.replace(row, id=0))


def set_parent(t: Tampering, node: int, parent: int | None) -> None:
    t.node(node, parent=parent)


def set_parent_of_same_kind(t: Tampering) -> None:
    context = t.of_kind("context")[1]
    set_parent(t, context, t.of_kind("context")[0])


def move_results(t: Tampering) -> None:
    """Attach tool results to a turn that made no calls."""
    results, helper = t.row(t.of_kind("context")[1]), turns(t, finish="stop")[-3]
    t.add(msgspec.structs.replace(results, id=200, parent=helper))
    t.add(msgspec.structs.replace(t.row(t.of_kind("sampled")[-1]), id=201, parent=200))


def change_kind(t: Tampering) -> None:
    t.node(t.of_kind("sampled")[-1], kind="context")


def set_unknown_kind(t: Tampering) -> None:
    t.node(t.of_kind("sampled")[-1], kind="remark")


def replace_in_messages(t: Tampering, node: int, was: bytes, now: bytes) -> None:
    row = t.row(node)
    assert was in row.messages, row.messages
    t.node(node, messages=row.messages.replace(was, now))


def change_question(t: Tampering) -> None:
    replace_in_messages(t, t.of_kind("context")[0], b"Fix the bug.", b"Fix the bog.")


def change_result(t: Tampering) -> None:
    replace_in_messages(t, t.of_kind("context")[1], b"text", b"test")


def change_answer(t: Tampering) -> None:
    replace_in_messages(t, turns(t, finish="stop")[0], b"lost", b"last")


def change_arguments(t: Tampering) -> None:
    replace_in_messages(t, turns(t, finish="tool_calls")[0], b"a.py", b"c.py")


def break_messages(t: Tampering) -> None:
    t.node(t.of_kind("context")[1], messages=b"[{")


def edit_message(t: Tampering, turn: int, **fields: Any) -> None:
    message = {**msgspec.json.decode(t.row(turn).messages), **fields}
    t.node(turn, messages=msgspec.json.encode(message))


def change_dialect(t: Tampering) -> None:
    t.facts(t.of_kind("context")[1], dialect="gemini")


def set_unknown_dialect(t: Tampering) -> None:
    t.facts(t.of_kind("context")[1], dialect="telegraph")


def delete_turn(t: Tampering) -> None:
    t.sql("DELETE FROM nodes WHERE session=? AND id=?", t.key, t.of_kind("sampled")[-1])


def delete_context(t: Tampering) -> None:
    t.sql("DELETE FROM nodes WHERE session=? AND id=?", t.key, t.of_kind("context")[-1])


def duplicate_turn(t: Tampering) -> None:
    t.add(msgspec.structs.replace(t.row(t.of_kind("sampled")[-1]), id=300))


def duplicate_context(t: Tampering) -> None:
    context, turn = t.of_kind("context")[-1], t.of_kind("sampled")[-1]
    t.add(msgspec.structs.replace(t.row(context), id=300))
    t.add(msgspec.structs.replace(t.row(turn), id=301, parent=300))


def delete_preamble(t: Tampering) -> None:
    t.sql("DELETE FROM preambles WHERE session=?", t.key)


def change_tools(t: Tampering) -> None:
    t.sql("UPDATE preambles SET tools=replace(tools, 'Tool read', 'Tool Read') WHERE session=?", t.key)


def change_template_arguments(t: Tampering) -> None:
    t.sql("""UPDATE preambles SET kwargs=CAST('{"x": 1}' AS BLOB) WHERE session=?""", t.key)


def reorder_tool_keys(t: Tampering) -> None:
    """Reverse the keys of each tool: the same JSON value, but a different prompt."""
    (raw,) = t._db.execute("SELECT tools FROM preambles WHERE session=? LIMIT 1", (t.key,)).fetchone()
    swapped = [dict(reversed(tool.items())) for tool in msgspec.json.decode(raw)]
    t.sql("UPDATE preambles SET tools=? WHERE session=? AND tools=?", msgspec.json.encode(swapped), t.key, raw)


def change_vocabulary(t: Tampering) -> None:
    t.sql("UPDATE sessions SET vocabulary='0123456789abcdef' WHERE key=?", t.key)


def clear_vocabulary(t: Tampering) -> None:
    t.sql("UPDATE sessions SET vocabulary='' WHERE key=?", t.key)


def break_config(t: Tampering) -> None:
    t.sql("UPDATE sessions SET config=CAST('{' AS BLOB) WHERE key=?", t.key)


def pin_sampling(t: Tampering) -> None:
    t.sql("""UPDATE sessions SET config=CAST('{"sampling": {"temperature": 0.5}}' AS BLOB) WHERE key=?""", t.key)


def move_to_other_session(t: Tampering) -> None:
    """Move everything to a session that was opened later."""
    (other,) = t._db.execute("SELECT max(key) FROM sessions").fetchone()
    mine, its = t.key, other
    rows = t.rows()
    t._db.execute("DELETE FROM nodes WHERE session IN (?,?)", (mine, its))
    t._db.execute("DELETE FROM preambles WHERE session=?", (its,))
    t._db.execute("UPDATE preambles SET session=? WHERE session=?", (its, mine))
    t.key = its
    for row in rows:
        t.add(row)
    t._db.execute("UPDATE sessions SET config=(SELECT config FROM sessions WHERE key=?) WHERE key=?", (mine, its))


Case = tuple[str, Callable[[Tampering], None]]
CASES: dict[str, Case] = {
    "an id of a question": ("context", lambda t: change_id(t, t.of_kind("context")[0], 20)),
    "an id of a result": ("context", lambda t: change_id(t, t.of_kind("context")[1], 5)),
    "the last id of a context": ("context", lambda t: change_id(t, t.of_kind("context")[2], -1)),
    "an id of an answer": ("parse", lambda t: change_id(t, turns(t, finish="stop")[0], 1)),
    "an id of a call": ("parse", lambda t: change_id(t, turns(t, finish="tool_calls")[0], -8)),
    "an id of a turn that was cut short": ("parse", lambda t: change_id(t, turns(t, finish="length")[0], 2)),
    "a log-probability too few": ("lengths", drop_logprob),
    "log-probabilities above zero": ("lengths", set_positive_logprobs),
    "ids of two turns swapped": ("parse", swap_ids),
    "a number before its parent's": ("tree", renumber_before_parent),
    "a missing parent": ("tree", lambda t: set_parent(t, t.of_kind("context")[1], 999)),
    "a parent of the same kind": ("tree", set_parent_of_same_kind),
    "a turn without a parent": ("tree", lambda t: set_parent(t, t.of_kind("sampled")[-1], None)),
    "a node that is its own parent": (
        "tree",
        lambda t: set_parent(t, t.of_kind("context")[1], t.of_kind("context")[1]),
    ),
    "a context that begins a conversation": ("context", lambda t: set_parent(t, t.of_kind("context")[2], None)),
    "results below another turn": ("messages", move_results),
    "a turn that is a context": ("tree", change_kind),
    "an unknown kind": ("tree", set_unknown_kind),
    "a word of the question": ("context", change_question),
    "a word of a result": ("context", change_result),
    "a word of an answer": ("parse", change_answer),
    "arguments of a call": ("parse", change_arguments),
    "messages that are not JSON": ("messages", break_messages),
    "messages in another dialect": ("messages", change_dialect),
    "messages in an unknown dialect": ("messages", set_unknown_dialect),
    "a dropped turn": ("tree", delete_turn),
    "a dropped context": ("tree", delete_context),
    "a turn twice": ("duplicates", duplicate_turn),
    "a context twice": ("duplicates", duplicate_context),
    "no preamble": ("preamble", delete_preamble),
    "other tools": ("preamble", change_tools),
    "other template arguments": ("preamble", change_template_arguments),
    "tools with reordered keys": ("context", reorder_tool_keys),
    "another vocabulary": ("vocabulary", change_vocabulary),
    "no vocabulary": ("vocabulary", clear_vocabulary),
    "unreadable settings": ("tree", break_config),
    "other pinned sampling": ("sampling", pin_sampling),
    "stopped, marked as cut": ("parse", lambda t: t.facts(turns(t, finish="stop")[0], finish="length")),
    "stopped, marked as calls": ("turn", lambda t: t.facts(turns(t, finish="stop")[0], finish="tool_calls")),
    "calls, marked as stopped": ("turn", lambda t: t.facts(turns(t, finish="tool_calls")[0], finish="stop")),
    "stopped, marked as aborted": ("turn", lambda t: t.facts(turns(t, finish="stop")[0], finish="abort")),
    "aborted, marked as stopped": ("turn", lambda t: t.facts(turns(t, finish="abort")[0], finish="stop")),
    "an unknown finish": ("turn", lambda t: t.facts(turns(t, finish="stop")[0], finish="bored")),
    "a fault of a whole turn": ("turn", lambda t: t.facts(turns(t, finish="stop")[0], fault="the engine died")),
    "another capture": ("turn", lambda t: t.facts(turns(t, finish="stop")[0], capture="logprobs")),
    "versions backwards": ("turn", lambda t: t.facts(turns(t, finish="stop")[0], version_start=9)),
    "a call id that is not text": (
        "messages",
        lambda t: edit_message(t, turns(t, finish="tool_calls")[0], tool_calls=[{"id": [], "name": "read"}]),
    ),
    "inside thinking": ("parse", lambda t: t.facts(turns(t, finish="stop")[0], reasoning_open=True)),
    "hidden bias": ("sampling", lambda t: t.facts(turns(t, finish="stop")[0], sampling=b'{"top_p": 0.5}')),
    "invented bias": ("sampling", lambda t: t.facts(turns(t, finish="stop")[0], biases=["top_k"])),
    "an unknown constraint": (
        "sampling",
        lambda t: t.facts(turns(t, finish="stop")[0], biases=["constrained: verse"]),
    ),
    "sampled at a time that is not a date": (
        "times",
        lambda t: t.facts(t.of_kind("sampled")[0], started=2.0**40, ended=2.0**40),
    ),
    "sampled at an infinite time": ("times", lambda t: t.facts(t.of_kind("sampled")[0], started=math.inf)),
    "sampled before it was opened": ("times", lambda t: t.facts(turns(t, finish="stop")[0], started=1.0)),
    "sampled after it was closed": ("times", lambda t: t.facts(turns(t, finish="stop")[-1], ended=9e9)),
    "all of it in another session": ("times", move_to_other_session),
    "signalled as a side call": (
        "signals",
        lambda t: t.facts(t.of_kind("context")[1], signals=signals_of(role="side", why="title")),
    ),
    "signalled as a summary": (
        "signals",
        lambda t: t.facts(t.of_kind("context")[1], signals=signals_of(role="side", why="summary")),
    ),
    "a summary without its signal": ("signals", lambda t: t.facts(t.of_kind("context")[5], signals=signals_of())),
    "a helper without its signal": ("signals", lambda t: t.facts(roots(t, "subagent")[0], signals=signals_of())),
    "signalled with a parent thread": (
        "signals",
        lambda t: t.facts(t.of_kind("context")[1], signals=signals_of(thread="a", parent="b")),
    ),
    "compaction, recorded as changed tools": ("cause", lambda t: t.facts(roots(t, "compaction")[0], cause="tools")),
    "compaction, recorded without a cause": ("cause", lambda t: t.facts(roots(t, "compaction")[0], cause=None)),
    "other tools, recorded as a system prompt": ("cause", lambda t: t.facts(roots(t, "tools")[0], cause="system")),
    "another system prompt, recorded as a side call": ("cause", lambda t: t.facts(roots(t, "system")[0], cause="side")),
    "an edit, recorded as a branch": ("cause", lambda t: t.facts(roots(t, "edited")[0], cause="branch")),
    "a first attempt, recorded as a retry": ("cause", lambda t: t.facts(turns(t, cause=None)[0], cause="retry")),
    "a retry, recorded as a resample": ("cause", lambda t: t.facts(turns(t, cause="retry")[1], cause="resample")),
    "an unknown cause": ("cause", lambda t: t.facts(roots(t, "edited")[0], cause="whim")),
    "a hand-off, without answers": ("cause", lambda t: t.facts(roots(t, "compaction")[0], cause="handoff")),
    "compaction, recorded as a new conversation": ("cause", lambda t: t.facts(roots(t, "compaction")[0], cause="new")),
    "another size of a text": ("quotes", lambda t: t.facts(turns(t, finish="stop")[0], text_size=3)),
    "an excerpt of no text": ("quotes", lambda t: t.facts(turns(t, finish="stop")[0], excerpts=["nobody said this"])),
    "an invented quotation": ("quotes", lambda t: t.facts(roots(t, "compaction")[0], quotes=[2])),
    "a quotation of a later turn": ("quotes", lambda t: t.facts(t.of_kind("context")[0], quotes=[9])),
    "tools missing from the facts": ("preamble", lambda t: t.facts(t.of_kind("context")[1], has_tools=False)),
}


@pytest.mark.parametrize("name", CASES)
def test_alteration_fails_expected_check(name: str, copy: Recorded) -> None:
    data, session, other = copy
    check, alter = CASES[name]
    with tampering(data, session) as t:
        alter(t)
    found = run_verify(data, other if "another session" in name else session)
    assert check in wrong(found), found.wrong
    assert "checksum" not in wrong(found), "the alteration updated it"


def test_turn_with_too_few_logprobs_is_rightly_not_trained(copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        drop_logprob(t)
    assert wrong(run_verify(data, session)) == {"lengths"}


def test_turn_with_infinite_logprobs_is_rightly_not_trained(copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        turn = t.row(turns(t, finish="stop")[0])
        t.node(turn.id, logprobs=np.full(len(turn.ids) // 4, -np.inf, np.float32).tobytes())
    assert wrong(run_verify(data, session)) == {"lengths"}


def test_delivered_turn_marked_undelivered_is_detected(copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        turn = t.of_kind("sampled")[0]
        t.sql("UPDATE nodes SET delivered=0 WHERE session=? AND id=?", t.key, turn)
    assert wrong(run_verify(data, session)) >= {"checksum"}
    with tampering(data, session) as t:
        t.node(turn, delivered=0)  # with a valid checksum
    assert [note.check for note in run_verify(data, session).notes] == ["delivered"]  # the agent continued from it


def test_sum_of_delivered_may_overflow(copy: Recorded) -> None:
    """Verify compares this sum to find out whether an open session has changed."""
    data, session, _ = copy
    with tampering(data, session) as t:
        t.sql("UPDATE nodes SET delivered=? WHERE session=?", 2**63 - 1, t.key)
        t.sql("UPDATE sessions SET status='open', closed=NULL WHERE key=?", t.key)
    assert {"events", "rows"} <= wrong(run_verify(data, session))


def test_removed_branch_leaves_gap(copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        side = t.of_kind("context")[5]
        t.sql("DELETE FROM nodes WHERE session=? AND id IN (?,?)", t.key, side, side + 1)
    found = run_verify(data, session)
    [note] = found.notes
    assert note.check == "tree" and f"{side} to {side + 1}" in note.what
    assert wrong(found) == {"events"}
    assert f"reports turn {side + 1}, which is not stored" in found.wrong[0].what


# ── outcomes ────────────────────────────────────────────────────────────────────────────────────────────────────

_OUTCOMES = {
    "no JSON": ("{", "not valid JSON"),
    "NaN": ('{"kind": "graded", "reward": NaN}', "NaN is not a JSON number"),
    "a list": ("[]", "not a JSON object"),
    "nothing": ("{}", "the outcome's kind is None, which is not one of graded, "),
    "an unknown kind": (
        '{"kind": "solved", "reward": 1.0}',
        "the outcome's kind is 'solved', which is not one of graded, ",
    ),
    "an infinite reward": (
        '{"kind": "graded", "reward": 1e999}',
        "the outcome's reward is inf, which is neither a finite number",
    ),
    "a reward too large for a float": (
        '{"kind": "graded", "reward": 1' + "0" * 400 + "}",
        "is neither a finite number",
    ),
    "a reward as text": ('{"kind": "graded", "reward": "1.0"}', "the outcome's reward is '1.0', which is neither"),
    "a reward of true": ('{"kind": "graded", "reward": true}', "the outcome's reward is True, which is neither"),
    "two rewards": ('{"kind": "graded", "reward": 1.0, "reward": 0.0}', "a duplicate key"),
    "a reward for a fault": (
        '{"kind": "infrastructure fault", "reward": 0.0}',
        "the outcome's reward is 0.0, but a rollout that ended as",
    ),
    "a reward for an invalid task": (
        '{"kind": "invalid task", "reward": 1}',
        "the outcome's reward is 1, but a rollout that ended as",
    ),
    "an unknown field": ('{"kind": "graded", "rewards": 1.0}', "the outcome has unknown fields: 'rewards'"),
    "a fractional resolved field": (
        '{"kind": "graded", "resolved": 0.5}',
        "the outcome's resolved field is 0.5, which is not true",
    ),
    "a negative attempt": (
        '{"kind": "graded", "attempt": -1}',
        "the outcome's attempt is -1, which is not an integer from 0",
    ),
    "a task that is a number": ('{"kind": "graded", "task": 7}', "the outcome's task is 7, not text"),
    "too long": ('{"kind": "graded", "data": "' + "x" * 300_000 + '"}', "a gateway records at most 262144"),
}


def add_outcome(t: Tampering, raw: object, recorded: object = 1e9) -> None:
    """Store an outcome and its event, and settle its attempt."""
    t.sql("INSERT OR REPLACE INTO outcomes VALUES (?,?,?)", t.key, recorded, raw)
    is_fault = isinstance(raw, bytes) and b"infrastructure fault" in raw
    set_state(t, "failed" if is_fault else "settled")
    add_event(t, "outcome", {"kind": "graded", "reward": 1.0, "resolved": None, "task": "", "group": "", "attempt": 1})


def set_state(t: Tampering, state: str) -> None:
    t.sql("UPDATE attempts SET state=? WHERE session=?", state, t.name)


def add_event(t: Tampering, kind: str, data: object) -> None:
    written = data if isinstance(data, bytes) else msgspec.json.encode(data)
    t.sql(
        "INSERT INTO events (time, session, kind, data) SELECT 1e9, id, ?, ? FROM sessions WHERE key=?",
        kind,
        written,
        t.key,
    )


@pytest.mark.parametrize("name", _OUTCOMES)
def test_invalid_outcome_is_detected(name: str, copy: Recorded) -> None:
    data, session, other = copy
    raw, words = _OUTCOMES[name]
    with tampering(data, session) as t:
        add_outcome(t, raw.encode())
    found = run_verify(data, session)
    # If it can be read at all, the event has a different outcome.
    assert {"outcome"} <= wrong(found) <= {"outcome", "events"} and words in found.wrong[0].what, found.wrong
    assert found.counts.rows, "the trace is unaffected"
    assert run_verify(data, other).ok


@pytest.mark.parametrize("raw", ["{", '{"kind": "graded", "reward": 1.0}', 7, b"\xff", b"\xfe\xff\x00{\x00}"])
def test_outcome_of_wrong_type_or_encoding_is_detected(raw: object, copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        add_outcome(t, raw)
    assert wrong(run_verify(data, session)) == {"outcome"}


def test_outcome_without_valid_time_is_detected(copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        add_outcome(t, b'{"kind": "graded", "reward": 1.0}', "yesterday")
    assert wrong(run_verify(data, session)) == {"outcome"}


def test_outcome_of_open_session_is_detected(copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        add_outcome(t, b'{"kind": "graded", "reward": 1.0}')
        assert run_verify(data, session).ok
        t.sql("UPDATE sessions SET status='open', closed=NULL WHERE key=?", t.key)
    [finding, contradiction] = run_verify(data, session).wrong
    assert (finding.check, finding.what) == ("outcome", "the session is still open but has an outcome")
    assert contradiction.check == "events" and "the session's status is 'open', but event" in contradiction.what


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("status='zzz'", "the session's status is 'zzz', which is not one of open, sealed, cancelled"),
        ("status='open'", "the session is open, but has a closing time"),
        ("closed=NULL", "the session is sealed, but has no closing time"),
    ],
)
def test_impossible_status_is_detected(change: str, words: str, copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        t.sql(f"UPDATE sessions SET {change} WHERE key=?", t.key)
    [finding, *others] = run_verify(data, session).wrong
    assert (finding.check, finding.what) == ("status", words)
    unreadable = (
        ["rows", "masks", "once", "reasons", "roles"] if "zzz" in change else []
    )  # the gateway does not read such a row
    assert [other.check for other in others] == [*(["events"] if "status" in change else []), *unreadable]


# ── contradictions with events ──────────────────────────────────────────────────────────────────────────────────────────


def mark_as_complete(t: Tampering) -> None:
    t.facts(turns(t, finish="abort")[0], finish="length", fault="")


def mark_as_aborted(t: Tampering) -> None:
    t.facts(turns(t, finish="stop")[-1], finish="abort", fault="the agent left")


def truncate_turn(t: Tampering) -> None:
    """Drop the last id of an aborted turn, consistently."""
    turn = t.row(turns(t, finish="abort")[0])
    ids = turn.ids[:-4]
    message = msgspec.json.decode(turn.messages)
    message["content"] = kit.renderer().tokenizer.decode(np.frombuffer(ids, np.int32).tolist())
    t.node(turn.id, ids=ids, logprobs=(turn.logprobs or b"")[:-4], messages=msgspec.json.encode(message))
    t.facts(turn.id, text_size=len(message["content"]), excerpts=[])


def delete_last_turn(t: Tampering) -> None:
    context = t.of_kind("context")[-1]
    t.sql("DELETE FROM nodes WHERE session=? AND id>=?", t.key, context)


def delete_last_turn_and_event(t: Tampering) -> None:
    delete_last_turn(t)
    delete_turn_event(t)


def delete_all_turns(t: Tampering) -> None:
    for table in ("nodes", "preambles"):
        t.sql(f"DELETE FROM {table} WHERE session=?", t.key)


def add_turn(t: Tampering) -> None:
    last = t.row(t.of_kind("sampled")[-1])
    facts = msgspec.msgpack.decode(last.info)
    names = [field.name for field in msgspec.structs.fields(TurnFacts)]
    facts[names.index("cause")] = "resample"
    facts[names.index("started")] += 1e-3
    facts[names.index("ended")] += 1e-3
    t.add(msgspec.structs.replace(last, id=last.id + 1, info=msgspec.msgpack.encode(facts)))


def delete_turn_event(t: Tampering) -> None:
    t.sql("DELETE FROM events WHERE seq=(SELECT max(seq) FROM events WHERE kind='turn' AND session=?)", t.name)


def duplicate_turn_event(t: Tampering) -> None:
    add_event(t, "turn", t.event_data("turn")[-1])


def change_turn_event(t: Tampering, **facts: object) -> None:
    """Change the event of the last turn."""
    data = {**msgspec.json.decode(t.event_data("turn")[-1]), **facts}
    query = "UPDATE events SET data=? WHERE seq=(SELECT max(seq) FROM events WHERE kind='turn' AND session=?)"
    t.sql(query, msgspec.json.encode(data), t.name)


def damage_event(t: Tampering) -> None:
    t.sql("UPDATE events SET data=x'7b' WHERE kind='opened' AND session=?", t.name)


def change_reward(t: Tampering) -> None:
    add_outcome(t, b'{"kind": "graded", "reward": 1.0}')
    t.sql("""UPDATE outcomes SET outcome=CAST('{"kind": "graded", "reward": 0.5}' AS BLOB) WHERE session=?""", t.key)


def change_task(t: Tampering) -> None:
    add_outcome(t, b'{"kind": "graded", "reward": 1.0, "task": "a harder one"}')


def restore_replaced_outcome(t: Tampering) -> None:
    """Store an outcome that was replaced."""
    add_event(t, "outcome", {"kind": "graded", "reward": 0.0, "resolved": None, "task": "", "group": "", "attempt": 1})
    add_outcome(t, b'{"kind": "graded", "reward": 0.0}')


def delete_outcome(t: Tampering) -> None:
    add_outcome(t, b'{"kind": "graded", "reward": 1.0}')
    t.sql("DELETE FROM outcomes WHERE session=?", t.key)
    set_state(t, "running")


def delete_outcome_event(t: Tampering) -> None:
    add_outcome(t, b'{"kind": "graded", "reward": 1.0}')
    t.sql("DELETE FROM events WHERE kind='outcome' AND session=?", t.name)


# ── attempts ────────────────────────────────────────────────────────────────────────────────────────────────────


def settle_unrecorded(t: Tampering) -> None:
    set_state(t, "settled")


def reopen_attempt(t: Tampering) -> None:
    add_outcome(t, b'{"kind": "graded", "reward": 1.0}')
    set_state(t, "running")


def name_unregistered_attempt(t: Tampering) -> None:
    t.sql("""UPDATE sessions SET config=CAST(json_set(config, '$.rollout', 'other') AS BLOB) WHERE key=?""", t.key)


def settle_another_attempt(t: Tampering) -> None:
    add_outcome(t, b'{"kind": "graded", "reward": 1.0}')
    t.sql("DROP INDEX attempts_settled")
    t.sql("INSERT INTO attempts SELECT rollout, 2, '', '', state, started, ended FROM attempts WHERE session=?", t.name)


def deliver_superseded_attempt(t: Tampering) -> None:
    set_state(t, "superseded")
    add_event(t, "superseded", {"rollout": t.name, "attempt": 1})
    t.sql("INSERT INTO rolled (feed, session, id, team, outcome) VALUES (1, ?, ?, 'g', x'7b7d')", t.key, t.name)


ATTEMPTS: dict[str, Case] = {
    "settled without an outcome": (
        "the attempt is settled, but must be running, given the session's outcome or the lack of one",
        settle_unrecorded,
    ),
    "running with an outcome": (
        "the attempt is running, but must be settled, given the session's outcome or the lack of one",
        reopen_attempt,
    ),
    "an unknown state": ("the attempt's state is 'paused', which is not one of", lambda t: set_state(t, "paused")),
    "an unregistered attempt": (
        "the session's settings name attempt 1 of 'other', which is not",
        name_unregistered_attempt,
    ),
    "two attempts that count": ("also count: 1", settle_another_attempt),
    "a superseded attempt in a feed": (
        "the session is superseded, but is waiting for its group in a feed (feeds: 1)",
        deliver_superseded_attempt,
    ),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_invalid_attempt_is_detected(name: str, copy: Recorded) -> None:
    data, session, other = copy
    words, tamper = ATTEMPTS[name]
    with tampering(data, session) as t:
        tamper(t)
    found = run_verify(data, session)
    assert wrong(found) == {"attempt"} and words in found.wrong[0].what, found.wrong
    assert run_verify(data, other).ok


@pytest.mark.parametrize("is_marked", [True, False])
def test_superseded_attempt_agrees_with_its_event(is_marked: bool, copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        if is_marked:
            set_state(t, "superseded")
        else:
            add_event(t, "superseded", {"rollout": session, "attempt": 1})
    [finding] = run_verify(data, session).wrong
    assert finding.check == "events" and "events report the superseded attempts" in finding.what


def change_model(t: Tampering) -> None:
    t.sql("""UPDATE sessions SET config=CAST(json_set(config, '$.model', 'large') AS BLOB) WHERE key=?""", t.key)


def mark_as_cancelled(t: Tampering) -> None:
    t.sql("UPDATE sessions SET status='cancelled' WHERE key=?", t.key)


EVENTS: dict[str, Case] = {
    "an aborted turn marked as complete": ("its finish is stored as 'length', but event ", mark_as_complete),
    "a complete turn marked as aborted": ("its finish is stored as 'abort', but event ", mark_as_aborted),
    "a truncated turn": ("its sampled_tokens is stored as 4, but event ", truncate_turn),
    "the last turn removed": (", which is not stored (finish 'stop', ", delete_last_turn),
    "the last turn removed with its event": (
        "the number of turns that were not aborted is ",
        delete_last_turn_and_event,
    ),
    "all turns removed": (", which is not stored (finish 'abort', sampled tokens: 5)", delete_all_turns),
    "an added turn": ("no event reports this turn", add_turn),
    "a turn without an event": ("no event reports this turn", delete_turn_event),
    "a turn with two events": ("reports this turn a second time", duplicate_turn_event),
    "another prompt": ("its prompt_tokens is stored as ", lambda t: change_turn_event(t, prompt_tokens=1)),
    "another cause": ("its cause is stored as ", lambda t: change_turn_event(t, cause="whim")),
    "a turn number that is not a number": (
        "reports turn 'last', which is not stored",
        lambda t: change_turn_event(t, node="last"),
    ),
    "an unreadable event": ("(opened) cannot be read", damage_event),
    "another reward": ("the outcome's reward is stored as 0.5, but event ", change_reward),
    "another task": ("the outcome's task is stored as 'a harder one', but event ", change_task),
    "an outcome that was replaced": ("the outcome's reward is stored as 0.0, but event ", restore_replaced_outcome),
    "an outcome removed": ("an event reports an outcome, but none is stored", delete_outcome),
    "an outcome without an event": ("but no event reports it", delete_outcome_event),
    "another model": ("the session was opened with model '', but its settings have 'large'", change_model),
    "sealed, marked as cancelled": ("the session's status is 'cancelled', but event ", mark_as_cancelled),
}


@pytest.mark.parametrize("name", EVENTS)
def test_contradiction_with_events_fails_only_events_check(name: str, copy: Recorded) -> None:
    data, session, other = copy
    words, alter = EVENTS[name]
    with tampering(data, session) as t:
        alter(t)
    found = run_verify(data, session)
    assert wrong(found) == {"events"}, found.wrong
    assert any(words in finding.what for finding in found.wrong), found.wrong
    assert run_verify(data, other).ok


def test_unknown_policy_version_is_detected(copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        turn = t.of_kind("sampled")[0]
        for versions, words in {
            (0, 999): "its policy version is 999, but the highest ever active here is 0",
            (-5, 0): "its policy version is -5, but versions start at 0",
        }.items():
            t.facts(turn, version_start=versions[0], version_end=versions[1])
            [finding] = run_verify(data, session).wrong
            assert (finding.check, finding.what, finding.node) == ("turn", words, turn)
        t.facts(turn, version_start=0, version_end=999)
        t.sql("INSERT INTO settings VALUES ('policy_version', '999')")
        assert run_verify(data, session).ok


# Missing events cannot be compared; verify reports them as unchecked.
MISSING_EVENTS: dict[str, Callable[[Tampering], None]] = {
    "pruned": lambda t: t.sql("DELETE FROM events WHERE seq <= (SELECT max(seq) - 4 FROM events)"),
    "all pruned": lambda t: t.sql("DELETE FROM events"),
    "perhaps pruned": lambda t: t.sql("INSERT INTO settings SELECT 'events_pruned', max(seq) FROM events"),
    "older schema without events": lambda t: t.sql("PRAGMA user_version=2"),
}


@pytest.mark.parametrize("name", MISSING_EVENTS)
def test_missing_events_are_unchecked_not_wrong(name: str, copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        MISSING_EVENTS[name](t)
    found = run_verify(data, session)
    assert found.ok and not any(finding.check == "events" for finding in found.findings)
    assert [missing.check for missing in found.unchecked] == ["events"]


def test_events_of_earlier_session_with_same_id_are_ignored(copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        later = t._db.execute("SELECT kind, data FROM events WHERE session=? ORDER BY seq", (t.name,)).fetchall()
        add_event(t, "sealed", {"stop": "", "turns": 7})
        for kind, payload in later:
            add_event(t, kind, payload)
    assert run_verify(data, session).ok


# ── replay ────────────────────────────────────────────────────────────────────────────────────


def test_replay_detects_altered_logprobs(copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        for turn in map(t.row, t.of_kind("sampled")):
            scores = np.frombuffer(turn.logprobs or b"", np.float32).copy()
            at = len(scores) // 2
            scores[at] -= 0.125
            t.node(turn.id, logprobs=scores.tobytes())
            assert run_verify(data, session).ok, "no other check detects it"
            [finding] = run_verify(data, session, replay=True).wrong
            assert (finding.check, finding.node) == ("logprobs", turn.id)
            assert f"recorded as {scores[at]:.4f}" in finding.what
            t.node(turn.id, logprobs=turn.logprobs)
    assert run_verify(data, session, replay=True).ok


def test_replay_omits_turns_with_negative_ids(copy: Recorded) -> None:
    data, session, _ = copy
    whole = run_verify(data, session, replay=True).replay
    with tampering(data, session) as t:
        turn = t.row(t.of_kind("sampled")[-1])
        t.node(turn.id, ids=np.full(len(turn.ids) // 4, -1, np.int32).tobytes())
    found = run_verify(data, session, replay=True)
    assert {"lengths"} <= wrong(found) and "logprobs" not in wrong(found)
    assert whole is not None and found.replay is not None and found.replay.turns == whole.turns - 1


def test_replay_detects_moved_turn(copy: Recorded) -> None:
    """The messages fit there, but the log-probabilities do not."""
    data, session, _ = copy
    with tampering(data, session) as t:
        question = t.row(t.of_kind("context")[3])  # a user message
        t.node(question.id, parent=turns(t, cause="retry")[0])
    found = run_verify(data, session, replay=True)
    assert "logprobs" in wrong(found)


def test_replay_detects_swapped_turns(copy: Recorded) -> None:
    """Messages, ids and facts still fit together."""
    data, session, _ = copy
    with tampering(data, session) as t:
        swap_turns(t)
    found = run_verify(data, session, replay=True)
    # On a slow machine, their times are so far apart that the times check fails too.
    # The events check fails if their lengths differ.
    assert {"logprobs"} <= wrong(found) <= {"logprobs", "times", "events"}
    assert "times" in {note.check for note in found.notes} | wrong(found), "they ended in the wrong order"


def test_any_changed_token_id_is_detected(copy: Recorded) -> None:
    """Change the first, the middle and the last id of every node."""
    data, session, _ = copy
    with tampering(data, session) as t:
        for row in t.rows():
            for at in {0, len(row.ids) // 8, len(row.ids) // 4 - 1}:
                change_id(t, row.id, at)
                assert not run_verify(data, session, replay=True).ok, f"id {at} of node {row.id}"
                t.node(row.id, ids=row.ids)


# ── exported rows ─────────────────────────────────────────────────────────────────────────────────────────────


def verify_changed_rows(
    data: Path, change_rows: Callable[[list[Sample]], Sequence[Sample]]
) -> Callable[[str], Verdict]:
    """Verify the rows of a faulty exporter for a correct trace."""

    def judge(session: str) -> Verdict:
        with open_row_source(data) as real:
            return run_verify(data, session, rows=lambda s, everything: change_rows(list(real(s, everything))))  # type: ignore[arg-type]

    return judge


def replace_fields(row: Sample, **fields: Any) -> Sample:
    return msgspec.structs.replace(row, **fields)


def flip_mask(row: Sample, at: int) -> Sample:
    mask = row.mask.copy()
    mask[at] = not mask[at]
    return replace_fields(row, mask=mask)


def fill_with_zeros(row: Sample) -> Sample:
    return replace_fields(row, logprobs=np.nan_to_num(row.logprobs))


def replace_span(row: Sample, at: int, **fields: Any) -> Sample:
    spans = list(row.spans)
    spans[at] = msgspec.structs.replace(spans[at], **fields)
    return replace_fields(row, spans=tuple(spans))


def train_shared_turns_twice(rows: list[Sample]) -> list[Sample]:
    """Train shared turns in every row."""
    out = []
    for row in rows:
        mask, spans = row.mask.copy(), []
        for s in row.spans:
            again = s.reason == "trained in another row"
            mask[s.start : s.end] |= again
            spans.append(msgspec.structs.replace(s, trained=True, reason="") if again else s)
        out.append(replace_fields(row, mask=mask, spans=tuple(spans)))
    return out


def change_first(change: Callable[[Sample], Sample]) -> Callable[[list[Sample]], list[Sample]]:
    return lambda rows: [change(rows[0]), *rows[1:]]


ROW_CHANGES: dict[str, tuple[str, Callable[[list[Sample]], list[Sample]]]] = {
    "a context token is trained": ("masks", change_first(lambda r: flip_mask(r, 0))),
    "a sampled token is not trained": ("masks", change_first(lambda r: flip_mask(r, r.spans[0].start))),
    "zeros for missing log-probabilities": ("masks", change_first(fill_with_zeros)),
    "another log-probability": (
        "masks",
        change_first(lambda r: replace_fields(r, logprobs=r.logprobs - np.float32(0.5))),
    ),
    "another id": (
        "rows",
        change_first(lambda r: replace_fields(r, ids=np.concatenate([r.ids[:5], r.ids[5:6] + 1, r.ids[6:]]))),
    ),
    "an id too few": (
        "rows",
        change_first(lambda r: replace_fields(r, ids=r.ids[:-1], mask=r.mask[:-1], logprobs=r.logprobs[:-1])),
    ),
    "a mask too short": ("rows", change_first(lambda r: replace_fields(r, mask=r.mask[:-1]))),
    "a turn at another place": ("rows", change_first(lambda r: replace_span(r, 0, start=r.spans[0].start + 1))),
    "another policy version": ("rows", change_first(lambda r: replace_span(r, 0, version_end=7))),
    "other versions within a turn": (
        "rows",
        change_first(
            lambda r: replace_span(r, 0, version_runs=((0, 1), (1, r.spans[0].end - r.spans[0].start - 1))),
        ),
    ),
    "a row is missing": ("rows", lambda rows: rows[1:]),
    "a duplicate row": ("rows", lambda rows: [*rows, rows[0]]),
    "a row of another branch": ("rows", change_first(lambda r: replace_fields(r, branch=2))),
    "shared turns are trained in each row": ("once", train_shared_turns_twice),
    "another role": ("roles", change_first(lambda r: replace_span(r, 0, role="subagent"))),
    "no reason": ("reasons", lambda rows: [*rows[:-1], replace_span(rows[-1], -1, reason="", trained=False)]),
    "a wrong reason": (
        "reasons",
        lambda rows: [*rows[:-1], replace_span(rows[-1], -1, reason="role side", trained=False)],
    ),
}


@pytest.mark.parametrize("name", ROW_CHANGES)
def test_wrong_export_rows_are_detected(name: str, recorded: Recorded) -> None:
    data, session, _ = recorded
    check, change_rows = ROW_CHANGES[name]
    assert check in wrong(verify_changed_rows(data, change_rows)(session))


def test_export_refusing_good_trace_is_detected(recorded: Recorded) -> None:
    from turngate.errors import StoreError

    def refuse(session: str, everything: bool) -> list[Sample]:
        raise StoreError("it is damaged")

    data, session, _ = recorded
    assert wrong(run_verify(data, session, rows=refuse)) == {"rows", "masks", "once", "reasons", "roles"}


def test_rows_the_gateway_rejects_are_unchecked(copy: Recorded) -> None:
    data, session, _ = copy
    with closing(sqlite3.connect(data / "turngate.db", isolation_level=None)) as db:
        db.execute("UPDATE nodes SET checksum=1 WHERE id=2")
    found = run_verify(data, session)
    assert wrong(found) == {"checksum"}
    assert {missing.part for missing in found.unchecked} == {"rows"}
