"""The commands and the Python code of the documentation work: each page is followed as a reader would."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from gauntlet.tokens import Model, model_folder
from tests.docs import warm_programs
from tests.docs.blocks import PAGES, ROOT
from tests.docs.engine import SOLUTION, SolvingEngine, StandInApi
from tests.docs.pages import SETTINGS, UNRUN
from tests.docs.script import PORTS, Script, Setting, write_command
from tests.docs.workspace import MODEL, environment, prepare
from tests.needs import HEAVY, needs
from tests.ports import free_ports
from tests.speed import SLOWNESS, scaled, slowness
from tools.agent_names import AGENTS
from turngate.agents.install import cache_folder


def read_script(page: str) -> Script:
    unrun = tuple(entry.start for entry in UNRUN if entry.page == page)
    return Script(page, SETTINGS.get(page, Setting()), unrun)


def find_parts(script: Script) -> set[str]:
    """Return the parts that the script of a page needs."""
    text = "\n".join(script.read_texts())
    parts = {
        f"agent:{name}" for name in AGENTS if re.search(rf"\b(agent[ =\"]+|agents (install|check).*\b){name}\b", text)
    }
    if re.search(r"turngate run\s*(#|$)", text, re.M):
        parts.add("agent:mini-swe-agent")
    if re.search(r"^claude ", text, re.M):
        parts.add("agent:claude-code")
    if re.search(r"--sandbox bubblewrap|get_backend\(\"bubblewrap", text):
        parts.add("bubblewrap")
    if "8B" in text or ":8000" in text:
        parts.add("tokenizers")
    return parts | set(script.setting.parts)


def pages() -> Iterator[Any]:
    for page in PAGES:
        script = read_script(page)
        if script.steps:
            parts = find_parts(script)
            marks = [pytest.mark.process, pytest.mark.needs("curl", *sorted(parts))]
            if parts & (HEAVY.keys() | {"tokenizers"}) or script.setting.is_slow:  # a large tokenizer takes seconds
                marks.append(pytest.mark.full)
            if script.setting.repeats:
                marks.append(pytest.mark.repeat)
            yield pytest.param(page, marks=marks, id=page)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The socket of a process that forks the programs of the pages. It loads the tokenizer of their model if a page needs it."""
    with tempfile.TemporaryDirectory(prefix="tg-") as folder:
        socket = Path(folder) / "socket"
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": folder, "LANG": "C.UTF-8"}
        env |= {"TURNGATE_CACHE": str(cache_folder()), SLOWNESS: str(slowness())}
        if any("tokenizers" in needs(item) for item in request.session.items if "test_page_works" in item.nodeid):
            env[warm_programs.TOKENIZER] = f"{model_folder()} {MODEL}"
        process = subprocess.Popen([sys.executable, "-m", "tests.docs.warm_programs", str(socket)], cwd=folder, env=env)
        end = time.monotonic() + scaled(30)
        while not socket.exists():
            assert process.poll() is None and time.monotonic() < end, "the server did not start"
            time.sleep(0.05)
        yield socket
        process.terminate()
        process.wait()


@pytest.fixture
def folder(server: Path) -> Iterator[Path]:
    """A short path, because sandboxes put unix sockets below it."""
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    prepare(folder, server)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.timeout(scaled(300))
@pytest.mark.sample(8)
@pytest.mark.parametrize("page", list(pages()))
def test_page_works(page: str, folder: Path) -> None:
    clone = folder / "clone"
    (folder / "page.sh").write_text(
        read_script(page).write(clone, dict(zip(PORTS, free_ports(len(PORTS)), strict=True))), encoding="utf-8"
    )
    log = folder / "page.log"
    with log.open("w") as output:
        script = subprocess.Popen(
            ["bash", str(folder / "page.sh")],
            cwd=clone,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        script.wait(scaled(240))
    except subprocess.TimeoutExpired:
        os.killpg(script.pid, signal.SIGTERM)  # the script stops its servers
        script.wait()
    assert script.returncode == 0, log.read_text(errors="replace")[-6000:]


@pytest.mark.needs("tokenizers")
async def test_stand_in_solves_the_task_and_scores_it() -> None:
    api = StandInApi(SolvingEngine(Model(model_folder())), "policy")
    async with TestClient(TestServer(api.app())) as client:

        async def complete(prompt: object, **fields: object) -> Any:
            body = {"prompt": prompt, "max_tokens": 100, "logprobs": 1, "return_token_ids": True, **fields}
            return (await (await client.post("/v1/completions", json=body)).json())["choices"][0]

        asked = await complete('{"name": "bash"}: fix add')
        assert SOLUTION in asked["text"]
        assert (await complete(f'{{"name": "bash"}} {SOLUTION}'))["text"].startswith("Done")
        ids = [*asked["prompt_token_ids"], *asked["token_ids"]]
        scores = (await complete(ids, prompt_logprobs=0))["prompt_logprobs"]
        assert scores[-1][str(ids[-1])]["logprob"] == asked["logprobs"]["token_logprobs"][-1]


@pytest.mark.parametrize("entry", UNRUN, ids=lambda entry: f"{entry.page}: {entry.start}")
def test_unrun_entry_is_not_stale(entry: Any) -> None:
    complete = Script(entry.page, Setting())
    assert any(step.text.startswith(entry.start) for step in complete.steps), "no such command or block"
    assert not entry.test or (ROOT / entry.test).exists()


def test_setting_is_not_stale() -> None:
    assert not [page for page in SETTINGS if not read_script(page).steps]
    assert all((ROOT / setting.repeats).exists() for setting in SETTINGS.values())


@pytest.mark.parametrize(
    ("command", "written"),
    [
        ("turngate run   # why", "turngate run   # why"),
        ("turngate serve   # open it", "stop_server 8700; turngate serve --port 8700 & await_server $! 8700"),
        ("turngate serve --port 8701 &", "stop_server 8701; turngate serve --port 8701 & await_server $! 8701"),
        (
            "turngate serve # Ctrl-C stops it",
            "stop_server 8700; turngate serve --port 8700 & await_server $! 8700; stop_server 8700",
        ),
        ("turngate batch --rounds 90", "turngate batch --rounds 90 --concurrency 2 &"),
        ("turngate doctor  # all", "turngate doctor --port 8701  # all"),
        ("turngate doctor --gateway U", "turngate doctor --gateway U"),
    ],
)
def test_commands_without_an_end_run_in_the_background(command: str, written: str) -> None:
    assert write_command(command) == written
