"""One rollout on the web page: its tree and why it forked, its conversation, its tokens character by character, what is saved of it."""

from __future__ import annotations

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
from tests.server.test_page import entered, told
from turngate.render import Tokenizer
from turngate.server.web.view_cache import load_decoder
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.pass_at_k import pass_at_k
from turngate.trainers.export import ExportChoices, RolloutFilter, export
from turngate.types import ID_DTYPE
from turngate.views.tokens import decode_tokens

GROUP = f"{page_kit.BATCH}.long-task"


def array(ids: list[int]) -> Any:
    return np.array(ids, ID_DTYPE)


def byte_ids(tokenizer: Tokenizer, spelled: bytes) -> list[int]:
    """One token for each byte."""
    table = tokenizer.vocabulary.table
    assert table is not None
    return [table.index(bytes([byte])) for byte in spelled]


# ── characters ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_character_of_several_tokens_is_none_of_them(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), *byte_ids(tokenizer, "€".encode()), *tokenizer.encode("b")]
    found = decode_tokens(tokenizer, array(ids))
    assert found.text == ["a", None, None, None, "b"] and found.runs == [(1, 4, "€")]
    assert [found.end(place) for place in range(6)] == [0, 1, 4, 4, 4, 5], "no part ends within a character"


@pytest.mark.parametrize(
    ("spelled", "text", "runs"),
    [
        (b"\xe2\x82", [None, None], [(0, 2, None)]),  # cut off at the end
        (b"\xe2x", [None, "x"], [(0, 1, None)]),  # never finished
        (b"\x82x", [None, "x"], [(0, 1, None)]),  # never begun
        (b"\xe2\xc3\xa9", [None, None, None], [(0, 1, None), (1, 3, "é")]),  # another one begins meanwhile
        (b"\xff\xfe", [None, None], [(0, 1, None), (1, 2, None)]),
        (b"\xf0\x9f\x99\x82", [None] * 4, [(0, 4, "🙂")]),
        (b"", [], []),
    ],
)
def test_what_never_becomes_a_character_is_told_as_such(
    tokenizer: Tokenizer, spelled: bytes, text: list[str | None], runs: list[tuple[int, int, str | None]]
) -> None:
    found = decode_tokens(tokenizer, array(byte_ids(tokenizer, spelled)))
    assert (found.text, found.runs) == (text, runs)


def test_an_id_that_is_past_the_vocabulary_has_no_text(tokenizer: Tokenizer) -> None:
    [euro, *rest] = byte_ids(tokenizer, "€".encode())
    found = decode_tokens(tokenizer, array([10_000_000, *tokenizer.encode("a"), euro, 10_000_000, *rest]))
    assert found.text == [None, "a", None, None, None, None]
    assert found.runs == [(0, 1, None), (2, 3, None), (3, 4, None), (4, 5, None), (5, 6, None)]


@settings(deadline=None)  # a busy machine
@given(st.lists(st.integers(0, 4200), max_size=60))
def test_pieces_and_runs_are_the_bytes_of_the_tokens(ids: list[int]) -> None:
    """Whatever was sampled: each token is in one place, and what is shown is spelled by its bytes."""
    tokenizer = kit.tokenizer()
    found = decode_tokens(tokenizer, array(ids))
    assert len(found.text) == len(ids)
    covered = {place for first, past, _ in found.runs for place in range(first, past)}
    assert covered == {place for place, text in enumerate(found.text) if text is None}
    for place, text in enumerate(found.text):
        assert text is None or text.encode() == tokenizer.bytes_of(ids[place])
    for first, past, text in found.runs:
        spelled = tokenizer.all_bytes_of(ids[first:past])
        assert text is None or text.encode() == spelled
        if text is None:
            with pytest.raises(UnicodeDecodeError):
                (spelled or b"\xff").decode()


@pytest.mark.needs("tokenizers")
def test_text_comes_back_whole() -> None:
    tokenizer = load_decoder(kit.real_tokenizer("qwen3"))
    text = "naïve 漢字 🙂👩‍👩‍👧‍👦 ไทย العربية \U0001f9ea ½ end"
    found = decode_tokens(tokenizer, array(tokenizer.encode(text)))
    runs = {first: told for first, _, told in found.runs}
    assert (
        "".join(runs.get(place, "") or "" if piece is None else piece for place, piece in enumerate(found.text)) == text
    )


