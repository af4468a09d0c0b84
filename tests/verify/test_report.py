"""`turngate verify`: its report, its JSON, its engines, and spot checks in the background."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import kit
from tests.exact.agent import World
from tests.exact.test_rows import SYSTEM, talk, user
from tests.speed import scaled
from tests.verify.kit import tampering, verdict, wrong
from tests.verify.sessions import record_sessions
from turngate.cli import verify as command
from turngate.cli.options import VerifyCommandOptions
from turngate.cli.verify import verify_sessions
from turngate.common.terminal import console
from turngate.engines.scripted import derive_logprobs
from turngate.errors import ConfigError, EngineError, EngineUnavailable, NotFound
from turngate.store.store import Store
from turngate.trace.session import SessionConfig
from turngate.verify import (
    Renderers,
    SessionReader,
    TemplateDifference,
    Verdict,
    VerifyOptions,
    VLLMScorer,
    verify,
)
from turngate.verify.findings import CheckResults, Counts
from turngate.views.background_verifier import SpotChecker, summarize_verdict
from turngate.views.session import open_row_source

Recorded = tuple[Path, str, str]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    data = tmp_path / "data"
    return data, *asyncio.run(record_sessions(data, kit.renderer()))


@pytest.fixture(scope="module")
def recorded_once(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Recorded sessions to copy."""
    data = tmp_path_factory.mktemp("recorded")
    return data, *asyncio.run(record_sessions(data, kit.renderer()))


def run_verify(data: Path, **options: Any) -> bool:
    return verify_sessions(VerifyCommandOptions(data=str(data), **options))


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_report_shows_verdict_checks_and_forks(recorded: Recorded, capsys: Any) -> None:
    data, session, _ = recorded
    assert run_verify(data, session=session[:12], engine="scripted", tolerance=0.0)
    text = capsys.readouterr().out
    assert f"✓ exact  {session}" in text
    for words in (
        "structure   18 checks passed",
        "render      2 checks passed",
        "rows        5 checks passed",
        "rescored by scripted",
    ):
        assert words in text
    for cause in ("retry", "side call (summary)", "sub-agent (helper)", "tools changed", "compaction"):
        assert cause in text.replace("\n", " ") or cause.split()[0] in text
    assert "– transcript was not checked: no agent is recorded" in text
    start = text.index("  Forks")
    assert all(len(line) <= 80 for line in text[start : text.index("Total: ")].splitlines()), "wider than a terminal"
    fork = text[text.index("  node 5  retry") :].splitlines()
    assert fork[1].strip() == "diverges from node 4 at token 325 · sent 0 · shared 0 · wasted 5"
    assert fork[2].strip().startswith("was …") and "▸lost on the way" in fork[2]
    assert fork[3].strip().startswith("now …") and "▸<tool_call>" in fork[3]


def test_failed_check_names_node(recorded: Recorded, capsys: Any) -> None:
    data, session, _ = recorded
    with tampering(data, session) as t:
        t.sql("UPDATE nodes SET ids=zeroblob(8) WHERE session=? AND id=2", t.key)
    assert not run_verify(data, session=session)
    text = capsys.readouterr().out
    assert "✗ wrong" in text and "✗ checksum" in text and "(node 2)" in text
    assert not run_verify(data, every=True), "one session is wrong"
    assert "2 sessions, 1 wrong" in capsys.readouterr().out


