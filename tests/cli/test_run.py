"""`turngate run` as a person meets it: what it prints and where, what it is refused for, how it ends, and that Ctrl-C cleans up."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli import test_serve
from tests.cli.kit import NAP, ROOT, process, ran, refused
from tests.kit import gateway
from tests.sandboxes import kit as sandboxes
from tests.speed import paced, scaled
from turngate.server.bind import RunningGateway
from turngate.store.sqlite import Store

pytestmark = [pytest.mark.process, pytest.mark.full]

ASK = """
import json, os, urllib.request
body = json.dumps({"model": os.environ["TURNGATE_MODEL"], "messages": [{"role": "user", "content": "Hi"}]}).encode()
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
)
print(json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request))["choices"][0]["message"]["content"])
"""
ONCE = f"python3 -c {shlex.quote(ASK)}"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where sandboxes lie; nothing of them is left. (`tmp_path` is asked for first, since pytest makes it in the machine's own.)"""
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("HOME", str(folder / "nobody"))  # whose own agents are not in the way
    yield
    left = [path.name for path in folder.glob("turngate-*/*")]
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    assert left == []


def shell(data: Path, command: str, *more: str | Path, prompt: str = "Do it.") -> list[str | Path]:
    """The words of a run of the `shell` agent."""
    asked = () if "--task" in more else ("--prompt", prompt)
    return ["run", "--agent", "shell", "--data", data, "--set", f"command={command}", *asked, *more]


def outcome_of(data: Path) -> Any:
    [folder] = (data / "rollouts").iterdir()
    return json.loads((folder / "outcome.json").read_text())


def sessions(data: Path) -> list[tuple[str, str]]:
    store = Store.reading(data)
    try:
        return [(row.status, row.stop) for row in store.sessions(limit=10)]
    finally:
        store.close()


# ── what is wrong is said ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "pass exactly one of --task PATH and --prompt TEXT"),
        (["--task", "x", "--prompt", "y"], "pass exactly one of --task PATH and --prompt TEXT"),
        (["--task", "/no/such/task"], "task: /no/such/task does not exist; specify a folder with an instruction.md"),
        (["--prompt", " "], "task: prompt is empty; describe what the agent should do"),
        (["--prompt", "x", "--network", "some"], "network must be none or open, not 'some'"),
        (
            ["--prompt", "x", "--sandbox", "vm"],
            "sandbox must be one of local, bubblewrap, docker, e2b, huggingface, not 'vm'",
        ),
        (
            ["--prompt", "x"],
            "options.command: shell requires this option; pass --set command=… (the command line to run",
        ),
        (["--prompt", "x", "--set", "command"], "--set must be NAME=VALUE, not 'command'"),
        (["--prompt", "x", "--set", "comand=x"], "options.comand: shell has no such option; did you mean command?"),
        (["--prompt", "x", "--timeout", "0"], "timeout must be greater than 0, not 0.0"),
        (["--prompt", "x", "--timeout", "nan"], "timeout must be greater than 0, not nan"),
        (["--prompt", "x", "--max-turns", "-1"], "max_turns must be greater than 0, not -1"),
        (["--prompt", "x", "--memory-mb", "0"], "memory_mb must be greater than 0, not 0"),
        (["--prompt", "x", "--script", "/no/file"], "script /no/file cannot be read: No such file or directory"),
        (["--prompt", "x", "--engine", "vlm"], "engine must be one of vllm, sglang, "),
        (["--prompt", "x", "--public-url", "here"], "public_url must be an http(s) URL, not 'here'"),
        (
            ["--prompt", "x", "--public-url", "http://x", "--tunnel", "y"],
            "tunnel and public_url cannot both be set",
        ),
        (["--prompt", "x", "--gateway", "here"], "TURNGATE_ADMIN_KEY is not set; set it to the gateway's admin key"),
        (
            ["--prompt", "x", "--gateway", "http://x", "--engine", "vllm"],
            "engine cannot be set for the running gateway at http://x; remove --engine",
        ),
        (
            ["--prompt", "x", "--out", "/dev/null/x"],
            "out folder /dev/null/x is not writable; choose a different --out folder",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arguments: list[str], line: str, data: Path) -> None:
    command = ["--set", "command=true"] if "shell requires this option" not in line and "--set" not in arguments else []
    assert refused("run", "--agent", "shell", "--data", data, *command, *arguments).startswith(line)
    assert not (data / "rollouts").exists()