# ── the long one ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_two_hundred_turns_and_a_hundred_thousand_tokens_come_in_parts(tmp_path: Path) -> None:
    page_kit.add_long_rollout(tmp_path)
    async with page_kit.serve(tmp_path) as g:
        client = await entered(g)
        header = await told(client, "rollouts/long")
        assert header["totals"]["turns"] == 198 and header["totals"]["tokens"] > 95_000 and header["readable"]
        assert header["stages"][0] == {"stage": "sandbox", "at": header["stages"][0]["at"], "seconds": 1.0}
        assert header["logs"] == {"stdout": "ok\n", "verifier": "3 passed\n"}
        assert header["can"]["retry"] == {"ok": False, "why": "it has been judged: graded"}
        trace = (await g.admin.get("/admin/sessions/long/trace")).json()["nodes"]
        stored = {node["id"]: node for node in trace}
        seen: dict[int, list[int]] = {}
        following: dict[str, int] | None = {}
        sizes = []
        while following is not None:
            page = await told(client, "rollouts/long/tokens", limit=7001, **following)
            following = page["next"]
            for part in page["nodes"]:
                assert part["from"] == len(seen.get(part["id"], ()))
                seen.setdefault(part["id"], []).extend(part["ids"])
                _hold(part, stored[part["id"]])
            sizes.append(sum(len(part["ids"]) for part in page["nodes"]))
        assert seen == {node["id"]: node["ids"] for node in trace}
        assert (
            all(7001 <= size <= 7010 for size in sizes[:-1])
            and sum(sizes) == page["total"] == header["totals"]["tokens"]
        )
        tree = await told(client, "rollouts/long/tree")
        branch = await told(client, "rollouts/long/tokens", branch=tree["main"], limit=20_000)
        assert branch["total"] == tree["branches"][0]["tokens"] == 50_000
        conversation, after = [], 0
        while True:
            page = await told(client, "rollouts/long/messages", after=after, limit=150)
            conversation += page["nodes"]
            after = page["next"]
            if not page["more"]:
                break
        assert [node["id"] for node in conversation] == [node["id"] for node in trace]


def _hold(part: dict[str, Any], node: dict[str, Any]) -> None:
    """A part of a node says what the admin API says of it, and its text is that of its tokens."""
    start, count = part["from"], len(part["ids"])
    assert len(part["text"]) == count and part["kind"] == node["kind"]
    if part["logprobs"] is not None:
        assert np.allclose(part["logprobs"], node["logprobs"][start : start + count], atol=1e-6)
    runs = {first: told for first, _, told in part["runs"]}
    text = "".join(runs.get(n, "") or "" if piece is None else piece for n, piece in enumerate(part["text"]))
    assert text == kit.tokenizer().decode(part["ids"]).replace("\ufffd", "")
    assert set(part["bytes"]) == {str(n) for n, piece in enumerate(part["text"]) if piece is None}