def test_json_report(recorded: Recorded, capsys: Any) -> None:
    data, session, other = recorded
    assert run_verify(data, every=True, engine="scripted", tolerance=0.0, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and [one["session"] for one in found["sessions"]] == [other, session]
    first = found["sessions"][1]
    assert {"part", "check", "ok", "what", "where", "node"} == set(first["findings"][0])
    assert all(finding["ok"] for finding in first["findings"])
    assert first["replay"]["largest"] == 0 and first["counts"]["turns"] == 16
    assert [fork["cause"] for fork in first["forks"]].count("retry") == 2


def test_verify_while_gateway_serves(tmp_path: Path, capsys: Any) -> None:
    async def verify_twice() -> bool:
        async with kit.gateway([kit.say("Hello."), kit.say("Again.")], data=tmp_path) as g:
            session = await g.open()
            await g.ask(session.key, "Hi")
            first = await asyncio.to_thread(run_verify, tmp_path)
            await g.ask(session.key, "Hi there")
            return first and await asyncio.to_thread(run_verify, tmp_path)

    assert asyncio.run(verify_twice())
    assert "open, 2 turns" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"session": "nobody"}, "was not found"),
        ({"engine": "sglang"}, "engine must be vllm or scripted"),
        ({"engine": "vllm"}, "needs --engine-url and --model"),
        ({"engine_url": "http://127.0.0.1:1"}, "--engine-url applies only to scoring; to score, pass --engine vllm"),
        ({"engine": "vllm", "engine_url": "nonsense", "model": "m"}, "engine_url must be .* URL, not 'nonsense'"),
        (
            {"engine": "vllm", "engine_url": "http://h:port", "model": "m"},
            "engine_url must be .* URL, not 'http://h:port'",
        ),
        (
            {"engine": "vllm", "engine_url": "http://h", "model": "m", "engine_key_env": "TURNGATE_NOPE"},
            "engine_key_env names the environment variable TURNGATE_NOPE, which is not set",
        ),
        ({"engine": "scripted", "model": "m"}, "--model has no effect with --engine scripted; remove --model, or pass"),
        ({"policy_version": 7}, "--policy-version applies only to scoring"),
        ({"tolerance": 0.5}, "--tolerance applies only to scoring"),
        ({"tolerance": -1.0, "engine": "scripted"}, "tolerance must be finite and 0 or greater, not -1"),
        ({"tolerance": float("nan"), "engine": "scripted"}, "tolerance must be finite and 0 or greater, not nan"),
        ({"session": "abc", "every": True}, "pass a session id or --all"),
        ({"tokenizer": "/nope"}, "tokenizer: /nope is not a tokenizer folder"),
        ({"family": "bogus"}, "family must be one of template, .*qwen3.*, not 'bogus'"),
        ({"rollouts": "/nope"}, "rollouts must be an existing folder, not '/nope'"),
    ],
)
def test_invalid_options_are_rejected(recorded: Recorded, options: Any, words: str) -> None:
    with pytest.raises((ConfigError, NotFound), match=words):
        run_verify(recorded[0], **options)


