"""The snippets of docs/mcp.md run as they are."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.kit import ROOT
from tests.mcp import kit
from tests.speed import scaled
from turngate.service.config import load_config

pytestmark = [pytest.mark.process, pytest.mark.full]

PAGE = (ROOT / "docs" / "mcp.md").read_text()


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def test_settings_snippets_are_valid(tmp_path: Path) -> None:
    settings, stdio, http = snippets("toml")
    (file := tmp_path / "turngate.toml").write_text(settings)
    assert list(load_config(file).endpoints) == ["vllm://Qwen3-8B", "anthropic://claude"]
    assert tomllib.loads(stdio)["mcp_servers"]["turngate"]["args"][0] == "mcp"
    assert tomllib.loads(http)["mcp_servers"]["turngate"]["bearer_token_env_var"] == "TURNGATE_MCP_KEY"
    [claude] = snippets("json")
    assert "${TURNGATE_MCP_KEY}" in json.loads(claude)["mcpServers"]["turngate"]["headers"]["Authorization"]


def test_python_client_over_stdio(stdio: kit.Server) -> None:
    program = snippets("python")[0].replace("vllm://Qwen3-8B", kit.MODEL)
    stdio.config.write_text(stdio.config.read_text().replace("exec python3 -", "touch hello.txt"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=stdio.folder,
        env={**stdio.env, "PATH": path, "HOME": os.environ["HOME"]},
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"1\.0 [0-9.]+\n", done.stdout)


async def test_python_client_over_http(http: kit.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_MCP_KEY", kit.KEY)
    names: dict[str, Any] = {}
    exec(snippets("python")[1], names)
    found = await asyncio.wait_for(names["endpoints"](http.url), scaled(20))
    assert [one["key"] for one in found] == [kit.MODEL, "openai://hosted"]