async def test_the_tree_says_why_it_forked_and_where(tmp_path: Path) -> None:
    page_kit.add_long_rollout(tmp_path, turns=40, tokens=8000)
    async with page_kit.serve(tmp_path) as g:
        client = await entered(g)
        tree = await told(client, "rollouts/long/tree")
        nodes = {node["id"]: node for node in tree["nodes"]}
        forks = {fork["cause"]: fork for fork in tree["forks"]}
        assert set(forks) == {"retry", "compaction", "subagent"}
        retry, compaction = forks["retry"], forks["compaction"]
        assert nodes[retry["from"]]["role"] == "aborted" and retry["was"]["text"] == "Lo"
        assert retry["at"] == nodes[retry["node"]]["start"]
        assert compaction["at"] == 8 and compaction["was"]["id"] != compaction["now"]["id"]
        assert nodes[compaction["node"]]["parent"] is None
        assert [branch["role"] for branch in tree["branches"]] == ["main", "main", "aborted", "side", "subagent"]
        trained = {node["id"] for node in tree["nodes"] if node.get("trained")}
        rows = (await g.admin.get("/admin/sessions/long/samples")).json()["samples"]
        assert trained == {span["node"] for row in rows for span in row["spans"] if span["trained"]}
        assert {nodes[span["node"]]["row"] for row in rows[1:2] for span in row["spans"] if span["trained"]} == {1}
        reasons = {node["reason"] for node in tree["nodes"] if node["kind"] == "sampled" and not node["trained"]}
        assert reasons == {"role side", "role aborted"}
        evidence = await told(client, "group/evidence", name=GROUP)
        [one] = evidence["rollouts"]
        known = [p for node in (await g.turns("long")) for p in node["logprobs"]]
        assert one["entropy"] == pytest.approx(-sum(known) / len(known)) == pytest.approx(evidence["entropy"])
        assert one["versions"] == [0, 1, 2, 3] and one["rows"] == len(rows)
        drift = {cause["cause"]: cause for cause in evidence["drift"]}
        assert (
            drift["compaction"]["forks"] == 1 and drift["compaction"]["tokens"] == nodes[compaction["node"]]["tokens"]
        )


async def test_a_real_conversation_with_tools_and_thinking() -> None:
    thought = "<think>\nI look.\n</think>\n\n" + kit.calls(("read_file", {"path": "a.py"}))
    async with gateway([say(thought), say("Done.")]) as g:
        client = await entered(g)
        session = await g.open(metadata={"agent": "pi"})
        asked = [user("Mend <b>it</b> " + "x" * 30_000)]
        first = await g.ask(session.key, asked, tools=[tool()])
        await g.ask(
            session.key, [*asked, first.message(), kit.result(first.calls[0], "<script>1</script>")], tools=[tool()]
        )
        page = await told(client, f"rollouts/{session.id}/messages")
        question, turn, answer, last = page["nodes"]
        [message] = question["messages"]
        assert message["cut"] == {"content": 30_015} and len(message["content"]) < 21_000
        whole = await told(client, f"rollouts/{session.id}/messages", node=question["id"])
        assert whole["nodes"][0]["messages"][0]["content"] == asked[0]["content"]
        assert turn["messages"][0]["reasoning"].strip() == "I look."
        [call] = turn["messages"][0]["tool_calls"]
        assert (call["name"], json.loads(call["arguments"])) == ("read_file", {"path": "a.py"})
        assert answer["messages"][0] == {"role": "tool", "tool_call_id": call["id"], "content": "<script>1</script>"}
        assert (last["turn"], last["role"], last["trained"], last["finish"]) == (2, "main", True, "stop")
        tree = await told(client, f"rollouts/{session.id}/tree")
        assert tree["nodes"][1]["label"] == "I look. → read_file" and tree["forks"] == []


