"""`turngate show` as a person meets it: the conversation, its roles, branches and rows; its tokens; and nothing that bites."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.kit import process, ran, refused
from tests.kit import Running, calls, gateway, result, say, say_pieces, tokenizer, tool, user
from turngate.render import BUILTIN_TOKENIZER
from turngate.store.outcomes import RecordedOutcome

EVIL = "\x1b[31mred\x1b]0;title\x07 \x9b2J \u202etxt.exe\u202c [bold]x[/] :bomb: \x00\r\x08 <b>"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
async def g(data: Path) -> AsyncIterator[Running]:
    """A gateway that serves the folder all the while."""
    script = lambda request, n: say([calls(("read_file", {"path": "a"})), "It says hello.", "Third.", "Fourth."][n % 4])  # noqa: E731
    async with gateway(script, data=data) as running:
        yield running


async def shown(*arguments: str | Path) -> str:
    done = await asyncio.to_thread(ran, "show", *arguments)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    return done.stdout


# ── the conversation ────────────────────────────────────────────────────────────────────────────────────────────────


async def conversed(g: Running) -> str:
    """A question, a tool call and its result, an answer."""
    session = await g.open(metadata={"agent": "tester", "task": "t1"}, model="m")
    history = [{"role": "system", "content": "Be brief."}, user("Read a.")]
    heard = await g.ask(session.key, history, tools=[tool()])
    history += [heard.message(), result(heard.calls[0], "hello")]
    await g.ask(session.key, history, tools=[tool()])
    return session.id


async def test_a_conversation_is_printed_in_order(g: Running, data: Path) -> None:
    session = await conversed(g)
    text = await shown(session, "--data", data)
    wanted = [f"session {session}", "open", "agent tester · task t1", "2 (2 main)", "main · conversation", "system"]
    wanted += ["Be brief.", "user", "Read a.", "assistant, turn 1", "→ read_file", '{"path": "a"}', "tool", "hello"]
    wanted += ["assistant, turn 2", "stop · main", "It says hello.", "Rows"]
    at = 0
    for words in wanted:
        assert words in text[at:], f"{words!r} is missing after {text[:at][-80:]!r}:\n{text}"
        at = text.index(words, at)
    [row] = [line for line in text.splitlines() if line.startswith("│ 1 ")]
    [sample] = await g.samples(session)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        *("1", str(len(sample["ids"])), str(sum(sample["mask"])), "2", "")
    ]


async def test_a_session_is_found_by_its_id_the_beginning_of_it_or_as_the_last(g: Running, data: Path) -> None:
    first, second = (await g.open(id="abc-1")), (await g.open(id="abd-2"))
    await g.ask(first.key, "Hi")
    for wanted, found in (("abc-1", "abc-1"), ("abc", "abc-1"), ("abd", "abd-2"), ("last", "abd-2")):
        assert f"session {found}" in await shown(wanted, "--data", data)
    assert "session abd-2" in await shown("--data", data)
    assert "No rows: this trace contains nothing to train on." in await shown(second.id, "--data", data)
    refusal = await asyncio.to_thread(refused, "show", "ab", "--data", data)
    assert refusal == "session prefix 'ab' matches 2 sessions; use a longer prefix"
    refusal = await asyncio.to_thread(refused, "show", "zzz", "--data", data)
    assert refusal == "unknown session 'zzz'; the newest one is abd-2"


async def test_an_id_that_is_the_beginning_of_another(g: Running, data: Path) -> None:
    for name in ("run", "run-2"):
        await g.open(id=name)
    assert "session run\n" in await shown("run", "--data", data)


def test_a_folder_with_nothing_in_it(data: Path) -> None:
    assert refused("show", "--data", data) == f"data: no turngate.db in {data}; pass the --data folder of a gateway"
    data.mkdir()
    (data / "turngate.db").write_bytes(b"nonsense" * 1000)
    assert refused("show", "--data", data).startswith(f"data: {data}/turngate.db cannot be read")
    assert "TURNGATE_ADMIN_KEY is not set" in refused("show", "--gateway", "http://127.0.0.1:9")
    refusal = refused("show", "--gateway", "http://127.0.0.1:9", env={"TURNGATE_ADMIN_KEY": "k" * 20})
    assert refusal.startswith("gateway: http://127.0.0.1:9 cannot be reached")


async def test_a_folder_without_sessions(g: Running, data: Path) -> None:
    refusal = await asyncio.to_thread(refused, "show", "--data", data)
    assert refusal == "no sessions have been recorded here"


async def test_by_a_gateways_address(g: Running, data: Path) -> None:
    session = await conversed(g)
    key = {"TURNGATE_ADMIN_KEY": g.app.admin_key}
    for wanted in (session, session[:6], "last"):
        done = await asyncio.to_thread(ran, "show", wanted, "--gateway", g.root, env=key)
        assert done.exit_code == 0, done.output
        assert done.stdout.splitlines()[2:] == (await shown(session, "--data", data)).splitlines()[2:]
    done = await asyncio.to_thread(ran, "show", "nosuch", "--gateway", g.root, env=key)
    assert done.exit_code == 2 and "unknown session 'nosuch'" in done.stderr


async def test_after_the_gateway_has_gone(data: Path) -> None:
    async with gateway([say("Hello.")], data=data) as g:
        session = await g.open()
        await g.ask(session.key, "Hi")
        await g.seal(session.id)
    text = await shown("--data", data)
    assert "status  sealed, opened " in text and "Hello." in text


# ── roles and branches ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_outcome_that_is_damaged_is_shown_as_such_with_all_the_rest(g: Running, data: Path) -> None:
    session = await conversed(g)
    await g.seal(session)
    g.app.outcomes.record(session, RecordedOutcome(kind="graded", reward=1.0))
    with g.app.store._writing() as db:
        db.execute("UPDATE outcomes SET outcome='{'")
    text = await shown("last", "--data", data)
    assert "outcome its outcome is damaged on disk" in text and "It says hello." in text
    told = json.loads(await shown("last", "--data", data, "--json"))["summary"]
    assert (told["outcome"], told["damaged"]) == (None, "its outcome is damaged on disk")


async def test_settings_that_are_damaged_hide_no_other_session(g: Running, data: Path) -> None:
    session, newer = await conversed(g), await conversed(g)
    with g.app.store._writing() as db:
        db.execute("UPDATE sessions SET config='{' WHERE id=?", (session,))
    assert f"session {newer}" in await shown("last", "--data", data)
    done = await asyncio.to_thread(ran, "show", session, "--data", data)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"session {session}: its settings are damaged on disk" in done.stderr


async def branched(g: Running) -> str:
    """A main conversation with a retried turn, a title, and a sub-agent."""
    session = await g.open(id="branched")
    await g.ask(session.key, [{"role": "system", "content": "Make a title."}, user("Title of: Read a.")])
    history = [{"role": "system", "content": "Be brief."}, user("Read a.")]
    await g.ask(session.key, history, tools=[tool()])
    await g.ask(session.key, history, tools=[tool()], extra_headers={"x-stainless-retry-count": "1"})
    helper = [{"role": "system", "content": "You are a helper."}, user("Look into b.")]
    await g.ask(session.key, helper, tools=[tool("look")])
    return session.id


async def test_roles_branches_and_rows(g: Running, data: Path) -> None:
    text = await shown(await branched(g), "--data", data)
    assert "turns   4 (1 side, 1 superseded, 1 main, 1 subagent)" in text or re.search(
        r"turns   4 \(.*1 superseded", text
    )
    rules = [line.strip("─ ") for line in text.splitlines() if line.endswith("──")]
    assert rules == [
        *("side · conversation", "main · conversation"),
        *("superseded · branch from the beginning", "subagent · conversation"),
    ]
    # The retried turn is the one that counts: it stands in the conversation, and the other beside it.
    main = text[text.index("main · conversation") : text.index("superseded · branch")]
    assert "· retry" in main and "superseded" not in main.partition("\n")[2]
    rows = [line for line in text.splitlines() if re.match(r"│ \d ", line)]
    samples = await g.samples("branched", keep_empty=True)
    assert len(rows) == len(samples)
    trained = [int(line.split("│")[3]) for line in rows]
    assert trained == [sum(sample["mask"]) for sample in samples]
    assert "1 × " in text[text.index("Rows") :]  # why what is not trained is not


async def test_a_history_that_was_edited_shows_what_the_agent_says_was_said(g: Running, data: Path) -> None:
    session = await g.open()
    heard = await g.ask(session.key, [user("Read a.")], tools=[tool()])
    edited = {**heard.message(), "content": "Words that were never said.", "tool_calls": None}
    await g.ask(session.key, [user("Read a."), edited, user("And?")], tools=[tool()])
    text = await shown("--data", data)
    assert "Words that were never said." in text and "edited" in text


# ── machines and long texts ─────────────────────────────────────────────────────────────────────────────────────────


async def test_as_json(g: Running, data: Path) -> None:
    session = await branched(g)
    view = json.loads(await shown(session, "--data", data, "--json"))
    assert sorted(view) == ["nodes", "rows", "summary"]
    assert view["summary"]["id"] == session
    turns = [node for node in view["nodes"] if node["kind"] == "sampled"]
    assert [turn["ids"] for turn in turns] == [turn["ids"] for turn in await g.turns(session)]
    assert [turn["logprobs"] for turn in turns] == [turn["logprobs"] for turn in await g.turns(session)]


async def test_long_messages_are_cut_unless_they_are_asked_for(g: Running, data: Path) -> None:
    session = await g.open()
    await g.ask(session.key, "begin " + "middle " * 2000 + "end.")
    text = await shown("--data", data)
    assert "begin" in text and "end." in text and "characters (--full shows them)" in text
    assert len(text) < 5000
    full = await shown("--data", data, "--full")
    assert full.count("middle") == 2000
    assert "begin " + "middle " * 2000 + "end." in full  # in one piece: a search finds it


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_tokens_with_their_log_probabilities_where_there_are_no_colours(g: Running, data: Path) -> None:
    session = await conversed(g)
    text = await shown(session, "--data", data, "--tokens")
    last = (await g.turns(session))[-1]
    assert f"It│{last['logprobs'][0]:.2f}│" in text
    assert "<|im_start|>system" in text  # the context, as the model saw it
    assert text.count("│-") == sum(len(turn["ids"]) for turn in await g.turns(session))


def _colours(raw: str) -> list[tuple[int, int, str]]:
    """Red and green of what is printed on a coloured ground, with the words."""
    found = re.findall(r"\x1b\[(?:[0-9;]*;)?48;2;(\d+);(\d+);30m([^\x1b]*)\x1b", raw)
    return [(int(red), int(green), words) for red, green, words in found]


@pytest.mark.process
async def test_tokens_on_a_terminal_are_coloured_by_log_probability(data: Path) -> None:
    words = {"sure": -0.001, " maybe": -1.0, " never": -9.0}
    scores = [score for word, score in words.items() for _ in tokenizer().encode(word)]
    turn = say_pieces([*words], logprobs=[*scores, -0.5])
    async with gateway([turn], data=data) as g:
        session = await g.open()
        await g.ask(session.key, "Hi")
    with process("show", "--tokens", "--data", data, columns=70) as running:
        assert await asyncio.to_thread(running.ended) == 0
    colours = list(dict.fromkeys((red, green) for red, green, _ in _colours(running.output)))
    assert "".join(text for _, _, text in _colours(running.output)).startswith("sure maybe never"), running.output
    likely, unsure, unlikely = colours[:3]
    assert likely[0] < unsure[0] < unlikely[0]  # redder, the less likely
    assert likely[1] > unsure[1] > unlikely[1]  # and less green
    assert "Traceback" not in running.output


async def test_tokens_need_the_tokenizer_that_they_were_recorded_with(g: Running, data: Path) -> None:
    session = await conversed(g)
    env = {"TURNGATE_ADMIN_KEY": g.app.admin_key}
    refusal = await asyncio.to_thread(refused, "show", session, "--tokens", "--gateway", g.root, env=env)
    assert refusal == "the tokenizer that the session was recorded with is not on this machine; pass --tokenizer PATH"
    words = ("show", session, "--tokens", "--gateway", g.root, "--tokenizer", BUILTIN_TOKENIZER)
    done = await asyncio.to_thread(ran, *words, env=env)
    assert done.exit_code == 0 and "│-" in done.stdout
    refusal = await asyncio.to_thread(refused, "show", session, "--tokens", "--data", data, "--tokenizer", "/no/where")
    assert "does not exist" in refusal


# ── what others wrote ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.process
@pytest.mark.parametrize("columns", [0, 60], ids=["piped", "on a terminal"])
@pytest.mark.parametrize("how", [[], ["--tokens"], ["--full"]], ids=["text", "tokens", "full"])
async def test_control_characters_do_nothing(how: list[str], columns: int, data: Path) -> None:
    """Of the user, the tools, the model, its tool calls, and of what the session is called."""
    model = say(EVIL + calls((EVIL.replace("\x00", ""), {"a": EVIL})))
    async with gateway([model, say("Fine.")], data=data) as g:
        session = await g.open(metadata={"agent": EVIL, "task": EVIL}, model=EVIL)
        heard = await g.ask(session.key, [{"role": "system", "content": EVIL}, user(EVIL)], tools=[tool()], model=EVIL)
        said = {"role": "assistant", "content": heard.content or None}
        await g.ask(session.key, [{"role": "system", "content": EVIL}, user(EVIL), said, user(EVIL)], model=EVIL)
    with process("show", *how, "--data", data, columns=columns) as running:
        assert await asyncio.to_thread(running.ended) == 0
    raw = running.output
    ours = re.sub(r"\x1b\[[0-9;]*m", "", raw).replace("\r\n", "\n") if columns else raw  # colours of our own
    for character in "\x1b\x07\x9b\x00\x08\r\u202e":
        assert character not in ours, (character, ours)
    assert "␛" in ours and "\\x9b" in ours and "\\u202e" in ours
    assert ":bomb:" in ours and "[bold]x[/]" in ours  # as it was written


@pytest.mark.process
async def test_it_can_be_piped_to_somebody_who_does_not_read_to_the_end(g: Running, data: Path) -> None:
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
