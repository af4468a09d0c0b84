"""Turngate, through its public HTTP API."""

from __future__ import annotations

import sys
from pathlib import Path

import aiohttp

from gauntlet.engine import MODEL
from gauntlet.gateways.base import Gateway, Record, Row, Session, Turn
from gauntlet.tokens import default_model

_KEY = "gauntlet-admin-key"
_ADMIN = {"authorization": f"Bearer {_KEY}"}


class Turngate(Gateway):
    name = "turngate"
    about = "exact mode, vLLM's /v1/completions"
    dialects = ("chat", "responses", "messages", "gemini")

    def command(self, engine_url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        command = [sys.executable, "-m", "turngate", "serve", "--port", str(self.port), "--data", str(folder / "data")]
        command += [
            "--engine",
            "vllm",
            "--engine-url",
            engine_url,
            "--model",
            MODEL,
            "--tokenizer",
            str(default_model()),
        ]
        return command, {"TURNGATE_ADMIN_KEY": _KEY, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}

    async def open(self, http: aiohttp.ClientSession, rollout: str) -> Session:
        async with http.post(f"{self.url}/admin/sessions", json={"id": rollout}, headers=_ADMIN) as response:
            response.raise_for_status()
            opened = await response.json()
        return Session(opened["id"], self.url, opened["api_key"])

    async def record(self, http: aiohttp.ClientSession, session: Session) -> Record:
        path = f"{self.url}/admin/sessions/{session.id}"
        async with http.post(f"{path}/seal", json={}, headers=_ADMIN) as response:
            response.raise_for_status()
        async with http.get(f"{path}/trace", headers=_ADMIN) as response:
            trace = await response.json()
        async with http.get(f"{path}/samples", headers=_ADMIN) as response:
            samples = (await response.json())["samples"]
        turns = [Turn(tuple(node["ids"])) for node in trace["nodes"] if node["kind"] == "sampled"]
        return Record(turns, [Row(sample["ids"], sample["mask"], sample["logprobs"]) for sample in samples])
