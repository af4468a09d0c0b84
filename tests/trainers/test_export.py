"""Exports as a trainer reads them: every id as recorded, nothing trained that may not be, no reward made up, files whole or not there."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.kit import OpenSession, Reply, Running, calls, gateway, result, say, tokenizer, tool, user
from turngate.engines.scripted import SYNTHETIC_NOTE
from turngate.errors import ConfigError
from turngate.store.outcomes import RecordedOutcome
from turngate.store.sqlite import Store
from turngate.trace.session import Session
from turngate.trainers.export import ExportChoices, ExportResult, RolloutFilter, export
from turngate.trainers.export.files import UnwritableRecord, encode_json
from turngate.types import encode_array
from turngate.views.verdict import open_row_source

TOOLS = [tool()]
CALL = calls(("read_file", {"path": "a"}))
ASKED = [{"role": "system", "content": "Be brief."}, user("Read a.")]


class Recording:
    """A data folder, and what was recorded there; `serving` goes on with it."""

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

    async def rollout(self, name: str, *said: str, asked: list[Any] = ASKED, **config: Any) -> OpenSession:
        """What the model says in turn; each call of a tool is answered with "hello"."""
        metadata = {"agent": "tester", "agent_version": "1.2", "task": "t", "group": "run.t"}
        session = await self.g.open(metadata=metadata, **{"model": "m", **config})
        self.ids[name] = session.id
        history = [*asked]
        for answer in said:
            heard = await self.ask(session, history, answer)
            history += [heard.message(), *(result(call, "hello") for call in heard.calls)]
        return session

    async def ended(self, session: OpenSession, reward: float | None, kind: str = "graded", **fields: Any) -> None:
        await self.g.seal(session.id)
        outcome = {"kind": kind, "reward": reward, "group": "run.t", "task": "t", **fields}
        self.g.app.outcomes.record(session.id, msgspec.convert(outcome, RecordedOutcome))

    def export(self, format: str, suffix: str = ".jsonl", **choices: Any) -> tuple[list[Any], ExportResult]:
        wanted = {name: choices.pop(name) for name in list(choices) if name in RolloutFilter.__struct_fields__}
        out = self.out / f"out{suffix}"
        done = export(self.data, out, ExportChoices(format=format, wanted=RolloutFilter(**wanted), **choices))
        assert [path.name for path in self.out.iterdir() if path.name.startswith(".")] == []
        if suffix == ".parquet":
            from pyarrow import parquet

            return parquet.read_table(out).to_pylist(), done
        if out.is_dir():
            return [json.loads(path.read_text()) for path in sorted(out.iterdir())], done
        return [json.loads(line) for line in out.read_text().splitlines()], done

    def damage(self, table: str, cell: str, name: str, written: object) -> None:
        """On disk, of one rollout."""
        key = "key" if table == "sessions" else "session"
        with sqlite3.connect(self.data / "turngate.db") as db:
            which = f"{key}=(SELECT key FROM sessions WHERE id=?)"
            changed = db.execute(f"UPDATE {table} SET {cell}=? WHERE {which}", (written, self.ids[name]))
            assert changed.rowcount == 1
        db.close()

    def samples(self, session: str) -> list[Any]:
        """The rows of a session as the gateway's own API tells them."""
        with open_row_source(self.data) as rows:
            found: list[Any] = json.loads(msgspec.json.encode(rows(session, False), enc_hook=encode_array))
            return found

    def name(self, session: str) -> str:
        return next(name for name, known in self.ids.items() if known == session)


async def _recorded(r: Recording) -> None:
    """One group of four and what else there is: a good rollout of two turns, a bad one, one that forked, one that a fault ended."""
    async with r.serving() as g:
        await r.ended(await r.rollout("good", CALL, "It says hello."), 1.0, resolved=True)
        await r.ended(await r.rollout("bad", "I do not know."), 0.0, resolved=False)
        forked = await r.rollout("forked", CALL)
        first = await r.ask(forked, [*ASKED, user("Again.")], CALL)
        await r.ask(forked, [*ASKED, user("Again."), first.message(), result(first.calls[0], "one")], "One.")
        await r.ask(forked, [*ASKED, user("Again."), first.message(), result(first.calls[0], "two")], "Two, too.")
        await r.ended(forked, 0.5)
        await r.ended(await r.rollout("fault", CALL), None, "infrastructure fault")
        unscored = await r.rollout("unscored", "Hm.")
        await g.seal(unscored.id)
        await r.rollout("open", CALL)
        await g.cancel((await r.rollout("cancelled", CALL)).id)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    made = Recording(tmp_path_factory.mktemp("made") / "data", Path(), {})
    asyncio.run(_recorded(made))
    return made