@pytest.mark.parametrize("key", ["sk-planted\nkey", "sk-planted-ké"])
def test_invalid_engine_key_is_not_repeated(recorded: Recorded, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", key)
    options: Any = {"engine": "vllm", "engine_url": "http://127.0.0.1:9", "model": "m", "engine_key_env": "ENGINE_KEY"}
    with pytest.raises(ConfigError, match="ENGINE_KEY does not contain a valid API key") as error:
        run_verify(recorded[0], **options)
    assert "planted" not in error.value.message


def test_newline_at_the_end_of_an_engine_key_is_ignored(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"engine": "vllm", "engine_url": "http://127.0.0.1:9", "model": "m", "engine_key_env": "ENGINE_KEY"}
    for variable, value in (("ENGINE_KEY", "sk-planted\n"), ("ENGINE_KEY_FILE", str(tmp_path / "key"))):
        (tmp_path / "key").write_text("sk-planted\n")
        with monkeypatch.context() as patch, pytest.raises(EngineError, match="refused") as error:
            patch.setenv(variable, value)
            run_verify(recorded[0], **options)
        assert "planted" not in error.value.message


def test_missing_or_broken_store_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no recordings in .*; run this command in the folder where you ran"):
        run_verify(tmp_path)
    (tmp_path / "turngate.db").write_bytes(b"no database at all, but long enough to be taken for one" * 100)
    with pytest.raises(ConfigError, match="cannot be read"):
        run_verify(tmp_path)


def test_damaged_schema_is_reported(recorded: Recorded) -> None:
    """SQLite's error message contains the damaged name of the table."""
    file = recorded[0] / "turngate.db"
    schema = file.read_bytes().replace(b"tablenodesnodes", b"table\xff\xff\xff\xff\xffnodes")
    file.write_bytes(schema.replace(b"CREATE TABLE nodes", b"\xff" * 18))
    with pytest.raises(ConfigError, match=r"turngate\.db cannot be read \(its schema is damaged\)"):
        run_verify(recorded[0])


def test_damaged_list_of_sessions_is_reported(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        for n in range(100):
            store.add_session(f"session-{n}", f"{n}".encode(), SessionConfig(), float(n))
    file, page = tmp_path / "turngate.db", 4096
    intact = file.read_bytes()
    starts = [start for start in range(0, len(intact), page) if b"session-99" in intact[start : start + page]]
    errors = []
    for start in starts:  # of the table and its indexes
        file.write_bytes(intact[:start] + b"\xff" * page + intact[start + page :])
        try:
            assert not run_verify(tmp_path)
        except ConfigError as error:
            errors.append(error.message)
    assert errors == [f"data: {tmp_path} cannot be read (database disk image is malformed)"]


def test_missing_wal_file_is_hinted(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "turngate.db")) as db:
        db.execute("PRAGMA journal_mode=WAL")
    with pytest.raises(ConfigError, match=r"no such table: sessions\); .* turngate.db-wal"):
        run_verify(tmp_path)


# ── checks that could not run ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("every", [True, False])
def test_scoring_nothing_is_an_error(every: bool, recorded: Recorded, capsys: Any) -> None:
    options = {"every": every, "engine": "scripted", "policy_version": 7}
    with pytest.raises(ConfigError, match=r"^nothing was scored: no turn has policy version 7$"):
        run_verify(recorded[0], **options)
    text = capsys.readouterr().out
    assert "✓ sound (replay not checked)" in text and "exact" not in text
    assert not every or "– 2 sessions with replay not checked: no turn has policy version 7" in text
    with pytest.raises(ConfigError):
        run_verify(recorded[0], as_json=True, **options)
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and found["undone"] == ["nothing was scored: no turn has policy version 7"]


def test_reason_for_scoring_nothing_is_true_of_every_turn(recorded: Recorded) -> None:
    data, session, _ = recorded
    with tampering(data, session) as t:
        first = t.of_kind("sampled")[0]
        t.facts(first, version_start=7, version_end=7)
        t.node(first, logprobs=None)
    reasons = [skipped.why for skipped in verdict(data, session, version=7).unchecked if skipped.part == "replay"]
    assert reasons == ["no turn has policy version 7 and has a log-probability for each of its tokens"]


def test_wrong_tokenizer_is_an_error(recorded: Recorded, tmp_path: Path, capsys: Any) -> None:
    other = tmp_path / "other"
    shutil.copytree(kit.renderer().tokenizer.folder, other)
    known = json.loads((other / "tokenizer.json").read_text())
    known["added_tokens"][-1]["content"] = "<|another|>"
    (other / "tokenizer.json").write_text(json.dumps(known))
    with pytest.raises(
        ConfigError,
        match=r"^nothing was rendered: the tokenizer at .* is not the one that the session was recorded with",
    ):
        run_verify(recorded[0], every=True, tokenizer=str(other))
    assert "✓ sound (render not checked)" in capsys.readouterr().out


def test_failed_check_takes_precedence_over_unscored(recorded: Recorded, capsys: Any) -> None:
    data, session, _ = recorded
    with tampering(data, session) as t:
        t.sql("UPDATE nodes SET checksum=1 WHERE session=? AND id=2", t.key)
    assert not run_verify(data, every=True, engine="scripted", policy_version=7)
    assert "nothing was scored: no turn has policy version 7" in capsys.readouterr().out


def test_replay_is_summarized_over_sessions(recorded: Recorded, capsys: Any) -> None:
    assert run_verify(recorded[0], every=True, engine="scripted", tolerance=0.0)
    text = capsys.readouterr().out
    assert text.count("✓ exact") == 2 and "2 sessions, none wrong" in text
    assert "156 tokens in 18 turns rescored by scripted: largest difference 0, 0 beyond 0" in text
    assert "1 row, 6 tokens to train" in text


def test_lost_engine_does_not_hide_failures(recorded: Recorded, monkeypatch: Any, capsys: Any) -> None:
    data, session, other = recorded
    with tampering(data, other) as t:
        t.sql("UPDATE sessions SET status='zzz\x1b[2J' WHERE key=?", t.key)
    real = verify

    def verify_or_fail(folder: SessionReader, session_id: str, means: VerifyOptions) -> Verdict:
        if session_id == session:
            raise EngineUnavailable("nobody listens")
        return real(folder, session_id, means)

    monkeypatch.setattr(command, "verify", verify_or_fail)
    assert not run_verify(data, every=True, engine="scripted")
    text = capsys.readouterr().out
    assert "✗ status" in text and "zzz␛[2J, 2 turns" in text and text.endswith("nobody listens\n")
    assert not run_verify(data, every=True, engine="scripted", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and found["undone"] == ["nobody listens"] and len(found["sessions"]) == 1


# ── damaged cells ───────────────────────────────────────────────────────────────────────────────────────────────────

_CELLS = [
    ("nodes", column, value)
    for column in ("ids", "logprobs", "info", "messages", "kind")
    for value in ("cast({}||x'ff' as text)", "cast('abc' as text)", "7", "x'c1ff'")
]
_CELLS += [("nodes", column, "'abc'") for column in ("parent", "delivered", "checksum")]
_CELLS += [("sessions", "config", value) for value in ("x'ff'", "'['", "7")]
_CELLS += [("sessions", column, "x'ff'") for column in ("status", "stop", "opened", "id")]
_CELLS += [("sessions", "id", "cast(x'ff' as text)"), ("nodes", "id", "'abc'")]


@pytest.mark.sample(12)
@pytest.mark.parametrize(("table", "column", "value"), _CELLS)
def test_damaged_cell_fails_one_session(
    table: str, column: str, value: str, recorded_once: Recorded, tmp_path: Path, capsys: Any
) -> None:
    folder, session, other = recorded_once
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(folder / "turngate.db", data)
    with tampering(data, session) as t:
        where = "session=? AND id=4" if table == "nodes" else "key=?"
        t.sql(f"UPDATE {table} SET {column}={value.format(column)} WHERE {where}", t.key)
    assert not run_verify(data, every=True, engine="scripted", as_json=True)
    fine, damaged = json.loads(capsys.readouterr().out)["sessions"]
    assert fine["session"] == other and fine["ok"]
    found = [finding for finding in damaged["findings"] if not finding["ok"]]
    assert found and not any(
        "verification crashed" in finding["what"] for finding in found if finding["check"] == "readable"
    )
    if table == "nodes" and column != "id":
        assert 4 in {finding["node"] for finding in found}
    assert not run_verify(data, every=True)
    assert "2 sessions, 1 wrong" in capsys.readouterr().out


def test_crash_in_one_session_does_not_hide_others(recorded: Recorded, monkeypatch: Any, capsys: Any) -> None:
    data, session, _ = recorded
    real = verify

    def crash(folder: SessionReader, session_id: str, means: VerifyOptions) -> Verdict:
        if session_id == session:
            raise RuntimeError("a fault of ours")
        return real(folder, session_id, means)

    monkeypatch.setattr(command, "verify", crash)
    assert not run_verify(data, every=True)
    text = capsys.readouterr().out
    assert "readable  verification crashed: RuntimeError: a fault of ours" in text
    assert "2 sessions, 1 wrong" in text


# ── an engine ───────────────────────────────────────────────────────────────────────────────────────────────────────


class ScoringHandler(BaseHTTPRequestHandler):
    """vLLM's `/v1/completions`, for prompt log-probabilities, with scores derived from the ids."""

    offset = 0.0
    requests: list[Any] = []
    failing = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.requests.append((self.path, self.headers.get("authorization"), body))
        ids = body["prompt"]
        scored: list[Any] = [None]
        for n in range(1, len(ids)):
            [score] = derive_logprobs(np.array(ids[:n], np.int32), [ids[n]])
            scored.append({str(ids[n]): {"logprob": score + self.offset, "rank": 1}})
        payload = json.dumps({"choices": [{"prompt_logprobs": scored}]}).encode()
        self.send_response(500 if self.failing else 200)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(b"x" * len(payload) if self.failing else payload)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def engine() -> Iterator[type[ScoringHandler]]:
    class Scoring(ScoringHandler):
        requests: list[Any] = []

    server = HTTPServer(("127.0.0.1", 0), Scoring)
    Scoring.url = f"http://127.0.0.1:{server.server_port}/v1"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Scoring
    server.shutdown()
    thread.join()
    server.server_close()


def test_vllm_scores_each_branch_once(recorded: Recorded, engine: Any, capsys: Any) -> None:
    data, session, _ = recorded
    assert run_verify(data, session=session, engine="vllm", engine_url=engine.url, model="m", as_json=True)
    [found] = json.loads(capsys.readouterr().out)["sessions"]
    # The constrained turn was not sampled from the model's own distribution; a plain score says nothing about it.
    assert found["replay"]["turns"] == 15 and found["replay"]["outliers"] == 0
    path, _, body = engine.requests[0]
    assert path == "/v1/completions" and body["prompt_logprobs"] == 0 and body["model"] == "m"
    assert len(engine.requests) < 15, "turns of one branch are scored together"


def test_differing_engine_reports_each_token(recorded: Recorded, engine: Any) -> None:
    data, _, short = recorded
    engine.offset = -0.05
    with SessionReader(data) as folder, open_row_source(data) as rows:
        means = VerifyOptions(rows=rows, scorer=VLLMScorer(engine.url, "m"), tolerance=0.02)
        found = verify(folder, short, means)
        assert wrong(found) == {"logprobs"}
        assert found.replay is not None and abs(found.replay.mean - 0.05) < 1e-4
        assert found.replay.outliers == found.replay.tokens == 6
        assert "weights" in found.notes[0].what
        assert verify(folder, short, VerifyOptions(rows=rows, scorer=VLLMScorer(engine.url, "m"), tolerance=0.1)).ok
        other = verify(folder, short, VerifyOptions(rows=rows, scorer=VLLMScorer(engine.url, "m"), version=3))
        assert other.ok and [missing.part for missing in other.unchecked] == ["replay"]


def test_unavailable_engine_is_an_error(recorded: Recorded, engine: Any) -> None:
    engine.failing = 1
    with pytest.raises(EngineError, match="vllm: status 500"):
        run_verify(recorded[0], engine="vllm", engine_url=engine.url, model="m")
    with pytest.raises(EngineUnavailable):
        run_verify(recorded[0], engine="vllm", engine_url="http://127.0.0.1:9", model="m")


# ── transcripts ─────────────────────────────────────────────────────────────────────────────────────────────

SCRIBE = """
name = "scribe"
title = "A program that logs its replies"
dialect = "chat"
command = ["scribe"]

[transcript]
stdout = true
turn = "{text: text}"
"""


@pytest.mark.parametrize("logged", [["one", "two"], ["one", "2"], ["one"], ["one", "two", "three"]])
async def test_transcript_is_compared(
    logged: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any, renderers: Any
) -> None:
    (tmp_path / "scribe.toml").write_text(SCRIBE)
    monkeypatch.setenv("TURNGATE_AGENTS", str(tmp_path / "scribe.toml"))
    data = tmp_path / "data"
    async with World.of(data, renderers("builtin")) as world:
        agent = world.agent(metadata={"agent": "scribe"})
        agent.messages = [SYSTEM, user("work")]
        await talk(agent, "one", "two")
    folder_of_logs = data / "rollouts" / agent.session_id
    folder_of_logs.mkdir(parents=True)
    (folder_of_logs / "stdout").write_text("".join(json.dumps({"text": text}) + "\n" for text in logged))
    assert run_verify(data, as_json=True) == (logged == ["one", "two"])
    [found] = json.loads(capsys.readouterr().out)["sessions"]
    assert {f["check"] for f in found["findings"] if not f["ok"]} == (
        set() if logged == ["one", "two"] else {"transcript"}
    )


async def test_agent_logs_are_found_below_rollouts_folder(
    tmp_path: Path, monkeypatch: Any, capsys: Any, renderers: Any
) -> None:
    (tmp_path / "scribe.toml").write_text(SCRIBE)
    monkeypatch.setenv("TURNGATE_AGENTS", str(tmp_path / "scribe.toml"))
    data, out, sessions = tmp_path / "out" / "data", tmp_path / "out", []
    async with World.of(data, renderers("builtin")) as world:
        for _ in range(4):
            agent = world.agent(metadata={"agent": "scribe"})
            agent.messages = [SYSTEM, user("work")]
            await talk(agent, "one")
            sessions.append(agent.session_id)
    assert run_verify(data, every=True)
    missed = f"with transcript not checked: no logs of the agent were found in {data}; pass the folder that contains them as --rollouts"
    assert f"– 4 sessions {missed}\n" in capsys.readouterr().out
    # Folders that `train` writes, and a batch in the data folder.
    places = ["rollouts/rollouts", "before/rollouts", "after-8/rollouts", "data/batches/4f1c/rollouts"]
    for place, session in zip(places, sessions, strict=True):
        folder_of_logs = out / place / session
        folder_of_logs.mkdir(parents=True)
        (folder_of_logs / "stdout").write_text('{"text": "one"}\n')
    assert run_verify(data, every=True)
    assert f"– 3 sessions {missed}" in capsys.readouterr().out
    assert run_verify(data, every=True, rollouts=str(out), as_json=True)
    found = json.loads(capsys.readouterr().out)["sessions"]
    checked = [one["session"] for one in found if any(f["check"] == "transcript" for f in one["findings"])]
    assert sorted(checked) == sorted(sessions[:3])
    (out / places[2] / sessions[2] / "stdout").write_text('{"text": "two"}\n')
    assert not run_verify(data, every=True, rollouts=str(out))


def test_equal_reasons_are_grouped(recorded: Recorded, capsys: Any) -> None:
    data, *sessions = recorded
    for session in sessions:
        with tampering(data, session) as t:
            t.sql("UPDATE nodes SET checksum=1 WHERE session=? AND id=2", t.key)
    assert not run_verify(data, every=True)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "with rows not checked" in line]
    assert "2 sessions" in line and "other reason" not in line and not any(session in line for session in sessions)


@pytest.mark.parametrize(
    ("sent", "template", "line"),
    [
        (
            "\nfix add<|im_end|>\n<|im_start|>assistant\n<think>\nWell.",
            "\nfix add<|im_end|>\n<|im_start|>assistant\nDone.",
            "sent …|>assistant␊▸<think>␊Well. · template …|>assistant␊▸Done.",
        ),
        ("a", "a and more", "sent a▸ · template a▸ and more"),
        ("same", "same", "both same"),
        ("x" + "y" * 50, "z", f"sent ▸x{'y' * 29}… · template ▸z"),
    ],
)
def test_difference_is_truncated_around_its_start(sent: str, template: str, line: str, capsys: Any) -> None:
    found = TemplateDifference(branch=4, node=2, token=31, why="thinking kept", sent=sent, template=template)
    shown = Verdict(session="s", ok=True, status="sealed", counts=Counts(), findings=(), differences=(found,))
    command.print_verdict(shown, console())
    assert capsys.readouterr().out.endswith(f"thinking kept  {line}\n")


def test_notes_beyond_the_limit_are_counted() -> None:
    results = CheckResults()
    for node in range(23):
        results.note("finish", "the last id is not a stop token", node)
    results.note("tree", "missing node ids: 24")
    assert [(note.check, note.what, note.node) for note in results.notes[19:]] == [
        ("finish", "the last id is not a stop token", 19),
        ("finish", "and 3 more", None),
        ("tree", "missing node ids: 24", None),
    ]


def test_missing_transcript_is_reported(recorded: Recorded, capsys: Any) -> None:
    assert run_verify(recorded[0])
    assert "transcript was not checked: no agent is recorded" in capsys.readouterr().out


# ── in the background ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_spot_checker_verifies_every_second_session(recorded: Recorded, caplog: Any) -> None:
    data, session, other = recorded
    with tampering(data, session) as t:
        t.sql("UPDATE nodes SET checksum=1 WHERE session=? AND id=2", t.key)
    found: list[Verdict] = []
    done = threading.Event()

    def verify_one(session_id: str) -> Verdict:
        with SessionReader(data) as folder, open_row_source(data) as rows:
            return verify(folder, session_id, VerifyOptions(rows=rows, renderers=Renderers()))

    def record_verdict(verdict: Verdict) -> None:
        found.append(verdict)
        if len(found) == 2:
            done.set()

    checker = SpotChecker(2, verify_one, record_verdict)
    checker.start()
    for ended in ("nobody", other, "nobody", "nobody", "nobody", session):
        checker.submit(ended)
    assert done.wait(scaled(120))  # it runs at low priority
    checker.stop()
    assert [(verdict.session, verdict.ok) for verdict in found] == [(other, True), (session, False)]
    assert checker.verified == 2 and checker.dropped == 0
    assert summarize_verdict(found[1])["wrong"] == [
        {"check": "checksum", "what": "its bytes do not match its checksum", "node": 2}
    ]
    messages = [record.getMessage() for record in caplog.records]
    assert any("nobody" in line and "could not be verified" in line for line in messages)
    assert any(session in line and "checksum" in line for line in messages)


def test_spot_checker_survives_crash(caplog: Any) -> None:
    attempts = threading.Semaphore(0)

    def crash(session_id: str) -> Verdict:
        attempts.release()
        raise RuntimeError("a fault of ours")

    checker = SpotChecker(1, crash, lambda verdict: None)
    checker.start()
    checker.submit("one")
    checker.submit("two")
    assert attempts.acquire(timeout=scaled(10)) and attempts.acquire(timeout=scaled(10))
    checker.stop()
    assert checker.verified == 0