def test_an_agent_that_nobody_knows(data: Path) -> None:
    line = refused("run", "--agent", "claud-code", "--prompt", "x", "--data", data)
    assert line.startswith("unknown agent 'claud-code'; did you mean claude-code")


def test_an_agent_file_that_is_wrong_is_refused_by_its_field(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for text, wrong in {
        'name = "mine"\ntitle = "M"\ndialect = "chat"\ncomand = ["x"]\n': "command",
        'name = "mine"\ntitle = "M"\ndialect = "chats"\ncommand = ["x"]\n': "dialect",
        'name = "mine"\ntitle = "M"\ndialect = "chat"\ncommand = ["x", "{api_key}"]\n': "command[1]",
        'name = "mine"\ntitle = "M"\ndialect = "chat"\ncommand = ["{modle}"]\n': "command[0]",
    }.items():
        file.write_text(text)
        line = refused("run", "--agent", str(file), "--prompt", "x", "--data", data)
        assert line.startswith(f"{file}: ") and wrong in line


def test_a_gateway_that_is_not_there_or_not_ours(data: Path) -> None:
    key = {"TURNGATE_ADMIN_KEY": "k" * 20}
    line = refused(*shell(data, "true", "--gateway", "http://127.0.0.1:9"), env=key)
    assert line.startswith("gateway: http://127.0.0.1:9 cannot be reached")
    assert refused(*shell(data, "true", "--gateway", "here"), env=key) == "gateway: 'here' is not an http(s) URL"


async def test_a_gateway_with_another_key(data: Path) -> None:
    async with gateway() as g:
        with process(*shell(data, "true", "--gateway", g.root), TURNGATE_ADMIN_KEY="wrong" * 5) as running:
            assert await asyncio.to_thread(running.ended) == 2
        assert running.output.startswith("turngate: gateway: the admin key is missing or wrong")
        assert running.output.endswith("(the key is read from TURNGATE_ADMIN_KEY)\n")
        assert "wrong" * 5 not in running.output
        assert not data.exists()


# ── how it ends ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.real
def test_a_run_that_finishes(data: Path) -> None:
    done = ran(*shell(data, ONCE))
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    lines = done.stdout.splitlines()
    stages = [line.split()[1] for line in lines if line[0].isdigit()]
    assert [stage for n, stage in enumerate(stages) if stage not in stages[:n]] == [
        *("sandbox", "files", "setup", "session", "relay", "launch", "agent", "seal", "collect", "clean", "done")
    ]
    outcome = outcome_of(data)
    assert "\x1b" not in done.stdout
    assert any(line.startswith("finished (exit code 0) after ") for line in lines)
    assert f"  trace   1 turn (1 main), {outcome['sampled_tokens']} sampled tokens, 1 row" in lines
    assert f"  inspect turngate show {outcome['session']} --data {data}" in lines
    assert f"  files   {data / 'rollouts' / outcome['session']}" in lines
    assert "  sandbox local does not isolate: network" in lines
    assert (outcome["status"], outcome["exit_code"], outcome["agent"]) == ("finished", 0, "shell")
    assert sessions(data) == [("sealed", "")]
    assert oct((data).stat().st_mode & 0o777) == "0o700"


def test_what_is_to_be_copied_is_in_one_piece(tmp_path: Path) -> None:
    """However long it is, and whatever characters are in it."""
    data = tmp_path / ("long folder [red]name[/red] :bomb: " * 4).strip()
    done = ran(*shell(data, "true"))
    outcome = outcome_of(data)
    [look] = [line for line in done.stdout.splitlines() if line.startswith("  look ")]
    assert look == f"  inspect turngate show {outcome['session']} --data {shlex.quote(str(data))}"
    shown = ran(*shlex.split(look)[2:])
    assert shown.exit_code == 0 and outcome["session"] in shown.stdout


def test_a_run_that_fails_says_the_agents_last_words(data: Path) -> None:
    done = ran(*shell(data, "echo one; echo two >&2; printf '[red]\\033[31mthree :bomb:\\n' >&2; exit 3"))
    assert done.exit_code == 1
    assert "failed (exit code 3) after " in done.stdout
    assert "  output  two\n  output  [red]␛[31mthree :bomb:\n" in done.stdout
    assert "\x1b" not in done.stdout and "1 row" not in done.stdout


def test_a_run_that_meets_a_limit(data: Path) -> None:
    done = ran(*shell(data, f"{ONCE}; {ONCE}", "--max-turns", "1"))
    assert done.exit_code == 1
    assert "limit (exit code 0) after " in done.stdout and "\n  limit   turns\n" in done.stdout
    assert outcome_of(data)["stop"] == "turns"


def test_a_run_that_runs_out_of_time(data: Path) -> None:
    done = ran(*shell(data, f"{ONCE}; sleep {NAP}", "--timeout", str(paced(1))))
    assert done.exit_code == 1
    assert "timed out after " in done.stdout
    assert "  trace   1 turn (1 main)" in done.stdout and ", kept\n" in done.stdout
    assert sessions(data) == [("sealed", "timed out")]


def test_a_run_that_is_not_the_agents_fault(data: Path, tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "instruction.md").write_text("Do it.")
    (tmp_path / "task" / "setup.sh").write_text("echo no such thing >&2; exit 4")
    done = ran(*shell(data, "true", "--task", tmp_path / "task"))
    assert done.exit_code == 3
    assert "error after " in done.stdout
    assert "  fault   task, in stage setup: setup.sh failed with exit code 4: no such thing\n" in done.stdout
    assert sessions(data) == []


def test_an_agent_that_is_not_there(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["no-such-program"]\n')
    done = ran("run", "--agent", str(file), "--prompt", "x", "--data", data)
    assert done.exit_code == 3
    assert "  fault   agent, in stage launch: mine: no-such-program not found in the local" in done.stdout


def test_as_json(data: Path) -> None:
    done = ran(*shell(data, ONCE, "--json"))
    assert done.exit_code == 0
    outcome = json.loads(done.stdout)
    assert outcome == outcome_of(data)
    assert (outcome["turns"], outcome["rows"], outcome["roles"]) == (1, 1, {"main": 1})
    assert "agent" in done.stderr and "\x1b" not in done.stderr  # progress, for people


def test_results_go_where_they_are_told_to(data: Path, tmp_path: Path) -> None:
    done = ran(*shell(data, "echo x > file", "--out", tmp_path / "out" / "there"))
    assert done.exit_code == 0
    [folder] = (tmp_path / "out" / "there").iterdir()
    assert (folder / "work" / "file").read_text() == "x\n" and (folder / "outcome.json").is_file()
    assert not (data / "rollouts").exists()


def test_a_script_and_a_model_of_ones_own(data: Path, tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text('["Said as told."]')
    words = shell(data, f"{ONCE}; echo $TURNGATE_MODEL", "--script", tmp_path / "script.json", "--model", "policy-1")
    assert ran(*words).exit_code == 0
    assert outcome_of(data)["collected"]["stdout"] == "Said as told.\npolicy-1\n"


@pytest.mark.parametrize(
    "prompt", ["-rf --help", "--", 'it\'s "so"\n$HOME `x`', "Grüße 🎉 \x1b[31m", "{prompt} {{x}} %s", "=" * 1000]
)
def test_a_prompt_reaches_the_agent_as_it_was_typed(prompt: str, data: Path) -> None:
    done = ran(*shell(data, 'cat > got; cmp got "$TURNGATE_PROMPT_FILE"', prompt=prompt))
    assert done.exit_code == 0, done.output
    [folder] = (data / "rollouts").iterdir()
    assert (folder / "work" / "got").read_bytes() == prompt.encode()


def test_a_long_task_reaches_the_agent_whole(data: Path, tmp_path: Path) -> None:
    text = "word é\n" * 20_000
    (tmp_path / "task.md").write_text(text)
    assert ran(*shell(data, "cat > got", "--task", tmp_path / "task.md")).exit_code == 0
    [folder] = (data / "rollouts").iterdir()
    assert (folder / "work" / "got").read_bytes() == text.encode()


def test_an_agent_of_ones_own_in_a_presets_place_is_told(data: Path, tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    file = tmp_path / "agents" / "mine.toml"
    file.write_text(
        'name = "pi"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["echo", "{greeting}"]\n'
        '[options.greeting]\nabout = "what to say"\ndefault = "hello"\n'
    )
    env = {"TURNGATE_AGENTS": str(tmp_path / "agents")}
    done = ran("run", "--agent", "pi", "--prompt", "x", "--data", data, "--set", "greeting=ho", env=env)
    assert done.exit_code == 0 and outcome_of(data)["collected"]["stdout"] == "ho\n"
    assert done.stderr.startswith(f"agent pi: {file} overrides ") and "catalog/pi.toml" in done.stderr


# ── which gateway ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_gateway_that_serves_the_folder_is_used(data: Path, tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text('["From the one that serves."]')
    with test_serve.process(data, "--script", tmp_path / "script.json", "--model", "policy-7") as served:
        done = ran(*shell(data, ONCE))
        assert done.exit_code == 0, done.output
        assert f"Using the gateway that already serves {data}: {served.url}" in done.stdout
        outcome = outcome_of(data)
        assert (outcome["collected"]["stdout"], outcome["model"]) == ("From the one that serves.\n", "policy-7")
        shown = ran("show", "--data", data)  # while it serves
        assert shown.exit_code == 0 and "From the one that serves." in shown.stdout
        # Which engine it has is not for a run to say.
        other = ran(*shell(data, ONCE, "--script", tmp_path / "script.json"))
        assert (
            other.exit_code == 2
            and "script cannot be set for the running gateway at" in other.stderr
            and "remove --script" in other.stderr
        )
        # And by its address, from anywhere.
        key = {"TURNGATE_ADMIN_KEY": (data / "admin-key").read_text().strip()}
        done = ran(*shell(tmp_path / "elsewhere", ONCE, "--gateway", served.url), env=key)
        assert done.exit_code == 0, done.output
        session = outcome_of(tmp_path / "elsewhere")["session"]
        assert f"  inspect turngate show {session} --gateway {served.url}\n" in done.stdout
        shown = ran("show", session, "--gateway", served.url, env=key)
        assert shown.exit_code == 0 and "policy-7" in shown.stdout
        assert not (tmp_path / "elsewhere" / "turngate.db").exists()


def test_two_runs_at_once_without_a_gateway_to_share(data: Path) -> None:
    with process(*shell(data, f"sleep {NAP}")) as first:
        first.says("agent")
        line = refused(*shell(data, "true"))
        assert line == (
            f"data folder {data} is in use by another turngate process; to share it between runs, start "
            f"`turngate serve --data {data}` first, or choose another --data folder"
        )
        first.send(signal.SIGINT)
        assert first.ended() == 130


def test_an_address_that_a_killed_gateway_left_behind_is_not_believed(data: Path) -> None:
    import msgspec

    data.mkdir(mode=0o700)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (data / "gateway.json").write_bytes(msgspec.json.encode(RunningGateway(f"http://127.0.0.1:{port}", os.getpid())))
    done = ran(*shell(data, ONCE))
    assert done.exit_code == 0 and "serves" not in done.stdout


# ── stopping it ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_being_stopped_in_the_middle_cleans_up_and_keeps_what_was_recorded(number: signal.Signals, data: Path) -> None:
    with process(*shell(data, f"{ONCE}; sleep {NAP}"), TMPDIR=os.environ["TMPDIR"]) as running:
        running.until(lambda: sandboxes.processes(f"sleep\0{NAP}"))
        running.send(number)
        assert running.ended() == 130
        assert "Stopping: ending the agent and removing its sandbox; the recording is kept …\n" in running.output
        assert "cancelled after " in running.output
        assert "  trace   1 turn (1 main), " in running.output and ", 1 row, kept\n" in running.output
        assert "  inspect turngate show " in running.output
        assert "Traceback" not in running.output
    assert sandboxes.processes(NAP) == []
    assert sessions(data) == [("cancelled", "cancelled")]
    assert outcome_of(data)["status"] == "cancelled"
    assert "turns   1 (1 main)" in ran("show", "--data", data).stdout


def test_a_second_time_says_that_it_is_being_done_and_a_third_gives_up(data: Path) -> None:
    """An agent that does not care for SIGTERM takes its time to end: here some seconds, and then for ever."""
    patience = "from turngate.sandboxes.supervised import SupervisedJob; SupervisedJob.kill.__defaults__ = ({},)"
    stubborn = f"trap '' TERM; sleep {NAP} & while :; do wait; done"
    where = {"TMPDIR": os.environ["TMPDIR"]}
    with process(*shell(data, stubborn), before=patience.format(paced(0.75)), **where) as running:
        running.until(lambda: sandboxes.processes(f"sleep\0{NAP}"))
        running.send(signal.SIGINT)
        running.says("Stopping")
        running.send(signal.SIGINT)
        running.says("Still cleaning up. Press Ctrl-C again to quit immediately and leave the cleanup to the next run.")
        assert running.ended() == 130
        assert "cancelled after" in running.output
    with process(*shell(data, stubborn), before=patience.format(3600), **where) as running:
        running.until(lambda: sandboxes.processes(f"sleep\0{NAP}"))
        for expected in ("Stopping", "Still"):
            running.send(signal.SIGINT)
            running.says(expected)
        running.send(signal.SIGINT)
        assert running.ended() == 130 and "cancelled after" not in running.output
    end = time.monotonic() + scaled(10)
    while sandboxes.processes(NAP) or list(Path(os.environ["TMPDIR"]).glob("turngate-*/*")):
        assert time.monotonic() < end  # whoever watches over the sandbox notices by himself
        time.sleep(0.05)
    assert [status for status, _ in sessions(data)][1:] == ["cancelled"]


def test_being_stopped_before_the_rollout_has_begun(data: Path) -> None:
    with process(*shell(data, "true", "--tunnel", f"sleep {NAP}"), TMPDIR=os.environ["TMPDIR"]) as running:
        running.until(lambda: sandboxes.processes(f"sleep\0{NAP}"))
        running.send(signal.SIGINT)
        assert running.ended() == 130
        assert running.output.endswith("Cancelled before the rollout started.\n")
    assert sandboxes.processes(NAP) == [] and sessions(data) == []


@pytest.mark.needs("docker")
@pytest.mark.real
@pytest.mark.real
def test_being_stopped_leaves_no_container(data: Path) -> None:
    sandboxes.need("docker")
    words = shell(data, f"{ONCE}; sleep {NAP}", "--sandbox", "docker")
    with process(*words, TMPDIR=os.environ["TMPDIR"]) as running:
        running.until(lambda: sandboxes.processes(f"sleep\0{NAP}"), 90)
        running.send(signal.SIGINT)
        assert running.ended() == 130
    listed = ["docker", "ps", "--all", "--format", '{{.Label "turngate.owner"}}']
    owners = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    assert f" {running.process.pid} " not in owners
    assert sandboxes.processes(NAP) == []


# ── on a terminal ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_progress_is_one_line_that_changes(data: Path) -> None:
    """In a terminal of 40 columns, which is narrower than the line."""
    with process(*shell(data, f"{ONCE}; sleep {paced(0.5):.1f}"), columns=40) as running:
        assert running.ended() == 0
        raw = running.output
        assert raw.count("\x1b[?25l") == raw.count("\x1b[?25h") == 1  # the cursor is hidden, and comes back
        for stage in ("relay", "agent"):
            assert stage in running.plain
        assert "1 turn ·" in running.plain
        assert "0:0" in running.plain and "\x1b[2K" in raw
        last = running.plain[running.plain.rindex("finished (exit code 0)") :]
        session = outcome_of(data)["session"]
        # Longer than the terminal is wide, and not broken up by us.
        assert f"\n  inspect turngate show {session} --data {data}\n" in last
        progress = [line for line in running.plain[: running.plain.rindex("finished")].split("\r") if line.strip()]
        assert all(len(line.rstrip("\n")) <= 40 for line in progress), progress


def test_ctrl_c_on_the_terminal(data: Path) -> None:
    with process(*shell(data, f"{ONCE}; sleep {NAP}"), columns=100, TMPDIR=os.environ["TMPDIR"]) as running:
        running.until(lambda: sandboxes.processes(f"sleep\0{NAP}"))
        running.type(b"\x03")
        assert running.ended() == 130
        assert "Stopping" in running.plain and "cancelled after" in running.plain
        assert running.output.rindex("\x1b[?25h") > running.output.rindex("\x1b[?25l")
    assert sandboxes.processes(NAP) == []


# ── and the rest ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_help_is_quick_and_says_what_exit_codes_mean() -> None:
    """A third of a second of one processor, on an idle machine: the best of some."""
    spent = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, "-m", "turngate", "--help"], cwd=ROOT, capture_output=True, check=True)
        after = os.times()
        spent.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(spent) < scaled(0.25), spent
    for words in (["run"], ["show"], ["agents"], ["agents", "check"], ["agents", "install"], ["serve"], ["certify"]):
        assert ran(*words, "--help").exit_code == 0
    said = " ".join(ran("run", "--help").stdout.split())
    assert "130 if stopped by Ctrl-C" in said


def test_help_loads_nothing_heavy() -> None:
    heavy = (
        "numpy",
        "aiohttp",
        "tokenizers",
        "jinja2",
        "tiktoken",
        "uvicorn",
        "starlette",
        "msgspec",
        "orjson",
        "jmespath",
    )
    code = f"import sys, turngate.cli.main; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_output_that_nobody_reads_to_the_end(data: Path) -> None:
    words = [sys.executable, "-m", "turngate", *map(str, shell(data, "true"))]
    done = subprocess.run(["/bin/sh", "-c", f"{shlex.join(words)} | head -1"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and "Traceback" not in done.stderr, done.stderr