@pytest.fixture
def made(once: Recording, tmp_path: Path) -> Recording:
    """A copy for each test."""
    shutil.copytree(once.data, tmp_path / "data")
    (tmp_path / "out").mkdir()
    return Recording(tmp_path / "data", tmp_path / "out", dict(once.ids))


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_are_those_that_the_gateway_hands_out_with_advantages_over_the_group(made: Recording) -> None:
    rows, done = made.export("rows")
    assert {made.name(row["session"]) for row in rows} == {"good", "bad", "forked", "fault", "unscored"}
    for name in ("good", "bad", "forked"):
        mine = [row for row in rows if row["session"] == made.ids[name]]
        theirs = made.samples(made.ids[name])
        for field in ("ids", "mask", "logprobs", "spans", "branch"):
            assert [row[field] for row in mine] == [row[field] for row in theirs]
        assert sum(row["weight"] for row in mine) == pytest.approx(1.0)
    # Rewards 1, 0 and 0.5: mean 0.5, deviation sqrt(1/6). The fault and the unscored one have no say.
    by_name = {made.name(row["session"]): row for row in rows}
    deviation = (1 / 6) ** 0.5
    assert by_name["good"]["advantage"] == pytest.approx(0.5 / deviation, rel=1e-5)
    assert by_name["bad"]["advantage"] == pytest.approx(-0.5 / deviation, rel=1e-5)
    assert by_name["forked"]["advantage"] == 0.0
    for name in ("fault", "unscored"):
        assert (by_name[name]["reward"], by_name[name]["advantage"]) == (None, None), "not known is not 0"
    assert by_name["fault"]["kind"] == "infrastructure fault" and by_name["unscored"]["kind"] is None
    assert by_name["good"]["model"] == "m" and by_name["good"]["version_start"] == 0
    assert set(done.left_out) == {
        f"its session is {status} (--unfinished includes it)" for status in ("open", "cancelled")
    }


def test_the_baseline_is_over_the_whole_group_whatever_is_asked_for(made: Recording) -> None:
    rows, _ = made.export("rows", min_reward=1.0, advantage="leave_one_out")
    assert [(made.name(row["session"]), row["advantage"]) for row in rows] == [("good", 0.75)]


def test_parquet_has_the_same_rows_and_null_where_there_is_no_number(made: Recording) -> None:
    lines, _ = made.export("rows")
    columns, _ = made.export("rows", ".parquet")
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
def test_only_what_is_wanted_is_written(made: Recording, wanted: dict[str, Any], names: set[str]) -> None:
    rows, _ = made.export("rows", **wanted)
    assert {made.name(row["session"]) for row in rows} == names


