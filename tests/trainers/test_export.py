"""Tests for exports: exact ids, training masks, rewards, and atomic files."""

from __future__ import annotations

import asyncio
import errno
import inspect
import json
import re
import shutil
import sqlite3
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import pytest

from tests.kit import OpenSession, Reply, Running, calls, gateway, result, say, tokenizer, tool, user
from tests.trace import kit as trace_kit
from tests.trace.kit import Call, Recorder
from turngate.cli import options as cli_options
from turngate.engines.scripted import SYNTHETIC_NOTE
from turngate.errors import ConfigError
from turngate.store.outcomes import RecordedOutcome
from turngate.store.store import Store
from turngate.trace.sample import build_samples
from turngate.trace.session import Session
from turngate.trainers.export import FORMATS, ExportChoices, ExportResult, RolloutFilter, areal, export, files, tinker
from turngate.trainers.export.files import RecordLayout, UnwritableRecord, encode_json, open_output
from turngate.trainers.export.rows import describe_versions
from turngate.trainers.export.side_data import decode_experts
from turngate.types import encode_array
from turngate.views.session import open_row_source

TOOLS = [tool()]
CALL = calls(("read_file", {"path": "a"}))
PROMPT = [{"role": "system", "content": "Be brief."}, user("Read a.")]


def read_records(out: Path) -> list[Any]:
    if out.suffix == ".parquet":
        from pyarrow import parquet

        records: list[Any] = parquet.read_table(out).to_pylist()
        return records
    if out.is_dir():
        return [json.loads(path.read_text()) for path in sorted(out.iterdir())]
    return [json.loads(line) for line in out.read_text().splitlines()]


class Recording:
    """A data folder with recorded rollouts; `serving` reopens it to record more."""

    def __init__(self, data: Path, out: Path, ids: dict[str, str]) -> None:
        self.data, self.out, self.ids = data, out, ids
        self.answers: list[Any] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Running]:
        async with gateway(lambda request, n: self.answers.pop(0), data=self.data) as self.g:
            yield self.g

    async def ask(self, session: OpenSession, history: list[Any], answer: str, *, close: bool = True) -> Reply:
        self.answers.append(say(answer, close=close))
        return await self.g.ask(session.key, history, tools=TOOLS)

    async def rollout(self, name: str, *said: str, asked: list[Any] = PROMPT, **config: Any) -> OpenSession:
        """Record a rollout with these model turns; every tool call returns "hello"."""
        metadata = {"agent": "tester", "agent_version": "1.2", "task": "t", "group": "run.t"}
        session = await self.g.open(metadata=metadata, **{"model": "m", **config})
        self.ids[name] = session.id
        history = [*asked]
        for answer in said:
            reply = await self.ask(session, history, answer)
            history += [reply.message(), *(result(call, "hello") for call in reply.calls)]
        return session

    async def end(self, session: OpenSession, reward: float | None, kind: str = "graded", **fields: Any) -> None:
        await self.g.seal(session.id)
        outcome = {"kind": kind, "reward": reward, "group": "run.t", "task": "t", **fields}
        self.g.app.outcomes.record(session.id, msgspec.convert(outcome, RecordedOutcome))

    def export(self, format: str, suffix: str = ".jsonl", **choices: Any) -> tuple[list[Any], ExportResult]:
        wanted = {name: choices.pop(name) for name in list(choices) if name in RolloutFilter.__struct_fields__}
        out = self.out / f"out{suffix}"
        done = export(self.data, out, ExportChoices(format=format, wanted=RolloutFilter(**wanted), **choices))
        assert [path.name for path in self.out.iterdir() if path.name.startswith(".")] == []
        return read_records(out), done

    def damage(self, table: str, cell: str, name: str, written: object) -> None:
        """Overwrite one database cell of a rollout."""
        key = "key" if table == "sessions" else "session"
        with sqlite3.connect(self.data / "turngate.db") as db:
            which = f"{key}=(SELECT key FROM sessions WHERE id=?)"
            changed = db.execute(f"UPDATE {table} SET {cell}=? WHERE {which}", (written, self.ids[name]))
            assert changed.rowcount == 1
        db.close()

    def samples(self, session: str) -> list[Any]:
        """The rows of a session as the gateway's API returns them."""
        with open_row_source(self.data) as rows:
            found: list[Any] = json.loads(msgspec.json.encode(rows(session, False), enc_hook=encode_array))
            return found

    def name(self, session: str) -> str:
        return next(name for name, known in self.ids.items() if known == session)


async def record_rollouts(r: Recording) -> None:
    """Record a group of four rollouts (good, bad, forked, fault) and an unscored, an open and a cancelled one."""
    async with r.serving() as g:
        await r.end(await r.rollout("good", CALL, "It says hello."), 1.0, resolved=True)
        await r.end(await r.rollout("bad", "I do not know."), 0.0, resolved=False)
        forked = await r.rollout("forked", CALL)
        first = await r.ask(forked, [*PROMPT, user("Again.")], CALL)
        await r.ask(forked, [*PROMPT, user("Again."), first.message(), result(first.calls[0], "one")], "One.")
        await r.ask(forked, [*PROMPT, user("Again."), first.message(), result(first.calls[0], "two")], "Two, too.")
        await r.end(forked, 0.5)
        await r.end(await r.rollout("fault", CALL), None, "infrastructure fault")
        unscored = await r.rollout("unscored", "Hm.")
        await g.seal(unscored.id)
        await r.rollout("open", CALL)
        await g.cancel((await r.rollout("cancelled", CALL)).id)


