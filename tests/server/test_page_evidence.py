"""Test one rollout on the web page: its tree and forks, conversation, tokens and export."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import kit, page_kit
from tests.engines.providers import PROVIDERS
from tests.kit import gateway, say, tool, user
from tests.server.test_observe import SCRIPT, converse, scene
from tests.server.test_page import fetch, log_in
from tests.speed import scaled
from turngate.render import Tokenizer
from turngate.server.web.view_cache import load_decoder
from turngate.store.outcomes import RecordedOutcome
from turngate.store.store import Store
from turngate.trace.pass_at_k import pass_at_k
from turngate.trace.training_report import TrainingReport
from turngate.trainers.export import ExportChoices, RolloutFilter, export
from turngate.types import ID_DTYPE
from turngate.views.groups import summarize_group
from turngate.views.overview import Overview, show_group
from turngate.views.rollout_entry import RolloutRow
from turngate.views.tokens import decode_tokens

GROUP = f"{page_kit.BATCH}.long-task"


def array(ids: list[int]) -> Any:
    return np.array(ids, ID_DTYPE)


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """Encode each byte as its own token."""
    table = tokenizer.vocabulary.table
    assert table is not None
    return [table.index(bytes([byte])) for byte in raw]


# ── characters ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_character_split_over_tokens_is_a_run(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), *byte_ids(tokenizer, "€".encode()), *tokenizer.encode("b")]
    decoded = decode_tokens(tokenizer, array(ids))
    assert decoded.text == ["a", None, None, None, "b"] and decoded.runs == [(1, 4, "€")]
    assert [decoded.end(place) for place in range(6)] == [0, 1, 4, 4, 4, 5], "no part ends inside a character"


@pytest.mark.parametrize(
    ("raw", "text", "runs"),
    [
        (b"\xe2\x82", [None, None], [(0, 2, None)]),  # cut off at the end
        (b"\xe2x", [None, "x"], [(0, 1, None)]),  # incomplete
        (b"\x82x", [None, "x"], [(0, 1, None)]),  # no start byte
        (b"\xe2\xc3\xa9", [None, None, None], [(0, 1, None), (1, 3, "é")]),  # another one starts
        (b"\xff\xfe", [None, None], [(0, 1, None), (1, 2, None)]),
        (b"\xf0\x9f\x99\x82", [None] * 4, [(0, 4, "🙂")]),
        (b"", [], []),
    ],
)
def test_invalid_utf8_is_a_run_without_text(
    tokenizer: Tokenizer, raw: bytes, text: list[str | None], runs: list[tuple[int, int, str | None]]
) -> None:
    decoded = decode_tokens(tokenizer, array(byte_ids(tokenizer, raw)))
    assert (decoded.text, decoded.runs) == (text, runs)


def test_id_outside_vocabulary_has_no_text(tokenizer: Tokenizer) -> None:
    [euro, *rest] = byte_ids(tokenizer, "€".encode())
    decoded = decode_tokens(tokenizer, array([10_000_000, *tokenizer.encode("a"), euro, 10_000_000, *rest]))
    assert decoded.text == [None, "a", None, None, None, None]
    assert decoded.runs == [(0, 1, None), (2, 3, None), (3, 4, None), (4, 5, None), (5, 6, None)]


@settings(deadline=None)  # a busy machine
@given(st.lists(st.integers(0, 4200), max_size=60))
def test_text_and_runs_match_token_bytes(ids: list[int]) -> None:
    """Each token is in exactly one place, and the text shown matches the token bytes."""
    tokenizer = kit.tokenizer()
    decoded = decode_tokens(tokenizer, array(ids))
    assert len(decoded.text) == len(ids)
    covered = {place for first, past, _ in decoded.runs for place in range(first, past)}
    assert covered == {place for place, text in enumerate(decoded.text) if text is None}
    for place, text in enumerate(decoded.text):
        assert text is None or text.encode() == tokenizer.bytes_of(ids[place])
    for first, past, text in decoded.runs:
        token_bytes = tokenizer.all_bytes_of(ids[first:past])
        assert text is None or text.encode() == token_bytes
        if text is None:
            with pytest.raises(UnicodeDecodeError):
                (token_bytes or b"\xff").decode()


@pytest.mark.needs("tokenizers")
def test_decoded_text_is_complete() -> None:
    tokenizer = load_decoder(kit.real_tokenizer("qwen3"))
    text = "naïve 漢字 🙂👩‍👩‍👧‍👦 ไทย العربية \U0001f9ea ½ end"
    decoded = decode_tokens(tokenizer, array(tokenizer.encode(text)))
    runs = {first: text for first, _, text in decoded.runs}
    assert (
        "".join(runs.get(place, "") or "" if piece is None else piece for place, piece in enumerate(decoded.text))
        == text
    )


# ── long rollouts ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_long_rollout_is_paged(tmp_path: Path) -> None:
    page_kit.add_long_rollout(tmp_path)
    async with page_kit.serve(tmp_path) as g:
        client = await log_in(g)
        header = await fetch(client, "rollouts/long")
        assert header["totals"]["turns"] == 198 and header["totals"]["tokens"] > 95_000 and header["readable"]
        assert header["stages"][0] == {"stage": "sandbox", "at": header["stages"][0]["at"], "seconds": 1.0}
        assert header["logs"] == {"stdout": "ok\n", "verifier": "3 passed\n"}
        assert header["can"]["retry"] == {"ok": False, "why": "it already has an outcome: graded"}
        trace = (await g.admin.get("/admin/sessions/long/trace")).json()["nodes"]
        stored = {node["id"]: node for node in trace}
        seen: dict[int, list[int]] = {}
        following: dict[str, int] | None = {}
        sizes = []
        while following is not None:
            page = await fetch(client, "rollouts/long/tokens", limit=7001, **following)
            following = page["next"]
            for part in page["nodes"]:
                assert part["from"] == len(seen.get(part["id"], ()))
                seen.setdefault(part["id"], []).extend(part["ids"])
                _check_part(part, stored[part["id"]])
            sizes.append(sum(len(part["ids"]) for part in page["nodes"]))
        assert seen == {node["id"]: node["ids"] for node in trace}
        assert (
            all(7001 <= size <= 7010 for size in sizes[:-1])
            and sum(sizes) == page["total"] == header["totals"]["tokens"]
        )
        tree = await fetch(client, "rollouts/long/tree")
        branch = await fetch(client, "rollouts/long/tokens", branch=tree["main"], limit=20_000)
        assert branch["total"] == tree["branches"][0]["tokens"] == 50_000
        conversation, after = [], 0
        while True:
            page = await fetch(client, "rollouts/long/messages", after=after, limit=150)
            conversation += page["nodes"]
            after = page["next"]
            if not page["more"]:
                break
        assert [node["id"] for node in conversation] == [node["id"] for node in trace]


def _check_part(part: dict[str, Any], node: dict[str, Any]) -> None:
    """Check that a part agrees with the admin API and that its text matches its tokens."""
    start, count = part["from"], len(part["ids"])
    assert len(part["text"]) == count and part["kind"] == node["kind"]
    if part["logprobs"] is not None:
        assert np.allclose(part["logprobs"], node["logprobs"][start : start + count], atol=1e-6)
    runs = {first: text for first, _, text in part["runs"]}
    text = "".join(runs.get(n, "") or "" if piece is None else piece for n, piece in enumerate(part["text"]))
    assert text == kit.tokenizer().decode(part["ids"]).replace("\ufffd", "")
    assert set(part["bytes"]) == {str(n) for n, piece in enumerate(part["text"]) if piece is None}


async def test_tree_shows_fork_causes_and_positions(tmp_path: Path) -> None:
    page_kit.add_long_rollout(tmp_path, turns=40, tokens=8000)
    async with page_kit.serve(tmp_path) as g:
        client = await log_in(g)
        tree = await fetch(client, "rollouts/long/tree")
        nodes = {node["id"]: node for node in tree["nodes"]}
        forks = {fork["cause"]: fork for fork in tree["forks"]}
        assert set(forks) == {"retry", "compaction", "subagent"}
        retry, compaction = forks["retry"], forks["compaction"]
        assert nodes[retry["from"]]["role"] == "aborted" and retry["was"]["text"] == "Lo"
        assert retry["at"] == nodes[retry["node"]]["start"]
        assert compaction["at"] == 8 and compaction["was"]["id"] != compaction["now"]["id"]
        assert nodes[compaction["node"]]["parent"] is None
        assert [branch["role"] for branch in tree["branches"]] == ["main", "main", "aborted", "side", "subagent"]
        kinds = {
            node["role"]: node["evidence"].partition(":")[0] for node in tree["nodes"] if node["kind"] == "sampled"
        }
        assert kinds == {"main": "structure", "side": "structure", "subagent": "signal", "aborted": "delivery"}
        trained = {node["id"] for node in tree["nodes"] if node.get("trained")}
        rows = (await g.admin.get("/admin/sessions/long/samples")).json()["samples"]
        assert trained == {span["node"] for row in rows for span in row["spans"] if span["trained"]}
        assert {nodes[span["node"]]["row"] for row in rows[1:2] for span in row["spans"] if span["trained"]} == {1}
        reasons = {node["reason"] for node in tree["nodes"] if node["kind"] == "sampled" and not node["trained"]}
        assert reasons == {"role side", "role aborted"}
        evidence = await fetch(client, "group/evidence", name=GROUP)
        [row] = evidence["rollouts"]
        known = [p for node in (await g.turns("long")) for p in node["logprobs"]]
        assert row["entropy"] == pytest.approx(-sum(known) / len(known)) == pytest.approx(evidence["entropy"])
        assert row["versions"] == [0, 1, 2, 3] and row["rows"] == len(rows)
        drift = {cause["cause"]: cause for cause in evidence["drift"]}
        assert (
            drift["compaction"]["forks"] == 1 and drift["compaction"]["tokens"] == nodes[compaction["node"]]["tokens"]
        )


async def test_conversation_with_tools_and_thinking() -> None:
    thought = "<think>\nI look.\n</think>\n\n" + kit.calls(("read_file", {"path": "a.py"}))
    async with gateway([say(thought), say("Done.")]) as g:
        client = await log_in(g)
        session = await g.open(metadata={"agent": "pi"})
        question_messages = [user("Mend <b>it</b> " + "x" * 30_000)]
        first = await g.ask(session.key, question_messages, tools=[tool()])
        await g.ask(
            session.key,
            [*question_messages, first.message(), kit.result(first.calls[0], "<script>1</script>")],
            tools=[tool()],
        )
        page = await fetch(client, f"rollouts/{session.id}/messages")
        question, turn, answer, last = page["nodes"]
        [message] = question["messages"]
        assert message["cut"] == {"content": 30_015} and len(message["content"]) < 21_000
        whole = await fetch(client, f"rollouts/{session.id}/messages", node=question["id"])
        assert whole["nodes"][0]["messages"][0]["content"] == question_messages[0]["content"]
        assert turn["messages"][0]["reasoning"].strip() == "I look."
        [call] = turn["messages"][0]["tool_calls"]
        assert (call["name"], json.loads(call["arguments"])) == ("read_file", {"path": "a.py"})
        assert answer["messages"][0] == {"role": "tool", "tool_call_id": call["id"], "content": "<script>1</script>"}
        assert (last["turn"], last["role"], last["trained"], last["finish"]) == (2, "main", True, "stop")
        tree = await fetch(client, f"rollouts/{session.id}/tree")
        assert tree["nodes"][1]["label"] == "I look. → read_file" and tree["forks"] == []


@pytest.mark.parametrize("dialect", ["responses", "messages", "gemini", "chat"])
async def test_observed_conversation_has_no_tokens(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without token ids from the endpoint, there is a conversation but no invented tokens."""
    async with scene(PROVIDERS[0](*SCRIPT), dialect, monkeypatch) as s:
        await converse(s.agent)
        client = await log_in(s.gateway)
        page = await fetch(client, f"rollouts/{s.session.id}/messages")
        turns = [node for node in page["nodes"] if node["kind"] == "sampled"]
        assert [turn["messages"][0]["content"] for turn in turns] == [scripted.text for scripted in SCRIPT]
        assert [call["name"] for call in turns[0]["messages"][0]["tool_calls"]] == ["read_file", "list_files"]
        results = [m["content"] for node in page["nodes"] for m in node["messages"] if m["role"] == "tool"]
        assert results == ["the text", "a b", "the text"]
        tokens = await fetch(client, f"rollouts/{s.session.id}/tokens")
        assert all(part["text"] is None and not part["trained"] for part in tokens["nodes"]) and not tokens["readable"]
        tree = await fetch(client, f"rollouts/{s.session.id}/tree")
        assert (
            [node["reason"] for node in tree["nodes"] if node["kind"] == "sampled"]
            == [turns[0]["reason"]] * 3
            != [""] * 3
        )
        assert (await fetch(client, f"rollouts/{s.session.id}"))["totals"]["rows"] == 0


