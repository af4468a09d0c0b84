"""A rollout from start to end: its outcome if all goes well, and the error boundary if something fails."""

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

from tests.cli.test_serve import start_serve, write_file
from tests.kit import Gated, say, until
from tests.rollout.kit import PRELUDE, Harness, open_harness, parse_agent
from tests.sandboxes.kit import processes
from tests.speed import paced, scaled
from turngate.client.gateway import GatewayClient
from turngate.engines.scripted import ScriptedTurn
from turngate.errors import SandboxError
from turngate.rollout import agent_run, stages
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.outcome import Outcome, RolloutProgress
from turngate.sandboxes.base import SandboxSpec
from turngate.sandboxes.bubblewrap import BubblewrapBackend
from turngate.sandboxes.local import LocalBackend
from turngate.tasks.task import Task
from turngate.trace.training_report import TrainingReport

pytestmark = pytest.mark.process

ALL = ["sandbox", "files", "setup", "session", "relay", "launch", "agent", "seal", "collect", "clean", "done"]
NAP = f"63{os.getpid():07d}"  # a unique number of seconds, which identifies the process that sleeps
TWO_TURNS = 'first = ask("Hi")\nprint(first, ask("Hi", first, "More?"))\nopen("left.txt", "w").write("done")'

# The same, but after each turn it waits until the rollout has counted it: `touch_turn_file` creates a file in FOLDER.
SYNCED_TURNS = """
def wait(turns):
    while not os.path.exists(f"FOLDER/{turns}"): time.sleep(0.02)
first = ask("Hi"); wait(1)
print(first, ask("Hi", first, "More?")); wait(2)
"""


def touch_turn_file(folder: Path, progress: RolloutProgress) -> None:
    (folder / str(progress.turns)).touch()


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with open_harness([say("Hello."), say("And more.")] * 20) as harness:
        yield harness


# ── how agents end ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_finished_agent(harness: Harness) -> None:
    outcome = await harness.run(TWO_TURNS)
    assert (outcome.status, outcome.exit_code, outcome.fault, outcome.notes) == ("finished", 0, None, ())
    assert (outcome.turns, outcome.roles, outcome.rows, outcome.calls) == (2, {"main": 2}, 1, 2)
    assert outcome.sampled_tokens == sum(len(say(text).ids) for text in ("Hello.", "And more."))
    assert outcome.collected.stdout == "Hello. And more.\n"
    assert harness.read_work(outcome, "left.txt") == b"done"
    shown = await harness.gateway.show(outcome.session)
    assert (shown["status"], shown["stop"]) == ("sealed", "")
    facts = {"task": "test", "agent": "shell", "agent_version": "", "sandbox": "local", "group": "test"}
    assert shown["config"]["metadata"] == facts
    task = Task(id="test", instruction=PRELUDE + TWO_TURNS, metadata={"kind": "rename"})
    outcome = await harness.run(task=task)
    shown = await harness.gateway.show(outcome.session)
    assert shown["config"]["metadata"] == {**facts, "task_kind": "rename"}


async def test_stages_run_in_sequence_and_are_timed(harness: Harness) -> None:
    outcome = await harness.run(TWO_TURNS)
    assert harness.stages == ALL
    assert list(outcome.seconds) == ALL[:-1]
    assert all(seconds >= 0 for seconds in outcome.seconds.values())


