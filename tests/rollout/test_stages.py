"""A rollout from beginning to end: what becomes of it when all goes well, and whose fault it is when something does not."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.test_serve import process, written
from tests.kit import Gated, say, until
from tests.rollout.kit import Stage, open_stage, own_agent
from tests.sandboxes.kit import processes
from tests.speed import paced, scaled
from turngate.client.gateway import GatewayClient
from turngate.engines.scripted import ScriptedTurn
from turngate.errors import SandboxError
from turngate.rollout import stage_reporting
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.outcome import Outcome, RolloutProgress
from turngate.sandboxes.base import SandboxSpec
from turngate.sandboxes.local import LocalBackend
from turngate.tasks.task import Task

pytestmark = pytest.mark.process

ALL = ["sandbox", "files", "setup", "session", "relay", "launch", "agent", "seal", "collect", "clean", "done"]
NAP = f"63{os.getpid():07d}"  # a unique number of seconds, which identifies the process that sleeps
TWO_TURNS = 'first = ask("Hi")\nprint(first, ask("Hi", first, "More?"))\nopen("left.txt", "w").write("done")'

# The same, but after each turn it waits until the rollout has counted it: `touch_turn_file` creates a file in FOLDER.
TOLD_TURNS = """
def wait(turns):
    while not os.path.exists(f"FOLDER/{turns}"): time.sleep(0.02)
