"""Tests for teacher scores: every score is at its own token, each turn is scored once, and nothing is filled in."""

from __future__ import annotations

import asyncio
import json
import math
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.kit import tokenizer
from tests.teacher_kit import TeacherServer, expected_scores, expected_top, serve_teacher
from tests.trainers.test_export import Recording, recording, shared_recording  # noqa: F401
from tests.trainers.test_export_tree import rebuild
from turngate.cli.export import export_rollouts
from turngate.cli.options import ExportOptions
from turngate.client.feed import DeliveredRollout, Delivery, Feed, FeedConfig, Row
from turngate.client.gateway import GatewayClient
from turngate.engines.scoring import Span, TokenScores, VLLMScoring
from turngate.errors import ConfigError, EngineError, EngineUnavailable
from turngate.store.pruning import prune
from turngate.store.score_cache import CACHE_FILE, digest_turns
from turngate.store.store import Store
from turngate.trace.sample import RowSpan
from turngate.trainers.export import ExportResult
from turngate.trainers.export.side_data import decode_columns
from turngate.trainers.teacher import FeedTeacher, TeacherConfig
from turngate.trainers.teacher import scoring as scoring_module
from turngate.trainers.teacher.scoring import Teacher, TeacherUnavailable
from turngate.trainers.teacher.vocabulary import VocabularyMismatch
from turngate.types import Ids
from turngate.verify import SessionReader, VerifyFinding, VerifyOptions, teacher_scores, verify


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[TeacherServer]:
    monkeypatch.setattr(scoring_module, "_RETRIES_S", ())
    with serve_teacher() as found:
        yield found


def config(server: TeacherServer, **fields: Any) -> TeacherConfig:
    return TeacherConfig(**{"engine": "vllm", "url": server.url, "model": "teacher", **fields})


def check_row(row: Any, top_k: int = 0) -> None:
    """Check that a record has the teacher's score of each sampled token, and no others."""
    assert row["teacher"]["unscored"] == ""
    side = decode_columns(row["side"])
    assert set(side) == {"teacher_logprobs", *(["teacher_top_ids", "teacher_top_logprobs"] if top_k else [])}
    places = [place for span in row["spans"] for place in range(span["start"], span["end"])]
    column = side["teacher_logprobs"]
    assert [place for start, end in column.spans for place in range(start, end)] == places
    scores = expected_scores(row["ids"])
    assert column.values.tolist() == [np.float32(scores[place]) for place in places]
    if top_k:
        tops = [expected_top(row["ids"][place], scores[place], top_k) for place in places]
        assert side["teacher_top_ids"].values.tolist() == [[token for token, _ in top] for top in tops]
        assert np.array_equal(
            side["teacher_top_logprobs"].values, np.array([[score for _, score in top] for top in tops], np.float32)
        )


def check_summary(done: ExportResult, **expected: int) -> None:
    assert done.teacher is not None
    assert {name: getattr(done.teacher, name) for name in expected} == expected


# ── exports ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.sample(2)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("top_k", [0, 3])
def test_scores_are_those_of_the_same_ids(recording: Recording, server: TeacherServer, engine: str, top_k: int) -> None:  # noqa: F811
    rows, done = recording.export("rows", unfinished=True, teacher=config(server, engine=engine, top_k=top_k))
    for row in rows:
        check_row(row, top_k)
    sent = [body["prompt"] if engine == "vllm" else body["input_ids"] for body in server.scored]
    assert all(any(row["ids"][: len(ids)] == ids for row in rows) for ids in sent), "only the ids of rows are sent"
    check_summary(done, scored_rows=len(rows), calls=len(sent))


def test_shared_turn_is_scored_once(recording: Recording, server: TeacherServer) -> None:  # noqa: F811
    rows, done = recording.export("rows", sessions=(recording.ids["forked"],), teacher=config(server))
    assert len(rows) == 3 and len(server.scored) == 3
    turns = {digest for row in rows for digest in digest_turns(np.array(row["ids"], np.int32), spans_of(row))}
    assert len(turns) < sum(len(row["spans"]) for row in rows), "rows share a turn"
    check_summary(done, turns=len(turns), cached=0)
    for row in rows:
        check_row(row)


