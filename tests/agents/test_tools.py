"""Host tools as commands: the script works with any interpreter in the sandbox, and its key stays unreadable."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kit import Running, gateway, until
from tests.needs import require
from tests.speed import scaled
from turngate.agents.host_tools import build_shim
from turngate.agents.install import find_node
from turngate.errors import AgentError
from turngate.rollout.connection import Connection
from turngate.sandboxes import door
from turngate.trace.tool_schema import HostTool

pytestmark = pytest.mark.process

ANSWER = {
    "name": "answer",
    "description": "Hand in the answer; it's final.",
    "schema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}
TOOL = HostTool(**ANSWER)  # type: ignore[arg-type]
NEEDED = ("sh", "cat", "mktemp", "rm")


class Result(NamedTuple):
    code: int
    out: str
    err: str


def _interpreter(name: str) -> Path:
    found = sys.executable if name == "python3" else shutil.which(name) or (name == "node" and find_node())
    if not found:
        require(name)
    return Path(found)


def install_tool(folder: Path, interpreter: str, key: str) -> Path:
    """Create a PATH with only the basic programs, the tool and one interpreter."""
    programs = folder / "bin"
    programs.mkdir()
    for name in NEEDED:
        (programs / name).symlink_to(shutil.which(name) or "")
    if interpreter:
        (programs / interpreter).symlink_to(_interpreter(interpreter))
    (folder / "key").write_text(key + "\n")
    (folder / "key").chmod(0o600)
    script = programs / "answer"
    script.write_text(build_shim(TOOL, "GATE_URL", str(folder / "key")))
    script.chmod(0o755)
    return programs


async def run(folder: Path, *arguments: str, stdin: str | None = None, **env: str) -> Result:
    process = await asyncio.create_subprocess_exec(
        str(folder / "bin" / "answer"),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        env={"PATH": str(folder / "bin"), "http_proxy": "http://127.0.0.1:9", **env},
    )
    out, err = await asyncio.wait_for(process.communicate((stdin or "").encode()), scaled(20))
    return Result(process.returncode or 0, out.decode(), err.decode())


async def open_session(g: Running, folder: Path, interpreter: str, **tool: object) -> str:
    session = await g.open(tools=[{**ANSWER, **tool}])
    install_tool(folder, interpreter, session.key)
    return session.id


@pytest.mark.parametrize("interpreter", ["python3", "node", "curl"])
async def test_tool_call_with_each_interpreter(tmp_path: Path, interpreter: str) -> None:
    async with gateway() as g:
        session = await open_session(g, tmp_path, interpreter, reply={"taken": "ja, schön"})
        (tmp_path / "json.py").write_text("raise SystemExit('the agent's own')")  # must not be imported
        text = 'it\'s "quoted"\n$HOME `x` ü'
        sent = '{"text": "it\'s \\"quoted\\"\\n$HOME `x` ü"}'
        for result in (
            await run(tmp_path, sent, GATE_URL=g.root),
            await run(tmp_path, stdin=sent, GATE_URL=g.root + "/v1/"),
        ):
            assert result == Result(0, '{"taken":"ja, schön"}\n', "")
        wrong = await run(tmp_path, '{"txt": 1}', GATE_URL=g.root)
        assert wrong.code == 1 and "text" in wrong.err and not wrong.out
        calls = (await g.admin.get(f"/admin/sessions/{session}/tools")).json()["calls"]
        assert [c["arguments"] for c in calls] == [{"text": text}] * 2
        unreachable = await run(tmp_path, sent, GATE_URL="http://127.0.0.1:9")
        assert unreachable.code == 1 and unreachable.err and not unreachable.out


@pytest.mark.parametrize("interpreter", ["python3", "node", "curl"])
@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (b'HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{"taken"', "answer is incomplete|transfer closed"),
        (b'HTTP/1.1 400 No\r\ncontent-length: 99\r\n\r\n{"error"', "answer is incomplete|transfer closed"),
        (b"nonsense\r\n\r\n", "answer is incomplete or invalid|Parse Error|HTTP/0.9"),
    ],
    ids=["incomplete body", "incomplete error", "invalid status line"],
)
async def test_broken_answer_is_a_short_error(tmp_path: Path, interpreter: str, response: bytes, problem: str) -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(response)
        writer.close()

    install_tool(tmp_path, interpreter, "k")
    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        result = await run(tmp_path, "{}", GATE_URL=f"http://127.0.0.1:{port}")
    assert result.code == 1 and not result.out
    assert re.search(problem, result.err) and result.err.count("\n") == 1


@pytest.mark.parametrize("interpreter", ["python3", "node", "curl"])
async def test_key_is_not_in_command_lines_or_environments(tmp_path: Path, interpreter: str) -> None:
    async with gateway() as g:
        session = await open_session(g, tmp_path, interpreter, wait_s=600)
        key = (tmp_path / "key").read_text().strip()
        running = g.start(run(tmp_path, '{"text": "x"}', GATE_URL=g.root))
        await until(lambda: g.live(session).pending_tool_calls, 15)
        for process in Path("/proc").glob("[0-9]*"):
            for file in ("cmdline", "environ"):
                try:
                    assert key.encode() not in (process / file).read_bytes(), process
                except OSError:
                    continue
        assert not any(key in path.read_text() for path in (tmp_path / "bin").iterdir() if not path.is_symlink())
        answered = await g.admin.post(f"/admin/sessions/{session}/tools/1/answer", json={"reply": {"hint": 7}})
        assert answered.status_code == 200
        assert await running == Result(0, '{"hint":7}\n', "")


async def test_tool_call_through_sandbox_door(tmp_path: Path) -> None:
    async with gateway() as g, door.open_door(g.root) as sandbox_door:
        session = await open_session(g, tmp_path, "python3")
        assert await run(tmp_path, '{"text": "x"}', GATE_URL=sandbox_door.address) == Result(0, '{"ok":true}\n', "")
        [call] = (await g.admin.get(f"/admin/sessions/{session}/tools")).json()["calls"]
        assert call["arguments"] == {"text": "x"}
        connection = Connection("", 0)
        for method, path in (("GET", "/v1/tools"), ("POST", "/v1/tools/answer")):
            connection.count_call(method, path)
        assert connection.generations == 0  # a tool call samples nothing


async def test_usage_errors_and_help(tmp_path: Path) -> None:
    install_tool(tmp_path, "", "k")
    assert (await run(tmp_path, "{}", GATE_URL="http://127.0.0.1:9")) == Result(
        2, "", "answer: needs python3, node or curl\n"
    )
    assert (await run(tmp_path, "{}")) == Result(2, "", "answer: GATE_URL is not set\n")
    two = await run(tmp_path, "a", "b", GATE_URL="http://127.0.0.1:9")
    assert two.code == 2 and "one JSON object" in two.err
    help_text = await run(tmp_path, "--help")
    assert help_text.code == 0 and "it's final" in help_text.out and '"required"' in help_text.out
    with pytest.raises(AgentError, match="environment variable"):
        build_shim(TOOL, "A-B; rm", "/key")