@pytest.mark.parametrize("dialect", ["responses", "messages", "gemini", "chat"])
async def test_an_observed_conversation_in_every_dialect(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint gives no ids: there is a conversation, and no token is made up for it."""
    async with scene(PROVIDERS[0](*SCRIPT), dialect, monkeypatch) as s:
        await converse(s.agent)
        client = await entered(s.gateway)
        page = await told(client, f"rollouts/{s.session.id}/messages")
        turns = [node for node in page["nodes"] if node["kind"] == "sampled"]
        assert [turn["messages"][0]["content"] for turn in turns] == [says.text for says in SCRIPT]
        assert [call["name"] for call in turns[0]["messages"][0]["tool_calls"]] == ["read_file", "list_files"]
        results = [m["content"] for node in page["nodes"] for m in node["messages"] if m["role"] == "tool"]
        assert results == ["the text", "a b", "the text"]
        tokens = await told(client, f"rollouts/{s.session.id}/tokens")
        assert all(part["text"] is None and not part["trained"] for part in tokens["nodes"]) and not tokens["readable"]
        tree = await told(client, f"rollouts/{s.session.id}/tree")
        assert (
            [node["reason"] for node in tree["nodes"] if node["kind"] == "sampled"]
            == [turns[0]["reason"]] * 3
            != [""] * 3
        )
        assert (await told(client, f"rollouts/{s.session.id}"))["totals"]["rows"] == 0


async def test_what_a_group_comes_to(tmp_path: Path) -> None:
    page_kit.add_rollouts(tmp_path, 40, n=8)
    async with page_kit.serve(tmp_path) as g:
        client = await entered(g)
        name = f"{page_kit.BATCH}.task-0001"
        group = await told(client, "group", name=name)
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
        for one in group["pass_at"]:
            assert one["estimate"] == pytest.approx(pass_at_k(len(known), passed, one["k"]))
        [row] = [one for one in (await told(client, "groups"))["groups"] if one["group"] == name]
        assert row["mean_reward"] == group["mean_reward"] and row["rewards"] == rewards


# ── saved ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_rows_are_saved_as_the_exporter_writes_them(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    async with gateway([say("One."), say("Two.")], data=data, model="m") as g:
        client = await entered(g)
        for number, reward in enumerate((1.0, 0.0, None)):
            session = await g.open(id=f"s{number}", metadata={"group": "g/1 <x>", "task": "t", "agent": "pi"})
            heard = await g.ask(session.key, [user("Hi")])
            await g.ask(session.key, [user("Hi"), heard.message(), user("On")])
            await g.seal(session.id)
            kind = "graded" if reward is not None else "infrastructure fault"
            g.app.outcomes.record(session.id, RecordedOutcome(kind=kind, reward=reward, group="g/1 <x>", task="t"))
        rows = await client.get("/page/api/export", params={"group": "g/1 <x>", "format": "rows"})
        told_here = [json.loads(line) for line in rows.text.splitlines()]
        out = tmp_path / "rows.jsonl"
        export(data, out, ExportChoices(format="rows", wanted=RolloutFilter(groups=("g/1 <x>",))))
        assert told_here == [json.loads(line) for line in out.read_text().splitlines()]
        alone = await client.get("/page/api/rollouts/s1/export")
        assert [json.loads(line) for line in alone.text.splitlines()] == [r for r in told_here if r["session"] == "s1"]
        trace = await client.get("/page/api/rollouts/s1/export", params={"format": "trace"})
        assert trace.json() == await g.trace("s1")
        said = await client.get("/page/api/rollouts/s1/export", params={"format": "messages"})
        [conversation] = [json.loads(line) for line in said.text.splitlines()]
        assert [m["content"] for m in conversation["messages"]] == ["Hi", "One.", "On", "Two."]


async def test_ids_without_their_tokenizer_are_told_without_text(tmp_path: Path) -> None:
    page_kit.add_long_rollout(tmp_path, turns=6, tokens=300)
    with page_kit.open_builder(tmp_path) as builder:
        builder._db.execute("UPDATE sessions SET vocabulary='elsewhere'")
    async with page_kit.serve(tmp_path) as g:
        client = await entered(g)
        header = await told(client, "rollouts/long")
        assert header["readable"] is False and "not available here" in header["unreadable"]
        page = await told(client, "rollouts/long/tokens")
        assert page["readable"] is False and page["nodes"][0]["text"] is None and page["nodes"][0]["ids"]


async def test_a_damaged_trace_does_not_take_its_group_along(tmp_path: Path) -> None:
    page_kit.add_rollouts(tmp_path, 16, n=8)
    with page_kit.open_builder(tmp_path) as builder:
        builder._db.execute(
            "UPDATE nodes SET ids=x'00000000' WHERE session=(SELECT key FROM sessions WHERE id='r00001')"
        )
    async with page_kit.serve(tmp_path) as g:
        client = await entered(g)
        evidence = await told(client, "group/evidence", name=f"{page_kit.BATCH}.task-0000")
        errors = {one["id"]: one["error"] for one in evidence["rollouts"]}
        assert "damaged on disk" in errors.pop("r00001") and set(errors.values()) == {""}
        assert (await client.get("/page/api/rollouts/r00001/tree")).status_code == 503
        assert (await told(client, "rollouts"))["total"] == 17