def spans_of(row: Any) -> list[tuple[int, int]]:
    return [(span["start"], span["end"]) for span in row["spans"]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_tree_has_the_same_scores(recording: Recording, server: TeacherServer, suffix: str) -> None:  # noqa: F811
    teacher = config(server, top_k=2)
    flat, _ = recording.export("rows", teacher=teacher)
    trees, _ = recording.export("tree", suffix, teacher=teacher)
    if suffix == ".parquet":
        trees = [{**tree, "outcome": tree["outcome"] and json.loads(tree["outcome"])} for tree in trees]
    assert rebuild(trees) == flat
    forked = next(tree for tree in trees if tree["session"] == recording.ids["forked"])
    rows = [row for row in flat if row["session"] == recording.ids["forked"]]
    assert len(forked["ids"]) < sum(len(row["ids"]) for row in rows), "scores do not prevent sharing"


def test_second_export_makes_no_call(recording: Recording, server: TeacherServer) -> None:  # noqa: F811
    first, done = recording.export("rows", teacher=config(server))
    calls = len(server.scored)
    again, second = recording.export("rows", teacher=config(server))
    assert again == first and len(server.scored) == calls
    assert done.teacher is not None
    check_summary(second, calls=0, turns=0, cached=done.teacher.turns + done.teacher.cached)


@pytest.mark.sample(1)
@pytest.mark.parametrize("other", [{"version": "2"}, {"top_k": 2}])
def test_other_version_or_top_k_is_scored_anew(
    recording: Recording,  # noqa: F811
    server: TeacherServer,
    other: dict[str, Any],
) -> None:
    recording.export("rows", teacher=config(server, version="1"))
    calls = len(server.scored)
    rows, _ = recording.export("rows", teacher=config(server, **{"version": "1", **other}))
    assert len(server.scored) == 2 * calls
    assert rows[0]["teacher"]["version"] == other.get("version", "1")


def test_damaged_cache_entry_is_scored_again(recording: Recording, server: TeacherServer) -> None:  # noqa: F811
    first, _ = recording.export("rows", teacher=config(server))
    with sqlite3.connect(recording.data / CACHE_FILE) as db:
        db.execute("UPDATE scores SET logprobs=zeroblob(length(logprobs)) WHERE session=?", (recording.ids["bad"],))
    db.close()
    calls = len(server.scored)
    again, _ = recording.export("rows", teacher=config(server))
    assert again == first and len(server.scored) == calls + 1


def test_dead_teacher_keeps_scores_and_rerun_continues(recording: Recording, server: TeacherServer) -> None:  # noqa: F811
    server.fail_after = 2
    with pytest.raises(TeacherUnavailable, match=r"the engine is dead; turns scored and cached so far: \d; try again"):
        recording.export("rows", teacher=config(server, concurrency=1))
    assert not (recording.out / "out.jsonl").exists(), "no file without scores"
    server.fail_after, before = None, len(server.scored)
    rows, done = recording.export("rows", teacher=config(server))
    assert done.teacher is not None and done.teacher.cached > 0
    assert len(server.scored) - before == done.teacher.calls < len(rows)
    for row in rows:
        check_row(row)


def drop_last(scores: list[Any]) -> None:
    scores.pop()


def change_score(value: float | None) -> Callable[[list[Any]], None]:
    def change(scores: list[Any]) -> None:
        for entry in scores[1:]:
            for candidate in entry.values():
                candidate["logprob"] = value

    return change


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop_last, r"vllm returned the wrong number of scores: \d+ instead of \d+"),
        (change_score(math.nan), "cannot be read"),
        (change_score(None), "cannot be read"),
        (change_score(1e300), "not finite"),
        (change_score(-9999.0), "missing"),  # vLLM's mark
        (change_score(0.5), "greater than 0"),
        (lambda scores: scores[-1].clear(), r"no score for the token at position \d+ \(id \d+\)"),
    ],
)
def test_invalid_reply_leaves_row_unscored(
    recording: Recording,  # noqa: F811
    server: TeacherServer,
    change: Callable[[list[Any]], None],
    reason: str,
) -> None:
    bad = recording.export("rows", sessions=(recording.ids["bad"],))[0][0]["ids"]
    server.change = lambda scores: change(scores) if len(scores) == len(bad) else None
    rows, done = recording.export("rows", teacher=config(server))
    for row in rows:
        if row["session"] == recording.ids["bad"]:
            assert row["side"] == {}, "nothing is filled in"
            assert re.search(reason, row["teacher"]["unscored"])
        else:
            check_row(row)
    assert any(text.startswith("the teacher scores of a row: ") for text in done.left_out)
    server.change = lambda scores: None
    rows, _ = recording.export("rows", teacher=config(server))
    for row in rows:
        check_row(row)  # a rejected row is not cached


