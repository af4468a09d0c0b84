"""One thing is altered in a stored session, and verify says so under the right name. Whoever alters it mends the checksum as well,
except where the checksum itself is what is tried."""

from __future__ import annotations

import asyncio
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
from tests.verify.stories import rich
from turngate.trace.sample import Sample
from turngate.verify import RowSource, Verdict
from turngate.verify.store_reader import TurnFacts
from turngate.views.verdict import open_row_source

Recorded = tuple[Path, str, str]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A folder, and its two sessions."""
    folder = tmp_path_factory.mktemp("recorded")
    return folder, *asyncio.run(rich(folder, kit.renderer()))


@pytest.fixture
def copy(recorded: Recorded, tmp_path: Path) -> Recorded:
    folder, *sessions = recorded
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(folder / "turngate.db", data)
    return data, *sessions


def look(data: Path, session: str, *, replay: bool = False, rows: RowSource | None = None) -> Verdict:
    return verdict(data, session, renderer=kit.renderer(), replay=replay, rows=rows)


def test_what_nobody_touched_is_fine(recorded: Recorded) -> None:
    data, *sessions = recorded
    for session in sessions:
        found = look(data, session, replay=True)
        assert found.ok and not found.notes and not found.unchecked, found


# ── the bytes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def flipped(blob: bytes, at: int = 0) -> bytes:
    return blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]


@pytest.mark.parametrize("column", ["ids", "logprobs", "info", "messages", "parent", "kind", "id", "checksum"])
def test_a_changed_column_breaks_the_checksum(column: str, copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        turn = t.row(t.of_kind("sampled")[3])
        was = getattr(turn, column)
        now: Any = flipped(was) if isinstance(was, bytes) else "context" if column == "kind" else was + 100
        t.sql(f"UPDATE nodes SET {column}=? WHERE session=? AND id=?", now, t.key, turn.id)
    assert "checksum" in wrong(look(data, session))


def test_a_turn_that_is_moved_to_another_session_breaks_the_checksum(copy: Recorded) -> None:
    data, session, other = copy
    with tampering(data, session) as t, tampering(data, other) as o:
        t.sql("UPDATE nodes SET session=? WHERE session=? AND id=?", o.key, t.key, t.of_kind("sampled")[-1])
    assert "checksum" in wrong(look(data, other))
    assert "tree" in wrong(look(data, session)), "the context that it answered has no answer now"


# ── with the checksum mended ────────────────────────────────────────────────────────────────────────────────────────


def turns(t: Tampering, **facts: Any) -> list[int]:
    """Turns of which these facts hold."""
    return [n for n in t.of_kind("sampled") if all(getattr(t.fact(n), name) == value for name, value in facts.items())]


def roots(t: Tampering, cause: str | None) -> list[int]:
    return [n for n in t.of_kind("context") if t.row(n).parent is None and t.fact(n).cause == cause]


def told(thread: str = "", parent: str = "", role: str = "", why: str = "") -> list[str]:
    return [thread, parent, role, why]


def another_id(t: Tampering, node: int, at: int) -> None:
    ids = np.frombuffer(t.row(node).ids, np.int32).copy()
    ids[at] = ids[at] + 1 if ids[at] < 500 else ids[at] - 1
    t.node(node, ids=ids.tobytes())


def shorter(t: Tampering) -> None:
    turn = t.row(turns(t, finish="stop")[0])
    t.node(turn.id, logprobs=(turn.logprobs or b"")[:-4])


def above_zero(t: Tampering) -> None:
    turn = t.row(turns(t, finish="stop")[0])
    t.node(turn.id, logprobs=np.full(len(turn.ids) // 4, 0.5, np.float32).tobytes())


def swapped_contents(t: Tampering) -> None:
    """Two turns change places with everything that they are."""
    one, other = (t.row(n) for n in turns(t, finish="stop", cause=None)[:2])
    for place, content in ((one, other), (other, one)):
        t.node(place.id, ids=content.ids, logprobs=content.logprobs, info=content.info, messages=content.messages)


def swapped_ids(t: Tampering) -> None:
    """Only what was sampled changes places."""
    one, other = (t.row(n) for n in turns(t, finish="stop", cause=None)[:2])
    t.node(one.id, ids=other.ids, logprobs=other.logprobs)
    t.node(other.id, ids=one.ids, logprobs=one.logprobs)


def numbered_back(t: Tampering) -> None:
    """A turn gets a number before that of what it follows."""
    last = t.of_kind("sampled")[-1]
    row = t.row(last)
    t.sql("DELETE FROM nodes WHERE session=? AND id=?", t.key, last)
    t.add(msgspec.structs.replace(row, id=0))


def another_parent(t: Tampering, node: int, parent: int | None) -> None:
    t.node(node, parent=parent)


def on_another_kind(t: Tampering) -> None:
    context = t.of_kind("context")[1]
    another_parent(t, context, t.of_kind("context")[0])


def results_elsewhere(t: Tampering) -> None:
    """Results hang on a turn that did not make the calls."""
    results, helper = t.row(t.of_kind("context")[1]), turns(t, finish="stop")[-3]
    t.add(msgspec.structs.replace(results, id=200, parent=helper))
    t.add(msgspec.structs.replace(t.row(t.of_kind("sampled")[-1]), id=201, parent=200))


def another_kind(t: Tampering) -> None:
    t.node(t.of_kind("sampled")[-1], kind="context")


def unknown_kind(t: Tampering) -> None:
    t.node(t.of_kind("sampled")[-1], kind="remark")


def other_words(t: Tampering, node: int, was: bytes, now: bytes) -> None:
    row = t.row(node)
    assert was in row.messages, row.messages
    t.node(node, messages=row.messages.replace(was, now))


def first_question(t: Tampering) -> None:
    other_words(t, t.of_kind("context")[0], b"Fix the bug.", b"Fix the bog.")


def result(t: Tampering) -> None:
    other_words(t, t.of_kind("context")[1], b"text", b"test")


def answer(t: Tampering) -> None:
    other_words(t, turns(t, finish="stop")[0], b"lost", b"last")


def arguments(t: Tampering) -> None:
    other_words(t, turns(t, finish="tool_calls")[0], b"a.py", b"c.py")


def no_json(t: Tampering) -> None:
    t.node(t.of_kind("context")[1], messages=b"[{")


def another_dialect(t: Tampering) -> None:
    t.facts(t.of_kind("context")[1], dialect="gemini")


def no_dialect(t: Tampering) -> None:
    t.facts(t.of_kind("context")[1], dialect="telegraph")


def dropped_turn(t: Tampering) -> None:
    t.sql("DELETE FROM nodes WHERE session=? AND id=?", t.key, t.of_kind("sampled")[-1])


def dropped_context(t: Tampering) -> None:
    t.sql("DELETE FROM nodes WHERE session=? AND id=?", t.key, t.of_kind("context")[-1])


def twin(t: Tampering) -> None:
    t.add(msgspec.structs.replace(t.row(t.of_kind("sampled")[-1]), id=300))


def twin_context(t: Tampering) -> None:
    context, turn = t.of_kind("context")[-1], t.of_kind("sampled")[-1]
    t.add(msgspec.structs.replace(t.row(context), id=300))
    t.add(msgspec.structs.replace(t.row(turn), id=301, parent=300))


def no_preamble(t: Tampering) -> None:
    t.sql("DELETE FROM preambles WHERE session=?", t.key)


def another_preamble(t: Tampering) -> None:
    t.sql("UPDATE preambles SET tools=replace(tools, 'Tool read', 'Tool Read') WHERE session=?", t.key)


def other_arguments(t: Tampering) -> None:
    t.sql("""UPDATE preambles SET kwargs=CAST('{"x": 1}' AS BLOB) WHERE session=?""", t.key)


def tools_in_another_order(t: Tampering) -> None:
    """The same to a machine, and not to a model: the keys of one tool change places."""
    (raw,) = t._db.execute("SELECT tools FROM preambles WHERE session=? LIMIT 1", (t.key,)).fetchone()
    swapped = [dict(reversed(tool.items())) for tool in msgspec.json.decode(raw)]
    t.sql("UPDATE preambles SET tools=? WHERE session=? AND tools=?", msgspec.json.encode(swapped), t.key, raw)


def another_vocabulary(t: Tampering) -> None:
    t.sql("UPDATE sessions SET vocabulary='0123456789abcdef' WHERE key=?", t.key)


def no_vocabulary(t: Tampering) -> None:
    t.sql("UPDATE sessions SET vocabulary='' WHERE key=?", t.key)


def other_settings(t: Tampering) -> None:
    t.sql("UPDATE sessions SET config=CAST('{' AS BLOB) WHERE key=?", t.key)


def pinned(t: Tampering) -> None:
    t.sql("""UPDATE sessions SET config=CAST('{"sampling": {"temperature": 0.5}}' AS BLOB) WHERE key=?""", t.key)


def neighbour(t: Tampering) -> None:
    """All of a session is given to another one that was opened later."""
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
    "an id of a question": ("context", lambda t: another_id(t, t.of_kind("context")[0], 20)),
    "an id of a result": ("context", lambda t: another_id(t, t.of_kind("context")[1], 5)),
    "the last id of a context": ("context", lambda t: another_id(t, t.of_kind("context")[2], -1)),
    "an id of an answer": ("parse", lambda t: another_id(t, turns(t, finish="stop")[0], 1)),
    "an id of a call": ("parse", lambda t: another_id(t, turns(t, finish="tool_calls")[0], -8)),
    "an id of a turn that was cut short": ("parse", lambda t: another_id(t, turns(t, finish="length")[0], 2)),
    "a log-probability too few": ("lengths", shorter),
    "log-probabilities above zero": ("lengths", above_zero),
    "ids of two turns swapped": ("parse", swapped_ids),
    "a number before its parent's": ("tree", numbered_back),
    "a parent that is not there": ("tree", lambda t: another_parent(t, t.of_kind("context")[1], 999)),
    "a parent of the same kind": ("tree", on_another_kind),
    "a turn without a parent": ("tree", lambda t: another_parent(t, t.of_kind("sampled")[-1], None)),
    "a node that is its own parent": (
        "tree",
        lambda t: another_parent(t, t.of_kind("context")[1], t.of_kind("context")[1]),
    ),
    "a context that begins a conversation": ("context", lambda t: another_parent(t, t.of_kind("context")[2], None)),
    "results below another turn": ("messages", results_elsewhere),
    "a turn that is a context": ("tree", another_kind),
    "a kind that is none": ("tree", unknown_kind),
    "a word of the question": ("context", first_question),
    "a word of a result": ("context", result),
    "a word of an answer": ("parse", answer),
    "arguments of a call": ("parse", arguments),
    "messages that are no JSON": ("messages", no_json),
    "messages in another dialect": ("messages", another_dialect),
    "messages in no dialect": ("messages", no_dialect),
    "a dropped turn": ("tree", dropped_turn),
    "a dropped context": ("tree", dropped_context),
    "a turn twice": ("twice", twin),
    "a context twice": ("twice", twin_context),
    "no preamble": ("preamble", no_preamble),
    "other tools": ("preamble", another_preamble),
    "other template arguments": ("preamble", other_arguments),
    "tools spelled otherwise": ("context", tools_in_another_order),
    "another vocabulary": ("vocabulary", another_vocabulary),
    "no vocabulary": ("vocabulary", no_vocabulary),
    "settings that cannot be read": ("tree", other_settings),
    "sampling that was pinned otherwise": ("sampling", pinned),
    "stopped, marked as cut": ("parse", lambda t: t.facts(turns(t, finish="stop")[0], finish="length")),
    "stopped, marked as calls": ("turn", lambda t: t.facts(turns(t, finish="stop")[0], finish="tool_calls")),
    "calls, marked as stopped": ("turn", lambda t: t.facts(turns(t, finish="tool_calls")[0], finish="stop")),
    "stopped, marked as aborted": ("turn", lambda t: t.facts(turns(t, finish="stop")[0], finish="abort")),
    "aborted, marked as stopped": ("turn", lambda t: t.facts(turns(t, finish="abort")[0], finish="stop")),
    "an ending that is none": ("turn", lambda t: t.facts(turns(t, finish="stop")[0], finish="bored")),
    "a fault of a whole turn": ("turn", lambda t: t.facts(turns(t, finish="stop")[0], fault="the engine died")),
    "another capture": ("turn", lambda t: t.facts(turns(t, finish="stop")[0], capture="logprobs")),
    "versions backwards": ("turn", lambda t: t.facts(turns(t, finish="stop")[0], version_start=9)),
    "inside thinking": ("parse", lambda t: t.facts(turns(t, finish="stop")[0], reasoning_open=True)),
    "hidden bias": ("sampling", lambda t: t.facts(turns(t, finish="stop")[0], sampling=b'{"top_p": 0.5}')),
    "invented bias": ("sampling", lambda t: t.facts(turns(t, finish="stop")[0], biases=["top_k"])),
    "forced into no shape": (
        "sampling",
        lambda t: t.facts(turns(t, finish="stop")[0], biases=["constrained: verse"]),
    ),
    "sampled before it was opened": ("times", lambda t: t.facts(turns(t, finish="stop")[0], started=1.0)),
    "sampled after it was closed": ("times", lambda t: t.facts(turns(t, finish="stop")[-1], ended=9e9)),
    "all of it in another session": ("times", neighbour),
    "told to be a side call": (
        "told",
        lambda t: t.facts(t.of_kind("context")[1], signals=told(role="side", why="title")),
    ),
    "told to be a summary": (
        "told",
        lambda t: t.facts(t.of_kind("context")[1], signals=told(role="side", why="summary")),
    ),
    "a summary, told to be nothing": ("told", lambda t: t.facts(t.of_kind("context")[5], signals=told())),
    "a helper, told to be nothing": ("told", lambda t: t.facts(roots(t, "subagent")[0], signals=told())),
    "told of a parent": ("told", lambda t: t.facts(t.of_kind("context")[1], signals=told(thread="a", parent="b"))),
    "compaction, said to be a sub-agent's": ("cause", lambda t: t.facts(roots(t, "compaction")[0], cause="tools")),
    "compaction, said to be nothing": ("cause", lambda t: t.facts(roots(t, "compaction")[0], cause=None)),
    "other tools, said to be a system prompt": ("cause", lambda t: t.facts(roots(t, "tools")[0], cause="system")),
    "another system prompt, said to be a side call": ("cause", lambda t: t.facts(roots(t, "system")[0], cause="side")),
    "an edit, said to be a branch": ("cause", lambda t: t.facts(roots(t, "edited")[0], cause="branch")),
    "a retry, said to be the first": ("cause", lambda t: t.facts(turns(t, cause=None)[0], cause="retry")),
    "a lost answer, said to be asked anew": ("cause", lambda t: t.facts(turns(t, cause="retry")[1], cause="resample")),
    "a cause that is none": ("cause", lambda t: t.facts(roots(t, "edited")[0], cause="whim")),
    "tools that are not there": ("preamble", lambda t: t.facts(t.of_kind("context")[1], has_tools=False)),
}


@pytest.mark.parametrize("name", CASES)
def test_whatever_is_altered_is_noticed_by_its_name(name: str, copy: Recorded) -> None:
    data, session, other = copy
    check, alter = CASES[name]
    with tampering(data, session) as t:
        alter(t)
    found = look(data, other if "another session" in name else session)
    assert check in wrong(found), found.wrong
    assert "checksum" not in wrong(found), "it was mended"


def test_a_delivered_turn_that_is_marked_as_lost_is_noticed(copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        turn = t.of_kind("sampled")[0]
        t.sql("UPDATE nodes SET delivered=0 WHERE session=? AND id=?", t.key, turn)
    assert wrong(look(data, session)) >= {"checksum"}
    with tampering(data, session) as t:
        t.node(turn, delivered=0)  # with a checksum that fits
    assert [note.check for note in look(data, session).notes] == ["delivered"]  # the agent went on from it


def test_a_branch_that_is_taken_out_leaves_a_gap(copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        side = t.of_kind("context")[5]
        t.sql("DELETE FROM nodes WHERE session=? AND id IN (?,?)", t.key, side, side + 1)
    found = look(data, session)
    [note] = found.notes
    assert note.check == "tree" and f"{side} to {side + 1}" in note.what
    assert wrong(found) == {"events"}
    assert f"reports turn {side + 1}, which is not stored" in found.wrong[0].what


# ── how it ended ────────────────────────────────────────────────────────────────────────────────────────────────────

_OUTCOMES = {
    "no JSON": ("{", "not valid JSON"),
    "NaN": ('{"kind": "graded", "reward": NaN}', "NaN is not a JSON number"),
    "a list": ("[]", "not a JSON object"),
    "nothing": ("{}", "its kind is None, which is not one of graded, "),
    "an unknown kind": ('{"kind": "solved", "reward": 1.0}', "its kind is 'solved', which is not one of graded, "),
    "a reward beyond all": (
        '{"kind": "graded", "reward": 1e999}',
        "its reward is inf, which is neither a finite number",
    ),
    "a reward that no float is": ('{"kind": "graded", "reward": 1' + "0" * 400 + "}", "is neither a finite number"),
    "a reward in words": ('{"kind": "graded", "reward": "1.0"}', "its reward is '1.0', which is neither"),
    "a reward that is true": ('{"kind": "graded", "reward": true}', "its reward is True, which is neither"),
    "two rewards": ('{"kind": "graded", "reward": 1.0, "reward": 0.0}', "the same name twice"),
    "a reward for a fault": (
        '{"kind": "infrastructure fault", "reward": 0.0}',
        "its reward is 0.0, but a rollout that ended as",
    ),
    "a reward for an invalid task": (
        '{"kind": "invalid task", "reward": 1}',
        "its reward is 1, but a rollout that ended as",
    ),
    "an unknown field": ('{"kind": "graded", "rewards": 1.0}', "it has unknown fields: 'rewards'"),
    "half resolved": ('{"kind": "graded", "resolved": 0.5}', "its resolved field is 0.5, which is not true"),
    "no attempt": ('{"kind": "graded", "attempt": -1}', "its attempt is -1, which is not a valid number"),
    "a task that is a number": ('{"kind": "graded", "task": 7}', "its task is 7, not text"),
    "too much": ('{"kind": "graded", "data": "' + "x" * 300_000 + '"}', "a gateway records at most 262144"),
}


def outcome(t: Tampering, raw: object, recorded: object = 1e9) -> None:
    """It is stored, and an event tells that one was."""
    t.sql("INSERT OR REPLACE INTO outcomes VALUES (?,?,?)", t.key, recorded, raw)
    happened(t, "outcome", {"kind": "graded", "reward": 1.0, "resolved": None, "task": "", "group": "", "attempt": 1})


def happened(t: Tampering, kind: str, data: object) -> None:
    written = data if isinstance(data, bytes) else msgspec.json.encode(data)
    t.sql(
        "INSERT INTO events (time, session, kind, data) SELECT 1e9, id, ?, ? FROM sessions WHERE key=?",
        kind,
        written,
        t.key,
    )


@pytest.mark.parametrize("name", _OUTCOMES)
def test_an_outcome_that_nobody_can_have_recorded_is_noticed(name: str, copy: Recorded) -> None:
    data, session, other = copy
    raw, words = _OUTCOMES[name]
    with tampering(data, session) as t:
        outcome(t, raw.encode())
    found = look(data, session)
    # Where it can be read at all, events tell of another one.
    assert {"outcome"} <= wrong(found) <= {"outcome", "events"} and words in found.wrong[0].what, found.wrong
    assert found.counts.rows, "the trace is as good as before"
    assert look(data, other).ok


@pytest.mark.parametrize("raw", ["{", '{"kind": "graded", "reward": 1.0}', 7, b"\xff", b"\xfe\xff\x00{\x00}"])
def test_an_outcome_of_other_bytes_is_noticed(raw: object, copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        outcome(t, raw)
    assert wrong(look(data, session)) == {"outcome"}


def test_an_outcome_at_no_time_is_noticed(copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        outcome(t, b'{"kind": "graded", "reward": 1.0}', "yesterday")
    assert wrong(look(data, session)) == {"outcome"}


def test_an_outcome_of_an_open_session_is_noticed(copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        outcome(t, b'{"kind": "graded", "reward": 1.0}')
        assert look(data, session).ok
        t.sql("UPDATE sessions SET status='open', closed=NULL WHERE key=?", t.key)
    [finding, told] = look(data, session).wrong
    assert (finding.check, finding.what) == ("outcome", "the session is still open but has an outcome")
    assert told.check == "events" and "its status is 'open', but event" in told.what


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("status='zzz'", "its status is 'zzz', which is not one of open, sealed, cancelled"),
        ("status='open'", "it is open, but has a closing time"),
        ("closed=NULL", "it is sealed, but has no closing time"),
    ],
)
def test_a_status_that_cannot_be_is_noticed(change: str, words: str, copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        t.sql(f"UPDATE sessions SET {change} WHERE key=?", t.key)
    [finding, *others] = look(data, session).wrong
    assert (finding.check, finding.what) == ("status", words)
    assert [other.check for other in others] == (["events"] if "status" in change else [])


# ── what events contradict ──────────────────────────────────────────────────────────────────────────────────────────


def made_whole(t: Tampering) -> None:
    t.facts(turns(t, finish="abort")[0], finish="length", fault="")


def made_aborted(t: Tampering) -> None:
    t.facts(turns(t, finish="stop")[-1], finish="abort", fault="the agent left")


def cut_off(t: Tampering) -> None:
    """The last id of a turn that was aborted, with all that says so."""
    turn = t.row(turns(t, finish="abort")[0])
    ids = turn.ids[:-4]
    said = msgspec.json.decode(turn.messages)
    said["content"] = kit.renderer().tokenizer.decode(np.frombuffer(ids, np.int32).tolist())
    t.node(turn.id, ids=ids, logprobs=(turn.logprobs or b"")[:-4], messages=msgspec.json.encode(said))


def last_turns(t: Tampering) -> None:
    context = t.of_kind("context")[-1]
    t.sql("DELETE FROM nodes WHERE session=? AND id>=?", t.key, context)


def last_turn_and_its_event(t: Tampering) -> None:
    last_turns(t)
    no_event(t)


def all_turns(t: Tampering) -> None:
    for table in ("nodes", "preambles"):
        t.sql(f"DELETE FROM {table} WHERE session=?", t.key)


def added_turn(t: Tampering) -> None:
    last = t.row(t.of_kind("sampled")[-1])
    facts = msgspec.msgpack.decode(last.info)
    names = [field.name for field in msgspec.structs.fields(TurnFacts)]
    facts[names.index("cause")] = "resample"
    facts[names.index("started")] += 1e-3
    facts[names.index("ended")] += 1e-3
    t.add(msgspec.structs.replace(last, id=last.id + 1, info=msgspec.msgpack.encode(facts)))


def no_event(t: Tampering) -> None:
    t.sql("DELETE FROM events WHERE seq=(SELECT max(seq) FROM events WHERE kind='turn' AND session=?)", t.name)


def event_twice(t: Tampering) -> None:
    happened(t, "turn", t.told("turn")[-1])


def event_changed(t: Tampering, **facts: object) -> None:
    """Of the last turn."""
    data = {**msgspec.json.decode(t.told("turn")[-1]), **facts}
    query = "UPDATE events SET data=? WHERE seq=(SELECT max(seq) FROM events WHERE kind='turn' AND session=?)"
    t.sql(query, msgspec.json.encode(data), t.name)


def event_damaged(t: Tampering) -> None:
    t.sql("UPDATE events SET data=x'7b' WHERE kind='opened' AND session=?", t.name)


def another_reward(t: Tampering) -> None:
    outcome(t, b'{"kind": "graded", "reward": 1.0}')
    t.sql("""UPDATE outcomes SET outcome=CAST('{"kind": "graded", "reward": 0.5}' AS BLOB) WHERE session=?""", t.key)


def another_task(t: Tampering) -> None:
    outcome(t, b'{"kind": "graded", "reward": 1.0, "task": "a harder one"}')


def the_outcome_before(t: Tampering) -> None:
    """What was replaced is put back."""
    happened(t, "outcome", {"kind": "graded", "reward": 0.0, "resolved": None, "task": "", "group": "", "attempt": 1})
    outcome(t, b'{"kind": "graded", "reward": 0.0}')


def outcome_taken_out(t: Tampering) -> None:
    outcome(t, b'{"kind": "graded", "reward": 1.0}')
    t.sql("DELETE FROM outcomes WHERE session=?", t.key)


def outcome_of_nobody(t: Tampering) -> None:
    outcome(t, b'{"kind": "graded", "reward": 1.0}')
    t.sql("DELETE FROM events WHERE kind='outcome' AND session=?", t.name)


def another_model(t: Tampering) -> None:
    t.sql("""UPDATE sessions SET config=CAST(json_set(config, '$.model', 'large') AS BLOB) WHERE key=?""", t.key)


def cancelled(t: Tampering) -> None:
    t.sql("UPDATE sessions SET status='cancelled' WHERE key=?", t.key)


EVENTS: dict[str, Case] = {
    "an aborted turn made whole": ("its finish is stored as 'length', but event ", made_whole),
    "a whole turn made aborted": ("its finish is stored as 'abort', but event ", made_aborted),
    "the end of a turn cut off": ("its sampled_tokens is stored as 4, but event ", cut_off),
    "the last turn taken out": (", which is not stored: finish 'stop', ", last_turns),
    "the last turn taken out with its event": (
        " turns that were not aborted are stored, but event ",
        last_turn_and_its_event,
    ),
    "all turns taken out": (", which is not stored: finish 'abort', 5 sampled tokens", all_turns),
    "a turn put in": ("no event reports this turn", added_turn),
    "a turn without an event": ("no event reports this turn", no_event),
    "a turn with two events": ("reports it a second time", event_twice),
    "another prompt": ("its prompt_tokens is stored as ", lambda t: event_changed(t, prompt_tokens=1)),
    "another cause": ("its cause is stored as ", lambda t: event_changed(t, cause="whim")),
    "a turn that is no number": ("reports turn 'last', which is not stored", lambda t: event_changed(t, node="last")),
    "an event that cannot be read": ("(opened) cannot be read", event_damaged),
    "another reward": ("the outcome's reward is stored as 0.5, but event ", another_reward),
    "another task": ("the outcome's task is stored as 'a harder one', but event ", another_task),
    "an outcome that was replaced": ("the outcome's reward is stored as 0.0, but event ", the_outcome_before),
    "an outcome taken out": ("an event reports an outcome, but none is stored", outcome_taken_out),
    "an outcome that nobody recorded": ("but no event reports it", outcome_of_nobody),
    "another model": ("it was opened with model '', but its settings have 'large'", another_model),
    "sealed, said to be cancelled": ("its status is 'cancelled', but event ", cancelled),
}


@pytest.mark.parametrize("name", EVENTS)
def test_what_events_contradict_is_noticed_and_nothing_else_tells_of_it(name: str, copy: Recorded) -> None:
    data, session, other = copy
    words, alter = EVENTS[name]
    with tampering(data, session) as t:
        alter(t)
    found = look(data, session)
    assert wrong(found) == {"events"}, found.wrong
    assert any(words in finding.what for finding in found.wrong), found.wrong
    assert look(data, other).ok


def test_a_version_that_never_was_in_force_is_noticed(copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        turn = t.of_kind("sampled")[0]
        for versions, words in {
            (0, 999): "its policy version is 999, but the highest ever active here is 0",
            (-5, 0): "its policy version is -5, but the first is 0",
        }.items():
            t.facts(turn, version_start=versions[0], version_end=versions[1])
            [finding] = look(data, session).wrong
            assert (finding.check, finding.what, finding.node) == ("turn", words, turn)
        t.facts(turn, version_start=0, version_end=999)
        t.sql("INSERT INTO settings VALUES ('policy_version', '999')")
        assert look(data, session).ok


# What is not there cannot be compared, and that is said and no fault.
GONE: dict[str, Callable[[Tampering], None]] = {
    "pruned": lambda t: t.sql("DELETE FROM events WHERE seq <= (SELECT max(seq) - 4 FROM events)"),
    "all pruned": lambda t: t.sql("DELETE FROM events"),
    "perhaps pruned": lambda t: t.sql("INSERT INTO settings SELECT 'events_pruned', max(seq) FROM events"),
    "before there were any": lambda t: t.sql("PRAGMA user_version=2"),
}


@pytest.mark.parametrize("name", GONE)
def test_events_that_are_gone_are_no_fault(name: str, copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        GONE[name](t)
    found = look(data, session)
    assert found.ok and not any(finding.check == "events" for finding in found.findings)
    assert [missing.check for missing in found.unchecked] == ["events"]


def test_events_of_an_earlier_session_of_this_id_do_not_count(copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        later = t._db.execute("SELECT kind, data FROM events WHERE session=? ORDER BY seq", (t.name,)).fetchall()
        happened(t, "sealed", {"stop": "", "turns": 7})
        for kind, told in later:
            happened(t, kind, told)
    assert look(data, session).ok


# ── what only an engine can tell ────────────────────────────────────────────────────────────────────────────────────


def test_every_log_probability_that_is_altered_is_noticed_by_replay(copy: Recorded) -> None:
    data, session, _ = copy
    with tampering(data, session) as t:
        for turn in map(t.row, t.of_kind("sampled")):
            scores = np.frombuffer(turn.logprobs or b"", np.float32).copy()
            at = len(scores) // 2
            scores[at] -= 0.125
            t.node(turn.id, logprobs=scores.tobytes())
            assert look(data, session).ok, "no other check can tell"
            [finding] = look(data, session, replay=True).wrong
            assert (finding.check, finding.node) == ("logprobs", turn.id)
            assert f"recorded as {scores[at]:.4f}" in finding.what
            t.node(turn.id, logprobs=turn.logprobs)
    assert look(data, session, replay=True).ok


def test_a_turn_below_another_one_is_noticed_by_replay(copy: Recorded) -> None:
    """Messages fit anywhere; what the model thought of its tokens does not."""
    data, session, _ = copy
    with tampering(data, session) as t:
        question = t.row(t.of_kind("context")[3])  # the user says: go on
        t.node(question.id, parent=turns(t, cause="retry")[0])
    found = look(data, session, replay=True)
    assert "logprobs" in wrong(found)


def test_turns_that_changed_places_whole_are_noticed_by_replay(copy: Recorded) -> None:
    """Where clocks cannot tell them apart: words, ids and facts all fit together still."""
    data, session, _ = copy
    with tampering(data, session) as t:
        swapped_contents(t)
    found = look(data, session, replay=True)
    # On a slow machine the turns lie so far apart that their clocks tell on them, too.
    # Events tell how long each was: that is seen where the two differ in it.
    assert {"logprobs"} <= wrong(found) <= {"logprobs", "times", "events"}
    assert "times" in {note.check for note in found.notes} | wrong(found), "the order in which they ended is odd"


def test_any_id_anywhere_is_noticed(copy: Recorded) -> None:
    """Of every node the first, the middle and the last, one at a time."""
    data, session, _ = copy
    with tampering(data, session) as t:
        for row in t.rows():
            for at in {0, len(row.ids) // 8, len(row.ids) // 4 - 1}:
                another_id(t, row.id, at)
                assert not look(data, session, replay=True).ok, f"id {at} of node {row.id}"
                t.node(row.id, ids=row.ids)


# ── the rows themselves ─────────────────────────────────────────────────────────────────────────────────────────────


def bent(data: Path, bend: Callable[[list[Sample]], Sequence[Sample]]) -> Callable[[str], Verdict]:
    """A verdict on rows that a faulty exporter made of a faultless trace."""

    def judge(session: str) -> Verdict:
        with open_row_source(data) as real:
            return look(data, session, rows=lambda s, everything: bend(list(real(s, everything))))  # type: ignore[arg-type]

    return judge


def changed(row: Sample, **fields: Any) -> Sample:
    return msgspec.structs.replace(row, **fields)


def masked(row: Sample, at: int) -> Sample:
    mask = row.mask.copy()
    mask[at] = not mask[at]
    return changed(row, mask=mask)


def zero_filled(row: Sample) -> Sample:
    return changed(row, logprobs=np.nan_to_num(row.logprobs))


def span(row: Sample, at: int, **fields: Any) -> Sample:
    spans = list(row.spans)
    spans[at] = msgspec.structs.replace(spans[at], **fields)
    return changed(row, spans=tuple(spans))


def trained_twice(rows: list[Sample]) -> list[Sample]:
    """A shared turn is trained in every row that it is in."""
    out = []
    for row in rows:
        mask, spans = row.mask.copy(), []
        for s in row.spans:
            again = s.reason == "trained in another row"
            mask[s.start : s.end] |= again
            spans.append(msgspec.structs.replace(s, trained=True, reason="") if again else s)
        out.append(changed(row, mask=mask, spans=tuple(spans)))
    return out


def first(change: Callable[[Sample], Sample]) -> Callable[[list[Sample]], list[Sample]]:
    return lambda rows: [change(rows[0]), *rows[1:]]


BENDS: dict[str, tuple[str, Callable[[list[Sample]], list[Sample]]]] = {
    "a context token is trained": ("masks", first(lambda r: masked(r, 0))),
    "a sampled token is not trained": ("masks", first(lambda r: masked(r, r.spans[0].start))),
    "zeros for missing log-probabilities": ("masks", first(zero_filled)),
    "another log-probability": ("masks", first(lambda r: changed(r, logprobs=r.logprobs - np.float32(0.5)))),
    "another id": ("rows", first(lambda r: changed(r, ids=np.concatenate([r.ids[:5], r.ids[5:6] + 1, r.ids[6:]])))),
    "an id too few": ("rows", first(lambda r: changed(r, ids=r.ids[:-1], mask=r.mask[:-1], logprobs=r.logprobs[:-1]))),
    "a mask too short": ("rows", first(lambda r: changed(r, mask=r.mask[:-1]))),
    "a turn at another place": ("rows", first(lambda r: span(r, 0, start=r.spans[0].start + 1))),
    "another policy version": ("rows", first(lambda r: span(r, 0, version_end=7))),
    "a row is missing": ("rows", lambda rows: rows[1:]),
    "a row is there twice": ("rows", lambda rows: [*rows, rows[0]]),
    "a row of another branch": ("rows", first(lambda r: changed(r, branch=2))),
    "shared turns are trained in each row": ("once", trained_twice),
    "another role": ("roles", first(lambda r: span(r, 0, role="subagent"))),
    "no reason": ("reasons", lambda rows: [*rows[:-1], span(rows[-1], -1, reason="", trained=False)]),
    "a reason that is not so": (
        "reasons",
        lambda rows: [*rows[:-1], span(rows[-1], -1, reason="role side", trained=False)],
    ),
}


@pytest.mark.parametrize("name", BENDS)
def test_rows_that_are_not_what_was_recorded_are_noticed(name: str, recorded: Recorded) -> None:
    data, session, _ = recorded
    check, bend = BENDS[name]
    assert check in wrong(bent(data, bend)(session))


def test_a_gateway_that_refuses_a_good_trace_is_noticed(recorded: Recorded) -> None:
    from turngate.errors import StoreError

    def refuses(session: str, everything: bool) -> list[Sample]:
        raise StoreError("it is damaged")

    data, session, _ = recorded
    assert wrong(look(data, session, rows=refuses)) == {"rows", "masks", "once", "reasons", "roles"}


def test_what_the_gateway_itself_refuses_is_not_held_against_its_rows(copy: Recorded) -> None:
    data, session, _ = copy
    with closing(sqlite3.connect(data / "turngate.db", isolation_level=None)) as db:
        db.execute("UPDATE nodes SET checksum=1 WHERE id=2")
    found = look(data, session)
    assert wrong(found) == {"checksum"}
    assert {missing.part for missing in found.unchecked} == {"rows"}
