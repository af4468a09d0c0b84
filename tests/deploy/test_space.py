"""`deploy/space/deploy.py` as a person runs it, against a stand-in of the Hugging Face Hub that `huggingface_hub` talks to."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tests.speed import scaled

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "space" / "deploy.py"
TOKEN = "hf_" + "5ec2e7" * 6
KEY = "marked-admin-key-5ec2e7"


class Hub:
    """What of the Hub's API the script needs, for one Space."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = {} if files is None else files
        self.made: list[dict[str, object]] = []
        self.secrets: dict[str, str] = {}
        self.asked: list[str] = []
        self.commits = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(f"{request.method} {request.path}")
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "Invalid username or password."}, status=401)
        match request.method, request.path.strip("/").split("/"):
            case "POST", ["api", "repos", "create"]:
                self.made.append(await request.json())
                return web.json_response({"url": f"{self.url}/spaces/someone/gate"})
            case "GET", ["api", "spaces", "someone", "gate"]:
                return web.json_response({"id": "someone/gate", "sha": "0" * 40, **self.siblings()})
            case "GET", ["api", "spaces", "someone", "gate", "revision", "main"]:
                return web.json_response({"id": "someone/gate", "sha": "0" * 40, **self.siblings()})
            case "GET", ["api", "spaces", "someone", "gate", "tree", *_]:
                entries = [
                    {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                    for name, content in self.files.items()
                ]
                return web.json_response(entries)
            case "POST", ["api", "spaces", "someone", "gate", "secrets"]:
                asked = await request.json()
                self.secrets[asked["key"]] = asked["value"]
                return web.json_response({})
            case "POST", ["api", "validate-yaml"]:
                return web.json_response({"errors": [], "warnings": []})
            case "POST", ["api", "spaces", "someone", "gate", "preupload", "main"]:
                names = [file["path"] for file in (await request.json())["files"]]
                modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
                return web.json_response({"files": modes})
            case "POST", ["api", "spaces", "someone", "gate", "commit", "main"]:
                self.commit((await request.read()).decode())
                self.commits += 1
                commit = {"commitUrl": f"{self.url}/spaces/someone/gate/commit/{'1' * 40}", "commitOid": "1" * 40}
                return web.json_response({**commit, "success": True})
        return web.json_response({"error": f"no route {request.method} {request.path}"}, status=404)

    def siblings(self) -> dict[str, list[dict[str, str]]]:
        return {"siblings": [{"rfilename": name} for name in self.files]}

    def commit(self, lines: str) -> None:
        for line in map(json.loads, lines.splitlines()):
            match line["key"], line["value"]:
                case "file", file:
                    self.files[file["path"]] = base64.b64decode(file["content"])
                case "deletedFile", file:
                    del self.files[file["path"]]


@asynccontextmanager
async def served(hub: Hub) -> AsyncIterator[Hub]:
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{path:.*}", hub.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield hub
    finally:
        await runner.cleanup()


async def deployed(*words: str | Path, **env: str) -> tuple[int, str]:
    """Its exit code, and everything that it printed: in which there is no secret."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TURNGATE", "HUGGING"))}
    environment = {**clean, "TURNGATE_ADMIN_KEY": KEY, "NO_PROXY": "127.0.0.1", **env}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        SCRIPT,
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={name: value for name, value in environment.items() if value},
    )
    printed, _ = await asyncio.wait_for(process.communicate(), scaled(60))
    output = printed.decode()
    assert process.returncode is not None
    assert TOKEN not in output and KEY not in output
    return process.returncode, output


async def test_a_space_is_made_and_brought_up_to_date() -> None:
    async with served(Hub()) as hub:
        hub_is = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        code, said = await deployed("someone/gate", **hub_is)
        assert code == 0, said
        assert f"{hub.url}/spaces/someone/gate" in said and "It is private" in said
        [made] = hub.made
        assert (made["type"], made["sdk"], made["visibility"]) == ("space", "docker", "private")
        assert (hub.secrets, hub.commits) == ({"TURNGATE_ADMIN_KEY": KEY}, 1)
        for name in ("turngate/__init__.py", "turngate/agents/catalog/pi.toml", "pyproject.toml"):
            assert hub.files[name] == (ROOT / name).read_bytes()
        assert hub.files["README.md"].startswith(b"---\ntitle: Turngate\n") and b"USER 1000" in hub.files["Dockerfile"]
        everything = b"\n".join(hub.files.values())
        assert KEY.encode() not in everything and TOKEN.encode() not in everything
        assert not any("__pycache__" in name or name.startswith(("tests/", "data")) for name in hub.files)

        hub.files["turngate/old.py"] = b""
        code, said = await deployed("someone/gate", "--public", **hub_is)
        assert code == 0 and "It is private" not in said, said
        assert "turngate/old.py" not in hub.files and "turngate/__init__.py" in hub.files


async def test_a_dry_run_shows_all_of_it_and_asks_nobody(tmp_path: Path) -> None:
    async with served(Hub()) as hub:
        code, said = await deployed("someone/gate", "--dry-run", "--stage", tmp_path / "space", HF_ENDPOINT=hub.url)
        assert code == 0 and said.endswith("nothing was sent\n"), said
        assert "secrets: TURNGATE_ADMIN_KEY" in said and hub.asked == []
        shown = {line.split()[1] for line in said.splitlines() if line.startswith("  ") and line.count(" ") > 3}
        for file in (tmp_path / "space").rglob("*"):
            assert file.is_dir() or str(file.relative_to(tmp_path / "space")) in shown


async def test_a_space_that_holds_something_else_is_left_alone() -> None:
    theirs = {"app.py": b"print('mine')", "README.md": b"mine"}
    async with served(Hub(dict(theirs))) as hub:
        code, said = await deployed("someone/gate", HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
        assert (code, hub.files, hub.secrets) == (2, theirs, {})
        assert said.endswith("this Space holds something else; choose another name, or delete it first\n")


async def test_what_does_not_fit_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async with served(Hub()) as hub:
        hub_is = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        ours = (ROOT / "deploy" / "space" / "serve.toml").read_text()

        async def refused(config: str, *words: str | Path, **env: str) -> str:
            file = tmp_path / "serve.toml"
            file.write_text(config)
            code, said = await deployed(*(words or ("someone/gate",)), "--config", file, **{**hub_is, **env})
            assert code == 2, said
            return said.replace(f"{file}: ", "").splitlines()[-1]

        cases = await asyncio.gather(
            deployed(**hub_is),
            deployed("gate", **hub_is),
            deployed("someone/gate", **{**hub_is, "TURNGATE_ADMIN_KEY": ""}),
            deployed("someone/gate", HF_ENDPOINT=hub.url),
        )
        assert [code for code, _ in cases] == [2, 2, 2, 2]
        assert "space: '' is not OWNER/NAME" in cases[0][1] and "space: 'gate' is not OWNER/NAME" in cases[1][1]
        assert "TURNGATE_ADMIN_KEY: is not set" in cases[2][1] and "HF_TOKEN: is not set" in cases[3][1]
        assert "port: a Space needs 7860, not 8700" in await refused(ours.replace("7860", "8700"))
        assert "did you mean port?" in await refused(ours.replace("port", "prot"))
        assert "serve.toml: holds the value of TURNGATE_ADMIN_KEY" in await refused(f"{ours}# {KEY}\n")
        assert "looks like a secret" in await refused(f"{ours}# sk-{'a1' * 20}\n")
        assert "give --secret ENGINE_KEY" in await refused(f'{ours}\nengine_key_env = "ENGINE_KEY"\n')
        assert hub.asked == []


async def test_a_data_folder_in_the_package_is_not_uploaded(tmp_path: Path) -> None:
    """The script looks at what it has laid out, wherever a file came from."""
    copy = tmp_path / "copy"
    for name in ("deploy/space", "deploy/docker", "turngate"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).symlink_to(ROOT / name) if name != "turngate" else (copy / name).mkdir()
    for name in ("pyproject.toml", "LICENSE"):
        (copy / name).symlink_to(ROOT / name)
    script = copy / "deploy.py"
    script.write_text(
        SCRIPT.read_text().replace("ROOT = Path(__file__).resolve().parents[2]", f"ROOT = Path({str(copy)!r})")
    )
    for planted in ("turngate/data/admin-key", "turngate/data/turngate.db", "turngate/.env"):
        file = copy / planted
        file.parent.mkdir(exist_ok=True)
        file.write_text("x")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, script, "someone/gate", "--dry-run"),
            env={**os.environ, "TURNGATE_ADMIN_KEY": KEY, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await asyncio.wait_for(process.communicate(), scaled(30))
        assert process.returncode == 2 and f"deploy: {planted}: databases, keys and data folders" in said.decode()
        file.unlink()


async def test_a_hub_that_refuses_or_is_not_there_is_told_in_a_line() -> None:
    async with served(Hub()) as hub:
        code, said = await deployed("someone/gate", HF_ENDPOINT=hub.url, HF_TOKEN="hf_wrong")
        assert code == 1 and "401" in said and "Traceback" not in said and "hf_wrong" not in said
    code, said = await deployed("someone/gate", HF_ENDPOINT="http://127.0.0.1:9", HF_TOKEN=TOKEN)
    assert code == 1 and said.splitlines()[-1].startswith("deploy: ") and "Traceback" not in said