@pytest.fixture(scope="module")
def shared_recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    recording = Recording(tmp_path_factory.mktemp("made") / "data", Path(), {})
    asyncio.run(record_rollouts(recording))
    return recording


@pytest.fixture
def recording(shared_recording: Recording, tmp_path: Path) -> Recording:
    """A copy of the recorded folder for each test."""
    shutil.copytree(shared_recording.data, tmp_path / "data")
    (tmp_path / "out").mkdir()
    return Recording(tmp_path / "data", tmp_path / "out", dict(shared_recording.ids))


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_equal_gateway_samples_with_group_advantages(recording: Recording) -> None:
    rows, done = recording.export("rows")
    assert {recording.name(row["session"]) for row in rows} == {"good", "bad", "forked", "fault", "unscored"}
    for name in ("good", "bad", "forked"):
        mine = [row for row in rows if row["session"] == recording.ids[name]]
        theirs = recording.samples(recording.ids[name])
        for field in ("ids", "mask", "logprobs", "spans", "branch"):
            assert [row[field] for row in mine] == [row[field] for row in theirs]
        assert sum(row["weight"] for row in mine) == pytest.approx(1.0)
    # Rewards 1, 0 and 0.5: mean 0.5, deviation sqrt(1/6). The fault and the unscored rollout do not count.
    by_name = {recording.name(row["session"]): row for row in rows}
    deviation = (1 / 6) ** 0.5
    assert by_name["good"]["advantage"] == pytest.approx(0.5 / deviation, rel=1e-5)
    assert by_name["bad"]["advantage"] == pytest.approx(-0.5 / deviation, rel=1e-5)
    assert by_name["forked"]["advantage"] == 0.0
    for name in ("fault", "unscored"):
        assert (by_name[name]["reward"], by_name[name]["advantage"]) == (None, None), "an unknown reward is not 0"
    assert by_name["fault"]["kind"] == "infrastructure fault" and by_name["unscored"]["kind"] is None
    assert by_name["good"]["model"] == "m" and by_name["good"]["version_start"] == 0
    assert set(done.left_out) == {
        f"a rollout: its session is {status} (--unfinished includes it)" for status in ("open", "cancelled")
    }


def test_baseline_covers_whole_group_despite_filters(recording: Recording) -> None:
    rows, _ = recording.export("rows", min_reward=1.0, advantage="leave_one_out")
    assert [(recording.name(row["session"]), row["advantage"]) for row in rows] == [("good", 0.75)]


def test_parquet_rows_equal_jsonl_rows(recording: Recording) -> None:
    lines, _ = recording.export("rows")
    columns, _ = recording.export("rows", ".parquet")
    assert len(columns) == len(lines)
    for line, row in zip(lines, columns, strict=True):
        assert json.loads(row.pop("spans")) == line.pop("spans")
        assert row.pop("outcome") == line.pop("outcome") is None
        assert row == line
        assert None in row["logprobs"] and all(
            p is not None for p, m in zip(row["logprobs"], row["mask"], strict=True) if m
        )


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ({"unscored": "drop"}, {"good", "bad", "forked"}),
        ({"min_reward": 0.5}, {"good", "forked"}),
        ({"resolved": True}, {"good"}),
        ({"groups": ("run.*",), "tasks": ("t",), "unscored": "drop"}, {"good", "bad", "forked"}),
        ({"unfinished": True}, {"good", "bad", "forked", "fault", "unscored", "open", "cancelled"}),
    ],
)
def test_filters_select_rollouts(recording: Recording, wanted: dict[str, Any], names: set[str]) -> None:
    rows, _ = recording.export("rows", **wanted)
    assert {recording.name(row["session"]) for row in rows} == names


