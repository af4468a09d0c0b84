"""Tests for the parts of examples/train/h200 that need no GPU: tasks, chat template and the agent fork server."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.speed import scaled
from turngate.render import BUILTIN_TOKENIZER, load_renderer

pytestmark = pytest.mark.process

FOLDER = Path(__file__).parents[2] / "examples" / "train" / "h200"


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("h200_tasks", FOLDER / "tasks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_expert_moves_solve_every_task_kind(tasks: ModuleType, tmp_path: Path) -> None:
    kinds = set()
    for row in tasks.expert(14):
        folder = tmp_path / row["id"]
        folder.mkdir()
        for name, text in row["files"].items():
            (folder / name).write_text(text)
        subject = SimpleNamespace(folder=folder, task=SimpleNamespace(metadata=row["metadata"]))
        assert tasks.grade(subject) == 0.0
        seen = ""
        for move in row["metadata"]["moves"]:
            done = subprocess.run(
                move.replace("{seen}", seen), shell=True, cwd=folder, capture_output=True, text=True, check=True
            )
            seen = (done.stdout.split() or [seen])[-1]
        assert tasks.grade(subject) == 1.0, row["id"]
        kinds.add(row["metadata"]["kind"])
    assert kinds == set(tasks.KINDS)


def test_wrong_answer_earns_partial_reward(tasks: ModuleType, tmp_path: Path) -> None:
    row = next(row for row in tasks.training() if row["metadata"]["kind"] == "last")
    for name, text in {**row["files"], **dict.fromkeys(row["metadata"]["after"], "wrong")}.items():
        (tmp_path / name).write_text(text)
    assert (
        tasks.grade(SimpleNamespace(folder=tmp_path, task=SimpleNamespace(metadata=row["metadata"])))
        == tasks.PARTIAL_REWARD
    )


def test_held_out_tasks_share_no_words_with_training(tasks: ModuleType) -> None:
    assert not set(tasks.TRAINING) & set(tasks.HELD_OUT)
    assert next(tasks.training()) == next(tasks.training())
    assert next(tasks.training())["files"] != next(tasks.expert())["files"]


def test_chat_template_is_certified(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BUILTIN_TOKENIZER / name, tmp_path / name)
    shutil.copyfile(FOLDER / "chat_template.jinja", tmp_path / "chat_template.jinja")
    _, certificate = load_renderer(tmp_path)
    assert certificate.passed, certificate


# ── fork_server.py ──────────────────────────────────────────────────────────────────────────────────────────────────


AGENT = """
import os, sys, time
if __name__ == "__main__":
    import colorsys
    if sys.argv[1] == "wait":
        print(os.getpid(), flush=True)
        time.sleep(3600)
    if sys.argv[1] == "close":
        sys.stdout = None
        sys.exit(int(sys.argv[2]))
    print(sys.argv[1:], os.environ["MINE"], os.getcwd(), sys.stdin.read(), "own_other" in sys.modules)
    import own_other
    sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def socket_path(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "own_agent.py").write_text(AGENT)
    (tmp_path / "own_other.py").write_text("")
    command = [
        sys.executable,
        str(FOLDER / "fork_server.py"),
        str(tmp_path / "socket"),
        str(tmp_path),
        "own_agent",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == b"ready\n"
            yield str(tmp_path / "socket")
        finally:
            server.kill()


def _run(socket_path: str, *arguments: str, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", str(FOLDER / "fork_client.py"), socket_path, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, **options)  # type: ignore[call-overload,no-any-return]


def test_forked_agent_inherits_caller_context(socket_path: str, tmp_path: Path) -> None:
    for known in (False, True):  # modules imported by the first run stay loaded
        with _run(socket_path, "go", "7", env={"MINE": "yes"}, cwd=tmp_path) as caller:
            out, err = caller.communicate(b"said", timeout=scaled(20))
        assert (caller.returncode, out.decode(), err) == (7, f"['go', '7'] yes {tmp_path} said {known}\n", b"")


def test_server_ends_with_its_owner(tmp_path: Path) -> None:
    (tmp_path / "own_agent.py").write_text(AGENT)
    socket_path = str(tmp_path / "socket")
    command = [sys.executable, str(FOLDER / "fork_server.py"), socket_path, str(tmp_path), "own_agent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        with _run(socket_path, "wait", "0") as caller:
            assert caller.stdout is not None and caller.stdout.readline()
            server.stdin.close()
            assert server.wait(timeout=scaled(20)) == 0
            assert caller.wait(timeout=scaled(20)) == 1


def test_silent_and_broken_callers_do_not_stop_the_server(socket_path: str) -> None:
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as broken:
        silent.connect(socket_path)
        broken.connect(socket_path)
        socket.send_fds(broken, [(9).to_bytes(4, "little")], [0, 1, 2])
        broken.sendall(b"no fields")
        with _run(socket_path, "go", "0", env={"MINE": ""}) as caller:
            caller.communicate(b"", timeout=scaled(40))
        assert caller.returncode == 0
        with _run(socket_path, "go", "0", env={f"MINE{n}": "x" * 120_000 for n in range(10)}) as caller:
            _, err = caller.communicate(b"", timeout=scaled(20))
        assert (caller.returncode, err) == (1, b"fork_client.py: the arguments and the environment are too large\n")


def test_exit_code_survives_closed_output(socket_path: str) -> None:
    with _run(socket_path, "close", "7", env={"MINE": ""}) as caller:
        _, err = caller.communicate(b"", timeout=scaled(20))
    assert (caller.returncode, err) == (7, b"")


def test_killed_caller_ends_its_agent(socket_path: str) -> None:
    with _run(socket_path, "wait", "0") as caller:
        assert caller.stdout is not None
        pid = int(caller.stdout.readline())
        caller.send_signal(signal.SIGKILL)
    end = time.monotonic() + scaled(5)
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, "the agent outlived its caller"
        time.sleep(0.02)
    with _run(socket_path, "go", "0", env={"MINE": ""}) as caller:  # other agents still work
        caller.communicate(b"", timeout=scaled(20))
    assert caller.returncode == 0
