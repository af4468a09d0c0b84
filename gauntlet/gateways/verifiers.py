"""verifiers' interception server with its training client: renders chat itself, vLLM's `/inference/v1/generate`.

It is a library without a program: `inside/verifiers_serve.py` runs it as a rollout does, and adds a port for sessions.
"""

from __future__ import annotations

from pathlib import Path

import aiohttp

from gauntlet.engine import MODEL
from gauntlet.gateways.base import PACKAGE, Gateway, Record, Row, Session, runs
from gauntlet.tokens import default_model


class Verifiers(Gateway):
    name = "verifiers"
    about = "verifiers 0.4.0, training client with the qwen3 renderer"
    dialects = ("chat",)
    requirements = ("verifiers==0.4.0",)

    def command(self, engine_url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        program = str(PACKAGE / "inside" / "verifiers_serve.py")
        return [str(self.python), program, str(self.port), engine_url, str(default_model()), MODEL], {}

    async def open(self, http: aiohttp.ClientSession, rollout: str) -> Session:
        async with http.post(f"{self.url}/open/{rollout}") as response:
            response.raise_for_status()
            opened = await response.json()
        return Session(rollout, opened["base_url"].rstrip("/").removesuffix("/v1"), opened["key"])

    async def record(self, http: aiohttp.ClientSession, session: Session) -> Record:
        async with http.post(f"{self.url}/finish/{session.id}") as response:
            response.raise_for_status()
            rows = [Row(row["ids"], row["mask"], row["logprobs"]) for row in await response.json()]
        return Record(list({turn for row in rows for turn in runs(row)}), rows)