# ── imitation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_conversations_have_tools_and_arguments_as_templates_want_them(made: Recording) -> None:
    records, done = made.export("sft", sessions=(made.ids["good"],))
    [record] = records
    assert [m["role"] for m in record["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    [call] = record["messages"][2]["tool_calls"]
    assert call["function"] == {"name": "read_file", "arguments": {"path": "a"}}
    assert record["messages"][3]["tool_call_id"] == call["id"] and record["messages"][4]["content"] == "It says hello."
    assert record["tools"] == TOOLS and record["reward"] == 1.0
    assert any("exact ids" in line for line in done.lost)


def test_in_no_form_is_a_turn_learned_twice_or_one_that_may_not_be(made: Recording) -> None:
    """The forked rollout has three branches, two of which share a turn."""
    only = {"sessions": (made.ids["forked"],)}
    trained = {s["node"] for row in made.samples(made.ids["forked"]) for s in row["spans"] if s["trained"]}
    assert len(trained) == 4
    completions, _ = made.export("sft", form="completions", **only)
    assert sorted(one["turn"] for one in completions) == sorted(trained)
    assert all(one["completion"][0]["role"] == "assistant" and len(one["completion"]) == 1 for one in completions)
    tokens, _ = made.export("sft", form="tokens", **only)
    rows = {row["branch"]: row for row in made.samples(made.ids["forked"])}
    for one in tokens:
        row, size = rows[one["branch"]], len(one["input_ids"])
        assert one["input_ids"] == row["ids"][:size] and one["assistant_masks"] == [int(m) for m in row["mask"][:size]]
        assert one["labels"] == [i if m else -100 for i, m in zip(row["ids"], row["mask"], strict=True)][:size]
        assert not any(row["mask"][size:]), "nothing that is learned is cut off"
    messages, done = made.export("sft", **only)
    assert len(messages) == 2, "in the third, a turn that the second has would be learned again"
    assert [count for why, count in done.left_out.items() if "a row with an untrained assistant message" in why] == [1]


async def test_what_may_not_be_reinforced_may_be_imitated_if_that_is_asked_for(made: Recording) -> None:
    async with made.serving():
        session = await made.rollout("biased", "Hello.", sampling={"top_p": 0.5})
        await made.ended(session, 1.0)
    only = {"sessions": (session.id,)}
    for format in ("rows", "sft", "verl", "slime"):
        with pytest.raises(ConfigError, match=r"1 rollout yielded no records, .*1 × it has nothing to train on"):
            made.export(format, **only)  # its distribution was not the policy's own
    for form in ("messages", "completions", "tokens"):
        [record] = made.export("sft", form=form, imitate=True, **only)[0]
        assert record["session"] == session.id
    assert tokenizer().decode([i for i in record["labels"] if i >= 0]).startswith("Hello.")


async def test_a_turn_that_was_cut_short_is_not_imitated(made: Recording) -> None:
    async with made.serving():
        session = await made.rollout("short")
        await made.ask(session, [*ASKED], "Once upon", close=False)
        await made.ended(session, 1.0)
    with pytest.raises(ConfigError, match="1 rollout yielded no records"):
        made.export("sft", imitate=True, sessions=(session.id,))


async def test_rejection_keeps_what_earned_it(made: Recording) -> None:
    async with made.serving():
        await made.ended(await made.rollout("shorter", "Hello."), 1.0)

    def kept(**choices: Any) -> list[str]:
        return [made.name(one["session"]) for one in made.export("rejection", **choices)[0]]

    assert kept() == ["good", "shorter"], "a reward of 1 where nothing else is said"
    assert kept(keep="best") == ["shorter"], "of equals the one that took fewer tokens"
    assert kept(min_reward=0.5, form="tokens").count("forked") == 3
    assert kept(min_reward=0.0).count("bad") == 1


# ── preferences ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pairs_answer_the_same_prompt_and_the_better_one_is_chosen(made: Recording) -> None:
    pairs, _ = made.export("dpo")
    [pair] = [one for one in pairs if one["chosen_session"] == made.ids["good"]]
    assert pair["prompt"] == ASKED and pair["rejected"] == [{"role": "assistant", "content": "I do not know."}]
    assert pair["chosen"][0]["tool_calls"][0]["function"]["name"] == "read_file" and pair["tools"] == TOOLS
    assert (pair["chosen_reward"], pair["rejected_reward"]) == (1.0, 0.0)


def test_pairs_in_tokens_go_to_the_end_and_mask_what_is_not_the_models(made: Recording) -> None:
    [pair] = made.export("dpo", form="tokens", margin=1.0)[0]
    for which, name in (("chosen", "good"), ("rejected", "bad")):
        [row] = made.samples(made.ids[name])
        start = len(pair["prompt_ids"])
        assert pair["prompt_ids"] + pair[f"{which}_ids"] == row["ids"]
        assert pair[f"{which}_mask"] == [int(m) for m in row["mask"][start:]]
    assert 0 in pair["chosen_mask"], "the tool's result"
    assert made.export("dpo", ".parquet", form="tokens", margin=1.0)[0] == [pair]


async def test_rollouts_whose_prompts_differ_make_no_pair(made: Recording) -> None:
    async with made.serving():
        await made.ended(await made.rollout("other", "No.", asked=[user("Something else.")]), -5.0)
    pairs, done = made.export("dpo", pairs=99)
    assert made.ids["other"] not in {one["rejected_session"] for one in pairs}
    assert [count for why, count in done.left_out.items() if "prompts differ" in why] and pairs


@pytest.mark.promise(9)
def test_where_there_are_no_pairs_it_is_said_why_and_nothing_is_replaced(made: Recording) -> None:
    with pytest.raises(ConfigError, match=r"5 rollouts yielded no records, .*1 × pairs .* less than 5 \(--margin\)"):
        made.export("dpo", margin=5.0)
    assert list(made.out.iterdir()) == []
    (made.out / "out.jsonl").write_text("before")
    with pytest.raises(ConfigError, match="1 × groups without two different rewards"):
        made.export("dpo", sessions=(made.ids["good"],))
    with pytest.raises(ConfigError, match="left out: 1 × its reward is unknown"):
        made.export("dpo", sessions=(made.ids["unscored"],), groups=("run.t",))
    assert (made.out / "out.jsonl").read_text() == "before"


# ── other trainers ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_verl_has_prompt_and_response_of_one_length_each(made: Recording) -> None:
    records, done = made.export("verl", unscored="drop")
    assert {made.name(one["extra_fields"]["session"]) for one in records} == {"good", "bad", "forked"}
    for one in records:
        row = next(
            row
            for row in made.samples(one["extra_fields"]["session"])
            if row["branch"] == one["extra_fields"]["branch"]
        )
        first = len(one["prompt_ids"])
        end = first + len(one["response_ids"])
        assert one["prompt_ids"] + one["response_ids"] == row["ids"][:end]
        assert one["response_mask"] == [int(m) for m in row["mask"][first:end]] and one["response_mask"][0] == 1
        assert not any(row["mask"][:first]) and not any(row["mask"][end:])
        for got, known in zip(one["response_logprobs"], row["logprobs"][first:end], strict=True):
            assert got == (0.0 if known is None else known)
        assert one["uid"] == "run.t" and one["reward_score"] == one["extra_fields"]["reward"]
    assert any("0.0" in line for line in done.lost), "it is told"
    assert len(made.export("verl", ".parquet", unscored="drop")[0]) == len(records)


SLIME = (
    "group_index index prompt tokens response response_length label reward loss_mask weight_versions rollout_log_probs "
)
SLIME += "remove_sample status metadata"


def test_slime_samples_have_its_fields_and_lengths(made: Recording) -> None:
    records, _ = made.export("slime")
    assert {made.name(one["metadata"]["session"]) for one in records} == {"good", "bad", "forked", "unscored"}
    for one in records:
        assert list(one) == SLIME.split()
        size = one["response_length"]
        assert len(one["loss_mask"]) == len(one["rollout_log_probs"]) == size <= len(one["tokens"])
        trained = [t for t, m in zip(one["tokens"][-size:], one["loss_mask"], strict=True) if m]
        [row] = [r for r in made.samples(one["metadata"]["session"]) if r["branch"] == one["metadata"]["branch"]]
        assert trained == [i for i, m in zip(row["ids"], row["mask"], strict=True) if m]
        assert one["status"] == "completed"
    assert len({one["group_index"] for one in records}) == 1 and len({one["index"] for one in records}) == len(records)
    # However many rows a session has: its key and the row's last node are all that is in it.
    assert {one["index"] % 2**24 for one in records} == {one["metadata"]["branch"] for one in records}
    unscored = next(one for one in records if made.name(one["metadata"]["session"]) == "unscored")
    assert unscored["reward"] is None


# What Harbor's models (0.25.0, `extra="forbid"`) know; held against them by hand, see docs/export.md.
TRAJECTORY = {"schema_version", "session_id", "trajectory_id", "agent", "steps", "final_metrics", "extra"}
STEP = {"step_id", "timestamp", "source", "message", "reasoning_content", "tool_calls", "observation", "metrics"}
STEP |= {"is_copied_context", "llm_call_count", "extra"}
AGENTS_ONLY = {"reasoning_content", "tool_calls", "metrics"}
METRICS = {"prompt_tokens", "completion_tokens", "prompt_token_ids", "completion_token_ids", "logprobs", "extra"}


def assert_atif(one: Any) -> None:
    assert set(one) <= TRAJECTORY | {"subagent_trajectories"} and one["schema_version"] == "ATIF-v1.8"
    assert set(one["agent"]) <= {"name", "version", "model_name", "tool_definitions"}
    assert [step["step_id"] for step in one["steps"]] == list(range(1, len(one["steps"]) + 1))
    for step in one["steps"]:
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
    embedded = one.get("subagent_trajectories", [])
    assert len({sub["trajectory_id"] for sub in embedded}) == len(embedded)
    for sub in embedded:
        assert_atif(sub)


async def test_atif_has_every_branch_in_words_and_tokens(made: Recording) -> None:
    async with made.serving():
        broken = await made.rollout("broken", '<tool_call>\n{"name": "read_file", "arguments": [1]}\n</tool_call>')
        await made.ended(broken, 0.0)
    found = {made.name(one["session_id"]): one for one in made.export("atif", "")[0]}
    assert set(found) == {"good", "bad", "forked", "fault", "unscored", "broken"}
    for one in found.values():
        assert_atif(one)
    good = found["good"]
    assert [step["source"] for step in good["steps"]] == ["system", "user", "agent", "agent"]
    assert good["steps"][2]["observation"]["results"][0]["content"] == "hello"
    assert good["agent"] == {"name": "tester", "version": "1.2", "model_name": "m", "tool_definitions": TOOLS}
    assert good["extra"]["rollout"]["reward"] == 1.0 and found["unscored"]["extra"]["rollout"]["reward"] is None
    [row] = made.samples(made.ids["good"])
    turns = [step["metrics"] for step in good["steps"] if "metrics" in step]
    ids = [i for turn in turns for i in turn["extra"]["new_prompt_token_ids"] + turn["completion_token_ids"]]
    assert ids == row["ids"], "nothing of the tokens is lost"
    assert [p for turn in turns for p in turn["logprobs"]] == [p for p in row["logprobs"] if p is not None]
    every = [found["forked"], *found["forked"]["subagent_trajectories"]]
    fresh = [
        s["metrics"]["extra"]["node"]
        for one in every
        for s in one["steps"]
        if "metrics" in s and not s.get("is_copied_context")
    ]
    assert len(every) == 3 and len(fresh) == len(set(fresh)) == 4
    whole = made.export("atif", prompt_ids=True, sessions=(made.ids["good"],))[0][0]["steps"][3]["metrics"]
    assert whole["prompt_token_ids"] + whole["completion_token_ids"] == row["ids"]


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_export_that_fails_leaves_what_was_there(made: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    before, _ = made.export("rows")
    real, count = Store.load, 0

    def failing(*given: Any) -> Any:
        nonlocal count
        count += 1
        if count > 2:
            raise RuntimeError("power cut")
        return real(*given)

    monkeypatch.setattr(Store, "load", failing)
    with pytest.raises(RuntimeError, match="power cut"):
        made.export("sft")
    assert [json.loads(line) for line in (made.out / "out.jsonl").read_text().splitlines()] == before
    assert [path.name for path in made.out.iterdir()] == ["out.jsonl"]
    assert (made.out / "out.jsonl").stat().st_mode & 0o077 == 0, "what agents said is their owner's"


async def test_one_group_at_a_time_is_in_memory(made: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    async with made.serving():
        for n in range(12):
            await made.ended(await made.rollout(f"more-{n}", "Hm."), 0.0, group=f"more.{n // 2}")
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
        _, done = made.export(format, groups=("more.*",))
        assert done.rollouts == 12 and done.groups == 6 and most <= 4, "two of a group, and two that are just left"


async def test_half_a_character_breaks_no_file(made: Recording) -> None:
    async with made.serving() as g:
        session = await made.rollout("half")
        body = b'{"model":"m","messages":[{"role":"user","content":"\\ud83d cut"}]}'
        made.answers.append(say("Yes."))
        headers = {"authorization": f"Bearer {session.key}", "content-type": "application/json"}
        response = await g.http().post("/v1/chat/completions", content=body, headers=headers)
        assert response.status_code == 200, response.text
        await made.ended(session, 1.0)
    [record] = made.export("sft", sessions=(session.id,))[0]
    assert record["messages"][0]["content"].endswith(" cut")


async def test_what_no_reader_can_follow_costs_no_other_record(made: Recording) -> None:
    """An agent may put anything into its tools and arguments, so deep that readers of JSON give up."""
    deep: Any = {}
    for _ in range(300):
        deep = {"x": deep}
    async with made.serving() as g:
        session = await made.rollout("deep")
        made.answers.append(say(calls(("read_file", deep))))
        heard = await g.ask(session.key, ASKED, tools=TOOLS)
        assert heard.calls
        await made.ended(session, 1.0)
    records, _ = made.export("sft", min_reward=1.0)
    arguments = next(one for one in records if one["session"] == session.id)["messages"][2]["tool_calls"][0][
        "function"
    ]["arguments"]
    assert isinstance(arguments, str) and json.loads(arguments) == deep, "left as the model wrote it"
    with pytest.raises(UnwritableRecord):
        encode_json({"tools": _nested(3000)})


def _nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("format", "suffix", "choices", "line"),
    [
        ("tfrecord", ".jsonl", {}, "format must be one of rows, sft, .*, not 'tfrecord'"),
        ("rows", ".csv", {}, "out must be a .jsonl or .parquet file, not .*csv"),
        ("sft", ".parquet", {}, "out: conversations cannot be written to a Parquet file"),
        (
            "sft",
            ".jsonl",
            {"form": "rows"},
            "as must be one of messages, completions, tokens for format sft, not 'rows'",
        ),
        ("rows", ".jsonl", {"form": "tokens"}, "as does not apply to format rows; leave out --as"),
        ("verl", ".jsonl", {"prompt_ids": True}, "prompt_ids does not apply to format verl; leave out --prompt-ids"),
        ("dpo", ".jsonl", {"pairs": 0}, "pairs must be at least 1, not 0"),
        (
            "rows",
            ".jsonl",
            {"groups": ("nobody",)},
            r"data: no rollout in the folder matches --group nobody \(it contains 7 rollouts\); change",
        ),
        (
            "rows",
            ".jsonl",
            {"min_reward": 5.0, "resolved": True},
            r"no rollout .* matches --min-reward 5 --resolved \(it contains 7 .*\); change",
        ),
        (
            "rows",
            ".jsonl",
            {"sessions": ("a", "z*")},
            r"no rollout .* matches --session a --session z\* \(it contains 7 .*\); change the filters",
        ),
        (
            "atif",
            "",
            {"tasks": ("u",), "unscored": "drop"},
            r"no rollout .* matches --task u --unscored drop \(it contains 7 .*\); change",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    made: Recording, format: str, suffix: str, choices: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        made.export(format, suffix, **choices)
    assert list(made.out.iterdir()) == []


def test_without_pyarrow_it_is_said_what_to_install(made: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.trainers.export.files.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"requires pyarrow; run pip install 'turngate\[parquet\]'"):
        made.export("rows", ".parquet")
    assert list(made.out.iterdir()) == []


async def test_a_reward_that_nobody_can_reckon_with_is_left_out_and_costs_no_other(made: Recording) -> None:
    async with made.serving():
        for number, reward in enumerate((1e308, -1e308, 1e31)):
            await made.ended(await made.rollout(f"huge {number}", CALL), reward)
    for choice in ("normalised", "leave_one_out", "none"):
        records, done = made.export("rows", advantage=choice)
        assert {made.name(one["session"]) for one in records} == {"good", "bad", "forked", "unscored", "fault"}
        assert done.left_out["its reward is too large to compute with"] == 3
        assert all(abs(one["advantage"]) < 2 for one in records if one["advantage"] is not None)
    for format in ("verl", "slime", "dpo"):
        assert made.export(format)[1].left_out["its reward is too large to compute with"] == 3
    assert any("huge" in made.name(one["session"]) for one in made.export("sft")[0])


async def test_no_two_trajectories_are_one_file(made: Recording) -> None:
    async with made.serving() as g:
        for name in ("a:1", "a_1", "a.1", "a-1", "x" + ":" * 127):
            session = await g.open(id=name)
            await made.ask(session, ASKED, "Yes.")
            await g.seal(name)
    records, done = made.export("atif", suffix="")
    assert len(records) == done.records
    assert {"a:1", "a_1", "a.1", "a-1"} < {one["session_id"] for one in records}


@pytest.mark.promise(9)
def test_a_damaged_trace_is_left_out_and_told(made: Recording) -> None:
    with sqlite3.connect(made.data / "turngate.db") as db:
        db.execute(
            "UPDATE nodes SET ids=zeroblob(8) WHERE session=(SELECT key FROM sessions WHERE id=?)", (made.ids["bad"],)
        )
    db.close()
    rows, done = made.export("rows", unscored="drop")
    assert {made.name(row["session"]) for row in rows} == {"good", "forked"}
    assert done.left_out["its trace is damaged on disk"] == 1
    assert np.isclose([r["advantage"] for r in rows if made.name(r["session"]) == "good"], 1.0, atol=1e-4)


@pytest.mark.parametrize("written", ["{", "{}", b"\xff", 5])
def test_a_damaged_outcome_is_left_out_and_told(made: Recording, written: Any) -> None:
    made.damage("outcomes", "outcome", "bad", written)
    for format in ("rows", "sft", "verl", "slime", "atif", "rejection"):
        records, done = made.export(format)
        assert records and made.ids["bad"] not in json.dumps(records)
        assert done.left_out["its outcome is damaged on disk"] == 1
    assert "its outcome is damaged on disk" not in made.export("rows", sessions=(made.ids["good"],))[1].left_out
    with pytest.raises(
        ConfigError, match=r"no rollout .* \(it contains 7 rollouts\); left out: 1 × its outcome is damaged on disk"
    ):
        made.export("rows", sessions=(made.ids["bad"],))


@pytest.mark.parametrize("written", ["{", b"\xff"])
def test_damaged_settings_are_left_out_and_told(made: Recording, written: Any) -> None:
    made.damage("sessions", "config", "bad", written)
    records, done = made.export("rows")
    assert {made.name(one["session"]) for one in records} == {"good", "forked", "unscored", "fault"}
    assert done.left_out["its settings are damaged on disk"] == 1
    assert "its settings are damaged on disk" not in made.export("rows", sessions=(made.ids["good"],))[1].left_out


def test_all_that_is_there_may_be_left_out(made: Recording) -> None:
    with sqlite3.connect(made.data / "turngate.db") as db:
        db.execute("UPDATE sessions SET config='{'")
    db.close()
    with pytest.raises(
        ConfigError,
        match=r"no rollout .* can be exported \(it contains 7 rollouts\); left out: 7 × its settings are damaged",
    ):
        made.export("rows")


@pytest.mark.parametrize("field", ["groups", "tasks", "sessions"])
def test_one_name_alone_is_not_taken_letter_by_letter(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"{field} must be a tuple of names, such as \('zz\*',\), not a string"):
        RolloutFilter(**{field: "zz*"})


def test_paths_may_be_text_and_a_slash_at_the_end_is_a_folder(made: Recording) -> None:
    out = f"{made.out}/rows.jsonl"
    assert export(str(made.data), out, ExportChoices(format="rows")).out == Path(out)
    before = Path(out).read_bytes()
    with pytest.raises(ConfigError, match=r"out: .*rows.jsonl/ is a folder, but rows are written to a single file"):
        export(str(made.data), f"{out}/", ExportChoices(format="rows"))
    with pytest.raises(ConfigError, match=r"out: .*rows.jsonl is a file, but a folder is needed"):
        export(str(made.data), f"{out}/", ExportChoices(format="atif"))
    assert Path(out).read_bytes() == before
    assert export(str(made.data), f"{made.out}/v1.0/", ExportChoices(format="atif")).records == 5
    assert len(list((made.out / "v1.0").iterdir())) == 5


def test_trajectories_that_were_there_before_are_counted(made: Recording) -> None:
    _, first = made.export("atif", "", sessions=(made.ids["good"],))
    assert (first.replaced, first.replaced_files, first.other_files) == (False, 0, 0)
    _, second = made.export("atif", "", sessions=(made.ids["bad"],))
    assert (second.replaced, second.replaced_files, second.other_files) == (False, 0, 1)
    _, third = made.export("atif", "", sessions=(made.ids["good"], made.ids["forked"]))
    assert (third.replaced, third.replaced_files, third.other_files) == (True, 1, 1)


async def test_log_probabilities_that_the_scripted_engine_made_up_are_noted(made: Recording) -> None:
    for format in ("rows", "verl", "slime", "atif"):
        [note] = made.export(format, sessions=(made.ids["good"], made.ids["forked"]))[1].notes
        assert note == f"2 rollouts: {SYNTHETIC_NOTE}"
    assert made.export("verl")[1].notes == (f"4 rollouts: {SYNTHETIC_NOTE}",)  # and not the one that is left out
    assert made.export("sft")[1].notes == ()  # it has none
    async with made.serving() as g:
        session = await g.open()
        turn = say("As sampled.")
        made.answers.append(msgspec.structs.replace(turn, logprobs=[-0.25] * len(turn.ids)))
        await g.ask(session.key, ASKED)
        await g.seal(session.id)
    assert made.export("rows", sessions=(session.id,))[1].notes == ()