first = ask("Hi"); wait(1)
print(first, ask("Hi", first, "More?")); wait(2)
"""


def touch_turn_file(folder: Path, progress: RolloutProgress) -> None:
    (folder / str(progress.turns)).touch()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with open_stage([say("Hello."), say("And more.")] * 20) as stage:
        yield stage


# ── how an agent may end ────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_agent_that_does_its_work(stage: Stage) -> None:
    outcome = await stage.run(TWO_TURNS)
    assert (outcome.status, outcome.exit_code, outcome.fault, outcome.notes) == ("finished", 0, None, ())
    assert (outcome.turns, outcome.roles, outcome.rows, outcome.calls) == (2, {"main": 2}, 1, 2)
    assert outcome.sampled_tokens == sum(len(say(text).ids) for text in ("Hello.", "And more."))
    assert outcome.collected.stdout == "Hello. And more.\n"
    assert stage.read_work(outcome, "left.txt") == b"done"
    shown = await stage.gateway.show(outcome.session)
    assert (shown["status"], shown["stop"]) == ("sealed", "")
    facts = {"task": "test", "agent": "shell", "agent_version": "", "sandbox": "local", "group": "test"}
    assert shown["config"]["metadata"] == facts


async def test_the_stages_come_in_order_and_each_has_its_time(stage: Stage) -> None:
    outcome = await stage.run(TWO_TURNS)
    assert stage.stages == ALL
    assert list(outcome.seconds) == ALL[:-1]
    assert all(seconds >= 0 for seconds in outcome.seconds.values())


async def test_progress_counts_turns_as_they_come(stage: Stage, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    def watch(progress: RolloutProgress) -> None:
        seen.append((progress.stage, progress.turns, progress.sampled_tokens))
        touch_turn_file(tmp_path, progress)

    await stage.run(TOLD_TURNS.replace("FOLDER", str(tmp_path)), watch=watch)
    tokens = len(say("Hello.").ids)
    assert ("agent", 1, tokens) in seen
    assert seen[-1] == ("done", 2, tokens + len(say("And more.").ids))


async def test_what_is_known_of_an_outcome_can_be_written_down(stage: Stage) -> None:
    outcome = await stage.run(TWO_TURNS)
    written = json.loads(msgspec.json.encode(outcome))
    assert written["status"] == "finished" and written["session"] == outcome.session
    assert written["collected"]["folder"] == str(stage.folder / outcome.session)
    assert msgspec.convert(written, Outcome).seconds == outcome.seconds
    assert (written["kind"], written["reward"], written["grade"]) == (None, None, None)  # there is no grader


async def test_an_agent_that_fails(stage: Stage) -> None:
    outcome = await stage.run('ask("Hi")\nsys.exit("I give up")')
    assert (outcome.status, outcome.exit_code, outcome.fault) == ("failed", 1, None)
    assert outcome.collected.stderr == "I give up\n"
    assert outcome.turns == 1 and outcome.rows == 1  # what was recorded stays
    assert (await stage.gateway.show(outcome.session))["stop"] == "failed"


async def test_an_agent_that_is_killed(stage: Stage) -> None:
    outcome = await stage.run('ask("Hi")\nos.kill(os.getpid(), 9)')
    assert (outcome.status, outcome.exit_code, outcome.turns) == ("failed", 137, 1)


async def test_an_agent_that_runs_out_of_time(stage: Stage) -> None:
    """What it had until then is kept: the trace, its output, its files. Nothing of it runs on."""
    program = 'print(ask("Hi"), flush=True)\nopen("half", "w").write("x")\nos.system("sleep 6301 & sleep 6301")'
    outcome = await stage.run(program, timeout_s=paced(1.5))
    assert (outcome.status, outcome.exit_code, outcome.fault) == ("timed out", None, None)
    assert (outcome.turns, outcome.collected.stdout) == (1, "Hello.\n")
    assert stage.read_work(outcome, "half") == b"x"
    assert (await stage.gateway.show(outcome.session))["stop"] == "timed out"


async def test_an_agent_that_ends_in_the_middle_of_its_call(tmp_path: Path) -> None:
    async with open_stage(engine=Gated([say("A long story " * 20)], tokens=3)) as stage:
        call = 'http("POST", "/v1/chat/completions", {"stream": True, "messages": [{"role": "user", "content": "Hi"}]})'
        wait = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)"
        running = asyncio.create_task(stage.run(f"if os.fork() == 0: {call}\n{wait}\nos._exit(4)"))
        await until(lambda: running.done() or stage.gateway.gated.waiting, 30)
        (tmp_path / "go").touch()
        outcome = await running
        assert (outcome.status, outcome.exit_code) == ("failed", 4)
        assert outcome.roles == {"aborted": 1} and outcome.rows == 0


async def test_what_an_agent_leaves_running_ends_with_it(stage: Stage) -> None:
    outcome = await stage.run('os.system("setsid -f env -i sleep NAP")'.replace("NAP", NAP))
    assert outcome.status == "finished"
    assert processes(NAP) == []


# ── limits of the session ───────────────────────────────────────────────────────────────────────────────────────────

LOOP = 'said = "Hi"\nwhile "limit" not in said:\n    said = ask(said)\n    print(said, flush=True)\n'


async def test_an_agent_that_meets_the_limit_of_turns_and_ends(stage: Stage) -> None:
    outcome = await stage.run(LOOP, session={"limits": {"turns": 2}})
    assert (outcome.status, outcome.stop, outcome.exit_code, outcome.turns) == ("limit", "turns", 0, 2)
    assert outcome.collected.stdout.splitlines()[:2] == ["Hello.", "And more."]
    assert "limit" in outcome.collected.stdout
    assert (await stage.gateway.show(outcome.session))["stop"] == "turns"


async def test_an_agent_that_meets_the_limit_of_tokens(stage: Stage) -> None:
    outcome = await stage.run(LOOP, session={"limits": {"sampled_tokens": 2}})
    assert (outcome.status, outcome.stop) == ("limit", "sampled_tokens")
    assert outcome.sampled_tokens == 2


async def test_an_agent_that_does_not_heed_the_limit_is_ended(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.rollout.agent_run.GRACE_S", 0.3)
    outcome = await stage.run('while True:\n    ask("Hi")\n    time.sleep(0.05)', session={"limits": {"turns": 1}})
    assert (outcome.status, outcome.stop, outcome.exit_code, outcome.turns) == ("limit", "turns", None, 1)


class Deaf(GatewayClient):
    """Is never told what happens."""

    async def events(self, session: str) -> AsyncIterator[Any]:
        await asyncio.sleep(3600)
        yield


async def test_a_limit_that_was_met_as_the_agent_ended_still_counts(stage: Stage) -> None:
    async with Deaf(stage.gateway.root, stage.gateway.app.admin_key) as deaf:
        outcome = await stage.run(LOOP, session={"limits": {"turns": 1}}, client=deaf)
    assert (outcome.status, outcome.stop, outcome.exit_code) == ("limit", "turns", 0)


@pytest.mark.parametrize("verb", ["cancel", "seal"])
async def test_a_session_that_is_ended_at_the_gateway_ends_its_agent(verb: str, stage: Stage) -> None:
    """A trainer calls a stale rollout off by its session."""

    def ended(progress: RolloutProgress) -> None:
        if progress.turns == 1 and not done:
            done.append(stage.gateway.start(getattr(stage.client, verb)(progress.session)))

    done: list[Any] = []
    outcome = await asyncio.wait_for(stage.run('ask("Hi")\ntime.sleep(600)', watch=ended), scaled(30))
    assert (outcome.status, outcome.exit_code, outcome.turns) == ("cancelled", None, 1)
    assert outcome.stop == f"the session was {verb}{'led' if verb == 'cancel' else 'ed'} at the gateway"


# ── whose fault it is ───────────────────────────────────────────────────────────────────────────────────────────────


def fault(outcome: Outcome) -> tuple[str, str, str]:
    assert outcome.status == "error" and outcome.fault is not None
    return outcome.fault.boundary, outcome.fault.stage, outcome.fault.message


async def test_a_setup_that_fails_is_the_tasks_fault(stage: Stage) -> None:
    task = Task(id="t", instruction="x", setup="echo about to fail\ncat /no/such/file\necho not reached")
    outcome = await stage.run(task=task)
    boundary, where, message = fault(outcome)
    assert (boundary, where) == ("task", "setup")
    assert message.startswith("setup.sh failed with exit code 1: ") and "/no/such/file" in message
    assert outcome.session == "" and await stage.open_sessions() == []
    assert stage.stages == ["sandbox", "files", "setup", "clean", "done"]


async def test_a_setup_that_takes_too_long_is_the_tasks_fault(stage: Stage) -> None:
    outcome = await stage.run(task=Task(id="t", instruction="x", setup="sleep 6303", setup_timeout_s=0.5))
    assert fault(outcome) == ("task", "setup", "setup.sh took longer than 0.5 s: it printed nothing")


async def test_a_setup_finds_the_files_and_no_key(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "given.txt").write_text("given")
    task = Task(id="t", instruction="x", files=tmp_path, setup="env > env.txt; mv given.txt moved.txt")
    outcome = await stage.run(task=task, command="cat moved.txt")
    assert outcome.collected.stdout == "given"
    env = stage.read_work(outcome, "env.txt").decode()
    assert "KEY" not in env and "BASE_URL" not in env


async def test_a_program_that_is_not_there_is_the_agents_fault(stage: Stage) -> None:
    agent = own_agent(
        'name = "mine"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["no-such-program"]\nstdin = "{prompt}"'
    )
    outcome = await stage.run(agent=agent)
    boundary, where, message = fault(outcome)
    assert (boundary, where) == ("agent", "launch")
    assert message.startswith("mine: no-such-program not found in the local sandbox; install it there")
    assert (await stage.gateway.show(outcome.session))["status"] == "sealed"
    assert (await stage.gateway.show(outcome.session))["stop"] == "error"


async def test_an_image_without_the_agent_is_the_agents_fault(stage: Stage) -> None:
    agent = own_agent(
        'name = "mine"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["true"]\n'
        '[install]\ncheck = ["sh", "-c", "echo too old >&2; exit 7"]'
    )
    assert fault(await stage.run(agent=agent)) == (
        *("agent", "launch"),
        "mine: install.check exited with code 7: too old",
    )


async def test_an_option_that_the_agent_does_not_have(stage: Stage) -> None:
    boundary, where, message = fault(await stage.run("", options={"comand": "true"}))
    assert (boundary, where) == ("agent", "launch") and "did you mean command?" in message


async def test_a_sandbox_that_cannot_be_made(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = await stage.run("", backend=LocalBackend(tmp_path / "file"))
    boundary, where, message = fault(outcome)
    assert (boundary, where) == ("sandbox", "sandbox")
    assert str(tmp_path / "file") in message
    assert (outcome.session, outcome.turns) == ("", 0)


async def test_a_task_that_needs_its_image(stage: Stage, tmp_path: Path) -> None:
    boundary, where, message = fault(await stage.run(task=Task(id="t", instruction="x", dockerfile=tmp_path)))
    assert (boundary, where) == ("task", "sandbox") and "--sandbox docker" in message


class Breaking(LocalBackend):
    """Makes sandboxes that go wrong at one verb."""

    def __init__(self, root: Path, verb: str) -> None:
        super().__init__(root)
        self.verb = verb

    async def create(self, spec: SandboxSpec) -> Any:
        sandbox = await super().create(spec)
        whole = getattr(sandbox, self.verb)

        async def broken(*arguments: Any, **named: Any) -> Any:
            if self.verb == "stop":
                await whole()
            if self.verb == "exec" and "left.txt" not in str(arguments):
                return await whole(*arguments, **named)
            raise SandboxError("it broke")

        setattr(sandbox, self.verb, broken)
        return sandbox


@pytest.mark.parametrize(("verb", "where"), [("upload", "files"), ("write", "relay"), ("start", "relay")])
async def test_a_sandbox_that_breaks(verb: str, where: str, stage: Stage, tmp_path: Path) -> None:
    task = Task(id="t", instruction="x", files=tmp_path)
    outcome = await stage.run(task=task, backend=Breaking(stage.root, verb))
    assert fault(outcome) == ("sandbox", where, "it broke")
    assert await stage.open_sessions() == []


async def test_what_cannot_be_cleaned_up_is_a_note(stage: Stage) -> None:
    outcome = await stage.run(TWO_TURNS, backend=Breaking(stage.root, "stop"))
    assert (outcome.status, outcome.turns) == ("finished", 2)
    assert outcome.notes == ("the sandbox could not be removed: it broke",)


async def test_what_cannot_be_copied_is_named(stage: Stage) -> None:
    outcome = await stage.run(TWO_TURNS, backend=Breaking(stage.root, "download"))
    assert (outcome.status, outcome.collected.work) == ("finished", False)
    assert outcome.collected.missing == ("work: it broke",)


async def test_a_folder_for_results_that_cannot_be_written(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    boundary, where, message = fault(await stage.run(TWO_TURNS, folder=tmp_path / "file"))
    assert (boundary, where) == ("gateway", "collect") and "--out" in message


async def test_a_stage_that_takes_too_long(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_reporting, "LIMITS_S", {**stage_reporting.LIMITS_S, "files": 0.2})

    class Slow(LocalBackend):
        async def create(self, spec: SandboxSpec) -> Any:
            sandbox = await super().create(spec)
            sandbox.upload = lambda *_: asyncio.sleep(60)  # type: ignore[method-assign,assignment,return-value]
            return sandbox

    task = Task(id="t", instruction="x", files=Path("."))
    assert fault(await stage.run(task=task, backend=Slow(stage.root))) == (
        *("sandbox", "files"),
        "stage files took longer than 0 s",
    )


async def test_an_engine_that_is_down_reads_as_the_providers_error() -> None:
    """And an agent that ends on it is not to blame: such a rollout must never be scored."""
    async with open_stage([ScriptedTurn(fail_before=True)] * 5) as stage:
        outcome = await stage.run(
            'print(*http("POST", "/v1/chat/completions", {"model": "m", "messages": []}))\nask("Hi")'
        )
        assert (outcome.status, outcome.exit_code, outcome.turns) == ("error", 1, 0)
        assert fault(outcome)[:2] == ("engine", "agent")
        assert re.match(r'503 \{"error":\{"message":', outcome.collected.stderr), outcome.collected.stderr
        assert "engine_unavailable" in outcome.collected.stderr


async def test_an_engine_that_came_back_is_not_held_against_anybody() -> None:
    async with open_stage([ScriptedTurn(fail_before=True), say("Hello.")]) as stage:
        outcome = await stage.run(
            'body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}\n'
            'http("POST", "/v1/chat/completions", body)\nhttp("POST", "/v1/chat/completions", body)\nsys.exit(4)'
        )
        assert (outcome.status, outcome.exit_code, outcome.fault) == ("failed", 4, None)


async def test_an_agent_that_ends_when_its_tokens_are_used_up_met_a_limit() -> None:
    async with open_stage([say("A long answer that is cut.")]) as stage:
        outcome = await stage.run('ask("Hi")', session={"limits": {"sampled_tokens": 3}})
        assert (outcome.status, outcome.stop, outcome.sampled_tokens) == ("limit", "sampled_tokens", 3)


async def test_a_key_that_the_gateway_does_not_take(stage: Stage) -> None:
    async with GatewayClient(stage.gateway.root, "wrong" * 8) as wrong:
        outcome = await stage.run("", client=wrong)
    boundary, where, message = fault(outcome)
    assert (boundary, where) == ("client", "session") and "TURNGATE_ADMIN_KEY" in message
    assert outcome.session == ""


async def test_settings_that_the_gateway_does_not_take(stage: Stage) -> None:
    boundary, where, message = fault(await stage.run("", session={"limits": {"turn": 1}}))
    assert (boundary, where) == ("gateway", "session")
    assert message.startswith("gateway: limits.turn is not a known field") and "did you mean turns?" in message


async def test_a_gateway_that_is_not_there(stage: Stage) -> None:
    async with GatewayClient("http://127.0.0.1:9", "k" * 20) as nobody:
        boundary, where, message = fault(await stage.run("", client=nobody))
    assert (boundary, where) == ("gateway", "session")
    assert message.startswith("gateway: http://127.0.0.1:9 cannot be reached")


async def test_a_server_that_is_no_gateway(stage: Stage) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(other, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, GatewayClient(url, "k" * 20) as client:
        assert fault(await stage.run("", client=client))[2] == f"gateway: {url} is not a turngate gateway"


async def test_a_gateway_that_goes_away_for_good(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout ends and says so; its trace is where the gateway left it."""
    monkeypatch.setattr("turngate.rollout.session.RESTART_S", 0.5)

    class Leaving(GatewayClient):
        async def _request(self, method: str, path: str, *arguments: Any, **how: Any) -> Any:
            if path.endswith("/seal"):
                self.url = "http://127.0.0.1:9"
            return await super()._request(method, path, *arguments, **how)

    async with Leaving(stage.gateway.root, stage.gateway.app.admin_key) as leaving:
        program = TOLD_TURNS.replace("FOLDER", str(tmp_path))
        outcome = await stage.run(program, client=leaving, watch=lambda progress: touch_turn_file(tmp_path, progress))
    boundary, where, message = fault(outcome)
    assert (boundary, where) == ("gateway", "seal") and "cannot be reached" in message
    assert outcome.turns == 2  # as far as we were told
    assert any("could not be ended" in note for note in outcome.notes)
    assert any("the recording could not be read from the gateway" in note for note in outcome.notes)
    assert len(await stage.gateway.turns(outcome.session)) == 2
    assert stage.alive() == []