@pytest.mark.parametrize(
    ("trained", "signal"),
    [
        ((True, True, True, True), True),
        ((False, True, False, True), False),
        ((True, True, False, False), True),
        ((True, False, False, False), None),
        ((False, False, False, False), None),
    ],
)
def test_only_trained_rollouts_give_a_group_a_signal(trained: tuple[bool, ...], signal: bool | None) -> None:
    rows = [
        RolloutRow(
            id=str(n), kind="graded", reward=float(n % 2), warning="" if ok else TrainingReport(amount="none").warning
        )
        for n, ok in enumerate(trained)
    ]
    assert summarize_group("g", rows).signal is signal
    shown = show_group("g", [(row, n) for n, row in enumerate(rows)], dict(enumerate(trained)), ())
    assert shown["signal"] is signal and shown["graded"] == 4


async def test_group_statistics(tmp_path: Path) -> None:
    page_kit.add_rollouts(tmp_path, 40, n=8)
    async with page_kit.serve(tmp_path) as g:
        client = await log_in(g)
        name = f"{page_kit.BATCH}.task-0001"
        group = await fetch(client, "group", name=name)
        rewards = [row["reward"] for row in group["rollouts"]]
        known = [reward for reward in rewards if reward is not None]
        assert group["graded"] == len(known) and None in rewards and group["signal"] is True
        mean = sum(known) / len(known)
        assert group["mean_reward"] == pytest.approx(mean)
        for row in group["rollouts"]:
            assert (row["advantage"] is None) == (row["reward"] is None)
            if row["reward"] is not None:
                assert row["advantage"] == pytest.approx((row["reward"] - mean) / (group["std_reward"] + 1e-6))
        passed = sum(reward >= 1 for reward in known)
        assert group["pass_at"][0] == {"k": 1, "estimate": pytest.approx(passed / len(known))}
        assert group["pass_at"][-1] == {"k": len(known), "estimate": 1.0}
        for point in group["pass_at"]:
            assert point["estimate"] == pytest.approx(pass_at_k(len(known), passed, point["k"]))
        [row] = [row for row in (await fetch(client, "groups"))["groups"] if row["group"] == name]
        assert row["mean_reward"] == group["mean_reward"] and row["rewards"] == rewards