async def test_progress_counts_turns_as_they_come(harness: Harness, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    def watch(progress: RolloutProgress) -> None:
        seen.append((progress.stage, progress.turns, progress.sampled_tokens))
        touch_turn_file(tmp_path, progress)

    await harness.run(SYNCED_TURNS.replace("FOLDER", str(tmp_path)), watch=watch)
    tokens = len(say("Hello.").ids)
    assert ("agent", 1, tokens) in seen
    assert seen[-1] == ("done", 2, tokens + len(say("And more.").ids))


async def test_outcome_is_serializable(harness: Harness) -> None:
    outcome = await harness.run(TWO_TURNS)
    write_file = json.loads(msgspec.json.encode(outcome))
    assert write_file["status"] == "finished" and write_file["session"] == outcome.session
    assert write_file["collected"]["folder"] == str(harness.folder / outcome.session)
    assert msgspec.convert(write_file, Outcome).seconds == outcome.seconds
    assert (write_file["kind"], write_file["reward"], write_file["grade"]) == (
        None,
        None,
        None,
    )  # the task has no grader


async def test_failing_agent(harness: Harness) -> None:
    outcome = await harness.run('ask("Hi")\nsys.exit("I give up")')
    assert (outcome.status, outcome.exit_code, outcome.fault) == ("failed", 1, None)
    assert outcome.collected.stderr == "I give up\n"
    assert outcome.turns == 1 and outcome.rows == 1  # recorded turns are kept
    assert (await harness.gateway.show(outcome.session))["stop"] == "failed"


async def test_killed_agent(harness: Harness) -> None:
    outcome = await harness.run('ask("Hi")\nos.kill(os.getpid(), 9)')
    assert (outcome.status, outcome.exit_code, outcome.turns) == ("failed", 137, 1)


async def test_timed_out_agent_keeps_its_work(harness: Harness) -> None:
    """Its trace, output and files are kept, and its processes are ended."""
    program = 'print(ask("Hi"), flush=True)\nopen("half", "w").write("x")\nos.system("sleep 6301 & sleep 6301")'
    outcome = await harness.run(program, timeout_s=paced(1.5))
    assert (outcome.status, outcome.exit_code, outcome.fault) == ("timed out", None, None)
    assert (outcome.turns, outcome.collected.stdout) == (1, "Hello.\n")
    assert harness.read_work(outcome, "half") == b"x"
    assert (await harness.gateway.show(outcome.session))["stop"] == "timed out"


async def test_agent_that_exits_during_call(tmp_path: Path) -> None:
    async with open_harness(engine=Gated([say("A long story " * 20)], tokens=3)) as harness:
        call = 'http("POST", "/v1/chat/completions", {"stream": True, "messages": [{"role": "user", "content": "Hi"}]})'
        wait = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)"
        running = asyncio.create_task(harness.run(f"if os.fork() == 0: {call}\n{wait}\nos._exit(4)"))
        await until(lambda: running.done() or harness.gateway.gated.waiting, 30)
        (tmp_path / "go").touch()
        outcome = await running
        assert (outcome.status, outcome.exit_code) == ("failed", 4)
        assert outcome.roles == {"aborted": 1} and outcome.rows == 0


async def test_background_processes_end_with_agent(harness: Harness) -> None:
    outcome = await harness.run('os.system("setsid -f env -i sleep NAP")'.replace("NAP", NAP))
    assert outcome.status == "finished"
    assert processes(NAP) == []


# ── session limits ──────────────────────────────────────────────────────────────────────────────────────────────────

LOOP = 'said = "Hi"\nwhile "limit" not in said:\n    said = ask(said)\n    print(said, flush=True)\n'


async def test_agent_ends_at_turn_limit(harness: Harness) -> None:
    outcome = await harness.run(LOOP, session={"limits": {"turns": 2}})
    assert (outcome.status, outcome.stop, outcome.exit_code, outcome.turns) == ("limit", "turns", 0, 2)
    assert outcome.collected.stdout.splitlines()[:2] == ["Hello.", "And more."]
    assert "limit" in outcome.collected.stdout
    assert (await harness.gateway.show(outcome.session))["stop"] == "turns"


async def test_agent_ends_at_token_limit(harness: Harness) -> None:
    outcome = await harness.run(LOOP, session={"limits": {"sampled_tokens": 2}})
    assert (outcome.status, outcome.stop) == ("limit", "sampled_tokens")
    assert outcome.sampled_tokens == 2