def test_teacher_that_scores_nothing_fails_the_export(recording: Recording, server: TeacherServer) -> None:  # noqa: F811
    server.change = drop_last
    with pytest.raises(EngineError, match=r"scored no rows \(unscored: \d\); the most frequent reason: vllm returned"):
        recording.export("rows", teacher=config(server))
    assert not (recording.out / "out.jsonl").exists()


# ── vocabularies ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_other_vocabulary_is_refused_before_the_first_call(recording: Recording, server: TeacherServer) -> None:  # noqa: F811
    server.shift = 1
    with pytest.raises(
        VocabularyMismatch, match=r"id \d+ is .* in the tokenizer of the rollouts \(.*\), but .* in teacher;"
    ):
        recording.export("rows", teacher=config(server))
    assert server.scored == []


def test_server_without_decoding_needs_a_tokenizer(recording: Recording, server: TeacherServer) -> None:  # noqa: F811
    server.decodes = False
    with pytest.raises(ConfigError, match="set teacher_tokenizer to the teacher's tokenizer folder"):
        recording.export("rows", teacher=config(server))
    assert server.scored == []
    rows, _ = recording.export("rows", teacher=config(server, tokenizer=str(tokenizer().folder)))
    check_row(rows[0])


def write_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Write a copy of the test tokenizer with a changed tokenizer.json."""
    spec = json.loads((tokenizer().folder / "tokenizer.json").read_text())
    change(spec)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


def swap_two_tokens(spec: dict[str, Any]) -> None:
    vocab = spec["model"]["vocab"]
    one, two = sorted(vocab, key=vocab.get)[300:302]
    vocab[one], vocab[two] = vocab[two], vocab[one]


@pytest.mark.full
def test_tokenizers_are_compared_as_a_whole(recording: Recording, server: TeacherServer, tmp_path: Path) -> None:  # noqa: F811
    same = write_tokenizer(tmp_path / "same", lambda spec: spec.update(truncation=None))
    other = write_tokenizer(tmp_path / "other", swap_two_tokens)
    rows, _ = recording.export("rows", teacher=config(server, tokenizer=str(same)))
    check_row(rows[0])
    server.scored.clear()
    with pytest.raises(VocabularyMismatch, match=rf"id 300 is .* in {other}; choose a teacher with the same tokenizer"):
        recording.export("rows", teacher=config(server, tokenizer=str(other), version="other"))
    assert server.scored == []


def test_unknown_policy_tokenizer_is_an_error(recording: Recording, server: TeacherServer) -> None:  # noqa: F811
    with sqlite3.connect(recording.data / "turngate.db") as db:
        db.execute("DELETE FROM settings WHERE name LIKE 'tokenizer:%'")
    db.close()
    with pytest.raises(ConfigError, match="pass --tokenizer with the folder"):
        recording.export("rows", teacher=config(server))
    rows, _ = recording.export("rows", teacher=config(server), tokenizer=str(tokenizer().folder))
    check_row(rows[0])


# ── settings ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"engine": "openai"}, "teacher must be one of vllm, sglang, local"),
        ({"url": "ftp://x"}, r"teacher_url must be an http\(s\) URL"),
        ({"url": "http://user:secret@host"}, "TURNGATE_TEACHER_KEY"),
        ({"top_k": -1}, "teacher_top_k must be between 0 and"),
        ({"concurrency": 0}, "teacher_concurrency must be between 1 and"),
        ({"engine": "local", "url": "", "model": "/nowhere"}, "teacher_model must be a folder with a config.json"),
        ({"engine": "local"}, "teacher_url does not apply"),
    ],
)
def test_invalid_settings(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TeacherConfig(**{"engine": "vllm", "url": "http://127.0.0.1:1", **fields})


def test_formats_without_scores_reject_a_teacher(recording: Recording, server: TeacherServer) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="--teacher does not apply to format verl; leave it out"):
        recording.export("verl", teacher=config(server))
    with pytest.raises(ConfigError, match="--tokenizer applies only with a teacher"):
        recording.export("rows", tokenizer="x")
    with pytest.raises(ConfigError, match="--side must not include teacher_logprobs, because --teacher adds"):
        recording.export("rows", teacher=config(server), side=("teacher_logprobs",))


def test_key_comes_from_the_environment(
    recording: Recording,  # noqa: F811
    server: TeacherServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TURNGATE_TEACHER_KEY", "teacher-key-0123456789")
    recording.export("rows", teacher=config(server))
    assert server.keys == {"Bearer teacher-key-0123456789"}


def test_key_is_not_sent_to_another_server(server: TeacherServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_TEACHER_KEY", "teacher-key-0123456789")
    with serve_teacher() as other:
        server.redirect_to = other.url
        with pytest.raises(EngineError, match=r"answered with a redirect \(307\), which is not followed"):
            FeedTeacher(config(server), tokenizer().folder)
    assert server.keys == {"Bearer teacher-key-0123456789"} and not other.keys


def test_invalid_key_is_not_repeated(server: TeacherServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_TEACHER_KEY", "teacher-key\n0123456789")
    with pytest.raises(ConfigError, match="TURNGATE_TEACHER_KEY must be printable") as error:
        FeedTeacher(config(server), tokenizer().folder)
    assert "teacher-key" not in str(error.value) and not server.keys


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{",
            r"response: IncompleteRead\(1 bytes read, 98 more expected\)",
        ),
        (b"HTTP/1.1 503 Busy\r\ntransfer-encoding: chunked\r\n\r\n9\r\n{", "response: IncompleteRead"),
        (b"nonsense\x1b\r\n\r\n", r"response: BadStatusLine\('nonsense\\x1b"),
        (b"", "the request to vllm at http://127.0.0.1.* failed: .*closed connection"),
    ],
    ids=["incomplete body", "incomplete error", "invalid status line", "no response"],
)
def test_broken_response_is_an_engine_error(server: TeacherServer, raw: bytes, problem: str) -> None:
    engine = VLLMScoring("vllm", server.url, "teacher")
    server.raw = raw
    with pytest.raises(EngineUnavailable, match=problem):
        engine.find_model()
    with pytest.raises(EngineUnavailable, match=problem):
        engine.score(np.array([1, 2, 3], np.int32), [(1, 3)])


@pytest.mark.parametrize("body", [b"{", b'{"x": ' + b"[" * 5000])
def test_undecodable_response_is_an_engine_error(server: TeacherServer, body: bytes) -> None:
    server.raw = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    with pytest.raises(EngineError, match="vllm sent a reply that cannot be read"):
        VLLMScoring("vllm", server.url, "teacher").find_model()


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "http://[::1"])
def test_invalid_url_is_an_engine_error(url: str) -> None:
    with pytest.raises(EngineUnavailable, match=r"the request to vllm at http://.* failed"):
        VLLMScoring("vllm", url, "teacher").find_model()


def test_connection_lost_during_a_response_is_tried_again(
    recording: Recording,  # noqa: F811
    server: TeacherServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scoring_module, "_RETRIES_S", (0, 0))
    lost = iter([b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", None])
    answer = server.answer

    def lose_first_score(path: str, body: Any) -> tuple[int, Any]:
        server.raw = next(lost, None) if path == "/v1/completions" else None
        return answer(path, body)

    monkeypatch.setattr(server, "answer", lose_first_score)
    rows, _ = recording.export("rows", teacher=config(server, concurrency=1))
    for row in rows:
        check_row(row)


def test_unknown_model_is_an_error(recording: Recording, server: TeacherServer) -> None:  # noqa: F811
    with pytest.raises(EngineError, match="does not serve the model 'other'; it serves: teacher"):
        recording.export("rows", teacher=config(server, model="other"))
    rows, _ = recording.export("rows", teacher=config(server, model=""))
    assert rows[0]["teacher"]["model"] == "teacher"


def test_calls_are_bounded(recording: Recording, server: TeacherServer) -> None:  # noqa: F811
    recording.export("rows", unfinished=True, teacher=config(server, concurrency=2))
    assert server.most_running <= 2


def test_command_prints_what_the_teacher_did(recording: Recording, server: TeacherServer, capsys: Any) -> None:  # noqa: F811
    options: dict[str, Any] = {"format": "rows", "out": str(recording.out / "out.jsonl"), "data": str(recording.data)}
    export_rollouts(ExportOptions(**options, teacher="vllm", teacher_url=server.url, teacher_version="7"))
    printed = capsys.readouterr().out
    assert re.search(
        r"  teacher   teacher version 7: \d rows with scores, 0 without; \d turns scored in \d calls, ", printed
    )
    with pytest.raises(ConfigError, match="teacher_version applies only with a teacher; also pass --teacher"):
        export_rollouts(ExportOptions(**options, teacher_version="7"))
    with pytest.raises(ConfigError, match="teacher_concurrency applies only with a teacher; also pass --teacher"):
        export_rollouts(ExportOptions(**options, teacher_concurrency=2))


# ── removal ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def cached_sessions(data: Path) -> set[str]:
    with sqlite3.connect(data / CACHE_FILE) as db:
        found = {name for (name,) in db.execute("SELECT DISTINCT session FROM scores")}
    db.close()
    return found


async def test_deleting_a_session_removes_its_scores(recording: Recording, server: TeacherServer) -> None:  # noqa: F811
    recording.export("rows", teacher=config(server))
    assert recording.ids["bad"] in cached_sessions(recording.data)
    async with recording.serving() as g:
        await g.app.sessions.delete(recording.ids["bad"])
    assert recording.ids["bad"] not in cached_sessions(recording.data)
    assert recording.ids["good"] in cached_sessions(recording.data)


def test_pruning_removes_scores(recording: Recording, server: TeacherServer) -> None:  # noqa: F811
    recording.export("rows", teacher=config(server))
    assert cached_sessions(recording.data)
    store = Store(recording.data)
    for session in ("open", "cancelled"):  # the group of an open session is kept
        found = store.find(recording.ids[session])
        assert found is not None
        store.delete_session(found.key)
    assert prune(store, before=2e9, dry_run=True).removed == 5 and cached_sessions(recording.data)
    assert prune(store, before=2e9).removed == 5
    store.close()
    assert cached_sessions(recording.data) == set()


# ── feeds ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("cached", [False, True])
async def test_feed_delivers_scores(recording: Recording, server: TeacherServer, cached: bool) -> None:  # noqa: F811
    cache = recording.data / CACHE_FILE if cached else None
    async with recording.serving() as g, GatewayClient(g.root, g.app.admin_key) as client:
        feed_config = FeedConfig(n=3, from_start=True)
        with FeedTeacher(config(server, top_k=1), tokenizer().folder, cache) as teacher:
            server.fail_after = 0
            async with await Feed.open(client, "f", feed_config, teacher=teacher) as feed:
                with pytest.raises(TeacherUnavailable):
                    await feed.next(10)
                server.fail_after = None
                delivery = await feed.next(10)
        calls = len(server.scored)
        with FeedTeacher(config(server, top_k=1), tokenizer().folder, cache) as teacher:
            async with await Feed.open(client, "f", feed_config, after=0, teacher=teacher) as feed:
                again = await feed.next(10)
    assert delivery is not None and again is not None and delivery.number == again.number == 1
    assert (len(server.scored) == calls) == cached
    assert len(delivery.rows()) >= 3
    for row, other in zip(delivery.rows(), again.rows(), strict=True):
        column = row.side["teacher_logprobs"]
        places = [place for start, end in column.spans for place in range(start, end)]
        assert set(np.flatnonzero(row.mask)) <= set(places)
        scores = expected_scores(row.ids.tolist())
        assert column.values.tolist() == [np.float32(scores[place]) for place in places]
        assert row.side["teacher_top_ids"].values.shape == (len(places), 1)
        assert np.array_equal(column.values, other.side["teacher_logprobs"].values)


def test_failure_of_an_earlier_attempt_does_not_end_the_next(server: TeacherServer) -> None:
    is_waiting, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    class Engine(VLLMScoring):
        def score(self, ids: Ids, spans: Sequence[Span], top_k: int = 0) -> list[TokenScores]:
            if may_end.is_set():
                return super().score(ids, spans, top_k)
            if not is_waiting.is_set():
                is_waiting.set()
                may_end.wait()
                has_ended.set()
            raise EngineUnavailable("the engine is dead")

    class ShortRow(msgspec.Struct):
        ids: Ids
        spans: tuple[RowSpan, ...]

    rows = [
        ShortRow(np.arange(n, n + 4, dtype=np.int32), (RowSpan(1, 2, 4, "main", True, "", 0, 0),)) for n in (10, 20)
    ]
    with Teacher(config(server, concurrency=2), engine=Engine("vllm", server.url, "teacher")) as teacher:
        for row in rows:
            teacher.submit("s", [row], tokenizer())
            is_waiting.wait()
        while teacher._failure is None:
            time.sleep(0.01)
        reset = threading.Thread(target=teacher.reset)
        reset.start()
        reset.join(0.2)  # it waits until the first call has ended
        may_end.set()
        has_ended.wait()
        reset.join()
        teacher.submit("s", rows, tokenizer())
        teacher.wait()
        assert all(not isinstance(teacher.columns(row), str) for row in rows)


async def test_cancelled_scoring_is_not_repeated(server: TeacherServer) -> None:
    """Otherwise, a trainer that waits for less time than scoring takes would never get a delivery."""
    may_end = threading.Event()

    def wait(scores: list[Any]) -> None:
        may_end.wait()

    server.change = wait
    delivery = make_delivery()
    with FeedTeacher(config(server), tokenizer().folder) as teacher:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(teacher.score(delivery), 0.02)
        may_end.set()
        [row] = (await teacher.score(delivery)).rows()
        assert "teacher_logprobs" in row.side and len(server.scored) == 1
        await teacher.score(delivery)
        assert len(server.scored) == 2  # a scoring that was returned is not used again


def make_delivery() -> Delivery:
    ids = np.arange(10, 14, dtype=np.int32)
    row = Row(
        ids=ids,
        mask=ids > 11,
        logprobs=np.array([np.nan, np.nan, -1, -1], np.float32),
        spans=(RowSpan(1, 2, 4, "main", True, "", 0, 0),),
        branch=1,
        weight=1.0,
        advantage=1.0,
    )
    rollout = DeliveredRollout(
        session="s",
        task="t",
        attempt=1,
        kind="graded",
        reward=1.0,
        resolved=None,
        advantage=1.0,
        excluded="",
        truncated=False,
        timed_out=False,
        rows=(row,),
        turns=1,
        sampled_tokens=2,
        data=None,
    )
    return Delivery(number=1, group="g", task="t", version=0, rollouts=(rollout,))


def test_unexpected_error_leaves_no_call_behind(server: TeacherServer) -> None:
    """If a call fails with an unexpected error, the next attempt still waits until the other calls have ended."""
    is_waiting, may_end = threading.Event(), threading.Event()

    class Engine(VLLMScoring):
        def score(self, ids: Ids, spans: Sequence[Span], top_k: int = 0) -> list[TokenScores]:
            if int(ids[0]) == 20:
                is_waiting.set()
                may_end.wait()
            raise RuntimeError("broken")

    [row] = make_delivery().rows()
    other = msgspec.structs.replace(row, ids=row.ids + 10)
    with Teacher(config(server, concurrency=2), engine=Engine("vllm", server.url, "teacher")) as teacher:
        teacher.submit("s", [row], tokenizer())
        teacher.submit("s", [other], tokenizer())
        is_waiting.wait()
        with pytest.raises(RuntimeError, match="broken"):
            teacher.wait()
        reset = threading.Thread(target=teacher.reset)
        reset.start()
        reset.join(0.2)
        is_reset = not reset.is_alive()
        may_end.set()
        reset.join()
        assert not is_reset and not teacher._running


async def test_feed_marks_unscored_rows(recording: Recording, server: TeacherServer) -> None:  # noqa: F811
    server.change = drop_last
    async with recording.serving() as g, GatewayClient(g.root, g.app.admin_key) as client:
        with FeedTeacher(config(server), tokenizer().folder) as teacher:
            async with await Feed.open(client, "f", FeedConfig(n=3, from_start=True), teacher=teacher) as feed:
                delivery = await feed.next(10)
    assert delivery is not None and delivery.rows()
    for row in delivery.rows():
        assert "teacher_logprobs" not in row.side and row.unscored.startswith("vllm returned")


# ── verification ────────────────────────────────────────────────────────────────────────────────────────────────────


def verify_session(data: Path, session: str) -> list[VerifyFinding]:
    with SessionReader(data) as reader:
        return [
            finding
            for finding in verify(reader, session, VerifyOptions()).findings
            if finding.check == "teacher scores"
        ]


@pytest.mark.parametrize("top_k", [0, 2])
def test_verify_checks_cached_scores(recording: Recording, server: TeacherServer, top_k: int) -> None:  # noqa: F811
    assert verify_session(recording.data, recording.ids["forked"]) == [], "nothing is cached yet"
    recording.export("rows", teacher=config(server, top_k=top_k))
    [finding] = verify_session(recording.data, recording.ids["forked"])
    assert finding.ok


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("column", "change", "problem"),
    [
        ("logprobs", lambda data: np.full(len(data) // 4, 0.5, "<f4").tobytes(), "greater than 0"),
        ("logprobs", lambda data: np.full(len(data) // 4, np.nan, "<f4").tobytes(), "not finite"),
        ("logprobs", lambda data: np.full(len(data) // 4, -9999, "<f4").tobytes(), "missing"),
        ("top_logprobs", lambda data: np.full(len(data) // 4, np.inf, "<f4").tobytes(), "not finite"),
        ("logprobs", lambda data: data[:-4], "wrong length"),
        ("logprobs", lambda data: b"\x01" + data[1:], "checksum"),
        ("logprobs", lambda data: np.zeros(len(data) // 4, "<f4").tobytes(), "all less likely"),
        ("top_ids", lambda data: np.full(len(data) // 4, -1, "<i4").tobytes(), "negative id"),
        ("turn", lambda data: b"x" * 16, "belong to no turn"),
    ],
)
def test_verify_finds_changed_scores(
    recording: Recording,  # noqa: F811
    server: TeacherServer,
    column: str,
    change: Callable[[bytes], bytes],
    problem: str,
) -> None:
    recording.export("rows", teacher=config(server, top_k=2))
    with sqlite3.connect(recording.data / CACHE_FILE) as db:
        where = "WHERE session=?"
        [(data,)] = db.execute(f"SELECT {column} FROM scores {where}", (recording.ids["bad"],)).fetchall()
        db.execute(f"UPDATE scores SET {column}=? {where}", (change(data), recording.ids["bad"]))
    db.close()
    findings = verify_session(recording.data, recording.ids["bad"])
    assert any(problem in finding.what for finding in findings if not finding.ok), findings


@pytest.mark.sample(1)
@pytest.mark.parametrize("top_k", [None, "two", 2.5, -2])
def test_verify_reports_an_invalid_top_k(recording: Recording, server: TeacherServer, top_k: object) -> None:  # noqa: F811
    recording.export("rows", teacher=config(server, top_k=2))
    with closing(sqlite3.connect(recording.data / CACHE_FILE, isolation_level=None)) as db:
        db.execute("CREATE TABLE unconstrained AS SELECT * FROM scores")
        db.execute("DROP TABLE scores")
        db.execute("ALTER TABLE unconstrained RENAME TO scores")
        db.execute("UPDATE scores SET top_k=?", (top_k,))
    [_, finding] = verify_session(recording.data, recording.ids["bad"])
    problem = f"have top_k {top_k!r}, but it must be a whole number, 0 or greater"
    assert finding.what == f"its scores from 'teacher' {problem}"


def test_verify_reports_text_that_is_not_utf8(recording: Recording, server: TeacherServer) -> None:  # noqa: F811
    recording.export("rows", teacher=config(server))
    with closing(sqlite3.connect(recording.data / CACHE_FILE, isolation_level=None)) as db:
        db.execute("UPDATE scores SET model=CAST(x'ff' AS TEXT)")
    [finding] = verify_session(recording.data, recording.ids["bad"])
    assert finding.what == "its scores from '\\\\xff' do not match their checksum"


def test_verify_reports_a_damaged_cache(recording: Recording) -> None:  # noqa: F811
    (recording.data / CACHE_FILE).write_bytes(b"not a database" * 100)
    [finding] = verify_session(recording.data, recording.ids["bad"])
    assert not finding.ok
    assert finding.what == f"{recording.data / CACHE_FILE} is damaged (file is not a database)"


def test_verify_reports_a_damaged_cache_schema(recording: Recording) -> None:  # noqa: F811
    """SQLite's error message contains the damaged name of the table."""
    file = recording.data / CACHE_FILE
    with closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE scores (session TEXT)")
    schema = file.read_bytes().replace(b"tablescoresscores", b"table\xff\xff\xff\xff\xff\xffscores")
    file.write_bytes(schema.replace(b"CREATE TABLE scores", b"\xff" * 19))
    [finding] = verify_session(recording.data, recording.ids["bad"])
    assert not finding.ok and finding.what == f"{file} is damaged (its schema cannot be read)"


def test_verify_does_not_check_a_locked_cache(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(teacher_scores, "_BUSY_S", 0.0)
    with closing(sqlite3.connect(recording.data / CACHE_FILE, isolation_level=None)) as db:
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("CREATE TABLE scores (session TEXT)")
        with SessionReader(recording.data) as reader:
            verdict = verify(reader, recording.ids["bad"], VerifyOptions())
    assert verdict.ok
    [skipped] = [each for each in verdict.unchecked if each.check == "teacher scores"]
    assert skipped.why == f"{recording.data / CACHE_FILE} cannot be read (database is locked)"


def test_verify_ignores_a_cache_without_scores(recording: Recording) -> None:  # noqa: F811
    """An export that was killed may leave an empty file."""
    (recording.data / CACHE_FILE).touch()
    with SessionReader(recording.data) as reader:
        assert verify(reader, recording.ids["bad"], VerifyOptions()).ok