# ── export and damage ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_page_export_matches_exporter(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    async with gateway([say("One."), say("Two.")], data=data, model="m") as g:
        client = await log_in(g)
        for number, reward in enumerate((1.0, 0.0, None)):
            session = await g.open(id=f"s{number}", metadata={"group": "g/1 <x>", "task": "t", "agent": "pi"})
            reply = await g.ask(session.key, [user("Hi")])
            await g.ask(session.key, [user("Hi"), reply.message(), user("On")])
            await g.seal(session.id)
            kind = "graded" if reward is not None else "infrastructure fault"
            g.app.outcomes.record(session.id, RecordedOutcome(kind=kind, reward=reward, group="g/1 <x>", task="t"))
        rows = await client.get("/page/api/export", params={"group": "g/1 <x>", "format": "rows"})
        exported = [json.loads(line) for line in rows.text.splitlines()]
        out = tmp_path / "rows.jsonl"
        export(data, out, ExportChoices(format="rows", wanted=RolloutFilter(groups=("g/1 <x>",))))
        assert exported == [json.loads(line) for line in out.read_text().splitlines()]
        alone = await client.get("/page/api/rollouts/s1/export")
        assert [json.loads(line) for line in alone.text.splitlines()] == [r for r in exported if r["session"] == "s1"]
        trace = await client.get("/page/api/rollouts/s1/export", params={"format": "trace"})
        assert trace.json() == await g.trace("s1")
        messages = await client.get("/page/api/rollouts/s1/export", params={"format": "messages"})
        [conversation] = [json.loads(line) for line in messages.text.splitlines()]
        assert [m["content"] for m in conversation["messages"]] == ["Hi", "One.", "On", "Two."]