# ── what is asked ───────────────────────────────────────────────────────────────────────────────────────────────────

ODD = {
    "quotes": 'it\'s "said" `by` $HOME \\ $(reboot) %s {prompt} {{model}}',
    "lines": "one\ntwo\r\n\tthree\n\n\nend",
    "no line end": "x",
    "dashes": "--help -rf / -- -",
    "an equals sign": "=x=y",
    "unicode": "Grüße 🎉 \u202eabc\u202c 漢字 é \ufeff",
    "control characters": "\x1b[31m\x07\x01\x7f\x85",
    "markup": "[red]x[/] <b>&amp; :bomb:",
    "much": "0123456789abcdef" * 9600,
    "a shell script": "#!/bin/sh\nexit 3\n",
    "blanks": "  x \n ",
}


@pytest.mark.parametrize("name", ODD)
async def test_what_is_asked_reaches_the_agent_byte_for_byte(name: str, stage: Stage) -> None:
    command = 'cat > stdin; cp "$TURNGATE_PROMPT_FILE" file; stat -c %a "$TURNGATE_PROMPT_FILE"'
    outcome = await stage.run(task=Task(id="t", instruction=ODD[name]), command=command)
    assert (outcome.status, outcome.collected.stdout) == ("finished", "600\n")
    assert stage.read_work(outcome, "stdin") == stage.read_work(outcome, "file") == ODD[name].encode()


