"""`turngate show`: conversation, roles, branches, rows, tokens, and escaping."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cli.kit import run_cli, run_rejected, start_cli
from tests.engines.standins import StandIn, answer_stream, event, serving
from tests.kit import Running, calls, gateway, result, say, say_pieces, tokenizer, tool, user
from tests.server.test_page import fetch, log_in
from turngate.render import BUILTIN_TOKENIZER
from turngate.store.outcomes import RecordedOutcome

UNSAFE = "\x1b[31mred\x1b]0;title\x07 \x9b2J \u202etxt.exe\u202c [bold]x[/] :bomb: \x00\r\x08 <b>"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
async def g(data: Path) -> AsyncIterator[Running]:
    """A gateway that serves the folder during the test."""
    script = lambda request, n: say([calls(("read_file", {"path": "a"})), "It says hello.", "Third.", "Fourth."][n % 4])  # noqa: E731
    async with gateway(script, data=data) as running:
        yield running


async def show(*arguments: str | Path) -> str:
    done = await asyncio.to_thread(run_cli, "show", *arguments)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    return done.stdout


# ── the conversation ────────────────────────────────────────────────────────────────────────────────────────────────


async def converse(g: Running) -> str:
    """Record a question, a tool call with its result, and an answer."""
    session = await g.open(metadata={"agent": "tester", "task": "t1"}, model="m")
    history = [{"role": "system", "content": "Be brief."}, user("Read a.")]
    reply = await g.ask(session.key, history, tools=[tool()])
    history += [reply.message(), result(reply.calls[0], "hello")]
    await g.ask(session.key, history, tools=[tool()])
    return session.id


async def test_conversation_is_printed_in_order(g: Running, data: Path) -> None:
    session = await converse(g)
    text = await show(session, "--data", data)
    expected = [f"session {session}", "open", "agent tester · task t1", "2 (2 main)", "main · conversation", "system"]
    expected += ["Be brief.", "user", "Read a.", "assistant, turn 1", "→ read_file", '{"path": "a"}', "tool", "hello"]
    expected += ["assistant, turn 2", "stop · main", "It says hello.", "Rows"]
    at = 0
    for words in expected:
        assert words in text[at:], f"{words!r} is missing after {text[:at][-80:]!r}:\n{text}"
        at = text.index(words, at)
    [row] = [line for line in text.splitlines() if line.startswith("│ 1 ")]
    [sample] = await g.samples(session)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        *("1", str(len(sample["ids"])), str(sum(sample["mask"])), "2", "")
    ]


async def test_session_is_found_by_id_prefix_or_last(g: Running, data: Path) -> None:
    first, second = (await g.open(id="abc-1")), (await g.open(id="abd-2"))
    await g.ask(first.key, "Hi")
    for expected, found in (("abc-1", "abc-1"), ("abc", "abc-1"), ("abd", "abd-2"), ("last", "abd-2")):
        assert f"session {found}" in await show(expected, "--data", data)
    assert "session abd-2" in await show("--data", data)
    assert "No rows: this trace contains nothing to train on." in await show(second.id, "--data", data)
    refusal = await asyncio.to_thread(run_rejected, "show", "ab", "--data", data)
    assert refusal == "'ab' is a prefix of 2 session ids; pass a longer prefix"
    refusal = await asyncio.to_thread(run_rejected, "show", "zzz", "--data", data)
    assert refusal == "session 'zzz' was not found; the newest session is abd-2"


async def test_exact_id_wins_over_prefix(g: Running, data: Path) -> None:
    for name in ("run", "run-2"):
        await g.open(id=name)
    assert "session run\n" in await show("run", "--data", data)


def test_missing_store_and_unreachable_gateway(data: Path) -> None:
    assert run_rejected("show", "--data", data) == (
        f"data: no recordings in {data}; run this command in the folder where you ran `turngate run` or `turngate serve`, or pass the same "
        "--data folder"
    )
    data.mkdir()
    (data / "turngate.db").write_bytes(b"nonsense" * 1000)
    assert run_rejected("show", "--data", data).startswith(f"data: {data}/turngate.db cannot be read")
    assert "TURNGATE_ADMIN_KEY is not set" in run_rejected("show", "--gateway", "http://127.0.0.1:9")
    refusal = run_rejected("show", "--gateway", "http://127.0.0.1:9", env={"TURNGATE_ADMIN_KEY": "k" * 20})
    assert refusal == "gateway: nothing is listening at http://127.0.0.1:9; start a gateway with `turngate serve`"


async def test_engine_fault_is_given_as_the_reason(data: Path) -> None:
    """Once it is recorded as the outcome. The page gives the same reason."""
    async with gateway([say("", fail_before=True)] * 3, data=data) as g:
        session = await g.open()
        with pytest.raises(openai.InternalServerError):
            await g.ask(session.key, "Hi")
        await g.seal(session.id)
        assert "no tokens are trained: no model call by the agent was answered; " in await show(
            session.id, "--data", data
        )
        fault = {"kind": "infrastructure fault", "message": "the connection to vllm failed"}
        assert (await g.admin.put(f"/admin/sessions/{session.id}/outcome", json=fault)).status_code == 200
        warning = "no tokens are trained: the rollout failed before its first turn (the connection to vllm failed)"
        assert f"warning {warning}; " in await show(session.id, "--data", data)
        header = await fetch(await log_in(g), f"rollouts/{session.id}")
        assert header["totals"]["warnings"][0].startswith(warning)


async def test_folder_without_sessions(g: Running, data: Path) -> None:
    refusal = await asyncio.to_thread(run_rejected, "show", "--data", data)
    assert refusal == "the store has no sessions; record one with `turngate run`"


async def test_show_from_gateway(g: Running, data: Path) -> None:
    session = await converse(g)
    key = {"TURNGATE_ADMIN_KEY": g.app.admin_key}
    for expected in (session, session[:6], "last"):
        done = await asyncio.to_thread(run_cli, "show", expected, "--gateway", g.root, env=key)
        assert done.exit_code == 0, done.output
        assert done.stdout.splitlines()[2:] == (await show(session, "--data", data)).splitlines()[2:]
    done = await asyncio.to_thread(run_cli, "show", "nosuch", "--gateway", g.root, env=key)
    assert done.exit_code == 2 and "session 'nosuch' was not found" in done.stderr


async def test_show_after_gateway_stopped(data: Path) -> None:
    async with gateway([say("Hello.")], data=data) as g:
        session = await g.open()
        await g.ask(session.key, "Hi")
        await g.seal(session.id)
    text = await show("--data", data)
    assert "status  sealed, opened " in text and "Hello." in text


# ── roles and branches ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_damaged_outcome_is_reported(g: Running, data: Path) -> None:
    session = await converse(g)
    await g.seal(session)
    g.app.outcomes.record(session, RecordedOutcome(kind="graded", reward=1.0))
    with g.app.store._writing() as db:
        db.execute("UPDATE outcomes SET outcome='{'")
    text = await show("last", "--data", data)
    assert "outcome its outcome is damaged on disk" in text and "It says hello." in text
    summary = json.loads(await show("last", "--data", data, "--json"))["summary"]
    assert (summary["outcome"], summary["damaged"]) == (None, "its outcome is damaged on disk")


async def test_damaged_settings_do_not_hide_other_sessions(g: Running, data: Path) -> None:
    session, newer = await converse(g), await converse(g)
    with g.app.store._writing() as db:
        db.execute("UPDATE sessions SET config='{' WHERE id=?", (session,))
    assert f"session {newer}" in await show("last", "--data", data)
    done = await asyncio.to_thread(run_cli, "show", session, "--data", data)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"session {session}: its settings are damaged on disk" in done.stderr


async def branch(g: Running) -> str:
    """Record a conversation with a retried turn, a title call and a sub-agent."""
    session = await g.open(id="branched")
    await g.ask(session.key, [{"role": "system", "content": "Make a title."}, user("Title of: Read a.")])
    history = [{"role": "system", "content": "Be brief."}, user("Read a.")]
    await g.ask(session.key, history, tools=[tool()])
    await g.ask(session.key, history, tools=[tool()], extra_headers={"x-stainless-retry-count": "1"})
    helper = [{"role": "system", "content": "You are a helper."}, user("Look into b.")]
    await g.ask(session.key, helper, tools=[tool("look")])
    return session.id


async def test_roles_branches_and_rows(g: Running, data: Path) -> None:
    text = await show(await branch(g), "--data", data)
    assert "turns   4 (1 side, 1 superseded, 1 main, 1 subagent)" in text or re.search(
        r"turns   4 \(.*1 superseded", text
    )
    rules = [line.strip("─ ") for line in text.splitlines() if line.endswith("──")]
    assert rules == [
        *("side · conversation", "main · conversation"),
        *("superseded · branch from the beginning", "subagent · conversation"),
    ]
    reasons = [line for line in text.splitlines() if line.startswith("why ")]
    assert [reason.partition(":")[0] for reason in reasons] == ["why side", "why superseded", "why subagent"]
    # The retry is part of the conversation; the superseded turn is a branch.
    main = text[text.index("main · conversation") : text.index("superseded · branch")]
    assert "· retry" in main and "superseded" not in main.partition("\n")[2]
    rows = [line for line in text.splitlines() if re.match(r"│ \d ", line)]
    samples = await g.samples("branched", keep_empty=True)
    assert len(rows) == len(samples)
    trained = [int(line.split("│")[3]) for line in rows]
    assert trained == [sum(sample["mask"]) for sample in samples]
    assert "1 × " in text[text.index("Rows") :]  # the reason why a turn is not trained


async def test_edited_history_is_shown(g: Running, data: Path) -> None:
    session = await g.open()
    reply = await g.ask(session.key, [user("Read a.")], tools=[tool()])
    edited = {**reply.message(), "content": "Words that were never said.", "tool_calls": None}
    await g.ask(session.key, [user("Read a."), edited, user("And?")], tools=[tool()])
    text = await show("--data", data)
    assert "Words that were never said." in text and "edited" in text


async def test_reason_of_template_fork_is_shown(data: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUILTIN_TOKENIZER, tmp_path / "tokenizer"))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ messages | length }} messages <b>\n")
    async with gateway([say("Hello."), say("Done.")], data=data, tokenizer=str(folder)) as g:
        session = await g.open()
        first = await g.ask(session.key, [user("Hi")])
        await g.ask(session.key, [user("Hi"), first.message(), user("And?")])
        context = [node for node in (await g.trace(session.id))["nodes"] if node["kind"] == "context"][-1]
        assert context["cause"] == "template" and "a user message after an answer: " in context["detail"]
        client = await log_in(g)
        forks = (await fetch(client, f"rollouts/{session.id}/tree"))["forks"]
        assert {(fork["cause"], fork["detail"]) for fork in forks} == {("template", context["detail"])}
    assert context["detail"][:60] in " ".join((await show("--data", data)).split())


# ── JSON and long messages ─────────────────────────────────────────────────────────────────────────────────────────


async def test_json_output(g: Running, data: Path) -> None:
    session = await branch(g)
    view = json.loads(await show(session, "--data", data, "--json"))
    assert sorted(view) == ["masked", "nodes", "rows", "summary"]
    assert view["summary"]["id"] == session
    turns = [node for node in view["nodes"] if node["kind"] == "sampled"]
    assert [turn["ids"] for turn in turns] == [turn["ids"] for turn in await g.turns(session)]
    assert [turn["logprobs"] for turn in turns] == [turn["logprobs"] for turn in await g.turns(session)]


async def test_long_messages_are_cut_without_full(g: Running, data: Path) -> None:
    session = await g.open()
    await g.ask(session.key, "begin " + "middle " * 2000 + "end.")
    text = await show("--data", data)
    assert "begin" in text and "end." in text and "--full shows them" in text
    assert len(text) < 5000
    full = await show("--data", data, "--full")
    assert full.count("middle") == 2000
    assert "begin " + "middle " * 2000 + "end." in full  # not wrapped, so that a search finds it


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_tokens_with_logprobs_without_colours(g: Running, data: Path) -> None:
    session = await converse(g)
    text = await show(session, "--data", data, "--tokens")
    last = (await g.turns(session))[-1]
    assert f"It│{last['logprobs'][0]:.2f}│" in text
    assert "<|im_start|>system" in text  # the prompt
    assert text.count("│-") == sum(len(turn["ids"]) for turn in await g.turns(session))


async def test_tokens_without_logprobs_are_marked_without_colours(data: Path) -> None:
    async with gateway([say_pieces(["sure"], null_logprobs=True)], data=data) as g:
        session = await g.open()
        await g.ask(session.key, "Hi")
        [turn] = await g.turns(session.id)
    text = await show("--data", data, "--tokens")
    assert "sure│?│" in text and text.count("│?│") == len(turn["ids"])
    assert "between two bars, or by '?' if it is unknown" in " ".join(text.split())


def _colours(raw: str) -> list[tuple[int, int, str]]:
    """Red, green and text of everything with a background colour."""
    found = re.findall(r"\x1b\[(?:[0-9;]*;)?48;2;(\d+);(\d+);30m([^\x1b]*)\x1b", raw)
    return [(int(red), int(green), words) for red, green, words in found]


@pytest.mark.process
async def test_tokens_are_coloured_by_logprob_on_terminal(data: Path) -> None:
    words = {"sure": -0.001, " maybe": -1.0, " never": -9.0}
    scores = [score for word, score in words.items() for _ in tokenizer().encode(word)]
    turn = say_pieces([*words], logprobs=[*scores, -0.5])
    async with gateway([turn], data=data) as g:
        session = await g.open()
        await g.ask(session.key, "Hi")
    with start_cli("show", "--tokens", "--data", data, columns=70) as running:
        assert await asyncio.to_thread(running.wait_for_exit) == 0
    colours = list(dict.fromkeys((red, green) for red, green, _ in _colours(running.output)))
    assert "".join(text for _, _, text in _colours(running.output)).startswith("sure maybe never"), running.output
    likely, unsure, unlikely = colours[:3]
    assert likely[0] < unsure[0] < unlikely[0]  # less likely is redder
    assert likely[1] > unsure[1] > unlikely[1]  # and less green
    assert "Traceback" not in running.output


async def test_tokens_need_recorded_tokenizer(g: Running, data: Path) -> None:
    session = await converse(g)
    env = {"TURNGATE_ADMIN_KEY": g.app.admin_key}
    refusal = await asyncio.to_thread(run_rejected, "show", session, "--tokens", "--gateway", g.root, env=env)
    assert refusal == "the session's tokenizer is unknown; pass --tokenizer PATH"
    words = ("show", session, "--tokens", "--gateway", g.root, "--tokenizer", BUILTIN_TOKENIZER)
    done = await asyncio.to_thread(run_cli, *words, env=env)
    assert done.exit_code == 0 and "│-" in done.stdout
    refusal = await asyncio.to_thread(
        run_rejected, "show", session, "--tokens", "--data", data, "--tokenizer", "/no/where"
    )
    assert "does not exist" in refusal


# ── untrusted text ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.sample(2)
@pytest.mark.process
@pytest.mark.parametrize("columns", [0, 60], ids=["piped", "on a terminal"])
@pytest.mark.parametrize("options", [[], ["--tokens"], ["--full"]], ids=["text", "tokens", "full"])
async def test_control_characters_are_escaped(options: list[str], columns: int, data: Path) -> None:
    """In messages, tool calls, and the model, agent and task names."""
    model = say(UNSAFE + calls((UNSAFE.replace("\x00", ""), {"a": UNSAFE})))
    async with gateway([model, say("Fine.")], data=data) as g:
        session = await g.open(metadata={"agent": UNSAFE, "task": UNSAFE}, model=UNSAFE)
        reply = await g.ask(
            session.key,
            [{"role": "system", "content": UNSAFE}, user(UNSAFE)],
            tools=[tool()],
            model=UNSAFE,
        )
        message = {"role": "assistant", "content": reply.content or None}
        await g.ask(
            session.key,
            [{"role": "system", "content": UNSAFE}, user(UNSAFE), message, user(UNSAFE)],
            model=UNSAFE,
        )
    with start_cli("show", *options, "--data", data, columns=columns) as running:
        assert await asyncio.to_thread(running.wait_for_exit) == 0
    raw = running.output
    ours = re.sub(r"\x1b\[[0-9;]*m", "", raw).replace("\r\n", "\n") if columns else raw  # our own colours
    for character in "\x1b\x07\x9b\x00\x08\r\u202e":
        assert character not in ours, (character, ours)
    assert "␛" in ours and "\\x9b" in ours and "\\u202e" in ours
    assert ":bomb:" in ours and "[bold]x[/]" in ours  # unchanged


async def test_reason_from_the_endpoint_is_escaped(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER_KEY", "sk-provider")
    candidate = {"content": {"parts": [{"text": "I'd"}]}, "finishReason": "SAFETY", "finishMessage": UNSAFE}
    async with (
        serving(StandIn(answer_stream(event({"candidates": [candidate]})))) as endpoint,
        gateway(observe="gemini", engine_url=[endpoint.url], engine_key_env="PROVIDER_KEY", data=data) as g,
    ):
        session = await g.open(mode="observe")
        await g.ask(session.key, "Hi")
    text = await show("--data", data)
    rows = text[text.index("Rows") :]
    assert "withheld the answer" in " ".join(rows.replace("│", " ").split())
    for character in "\x1b\x07\x9b\x00\x08\r\u202e":
        assert character not in text, (character, text)


@pytest.mark.process
async def test_closed_output_pipe_is_no_error(g: Running, data: Path) -> None:
    import subprocess
    import sys

    from tests.cli.kit import ROOT

    session = await g.open()
    await g.ask(session.key, "word " * 100_000)
    command = f"{sys.executable} -m turngate show --full --data {data} | head -1"
    done: Any = await asyncio.to_thread(
        lambda: subprocess.run(["/bin/sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    )
    assert done.stdout == f"session {session.id}\n" and "Traceback" not in done.stderr, done.stderr
