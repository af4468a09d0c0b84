"""Rollouts from Python, as a person writes them: what comes back, in which order, and that nothing is left when somebody interrupts."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import turngate as tg
from tests import kit as kits
from tests.api.kit import AGENT, NAP, opened, program, scripted
from tests.cli.kit import ROOT
from tests.sandboxes.kit import processes, wait_until
from tests.speed import scaled
from turngate.errors import BadRequest

pytestmark = [pytest.mark.process, pytest.mark.full]

PATIENCE_S = 60  # with a script: a machine that is busy takes long to start Python, a gateway and an agent
SLEEPING = program(f"import subprocess; ask('Hi'); subprocess.run(['sleep', '{NAP}'])")
WRITES = program("open('out.txt', 'w').write(ask('Hi'))")


@pytest.fixture(scope="module")
def client() -> Iterator[tg.BlockingClient]:
    """One for all tests that need nothing of their own: to start a gateway takes most of a second."""
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder), ["Hello <b>you</b>.", "Again."]) as client:
        yield client


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary things, where nobody else has any. Its path is short, because a unix socket's must be."""
    with tempfile.TemporaryDirectory(prefix="tg-") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        yield Path(place)


def left(place: Path) -> list[Path]:
    """What is there, but for the empty folder that all sandboxes of this user have in common."""
    return [path for path in place.rglob("*") if path != place / f"turngate-{os.getuid()}"]


def test_a_result_says_how_it_ended_and_has_every_token(client: tg.BlockingClient) -> None:
    talks = program("first = ask('Hi'); print(first); open('a/out.txt', 'w').write(ask('Hi', first, 'And?'))")
    result = client.run(
        talks,
        setup="test -f a/in.bin",
        files={"a/in.bin": b"\0\1"},
        test_script="grep -q Again a/out.txt",
        task_id="talk",
    )
    assert (result.status, result.kind, result.reward, result.passed) == ("finished", "graded", 1.0, True), result.error
    assert (result.task_id, result.agent, result.mode, result.exit_code) == ("talk", "shell", "exact", 0)
    assert result.error is None and result.wall_s > 0 and result.seconds["agent"] > 0
    assert result.files == {"a/out.txt": "Again."} and result.work is None
    assert result.logs["stdout"] == "Hello <b>you</b>.\n"
    assert [message["content"] for message in result.messages] == ["Hi", "Hello <b>you</b>.", "And?", "Again."]
    first, second = result.turns
    assert (first.text, first.finish, first.role, first.after) == ("Hello <b>you</b>.", "stop", "main", None)
    assert (second.text, second.after, second.heard) == ("Again.", 1, ({"role": "user", "content": "And?"},))
    assert first.logprobs is not None and len(first.logprobs) == len(first.ids) == len(first.pieces)
    assert "".join(first.pieces).startswith("Hello <b>you</b>.")
    [row] = result.rows
    assert np.array_equal(row.ids, np.concatenate([result.prompt_ids(second), second.ids]))
    assert row.trained_tokens == len(first.ids) + len(second.ids) == result.sampled_tokens
    again = pickle.loads(pickle.dumps(result))
    assert np.array_equal(again.turns[1].ids, second.ids) and again.reward == 1.0


def test_a_group_is_compared_with_itself(client: tg.BlockingClient) -> None:
    wins = program("ask('Hi'); import os, uuid; open('out.txt', 'w').write(os.environ['TURNGATE_MODEL'])")
    results = client.group(wins, n=3, test_script="test -s out.txt", task_id="three").all()
    assert results.rewards == [1.0, 1.0, 1.0] and results.mean_reward == 1.0 and results.pass_at(2) == 1.0
    [name] = results.groups
    assert name.startswith("three-") and len({one.session for one in results}) == 3
    rows = results.rows()
    assert [row.advantage for row in rows] == [0.0, 0.0, 0.0] and all(row.weight == 1.0 for row in rows)