@pytest.mark.parametrize("name", ["quotes", "lines", "dashes", "unicode", "control characters", "markup"])
async def test_what_is_asked_by_argument_environment_and_file(name: str, stage: Stage) -> None:
    """An agent of the user's own may take its prompt in any way."""
    agent = own_agent(
        """
name = "mine"
title = "Mine"
dialect = "chat"
command = ["/bin/sh", "-c", 'printf %s "$1" > arg; printf %s "$ASKED" > env; cp ~/asked.txt ~/asked.json .', "sh", "{prompt}"]
[env]
ASKED = "{prompt}"
[[files]]
path = "asked.txt"
content = "{prompt}"
[[files]]
path = "asked.json"
content = '{"asked": "{prompt}", "model": "{model}", "tokens": {context_tokens}, "loud": "{loud}"}'
[options.loud]
about = "how loud"
default = "quiet"
"""
    )
    outcome = await stage.run(task=Task(id="t", instruction=ODD[name]), agent=agent, options={"loud": "very"})
    assert outcome.status == "finished", outcome.collected.stderr
    for file in ("arg", "env", "asked.txt"):
        assert stage.read_work(outcome, file) == ODD[name].encode(), file
    assert json.loads(stage.read_work(outcome, "asked.json")) == {
        **{"asked": ODD[name], "model": "m", "tokens": 131072},
        "loud": "very",
    }