async def test_agent_that_ignores_limit_is_ended(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.rollout.agent_run.GRACE_S", 0.3)
    outcome = await harness.run('while True:\n    ask("Hi")\n    time.sleep(0.05)', session={"limits": {"turns": 1}})
    assert (outcome.status, outcome.stop, outcome.exit_code, outcome.turns) == ("limit", "turns", None, 1)


class EventlessClient(GatewayClient):
    """A client that never receives events."""

    async def events(self, session: str) -> AsyncIterator[Any]:
        await asyncio.sleep(3600)
        yield


async def test_limit_reached_at_exit_counts(harness: Harness) -> None:
    async with EventlessClient(harness.gateway.root, harness.gateway.app.admin_key) as eventless:
        outcome = await harness.run(LOOP, session={"limits": {"turns": 1}}, client=eventless)
    assert (outcome.status, outcome.stop, outcome.exit_code) == ("limit", "turns", 0)


@pytest.mark.parametrize("verb", ["cancel", "seal"])
async def test_session_ended_at_gateway_ends_agent(verb: str, harness: Harness) -> None:
    """A trainer cancels a stale rollout by its session."""

    def end_session(progress: RolloutProgress) -> None:
        if progress.turns == 1 and not done:
            done.append(harness.gateway.start(getattr(harness.client, verb)(progress.session)))

    done: list[Any] = []
    outcome = await asyncio.wait_for(harness.run('ask("Hi")\ntime.sleep(600)', watch=end_session), scaled(30))
    assert (outcome.status, outcome.exit_code, outcome.turns) == ("cancelled", None, 1)
    assert outcome.stop == f"the session was {verb}{'led' if verb == 'cancel' else 'ed'} at the gateway"


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def fault(outcome: Outcome) -> tuple[str, str, str]:
    assert outcome.status == "error" and outcome.fault is not None
    return outcome.fault.boundary, outcome.fault.stage, outcome.fault.message


async def test_failing_setup_is_task_fault(harness: Harness) -> None:
    task = Task(id="t", instruction="x", setup="echo about to fail\ncat /no/such/file\necho not reached")
    outcome = await harness.run(task=task)
    boundary, stage, message = fault(outcome)
    assert (boundary, stage) == ("task", "setup")
    assert message.startswith("the setup script failed with exit code 1: ") and "/no/such/file" in message
    assert outcome.session == "" and await harness.open_sessions() == []
    assert harness.stages == ["sandbox", "files", "setup", "clean", "done"]


async def test_slow_setup_is_task_fault(harness: Harness) -> None:
    outcome = await harness.run(task=Task(id="t", instruction="x", setup="sleep 6303", setup_timeout_s=0.5))
    assert fault(outcome) == ("task", "setup", "the setup script took longer than 0.5 s and printed nothing")


async def test_setup_has_files_but_no_key(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "given.txt").write_text("given")
    task = Task(id="t", instruction="x", files=tmp_path, setup="env > env.txt; mv given.txt moved.txt")
    outcome = await harness.run(task=task, command="cat moved.txt")
    assert outcome.collected.stdout == "given"
    env = harness.read_work(outcome, "env.txt").decode()
    assert "KEY" not in env and "BASE_URL" not in env


async def test_missing_program_is_agent_fault(harness: Harness) -> None:
    agent = parse_agent(
        'name = "mine"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["no-such-program"]\nstdin = "{prompt}"'
    )
    outcome = await harness.run(agent=agent)
    boundary, stage, message = fault(outcome)
    assert (boundary, stage) == ("agent", "launch")
    assert message.startswith("mine: no-such-program was not found in the local sandbox; install it there")
    assert (await harness.gateway.show(outcome.session))["status"] == "sealed"
    assert (await harness.gateway.show(outcome.session))["stop"] == "error"


async def test_program_that_is_not_executable_is_agent_fault(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "program").write_text("#!/bin/sh\n")
    agent = parse_agent(f'name = "mine"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["{tmp_path}/program"]')
    message = f"mine: {tmp_path}/program is not executable; run `chmod +x` on it"
    assert fault(await harness.run(agent=agent)) == ("agent", "launch", message)


async def test_killed_search_for_the_program_is_not_agent_fault(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_run, "_FIND_PROGRAM", "kill -9 $$")
    boundary, stage, message = fault(await harness.run())
    assert (boundary, stage) == ("sandbox", "launch")
    assert "in the local sandbox ended with exit code 137" in message and "not found" not in message


async def test_warning_explains_program_that_the_command_cannot_start(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "program").write_text("#!/bin/sh\n")
    [missing] = (await harness.run(command=f"{tmp_path}/none")).warnings
    assert "exit code 127 usually means that a program was not found in the local sandbox; install it there" in missing
    [forbidden] = (await harness.run(command=f"{tmp_path}/program")).warnings
    assert "exit code 126 usually means that a program is not executable; run `chmod +x` on it" in forbidden
    [other] = (await harness.run(command="exit 1")).warnings
    assert "no model call by the agent was answered" in other


def test_warning_says_what_is_visible_in_bubblewrap() -> None:
    report = agent_run.explain_unstarted(TrainingReport(amount="none"), 127, BubblewrapBackend())
    assert report is not None and "only /usr of this machine is visible; install it in /usr" in report.warning


async def test_failing_install_check_is_agent_fault(harness: Harness) -> None:
    agent = parse_agent(
        'name = "mine"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["true"]\n'
        '[install]\ncheck = ["sh", "-c", "echo too old >&2; exit 7"]'
    )
    assert fault(await harness.run(agent=agent)) == (
        *("agent", "launch"),
        "mine: install.check exited with code 7: too old",
    )


async def test_checks_that_take_too_long_say_so(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_s = paced(0.5)
    monkeypatch.setattr(agent_run, "_CHECK_S", limit_s)
    slow = 'name = "mine"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["true"]\n[install]\ncheck = ["sleep", "6304"]'
    assert fault(await harness.run(agent=parse_agent(slow))) == (
        *("agent", "launch"),
        f"mine: install.check took longer than {limit_s:g} s: no output",
    )
    monkeypatch.setattr(agent_run, "_FIND_PROGRAM", "sleep 6305")
    boundary, stage, message = fault(await harness.run(agent=parse_agent(slow)))
    assert (boundary, stage) == ("sandbox", "launch")
    assert message.startswith(f"mine: the search for true in the local sandbox took longer than {limit_s:g} s")


async def test_unknown_agent_option_is_agent_fault(harness: Harness) -> None:
    boundary, stage, message = fault(await harness.run("", options={"comand": "true"}))
    assert (boundary, stage) == ("agent", "launch") and "did you mean command?" in message


async def test_failing_sandbox_creation_is_sandbox_fault(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = await harness.run("", backend=LocalBackend(tmp_path / "file"))
    boundary, stage, message = fault(outcome)
    assert (boundary, stage) == ("sandbox", "sandbox")
    assert str(tmp_path / "file") in message
    assert (outcome.session, outcome.turns) == ("", 0)


async def test_dockerfile_task_without_docker_is_task_fault(harness: Harness, tmp_path: Path) -> None:
    boundary, stage, message = fault(await harness.run(task=Task(id="t", instruction="x", dockerfile=tmp_path)))
    assert (boundary, stage) == ("task", "sandbox") and "use the docker sandbox" in message


class BreakingBackend(LocalBackend):
    """Creates sandboxes whose method `verb` fails."""

    def __init__(self, root: Path, verb: str) -> None:
        super().__init__(root)
        self.verb = verb

    async def create(self, spec: SandboxSpec) -> Any:
        sandbox = await super().create(spec)
        method = getattr(sandbox, self.verb)

        async def broken(*arguments: Any, **named: Any) -> Any:
            if self.verb == "stop":
                await method()
            if self.verb == "exec" and "left.txt" not in str(arguments):
                return await method(*arguments, **named)
            raise SandboxError("it broke")

        setattr(sandbox, self.verb, broken)
        return sandbox


@pytest.mark.parametrize(("verb", "stage"), [("upload", "files"), ("write", "relay"), ("start", "relay")])
async def test_broken_sandbox_is_sandbox_fault(verb: str, stage: str, harness: Harness, tmp_path: Path) -> None:
    task = Task(id="t", instruction="x", files=tmp_path)
    outcome = await harness.run(task=task, backend=BreakingBackend(harness.root, verb))
    assert fault(outcome) == ("sandbox", stage, "it broke")
    assert await harness.open_sessions() == []


async def test_failing_cleanup_is_noted(harness: Harness) -> None:
    outcome = await harness.run(TWO_TURNS, backend=BreakingBackend(harness.root, "stop"))
    assert (outcome.status, outcome.turns) == ("finished", 2)
    assert outcome.notes == ("the sandbox could not be removed: it broke",)


async def test_failing_copy_is_named(harness: Harness) -> None:
    outcome = await harness.run(TWO_TURNS, backend=BreakingBackend(harness.root, "download"))
    assert (outcome.status, outcome.collected.work) == ("finished", False)
    assert outcome.collected.missing == ("work: it broke",)


async def test_unwritable_results_folder_is_fault(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    boundary, stage, message = fault(await harness.run(TWO_TURNS, folder=tmp_path / "file"))
    assert (boundary, stage) == ("gateway", "collect") and "choose a different folder" in message


async def test_slow_stage_times_out(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "LIMITS_S", {**stages.LIMITS_S, "files": 0.2})

    class Slow(LocalBackend):
        async def create(self, spec: SandboxSpec) -> Any:
            sandbox = await super().create(spec)
            sandbox.upload = lambda *_: asyncio.sleep(60)  # type: ignore[method-assign,assignment,return-value]
            return sandbox

    task = Task(id="t", instruction="x", files=Path("."))
    assert fault(await harness.run(task=task, backend=Slow(harness.root))) == (
        *("sandbox", "files"),
        "stage files took longer than 0 s",
    )


async def test_unavailable_engine_is_engine_fault() -> None:
    """An agent that ends because of it is not at fault: such a rollout must never be scored."""
    async with open_harness([ScriptedTurn(fail_before=True)] * 5) as harness:
        outcome = await harness.run(
            'print(*http("POST", "/v1/chat/completions", {"model": "m", "messages": []}))\nask("Hi")'
        )
        assert (outcome.status, outcome.exit_code, outcome.turns) == ("error", 1, 0)
        assert fault(outcome)[:2] == ("engine", "agent")
        assert re.match(r'503 \{"error":\{"message":', outcome.collected.stderr), outcome.collected.stderr
        assert "engine_unavailable" in outcome.collected.stderr


async def test_recovered_engine_is_not_fault() -> None:
    async with open_harness([ScriptedTurn(fail_before=True), say("Hello.")]) as harness:
        outcome = await harness.run(
            'body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}\n'
            'http("POST", "/v1/chat/completions", body)\nhttp("POST", "/v1/chat/completions", body)\nsys.exit(4)'
        )
        assert (outcome.status, outcome.exit_code, outcome.fault) == ("failed", 4, None)


async def test_exit_after_truncated_reply_is_limit() -> None:
    async with open_harness([say("A long answer that is cut.")]) as harness:
        outcome = await harness.run('ask("Hi")', session={"limits": {"sampled_tokens": 3}})
        assert (outcome.status, outcome.stop, outcome.sampled_tokens) == ("limit", "sampled_tokens", 3)


async def test_wrong_admin_key_is_client_fault(harness: Harness) -> None:
    async with GatewayClient(harness.gateway.root, "wrong" * 8) as wrong:
        outcome = await harness.run("", client=wrong)
    boundary, stage, message = fault(outcome)
    assert (boundary, stage) == ("client", "session") and "TURNGATE_ADMIN_KEY" in message
    assert outcome.session == ""


async def test_invalid_session_config_is_gateway_fault(harness: Harness) -> None:
    boundary, stage, message = fault(await harness.run("", session={"limits": {"turn": 1}}))
    assert (boundary, stage) == ("gateway", "session")
    assert message.startswith("gateway: limits.turn is not a known field") and "did you mean turns?" in message


async def test_unreachable_gateway_is_gateway_fault(harness: Harness) -> None:
    async with GatewayClient("http://127.0.0.1:9", "k" * 20) as unreachable:
        boundary, stage, message = fault(await harness.run("", client=unreachable))
    assert (boundary, stage) == ("gateway", "session")
    assert message == "gateway: nothing is listening at http://127.0.0.1:9; start a gateway with `turngate serve`"


async def test_foreign_server_is_not_gateway(harness: Harness) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(other, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, GatewayClient(url, "k" * 20) as client:
        assert fault(await harness.run("", client=client))[2] == (
            f"gateway: {url} returned status 200, but the reply is not from a turngate gateway; "
            "check the address and any proxy in front of the gateway"
        )


async def test_gateway_lost_before_seal_is_gateway_fault(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollout ends with a fault, and its trace stays at the gateway."""
    monkeypatch.setattr("turngate.rollout.session.RESTART_S", 0.5)

    class Leaving(GatewayClient):
        async def _request(self, method: str, path: str, *arguments: Any, **how: Any) -> Any:
            if path.endswith("/seal"):
                self.url = "http://127.0.0.1:9"
            return await super()._request(method, path, *arguments, **how)

    async with Leaving(harness.gateway.root, harness.gateway.app.admin_key) as leaving:
        program = SYNCED_TURNS.replace("FOLDER", str(tmp_path))
        outcome = await harness.run(program, client=leaving, watch=lambda progress: touch_turn_file(tmp_path, progress))
    boundary, stage, message = fault(outcome)
    assert (boundary, stage) == ("gateway", "seal") and "nothing is listening at" in message
    assert outcome.turns == 2  # as far as the client knows
    assert any("could not be ended" in note for note in outcome.notes)
    assert any("the session could not be read from the gateway" in note for note in outcome.notes)
    assert len(await harness.gateway.turns(outcome.session)) == 2
    assert harness.alive() == []


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────────

PROMPTS = {
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


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PROMPTS)
async def test_prompt_reaches_agent_byte_for_byte(name: str, harness: Harness) -> None:
    command = 'cat > stdin; cp "$TURNGATE_PROMPT_FILE" file; stat -c %a "$TURNGATE_PROMPT_FILE"'
    outcome = await harness.run(task=Task(id="t", instruction=PROMPTS[name]), command=command)
    assert (outcome.status, outcome.collected.stdout) == ("finished", "600\n")
    assert harness.read_work(outcome, "stdin") == harness.read_work(outcome, "file") == PROMPTS[name].encode()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["quotes", "lines", "dashes", "unicode", "control characters", "markup"])
async def test_prompt_in_argument_environment_and_file(name: str, harness: Harness) -> None:
    """A user-defined agent may take its prompt in any way."""
    agent = parse_agent(
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
    outcome = await harness.run(task=Task(id="t", instruction=PROMPTS[name]), agent=agent, options={"loud": "very"})
    assert outcome.status == "finished", outcome.collected.stderr
    for file in ("arg", "env", "asked.txt"):
        assert harness.read_work(outcome, file) == PROMPTS[name].encode(), file
    assert json.loads(harness.read_work(outcome, "asked.json")) == {
        **{"asked": PROMPTS[name], "model": "m", "tokens": 131072},
        "loud": "very",
    }


async def test_prompt_too_long_for_argument_is_agent_fault(harness: Harness) -> None:
    agent = parse_agent('name = "mine"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["echo", "{prompt}"]')
    boundary, stage, message = fault(await harness.run(task=Task(id="t", instruction=PROMPTS["much"]), agent=agent))
    assert (boundary, stage) == ("agent", "launch") and "stdin" in message


async def test_concurrent_rollouts_are_separate() -> None:
    async with open_harness(lambda request, n: say(f"Reply {n}.")) as harness:
        first, second = (
            harness.rollout('print(ask("Hi"), ask("Ho"))', folder=harness.folder / str(n)) for n in range(2)
        )
        outcomes = await asyncio.gather(first.run(), second.run())
        assert [outcome.collected.stdout for outcome in outcomes] == ["Reply 0. Reply 1.\n"] * 2
        assert outcomes[0].session != outcomes[1].session
        assert [outcome.turns for outcome in outcomes] == [2, 2]


@pytest.mark.full
async def test_gateway_restart_during_rollout(tmp_path: Path) -> None:
    """Turns are recorded before delivery, and a restarted gateway continues live rollouts, so the agent does not notice."""
    script = write_file(tmp_path / "script.json", json.dumps(["Hello."]))
    wait = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)"
    program = f'first = ask("Hi")\n{wait}\nprint(first, ask("Hi", first, "More?"))'
    async with open_harness() as harness, AsyncExitStack() as stack:
        first = await asyncio.to_thread(stack.enter_context, start_serve(tmp_path / "data", "--script", script))
        key = (tmp_path / "data" / "admin-key").read_text().strip()
        client = await stack.enter_async_context(GatewayClient(first.url, key))
        harness.connector = await stack.enter_async_context(GatewayConnector(first.url))
        rollout = harness.rollout(program, client=client)
        running = asyncio.create_task(rollout.run())
        await until(lambda: running.done() or rollout.progress.turns == 1, 30)
        first.process.kill()
        first.process.wait()
        (tmp_path / "go").touch()
        again = start_serve(tmp_path / "data", "--script", script, "--port", first.url.rpartition(":")[2])
        await asyncio.to_thread(stack.enter_context, again)
        outcome = await asyncio.wait_for(running, scaled(60))
        assert (outcome.status, outcome.turns, outcome.rows, outcome.notes) == ("finished", 2, 1, ())
        assert outcome.collected.stdout == "Hello. Hello.\n"
