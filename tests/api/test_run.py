"""Rollouts from Python: results, order, errors, and cleanup after interrupts."""

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
from tests.api.kit import AGENT, SLEEP_S, open_client, program, write_script
from tests.cli.kit import ROOT
from tests.sandboxes.kit import processes, wait_until
from tests.speed import scaled
from turngate.api.task import iter_tasks
from turngate.errors import BadRequest, ConfigError, TaskError
from turngate.tasks.task import Part, Rubric, Swe, Task

pytestmark = [pytest.mark.process, pytest.mark.full]

TIMEOUT_S = 60  # to start Python, a gateway and an agent on a busy machine
SLEEPING = program(f"import subprocess; ask('Hi'); subprocess.run(['sleep', '{SLEEP_S}'])")
WRITES = program("open('out.txt', 'w').write(ask('Hi'))")


@pytest.fixture(scope="module")
def client() -> Iterator[tg.BlockingClient]:
    """A shared client, since starting a gateway takes most of a second."""
    with tempfile.TemporaryDirectory() as folder, open_client(Path(folder), ["Hello <b>you</b>.", "Again."]) as client:
        yield client


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for temporary files, with a path short enough for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="tg-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def leftovers(folder: Path) -> list[Path]:
    """The remaining files, except the folder that all sandboxes of this user share."""
    return [path for path in folder.rglob("*") if path != folder / f"turngate-{os.getuid()}"]


def test_messages_of_a_rollout_without_a_main_conversation(client: tg.BlockingClient) -> None:
    result = client.run(program("ask('One?'); ask('Two?')"))
    assert [turn.role for turn in result.turns] == ["unknown", "unknown"], result.error
    assert [message["content"] for message in result.messages] == ["Two?", "Again."]


