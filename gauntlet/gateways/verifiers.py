"""verifiers' interception server.

With its training client, it renders chat itself and calls vLLM's `/inference/v1/generate`. With its evaluation client, it relays three
dialects to an endpoint that supports them, and records text without ids. It is a library without a program. `inside/verifiers_serve.py`
runs it as a rollout does, and adds a port for sessions.
"""

from __future__ import annotations

from pathlib import Path

import aiohttp

from gauntlet.gateways.base import PACKAGE, Gateway, Record, Row, Session, Turn, trained_spans
from gauntlet.sampler import MODEL
from gauntlet.tokens import model_folder


class Verifiers(Gateway):
    name = "verifiers"
    about = "verifiers 0.4.0, training client with the qwen3 renderer"
    dialects: tuple[str, ...] = ("chat",)
    requirements = ("verifiers==0.4.0",)
    client = "train"

    def command(self, engine_url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        program = str(PACKAGE / "inside" / "verifiers_serve.py")
        return [str(self.python), program, str(self.port), engine_url, str(model_folder()), MODEL, self.client], {}

    async def open(self, http: aiohttp.ClientSession, rollout: str) -> Session:
        async with http.post(f"{self.url}/open/{rollout}") as response:
            response.raise_for_status()
            opened = await response.json()
        return Session(rollout, opened["base_url"].rstrip("/").removesuffix("/v1"), opened["key"])

    async def record(self, http: aiohttp.ClientSession, session: Session) -> Record:
        async with http.post(f"{self.url}/finish/{session.id}") as response:
            response.raise_for_status()
            data = await response.json()
        if not self.trains:
            return Record([Turn(text="recorded as text")] * data["answered"])
        rows = [Row(row["ids"], row["mask"], row["logprobs"]) for row in data["rows"]]
        return Record(list({turn for row in rows for turn in trained_spans(row)}), rows)


class VerifiersRelay(Verifiers):
    name = "verifiers-relay"
    about = "verifiers 0.4.0, evaluation client: relays to vLLM's chat, responses and messages endpoints"
    dialects = ("chat", "responses", "messages")
    trains = False
    client = "eval"