def test_a_batch_takes_rows_and_keeps_their_order(client: tg.BlockingClient, tmp_path: Path) -> None:
    rows = [{"id": f"row-{n}", "instruction": program(f"time.sleep({0.5 - n / 2}); ask('Hi')")} for n in range(2)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [one.task_id for one in client.batch(tmp_path / "rows.jsonl").all()] == ["row-0", "row-1"]
    wanted = [rows[1], f"{tmp_path}/rows.jsonl#row-1", f"{tmp_path}/rows.jsonl#2"]
    assert [one.task_id for one in client.batch(wanted)] == ["row-1"] * 3


def test_what_goes_wrong_with_a_task_is_a_result(client: tg.BlockingClient) -> None:
    result = client.run("Do it.", setup="echo broken >&2; exit 3")
    assert result.error is not None and (result.error.boundary, result.error.stage) == ("task", "setup")
    assert (result.status, result.kind, result.reward, result.turns) == ("error", "invalid task", None, ())
    assert result.wall_s > 0 and "broken" in result.error.message


def test_limits_are_met(client: tg.BlockingClient) -> None:
    result = client.run(program("ask('Hi'); ask('Hi'); ask('Hi')"), max_turns=2)
    assert (result.status, len(result.turns)) == ("limit", 2)


def test_leaving_the_loop_early_ends_the_rest(client: tg.BlockingClient) -> None:
    for result in client.batch([WRITES, SLEEPING], test_script="test -s out.txt"):
        assert result.reward == 1.0
        break
    assert processes(NAP) == []
    assert client.run(WRITES).status == "finished"  # it is still of use


async def test_with_await_and_without_it_inside_a_running_loop(tmp_path: Path, temporary: Path) -> None:
    model = scripted(tmp_path, ["Hello."])
    result = await tg.run(WRITES, model=model, **AGENT)
    assert (result.status, result.files) == ("finished", {"out.txt": "Hello."})
    same = tg.run_sync(WRITES, model=model, **AGENT)  # as a cell of a notebook does
    assert (same.status, same.files) == ("finished", {"out.txt": "Hello."})
    assert left(temporary) == []


async def test_results_come_as_they_are_ready_and_two_models_do_not_meet(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one, other = scripted(tmp_path, ["One."]), scripted(tmp_path / "other", ["Other."])

    async def grouped() -> list[str]:
        return [result.turns[0].text async for result in tg.group(WRITES, n=2, model=one, **AGENT)]

    apart = tg.run(WRITES, model=other, data=tmp_path / "data", **AGENT)
    texts, result = await asyncio.gather(grouped(), apart)
    assert texts == ["One.", "One."] and result.turns[0].text == "Other."
    assert result.work is not None and (result.work / "out.txt").read_text() == "Other."  # where a folder was given


async def test_being_cancelled_ends_the_agent_and_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    running = asyncio.create_task(tg.run(SLEEPING, model=scripted(tmp_path, ["Hello."]), **AGENT))
    await wait_until(lambda: processes(NAP) or running.done(), 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert processes(NAP) == [] and left(temporary) == []


@pytest.mark.parametrize("how", ["interrupted", "forgotten"])
def test_a_script_that_is_interrupted_or_ends_too_early_leaves_nothing(
    tmp_path: Path, temporary: Path, how: str
) -> None:
    """In a process of its own, as Ctrl-C is."""
    nap = NAP.replace("66", "67", 1)
    file = tmp_path / "script.py"
    sleeps = program(f"import subprocess; ask('Hi'); subprocess.run(['sleep', '{nap}'])")
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background has it ignored
    begun = f"{heard}import turngate as tg\nclient = tg.open({scripted(tmp_path, ['Hello.'])!r}, **{AGENT!r})\n"
    if how == "interrupted":
        rest = f"""
            try:
                client.run({sleeps!r})
            except KeyboardInterrupt:
                print("interrupted")
        """
    else:
        rest = f"""
            results = iter(client.batch([{WRITES!r}, {sleeps!r}]))
            next(results)
            print("forgotten")
        """
    file.write_text(begun + dedent(rest))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, str(file)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        try:
            end = time.monotonic() + scaled(PATIENCE_S)
            while how == "interrupted" and not processes(f"sleep\0{nap}"):
                if child.poll() is not None or time.monotonic() > end:
                    child.kill()  # or it would be listened to for as long as it sleeps
                    pytest.fail(f"the agent did not come to sleep: {child.communicate()[0]}")
                time.sleep(0.05)
            if how == "interrupted":
                child.send_signal(signal.SIGINT)
            assert (child.communicate(timeout=scaled(PATIENCE_S))[0], child.returncode) == (f"{how}\n", 0)
        finally:
            child.kill()
    assert processes(f"sleep\0{nap}") == [] and left(temporary) == []


def test_a_client_that_is_closed_says_so(tmp_path: Path) -> None:
    client = opened(tmp_path)
    client.close()
    client.close()
    with pytest.raises(BadRequest, match="the client is closed"):
        client.run("Do it.")


def test_a_process_that_was_forked_has_no_part_in_it(tmp_path: Path, temporary: Path) -> None:
    """In a script: to fork is not for a process with as many threads as this one."""
    file = tmp_path / "script.py"
    begun = f"import turngate as tg\nmodel, given = {scripted(tmp_path, ['Hello.'])!r}, {AGENT!r}\n"
    rest = f"""
        import multiprocessing, os, sys

        client = tg.open(model, **given)
        half = iter(client.group({WRITES!r}, n=2))
        print(next(half).status, flush=True)
        worker = multiprocessing.get_context("fork").Process(target=print, args=("a worker",), kwargs={{"flush": True}})
        worker.start()
        worker.join()
        print(worker.exitcode, flush=True)
        if not (child := os.fork()):
            try:
                client.run("Do it.")
            except tg.TurngateError as error:
                print(error.param, "in this process" in error.message, flush=True)
            client.close()
            with tg.open(model, **given) as own:
                print("its own", own.run({WRITES!r}).status, flush=True)
            sys.exit(0)
        print(os.waitpid(child, 0)[1], client.run({WRITES!r}).status)
    """
    file.write_text(begun + dedent(rest))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    # Newer ones warn of fork itself.
    command = ["timeout", f"{scaled(60):.0f}", sys.executable, "-W", "ignore", str(file)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = ["finished", "a worker", "0", "client True", "its own finished", "0 finished"]
    assert (done.stdout.splitlines(), done.returncode) == (said, 0)
    assert left(temporary) == []


async def test_a_gateway_that_runs_is_used_with_its_own_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with kits.gateway([kits.say("From there.")]) as gateway:
        monkeypatch.setenv("TURNGATE_ADMIN_KEY", gateway.app.admin_key)
        result = await tg.run(WRITES, gateway=gateway.root, **AGENT)
        assert (result.status, result.files, result.turns[0].text) == (
            "finished",
            {"out.txt": "From there."},
            "From there.",
        )
        assert result.turns[0].pieces == ()  # its tokenizer is not here
        assert [session["id"] for session in (await gateway._ask("GET", "/admin/sessions"))["sessions"]] == [
            result.session
        ]


async def test_a_gateway_is_not_used_without_its_key() -> None:
    with pytest.raises(tg.TurngateError) as wrong:
        await tg.run("Do it.", gateway="http://127.0.0.1:9", **AGENT)
    assert "TURNGATE_ADMIN_KEY" in wrong.value.message


def _with(**given: Any) -> dict[str, Any]:
    return {"model": "scripted://any", "sandbox": "local", **given}


@pytest.mark.parametrize(
    ("task", "given", "told"),
    [
        ("Do it.", _with(timeout=3), "timeout is not a known argument; did you mean timeout_s?"),
        ("Do it.", _with(timeout_s="soon"), "timeout_s: Expected `float | null`, got `str`"),
        ("Do it.", _with(timeout_s=-1.0), "timeout_s must be a finite number of seconds greater than 0, not -1.0"),
        ("Do it.", _with(timeout_s=0.0), "timeout_s must be a finite number of seconds greater than 0, not 0.0"),
        ("Do it.", _with(sanbox="local"), "sanbox is not a known argument; did you mean sandbox?"),
        ("Do it.", _with(data=3), "data must be a path, not int"),
        ("Do it.", _with(model=None), "model must be an Endpoint, a ServiceConfig or a string such as vllm://"),
        ("Do it.", _with(max_turns=0), "max_turns: Expected `int` >= 1"),
        ("Do it.", _with(agent="py"), "unknown agent 'py'"),
        ("Do it.", _with(mode="exactly"), "mode must be one of exact, observe"),
        ("Do it.", _with(sandbox="moon"), "sandbox must be one of local, bubblewrap"),
        ("Do it.", _with(files={"/etc/passwd": "x"}), "files['/etc/passwd'] must be the path of a file below"),
        ("Do it.", _with(files={"a": 3}), "files['a'] must be str or bytes, not int"),
        ("Do it.", _with(concurrency=0), "concurrency: Expected `int` >= 1"),
        ("Do it.", _with(options={"command": "true"}), "options is set without an agent; pass agent= too"),
        ("", _with(), "task is empty; describe what the agent should do"),
        (3, _with(), "task must be a Task, a path, a row (a dict) or an instruction, not int"),
        ("examples/tasks/fix-ad", _with(), "task: examples/tasks/fix-ad does not exist"),
        ("examples/tasks", _with(), "task: examples/tasks contains several tasks; select one"),
        (
            "examples/tasks/fix-add",
            _with(test_script="true"),
            "test_script applies only to a task that is an instruction",
        ),
        ({"id": "a", "instruction": "b", "grade": 1}, _with(), "grade is not a known field"),
        ("Do it.", _with(model="vllm://Qwen/Qwen3-8B"), "model 'vllm://Qwen/Qwen3-8B' has no URL"),
        ("Do it.", _with(model="Qwen3-8B"), "model 'Qwen3-8B' is neither a catalog key nor KIND://MODEL"),
        ("Do it.", _with(model=""), "model is missing; pass one such as vllm://"),
        ("Do it.", _with(model="scripted://no.json"), "model: file no.json not found"),
        (
            "Do it.",
            _with(gateway="localhost:8700"),
            "gateway must be an http(s) URL such as http://127.0.0.1:8700, not 'localhost:8700'",
        ),
    ],
)
async def test_a_mistake_is_told_by_the_name_of_the_argument(task: Any, given: Any, told: str) -> None:
    with pytest.raises(tg.TurngateError) as wrong:
        await tg.run(task, **given)
    assert told in wrong.value.message, wrong.value.message
    assert wrong.value.param is not None or told.startswith("agent")


async def test_a_key_that_is_not_set_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(BadRequest, match="no key for the model openai://gpt-5; set OPENAI_API_KEY") as wrong:
        await tg.run("Do it.", model="openai://gpt-5", sandbox="local")
    assert wrong.value.param == "model"


@pytest.mark.parametrize(("n", "tasks"), [(0, ["a"]), (True, ["a"]), (1, []), (1, "Do it."), (1, 3)])
async def test_many_are_asked_for_in_a_way_that_can_be_done(n: Any, tasks: Any) -> None:
    with pytest.raises(BadRequest, match=r"^(n|tasks) "):
        await tg.batch(tasks, n, **_with())