def test_result_has_outcome_files_and_tokens(client: tg.BlockingClient) -> None:
    task = program("first = ask('Hi'); print(first); open('a/out.txt', 'w').write(ask('Hi', first, 'And?'))")
    result = client.run(
        task,
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


def test_changed_files_of_task_come_first(client: tg.BlockingClient, tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("old")
    task = tg.Task(id="change", instruction=program("ask('Hi'); open('b.txt', 'w').write('new')"), files=tmp_path)
    assert list(client.run(task).files.items()) == [("b.txt", "new"), ("a.txt", "old")]


def test_files_of_whole_repository_are_left_out(client: tg.BlockingClient, tmp_path: Path) -> None:
    grader = Swe(repo="org/repo", base_commit="", test_patch="", fail_to_pass=("a",), pass_to_pass=(), test_cmd="true")
    rubric = Rubric(parts=(Part(name="tests", weight=1.0, grader=grader),))
    for task in (tg.Task(id="swe", instruction=WRITES, grader=one) for one in (grader, rubric)):
        result = client.run(task)
        assert result.files == {} and any("is a whole repository" in note for note in result.clamped)
    (tmp_path / "a.txt").write_text("old")  # not the files of an image
    result = client.run(tg.Task(id="swe", instruction=WRITES, grader=grader, files=tmp_path))
    assert list(result.files) == ["out.txt", "a.txt"]


def test_group_statistics_and_advantages(client: tg.BlockingClient) -> None:
    task = program("ask('Hi'); import os, uuid; open('out.txt', 'w').write(os.environ['TURNGATE_MODEL'])")
    results = client.group(task, n=3, test_script="test -s out.txt", task_id="three").all()
    assert results.rewards == [1.0, 1.0, 1.0] and results.mean_reward == 1.0 and results.pass_at(2) == 1.0
    [name] = results.groups
    assert name.startswith("three-") and len({one.session for one in results}) == 3
    rows = results.rows()
    assert [row.advantage for row in rows] == [0.0, 0.0, 0.0] and all(row.weight == 1.0 for row in rows)


def test_batch_of_rows_keeps_order(client: tg.BlockingClient, tmp_path: Path) -> None:
    rows = [{"id": f"row-{n}", "instruction": program(f"time.sleep({0.5 - n / 2}); ask('Hi')")} for n in range(2)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [one.task_id for one in client.batch(tmp_path / "rows.jsonl").all()] == ["row-0", "row-1"]
    wanted = [rows[1], f"{tmp_path}/rows.jsonl#row-1", f"{tmp_path}/rows.jsonl#2"]
    assert [one.task_id for one in client.batch(wanted)] == ["row-1"] * 3
    for missing in ("3", "²", "9" * 500):
        with pytest.raises(TaskError, match=r"has no row 3|no task in .* matches"):
            client.run(f"{tmp_path}/rows.jsonl#{missing}")


def test_instruction_may_be_longer_than_a_file_name(client: tg.BlockingClient) -> None:
    assert client.run(f"print('hi')  # {'x' * 300}").status == "finished"
    assert client.run("~nobody").status == "failed"  # it ran: not a path in a home folder, and not valid Python


def test_failed_setup_is_a_result(client: tg.BlockingClient) -> None:
    result = client.run("Do it.", setup="echo broken >&2; exit 3")
    assert result.error is not None and (result.error.boundary, result.error.stage) == ("task", "setup")
    assert (result.status, result.kind, result.reward, result.turns) == ("error", "invalid task", None, ())
    assert result.wall_s > 0 and "broken" in result.error.message


def test_max_turns_ends_rollout(client: tg.BlockingClient) -> None:
    result = client.run(program("ask('Hi'); ask('Hi'); ask('Hi')"), max_turns=2)
    assert (result.status, len(result.turns)) == ("limit", 2)


def test_results_are_read_once(client: tg.BlockingClient) -> None:
    """Reading them again would run the rollouts again."""
    batch = client.batch(["print('hi')"])
    assert len(list(batch)) == 1
    for read in (list, lambda batch: batch.all()):
        with pytest.raises(ConfigError, match="keep the results, for example in a list"):
            read(batch)


async def test_async_results_are_read_once(tmp_path: Path) -> None:
    group = tg.group("print('hi')", 1, model=write_script(tmp_path, ["Hello."]), **AGENT)
    assert len(await group) == 1
    with pytest.raises(ConfigError, match="keep the results, for example in a list"):
        await group
    with pytest.raises(ConfigError, match="keep the results, for example in a list"):
        [result async for result in group]


def test_breaking_out_of_batch_ends_remaining_rollouts(client: tg.BlockingClient) -> None:
    for result in client.batch([WRITES, SLEEPING], test_script="test -s out.txt"):
        assert result.reward == 1.0
        break
    assert processes(SLEEP_S) == []
    assert client.run(WRITES).status == "finished"  # the client still works


async def test_async_and_sync_run_inside_running_loop(tmp_path: Path, temporary: Path) -> None:
    model = write_script(tmp_path, ["Hello."])
    result = await tg.run(WRITES, model=model, **AGENT)
    assert (result.status, result.files) == ("finished", {"out.txt": "Hello."})
    same = tg.run_sync(WRITES, model=model, **AGENT)  # as in a notebook cell
    assert (same.status, same.files) == ("finished", {"out.txt": "Hello."})
    assert leftovers(temporary) == []


async def test_concurrent_runs_keep_their_models(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one, other = write_script(tmp_path, ["One."]), write_script(tmp_path / "other", ["Other."])

    async def run_group() -> list[str]:
        return [result.turns[0].text async for result in tg.group(WRITES, n=2, model=one, **AGENT)]

    other_run = tg.run(WRITES, model=other, data=tmp_path / "data", **AGENT)
    texts, result = await asyncio.gather(run_group(), other_run)
    assert texts == ["One.", "One."] and result.turns[0].text == "Other."
    assert result.work is not None and (result.work / "out.txt").read_text() == "Other."  # in the given folder


async def test_cancellation_ends_agent_and_cleans_up(tmp_path: Path, temporary: Path) -> None:
    running = asyncio.create_task(tg.run(SLEEPING, model=write_script(tmp_path, ["Hello."]), **AGENT))
    await wait_until(lambda: processes(SLEEP_S) or running.done(), 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert processes(SLEEP_S) == [] and leftovers(temporary) == []


@pytest.mark.parametrize("ending", ["interrupted", "forgotten"])
def test_interrupted_or_ending_script_cleans_up(tmp_path: Path, temporary: Path, ending: str) -> None:
    """In a separate process, to send SIGINT."""
    sleep_s = SLEEP_S.replace("66", "67", 1)
    file = tmp_path / "script.py"
    sleeps = program(f"import subprocess; ask('Hi'); subprocess.run(['sleep', '{sleep_s}'])")
    enable_sigint = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background shells ignore it
    )
    header = (
        f"{enable_sigint}import turngate as tg\nclient = tg.open({write_script(tmp_path, ['Hello.'])!r}, **{AGENT!r})\n"
    )
    if ending == "interrupted":
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
    file.write_text(header + dedent(rest))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, str(file)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        try:
            end = time.monotonic() + scaled(TIMEOUT_S)
            while ending == "interrupted" and not processes(f"sleep\0{sleep_s}"):
                if child.poll() is not None or time.monotonic() > end:
                    child.kill()  # so that communicate() returns
                    pytest.fail(f"the agent did not start to sleep: {child.communicate()[0]}")
                time.sleep(0.05)
            if ending == "interrupted":
                child.send_signal(signal.SIGINT)
            assert (child.communicate(timeout=scaled(TIMEOUT_S))[0], child.returncode) == (f"{ending}\n", 0)
        finally:
            child.kill()
    assert processes(f"sleep\0{sleep_s}") == [] and leftovers(temporary) == []


def test_closed_client_is_rejected(tmp_path: Path) -> None:
    client = open_client(tmp_path)
    client.close()
    client.close()
    with pytest.raises(BadRequest, match="the client is closed"):
        client.run("Do it.")


def test_forked_process_cannot_use_client(tmp_path: Path, temporary: Path) -> None:
    """In a script, since this process has too many threads to fork."""
    file = tmp_path / "script.py"
    header = f"import turngate as tg\nmodel, given = {write_script(tmp_path, ['Hello.'])!r}, {AGENT!r}\n"
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
    file.write_text(header + dedent(rest))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    # Newer Python versions warn about fork.
    command = ["timeout", f"{scaled(60):.0f}", sys.executable, "-W", "ignore", str(file)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    expected = ["finished", "a worker", "0", "client True", "its own finished", "0 finished"]
    assert (done.stdout.splitlines(), done.returncode) == (expected, 0)
    assert leftovers(temporary) == []


async def test_running_gateway_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with kits.gateway([kits.say("From there.")]) as gateway:
        monkeypatch.setenv("TURNGATE_ADMIN_KEY", gateway.app.admin_key)
        result = await tg.run(WRITES, gateway=gateway.root, **AGENT)
        assert (result.status, result.files, result.turns[0].text) == (
            "finished",
            {"out.txt": "From there."},
            "From there.",
        )
        assert result.turns[0].pieces == ()  # the tokenizer is not available here
        assert [session["id"] for session in (await gateway._request("GET", "/admin/sessions"))["sessions"]] == [
            result.session
        ]


async def test_gateway_needs_admin_key() -> None:
    with pytest.raises(tg.TurngateError) as wrong:
        await tg.run("Do it.", gateway="http://127.0.0.1:9", **AGENT)
    assert "TURNGATE_ADMIN_KEY" in wrong.value.message


def arguments(**options: Any) -> dict[str, Any]:
    return {"model": "scripted://any", "sandbox": "local", **options}


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("Do it.", arguments(timeout=3), "timeout is not a known argument; did you mean timeout_s?"),
        ("Do it.", arguments(timeout_s="soon"), "timeout_s must be a number, not a string"),
        ("Do it.", arguments(timeout_s=-1.0), "timeout_s must be a finite number of seconds greater than 0, not -1.0"),
        ("Do it.", arguments(timeout_s=0.0), "timeout_s must be a finite number of seconds greater than 0, not 0.0"),
        ("Do it.", arguments(sanbox="local"), "sanbox is not a known argument; did you mean sandbox?"),
        ("Do it.", arguments(data=3), "data must be a path, not int"),
        ("Do it.", arguments(model=None), "model must be an Endpoint, a ServiceConfig or a string such as vllm://"),
        ("Do it.", arguments(max_turns=0), "max_turns must be an integer of at least 1"),
        ("Do it.", arguments(agent="py"), "unknown agent 'py'"),
        ("Do it.", arguments(mode="exactly"), "mode must be one of exact, observe"),
        ("Do it.", arguments(sandbox="moon"), "sandbox must be one of local, bubblewrap"),
        (
            "Do it.",
            arguments(files={"/etc/passwd": "x"}),
            "files['/etc/passwd'] must be the relative path of a file below",
        ),
        ("Do it.", arguments(files={"a": 3}), "files['a'] must be str or bytes, not int"),
        ("Do it.", arguments(concurrency=0), "concurrency must be an integer of at least 1"),
        ("Do it.", arguments(options={"command": "true"}), "options= needs an agent; also pass agent="),
        ("", arguments(), "task is empty; describe what the agent should do"),
        (3, arguments(), "task must be a Task, a path, a row (a dict) or an instruction, not int"),
        ("examples/tasks/fix-ad", arguments(), "task: examples/tasks/fix-ad does not exist"),
        ("examples/tasks", arguments(), "task: examples/tasks contains several tasks; select one"),
        (
            "examples/tasks/fix-add",
            arguments(test_script="true"),
            "test_script= applies only if the task is an instruction",
        ),
        ({"id": "a", "instruction": "b", "grade": 1}, arguments(), "grade is not a known field"),
        ("Do it.", arguments(model="vllm://Qwen/Qwen3-8B"), "model 'vllm://Qwen/Qwen3-8B' has no URL"),
        ("Do it.", arguments(model="Qwen3-8B"), "model 'Qwen3-8B' is neither a catalog key nor KIND://MODEL"),
        ("Do it.", arguments(model=""), "model is missing; pass a model such as vllm://"),
        ("Do it.", arguments(model="scripted://no.json"), "model: file no.json not found"),
        (
            "Do it.",
            arguments(gateway="localhost:8700"),
            "gateway must be an http(s) URL such as http://127.0.0.1:8700, not 'localhost:8700'",
        ),
    ],
)
async def test_invalid_argument_is_named(task: Any, options: Any, message: str) -> None:
    with pytest.raises(tg.TurngateError) as wrong:
        await tg.run(task, **options)
    assert message in wrong.value.message, wrong.value.message
    assert wrong.value.param is not None or message.startswith("agent")


def test_function_is_a_source_of_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("def load():\n    return [{'id': 'a', 'instruction': 'Do it.'}]\n")
    monkeypatch.chdir(tmp_path)
    assert [task.id for task in iter_tasks("own.py:load") if isinstance(task, Task)] == ["a"]
    with pytest.raises(BadRequest, match=r"file\.py:function, not 'Do it\.'"):
        next(iter_tasks("Do it."))


async def test_unset_api_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(BadRequest, match="no valid key for the endpoint openai://gpt-5; set OPENAI_API_KEY") as wrong:
        await tg.run("Do it.", model="openai://gpt-5", sandbox="local")
    assert wrong.value.param == "model"


@pytest.mark.parametrize(("n", "tasks"), [(0, ["a"]), (True, ["a"]), (1, []), (1, "Do it."), (1, 3)])
async def test_invalid_batch_size_or_tasks_are_rejected(n: Any, tasks: Any) -> None:
    with pytest.raises(BadRequest, match=r"^(n|tasks) "):
        await tg.batch(tasks, n, **arguments())