async def test_export_of_rollout_that_is_deleted_meanwhile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    list_members, loop = Overview.members, asyncio.get_running_loop()

    async with gateway([say("One.")]) as g:

        def delete_and_list(overview: Overview, store: Store, name: str) -> list[tuple[str, int]]:
            asyncio.run_coroutine_threadsafe(g.admin.delete("/admin/sessions/s0"), loop).result(scaled(10))
            return list_members(overview, store, name)

        client = await log_in(g)
        for number in range(2):
            session = await g.open(id=f"s{number}", metadata={"group": "g"})
            await g.ask(session.key, "Hi")
            await g.seal(session.id)
        monkeypatch.setattr(Overview, "members", delete_and_list)
        refused = await client.get("/page/api/rollouts/s0/export")
        assert refused.status_code == 404 and "was deleted or changed its group" in refused.text


async def test_ids_without_tokenizer_have_no_text(tmp_path: Path) -> None:
    page_kit.add_long_rollout(tmp_path, turns=6, tokens=300)
    with page_kit.open_builder(tmp_path) as builder:
        builder._db.execute("UPDATE sessions SET vocabulary='elsewhere'")
    async with page_kit.serve(tmp_path) as g:
        client = await log_in(g)
        header = await fetch(client, "rollouts/long")
        assert header["readable"] is False and "does not record where" in header["unreadable"]
        page = await fetch(client, "rollouts/long/tokens")
        assert page["readable"] is False and page["nodes"][0]["text"] is None and page["nodes"][0]["ids"]


async def test_damaged_trace_does_not_break_group_evidence(tmp_path: Path) -> None:
    page_kit.add_rollouts(tmp_path, 16, n=8)
    with page_kit.open_builder(tmp_path) as builder:
        builder._db.execute(
            "UPDATE nodes SET ids=x'00000000' WHERE session=(SELECT key FROM sessions WHERE id='r00001')"
        )
    async with page_kit.serve(tmp_path) as g:
        client = await log_in(g)
        evidence = await fetch(client, "group/evidence", name=f"{page_kit.BATCH}.task-0000")
        errors = {row["id"]: row["error"] for row in evidence["rollouts"]}
        assert "damaged on disk" in errors.pop("r00001") and set(errors.values()) == {""}
        assert (await client.get("/page/api/rollouts/r00001/tree")).status_code == 503
        assert (await fetch(client, "rollouts"))["total"] == 17