async def test_a_prompt_that_no_argument_can_hold_is_the_agents_fault(stage: Stage) -> None:
    agent = own_agent('name = "mine"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["echo", "{prompt}"]')
    boundary, where, message = fault(await stage.run(task=Task(id="t", instruction=ODD["much"]), agent=agent))
    assert (boundary, where) == ("agent", "launch") and "stdin" in message


async def test_two_rollouts_at_once_do_not_meet() -> None:
    async with open_stage(lambda request, n: say(f"Reply {n}.")) as stage:
        first, second = (stage.rollout('print(ask("Hi"), ask("Ho"))', folder=stage.folder / str(n)) for n in range(2))
        outcomes = await asyncio.gather(first.run(), second.run())
        assert [outcome.collected.stdout for outcome in outcomes] == ["Reply 0. Reply 1.\n"] * 2
        assert outcomes[0].session != outcomes[1].session
        assert [outcome.turns for outcome in outcomes] == [2, 2]


async def test_a_gateway_in_another_process_can_be_started_again_in_the_middle(tmp_path: Path) -> None:
    """Recorded before delivered, and a restarted gateway carries live rollouts on: the agent does not notice."""
    script = written(tmp_path / "script.json", json.dumps(["Hello."]))
    wait = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)"
    program = f'first = ask("Hi")\n{wait}\nprint(first, ask("Hi", first, "More?"))'
    async with open_stage() as stage, AsyncExitStack() as stack:
        first = await asyncio.to_thread(stack.enter_context, process(tmp_path / "data", "--script", script))
        key = (tmp_path / "data" / "admin-key").read_text().strip()
        client = await stack.enter_async_context(GatewayClient(first.url, key))
        stage.connector = await stack.enter_async_context(GatewayConnector(first.url))
        rollout = stage.rollout(program, client=client)
        running = asyncio.create_task(rollout.run())
        await until(lambda: running.done() or rollout.progress.turns == 1, 30)
        first.process.kill()
        first.process.wait()
        (tmp_path / "go").touch()
        again = process(tmp_path / "data", "--script", script, "--port", first.url.rpartition(":")[2])
        await asyncio.to_thread(stack.enter_context, again)
        outcome = await asyncio.wait_for(running, scaled(60))
        assert (outcome.status, outcome.turns, outcome.rows, outcome.notes) == ("finished", 2, 1, ())
        assert outcome.collected.stdout == "Hello. Hello.\n"