# ── imitation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sft_messages_have_tools_and_parsed_arguments(recording: Recording) -> None:
    records, done = recording.export("sft", sessions=(recording.ids["good"],))
    [record] = records
    assert [m["role"] for m in record["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    [call] = record["messages"][2]["tool_calls"]
    assert call["function"] == {"name": "read_file", "arguments": {"path": "a"}}
    assert record["messages"][3]["tool_call_id"] == call["id"] and record["messages"][4]["content"] == "It says hello."
    assert record["tools"] == TOOLS and record["reward"] == 1.0
    assert any("exact ids" in line for line in done.lost)


def test_sft_forms_train_each_allowed_turn_once(recording: Recording) -> None:
    """The forked rollout has three branches, and two of them share a turn."""
    only = {"sessions": (recording.ids["forked"],)}
    trained = {s["node"] for row in recording.samples(recording.ids["forked"]) for s in row["spans"] if s["trained"]}
    assert len(trained) == 4
    completions, _ = recording.export("sft", form="completions", **only)
    assert sorted(record["turn"] for record in completions) == sorted(trained)
    assert all(
        record["completion"][0]["role"] == "assistant" and len(record["completion"]) == 1 for record in completions
    )
    tokens, _ = recording.export("sft", form="tokens", **only)
    rows = {row["branch"]: row for row in recording.samples(recording.ids["forked"])}
    for record in tokens:
        row, size = rows[record["branch"]], len(record["input_ids"])
        assert record["input_ids"] == row["ids"][:size] and record["assistant_masks"] == [
            int(m) for m in row["mask"][:size]
        ]
        assert record["labels"] == [i if m else -100 for i, m in zip(row["ids"], row["mask"], strict=True)][:size]
        assert not any(row["mask"][size:]), "a trained token was cut off"
    messages, done = recording.export("sft", **only)
    assert len(messages) == 2, "the third would repeat a turn of the second"
    assert [count for why, count in done.left_out.items() if "a row with an untrained assistant message" in why] == [1]


async def test_biased_rollout_is_exported_only_with_imitate(recording: Recording) -> None:
    async with recording.serving():
        session = await recording.rollout("biased", "Hello.", sampling={"top_p": 0.5})
        await recording.end(session, 1.0)
    only = {"sessions": (session.id,)}
    for format in [name for name in FORMATS if name not in ("atif", "dpo")]:
        why = r"a rollout with nothing to train on: all main turns were sampled with a bias \(top_p\); leave these sampling settings out"
        with pytest.raises(ConfigError, match=rf"1 rollout yielded no records, .*1 × {why}"):
            recording.export(format, **only)
    for form in ("messages", "completions", "tokens"):
        [record] = recording.export("sft", form=form, imitate=True, **only)[0]
        assert record["session"] == session.id
    assert tokenizer().decode([i for i in record["labels"] if i >= 0]).startswith("Hello.")


async def test_truncated_turn_is_not_exported_for_imitation(recording: Recording) -> None:
    async with recording.serving():
        session = await recording.rollout("short")
        await recording.ask(session, [*PROMPT], "Once upon", close=False)
        await recording.end(session, 1.0)
    with pytest.raises(ConfigError, match="1 rollout yielded no records"):
        recording.export("sft", imitate=True, sessions=(session.id,))


async def test_turn_without_tokens_is_not_exported_for_imitation_as_tokens(recording: Recording) -> None:
    async with recording.serving() as g:
        session = await recording.rollout("empty")
        recording.answers.append(say("", close=False, finish="stop"))
        await g.ask(session.key, [*PROMPT], tools=TOOLS)
        [turn] = await g.turns(session.id)
        await recording.end(session, 1.0)
    assert turn["finish"] == "stop" and turn["capture"] == "tokens"
    sessions = (recording.ids["good"], session.id)
    [record], done = recording.export("sft", form="tokens", imitate=True, sessions=sessions)
    assert record["session"] == recording.ids["good"]
    [(why, count)] = done.left_out.items()
    assert "a rollout without a turn to imitate" in why and count == 1


async def test_rejection_keeps_rewarded_rollouts(recording: Recording) -> None:
    async with recording.serving():
        await recording.end(await recording.rollout("shorter", "Hello."), 1.0)

    def kept(**choices: Any) -> list[str]:
        return [recording.name(record["session"]) for record in recording.export("rejection", **choices)[0]]

    assert kept() == ["good", "shorter"], "the default minimum reward is 1"
    assert kept(keep="best") == ["shorter"], "ties go to the rollout with fewer tokens"
    assert kept(min_reward=0.5, form="tokens").count("forked") == 3
    assert kept(min_reward=0.0).count("bad") == 1


# ── preferences ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_dpo_pairs_share_prompt_and_prefer_higher_reward(recording: Recording) -> None:
    pairs, _ = recording.export("dpo")
    [pair] = [record for record in pairs if record["chosen_session"] == recording.ids["good"]]
    assert pair["prompt"] == PROMPT and pair["rejected"] == [{"role": "assistant", "content": "I do not know."}]
    assert pair["chosen"][0]["tool_calls"][0]["function"]["name"] == "read_file" and pair["tools"] == TOOLS
    assert (pair["chosen_reward"], pair["rejected_reward"]) == (1.0, 0.0)


def test_dpo_token_pairs_are_complete_and_masked(recording: Recording) -> None:
    [pair] = recording.export("dpo", form="tokens", margin=1.0)[0]
    for which, name in (("chosen", "good"), ("rejected", "bad")):
        [row] = recording.samples(recording.ids[name])
        start = len(pair["prompt_ids"])
        assert pair["prompt_ids"] + pair[f"{which}_ids"] == row["ids"]
        assert pair[f"{which}_mask"] == [int(m) for m in row["mask"][start:]]
    assert 0 in pair["chosen_mask"], "the tool's result"
    assert recording.export("dpo", ".parquet", form="tokens", margin=1.0)[0] == [pair]


async def test_different_prompts_make_no_pair(recording: Recording) -> None:
    async with recording.serving():
        await recording.end(await recording.rollout("other", "No.", asked=[user("Something else.")]), -5.0)
    pairs, done = recording.export("dpo", pairs=99)
    assert recording.ids["other"] not in {record["rejected_session"] for record in pairs}
    assert [count for why, count in done.left_out.items() if "prompts differ" in why] and pairs


@pytest.mark.promise(9)
def test_export_without_pairs_fails_and_keeps_old_file(recording: Recording) -> None:
    with pytest.raises(
        ConfigError,
        match=r"5 rollouts yielded no records, .*1 × a group without a usable pair .* at least 5 \(--margin\)",
    ):
        recording.export("dpo", margin=5.0)
    assert list(recording.out.iterdir()) == []
    (recording.out / "out.jsonl").write_text("before")
    with pytest.raises(ConfigError, match="1 × a group without two different rewards"):
        recording.export("dpo", sessions=(recording.ids["good"],))
    with pytest.raises(
        ConfigError, match="left out: 1 × a rollout that cannot be compared, because its reward is unknown"
    ):
        recording.export("dpo", sessions=(recording.ids["unscored"],), groups=("run.t",))
    assert (recording.out / "out.jsonl").read_text() == "before"


# ── other trainers ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_verl_prompt_and_response_match_rows(recording: Recording) -> None:
    records, done = recording.export("verl", unscored="drop")
    assert {recording.name(record["extra_fields"]["session"]) for record in records} == {"good", "bad", "forked"}
    for record in records:
        row = next(
            row
            for row in recording.samples(record["extra_fields"]["session"])
            if row["branch"] == record["extra_fields"]["branch"]
        )
        first = len(record["prompt_ids"])
        end = first + len(record["response_ids"])
        assert record["prompt_ids"] + record["response_ids"] == row["ids"][:end]
        assert record["response_mask"] == [int(m) for m in row["mask"][first:end]] and record["response_mask"][0] == 1
        assert not any(row["mask"][:first]) and not any(row["mask"][end:])
        for got, known in zip(record["response_logprobs"], row["logprobs"][first:end], strict=True):
            assert got == (0.0 if known is None else known)
        assert record["uid"] == "run.t" and record["reward_score"] == record["extra_fields"]["reward"]
    assert any("0.0" in line for line in done.lost), "the substitution is reported"
    assert len(recording.export("verl", ".parquet", unscored="drop")[0]) == len(records)


def test_formats_that_need_a_number_leave_out_unknown_rewards(recording: Recording) -> None:
    expected = {"areal": areal.UNKNOWN_REWARD, "tinker": tinker.UNKNOWN_REWARD}
    for format, reason in expected.items():
        records, done = recording.export(format)
        assert {recording.name(record["metadata"]["session"]) for record in records} == {"good", "bad", "forked"}
        fault = "a rollout that ended as 'infrastructure fault', which is not the agent's fault"
        assert done.left_out[reason] == 1 and done.left_out[fault] == 1
        assert sum(record["metadata"]["weight"] for record in records) == pytest.approx(3.0)
        again, _ = recording.export(format, ".parquet")
        assert len(again) == len(records)
        assert any("0.0" in line for line in done.lost), "the substitution is reported"


SLIME = (
    "group_index index prompt tokens response response_length label reward loss_mask weight_versions rollout_log_probs "
)
SLIME += "remove_sample status metadata"


def test_slime_samples_have_expected_fields_and_lengths(recording: Recording) -> None:
    records, _ = recording.export("slime")
    assert {recording.name(record["metadata"]["session"]) for record in records} == {
        "good",
        "bad",
        "forked",
        "unscored",
    }
    for record in records:
        assert list(record) == SLIME.split()
        size = record["response_length"]
        assert len(record["loss_mask"]) == len(record["rollout_log_probs"]) == size <= len(record["tokens"])
        trained = [t for t, m in zip(record["tokens"][-size:], record["loss_mask"], strict=True) if m]
        [row] = [
            r for r in recording.samples(record["metadata"]["session"]) if r["branch"] == record["metadata"]["branch"]
        ]
        assert trained == [i for i, m in zip(row["ids"], row["mask"], strict=True) if m]
        assert record["status"] == "completed"
    assert len({record["group_index"] for record in records}) == 1 and len(
        {record["index"] for record in records}
    ) == len(records)
    # The index consists of the session's key and the row's last node.
    assert {record["index"] % 2**24 for record in records} == {record["metadata"]["branch"] for record in records}
    unscored = next(record for record in records if recording.name(record["metadata"]["session"]) == "unscored")
    assert unscored["reward"] is None


# The fields of Harbor's models (0.25.0, `extra="forbid"`); compared by hand, see docs/export.md.
TRAJECTORY = {"schema_version", "session_id", "trajectory_id", "agent", "steps", "final_metrics", "extra"}
STEP = {"step_id", "timestamp", "source", "message", "reasoning_content", "tool_calls", "observation", "metrics"}
STEP |= {"is_copied_context", "llm_call_count", "extra"}
AGENTS_ONLY = {"reasoning_content", "tool_calls", "metrics"}
METRICS = {"prompt_tokens", "completion_tokens", "prompt_token_ids", "completion_token_ids", "logprobs", "extra"}


def assert_atif(record: Any) -> None:
    assert set(record) <= TRAJECTORY | {"subagent_trajectories"} and record["schema_version"] == "ATIF-v1.8"
    assert set(record["agent"]) <= {"name", "version", "model_name", "tool_definitions"}
    assert [step["step_id"] for step in record["steps"]] == list(range(1, len(record["steps"]) + 1))
    for step in record["steps"]:
        assert set(step) <= STEP and isinstance(step["message"], str)
        assert step["source"] in ("system", "user", "agent")
        assert step["source"] == "agent" or not set(step) & AGENTS_ONLY
        assert set(step.get("metrics", {})) <= METRICS
        called = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        for call in step.get("tool_calls", ()):
            assert set(call) <= {"tool_call_id", "function_name", "arguments", "extra"}
            assert isinstance(call["arguments"], dict)
        for seen in step.get("observation", {"results": ()})["results"]:
            assert set(seen) <= {"source_call_id", "content"}
            assert seen.get("source_call_id") is None or seen["source_call_id"] in called
    embedded = record.get("subagent_trajectories", [])
    assert len({sub["trajectory_id"] for sub in embedded}) == len(embedded)
    for sub in embedded:
        assert_atif(sub)


async def test_atif_has_text_and_tokens_of_every_branch(recording: Recording) -> None:
    async with recording.serving():
        broken = await recording.rollout("broken", '<tool_call>\n{"name": "read_file", "arguments": [1]}\n</tool_call>')
        await recording.end(broken, 0.0)
    found = {recording.name(record["session_id"]): record for record in recording.export("atif", "")[0]}
    assert set(found) == {"good", "bad", "forked", "fault", "unscored", "broken"}
    for record in found.values():
        assert_atif(record)
    good = found["good"]
    assert [step["source"] for step in good["steps"]] == ["system", "user", "agent", "agent"]
    assert good["steps"][2]["observation"]["results"][0]["content"] == "hello"
    assert good["agent"] == {"name": "tester", "version": "1.2", "model_name": "m", "tool_definitions": TOOLS}
    assert good["extra"]["rollout"]["reward"] == 1.0 and found["unscored"]["extra"]["rollout"]["reward"] is None
    [row] = recording.samples(recording.ids["good"])
    turns = [step["metrics"] for step in good["steps"] if "metrics" in step]
    ids = [i for turn in turns for i in turn["extra"]["new_prompt_token_ids"] + turn["completion_token_ids"]]
    assert ids == row["ids"], "tokens were lost"
    assert [p for turn in turns for p in turn["logprobs"]] == [p for p in row["logprobs"] if p is not None]
    every = [found["forked"], *found["forked"]["subagent_trajectories"]]
    fresh = [
        s["metrics"]["extra"]["node"]
        for record in every
        for s in record["steps"]
        if "metrics" in s and not s.get("is_copied_context")
    ]
    assert len(every) == 3 and len(fresh) == len(set(fresh)) == 4
    whole = recording.export("atif", prompt_ids=True, sessions=(recording.ids["good"],))[0][0]["steps"][3]["metrics"]
    assert whole["prompt_token_ids"] + whole["completion_token_ids"] == row["ids"]


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_failed_export_keeps_old_file(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    before, _ = recording.export("rows")
    real, count = Store.load, 0

    def failing(*given: Any) -> Any:
        nonlocal count
        count += 1
        if count > 2:
            raise RuntimeError("power cut")
        return real(*given)

    monkeypatch.setattr(Store, "load", failing)
    with pytest.raises(RuntimeError, match="power cut"):
        recording.export("sft")
    assert [json.loads(line) for line in (recording.out / "out.jsonl").read_text().splitlines()] == before
    assert [path.name for path in recording.out.iterdir()] == ["out.jsonl"]
    assert (recording.out / "out.jsonl").stat().st_mode & 0o077 == 0, "the file is readable by others"


def test_read_error_is_not_reported_as_a_write_error(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error", "/data/recording")

    monkeypatch.setattr(Store, "load", failing)
    with pytest.raises(OSError, match="/data/recording"):
        recording.export("rows")
    assert list(recording.out.iterdir()) == []


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_full_disk_is_a_config_error(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def open_full(path: Path) -> Iterator[IO[bytes]]:
        with Path("/dev/full").open("wb", buffering=0) as file:
            yield file

    monkeypatch.setattr(files, "_open_private", open_full)
    layout = files.RecordLayout(what="rows", columns={"text": "text"})
    out = tmp_path / f"out{suffix}"
    with (
        pytest.raises(ConfigError, match=re.escape(f"out: {out} cannot be written (No space left on device)")),
        files.open_output(out, layout) as file,
    ):
        file.add({"text": "x"})


async def test_export_loads_one_group_at_a_time(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    async with recording.serving():
        for n in range(12):
            await recording.end(await recording.rollout(f"more-{n}", "Hm."), 0.0, group=f"more.{n // 2}")
    alive: weakref.WeakSet[Session] = weakref.WeakSet()
    most = 0
    real = Store.load

    def watched(*given: Any) -> Session:
        nonlocal most
        session = real(*given)
        alive.add(session)
        most = max(most, len(alive))
        return session

    monkeypatch.setattr(Store, "load", watched)
    for format in ("rows", "sft", "verl", "atif"):
        most = 0
        _, done = recording.export(format, groups=("more.*",))
        assert done.rollouts == 12 and done.groups == 6 and most <= 4, (
            "two of the current group and two of the previous one"
        )


async def test_lone_surrogate_is_exported(recording: Recording) -> None:
    async with recording.serving() as g:
        session = await recording.rollout("half")
        body = b'{"model":"m","messages":[{"role":"user","content":"\\ud83d cut"}]}'
        recording.answers.append(say("Yes."))
        headers = {"authorization": f"Bearer {session.key}", "content-type": "application/json"}
        response = await g.http().post("/v1/chat/completions", content=body, headers=headers)
        assert response.status_code == 200, response.text
        await recording.end(session, 1.0)
    [record] = recording.export("sft", sessions=(session.id,))[0]
    assert record["messages"][0]["content"].endswith(" cut")


async def test_deeply_nested_arguments_stay_text(recording: Recording) -> None:
    """Agents can nest tool arguments deeper than JSON readers support."""
    deep: Any = {}
    for _ in range(300):
        deep = {"x": deep}
    async with recording.serving() as g:
        session = await recording.rollout("deep")
        recording.answers.append(say(calls(("read_file", deep))))
        reply = await g.ask(session.key, PROMPT, tools=TOOLS)
        assert reply.calls
        await recording.end(session, 1.0)
    records, _ = recording.export("sft", min_reward=1.0)
    arguments = next(record for record in records if record["session"] == session.id)["messages"][2]["tool_calls"][0][
        "function"
    ]["arguments"]
    assert isinstance(arguments, str) and json.loads(arguments) == deep, "arguments were changed"
    with pytest.raises(UnwritableRecord):
        encode_json({"tools": _nested(3000)})


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_unwritable_record_is_left_out_alone(tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"rows{suffix}"
    with open_output(out, RecordLayout(what="rows", columns={"a": "json"})) as file:
        file.add({"a": [1]})
        with pytest.raises(UnwritableRecord):
            file.add({"a": _nested(3000)})
        file.add({"a": [2]})
    assert [json.loads(row["a"]) if suffix == ".parquet" else row["a"] for row in read_records(out)] == [[1], [2]]
    assert file.records == 2


def _nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("format", FORMATS)
def test_format_is_documented(format: str) -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert f"\n| `{format}" in (docs / "export.md").read_text(encoding="utf-8"), "add a row to docs/export.md"
    [listed] = re.findall(r"Output format: (.*)\.", inspect.getsource(cli_options))
    assert format in re.split(r", | or ", listed), "add it to the help of `format` in turngate/cli/options.py"


@pytest.mark.parametrize(
    ("format", "suffix", "choices", "line"),
    [
        ("tfrecord", ".jsonl", {}, f"format must be one of {', '.join(FORMATS)}, not 'tfrecord'"),
        ("rows", ".csv", {}, "out must be a .jsonl or .parquet file, not .*csv"),
        ("sft", ".parquet", {}, "out: conversations cannot be written to a Parquet file"),
        (
            "sft",
            ".jsonl",
            {"form": "rows"},
            "--as must be one of messages, completions, tokens for format sft, not 'rows'",
        ),
        ("rows", ".jsonl", {"form": "tokens"}, "--as does not apply to format rows; leave it out"),
        ("verl", ".jsonl", {"prompt_ids": True}, "--prompt-ids does not apply to format verl; leave it out"),
        ("dpo", ".jsonl", {"pairs": 0}, "--pairs must be at least 1, not 0"),
        ("rows", ".jsonl", {"side": ("nope",)}, "--side must be one of routed_experts, sampling_mask, not nope"),
        (
            "tree",
            ".jsonl",
            {"side": ("sampling_masks", "routed_experts")},
            "--side must be one of .*, not sampling_masks",
        ),
        (
            "rows",
            ".jsonl",
            {"groups": ("nobody",)},
            r"data: no rollout can be exported with --group nobody \(recorded: 7 rollouts\); change",
        ),
        (
            "rows",
            ".jsonl",
            {"min_reward": 5.0, "resolved": True},
            r"no rollout can be exported with --min-reward 5 --resolved \(recorded: 7 .*\); change",
        ),
        (
            "rows",
            ".jsonl",
            {"sessions": ("a", "z*")},
            r"no rollout can be exported with --session a --session z\* \(recorded: 7 .*\); change the filters",
        ),
        (
            "atif",
            "",
            {"tasks": ("u",), "unscored": "drop"},
            r"no rollout can be exported with --task u --unscored drop \(recorded: 7 .*\); change",
        ),
    ],
)
def test_invalid_choices_are_config_errors(
    recording: Recording, format: str, suffix: str, choices: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        recording.export(format, suffix, **choices)
    assert list(recording.out.iterdir()) == []


def test_known_side_data_that_no_row_has_is_reported(recording: Recording) -> None:
    _, done = recording.export("rows", side=("sampling_mask",))
    assert done.left_out["the sampling_mask of a row: not recorded"] > 0


def test_recorded_side_data_is_known(recording: Recording) -> None:
    with sqlite3.connect(recording.data / "turngate.db") as db:
        db.execute("INSERT INTO side_data VALUES (1, 1, 'attention', 0, 'uint8', '1', x'00', 0)")
    db.close()
    recording.export("rows", side=("attention",))
    with pytest.raises(ConfigError, match="--side must be one of attention, routed_experts, sampling_mask, not nope"):
        recording.export("rows", side=("attention", "nope"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "routed_experts cannot be read as JSON"),
        pytest.param("[" * 5000, "routed_experts cannot be read as JSON: a value is nested too deeply", id="nested"),
        ("null", "the side data is invalid"),
    ],
)
def test_damaged_experts_are_rejected(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        decode_experts(text)


def test_filter_that_matches_nothing_is_noted(recording: Recording) -> None:
    _, done = recording.export("rows", sessions=(recording.ids["good"], "typo*"), tasks=("*",))
    assert done.notes[-1] == "--session typo* matches no recorded rollout"
    _, done = recording.export("rows", sessions=(recording.ids["good"],))
    assert not any("matches no recorded rollout" in note for note in done.notes)


def test_missing_pyarrow_error_says_what_to_install(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.trainers.export.files.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"requires pyarrow; run `pip install 'turngate\[parquet\]'`"):
        recording.export("rows", ".parquet")
    assert list(recording.out.iterdir()) == []


async def test_huge_rewards_are_left_out_and_reported(recording: Recording) -> None:
    async with recording.serving():
        for number, reward in enumerate((1e308, -1e308, 1e31)):
            await recording.end(await recording.rollout(f"huge {number}", CALL), reward)
    for choice in ("normalised", "leave_one_out", "none"):
        records, done = recording.export("rows", advantage=choice)
        assert {recording.name(record["session"]) for record in records} == {
            "good",
            "bad",
            "forked",
            "unscored",
            "fault",
        }
        assert done.left_out["a rollout whose reward is too large to compute with"] == 3
        assert all(abs(record["advantage"]) < 2 for record in records if record["advantage"] is not None)
    for format in ("verl", "slime", "dpo"):
        assert recording.export(format)[1].left_out["a rollout whose reward is too large to compute with"] == 3
    assert any("huge" in recording.name(record["session"]) for record in recording.export("sft")[0])


def test_areal_has_the_versions_that_the_engine_reported() -> None:
    first, second = Call([trace_kit.user("Fix it.")], size=3), Call([trace_kit.user("And?")], size=2)
    recorder = Recorder([first, second])
    changed, plain = recorder.turns
    changed.info = msgspec.structs.replace(changed.info, version_end=2, version_runs=((0, 1), (2, 2)))
    versions = {row.branch: areal.list_versions(row).tolist() for row in build_samples(recorder.trace)}
    assert versions == {changed.id: [-1, 0, 2, 2], plain.id: [-1, 0, 0]}


def test_version_runs_of_trained_tokens() -> None:
    first, second = [trace_kit.user("Fix it.")], [trace_kit.user("And?")]
    then = [*first, trace_kit.assistant("Done."), *second]
    recorder = Recorder([Call(first, trace_kit.assistant("Done."), size=3), Call(then, size=2)])
    changed, unknown = recorder.turns
    changed.info = msgspec.structs.replace(changed.info, version_end=2, version_runs=((0, 1), (2, 2)))
    unknown.info = msgspec.structs.replace(unknown.info, version_start=2, version_end=3)
    [row] = build_samples(recorder.trace)
    assert row.mask.tolist() == [False, True, True, True, False, True, True]
    found = describe_versions(row, 1, len(row.ids))
    assert found == {"version_start": 0, "version_end": 3, "token_versions": [[0, 1, 0], [1, 3, 2], [4, 6, None]]}


async def test_similar_session_ids_get_separate_files(recording: Recording) -> None:
    async with recording.serving() as g:
        for name in ("a:1", "a_1", "a.1", "a-1", "x" + ":" * 127):
            session = await g.open(id=name)
            await recording.ask(session, PROMPT, "Yes.")
            await g.seal(name)
    records, done = recording.export("atif", suffix="")
    assert len(records) == done.records
    assert {"a:1", "a_1", "a.1", "a-1"} < {record["session_id"] for record in records}


@pytest.mark.promise(9)
def test_damaged_trace_is_left_out_and_reported(recording: Recording) -> None:
    with sqlite3.connect(recording.data / "turngate.db") as db:
        db.execute(
            "UPDATE nodes SET ids=zeroblob(8) WHERE session=(SELECT key FROM sessions WHERE id=?)",
            (recording.ids["bad"],),
        )
    db.close()
    rows, done = recording.export("rows", unscored="drop")
    assert {recording.name(row["session"]) for row in rows} == {"good", "forked"}
    assert done.left_out["a rollout whose trace is damaged on disk"] == 1
    assert np.isclose([r["advantage"] for r in rows if recording.name(r["session"]) == "good"], 1.0, atol=1e-4)


@pytest.mark.parametrize("written", ["{", "{}", b"\xff", 5])
def test_damaged_outcome_is_left_out_and_reported(recording: Recording, written: Any) -> None:
    recording.damage("outcomes", "outcome", "bad", written)
    for format in [name for name in FORMATS if name != "dpo"]:  # without it, no pair remains
        records, done = recording.export(format)
        assert records and recording.ids["bad"] not in json.dumps(records)
        assert done.left_out["a rollout: its outcome is damaged on disk"] == 1
    assert (
        "a rollout: its outcome is damaged on disk"
        not in recording.export("rows", sessions=(recording.ids["good"],))[1].left_out
    )
    with pytest.raises(
        ConfigError,
        match=r"no rollout .* \(recorded: 7 rollouts\); left out: 1 × a rollout: its outcome is damaged on disk",
    ):
        recording.export("rows", sessions=(recording.ids["bad"],))


@pytest.mark.parametrize("written", ["{", b"\xff"])
def test_damaged_settings_are_left_out_and_reported(recording: Recording, written: Any) -> None:
    recording.damage("sessions", "config", "bad", written)
    records, done = recording.export("rows")
    assert {recording.name(record["session"]) for record in records} == {"good", "forked", "unscored", "fault"}
    assert done.left_out["a rollout: its settings are damaged on disk"] == 1
    assert (
        "a rollout: its settings are damaged on disk"
        not in recording.export("rows", sessions=(recording.ids["good"],))[1].left_out
    )


def test_export_fails_if_every_rollout_is_damaged(recording: Recording) -> None:
    with sqlite3.connect(recording.data / "turngate.db") as db:
        db.execute("UPDATE sessions SET config='{'")
    db.close()
    with pytest.raises(
        ConfigError,
        match=r"no rollout can be exported \(recorded: 7 rollouts\); left out: 7 × a rollout: its settings are damaged",
    ):
        recording.export("rows")


@pytest.mark.parametrize("field", ["groups", "tasks", "sessions"])
def test_filter_rejects_plain_string(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"{field} must be a tuple of names, such as \('zz\*',\), not a string"):
        RolloutFilter(**{field: "zz*"})


def test_string_paths_and_trailing_slash(recording: Recording) -> None:
    out = f"{recording.out}/rows.jsonl"
    assert export(str(recording.data), out, ExportChoices(format="rows")).out == Path(out)
    before = Path(out).read_bytes()
    with pytest.raises(ConfigError, match=r"out: .*rows.jsonl/ names a folder, but rows are written to a single file"):
        export(str(recording.data), f"{out}/", ExportChoices(format="rows"))
    with pytest.raises(ConfigError, match=r"out: .*rows.jsonl is a file, but a folder is needed"):
        export(str(recording.data), f"{out}/", ExportChoices(format="atif"))
    assert Path(out).read_bytes() == before
    assert export(str(recording.data), f"{recording.out}/v1.0/", ExportChoices(format="atif")).records == 5
    assert len(list((recording.out / "v1.0").iterdir())) == 5


def test_existing_trajectories_are_counted(recording: Recording) -> None:
    _, first = recording.export("atif", "", sessions=(recording.ids["good"],))
    assert (first.replaced, first.replaced_files, first.other_files) == (False, 0, 0)
    _, second = recording.export("atif", "", sessions=(recording.ids["bad"],))
    assert (second.replaced, second.replaced_files, second.other_files) == (False, 0, 1)
    _, third = recording.export("atif", "", sessions=(recording.ids["good"], recording.ids["forked"]))
    assert (third.replaced, third.replaced_files, third.other_files) == (True, 1, 1)


async def test_synthetic_logprobs_are_noted(recording: Recording) -> None:
    for format in ("rows", "verl", "slime", "atif"):
        [note] = recording.export(format, sessions=(recording.ids["good"], recording.ids["forked"]))[1].notes
        assert note == f"2 rollouts: {SYNTHETIC_NOTE}"
    assert recording.export("verl")[1].notes == (
        f"4 rollouts: {SYNTHETIC_NOTE}",
    )  # the excluded rollout is not counted
    assert recording.export("sft")[1].notes == ()  # sft has no log-probabilities
    async with recording.serving() as g:
        session = await g.open()
        turn = say("As sampled.")
        recording.answers.append(msgspec.structs.replace(turn, logprobs=[-0.25] * len(turn.ids)))
        await g.ask(session.key, PROMPT)
        await g.seal(session.id)
    assert recording.export("rows", sessions=(session.id,))[1].notes == ()


async def test_turn_without_tokens_does_not_make_a_rollout_synthetic(recording: Recording) -> None:
    async with recording.serving() as g:
        session = await g.open()
        turn = say("As sampled.")
        recording.answers.append(msgspec.structs.replace(turn, ids=()))
        recording.answers.append(msgspec.structs.replace(turn, logprobs=[-0.25] * len(turn.ids)))
        empty = await g.ask(session.key, PROMPT)
        await g.ask(session.key, [*PROMPT, empty.message(), user("Go on.")])
        await g.seal(session.id)
    rows, done = recording.export("rows", sessions=(session.id,))
    assert [[span["end"] > span["start"] for span in row["spans"] if span["trained"]] for row in rows] == [
        [False, True]
    ]
    assert done.notes == ()
