"""`deploy/space/deploy.py` against a stand-in for the Hugging Face Hub."""

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
    """The part of the Hub's API that the script uses, for one Space."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = {} if files is None else files
        self.created: list[dict[str, object]] = []
        self.secrets: dict[str, str] = {}
        self.requests: list[str] = []
        self.commits = 0
        self.url = ""

    async def respond(self, request: web.Request) -> web.Response:
        self.requests.append(f"{request.method} {request.path}")
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "Invalid username or password."}, status=401)
        match request.method, request.path.strip("/").split("/"):
            case "POST", ["api", "repos", "create"]:
                self.created.append(await request.json())
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
                secret = await request.json()
                self.secrets[secret["key"]] = secret["value"]
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
async def serve_hub(hub: Hub) -> AsyncIterator[Hub]:
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{path:.*}", hub.respond)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield hub
    finally:
        await runner.cleanup()


async def run_deploy(*words: str | Path, **env: str) -> tuple[int, str]:
    """Run the script. Return its exit code and output, after checking that the output has no secret."""
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


async def test_space_is_created_and_updated() -> None:
    async with serve_hub(Hub()) as hub:
        hub_env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        code, output = await run_deploy("someone/gate", **hub_env)
        assert code == 0, output
        assert f"{hub.url}/spaces/someone/gate" in output and "It is private" in output
        [created] = hub.created
        assert (created["type"], created["sdk"], created["visibility"]) == ("space", "docker", "private")
        assert (hub.secrets, hub.commits) == ({"TURNGATE_ADMIN_KEY": KEY}, 1)
        for name in ("turngate/__init__.py", "turngate/agents/catalog/pi.toml", "pyproject.toml"):
            assert hub.files[name] == (ROOT / name).read_bytes()
        assert hub.files["README.md"].startswith(b"---\ntitle: Turngate\n") and b"USER 1000" in hub.files["Dockerfile"]
        everything = b"\n".join(hub.files.values())
        assert KEY.encode() not in everything and TOKEN.encode() not in everything
        assert not any("__pycache__" in name or name.startswith(("tests/", "data")) for name in hub.files)

        hub.files["turngate/old.py"] = b""
        code, output = await run_deploy("someone/gate", "--public", **hub_env)
        assert code == 0 and "It is private" not in output, output
        assert "turngate/old.py" not in hub.files and "turngate/__init__.py" in hub.files


async def test_dry_run_lists_files_and_sends_nothing(tmp_path: Path) -> None:
    async with serve_hub(Hub()) as hub:
        code, output = await run_deploy("someone/gate", "--dry-run", "--stage", tmp_path / "space", HF_ENDPOINT=hub.url)
        assert code == 0 and output.endswith("nothing was sent\n"), output
        assert "secrets: TURNGATE_ADMIN_KEY" in output and hub.requests == []
        shown = {line.split()[1] for line in output.splitlines() if line.startswith("  ") and line.count(" ") > 3}
        for file in (tmp_path / "space").rglob("*"):
            assert file.is_dir() or str(file.relative_to(tmp_path / "space")) in shown


async def test_unrelated_space_is_left_unchanged() -> None:
    unrelated = {"app.py": b"print('mine')", "README.md": b"mine"}
    async with serve_hub(Hub(dict(unrelated))) as hub:
        code, output = await run_deploy("someone/gate", HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
        assert (code, hub.files, hub.secrets) == (2, unrelated, {})
        assert output.endswith("this Space was not created by Turngate; choose a different name, or delete it first\n")


@pytest.mark.full
async def test_invalid_input_is_refused_before_any_request(tmp_path: Path) -> None:
    async with serve_hub(Hub()) as hub:
        hub_env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        config_text = (ROOT / "deploy" / "space" / "serve.toml").read_text()

        async def refused(config: str, *words: str | Path, **env: str) -> str:
            file = tmp_path / "serve.toml"
            file.write_text(config)
            code, output = await run_deploy(*(words or ("someone/gate",)), "--config", file, **{**hub_env, **env})
            assert code == 2, output
            return output.replace(f"{file}: ", "").splitlines()[-1]

        cases = await asyncio.gather(
            run_deploy(**hub_env),
            run_deploy("gate", **hub_env),
            run_deploy("someone/gate", **{**hub_env, "TURNGATE_ADMIN_KEY": ""}),
            run_deploy("someone/gate", HF_ENDPOINT=hub.url),
        )
        assert [code for code, _ in cases] == [2, 2, 2, 2]
        assert (
            "space must be OWNER/NAME, not ''" in cases[0][1] and "space must be OWNER/NAME, not 'gate'" in cases[1][1]
        )
        assert "TURNGATE_ADMIN_KEY is not set" in cases[2][1] and "HF_TOKEN is not set" in cases[3][1]
        assert "port must be 7860 on a Space, not 8700" in await refused(config_text.replace("7860", "8700"))
        assert "did you mean port?" in await refused(config_text.replace("port", "prot"))
        assert "serve.toml contains the value of TURNGATE_ADMIN_KEY" in await refused(f"{config_text}# {KEY}\n")
        assert "looks like a secret" in await refused(f"{config_text}# sk-{'a1' * 20}\n")
        assert "pass --secret ENGINE_KEY" in await refused(f'{config_text}\nengine_key_env = "ENGINE_KEY"\n')
        assert hub.requests == []


async def test_data_files_in_package_are_not_uploaded(tmp_path: Path) -> None:
    """The script checks the files it has collected, regardless of their source."""
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
        _, output = await asyncio.wait_for(process.communicate(), scaled(30))
        assert process.returncode == 2 and f"deploy: {planted}: databases, keys and data folders" in output.decode()
        file.unlink()


@pytest.mark.full
async def test_hub_errors_are_one_line() -> None:
    async with serve_hub(Hub()) as hub:
        code, output = await run_deploy("someone/gate", HF_ENDPOINT=hub.url, HF_TOKEN="hf_wrong")
        assert code == 1 and "401" in output and "Traceback" not in output and "hf_wrong" not in output
    code, output = await run_deploy("someone/gate", HF_ENDPOINT="http://127.0.0.1:9", HF_TOKEN=TOKEN)
    assert code == 1 and output.splitlines()[-1].startswith("deploy: ") and "Traceback" not in output
